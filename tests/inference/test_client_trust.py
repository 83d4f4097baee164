"""Where a prompt may go, replies that are no HTTP, and waits that are said."""

import asyncio
import gzip
import logging
import threading
import tracemalloc
from contextlib import contextmanager

import pytest
from faulty_server import FaultyServer, completion

from memcalib.inference.cache import CallCache
from memcalib.inference.client import Client, Pacer
from memcalib.inference.endpoint import CallError, Endpoint

HELLO = [{"role": "user", "content": "my diagnosis is private"}]
BODY = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"finish_reason":"stop","message":{"role":"assistant","content":"ok"}}]}'
)


def good_reply(headers: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + headers
    return head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def raw_server(first: bytes):
    """The address of a server that sends these bytes once, good replies after them; and the
    number of its requests."""
    requests = []
    ready = threading.Event()
    state = {}

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        requests.append(1)
        await asyncio.sleep(0.05)
        writer.write(first if len(requests) == 1 else good_reply())
        await writer.drain()
        writer.close()

    async def serve():
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 20)
        state["port"] = server.sockets[0].getsockname()[1]
        state["loop"] = asyncio.get_running_loop()
        state["stop"] = asyncio.Event()
        ready.set()
        await state["stop"].wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield f"http://127.0.0.1:{state['port']}/v1", requests
    state["loop"].call_soon_threadsafe(state["stop"].set)
    thread.join(20)


def endpoint(url: str, **fields) -> Endpoint:
    settings = {"model": "m", "base_url": url, "key_env": "", "backoff": 0.001, "timeout": 5}
    return Endpoint(**{**settings, **fields})


def ask(client: Client, messages=HELLO):
    async def call():
        async with client:
            return await client.ask(messages)

    return asyncio.run(call())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_is_refused_and_said(status):
    with FaultyServer() as stranger:
        elsewhere = stranger.url.replace("127.0.0.1", "localhost") + "/chat/completions"
        redirect = (status, "", {"Location": elsewhere})
        with FaultyServer(redirect) as server, pytest.raises(CallError) as caught:
            ask(Client(endpoint(server.url)))
        assert stranger.requests == []
    message = str(caught.value)
    assert caught.value.fatal and f"http://localhost:{stranger.port}" in message
    assert "Nothing was sent there" in message and "base_url" in message
    assert caught.value.__cause__ is None and "private" not in message


def test_another_port_of_the_same_host_is_another_place():
    with FaultyServer() as stranger, FaultyServer() as server:
        server.script.append((307, "", {"Location": stranger.url + "/chat/completions"}))
        with pytest.raises(CallError, match="Nothing was sent there"):
            ask(Client(endpoint(server.url)))
        assert stranger.requests == []


def test_a_redirect_within_the_host_is_followed():
    with FaultyServer() as server:
        server.script.append((307, "", {"Location": "/v1/chat/completions"}))
        assert ask(Client(endpoint(server.url))).text == "ok"
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("meant", "target", "allowed"),
    [
        ("http://a.org/v1", "http://a.org/v2/x", True),
        ("http://a.org/v1", "https://a.org/v1/x", True),
        ("https://a.org/v1", "http://a.org/v1/x", False),
        ("https://a.org/v1", "https://a.org.evil.net/v1", False),
        ("https://a.org/v1", "https://a.org@evil.net/v1", False),
        ("https://a.org:8443/v1", "https://a.org/v1", False),
    ],
)
def test_where_a_request_may_go(meant, target, allowed):
    from memcalib.inference.client import _check_destination, _RedirectRefused

    if allowed:
        _check_destination(meant, target)
        return
    with pytest.raises(_RedirectRefused):
        _check_destination(meant, target)


JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
MALFORMED = {
    "chunk size": JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "length too short": JSON_HEAD + b"Content-Length: 5\r\n\r\n" + BODY,
    "length too long": JSON_HEAD + b"Content-Length: 5000\r\n\r\n" + BODY,
    "header that is none": good_reply(b"B\x00ad: 1\r\n"),
    "header of 200 kB": good_reply(b"X-Big: " + b"a" * 200_000 + b"\r\n"),
    "another protocol": b"SSH-2.0-OpenSSH_9\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_reply_that_is_no_http_is_tried_again(name):
    with raw_server(MALFORMED[name]) as (url, requests):
        client = Client(endpoint(url))
        assert ask(client).text == "ok"
        assert len(requests) == 2 and client.totals.retries == 1


@pytest.mark.parametrize("name", ["length too short", "another protocol"])
def test_what_never_is_http_is_a_fault_of_the_server(name):
    with raw_server(MALFORMED[name]) as (url, _), pytest.raises(CallError) as caught:
        ask(Client(endpoint(url, attempts=1)))
    assert caught.value.kind in ("server", "unreachable") and url in str(caught.value)


def test_long_headers_of_a_gateway_are_read():
    with raw_server(good_reply(b"X-Trace: " + b"a" * 40_000 + b"\r\n")) as (url, requests):
        assert ask(Client(endpoint(url))).text == "ok"
        assert len(requests) == 1


def test_a_refusal_is_an_answer():
    body = completion(text=None)
    body["choices"][0]["message"]["refusal"] = "I cannot help with that."
    with FaultyServer(body) as server:
        reply = ask(Client(endpoint(server.url)))
        assert (reply.text, reply.finish_reason) == ("I cannot help with that.", "refusal")
        assert len(server.requests) == 1


@pytest.fixture
def quick_sleep(monkeypatch):
    """Sleeps of the client end at once; their lengths are kept."""
    lengths = []
    sleep = asyncio.sleep

    async def short(seconds):
        lengths.append(seconds)
        await sleep(0)

    monkeypatch.setattr("memcalib.inference.client.asyncio.sleep", short)
    return lengths


def test_a_long_wait_is_said_once_with_its_end(quick_sleep, caplog):
    slow_down = (429, {"error": {"message": "slow down"}}, {"Retry-After": "590"})
    with FaultyServer(slow_down, slow_down) as server, caplog.at_level(logging.WARNING):
        ask(Client(endpoint(server.url)))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "waiting 590 s, until " in lines[0] and "slow down" in lines[0]
    assert max(quick_sleep) == 590


def test_a_short_wait_is_not_said(quick_sleep, caplog):
    slow_down = (429, {}, {"Retry-After": "9"})
    with FaultyServer(slow_down) as server, caplog.at_level(logging.WARNING):
        ask(Client(endpoint(server.url)))
    assert caplog.records == []


def test_a_wait_for_the_limits_is_said(quick_sleep):
    announced = []

    async def book():
        pacer = Pacer(1)
        await pacer.wait(1, announced.append)
        await pacer.wait(1, announced.append)

    asyncio.run(book())
    assert len(announced) == 1 and 55 < announced[0] < 65


def test_a_claim_of_another_process_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("memcalib.inference.client._SILENT_WAIT", 0.05)
    with FaultyServer() as server, caplog.at_level(logging.WARNING):
        first = CallCache(tmp_path / "calls.sqlite")
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        key = client.key(HELLO)
        assert first.claim(key)
        assert client.cache.claimed(key)[0] == first.owner and first.claimed(key) is None
        release = threading.Timer(1.0, first.release, [key])
        release.start()
        assert ask(client).text == "ok"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "another process" in lines[0] and "until" in lines[0]


def test_what_a_server_names_is_kept_short(caplog):
    """Rows keep these words, and a warning shows them."""
    body = completion()
    body["model"] = "other\x1b[31m" + "m" * 100_000
    body["choices"] = [dict(body["choices"][0], finish_reason="f" * 100_000)] * 2
    with FaultyServer(body) as server, caplog.at_level(logging.WARNING):
        reply = ask(Client(endpoint(server.url, timeout=60)))
    assert len(reply.answered_by) == len(reply.finish_reason) == 200
    assert reply.answered_by.startswith("other\\x1b[31mm")
    assert all(len(record.getMessage()) < 500 for record in caplog.records)


POISON = [
    {},
    {"text": "made up"},
    {"text": 5, "finish_reason": "stop", "usage": {}},
    {"text": "made up", "finish_reason": None, "usage": {}},
    {"text": "made up", "finish_reason": "stop", "usage": []},
    {"text": "made up", "finish_reason": "stop", "usage": {"seconds": float("nan")}},
    {"text": "made up", "finish_reason": "stop", "usage": {"prompt_tokens": -5}},
    {"text": "made up", "finish_reason": "stop", "usage": {}, "answered_by": {}},
]


@pytest.mark.parametrize("stored", POISON)
def test_a_row_of_the_cache_that_is_no_whole_reply_is_asked_for_again(tmp_path, stored):
    cache = CallCache(tmp_path / "calls.sqlite")
    with FaultyServer() as server:
        client = Client(endpoint(server.url), cache)
        cache.put(client.key(HELLO), stored)
        assert client.remembered(HELLO) is None
        cache.put(client.key(HELLO), stored)
        assert ask(client).text == "ok" and len(server.requests) == 1
        assert ask(Client(endpoint(server.url), cache)).text == "ok" and len(server.requests) == 1


KEY = "kestrel-owl-77"


@pytest.mark.parametrize("place", ["model", "finish_reason"])
def test_a_key_that_a_server_sends_back_as_a_name_is_hidden(monkeypatch, caplog, place):
    """A server knows the key that it was given, and may name itself after it."""
    monkeypatch.setenv("LUMEN_API_KEY", KEY)
    reply = completion("ok")
    if place == "model":
        reply["model"] = f"Bearer {KEY}"
    else:
        reply["choices"][0]["finish_reason"] = KEY
    with FaultyServer((200, reply)) as server:
        client = Client(endpoint(server.url, key_env="LUMEN_API_KEY"))
        answer = ask(client)
    assert KEY not in str(answer) + caplog.text
    assert "***" in (answer.answered_by if place == "model" else answer.finish_reason)


def test_an_error_that_unpacks_to_gigabytes_is_read_no_further_than_a_megabyte():
    bomb = gzip.compress(b"x" * 50_000_000)
    headers = {"Content-Encoding": "gzip", "Content-Type": "text/plain"}
    with FaultyServer((400, bomb, headers)) as server:
        tracemalloc.start()
        with pytest.raises(CallError, match="answered 400") as caught:
            ask(Client(endpoint(server.url, attempts=1)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000
    assert peak < 25_000_000  # one packet that is unpacked, not the body


@pytest.mark.parametrize("host", ["localhost\u3002", "b\u00fccher.example", "loc\u0430lhost"])
def test_a_host_name_that_is_not_ascii_is_refused_as_such(host):
    with pytest.raises(ValueError, match="base_url.*\n.*host name of ASCII characters"):
        Endpoint(model="m", base_url=f"http://{host}:8765/v1")
