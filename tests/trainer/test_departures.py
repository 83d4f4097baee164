"""Where `CreditTrainer` departs from the base libraries: a change there fails here, before it fails in a training."""

import inspect

import pytest
from accelerate import Accelerator
from transformers import Trainer
from trl import GRPOTrainer

from memcalib.micro.world import exact_judge, make_examples
from memcalib.micro.policy import build_policy, build_tokenizer
from memcalib.trainer.train_config import CreditGRPOConfig, world_config
from memcalib.micro.world import WORLDS
from memcalib.training import CreditTrainer

OVERRIDDEN = {
    "create_accelerator_and_postprocess": "self",
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "_get_train_sampler": "self dataset",
    "_prepare_inputs": "self generation_batch",
    "training_step": "self model inputs num_items_in_batch",
    "_generate_and_score_completions": "self inputs",
    "_get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values"
        " image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids"
        " mm_token_type_ids image_position_ids"
    ),
    "_clip_grad_norm": "self model",
    "_get_grad_norm": "self model grad_norm",
    "log": "self logs start_time",
    "save_model": "self output_dir _internal_call",
}


def test_these_members_and_no_others_are_overridden():
    own = {name for name, value in vars(CreditTrainer).items() if inspect.isfunction(value)}
    assert {name for name in own if hasattr(GRPOTrainer, name)} - {"__init__"} == OVERRIDDEN.keys()
    assert CreditTrainer.__bases__ == (GRPOTrainer,)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_member_has_the_parameters_that_we_know(name):
    assert " ".join(inspect.signature(getattr(GRPOTrainer, name)).parameters) == OVERRIDDEN[name]


@pytest.mark.parametrize(
    ("member", "lines"),
    [
        (  # what our own method does for an update without a pass
            GRPOTrainer.training_step,
            [
                "output = super().training_step(model, inputs, num_items_in_batch)",
                "self._step += 1",
                "self._current_train_step_time += time_after - time_before",
                "if self._step % self.current_gradient_accumulation_steps == 0:",
                'self._metrics["train"]["step_time"].append(self._current_train_step_time)',
                "self._current_train_step_time = 0.0",
            ],
        ),
        (
            Trainer.training_step,
            ["inputs = self._prepare_inputs(inputs)", "self.accelerator.backward(loss"],
        ),
        (
            GRPOTrainer._prepare_inputs,
            [
                "generation_batch = self._generate_and_score_completions(generation_batch)",
                "shuffle_sequence_dict(generation_batch)",
                "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
                "self._buffered_inputs = [",
            ],
        ),
        (
            GRPOTrainer._generate_and_score_completions,
            [
                'self._logs["advantages"].extend',
                '"completion_mask": completion_mask',
                '"advantages": advantages',
                'output["old_per_token_logps"]',
                'output["ref_per_token_logps"]',
            ],
        ),
        (  # an advantage for each token, and the token count of an update
            GRPOTrainer._compute_loss,
            [
                'advantages = inputs["advantages"]',
                "if advantages.dim() == 1:",
                'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
                "self.current_gradient_accumulation_steps / self.args.steps_per_generation",
            ],
        ),
        (
            Trainer._run_epoch,
            [
                "grad_norm = self._clip_grad_norm(model)",
                "grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)",
                "self.callback_handler.on_pre_optimizer_step",
                "self.optimizer.step()",
                "self.callback_handler.on_optimizer_step",
            ],
        ),
        (Trainer._save_checkpoint, ["self.save_model(output_dir, _internal_call=True)"]),
        (
            Trainer._maybe_log_save_evaluate,
            ["self.log(logs", "self._save_checkpoint(", "self.callback_handler.on_save("],
        ),
        (Accelerator.clip_grad_norm_, ["self.unscale_gradients()"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_the_base_libraries_do_what_we_rely_on_in_this_order(member, lines):
    source = inspect.getsource(member)
    place = 0
    for line in lines:
        place = source.find(line, place)
        assert place >= 0, f"{member.__qualname__} has no line {line!r} there"


def test_the_signature_is_that_of_the_base_trainer():
    own, base = (
        inspect.signature(kind.__init__).parameters for kind in (CreditTrainer, GRPOTrainer)
    )
    assert (
        [*own][:7]
        == [*base][:7]
        == [
            "self",
            "model",
            "reward_funcs",
            "args",
            "train_dataset",
            "eval_dataset",
            "processing_class",
        ]
    )
    assert set(own) - {"options", "judge"} <= set(base)


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
    import torch
    from transformers import TrainerCallback

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
