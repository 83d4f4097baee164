"""Plans that ship with the package, and the verb that runs one."""

import json

import pytest

from memcalib.commands.cli import main
from memcalib.products.reproduction.rule_grid import (
    grid_code,
    grid_counts,
    load_plan,
    other_rows,
    plan_names,
    run_plan,
)
from memcalib.products.reproduction import rule_runs as grid
from memcalib.products.reproduction.rule_runs import GridRow, stored_rows


@pytest.fixture
def fast(monkeypatch):
    """No training: rows with invented scores."""
    runs_made = []

    def one(run, policies=""):
        runs_made.append(run)
        return GridRow(run=run, scores={"SCS": 10.0, "wall_seconds": 1.0})

    monkeypatch.setattr(grid, "train_one", one)
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


def test_micro_first_and_full_later_pays_for_the_rest_only(fast, tmp_path):
    run_plan(tmp_path, "micro", processes=1, stages=["rates", "rules"])
    before = len(fast)
    run_plan(tmp_path, "full", processes=1, stages=["rates", "rules"])
    assert before == 80 + 60 and len(fast) - before == 5  # five more seeds of exact credit
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["config"]["plan"] == "full" and manifest["config"]["code"] == grid_code()
    assert manifest["seeds"]["rules"] == [*range(101, 111)]


def test_rows_of_other_code_are_named_and_made_again(fast, tmp_path):
    run_plan(tmp_path, "smoke", processes=1, stages=["rates"])
    old = [
        row.model_copy(update={"code": code})
        for row, code in zip(stored_rows(tmp_path), ["", *["old"] * 7], strict=True)
    ]
    (tmp_path / "runs.jsonl").write_text(
        "".join(row.to_json() + "\n" for row in old).replace('"code":"",', "", 1)
    )
    assert other_rows(tmp_path) == 8 and grid_counts(load_plan("smoke"), stored_rows(tmp_path))[
        "rates"
    ] == (8, 0)
    messages = []
    run_plan(tmp_path, "smoke", processes=1, stages=["rates"], tell=messages.append)
    assert (
        "8 rows of other code are there; they are not used" in messages[0]
        and len(messages) == 9
        and len(fast) == 16
    )
    assert len(stored_rows(tmp_path)) == 16 and other_rows(tmp_path) == 8


def test_verb_runs_a_stage_and_says_how_much_is_done(fast, tmp_path, capsys):
    assert run("grid", "smoke", "--out", tmp_path, "--processes", 1, "--stage", "rates") == 0
    out = capsys.readouterr().out
    assert (
        "rates: 8 of 8 runs\nrules: 0 of 8 runs" in out
        and "rates, 8 of 8: SCS 10.0, 1 s, {" in out
        and len(stored_rows(tmp_path)) == 8
    )
    assert grid_counts(load_plan("smoke"), stored_rows(tmp_path))["rates"] == (8, 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("no_such_plan",), "no_such_plan"),
        (("smoke", "--stage", "rate"), "stage 'rate': allowed are rates, rules"),
        (
            ("smoke", "--set", "stages.rules.seeds=[900]"),
            "seed 900 is used for validation and for test",
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
