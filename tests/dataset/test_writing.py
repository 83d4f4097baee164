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

from memcalib.dataset.writing import (
    NATURALIZATION,
    SCHEMA_VERSION,
    NaturalReply,
    compose,
    to_example,
)
from memcalib.evaluation.breakdown import distractor_kind
from memcalib.dataset.writing import DISTRACTORS, RUBRICS
from memcalib.inference.client import Client, run_async
from memcalib.dataset.grounding import (
    denied,
    exact_faults,
    names,
    numbers,
    stems,
    text_faults,
    word_faults,
)
from memcalib.dataset.writing import FAMILIES, family_of, plan_of, plan_rows
from memcalib.problem import Example, concat_text, sample_records, validate_examples
from memcalib.io.records import DataError, write_jsonl
from memcalib.dataset.stages import run_stage

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
    text = NATURALIZATION.messages(COMPOSED)[1]["content"]
    ids = [name for block in COMPOSED.blocks for name in (*block.atom_ids, block.parent_memory_id)]
    assert not any(name in text for name in ids) and COMPOSED.query not in text
    asked = asked_of(NATURALIZATION, COMPOSED)
    assert asked.keys() == {"task", "blocks"} and all(
        block.keys() == {"block_id", "atoms"} for block in asked["blocks"]
    )
    levels = [{**a.model_dump(), "ideal": "A"} for a in COMPOSED.atoms]
    flat = COMPOSED.model_copy(
        update={"atoms": [type(COMPOSED.atoms[0]).model_validate(a) for a in levels]}
    )
    assert NATURALIZATION.messages(flat) == NATURALIZATION.messages(COMPOSED)


OPEN = [f"b{i}" for i, block in enumerate(COMPOSED.blocks, 1) if not block.memory_text]


def spoiled(change):
    reply = made(NATURALIZATION, COMPOSED)
    change(reply["blocks"])
    return reply


BAD = {
    "lost atom": lambda b: b[0].update(
        memory_text=b[0]["memory_text"].rsplit("The user", 1)[0].strip()
    ),
    "added words": lambda b: b[0].update(
        memory_text=b[0]["memory_text"] + " The user whistles opera arias."
    ),
    "added name": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + " in Zorbia."),
    "added number": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + " 97 times."),
    "added negation": lambda b: b[0].update(
        memory_text=b[0]["memory_text"].replace("The user", "Not the user", 1)
    ),
    "added opinion": lambda b: b[0].update(
        memory_text=b[0]["memory_text"][:-1] + ", unfortunately."
    ),
    "first person": lambda b: b[0].update(memory_text=b[0]["memory_text"][:-1] + " with me."),
    "paragraph": lambda b: b[0].update(memory_text=b[0]["memory_text"].replace(". ", ".\n", 1)),
    "missing block": lambda b: b.pop(0),
    "repeated block": lambda b: b.append(b[0]),
}


@pytest.mark.parametrize("rule", BAD)
def test_planted_mistakes_in_paragraphs_are_named_and_mended_alone(rule, tmp_path):
    bad = spoiled(BAD[rule])
    sound = made(NATURALIZATION, COMPOSED)
    faults = NATURALIZATION.check(COMPOSED, NaturalReply.model_validate(bad))
    assert {f.item_id for f in faults} == {OPEN[0]} and rule in {f.rule for f in faults}
    fresh = {"blocks": [block for block in sound["blocks"] if block["block_id"] == OPEN[0]]}
    script = [json.dumps(bad), json.dumps(fresh)]
    with Builder(lambda messages, seen: script[seen - 1]) as server:
        result = run_async(
            run_stage(NATURALIZATION, [COMPOSED], Client(endpoint(server.url)), tmp_path)
        )
    asked = json.loads(server.seen[1]["messages"][-1]["content"])
    assert {fault["id"] for fault in asked["repair"]} == {OPEN[0]} and asked[
        "send"
    ] == "the named items alone"
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
        assert block["atomic_concat_text"] == " ".join(
            texts[name].strip() for name in block["atom_ids"]
        )
        assert block["memory_text"] and all(
            record_atom(record, i)["parent_memory_id"] == block["parent_memory_id"]
            for i in block["atom_ids"]
        )
    assert record["schema_version"] == SCHEMA_VERSION and record["difficulty_level"] == "level_2"
    assert [a["atom_id"] for a in record["memories"]] == [
        i for b in record["memory_blocks"] for i in b["atom_ids"]
    ]
    assert record_atom(record, "p2_a1")["counterfactual_contract"]["with_memory_behavior"] == "b"
    assert record_atom(record, "harda_01_a1")["hard_a_family"] == "other_person"
    assert record_atom(record, "harda_01_a1")["label_reason"] == "It sounds related."
    contract = {
        "without_memory_behavior",
        "with_memory_behavior",
        "observable_delta",
        "minimal_evidence",
    }
    assert set(record_atom(record, "p2_a1")["counterfactual_contract"]) == contract
    assert all(
        a["origin"] == distractor_kind(a["atom_id"]) and len(a["usage_rubric"]) == 9
        for a in record["memories"]
    )


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
    def client():
        return Client(endpoint(url))

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
    assert (
        kinds["hard"] == 12
        and kinds["grounded"] == 36
        and kinds["other"] == 0
        and kinds["auxiliary"] > 12
    )
    families = Counter(family_of(a) for e in first for a in e.atoms if a.origin == "hard")
    assert max(families.values()) - min(families.values()) <= 1 and len(families) == 10


def test_rows_of_earlier_builds_keep_their_family():
    hard = next(atom for atom in to_example(FINISHED).atoms if atom.origin == "hard")
    data = hard.model_dump()
    old = type(hard).model_validate(data | {"hard_family": data.pop("hard_a_family")})
    assert (
        family_of(old) == family_of(hard) == "other_person"
        and family_of(to_example(FINISHED).atoms[0]) == ""
    )


def test_every_family_and_plan_comes_through():
    for i, family in enumerate(FAMILIES):
        row = done(NATURALIZATION, compose(done(RUBRICS, done(DISTRACTORS, planned(family, i)))))
        assert to_example(row).id == f"hens:{i}"
