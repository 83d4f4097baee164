"""The table of metrics: against loops over atoms, what it refuses, and that a metric which a
program adds is in every table, figure, gate and file without another edit.
"""

import json
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import judgment_lists, levels, make
import memcalib as mc
from memcalib import metrics
from memcalib.commands.train import _metrics_table, _reading
from memcalib.evaluation import breakdown
from memcalib.evaluation.disputed import disputed_scores
from memcalib.evaluation.merged import merged_table
from memcalib.io import parts
from memcalib.io.records import write_jsonl
from memcalib.metrics import (
    GAPS,
    METRICS,
    AtomValues,
    Metric,
    answer_scores,
    metric_table,
    response_frame,
    score,
)
from memcalib.problem import CHANNELS, Level
from memcalib.products.exam.exam import corrected_score, exam_counts, propagation_table
from memcalib.products.exam.label_budget import budget_text, label_budget
from memcalib.products.memory_logs.gate import GateSettings, gate_markdown, run_gate
from memcalib.products.memory_logs.sweep import sweep_table
from memcalib.report.comparison import compare_runs, comparison_text
from memcalib.report.evaluation_report import write_evaluation_report
from memcalib.report.figures import differences_figure
from memcalib.report.hub_results import benchmark_text, hub_tasks
from memcalib.report.results import compare_results, result_rows
from memcalib.report.run_data import load_run
from memcalib.report.tables import results_frame, results_table

drawn = settings(max_examples=60, deadline=None, derandomize=True)
SEVERE = "severe_share"
SHIPPED = tuple(metric_table())  # the six, and what the package reports beside them
BESIDE_THE_SIX = tuple(name for name in SHIPPED if name not in METRICS)


def exactly_right(counts, rho):
    return counts[:, range(3), range(3)].sum(axis=1) / counts.sum(axis=(1, 2))


RIGHT_SHARE = {
    "name": "right_share",
    "formula": exactly_right,
    "higher_is_better": True,
    "meaning": "share of an answer's memories that are used as far as they should be",
    "atom_values": AtomValues(lambda rho: GAPS == 0, "mean"),
}


@pytest.fixture
def forget():
    """Takes metrics that a test added out of the table again."""
    with parts.temporary_parts():
        yield


@pytest.fixture
def right_share(forget):
    return mc.add_metric(Metric(**RIGHT_SHARE))


# Against loops


def over(atoms):
    return sum(max(actual - ideal, 0) for ideal, actual in atoms)


def under(atoms):
    return sum(max(ideal - actual, 0) for ideal, actual in atoms)


SLOW_VALUES = {  # the definition of each metric; an atom is a pair (ideal, actual)
    "SCS": lambda atoms, rho: rho ** (over(atoms) + under(atoms)),
    "Exact": lambda atoms, rho: float(over(atoms) == under(atoms) == 0),
    "sMOS": lambda atoms, rho: 1 - rho ** over(atoms),
    "sMUS": lambda atoms, rho: 1 - rho ** under(atoms),
    "AOR": lambda atoms, rho: float(over(atoms) > 0),
    "AUR": lambda atoms, rho: float(under(atoms) > 0),
    "severe_share": lambda atoms, rho: np.mean(
        [abs(actual - ideal) == 2 for ideal, actual in atoms]
    ),
}


def test_the_definition_of_each_metric_is_written_once_more():
    expected = list(metric_table())
    assert list(SLOW_VALUES) == expected, "write the new metric into SLOW_VALUES, atom by atom"


answers = st.lists(
    st.lists(st.tuples(levels, levels), min_size=1, max_size=12), min_size=1, max_size=8
)


@drawn
@given(answers, st.floats(0.05, 0.95))
def test_each_metric_is_its_definition(atoms_of_answers, rho):
    counts = np.zeros((len(atoms_of_answers), 3, 3), int)
    for number, atoms in enumerate(atoms_of_answers):
        for ideal, actual in atoms:
            counts[number, ideal, actual] += 1
    for name, metric in metric_table().items():
        slow = [SLOW_VALUES[name](atoms, rho) for atoms in atoms_of_answers]
        assert metric.of_answers(counts, rho) == pytest.approx(slow, abs=1e-12)
        if metric.atom_values is not None:
            assert metric.atom_values.of_answers(counts, rho) == pytest.approx(slow, abs=1e-9)


@drawn
@given(judgment_lists())
def test_a_frame_of_responses_counts_each_channel(judgments):
    frame = response_frame(judgments)
    for judgment, row in zip(judgments, frame.to_dict("records"), strict=True):
        found = [row[channel] for channel in CHANNELS]
        if not judgment.scored:
            assert np.isnan([*found, row["over"], row["under"]]).all()
            continue
        expected = dict.fromkeys(CHANNELS, 0)
        for atom in judgment.atoms:
            expected[CHANNELS[3 * atom.ideal + atom.actual]] += 1
        assert found == list(expected.values())
        assert (row["over"], row["under"]) == (judgment.over, judgment.under)


@drawn
@given(judgment_lists())
def test_rows_of_atoms_give_the_same_counts(judgments):
    rows = []
    for judgment in judgments:
        head = {"example_id": judgment.example_id, "seed": judgment.seed, "model": "m"}
        for atom in judgment.atoms:
            rows.append(head | {"ideal": atom.ideal, "actual": atom.actual})
    columns = ["example_id", "seed", "over", "under", *CHANNELS]
    of_atoms = response_frame(pd.DataFrame(rows).sample(frac=1, random_state=1))[columns]
    expected = response_frame(judgments)[columns].set_index(["example_id", "seed"])
    found = of_atoms.set_index(["example_id", "seed"]).loc[expected.index]
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)


@drawn
@given(judgment_lists(unscored=False))
def test_a_table_has_the_mean_over_answers_and_seeds(judgments):
    table = score(judgments, resamples=20)
    for name, slow_value in SLOW_VALUES.items():
        by_seed = {}
        for judgment in judgments:
            atoms = [(atom.ideal, atom.actual) for atom in judgment.atoms]
            by_seed.setdefault(judgment.seed, []).append(slow_value(atoms, 0.5))
        expected = 100 * np.mean([np.mean(values) for values in by_seed.values()])
        assert table[name][0] == pytest.approx(expected, abs=1e-9)


# Frames without counts


@drawn
@given(judgment_lists())
def test_totals_alone_give_the_six_as_before(judgments):
    frame = response_frame(judgments)
    if not frame["scored"].any():
        return
    alone = score(frame.drop(columns=list(CHANNELS)), resamples=20)
    whole = score(frame, resamples=20)
    assert not [column for column in alone if column.startswith(BESIDE_THE_SIX)]
    pd.testing.assert_frame_equal(alone, whole[alone.columns])
    headings = [metric_table()[name].heading for name in BESIDE_THE_SIX]
    assert mc.readable(alone).equals(mc.readable(whole).drop(columns=headings))


def test_a_frame_that_contradicts_itself_is_refused():
    frame = response_frame([make([0, 2], [2, 2]), make([1], [1], "e2")])
    with pytest.raises(ValueError, match=r"column over: found 1 in row 0.*give 2; allowed: the"):
        score(frame.assign(over=1))
    with pytest.raises(ValueError, match=r"column under: found 1 in row 0.*give 0; allowed: the"):
        score(frame.assign(under=[1, 0]))
    half = frame.assign(**{"A+": [0, np.nan]})
    with pytest.raises(ValueError, match=r"column A\+: found no number in row 1.*allowed"):
        score(half)


# Holm


@drawn
@given(judgment_lists(unscored=False), judgment_lists(unscored=False))
def test_p_of_the_six_is_what_it_is_without_other_metrics(first, second):
    second = [judgment.model_copy(update={"model": "n"}) for judgment in second]
    frame = response_frame([*first, *second])
    try:
        table = breakdown.compare(frame, "m", "n", resamples=20)
    except ValueError as error:
        assert "share no scored question" in str(error)
        return
    alone = breakdown.compare(frame.drop(columns=list(CHANNELS)), "m", "n", resamples=20)
    of_six = table[table["metric"].isin(METRICS)].reset_index(drop=True)
    pd.testing.assert_frame_equal(of_six, alone)
    assert set(table["metric"]) == set(metric_table())


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "SCS"}, r"'SCS': found a second metric of this name; allowed: .*severe_share"),
        ({"name": SEVERE}, "found a second metric"),
        ({"name": "two words"}, "name: found 'two words'; allowed: letters"),
        ({"name": "atoms"}, "name: found 'atoms'; allowed: not the name of a column"),
        ({"name": "x_low"}, "name: found 'x_low'; allowed: not the name of a column"),
        ({"name": 3}, "name: found 3"),
        ({"higher_is_better": None}, "higher_is_better: found None; allowed: True or False"),
        ({"higher_is_better": "up"}, "higher_is_better: found 'up'"),
        ({"range": (1, 0)}, r"range: found \(1, 0\); allowed: two numbers from 0 to 1"),
        ({"range": (0, 2)}, r"range: found \(0, 2\)"),
        ({"range": (0, float("nan"))}, "range: found"),
        ({"range": [0, 1]}, "range: found"),
        ({"range": None}, "range: found None"),
        ({"meaning": " "}, "meaning: found ' '; allowed"),
        ({"test_family": ""}, "test_family: found ''"),
        (
            {"test_family": "calibration"},
            "test_family: found 'calibration', which is reserved for the paper's six metrics",
        ),
        ({"formula": "SCS"}, "formula: found 'SCS'; allowed: a function"),
        ({"formula": lambda n, rho: np.zeros(3)}, r"shape \(3,\) for 93 answers; allowed: one n"),
        ({"formula": lambda n, rho: 0.5}, r"of shape \(\) for 93 answers"),
        ({"formula": lambda n, rho: n.sum((1, 2))}, "gave 2.0 for an answer with .*allowed: 0 to"),
        ({"formula": lambda n, rho: np.full(len(n), np.nan)}, "gave nan for an answer with 1 of A"),
        ({"formula": lambda n, rho: np.array(["1"] * len(n))}, "gave <U1 values"),
        ({"range": (0.5, 1.0)}, "gave 0.0 for an answer with 1 of AB-; allowed: 0.5 to 1"),
        (
            {"formula": lambda n, rho: n[:, 0, 0] / n.sum()},
            "when fewer answers are computed together with it; allowed",
        ),
        ({"atom_values": AtomValues(lambda rho: GAPS > 0, "mean")}, "by atom_values; allowed: the"),
        (
            {"atom_values": AtomValues(lambda rho: GAPS == 0, "sum")},
            "values: found .*combined",
        ),
        ({"atom_values": np.eye(3)}, "atom_values: found"),
    ],
)
def test_what_is_no_metric_is_refused(forget, changes, words):
    before = list(metric_table())
    with pytest.raises(ValueError, match=f"metric .*{words}"):
        mc.add_metric(Metric(**RIGHT_SHARE | changes))
    assert list(metric_table()) == before


def test_a_metric_without_a_direction_is_refused(forget):
    fields = {name: value for name, value in RIGHT_SHARE.items() if name != "higher_is_better"}
    with pytest.raises(TypeError, match="higher_is_better"):
        Metric(**fields)


def test_a_second_metric_of_a_name_is_refused(right_share):
    with pytest.raises(ValueError, match="'right_share': found a second metric of this name"):
        mc.add_metric(Metric(**RIGHT_SHARE))
    with pytest.raises(ValueError, match=r"found \{'name': 'right'\}; allowed: a Metric"):
        mc.add_metric({"name": "right"})


def test_a_formula_that_leaves_its_range_later_is_named_with_the_answer(forget):
    rare = Metric(
        "rare", lambda counts, rho: counts[:, 0, 0] / 40, True, "more than 40", range=(0, 1)
    )
    mc.add_metric(rare)
    with pytest.raises(ValueError, match=r"metric 'rare'.*gave 1.025 for an answer with 41 of A\+"):
        score([make([0] * 41, [0] * 41)])


# From outside


@pytest.mark.parametrize("as_path", [True, False])
def test_a_distribution_enters_a_metric_as_a_part(forget, monkeypatch, as_path):
    module = ModuleType("my_metrics")
    module.RIGHT = Metric(**RIGHT_SHARE)
    part = "my_metrics:RIGHT" if as_path else module.RIGHT
    module.PARTS = {"metric": {"right_share": part}}
    monkeypatch.setitem(sys.modules, "my_metrics", module)
    parts.add_parts_of("my_metrics")
    assert list(metric_table()) == [*SHIPPED, "right_share"]
    assert score([make([0, 1], [0, 2])])["right_share"][0] == 50
    assert metrics.metric_named("right_share").heading == "right share ↑"


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("SCS", Metric(**RIGHT_SHARE | {"name": "SCS"}), "found a second metric of this name"),
        ("other", Metric(**RIGHT_SHARE), "'other': found a metric named 'right_share'"),
        ("right_share", exactly_right, "allowed: a Metric"),
        (
            "mine",
            Metric(**RIGHT_SHARE | {"name": "mine", "test_family": "calibration"}),
            "the paper",
        ),
    ],
)
def test_a_part_that_is_no_metric_is_named(forget, name, part, words):
    parts.add_part("metric", name, part)
    with pytest.raises(ValueError, match=words):
        metric_table()


JUDGED = [
    make(
        [0, 1, 2, 0],
        [(k + seed) % 3, 1, (2 * k) % 3, 0],
        f"e{k}",
        seed=seed,
        judge="hand",
        domain="health" if k % 2 else "coding",
    )
    for k in range(14)
    for seed in (1, 2)
]
BETTER = [
    judgment.model_copy(
        update={
            "model": "n",
            "atoms": [atom.model_copy(update={"actual": atom.ideal}) for atom in judgment.atoms],
        }
    )
    for judgment in JUDGED[::2]
]


def test_an_added_metric_is_in_scores_comparisons_and_the_other_tables(right_share):
    table = score(JUDGED, resamples=50)
    expected = 100 * np.mean(
        [np.mean([atom.ideal == atom.actual for atom in j.atoms]) for j in JUDGED]
    )
    assert table["right_share"][0] == pytest.approx(expected)
    assert table["right_share_low"][0] < expected < table["right_share_high"][0]
    assert "right share ↑" in mc.readable(table)
    assert mc.controls(JUDGED)["right_share"].tolist() == [50, 25, 25]
    assert metrics.summary(JUDGED)["right_share"] == pytest.approx(expected)
    assert "right_share" in score(JUDGED, by="domain", resamples=20)
    compared = breakdown.compare([*JUDGED, *BETTER], "m", "n", resamples=50)
    own = compared[(compared["metric"] == "right_share") & (compared["domain"] == "all")].iloc[0]
    assert own["second"] == 100 and own["worse"] == 0 and own["better"] > 0
    mine = compared[compared["metric"] == "right_share"]
    assert np.allclose(mine["p_holm"], breakdown.holm(mine["p"]))
    assert len(differences_figure(compared.assign(run="n")).axes) >= len(metric_table())
    assert "right_share" in disputed_scores(JUDGED, {("e1", "p1_a1"): (Level.IGNORE, Level.BOUND)})
    assert "right_share" in merged_table(JUDGED, {("e1", "p1_a1"): 1})
    by_setting = {
        name: [j.model_copy(update={"model": name, "judge": ""}) for j in JUDGED]
        for name in ("today", "other")
    }
    assert "right_share_low" in sweep_table(by_setting, {"today": 10, "other": 5})
    text = _metrics_table({"best": {"step": 3, "valid_right_share": 12.5, "valid_SCS": 1.0}})
    assert "right_share" in text and "12.5" in text
    assert "For SCS and Exact and right_share, higher is better" in _reading()


def ideal_labels(judgments):
    """A label for each atom of these answers, that of its ideal level."""
    labels = []
    for judgment in judgments:
        for atom in judgment.atoms:
            labels.append(
                {
                    **{name: getattr(judgment, name) for name in ("example_id", "model", "seed")},
                    "atom_id": atom.atom_id,
                    "level": atom.ideal.wire,
                    "probability": 1.0,
                    "labeller": "ana",
                }
            )
    return labels


def test_an_added_metric_is_in_labels_the_label_budget_and_the_exam(right_share):
    labels = ideal_labels(JUDGED)
    row = score(JUDGED, resamples=20, labels=labels).iloc[0]
    for name, metric in metric_table().items():  # of a perfect answer
        assert row[f"{name}_ppi"] == pytest.approx(100 if metric.higher_is_better else 0)
    budget = label_budget(JUDGED, answers=(20,), draws=2)
    assert budget["right_share"].gt(0).all() and "right_share" in budget_text(budget)
    atoms = pd.DataFrame(
        [
            {
                "answer_id": number,
                "response": number,
                "question_id": judgment.question_id,
                "probe": "plain",
                "ideal": int(atom.ideal),
                "actual": int(atom.actual),
                "judged": int(atom.actual),
            }
            for number, judgment in enumerate(JUDGED)
            for atom in judgment.atoms
        ]
    )
    counts = np.zeros((10, 3, 3, 3), int)
    for actual in range(3):
        counts[:, :, actual, actual] = 5
    table = corrected_score(atoms, counts.reshape(10, 27), resamples=20).set_index("metric")
    assert list(table.index) == list(metric_table())
    assert np.allclose(table["corrected"], table["raw"]), "a perfect judge needs no correction"
    shown = propagation_table(atoms, resamples=20).set_index("metric")
    assert shown.loc["right_share", "true"] == pytest.approx(row["right_share"])
    assert len(exam_counts(atoms)) == 14


def test_a_metric_without_values_of_atoms_has_no_correction_and_says_so(forget):
    plain = mc.add_metric(replace(Metric(**RIGHT_SHARE), atom_values=None))
    assert plain.atom_values is None
    atoms = pd.DataFrame(
        {
            "response": [1, 1, 2, 2],
            "question_id": ["a", "a", "b", "b"],
            "ideal": [0, 1, 2, 0],
            "judged": [0, 2, 2, 1],
        }
    )
    counts = np.tile(np.eye(3, dtype=int).ravel(), (10, 3))
    table = corrected_score(atoms, counts, resamples=20).set_index("metric")
    assert table.loc["right_share", "raw"] == 50
    missing = table.loc["right_share", ["corrected", "corrected_low", "corrected_high"]]
    correctable = [name for name in SHIPPED if metric_table()[name].atom_values is not None]
    assert missing.isna().all() and table.loc[correctable, "corrected"].notna().all()


def test_an_added_metric_is_in_reports_results_and_on_the_hub(right_share, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_jsonl(folder / "judgments.jsonl", JUDGED)
    run = load_run(folder)
    assert "right share ↑" in results_frame(results_table(run, resamples=20))
    page = write_evaluation_report(folder).read_text(encoding="utf-8")
    assert "right share ↑" in page and right_share.meaning in page.replace("&#39;", "'")
    assert "right share ↑" in (folder / "model-card.md").read_text(encoding="utf-8")
    (row,) = result_rows(run)
    assert row["metrics"]["right_share"]["value"] > 0
    assert {("scs", "SCS"), ("right_share", "right_share")} <= hub_tasks().items()
    assert "smos" not in hub_tasks()  # there, more must be better
    assert "id: right_share" in benchmark_text("a", "b")
    older = json.loads(json.dumps(row))
    del older["metrics"]["right_share"]
    beside = compare_results([older, row | {"model": "m2"}], any_data=True).set_index(
        ["model", "metric"]
    )
    assert np.isnan(beside.loc[("m", "right_share"), "value"])
    assert np.isnan(beside.loc[("m2", "right_share"), "difference"])
    assert beside.loc[("m2", "right_share"), "value"] == row["metrics"]["right_share"]["value"]
    other = tmp_path / "other"
    other.mkdir()
    write_jsonl(other / "judgments.jsonl", [j.model_copy(update={"model": "m"}) for j in BETTER])
    comparison = compare_runs([folder, other], common=True, resamples=20)
    text = comparison_text(comparison)
    assert "right share ↑" in text and "tests of the six metrics" in text


def test_an_added_metric_can_decide_a_gate(right_share, tmp_path):
    for name, judgments in (("good", BETTER), ("bad", JUDGED[::2])):
        (tmp_path / name).mkdir()
        rows = [j.model_copy(update={"model": "m"}) for j in judgments]
        write_jsonl(tmp_path / name / "judgments.jsonl", rows)
    gate_settings = GateSettings(metrics=("right_share",), minimum={"right_share": 90})
    gate = run_gate(tmp_path / "bad", tmp_path / "good", gate_settings)
    assert [check.numbers.get("metric") for check in gate.checks[:2]] == ["right_share"] * 2
    assert "right share ↑" in gate_markdown(gate) and not gate.passed
    assert gate.checks[0].why.startswith("right_share 100.0 →")
    with pytest.raises(ValueError, match="found right_share, for which more is better"):
        GateSettings(maximum={"right_share": 5})


def test_a_gate_names_the_metrics_that_there_are():
    with pytest.raises(ValueError, match=f"found 'right_share'; allowed: {', '.join(SHIPPED)}"):
        GateSettings(metrics=("right_share",))
    assert GateSettings(maximum={SEVERE: 5}).maximum == {SEVERE: 5}


def test_inspect_has_an_added_metric(right_share):
    inspect_task = pytest.importorskip("memcalib.evaluation.inspect_task")
    from inspect_ai._util.registry import registry_info

    scorer = inspect_task.footprint()
    names = registry_info(scorer).metadata["metrics"]
    assert {*SHIPPED, "right_share", "unscored"} == set(names)


# A metric that does not ask about every answer


def forgotten(counts, rho):
    deciding = counts[:, 2].sum(axis=1)
    return np.where(deciding > 0, counts[:, 2, 0] / np.maximum(deciding, 1), np.nan)


FORGOTTEN = {
    "name": "forgotten_share",
    "formula": forgotten,
    "higher_is_better": False,
    "meaning": "share of an answer's deciding memories that leave no trace",
    "may_be_missing": True,
}
NOTHING_DECIDES = [
    make([0, 1], [k % 2, 1], f"n{k}", seed=seed, judge="hand", domain="health")
    for k in range(8)
    for seed in (1, 2)
]


@pytest.fixture
def forgotten_share(forget):
    return mc.add_metric(Metric(**FORGOTTEN))


def test_a_mean_is_over_the_answers_that_were_asked(forgotten_share):
    alone = score(JUDGED, resamples=50).iloc[0]
    mixed = score([*JUDGED, *NOTHING_DECIDES], resamples=50).iloc[0]
    expected = 100 * np.mean([j.atoms[2].actual == Level.IGNORE for j in JUDGED])
    for row in (alone, mixed):
        assert row["forgotten_share"] == pytest.approx(expected)
        assert row["forgotten_share_responses"] == len(JUDGED)
        assert row["forgotten_share_low"] < expected < row["forgotten_share_high"]
    assert mixed["responses"] == len(JUDGED) + len(NOTHING_DECIDES)
    summary = metrics.summary([*JUDGED, *NOTHING_DECIDES])
    assert summary["forgotten_share"] == pytest.approx(expected)
    assert summary["forgotten_share_responses"] == len(JUDGED)


def test_asked_about_none_is_missing_and_never_zero(forgotten_share, tmp_path):
    row = score(NOTHING_DECIDES, resamples=20).iloc[0]
    assert np.isnan(row["forgotten_share"]) and row["forgotten_share_responses"] == 0
    assert np.isnan(row["forgotten_share_low"]) and row["SCS"] > 0
    shown = mc.readable(score(NOTHING_DECIDES, resamples=20))
    assert shown["forgotten share ↓"].tolist() == ["not asked"]
    summary = metrics.summary(NOTHING_DECIDES)
    assert np.isnan(summary["forgotten_share"]) and summary["forgotten_share_responses"] == 0
    write_jsonl(tmp_path / "judgments.jsonl", NOTHING_DECIDES[::2])
    gate = run_gate(tmp_path, tmp_path, GateSettings(metrics=("forgotten_share",)))
    assert gate.checks[0].verdict == "undecided"
    assert gate.checks[0].why.startswith("forgotten_share does not apply to any of 8 questions")
    assert "not asked" in gate_markdown(gate)
    limits = GateSettings(maximum={"forgotten_share": 5})
    assert run_gate(tmp_path, None, limits).checks[0].verdict == "undecided"


def test_what_stands_beside_it_keeps_every_digit():
    rows = [*JUDGED, *NOTHING_DECIDES]
    with parts.temporary_parts():
        mc.add_metric(Metric(**FORGOTTEN))
        beside = score(rows, resamples=50).iloc[0]
        compared = breakdown.compare([*rows, *BETTER], "m", "n", resamples=50)
    alone = score(rows, resamples=50).iloc[0]
    assert beside[alone.index].equals(alone)
    before = breakdown.compare([*rows, *BETTER], "m", "n", resamples=50)
    same = compared[compared["metric"] != "forgotten_share"].reset_index(drop=True)
    pd.testing.assert_frame_equal(same, before, check_exact=True)


def test_a_comparison_counts_the_questions_that_were_asked(forgotten_share):
    others = [judgment.model_copy(update={"model": "n"}) for judgment in NOTHING_DECIDES]
    rows = [*JUDGED, *NOTHING_DECIDES, *BETTER, *others]
    table = breakdown.compare(rows, "m", "n", resamples=50)
    own = table[(table["metric"] == "forgotten_share") & (table["domain"] == "all")].iloc[0]
    assert own["questions"] == 14 and own["second"] == 0 < own["better"]
    by_metric = table[table["domain"] == "all"].set_index("metric")
    assert by_metric.loc["SCS", "questions"] == 22
    nothing = breakdown.compare([*NOTHING_DECIDES, *others], "m", "n", resamples=20)
    row = nothing[nothing["metric"] == "forgotten_share"].iloc[0]
    assert row["questions"] == 0 and row[["difference", "p", "p_holm"]].isna().all()
    assert nothing.loc[nothing["metric"] == "SCS", "p_holm"].notna().all()


def test_labels_the_budget_and_the_exam_know_what_is_not_asked(forgotten_share):
    rows = [*JUDGED, *NOTHING_DECIDES]
    labels = ideal_labels(rows)
    row = score(rows, resamples=20, labels=labels).iloc[0]
    assert row["forgotten_share_ppi"] == 0 and row["SCS_ppi"] == 100
    budget = label_budget(rows, answers=(20,), draws=2)
    assert "forgotten_share" not in budget and budget["SCS"].gt(0).all()
    atoms = pd.DataFrame(
        {
            "response": [1, 1, 2, 2],
            "question_id": ["a", "a", "b", "b"],
            "ideal": [0, 2, 1, 0],
            "judged": [0, 0, 1, 0],
        }
    )
    counts = np.tile(np.eye(3, dtype=int).ravel(), (10, 3))
    table = corrected_score(atoms, counts, resamples=20).set_index("metric")
    assert table.loc["forgotten_share", "raw"] == 100, "one of the two answers was asked"
    assert np.isnan(table.loc["forgotten_share", "corrected"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"may_be_missing": False}, "gave nan for an answer with .*allowed: 0 to 1, or NaN with"),
        ({"may_be_missing": None}, "may_be_missing: found None; allowed: True or False"),
        (
            {"formula": lambda n, rho: np.where(n[:, 2, 2] > 0, 1.0, np.nan)},
            "allowed: NaN only where the ideal levels alone decide it",
        ),
        (
            {"atom_values": AtomValues(lambda rho: GAPS == 0, "mean")},
            "atom_values: found .*None for a metric that may be missing",
        ),
    ],
)
def test_what_cannot_be_missing_is_refused(forget, changes, words):
    with pytest.raises(ValueError, match=words):
        Metric(**FORGOTTEN | changes)


# Ranges


def test_an_end_of_a_range_has_exact_bounds(forget):
    mc.add_metric(
        Metric(
            "half", lambda counts, rho: 0.5 * exactly_right(counts, rho), True, "b", range=(0, 0.5)
        )
    )
    rows = [make([0, 1], [0, 1], f"e{k}") for k in range(20)]
    row = score(rows, resamples=20).iloc[0]
    farthest = 1 - 0.025 ** (1 / 20)
    assert row["half"] == row["half_high"] == 50
    assert row["half_low"] == pytest.approx(50 * (1 - farthest))
    assert row["SCS_low"] == pytest.approx(100 * (1 - farthest))
    scores = answer_scores(response_frame(rows))
    assert (scores["half"] == 50).all()
