"""The cold start: rows, adapters, and the recipe of the shipped policies."""

import json

import pytest
import torch

from memcalib.microworld import WORLDS, build_policy, build_tokenizer, make_examples
from memcalib.problem import encode_prompt, render
from memcalib.sft import COLD_STARTS, averaged, build_policies, cold_start, tokenize_rows

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, 0, "coldstart")


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_cold_start_rows_and_adapter(tmp_path):
    rows = [
        {
            "prompt": render(e, text="concat", layout="micro"),
            "completion": [{"role": "assistant", "content": "Keep July in mind."}],
        }
        for e in EXAMPLES
    ]
    table = tokenize_rows(TOKENIZER, rows)
    assert table[0]["input_ids"][: table[0]["completion_mask"].index(1)] == encode_prompt(TOKENIZER, rows[0]["prompt"])
    assert table[0]["input_ids"][-1] == TOKENIZER.eos_token_id
    policy = cold_start(build_policy(0), TOKENIZER, rows, out=tmp_path, lora_rank=2, lr=1e-2, epochs=3)
    assert type(policy).__name__ == "Qwen3ForCausalLM" and all(p.requires_grad for p in policy.parameters())
    assert not torch.equal(weights(policy), weights(build_policy(0)))


def test_every_world_has_a_recipe():
    assert {world.policy for world in WORLDS.values()} == set(COLD_STARTS)
    assert all(recipe["world"] in WORLDS for recipe in COLD_STARTS.values())
    with pytest.raises(KeyError, match="nowhere"):
        build_policies("unused", ["nowhere"])


def test_the_recipe_repeats_itself(tmp_path):
    stories = []
    for name in ("a", "b"):
        build_policies(tmp_path / name, ["short"], shorten=0.002)
        stories.append((tmp_path / name / "cold-short" / "policy.json").read_text())
    assert stories[0] == stories[1] and json.loads(stories[0])["base"] == "pretrained"
    first, second = (
        sorted((tmp_path / name / "cold-short").glob("*.safetensors"))[0].read_bytes() for name in ("a", "b")
    )
    assert first == second


def test_averages_leave_out_what_is_missing():
    assert averaged([{"step": 1, "answer": 2.0}]) == []
    assert averaged([{"step": 1}, {"step": 2, "audit": 4.0}], every=2) == [{"step": 2, "audit": 4.0}]
