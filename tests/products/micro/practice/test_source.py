"""What texts of the micro-world say, and source rows: bad at their rates,
and stopped where they should be.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from practice_facts import bounds, every_fact, every_request

from memcalib.products.dataset.duplicates import clean_rows
from memcalib.products.micro.world import NOUNS, SCOPES, TASKS, WORDS, make_examples
from memcalib.products.micro.practice.source import (
    BAD,
    contradiction,
    fact_kind,
    fact_level,
    read_facts,
    read_request,
    micro_source_rows,
    weak_points,
)
from memcalib.problem import Level

# What texts say


@given(st.lists(every_fact(), max_size=8), st.randoms(use_true_random=False))
def test_facts_are_read_in_order_in_either_voice(facts, rng):
    sentences = [fact.text if rng.random() < 0.5 else f"You know, {fact.said}." for fact in facts]
    assert read_facts(" ".join(sentences)) == tuple(facts)
    assert read_facts(", and ".join(fact.said for fact in facts).upper()) == tuple(facts)


@given(st.text(max_size=60), every_fact())
def test_only_facts_are_read(text, fact):
    assert all(read.noun in NOUNS for read in read_facts(text))
    assert read_facts(fact.text.replace(fact.noun, "nothing")) == ()


def slow_level(fact, request):
    """The rules said slowly: only the user's own, current facts of this occasion can matter."""
    other_scope = SCOPES[1 - SCOPES.index(request.scope)]
    if fact.owner != "user" or fact.past or fact.occasion == other_scope:
        return Level.IGNORE
    if not fact.attribute:
        return Level.CONTROL if fact.noun in request.wishes else Level.IGNORE
    letters = TASKS[request.domain][request.task]
    for attribute, letter in zip(WORDS[request.domain], letters, strict=True):
        if attribute == fact.attribute:
            return Level.parse(letter)
    return Level.IGNORE


@given(every_request(), every_fact())
def test_levels_follow_the_rules_of_the_world(request, fact):
    expected = slow_level(fact, request)
    assert fact_level(fact, request) == expected
    assert (fact_kind(fact, request) == "grounded") == (expected != Level.IGNORE)
    polite = f"Could you {request.text[0].lower()}{request.text[1:-1]}?"
    assert read_request(polite) == request


def clash(first, second):
    """Whether only one of two facts can hold."""
    same = (
        first.owner == second.owner
        and first.attribute == second.attribute
        and first.past == second.past
        and first.occasion == second.occasion
    )
    return same and first.attribute != "" and first.noun != second.noun


@given(st.lists(every_fact(), max_size=10))
def test_contradictions_against_all_pairs(facts):
    clashing = False
    for i, first in enumerate(facts):
        if any(clash(first, second) for second in facts[i + 1 :]):
            clashing = True
    assert (contradiction(facts) is not None) == clashing


@pytest.mark.parametrize("world", ["short", "long"])
def test_examples_of_the_world_are_read_as_written(world):
    for example in make_examples(world, 100, 3, "rl"):
        request = read_request(example.question)
        for atom in example.atoms:
            [fact] = read_facts(atom.text)
            assert fact.text == atom.text
            assert fact_level(fact, request) == atom.ideal


# Rows


def test_rows_repeat_and_planted_rates_hold():
    rows = micro_source_rows(2000, seed=3)
    assert rows[:50] == micro_source_rows(50, seed=3)
    assert rows[:50] != micro_source_rows(50, seed=4)
    counts = Counter(row.metadata.get("planted", "") for row in rows)
    for name, kind in BAD.items():
        low, high = bounds(2000, kind.rate)
        assert low <= counts[name] <= high, name
    assert len({row.id for row in rows}) == 2000
    assert {row.domain for row in rows} == set(WORDS)


@pytest.mark.parametrize("rates", [{"nonsense": 0.1}, {"loop": 0.6, "copy": 0.6}, {"loop": -0.1}])
def test_rates_are_checked(rates):
    with pytest.raises(ValueError, match="rates: found"):
        micro_source_rows(5, rates=rates)


@pytest.mark.parametrize("kind", [name for name, kind in BAD.items() if kind.stage == "screening"])
def test_rules_stop_every_row_that_is_meant_for_them(kind):
    rows = micro_source_rows(60, seed=5, rates={kind: 1.0})
    passed = clean_rows([*rows, *micro_source_rows(1, seed=6, rates={})])
    assert len(passed.kept) == 1
    assert {drop.stage for drop in passed.dropped} == {"screening"}


@pytest.mark.parametrize("kind", [name for name, kind in BAD.items() if kind.stage == "duplicates"])
def test_of_a_row_and_its_copies_one_is_kept(kind):
    rows = micro_source_rows(60, seed=5, rates={kind: 0.5})
    copies = [row for row in rows if row.metadata]
    passed = clean_rows(rows)
    assert len(copies) > 15
    assert len(passed.kept) == len(rows) - len(copies)
    assert {drop.stage for drop in passed.dropped} == {"duplicates"}
    originals = {row.metadata.get("of", row.id) for row in passed.kept}
    assert len(originals) == len(passed.kept)


FOR_READERS = [n for n, kind in BAD.items() if kind.stage not in ("screening", "duplicates")]


@pytest.mark.parametrize("kind", FOR_READERS)
def test_what_is_meant_for_a_reader_passes_the_rules_and_has_its_weak_point(kind):
    rows = micro_source_rows(60, seed=5, rates={kind: 1.0})
    for row in rows:
        assert BAD[kind].stage in weak_points(row.question, row.context, row.answer), row
    assert len(clean_rows(rows).kept) > 30


def test_good_rows_pass_every_rule_and_have_no_weak_point():
    rows = micro_source_rows(600, seed=8, rates={})
    assert len(clean_rows(rows).kept) >= 0.99 * len(rows)
    for row in rows:
        assert weak_points(row.question, row.context, row.answer) == {}
        request = read_request(row.question)
        facts = read_facts(f"{row.question} {row.context}")
        assert request.domain == row.domain
        assert 4 <= len(facts) <= 9
        assert any(fact_level(fact, request) for fact in facts)
