"""SIGTERM ends a run as Ctrl-C does: what is on its way is kept, and the way on is printed."""

import json
import signal
import subprocess
import sys
import time

import pytest
from faulty_server import FaultyServer

from memcalib.io.jsonl import read_jsonl
from memcalib.problem import Rollout


def ignore_interrupts():
    """As a shell starts a job in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("start", [None, ignore_interrupts], ids=["alone", "background"])
def test_a_terminated_run_keeps_what_was_on_its_way_and_says_how_to_go_on(tmp_path, start):
    out = tmp_path / "rollouts.jsonl"
    with FaultyServer(delay=0.5) as server:
        words = ["generate", "samples", "--model", "m", "--base-url", server.url]
        words += ["--key-env", "", "--set", "model.concurrency=2", "--out", str(out), "--no-cache"]
        program = "from memcalib.commands.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=start,
        )
        end = time.monotonic() + 60
        while len(server.requests) < 3 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        if start is not None:
            process.send_signal(signal.SIGINT)  # of a terminal that it does not belong to
            time.sleep(0.3)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
        request_count = len(server.requests)
    assert process.returncode == 130, printed
    assert "interrupted" in printed and "memcalib generate samples" in printed
    rows = list(read_jsonl(out, Rollout))
    assert 0 < len(rows) == request_count < 9  # every request that was sent is kept


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_command_that_is_terminated_keeps_a_checkpoint_and_goes_on(tmp_path):
    """`memcalib train` in the background of a script: exit status 143, and --resume ends with the
    rows of a run that nobody stopped.
    """
    settings = ["train.steps=8", "train.save_every=1", "train.eval_every=0"]
    settings += ["train.prompts=4", "train.generations=4"]
    program = "from memcalib.commands.cli import main; main()"
    words = [sys.executable, "-c", program, "train", "micro", "--method", "gdpo", "--no-cache"]
    for setting in settings:
        words += ["--set", setting]
    out = tmp_path / "cut"
    process = subprocess.Popen(
        [*words, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=ignore_interrupts,
    )
    end = time.monotonic() + 300
    while not list(out.glob("checkpoint-*")) and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 143, printed
    assert "saves its last complete step" in printed and list(out.glob("checkpoint-*"))
    steps_at_stop = len((out / "steps.jsonl").read_text().splitlines())
    assert 0 < steps_at_stop < 8
    for folder, resume_options in ((out, ["--resume"]), (tmp_path / "whole", [])):
        subprocess.run([*words, "--out", str(folder), *resume_options], check=True, timeout=300)
    rows = {}
    for folder in (out, tmp_path / "whole"):
        lines = (folder / "steps.jsonl").read_text().splitlines()
        rows[folder.name] = [json.loads(line)["reward"] for line in lines]
    assert rows["cut"] == rows["whole"] and len(rows["cut"]) == 8
