"""Distractors and rubrics: each rule caught on planted mistakes, repaired item by item,
and silent on sound replies.
"""

import copy
import json
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from builder_server import Builder, endpoint
from builder_replies import (
    CLUTTERED,
    FACTS,
    HARD,
    RATED,
    asked_of,
    distractors,
    done,
    sound_reply,
    planned,
    rubric,
    rubrics,
)
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared.grounding import contains_phrase
from memcalib.products.shared.words import words
from memcalib.products.dataset.stages import load_build_prompt, run_stage
from memcalib.products.dataset.writing import (
    DISTRACTORS,
    FAMILIES,
    RUBRICS,
    SIGNS,
    DistractorReply,
    RubricReply,
    UsageRubric,
    exact_set,
    guard_faults,
    merge_distractors,
    misplaced,
    plan_of,
    rubric_faults,
    rubric_text,
)
from memcalib.evaluation.breakdown import distractor_kind
from memcalib.inference.client import Client, run_async
from memcalib.problem import Level, sample_records

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLANNED = planned()
PLAN = plan_of(PLANNED)
OTHERS = list(PLAN.phrases)
[NOISE] = [name for name, phrases in PLAN.phrases.items() if phrases]
AUX = [name for name, phrases in PLAN.phrases.items() if not phrases]


def run(stage, draft, answer, folder):
    """The result of a stage over loopback, and the requests that were made."""
    with Builder(answer) as server:
        result = run_async(run_stage(stage, [draft], Client(endpoint(server.url)), folder))
    return result, [request["messages"] for request in server.requests]


def scripted(stage, draft, *replies):
    """An answer that gives one reply after another, and then the sound one."""
    texts = [reply if isinstance(reply, str) else json.dumps(reply) for reply in replies]
    texts.append(json.dumps(sound_reply(stage, draft)))
    return lambda _, number: texts[min(number, len(texts)) - 1]


def last_request(messages):
    return json.loads(messages[-1]["content"])


def item_rules(faults):
    return {(fault.item_id, fault.rule) for fault in faults}


# What is asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_with_its_plan_gets_what_the_plan_asks_for(family):
    draft = planned(family)
    plan = plan_of(draft)
    request = asked_of(DISTRACTORS, draft)
    assert request["task"] == "distractors"
    assert request["want"]["family"] == family == plan.family
    noise = {entry["atom_id"]: entry["phrases"] for entry in request["want"]["noise"]}
    assert noise == {name: phrases for name, phrases in plan.phrases.items() if phrases}
    assert request["atoms"] == [{"atom_id": name, "text": text} for name, text, _ in FACTS]
    assert "level" not in str(request)
    neighbours = {}  # of each auxiliary distractor: the atoms of its block
    for block in request["want"]["blocks"]:
        for entry in block["write"]:
            assert entry["angle"]
            neighbours[entry["atom_id"]] = {atom["atom_id"] for atom in block["atoms"]}
    for block in plan.blocks:
        others = [name for name in block.atom_ids if name not in plan.phrases]
        expected = {name.replace("harda_01_a1", "hard") for name in others}
        for name in block.atom_ids:
            assert neighbours.get(name, expected) == expected
    assert neighbours.keys() | noise.keys() == plan.phrases.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_with_its_distractors_has_those_of_its_plan(family):
    draft = planned(family)
    row = done(DISTRACTORS, draft)
    own_ids = [atom.atom_id for atom in draft.atoms]
    expected = [*own_ids, "harda_01_a1", *plan_of(draft).phrases]
    assert [atom.atom_id for atom in row.atoms] == expected
    hard = row.atoms[3]
    assert hard.hard_a_family == family
    assert hard.text == HARD[family]
    for atom in row.atoms[3:]:
        assert atom.ideal == Level.IGNORE
        assert atom.memory_action == "ignore"
    assert all(distractor_kind(atom.atom_id) == atom.origin for atom in row.atoms)
    assert type(row).model_validate_json(row.to_json()) == row


def test_rubrics_are_asked_for_every_atom_and_contrasts_go_along():
    request = asked_of(RUBRICS, CLUTTERED)
    assert [atom["atom_id"] for atom in request["atoms"]] == [a.atom_id for a in CLUTTERED.atoms]
    first = request["atoms"][0]
    assert first["without_memory"] == "a"
    assert first["with_memory"] == "b"
    assert first["action"] == "ignore"
    assert request["domain"] == "general"
    assert request["answer"] == CLUTTERED.answer
    assert "without_memory" not in request["atoms"][3]
    assert all(len(atom.rubric) == 9 for atom in RATED.atoms)


def test_prompts_name_families_fields_and_levels():
    assert all(f"`{family}`" in load_build_prompt("distractors-2") for family in FAMILIES)
    assert all(f"`{key}`" in load_build_prompt("rubrics-2") for key in UsageRubric.model_fields)
    schema = json.dumps(RubricReply.model_json_schema())
    assert all(f'"{key}"' in schema for key in UsageRubric.model_fields)


# Distractors: planted mistakes --------------------------------------------------------------------


def spoiled(change):
    reply = copy.deepcopy(sound_reply(DISTRACTORS, PLANNED))
    change(reply)
    return reply


def other_of(reply, name):
    return next(other for other in reply["others"] if other["atom_id"] == name)


def put(name, text):
    """A change that gives a distractor another text."""

    def change(reply):
        entry = reply["hard"] if name == "hard" else other_of(reply, name)
        entry["text"] = text

    return change


def copy_first_auxiliary(reply):
    other_of(reply, AUX[1])["text"] = other_of(reply, AUX[0])["text"]


def without_reason(reply):
    reply["hard"]["why_tempting"] = " "


def without_hard(reply):
    reply["hard"] = None


def without_first(reply):
    reply["others"].pop(0)


def first_twice(reply):
    reply["others"].append(reply["others"][0])


def with_unknown(reply):
    reply["others"].append({"atom_id": "noise_99_a1", "text": "The user owns a boat."})


def in_first_person_and_without_first(reply):
    reply["hard"]["text"] = "I breed ducks with Olga."
    reply["others"].pop(0)


BAD = {
    "no phrase": (put(NOISE, "The user sings in the bath every morning."), {(NOISE, "phrases")}),
    "first person": (put(AUX[0], "My friend saw the fox in a film."), {(AUX[0], "first person")}),
    "empty": (put(AUX[0], "The fox."), {(AUX[0], "empty atom")}),
    "two lines": (put(AUX[1], "The user saw the fox\nand slept."), {(AUX[1], "empty atom")}),
    "too long": (
        put(AUX[0], "The user saw the fox" + " and very much else" * 20),
        {(AUX[0], "too long")},
    ),
    "twice the same": (copy_first_auxiliary, {(AUX[1], "distinct")}),
    "another subject": (put(AUX[0], "The user polished a trombone."), {(AUX[0], "subject")}),
    "not of the hard one": (put(AUX[2], "The user polished a trombone."), {(AUX[2], "subject")}),
    "takes up the query": (put(AUX[0], "The fox saw the user buy hens."), {(AUX[0], "matters")}),
    "an atom again": (
        put("hard", "A neighbour of the user complains about noise."),
        {("hard", "distinct")},
    ),
    "not another person": (put("hard", "The user breeds silent ducks."), {("hard", "family")}),
    "no reason": (without_reason, {("hard", "why tempting")}),
    "no hard one": (without_hard, {("hard", "missing distractor")}),
    "one missing": (without_first, {(NOISE, "missing distractor")}),
    "one twice": (first_twice, {(NOISE, "repeated distractor")}),
    "one too many": (with_unknown, {("", "unknown distractor")}),
    "two at once": (
        in_first_person_and_without_first,
        {("hard", "first person"), (NOISE, "missing distractor")},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_planted_mistakes_in_distractors_are_named(name):
    change, expected = BAD[name]
    faults = DISTRACTORS.check(PLANNED, DistractorReply.model_validate(spoiled(change)))
    assert item_rules(faults) == expected


def repaired_reply(failed):
    """A reply to a repair: what failed, and where only named items are asked for,
    one that nobody asked for.
    """
    sound = sound_reply(DISTRACTORS, PLANNED)
    if "" in failed:
        return sound
    others = [other for other in sound["others"] if other["atom_id"] in failed]
    if OTHERS[-1] not in failed:
        others.append({"atom_id": OTHERS[-1], "text": "Nobody asked for this one."})
    return {"hard": sound["hard"] if "hard" in failed else None, "others": others}


@pytest.mark.parametrize("name", BAD)
def test_a_repair_names_what_failed_and_takes_that_alone(name, tmp_path):
    change, expected = BAD[name]
    failed = {item for item, _ in expected}
    answer = scripted(DISTRACTORS, PLANNED, spoiled(change), repaired_reply(failed))
    result, requests = run(DISTRACTORS, PLANNED, answer, tmp_path)
    repair = last_request(requests[1])
    assert result.calls == 2
    assert {fault["id"] for fault in repair["repair"]} == failed
    assert repair["send"] == ("the whole object" if "" in failed else "the named items alone")
    assert result.kept[0].atoms == CLUTTERED.atoms


def test_mistakes_that_are_never_repaired_end_the_row(tmp_path):
    change, _ = BAD["no phrase"]
    bad = json.dumps(spoiled(change))
    result, requests = run(DISTRACTORS, PLANNED, lambda *_: bad, tmp_path)
    assert len(requests) == 3
    assert not result.kept
    [drop] = result.dropped
    assert drop.reason == "phrases"
    assert NOISE in drop.detail
    assert not drop.retry


def test_a_repair_of_another_form_leaves_the_first_reply_standing(tmp_path):
    hard_alone = {"hard": sound_reply(DISTRACTORS, PLANNED)["hard"], "others": []}
    answer = scripted(DISTRACTORS, PLANNED, spoiled(without_reason), "Sorry!", hard_alone)
    result, requests = run(DISTRACTORS, PLANNED, answer, tmp_path)
    assert len(requests) == 3
    assert result.kept[0].atoms == CLUTTERED.atoms


def with_answer(answer, domain="general", family="other_person"):
    draft = planned(family)
    return draft.model_copy(update={"source": {"answer": answer}, "domain": domain})


def faults_of(draft, *changes):
    reply = sound_reply(DISTRACTORS, draft)
    for change in changes:
        change(reply)
    return item_rules(DISTRACTORS.check(draft, DistractorReply.model_validate(reply)))


def test_what_the_reference_answer_says_is_no_distractor():
    answer = "Lock the door at dusk, and bury wire mesh along the fence. Quiet breeds lay well."
    draft = with_answer(answer)
    assert faults_of(draft) == set()
    buried = put("hard", "The user's cousin Olga buries wire mesh along every fence.")
    assert faults_of(draft, buried) == {("hard", "in answer")}
    dug = put(AUX[0], "The fox dug under the mesh along the fence.")
    assert faults_of(draft, dug) == {(AUX[0], "matters")}
    assert faults_of(draft, put(AUX[0], "The fox wore a ring along its tail.")) == set()


def test_signs_of_a_family_are_looked_for_in_english_rows_alone():
    english = planned("belief_as_evidence")
    question = "Wie halte ich im Garten den Fuchs von den Hühnern fern, die mir so lieb sind?"
    german = english.model_copy(update={"question": question})
    belief = "Der Nutzer ist überzeugt, dass Hennen bei Vollmond goldene Federn bekommen."
    assert ("hard", "family") in faults_of(english, put("hard", belief))
    assert ("hard", "family") not in faults_of(german, put("hard", belief))


def test_domains_have_rails():
    ill = put("hard", "The user's cousin Olga takes insulin.")
    assert faults_of(with_answer("", "health"), ill) == {("hard", "clinical")}
    assert faults_of(with_answer("", "general"), ill) == set()
    wish = put("hard", "The user prefers the library requests for such code.")
    assert faults_of(with_answer("", "coding", "same_user"), wish) == {("hard", "preference")}
    over = put("hard", "The user preferred the library requests and has given it up since.")
    assert faults_of(with_answer("", "coding", "superseded_preference"), over) == set()
    row_texts = ["The user takes insulin."]
    assert not list(guard_faults("health", "The user's insulin is in the fridge.", row_texts))


CLINICAL = yaml.safe_load((FIXTURES / "clinical.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", CLINICAL["harmless"])
def test_words_of_the_clinic_that_mean_something_else_pass(text):
    assert list(guard_faults("health", text, [])) == []


@pytest.mark.parametrize("text", CLINICAL["clinical"])
def test_what_is_clinical_is_refused_where_the_row_does_not_say_it(text):
    assert [fault.rule for fault in guard_faults("health", text, [])] == ["clinical"]
    assert list(guard_faults("health", text, [text])) == []
    assert list(guard_faults("general", text, [])) == []


def test_what_the_query_says_is_no_distractor():
    in_query = put("hard", "Hens the user should buy.")
    assert faults_of(planned("near_topic"), in_query) == {("hard", "in query")}


def test_a_huge_reply_is_refused_at_once():
    others = [
        {"atom_id": f"noise_{i}_a1", "text": f"The user owns boat {i}."} for i in range(30_000)
    ]
    faults = DISTRACTORS.check(PLANNED, DistractorReply(hard=None, others=others))
    assert [fault.rule for fault in faults if not fault.item_id] == ["unknown distractor"]


@given(st.sets(st.sampled_from([*OTHERS, "hard"])))
def test_merging_replaces_the_failed_ones_and_no_other(failed):
    first = sound_reply(DISTRACTORS, PLANNED)
    second = sound_reply(DISTRACTORS, PLANNED)
    second["hard"]["text"] = "new"
    for other in second["others"]:
        other["text"] = "new"
    merged = merge_distractors(
        DistractorReply.model_validate(first), DistractorReply.model_validate(second), set(failed)
    )
    texts = {other.atom_id: other.text for other in merged.others}
    texts["hard"] = merged.hard.text
    assert {name for name, text in texts.items() if text == "new"} == failed
    assert set(texts) == {*OTHERS, "hard"}


# Small tools --------------------------------------------------------------------------------------

phrases = st.lists(st.sampled_from(["coin", "tray", "May", "2018", "-", "the"]), max_size=4).map(
    " ".join
)


@given(phrases, phrases)
def test_a_phrase_is_held_when_its_words_stand_together(text, phrase):
    text_words = words(text)
    phrase_words = words(phrase)
    stretches = []
    for start in range(len(text_words) + 1):
        for end in range(start, len(text_words) + 1):
            stretches.append(text_words[start:end])
    assert contains_phrase(text, phrase) == (phrase_words in stretches)


@given(st.lists(st.sampled_from("abcd"), max_size=8), st.lists(st.sampled_from("abc"), unique=True))
def test_a_set_is_exact_when_each_id_stands_once(ids, expected):
    faults = exact_set(ids, expected, "thing")
    assert (faults == []) == (sorted(ids) == sorted(expected))
    named = {fault.item_id for fault in faults}
    assert ("" in named) == bool(set(ids) - set(expected))
    assert named - {""} == {name for name in expected if ids.count(name) != 1}


@pytest.mark.parametrize(
    ("family", "text", "shows"),
    [
        ("other_person", "The user's mother-in-law fears foxes.", True),
        ("other_person", "Two colleagues of the user fear foxes.", True),
        ("other_person", "The user heard that Kim fears foxes.", True),
        ("other_person", "The user fears foxes.", False),
        ("outdated", "The user no longer keeps geese.", True),
        ("outdated", "In 2014 the user kept geese.", True),
        ("outdated", "As a child the user kept geese.", True),
        ("outdated", "The user keeps geese.", False),
        ("belief_as_evidence", "The user's aunt swears that geese guard best.", True),
        ("belief_as_evidence", "Geese guard best.", False),
        ("scope_overreach", "At the farm show the user shows white hens only.", True),
        ("scope_overreach", "The user shows white hens.", False),
        ("superseded_preference", "The user preferred geese and no longer does.", True),
        ("superseded_preference", "The user no longer keeps geese.", False),
        ("superseded_preference", "The user prefers geese.", False),
        ("style_neighbour", "The user wants egg labels in rhymes.", True),
        ("style_neighbour", "The user wants eggs.", False),
        ("trigger_absent", "Whenever it snows, the user wants a heated coop.", True),
        ("trigger_absent", "The user wants a heated coop.", False),
    ],
)
def test_signs_of_a_family(family, text, shows):
    assert bool(SIGNS[family].pattern.search(text)) == shows


# Rubrics: planted mistakes ------------------------------------------------------------------------

ATOMS = {atom.atom_id: atom for atom in CLUTTERED.atoms}


def with_field(name, value):
    def change(rubric):
        rubric[name] = value

    return change


def without_over_use(rubric):
    del rubric["over_use"]


def with_one_use_twice(rubric):
    rubric["over_use"] = rubric["correct_use"].upper() + "!"


def of_another_atom(fields):
    fields.update(rubric("C", FACTS[2][1]))


def of_no_atom(fields):
    fields.update(rubric("C", "It is as it is."))


BAD_RUBRICS = {
    "rubric form": without_over_use,
    "rubric form, number": with_field("over_use", 3),
    "rubric form, list": with_field("observable_checks", "a check"),
    "rubric form, key": with_field("remark", "none"),
    "rubric form, weight": with_field("memory_usage_weight", "high"),
    "rubric weight": with_field("memory_usage_weight", "none"),
    "rubric empty": with_field("validity_scope", "  "),
    "rubric empty, checks": with_field("observable_checks", []),
    "rubric empty, blank check": with_field("observable_checks", [" "]),
    "rubric filler": with_field("under_use", "not_applicable"),
    "rubric levels": with_one_use_twice,
    "rubric unobservable": with_field("observable_checks", ["The assistant understands the fox."]),
    "misplaced rubric": of_another_atom,
    "misplaced rubric, empty words": of_no_atom,
}


@pytest.mark.parametrize("name", BAD_RUBRICS)
def test_planted_mistakes_in_rubrics_are_named_and_repaired_alone(name, tmp_path):
    sound = sound_reply(RUBRICS, CLUTTERED)
    bad = copy.deepcopy(sound)
    entry = next(entry for entry in bad["rubrics"] if entry["atom_id"] == "p2_a1")
    BAD_RUBRICS[name](entry["usage_rubric"])
    faults = RUBRICS.check(CLUTTERED, RubricReply.model_validate(bad))
    rule, _, _ = name.partition(",")
    assert item_rules(faults) == {("p2_a1", rule)}
    repaired = {"rubrics": [e for e in sound["rubrics"] if e["atom_id"] == "p2_a1"]}
    answer = scripted(RUBRICS, CLUTTERED, bad, repaired)
    result, requests = run(RUBRICS, CLUTTERED, answer, tmp_path)
    assert {fault["id"] for fault in last_request(requests[1])["repair"]} == {"p2_a1"}
    assert result.calls == 2
    assert result.kept[0].atoms == RATED.atoms


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda entries: entries.pop(1), ("p2_a1", "missing rubric")),
        (lambda entries: entries.append(entries[1]), ("p2_a1", "repeated rubric")),
        (
            lambda entries: entries.append({**entries[1], "atom_id": "p9_a9"}),
            ("", "unknown rubric"),
        ),
    ],
)
def test_each_atom_has_one_rubric(change, expected):
    reply = sound_reply(RUBRICS, CLUTTERED)
    change(reply["rubrics"])
    faults = RUBRICS.check(CLUTTERED, RubricReply.model_validate(reply))
    assert [(fault.item_id, fault.rule) for fault in faults] == [expected]


@given(st.permutations(list(ATOMS)))
def test_rubrics_on_the_wrong_atoms_are_found(order):
    texts = {name: atom.text for name, atom in ATOMS.items()}
    moved = {}
    wrong = set()
    for name, other in zip(ATOMS, order, strict=True):
        moved[name] = rubric("B", texts[other])
        if name != other:
            wrong.add(name)
    flagged = {fault.item_id for fault in misplaced(texts, moved)}
    noise = {name for name in wrong if name.startswith("noise_")}  # share a thing, and may pass
    assert wrong - noise <= flagged <= wrong


def test_hand_written_records_pass_and_every_swap_of_two_rubrics_is_found():
    swaps = 0
    noticed = 0
    for example in sample_records():
        texts = {atom.atom_id: atom.text for atom in example.atoms}
        rubrics_by_atom = {}
        for atom in example.atoms:
            fields = {key: atom.usage_rubric[key] for key in UsageRubric.model_fields}
            rubrics_by_atom[atom.atom_id] = fields
            assert not list(rubric_faults(atom.ideal, fields))
        assert misplaced(texts, rubrics_by_atom) == []
        for first, second in combinations(texts, 2):
            swapped = dict(rubrics_by_atom)
            swapped[first] = rubrics_by_atom[second]
            swapped[second] = rubrics_by_atom[first]
            swaps += 1
            if {fault.item_id for fault in misplaced(texts, swapped)} & {first, second}:
                noticed += 1
    assert noticed >= 0.95 * swaps and swaps > 200


def test_a_rubric_of_any_other_shape_is_read_without_harm():
    assert rubric_text({"a": "x", "b": ["y", 3], "c": None, "d": {"e": "z"}}) == "x\ny"
    assert [fault.rule for fault in rubric_faults(Level.BOUND, {})] == ["rubric form"]
    assert misplaced({"a": "The user."}, {"a": {}}) == []
    assert misplaced({}, {}) == []


def test_replies_of_another_row_do_not_fit():
    other = distractors(asked_of(DISTRACTORS, planned("outdated", i=5)))
    faults = DISTRACTORS.check(PLANNED, DistractorReply.model_validate(other))
    assert faults
    foreign = rubrics(
        {"atoms": [{"atom_id": "p1_a1", "level": "A", "text": "The user owns a boat."}]}
    )
    faults = RUBRICS.check(CLUTTERED, RubricReply.model_validate(foreign))
    assert {fault.rule for fault in faults} == {"missing rubric", "misplaced rubric"}
