"""Counts, shapes and plans: exact sums, bounds, the same result in any order,
and plans that stay when rows join.
"""

import random
from collections import Counter
from itertools import chain, combinations, cycle, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared.grounding import content_words
from memcalib.products.dataset.stages import Draft, DraftAtom, DraftBlock
from memcalib.products.dataset.writing import (
    FAMILIES,
    HARD,
    PhraseBook,
    RowPlan,
    PlanConfig,
    assign_shapes,
    cut_blocks,
    deal_evenly,
    deal_phrases,
    difficulty,
    draw_shapes,
    draw_sizes,
    largest_remainder,
    lay_out_blocks,
    load_phrases,
    make_plans,
    plan_of,
    rows_of_plans,
    room,
    partition_sizes,
)
from memcalib.io.records import DataError
from memcalib.problem import Level

CONFIG = PlanConfig()
BOOK = load_phrases()
ORDERS = []  # number of blocks, level, size of the largest block: all that the default table allows
for level, largest_sizes in CONFIG.largest.items():
    ORDERS += product(CONFIG.blocks, [level], largest_sizes)


def atom(number, passage, level="B"):
    text = f"Fact {number} of passage {passage}."
    name = f"p{passage}_a{number}"
    return DraftAtom(atom_id=name, text=text, ideal=level, origin="grounded", passage=passage)


def draft_of(i, sizes=(2, 1), levels="ABC", domain="general"):
    """A row with passages of so many atoms, whose levels go round."""
    level = cycle(levels)
    atoms = []
    for passage, size in enumerate(sizes, 1):
        for number in range(1, size + 1):
            atoms.append(atom(number, passage, next(level)))
    return Draft(
        id=f"{domain}:{i}", domain=domain, question="What now?", query="What now?", atoms=atoms
    )


def passage_count(atoms):
    return len({atom.passage for atom in atoms})


# Shares -------------------------------------------------------------------------------------------

weights = st.dictionaries(
    st.integers(0, 30), st.one_of(st.integers(0, 50), st.floats(0, 9)), min_size=1
).filter(lambda table: sum(table.values()) > 1e-3)


@given(weights, st.integers(0, 500))
def test_shares_sum_up_and_are_off_by_less_than_one(table, n):
    counts = largest_remainder(table, n)
    total = sum(table.values())
    assert sum(counts.values()) == n
    assert list(counts) == list(table)
    for key, weight in table.items():
        assert abs(counts[key] - n * weight / total) < 1 + 1e-9
        if weight == 0:
            assert counts[key] == 0


@given(st.dictionaries(st.integers(0, 30), st.integers(1, 50), min_size=1), st.integers(1, 5))
def test_shares_of_a_multiple_are_the_multiple(table, factor):
    counts = largest_remainder(table, factor * sum(table.values()))
    assert counts == {key: factor * weight for key, weight in table.items()}


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 50), min_size=1).filter(
        lambda table: sum(table.values())
    ),
    st.data(),
)
def test_what_is_left_goes_to_the_largest_remainders(table, data):
    n = data.draw(st.integers(0, 200))
    total = sum(table.values())
    counts = {key: n * weight // total for key, weight in table.items()}
    remainders = {key: n * weight % total for key, weight in table.items()}
    for _ in range(n - sum(counts.values())):
        winner = max(remainders, key=lambda key: remainders[key])
        counts[winner] += 1
        remainders[winner] = -1
    assert largest_remainder(table, n) == counts


@pytest.mark.parametrize(("table", "n"), [({}, 1), ({1: 0}, 1), ({1: -1, 2: 3}, 1), ({1: 1}, -1)])
def test_shares_of_nothing_are_refused(table, n):
    with pytest.raises(ValueError, match="allowed|empty"):
        largest_remainder(table, n)


# Shapes -------------------------------------------------------------------------------------------


def slow_difficulty(sizes):
    if any(size >= 8 for size in sizes) or sum(size >= 5 for size in sizes) >= 2:
        return 3
    if all(size <= 4 for size in sizes) and sum(size > 2 for size in sizes) <= 1:
        return 1
    return 2


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_difficulty_agrees_with_its_definition(sizes):
    assert difficulty(sizes) == slow_difficulty(sizes)


@given(st.sampled_from(ORDERS), st.integers(0, 10_000))
def test_a_shape_has_its_blocks_its_level_and_its_largest_block(order, seed):
    blocks, level, largest = order
    sizes = draw_sizes(blocks, level, largest, random.Random(seed))
    assert len(sizes) == blocks
    assert max(sizes) == largest
    assert difficulty(sizes) == level
    assert 6 <= sum(sizes) <= 63
    assert min(sizes) >= 1
    assert sum(size > 1 for size in sizes) >= blocks / 2


@given(st.integers(0, 400), st.integers(0, 5), st.sampled_from(["", "health", "coding"]))
def test_counts_of_any_number_of_rows_are_exact(n, seed, name):
    config = PlanConfig(seed=seed)
    shapes = draw_shapes(n, config, name)
    assert shapes == draw_shapes(n, config, name)
    assert len(shapes) == n

    def assert_counts(values, table):
        counts = Counter(values)
        expected = largest_remainder(table, sum(counts.values()))
        assert all(counts[key] == count for key, count in expected.items())

    assert_counts(map(len, shapes), config.blocks)
    assert_counts(map(difficulty, shapes), config.difficulty)
    for level, table in config.largest.items():
        assert_counts([max(sizes) for sizes in shapes if difficulty(sizes) == level], table)


def test_seeds_and_names_give_other_shapes():
    draws = []
    for seed in (0, 1):
        for name in ("a", "b"):
            draws.append(draw_shapes(100, PlanConfig(seed=seed), name))
    assert all(first != second for first, second in combinations(draws, 2))


def test_the_published_counts_come_out():
    shapes = []
    for name, n in (("h", 7500), ("g", 3750), ("c", 3750)):
        shapes += draw_shapes(n, CONFIG, name)
    assert Counter(map(len, shapes)) == {key: int(weight) for key, weight in CONFIG.blocks.items()}
    assert sum(map(len, shapes)) == 74_800
    atom_counts = [sum(sizes) for sizes in shapes]
    assert 0.98 < sum(atom_counts) / 234_220 < 1.02
    assert min(atom_counts) == 6 and max(atom_counts) <= 63
    assert max(map(max, shapes)) == 20


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


# Rows and shapes ----------------------------------------------------------------------------------

small = st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=4), min_size=1, max_size=5)


@given(small, st.data())
def test_every_row_gets_a_shape_that_fits_and_none_grows_without_need(pool, data):
    count = data.draw(st.integers(0, len(pool)))
    needs = {f"r{i}": data.draw(st.integers(1, 8)) for i in range(count)}
    shapes = assign_shapes(needs, pool)
    assert shapes.keys() == needs.keys()
    assert all(room(shapes[row]) >= need for row, need in needs.items())

    def fits(order):
        pairs = zip(needs.values(), order, strict=True)
        return all(room(shape) >= need for need, shape in pairs)

    if any(fits(order) for order in permutations(pool, len(needs))):
        unused = Counter(map(tuple, pool))
        unused.subtract(map(tuple, shapes.values()))
        assert min(unused.values(), default=0) >= 0


@given(small, st.integers(0, 3), st.randoms())
def test_shapes_do_not_depend_on_the_order_of_rows(pool, seed, rng):
    needs = {f"r{i}": 1 + i % 3 for i in range(len(pool))}
    shuffled_needs = dict(rng.sample(list(needs.items()), len(needs)))
    shuffled_pool = rng.sample(pool, len(pool))
    shapes = assign_shapes(needs, pool, seed)
    assert shapes == assign_shapes(shuffled_needs, shuffled_pool, seed)


def test_too_few_shapes_are_refused():
    with pytest.raises(ValueError, match="found 1; allowed: at least 2"):
        assign_shapes({"a": 1, "b": 1}, [[2, 2]])


@given(st.integers(0, 60), st.integers(1, 5), st.integers(0, 3), st.randoms())
def test_names_are_dealt_evenly_in_any_order(n, kinds, seed, rng):
    names = FAMILIES[:kinds]
    rows = [f"r{i}" for i in range(n)]
    first = deal_evenly(rows, names, seed)
    assert first == deal_evenly(rng.sample(rows, n), names, seed)
    assert_even(first.values(), names)
    later = deal_evenly([f"s{i}" for i in range(7)], names, seed, first.values())
    assert_even([*first.values(), *later.values()], names)


def assert_even(dealt, names):
    """All names equally often, as far as numbers allow."""
    uses = Counter(dealt)
    counts = [uses[name] for name in names]
    assert max(counts) - min(counts) <= 1


# Places -------------------------------------------------------------------------------------------

rows = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.text("ABC", min_size=3, max_size=9)
).map(lambda sizes_and_levels: draft_of(0, *sizes_and_levels).atoms[:12])


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
    atom_sizes, other_sizes = partition_sizes(len(atoms), passage_count(atoms), sizes)
    assert sorted(atom_sizes + other_sizes) == sorted(sizes)
    assert other_sizes
    assert sum(atom_sizes) >= len(atoms) >= len(atom_sizes) >= 1


def slow_cost(atoms, counts, sizes):
    """What it costs to put the atoms, in order, into blocks of these sizes so."""
    filling = len(atoms) / sum(sizes)
    cost = 0.0
    start = 0
    for count, size in zip(counts, sizes, strict=True):
        block = atoms[start : start + count]
        following = atoms[start + count :]
        levels = {atom.ideal for atom in block}
        if count < size:
            levels.add(Level.IGNORE)
        if following and block[-1].passage == following[0].passage:
            cost += 2
        if len(levels) == 1:
            cost += 1
        cost += 0.01 * abs(count / size - filling)
        start += count
    return cost


@given(rows_with_sizes())
def test_the_cut_is_the_cheapest_of_all(case):
    atoms, sizes = case
    block_sizes, _ = partition_sizes(len(atoms), passage_count(atoms), sizes)
    if sum(block_sizes[:4]) >= len(atoms):
        block_sizes = block_sizes[:4]
    counts = cut_blocks(atoms, block_sizes)
    assert sum(counts) == len(atoms)
    assert all(1 <= count <= size for count, size in zip(counts, block_sizes, strict=True))
    all_counts = product(*(range(1, size + 1) for size in block_sizes))
    cheapest = min(
        slow_cost(atoms, other_counts, block_sizes)
        for other_counts in all_counts
        if sum(other_counts) == len(atoms)
    )
    assert slow_cost(atoms, counts, block_sizes) == pytest.approx(cheapest)


@pytest.mark.parametrize("sizes", [[1, 2], [1, 1, 1, 1, 1]])
def test_atoms_that_no_cut_can_place_are_refused(sizes):
    with pytest.raises(ValueError, match="allowed: blocks with room for 4 atoms"):
        cut_blocks(draft_of(0, (2, 2)).atoms, sizes)


@given(rows_with_sizes(), st.integers(0, 99))
def test_the_layout_keeps_order_sizes_and_one_place_for_each_atom(case, seed):
    atoms, sizes = case
    blocks = lay_out_blocks(atoms, sizes, random.Random(seed))
    ids = list(chain.from_iterable(block.atom_ids for block in blocks))
    assert sorted(len(block.atom_ids) for block in blocks) == sorted(sizes)
    assert len(set(ids)) == len(ids)
    assert [name for name in ids if name.startswith("p")] == [atom.atom_id for atom in atoms]
    assert ids.count(HARD) == 1
    assert len({block.parent_memory_id for block in blocks}) == len(blocks)
    for number, block in enumerate(blocks, 1):
        core_kind = {"m": "p", "h": "h", "n": "n"}[block.parent_memory_id[0]]
        kinds = {name[0] for name in block.atom_ids}
        assert core_kind in kinds
        assert kinds <= ({"n"} if core_kind == "n" else {core_kind, "a"})
        added = [name for name in block.atom_ids if name.startswith("aux_")]
        assert added == [f"aux_b{number:02d}_a{i:02d}" for i in range(1, len(added) + 1)]


def test_relevant_atoms_stand_everywhere():
    """Neither the first block nor the first place in a block means anything."""
    atoms = draft_of(0).atoms
    first_blocks = Counter()
    first_atoms = Counter()
    for seed in range(300):
        blocks = lay_out_blocks(atoms, [3, 2, 2, 2], random.Random(seed))
        first_blocks[blocks[0].parent_memory_id[0]] += 1
        first_atoms[blocks[0].atom_ids[0][0]] += 1
    assert min(first_blocks[kind] for kind in "mhn") > 40
    assert first_atoms["a"] > 30


# Phrases ------------------------------------------------------------------------------------------


@given(rows_with_sizes(), st.integers(0, 99))
def test_each_distractor_but_the_hard_one_has_phrases_foreign_to_the_row(case, seed):
    atoms, sizes = case
    text = "Which garden fence keeps a fox out, and is the balcony railing of brass safe for hens?"
    draft = Draft(id="x", domain="general", question=text, query=text, atoms=atoms)
    blocks = lay_out_blocks(atoms, sizes, random.Random(seed))
    dealt = deal_phrases(draft, blocks, BOOK, random.Random(seed))
    assert dealt == deal_phrases(draft, blocks, BOOK, random.Random(seed))
    ids = set(chain.from_iterable(block.atom_ids for block in blocks))
    assert set(dealt) == {name for name in ids if name.startswith(("noise_", "aux_"))}
    row_beginnings = {word[:5] for word in content_words(text)}
    for phrase in chain.from_iterable(dealt.values()):
        assert row_beginnings.isdisjoint(word[:5] for word in content_words(phrase))
    for name, phrases in dealt.items():
        assert len(phrases) == (3 if name.startswith("noise_") else 0)
    for block in blocks:
        first_phrases = {dealt[name][0] for name in block.atom_ids if name.startswith("noise_")}
        assert len(first_phrases) <= 1


def test_short_lists_are_used_again_and_empty_ones_left_out():
    book = PhraseBook(matters=("tram pass",))
    blocks = [
        DraftBlock(parent_memory_id="noise_01", atom_ids=["noise_01_a1", "noise_01_a2"]),
        DraftBlock(parent_memory_id="m1", atom_ids=["p1_a1", "aux_b02_a01"]),
    ]
    dealt = deal_phrases(draft_of(0), blocks, book, random.Random(0))
    assert dealt == {"noise_01_a1": ["tram pass"], "noise_01_a2": ["tram pass"], "aux_b02_a01": []}
    about_trams = draft_of(0).model_copy(update={"query": "Is my tram pass valid?"})
    assert deal_phrases(about_trams, blocks, book, random.Random(0)) == dealt


NAMES = "allowed: lists named qualities, things"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matters: ''", NAMES),
        ("- a\n- b", NAMES),
        ("matters: [", "not readable as YAML"),
        ("things: a, b", NAMES),
        ("matters: a\ncolours: red", NAMES),
        ("7", NAMES),
    ],
)
def test_lists_of_another_form_are_refused(tmp_path, text, message):
    path = tmp_path / "phrases.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"phrases\.yaml.*{message}"):
        load_phrases(path)


def test_lists_of_a_user_are_read(tmp_path):
    path = tmp_path / "phrases.yaml"
    path.write_text("matters: tram pass, 7,  choir\n  rehearsal\n")
    assert load_phrases(path).matters == ("tram pass", "7", "choir rehearsal")


# Plans --------------------------------------------------------------------------------------------


def many(n):
    """Rows of two domains, with passages and levels of several kinds."""
    passage_sizes = [(3,), (1, 2), (2, 2, 1), (4, 4, 4), (1, 1, 1, 2)]
    levels = ["ABCB", "BCB", "CB"]
    domains = ["health", "general"]
    return [draft_of(i, passage_sizes[i % 5], levels[i % 3], domains[i % 2]) for i in range(n)]


def kind_of(sizes):
    return len(sizes), max(sizes), difficulty(sizes)


@pytest.mark.parametrize("n", [1, 7, 60])
def test_plans_are_the_same_in_any_order_and_hold_the_counts(n):
    drafts = many(n)
    plans = make_plans(drafts)
    assert plans == make_plans(random.Random(1).sample(drafts, n))
    assert len(plans) == n
    for domain in ("health", "general"):
        of_domain = [plans[draft.id] for draft in drafts if draft.domain == domain]
        blocks = Counter(len(plan.sizes) for plan in of_domain)
        assert blocks == Counter(largest_remainder(CONFIG.blocks, len(of_domain)))
        assert_even([plan.family for plan in of_domain], FAMILIES)
    for draft in drafts:
        plan = plans[draft.id]
        assert difficulty(plan.sizes) == plan.difficulty
        assert len(plan.phrases) >= 1
        own_ids = {atom.atom_id for atom in draft.atoms}
        assert set(plan.atom_ids) == own_ids | {HARD} | set(plan.phrases)


def test_almost_every_row_has_a_block_of_mixed_levels():
    drafts = [draft_of(i, (2, 2, 1), "BCCBB") for i in range(400)]
    plans = make_plans(drafts)
    mixed = 0
    for draft in drafts:
        ideal = {atom.atom_id: atom.ideal for atom in draft.atoms}
        for block in plans[draft.id].blocks:
            levels = {ideal.get(name, Level.IGNORE) for name in block.atom_ids}
            if len(levels) > 1:
                mixed += 1
                break
    assert mixed >= 0.98 * len(drafts)


def test_rows_that_join_later_leave_plans_alone_and_fill_the_counts(tmp_path):
    drafts = [draft for draft in many(80) if len(draft.atoms) <= 5]
    early = rows_of_plans(drafts[:30], tmp_path / "plans.jsonl")
    late = rows_of_plans(drafts, tmp_path / "plans.jsonl")
    assert late[:30] == early
    assert [draft.id for draft in late] == [draft.id for draft in drafts]
    for domain in ("health", "general"):
        plans = [plan_of(draft) for draft in late if draft.domain == domain]
        planned = Counter(kind_of(plan.sizes) for plan in plans)
        drawn = Counter(map(kind_of, draw_shapes(len(plans), CONFIG, domain)))
        # counts for 15 rows are not all part of those for more rows:
        # what differs is at most the rounding
        assert sum((planned - drawn).values()) <= 15
        assert_even([plan.family for plan in plans], FAMILIES)


def test_the_file_is_read_again_and_never_half_written(tmp_path):
    path = tmp_path / "plans.jsonl"
    drafts = many(9)
    first = rows_of_plans(drafts, path)
    stamp = path.stat().st_mtime_ns
    assert rows_of_plans(reversed(drafts), path) == first[::-1]
    assert path.stat().st_mtime_ns == stamp
    assert [file.name for file in tmp_path.iterdir()] == ["plans.jsonl"]
    assert len(path.read_text().splitlines()) == 9


def test_nothing_to_plan_writes_nothing(tmp_path):
    assert rows_of_plans([], tmp_path / "plans.jsonl") == []
    assert list(tmp_path.iterdir()) == []


def test_other_counts_other_lists_and_other_atoms_are_refused(tmp_path):
    path = tmp_path / "plans.jsonl"
    [draft] = rows_of_plans(many(1), path)
    with pytest.raises(DataError, match=r"plans\.jsonl.*recipe: found .*another folder"):
        rows_of_plans(many(2), path, PlanConfig(seed=9))
    with pytest.raises(DataError, match="recipe"):
        rows_of_plans(many(2), path, book=PhraseBook(matters=("tram pass",)))
    changed = many(1)[0].model_copy(update={"atoms": draft.atoms[:2]})
    message = r"health:0.*atoms: found p1_a1, p1_a2; allowed: p1_a1, p1_a2, p1_a3"
    with pytest.raises(DataError, match=message):
        rows_of_plans([changed], path)
    with pytest.raises(DataError, match="atoms: found none"):
        make_plans([many(1)[0].model_copy(update={"atoms": []})])


def test_a_row_without_a_plan_is_named():
    with pytest.raises(DataError, match=r"general:7.*plan: found none"):
        plan_of(draft_of(7))
    plan = make_plans([draft_of(7)])["general:7"]
    assert RowPlan.model_validate_json(plan.to_json()) == plan


def test_a_row_with_too_many_atoms_for_any_shape_gets_a_larger_one():
    tight = PlanConfig(blocks={3: 1}, difficulty={1: 1}, largest={1: {2: 1}})
    plan = make_plans([draft_of(0, (4, 4, 4))], tight)["general:0"]
    assert len(plan.sizes) == 3
    assert sum(plan.sizes) >= 14
    assert plan.difficulty == 3
