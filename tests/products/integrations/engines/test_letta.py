"""letta-evals, in an environment with it and our core: the files of the page, run by its own
program over stored answers, the practice server's judge reading them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from letta_evals.models import (
    ModelSummary,
    Sample,
    SampleResult,
    SuiteSpec,
    Summary,
    Timing,
    TimingStats,
    Usage,
)
from graded_answers import ANSWERS, EXAMPLES, RECORDS, expected, judge_settings, silent
from page_files import json_line, write_files

from memcalib.products.micro.practice.server import MicroServer


def stored_answers(folder: Path, samples: list[Sample], suite: SuiteSpec) -> Path:
    """A folder of results as `letta-evals run --output` leaves it, before any grade."""
    folder.mkdir()
    rows = []
    for sample, text in zip(samples, ANSWERS, strict=True):
        said = {"id": f"message-{sample.id}", "date": "2026-11-27T00:00:00Z", "content": text}
        message = {"message_type": "assistant_message", **said}
        timing = Timing(total=1, target=1)
        rows.append(SampleResult(sample_id=sample.id, trajectory=[[message]], timing=timing))
    lines = "".join(f"{row.model_dump_json()}\n" for row in rows)
    (folder / "default.jsonl").write_text(lines, encoding="utf-8")
    config = suite.model_dump(mode="json", exclude={"base_dir"})
    told = {"suite": suite.name, "config": config}
    told["samples"] = [sample.model_dump(mode="json") for sample in samples]
    (folder / "suite.json").write_text(json.dumps(told), encoding="utf-8")
    times = TimingStats(mean_total=1, mean_target=1, p50_total=1, p95_total=1)
    summary = ModelSummary(
        model="default",
        n_total=len(rows),
        n_attempted=len(rows),
        reward=0,
        per_metric={},
        usage=Usage(),
        timing=times,
    )
    whole = Summary(suite=suite.name, models=[summary])
    (folder / "summary.json").write_text(whole.model_dump_json(), encoding="utf-8")
    return folder


def run_suite(folder: Path, judge: str, url: str) -> list[dict]:
    """The rows that `letta-evals run --cached` writes with the files of the page."""
    files = write_files("letta_evals", folder)
    assert set(files) == {"grader.py", "suite.yaml"}
    samples = []
    for number, record in enumerate(RECORDS):
        samples.append(Sample(id=number, input=EXAMPLES[number].question, extra_vars=record))
    lines = "".join(f"{sample.model_dump_json()}\n" for sample in samples)
    (folder / "dataset.jsonl").write_text(lines, encoding="utf-8")
    (folder / "agent.py").write_text("agent_with_memories = None\n", encoding="utf-8")
    given = yaml.safe_load(files["suite.yaml"].read_text(encoding="utf-8"))
    suite = SuiteSpec.from_yaml(given, base_dir=folder)
    stored = stored_answers(folder / "stored", samples, suite)
    program = str(Path(sys.executable).with_name("letta-evals"))
    command = [program, "run", "suite.yaml", "--cached", str(stored), "--output", "graded"]
    environment = {**os.environ, **judge_settings(judge, url, folder)}
    options = dict(cwd=folder, env=environment, capture_output=True, text=True)
    done = subprocess.run(command, **options, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    graded = (folder / "graded" / "default.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in graded.splitlines()]
    return sorted(rows, key=lambda row: row["sample_id"])


def test_grades_are_those_of_the_exact_judge(tmp_path):
    with MicroServer(EXAMPLES) as server:
        rows = run_suite(tmp_path, "micro-judge", server.base_url)
    assert len(rows) == len(EXAMPLES)
    for row, wanted in zip(rows, expected(), strict=True):
        given = row["grades"]["memory_use"]
        assert "error" not in row and given["score"] == pytest.approx(wanted.score)
        assert given["metadata"]["under_use"] == pytest.approx(wanted.under_use)
        assert row["reward"]["score"] == pytest.approx(wanted.score)
    assert len({row["grades"]["memory_use"]["score"] for row in rows}) > 1
    assert "under-use: " in rows[1]["grades"]["memory_use"]["rationale"]


def test_an_answer_without_a_judgment_is_an_error_and_no_zero(tmp_path):
    with MicroServer(EXAMPLES, roles={"silent": silent}) as server:
        rows = run_suite(tmp_path, "silent", server.base_url)
    for row in rows:
        assert row["error"]["category"] == "grading" and "reward" not in row
        assert row["error"]["exception_type"] == "Unscored"


def test_the_line_of_the_dataset_is_a_sample():
    sample = Sample(id=0, **json_line("letta_evals"))
    assert sample.extra_vars["memories"][0]["level"] == "control"
