"""Tables of a grid from invented rows of which the truth is known."""

import numpy as np
import pytest
from scipy import stats

from memcalib.products.reproduction.rule_runs import GridPlan, GridRow, GridStage
from memcalib.products.reproduction.rule_tables import (
    equal_time,
    fieller,
    grid_frame,
    headroom_table,
    paired_differences,
    paths_figure,
    rates_table,
    rules_table,
    rule_verdicts,
)

GAINS = {"gdpo": 0.0, "exact": 8.0, "evidence-kl": 4.0, "ordered": -6.0}
NOISE = np.random.default_rng(0).normal(0, 1, 200)
PLAN = GridPlan(
    cells={"few atoms": {"atoms": (3, 5)}, "equal time": {"steps": 130}},
    stages={
        "rates": GridStage(rules=(*GAINS,), lr=(1e-3, 2e-3), seeds=(1, 2), split="validation"),
        "rules": GridStage(
            rules=(*GAINS,), seeds=(11, 12, 13, 14, 15), cells=("plain", "few atoms")
        ),
        "time": GridStage(rules=("gdpo",), seeds=(11, 12, 13, 14, 15), cells=("equal time",)),
        "judges": GridStage(
            rules=("evidence-kl",), seeds=(11, 12, 13), faults=(("missing", 0.5), ("levels", 0.1))
        ),
    },
)


@pytest.fixture(scope="module")
def frame():
    rows = []
    count = iter(NOISE)

    def invented(run):
        gain = GAINS[run.rule] * (run.atoms is None) * (0.5 if run.fault != "none" else 1) + 3 * (
            run.steps > 100
        )
        scores = {
            "SCS": 20 + 5 * (run.seed % 5) + gain - 1000 * run.lr + 0.3 * next(count),
            "accuracy": None,
        }
        return GridRow(
            run=run,
            scores=scores,
            derailed=["answers grew"] if run.rule == "ordered" and run.lr > 1.5e-3 else [],
        )

    for stage in PLAN.stages:
        rows += [invented(run) for run in PLAN.runs(stage, rows)]
    return grid_frame(PLAN, rows)


def test_differences_are_taken_seed_by_seed(frame):
    gaps = paired_differences(frame).set_index(["rule", "domain"])
    gap = gaps.loc[("evidence-kl", "plain")]
    assert (
        abs(gap["difference"] - 4) < 0.5 and gap["high"] - gap["low"] < 2
    )  # seeds differ by far more
    one, other = (
        frame[
            (frame["rule"] == rule)
            & (frame["cell"] == "plain")
            & (frame["split"] == "test")
            & (frame["fault"] == "none")
        ]
        for rule in ("ordered", "gdpo")
    )
    by_hand = stats.ttest_rel(
        one.sort_values("seed")["SCS"], other.sort_values("seed")["SCS"]
    ).confidence_interval()
    gap = gaps.loc[("ordered", "plain")]
    assert (gap["low"], gap["high"]) == pytest.approx((by_hand.low, by_hand.high))


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
    few = table.loc[("few atoms", "evidence-kl")]
    assert few["headroom_low"] < 0.5 and np.isnan(few[["share", "low", "high"]].astype(float)).all()
    assert few["missing"] == "headroom may be 0" and row["missing"] == ""


def test_share_headroom_and_gain_of_a_line_rest_on_the_same_seeds(frame):
    columns = ["rule", "cell", "seed", "fault", "rate", "split", "SCS", "label", "lr", "derailed"]
    fewer = frame[columns][
        (frame["rule"] != "evidence-kl") | (frame["split"] != "test") | (frame["seed"] > 12)
    ]
    plain_rows = fewer[
        (fewer["split"] == "test") & (fewer["cell"] == "plain") & (fewer["fault"] == "none")
    ]
    table = headroom_table(fewer).set_index(["cell", "rule"])
    row = table.loc[("plain", "evidence-kl")]
    other = table.loc[("plain", "ordered")]
    wide = plain_rows.pivot_table(index="seed", columns="rule", values="SCS").dropna()
    assert (row["seeds"], other["seeds"]) == (3, 5) and row["headroom"] != other["headroom"]
    assert row["headroom"] == pytest.approx((wide["exact"] - wide["gdpo"]).mean())
    assert row["share"] == pytest.approx(row["gain"] / row["headroom"])
    one = headroom_table(fewer[(fewer["rule"] == "gdpo") | (fewer["seed"] == 13)]).set_index(
        ["cell", "rule"]
    )
    assert one.loc[("plain", "ordered"), "missing"] == "one seed" and np.isnan(
        one.loc[("plain", "ordered"), "share"]
    )


def test_fieller_holds_what_a_paired_t_test_does_not_reject():
    rng = np.random.default_rng(2)
    gain = rng.normal(2, 1.5, 6)
    most = rng.normal(4, 1.5, 6)
    low, high = fieller(gain, most)

    def p(share):
        return stats.ttest_1samp(gain - share * most, 0).pvalue

    assert (
        p(low) == pytest.approx(0.05)
        and p(high) == pytest.approx(0.05)
        and p((low + high) / 2) > 0.05
    )
    assert fieller(2 * most, most) == pytest.approx((2, 2))
    assert (
        np.isnan(fieller(gain, most - most.mean())).all() and np.isnan(fieller([1.0], [2.0])).all()
    )


@pytest.mark.parametrize("seeds", [5, 10])
def test_intervals_of_a_share_cover_it_as_often_as_they_say(seeds):
    rng = np.random.default_rng(3)
    hits = []
    while len(hits) < 1000:
        most = rng.normal(4, 1.5, seeds)
        gain = rng.normal(1.5, 1.5, seeds)
        if stats.ttest_1samp(most, 0).confidence_interval().low > 0:
            low, high = fieller(gain, most)
            hits.append(low <= 1.5 / 4 <= high)
    assert 0.93 < np.mean(hits) < 0.97


def test_tables_name_what_was_chosen_and_what_derailed(frame):
    rates = rates_table(frame)
    assert (
        all(cell.endswith("*") for cell in rates["0.001"])
        and "(2)" in rates.loc["MemCalib-RL", "0.002"]
    )
    rules = rules_table(frame)
    assert (
        (rules["seeds"] == 5).all()
        and (rules["lr"] == "0.001").all()
        and (rules["accuracy"] == "").all()
    )


def test_a_lost_run_leaves_its_own_line_of_each_score_only(frame):
    lost = frame.assign(sMOS=30.0)
    first = (
        (lost["rule"] == "exact")
        & (lost["split"] == "test")
        & (lost["cell"] == "plain")
        & (lost["seed"] == 11)
    )
    lost.loc[first, ["SCS", "sMOS"]] = [0.0, np.nan]
    gaps = paired_differences(lost, scores=("SCS", "sMOS", "accuracy")).set_index(
        ["rule", "domain", "metric"]
    )
    assert (
        gaps.loc[("exact", "plain", "SCS"), "seeds"] == 5
        and gaps.loc[("exact", "plain", "sMOS"), "seeds"] == 4
    )
    assert gaps.loc[("exact", "plain", "sMOS"), "difference"] == 0
    assert gaps.loc[("exact", "plain", "accuracy"), "seeds"] == 0
    rules = rules_table(lost)
    assert (
        rules.loc["exact credit", "sMOS"] == "30.0 ± 0.0 (4)"
        and rules.loc["GDPO", "sMOS"] == "30.0 ± 0.0"
    )
    assert not rules.loc["exact credit", "SCS"].endswith(")")


def test_verdicts_and_equal_time(frame):
    verdict_table = rule_verdicts(paired_differences(frame))
    assert verdict_table.loc["plain", "evidence-kl"].startswith("pays +") and verdict_table.loc[
        "plain", "MemCalib-RL"
    ].startswith("hurts -")
    assert verdict_table.loc["few atoms", "exact credit"].startswith("ties")
    timed = equal_time(frame).set_index("rule")
    assert abs(timed.loc["evidence-kl", "difference"] - 1) < 0.6
    longer = frame.assign(rule=frame["rule"].where(frame["cell"] != "equal time", "ordered"))
    longer["label"] = longer["label"].where(longer["cell"] != "equal time", "MemCalib-RL")
    timed = equal_time(longer, against="ordered").set_index("rule")  # 130 steps of it gain 3
    assert abs(timed.loc["gdpo", "difference"] + 3) < 0.6 and "ordered" not in timed.index


def test_paths_need_trainings():
    with pytest.raises(ValueError, match="at least one of"):
        paths_figure(PLAN, [])
