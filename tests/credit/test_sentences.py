"""Segments cover every token once, in order, within their sizes, and respect what Markdown keeps whole."""

import re
from collections import Counter
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.credit.sentences import Boundaries, Parse, boundaries
from memcalib.micro.policy import build_tokenizer
from memcalib.credit.sentences import (
    cheapest_cuts,
    cut_costs,
    first_segments,
    is_orphan,
    mark_cost,
    merge_short,
    response_units,
    segment,
    sentence_splitter,
    span_fault,
)
from memcalib.localization import sentence_weights

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
BLOCKS = [
    "```py\nx = 1. y\n```\n",
    "| a | b |\n|---|---|\n| 1. x | 2 |\n",
    "**Bold**\n\n",
    "> a quote. More.\n\n",
]
ODD = [
    "\u05e9\u05dc\u05d5\u05dd. ",
    "\u200b\u200f",
    "👩‍👧🏽 ",
    "你好。",
    "[pause]\n",
    "ANNA\n\n",
    "However\n\n",
    "Name: x\nAge: y\n",
    "“So. It”\n",
]
WORDS = [
    "Some words here. ",
    "`a.b c`. ",
    "e.g. this, Dr. Who; then: that ",
    "word " * 40,
    "x" * 300 + " ",
    "🙂 ",
]
PIECES = st.sampled_from(
    [*STRUCTURE, *BLOCKS, *WORDS, *ODD, "\n\n", "\r\n", "<b>tag</b> ", "$a. b$ ", "[l. m](u)"]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=80)


def PLAIN(text):
    return Parse([m.start() for m in re.finditer(r"(?<=[.?!] )\S", text)])


TOKENIZER = build_tokenizer()


def tokens(text: str) -> list[tuple[int, int]]:
    """Spans like a byte-pair tokenizer's: up to five characters, a leading space with its word."""
    return [m.span() for m in re.finditer(r"\s?\S{1,5}|\s", text)]


def at_random(text: str, cuts: list[int]) -> list[tuple[int, int]]:
    """Spans that cover the text but follow nothing in it; some are empty."""
    return (
        list(pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)])) if text else []
    )


SPANS = st.one_of(
    TEXTS.map(lambda text: (text, tokens(text))),
    st.builds(lambda t, c: (t, at_random(t, c)), TEXTS, st.lists(st.integers(0, 200))),
)


def starts_of(units: list[int]) -> list[int]:
    return [k for k in range(len(units)) if not k or units[k] != units[k - 1]]


@settings(max_examples=300, deadline=None)
@given(SPANS, st.integers(1, 6), st.integers(6, 40))
def test_every_token_once_in_order_and_size(case, minimum, maximum):
    text, spans = case
    units = segment(text, spans, PLAIN, minimum=minimum, maximum=maximum)
    assert len(units) == len(spans) and units == sorted(units)
    assert not spans or set(units) == set(range(units[-1] + 1))
    assert all(size <= maximum for size in Counter(units).values())
    assert units == segment(text, spans, PLAIN, minimum=minimum, maximum=maximum)


@settings(max_examples=300, deadline=None)
@given(SPANS, st.sampled_from([(4, 96), (4, 12), (2, 20)]))
def test_pieces_and_orphans_stay_small_only_where_they_must(case, sizes):
    text, spans = case
    units = segment(text, spans, PLAIN, minimum=sizes[0], maximum=sizes[1])
    (minimum, maximum) = sizes
    _, hard = first_segments(text, spans, boundaries(text, PLAIN))
    edges = [*starts_of(units), len(spans)]
    for k, (a, b) in enumerate(pairwise(edges)):
        if b - a < minimum or is_orphan(text[spans[a][0] : spans[b - 1][1]]):
            assert b == len(spans) or b in hard or edges[k + 2] - a > maximum
            assert a == 0 or a in hard or b - edges[k - 1] > maximum


def runs(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Stretches of tokens that cannot be cut apart without a cut inside something whole, as token indices."""
    marks = boundaries(text, PLAIN)
    bound = [
        index for index, (a, b) in enumerate(spans) if marks.inside(b - len(text[a:b].lstrip()))
    ]
    found: list[list[int]] = []
    for index in bound:
        if found and found[-1][1] == index:
            found[-1][1] = index + 1
        else:
            found.append([max(index - 1, 0), index + 1])
    return [(a, b) for a, b in found]


@settings(max_examples=300, deadline=None)
@given(SPANS, st.sampled_from([96, 20, 12]))
def test_what_is_whole_is_cut_only_when_it_is_too_long(case, maximum):
    text, spans = case
    cuts = starts_of(segment(text, spans, PLAIN, maximum=maximum))
    for first, after in runs(spans, text):
        if after - first <= maximum:
            assert not [cut for cut in cuts if first < cut < after]


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_boundaries_are_places_of_the_text(text):
    found = boundaries(text, PLAIN)
    assert list(found.starts) == sorted(found.starts) and next(iter(found.starts)) == 0
    assert all(0 <= place < max(len(text), 1) and not found.inside(place) for place in found.starts)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_answers_are_cut_by_their_ids_alone(texts, rng):
    rows = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows.append([rng.randrange(len(TOKENIZER)) for _ in range(20)])
    together = response_units(TOKENIZER, rows, PLAIN)
    lost = Counter()
    assert (
        torch.equal(
            together, response_units(TOKENIZER, rows, PLAIN, minimum=4, maximum=96, fallbacks=lost)
        )
        and not lost
    )
    for row, units in zip(rows, together, strict=True):
        assert torch.equal(response_units(TOKENIZER, [row], PLAIN)[0], units[: len(row)])
        assert (units[len(row) :] == -1).all() and (units[: len(row)] >= 0).all()


def test_sizes_reach_the_segments_of_rows():
    ids = TOKENIZER("Plan the trip by train. " * 20, add_special_tokens=False)["input_ids"]

    def sizes(**given):
        return Counter(response_units(TOKENIZER, [ids], PLAIN, **given)[0].tolist()).values()

    assert max(sizes(minimum=1, maximum=5)) <= 5 and min(sizes(minimum=20)) >= 20 > min(sizes())


class Exotic:
    """A tokenizer of letters; `ending` is added to whatever is decoded."""

    def __init__(self, ending):
        self.ending = ending

    def decode(self, ids, skip_special_tokens: bool) -> str:
        return "".join("Go on. Be well."[k] for k in ids) + self.ending


def test_an_answer_whose_tokens_cannot_be_placed_is_one_segment_and_counted():
    row = list(range(15))
    lost = Counter()
    assert response_units(Exotic("!"), [row, row, [1]], PLAIN, minimum=1, fallbacks=lost).max() == 0
    assert lost == {"a beginning decodes to other text": 2}
    assert response_units(Exotic("!"), [row], PLAIN).max() == 0
    fine = response_units(Exotic(""), [row, []], PLAIN, minimum=1, fallbacks=lost)
    assert fine[0].max() == 1 and lost.total() == 2 and fine.shape == (2, 15)
    assert span_fault(Exotic(""), [0, 1], "Go", [1]) == "a token without a span"
    assert span_fault(Exotic(""), [0, 1], "Go", [1, 1]) == "spans do not cover the text"
    assert span_fault(Exotic(""), [], "", []) == "" and response_units(TOKENIZER, []).shape == (
        0,
        0,
    )


COSTS = [
    ("a;| b", 2.0),
    ("a; |b", 2.0),
    ("a\n\n|b", 4.0),
    ("a\n|b", 5.0),
    ("a;\n|b", 5.0),
    ("a:| b", 7.0),
    ("a,| b", 12.0),
    ("你，|好", 12.0),
    ("1,|000", 100.0),
    ("10:|30", 100.0),
    ("oa|ts", 100.0),
    ("a| b", None),
    ("a |b", None),
]


@pytest.mark.parametrize(("text", "cost"), COSTS)
def test_marks_cost_what_the_table_says(text, cost):
    assert mark_cost(text.replace("|", ""), text.index("|")) == cost


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=8))
def test_crossed_arcs_are_counted(pairs):
    arcs = [(2 * a, 2 * b) for a, b in pairs if a < b]
    marks = Boundaries({0: False}, lambda place: place == 4, arcs)
    text = "a b c d e f g h i j"
    for place, cost in zip(
        range(2, 19, 2),
        cut_costs(text, [(k - 1, k + 1) for k in range(2, 19, 2)], marks),
        strict=True,
    ):
        gap = 8 + sum(a < place <= b for a, b in arcs) if arcs else 40
        assert cost == (1000 if place == 4 else gap)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([2.0, 4.0, 12.0, 40.0, 100.0, 1000.0]), min_size=1, max_size=10),
    st.integers(1, 3),
)
def test_cuts_are_the_cheapest(costs, least):
    most = 4

    def price(cuts):
        edges = [0, *cuts, len(costs)]
        sizes = [b - a for a, b in pairwise(edges)]
        if max(sizes) > most:
            return float("inf")
        return sum(costs[c] for c in cuts) + sum(
            50 * max(0, least - s) + abs(s - 3) / 3 for s in sizes
        )

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


def test_orphans_join_the_right_or_else_the_left():
    def alone(a, b):
        return b - a == 5

    assert merge_short([0, 10, 15], set(), 30, 1, 96, alone) == [0, 10]
    assert merge_short([0, 10, 15], {15}, 30, 1, 96, alone) == [0, 15]
    assert merge_short([0, 10, 15], {10, 15}, 30, 1, 96, alone) == [0, 10, 15]
    assert merge_short([0, 10, 15], set(), 30, 1, 12, alone) == [0, 10, 15]


def test_bad_sizes_are_named():
    for minimum, maximum in ((5, 4), (0, 96)):
        with pytest.raises(
            ValueError,
            match=rf"minimum {minimum}, maximum {maximum}: allowed is 1 <= minimum <= maximum",
        ):
            segment("a", [(0, 1)], PLAIN, minimum=minimum, maximum=maximum)
    assert segment("", [], PLAIN) == []


def test_tokens_that_show_nothing_follow_the_one_before():
    text = "One two. Three four."
    spans = [(0, 3), (3, 8), (8, 9), (9, 14), (14, 20), (20, 20)]
    units = segment(text, spans, PLAIN, minimum=1)
    assert units == [0, 0, 0, 1, 1, 1]


def test_a_token_over_an_edge_does_not_cut_what_follows():
    text = "你好。`a. b`再见"
    assert segment(text, [(0, 3), (3, 10), (10, 12)], PLAIN, minimum=1) == [0, 1, 1]
    assert segment(text, [(0, 2), (2, 4), (4, 10), (10, 12)], PLAIN, minimum=1) == [0, 0, 0, 0]


def test_an_answer_with_everything():
    text = "# Plan\n\nYou need:\n\n1. oats\n2. a litre of milk\n\nRun `a. b` right now. Then stop there, please."
    text += "\n\n```\none. two. three\n```\nAll of it is done now."
    units = segment(text, tokens(text), SPLIT)
    parts = {}
    for (a, b), unit in zip(tokens(text), units, strict=True):
        parts[unit] = parts.get(unit, "") + text[a:b]
    assert [part.strip() for part in parts.values()] == [
        "# Plan\n\nYou need:\n\n1. oats",
        "2. a litre of milk",
        "Run `a. b` right now.",
        "Then stop there, please.",
        "```\none. two. three\n```",
        "All of it is done now.",
    ]


def test_coverage_counts_what_is_above_the_threshold_alone():
    z = torch.tensor([[0.5, 0.5, 0.75, 0.25]]).double()
    mask = torch.ones(1, 4).bool()
    units = torch.tensor([[0, 0, 1, 1]])
    q, opened = sentence_weights(z, mask, torch.tensor([0.5]), torch.tensor([0.0]), units)
    assert opened.all() and q.tolist() == [[0.0, 0.0, 0.125, 0.125]]
