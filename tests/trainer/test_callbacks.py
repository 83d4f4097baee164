"""Numbers about a run: joined over processes, and missing where there is nothing to tell."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_tokenizer, load_policy
from memcalib.trainer.callbacks import DriftLimit, DriftMonitor, answer_stats, merge_stats
from memcalib.problem import judgment_for
from memcalib.rules.base import credit_rule
from memcalib.trainer.train_config import world_config
from memcalib.training import train

moved = st.fixed_dictionaries(
    {
        "localized": st.integers(1, 50),
        "cap_share": st.floats(0, 1),
        "multiplier_p50": st.floats(0, 4),
    }
)
still = st.just({"localized": 0, "cap_share": math.nan, "multiplier_p50": math.nan})


@given(st.lists(moved | still, min_size=1, max_size=5))
def test_shares_and_percentiles_are_means_over_localized_pairs(parts):
    """Slow reference: one entry a pair; processes that localized nothing have no entry."""
    parts = [
        {**process_stats, "multiplier_max": process_stats["multiplier_p50"]}
        for process_stats in parts
    ]
    merged = merge_stats(parts)
    for name in ("cap_share", "multiplier_p50"):
        values = []
        for process_stats in parts:
            values += [process_stats[name]] * process_stats["localized"]
        mean = sum(values) / len(values) if values else math.nan
        assert merged[name] == pytest.approx(mean, nan_ok=True)
    largest = [
        process_stats["multiplier_max"] for process_stats in parts if process_stats["localized"]
    ]
    assert merged["multiplier_max"] == pytest.approx(max(largest, default=math.nan), nan_ok=True)
    assert merged["localized"] == sum(process_stats["localized"] for process_stats in parts)


def test_the_closing_advantage_is_of_scored_answers_that_ended():
    ids = [[5, 6, 2], [7, 2], [8, 2], [9, 9]]
    advantages = torch.zeros(4, 3)
    advantages[0, 2] = -0.8
    advantages[1, 1] = -0.4
    stats = answer_stats(ids, [2], advantages, torch.tensor([True, True, False, True]))
    assert stats[:, 3].nanmean().item() == pytest.approx(-0.6)
    assert stats[:, 1].tolist() == [1, 1, 1, 0]


def test_answers_without_a_score_do_not_dilute_the_closing_advantage(tmp_path):
    calls = itertools.count()
    rows = []

    def judge(example, response):
        if next(calls) % 2:
            return judgment_for(example, {}, error="no level")
        return exact_judge(example, response)

    tokenizer = build_tokenizer()
    examples = make_examples("short", 8, seed=5)
    sizes = dict(prompts=8, generations=4, steps=1, max_failed=0.9, max_tokens=18)
    config = world_config(WORLDS["short"], method="gdpo", **sizes)
    model = load_policy("cold-short")[0]
    trainer = train(
        model, config, examples, judge, tokenizer=tokenizer, out=tmp_path, on_step=rows.append
    )
    judged = trainer.judged
    closing = []
    for row, ids in enumerate(judged.ids):
        if ids[-1] in trainer.eos_token_ids and judged.valid[row]:
            closing.append(trainer.advantages[row, len(ids) - 1].item())
    assert rows[0]["unscored"] == 16
    assert 0 < len(closing) < 16
    assert abs(sum(closing)) > 0.1
    assert rows[0]["closing_advantage"] == pytest.approx(sum(closing) / len(closing), rel=1e-5)


@pytest.mark.parametrize(
    ("limit", "inside", "beyond"),
    [
        (DriftLimit(by=-0.25), (0.75, 1.0, 2.0), (0.5, -1.0)),  # from 1: a fall alone
        (DriftLimit(by=0.25), (1.25, 1.0, -1.0), (1.5, 2.0)),  # a rise alone
        (DriftLimit(times=1.5), (1.5, 0.5, 0.0), (1.75, 9.0)),
    ],
)
def test_a_limit_is_passed_in_its_direction_alone(limit, inside, beyond):
    assert not any(limit.passed(1.0, now) for now in inside)
    assert all(limit.passed(1.0, now) for now in beyond)


def test_the_first_steps_are_the_start_and_no_part_of_what_is_compared_with_it():
    monitor = DriftMonitor({"end_rate": DriftLimit(by=-0.25)}, 2)
    rates = (1.0, 0.5, 0.25, 0.0, 0.25, 1.0, 1.0, 0.0, 0.0)
    messages = [monitor.update({"step": step, "end_rate": rate}) for step, rate in enumerate(rates)]
    counts = [len(of_step) for of_step in messages]
    assert counts == [0, 0, 0, 1, 0, 0, 0, 0, 1], "when it is passed, and after going back"
    assert messages[3] == [
        (
            "step 3: end_rate moved from 0.75 in the first 2 steps to 0.125 in the last 2; "
            "the limit is a change of -0.25"
        )
    ]


def test_counts_of_evidence_are_added_up_over_processes():
    parts = [{"evidence_shown": 3, "evidence_omitted": 1, "evidence_everywhere": 0, "rms": 0.5}] * 2
    assert merge_stats(parts, credit_rule("evidence").counted) == {
        "evidence_shown": 6,
        "evidence_omitted": 2,
        "evidence_everywhere": 0,
        "rms": 0.5,
    }
