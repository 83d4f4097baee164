"""Sample reports for the site, made by the practice server: no key, no other host.

`python -m tools.samples FOLDER` writes them; with `--picture FILE` also the picture of the home
page (needs Chromium).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

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
}
QUICK = [
    part
    for setting in ("train.steps=10", "train.eval_every=5", "eval_examples=60", "path_examples=40")
    for part in ("--set", setting)
]  # a training that is short enough for a site's build
FACTS = (
    ("Is allergic to peanuts", "What can I bake?", "A lemon cake: you are allergic to peanuts."),
    ("Moved to Hull in May", "Which train do I take?", "The 7:05; you moved to Hull in May."),
    ("Plays chess on Sundays", "How do I unblock a drain?", "Pour hot water down, then wait."),
    ("Wants short answers", "What is a good book on birds?", "A field guide with drawings."),
)


def log_rows(count: int = 40) -> list[dict]:
    """Invented rows of a log, with answers."""
    rows = []
    for number in range(count):
        fact, question, answer = FACTS[number % len(FACTS)]
        others = [other for other, *_ in FACTS if other != fact][:2]
        memories = [{"text": text} for text in [fact, *others]]
        rows.append({"query": question, "memories": memories, "answer": answer})
    return rows


def write_samples(target: Path) -> None:
    """The sample reports as `target`/NAME.html. Raises `RuntimeError` where a command fails."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        command = [sys.executable, "-c", "from memcalib.commands.cli import main; main()"]
        environment = os.environ | {
            "MEMCALIB_CACHE": str(work / "calls.sqlite"),
            "HF_HUB_OFFLINE": "1",
        }

        def memcalib(*arguments: str) -> None:
            done = subprocess.run(
                [*command, *arguments], cwd=work, env=environment, capture_output=True, text=True
            )
            if done.returncode not in (0, 3):
                said = f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
                raise RuntimeError(
                    f"memcalib {' '.join(arguments)}: exit {done.returncode}\n{said}"
                )

        server = subprocess.Popen(
            [*command, "microserve", "--port", "0"],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            url = server.stdout.readline().split(" at ")[1].split()[0]
            judge = ["--judge", "micro-judge", "--judge-url", url, "--judge-key-env", ""]
            memcalib("exam", *judge, "--out", "runs/exam/micro-judge")
            for model in ("micro-model", "micro-model-weak"):
                server_options = ["--base-url", url, "--key-env", "", "--model", model]
                out = ["--out", f"runs/{model}"]
                memcalib("evaluate", "runs/micro.jsonl", *server_options, *judge, *out)
            compared = ["runs/micro-model-weak", "runs/micro-model"]
            memcalib("compare", *compared, "--out", "runs/comparison")
            rows = "\n".join(json.dumps(row) for row in log_rows())
            (work / "log.jsonl").write_text(rows + "\n", encoding="utf-8")
            log = ["--log", "log.jsonl", "--consent", "invented rows", "--unlabelled", "--yes"]
            memcalib("evaluate", *log, *judge, "--out", "runs/footprints")
        finally:
            server.terminate()
            server.wait(timeout=30)
        memcalib("quickstart", *QUICK, "--out", "runs/quickstart")
        for name, file in (
            ("evaluation", "micro-model/report.html"),
            ("exam", "exam/micro-judge/exam.html"),
            ("comparison", "comparison/comparison.html"),
            ("training", "quickstart/report.html"),
            ("footprints", "footprints/report.html"),
        ):
            shutil.copy(work / "runs" / file, target / f"{name}.html")


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
