"""Counts, shapes and plans: exact sums, bounds, the same result in any order, and plans that stay when rows join."""

import random
from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.dataset.grounding import content_words
from memcalib.dataset.stages import Draft, DraftAtom, DraftBlock
from memcalib.dataset.writing import (
    PhraseBook,
    Plan,
    cut_blocks,
    deal_phrases,
    lay_out,
    load_phrases,
    make_plans,
    own_sizes,
    plan_of,
    plan_rows,
    spread,
)
from memcalib.problem import Level
from memcalib.io.records import DataError
from memcalib.dataset.writing import (
    FAMILIES,
    PlanConfig,
    assign_shapes,
    difficulty,
    draw_shapes,
    draw_sizes,
    largest_remainder,
    room,
)

CONFIG = PlanConfig()
BOOK = load_phrases()
LEVELS = [
    (k, level, largest)
    for level, sizes in CONFIG.largest.items()
    for k in CONFIG.blocks
    for largest in sizes
]


def atom(number, passage, level="B"):
    text = f"Fact {number} of passage {passage}."
    name = f"p{passage}_a{number}"
    return DraftAtom(atom_id=name, text=text, ideal=level, origin="grounded", passage=passage)


def draft_of(i, sizes=(2, 1), levels="ABC", domain="general"):
    levels = iter(levels * 10)
    atoms = [
        atom(n, p, next(levels)) for p, size in enumerate(sizes, 1) for n in range(1, size + 1)
    ]
    return Draft(
        id=f"{domain}:{i}", domain=domain, question="What now?", query="What now?", atoms=atoms
    )


# Shares ------------------------------------------------------------------------------------------------------------------

weights = st.dictionaries(
    st.integers(0, 30), st.one_of(st.integers(0, 50), st.floats(0, 9)), min_size=1
).filter(lambda table: sum(table.values()) > 1e-3)


@given(weights, st.integers(0, 500))
def test_shares_sum_up_and_are_off_by_less_than_one(table, n):
    counts = largest_remainder(table, n)
    total = sum(table.values())
    assert sum(counts.values()) == n and list(counts) == list(table)
    assert all(abs(counts[key] - n * weight / total) < 1 + 1e-9 for key, weight in table.items())
    assert all(counts[key] == 0 for key, weight in table.items() if weight == 0)


@given(st.dictionaries(st.integers(0, 30), st.integers(1, 50), min_size=1), st.integers(1, 5))
def test_shares_of_a_multiple_are_the_multiple(table, factor):
    assert largest_remainder(table, factor * sum(table.values())) == {
        k: factor * w for k, w in table.items()
    }


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 50), min_size=1).filter(
        lambda t: sum(t.values())
    ),
    st.data(),
)
def test_what_is_left_goes_to_the_largest_remainders(table, data):
    n = data.draw(st.integers(0, 200))
    total = sum(table.values())
    counts = {k: n * w // total for k, w in table.items()}
    left = {k: n * w % total for k, w in table.items()}
    for _ in range(n - sum(counts.values())):
        winner = max(left, key=lambda key: left[key])
        counts[winner] += 1
        left[winner] = -1
    assert largest_remainder(table, n) == counts


@pytest.mark.parametrize(("table", "n"), [({}, 1), ({1: 0}, 1), ({1: -1, 2: 3}, 1), ({1: 1}, -1)])
def test_shares_of_nothing_are_refused(table, n):
    with pytest.raises(ValueError, match="allowed|empty"):
        largest_remainder(table, n)


# Shapes ------------------------------------------------------------------------------------------------------------------


def slow_difficulty(sizes):
    if any(size >= 8 for size in sizes) or sum(size >= 5 for size in sizes) >= 2:
        return 3
    if all(size <= 4 for size in sizes) and sum(size > 2 for size in sizes) <= 1:
        return 1
    return 2


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_difficulty_agrees_with_its_definition(sizes):
    assert difficulty(sizes) == slow_difficulty(sizes)


@given(st.sampled_from(LEVELS), st.integers(0, 10_000))
def test_a_shape_has_its_blocks_its_level_and_its_largest_block(wanted, seed):
    blocks, level, largest = wanted
    sizes = draw_sizes(blocks, level, largest, random.Random(seed))
    assert len(sizes) == blocks and max(sizes) == largest and difficulty(sizes) == level
    assert (
        6 <= sum(sizes) <= 63 and min(sizes) >= 1 and sum(size > 1 for size in sizes) >= blocks / 2
    )


@given(st.integers(0, 400), st.integers(0, 5), st.sampled_from(["", "health", "coding"]))
def test_counts_of_any_number_of_rows_are_exact(n, seed, name):
    config = PlanConfig(seed=seed)
    shapes = draw_shapes(n, config, name)
    assert shapes == draw_shapes(n, config, name) and len(shapes) == n
    for table, found in (
        (config.blocks, map(len, shapes)),
        (config.difficulty, map(difficulty, shapes)),
    ):
        counts = Counter(found)
        assert all(counts[key] == count for key, count in largest_remainder(table, n).items())
    for level, table in config.largest.items():
        largest = [max(sizes) for sizes in shapes if difficulty(sizes) == level]
        assert all(
            largest.count(key) == count
            for key, count in largest_remainder(table, len(largest)).items()
        )


def test_seeds_and_names_give_other_shapes():
    draws = [
        draw_shapes(100, PlanConfig(seed=seed), name) for seed, name in product((0, 1), ("a", "b"))
    ]
    assert all(one != other for one, other in permutations(draws, 2))


def test_the_published_counts_come_out():
    shapes = [
        sizes
        for name, n in (("h", 7500), ("g", 3750), ("c", 3750))
        for sizes in draw_shapes(n, CONFIG, name)
    ]
    assert (
        Counter(map(len, shapes)) == {k: int(w) for k, w in CONFIG.blocks.items()}
        and sum(map(len, shapes)) == 74_800
    )
    assert 0.98 < sum(map(sum, shapes)) / 234_220 < 1.02
    assert (
        min(map(sum, shapes)) == 6 and max(map(sum, shapes)) <= 63 and max(map(max, shapes)) == 20
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"blocks": {1: 3}}, "blocks: found .1."),
        ({"blocks": {}}, "blocks: found 'none'"),
        ({"difficulty": {4: 1}}, "difficulty: found .4."),
        ({"difficulty": {1: 0}}, "difficulty: found 'none'"),
        ({"largest": {1: {2: 1}}}, "largest: found"),
        ({"largest": {1: {9: 1}, 2: {3: 1}, 3: {8: 1}}}, "largest, level 1: found .9."),
        ({"blocks": {2: 1}}, "atoms: found 6"),
        ({"atoms": (6, 30)}, "atoms: found 30"),
        ({"families": ("strange",)}, "families: found .'strange'."),
        ({"families": ()}, "families: found 'none'"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(changes, rule):
    with pytest.raises(ValueError, match=rule):
        PlanConfig(**changes)


def test_the_hash_of_a_table_follows_its_numbers():
    assert PlanConfig().hash == PlanConfig(seed=0).hash != PlanConfig(seed=1).hash
    assert PlanConfig.model_validate_json(PlanConfig().model_dump_json()) == PlanConfig()


# Rows and shapes ---------------------------------------------------------------------------------------------------------

small = st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=4), min_size=1, max_size=5)


@given(small, st.data())
def test_every_row_gets_a_shape_that_fits_and_none_grows_without_need(pool, data):
    needs = {
        f"r{i}": data.draw(st.integers(1, 8)) for i in range(data.draw(st.integers(0, len(pool))))
    }
    given_ = assign_shapes(needs, pool)
    assert given_.keys() == needs.keys() and all(
        room(given_[row]) >= need for row, need in needs.items()
    )
    rows = list(needs)
    possible = any(
        all(room(shape) >= needs[row] for row, shape in zip(rows, order, strict=True))
        for order in permutations(pool, len(rows))
    )
    left = Counter(map(tuple, pool))
    left.subtract(map(tuple, given_.values()))
    assert (min(left.values(), default=0) >= 0) or not possible


@given(small, st.integers(0, 3), st.randoms())
def test_shapes_do_not_depend_on_the_order_of_rows(pool, seed, rng):
    needs = {f"r{i}": 1 + i % 3 for i in range(len(pool))}
    shuffled = rng.sample(list(needs.items()), len(needs))
    assert assign_shapes(needs, pool, seed) == assign_shapes(
        dict(shuffled), rng.sample(pool, len(pool)), seed
    )


def test_too_few_shapes_are_refused():
    with pytest.raises(ValueError, match="found 1; allowed are 2"):
        assign_shapes({"a": 1, "b": 1}, [[2, 2]])


@given(st.integers(0, 60), st.integers(1, 5), st.integers(0, 3), st.randoms())
def test_names_are_dealt_evenly_in_any_order(n, kinds, seed, rng):
    names = FAMILIES[:kinds]
    rows = [f"r{i}" for i in range(n)]
    dealt = spread(rows, names, seed)
    counts = [list(dealt.values()).count(name) for name in names]
    assert max(counts) - min(counts) <= 1 and dealt == spread(rng.sample(rows, n), names, seed)
    more = spread([f"s{i}" for i in range(7)], names, seed, dealt.values())
    counts = [[*dealt.values(), *more.values()].count(name) for name in names]
    assert max(counts) - min(counts) <= 1


# Places ------------------------------------------------------------------------------------------------------------------

rows = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.text("ABC", min_size=3, max_size=9)
).map(lambda pair: draft_of(0, *pair).atoms[:12])


@st.composite
def rows_with_sizes(draw):
    atoms = draw(rows)
    sizes = draw(st.lists(st.integers(1, 8), min_size=2, max_size=8))
    while room(sizes) < len(atoms):
        sizes[draw(st.integers(0, len(sizes) - 1))] += 1
    return atoms, sizes


@given(rows_with_sizes())
def test_own_blocks_have_room_and_leave_one_for_the_hard_distractor(case):
    atoms, sizes = case
    mine, others = own_sizes(len(atoms), len({a.passage for a in atoms}), sizes)
    assert (
        sorted(mine + others) == sorted(sizes)
        and others
        and sum(mine) >= len(atoms) >= len(mine) >= 1
    )


def slow_cut(atoms, sizes):
    share = len(atoms) / sum(sizes)
    best = None
    for counts in product(*(range(1, size + 1) for size in sizes)):
        if sum(counts) != len(atoms):
            continue
        cost = 0.0
        start = 0
        for count, size in zip(counts, sizes, strict=True):
            part = atoms[start : start + count]
            rest = atoms[start + count :]
            torn = rest and part[-1].passage == rest[0].passage
            kinds = {a.ideal for a in part} | ({Level.IGNORE} if count < size else set())
            cost += 2 * bool(torn) + (len(kinds) == 1) + 0.01 * abs(count / size - share)
            start += count
        best = cost if best is None else min(best, cost)
    return best


@given(rows_with_sizes())
def test_the_cut_is_the_cheapest_of_all(case):
    atoms, sizes = case
    mine, _ = own_sizes(len(atoms), len({a.passage for a in atoms}), sizes)
    mine = mine[:4] if sum(mine[:4]) >= len(atoms) else mine
    counts = cut_blocks(atoms, mine)
    assert sum(counts) == len(atoms) and all(
        1 <= c <= size for c, size in zip(counts, mine, strict=True)
    )
    share = len(atoms) / sum(mine)
    cost = 0.0
    start = 0
    for count, size in zip(counts, mine, strict=True):
        kinds = {a.ideal for a in atoms[start : start + count]} | (
            {Level.IGNORE} if count < size else set()
        )
        start += count
        torn = start < len(atoms) and atoms[start - 1].passage == atoms[start].passage
        cost += 2 * torn + (len(kinds) == 1) + 0.01 * abs(count / size - share)
    assert cost == pytest.approx(slow_cut(atoms, mine))


@given(rows_with_sizes(), st.integers(0, 99))
def test_the_layout_keeps_order_sizes_and_one_place_for_each_atom(case, seed):
    atoms, sizes = case
    blocks = lay_out(atoms, sizes, random.Random(seed))
    ids = [name for block in blocks for name in block.atom_ids]
    assert sorted(len(block.atom_ids) for block in blocks) == sorted(sizes) and len(
        set(ids)
    ) == len(ids)
    assert [name for name in ids if name.startswith("p")] == [a.atom_id for a in atoms]
    assert ids.count("harda_01_a1") == 1 and len(
        {block.parent_memory_id for block in blocks}
    ) == len(blocks)
    for place, block in enumerate(blocks, 1):
        kinds = {name.split("_")[0][0] for name in block.atom_ids}
        prefix = {"m": {"p"}, "h": {"h"}, "n": {"n"}}[block.parent_memory_id[0]]
        assert prefix <= kinds <= prefix | ({"a"} if prefix != {"n"} else set())
        added = [name for name in block.atom_ids if name.startswith("aux_")]
        assert added == [f"aux_b{place:02d}_a{i:02d}" for i in range(1, len(added) + 1)]


def test_relevant_atoms_stand_everywhere():
    """Neither the first block nor the first place in a block means anything."""
    atoms = draft_of(0).atoms
    first = Counter()
    inside = Counter()
    for seed in range(300):
        blocks = lay_out(atoms, [3, 2, 2, 2], random.Random(seed))
        first[blocks[0].parent_memory_id[0]] += 1
        inside[blocks[0].atom_ids[0][0]] += 1
    assert min(first[kind] for kind in "mhn") > 40 and inside["a"] > 30


# Phrases -----------------------------------------------------------------------------------------------------------------


@given(rows_with_sizes(), st.integers(0, 99))
def test_each_distractor_but_the_hard_one_has_phrases_foreign_to_the_row(case, seed):
    atoms, sizes = case
    text = "Which garden fence keeps a fox out, and is the balcony railing of brass safe for hens?"
    draft = Draft(id="x", domain="general", question=text, query=text, atoms=atoms)
    blocks = lay_out(atoms, sizes, random.Random(seed))
    dealt = deal_phrases(draft, blocks, BOOK, random.Random(seed))
    assert dealt == deal_phrases(draft, blocks, BOOK, random.Random(seed))
    ids = [name for block in blocks for name in block.atom_ids]
    assert set(dealt) == {name for name in ids if name.startswith(("noise_", "aux_"))}
    known = {word[:5] for word in content_words(text)}
    used = [
        word[:5]
        for phrases in dealt.values()
        for phrase in phrases
        for word in content_words(phrase)
    ]
    assert not known & set(used)
    assert all(len(phrases) == 3 for name, phrases in dealt.items() if name.startswith("noise_"))
    assert all(phrases == [] for name, phrases in dealt.items() if name.startswith("aux_"))
    for block in blocks:
        things = {dealt[name][0] for name in block.atom_ids if name.startswith("noise_")}
        assert len(things) <= 1


def test_short_lists_are_used_again_and_empty_ones_left_out():
    book = PhraseBook(matters=("tram pass",))
    blocks = [
        DraftBlock(parent_memory_id="noise_01", atom_ids=["noise_01_a1", "noise_01_a2"]),
        DraftBlock(parent_memory_id="m1", atom_ids=["p1_a1", "aux_b02_a01"]),
    ]
    dealt = deal_phrases(draft_of(0), blocks, book, random.Random(0))
    assert dealt == {"noise_01_a1": ["tram pass"], "noise_01_a2": ["tram pass"], "aux_b02_a01": []}
    asked = draft_of(0).model_copy(update={"query": "Is my tram pass valid?"})
    assert deal_phrases(asked, blocks, book, random.Random(0)) == dealt


@pytest.mark.parametrize(
    "text",
    ["matters: ''", "- a\n- b", "matters: [", "things: a, b", "matters: a\ncolours: red", "7"],
)
def test_lists_of_another_form_are_refused(tmp_path, text):
    path = tmp_path / "phrases.yaml"
    path.write_text(text)
    told = (
        "not readable as YAML" if text.endswith("[") else "allowed: lists named qualities, things"
    )
    with pytest.raises(ValueError, match=rf"phrases\.yaml.*{told}"):
        load_phrases(path)


def test_lists_of_a_user_are_read(tmp_path):
    path = tmp_path / "phrases.yaml"
    path.write_text("matters: tram pass, 7,  choir\n  rehearsal\n")
    assert load_phrases(path).matters == ("tram pass", "7", "choir rehearsal")


# Plans -------------------------------------------------------------------------------------------------------------------


def many(n, start=0):
    kinds = [(3,), (1, 2), (2, 2, 1), (4, 4, 4), (1, 1, 1, 2)]
    return [
        draft_of(i, kinds[i % 5], "ABCB"[i % 3 :], ("health", "general")[i % 2])
        for i in range(start, start + n)
    ]


def marginals(plans):
    return Counter((len(p.sizes), max(p.sizes), p.difficulty) for p in plans)


@pytest.mark.parametrize("n", [1, 7, 60])
def test_plans_are_the_same_in_any_order_and_hold_the_counts(n):
    drafts = many(n)
    plans = make_plans(drafts)
    assert plans == make_plans(random.Random(1).sample(drafts, n)) and len(plans) == n
    for domain in ("health", "general"):
        mine = [plans[d.id] for d in drafts if d.domain == domain]
        wanted = largest_remainder(CONFIG.blocks, len(mine))
        assert Counter(len(p.sizes) for p in mine) == {k: c for k, c in wanted.items() if c}
        counts = [[p.family for p in mine].count(name) for name in FAMILIES]
        assert max(counts) - min(counts) <= 1
    for draft in drafts:
        plan = plans[draft.id]
        assert difficulty(plan.sizes) == plan.difficulty and len(plan.phrases) >= 1
        own = {a.atom_id for a in draft.atoms}
        assert set(plan.atom_ids) == own | {"harda_01_a1"} | set(plan.phrases)


def test_almost_every_row_has_a_block_of_mixed_levels():
    drafts = [draft_of(i, (2, 2, 1), "BCCBB") for i in range(400)]
    plans = make_plans(drafts)
    mixed = 0
    for draft in drafts:
        ideal = {a.atom_id: a.ideal for a in draft.atoms}
        kinds = [
            {ideal.get(name, Level.IGNORE) for name in block.atom_ids}
            for block in plans[draft.id].blocks
        ]
        mixed += any(len(levels) > 1 for levels in kinds)
    assert mixed >= 0.98 * len(drafts)


def test_rows_that_join_later_leave_plans_alone_and_fill_the_counts(tmp_path):
    drafts = many(80)
    light = [d for d in drafts if len(d.atoms) <= 5]
    early = plan_rows(light[:30], tmp_path / "plans.jsonl")
    late = plan_rows(light, tmp_path / "plans.jsonl")
    assert late[:30] == early and [d.id for d in late] == [d.id for d in light]
    for domain in ("health", "general"):
        plans = [plan_of(d) for d in late if d.domain == domain]
        shapes = draw_shapes(len(plans), CONFIG, domain)
        wanted = Counter((len(sizes), max(sizes), difficulty(sizes)) for sizes in shapes)
        # counts for 15 rows are not all part of those for more rows: what differs is at most the rounding
        assert sum((marginals(plans) - wanted).values()) <= 15
        counts = [[p.family for p in plans].count(name) for name in FAMILIES]
        assert max(counts) - min(counts) <= 1


def test_the_file_is_read_again_and_never_half_written(tmp_path):
    path = tmp_path / "plans.jsonl"
    drafts = many(9)
    first = plan_rows(drafts, path)
    stamp = path.stat().st_mtime_ns
    assert plan_rows(reversed(drafts), path) == first[::-1] and path.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == ["plans.jsonl"] and len(
        path.read_text().splitlines()
    ) == 9
    assert {
        p.sizes == plan_of(d).sizes for d, p in zip(first, map(plan_of, first), strict=True)
    } == {True}


def test_nothing_to_plan_writes_nothing(tmp_path):
    assert plan_rows([], tmp_path / "plans.jsonl") == [] and list(tmp_path.iterdir()) == []


def test_other_counts_other_lists_and_other_atoms_are_refused(tmp_path):
    path = tmp_path / "plans.jsonl"
    [draft] = plan_rows(many(1), path)
    with pytest.raises(DataError, match=r"plans\.jsonl.*recipe: found .*another folder"):
        plan_rows(many(2), path, PlanConfig(seed=9))
    with pytest.raises(DataError, match="recipe"):
        plan_rows(many(2), path, book=PhraseBook(matters=("tram pass",)))
    changed = many(1)[0].model_copy(update={"atoms": draft.atoms[:2]})
    with pytest.raises(
        DataError, match=r"health:0.*atoms: found p1_a1, p1_a2; allowed: p1_a1, p1_a2, p1_a3"
    ):
        plan_rows([changed], path)
    with pytest.raises(DataError, match="atoms: found none"):
        make_plans([many(1)[0].model_copy(update={"atoms": []})])


def test_a_row_without_a_plan_is_named():
    with pytest.raises(DataError, match=r"general:7.*plan: found none"):
        plan_of(draft_of(7))
    plan = make_plans([draft_of(7)])["general:7"]
    assert Plan.model_validate_json(plan.to_json()) == plan


def test_a_row_with_too_many_atoms_for_any_shape_gets_a_larger_one():
    tight = PlanConfig(blocks={3: 1}, difficulty={1: 1}, largest={1: {2: 1}})
    plan = make_plans([draft_of(0, (4, 4, 4))], tight)["general:0"]
    assert len(plan.sizes) == 3 and sum(plan.sizes) >= 14 and plan.difficulty == 3
