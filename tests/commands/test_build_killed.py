"""A build is killed at every stage and goes on: the same data set byte for byte,
no call paid twice after its success.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memcalib.products.micro.practice.source import write_micro_log
from memcalib.products.micro.practice.mistakes import micro_roles
from memcalib.products.micro.practice.server import MicroServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("killed")]
BUILD = """
micro: {micro}
rows: 24
seed: 5
splits: {{train: 0.6, test: 0.4}}
"""
ROLE = (
    "{role}: {{model: {model}, base_url: '{url}', key_env: '', thinking: "
    "default, concurrency: 4}}\n"
)
ROLES = {"builder": "micro-builder", "reviewer": "micro-reviewer", "reviewer2": "micro-reviewer-2"}
CROSSED = 1.0  # seconds: a reply that left the server so shortly before a kill may not have arrived


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


class KilledBuild:
    """A build on a server of its own, whose book outlives the killed processes."""

    def __init__(self, home: Path, *options: str):
        home.mkdir()
        self.folder = home / "build"
        self.server = MicroServer([], roles=micro_roles(), latency=0.04)
        self.kills = []
        url = self.server.start()
        roles = [ROLE.format(role=role, model=model, url=url) for role, model in ROLES.items()]
        description = home / "build.yaml"
        description.write_text(BUILD.format(micro=60) + "".join(roles))
        paths = ["--out", self.folder, "--cache", home / "calls.sqlite"]
        verb = [sys.executable, "-m", "memcalib", "build", description]
        self.command = list(map(str, [*verb, *paths, *options]))

    def start(self) -> subprocess.Popen:
        return subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def kill_when(self, ready) -> None:
        process = self.start()
        while process.poll() is None and not ready(self.folder):
            time.sleep(0.002)
        assert process.poll() is None, f"it ended before it was killed: {process.communicate()[0]}"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        self.kills.append(time.time())
        process.stdout.close()

    def finish(self) -> None:
        process = self.start()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        self.server.stop()

    def shortly_before_a_kill(self, moment: float) -> bool:
        return any(0 <= kill - moment < CROSSED for kill in self.kills)

    def paid_twice(self) -> list[dict]:
        """Requests that came again although their reply had left long before the next kill."""
        requests = []
        for request in self.server.stats()["asked_again"]:
            earlier_successes = request["clean"][:-1]
            if not all(map(self.shortly_before_a_kill, earlier_successes)):
                requests.append(request)
        return requests

    def files(self) -> dict[str, bytes]:
        """The contents of the data set's files by name, without the port of the server."""
        paths = [self.folder / "README.md", *self.folder.glob("*.jsonl")]
        for name in ("stages", "splits", "tables"):
            paths += (self.folder / name).glob("*")
        port = f":{self.server.port}".encode()
        contents = {}
        for path in paths:
            if path.suffix != ".part":
                name = str(path.relative_to(self.folder))
                contents[name] = path.read_bytes().replace(port, b"")
        return contents


def in_stage(name: str, count: int = 3):
    return lambda folder: lines(folder / "stages" / f"{name}.jsonl") >= count


def is_there(name: str):
    return lambda folder: (folder / name).exists()


def compare(home: Path, moments: list, *options: str) -> None:
    whole = KilledBuild(home / "whole", *options)
    killed = KilledBuild(home / "killed", *options)
    whole.finish()
    for moment in moments:
        killed.kill_when(moment)
    killed.finish()
    assert whole.server.stats()["asked_again"] == [] and whole.kills == []
    assert killed.paid_twice() == [] and len(killed.kills) == len(moments)
    whole_files = whole.files()
    killed_files = killed.files()
    assert whole_files.keys() == killed_files.keys() and len(whole_files) > 20
    differing = [name for name in whole_files if whole_files[name] != killed_files[name]]
    assert differing == []
    keys = whole.server.stats()["keys"]
    stats = killed.server.stats()
    assert stats["keys"] == keys and stats["successes"] - keys <= 4 * len(moments)


def test_killed_in_every_stage(tmp_path):
    moments = [
        in_stage("screening"),
        in_stage("annotation"),
        in_stage("rubrics"),
        in_stage("naturalization", 1),
        in_stage("review-2", 2),
    ]
    compare(
        tmp_path,
        [is_there("losses.jsonl"), *moments, is_there("examples.jsonl"), is_there("tables")],
    )


def test_killed_on_the_way_from_a_log(tmp_path):
    log = write_micro_log(tmp_path / "log.jsonl", 30, seed=2)
    moments = [
        in_stage("annotation"),
        in_stage("rubrics"),
        in_stage("review-1"),
        is_there("examples.jsonl"),
    ]
    compare(tmp_path, moments, "--from-memory", log, "--yes")
