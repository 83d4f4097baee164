"""The chaos benchmark in its small form: an evaluation through every fault,
killed and resumed, ends in the same table.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("chaos")]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_chaos.py"


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--small"], capture_output=True, text=True, timeout=860
    )
    print(done.stdout, done.stderr)
    return done


def test_every_check_of_the_small_benchmark_holds(report):
    assert report.returncode == 0, report.stdout + report.stderr
    assert "FAIL" not in report.stdout and "0 checks failed" in report.stdout


@pytest.mark.parametrize(
    "claim",
    [
        "without faults",
        "5 % of each fault",
        "killed three times",
        "two processes",
        "600 requests",
        "odd wrapping",
        "each reply that is no HTTP",
        "the first reply is a login page",
        "the first reply is a stream of events",
        "sends requests on to another host",
        "it moves in the middle",
        "asks for waits of 11 seconds",
        "a training whose judge function breaks off",
        "the disk of the run is full",
        "Ctrl-C in the middle of the answers",
        "Ctrl-C in the middle of the judgments",
        "the key is withdrawn",
        "the judge goes down",
    ],
)
def test_no_scenario_was_left_out(report, claim):
    assert claim.lower() in report.stdout.lower()


def test_the_checks_compare_something(report):
    lines = report.stdout.splitlines()
    assert sum("answers: 300" in line for line in lines) == 12
    assert sum("the printed table is the same: True" in line for line in lines) == 10
    assert report.stdout.count("faults given") == 4
    assert sum("the reason is given: True" in line for line in lines) == 9
    for claim in (
        "every class of fault was given: []",
        "answers that are refusals:",
        "requests that reached the other host: 0",
        "the wait is said with its end: True",
        "asked again, as many as broke off: 0",
        "the weights are the same: True",
    ):
        assert claim in report.stdout
