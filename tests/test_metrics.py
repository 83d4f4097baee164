"""Metrics against slow, obvious loops, published tables, and files that must be refused."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from strategies import judgment_lists, make
import memcalib
from memcalib import metrics
from memcalib.evaluation.breakdown import by_source, score_text
from memcalib.metrics import METRICS, calibration_metrics, response_frame, score
from memcalib.problem import AtomJudgment, Judgment, Level
from memcalib.io.records import DataError, write_jsonl

REFERENCE = Path(memcalib.__file__).parent / "data" / "reference"
counts = st.integers(0, 40)
drawn = settings(max_examples=60, deadline=None, derandomize=True)


def slow_metrics(over, under, rho):
    """The definitions, one response at a time."""
    total = dict.fromkeys(METRICS, 0.0)
    for o, u in zip(over, under, strict=True):
        total["SCS"] += rho ** (o + u)
        total["Exact"] += o + u == 0
        total["sMOS"] += 1 - rho**o
        total["sMUS"] += 1 - rho**u
        total["AOR"] += o > 0
        total["AUR"] += u > 0
    return {name: 100 * value / len(over) for name, value in total.items()}


@drawn
@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=30), st.floats(0.05, 0.95))
def test_calibration_metrics_equal_the_loop(pairs, rho):
    over, under = zip(*pairs, strict=True)
    assert calibration_metrics(over, under, rho) == pytest.approx(
        slow_metrics(over, under, rho), abs=1e-9
    )


@drawn
@given(judgment_lists())
def test_summary_is_over_scored_answers_and_gives_no_number_of_nothing(judged):
    scored = [j for j in judged if j.scored]
    summary = metrics.summary(judged)
    assert summary.pop("unscored") == len(judged) - len(scored)
    assert list(summary) == list(metrics.metric_table())
    if scored:
        slow = slow_metrics([j.over for j in scored], [j.under for j in scored], 0.5)
        assert {name: summary[name] for name in METRICS} == pytest.approx(slow, abs=1e-9)
    else:
        assert all(math.isnan(value) for value in summary.values())


@drawn
@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=30))
def test_bounds_between_metrics(pairs):
    over, under = zip(*pairs, strict=True)
    m = calibration_metrics(over, under)
    assert all(0 <= value <= 100 for value in m.values())
    assert m["Exact"] - 1e-9 <= m["SCS"] <= 50 + m["Exact"] / 2 + 1e-9
    assert 100 - m["sMOS"] - m["sMUS"] - 1e-9 <= m["SCS"] <= 100 - max(m["sMOS"], m["sMUS"]) + 1e-9
    swapped = calibration_metrics(under, over)
    assert (swapped["sMOS"], swapped["AOR"], swapped["SCS"]) == (m["sMUS"], m["AUR"], m["SCS"])


@pytest.mark.parametrize(
    ("over", "under", "words"),
    [
        ([], [], "no scored response"),
        ([1], [1, 2], "the same number of each"),
        ([-1], [0], "-1"),
        ([0.5], [0], "whole numbers"),
        ([True], [False], "whole numbers"),
        ([[1]], [[1]], "shape"),
        (["1"], [0], "whole numbers"),
    ],
)
def test_bad_totals_are_refused(over, under, words):
    with pytest.raises(ValueError, match=words):
        calibration_metrics(over, under)


@pytest.mark.parametrize("rho", [0, 1, -0.5, 2, math.nan])
def test_bad_rho_is_refused(rho):
    with pytest.raises(ValueError, match="rho"):
        calibration_metrics([1], [1], rho)


@drawn
@given(judgment_lists())
def test_score_equals_the_loop(judgments):
    per_seed = defaultdict(list)
    for j in judgments:
        if all(a.actual is not None for a in j.atoms):
            per_seed[j.seed].append((j.over, j.under))
    if not per_seed:
        with pytest.raises(ValueError, match="undefined"):
            metrics.score(judgments, resamples=20)
        return
    row = metrics.score(judgments, resamples=20).iloc[0]
    seeds = [slow_metrics(*zip(*pairs, strict=True), 0.5) for pairs in per_seed.values()]
    for name in METRICS:
        values = [m[name] for m in seeds]
        mean = sum(values) / len(values)
        assert row[name] == pytest.approx(mean)
        if len(values) > 1:
            assert row[f"{name}_std"] == pytest.approx(
                (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
            )
        else:
            assert math.isnan(row[f"{name}_std"])
    assert row["responses"] == len(judgments)
    assert row["unscored_responses"] == sum(
        any(a.actual is None for a in j.atoms) for j in judgments
    )
    assert row["unscored_atoms"] == sum(a.actual is None for j in judgments for a in j.atoms)


@drawn
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_bootstrap_equals_the_loop(questions, seeds, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 3, size=(seeds, questions))
    totals = rng.random((seeds, questions, 2)) * sizes[..., None]
    fast = metrics.bootstrap_means(totals, sizes, resamples=25, seed=seed)
    picks = np.random.default_rng(seed).integers(questions, size=(25, questions))
    for k, pick in enumerate(picks):
        means = [
            sum(totals[s, q] for q in pick) / sum(sizes[s, q] for q in pick)
            for s in range(seeds)
            if sum(sizes[s, q] for q in pick)
        ]
        want = sum(means) / len(means) if means else np.full(2, np.nan)
        np.testing.assert_allclose(fast[k], want)


def test_interval_narrows_with_questions_not_with_copies_of_an_answer():
    rng = np.random.default_rng(0)
    errors = rng.integers(0, 3, size=200)

    def width(questions, samples):
        js = [
            make([0], [int(e)], f"e{k}", sample=s)
            for k, e in enumerate(errors[:questions])
            for s in range(samples)
        ]
        row = metrics.score(js).iloc[0]
        return row["SCS_high"] - row["SCS_low"]

    assert width(200, 1) < 0.6 * width(50, 1)
    assert width(50, 4) == pytest.approx(width(50, 1))


def test_bootstrap_is_reproducible_and_seeded():
    js = [make([0] * 9, [k % 3] * (k % 9) + [0] * (9 - k % 9), f"e{k}") for k in range(30)]
    assert metrics.score(js).equals(metrics.score(js))
    assert not metrics.score(js).equals(metrics.score(js, seed=1))


def test_order_of_judgments_does_not_matter():
    js = [
        make([0, 1, 2], [k % 3, 1, (k + s) % 3], f"e{k}", seed=s)
        for k in range(12)
        for s in range(3)
    ]
    pd.testing.assert_frame_equal(metrics.score(js), metrics.score(js[::-1]))


def test_judges_and_conditions_never_share_a_row():
    js = [
        make([0], [0], judge="a"),
        make([0], [2], judge="b"),
        make([0], [1], judge="a", condition="no_memory"),
    ]
    assert metrics.score(js)["SCS"].tolist() == [100.0, 25.0, 50.0]
    assert list(by_source(js)) == [
        "m · full_memory · a",
        "m · full_memory · b",
        "m · no_memory · a",
    ]


def test_a_judgment_without_atoms_counts_as_unscored():
    empty = make([], [], "e2", error="the judge timed out")
    row = metrics.score([make([0], [0]), empty]).iloc[0]
    assert (row["SCS"], row["responses"], row["unscored_responses"]) == (100.0, 2, 1)


def test_a_response_judged_twice_is_refused():
    with pytest.raises(ValueError, match="judged twice"):
        metrics.score([make([0], [0]), make([0], [1])])


def test_unknown_slices_are_named():
    with pytest.raises(ValueError, match=r"'size'.*domain, atom_count"):
        metrics.score([make([0], [0])], by="size")


@drawn
@given(judgment_lists())
def test_controls_follow_from_ideal_levels(judgments):
    table = metrics.controls(judgments, resamples=10).set_index("model")
    examples = {j.example_id: [int(a.ideal) for a in j.atoms] for j in judgments}.values()
    for level in Level:
        over = [sum(max(level - u, 0) for u in ideal) for ideal in examples]
        under = [sum(max(u - level, 0) for u in ideal) for ideal in examples]
        want = slow_metrics(over, under, 0.5)
        assert {m: table.loc[f"all {level.label}", m] for m in METRICS} == pytest.approx(want)
        assert table.loc[f"all {level.label}", "unscored_responses"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row["atoms"][0].update(actual="D"), ["'D'", "A, B, C"]),
        (lambda row: row["atoms"][0].update(ideal=None), ["ideal"]),
        (lambda row: row["atoms"].append(row["atoms"][0]), ["p1_a1", "more than once"]),
        (lambda row: row.pop("atoms"), ["atoms"]),
        (lambda row: row.pop("example_id"), ["example_id"]),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path, change, words):
    path = tmp_path / "judgments.jsonl"
    row = json.loads(make([0, 2], [0, 1], "e2").to_json())
    change(row)
    path.write_text(make([0], [0]).to_json() + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError) as caught:
        metrics.load_judgments(path)
    assert all(word in str(caught.value) for word in [f"{path}:2", *words])


def test_broken_json_empty_files_and_repeats_are_refused(tmp_path):
    path = tmp_path / "judgments.jsonl"
    good = make([0], [0]).to_json() + "\n"
    path.write_text(good + "{broken\n")
    with pytest.raises(DataError, match=r"judgments\.jsonl:2"):
        metrics.load_judgments(path)
    path.write_text("")
    with pytest.raises(DataError, match="no records"):
        metrics.load_judgments(path)
    path.write_text(good + good)
    with pytest.raises(DataError, match="row 2 repeats row 1"):
        metrics.load_judgments(path)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        metrics.load_judgments(tmp_path / "none.jsonl")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_torn_last_line_is_left_out_and_said(tmp_path, share):
    path = tmp_path / "judgments.jsonl"
    first = make([0, 2], [0, 1])
    last = make([0], [1], "e2").to_json()
    path.write_text(first.to_json() + "\n")
    whole = score_text(path)
    assert "notes" not in json.loads(score_text(path, as_json=True))
    path.write_text(first.to_json() + "\n" + last[: int(len(last) * share)])
    assert metrics.load_judgments(path) == [first]
    assert (
        score_text(path)
        == f"{path}: the last line is incomplete because the run was stopped; it was left "
        f"out\n\n{whole}"
    )
    assert "torn" in json.loads(score_text(path, as_json=True))["notes"][0]
    path.write_text(first.to_json() + "\n" + last)
    assert len(metrics.load_judgments(path)) == 2 and "torn" not in score_text(path)
    path.write_text(last[: int(len(last) * share)])
    with pytest.raises(DataError, match=r"judgments\.jsonl:1"):
        metrics.load_judgments(path)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("main_results", ["model", "method"]),
        ("model_survey", ["model"]),
        ("eta_sweep", ["eta"]),
        ("localization_ablation", ["granularity", "signal"]),
        ("alternative_judge", ["method"]),
    ],
)
def test_published_tables_satisfy_the_bounds(name, keys):
    wide = pd.read_csv(REFERENCE / f"{name}.csv").pivot(index=keys, columns="metric", values="mean")
    worst = wide[["sMOS", "sMUS"]].max(axis=1)
    assert wide["SCS"].between(wide["Exact"], 50 + wide["Exact"] / 2).all()
    assert wide["SCS"].between(100 - wide["sMOS"] - wide["sMUS"] - 0.02, 100 - worst).all()
    assert wide["sMOS"].between(wide["AOR"] / 2, wide["AOR"]).all()
    assert wide["sMUS"].between(wide["AUR"] / 2, wide["AUR"]).all()


def test_scoring_imports_neither_torch_nor_pandas_at_the_top():
    import subprocess
    import sys

    code = (
        "import sys, memcalib.metrics; print([m for m in ('torch', 'pandas', 'scipy', "
        "'matplotlib') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["m1", "m2"]),
            st.integers(0, 2),
            st.integers(0, 3),
            st.lists(
                st.tuples(st.sampled_from("ABC"), st.sampled_from(["A", "B", "C", None])),
                min_size=1,
                max_size=5,
            ),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda row: row[:3],
    ),
    st.randoms(use_true_random=False),
)
def test_rows_of_atoms_score_as_judgments_do(answers, random):
    judgments = []
    rows = []
    for model, seed, number, pairs in answers:
        atoms = [AtomJudgment(atom_id=f"a{i}", ideal=u, actual=v) for i, (u, v) in enumerate(pairs)]
        head = {
            "example_id": f"e{number}",
            "question_id": f"q{number % 2}",
            "model": model,
            "seed": seed,
        }
        judgments.append(Judgment(**head, domain="general", atoms=atoms))
        for a in atoms:
            ideal = random.choice([a.ideal.wire, a.ideal.label, int(a.ideal)])
            actual = (
                None if a.actual is None else random.choice([a.actual.wire, a.actual.label.lower()])
            )
            rows.append(head | {"atom_id": a.atom_id, "ideal": ideal, "actual": actual})
    frame = pd.DataFrame(rows)
    columns = [
        "model",
        "example_id",
        "seed",
        "atoms",
        "distractors",
        "unscored_atoms",
        "scored",
        "over",
        "under",
    ]
    pd.testing.assert_frame_equal(
        response_frame(frame)[columns], response_frame(judgments)[columns], check_dtype=False
    )
    if any(j.scored for j in judgments):
        pd.testing.assert_frame_equal(
            score(frame, resamples=50), score(judgments, resamples=50), check_dtype=False
        )


def test_a_frame_of_atoms_says_what_it_lacks():
    frame = pd.DataFrame({"example_id": ["e", "e"], "ideal": [0, 2], "actual": [0.0, None]})
    assert response_frame(frame)["unscored_atoms"].tolist() == [1]
    with pytest.raises(ValueError, match="judgments: found 1; allowed: judgments, a file of them"):
        score([1])
    with pytest.raises(ValueError, match="missing: ideal, actual"):
        score(frame[["example_id"]])
    with pytest.raises(ValueError, match="column actual: unknown level 'D'"):
        score(frame.assign(actual=["D", "A"]))
    with pytest.raises(ValueError, match="column ideal: unknown level 3"):
        score(frame.assign(ideal=[3, 0]))
    with pytest.raises(ValueError, match="row 1"):
        score(frame.assign(ideal=["A", None]))
    with pytest.raises(ValueError, match="'a1' again"):
        score(frame.assign(atom_id="a1"))
    with pytest.raises(ValueError, match="found no judgments"):
        score(frame.iloc[:0])


def test_a_file_of_judgments_is_scored_by_its_path(tmp_path):
    judgments = [
        Judgment(
            example_id="e",
            domain="d",
            question_id="q",
            atoms=[AtomJudgment(atom_id="a", ideal="A", actual="B")],
        )
    ]
    write_jsonl(tmp_path / "judgments.jsonl", judgments)
    assert (
        score(tmp_path / "judgments.jsonl")["SCS"].tolist()
        == score(judgments)["SCS"].tolist()
        == [50.0]
    )


def test_the_interval_of_a_score_is_the_middle_95_percent_of_resampled_questions():
    judgments = [
        Judgment(
            example_id=f"e{i}",
            domain="d",
            question_id=f"q{i:02}",
            atoms=[AtomJudgment(atom_id="a", ideal="A", actual="ABC"[i % 3])],
        )
        for i in range(30)
    ]
    row = score(judgments, resamples=500, seed=3).iloc[0]
    values = np.array([100 * 0.5 ** (i % 3) for i in range(30)])
    drawn = metrics.bootstrap_means(values[None, :, None], np.ones((1, 30), dtype=int), 500, 3)[
        :, 0
    ]
    ordered = np.sort(drawn)

    def at(share):
        return np.interp(share * (len(ordered) - 1), np.arange(len(ordered)), ordered)

    assert row["SCS_low"] == pytest.approx(at(0.025)) and row["SCS_high"] == pytest.approx(
        at(0.975)
    )
    assert row["SCS_low"] < row["SCS"] < row["SCS_high"]


def test_none_of_twelve_is_not_zero_for_certain():
    rows = [make([0, 1], [0, 1], f"e{k}") for k in range(12)]
    table = metrics.score(rows, resamples=50).iloc[0]
    low, high = (100 * bound for bound in binomtest(0, 12).proportion_ci(0.95, "exact"))
    assert np.allclose([table["AOR_low"], table["AOR_high"]], [low, high])
    assert np.allclose([table["Exact_low"], table["Exact_high"]], [100 - high, 100])
    assert 0 == table["sMUS_low"] < table["sMUS_high"] < 27


def test_bounds_away_from_the_ends_stay_as_they_are():
    values = np.array([[0.0, 100.0, 50.0], [0.0, 100.0, 0.0]])
    bounds = np.array([[0.0, 100.0, 10.0], [0.0, 100.0, 40.0]])
    exact = metrics.exact_bounds(values, bounds, questions=2)
    assert (exact[:, 2] == [10, 40]).all()
    assert exact[0, 0] == 0 and exact[1, 1] == 100
    assert np.isclose(exact[1, 0], 100 - exact[0, 1]) and exact[1, 0] > 80


@pytest.mark.parametrize("questions", [1, 5, 6])
def test_fewer_than_six_questions_have_no_interval(questions):
    rows = [make([0, 2], [0, k % 3], f"e{k}") for k in range(questions)]
    table = metrics.score(rows, resamples=50)
    bounds = table[[f"{m}_{end}" for m in metrics.METRICS for end in ("low", "high")]]
    shown = metrics.readable(table)["SCS 95 %"][0]
    if questions < metrics.LEAST_GROUPS:
        noun = "question" if questions == 1 else "questions"
        assert bounds.isna().all().all() and shown == f"none: {questions} {noun}"
    else:
        assert bounds.notna().all().all() and " to " in shown
