"""A builder without mistakes: its replies pass every check, its distractors never matter,
and its rows can be judged.
"""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from practice_builds import exact_build, payload_of
from practice_facts import every_fact, every_request

from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.dataset.stages import Draft, Drop
from memcalib.products.dataset.writing import FAMILIES, to_example
from memcalib.inference.client import read_form
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.practice.builder import (
    added_words,
    hard_distractor,
    make_annotation,
    make_derivation,
    make_screening,
    mark,
    paragraph,
    stray_facts,
)
from memcalib.products.micro.practice.reviewer import find_flaws
from memcalib.products.micro.practice.source import (
    BAD,
    contradiction,
    fact_level,
    read_facts,
    micro_source_rows,
)
from memcalib.problem import Example, Level


@pytest.fixture(scope="module")
def exact():
    return exact_build(micro_source_rows(120, seed=11, rates={}))


def test_a_builder_without_mistakes_passes_every_check_at_once(exact):
    assert all(len(drafts) == 120 for drafts in exact.entering.values())
    assert all(isinstance(draft, Draft) for draft in exact.finished)
    for draft in exact.finished:
        example = to_example(draft)
        nouns = [read_facts(atom.text)[0].noun for atom in example.atoms]
        assert len(set(nouns)) == len(example.atoms)
        assert find_flaws(example) == []
    assert max(len(draft.atoms) for draft in exact.finished) > 30


@given(
    every_request(),
    st.lists(every_fact(), max_size=9),
    st.sampled_from(FAMILIES),
    st.integers(0, 1000),
)
def test_distractors_never_matter_nor_repeat_a_noun(request, facts, family, seed):
    rng = random.Random(seed)
    used_nouns = {fact.noun for fact in facts} | set(request.wishes)
    hard = hard_distractor(family, request, facts, used_nouns, rng)
    assert fact_level(hard, request) == Level.IGNORE
    used_nouns.add(hard.noun)
    strays = list(stray_facts(request, [*facts, hard], used_nouns, rng))
    assert all(fact_level(fact, request) == Level.IGNORE for fact in strays)
    assert len(strays) >= 57
    assert len({fact.noun for fact in strays} - used_nouns) == len(strays)
    assert contradiction(strays) is None


@given(st.lists(every_fact(), min_size=1, max_size=12, unique=True), st.data())
def test_paragraphs_keep_all_and_additions_show(facts, data):
    atom_texts = [fact.text for fact in facts]
    text = paragraph(atom_texts)
    assert read_facts(text) == tuple(facts)
    assert added_words(atom_texts, text) == []
    word = data.draw(st.text("bcdfg", min_size=1, max_size=8))
    assert added_words(atom_texts, f"{text} {word}.") == [word]


def test_bad_rows_can_be_worked_on_without_an_error():
    """A pipeline that lets everything through still gets replies of the right form."""
    for row in micro_source_rows(400, seed=31, rates=dict.fromkeys(BAD, 1 / len(BAD))):
        draft = Draft.start(row)
        assert read_form_of(SCREENING, draft, make_screening) is not None
        derived = DERIVATION.accept(draft, read_form_of(DERIVATION, draft, make_derivation))
        if not isinstance(derived, Drop):
            draft = derived
        assert read_form_of(ANNOTATION, draft, make_annotation) is not None


def read_form_of(stage, draft, make):
    """A reply in the form of its stage, which has nothing to complain of."""
    form, complaints = read_form(json.dumps(make(payload_of(stage, draft))), stage.reply)
    assert not complaints
    return form


# Markers


def test_marks_are_made_from_text(exact):
    example = to_example(exact.finished[0])
    marked = mark(example)
    assert mark(Example.model_validate_json(marked.to_json())) == marked
    assert example.content_hash != marked.content_hash
    fields = {*example.atoms[0].usage_rubric, "marker"}
    assert all(set(atom.usage_rubric) == fields for atom in marked.atoms)


def with_one_text(example):
    """All atoms say the same."""
    text = example.atoms[0].text
    atoms = [atom.model_copy(update={"text": text}) for atom in example.atoms]
    return example.model_copy(update={"atoms": atoms})


def test_what_cannot_be_marked_is_refused_with_its_reason(exact):
    example = to_example(exact.finished[0])
    other_question = example.model_copy(update={"question": "Plan."})
    other_domain = example.model_copy(update={"domain": "law"})
    with pytest.raises(ValueError, match=rf"{example.id}.*'Plan\.'"):
        mark(other_question)
    with pytest.raises(ValueError, match=f"{example.id}.*a noun of its own"):
        mark(with_one_text(example))
    with pytest.raises(ValueError, match=f"{example.id}.*allowed"):
        mark(other_domain)


def test_known_examples_of_the_world_get_the_markers_they_have():
    for example in make_examples("long", 100, 5, "test"):
        bare_atoms = [atom.model_copy(update={"usage_rubric": {}}) for atom in example.atoms]
        marked = mark(example.model_copy(update={"atoms": bare_atoms}))
        markers = [atom.usage_rubric["marker"] for atom in example.atoms]
        assert [atom.usage_rubric["marker"] for atom in marked.atoms] == markers
