"""Servers that wrap or withhold replies: judges, proposed levels, the stages of a build and answers
of a model, each through a proxy in front of the practice server.
"""

import json
import re

import pytest
from build_files import role_settings
from command_line import run
from wrapping_proxy import MODES, WrappingProxy

from memcalib.products.dataset.build import Build
from memcalib.io.records import read_jsonl, write_jsonl
from memcalib.problem import Judgment, Rollout
from memcalib.products.dataset.build_run import MemoryRun
from memcalib.products.memory_logs.levels import LevelProposal, practice_levels
from memcalib.products.micro.practice.mistakes import micro_roles
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import make_examples

ROWS = [
    {
        "id": "1",
        "query": "What can I bake for the office?",
        "memories": ["Is allergic to peanuts", "Plays chess on Sundays"],
        "answer": "Bake a lemon cake; it has no peanuts, to which you are allergic.",
    },
    {
        "id": "2",
        "query": "Which train do I take to Leeds?",
        "memories": ["Moved to Hull in May", "Wants short answers"],
        "answer": "Take the 7:05 from Hull, since you moved to Hull in May.",
    },
]
WRAPPED = [mode for mode in MODES if mode != "nullreason"]
REASON = r"the server sent only reasoning and no answer: {}"


@pytest.fixture(scope="module")
def server():
    roles = {"micro-levels": practice_levels, **micro_roles()}
    examples = make_examples("short", 6, 0)
    with MicroServer(examples, practice=PracticeJudge(reads=True), roles=roles) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server):
    with WrappingProxy(server.base_url) as proxy:
        yield proxy


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the log alone, to which a test goes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def footprints(capsys, url: str):
    judge = ["--judge", "micro-judge", "--judge-url", url, "--judge-key-env", ""]
    log = ["--log", "log.jsonl", "--consent", "trial", "--unlabelled", "--yes", "--no-cache"]
    return run(capsys, "evaluate", *log, *judge, "--out", "run")


def levels_of(folder) -> list[list]:
    return [[atom.actual for atom in row.atoms] for row in read_jsonl(folder, Judgment)]


@pytest.mark.parametrize("mode", WRAPPED)
def test_a_judge_whose_replies_are_wrapped_reads_as_without(capsys, folder, server, proxy, mode):
    before = proxy.changed
    code, _, err = footprints(capsys, proxy.url(mode))
    assert code == 0, err
    assert proxy.changed > before
    wrapped = levels_of("run/judgments.jsonl")
    (folder / "run").rename(folder / "wrapped")
    code, _, err = footprints(capsys, server.base_url)
    assert code == 0, err
    assert wrapped == levels_of("run/judgments.jsonl")
    assert not any(None in levels for levels in wrapped)


def test_a_judge_whose_replies_are_withheld_says_why_and_is_asked_once(capsys, folder, proxy):
    before = proxy.changed
    code, _, err = footprints(capsys, proxy.url("nullreason"))
    assert code == 3
    # one question to try the judge, and no second try, which would go the same way
    assert proxy.changed - before == 1 + len(ROWS)
    assert re.search(f"2 of 2 answers are not scored \\({REASON.format(2)}\\)", err)
    assert re.search(
        r"[\d,]+ characters of reasoning instead. Asking again usually gives the same", err
    )
    page = (folder / "run/report.html").read_text()
    assert "the server sent … characters as reasoning and no answer" in page


@pytest.mark.parametrize("mode", MODES)
def test_proposed_levels(capsys, folder, proxy, mode):
    model = ["--model", "micro-levels", "--base-url", proxy.url(mode), "--key-env", ""]
    log = ["log.jsonl", "--consent", "trial", "--yes", "--no-cache"]
    code, out, _ = run(capsys, "levels", *log, *model, "--out", "levels")
    rows = list(read_jsonl("levels/proposals.jsonl", LevelProposal))
    if mode in WRAPPED:
        assert code == 0 and "which agree on 4 of 4 memories" in out
        assert None not in {row.first for row in rows} | {row.second for row in rows}
    else:
        assert code == 3
        assert re.search(
            r"4 memories got no level in either pass, and the questions are not scored "
            r"\(the server sent \d+ characters as reasoning and no answer: [24]",
            out,
        )
        assert {row.first for row in rows} == {None}
        sheet = (folder / "levels/sheet.csv").read_text(encoding="utf-8-sig")
        assert "characters as reasoning" in sheet


@pytest.fixture(scope="module")
def built(tmp_path_factory, server):
    """The folder of a build whose replies come as they are."""
    return build_at(server.base_url, tmp_path_factory.mktemp("plain"))


def build_at(url: str, home):
    settings = role_settings(url)
    build = Build(micro=1, memory={"log": "micro"}, rows=8, seed=4, **settings)
    build_run = MemoryRun(build, home / "build", home / "calls.sqlite").agree(yes=True)
    build_run.run()
    return build_run.folder


@pytest.mark.parametrize("mode", ["think", "extrakey"])  # every mode: the judge above
def test_the_stages_of_a_build_read_wrapped_replies(tmp_path, proxy, built, mode):
    folder = build_at(proxy.url(mode), tmp_path)
    examples = (folder / "examples.jsonl").read_text()
    plain = (built / "examples.jsonl").read_text()
    questions = [json.loads(line)["question"] for line in examples.splitlines()]
    assert questions and questions == [json.loads(line)["question"] for line in plain.splitlines()]


def test_a_build_whose_replies_are_withheld_says_why(tmp_path, proxy):
    with pytest.raises(Exception, match="characters as reasoning and no answer"):
        build_at(proxy.url("nullreason"), tmp_path)


def evaluated(capsys, server, url: str):
    """A model behind the proxy, whose answers the practice server's judge reads."""
    write_jsonl("data.jsonl", make_examples("short", 6, 0))
    model = ["--model", "micro-model", "--base-url", url, "--key-env", ""]
    judge = ["--judge", "micro-judge", "--judge-url", server.base_url, "--judge-key-env", ""]
    sampling = ["--set", "sampling.seeds=[42]", "--set", "control=false"]
    where = ["--no-cache", "--out", "run"]
    return run(capsys, "evaluate", "data.jsonl", *model, *judge, *sampling, *where)


def test_answers_that_come_as_reasoning_are_missing_and_not_silent(capsys, folder, server, proxy):
    code, out, err = evaluated(capsys, server, proxy.url("nullreason"))
    assert code == 3
    assert "none of the 6 answers could be scored" in out
    assert re.search(f"6 of 6 answers are not scored \\({REASON.format(6)}\\)", err)
    page = (folder / "run/report.html").read_text()
    assert "the server sent … characters as reasoning and no answer" in page
    assert "Blank answers count as answers that use no memory" not in page
    assert not any(row.scored for row in read_jsonl("run/judgments.jsonl", Judgment))


def test_thoughts_of_generated_answers_are_taken_off_and_counted(capsys, folder, server, proxy):
    code, out, err = evaluated(capsys, server, proxy.url("think"))
    assert code == 0, err
    told = "Reasoning was removed from 6 of 6 answers (100.0 %)"
    assert told in out and told in (folder / "run/report.html").read_text()
    answers = list(read_jsonl("run/rollouts.jsonl", Rollout))
    assert not any("<think>" in row.response for row in answers)
    manifest = json.loads((folder / "run/manifest.json").read_text())
    assert manifest["usage"]["model"]["thoughts"] == 6
