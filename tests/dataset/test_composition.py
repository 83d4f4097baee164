"""Counts against slow ones, tables in the published form, and an attrition table that adds up."""

from collections import Counter

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.dataset import card as c
from memcalib.dataset.stages import Drop
from memcalib.micro.world import make_examples
from memcalib.problem import Level, sample_records
from memcalib.dataset.sources import Dropped, Passed, SourceRow
from memcalib.report.tables import published

EXAMPLES = make_examples("long", 80, 1, "rl") + sample_records()


@pytest.fixture(scope="module")
def counts():
    return c.count_examples(iter(EXAMPLES))


def test_composition_against_a_slow_count(counts):
    table = c.composition_table(counts).set_index("domain")
    for domain, title in (
        ("health", "Health"),
        ("general", "General assistance"),
        ("coding", "Coding"),
    ):
        rows = [e for e in EXAMPLES if e.domain == domain]
        want = [len(rows), sum(len(e.blocks) for e in rows), sum(len(e.atoms) for e in rows)]
        assert table.loc[title, ["examples", "blocks", "atoms"]].tolist() == want
    assert (
        table.loc["Total", "examples"] == len(EXAMPLES)
        and table.loc["Total", "published atoms"] == 234_220
    )
    assert (
        table.iloc[:-1][["examples", "blocks", "atoms"]].sum().tolist()
        == table.iloc[-1][["examples", "blocks", "atoms"]].tolist()
    )


def test_the_form_is_the_published_one(counts):
    own = c.composition_table(counts, beside=False)
    assert own.columns.tolist() == published("benchmark_composition").columns.tolist()
    assert own["domain"].tolist() == published("benchmark_composition")["domain"].tolist()
    own = c.structure_table(counts, beside=False)
    assert own.columns.tolist() == published("benchmark_structure").columns.tolist()
    assert own["statistic"].tolist() == published("benchmark_structure")["statistic"].tolist()


def test_structure_against_a_slow_count(counts):
    values = c.structure_table(counts).set_index("statistic")["value"]
    levels = Counter(atom.ideal for e in EXAMPLES for atom in e.atoms)
    total = sum(levels.values())
    for level in Level:
        assert (
            values[f"Atoms with ideal level {level.name}"]
            == f"{levels[level]:,} ({100 * levels[level] / total:.1f}%)"
        )
    mixed = [sum(len({e.levels[a] for a in b.atom_ids}) > 1 for b in e.blocks) for e in EXAMPLES]
    assert values["Mixed-target blocks"] == f"{sum(mixed):,}"
    share = sum(map(bool, mixed))
    assert (
        values["Examples containing a mixed-target block"]
        == f"{share} ({100 * share / len(EXAMPLES):.2f}%)"
    )
    sizes = [len(b.atom_ids) for e in EXAMPLES for b in e.blocks]
    assert values["Atoms per block (min--max)"] == f"{min(sizes)}--{max(sizes)}"
    assert values["Atoms per example (min--max)"] == "{}--{}".format(
        *(f(len(e.atoms) for e in EXAMPLES) for f in (min, max))
    )


def test_domains_of_ones_own_come_last_and_have_no_published_number():
    odd = EXAMPLES[0].model_copy(update={"domain": "law"})
    table = c.composition_table(c.count_examples([odd, *EXAMPLES]))
    assert table["domain"].tolist()[-2:] == ["law", "Total"] and pd.isna(
        table["published examples"].iloc[-2]
    )


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
    rows = {f"r{n}": draw(DOMAINS) for n in range(draw(st.integers(1, 30)))}
    order = draw(st.permutations(sorted(rows)))
    screened = order[: draw(st.integers(0, len(order) - 1))]
    kept = order[len(screened) :]
    undrawn = kept[: draw(st.integers(0, len(kept) - 1))]
    entered = kept[len(undrawn) :]
    stages = {}
    left = list(entered)
    for name in ("screening", "annotation", "review"):
        lost = left[: draw(st.integers(0, len(left)))]
        left = left[len(lost) :]
        stages[name] = [Drop(id=i, stage=name, reason=draw(REASONS)) for i in lost]

    def row(i):
        return SourceRow(id=i, source="s", domain=rows[i], question="q", answer="a")

    dropped = [
        Dropped(
            id=i, domain=rows[i], stage="screening", rule=draw(st.sampled_from(["noise", "length"]))
        )
        for i in screened
    ]
    return rows, Passed([row(i) for i in kept], dropped), entered, stages, left


@given(builds())
def test_losses_add_up(build):
    rows, passed, entered, stages, left = build
    table = c.attrition_table({i: rows[i] for i in entered}, stages.items(), passed)
    losses = table.iloc[1:-1]
    kept = table.iloc[-1]
    assert table["all"].iloc[0] == len(rows) == losses["all"].sum() + kept["all"]
    assert kept["all"] == kept["left"] == len(left)
    assert table["left"].tolist() == [
        *(len(rows) - table["all"].iloc[1 : k + 1].sum() for k in range(len(table) - 1)),
        len(left),
    ]
    assert (table[sorted(set(rows.values()))].sum(axis=1) == table["all"]).all()
    want = Counter((drop.stage, drop.reason) for drops in stages.values() for drop in drops)
    want.update((f"sources, {drop.stage}", drop.rule) for drop in passed.dropped)
    want["sources, selection", "not drawn"] += len(passed.kept) - len(entered)
    found = {
        (stage, reason): count
        for stage, reason, count in losses[["stage", "reason", "all"]].itertuples(index=False)
    }
    assert found == {key: n for key, n in want.items() if n}
    order = [stage for stage in dict.fromkeys(losses["stage"]) if stage in stages]
    assert order == [name for name in stages if stages[name]]


def test_rows_that_nobody_knows_are_an_error():
    with pytest.raises(ValueError, match="never entered"):
        c.attrition_table(
            {"a": "health"}, [("screening", [Drop(id="b", stage="screening", reason="x")])]
        )
    drop = Drop(id="a", stage="screening", reason="x")
    with pytest.raises(ValueError, match="lost at screening already"):
        c.attrition_table({"a": "health"}, [("screening", [drop, drop])])
    assert c.attrition_table({"a": "health"}, [])["all"].tolist() == [1, 1]
