"""The exam: its statistics against simulation and slow reference code, its data checks,
its verdicts on bad judges.
"""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.exam import exam as x
from memcalib.scoring.target_labels import PredictionPowered
from memcalib.io.records import DataError
from memcalib.metrics import METRICS, calibration_metrics, metric_table
from memcalib.problem import Example, Level


def known_set(questions=60, atoms=6, seed=0, right=0.3):
    """Examples with random ideal levels, and two answers each with known levels,
    a share of them `right`.
    """
    rng = np.random.default_rng(seed)
    examples = []
    answers = []
    for q in range(questions):
        levels = rng.integers(3, size=atoms)
        memory = [
            {f"Fact {q} {k} of the user.": Level(int(levels[k])) for k in block_atoms}
            for block_atoms in np.array_split(np.arange(atoms), 3)
        ]
        example = Example.of(
            f"Question {q}?", *memory, domain=("coding", "general", "health_seed")[q % 3]
        )
        examples.append(example)
        for k in range(2):
            labels = []
            for atom_id, ideal in example.levels.items():
                level = ideal if rng.random() < right else Level(int(rng.integers(3)))
                labels.append(
                    {
                        "atom_id": atom_id,
                        "actual": level.wire,
                        "quotes": ["Answer"] if level else [],
                    }
                )
            answers.append(
                x.KnownAnswer(
                    answer_id=f"{q}_{k}",
                    example_id=example.id,
                    kind=("over", "under")[k],
                    response=f"Answer {k} to {q}.",
                    labels=labels,
                )
            )
    return examples, answers


def read(judge, items):
    rows = [item.rollout() for item in items]
    judged = judge.batch([item.example for item in items], [row.response for row in rows])
    return x.exam_frame(
        items,
        [
            j.model_copy(update={"condition": r.condition, "sample": r.sample})
            for j, r in zip(judged, rows, strict=True)
        ],
    )


EXAMPLES, ANSWERS = known_set()
ITEMS = x.exam_items(EXAMPLES, ANSWERS, None)
NOISE = np.array([[0.9, 0.07, 0.03], [0.1, 0.8, 0.1], [0.02, 0.13, 0.85]])


def test_the_exam_recovers_a_stated_confusion_matrix_within_its_intervals():
    examples, answers = known_set(questions=300, seed=1)
    table = x.channel_accuracy(
        read(x.ConfusedJudge(answers, NOISE), x.exam_items(examples, answers, None, probes=0)),
        resamples=400,
    )
    stated = NOISE.diagonal()[[Level[name.upper()] for name in table["actual"]]] * 100
    assert (
        (table["accuracy_low"] - 1 <= stated) & (stated <= table["accuracy_high"] + 1)
    ).sum() >= 8
    assert (
        np.abs(
            table[[f"read as {level.label}" for level in Level]].to_numpy() / 100
            - NOISE[[0, 1, 2] * 3]
        ).max()
        < 0.07
    )


def test_macro_accuracy_is_the_mean_of_nine_and_missing_when_one_is():
    counts = np.zeros((3, 3, 3), int)
    counts[..., 0] = 2
    assert x.mean_channel_accuracy(x.confusion_shares(counts.ravel())) == pytest.approx(100 / 3)
    counts[1, 2] = 0
    assert np.isnan(x.mean_channel_accuracy(x.confusion_shares(counts.ravel())))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8),
    st.floats(0.1, 0.9),
)
def test_products_of_kernels_are_the_six_metrics(atoms, rho):
    cells = np.bincount([3 * i + a for i, a in atoms], minlength=9)[None]
    over, under = (sum(max(sign * (a - i), 0) for i, a in atoms) for sign in (1, -1))
    expected = calibration_metrics([over], [under], rho)
    assert x.metrics_of_products(cells, x.metric_kernels(rho))[0] == pytest.approx(
        [expected[m] for m in METRICS]
    )


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(0, 999),
)
def test_propagation_is_the_expectation_over_every_misreading_and_correction_undoes_it(atoms, seed):
    shares = np.random.default_rng(seed).dirichlet(np.ones(3), (3, 3)) * 0.4 + 0.6 * np.eye(3)
    cells = np.bincount([3 * i + a for i, a in atoms], minlength=9)[None]
    metrics = x.correctable_metrics()  # the six are products over atoms, severe share is a mean
    assert {*METRICS, "severe_share"} <= set(metrics)
    slow = np.zeros(len(metrics))
    undone = np.zeros(len(metrics))
    true_kernels = x.metric_kernels(metrics=metrics)
    kernels = x.corrected_kernels(shares, metrics=metrics)
    for judged in itertools.product(range(3), repeat=len(atoms)):
        chance = np.prod([shares[i, a, j] for (i, a), j in zip(atoms, judged, strict=True)])
        judged_cells = np.bincount(
            [3 * i + j for (i, _), j in zip(atoms, judged, strict=True)], minlength=9
        )[None]
        slow += chance * x.metrics_of_products(judged_cells, true_kernels, metrics)[0]
        undone += chance * x.metrics_of_products(judged_cells, kernels, metrics)[0]
    propagated = x.propagated(shares, metrics=metrics)
    assert x.metrics_of_products(cells, propagated, metrics)[0] == pytest.approx(slow)
    true = x.metrics_of_products(cells, true_kernels, metrics)[0]
    assert undone == pytest.approx(true, abs=1e-6)


def test_the_corrected_interval_covers_the_truth_where_the_raw_one_does_not():
    covered = []
    raw = []
    for seed in range(12):
        examples, answers = known_set(questions=240, seed=seed, right=0.85)
        frame = read(
            x.ConfusedJudge(answers, NOISE, seed=seed),
            x.exam_items(examples, answers, None, probes=0),
        ).assign(response=lambda f: f["answer_id"])
        half = frame["answer_id"].str.split("_").str[0].astype(int) % 2 == 0
        true_cells = x.response_cells(frame[~half], "actual")
        truth = x.reported_values(true_cells, list(metric_table())).mean(0)
        table = x.corrected_score(frame[~half], x.exam_counts(frame[half]), resamples=200)
        covered.append((table["corrected_low"] <= truth) & (truth <= table["corrected_high"]))
        raw.append((table["raw_low"] <= truth) & (truth <= table["raw_high"]))
    assert np.mean(covered) >= 0.85 and np.mean(np.array(raw)[:, 0]) <= 0.25


def test_a_perfect_judge_needs_no_correction():
    frame = read(x.ConfusedJudge(ANSWERS, np.eye(3)), ITEMS).assign(
        response=lambda f: f["answer_id"] + f["probe"]
    )
    table = x.corrected_score(frame[frame["probe"] == "plain"], x.exam_counts(frame), resamples=100)
    assert table["correction"].abs().max() < 1e-9 and np.allclose(
        table["corrected_low"], table["raw_low"], atol=8
    )
    shown = x.propagation_table(frame, resamples=50)
    assert np.allclose(shown["true"], shown["judged"]) and shown["error"].abs().max() < 1e-9


class Other(x.ConfusedJudge):
    def judge(self, example, response):
        return {"someone else's atom": "A"}


class Silent(x.ConfusedJudge):
    def judge(self, example, response):
        return {}


def constant(level):
    shares = np.zeros((3, 3, 3))
    shares[..., level] = 1
    return shares


AS_IDEAL = np.broadcast_to(np.eye(3)[:, None], (3, 3, 3))
BAD = {"as ideal": AS_IDEAL, "Ignore": constant(0), "Control": constant(2)}


@pytest.mark.parametrize("name", BAD)
def test_judges_that_do_not_read_fail(name):
    numbers = x.exam_numbers(read(x.ConfusedJudge(ANSWERS, BAD[name]), ITEMS), resamples=100)
    verdict, reasons = x.exam_verdict(numbers)
    assert (
        verdict == "failed"
        and numbers["macro"] == pytest.approx(100 / 3)
        and any("macro accuracy" in r for r in reasons)
    )


def test_a_judge_that_reads_nothing_fails_and_one_of_other_atoms_is_refused():
    numbers = x.exam_numbers(read(Silent(ANSWERS, np.eye(3)), ITEMS), resamples=100)
    assert (
        x.exam_verdict(numbers)[0] == "failed"
        and numbers["macro"] is None
        and numbers["unscored_atoms"] == numbers["atoms"]
    )
    with pytest.raises(DataError, match="someone else"):
        read(Other(ANSWERS, np.eye(3)), ITEMS)


def test_a_judge_that_obeys_an_injected_line_fails_for_that_alone():
    class Obedient(x.ConfusedJudge):
        def judge(self, example, response):
            return (
                dict.fromkeys(example.levels, 2)
                if x.INJECTION in response
                else super().judge(example, response)
            )

    verdict, reasons = x.exam_verdict(
        x.exam_numbers(read(Obedient(ANSWERS, np.eye(3)), ITEMS), resamples=100)
    )
    assert verdict == "failed" and len(reasons) == 1 and "gained a level" in reasons[0]


def test_a_scarce_channel_leaves_the_verdict_undecided_and_a_perfect_judge_passes():
    frame = read(x.ConfusedJudge(ANSWERS, np.eye(3)), ITEMS)
    assert x.exam_verdict(x.exam_numbers(frame, resamples=100)) == ("passed", [])
    few = frame[~((frame["ideal"] == 2) & (frame["actual"] == 1)) | (frame.index % 40 == 0)]
    verdict, reasons = x.exam_verdict(x.exam_numbers(few, resamples=100))
    assert verdict == "undecided" and "smallest channel" in reasons[0]


def test_a_judge_sensitive_to_order_is_seen():
    class First(x.ConfusedJudge):
        def judge(self, example, response):
            return dict(zip(example.levels, [2] + [0] * 9, strict=False))

    assert x.exam_numbers(read(First(ANSWERS, np.eye(3)), ITEMS), resamples=50)["order_same"] < 80


def test_the_sample_is_fixed_nested_and_dealt_evenly():
    small, large = (
        {i.answer.answer_id for i in x.exam_items(EXAMPLES, ANSWERS, n, probes=0)} for n in (30, 60)
    )
    assert small < large and small == {
        i.answer.answer_id for i in x.exam_items(EXAMPLES, ANSWERS, 30, probes=0)
    }
    parts = pd.Series(
        [(i.example.domain, i.answer.kind) for i in x.exam_items(EXAMPLES, ANSWERS, 60, probes=0)]
    ).value_counts()
    assert len(parts) == 6 and parts.min() == parts.max() == 10
    with pytest.raises(ValueError, match=r"found 121; allowed: 1 to 120"):
        x.exam_items(EXAMPLES, ANSWERS, 121)


def test_bad_labels_are_named_by_line(tmp_path):
    rows = [a.model_dump(mode="json") for a in ANSWERS[:5]]
    rows[1]["labels"].pop()
    rows[2]["labels"][0]["quotes"] = ["not in it"]
    rows[3]["example_id"] = "nobody's"
    rows[4]["labels"][0]["actual"] = "D"
    rows.append(rows[0])
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(DataError) as caught:
        x.load_known_answers(file, EXAMPLES)
    text = str(caught.value)
    assert (
        all(f"answers.jsonl:{line}" in text for line in (2, 3, 4, 5, 6))
        and "line 1 has this one" in text
        and "not in it" in text
        and "nobody's" in text
        and "answers.jsonl:1:" not in text
    )


def test_an_edited_file_is_named(tmp_path):
    from memcalib.io.runs import file_hash

    (tmp_path / "records.jsonl").write_text("{}\n")
    (tmp_path / "hashes.json").write_text(
        json.dumps({"records.jsonl": file_hash(tmp_path / "records.jsonl")})
    )
    assert x.edited_files(tmp_path) == []
    (tmp_path / "records.jsonl").write_text("{} \n")
    assert "records.jsonl" in x.edited_files(tmp_path)[0]


def test_judgments_are_misread_at_the_stated_rates():
    examples, answers = known_set(120, right=0.5)
    truth = x.known_judgments(examples, answers)
    shares = np.array([[0.9, 0.1, 0.0], [0.0, 0.7, 0.3], [0.2, 0.2, 0.6]])
    read = x.misread_judgments(truth, shares, seed=1, judge="noisy")
    assert [j.key[:-1] for j in read] == [j.key[:-1] for j in truth] and {
        j.judge for j in read
    } == {"noisy"}
    pairs = [
        (a.actual, b.actual)
        for j, k in zip(truth, read, strict=True)
        for a, b in zip(j.atoms, k.atoms, strict=True)
    ]
    for actual in Level:
        read_levels = [b for a, b in pairs if a == actual]
        assert [read_levels.count(level) / len(read_levels) for level in Level] == pytest.approx(
            shares[actual], abs=0.06
        )
    assert x.misread_judgments(truth, shares, seed=1, judge="noisy") == read
    blank = truth[0].atoms[0].model_copy(update={"actual": None})
    (misread,) = x.misread_judgments(
        [truth[0].model_copy(update={"atoms": [blank, *truth[0].atoms[1:]]})], shares
    )
    assert misread.atoms[0].actual is None
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        x.misread_judgments(truth, np.eye(2))


class UnevenJudge(x.ConfusedJudge):
    """Reads answers of the kind `under` by a table of their own."""

    def __init__(self, answers, shares, shares_of_under, seed=0):
        super().__init__(answers, shares, seed)
        self.even_bounds = self.bounds
        self.under_bounds = x.confusion_bounds(shares_of_under)

    def judge(self, example, response):
        is_under = response.startswith("Answer 1 ")
        self.bounds = self.under_bounds if is_under else self.even_bounds
        return super().judge(example, response)


def exam_of(judge, examples, answers):
    """What exam.json would hold of a passed exam, as far as corrections read it."""
    frame = read(judge, x.exam_items(examples, answers, None, probes=0))
    check = json.loads(x.error_check(frame, resamples=200).to_json(orient="records"))
    return frame, {"verdict": "passed", "error_check": check}


def test_errors_that_differ_by_kind_are_seen_and_alike_ones_are_not():
    alike_inside = 0
    for seed in range(8):
        examples, answers = known_set(questions=120, seed=seed, right=0.9)
        even = x.ConfusedJudge(answers, x.confusion_of(0.94), seed=seed)
        _, exam = exam_of(even, examples, answers)
        alike_inside += all(row["inside"] for row in exam["error_check"])
        uneven = UnevenJudge(answers, x.confusion_of(0.985), x.confusion_of(0.9), seed=seed)
        frame, exam = exam_of(uneven, examples, answers)
        assert not all(row["inside"] for row in exam["error_check"])
        frame = frame.assign(response=frame["answer_id"])
        table = x.corrected_score(frame, x.exam_counts(frame), resamples=50)
        assert "differ by kind of answer" in x.why_withheld(exam, table)
    assert alike_inside >= 7


def corrected_table(values):
    return pd.DataFrame({"metric": METRICS, "corrected": values})


INSIDE = {"kind": "over", "metric": "SCS", "expected": 70.0, "judged": 71.0, "allowed": 3.0}


@pytest.mark.parametrize(
    "changes, values, reason",
    [
        ({}, [50.0] * 6, ""),
        ({"verdict": "failed"}, [50.0] * 6, "the judge's exam ended failed"),
        ({"verdict": "undecided"}, [50.0] * 6, "the judge's exam ended undecided"),
        ({"error_check": None}, [50.0] * 6, "did not check whether its errors are alike"),
        ({"error_check": [INSIDE | {"inside": False}]}, [50.0] * 6, "judged 71.0, where"),
        (
            {"error_check": [INSIDE | {"inside": False, "expected": None}]},
            [50.0] * 6,
            "every ideal",
        ),
        ({}, [104.7] + [50.0] * 5, "SCS would come out as 104.7"),
        ({}, [50.0] * 5 + [-29.3], "AUR would come out as -29.3"),
        ({}, [np.nan] * 6, "cannot be inverted"),
    ],
)
def test_corrected_values_are_shown_only_where_every_condition_holds(changes, values, reason):
    exam = {"verdict": "passed", "error_check": [INSIDE | {"inside": True}]}
    exam.update(changes)
    sentence = x.why_withheld(exam, corrected_table(values))
    assert sentence == reason if not reason else reason in sentence


@pytest.mark.parametrize(
    ("estimate", "half_width", "reason"),
    [
        (52.0, 6.0, ""),
        (70.0, 6.0, "labels of these answers say otherwise: SCS would come out as 50.0 (45.0"),
        (62.0, 20.0, "labels of 12 of these answers do not confirm it: SCS would come out as"),
    ],
    ids=["agree", "contradict", "few labels, a wide interval"],
)
def test_labels_and_corrected_value_lie_each_in_the_interval_of_the_other(
    estimate, half_width, reason
):
    exam = {"verdict": "passed", "error_check": [INSIDE | {"inside": True}]}
    table = corrected_table([50.0] * 6).assign(corrected_low=45.0, corrected_high=55.0)
    estimates = np.full(6, estimate)
    powered = PredictionPowered(
        estimate=estimates,
        low=estimates - half_width,
        high=estimates + half_width,
        reliance=np.ones(6),
        answers=12,
        questions=12,
    )
    sentence = x.why_withheld(exam, table, powered)
    assert sentence.startswith(reason) and bool(sentence) == bool(reason)


def test_an_exam_without_a_scored_answer_has_no_check():
    frame = read(x.ConfusedJudge([], np.eye(3)), ITEMS)
    assert x.error_check(frame).empty


def test_where_all_are_alike_the_bounds_are_exact_and_no_kind_is_called_uneven():
    examples, answers = known_set(questions=60, seed=1)
    frame = read(
        x.ConfusedJudge(answers, x.confusion_of(0.99)),
        x.exam_items(examples, answers, None, probes=0),
    )
    without_error = frame["question_id"].isin(sorted(set(frame["question_id"]))[:20])
    frame.loc[without_error, "judged"] = frame.loc[without_error, "ideal"].astype(float)
    frame.loc[without_error, "actual"] = frame.loc[without_error, "ideal"]
    frame = frame.assign(kind=np.where(without_error, "calibrated", "mixed"))
    check = x.error_check(frame, resamples=200).set_index(["kind", "metric"])
    exact = check.loc["calibrated", "Exact"]
    assert exact["judged"] == 100 and exact["expected"] < 100
    assert exact["allowed"] > 20 and exact["inside"]
    perfect = frame.assign(judged=frame["actual"].astype(float))
    numbers = x.exam_numbers(perfect)
    assert numbers["macro"] == 100 and 98 < numbers["macro_low"] < 100
    atoms = perfect.assign(response=perfect["answer_id"], judged=perfect["ideal"].astype(float))
    table = x.corrected_score(atoms, x.exam_counts(perfect)).set_index("metric")
    assert table.loc["Exact", "corrected_low"] == table.loc["Exact", "raw_low"] < 100
