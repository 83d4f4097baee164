"""A loopback proxy between a client and a good server, which wraps or withholds each reply.

The mode is the first part of the path: `http://127.0.0.1:PORT/think/v1` for the mode `think`. As a
program it prints its address: `wrapping_proxy.py UPSTREAM_URL`, which ends in /v1.
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def _thoughts_and_fence(message: dict[str, Any]) -> None:
    message["content"] = f"<think>Is {{this}} it?</think>\n```json\n{message['content']}\n```"


def _fence_and_sentence(message: dict[str, Any]) -> None:
    message["content"] = f"```json\n{message['content']}\n```\nI hope this helps."


def _closing_mark_alone(message: dict[str, Any]) -> None:
    message["content"] = f"Is {{this}} it?\n</think>\n\n{message['content']}"


def _only_reasoning(message: dict[str, Any]) -> None:
    message["reasoning_content"] = message["content"]
    message["content"] = None


def _field_more(message: dict[str, Any]) -> None:
    try:
        reply = json.loads(message["content"])
    except ValueError:
        return  # an answer in words
    reply["summary"] = "A field that nobody asked for."
    message["content"] = json.dumps(reply)


MODES: dict[str, Callable[[dict[str, Any]], None]] = {
    "think": _thoughts_and_fence,
    "fencetail": _fence_and_sentence,
    "closeonly": _closing_mark_alone,
    "nullreason": _only_reasoning,
    "extrakey": _field_more,
}


class WrappingProxy:
    """Hands requests to the server at `upstream` and changes the message of each reply by its
    mode; anything but a chat completion goes through as it is."""

    def __init__(self, upstream: str, port: int = 0):
        self.upstream = upstream.removesuffix("/v1")
        self.changed = 0  # replies that a mode went over
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "WrappingProxy":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)

    def url(self, mode: str) -> str:
        """The base URL under which replies are changed by a mode."""
        assert mode in MODES, mode
        return f"http://127.0.0.1:{self._server.server_address[1]}/{mode}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._forward(None)

            def do_POST(self) -> None:
                self._forward(self.rfile.read(int(self.headers["Content-Length"])))

            def _forward(self, body: bytes | None) -> None:
                mode, _, path = self.path.lstrip("/").partition("/")
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{proxy.upstream}/{path}", body, headers)
                try:
                    with urllib.request.urlopen(request) as reply:
                        status, text = reply.status, reply.read()
                except urllib.error.HTTPError as error:
                    status, text = error.code, error.read()
                if status == 200 and path.endswith("chat/completions"):
                    completion = json.loads(text)
                    for choice in completion["choices"]:
                        MODES[mode](choice["message"])
                        proxy.changed += 1
                    text = json.dumps(completion).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_) -> None:
                """No line on the terminal for each request."""

        return Handler


if __name__ == "__main__":
    with WrappingProxy(sys.argv[1]) as running:
        print(running.url("think"), flush=True)
        running._thread.join()
