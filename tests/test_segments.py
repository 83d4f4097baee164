"""Segments cover every token once, in order, within their sizes, and respect what Markdown keeps whole."""

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.segments import boundaries, cheapest_cuts, is_label, merge_short, outline, segment, sentence_splitter

SPLIT = sentence_splitter("pysbd")
STRUCTURE = [
    "# Head\n\n",
    "You need:\n\n",
    "- one item\n",
    "- two. Three words.\n",
    "1. first\n",
    "2. second\n",
    "***\n",
]
BLOCKS = ["```py\nx = 1. y\n```\n", "| a | b |\n|---|---|\n| 1. x | 2 |\n", "**Bold**\n\n", "> a quote. More.\n\n"]
WORDS = ["Some words here. ", "`a.b c`. ", "e.g. this, Dr. Who; then: that ", "word " * 40, "x" * 300 + " ", "🙂 "]
PIECES = st.sampled_from([*STRUCTURE, *BLOCKS, *WORDS, "\n\n", "\r\n", "<b>tag</b> ", "$a. b$ ", "[l. m](u)"])
TEXTS = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=80)
PLAIN = lambda text: [m.start() for m in re.finditer(r"(?<=[.?!] )\S", text)]


def tokens(text: str) -> list[tuple[int, int]]:
    """Spans like a byte-pair tokenizer's: up to five characters, a leading space with its word."""
    return [m.span() for m in re.finditer(r"\s?\S{1,5}|\s", text)]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 6), st.integers(6, 40))
def test_every_token_once_in_order_and_size(text, least, most):
    spans = tokens(text)
    units = segment(text, spans, PLAIN, least, most)
    assert len(units) == len(spans) and units == sorted(units)
    assert not spans or set(units) == set(range(units[-1] + 1))
    sizes = [units.count(k) for k in range(units[-1] + 1)] if units else []
    assert all(size <= most for size in sizes)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_boundaries_are_places_of_the_text(text):
    found = boundaries(text, PLAIN)
    assert list(found) == sorted(found) and next(iter(found)) == 0
    assert all(0 <= place < max(len(text), 1) for place in found)
    plan = outline(text)
    for place, hard in found.items():
        assert hard or place == 0 or not any(a < place < b for a, b in plan.whole)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([2.0, 4.0, 12.0, 40.0, 100.0, 1000.0]), min_size=1, max_size=10), st.integers(1, 3))
def test_cuts_are_the_cheapest(costs, least):
    most = 4

    def price(cuts):
        edges = [0, *cuts, len(costs)]
        sizes = [b - a for a, b in pairwise(edges)]
        if max(sizes) > most:
            return float("inf")
        return sum(costs[c] for c in cuts) + sum(50 * max(0, least - s) + abs(s - 3) / 3 for s in sizes)

    every = [cuts for n in range(len(costs)) for cuts in combinations(range(1, len(costs)), n)]
    assert price(cheapest_cuts(costs, least, most)) == pytest.approx(min(map(price, every)))


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 39), max_size=12), st.sets(st.integers(1, 39), max_size=4))
def test_short_pieces_stay_only_where_they_must(firsts, hard):
    starts = sorted({0, *firsts})
    kept = merge_short(starts, hard | {0}, 40, 4, 12)
    assert set(kept) <= set(starts) and kept[0] == 0 and (hard & set(starts)) <= set(kept)
    edges = [*kept, 40]
    for k, (a, b) in enumerate(pairwise(edges)):
        if b - a < 4 and len(kept) > 1:
            right = k + 1 < len(kept) and kept[k + 1] not in hard and edges[k + 2] - a <= 12
            left = k > 0 and a not in hard and b - kept[k - 1] <= 12
            assert not right and not left


def test_markdown_of_an_answer():
    text = "# Plan\n\nYou need:\n\n- oats\n- milk\n\nRun `a. b` now. Then stop.\n\n```\none. two.\nthree.\n```\nDone."
    parts = [text[a:b] for a, b in pairwise([*boundaries(text, SPLIT), len(text)])]
    assert parts == [
        "# Plan\n\nYou need:\n\n- oats\n",
        "- milk\n\n",
        "Run `a. b` now. ",
        "Then stop.\n\n",
        "```\none. two.\nthree.\n```\n",
        "Done.",
    ]


def test_labels():
    assert is_label("**Note:**") and is_label("Two things:") and not is_label("Two things.") and not is_label("")


def test_bad_sizes_and_names_are_named():
    with pytest.raises(ValueError, match="least 5, most 4"):
        segment("a", [(0, 1)], PLAIN, 5, 4)
    with pytest.raises(ValueError, match="allowed are spacy, pysbd"):
        sentence_splitter("nltk")
    assert segment("", [], PLAIN) == []


def test_tokens_that_show_nothing_follow_the_one_before():
    text = "One two. Three four."
    spans = [(0, 3), (3, 8), (8, 9), (9, 14), (14, 20), (20, 20)]
    units = segment(text, spans, PLAIN, 1, 96)
    assert units == [0, 0, 0, 1, 1, 1]
