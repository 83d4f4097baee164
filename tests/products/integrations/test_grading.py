"""Grading for other frameworks: cases, judges by name, and answers without a judgment."""

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.inference.endpoint import CallError
from memcalib.products.integrations import grading
from memcalib.products.integrations.grading import (
    Unscored,
    agrade,
    grade,
    graded_example,
    grading_judge,
)
from memcalib.metrics import calibration_metrics
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import DataError, judgment_for

CASE = {
    "question": "What can I bake?",
    "memories": [
        {"text": "Allergic to nuts.", "level": "control"},
        {"text": "Plays chess.", "level": "A"},
    ],
}
LEVELS = st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from("ABC")), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in ("MEMCALIB_JUDGE", "MEMCALIB_JUDGE_URL", "MEMCALIB_JUDGE_KEY_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMCALIB_CACHE", str(tmp_path / "calls.sqlite"))
    grading._kept_judge.cache_clear()
    yield
    grading._kept_judge.cache_clear()


@given(LEVELS)
def test_the_numbers_are_those_of_the_metrics(levels):
    memories = [{"text": f"M{n}.", "level": ideal} for n, (ideal, _) in enumerate(levels)]

    def judge(example, answer):
        return judgment_for(example, dict(zip(example.levels, [a for _, a in levels], strict=True)))

    graded = grade({"question": "Q?", "memories": memories}, "x", judge)
    metrics = calibration_metrics([graded.judgment.over], [graded.judgment.under])
    assert 100 * graded.score == pytest.approx(metrics["SCS"])
    assert 100 * graded.over_use == pytest.approx(metrics["sMOS"])
    assert 100 * graded.under_use == pytest.approx(metrics["sMUS"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({}, "found the fields .none.; allowed: a record"),
        ({"question": "Q?"}, "found the fields question; allowed"),
        ({"question": ["Q?"], "memories": []}, "allowed: a record with memory_blocks"),
        ({"question": "Q?", "memories": ["text"]}, "no text or no level in memory 1 of 'Q"),
        ({"question": "Q?", "memories": [{"text": "M."}]}, "no text or no level in memory 1"),
        ({"question": "Q?", "memories": [{"text": "M.", "level": "often"}]}, "often"),
    ],
)
def test_what_is_no_case_is_named(case, message):
    with pytest.raises((ValueError, DataError), match=message):
        graded_example(case)


def test_the_judge_is_named_by_arguments_or_environment(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="judge: found none; allowed: .* MEMCALIB_JUDGE"):
        grading_judge()
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(CallError, match="set NO_SUCH_KEY"):
        grading_judge("some-judge", key_env="NO_SUCH_KEY")
    (tmp_path / "words.py").write_text("def judge(example, answer): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MEMCALIB_JUDGE", "words:judge")
    assert grading_judge() is sys.modules["words"].judge
    assert grading_judge("other", "http://localhost:9/v1", "").name.startswith("other")


def test_the_same_answer_is_paid_for_once():
    examples = make_examples("short", 1, seed=1)
    record = examples[0].model_dump(mode="json", by_alias=True)
    with MicroServer(examples) as server:
        place = ("micro-judge", server.base_url, "")
        first = grade(record, "Nothing.", grading_judge(*place))
        grading._kept_judge.cache_clear()
        again = asyncio.run(agrade(record, "Nothing.", grading_judge(*place)))
        assert first.numbers == again.numbers and server.stats()["requests"] == 1


def test_no_judgment_is_no_grade():
    with pytest.raises(Unscored, match="unscored: away"):
        grade(CASE, "x", lambda example, answer: judgment_for(example, {}, error="away"))
    partly = {"m1_a1": "C"}
    with pytest.raises(Unscored):
        grade(CASE, "x", lambda example, answer: judgment_for(example, partly))


def test_a_judgment_of_another_question_is_refused():
    other = graded_example({**CASE, "question": "Which game?"})
    wrong = judgment_for(other, other.levels)
    with pytest.raises(DataError):
        grade(CASE, "x", lambda example, answer: wrong)
