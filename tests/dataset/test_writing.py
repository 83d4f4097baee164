"""Paragraphs that lose or add something are caught; rows become blocks and examples; and the whole way, in any order."""

import json
import random
import re
from collections import Counter
from itertools import combinations

import pytest
from builder_server import Builder, build, endpoint, good, rows
from builder_replies import CLUTTERED, FIRST_STAGES, RATED, asked_of, done, made, planned
from hypothesis import given
from hypothesis import strategies as st

from memcalib.dataset.writing import NATURALIZATION, SCHEMA_VERSION, NaturalReply, compose, natural_messages, to_example
from memcalib.evaluation.breakdown import distractor_kind
from memcalib.dataset.writing import DISTRACTORS, RUBRICS
from memcalib.inference.client import Client, run_async
from memcalib.dataset.writing import claims, denied, exact_faults, names, numbers, stems, text_faults, word_faults
from memcalib.dataset.plans import plan_of, plan_rows
from memcalib.problem import Example, concat_text, sample_records, validate_examples
from memcalib.io.records import DataError, write_jsonl
from memcalib.dataset.stages import run_stage

# Paragraphs that are right ------------------------------------------------------------------------------------------------

RIGHT = [
    (
        [
            "The user takes 5 mg of amlodipine every morning.",
            "The user's last reading was 150/95.",
            "The user is no smoker.",
        ],
        "Every morning the user takes 5 mg of amlodipine. The last reading was 150/95. The user is no smoker.",
    ),
    (
        ["The user works as a nurse on night shifts.", "The user drinks four cups of coffee in each shift."],
        "Working as a nurse on night shifts, the user drinks four cups of coffee in each shift.",
    ),
    (
        [
            "The user writes the backend in Go 1.22.",
            "The database is PostgreSQL 16.",
            "The user cannot change its schema.",
        ],
        "The backend is written in Go 1.22, and the database is PostgreSQL 16, whose schema the user cannot change.",
    ),
    (
        ["The user has a daughter named Ida.", "Ida is seven years old.", "Ida is allergic to peanuts."],
        "The user has a seven-year-old daughter named Ida, who is allergic to peanuts.",
    ),
    (
        ["The user lives in Porto.", "The user moved to Porto from Oslo in 2019.", "The user has never owned a car."],
        "The user, who moved from Oslo in 2019, lives in Porto. The user has never owned a car.",
    ),
    (
        ["The user wants short answers.", "The user wants no tables in answers.", "The user reads answers on a phone."],
        "The user wants short answers without tables and reads them on a phone.",
    ),
    (
        [
            "The user's budget is 1,200 euros.",
            "The user travels with a wheelchair.",
            "The user's sister Anna joins them.",
        ],
        "With a budget of 1200 euros, the user travels with a wheelchair. The user's sister Anna joins them.",
    ),
    (
        [
            "The user is learning Rust.",
            "The user has written Python for nine years.",
            "The user's laptop has an M2 chip.",
        ],
        "The user, who has written Python for nine years, is learning Rust. The user's laptop has an M2 chip.",
    ),
    (
        ["The user does not eat pork.", "The user does not drink wine.", "The user cooks with gas."],
        "The user does not eat pork or drink wine and cooks with gas.",
    ),
    (
        ["The user stopped taking azathioprine because of nausea.", "The user probably has Crohn's disease."],
        "The user stopped taking azathioprine because of nausea and probably has Crohn's disease.",
    ),
    (
        ["The build fails with TS2345.", "The user did not change tsconfig.json.", "The file max_tokens.py is new."],
        "The build fails with TS2345. The user did not change tsconfig.json, and the file max_tokens.py is new.",
    ),
    (
        ["The user found a brass bell in the attic in May 2014.", "The user hung the brass bell in the porch."],
        "In May 2014 the user found a brass bell in the attic and hung it in the porch.",
    ),
]
SHIPPED = [([e.atom(i).text for i in b.atom_ids], b.memory_text) for e in sample_records() for b in e.blocks]
PAIRS = RIGHT + SHIPPED
STRANGERS = (
    "The user repaired a bicycle in Oslo.",
    "The user sings.",
    "The user's uncle sells honey at the station.",
    "The user was stung by a wasp in 1987.",
)


@pytest.mark.parametrize(("atoms", "text"), PAIRS)
def test_sound_paragraphs_pass(atoms, text):
    assert list(text_faults(atoms, text)) == []


@pytest.mark.parametrize(("atoms", "text"), SHIPPED)
def test_atoms_one_after_another_pass(atoms, text):
    assert list(text_faults(atoms, concat_text(atoms))) == []


def spoil(atoms, text):
    """(kind, atoms, text) for each way of spoiling a paragraph."""
    for stranger in STRANGERS:
        yield "lost atom", [*atoms, stranger], text
        yield "added sentence", atoms, f"{text} {stranger}"
        yield "added sentence", atoms, f"{stranger} {text}"
    sentences = re.split(r"(?<=[.!?])\s+", text)
    for i in range(len(sentences) if len(sentences) > 1 else 0):
        yield "lost sentence", atoms, " ".join(sentences[:i] + sentences[i + 1 :])
    yield "added cause", atoms, text[:-1] + ", due to the weather."
    yield "opinion", atoms, f"Interestingly, {text}"
    yield "doubt", atoms, text.replace(" the user", " perhaps the user", 1).replace("The user", "Perhaps the user", 1)
    for number in re.findall(r"(?<![\w.,:/])\d+(?![\w.,:/]*\d)", text):
        yield "number", atoms, text.replace(number, "97", 1)
    for name in set(names(text)):
        yield "name", atoms, text.replace(name, "Zorbia")
    for word in re.findall(r" (?:not|never|no|without|cannot) ", text):
        yield "negation gone", atoms, text.replace(word, " ", 1)
    for word in (" is ", " was ", " has "):
        if word in text:
            yield "negation new", atoms, text.replace(word, f"{word}not ", 1)
    alone = lambda item: sum(item in numbers(a) + names(a) for a in atoms) == 1
    for one, other in combinations(dict.fromkeys(filter(alone, re.findall(r"(?<![\w.,:/])\d+(?![\w.,:/])", text))), 2):
        if not any(one in a and other in a for a in atoms):
            yield "numbers swapped", atoms, text.replace(one, "@").replace(other, one).replace("@", other)


CASES = [case for pair in PAIRS for case in spoil(*pair) if case[1:] != pair]


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in CASES}))
def test_spoiled_paragraphs_are_caught(kind):
    cases = [(atoms, text) for name, atoms, text in CASES if name == kind]
    missed = [text for atoms, text in cases if not list(text_faults(atoms, text))]
    assert len(missed) <= 0.05 * len(cases), missed[:5]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("Ann is 24 years old. The user's son is 21 years old. Ann does not eat fish.", {"moved number"}),
        ("Ann is 21 years old. The user's son is 24 years old. Ann eats fish.", {"lost negation"}),
        ("Ann is 21 years old. The user's son is not 24 years old. Ann eats fish.", {"moved negation"}),
        ("Ann is 21 years old. The user's son is not 24 years old. Ann does not eat fish.", {"added negation"}),
        ("Ann is 21 years old. The user's son Bob is 24 years old. Ann does not eat fish.", {"added name"}),
        ("Bob is 21 years old. The user's son is 24 years old. Bob does not eat fish.", {"lost name"}),
        (
            "Ann is 21 years old. The user's son is 25 years old. Ann does not eat fish.",
            {"lost number", "added number"},
        ),
        ("Ann is 21 years old, as is my son of 24 years. Ann does not eat fish.", {"first person"}),
        ("Ann is 21 years old.\nThe user's son is 24 years old. Ann does not eat fish.", {"paragraph"}),
        ("Ann might be 21 years old. The user's son is 24 years old. Ann does not eat fish.", {"added claim"}),
    ],
)
def test_each_rule_by_itself(text, rules):
    atoms = ["Ann is 21 years old.", "The user's son is 24 years old.", "Ann does not eat fish."]
    assert rules <= {rule for rule, _ in text_faults(atoms, text)}


def test_names_that_change_places_are_caught():
    atoms = ["The cat Mina is grey.", "The dog Rex is loud."]
    assert [rule for rule, _ in exact_faults(atoms, "The cat Rex is grey and the dog Mina is loud.")] == ["moved name"]
    assert list(exact_faults(atoms, "The dog Rex is loud and the cat Mina is grey.")) == []


def test_empty_and_odd_texts_do_no_harm():
    for text in (
        "",
        " ",
        "...",
        "\x00",
        "no",
        "12",
        "\ud800",
        "a" * 100_000,
        "x " * 30_000,
        "not " * 50_000,
        "1.1" * 50_000,
        "+" * 50_000,
    ):
        assert list(text_faults(["The user owns a boat."], text))
    assert list(exact_faults([], "")) == [] and list(word_faults([], "")) == []
    assert [rule for rule, _ in text_faults(["The user."], "")] == ["paragraph", "lost atom"]


texts = st.lists(
    st.sampled_from(["The user", "not", "or", "never", "Ann", "owns", "5", "1,200", "boats", ".", ",", "but", "sings"]),
    max_size=12,
).map(" ".join)


@given(texts)
def test_a_text_has_no_exact_fault_against_itself(text):
    assert list(exact_faults([text], text)) == []


@given(texts, texts)
def test_exact_faults_are_those_of_sets_and_counts(one, other):
    found = {rule for rule, _ in exact_faults([one], other)}
    assert ("lost number" in found) == bool(set(numbers(one)) - set(numbers(other)))
    assert ("added number" in found) == bool(set(numbers(other)) - set(numbers(one)))
    assert any(name not in other.split() for name in names(one)) <= ("lost name" in found)
    (mine, spare), (theirs, more) = denied(one), denied(other)
    overlap = len(mine) <= len(theirs) + more and len(theirs) <= len(mine) + spare
    assert overlap == (not found & {"lost negation", "added negation"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,200 euros, 2.5 mg, 7:30, 24/7", ["1200", "2.5", "7:30", "24/7"]),
        ("Seven of nine, and -5 °C", ["7", "9", "-5"]),
        ("10-20 and B12, x86, 3-year-old", ["10", "20", "3"]),
        ("one day, seventeen days", []),
    ],
)
def test_numbers(text, found):
    assert numbers(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The user met Dr. Weber's dog in Ulm.", ["Dr", "Ulm"]),
        ("Ida sings. Ben sings, and Mia sings.", ["Mia"]),
        ("An iPhone, GPT-4, utf_8, a.out and node.js (C++).", ["iPhone", "GPT-4", "utf_8", "a.out", "node.js", "C++"]),
        ("It was late, e.g. at night.", []),
    ],
)
def test_names(text, found):
    assert names(text) == found


def test_stems_forgive_endings_and_leave_negations_out():
    assert stems("watering waters watered") == ["water"] * 3
    assert stems("The user never owned boats.") == stems("owns boat")
    assert claims("It seems likely, because it might.") == {"seems", "likely", "because", "might"}


# Composing ---------------------------------------------------------------------------------------------------------------

COMPOSED = compose(RATED)


def test_blocks_follow_the_plan():
    plan = plan_of(RATED)
    assert [b.atom_ids for b in COMPOSED.blocks] == [b.atom_ids for b in plan.blocks]
    assert [a.atom_id for a in COMPOSED.atoms] == plan.atom_ids
    texts = {a.atom_id: a.text for a in RATED.atoms}
    for block in COMPOSED.blocks:
        assert block.memory_text == (texts[block.atom_ids[0]] if len(block.atom_ids) == 1 else "")
    assert compose(RATED.model_copy(update={"atoms": RATED.atoms[::-1]})).atoms == COMPOSED.atoms


def test_rows_that_do_not_fit_their_plan_are_refused():
    for atoms, found in (
        (RATED.atoms[1:], "atoms: found p2_a1"),
        ([*RATED.atoms, RATED.atoms[0]], "each once"),
        (CLUTTERED.atoms, "usage_rubric: found none at p1_a1"),
    ):
        with pytest.raises(DataError, match=rf"hens:0.*{found}"):
            compose(RATED.model_copy(update={"atoms": atoms}))
    with pytest.raises(DataError, match="plan: found none"):
        compose(RATED.model_copy(update={"notes": {}}))


# Naturalization ----------------------------------------------------------------------------------------------------------


def test_the_request_tells_nothing_of_levels_query_or_origin():
    text = natural_messages(COMPOSED)[1]["content"]
    ids = [name for block in COMPOSED.blocks for name in (*block.atom_ids, block.parent_memory_id)]
    assert not any(name in text for name in ids) and COMPOSED.query not in text
    asked = asked_of(NATURALIZATION, COMPOSED)
    assert asked.keys() == {"task", "blocks"} and all(
        block.keys() == {"block_id", "atoms"} for block in asked["blocks"]
    )
    levels = [{**a.model_dump(), "ideal": "A"} for a in COMPOSED.atoms]
    flat = COMPOSED.model_copy(update={"atoms": [type(COMPOSED.atoms[0]).model_validate(a) for a in levels]})
    assert natural_messages(flat) == natural_messages(COMPOSED)


OPEN = [f"b{i}" for i, block in enumerate(COMPOSED.blocks, 1) if not block.memory_text]


def spoiled(change):
    reply = made(NATURALIZATION, COMPOSED)
    change(reply["blocks"])
    return reply


BAD = {
    "lost atom": lambda b: b[0].update(memory_text=b[0]["memory_text"].rsplit("The user", 1)[0].strip()),
    "added words": lambda b: b[0].update(memory_text=b[0]["memory_text"] + " The user whistles opera arias."),
    "added name": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + " in Zorbia."),
    "added number": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + " 97 times."),
    "added negation": lambda b: b[0].update(memory_text=b[0]["memory_text"].replace("The user", "Not the user", 1)),
    "added claim": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + ", unfortunately."),
    "first person": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + " with me."),
    "paragraph": lambda b: b[0].update(memory_text=b[0]["memory_text"].replace(". ", ".\n", 1)),
    "missing block": lambda b: b.pop(0),
    "repeated block": lambda b: b.append(b[0]),
}


@pytest.mark.parametrize("rule", BAD)
def test_planted_mistakes_in_paragraphs_are_named_and_mended_alone(rule, tmp_path):
    bad, sound = spoiled(BAD[rule]), made(NATURALIZATION, COMPOSED)
    faults = NATURALIZATION.check(COMPOSED, NaturalReply.model_validate(bad))
    assert {f.item_id for f in faults} == {OPEN[0]} and rule in {f.rule for f in faults}
    fresh = {"blocks": [block for block in sound["blocks"] if block["block_id"] == OPEN[0]]}
    script = [json.dumps(bad), json.dumps(fresh)]
    with Builder(lambda messages, seen: script[seen - 1]) as server:
        result = run_async(run_stage(NATURALIZATION, [COMPOSED], Client(endpoint(server.url)), tmp_path))
    asked = json.loads(server.seen[1]["messages"][-1]["content"])
    assert {fault["id"] for fault in asked["repair"]} == {OPEN[0]} and asked["send"] == "the named items alone"
    assert result.kept[0].blocks == done(NATURALIZATION, COMPOSED).blocks


def test_unknown_blocks_ask_for_the_whole_again():
    reply = made(NATURALIZATION, COMPOSED)
    reply["blocks"].append({"block_id": "b99", "memory_text": "The user does not sing."})
    faults = NATURALIZATION.check(COMPOSED, NaturalReply.model_validate(reply))
    assert [(f.item_id, f.rule) for f in faults] == [("", "unknown block")]


# Examples ----------------------------------------------------------------------------------------------------------------

FINISHED = done(NATURALIZATION, COMPOSED)


def test_a_finished_row_is_a_record_of_the_published_format(tmp_path):
    example = to_example(FINISHED)
    assert validate_examples(write_jsonl(tmp_path / "x.jsonl", [example])).violations == []
    assert Example.model_validate_json(example.to_json()) == example
    record = json.loads(example.to_json())
    texts = {a.atom_id: a.text for a in FINISHED.atoms}
    for block in record["memory_blocks"]:
        assert block["atomic_concat_text"] == " ".join(texts[name].strip() for name in block["atom_ids"])
        assert block["memory_text"] and all(
            record_atom(record, i)["parent_memory_id"] == block["parent_memory_id"] for i in block["atom_ids"]
        )
    assert record["schema_version"] == SCHEMA_VERSION and record["difficulty_level"] == "level_2"
    assert [a["atom_id"] for a in record["memories"]] == [i for b in record["memory_blocks"] for i in b["atom_ids"]]
    assert record_atom(record, "p2_a1")["counterfactual_contract"]["with_memory_behavior"] == "b"
    assert record_atom(record, "harda_01_a1")["hard_family"] == "other_person"
    assert all(a["origin"] == distractor_kind(a["atom_id"]) and len(a["usage_rubric"]) == 9 for a in record["memories"])


def record_atom(record, name):
    return next(atom for atom in record["memories"] if atom["atom_id"] == name)


def test_a_row_that_is_not_finished_is_refused():
    with pytest.raises(DataError, match=r"hens:0.*memory_text: found \d texts for \d blocks"):
        to_example(COMPOSED)
    with pytest.raises(DataError, match="memory_text: found 0 texts for 0 blocks"):
        to_example(RATED)
    homeless = FINISHED.atoms[0].model_copy(update={"atom_id": "p9_a9"})
    with pytest.raises(DataError, match="exactly one block"):
        to_example(FINISHED.model_copy(update={"atoms": [*FINISHED.atoms, homeless]}))


# The whole way -----------------------------------------------------------------------------------------------------------


def whole_way(folder, url, drafts):
    client = lambda: Client(endpoint(url))
    annotated = run_async(build(client(), folder, drafts, FIRST_STAGES))[-1]
    step = plan_rows(annotated.kept, folder / "plans.jsonl")
    for stage in (DISTRACTORS, RUBRICS):
        step = run_async(run_stage(stage, step, client(), folder)).stream()
    result = run_async(run_stage(NATURALIZATION, map(compose, step), client(), folder))
    return [to_example(draft) for draft in result.stream()]


def test_rows_go_the_whole_way_and_come_out_the_same_in_any_order_of_completion(tmp_path):
    drafts = rows(12)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with Builder(good) as server:
        first = whole_way(tmp_path / "a", server.url, drafts)
        again = whole_way(tmp_path / "a", server.url, drafts)
        calls = len(server.seen)
    assert calls == 6 * 12 and again == first and [e.id for e in first] == [d.id for d in drafts]
    rng = random.Random(4)
    with Builder(good, wait=lambda number: rng.choice((0, 0.02))) as server:
        other = whole_way(tmp_path / "b", server.url, drafts)
    assert [e.to_json() for e in other] == [e.to_json() for e in first]
    kinds = Counter(distractor_kind(i) for e in first for i in e.levels)
    assert kinds["hard"] == 12 and kinds["grounded"] == 36 and kinds["other"] == 0 and kinds["auxiliary"] > 12
    families = Counter(a.hard_family for e in first for a in e.atoms if a.origin == "hard")
    assert max(families.values()) - min(families.values()) <= 1 and len(families) == 5


def test_every_family_and_plan_comes_through():
    for i, family in enumerate(("same_user", "near_topic", "other_person", "other_occasion", "outdated")):
        row = done(NATURALIZATION, compose(done(RUBRICS, done(DISTRACTORS, planned(family, i)))))
        assert to_example(row).id == f"hens:{i}"
