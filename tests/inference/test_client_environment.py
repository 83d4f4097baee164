"""What leaves with a request: what the settings name, and nothing of the environment."""

import asyncio
import socket

import pytest
from faulty_server import FaultyServer
from pydantic import BaseModel

from memcalib.inference.client import Client
from memcalib.inference.endpoint import (
    CallError,
    Endpoint,
    is_this_machine,
    proxies_in,
    proxy_for,
)
from memcalib.io.keys import hide_secrets

HELLO = [{"role": "user", "content": "my diagnosis is private"}]
MARK = "secret-of-the-environment"
HEADERS = f"""Authorization: Bearer sk-{MARK}
X-Internal: {MARK}
User-Agent: {MARK}
Host: {MARK}.example
Accept: application/{MARK}
Cookie: session={MARK}
Accept-Encoding: {MARK}
Content-Type: text/{MARK}"""
# every variable that openai, httpx, aiohttp and huggingface_hub read and that has a value of its
# own; what names a proxy is tried below
VARIABLES = {
    "OPENAI_CUSTOM_HEADERS": HEADERS,
    "OPENAI_API_KEY": f"sk-{MARK}-key",
    "OPENAI_ADMIN_KEY": f"sk-{MARK}-admin",
    "OPENAI_ORG_ID": f"org-{MARK}",
    "OPENAI_ORGANIZATION": f"org-{MARK}",
    "OPENAI_PROJECT_ID": f"proj-{MARK}",
    "OPENAI_WEBHOOK_SECRET": f"whsec-{MARK}",
    "OPENAI_BASE_URL": f"http://{MARK}.example/v1",
    "OPENAI_API_TYPE": "azure",
    "OPENAI_API_VERSION": MARK,
    "AZURE_OPENAI_API_KEY": MARK,
    "AZURE_OPENAI_ENDPOINT": f"https://{MARK}.example",
    "AZURE_OPENAI_AD_TOKEN": MARK,
    "AWS_BEARER_TOKEN_BEDROCK": MARK,
    "AWS_BEDROCK_BASE_URL": f"https://{MARK}.example",
    "AWS_REGION": MARK,
    "AWS_DEFAULT_REGION": MARK,
    "GOOGLE_CLOUD_PROJECT": MARK,
    "GOOGLE_CLOUD_LOCATION": MARK,
    "HF_TOKEN": f"hf_{MARK}",
    "HUGGING_FACE_HUB_TOKEN": f"hf_{MARK}",
    "HF_ENDPOINT": f"https://{MARK}.example",
    "HF_HUB_USER_AGENT_ORIGIN": MARK,
    "HF_ORG": MARK,
    "NETRC": "",  # the path of a file, below
}


@pytest.fixture
def full_environment(tmp_path, monkeypatch):
    """Every variable set, and a .netrc for all hosts."""
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"default login {MARK} password {MARK}\n")
    netrc.chmod(0o600)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def ask(url: str, **settings) -> str:
    settings = {"model": "m", "base_url": url, "key_env": "", "timeout": 10, **settings}
    client = Client(Endpoint(**settings, attempts=1))

    async def call():
        async with client:
            return (await client.ask(HELLO)).text

    return asyncio.run(call())


def everything_received(server: FaultyServer) -> str:
    return repr([*map(dict, server.headers), *server.requests])


@pytest.mark.parametrize("foreign", [False, True], ids=["this machine", "a foreign host"])
def test_nothing_of_the_environment_leaves(full_environment, foreign):
    """A proxy on this machine stands for the foreign host: it sees what would arrive there."""
    with FaultyServer() as server:
        if foreign:
            full_environment.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
        url = "http://collect.example/v1" if foreign else server.url
        assert ask(url) == "ok"
        received = everything_received(server)
        assert len(server.requests) == 1
    assert MARK not in received
    assert "Authorization" not in received, "there is no key to send"


def test_the_key_of_the_settings_is_not_replaced(full_environment):
    full_environment.setenv("MY_KEY", "the-right-key")
    with FaultyServer() as server:
        ask(server.url, key_env="MY_KEY")
        [headers] = server.headers
    assert headers["Authorization"] == "Bearer the-right-key"
    assert headers["Content-Type"] == "application/json"
    assert MARK not in repr(dict(headers))


def test_a_request_has_these_headers_and_no_others(full_environment):
    with FaultyServer() as server:
        ask(server.url)
        [headers] = server.headers
    assert {name.lower() for name in headers} <= {
        "host",
        "accept",
        "accept-encoding",
        "content-type",
        "content-length",
        "user-agent",
        "connection",
        "x-stainless-raw-response",  # a mark of the openai package, without a value of its own
    }
    assert headers["Host"] == f"127.0.0.1:{server.port}"


def test_a_cookie_of_a_server_is_not_sent_back(full_environment):
    cookie = {"Set-Cookie": "session=tracker123; Path=/", "Location": "/v1/chat/completions"}
    with FaultyServer((307, "", cookie)) as server:
        ask(server.url.replace("127.0.0.1", "localhost"))
        assert len(server.headers) == 2
        assert all("Cookie" not in headers for headers in server.headers)


LOOPBACK = ["127.0.0.1", "localhost", "127.8.8.8", "[::1]", "model.localhost"]


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_this_machine_is_never_reached_by_a_proxy(full_environment, name):
    with FaultyServer() as proxy, FaultyServer() as server:
        full_environment.setenv(name, f"http://127.0.0.1:{proxy.port}")
        full_environment.setenv("MY_KEY", "the-right-key")
        assert ask(server.url, key_env="MY_KEY") == "ok"
        assert proxy.requests == [] and len(server.requests) == 1


@pytest.mark.parametrize("host", LOOPBACK)
def test_no_spelling_of_this_machine_has_a_proxy(full_environment, host):
    full_environment.setenv("HTTP_PROXY", "http://proxy.example:3128")
    assert proxy_for(f"http://{host}:8000/v1") is None
    assert proxy_for("http://models.example/v1") == "http://proxy.example:3128"


def test_a_proxy_of_https_and_exceptions(full_environment):
    full_environment.setenv("HTTPS_PROXY", "proxy.example:3128")
    full_environment.setenv("NO_PROXY", "inside.example, .corp.example")
    assert proxy_for("https://api.openai.com/v1") == "http://proxy.example:3128"
    assert proxy_for("https://inside.example/v1") is None
    assert proxy_for("https://a.corp.example/v1") is None
    assert proxy_for("http://api.openai.com/v1") is None, "this proxy is for https"
    full_environment.setenv("NO_PROXY", "*")
    assert proxy_for("https://api.openai.com/v1") is None


def test_requests_go_by_the_proxy_that_is_named(full_environment):
    """What `proxy_for` says is what happens: with an exception for the host, nothing goes there."""
    with FaultyServer() as proxy:
        full_environment.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        assert ask("http://collect.example/v1") == "ok" and len(proxy.requests) == 1
        full_environment.setenv("NO_PROXY", "collect.example")
        with pytest.raises(Exception, match="no connection to http://collect.example/v1"):
            ask("http://collect.example/v1")
        assert len(proxy.requests) == 1


@pytest.mark.parametrize(
    "host",
    [
        "localhost.",
        "127.1",
        "127.0.0.1.",
        "2130706433",
        "0x7f000001",
        "0",
        "[::ffff:127.0.0.1]",
        "[::1]",
        socket.gethostname(),
    ],
)
def test_every_way_to_write_this_machine_goes_past_the_proxy(monkeypatch, host):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    assert is_this_machine(f"http://{host}:8000/v1")
    assert proxy_for(f"http://{host}:8000/v1") is None


def test_a_name_that_only_ends_like_this_machine_is_asked_of_the_system(monkeypatch):
    """`model.localhost` is looked up like any other name, and may be found elsewhere."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", ("127.0.0.1", 0))])
    assert is_this_machine("http://model.localhost/v1")
    both = [(2, 1, 6, "", ("127.0.0.1", 0)), (10, 1, 6, "", ("fe80::1%eth0", 0, 0, 2))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: both)
    assert not is_this_machine("http://model.localhost/v1")


@pytest.mark.parametrize(
    "host",
    [
        "127.evil.example",
        "localhost.example",
        "localhost.localdomain",
        "ip6-localhost",
        "ip6-loopback",
        "10.0.0.1",
        "[::2]",
        "127.0.0.1\u00b4.evil.example",
        "127.0.0.1\u00a8x.evil.example",
        "127.0.0.1\ufc5eevil.example",
        "127.0.0.1\u2002evil.example",
    ],
)
def test_another_machine_is_no_part_of_this_one(host):
    assert not is_this_machine(f"http://{host}/v1")


@pytest.mark.parametrize("login", ["u:p@ssw0rdX9", "u:pw/slash9X", "me"])
def test_whatever_the_login_of_a_proxy_holds_it_is_not_shown(monkeypatch, login):
    monkeypatch.setenv("http_proxy", f"http://{login}@proxy.example:3128")
    settings = Holder(endpoint=Endpoint(model="m", base_url="http://far.example/v1"))
    assert proxies_in(settings) == {"endpoint": "http://***@proxy.example:3128"}


class Holder(BaseModel):
    endpoint: Endpoint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", "/R7mQpLrTzWvBn8sHdJfGcx9Yk2m"),
        ("LUMEN_API_KEY", "~x8PqLm29TzWvBn8s"),
        ("LUMEN_API_KEY", "x8PqLm29"),
        ("LUMEN_PASS", "x8PqLm29TzWvBn8s"),
        ("LUMEN_PWD", "x8PqLm29TzWvBn8s"),
        ("LUMEN_AUTH", "x8PqLm29TzWvBn8s"),
        ("LUMEN_CREDENTIAL", "x8PqLm29TzWvBn8s"),
        ("LUMEN_PASSPHRASE", "wide-open-sea-air"),
    ],
)
def test_a_value_of_a_variable_that_is_named_like_a_key_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(CallError, match=r"user contains what looks like a key") as caught:
        Endpoint(model="m", base_url="http://far.example/v1", extra_body={"user": value})
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SSH_AUTH_SOCK", "/tmp/ssh-9f8a7b6c5d/agent.1234"),
        ("MY_KEY_FILE", "/srv/keys/not-there-1234"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_THINKING_TOKENS", "31999"),
    ],
)
def test_paths_and_settings_are_no_keys(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert hide_secrets(f"it is {value}, once") == f"it is {value}, once"
