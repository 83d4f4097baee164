"""Counts against slow ones, tables in the published form, and an attrition table that adds up."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.dataset import card as c
from memcalib.products.dataset.stages import Drop
from memcalib.products.micro.world import make_examples
from memcalib.problem import Level, sample_records
from memcalib.products.dataset.sources import Passed, SourceRow
from memcalib.products.shared.dropped import Dropped
from memcalib.report.tables import published

EXAMPLES = make_examples("long", 80, 1, "rl") + sample_records()


@pytest.fixture(scope="module")
def counts():
    return c.count_examples(iter(EXAMPLES))


def test_composition_against_a_slow_count(counts):
    columns = ["examples", "blocks", "atoms"]
    table = c.composition_table(counts).set_index("domain")
    titles = {"health": "Health", "general": "General assistance", "coding": "Coding"}
    for domain, title in titles.items():
        rows = [e for e in EXAMPLES if e.domain == domain]
        expected = [len(rows), sum(len(e.blocks) for e in rows), sum(len(e.atoms) for e in rows)]
        assert table.loc[title, columns].tolist() == expected
    assert table.loc["Total", "examples"] == len(EXAMPLES)
    assert table.loc["Total", "published atoms"] == 234_220
    assert table.iloc[:-1][columns].sum().tolist() == table.iloc[-1][columns].tolist()


def mixed_block_count(example):
    """The number of blocks with atoms of several levels, read slowly."""
    count = 0
    for block in example.blocks:
        levels = {example.levels[name] for name in block.atom_ids}
        if len(levels) > 1:
            count += 1
    return count


def test_the_form_is_the_published_one(counts):
    table = c.composition_table(counts, beside=False)
    assert table.columns.tolist() == published("benchmark_composition").columns.tolist()
    assert table["domain"].tolist() == published("benchmark_composition")["domain"].tolist()
    table = c.structure_table(counts, beside=False)
    assert table.columns.tolist() == published("benchmark_structure").columns.tolist()
    assert table["statistic"].tolist() == published("benchmark_structure")["statistic"].tolist()


def test_structure_against_a_slow_count(counts):
    values = c.structure_table(counts).set_index("statistic")["value"]
    levels = Counter(atom.ideal for atom in chain.from_iterable(e.atoms for e in EXAMPLES))
    total = sum(levels.values())
    for level in Level:
        share = f"{levels[level]:,} ({100 * levels[level] / total:.1f}%)"
        assert values[f"Atoms with ideal level {level.name}"] == share
    mixed = [mixed_block_count(example) for example in EXAMPLES]
    assert values["Mixed-target blocks"] == f"{sum(mixed):,}"
    mixed_examples = sum(map(bool, mixed))
    share = f"{mixed_examples} ({100 * mixed_examples / len(EXAMPLES):.2f}%)"
    assert values["Examples containing a mixed-target block"] == share
    block_sizes = [len(b.atom_ids) for b in chain.from_iterable(e.blocks for e in EXAMPLES)]
    assert values["Atoms per block (min--max)"] == f"{min(block_sizes)}--{max(block_sizes)}"
    sizes = [len(example.atoms) for example in EXAMPLES]
    assert values["Atoms per example (min--max)"] == f"{min(sizes)}--{max(sizes)}"


def test_domains_of_ones_own_come_last_and_have_no_published_number():
    odd = EXAMPLES[0].model_copy(update={"domain": "law"})
    table = c.composition_table(c.count_examples([odd, *EXAMPLES]))
    assert table["domain"].tolist()[-2:] == ["law", "Total"]
    assert pd.isna(table["published examples"].iloc[-2])


@dataclass
class InventedBuild:
    """Rows of a build and where they were lost."""

    domains: dict[str, str]  # of every row that was read
    passed: Passed
    entered: list[str]
    drops_by_stage: dict[str, list[Drop]]
    finished: list[str]


def test_nothing_to_count_is_an_error():
    for rows in ([], [EXAMPLES[0].model_copy(update={"atoms": [], "blocks": []})]):
        with pytest.raises(ValueError, match="without an atom"):
            c.count_examples(rows)


def test_origins_are_recorded_or_told_by_id():
    record = sample_records()[0]
    atoms = [atom.model_copy(update={"origin": "retrieved"}) for atom in record.atoms[:2]]
    counts = c.count_examples([record.model_copy(update={"atoms": atoms + record.atoms[2:]})])
    table = c.origin_table(counts).set_index("origin")
    assert table.loc["retrieved", "all"] == 2 and table["all"].sum() == len(record.atoms)


def test_families_of_hard_distractors_are_counted_where_they_are_named():
    assert not len(c.family_table(c.count_examples(sample_records())))
    record = sample_records()[0]
    named = [atom.model_copy(update={"hard_a_family": "outdated"}) for atom in record.atoms[:2]]
    counts = c.count_examples(
        [record.model_copy(update={"atoms": named + record.atoms[2:]}), record]
    )
    assert c.family_table(counts).to_dict("list") == {"family": ["outdated"], "atoms": [2]}


# ---- attrition

DOMAINS = st.sampled_from(["health", "coding", "law"])
REASONS = st.sampled_from(["plausibility", "evidence", "failed call"])


@st.composite
def builds(draw):
    domains = {f"r{n}": draw(DOMAINS) for n in range(draw(st.integers(1, 30)))}
    ids = draw(st.permutations(sorted(domains)))
    screened_out = ids[: draw(st.integers(0, len(ids) - 1))]
    kept_ids = ids[len(screened_out) :]
    not_drawn = kept_ids[: draw(st.integers(0, len(kept_ids) - 1))]
    entered = kept_ids[len(not_drawn) :]
    drops_by_stage = {}
    finished = list(entered)
    for stage in ("screening", "annotation", "review"):
        lost_ids = finished[: draw(st.integers(0, len(finished)))]
        finished = finished[len(lost_ids) :]
        drops_by_stage[stage] = [Drop(id=i, stage=stage, reason=draw(REASONS)) for i in lost_ids]
    kept_rows = [
        SourceRow(id=i, source="s", domain=domains[i], question="q", answer="a") for i in kept_ids
    ]
    rules = st.sampled_from(["noise", "length"])
    dropped_rows = [
        Dropped(id=i, domain=domains[i], stage="screening", rule=draw(rules)) for i in screened_out
    ]
    return InventedBuild(
        domains, Passed(kept_rows, dropped_rows), entered, drops_by_stage, finished
    )


@given(builds())
def test_losses_add_up(build):
    entered_domains = {i: build.domains[i] for i in build.entered}
    table = c.attrition_table(entered_domains, build.drops_by_stage.items(), build.passed)
    losses = table.iloc[1:-1]
    last = table.iloc[-1]
    assert table["all"].iloc[0] == len(build.domains) == losses["all"].sum() + last["all"]
    assert last["all"] == last["left"] == len(build.finished)
    expected_left = len(build.domains)
    for count, rows_left in losses[["all", "left"]].itertuples(index=False):
        expected_left -= count
        assert rows_left == expected_left
    assert (table[sorted(set(build.domains.values()))].sum(axis=1) == table["all"]).all()
    expected = Counter((f"sources, {drop.stage}", drop.rule) for drop in build.passed.dropped)
    expected["sources, selection", "not drawn"] = len(build.passed.kept) - len(build.entered)
    for drop in chain.from_iterable(build.drops_by_stage.values()):
        expected[drop.stage, drop.reason] += 1
    counts = {}
    for stage, reason, count in losses[["stage", "reason", "all"]].itertuples(index=False):
        counts[stage, reason] = count
    assert counts == {loss: count for loss, count in expected.items() if count}
    stages = [stage for stage in dict.fromkeys(losses["stage"]) if stage in build.drops_by_stage]
    assert stages == [stage for stage, drops in build.drops_by_stage.items() if drops]


def test_rows_that_nobody_knows_are_an_error():
    stranger = Drop(id="b", stage="screening", reason="x")
    with pytest.raises(ValueError, match="never entered"):
        c.attrition_table({"a": "health"}, [("screening", [stranger])])
    drop = Drop(id="a", stage="screening", reason="x")
    with pytest.raises(ValueError, match="lost at screening already"):
        c.attrition_table({"a": "health"}, [("screening", [drop, drop])])
    assert c.attrition_table({"a": "health"}, [])["all"].tolist() == [1, 1]
