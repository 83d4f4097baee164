"""All checks on a dataset in one file, beside reading and validating it: seconds and peak memory
for 15,000 rows of about 10 kB, each in a process of its own.

python benchmarks/bench_lint.py [rows]
"""

import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from invented_rows import invented_examples

from memcalib.problem import sample_records

wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 15_000

LINT = """
import sys
from memcalib.dataset.lint import lint_files
result = lint_files([sys.argv[1]], limits=None)
warnings = len(result.findings) - len(result.errors)
print(f"{result.rows:,} rows, {len(result.errors)} errors, {warnings} warnings")
"""
VALIDATE = """
import sys
from memcalib.problem import validate_examples
result = validate_examples(sys.argv[1])
print(f"{result.examples:,} rows, {len(result.violations)} faults and warnings")
"""


def measured(code: str, path: Path) -> float:
    """Run code on a file in a process of its own, and print what it took; returns seconds of
    processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    seconds = time.perf_counter() - start
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = child.ru_utime + child.ru_stime - before.ru_utime - before.ru_stime
    peak = child.ru_maxrss / 1e6  # of the larger child so far
    print(
        f"{seconds:.1f} s, {used:.1f} s of processor, {1000 * used / wanted:.2f} ms a row, peak "
        f"memory {peak:.2f} GB",
        flush=True,
    )
    return used


with tempfile.TemporaryDirectory() as home:
    path = Path(home) / "data.jsonl"
    rows = cycle([*sample_records(), *invented_examples(720)])
    with open(path, "w", encoding="utf-8") as file:
        for i, row in enumerate(islice(rows, wanted)):
            file.write(row.model_copy(update={"id": f"{row.id}-{i}"}).to_json() + "\n")
    size = path.stat().st_size
    print(f"{size / 1e6:.0f} MB, {size / wanted / 1000:.1f} kB a row", flush=True)
    validated = measured(VALIDATE, path)
    linted = measured(LINT, path)
print(f"lint takes {linted / validated:.1f} times the processor time of validating")
