"""Supervised fine-tuning: rows, settings, resumed runs, adapters,
and the recipe of the shipped policies.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.utils
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer_logger import hear
from run_files import weights
from memcalib.io.signals import termination_interrupts
from memcalib.trainer.checkpoints import CheckpointError, read_state
from memcalib.trainer.rewards import HeldOutScores
from memcalib.products.micro.world import WORLDS, demonstrations, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer, load_policy
from memcalib.trainer.rewards import JudgeDown, JudgeFault, RetryingJudge
from memcalib.problem import encode_prompt, render
from memcalib.trainer.train_config import world_config
from memcalib.trainer.sft import (
    SftConfig,
    _arguments,
    _Steps,
    cold_start,
    sft,
    tokenize_rows,
)
from memcalib.trainer.callbacks import Diverged
from memcalib.trainer.checkpoints import Interrupted

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, 0, "coldstart")
ROWS = demonstrations("short", 24, seed=3)
SMALL = SftConfig(lora_rank=2, lr=1e-2, epochs=2, batch_size=8, save_every=2)


def test_cold_start_rows_and_adapter(tmp_path):
    rows = [
        {
            "prompt": render(e, text="concat", prompt_template="micro"),
            "completion": [{"role": "assistant", "content": "Keep July in mind."}],
        }
        for e in EXAMPLES
    ]
    table = tokenize_rows(TOKENIZER, rows)
    assert table[0]["input_ids"][: table[0]["completion_mask"].index(1)] == encode_prompt(
        TOKENIZER, rows[0]["prompt"]
    )
    assert table[0]["input_ids"][-1] == TOKENIZER.eos_token_id
    policy = cold_start(
        build_policy(0), TOKENIZER, rows, out=tmp_path, lora_rank=2, lr=1e-2, epochs=3
    )
    assert type(policy).__name__ == "Qwen3ForCausalLM" and all(
        p.requires_grad for p in policy.parameters()
    )
    assert not torch.equal(weights(policy), weights(build_policy(0)))


@pytest.mark.parametrize("special", [False, True])
def test_a_control_token_that_was_added_stays_text_in_an_answer(special):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<call>"], special_tokens=special)
    added = tokenizer.convert_tokens_to_ids("<call>")
    assert added in tokenizer("See <call>.")["input_ids"]
    row = {**ROWS[0], "completion": [{"role": "assistant", "content": "See <call>."}]}
    assert added not in tokenize_rows(tokenizer, [row])[0]["input_ids"]


def test_losses_are_written_and_not_printed(tmp_path, capsys):
    sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path)
    printed = capsys.readouterr().out
    assert "loss" not in printed and "train_runtime" not in printed
    assert "loss" in (tmp_path / "steps.jsonl").read_text()


# settings


def test_defaults_are_the_papers():
    config = SftConfig()
    assert (config.lora_rank, config.lora_alpha, config.epochs, config.batch_size) == (
        32,
        64,
        1,
        32,
    )
    assert (config.lr, config.warmup, config.schedule, config.output) == (
        1e-4,
        0.05,
        "cosine",
        "merged",
    )


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"lora_rnk": 2}, "lora_rnk"),
        ({"lr": 0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"warmup": 1.0}, "warmup"),
        ({"output": "both"}, "output"),
        ({"output": "adapter", "lora_rank": 0}, "lora_rank 0"),
        ({"batch_size": 10, "accumulate": 4}, "multiples of accumulate, which is 4"),
        ({"max_length": 0}, "max_length"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValidationError, match=words):
        SftConfig(**settings)


# what the loss sees


@given(
    st.lists(
        st.sampled_from(
            ["<|end|>", "<|assistant|>", "<|user|>", "Keep July in mind.", " ", "\u2060"]
        ),
        max_size=6,
    )
)
def test_no_control_token_gets_into_an_answer(pieces):
    row = {
        "prompt": [{"role": "user", "content": "Plan."}],
        "completion": [{"role": "assistant", "content": "".join(pieces)}],
    }
    table = tokenize_rows(TOKENIZER, [row])[0]
    answer = [
        i
        for i, in_completion in zip(table["input_ids"], table["completion_mask"], strict=True)
        if in_completion
    ]
    assert answer[-1] == TOKENIZER.eos_token_id
    assert not {*TOKENIZER.convert_tokens_to_ids(["<|end|>", "<|assistant|>", "<|user|>"])} & {
        *answer[:-1]
    }


@pytest.mark.parametrize("limit", [2**24, 0], ids=["every token scored", "answers alone"])
def test_the_loss_is_the_mean_over_completion_tokens(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("memcalib.trainer.sft.LOGITS", limit)
    scored = []
    inner = trl.trainer.utils._ChunkedLogProbFunction.apply

    def counted(hidden, *arguments):
        scored.append(len(hidden))
        return inner(hidden, *arguments)

    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", counted)
    model = build_policy(0)
    config = SMALL.model_copy(update={"lora_rank": 0, "epochs": 1.0, "batch_size": 24})
    total_loss = 0.0
    hits = 0
    count = 0
    for row in tokenize_rows(TOKENIZER, ROWS):
        ids = torch.tensor([row["input_ids"]])
        in_completion = torch.tensor(row["completion_mask"][1:]).bool()
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total_loss += torch.nn.functional.cross_entropy(
            logits[in_completion], ids[0, 1:][in_completion], reduction="sum"
        ).item()
        hits += (logits.argmax(-1)[in_completion] == ids[0, 1:][in_completion]).sum().item()
        count += int(in_completion.sum())
    sft(model, TOKENIZER, ROWS, config, tmp_path)
    row = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(total_loss / count, abs=1e-4)
    assert row["token_accuracy"] == pytest.approx(hits / count, abs=1e-6)
    assert (sum(scored) == count) == (limit == 0)


# length


def test_rows_that_are_too_long_are_named_and_never_cut(tmp_path, caplog):
    rows = [row | {"example_id": f"row-{i}"} for i, row in enumerate(ROWS)]
    sizes = [len(ids) for ids in tokenize_rows(TOKENIZER, rows)["input_ids"]]
    limit = sorted(sizes)[-4]
    config = SMALL.model_copy(update={"max_length": limit})
    done = sft(build_policy(0), TOKENIZER, rows, config, tmp_path)
    long = [f"row-{i}" for i, size in enumerate(sizes) if size > limit]
    assert done.overlong == long and done.rows == 24 - len(long) and len(long) > 0
    assert (
        f"{len(long)} of 24 rows are longer than {limit} tokens" in caplog.text
        and long[0] in caplog.text
    )
    assert json.loads((tmp_path / "sft.json").read_text())["overlong"] == long


@pytest.mark.parametrize("by_path", [False, True])
def test_rows_beyond_the_context_of_the_model_are_named_too(tmp_path, by_path):
    """With no limit of length at all, and with one that is larger than what the model can read."""
    model = build_policy(0)
    rows = [row | {"example_id": f"row-{i}"} for i, row in enumerate(ROWS)]
    sizes = [len(ids) for ids in tokenize_rows(TOKENIZER, rows)["input_ids"]]
    model.config.max_position_embeddings = room = sorted(sizes)[-4]
    if by_path:
        model.save_pretrained(tmp_path / "model")
    for limit in (None, 8192):
        config = SMALL.model_copy(update={"max_length": limit, "epochs": 1.0})
        done = sft(
            str(tmp_path / "model") if by_path else model,
            TOKENIZER,
            rows,
            config,
            tmp_path / f"run-{limit}",
        )
        assert done.overlong == [f"row-{i}" for i, size in enumerate(sizes) if size > room] != []
        model = model if by_path else build_policy(0)
        model.config.max_position_embeddings = room


def test_an_update_is_that_of_answer_and_end_tokens_alone(tmp_path):
    """One step of plain SGD against a loop over the rows that sums the loss of each answer token
    and the end by hand.
    """
    reference = build_policy(0)
    rows = ROWS[:6]
    total = torch.zeros(())
    count = 0
    for row in rows:
        prompt = encode_prompt(TOKENIZER, row["prompt"])
        answer = [
            *TOKENIZER("".join(m["content"] for m in row["completion"]))["input_ids"],
            TOKENIZER.eos_token_id,
        ]
        logs = reference(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        for k, token in enumerate(answer):
            total = total - logs[len(prompt) + k - 1, token]
            count = count + 1
    (total / count).backward()
    expected_weights = torch.cat(
        [(p - 0.1 * p.grad).detach().flatten() for p in reference.parameters()]
    )
    plain = {"optim": "sgd", "max_grad_norm": 0.0}
    only = {
        "lora_rank": 0,
        "epochs": 1.0,
        "batch_size": 6,
        "lr": 0.1,
        "warmup": 0.0,
        "save_every": 0,
        "trl": plain,
    }
    done = sft(build_policy(0), TOKENIZER, rows, SMALL.model_copy(update=only), tmp_path)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
    assert torch.allclose(weights(done.model), expected_weights, atol=1e-5)
    assert (expected_weights - weights(build_policy(0))).abs().max() > 1e-3


def test_settings_reach_the_base_trainer(tmp_path):
    config = SftConfig(
        batch_size=12,
        accumulate=3,
        schedule="linear",
        weight_decay=0.25,
        warmup=0.1,
        lr=3e-4,
        seed=7,
    )
    arguments = _arguments(config, tmp_path, False)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 3)
    assert (arguments.lr_scheduler_type, arguments.weight_decay, arguments.warmup_steps) == (
        "linear",
        0.25,
        0.1,
    )
    assert (
        arguments.learning_rate,
        arguments.seed,
        arguments.num_train_epochs,
        arguments.completion_only_loss,
    ) == (3e-4, 7, 1, True)


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(
        ValueError, match="none of the 24 rows.*allowed: at most 3, the smaller of max_length"
    ):
        sft(build_policy(0), TOKENIZER, ROWS, SMALL.model_copy(update={"max_length": 3}), tmp_path)
    with pytest.raises(ValueError, match="none of the 0 rows"):
        sft(build_policy(0), TOKENIZER, [], SMALL, tmp_path)


def test_no_chat_template(tmp_path):
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        sft(build_policy(0), bare, ROWS, SMALL, tmp_path)


# runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    done = sft(build_policy(0), TOKENIZER, ROWS, SMALL, folder)
    return folder, weights(done.model)


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_equals_the_straight_one(straight, tmp_path, step):
    folder, final = straight
    gone = [f"checkpoint-{n}" for n in (2, 4, 6) if n > step]
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("merged", *gone))
    with open(tmp_path / "run" / "steps.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # torn
    torch.manual_seed(123)
    done = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "run", resume=True)
    assert torch.equal(weights(done.model), final)
    assert (tmp_path / "run" / "steps.jsonl").read_text() == (folder / "steps.jsonl").read_text()
    loaded = load_policy(tmp_path / "run" / "merged")[0]
    assert torch.equal(weights(loaded), final)


def test_resume_from_a_named_checkpoint_and_with_all_weights(tmp_path):
    config = SMALL.model_copy(update={"lora_rank": 0})
    first = sft(build_policy(0), TOKENIZER, ROWS, config, tmp_path)
    final = weights(first.model).clone()
    again = sft(
        build_policy(0), TOKENIZER, ROWS, config, tmp_path, resume=tmp_path / "checkpoint-4"
    )
    assert torch.equal(weights(again.model), final)
    assert [
        json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()
    ] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_a_killed_run_goes_on_to_the_same_weights(straight, tmp_path):
    _, final = straight
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from memcalib.products.micro.policy import build_policy, build_tokenizer\n"
        "from memcalib.products.micro.world import demonstrations\n"
        "from memcalib.trainer.sft import SftConfig, sft\n"
        f"config = SftConfig.model_validate_json({SMALL.model_dump_json()!r})\n"
        "sft(build_policy(0), build_tokenizer(), demonstrations('short', 24, seed=3), config, "
        "sys.argv[1], resume=True)\n"
    )
    command = [sys.executable, "-c", script, tmp_path]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 200
    while not (tmp_path / "checkpoint-2" / "memcalib.json").exists() and process.poll() is None:
        assert time.monotonic() < end
        os.sched_yield()
    process.kill()
    process.wait()
    done = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path, resume=True)
    assert torch.equal(weights(done.model), final)


STOPPED = """
import signal, sys, torch
torch.set_num_threads(1)
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.products.micro.world import demonstrations
from memcalib.trainer.sft import SftConfig, sft
from memcalib.trainer.callbacks import Diverged
from memcalib.trainer.checkpoints import Interrupted
config = SftConfig.model_validate_json(sys.argv[2])
def stop(row):
    if row["step"] == int(sys.argv[4]):
        signal.raise_signal(getattr(signal, sys.argv[3]))
rows = demonstrations("short", 24, seed=3)
try:
    sft(build_policy(0), build_tokenizer(), rows, config, sys.argv[1], report=stop)
except Interrupted as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step", "code"), [("SIGTERM", 2, 143), ("SIGINT", 4, 130)])
def test_a_run_told_to_stop_saves_its_last_whole_step(straight, tmp_path, name, step, code):
    """The signal comes while the row of a step is written;
    the run ends after the next step, off the beat of save_every.
    """
    folder, final = straight
    command = [sys.executable, "-c", STOPPED, tmp_path, SMALL.model_dump_json(), name, str(step)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    saved = tmp_path / f"checkpoint-{step + 1}"
    assert (
        f"{name}: the run saves its last complete step and ends; press again to end immediately"
        in done.stderr
    )
    assert (
        f"{name}: the run was stopped by a signal. Everything so far is saved in {saved}: go on"
        in done.stdout
    )
    assert read_state(saved)["updates"] == step + 1 and not (tmp_path / "merged").exists()
    again = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path, resume=True)
    assert torch.equal(weights(again.model), final)
    assert (tmp_path / "steps.jsonl").read_text() == (folder / "steps.jsonl").read_text()


@pytest.mark.slow
def test_a_run_without_checkpoints_hears_no_signals(tmp_path):
    config = SMALL.model_copy(update={"save_every": 0})
    command = [sys.executable, "-c", STOPPED, tmp_path, config.model_dump_json(), "SIGTERM", "2"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == -15 and not list(tmp_path.glob("checkpoint-*"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for i in range(len(content) // 2, min(len(content) // 2 + 64, len(content))):
        content[i] ^= 0xFF
    file.write_bytes(content)


FAULTS = {
    "flip": flip,
    "zero": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": lambda file: file.unlink(),
}


def as_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


FILES = ["adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "memcalib.json"]
ONCE = {
    *zip(FILES, FAULTS, strict=False),
    ("memcalib.json", "gone"),
}  # each file and each fault; the other pairs are slow


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if (name, fault) in ONCE else pytest.mark.slow)
        for name in FILES
        for fault in FAULTS
    ],
)
def test_a_damaged_checkpoint_is_passed_over(straight, tmp_path, caplog, name, fault):
    """The run goes on from the one before, and says which file was at fault;
    the newest but one is half-written as well.
    """
    folder, final = straight
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("merged"))
    FAULTS[fault](tmp_path / "run" / "checkpoint-6" / name)
    (tmp_path / "run" / "checkpoint-7").mkdir()
    done = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "run", resume=True)
    assert torch.equal(weights(done.model), final)
    assert (
        "skipped: " in caplog.text and "skipped: " in caplog.text and "checkpoint-6" in caplog.text
    )
    assert (tmp_path / "run" / "steps.jsonl").read_text() == (folder / "steps.jsonl").read_text()
    assert read_state(tmp_path / "run" / "checkpoint-6")["updates"] == 6, "made again, whole"


def test_a_file_in_the_place_of_a_checkpoint(straight, tmp_path):
    folder, final = straight
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("merged"))
    as_a_file(tmp_path / "run" / "checkpoint-6")
    done = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "run", resume=True)
    assert torch.equal(weights(done.model), final)
    assert read_state(tmp_path / "run" / "checkpoint-6")["updates"] == 6


def test_with_every_checkpoint_damaged_a_run_starts_at_the_beginning(straight, tmp_path, caplog):
    folder, final = straight
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("merged"))
    flip(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    flip(tmp_path / "run" / "checkpoint-4" / "optimizer.pt")
    as_a_file(tmp_path / "run" / "checkpoint-6")
    with pytest.raises(
        CheckpointError, match="checkpoint-4/optimizer.pt: checksum .* damaged since"
    ):
        sft(
            build_policy(0),
            TOKENIZER,
            ROWS,
            SMALL,
            tmp_path / "run",
            resume=tmp_path / "run" / "checkpoint-4",
        )
    done = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "run", resume=True)
    assert "no complete checkpoint to resume from" in caplog.text
    assert torch.equal(weights(done.model), final)
    assert (tmp_path / "run" / "steps.jsonl").read_text() == (folder / "steps.jsonl").read_text()


def test_resume_without_a_checkpoint_begins_and_without_resume_begins_anew(straight, tmp_path):
    _, final = straight
    assert torch.equal(
        weights(sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path, resume=True).model), final
    )
    other = SMALL.model_copy(update={"seed": 7})
    with pytest.raises(
        CheckpointError, match="checkpoint-6 is of another run .seed: 42 there, 7 now.; allowed"
    ):
        sft(build_policy(0), TOKENIZER, ROWS, other, tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="of another run .other training examples"):
        sft(build_policy(0), TOKENIZER, ROWS[:16], SMALL, tmp_path, resume=True)
    with pytest.raises(
        CheckpointError, match="of another run .different training examples, or a different order"
    ):
        sft(build_policy(0), TOKENIZER, ROWS[::-1], SMALL, tmp_path, resume=True)
    anew = sft(build_policy(0), TOKENIZER, ROWS[:16], other, tmp_path)
    assert not torch.equal(weights(anew.model), final)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 4
    with pytest.raises(CheckpointError, match="checkpoint-99: no memcalib.json .no such folder."):
        sft(
            build_policy(0),
            TOKENIZER,
            ROWS[:16],
            other,
            tmp_path,
            resume=tmp_path / "checkpoint-99",
        )


def test_an_adapter_merged_by_hand_is_the_merged_model(straight, tmp_path):
    _, final = straight
    done = sft(
        build_policy(0), TOKENIZER, ROWS, SMALL.model_copy(update={"output": "adapter"}), tmp_path
    )
    assert done.folder == tmp_path / "adapter" and not list(done.folder.glob("model*.safetensors"))
    adapter_config = json.loads((done.folder / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["lora_dropout"]) == (
        2,
        64,
        0.0,
    )
    merged = PeftModel.from_pretrained(build_policy(0), done.folder).merge_and_unload()
    assert torch.allclose(weights(merged), final, atol=1e-7)


def test_adapter_and_merged_model_from_disk_give_the_same_log_probabilities(straight, tmp_path):
    """Both folders as any program would load them, on every token of the rows,
    and far from what the base model says.
    """
    merged = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "one")
    adapter = sft(
        build_policy(0),
        TOKENIZER,
        ROWS,
        SMALL.model_copy(update={"output": "adapter"}),
        tmp_path / "two",
    )
    build_policy(0).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = [torch.tensor([row["input_ids"]]) for row in tokenize_rows(TOKENIZER, ROWS)]
    with torch.no_grad():

        def logs(model):
            return torch.cat([model.eval()(each).logits[0].log_softmax(-1) for each in ids])

        plain = logs(base)
        logps = [
            logs(AutoModelForCausalLM.from_pretrained(merged.folder)),
            logs(PeftModel.from_pretrained(base, adapter.folder)),
            logs(merged.model),
            logs(adapter.model),
        ]
    assert all(torch.allclose(each, logps[0], atol=1e-4) for each in logps[1:])
    assert (logps[0] - plain).abs().max() > 0.1
    for folder in (merged.folder, adapter.folder):
        text = "Keep July in mind."
        assert (
            AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == TOKENIZER(text)["input_ids"]
        )


def test_pieces_of_a_batch_make_the_same_update(straight, tmp_path):
    _, final = straight
    done = sft(
        build_policy(0), TOKENIZER, ROWS, SMALL.model_copy(update={"accumulate": 4}), tmp_path
    )
    assert torch.allclose(weights(done.model), final, atol=1e-4)


@pytest.mark.parametrize(
    ("epochs", "warmup", "warm"),
    [pytest.param(14.0, 0.05, 3, marks=pytest.mark.slow), (7.0, 0.2, 5), (3.0, 0.0, 0)],
)
def test_schedule_warms_up_and_falls_along_a_cosine(tmp_path, epochs, warmup, warm):
    """The default share of 5 % among them; a part of a step counts as a whole one."""
    assert SftConfig().warmup == 0.05 and SftConfig().schedule == "cosine"
    config = SMALL.model_copy(update={"epochs": epochs, "save_every": 0, "warmup": warmup})
    sft(build_policy(0), TOKENIZER, ROWS, config, tmp_path)
    rates = [json.loads(line)["lr"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    steps = round(3 * epochs)

    def fall(k):
        return (1 + math.cos(math.pi * (k - warm) / (steps - warm))) / 2

    assert rates == pytest.approx(
        [1e-2 * (k / warm if k < warm else fall(k)) for k in range(steps)], abs=1e-8
    )
    assert len(rates) == steps and max(rates) == pytest.approx(1e-2)


def test_validation_by_rows_and_by_scores_leaves_the_weights_alone(straight, tmp_path):
    _, final = straight
    config = SMALL.model_copy(update={"eval_every": 3})
    held = demonstrations("short", 8, seed=9)

    def score(model):
        return {"SCS": float(torch.rand(())), "training": float(model.training)}

    for name, validation, metric in (("rows", held, "valid_loss"), ("scores", score, "valid_SCS")):
        done = sft(build_policy(0), TOKENIZER, ROWS, config, tmp_path / name, validation=validation)
        rows = [
            json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()
        ]
        assert torch.equal(weights(done.model), final)
        assert [row["step"] for row in rows if metric in row] == [3, 6]
        assert not any(row.get("valid_training") for row in rows)


def test_a_model_by_path(straight, tmp_path):
    _, final = straight
    base = tmp_path / "base"
    build_policy(0).save_pretrained(base)
    done = sft(str(base), TOKENIZER, ROWS, SMALL, tmp_path / "run")
    assert torch.equal(weights(done.model), final) and Path(done.folder).name == "merged"


def test_a_damaged_row_does_not_stop_a_run_from_going_on(straight, tmp_path, caplog):
    folder = straight[0]
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / "steps.jsonl"
    first, second, *later_lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b"\x00" + second[5:] + b"".join(later_lines))
    sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "run", resume=True)
    assert "damaged in line 2" in caplog.text
    assert file.read_bytes() == first + second + b"".join(later_lines)


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(report_to="wandb"), "report_to: found 'wandb'.*not installed"),
        (dict(lora_rank=1000), "lora_rank: found 1000; allowed"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, by_path, changes, message
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    model = build_policy(0)
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=message):
        sft(
            str(tmp_path / "base") if by_path else model,
            TOKENIZER,
            ROWS,
            SMALL.model_copy(update=changes),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_model_that_holds_the_adapter_already_does_not_go_on_with_it(straight, tmp_path):
    _, final = straight
    model = build_policy(0)
    sft(model, TOKENIZER, ROWS, SMALL, tmp_path / "one")
    merged = weights(model).clone()
    assert torch.equal(merged, final)
    with pytest.raises(
        ValueError, match="one: the model that was given holds what this run has learned already"
    ):
        sft(model, TOKENIZER, ROWS, SMALL, tmp_path / "one", resume=True)
    assert torch.equal(
        weights(AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "merged")), merged
    )
    sft(model, TOKENIZER, ROWS, SMALL, tmp_path / "two", resume=True)
    assert not torch.equal(weights(model), merged), "another run may begin with it"
    again = sft(build_policy(0), TOKENIZER, ROWS, SMALL, tmp_path / "one", resume=True)
    assert torch.equal(weights(again.model), final)


def test_a_row_that_finds_no_room_names_its_file(tmp_path):
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    steps = _Steps(tmp_path / "steps.jsonl", SMALL, None, None)
    with pytest.raises(
        OSError, match="No space left on device; the earlier checkpoints are complete"
    ) as caught:
        steps._write(SimpleNamespace(is_world_process_zero=True, global_step=1), {"loss": 1.0})
    assert caught.value.filename == str(tmp_path / "steps.jsonl")


def test_a_logger_hears_every_row(tmp_path, monkeypatch):
    notes = hear(monkeypatch)
    config = SMALL.model_copy(update={"report_to": "notes", "eval_every": 2, "save_every": 0})
    scores = iter(
        [{"SCS": 10.0, "bad": float("nan")}, {"SCS": 20.0, "bad": 1.0}, {"SCS": 30.0, "bad": 2.0}]
    )
    sft(build_policy(0), TOKENIZER, ROWS, config, tmp_path, validation=lambda model: next(scores))
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    losses = [(row["step"], row["loss"], row["token_accuracy"]) for row in rows if "loss" in row]
    assert losses == [
        (step, values["loss"], values["mean_token_accuracy"])
        for step, values in notes
        if "loss" in values
    ]
    valid = [(step, values) for step, values in notes if "memcalib/valid_SCS" in values]
    assert valid == [
        (2, {"memcalib/valid_SCS": 10.0}),
        (4, {"memcalib/valid_SCS": 20.0, "memcalib/valid_bad": 1.0}),
        (6, {"memcalib/valid_SCS": 30.0, "memcalib/valid_bad": 2.0}),
    ]
    assert len(losses) == 6, "a row an update, validation or not"


class Flaky:
    """A judge that is down whenever `down` says so."""

    def __init__(self, *down):
        self.down = iter(down)
        self.call_count = 0

    def __call__(self, example, response):
        self.call_count += 1
        if next(self.down, False):
            raise ConnectionError("connection refused")
        return exact_judge(example, response)


HOW = world_config(WORLDS["short"], max_tokens=12, max_failed=0.5, pause_minutes=10)
HELD_OUT = make_examples("short", 3, 8, "validation")


def validated(out, judge, resume=False, config=SMALL, examples=HELD_OUT, **options):
    now = [0.0]

    def sleep(seconds):
        return now.__setitem__(0, now[0] + seconds)

    patient = RetryingJudge(
        judge,
        HOW.max_failed,
        HOW.pause_minutes,
        clock=lambda: now[0],
        sleep=sleep,
        function_tries=1,
    )
    scores = HeldOutScores(HOW, TOKENIZER, examples, patient, 1024, out)
    config = config.model_copy(update={"eval_every": 2})
    done = sft(
        build_policy(0), TOKENIZER, ROWS, config, out, validation=scores, resume=resume, **options
    )
    return (
        done,
        [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()],
        now[0],
    )


def test_a_judge_that_is_down_for_a_while_is_waited_for(straight, tmp_path):
    judge = Flaky(*[True] * 9)
    done, rows, waited = validated(tmp_path, judge)
    assert torch.equal(weights(done.model), straight[1])
    assert waited == 5 + 10 + 20 and judge.call_count == 9 + 3 * 3
    assert [row["valid_unscored"] for row in rows if "valid_SCS" in row] == [0, 0, 0]


@pytest.mark.parametrize("save_every", [2, 0])
def test_a_judge_that_stays_down_ends_the_run_with_a_checkpoint(straight, tmp_path, save_every):
    """It is gone at the second validation: the loss of that step is kept,
    and only its scores are missing.
    """
    config = SMALL.model_copy(update={"save_every": save_every, "log_every": 1})
    judge = Flaky(*[False] * 3, *[True] * 1000)
    saved = tmp_path / "checkpoint-4"
    with pytest.raises(
        JudgeDown, match="3 of 3 judgments .* connection refused; nothing improved within 10"
    ) as caught:
        validated(tmp_path, judge, config=config)
    assert (
        f"Everything so far is saved in {saved}: go on, once the judge answers again, with"
        in str(caught.value)
    )
    assert read_state(saved)["updates"] == 4 and not (tmp_path / "merged").exists()
    done, rows, waited = validated(tmp_path, exact_judge, resume=True, config=config)
    assert torch.equal(weights(done.model), straight[1]) and waited == 0
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "valid_SCS" in row] == [2, 6]


def test_a_judge_with_a_bug_ends_the_run_with_a_checkpoint(tmp_path):
    def bug(example, response):
        raise KeyError("no such level")

    with pytest.raises(JudgeFault, match=r"no such level.*checkpoint-2\. Continue, once this"):
        validated(tmp_path, bug)


def test_a_signal_that_comes_while_a_run_waits_ends_it(tmp_path):
    """The judge never comes back, and the run receives a signal while it waits for it."""

    def waits(seconds):
        return signal.raise_signal(signal.SIGTERM)

    patient = RetryingJudge(Flaky(*[True] * 1000), clock=lambda: 0.0, sleep=waits, function_tries=1)
    scores = HeldOutScores(HOW, TOKENIZER, HELD_OUT, patient, 1024)
    config = SMALL.model_copy(update={"eval_every": 2})
    told_where = pytest.raises(Interrupted, match="SIGTERM.*checkpoint-2")
    with termination_interrupts(), told_where as caught:  # as the command line runs it
        sft(build_policy(0), TOKENIZER, ROWS, config, tmp_path, validation=scores)
    assert caught.value.exit_code == 143


def test_held_out_prompts_without_room_for_an_answer_are_left_out_of_the_scores(tmp_path):
    long = [
        e.model_copy(update={"id": f"long-{k}", "question": e.question * 300})
        for k, e in enumerate(HELD_OUT[:2])
    ]
    ids_asked = []

    def judge(example, response):
        return ids_asked.append(example.id) or exact_judge(example, response)

    _, rows, _ = validated(tmp_path, judge, examples=[*long, *HELD_OUT])
    listed = [json.loads(line) for line in (tmp_path / "overlong.jsonl").read_text().splitlines()]
    assert [(row["example_id"], row["context_without_answer"]) for row in listed] == [
        ("long-0", 1012),
        ("long-1", 1012),
    ]
    assert {*ids_asked} == {e.id for e in HELD_OUT} and [
        r["valid_overlong"] for r in rows if "valid_SCS" in r
    ] == [2] * 3
    validated(tmp_path, judge, True, examples=[*long, *HELD_OUT])
    assert len((tmp_path / "overlong.jsonl").read_text().splitlines()) == 2, "those of this start"
    with pytest.raises(
        ValueError,
        match=r"no prompt of at most 1012 tokens \(context_without_answer\) among 2 validation",
    ):
        HeldOutScores(HOW, TOKENIZER, long, judge, 1024)
    with pytest.raises(
        ValueError,
        match="max_tokens: found 12; allowed for a validation: fewer than 12, the model's",
    ):
        HeldOutScores(HOW, TOKENIZER, HELD_OUT, judge, 12)


def ruined(model, at: int):
    def ruin(row):
        if row["step"] == at:
            next(weight for weight in model.parameters() if weight.requires_grad).data.fill_(
                math.nan
            )

    return ruin


@pytest.mark.parametrize(
    ("save_every", "at", "failing_step"),
    [
        (2, 3, 4),
        (0, 6, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 6, 6), (0, 3, 6))),
    ],
)
def test_weights_that_are_no_numbers_are_not_saved(tmp_path, save_every, at, failing_step):
    """They are ruined when the row of a step is written, before its checkpoint;
    without checkpoints the end tells.
    """
    model = build_policy(0)
    config = SMALL.model_copy(update={"save_every": save_every, "log_every": 1})
    last_checkpoint = tmp_path / f"checkpoint-{failing_step - 2}"
    advice = (
        f"The weights in {last_checkpoint} are from before"
        if save_every
        else "No checkpoint was saved before"
    )
    with pytest.raises(
        Diverged, match=f"step {failing_step}: after the update, weight .* of norm nan.*{advice}"
    ):
        sft(model, TOKENIZER, ROWS, config, tmp_path, report=ruined(model, at))
    assert (
        not (tmp_path / "merged").exists()
        and not (tmp_path / f"checkpoint-{failing_step}").exists()
    )
    assert last_checkpoint.exists() == (save_every > 0)


def test_a_model_that_cannot_answer_its_validation_has_diverged(tmp_path):
    model = build_policy(0)
    with pytest.raises(
        Diverged, match="step 2: the policy's logits are NaN.*No checkpoint was saved"
    ):
        scores = HeldOutScores(HOW, TOKENIZER, HELD_OUT, exact_judge, 1024, tmp_path)
        config = SMALL.model_copy(update={"save_every": 0, "eval_every": 2, "log_every": 1})
        sft(model, TOKENIZER, ROWS, config, tmp_path, validation=scores, report=ruined(model, 1))
