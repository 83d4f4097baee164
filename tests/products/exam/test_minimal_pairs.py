"""Minimal pairs: what a file may hold, what the two answers are, and when a judge has a pair
right.
"""

import copy
import json

import numpy as np
import pytest

from memcalib.products.exam.exam import exam_frame, exam_items
from memcalib.products.exam.minimal_pairs import (
    MinimalPair,
    check_pair,
    load_pairs,
    pair_answers,
    pair_frame,
    pair_table,
)
from memcalib.io.records import DataError
from memcalib.problem import Example, Level, judgment_for

EXAMPLE = Example.of(
    "Where to?",
    {"The user walks slowly.": "B", "The user likes trams.": "A"},
    {"The user has no phone.": "C"},
    id="station",
    language="en",
)
SLOW, TRAMS, PHONE = EXAMPLE.levels
ROW = {
    "pair_id": "p1",
    "example_id": "station",
    "form": "plain",
    "response": "Take the road by the river. There are benches. Ask at the desk.",
    "edit": {
        "atom_id": SLOW,
        "passage": "There are benches.",
        "replacement": "It is paved.",
        "from": "B",
        "to": "A",
        "from_stance": "follows",
        "from_quotes": ["benches"],
    },
    "labels": [
        {"atom_id": PHONE, "actual": "C", "quotes": ["Ask at the desk"], "stance": "follows"}
    ],
    "unlisted": "A",
}


def changed(**changes):
    """The row of the pair with other values, those of the edit by names such as `edit_to`."""
    row = copy.deepcopy(ROW)
    for name, value in changes.items():
        if name.startswith("edit_"):
            row["edit"][name.removeprefix("edit_")] = value
        else:
            row[name] = value
    return row


def test_the_answers_differ_in_the_passage_and_in_one_label():
    pair = MinimalPair.model_validate(ROW)
    before, after = pair_answers(pair, EXAMPLE)
    assert before.response.replace("There are benches.", "It is paved.") == after.response
    assert before.levels == {SLOW: 1, TRAMS: 0, PHONE: 2}
    assert after.levels == {SLOW: 0, TRAMS: 0, PHONE: 2}
    assert (before.kind, before.trick, before.answer_id) == ("pair", "plain", "p1:before")
    assert json.loads(pair.to_json()) == {
        **ROW,
        "why": "",
        "edit": {**ROW["edit"], "to_quotes": []},
        "labels": [{**ROW["labels"][0], "disputed": False}],
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edit_passage": "There is a bench."}, "0 times"),
        ({"edit_passage": "e"}, "allowed: once"),
        ({"edit_replacement": "There are benches."}, "the passage itself"),
        ({"edit_to": "B", "edit_to_stance": "follows"}, "another level or another stance"),
        ({"edit_from_stance": None}, "from_stance"),
        ({"edit_to_stance": "corrects"}, "corrects at Ignore"),
        ({"edit_from_quotes": []}, "quotes"),
        ({"edit_from_quotes": ["paved"]}, "words of the answer"),
        ({"edit_atom_id": "m9"}, "m9"),
        ({"edit_from_quote": ["benches"]}, "from_quote"),
        ({"form": "trick"}, "form"),
        ({"unlisted": None}, TRAMS),
        ({"example_id": "harbour"}, "harbour"),
    ],
)
def test_faults_are_named_with_their_line(tmp_path, changes, words):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n" + json.dumps(changed(**changes)) + "\n")
    with pytest.raises(DataError) as error:
        load_pairs(file, [EXAMPLE])
    assert any(words in str(violation) for violation in error.value.violations)
    assert all("pairs.jsonl:2" in str(violation) for violation in error.value.violations)


def test_quotes_of_the_other_atoms_must_stand_in_both_answers():
    labels = [
        {"atom_id": PHONE, "actual": "C", "quotes": ["There are benches"], "stance": "follows"}
    ]
    pair = MinimalPair.model_validate(changed(labels=labels))
    (fault,) = check_pair(pair, EXAMPLE)
    assert "p1:after" in str(fault)


def test_a_repeated_pair_is_told(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(changed(pair_id="p2")) + "\n")
    with pytest.raises(DataError, match="response: .*one of its own; line 1"):
        load_pairs(file, [EXAMPLE])


def frame_of(pair, readings_by_side):
    """The exam frame of a pair that was read so: side -> {atom: level}, with a stance for the
    edited atom.
    """
    answers = pair_answers(pair, EXAMPLE)
    items = exam_items([EXAMPLE], answers, None, probes=0)
    judgments = []
    for item in items:
        levels, stance = readings_by_side[item.answer.answer_id.split(":")[1]]
        judgment = judgment_for(
            EXAMPLE, levels, condition=item.probe, sample=item.number, judge="j"
        )
        atoms = []
        for atom in judgment.atoms:
            atoms.append(atom.model_copy(update={"stance": stance if atom.actual else None}))
        judgments.append(judgment.model_copy(update={"atoms": atoms}))
    return pair_frame([pair], exam_frame(items, judgments))


def levels(slow, trams, phone):
    return {
        SLOW: None if slow is None else Level(slow),
        TRAMS: Level(trams),
        PHONE: Level(phone),
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((1, 0, 2), (0, 0, 2), (True, True, True, True, True)),
        ((1, 1, 1), (0, 1, 1), (True, True, True, True, False)),  # others wrong, yet unchanged
        ((1, 0, 2), (0, 0, 1), (True, True, False, False, False)),
        ((1, 0, 2), (1, 0, 2), (True, False, True, False, False)),
        ((2, 0, 2), (0, 0, 2), (True, False, True, False, False)),
        ((None, 0, 2), (0, 0, 2), (False, None, None, None, None)),
    ],
)
def test_when_a_pair_is_right(before, after, expected):
    readings_by_side = {
        "before": (levels(*before), "follows"),
        "after": (levels(*after), "follows"),
    }
    (row,) = frame_of(MinimalPair.model_validate(ROW), readings_by_side).to_dict("records")
    names = ("read", "changed", "unchanged", "right", "flawless")
    assert tuple(row[name] for name in names) == expected


def test_a_pair_of_stances_needs_a_judge_that_says_them():
    row = changed(edit_to="B", edit_to_stance="turns_down", edit_to_quotes=["paved"])
    pair = MinimalPair.model_validate(row)
    assert not check_pair(pair, EXAMPLE)
    same = levels(1, 0, 2)
    right = frame_of(pair, {"before": (same, "follows"), "after": (same, "turns_down")})
    wrong = frame_of(pair, {"before": (same, "follows"), "after": (same, "follows")})
    silent = frame_of(pair, {"before": (same, None), "after": (same, None)})
    assert right["right"].tolist() == [True] and wrong["right"].tolist() == [False]
    assert right["flawless"].tolist() == [True] and wrong["flawless"].tolist() == [False]
    assert silent["read"].tolist() == [False] and right["direction"].tolist() == ["stance"]
    table = pair_table(silent)
    assert table["read"].tolist() == [0] and np.isnan(table["right"].iloc[0])


def test_shares_of_pairs_have_bounds():
    readings_by_side = {"before": (levels(1, 0, 2), "follows"), "after": (levels(0, 0, 2), None)}
    one = frame_of(MinimalPair.model_validate(ROW), readings_by_side)
    (row,) = pair_table(one).to_dict("records")
    assert row["right"] == 100 and row["right_low"] < 30 and row["right_high"] == 100
    assert row["flawless"] == 100
    assert pair_table(one, by="form")["form"].tolist() == ["plain"]
