"""Training on answers given beforehand, in one process or in several:
`torchrun given_answers.py FOLDER CASE...`.
"""

import os
import random
import signal
import sys
from contextlib import contextmanager
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
from memcalib.products.micro.world import (
    WORLDS,
    answer,
    demonstrations,
    exact_judge,
    make_examples,
    noisy_levels,
)
from memcalib.products.micro.policy import build_tokenizer, load_policy
from memcalib.problem import encode_prompt
from memcalib.trainer.train_config import METHODS, TrainConfig, world_config
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
    """The configuration of a case, which of its answers cannot be judged (in its first step),
    and which never end.
    """
    changes = {
        "prompts": 5,
        "generations": 4,
        "steps": 2,
        "minibatches": 1,
        "max_tokens": 40,
        "beta": 0.05,
        "lr": 0.05,
        "trl": {"optim": "sgd"},
    }
    changes.update(CASES[case])
    empty = changes.pop("empty")
    long = changes.pop("long", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        # or accelerate leaves DeepSpeed aside
        changes["trl"] = {**changes["trl"], "use_cpu": False}
    return world_config(WORLDS["short"], **changes), empty, long


def given_answer(example, row: int, long: bool) -> list[int]:
    """A rule-made answer of this example, another one for each row,
    with levels flipped so that rewards differ.
    """
    rng = random.Random(f"{example.id}-{row}")
    text = answer(example, rng, noisy_levels(example, rng, flip=0.5))
    token_ids = TOKENIZER(text)["input_ids"]
    if long:
        return (token_ids * 40)[:40]
    return [*token_ids[:39], TOKENIZER.eos_token_id]


def given_rollout(config: TrainConfig, empty: str, long: str):
    """A rollout function whose answers depend on the row's place in the whole batch,
    not on the process it is on.
    """

    def rollout(prompts, trainer):
        example_of_prompt = {tuple(trainer.encode(example)): example for example in EXAMPLES}
        step = trainer.state.global_step
        first_row = trainer.accelerator.process_index * len(prompts)
        row_count = config.prompts * config.generations
        prompt_ids = []
        answers = []
        is_empty = []
        for row, prompt in enumerate(prompts, first_row):
            ids = encode_prompt(TOKENIZER, prompt)
            is_long = step == 0 and EMPTY[long](row, row_count)
            prompt_ids.append(ids)
            answers.append(given_answer(example_of_prompt[tuple(ids)], 1000 * step + row, is_long))
            is_empty.append(step == 0 and EMPTY[empty](row, row_count))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": answers,
            "logprobs": None,
            "empty": is_empty,
        }

    return rollout


def same_parts(config: TrainConfig, processes: int):
    """In the place of the random order of rows: mini-batches of the same answers on one process as
    on two.
    """

    def arrange(batch):
        order = torch.arange(config.prompts * config.generations // processes)
        if processes == 1:
            by_process = order.view(2, config.minibatches * config.accumulate, -1)
            order = by_process.transpose(0, 1).flatten()
        arranged = {}
        for name, value in batch.items():
            has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
            arranged[name] = value[order] if has_rows else value
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
    """Let accelerate shard models without a GPU: it leaves its FSDP settings aside when the
    processes are on the CPU.

    `AcceleratorState` reads them for GPUs and other accelerators alone (distributed type MULTI_CPU
    is not in its list).
    """
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_VERSION"] = "2"
    os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    init = state.AcceleratorState.__init__

    def init_with_fsdp(self, *args, fsdp_plugin=None, **options):
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init_with_fsdp


def deepspeed_on_cpu() -> None:
    """Let accelerate start DeepSpeed without a GPU: it finds no way for processes to talk unless
    told to use the CPU's.
    """
    prepare_backend = state.PartialState._prepare_backend

    def prepare_cpu_backend(self, cpu=False, *arguments):
        return prepare_backend(self, True, *arguments)

    state.PartialState._prepare_backend = prepare_cpu_backend


@contextmanager
def patched(module, **replacements):
    """The module with other functions of these names inside the block."""
    originals = {name: getattr(module, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(module, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def watched_trainer(base: type, observed: dict) -> type:
    """The trainer, which notes what it computes in `observed`."""

    class WatchedTrainer(base):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            observed["advantages"].append(batch["advantages"] * batch["completion_mask"])
            observed["stats"].append(dict(self.credit.stats))
            return batch

        def _get_per_token_logps_and_entropies(self, *args, **options):
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **options)
            observed["dtypes"].add(str(logps.dtype))
            return logps, *others

    return WatchedTrainer


def observe(case: str, out: Path, processes: int) -> dict:
    """Train a case and keep what must not depend on the number of processes;
    of answers, the local rows.

    In float64: a multiplier divides a signal by a sum of signals,
    and of tiny ones float32 keeps three digits.
    """
    config, empty, long = settings(case)
    observed = {"advantages": [], "stats": [], "dtypes": set()}
    trainer_type = watched_trainer(training.trainer_class(config.method), observed)
    shuffle = grpo_trainer.shuffle_sequence_dict
    if config.minibatches > 1:
        shuffle = same_parts(config, processes)
    policy = load_policy("cold-short")[0]
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    if case != "half":
        policy = policy.double()
    with (
        patched(
            training,
            _shared_rollout=given_rollout(config, empty, long),
            trainer_class=lambda method: trainer_type,
        ),
        patched(grpo_trainer, shuffle_sequence_dict=shuffle),
    ):
        trainer = training.train(
            policy, config, EXAMPLES, exact_judge, tokenizer=TOKENIZER, out=out / case
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    observed["losses"] = logged_losses(trainer)
    if METHODS[config.method].needs_teacher:
        observed["distilled"] = list(trainer.credit.stats.values())
    else:
        observed["rms"] = [row["rms"] for row in observed["stats"]]
    observed["shards"] = shard_count(model)
    observed["thresholds"] = trainer.thresholds.state_dict()
    observed["weights"] = torch.cat([p.flatten() for p in trained.values()])
    observed["moved"] = largest_difference(trained, start)
    if case == "gdpo":
        folder = out / case / "saved"
        trainer.save_model(str(folder))
        trainer.accelerator.wait_for_everyone()
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        saved_parameters = {name: whole(p) for name, p in saved.named_parameters()}
        observed["lost"] = largest_difference(trained, saved_parameters)
    return observed


def logged_losses(trainer) -> list[float]:
    """The loss of each step that was logged."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def shard_count(model: torch.nn.Module) -> int:
    """How many modules are sharded over the processes."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def largest_difference(
    parameters: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> float:
    """The largest difference of any two numbers of the same place;
    a parameter that the others lack is compared with 0.
    """
    differences = []
    for name, value in parameters.items():
        difference = value - others[name] if name in others else value
        differences.append(difference.abs().max().item())
    return max(differences)


def teach(case: str, out: Path) -> dict:
    """Supervised fine-tuning on demonstrations: the weights that lie in its folder afterwards."""
    is_adapter = case == "taught-adapter"
    config = SftConfig(
        batch_size=8,
        lora_rank=4 if is_adapter else 0,
        lr=1e-2,
        output="adapter" if is_adapter else "merged",
        trl={"adam_epsilon": 1e-3},
    )
    policy, tokenizer = load_policy("cold-short")
    folder = sft(policy, tokenizer, demonstrations("short", 32, 0), config, out / case).folder
    PartialState().wait_for_everyone()
    if is_adapter:
        base = load_policy("cold-short")[0]
        model = PeftModel.from_pretrained(base, folder).merge_and_unload()
    else:
        model = load_policy(folder)[0]
    return {"weights": weights(model)}


def go_on(name: str, out: Path) -> dict:
    """Four steps of MemCalib-RL with AdamW and a checkpoint after each:
    `straight`, `cut` in the third, or `resumed`.
    """
    config, empty, long = settings("adamw")
    config = config.model_copy(update={"steps": 4, "save_every": 1, "minibatches": 2, "prompts": 6})

    def cut(row):
        if name.startswith("cut") and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with patched(training, _shared_rollout=given_rollout(config, empty, long)):
        trainer = training.train(
            load_policy("cold-short")[0],
            config,
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=out / name.replace("resumed", "cut"),
            on_step=cut,
            resume=name.startswith("resumed"),
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    states = []
    for state_of_parameter in optimizer.state.values():
        for value in state_of_parameter.values():
            states.append(whole(torch.as_tensor(value)).detach().flatten().float())
    return {
        "weights": torch.cat([whole(p).flatten() for p in model.parameters()]),
        "optimizer": torch.cat(states),
        "thresholds": trainer.thresholds.value,
        "losses": logged_losses(trainer),
        "resumed": trainer.checkpoints.resumed and trainer.checkpoints.resumed[0],
        "shards": shard_count(model),
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
            outcome = teach(name, folder)
        elif name.startswith(("straight", "cut", "resumed")):
            outcome = go_on(name, folder)
        else:
            outcome = observe(name, folder, int(os.environ["WORLD_SIZE"]))
        torch.save(outcome, folder / f"{name}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
