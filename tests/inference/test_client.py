"""The client against a server that misbehaves: every fault, every limit, and no key anywhere."""

import asyncio
import email.utils
import gzip
import json
import math
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import urllib.request
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from faulty_server import FaultyServer, completion
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from memcalib.inference.cache import CacheError, CallCache
from memcalib.inference.endpoint import (
    CallError,
    Endpoint,
    Price,
    error_kind,
    estimate_tokens,
    forecast_row,
    retry_after,
)
from memcalib.io.keys import hide_key, hide_secrets
from memcalib.io.records import one_line
from memcalib.inference.client import Client, Totals, Pacer, run_async, run_many
from memcalib.io.records import printable

SECRET = "sk-test/a very+unlikely".replace(" ", "-") + "-value-0123456789"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("DEMO_KEY", SECRET)


def endpoint(server, **fields):
    return Endpoint(
        **(
            {
                "model": "m",
                "base_url": server.url,
                "key_env": "DEMO_KEY",
                "backoff": 0.001,
                "timeout": 5,
            }
            | fields
        )
    )


def ask(client, messages=HELLO, **call):
    async def main():
        async with client:
            return await client.ask(messages, **call)

    return run_async(main())


def ask_all(client, texts, concurrency=16, **call):
    async def one(text):
        return await client.ask([{"role": "user", "content": text}], **call)

    async def main():
        async with client:
            return {text: reply async for text, reply in run_many(texts, one, concurrency)}

    return run_async(main())


# What comes back ----------------------------------------------------------------------------------


def test_a_reply_with_its_usage():
    body = completion("Hé 😀", "length", (1000, 10))
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": 600}
    with FaultyServer(body) as server:
        client = Client(endpoint(server, price=Price(prompt=1, completion=10, cached=0.5)))
        reply = ask(client, temperature=0.5, seed=7, max_tokens=None)
    assert (reply.text, reply.finish_reason, reply.attempts, reply.cached) == (
        "Hé 😀",
        "length",
        1,
        False,
    )
    assert reply.usage.pop("seconds") > 0
    assert reply.usage == {
        "prompt_tokens": 1000,
        "completion_tokens": 10,
        "cached_tokens": 600,
        "cost": pytest.approx((400 + 300 + 100) / 1e6),
    }
    sent = server.requests[0]
    assert (
        sent["messages"] == HELLO
        and sent["model"] == "m"
        and sent["seed"] == 7
        and "max_tokens" not in sent
    )
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert client.totals.cost == reply.usage["cost"] and client.totals.prompt_tokens == 1000


def test_missing_numbers_stay_missing():
    with FaultyServer(completion(usage=None)) as server:
        client = Client(endpoint(server, price=Price(prompt=1, completion=1)))
        reply = ask(client)
    assert (
        reply.usage.keys() == {"seconds"}
        and client.totals.cost is None
        and client.totals.unmetered == 1
    )


def test_no_content_is_an_empty_text():
    with FaultyServer(completion(None, "content_filter")) as server:
        reply = ask(Client(endpoint(server)))
    assert (reply.text, reply.finish_reason) == ("", "content_filter")


def test_lone_surrogates_go_neither_in_nor_out(tmp_path):
    with FaultyServer(json.dumps(completion("half \ud83d"))) as server:
        client = Client(endpoint(server), tmp_path / "calls.sqlite")
        reply = ask(client, [{"role": "user", "content": "also \udc00 half"}])
    assert reply.text == "half ?" and server.requests[0]["messages"][0]["content"] == "also ? half"


def test_ten_megabytes(tmp_path):
    with FaultyServer(completion("x" * 10**7)) as server:
        client = Client(endpoint(server, timeout=60), tmp_path / "calls.sqlite")
        assert len(ask(client).text) == len(ask(client).text) == 10**7
    assert len(server.requests) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_reply_over_the_size_limit_is_a_fault_of_the_server(packed, monkeypatch):
    monkeypatch.setattr("memcalib.inference.client.LARGEST_REPLY", 100_000)
    text = json.dumps(completion("x" * 300_000))
    step = (200, gzip.compress(text.encode()), {"Content-Encoding": "gzip"}) if packed else text
    with (
        FaultyServer(step) as server,
        pytest.raises(CallError, match=r"a reply of \d{3},\d{3} bytes") as caught,
    ):
        ask(Client(endpoint(server, attempts=1)))
    assert (
        caught.value.kind == "server"
        and not caught.value.fatal
        and "allowed: at most 100,000" in str(caught.value)
    )
    with FaultyServer(
        (
            200,
            gzip.compress(json.dumps(completion("y" * 90_000)).encode()),
            {"Content-Encoding": "gzip"},
        )
    ) as server:
        assert ask(Client(endpoint(server))).text == "y" * 90_000


totals = st.builds(
    Totals,
    *[st.integers(0, 9)] * 7,
    st.integers(0, 9).map(float),
    st.none() | st.integers(0, 9).map(float),
)


@given(st.lists(totals, max_size=4))
def test_totals_add_up(parts):
    total = sum(parts, Totals())
    assert total.calls == sum(summand.calls for summand in parts)
    costs = [summand.cost for summand in parts]
    assert total.cost == (None if None in costs else sum(costs))
    assert Totals(**total.to_dict()) == total


# Faults -------------------------------------------------------------------------------------------

PASSING = {
    "429": (429, {"error": {"message": "slow down"}}),
    "408": (408, {}),
    "409": (409, {}),
    "500": (500, "oh no", {"Content-Type": "text/plain"}),
    "503": (503, {}),
    "529": (529, {}),
    "drop": "drop",
    "invalid JSON": '{"choices": [{"index": 0, "mess',
    "empty body": "",
    "JSON null": "null",
    "a list": "[]",
    "no choices": {"id": "x", "choices": []},
    "choices of another kind": {"choices": "none"},
    "a choice without message": {"choices": [{}]},
    "an error with status 200": {"error": {"message": "provider returned error", "code": 429}},
}


@pytest.mark.parametrize("name", PASSING)
def test_passing_faults_are_tried_again(name):
    with FaultyServer(PASSING[name], PASSING[name]) as server:
        client = Client(endpoint(server))
        reply = ask(client)
    assert reply.text == "ok" and reply.attempts == 3 and len(server.requests) == 3
    assert (client.totals.calls, client.totals.retries, client.totals.failures) == (1, 2, 0)


def test_a_hanging_server_is_left_after_the_timeout():
    with FaultyServer("hang") as server:
        reply = ask(Client(endpoint(server, timeout=0.2)))
    assert reply.attempts == 2 and len(server.requests) == 2


def test_a_server_that_drips_is_left_as_well():
    """A body that comes byte by byte never trips a timeout between two bytes."""

    async def drip(reader, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
        )
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.02)

    async def main():
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        client = Client(Endpoint(model="m", base_url=url, key_env="", timeout=0.2, attempts=1))
        try:
            async with client:
                await client.ask(HELLO)
        finally:
            server.close()

    with pytest.raises(CallError, match=r"no answer within 0\.2 s") as caught:
        run_async(main())
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (401, "bad key", "auth"),
        (402, "Insufficient Balance", "auth"),
        (403, "not yours", "auth"),
        (403, "Your input was flagged", "bad_request"),
        (429, "insufficient_quota", "auth"),
        (404, "The model `m` does not exist.", "not_found"),
        (400, "Model Not Exist", "not_found"),
        (400, "m is not a valid model ID", "not_found"),
        (
            400,
            "This model's maximum context length is 4096 tokens. However, you requested 9000",
            "context_too_long",
        ),
        (413, "", "context_too_long"),
        (422, "temperature: Input should be less than 2", "bad_request"),
        (400, "seed: no", "bad_request"),
    ],
)
def test_lasting_faults_are_tried_once(status, message, kind):
    with FaultyServer((status, {"error": {"message": message}})) as server:
        client = Client(endpoint(server))
        with pytest.raises(CallError) as caught:
            ask(client)
    error = caught.value
    assert (error.kind, error.status, len(server.requests)) == (kind, status, 1)
    assert error.fatal == (kind in ("auth", "not_found"))
    assert message in str(error) and server.url in str(error)
    assert client.totals.failures == 1 and client.totals.calls == 0


def test_words_in_another_shape_are_shown():
    refusal = (
        422,
        {"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]},
    )
    with (
        FaultyServer(refusal) as server,
        pytest.raises(CallError, match="seed.*Extra inputs are not permitted"),
    ):
        ask(Client(endpoint(server)))


def test_a_call_gives_up_after_its_attempts():
    with FaultyServer(*[(500, {"error": {"message": f"try {k}"}}) for k in range(5)]) as server:
        client = Client(endpoint(server, attempts=3))
        with pytest.raises(CallError, match="try 2") as caught:
            ask(client)
    assert caught.value.kind == "server" and not caught.value.fatal
    assert len(server.requests) == 3 and (client.totals.retries, client.totals.failures) == (2, 1)


def test_a_page_in_place_of_an_answer_is_a_wrong_address():
    page = (200, "<html>Welcome</html>", {"Content-Type": "text/html"})
    with FaultyServer(page) as server, pytest.raises(CallError, match="/v1") as caught:
        ask(Client(endpoint(server)))
    assert caught.value.fatal and len(server.requests) == 1


def test_a_wrong_path_is_a_wrong_address():
    with FaultyServer() as server, pytest.raises(CallError, match="404.*/v1") as caught:
        ask(Client(endpoint(server, base_url=server.url.removesuffix("/v1"))))
    assert caught.value.kind == "not_found" and caught.value.fatal


def test_nobody_there():
    with FaultyServer() as server:
        url = server.url
    client = Client(Endpoint(model="m", base_url=url, key_env="", backoff=0.001))
    with pytest.raises(CallError, match="no connection to .*the server is running") as caught:
        ask(client)
    assert caught.value.kind == "unreachable" and caught.value.fatal
    # what the system says: by aiohttp under openai 3, by httpx under openai 2
    assert re.search("Connect call failed|All connection attempts failed", str(caught.value))
    assert client.totals.retries == 2 < client.endpoint.attempts - 1, (
        "not as often as a server that was there before"
    )


def test_a_server_that_was_there_and_went_away_is_not_fatal():
    async def main(server, client):
        async with client:
            await client.ask(HELLO)
            server.__exit__()
            await client.ask(HELLO)

    server = FaultyServer().__enter__()
    client = Client(endpoint(server, attempts=4))
    with pytest.raises(CallError) as caught:
        run_async(main(server, client))
    assert (
        caught.value.kind == "unreachable" and not caught.value.fatal and client.totals.retries == 3
    )


# Waiting ------------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """The seconds, from a tenth on, that somebody would have waited; nobody does."""
    long_waits = []
    sleep = asyncio.sleep

    async def pass_over(seconds, result=None):
        long_waits.extend([seconds] if seconds > 0.1 else [])
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", pass_over)
    return long_waits


@pytest.fixture
def frozen(monkeypatch):
    """The client's clock stands still."""
    monkeypatch.setattr(
        "memcalib.inference.client.time", SimpleNamespace(monotonic=lambda: 1_000.0)
    )


def test_retry_after_in_seconds_and_milliseconds(waits):
    slow = (429, {}, {"Retry-After": "25"})
    fast = (429, {}, {"retry-after-ms": "1500"})
    with FaultyServer(slow, fast) as server:
        assert ask(Client(endpoint(server))).attempts == 3
    assert waits == [25, 1.5]


def test_retry_after_as_a_date(waits):
    when = email.utils.formatdate(time.time() + 50, usegmt=True)  # whole seconds: 49 to 50 from now
    with FaultyServer((503, {}, {"Retry-After": when})) as server:
        assert ask(Client(endpoint(server))).attempts == 2
    assert len(waits) == 1 and 30 < waits[0] <= 50


def test_a_wait_of_hours_is_an_error_now():
    with (
        FaultyServer((429, {}, {"Retry-After": "7200"})) as server,
        pytest.raises(CallError) as caught,
    ):
        ask(Client(endpoint(server)))
    assert caught.value.kind == "rate_limited" and caught.value.wait == 7200


@pytest.mark.parametrize("retry_after, tries", [(600, 2), (601, 1)])
def test_ten_minutes_are_waited_for_and_not_a_second_more(waits, retry_after, tries):
    with FaultyServer((429, {}, {"Retry-After": str(retry_after)})) as server:
        client = Client(endpoint(server))
        with nullcontext() if tries == 2 else pytest.raises(CallError, match="429"):
            ask(client)
    assert len(server.requests) == tries and waits == [600] * (tries - 1)


def test_random_waits_grow_to_a_minute_at_most(waits):
    with FaultyServer(*[(500, {})] * 29) as server:
        assert ask(Client(endpoint(server, attempts=30, backoff=1000))).attempts == 30
    assert max(waits) <= 60 and sum(waits) > 10 * 60


@pytest.mark.parametrize(
    "value", ["", "soon", "nan", "-5", "Mon, 01 Jan 1990 00:00:00 GMT", "9" * 400, "inf", "\x00"]
)
def test_odd_retry_after(value):
    wait = retry_after({"retry-after": value})
    assert wait is None or wait >= 0


@given(st.floats(1, 10_000), st.lists(st.floats(0, 0.3), min_size=1, max_size=300))
def test_paced_calls_keep_every_window(rpm, gaps):
    """Asked at any moments: no minute holds more than the limit and the first call,
    however late the calls come.
    """
    pacer = Pacer(rpm)
    now = 1000.0
    sent = []
    for gap in gaps:
        now += gap
        sent.append(now + pacer.book(1, now))
    assert sent == sorted(sent)
    for k, first in enumerate(sent):
        inside = sum(first <= other < first + 60 for other in sent[k:])
        assert inside <= math.ceil(rpm)


def test_a_limit_is_used():
    pacer = Pacer(600)
    last = max(pacer.book(1, 0.0) for _ in range(6000))
    assert 0.97 <= 6000 / 600 * 60 / last <= 1


def test_token_bookings_are_corrected():
    pacer = Pacer(6000, used=1.0)
    assert pacer.book(100, 10.0) == 0
    pacer.correct(500)  # it was 600 after all: six seconds' worth
    assert pacer.book(1, 10.0) == pytest.approx(6.0)


def test_a_pause_is_not_saved_up_for_a_burst():
    pacer = Pacer(600, used=1.0)
    assert [pacer.book(1, 10.0), pacer.book(1, 99.0)] == [0, 0]
    assert [pacer.book(1, 99.0) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert [pacer.book(1, 99.8) for _ in range(6)] == pytest.approx(
        [0, 0, 0, 0, 0, 0.1]
    )  # 0.4 s late: caught up


def test_calls_at_once_are_limited():
    with FaultyServer(delay=0.02) as server:
        replies = ask_all(
            Client(endpoint(server, concurrency=5)), [str(k) for k in range(40)], concurrency=40
        )
    assert len(replies) == 40 and server.most == 5


def test_requests_are_spread_out(waits, frozen):
    with FaultyServer() as server:
        ask_all(
            Client(endpoint(server, rpm=1200, concurrency=64)),
            [str(k) for k in range(40)],
            concurrency=64,
        )
    assert len(server.requests) == 40 and sorted(waits) == pytest.approx(
        [k * 60 / 1200 / 0.98 for k in range(2, 40)]
    )


def test_tokens_are_spread_out(waits, frozen):
    with FaultyServer(*[completion(usage=(900, 100)) for _ in range(4)]) as server:
        client = Client(endpoint(server, tpm=120_000))
        for k in range(4):
            ask(client, [{"role": "user", "content": str(k)}])
    assert waits == pytest.approx([k * 1000 * 60 / 120_000 / 0.98 for k in (1, 2, 3)]), (
        "at 2,000 tokens a second"
    )


# Habits of servers --------------------------------------------------------------------------------

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
NO_SCHEMA = (400, {"error": {"message": "This response_format type is unavailable now"}})


def test_a_refused_schema_is_left_out_from_then_on(tmp_path):
    with FaultyServer(NO_SCHEMA) as server:
        client = Client(endpoint(server), tmp_path / "calls.sqlite")
        ask(client, response_format=SCHEMA)
        ask(client, [{"role": "user", "content": "2"}], response_format=SCHEMA)
        again = ask(Client(endpoint(server), tmp_path / "calls.sqlite"), response_format=SCHEMA)
    assert ["response_format" in request for request in server.requests] == [True, False, False]
    assert client.refused == {"response_format"} and again.cached and client.totals.retries == 0


def test_many_calls_learn_at_the_same_time():
    with FaultyServer(*[NO_SCHEMA] * 8) as server:
        replies = ask_all(Client(endpoint(server)), map(str, range(8)), response_format=SCHEMA)
    assert len(replies) == 8 and len(server.requests) == 16


def test_no_schema_is_sent_where_the_endpoint_says_so():
    with FaultyServer() as server:
        ask(Client(endpoint(server, json_schema=False)), response_format=SCHEMA)
    assert "response_format" not in server.requests[0]


def test_the_other_name_of_max_tokens():
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead."
    )
    with FaultyServer((400, {"error": {"message": message, "param": "max_tokens"}})) as server:
        ask(Client(endpoint(server)), max_tokens=9)
    assert (
        server.requests[1]["max_completion_tokens"] == 9 and "max_tokens" not in server.requests[1]
    )


def test_a_setting_is_never_dropped():
    with (
        FaultyServer(
            (400, {"error": {"message": "temperature 0 is not supported", "param": "temperature"}})
        ) as server,
        pytest.raises(CallError, match="temperature"),
    ):
        ask(Client(endpoint(server)), temperature=0)
    assert len(server.requests) == 1


def test_thinking_that_cannot_be_switched_off_says_how_to_go_on():
    with FaultyServer(
        (400, {"error": {"message": "Unrecognized request argument: chat_template_kwargs"}})
    ) as server:
        with pytest.raises(CallError, match="set thinking to default"):
            ask(Client(endpoint(server)))
        ask(Client(endpoint(server, thinking="default", extra_body={"top_k": 5})))
    assert server.requests[0]["chat_template_kwargs"]["enable_thinking"] is False
    assert "chat_template_kwargs" not in server.requests[1] and server.requests[1]["top_k"] == 5


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (None, {}),
        ("https://api.deepseek.com/v1", {"thinking": {"type": "disabled"}}),
        ("https://openrouter.ai/api/v1", {"reasoning": {"enabled": False}}),
        ("https://dashscope.aliyuncs.com/compatible-mode/v1", {"enable_thinking": False}),
        (
            "http://deepseek.com.evil.example/v1",
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
    ],
)
def test_how_thinking_is_switched_off(url, body):
    assert Endpoint(model="m", base_url=url).body == body
    assert Endpoint(model="m", base_url=url, thinking="default").body == {}


# The cache ----------------------------------------------------------------------------------------


def test_same_call_same_reply_other_call_other_reply(tmp_path):
    with FaultyServer(*[completion(str(k)) for k in range(9)]) as server:
        client = Client(endpoint(server), tmp_path / "calls.sqlite")
        calls = [
            {},
            {"seed": 1},
            {"seed": 2},
            {"seed": 1, "attempt": 1},
            {"response_format": SCHEMA},
            {"temperature": 1},
        ]
        first = [ask(client, **call).text for call in calls]
        second = [ask(client, **call) for call in calls]
        other = [
            Client(endpoint(server, extra_body={"top_k": 3}), client.cache),
            Client(endpoint(server, model="n"), client.cache),
        ]
        assert first == ["0", "1", "2", "3", "4", "5"] and [ask(c).text for c in other] == [
            "6",
            "7",
        ]
    assert [reply.text for reply in second] == first and all(
        reply.cached and reply.attempts == 0 for reply in second
    )
    assert ask(client, temperature=1.0).text == "5"  # the server is gone, the cache is not
    assert (client.totals.calls, client.totals.cached) == (6, 7)


def test_only_success_is_remembered(tmp_path):
    with FaultyServer(
        (400, {"error": {"message": "no"}}), {"choices": []}, completion("yes")
    ) as server:
        client = Client(endpoint(server, attempts=1), tmp_path / "calls.sqlite")
        for _ in range(2):
            with pytest.raises(CallError):
                ask(client)
            assert client.cache.stats()["replies"] == client.cache.stats()["claims"] == 0
        assert ask(client).text == "yes" and client.cache.stats()["replies"] == 1


def test_a_remembered_reply_needs_no_key_and_costs_todays_price(tmp_path, monkeypatch):
    with FaultyServer(completion(usage=(100, 10))) as server:
        old = endpoint(server, price=Price(prompt=1, completion=1))
        assert Client(old, tmp_path / "calls.sqlite").remembered(HELLO, seed=1) is None
        assert not (tmp_path / "calls.sqlite").exists()
        ask(Client(old, tmp_path / "calls.sqlite"), seed=1)
    monkeypatch.delenv("DEMO_KEY")
    client = Client(
        endpoint(server, price=Price(prompt=2, completion=2)), tmp_path / "calls.sqlite"
    )
    assert ask(client, seed=1) == client.remembered(HELLO, seed=1)
    assert (
        client.remembered(HELLO, seed=1).usage["cost"] == pytest.approx(220e-6)
        and client.totals.cost == 0
    )
    with pytest.raises(CallError, match="DEMO_KEY") as caught:
        ask(client, seed=2)
    assert caught.value.kind == "no_key" and caught.value.fatal


def test_the_same_call_at_the_same_time_is_made_once(tmp_path):
    with FaultyServer(delay=0.1) as server:
        clients = [Client(endpoint(server), tmp_path / "calls.sqlite") for _ in range(2)]

        async def main():
            async with clients[0], clients[1]:
                return await asyncio.gather(*(clients[k % 2].ask(HELLO) for k in range(8)))

        replies = run_async(main())
    assert len(server.requests) == 1 and sum(reply.cached for reply in replies) == 7


def test_a_waiting_call_takes_over_when_the_first_fails(tmp_path):
    with FaultyServer((400, {"error": {"message": "not today"}}), delay=0.1) as server:
        client = Client(endpoint(server), tmp_path / "calls.sqlite")

        async def main():
            async with client:
                return await asyncio.gather(
                    *(client.ask(HELLO) for _ in range(3)), return_exceptions=True
                )

        kinds = sorted(type(reply).__name__ for reply in run_async(main()))
    assert kinds == ["CallError", "Reply", "Reply"] and len(server.requests) == 2


def test_a_full_disk_loses_no_paid_reply(tmp_path, monkeypatch):
    def full(*_):
        raise CacheError("calls.sqlite: database or disk is full")

    with FaultyServer() as server:
        client = Client(endpoint(server), tmp_path / "calls.sqlite")
        monkeypatch.setattr(client.cache, "put", full)
        assert ask(client).text == "ok"
        with pytest.raises(CacheError, match="full"):
            ask(client, seed=2)
    assert len(server.requests) == 1 and client.cache.stats()["claims"] == 0


PROGRAM = textwrap.dedent("""
    import sys
    from memcalib.inference.client import Client, Endpoint, run_async, run_many

    async def main(url, cache, texts):
        client = Client(Endpoint(model="m", base_url=url, key_env="", concurrency=8), cache)
        async with client:
            ask = lambda text: client.ask([{"role": "user", "content": text}])
            async for text, reply in run_many(texts, ask, 8):
                print(text, reply.text, flush=True)

    run_async(main(sys.argv[1], sys.argv[2], [str(k) for k in range(int(sys.argv[3]))]))
""")


def program(url, cache, count):
    command = [sys.executable, "-c", PROGRAM, url, str(cache), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_on_one_cache_double_no_call(tmp_path):
    with FaultyServer(delay=0.01) as server:
        both = [program(server.url, tmp_path / "calls.sqlite", 150) for _ in range(2)]
        outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert all(len(set(out.splitlines())) == 150 for out, _ in outputs)
    assert server.counts == {str(k): 1 for k in range(150)}


@pytest.mark.parametrize(
    ("signal_sent", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_process_loses_nothing(tmp_path, signal_sent, code):
    with FaultyServer(delay=0.02) as server:
        process = program(server.url, tmp_path / "calls.sqlite", 150)
        lines = [process.stdout.readline() for _ in range(40)]
        process.send_signal(signal_sent)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == code
        claims = CallCache(tmp_path / "calls.sqlite").stats()["claims"]
        assert claims == 0 or signal_sent == signal.SIGKILL
        done = {line.split()[0] for line in lines + out.splitlines() if line.strip()}
        again = program(server.url, tmp_path / "calls.sqlite", 150)
        out, errors = again.communicate(
            timeout=60
        )  # as long as a claim: those of the dead do not have to run out
        assert again.returncode == 0, errors
    assert len(out.splitlines()) == 150
    assert all(server.counts[text] == 1 for text in done)
    under_way = (
        8 if signal_sent == signal.SIGKILL else 0
    )  # Ctrl-C waits for what is paid for, a kill cannot
    assert sum(server.counts.values()) <= 150 + under_way


# The key ------------------------------------------------------------------------------------------


def everything_shown(error):
    """The traceback as a tool prints it that shows local variables,
    with all that hangs on the error.
    """
    shown = []
    while error is not None:
        shown += traceback.TracebackException.from_exception(error, capture_locals=True).format()
        shown += [repr(error), str(vars(error)), repr(error.args)]
        error = error.__context__ or error.__cause__
    return "".join(shown)


ECHO = f"You sent Authorization: Bearer {SECRET} " + "x" * 390 + SECRET
LEAKS = {
    "401": (401, {"error": {"message": ECHO, "code": SECRET}}),
    "500": (500, {"error": {"message": ECHO}}),
    "plain text": (500, ECHO, {"Content-Type": "text/plain"}),
    "other shape": (422, {"detail": [{"input": {"headers": SECRET}}]}),
    "no choices": {"error": {"message": ECHO}},
    "invalid JSON": '{"a": ' + SECRET,
    "page": (200, ECHO, {"Content-Type": "text/html"}),
    "hang": "hang",
    "drop": "drop",
}


@pytest.mark.parametrize("name", LEAKS)
def test_the_key_is_in_no_error(name, tmp_path):
    with FaultyServer(*[LEAKS[name]] * 2) as server:
        client = Client(endpoint(server, attempts=2, timeout=0.3), tmp_path / "calls.sqlite")
        with pytest.raises(CallError) as caught:
            ask(client)
    shown = (
        everything_shown(caught.value)
        + repr(client)
        + repr(client.endpoint)
        + client.endpoint.model_dump_json()
    )
    assert SECRET not in shown and SECRET[:20] not in shown
    assert SECRET in server.headers[0]["Authorization"]


def test_the_key_is_in_no_cancelled_call():
    async def main(server):
        async with Client(endpoint(server)) as client:
            task = asyncio.create_task(client.ask(HELLO))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError as error:
                return everything_shown(error)

    with FaultyServer("hang") as server:
        shown = run_async(main(server))
    assert "CancelledError" in shown and SECRET not in shown


def test_the_key_is_in_no_reply_and_no_file(tmp_path):
    with FaultyServer(completion(f"your key is {SECRET}, is it not?")) as server:
        reply = ask(Client(endpoint(server), tmp_path / "calls.sqlite"))
    assert reply.text == "your key is ***, is it not?"
    assert not any(SECRET.encode() in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields",
    [
        {"key_env": SECRET},
        {"key_env": "hf" + "_abcdefghijklmnop"},
        {"base_url": f"https://me:{SECRET}@host/v1"},
        {"base_url": f"https://host/v1?key={SECRET}"},
        {"extra_body": {"headers": [{"Authorization": SECRET}]}},
    ],
)
def test_a_key_in_the_wrong_place_is_refused_unseen(fields):
    with pytest.raises(CallError) as caught:
        Endpoint(model="m", **fields)
    assert (
        SECRET not in str(caught.value)
        and "hf_" not in str(caught.value)
        and caught.value.kind == "no_key"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "localhost:8000"},
        {"base_url": "ftp://host"},
        {"rpm": 0},
        {"concurrency": 0},
        {"model": ""},
        {"colour": 1},
        {"extra_body": {"stream": True}},
        {"price": {"prompt": -1, "completion": 1}},
        {"price": {"prompt": float("nan"), "completion": 1}},
        {"thinking": "a little"},
    ],
)
def test_endpoints_that_make_no_sense(fields):
    with pytest.raises(ValidationError):
        Endpoint(**({"model": "m"} | fields))


@pytest.mark.parametrize("value", ["", "  ", "two\nlines", "ключ"])
def test_keys_that_are_none(value, monkeypatch):
    monkeypatch.setenv("DEMO_KEY", value)
    with pytest.raises(CallError, match="DEMO_KEY") as caught:
        Endpoint(model="m", key_env="DEMO_KEY").api_key()
    assert caught.value.kind == "no_key" and (not value.strip() or value not in str(caught.value))


def test_a_key_with_white_space_around_it(monkeypatch):
    monkeypatch.setenv("DEMO_KEY", " abc\n")
    assert Endpoint(model="m", key_env="DEMO_KEY").api_key() == "abc"


@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=4), st.text(), st.text()
)
def test_hiding_leaves_no_spelling(key, before, after):
    for spelled in (key, json.dumps(key)[1:-1], urllib.request.quote(key, safe="")):
        hidden = hide_key(before + "<" + spelled + ">" + after, key)
        assert key in "***" or key not in hidden.replace("***", "\x00")
    assert hide_key(before, "") == before


@given(st.text(), st.integers(1, 50))
def test_shortened_text_is_one_printable_line(text, limit):
    short = one_line(text, limit)
    assert len(short) <= limit + 1 and printable(short) == short and len(short.splitlines()) <= 1


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(CallError("rate_limited", "slow", 429, 2.5)))
    assert (error.kind, error.status, error.wait, str(error), error.fatal) == (
        "rate_limited",
        429,
        2.5,
        "slow",
        False,
    )


@given(st.integers(400, 599), st.text())
def test_every_refusal_has_a_kind(status, text):
    error = CallError(error_kind(status, text), text, status)
    assert not (error.fatal and error.passing) and (
        error.passing or status not in (408, 409, 500, 503)
    )


@given(st.text())
def test_estimates_are_a_quarter_of_the_bytes(text):
    assert 0 <= estimate_tokens(text) - len(text.encode("utf-8", "replace")) / 4 < 1


# Many at once -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 8))
def test_every_item_comes_once_within_the_window(delays, window):
    started = 0
    out = []
    most = 0

    def source():
        nonlocal started
        for k, delay in enumerate(delays):
            started += 1
            yield k, delay

    async def work(item):
        for _ in range(item[1]):
            await asyncio.sleep(0)
        return item[0] * 2

    async def main():
        nonlocal most
        async for item, result in run_many(source(), work, window):
            out.append((item[0], result))
            most = max(most, started - len(out))

    asyncio.run(main())
    assert sorted(out) == [(k, 2 * k) for k in range(len(delays))] and most <= window


@pytest.mark.parametrize("broken", ["worker", "source"])
def test_the_first_error_comes_after_what_was_finished(broken):
    started = []
    cancelled = []
    out = []

    async def work(k):
        started.append(k)
        if k == 3 and broken == "worker":
            raise KeyError("three")
        try:
            await asyncio.sleep(0 if k < 3 else 3600)
        except asyncio.CancelledError:
            cancelled.append(k)
            raise
        return k

    def source():
        for k in range(100):
            if k == 6 and broken == "source":
                raise KeyError("six")
            yield k

    async def main():
        async for item, _ in run_many(source(), work, 6, finish=0.1):
            out.append(item)

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert sorted(out) == [0, 1, 2] and len(started) <= 12
    assert sorted(out + cancelled + ([3] if broken == "worker" else [])) == sorted(started)


def test_a_consumer_that_leaves_early_leaves_nothing_running():
    running = set()

    async def work(k):
        running.add(k)
        try:
            await asyncio.sleep(0 if k == 0 else 3600)
        finally:
            running.discard(k)

    async def main():
        results = run_many(range(10), work, 4, finish=0.1)
        async for _ in results:
            break
        await results.aclose()
        return set(running)

    assert asyncio.run(main()) == set()


def test_an_error_reaches_plain_code_inside_a_running_loop():
    async def fails():
        raise KeyError("inner")

    async def notebook():
        with pytest.raises(KeyError, match="inner"):
            run_async(fails())
        return run_async(asyncio.sleep(0, "fine"))

    assert asyncio.run(notebook()) == "fine"


NOTEBOOK = textwrap.dedent("""
    import asyncio, os, signal, sys, threading
    from memcalib.inference.client import run_async

    async def cell():
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(60)
        finally:
            print("gave back", flush=True)

    async def notebook():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook's kernel does
        try:
            run_async(cell())
        except KeyboardInterrupt:
            print("stopped", flush=True)

    asyncio.run(notebook())
""")


def test_interrupting_a_notebook_cell():
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["gave back", "stopped"], done.stderr


def test_a_client_that_is_not_open_or_open_elsewhere():
    client = Client(Endpoint(model="m", key_env=""))
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(client.ask(HELLO))

    async def main():
        async with client, client:
            run_async(client.__aenter__())

    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(main())


def test_import_is_light():
    heavy = ("openai", "httpx2", "aiohttp", "torch")
    probe = (
        f"import sys, memcalib.inference.client; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"role": "assistant", "content": 7}},
        {"message": {"role": "assistant", "content": {"a": 1}}},
        {"message": {"role": "assistant", "content": [1, 2]}},
        {"message": "hello"},
        {"message": ["hello"]},
        {"message": {"role": "assistant", "content": "ok"}, "finish_reason": {"a": 1}},
    ],
)
def test_an_answer_that_is_no_text_is_a_fault_of_the_server(choice):
    with (
        FaultyServer({"choices": [choice]}) as server,
        pytest.raises(CallError, match="not text") as caught,
    ):
        ask(Client(endpoint(server, attempts=1)))
    assert caught.value.kind == "server" and not caught.value.fatal and len(str(caught.value)) < 700


def test_nested_nonsense_is_a_fault_of_the_server():
    with (
        FaultyServer("[" * 200_000) as server,
        pytest.raises(CallError, match="not a chat completion") as caught,
    ):
        ask(Client(endpoint(server, attempts=1)))
    assert caught.value.kind == "server"


def test_a_text_in_parts_is_put_together():
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "one "},
        {"type": "text", "text": "two"},
    ]
    with FaultyServer(completion(parts)) as server:
        assert ask(Client(endpoint(server))).text == "one two"


@pytest.mark.parametrize("value", [math.nan, math.inf, -5, 10**400, True, "7", None, 1e300])
def test_a_count_of_tokens_that_is_none_is_not_told(value):
    body = completion(usage=(8, 3))
    body["usage"] |= {"prompt_tokens": value}
    with FaultyServer(json.dumps(body)) as server:
        client = Client(endpoint(server))
        reply = ask(client)
    assert (
        reply.usage.keys() == {"completion_tokens", "seconds"} and client.totals.prompt_tokens == 0
    )


PASTED = "sk" + "-0123456789abcdefghijklmnop"  # in two parts, so that no scan for keys stops here


@pytest.mark.parametrize(
    "fields",
    [
        {"model": PASTED},
        {"base_url": f"http://h/{PASTED}/v1"},
        {"base_url": f"http://h/v1?key={PASTED}"},
        {"key_env": PASTED},
    ],
)
def test_a_key_pasted_in_the_wrong_place_is_refused_and_not_repeated(fields):
    with pytest.raises(CallError) as caught:
        Endpoint(**({"model": "m"} | fields))
    assert caught.value.kind == "no_key" and PASTED not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999/v1",
        "http://h:-1",
        "http://h:x/v1",
        "http://[::1/v1",
        "http://a b/v1",
        "http:///v1",
        7,
        b"x",
        ["a"],
    ],
)
def test_an_address_that_is_none(url):
    with pytest.raises(
        ValidationError, match="must be an address such as http://localhost:8000/v1"
    ):
        Endpoint(model="m", base_url=url)


@pytest.mark.parametrize(
    "model",
    [
        "sk-small",
        "hf-internal-testing/tiny-random-LlamaForCausalLM",
        "Qwen/Qwen3-8B",
        "tas" + "k-0123456789abcdefghijklmnop",
    ],
)
def test_names_of_models_are_no_keys(model):
    assert Endpoint(model=model).model == model and hide_secrets(model) == model


def test_secrets_in_a_command_are_hidden(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "abcdef-very-private")
    text = hide_secrets(f"a --model {SECRET} x=abcdef-very-private {PASTED} http://u:p@h/v1")
    assert text == "a --model *** x=*** *** http://***@h/v1"


# What is said meanwhile ---------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "warning_count"), [(0, 0), (2, 0), (3, 1), (7, 1), (8, 1)])
def test_a_call_that_keeps_failing_is_said_once(caplog, bad, warning_count):
    with FaultyServer(*["{not json"] * bad) as server:
        client = Client(endpoint(server, attempts=8))
        for attempt in (0, 1):  # the second time all is well
            try:
                ask(client, attempt=attempt)
            except CallError as error:
                assert bad == 8 and "not a chat completion" in str(error)
    warnings = [message for message in caplog.messages if "has failed" in message]
    assert len(warnings) == warning_count
    assert all(
        "failed 3 times; it will be tried up to 8 times" in m and "not a chat completion" in m
        for m in warnings
    )
    assert SECRET not in caplog.text


def test_many_calls_that_keep_failing_are_said_once_each_time(caplog):
    with FaultyServer(*["{not json"] * 40) as server:
        client = Client(endpoint(server, attempts=40, concurrency=10))
        for _ in range(2):
            server.script[:] = ["{not json"] * 40
            assert len(ask_all(client, [str(i) for i in range(10)])) == 10
    assert sum("has failed" in message for message in caplog.messages) == 2


@pytest.mark.parametrize(
    ("endpoint", "cost"),
    [
        (None, 0.0),
        (Endpoint(model="m", base_url="http://localhost:1/v1", key_env=""), None),
        (
            Endpoint(
                model="m",
                base_url="http://localhost:1/v1",
                key_env="",
                price={"prompt": 1, "completion": 2},
            ),
            5.0,
        ),
    ],
    ids=["no endpoint", "no price", "a price"],
)
def test_a_forecast_has_a_cost_where_it_can_be_known(endpoint, cost):
    row = forecast_row("judge", "m", endpoint, {"calls": 3}, 1e6, 2e6)
    assert row == {
        "role": "judge",
        "model": "m",
        "calls": 3,
        "prompt tokens": 1e6,
        "completion tokens": 2e6,
        "cost": cost,
    }
