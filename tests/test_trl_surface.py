"""Everything of TRL, transformers and accelerate that the trainers rely on. It runs first: an
upgrade that changes any of it fails here, by name, and says what to look at.

Each entry has the parameters as they are today and who uses it. Where a release of TRL changes one:
read the member, adapt the user, write the new parameters down here.
"""

import inspect
import warnings
from types import FunctionType
from typing import NamedTuple

import accelerate
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from micro_policy import TOKENIZER
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.models.utils import _ForwardRedirection, unwrap_model_for_generation
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    use_adapter,
)

from memcalib.products.micro.policy import build_policy
from memcalib.trainer import sft as sft_page
from memcalib.trainer.checkpoints import repeat_sampler, start_pass
from memcalib.trainer.distillation import OpsdGKD, OpsdPG
from memcalib.training import CreditTrainer

torch.set_num_threads(1)


class Member(NamedTuple):
    """A function of a base library."""

    owner: object
    name: str
    parameters: str
    user: str  # who relies on it: what to look at when it changes

    @property
    def function(self) -> FunctionType:
        return getattr(self.owner, self.name) if self.name else self.owner

    def __str__(self) -> str:
        owner = getattr(self.owner, "__name__", str(self.owner))
        return f"{owner}.{self.name}" if self.name else owner


LOGPS = (
    "self model input_ids attention_mask logits_to_keep batch_size compute_entropy "
    "compute_aux_loss pixel_values"
    " image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes "
    "token_type_ids"
    " mm_token_type_ids image_position_ids"
)
OVERRIDDEN = {
    CreditTrainer: [
        Member(
            GRPOTrainer,
            "train",
            "self resume_from_checkpoint trial ignore_keys_for_eval",
            "CreditTrainer.train: chooses the checkpoint, listens for signals",
        ),
        Member(
            GRPOTrainer,
            "training_step",
            "self model inputs num_items_in_batch",
            "CreditTrainer.training_step: leaves out an update without a token to learn from",
        ),
        Member(
            GRPOTrainer,
            "compute_loss",
            "self model inputs return_outputs num_items_in_batch",
            (
                "CreditTrainer.compute_loss: counts the tokens of an update; "
                "OpsdGKD adds the divergence"
            ),
        ),
        Member(
            GRPOTrainer,
            "_generate_and_score_completions",
            "self inputs",
            (
                "CreditTrainer: token advantages in the place of TRL's; "
                "unscored answers out of the mask"
            ),
        ),
        Member(
            GRPOTrainer,
            "_get_per_token_logps_and_entropies",
            LOGPS,
            (
                "CreditTrainer: each distinct prompt encoded once; OpsdGKD: "
                "the pass that serves the divergence"
            ),
        ),
        Member(GRPOTrainer, "_clip_grad_norm", "self model", "CreditTrainer: skipped updates"),
        Member(
            GRPOTrainer,
            "_get_grad_norm",
            "self model grad_norm",
            "CreditTrainer: FiniteGuard.check_update before the optimizer's step",
        ),
        Member(GRPOTrainer, "log", "self logs start_time", "CreditTrainer.log: rows for loggers"),
        Member(
            GRPOTrainer,
            "save_model",
            "self output_dir _internal_call",
            "CreditTrainer.save_model: weights that are no numbers are not saved",
        ),
        Member(
            GRPOTrainer,
            "create_model_card",
            "self model_name dataset_name tags",
            "nobody: `memcalib train` writes a card of its own",
        ),
    ],
    OpsdPG: [],
    OpsdGKD: [
        Member(
            GRPOTrainer,
            "compute_loss",
            "self model inputs return_outputs num_items_in_batch",
            "OpsdGKD",
        ),
        Member(GRPOTrainer, "_get_per_token_logps_and_entropies", LOGPS, "OpsdGKD"),
    ],
    sft_page._Trainer: [
        Member(
            SFTTrainer,
            "compute_loss",
            "self model inputs return_outputs num_items_in_batch",
            "memcalib.trainer.sft: log-probabilities of answers alone without Triton",
        ),
        Member(SFTTrainer, "save_model", "self output_dir _internal_call", "memcalib.trainer.sft"),
        Member(
            SFTTrainer,
            "create_model_card",
            "self model_name dataset_name tags",
            "nobody: `memcalib train` writes a card of its own",
        ),
    ],
}
CALLED = [
    Member(
        GRPOTrainer,
        "_generate_single_turn",
        "self prompt_ids images multimodal_fields num_generations has_tool_images",
        "StepRows._vllm_answers: a validation with vLLM",
    ),
    Member(Trainer, "_save_checkpoint", "self model trial", "Checkpoints.rescue"),
    Member(
        Trainer,
        "_load_from_checkpoint",
        "self resume_from_checkpoint model",
        "CreditTrainer.train: a run that is finished",
    ),
    Member(CallbackHandler, "on_log", "self args state control logs kwargs", "scores for loggers"),
    Member(CallbackHandler, "on_save", "self args state control kwargs", "Checkpoints.rescue"),
    Member(
        unwrap_model_for_generation,
        "",
        (
            "model accelerator gather_deepspeed3_params generation_kwargs "
            "gradient_checkpointing_kwargs"
        ),
        "_shared_rollout",
    ),
    Member(prepare_deepspeed, "", "model accelerator", "distillation: the frozen teacher"),
    Member(prepare_fsdp, "", "model accelerator", "distillation: the frozen teacher"),
    Member(
        _ForwardRedirection,
        "__call__",
        "self wrapper_module original_module method args kwargs",
        "OpsdGKD: a pass through a sharded model",
    ),
    Member(create_model_from_path, "", "model_id architecture kwargs", "load_teacher"),
    Member(use_adapter, "", "model adapter_name", "OpsdPG.teacher_model"),
    Member(
        RepeatSampler,
        "__init__",
        "self data_source mini_repeat_count batch_size repeat_count shuffle seed",
        "start_pass, micro.loop",
    ),
    Member(
        rotate_checkpoints,
        "",
        "output_dir save_total_limit best_model_checkpoint use_mtime checkpoint_prefix",
        "Checkpoints.on_save",
    ),
]
ORDER = {
    "what our own method does for a part that is left out": (
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
    "the batch is prepared, then the loss, then the backward pass": (
        Trainer.training_step,
        [
            "inputs = self._prepare_inputs(inputs)",
            "loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)",
            "self.accelerator.backward(loss",
        ],
    ),
    "the parts of a rollout batch, in the order of `_step`": (
        GRPOTrainer._prepare_inputs,
        [
            "generation_batch = self._generate_and_score_completions(generation_batch)",
            "shuffle_sequence_dict(generation_batch)",
            "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
            "self._buffered_inputs = [",
            "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
        ],
    ),
    "what a rollout gives, what reward functions get, and the batch that comes of it": (
        GRPOTrainer._generate_and_score_completions,
        [
            "for key, values in extra_fields.items():",
            "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
            'self._logs["advantages"].extend',
            '"completion_ids": completion_ids',
            '"completion_mask": completion_mask',
            '"advantages": advantages',
            '"num_items_in_batch": num_items_in_batch',
            'output["old_per_token_logps"]',
            'output["ref_per_token_logps"]',
        ],
    ),
    "one call for the log-probabilities of an update; the token count of the loss": (
        GRPOTrainer._compute_loss,
        [
            "self._get_per_token_logps_and_entropies(",
            'advantages = inputs["advantages"]',
            "if advantages.dim() == 1:",
            'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        ],
    ),
    "the norm of the gradient, a callback, the optimizer, a callback": (
        Trainer._run_epoch,
        [
            "grad_norm = self._clip_grad_norm(model)",
            "grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)",
            "self.callback_handler.on_pre_optimizer_step",
            "self.optimizer.step()",
            "self.callback_handler.on_optimizer_step",
            "self.callback_handler.on_step_end",
            "self._maybe_log_save_evaluate(",
        ],
    ),
    "the output head scores labelled positions alone where Triton is said to run": (
        add_fused_lm_head,
        [
            "compact = _use_triton(hidden_states.device)",
            "hidden_states[mask] if compact else",
            "labels[mask] if compact else",
        ],
    ),
    "a checkpoint saves the model by save_model": (
        Trainer._save_checkpoint,
        ["self.save_model(output_dir, _internal_call=True)"],
    ),
    "the row of a step, its checkpoint, the seal": (
        Trainer._maybe_log_save_evaluate,
        ["self.log(logs", "self._save_checkpoint(", "self.callback_handler.on_save("],
    ),
    "callbacks at the end of the base library's __init__, the reference policy after it": (
        GRPOTrainer.__init__,
        ["super().__init__(", "prepare_fsdp(self.ref_model"],
    ),
    "the accelerator is there when callbacks hear of the end of __init__": (
        Trainer.__init__,
        ["self.create_accelerator_and_postprocess()", "self.callback_handler.on_init_end("],
    ),
    "clipping unscales gradients": (Accelerator.clip_grad_norm_, ["self.unscale_gradients()"]),
}


def members(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("kind", OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_these_members_and_no_others_are_overridden(kind):
    base = SFTTrainer if kind is sft_page._Trainer else GRPOTrainer
    overridden = {name for name in members(kind) if hasattr(base, name)} - {"__init__"}
    assert overridden == {member.name for member in OVERRIDDEN[kind]}


@pytest.mark.parametrize(
    "member", [*CALLED, *(member for kind in OVERRIDDEN.values() for member in kind)], ids=str
)
def test_a_member_has_the_parameters_that_we_know(member):
    parameters = " ".join(inspect.signature(member.function).parameters)
    assert parameters == member.parameters, f"used by {member.user}"


@pytest.mark.parametrize("promise", ORDER)
def test_the_base_libraries_do_what_we_rely_on_in_this_order(promise):
    member, lines = ORDER[promise]
    source = inspect.getsource(member)
    position = 0
    for line in lines:
        position = source.find(line, position)
        assert position >= 0, f"{promise}: {member.__qualname__} has no line {line!r} there"


def test_the_signature_is_that_of_the_base_trainer():
    ours = [*inspect.signature(CreditTrainer.__init__).parameters]
    base = [*inspect.signature(GRPOTrainer.__init__).parameters]
    positional = "self model reward_funcs args train_dataset eval_dataset processing_class"
    assert " ".join(ours[:7]) == " ".join(base[:7]) == positional
    assert {*ours} - {"options", "judge", "rewriter"} <= {*base}
    assert {"callbacks", "rollout_func", "peft_config", "optimizers"} <= {*base}


class Reward:
    """A reward function that notes what it is given."""

    __name__ = "length"

    def __init__(self):
        self.options = []

    def __call__(self, prompts, completions, completion_ids, **options):
        options["completions"] = completions
        options["completion_ids"] = completion_ids
        self.options.append(options)
        return [float(len(ids)) for ids in completion_ids]


class Batches(GRPOTrainer):
    """Keeps the rollout batches of a run."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.batches.append(batch)
        return batch


class Events(TrainerCallback):
    """Notes what callbacks are told, and the kinds of objects they are given."""

    def __init__(self):
        self.names = []
        self.loader = None

    def on_init_end(self, args, state, control, model=None, **options):
        self.names.append("on_init_end")
        assert model is not None

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **options):
        self.names.append("on_epoch_begin")
        self.loader = train_dataloader


def rollout(prompts, trainer):
    """Two tokens and the end for every prompt, and a field of its own."""
    answers = [[10 + row, 20, TOKENIZER.eos_token_id] for row in range(len(prompts))]
    return {
        "prompt_ids": [[5, 6, 7] for _ in prompts],
        "completion_ids": answers,
        "logprobs": None,
        "empty": [row == 0 for row in range(len(prompts))],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of TRL's own trainer: two updates of two parts each, from one rollout batch."""
    args = GRPOConfig(
        str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=2,
        beta=0.0,
        loss_type="dapo",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    rows = [{"prompt": [{"role": "user", "content": f"Plan {k}."}], "example": k} for k in range(8)]
    reward = Reward()
    events = Events()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        trainer = Batches(
            build_policy(0),
            reward_funcs=[reward],
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=TOKENIZER,
            callbacks=[events],
            rollout_func=rollout,
        )
    trainer.batches = []
    assert events.names == ["on_init_end"], "a callback that is given hears of the end of __init__"
    trainer.train()
    return trainer, reward, events


def test_a_trainer_has_the_attributes_that_we_read(run):
    trainer, _, _ = run
    names = (
        "accelerator args callback_handler control current_gradient_accumulation_steps "
        "eos_token_ids"
        " is_deepspeed_enabled is_fsdp_enabled loss_type max_completion_length model model_wrapped "
        "num_generations"
        " optimizer processing_class ref_model state temperature train_dataset use_vllm"
        " _buffered_inputs _current_train_step_time _logs _metrics _step"
    )
    missing = [name for name in names.split() if not hasattr(trainer, name)]
    assert missing == []
    assert {"train", "eval"} <= trainer._metrics.keys()
    assert "advantages" in trainer._logs
    assert isinstance(trainer.eos_token_ids, list)


def test_reward_functions_get_the_answers_the_columns_and_what_the_rollout_adds(run):
    _, reward, _ = run
    options = reward.options[0]
    assert len(options["completions"]) == 8
    assert set(options["completions"][0][0]) >= {"role", "content"}
    assert options["completion_ids"][1] == [11, 20, TOKENIZER.eos_token_id]
    assert options["empty"] == [True] + [False] * 7
    assert all(isinstance(example, int) for example in options["example"])


def test_a_batch_has_what_we_read_and_replace(run):
    trainer, _, _ = run
    batch = trainer.batches[0]
    assert {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "num_items_in_batch",
        "old_per_token_logps",
    } <= batch.keys()
    assert batch["advantages"].shape == (8,)
    assert batch["completion_ids"].shape == batch["completion_mask"].shape == (8, 3)
    assert batch["old_per_token_logps"].shape == (8, 3)
    assert len(trainer._buffered_inputs) == 4
    assert trainer._buffered_inputs[0]["completion_ids"].shape == (2, 3)


def test_the_sampler_is_found_in_the_loader_that_callbacks_get(run):
    _, _, events = run
    assert events.names[1] == "on_epoch_begin"
    sampler = repeat_sampler(events.loader)
    assert isinstance(sampler, RepeatSampler)
    orders = [list(sampler) for _ in range(3)]
    fresh = RepeatSampler(
        range(8), sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count, seed=42
    )
    expected = [list(fresh) for _ in range(3)]
    start_pass(sampler, 2)
    assert list(sampler) == expected[2]
    assert orders != expected, "without it the order goes on from where the generator is"


@pytest.mark.parametrize("processes", [1, 2])
def test_the_sampler_is_found_in_the_share_of_a_process(processes):
    sampler = RepeatSampler(range(8), 2, 2, seed=3)
    loader = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 4, drop_last=True))
    shared = accelerate.data_loader.prepare_data_loader(
        loader, num_processes=processes, process_index=0, put_on_device=False
    )
    assert repeat_sampler(shared) is sampler
    assert repeat_sampler(accelerate.skip_first_batches(shared, 1)) is sampler


def loss_of(trainer, advantages, tokens=12.0) -> float:
    """TRL's loss of four answers of three tokens, the last of which is padding in the first
    answer.
    """
    mask = torch.ones(4, 3, dtype=torch.long)
    mask[0, 2] = 0
    inputs = {
        "prompt_ids": torch.full((4, 3), 5),
        "prompt_mask": torch.ones(4, 3, dtype=torch.long),
        "completion_ids": torch.arange(10, 22).view(4, 3),
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(tokens),
    }
    trainer.current_gradient_accumulation_steps = 4
    with torch.no_grad():
        return trainer.compute_loss(trainer.model, inputs).item()


def test_the_loss_takes_an_advantage_for_each_answer_and_for_each_token(run):
    """Shape (rows,) or (rows, tokens); before the first update the loss is minus their mean over
    tokens.
    """
    trainer, _, _ = run
    trainer.model.train()
    of_answers = torch.tensor([1.0, -2.0, 0.5, 3.0])
    of_tokens = torch.arange(12.0).view(4, 3) - 4
    spread = of_answers[:, None].expand(4, 3)
    assert loss_of(trainer, of_answers) == pytest.approx(loss_of(trainer, spread), abs=1e-6)
    in_loss = of_tokens.sum() - of_tokens[0, 2]
    assert loss_of(trainer, of_tokens) == pytest.approx(-in_loss.item() / 12, abs=1e-5)
    assert loss_of(trainer, of_tokens, 24.0) == pytest.approx(-in_loss.item() / 24, abs=1e-5)
