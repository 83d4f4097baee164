"""What a run keeps beside its weights, and the guard that asks the weights for a probability."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from micro_policy import EXAMPLES, TOKENIZER
from trl.trainer.utils import RepeatSampler

from memcalib.localization import Thresholds
from memcalib.rules.base import CreditConfig
from memcalib.products.micro.world import WORLDS, exact_judge
from memcalib.products.micro.policy import build_policy
from memcalib.trainer.callbacks import CreditCheckpoints, FiniteGuard, StepRows
from memcalib.trainer.checkpoints import random_state, set_random_state, start_pass
from memcalib.trainer.train_config import TrainConfig, world_config
from memcalib.trainer.callbacks import Diverged
from memcalib.training import train

torch.set_num_threads(1)


def begun():
    """As much of a trainer as a checkpoint keeps, at the beginning of a run."""
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=12),
        config=TrainConfig(minibatches=2, drift_steps=2),
        judge=None,
        judged=SimpleNamespace(judge=None),
        args=SimpleNamespace(output_dir="", save_total_limit=None),
        reference_weights=None,
        thresholds=Thresholds(CreditConfig(granularity="sentence")),
    )
    trainer.rows = StepRows(trainer)
    trainer.checkpoints = CreditCheckpoints(trainer)
    return trainer


def test_all_that_is_kept_comes_back_from_a_file():
    def saved(trainer):
        return json.loads(json.dumps(trainer.checkpoints.extra_state()))

    trainer = begun()
    trainer.rows.skipped = 3
    trainer.rows.worst_mean = 1e-7
    trainer.rows.best = {"step": 4, "SCS": 61.5}
    trainer.thresholds.value[1] = 0.5
    trainer.thresholds.sentence.value[2] = 0.25
    messages = []
    for step in range(1, 6):
        length = 10.0 if step < 3 else 40.0
        messages.append(trainer.rows.drift.update({"step": step, "response_length": length}))
    assert [len(of_step) for of_step in messages] == [0, 0, 0, 1, 0]
    state = saved(trainer)
    assert state["step"] == 6
    resumed = begun()
    assert saved(resumed) != state
    resumed.checkpoints.restore_extra(state)
    assert saved(resumed) == state
    again = resumed.rows.drift.update({"step": 6, "response_length": 40.0})
    assert again == [], "it was reported before"


def test_weights_that_give_no_probability_are_found_after_the_update(tmp_path, monkeypatch):
    """Each of them may be a number, and the sums not."""
    steps_asked = []
    plain = FiniteGuard.end_logp

    def ask(self):
        steps_asked.append(self.trainer.state.global_step)
        return math.nan if self.trainer.state.global_step == 4 else plain(self)

    monkeypatch.setattr(FiniteGuard, "end_logp", ask)
    config = world_config(
        WORLDS["short"],
        prompts=4,
        generations=2,
        steps=2,
        max_tokens=6,
        save_every=1,
        method="gdpo",
    )
    with pytest.raises(
        Diverged, match=r"step 2: after the update, log-probability nan of a token.*checkpoint-2"
    ):
        train(build_policy(0), config, EXAMPLES, exact_judge, tokenizer=TOKENIZER, out=tmp_path)
    assert steps_asked == [2, 4], "once after each step"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_random_numbers_go_on_where_they_were():
    import random

    import numpy as np

    def draw():
        return (random.random(), np.random.rand(), torch.rand(()).item())

    before = random_state()
    first = draw()
    second = draw()
    assert len({*first, *second}) == 6
    set_random_state(before)
    assert (draw(), draw()) == (first, second)


def test_each_pass_over_the_data_has_its_order_and_any_can_be_made_again():
    options = dict(mini_repeat_count=2, batch_size=2, repeat_count=1, shuffle=True, seed=3)
    base = RepeatSampler(list(range(8)), **options)
    straight = [list(base) for _ in range(4)]
    assert len({tuple(order) for order in straight}) == 4
    again = RepeatSampler(list(range(8)), **options)
    for epoch in (2, 0, 3, 1):
        start_pass(again, epoch)
        assert list(again) == straight[epoch]


def test_an_order_that_is_not_shuffled_needs_no_generator():
    sampler = RepeatSampler(list(range(4)), mini_repeat_count=1, batch_size=2, shuffle=False)
    start_pass(sampler, 3)
    assert list(sampler) == [0, 1, 2, 3]
