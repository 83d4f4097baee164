"""Judges with faults, plans, and a grid that is stopped and goes on."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.scoring.quotes import evidence_spans
from memcalib.products.reproduction import rule_runs as grid
from memcalib.products.reproduction.rule_runs import (
    FaultyJudge,
    GridPlan,
    GridRow,
    GridRun,
    GridStage,
    derailments,
    run_grid,
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


@pytest.fixture
def fast(monkeypatch):
    """No training: rows with invented scores; `made` lists the runs."""
    runs_made = []

    def one(run, policies=""):
        runs_made.append(run)
        return invented(run)

    monkeypatch.setattr(grid, "train_one", one)
    return runs_made


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


def test_rates_are_chosen_on_validation_and_a_cell_may_fix_its_own(fast, tmp_path):
    rows = run_grid(tmp_path, PLAN)
    assert len(rows) == len(fast) == 8 + 9 + 2
    tested = [row.run for row in rows if row.run.split == "test"]
    rates = {(run.rule, PLAN.cell_of(run)): run.lr for run in tested}
    assert (
        rates[("gdpo", "plain")] == 1e-3
        and rates[("exact", "few")] == 2e-3
        and rates[("gdpo", "slow")] == 1e-5
    )
    assert {(run.fault, run.rate) for run in tested} == {
        ("none", 0.0),
        ("missing", 0.5),
        ("levels", 0.1),
    }


def test_stopped_grid_goes_on_and_makes_nothing_twice(fast, tmp_path, monkeypatch):
    calls = []

    def third_fails(run, policies=""):
        calls.append(run)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return invented(run)

    monkeypatch.setattr(grid, "train_one", third_fails)
    with pytest.raises(KeyboardInterrupt):
        run_grid(tmp_path, PLAN)
    assert len(stored_rows(tmp_path)) == 2
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write('{"run": {"rule": "gd')  # a kill in the middle of a line
    monkeypatch.setattr(
        grid, "train_one", lambda run, policies="": fast.append(run) or invented(run)
    )
    rows = run_grid(tmp_path, PLAN)
    assert len(rows) == 19 and len(fast) == 17
    assert (
        len(
            {
                json.dumps(json.loads(line)["run"])
                for line in (tmp_path / "runs.jsonl").read_text().splitlines()
            }
        )
        == 19
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rules": ("gdop",)}, "rule 'gdop', allowed are"),
        ({"cells": ("many",)}, "stage rules: cell 'many', allowed are few, plain, slow"),
        ({"seeds": (1,)}, "seed 1 is used for validation and for test"),
        ({"faults": (("wrong", 0.1),)}, "elsewhere"),
        (
            {"more_seeds": {"gpdo": (12,)}},
            "more_seeds of 'gpdo': allowed are the stage's rules, gdpo, exact",
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
        ({"minibatches": 5}, "cell few: 16 answers a step do not split into 5 mini-batches"),
        ({"options": {"lora_rank": 8}}, "cell few: found lora_rank 8, .*; allowed: lora_rank 0"),
    ],
)
def test_a_cell_with_a_mistake_is_refused_before_anything_runs(settings, message):
    content = PLAN.model_dump()
    content["cells"]["few"] = settings
    with pytest.raises(ValueError, match=message):
        GridPlan.model_validate(content)


def test_rows_of_other_code_stay_in_the_file_and_are_not_used(fast, tmp_path):
    before = run_grid(tmp_path, PLAN, code="one")
    with open(tmp_path / "runs.jsonl", "a") as file:  # a row as it was before rows knew their code
        file.write(
            json.dumps({"run": {"rule": "gdpo", "lr": 1e-3, "seed": 1}, "scores": {"SCS": 99.0}})
            + "\n"
        )
    fast.clear()
    assert run_grid(tmp_path, PLAN, code="one") == before and not fast
    rows_made = run_grid(tmp_path, PLAN, code="two", stages=["rates"])
    assert len(fast) == 8 and {row.code for row in rows_made} == {"two"}
    with pytest.raises(ValueError, match="4 of 4 runs that tune its learning rate are missing"):
        run_grid(tmp_path, PLAN, code="three", stages=["rules"])
    assert [row.code for row in stored_rows(tmp_path)] == ["one"] * 19 + [""] + ["two"] * 8


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


def test_a_rate_that_was_never_tuned_is_refused(fast, tmp_path):
    with pytest.raises(
        ValueError,
        match="4 of 4 runs that tune its learning rate are missing; run stage 'rates' first",
    ):
        run_grid(tmp_path, PLAN, stages=["rules"])
    with pytest.raises(ValueError, match="no learning rate was tuned"):
        PLAN.tuned("grpo", "plain", [])
    with pytest.raises(ValueError, match="stage 'rule': allowed are rates, rules, judges"):
        run_grid(tmp_path, PLAN, stages=["rule"])
    assert not fast


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
def test_rows_do_not_depend_on_the_number_of_processes(tmp_path):
    plan = GridPlan(
        plain=dict(generations=4, steps=2, tests=8),
        stages={
            "rates": GridStage(
                rules=("gdpo", "evidence-kl"), lr=(1e-3,), seeds=(900,), split="validation"
            )
        },
    )
    apart = run_grid(tmp_path / "two", plan, processes=2)
    alone = run_grid(tmp_path / "one", plan)

    def timeless(row):
        return {name: value for name, value in row.scores.items() if not name.endswith("seconds")}

    assert [row.run for row in apart] == [row.run for row in alone]
    assert [timeless(row) for row in apart] == [
        pytest.approx(timeless(row), abs=1e-3) for row in alone
    ]


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
