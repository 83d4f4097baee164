"""The tables that say where credit falls on real words, from traces made by hand."""

import itertools
import random

import pandas as pd
import pytest

from memcalib.problem import Level
from memcalib.products.micro.english import ENGLISH, answer
from tools.localization import (
    carried,
    chance_of_a_hit,
    sentence_numbers,
    tables,
    tokens_in,
)


def a_case():
    """A record with an atom at Control, an answer that uses all atoms rightly, and its tokens."""
    for example in ENGLISH.examples(50, 0, "rl"):
        decided = [i for i, level in example.levels.items() if level == Level.CONTROL]
        if decided:
            response = answer(example, random.Random(0))
            return example, decided[0], response, ends_of(response)
    raise AssertionError("no record with an atom at Control")


def ends_of(response):
    """Where the words of an answer end, each with the space behind it."""
    ends = [i + 1 for i, sign in enumerate(response) if sign == " "]
    return [*ends, len(response)]


def traces_of(example, atom_id, response, ends, channel, q):
    """Two rows as the traces of a run have them: the answer, and one channel of it."""
    answer_row = {
        "step": 1,
        "row": 0,
        "example_id": example.id,
        "channel": None,
        "response": response,
        "ends": ends,
    }
    pair = {
        "step": 1,
        "row": 0,
        "example_id": example.id,
        "channel": channel,
        "atom_ids": [atom_id],
        "localized": sum(q) > 0,
        "threshold": 0.02,
        "d": q,
        "q": q,
    }
    return pd.DataFrame([answer_row, pair])


def test_tokens_overlap_the_places_of_words():
    text = "Go with green tea now."
    inside = tokens_in([(8, 17)], ends_of(text))
    assert inside.tolist() == [False, False, True, True, False]
    assert not tokens_in([], ends_of(text)).any()


def test_all_credit_on_the_words_of_an_atom_that_was_used():
    example, atom_id, response, ends = a_case()
    value = example.atom(atom_id).usage_rubric["marker"]["noun"]
    [(start, end)] = carried("C+", example, [atom_id], response)
    assert response[start:end] in value
    on_words = tokens_in([(start, end)], ends)
    q = [1.0 if inside else 0.0 for inside in on_words]
    found = tables(traces_of(example, atom_id, response, ends, "C+", q), {example.id: example})
    row = found["words"].loc["C+"]
    assert (row["credit on words %"], row["top-1 %"]) == (100, 100)
    assert row["if uniform %"] == pytest.approx(100 * on_words.mean())
    assert found["sentences"].loc["C+", "top-3 hits %"] == 100
    assert found["distances"].loc["C+", "localized %"] == 100


def test_credit_elsewhere_and_no_credit_are_told_apart():
    example, atom_id, response, ends = a_case()
    q = [0.0] * len(ends)
    q[0] = 0.5
    places = carried("C+", example, [atom_id], response)
    assert not tokens_in(places, ends)[0]
    known = {example.id: example}
    elsewhere = tables(traces_of(example, atom_id, response, ends, "C+", q), known)
    assert elsewhere["words"].loc["C+", "credit on words %"] == 0
    assert elsewhere["words"].loc["C+", "top-1 %"] == 0
    none = tables(traces_of(example, atom_id, response, ends, "C+", [0.0] * len(ends)), known)
    assert none["words"].loc["C+", "with credit"] == 0
    assert pd.isna(none["words"].loc["C+", "credit on words %"])
    assert none["sentences"].empty


def test_an_atom_left_out_is_carried_by_what_stands_in_its_place():
    example, atom_id, _, _ = a_case()
    levels = {**example.levels, atom_id: Level.IGNORE}
    response = answer(example, random.Random(0), levels)
    assert carried("C+", example, [atom_id], response) == []
    places = carried("CA-", example, [atom_id], response)
    assert places


def test_an_example_of_another_run_is_named():
    example, atom_id, response, ends = a_case()
    traces = traces_of(example, atom_id, response, ends, "C+", [1.0] * len(ends))
    with pytest.raises(ValueError, match=f"found example '{example.id}'"):
        tables(traces, {})


@pytest.mark.parametrize("sentences", range(1, 7))
def test_chance_is_the_share_of_all_draws(sentences):
    for with_role in range(sentences + 1):
        draws = list(itertools.combinations(range(sentences), min(3, sentences)))
        hits = sum(any(number < with_role for number in draw) for draw in draws)
        assert chance_of_a_hit(sentences, with_role) == pytest.approx(hits / len(draws))


def test_a_token_belongs_to_the_sentence_in_which_it_begins():
    text = "Go on. Take tea."
    assert sentence_numbers(text, ends_of(text)).tolist() == [0, 0, 1, 1]
    assert sentence_numbers(text, [2, 5, 6, 11, 15, 16]).tolist() == [0, 0, 0, 1, 1, 1]
