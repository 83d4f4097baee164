"""Sample reports for the site, made by the practice server: no key, no other host.

`python -m tools.samples FOLDER` writes them; with `--picture FILE` also the picture of the home
page (needs Chromium).
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from markdown_it import MarkdownIt

from memcalib.products.micro.practice.memory_system import practice_log, write_practice_log

SAMPLES = {
    "evaluation": (
        "Evaluation",
        "A model with and without its memory: six metrics, controls, worst answers "
        "(`memcalib evaluate`).",
    ),
    "exam": (
        "Exam of a judge",
        "Whether a judge reads levels that are known, and what its errors would do to a score "
        "(`memcalib exam`).",
    ),
    "comparison": (
        "Comparison",
        "Two models on the same questions, difference by difference (`memcalib compare`).",
    ),
    "training": (
        "Training",
        "Three short trainings in the micro-world, their curves and their scores "
        "(`memcalib quickstart`).",
    ),
    "footprints": (
        "Answers of your own",
        "A log whose answers exist, without labels: which memories left a trace and which decided "
        "(`memcalib evaluate --log`).",
    ),
    "memories": (
        "Memories of a memory system",
        "What became of each memory of a log: which hijack answers, are stale, are never used "
        "(`memcalib memories`).",
    ),
    "sweep": (
        "Sweep of retrieval and framing",
        "How many memories, and in which words: settings side by side, with the best one "
        "(`memcalib sweep`).",
    ),
    "gate": (
        "Gate",
        "The summary that a pull request shows when a build uses memory worse than its baseline "
        "(`memcalib gate`).",
    ),
}
REPORTS = {
    "evaluation": "micro-model/report.html",
    "exam": "exam/micro-judge/exam.html",
    "comparison": "comparison/comparison.html",
    "training": "quickstart/report.html",
    "footprints": "footprints/report.html",
    "memories": "own/memories.html",
    "sweep": "sweep/sweep.html",
}  # where the commands write them, below runs/
QUICK = [
    "--set",
    "models.short.settings.train={steps: 10, eval_every: 5}",
    "--set",
    "models.short.settings.data={world: {validation: 40, test: 60}}",
]  # trainings that are short enough for a site's build
FACTS = (
    ("Is allergic to peanuts", "What can I bake?", "A lemon cake: you are allergic to peanuts."),
    ("Moved to Hull in May", "Which train do I take?", "The 7:05; you moved to Hull in May."),
    ("Plays chess on Sundays", "How do I unblock a drain?", "Pour hot water down, then wait."),
    ("Wants short answers", "What is a good book on birds?", "A field guide with drawings."),
)


QUESTIONS = 60  # of the practice memory system


def log_rows(count: int = 40) -> list[dict]:
    """Invented rows of a log, with answers."""
    rows = []
    for number in range(count):
        fact, question, answer = FACTS[number % len(FACTS)]
        others = [other for other, *_ in FACTS if other != fact][:2]
        memories = [{"text": text} for text in [fact, *others]]
        rows.append({"query": question, "memories": memories, "answer": answer})
    return rows


class Workplace:
    """A folder in which commands run beside a practice server, without another host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, "-c", "from memcalib.commands.cli import main; main()"]
        self.environment = os.environ | {
            "MEMCALIB_CACHE": str(folder / "calls.sqlite"),
            "HF_HUB_OFFLINE": "1",
        }

    def memcalib(self, *arguments: str) -> None:
        """Run a command. Raises `RuntimeError` where it fails; a gate that is closed does not."""
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 3):
            said = f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
            raise RuntimeError(f"memcalib {' '.join(arguments)}: exit {done.returncode}\n{said}")

    @contextmanager
    def server(self, *options: str) -> Iterator[str]:
        """The address of a practice server."""
        program = subprocess.Popen(
            [*self.command, "practice", "--port", "0", *options],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield program.stdout.readline().split(" at ")[1].split()[0]
        finally:
            program.terminate()
            program.wait(timeout=30)

    def write_rows(self, name: str, rows: Iterable[dict]) -> None:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (self.folder / name).write_text(text, encoding="utf-8")


def judge_at(url: str) -> list[str]:
    return ["--judge", "micro-judge", "--judge-url", url, "--judge-key-env", ""]


def evaluate_models(work: Workplace) -> None:
    """An exam, two evaluations and their comparison, answers of a log, a training."""
    with work.server() as url:
        judge = judge_at(url)
        work.memcalib("exam", *judge, "--out", "runs/exam/micro-judge")
        for model in ("micro-model", "micro-model-weak"):
            server_options = ["--base-url", url, "--key-env", "", "--model", model]
            out = ["--out", f"runs/{model}"]
            work.memcalib("evaluate", "runs/micro.jsonl", *server_options, *judge, *out)
        compared = ["runs/micro-model-weak", "runs/micro-model"]
        work.memcalib("compare", *compared, "--out", "runs/comparison")
        work.write_rows("log.jsonl", log_rows())
        log = ["--log", "log.jsonl", "--consent", "invented rows", "--unlabelled", "--yes"]
        work.memcalib("evaluate", *log, *judge, "--out", "runs/footprints")
    work.memcalib("quickstart", *QUICK, "--out", "runs/quickstart")


def check_memory_system(work: Workplace) -> None:
    """The way of the tutorial *Does my memory help?*: memories, sweep, gate."""
    consent = ["--consent", "invented rows", "--yes"]
    write_practice_log(work.folder / "system.jsonl", QUESTIONS)
    with work.server("--count", "1") as url:
        judge = judge_at(url)
        work.memcalib("evaluate", "--log", "system.jsonl", *consent, *judge, "--out", "runs/own")
        work.memcalib("memories", "runs/own")
        model = ["--model", "micro-memory-model", "--base-url", url, "--key-env", ""]
        settings = ["--top-k", "2,4,6", "--framing", "authoritative,advice"]
        settings += ["--today-framing", "authoritative", "--set", "grid.full=true"]
        options = [*consent, *settings, *model, *judge, "--out", "runs/sweep"]
        work.memcalib("sweep", "system.jsonl", *options)
        for name, count, is_binding in (("good", 4, False), ("broken", 8, True)):
            rows = practice_log(QUESTIONS, k=count, binding=is_binding)
            for row in rows:
                candidates = row.pop("candidates")
                row["memories"] = [{**memory, "in_prompt": True} for memory in candidates]
            work.write_rows(f"{name}.jsonl", rows)
            log = ["--log", f"{name}.jsonl", *consent, *judge]
            work.memcalib("evaluate", *log, "--out", f"runs/{name}")
    work.memcalib("gate", "runs/good", "--save", "evals/baseline")
    work.memcalib("gate", "runs/broken", "--baseline", "evals/baseline", "--max-drop", "2")


NO_ICON = '<link rel="icon" href="data:,">'  # else a browser asks the host for one


def with_icon(page: str) -> str:
    """A report that stands on a host."""
    return page.replace("</title>", f"</title>\n{NO_ICON}", 1)


def as_page(title: str, markdown: str) -> str:
    """Markdown as a page of its own, as wide as a comment of a pull request."""
    body = MarkdownIt("commonmark").enable("table").render(markdown)
    style = (
        ":root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; "
        "max-width: 52rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word } "
        "table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0 } "
        "td, th { border: 1px solid #8886; padding: .3rem .7rem; text-align: left }"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"{NO_ICON}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head>\n<body>\n{body}</body></html>\n"
    )


def write_samples(target: Path) -> None:
    """The sample reports as `target`/NAME.html. Raises `RuntimeError` where a command fails."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Workplace(Path(folder))
        evaluate_models(work)
        check_memory_system(work)
        runs = work.folder / "runs"
        for name, file in REPORTS.items():
            report = (runs / file).read_text(encoding="utf-8")
            (target / f"{name}.html").write_text(with_icon(report), encoding="utf-8")
        summary = (runs / "gate" / "gate.md").read_text(encoding="utf-8")
        (target / "gate.html").write_text(as_page("Gate", summary), encoding="utf-8")


def picture(report: Path, target: Path) -> None:
    """The top of a report as a PNG, 900 pixels wide."""
    from playwright.sync_api import sync_playwright

    from tools.check_docs import chromium_on_path

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium_on_path())
        tab = browser.new_page(viewport={"width": 900, "height": 960})
        tab.goto(report.resolve().as_uri())
        tab.screenshot(path=target)
        browser.close()


def main() -> None:
    parser = ArgumentParser(prog="python -m tools.samples", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path, help="PNG of the top of the evaluation's report")
    options = parser.parse_args()
    write_samples(options.folder)
    if options.picture:
        picture(options.folder / "evaluation.html", options.picture)


if __name__ == "__main__":
    main()
