"""The starter set is what its card says: sizes, ranges, families, channels, no copies, no leak, hashes."""

from collections import Counter

import pytest

from memcalib.dataset.duplicates import similar_pairs
from memcalib.dataset.lint import lint_files
from memcalib.dataset.writing import FAMILIES
from memcalib.evaluation.exam import edited_files, starter_answers
from memcalib.io.settings import package_data
from memcalib.problem import Level, load_examples

EXAMPLES, ANSWERS = starter_answers()
POOL = {example.id: example for example in EXAMPLES}


def test_sizes_and_shares():
    assert len(EXAMPLES) >= 120 and len(ANSWERS) >= 480
    domains = Counter(example.domain for example in EXAMPLES)
    assert (
        set(domains) == {"coding", "general", "health"}
        and max(domains.values()) - min(domains.values()) <= 3
    )
    assert {3, 20} >= {min(len(e.blocks) for e in EXAMPLES)} and 17 <= max(
        len(e.blocks) for e in EXAMPLES
    ) <= 20
    profiles = Counter("".join(sorted({a.ideal.wire for a in e.atoms})) for e in EXAMPLES)
    assert set(profiles) == {"ABC", "AC", "AB", "A"} and profiles["ABC"] > 60 and profiles["A"] <= 8
    languages = Counter(example.model_extra["language"] for example in EXAMPLES)
    assert set(languages) == {"en", "de", "es", "zh"} and min(languages.values()) >= 5


def test_every_family_kind_and_action_is_there():
    atoms = [atom for example in EXAMPLES for atom in example.atoms]
    families = Counter(atom.model_extra.get("hard_a_family") for atom in atoms)
    assert set(FAMILIES) <= set(families) and min(families[name] for name in FAMILIES) >= 10
    assert {"grounded", "hard", "auxiliary", "noise"} == {
        atom.model_extra["kind"] for atom in atoms
    }
    assert sum(atom.memory_action == "correct" for atom in atoms) >= 8
    assert all(
        atom.ideal == Level.IGNORE for atom in atoms if atom.model_extra["kind"] != "grounded"
    )


def test_every_channel_has_a_hundred_labelled_atoms_and_every_record_four_answers():
    channels = Counter(
        (POOL[a.example_id].levels[i], level) for a in ANSWERS for i, level in a.levels.items()
    )
    assert len(channels) == 9 and min(channels.values()) >= 100
    assert min(Counter(answer.example_id for answer in ANSWERS).values()) >= 4
    for answer in ANSWERS:
        gaps = [level - POOL[answer.example_id].levels[i] for i, level in answer.levels.items()]
        if answer.kind == "calibrated":
            assert not any(gaps), answer.answer_id
        elif answer.kind in ("over", "under"):
            assert any(gap > 0 if answer.kind == "over" else gap < 0 for gap in gaps) or not any(
                POOL[answer.example_id].levels.values()
            )


def test_no_two_records_and_no_two_answers_are_alike():
    assert not list(similar_pairs([example.question for example in EXAMPLES]))
    assert not list(
        similar_pairs([" ".join(b.memory_text for b in example.blocks) for example in EXAMPLES])
    )
    assert len({answer.response for answer in ANSWERS}) == len(ANSWERS)


def test_lint_finds_no_error_and_warns_of_ignore_only_records_alone():
    result = lint_files(["starter"])
    assert not result.errors
    assert {finding.rule for finding in result.findings} <= {"all_ignore"}


def test_the_hashes_fit_and_an_edit_is_told(tmp_path):
    assert edited_files() == []
    for name in ("records.jsonl", "answers.jsonl", "hashes.json"):
        (tmp_path / name).write_bytes(package_data("data", "starter", name).read_bytes())
    text = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    (tmp_path / "answers.jsonl").write_text(
        text.replace('"actual":"B"', '"actual":"C"', 1).replace(
            '"actual": "B"', '"actual": "C"', 1
        ),
        encoding="utf-8",
    )
    assert len(edited_files(tmp_path)) == 1 and "answers.jsonl" in edited_files(tmp_path)[0]


def test_names_of_shipped_sets():
    assert len(load_examples("samples")) == 9 and len(load_examples()) == len(EXAMPLES)
    with pytest.raises(FileNotFoundError):
        load_examples("stater")


def test_the_card_is_what_the_tool_writes():
    """Numbers on the card come from the files."""
    card = package_data("data", "starter", "card.md").read_text(encoding="utf-8")
    labels = sum(len(answer.labels) for answer in ANSWERS)
    assert (
        f"{len(EXAMPLES)} records and {len(ANSWERS)} answers with {labels:,} labelled atoms" in card
    )
    assert (
        str(sum(label.disputed for answer in ANSWERS for label in answer.labels)) + " labels in all"
        in card
    )
