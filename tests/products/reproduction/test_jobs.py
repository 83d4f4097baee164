"""A job's record says whether its result stands; what was killed goes on, what changed begins anew,
and nothing is lost.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memcalib.io.records import ForeseenError
from memcalib.products.reproduction import code_hash
from memcalib.products.reproduction.jobs import (
    RECORD,
    STARTED,
    Job,
    Jobs,
    alone,
    read_json,
    resolved_word,
    run_job,
    unpack_rows,
)

RUN = (
    "import sys; from memcalib.products.reproduction.jobs import job_main; "
    "sys.exit(job_main(sys.argv[1:]))"
)


def shell(name: str, script: str, **fields) -> Job:
    return Job(name, fields.pop("kind", "say"), ("sh", "-c", script), {"of": name}, **fields)


def chain(root: Path) -> tuple[Job, Job]:
    first = shell("a/first", f"echo 1 >> {root}/a/first/n", makes=("n",))
    second = shell("second", f"cat {root}/a/first/n > {root}/second/n", reads=("a/first",))
    return first, second


def run_all(jobs: Jobs) -> list[str]:
    names = jobs.to_do()
    jobs.write(names)
    for name in names:
        run_job(jobs.root, name)
    return names


def test_what_is_done_is_not_done_again_wherever_the_folder_lies_and_however_old_its_files(
    tmp_path,
):
    jobs = Jobs(tmp_path / "one", chain(tmp_path / "one"))
    assert run_all(jobs) == ["a/first", "second"] and run_all(jobs) == []
    clone = tmp_path / "clone"
    (tmp_path / "one").rename(clone)
    for path in clone.rglob("*"):
        os.utime(path, (0, 0) if "first" in str(path) else None)  # as a checkout leaves them
    moved = [replace(job, command=("false",)) for job in chain(clone)]
    assert Jobs(clone, moved).to_do() == []


@pytest.mark.parametrize("part", ["settings", "data", "code"])
def test_each_part_of_the_identity_makes_a_result_stale_and_all_that_reads_it(tmp_path, part):
    first, second = chain(tmp_path)
    run_all(Jobs(tmp_path, (first, second)))
    value = {"of": "a/first", "lr": 2} if part == "settings" else "other"
    later = Jobs(tmp_path, (replace(first, **{part: value}), second))
    state, reason = later.state("a/first")
    assert state == "stale" and ("lr" if part == "settings" else part) in reason
    assert later.to_do(["second"]) == ["a/first", "second"]
    assert run_all(later) == ["a/first", "second"]
    assert (tmp_path / "stale" / "a" / "first" / "n").read_text() == "1\n", "kept, not deleted"
    assert (tmp_path / "a" / "first" / "n").read_text() == "1\n", "not gone on with"


def test_only_the_same_settings_can_be_accepted_and_both_identities_are_kept(tmp_path):
    first, second = chain(tmp_path)
    run_all(Jobs(tmp_path, (first, second)))
    made = read_json(tmp_path / "a" / "first" / RECORD)["identity"]
    other_code = Jobs(tmp_path, (replace(first, code="later"), second))
    assert other_code.accept("names moved") == ["a/first", "second"]
    assert other_code.to_do() == []
    record = read_json(tmp_path / "a" / "first" / RECORD)
    assert record["identity"] == made and record["accepted"]["reason"] == "names moved"
    assert record["accepted"]["identity"]["code"] == "later"
    other = Jobs(tmp_path, (replace(first, settings={"of": "a/first", "lr": 9}), second))
    assert "a/first" not in other.accept("no")
    assert other.state("a/first")[0] == "stale"


def test_a_result_that_is_gone_is_made_again_only_where_something_reads_it(tmp_path):
    first, second = chain(tmp_path)
    jobs = Jobs(tmp_path, (first, second))
    run_all(jobs)
    (tmp_path / "a" / "first" / "n").unlink()
    assert jobs.to_do() == []
    third = shell("third", "true", reads=("a/first",))
    assert Jobs(tmp_path, (first, second, third)).to_do() == ["a/first", "third"]


def test_a_row_that_nothing_produces_is_named():
    with pytest.raises(ValueError, match="table reads no/such/job, which no job of the plan"):
        Jobs("x", [shell("table", "true", reads=("no/such/job",))])
    with pytest.raises(ValueError, match="two different jobs with this name"):
        Jobs("x", [shell("a", "true"), shell("a", "false")])


def test_a_command_that_fails_leaves_its_last_words_and_its_files(tmp_path):
    script = f"echo kept > {tmp_path}/a/half; echo 'step 3'; echo 'no room left'; exit 7"
    jobs = Jobs(tmp_path, [shell("a", script)])
    jobs.write(["a"])
    with pytest.raises(ForeseenError, match=r"no room left \(exit code 7"):
        run_job(tmp_path, "a")
    assert jobs.state("a")[0] == "failed" and "no room left" in jobs.state("a")[1]
    assert (tmp_path / "a" / "half").read_text() == "kept\n"
    lacking = Jobs(tmp_path, [shell("b", "true", makes=("policy",))])
    lacking.write(["b"])
    with pytest.raises(ForeseenError, match="ended without policy"):
        run_job(tmp_path, "b")
    missing = Jobs(tmp_path, [Job("c", "say", ("no-such-program",), {})])
    missing.write(["c"])
    with pytest.raises(ForeseenError, match="no-such-program"):
        run_job(tmp_path, "c")


def test_an_exit_code_that_is_no_failure_is_recorded(tmp_path):
    jobs = Jobs(tmp_path, [shell("a", "exit 3", exits=(0, 3))])
    jobs.write(["a"])
    run_job(tmp_path, "a")
    assert jobs.state("a")[0] == "done" and jobs.record("a")["exit"] == 3


def started(root: Path, name: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(root), name], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (root / name / "n").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    return process


def test_a_killed_job_goes_on_with_what_it_had_and_its_command_dies_with_it(tmp_path):
    script = f"echo x >> {tmp_path}/a/n; test -e {tmp_path}/go || sleep 60"
    job = shell("a", script, makes=("n",))
    jobs = Jobs(tmp_path, [job])
    jobs.write(["a"])
    process = started(tmp_path, "a")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert jobs.state("a") == ("unfinished", "") and (tmp_path / "a" / STARTED).is_file()
    (tmp_path / "go").touch()
    run_job(tmp_path, "a")
    assert (tmp_path / "a" / "n").read_text() == "x\nx\n", "it went on in its folder"
    assert not (tmp_path / "a" / STARTED).exists()


def test_half_a_result_of_other_settings_is_not_gone_on_with(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "n").write_text("old\n")
    (tmp_path / "a" / STARTED).write_text(json.dumps({"identity": {"settings": {"of": "b"}}}))
    jobs = Jobs(tmp_path, [shell("a", f"echo new >> {tmp_path}/a/n", makes=("n",))])
    jobs.write(["a"])
    run_job(tmp_path, "a")
    assert (tmp_path / "a" / "n").read_text() == "new\n"
    assert (tmp_path / "stale" / "a" / "n").read_text() == "old\n"


def test_a_job_started_twice_runs_once(tmp_path):
    jobs = Jobs(tmp_path, [shell("a", f"echo x >> {tmp_path}/a/n; sleep 60")])
    jobs.write(["a"])
    process = started(tmp_path, "a")
    try:
        with pytest.raises(ForeseenError, match="another process is working on a"):
            run_job(tmp_path, "a")
    finally:
        process.terminate()
        assert process.wait(20) == 130
    assert (tmp_path / "a" / "n").read_text() == "x\n"
    with alone(tmp_path, "a", "it is free again"):
        pass


def test_a_chosen_value_takes_its_place_in_a_command(tmp_path):
    (tmp_path / "search" / "gdpo").mkdir(parents=True)
    (tmp_path / "search" / "gdpo" / "choice.json").write_text('{"lr": 2e-06}')
    assert resolved_word("train.lr=@{search/gdpo:lr}", tmp_path) == "train.lr=2e-06"
    assert resolved_word("plain=@{}", tmp_path) == "plain=@{}"
    with pytest.raises(ForeseenError, match="run search/grpo first"):
        resolved_word("@{search/grpo:lr}", tmp_path)


def test_words_about_the_code_do_not_make_a_result_stale(tmp_path, monkeypatch):
    """A docstring or a comment decides no result; a text that the code uses does."""
    file = tmp_path / "module.py"
    monkeypatch.setattr(code_hash, "code_modules", lambda source: {"module": file})

    def hashed(text):
        file.write_text(text, encoding="utf-8")
        return code_hash.code_hash("import module")

    old = '"""Old."""\n# old\ndef f():\n    """Old\n    words."""\n    return """a\nb"""\n'
    assert hashed(old) == hashed(old.replace("Old", "New").replace("# old", "# new"))
    assert hashed(old) == hashed(old.replace('    """Old\n    words."""\n', ""))
    assert hashed(old) != hashed(old.replace("a\nb", "a\nc"))
    assert hashed(old) != hashed(old.replace("def f", "def g"))
    form = 'class Reply:\n    """Old."""\n'
    assert hashed(form) != hashed(form.replace("Old", "New"))  # a model is asked by it
    prompt = 'PROMPT = """Old"""\n'
    assert hashed(prompt) != hashed(prompt.replace("Old", "New"))


def packed(folder: Path, name: str, content: bytes) -> None:
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps({"rows": [name]}))
    if not name.startswith("/"):
        (folder / "rows" / f"{name}.gz").write_bytes(gzip.compress(content, 9))


def test_rows_that_become_far_too_large_are_not_unpacked(tmp_path):
    folder = tmp_path / "made"
    packed(folder, "a.jsonl", b" " * 20_000_000)
    with pytest.raises(ForeseenError, match="a.jsonl.gz: .*allowed: at most 500 times") as caught:
        unpack_rows(folder)
    assert "times as many" in str(caught.value) and not (folder / "a.jsonl").exists()
    packed(folder, "a.jsonl", b" " * 9_000_000)
    unpack_rows(folder)
    assert (folder / "a.jsonl").stat().st_size == 9_000_000


def test_rows_that_a_job_promises_are_not_lost_if_they_are_packed(tmp_path):
    jobs = Jobs(tmp_path, [shell("made", "true", makes=("a.jsonl", "b.jsonl"))])
    packed(tmp_path / "made", "a.jsonl", b"{}\n")
    assert jobs.lost("made") == ["b.jsonl"]


@pytest.mark.parametrize("name", ["../outside.jsonl", "/outside.jsonl"])
def test_rows_are_put_back_into_their_own_folder_alone(tmp_path, name):
    """The record of a clone may be a stranger's."""
    folder = tmp_path / "made"
    packed(folder, name, b"{}\n")
    with pytest.raises(ForeseenError, match="rows: found .*outside.jsonl.*allowed: files in this"):
        unpack_rows(folder)
    assert not (tmp_path / "outside.jsonl").exists()
