"""The journal: nothing that was paid for is lost, nothing is written twice,
whoever else is writing.
"""

import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.io.jsonl import Journal, append_to, rows_so_far, torn_line, whole_rows
from memcalib.problem import Rollout
from memcalib.io.records import DataError, iter_rows, read_jsonl


def row(name, **fields):
    return Rollout(example_id=name, model="demo", response="Yes.\u2028é", **fields)


def fill(path, names):
    with Journal(path, Rollout) as journal:
        for name in names:
            journal.append(row(name))


RIVAL = """
import sys
from memcalib.io.jsonl import Journal, rows_so_far
from memcalib.problem import Rollout
with Journal(sys.argv[1], Rollout) as journal:
    journal.append(Rollout(example_id="rival"))
    print("in", flush=True)
    sys.stdin.readline()
"""


def test_one_process_at_a_time_and_the_lock_dies_with_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    rival = subprocess.Popen(
        [sys.executable, "-c", RIVAL, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rival.stdout.readline() == b"in\n"
    before = path.read_bytes()
    with pytest.raises(OSError, match="rows.jsonl: another process is writing this file"):
        Journal(path, Rollout)
    assert path.read_bytes() == before
    rival.kill()
    rival.communicate()
    fill(path, ["mine"])
    assert [r.example_id for r in read_jsonl(path, Rollout)] == ["rival", "mine"]


def test_a_rewritten_file_is_locked_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    fill(path, ["a", "b"])
    with Journal(path, Rollout, again=lambda r: r.example_id == "a") as journal:
        rival = subprocess.run(
            [sys.executable, "-c", RIVAL, path], capture_output=True, text=True, input="\n"
        )
        assert rival.returncode == 1 and "another process is writing" in rival.stderr
        journal.append(row("a"))
    assert [r.example_id for r in read_jsonl(path, Rollout)] == ["b", "a"]


def test_a_row_is_replaced_in_its_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    fill(path, ["failed", "a", "b"])
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n"))
    failed = lambda r: r.example_id == "failed"  # noqa: E731
    with Journal(path, Rollout, again=failed) as journal:
        journal.append(row("c"))
        journal.replace(row("c", finish_reason="length"))
        journal.append(row("d"))
    rows = list(read_jsonl(path, Rollout))
    assert [(r.example_id, r.finish_reason) for r in rows] == [
        ("a", "stop"),
        ("b", "stop"),
        ("c", "length"),
        ("d", "stop"),
    ]


def test_a_row_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    fill(path, ["a", "b"])
    before = path.read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")

    def no_room(source, target):
        raise full

    with Journal(path, Rollout) as journal:
        monkeypatch.setattr("pathlib.Path.replace", no_room)
        with pytest.raises(OSError, match="rows.jsonl: No space left on device; its rows are safe"):
            journal.replace(row("a", finish_reason="length"))
    assert path.read_bytes() == before


def test_a_failed_opening_leaves_no_lock_and_no_open_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    for _ in range(3):
        with pytest.raises(DataError, match="rows.jsonl:1: example_id"):
            Journal(path, Rollout)
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    open_files = [os.readlink(link) for link in descriptors if os.path.exists(link)]
    assert str(path) not in open_files


@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_keeps_every_whole_row(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    fill(path, ["a", "b"])
    whole = path.read_bytes()
    rows = whole.splitlines(keepends=True)
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut])
    ends = [len(rows[0]), len(whole)]
    expected = sum(
        cut >= end - 1 for end in ends
    )  # a row that lacks nothing but its line's end is a row
    with Journal(path, Rollout) as journal:
        assert len(journal) == expected
        journal.append(row("c"))
    assert path.read_bytes() == b"".join([*rows[:expected], row("c").to_json().encode() + b"\n"])


def test_no_room_to_drop_failed_rows_loses_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    fill(path, ["a", "b"])
    before = path.read_bytes()
    (tmp_path / "rows.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="rows.jsonl: No space left on device; its rows are safe"):
        Journal(path, Rollout, again=lambda r: r.example_id == "a")
    assert path.read_bytes() == before


def test_shared_writers_and_a_second_journal_of_one_process(tmp_path):
    path = tmp_path / "rows.jsonl"
    with (
        Journal(path, Rollout, alone=False) as first,
        Journal(path, Rollout, alone=False) as second,
    ):
        first.append(row("a"))
        second.append(row("b"))
    with Journal(path, Rollout) as first, Journal(path, Rollout) as second:
        assert len(first) == len(second) == 2
    assert [r.example_id for r in read_jsonl(path, Rollout)] == ["a", "b"]


@given(cut=st.integers(0, 400))
def test_a_look_at_a_torn_file_sees_its_whole_rows_and_changes_nothing(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("look") / "rows.jsonl"
    fill(path, ["a", "b"])
    torn = path.read_bytes()[:cut]
    path.write_bytes(torn)
    rows_before_repair = list(rows_so_far(path, Rollout))
    torn_size = torn_line(path)
    assert path.read_bytes() == torn
    with Journal(path, Rollout) as journal:
        assert rows_before_repair == list(journal.rows())
    assert len(torn) - torn_size in (path.stat().st_size, path.stat().st_size - 1)


def test_damage_in_the_middle_is_no_torn_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    for text in (
        '{"exa\n{"example_id": "b"}\n',
        '{"exa\n',
        '{"example_id": "a"}\n{"seed": 1}',
        '{"exa\n{"exa',
    ):
        path.write_text(text)
        with pytest.raises(DataError, match="rows.jsonl:"):
            list(rows_so_far(path, Rollout))
    assert list(rows_so_far(tmp_path / "none.jsonl", Rollout)) == []


@given(
    st.lists(
        st.sampled_from(
            [b'{"step": 1}', b'{"a": [2]}', b"", b"7", b"{oops", b"\xff\x00", b'"text"']
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_whole_rows_are_those_that_can_be_read(tmp_path_factory, lines, closed):
    path = tmp_path_factory.mktemp("rows") / "steps.jsonl"
    content = b"\n".join(lines)
    if closed:
        content += b"\n"
    path.write_bytes(content)
    objects, damaged_lines = whole_rows(path)
    whole_lines = [line for line in lines if line.startswith(b'{"')]
    assert objects == [json.loads(line) for line in whole_lines]
    other_lines = [
        number for number, line in enumerate(lines, 1) if line and line not in whole_lines
    ]
    assert damaged_lines == [number for number in other_lines if closed or number < len(lines)]


def refuse_to_truncate(descriptor, size):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "half_line_stays", [False, True], ids=["taken back at once", "taken back by the next row"]
)
def test_a_row_never_continues_half_of_another(tmp_path, monkeypatch, half_line_stays):
    """The disk is full in the middle of a row, and in the second case does not even let the half of
    it be taken back.
    """
    path = tmp_path / "rows.jsonl"
    write = os.write
    truncate = os.ftruncate

    def write_ten_bytes(descriptor, data):
        if len(data[:20]) > 10:
            return write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(path, Rollout) as journal:
        journal.append(row("a"))
        whole = path.read_bytes()
        monkeypatch.setattr(os, "write", write_ten_bytes)
        if half_line_stays:
            monkeypatch.setattr(os, "ftruncate", refuse_to_truncate)
        for _ in range(2):
            with pytest.raises(OSError, match="rows.jsonl: .*; its 1 row is safe"):
                journal.append(row("b"))
        content = path.read_bytes()
        assert content.startswith(whole) and (len(content) > len(whole)) == half_line_stays
        assert row("b").key not in journal
        monkeypatch.setattr(os, "write", write)
        if half_line_stays:  # nothing may be added behind it
            with pytest.raises(OSError, match="Input/output error"):
                journal.append(row("b"))
            assert path.read_bytes() == content
        monkeypatch.setattr(os, "ftruncate", truncate)
        journal.append(row("b"))
        assert [r.example_id for r in journal.rows()] == ["a", "b"]


def test_what_a_failed_row_takes_back_is_its_own_alone(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    with Journal(path, Rollout, alone=False) as slow, Journal(path, Rollout, alone=False) as fast:
        write = os.write

        def let_the_fast_one_fill_the_disk(descriptor, data):
            monkeypatch.setattr(os, "write", write)
            fast.append(row("b"))
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", let_the_fast_one_fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            slow.append(row("a"))
    assert [r.example_id for r in read_jsonl(path, Rollout)] == ["b"]


def test_rows_of_another_process_behind_half_a_row_stay(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    with (
        Journal(path, Rollout, alone=False) as failing,
        Journal(path, Rollout, alone=False) as sound,
    ):
        write = os.write
        truncate = os.ftruncate
        calls = []

        def write_ten_bytes_once(descriptor, data):
            calls.append(data)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[:10])

        monkeypatch.setattr(os, "write", write_ten_bytes_once)
        monkeypatch.setattr(os, "ftruncate", refuse_to_truncate)
        with pytest.raises(OSError, match="No space left"):
            failing.append(row("a"))
        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "ftruncate", truncate)
        sound.append(row("b"))
        failing.append(row("c"))
    assert path.read_bytes()[10:] == f"{row('b').to_json()}\n{row('c').to_json()}\n".encode()
    with pytest.raises(DataError, match="rows.jsonl:1:"):
        list(read_jsonl(path, Rollout))


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def have_no_locks(descriptor, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("memcalib.io.jsonl.lock_descriptor", have_no_locks)
    fill(tmp_path / "rows.jsonl", ["a"])
    assert [r.example_id for r in read_jsonl(tmp_path / "rows.jsonl", Rollout)] == ["a"]


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_row_is_one_line_for_every_reader(tmp_path, character):
    path = tmp_path / "rows.jsonl"
    answer = Rollout(
        example_id="a", response=f"One.{character}Two.", **{f"x{character}": character}
    )
    with Journal(path, Rollout) as journal:
        journal.append(answer)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    assert Rollout.model_validate(json.loads(lines[0])) == answer


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name@v1.0", ("owner/name", "v1.0")),
        (f"owner/name@{'a' * 40}", ("owner/name", "a" * 40)),
    ],
)
def test_a_hub_id_may_name_its_commit(monkeypatch, source, asked):
    from datasets import IterableDataset

    calls = []

    def load(hub_id, *, split, streaming, revision):
        calls.append((hub_id, revision))
        return IterableDataset.from_generator(lambda: iter([{"split": split}]))

    monkeypatch.setattr("datasets.load_dataset", load)
    assert list(iter_rows(source, "test")) == [(1, {"split": "test"})]
    assert calls == [asked]


@pytest.mark.parametrize("source", ["@v1", "name@v1", "a/b/c@v1"])
def test_what_is_neither_file_nor_hub_id_is_named(source):
    with pytest.raises(FileNotFoundError, match=r"owner/name\[@revision\] id"):
        list(iter_rows(source))


@pytest.mark.parametrize("target", ["missing", "empty"])
def test_a_journal_follows_no_link(tmp_path, target):
    """A run folder may come from somebody else, and its files may be links to anywhere."""
    precious = tmp_path / "precious"
    if target != "missing":
        precious.write_text("")
    link = tmp_path / "run" / "rollouts.jsonl"
    link.parent.mkdir()
    link.symlink_to(precious)
    with pytest.raises(OSError, match="found a link to .*precious") as caught:
        Journal(link, Rollout)
    assert "rollouts.jsonl" in str(caught.value) and "allowed: a file" in str(caught.value)
    assert precious.exists() is (target != "missing")
    assert not precious.exists() or precious.read_text() == ""


@pytest.mark.parametrize("text", ["precious text without an end", "whole\n", ""])
def test_a_journal_writes_into_no_second_name(tmp_path, text):
    """A hard link is no link that opening could see: the file at its other end would be cut at its
    last line and would get the rows."""
    precious = tmp_path / "precious"
    precious.write_text(text)
    journal = tmp_path / "rollouts.jsonl"
    journal.hardlink_to(precious)
    with pytest.raises(OSError, match=r"found a file with 2 names \(hard links\)") as caught:
        Journal(journal, Rollout)
    assert str(journal) in str(caught.value) and "cp " in str(caught.value)
    assert precious.read_text() == text


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_text_is_added_to_no_link(tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_text("without an end")
    getattr(tmp_path / "steps.jsonl", link)(precious)
    with pytest.raises(OSError, match="steps.jsonl: found a .*link"):
        append_to(tmp_path / "steps.jsonl")
    assert precious.read_text() == "without an end"
    with append_to(tmp_path / "new.jsonl") as file:
        file.write("{}\n")
    with append_to(tmp_path / "new.jsonl") as file:
        file.write("ä\n")
    assert (tmp_path / "new.jsonl").read_text(encoding="utf-8") == "{}\nä\n"
