"""A judge that fails: what is left out, what pauses a run, what ends it, and how it goes on."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_files import assert_same, newest_checkpoint, rows, timeless, weights

from memcalib.trainer.checkpoints import read_state
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.judge import LLMJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_tokenizer, load_policy
from memcalib.trainer.rewards import (
    FunctionRetries,
    JudgeDown,
    JudgeFault,
    JudgeUnreadable,
    RetryingJudge,
    ask_judge,
    judge_spent,
)
from memcalib.problem import judgment_for
from memcalib.io.records import DataError
from memcalib.trainer.train_config import world_config
from memcalib.trainer.checkpoints import Interrupted, StopSignals
from memcalib.training import train

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, seed=5)


class Time:
    """A clock that moves only when somebody sleeps, and does something when it is ten minutes
    later.
    """

    def __init__(self, until=600.0, then=lambda: None):
        self.now = 0.0
        self.waits = []
        self.until = until
        self.then = then

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        before = self.now
        self.now = self.now + seconds
        if before < self.until <= self.now:
            self.then()


def patient(judge, time, **options):
    options.setdefault("function_tries", 1)
    return RetryingJudge(judge, clock=time.clock, sleep=time.sleep, **options)


def go(out, judge, resume=None, on_step=None, **changes):
    sizes = dict(prompts=4, generations=4, steps=3, max_tokens=16)
    config = world_config(WORLDS["short"], **(sizes | changes))
    options = dict(tokenizer=TOKENIZER, out=out, resume=resume, on_step=on_step)
    return train(load_policy("cold-short")[0], config, EXAMPLES, judge, **options)


def llm_judge(server, cache=None):
    endpoint = Endpoint(
        model="micro-judge", base_url=server.base_url, key_env="", attempts=1, backoff=0
    )
    return LLMJudge(endpoint, cache=cache)


@given(
    fails=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    unread=st.lists(st.booleans(), min_size=8, max_size=8),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    minutes=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_rounds_against_plain_code(fails, unread, share, minutes):
    """Answer i fails `fails[i]` times, and then its reply may be unreadable;
    plain code says how many rounds there are.
    """
    time = Time()
    call_counts = [0] * len(fails)

    def judge(example, response):
        i = int(response)
        call_counts[i] += 1
        if call_counts[i] <= fails[i]:
            raise TimeoutError("slow")
        return mumble(example, "") if unread[i] else exact_judge(example, "")

    rounds = 1
    now = 0.0
    wait = 5.0
    expected_error = None
    while True:
        failed = sum(f >= rounds for f in fails)
        mumbled = sum(f < rounds and bad for f, bad in zip(fails, unread, strict=False))
        if failed + mumbled <= share * len(fails):
            break
        if mumbled > share * len(fails):
            expected_error = JudgeUnreadable
            expected_message = f"{mumbled} of {len(fails)} answers"
            break
        if now >= 60 * minutes:
            expected_error = JudgeDown
            expected_message = f"{failed} of {len(fails)} judgments"
            break
        now = now + wait
        wait = min(300.0, 2 * wait)
        rounds = rounds + 1
    failed_to_the_end = [f >= rounds for f in fails]
    examples = [EXAMPLES[0]] * len(fails)
    answers = [str(i) for i in range(len(fails))]
    whole = patient(judge, time, max_failed=share, minutes=minutes)
    if expected_error:
        with pytest.raises(expected_error, match=expected_message):
            whole.batch(examples, answers)
    else:
        judgments = whole.batch(examples, answers)
        assert [judgment.retry for judgment in judgments] == failed_to_the_end
        assert [judgment.scored for judgment in judgments] == [
            not (failed or bad) for failed, bad in zip(failed_to_the_end, unread, strict=False)
        ]
    assert call_counts == [min(rounds, f + 1) for f in fails]
    assert time.now == now and whole.pauses == rounds - 1


def flaky(failures):
    """The exact judge as a function that fails in the calls of these numbers, and its calls."""
    calls = []

    def judge(example, response):
        calls.append(response)
        if len(calls) in failures:
            raise ConnectionError("reset by peer")
        return exact_judge(example, response)

    return judge, calls


def test_a_function_that_fails_once_is_asked_again_and_that_is_said(caplog):
    """One broken connection in sixteen calls changes nothing: below `max_failed` it would have
    taken an answer out of the training."""
    judge, calls = flaky({5})
    waits = []
    retrying = RetryingJudge(judge, 0.5, sleep=waits.append)
    with caplog.at_level(logging.WARNING):
        judgments = retrying.batch([EXAMPLES[0]] * 16, [""] * 16)
    assert all(judgment.scored for judgment in judgments) and len(calls) == 17
    assert len(waits) == 1 and 0 <= waits[0] <= 1 and retrying.counts["asked_again"] == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert "1 times in this batch, 1 in all" in line and "ConnectionError: reset by peer" in line


def test_a_function_that_is_down_is_not_asked_eight_times_for_each_answer():
    judge, calls = flaky(range(1, 1000))
    waits = []
    retrying = RetryingJudge(judge, 1.0, sleep=waits.append)
    judgments = retrying.batch([EXAMPLES[0]] * 16, [""] * 16)
    assert all(judgment.retry for judgment in judgments)
    assert len(calls) == 8 + 15 and len(waits) == 7
    assert all(wait <= 2**number for number, wait in enumerate(waits))


def test_a_fault_of_a_function_is_not_asked_again():
    calls = []

    def judge(example, response):
        calls.append(1)
        raise KeyError("no such atom")

    with pytest.raises(JudgeFault, match="no such atom"):
        RetryingJudge(judge, 1.0, sleep=lambda seconds: None).batch([EXAMPLES[0]] * 3, [""] * 3)
    assert len(calls) == 1


def test_waits_double_up_to_five_minutes():
    time = Time()

    def judge(example, response):
        if len(time.waits) < 9:
            raise TimeoutError("slow")
        return exact_judge(example, "")

    assert patient(judge, time, minutes=60).batch(EXAMPLES[:1], ["x"])[0].scored
    assert time.waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def mumble(example, response):
    return judgment_for(example, {}, error="reply is no JSON object")


class EverySecond:
    """A judge that gives every second answer no level, and no reason for it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, example, response):
        self.calls += 1
        if self.calls % 2:
            return exact_judge(example, response)
        return judgment_for(example, {})


def test_a_judge_nobody_can_read_stops_the_run(tmp_path, straight):
    """It answers every call, so nothing is asked again, and nothing would be learned to the last
    step.
    """
    calls = []

    def judge(example, response):
        calls.append(1)
        return mumble(example, response)

    with pytest.raises(JudgeUnreadable) as error:
        go(tmp_path / "first", judge)
    text = str(error.value)
    assert (
        "the judge answered, but its replies for 16 of 16 answers in this batch (100%; "
        "limit max_failed 50%)"
    ) in text
    first = re.search(
        r"could not be read; the first of them: example '([^']+)': reply is no JSON object; asking",
        text,
    )
    assert first[1] in {example.id for example in EXAMPLES}
    assert "could not be scored" not in text
    assert "Nothing was trained yet: start again, once the judge's replies can be read" in text
    assert len(calls) == 16 and newest_checkpoint(tmp_path / "first") is None
    current = {"judge": exact_judge}

    def mumble_after_the_second_step(row):
        current["judge"] = mumble if row["step"] == 2 else exact_judge

    def judge_of_the_moment(example, response):
        return current["judge"](example, response)

    with pytest.raises(
        JudgeUnreadable,
        match=(
            r"saved in .*checkpoint-4: go on, once .* with a greater max_failed, with resume=True"
        ),
    ):
        go(tmp_path / "later", judge_of_the_moment, on_step=mumble_after_the_second_step)
    trainer = go(tmp_path / "later", exact_judge, resume=True)
    whole = go(tmp_path / "whole", exact_judge)
    assert_same((trainer, tmp_path / "later"), (whole, tmp_path / "whole"), "judge_")


def test_a_share_of_unreadable_replies_at_the_limit_is_left_out(tmp_path):
    go(tmp_path, EverySecond(), steps=1)
    (row,) = rows(tmp_path)
    assert row["unscored"] == 8 and row["failed_calls"] == 0
    with pytest.raises(JudgeUnreadable, match=r"8 of 16 answers .*40%.*no level for "):
        go(tmp_path / "less", EverySecond(), steps=1, max_failed=0.4)
    trainer = go(tmp_path / "more", mumble, steps=1, max_failed=1)
    assert trainer.rows.skipped == 2


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError("gone"), True),
        (TimeoutError("slow"), True),
        (CallError("server", "500"), True),
        (CallError("auth", "wrong key"), False),
        (CallError("unreachable", "never", fatal=True), False),
        (ValueError("a bug"), False),
        (KeyError("a bug"), False),
    ],
)
def test_what_is_a_failed_call(error, passes):
    def judge(example, response):
        raise error

    one_try = FunctionRetries(tries=1)
    judgments, fault = ask_judge(judge, EXAMPLES[:2], ["a", "b"], one_try)
    assert (fault is None) == passes
    assert [judgment.retry for judgment in judgments] == ([True, True] if passes else [])


def test_another_process_decides_too():
    busy = RetryingJudge(exact_judge, total=lambda sums: [sums[0] + 1, *sums[1:]])
    with pytest.raises(JudgeFault, match="another process"):
        busy.batch(EXAMPLES[:1], [""])
    time = Time()
    failed_elsewhere = [12, 4, 0]

    def total(sums):
        faults, failed, unscored, _, *over_and_votes = sums
        failures = failed_elsewhere.pop(0)
        return [faults, failed + failures, unscored + failures, 16, *over_and_votes]

    elsewhere = patient(exact_judge, time, total=total)
    assert elsewhere.batch(EXAMPLES[:1], [""])[0].scored
    assert time.waits == [5.0]
    unread = RetryingJudge(exact_judge, total=lambda sums: [0, 0, sums[2] + 9, 16, *sums[4:]])
    with pytest.raises(JudgeUnreadable, match="9 of 16 answers .* on another process"):
        unread.batch(EXAMPLES[:1], [""])
    signals = StopSignals(active=True)
    stopped = RetryingJudge(exact_judge, total=lambda sums: [*sums[:-2], 1, 0], signals=signals)
    with pytest.raises(Interrupted, match="SIGTERM"):
        stopped.batch(EXAMPLES[:1], [""])
    assert stopped.batch(EXAMPLES[:1], [""], finish=True)[0].scored
    assert not signals.received


def test_messages(caplog):
    logging.disable(logging.NOTSET)
    time = Time()

    def judge(example, response):
        raise ConnectionError("connection refused")

    with caplog.at_level(logging.WARNING, "memcalib"), pytest.raises(JudgeDown) as error:
        patient(judge, time, minutes=2).batch(EXAMPLES[:3], [""] * 3)
    for text in (caplog.messages[0], str(error.value)):
        assert "3 of 3 judgments" in text
        assert "50%" in text
        assert "ConnectionError: connection refused" in text
    assert "pauses" in caplog.messages[0]
    assert "2 minutes" in str(error.value)
    assert len(caplog.messages) == len(time.waits)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    with MicroServer(EXAMPLES) as server:
        trainer = go(out, llm_judge(server), max_failed=0.5)
    return trainer, out


def test_a_judge_behind_a_server_is_the_reward(straight):
    trainer, out = straight
    first = rows(out)[0]
    assert (
        first["judge_calls"] >= 1
        and first["judge_failures"] == 0
        and first["judge_prompt_tokens"] > 0
    )
    assert 0 <= first["evidence_mismatch"] <= 1 and first["failed_calls"] == 0
    assert first["judge_cost"] is None
    spent = judge_spent(trainer.judge)["calls"]
    assert sum(row["judge_calls"] for row in rows(out)) == spent


def test_judge_down_for_ten_minutes(tmp_path, straight, caplog):
    logging.disable(logging.NOTSET)
    server = MicroServer(EXAMPLES)
    server.start()
    time = Time(then=lambda: server.start())
    judge = patient(llm_judge(server), time)

    def stop(row):
        if row["step"] == 1:
            server.stop()

    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = go(tmp_path, judge, on_step=stop)
    server.stop()
    assert 600 <= time.now < 1200 and len(time.waits) >= 7
    assert_same((trainer, tmp_path), straight, "judge_")
    assert "16 of 16 judgments" in caplog.text and "no connection" in caplog.text


def test_judge_down_for_good_saves_and_goes_on_later(tmp_path, straight):
    server = MicroServer(EXAMPLES)
    server.start()
    time = Time()

    def stop(row):
        if row["step"] == 2:
            server.stop()

    judge = patient(llm_judge(server, tmp_path / "replies.sqlite"), time, minutes=30)
    with pytest.raises(
        JudgeDown,
        match=r"within 30 minutes\. Everything so far is saved in .*checkpoint-4.* resume=True",
    ):
        go(tmp_path / "run", judge, on_step=stop)
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-4"
    assert read_state(tmp_path / "run" / "checkpoint-4")["judge_cache"] == str(
        tmp_path / "replies.sqlite"
    )
    assert len(rows(tmp_path / "run")) == 2
    server.start()
    trainer = go(tmp_path / "run", llm_judge(server), resume=True)
    server.stop()
    assert_same((trainer, tmp_path / "run"), straight, "judge_")


def test_down_again_right_after_going_on(tmp_path):
    time = Time()
    down = []

    def judge(example, response):
        if down:
            raise ConnectionError("refused")
        return exact_judge(example, response)

    with pytest.raises(JudgeDown, match="checkpoint-2"):
        go(tmp_path / "a", patient(judge, time), on_step=lambda row: down.append(1))
    with pytest.raises(JudgeDown, match="a.checkpoint-2"):
        go(tmp_path / "b", patient(judge, time), resume=tmp_path / "a" / "checkpoint-2")
    assert newest_checkpoint(tmp_path / "b") is None
    down.clear()
    whole = go(tmp_path / "whole", exact_judge)
    resumed = go(tmp_path / "b", judge, resume=tmp_path / "a" / "checkpoint-2")
    assert torch.equal(weights(whole.model), weights(resumed.model))


def test_a_few_failed_calls_are_left_out_and_counted(tmp_path):
    calls = []

    def judge(example, response):
        calls.append(example)
        if len(calls) in (2, 3):
            raise CallError("server", "reset")  # of a client, which has asked often enough
        return exact_judge(example, response)

    trainer = go(tmp_path, judge, steps=1)
    (row,) = rows(tmp_path)
    assert row["failed_calls"] == row["unscored"] == 2
    assert trainer.credit.advantages[1:3].abs().sum() == 0
    assert len(calls) == 16


def foreign(example, response):
    judgment = exact_judge(example, response)
    return judgment.model_copy(
        update={
            "atoms": [*judgment.atoms[1:], judgment.atoms[0].model_copy(update={"atom_id": "x9"})]
        }
    )


def bug(example, response):
    raise KeyError("no such level")


@pytest.mark.parametrize(
    ("wrong", "message"), [(foreign, "'x9'"), (bug, "KeyError: 'no such level'")]
)
def test_a_fault_stops_at_once_with_a_checkpoint(tmp_path, wrong, message):
    state = {"judge": exact_judge}

    def turn(row):
        state["judge"] = wrong

    with pytest.raises(JudgeFault, match=message) as error:
        go(tmp_path, lambda example, response: state["judge"](example, response), on_step=turn)
    assert "checkpoint-2" in str(error.value)
    assert newest_checkpoint(tmp_path).name == "checkpoint-2"
    assert "Continue, once this is fixed, with resume=True" in str(error.value)
    assert isinstance(error.value.__cause__, DataError | KeyError)


def test_a_fault_before_the_first_step_saves_nothing(tmp_path):
    with pytest.raises(
        JudgeFault, match="Nothing was trained yet: start again, once this is fixed$"
    ):
        go(tmp_path, bug)
    assert newest_checkpoint(tmp_path) is None


def test_a_judge_that_stops_in_validation(tmp_path):
    state = {"down": False}
    held_out = EXAMPLES[:2]

    def judge(example, response):
        if state["down"] and len(response) > 0 and state["calls"] >= 16:
            raise KeyError("bug")
        state["calls"] = state.get("calls", 0) + 1
        return exact_judge(example, response)

    config = world_config(
        WORLDS["short"], prompts=4, generations=4, steps=3, max_tokens=12, eval_every=1
    )
    options = dict(tokenizer=TOKENIZER, validation=held_out)

    def swap(row):
        state["down"] = row["step"] == 1
        state["calls"] = 0

    def model():
        return load_policy("cold-short")[0]

    with pytest.raises(JudgeFault, match="Everything so far is saved in .*checkpoint-4"):
        train(model(), config, EXAMPLES, judge, on_step=swap, out=tmp_path / "cut", **options)
    state["down"] = False
    resumed = train(model(), config, EXAMPLES, judge, out=tmp_path / "cut", resume=True, **options)
    whole = train(model(), config, EXAMPLES, judge, out=tmp_path / "whole", **options)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert [("valid_SCS" in row, row["step"]) for row in rows(tmp_path / "cut")] == [
        (True, 0),
        (True, 1),
        (False, 2),
        (True, 3),
    ]


def test_partial_is_no_judge_with_totals():
    assert judge_spent(partial(exact_judge)) == {} and judge_spent(RetryingJudge(exact_judge)) == {}


HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.slow
def test_two_processes_stop_and_go_on_together(tmp_path):
    """The judge of the second process alone is down: half of all calls fail,
    over the limit of two in five.
    """
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    script = HELPERS / "failing_judge.py"
    root = str(HELPERS.parents[1])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        script,
        tmp_path,
    ]
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | quiet | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for process in (first, second):
        assert process["same"]
        assert process["step"] == 2
        assert process["processes"] == 2
        assert process["waited"] >= 600
        assert "8 of 16 judgments" in process["message"]
        assert "checkpoint-4" in process["message"]
    assert "another process" in first["message"]
    assert "refused" in second["message"]
    whole = timeless(tmp_path / "whole", "judge_")
    assert [row["step"] for row in whole] == [0, 1, 2, 3]
    assert timeless(tmp_path / "cut", "judge_") == whole


def test_a_signal_ends_the_wait_even_of_work_that_is_to_be_finished():
    time = Time()
    signals = StopSignals(active=True)
    signals.received = signal.SIGTERM

    def judge(example, response):
        raise TimeoutError("slow")

    with pytest.raises(Interrupted):
        patient(judge, time, signals=signals).batch(EXAMPLES[:2], ["a", "b"], finish=True)
    assert not time.waits
