"""The same answers under several rules: their means, and the kinds of their words."""

import pandas as pd
import pytest
import torch

from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.problem import Level
from memcalib.products.reproduction.token_means import (
    NO_MEMORY,
    OTHER,
    OVER,
    UNDER,
    credit_by_rule,
    token_frame,
    token_means,
    under_use_signal,
    word_kinds,
)

RULES = ["gdpo", "ordered", "ordered-two-sided"]


@pytest.fixture(scope="module")
def batch():
    return credit_by_rule(RULES, WORLDS["short"], prompts=4, generations=4)


def test_all_rules_see_the_same_answers_and_keep_their_means(batch):
    frame = token_frame(batch, "ordered")
    means = frame.groupby("row")[RULES].mean()
    for rule in RULES[1:]:
        assert (means["gdpo"] - means[rule]).abs().max() < 1e-5
    assert len(frame) == sum(len(answer) for answer in batch.answers)
    assert (frame["ordered"] != frame["ordered-two-sided"]).any()


def test_signal_is_the_largest_share_of_a_channel_of_under_use(batch):
    credit = batch.credit["ordered"]
    signal = under_use_signal(credit, batch.answers)
    slow = torch.zeros_like(signal)
    for pair in range(len(credit.pairs.row)):
        row = int(credit.pairs.row[pair])
        channel = int(credit.pairs.channel[pair])
        if channel not in (3, 6, 7):  # BA-, CA-, CB-
            continue
        weights = credit.pairs.q[pair].tolist()
        for token, weight in enumerate(weights):
            if sum(weights):
                share = weight / sum(weights) * len(batch.answers[row])
                slow[row, token] = max(float(slow[row, token]), share)
    assert torch.allclose(signal, slow, atol=1e-5) and signal.max() > 0


def test_a_rule_that_places_nothing_has_no_signal(batch):
    with pytest.raises(ValueError, match="without pairs"):
        under_use_signal(batch.credit["gdpo"], batch.answers)


def test_kinds_follow_from_the_judgment():
    example = make_examples("short", 1, 0)[0]
    nouns = {atom.atom_id: atom.usage_rubric["marker"]["noun"] for atom in example.atoms}
    ignored = next(atom for atom in example.atoms if atom.ideal == Level.IGNORE)
    judgment = exact_judge(example, f"Build the plan on {nouns[ignored.atom_id]}. Hope this helps.")
    words = [nouns[ignored.atom_id], "plan"]
    assert word_kinds(judgment, nouns, words) == [OVER, OTHER]
    control = next(atom for atom in example.atoms if atom.ideal == Level.CONTROL)
    silent = exact_judge(example, "Hope this helps.")
    assert word_kinds(silent, nouns, [nouns[control.atom_id]]) == [UNDER]
    unscored = silent.model_copy(
        update={"atoms": [atom.model_copy(update={"actual": None}) for atom in silent.atoms]}
    )
    assert word_kinds(unscored, nouns, [nouns[control.atom_id]]) == [NO_MEMORY]


def test_means_are_those_of_the_tokens():
    frame = pd.DataFrame(
        {
            "kind": [OVER, OVER, OTHER],
            "signal": [4.0, 0.0, 9.0],
            "gdpo": [1.0, 2.0, 3.0],
        }
    )
    table = token_means(frame, ["gdpo"])
    assert table.loc[(OVER, "strong"), "gdpo"] == 1 and table.loc[(OTHER, "strong"), "tokens"] == 1
    assert list(table.index) == [(OVER, "weak or none"), (OVER, "strong"), (OTHER, "strong")]
