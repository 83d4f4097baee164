"""One way to configure every command: file, flags, `--set`; flags of the last release; judges and sources by their path."""

import json
import sys
from pathlib import Path

import pytest
import typer.main
from command_line import run

from memcalib.commands.cli import app, with_aliases
from memcalib.commands.settings_files import check_settings, load_settings, locate, merged
from memcalib.io.settings import import_object
from memcalib.commands.build import Build, SourcePlan
from memcalib.commands.evaluate import Evaluation
from memcalib.trainer.recipe import Recipe, load_recipe
from memcalib.trainer.train_config import TrainSettings
from memcalib.io.records import write_jsonl
from memcalib.metrics import load_judgments
from memcalib.practice.server import MicroServer
from memcalib.micro.world import WORLDS, make_examples

EXAMPLES = make_examples(WORLDS["short"], 6, 7, "test")
COMMANDS = typer.main.get_command(app).commands

# every flag of the last release, by command
EARLIER = {
    "evaluate": """out config model base-url key-env weights engine judge judge-url judge-key-env judge2 judge2-url
        judge2-key-env seeds limit split format framing temperature top-p max-tokens text control no-control blind gold
        quality prompt concurrency rpm tpm price judge-concurrency judge-rpm judge-tpm judge-price dry-run answer-tokens
        cache no-cache""",
    "generate": """out model base-url key-env weights engine seeds limit framing temperature top-p max-tokens text
        no-memory concurrency rpm tpm cache no-cache""",
    "judge": "data out model base-url key-env blind gold quality prompt concurrency rpm tpm cache no-cache",
    "demonstrations": """out teacher teacher-url teacher-key-env evaluator evaluator-url evaluator-key-env evaluator2
        evaluator2-url evaluator2-key-env rounds min-quality limit split world text layout prompt temperature max-tokens
        concurrency rpm tpm price evaluator-price evaluator2-price dry-run answer-tokens cache no-cache""",
    "build": """out pilot reviews reviewer freeze rows from-memory store redaction consent without-consent domain preview
        yes cache profile""",
    "train": "method out seed resume dry-run set cache no-cache",
    "quickstart": "out profile from-scratch",
    "reproduce": "profile out dry-run",
}


@pytest.fixture
def data(tmp_path) -> Path:
    return write_jsonl(tmp_path / "examples.jsonl", EXAMPLES)


@pytest.mark.parametrize("name", EARLIER)
def test_every_flag_of_the_last_release_is_known(name):
    command = COMMANDS[name]
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    known |= {*getattr(command, "flags", {})}
    assert {f"--{flag}" for flag in EARLIER[name].split()} <= known


@pytest.mark.parametrize(
    "name", [name for name in EARLIER if name not in ("quickstart", "reproduce", "train")]
)
def test_help_shows_some_flags_and_every_command_has_the_three(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    shown = [line for line in out.splitlines() if line.startswith("  --")]
    assert (
        code == 0
        and len(shown) <= 16
        and {"--set", "--dry-run", "--resume"} <= {line.split()[0] for line in shown}
    )


def test_a_flag_of_the_last_release_is_a_setting(capsys, data, tmp_path):
    common = [
        "evaluate",
        data,
        "--model",
        "m",
        "--base-url",
        "http://localhost:9/v1",
        "--judge",
        "j",
        "--dry-run",
    ]
    earlier = [
        "--seeds",
        "1,2",
        "--temperature",
        0.5,
        "--blind",
        "--no-control",
        "--rpm",
        60,
        "--judge-price=0.3,1.2",
        "--framing",
        "bare",
    ]
    places = (
        "sampling.seeds=[1,2]",
        "sampling.temperature=0.5",
        "judging.blind=true",
        "control=false",
        "model.rpm=60",
    )
    places += ("judge.price={prompt: 0.3, completion: 1.2}", "sampling.prompt_template=bare")
    _, before, _ = run(capsys, *common, *earlier)
    code, after, err = run(
        capsys, *common, *(word for place in places for word in ("--set", place))
    )
    assert code == 0 and before == after and "temperature: 0.5" in after and "rpm: 60.0" in after, (
        err
    )


def test_words_behind_two_dashes_and_other_flags_are_left_alone():
    flags = COMMANDS["evaluate"].flags
    assert with_aliases(["a", "--limit", "3", "--", "--blind"], flags) == [
        "a",
        "--limit",
        "3",
        "--",
        "--blind",
    ]
    assert with_aliases(["--framing=my file.yaml"], flags) == [
        "--set",
        'sampling.prompt_template="my file.yaml"',
    ]


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
        (["--seeds", "a"], ["seeds", "'a'", "42,43,44"]),
        (["--judge-price", "cheap"], ["price", "'cheap'", "0.5,1.5"]),
        (
            ["--judge", "memcalib.nowhere:judge"],
            ["judge", "memcalib.nowhere:judge", "package.module:name"],
        ),
        (
            ["--judge", "memcalib.micro.world:exact_juge"],
            ["judge", "exact_judge", "package.module:name"],
        ),
        (["--judge", "memcalib.micro.world:World"], ["judge", "__call__", "allowed"]),
        (["--seeds"], ["--seeds"]),
    ],
)
def test_what_is_not_known_is_one_line_with_what_is_allowed(capsys, data, typed, needles):
    code, _, err = run(
        capsys, "evaluate", data, "--model", "m", "--judge", "micro-exact", "--dry-run", *typed
    )
    assert (
        code in (1, 2)
        and len(err.strip().splitlines()) == 1
        and all(needle in err for needle in needles)
    ), err
    assert err.count("found") <= 1, "a value is shown once"


def test_a_command_that_is_not_known_is_answered_with_the_nearest(capsys):
    code, _, err = run(capsys, "evalute")
    assert code == 2 and "'evaluate'" in err


def test_a_later_place_wins(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_text(
        "data: a.jsonl\nmodel: {model: m}\njudge: exact\nsampling: {temperature: 0.1, top_p: 0.2}\n"
    )
    found = load_settings(
        Evaluation,
        file,
        {"sampling": {"temperature": 0.3}, "limit": 4},
        ["limit=5"],
        defaults={"split": "dev", "limit": 9},
    )
    assert (found.sampling.temperature, found.sampling.top_p, found.limit, found.split) == (
        0.3,
        0.2,
        5,
        "dev",
    )
    assert found.judge == "micro-exact" == load_recipe("micro", ["judge=exact"]).judge
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {
        "a": {"b": 3, "c": 2},
        "d": 4,
    }


def test_locations_are_those_of_the_file():
    assert locate(Evaluation, ("model", "endpoint", "rpm")).names == ["model", "rpm"]
    misspelt = locate(Build, ("sources", 0, "domian"))
    assert (misspelt.names, misspelt.owner) == (["sources", "0", "domian"], SourcePlan)
    channel = locate(Recipe, ("train", "eta", "dict[str, float]", "C+"))
    assert (channel.names, channel.owner) == (["train", "eta"], TrainSettings)
    assert locate(Recipe, ("judge", "endpoint", "extra_body")).secret
    assert not locate(Recipe, ("train", "lr")).secret


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


MINE = """
from memcalib.dataset.sources import SourceRow
from memcalib.micro.world import exact_judge

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
    asked, answered = path.read_text().split("|")
    yield {"number": 1, "asked": asked, "answered": answered}


columns = {"id": "number", "question": "asked", "answer": "answered"}
forum = {"domain": "general", "licence": "cc0", "columns": columns, "records": posts}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))]
    )
    return name


def test_a_judge_of_ones_own_judges(capsys, data, mine, tmp_path):
    with MicroServer(EXAMPLES) as server:
        common = [
            "evaluate",
            data,
            "--model",
            "micro-model",
            "--base-url",
            server.base_url,
            "--no-cache",
        ]
        common += [
            "--set",
            "sampling.max_tokens=64",
            "--set",
            "sampling.seeds=[1]",
            "--out",
            tmp_path / "run",
        ]
        code, _, err = run(capsys, *common, "--judge", f"{mine}:Strict")
    assert code == 0, err
    assert {row.judge for row in load_judgments(tmp_path / "run" / "judgments.jsonl")} == {"strict"}
    assert (
        json.loads((tmp_path / "run" / "parameters.json").read_text())["judge"] == f"{mine}:Strict"
    )


@pytest.mark.parametrize(
    ("name", "needle"),
    [("Mute", "no method __call__"), ("Needy", "Needy()"), ("Strickt", "perhaps Strict")],
)
def test_a_class_that_cannot_judge_is_refused(mine, name, needle):
    with pytest.raises(ValueError, match="judge: found") as error:
        load_recipe("micro", [f"judge={mine}:{name}"])
    assert (
        needle in str(error.value)
        and "allowed" in str(error.value)
        and len(str(error.value).splitlines()) == 1
    )


def test_a_source_of_ones_own_is_read(mine):
    assert [row.id for row in SourcePlan(source=f"{mine}:rows", limit=3).rows()] == [
        "r0",
        "r1",
        "r2",
    ]
    assert {row.answer for row in SourcePlan(source=f"{mine}:rows", path="a.csv").rows()} == {
        "a.csv"
    }
    with pytest.raises(ValueError, match=r"row 1: found .*allowed are SourceRow"):
        list(SourcePlan(source=f"{mine}:strange").rows())
    (Path.cwd() / "posts.txt").write_text("Where do I park?|Behind the mill.")
    rows = list(SourcePlan(source=f"{mine}:forum", path="posts.txt").rows())
    assert [(row.id, row.answer) for row in rows] == [("forum:1", "Behind the mill.")]
    with pytest.raises(ValueError, match="package.module:name"):
        import_object("no_colon")


@pytest.mark.parametrize(
    "typed",
    [
        ["build", "micro", "--rows", "5"],
        ["quickstart", "--profile", "smoke", "--set", "eval_examples=7"],
        ["demonstrations", "--rounds", "2", "--limit", "2"],
    ],
)
def test_a_dry_run_prints_the_settings_and_writes_nothing(capsys, tmp_path, typed):
    code, out, err = run(capsys, *typed, "--out", tmp_path / "run", "--dry-run")
    assert code == 0 and not (tmp_path / "run").exists(), err
    assert {"build": "rows: 5", "quickstart": "eval_examples: 7", "demonstrations": "rounds: 2"}[
        typed[0]
    ] in out


def test_dry_runs_of_the_steps_alone(capsys, data, tmp_path):
    answers = tmp_path / "answers.jsonl"
    judged = tmp_path / "judged.jsonl"
    with MicroServer(EXAMPLES) as server:
        asked = [
            "generate",
            data,
            "--model",
            "micro-model",
            "--base-url",
            server.base_url,
            "--seeds",
            "1,2",
            "--max-tokens",
            64,
            "--out",
            answers,
        ]
        code, out, err = run(capsys, *asked, "--dry-run")
        assert (
            code == 0 and not answers.exists() and not server.stats()["requests"] and "12" in out
        ), err
        run(capsys, *asked, "--no-cache")
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
