"""Updates that have no token to learn from: nothing is computed, nothing moves,
and the row and the log say why.
"""

import math

import pytest
import torch
from accelerate import Accelerator
from run_files import rows, weights

from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.credit.prefix_groups import sharing_faults
from memcalib.problem import judgment_for
from memcalib.trainer.train_config import world_config
from memcalib.trainer.callbacks import StepRows
from memcalib.training import train

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, seed=5)
ADAMW = {"weight_decay": 0.5, "lr_scheduler_type": "linear"}


class Fading:
    """The exact judge for a number of batches, then one that finds no level."""

    def __init__(self, good: int):
        self.batches_left = good

    def batch(self, examples, responses):
        self.batches_left -= 1
        if self.batches_left < 0:
            return [judgment_for(example, {}, error="no level") for example in examples]
        return [
            exact_judge(example, response)
            for example, response in zip(examples, responses, strict=True)
        ]


def run(out, judge=exact_judge, **changes):
    sizes = dict(
        prompts=4,
        generations=4,
        steps=2,
        minibatches=1,
        max_tokens=12,
        lr=1e-2,
        beta=0.0,
        method="gdpo",
    )
    config = world_config(WORLDS["short"], **(sizes | dict(max_failed=1, trl=ADAMW) | changes))
    return train(build_policy(0), config, EXAMPLES, judge, tokenizer=TOKENIZER, out=out)


@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "memcalib-rl", "beta": 0.1, "prompts": 8, "minibatches": 2, "accumulate": 2}],
)
def test_a_skipped_update_computes_nothing_and_moves_nothing(
    tmp_path, monkeypatch, changes, caplog
):
    """Engines step within `Accelerator.backward` or after it:
    without a backward pass none of them has gradients.
    """
    passes = []
    after = []
    backward = Accelerator.backward
    ended = StepRows.on_step_end
    monkeypatch.setattr(
        Accelerator,
        "backward",
        lambda self, loss, **options: passes.append(1) or backward(self, loss, **options),
    )

    def watch(self, args, state, control, model=None, **arguments):
        after.append(
            (len(passes), weights(model), args.learning_rate, self.trainer._get_learning_rate())
        )
        return ended(self, args, state, control, model=model, **arguments)

    monkeypatch.setattr(StepRows, "on_step_end", watch)
    trainer = run(tmp_path, Fading(1), **changes)
    updates = changes.get("minibatches", 1)
    parts = updates * changes.get("accumulate", 1)
    counts, moved, peak, rates = zip(*after, strict=True)
    assert counts[updates - 1 :] == (parts,) * (updates + 1), "no backward pass in the second step"
    assert all(torch.equal(later, moved[updates - 1]) for later in moved[updates:])
    assert not torch.equal(moved[0], weights(build_policy(0)))
    assert rates == pytest.approx(
        [peak[0] * (1 - (k + 1) / (2 * updates)) for k in range(2 * updates)]
    ), "on schedule"
    first, second = rows(tmp_path)
    assert [row["skipped"] for row in (first, second)] == [0, updates] and second[
        "unscored"
    ] == len(trainer.judged.ids)
    assert second["loss"] == 0 and second["grad_norm"] is second["entropy"] is None, (
        "what was not computed is missing"
    )
    assert first["grad_norm"] > 0 and first["entropy"] > 0 and second["seconds"] > 0
    reason = f"in this step, {len(trainer.judged.ids)} answers have no score, and 0 were cut off"
    assert (
        caplog.text.count("was skipped because its mini-batch contains no token to learn from")
        == updates
        == caplog.text.count(reason)
    )


def test_the_first_update_may_be_skipped_and_the_next_one_is_a_first_one(tmp_path):
    """Momentum, bias correction and weight decay begin with the first update that is made."""

    class Late(Fading):
        def batch(self, examples, responses):
            self.batches_left -= 1
            judge = Fading(0) if self.batches_left >= 0 else Fading(1)
            return judge.batch(examples, responses)

    constant = dict(trl={"weight_decay": 0.5}, lr=1e-3)
    trainer = run(tmp_path / "late", Late(1), **constant)
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {1} and [row["skipped"] for row in rows(tmp_path / "late")] == [1, 1]
    assert trainer.state.global_step == 2 and math.isfinite(rows(tmp_path / "late")[1]["grad_norm"])


def test_answers_that_were_cut_off_are_not_called_unscored(tmp_path, caplog):
    trainer = run(tmp_path, mask_truncated=True, max_tokens=4, steps=1)
    (row,) = rows(tmp_path)
    assert row["skipped"] == 1 and row["unscored"] == 0 and row["end_rate"] == 0
    assert "0 answers have no score, and 16 were cut off and are masked" in caplog.text
    assert "tree" not in sharing_faults(trainer.model), (
        "an empty mini-batch says nothing about the model"
    )
