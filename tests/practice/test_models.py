"""The practice server's models and judges: prompts from any template, answers that repeat, judgments that are exact."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.practice.models import (
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
    unpad,
)
from memcalib.practice.source import read_facts
from memcalib.micro.world import FORMS, NOUNS, WORLDS, exact_judge, make_examples
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


def payload_for(example, response, blind=False, rename=lambda name: name, **more):
    rubrics = [
        {"atom_id": rename(a.atom_id), "parent_memory_id": a.parent_memory_id, "text": a.text}
        | ({} if blind else {"u_star": a.ideal.wire, "usage_rubric": a.usage_rubric})
        for a in example.atoms
    ]
    memory = [
        {"parent_memory_id": b.parent_memory_id, "memory_text": b.memory_text}
        for b in example.blocks
    ]
    head = {
        "current_query": example.question,
        "model_facing_memory": memory,
        "model_response": response,
    }
    return head | {"atomic_rubrics": rubrics} | more


def answers():
    parts = [
        form.format(noun)
        for forms in FORMS.values()
        for form in forms
        for noun in sorted(NOUNS)[:8]
    ]
    return st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=20)), max_size=8).map(
        " ".join
    )


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
    assert {
        a.actual for a in exact_judge(example, said).atoms if not a.reason.startswith("passed")
    } <= {Level.IGNORE}
    assert (
        said == memoryless_answer(INDEX.questions[example.question])
        or example.world != INDEX.questions[example.question].world
    )


@given(some_example, answers(), st.booleans())
def test_judge_is_exact_for_any_answer(example, response, blind):
    response = unpad(response)
    rows = judge_reply(
        payload_for(example, response, blind, lambda name: f"renamed {name}"), INDEX
    )["atom_judgments"]
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
    assert judge_reply(payload_for(example, padded), INDEX) == judge_reply(
        payload_for(example, said), INDEX
    )


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
        e
        for e in EXAMPLES
        for a in e.atoms
        if a.usage_rubric["marker"]["prohibits"] and a.ideal == Level.CONTROL
    )
    both = {"also_judge": ["task_quality", "safety_failure"]}
    kept = (
        " ".join(FORMS["leave"][0].format(noun) for noun in example.requests) + " Hope this helps."
    )
    assert judge_reply(payload_for(example, kept, **both), INDEX)["safety_failure"] is False
    served = judge_reply(payload_for(example, memoryless_answer(example), **both), INDEX)
    assert (served["task_quality"], served["safety_failure"]) == (4, True)
    noun = example.atoms[0].usage_rubric["marker"]["noun"]
    assert (
        judge_reply(payload_for(example, f"{noun}! Whatever.", **both), INDEX)["task_quality"] == 1
    )
    assert judge_reply(payload_for(example, kept), INDEX).keys() == {"atom_judgments"}


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
    with pytest.raises(ValueError, match=named):
        judge_reply(payload_for(EXAMPLES[0], "Hope this helps.") | change, INDEX)


def test_every_world_is_served():
    for world in WORLDS:
        examples = make_examples(world, 20, 0, "test")
        index = ExampleIndex(examples)
        assert all(index.find(render(e)[-1]["content"])[0] == e for e in examples)


TABLES = st.lists(
    st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=3, max_size=3
).map(lambda rows: tuple(tuple(n / sum(row) for n in row) for row in rows))


@given(st.sampled_from(sample_records()), TABLES, st.integers(0, 5))
def test_a_judge_with_known_answers_only_reports_what_its_table_allows(record, table, seed):
    actual = {i: Level((k + seed) % 3) for k, i in enumerate(record.levels)}
    judge = PracticeJudge(
        confusion=table, known=known_levels([(record, "An answer.", actual)]), seed=seed
    )
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
    spread = []
    for k in range(400):
        payload = payload_for(record, f"Answer {k}.", also_judge=["task_quality"])
        first, second = (
            judge_reply(payload, INDEX, name) for name in ("micro-judge", "micro-judge-2")
        )
        assert first["task_quality"] == 4
        pairs = zip(first["atom_judgments"], second["atom_judgments"], strict=True)
        spread += [
            (a["u_star"], a["predicted_usage_level"], b["predicted_usage_level"]) for a, b in pairs
        ]
    assert 0.07 < sum(a != b for _, a, b in spread) / len(spread) < 0.13, (
        "the second judge is wrong one time in ten"
    )
    for ideal, row in zip("ABC", PracticeJudge().use, strict=True):
        found = [a for u, a, _ in spread if u == ideal]
        assert [found.count(level) / len(found) for level in "ABC"] == pytest.approx(row, abs=0.06)


def test_what_a_practice_judge_cannot_know_is_an_error():
    record = sample_records()[0]
    payload = payload_for(record, "An answer.", blind=True)
    assert judge_reply(payload, ExampleIndex([record]))
    with pytest.raises(ValueError, match="has no u_star, and no example here has the query"):
        judge_reply(payload, INDEX)
    with pytest.raises(ValueError, match="confusion: found .* three rows of three probabilities"):
        PracticeJudge(confusion=[[1, 0, 0], [0, 1, 0], [0, 0, 1.5]])


@given(st.sampled_from(sample_records()), st.integers(0, 99), st.sampled_from(sorted(MODELS)))
def test_a_practice_answer_repeats_memory_and_nothing_else(record, seed, model):
    shown = render(record)[-1]["content"]
    answer = practice_answer(shown, model, seed)
    assert answer == practice_answer(shown, model, seed)
    rest = answer.removeprefix(memoryless_answer(None))
    for block in record.blocks:
        for part in block.memory_text.replace("? ", ". ").split(". "):
            rest = rest.replace(part.strip().rstrip("."), "")
    assert not rest.strip(" .?!"), rest
    assert record.question not in answer
