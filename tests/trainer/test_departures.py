"""What `CreditTrainer` takes from its caller, and what it refuses;
on what it relies is in tests/test_trl_surface.py.
"""

import pytest
import torch
from transformers import TrainerCallback

from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.trainer.train_config import CreditGRPOConfig, world_config
from memcalib.products.micro.world import WORLDS
from memcalib.training import CreditTrainer


def a_trainer(out, **changes):
    sizes = dict(
        max_steps=2,
        per_device_train_batch_size=8,
        steps_per_generation=2,
        num_generations=4,
        max_completion_length=8,
    )
    where = dict(
        prompt_template="micro", report_to="none", bf16=False, use_cpu=True, disable_tqdm=True
    )
    args = CreditGRPOConfig(str(out), **sizes, **where)
    options = (
        dict(args=args, judge=exact_judge, train_dataset=make_examples("short", 6, seed=0))
        | changes
    )
    return CreditTrainer(build_policy(0), processing_class=build_tokenizer(), **options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(reward_funcs=[len]), "reward_funcs"),
        (dict(rollout_func=len), "rollout_func"),
        (dict(judge=None), "memcalib-rl"),
        (dict(args=object()), "CreditGRPOConfig"),
        (dict(train_dataset=None), "train_dataset"),
    ],
)
def test_what_is_not_taken_is_named(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        a_trainer(tmp_path, **changes)


def test_callbacks_and_optimizers_are_the_callers(tmp_path):
    class Counter(TrainerCallback):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

    model = build_policy(0)
    counter = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = a_trainer(tmp_path, callbacks=[counter], optimizers=(optimizer, schedule))
    trainer.train()
    assert counter.steps == 2 and trainer.optimizer.param_groups[0]["lr"] == 0.0
    assert (tmp_path / "steps.jsonl").read_text().count("\n") == 1


def test_settings_for_trl_say_the_same_as_a_recipe(tmp_path):
    sizes = dict(
        max_steps=8,
        per_device_train_batch_size=8,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
    )
    args = CreditGRPOConfig(
        str(tmp_path),
        **sizes,
        num_generations=4,
        max_completion_length=8,
        prompt_template="micro",
        eval_text="concat",
        bf16=False,
        save_strategy="steps",
        save_steps=4,
        learning_rate=1e-3,
        credit={"eta": 0.5},
        draws="batch",
        use_cpu=True,
        report_to="none",
    )
    sizes = dict(
        prompts=8, generations=4, minibatches=2, accumulate=2, steps=4, save_every=2, max_tokens=8
    )
    assert args.settings() == world_config(WORLDS["short"], **sizes, eta=0.5, lr=1e-3)
    with pytest.raises(ValueError, match="save_steps 3"):
        CreditGRPOConfig(
            str(tmp_path), save_strategy="steps", save_steps=3, bf16=False, use_cpu=True
        ).settings()
