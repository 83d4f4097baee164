"""Statistics of credit, checked against counting in plain Python;
what is missing is nan and never zero.
"""

import math
from statistics import fmean

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.credit.statistics import (
    FALLBACKS,
    channel_stats,
    conservation_stats,
    fallback_reasons,
    pair_counts,
    pair_stats,
)
from memcalib.localization import Thresholds
from memcalib.problem import CHANNELS
from memcalib.redistribution import PairDetail
from memcalib.rules.base import CreditConfig

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


def drawn_pairs(seed: int, rows: int = 4, tokens: int = 6) -> PairDetail:
    """Pairs of all kinds: unscored, without signal, without weight, shut, moved; the cap is 2."""
    torch.manual_seed(seed)
    count = int(torch.randint(0, 9, ()))

    def flags():
        return torch.rand(count) < 0.7

    scored = flags()
    signal = flags()
    weight = flags()
    moved = flags()
    q = torch.rand(count, tokens).double() * (weight & signal & scored)[:, None]
    m = torch.rand(count, tokens).double() * 4
    return PairDetail(
        row=torch.randint(0, rows, (count,)),
        channel=torch.randint(1, 9, (count,)),
        d=q,
        q=q,
        m=m,
        strength=torch.where(moved & (q.sum(1) > 0), 0.75, 0.0).double(),
        scored=scored,
        above_gate=signal & scored,
        opened=moved,
        capped=(m >= 2 - 1e-6).any(1),
    )


@SETTINGS
@given(seeds)
def test_every_pair_is_localized_or_has_the_first_reason_that_applies(seed):
    detail = drawn_pairs(seed)
    expected = reference.reasons(detail)
    assert fallback_reasons(detail) == expected
    counts = pair_counts(detail, CreditConfig())
    assert (
        counts["pairs"]
        == len(expected)
        == counts["localized"] + sum(counts[f"fallback_{x}"] for x in FALLBACKS)
    )
    for h, name in enumerate(CHANNELS):
        reasons_of_channel = [
            why
            for why, channel in zip(expected, detail.channel.tolist(), strict=True)
            if channel == h
        ]
        assert counts[f"candidates/{name}"] == len(reasons_of_channel)
        assert counts[f"localized/{name}"] == reasons_of_channel.count(None)


@SETTINGS
@given(seeds)
def test_spread_and_change_of_the_mean_against_loops(seed):
    detail = drawn_pairs(seed)
    config = CreditConfig(cap=2.0)
    live = torch.rand(4, 6) < 0.8
    advantages = torch.randn(4, 9).double()
    stats = pair_stats(detail, advantages, live, Thresholds(config), config)
    values = []
    capped = []
    changes = [0.0]
    for k, row in enumerate(detail.row.tolist()):
        inside = [t for t in range(6) if live[row, t]]
        change = fmean([detail.m[k, t].item() - 1 for t in inside]) if inside else 0.0
        strength = detail.strength[k].item()
        changes.append(abs(change * strength * advantages[row, detail.channel[k]].item()))
        if strength > 0:
            values += [detail.m[k, t].item() for t in inside]
            capped.append(any(x >= 2 - 1e-6 for x in detail.m[k].tolist()))
    assert stats["channel_conservation_error"] == pytest.approx(max(changes), abs=1e-12)
    if capped:
        assert stats["cap_share"] == pytest.approx(fmean(capped))
    else:
        assert math.isnan(stats["cap_share"])
    if values:
        assert stats["multiplier_p90"] == pytest.approx(np.percentile(values, 90))
        assert stats["multiplier_max"] == max(values)
    else:
        assert math.isnan(stats["multiplier_p50"]) and math.isnan(stats["multiplier_max"])


def test_thresholds_of_sentences_are_told_where_there_are_some():
    config = CreditConfig(granularity="sentence")
    stats = pair_stats(
        drawn_pairs(0), torch.zeros(4, 9), torch.ones(4, 6).bool(), Thresholds(config), config
    )
    assert stats["sentence_threshold/B+"] == config.sentence_start
    assert not any(
        name.startswith("sentence")
        for name in pair_stats(
            drawn_pairs(0),
            torch.zeros(4, 9),
            torch.ones(4, 6).bool(),
            Thresholds(CreditConfig()),
            CreditConfig(),
        )
    )


@SETTINGS
@given(seeds)
def test_channel_statistics_count_scored_answers_only(seed):
    torch.manual_seed(seed)
    levels = torch.tensor([1, -1, -2, -1, 1, -1, -2, -1, 1], dtype=torch.float64)
    rewards = levels * (torch.rand(8, 9) < 0.4)
    group = torch.arange(8) // 2
    valid = torch.rand(8) < 0.8
    advantages = torch.where((valid & (torch.rand(8) < 0.7))[:, None], rewards, 0)
    stats = channel_stats(rewards, advantages, group, valid, CreditConfig())
    rows = [r for r in range(8) if valid[r]]
    groups = sorted({group[r].item() for r in rows})
    for h, name in enumerate(CHANNELS):
        channel_rewards = [rewards[r, h].item() for r in rows]
        if not rows:
            assert math.isnan(stats[f"trigger/{name}"]) and math.isnan(stats[f"reward/{name}"])
            continue
        assert stats[f"trigger/{name}"] == pytest.approx(
            fmean(x != 0 for x in channel_rewards), abs=0
        )
        assert stats[f"reward/{name}"] == pytest.approx(fmean(channel_rewards), abs=1e-12)
        differ = [any(advantages[r, h] != 0 for r in range(8) if group[r] == g) for g in groups]
        assert stats[f"nondegenerate/{name}"] == pytest.approx(fmean(differ))
        ideal = h // 3 * 3
        with_atoms = [
            g
            for g in groups
            if any(rewards[r, ideal : ideal + 3].any() for r in rows if group[r] == g)
        ]
        assert stats[f"groups/{name}"] == len(with_atoms)
        shares = [
            stats[f"{kind}/{name}"] for kind in ("all_best", "all_worst", "all_middle", "mixed")
        ]
        assert sum(shares) == pytest.approx(1) if with_atoms else all(map(math.isnan, shares))


def test_shares_are_exact_in_float64():
    rewards = torch.zeros(3, 9)
    rewards[0, 4] = 1
    stats = channel_stats(
        rewards, rewards, torch.zeros(3, dtype=torch.long), torch.ones(3).bool(), CreditConfig()
    )
    assert stats["trigger/B+"] == stats["reward/B+"] == 1 / 3


def test_conservation_sees_a_lost_advantage_and_forgives_rounding():
    tokens = torch.tensor([[1e6 + 0.1, -1e6], [0.3, 0.1]], dtype=torch.float64)
    live = torch.ones(2, 2, dtype=torch.bool)
    stats = conservation_stats(tokens, tokens.mean(1), live)
    assert stats["conservation_error"] > 1e-3 and stats["conservation_relative"] < 1e-7
    lost = conservation_stats(tokens * torch.tensor([[1.0], [0.0]]), tokens.mean(1), live)
    assert lost["conservation_relative"] == pytest.approx(0.2)
    empty = conservation_stats(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 2).bool())
    assert empty == {"conservation_error": 0.0, "conservation_relative": 0.0}
