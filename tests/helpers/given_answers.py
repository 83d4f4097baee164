"""Training on answers given beforehand, in one process or in several: `torchrun given_answers.py FOLDER CASE...`."""

import os
import random
import signal
import sys
from pathlib import Path

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
from memcalib.trainer.train_config import DISTILLED, TrainConfig, world_config
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
EMPTY = {
    "none": lambda row, rows: False,
    "some": lambda row, rows: row % 3 == 0,
    "half": lambda row, rows: row >= rows // 2,
    "all": lambda row, rows: True,
}


def settings(case: str) -> tuple[TrainConfig, str, str]:
    """The configuration of a case, which of its answers cannot be judged (in its first step), and which never end."""
    sizes = dict(prompts=5, generations=4, steps=2, minibatches=1, max_tokens=40)
    changes = sizes | dict(beta=0.05, lr=0.05, trl={"optim": "sgd"}) | CASES[case]
    empty = changes.pop("empty")
    long = changes.pop("long", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        changes["trl"] = changes["trl"] | {"use_cpu": False}  # or accelerate leaves DeepSpeed aside
    return world_config(WORLDS["short"], **changes), empty, long


def given_answer(example, row: int, long: bool) -> list[int]:
    """A rule-made answer of this example, another one for each row, with levels flipped so that rewards differ."""
    rng = random.Random(f"{example.id}-{row}")
    text = answer(example, rng, noisy_levels(example, rng, flip=0.5))
    ids = TOKENIZER(text)["input_ids"]
    return (ids * 40)[:40] if long else [*ids[:39], TOKENIZER.eos_token_id]


def given_rollout(config: TrainConfig, empty: str, long: str):
    """A rollout function whose answers depend on the row's place in the whole batch, not on the process it is on."""

    def rollout(prompts, trainer):
        known = {tuple(trainer.encode(example)): example for example in EXAMPLES}
        ids = [encode_prompt(TOKENIZER, prompt) for prompt in prompts]
        step = trainer.state.global_step
        first = trainer.accelerator.process_index * len(prompts)
        rows = range(first, first + len(prompts))
        count = config.prompts * config.generations
        answers = [
            given_answer(known[tuple(p)], 1000 * step + row, step == 0 and EMPTY[long](row, count))
            for p, row in zip(ids, rows, strict=True)
        ]
        silent = [step == 0 and EMPTY[empty](row, count) for row in rows]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None, "empty": silent}

    return rollout


def same_parts(config: TrainConfig, processes: int):
    """In the place of the random order of rows: mini-batches of the same answers on one process as on two."""

    def arrange(batch):
        order = torch.arange(config.prompts * config.generations // processes)
        if processes == 1:
            order = (
                order.view(2, config.minibatches * config.accumulate, -1).transpose(0, 1).flatten()
            )
        return {
            key: value[order] if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in batch.items()
        }

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
    first = state.AcceleratorState.__init__

    def start(self, *args, fsdp_plugin=None, **options):
        first(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = start


def deepspeed_on_cpu() -> None:
    """Let accelerate start DeepSpeed without a GPU: it finds no way for processes to talk unless told to use the CPU's."""
    first = state.PartialState._prepare_backend
    state.PartialState._prepare_backend = lambda self, cpu=False, *more: first(self, True, *more)


def observe(case: str, out: Path, processes: int) -> dict:
    """Train a case and keep what must not depend on the number of processes; of answers, the local rows.

    In float64: a multiplier divides a signal by a sum of signals, and of tiny ones float32 keeps three digits.
    """
    config, empty, long = settings(case)
    found = {"advantages": [], "stats": [], "kinds": set()}

    class Watched(training.trainer_class(config.method)):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            found["advantages"].append(batch["advantages"] * batch["completion_mask"])
            found["stats"].append(dict(self.credit.stats))
            return batch

        def _get_per_token_logps_and_entropies(self, *args, **options):
            logps, *more = super()._get_per_token_logps_and_entropies(*args, **options)
            found["kinds"].add(str(logps.dtype))
            return logps, *more

    kept = training._shared_rollout, training.trainer_class, grpo_trainer.shuffle_sequence_dict
    try:
        training._shared_rollout = given_rollout(config, empty, long)
        training.trainer_class = lambda method: Watched
        if config.minibatches > 1:
            grpo_trainer.shuffle_sequence_dict = same_parts(config, processes)
        policy = load_policy("cold-short")[0]
        start = {name: p.detach().clone() for name, p in policy.named_parameters()}
        trainer = training.train(
            policy if case == "half" else policy.double(),
            config,
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=out / case,
        )
    finally:
        training._shared_rollout, training.trainer_class, grpo_trainer.shuffle_sequence_dict = kept
    rows = [row for row in trainer.state.log_history if "loss" in row]
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    steps = [p - start[name] if name in start else p for name, p in trained.items()]
    found["losses"] = [row["loss"] for row in rows]
    if config.method in DISTILLED:
        found["told"] = [*trainer.credit.stats.values()]
    else:
        found["rms"] = [row["rms"] for row in found["stats"]]
    found["shards"] = sum(isinstance(module, FSDPModule) for module in model.modules())
    found["thresholds"] = trainer.thresholds.state_dict()
    found["weights"] = torch.cat([p.flatten() for p in trained.values()])
    found["moved"] = max(p.abs().max().item() for p in steps)
    if case == "gdpo":
        trainer.save_model(str(out / case / "saved"))
        trainer.accelerator.wait_for_everyone()
        saved = dict(
            AutoModelForCausalLM.from_pretrained(
                out / case / "saved", dtype="auto"
            ).named_parameters()
        )
        found["lost"] = max(
            (value - whole(saved[name])).abs().max().item() for name, value in trained.items()
        )
    return found


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
    done = sft(policy, tokenizer, demonstrations("short", 32, 0), config, out / case)
    PartialState().wait_for_everyone()
    start = load_policy("cold-short" if rank else done.folder)[0]
    model = PeftModel.from_pretrained(start, done.folder).merge_and_unload() if rank else start
    return {"weights": weights(model)}


def go_on(name: str, out: Path) -> dict:
    """Four steps of MemCalib-RL with AdamW and a checkpoint after each: `straight`, `cut` in the third, or `resumed`."""
    config, empty, long = settings("adamw")
    config = config.model_copy(update={"steps": 4, "save_every": 1, "minibatches": 2, "prompts": 6})

    def cut(row):
        if name.startswith("cut") and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    kept = training._shared_rollout
    folder = out / name.replace("resumed", "cut")
    try:
        training._shared_rollout = given_rollout(config, empty, long)
        trainer = training.train(
            load_policy("cold-short")[0],
            config,
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=folder,
            on_step=cut,
            resume=name.startswith("resumed"),
        )
    finally:
        training._shared_rollout = kept
    model = trainer.accelerator.unwrap_model(trainer.model)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    states = [
        whole(torch.as_tensor(value))
        for group in optimizer.state.values()
        for value in group.values()
    ]
    return {
        "weights": torch.cat([whole(p).flatten() for p in model.parameters()]),
        "optimizer": torch.cat([state.detach().flatten().float() for state in states]),
        "thresholds": trainer.thresholds.value,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "resumed": trainer.checkpoints.resumed and trainer.checkpoints.resumed[0],
        "shards": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


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
