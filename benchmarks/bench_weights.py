"""Time of one training step on real weights: GDPO, then MemCalib-RL, in one run.

    python benchmarks/bench_weights.py [FOLDER] [--adapter FOLDER] [--sizes 4x4 8x8] [--steps 5]
                                       [--rank 32] [--bf16] [--threads 1] [--trl]
    python benchmarks/bench_weights.py [FOLDER] --sft [--steps 5] [--bf16]

FOLDER holds the weights (build/small-model, which `make small-model` makes; without one nothing is
measured, and that is said), --adapter a cold start that answers in the form of
the world in plain English: untrained weights answer up to the limit of tokens, which is another
measurement. A size is prompts x answers. Each method is measured twice, in the order
A B B A, for --steps steps each; the first step of a measurement is not counted. Processor
seconds of a step stand beside their median, and the ratio is of their sums. --rank 0 trains all
weights; with adapters the reference policy is the adapter switched off, and the script says how
many copies of the weights each trainer holds. --trl adds TRL's own GRPO. --sft times updates of
supervised fine-tuning instead (8 rows), with every token scored and with answers alone.
"""

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from total_reward import total_reward
from memcalib.products.micro.english import ENGLISH, english_judge
from memcalib.trainer.recipe import Start, load_start
from memcalib.trainer import sft as sft_page
from memcalib.trainer.rewards import prompt_dataset
from memcalib.trainer.sft import SftConfig, sft
from memcalib.trainer.train_config import TrainConfig, trl_config
from memcalib.training import CreditTrainer

FOLDER = Path(__file__).parents[1] / "build" / "small-model"
METHODS = ("gdpo", "memcalib-rl")


def start_of(options: argparse.Namespace):
    """(model, tokenizer) to train, the adapter merged into the weights."""
    adapter = str(options.adapter) if options.adapter else None
    start = Start(model=str(options.folder), adapter=adapter, dtype="float32")
    return load_start(start, lora=options.rank > 0)


def adapter_config(options: argparse.Namespace) -> LoraConfig | None:
    """The adapter that is trained; None for all weights."""
    if not options.rank:
        return None
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def settings_of(method: str, prompts: int, answers: int, options: argparse.Namespace):
    """The settings of the world, with the sizes that are measured."""
    changes = {
        "prompts": prompts,
        "generations": answers,
        "steps": options.steps + 1,
        "lora_rank": options.rank,
        "trl": {"bf16": options.bf16},
    }
    return TrainConfig(method=method, **ENGLISH.training_settings() | changes)


def trl_trainer(config: TrainConfig, examples, out: Path, options) -> GRPOTrainer:
    """TRL's own trainer on the same prompts, sizes and rewards."""
    model, tokenizer = start_of(options)
    return GRPOTrainer(
        model,
        [total_reward(english_judge, examples)],
        trl_config(config, out),
        prompt_dataset(config, tokenizer, examples),
        processing_class=tokenizer,
        peft_config=adapter_config(options),
    )


def our_trainer(config: TrainConfig, examples, out: Path, options) -> CreditTrainer:
    model, tokenizer = start_of(options)
    return CreditTrainer(
        model,
        judge=english_judge,
        args=trl_config(config, out),
        train_dataset=examples,
        processing_class=tokenizer,
        peft_config=adapter_config(options),
    )


class Clock(TrainerCallback):
    """Processor seconds of each rollout batch, from its sampling through its updates."""

    def __init__(self, minibatches: int):
        self.minibatches = minibatches
        self.seconds = []
        self.begun = 0.0

    def on_step_begin(self, args, state, control, **_):
        if state.global_step % self.minibatches == 0:
            self.begun = time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.minibatches == 0:
            self.seconds.append(time.process_time() - self.begun)


def copies_of_weights(trainer) -> int:
    """How many models a trainer holds: the policy, and a reference that is no switched adapter."""
    return 1 + (getattr(trainer, "ref_model", None) is not None)


def measure(name: str, prompts: int, answers: int, options, out: Path) -> tuple[list[float], int]:
    """(processor seconds of each counted step, copies of the weights) of one variant."""
    method = "gdpo" if name == "TRL GRPO" else name
    config = settings_of(method, prompts, answers, options)
    examples = ENGLISH.examples(prompts * config.steps, 0, "rl")
    build = trl_trainer if name == "TRL GRPO" else our_trainer
    trainer = build(config, examples, out, options)
    trainer.remove_callback(PrinterCallback)
    clock = Clock(config.minibatches)
    trainer.add_callback(clock)
    copies = copies_of_weights(trainer)
    trainer.train()
    del trainer
    gc.collect()
    return clock.seconds[1:], copies


def sft_seconds(limit: int, options: argparse.Namespace, out: Path) -> list[float]:
    """Processor seconds of each counted update of fine-tuning; below `limit` logits in a batch
    every token is scored."""
    model, tokenizer = start_of(options)
    rows = ENGLISH.demonstrations(8 * (options.steps + 1), 0)
    config = SftConfig(batch_size=8, lora_rank=options.rank, trl={"bf16": options.bf16})
    times = []
    usual = sft_page.LOGITS
    sft_page.LOGITS = limit
    try:
        sft(
            model,
            tokenizer,
            rows,
            config,
            out,
            report=lambda row: times.append(time.process_time()),
        )
    finally:
        sft_page.LOGITS = usual
    return [after - before for before, after in pairwise(times)]


def compare_sft(options: argparse.Namespace) -> None:
    total = {}
    for name, limit in (("every token", 2**62), ("answers alone", 0)):
        with tempfile.TemporaryDirectory() as folder:
            seconds = sft_seconds(limit, options, Path(folder))
        total[name] = sum(seconds)
        ratio = total[name] / total["every token"]
        listed = " ".join(f"{value:.1f}" for value in seconds)
        print(f"{name:16}{statistics.median(seconds):10.1f}{ratio:8.2f}  {listed}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="the weights")
    parser.add_argument("--adapter", type=Path, help="an adapter to merge into them")
    parser.add_argument("--sizes", nargs="+", default=["4x4", "8x8"], metavar="PxA")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl", action="store_true", help="TRL's own GRPO beside them")
    parser.add_argument("--sft", action="store_true", help="updates of fine-tuning instead")
    options = parser.parse_args()
    if not options.folder.is_dir():
        print(f"not measured: no folder {options.folder}; make small-model makes one")
        return 0 if options.folder == FOLDER else 1
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    if options.sft:
        print(f"{options}\n{'scored':16}{'median s':>10}{'ratio':>8}  seconds")
        compare_sft(options)
        return 0
    names = (["TRL GRPO"] if options.trl else []) + list(METHODS)
    print(f"{options}\n{'size':8}{'method':16}{'median s':>10}{'ratio':>8}  copies, seconds")
    for size in options.sizes:
        prompts, answers = map(int, size.split("x"))
        seconds = {name: [] for name in names}
        copies = {}
        for name in [*names, *reversed(names)]:  # there and back: what drifts meets all methods
            with tempfile.TemporaryDirectory() as folder:
                measured, copies[name] = measure(name, prompts, answers, options, Path(folder))
            seconds[name] += measured
        for name in names:
            ratio = sum(seconds[name]) / sum(seconds["gdpo"])
            listed = " ".join(f"{value:.1f}" for value in seconds[name])
            median = statistics.median(seconds[name])
            print(
                f"{size:8}{name:16}{median:10.1f}{ratio:8.2f}  {copies[name]}, {listed}", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
