"""Trace files against lines of JSON, and the linear decoder against ever longer beginnings,
on a step of the paper's size.

Run: python benchmarks/bench_traces.py [--answers 512] [--tokens 300]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from memcalib.redistribution import PairDetail
from memcalib.trainer.rewards import ChannelRewards
from memcalib.rules.base import Pairs
from memcalib.inference.token_rows import prefix_spans
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.policy import build_tokenizer
from memcalib.credit.assignment import Credit
from memcalib.redistribution import project_multipliers, raw_multipliers
from memcalib.inference.token_rows import decode_rows
from memcalib.trainer.traces import TraceWriter, trace_row
from memcalib.trainer.trace_files import read_traces


def a_step(tokenizer, rows: int, width: int, seed: int = 0) -> tuple[ChannelRewards, Credit, Pairs]:
    """A judged batch with three pairs an answer; all numbers drawn at random,
    which compress worse than real ones.
    """
    rng = torch.Generator().manual_seed(seed)
    count = 3 * rows
    examples = make_examples("short", 3, 0, "test")
    desk = ChannelRewards(None, [])
    desk.examples = [examples[k % 3] for k in range(rows)]
    desk.valid = torch.ones(rows, dtype=torch.bool)
    desk.ids = torch.randint(16, len(tokenizer), (rows, width), generator=rng).tolist()
    desk.texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in desk.ids]
    desk.rewards = torch.rand(rows, 9, generator=rng)
    d = 0.1 * torch.randn(count, width, generator=rng).double() ** 3
    inside = torch.ones(count, width, dtype=torch.bool)
    q = (d - 0.08).relu()
    row = torch.arange(count) // 3
    channel = torch.tensor([2, 4, 8]).repeat(rows)
    m = project_multipliers(raw_multipliers(q, inside), inside)
    detail = PairDetail(row, channel, d, q, m, torch.full((count,), 0.75), *[inside[:, 0]] * 4)
    advantages = torch.randn(rows, width, generator=rng)
    credit = Credit(advantages, advantages.mean(1), torch.randn(rows, 9, generator=rng), {}, detail)
    atoms = []
    for example in desk.examples:
        atoms += [tuple(example.levels)[:1]] * 3
    return desk, credit, Pairs(row.tolist(), channel.tolist(), atoms, [])


def seconds(work, rounds: int = 3) -> float:
    """The best time of a few rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Print the two comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    desk, credit, pairs = a_step(tokenizer, options.answers, options.tokens)
    sampled = desk.ids[: max(1, options.answers // 32)]
    share = options.answers / len(sampled)
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(folder)
        writing = seconds(lambda: writer.write(1, desk, credit, pairs, tokenizer))
        size = writer.path(1).stat().st_size
        reading = seconds(lambda: read_traces(folder))
        lines = Path(folder) / "lines.jsonl"

        def write_lines() -> None:
            with open(lines, "w", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(trace_row(desk, credit, pairs, row, tokenizer)) + "\n"
                    for row in range(len(sampled))
                )

        as_lines = seconds(write_lines, 1) * share
        line_size = lines.stat().st_size * share
    linear = seconds(lambda: decode_rows(tokenizer, desk.ids))
    beginnings = seconds(lambda: [prefix_spans(tokenizer, ids) for ids in sampled], 1)
    print(f"{options.answers} answers of {options.tokens} tokens, {len(pairs)} pairs")
    print(
        f"one Parquet file: {size / 1e6:.2f} MB, written in {writing:.2f} s, read in {reading:.2f} "
        "s"
    )
    print(
        f"lines of JSON (from {len(sampled)} answers): {line_size / 1e6:.2f} MB, written in "
        f"{as_lines:.2f} s"
    )
    print(f"ratio: {line_size / size:.1f} times smaller, {as_lines / writing:.1f} times faster")
    print(
        f"ends of tokens: {linear:.3f} s against {beginnings * share:.2f} s, "
        f"{beginnings * share / linear:.0f} times faster"
    )


if __name__ == "__main__":
    main()
