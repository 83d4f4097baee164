"""Parts of an exam: which answers belong where, and which part decides for the answers of an
evaluation.
"""

import numpy as np
import pandas as pd
import pytest

from memcalib.products.exam.exam_parts import (
    check_parts,
    count_words,
    exam_parts,
    looks_of,
    verdict_for,
    why_unlike,
)
from memcalib.io.records import DataError

SHORT = "Take the tram."
LONG = "word " * 200


@pytest.mark.parametrize(
    ("response", "language", "looks"),
    [
        (SHORT, "en", []),
        (SHORT, "", []),
        (SHORT, "fr", ["other language"]),
        (LONG, "en", ["long"]),
        ("字" * 400, "zh", ["long", "other language"]),
        ("字" * 399, "zh", ["other language"]),
        ("# One\n\ntext", "en", []),
        ("- one\n- two", "en", ["Markdown"]),
        ("1. one\n2. two\n```\nx\n```", "en", ["Markdown", "code"]),
    ],
)
def test_what_an_answer_looks_like(response, language, looks):
    assert looks_of(response, language) == looks


def test_two_east_asian_characters_count_as_one_word():
    assert count_words("two words 四个汉字") == 4


def frame_of(answers):
    """An exam frame of answers {id: (kind, language, right)} with forty atoms at each level; a
    share of them is read one level off.
    """
    rows = []
    for number, (answer_id, (kind, language, right)) in enumerate(answers.items()):
        for atom in range(120):
            actual = atom % 3
            is_wrong = atom // 3 >= 40 * right
            rows.append(
                {
                    "answer_id": answer_id,
                    "question_id": f"q{number}",
                    "language": language,
                    "kind": kind,
                    "trick": "",
                    "probe": "plain",
                    "actual": actual,
                    "judged": (actual + is_wrong) % 3,
                }
            )
    return pd.DataFrame(rows)


def test_a_part_has_its_own_verdict():
    answers = {"a": ("over", "en", 1.0), "b": ("under", "de", 0.5), "c": ("pair", "en", 0.9)}
    frame = frame_of(answers)
    parts = exam_parts(frame, dict.fromkeys(answers, SHORT)).set_index("part")
    assert (
        parts.loc["easy", "accuracy"] == 75 and parts.loc["other language", "verdict"] == "failed"
    )
    assert parts.loc["pairs", "verdict"] == "passed" and "long" not in parts.index
    assert parts.loc["easy", "answers"] == 2


def test_a_part_without_a_level_is_undecided():
    frame = frame_of({"a": ("over", "en", 1.0)})
    parts = exam_parts(frame[frame["actual"] > 0], {"a": SHORT})
    assert parts["verdict"].tolist() == ["undecided"] and np.isnan(parts["accuracy"].iloc[0])


def row(part_name, verdict, low):
    return {
        "part": part_name,
        "answers": 9,
        "atoms": 99,
        "accuracy": low + 2,
        "low": low,
        "high": low + 4,
        "verdict": verdict,
    }


@pytest.mark.parametrize(
    ("answers", "verdict", "word"),
    [
        ([(SHORT, "en")] * 10, "passed", "easy"),
        ([(SHORT, "en")] * 19 + [(LONG, "en")], "passed", "easy"),
        ([(SHORT, "en")] * 9 + [(LONG, "en")], "failed", "long (10 %"),
        ([(SHORT, "fr")] * 9, "undecided", "no such answer"),
        ([], "passed", "easy"),
    ],
)
def test_the_weakest_part_that_the_answers_resemble_decides(answers, verdict, word):
    parts = [row("easy", "passed", 92), row("long", "failed", 60), row("pairs", "failed", 40)]
    decided, sentence = verdict_for(parts, answers)
    assert decided == verdict and word in sentence


GERMAN = "Das ist eine Antwort, und sie ist nicht sehr lang."


def test_a_language_that_nobody_stated_is_told_by_its_small_words():
    parts = [row("easy", "passed", 92), row("other language", "failed", 60)]
    assert verdict_for(parts, [(GERMAN, "")] * 3)[0] == "failed"
    assert verdict_for(parts, [(SHORT, "")])[0] == "passed"


def test_a_language_that_the_exam_did_not_have_is_undecided():
    parts = [row("easy", "passed", 92), row("other language", "passed", 90)]
    answers = [(GERMAN, "de")] * 2 + [(SHORT, "en")] * 8
    assert verdict_for(parts, answers, {"en": 90, "de": 10})[0] == "passed"
    verdict, sentence = verdict_for(parts, answers, {"en": 90, "zh": 10})
    assert verdict == "undecided"
    assert "language de (20 % of these answers): its exam had no such answer" in sentence


def test_scores_are_corrected_only_for_answers_like_those_of_passed_parts():
    parts = [row("easy", "passed", 92), row("long", "undecided", 80)]
    assert why_unlike({"parts": parts}, [(SHORT, "en")]) == ""
    assert "its weakest part, long (50 %" in why_unlike({"parts": parts}, [(SHORT, ""), (LONG, "")])
    assert "does not say how it reads" in why_unlike({"verdict": "passed"}, [(SHORT, "en")])


MALFORMED = [
    ("long", "parts: found 'long'; allowed: a list of rows"),
    ({"easy": {}}, "parts: found {'easy': {}}; allowed: a list of rows"),
    (["easy"], "parts, row 1: row: found 'easy'; allowed: an object"),
    ([{"verdict": "passed"}], "parts, row 1: part: found nothing; allowed: easy, pairs, "),
    ([row("easy", "passed", 92), row("poem", "passed", 92)], "parts, row 2: part: found 'poem'"),
    (
        [row("easy", "passed", 92), row("easy", "failed", 12)],
        "parts, row 2: part: found 'easy' twice; allowed: once",
    ),
    (
        [row("easy", "good", 92)],
        "parts, row 1: verdict: found 'good'; allowed: failed, undecided, passed",
    ),
    (
        [{**row("easy", "passed", 92), "accuracy": "94"}],
        "parts, row 1: accuracy: found '94'; allowed: a number from 0 to 100, or null",
    ),
    ([{**row("easy", "passed", 92), "low": True}], "parts, row 1: low: found True"),
    ([{**row("easy", "passed", 92), "high": 101}], "parts, row 1: high: found 101"),
    (
        [{**row("easy", "passed", 92), "answers": -1}],
        "parts, row 1: answers: found -1; allowed: a whole number from 0",
    ),
    ([row("easy", [], 92)], "parts, row 1: verdict: found []"),
]


@pytest.mark.parametrize(("parts", "message"), MALFORMED, ids=lambda value: str(value)[:30])
def test_a_part_that_cannot_be_read_is_named_with_file_row_and_field(parts, message):
    with pytest.raises(DataError) as error:
        verdict_for(parts, [(SHORT, "en")], file="runs/exam/exam.json")
    assert f"runs/exam/exam.json: {message}" in str(error.value)
    with pytest.raises(DataError) as error:
        why_unlike({"parts": parts, "file": "runs/exam/exam.json"}, [(SHORT, "en")])
    assert f"runs/exam/exam.json: {message}" in str(error.value)


def test_all_faults_of_the_parts_are_listed_and_nothing_known_is_no_fault():
    parts = [row("easy", "good", 92), {**row("long", "passed", 60), "low": None, "high": "many"}]
    with pytest.raises(DataError) as error:
        check_parts(parts)
    assert [(fault.item, fault.rule) for fault in error.value.violations] == [
        ("parts, row 1", "verdict"),
        ("parts, row 2", "high"),
    ]
    unknown = {"accuracy": None, "low": None, "high": float("nan")}
    check_parts([{**row("easy", "undecided", 92), **unknown}])
