"""Splits: sizes to the row, groups whole, the same lists in any order; lists that are not as written are refused."""

import itertools
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.dataset import splits as s
from memcalib.dataset.duplicates import cross_split
from memcalib.micro.world import make_examples
from memcalib.problem import Example, sample_records
from memcalib.io.records import DataError

EXAMPLES = make_examples("long", 120, 3, "rl")
SIZES = {"train": {"cold_start": 30, "rl": 60}, "validation": 12, "test": 12}


def rows_of(groups):
    """Rows from a list of groups, each a list of strata; (rows, id -> group)."""
    rows = []
    home = {}
    for g, strata in enumerate(groups):
        for k, stratum in enumerate(strata):
            row = SimpleNamespace(id=f"r{g}-{k}", question=f"q{g}", stratum=stratum)
            rows.append(row)
            home[row.id] = f"g{g}"
    return rows, home


def split(rows, home, sizes, **more):
    return s.split_examples(rows, sizes, by=lambda row: row.stratum, groups=home, **more)


strata = st.sampled_from([("health", "1"), ("health", "2"), ("coding", "1"), ("general", "3")])
group_lists = st.lists(st.lists(strata, min_size=1, max_size=4), min_size=1, max_size=12)


@st.composite
def problems(draw):
    groups = draw(group_lists)
    n = sum(map(len, groups))
    sizes = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        left = n - sum(sizes.values())
        if left:
            sizes[name] = draw(st.integers(1, left))
    return groups, sizes


def possible(groups, sizes):
    """Whether groups of these lengths can fill the sizes exactly; every way is tried."""
    reached = {tuple(sizes.values())}
    for group in groups:
        more = set()
        for room in reached:
            for k in range(len(room)):
                if room[k] >= len(group):
                    more.add((*room[:k], room[k] - len(group), *room[k + 1 :]))
        reached |= more
    return tuple(0 for _ in sizes) in reached


@given(problems(), st.integers(0, 3))
@settings(max_examples=60)
def test_exact_whole_and_disjoint_or_refused_when_impossible(problem, seed):
    groups, sizes = problem
    rows, home = rows_of(groups)
    if not possible(groups, sizes):
        with pytest.raises(ValueError, match="tears a group"):
            split(rows, home, sizes, seed=seed)
        return
    found = split(rows, home, sizes, seed=seed)
    assert {name: len(ids) for name, ids in found.items()} == sizes
    placed = {i: name for name, ids in found.items() for i in ids}
    assert len(placed) == sum(sizes.values()) and placed.keys() <= home.keys()
    for group in set(home.values()):
        assert len({placed.get(i) for i, g in home.items() if g == group}) == 1
    mixed = random.Random(seed).sample(rows, len(rows))
    assert split(mixed, home, sizes, seed=seed) == found
    assert all(ids == sorted(ids) for ids in found.values())


@given(st.lists(strata, min_size=8, max_size=80), st.integers(0, 5))
def test_single_rows_are_divided_as_evenly_as_whole_numbers_allow(kinds, seed):
    rows, home = rows_of([[kind] for kind in kinds])
    n = len(rows)
    sizes = {"train": n // 2, "test": n // 4}
    found = split(rows, home, sizes, seed=seed)
    by_id = {row.id: row.stratum for row in rows}
    for k in (1, 2):
        whole = Counter(kind[:k] for kind in kinds)
        for name, ids in found.items():
            here = Counter(by_id[i][:k] for i in ids)
            for cell, count in whole.items():
                assert abs(here[cell] - count * sizes[name] / n) < 1


@given(
    group_lists,
    st.sampled_from([{"a": 0.5, "b": 0.5}, {"a": 0.8, "b": {"c": 0.1, "d": 0.05}}, {"a": 1.0}]),
)
def test_shares_take_what_groups_allow(groups, sizes):
    rows, home = rows_of(groups)
    found = split(rows, home, sizes)
    parts = s.split_parts(sizes)
    leaves = s.split_sizes(sizes, len(rows))
    placed = [i for name in leaves for i in found[name]]
    assert len(placed) == len(set(placed))
    largest = max(map(len, groups))
    assert sum(abs(len(found[name]) - count) for name, count in leaves.items()) <= largest * len(
        leaves
    )
    for name, inner in parts.items():
        assert found[name] == sorted(i for part in inner for i in found[part])


def test_published_sizes_with_published_mixture():
    mixture = {"health": 7500, "general": 3750, "coding": 3750}
    rows, home = rows_of(
        [[(domain, str(k % 4 // 2))] for domain, count in mixture.items() for k in range(count)]
    )
    found = split(rows, home, s.PUBLISHED_SIZES)
    by_id = {row.id: row.stratum[0] for row in rows}
    assert {name: len(ids) for name, ids in found.items()} == {
        "train": 12_000,
        "cold_start": 4000,
        "rl": 8000,
        "validation": 1500,
        "test": 1500,
    }
    assert Counter(by_id[i] for i in found["test"]) == {
        "health": 750,
        "general": 375,
        "coding": 375,
    }
    assert Counter(by_id[i] for i in found["cold_start"]) == {
        "health": 2000,
        "general": 1000,
        "coding": 1000,
    }


def test_another_seed_gives_other_rows():
    rows, home = rows_of([[("health", "1")]] * 60)
    lists = [split(rows, home, {"test": 20}, seed=seed)["test"] for seed in range(4)]
    assert all(a != b for a, b in itertools.combinations(lists, 2))


def test_repeated_questions_are_spread_over_the_splits():
    rows, home = rows_of([[("health", "1")] * 2] * 100 + [[("health", "1")]] * 100)
    found = split(rows, home, {"train": 240, "test": 60})
    pairs = Counter(Counter(home[i] for i in found["test"]).values())[2]
    assert 18 <= pairs <= 22


def test_groups_are_found_when_none_are_given():
    found = s.split_examples(EXAMPLES, SIZES)
    by_id = {example.id: example for example in EXAMPLES}
    assert (
        cross_split({name: [by_id[i] for i in found[name]] for name in s.split_sizes(SIZES, 120)})
        == []
    )
    assert s.split_examples(EXAMPLES[::-1], SIZES) == found


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
        ({"a": 5, "b": 0.5}, "counts alone or shares alone"),
        ({"a": 121}, "up to 120"),
        ({"a": 0.7, "b": 0.4}, "up to 1"),
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


def test_difficulty_is_the_recorded_one_or_by_blocks():
    record = sample_records()[0]
    assert s.stratum(Example(**dict(record), difficulty_level="level_2")) == (
        record.domain,
        "level_2",
    )
    old = Example(**dict(record), composite_block_revision={"difficulty_level": "level_3"})
    assert s.stratum(old)[1] == "level_3"
    assert (
        s.stratum(Example(**dict(record), composite_block_revision="x"))[1]
        == s.stratum(record)[1]
        == "level_1"
    )


@pytest.fixture
def written(tmp_path):
    found = s.split_examples(EXAMPLES, SIZES, seed=5)
    s.write_splits(tmp_path, EXAMPLES, found, SIZES, seed=5)
    return tmp_path, found


def test_what_is_read_is_what_was_written(written):
    folder, found = written
    assert s.read_splits(folder) == found == s.read_splits(folder, iter(EXAMPLES[::-1]))
    assert json.loads((folder / "splits.json").read_text())["seed"] == 5
    assert sorted(p.name for p in folder.iterdir()) == [
        "cold_start-ids.txt",
        "rl-ids.txt",
        "splits.json",
        "test-ids.txt",
        "train-ids.txt",
        "validation-ids.txt",
    ]


@pytest.mark.parametrize("change", ["append", "swap", "crlf", "remove", "empty"])
def test_a_changed_list_is_named(written, change):
    folder, _ = written
    path = folder / "test-ids.txt"
    lines = path.read_bytes().split(b"\n")[:-1]
    if change == "remove":
        path.unlink()
    else:
        new = {
            "append": [*lines, b"x"],
            "swap": [lines[1], lines[0], *lines[2:]],
            "crlf": lines,
            "empty": [],
        }[change]
        path.write_bytes(b"".join(line + (b"\r\n" if change == "crlf" else b"\n") for line in new))
    with pytest.raises(DataError, match="test-ids.txt") as caught:
        s.read_splits(folder)
    assert len(caught.value.violations) == 1


def test_other_data_are_refused(written):
    folder, found = written
    changed = [
        EXAMPLES[0].model_copy(update={"question": EXAMPLES[0].question + " Thanks."}),
        *EXAMPLES[1:],
    ]
    with pytest.raises(DataError, match="dataset"):
        s.read_splits(folder, changed)
    gone = [example for example in EXAMPLES if example.id != found["test"][0]]
    with pytest.raises(DataError) as caught:
        s.read_splits(folder, gone)
    assert [v.rule for v in caught.value.violations] == ["dataset", "id"]


def test_lists_with_faults_are_not_written(tmp_path):
    found = s.split_examples(EXAMPLES, SIZES)
    crossing = next(
        (a.id, b.id)
        for a in EXAMPLES
        for b in EXAMPLES
        if a.id in found["test"]
        and b.id in found["test"]
        and a.id != b.id
        and a.question == b.question
    )
    moved = {
        "test": [i for i in found["test"] if i != crossing[0]],
        "rl": [*found["rl"], crossing[0]],
    }
    moved["train"] = moved["rl"] + found["cold_start"]
    with pytest.raises(DataError, match="each question in one split"):
        s.write_splits(tmp_path / "x", EXAMPLES, found | moved, SIZES)
    with pytest.raises(DataError, match="other ids than those of its parts"):
        s.write_splits(tmp_path / "x", EXAMPLES, found | {"train": found["rl"]}, SIZES)
    with pytest.raises(DataError, match="again, first in"):
        s.write_splits(
            tmp_path / "x",
            EXAMPLES,
            found | {"test": [*found["test"], found["validation"][0]]},
            SIZES,
        )
    with pytest.raises(DataError, match="no such example"):
        s.write_splits(
            tmp_path / "x", EXAMPLES, found | {"test": [*found["test"], "nobody"]}, SIZES
        )
    with pytest.raises(ValueError, match="allowed are those of the sizes"):
        s.write_splits(tmp_path / "x", EXAMPLES, {"test": found["test"]}, SIZES)
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
    _, found = written
    table = s.split_table(EXAMPLES, found).set_index("split")
    domains = sorted({e.domain for e in EXAMPLES})
    assert (
        table.loc["all", "examples"] == 120 and (table[domains].sum(axis=1).round(6) == 100).all()
    )
    assert table.loc["test", "questions"] == len(
        {e.question for e in EXAMPLES if e.id in found["test"]}
    )
