"""A build is killed at every stage and goes on: the same data set byte for byte, no call paid twice after its success."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memcalib.practice.source import write_micro_log
from memcalib.practice.mistakes import micro_roles
from memcalib.practice.server import MicroServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("killed")]
BUILD = """
micro: {micro}
rows: 24
seed: 5
splits: {{train: 0.6, test: 0.4}}
"""
ROLE = "{role}: {{model: {model}, base_url: '{url}', key_env: '', thinking: default, concurrency: 4}}\n"
ROLES = {"builder": "micro-builder", "reviewer": "micro-reviewer", "reviewer2": "micro-reviewer-2"}
CROSSED = 1.0  # seconds: a reply that left the server so shortly before a kill may not have arrived


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


class Built:
    """A build on a server of its own, whose book outlives the killed processes."""

    def __init__(self, home: Path, *more: str):
        home.mkdir()
        self.folder = home / "build"
        self.server = MicroServer([], roles=micro_roles(), latency=0.04)
        self.kills = []
        url = self.server.start()
        roles = "".join(
            ROLE.format(role=role, model=model, url=url) for role, model in ROLES.items()
        )
        (home / "build.yaml").write_text(BUILD.format(micro=60) + roles)
        verb = [
            sys.executable,
            "-m",
            "memcalib",
            "build",
            home / "build.yaml",
            "--out",
            self.folder,
        ]
        self.command = [*map(str, verb), "--cache", str(home / "calls.sqlite"), *map(str, more)]

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
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        self.server.stop()

    def paid_twice(self) -> list[dict]:
        """Requests that came again although their reply had left long before the next kill."""

        def near(clean):
            return any(0 <= kill - clean < CROSSED for kill in self.kills)

        return [
            line
            for line in self.server.stats()["asked_again"]
            if not all(map(near, line["clean"][:-1]))
        ]

    def files(self) -> dict[str, bytes]:
        found = [
            *self.folder.glob("*.jsonl"),
            *(p for part in ("stages", "splits", "tables") for p in (self.folder / part).glob("*")),
        ]
        whole = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in [*found, self.folder / "README.md"]
        }
        return {name: content for name, content in whole.items() if not name.endswith(".part")}


def in_stage(name: str, count: int = 3):
    return lambda folder: lines(folder / "stages" / f"{name}.jsonl") >= count


def is_there(name: str):
    return lambda folder: (folder / name).exists()


def compare(home: Path, moments: list, *more: str) -> None:
    whole = Built(home / "whole", *more)
    killed = Built(home / "killed", *more)
    whole.finish()
    for moment in moments:
        killed.kill_when(moment)
    killed.finish()
    assert whole.server.stats()["asked_again"] == [] and whole.kills == []
    assert killed.paid_twice() == [] and len(killed.kills) == len(moments)
    one = whole.files()
    other = killed.files()
    assert one.keys() == other.keys() and len(one) > 20

    def port(built):
        return f":{built.server.port}".encode()

    assert [
        n for n in one if one[n].replace(port(whole), b"") != other[n].replace(port(killed), b"")
    ] == []
    keys = whole.server.stats()["keys"]
    asked = killed.server.stats()
    assert asked["keys"] == keys and asked["successes"] - keys <= 4 * len(moments)


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
