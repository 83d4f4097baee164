"""How far float32 token advantages are from the slow reference of the tests,
and from float64, whichever way they are read.

    python benchmarks/bench_rounding.py [--seeds 8]

Each seed trains two steps of MemCalib-RL on the micro-world by tokens and two by sentences, and
reads every batch again: one row at a time in float32, one row at a time in float64, and from the
trainer's own log-probabilities. The largest difference over all batches stands in the table; then
the largest beside the largest advantage of the same answer, and how many batches hold an advantage
that differs by more than 1e-4.
"""

import argparse
import copy
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trainer"))

import test_reference_steps as steps

from memcalib.products.micro.world import exact_judge


def largest(one: list[list[float]], other: list[list[float]]) -> tuple[float, float]:
    """The largest difference of two ragged tables, and the largest beside the largest of its row in
    the second.
    """
    gap = (steps.ragged(one) - steps.ragged(other)).abs().amax(1)
    size = steps.ragged(other).abs().amax(1)
    return gap.max().item(), (gap / size.clamp(min=1e-9)).max().item()


def logps_as_read(rollout, slow) -> dict[tuple, list[float]]:
    """The log-probabilities that the trainer read, by prompt and answer."""
    full = rollout.batch["old_per_token_logps"].double()
    differences = rollout.credit.pairs.d
    answers = rollout.judged.ids
    logps_by_ids = {}
    for row, (prompt, answer) in enumerate(zip(slow.prompts, answers, strict=True)):
        logps_by_ids[*prompt, -1, *answer] = full[row, : len(answer)].tolist()
    for k, pair in enumerate(slow.pairs):
        answer = answers[pair.row]
        without = full[pair.row, : len(answer)] - differences[k, : len(answer)]
        logps_by_ids[*pair.prompt, -1, *answer] = without.tolist()
    return logps_by_ids


def rollout_rows(trainer, rollout) -> dict[str, tuple[float, float, float]]:
    """Of one rollout batch: the largest difference of log-probabilities, and of advantages,
    for each two ways of reading it.
    """
    slow = steps.slow_step(trainer, rollout)
    logps_by_ids = logps_as_read(rollout, slow)
    same = steps.slow_step(
        trainer, rollout, lambda prompt, answer: logps_by_ids[*prompt, -1, *answer]
    )
    deep = partial(steps.read, copy.deepcopy(rollout.policy).double(), trainer.temperature)
    exact = steps.slow_step(trainer, rollout, deep)
    ids = rollout.judged.ids

    def cut(table):
        return [row[: len(y)].tolist() for row, y in zip(table, ids, strict=True)]

    fast = (cut(rollout.batch["old_per_token_logps"]), cut(rollout.credit.advantages))
    ways = {
        "trainer, slow reference": (fast, slow),
        "trainer, float64": (fast, exact),
        "slow reference, float64": ((slow.full, slow.advantages), exact),
        "trainer, slow credit of its log-probs": (fast, same),
    }
    return {
        name: (largest(logps, other.full)[0], *largest(advantages, other.advantages))
        for name, ((logps, advantages), other) in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    seeds = parser.parse_args().seeds
    table = {}
    batches = 0
    logging.disable(logging.WARNING)
    for seed in range(seeds):
        for granularity in ("token", "sentence"):
            judge = steps.drawn if seed % 2 else exact_judge
            with tempfile.TemporaryDirectory() as out:
                trainer = steps.watch(
                    out, double=False, seed=seed, granularity=granularity, judge=judge
                )
            for rollout in trainer.rollouts:
                batches += 1
                for name, row in rollout_rows(trainer, rollout).items():
                    table.setdefault(name, []).append(row)
    heads = "".join(f"{head:>12}" for head in ("log-probs", "advantages", "relative", "over 1e-4"))
    print(f"{batches} batches\n{'largest difference of':40}{heads}")
    for name, rows in table.items():
        over = sum(advantages > 1e-4 for _, advantages, _ in rows)
        print(
            f"{name:40}"
            + "".join(f"{max(values):12.1e}" for values in zip(*rows, strict=True))
            + f"{over:12}"
        )


if __name__ == "__main__":
    main()
