"""The properties of the world `fair` that were fixed for it, as far as they need no training."""

import json
import random
from itertools import chain

import numpy as np
import pytest
import torch

from memcalib.problem import CHANNELS, UNDER, Level
from memcalib.products.micro.policy import load_policy, policy_path
from memcalib.products.micro.shipped import COLD_STARTS
from memcalib.products.micro.world import (
    COLD_FAIR_BIAS,
    DEFAULTS,
    WORDS,
    WORLDS,
    answer,
    demonstrations,
    exact_judge,
    make_examples,
    noisy_levels,
    sentence_roles,
)
from memcalib.trainer.train_config import world_config
from memcalib.trainer.traces import sample_credit

torch.set_num_threads(1)
FAIR = make_examples("fair", 60, seed=3, split="validation")


def marker(example, atom_id):
    return example.atom(atom_id).usage_rubric["marker"]


def actual_levels(example, response):
    """The judged level of each atom."""
    return {atom.atom_id: atom.actual for atom in exact_judge(example, response).atoms}


def some_levels(example, seed):
    """Levels of which about half are wrong."""
    return noisy_levels(example, random.Random(seed), flip=0.5)


def nouns_of(response):
    """The noun of each sentence: its second word."""
    return [sentence.split()[1] for sentence in response.rstrip(".").split(". ")]


def test_any_levels_are_read_back():
    for seed, example in enumerate(FAIR):
        levels = some_levels(example, seed)
        assert actual_levels(example, answer(example, random.Random(seed), levels)) == levels


def test_every_slot_is_filled_at_any_levels():
    for seed, example in enumerate(FAIR):
        named = set(nouns_of(answer(example, random.Random(0), some_levels(example, seed))))
        assert len(example.requests) == 3
        for attribute in example.requests:
            assert named & set(WORDS[example.domain][attribute])


def test_memory_never_names_a_default():
    for example in FAIR:
        for atom_id in example.levels:
            assert marker(example, atom_id)["noun"] not in DEFAULTS.values()


def test_under_use_leaves_words_that_others_should_have_replaced():
    """Every atom that is used too little has a sentence that names another value in its slot."""
    under_used = 0
    for seed, example in enumerate(FAIR):
        levels = some_levels(example, seed)
        response = answer(example, random.Random(0), levels)
        sentences = sentence_roles(example, response)
        for atom_id, ideal in example.levels.items():
            if levels[atom_id] >= ideal:
                continue
            under_used += 1
            violations = [s for s in sentences if s.violations[atom_id] == "key"]
            values = WORDS[example.domain][marker(example, atom_id)["attribute"]]
            assert violations
            assert all(set(sentence.nouns) & set(values) for sentence in violations)
    assert under_used > 30


def first_with_plan(level=Level.CONTROL):
    """An example with a grounded atom at this level and no other atom of its attribute."""
    for example in FAIR:
        attributes = [marker(example, atom_id)["attribute"] for atom_id in example.levels]
        for atom_id, ideal in example.levels.items():
            if ideal == level and attributes.count(marker(example, atom_id)["attribute"]) == 1:
                return example, atom_id
    raise AssertionError


def test_an_empty_slot_is_a_fault():
    example, _ = first_with_plan()
    sentences = answer(example, random.Random(0)).split(". ")
    judgment = exact_judge(example, ". ".join(sentences[:-1]).rstrip(".") + ".")
    assert judgment.over + judgment.under > 0
    reasons = " ".join(atom.reason for atom in judgment.atoms)
    assert "nothing is said about the" in reasons


def test_other_details_break_a_use():
    example, atom_id = first_with_plan()
    facts = marker(example, atom_id)
    right = " ".join([facts["noun"], *facts["details"]])
    wrong = " ".join([facts["noun"], *reversed(facts["details"])])
    honest = answer(example, random.Random(0))
    assert right in honest
    broken = honest.replace(right, wrong)
    assert actual_levels(example, honest)[atom_id] == Level.CONTROL
    assert actual_levels(example, broken)[atom_id] == Level.IGNORE


def test_a_default_in_the_plan_beside_a_remark_is_under_use_and_beside_a_plan_a_contradiction():
    example, atom_id = first_with_plan()
    facts = marker(example, atom_id)
    words = " ".join([facts["noun"], *facts["details"]])
    default = f"Take {facts['default']} {' '.join(facts['details'])}."
    honest = answer(example, random.Random(0))
    remarked = honest.replace(f"Take {words}.", f"{default} Consider {words}.")
    both = honest.replace(f"Take {words}.", f"{default} Take {words}.")
    assert actual_levels(example, remarked)[atom_id] == Level.BOUND
    assert actual_levels(example, both)[atom_id] == Level.IGNORE


def test_a_default_in_the_plan_of_a_remarks_slot_contradicts_the_remark():
    example, atom_id = first_with_plan(Level.BOUND)
    facts = marker(example, atom_id)
    honest = answer(example, random.Random(0))
    assert actual_levels(example, honest)[atom_id] == Level.BOUND
    default = f"Take {facts['default']} {' '.join(facts['details'])}."
    assert actual_levels(example, f"{default} {honest}")[atom_id] == Level.CONTROL


@pytest.mark.parametrize(
    "cheat",
    [
        lambda text: f"{text} {text}",
        lambda text: text.replace(". ", ". Take it step by step. ", 1),
        lambda text: f"{text} Hope this helps.",
        lambda text: text.upper(),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: f"{text} Consider",
    ],
)
def test_no_cheat_beats_the_honest_answer(cheat):
    for example in FAIR[:20]:
        judgment = exact_judge(example, cheat(answer(example, random.Random(0))))
        assert judgment.over + judgment.under > 0


def test_details_stand_once_in_a_record():
    for example in FAIR:
        details = [marker(example, atom_id)["details"] for atom_id in example.levels]
        words = list(chain.from_iterable(details))
        assert len(words) == len(set(words)) == 2 * len(example.levels)


def test_demonstrations_err_in_both_directions():
    recipe = COLD_STARTS["cold-fair"]
    assert recipe["bias"] == COLD_FAIR_BIAS
    examples = make_examples("fair", 200, 0, "coldstart")
    rows = demonstrations("fair", 200, 0, recipe["flip"], recipe["bias"])
    errors = {"over": 0, "under": 0}
    total = 0
    for example, row in zip(examples, rows, strict=True):
        for atom_id, ideal in example.levels.items():
            total += 1
            errors["over"] += row["levels"][atom_id] > ideal
            errors["under"] += row["levels"][atom_id] < ideal
    assert min(errors.values()) > 0.03 * total


def test_the_cold_start_is_worth_between_50_and_70():
    story = json.loads((policy_path("cold-fair") / "policy.json").read_text())
    sampled = story["measured"][0]
    assert 50 <= sampled["SCS"] <= 70
    assert (sampled["world"], sampled["temperature"]) == ("fair", 1.0)
    assert {name: story[name] for name in COLD_STARTS["cold-fair"]} == COLD_STARTS["cold-fair"]


@pytest.fixture(scope="module")
def credited():
    """Answers of the cold start to 24 questions under the paper's rule, and what is placed."""
    model, tokenizer = load_policy("cold-fair")
    asked = make_examples("fair", 24, 0, "test")
    config = world_config(WORLDS["fair"])
    judged, credit, pairs = sample_credit(model, tokenizer, asked, exact_judge, config, seed=0)
    return judged, credit, pairs


def test_key_sentences_hold_about_a_third_of_the_tokens(credited):
    """By characters, which is near enough."""
    judged, credit, pairs = credited
    shares = []
    for number, row in enumerate(pairs.rows):
        if credit.pairs.strength[number] == 0:
            continue
        sentences = sentence_roles(judged.examples[row], judged.texts[row])
        breaks = CHANNELS[pairs.channels[number]] in UNDER
        on_key = 0
        for sentence in sentences:
            roles = sentence.violations if breaks else sentence.roles
            if "key" in {roles[atom_id] for atom_id in pairs.atoms[number]}:
                on_key += sentence.end - sentence.start
        shares.append(on_key / max(1, len(judged.texts[row])))
    assert 0.28 < np.mean(shares) < 0.5


def test_signals_of_used_memory_move_their_thresholds_off_the_floor(credited):
    """The 75th percentile of the signals of each channel that shows right use."""
    judged, credit, pairs = credited
    for name in ("B+", "C+"):
        signals = []
        for number, row in enumerate(pairs.rows):
            if CHANNELS[pairs.channels[number]] == name:
                signals.append(credit.pairs.d[number, : len(judged.ids[row])])
        assert len(signals) > 20
        assert np.quantile(torch.cat(signals).numpy(), 0.75) > 0.02
