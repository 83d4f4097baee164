"""A judge that passed its exam and was changed since: the exam no longer speaks for it, in
terminal, page, card and results.
"""

import importlib
import json
import sys
from types import ModuleType

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
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.practice.server import MicroServer

PLUGIN = '''
import json
from pathlib import Path

from memcalib.products.exam.exam import INJECTION
from memcalib.scoring.judge_runs import Judge


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
    for setting in ("answers=120", "probes=5", "pairs=4", "rank_pairs=4", "real=0"):
        examine += ["--set", setting]
    code, text = call(*examine)
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
    code, planned = call(*examine, "--dry-run")
    assert (
        code == 0 and "a dry run does not import code: if the judge's code was changed" in planned
    )
    monkeypatch.setenv("MEMCALIB_ALLOW_IMPORT", "1")
    code, planned = call(*examine, "--dry-run")
    assert code == 0 and to_ask(planned) == to_ask(text) > 0, planned
    code, again = call(*examine)
    assert to_ask(again) == to_ask(text)
    assert to_ask(call(*examine, "--dry-run")[1]) == 0
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


# Judges of one's own, and how each may change without a change of its own file -------------------

HELPER = 'LEVEL = "B"\n'
JUDGES = {
    "imports a name": "from {lib}.sub.help import LEVEL\ndef judge(e, a): return LEVEL\n",
    "imports a module": "import {lib}.sub.help\ndef judge(example, answer): return 0\n",
    "imports when it judges": "def judge(e, a):\n    from {lib}.sub import help\n    return help\n",
    "imports what imports": "from {lib}.middle import x\ndef judge(example, answer): return x\n",
    "is of a class above": (
        "from {lib}.base import Base\nclass Judge(Base): pass\njudge = Judge()\n"
    ),
    "holds an object": "from {lib}.base import Base\nclass J:\n    def __init__(self):\n"
    "        self.inner = [Base()]\n    def __call__(self, e, a): return 0\njudge = J()\n",
    "is a part of a function": (
        "from functools import partial\nfrom {lib}.base import rate\njudge = partial(rate, 'B')\n"
    ),
    "is made by a function": "from {lib}.base import make\njudge = make('B')\n",
    "is decorated": "from {lib}.base import kept\n@kept\ndef judge(e, a): return 0\n",
    "is a method of an object": "from {lib}.base import Base\njudge = Base().__call__\n",
}


def write_judges(folder, lib, text, helper=HELPER):
    package = folder / lib
    (package / "sub").mkdir(parents=True)
    for name in ("__init__.py", "sub/__init__.py"):
        (package / name).write_text("")
    (package / "sub" / "help.py").write_text(helper)
    (package / "middle.py").write_text("from .sub.help import LEVEL as x\n")
    (package / "base.py").write_text(
        "from .sub import help\n\nclass Base:\n    def __call__(self, e, a): return help.LEVEL\n\n"
        "def rate(level, e, a): return level\n\n"
        "def make(level):\n    def judge(e, a): return level\n    return judge\n\n"
        "from functools import wraps\ndef kept(function):\n    @wraps(function)\n"
        "    def judge(e, a): return function(e, a) or help.LEVEL\n    return judge\n"
    )
    (folder / f"{lib}_judge.py").write_text(text.format(lib=lib))
    return importlib.import_module(f"{lib}_judge").judge


@pytest.mark.parametrize("kind", JUDGES)
def test_a_module_that_a_judge_imports_is_part_of_it(tmp_path, monkeypatch, kind):
    monkeypatch.syspath_prepend(str(tmp_path))
    lib = f"lib52{list(JUDGES).index(kind)}"
    judge = write_judges(tmp_path, lib, JUDGES[kind])
    before = json.loads(json.dumps(judge_binding(judge)))
    assert binding_changes(before, judge_binding(judge)) == []
    assert "help.py" in before["code"]
    (tmp_path / lib / "sub" / "help.py").write_text('LEVEL = "C"\n')
    assert binding_changes(before, judge_binding(judge)) == ["file help.py (edited)"]


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("judge = partial(rate, 'B')", "judge = partial(rate, 'C')", "arguments"),
        ("judge = make('B')", "judge = make('C')", "level"),
        ("judge = Table({'a': 1})", "judge = Table({'a': 2})", "table"),
        ("judge = Table(['B'] * 999)", "judge = Table(['C'] * 999)", "table"),
        ("judge = Table(Inner('B'))", "judge = Table(Inner('C'))", "table"),
        ("judge = Table(1).__call__", "judge = Table(2).__call__", "table"),
        ("judge = Set(1)", "judge = Set(2)", "table"),
        ("judge = Table(Level.BOUND)", "judge = Table(Level.CONTROL)", "table"),
        (
            "LEVEL = os.environ['T52'] + 'B'; judge = make(0)",
            "LEVEL = 'C'; judge = make(0)",
            "LEVEL",
        ),
    ],
)
def test_what_a_judge_was_made_with_is_part_of_it(monkeypatch, first, second, name):
    """Whatever decides on it: the environment, a table, an argument of the line that makes it."""
    monkeypatch.setenv("T52", "x")

    def made(line):
        module = ModuleType("made_in_a_test")
        exec(
            "import os\nfrom functools import partial\nfrom memcalib.problem import Level\n"
            "def rate(level, e, a): return level\n"
            "def make(level):\n    def judge(e, a): return level\n    return judge\n"
            "class Inner:\n    def __init__(self, level): self.level = level\n"
            "class Table:\n    def __init__(self, table): self.table = table\n"
            "    def __call__(self, e, a): return self.table\n"
            "class Set:\n    level = os.environ.get('LEVEL52')\n    __slots__ = ('table',)\n"
            "    def __init__(self, table): self.table = table\n"
            "    def __call__(self, e, a): return self.table\n" + line,
            vars(module),
        )
        module.__file__ = __file__  # one of a person's own
        monkeypatch.setitem(sys.modules, "made_in_a_test", module)
        return json.loads(json.dumps(judge_binding(module.judge)))

    assert binding_changes(made(first), made(first)) == []
    changes = binding_changes(made(first), made(second))
    assert len(changes) == 1 and changes[0].startswith(name), changes


def test_an_attribute_of_a_class_is_part_of_its_judge(monkeypatch):
    bindings = []
    for level in ("B", "C"):

        class Judge:
            name = "own"
            level_now = level

        bindings.append(judge_binding(Judge()))
    assert binding_changes(*bindings) == ['level_now (was "B", now "C")']


def test_a_file_in_a_folder_that_is_named_apart_is_seen(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rules52").mkdir()
    (tmp_path / "rules52" / "a.txt").write_text("A")
    text = "import os\ndef judge(e, a): return open(os.path.join('rules52', 'a.txt'))\n"
    (tmp_path / "joining52.py").write_text(text)
    judge = importlib.import_module("joining52").judge
    before = judge_binding(judge)
    (tmp_path / "rules52" / "a.txt").write_text("B")
    assert binding_changes(before, judge_binding(judge)) == ["file a.txt (edited)"]


def test_of_two_files_with_one_name_both_count(tmp_path):
    class Judge:
        files = (tmp_path / "a" / "x" / "rules.txt", tmp_path / "b" / "x" / "rules.txt")

    for file in Judge.files:
        file.parent.mkdir(parents=True)
        file.write_text("one")
    before = judge_binding(Judge())
    Judge.files[1].write_text("two")
    assert binding_changes(before, judge_binding(Judge())) == ["file b/x/rules.txt (edited)"]


def test_a_judge_of_this_package_needs_no_more_than_its_file():
    assert [*judge_binding(exact_judge)["code"]] == ["world.py"]


def test_keys_inside_of_a_judge_are_not_written_down():
    class Judge:
        def __init__(self):
            self.api_key = "gh" + "p_" + "a1B2" * 9
            self.headers = {"Authorization": f"Bearer {self.api_key}"}

    binding = judge_binding(Judge())
    assert binding["attributes"]["api_key"] == "***" and "a1B2" not in json.dumps(binding)
