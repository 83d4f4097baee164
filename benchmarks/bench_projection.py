"""Exact projection against bisection: prints one ratio per baseline, all measured in this run.

    python benchmarks/bench_projection.py [rows] [tokens]

The scalar baseline is `project_reference` (100 rounds of plain Python floats). The second baseline
does the same 100 rounds row by row with numpy's vector arithmetic. Both run on every row unless a
time limit is reached, in which case the printed line says on how many rows they ran and the time is
scaled to all.
"""

import sys
import time

import numpy as np
import torch

from memcalib.redistribution import project_multipliers, project_reference, raw_multipliers

LIMIT = 120.0


def numpy_row(m: np.ndarray, cap: float = 4.0, rounds: int = 100) -> np.ndarray:
    """One row by bisection with vector arithmetic."""
    low = m.min() - cap
    high = m.max()
    for _ in range(rounds):
        tau = (low + high) / 2
        if np.clip(m - tau, 0, cap).sum() > len(m):
            low = tau
        else:
            high = tau
    return np.clip(m - (low + high) / 2, 0, cap)


def timed_rows(function, rows) -> tuple[list, float]:
    """Results and the seconds that all rows take, scaled when the limit cuts in."""
    out = []
    start = time.perf_counter()
    for row in rows:
        out.append(function(row))
        if time.perf_counter() - start > LIMIT:
            break
    return out, (time.perf_counter() - start) * len(rows) / len(out)


def main(rows: int = 4096, tokens: int = 512) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    q = (torch.rand(rows, tokens, generator=generator, dtype=torch.float64) - 0.8).relu() ** 2
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    m = raw_multipliers(q, mask)
    project_multipliers(m[:8], mask[:8])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        fast = project_multipliers(m, mask)
        times.append(time.perf_counter() - start)
    ours = sorted(times)[2]
    print(f"{rows} x {tokens}: exact projection {ours:.3f} s (median of 5)")
    baselines = (
        ("scalar bisection", project_reference, m.tolist()),
        ("numpy bisection, row by row", numpy_row, m.numpy()),
    )
    for name, function, data in baselines:
        out, seconds = timed_rows(function, data)
        apart = np.abs(np.array(out) - fast[: len(out)].numpy()).max()
        note = "all rows" if len(out) == rows else f"scaled from {len(out)} rows"
        print(
            f"{name}: {seconds:.2f} s ({note}), ratio {seconds / ours:.0f}x, largest difference "
            f"{apart:.1e}"
        )
    print(
        f"mean off by at most {(fast.float().mean(1) - 1).abs().max():.1e} in float32, largest "
        f"{fast.max():.6f}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
