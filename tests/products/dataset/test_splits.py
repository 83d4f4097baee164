"""Splits: sizes to the row, groups whole, the same lists in any order;
lists that are not as written are refused.
"""

import itertools
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.products.dataset import splits as s
from memcalib.products.dataset.duplicates import cross_split
from memcalib.products.micro.world import make_examples
from memcalib.problem import Example, sample_records
from memcalib.io.records import DataError

EXAMPLES = make_examples("long", 120, 3, "rl")
SIZES = {"train": {"cold_start": 30, "rl": 60}, "validation": 12, "test": 12}


def rows_of(groups):
    """Rows from a list of groups, each a list of strata; (rows, id -> group)."""
    rows = []
    group_of = {}
    for g, strata in enumerate(groups):
        for k, stratum in enumerate(strata):
            row = SimpleNamespace(id=f"r{g}-{k}", question=f"q{g}", stratum=stratum)
            rows.append(row)
            group_of[row.id] = f"g{g}"
    return rows, group_of


def split(rows, group_of, sizes, seed=0):
    return s.split_examples(rows, sizes, by=lambda row: row.stratum, groups=group_of, seed=seed)


strata = st.sampled_from([("health", "1"), ("health", "2"), ("coding", "1"), ("general", "3")])
group_lists = st.lists(st.lists(strata, min_size=1, max_size=4), min_size=1, max_size=12)


@st.composite
def problems(draw):
    groups = draw(group_lists)
    free = sum(map(len, groups))
    sizes = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        if free:
            sizes[name] = draw(st.integers(1, free))
            free -= sizes[name]
    return groups, sizes


def possible(groups, sizes):
    """Whether groups of these lengths can fill the sizes exactly; every way is tried."""
    reached = {tuple(sizes.values())}  # what is still free in each split
    for group in groups:
        with_group = set()
        for free in reached:
            for k in range(len(free)):
                if free[k] >= len(group):
                    with_group.add((*free[:k], free[k] - len(group), *free[k + 1 :]))
        reached |= with_group
    return tuple(0 for _ in sizes) in reached


@given(problems(), st.integers(0, 3))
@settings(max_examples=60)
def test_exact_whole_and_disjoint_or_refused_when_impossible(problem, seed):
    groups, sizes = problem
    rows, group_of = rows_of(groups)
    if not possible(groups, sizes):
        with pytest.raises(ValueError, match="would split a group"):
            split(rows, group_of, sizes, seed)
        return
    splits = split(rows, group_of, sizes, seed)
    assert {name: len(ids) for name, ids in splits.items()} == sizes
    split_of = {}
    for name, ids in splits.items():
        assert ids == sorted(ids)
        split_of.update(dict.fromkeys(ids, name))
    assert len(split_of) == sum(sizes.values())
    assert split_of.keys() <= group_of.keys()
    splits_of_group = {}
    for row_id, group in group_of.items():
        splits_of_group.setdefault(group, set()).add(split_of.get(row_id))
    assert all(len(names) == 1 for names in splits_of_group.values())
    mixed = random.Random(seed).sample(rows, len(rows))
    assert split(mixed, group_of, sizes, seed) == splits


@given(st.lists(strata, min_size=8, max_size=80), st.integers(0, 5))
def test_single_rows_are_divided_as_evenly_as_whole_numbers_allow(row_strata, seed):
    rows, group_of = rows_of([[stratum] for stratum in row_strata])
    sizes = {"train": len(rows) // 2, "test": len(rows) // 4}
    splits = split(rows, group_of, sizes, seed)
    stratum_of = {row.id: row.stratum for row in rows}
    for length in (1, 2):
        cells = Counter(stratum[:length] for stratum in row_strata)
        for name, ids in splits.items():
            cells_of_split = Counter(stratum_of[row_id][:length] for row_id in ids)
            for cell, count in cells.items():
                assert abs(cells_of_split[cell] - count * sizes[name] / len(rows)) < 1


@given(
    group_lists,
    st.sampled_from([{"a": 0.5, "b": 0.5}, {"a": 0.8, "b": {"c": 0.1, "d": 0.05}}, {"a": 1.0}]),
)
def test_shares_take_what_groups_allow(groups, sizes):
    rows, group_of = rows_of(groups)
    splits = split(rows, group_of, sizes)
    counts = s.split_sizes(sizes, len(rows))
    placed = list(itertools.chain.from_iterable(splits[name] for name in counts))
    assert len(placed) == len(set(placed))
    missed = sum(abs(len(splits[name]) - count) for name, count in counts.items())
    assert missed <= max(map(len, groups)) * len(counts)
    for name, undivided in s.split_parts(sizes).items():
        of_parts = itertools.chain.from_iterable(splits[part_name] for part_name in undivided)
        assert splits[name] == sorted(of_parts)


def test_published_sizes_with_published_mixture():
    groups = []
    for domain, count in {"health": 7500, "general": 3750, "coding": 3750}.items():
        for k in range(count):
            groups.append([(domain, str(k % 4 // 2))])
    rows, group_of = rows_of(groups)
    splits = split(rows, group_of, s.PUBLISHED_SIZES)
    assert {name: len(ids) for name, ids in splits.items()} == {
        "train": 12_000,
        "cold_start": 4000,
        "rl": 8000,
        "validation": 1500,
        "test": 1500,
    }
    domain_of = {row.id: row.stratum[0] for row in rows}
    domains = {name: Counter(domain_of[i] for i in splits[name]) for name in ("test", "cold_start")}
    assert domains["test"] == {"health": 750, "general": 375, "coding": 375}
    assert domains["cold_start"] == {"health": 2000, "general": 1000, "coding": 1000}


def test_another_seed_gives_other_rows():
    rows, group_of = rows_of([[("health", "1")]] * 60)
    lists = [split(rows, group_of, {"test": 20}, seed)["test"] for seed in range(4)]
    assert all(first != second for first, second in itertools.combinations(lists, 2))


def test_repeated_questions_are_spread_over_the_splits():
    pairs = [[("health", "1")] * 2] * 100
    singles = [[("health", "1")]] * 100
    rows, group_of = rows_of(pairs + singles)
    splits = split(rows, group_of, {"train": 240, "test": 60})
    rows_of_group = Counter(group_of[row_id] for row_id in splits["test"])
    assert 18 <= list(rows_of_group.values()).count(2) <= 22


def test_groups_are_found_when_none_are_given():
    splits = s.split_examples(EXAMPLES, SIZES)
    by_id = {example.id: example for example in EXAMPLES}
    examples_of_split = {}
    for name in s.split_sizes(SIZES, 120):
        examples_of_split[name] = [by_id[example_id] for example_id in splits[name]]
    assert cross_split(examples_of_split) == []
    assert s.split_examples(EXAMPLES[::-1], SIZES) == splits


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "at least one"),
        ({"a": 0}, "above 0"),
        ({"a": -1}, "above 0"),
        ({"a": True}, "above 0"),
        ({"a": "10"}, "above 0"),
        ({"a": float("nan")}, "above 0"),
        ({"a": {}}, "above 0"),
        ({"a": 5, "b": 0.5}, "either counts or shares"),
        ({"a": 121}, "at most 120"),
        ({"a": 0.7, "b": 0.4}, "at most 1"),
        ({"../a": 5}, "letters, digits"),
        ({"": 5}, "letters, digits"),
        ({1: 5}, "letters, digits"),
        ({"a": 5, "b": {"a": 5}}, "twice"),
        ({"a": {"a": 5}}, "twice"),
    ],
)
def test_sizes_that_cannot_be(sizes, words):
    with pytest.raises(ValueError, match=words):
        s.split_examples(EXAMPLES, sizes)


def test_repeated_ids_and_ids_of_two_lines_are_refused():
    with pytest.raises(DataError, match="2 times"):
        s.split_examples([*EXAMPLES, EXAMPLES[0]], {"a": 5})
    odd = EXAMPLES[0].model_copy(update={"id": "one\ntwo"})
    with pytest.raises(DataError, match="one line"):
        s.split_examples([odd, *EXAMPLES[1:]], {"a": 5})
    with pytest.raises(DataError, match="name of a group"):
        s.split_examples(EXAMPLES, {"a": 5}, groups={})


@pytest.mark.parametrize(
    ("extra", "level"),
    [
        ({"difficulty_level": "level_2"}, "level_2"),
        ({"composite_block_revision": {"difficulty_level": "level_3"}}, "level_3"),
        ({"composite_block_revision": "x"}, "level_1"),
        ({}, "level_1"),
    ],
)
def test_difficulty_is_the_recorded_one_or_by_blocks(extra, level):
    record = sample_records()[0]
    assert s.stratum(Example(**dict(record), **extra)) == (record.domain, level)


@pytest.fixture
def written(tmp_path):
    splits = s.split_examples(EXAMPLES, SIZES, seed=5)
    s.write_splits(tmp_path, EXAMPLES, splits, SIZES, seed=5)
    return tmp_path, splits


def test_what_is_read_is_what_was_written(written):
    folder, splits = written
    assert s.read_splits(folder) == splits
    assert s.read_splits(folder, iter(EXAMPLES[::-1])) == splits
    assert json.loads((folder / "splits.json").read_text())["seed"] == 5
    assert sorted(path.name for path in folder.iterdir()) == [
        "cold_start-ids.txt",
        "rl-ids.txt",
        "splits.json",
        "test-ids.txt",
        "train-ids.txt",
        "validation-ids.txt",
    ]


def with_one_more(lines):
    return "\n".join([*lines, "x"]) + "\n"


def with_two_swapped(lines):
    first, second, *others = lines
    return "\n".join([second, first, *others]) + "\n"


def with_other_line_ends(lines):
    return "\r\n".join(lines) + "\r\n"


def without_lines(lines):
    return ""


@pytest.mark.parametrize(
    "change", [with_one_more, with_two_swapped, with_other_line_ends, without_lines]
)
def test_a_changed_list_is_named(written, change):
    folder, splits = written
    (folder / "test-ids.txt").write_bytes(change(splits["test"]).encode())
    with pytest.raises(DataError, match="test-ids.txt") as refused:
        s.read_splits(folder)
    assert len(refused.value.violations) == 1


def test_a_list_that_is_gone_is_named(written):
    folder, _ = written
    (folder / "test-ids.txt").unlink()
    with pytest.raises(DataError, match=r"test-ids\.txt.*no such file") as refused:
        s.read_splits(folder)
    assert len(refused.value.violations) == 1


def test_other_data_are_refused(written):
    folder, splits = written
    first, *others = EXAMPLES
    changed = first.model_copy(update={"question": first.question + " Thanks."})
    with pytest.raises(DataError, match="dataset"):
        s.read_splits(folder, [changed, *others])
    without_one = [example for example in EXAMPLES if example.id != splits["test"][0]]
    with pytest.raises(DataError) as refused:
        s.read_splits(folder, without_one)
    assert [fault.rule for fault in refused.value.violations] == ["dataset", "id"]


def one_of_a_pair(ids):
    """The id of an example whose question stands in the list once more."""
    examples = [example for example in EXAMPLES if example.id in ids]
    for first, second in itertools.combinations(examples, 2):
        if first.question == second.question:
            return first.id
    raise AssertionError("no question stands there twice")


def test_lists_with_faults_are_not_written(tmp_path):
    splits = s.split_examples(EXAMPLES, SIZES)
    crossing = one_of_a_pair(splits["test"])
    moved = dict(splits)
    moved["test"] = [row_id for row_id in splits["test"] if row_id != crossing]
    moved["rl"] = [*splits["rl"], crossing]
    moved["train"] = moved["rl"] + splits["cold_start"]
    repeated_id = splits["validation"][0]
    faulty = {
        "each question in one split": moved,
        "ids that differ from those of its parts": {**splits, "train": splits["rl"]},
        "again, first in": {**splits, "test": [*splits["test"], repeated_id]},
        "no such example": {**splits, "test": [*splits["test"], "nobody"]},
    }
    for message, lists in faulty.items():
        with pytest.raises(DataError, match=message):
            s.write_splits(tmp_path / "x", EXAMPLES, lists, SIZES)
    with pytest.raises(ValueError, match="allowed: the names given in sizes"):
        s.write_splits(tmp_path / "x", EXAMPLES, {"test": splits["test"]}, SIZES)
    everything = {"test": len(EXAMPLES) + 1}
    with pytest.raises(ValueError, match="the number of examples"):
        s.write_splits(tmp_path / "x", EXAMPLES, {"test": []}, everything)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"sizes": 3}', "\xff", '{"sizes": {"a": 1}, "seed": 1, "examples": 1}'],
)
def test_a_broken_splits_json(tmp_path, text):
    (tmp_path / "splits.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"splits\.json"):
        s.read_splits(tmp_path)
    with pytest.raises(FileNotFoundError):
        s.read_splits(tmp_path / "nowhere")


def test_the_table_counts_what_is_in_the_lists(written):
    _, splits = written
    table = s.split_table(EXAMPLES, splits).set_index("split")
    domains = sorted({example.domain for example in EXAMPLES})
    assert table.loc["all", "examples"] == 120
    assert (table[domains].sum(axis=1).round(6) == 100).all()
    questions = {example.question for example in EXAMPLES if example.id in splits["test"]}
    assert table.loc["test", "questions"] == len(questions)
