"""From stored rows to report.html: seconds and peak memory for 100,000 judged atoms,
in a process of its own.

python benchmarks/bench_report.py [atoms] [letters an answer]
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memcalib.io.runs import manifest, write_manifest
from memcalib.products.micro.world import answer, exact_judge, make_examples
from memcalib.problem import Level, Rollout
from memcalib.io.records import write_jsonl

row_count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
letters = int(sys.argv[2]) if len(sys.argv) > 2 else 2_500
SEEDS = (42, 43, 44)


def play(folder: Path) -> tuple[int, int]:
    """Answers of an oracle whose levels were disturbed by dice, under three seeds,
    each judged; answers and atoms.
    """
    examples = make_examples("long", row_count // 32, seed=5, split="test")
    while sum(len(example.levels) for example in examples) * len(SEEDS) < row_count:
        examples = make_examples("long", len(examples) + 10, seed=5, split="test")
    rollouts = []
    judgments = []
    for seed in SEEDS:
        for example in examples:
            rng = random.Random(f"{seed} {example.id}")

            def shift(rng=rng):
                return rng.choices([1, 0, -1], [0.07, 0.85, 0.08])[0]

            levels = {i: Level(min(max(u + shift(), 0), 2)) for i, u in example.levels.items()}
            text = answer(example, rng, levels)
            text += " Take it step by step." * max(0, (letters - len(text)) // 22)
            usage = {
                "prompt_tokens": 400,
                "completion_tokens": len(text) // 4,
                "seconds": rng.expovariate(0.5),
            }
            head = {"model": "oracle", "seed": seed, "example_hash": example.content_hash}
            rating = {
                "task_quality": rng.randrange(5),
                "safety_failure": rng.random() < 0.02,
                "usage": usage,
            }
            rollouts.append(Rollout(example_id=example.id, response=text, usage=usage, **head))
            judgments.append(exact_judge(example, text).model_copy(update=head | rating))
    for name, rows in (("examples", examples), ("rollouts", rollouts), ("judgments", judgments)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_manifest(folder, manifest({}, SEEDS, folder / "examples.jsonl", "micro-exact-v1"))
    return len(judgments), sum(len(judgment.atoms) for judgment in judgments)


with tempfile.TemporaryDirectory() as home:
    folder = Path(home)
    answers, atoms = play(folder)
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    code = (
        "import sys; from memcalib.report.evaluation_report import write_evaluation_report as "
        "write; write(sys.argv[1])"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    seconds = time.perf_counter() - start
    size = (folder / "report.html").stat().st_size / 1e6

child = resource.getrusage(resource.RUSAGE_CHILDREN)
assert atoms >= row_count
print(
    f"{answers:,} answers, {atoms:,} atoms, {megabytes:.0f} MB of rows, report.html {size:.1f} MB"
)
print(
    f"rows to report.html {seconds:.1f} s (processor {child.ru_utime + child.ru_stime:.1f} s), "
    f"peak memory {child.ru_maxrss / 1024:.0f} MB"
)
