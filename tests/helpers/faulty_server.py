"""A loopback server that answers chat completions by a script of faults,
for the tests of the client.

As a program it prints its address and answers everything after a delay:
`faulty_server.py [seconds]`; GET /seen gives the number of requests by the content of their last
message.
"""

import asyncio
import json
import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

from aiohttp import web


def completion(text="ok", finish="stop", usage=(8, 3)):
    """A good body in OpenAI's shape."""
    message = {"role": "assistant", "content": text}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    body["choices"] = [{"index": 0, "finish_reason": finish, "message": message}]
    if usage:
        prompt_tokens, completion_tokens = usage
        body["usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
    return body


class Late(NamedTuple):
    """A step that takes its time."""

    step: Any
    seconds: float


class FaultyServer:
    """Takes one step of `script` for each request, and is good when the script is empty.

    A step is "hang", "drop", a body (status 200), (status, body) or (status, body, headers); a body
    is a dict, raw text, or bytes that the headers say how to decode. `Late(step, seconds)` sends a
    step after so many seconds.
    """

    def __init__(self, *script, delay=0.0):
        self.script = list(script)
        self.delay = delay
        self.requests = []  # the bodies of all requests
        self.headers = []  # and their headers
        self.at_once = 0
        self.most = 0  # requests at once

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def counts(self):
        return Counter(request["messages"][-1]["content"] for request in self.requests)

    async def _serve(self, ready=None):
        app = web.Application(client_max_size=1 << 27)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/seen", self._report)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if ready is None:
            print(self.url, flush=True)
        else:
            ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _report(self, request):
        return web.json_response(self.counts)

    async def _chat(self, request):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return await self._step(request)
        finally:
            self.at_once -= 1

    async def _step(self, request):
        self.requests.append(await request.json())
        self.headers.append(request.headers.copy())
        step = self.script.pop(0) if self.script else completion()
        delay = self.delay
        if isinstance(step, Late):
            step, delay = step
        if delay:
            await asyncio.sleep(delay)
        if step == "hang":
            await asyncio.sleep(3600)
        if step == "drop":
            request.transport.close()
            return web.Response()
        return self._response(step)

    def _response(self, step):
        """The response for a body, (status, body) or (status, body, headers)."""
        status = 200
        headers = {}
        body = step
        if isinstance(step, tuple):
            status, body, *further = step
            if further:
                (headers,) = further
        if isinstance(body, dict | list):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        if "Content-Type" in headers:
            return web.Response(status=status, body=body, headers=headers)
        return web.Response(
            status=status, body=body, headers=headers, content_type="application/json"
        )


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    asyncio.run(FaultyServer(delay=seconds)._serve())
