"""What `memcalib logs` costs a row: reading, redaction and preview of a log, beside the plainest
way to read the same file: `json.loads` of each line, and one search for an address in each text.

    python benchmarks/bench_log_reading.py [rows]

All texts of the first log differ, so that nothing can be remembered; in the second the memories
come from a store of two hundred, as they do in a system that is in use.
"""

import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from memcalib.products.memory_logs.own_answers import LogPlan, own_answers

WORDS = (
    "user likes climbing near the river takes early train to Leeds moved Graz in May plays chess "
    "on Sundays prefers short answers works at bakery has two cats wants a lemon cake for office "
    "bought kayak last year and asked about flour sugar butter the price of tickets is fine"
).split()
ALLOWED = 2.0  # milliseconds of processor a row


def sentence(rng: random.Random, length: int) -> str:
    """So many words, with a number and a day among them."""
    words = rng.choices(WORDS, k=length)
    words.insert(length // 2, f"on 2025-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}")
    return " ".join(words).capitalize() + f" {rng.randint(1, 999)}."


def write_log(path: Path, rows: int, store: int) -> None:
    """A log of so many rows with six memories each, out of a store of this size; 0: all differ."""
    rng = random.Random(7)
    stored = [sentence(rng, 16) for _ in range(store)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            texts = rng.sample(stored, 6) if store else [sentence(rng, 16) for _ in range(6)]
            memories = [
                {"id": f"m{i}", "text": text, "score": round(rng.random(), 3)}
                for i, text in enumerate(texts)
            ]
            row = {
                "id": f"q{number}",
                "query": sentence(rng, 12),
                "memories": memories,
                "answer": sentence(rng, 60),
                "user": f"user-{number % 50}",
            }
            file.write(json.dumps(row) + "\n")


def plainest(path: Path) -> float:
    """Milliseconds a row of the plainest reading."""
    mail = re.compile(r"[\w.+-]+@[\w-]+\.\w+")
    start = time.process_time()
    count = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for text in (row["query"], row["answer"], *(m["text"] for m in row["memories"])):
            mail.search(text)
        count += 1
    return 1000 * (time.process_time() - start) / count


def ours(path: Path, rows: int) -> float:
    """Milliseconds a row of `memcalib logs`."""
    plan = LogPlan(file=str(path), without_consent=True)
    start = time.process_time()
    answers = own_answers(plan, answers_needed=False, shown=10)
    answers.preview()
    assert answers.answer_count == rows
    return 1000 * (time.process_time() - start) / rows


def main() -> None:
    """Print the cost of both logs, and the ratios."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        write_log(path, 20, 0)
        ours(path, 20)  # imports and caches
        for name, store in (("every text another", 0), ("memories of a store of 200", 200)):
            write_log(path, rows, store)
            base, cost = plainest(path), ours(path, rows)
            print(
                f"{name}: {cost:.2f} ms a row, {cost / base:.0f} times the plainest reading "
                f"({base:.3f} ms); {cost / ALLOWED:.2f} of what is allowed ({ALLOWED} ms)"
            )


if __name__ == "__main__":
    main()
