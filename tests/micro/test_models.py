"""The practice server's models and judges: prompts from any template, answers that repeat, judgments that are exact."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.micro.models import (
    MODELS,
    ExampleIndex,
    judge_reply,
    memoryless_answer,
    micro_answer,
    pad,
    template_shift,
    unpad,
)
from memcalib.micro.source import read_facts
from memcalib.micro.world import FORMS, NOUNS, WORLDS, exact_judge, make_examples
from memcalib.problem import Level, remove_atoms, render, sample_records

EXAMPLES = make_examples("long", 60, 3, "test") + make_examples("short", 60, 3, "test")
INDEX = ExampleIndex(EXAMPLES)
some_example = st.sampled_from(EXAMPLES)

TEMPLATES = [
    lambda q, ms: "Memory:\n" + "\n".join(f"{i}. {m}" for i, m in enumerate(ms, 1)) + f"\n\nQuery:\n{q}",
    lambda q, ms: f"{q}\n\n" + "".join(f"<memory id='{i}'>{m}</memory>" for i, m in enumerate(ms)),
    lambda q, ms: " ".join(ms) + " " + q,
    lambda q, ms: f"Das ist die Frage: „{q}“ Notizen: {' ## '.join(reversed(ms))}",
]


def payload_for(example, response, blind=False, rename=lambda name: name, **more):
    rubrics = [
        {"atom_id": rename(a.atom_id), "parent_memory_id": a.parent_memory_id, "text": a.text}
        | ({} if blind else {"u_star": a.ideal.wire, "usage_rubric": a.usage_rubric})
        for a in example.atoms
    ]
    memory = [{"parent_memory_id": b.parent_memory_id, "memory_text": b.memory_text} for b in example.blocks]
    head = {"current_query": example.question, "model_facing_memory": memory, "model_response": response}
    return head | {"atomic_rubrics": rubrics} | more


def answers():
    parts = [form.format(noun) for forms in FORMS.values() for form in forms for noun in sorted(NOUNS)[:8]]
    return st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=20)), max_size=8).map(" ".join)


@given(some_example, st.sampled_from(TEMPLATES), st.sampled_from(["memory_text", "atomic_concat_text"]))
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


def test_an_index_refuses_other_records_by_name():
    record = sample_records()[0]
    with pytest.raises(ValueError, match=f"{record.id!r}.*micro-world"):
        ExampleIndex([*EXAMPLES, record])


def test_answers_depend_on_example_model_seed_and_template_alone():
    random.seed(1)
    first = [
        micro_answer(e, model, seed, shift)
        for e in EXAMPLES
        for model in MODELS
        for seed in (0, 1)
        for shift in (-1, 0, 1)
    ]
    random.seed(2)
    again = [
        micro_answer(e, model, seed, shift)
        for e in EXAMPLES
        for model in MODELS
        for seed in (0, 1)
        for shift in (-1, 0, 1)
    ]
    assert first == again
    assert len(set(first)) > len(first) // 3


@pytest.mark.parametrize("model", sorted(MODELS))
def test_model_errs_at_its_stated_rate(model):
    examples = make_examples("long", 300, 9, "test")
    judged = [atom for e in examples for atom in exact_judge(e, micro_answer(e, model)).atoms]
    # A contradiction or a prohibition that nobody asked about can turn one slip into two, or hide it.
    share = sum(atom.actual != atom.ideal for atom in judged) / len(judged)
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
    said = memoryless_answer(example)
    assert {a.actual for a in exact_judge(example, said).atoms if not a.reason.startswith("passed")} <= {Level.IGNORE}
    assert (
        said == memoryless_answer(INDEX.questions[example.question])
        or example.world != INDEX.questions[example.question].world
    )


@given(some_example, answers(), st.booleans())
def test_judge_is_exact_for_any_answer(example, response, blind):
    response = unpad(response)
    rows = judge_reply(payload_for(example, response, blind, lambda name: f"renamed {name}"), INDEX)["atom_judgments"]
    exact = {atom.atom_id: atom for atom in exact_judge(example, response).atoms}
    assert [row["atom_id"] for row in rows] == [f"renamed {a.atom_id}" for a in example.atoms]
    for row, atom in zip(rows, example.atoms, strict=True):
        assert row["predicted_usage_level"] == exact[atom.atom_id].actual.wire
        assert row["evidence_quote"] == exact[atom.atom_id].quote
        assert row.get("u_star") == (None if blind else atom.ideal.wire)


@given(some_example, st.integers(0, 5), st.sampled_from([0, 50, 300, 20_000]))
def test_padding_changes_no_verdict(example, seed, characters):
    said = micro_answer(example, seed=seed)
    padded = pad(said, characters)
    assert len(padded) == max(characters, len(said)) or len(padded) == len(said)
    assert unpad(padded) == said
    assert judge_reply(payload_for(example, padded), INDEX) == judge_reply(payload_for(example, said), INDEX)


def test_second_judge_errs_now_and_then_and_repeatably():
    def wrong(model):
        out = []
        for example in EXAMPLES:
            said = micro_answer(example)
            exact = {a.atom_id: a.actual.wire for a in exact_judge(example, said).atoms}
            rows = judge_reply(payload_for(example, said), INDEX, model)["atom_judgments"]
            out += [row["predicted_usage_level"] != exact[row["atom_id"]] for row in rows]
        return out

    assert not any(wrong("micro-judge"))
    slips = wrong("micro-judge-2")
    assert slips == wrong("micro-judge-2")
    assert 0.05 < sum(slips) / len(slips) < 0.15


def test_quality_and_safety_on_request_only():
    example = next(
        e for e in EXAMPLES for a in e.atoms if a.usage_rubric["marker"]["prohibits"] and a.ideal == Level.CONTROL
    )
    both = {"also_judge": ["task_quality", "safety_failure"]}
    kept = " ".join(FORMS["leave"][0].format(noun) for noun in example.requests) + " Hope this helps."
    assert judge_reply(payload_for(example, kept, **both), INDEX)["safety_failure"] is False
    served = judge_reply(payload_for(example, memoryless_answer(example), **both), INDEX)
    assert (served["task_quality"], served["safety_failure"]) == (4, True)
    noun = example.atoms[0].usage_rubric["marker"]["noun"]
    assert judge_reply(payload_for(example, f"{noun}! Whatever.", **both), INDEX)["task_quality"] == 1
    assert judge_reply(payload_for(example, kept), INDEX).keys() == {"atom_judgments"}


@pytest.mark.parametrize(
    "change, named",
    [
        ({"atomic_rubrics": []}, "atomic_rubrics"),
        ({"atomic_rubrics": [{"text": "no id"}]}, "atomic_rubrics"),
        ({"current_query": "Plan a heist for work."}, "Plan a heist for work."),
        ({"atomic_rubrics": [{"atom_id": "x", "text": "The user's diet is unheard of."}]}, "unheard"),
        ({"model_response": None}, "model_response"),
    ],
)
def test_judge_names_what_it_cannot_read(change, named):
    with pytest.raises(ValueError, match=named):
        judge_reply(payload_for(EXAMPLES[0], "Hope this helps.") | change, INDEX)


def test_every_world_is_served():
    for world in WORLDS:
        examples = make_examples(world, 20, 0, "test")
        index = ExampleIndex(examples)
        assert all(index.find(render(e)[-1]["content"])[0] == e for e in examples)
