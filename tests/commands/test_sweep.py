"""`memcalib sweep` from the command line: candidates of a log or of a function, levels proposed by
a model, a dry run, a killed run that goes on, and bad input.
"""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import run

from memcalib.products.memory_logs.levels import practice_levels
from memcalib.products.memory_logs.sweep import FRAMINGS
from memcalib.products.micro.practice.memory_system import memory_assistant, practice_log
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer

ROLES = {"micro-memory-model": memory_assistant, "micro-levels": practice_levels}
FINDER = "memcalib.products.micro.practice.memory_system:retrieve"
QUESTIONS = 6


def write_log(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def server():
    with MicroServer([], roles=ROLES, practice=PracticeJudge(reads=True)) as started:
        yield started


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path / "log.jsonl", practice_log(QUESTIONS))


def options(log, server, out, *more) -> list[str]:
    """A sweep of four memories and none beside today's eight, as somebody types it."""
    words = ["sweep", log, "--out", out, "--consent", "terms", "--no-cache"]
    words += ["--top-k", "0,4", "--framing", "advice", "--today-framing", "authoritative"]
    words += ["--model", "micro-memory-model", "--base-url", server.base_url]
    words += ["--judge", "micro-judge", "--judge-url", server.base_url]
    return [str(word) for word in [*words, *more]]


def requests(server) -> int:
    return server.stats()["requests"]


def table_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "tables" / "sweep.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_page_table_picture_and_recommendation(capsys, log, server, tmp_path):
    out = tmp_path / "sweep"
    code, output, errors = run(capsys, *options(log, server, out, "--yes"))
    assert code == 0, errors
    assert "The best of those tried, top 4, authoritative" in output
    # a probe of the judge, and an answer and a judgment of each question that shows something
    assert requests(server) <= 1 + 2 * 3 * QUESTIONS
    names = [row["setting"] for row in table_rows(out)]
    assert names[0] == "as in the log, authoritative" and "top 0, authoritative" in names
    assert {"sweep.svg", "sweep.png"} == {path.name for path in (out / "figures").iterdir()}
    page = (out / "sweep.html").read_text(encoding="utf-8")
    assert '<figure class="sweep"><svg' in page and "top 4, authoritative" in page
    recommended = json.loads((out / "recommendation.json").read_text(encoding="utf-8"))
    assert recommended["setting"]["top_k"] == 4 and not recommended["beats_today"]
    before = requests(server)
    code, again, _ = run(capsys, *options(log, server, out, "--yes"))
    assert code == 0 and requests(server) == before
    assert again.partition("No setting")[2] == output.partition("No setting")[2]


def test_a_dry_run_asks_nothing_and_writes_nothing(capsys, log, server, tmp_path):
    before = files_below(tmp_path)
    code, output, errors = run(capsys, *options(log, server, tmp_path / "sweep", "--dry-run"))
    assert code == 0, errors
    assert requests(server) == 0 and files_below(tmp_path) == before
    for words in ("micro-memory-model", "top 4, authoritative", "Sent to micro-judge", "to ask"):
        assert words in output, words
    (line,) = [line for line in output.splitlines() if "micro-memory-model  " in line][-1:]
    assert str(3 * QUESTIONS) in line.split(), line  # today's, top 4, advice; top 0 asks nobody


def test_without_a_yes_nothing_is_sent(capsys, log, server, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, output, errors = run(capsys, *options(log, server, tmp_path / "sweep"))
    assert code == 1 and "--yes" in errors and "Sent to micro-memory-model" in output
    assert requests(server) == 0


def test_today_is_said_to_be_with_this_prompt_and_model(capsys, log, server, tmp_path):
    """Its score is not that of the answers in the log; beside the table and on the page."""
    means = "Your own prompt is not used"
    out = tmp_path / "sweep"
    code, output, errors = run(capsys, *options(log, server, out, "--dry-run"))
    assert code == 0 and means in output, errors
    for name, words in FRAMINGS.items():
        assert f"  {name}: {words}" in output
    code, output, errors = run(capsys, *options(log, server, out, "--yes"))
    assert code == 0, errors
    assert means in output.partition(" setting ")[2], "after the head of the table"
    assert means in (out / "sweep.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--framing", "--today-framing", "--role"])
def test_a_word_that_is_not_known_is_said_of_its_option(capsys, log, server, tmp_path, option):
    words = options(log, server, tmp_path / "sweep", "--dry-run", option, "autoritative")
    code, _, errors = run(capsys, *words)
    assert code == 2 and f"{option}: found 'autoritative'; allowed: " in errors
    assert "grid." not in errors and ("authoritative" in errors) == (option != "--role")


def test_candidates_as_a_memory_system_returns_them(capsys, log, server, tmp_path):
    """Both lists in mem0's own form give what bare lists give."""
    rows = practice_log(QUESTIONS)
    for row in rows:
        row["candidates"] = {"results": row["candidates"]}
        row["memories"] = {"results": row["memories"]}
    wrapped = write_log(tmp_path / "wrapped.jsonl", rows)
    forecasts = []
    for file in (log, wrapped):
        words = options(file, server, tmp_path / "sweep", "--dry-run")
        code, output, errors = run(capsys, *words)
        assert code == 0, errors
        assert f"candidates that did not enter the prompt: {2 * QUESTIONS}" in output
        forecasts.append(output.partition("Settings:")[2])
    assert forecasts[0] == forecasts[1]
    rows[0]["candidates"] = {"found": 3}
    broken = write_log(tmp_path / "broken.jsonl", rows)
    code, output, errors = run(capsys, *options(broken, server, tmp_path / "sweep", "--dry-run"))
    assert code == 0 and "1 row left out" in output and "candidates" in output, errors


def without_candidates(tmp_path) -> Path:
    rows = practice_log(QUESTIONS)
    for row in rows:
        del row["candidates"]
    return write_log(tmp_path / "plain.jsonl", rows)


def test_candidates_of_a_function(capsys, server, tmp_path):
    """The log says nothing of candidates; the practice memory system finds them again."""
    plain = without_candidates(tmp_path)
    out = tmp_path / "sweep"
    words = options(plain, server, out, "--yes", "--retrieve", FINDER)
    code, output, errors = run(capsys, *words)
    assert code == 0, errors
    assert "The best of those tried, top 4, authoritative" in output
    examples = (out / "examples.jsonl").read_text(encoding="utf-8").splitlines()
    assert {len(json.loads(line)["memory_blocks"]) for line in examples} == {10}
    kept = (out / "candidates.jsonl").read_text(encoding="utf-8")
    assert all(len(json.loads(line)["candidates"]) == 10 for line in kept.splitlines())
    before = requests(server)
    code, _, errors = run(capsys, *words)
    assert code == 0 and requests(server) == before, errors
    code, _, errors = run(capsys, *options(plain, server, tmp_path / "other", "--yes"))
    assert code == 1 and "candidates: found a log that does not say" in errors
    assert "true in all of them if no retrieved memory was left out" in errors


def test_a_row_without_a_query_is_said_to_be_left_out(capsys, server, tmp_path):
    rows = practice_log(QUESTIONS)
    del rows[2]["query"]
    log = write_log(tmp_path / "log.jsonl", rows)
    words = options(log, server, tmp_path / "sweep", "--dry-run", "--retrieve", FINDER)
    code, output, errors = run(capsys, *words)
    assert code == 0, errors
    assert "1 row left out" in output and "of 5 questions" in output


def test_equal_prompts_are_forecast_once_where_a_cache_keeps_them(capsys, log, server, tmp_path):
    """All ten candidates are the first ten: two settings, the same prompts."""
    words = options(log, server, tmp_path / "sweep", "--dry-run")
    words[words.index("0,4")] = "10,20"
    counts = []
    for cache in (["--no-cache"], ["--cache", str(tmp_path / "calls.sqlite")]):
        rest = [word for word in words if word != "--no-cache"]
        code, output, errors = run(capsys, *rest, *cache)
        assert code == 0, errors
        (line,) = [line for line in output.splitlines() if "micro-memory-model  " in line][-1:]
        counts.append([int(word) for word in line.split() if word.isdigit()])
    assert 4 * QUESTIONS in counts[0] and 3 * QUESTIONS not in counts[0]
    assert 3 * QUESTIONS in counts[1]


def test_a_dry_run_with_a_function_writes_nothing(capsys, server, tmp_path, monkeypatch):
    plain = without_candidates(tmp_path)
    before = files_below(tmp_path)
    words = options(plain, server, tmp_path / "sweep", "--dry-run", "--retrieve")
    code, output, errors = run(capsys, *words, FINDER)
    assert code == 0, errors
    assert "top 4, authoritative" in output and files_below(tmp_path) == before
    code, _, errors = run(capsys, *words, "my_memory:search")
    assert code == 1 and "my_memory:search is not imported in a dry run" in errors
    assert requests(server) == 0 and files_below(tmp_path) == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [3]", "retrieve: found int in the list for row 1; allowed: a list of texts, or"),
        ("return None", "retrieve: found NoneType for row 1; allowed: a list"),
        ("raise OSError('the store is closed')", "the store is closed"),
    ],
)
def test_a_function_that_finds_something_else(capsys, server, tmp_path, monkeypatch, body, message):
    (tmp_path / "my_memory.py").write_text(f"def search(query, k):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_memory", raising=False)
    plain = without_candidates(tmp_path)
    words = options(plain, server, tmp_path / "sweep", "--yes", "--retrieve", "my_memory:search")
    code, _, errors = run(capsys, *words)
    assert code == 1 and message in errors, errors
    assert requests(server) == 0 and not (tmp_path / "sweep" / "candidates.jsonl").exists()


def without_levels(rows: list[dict]) -> list[dict]:
    for row in rows:
        for memory in [*row["memories"], *row.get("candidates", ())]:
            memory.pop("level", None)
    return rows


def propose(log, server, out) -> list[str]:
    words = ["levels", log, "--out", out, "--consent", "terms", "--candidates", "--no-cache"]
    words += ["--model", "micro-levels", "--base-url", server.base_url, "--yes"]
    return [str(word) for word in words]


def test_levels_are_proposed_for_candidates_too(capsys, server, tmp_path):
    log = write_log(tmp_path / "log.jsonl", without_levels(practice_log(QUESTIONS)))
    code, _, errors = run(capsys, *options(log, server, tmp_path / "sweep", "--yes"))
    assert code == 1 and "levels: found a candidate without an ideal level in 6 of 6" in errors
    assert requests(server) == 0
    code, output, errors = run(capsys, *propose(log, server, tmp_path / "levels"))
    assert code == 0, errors
    proposals = (tmp_path / "levels" / "proposals.jsonl").read_text(encoding="utf-8")
    assert len(proposals.splitlines()) == 10 * QUESTIONS and "--levels" in output
    more = ("--yes", "--levels", tmp_path / "levels")
    code, output, errors = run(capsys, *options(log, server, tmp_path / "sweep", *more))
    assert code == 0, errors
    assert len(table_rows(tmp_path / "sweep")) == 4


def test_levels_for_what_a_function_finds(capsys, server, tmp_path, monkeypatch):
    """What a function found lies in the sweep's folder, and levels are proposed for that file."""
    (tmp_path / "bare_memory.py").write_text(
        "from memcalib.products.micro.practice.memory_system import retrieve\n\n\n"
        "def search(query, k):\n"
        "    return [memory['memory'] for memory in retrieve(query, k)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = write_log(tmp_path / "plain.jsonl", without_levels(practice_log(QUESTIONS)))
    out = tmp_path / "sweep"
    words = options(plain, server, out, "--yes", "--retrieve", "bare_memory:search")
    code, _, errors = run(capsys, *words)
    assert code == 1 and f"memcalib levels {out / 'candidates.jsonl'} --candidates" in errors
    code, _, errors = run(capsys, *propose(out / "candidates.jsonl", server, tmp_path / "levels"))
    assert code == 0, errors
    code, _, errors = run(capsys, *words, "--levels", tmp_path / "levels")
    assert code == 0, errors


def rows_in(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.rglob("*/rollouts.jsonl"))


@pytest.mark.parametrize("rows", [2, QUESTIONS + 2])
def test_a_killed_sweep_goes_on_and_pays_for_nothing_twice(tmp_path, rows):
    """Killed in the first setting and in the second one."""
    log = write_log(tmp_path / "log.jsonl", practice_log(QUESTIONS))
    out = tmp_path / "sweep"
    judge = PracticeJudge(reads=True)
    with MicroServer([], roles=ROLES, practice=judge, latency=0.05) as server:
        at_once = ("--set", "model.concurrency=2", "--set", "judge.concurrency=2")
        words = options(log, server, out, "--yes", *at_once, "--cache", tmp_path / "calls.sqlite")
        words.remove("--no-cache")
        command = [sys.executable, "-m", "memcalib", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        limit = time.time() + 120
        while time.time() < limit and process.poll() is None and rows_in(out) < rows:
            time.sleep(0.002)
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
        process.stdout.close()
        killed_at = rows_in(out)
        assert rows <= killed_at < 3 * QUESTIONS
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        stats = server.stats()
    # only replies that were on the wire when the process died may come again
    assert len(stats["asked_again"]) <= 2 and stats["answered"] == stats["keys"]
    assert rows_in(out) == 3 * QUESTIONS
    judged = [len(file.read_text().splitlines()) for file in out.rglob("*/judgments.jsonl")]
    assert judged == [QUESTIONS] * 3
    assert "The best of those tried, top 4, authoritative" in done.stdout


def test_a_folder_of_another_sweep_is_refused(capsys, log, server, tmp_path):
    out = tmp_path / "sweep"
    code, _, errors = run(capsys, *options(log, server, out, "--yes"))
    assert code == 0, errors
    before = requests(server)
    other = options(log, server, out, "--yes", "--today-framing", "facts")
    code, _, errors = run(capsys, *other)
    assert code == 1 and "today" in errors and requests(server) == before
    wider = options(log, server, out, "--yes", "--top-k", "0,2,4")
    code, _, errors = run(capsys, *wider)
    assert code == 0 and requests(server) == before + 2 * QUESTIONS, errors


def test_what_is_no_number_is_named(capsys, log, server, tmp_path):
    for option, value in (("--top-k", "1;3"), ("--threshold", "high"), ("--top-k", "-1")):
        words = options(log, server, tmp_path / "sweep", "--dry-run", option, value)
        code, _, errors = run(capsys, *words)
        assert code in (1, 2) and "allowed" in errors, errors


def test_answers_that_nobody_judged_yet_are_in_the_forecast(capsys, log, server, tmp_path):
    """As after a kill between the two: the answers are there, some of their judgments are not."""
    out = tmp_path / "sweep"
    code, _, errors = run(capsys, *options(log, server, out, "--yes"))
    assert code == 0, errors
    (first, *_) = sorted(out.rglob("*/judgments.jsonl"))
    lines = first.read_text(encoding="utf-8").splitlines(keepends=True)
    first.write_text("".join(lines[:-2]), encoding="utf-8")
    code, output, errors = run(capsys, *options(log, server, out, "--dry-run"))
    assert code == 0, errors
    to_ask = {}
    for line in output.splitlines():
        words = line.split()
        if words[:1] in (["model"], ["judge"]) and len(words) > 4:
            to_ask[words[0]] = int(words[3])
    assert to_ask == {"model": 0, "judge": 2}
    before = requests(server)
    code, _, errors = run(capsys, *options(log, server, out, "--yes"))
    assert code == 0 and requests(server) == before + 2, errors
