"""The practice server over loopback: faults as named on the wire,
errors as real servers send them, a true log.
"""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import aiohttp
import pytest

from memcalib.evaluation.run import evaluate
from memcalib.inference.endpoint import Endpoint
from memcalib.io.records import read_jsonl
from memcalib.products.micro.practice.server import CONTENT, TRANSPORT, Faults
from memcalib.products.micro.practice.models import (
    memoryless_answer,
    micro_answer,
    practice_answer,
    without_padding,
)
from memcalib.products.micro.practice.server import MicroServer, serve
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.problem import Rollout, load_examples, render, sample_records
from test_models import payload_for

EXAMPLES = make_examples("long", 40, 0, "test")
EXAMPLE = EXAMPLES[0]
GONE = {
    "drop": aiohttp.ServerDisconnectedError,
    "cut": aiohttp.ClientPayloadError,
    "hang": TimeoutError,
}


def ask_model(example=EXAMPLE, **options):
    return {"model": "micro-model", "messages": render(example), "seed": 42} | options


def ask_judge(
    example=EXAMPLE, response="Hope this helps.", turns=(), model="micro-judge", **options
):
    first = {"role": "user", "content": json.dumps(payload_for(example, response, **options))}
    return {"model": model, "messages": [{"role": "system", "content": "Judge."}, first, *turns]}


def talk(server, *bodies, key="none", timeout=10.0, together=False):
    """Send bodies in turn (or together): (status, headers, JSON) of each,
    or the exception that came instead.
    """

    async def one(session, body):
        try:
            async with session.post(f"{server.base_url}/chat/completions", data=body) as reply:
                return reply.status, reply.headers, await reply.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            return error

    async def all_of_them():
        options = {
            "timeout": aiohttp.ClientTimeout(timeout),
            "headers": {"Authorization": f"Bearer {key}"},
        }
        async with aiohttp.ClientSession(**options) as session:
            data = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
            if together:
                return await asyncio.gather(*(one(session, body) for body in data))
            return [await one(session, body) for body in data]

    return asyncio.run(all_of_them())


def content(reply):
    return reply[2]["choices"][0]["message"]["content"]


def outcome(reply):
    if isinstance(reply, Exception):
        return type(reply).__name__
    return reply[0], reply[2].get("choices"), reply[1].get("Retry-After")


@pytest.mark.parametrize("name", TRANSPORT)
def test_transport_fault_shows_on_the_wire_and_then_passes(name):
    faults = Faults(**{name: 1.0}, retry_after=7, hang_seconds=60)
    with MicroServer(EXAMPLES, faults=faults) as server:
        first, second = talk(server, ask_model(), ask_model(), timeout=0.5)
        stats = server.stats()
    if name in GONE:
        assert type(first) is GONE[name]
    else:
        assert first[0] == (500 if name == "server_error" else 429)
        assert first[1].get("Retry-After") == ("7" if name == "too_many_wait" else None)
        assert first[2]["error"]["message"]
    assert second[0] == 200 and content(second) == micro_answer(EXAMPLE, seed=42)
    assert stats["faults"] == {name: 1}
    assert (stats["requests"], stats["keys"], stats["answered"], stats["asked_again"]) == (
        2,
        1,
        1,
        [],
    )


def test_tries_says_how_many_tries_may_fail():
    with MicroServer(EXAMPLES, faults=Faults(server_error=1, tries=3)) as server:
        assert [reply[0] for reply in talk(server, *[ask_model()] * 4)] == [500, 500, 500, 200]


@pytest.mark.parametrize("name", CONTENT)
def test_content_fault_of_the_judge_falls_once_and_never_on_a_repair(name):
    repair = [
        {"role": "assistant", "content": "{}"},
        {"role": "user", "content": "Two ids are missing."},
    ]
    with MicroServer(EXAMPLES, faults=Faults(**{name: 1.0})) as server:
        spoiled, again, repaired = talk(server, ask_judge(), ask_judge(), ask_judge(turns=repair))
        stats = server.stats()
    assert stats["faults"] == {name: 1} and stats["answered"] == 2 and stats["asked_again"] == []
    assert content(again) == content(repaired) != content(spoiled)
    finish = spoiled[2]["choices"][0]["finish_reason"]
    assert finish == ("length" if name == "length" else "stop")
    if name in ("truncated_json", "fences", "empty", "length"):
        with pytest.raises(ValueError):
            json.loads(content(spoiled))
        return
    good, bad = (json.loads(content(reply))["atom_judgments"] for reply in (again, spoiled))
    wrong = {
        "wrong_id": lambda: [row["atom_id"] for row in bad][-1] == good[-1]["atom_id"] + "_x",
        "repeated_id": lambda: bad == [*good, good[0]],
        "missing_id": lambda: bad == good[:-1],
        "altered_ideal": lambda: (
            [a["u_star"] != b["u_star"] for a, b in zip(bad, good, strict=True)].count(True) == 1
        ),
    }
    assert wrong[name]()


@pytest.mark.parametrize("name", CONTENT)
def test_content_fault_of_the_model(name):
    with MicroServer(EXAMPLES, faults=Faults(**{name: 1.0})) as server:
        first, second = talk(server, ask_model(), ask_model())
    clean = micro_answer(EXAMPLE, seed=42)
    expected = {"empty": ("", "stop"), "length": (clean[: len(clean) // 2], "length")}.get(
        name, (clean, "stop")
    )
    assert (content(first), first[2]["choices"][0]["finish_reason"]) == expected
    assert content(second) == clean


def test_a_blind_judgment_has_no_ideal_level_to_alter():
    with MicroServer(EXAMPLES, faults=Faults(altered_ideal=1.0)) as server:
        (reply,) = talk(server, ask_judge(blind=True))
        assert server.stats()["faults"] == {} and server.stats()["answered"] == 1
    rows = json.loads(content(reply))["atom_judgments"]
    exact = {a.atom_id: a.actual.wire for a in exact_judge(EXAMPLE, "Hope this helps.").atoms}
    assert {row["atom_id"]: row["predicted_usage_level"] for row in rows} == exact
    assert not any("u_star" in row for row in rows)


def test_everything_repeats_after_a_restart_in_any_order():
    faults = Faults.each(0.12, tries=2, hang=0, retry_after=3)
    bodies = [json.dumps(ask_model(e, seed=s)) for e in EXAMPLES[:15] for s in (42, 43)]
    bodies += [
        json.dumps(ask_judge(e, micro_answer(e, seed=s))) for e in EXAMPLES[:15] for s in (42, 43)
    ]

    def story(order):
        replies = {body: [] for body in bodies}
        with MicroServer(EXAMPLES, faults=faults) as server:
            for _ in range(4):
                for body, reply in zip(order, talk(server, *order, together=True), strict=True):
                    replies[body].append(outcome(reply))
            return replies, server.stats()["faults"]

    shuffled = random.Random(0).sample(bodies, len(bodies))
    (first, fault_counts) = story(bodies)
    (again, given_again) = story(shuffled)
    assert first == again and fault_counts == given_again
    assert set(fault_counts) >= set(TRANSPORT) - {"hang"} and set(fault_counts) & set(CONTENT)
    assert all(replies[-1][0] == 200 for replies in first.values())


def test_large_answers_are_the_same_answers_with_padding():
    faults = Faults(large=2, large_characters=1_000_000)
    with MicroServer(EXAMPLES, faults=faults) as server:
        replies = talk(server, *(ask_model(e, seed=s) for e in EXAMPLES for s in (42, 43)))
        judged = [
            talk(server, ask_judge(EXAMPLES[i // 2], content(r)))[0]
            for i, r in enumerate(replies)
            if i % 7 == 0
        ]
        assert server.stats()["large"] == 2
    assert sorted(len(content(reply)) for reply in replies)[-3:][1:] == [1_000_000] * 2
    clean = [micro_answer(e, seed=s) for e in EXAMPLES for s in (42, 43)]
    assert [without_padding(content(reply)) for reply in replies] == clean
    assert all(reply[0] == 200 for reply in judged)


def test_ten_million_characters_there_and_back():
    with MicroServer(EXAMPLES, faults=Faults(large=len(EXAMPLES))) as server:
        (answered,) = talk(server, ask_model(), timeout=30)
        (judged,) = talk(server, ask_judge(response=content(answered)), timeout=30)
    assert len(content(answered)) == 10_000_000
    rows = json.loads(content(judged))["atom_judgments"]
    exact = {
        a.atom_id: a.actual.wire for a in exact_judge(EXAMPLE, micro_answer(EXAMPLE, seed=42)).atoms
    }
    assert {row["atom_id"]: row["predicted_usage_level"] for row in rows} == exact


def test_no_memory_and_unknown_questions_get_an_answer():
    plain = [{"role": "user", "content": EXAMPLE.question}]
    unknown = [{"role": "user", "content": "How tall is the tower?"}]
    with MicroServer(EXAMPLES) as server:
        bare, generic = talk(server, ask_model(messages=plain), ask_model(messages=unknown))
        assert server.stats()["unknown"] == 1
    assert content(bare) == memoryless_answer(EXAMPLE)
    assert content(generic) == memoryless_answer(None)


def test_examples_of_any_kind_are_evaluated_beside_those_of_the_micro_world(tmp_path):
    examples = [*sample_records(), *EXAMPLES[:3]]
    with MicroServer(examples) as server:
        connection = {"base_url": server.base_url, "key_env": ""}
        options = {
            "judge": Endpoint(model="micro-judge", **connection),
            "sampling": {"seeds": [42]},
            "out": tmp_path,
        }
        judgments = evaluate(examples, model=Endpoint(model="micro-model", **connection), **options)
        assert server.stats()["unknown"] == len(sample_records())
    assert len(judgments) == len(examples) and all(judgment.scored for judgment in judgments)
    assert all(atom.grounded for judgment in judgments for atom in judgment.atoms if atom.actual)
    answers = {
        row.example_id: row.response for row in read_jsonl(tmp_path / "rollouts.jsonl", Rollout)
    }
    assert [answers[e.id] for e in EXAMPLES[:3]] == [micro_answer(e, seed=42) for e in EXAMPLES[:3]]
    assert all(
        answers[e.id] == practice_answer(render(e)[-1]["content"], seed=42)
        for e in sample_records()
    )


def test_a_template_that_weighs_memory_moves_levels():
    def prompted(word):
        return [{"role": "developer", "content": f"The memory is {word}."}, render(EXAMPLE)[-1]]

    with MicroServer(EXAMPLES) as server:
        words = ("background", "useful", "authoritative")
        replies = talk(server, *(ask_model(messages=prompted(word)) for word in words))
    assert [content(r) for r in replies] == [
        micro_answer(EXAMPLE, seed=42, shift=s) for s in (-1, 0, 1)
    ]


@pytest.mark.parametrize(
    "options, body, status, code, named",
    [
        ({}, "{not json", 400, None, "not JSON"),
        ({}, "[]", 400, None, "not a JSON object"),
        ({}, ask_model(model="gpt-9"), 404, "model_not_found", "'gpt-9'.*micro-model"),
        ({}, {"model": "micro-model"}, 400, None, "messages: found None"),
        ({}, ask_model(n=3), 400, None, "n: found 3"),
        ({}, ask_model(stream=True), 400, None, "stream"),
        ({"key": "right"}, ask_model(), 401, "invalid_api_key", "key"),
        ({"context": 20}, ask_model(), 400, "context_length_exceeded", "20 tokens"),
        (
            {"json_schema": False},
            ask_model(response_format={"type": "json_schema"}),
            400,
            None,
            "response_format",
        ),
        (
            {},
            ask_judge(model="micro-judge") | {"messages": [{"role": "user", "content": "hi"}]},
            400,
            None,
            "Judge",
        ),
        (
            {},
            ask_judge(make_examples("long", 1, 77, "test")[0]),
            400,
            None,
            "no example here has the query",
        ),
    ],
)
def test_refusals_have_openai_shape_and_say_why(options, body, status, code, named):
    with MicroServer(EXAMPLES, **options) as server:
        (reply,) = talk(server, body)
        assert (
            server.stats()["refused"] == {f"status {status}": 1}
            and server.stats()["successes"] == 0
        )
    assert reply[0] == status
    assert reply[2]["error"].keys() == {"message", "type", "param", "code"}
    assert reply[2]["error"]["code"] == code
    assert re.search(named, reply[2]["error"]["message"])
    assert "right" not in json.dumps(reply[2])


def test_answers_stop_at_max_tokens():
    with MicroServer(EXAMPLES) as server:
        for name in ("max_tokens", "max_completion_tokens"):
            (reply,) = talk(server, ask_model(**{name: 5}))
            assert content(reply) == micro_answer(EXAMPLE, seed=42)[:20]
            assert reply[2]["choices"][0]["finish_reason"] == "length"
            assert reply[2]["usage"]["completion_tokens"] == 5
        assert server.stats()["answered"] == 0


def test_temperature_zero_ignores_the_seed():
    with MicroServer(EXAMPLES) as server:
        replies = talk(server, *(ask_model(seed=s, temperature=t) for s in (1, 2) for t in (0, 1)))
    cold_1, warm_1, cold_2, warm_2 = map(content, replies)
    assert cold_1 == cold_2 and warm_1 != warm_2


def test_requests_per_minute_is_a_sliding_window():
    with MicroServer(EXAMPLES, rpm=3) as server:
        replies = talk(server, *(ask_model(seed=s) for s in range(5)))
        stats = server.stats()
    assert [reply[0] for reply in replies] == [200, 200, 200, 429, 429]
    assert 50 < float(replies[3][1]["Retry-After"]) <= 60
    assert (stats["limited"], stats["requests"]) == (2, 3)


def test_at_once_counts_what_is_in_flight_and_forgets_who_left():
    with MicroServer(EXAMPLES, faults=Faults(hang=1), at_once=2) as server:
        replies = talk(server, *(ask_model(seed=s) for s in range(5)), together=True, timeout=0.5)
        assert sorted(str(outcome(r))[:5] for r in replies) == ["(429,"] * 3 + ["Timeo"] * 2
        later = talk(server, *(ask_model(seed=s) for s in range(5)), timeout=0.5)
        assert server.stats()["max_at_once"] == 2
    assert sum(not isinstance(r, Exception) and r[0] == 200 for r in later) == 2
    assert not any(not isinstance(r, Exception) and r[0] == 429 for r in later)


def test_the_log_names_what_came_again():
    with MicroServer(EXAMPLES) as server:
        talk(server, ask_model(), ask_model(seed=1), ask_model())
        stats = server.stats()
        assert sorted(server.successes().values()) == [1, 2]
        with urllib.request.urlopen(server.base_url.replace("/v1", "/stats")) as reply:
            assert json.load(reply) == stats
    (again,) = stats["asked_again"]
    assert again["label"] == f"micro-model {EXAMPLE.id} seed 42"
    assert again["clean"][0] <= again["again"][0] <= again["clean"][1]
    assert (stats["requests"], stats["keys"], stats["successes"], stats["answered_twice"]) == (
        3,
        2,
        3,
        1,
    )


def test_a_client_that_left_was_not_answered():
    with MicroServer(EXAMPLES, latency=30) as server:
        (reply,) = talk(server, ask_model(), timeout=0.3)
        assert isinstance(reply, TimeoutError)
        assert server.stats()["answered"] == 0 and server.stats()["requests"] == 1


def test_clients_that_hang_up_are_not_answered_and_not_complained_about(caplog):
    def head(body):
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()

    with MicroServer(EXAMPLES) as server:
        for seed in range(30):
            body = json.dumps(ask_model(seed=seed)).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(head(body) + body)
        (last,) = talk(server, ask_model(seed=-1))
        stats = server.stats()
    assert last[0] == 200 and stats["requests"] > 1
    assert stats["answered"] < stats["requests"] / 2
    assert [
        record.getMessage()
        for record in caplog.records
        if record.levelname in ("ERROR", "CRITICAL")
    ] == []


def test_the_openai_client_understands_it():
    import openai

    with MicroServer(EXAMPLES, key="right") as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="right", max_retries=0)
        parts = [
            {"type": "text", "text": piece}
            for piece in render(EXAMPLE)[-1]["content"].partition("Query")
        ]
        reply = client.chat.completions.create(
            model="micro-model",
            messages=[{"role": "user", "content": parts}],
            seed=42,
            max_completion_tokens=8192,
            top_p=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert reply.choices[0].message.content == micro_answer(EXAMPLE, seed=42)
        assert (
            reply.usage.total_tokens
            == reply.usage.prompt_tokens + reply.usage.completion_tokens
            > 0
        )
        assert "micro-judge" in [model.id for model in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "x"}]
            )
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_stop_frees_the_port_and_a_taken_port_is_an_error():
    with MicroServer(EXAMPLES) as server:
        with pytest.raises(OSError):
            MicroServer(EXAMPLES, port=server.port).start()
        port = server.port
    server.stop()
    with MicroServer(EXAMPLES, port=port) as again:
        assert again.base_url == f"http://127.0.0.1:{port}/v1"


def test_stop_does_not_wait_for_what_hangs():
    with MicroServer(EXAMPLES, faults=Faults(hang=1)) as server:
        talk(server, ask_model(), timeout=0.2)
    assert not server._thread.is_alive()


def test_nothing_is_logged_about_faults(caplog):
    with MicroServer(EXAMPLES, faults=Faults.each(0.12, tries=2, hang_seconds=60)) as server:
        bodies = [ask_model(seed=s) for s in range(40)]
        talk(server, *bodies, together=True, timeout=5.0)
        assert len(server.stats()["faults"]) >= 5
    assert [
        record.getMessage()
        for record in caplog.records
        if record.levelname in ("ERROR", "CRITICAL")
    ] == []


def test_serve_in_the_foreground_until_interrupted(tmp_path):
    path = tmp_path / "examples.jsonl"
    code = (
        "from memcalib.products.micro.practice.server import serve; "
        f"print(serve('short', {str(path)!r}, 7, port=0)['requests'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        first = process.stdout.readline()
        assert first.startswith("7 examples at http://127.0.0.1:")
        url = first.split()[3]
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[1] == "Try these commands in a second terminal:\n"
        assert url in lines[2]
        with urllib.request.urlopen(f"{url}/models") as reply:
            assert reply.status == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0].split()[-1] == "0"
        assert process.returncode == 0
    finally:
        process.kill()
    assert load_examples(path) == make_examples("short", 7, 0, "test")


def test_serve_needs_the_key_that_it_reads(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(KeyError, match="NO_SUCH_KEY"):
        serve("short", count=1, port=0, key_env="NO_SUCH_KEY")


@pytest.mark.parametrize("rate", [-0.1, 0.13, 1.0])
def test_serve_refuses_a_rate_that_cannot_be_before_it_writes_anything(rate, tmp_path):
    with pytest.raises(ValueError, match=f"found {rate:g}; allowed: 0 to 0.125"):
        serve("short", tmp_path / "examples.jsonl", 1, port=0, faults=rate)
    assert not (tmp_path / "examples.jsonl").exists()
