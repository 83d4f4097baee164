"""Training on answers given beforehand, in one process or in several: `torchrun given_answers.py FOLDER CASE...`."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState, state
from accelerate.utils import DistributedType
from peft import PeftModel
from run_files import weights
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

import memcalib.training as training
from memcalib.micro.world import (
    WORLDS,
    answer,
    demonstrations,
    exact_judge,
    make_examples,
    noisy_levels,
)
from memcalib.micro.policy import build_tokenizer, load_policy
from memcalib.problem import encode_prompt
from memcalib.trainer.distillation import OpsdPG
from memcalib.trainer.train_config import TrainConfig, world_config
from memcalib.trainer.sft import SftConfig, sft

TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 12, seed=5)
DECAY = {"adam_epsilon": 1e-3, "weight_decay": 0.5, "lr_scheduler_type": "linear"}
CASES = {
    "grpo": dict(method="grpo", empty="some"),
    "gdpo": dict(method="gdpo", empty="none"),
    "token": dict(empty="some"),
    "sentence": dict(granularity="sentence", empty="none"),
    "window": dict(granularity="sentence", accumulate=2, empty="some"),
    "centred": dict(center=True, scale_unit="token", threshold_pool="open", empty="half"),
    "nothing": dict(method="gdpo", empty="all"),
    "parts": dict(prompts=6, minibatches=2, accumulate=2, empty="half"),
    "adapter": dict(lora_rank=4, empty="some"),
    "half": dict(trl={"bf16": True, "optim": "sgd"}, empty="some"),
    "pg": dict(method="opsd-pg", empty="some"),
    "pg-long": dict(method="opsd-pg", mask_truncated=True, long="half", empty="none"),
    "pg-adapter": dict(method="opsd-pg", lora_rank=4, empty="half"),
    "gkd": dict(method="opsd-gkd", lr=0.5, empty="half"),
    "gkd-nothing": dict(method="opsd-gkd", empty="all"),
    "gkd-long": dict(method="opsd-gkd", lr=0.5, mask_truncated=True, long="half", empty="some"),
    "gkd-parts": dict(
        method="opsd-gkd", lr=0.5, prompts=6, minibatches=2, accumulate=2, empty="half"
    ),
    "gkd-plain": dict(method="opsd-gkd", lr=0.5, share_prompts=False, empty="half"),
    "gkd-teacher": dict(method="opsd-gkd", lr=0.5, teacher="pretrained", beta=0.0, empty="some"),
    "gkd-copy": dict(method="opsd-gkd", lr=0.5, beta=0.0, empty="half"),
    "gkd-adapter": dict(method="opsd-gkd", lr=0.5, lora_rank=4, empty="half"),
    "skipped": dict(method="gdpo", lr=4e-3, trl=DECAY, empty="all"),
    "adamw": dict(lr=1e-3, trl={"adam_epsilon": 1e-3, "weight_decay": 0.01}, empty="some"),
}
SIZES = dict(prompts=5, generations=4, steps=2, minibatches=1, max_tokens=40)


def is_among(share: str, row: int, rows: int) -> bool:
    """Whether a row is one of the rows of a batch that a case names: none, some, half or all of them."""
    if share == "some":
        return row % 3 == 0
    if share == "half":
        return row >= rows // 2
    return share == "all"


class Case(NamedTuple):
    """A configuration, which of its answers cannot be judged (in its first step), and which never end."""

    config: TrainConfig
    empty: str
    long: str


def case_of(name: str) -> Case:
    changes = {**SIZES, "beta": 0.05, "lr": 0.05, "trl": {"optim": "sgd"}, **CASES[name]}
    empty = changes.pop("empty")
    long = changes.pop("long", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        # or accelerate leaves DeepSpeed aside
        changes["trl"] = {**changes["trl"], "use_cpu": False}
    return Case(world_config(WORLDS["short"], **changes), empty, long)


def given_answer(example, row: int, long: bool) -> list[int]:
    """A rule-made answer of this example, another one for each row, with levels flipped so that rewards differ."""
    rng = random.Random(f"{example.id}-{row}")
    text = answer(example, rng, noisy_levels(example, rng, flip=0.5))
    ids = TOKENIZER(text)["input_ids"]
    return (ids * 40)[:40] if long else [*ids[:39], TOKENIZER.eos_token_id]


def given_rollout(case: Case):
    """A rollout function whose answers depend on the row's place in the whole batch, not on the process it is on."""

    def rollout(prompts, trainer):
        example_by_prompt = {tuple(trainer.encode(example)): example for example in EXAMPLES}
        prompt_ids = [encode_prompt(TOKENIZER, prompt) for prompt in prompts]
        step = trainer.state.global_step
        first_row = trainer.accelerator.process_index * len(prompts)
        rows = case.config.prompts * case.config.generations
        answers = []
        silent = []
        for row, ids in enumerate(prompt_ids, first_row):
            is_long = step == 0 and is_among(case.long, row, rows)
            answers.append(given_answer(example_by_prompt[tuple(ids)], 1000 * step + row, is_long))
            silent.append(step == 0 and is_among(case.empty, row, rows))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": answers,
            "logprobs": None,
            "empty": silent,
        }

    return rollout


def same_parts(config: TrainConfig, processes: int):
    """In the place of the random order of rows: mini-batches of the same answers on one process as on two."""

    def arrange(batch):
        order = torch.arange(config.prompts * config.generations // processes)
        if processes == 1:
            parts = config.minibatches * config.accumulate
            order = order.view(2, parts, -1).transpose(0, 1).flatten()
        arranged = {}
        for key, value in batch.items():
            has_rows = isinstance(value, torch.Tensor) and value.dim()
            arranged[key] = value[order] if has_rows else value
        return arranged

    return arrange


def whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor that several processes share, put together on each."""
    if hasattr(value, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([value]):
            return value.detach().clone()
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_on_cpu() -> None:
    """Let accelerate shard models without a GPU: it leaves its FSDP settings aside when the processes are on the CPU.

    `AcceleratorState` reads them for GPUs and other accelerators alone (distributed type MULTI_CPU is not in its list).
    """
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    plain_init = state.AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **options):
        plain_init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init


def deepspeed_on_cpu() -> None:
    """Let accelerate start DeepSpeed without a GPU: it finds no way for processes to talk unless told to use the CPU's."""
    plain = state.PartialState._prepare_backend

    def prepare(self, cpu=False, *args):
        return plain(self, True, *args)

    state.PartialState._prepare_backend = prepare


@contextmanager
def given(case: Case, trainer_class: type | None = None, processes: int = 0) -> Iterator[None]:
    """Trainings answer as the case says; its mini-batches are the same on one process as on two, where there are any."""
    rollout = training._shared_rollout
    class_of_method = training.trainer_class
    shuffle = grpo_trainer.shuffle_sequence_dict
    try:
        training._shared_rollout = given_rollout(case)
        if trainer_class:
            training.trainer_class = lambda method: trainer_class
        if processes and case.config.minibatches > 1:
            grpo_trainer.shuffle_sequence_dict = same_parts(case.config, processes)
        yield
    finally:
        training._shared_rollout = rollout
        training.trainer_class = class_of_method
        grpo_trainer.shuffle_sequence_dict = shuffle


def watched(method: str) -> type:
    """The trainer of a method, which keeps the advantages and numbers of its batches."""

    class Watched(training.trainer_class(method)):
        def __init__(self, *args, **options):
            self.batch_advantages = []
            self.batch_stats = []
            self.dtypes = set()
            super().__init__(*args, **options)

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            self.batch_advantages.append(batch["advantages"] * batch["completion_mask"])
            self.batch_stats.append(dict(self.credit.stats))
            return batch

        def _get_per_token_logps_and_entropies(self, *args, **options):
            outputs = super()._get_per_token_logps_and_entropies(*args, **options)
            self.dtypes.add(str(outputs[0].dtype))
            return outputs

    return Watched


def observe(name: str, out: Path, processes: int) -> dict:
    """Train a case and keep what must not depend on the number of processes; of answers, the local rows.

    In float64: a multiplier divides a signal by a sum of signals, and of tiny ones float32 keeps three digits.
    """
    case = case_of(name)
    policy = load_policy("cold-short")[0]
    start = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    with given(case, watched(case.config.method), processes):
        trainer = training.train(
            policy if name == "half" else policy.double(),
            case.config,
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=out / name,
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {
        name: whole(weight) for name, weight in model.named_parameters() if weight.requires_grad
    }
    steps = [weight - start[name] if name in start else weight for name, weight in trained.items()]
    observed = {
        "advantages": trainer.batch_advantages,
        "stats": trainer.batch_stats,
        "dtypes": trainer.dtypes,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "shards": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "thresholds": trainer.thresholds.state_dict(),
        "weights": torch.cat([weight.flatten() for weight in trained.values()]),
        "moved": max(step.abs().max().item() for step in steps),
    }
    if isinstance(trainer, OpsdPG):
        observed["distilled"] = [*trainer.credit.stats.values()]
    else:
        observed["rms"] = [stats["rms"] for stats in trainer.batch_stats]
    if name == "gdpo":
        observed["lost"] = lost_by_saving(trainer, trained, out / name / "saved")
    return observed


def lost_by_saving(trainer, trained: dict[str, torch.Tensor], folder: Path) -> float:
    """The largest difference between a weight and what a saved model has in its place."""
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    saved = dict(model.named_parameters())
    differences = [weight - whole(saved[name]) for name, weight in trained.items()]
    return max(difference.abs().max().item() for difference in differences)


def teach(case: str, out: Path) -> dict:
    """Supervised fine-tuning on demonstrations: the weights that lie in its folder afterwards."""
    rank = 4 if case == "taught-adapter" else 0
    config = SftConfig(
        batch_size=8,
        lora_rank=rank,
        lr=1e-2,
        output="adapter" if rank else "merged",
        trl={"adam_epsilon": 1e-3},
    )
    policy, tokenizer = load_policy("cold-short")
    folder = sft(policy, tokenizer, demonstrations("short", 32, 0), config, out / case).folder
    PartialState().wait_for_everyone()
    if rank:
        start = load_policy("cold-short")[0]
        model = PeftModel.from_pretrained(start, folder).merge_and_unload()
    else:
        model = load_policy(folder)[0]
    return {"weights": weights(model)}


def go_on(name: str, out: Path) -> dict:
    """Four steps of MemCalib-RL with AdamW and a checkpoint after each: `straight`, `cut` in the third, or `resumed`."""
    case = case_of("adamw")
    changes = {"steps": 4, "save_every": 1, "minibatches": 2, "prompts": 6}
    case = case._replace(config=case.config.model_copy(update=changes))

    def cut(row):
        if name.startswith("cut") and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with given(case):
        trainer = training.train(
            load_policy("cold-short")[0],
            case.config,
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=out / name.replace("resumed", "cut"),
            on_step=cut,
            resume=name.startswith("resumed"),
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    resumed = trainer.checkpoints.resumed
    return {
        "weights": torch.cat([whole(weight).flatten() for weight in model.parameters()]),
        "optimizer": optimizer_state(trainer),
        "thresholds": trainer.thresholds.value,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "resumed": resumed and resumed[0],
        "shards": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


def optimizer_state(trainer) -> torch.Tensor:
    """All numbers that the optimizer keeps, in a row."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    numbers = []
    for values in optimizer.state.values():
        for value in values.values():
            numbers.append(whole(torch.as_tensor(value)).flatten().float())
    return torch.cat(numbers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    folder = Path(sys.argv[1])
    if os.environ.get("SHARDED"):
        shard_on_cpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        deepspeed_on_cpu()
    for name in sys.argv[2:]:
        if name.startswith("taught"):
            result = teach(name, folder)
        elif name.startswith(("straight", "cut", "resumed")):
            result = go_on(name, folder)
        else:
            result = observe(name, folder, int(os.environ["WORLD_SIZE"]))
        torch.save(result, folder / f"{name}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
