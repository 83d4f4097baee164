"""The cache under several threads and processes, under violence,
and on files that are not what they should be.
"""

import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from memcalib.inference.cache import (
    _SCHEMA,
    CacheError,
    CallCache,
    call_key,
    clear_cache,
    default_path,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.floats(-9, 9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(a, b):
    """Equality of JSON values where 1 equals 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None:
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return not isinstance(a, dict | list) and a == b


@given(json_values, json_values)
def test_keys_are_equal_exactly_where_values_are(a, b):
    assert (call_key(x=a) == call_key(x=b)) == same(a, b)
    assert call_key(x=a) == call_key(x=json.loads(json.dumps(a)))


def test_key_takes_lone_surrogates_and_refuses_nan():
    assert call_key(x="\ud800") != call_key(x="\ud801")
    with pytest.raises(ValueError):
        call_key(x=float("nan"))


@given(st.text(st.characters(), max_size=50))
def test_text_comes_back_as_it_was(tmp_path_factory, text):
    cache = CallCache(tmp_path_factory.mktemp("cache") / "calls.sqlite")
    cache.put("k", {"text": text})
    assert cache.get("k") == {"text": text}
    cache.close()


def test_default_path(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMCALIB_CACHE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine" and CallCache().path == tmp_path / "mine"
    monkeypatch.delenv("MEMCALIB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "memcalib" / "calls.sqlite"


def test_nothing_is_created_before_it_is_needed(tmp_path):
    cache = CallCache(tmp_path / "a" / "calls.sqlite")
    assert cache.stats()["replies"] == 0 and clear_cache(cache.path) == 0
    assert not (tmp_path / "a").exists()


def test_modes_under_an_open_umask(tmp_path):
    old = os.umask(0)
    try:
        cache = CallCache(tmp_path / "new" / "calls.sqlite")
        cache.put("k", {"text": "private"})
        modes = {file.name: file.stat().st_mode & 0o777 for file in cache.files()}
        assert modes == dict.fromkeys(
            ["calls.sqlite", "calls.sqlite-wal", "calls.sqlite-shm"], 0o600
        )
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


def test_an_open_file_is_closed_to_others(tmp_path):
    CallCache(tmp_path / "calls.sqlite").put("k", {})
    (tmp_path / "calls.sqlite").chmod(0o644)
    cache = CallCache(tmp_path / "calls.sqlite")
    cache.get("k")
    assert cache.path.stat().st_mode & 0o777 == 0o600


# Claims -------------------------------------------------------------------------------------------


def test_one_of_many_threads_gets_the_claim(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    others = [CallCache(cache.path) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        won = list(
            pool.map(lambda k: (k % 10, [cache, *others][k % 5].claim(f"key {k % 10}")), range(200))
        )
    assert Counter(key for key, ours in won if ours) == dict.fromkeys(range(10), 1)


def test_a_lease_that_ran_out_is_free_and_one_that_runs_is_not(tmp_path):
    one, two = (CallCache(tmp_path / "calls.sqlite", lease=60) for _ in range(2))
    assert one.claim("k") and not two.claim("k")
    with two._connection() as db:
        db.execute("UPDATE claims SET expires = ?", (time.time() - 1,))
    assert two.claim("k") and not one.claim("k")
    one.release("k")  # no longer its own: changes nothing
    assert two.stats()["claims"] == 1
    one.put("k", {"text": "late, and still good"})
    assert two.get("k") and not two.claim("k")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("memcalib.inference.cache.time", clock)
    return clock


def test_a_lease_is_renewed_while_the_call_is_under_way(tmp_path, clock):
    one, two = (CallCache(tmp_path / "calls.sqlite", lease=60) for _ in range(2))
    assert one.claim("k") and clock.asleep.acquire(timeout=30)
    for _ in range(9):  # three leases
        assert not two.claim("k")
        clock.advance(20)
        assert clock.asleep.acquire(timeout=30), "renewed, and asleep again"
    one.release("k")
    assert two.claim("k")
    two.release("k")
    clock.advance(20)  # nothing is held: both threads end


def test_a_claim_from_another_machine_lasts_as_long_as_its_lease(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    with cache._connection() as db:
        db.execute(
            "INSERT INTO claims VALUES ('k', 'elsewhere/1 999999999 x', ?)", (time.time() + 60,)
        )
        db.execute(
            "INSERT INTO claims VALUES ('j', 'elsewhere/1 999999999 x', ?)", (time.time() - 1,)
        )
    assert not cache.claim("k") and cache.claim("j")


WORK = """
import os, sys, time
from memcalib.inference.cache import CallCache
cache, log = CallCache(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print("ready", flush=True)
for k in range(int(sys.argv[3])):
    key = str(k)
    while not (found := cache.get(key)) and not cache.claim(key):
        time.sleep(0.001)
    if not found:
        os.write(log, (key + "\\n").encode())
        cache.put(key, {"text": key * 100})
"""


def worker(path, log, count):
    command = [sys.executable, "-c", WORK, str(path), str(log), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_the_work_and_double_none(tmp_path):
    path = tmp_path / "new" / "calls.sqlite"
    log = tmp_path / "log"
    workers = [worker(path, log, 300) for _ in range(4)]  # all of them create the file at once
    assert [process.wait(60) for process in workers] == [0] * 4
    assert Counter(log.read_text().split()) == {str(k): 1 for k in range(300)}
    assert CallCache(path).stats()["replies"] == 300
    for process in workers:
        process.stdout.close()


def test_a_file_that_another_process_fills_between_two_looks_is_ours(tmp_path, monkeypatch):
    path = tmp_path / "calls.sqlite"
    looks = []
    connect = sqlite3.connect

    class Between(sqlite3.Connection):
        def execute(self, statement, *values):
            looks.append(statement)
            if len(looks) == 2:
                connect(path, isolation_level=None).executescript(_SCHEMA)
            return super().execute(statement, *values)

    monkeypatch.setattr(
        sqlite3, "connect", lambda *a, **options: connect(*a, **options, factory=Between)
    )
    assert CallCache(path).get("k") is None
    assert "sqlite_master" in looks[0] and "application_id" in looks[1]


def test_killed_at_any_moment_nothing_committed_is_lost(tmp_path):
    path = tmp_path / "calls.sqlite"
    log = tmp_path / "log"
    for lines in (4, 20, 60):
        with worker(path, log, 100_000) as process:
            assert process.stdout.readline() == "ready\n"
            while not log.exists() or log.read_bytes().count(b"\n") < lines:
                os.sched_yield()
            process.send_signal(signal.SIGKILL)
    cache = CallCache(path)
    call_counts = Counter(log.read_text().split())
    stored = cache.stats()["replies"]
    assert stored > 10 and len(call_counts) - stored in (0, 1)
    assert (
        sum(call_counts.values()) - stored <= 3
    )  # at most the one that was under way at each death
    assert all(cache.get(key) == {"text": key * 100} for key in list(call_counts)[:stored])
    last = str(stored)
    assert cache.get(last) is None and cache.claim(last)  # the dead process's claim is free at once


def test_a_forked_child_opens_the_file_for_itself(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    assert cache.claim("mine")

    def child(answers):
        answers.put([cache.claim("mine"), cache.claim("its"), cache.owner.split()[1]])
        cache.put("its", {"text": "child"})

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    parent_claim, its, pid = answers.get()
    process.join(20)
    assert (parent_claim, its, pid) == (False, True, str(process.pid))
    cache.put("mine", {"text": "parent"})
    assert cache.get("its") == {"text": "child"} and cache.stats()["replies"] == 2


def test_threads_write_and_read_at_once(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")

    def write(k):
        cache.put(str(k), {"text": "x" * k})
        return cache.get(str(k)) == {"text": "x" * k}

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, range(200)))


# Files that are not what they should be -----------------------------------------------------------


def damaged(path):
    cache = CallCache(path)
    for k in range(50):
        cache.put(str(k), {"text": "x" * 2000})
    cache.close()
    data = bytearray(path.read_bytes())
    data[100:8000] = bytes(7900)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"not a database" * 100), damaged])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, make):
    path = tmp_path / "calls.sqlite"
    make(path)
    with pytest.raises(CacheError, match=r"calls\.sqlite.*memcalib cache clear"):
        CallCache(path).get("1")
    clear_cache(path)
    cache = CallCache(path)
    cache.put("k", {"text": "new"})
    assert cache.get("k") == {"text": "new"}


def test_another_programs_database_is_left_alone(tmp_path):
    path = tmp_path / "accounts.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE money (amount)")
    db.close()
    before = path.read_bytes()
    for use in (lambda: CallCache(path).get("k"), lambda: clear_cache(path)):
        with pytest.raises(CacheError, match="another program"):
            use()
    assert path.read_bytes() == before


def test_a_text_file_is_not_deleted(tmp_path):
    path = tmp_path / "thesis.tex"
    path.write_text("years of work " * 100)
    with pytest.raises(CacheError, match=r"thesis.tex: .*choose another file"):
        clear_cache(path)
    assert path.read_text().startswith("years of work")


def test_a_later_version_is_refused(tmp_path):
    path = tmp_path / "calls.sqlite"
    cache = CallCache(path)
    with cache._connection() as db:
        db.execute("PRAGMA user_version = 7")
    cache.close()
    with pytest.raises(CacheError, match="version 7, but this version of memcalib reads version 1"):
        cache.get("k")


@pytest.mark.parametrize("path", ["", "file/calls.sqlite"])
def test_a_place_where_no_file_can_be(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"(directory|exists).*MEMCALIB_CACHE"):
        CallCache(tmp_path / path).get("k")


def test_a_full_disk_keeps_what_is_stored(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    cache.put("k", {"text": "old"})
    size = max(file.stat().st_size for file in cache.files())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, before[1]))
    try:
        with pytest.raises(CacheError, match=r"calls\.sqlite"):
            cache.put("big", {"text": "x" * 10**6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert cache.get("k") == {"text": "old"} and cache.get("big") is None
    cache.put("big", {"text": "later"})
    assert cache.stats()["replies"] == 2


def test_clear_leaves_running_claims_and_no_text(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    cache.put("k", {"text": "a very private sentence"})
    assert cache.claim("j") and cache.clear() == 1
    assert cache.stats() | {"bytes": 0} == {
        "path": str(cache.path),
        "replies": 0,
        "models": {},
        "claims": 1,
        "bytes": 0,
    }
    assert not any(b"very private" in file.read_bytes() for file in cache.files())


def test_no_thread_stays_when_nothing_is_held(tmp_path, clock):
    cache = CallCache(tmp_path / "calls.sqlite", lease=60)
    cache.claim("k")
    renewer = cache._renewer
    cache.release("k")
    assert renewer.is_alive() and clock.asleep.acquire(timeout=30)
    clock.advance(20)
    renewer.join(30)
    assert not renewer.is_alive() and cache._renewer is None
    assert cache.claim("k") and cache._renewer.is_alive() and clock.asleep.acquire(timeout=30)
    cache.release("k")
    clock.advance(20)


def test_a_file_that_is_no_cache_keeps_its_mode_and_is_not_called_damaged(tmp_path):
    text = tmp_path / "examples.jsonl"
    other = tmp_path / "other.db"
    text.write_text("{}\n" * 100)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (a)")
    for file in (text, other):
        file.chmod(0o644)
        with pytest.raises(CacheError, match="choose another file with MEMCALIB_CACHE") as caught:
            CallCache(file).get("key")
        assert file.stat().st_mode & 0o777 == 0o644 and "cache clear" not in str(caught.value)


def test_keys_of_earlier_caches_are_still_found():
    """A float without a fraction is hashed as an integer, at any depth;
    neither that nor the hash may ever change.
    """
    messages = [{"role": "user", "content": "Hello"}]
    call = {
        "model": "demo",
        "messages": messages,
        "settings": {"temperature": 1.0, "seed": 42, "stop": [1.0, -0.0]},
    }
    same_call = {
        "settings": {"stop": (1, 0), "seed": 42.0, "temperature": 1},
        "messages": messages,
        "model": "demo",
    }
    assert (
        call_key(**call)
        == call_key(**same_call)
        == ("0d142226aeda1ddfffbcbe13e5e10dded207263fb38e8052da869a3a054dca62")
    )
    for other in (
        {"temperature": True},
        {"temperature": "1"},
        {"temperature": 1.5},
        {"temperature": None},
    ):
        assert call_key(**call | {"settings": call["settings"] | other}) != call_key(**call), other


def far_claim(cache: CallCache, key: str, seconds: float) -> None:
    """A claim of another machine, whose clock was so far ahead."""
    with cache._connection() as db:
        claim = (key, "elsewhere/1 7 abcd", time.time() + seconds)
        db.execute("INSERT INTO claims VALUES (?, ?, ?)", claim)


def test_a_claim_of_a_clock_ahead_ends_with_a_lease_from_now(tmp_path, clock):
    """A killed process of a container with a clock a day ahead must not stop others for a day."""
    cache = CallCache(tmp_path / "calls.sqlite")
    with cache._connection() as db:
        claim = ("k", "elsewhere/1 7 abcd", clock.time() + 86460)
        db.execute("INSERT INTO claims VALUES (?, ?, ?)", claim)
    assert not cache.claim("k"), "its owner may be at work"
    assert cache.claimed("k")[1] <= 60
    clock.advance(59)
    assert not cache.claim("k")
    clock.advance(2)
    assert cache.claim("k")
    cache.release("k")
    clock.advance(30)


def test_a_living_owner_with_a_clock_ahead_keeps_its_claim(tmp_path, clock):
    cache = CallCache(tmp_path / "calls.sqlite")
    renewal = "INSERT OR REPLACE INTO claims VALUES ('k', 'elsewhere/1 7 abcd', ?)"
    for _ in range(9):  # it renews every third of a lease
        with cache._connection() as db:
            db.execute(renewal, (clock.time() + 86460,))
        assert not cache.claim("k")
        clock.advance(20)


def test_clear_removes_the_claims_of_everybody_who_is_not_seen_at_work(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    far_claim(cache, "far", 86460)
    far_claim(cache, "near", 30)
    assert cache.claim("own")
    cache.clear()
    with cache._connection() as db:
        assert [key for (key,) in db.execute("SELECT key FROM claims")] == ["own"]
    assert cache.claim("far") and cache.claim("near")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_cache_of_another_user_is_not_believed(tmp_path):
    """Whoever may write the file can put answers there that no model gave."""
    path = tmp_path / "calls.sqlite"
    CallCache(path).put("k", {"text": "made up"})
    os.chown(path, 65534, 65534)
    for use in (lambda c: c.get("k"), lambda c: c.put("k", {}), lambda c: c.claim("k")):
        with pytest.raises(CacheError, match="belongs to another user") as caught:
            use(CallCache(path))
        assert str(path) in str(caught.value) and "MEMCALIB_CACHE" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_what_another_user_lays_beside_the_cache_is_not_believed(tmp_path, suffix):
    """SQLite plays back a log that it finds beside its file."""
    path = tmp_path / "calls.sqlite"
    beside = tmp_path / f"calls.sqlite{suffix}"
    beside.write_bytes(b"")
    os.chown(beside, 65534, 65534)
    with pytest.raises(CacheError, match=f"{suffix}: it belongs to another user"):
        CallCache(path).get("k")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_link_beside_the_cache_counts_as_the_file_to_which_it_leads(tmp_path):
    (tmp_path / "theirs").write_bytes(b"")
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "calls.sqlite-journal").symlink_to("theirs")
    with pytest.raises(CacheError, match="theirs: it belongs to another user"):
        CallCache(tmp_path / "calls.sqlite").get("k")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_no_link_beside_the_cache_leads_over_one_of_another_user(tmp_path):
    """Whoever owns a link in the middle can point it elsewhere."""
    (tmp_path / "mine").write_bytes(b"")
    (tmp_path / "theirs").symlink_to("mine")
    os.chown(tmp_path / "theirs", 65534, 65534, follow_symlinks=False)
    (tmp_path / "calls.sqlite-journal").symlink_to("theirs")
    with pytest.raises(CacheError, match="theirs: it belongs to another user"):
        CallCache(tmp_path / "calls.sqlite").get("k")


def test_a_cache_that_can_only_be_read_says_so(tmp_path):
    cache = CallCache(tmp_path / "calls.sqlite")
    cache.put("k", {"text": "x"})
    with cache._connection() as db:
        db.execute("PRAGMA query_only = ON")
    with pytest.raises(CacheError, match="is read-only; .*--no-cache"):
        cache.put("j", {"text": "y"})
    assert cache.get("k") == {"text": "x"}


@pytest.mark.parametrize("row", ["", "nothing", "[]", "7", "null", "[" * 100_000, b"\xff\x00"])
def test_a_row_that_is_no_reply_is_asked_for_again(tmp_path, row):
    cache = CallCache(tmp_path / "calls.sqlite")
    with cache._connection() as db:
        db.execute("INSERT INTO replies VALUES ('k', 'm', 1.0, ?)", (row,))
    assert cache.get("k") is None and cache.claim("k")
    cache.put("k", {"text": "good"})
    assert cache.get("k") == {"text": "good"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_what_lies_beside_the_end_of_a_link_is_not_believed_either(tmp_path, suffix):
    """SQLite follows a link, and looks for its log beside the file at its end."""
    real = tmp_path / "shared" / "calls.sqlite"
    first = CallCache(real)
    first.put("k", {"text": "honest"})
    first.close()
    link = tmp_path / "home.sqlite"
    link.symlink_to(real)
    cache = CallCache(link)
    assert cache.get("k") == {"text": "honest"}
    cache.close()
    beside = real.with_name(real.name + suffix)
    beside.write_bytes(b"")
    os.chown(beside, 65534, 65534)
    with pytest.raises(CacheError, match=f"{suffix}: it belongs to another user"):
        CallCache(link).get("k")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("end", ["", "link.sqlite"])
def test_a_link_of_another_user_to_a_folder_is_not_followed(tmp_path, end):
    """Its owner can let it lead to a folder with other replies at any time."""
    real = CallCache(tmp_path / "real" / "calls.sqlite")
    real.put("k", {"text": "honest"})
    real.close()
    (tmp_path / "theirs").symlink_to("real")
    path = tmp_path / "theirs" / "calls.sqlite"
    if end:
        (tmp_path / end).symlink_to(path)
        path = tmp_path / end
    cache = CallCache(path)
    assert cache.get("k") == {"text": "honest"}
    cache.close()
    os.chown(tmp_path / "theirs", 65534, 65534, follow_symlinks=False)
    with pytest.raises(CacheError, match="theirs: it belongs to another user"):
        CallCache(path).get("k")


def test_a_damaged_file_behind_a_link_is_deleted_with_what_is_beside_it(tmp_path):
    real = tmp_path / "shared" / "calls.sqlite"
    link = tmp_path / "home.sqlite"
    real.parent.mkdir()
    link.symlink_to(real)
    for suffix in ("", "-wal", "-shm"):
        real.with_name(real.name + suffix).write_bytes(b"private text, but no database" * 40)
    clear_cache(link)
    assert list(real.parent.iterdir()) == []
    CallCache(link).put("k", {"text": "x"})
    assert CallCache(real).get("k") == {"text": "x"}


def test_a_text_behind_a_link_is_not_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work " * 100)
    (tmp_path / "calls.sqlite").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(CacheError):
        clear_cache(tmp_path / "calls.sqlite")
    assert (tmp_path / "thesis.tex").read_text().startswith("years of work")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("target", ["missing", "there"])
def test_a_link_of_another_user_is_not_followed(tmp_path, target):
    """It could make the cache anywhere, or name one of ours that is meant for something else."""
    end = tmp_path / "end.sqlite"
    if target == "there":
        CallCache(end).put("k", {"text": "x"})
    link = tmp_path / "calls.sqlite"
    link.symlink_to(end)
    os.lchown(link, 65534, 65534)
    with pytest.raises(CacheError, match="calls.sqlite: it belongs to another user"):
        CallCache(link).put("k", {"text": "y"})
    assert end.exists() is (target == "there")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_no_link_of_a_chain_is_of_another_user(tmp_path):
    CallCache(tmp_path / "end.sqlite").put("k", {"text": "planted"})
    (tmp_path / "second.sqlite").symlink_to(tmp_path / "end.sqlite")
    os.lchown(tmp_path / "second.sqlite", 65534, 65534)
    (tmp_path / "first.sqlite").symlink_to("second.sqlite")
    with pytest.raises(CacheError, match="second.sqlite: it belongs to another user"):
        CallCache(tmp_path / "first.sqlite").get("k")


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o622])
def test_a_cache_that_others_may_write_is_not_believed(tmp_path, mode):
    path = tmp_path / "calls.sqlite"
    cache = CallCache(path)
    cache.put("k", {"text": "x"})
    cache.close()
    path.chmod(mode)
    with pytest.raises(
        CacheError, match=rf"other users may write to it \(mode {mode:o}\).*chmod 600"
    ):
        CallCache(path).get("k")
    path.chmod(0o600)
    assert CallCache(path).get("k") == {"text": "x"}
