"""SIGTERM ends a run as Ctrl-C does: what is on its way is kept, and the way on is printed."""

import signal
import subprocess
import sys
import time

from faulty_server import FaultyServer

from memcalib.io.jsonl import read_jsonl
from memcalib.problem import Rollout


def test_a_terminated_run_keeps_what_was_on_its_way_and_says_how_to_go_on(tmp_path):
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
        )
        end = time.monotonic() + 60
        while len(server.seen) < 3 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
        asked = len(server.seen)
    assert process.returncode == 130, printed
    assert "interrupted" in printed and "memcalib generate samples" in printed
    rows = list(read_jsonl(out, Rollout))
    assert 0 < len(rows) == asked < 9  # every request that was sent is kept
