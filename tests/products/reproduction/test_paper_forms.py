"""Tables in the form of the paper: its rows, columns and marks, gaps that are no zeros."""

import numpy as np
import pandas as pd
import pytest

from memcalib.evaluation.agreement import wilson
from memcalib.evaluation.rpeval import rpeval_controls
from memcalib.metrics import METRICS
from memcalib.problem import Example, judgment_for
from memcalib.products.reproduction.paper_forms import (
    CONTROL_NAMES,
    alternative_judge_form,
    below,
    beside,
    full_results_form,
    judge_stability_form,
    main_results_form,
    published_audit_matrices,
    rpeval_form,
    source_form,
    survey_form,
)
from memcalib.report.tables import (
    MarkedTable,
    best_and_second,
    published,
    stored_table,
    write_tables,
)
from memcalib.products.reproduction.seed_tables import published_spread

LETTERS = {"": ".", "best": "B", "second": "S"}
ARROWS = dict(zip(METRICS, "↑↑↓↓↓↓", strict=True))


def measured(names=("GDPO",), first="method", **columns) -> pd.DataFrame:
    """Rows as an experiment makes them: six metrics as text, and columns that no form shows."""
    rows = []
    for name in names:
        row = {first: name, **columns}
        row |= {f"{metric} {arrow}": "50.00 ± 1.00" for metric, arrow in ARROWS.items()}
        rows.append(row | {"SCS 95 %": "49.00 to 51.00", "unscored": "0 of 9"})
    return pd.DataFrame(rows)


def letters(marked, rows) -> dict[str, str]:
    """The marks of some rows as one text a row, by the name of the row; rows without a mark are
    left out.
    """
    names = marked.cells.loc[rows].iloc[:, -7]
    texts = {}
    for name, row in zip(names, marked.marks.loc[rows].iloc[:, -6:].to_numpy(), strict=True):
        text = "".join(LETTERS[mark] for mark in row)
        if text != "......":
            texts[name] = text
    return texts


# -- the marks that the published tables have, read from their pictures in colour ------------------


def test_the_published_survey_is_marked_as_in_the_paper():
    form = survey_form(measured(["small"], first="model"))
    assert letters(form, form.cells["source"] == "published") == {
        "GPT-5.6-SOL": "BBS.S.",
        "Claude Sonnet 4.6": "S.....",
        "Kimi-K2.6": ".S.S.S",
        "Qwen3-8B": "..B.B.",
        "Qwen3.5-35B-A3B": "...B.B",
    }


PUBLISHED_MARKS = {
    "Qwen3-8B": {"SFT": "..B.B.", "GRPO": "...S.S", "GDPO": "SS....", "MemCalib-RL": "BBSBSB"},
    "Ministral-3-8B-Instruct": {
        "SFT": "..S.S.",
        "GRPO": "SS.B.B",
        "GDPO": "...S.S",
        "MemCalib-RL": "BBB.B.",
    },
    "Qwen3.5-35B-A3B": {
        "SFT": "..B.B.",
        "GRPO": "...B.B",
        "GDPO": "SS.S.S",
        "MemCalib-RL": "BBS.S.",
    },
}


@pytest.mark.parametrize("model", PUBLISHED_MARKS)
def test_the_published_main_results_are_marked_as_in_the_paper(model):
    form = full_results_form(measured())
    assert letters(form, form.cells["model"] == f"published, {model}") == PUBLISHED_MARKS[model]
    narrow = main_results_form(measured())
    marks = narrow.marks[f"published, {model}"].set_axis(narrow.cells["", "method"])
    first_two = {name: text[:2] for name, text in PUBLISHED_MARKS[model].items() if text[0] != "."}
    assert {
        name: "".join(LETTERS[mark] for mark in row)
        for name, row in zip(marks.index, marks.to_numpy(), strict=True)
        if any(row)
    } == first_two


def test_the_published_second_judge_is_marked_as_in_the_paper():
    form = alternative_judge_form(measured(first="model", judge="strict"), "strict")
    half = MarkedTable(_with_method(form.cells), _with_method(form.marks))
    assert letters(half, slice(None)) == {
        "SFT": "..B.B.",
        "GRPO": "...S.S",
        "GDPO": "SS....",
        "MemCalib-RL": "BBSBSB",
    }


def _with_method(frame: pd.DataFrame) -> pd.DataFrame:
    """The published half of a table of two halves, the methods first."""
    half = frame["published, Qwen3.8-Max"].copy()
    half.insert(0, "method", frame["", "method"])
    return half


def test_published_transfer_is_marked_as_in_the_paper():
    form = rpeval_form(transfer_rows())
    rows = form.cells["source"] == "published, Qwen3-8B"
    texts = {
        name: "".join(LETTERS[mark] for mark in marks)
        for name, marks in zip(
            form.cells.loc[rows, "method"], form.marks.loc[rows].iloc[:, 2:].to_numpy(), strict=True
        )
    }
    assert {name: text for name, text in texts.items() if text != "....."} == {
        "Base": "...B.",
        "OPSD-PG": "SSS.S",
        "GRPO": "...S.",
        "MemCalib-RL": "BBB.B",
    }


def test_the_published_sweep_and_ablation_are_marked_as_in_the_paper():
    sweep = best_and_second(published_spread("eta_sweep", ["eta"]))
    assert letters(sweep, slice(None)) == {0.5: "SSS.S.", 0.75: "BBBBBB", 1.0: "...S.S"}
    cells = published_spread("localization_ablation", ["granularity", "signal"])
    cells.insert(0, "arm", cells.pop("granularity") + ", " + cells.pop("signal"))
    assert letters(best_and_second(cells), slice(None)) == {
        "Sentence, Absolute": "..S.S.",
        "Sentence, Ordered": "SSBSBS",
        "Token, Ordered": "BB.B.B",
    }


# -- form ------------------------------------------------------------------------------------------


def test_main_results_have_the_rows_and_columns_of_the_paper():
    rows = pd.concat(
        [
            measured(["Base", "evidence-kl"], status="measured"),
            measured(["no memory", "all Ignore"], status="control"),
            measured(["SFT"], status="not run"),
        ]
    )
    form = main_results_form({"measured, dice": rows})
    assert form.cells["", "method"].tolist() == [
        *("Base", "Cold-start", "SFT", "OPSD-PG", "OPSD-GKD", "GRPO", "GDPO", "MemCalib-RL"),
        "evidence-kl",
    ]
    assert form.cells.columns.get_level_values(0).unique().tolist() == [
        "",
        "measured, dice",
        "published, Qwen3-8B",
        "published, Ministral-3-8B-Instruct",
        "published, Qwen3.5-35B-A3B",
    ]
    ours = form.cells["measured, dice", "SCS ↑"].tolist()
    assert ours == ["50.00 ± 1.00", *["not run"] * 7, "50.00 ± 1.00"]
    assert form.cells["published, Qwen3-8B", "SCS ↑"].iloc[-1] == ""


def test_every_published_number_of_the_main_results_is_there():
    form = full_results_form(measured())
    for row in published("main_results").itertuples():
        is_row = (form.cells["model"] == f"published, {row.model}") & (
            form.cells["method"] == row.method
        )
        cell = form.cells.loc[is_row, f"{row.metric} {ARROWS[row.metric]}"].item()
        assert cell == f"{row.mean:.2f} ± {row.std:.2f}"


def test_controls_of_a_survey_are_a_block_without_marks():
    rows = measured(["small", "large", *CONTROL_NAMES], first="model")
    rows.loc[rows["model"] == "all Ignore", "sMOS ↓"] = "0.00"
    rows.loc[rows["model"] == "small", "sMOS ↓"] = "9.00"
    form = survey_form(rows, "measured")
    block = form.cells["source"] == "measured, controls"
    assert block.sum() == len(CONTROL_NAMES) and (form.marks[block] == "").all(axis=None)
    best = form.cells[(form.marks["sMOS ↓"] == "best") & (form.cells["source"] == "measured")]
    assert best["model"].tolist() == ["small"]


def test_blocks_must_fit():
    one = pd.DataFrame({"method": ["a", "a"], "SCS ↑": ["1", "2"]})
    with pytest.raises(ValueError, match="measured: found 'a' twice; allowed: one row for each"):
        beside({"measured": one}, on="method")
    with pytest.raises(ValueError, match="measured: found no column 'model'; allowed: method"):
        beside({"measured": one}, on="model")
    with pytest.raises(ValueError, match="b: found columns x; allowed: method, SCS ↑"):
        below({"a": one, "b": pd.DataFrame({"x": ["1"]})}, "source")
    with pytest.raises(ValueError, match="found no column of Exact; allowed: method, SCS ↑"):
        full_results_form(one)


def test_a_form_made_from_stored_files_is_the_same(tmp_path):
    """A repository keeps tables and not judgments: the page must show the same from either."""
    rows = measured(["Base", "GDPO", "MemCalib-RL"], status="measured")
    rows.loc[1, "SCS ↑"] = "60.00 ± 2.00"
    write_tables(tmp_path, {"tab:full-main-results": rows})
    again = stored_table(tmp_path, "tab:full-main-results")
    for make in (main_results_form, full_results_form):
        pd.testing.assert_frame_equal(make(rows).cells, make(again).cells)
        pd.testing.assert_frame_equal(make(rows).marks, make(again).marks)


# -- judges ----------------------------------------------------------------------------------------


def test_an_unknown_judge_is_named():
    with pytest.raises(ValueError, match="judge: found 'x'; allowed: strict"):
        alternative_judge_form(measured(first="model", judge="strict"), "x")


def test_correlations_stand_beside_the_published_ones():
    rows = pd.DataFrame({"metric": ["sMOS"], "spearman": ["0.54761"], "pearson": [0.9991]})
    form = judge_stability_form(rows)
    assert form.cells["", "metric"].tolist() == [*METRICS]
    assert form.cells["measured", "Spearman"].tolist()[:3] == ["not run", "not run", "0.548"]
    assert form.cells["published", "Pearson"].iloc[2] == "0.998"
    assert (form.marks == "").all(axis=None)


def test_published_matrices_hold_what_the_text_says_and_nothing_else():
    natural, stratified = published_audit_matrices().values()
    facts = published("facts").query("group == 'judge_audit'").set_index("fact")["value"]
    facts = facts.astype(float)
    assert natural[0, 0] == facts["natural_human_ignore_matched"]
    assert natural[1, 2] + natural[2, 1] == facts["natural_disagreements_bound_control"]
    wrong = facts["natural_n"] - facts["natural_agree"]
    assert facts["natural_judge_lower"] - natural[2, 1] == wrong - natural[1, 2] - natural[2, 1]
    assert facts["natural_judge_lower"] + facts["natural_judge_higher"] == wrong
    assert stratified[1, 2] == facts["stress_human_bound_judge_control"]
    assert stratified[2, 1] == facts["stress_human_control_judge_bound"]
    assert np.isnan(natural).sum() == 4 and np.isnan(stratified).sum() == 7
    low, _ = wilson(int(facts["natural_agree"]), int(facts["natural_n"]))
    assert round(low, 1) == facts["natural_wilson_low_pct"]


# -- sources and transfer --------------------------------------------------------------------------


def test_sources_have_the_columns_of_the_paper():
    rows = [
        {"data set": "log", "source": s, "domain": "Health", "licence": licence, "examples": 2}
        for s, licence in (("a", "CC0-1.0"), ("b", "CC0-1.0"), ("a", "MIT"))
    ]
    form = source_form(pd.DataFrame(rows))
    assert list(form) == ["of", "domain", "source datasets", "coverage"]
    assert form["of"].tolist() == ["published"] * 3 + ["built here, log"]
    coding = form.set_index("domain").loc["Coding", "source datasets"]
    assert "APPS" in coding and coding.count(";") == 2
    assert form.iloc[-1].tolist()[2:] == ["a; b", "4 records, CC0-1.0; 2 records, MIT"]


def transfer_rows() -> pd.DataFrame:
    """A table as `rpeval_table` makes it: one measured policy, constants, the published rows."""
    values = {f"{name}": "50.00" for name in ("Macro ↑", "Micro ↑", "OPB ↓", "UPB ↓", "RII ↓")}
    rows = [{"source": "measured", "model": "Base"} | values]
    rows += [
        {"source": "constant", "model": f"all {name}"} | values
        for name in ("Ignore", "Support", "Dominate")
    ]
    wide = published("rpeval").assign(
        cell=lambda t: [f"{a:.2f} ± {b:.2f}" for a, b in zip(t["mean"], t["std"], strict=True)]
    )
    for method, method_rows in wide.groupby("method", sort=False):
        cells = {
            f"{metric} {'↑' if metric in ('Macro', 'Micro') else '↓'}": cell
            for metric, cell in zip(method_rows["metric"], method_rows["cell"], strict=True)
        }
        rows.append({"source": "published", "model": f"Qwen3-8B, {method}"} | cells)
    return pd.DataFrame(rows)


def preferences(*labels: str) -> list[Example]:
    """Examples of domain rpeval with one preference for each letter."""
    examples = []
    for number, letters_ in enumerate(labels):
        examples.append(
            Example.of(
                f"Question {number}?",
                {
                    f"Preference {number} {k}.": {"A": "ignore", "B": "bound", "C": "control"}[
                        letter
                    ]
                    for k, letter in enumerate(letters_)
                },
            )
        )
    return examples


def test_constants_of_the_file_are_computed_where_it_is_at_hand():
    examples = preferences("AA", "AB", "AC", "AA")
    controls = rpeval_controls([judgment_for(e, e.levels) for e in examples], resamples=2)
    form = rpeval_form(transfer_rows(), controls)
    rows = form.cells[form.cells["source"] == "constants on RPEval's file, computed from the file"]
    assert rows["method"].tolist() == ["all Ignore", "all Support", "all Dominate"]
    assert rows.iloc[0].tolist()[2:] == ["50.00", "75.00", "0.00", "25.00", "0.00"]
    assert (form.marks.loc[rows.index] == "").all(axis=None)


def test_constants_of_the_file_follow_from_its_counts():
    """641 preferences to ignore, 79 to support, 83 to dominate in 150 rows, 60 of them with the
    first kind alone and none without it.
    """
    form = rpeval_form(transfer_rows())
    shipped = form.cells[form.cells["source"].str.endswith("computed before")]
    numbers = shipped.iloc[:, 2:].astype(float).to_numpy().tolist()
    total = 641 + 79 + 83
    assert numbers[0] == [40.0, round(100 * 641 / total, 2), 0, round(100 * 162 / total, 2), 0]
    assert numbers[1] == [0, round(100 * 79 / total, 2), 0, 0, round(100 * 724 / total, 2)]
    assert numbers[2] == [0, round(100 * 83 / total, 2), round(100 * 720 / total, 2), 0, 0]
