"""Time of one training step on the micro shapes: TRL's own GRPO against the three methods,
interleaved in one run.

    python benchmarks/bench_step.py [--steps 6] [--rounds 2] [--threads 2] [--world short]
                                    [--policy PATH] [--all]

Every trainer starts from the same weights, sees the same prompts and judges with the same exact
judge. A step is one rollout batch of 16 prompts x 8 answers with two optimizer updates and a KL
term. Times are medians over the steps after the first one; the ratio is to TRL's GRPO trainer with
one reward function, the sum of the nine channels. Processor time stands beside wall time, because
only the former means something on a machine that others use too; ratios are of it.
"""

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import PrinterCallback
from trl import GRPOTrainer

from memcalib.channels import channel_rewards, judgment_tensors
from memcalib.trainer.rewards import prompt_dataset
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer, load_policy
from memcalib.problem import judge_all
from memcalib.trainer.train_config import TrainConfig, trl_config, world_config
from memcalib.training import CreditTrainer

VARIANTS = {
    "TRL GRPO (base)": None,
    "GRPO": dict(method="grpo"),
    "GDPO": dict(method="gdpo"),
    "MemCalib-RL": dict(method="memcalib-rl"),
    "MemCalib-RL, open pairs": dict(method="memcalib-rl", threshold_pool="open"),
    "GDPO, nothing shared": dict(method="gdpo", share_prompts=False),
    "GDPO, library sampling": dict(method="gdpo", sampler="generate", share_prompts=False),
    "MemCalib-RL, library sampling": dict(
        method="memcalib-rl", sampler="generate", share_prompts=False
    ),
}


def start_policy(path: str | None):
    if path == "untrained":
        return build_policy(0)
    return load_policy(path)[0]


def base_trainer(config: TrainConfig, policy, tokenizer, examples, out: Path) -> GRPOTrainer:
    """TRL's own trainer on the same prompts, sizes and rewards."""

    def total(completions, example, **_):
        judged = judge_all(
            exact_judge, [examples[i] for i in example], [c[0]["content"] for c in completions]
        )
        ideal, actual, mask, _ = judgment_tensors(judged)
        return channel_rewards(ideal, actual, mask).sum(1).tolist()

    policy.save_pretrained(out / "reference")
    policy.config._name_or_path = str(out / "reference")
    dataset = prompt_dataset(config, tokenizer, examples)
    trainer = GRPOTrainer(
        policy, [total], trl_config(config, out), dataset, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Clock:
    """Times each rollout batch of a trainer through its optimizer steps."""

    def __init__(self, trainer, minibatches: int):
        self.times = []
        self.minibatches = minibatches
        inner = trainer.training_step

        def timed(*args, **kwargs):
            begin = time.perf_counter(), time.process_time()
            result = inner(*args, **kwargs)
            self.times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            return result

        trainer.training_step = timed

    def steps(self) -> list[tuple[float, float]]:
        """(wall, processor) seconds of each rollout batch."""
        parts = [
            self.times[i : i + self.minibatches]
            for i in range(0, len(self.times), self.minibatches)
        ]
        return [tuple(map(sum, zip(*batch, strict=True))) for batch in parts]


def measure(
    variants: dict,
    world: str,
    steps: int,
    rounds: int,
    prompts: int = 16,
    generations: int = 8,
    policy=None,
):
    """Median (wall, processor) seconds of a step of each variant."""
    tokenizer = build_tokenizer()
    examples = make_examples(world, prompts * steps, seed=0)
    seconds_by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name, change in variants.items():
            sizes = dict(prompts=prompts, generations=generations, steps=steps, seed=turn)
            config = world_config(WORLDS[world], **sizes | (change or {}))
            start = start_policy(policy or WORLDS[world].policy)
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder)
                if change is None:
                    trainer = base_trainer(config, start, tokenizer, examples, out)
                else:
                    parts = dict(
                        args=trl_config(config, out),
                        train_dataset=examples,
                        processing_class=tokenizer,
                    )
                    trainer = CreditTrainer(start, judge=exact_judge, **parts)
                clock = Clock(trainer, config.minibatches)
                trainer.train()
                seconds_by_name[name] += clock.steps()[1:]
    medians = {}
    for name, times in seconds_by_name.items():
        medians[name] = [statistics.median(column) for column in zip(*times, strict=True)]
    return medians


def table(medians: dict[str, list[float]], base: str = "TRL GRPO (base)") -> str:
    """One line for each variant: wall time, processor time, and its ratio to the base's."""
    lines = [f"{'step of':32}{'wall s':>10}{'CPU s':>10}{'ratio':>8}"]
    for name, (wall, processor) in medians.items():
        lines.append(f"{name:32}{wall:10.3f}{processor:10.3f}{processor / medians[base][1]:8.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--world", default="short", choices=sorted(WORLDS))
    parser.add_argument(
        "--policy", default=None, help="folder or shipped name; default: the world's; 'untrained'"
    )
    parser.add_argument(
        "--all", action="store_true", help="variants beside the base and the three methods"
    )
    options = parser.parse_args()
    variants = VARIANTS if options.all else dict(list(VARIANTS.items())[:4])
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    medians = measure(variants, options.world, options.steps, options.rounds, policy=options.policy)
    shape = f"{options.threads} threads, {options.rounds} x {options.steps} steps"
    print(f"{options.world}, 16 prompts x 8 answers, {shape}\n{table(medians)}")


if __name__ == "__main__":
    main()
