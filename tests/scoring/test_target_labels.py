"""Labels of a sample of the target's answers: the estimate against simulation, and every file of
labels that must be refused.
"""

import json

import numpy as np
import pandas as pd
import pytest
from judge_errors import CASES, answers_read, exam_frame_of, metrics_of

import memcalib as mc
from memcalib.products.exam import exam
from memcalib.scoring import target_labels
from memcalib.scoring.target_labels import draw_answers, load_target_labels, prediction_powered
from memcalib.io.records import DataError
from memcalib.metrics import METRICS, metric_table, prediction_powered_table, score
from memcalib.problem import AtomJudgment, Judgment, Level

ANSWERS = 300
LABELLED = 80


def estimate_of(rng, case, labels=LABELLED):
    """A judge's metrics of 300 answers to 150 questions, and the estimate with so many labels."""
    answers = answers_read(rng, case, ANSWERS // 2, 2, in_exam=False)
    judged = metrics_of(answers.ideal, answers.judged)
    true = metrics_of(answers.ideal, answers.actual)
    probabilities = np.full(ANSWERS, np.nan)
    probabilities[rng.permutation(ANSWERS)[:labels]] = labels / ANSWERS
    labelled = np.where(np.isnan(probabilities)[:, None], np.nan, true)
    powered = prediction_powered(
        judged, labelled, probabilities, answers.question, np.zeros(ANSWERS)
    )
    return answers, powered


def true_values(rng, case):
    many = answers_read(rng, case, 100_000, 2, in_exam=False)
    return metrics_of(many.ideal, many.actual).mean(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_interval_covers_the_truth_in_93_to_97_percent_of_2000_draws(case):
    rng = np.random.default_rng(27)
    truth = true_values(rng, case)
    covered = np.zeros(len(METRICS))
    draws = 2000
    for _ in range(draws):
        _, powered = estimate_of(rng, case)
        covered += (powered.low <= truth) & (truth <= powered.high)
    shares = 100 * covered / draws
    assert (shares >= 93).all() and (shares <= 97).all(), dict(zip(METRICS, shares, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "labels"), [*((case, LABELLED) for case in CASES), ("field worse than exam", 15)]
)
def test_the_model_based_estimate_is_withheld_where_it_fails(case, labels):
    """With labels at hand its values are compared with theirs, which sees what no exam can: a field
    that is worse than the exam. The wide interval of few labels is no reason to show them.
    """
    rng = np.random.default_rng(28)
    truth = true_values(rng, case)
    wrong_and_shown = 0
    shown = 0
    draws = 60
    for draw in range(draws):
        answers, powered = estimate_of(rng, case, labels)
        read = exam_frame_of(answers_read(rng, case, 120, 4, in_exam=True))
        check = exam.error_check(read, resamples=100, seed=draw)
        result = {"verdict": "passed", "error_check": check.to_dict("records")}
        atoms = exam_frame_of(answers).assign(response=lambda rows: rows["answer_id"])
        table = exam.corrected_score(atoms, exam.exam_counts(read), resamples=60)
        if not exam.why_withheld(result, table, powered):
            shown += 1
            covers = (table["corrected_low"] <= truth) & (truth <= table["corrected_high"])
            wrong_and_shown += not covers[0]
    if case == "even":
        assert shown >= draws / 2 and wrong_and_shown <= 0.15 * draws
    else:
        assert shown <= 0.05 * draws, f"shown in {shown} of {draws} draws"


def test_the_interval_is_never_empty_where_no_error_was_seen():
    values = np.full((60, 1), 100.0)
    probabilities = np.where(np.arange(60) < 20, 1 / 3, np.nan)
    labelled = np.where(np.isnan(probabilities)[:, None], np.nan, values)
    powered = prediction_powered(values, labelled, probabilities, np.arange(60), np.zeros(60))
    assert powered.estimate[0] == 100 and powered.high[0] == 100
    assert powered.low[0] == pytest.approx(100 * 0.025 ** (1 / 20))


def test_labels_of_every_answer_give_their_own_mean_whatever_the_judge_said():
    rng = np.random.default_rng(1)
    true = 100.0 * rng.integers(0, 2, (40, 6))
    judged = 100.0 * rng.integers(0, 2, (40, 6))
    powered = prediction_powered(judged, true, np.ones(40), np.arange(40), np.zeros(40))
    assert powered.estimate == pytest.approx(true.mean(axis=0))


def test_seeds_and_unequal_probabilities_are_weighted():
    """Against the plain formula: a mean over seeds of means, each labelled answer for as many as it
    stands for.
    """
    rng = np.random.default_rng(2)
    seeds = np.repeat([1, 2], [30, 60])
    true = 100.0 * rng.integers(0, 2, (90, 1))
    judged = np.where(rng.random((90, 1)) < 0.2, 100 - true, true)
    p = np.where(judged[:, 0] > 0, 0.8, 0.4)
    probabilities = np.where(rng.random(90) < p, p, np.nan)
    labelled = np.where(np.isnan(probabilities)[:, None], np.nan, true)
    powered = prediction_powered(judged, labelled, probabilities, np.arange(90), seeds)
    weights = np.where(seeds == 1, 1 / 60, 1 / 120)
    sampled = np.where(np.isnan(probabilities), 0, weights / p)
    sampled = sampled / sampled.sum()
    reliance = powered.reliance[0]
    by_hand = reliance * weights @ judged[:, 0] + sampled @ (true - reliance * judged)[:, 0]
    assert powered.estimate[0] == pytest.approx(by_hand)


def run_of(questions=30, seeds=(1, 2), judge="weak"):
    """Judgments with errors of one model, and the true level of each atom."""
    rng = np.random.default_rng(5)
    judgments = []
    truth = {}
    for q in range(questions):
        for seed in seeds:
            atoms = []
            for a in range(4):
                ideal = Level(int(rng.integers(3)))
                actual = Level(int(rng.integers(3)))
                judged_level = actual if rng.random() < 0.85 else Level.IGNORE
                atoms.append(AtomJudgment(atom_id=f"a{a}", ideal=ideal, actual=judged_level))
                truth[f"e{q}", seed, f"a{a}"] = actual
            judgments.append(
                Judgment(
                    example_id=f"e{q}",
                    domain="general",
                    question_id=f"q{q}",
                    model="target",
                    seed=seed,
                    judge=judge,
                    atoms=atoms,
                    example_hash="v1",
                )
            )
    return judgments, truth


JUDGMENTS, TRUTH = run_of()


def labelled_rows(answers=30, **changes):
    rows = []
    for row in draw_answers(JUDGMENTS, answers, seed=3):
        level = TRUTH[row.example_id, row.seed, row.atom_id]
        rows.append(row.model_copy(update={"level": level, "labeller": "ana"} | changes))
    return rows


def test_score_adds_the_estimate_and_changes_nothing_else():
    with_labels = score(JUDGMENTS, labels=labelled_rows(), resamples=100)
    without = score(JUDGMENTS, resamples=100)
    pd.testing.assert_frame_equal(with_labels[without.columns], without)
    row = with_labels.iloc[0]
    assert row["labelled_responses"] == 30
    assert row["SCS_ppi_low"] < row["SCS_ppi"] < row["SCS_ppi_high"]
    table = prediction_powered_table(with_labels)
    assert table["metric"].tolist() == list(metric_table())
    frame = pd.DataFrame(
        [
            {"atom_id": a.atom_id, "ideal": a.ideal.label, "actual": a.actual.label}
            | {"example_id": j.example_id, "seed": j.seed, "model": j.model}
            | {"question_id": j.question_id, "judge": j.judge}
            for j in JUDGMENTS
            for a in j.atoms
        ]
    )
    of_frame = mc.score(frame, labels=labelled_rows(), resamples=100).iloc[0]
    assert of_frame["SCS_ppi"] == pytest.approx(row["SCS_ppi"])


def test_a_slice_with_few_labels_has_no_estimate_and_a_model_without_labels_neither():
    other = [j.model_copy(update={"model": "other"}) for j in JUDGMENTS]
    table = score([*JUDGMENTS, *other], labels=labelled_rows(), resamples=50).set_index("model")
    assert table.loc["target", "SCS_ppi"] > 0 and np.isnan(table.loc["other", "SCS_ppi"])
    assert table.loc["other", "labelled_responses"] == 0
    few = [
        j.model_copy(update={"domain": "rare"}) if j.question_id < "q12" else j for j in JUDGMENTS
    ]
    by_domain = score(few, by="domain", labels=labelled_rows(), resamples=50).set_index("domain")
    assert np.isnan(by_domain.loc["rare", "SCS_ppi"]) and by_domain.loc["general", "SCS_ppi"] > 0
    with pytest.raises(ValueError, match=r"labelled answers to \d questions; allowed: 10 or more"):
        score(JUDGMENTS, labels=labelled_rows(5), resamples=50)


def test_a_sample_labelled_up_to_some_answer_counts_as_a_smaller_one():
    rows = labelled_rows(40)
    last = [row.answer_key for row in rows]
    half = {key for key in dict.fromkeys(last)} - {*list(dict.fromkeys(last))[:25]}
    begun = [
        row.model_copy(update={"level": None, "labeller": ""}) if row.answer_key in half else row
        for row in rows
    ]
    table = score(JUDGMENTS, labels=begun, resamples=50).iloc[0]
    small = score(JUDGMENTS, labels=labelled_rows(25), resamples=50).iloc[0]
    assert table["labelled_responses"] == 25 and table["SCS_ppi"] == pytest.approx(small["SCS_ppi"])


def test_labels_after_an_answer_without_labels_do_not_count_yet():
    """As they are when a sample was extended, or when somebody chose what to label."""
    rows = labelled_rows(40)
    drawn = list(dict.fromkeys(row.answer_key for row in rows))
    open_answers = {drawn[25], drawn[30]}
    gaps = []
    for row in rows:
        changes = {"level": None, "labeller": ""} if row.answer_key in open_answers else {}
        gaps.append(row.model_copy(update=changes))
    labels = load_target_labels(gaps)
    assert labels.labelled_answers == drawn[:25]
    assert labels.waiting_answers == drawn[26:30] + drawn[31:]
    table = score(JUDGMENTS, labels=gaps, resamples=50).iloc[0]
    small = score(JUDGMENTS, labels=labelled_rows(25), resamples=50).iloc[0]
    assert table["labelled_responses"] == 25 and table["SCS_ppi"] == pytest.approx(small["SCS_ppi"])
    none_first = [row.model_copy(update={"level": None}) for row in rows[:1]] + rows[1:]
    with pytest.raises(ValueError, match="the first of which is not labelled"):
        score(JUDGMENTS, labels=none_first, resamples=50)


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (0, {"probability": None}, "chosen by hand would bias"),
        (0, {"probability": 1.5}, "less than or equal to 1"),
        (0, {"probability": 0.9}, "as in the earlier rows"),
        (0, {"level": "D"}, "level"),
        (0, {"labeller": ""}, "who gave this level"),
        (1, {"atom_id": "a0"}, "second label for this atom; the first is in line 1; allowed"),
        (0, {"atom_id": "zz"}, "one of a0, a1, a2, a3"),
        (0, {"example_id": "nobody"}, "an answer of the run"),
        (0, {"example_hash": "v2"}, "labels of this data set"),
        (0, {"labeller_kind": "judge", "labeller": "weak"}, "a judge other than"),
    ],
)
def test_rows_that_would_be_scored_wrongly_are_refused_by_line(number, changes, words, tmp_path):
    rows = [row.model_dump(mode="json") for row in labelled_rows()]
    rows[number].update(changes)
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(DataError, match=words) as caught:
        score(JUDGMENTS, labels=file, resamples=50)
    assert "labels.jsonl:" in str(caught.value)


def test_a_row_that_stands_there_twice_is_named_by_its_second_line(tmp_path):
    from memcalib.io.records import write_jsonl

    rows = labelled_rows()
    file = write_jsonl(tmp_path / "labels.jsonl", [*rows, rows[0]])
    with pytest.raises(DataError) as caught:
        score(JUDGMENTS, labels=file, resamples=50)
    [fault] = caught.value.violations
    assert fault.line == len(rows) + 1 and "the first is in line 1" in fault.found


def test_a_sample_of_which_answers_were_thrown_away_is_refused():
    rows = labelled_rows()
    kept_rows = [row for row in rows if row.answer_key != rows[-1].answer_key]
    with pytest.raises(
        DataError, match="their probabilities are those of a sample from 58 answers"
    ):
        score(JUDGMENTS, labels=kept_rows, resamples=50)


def test_the_draw_is_seeded_nested_and_of_one_source():
    small = draw_answers(JUDGMENTS, 10, seed=4)
    large = draw_answers(JUDGMENTS, 20, seed=4)
    keys = [[row.answer_key for row in rows] for rows in (small, large)]
    assert keys[1][: len(keys[0])] == keys[0] and {row.probability for row in small} == {10 / 60}
    assert keys[0] != [row.answer_key for row in draw_answers(JUDGMENTS, 10, seed=5)]
    with pytest.raises(ValueError, match="2 sources"):
        draw_answers([*JUDGMENTS, *run_of(judge="other")[0]], 10)
    with pytest.raises(ValueError, match="allowed: 1 to 60"):
        draw_answers(JUDGMENTS, 61)


def test_a_file_comes_back_as_it_was_written(tmp_path):
    from memcalib.io.records import write_jsonl

    file = write_jsonl(tmp_path / "labels.jsonl", labelled_rows())
    labels = load_target_labels(file)
    assert list(labels.rows) == labelled_rows() and labels.labellers == ["ana"]
    assert load_target_labels(labels) is labels
    with pytest.raises(DataError, match="no row"):
        load_target_labels([])
    assert target_labels.LEAST_QUESTIONS == 10
