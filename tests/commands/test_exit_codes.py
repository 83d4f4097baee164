"""Exit codes of what asks and judges: 0 all scored, 3 something left, 1 stopped;
and the printed command works.
"""

import json
import shlex
import sys

import pytest
from command_line import run

from memcalib.io.records import read_jsonl, write_jsonl
from memcalib.products.micro.practice.models import ExampleIndex, judge_reply, read_payload
from memcalib.products.micro.practice.server import Faults, MicroServer
from memcalib.products.micro.world import WORLDS, make_examples
from memcalib.problem import Judgment

EXAMPLES = make_examples(WORLDS["short"], 10, 7, "test")
INDEX = ExampleIndex(EXAMPLES)
SHY = {EXAMPLES[0].question}


class Moody:
    """The exact judge, which refuses two examples until it is in a better mood;
    or fails from some call on.
    """

    def __init__(self):
        self.shy = True
        self.calls = 0
        self.dies = 10**9

    def __call__(self, turns):
        self.calls += 1
        payload = read_payload(turns)
        if self.calls > self.dies:
            raise ValueError("out of order")
        if self.shy and payload["current_query"] in SHY:
            return "I'd rather not."
        return json.dumps(judge_reply(payload, INDEX))


@pytest.fixture
def judge():
    return Moody()


@pytest.fixture
def server(judge):
    with MicroServer(EXAMPLES, roles={"moody": judge}) as server:
        yield server


@pytest.fixture
def command(server, tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "examples.jsonl", EXAMPLES)
    words = [
        "evaluate",
        str(data),
        "--model",
        "micro-model",
        "--base-url",
        server.base_url,
        "--judge",
        "moody",
    ]
    words += ["--out", str(tmp_path / "run"), "--cache", str(tmp_path / "calls.sqlite")]
    words += [
        "--set",
        "sampling.seeds=[42,43]",
        "--set",
        "sampling.max_tokens=64",
        "--set",
        "control=false",
    ]
    monkeypatch.setattr(sys, "argv", ["memcalib", *words])

    def page(folder):
        return folder / "report.html"

    monkeypatch.setattr("memcalib.report.evaluation_report.write_evaluation_report", page)
    return words


def test_unscored_answers_end_in_code_3_with_the_command_that_asks_them_again(
    capsys, command, judge, server, tmp_path
):
    shy = sum(example.question in SHY for example in EXAMPLES) * 2
    code, out, err = run(capsys, *command)
    assert code == 3 and "Report:" in out
    assert f"judgments.jsonl: {shy} of 20 answers are not scored" in err
    assert "to ask for them again: memcalib evaluate" in err
    assert run(capsys, *command)[0] == 3, (
        "without --retry-unscored nothing is asked, and it still says so"
    )
    before = judge.calls
    judge.shy = False
    printed = shlex.split(err.strip().rpartition("ask for them again: ")[2])
    assert printed[0] == "memcalib" and printed[-1] == "--retry-unscored"
    code, out, err = run(capsys, *printed[1:])
    assert (
        code == 0 and not err.strip().endswith("--retry-unscored") and judge.calls == before + shy
    )
    rows = list(read_jsonl(tmp_path / "run" / "judgments.jsonl", Judgment))
    assert len(rows) == 20 and all(row.scored for row in rows)
    assert run(capsys, *command)[0] == 0


def test_a_dry_run_counts_what_would_be_asked_again(capsys, command):
    run(capsys, *command)
    assert " 0 " in run(capsys, *command, "--dry-run")[1].splitlines()[-2]
    output = run(capsys, *command, "--dry-run", "--retry-unscored")[1]
    unscored = sum(example.question in SHY for example in EXAMPLES) * 2
    assert f" {unscored} " in next(
        line for line in output.splitlines() if line.strip().startswith("judge ")
    )


def test_a_judge_that_dies_in_the_middle_ends_in_code_1_and_the_same_command_goes_on(
    capsys, command, judge, tmp_path
):
    judge.shy = False
    judge.dies = 9
    judge_settings = ["--set", "judge.attempts=1", "--set", "judge.concurrency=1"]
    code, _, err = run(capsys, *command, *judge_settings, "--set", "sampling.seeds=[1,2,3,4]")
    assert (
        code == 1
        and "20 judgments in a row failed in the same way" in err
        and "continue with: memcalib evaluate" in err
    )
    judge.dies = 10**9
    assert run(capsys, *command, *judge_settings, "--set", "sampling.seeds=[1,2,3,4]")[0] == 0


def test_a_judge_without_a_key_costs_no_answer(capsys, command, server, monkeypatch, tmp_path):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    code, _, err = run(
        capsys, *command, "--judge-key-env", "NO_SUCH_KEY", "--judge-url", server.base_url
    )
    assert code == 1 and "NO_SUCH_KEY" in err
    assert server.stats()["requests"] == 0 and not (tmp_path / "run" / "rollouts.jsonl").exists()


def test_a_finished_run_does_not_ask_the_judge_that_question(capsys, command, judge):
    judge.shy = False
    assert run(capsys, *command)[0] == 0 and judge.calls == 21
    assert run(capsys, *command)[0] == 0 and judge.calls == 21


def test_answers_and_judgments_on_their_own_files(capsys, command, judge, server, tmp_path):
    data = command[1]
    answers = tmp_path / "a.jsonl"
    judged = tmp_path / "j.jsonl"
    connection = ["--base-url", server.base_url, "--cache", tmp_path / "calls.sqlite"]
    ask = [
        "generate",
        data,
        "--model",
        "micro-model",
        "--out",
        answers,
        "--set",
        "sampling.seeds=[42]",
        *connection,
    ]
    with MicroServer(EXAMPLES, faults=Faults(server_error=0.3, tries=99)) as rough:
        one_attempt = ["--set", "model.attempts=1", "--no-cache"]
        code, _, err = run(capsys, *ask, "--base-url", rough.base_url, *one_attempt)
    assert (
        code == 3
        and " answers failed" in err
        and "to ask for them again: memcalib" in err
        and "--retry-unscored" not in err
    )
    assert run(capsys, *ask)[0] == 0
    verdicts = ["judge", answers, "--data", data, "--model", "moody", "--out", judged, *connection]
    code, _, err = run(capsys, *verdicts)
    assert code == 3 and "are not scored" in err and "to ask for them again" in err
    judge.shy = False
    assert run(capsys, *verdicts)[0] == 3 and run(capsys, *verdicts, "--retry-unscored")[0] == 0


@pytest.mark.parametrize("verb", ["evaluate", "generate", "judge"])
def test_exit_codes_are_documented(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and "Exit codes: 0" in out and "3 when some" in " ".join(out.split())
    assert ("--retry-unscored" in out) == (verb != "generate")
