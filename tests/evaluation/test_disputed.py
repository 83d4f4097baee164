"""The three readings of disputed ideal levels: against counts by hand, and in the report."""

import json

import pytest

from memcalib.evaluation.disputed import (
    READINGS,
    disputed_atoms,
    dispute_lines,
    disputed_scores,
    with_reading,
)
from memcalib.io.records import write_jsonl
from memcalib.problem import Example, Level, Rollout, judgment_for
from memcalib.report.evaluation_report import evaluation_text, write_evaluation_report


def example_with(number, alternative=None, disputed=False):
    """A record of two atoms; the first may have another level, or only be marked."""
    row = Example.of(
        f"Question {number}?", {"The user is vegan.": "B", "The user has a dog.": "A"}
    ).model_dump(mode="json")
    if alternative:
        row["memories"][0]["alternative"] = [{"u_star": alternative, "reason": "another reader"}]
    if disputed:
        row["memories"][0]["disputed"] = True
    return Example.model_validate(row)


EXAMPLES = [
    *(example_with(i, alternative="C") for i in range(4)),
    *(example_with(i, disputed=True) for i in range(4, 6)),
    *(example_with(i) for i in range(6, 20)),
]


def judged(first_level, examples=EXAMPLES):
    rows = []
    for example in examples:
        first, second = example.levels
        levels = {first: Level.parse(first_level), second: Level.IGNORE}
        rows.append(judgment_for(example, levels, model="m", judge="j"))
    return rows


def test_disputed_atoms_are_those_with_an_alternative_and_those_that_are_marked():
    levels_of_atom = disputed_atoms(EXAMPLES)
    assert len(levels_of_atom) == 6
    assert sorted(set(levels_of_atom.values())) == [(Level.BOUND,), (Level.BOUND, Level.CONTROL)]


@pytest.mark.parametrize(
    ("level", "right"),
    [
        ("B", {"first": 20, "best": 20}),
        ("C", {"first": 0, "best": 4}),
        ("A", {"first": 0, "best": 0}),
    ],
)
def test_best_counts_the_named_alternative_as_right_and_nothing_else(level, right):
    disputed = disputed_atoms(EXAMPLES)
    for reading, count in right.items():
        read = with_reading(judged(level), reading, disputed)
        assert sum(j.over + j.under == 0 for j in read) == count
    without = with_reading(judged(level), "without", disputed)
    assert [len(j.atoms) for j in without] == [1] * 6 + [2] * 14
    scores = disputed_scores(judged(level), disputed, resamples=50).set_index("reading")
    assert scores.loc["best", "Exact"] == pytest.approx(100 * right["best"] / 20)
    assert scores.loc["without", "Exact"] == pytest.approx(100 if level == "B" else 30)


def test_an_answer_without_another_atom_is_left_out_and_an_unscored_atom_stays_so():
    row = example_with(1, alternative="C").model_dump(mode="json")
    row["memories"] = row["memories"][:1]
    row["memory_blocks"][0].update(
        atom_ids=row["memory_blocks"][0]["atom_ids"][:1],
        atomic_concat_text="The user is vegan.",
        memory_text="The user is vegan.",
    )
    alone = Example.model_validate(row)
    judgment = judgment_for(alone, {})
    assert with_reading([judgment], "without") == []
    (best,) = with_reading([judgment], "best")
    assert best.atoms[0].ideal == Level.BOUND and not best.scored
    with pytest.raises(ValueError, match="allowed: first, best, without"):
        with_reading([judgment], "second")
    assert READINGS == ("first", "best", "without")


def test_nothing_is_said_where_nothing_is_disputed_or_nothing_differs():
    assert disputed_scores(judged("B", EXAMPLES[6:])).empty
    assert dispute_lines(disputed_scores(judged("B", EXAMPLES[6:]))) == []
    agreed = disputed_scores(judged("B"), disputed_atoms(EXAMPLES), resamples=50)
    assert len(agreed) == 3 and dispute_lines(agreed) == []


def test_the_report_has_the_table_and_the_sentence(tmp_path):
    write_jsonl(tmp_path / "examples.jsonl", EXAMPLES)
    write_jsonl(tmp_path / "judgments.jsonl", judged("C"))
    answers = [Rollout(example_id=e.id, model="m", response="Vegan.") for e in EXAMPLES]
    write_jsonl(tmp_path / "rollouts.jsonl", answers)
    note = "No human has read its records and levels"
    (tmp_path / "manifest.json").write_text(json.dumps({"notes": [f"The set: {note}."]}))
    page = write_evaluation_report(tmp_path).read_text()
    assert "Disputed levels" in page and note in page
    assert "6 disputed atoms of 6 records" in page
    card = (tmp_path / "model-card.md").read_text()
    assert "Disputed levels matter" in card and note in card
    assert "Disputed levels matter" in evaluation_text(tmp_path)
