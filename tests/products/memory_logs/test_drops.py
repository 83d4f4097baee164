"""Drops of a metric: exact rates on small cases, properties, and a simulation of whole builds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.memory_logs.drops import (
    DropRule,
    caught_drop,
    drop_p,
    drop_test,
    drops,
    questions_needed,
)

POINTS = st.lists(st.sampled_from([0, 25, 50, 75, 100]), min_size=1, max_size=10)


@given(POINTS)
def test_p_counts_the_patterns_that_are_as_large(values):
    fell = np.array(values, float) - 50
    patterns = np.array(np.meshgrid(*[[-1, 1]] * len(fell))).reshape(len(fell), -1).T
    sums = patterns @ fell
    if fell.sum() > 0:
        assert drop_p(fell) == pytest.approx((sums >= fell.sum() - 1e-6).mean())
    else:
        assert drop_p(fell) >= 0.5


@given(st.floats(0, 60), st.floats(3, 40), st.floats(0.5, 20))
def test_more_noise_and_smaller_drops_need_more_questions(spread, drop, extra):
    rule = DropRule(max_drop=1, drop=drop)
    assert questions_needed(spread + extra, rule) >= questions_needed(spread, rule)
    assert questions_needed(spread, DropRule(max_drop=1, drop=drop + extra)) <= questions_needed(
        spread, rule
    )
    stricter = DropRule(max_drop=1, drop=drop, false_alarms=0.001)
    assert questions_needed(spread, stricter) >= questions_needed(spread, rule)


@given(st.floats(0, 60), st.integers(1, 3000))
def test_the_drop_that_is_caught_is_the_smallest_that_so_many_questions_catch(spread, questions):
    rule = DropRule()
    smallest = caught_drop(spread, questions, rule)
    if smallest is None:
        assert questions_needed(spread, DropRule(drop=100)) > questions
        return
    assert questions_needed(spread, DropRule(drop=smallest)) <= questions
    if smallest > rule.max_drop + 0.15:
        assert questions_needed(spread, DropRule(drop=round(smallest - 0.1, 1))) > questions


@pytest.mark.parametrize("metric", ["sMOS", "sMUS", "AOR", "AUR"])
def test_a_rise_of_an_error_is_a_drop(metric):
    assert drops(metric, np.array([10.0]), np.array([30.0])).tolist() == [20]
    assert drops("SCS", np.array([10.0]), np.array([30.0])).tolist() == [-20]


def test_verdicts_at_the_edges():
    one = drop_test(np.array([50.0]), DropRule())
    assert one["verdict"] == "undecided" and one["needed"] is None and math.isnan(one["spread"])
    same = drop_test(np.zeros(30), DropRule(max_drop=0))
    assert same["verdict"] == "passed" and same["drop"] == 0
    # six signs of 64 patterns cannot show what is asked at one in a hundred; seven can
    assert drop_test(np.full(6, 50.0), DropRule())["verdict"] == "undecided"
    assert drop_test(np.full(7, 50.0), DropRule())["verdict"] == "failed"
    # two metrics share the rate of false alarms
    assert drop_test(np.full(7, 50.0), DropRule(), tests=2)["verdict"] == "undecided"
    with pytest.raises(ValueError, match="no question"):
        drop_p(np.array([]))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_drop": -1}, "max_drop"),
        ({"false_alarms": 0}, "false_alarms"),
        ({"caught": 1}, "caught"),
        ({"drop": 2}, "drop"),
        ({"max_drop": math.nan}, "max_drop"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(fields, name):
    with pytest.raises(ValueError, match=f"{name}: found"):
        DropRule(**fields)


def _run(difficulty, rng, samples):
    """SCS of each question: Poisson many wrong steps, more for harder questions."""
    answers = [100 * 0.5 ** rng.poisson(difficulty) for _ in range(samples)]
    return np.mean(answers, axis=0)


def _pair(questions, kind, drop, samples, rng):
    """SCS before and after on each question, with a drop of `drop` points of one kind."""
    difficulty = rng.gamma(0.8, 0.8, questions)
    before = _run(difficulty, rng, samples)
    expected = 100 / 1.4**0.8  # the mean of 100 exp(-difficulty / 2) under this gamma
    if kind == "everywhere":
        harder = difficulty - 2 * np.log(1 - drop / expected)
        return before, _run(harder, rng, samples)
    after = _run(difficulty, rng, samples)
    if kind == "in few questions":
        after = after * (rng.random(questions) > drop / expected)
    return before, after


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", ["nothing changed", "everywhere", "in few questions"])
def test_rates_of_whole_builds_are_as_stated(samples, kind):
    """Each build is judged at the number of questions that a first pair of runs on 150 states."""
    rng = np.random.default_rng(30)
    rule = DropRule()
    builds = 100
    failed = 0
    for build in range(builds):
        first, second = _pair(150, "nothing changed", 0, samples, rng)
        stated = questions_needed(drops("SCS", first, second).std(ddof=1), rule)
        before, after = _pair(stated, kind, 5.0, samples, rng)
        verdict = drop_test(drops("SCS", before, after), rule, seed=build)["verdict"]
        failed += verdict == "failed"
    if kind == "nothing changed":
        assert failed <= 0.02 * builds, failed
    else:
        assert failed >= 0.95 * builds, failed
