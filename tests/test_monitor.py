"""Numbers about a run: joined over processes, and missing where there is nothing to tell."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.monitor import merge_stats

moved = st.fixed_dictionaries(
    {"localized": st.integers(1, 50), "cap_share": st.floats(0, 1), "multiplier_p50": st.floats(0, 4)}
)
still = st.just({"localized": 0, "cap_share": math.nan, "multiplier_p50": math.nan})


@given(st.lists(moved | still, min_size=1, max_size=5))
def test_shares_and_percentiles_are_means_over_localized_pairs(parts):
    """Slow reference: one entry a pair; processes that localized nothing have no entry."""
    parts = [part | {"multiplier_max": part["multiplier_p50"]} for part in parts]
    merged = merge_stats(parts)
    for name in ("cap_share", "multiplier_p50"):
        pairs = [part[name] for part in parts for _ in range(part["localized"])]
        wanted = sum(pairs) / len(pairs) if pairs else math.nan
        assert merged[name] == pytest.approx(wanted, nan_ok=True)
    largest = [part["multiplier_max"] for part in parts if part["localized"]]
    assert merged["multiplier_max"] == pytest.approx(max(largest, default=math.nan), nan_ok=True)
    assert merged["localized"] == sum(part["localized"] for part in parts)
