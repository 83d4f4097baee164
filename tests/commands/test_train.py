"""The verb `train`: six methods, kills and resumes, models of one's own, and everything that can be wrong before a step."""

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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from trainer_logger import hear
from memcalib.trainer.checkpoints import checkpoints, read_state, seal, writing
from memcalib.trainer import recipe as recipes
from memcalib.commands.cli import main
from memcalib.judge import LLMJudge
from memcalib.io.jsonl import read_rows
from memcalib.metrics import METRICS
from memcalib.practice.server import MicroServer
from memcalib.micro.world import exact_judge, make_examples
from memcalib.micro.policy import build_tokenizer, load_policy, policy_path
from memcalib.problem import load_examples, render, sample_records
from memcalib.io.records import write_jsonl
from memcalib.trainer.recipe import LABELS, Recipe, Start, load_recipe, method_config
from memcalib.trainer.recipe import load_start
from memcalib.trainer.rewards import HeldOutScores
from memcalib.trainer.train_config import TrainConfig
from memcalib.trainer.callbacks import LOGGED, StepRows
from memcalib.trainer.recipe import Examples, read_splits, teaching_rows
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
    """The libraries' loggers keep the standard error they first saw, which capsys closes after a test."""
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.__stderr__
            handler.flush = sys.__stderr__.flush


def small(*more: str) -> list[str]:
    return [word for place in (*SMALL, *more) for word in ("--set", place)]


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["train", *map(str, arguments)])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return exit.value.code or 0, said.out, said.err


@pytest.mark.parametrize("method", LABELS.values())
def test_every_method_from_one_recipe(capsys, tmp_path, method):
    out = tmp_path / method
    code, said, err = call(
        capsys, "micro", "--method", method, "--out", out, "--seed", "5", *small()
    )
    assert code == 0, err
    assert (
        said.splitlines()[0].startswith(f"{method}, seed 5")
        and "best" in said
        and str(out / "policy") in said
    )
    model, tokenizer = load_policy(out / "policy")
    assert all(p.isfinite().all() for p in model.parameters()) and tokenizer.chat_template
    begin = load_policy("pretrained" if method == "sft" else "cold-short")[0]
    moved = sum(
        (a - b).abs().sum() for a, b in zip(model.parameters(), begin.parameters(), strict=True)
    )
    assert moved > 0, "the policy is not the one it started from"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["config"]["method"] == method and manifest["seeds"] == {"train": 5}
    assert (
        manifest["judge"]
        == exact_judge(read_splits(load_recipe("micro", SMALL)).train[0], "").judge
    )
    assert (
        manifest["cost"] == 0
        and manifest["sessions"][0]["step"] == 2
        and manifest["versions"]["torch"]
    )
    rows = read_rows(out / "steps.jsonl")
    assert rows[-1]["step"] == 2 and any("valid_SCS" in row for row in rows)
    if method.startswith("opsd"):
        assert all(row.get("reward") is None for row in rows), "no judge, no reward: not zero"
    assert load_recipe(out / "recipe.yaml").data.world.train == 8


def started(out: Path, method: str = "memcalib-rl", *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "memcalib", "train", "--method", method, "--out", str(out)]
    command += small("train.steps=4", *more)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(found, process: subprocess.Popen, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not found() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def numbers(folder: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in read_rows(folder / "steps.jsonl")
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    recipe = load_recipe("micro", [*SMALL, "train.steps=4"])
    TrainRun(recipe, "memcalib-rl", out).run()
    return out


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_stopped_and_resumed_equals_straight(capsys, tmp_path, straight, how):
    out = tmp_path / "stopped"
    process = started(out)
    wait_for(lambda: (out / "checkpoint-2" / "memcalib.json").is_file(), process)
    process.send_signal(how)
    _, err = process.communicate(timeout=120)
    assert not (out / "policy").exists()
    if how == signal.SIGINT:
        assert (
            process.returncode == 130
            and "--resume" in err
            and str(out) in err
            and "Traceback" not in err
        )
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
    files = ["policy/model.safetensors", "best/model.safetensors"]
    assert [(out / f).read_bytes() for f in files] == [(straight / f).read_bytes() for f in files]
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
    said = [text for text in caplog.messages if "cannot be read" in text]
    assert len(said) == (b"no" not in damage) and all("line 3 " in text for text in said)


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
    done = subprocess.run(
        [*command, *small("train.steps=5")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == ""


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
    one, two = (
        (f / "policy" / "model.safetensors").read_bytes() for f in (out, tmp_path / "straight")
    )
    assert one == two


def test_a_finished_run_is_not_trained_again(capsys, straight):
    before = (straight / "policy" / "model.safetensors").stat().st_mtime_ns
    code, _, err = call(
        capsys, "--method", "memcalib-rl", "--out", straight, *small("train.steps=4")
    )
    assert code == 1 and "--resume" in err
    code, said, _ = call(
        capsys, "--method", "memcalib-rl", "--out", straight, "--resume", *small("train.steps=4")
    )
    assert code == 0 and "best" in said
    assert (straight / "policy" / "model.safetensors").stat().st_mtime_ns == before
    code, _, err = call(
        capsys, "--method", "gdpo", "--out", straight, "--resume", *small("train.steps=4")
    )
    assert code == 1 and "method: 'memcalib-rl' there, 'gdpo' now" in err


# --- a model of one's own -------------------------------------------------------------------------------------------


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    texts = [message["content"] for e in make_examples("short", 40, 3) for message in render(e)]
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
def own(tmp_path_factory) -> Path:
    """A model folder as anybody's: Qwen3 architecture, byte-level BPE, a chat template, no padding token."""
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
def mine(tmp_path_factory, own) -> dict:
    """A recipe for files, that model and a judge behind an address; the judge's server lives as long as the module."""
    folder = tmp_path_factory.mktemp("mine")
    examples = make_examples("short", 6, 5)
    held_out = make_examples("short", 2, 5, "validation")
    write_jsonl(folder / "train.jsonl", examples)
    write_jsonl(folder / "validation.jsonl", held_out)
    with MicroServer([*examples, *held_out]) as server:
        yield {
            "start": {"model": str(own)},
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
def test_own_model_own_files_llm_judge(capsys, tmp_path, own, mine, method, rank):
    recipe = written(tmp_path, mine)
    out = tmp_path / "run"
    code, said, err = call(
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
    assert "validation examples" in said
    model, tokenizer = load_start(Start(model=str(out / "policy")))
    before = load_start(Start(model=str(own)))[0]
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert tokenizer.chat_template == TEMPLATE


def test_the_policy_can_be_evaluated(capsys, tmp_path, mine):
    run = TrainRun(Recipe.model_validate(mine), "gdpo", tmp_path / "run")
    run.run()
    words = ["evaluate", mine["data"]["validation"], "--weights", str(tmp_path / "run" / "policy")]
    words += [
        "--judge",
        "micro-exact",
        "--set",
        "sampling.seeds=[1]",
        "--set",
        "sampling.max_tokens=8",
        "--set",
        "control=false",
        "--no-cache",
        "--out",
        str(tmp_path / "eval"),
    ]
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert not exit.value.code, capsys.readouterr().err
    assert (tmp_path / "eval" / "report.html").is_file()


def test_an_adapter_is_merged_into_the_start(tmp_path, own):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model, _ = load_start(Start(model=str(own)))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    merged, _ = load_start(Start(model=str(own), adapter=str(tmp_path / "adapter")))
    after = torch.cat([p.detach().flatten() for p in merged.parameters()])
    assert type(merged).__name__ == "Qwen3ForCausalLM" and after.shape == before.shape
    assert not torch.equal(before, after)
    ids = torch.arange(6)[None]
    assert torch.allclose(merged(ids).logits, adapted.eval()(ids).logits, atol=1e-3)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "method", "needle"),
    [
        ({"judge": None}, "grpo", "judge: missing, and method grpo needs one"),
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
            "learning_rate is not set here: lr stands for it",
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
        ({"demonstrations": None}, "sft", "demonstrations: missing"),
        ({"data": {"train": "none.jsonl"}}, "grpo", "data.train: none.jsonl"),
        (
            {"demonstrations": "none"},
            "sft",
            "demonstrations: found 'none'; allowed: a folder of `memcalib demonstrations`",
        ),
    ],
)
def test_what_is_missing_is_named_before_the_folder_is_bound(
    capsys, tmp_path, mine, monkeypatch, change, method, needle
):
    hear(monkeypatch)
    changed = mine | {k: mine[k] | v if k == "train" else v for k, v in change.items()}
    recipe = written(tmp_path, {k: v for k, v in changed.items() if v is not None})
    code, _, err = call(capsys, recipe, "--method", method, "--out", tmp_path / "run", "--no-cache")
    assert code == 1 and needle in err and "unexpected" not in err
    assert not (tmp_path / "run").exists()
    dry, said, told = call(
        capsys, recipe, "--method", method, "--out", tmp_path / "run", "--dry-run"
    )
    if dry:
        assert told == err, "a fault of the recipe"
    elif change not in ({"start": {"model": "no-such/model"}}, {"data": {"train": "none.jsonl"}}):
        refused = said.partition("A run on this machine would be refused\n")[2]
        assert refused.splitlines() == [
            f"  {line}" for line in err.removeprefix("memcalib: ").splitlines()
        ]
    assert not (tmp_path / "run").exists()


def test_names_on_the_hub_pass_a_dry_run(capsys, tmp_path, mine):
    hub = {
        "start": {"model": "owner/cold", "adapter": "owner/adapter"},
        "base": {"model": "owner/base"},
    }
    recipe = written(tmp_path, mine | hub | {"train": mine["train"] | {"teacher": "owner/teacher"}})
    for method in ("opsd-pg", "gdpo"):
        code, said, _ = call(capsys, recipe, "--method", method, "--dry-run")
        assert code == 0 and "memory unknown" in said and "refused" not in said
    for start, place in (
        ({"base": {"model": "nowhere"}}, "base.model"),
        ({"base": {"model": "cold-short", "adapter": "/no"}}, "base: adapter"),
    ):
        recipe = written(tmp_path, mine | hub | start | {"demonstrations": mine["data"]["train"]})
        said = call(capsys, recipe, "--method", "sft", "--dry-run")[1].partition(
            "would be refused"
        )[2]
        assert (
            said.strip().startswith(place)
            and "refused" not in call(capsys, recipe, "--method", "gdpo", "--dry-run")[1]
        )


def test_every_refusal_is_said_at_once_and_alike(capsys, tmp_path, mine):
    changes = {
        "start": {"model": "no-such-model"},
        "judge": None,
        "methods": {"opsd-pg": {"teacher": "x", "prompts": 7}},
    }
    recipe = written(tmp_path, {k: v for k, v in (mine | changes).items() if v is not None})
    _, said, _ = call(capsys, recipe, "--method", "opsd-pg", "--out", tmp_path / "run", "--dry-run")
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
    assert code == 1 and said.partition("would be refused\n")[2].splitlines() == [
        f"  {line}" for line in lines
    ]


def test_a_judge_that_is_not_asked_needs_no_key(tmp_path, mine):
    content = mine | {
        "judge": {"model": "m", "key_env": "NO_SUCH_KEY_HERE"},
        "train": mine["train"] | {"eval_every": 0},
    }
    assert TrainRun(Recipe.model_validate(content), "opsd-pg", tmp_path / "run").judge is not None
    with pytest.raises(ValueError, match="judge.key_env"):
        TrainRun(Recipe.model_validate(content), "gdpo", tmp_path / "other")


def test_a_logger_hears_what_the_rows_say(capsys, tmp_path, monkeypatch):
    notes = hear(monkeypatch)
    out = tmp_path / "run"
    code, _, err = call(capsys, "micro", "--out", out, *small("train.report_to=notes"))
    assert code == 0, err
    told = {}
    for update, logs in notes:
        told.setdefault(update, {}).update(
            {k.removeprefix("memcalib/"): v for k, v in logs.items() if "memcalib/" in k}
        )
    rows = read_rows(out / "steps.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        heard = told.get(2 * row["step"], {})
        kept = {name: value for name, value in row.items() if name in heard}
        assert kept == {name: heard[name] for name in kept}
        own = {
            name
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("loss", *LOGGED)
        }
        assert own - {"step", "seed"} <= heard.keys(), "every number of the row"


def test_wrong_calls(capsys, tmp_path, mine):
    recipe = written(tmp_path, mine)
    assert "opsd-gkd" in call(capsys, recipe, "--method", "ppo", "--out", tmp_path / "a")[2]
    assert "--set" in call(capsys, recipe, "--set", "steps", "--out", tmp_path / "b")[2]
    assert "micro" in call(capsys, "no-such-recipe", "--out", tmp_path / "c")[2]
    err = call(
        capsys, recipe, "--set", "train.stepz=1", "--set", "judge.rmp=1", "--out", tmp_path / "d"
    )[2]
    assert "train.stepz" in err and "judge.rmp" in err and "steps" in err
    assert not any((tmp_path / name).exists() for name in "abcd")


def test_bad_examples_are_all_listed(capsys, tmp_path, mine):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x"}\n{oops\n')
    recipe = written(tmp_path, mine | {"data": {"train": str(bad)}})
    code, _, err = call(capsys, recipe, "--method", "grpo", "--out", tmp_path / "run", "--no-cache")
    assert code == 1 and "bad.jsonl:1" in err and "bad.jsonl:2" in err


def test_validation_examples_must_not_be_trained_on(tmp_path, mine):
    recipe = Recipe.model_validate(
        mine | {"data": {"train": mine["data"]["train"], "validation": mine["data"]["train"]}}
    )
    with pytest.raises(ValueError, match="6 validation examples are training examples too"):
        read_splits(recipe)
    two = Recipe.model_validate(
        mine | {"data": {"train": {"path": mine["data"]["train"], "limit": 2}}}
    )
    assert len(read_splits(two).train) == 2


def test_the_exact_judge_needs_its_own_world(tmp_path, mine):
    data = str(write_jsonl(tmp_path / "nine.jsonl", sample_records()))
    recipe = Recipe.model_validate(mine | {"judge": "exact", "data": {"train": data}})
    with pytest.raises(ValueError, match="marker"):
        TrainRun(recipe, "grpo", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_chat_template(tmp_path, own):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.chat_template = None
    model, _ = load_start(Start(model=str(own)))
    model.save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no chat template"):
        load_start(Start(model=str(tmp_path / "bare")))


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
def test_bad_demonstrations(tmp_path, mine, rows, needle):
    examples = read_splits(Recipe.model_validate(mine))
    rows = [
        row | {"example_id": examples.train[0].id if row["example_id"] == 0 else row["example_id"]}
        for row in rows
    ]
    file = tmp_path / "said.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=needle):
        teaching_rows(Recipe.model_validate(mine | {"demonstrations": str(file)}), examples)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("origin", ["world", "files"])
def test_answers_to_examples_that_measure_are_not_taught(tmp_path, mine, split, origin):
    file = tmp_path / "said.jsonl"
    other = tmp_path / "test.jsonl"
    recipe = load_recipe("micro", [*SMALL, f"demonstrations={file}"])
    if origin == "files":
        write_jsonl(other, make_examples("short", 3, 99, "test"))
        recipe = Recipe.model_validate(
            mine | {"demonstrations": str(file), "data": mine["data"] | {"test": str(other)}}
        )
    examples = read_splits(recipe)
    held_out = (examples.test or load_examples(other)) if split == "test" else examples.validation
    talk = dict(
        prompt=[{"role": "user", "content": "x"}],
        completion=[{"role": "assistant", "content": "y"}],
    )
    fine = [
        {"example_id": examples.train[0].id, "response": "x"},
        talk,
        talk | {"example_id": ["odd"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in fine))
    assert len(teaching_rows(recipe, examples)) == 3
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in [*fine, talk | {"example_id": held_out[1].id}])
    )
    with pytest.raises(
        ValueError, match=f"answers to 1 {split} examples: {held_out[1].id}; allowed is none"
    ):
        TrainRun(recipe, "sft", tmp_path / "run", cache=False)
    assert not (tmp_path / "run").exists()


def test_sft_on_own_demonstrations(tmp_path, mine):
    examples = read_splits(Recipe.model_validate(mine))
    file = tmp_path / "said.jsonl"
    lines = [
        {"example_id": e.id, "response": "Keep July in mind.", "status": "accepted"}
        for e in examples.train
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = mine | {
        "demonstrations": str(file),
        "sft": {"lora_rank": 2, "batch_size": 3, "output": "adapter"},
    }
    run = TrainRun(Recipe.model_validate(content), "sft", tmp_path / "run")
    assert (run.run() / "config.json").is_file() and (
        tmp_path / "run" / "adapter" / "adapter_config.json"
    ).is_file()
    assert [row["step"] for row in run.steps if "loss" in row] == [1, 2]


def taught(tmp_path, validation, **more) -> dict:
    """A recipe that fine-tunes the cold start of `short` on six answers and validates after each of two updates."""
    train = make_examples("short", 6, 5)
    file = tmp_path / "said.jsonl"
    write_jsonl(tmp_path / "train.jsonl", train)
    write_jsonl(tmp_path / "validation.jsonl", validation)
    file.write_text(
        "".join(json.dumps({"example_id": e.id, "response": "Keep July."}) + "\n" for e in train)
    )
    data = {
        "train": str(tmp_path / "train.jsonl"),
        "validation": str(tmp_path / "validation.jsonl"),
    }
    how = {"prompt_template": "micro", "eval_text": "concat", "max_tokens": 12}
    content = {
        "start": {"model": "cold-short"},
        "data": data,
        "judge": "exact",
        "train": how,
        "demonstrations": str(file),
    }
    return (
        content | {"sft": {"lora_rank": 2, "batch_size": 3, "eval_every": 1, "log_every": 1}} | more
    )


def test_fine_tuning_leaves_out_held_out_prompts_without_room_for_an_answer(capsys, tmp_path):
    held_out = make_examples("short", 4, 5, "validation")
    long = [
        e.model_copy(update={"id": f"long-{k}", "question": e.question * 300})
        for k, e in enumerate(held_out[2:])
    ]
    out = tmp_path / "run"
    recipe = written(tmp_path, taught(tmp_path, [*held_out[:2], *long]))
    code, said, err = call(capsys, recipe, "--method", "sft", "--out", out)
    assert code == 0, err
    listed = [json.loads(line) for line in (out / "overlong.jsonl").read_text().splitlines()]
    assert [
        (row["example_id"], row["prompt"], row["context_without_answer"]) for row in listed
    ] == [
        ("long-0", "validation", 1024 - 12),
        ("long-1", "validation", 1024 - 12),
    ]
    assert (
        f"4 validation examples, 2 of them left out for their length ({out / 'overlong.jsonl'})"
        in said
    )
    rows = [row for row in read_rows(out / "steps.jsonl") if "valid_SCS" in row]
    assert [(row["step"], row["valid_overlong"], row["valid_unscored"]) for row in rows] == [
        (1, 2, 0),
        (2, 2, 0),
    ]
    recipe = written(tmp_path, taught(tmp_path, long))
    code, _, err = call(capsys, recipe, "--method", "sft", "--out", tmp_path / "none")
    assert (
        code == 1
        and "no prompt of at most 1012 tokens (context_without_answer) among 2 validation examples"
        in err
    )
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
    content = taught(tmp_path, held_out, judge=judge)
    content["train"] = content["train"] | {"pause_minutes": 0}
    server.stop()
    recipe = written(tmp_path, content)
    code, _, err = call(capsys, recipe, "--method", "sft", "--out", out, "--no-cache")
    assert code == 1 and "3 of 3 judgments of this batch failed (limit max_failed 50%)" in err
    assert (
        f"saved in {out / 'checkpoint-1'}: go on, once the judge answers again" in err
        and "--resume" in err
    )
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
    there = {
        Examples(list(split)).hashes["train"]
        for split in ((first, second), (second, first), (first,))
    }
    assert len(there) == 3 and "validation" not in Examples([first]).hashes


@pytest.mark.slow
def test_two_processes_write_one_run(tmp_path):
    out = (
        tmp_path / "run"
    )  # what `accelerate launch` starts on GPUs is torchrun; on the CPU it starts one process only
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command += ["-m", "memcalib", "train", "micro"]
    command += ["--method", "gdpo", "--out", out, *small()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Policy: ") == 1
    assert [row["step"] for row in read_rows(out / "steps.jsonl")] == [0, 1, 2]
    assert json.loads((out / "manifest.json").read_text())["sessions"][0]["processes"] == 2
    assert (
        load_policy(out / "policy")[0].num_parameters()
        == load_policy("cold-short")[0].num_parameters()
    )


def test_the_tokenizer_of_a_micro_policy_goes_with_it(straight):
    from transformers import AutoTokenizer

    text = "Build the plan on July."
    saved = AutoTokenizer.from_pretrained(straight / "policy")
    assert saved(text)["input_ids"] == build_tokenizer()(text)["input_ids"]


def test_a_teacher_may_live_on_the_hub(monkeypatch):
    import memcalib.trainer.distillation as distillation

    asked = []
    student = load_policy("cold-short")[0]
    monkeypatch.setattr(
        distillation, "create_model_from_path", lambda path, dtype: asked.append(path) or student
    )
    for name in ("owner/teacher-8b", "teacher-short"):
        assert distillation.load_teacher(name, student) is student
    assert asked == ["owner/teacher-8b", str(policy_path("teacher-short"))]


def test_what_a_terminal_shows_at_the_end(straight):
    run = TrainRun(
        load_recipe("micro", [*SMALL, "train.steps=4"]), "memcalib-rl", straight, resume=True
    )
    head, *_, read, policy, best, measure = run.text().splitlines()
    assert head == "memcalib-rl, seed 42, 4 steps, 4 validation examples"
    assert (
        "higher the better" in read
        and policy.endswith("policy")
        and measure.startswith("Measure it: memcalib evaluate")
    )
    step = json.loads((straight / "best" / "best.json").read_text())["step"]
    assert best == f"Best on validation, after step {step}: {straight / 'best'}"


def test_a_run_that_was_not_validated_says_why(tmp_path):
    recipe = load_recipe("micro", [*SMALL, "sft.eval_every=0", "sft.log_every=50"])
    run = TrainRun(recipe, "sft", tmp_path / "run")
    run.run()
    assert run.text().splitlines()[0] == "sft, seed 42, 2 steps, not validated: eval_every is 0"
    late = TrainRun(
        load_recipe("micro", [*SMALL, "sft.eval_every=50", "sft.log_every=50"]),
        "sft",
        tmp_path / "late",
    )
    assert (
        late.text().splitlines()[0]
        == "sft, seed 42, 2 steps, not validated: eval_every is 50, more than 2 steps"
    )


def validated(tmp_path, unscored: dict[int, int]) -> list[str]:
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path)
    scores = dict.fromkeys(METRICS, 50.0)
    count = len(run.examples.validation)
    rows = [
        {"step": step, "valid_unscored": lost}
        | {f"valid_{m}": None if lost == count else v for m, v in scores.items()}
        for step, lost in unscored.items()
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run.text().splitlines()


def test_answers_that_were_not_scored_are_counted(tmp_path):
    said = validated(tmp_path, {0: 0, 2: 3})
    assert said[1].split() == ["step", *METRICS, "unscored"]
    assert [line.split()[-1] for line in said[2:4]] == ["0", "3"] and said[3].split()[0] == "last"


def test_a_run_whose_validation_had_no_score_says_so(tmp_path):
    said = validated(tmp_path, {0: 4, 2: 4})
    assert said[0].endswith(
        "not validated: none of 4 validation answers could be scored, after step 0, 2"
    )


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
        file.write(json.dumps({"step": 4, "valid_overlong": "many"} | row) + "\n")
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path, resume=True)
    said = run.text().splitlines()
    assert said[0].endswith("4 validation examples") and said[3].split()[:3] == [
        "last",
        "2",
        "50.0",
    ]


def test_a_metric_that_a_row_lacks_is_shown_as_missing(tmp_path):
    validated(tmp_path, {0: 0, 2: 3})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "valid_SCS": 3.0}) + "\n")
    said = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path, resume=True).text().splitlines()
    assert said[3].split() == ["last", "4", "3.0", *["NaN"] * len(METRICS)]


def test_a_run_whose_only_validation_was_stopped_says_so(tmp_path):
    """Its judge went away at the last step; the run went on, and what is done is not done again."""
    run = TrainRun(load_recipe("micro", [*SMALL, "sft.eval_every=2"]), "sft", tmp_path)
    (tmp_path / "steps.jsonl").write_text('{"step": 2, "loss": 0.5}\n')
    assert (
        run.text()
        .splitlines()[0]
        .endswith(
            "2 steps, not validated: no validation came to its end, and none is made again when a run goes on"
        )
    )


@pytest.mark.parametrize(
    "config", [{"trl": None}, {"trl": 5, "eval_every": 3}, {"eval_every": 3}, {"kl": 1}, [], None]
)
def test_settings_of_another_hand_are_refused_like_those_of_another_run(tmp_path, config):
    run = TrainRun(load_recipe("micro", SMALL), "gdpo", tmp_path)
    there = json.loads((tmp_path / "parameters.json").read_text()) | {
        "config": config,
        "method": "grpo",
    }
    (tmp_path / "parameters.json").write_text(json.dumps(there))
    with pytest.raises(
        ValueError, match="holds a run of other settings .*method: 'grpo' there, 'gdpo' now"
    ):
        run.run()


# --- nothing was trained, or what was trained is damaged ------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_before_the_first_step_does_not_bind_the_folder(capsys, tmp_path):
    out = tmp_path / "run"
    process = started(out, "memcalib-rl", "train.prompts=8", "train.generations=64")
    wait_for(lambda: (out / "steps.jsonl").is_file(), process)
    process.kill()
    process.communicate(timeout=60)
    assert [row["step"] for row in read_rows(out / "steps.jsonl")] == [0] and (
        out / "best"
    ).is_dir()
    (out / "notes.txt").write_text("mine")
    code, _, err = call(capsys, "micro", "--out", out, *small("train.lr=1e-4", "train.beta=0"))
    assert code == 0, err
    assert [row["step"] for row in read_rows(out / "steps.jsonl")] == [0, 1, 2] and (
        out / "notes.txt"
    ).is_file()


def test_a_run_that_diverged_at_its_first_step_may_have_another_rate(capsys, tmp_path):
    out = tmp_path / "run"
    code, _, err = call(capsys, "micro", "--out", out, "--method", "grpo", *small("train.lr=1"))
    assert code == 1 and "step 1" in err and (out / "reference").is_dir()
    code, _, err = call(capsys, "micro", "--out", out, "--method", "grpo", *small())
    assert code == 0, err


def test_more_prompts_than_examples(capsys, tmp_path):
    code, _, err = call(capsys, "micro", "--out", tmp_path / "run", *small("train.prompts=100"))
    assert (
        code == 1
        and "train.prompts: found 100; allowed: at most 8" in err
        and not (tmp_path / "run").exists()
    )


@pytest.mark.parametrize("option", ["--teacher-url", "--evaluator-url", "--evaluator2-key-env"])
def test_options_of_a_model_without_its_name(capsys, tmp_path, option):
    with pytest.raises(SystemExit) as exit:
        main(["demonstrations", "--out", str(tmp_path / "run"), option, "0.5,1"])
    said = capsys.readouterr().err
    role = option[2:].partition("-")[0]
    assert (
        exit.value.code == 1
        and f"--{role}" in said
        and "model" in said
        and (option in said or f"{role}.model: missing" in said)
    )


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "mine.v2.yaml", "mine.v2.yml"])
def test_the_usual_folder_has_the_whole_name_of_the_recipe(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "load_recipe", lambda *_: load_recipe("micro", SMALL))
    code, _, err = call(capsys, name, "--method", "grpo", "--seed", "7")
    assert code == 0, err
    assert [p.name for p in Path("runs/train").iterdir()] == [
        f"{name.removesuffix('.yaml').removesuffix('.yml')}-grpo-7"
    ]


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
        policy.mkdir() if damage == "empty" else policy.write_text("a note")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert code == 0, err
    assert (policy / "model.safetensors").read_bytes() == weights.read_bytes()
    assert any("made again" in text for text in caplog.messages)


def test_a_policy_that_cannot_be_made_again_is_said(capsys, tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight, out, ignore=shutil.ignore_patterns("checkpoint-*"))
    (out / "policy" / "model.safetensors").write_bytes(b"cut short!")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *small("train.steps=4"))
    assert (
        code == 1 and "model.safetensors: cannot be read" in err and "no checkpoint is left" in err
    )


def test_the_best_policy_is_the_one_that_is_there(tmp_path, straight):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    run = TrainRun(load_recipe("micro", [*SMALL, "train.steps=4"]), "memcalib-rl", out, resume=True)
    (out / "best" / "best.json").write_text('{"step": 3, "SCS": 1.0}')
    assert f"Best on validation, after step 3: {out / 'best'}" in run.text()
    assert [
        line.split()[:2] for line in run.text().splitlines() if line.split()[:1] == ["best"]
    ] == [["best", "3"]]
    shutil.rmtree(out / "best")
    assert "The best policy is not there" in run.text() and "after step" not in run.text()


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
    assert any("left out" in text for text in caplog.messages)


def forget(folder: Path, name: str) -> None:
    """As if a run and its checkpoints had been written before the setting was there."""
    file = folder / "parameters.json"
    bound = json.loads(file.read_text())
    bound["config"].pop(name, None)
    file.write_text(json.dumps(bound))
    for checkpoint in checkpoints(folder):
        state = read_state(checkpoint)
        state["config"].pop(name)
        seal(checkpoint, state)


@pytest.mark.parametrize(
    ("method", "name", "other", "now"),
    [
        ("gdpo", "tail", "train.tail=truncate", "'truncate'"),
        ("sft", "weight_decay", "sft.weight_decay=0.1", "0.1"),
    ],
)
def test_a_run_older_than_a_setting_goes_on_with_its_default(
    capsys, tmp_path, method, name, other, now
):
    out = tmp_path / "older"
    more = ["--method", method, "--out", out]
    code, _, err = call(capsys, "micro", *more, *small("sft.save_every=2"))
    assert code == 0, err
    shutil.rmtree(out / "policy")
    forget(out, name)
    code, _, err = call(capsys, "micro", *more, "--resume", *small("sft.save_every=2", other))
    assert code == 1 and f"config.{name}: nothing there, {now} now" in err
    code, _, err = call(
        capsys, "micro", *more, "--resume", *small("sft.save_every=2", "train.lr=0.5", "sft.lr=0.5")
    )
    assert code == 1 and "config.lr: 0.00" in err and "there, 0.5 now" in err, (
        "a setting that was there has changed"
    )
    code, _, err = call(capsys, "micro", *more, "--resume", *small("sft.save_every=2"))
    assert code == 0 and (out / "policy").is_dir(), err


@pytest.mark.parametrize("method", ["memcalib-rl", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_run_that_ran_out_of_memory_goes_on_in_more_parts(capsys, tmp_path, caplog, method):
    out = tmp_path / "run"
    first = small("train.steps=1", "sft.save_every=1", "data.world.demonstrations=24")
    code, _, err = call(capsys, "micro", "--method", method, "--out", out, *first)
    assert code == 0, err
    shutil.rmtree(out / "policy")
    server = [
        "train.trl.vllm_mode=server",
        "train.trl.vllm_server_base_url=http://localhost:8000",
        "train.trl.vllm_enable_sleep_mode=false",
    ]
    more = [
        "train.steps=2",
        "train.accumulate=2",
        "sft.accumulate=4",
        "sft.save_every=1",
        "data.world.demonstrations=24",
        *server,
    ]
    code, _, err = call(
        capsys, "micro", "--method", method, "--out", out, "--resume", *small(*more)
    )
    assert code == 0 and (out / "policy").is_dir(), err
    assert "other settings of memory" in caplog.text


def test_what_does_not_change_the_weights_may_change_on_the_way(capsys, tmp_path, caplog):
    out = tmp_path / "run"
    code, _, err = call(
        capsys, "micro", "--out", out, *small("train.steps=1", "train.eval_every=2")
    )
    assert code == 0, err
    bound = out / "parameters.json"
    older = json.loads(bound.read_text())
    assert not {"eval_every", "share_prompts"} & older["config"].keys()
    older["config"] |= {
        "eval_every": 2,
        "share_prompts": True,
    }  # as an older version bound its folders
    bound.write_text(json.dumps(older))
    other = small("train.share_prompts=false")
    code, _, err = call(
        capsys, "micro", "--out", out, "--resume", *other, "--set", "train.sampler=generate"
    )
    assert code == 1 and "config.sampler: 'shared' there, 'generate' now" in err
    assert "another sampler draws other random numbers" in err
    shutil.rmtree(out / "policy")
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *other)
    assert code == 0 and (out / "policy").is_dir(), err
    assert "other settings of memory: share_prompts: True there, False now" in caplog.text
    assert (
        "goes on with eval_every 1, 2 before: the best policy is chosen among other steps"
        in caplog.text
    )
    assert json.loads(bound.read_text()) == older, "a folder keeps what it was bound with"


def test_what_is_named_like_a_checkpoint_and_is_no_folder_is_said_once(tmp_path, caplog):
    TrainRun(load_recipe("micro", [*SMALL, "train.steps=1"]), "grpo", tmp_path / "run").run()
    (tmp_path / "run" / "checkpoint-9").write_text("a file")
    (tmp_path / "run" / "checkpoint-11").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run" / "checkpoint-1").write_text("an older one is not asked for")
    shutil.rmtree(tmp_path / "run" / "policy")
    TrainRun(
        load_recipe("micro", [*SMALL, "train.steps=1"]), "grpo", tmp_path / "run", resume=True
    ).run()
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert [
        message.count("checkpoint-9: no memcalib.json (a file, not a folder)") for message in said
    ] == [0, 1]
    assert "checkpoint-11: no memcalib.json (no such folder)" in said[0]


@pytest.mark.parametrize(("read", "configured"), [("concat", "fluent"), ("fluent", "concat")])
def test_fine_tuning_shows_its_judge_what_the_policy_reads(
    tmp_path, mine, monkeypatch, read, configured
):
    asked = []

    def answered(model, tokenizer, examples, *, text, **options):
        asked.append(text)
        return [SimpleNamespace(response="x") for _ in examples]

    def judged(judge, examples, responses):
        asked.append((judge.config.text, judge.name))
        return [exact_judge(example, "") for example in examples]

    monkeypatch.setattr("memcalib.trainer.rewards.sample_answers", answered)
    monkeypatch.setattr(LLMJudge, "batch", judged)
    changes = {"judging": {"text": configured}, "train": mine["train"] | {"eval_text": read}}
    run = TrainRun(Recipe.model_validate(mine | changes), "gdpo", tmp_path / "run")
    how = method_config(run.recipe, "grpo", run.config.seed)
    held_out = HeldOutScores(
        how, load_start(run.recipe.start)[1], run.examples.validation, run.judge, None, run.folder
    )
    assert "SCS" in held_out(None)
    assert asked == [read, (read, run.judge.name)] and run.judge.config.text == configured


@pytest.mark.slow
def test_a_run_stopped_by_drift_says_where_it_is_and_how_to_go_on(capsys, tmp_path):
    nervous = [
        "train.stop_on_drift=true",
        "train.drift_steps=1",
        "train.drift_length=1.0001",
        "train.drift_repetition=0.0001",
    ]
    more = ["micro", "--method", "gdpo", "--out", tmp_path / "run", "--seed", "1"]
    code, _, err = call(capsys, *more, *small("train.steps=6", *nervous))
    last = max(int(path.name[11:]) for path in checkpoints(tmp_path / "run"))
    assert code == 1 and last < 12 and f"saved in {tmp_path / 'run' / f'checkpoint-{last}'}" in err
    assert "wider limits of drift or without stop_on_drift" in err and "--resume" in err
    code, _, err = call(
        capsys, *more, "--resume", *small("train.steps=6", "train.stop_on_drift=false")
    )
    assert code == 0 and read_rows(tmp_path / "run" / "steps.jsonl")[-1]["step"] == 6, err


@contextmanager
def no_file_larger_than(size: int):
    """A disk that gives out: every write beyond `size` bytes of a file fails, in whatever library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "size", [300_000, pytest.param(600_000, marks=pytest.mark.slow)]
)  # too small for the weights, and for the optimizer
def test_a_disk_that_gives_out_leaves_the_last_checkpoint(capsys, tmp_path, straight, size):
    out = tmp_path / "run"
    more = small("train.keep_best=false", "train.beta=0.0", "data.world.test=2")
    whole = call(capsys, "micro", "--out", tmp_path / "whole", *more, "--set", "train.steps=3")
    code, _, err = call(capsys, "micro", "--out", out, *more, "--set", "train.steps=1")
    assert whole[0] == code == 0, err
    with no_file_larger_than(size):
        code, _, err = call(
            capsys, "micro", "--out", out, "--resume", *more, "--set", "train.steps=3"
        )
    assert (
        code == 1
        and err.startswith(f"memcalib: {out / 'checkpoint-4'}: ")
        and "what was saved before is whole" in err
    )
    assert "--resume" in err and [path.name for path in checkpoints(out)] == ["checkpoint-2"]
    assert (
        read_state(out / "checkpoint-2")["updates"] == 2
        and json.loads((out / "manifest.json").read_text())["sessions"]
    )
    code, _, err = call(capsys, "micro", "--out", out, "--resume", *more, "--set", "train.steps=3")
    assert code == 0 and numbers(out) == numbers(tmp_path / "whole"), err
    assert (out / "policy" / "model.safetensors").read_bytes() == (
        tmp_path / "whole/policy/model.safetensors"
    ).read_bytes()


def test_a_disk_that_gives_out_names_the_policy(capsys, tmp_path):
    more = small(
        "train.eval_every=0",
        "train.beta=0.0",
        "train.save_every=0",
        "train.steps=1",
        "data.world.test=2",
    )
    with no_file_larger_than(300_000):
        code, _, err = call(capsys, "micro", "--out", tmp_path / "run", *more)
    assert code == 1 and err.startswith(f"memcalib: {tmp_path / 'run' / 'policy'}: ")
    assert (
        not (tmp_path / "run" / "policy.part").exists()
        and not (tmp_path / "run" / "policy").exists()
    )


def test_a_row_that_finds_no_room_names_its_file(tmp_path):
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    here = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=True),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        config=TrainConfig(),
        judged=SimpleNamespace(judge=None),
    )
    with pytest.raises(
        OSError, match="No space left on device; what was saved before is whole"
    ) as caught:
        StepRows(here).write({"step": 1})
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
