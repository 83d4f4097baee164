"""One way to configure every command: file, flags, `--set`; judges and sources by their path."""

import json
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import typer.main
from command_line import run

from memcalib.commands.cli import app, setting_places
from memcalib.settings.files import check_settings, load_settings, setting_location, merged
from memcalib.io.settings import import_object
from memcalib.products.dataset.build import Build, SourcePlan
from memcalib.commands.evaluate import Evaluation
from memcalib.trainer.recipe import Recipe, load_recipe
from memcalib.trainer.train_config import TrainSettings
from memcalib.io.records import write_jsonl
from memcalib.metrics import load_judgments
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import WORLDS, make_examples

EXAMPLES = make_examples(WORLDS["short"], 6, 7, "test")
COMMANDS = typer.main.get_command(app).commands


@pytest.fixture
def data(tmp_path) -> Path:
    return write_jsonl(tmp_path / "examples.jsonl", EXAMPLES)


VERBS_WITH_SETTINGS = ("evaluate", "generate", "judge", "exam", "demonstrations", "build", "train")


@pytest.mark.parametrize("name", VERBS_WITH_SETTINGS)
def test_help_shows_every_flag_and_they_are_few(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    shown = set()
    for line in out.splitlines():
        if line.startswith("  --"):
            names = takewhile(lambda word: word.startswith("--"), line.split())
            shown |= {name.rstrip(",") for name in names}
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    flags = {option for option in options if option.startswith("--")}
    assert code == 0 and flags <= shown and {"--set", "--dry-run"} <= shown
    assert len(shown) <= 28


@pytest.mark.parametrize("name", [name for name in VERBS_WITH_SETTINGS if name != "train"])
def test_only_a_training_is_resumed_by_a_flag(capsys, name):
    """Every other command goes on when it is given again;
    a flag that does nothing would say otherwise.
    """
    code, _, err = run(capsys, name, "--resume")
    assert code == 2 and "--resume" in err


def test_places_lead_to_every_leaf_of_the_settings():
    places_by_leaf = setting_places(Evaluation)
    assert (
        places_by_leaf["seeds"] == ["sampling.seeds"] and "judge2.model" in places_by_leaf["model"]
    )
    for leaf, leaf_places in places_by_leaf.items():
        assert all(leaf_place.split(".")[-1] == leaf for leaf_place in leaf_places)


@pytest.mark.parametrize(
    ("typed", "needles"),
    [
        (
            ["--set", "sampling.temprature=1"],
            ["sampling.temprature: unknown option", "temperature", "allowed"],
        ),
        (["--set", "sampling.temperature"], ["--set", "place=value"]),
        (["--temprature", "1"], ["--temprature", "--set sampling.temperature=…"]),
        (["--sedes", "1"], ["--set sampling.seeds=…"]),
        (["--modle", "m"], ["--model)"]),
        (["--set", "sampling.seeds=a"], ["sampling.seeds", "'a'"]),
        (["--set", "model.price=cheap"], ["model.price: allowed: a mapping"]),
        (["--rpm", "3"], ["--rpm", "--set judge.rpm=…"]),
        (
            ["--judge", "memcalib.nowhere:judge"],
            ["judge", "memcalib.nowhere:judge", "package.module:name"],
        ),
        (
            ["--judge", "memcalib.products.micro.world:exact_juge"],
            ["judge", "exact_judge", "package.module:name"],
        ),
        (["--judge", "memcalib.products.micro.world:World"], ["judge", "__call__", "allowed"]),
        (["--set"], ["--set"]),
    ],
)
def test_what_is_not_known_is_one_line_with_what_is_allowed(capsys, data, typed, needles):
    code, _, err = run(
        capsys, "evaluate", data, "--model", "m", "--judge", "micro-exact", "--dry-run", *typed
    )
    assert code in (1, 2) and len(err.strip().splitlines()) == 1, err
    assert all(needle in err for needle in needles), err
    assert err.count("found") <= 1, "a value is shown once"


def test_a_command_that_is_not_known_is_answered_with_the_nearest(capsys):
    code, _, err = run(capsys, "evalute")
    assert code == 2 and "'evaluate'" in err


def test_a_later_place_wins(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_text(
        "data: a.jsonl\nmodel: {model: m}\njudge: micro-exact\n"
        "sampling: {temperature: 0.1, top_p: 0.2}\n"
    )
    evaluation = load_settings(
        Evaluation,
        file,
        {"sampling": {"temperature": 0.3}, "limit": 4},
        ["limit=5"],
        defaults={"split": "dev", "limit": 9},
    )
    assert (evaluation.sampling.temperature, evaluation.sampling.top_p) == (0.3, 0.2)
    assert (evaluation.limit, evaluation.split) == (5, "dev")
    assert evaluation.judge == "micro-exact" == load_recipe("micro", ["judge=micro-exact"]).judge
    nested = merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4})
    assert nested == {"a": {"b": 3, "c": 2}, "d": 4}


def test_locations_are_those_of_the_file():
    assert setting_location(Evaluation, ("model", "endpoint", "rpm")).names == ["model", "rpm"]
    misspelt = setting_location(Build, ("sources", 0, "domian"))
    assert (misspelt.names, misspelt.owner) == (["sources", "0", "domian"], SourcePlan)
    channel = setting_location(Recipe, ("train", "eta", "dict[str, float]", "C+"))
    assert (channel.names, channel.owner) == (["train", "eta"], TrainSettings)
    assert setting_location(Recipe, ("judge", "endpoint", "extra_body")).secret
    assert not setting_location(Recipe, ("train", "lr")).secret


def test_a_key_is_never_repeated():
    secret = "sk" + "-0123456789abcdefghijklmnop"
    for judge in (
        {"model": "m", "extra_body": secret},
        {"model": "m", "base_url": f"http://me:{secret}@h/v1"},
        [secret],
    ):
        with pytest.raises(ValueError, match="judge") as error:
            check_settings(Evaluation, {"data": "x", "model": {"model": "m"}, "judge": judge})
        assert secret not in str(error.value)


MODULE = """
from memcalib.products.dataset.sources import SourceRow
from memcalib.products.micro.world import exact_judge

class Strict:
    name = "strict"
    def __call__(self, example, response):
        return exact_judge(example, response).model_copy(update={"judge": self.name})

class Mute:
    name = "mute"

class Needy(Strict):
    def __init__(self, model):
        self.model = model

def rows(path=None):
    for number in range(5):
        head = dict(id=f"r{number}", source="mine", domain="general", licence="cc0-1.0")
        yield SourceRow(**head, question=f"What about {number}?", answer=str(path))

def strange():
    yield {"question": "?"}


def posts(path):
    title, text = path.read_text().split("|")
    yield {"number": 1, "title": title, "text": text}


columns = {"id": "number", "question": "title", "answer": "text"}
forum = {"domain": "general", "licence": "cc0", "columns": columns, "records": posts}
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """A module of one's own in the current folder, which is not on the path of imports."""
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    folders = [folder for folder in sys.path if folder not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", folders)
    return name


def test_a_judge_of_ones_own_judges(capsys, data, module, tmp_path):
    folder = tmp_path / "run"
    with MicroServer(EXAMPLES) as server:
        words = ["evaluate", data, "--model", "micro-model", "--base-url", server.base_url]
        words += ["--set", "sampling.max_tokens=64", "--set", "sampling.seeds=[1]"]
        words += ["--judge", f"{module}:Strict", "--out", folder, "--no-cache"]
        code, _, err = run(capsys, *words)
    assert code == 0, err
    assert {row.judge for row in load_judgments(folder / "judgments.jsonl")} == {"strict"}
    parameters = json.loads((folder / "parameters.json").read_text())
    assert parameters["judge"] == f"{module}:Strict"


@pytest.mark.parametrize(
    ("name", "needle"),
    [("Mute", "no method __call__"), ("Needy", "Needy()"), ("Strickt", "perhaps you meant Strict")],
)
def test_a_class_that_cannot_judge_is_refused(module, name, needle):
    with pytest.raises(ValueError, match="judge: found") as error:
        load_recipe("micro", [f"judge={module}:{name}"])
    (line,) = str(error.value).splitlines()
    assert needle in line and "allowed" in line


def test_a_source_of_ones_own_is_read(module):
    rows = SourcePlan(source=f"{module}:rows", limit=3).rows()
    assert [row.id for row in rows] == ["r0", "r1", "r2"]
    rows = SourcePlan(source=f"{module}:rows", path="a.csv").rows()
    assert {row.answer for row in rows} == {"a.csv"}
    with pytest.raises(ValueError, match=r"row 1: found .*allowed: SourceRow"):
        list(SourcePlan(source=f"{module}:strange").rows())
    (Path.cwd() / "posts.txt").write_text("Where do I park?|Behind the mill.")
    rows = list(SourcePlan(source=f"{module}:forum", path="posts.txt").rows())
    assert [(row.id, row.answer) for row in rows] == [("forum:1", "Behind the mill.")]
    with pytest.raises(ValueError, match="package.module:name"):
        import_object("no_colon")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["build", "micro", "--rows", "5"], "rows: 5"),
        (["grid", "smoke", "--set", "plain.tests=7"], "tests: 7"),
        (["demonstrations", "--set", "making.rounds=2", "--limit", "2"], "rounds: 2"),
    ],
)
def test_a_dry_run_prints_the_settings_and_writes_nothing(capsys, tmp_path, typed, shown):
    code, out, err = run(capsys, *typed, "--out", tmp_path / "run", "--dry-run")
    assert code == 0 and not (tmp_path / "run").exists(), err
    assert shown in out


def test_dry_runs_of_the_steps_alone(capsys, data, tmp_path):
    answers = tmp_path / "answers.jsonl"
    judged = tmp_path / "judged.jsonl"
    with MicroServer(EXAMPLES) as server:
        words = ["generate", data, "--model", "micro-model", "--base-url", server.base_url]
        words += ["--set", "sampling.seeds=[1,2]", "--set", "sampling.max_tokens=64"]
        words += ["--out", answers]
        code, out, err = run(capsys, *words, "--dry-run")
        assert code == 0 and "12" in out, err
        assert not answers.exists() and not server.stats()["requests"]
        run(capsys, *words, "--no-cache")
    code, out, err = run(
        capsys,
        "judge",
        answers,
        "--data",
        data,
        "--model",
        "micro-exact",
        "--out",
        judged,
        "--dry-run",
    )
    assert code == 0 and "12" in out and "$0.00" in out and not judged.exists(), err
