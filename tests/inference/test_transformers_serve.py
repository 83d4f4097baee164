"""A real OpenAI-compatible server of another project, `transformers serve`,
with a tiny model that the test saves.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.inference.local import LocalBackend
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.policy import fit
from memcalib.problem import Rollout, encode_prompt, render
from memcalib.io.records import read_jsonl
from memcalib.inference.rollout import EndpointBackend, Sampling, generate

EXAMPLES = make_examples("short", 6, seed=11, split="test")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = "No plan."
pytestmark = pytest.mark.slow


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate([*alphabet, "<|im_start|>", "<|im_end|>"])}, []
        )
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = dict(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Qwen3 model of a few thousand weights over bytes that learned to give one answer to some of
    the prompts.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    path = tmp_path_factory.mktemp("served") / "tiny-model"
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    answer_ids = [*tokenizer(SAID, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    rows = [
        (encode_prompt(tokenizer, render(example)), answer_ids, "answer")
        for example in EXAMPLES[:2]
    ]
    fit(model, iter([rows] * 100), 100)
    model.generation_config.update(
        do_sample=True, top_k=0
    )  # else this server answers greedily at any temperature
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(folder):
    """The address of a running `transformers serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).parent / "transformers",
        "serve",
        folder,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    with open(folder.parent / "serve.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--device", "cpu"], env=env, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, folder.parent / "serve.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def wait_until_healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"transformers serve did not start:\n{log.read_text()[-3000:]}")


def endpoint(server, folder, **changes):
    return EndpointBackend(
        Endpoint(**(dict(model=str(folder), base_url=server, key_env="", concurrency=2) | changes))
    )


def rows_of(path: Path) -> dict[tuple, Rollout]:
    return {(row.example_id, row.condition): row for row in read_jsonl(path, Rollout)}


def test_generate_end_to_end_and_the_same_from_local_weights(server, folder, tmp_path):
    sampling = Sampling(seeds=(42,), temperature=0.0, max_tokens=40)
    result = generate(
        EXAMPLES, endpoint(server, folder), sampling, tmp_path / "served.jsonl", no_memory=True
    )
    assert (result.new, result.counts["error"]) == (12, 0)
    again = generate(
        EXAMPLES, endpoint(server, folder), sampling, tmp_path / "served.jsonl", no_memory=True
    )
    assert (again.new, again.found_before) == (0, 12)
    local = LocalBackend(folder, device="cpu")
    generate(EXAMPLES, local, sampling, tmp_path / "local.jsonl", no_memory=True)
    served = rows_of(tmp_path / "served.jsonl")
    computed_here = rows_of(tmp_path / "local.jsonl")
    assert served.keys() == computed_here.keys()
    for key, row in served.items():
        assert (
            row.response.strip() == computed_here[key].response.strip()
        )  # the server cuts white space off
        assert row.finish_reason == computed_here[key].finish_reason
        assert row.usage["prompt_tokens"] == computed_here[key].usage["prompt_tokens"]
    assert served[EXAMPLES[0].id, "full_memory"].response == SAID
    assert served[EXAMPLES[0].id, "full_memory"].finish_reason == "stop"


def test_a_cut_answer_is_marked(server, folder, tmp_path):
    sampling = Sampling(seeds=(42,), temperature=0.0, max_tokens=4)
    generate(EXAMPLES[:1], endpoint(server, folder), sampling, tmp_path / "cut.jsonl")
    (row,) = rows_of(tmp_path / "cut.jsonl").values()
    assert (row.response, row.finish_reason) == (SAID[:4], "length")


def test_the_same_seed_gives_the_same_answers(server, folder, tmp_path):
    sampling = Sampling(seeds=(1, 2), max_tokens=20, temperature=2.0)
    one_by_one = {
        "concurrency": 1
    }  # the server has one generator for all, which two requests at once would share
    for name in ("first.jsonl", "second.jsonl"):
        generate(EXAMPLES[2:4], endpoint(server, folder, **one_by_one), sampling, tmp_path / name)

    def read(name):
        return {row.key: row.response for row in read_jsonl(tmp_path / name, Rollout)}

    assert read("first.jsonl") == read("second.jsonl")
    assert len(set(read("first.jsonl").values())) > 1


def test_a_server_that_is_not_there(folder, tmp_path):
    backend = endpoint("http://127.0.0.1:9/v1", folder, backoff=0)
    with pytest.raises(CallError, match="127.0.0.1:9") as caught:
        generate(EXAMPLES, backend, Sampling(), tmp_path / "none.jsonl")
    assert caught.value.kind == "unreachable"
    assert (tmp_path / "none.jsonl").read_text() == ""
