"""The client against a stated limit, its own cost per call, and two processes on one cache.

    python benchmarks/bench_client.py [seconds]

The server runs in a process of its own on the loopback. In the first part it allows 600 requests a
minute and 64 at once, counted over the last minute and, more strictly, over the last ten seconds;
answers take 2 to 4 seconds. Whatever exceeds the limit gets a 429 and counts against the client.
The share is successes in the measured seconds over what was allowed. The second part has no limit
and no delay: what is left is the client's own processor time, with a prompt of 8 kB, an answer of 4
kB, and the cache on disk. The third part lets two processes ask the same 1,000 questions at once.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, deque
from contextlib import contextmanager, suppress
from pathlib import Path

RPM = 600
AT_ONCE = 64
LIMITS = ((60.0, RPM), (10.0, RPM / 6))  # (seconds, requests)


# The server ---------------------------------------------------------------------------------------


def serve(limited: bool, delay: float, letters: int) -> None:
    """Answer chat completions until killed; the first line printed is the port."""
    from aiohttp import web

    arrivals = deque()
    counts = Counter()
    now = 0
    most = 0
    message = {"role": "assistant", "content": "abc " * (letters // 4)}
    body = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    body |= {"usage": {"prompt_tokens": 2000, "completion_tokens": 1000}}

    def refused() -> bool:
        moment = time.monotonic()
        while arrivals and arrivals[0] <= moment - LIMITS[0][0]:
            arrivals.popleft()
        over = False
        for seconds, allowed in LIMITS:
            over = over or sum(t > moment - seconds for t in arrivals) >= allowed
        if limited and (over or now >= AT_ONCE):
            return True
        arrivals.append(moment)
        return False

    async def chat(request):
        nonlocal now, most
        question = await request.json()
        if refused():
            counts["429"] += 1
            return web.json_response({"error": {"message": "rate limit"}}, status=429)
        now += 1
        most = max(most, now)
        await asyncio.sleep(delay * (1 + question["seed"] % 11 / 10))
        now -= 1
        counts[str(question["seed"])] += 1
        return web.json_response(body)

    async def seen(_):
        return web.json_response({"counts": counts, "most": most})

    async def main():
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_get("/seen", seen)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def server(limited: bool = False, delay: float = 0.0, letters: int = 4000):
    """Its address, while it lives."""
    command = [sys.executable, __file__, "serve", json.dumps([limited, delay, letters])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def seen(address: str) -> dict:
    """What the server counted."""
    with urllib.request.urlopen(f"{address}/seen") as answer:
        return json.load(answer)


# The client ---------------------------------------------------------------------------------------


def ask(address: str, cache: str, calls: int, seconds: float, **limits) -> dict:
    """Ask `calls` questions, stop after so many seconds;
    what was achieved and what it cost this process.
    """
    from memcalib.inference.client import Client, Endpoint, run_async, run_many

    client = Client(Endpoint(model="m", base_url=f"{address}/v1", key_env="", **limits), cache)
    system = {"role": "system", "content": "Judge. " * 600}
    done = Counter()

    async def one(seed):
        messages = [system, {"role": "user", "content": f"{seed} " + "word " * 800}]
        return await client.ask(messages, temperature=0.0, max_tokens=1000, seed=seed)

    async def main():
        start = time.monotonic()
        cpu = time.process_time()
        async with client, asyncio.timeout(seconds):
            async for _ in run_many(range(calls), one, AT_ONCE):
                done[int(time.monotonic() - start)] += 1
        return time.process_time() - cpu, time.monotonic() - start

    async def warm_up():
        async with client:
            await one(0)

    run_async(warm_up())
    result = {}
    with suppress(TimeoutError):
        result["cpu"], result["wall"] = run_async(main())
    result["calls"] = client.totals.calls
    result["retries"] = client.totals.retries
    result["by_second"] = done
    return result


def in_a_process(*plan, **limits) -> subprocess.Popen:
    """`ask` in a process of its own."""
    command = [sys.executable, __file__, "ask", json.dumps([plan, limits])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# The three figures --------------------------------------------------------------------------------


def share_of_limit(folder: Path, seconds: int, delay: float = 2.0) -> float:
    """Successes a second over the allowed ones, once the first answers had time to come."""
    first = 5  # the longest answer takes four seconds
    with server(limited=True, delay=delay) as address:
        limits = {"rpm": RPM, "concurrency": AT_ONCE}
        out = ask(address, str(folder / "limit.sqlite"), 100_000, seconds + first + 0.5, **limits)
        server_state = seen(address)
    good = sum(
        count for second, count in out["by_second"].items() if first <= second < first + seconds
    )
    share = good / (RPM / 60 * seconds)
    print(
        f"limit of {RPM} requests a minute, {AT_ONCE} at once: {share:.1%} of it used over "
        f"{seconds} s,"
        f" {server_state['counts'].get('429', 0)} refusals, at most {server_state['most']} at once"
    )
    return share


def cost_per_call(folder: Path, calls: int = 2000) -> float:
    """Milliseconds of processor time of the client's process for one call."""
    with server() as address:
        out = ask(address, str(folder / "cost.sqlite"), calls, 600, concurrency=AT_ONCE)
    each = out["cpu"] / (calls - 1) * 1000
    print(
        f"client: {each:.2f} ms of processor time a call, {calls / out['wall']:.0f} calls a "
        "second, cache on disk"
    )
    return each


def doubled_calls(folder: Path, calls: int = 1000) -> int:
    """Calls that two processes on one cache made more than once."""
    with server(delay=0.02) as address:
        both = [
            in_a_process(address, str(folder / "two.sqlite"), calls, 600, concurrency=32)
            for _ in range(2)
        ]
        calls_made = [json.loads(process.communicate()[0])["calls"] for process in both]
        counts = seen(address)["counts"]
    doubled = sum(count > 1 for count in counts.values())
    print(
        f"two processes, {calls} questions, one cache: {calls_made[0]} + {calls_made[1]} calls, "
        f"{doubled} doubled"
    )
    assert len(counts) == calls
    return doubled


def main(seconds: int = 40) -> None:
    """Print the three figures."""
    with tempfile.TemporaryDirectory() as name:
        share = share_of_limit(Path(name), seconds)
        each = cost_per_call(Path(name))
        doubled = doubled_calls(Path(name))
    failed = [
        claim
        for claim, bad in (("limit", share < 0.95), ("cost", each >= 5), ("doubled", doubled > 0))
        if bad
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["serve"]:
        serve(*json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["ask"]:
        plan, limits = json.loads(sys.argv[2])
        print(json.dumps(ask(*plan, **limits)))
    else:
        main(*map(int, sys.argv[1:]))
