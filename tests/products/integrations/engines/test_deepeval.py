"""DeepEval, in an environment with it and our core: the files of the page, under pytest and by
`evaluate`, the practice server's judge reading the answers.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from graded_answers import ANSWERS, EXAMPLES, RECORDS, expected, judge_settings, silent
from page_files import write_files

os.environ |= {"DEEPEVAL_TELEMETRY_OPT_OUT": "YES", "DEEPEVAL_DISABLE_DOTENV": "1"}

from deepeval import evaluate
from deepeval.evaluate.configs import AsyncConfig, DisplayConfig, ErrorConfig
from deepeval.test_case import LLMTestCase

from memcalib.products.integrations.grading import Unscored
from memcalib.products.micro.practice.server import MicroServer

QUIET = DisplayConfig(show_indicator=False, print_results=False, inspect_after_run=False)


@pytest.fixture
def metric_class(tmp_path, monkeypatch):
    """The metric of the page, in a folder of its own, where DeepEval leaves its files, too."""
    monkeypatch.chdir(tmp_path)
    files = write_files("deepeval", tmp_path)
    assert set(files) == {"memory_metric.py", "test_memory.py"}
    spec = importlib.util.spec_from_file_location("memory_metric", files["memory_metric.py"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemoryUseMetric


def name_judge(monkeypatch, judge: str, url: str, folder) -> None:
    for name, value in judge_settings(judge, url, folder).items():
        monkeypatch.setenv(name, value)


def cases() -> list[LLMTestCase]:
    made = []
    for example, record, text in zip(EXAMPLES, RECORDS, ANSWERS, strict=True):
        made.append(LLMTestCase(input=example.question, actual_output=text, metadata=record))
    return made


@pytest.mark.parametrize("run_async", [True, False])
def test_scores_are_those_of_the_exact_judge(metric_class, monkeypatch, tmp_path, run_async):
    with MicroServer(EXAMPLES) as server:
        name_judge(monkeypatch, "micro-judge", server.base_url, tmp_path)
        result = evaluate(
            cases(),
            [metric_class(threshold=0.6)],
            async_config=AsyncConfig(run_async=run_async),
            display_config=QUIET,
        )
    by_case = {(row.input, row.actual_output): row.metrics_data[0] for row in result.test_results}
    for case, wanted in zip(cases(), expected(), strict=True):
        measured = by_case[case.input, case.actual_output]
        assert measured.name == "Memory use" and measured.error is None
        assert measured.score == pytest.approx(wanted.score)
        assert measured.success is (wanted.score >= 0.6) and measured.reason == wanted.reason
    assert len({row.score for row in by_case.values()}) > 1


def test_an_answer_without_a_judgment_is_an_error_and_no_zero(metric_class, monkeypatch, tmp_path):
    with MicroServer(EXAMPLES, roles={"silent": silent}) as server:
        name_judge(monkeypatch, "silent", server.base_url, tmp_path)
        with pytest.raises(Unscored):
            evaluate(cases()[:1], [metric_class()], display_config=QUIET)
        ignoring = ErrorConfig(ignore_errors=True)
        result = evaluate(
            cases()[:1], [metric_class()], display_config=QUIET, error_config=ignoring
        )
    (measured,) = result.test_results[0].metrics_data
    assert "unscored" in measured.error and measured.score is None and not measured.success


JUDGE = """
from memcalib.problem import judgment_for

def judge(example, answer):
    words = {"m1_a1": "peanuts", "m2_a1": "chess"}
    levels = {atom_id: "C" if word in answer else "A" for atom_id, word in words.items()}
    return judgment_for(example, levels, judge="by words")
"""


def test_the_test_of_the_page_runs_under_pytest(metric_class, tmp_path):
    (tmp_path / "words.py").write_text(JUDGE, encoding="utf-8")
    page = (tmp_path / "test_memory.py").read_text(encoding="utf-8")
    environment = {**os.environ, **judge_settings("words:judge", "", tmp_path)}
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_memory.py"]
    for answer, code in (("A cake without peanuts.", 0), ("A chess cake.", 1)):
        program = page.replace("An almond cake.", answer)
        (tmp_path / "test_memory.py").write_text(program, encoding="utf-8")
        done = subprocess.run(command, **options)
        assert done.returncode == code, done.stdout[-3000:]
        assert code == 0 or "Memory use" in done.stdout
