"""The micro-world's file of preferences: RPEval's form, its shape,
and a judge that knows the truth.
"""

import random

import pytest

from memcalib.evaluation.rpeval import (
    load_rpeval,
    preference_statistics,
    rpeval_metrics,
    usage_counts,
)
from memcalib.products.micro.world import answer
from memcalib.products.micro.practice.preferences import (
    PreferenceJudge,
    preference_examples,
    write_preferences,
)
from memcalib.problem import Level


@pytest.fixture(scope="module")
def examples():
    return preference_examples(80, seed=3)


@pytest.fixture(scope="module")
def rows(examples, tmp_path_factory):
    path = tmp_path_factory.mktemp("rpeval") / "multi_testset.json"
    return load_rpeval(write_preferences(examples, path))


def test_the_file_has_the_shape_of_the_real_one(examples, rows):
    counts = preference_statistics(rows)
    assert counts["rows"] == 80
    assert counts["pairs with more than one target"] == 0
    assert 0.2 < counts["rows with only Ignore"] / 80 < 0.6
    assert 0.6 < counts["Ignore"] / counts["preferences"] < 0.9
    for row in rows:
        assert 2 <= len(row.atoms) <= 10
        assert len(row.blocks) == len(row.atoms)
    assert preference_examples(20, seed=3) == examples[:20]


@pytest.mark.parametrize(("level", "metric"), [(Level.IGNORE, "UPB"), (Level.CONTROL, "OPB")])
def test_one_sided_answers_err_on_that_side(examples, rows, level, metric):
    judge = PreferenceJudge(rows, examples)
    judgments = []
    for row, example in zip(rows, examples, strict=True):
        levels = dict.fromkeys(example.levels, level)
        judgments.append(judge(row, answer(example, random.Random(0), levels, world="short")))
    metrics = rpeval_metrics(usage_counts(judgments))
    assert metrics[metric] > 5
    assert metrics[metric] + metrics["Micro"] == pytest.approx(100)
    assert all(metrics[name] == 0 for name in {"OPB", "UPB", "RII"} - {metric})
