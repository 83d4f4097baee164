"""A judge of one's own in a training: the one that began it is the one that goes on."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from command_line import run

SMALL = [
    "train.steps=3",
    "train.prompts=2",
    "train.generations=4",
    "train.eval_every=0",
    "train.save_every=1",
    "data.world={name: short, train: 8, validation: 0, test: 4, demonstrations: 48}",
]
JUDGES = """
from memcalib.problem import Level, judgment_for

calls = 0


class Judge:
    name = "hj"
    stops_at = 12

    def __call__(self, example, response):
        global calls
        calls += 1
        if calls > self.stops_at:
            STOP
        return judgment_for(example, dict.fromkeys(example.levels, Level.BOUND), judge=self.name)


class Constant(Judge):
    stops_at = 10**9


first = Judge()
second = Constant()
"""


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_judges52", None)


def write_judges(work: Path, stop: str) -> None:
    (work / "own_judges52.py").write_text(JUDGES.replace("STOP", stop))
    sys.modules.pop("own_judges52", None)


def train(capsys, judge: str, *more) -> tuple[int, str, str]:
    words = ["train", "micro", "--method", "grpo", "--out", "t", "--no-cache"]
    for setting in (*SMALL, f"judge=own_judges52:{judge}"):
        words += ["--set", setting]
    return run(capsys, *words, *more)


def break_off(capsys, work: Path) -> None:
    """A training whose judge breaks off in the middle."""
    write_judges(work, "raise RuntimeError('the judge broke off')")
    code, _, errors = train(capsys, "first")
    assert code == 1 and "the judge broke off" in errors


def recorded(work: Path) -> str:
    return yaml.safe_load((work / "t" / "recipe.yaml").read_text())["judge"]


def test_another_judge_of_the_same_name_does_not_go_on(capsys, work):
    break_off(capsys, work)
    assert recorded(work) == "own_judges52:first"
    for more in (["--resume"], ["--resume-anyway"]):
        code, _, errors = train(capsys, "second", *more)
        assert code == 1, "it is another judge, whatever its name is"
        assert "own_judges52:first" in errors and "own_judges52:second" in errors
        assert recorded(work) == "own_judges52:first"


def test_a_judge_whose_code_was_changed_goes_on_only_when_told_so(capsys, work):
    break_off(capsys, work)
    write_judges(work, "return None")
    (work / "own_judges52.py").write_text(JUDGES.replace("stops_at = 12", "stops_at = 10**9"))
    code, _, errors = train(capsys, "first", "--resume")
    assert code == 1 and "file own_judges52.py (edited)" in errors, errors
    assert "--resume-anyway" in errors and "another folder" in errors
    code, _, errors = train(capsys, "first", "--resume-anyway")
    assert code == 0, errors
    manifest = json.loads((work / "t" / "manifest.json").read_text())
    assert len(manifest["judge_versions"]) == 2
    assert "file own_judges52.py (edited)" in "".join(manifest["notes"])


def test_the_same_judge_goes_on(capsys, work):
    break_off(capsys, work)
    sys.modules["own_judges52"].calls = -(10**9)
    code, _, errors = train(capsys, "first", "--resume")
    assert code == 0, errors
    manifest = json.loads((work / "t" / "manifest.json").read_text())
    assert len(manifest["judge_versions"]) == 1


@pytest.mark.parametrize(
    "stop",
    ["raise SystemExit(0)", "raise SystemExit", "import sys; sys.exit()", "raise GeneratorExit"],
)
def test_a_judge_that_ends_the_program_ends_a_training_with_an_error(capsys, work, stop):
    write_judges(work, stop)
    code, _, errors = train(capsys, "first")
    assert code == 1 and "Exit" in errors and "own_judges52" in errors, errors
    assert "--resume" in errors


def test_a_judge_that_ends_the_program_ends_an_evaluation_with_an_error(capsys, work):
    from memcalib.io.records import write_jsonl
    from memcalib.products.micro.world import WORLDS, make_examples
    from memcalib.products.micro.practice.server import MicroServer

    write_judges(work, "raise SystemExit(0)")
    examples = make_examples(WORLDS["short"], 10, 7, "test")
    write_jsonl(work / "data.jsonl", examples)
    with MicroServer(examples) as server:
        words = ["evaluate", "data.jsonl", "--model", "micro-model", "--out", "e", "--no-cache"]
        words += ["--base-url", server.base_url, "--judge", "own_judges52:first"]
        code, _, errors = run(capsys, *words)
    assert code == 1 and "SystemExit" in errors and "own_judges52" in errors, errors


def test_a_judge_that_raises_on_a_later_answer_is_named_with_the_answer(capsys, work):
    from memcalib.io.records import write_jsonl
    from memcalib.products.micro.practice.server import MicroServer
    from memcalib.products.micro.world import WORLDS, make_examples

    write_judges(work, "raise KeyError('no such level')")
    examples = make_examples(WORLDS["short"], 10, 7, "test")
    write_jsonl(work / "data.jsonl", examples)
    with MicroServer(examples) as server:
        words = ["evaluate", "data.jsonl", "--model", "micro-model", "--out", "e", "--no-cache"]
        words += ["--base-url", server.base_url, "--judge", "own_judges52:first"]
        code, _, errors = run(capsys, *words)
    judged = (work / "e" / "judgments.jsonl").read_text().splitlines()
    assert code == 1 and len(judged) == 11  # the first call was a trial
    assert "judge own_judges52:Judge raised KeyError: 'no such level'" in errors
    answers = (work / "e" / "rollouts.jsonl").read_text().splitlines()
    assert f"on the answer to example '{json.loads(answers[11])['example_id']}'" in errors
