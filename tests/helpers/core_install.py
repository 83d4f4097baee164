"""What an installation without extras must do, as a program:
`python core_install.py FOLDER [HIDDEN...]`.

It checks a file, scores judgments, starts the practice server, evaluates a model and examines a
judge behind it, and is told which extra a training needs. Packages named as HIDDEN are as if they
were not installed.
"""

import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def hide(packages: list[str]) -> None:
    """Have Python find none of these packages, whether they are imported or only asked for."""

    class Hidden(PathFinder):
        @classmethod
        def find_spec(cls, name: str, path=None, target=None):
            if name.partition(".")[0] in packages:
                return None
            return super().find_spec(name, path, target)

    sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]


def command(*arguments: object) -> int:
    """The exit code of a command, run in this process."""
    from memcalib.commands.cli import main

    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code or 0
    return 0


def evaluate(data: Path, url: str, out: Path) -> int:
    """The exit code of an evaluation of the practice model by the practice judge."""
    model = ["--base-url", url, "--model", "micro-model", "--key-env", ""]
    return command("evaluate", data, *model, "--judge", "micro-judge", "--no-cache", "--out", out)


def examine(url: str, out: Path) -> int:
    """The exit code of an examination of the practice judge."""
    judge = ["--judge", "micro-judge", "--judge-url", url, "--judge-key-env", ""]
    return command("exam", *judge, "--set", "answers=60", "--set", "probes=0", "--out", out)


def error_of_trainer() -> str:
    """The message with which the package refuses to load its trainer; empty where it loads."""
    import memcalib as mc

    try:
        mc.CreditTrainer  # noqa: B018 - a name that is loaded when it is asked for
    except ModuleNotFoundError as error:
        return str(error)
    return ""


def run(folder: Path) -> dict:
    """The exit codes of five verbs, the error of the trainer,
    and the heavy packages that were loaded for them.
    """
    import memcalib as mc
    from memcalib.commands.exam import practice_judge
    from memcalib.io.records import write_jsonl
    from memcalib.io.settings import package_data
    from memcalib.products.micro.world import make_examples
    from memcalib.products.micro.practice.server import MicroServer

    data = write_jsonl(folder / "data.jsonl", make_examples("short", 4, 1))
    codes = {"validate": command("validate", package_data("data", "samples.jsonl"))}
    with MicroServer(mc.load_examples(data), practice=practice_judge()) as server:
        codes["evaluate"] = evaluate(data, server.base_url, folder / "run")
        codes["exam"] = examine(server.base_url, folder / "exam")
    codes["score"] = command("score", folder / "run" / "judgments.jsonl")
    codes["train"] = command("train", "micro", "--out", folder / "never")
    message = error_of_trainer()
    loaded = [name for name in ("torch", "transformers", "trl", "peft") if name in sys.modules]
    return {"codes": codes, "error_of_trainer": message, "loaded": loaded}


def run_elsewhere(python: str | Path, folder: Path, hidden: list[str], **options) -> dict:
    """What `run` returns in another Python, and what was written to its standard error."""
    command = [python, __file__, folder, *hidden]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    outcome = json.loads(process.stdout.splitlines()[-1])
    outcome["errors"] = process.stderr
    return outcome


if __name__ == "__main__":
    hide(sys.argv[2:])
    print("\n" + json.dumps(run(Path(sys.argv[1]))))
