"""Each shipped rule of credit against an independent reading in plain loops,
on answers with open and with closed pairs.
"""

from dataclasses import replace

import pytest
import slow_rules
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_policy import TOKENIZER
from slow_rules import divergences, judged_answers, log_probabilities, slow_credit

from memcalib.credit import token_credit
from memcalib.credit.token_credit import CreditRequest, TokenCredit
from memcalib.inference.sampling import prompt_encoder
from memcalib.problem import CHANNELS
from memcalib.rules.base import (
    NOTHING,
    CreditConfig,
    credit_rule,
    rule_names,
    rule_settings,
)

torch.set_num_threads(1)
ENCODE = prompt_encoder(TOKENIZER, prompt_template="micro")
SETTINGS = settings(max_examples=6, deadline=None, derandomize=True)
SMALL = dict(threshold_minimum=16, sentence_minimum=4)
PLACING = [name for name in rule_names() if credit_rule(name).places and name != "exact"]
ETA = {name: 0.2 + 0.1 * h for h, name in enumerate(CHANNELS)} | {"A+": 0.0}


def read(request: CreditRequest) -> list[list[float]]:
    """What a model would say of the rows of a request."""
    if request.without:
        rows = zip(request.prompts, request.without, request.responses, strict=True)
        return [divergences(*row) for row in rows]
    rows = zip(request.prompts, request.responses, strict=True)
    return [log_probabilities(*row) for row in rows]


def credited(config: CreditConfig, examples, judged, answers) -> tuple[TokenCredit, torch.Tensor]:
    """The package's credit of a batch, and its token advantages."""
    credit = TokenCredit(TOKENIZER, config, ENCODE)
    request = credit.requests(examples, judged, answers)
    return credit, credit.assign(request, read(request))


def check(rule: str, config: CreditConfig, seed: int, cut: bool) -> None:
    examples, judged, answers = judged_answers(seed, cut)
    slow = slow_credit(rule, config, examples, judged, answers)
    credit, advantages = credited(config, examples, judged, answers)
    for row, values in enumerate(slow.advantages):
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(
            advantages[row, : len(values)].double(), expected, atol=2e-5, rtol=1e-5
        )
        assert not advantages[row, len(values) :].any()
    assert credit.thresholds.value.tolist() == pytest.approx(slow.thresholds, abs=1e-9)
    detail = credit.last.pairs
    if detail is None:
        assert not slow.placements
        return
    places_found = list(zip(detail.row.tolist(), detail.channel.tolist(), strict=True))
    assert places_found == [(placement.row, placement.column) for placement in slow.placements]
    assert detail.opened.tolist() == [placement.opened for placement in slow.placements]


@SETTINGS
@given(
    st.integers(0, 10_000),
    st.sampled_from(["token", "sentence"]),
    st.sampled_from(["all", "open"]),
    st.sampled_from(["suppressed", "uniform", "absolute"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@pytest.mark.parametrize("rule", PLACING)
def test_a_rule_is_what_plain_loops_give(
    rule, seed, granularity, pool, under_use, merged, one_sided, cut
):
    config = CreditConfig(
        **rule_settings(rule),
        granularity=granularity,
        threshold_pool=pool,
        under_use=under_use,
        merge_over_use=merged,
        direction_check=one_sided,
        eta=ETA,
        **SMALL,
    )
    check(rule, config, seed, cut)


@SETTINGS
@given(st.integers(0, 10_000), st.booleans(), st.booleans())
@pytest.mark.parametrize("rule", ["grpo", "gdpo", "exact"])
def test_rules_without_pairs_are_what_plain_loops_give(rule, seed, merged, cut):
    config = CreditConfig(**rule_settings(rule), merge_over_use=merged, **SMALL)
    check(rule, config, seed, cut)


def test_every_rule_has_a_slow_reading():
    assert slow_rules.PLACEMENTS.keys() == set(rule_names())


@pytest.mark.parametrize("rule", [name for name in PLACING if name != "contrast"])
def test_the_answers_hold_closed_pairs_that_would_be_moved(rule):
    """A rule that forgot its condition would be seen:
    pairs with R A <= 0 have weights to follow.
    """
    config = CreditConfig(**rule_settings(rule), **SMALL)
    weighted = 0
    moved = 0
    closed = 0
    for seed in range(4):
        examples, judged, answers = judged_answers(seed)
        for placement in slow_credit(rule, config, examples, judged, answers).placements:
            has_weights = any(portion.share * sum(portion.q) > 0 for portion in placement.parts)
            weighted += has_weights and not placement.opened
            moved += has_weights and placement.opened
        credit, _ = credited(config, examples, judged, answers)
        closed += credit.last.stats["fallback_closed"]
    assert weighted >= 5 and moved >= 5 and closed >= weighted


@pytest.mark.parametrize("rule", PLACING)
def test_what_could_not_be_read_keeps_its_share_uniform_and_teaches_nothing(rule):
    examples, judged, answers = judged_answers(3)
    config = CreditConfig(**rule_settings(rule), **SMALL)
    credit = TokenCredit(TOKENIZER, config, ENCODE)
    request = credit.requests(examples, judged, answers)
    again = sorted({k for k in request.read_again if k >= 0})
    scores = [None if k in again else row for k, row in enumerate(read(request))]
    credit.assign(request, scores)
    detail = credit.last.pairs
    needs = torch.tensor([bool(prompt) for prompt in request.pairs.prompts])
    shares = getattr(request.pairs, "shares", torch.zeros(len(needs), 2))
    assert detail.scored.tolist() == (~needs | (shares[:, 0] > 0)).tolist()
    assert credit.thresholds.value.tolist() == [config.threshold_start] * 9
    assert not detail.strength[~detail.scored].any()


READING = [name for name in PLACING if credit_rule(name).reads != NOTHING]


@pytest.mark.parametrize("rule", READING)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_stands_at_padding_makes_no_pair_uncomputed(rule, value, monkeypatch):
    """Engines fill the rest of a shorter row with what they like."""
    config = CreditConfig(**rule_settings(rule), **SMALL)
    batch = judged_answers(3, cut=True)
    plain, expected = credited(config, *batch)
    original = token_credit.credit_of_batch

    def with_padding_filled(answers, seen, *, scores, pairs, **options):
        padding = ~seen.mask[torch.tensor(pairs.rows)]
        assert padding.any(1).sum() > 3
        full = None if seen.full is None else seen.full.masked_fill(~seen.mask, value)
        return original(
            answers,
            replace(seen, full=full),
            scores=scores.masked_fill(padding, value),
            pairs=pairs,
            **options,
        )

    monkeypatch.setattr(token_credit, "credit_of_batch", with_padding_filled)
    filled, advantages = credited(config, *batch)
    assert torch.equal(advantages, expected)
    assert torch.equal(filled.last.pairs.scored, plain.last.pairs.scored)
    assert filled.last.pairs.scored.any()
    assert filled.state_dict() == plain.state_dict()
