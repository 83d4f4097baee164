"""verifiers, in an environment with verifiers, uv and our core: the taskset evaluated by `vf-eval`,
its own client and its own harness, against the practice server; credit from its traces.

`uv` prepares the harness's chat program and downloads what it needs on the first run.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from streaming import StreamingFront

from memcalib.products.integrations.contract import BatchCredit
from memcalib.credit.token_credit import TokenCredit
from memcalib.products.integrations.verifiers import answers_in, taskset_class
from memcalib.io.records import write_jsonl
from memcalib.products.micro.policy import build_tokenizer
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.practice.server import MicroServer
from memcalib.rules.base import CreditConfig

ROOT = Path(__file__).parents[4]
EXAMPLES = make_examples("short", 3, seed=1)
TOKENIZER = build_tokenizer()


def environment() -> dict[str, str]:
    """Where the package was not installed, its folder stands on the path."""
    folders = [str(ROOT)]
    if find_spec("memcalib_env") is None:
        folders.append(str(ROOT / "packages" / "memcalib-env"))
    index = {"UV_DEFAULT_INDEX": os.environ.get("UV_DEFAULT_INDEX", "https://pypi.org/simple")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own_variables = {"PYTHONPATH": ":".join(folders), "VLLM_KEY": "none", "PATH": path}
    return {**os.environ, **index, **own_variables, "UV_PYTHON_DOWNLOADS": "never"}


def documented_options() -> dict[str, str | None]:
    """The options of `vf-eval` as the package's README has them; None for a switch."""
    text = (ROOT / "packages" / "memcalib-env" / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^vf-eval memcalib-env (.*?)\n```", text, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.group(1).replace("\\\n", " "))
    options: dict[str, str | None] = {}
    for word in words:
        if word.startswith("-"):
            options[word] = None
            name = word
        else:
            options[name] = word
    return options


def evaluate(folder: Path, url: str, judge: dict, **taskset: str) -> subprocess.CompletedProcess:
    """Runs the README's command, with the models, records and folders of this test."""
    data = write_jsonl(folder / "data.jsonl", EXAMPLES)
    options = documented_options()
    options |= {
        "-m": "micro-model",
        "-n": str(len(EXAMPLES)),
        "--client.base-url": url,
        "--no-rich": None,
        "--env.taskset.data": str(data),
        "--env.taskset.judge": json.dumps(judge),
        "--env.taskset.cache": str(folder / "cache.sqlite"),
        "--output-dir": str(folder),
        "--run.name": "run",
    }
    for name, value in taskset.items():
        options[f"--env.taskset.{name}"] = value
    command = [str(Path(sys.executable).parent / "vf-eval"), "memcalib-env"]
    for name, value in options.items():
        command.append(name)
        if value is not None:
            command.append(value)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    with MicroServer(EXAMPLES) as server, StreamingFront(server.base_url) as front:
        judge = {"model": "micro-judge", "base_url": server.base_url, "key_env": ""}
        done = evaluate(folder, front.base_url, judge, rule="evidence")
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = folder.rglob("traces.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    traces = []
    for line in lines:
        traces += line.get("traces", [line])
    return traces


def test_every_task_has_its_rollouts_judged(run):
    answers = answers_in(run)
    assert len(answers) == 12 and None not in answers
    assert sorted({answer.example.id for answer in answers}) == sorted(e.id for e in EXAMPLES)
    for trace, answer in zip(run, answers, strict=True):
        exact = exact_judge(answer.example, answer.text)
        levels = [(atom.atom_id, atom.actual) for atom in answer.judgment.atoms]
        assert levels == [(atom.atom_id, atom.actual) for atom in exact.atoms]
        assert trace["metrics"]["unscored"] == 0 and "SCS" in trace["metrics"]
        assert {"channels"} == trace["rewards"].keys()


def test_credit_from_traces_is_that_of_token_credit(run):
    answers = answers_in(run)
    ids = [TOKENIZER(answer.text, add_special_tokens=False)["input_ids"] for answer in answers]
    width = max(map(len, ids))
    response_ids = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    groups = [answer.example.id for answer in answers]
    config = CreditConfig(mode="evidence")
    advantages = BatchCredit(TOKENIZER, config, group_size=4).assign(
        answers, groups, response_ids, mask
    )
    bare = TokenCredit(TOKENIZER, config)
    request = bare.requests(
        [answer.example for answer in answers],
        [answer.judgment for answer in answers],
        ids,
        texts=[answer.text for answer in answers],
    )
    assert torch.allclose(advantages, bare.assign(request), atol=1e-6) and advantages.any()


def test_a_judge_that_is_down_gives_unscored_answers_and_no_error(tmp_path):
    judge = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": "", "attempts": 1}
    with MicroServer(EXAMPLES) as server, StreamingFront(server.base_url) as front:
        done = evaluate(tmp_path, front.base_url, judge, limit="1")
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.rglob("traces.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    traces = [trace for line in lines for trace in line.get("traces", [line])]
    assert [trace["metrics"]["unscored"] for trace in traces] == [1, 1, 1, 1]
    assert "unreachable" in answers_in(traces)[0].judgment.error


def test_a_missing_judge_is_named():
    taskset = taskset_class()
    config = next(
        base for base in taskset.__orig_bases__[0].__args__ if base.__name__ == "MemcalibConfig"
    )
    with pytest.raises(
        ValueError, match=r"env.taskset.judge: found no judge; allowed: an endpoint"
    ):
        taskset(config()).load()
