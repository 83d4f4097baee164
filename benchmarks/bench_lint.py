"""All checks on a dataset in one file, beside reading and validating it: seconds and peak memory
for 15,000 rows of about 10 kB, each in a process of its own; then the checks once more by all
cores, as `memcalib lint` has them for files above 20 MB.

python benchmarks/bench_lint.py [rows]
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from invented_rows import invented_examples

from memcalib.problem import sample_records

row_count = int(sys.argv[1]) if len(sys.argv) > 1 else 15_000

LINT = """
import sys
from memcalib.products.dataset.lint import lint_files
result = lint_files([sys.argv[1]], processes=int(sys.argv[2]))
warnings = len(result.findings) - len(result.errors)
print(f"{result.rows:,} rows, {len(result.errors)} errors, {warnings} warnings")
"""
VALIDATE = """
import sys
from memcalib.problem import validate_examples
result = validate_examples(sys.argv[1])
print(f"{result.examples:,} rows, {len(result.violations)} faults and warnings")
"""


class Taken(NamedTuple):
    """Seconds that a process took, and seconds of processor with those of its children."""

    seconds: float
    processor: float


def measured(code: str, path: Path, processes: int = 1) -> Taken:
    """Run code on a file in a process of its own, and print what it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(path), str(processes)], check=True)
    seconds = time.perf_counter() - start
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = child.ru_utime + child.ru_stime - before.ru_utime - before.ru_stime
    peak = child.ru_maxrss / 1e6  # of the larger child so far
    print(
        f"{seconds:.1f} s, {used:.1f} s of processor, {1000 * used / row_count:.2f} ms a row, peak "
        f"memory {peak:.2f} GB",
        flush=True,
    )
    return Taken(seconds, used)


with tempfile.TemporaryDirectory() as home:
    path = Path(home) / "data.jsonl"
    rows = cycle([*sample_records(), *invented_examples(720)])
    with open(path, "w", encoding="utf-8") as file:
        for i, row in enumerate(islice(rows, row_count)):
            file.write(row.model_copy(update={"id": f"{row.id}-{i}"}).to_json() + "\n")
    size = path.stat().st_size
    print(f"{size / 1e6:.0f} MB, {size / row_count / 1000:.1f} kB a row", flush=True)
    validated = measured(VALIDATE, path)
    linted = measured(LINT, path)
    cores = os.cpu_count() or 1
    by_all_cores = measured(LINT, path, cores)
ratio = linted.processor / validated.processor
print(f"lint takes {ratio:.1f} times the processor time of validating")
faster = linted.seconds / by_all_cores.seconds
print(f"by {cores} processes {faster:.2f} times as fast as by one")
