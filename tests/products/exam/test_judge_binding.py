"""A judge that passed its exam and was changed since: the exam no longer speaks for it, in
terminal, page, card and results.
"""

import json

import pytest
from typer.testing import CliRunner

from memcalib.commands import cli
from memcalib.products.exam.exam import (
    EXAM_SCHEMA,
    exam_line,
    find_exam,
    starter_answers,
    why_withheld,
)
from memcalib.products.exam.judge_binding import binding_changes, judge_binding
from memcalib.inference.endpoint import Endpoint
from memcalib.io.records import write_jsonl
from memcalib.judge import JudgeConfig, LLMJudge
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.practice.server import MicroServer

PLUGIN = '''
import json
from pathlib import Path

from memcalib.products.exam.exam import INJECTION
from memcalib.judge import Judge


class LookedUp(Judge):
    """Knows the answers of the exam."""

    name = "looked-up"

    def judge(self, example, response):
        table = json.loads(Path("levels.json").read_text())
        levels = table.get(response.removesuffix(f"\\n\\n{INJECTION}"))
        return levels or dict.fromkeys(example.levels, 0)


judge = LookedUp()
'''


def call(*arguments):
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    error = done.exception
    shown = repr(error) if error and not isinstance(error, SystemExit) else ""
    return done.exit_code, done.output + shown


def write_exam(folder, judge, binding, date="2026-01-31", verdict="passed"):
    folder.mkdir(parents=True)
    exam = {
        "schema": EXAM_SCHEMA,
        "judge": judge,
        "binding": binding,
        "verdict": verdict,
        "date": date,
        "numbers": {"macro": 93.2},
    }
    (folder / "exam.json").write_text(json.dumps(exam))


def to_ask(text):
    """The readings that a forecast says are still to be asked for."""
    [line] = [line for line in text.splitlines() if line.startswith("judge looking_up_levels")]
    return int(line.split()[3])


def test_a_plug_in_that_changed_after_its_pass_counts_as_not_examined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looking_up_levels.py").write_text(PLUGIN)
    _, answers = starter_answers()
    table = {a.response: {name: int(level) for name, level in a.levels.items()} for a in answers}
    (tmp_path / "levels.json").write_text(json.dumps(table))
    examples = make_examples("short", 12, seed=4)
    write_jsonl(tmp_path / "data.jsonl", examples)
    examine = ["exam", "--judge", "looking_up_levels:judge", "--no-cache"]
    code, text = call(*examine, "--set", "answers=120", "--set", "probes=5")
    assert "looked-up: " in text and "macro accuracy 100.0 (9" in text
    with MicroServer(examples) as server:
        evaluate = ["evaluate", "data.jsonl", "--model", "micro-model", "--no-cache"]
        evaluate += ["--base-url", server.base_url, "--judge", "looking_up_levels:judge"]
        evaluate += ["--set", "sampling.seeds=[42]", "--out"]
        code, before = call(*evaluate, "before")
        (tmp_path / "levels.json").write_text("{}")
        code, after = call(*evaluate, "after")
    assert "not examined as it is now" not in before and "on 2" in before
    assert "not examined as it is now" in after and "file levels.json (edited)" in after
    assert "because the judge was changed since its exam: file levels.json (edited)" in after
    assert "file levels.json (edited)" in (tmp_path / "after/model-card.md").read_text()
    row = json.loads((tmp_path / "after/results.jsonl").read_text().splitlines()[0])
    assert row["judge"]["exam"]["changes_since"] == ["file levels.json (edited)"]
    assert row["corrected"] is None
    small = ("--set", "answers=120", "--set", "probes=5")
    code, planned = call(*examine, *small, "--dry-run")
    assert code == 0 and "a dry run imports no code: if the judge's code was changed" in planned
    monkeypatch.setenv("MEMCALIB_ALLOW_IMPORT", "1")
    code, planned = call(*examine, *small, "--dry-run")
    assert code == 0 and to_ask(planned) == to_ask(text) > 0, planned
    code, again = call(*examine, *small)
    assert to_ask(again) == to_ask(text)
    assert to_ask(call(*examine, *small, "--dry-run")[1]) == 0
    assert code == 3 and "it reads all of them again" in again and "looked-up: failed" in again


def test_a_model_under_another_prompt_is_told_that_its_exam_is_older(tmp_path):
    endpoint = Endpoint(model="some-judge", base_url="http://127.0.0.1:1/v1", key_env="")
    examined = LLMJudge(endpoint)
    now = LLMJudge(endpoint, JudgeConfig(prompt="footprint-2"))
    write_exam(tmp_path / "e", examined.name, judge_binding(examined))
    assert find_exam(examined.name, tmp_path, [judge_binding(examined)])["changes"] == []
    exam = find_exam(now.name, tmp_path, [judge_binding(now)])
    line = exam_line(now.name, exam)
    assert (
        "not examined as it is now" in line and "prompt (was footprint-1, now footprint-2)" in line
    )
    assert "changed since its exam" in why_withheld(exam, None)
    other = LLMJudge(endpoint.model_copy(update={"model": "another-judge"}))
    assert find_exam(other.name, tmp_path, [judge_binding(other)]) is None


def test_of_two_exams_the_one_of_the_judge_as_it_is_counts(tmp_path):
    new = {"code": {"j.py": "2"}, "attributes": {}}
    write_exam(tmp_path / "new", "j", new, date="2026-01-01", verdict="failed")
    write_exam(tmp_path / "old", "j", {"code": {"j.py": "1"}, "attributes": {}}, date="2026-01-02")
    exam = find_exam("j", tmp_path, [new])
    assert exam["verdict"] == "failed" and not exam["changes"]
    both = find_exam("j", tmp_path, [new, {"code": {"j.py": "3"}, "attributes": {}}])
    assert both["changes"] == ["file j.py (edited)"]


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (None, {"code": {"a.py": "1"}}, ["code that was not recorded"]),
        (None, {"model": "m"}, []),
        (
            {"code": {"a.py": "1"}},
            {"code": {"b.py": "1"}},
            ["file a.py (no longer used)", "file b.py (new)"],
        ),
        (
            {"settings": {"blind": True}},
            {"settings": {"blind": False}},
            ["blind (was true, now false)"],
        ),
    ],
)
def test_changes_are_named(before, now, changes):
    assert binding_changes(before, now) == changes
