"""The pairs that a rule has which says nothing about them: every channel with atoms but A+."""

from types import SimpleNamespace

import torch
from micro_policy import EXAMPLES

from memcalib.problem import CHANNELS, Judgment, judgment_for
from memcalib.products.micro.world import exact_judge
from memcalib.rules.base import CreditConfig, CreditRule, channel_atoms

A_PLUS = CHANNELS.index("A+")


def pairs_of(judgments: list[Judgment]):
    valid = torch.tensor([judgment.scored for judgment in judgments])
    answers = SimpleNamespace(judgments=judgments)
    return CreditRule().pairs(SimpleNamespace(answers=answers, valid=valid, config=CreditConfig()))


def test_memories_that_were_rightly_ignored_are_no_pair():
    judgment = exact_judge(EXAMPLES[0], "Nothing of that.")
    atoms_by_channel = channel_atoms(judgment)
    assert A_PLUS in atoms_by_channel and len(atoms_by_channel) > 1
    del atoms_by_channel[A_PLUS]
    pairs = pairs_of([judgment])
    assert dict(zip(pairs.channels, pairs.atoms, strict=True)) == atoms_by_channel
    assert pairs.rows == [0] * len(pairs) and pairs.prompts == [[]] * len(pairs)


def test_an_answer_without_a_score_has_no_pair():
    unscored = judgment_for(EXAMPLES[0], {}, error="timeout")
    scored = exact_judge(EXAMPLES[1], "Nothing of that.")
    assert set(pairs_of([unscored, scored]).rows) == {1}
