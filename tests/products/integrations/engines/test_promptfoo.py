"""promptfoo from npm, beside an environment with our core: the files of the page, run by
`promptfoo eval`, the practice server in the place of model and judge.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from graded_answers import ANSWERS, EXAMPLES, RECORDS, expected, judge_settings, silent
from page_files import write_files

from memcalib.products.micro.practice.server import MicroServer

PROGRAM = Path(sys.prefix) / "node_modules" / ".bin" / "promptfoo"


def configuration(folder: Path, judge: str, url: str) -> Path:
    """The page's configuration with the world's questions, their answers as providers say them."""
    files = write_files("promptfoo", folder)
    assert set(files) == {"memory_use.py", "promptfooconfig.yaml"}
    config = yaml.safe_load(files["promptfooconfig.yaml"].read_text(encoding="utf-8"))
    (assertion,) = config["defaultTest"]["assert"]
    assertion["config"] |= {"judge": judge, "judge_url": url, "judge_key_env": ""}
    config["providers"] = ["echo"]
    config["prompts"] = ["{{answer}}"]
    config["tests"] = []
    for record, text in zip(RECORDS, ANSWERS, strict=True):
        config["tests"].append({"vars": {**record, "answer": text}})
    config["evaluateOptions"] = {"maxConcurrency": 1}
    path = folder / "promptfooconfig.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def run_promptfoo(folder: Path, judge: str, url: str) -> list[dict]:
    """The results of `promptfoo eval`, in the order of the tests."""
    configuration(folder, judge, url)
    return evaluated(folder, judge_settings("", "", folder))


def evaluated(folder: Path, settings: dict[str, str]) -> list[dict]:
    quiet = ("TELEMETRY", "UPDATE", "REMOTE_GENERATION", "SHARING")
    environment = {**os.environ, **settings, "PROMPTFOO_PYTHON": sys.executable}
    environment |= {f"PROMPTFOO_DISABLE_{name}": "1" for name in quiet}
    environment["PROMPTFOO_CONFIG_DIR"] = str(folder / "home")
    command = [str(PROGRAM), "eval", "-c", "promptfooconfig.yaml", "--no-cache"]
    options = dict(cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    done = subprocess.run([*command, "--no-progress-bar", "-o", "results.json"], **options)
    assert (folder / "results.json").is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return sorted(results["results"]["results"], key=lambda row: row["testIdx"])


def test_scores_are_those_of_the_exact_judge(tmp_path):
    with MicroServer(EXAMPLES) as server:
        rows = run_promptfoo(tmp_path, "micro-judge", server.base_url)
    assert len(rows) == len(EXAMPLES)
    for row, wanted in zip(rows, expected(), strict=True):
        assert row["score"] == pytest.approx(wanted.score), row["gradingResult"]["reason"]
        assert row["success"] is (wanted.score >= 0.5)
        assert row["namedScores"] == pytest.approx(wanted.numbers)
    assert len({row["score"] for row in rows}) > 1


def test_an_answer_without_a_judgment_has_no_named_scores(tmp_path):
    with MicroServer(EXAMPLES, roles={"silent": silent}) as server:
        rows = run_promptfoo(tmp_path, "silent", server.base_url)
    for row in rows:
        assert not row["success"] and row["namedScores"] == {}
        assert "unscored" in row["gradingResult"]["reason"]


def test_the_prompt_of_the_page_shows_the_memories(tmp_path):
    files = write_files("promptfoo", tmp_path)
    config = yaml.safe_load(files["promptfooconfig.yaml"].read_text(encoding="utf-8"))
    with MicroServer(EXAMPLES) as server:
        (assertion,) = config["defaultTest"]["assert"]
        place = {"judge_url": server.base_url, "judge_key_env": ""}
        assertion["config"] |= {"judge": "micro-judge", **place}
        config["providers"] = ["echo"]
        files["promptfooconfig.yaml"].write_text(yaml.safe_dump(config), encoding="utf-8")
        (row,) = evaluated(tmp_path, judge_settings("", "", tmp_path))
    said = row["response"]["output"]
    assert "1. Allergic to peanuts." in said and "2. Plays chess." in said
    assert said.rstrip().endswith("What can I bake?") and "SCS" in row["namedScores"]
