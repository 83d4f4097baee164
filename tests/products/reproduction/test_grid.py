"""Judges with faults, plans, and the jobs of a grid."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_runs import run_jobs_here

from memcalib.products.reproduction.jobs import Jobs
from memcalib.products.reproduction.rule_grid import grid_jobs, plan_rows
from memcalib.scoring.quotes import evidence_spans
from memcalib.products.reproduction import rule_runs as grid
from memcalib.products.reproduction.rule_runs import (
    FaultyJudge,
    GridPlan,
    GridRow,
    GridRun,
    GridStage,
    derailments,
    said_once,
    stored_rows,
    train_one,
)
from memcalib.products.micro.world import (
    answer,
    exact_judge,
    make_examples,
    noisy_levels,
    read_answer,
)
from memcalib.problem import Level

EXAMPLES = make_examples("long", 6, 5)
QUOTES = ("elsewhere", "missing", "neighbour", "overlong")


def noisy_answer(number: int) -> str:
    example = EXAMPLES[number]
    return answer(example, random.Random(number), noisy_levels(example, random.Random(number), 0.3))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 5), st.sampled_from(QUOTES), st.floats(0, 1))
def test_a_fault_of_quotes_changes_quotes_alone_and_leaves_them_in_the_answer(number, fault, rate):
    example = EXAMPLES[number]
    response = noisy_answer(number)
    right = exact_judge(example, response)
    faulty = FaultyJudge(fault, rate)(example, response)
    sentence_ends = [s.end for s in read_answer(response)]
    for a, b in zip(right.atoms, faulty.atoms, strict=True):
        assert (a.actual, a.atom_id) == (b.actual, b.atom_id)
        assert all(
            0 <= start < end <= len(response) and end in sentence_ends for start, end in b.spans
        )
        assert b.quote == (response[slice(*b.spans[0])] if b.spans else "")
    assert evidence_spans(faulty, response).keys() == {atom.atom_id for atom in example.atoms}


@pytest.mark.parametrize("fault", QUOTES)
@pytest.mark.parametrize("form", ["no full stop in 400 characters", "a noun within a word"])
def test_a_quote_of_the_whole_answer_counts_as_the_sentences_it_touches(fault, form):
    example = EXAMPLES[0]
    noun = example.atoms[0].usage_rubric["marker"]["noun"]
    stretch = (
        "so " * 150 + f"{noun} and so on"
        if form.startswith("no")
        else f"Build the plan on my_{noun}_x. And on."
    )
    response = f"Take it step by step. {stretch}"
    whole = exact_judge(example, response).atoms[0].spans
    assert (0, len(response)) in {tuple(span) for span in whole}
    faulty_atom = FaultyJudge(fault, 1.0)(example, response).atoms[0]
    ends = [s.end for s in read_answer(response)]
    assert (
        faulty_atom.spans == []
        if fault == "missing"
        else {end for _, end in faulty_atom.spans} <= {*ends} and faulty_atom.spans
    )


def test_rate_is_the_share_of_atoms_that_are_hit():
    judged = [
        (
            exact_judge(EXAMPLES[n], noisy_answer(n)),
            FaultyJudge("levels", 0.5)(EXAMPLES[n], noisy_answer(n)),
        )
        for n in range(6)
    ]
    hit = [
        a.actual != b.actual
        for right, faulty in judged
        for a, b in zip(right.atoms, faulty.atoms, strict=True)
    ]
    assert 0.3 < sum(hit) / len(hit) < 0.7
    assert (
        FaultyJudge("levels", 0.0)(EXAMPLES[0], noisy_answer(0)).atoms
        == exact_judge(EXAMPLES[0], noisy_answer(0)).atoms
    )


def test_neighbour_is_the_sentence_after():
    response = noisy_answer(0)
    right = exact_judge(EXAMPLES[0], response)
    faulty = FaultyJudge("neighbour", 1.0)(EXAMPLES[0], response)
    for a, b in zip(right.atoms, faulty.atoms, strict=True):
        assert all(
            second[0] == first[1] + 1 for first, second in zip(a.spans, b.spans, strict=True)
        )


def test_lenient_judge_forgives_a_control_atom_that_is_repeated_and_no_bound_one():
    example = EXAMPLES[0]
    honest = answer(example, random.Random(0))

    def twice(level):
        atom = next(
            a
            for a in example.atoms
            if a.ideal == level and not a.usage_rubric["marker"]["prohibits"]
        )
        sentence = next(
            s.text for s in read_answer(honest) if atom.usage_rubric["marker"]["noun"] in s.nouns
        )

        def read(judge):
            return next(
                a.actual
                for a in judge(example, f"{sentence} {honest}").atoms
                if a.atom_id == atom.atom_id
            )

        return read(exact_judge), read(FaultyJudge("lenient"))

    assert twice(Level.CONTROL) == (Level.IGNORE, Level.CONTROL)
    strict, lenient = twice(Level.BOUND)
    assert strict == lenient == Level.CONTROL
    assert said_once(example, honest) == honest


def invented(run, policies=""):
    return GridRow(
        run=run,
        scores={
            "SCS": 10 + 1e3 * run.lr * (run.rule == "exact") - 1e3 * run.lr * (run.rule == "gdpo")
        },
    )


PLAN = GridPlan(
    cells={"few": {"atoms": (3, 4)}, "slow": {"prompts": 4, "lr": 1e-5}},
    stages={
        "rates": GridStage(
            rules=("gdpo", "exact"), lr=(1e-3, 2e-3), seeds=(1, 2), split="validation"
        ),
        "rules": GridStage(
            rules=("gdpo", "exact"),
            seeds=(11,),
            more_seeds={"gdpo": (12,)},
            cells=("plain", "few", "slow"),
        ),
        "judges": GridStage(
            rules=("exact",), seeds=(11,), faults=(("missing", 0.5), ("levels", 0.1))
        ),
    },
)


def test_rates_are_chosen_on_validation_and_a_cell_may_fix_its_own():
    rows = [invented(run) for run in PLAN.runs("rates")]
    assert len(rows) == 8
    tested = [run for stage in ("rules", "judges") for run in PLAN.runs(stage, rows)]
    assert len(tested) == 9 + 2
    rates = {(run.rule, PLAN.cell_of(run)): run.lr for run in tested}
    assert rates[("gdpo", "plain")] == 1e-3 and rates[("exact", "few")] == 2e-3
    assert rates[("gdpo", "slow")] == 1e-5
    assert {(run.fault, run.rate) for run in tested} == {
        ("none", 0.0),
        ("missing", 0.5),
        ("levels", 0.1),
    }


def test_each_run_is_a_job_and_a_tuned_one_waits_for_its_tries(tmp_path):
    jobs = Jobs(tmp_path, grid_jobs(tmp_path, "grid", PLAN))
    runs = [job for job in jobs if job.kind == "run"]
    assert len(runs) == 8 + 9 + 2 and len({job.name for job in runs}) == 19
    tries = [job for job in runs if job.settings.get("split") == "validation"]
    fixed = [job for job in runs if job.settings["lr"] == 1e-5]
    tuned = [job for job in runs if isinstance(job.settings["lr"], list)]
    assert (len(tries), len(fixed), len(tuned)) == (8, 3, 8)
    assert all(not job.reads for job in (*tries, *fixed))
    assert all(len(job.reads) == 4 for job in tuned), "two rates, two seeds"
    assert set(jobs["grid/gathered"].reads) == {job.name for job in runs}
    some = Jobs(tmp_path, grid_jobs(tmp_path, "grid", PLAN, ["rates"]))
    assert {job.name for job in tries} == {job.name for job in some if job.kind == "run"}
    with pytest.raises(ValueError, match="stage 'rule'; allowed: rates, rules, judges"):
        grid_jobs(tmp_path, "grid", PLAN, ["rule"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rules": ("gdop",)}, "rule: found 'gdop'; allowed:"),
        ({"cells": ("many",)}, "stage rules: found the cell 'many'; allowed: few, plain, slow"),
        ({"seeds": (1,)}, "seed 1 is used for both validation and test"),
        ({"faults": (("wrong", 0.1),)}, "elsewhere"),
        (
            {"more_seeds": {"gpdo": (12,)}},
            "more_seeds: found 'gpdo'; allowed: the stage's rules, gdpo, exact",
        ),
    ],
)
def test_a_plan_with_a_mistake_is_refused_before_anything_runs(changes, message):
    content = PLAN.model_dump()
    content["stages"]["rules"] |= changes
    with pytest.raises(ValueError, match=message):
        GridPlan.model_validate(content)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"promts": 4}, "cell few: promts: found 4; Extra inputs are not permitted"),
        ({"world": "lnog"}, "cell few: world: found 'lnog'"),
        ({"minibatches": 5}, "cell few: 16 answers per step cannot be divided into 5 mini-batches"),
        ({"options": {"lora_rank": 8}}, "cell few: found lora_rank 8, .*; allowed: lora_rank 0"),
    ],
)
def test_a_cell_with_a_mistake_is_refused_before_anything_runs(settings, message):
    content = PLAN.model_dump()
    content["cells"]["few"] = settings
    with pytest.raises(ValueError, match=message):
        GridPlan.model_validate(content)


def test_a_rate_is_tuned_by_all_of_its_runs_or_not_at_all():
    plan = GridPlan.model_validate(
        PLAN.model_dump()
        | {
            "stages": {
                **PLAN.model_dump()["stages"],
                "few rates": GridStage(
                    rules=("exact",), lr=(1e-3,), seeds=(1,), cells=("few",), split="validation"
                ),
            }
        }
    )
    rows = [invented(run) for run in plan.runs("rates")]
    with pytest.raises(
        ValueError,
        match="rule 'gdpo' in cell 'plain': 1 of 4 runs .* missing; run stage 'rates' first",
    ):
        plan.tuned("gdpo", "plain", rows[1:])
    with pytest.raises(
        ValueError, match="rule 'exact' in cell 'few': 1 of 1 runs .* run stage 'few rates' first"
    ):
        plan.tuned("exact", "few", rows)
    strange = [
        row.model_copy(update={"run": row.run.model_copy(update={"lr": 9e-3})}) for row in rows
    ]
    assert (
        plan.tuned("gdpo", "few", rows) == 1e-3
        and plan.tuned("exact", "plain", rows + strange) == 2e-3
    )
    few = [invented(run) for run in plan.runs("few rates")]
    assert plan.tuned("exact", "few", rows + few) == 1e-3


def test_a_rate_that_was_never_tuned_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="4 of 4 runs that tune its learning rate are missing; run stage 'rates' first",
    ):
        PLAN.runs("rules")
    with pytest.raises(ValueError, match="no learning rate was tuned"):
        PLAN.tuned("grpo", "plain", [])
    untuned = GridPlan(stages={"rules": GridStage(rules=("gdpo",), seeds=(1,))})
    with pytest.raises(ValueError, match="no learning rate was tuned"):
        grid_jobs(tmp_path, "", untuned)


def test_key_of_a_run_does_not_depend_on_how_defaults_were_written():
    assert (
        GridRun(rule="gdpo", lr=1e-3, seed=1).name
        == GridRun(rule="gdpo", lr=0.001, seed=1, world="long", rate=0.0).name
    )
    assert (
        GridRun(rule="gdpo", lr=1e-3, seed=1).name
        != GridRun(rule="gdpo", lr=1e-3, seed=1, fault="lenient").name
    )


def test_derailed_by_each_of_its_signs():
    start = dict(end_rate=100.0, length=70.0, repeated=3.0, accuracy=67.0)
    signs = {"end_rate": 89.0, "length": 34.0, "repeated": 14.0, "accuracy": 66.0}
    for name, value in signs.items():
        assert len(derailments(start | {name: value}, start)) == 1
    assert derailments(start | {"length": 106.0}, start) == ["answers grew"] and derailments(
        start | {"end_rate": None}, start
    )


@pytest.mark.slow
def test_a_grid_runs_job_by_job_and_keeps_rows_of_other_plans(tmp_path):
    plan = GridPlan(
        plain=dict(generations=4, steps=2, tests=8),
        stages={
            "rates": GridStage(rules=("gdpo",), lr=(1e-3,), seeds=(900,), split="validation"),
            "rules": GridStage(rules=("gdpo",), seeds=(901,)),
        },
    )
    other = invented(GridRun(rule="exact", lr=1e-3, seed=5))
    (tmp_path / "runs.jsonl").write_text(other.to_json() + "\n")
    jobs = Jobs(tmp_path, grid_jobs(tmp_path, "", plan))
    run_jobs_here(jobs)
    rows = stored_rows(tmp_path)
    assert [row.run.rule for row in rows] == ["exact", "gdpo", "gdpo"]
    assert len(plan_rows(plan, rows)) == 2 and jobs.to_do() == []
    alone = train_one(rows[1].run)

    def timeless(row):
        return {name: value for name, value in row.scores.items() if not name.endswith("seconds")}

    assert timeless(rows[1]) == pytest.approx(timeless(alone), abs=1e-3)


def test_numbers_that_are_not_finite_end_a_run_and_not_the_grid(monkeypatch):
    monkeypatch.setattr(grid, "_at_start", lambda *_: ([], {}))

    def broken(self):
        raise FloatingPointError("nan")

    monkeypatch.setattr(grid.CreditLoop, "step", broken)
    row = train_one(GridRun(rule="gdpo", lr=1e-3, seed=900, steps=1))
    assert (
        row.derailed == ["a number is not finite"]
        and row.scores["SCS"] == 0
        and torch.get_num_threads() >= 1
    )


@pytest.mark.parametrize("failing", ["measuring", "divergence"])
def test_numbers_that_stop_being_finite_in_the_last_update_end_a_run_too(failing, monkeypatch):
    monkeypatch.setattr(grid, "_at_start", lambda *_: ([], {}))
    monkeypatch.setattr(grid.CreditLoop, "step", lambda self: {"closing_advantage": 0.0})

    def scores(*_):
        if failing == "measuring":
            raise FloatingPointError("nan")
        unfinished = {"SCS": 10.0, "accuracy": 50.0, "divergence": float("nan")}
        return grid.MeasuredPolicy(unfinished, [], [])

    monkeypatch.setattr(grid, "policy_scores", scores)
    row = train_one(GridRun(rule="gdpo", lr=1e-3, seed=900, steps=1))
    assert row.derailed == ["a number is not finite"] and {*row.scores} == {
        "SCS",
        "wall_seconds",
        "processor_seconds",
    }
    assert row.scores["SCS"] == 0
