"""The Inspect task: the numbers of `memcalib evaluate`, unscored answers included,
and the line that is documented.
"""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

inspect_ai = pytest.importorskip("inspect_ai")

from memcalib.commands.evaluate import Evaluation, EvaluationRun  # noqa: E402
from memcalib.evaluation.inspect_task import (  # noqa: E402
    ask_with_seeds,
    judgments_in_log,
    memory_use,
    seeds_of,
)
from memcalib.io.records import write_jsonl  # noqa: E402
from memcalib.metrics import METRICS, load_judgments, score  # noqa: E402
from memcalib.products.micro.practice.models import ExampleIndex, judge_reply, read_payload  # noqa: E402
from memcalib.products.micro.practice.server import MicroServer  # noqa: E402
from memcalib.products.micro.world import make_examples  # noqa: E402
from memcalib.problem import iter_examples, text_hash  # noqa: E402

EXAMPLES = make_examples("short", 8, 7, "test")
INDEX = ExampleIndex(EXAMPLES)
ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "nbs" / "tutorials" / "evaluate_your_model.ipynb"


def moody(turns):
    """The exact judge, which has nothing to say about one answer in three."""
    payload = read_payload(turns)
    if int(text_hash(payload["model_response"] + payload["current_query"]), 16) % 3 == 0:
        return "I would rather not."
    return json.dumps(judge_reply(payload, INDEX))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    data = write_jsonl(tmp_path_factory.mktemp("inspect") / "test.jsonl", EXAMPLES)
    with MicroServer(EXAMPLES, roles={"moody": moody}) as server:
        yield server, Path(data)


def run_inspect(served, monkeypatch, judge, **task):
    server, data = served
    monkeypatch.setenv("MICRO_BASE_URL", server.base_url)
    monkeypatch.setenv("MICRO_API_KEY", "none")
    roles = {"grader": f"openai-api/micro/{judge}"}
    options = {"display": "none", "log_dir": str(data.parent / "logs"), "log_level": "error"}
    task_made = memory_use(str(data), max_tokens=64, **task)
    (log,) = inspect_ai.eval(
        task_made, model="openai-api/micro/micro-model", model_roles=roles, **options
    )
    return log


def test_the_numbers_are_ours_when_answers_are_unscored(served, monkeypatch, tmp_path):
    log = run_inspect(served, monkeypatch, "moody", seeds=[42, 43])
    assert log.status == "success"
    theirs = {
        inspect_score.name: {
            key.split("/")[-1]: m.value for key, m in inspect_score.metrics.items()
        }
        for inspect_score in log.results.scores
    }
    server, data = served
    connection = {"base_url": server.base_url, "key_env": ""}
    roles = {
        "model": {"model": "micro-model", **connection},
        "judge": {"model": "moody", **connection},
    }
    settings = {"sampling": {"seeds": [42, 43], "max_tokens": 64}, "control": False}
    run = EvaluationRun(Evaluation(data=str(data), **roles, **settings), tmp_path / "run")
    run.generate()
    run.judge()
    table = score(load_judgments(run.file("judgments.jsonl")))
    assert 0 < table["unscored_responses"][0] < 16
    assert theirs["unscored"]["answers"] == table["unscored_responses"][0], "the summary shows them"
    for name in METRICS:
        assert theirs[name]["mean"] == pytest.approx(table[name][0], abs=1e-9), name
        assert theirs[name]["stderr"] > 0
    back = score(list(judgments_in_log(log.location)))
    assert (
        back["SCS"][0] == pytest.approx(table["SCS"][0])
        and back["unscored_responses"][0] == table["unscored_responses"][0]
    )


@pytest.mark.parametrize("seeds", ["42,43", "42, 43", [42, 43], ["42", "43"], (42, 43)])
def test_seeds_in_every_form(seeds):
    assert seeds_of(seeds) == [42, 43] and seeds_of(42) == seeds_of("42") == [42]


@pytest.mark.parametrize("seeds", ["42;43", "", None, [None], "a"])
def test_what_is_no_seed_is_named(seeds):
    with pytest.raises(ValueError, match="seeds: found .* allowed: whole numbers"):
        seeds_of(seeds)


@pytest.mark.parametrize(("epoch", "seed"), [(1, 42), (2, 7)])
def test_an_epoch_asks_with_its_seed(epoch, seed):
    asked = []

    async def generate(state, **options):
        asked.append(options)
        return state

    state = SimpleNamespace(epoch=epoch)
    assert asyncio.run(ask_with_seeds([42, 7])(state, generate)) is state
    assert asked == [{"seed": seed}]


@pytest.mark.slow
def test_the_documented_line_works(served):
    """The line of the tutorial, with this server's names and address in the place of the real
    ones.
    """
    server, data = served
    text = "".join(
        "".join(cell["source"]) for cell in json.loads(TUTORIAL.read_text())["cells"]
    ).replace("\\\n", " ")
    (line,) = re.findall(r"inspect eval memcalib/memory_use [^`\n]*", text)
    assert "--model openai-api/" in line and "--model-role grader=openai-api/" in line
    words = shlex.split(
        line.replace("Qwen3-8B", "micro-model").replace("deepseek-chat", "micro-judge")
    )
    names = re.findall(r"openai-api/(\w+)/", line)
    settings = {f"{name.upper()}_BASE_URL": server.base_url for name in names} | {
        f"{n.upper()}_API_KEY": "none" for n in names
    }
    program = str(Path(sys.executable).with_name("inspect"))
    extra = ["-T", "seeds=42,43", "-T", "max_tokens=64", "--log-dir", "logs", "--display", "plain"]
    # Inspect finds the installed package; with the checkout on PYTHONPATH it would read
    # memcalib.egg-info, which does
    # not say that the install is editable, and would not know the task's package.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    done = subprocess.run(
        [program, *words[1:], *extra],
        cwd=data.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SCS" in done.stdout and "unscored" in done.stdout


@pytest.mark.slow
def test_the_task_runs_by_its_file_and_says_on_what(served):
    """As the register of inspect_evals runs it: by the file's path, the default data."""
    server, data = served
    path = "memcalib/evaluation/inspect_task.py@memory_use"
    page = (ROOT / "nbs" / "evaluation" / "04_inspect.ipynb").read_text(encoding="utf-8")
    assert f"uv run inspect eval {path}" in page
    logs = data.parent / "by_file"
    command = [str(Path(sys.executable).with_name("inspect")), "eval", path]
    command += ["--model", "openai-api/micro/micro-model"]
    command += ["--model-role", "grader=openai-api/micro/micro-judge", "-T", "limit=2"]
    command += ["-T", "seeds=42", "-T", "max_tokens=64", "--log-dir", str(logs)]
    names = {"MICRO_BASE_URL": server.base_url, "MICRO_API_KEY": "none"}
    environment = {**os.environ, **names, "PYTHONPATH": str(ROOT)}
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    done = subprocess.run([*command, "--display", "plain"], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = logs.glob("*.eval")
    log = inspect_ai.log.read_eval_log(str(file))
    assert log.status == "success" and log.eval.dataset.name == "starter"
    first = [example.content_hash for example in islice(iter_examples("starter"), 2)]
    assert log.eval.metadata["data_hash"] == text_hash("".join(first))
