"""Properties of the projection: range, mean and bisection, and bad input."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.redistribution import (
    _sorted_rows,
    project_multipliers,
    project_reference,
    raw_multipliers,
    token_advantages,
)

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)
NAN = float("nan")


@st.composite
def weights(draw):
    """Non-negative weights of ragged rows: many zeros, ties, spikes."""
    value = st.one_of(
        st.just(0.0), st.sampled_from([0.5, 1.0, 3.0]), st.floats(0, 1e3), st.floats(0, 1e-6)
    )
    rows = draw(st.lists(st.lists(value, min_size=1, max_size=30), min_size=1, max_size=5))
    width = max(map(len, rows)) + draw(st.integers(0, 3))
    q = torch.tensor([row + [NAN] * (width - len(row)) for row in rows], dtype=torch.float64)
    return q, ~q.isnan()


@SETTINGS
@given(weights(), st.floats(1, 20))
def test_projection_equals_bisection_and_keeps_range_and_mean(drawn, cap):
    q, mask = drawn
    m = raw_multipliers(q, mask)
    out = project_multipliers(m, mask, cap)
    for i, n in enumerate(mask.sum(1).tolist()):
        slow = torch.tensor(project_reference(m[i, :n].tolist(), cap), dtype=torch.float64)
        assert (out[i, :n] - slow).abs().max() < 1e-6
        assert not out[i, n:].any()
        single = out[i, :n].float()
        assert abs(single.mean() - 1) < 1e-6 and single.min() >= 0 and single.max() <= cap + 1e-6


@SETTINGS
@given(weights())
def test_projection_ignores_padding_order_and_dtype(drawn):
    q, mask = drawn
    m = raw_multipliers(q, mask)
    out = project_multipliers(m, mask)
    wider = project_multipliers(
        torch.nn.functional.pad(m, (0, 4), value=7.0),
        torch.nn.functional.pad(mask, (0, 4), value=False),
    )
    assert torch.equal(wider[:, :-4], out)
    assert torch.allclose(
        project_multipliers(m.flip(0, 1), mask.flip(0, 1)).flip(0, 1), out, atol=1e-12
    )
    assert torch.allclose(project_multipliers(m.float(), mask).double(), out, atol=1e-3)


@SETTINGS
@given(st.lists(st.floats(-5, 50), min_size=1, max_size=20), st.floats(1, 6))
def test_projection_of_any_numbers_is_feasible(values, cap):
    out = project_multipliers(
        torch.tensor([values], dtype=torch.float64), torch.ones(1, len(values)).bool(), cap
    )
    assert abs(out.mean() - 1) < 1e-9 and out.min() >= 0 and out.max() <= cap


def test_rows_are_sorted_upwards_on_every_device():
    values = torch.tensor([[3.0, 1.0, 2.0], [0.0, torch.inf, -1.0]])
    ascending = [[1.0, 2.0, 3.0], [-1.0, 0.0, torch.inf]]
    assert _sorted_rows(values).tolist() == ascending
    elsewhere = SimpleNamespace(device=torch.device("cuda"), sort=values.sort)
    assert _sorted_rows(elsewhere).tolist() == ascending


def test_worked_projections():
    spike = torch.zeros(1, 100, dtype=torch.float32)
    spike[0, 3] = 100
    out = project_multipliers(spike, torch.ones(1, 100).bool())
    assert (
        out[0, 3] == 4
        and out[0, 4] == pytest.approx(0.969697, abs=1e-6)
        and out.dtype == torch.float32
    )
    assert project_multipliers(
        torch.tensor([[5.0, 0.0]]), torch.ones(1, 2).bool(), 1.0
    ).tolist() == [[1, 1]]
    assert project_multipliers(torch.tensor([[9.0]]), torch.ones(1, 1).bool()).tolist() == [[1]]
    even = torch.ones(2, 7)
    assert torch.equal(project_multipliers(even, even.bool()), even)


def test_large_batch_keeps_the_mean_in_float32():
    generator = torch.Generator().manual_seed(0)
    m = raw_multipliers(
        torch.rand(64, 512, generator=generator).pow(20), torch.ones(64, 512).bool()
    ).float()
    assert (project_multipliers(m, torch.ones(64, 512).bool()).mean(1) - 1).abs().max() < 1e-6


def test_empty_rows_and_empty_batches_project_to_nothing():
    mask = torch.tensor([[False, False], [True, False]])
    assert project_multipliers(torch.full((2, 2), 2.0), mask).tolist() == [[0, 0], [1, 0]]
    assert project_multipliers(torch.zeros(3, 4), torch.zeros(3, 4).bool()).shape == (3, 4)
    assert project_multipliers(torch.zeros(0, 4), torch.zeros(0, 4).bool()).shape == (0, 4)
    assert project_multipliers(torch.zeros(2, 0), torch.zeros(2, 0).bool()).shape == (2, 0)


@pytest.mark.parametrize("cap", [0.99, 0, -1, NAN])
def test_a_cap_below_one_is_refused(cap):
    with pytest.raises(ValueError, match="finite and at least 1"):
        project_multipliers(torch.ones(1, 2), torch.ones(1, 2).bool(), cap)


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_non_finite_multipliers_are_named(bad):
    m = torch.ones(3, 2)
    m[1, 1] = bad
    with pytest.raises(ValueError, match="row 1"):
        project_multipliers(m, torch.ones(3, 2).bool())
    assert project_multipliers(m, torch.tensor([[True, True], [True, False], [True, True]]))[
        1
    ].tolist() == [1, 0]


def test_token_advantages_without_pairs_are_the_plain_sum():
    a = torch.arange(18.0).reshape(2, 9)
    none = torch.zeros(0, dtype=torch.long)
    out = token_advantages(
        a, torch.zeros(0, 3), torch.zeros(0), none, none, torch.ones(2, 3).bool()
    )
    assert torch.equal(out, a.double().sum(1, keepdim=True).expand(2, 3))


def test_an_infinite_cap_is_refused():
    with pytest.raises(ValueError, match="finite"):
        project_multipliers(
            torch.tensor([[0.0, 4.0]]), torch.ones(1, 2, dtype=torch.bool), float("inf")
        )
