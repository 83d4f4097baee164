"""Factors of sentences against a loop over tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.reproduction.dynamics import sentence_scaling


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0, 4), st.integers(0, 2)), min_size=1, max_size=12),
        min_size=1,
        max_size=5,
    )
)
def test_scaling_is_weighted_by_tokens(drawn):
    rows = [sorted(row, key=lambda pair: pair[1]) for row in drawn]
    names = [{u: k for k, u in enumerate(dict.fromkeys(u for _, u in row))} for row in rows]
    units = [[name[u] for _, u in row] for row, name in zip(rows, names, strict=True)]
    m = [[x for x, _ in row] for row in rows]
    scaling = sentence_scaling(m, [0.75] * len(m), units, percentiles=(50,))
    per_token = []
    for values, unit in zip(m, units, strict=True):
        mean = {
            u: np.mean([x for x, v in zip(values, unit, strict=True) if v == u]) for u in set(unit)
        }
        per_token += [0.25 + 0.75 * mean[u] for u in unit]
    assert scaling["mean"] == pytest.approx(np.mean(per_token))
    assert scaling["p50"] == pytest.approx(sorted(per_token)[int(np.ceil(len(per_token) / 2)) - 1])
