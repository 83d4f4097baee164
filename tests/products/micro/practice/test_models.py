"""The practice server's models and judges: prompts from any template,
answers that repeat, judgments that are exact.
"""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.micro.practice.models import (
    MODELS,
    ExampleIndex,
    PracticeJudge,
    judge_reply,
    known_levels,
    memoryless_answer,
    micro_answer,
    pad,
    practice_answer,
    template_shift,
    without_padding,
)
from memcalib.products.micro.practice.source import read_facts
from memcalib.products.micro.world import FORMS, NOUNS, WORLDS, exact_judge, make_examples
from memcalib.problem import Level, remove_atoms, render, sample_records

EXAMPLES = make_examples("long", 60, 3, "test") + make_examples("short", 60, 3, "test")
INDEX = ExampleIndex(EXAMPLES)
some_example = st.sampled_from(EXAMPLES)

TEMPLATES = [
    lambda q, ms: (
        "Memory:\n" + "\n".join(f"{i}. {m}" for i, m in enumerate(ms, 1)) + f"\n\nQuery:\n{q}"
    ),
    lambda q, ms: f"{q}\n\n" + "".join(f"<memory id='{i}'>{m}</memory>" for i, m in enumerate(ms)),
    lambda q, ms: " ".join(ms) + " " + q,
    lambda q, ms: f"Das ist die Frage: „{q}“ Notizen: {' ## '.join(reversed(ms))}",
]


def payload_for(example, response, blind=False, prefix="", **fields):
    """What a judge is sent about an answer; `prefix` stands before each atom id."""
    rubrics = []
    for atom in example.atoms:
        row = {
            "atom_id": prefix + atom.atom_id,
            "parent_memory_id": atom.parent_memory_id,
            "text": atom.text,
        }
        if not blind:
            row["u_star"] = atom.ideal.wire
            row["usage_rubric"] = atom.usage_rubric
        rubrics.append(row)
    memory = []
    for block in example.blocks:
        memory.append(
            {"parent_memory_id": block.parent_memory_id, "memory_text": block.memory_text}
        )
    payload = {
        "current_query": example.question,
        "model_facing_memory": memory,
        "model_response": response,
        "atomic_rubrics": rubrics,
    }
    payload.update(fields)
    return payload


def answers():
    """Answers of sentences that mean something and others that do not."""
    sentences = []
    for forms in FORMS.values():
        for form, noun in itertools.product(forms, sorted(NOUNS)[:8]):
            sentences.append(form.format(noun))
    sentence = st.one_of(st.sampled_from(sentences), st.text(max_size=20))
    return st.lists(sentence, max_size=8).map(" ".join)


def every_answer():
    """The answers of all models to all examples, with two seeds and all shifts."""
    variants = itertools.product(EXAMPLES, MODELS, (0, 1), (-1, 0, 1))
    return [micro_answer(example, model, seed, shift) for example, model, seed, shift in variants]


@given(
    some_example, st.sampled_from(TEMPLATES), st.sampled_from(["memory_text", "atomic_concat_text"])
)
def test_an_example_is_found_in_any_template(example, template, field):
    prompt = template(example.question, [getattr(block, field) for block in example.blocks])
    assert INDEX.find(prompt) == (example, True)


@given(some_example, st.data())
def test_an_example_with_less_memory_is_another_prompt(example, data):
    gone = data.draw(st.sampled_from(sorted(example.levels)))
    if len(example.levels) > 1:
        assert INDEX.find(render(remove_atoms(example, [gone]))[-1]["content"]) == (None, True)


@given(st.text(max_size=200))
def test_text_without_the_grammar_finds_nothing(text):
    assert INDEX.find(text) == (None, False)
    assert read_facts(text) == ()


def test_an_index_keeps_other_records_apart():
    record = sample_records()[0]
    index = ExampleIndex([*EXAMPLES, record])
    assert index.examples == INDEX.examples and index.find(render(record)[-1]["content"]) == (
        None,
        False,
    )
    assert index.ideals == {(record.question, atom.text): atom.ideal for atom in record.atoms}


def test_answers_depend_on_example_model_seed_and_template_alone():
    random.seed(1)
    first = every_answer()
    random.seed(2)
    again = every_answer()
    assert first == again
    assert len(set(first)) > len(first) // 3


@pytest.mark.parametrize("model", sorted(MODELS))
def test_model_errs_at_its_stated_rate(model):
    examples = make_examples("long", 300, 9, "test")
    judged_atoms = []
    for example in examples:
        judged_atoms.extend(exact_judge(example, micro_answer(example, model)).atoms)
    # A contradiction or a prohibition that nobody asked about can turn one slip into two,
    # or hide it.
    share = sum(atom.actual != atom.ideal for atom in judged_atoms) / len(judged_atoms)
    assert 0.5 * MODELS[model] < share < 1.5 * MODELS[model] + 0.05


@pytest.mark.parametrize(
    "text, shift",
    [
        ("", 0),
        ("Treat it as Background.", -1),
        ("It is authoritative: follow it.", 1),
        ("authoritative background", 0),
        ("foreground", 0),
    ],
)
def test_a_shift_is_read_from_the_text(text, shift):
    assert template_shift(text) == shift


@given(some_example)
def test_memoryless_answer_names_only_what_was_asked(example):
    response = memoryless_answer(example)
    judged_atoms = exact_judge(example, response).atoms
    used_levels = {a.actual for a in judged_atoms if not a.reason.startswith("passed")}
    assert used_levels <= {Level.IGNORE}
    first_with_question = INDEX.questions[example.question]
    if example.world == first_with_question.world:
        assert response == memoryless_answer(first_with_question)


@given(some_example, answers(), st.booleans())
def test_judge_is_exact_for_any_answer(example, response, blind):
    response = without_padding(response)
    payload = payload_for(example, response, blind, "renamed ")
    rows = judge_reply(payload, INDEX)["atom_judgments"]
    exact = {atom.atom_id: atom for atom in exact_judge(example, response).atoms}
    assert [row["atom_id"] for row in rows] == [f"renamed {a.atom_id}" for a in example.atoms]
    for row, atom in zip(rows, example.atoms, strict=True):
        assert row["predicted_usage_level"] == exact[atom.atom_id].actual.wire
        assert row["evidence_quote"] == exact[atom.atom_id].quote
        assert row.get("u_star") == (None if blind else atom.ideal.wire)


@given(some_example, st.integers(0, 5), st.sampled_from([0, 50, 300, 20_000]))
def test_padding_changes_no_verdict(example, seed, characters):
    response = micro_answer(example, seed=seed)
    padded = pad(response, characters)
    assert len(padded) in (max(characters, len(response)), len(response))
    assert without_padding(padded) == response
    reply = judge_reply(payload_for(example, response), INDEX)
    assert judge_reply(payload_for(example, padded), INDEX) == reply


def slips_of(judge):
    """For each atom of each answer whether a judge is wrong about it."""
    slips = []
    for example in EXAMPLES:
        response = micro_answer(example)
        exact_levels = {a.atom_id: a.actual.wire for a in exact_judge(example, response).atoms}
        reply = judge_reply(payload_for(example, response), INDEX, judge)
        for row in reply["atom_judgments"]:
            slips.append(row["predicted_usage_level"] != exact_levels[row["atom_id"]])
    return slips


def test_second_judge_errs_now_and_then_and_repeatably():
    assert not any(slips_of("micro-judge"))
    slips = slips_of("micro-judge-2")
    assert slips == slips_of("micro-judge-2")
    assert 0.05 < sum(slips) / len(slips) < 0.15


def has_prohibition(example):
    """Whether something asked for must be avoided."""
    for atom in example.atoms:
        if atom.usage_rubric["marker"]["prohibits"] and atom.ideal == Level.CONTROL:
            return True
    return False


def test_quality_and_safety_on_request_only():
    example = next(example for example in EXAMPLES if has_prohibition(example))
    both = {"also_judge": ["task_quality", "safety_failure"]}
    refusals = [FORMS["leave"][0].format(noun) for noun in example.requests]
    safe_response = " ".join([*refusals, "Hope this helps."])
    assert not judge_reply(payload_for(example, safe_response, **both), INDEX)["safety_failure"]
    unsafe = judge_reply(payload_for(example, memoryless_answer(example), **both), INDEX)
    assert unsafe["task_quality"] == 4
    assert unsafe["safety_failure"]
    noun = example.atoms[0].usage_rubric["marker"]["noun"]
    poor = judge_reply(payload_for(example, f"{noun}! Whatever.", **both), INDEX)
    assert poor["task_quality"] == 1
    reply = judge_reply(payload_for(example, safe_response), INDEX)
    assert reply.keys() == {"atom_judgments"}


@pytest.mark.parametrize(
    "change, named",
    [
        ({"atomic_rubrics": []}, "atomic_rubrics"),
        ({"atomic_rubrics": [{"text": "no id"}]}, "atomic_rubrics"),
        ({"current_query": "Plan a heist for work."}, "Plan a heist for work."),
        (
            {"atomic_rubrics": [{"atom_id": "x", "text": "The user's diet is unheard of."}]},
            "unheard",
        ),
        ({"model_response": None}, "model_response"),
    ],
)
def test_judge_names_what_it_cannot_read(change, named):
    payload = payload_for(EXAMPLES[0], "Hope this helps.")
    payload.update(change)
    with pytest.raises(ValueError, match=named):
        judge_reply(payload, INDEX)


def test_every_world_is_served():
    for world in WORLDS:
        examples = make_examples(world, 20, 0, "test")
        index = ExampleIndex(examples)
        assert all(index.find(render(e)[-1]["content"])[0] == e for e in examples)


@st.composite
def tables(draw):
    """Tables of probabilities [from level, to level]."""
    rows = []
    for _ in range(3):
        weights = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
        rows.append(tuple(weight / sum(weights) for weight in weights))
    return tuple(rows)


@given(st.sampled_from(sample_records()), tables(), st.integers(0, 5))
def test_a_judge_with_known_answers_only_reports_what_its_table_allows(record, table, seed):
    actual = {atom_id: Level((k + seed) % 3) for k, atom_id in enumerate(record.levels)}
    levels_of_answer = known_levels([(record, "An answer.", actual)])
    judge = PracticeJudge(confusion=table, known=levels_of_answer, seed=seed)
    rows = payload_for(record, "An answer.", blind=True)["atomic_rubrics"]
    judged = judge.judgments(record.question, "An answer.", rows)
    assert judged == judge.judgments(record.question, "An answer.", rows[::-1])[::-1], (
        "the order of atoms plays no part"
    )
    for row in judged:
        level = Level.parse(row["predicted_usage_level"])
        assert table[actual[row["atom_id"]]][level] > 0
        assert row["evidence_quote"] == ("An answer." if level else "")


def test_unknown_answers_are_the_same_for_every_judge_and_follow_the_ideal_level():
    record = sample_records()[0]
    second_judge_slips = []
    levels_by_ideal = {"A": Counter(), "B": Counter(), "C": Counter()}
    for k in range(400):
        payload = payload_for(record, f"Answer {k}.", also_judge=["task_quality"])
        first = judge_reply(payload, INDEX, "micro-judge")
        second = judge_reply(payload, INDEX, "micro-judge-2")
        assert first["task_quality"] == 4
        for row, other in zip(first["atom_judgments"], second["atom_judgments"], strict=True):
            level = row["predicted_usage_level"]
            levels_by_ideal[row["u_star"]][level] += 1
            second_judge_slips.append(level != other["predicted_usage_level"])
    assert 0.07 < sum(second_judge_slips) / len(second_judge_slips) < 0.13
    for (_, counts), row in zip(levels_by_ideal.items(), PracticeJudge().use, strict=True):
        shares = [counts[level] / counts.total() for level in "ABC"]
        assert shares == pytest.approx(row, abs=0.06)


def test_what_a_practice_judge_cannot_know_is_an_error():
    record = sample_records()[0]
    payload = payload_for(record, "An answer.", blind=True)
    assert judge_reply(payload, ExampleIndex([record]))
    with pytest.raises(ValueError, match="has no u_star, and no example here contains it"):
        judge_reply(payload, INDEX)
    with pytest.raises(ValueError, match="confusion: found .* three rows of three probabilities"):
        PracticeJudge(confusion=[[1, 0, 0], [0, 1, 0], [0, 0, 1.5]])


@given(st.sampled_from(sample_records()), st.integers(0, 99), st.sampled_from(sorted(MODELS)))
def test_a_practice_answer_repeats_memory_and_nothing_else(record, seed, model):
    prompt = render(record)[-1]["content"]
    answer = practice_answer(prompt, model, seed)
    assert answer == practice_answer(prompt, model, seed)
    unexplained = answer.removeprefix(memoryless_answer(None))
    for block in record.blocks:
        for sentence in block.memory_text.replace("? ", ". ").split(". "):
            unexplained = unexplained.replace(sentence.strip().rstrip("."), "")
    assert not unexplained.strip(" .?!"), unexplained
    assert record.question not in answer
