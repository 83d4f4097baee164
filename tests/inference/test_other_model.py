"""A reply under another model's name: recorded in the row, said once."""

import asyncio
import logging

import pytest
from faulty_server import FaultyServer, completion

from memcalib.inference.client import Client, other_model
from memcalib.inference.endpoint import Endpoint
from memcalib.inference.rollout import EndpointBackend, Sampling, generate
from memcalib.io.jsonl import rows_so_far
from memcalib.products.micro.world import WORLDS, make_examples
from memcalib.problem import Rollout


def named(model: str) -> dict:
    """A good reply of this model."""
    body = completion("ok")
    body["model"] = model
    return body


@pytest.mark.parametrize(
    ("requested", "reply", "is_other"),
    [
        ("gpt-4o", "gpt-4o-2024-08-06", False),
        ("gpt-4o", "gpt-4o-mini", True),
        ("gpt-4", "gpt-4o", True),
        ("claude-x-latest", "claude-x-20241022", False),
        ("org/Model-7B", "model-7b", False),
        ("model", "/srv/weights/model/", False),
        ("m", None, False),
        ("m", "", False),
        ("m", 7, False),
        ("large", "small", True),
        ("model-small", "model-small-2407", False),
        ("model-flash", "model-flash-001", False),
        ("judge", "judge:latest", False),
        ("gpt-4", "gpt-4.1-nano", True),
        ("claude-3", "claude-3-5-haiku-20241022", True),
        ("llama-3", "llama-3.2-1b-instruct", True),
        ("Qwen3", "Qwen3-0.6B", True),
        ("mistral", "mistral-7b", True),
        ("deepseek-v3", "deepseek-v3.1", True),
        ("qwen2.5:72b", "qwen2.5:7b", True),
        ("org/m", "other/m", True),
    ],
)
def test_what_is_another_model(requested, reply, is_other):
    assert bool(other_model(requested, reply)) is is_other


def test_another_models_name_is_kept_and_said_once(tmp_path, caplog):
    examples = make_examples(WORLDS["short"], 3, 7, "test")
    out = tmp_path / "rollouts.jsonl"
    with FaultyServer() as server:
        server.script.extend([named("small-one")] * 2 + [named("m")])
        endpoint = Endpoint(model="m", base_url=server.url, key_env="", concurrency=1)
        with caplog.at_level(logging.WARNING):
            generate(examples, EndpointBackend(endpoint), Sampling(seeds=(1,)), out)
    names = [getattr(row, "answered_by", None) for row in rows_so_far(out, Rollout)]
    assert sorted(names, key=str) == [None, "small-one", "small-one"]
    warnings = [record for record in caplog.records if "small-one" in record.getMessage()]
    assert len(warnings) == 1


def test_the_name_stays_with_a_reply_of_the_cache(tmp_path):
    async def ask(endpoint):
        async with Client(endpoint, tmp_path / "c.sqlite") as client:
            return await client.ask([{"role": "user", "content": "hello"}])

    with FaultyServer(named("small-one")) as server:
        endpoint = Endpoint(model="m", base_url=server.url, key_env="")
        first = asyncio.run(ask(endpoint))
        again = asyncio.run(ask(endpoint))
    assert (first.answered_by, again.answered_by, again.cached) == ("small-one", "small-one", True)
