"""The figure of eight panels: what it draws, from which files, and what it says where rows lack."""

from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest

from memcalib.products.reproduction.dynamics import (
    CHANNEL_GROUPS,
    LOCALIZABLE,
    OUTCOMES,
    MechanismRows,
    curve_rows,
    mechanism_figure,
    phase_table,
    read_mechanism,
)
from memcalib.report.tables import published, write_tables

TITLES = "abcdefgh"


def made_up_steps(method="MemCalib-RL", seeds=(1, 2), steps=30) -> pd.DataFrame:
    rows = []
    for seed in seeds:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "method": method,
                "seed": seed,
                "entropy": 1.0 + seed - step / steps,
            }
            for number, name in enumerate(LOCALIZABLE):
                row |= {f"candidates/{name}": 10, f"localized/{name}": 5, f"groups/{name}": 4}
                row |= {f"{outcome}/{name}": 0.25 for outcome in OUTCOMES}
                row |= {f"nondegenerate/{name}": 0.1 * number, f"trigger/{name}": 0.1 * number}
                row[f"threshold/{name}"] = 0.02 * seed
            rows.append(row)
    return pd.DataFrame(rows)


def made_up_rows() -> MechanismRows:
    strengths = [
        {"world": "short", "arm": arm, "seed": seed, "SCS": 60.0 + seed, "Exact": 50.0}
        for arm in ("0.00", "0.75")
        for seed in (1, 3)
    ]
    shares = [
        {"slice": slice_name, "role": role}
        | {
            f"{quantity}_share{end}": value
            for quantity in ("token", "credit")
            for end in ("", "_low", "_high")
        }
        for slice_name, value in (("all", 0.25), ("support", 0.9))
        for role in ("key", "partial", "irrelevant")
    ]
    steps = made_up_steps()
    factors = pd.DataFrame(
        {"step": [10, 20] * 2, "seed": [1, 1, 2, 2], "mean": 1.0, "p5": 0.5, "p95": [1.5, 1.7] * 2}
    )
    curves = curve_rows(steps)
    other = curve_rows(made_up_steps("floor 0.002"))
    return MechanismRows(
        pd.DataFrame(strengths), curves, other, phase_table(steps), factors, pd.DataFrame(shares)
    )


ROWS = made_up_rows()


def panels_of(rows, **options) -> dict:
    """The axes of the eight panels by letter."""
    axes = mechanism_figure(rows, **options).axes
    by_letter = {ax.get_title(loc="left")[:1]: ax for ax in axes if ax.get_title(loc="left")}
    assert list(by_letter) == list(TITLES)
    return by_letter


def lines_of(ax) -> dict:
    return {line.get_label(): line for line in ax.get_lines()}


def test_rows_of_a_step_hold_what_the_curves_need():
    steps = made_up_steps()
    rows = curve_rows(steps)
    assert len(rows) == len(steps)
    # the rate of a group is the mean over its channels, as in the paper
    for group, channels in CHANNEL_GROUPS.items():
        want = np.mean([0.1 * LOCALIZABLE.index(name) for name in channels])
        assert rows[f"nondegenerate/{group}"].round(6).unique().tolist() == [round(want, 6)]
    two = curve_rows(pd.concat([steps, made_up_steps("other", seeds=(1,))]))
    assert two.groupby("method", sort=False).size().to_dict() == {"MemCalib-RL": 60, "other": 30}
    with pytest.raises(ValueError, match=r"steps: found no column named 'candidates/B\+'"):
        curve_rows(pd.DataFrame({"method": ["GRPO"], "seed": [1], "step": [1], "reward": [0.0]}))


def test_strengths_are_means_and_deviations_beside_the_published_ones():
    ax = panels_of(ROWS)["a"]
    by_label = {bars.get_label(): bars for bars in ax.containers}
    ours = by_label["SCS, measured"].lines[0]
    assert ours.get_xydata().tolist() == [[0, 62], [0.75, 62]]
    (bars,) = by_label["SCS, measured"].lines[2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[61, 63]] * 2
    theirs = published("eta_sweep").query("metric == 'Exact'")
    shown = by_label["Exact, published"].lines[0].get_xydata()
    assert shown.tolist() == theirs[["eta", "mean"]].to_numpy().tolist()


def test_every_localizable_channel_has_a_line_and_no_two_look_alike():
    drawn = panels_of(ROWS)
    for letter in "bf":
        lines = lines_of(drawn[letter])
        assert set(lines) == set(LOCALIZABLE)
        looks = {(line.get_color(), line.get_linestyle()) for line in lines.values()}
        assert len(looks) == 8
        shown = [text.get_text() for text in drawn[letter].get_legend().get_texts()]
        assert sorted(shown) == sorted(LOCALIZABLE)  # each panel names its channels itself
    # seeds are averaged: thresholds of 0.02 and 0.04
    assert set(lines["B+"].get_ydata().round(6)) == {0.03}
    assert "floor 0.002" in drawn["f"].get_title(loc="left")


def test_curves_are_centred_means_over_the_window():
    curves = ROWS.curves.copy()
    curves["trigger/B+"] = (curves["step"] == 15).astype(float)
    line = lines_of(panels_of(replace(ROWS, curves=curves), window=7)["b"])["B+"]
    assert np.flatnonzero(line.get_ydata() > 0).tolist() == [*range(11, 18)]  # steps 12 to 18
    assert line.get_ydata().max() == pytest.approx(1 / 7)


def test_published_values_stand_only_where_there_are_some():
    drawn = panels_of(ROWS)
    facts = published("facts").set_index("fact")["value"]
    diamonds = [line for line in drawn["c"].get_lines() if line.get_marker() == "D"]
    heights = {round(y, 1) for line in diamonds for y in line.get_ydata() if not np.isnan(y)}
    names = (
        "localization_rate_correct",
        "localization_rate_corrective",
        "correct_candidates_share",
    )
    assert heights == {float(facts[f"{n}_{p}_pct"]) for n in names for p in ("early", "late")}
    middle = [line.get_ydata()[1] for line in diamonds if len(line.get_ydata()) == 3]
    assert np.isnan(middle).all()  # nothing is published of the middle phase, which is no 0
    for letter in "bf":
        assert not [line for line in drawn[letter].get_lines() if line.get_marker() == "D"]


def test_outcomes_of_a_phase_fill_the_whole_stack():
    bars = [bar for bar in panels_of(ROWS)["e"].patches if bar.get_height() > 0]
    tops = {}
    for bar in bars:
        tops[round(bar.get_x(), 2)] = bar.get_y() + bar.get_height()
    assert len(tops) == 6 and {round(top) for top in tops.values()} == {100}


def test_shares_are_those_of_all_channels_in_percent():
    bars = panels_of(ROWS)["h"].patches
    assert {round(bar.get_height(), 6) for bar in bars} == {25.0} and len(bars) == 6


def test_factors_are_averaged_over_seeds():
    line = lines_of(panels_of(ROWS)["g"])["mean"]
    assert line.get_xydata().tolist() == [[10, 1], [20, 1]]


@pytest.mark.parametrize(
    "field, letters",
    [
        ("strengths", "a"),
        ("curves", "bd"),
        ("thresholds", "f"),
        ("phases", "ce"),
        ("factors", "g"),
        ("shares", "h"),
    ],
)
def test_a_panel_without_rows_says_so_and_the_others_stay(field, letters):
    empty = getattr(ROWS, field).iloc[:0]
    drawn = panels_of(replace(ROWS, **{field: empty}))
    silent = {
        letter
        for letter, ax in drawn.items()
        if "not run" in [text.get_text() for text in ax.texts]
    }
    assert silent == set(letters)


def test_the_figure_is_the_same_from_what_three_experiments_wrote(tmp_path):
    eta, dynamics, audit = (tmp_path / name for name in ("eta", "dynamics", "audit"))
    write_tables(eta / "tables", {"tab:eta-sweep by training": ROWS.strengths})
    tables = {
        "fig:mechanism-analysis phases": ROWS.phases,
        "fig:mechanism-analysis factors": ROWS.factors,
    }
    write_tables(dynamics / "tables", tables)
    pd.concat([ROWS.curves, ROWS.thresholds]).to_csv(dynamics / "curves.csv", index=False)
    with pytest.raises(FileNotFoundError, match="localization-shares.csv: found no table"):
        read_mechanism(eta, dynamics, audit)
    write_tables(audit / "tables", {"localization shares": ROWS.shares})
    again = read_mechanism(eta, dynamics, audit)
    for field in fields(MechanismRows):
        before = getattr(ROWS, field.name)
        after = getattr(again, field.name)
        assert list(after) == list(before)
        assert len(after) == len(before), field.name
    before = panels_of(ROWS)
    after = panels_of(again)
    for letter in TITLES:
        for one, other in zip(before[letter].get_lines(), after[letter].get_lines(), strict=True):
            np.testing.assert_allclose(one.get_xydata(), other.get_xydata(), err_msg=letter)
