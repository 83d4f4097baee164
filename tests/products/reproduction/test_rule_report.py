"""A rule beside the others: differences, costs, places, and the verb that makes the page."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from plan_runs import run_jobs_here

from memcalib.commands.cli import main
from memcalib.products.reproduction import rule_report, rule_runs
from memcalib.products.reproduction.jobs import Jobs
from memcalib.products.reproduction.rule_grid import (
    grid_code,
    grid_counts,
    grid_jobs,
    load_plan,
    rows_by_stage,
)
from memcalib.products.reproduction.rule_report import (
    resampled_differences,
    placement_table,
    rule_sentence,
    step_costs,
    write_rule_report,
)
from memcalib.products.reproduction.rule_runs import (
    GridPlan,
    GridRow,
    GridRun,
    row_code,
    stored_rows,
)
from memcalib.products.reproduction.token_means import OTHER, RIGHT, RuleCredit

SOURCE = '''
from memcalib.rules.base import CreditRule


class Mine(CreditRule):
    """A rule that nobody runs here."""

    name = "mine"
    label = "my rule"

    def weights(self, batch, pairs, scores):
        raise AssertionError("not run in these tests")
'''
MINE = "a_rule_of_mine:Mine"


@pytest.fixture
def rule_file(tmp_path, monkeypatch):
    """The file of a rule outside the package."""
    file = tmp_path / "a_rule_of_mine.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("a_rule_of_mine", None)


@pytest.fixture
def trained(monkeypatch):
    """No training: rows with invented totals."""
    runs_made = []

    def one(run, policies=""):
        runs_made.append(run)
        return row_of(
            run.rule, run.seed, under=[0, 1, 1, 2], fault=run.fault, rate=run.rate, run=run
        )

    monkeypatch.setattr(rule_runs, "train_one", one)
    monkeypatch.setattr("memcalib.products.reproduction.engine.run_jobs", run_jobs_here)
    return runs_made


def row_of(rule, seed, *, under, fault="none", rate=0.0, seconds=10.0, run=None, derailed=()):
    run = run or GridRun(rule=rule, lr=1e-3, seed=seed, steps=10, tests=4, fault=fault, rate=rate)
    scores = {"SCS": 50.0, "processor_seconds": seconds, "wall_seconds": seconds}
    return GridRow(run=run, scores=scores, over=[0] * len(under), under=under, derailed=[*derailed])


def test_gains_are_paired_by_seed_and_question_under_one_judge():
    rows = [
        row_of("gdpo", 1, under=[0, 1, 1, 2]),
        row_of("gdpo", 2, under=[1, 1, 1, 1]),
        row_of("evidence", 1, under=[0, 0, 1, 2]),
        row_of("evidence", 2, under=[1, 1, 1, 1], derailed=["answers shrank"]),
        row_of("evidence", 3, under=[0, 0, 0, 0]),  # GDPO has no such seed
        row_of("evidence", 1, under=[0, 0, 0, 0], fault="levels", rate=0.2),  # nor such a judge
    ]
    [line] = resampled_differences(rows).to_dict("records")
    # one of eight answers is at 100 in the place of 50
    assert line["difference"] == pytest.approx(50 / 8)
    assert line["low"] <= line["difference"] <= line["high"]
    assert (line["domain"], line["seeds"], line["questions"]) == ("exact judge", 2, 4)
    assert line["derailed"] == 1
    assert resampled_differences(rows[2:]).empty
    validation = rows[0].run.model_copy(update={"split": "validation"})
    rows[0] = rows[0].model_copy(update={"run": validation})
    assert resampled_differences(rows).iloc[0]["seeds"] == 1


def test_costs_are_ratios_of_one_seed_and_judge():
    rows = [
        row_of("gdpo", 1, under=[0], seconds=10),
        row_of("gdpo", 2, under=[0], seconds=20),
        row_of("evidence", 1, under=[0], seconds=15),
        row_of("evidence", 2, under=[0], seconds=20),
        row_of("evidence", 3, under=[0], seconds=90),
    ]
    costs = step_costs(rows).set_index("rule")
    assert costs.loc["GDPO", ["seconds", "ratio", "low", "high"]].tolist() == [1.5, 1, 1, 1]
    [evidence] = [label for label in costs.index if label != "GDPO"]
    assert costs.loc[evidence, ["ratio", "low", "high"]].tolist() == [1.25, 1.0, 1.5]
    assert costs.loc[evidence, "trainings"] == 3
    alone = step_costs(rows[2:]).iloc[0]
    assert math.isnan(alone["ratio"]) and alone["seconds"] > 0


def credit(*rows):
    return SimpleNamespace(advantages=torch.tensor(rows))


def test_places_are_compared_within_each_answer():
    batch = RuleCredit(
        kinds=[[RIGHT, OTHER], [OTHER, OTHER, RIGHT]],
        answers=[[5, 6], [7, 8, 9]],
        credit={
            "gdpo": credit([1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]),
            "evidence": credit([2.0, 0.0, 0.0], [-1.0, -2.0, 0.0]),
            "exact": credit([3.0, 1.0, 0.0], [-1.0, 0.0, -2.0]),
        },
    )
    table = placement_table(batch)
    uniform, evidence, exact = table.to_dict("records")
    assert math.isnan(uniform["agreement"]) and uniform["answers"] == 0
    assert (
        evidence["agreement"] == pytest.approx((1 - 1) / 2, abs=1e-9) and evidence["answers"] == 2
    )
    assert exact["agreement"] == pytest.approx(1)
    assert evidence[RIGHT] == pytest.approx(1.0) and evidence[OTHER] == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="'exact' is not among the rules; found 'gdpo'"):
        placement_table(RuleCredit([], [], {"gdpo": credit([0.0])}))


def test_a_sentence_says_what_is_shown_and_what_is_not():
    rows = [row_of("gdpo", seed, under=[3] * 4) for seed in (1, 2)]
    rows += [row_of("evidence", seed, under=[0] * 4) for seed in (1, 2)]
    rows += [row_of("ordered", seed, under=[3] * 4, derailed=["x"]) for seed in (1, 2)]
    nothing = placement_table(RuleCredit([[OTHER]], [[1]], {"exact": credit([0.0])}))
    sentences = [
        rule_sentence(rule, resampled_differences(rows), step_costs(rows), nothing)
        for rule in ("evidence", "ordered")
    ]
    assert "SCS +87.5 [+87.5, +87.5] against GDPO (exact judge): a gain is shown" in sentences[0]
    assert "2 of its training runs diverged; SCS +0.0" in sentences[1]
    assert (
        "the difference is not statistically significant" in sentences[1]
        and "agree" not in sentences[1]
    )


def test_a_rule_joins_every_stage_that_compares(rule_file):
    plan = load_plan("testbed", rules=[MINE, "gdpo"])
    assert [stage.rules for stage in plan.stages.values()] == [("gdpo", "evidence-kl", MINE)] * 2
    assert grid_counts(plan) == {"exact judge": (12, 0), "noisy judge": (12, 0)}
    tuned = load_plan("two-sided", rules=[MINE])
    assert MINE in tuned.stages["rates"].rules and MINE not in tuned.stages["equal time"].rules
    alone = GridPlan(stages={"one": {"rules": ["gdpo"], "lr": [1e-3], "seeds": [1]}})
    with pytest.raises(ValueError, match="found no stage that compares rules"):
        alone.with_rules([MINE])
    assert alone.with_rules([]) is alone
    with pytest.raises(ValueError, match="no_such_rule"):
        load_plan("testbed", rules=["no_such_rule"])


def test_after_an_edit_of_the_rule_only_its_own_rows_are_made_again(rule_file, trained, tmp_path):
    plan = load_plan("testbed", ["stages.exact judge.seeds=[1,2]"], [MINE])
    out = tmp_path / "rows"

    def jobs():
        return Jobs(out, grid_jobs(out, "", plan, ["exact judge"]))

    run_jobs_here(jobs())
    assert len(trained) == 6
    run_jobs_here(jobs())
    assert len(trained) == 6
    rule_file.write_text(SOURCE + "\n# another thought\n")
    run_jobs_here(jobs())
    assert [run.rule for run in trained[6:]] == [MINE] * 2
    found = rows_by_stage(plan, stored_rows(out))
    assert len(found["exact judge"]) == 6 and found["noisy judge"] == []
    codes = {row.run.rule: row.code for row in found["exact judge"]}
    assert codes["gdpo"] == codes["evidence-kl"] == grid_code()
    assert codes[MINE].startswith(grid_code() + "+")
    assert row_code(GridRun(rule="ordered-two-sided", lr=1, seed=1), "x") == "x"


def run_verb(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    return end.value.code


def test_the_verb_compares_a_rule_and_writes_the_page(
    rule_file, trained, tmp_path, monkeypatch, capsys
):
    exact = {name: credit([1.0, 0.0]) for name in ("gdpo", "evidence-kl", MINE, "exact")}
    batch = RuleCredit([[RIGHT, OTHER]], [[1, 2]], exact)
    monkeypatch.setattr(rule_report, "credit_by_rule", lambda rules, world, prompts: batch)
    out = tmp_path / "out"
    arguments = [
        "grid",
        "--rule",
        MINE,
        "--noise",
        0.1,
        "--noise",
        0.4,
        "--processes",
        1,
        "--out",
        out,
    ]
    assert run_verb(*arguments) == 0
    printed = capsys.readouterr().out
    assert "exact judge: 12 of 12 runs" in printed and "noisy judge: 24 of 24 runs" in printed
    assert f"report: {out / 'report.html'}" in printed
    page = (out / "report.html").read_text()
    for phrase in ("my rule: SCS", "levels 10% wrong", "levels 40% wrong", "<svg"):
        assert phrase in page
    names = {path.name for path in (out / "tables").glob("*.csv")}
    assert {"gains.csv", "costs.csv", "placement.csv", "scores.csv"} <= names


def test_nothing_is_run_for_a_mistake(trained, tmp_path, capsys):
    for arguments, message in (
        (("micro", "--noise", 0.1), "--noise: found with the plan 'micro'"),
        (("--rule", "no_such_module:Rule"), "no_such_module"),
        (("--rule", "json:dumps"), "CreditRule"),
    ):
        assert run_verb("grid", *arguments, "--out", tmp_path) != 0
        assert message in capsys.readouterr().err
    assert not trained and not (tmp_path / "runs.jsonl").exists()


def test_without_a_comparison_there_is_no_page(trained, tmp_path, capsys):
    settings = ["--set", "stages.exact judge.rules=[gdpo]", "--stage", "exact judge"]
    assert run_verb("grid", "testbed", *settings, "--processes", 1, "--out", tmp_path) == 0
    assert "no report yet" in capsys.readouterr().out
    with pytest.raises(ValueError, match="runs of GDPO and of at least one other rule are needed"):
        write_rule_report(tmp_path, load_plan("testbed"), stored_rows(tmp_path))
