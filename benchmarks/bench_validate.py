"""Validating a benchmark-sized file: seconds and peak memory,
beside merely parsing the same JSON in the same process.

python benchmarks/bench_validate.py [records] [kilobytes]
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from memcalib.problem import sample_records, validate_examples

count = int(sys.argv[1]) if len(sys.argv) > 1 else 15_000
size = int(sys.argv[2]) * 1000 if len(sys.argv) > 2 else 10_000

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "records.jsonl"
    rows = [json.loads(record.to_json()) for record in sample_records()]
    with open(path, "w", encoding="utf-8") as file:
        for index in range(count):
            row = {**rows[index % len(rows)], "id": f"r{index}"}
            line = json.dumps(row, ensure_ascii=False)
            row["source_context"] = "x" * max(0, size - len(line))
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    start = time.perf_counter()
    with open(path, encoding="utf-8") as file:
        parsed = sum(1 for line in file if json.loads(line))
    middle = time.perf_counter()
    result = validate_examples(path)
    end = time.perf_counter()
    megabytes = path.stat().st_size / 1e6

peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
assert parsed == result.examples == count and not result.violations
print(f"{count} records, {megabytes:.0f} MB, peak memory {peak:.0f} MB")
print(
    f"parse only {middle - start:.2f} s, validate {end - middle:.2f} s, ratio "
    f"{(end - middle) / (middle - start):.1f}"
)
