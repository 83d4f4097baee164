"""A run killed at any moment goes on as if nothing had happened;
checkpoints that do not fit are refused.
"""

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
import run_files
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_policy import EXAMPLES, TOKENIZER, policy
from run_files import newest_checkpoint, rows, weights
from transformers import AutoModelForCausalLM

from memcalib.trainer import checkpoints as module
from memcalib.trainer import train_config as settings_module
from memcalib.trainer import callbacks as steps
from memcalib.trainer.checkpoints import (
    CheckpointError,
    checkpoints,
    read_state,
    restore_best,
    seal,
)
from memcalib.products.micro.world import WORLDS, exact_judge
from memcalib.products.micro.policy import build_policy
from memcalib.trainer.rewards import JudgeFault
from memcalib.trainer.train_config import world_config
from memcalib.training import train

torch.set_num_threads(1)
SETTINGS = dict(prompts=4, generations=4, steps=6, max_tokens=12, save_every=1, eval_every=2)


class Killed(BaseException):
    """Stands in for kill -9 within one process: nothing of ours may catch it."""


def go(out: Path, *, on_step=None, resume=None, model=None, **changes):
    config = world_config(WORLDS["short"], **(SETTINGS | changes))
    options = dict(
        tokenizer=TOKENIZER, out=out, validation=EXAMPLES[:2], on_step=on_step, resume=resume
    )
    return train(model or policy(), config, EXAMPLES, exact_judge, **options)


def kill_at(step: int):
    def kill(row):
        if row["step"] == step:
            raise Killed

    return kill


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    return go(out), out


def assert_same(trainer, out: Path, straight) -> None:
    run_files.assert_same((trainer, out), straight)
    last = read_state(out / "checkpoint-12")
    last_of_straight = read_state(straight[1] / "checkpoint-12")
    del last["drift"], last_of_straight["drift"]
    assert last == last_of_straight


@pytest.mark.parametrize(
    "step", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_interrupted_run_goes_on_bit_for_bit(tmp_path, straight, step):
    with pytest.raises(Killed):
        go(tmp_path, on_step=kill_at(step))
    assert newest_checkpoint(tmp_path).name == f"checkpoint-{2 * (step - 1)}"
    assert_same(go(tmp_path, resume=True), tmp_path, straight)


@pytest.mark.slow
def test_resume_from_a_copy_elsewhere(tmp_path, straight):
    shutil.copytree(straight[1] / "checkpoint-6", tmp_path / "usb" / "checkpoint-6")
    shutil.copytree(straight[1] / "best", tmp_path / "usb" / "best")
    trainer = go(tmp_path / "new", resume=tmp_path / "usb" / "checkpoint-6")
    assert_same(trainer, tmp_path / "new", straight)


TESTS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
SCRIPT = """
import os, signal, sys
sys.path[:0] = {tests!r}
import test_checkpoints as t
def kill(row):
    if row["step"] == {step} and {moment!r} == "step":
        os.kill(os.getpid(), signal.SIGKILL)
    if row["step"] == {step} and {moment!r} == "save":
        t.torch.save = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
t.go(t.Path({out!r}), on_step=kill)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step", "save"])
def test_kill_nine(tmp_path, straight, moment):
    step = random.randrange(2, 6)
    print(f"killed at step {step}")
    script = SCRIPT.format(tests=TESTS, step=step, moment=moment, out=str(tmp_path))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=280
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert newest_checkpoint(tmp_path).name == f"checkpoint-{2 * (step - 1)}"
    assert len(checkpoints(tmp_path)) == (step - 1 if moment == "step" else step)
    assert_same(go(tmp_path, resume=True), tmp_path, straight)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(beta=0.5), marks=pytest.mark.slow),
        pytest.param(
            dict(method="opsd-pg", beta=0.0, teacher_prompt_template="micro"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(method="opsd-gkd", beta=0.0, teacher_prompt_template="micro"),
            marks=pytest.mark.slow,
        ),
        dict(lora_rank=4, beta=0.5),
    ],
)
def test_going_on_with_the_model_that_was_trained_in_place(tmp_path, options):
    options |= dict(steps=3, eval_every=0, lr=1e-3)
    whole = go(tmp_path / "whole", **options)
    model = policy()
    with pytest.raises(Killed):
        go(tmp_path / "cut", on_step=kill_at(2), model=model, **options)
    resumed = go(tmp_path / "cut", resume=True, model=model, **options)
    run_files.assert_same((resumed, tmp_path / "cut"), (whole, tmp_path / "whole"))
    assert (tmp_path / "cut" / "reference").exists() == ("lora_rank" not in options)


def test_the_reference_is_kept_carried_along_and_refused_when_damaged(tmp_path, straight, caplog):
    copied(straight, tmp_path / "usb", "checkpoint-6", "best", "reference")
    file = Path("reference") / "model.safetensors"
    other = build_policy(3)
    trainer = go(tmp_path / "new", resume=tmp_path / "usb" / "checkpoint-6", model=other)
    assert_same(trainer, tmp_path / "new", straight)
    assert (tmp_path / "new" / file).read_bytes() == (straight[1] / file).read_bytes()
    shutil.rmtree(tmp_path / "new" / "reference")
    with caplog.at_level(logging.WARNING, "memcalib"):
        go(tmp_path / "new", resume=True)
    assert "takes its place: its weights must be those of the first start" in caplog.text
    assert (tmp_path / "new" / file).read_bytes() == (straight[1] / file).read_bytes()
    shutil.rmtree(tmp_path / "new" / "reference")
    with pytest.raises(
        CheckpointError,
        match="given in its place: model.safetensors has checksum .* trained against",
    ):
        go(tmp_path / "new", resume=True, model=build_policy(3))
    assert not (tmp_path / "new" / "reference").exists()
    copied((None, tmp_path / "new"), tmp_path / "mixed", "checkpoint-12", "best")
    build_policy(3).save_pretrained(tmp_path / "mixed" / "reference")
    seal(tmp_path / "mixed" / "reference", {})
    with pytest.raises(
        CheckpointError, match="mixed.reference: model.safetensors has checksum .* first start"
    ):
        go(tmp_path / "mixed", resume=True)
    copied(straight, tmp_path / "new", "reference")
    (tmp_path / "new" / file).write_bytes(spoilt((straight[1] / file).read_bytes(), "flipped"))
    with pytest.raises(CheckpointError, match="reference.model.safetensors: checksum .* damaged"):
        go(tmp_path / "new", resume=True)


def test_an_older_checkpoint_does_not_know_its_reference(tmp_path, straight, caplog):
    """It takes the model that it is given, and says what that must be."""
    folder = copied(straight, tmp_path, "best", "checkpoint-6")
    state = read_state(folder)
    assert [*state.pop("reference")] == ["model.safetensors"]
    seal(folder, state)
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = go(tmp_path, resume=True)
    assert "takes its place: it must be the same as at the first start" in caplog.text
    assert_same(trainer, tmp_path, straight)


def test_a_new_start_has_a_new_reference(tmp_path, straight):
    copied(straight, tmp_path, "reference")
    fresh = build_policy(3)
    start = weights(fresh).clone()
    trainer = go(tmp_path, model=fresh, resume=True, steps=1, eval_every=0)
    assert torch.equal(weights(trainer.ref_model), start)


def test_a_finished_run_only_loads(tmp_path, straight):
    shutil.copytree(straight[1], tmp_path / "copy")
    trainer = go(tmp_path / "copy", resume=True)
    assert_same(trainer, tmp_path / "copy", straight)


def test_more_steps_are_the_same_run(tmp_path, straight):
    go(tmp_path, steps=3)
    trainer = go(tmp_path, resume=True)
    run_files.assert_same((trainer, tmp_path), straight)


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


@pytest.mark.parametrize(
    "change",
    [
        dict(accumulate=2),
        pytest.param(dict(share_prompts=False), marks=pytest.mark.slow),
        pytest.param(dict(trl={"gradient_checkpointing": True}), marks=pytest.mark.slow),
        dict(
            accumulate=4,
            trl={
                "vllm_mode": "server",
                "vllm_server_base_url": "http://localhost:1",
                "dataloader_pin_memory": False,
            },
        ),
    ],
)
def test_settings_of_memory_may_change(tmp_path, straight, caplog, change):
    copied(straight, tmp_path, "best", "reference", "checkpoint-4")
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = go(tmp_path, resume=True, **change)
    assert "different memory settings" in caplog.text and "may differ by rounding" in caplog.text
    assert "base_url" not in caplog.text and "pin_memory" not in caplog.text
    torch.testing.assert_close(
        weights(trainer.model), weights(straight[0].model), rtol=0, atol=2e-3
    )
    last = rows(tmp_path)[-1]
    last_of_straight = rows(straight[1])[-1]
    assert last["step"] == last_of_straight["step"] == 6
    assert last["reward"] == pytest.approx(last_of_straight["reward"], abs=0.5)
    reward = next(row["reward"] for row in rows(tmp_path) if row["step"] == 3)
    reward_of_straight = next(row["reward"] for row in rows(straight[1]) if row["step"] == 3)
    assert reward == reward_of_straight, "the same prompts and answers, from the same weights"


def test_how_often_held_out_examples_are_answered_may_change(tmp_path, straight, caplog):
    """The weights are those of a run that was not stopped;
    the best policy is the best of other steps, which is said.
    """
    copied(straight, tmp_path, "best", "reference", "checkpoint-4")
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = go(tmp_path, resume=True, eval_every=1)
    messages = [text for text in caplog.messages if "eval_every" in text]
    assert messages == [
        (
            f"{tmp_path / 'checkpoint-4'} goes on with eval_every 1, 2 before: the best policy is "
            "chosen among other steps"
        )
    ]
    assert torch.equal(weights(trainer.model), weights(straight[0].model))
    assert [row["step"] for row in rows(tmp_path) if "valid_SCS" in row] == [0, 2, 3, 4, 5, 6]


def test_the_sampler_may_not_change_and_it_is_said_why(tmp_path, straight):
    why = "sampler: 'shared' there, 'generate' now; another sampler uses different random numbers"
    with pytest.raises(CheckpointError, match=rf"another run \({why}\); allowed"):
        go(tmp_path, resume=straight[1] / "checkpoint-4", sampler="generate")


def test_what_decides_the_result_is_not_memory(tmp_path, straight):
    copied(straight, tmp_path, "checkpoint-4")
    with pytest.raises(CheckpointError, match="trl.loss_type: nothing there, 'grpo' now"):
        go(tmp_path, resume=True, accumulate=2, trl={"loss_type": "grpo"})


def test_other_examples_are_refused(tmp_path, straight, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "EXAMPLES", EXAMPLES[::-1])
    with pytest.raises(CheckpointError, match="different training examples"):
        go(tmp_path, resume=straight[1] / "checkpoint-4")


def test_a_fresh_start_does_not_mix_with_an_earlier_run(straight):
    with pytest.raises(CheckpointError, match="resume=True"):
        go(straight[1])


def copied(straight, out: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(straight[1] / name, out / name)
    return out / names[-1]


def test_broken_checkpoints(tmp_path, straight, caplog):
    copied(straight, tmp_path, "checkpoint-4", "checkpoint-6", "checkpoint-8")
    (tmp_path / "checkpoint-8" / "memcalib.json").unlink()
    (tmp_path / "checkpoint-6" / "optimizer.pt").write_bytes(b"cut")
    (tmp_path / "checkpoint-10").write_text("a plain file")
    with caplog.at_level(logging.WARNING, "memcalib"):
        assert newest_checkpoint(tmp_path).name == "checkpoint-4"
    assert "skipped: " in caplog.text and "optimizer.pt: 3 bytes" in caplog.text
    with pytest.raises(CheckpointError, match="no such folder"):
        read_state(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError, match="a file, not a folder"):
        read_state(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-4" / "rng_state.pth").unlink()
    with pytest.raises(CheckpointError, match="rng_state.pth: No such file"):
        read_state(tmp_path / "checkpoint-4")
    assert newest_checkpoint(tmp_path) is None


def spoilt(content: bytes, damage: str) -> bytes:
    """The same number of bytes, all of them zero, or with one bit flipped."""
    if damage == "zeroed":
        return bytes(len(content))
    index = random.randrange(len(content))
    byte = content[index] ^ (1 << random.randrange(8))
    return content[:index] + bytes([byte]) + content[index + 1 :]


@pytest.mark.parametrize("damage", ["zeroed", "flipped"])
def test_damage_at_the_right_size_is_found_in_every_file(tmp_path, straight, damage):
    folder = copied(straight, tmp_path, "checkpoint-4")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        content = path.read_bytes()
        path.write_bytes(spoilt(content, damage))
        with pytest.raises(CheckpointError) as error:
            read_state(folder)
        assert str(error.value).startswith(f"{path}: "), path
        path.write_bytes(content)
    assert read_state(folder)["step"] == 2


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, straight, caplog):
    bad = copied(straight, tmp_path, "checkpoint-4", "checkpoint-6") / "model.safetensors"
    shutil.copytree(straight[1] / "best", tmp_path / "best")
    bad.write_bytes(spoilt(bad.read_bytes(), "flipped"))
    with pytest.raises(
        CheckpointError,
        match="model.safetensors: found checksum .{16}; the file was saved with .{16}, .* damaged",
    ):
        go(tmp_path, resume=bad.parent)
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = go(tmp_path, resume=True)
    assert (
        trainer.checkpoints.resumed == (4, tmp_path / "checkpoint-4") and "skipped" in caplog.text
    )
    assert_same(trainer, tmp_path, straight)


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"{",
            b"[]",
            b"null",
            b"7",
            b'"text"',
            b"{}",
            b'{"state": {}, "files": {}}',
            b"\xff\xfe\x00",
        ),
        b'{"state": {"step": 3}, "files": {}, "xxh3": "0000000000000000"}',
        b'{"state": 1, "files": [], "xxh3": null}',
    ],
)
def test_a_damaged_seal_is_named(tmp_path, straight, content, caplog):
    folder = copied(straight, tmp_path, "checkpoint-2", "checkpoint-4")
    (folder / "memcalib.json").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-4.memcalib.json: (found .*; allowed:|found checksum .* saved with)",
    ):
        read_state(folder)
    with caplog.at_level(logging.WARNING, "memcalib"):
        assert newest_checkpoint(tmp_path).name == "checkpoint-2"
    assert "memcalib.json" in caplog.text


def test_a_seal_that_cannot_be_read(tmp_path, straight, monkeypatch):
    folder = copied(straight, tmp_path, "checkpoint-4")
    (folder / "memcalib.json").unlink()
    (folder / "memcalib.json").mkdir()
    with pytest.raises(CheckpointError, match=r"no memcalib\.json"):
        read_state(folder)
    shutil.copytree(straight[1] / "checkpoint-6", tmp_path / "checkpoint-6")

    def broken(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "checksum", broken)
    with pytest.raises(CheckpointError, match="Input/output error; this checkpoint was saved with"):
        read_state(tmp_path / "checkpoint-6")


def test_every_file_is_read_once_for_its_checksum(tmp_path, straight, monkeypatch):
    folder = copied(straight, tmp_path, "best", "reference", "checkpoint-12")
    read = []
    plain = module.checksum
    monkeypatch.setattr(module, "checksum", lambda path: read.append(path) or plain(path))
    go(tmp_path, resume=True)
    files = [
        *folder.rglob("*"),
        *(tmp_path / "best").rglob("*"),
        *(tmp_path / "reference").rglob("*"),
    ]
    expected = {path for path in files if path.is_file() and path.name != "memcalib.json"}
    assert sorted(read) == sorted(expected)


def test_an_old_checkpoint_goes_when_the_new_one_is_sealed(tmp_path, monkeypatch):
    folders_when_sealed = []
    plain = module.seal

    def watched(folder, *args):
        folders_when_sealed.append([path.name for path in checkpoints(tmp_path)])
        plain(folder, *args)

    monkeypatch.setattr(module, "seal", watched)
    go(tmp_path, steps=3, eval_every=0, trl={"save_total_limit": 1})
    assert folders_when_sealed == [
        ["checkpoint-2"],
        ["checkpoint-2", "checkpoint-4"],
        ["checkpoint-4", "checkpoint-6"],
    ]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-6"]


def test_what_lies_at_the_place_of_a_checkpoint_makes_room(tmp_path, straight):
    (tmp_path / "checkpoint-2").write_text("a plain file")
    (tmp_path / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "checkpoint-4" / "left").write_text("by a killed run")
    trainer = go(tmp_path, resume=True, steps=2)
    assert (
        trainer.checkpoints.resumed is None and newest_checkpoint(tmp_path).name == "checkpoint-4"
    )
    assert (
        not (tmp_path / "checkpoint-4" / "left").exists()
        and read_state(tmp_path / "checkpoint-2")["step"] == 1
    )


def test_a_checkpoint_of_an_earlier_run_does_not_pass_for_saved(tmp_path, straight):
    """A run that has to stop saves its own step, whatever lies there with a seal on it."""
    bad = copied(straight, tmp_path, "checkpoint-2", "checkpoint-4") / "model.safetensors"
    bad.write_bytes(bytes(bad.stat().st_size))

    broken = []

    def judge(example, response):
        if broken:
            raise KeyError("bug")
        return exact_judge(example, response)

    def break_judge(row):
        if row["step"] == 2:
            broken.append(True)

    config = world_config(WORLDS["short"], **(SETTINGS | {"save_every": 0}))
    options = dict(tokenizer=TOKENIZER, out=tmp_path, on_step=break_judge)
    with pytest.raises(JudgeFault, match="saved in .*checkpoint-4"):
        train(policy(), config, EXAMPLES, judge, resume=tmp_path / "checkpoint-2", **options)
    assert read_state(tmp_path / "checkpoint-4")["step"] == 2


@pytest.mark.parametrize("damage", [b'{"step": 1, "rew', b"\x00\xff", b""])
def test_rows_damaged_in_the_middle_do_not_stop_a_run_from_going_on(tmp_path, straight, damage):
    copied(straight, tmp_path, "checkpoint-6")
    shutil.copytree(straight[1] / "best", tmp_path / "best")
    lines = (straight[1] / "steps.jsonl").read_bytes().splitlines()[:5]
    lines[2] = damage
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join(lines))
    assert_same(go(tmp_path, resume=True), tmp_path, straight)


@pytest.mark.parametrize("record", ["", "{", "[]"])
def test_a_damaged_record_of_the_best_policy(tmp_path, straight, record):
    copied(straight, tmp_path / "usb", "checkpoint-6")
    shutil.copytree(straight[1] / "best", tmp_path / "usb" / "best")
    shutil.copytree(straight[1] / "best", tmp_path / "new" / "best")
    (tmp_path / "new" / "best" / "best.json").write_text(record)
    whole = json.loads((straight[1] / "best" / "best.json").read_text())
    assert restore_best(tmp_path / "usb" / "checkpoint-6", tmp_path / "new", whole)
    assert json.loads((tmp_path / "new" / "best" / "best.json").read_text()) == whole
    (tmp_path / "usb" / "best" / "best.json").write_text(record)
    (tmp_path / "new" / "best" / "best.json").write_text(record)
    assert not restore_best(tmp_path / "usb" / "checkpoint-6", tmp_path / "new", whole)


def test_a_damaged_best_policy_is_fetched_again_or_given_up(tmp_path, straight, caplog):
    logging.disable(logging.NOTSET)
    copied(straight, tmp_path / "usb", "checkpoint-6")
    shutil.copytree(straight[1] / "best", tmp_path / "usb" / "best")
    shutil.copytree(straight[1] / "best", tmp_path / "new" / "best")
    record = json.loads((straight[1] / "best" / "best.json").read_text())
    whole = (straight[1] / "best" / "model.safetensors").read_bytes()
    (tmp_path / "new" / "best" / "model.safetensors").write_bytes(whole[:10])
    with caplog.at_level(logging.WARNING, "memcalib"):
        assert restore_best(tmp_path / "usb" / "checkpoint-6", tmp_path / "new", record)
    assert "10 bytes" in caplog.text
    assert (tmp_path / "new" / "best" / "model.safetensors").read_bytes() == whole
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    for name in ("usb", "new"):
        (tmp_path / name / "best" / "model.safetensors").write_bytes(damaged)
    assert not restore_best(tmp_path / "usb" / "checkpoint-6", tmp_path / "new", record)
    assert not (tmp_path / "new" / "best").exists()


@pytest.mark.parametrize(
    "scores",
    [[10, 20, 30, 40, 5, 35], pytest.param([10, 20, 30, 40, 15, 12], marks=pytest.mark.slow)],
)
def test_a_best_policy_of_an_abandoned_branch_is_not_this_runs(
    tmp_path, monkeypatch, caplog, scores
):
    """Four evaluations, then two more from the checkpoint of step 1:
    the best of step 3 was never trained again.
    """
    next_scores = iter(scores)
    options = dict(steps=3, eval_every=1)
    monkeypatch.setattr(steps, "summary", lambda judged: {"SCS": float(next(next_scores))})
    assert go(tmp_path, **options).rows.best == {"step": 3, "SCS": 40.0}
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = go(tmp_path, resume=tmp_path / "checkpoint-2", **options)
    scores_by_step = [(row["step"], row["valid_SCS"]) for row in rows(tmp_path)]
    assert scores_by_step == [(0, 10.0), (1, 20.0), *enumerate(scores[4:], 2)]
    step, score = max(scores_by_step[2:], key=lambda pair: pair[1])
    assert trainer.rows.best == {"step": step, "SCS": score} == read_state(tmp_path / "best")
    assert "of step 3, not the best policy of this checkpoint: removed" in caplog.text
    best = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "best"))
    assert torch.equal(best, weights(trainer.model)) == (step == 3)


def test_no_best_policy_yet_means_none(tmp_path, straight):
    copied(straight, tmp_path, "best")
    assert (
        restore_best(tmp_path / "checkpoint-2", tmp_path, None) and not (tmp_path / "best").exists()
    )
    assert restore_best(tmp_path / "checkpoint-2", tmp_path, None)


@pytest.mark.slow
def test_an_adapter_is_resumed_bit_for_bit(tmp_path):
    options = dict(lora_rank=4, steps=4, lr=1e-2)
    whole = go(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        go(tmp_path / "cut", on_step=kill_at(3), **options)
    assert newest_checkpoint(tmp_path / "cut").name == "checkpoint-4"
    assert (tmp_path / "cut" / "checkpoint-4" / "adapter_model.safetensors").is_file()
    adapter = json.loads((tmp_path / "cut" / "checkpoint-4" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 4), "the scale of an adapter is 1"
    resumed = go(tmp_path / "cut", resume=True, **options)
    run_files.assert_same((resumed, tmp_path / "cut"), (whole, tmp_path / "whole"))
    trained = {name for name, p in whole.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    moved = [p.abs().max().item() for name, p in whole.model.named_parameters() if "lora_B" in name]
    assert min(moved) > 0, "an adapter that has not moved would be equal for nothing"
    done = go(tmp_path / "cut", resume=True, **options)
    assert torch.equal(weights(done.model), weights(whole.model))


@given(content=st.binary(max_size=600_000), added=st.binary(min_size=1, max_size=3))
@settings(max_examples=25)
def test_checksum_against_the_library_and_any_change(tmp_path_factory, content, added):
    path = tmp_path_factory.mktemp("sum") / "file"
    path.write_bytes(content)
    checksum = module.checksum(path)
    assert checksum == xxhash.xxh3_64_hexdigest(content)
    path.write_bytes(content + added)
    assert module.checksum(path) != checksum


def test_best_policy_is_kept_and_loads(straight):
    from transformers import AutoTokenizer

    trainer, out = straight
    scores = {row["step"]: row["valid_SCS"] for row in rows(out) if "valid_SCS" in row}
    record = json.loads((out / "best" / "best.json").read_text())
    first = min(step for step, score in scores.items() if score == max(scores.values()))
    assert [*scores] == [0, 2, 4, 6]
    assert record == {"step": first, "SCS": scores[first]} == trainer.rows.best
    best = AutoModelForCausalLM.from_pretrained(out / "best")
    if first == 0:
        assert torch.equal(weights(best), weights(policy()))
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
    assert {
        "thresholds",
        "drift",
        "best",
        "judge_cache",
        "skipped",
        "config",
        "examples",
        "processes",
    } <= state.keys()


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
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_checkpoints_are_in_the_order_of_their_numbers(tmp_path):
    for number in (8, 100, 10, 9):
        (tmp_path / f"checkpoint-{number}").mkdir()
        module.seal(tmp_path / f"checkpoint-{number}", {"updates": number})
    (tmp_path / "checkpoint-latest").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == [
        f"checkpoint-{number}" for number in (8, 9, 10, 100)
    ]
    assert newest_checkpoint(tmp_path).name == "checkpoint-100"


def test_all_settings_of_learning_decide_the_result():
    """Of answers, credit, scales and teachers as well; how often is saved,
    watched and told does not.
    """
    watched = (
        "save_every eval_every keep_best trace_every report_to max_failed pause_minutes "
        "stop_on_drift"
    )
    names = settings_module.TrainSettings.model_fields.keys() - {*watched.split(), "trl"}
    names -= {name for name in names if name.startswith("drift_")}
    names -= {"steps", "accumulate", "share_prompts", "sampling_tokens"}
    config = settings_module.TrainConfig().model_dump(mode="json")
    result, memory = module.decisive(config)
    assert (
        {"beta", "lr", "eta", "seed", "top_k", "eps", "eval_text"}
        <= names
        <= result.keys() - memory.keys()
    )
    assert not {"steps", "save_every", "report_to"} & {*result, *memory}
