"""What corrected scores, exams and optional fields cost: `score` on 100,000 atoms and a whole
`memcalib evaluate`, by this tree and by an older one in turns.

python benchmarks/bench_scores.py [OLDER_TREE] [rounds]

OLDER_TREE is a checkout, such as `git worktree add OLDER_TREE COMMIT` makes one; without one the
same tree is timed against itself, which shows the noise. Seconds are of processor time, of a
process of its own each time; what counts is the ratio.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from memcalib.io.records import write_jsonl
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.practice.server import MicroServer

HERE = Path(__file__).resolve().parents[1]
ATOMS = 100_000
EXAMPLES = 150

SCORE = """
import sys, time
import pandas as pd
from memcalib.metrics import load_judgments, score
judgments = load_judgments(sys.argv[1])
frame = pd.read_parquet(sys.argv[2])
start = time.process_time()
score(judgments)
between = time.process_time()
score(frame)
print(between - start, time.process_time() - between)
"""


def write_rows(folder: Path) -> None:
    """100,000 judged atoms of 12,500 answers to 2,500 questions, as judgments and as a frame."""
    import numpy as np
    import pandas as pd

    generator = np.random.default_rng(0)
    ideal = generator.integers(0, 3, (ATOMS // 8, 8))
    actual = np.clip(ideal + generator.integers(-1, 2, ideal.shape), 0, 2)
    lines = []
    rows = []
    for answer in range(len(ideal)):
        question, seed = divmod(answer, 5)
        atoms = []
        for atom, levels in enumerate(zip(ideal[answer], actual[answer], strict=True)):
            letters = ["ABC"[level] for level in levels]
            atoms.append({"atom_id": f"a{atom}", "ideal": letters[0], "actual": letters[1]})
            rows.append((f"e{question}", seed, f"q{question}", f"a{atom}", *letters))
        judgment = {"example_id": f"e{question}", "domain": "general", "atoms": atoms}
        judgment.update(question_id=f"q{question}", model="m", seed=seed, judge="j")
        lines.append(json.dumps(judgment) + "\n")
    (folder / "judgments.jsonl").write_text("".join(lines))
    names = ["example_id", "seed", "question_id", "atom_id", "ideal", "actual"]
    pd.DataFrame(rows, columns=names).to_parquet(folder / "atoms.parquet")


def run(tree: Path, *arguments: str) -> tuple[str, float]:
    """The output of a Python process with this tree's package, and its processor seconds."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=tree
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr[-2000:])
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, seconds


def times_of(tree: Path, folder: Path, url: str) -> dict[str, float]:
    """Processor seconds of each thing that is timed, once."""
    output, _ = run(
        tree, "-c", SCORE, str(folder / "judgments.jsonl"), str(folder / "atoms.parquet")
    )
    of_judgments, of_frame = map(float, output.split())
    with tempfile.TemporaryDirectory() as out:
        command = ["-m", "memcalib", "evaluate", str(folder / "examples.jsonl")]
        command += ["--model", "micro-model", "--base-url", url, "--judge", "micro-exact"]
        command += ["--no-cache", "--out", f"{out}/run", "--set", f"exams={out}"]
        _, of_evaluation = run(tree, *command)
    return {
        "score of judgments": of_judgments,
        "score of a frame": of_frame,
        "evaluate": of_evaluation,
    }


def main() -> None:
    older = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write_rows(folder)
        examples = make_examples("long", EXAMPLES, seed=1, split="test")
        write_jsonl(folder / "examples.jsonl", examples)
        seconds: dict[str, dict[str, list[float]]] = {}
        with MicroServer(examples) as server:
            for number in range(rounds):
                trees = [("before", older), ("now", HERE)]
                if number % 2 == 0:  # in turns
                    trees.reverse()
                for name, tree in trees:
                    for task, value in times_of(tree, folder, server.base_url).items():
                        seconds.setdefault(task, {}).setdefault(name, []).append(value)
    for task, by_tree in seconds.items():
        pairs = zip(by_tree["now"], by_tree["before"], strict=True)
        ratios = sorted(now / before for now, before in pairs)
        before = statistics.median(by_tree["before"])
        now = statistics.median(by_tree["now"])
        print(
            f"{task}: {before:.2f} s before, {now:.2f} s now, ratio "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} pairs)"
        )


if __name__ == "__main__":
    main()
