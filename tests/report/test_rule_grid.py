"""Tables of a grid from invented rows of which the truth is known."""

import numpy as np
import pytest
from scipy import stats

from memcalib.micro.grid import GridPlan, GridRow, Stage
from memcalib.report.rule_grid import (
    equal_time,
    grid_frame,
    headroom_table,
    paired_differences,
    paths_figure,
    rates_table,
    rules_table,
    verdicts,
)

GAINS = {"gdpo": 0.0, "exact": 8.0, "evidence-kl": 4.0, "ordered": -6.0}
NOISE = np.random.default_rng(0).normal(0, 1, 200)
PLAN = GridPlan(
    cells={"few atoms": {"atoms": (3, 5)}, "equal time": {"steps": 130}},
    stages={
        "rates": Stage(rules=(*GAINS,), lr=(1e-3, 2e-3), seeds=(1, 2), split="validation"),
        "rules": Stage(rules=(*GAINS,), seeds=(11, 12, 13, 14, 15), cells=("plain", "few atoms")),
        "time": Stage(rules=("gdpo",), seeds=(11, 12, 13, 14, 15), cells=("equal time",)),
        "judges": Stage(rules=("evidence-kl",), seeds=(11, 12, 13), faults=(("missing", 0.5), ("levels", 0.1))),
    },
)


@pytest.fixture(scope="module")
def frame():
    rows, count = [], iter(NOISE)

    def invented(run):
        gain = GAINS[run.rule] * (run.atoms is None) * (0.5 if run.fault != "none" else 1) + 3 * (run.steps > 100)
        scores = {"SCS": 20 + 5 * (run.seed % 5) + gain - 1000 * run.lr + 0.3 * next(count), "accuracy": None}
        return GridRow(
            run=run, scores=scores, derailed=["answers grew"] if run.rule == "ordered" and run.lr > 1.5e-3 else []
        )

    for stage in PLAN.stages:
        rows += [invented(run) for run in PLAN.runs(stage, rows)]
    return grid_frame(PLAN, rows)


def test_differences_are_taken_seed_by_seed(frame):
    gaps = paired_differences(frame).set_index(["rule", "domain"])
    found = gaps.loc[("evidence-kl", "plain")]
    assert abs(found["difference"] - 4) < 0.5 and found["high"] - found["low"] < 2  # seeds differ by far more
    one, other = (
        frame[
            (frame["rule"] == rule)
            & (frame["cell"] == "plain")
            & (frame["split"] == "test")
            & (frame["fault"] == "none")
        ]
        for rule in ("ordered", "gdpo")
    )
    by_hand = stats.ttest_rel(one.sort_values("seed")["SCS"], other.sort_values("seed")["SCS"]).confidence_interval()
    found = gaps.loc[("ordered", "plain")]
    assert (found["low"], found["high"]) == pytest.approx((by_hand.low, by_hand.high))


def test_wrong_quotes_are_compared_with_the_exact_judge_and_wrong_levels_need_their_own(frame):
    gaps = paired_differences(frame).set_index(["rule", "domain"])
    assert (
        gaps.loc[("evidence-kl", "missing 50%"), "seeds"] == 3
        and abs(gaps.loc[("evidence-kl", "missing 50%"), "difference"] - 2) < 1
    )
    assert ("evidence-kl", "levels 10%") not in gaps.index  # GDPO was not trained under that judge


def test_headroom_and_shares(frame):
    table = headroom_table(frame).set_index(["cell", "rule"])
    row = table.loc[("plain", "evidence-kl")]
    assert (
        row["low"] < row["share"] < row["high"]
        and abs(row["share"] - 0.5) < 0.1
        and table.loc[("plain", "ordered"), "share"] < 0
    )
    assert table.loc[("few atoms", "evidence-kl"), "headroom_low"] < 0.5 and np.isnan(
        table.loc[("few atoms", "evidence-kl"), "share"]
    )


def test_tables_name_what_was_chosen_and_what_derailed(frame):
    rates = rates_table(frame)
    assert all(cell.endswith("*") for cell in rates["0.001"]) and "(2)" in rates.loc["MemCalib-RL", "0.002"]
    rules = rules_table(frame)
    assert (rules["seeds"] == 5).all() and (rules["lr"] == "0.001").all() and (rules["accuracy"] == "").all()


def test_verdicts_and_equal_time(frame):
    found = verdicts(paired_differences(frame))
    assert found.loc["plain", "evidence-kl"].startswith("pays +") and found.loc["plain", "MemCalib-RL"].startswith(
        "hurts -"
    )
    assert found.loc["few atoms", "exact credit"].startswith("ties")
    timed = equal_time(frame).set_index("rule")
    assert abs(timed.loc["evidence-kl", "difference"] - 1) < 0.6


def test_paths_need_trainings():
    with pytest.raises(ValueError, match="at least one of"):
        paths_figure(PLAN, [])
