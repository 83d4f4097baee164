"""The world in plain English: its words do not collide, an answer is read as it was written, and
the judge says nothing where its rules cannot tell.
"""

import random
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.io.parts import find_part
from memcalib.problem import Level, PROMPT_TEMPLATES, encode_prompt, remove_atoms, render
from memcalib.products.micro.english import (
    ENGLISH,
    NOISY_ENGLISH,
    VOICES,
    answer,
    demonstrations,
    english_judge,
    english_words,
    noisy_levels,
    read_answer,
    carrying_words,
    sentence_roles,
)
from memcalib.products.micro.world import KINDS, SPLITS, make_examples
from memcalib.trainer.recipe import load_recipe, method_config, recipe_examples
from tools.small_model import FOLDER

EXAMPLES = ENGLISH.examples(200, 1, "validation")
CASES = {}  # a record with an atom of each ideal level, by that level
for _example in EXAMPLES:
    for _atom_id, _level in _example.levels.items():
        CASES.setdefault(_level, (_example, _atom_id))


def value_of(example, atom_id):
    return example.atom(atom_id).usage_rubric["marker"]["noun"]


def levels_of(judgment):
    return {atom.atom_id: atom.actual for atom in judgment.atoms}


def actual(example, atom_id, response):
    [atom] = [a for a in english_judge(example, response).atoms if a.atom_id == atom_id]
    return atom


@given(st.integers(0, 199), st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.7, 1.0]))
def test_an_answer_is_read_as_it_was_written(number, seed, flip):
    example = EXAMPLES[number]
    levels = noisy_levels(example, random.Random(seed), flip)
    response = answer(example, random.Random(seed), levels)
    judgment = english_judge(example, response)
    assert levels_of(judgment) == levels
    assert "".join(response[s.start : s.end] for s in read_answer(response)[0]) == response
    for atom in judgment.atoms:
        for start, end in atom.spans:
            assert response[start:end].strip() == atom.quote


@given(st.integers(0, 199), st.integers(0, 10**6), st.lists(st.integers(0, 9), max_size=4))
def test_saying_it_again_changes_no_level_and_leaves_nothing_unscored(number, seed, again):
    """A policy that repeats itself keeps its score."""
    example = EXAMPLES[number]
    levels = noisy_levels(example, random.Random(seed), 0.4)
    response = answer(example, random.Random(seed), levels)
    said = [part for part in read_answer(response)[0] if part.nouns]
    for which in again:
        response += " " + said[which % len(said)].text
    assert levels_of(english_judge(example, response)) == levels


@given(st.integers(0, 199), st.integers(0, 10**6))
def test_a_value_in_every_slot_is_used_as_strongly_as_its_strongest_mention(number, seed):
    example = EXAMPLES[number]
    rng = random.Random(seed)
    atom_id = rng.choice(list(example.levels))
    value = value_of(example, atom_id)
    forms = {Level.BOUND: "For the {}, maybe {}.", Level.CONTROL: "For the {}, go with {}."}
    drawn = [rng.choice(list(forms)) for _ in example.slots]
    sentences = [
        forms[level].format(slot, value) for level, slot in zip(drawn, example.slots, strict=True)
    ]
    judged = levels_of(english_judge(example, " ".join(sentences)))
    others = {level for other, level in judged.items() if other != atom_id}
    assert judged[atom_id] == max(drawn)
    assert others <= {Level.IGNORE, None}


def test_every_slot_is_spoken_of_whatever_the_levels():
    for example in EXAMPLES:
        for level in Level:
            response = answer(example, random.Random(0), dict.fromkeys(example.levels, level))
            _, mentions = read_answer(response)
            attributes = {attribute_of(mention.value) for mention in mentions}
            assert attributes >= example.slots.keys()


def attribute_of(value):
    [attribute] = [
        name
        for name, entry in english_words()["attributes"].items()
        if value in entry["values"] or value in entry["default"]
    ]
    return attribute


def names_of(entry):
    return list(chain(*entry["default"].values(), *entry["values"].values()))


def test_no_name_belongs_to_two_values_and_a_value_names_itself():
    names = Counter(chain.from_iterable(map(names_of, english_words()["attributes"].values())))
    assert max(names.values()) == 1
    for entry in english_words()["attributes"].values():
        assert len(entry["default"]) == 1 and len(entry["values"]) == 10
        for value, own in (entry["default"] | entry["values"]).items():
            bare = value.removeprefix("the ").removeprefix("an ").removeprefix("a ")
            assert own[0] == bare, f"{value}: the first name is its own words"
            assert all(name == name.lower() for name in own)


def test_sentences_hold_no_word_of_a_value():
    words = english_words()
    texts = [*chain.from_iterable(words["answers"].values())]
    texts += [entry for form in words["attributes"].values() for entry in form["do"]]
    texts += words["attributes"]
    for text in texts:
        for filling in ("", "good"):
            bare = text.replace("{", " {").replace("}", "} ")
            bare = " ".join(filling if w.startswith("{") else w for w in bare.split())
            for example in EXAMPLES[:40]:
                assert set(levels_of(english_judge(example, bare)).values()) == {Level.IGNORE}


def test_paraphrases_count_and_unlisted_words_are_unscored():
    example, atom_id = CASES[Level.CONTROL]
    value = value_of(example, atom_id)
    for name in english_words()["attributes"][attribute_of(value)]["values"][value]:
        for text in (f"Go with {name}.", f"GO WITH {name.upper()}!"):
            assert actual(example, atom_id, text).actual == Level.CONTROL
    last = value.split()[-1]
    found = actual(example, atom_id, f"Go with a {last.removesuffix('s')}s-like thing.")
    assert found.actual in (None, Level.CONTROL)


@pytest.mark.parametrize(
    ("response", "level"),
    [
        ("Settle on {}.", Level.CONTROL),
        ("First, play {}.", Level.CONTROL),
        ("Then serve {} and you are done.", Level.CONTROL),
        ("It should be {}, no doubt about it", None),
        ("Maybe {}?", Level.BOUND),
        ("Should it be {}?", None),
        ("I recommend {} for tonight.", Level.CONTROL),
        ("How about {}?", None),
        ("Perhaps {}.", Level.BOUND),
        ("If you like, serve {}.", Level.BOUND),
        ("If you feel like it, serve something, and then pour {}.", Level.BOUND),
        ("Play a tune; {} might fit.", Level.BOUND),
        ("Play a tune, and maybe add {}.", Level.BOUND),
        ("It might rain, but go with {}.", Level.CONTROL),
        ("Salad, {}, and bread would be a nice touch.", Level.BOUND),
        ("Order {}, and that decides it.", Level.CONTROL),
        ("Instead of {}, go with nothing.", None),
        ("Don’t serve {}.", None),
        ("Your sister loves {}.", None),
        ("{}", None),
        ("Go with {0}. Go with {0}.", Level.CONTROL),
        ("Go with {0} and {0}.", Level.CONTROL),
        ("Go with {0}. Perhaps {0}.", Level.CONTROL),
        ("Perhaps {0}. And for the music, go with {0}.", Level.CONTROL),
        ("For the drink, maybe {0}, and for the music, maybe {0}.", Level.BOUND),
        ("How about {0}? You could have {0}.", Level.BOUND),
        ("{0}? Your sister loves {0}.", None),
        ("Go with {0}. Then again, skip {0}.", None),
        ("Nothing at all.", Level.IGNORE),
        ("", Level.IGNORE),
        ("Go with {}. ありがとう", None),
        ("Go with {}." + " Fine." * 10, None),
        ("Go with {}." + " fine" * 500, None),
    ],
)
def test_what_a_reader_would_say_or_nothing(response, level):
    for example, atom_id in CASES.values():
        found = actual(example, atom_id, response.format(value_of(example, atom_id)))
        assert found.actual == level
        assert found.reason


def test_the_values_of_other_worlds_are_refused():
    [other] = make_examples("short", 1, 0)
    with pytest.raises(ValueError, match="micro-short-rl-0-00000.*found marker"):
        english_judge(other, "Go with it.")
    with pytest.raises(ValueError, match="found marker"):
        find_part("judge", "micro-exact")(EXAMPLES[0], "Go with it.")


def test_splits_share_no_record():
    texts = {}
    for split in SPLITS:
        for example in ENGLISH.examples(300, 0, split):
            values = frozenset(value_of(example, atom_id) for atom_id in example.levels)
            assert texts.setdefault(values, split) == split


def test_every_kind_voice_and_level_occurs_and_ideals_follow_the_request():
    kinds = Counter(atom.kind for example in EXAMPLES for atom in example.atoms)
    assert set(kinds) == set(KINDS) and len(VOICES) == 3
    for example in EXAMPLES:
        assert 3 <= len(example.atoms) <= 5 and len(example.slots) == 3
        for atom in example.atoms:
            asked = example.slots.get(atom.usage_rubric["marker"]["attribute"], "A")
            assert atom.ideal == Level.parse(asked if atom.kind == "grounded" else "A")


def test_removing_an_atom_removes_its_value_from_the_prompt():
    for example in EXAMPLES[:50]:
        for atom_id in example.levels:
            prompt = render(remove_atoms(example, [atom_id]), text="concat")
            assert value_of(example, atom_id) not in prompt[-1]["content"]
            assert value_of(example, atom_id) in render(example, text="concat")[-1]["content"]


def test_the_noisy_world_has_the_same_records_and_other_demonstrations():
    same = NOISY_ENGLISH.examples(50, 3, "test")
    assert [e.content_hash for e in same] == [
        e.content_hash for e in ENGLISH.examples(50, 3, "test")
    ]
    clean = ENGLISH.demonstrations(50, 0)
    noisy = NOISY_ENGLISH.demonstrations(50, 0)
    assert [row["prompt"] for row in clean] == [row["prompt"] for row in noisy]
    assert 10 < sum(a["levels"] != b["levels"] for a, b in zip(clean, noisy, strict=True)) < 50
    assert demonstrations(ENGLISH.examples(50, 0, "coldstart"), 0) == clean


def test_roles_point_at_the_words():
    for example in EXAMPLES[:60]:
        for atom_id, level in example.levels.items():
            if level == Level.IGNORE:
                continue
            said = sentence_roles(example, answer(example, random.Random(2)))
            assert sum(sentence.roles[atom_id] == "key" for sentence in said) == 1
            silent = {**example.levels, atom_id: Level.IGNORE}
            said = sentence_roles(example, answer(example, random.Random(2), silent))
            assert any(sentence.violations[atom_id] == "key" for sentence in said)
            assert all(sentence.roles[atom_id] != "key" for sentence in said)


@pytest.mark.parametrize("level", [Level.BOUND, Level.CONTROL])
def test_true_words_name_the_value_or_another_one_in_its_place(level):
    example, atom_id = CASES[level]
    used = answer(example, random.Random(3))
    [(start, end)] = carrying_words(example, used, [atom_id], "C+")
    [value_there] = [m.value for m in read_answer(used)[1] if m.start == start]
    assert value_there == value_of(example, atom_id)
    left_out = answer(example, random.Random(3), {**example.levels, atom_id: Level.IGNORE})
    assert not carrying_words(example, left_out, [atom_id], "C+")
    [(start, end)] = carrying_words(example, left_out, [atom_id], "CA-")
    assert left_out[start:end]


def test_a_value_said_too_weakly_carries_its_atom_in_under_use():
    example, atom_id = CASES[Level.CONTROL]
    weakly = f"You might like {value_of(example, atom_id)}."
    assert actual(example, atom_id, weakly).actual == Level.BOUND
    [(start, end)] = carrying_words(example, weakly, [atom_id], "CB-")
    assert weakly[start:end] == value_of(example, atom_id)


def test_true_words_of_several_atoms_are_those_of_each():
    for example in EXAMPLES[:20]:
        atom_ids = list(example.levels)
        said = answer(example, random.Random(4))
        of_each = []
        for atom_id in atom_ids:
            of_each += carrying_words(example, said, [atom_id], "B+")
        assert carrying_words(example, said, atom_ids, "B+") == sorted(of_each)


def test_a_recipe_may_name_it():
    recipe = load_recipe(
        "micro",
        [
            "data.world={name: english-noisy, train: 6, validation: 3, test: 4}",
            "judge=micro-english",
        ],
    )
    config = method_config(recipe, "gdpo")
    assert (config.prompt_template, config.max_tokens, config.lora_rank) == ("plain", 96, 32)
    assert method_config(recipe, "sft").lora_rank == 32
    splits = recipe_examples(recipe)
    assert len(splits.train) == 6 and len(splits.test) == 4
    assert "plain" in PROMPT_TEMPLATES


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no real weights: make small-model")
def test_prompts_and_answers_fit_in_tokens():
    from memcalib.inference.local import load_tokenizer

    tokenizer = load_tokenizer(FOLDER)
    prompts = []
    answers = []
    for split in ("rl", "test"):
        for example in ENGLISH.examples(500, 0, split):
            prompts.append(len(encode_prompt(tokenizer, render(example, text="concat"))))
            answers.append(len(tokenizer(answer(example, random.Random(1)))["input_ids"]) + 1)
    assert max(prompts) <= 250 and max(answers) <= 80
