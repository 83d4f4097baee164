"""The micro-world's file of preferences: RPEval's form, its shape, and a judge that knows the truth."""

import random

import pytest

from memcalib.evaluation.rpeval import (
    load_rpeval,
    preference_statistics,
    rpeval_metrics,
    usage_counts,
)
from memcalib.practice.preferences import PreferenceJudge, preference_examples, write_preferences
from memcalib.micro.world import answer
from memcalib.problem import Level


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    own = preference_examples(80, seed=3)
    return own, load_rpeval(
        write_preferences(own, tmp_path_factory.mktemp("rpeval") / "multi_testset.json")
    )


def test_the_file_has_the_shape_of_the_real_one(files):
    own, loaded = files
    counts = preference_statistics(loaded)
    assert counts["rows"] == 80 and counts["pairs with more than one target"] == 0
    assert (
        0.2 < counts["rows with only Ignore"] / 80 < 0.6
        and 0.6 < counts["Ignore"] / counts["preferences"] < 0.9
    )
    assert all(2 <= len(e.atoms) <= 10 and len(e.blocks) == len(e.atoms) for e in loaded)
    assert preference_examples(20, seed=3) == own[:20]


@pytest.mark.parametrize(("level", "metric"), [(Level.IGNORE, "UPB"), (Level.CONTROL, "OPB")])
def test_one_sided_answers_err_on_that_side(files, level, metric):
    own, loaded = files
    judge = PreferenceJudge(loaded, own)
    said = [answer(e, random.Random(0), dict.fromkeys(e.levels, level), world="short") for e in own]
    found = rpeval_metrics(
        usage_counts([judge(e, text) for e, text in zip(loaded, said, strict=True)])
    )
    others = {"OPB", "UPB", "RII"} - {metric}
    assert found[metric] > 5 and found[metric] + found["Micro"] == pytest.approx(100)
    assert all(found[name] == 0 for name in others)
