"""An evaluation that an earlier layout of the package made (fixtures/flat_layout, made at commit fc26d26) is complete, and its cache is hit."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from memcalib.commands.cli import main

EARLIER = Path(__file__).parents[1] / "fixtures" / "flat_layout"
ASKED = [
    "--base-url",
    "http://127.0.0.1:8765/v1",
    "--model",
    "micro-model",
    "--judge",
    "micro-judge",
    "--seeds",
    "42",
]


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> Path:
    """A copy to work in, the current folder of the test; whoever opens a connection fails."""
    shutil.copytree(EARLIER, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path / "earlier")

    def refuse(*_, **__):
        raise AssertionError("a finished call was made again")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path / "earlier"


def call(*arguments) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*map(str, arguments)])
    assert not exit.value.code


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_reply_of_an_earlier_cache_is_found(earlier):
    call("evaluate", "micro.jsonl", *ASKED, "--cache", "calls.db", "--out", "again")
    for name in ("rollouts.jsonl", "judgments.jsonl"):
        before, after = (
            sorted(map(json.dumps, rows(earlier / run / name))) for run in ("evaluation", "again")
        )
        assert len(after) == 8 and after == before


def test_an_earlier_evaluation_is_complete(earlier):
    before = {
        name: (earlier / "evaluation" / name).read_bytes()
        for name in ("rollouts.jsonl", "judgments.jsonl")
    }
    call("evaluate", "micro.jsonl", *ASKED, "--no-cache", "--out", "evaluation")
    assert {name: (earlier / "evaluation" / name).read_bytes() for name in before} == before
    assert (earlier / "evaluation" / "report.html").exists()
