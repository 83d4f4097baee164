"""A folder of weights that names kernels of a hub: its word is not enough to run them."""

import ast
import io
import json
import pickle
import shutil
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import memcalib
from memcalib.commands.evaluate import Weights, make_backend
from memcalib.commands.train import _load_start
from memcalib.inference.local import LocalBackend, check_no_hub_code
from memcalib.products.dataset.lint import sentence_vectors
from memcalib.products.micro.policy import load_policy, policy_path
from memcalib.trainer.recipe import Start, load_start

NAMES = {
    "a kernel": {"attn_implementation": "kernels-community/flash-attn2"},
    "of anybody": {"_attn_implementation": "somebody/kernel@main:attention"},
    "in pages": {"attn_implementation": "paged|somebody/kernel"},
    "of a part": {"attn_implementation": {"text_config": "somebody/kernel"}},
    "inside a part": {
        "text_config": {"_attn_implementation_internal": 1, "attn_implementation": "a/b"}
    },
    "of experts": {"experts_implementation": "somebody/experts"},
    "flash attention without its package": {"attn_implementation": "flash_attention_2"},
}


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Where a model stands, and what makes transformers believe that `kernels` is installed."""
    fetched = []
    kernels = types.ModuleType("kernels")
    kernels.__spec__ = ModuleSpec("kernels", None)
    kernels.get_kernel = lambda *words, **options: fetched.append(words)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    folder = tmp_path / "weights"
    shutil.copytree(policy_path("cold-short"), folder)
    yield folder
    assert fetched == []


def name_kernel(folder: Path, content: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **content}))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_a_hub_are_refused_before_anything_is_loaded(weights, name):
    name_kernel(weights, NAMES[name])
    for load in (
        lambda: check_no_hub_code(weights),
        lambda: LocalBackend(weights).model,
        lambda: load_start(Start(model=str(weights))),
    ):
        with pytest.raises(ValueError, match="config.json: .*code from a hub") as caught:
            load()
        assert "allowed: eager, sdpa" in str(caught.value)


@pytest.mark.parametrize("attention", ["eager", "sdpa", None])
def test_attention_of_torch_is_loaded(weights, attention):
    name_kernel(weights, {"attn_implementation": attention} if attention else {})
    check_no_hub_code(weights)


def test_flash_attention_of_an_installed_package_is_allowed(weights, monkeypatch):
    name_kernel(weights, {"attn_implementation": "flash_attention_2"})
    monkeypatch.setattr("memcalib.inference.local.find_spec", lambda name: name == "flash_attn")
    check_no_hub_code(weights)


REMOTE = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoModelForCausalLM": "own.Model"}


@pytest.fixture
def folder_with_code(tmp_path) -> Path:
    """A model folder whose code leaves a mark when it runs."""
    folder = tmp_path / "theirs"
    shutil.copytree(policy_path("cold-short"), folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(auto_map=REMOTE, model_type="theirs")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).write_text('yes')\n"
        "from transformers import LlamaConfig as Config, LlamaModel as Model\n"
    )
    return folder


OPENERS = {
    "answers": lambda folder: LocalBackend(folder).model,
    "a training": lambda folder: load_start(Start(model=str(folder))),
    "lint": sentence_vectors,
    "a policy": load_policy,
}


@pytest.mark.parametrize("opener", OPENERS)
def test_code_beside_weights_is_not_run_even_by_a_yes(
    folder_with_code, tmp_path, monkeypatch, opener
):
    """transformers asks on the terminal where nobody said no, and a pipe may say yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises((ValueError, OSError)):
        OPENERS[opener](folder_with_code)
    assert not (tmp_path / "ran").exists()


def test_everything_that_opens_a_model_says_no_to_its_code():
    package = Path(memcalib.__file__).parent
    calls = []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_opening = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_opening or node.func.attr != "from_pretrained":
                continue
            if ast.unparse(node.func.value).startswith("Auto"):
                calls.append((f"{file.name}: {ast.unparse(node)}", node.keywords))
    assert len(calls) > 8
    for call, keywords in calls:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
        assert options.get("trust_remote_code") == "False" or None in options, call


class Marking:
    """What leaves a mark when a pickle with it is opened."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def with_template(folder: Path, text: str) -> None:
    for file in folder.glob("chat_template*"):
        file.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = text
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


HARMFUL = {
    "a pickle": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            pickle.dumps(Marking(folder.parent / "ran"))
        ),
        "model.safetensors: found .*; allowed: a safetensors file",
    ),
    "weights as a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "no file named model.safetensors .*theirs",
    ),
    "a template that raises": (
        lambda folder: with_template(folder, "{{ raise_exception('no') }}"),
        "theirs: found a model that cannot be opened .TemplateError: no.*allowed: .*template",
    ),
    "a template without end": (
        lambda folder: with_template(folder, "{% for i in range(10**12) %}{% endfor %}"),
        "theirs: found a model that cannot be opened .OverflowError",
    ),
    "a template that reaches out": (
        lambda folder: with_template(folder, "{{ ''.__class__.__mro__ }}"),
        "theirs: found a model that cannot be opened .SecurityError",
    ),
}


@pytest.mark.parametrize("harm", HARMFUL)
@pytest.mark.parametrize("role", ["answers", "training"])
def test_a_harmful_model_folder_is_refused_by_its_name(tmp_path, harm, role):
    folder = tmp_path / "theirs"
    shutil.copytree(policy_path("cold-short"), folder)
    do_harm, said = HARMFUL[harm]
    do_harm(folder)
    with pytest.raises((ValueError, OSError), match=said):
        if role == "answers":
            make_backend(Weights(path=str(folder))).model  # noqa: B018 (which loads it)
        else:
            _load_start(Start(model=str(folder)), False)
    assert not (tmp_path / "ran").exists()
