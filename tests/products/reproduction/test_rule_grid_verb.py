"""Plans that ship with the package, and the verb that runs one."""

import json

import pytest
from plan_runs import run_jobs_here

from memcalib.commands.cli import main
from memcalib.products.reproduction import rule_runs as grid
from memcalib.products.reproduction.jobs import Jobs
from memcalib.products.reproduction.rule_grid import (
    grid_code,
    grid_counts,
    grid_jobs,
    load_plan,
    plan_names,
)
from memcalib.products.reproduction.rule_runs import GridRow, stored_rows


@pytest.fixture
def fast(monkeypatch):
    """No training: rows with invented scores, made in this process."""
    runs_made = []

    def one(run, policies=""):
        runs_made.append(run)
        return GridRow(run=run, scores={"SCS": 10.0, "wall_seconds": 1.0})

    monkeypatch.setattr(grid, "train_one", one)
    monkeypatch.setattr("memcalib.products.reproduction.engine.run_jobs", run_jobs_here)
    return runs_made


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    return end.value.code


def test_shipped_plans_are_sound_and_share_the_runs_that_decide():
    plans = {name: load_plan(name) for name in plan_names()}
    assert {"smoke", "micro", "full"} <= plans.keys()
    stages = [
        plans[name].stages[stage] for name in ("micro", "full") for stage in ("rates", "rules")
    ]
    assert (
        stages[0] == stages[2]
        and stages[1].seeds == stages[3].seeds
        and plans["micro"].plain == plans["full"].plain
    )
    for rule in ("gdpo", "evidence-kl"):
        assert len(stages[1].seeds) + len(stages[1].more_seeds[rule]) == 10
    smoke = {seed for stage in plans["smoke"].stages.values() for seed in stage.seeds}
    assert not smoke & {
        seed for stage in stages for seed in (*stage.seeds, *stage.more_seeds.get("gdpo", ()))
    }


def test_micro_first_and_full_later_pays_for_the_rest_only(tmp_path):
    both = ["rates", "rules"]
    first, second = (
        {job.name for job in grid_jobs(tmp_path, "", load_plan(name), both) if job.kind == "run"}
        for name in ("micro", "full")
    )
    assert len(first) == 80 + 60 and len(second - first) == 5  # five more seeds of exact credit


def test_a_run_of_other_code_is_made_again(fast, tmp_path, monkeypatch):
    plan = load_plan("smoke")
    run_jobs_here(Jobs(tmp_path, grid_jobs(tmp_path, "", plan, ["rates"])))
    assert len(fast) == 8
    later = "memcalib.products.reproduction.rule_grid.grid_code"
    monkeypatch.setattr(later, lambda: "other code")
    jobs = Jobs(tmp_path, grid_jobs(tmp_path, "", plan, ["rates"]))
    assert {jobs.state(job.name) for job in jobs if job.kind == "run"} == {
        ("stale", "code changed")
    }
    run_jobs_here(jobs)
    assert len(fast) == 16 and {row.code for row in stored_rows(tmp_path)} == {"other code"}


def test_verb_runs_a_stage_and_says_how_much_is_done(fast, tmp_path, capsys):
    assert run("grid", "smoke", "--out", tmp_path, "--processes", 1, "--stage", "rates") == 0
    out = capsys.readouterr().out
    assert "rates: 8 of 8 runs\nrules: 0 of 8 runs" in out and len(stored_rows(tmp_path)) == 8
    assert grid_counts(load_plan("smoke"), stored_rows(tmp_path))["rates"] == (8, 8)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["config"]["code"] == grid_code() and manifest["seeds"]["rates"] == [900]
    assert run("grid", "smoke", "--out", tmp_path, "--stage", "rates") == 0
    assert len(fast) == 8, "nothing is made twice"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("no_such_plan",), "no_such_plan"),
        (("smoke", "--stage", "rate"), "stage 'rate'; allowed: rates, rules"),
        (
            ("smoke", "--set", "stages.rules.seeds=[900]"),
            "seed 900 is used for both validation and test",
        ),
        (
            ("smoke", "--dry-run", "--set", "cells.4 prompts.promts=4"),
            "cell 4 prompts: promts: found 4",
        ),
        (("smoke", "--dry-run", "--set", "plain.stepz=4"), "stepz: found 4"),
        (("smoke", "--dry-run", "--set", "stages.rules.lr=[2]"), "less than or equal to 1"),
    ],
)
def test_mistakes_are_said_in_one_line_before_anything_runs(
    arguments, message, fast, tmp_path, capsys
):
    assert run("grid", *arguments, "--out", tmp_path / "grid") == 1
    err = capsys.readouterr().err
    assert (
        message in err and "Traceback" not in err and not fast and not (tmp_path / "grid").exists()
    )
