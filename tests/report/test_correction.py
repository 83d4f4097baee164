"""Values corrected by an exam: shown, with what they assume beside them, for answers like those
that the judge read well in it, and withheld for others.
"""

import html
import json
from functools import cache

import numpy as np
import pytest
from judge_errors import answers_read, exam_frame_of

from memcalib.products.exam.exam import error_check, exam_counts
from memcalib.scoring.target_labels import draw_answers
from memcalib.io.records import read_jsonl, write_jsonl
from memcalib.products.micro.world import make_examples
from memcalib.problem import Judgment, Level, Rollout, judgment_for
from memcalib.report.evaluation_report import (
    ASSUMES,
    MODEL_BASED,
    corrections,
    evaluation_text,
    write_evaluation_report,
)
from memcalib.report.results import write_results
from memcalib.report.run_data import load_run

SHORT = "Do it without any garlic. Take it step by step."
LONG = " ".join([SHORT] * 40)
GERMAN = "Das ist eine Antwort, und sie ist nicht sehr lang."


def part_row(name, verdict):
    return {"part": name, "verdict": verdict, "answers": 90, "atoms": 700, "accuracy": 95.0} | {
        "low": 93.0,
        "high": 97.0,
    }


@cache
def read_in_exam():
    """How a judge that errs in 4 of 100 atoms, alike in all answers, reads its exam: the counts of
    each question, and the check of these errors.
    """
    frame = exam_frame_of(answers_read(np.random.default_rng(3), "even", 120, 4, in_exam=True))
    check = error_check(frame, resamples=100)
    assert check["inside"].all()
    return exam_counts(frame).tolist(), json.loads(check.to_json(orient="records"))


def passed_exam(**changes):
    """What exam.json holds of such a judge."""
    question_counts, check = read_in_exam()
    return {
        "schema": "memcalib-exam-1",
        "judge": "careful",
        "verdict": "passed",
        "reasons": [],
        "date": "2026-11-01",
        "numbers": {"macro": 96.0},
        "data": {"hash": "0", "edited": []},
        "file": "runs/exam/careful/exam.json",
        "parts": [part_row("easy", "passed"), part_row("long", "failed")],
        "languages": {"en": 90},
        "question_counts": question_counts,
        "error_check": check,
    } | changes


def run_of(folder, responses, exam):
    """The folder of an evaluation with these answers in turn, half of the atoms used as they should
    be.
    """
    examples = make_examples("short", 40, seed=4)
    generator = np.random.default_rng(0)
    rollouts = []
    judgments = []
    for number, example in enumerate(examples):
        actual = {}
        for atom_id, level in example.levels.items():
            step = generator.choice([-2, -1, 0, 1, 2], p=[0.1, 0.1, 0.5, 0.15, 0.15])
            actual[atom_id] = Level(int(np.clip(level + step, 0, 2)))
        response = responses[number % len(responses)]
        rollouts.append(Rollout(example_id=example.id, model="m", seed=1, response=response))
        judgments.append(judgment_for(example, actual, model="m", seed=1, judge="careful"))
    write_jsonl(folder / "examples.jsonl", examples)
    write_jsonl(folder / "rollouts.jsonl", rollouts)
    write_jsonl(folder / "judgments.jsonl", judgments)
    (folder / "exam.json").write_text(json.dumps(exam))
    return folder


def label_a_sample(folder, shift=0):
    """Labels of 30 answers by a person who finds every atom used as judged, or `shift` levels
    more.
    """
    judgments = list(read_jsonl(folder / "judgments.jsonl", Judgment))
    judged = {}
    for judgment in judgments:
        for atom in judgment.atoms:
            judged[judgment.example_id, atom.atom_id] = atom.actual
    labels = []
    for row in draw_answers(judgments, 30, seed=3):
        level = Level(min(judged[row.example_id, row.atom_id] + shift, 2))
        labels.append(row.model_copy(update={"level": level, "labeller": "ana"}))
    write_jsonl(folder / "target-labels.jsonl", labels)


def test_beside_every_corrected_value_stands_what_it_assumes(tmp_path):
    folder = run_of(tmp_path, [SHORT], passed_exam())
    label_a_sample(folder)
    text = evaluation_text(folder)
    assert f"{MODEL_BASED}\n" in text and "corrected_low" in text
    assert "With fewer than 80 labelled answers the intervals are a little too narrow" in text
    page = write_evaluation_report(folder).read_text()
    condition = "each lie in the other's 95 % interval"
    assert condition in MODEL_BASED and condition in ASSUMES
    assert condition in html.unescape(page)
    assert "not contradict" not in text + page + ASSUMES
    assert ASSUMES in (folder / "tables/judge-corrected.csv").read_text()
    [row] = map(json.loads, write_results(folder).read_text().splitlines())
    assert row["corrected"]["assumes"] == ASSUMES


def test_without_labels_of_these_answers_no_corrected_value_is_shown(tmp_path):
    """A judge that reads them worse than its exam passes every other condition."""
    folder = run_of(tmp_path, [SHORT], passed_exam())
    [correction] = corrections(load_run(folder))
    assert correction.withheld == "" and not correction.shown
    reason = "it may read these answers less well than those of its exam, and there are no labels"
    text = evaluation_text(folder)
    assert reason in text and "--target-labels" in text and "corrected_low" not in text
    page = write_evaluation_report(folder).read_text()
    assert "Judge-corrected" not in page
    [row] = map(json.loads, write_results(folder).read_text().splitlines())
    assert row["corrected"] is None


def test_labels_that_disagree_withhold_the_corrected_values(tmp_path):
    folder = run_of(tmp_path, [SHORT], passed_exam())
    label_a_sample(folder, shift=1)
    [correction] = corrections(load_run(folder))
    assert "labels of these answers say otherwise" in correction.withheld
    assert not correction.shown and "say otherwise" in evaluation_text(folder)


@pytest.mark.parametrize(
    ("responses", "changes", "reason"),
    [
        ([SHORT, LONG], {}, "failed, by its weakest part, long (50 % of these answers)"),
        ([GERMAN], {}, "its weakest part, "),
        ([SHORT], {"languages": {"zh": 90}}, "language en (100 % of these answers)"),
        ([SHORT], {"parts": []}, "does not say how it reads answers of their length"),
        (
            [SHORT],
            {"parts": [part_row("easy", "undecided")]},
            "undecided, by its weakest part, easy",
        ),
        ([SHORT], {"verdict": "failed"}, "ended failed"),
    ],
)
def test_answers_unlike_those_of_passed_parts_are_not_corrected(
    tmp_path, responses, changes, reason
):
    folder = run_of(tmp_path, responses, passed_exam(**changes))
    text = evaluation_text(folder)
    assert reason in text and "not corrected for the judge's errors" in text
    assert "corrected_low" not in text
    page = write_evaluation_report(folder).read_text()
    assert "Judge-corrected" not in page and not (folder / "tables/judge-corrected.csv").exists()
    [row] = map(json.loads, write_results(folder).read_text().splitlines())
    assert row["corrected"] is None


def test_answers_whose_texts_are_gone_are_not_corrected(tmp_path):
    folder = run_of(tmp_path, [SHORT], passed_exam())
    (folder / "rollouts.jsonl").unlink()
    [correction] = corrections(load_run(folder))
    assert "texts of these answers are not in the folder" in correction.withheld


def test_one_long_answer_of_forty_changes_nothing(tmp_path):
    folder = run_of(tmp_path, [SHORT] * 39 + [LONG], passed_exam())
    [correction] = corrections(load_run(folder))
    assert correction.withheld == ""


def test_an_exam_whose_parts_cannot_be_read_is_said_and_corrects_nothing(tmp_path):
    parts = [part_row("easy", "passed"), part_row("long", "splendid")]
    folder = run_of(tmp_path, [SHORT], passed_exam(parts=parts))
    run = load_run(folder)
    note = (
        "exam.json: parts, row 2: verdict: found 'splendid'; allowed: failed, undecided, passed; "
        "the parts were left out."
    )
    assert note in run.notes
    text = evaluation_text(folder)
    assert "does not say how it reads answers of their length" in text
    assert "corrected_low" not in text
    assert "splendid" in write_evaluation_report(folder).read_text()
