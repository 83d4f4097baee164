"""Runs that an earlier layout of the package began (fixtures/flat_layout, made at commit fc26d26) are hit and resumed."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from memcalib.commands.cli import main
from memcalib.io.jsonl import read_rows

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


def untimed(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(("seconds", "peak"))}


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


def test_an_earlier_training_goes_on_as_if_it_had_not_stopped(earlier, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.chdir(earlier / "training")
    call(
        "train", "recipe.yaml", "--method", "memcalib-rl", "--out", "run", "--seed", "5", "--resume"
    )
    straight, resumed = map(
        read_rows, (Path("steps_of_a_straight_run.jsonl"), Path("run/steps.jsonl"))
    )
    assert [row["step"] for row in resumed if "loss" in row] == [1, 2, 3, 4]
    for row, expected in zip(map(untimed, resumed), map(untimed, straight), strict=True):
        assert row.keys() >= expected.keys(), "a newer version may add columns"
        words = {name for name, value in expected.items() if not isinstance(value, int | float)}
        assert {name: row[name] for name in words} == {name: expected[name] for name in words}
        numbers = {name: value for name, value in expected.items() if name not in words}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)
