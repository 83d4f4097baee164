"""A run that stops, by a fatal reply, by Ctrl-C or because nobody reads on:
what is on its way is waited for and kept.
"""

import asyncio
import signal
import subprocess
import sys
import time

import pytest
from faulty_server import FaultyServer, Late, completion

from memcalib.inference.cache import CallCache
from memcalib.inference.client import Client, run_async, run_many
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.inference.rollout import EndpointBackend, Sampling, generate
from memcalib.io.records import read_jsonl
from memcalib.problem import Rollout, sample_records

REFUSED = (401, {"error": {"message": "no such key"}})
PAGE = (200, "<html>Just a moment</html>", {"Content-Type": "text/html"})
QUESTIONS = [f"question {k}" for k in range(16)]


def client_of(server, cache=None, **fields):
    settings = {
        "model": "m",
        "base_url": server.url,
        "key_env": "",
        "backoff": 0.001,
        "timeout": 30,
    } | fields
    return Client(Endpoint(**settings), cache)


def ask_all(client, questions=QUESTIONS, window=16, **options):
    async def one(text):
        return await client.ask([{"role": "user", "content": text}])

    async def main():
        async with client:
            return {
                text: reply async for text, reply in run_many(questions, one, window, **options)
            }

    return run_async(main())


def test_a_fatal_reply_costs_none_of_the_others(tmp_path):
    with FaultyServer(REFUSED, delay=0.6) as server:
        server.script[0] = Late(REFUSED, 0.1)
        with pytest.raises(CallError, match="no such key"):
            ask_all(client_of(server, tmp_path / "calls.sqlite"))
        assert len(server.requests) == 16
        again = ask_all(client_of(server, tmp_path / "calls.sqlite"))
        assert len(server.requests) == 17 and sum(reply.cached for reply in again.values()) == 15
    assert CallCache(tmp_path / "calls.sqlite").stats()["claims"] == 0


def test_what_was_on_its_way_is_written_to_the_file_of_answers(tmp_path):
    script = [Late(completion(f"answer {k}"), 0.5) for k in range(8)]
    with FaultyServer(*script, Late(REFUSED, 0.1)) as server:
        endpoint = Endpoint(model="m", base_url=server.url, key_env="", concurrency=9)
        with pytest.raises(CallError, match="no such key"):
            generate(
                sample_records(),
                EndpointBackend(endpoint),
                Sampling(seeds=[1]),
                tmp_path / "rollouts.jsonl",
            )
    assert len(list(read_jsonl(tmp_path / "rollouts.jsonl", Rollout))) == 8


def test_what_was_not_sent_stays_unsent(tmp_path):
    """Calls that wait for their turn, and calls between two tries, end with the run."""
    steps = [Late(REFUSED, 0.3), Late(completion(), 0.5), Late(completion(), 0.5), (500, {})]
    with FaultyServer(*steps) as server:
        start = time.monotonic()
        with pytest.raises(CallError, match="no such key"):
            ask_all(client_of(server, tmp_path / "calls.sqlite", concurrency=4, backoff=60))
        assert time.monotonic() - start < 10 and len(server.requests) == 4
    assert CallCache(tmp_path / "calls.sqlite").stats()["replies"] == 2


def test_the_wait_has_an_end():
    with FaultyServer(Late(REFUSED, 0.1), *["hang"] * 15) as server:
        start = time.monotonic()
        with pytest.raises(CallError, match="no such key"):
            ask_all(client_of(server), finish=0.5)
        assert 0.5 < time.monotonic() - start < 10


def test_work_without_a_client_is_waited_for():
    async def work(k):
        if k == 0:
            raise KeyError("first")
        await asyncio.sleep(0.2)
        return k

    async def main(out):
        async for k, _ in run_many(range(5), work, 5):
            out.append(k)

    out = []
    with pytest.raises(KeyError):
        asyncio.run(main(out))
    assert sorted(out) == [1, 2, 3, 4]


def test_a_reader_who_leaves_finds_the_others_in_the_cache(tmp_path):
    async def main(client):
        async def one(text):
            return await client.ask([{"role": "user", "content": text}])

        async with client:
            results = run_many(QUESTIONS, one, 16)
            async for _ in results:
                break
            await results.aclose()

    with FaultyServer(completion(), delay=0.4) as server:
        server.script[0] = Late(completion(), 0.1)
        run_async(main(client_of(server, tmp_path / "calls.sqlite")))
        assert len(server.requests) == 16
    assert CallCache(tmp_path / "calls.sqlite").stats()["replies"] == 16


PROGRAM = """
import sys
from memcalib.inference.client import Client, Endpoint, run_async, run_many

async def main(client):
    async def one(text):
        return await client.ask([{"role": "user", "content": text}])

    async with client:
        print("asking", flush=True)
        async for text, reply in run_many(map(str, range(8)), one, 8):
            print(text, flush=True)

endpoint = Endpoint(model="m", base_url=sys.argv[1], key_env="", timeout=60)
run_async(main(Client(endpoint, sys.argv[2])))
"""


def started(server, cache):
    command = [sys.executable, "-c", PROGRAM, server.url, str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "asking\n"
    while len(server.requests) < 8:
        time.sleep(0.02)
    return process


def test_ctrl_c_waits_for_what_is_paid_for(tmp_path):
    with FaultyServer(delay=1.5) as server:
        process = started(server, tmp_path / "calls.sqlite")
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert len(out.split()) == 8 and "waiting for 8 that are on their way" in error
    assert CallCache(tmp_path / "calls.sqlite").stats()["replies"] == 8


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    with FaultyServer(*["hang"] * 8) as server:
        process = started(server, tmp_path / "calls.sqlite")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


def test_a_page_in_between_good_replies_is_a_passing_fault():
    with FaultyServer(completion(), PAGE) as server:
        client = client_of(server)
        assert len(ask_all(client, window=1)) == 16
        assert len(server.requests) == 17 and client.totals.retries == 1


def test_a_page_at_the_start_is_a_wrong_address():
    with FaultyServer(PAGE) as server, pytest.raises(CallError, match="/v1") as caught:
        ask_all(client_of(server), window=1)
    assert caught.value.kind == "not_found" and len(server.requests) == 1


LOGIN = "<!doctype html><title>Sign in to ACME</title><form>password</form>"
STREAM = 'data: {"object":"chat.completion.chunk","choices":[]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("body", "kind", "named"),
    [
        (LOGIN, "text/html; charset=utf-8", ["a page", "Sign in to ACME"]),
        (STREAM, "text/event-stream", ["a stream of events", "chat.completion.chunk"]),
        (": ping\n\n" + STREAM, "text/event-stream", ["a stream of events"]),
    ],
)
def test_what_came_in_the_place_of_the_first_reply_is_named(body, kind, named):
    reply = (200, body, {"Content-Type": kind})
    with FaultyServer(reply) as server, pytest.raises(CallError) as caught:
        ask_all(client_of(server), window=1)
    message = str(caught.value)
    assert all(words in message for words in named), message
    assert "check the end of the address (usually /v1)" in message
    assert caught.value.fatal and len(server.requests) == 1


@pytest.mark.parametrize("kind", ["text/plain", "text/html", "application/octet-stream"])
def test_a_completion_under_another_content_type_is_read(kind):
    import json

    with FaultyServer((200, json.dumps(completion("fine")), {"Content-Type": kind})) as server:
        assert ask_all(client_of(server), ["hello"])["hello"].text == "fine"


def test_json_that_is_no_completion_is_tried_again_whatever_it_is_called():
    with FaultyServer(
        completion(), (200, '{"status": "warming up"}', {"Content-Type": "text/plain"})
    ) as server:
        assert len(ask_all(client_of(server), window=1)) == 16 and len(server.requests) == 17
