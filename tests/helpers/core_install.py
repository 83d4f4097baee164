"""What an installation without extras must do, as a program: `python core_install.py FOLDER [BLOCK...]`.

It checks a file, scores judgments, starts the practice server, evaluates a model and examines a judge behind it, and is told
which extra a training needs. Packages named as BLOCK are as if they were not installed.
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
            return (
                None
                if name.partition(".")[0] in packages
                else super().find_spec(name, path, target)
            )

    sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]


def command(*arguments: object) -> int:
    """The exit code of a command, run in this process."""
    from memcalib.commands.cli import main

    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code or 0
    return 0


def run(folder: Path) -> dict:
    import memcalib as mc
    from memcalib.io.records import write_jsonl
    from memcalib.io.settings import package_data
    from memcalib.practice.server import MicroServer
    from memcalib.micro.world import make_examples

    write_jsonl(folder / "data.jsonl", make_examples("short", 4, 1))
    codes = {"validate": command("validate", package_data("data", "samples.jsonl"))}
    from memcalib.commands.exam import practice_judge

    server = MicroServer(mc.load_examples(folder / "data.jsonl"), practice=practice_judge())
    with server:
        where = [
            "--base-url",
            server.base_url,
            "--model",
            "micro-model",
            "--key-env",
            "",
            "--judge",
            "micro-judge",
        ]
        codes["evaluate"] = command(
            "evaluate", folder / "data.jsonl", *where, "--no-cache", "--out", folder / "run"
        )
        judge = [
            "--judge",
            "micro-judge",
            "--judge-url",
            server.base_url,
            "--judge-key-env",
            "",
            "--set",
            "answers=60",
            "--set",
            "probes=0",
        ]
        codes["exam"] = command("exam", *judge, "--out", folder / "exam")
    codes["score"] = command("score", folder / "run" / "judgments.jsonl")
    codes["train"] = command("train", "micro", "--out", folder / "never")
    try:
        mc.CreditTrainer  # noqa: B018 - a name that is loaded when it is asked for
        said = ""
    except ModuleNotFoundError as error:
        said = str(error)
    loaded = [name for name in ("torch", "transformers", "trl", "peft") if name in sys.modules]
    return {"codes": codes, "said": said, "loaded": loaded}


def run_elsewhere(python: str | Path, folder: Path, block: list[str], **options) -> dict:
    """The result of this program, run by a Python."""
    done = subprocess.run(
        [python, __file__, folder, *block], capture_output=True, text=True, timeout=280, **options
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"errors": done.stderr}


if __name__ == "__main__":
    hide(sys.argv[2:])
    result = run(Path(sys.argv[1]))
    print("\n" + json.dumps(result))
