"""Counts of a memory over many answers, against plain loops."""

import math

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.evaluation.footprints import footprint_sentence, memory_frame

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["tea", "kayak", "chess"]),
        st.sampled_from([0.0, 1.0, 2.0, math.nan]),
        st.sampled_from(["", "follows", "misreads"]),
    ),
    max_size=20,
)


def counted_slowly(rows) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for memory, footprint, stance in rows:
        line = counts.setdefault(memory, [0, 0, 0, 0, 0])
        line[0] += 1
        line[1] += footprint > 0
        line[2] += footprint == 2
        line[3] += stance == "misreads"
        line[4] += math.isnan(footprint)
    return counts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ROWS)
def test_memories_are_counted_over_answers_and_sorted_by_harm(rows):
    frame = pd.DataFrame(rows, columns=["memory", "footprint", "stance"])
    table = memory_frame(frame)
    expected = counted_slowly(rows)
    assert len(table) == len(expected)
    for memory, *counts in table.itertuples(index=False):
        assert counts == expected[memory]
    if len(table):
        order = table[["misread", "decided the answer", "left a trace"]].to_numpy().tolist()
        assert order == sorted(order, reverse=True)


def test_the_sentence_counts_traces_and_decisions_apart():
    rows = [("e1", "m", 0, 0.0), ("e1", "m", 0, 1.0), ("e1", "m", 1, 2.0), ("e2", "m", 0, math.nan)]
    frame = pd.DataFrame(rows, columns=["example_id", "model", "sample", "footprint"])
    frame = frame.assign(stance=["", "misreads", "", ""], memory=["a", "b", "a", "b"])
    sentence = footprint_sentence(frame)
    assert sentence == (
        "3 answers had 3 memories in the prompt (2 different): 2 left a trace, and 1 decided "
        "the answer. 1 is misread. 1 is unscored."
    )
