"""A folder of weights that names kernels of a hub: its word is not enough to run them."""

import json
import shutil
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from memcalib.inference.local import LocalBackend, check_no_hub_code
from memcalib.products.micro.policy import policy_path
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
