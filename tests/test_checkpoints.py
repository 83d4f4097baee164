"""A run killed at any moment goes on as if nothing had happened; checkpoints that do not fit are refused."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memcalib.checkpoints import CheckpointError, checkpoints, newest_checkpoint, read_state
from memcalib.microworld import WORLDS, build_policy, build_tokenizer, exact_judge, load_policy, make_examples
from memcalib.settings import world_config
from memcalib.training import train

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, seed=5)
SETTINGS = dict(prompts=4, generations=4, steps=6, max_tokens=12, save_every=1, eval_every=2)


class Killed(BaseException):
    """Stands in for kill -9 within one process: nothing of ours may catch it."""


def policy():
    return load_policy("cold-short")[0]


def go(out: Path, *, on_step=None, resume=None, **changes):
    config = world_config(WORLDS["short"], **(SETTINGS | changes))
    options = dict(tokenizer=TOKENIZER, out=out, validation=EXAMPLES[:2], on_step=on_step, resume=resume)
    return train(policy(), config, EXAMPLES, exact_judge, **options)


def kill_at(step: int):
    def kill(row):
        if row["step"] == step:
            raise Killed

    return kill


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def rows(out: Path) -> list[dict]:
    found = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    return go(out), out


def assert_same(trainer, out: Path, straight) -> None:
    whole, there = straight
    assert torch.equal(weights(trainer), weights(whole))
    assert rows(out) == rows(there)
    assert trainer.thresholds.state_dict() == whole.thresholds.state_dict()
    last = read_state(out / "checkpoint-12")
    assert {**last, "drift": None} == {**read_state(there / "checkpoint-12"), "drift": None}


@pytest.mark.parametrize("step", [2, 3, 4])
def test_interrupted_run_goes_on_bit_for_bit(tmp_path, straight, step):
    with pytest.raises(Killed):
        go(tmp_path, on_step=kill_at(step))
    assert newest_checkpoint(tmp_path).name == f"checkpoint-{2 * (step - 1)}"
    assert_same(go(tmp_path, resume=True), tmp_path, straight)


def test_resume_from_a_copy_elsewhere(tmp_path, straight):
    shutil.copytree(straight[1] / "checkpoint-6", tmp_path / "usb" / "checkpoint-6")
    shutil.copytree(straight[1] / "best", tmp_path / "usb" / "best")
    trainer = go(tmp_path / "new", resume=tmp_path / "usb" / "checkpoint-6")
    assert_same(trainer, tmp_path / "new", straight)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_checkpoints as t
def kill(row):
    if row["step"] == {step} and {place!r} == "step":
        os.kill(os.getpid(), signal.SIGKILL)
    if row["step"] == {step} and {place!r} == "save":
        t.torch.save = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
t.go(t.Path({out!r}), on_step=kill)
"""


@pytest.mark.parametrize("place", ["step", "save"])
def test_kill_nine(tmp_path, straight, place):
    step = random.randrange(2, 6)
    print(f"killed at step {step}")
    script = SCRIPT.format(tests=str(Path(__file__).parent), step=step, place=place, out=str(tmp_path))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=280)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert newest_checkpoint(tmp_path).name == f"checkpoint-{2 * (step - 1)}"
    assert len(checkpoints(tmp_path)) == step - (place == "step")
    assert_same(go(tmp_path, resume=True), tmp_path, straight)


def test_a_finished_run_only_loads(tmp_path, straight):
    shutil.copytree(straight[1], tmp_path / "copy")
    trainer = go(tmp_path / "copy", resume=True)
    assert_same(trainer, tmp_path / "copy", straight)


def test_more_steps_are_the_same_run(tmp_path, straight):
    go(tmp_path, steps=3)
    trainer = go(tmp_path, resume=True)
    assert torch.equal(weights(trainer), weights(straight[0])) and rows(tmp_path) == rows(straight[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(method="gdpo"), "'memcalib-rl' there, 'gdpo' now"),
        (dict(seed=1), "seed: 42"),
        (dict(eta=0.5), "eta: 0.75"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, straight, change, message):
    with pytest.raises(CheckpointError, match=message):
        go(tmp_path, resume=straight[1] / "checkpoint-4", **change)


def test_other_examples_are_refused(tmp_path, straight, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "EXAMPLES", EXAMPLES[::-1])
    with pytest.raises(CheckpointError, match="other training examples"):
        go(tmp_path, resume=straight[1] / "checkpoint-4")


def test_a_fresh_start_does_not_mix_with_an_earlier_run(straight):
    with pytest.raises(CheckpointError, match="resume=True"):
        go(straight[1])


def test_broken_checkpoints(tmp_path, straight, caplog):
    for name in ("checkpoint-4", "checkpoint-6", "checkpoint-8"):
        shutil.copytree(straight[1] / name, tmp_path / name)
    (tmp_path / "checkpoint-8" / "memcalib.json").unlink()
    (tmp_path / "checkpoint-6" / "optimizer.pt").write_bytes(b"cut")
    logging.disable(logging.NOTSET)
    with caplog.at_level(logging.WARNING, "memcalib"):
        assert newest_checkpoint(tmp_path).name == "checkpoint-4"
    assert "half-written" in caplog.text and "optimizer.pt: 3 bytes" in caplog.text
    with pytest.raises(CheckpointError, match="no such folder"):
        read_state(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-4" / "memcalib.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not the state"):
        read_state(tmp_path / "checkpoint-4")
    assert newest_checkpoint(tmp_path) is None


def test_best_policy_is_kept_and_loads(straight):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer, out = straight
    scores = {row["step"]: row["valid_SCS"] for row in rows(out) if "valid_SCS" in row}
    record = json.loads((out / "best" / "best.json").read_text())
    first = min(step for step, score in scores.items() if score == max(scores.values()))
    assert [*scores] == [0, 2, 4, 6] and record == {"step": first, "SCS": scores[first]} == trainer.best
    best = AutoModelForCausalLM.from_pretrained(out / "best")
    kept = torch.cat([p.detach().flatten() for p in best.parameters()])
    if first == 0:
        assert torch.equal(kept, torch.cat([p.detach().flatten() for p in policy().parameters()]))
    assert AutoTokenizer.from_pretrained(out / "best").get_vocab() == TOKENIZER.get_vocab()


def test_no_best_when_told_not_to(tmp_path):
    go(tmp_path, steps=2, keep_best=False, save_every=0)
    assert not (tmp_path / "best").exists() and checkpoints(tmp_path) == []


def test_what_a_checkpoint_holds(straight):
    folder = straight[1] / "checkpoint-8"
    names = {path.name for path in folder.iterdir()}
    assert {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "memcalib.json",
        "steps.jsonl",
    } <= names
    state = read_state(folder)
    assert state["step"] == 4 and len((folder / "steps.jsonl").read_text().splitlines()) == 5
    assert {"thresholds", "drift", "best", "judge_cache", "skipped", "config", "examples", "processes"} <= state.keys()


def test_optimizer_files_load_without_running_code(straight):
    class Bomb:
        def __reduce__(self):
            return print, ("code ran",)

    folder = straight[1] / "checkpoint-8"
    assert torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    torch.save(Bomb(), folder.parent / "bomb.pt")
    with pytest.raises(Exception, match="weights_only|Unsupported"):
        torch.load(folder.parent / "bomb.pt", weights_only=True)


def test_sentence_thresholds_are_resumed(tmp_path):
    options = dict(granularity="sentence", steps=3, eval_every=0)
    whole = go(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        go(tmp_path / "cut", on_step=kill_at(3), **options)
    resumed = go(tmp_path / "cut", resume=True, **options)
    assert "sentence" in whole.thresholds.state_dict()
    assert resumed.thresholds.state_dict() == whole.thresholds.state_dict()
    assert torch.equal(weights(resumed), weights(whole))
