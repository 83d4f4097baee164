"""The lint of rubrics that describe answers of the exam; the starter set has none."""

import pytest

from memcalib.problem import Example
from memcalib.products.exam.exam import KnownAnswer, starter_answers
from memcalib.products.exam.minimal_pairs import pair_answers, starter_pairs
from memcalib.products.exam.rubric_leaks import rubric_leaks


def example(**rubric: str) -> Example:
    record = Example.of("What do I cook?", {"The user's oven is broken.": "C"}, id="e")
    row = record.model_dump(mode="json")
    row["memories"][0]["usage_rubric"] = rubric
    return Example.model_validate(row)


def answer(response: str, level: str, answer_id: str = "a") -> KnownAnswer:
    atom_id = example().atoms[0].atom_id
    quotes = [] if level == "A" else [response.split()[0]]
    row = {"answer_id": answer_id, "example_id": "e", "kind": "under", "response": response}
    return KnownAnswer.model_validate(
        {**row, "labels": [{"atom_id": atom_id, "actual": level, "quotes": quotes}]}
    )


BAKED = answer("Lasagne with gratinated courgettes, then a crumble. Mind the oven.", "B")


@pytest.mark.parametrize(
    ("field", "text", "kinds"),
    [
        (
            "under_use",
            "Courgettes, gratinated, and a crumble are served.",
            ["describes the answer"],
        ),
        ("failure_direction", "Under-use: lasagne and a crumble.", ["describes the answer"]),
        ("under_use", "The oven is mentioned while baked dishes lead.", ["tells the mention"]),
        ("under_use", "The oven is not mentioned.", []),
        ("under_use", "The menu would be the same with a working oven.", []),
        ("over_use", "Courgettes, gratinated, and a crumble are served.", []),
        ("correct_use", "Lasagne with gratinated courgettes.", []),
    ],
)
def test_a_leak_is_a_field_of_misuse_that_tells_an_answer(field, text, kinds):
    found = rubric_leaks([example(**{field: text})], [BAKED])
    assert [leak.kind for leak in found] == kinds
    assert all(leak.answer_id == "a" and leak.field == field for leak in found)


def test_words_of_an_answer_that_uses_the_atom_as_it_should_describe_no_misuse():
    good = answer("Stew with gratinated courgettes and a crumble from the pan.", "C", "good")
    text = "Courgettes, gratinated, and a crumble are served."
    assert not rubric_leaks([example(under_use=text)], [BAKED, good])


def test_a_mention_is_told_only_where_an_answer_mentions():
    text = "The oven is mentioned while other things lead."
    unmentioned = answer("Roast, then tart.", "A")
    assert not rubric_leaks([example(under_use=text)], [unmentioned])


def test_scripts_without_blanks_are_compared_by_neighbouring_characters():
    record = Example.of("我做什么菜？", {"用户的烤箱坏了。": "C"}, id="e")
    row = record.model_dump(mode="json")
    row["memories"][0]["usage_rubric"] = {"under_use": "端上千层面和苹果酥。"}
    text = "先做千层面，再做苹果酥。"
    known = {"answer_id": "a", "example_id": "e", "kind": "under", "response": text}
    known["labels"] = [{"atom_id": record.atoms[0].atom_id, "actual": "B", "quotes": ["先做"]}]
    found = rubric_leaks([Example.model_validate(row)], [KnownAnswer.model_validate(known)])
    assert [leak.kind for leak in found] == ["describes the answer"]


@pytest.mark.slow
def test_no_rubric_of_the_starter_set_describes_an_answer_of_the_exam():
    examples, answers = starter_answers()
    by_id = {each.id: each for each in examples}
    answers = list(answers)
    for pair in starter_pairs(examples):
        answers += pair_answers(pair, by_id[pair.example_id])
    assert [str(leak) for leak in rubric_leaks(examples, answers)] == []
