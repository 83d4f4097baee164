"""How long the page of a large log takes to be written and to open.

    python benchmarks/bench_log_page.py [--answers 5000] [--memories 40] [--seed 0]

A log is invented: each row has a query, so many memories, an answer and ideal levels. A judge made
of draws judges it, `memcalib evaluate` writes the page, once with scores and once without ideal
levels, and Chromium opens each page from the disk three times, as wide as a desk. Printed are
seconds of writing, size, and the median of the seconds until the page is loaded and drawn. The
target is two seconds to open.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from memcalib.commands.evaluate import Evaluation, EvaluationRun
from memcalib.io.records import write_whole
from memcalib.problem import AtomJudgment, Example, Judgment, Level, text_hash

SUBJECTS = [
    "tea",
    "kayak",
    "chess",
    "garden",
    "piano",
    "train",
    "bread",
    "violin",
    "atlas",
    "candle",
]
VERBS = ["likes", "owns", "sold", "repaired", "lost", "found", "painted", "borrowed"]
LETTERS = "ABC"


def planted_log(answers: int, memories: int, seed: int) -> list[dict]:
    """Rows of a log with ideal levels; each memory stands in many rows."""
    generator = random.Random(seed)
    rows = []
    for number in range(answers):
        items = []
        for position in range(memories):
            subject = SUBJECTS[generator.randrange(len(SUBJECTS))]
            verb = VERBS[generator.randrange(len(VERBS))]
            text = f"{verb} the {subject} number {generator.randrange(4000)} of shelf {position}"
            items.append(
                {
                    "id": f"m-{text_hash(text, 8)}",
                    "text": text,
                    "created_at": f"2025-0{1 + position % 9}-1{number % 9}",
                    "level": generator.choices(LETTERS, (8, 2, 1))[0],
                }
            )
        words = " ".join(item["text"] for item in generator.sample(items, 3))
        rows.append(
            {
                "id": f"q{number}",
                "query": f"What about {SUBJECTS[number % len(SUBJECTS)]} on day {number}?",
                "memories": items,
                "answer": f"Since you {words}, I would wait. " * 3,
            }
        )
    return rows


def drawn(example: Example, response: str) -> Judgment:
    """A judgment by draws that follow from the example: most right, some off, few misread."""
    generator = random.Random(text_hash(example.id + response))
    atoms = []
    for atom in example.atoms:
        level = atom.ideal if generator.random() < 0.9 else Level(generator.randrange(3))
        stance = None
        if level:
            stance = "misreads" if generator.random() < 0.02 else "follows"
        atoms.append(
            AtomJudgment(
                atom_id=atom.atom_id,
                parent_memory_id=atom.parent_memory_id,
                ideal=atom.ideal,
                actual=level,
                stance=stance,
                quote=response[:60] if level else "",
                reason="drawn",
            )
        )
    return Judgment(
        example_id=example.id,
        question_id=example.question_id,
        example_hash=example.content_hash,
        domain=example.domain,
        judge="drawn",
        atoms=atoms,
        task_quality=generator.randrange(2, 5),
        safety_failure=False,
    )


def opened(page_file: Path, times: int = 3) -> float:
    """Median seconds until Chromium has loaded and drawn a page from the disk."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    seconds = []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(times):
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            started = time.perf_counter()
            page.goto(page_file.resolve().as_uri(), wait_until="load")
            page.evaluate(
                "() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"
            )
            seconds.append(time.perf_counter() - started)
            page.close()
        browser.close()
    return statistics.median(seconds)


def measured(folder: Path, rows: list[dict], unlabelled: bool) -> str:
    """Evaluate the rows into a folder, write and open the page; one line of figures."""
    log = folder / "log.jsonl"
    if not log.exists():
        write_whole(log, "".join(json.dumps(row) + "\n" for row in rows))
    plan = {"file": str(log), "consent": "invented rows", "unlabelled": unlabelled, "merge": False}
    settings = Evaluation.model_validate(
        {"log": plan, "judge": "bench_log_page:drawn", "exams": str(folder / "exams")}
    )
    started = time.perf_counter()
    run = EvaluationRun(settings, folder / ("footprints" if unlabelled else "scores"))
    read = time.perf_counter() - started
    started = time.perf_counter()
    run.agree(True).generate()
    run.judge()
    judged = time.perf_counter() - started
    started = time.perf_counter()
    page = run.report()
    written = time.perf_counter() - started
    megabytes = page.stat().st_size / 1e6
    return (
        f"{'footprints' if unlabelled else 'scores'}: read {read:.0f} s, judged {judged:.0f} s, "
        f"written {written:.1f} s, {megabytes:.2f} MB, opens in {opened(page):.2f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=5000)
    parser.add_argument("--memories", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = planted_log(options.answers, options.memories, options.seed)
    with tempfile.TemporaryDirectory() as name:
        for unlabelled in (False, True):
            print(measured(Path(name), rows, unlabelled), flush=True)
