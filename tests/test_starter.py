"""The starter set is what its card says: sizes, ranges, families, channels, no copies,
no leak, hashes.
"""

import json
import re
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from memcalib.commands.evaluate import Evaluation, data_notes, drawn_evenly, subsets_not_read
from memcalib.products.dataset.duplicates import similar_pairs
from memcalib.products.dataset.lint import lint_files
from memcalib.products.dataset.writing import FAMILIES
from memcalib.products.exam.exam import edited_files, starter_answers
from memcalib.products.exam.minimal_pairs import PAIR_FORMS, pair_answers, starter_pairs
from memcalib.io.settings import package_data
from memcalib.problem import SUBSETS, Example, Level, load_examples
from tools.starter_card import form_cues, form_table
from tools.starter_differences import (
    SHAPES,
    base_rate,
    error_rates,
    expected_score,
    practice_judgments,
    scores_by_question,
)

EXAMPLES, ANSWERS = starter_answers()
EXAMPLE_BY_ID = {example.id: example for example in EXAMPLES}
CORE = load_examples("starter:core")
ADDED = {"conversations": 80, "agentic": 60, "long": 60, "sensitive": 40}


def letters_of_levels(example) -> str:
    """The levels that occur in a record, such as "AC"."""
    return "".join(sorted({atom.ideal.wire for atom in example.atoms}))


def test_sizes_and_shares():
    assert len(CORE) == 120 and len(ANSWERS) >= 480
    domains = Counter(example.domain for example in CORE)
    assert set(domains) == {"coding", "general", "health"}
    assert max(domains.values()) - min(domains.values()) <= 3
    block_counts = [len(example.blocks) for example in CORE]
    assert min(block_counts) == 3 and 17 <= max(block_counts) <= 20
    profiles = Counter(letters_of_levels(example) for example in CORE)
    assert set(profiles) == {"ABC", "AC", "AB", "A"} and profiles["ABC"] > 60 and profiles["A"] <= 8
    languages = Counter(example.model_extra["language"] for example in CORE)
    assert set(languages) == {"en", "de", "es", "zh"} and min(languages.values()) >= 5


def test_the_added_subsets_have_their_sizes_and_the_shape_of_the_paper():
    added = [example for example in EXAMPLES if example.model_extra["subset"] != "core"]
    counts = Counter(example.model_extra["subset"] for example in added)
    assert counts == ADDED
    atoms = list(chain.from_iterable(example.atoms for example in added))
    ignored = sum(atom.ideal == Level.IGNORE for atom in atoms) / len(atoms)
    assert 0.82 < ignored < 0.88
    languages = Counter(example.model_extra["language"] for example in EXAMPLES)
    assert len(languages) >= 7 and min(languages.values()) >= 10
    other = sum(example.model_extra["language"] != "en" for example in added)
    assert 0.15 < other / len(added) < 0.3
    for example in added:
        subset = example.model_extra["subset"]
        if subset in ("conversations", "agentic"):
            assert example.turns, example.id
        if subset == "long":
            assert 30 <= len(example.atoms) <= 63 and 8 <= len(example.blocks) <= 20, example.id


def test_subsets_that_only_their_writer_has_read_are_named_wherever_they_are_used():
    unread = subsets_not_read()
    assert set(unread) <= set(SUBSETS)
    for subset in unread:
        assert any(subset in note for note in data_notes(f"starter:{subset}"))
        assert any(subset in note for note in data_notes("starter"))
    assert not any("anyone but their writer" in note for note in data_notes("starter:core"))
    assert Evaluation.model_fields["data"].default == ("starter:core" if unread else "starter")


def test_every_family_kind_and_action_is_there():
    atoms = list(chain.from_iterable(example.atoms for example in EXAMPLES))
    families = Counter(atom.model_extra.get("hard_a_family") for atom in atoms)
    assert set(FAMILIES) <= set(families) and min(families[name] for name in FAMILIES) >= 10
    kinds = {atom.model_extra["kind"] for atom in atoms}
    assert kinds == {"grounded", "hard", "auxiliary", "noise"}
    assert sum(atom.memory_action == "correct" for atom in atoms) >= 8
    for atom in atoms:
        assert atom.model_extra["kind"] == "grounded" or atom.ideal == Level.IGNORE


def test_every_channel_has_a_hundred_labelled_atoms_and_every_record_four_answers():
    channels = Counter()
    for answer in ANSWERS:
        ideal_levels = EXAMPLE_BY_ID[answer.example_id].levels
        gaps = []
        for atom_id, actual in answer.levels.items():
            channels[ideal_levels[atom_id], actual] += 1
            gaps.append(actual - ideal_levels[atom_id])
        if answer.kind == "calibrated":
            assert not any(gaps), answer.answer_id
        elif answer.kind == "over" and any(ideal_levels.values()):
            assert max(gaps) > 0, answer.answer_id
        elif answer.kind == "under" and any(ideal_levels.values()):
            assert min(gaps) < 0, answer.answer_id
    assert len(channels) == 9 and min(channels.values()) >= 100
    of_record = Counter(answer.example_id for answer in ANSWERS)
    assert min(of_record.values()) >= 4 and set(of_record) == {example.id for example in CORE}


def test_no_two_records_and_no_two_answers_are_alike():
    questions = [example.question for example in EXAMPLES]
    memories = []
    for example in EXAMPLES:
        memories.append(" ".join(block.memory_text for block in example.blocks))
    assert not list(similar_pairs(questions))
    assert not list(similar_pairs(memories))
    assert len({answer.response for answer in ANSWERS}) == len(ANSWERS)


def test_lint_finds_no_error_and_in_the_core_warns_of_ignore_only_records_alone():
    assert not lint_files(["starter"]).errors
    assert {finding.rule for finding in lint_files(["starter:core"]).findings} <= {"all_ignore"}


def test_the_hashes_fit_and_an_edit_is_told(tmp_path):
    assert edited_files() == []
    names = ["records.jsonl", "answers.jsonl", "pairs.jsonl"]
    if package_data("data", "starter", "real.jsonl").is_file():
        names.append("real.jsonl")
    stated = package_data("data", "starter", "hashes.json").read_text(encoding="utf-8")
    assert list(json.loads(stated)) == names
    for name in [*names, "hashes.json"]:
        (tmp_path / name).write_bytes(package_data("data", "starter", name).read_bytes())
    text = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    edited_text, edits = re.subn(r'("actual": ?)"B"', r'\1"C"', text, count=1)
    assert edits == 1
    (tmp_path / "answers.jsonl").write_text(edited_text, encoding="utf-8")
    (message,) = edited_files(tmp_path)
    assert "answers.jsonl" in message


def test_names_of_shipped_sets():
    assert len(load_examples("samples")) == 9 and load_examples() == EXAMPLES
    with pytest.raises(FileNotFoundError):
        load_examples("stater")


def test_the_card_is_what_the_tool_writes():
    """Numbers on the card come from the files."""
    card = package_data("data", "starter", "card.md").read_text(encoding="utf-8")
    labels = list(chain.from_iterable(answer.labels for answer in ANSWERS))
    sizes = f"{len(EXAMPLES)} records and {len(ANSWERS)} answers"
    assert f"{sizes} with {len(labels):,} labelled atoms" in card
    disputed = sum(label.disputed for label in labels)
    assert f"{disputed} labels in all" in card


def test_subsets_have_names_and_one_that_does_not_exist_is_told():
    core = load_examples("starter:core")
    assert len(core) == 120
    assert {example.model_extra["subset"] for example in core} == {"core"}
    with pytest.raises(ValueError, match="found 'agnetic'.*agentic"):
        load_examples("starter:agnetic")


def test_a_first_look_is_drawn_evenly_and_the_same_each_time():
    drawn = drawn_evenly(EXAMPLES, 60)
    assert drawn == drawn_evenly(EXAMPLES, 60) and len(drawn) == 60
    counts = Counter(example.model_extra["subset"] for example in drawn)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert drawn_evenly(EXAMPLES, 10_000) == EXAMPLES


def test_the_pairs_have_every_form_direction_and_channel():
    pairs = starter_pairs(EXAMPLES)
    assert len(pairs) >= 200
    forms = Counter(pair.form for pair in pairs)
    assert set(forms) == set(PAIR_FORMS) and min(forms.values()) >= 10
    directions = Counter(pair.edit.direction for pair in pairs)
    assert len(directions) == 7 and min(directions.values()) >= 25
    channels = Counter()
    for pair in pairs:
        example = EXAMPLE_BY_ID[pair.example_id]
        for answer in pair_answers(pair, example):
            ideal = example.levels[pair.edit.atom_id]
            channels[ideal, answer.levels[pair.edit.atom_id]] += 1
    assert len(channels) == 9 and min(channels.values()) >= 15
    languages = {
        pair.language or EXAMPLE_BY_ID[pair.example_id].model_extra["language"] for pair in pairs
    }
    assert len(languages) >= 7
    card = package_data("data", "starter", "card.md").read_text(encoding="utf-8")
    assert f"{len(pairs)} pairs of answers" in card


def record_with_used_atom_at(used_position: int, number: int) -> Example:
    """A record of one block of three atoms in the same words, one of them at Control."""
    atoms = []
    for index in range(3):
        level = "C" if index == used_position else "A"
        text = "The user keeps a blue boat."
        atoms.append({"atom_id": f"m_a{index}", "text": text, "u_star": level})
    text_of_block = " ".join(atom["text"] for atom in atoms)
    block = {
        "parent_memory_id": "m",
        "memory_text": text_of_block,
        "atomic_concat_text": text_of_block,
        "atom_ids": [atom["atom_id"] for atom in atoms],
    }
    return Example.model_validate(
        {
            "id": f"r{number}",
            "domain": "general",
            "question": "What now?",
            "memory_blocks": [block],
            "memories": [{**atom, "parent_memory_id": "m"} for atom in atoms],
            "language": "en",
            "subset": "core",
        }
    )


def test_the_measure_of_form_sees_a_place_that_tells_and_none_where_places_are_even():
    telling = form_table([record_with_used_atom_at(0, number) for number in range(30)])
    assert telling["place, block, length"][0] == "100.0" and telling["both"][0] == "100.0"
    assert telling["words"][0] == "50.0"
    even = form_table([record_with_used_atom_at(number // 10 % 3, number) for number in range(90)])
    assert 40 <= float(even["place, block, length"][0]) <= 60


def test_the_cues_of_form_say_place_size_and_length():
    cues = form_cues(record_with_used_atom_at(0, 0))
    assert cues.keys() == {"m_a0", "m_a1", "m_a2"}
    assert {"<place 0>", "<places behind 2>", "<size 3>", "<block 0>"} <= cues["m_a0"]
    assert cues["m_a0"] - cues["m_a2"] == {"<place 0>", "<places behind 2>"}


def test_the_card_says_which_differences_the_set_shows():
    card = package_data("data", "starter", "card.md").read_text(encoding="utf-8")
    reading = json.loads(package_data("data", "starter", "reading.json").read_text("utf-8"))
    rows = reading["differences"]
    sizes = Counter(example.model_extra["subset"] for example in EXAMPLES)
    assert {row["records"]: row["questions"] for row in rows} == {"all": len(EXAMPLES), **sizes}
    for row in rows:
        assert f"| {' | '.join(str(value) for value in row.values())} |" in card


def test_a_practice_model_of_a_score_reaches_it():
    examples = load_examples("starter:sensitive")
    difficulty = np.random.default_rng(1).lognormal(0.0, 0.8, len(examples))
    for shape in SHAPES:
        base = base_rate(examples, difficulty, 60, shape)
        rates = error_rates(examples, difficulty, base, shape)
        assert expected_score(examples, rates) == pytest.approx(60, abs=0.01)
        generator = np.random.default_rng(2)
        judgments = []
        for number in range(20):
            judgments += practice_judgments(examples, rates, f"model {number}", generator)
        assert scores_by_question(judgments).mean() == pytest.approx(60, abs=3)


def test_the_card_says_what_form_tells():
    card = package_data("data", "starter", "card.md").read_text(encoding="utf-8")
    assert "both, own records" in card and "The aim is at most 65.0 % by both; it is " in card
