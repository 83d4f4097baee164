"""Segments cover every token once, in order, within their sizes,
and respect what Markdown keeps whole.
"""

import re
from collections import Counter
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.credit.sentences import (
    Boundaries,
    Parse,
    boundaries,
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
from memcalib.products.micro.policy import build_tokenizer

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


def plain_sentences(text):
    """A splitter that cuts after marks followed by one blank."""
    return Parse([match.start() for match in re.finditer(r"(?<=[.?!] )\S", text)])


TOKENIZER = build_tokenizer()


def tokens(text: str) -> list[tuple[int, int]]:
    """Spans like a byte-pair tokenizer's: up to five characters, a leading space with its word."""
    return [match.span() for match in re.finditer(r"\s?\S{1,5}|\s", text)]


def at_random(text: str, cuts: list[int]) -> list[tuple[int, int]]:
    """Spans that cover the text but follow nothing in it; some are empty."""
    if not text:
        return []
    inner_edges = sorted(min(cut, len(text)) for cut in cuts)
    return list(pairwise([0, *inner_edges, len(text)]))


def with_tokens(text):
    return text, tokens(text)


def with_random_spans(text, cuts):
    return text, at_random(text, cuts)


SPANS = st.one_of(
    TEXTS.map(with_tokens),
    st.builds(with_random_spans, TEXTS, st.lists(st.integers(0, 200))),
)


def starts_of(units: list[int]) -> list[int]:
    return [k for k in range(len(units)) if not k or units[k] != units[k - 1]]


@settings(max_examples=300, deadline=None)
@given(SPANS, st.integers(1, 6), st.integers(6, 40))
def test_every_token_once_in_order_and_size(case, minimum, maximum):
    text, spans = case
    units = segment(text, spans, plain_sentences, minimum=minimum, maximum=maximum)
    assert len(units) == len(spans)
    assert units == sorted(units)
    if spans:
        assert set(units) == set(range(units[-1] + 1))
    assert all(size <= maximum for size in Counter(units).values())
    assert units == segment(text, spans, plain_sentences, minimum=minimum, maximum=maximum)


@settings(max_examples=300, deadline=None)
@given(SPANS, st.sampled_from([(4, 96), (4, 12), (2, 20)]))
def test_pieces_and_orphans_stay_small_only_where_they_must(case, sizes):
    text, spans = case
    minimum, maximum = sizes
    units = segment(text, spans, plain_sentences, minimum=minimum, maximum=maximum)
    _, hard = first_segments(text, spans, boundaries(text, plain_sentences))
    edges = [*starts_of(units), len(spans)]
    for k, (start, end) in enumerate(pairwise(edges)):
        piece = text[spans[start][0] : spans[end - 1][1]]
        if end - start < minimum or is_orphan(piece):
            assert end == len(spans) or end in hard or edges[k + 2] - start > maximum
            assert start == 0 or start in hard or end - edges[k - 1] > maximum


def uncuttable(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Stretches of tokens that cannot be cut apart without a cut inside something whole,
    as token indices.
    """
    marks = boundaries(text, plain_sentences)
    stretches: list[tuple[int, int]] = []
    for index, (start, end) in enumerate(spans):
        first_visible = end - len(text[start:end].lstrip())
        if not marks.is_inside(first_visible):
            continue
        if stretches and stretches[-1][1] == index:
            first, _ = stretches[-1]
            stretches[-1] = (first, index + 1)
        else:
            stretches.append((max(index - 1, 0), index + 1))
    return stretches


@settings(max_examples=300, deadline=None)
@given(SPANS, st.sampled_from([96, 20, 12]))
def test_what_is_whole_is_cut_only_when_it_is_too_long(case, maximum):
    text, spans = case
    cuts = starts_of(segment(text, spans, plain_sentences, maximum=maximum))
    for first, after in uncuttable(spans, text):
        if after - first <= maximum:
            assert not [cut for cut in cuts if first < cut < after]


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_boundaries_are_places_of_the_text(text):
    marks = boundaries(text, plain_sentences)
    starts = list(marks.starts)
    assert starts == sorted(starts)
    assert starts[0] == 0
    for start in starts:
        assert 0 <= start < max(len(text), 1)
        assert not marks.is_inside(start)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_answers_are_cut_by_their_ids_alone(texts, rng):
    rows = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows.append([rng.randrange(len(TOKENIZER)) for _ in range(20)])
    together = response_units(TOKENIZER, rows, plain_sentences)
    fallbacks = Counter()
    with_defaults = response_units(
        TOKENIZER, rows, plain_sentences, minimum=4, maximum=96, fallbacks=fallbacks
    )
    assert torch.equal(together, with_defaults)
    assert not fallbacks
    for row, units in zip(rows, together, strict=True):
        alone = response_units(TOKENIZER, [row], plain_sentences)[0]
        assert torch.equal(alone, units[: len(row)])
        assert (units[len(row) :] == -1).all()
        assert (units[: len(row)] >= 0).all()


def test_sizes_reach_the_segments_of_rows():
    ids = TOKENIZER("Plan the trip by train. " * 20, add_special_tokens=False)["input_ids"]

    def sizes(**limits):
        units = response_units(TOKENIZER, [ids], plain_sentences, **limits)[0]
        return Counter(units.tolist()).values()

    assert max(sizes(minimum=1, maximum=5)) <= 5
    assert min(sizes()) < 20 <= min(sizes(minimum=20))


class Exotic:
    """A tokenizer of letters; `ending` is added to whatever is decoded."""

    def __init__(self, ending):
        self.ending = ending

    def decode(self, ids, skip_special_tokens: bool) -> str:
        return "".join("Go on. Be well."[token_id] for token_id in ids) + self.ending


def test_an_answer_whose_tokens_cannot_be_placed_is_one_segment_and_counted():
    row = list(range(15))
    fallbacks = Counter()
    rows = [row, row, [1]]
    units = response_units(Exotic("!"), rows, plain_sentences, minimum=1, fallbacks=fallbacks)
    assert units.max() == 0
    assert fallbacks == {"the first tokens decode to a different text": 2}
    assert response_units(Exotic("!"), [row], plain_sentences).max() == 0
    units = response_units(Exotic(""), [row, []], plain_sentences, minimum=1, fallbacks=fallbacks)
    assert units[0].max() == 1
    assert units.shape == (2, 15)
    assert fallbacks.total() == 2


def test_faults_of_spans_are_named():
    assert span_fault(Exotic(""), [0, 1], "Go", [1]) == "a token without a span"
    assert span_fault(Exotic(""), [0, 1], "Go", [1, 1]) == "spans do not cover the text"
    assert span_fault(Exotic(""), [], "", []) == ""
    unlike = "the first tokens decode to a different text"
    assert span_fault(Exotic("!"), [0, 1], "Go!", [1, 3]) == unlike, "already the first one does"


def test_no_rows_have_no_units():
    assert response_units(TOKENIZER, []).shape == (0, 0)


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
    arcs = [(2 * start, 2 * right) for start, right in pairs if start < right]
    marks = Boundaries({0: False}, lambda position: position == 4, arcs)
    text = "a b c d e f g h i j"
    positions = range(2, 19, 2)
    spans = [(position - 1, position + 1) for position in positions]
    for position, cost in zip(positions, cut_costs(text, spans, marks), strict=True):
        crossed = sum(start < position <= right for start, right in arcs)
        if position == 4:
            assert cost == 1000
        else:
            assert cost == (8 + crossed if arcs else 40)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([2.0, 4.0, 12.0, 40.0, 100.0, 1000.0]), min_size=1, max_size=10),
    st.integers(1, 3),
)
def test_cuts_are_the_cheapest(costs, minimum):
    maximum = 4

    def price(cuts):
        sizes = [end - start for start, end in pairwise([0, *cuts, len(costs)])]
        if max(sizes) > maximum:
            return float("inf")
        total = sum(costs[cut] for cut in cuts)
        for size in sizes:
            total += 50 * max(0, minimum - size) + abs(size - 3) / 3
        return total

    prices = []
    for number in range(len(costs)):
        prices += map(price, combinations(range(1, len(costs)), number))
    assert price(cheapest_cuts(costs, minimum, maximum)) == pytest.approx(min(prices))


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 39), max_size=12), st.sets(st.integers(1, 39), max_size=4))
def test_short_pieces_stay_only_where_they_must(first_tokens, hard):
    starts = sorted({0, *first_tokens})
    merged = merge_short(starts, hard | {0}, 40, 4, 12)
    assert set(merged) <= set(starts)
    assert merged[0] == 0
    assert (hard & set(starts)) <= set(merged)
    edges = [*merged, 40]
    for k, (start, end) in enumerate(pairwise(edges)):
        if end - start < 4 and len(merged) > 1:
            has_right = k + 1 < len(merged) and merged[k + 1] not in hard
            assert not has_right or edges[k + 2] - start > 12
            has_left = k > 0 and start not in hard
            assert not has_left or end - merged[k - 1] > 12


def test_orphans_join_the_right_or_else_the_left():
    def alone(a, b):
        return b - a == 5

    assert merge_short([0, 10, 15], set(), 30, 1, 96, alone) == [0, 10]
    assert merge_short([0, 10, 15], {15}, 30, 1, 96, alone) == [0, 15]
    assert merge_short([0, 10, 15], {10, 15}, 30, 1, 96, alone) == [0, 10, 15]
    assert merge_short([0, 10, 15], set(), 30, 1, 12, alone) == [0, 10, 15]


def test_bad_sizes_are_named():
    for minimum, maximum in ((5, 4), (0, 96)):
        message = (
            rf"found minimum {minimum} and maximum {maximum}; allowed: 1 <= minimum <= maximum"
        )
        with pytest.raises(ValueError, match=message):
            segment("a", [(0, 1)], plain_sentences, minimum=minimum, maximum=maximum)
    assert segment("", [], plain_sentences) == []


def test_tokens_that_show_nothing_follow_the_one_before():
    text = "One two. Three four."
    spans = [(0, 3), (3, 8), (8, 9), (9, 14), (14, 20), (20, 20)]
    units = segment(text, spans, plain_sentences, minimum=1)
    assert units == [0, 0, 0, 1, 1, 1]


def test_a_token_over_an_edge_does_not_cut_what_follows():
    text = "你好。`a. b`再见"
    assert segment(text, [(0, 3), (3, 10), (10, 12)], plain_sentences, minimum=1) == [0, 1, 1]
    assert segment(text, [(0, 2), (2, 4), (4, 10), (10, 12)], plain_sentences, minimum=1) == [
        0,
        0,
        0,
        0,
    ]


def test_an_answer_with_everything():
    text = "# Plan\n\nYou need:\n\n1. oats\n2. a litre of milk\n\n"
    text += "Run `a. b` right now. Then stop there, please."
    text += "\n\n```\none. two. three\n```\nAll of it is done now."
    units = segment(text, tokens(text), SPLIT)
    pieces = [""] * (units[-1] + 1)
    for (start, end), unit in zip(tokens(text), units, strict=True):
        pieces[unit] += text[start:end]
    assert [piece.strip() for piece in pieces] == [
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
