"""Probes of credit: what cannot be compared is refused or missing, never 0."""

import math

import pytest
import torch

from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.trainer.traces import _cosines, alignment
from memcalib.trainer.train_config import world_config


@pytest.mark.parametrize(("count", "batch"), [(0, 4), (3, 4), (4, 4), (7, 4)])
def test_fewer_than_two_batches_are_refused(count, batch):
    examples = make_examples("short", count, seed=1)
    configs = {"GDPO": world_config(WORLDS["short"], method="gdpo")}
    with pytest.raises(
        ValueError, match=f"{count} examples in batches of {batch}: allowed are 8 or more"
    ):
        alignment(build_policy(0), build_tokenizer(), examples, exact_judge, configs, batch=batch)


def test_a_cosine_with_nothing_is_missing():
    one, two = torch.eye(2)
    assert _cosines([one, two], [one, one + two]) == pytest.approx([0.5**0.5, 0])
    assert all(map(math.isnan, _cosines([0 * one, one], [0 * one, two])))
    assert all(map(math.isnan, _cosines([one], [one]))), "there is no other batch"
