"""The verb `train`: six methods, kills and resumes, models of one's own,
and everything that can be wrong before a step.
"""

import json
import math
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from trainer_logger import hear
from memcalib.credit.sentences import splitter_version
from memcalib.trainer.checkpoints import checkpoints, read_state, seal, unseal, writing
from memcalib.trainer import recipe as recipes
from memcalib.commands.cli import main
from memcalib.judge import LLMJudge
from memcalib.io.jsonl import read_rows
from memcalib.metrics import METRICS
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.policy import build_tokenizer, load_policy, policy_path
from memcalib.problem import load_examples, render, sample_records
from memcalib.io.records import write_jsonl
from memcalib.trainer.recipe import LABELS, Recipe, Start, load_recipe, method_config
from memcalib.trainer.recipe import load_start
from memcalib.trainer.rewards import HeldOutScores
from memcalib.trainer.train_config import TrainConfig
from memcalib.trainer.callbacks import LOGGED, StepRows
from memcalib.trainer.recipe import Examples, recipe_examples, teaching_rows
from memcalib.commands.train import TrainRun

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("train_run")
SMALL = [
    "train.steps=2",
    "train.prompts=2",
    "train.generations=4",
    "train.eval_every=1",
    "train.save_every=1",
    "sft.eval_every=2",
    "sft.log_every=1",
    "data.world={name: short, train: 8, validation: 4, demonstrations: 48}",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def lasting_stderr():
    """The libraries' loggers keep the standard error they first saw,
    which capsys closes after a test.
    """
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.__stderr__
            handler.flush = sys.__stderr__.flush


def small(*settings: str) -> list[str]:
    """The words that set a small training, and these settings beside it."""
    words = []
    for setting in (*SMALL, *settings):
        words += ["--set", setting]
    return words


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["train", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return exit.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize("method", LABELS.values())
def test_every_method_from_one_recipe(capsys, tmp_path, method):
    out = tmp_path / method
    code, output, err = call(
        capsys, "micro", "--method", method, "--out", out, "--seed", "5", *small()
    )
    assert code == 0, err
    assert output.splitlines()[0].startswith(f"{method}, seed 5")
    assert "best" in output and str(out / "policy") in output
    model, tokenizer = load_policy(out / "policy")
    assert all(p.isfinite().all() for p in model.parameters()) and tokenizer.chat_template
    start, _ = load_policy("pretrained" if method == "sft" else "cold-short")
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    distance = sum((trained - before).abs().sum() for trained, before in pairs)
    assert distance > 0, "the policy is not the one it started from"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["config"]["method"] == method and manifest["seeds"] == {"train": 5}
    example = recipe_examples(load_recipe("micro", SMALL)).train[0]
    assert manifest["judge"] == exact_judge(example, "").judge
    assert manifest["cost"] == 0 and manifest["sessions"][0]["step"] == 2
    assert manifest["versions"]["torch"]
    cut_by = manifest.get("sentences_cut_by", "")
    assert cut_by == ("" if method == "sft" else splitter_version())
    rows = read_rows(out / "steps.jsonl")
    assert rows[-1]["step"] == 2 and any("valid_SCS" in row for row in rows)
    if method.startswith("opsd"):
        assert all(row.get("reward") is None for row in rows), "no judge, no reward: not zero"
    assert load_recipe(out / "recipe.yaml").data.world.train == 8


def started(out: Path, method: str = "memcalib-rl", *settings: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "memcalib", "train", "--method", method, "--out", str(out)]
    command += small("train.steps=4", *settings)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 150
) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def numbers(folder: Path) -> list[dict]:
    """The rows of a run without what its time was."""
    rows = read_rows(folder / "steps.jsonl")
    for row in rows:
        row.pop("seconds", None)
    return rows


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    recipe = load_recipe("micro", [*SMALL, "train.steps=4"])
    TrainRun(recipe, "memcalib-rl", out).run()
    return out


@pytest.mark.parametrize(
    "stop", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_stopped_and_resumed_equals_straight(capsys, tmp_path, straight, stop):
    out = tmp_path / "stopped"
    process = started(out)
    wait_for(lambda: (out / "checkpoint-2" / "memcalib.json").is_file(), process)
    process.send_signal(stop)
    _, err = process.communicate(timeout=120)
    assert not (out / "policy").exists()
    if stop == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in err
        assert "--resume" in err and str(out) in err
    code, _, err = call(
        capsys,
        "micro",
        "--method",
        "memcalib-rl",
        "--out",
        out,
        "--resume",
        *small("train.steps=4"),
    )
    assert code == 0, err
    assert numbers(out) == numbers(straight)
    for file in ("policy/model.safetensors", "best/model.safetensors"):
        assert (out / file).read_bytes() == (straight / file).read_bytes()
    assert json.loads((out / "manifest.json").read_text())["sessions"][-1]["step"] == 4


def test_a_torn_row_and_a_damaged_manifest_do_not_stop_a_run_from_going_on(
    capsys, tmp_path, straight
):
    out = tmp_path / "torn"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "policy")
    rows = (out / "steps.jsonl").read_bytes()
    (out / "steps.jsonl").write_bytes(rows[:-30])
    (out / "manifest.json").write_text("[]")
    code, _, err = call(capsys, "micro", "--out", out, *small("train.steps=4"))
    assert code == 1 and "--resume" in err
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert code == 0, err
    assert numbers(out) == numbers(straight) and (out / "policy").is_dir()


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "rew\x00rd": 1}\n', b"\xff\xfe\n", b"[1, 2]\n", b'{"no": "step"}\n']
)
def test_rows_damaged_in_the_middle_do_not_stop_a_run_from_going_on(
    capsys, tmp_path, straight, caplog, damage
):
    out = tmp_path / "damaged"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "policy")
    lines = (out / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (out / "steps.jsonl").write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert code == 0, err
    assert numbers(out) == numbers(straight) and (out / "policy").is_dir()
    warnings = [text for text in caplog.messages if "cannot be read" in text]
    assert all("line 3 " in text for text in warnings)
    assert len(warnings) == (0 if b"no" in damage else 1)


@pytest.mark.slow
def test_going_on_with_tied_weights_warns_of_nothing(tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "policy")
    command = [
        sys.executable,
        "-m",
        "memcalib",
        "train",
        "--method",
        "memcalib-rl",
        "--out",
        str(out),
        "--resume",
    ]
    completed = subprocess.run(
        [*command, *small("train.steps=5")], capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0 and completed.stderr == ""


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_folder(capsys, tmp_path):
    out = tmp_path / "run"
    process = started(out, "memcalib-rl", "train.steps=60")
    wait_for(lambda: (out / "checkpoint-2" / "memcalib.json").is_file(), process)
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=60"))
    assert code == 1 and "another process is training" in err and process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=2"))
    assert code == 0, err


def test_a_failed_start_does_not_bind_its_folder(capsys, tmp_path):
    out = tmp_path / "run"
    broken = tmp_path / "broken"
    shutil.copytree(policy_path("cold-short"), broken)
    (broken / "model.safetensors").write_bytes(b"cut short")
    assert call(capsys, "micro", "--out", out, *small(f"start.model={broken}"))[0] == 1
    assert (out / "manifest.json").is_file(), "the weights are read when the folder is bound"
    code, _, err = call(capsys, "micro", "--out", out, *small("train.steps=1"))
    assert code == 0, err
    code, _, err = call(
        capsys, "micro", "--out", out, "--resume", *small("train.steps=1", "train.lr=1")
    )
    assert code == 1 and "other settings" in err


@pytest.mark.slow
def test_supervised_fine_tuning_resumes_too(capsys, tmp_path):
    recipe = load_recipe("micro", [*SMALL, "sft.save_every=2", "data.world.demonstrations=144"])
    TrainRun(recipe, "sft", tmp_path / "straight").run()
    out = tmp_path / "stopped"
    process = started(out, "sft", "sft.save_every=2", "data.world.demonstrations=144")
    wait_for(lambda: (out / "checkpoint-2" / "trainer_state.json").is_file(), process)
    process.kill()
    process.communicate(timeout=60)
    TrainRun(recipe, "sft", out, resume=True).run()
    assert [r["step"] for r in read_rows(out / "steps.jsonl") if "loss" in r] == [1, 2, 3, 4, 5, 6]
    weights = (out / "policy" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "straight" / "policy" / "model.safetensors").read_bytes()


def test_a_finished_run_is_not_trained_again(capsys, straight):
    before = (straight / "policy" / "model.safetensors").stat().st_mtime_ns
    code, _, err = call(
        capsys, "--method", "memcalib-rl", "--out", straight, *small("train.steps=4")
    )
    assert code == 1 and "--resume" in err
    code, output, _ = call(
        capsys, "--method", "memcalib-rl", "--out", straight, "--resume", *small("train.steps=4")
    )
    assert code == 0 and "best" in output
    assert (straight / "policy" / "model.safetensors").stat().st_mtime_ns == before
    code, _, err = call(
        capsys, "--method", "gdpo", "--out", straight, "--resume", *small("train.steps=4")
    )
    assert code == 1 and "method: 'memcalib-rl' there, 'gdpo' now" in err


# --- a model of one's own -------------------------------------------------------------------------


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    texts = []
    for example in make_examples("short", 40, 3):
        texts += [message["content"] for message in render(example)]
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A model folder as anybody's: Qwen3 architecture, byte-level BPE, a chat template,
    no padding token.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    folder = tmp_path_factory.mktemp("own") / "model"
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def file_recipe(tmp_path_factory, model_folder) -> dict:
    """A recipe for files, that model and a judge behind an address;
    the judge's server lives as long as the module.
    """
    folder = tmp_path_factory.mktemp("mine")
    examples = make_examples("short", 6, 5)
    held_out = make_examples("short", 2, 5, "validation")
    write_jsonl(folder / "train.jsonl", examples)
    write_jsonl(folder / "validation.jsonl", held_out)
    with MicroServer([*examples, *held_out]) as server:
        yield {
            "start": {"model": str(model_folder)},
            "data": {
                "train": str(folder / "train.jsonl"),
                "validation": str(folder / "validation.jsonl"),
            },
            "judge": {
                "model": "micro-judge",
                "base_url": server.base_url,
                "key_env": "",
                "thinking": "default",
                "price": {"prompt": 1.0, "completion": 2.0},
            },
            "train": {
                "steps": 1,
                "prompts": 2,
                "generations": 4,
                "minibatches": 1,
                "max_tokens": 12,
                "lr": 1e-3,
                "eval_every": 1,
            },
        }


def written(folder: Path, content: dict) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(("method", "rank"), [("memcalib-rl", 0), ("grpo", 2)])
def test_own_model_own_files_llm_judge(capsys, tmp_path, model_folder, file_recipe, method, rank):
    recipe = written(tmp_path, file_recipe)
    out = tmp_path / "run"
    code, output, err = call(
        capsys,
        recipe,
        "--method",
        method,
        "--out",
        out,
        "--set",
        f"train.lora_rank={rank}",
        "--no-cache",
    )
    assert code == 0, err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["judge"].startswith("micro-judge@") and len(manifest["judge_prompt"]) == 16
    assert manifest["cost"] > 0 and manifest["sessions"][0]["judge"]["calls"] >= 4
    assert (out / "adapter" / "adapter_config.json").is_file() == (rank > 0)
    assert not (out / "policy" / "adapter_config.json").exists(), "any program can load it"
    assert "validation examples" in output
    model, tokenizer = load_start(Start(model=str(out / "policy")))
    before = load_start(Start(model=str(model_folder)))[0]
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert not all(torch.equal(trained, start) for trained, start in pairs)
    assert tokenizer.chat_template == TEMPLATE


def test_the_policy_can_be_evaluated(capsys, tmp_path, file_recipe):
    run = TrainRun(Recipe.model_validate(file_recipe), "gdpo", tmp_path / "run")
    run.run()
    words = [
        "evaluate",
        file_recipe["data"]["validation"],
        "--weights",
        str(tmp_path / "run" / "policy"),
    ]
    for setting in ("sampling.seeds=[1]", "sampling.max_tokens=8", "control=false"):
        words += ["--set", setting]
    words += ["--judge", "micro-exact", "--no-cache", "--out", str(tmp_path / "eval")]
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert not exit.value.code, capsys.readouterr().err
    assert (tmp_path / "eval" / "report.html").is_file()


def test_an_adapter_is_merged_into_the_start(tmp_path, model_folder):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model, _ = load_start(Start(model=str(model_folder)))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    merged, _ = load_start(Start(model=str(model_folder), adapter=str(tmp_path / "adapter")))
    after = torch.cat([p.detach().flatten() for p in merged.parameters()])
    assert type(merged).__name__ == "Qwen3ForCausalLM" and after.shape == before.shape
    assert not torch.equal(before, after)
    ids = torch.arange(6)[None]
    assert torch.allclose(merged(ids).logits, adapted.eval()(ids).logits, atol=1e-3)


# --- bad input ------------------------------------------------------------------------------------


def without_nothing(content: dict) -> dict:
    return {name: value for name, value in content.items() if value is not None}


def refused_lines(forecast: str) -> list[str]:
    """The lines that say, at the end of a forecast, what a run would be refused for."""
    refused = forecast.partition("A run on this machine would be refused\n")[2]
    return [line.removeprefix("  ") for line in refused.splitlines()]


@pytest.mark.parametrize(
    ("change", "method", "needle"),
    [
        ({"judge": None}, "grpo", "judge: missing, but method grpo needs one"),
        ({"judge": None}, "opsd-pg", "validation needs one"),
        (
            {"start": {"model": "no-such-model"}},
            "grpo",
            "start.model: found 'no-such-model'; allowed: a folder",
        ),
        (
            {"train": {"teacher": "nobody"}},
            "opsd-gkd",
            "train.teacher: found 'nobody'; allowed: a folder with a model, a hub",
        ),
        (
            {"methods": {"opsd-pg": {"teacher": "x"}}},
            "opsd-pg",
            "methods.opsd-pg.teacher: found 'x'; allowed: a folder",
        ),
        (
            {"train": {"report_to": "missing"}},
            "grpo",
            "train.report_to: found 'missing', which is not installed here",
        ),
        (
            {"sft": {"report_to": ["notes", "missing"]}},
            "sft",
            "sft.report_to: found 'missing', which is not installed",
        ),
        ({"train": {"report_to": "nothing"}}, "grpo", "train.report_to: found 'nothing'"),
        (
            {"train": {"trl": {"learning_rate": "2e-6"}}},
            "grpo",
            "learning_rate cannot be set here; it is replaced by lr",
        ),
        (
            {"judge": {"model": "m", "key_env": "NO_SUCH_KEY_HERE"}},
            "grpo",
            "judge.key_env: found 'NO_SUCH_KEY_HERE'; no key",
        ),
        (
            {"judge": {"model": "m", "base_url": "ftp://judge/v1"}},
            "grpo",
            "judge.base_url: found 'ftp://judge/v1'; must be",
        ),
        (
            {"judge": {"model": "m", "base_url": "localhost:8000"}},
            "grpo",
            "judge.base_url: found 'localhost:8000'; must be",
        ),
        (
            {"train": {"max_tokens": 2048}},
            "grpo",
            "train.max_tokens: found 2048; allowed: fewer than 2048, the model's",
        ),
        (
            {"train": {"lora_rank": 33}},
            "grpo",
            "train.lora_rank: found 33; allowed: at most 32, the width of the model",
        ),
        (
            {"train": {"top_k": 10**6}},
            "opsd-gkd",
            "train.top_k: found 1000000; allowed: at most 400, the model's vocab",
        ),
        (
            {"start": {"model": "no-such/model"}},
            "grpo",
            "start: model 'no-such/model' cannot be loaded",
        ),
        (
            {"start": {"model": "cold-short", "adapter": "/no/adapter"}},
            "grpo",
            "start: adapter '/no/adapter' cannot",
        ),
        ({"demonstrations": None}, "sft", "demonstrations: found nothing"),
        ({"data": {"train": "none.jsonl"}}, "grpo", "data.train: none.jsonl"),
        (
            {"demonstrations": "none"},
            "sft",
            "demonstrations: found 'none'; allowed: a folder written by `memcalib demonstrations`",
        ),
    ],
)
def test_what_is_missing_is_named_before_the_folder_is_bound(
    capsys, tmp_path, file_recipe, monkeypatch, change, method, needle
):
    hear(monkeypatch)
    train = {**file_recipe["train"], **change.get("train", {})}
    content = {**file_recipe, **change, "train": train}
    recipe = written(tmp_path, without_nothing(content))
    code, _, err = call(capsys, recipe, "--method", method, "--out", tmp_path / "run", "--no-cache")
    assert code == 1 and needle in err and "unexpected" not in err
    assert not (tmp_path / "run").exists()
    dry_code, dry_out, dry_err = call(
        capsys, recipe, "--method", method, "--out", tmp_path / "run", "--dry-run"
    )
    if dry_code:
        assert dry_err == err, "a fault of the recipe"
    elif change not in ({"start": {"model": "no-such/model"}}, {"data": {"train": "none.jsonl"}}):
        assert refused_lines(dry_out) == err.removeprefix("memcalib: ").splitlines()
    assert not (tmp_path / "run").exists()


def test_names_on_the_hub_pass_a_dry_run(capsys, tmp_path, file_recipe):
    hub = {
        "start": {"model": "owner/cold", "adapter": "owner/adapter"},
        "base": {"model": "owner/base"},
    }
    train = {**file_recipe["train"], "teacher": "owner/teacher"}
    recipe = written(tmp_path, {**file_recipe, **hub, "train": train})
    for method in ("opsd-pg", "gdpo"):
        code, output, _ = call(capsys, recipe, "--method", method, "--dry-run")
        assert code == 0 and "the memory is unknown" in output and "refused" not in output
    for base, line_start in (
        ({"model": "nowhere"}, "base.model"),
        ({"model": "cold-short", "adapter": "/no"}, "base: adapter"),
    ):
        content = {
            **file_recipe,
            **hub,
            "base": base,
            "demonstrations": file_recipe["data"]["train"],
        }
        recipe = written(tmp_path, content)
        _, taught_forecast, _ = call(capsys, recipe, "--method", "sft", "--dry-run")
        assert refused_lines(taught_forecast)[0].startswith(line_start)
        _, forecast, _ = call(capsys, recipe, "--method", "gdpo", "--dry-run")
        assert "refused" not in forecast


def test_every_refusal_is_said_at_once_and_alike(capsys, tmp_path, file_recipe):
    changes = {
        "start": {"model": "no-such-model"},
        "judge": None,
        "methods": {"opsd-pg": {"teacher": "x", "prompts": 7}},
    }
    recipe = written(tmp_path, without_nothing({**file_recipe, **changes}))
    _, forecast, _ = call(
        capsys, recipe, "--method", "opsd-pg", "--out", tmp_path / "run", "--dry-run"
    )
    code, _, err = call(
        capsys, recipe, "--method", "opsd-pg", "--out", tmp_path / "run", "--no-cache"
    )
    lines = err.removeprefix("memcalib: ").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "methods.opsd-pg.prompts",
        "judge",
        "start.model",
        "methods.opsd-pg.teacher",
    ]
    assert code == 1 and refused_lines(forecast) == lines


def test_a_judge_that_is_not_asked_needs_no_key(tmp_path, file_recipe):
    judge = {"model": "m", "key_env": "NO_SUCH_KEY_HERE"}
    content = {**file_recipe, "judge": judge, "train": {**file_recipe["train"], "eval_every": 0}}
    assert TrainRun(Recipe.model_validate(content), "opsd-pg", tmp_path / "run").judge is not None
    with pytest.raises(ValueError, match="judge.key_env"):
        TrainRun(Recipe.model_validate(content), "gdpo", tmp_path / "other")


def test_a_logger_hears_what_the_rows_say(capsys, tmp_path, monkeypatch):
    notes = hear(monkeypatch)
    out = tmp_path / "run"
    code, _, err = call(capsys, "micro", "--out", out, *small("train.report_to=notes"))
    assert code == 0, err
    logged_by_update = {}
    for update, logs in notes:
        logged = logged_by_update.setdefault(update, {})
        for name, value in logs.items():
            if "memcalib/" in name:
                logged[name.removeprefix("memcalib/")] = value
    rows = read_rows(out / "steps.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        logged = logged_by_update.get(2 * row["step"], {})
        for name, value in row.items():
            if name in logged:
                assert logged[name] == value
            elif isinstance(value, int | float):
                assert name in ("loss", *LOGGED, "step", "seed"), "every number of the row"


def test_wrong_calls(capsys, tmp_path, file_recipe):
    recipe = written(tmp_path, file_recipe)
    assert "opsd-gkd" in call(capsys, recipe, "--method", "ppo", "--out", tmp_path / "a")[2]
    assert "--set" in call(capsys, recipe, "--set", "steps", "--out", tmp_path / "b")[2]
    assert "micro" in call(capsys, "no-such-recipe", "--out", tmp_path / "c")[2]
    mistyped = ["--set", "train.stepz=1", "--set", "judge.rmp=1"]
    _, _, err = call(capsys, recipe, *mistyped, "--out", tmp_path / "d")
    assert "train.stepz" in err and "judge.rmp" in err and "steps" in err
    assert not any((tmp_path / name).exists() for name in "abcd")


def test_bad_examples_are_all_listed(capsys, tmp_path, file_recipe):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x"}\n{oops\n')
    recipe = written(tmp_path, {**file_recipe, "data": {"train": str(bad)}})
    code, _, err = call(capsys, recipe, "--method", "grpo", "--out", tmp_path / "run", "--no-cache")
    assert code == 1 and "bad.jsonl:1" in err and "bad.jsonl:2" in err


def test_validation_examples_must_not_be_trained_on(tmp_path, file_recipe):
    train = file_recipe["data"]["train"]
    recipe = Recipe.model_validate({**file_recipe, "data": {"train": train, "validation": train}})
    with pytest.raises(ValueError, match="6 validation examples found among the training examples"):
        recipe_examples(recipe)
    two = Recipe.model_validate({**file_recipe, "data": {"train": {"path": train, "limit": 2}}})
    assert len(recipe_examples(two).train) == 2


def test_the_exact_judge_needs_its_own_world(tmp_path, file_recipe):
    data = str(write_jsonl(tmp_path / "nine.jsonl", sample_records()))
    recipe = Recipe.model_validate({**file_recipe, "judge": "micro-exact", "data": {"train": data}})
    with pytest.raises(ValueError, match="marker"):
        TrainRun(recipe, "grpo", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_chat_template(tmp_path, model_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = None
    model, _ = load_start(Start(model=str(model_folder)))
    model.save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no chat template"):
        load_start(Start(model=str(tmp_path / "bare")))


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("rows", "needle"),
    [
        ([{"example_id": "nobody", "response": "x"}], "'nobody'"),
        ([{"example_id": 0, "response": " "}], "allowed: a training example's id"),
        ([{"example_id": 0, "response": "x", "status": "rejected"}], "no accepted answers"),
        (
            [{"example_id": 0, "prompt": "Hello", "completion": "there"}],
            "found prompt 'Hello'; allowed: a list of messages",
        ),
        (
            [{"example_id": 0, "prompt": [{"role": "user", "content": "x"}], "completion": [7]}],
            "found completion",
        ),
    ],
)
def test_bad_demonstrations(tmp_path, file_recipe, rows, needle):
    examples = recipe_examples(Recipe.model_validate(file_recipe))
    lines = []
    for row in rows:
        example_id = examples.train[0].id if row["example_id"] == 0 else row["example_id"]
        lines.append({**row, "example_id": example_id})
    file = write_lines(tmp_path / "answers.jsonl", lines)
    recipe = Recipe.model_validate({**file_recipe, "demonstrations": str(file)})
    with pytest.raises(ValueError, match=needle):
        teaching_rows(recipe, examples)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("origin", ["world", "files"])
def test_answers_to_examples_that_measure_are_not_taught(tmp_path, file_recipe, split, origin):
    file = tmp_path / "answers.jsonl"
    test_file = tmp_path / "test.jsonl"
    recipe = load_recipe("micro", [*SMALL, f"demonstrations={file}"])
    if origin == "files":
        write_jsonl(test_file, make_examples("short", 3, 99, "test"))
        data = {**file_recipe["data"], "test": str(test_file)}
        recipe = Recipe.model_validate({**file_recipe, "demonstrations": str(file), "data": data})
    examples = recipe_examples(recipe)
    held_out = examples.validation
    if split == "test":
        held_out = examples.test or load_examples(test_file)
    prompt = [{"role": "user", "content": "x"}]
    talk = {"prompt": prompt, "completion": [{"role": "assistant", "content": "y"}]}
    rows = [
        {"example_id": examples.train[0].id, "response": "x"},
        talk,
        {**talk, "example_id": ["odd"]},
    ]
    write_lines(file, rows)
    assert len(teaching_rows(recipe, examples)) == 3
    write_lines(file, [*rows, {**talk, "example_id": held_out[1].id}])
    message = f"answers to 1 {split} example: {held_out[1].id}; allowed: answers to training"
    with pytest.raises(ValueError, match=message):
        TrainRun(recipe, "sft", tmp_path / "run", cache=False)
    assert not (tmp_path / "run").exists()


def test_sft_on_own_demonstrations(tmp_path, file_recipe):
    examples = recipe_examples(Recipe.model_validate(file_recipe))
    rows = [
        {"example_id": e.id, "response": "Keep July in mind.", "status": "accepted"}
        for e in examples.train
    ]
    file = write_lines(tmp_path / "answers.jsonl", rows)
    settings = {"lora_rank": 2, "batch_size": 3, "output": "adapter"}
    content = {**file_recipe, "demonstrations": str(file), "sft": settings}
    run = TrainRun(Recipe.model_validate(content), "sft", tmp_path / "run")
    assert (run.run() / "config.json").is_file()
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    assert [row["step"] for row in run.steps if "loss" in row] == [1, 2]


def fine_tuning(tmp_path, validation, **parts) -> dict:
    """A recipe that fine-tunes the cold start of `short` on six answers and validates after each of
    two updates.
    """
    train = make_examples("short", 6, 5)
    write_jsonl(tmp_path / "train.jsonl", train)
    write_jsonl(tmp_path / "validation.jsonl", validation)
    rows = [{"example_id": example.id, "response": "Keep July."} for example in train]
    file = write_lines(tmp_path / "answers.jsonl", rows)
    data = {
        "train": str(tmp_path / "train.jsonl"),
        "validation": str(tmp_path / "validation.jsonl"),
    }
    return {
        "start": {"model": "cold-short"},
        "data": data,
        "judge": "micro-exact",
        "train": {"prompt_template": "micro", "eval_text": "concat", "max_tokens": 12},
        "demonstrations": str(file),
        "sft": {"lora_rank": 2, "batch_size": 3, "eval_every": 1, "log_every": 1},
        **parts,
    }


def test_fine_tuning_leaves_out_held_out_prompts_without_room_for_an_answer(capsys, tmp_path):
    held_out = make_examples("short", 4, 5, "validation")
    long = [
        e.model_copy(update={"id": f"long-{k}", "question": e.question * 300})
        for k, e in enumerate(held_out[2:])
    ]
    out = tmp_path / "run"
    recipe = written(tmp_path, fine_tuning(tmp_path, [*held_out[:2], *long]))
    code, output, err = call(capsys, recipe, "--method", "sft", "--out", out)
    assert code == 0, err
    overlong = [json.loads(line) for line in (out / "overlong.jsonl").read_text().splitlines()]
    assert [row["example_id"] for row in overlong] == ["long-0", "long-1"]
    for row in overlong:
        assert (row["prompt"], row["context_without_answer"]) == ("validation", 1024 - 12)
    file = out / "overlong.jsonl"
    counted = "4 validation examples, 2 of which were left out because they are too long"
    assert f"{counted} ({file}" in output
    rows = [row for row in read_rows(out / "steps.jsonl") if "valid_SCS" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all((row["valid_overlong"], row["valid_unscored"]) == (2, 0) for row in rows)
    recipe = written(tmp_path, fine_tuning(tmp_path, long))
    code, _, err = call(capsys, recipe, "--method", "sft", "--out", tmp_path / "none")
    needle = "no prompt of at most 1012 tokens (context_without_answer) among 2 validation examples"
    assert code == 1 and needle in err
    assert not (tmp_path / "none" / "steps.jsonl").exists()


def test_fine_tuning_waits_for_its_judge_and_ends_with_a_checkpoint(capsys, tmp_path):
    held_out = make_examples("short", 3, 5, "validation")
    out = tmp_path / "run"
    server = MicroServer(held_out)
    server.start()
    judge = {
        "model": "micro-judge",
        "base_url": server.base_url,
        "key_env": "",
        "attempts": 1,
        "backoff": 0,
    }
    content = fine_tuning(tmp_path, held_out, judge=judge)
    content["train"]["pause_minutes"] = 0
    server.stop()
    recipe = written(tmp_path, content)
    code, _, err = call(capsys, recipe, "--method", "sft", "--out", out, "--no-cache")
    assert code == 1 and "3 of 3 judgments in this batch failed (limit max_failed 50%)" in err
    assert f"saved in {out / 'checkpoint-1'}: go on, once the judge answers again" in err
    assert "--resume" in err
    assert read_state(out / "checkpoint-1")["updates"] == 1 and not (out / "policy").exists()
    server.start()
    code, _, err = call(capsys, recipe, "--method", "sft", "--out", out, "--no-cache", "--resume")
    server.stop()
    assert code == 0, err
    rows = read_rows(out / "steps.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "valid_SCS" in row] == [2] and (out / "policy").is_dir()


def test_hashes_tell_examples_and_their_order_apart():
    first, second = make_examples("short", 2, 1)
    splits = ([first, second], [second, first], [first])
    hashes = {Examples(split).hashes["train"] for split in splits}
    assert len(hashes) == 3 and "validation" not in Examples([first]).hashes


@pytest.mark.slow
def test_two_processes_write_one_run(tmp_path):
    out = tmp_path / "run"
    # what `accelerate launch` starts on GPUs is torchrun; on the CPU it starts one process only
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "memcalib", "train", "micro"]
    command += ["--method", "gdpo", "--out", out, *small()]
    completed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.count("Policy: ") == 1
    assert [row["step"] for row in read_rows(out / "steps.jsonl")] == [0, 1, 2]
    assert json.loads((out / "manifest.json").read_text())["sessions"][0]["processes"] == 2
    policy, _ = load_policy(out / "policy")
    start, _ = load_policy("cold-short")
    assert policy.num_parameters() == start.num_parameters()


def test_the_tokenizer_of_a_micro_policy_goes_with_it(straight):
    from transformers import AutoTokenizer

    text = "Build the plan on July."
    saved = AutoTokenizer.from_pretrained(straight / "policy")
    assert saved(text)["input_ids"] == build_tokenizer()(text)["input_ids"]


def test_a_teacher_may_live_on_the_hub(monkeypatch):
    import memcalib.trainer.distillation as distillation

    paths = []
    student, _ = load_policy("cold-short")

    def create_model(path, dtype):
        paths.append(path)
        return student

    monkeypatch.setattr(distillation, "create_model_from_path", create_model)
    for name in ("owner/teacher-8b", "teacher-short"):
        assert distillation.load_teacher(name, student) is student
    assert paths == ["owner/teacher-8b", str(policy_path("teacher-short"))]


def test_what_a_terminal_shows_at_the_end(straight):
    run = TrainRun(
        load_recipe("micro", [*SMALL, "train.steps=4"]), "memcalib-rl", straight, resume=True
    )
    head, *_, reading, policy, best, measure = run.text().splitlines()
    assert head == "memcalib-rl, seed 42, 4 steps, 4 validation examples"
    assert "higher is better" in reading and policy.endswith("policy")
    assert measure.startswith("Measure it: memcalib evaluate")
    step = json.loads((straight / "best" / "best.json").read_text())["step"]
    assert best == f"Best on validation, after step {step}: {straight / 'best'}"


def test_a_run_that_was_not_validated_says_why(tmp_path):
    recipe = load_recipe("micro", [*SMALL, "sft.eval_every=0", "sft.log_every=50"])
    run = TrainRun(recipe, "sft", tmp_path / "run")
    run.run()
    assert run.text().splitlines()[0] == "sft, seed 42, 2 steps, not validated: eval_every is 0"
    recipe = load_recipe("micro", [*SMALL, "sft.eval_every=50", "sft.log_every=50"])
    head = TrainRun(recipe, "sft", tmp_path / "late").text().splitlines()[0]
    reason = "eval_every is 50, which is more than 2 steps"
    assert head == f"sft, seed 42, 2 steps, not validated: {reason}"


def validated(tmp_path, unscored: dict[int, int]) -> list[str]:
    """The lines that a run shows whose validations left so many answers unscored, by step."""
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path)
    count = len(run.examples.validation)
    rows = []
    for step, lost in unscored.items():
        metrics = dict.fromkeys([f"valid_{m}" for m in METRICS], None if lost == count else 50.0)
        rows.append({"step": step, "valid_unscored": lost, **metrics})
    write_lines(tmp_path / "steps.jsonl", rows)
    return run.text().splitlines()


def test_answers_that_were_not_scored_are_counted(tmp_path):
    _, header, first, last, *_ = validated(tmp_path, {0: 0, 2: 3})
    assert header.split() == ["step", *METRICS, "unscored"]
    assert first.split()[-1] == "0"
    assert last.split()[0] == "last" and last.split()[-1] == "3"


def test_a_run_whose_validation_had_no_score_says_so(tmp_path):
    head, *_ = validated(tmp_path, {0: 4, 2: 4})
    reason = "none of the 4 validation answers could be scored, after step 0, 2"
    assert head.endswith(f"not validated: {reason}")


@pytest.mark.parametrize(
    "row",
    [
        {"valid_SCS": "high"},
        {"valid_SCS": math.nan},
        {"valid_SCS": [1]},
        {"step": True, "valid_SCS": 99.0},
    ],
)
def test_a_row_whose_score_is_no_number_is_not_shown(tmp_path, row):
    validated(tmp_path, {0: 0, 2: 3})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "valid_overlong": "many", **row}) + "\n")
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path, resume=True)
    head, _, _, last, *_ = run.text().splitlines()
    assert head.endswith("4 validation examples")
    assert last.split()[:3] == ["last", "2", "50.0"]


def test_a_metric_that_a_row_lacks_is_shown_as_missing(tmp_path):
    validated(tmp_path, {0: 0, 2: 3})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "valid_SCS": 3.0}) + "\n")
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path, resume=True)
    last = run.text().splitlines()[3]
    assert last.split() == ["last", "4", "3.0", *["NaN"] * len(METRICS)]


def test_a_run_whose_only_validation_was_stopped_says_so(tmp_path):
    """Its judge went away at the last step; the run went on, and what is done is not done again."""
    run = TrainRun(load_recipe("micro", [*SMALL, "sft.eval_every=2"]), "sft", tmp_path)
    (tmp_path / "steps.jsonl").write_text('{"step": 2, "loss": 0.5}\n')
    head = run.text().splitlines()[0]
    reason = "no validation was completed, and a resumed run does not repeat it"
    assert head.endswith(f"2 steps, not validated: {reason}")


@pytest.mark.parametrize(
    "config", [{"trl": None}, {"trl": 5, "eval_every": 3}, {"eval_every": 3}, {"kl": 1}, [], None]
)
def test_settings_of_another_hand_are_refused_like_those_of_another_run(tmp_path, config):
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path)
    parameters = json.loads((tmp_path / "parameters.json").read_text())
    parameters.update(config=config, method="grpo")
    (tmp_path / "parameters.json").write_text(json.dumps(parameters))
    message = "contains a run with other settings .*method: 'grpo' there, 'gdpo' now"
    with pytest.raises(ValueError, match=message):
        run.run()


# --- nothing was trained, or what was trained is damaged ------------------------------------------


@pytest.mark.slow
def test_a_signal_before_the_first_step_does_not_bind_the_folder(capsys, tmp_path):
    out = tmp_path / "run"
    process = started(out, "memcalib-rl", "train.prompts=8", "train.generations=64")
    wait_for(lambda: (out / "steps.jsonl").is_file(), process)
    process.kill()
    process.communicate(timeout=60)
    assert [row["step"] for row in read_rows(out / "steps.jsonl")] == [0]
    assert (out / "best").is_dir()
    (out / "notes.txt").write_text("mine")
    code, _, err = call(capsys, "micro", "--out", out, *small("train.lr=1e-4", "train.beta=0"))
    assert code == 0, err
    assert [row["step"] for row in read_rows(out / "steps.jsonl")] == [0, 1, 2]
    assert (out / "notes.txt").is_file()


def test_a_run_that_diverged_at_its_first_step_may_have_another_rate(capsys, tmp_path):
    out = tmp_path / "run"
    code, _, err = call(capsys, "micro", "--out", out, "--method", "grpo", *small("train.lr=1"))
    assert code == 1 and "step 1" in err and (out / "reference").is_dir()
    code, _, err = call(capsys, "micro", "--out", out, "--method", "grpo", *small())
    assert code == 0, err


def test_more_prompts_than_examples(capsys, tmp_path):
    code, _, err = call(capsys, "micro", "--out", tmp_path / "run", *small("train.prompts=100"))
    assert code == 1 and "train.prompts: found 100; allowed: at most 8" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--teacher-url", "--evaluator-url", "--evaluator2-key-env"])
def test_options_of_a_model_without_its_name(capsys, tmp_path, option):
    with pytest.raises(SystemExit) as exit:
        main(["demonstrations", "--out", str(tmp_path / "run"), option, "0.5,1"])
    err = capsys.readouterr().err
    role = option[2:].partition("-")[0]
    assert exit.value.code == 1 and f"--{role}" in err and "model" in err
    assert option in err or f"{role}.model: missing" in err


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "mine.v2.yaml", "mine.v2.yml"])
def test_the_usual_folder_has_the_whole_name_of_the_recipe(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "load_recipe", lambda *_: load_recipe("micro", SMALL))
    code, _, err = call(capsys, name, "--method", "grpo", "--seed", "7")
    assert code == 0, err
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    assert [path.name for path in Path("runs/train").iterdir()] == [f"{stem}-grpo-7"]


def test_a_folder_bound_and_killed_while_loading_is_free(tmp_path):
    recipe = load_recipe("micro", SMALL)
    earlier = TrainRun(recipe, "grpo", tmp_path)
    assert TrainRun(recipe, "gdpo", tmp_path).identity["method"] == "gdpo"
    with pytest.raises(ValueError, match="method: 'gdpo' there, 'grpo' now"):
        earlier.run()


def test_only_a_training_is_cleared_away(tmp_path):
    (tmp_path / "parameters.json").write_text('{"model": "m"}')
    (tmp_path / "steps.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="other settings"):
        TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path)
    assert (tmp_path / "steps.jsonl").is_file()


@pytest.mark.parametrize("damage", ["cut", "file", "empty"])
def test_a_policy_that_cannot_be_read_is_made_again(capsys, tmp_path, straight, caplog, damage):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    policy = out / "policy"
    weights = straight / "policy" / "model.safetensors"
    if damage == "cut":
        (policy / "model.safetensors").write_bytes(weights.read_bytes()[:10])
    else:
        shutil.rmtree(policy)
        if damage == "empty":
            policy.mkdir()
        else:
            policy.write_text("a note")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert code == 0, err
    assert (policy / "model.safetensors").read_bytes() == weights.read_bytes()
    assert any("made again" in text for text in caplog.messages)


def test_a_policy_that_cannot_be_made_again_is_said(capsys, tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight, out, ignore=shutil.ignore_patterns("checkpoint-*"))
    (out / "policy" / "model.safetensors").write_bytes(b"cut short!")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert code == 1
    assert "model.safetensors: cannot be read" in err and "there is no checkpoint" in err


def test_the_best_policy_is_the_one_that_is_there(tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    run = TrainRun(load_recipe("micro", [*SMALL, "train.steps=4"]), "memcalib-rl", out, resume=True)
    (out / "best" / "best.json").write_text('{"step": 3, "SCS": 1.0}')
    assert f"Best on validation, after step 3: {out / 'best'}" in run.text()
    rows = [line.split() for line in run.text().splitlines()]
    assert [row[:2] for row in rows if row[:1] == ["best"]] == [["best", "3"]]
    shutil.rmtree(out / "best")
    assert "The best policy is missing" in run.text() and "after step" not in run.text()


@pytest.mark.parametrize(
    "sessions", ['[1, {"judge": 5}]', '[{"judge": {"cost": "x"}}, null]', "{}", "7"]
)
def test_damaged_sessions_are_left_out(capsys, tmp_path, straight, caplog, sessions):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "policy")
    (out / "manifest.json").write_text(f'{{"sessions": {sessions}}}')
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert code == 0, err
    assert len(json.loads((out / "manifest.json").read_text())["sessions"]) == 1
    assert any("the others cannot be read" in text for text in caplog.messages)


def forget(folder: Path, name: str) -> None:
    """As if a run and its checkpoints had been written before the setting was there."""
    file = folder / "parameters.json"
    parameters = json.loads(file.read_text())
    parameters["config"].pop(name, None)
    file.write_text(json.dumps(parameters))
    for checkpoint in checkpoints(folder):
        state = read_state(checkpoint)
        state["config"].pop(name)
        seal(checkpoint, state)


@pytest.mark.parametrize(
    ("method", "name", "change", "value"),
    [
        ("gdpo", "tail", "train.tail=truncate", "'truncate'"),
        ("sft", "weight_decay", "sft.weight_decay=0.1", "0.1"),
    ],
)
def test_a_run_older_than_a_setting_goes_on_with_its_default(
    capsys, tmp_path, method, name, change, value
):
    out = tmp_path / "older"
    words = ["micro", "--method", method, "--out", out]
    code, _, err = call(capsys, *words, *small("sft.save_every=2"))
    assert code == 0, err
    shutil.rmtree(out / "policy")
    forget(out, name)
    code, _, err = call(capsys, *words, "--resume", *small("sft.save_every=2", change))
    assert code == 1 and f"config.{name}: nothing there, {value} now" in err
    faster = small("sft.save_every=2", "train.lr=0.5", "sft.lr=0.5")
    code, _, err = call(capsys, *words, "--resume", *faster)
    assert code == 1, "a setting that was there has changed"
    assert "config.lr: 0.00" in err and "there, 0.5 now" in err
    code, _, err = call(capsys, *words, "--resume", *small("sft.save_every=2"))
    assert code == 0 and (out / "policy").is_dir(), err


@pytest.mark.parametrize("method", ["memcalib-rl", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_run_that_ran_out_of_memory_goes_on_in_more_parts(capsys, tmp_path, caplog, method):
    out = tmp_path / "run"
    first = small("train.steps=1", "sft.save_every=1", "data.world.demonstrations=24")
    code, _, err = call(capsys, "micro", "--method", method, "--out", out, *first)
    assert code == 0, err
    shutil.rmtree(out / "policy")
    in_parts = small(
        "train.steps=2",
        "train.accumulate=2",
        "sft.accumulate=4",
        "sft.save_every=1",
        "data.world.demonstrations=24",
        "train.trl.vllm_mode=server",
        "train.trl.vllm_server_base_url=http://localhost:8000",
        "train.trl.vllm_enable_sleep_mode=false",
    )
    code, _, err = call(capsys, "micro", "--method", method, "--out", out, "--resume", *in_parts)
    assert code == 0 and (out / "policy").is_dir(), err
    assert "different memory settings" in caplog.text


def test_what_does_not_change_the_weights_may_change_on_the_way(capsys, tmp_path, caplog):
    out = tmp_path / "run"
    code, _, err = call(
        capsys, "micro", "--out", out, *small("train.steps=1", "train.eval_every=2")
    )
    assert code == 0, err
    file = out / "parameters.json"
    parameters = json.loads(file.read_text())
    assert not {"eval_every", "share_prompts"} & parameters["config"].keys()
    # names that decide nothing, in a folder that says them all the same
    parameters["config"].update(eval_every=2, share_prompts=True)
    file.write_text(json.dumps(parameters))
    changes = small("train.share_prompts=false")
    code, _, err = call(
        capsys, "micro", "--out", out, "--resume", *changes, "--set", "train.sampler=generate"
    )
    assert code == 1 and "config.sampler: 'shared' there, 'generate' now" in err
    assert "another sampler uses different random numbers" in err
    shutil.rmtree(out / "policy")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *changes)
    assert code == 0 and (out / "policy").is_dir(), err
    for warning in (
        "different memory settings: share_prompts: True there, False now",
        "goes on with eval_every 1, 2 before: the best policy is chosen among other steps",
    ):
        assert warning in caplog.text
    stored = json.loads(file.read_text())
    assert stored == parameters, "a folder keeps what it was bound with"


def test_what_is_named_like_a_checkpoint_and_is_no_folder_is_said_once(tmp_path, caplog):
    recipe = load_recipe("micro", [*SMALL, "train.steps=1"])
    folder = tmp_path / "run"
    TrainRun(recipe, "grpo", folder).run()
    (folder / "checkpoint-9").write_text("a file")
    (folder / "checkpoint-11").symlink_to(tmp_path / "nowhere")
    (folder / "checkpoint-1").write_text("an older one is not asked for")
    shutil.rmtree(folder / "policy")
    TrainRun(recipe, "grpo", folder, resume=True).run()
    no_folder, file = [message for message in caplog.messages if "skipped" in message]
    assert "checkpoint-11: no memcalib.json (no such folder)" in no_folder
    assert file.count("checkpoint-9: no memcalib.json (a file, not a folder)") == 1


@pytest.mark.parametrize(("read", "configured"), [("concat", "fluent"), ("fluent", "concat")])
def test_fine_tuning_shows_its_judge_what_the_policy_reads(
    tmp_path, file_recipe, monkeypatch, read, configured
):
    asked_policy = []
    asked_judge = []

    def answered(model, tokenizer, examples, *, text, **options):
        asked_policy.append(text)
        return [SimpleNamespace(response="x") for _ in examples]

    def judged(judge, examples, responses):
        asked_judge.append((judge.config.text, judge.name))
        return [exact_judge(example, "") for example in examples]

    monkeypatch.setattr("memcalib.trainer.rewards.sample_answers", answered)
    monkeypatch.setattr(LLMJudge, "batch", judged)
    train = {**file_recipe["train"], "eval_text": read}
    recipe = Recipe.model_validate({**file_recipe, "judging": {"text": configured}, "train": train})
    run = TrainRun(recipe, "gdpo", tmp_path / "run")
    config = method_config(run.recipe, "grpo", run.config.seed)
    _, tokenizer = load_start(run.recipe.start)
    held_out = HeldOutScores(
        config, tokenizer, run.examples.validation, run.judge, None, run.folder
    )
    assert "SCS" in held_out(None)
    assert asked_policy == [read] and asked_judge == [(read, run.judge.name)]
    assert run.judge.config.text == configured


@pytest.mark.slow
def test_a_run_stopped_by_drift_says_where_it_is_and_how_to_go_on(capsys, tmp_path):
    nervous = [
        "train.stop_on_drift=true",
        "train.drift_steps=1",
        "train.drift_length=1.0001",
        "train.drift_repetition=0.0001",
    ]
    words = ["micro", "--method", "gdpo", "--out", tmp_path / "run", "--seed", "1"]
    code, _, err = call(capsys, *words, *small("train.steps=6", *nervous))
    last = max(int(path.name[11:]) for path in checkpoints(tmp_path / "run"))
    assert code == 1 and last < 12 and f"saved in {tmp_path / 'run' / f'checkpoint-{last}'}" in err
    assert "wider drift limits, or without stop_on_drift" in err and "--resume" in err
    code, _, err = call(
        capsys, *words, "--resume", *small("train.steps=6", "train.stop_on_drift=false")
    )
    assert code == 0 and read_rows(tmp_path / "run" / "steps.jsonl")[-1]["step"] == 6, err


@contextmanager
def no_file_larger_than(size: int):
    """A disk that gives out: every write beyond `size` bytes of a file fails,
    in whatever library.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_other_libraries_train_the_rest_only_when_told_to(capsys, tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    history = json.loads((out / "versions.json").read_text())
    history[-1]["torch"] = "2.0.0"
    (out / "versions.json").write_text(json.dumps(history))
    finished = small("train.steps=4")
    one_more = small("train.steps=5")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *one_more)
    assert code == 1 and "torch: '2.0.0' there" in err and "--resume-anyway" in err
    assert len(numbers(out)) == len(numbers(straight)), "nothing was trained"
    code, _, err = call(capsys, "micro", "--out", out, "--resume-anyway", *one_more)
    assert code == 0, err
    assert read_rows(out / "steps.jsonl")[-1]["step"] == 5
    manifest = json.loads((out / "manifest.json").read_text())
    assert [before["torch"] for before in manifest["versions_before"]] == ["2.0.0"]
    whole = tmp_path / "whole"
    shutil.copytree(straight, whole)
    (whole / "versions.json").write_text(json.dumps(history))
    code, _, err = call(capsys, "micro", "--out", whole, "--resume", *finished)
    assert code == 0, "a finished training has nothing left that could differ"


@pytest.mark.parametrize(
    "size", [300_000, pytest.param(600_000, marks=pytest.mark.slow)]
)  # too small for the weights, and for the optimizer
def test_a_disk_that_gives_out_leaves_the_last_checkpoint(capsys, tmp_path, straight, size):
    out = tmp_path / "run"
    whole = tmp_path / "whole"
    settings = ("train.keep_best=false", "train.beta=0.0", "data.world.test=2")
    one_step = small(*settings, "train.steps=1")
    three_steps = small(*settings, "train.steps=3")
    code, _, err = call(capsys, "micro", "--out", whole, *three_steps)
    assert code == 0, err
    code, _, err = call(capsys, "micro", "--out", out, *one_step)
    assert code == 0, err
    with no_file_larger_than(size):
        code, _, err = call(capsys, "micro", "--out", out, "--resume", *three_steps)
    assert code == 1 and err.startswith(f"memcalib: {out / 'checkpoint-4'}: ")
    assert "the earlier checkpoints are complete" in err and "--resume" in err
    assert [path.name for path in checkpoints(out)] == ["checkpoint-2"]
    assert read_state(out / "checkpoint-2")["updates"] == 2
    assert json.loads((out / "manifest.json").read_text())["sessions"]
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *three_steps)
    assert code == 0 and numbers(out) == numbers(whole), err
    policy = Path("policy") / "model.safetensors"
    assert (out / policy).read_bytes() == (whole / policy).read_bytes()


def test_a_disk_that_gives_out_names_the_policy(capsys, tmp_path):
    words = small(
        "train.eval_every=0",
        "train.beta=0.0",
        "train.save_every=0",
        "train.steps=1",
        "data.world.test=2",
    )
    with no_file_larger_than(300_000):
        code, _, err = call(capsys, "micro", "--out", tmp_path / "run", *words)
    assert code == 1 and err.startswith(f"memcalib: {tmp_path / 'run' / 'policy'}: ")
    assert not (tmp_path / "run" / "policy.part").exists()
    assert not (tmp_path / "run" / "policy").exists()


def test_a_row_that_finds_no_room_names_its_file(tmp_path):
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=True),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        config=TrainConfig(),
        judged=SimpleNamespace(judge=None),
    )
    message = "No space left on device; the earlier checkpoints are complete"
    with pytest.raises(OSError, match=message) as caught:
        StepRows(trainer).write({"step": 1})
    assert caught.value.filename == str(tmp_path / "steps.jsonl")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        ConnectionError(111, "refused"),
        OSError("start: no model"),
        KeyError("x"),
    ],
)
def test_only_errors_of_writing_are_named_so(tmp_path, error):
    with pytest.raises(type(error)) as caught, writing(tmp_path / "checkpoint-2"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_training_writes_nothing_through_links_of_its_folder(capsys, tmp_path, method):
    """A run folder may come from somebody else, with links to what is precious here."""
    precious = tmp_path / "precious"
    precious.mkdir()
    text = precious / "text"
    text.write_text("without an end")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("recipe.yaml", "test.jsonl", "manifest.json", "versions.json"):
        (folder / name).symlink_to(text)
    (folder / "steps.jsonl").hardlink_to(text)
    (folder / "policy.part").symlink_to(precious)
    code, _, err = call(capsys, "micro", "--method", method, "--out", folder, *small())
    assert code == 0 or "steps.jsonl: found a file with 2 names" in err, err
    assert [path.name for path in precious.iterdir()] == ["text"]
    assert text.read_text() == "without an end"


def test_room_for_a_checkpoint_is_not_made_behind_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    link = tmp_path / "checkpoint-1"
    link.symlink_to(elsewhere)
    unseal(link)
    assert not link.is_symlink() and (elsewhere / "precious").is_file()
