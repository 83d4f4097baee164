"""Properties of the nine channels and of group advantages:
slow oracles, random batches, bad input.
"""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.channels import channel_rewards, judgment_tensors
from memcalib.credit.advantages import (
    group_advantages,
    rms_scale,
    sequence_advantages,
)
from memcalib.problem import CHANNELS, AtomJudgment, Judgment, Level
from memcalib.rules.base import direction_check

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
NAN = float("nan")


@st.composite
def levels(draw, max_rows=6, max_atoms=5):
    """Rows of (ideal, actual) pairs, some rows empty."""
    pair = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return draw(st.lists(st.lists(pair, max_size=max_atoms), min_size=1, max_size=max_rows))


@st.composite
def batches(draw, columns=9):
    """Rewards on a coarse grid (ties and constant channels are common), groups, and valid flags."""
    rows = draw(st.integers(1, 12))
    value = st.sampled_from([-2.0, -1.0, -0.5, -1 / 3, 0.0, 1 / 3, 0.5, 1.0])
    rewards = torch.tensor(
        draw(
            st.lists(
                st.lists(value, min_size=columns, max_size=columns), min_size=rows, max_size=rows
            )
        )
    ).double()
    group = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    valid = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    return rewards, group, valid


def pad(rows, extra=0, fill=-7):
    width = max(map(len, rows)) + extra
    grid = [[*row, *[(fill, fill)] * (width - len(row))] for row in rows]
    tensor = torch.tensor(grid, dtype=torch.long).reshape(len(rows), width, 2)
    mask = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
    return tensor[..., 0], tensor[..., 1], mask


def slow_advantages(rewards, group, valid, **options):
    advantages = reference.group_advantages(
        rewards.tolist(), group.tolist(), valid.tolist(), **options
    )
    return torch.tensor(advantages, dtype=torch.float64)


@SETTINGS
@given(levels())
def test_rewards_equal_the_formula_row_by_row(rows):
    expected = torch.tensor([reference.channel_rewards(row) for row in rows], dtype=torch.float64)
    assert torch.allclose(channel_rewards(*pad(rows)), expected, atol=1e-12)


@SETTINGS
@given(levels(), st.integers(1, 4))
def test_padding_and_order_do_not_matter(rows, extra):
    rewards = channel_rewards(*pad(rows))
    assert torch.equal(channel_rewards(*pad(rows, extra)), rewards)
    assert torch.equal(channel_rewards(*pad(rows[::-1])), rewards.flip(0))


@SETTINGS
@given(levels())
def test_merging_over_use_keeps_every_total(rows):
    plain = channel_rewards(*pad(rows))
    merged = channel_rewards(*pad(rows), merge_over_use=True)
    assert not merged[:, 2].any()
    assert torch.allclose(merged[:, 1], plain[:, 1] + plain[:, 2])
    assert torch.equal(merged[:, 3:], plain[:, 3:])


@SETTINGS
@given(batches(), st.sampled_from([0, 1]))
def test_advantages_equal_the_slow_formula(batch, ddof):
    advantages = group_advantages(*batch, ddof=ddof)
    assert torch.allclose(advantages, slow_advantages(*batch, ddof=ddof), atol=1e-9)


@SETTINGS
@given(batches(), st.randoms(use_true_random=False))
def test_batch_order_and_group_names_do_not_matter(batch, random):
    rewards, group, valid = batch
    order = list(range(len(group)))
    random.shuffle(order)
    whole = group_advantages(rewards, group, valid)
    assert torch.allclose(
        group_advantages(rewards[order], 100 - 7 * group[order], valid[order]),
        whole[order],
        atol=1e-12,
    )


@SETTINGS
@given(batches())
def test_an_unscored_answer_leaves_its_group(batch):
    rewards, group, valid = batch
    dirty = torch.where(valid[:, None], rewards, NAN)
    whole = group_advantages(dirty, group, valid)
    assert torch.allclose(
        whole[valid], group_advantages(rewards[valid], group[valid], valid[valid]), atol=1e-12
    )
    assert not whole[~valid].any()
    sums = whole.sum(1)
    assert torch.allclose(rms_scale(sums, valid)[1], rms_scale(sums[valid], valid[valid])[1])


@SETTINGS
@given(batches(), st.floats(-2, 1))
def test_a_constant_channel_adds_nothing(batch, constant):
    rewards, group, valid = batch
    before = sequence_advantages(rewards, group, valid)
    widened = torch.cat([rewards, torch.full((len(group), 1), constant, dtype=torch.float64)], 1)
    assert torch.equal(sequence_advantages(widened, group, valid), before)


@SETTINGS
@given(batches())
def test_advantages_of_a_group_have_mean_zero_and_unit_spread(batch):
    rewards, group, valid = batch
    advantages = group_advantages(rewards, group, valid)
    for g in group[valid].unique():
        inside = advantages[valid & (group == g)]
        assert inside.mean(0).abs().max() < 1e-9
        spread = inside.std(0, correction=0)
        assert bool(((spread < 1e-9) | ((spread - 1).abs() < 1e-4)).all())


def test_float32_rewards_that_are_equal_count_as_constant():
    rewards = torch.full((8, 1), 1 / 3, dtype=torch.float32)
    advantages = group_advantages(rewards, torch.zeros(8, dtype=torch.long), torch.ones(8).bool())
    assert advantages.dtype == torch.float32 and not advantages.any()


@SETTINGS
@given(batches(columns=1))
def test_trl_constants_give_trl_advantages(batch):
    rewards, group, _ = batch
    valid = torch.ones(len(group), dtype=torch.bool)
    advantages = group_advantages(rewards, group, valid, ddof=1, eps=1e-4, sigma_min=0)
    for g in group.unique():
        x = rewards[group == g, 0]
        std = x.std() if len(x) > 1 else torch.tensor(0.0)
        assert torch.allclose(advantages[group == g, 0], (x - x.mean()) / (std + 1e-4), atol=1e-9)


@SETTINGS
@given(batches())
def test_grpo_normalizes_the_sum_and_gdpo_divides_by_the_rms(batch):
    rewards, group, valid = batch
    grpo = sequence_advantages(rewards, group, valid, "grpo")
    assert torch.allclose(
        grpo, slow_advantages(rewards.sum(1, keepdim=True), group, valid)[:, 0], atol=1e-9
    )
    sums = group_advantages(rewards, group, valid).sum(1)
    sigma = reference.rms(sums.tolist(), valid.tolist())
    assert torch.allclose(sequence_advantages(rewards, group, valid), sums / sigma, atol=1e-12)


def test_centring_and_token_weights():
    sums = torch.tensor([1.0, 3.0, NAN])
    valid = torch.tensor([True, True, False])
    shift, scale = rms_scale(sums, valid, center=True)
    assert shift == 2 and abs(scale - 1) < 1e-6
    shift, scale = rms_scale(sums, valid, center=True, weights=torch.tensor([3.0, 1.0, 5.0]))
    assert shift == 1.5 and abs(scale - 0.75**0.5) < 1e-6


def test_all_unscored_and_empty_batches_are_zero_not_nan():
    rewards = torch.full((3, 9), NAN)
    group = torch.zeros(3, dtype=torch.long)
    unscored = torch.zeros(3, dtype=torch.bool)
    assert not group_advantages(rewards, group, unscored).any()
    assert not sequence_advantages(rewards, group, unscored).any()
    assert rms_scale(torch.zeros(3), unscored)[1] == pytest.approx(1e-3)
    nothing = group_advantages(
        torch.zeros(0, 9), torch.zeros(0, dtype=torch.long), torch.zeros(0).bool()
    )
    assert nothing.shape == (0, 9)
    ideal, actual, mask, valid = judgment_tensors([])
    assert (
        ideal.shape == (0, 0)
        and valid.shape == (0,)
        and channel_rewards(ideal, actual, mask).shape == (0, 9)
    )


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_non_finite_rewards_of_a_scored_answer_are_named(bad):
    rewards = torch.zeros(3, 9)
    rewards[1, 4] = bad
    with pytest.raises(ValueError, match="row 1, column 4"):
        group_advantages(rewards, torch.zeros(3, dtype=torch.long), torch.ones(3).bool())


def test_bad_input_is_named():
    ones = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="row 0, atom 1: actual level 3"):
        channel_rewards(ones, torch.tensor([[1, 3]]), ones.bool())
    with pytest.raises(ValueError, match=r"row 0, atom 1: actual level -1; allowed: 0, 1, 2"):
        channel_rewards(ones.repeat(2, 1), torch.tensor([[1, -1], [3, 1]]), ones.repeat(2, 1) > 0)
    with pytest.raises(ValueError, match=r"the same shape \[row, atom\]"):
        channel_rewards(ones, torch.ones(1, 3, dtype=torch.long), ones.bool())
    rewards = torch.zeros(2, 9)
    group = torch.zeros(2, dtype=torch.long)
    valid = torch.ones(2).bool()
    with pytest.raises(ValueError, match="'ppo'; allowed:"):
        sequence_advantages(rewards, group, valid, "ppo")
    with pytest.raises(ValueError, match="rewards must have the shape"):
        group_advantages(rewards, group[:1], valid)
    for option in ({"eps": 0}, {"sigma_min": -1}, {"ddof": -1}):
        with pytest.raises(ValueError, match="eps must be"):
            group_advantages(rewards, group, valid, **option)


def test_judgments_become_padded_tensors():
    def judged(*pairs, error=None):
        atoms = [
            AtomJudgment(atom_id=str(i), ideal=Level(u), actual=v) for i, (u, v) in enumerate(pairs)
        ]
        return Judgment(example_id="x", domain="d", question_id="q", atoms=atoms, error=error)

    rows = [
        judged((0, 0), (2, 1)),
        judged((1, None), (0, 0)),
        judged(),
        judged((1, 1)),
        judged((1, 1), error="timeout"),
    ]
    ideal, actual, mask, valid = judgment_tensors(rows)
    assert valid.tolist() == [True, False, False, True, False]
    assert mask.sum(1).tolist() == [2, 0, 0, 1, 0]
    assert ideal[0].tolist() == [0, 2] and actual[0].tolist() == [0, 1]


def test_the_direction_check_needs_agreement():
    rewards = torch.tensor([[1.0, 1, -1, -1, 0, 1]])
    advantages = torch.tensor([[1.0, -1, -1, 1, 1, 0]])
    assert direction_check(rewards, advantages).tolist() == [
        [True, False, True, False, False, False]
    ]


def test_channel_names_are_the_index_rule():
    letters = [(CHANNELS[3 * i + a]) for i in range(3) for a in range(3)]
    expected = [
        f"{'ABC'[i]}{'' if i == a else 'ABC'[a]}{'+' if i == a else '-'}"
        for i in range(3)
        for a in range(3)
    ]
    assert letters == expected


def test_levels_must_be_integers_and_integer_rewards_keep_their_advantages():
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="signed integers"):
        channel_rewards(torch.tensor([[1.5]]), torch.tensor([[1]]), mask)
    rewards = torch.tensor([[1], [0]])
    group = torch.zeros(2, dtype=torch.long)
    valid = torch.ones(2, dtype=torch.bool)
    assert torch.allclose(
        group_advantages(rewards, group, valid).abs(),
        torch.ones(2, 1, dtype=torch.float64),
        atol=1e-4,
    )


def test_a_spread_of_just_the_least_is_enough():
    rewards = torch.tensor([[0.0], [2.0]]).double()
    group = torch.zeros(2).long()
    valid = torch.ones(2).bool()
    assert group_advantages(rewards, group, valid, sigma_min=1.0)[:, 0].tolist() == pytest.approx(
        [-1, 1], abs=1e-5
    )
    assert not group_advantages(rewards, group, valid, sigma_min=1.0 + 1e-9).any()
