"""A run that receives a signal saves its last whole step and goes on from there as if nothing had
happened.
"""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from micro_policy import EXAMPLES, TOKENIZER, policy
from run_files import assert_same, newest_checkpoint, rows, timeless

from memcalib.trainer import rewards as desk_module
from memcalib import training as training_module
from memcalib.trainer.checkpoints import checkpoints, read_state
from memcalib.products.micro.world import WORLDS, exact_judge
from memcalib.products.micro.policy import build_policy
from memcalib.inference.client import run_async
from memcalib.trainer.rewards import RetryingJudge
from memcalib.trainer.train_config import world_config
from memcalib.trainer.checkpoints import SIGNALS, Interrupted, StopSignals, elected
from memcalib.trainer.callbacks import damaged_weight, diverged, not_finite
from memcalib.training import train

torch.set_num_threads(1)
SETTINGS = dict(prompts=4, generations=4, steps=4, max_tokens=12, save_every=50, eval_every=2)
ROOT = Path(__file__).parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture(autouse=True)
def handlers():
    """Both signals have their default handlers before a test, and again after it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_of_others_stay():
    def ignore(number, frame):
        return None

    for handler in (ignore, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, handler)
        with StopSignals(active=True).listening() as signals:
            assert signal.getsignal(signal.SIGTERM) == handler
            assert signal.getsignal(signal.SIGINT) == signals._handle
        assert signal.getsignal(signal.SIGTERM) == handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_handlers_are_back_after_an_error():
    with pytest.raises(KeyError), StopSignals(active=True).listening():
        raise KeyError


def test_not_off_the_main_thread():
    handled = []
    results = []

    def work():
        with StopSignals(active=True).listening() as signals:
            handled.extend(signal.getsignal(number) == signals._handle for number in SIGNALS)
            results.append(signals.run(lambda: "done"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handled == [False, False]
    assert results == ["done"]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_all_processes_elect_the_same(heard):
    processes = []
    for term, interrupt in heard:
        process = StopSignals(active=True)
        if interrupt:
            process.received = signal.SIGINT
        if term:
            process.received = signal.SIGTERM
        processes.append(process)
    votes = torch.tensor([process.votes() for process in processes])
    sums = votes.sum(0).tolist()

    def total(votes):
        return sums

    for process in processes:
        process.total = total
    received = {process.received for process in processes}
    expected = next((number for number in SIGNALS if number in received), 0)
    assert {process.agreed() for process in processes} == {expected}
    assert elected(sums) == expected


def test_calls_under_way_are_given_up_and_cleared():
    """The judge's calls run in an event loop; what they hold is given back."""
    given_up = []

    async def call(number):
        try:
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)
        finally:
            given_up.append(number)

    async def calls():
        await asyncio.gather(*map(call, range(4)))

    with StopSignals(active=True).listening() as signals:
        assert signals.run(lambda: run_async(calls())) is None
    assert sorted(given_up) == [0, 1, 2, 3]
    assert signals.agreed() == signal.SIGINT


SECOND = """
import os, signal, sys
from memcalib.trainer.checkpoints import StopSignals
now = [0.0]
with StopSignals(active=True, clock=lambda: now[0]).listening() as signals:
    os.kill(os.getpid(), signal.{first})
    now[0] = 2.9
    os.kill(os.getpid(), signal.{second})
    print("echo", signals.received, flush=True)
    now[0] = 3.1
    os.kill(os.getpid(), signal.{second})
    print("never", flush=True)
"""


SAME = [pytest.param(name, name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGINT")]


@pytest.mark.parametrize(("first", "second"), [*SAME, ("SIGINT", "SIGTERM")])
def test_a_second_signal_ends_the_process_at_once_and_an_echo_does_not(first, second):
    script = SECOND.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -getattr(signal, second), done.stderr
    assert done.stdout.split() == ["echo", str(int(getattr(signal, first)))]
    assert (
        done.stderr.strip()
        == f"{first}: the run saves its last complete step and ends; press again to end immediately"
    )


@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, -1.5, math.nan, math.inf, -math.inf]), min_size=3, max_size=3
        ),
        max_size=4,
    )
)
def test_not_finite_against_plain_code(values):
    mask = [[(row + token) % 3 != 0 for token in range(3)] for row in range(len(values))]
    expected = ""
    for row in reversed(range(len(values))):
        for token in reversed(range(3)):
            value = values[row][token]
            if mask[row][token] and not math.isfinite(value):
                expected = f"row {row}, token {token} is {value}"
    mask_of_rows = torch.tensor(mask, dtype=torch.bool).view(-1, 3)
    assert not_finite(torch.tensor(values).view(-1, 3), mask_of_rows) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_damaged_weights_in_every_precision(dtype):
    policy = build_policy(0).to(dtype)
    assert damaged_weight(policy) == ""
    name, weight = list(policy.named_parameters())[5]
    with torch.no_grad():
        weight.view(-1)[7] = 1e300 if dtype == torch.float64 else 1e38
    assert damaged_weight(policy) == f"weight {name} of norm inf"
    weight.requires_grad_(False)
    assert damaged_weight(policy) == ""


def test_messages_say_what_to_do_and_not_to_go_on():
    message = str(diverged(7, "loss nan", 12, 0.5, torch.bfloat16, "run/checkpoint-6"))
    for phrase in (
        "step 7: loss nan",
        "finite",
        "learning rate (0.5)",
        "(bfloat16)",
        "run/checkpoint-6 are from before",
    ):
        assert phrase in message
    assert "resume" not in message
    message = str(diverged(1, "x", 3, 1, torch.float32, advice="look at the memory"))
    assert "memory" in message


def go(out, judge=exact_judge, resume=None, on_step=None, model=None, **changes):
    config = world_config(WORLDS["short"], **(SETTINGS | changes))
    options = dict(
        tokenizer=TOKENIZER, out=out, validation=EXAMPLES[:2], on_step=on_step, resume=resume
    )
    return train(model or policy(), config, EXAMPLES, judge, **options)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    return go(out), out


class SignalAt:
    """Raises a signal when the run comes to one place for the `turn`-th time."""

    def __init__(self, monkeypatch, stop_place: str, number: int, turn: int):
        self.stop_place = stop_place
        self.number = number
        self.turn = turn
        self.count = 0
        self.wrap(monkeypatch, training_module, "sample_tokens", "sampling")
        self.wrap(monkeypatch, desk_module, "sample_answers", "validation")
        self.wrap(monkeypatch, training_module.GRPOTrainer, "compute_loss", "update")

    def wrap(self, monkeypatch, owner, name, passed_place):
        plain = getattr(owner, name)

        def watched(*args, **options):
            self.pass_by(passed_place)
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    def pass_by(self, passed_place: str) -> None:
        if passed_place == self.stop_place:
            self.count += 1
            if self.count == self.turn:
                signal.raise_signal(self.number)

    def judge(self, example, response):
        self.pass_by("judging")
        return exact_judge(example, response)

    def on_step(self, row):
        self.pass_by("row")


SLOW = pytest.mark.slow
PLACES = [
    ("sampling", 3, 2),  # the third rollout: given up
    pytest.param("judging", 2 + 32 + 5, 2, marks=SLOW),  # validation, two batches, into the third
    ("update", 5, 3),  # the first mini-batch of the third step: both are finished
    pytest.param("update", 6, 3, marks=SLOW),
    ("validation", 2, 2),  # the scores of the second step are in its row
    ("row", 3, 2),  # rows 0, 1 and 2; the next rollout does not begin
]


@pytest.mark.parametrize(("stop_place", "turn", "step"), PLACES)
def test_told_to_stop_anywhere_and_gone_on_bit_for_bit(
    tmp_path, straight, monkeypatch, stop_place, turn, step
):
    number = SIGNALS[turn % 2]
    folder = tmp_path / f"checkpoint-{2 * step}"
    with monkeypatch.context() as patches:
        stop = SignalAt(patches, stop_place, number, turn)
        with pytest.raises(Interrupted) as error:
            go(tmp_path, stop.judge, on_step=stop.on_step)
    expected = 2 * step if stop_place == "update" else turn
    assert stop.count == expected, "an update is finished, and nothing else goes on"
    assert error.value.exit_code == 128 + number
    assert newest_checkpoint(tmp_path) == folder
    name = signal.Signals(number).name
    advice = "continue with resume=True, or with --resume on the command line"
    assert str(error.value) == (
        f"{name}: the run was stopped by a signal. Everything so far is saved in {folder}: {advice}"
    )
    assert [row["step"] for row in rows(tmp_path)] == [*range(step + 1)]
    assert "valid_SCS" in rows(tmp_path)[2]
    assert len(checkpoints(tmp_path)) == 1
    assert_same((go(tmp_path, resume=True), tmp_path), straight)


def test_a_signal_in_the_last_step_comes_too_late(tmp_path, straight, monkeypatch):
    stop = SignalAt(monkeypatch, "update", signal.SIGTERM, 8)
    trainer = go(tmp_path, stop.judge)
    assert_same((trainer, tmp_path), straight)


def test_before_the_first_step_nothing_is_saved(tmp_path, monkeypatch):
    stop = SignalAt(monkeypatch, "sampling", signal.SIGTERM, 1)
    with pytest.raises(Interrupted, match="Nothing was trained yet: start again$"):
        go(tmp_path, stop.judge)
    assert checkpoints(tmp_path) == []


def test_told_again_right_after_going_on(tmp_path, straight, monkeypatch):
    with monkeypatch.context() as patches, pytest.raises(Interrupted):
        go(tmp_path, SignalAt(patches, "sampling", signal.SIGTERM, 3).judge)
    saved = (tmp_path / "checkpoint-4" / "memcalib.json").stat().st_mtime_ns
    with (
        monkeypatch.context() as patches,
        pytest.raises(Interrupted, match="saved in .*checkpoint-4"),
    ):
        go(tmp_path, SignalAt(patches, "sampling", signal.SIGTERM, 1).judge, resume=True)
    assert (tmp_path / "checkpoint-4" / "memcalib.json").stat().st_mtime_ns == saved, (
        "it is saved already"
    )
    assert_same((go(tmp_path, resume=True), tmp_path), straight)


def test_a_judge_that_is_down_does_not_keep_the_run(tmp_path, straight):
    down = []

    def judge(example, response):
        if down:
            raise ConnectionError("refused")
        return exact_judge(example, response)

    def go_down(row):
        if row["step"] == 1:
            down.append(True)

    waits = []

    def wait(seconds):
        waits.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    patient = RetryingJudge(judge, clock=lambda: 0.0, sleep=wait, function_tries=1)
    with pytest.raises(Interrupted, match=r"saved in .*checkpoint-2: go on with"):
        go(tmp_path, patient, on_step=go_down)
    assert waits == [5.0]
    assert_same((go(tmp_path, resume=True), tmp_path), straight)


def test_a_run_without_checkpoints_hears_nothing(tmp_path):
    def judge(example, response):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, judge, save_every=0, eval_every=0)
    assert checkpoints(tmp_path) == []


def test_an_adapter_is_saved_too(tmp_path, monkeypatch):
    options = dict(lora_rank=4, steps=3, lr=1e-2)
    whole = go(tmp_path / "whole", **options)
    with monkeypatch.context() as patches, pytest.raises(Interrupted):
        go(tmp_path / "cut", SignalAt(patches, "sampling", signal.SIGTERM, 2).judge, **options)
    assert_same(
        (go(tmp_path / "cut", resume=True, **options), tmp_path / "cut"),
        (whole, tmp_path / "whole"),
    )


TESTS = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers")]
SCRIPT = """
import sys, time
sys.path[:0] = {tests!r}
import test_stopping as t
from memcalib.commands.cli import stop

def judge(example, response):
    rows = t.Path({out!r}, "steps.jsonl")
    if rows.exists() and len(rows.read_text().splitlines()) > 2:
        print("judging", flush=True)
        time.sleep(600)
    return t.exact_judge(example, response)

try:
    t.go(t.Path({out!r}), judge)
except t.Interrupted as error:
    stop(str(error), error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_process_is_told_from_outside(tmp_path, straight, number):
    script = SCRIPT.format(tests=TESTS, out=str(tmp_path))
    options = dict(
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | QUIET
    )
    process = subprocess.Popen([sys.executable, "-c", script], **options)
    assert process.stdout.readline() == "judging\n", process.communicate(timeout=60)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert f"saved in {tmp_path / 'checkpoint-4'}: go on with" in errors
    assert read_state(tmp_path / "checkpoint-4")["step"] == 2
    assert_same((go(tmp_path, resume=True), tmp_path), straight)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sampling", "judging", "update", "launcher"])
def test_two_processes_stop_together_and_go_on_bit_for_bit(tmp_path, where):
    """The second process alone hears the signal; or the launcher does,
    which passes it on to both.
    """
    script = ROOT / "tests" / "helpers" / "stop_signal.py"
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
    options = dict(
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | QUIET
    )
    process = subprocess.Popen([*map(str, command), where], **options)
    if where == "launcher":
        assert process.stdout.readline() == "judging\n"
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    step = 3 if where == "update" else 2
    for process_end in (first, second):
        assert process_end["code"] == 143, errors[-2000:]
        assert f"checkpoint-{2 * step}: go on with" in process_end["message"], errors[-2000:]
    assert read_state(tmp_path / "cut" / f"checkpoint-{2 * step}")["step"] == step
    if where != "launcher":
        assert first["same"] and second["same"]
        assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
