"""Distractors and rubrics: each rule caught on planted mistakes, mended item by item, and silent on sound replies."""

import copy
import json

import pytest
from builder_server import Builder, endpoint
from builder_replies import (
    CLUTTERED,
    FACTS,
    HARD,
    RATED,
    asked_of,
    distractors,
    done,
    made,
    planned,
    rubric,
    rubrics,
)
from hypothesis import given
from hypothesis import strategies as st

from memcalib.evaluation.breakdown import distractor_kind
from memcalib.dataset.writing import (
    DISTRACTORS,
    RUBRICS,
    SIGNS,
    DistractorReply,
    RubricReply,
    UsageRubric,
    exact_set,
    guard_faults,
    merge_distractors,
    misplaced,
    rubric_faults,
    rubric_text,
)
from memcalib.dataset.grounding import contains_phrase
from memcalib.dataset.stages import load_build_prompt
from memcalib.inference.client import Client, run_async
from memcalib.dataset.writing import plan_of
from memcalib.problem import Level, sample_records
from memcalib.dataset.screening import words
from memcalib.dataset.writing import FAMILIES
from memcalib.dataset.stages import run_stage

PLANNED = planned()
PLAN = plan_of(PLANNED)
OTHERS = list(PLAN.phrases)
[NOISE], AUX = (
    [n for n, found in PLAN.phrases.items() if bool(found) == noise] for noise in (True, False)
)


def run(stage, draft, answer, folder):
    """The result of a stage over loopback, and the requests that were made."""
    with Builder(answer) as server:
        result = run_async(run_stage(stage, [draft], Client(endpoint(server.url)), folder))
    return result, [request["messages"] for request in server.seen]


def scripted(stage, draft, *replies):
    """An answer that gives one reply after another, and then the sound one."""
    texts = [reply if isinstance(reply, str) else json.dumps(reply) for reply in replies]
    texts.append(json.dumps(made(stage, draft)))
    return lambda messages, seen: texts[min(seen, len(texts)) - 1]


def repairs(messages):
    return json.loads(messages[-1]["content"])


# What is asked -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_with_its_plan_gets_what_the_plan_asks_for(family):
    draft = planned(family)
    plan = plan_of(draft)
    asked = asked_of(DISTRACTORS, draft)
    assert asked["task"] == "distractors" and asked["want"]["family"] == family == plan.family
    want = asked["want"]
    assert {p["atom_id"]: p["phrases"] for p in want["noise"]} == {
        n: found for n, found in plan.phrases.items() if found
    }
    assert asked["atoms"] == [
        {"atom_id": name, "text": text} for name, text, _ in FACTS
    ] and "level" not in str(asked)
    homes = {
        name: {atom["atom_id"] for atom in b["atoms"]}
        for b in want["blocks"]
        for name in (w["atom_id"] for w in b["write"])
    }
    for block in plan.blocks:
        there = {
            "hard" if name == "harda_01_a1" else name
            for name in block.atom_ids
            if name not in plan.phrases
        }
        assert all(homes[name] == there for name in block.atom_ids if name in homes)
    assert homes.keys() | {p["atom_id"] for p in want["noise"]} == plan.phrases.keys()
    assert all(write["angle"] for block in want["blocks"] for write in block["write"])
    row = done(DISTRACTORS, draft)
    assert [a.atom_id for a in row.atoms] == [a.atom_id for a in draft.atoms] + [
        "harda_01_a1",
        *plan.phrases,
    ]
    assert row.atoms[3].hard_a_family == family and row.atoms[3].text == HARD[family]
    assert all(a.ideal == Level.IGNORE and a.memory_action == "ignore" for a in row.atoms[3:])
    kinds = {a.atom_id: distractor_kind(a.atom_id) for a in row.atoms}
    assert all(kinds[a.atom_id] == a.origin for a in row.atoms)
    assert type(row).model_validate_json(row.to_json()) == row


def test_rubrics_are_asked_for_every_atom_and_contrasts_go_along():
    asked = asked_of(RUBRICS, CLUTTERED)
    assert [a["atom_id"] for a in asked["atoms"]] == [a.atom_id for a in CLUTTERED.atoms]
    assert (
        asked["atoms"][0] | {"without_memory": "a", "with_memory": "b", "action": "ignore"}
        == asked["atoms"][0]
    )
    assert asked["domain"] == "general" and asked["answer"] == CLUTTERED.answer
    assert "without_memory" not in asked["atoms"][3]
    assert all(len(atom.rubric) == 9 for atom in RATED.atoms)


def test_prompts_name_families_fields_and_levels():
    assert all(f"`{family}`" in load_build_prompt("distractors-2") for family in FAMILIES)
    assert all(f"`{key}`" in load_build_prompt("rubrics-2") for key in UsageRubric.model_fields)
    schema = json.dumps(RubricReply.model_json_schema())
    assert all(f'"{key}"' in schema for key in UsageRubric.model_fields)


# Distractors: planted mistakes --------------------------------------------------------------------------------------------


def spoiled(change):
    reply = copy.deepcopy(made(DISTRACTORS, PLANNED))
    change(reply)
    return reply


def put(name, text):
    def change(reply):
        next(other for other in reply["others"] if other["atom_id"] == name)["text"] = text

    return change


BAD = {
    "no phrase": (put(NOISE, "The user sings in the bath every morning."), {(NOISE, "phrases")}),
    "first person": (put(AUX[0], "My friend saw the fox in a film."), {(AUX[0], "first person")}),
    "empty": (put(AUX[0], "The fox."), {(AUX[0], "empty atom")}),
    "two lines": (put(AUX[1], "The user saw the fox\nand slept."), {(AUX[1], "empty atom")}),
    "too long": (
        put(AUX[0], "The user saw the fox" + " and very much else" * 20),
        {(AUX[0], "too long")},
    ),
    "twice the same": (
        lambda reply: put(
            AUX[1], next(o["text"] for o in reply["others"] if o["atom_id"] == AUX[0])
        )(reply),
        {(AUX[1], "distinct")},
    ),
    "another subject": (put(AUX[0], "The user polished a trombone."), {(AUX[0], "subject")}),
    "not of the hard one": (put(AUX[2], "The user polished a trombone."), {(AUX[2], "subject")}),
    "takes up the query": (put(AUX[0], "The fox saw the user buy hens."), {(AUX[0], "matters")}),
    "an atom again": (
        lambda reply: reply["hard"].update(text="A neighbour of the user complains about noise."),
        {("hard", "distinct")},
    ),
    "not another person": (
        lambda reply: reply["hard"].update(text="The user breeds silent ducks."),
        {("hard", "family")},
    ),
    "no reason": (lambda reply: reply["hard"].update(why_tempting=" "), {("hard", "why tempting")}),
    "no hard one": (lambda reply: reply.update(hard=None), {("hard", "missing distractor")}),
    "one missing": (lambda reply: reply["others"].pop(0), {(NOISE, "missing distractor")}),
    "one twice": (
        lambda reply: reply["others"].append(reply["others"][0]),
        {(NOISE, "repeated distractor")},
    ),
    "one too many": (
        lambda reply: reply["others"].append(
            {"atom_id": "noise_99_a1", "text": "The user owns a boat."}
        ),
        {("", "unknown distractor")},
    ),
    "two at once": (
        lambda reply: (
            reply["hard"].update(text="I breed ducks with Olga."),
            reply["others"].pop(0),
        ),
        {("hard", "first person"), (NOISE, "missing distractor")},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_planted_mistakes_in_distractors_are_named(name):
    change, wanted = BAD[name]
    faults = DISTRACTORS.check(PLANNED, DistractorReply.model_validate(spoiled(change)))
    assert {(fault.item_id, fault.rule) for fault in faults} == wanted


@pytest.mark.parametrize("name", BAD)
def test_a_repair_names_what_failed_and_takes_that_alone(name, tmp_path):
    change, wanted = BAD[name]
    failed = {item for item, _ in wanted}
    good = made(DISTRACTORS, PLANNED)
    mended = {"hard": good["hard"] if "hard" in failed else None}
    mended["others"] = [other for other in good["others"] if other["atom_id"] in failed]
    stray = {"atom_id": OTHERS[-1], "text": "Nobody asked for this one."}
    mended["others"] += [stray] if "" not in failed and OTHERS[-1] not in failed else []
    mended = good if "" in failed else mended
    result, seen = run(
        DISTRACTORS, PLANNED, scripted(DISTRACTORS, PLANNED, spoiled(change), mended), tmp_path
    )
    asked = repairs(seen[1])
    assert result.calls == 2 and {fault["id"] for fault in asked["repair"]} == failed
    assert asked["send"] == ("the whole object" if "" in failed else "the named items alone")
    assert result.kept[0].atoms == CLUTTERED.atoms


def test_mistakes_that_are_never_mended_end_the_row(tmp_path):
    bad = spoiled(BAD["no phrase"][0])
    result, seen = run(DISTRACTORS, PLANNED, lambda messages, n: json.dumps(bad), tmp_path)
    assert len(seen) == 3 and not result.kept and result.dropped[0].reason == "phrases"
    assert NOISE in result.dropped[0].detail and not result.dropped[0].retry


def test_a_repair_of_another_form_leaves_the_first_reply_standing(tmp_path):
    bad = spoiled(BAD["no reason"][0])
    good = made(DISTRACTORS, PLANNED)
    script = scripted(DISTRACTORS, PLANNED, bad, "Sorry!", {"hard": good["hard"], "others": []})
    result, seen = run(DISTRACTORS, PLANNED, script, tmp_path)
    assert len(seen) == 3 and result.kept[0].atoms == CLUTTERED.atoms


def with_answer(answer, domain="general", family="other_person"):
    draft = planned(family)
    return draft.model_copy(update={"source": {"answer": answer}, "domain": domain})


def faults_of(draft, *changes):
    reply = made(DISTRACTORS, draft)
    for change in changes:
        change(reply)
    return {
        (f.item_id, f.rule) for f in DISTRACTORS.check(draft, DistractorReply.model_validate(reply))
    }


def test_what_the_reference_answer_says_is_no_distractor():
    draft = with_answer(
        "Lock the door at dusk, and bury wire mesh along the fence. Quiet breeds lay well."
    )
    said = "The user's cousin Olga buries wire mesh along every fence."
    assert faults_of(draft) == set()
    assert faults_of(draft, lambda reply: reply["hard"].update(text=said)) == {
        ("hard", "in answer")
    }
    assert faults_of(draft, put(AUX[0], "The fox dug under the mesh along the fence.")) == {
        (AUX[0], "matters")
    }
    assert faults_of(draft, put(AUX[0], "The fox wore a ring along its tail.")) == set()


def test_signs_of_a_family_are_looked_for_in_english_rows_alone():
    draft = planned("belief_as_evidence")
    german = draft.model_copy(
        update={
            "question": "Wie halte ich im Garten den Fuchs von den Hühnern fern, die mir so lieb sind?"
        }
    )
    said = "Der Nutzer ist überzeugt, dass Hennen bei Vollmond goldene Federn bekommen."

    def put_hard(reply):
        return reply["hard"].update(text=said)

    assert ("hard", "family") in faults_of(draft, put_hard) and ("hard", "family") not in faults_of(
        german, put_hard
    )


def test_domains_have_rails():
    def ill(reply):
        return reply["hard"].update(text="The user's cousin Olga takes insulin.")

    assert faults_of(with_answer("", "health"), ill) == {("hard", "clinical")}
    assert faults_of(with_answer("", "general"), ill) == set()
    wish = "The user prefers the library requests for such code."

    def likes(reply):
        return reply["hard"].update(text=wish)

    assert faults_of(with_answer("", "coding", "same_user"), likes) == {("hard", "preference")}

    def over(reply):
        return reply["hard"].update(
            text="The user preferred the library requests and has given it up since."
        )

    assert faults_of(with_answer("", "coding", "superseded_preference"), over) == set()
    assert [
        rule
        for rule, _ in guard_faults(
            "health", "The user's insulin is in the fridge.", ["The user takes insulin."]
        )
    ] == []


def test_what_the_query_says_is_no_distractor():
    draft = planned("near_topic")
    reply = DistractorReply.model_validate(made(DISTRACTORS, draft))
    told = reply.model_copy(
        update={"hard": reply.hard.model_copy(update={"text": "Hens the user should buy."})}
    )
    assert [(f.item_id, f.rule) for f in DISTRACTORS.check(draft, told)] == [("hard", "in query")]


def test_a_huge_reply_is_refused_at_once(tmp_path):
    others = [
        {"atom_id": f"noise_{i}_a1", "text": f"The user owns boat {i}."} for i in range(30_000)
    ]
    faults = DISTRACTORS.check(PLANNED, DistractorReply(hard=None, others=others))
    assert [fault.rule for fault in faults if not fault.item_id] == ["unknown distractor"]


@given(st.sets(st.sampled_from([*OTHERS, "hard"])))
def test_merging_replaces_the_failed_ones_and_no_other(failed):
    first = made(DISTRACTORS, PLANNED)
    second = made(DISTRACTORS, PLANNED)
    second["hard"]["text"] = "new"
    for other in second["others"]:
        other["text"] = "new"
    merged = merge_distractors(
        DistractorReply.model_validate(first), DistractorReply.model_validate(second), set(failed)
    )
    texts = {"hard": merged.hard.text} | {other.atom_id: other.text for other in merged.others}
    assert {name for name, text in texts.items() if text == "new"} == failed and set(texts) == {
        *OTHERS,
        "hard",
    }


# Small tools -------------------------------------------------------------------------------------------------------------

phrases = st.lists(st.sampled_from(["coin", "tray", "May", "2018", "-", "the"]), max_size=4).map(
    " ".join
)


@given(phrases, phrases)
def test_a_phrase_is_held_when_its_words_stand_together(text, phrase):
    have = words(text)
    want = words(phrase)
    slow = any(have[i:j] == want for i in range(len(have) + 1) for j in range(i, len(have) + 1))
    assert contains_phrase(text, phrase) == slow


@given(st.lists(st.sampled_from("abcd"), max_size=8), st.lists(st.sampled_from("abc"), unique=True))
def test_a_set_is_exact_when_each_id_stands_once(found, wanted):
    faults = exact_set(found, wanted, "thing")
    assert (faults == []) == (sorted(found) == sorted(wanted))
    named = {fault.item_id for fault in faults}
    assert ("" in named) == bool(set(found) - set(wanted))
    assert named - {""} == {name for name in wanted if found.count(name) != 1}


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
    assert bool(SIGNS[family][0].search(text)) == shows


# Rubrics: planted mistakes ------------------------------------------------------------------------------------------------

ATOMS = {atom.atom_id: atom for atom in CLUTTERED.atoms}
BAD_RUBRICS = {
    "rubric form": lambda r: r.pop("over_use"),
    "rubric form, number": lambda r: r.update(over_use=3),
    "rubric form, list": lambda r: r.update(observable_checks="a check"),
    "rubric form, key": lambda r: r.update(remark="none"),
    "rubric form, weight": lambda r: r.update(memory_usage_weight="high"),
    "rubric weight": lambda r: r.update(memory_usage_weight="none"),
    "rubric empty": lambda r: r.update(validity_scope="  "),
    "rubric empty, checks": lambda r: r.update(observable_checks=[]),
    "rubric empty, blank check": lambda r: r.update(observable_checks=[" "]),
    "rubric filler": lambda r: r.update(under_use="not_applicable"),
    "rubric levels": lambda r: r.update(over_use=r["correct_use"].upper() + "!"),
    "rubric unobservable": lambda r: r.update(
        observable_checks=["The assistant understands the fox."]
    ),
    "misplaced rubric": lambda r: r.update(rubric("C", FACTS[2][1])),
    "misplaced rubric, empty words": lambda r: r.update(rubric("C", "It is as it is.")),
}


@pytest.mark.parametrize("name", BAD_RUBRICS)
def test_planted_mistakes_in_rubrics_are_named_and_mended_alone(name, tmp_path):
    reply = made(RUBRICS, CLUTTERED)
    entry = next(entry for entry in reply["rubrics"] if entry["atom_id"] == "p2_a1")
    BAD_RUBRICS[name](entry["usage_rubric"])
    faults = RUBRICS.check(CLUTTERED, RubricReply.model_validate(reply))
    assert {(fault.item_id, fault.rule) for fault in faults} == {("p2_a1", name.split(",")[0])}
    fresh = {"rubrics": [e for e in made(RUBRICS, CLUTTERED)["rubrics"] if e["atom_id"] == "p2_a1"]}
    result, seen = run(RUBRICS, CLUTTERED, scripted(RUBRICS, CLUTTERED, reply, fresh), tmp_path)
    assert {fault["id"] for fault in repairs(seen[1])["repair"]} == {"p2_a1"} and result.calls == 2
    assert result.kept[0].atoms == RATED.atoms


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda rows: rows.pop(1), ("p2_a1", "missing rubric")),
        (lambda rows: rows.append(rows[1]), ("p2_a1", "repeated rubric")),
        (lambda rows: rows.append({**rows[1], "atom_id": "p9_a9"}), ("", "unknown rubric")),
    ],
)
def test_each_atom_has_one_rubric(change, wanted):
    reply = made(RUBRICS, CLUTTERED)
    change(reply["rubrics"])
    faults = RUBRICS.check(CLUTTERED, RubricReply.model_validate(reply))
    assert [(fault.item_id, fault.rule) for fault in faults] == [wanted]


@given(st.permutations(list(ATOMS)))
def test_rubrics_on_the_wrong_atoms_are_found(order):
    texts = {name: atom.text for name, atom in ATOMS.items()}
    moved = {name: rubric("B", texts[other]) for name, other in zip(ATOMS, order, strict=True)}
    wrong = {name for name, other in zip(ATOMS, order, strict=True) if name != other}
    found = {fault.item_id for fault in misplaced(texts, moved)}
    same_thing = {
        name for name in wrong if name.startswith("noise_")
    }  # these share a thing, and may pass
    assert wrong - same_thing <= found <= wrong


def test_hand_written_records_pass_and_every_swap_of_two_rubrics_is_found():
    pairs = found = 0
    for example in sample_records():
        texts = {atom.atom_id: atom.text for atom in example.atoms}
        keys = UsageRubric.model_fields
        rows = {a.atom_id: {key: a.usage_rubric[key] for key in keys} for a in example.atoms}
        assert misplaced(texts, rows) == []
        assert [
            fault for a in example.atoms for fault in rubric_faults(a.ideal, rows[a.atom_id])
        ] == []
        for one in texts:
            for other in texts:
                swapped = rows | {one: rows[other], other: rows[one]}
                pairs += one < other
                found += one < other and bool(
                    {f.item_id for f in misplaced(texts, swapped)} & {one, other}
                )
    assert found >= 0.95 * pairs and pairs > 200


def test_a_rubric_of_any_other_shape_is_read_without_harm():
    assert rubric_text({"a": "x", "b": ["y", 3], "c": None, "d": {"e": "z"}}) == "x\ny"
    assert [rule for rule, _ in rubric_faults(Level.BOUND, {})] == ["rubric form"]
    assert misplaced({"a": "The user."}, {"a": {}}) == [] and misplaced({}, {}) == []


def test_replies_of_another_row_do_not_fit():
    other = distractors(asked_of(DISTRACTORS, planned("outdated", i=5)))
    faults = DISTRACTORS.check(PLANNED, DistractorReply.model_validate(other))
    assert faults
    foreign = rubrics(
        {"atoms": [{"atom_id": "p1_a1", "level": "A", "text": "The user owns a boat."}]}
    )
    faults = RUBRICS.check(CLUTTERED, RubricReply.model_validate(foreign))
    assert {fault.rule for fault in faults} == {"missing rubric", "misplaced rubric"}
