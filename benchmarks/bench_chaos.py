"""A whole evaluation through every fault: nothing lost, nothing asked twice after it succeeded,
the same table at the end.

python benchmarks/bench_chaos.py [--small] [--keep FOLDER]

The practice server runs in a process of its own, and so does each run of generate and judge. The
scenarios: without faults; with 5 % of each fault; killed (SIGKILL) at three random moments and
resumed; two processes on one cache; replies in odd wrapping and answers that are withheld; stopped
in the middle by Ctrl-C, by a key that is withdrawn, by a judge that goes down, by a disk that is
full while answers are judged; replies that are no HTTP; a first reply that is a login page or a
stream; a server that sends requests on to another host; waits that a server asks for; a training
whose judge function breaks off; against a server that allows 600 requests a minute and 64 at once.
A check that fails is printed with what it found; exit status 1.
"""

import argparse
import atexit
import errno
import hashlib
import json
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

KEY = "MEMCALIB_BENCH_KEY"
SEEDS = (42, 43, 44)
TIMEOUT = 5.0  # seconds for a reply of a server that sometimes hangs; at 2 a busy machine is late
PATIENT = 30.0  # of one that never does: a busy machine is no fault
STARTED: list[subprocess.Popen] = []


# In the client's process --------------------------------------------------------------------------


def client(plan: dict) -> dict:
    """Generate and judge into a folder; what it cost this process, and how many calls it made."""
    import aiohttp  # noqa: F401 (these are loaded before the clock starts)
    import openai.resources.chat  # noqa: F401

    from memcalib.inference.client import Endpoint
    from memcalib.problem import load_examples
    from memcalib.inference.rollout import EndpointBackend, Sampling, generate

    limits = {name: plan[name] for name in ("rpm", "concurrency", "attempts") if plan.get(name)}
    timeout = plan.get("timeout", PATIENT)
    connection = {
        "base_url": plan["url"],
        "key_env": KEY,
        "timeout": timeout,
        "backoff": 0.5,
        **limits,
    }
    examples = load_examples(plan["examples"])
    folder = Path(plan["folder"])
    sampling = Sampling(seeds=tuple(plan.get("seeds", SEEDS)), ask_again=("empty", "length"))
    backend = EndpointBackend(Endpoint(model="micro-model", **connection), Path(plan["cache"]))
    start = time.monotonic()
    cpu = time.process_time()
    generated = generate(examples, backend, sampling, folder / "rollouts.jsonl")
    totals = backend.totals
    steps = {"generate": time.monotonic() - start}
    if plan.get("judge", True):
        from memcalib.judge import JudgeConfig, LLMJudge
        from memcalib.scoring.judge_runs import judge_rollouts

        if plan.get("rows_on_disk"):
            fill_disk_after(plan["rows_on_disk"])
        judge = LLMJudge(
            Endpoint(model="micro-judge", **connection), JudgeConfig(), Path(plan["cache"])
        )
        judge_rollouts(examples, folder / "rollouts.jsonl", judge, folder / "judgments.jsonl")
        totals = totals + judge.totals
        steps["judge"] = time.monotonic() - start - steps["generate"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "cpu": time.process_time() - cpu,
        "seconds": time.monotonic() - start,
        "steps": steps,
        "peak": peak,
        "calls": totals.calls,
        "cached": totals.cached,
        "retries": totals.retries,
        "rows": generated.wanted,
    }


def fill_disk_after(rows: int) -> None:
    """From so many more rows of a journal on, the disk of the run folder is full."""
    from memcalib.io.jsonl import Journal

    append = Journal.append
    written = []

    def append_or_fail(journal, row):
        if len(written) >= rows:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(journal.path))
        written.append(row.key)
        append(journal, row)

    Journal.append = append_or_fail


def trained(plan: dict) -> dict:
    """A short training whose judge function breaks off at a share of its calls: a digest of the
    weights, and how often the judge was asked again.
    """
    import torch

    from memcalib.products.micro.policy import build_tokenizer, load_policy
    from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
    from memcalib.trainer.train_config import world_config
    from memcalib.training import train

    torch.set_num_threads(1)
    chance = random.Random(0)
    broken = []

    def judge(example, response):
        if chance.random() < plan["share"]:
            broken.append(example.id)
            raise ConnectionError("reset by peer")
        return exact_judge(example, response)

    config = world_config(WORLDS["short"], prompts=4, generations=4, steps=3, max_tokens=16)
    model = load_policy("cold-short")[0]
    examples = make_examples("short", 8, seed=5)
    trainer = train(model, config, examples, judge, tokenizer=build_tokenizer(), out=plan["folder"])
    digest = hashlib.blake2b(digest_size=16)
    for weights in model.state_dict().values():
        digest.update(weights.numpy().tobytes())
    rows = [json.loads(line) for line in (Path(plan["folder"]) / "steps.jsonl").open()]
    return {
        "weights": digest.hexdigest(),
        "broken": len(broken),
        "asked again": trainer.judge.counts["asked_again"],
        "unscored": sum(row["unscored"] for row in rows),
    }


# In the benchmark's process -----------------------------------------------------------------------


def start(role: str, plan: dict) -> subprocess.Popen:
    command = [sys.executable, __file__, "--role", role, "--plan", json.dumps(plan)]
    STARTED.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return STARTED[-1]


def stop_all() -> None:
    """End what is still running; also when this process is told to end."""
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.wait()


def run(plan: dict) -> dict:
    process = start("client", plan)
    return result_of(process)


def result_of(process: subprocess.Popen) -> dict:
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"a run ended with exit status {process.returncode}")
    return json.loads(output.splitlines()[-1])


@contextmanager
def server(examples: Path, faults: dict, **options):
    """The practice server in its own process: yields (its URL, a function that reads its book)."""
    process = start("server", {"examples": str(examples), "faults": faults, "options": options})
    try:
        url = process.stdout.readline().split()[3]
        for _ in range(2):
            process.stdout.readline()
        yield url, lambda: json.load(urllib.request.urlopen(url.replace("/v1", "/stats")))
    finally:
        process.kill()
        process.wait()


def serve_here(plan: dict) -> None:
    from memcalib.products.micro.practice.server import Faults, serve

    options = {"port": 0, **plan["options"]}
    serve(examples=plan["examples"], faults=Faults(**plan["faults"]), key_env=KEY, **options)


def outcome(folder: Path) -> dict:
    """What a run came to, without what may differ: answers, levels, rows at fault,
    and the printed tables.
    """
    from memcalib.evaluation.breakdown import score_text
    from memcalib.problem import Judgment, Rollout
    from memcalib.io.records import read_jsonl

    def digest(text):
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    rollouts = {
        row.key: (row.finish_reason, digest(row.response))
        for row in read_jsonl(folder / "rollouts.jsonl", Rollout)
    }
    judged = {}
    failed = 0
    for row in read_jsonl(folder / "judgments.jsonl", Judgment):
        judged[row.key] = [
            (atom.atom_id, atom.actual, atom.quote, atom.grounded) for atom in row.atoms
        ]
        failed += not row.scored
    table = score_text(folder / "judgments.jsonl", by=["domain"], as_json=True)
    failed += sum(finish == "error" for finish, _ in rollouts.values())
    rows = list(read_jsonl(folder / "rollouts.jsonl", Rollout))
    return {
        "rollouts": rollouts,
        "judgments": judged,
        "failed": failed,
        "table": table,
        "withheld": {row.key[:-1] for row in rows if row.withheld},
        "thoughts": sum(hasattr(r, "thoughts") for r in rows),
        "others": sum(hasattr(r, "answered_by") for r in rows),
        "refused": {r.key[:-1] for r in rows if getattr(r, "served_finish", "") == "refusal"},
    }


class Checks:
    """Claims and whether they held, printed as they are made."""

    def __init__(self):
        self.failed = 0

    def __call__(self, claim: str, value, allowed) -> None:
        holds = allowed(value) if callable(allowed) else value == allowed
        self.failed += not holds
        print(f"  {'ok  ' if holds else 'FAIL'} {claim}: {value}", flush=True)


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def report(used: dict) -> None:
    steps = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in used["steps"].items())
    each = 1000 * used["cpu"] / max(1, used["calls"])
    print(
        f"  {used['calls']} calls, {used['retries']} retries in {used['seconds']:.0f} s ({steps})"
    )
    print(f"  client CPU {each:.2f} ms a call, peak memory {used['peak']:.0f} MB", flush=True)


def same(check: Checks, got: dict, fault_free: dict, rows: int) -> None:
    check("answers", len(got["rollouts"]), rows)
    check("judgments", len(got["judgments"]), rows)
    check("rows that failed or are unscored", got["failed"], 0)
    check(
        "answers unlike the fault-free run",
        sum(v != fault_free["rollouts"].get(k) for k, v in got["rollouts"].items()),
        0,
    )
    check(
        "judgments unlike it",
        sum(v != fault_free["judgments"].get(k) for k, v in got["judgments"].items()),
        0,
    )
    check("the printed table is the same", got["table"] == fault_free["table"], True)


def book(check: Checks, stats: dict) -> None:
    check("asked again after a clean reply", len(stats["asked_again"]), 0)
    check("requests with two clean replies", stats["answered_twice"], 0)
    for line in stats["asked_again"][:3]:
        late = [f"{again - line['clean'][0]:.2f} s" for again in line["again"]]
        print(f"       {line['label']}, after {', '.join(late)}")
    faults = stats["faults"]
    print(
        f"  {sum(faults.values())} faults given: "
        + ", ".join(f"{name} {faults[name]}" for name in sorted(faults))
    )
    print(
        (
            f"  at most {stats['max_at_once']} at once, {stats['requests']} requests for "
            f"{stats['keys']} keys"
        ),
        flush=True,
    )


def killed(plan: dict, read, total: int, moments: list[float]) -> tuple[dict, list[float]]:
    """Run, SIGKILL when the server has given these shares of all clean replies,
    run again to the end.
    """
    times = []
    for moment in moments:
        process = start("client", plan)
        while process.poll() is None and read()["successes"] < moment * total:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        times.append(time.time())
        check_killed = process.wait()
        process.stdout.close()
        print(f"  killed after {moment:.0%} (exit status {check_killed})", flush=True)
    return run(plan), times


def stopped(plan: dict, read, enough=None) -> tuple[int, str]:
    """Run until it ends by itself, or until Ctrl-C after so many clean replies:
    (exit status, its standard error).
    """
    command = [sys.executable, __file__, "--role", "client", "--plan", json.dumps(plan)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    while enough is not None and process.poll() is None and read()["successes"] < enough:
        time.sleep(0.05)
    if enough is not None:
        process.send_signal(signal.SIGINT)
    error = process.communicate()[1]
    last = (error.strip().splitlines() or ["nothing said"])[-1]
    print(f"  ended with exit status {process.returncode}: {last[:150]}", flush=True)
    return process.returncode, error


def under_way(
    stats: dict, times: list[float], seconds: float = TIMEOUT, late: float = 1.0
) -> tuple[int, int]:
    """Requests asked again after a clean reply: (that reply came close to a kill, any other).

    Close is from `seconds` before, the client's own limit for a reply, to `late` after: the server
    may finish a reply for a client that is already dead, and the next process needs longer than
    that to send its first request.
    """
    just = 0
    other = 0
    for line in stats["asked_again"]:
        are_close = []
        gaps = []
        for clean in line["clean"][:-1]:
            waits = [kill - clean for kill in times]
            are_close.append(any(-late <= wait < seconds for wait in waits))
            gaps.append(f"{min(waits, key=abs):.2f} s")
        if all(are_close):
            just += 1
        else:
            other += 1
            print(f"       {line['label']}: clean {', '.join(gaps)} before the nearest kill")
    return just, other


def keys_in(folder: Path, key: str) -> list[str]:
    """Files below a folder that hold the key, in plain or as base64 or hex would show it."""
    import base64

    marks = [key.encode(), base64.b64encode(key.encode())[:-4], key.encode().hex().encode()]
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if any(mark in data for mark in marks):
            files.append(str(path.relative_to(folder)))
    return files


def main(small: bool, folder: Path) -> int:
    from memcalib.products.micro.practice.server import CONTENT, MALFORMED, TRANSPORT
    from memcalib.products.micro.world import make_examples
    from memcalib.io.records import write_jsonl

    count, large = (
        (100, {"large": 2, "large_characters": 1_000_000}) if small else (1500, {"large": 20})
    )
    key = os.environ[KEY] = "sk-" + secrets.token_hex(16)
    examples = folder / "examples.jsonl"
    check = Checks()
    began = time.monotonic()
    write_jsonl(examples, make_examples("long", count, 0, "test"))
    rows = count * len(SEEDS)
    five = dict.fromkeys((*TRANSPORT, *CONTENT), 0.05)
    five.update({"retry_after": 1, **large})

    def plan(name: str, url: str, cache: str = "", **settings) -> dict:
        return {
            "url": url,
            "examples": str(examples),
            "concurrency": 32,
            "folder": str(folder / name),
            "cache": str(folder / f"{cache or name}.cache" / "calls.sqlite"),
            **settings,
        }

    title(f"Without faults: {count} examples, {len(SEEDS)} seeds, {large['large']} large answers")
    with server(examples, large) as (url, read):
        used = run(plan("clean", url))
        stats = read()
    clean = outcome(folder / "clean")
    total = stats["successes"]
    report(used)
    check("answers", len(clean["rollouts"]), rows)
    check("rows that failed or are unscored", clean["failed"], 0)
    book(check, stats)
    check("peak memory below 1 GB (in MB)", round(used["peak"]), lambda peak: peak < 1000)

    title("With 5 % of each fault")
    with server(examples, five) as (url, read):
        used = run(plan("chaos", url, timeout=TIMEOUT))
        stats = read()
    report(used)
    same(check, outcome(folder / "chaos"), clean, rows)
    book(check, stats)
    alone = stats["requests"]
    check(
        "every class of fault was given", sorted({*TRANSPORT, *CONTENT} - set(stats["faults"])), []
    )
    check("peak memory below 1 GB (in MB)", round(used["peak"]), lambda peak: peak < 1000)

    title("With 5 % of each fault, killed three times")
    chance = random.Random(count)
    moments = sorted(chance.uniform(0.05, 0.95) for _ in range(3))
    with server(examples, five) as (url, read):
        used, times = killed(plan("killed", url, timeout=TIMEOUT), read, total, moments)
        stats = read()
    report(used)
    same(check, outcome(folder / "killed"), clean, rows)
    just, other = under_way(stats, times)
    check("asked again after a clean reply that a kill did not cut off", other, 0)
    check(
        "replies that were on their way when it was killed",
        just,
        lambda count: count <= 32 * len(times),
    )

    title("Two processes on one cache, with 5 % of each fault")
    with server(examples, five) as (url, read):
        both = []
        for name in ("first", "second"):
            shared = plan(name, url, cache="shared", timeout=TIMEOUT)
            both.append(start("client", shared))
        used = [result_of(process) for process in both]
        stats = read()
    for one in used:
        report(one)
    for name in ("first", "second"):
        same(check, outcome(folder / name), clean, rows)
    book(check, stats)
    check("requests, as many as one process sent", stats["requests"], alone)

    title("Replies in odd wrapping, answers that are withheld, pages in between")
    wrapped = ("plain_text", "thoughts", "prose", "gateway_header", "other_name")
    odd: dict = dict.fromkeys((*wrapped, "page"), 0.05)
    odd.update({"quiet": 64, "content_filter": 0.02, "tool_calls": 0.02, "refusal": 0.02, **large})
    with server(examples, odd) as (url, read):
        used = run(plan("odd", url))
        stats = read()
    report(used)
    odd_outcome = outcome(folder / "odd")
    held = odd_outcome["withheld"]
    judged = odd_outcome["judgments"]
    check("answers", len(odd_outcome["rollouts"]), rows)
    check("every kind was given", sorted({*odd} - {"quiet", *large} - set(stats["faults"])), [])
    check("withheld answers", len(held), lambda count: 0 < count < 0.1 * rows)
    check("rows that are unscored, as many as withheld", odd_outcome["failed"] - len(held), 0)
    check("answers behind thoughts are recorded", odd_outcome["thoughts"], lambda count: count > 0)
    check(
        "answers under another model's name are recorded",
        odd_outcome["others"],
        lambda count: count > 0,
    )
    refused = odd_outcome["refused"]
    check("answers that are refusals", len(refused), lambda count: 0 < count < 0.1 * rows)
    ordinary = [k for k in odd_outcome["rollouts"] if k[:-1] not in held | refused]
    check(
        "other answers unlike the fault-free run",
        sum(odd_outcome["rollouts"][k] != clean["rollouts"][k] for k in ordinary),
        0,
    )
    ordinary = [k for k in judged if k[:-1] not in held | refused]
    check(
        "other judgments unlike it",
        sum(judged[k] != clean["judgments"].get(k) for k in ordinary),
        0,
    )
    check("asked again after a clean reply", len(stats["asked_again"]), 0)

    title("With 5 % of each reply that is no HTTP")
    five_malformed = dict.fromkeys(MALFORMED, 0.05) | large
    with server(examples, five_malformed) as (url, read):
        used = run(plan("malformed", url))
        stats = read()
    report(used)
    same(check, outcome(folder / "malformed"), clean, rows)
    book(check, stats)
    check("every class of fault was given", sorted({*MALFORMED} - set(stats["faults"])), [])

    for name, faults, reason, requests in (
        ("The first reply is a login page", {"page": 1}, "usually /v1", 32),
        ("The first reply is a stream of events", {"stream": 1}, "usually /v1", 32),
        (
            "The server sends requests on to another host",
            {"moved": 0},
            "Nothing was sent there",
            32,
        ),
        ("It moves in the middle", {"moved": int(0.3 * total)}, "Nothing was sent there", total),
    ):
        title(name)
        name_of_folder = "first-" + hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        with server(examples, large | faults) as (url, read):
            code, error = stopped(plan(name_of_folder, url, attempts=2), read)
            stats = read()
        check("it ended as it should", code, 1)
        check("the reason is given", reason in error, True)
        check("requests", stats["requests"], lambda count, most=requests: 0 < count <= most)
        check("requests that reached the other host", stats["elsewhere"], 0)

    title("A server that asks for waits of 11 seconds")
    few_rows = folder / "waits.jsonl"
    write_jsonl(few_rows, make_examples("long", 8, 1, "test"))
    with server(few_rows, {"too_many_wait": 0.5, "retry_after": 11}) as (url, read):
        waiting = plan("waits", url, examples=str(few_rows), seeds=[42], judge=False)
        code, error = stopped(waiting, read)
        stats = read()
    check("it ended as it should", code, 0)
    check("the wait is said with its end", "waiting 11 s, until" in error, True)
    check("waits that were asked for", stats["faults"]["too_many_wait"], lambda count: count > 0)

    title("A training whose judge function breaks off in 5 % of its calls")
    runs = []
    for share in (0.0, 0.05):
        process = start("training", {"folder": str(folder / f"training-{share}"), "share": share})
        runs.append(result_of(process))
    calm, flaky = runs
    print(f"  {flaky['broken']} calls broke off, {flaky['asked again']} were asked again")
    check("calls that broke off", flaky["broken"], lambda count: count > 0)
    check("asked again, as many as broke off", flaky["asked again"] - flaky["broken"], 0)
    check("answers without a judgment", flaky["unscored"], 0)
    check("the weights are the same", flaky["weights"] == calm["weights"], True)

    for name, reason, faults, settings, enough in (
        (
            "The disk of the run is full in the middle of the judgments",
            "judgments.jsonl",
            {},
            {"rows_on_disk": rows // 3},
            None,
        ),
        ("Ctrl-C in the middle of the answers", "KeyboardInterrupt", {}, {}, 0.3 * total),
        ("Ctrl-C in the middle of the judgments", "KeyboardInterrupt", {}, {}, 0.7 * total),
        (
            "The key is withdrawn in the middle",
            "answered 401",
            {"revoked": int(0.3 * total)},
            {},
            None,
        ),
        (
            "The judge goes down in the middle",
            "judgments in a row failed in the same way",
            {"judge_down": int(0.2 * total)},
            {},
            None,
        ),
    ):
        title(name)
        name_of_folder = f"stopped-{name.split()[1]}-{enough}"
        with server(examples, large | faults, latency=0.2) as (url, read):
            code, error = stopped(plan(name_of_folder, url, attempts=2, **settings), read, enough)
            before = read()
        check("it ended as it should", code, -signal.SIGINT if enough else 1)
        check("the reason is given", reason in error, True)
        if "judge_down" in faults:
            spent = before["requests"] - before["successes"]
            check("calls to a judge that is down", spent, lambda count: count <= 2 * (20 + 2 * 32))
        url = urllib.parse.urlsplit(url)
        with server(examples, large, port=url.port) as (url, read):
            used = run(plan(name_of_folder, url, attempts=2))
            stats = read()
        report(used)
        same(check, outcome(folder / name_of_folder), clean, rows)
        check(
            "clean replies, before and after, as many as without a stop",
            before["successes"] + stats["successes"],
            total,
        )

    title("Against a server that allows 600 requests a minute, 64 at once")
    seeds = [42] if small else [*range(42, 50)]
    few = folder / "few.jsonl"
    write_jsonl(few, make_examples("long", 80, 0, "test"))
    with server(few, {}, rpm=600, at_once=64, latency=1.0) as (url, read):
        used = run(plan("rate", url, examples=str(few), rpm=600, seeds=seeds, judge=False))
        stats = read()
    report(used)
    check("calls", used["calls"], 80 * len(seeds))
    rate = 60 * used["calls"] / used["seconds"]
    check(
        "share of the allowed rate",
        round(rate / 600, 3),
        lambda share: share >= (0.85 if small else 0.95),
    )
    check("refused by the limit", stats["limited"], 0)
    if not small:
        check(
            "client CPU below 5 ms a call",
            round(1000 * used["cpu"] / used["calls"], 2),
            lambda each: each < 5,
        )

    title("Every file that the runs wrote")
    files = [p for p in folder.rglob("*") if p.is_file()]
    print(f"  {len(files)} files, {sum(p.stat().st_size for p in files) / 1e6:.0f} MB")
    check("files that hold the key", keys_in(folder, key), [])
    check(
        "caches that others may read",
        [p.name for p in files if ".sqlite" in p.name and p.stat().st_mode & 0o077],
        [],
    )
    print(f"\n{check.failed} checks failed; {time.monotonic() - began:.0f} s in all")
    return int(check.failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="100 examples and small large answers: two minutes"
    )
    parser.add_argument("--keep", type=Path, help="keep the files of all runs in this folder")
    parser.add_argument("--role", choices=["client", "server", "training"], help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        # A shell that starts this in the background has Ctrl-C ignored, and processes inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        roles = {"server": serve_here, "client": client, "training": trained}
        print(json.dumps(roles[options.role](options.plan)))
        raise SystemExit
    atexit.register(stop_all)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        raise SystemExit(main(options.small, options.keep))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            raise SystemExit(main(options.small, Path(temporary)))
