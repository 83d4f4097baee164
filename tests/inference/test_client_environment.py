"""What leaves with a request: what the settings name, and nothing of the environment."""

import asyncio

import pytest
from faulty_server import FaultyServer

from memcalib.inference.client import Client
from memcalib.inference.endpoint import Endpoint, proxy_for

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
