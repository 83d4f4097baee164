"""A front for the practice server, which does not stream: it asks the server and sends the reply
as a stream of one piece, as the chat program of verifiers wants it."""

import asyncio
import json
import threading
from itertools import count

import aiohttp
from aiohttp import web


class StreamingFront:
    """An OpenAI-compatible address in front of another one, between `with` and its end."""

    def __init__(self, base_url: str):
        self.inner = base_url
        self.base_url = ""
        self.loop = asyncio.new_event_loop()
        self.seeds = count()

    def __enter__(self) -> "StreamingFront":
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def _run(self, ready: threading.Event) -> None:
        self.loop.run_until_complete(self._start(ready))
        self.loop.run_forever()

    async def _start(self, ready: threading.Event) -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        ready.set()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        streams = body.pop("stream", False)
        body.pop("stream_options", None)
        body.setdefault("seed", next(self.seeds))  # or all answers to a prompt would be alike
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.inner}/chat/completions", json=body) as answer,
        ):
            completion = await answer.json()
            if answer.status != 200 or not streams:
                return web.json_response(completion, status=answer.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self._pieces(completion):
            await response.write(f"data: {piece}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _pieces(self, completion: dict) -> list[str]:
        (choice,) = completion["choices"]
        frame = {name: completion[name] for name in ("id", "created", "model")}
        frame["object"] = "chat.completion.chunk"
        message = {"role": "assistant", "content": choice["message"]["content"]}
        last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        return [
            json.dumps({**frame, "choices": [{"index": 0, "delta": message}]}),
            json.dumps({**frame, "choices": [last]}),
            json.dumps({**frame, "choices": [], "usage": completion["usage"]}),
        ]
