"""Paragraphs that lose or add something are caught; rows become blocks and examples;
and the whole way, in any order.
"""

import json
import random
from collections import Counter
from itertools import chain

import pytest
from builder_replies import CLUTTERED, FIRST_STAGES, RATED, asked_of, done, planned, sound_reply
from builder_server import Builder, build, endpoint, good, rows

from memcalib.products.dataset.stages import run_stage
from memcalib.products.dataset.writing import (
    DISTRACTORS,
    FAMILIES,
    NATURALIZATION,
    RUBRICS,
    SCHEMA_VERSION,
    NaturalReply,
    compose,
    plan_of,
    rows_of_plans,
    to_example,
)
from memcalib.evaluation.breakdown import distractor_kind
from memcalib.inference.client import Client, run_async
from memcalib.io.records import DataError, write_jsonl
from memcalib.problem import Example, Level, family_of, validate_examples

# Composing ----------------------------------------------------------------------------------------

COMPOSED = compose(RATED)


def test_blocks_follow_the_plan():
    plan = plan_of(RATED)
    assert [b.atom_ids for b in COMPOSED.blocks] == [b.atom_ids for b in plan.blocks]
    assert [a.atom_id for a in COMPOSED.atoms] == plan.atom_ids
    texts = {a.atom_id: a.text for a in RATED.atoms}
    for block in COMPOSED.blocks:
        assert block.memory_text == (texts[block.atom_ids[0]] if len(block.atom_ids) == 1 else "")
    assert compose(RATED.model_copy(update={"atoms": RATED.atoms[::-1]})).atoms == COMPOSED.atoms


@pytest.mark.parametrize(
    ("atoms", "message"),
    [
        (RATED.atoms[1:], "atoms: found p2_a1"),
        ([*RATED.atoms, RATED.atoms[0]], "each once"),
        (CLUTTERED.atoms, "usage_rubric: found none at p1_a1"),
    ],
)
def test_rows_that_do_not_fit_their_plan_are_refused(atoms, message):
    with pytest.raises(DataError, match=rf"hens:0.*{message}"):
        compose(RATED.model_copy(update={"atoms": atoms}))


def test_a_row_without_a_plan_is_refused():
    with pytest.raises(DataError, match="plan: found none"):
        compose(RATED.model_copy(update={"notes": {}}))


# Naturalization -----------------------------------------------------------------------------------


def test_the_request_tells_nothing_of_levels_query_or_origin():
    text = NATURALIZATION.messages(COMPOSED)[1]["content"]
    assert COMPOSED.query not in text
    for block in COMPOSED.blocks:
        assert not any(name in text for name in (*block.atom_ids, block.parent_memory_id))
    request = asked_of(NATURALIZATION, COMPOSED)
    assert request.keys() == {"task", "blocks"}
    assert all(block.keys() == {"block_id", "atoms"} for block in request["blocks"])
    ignored = [atom.model_copy(update={"ideal": Level.IGNORE}) for atom in COMPOSED.atoms]
    all_ignored = COMPOSED.model_copy(update={"atoms": ignored})
    assert NATURALIZATION.messages(all_ignored) == NATURALIZATION.messages(COMPOSED)


OPEN = [f"b{i}" for i, block in enumerate(COMPOSED.blocks, 1) if not block.memory_text]


def spoiled(change):
    reply = sound_reply(NATURALIZATION, COMPOSED)
    change(reply["blocks"])
    return reply


def in_first_block(change):
    """A change of the text of the first block."""

    def apply(blocks):
        blocks[0]["memory_text"] = change(blocks[0]["memory_text"])

    return apply


BAD = {
    "lost atom": in_first_block(lambda text: text.rsplit("The user", 1)[0].strip()),
    "added words": in_first_block(lambda text: text + " The user whistles opera arias."),
    "added name": in_first_block(lambda text: text[:-1] + " in Zorbia."),
    "added number": in_first_block(lambda text: text[:-1] + " 97 times."),
    "added negation": in_first_block(lambda text: text.replace("The user", "Not the user", 1)),
    "added opinion": in_first_block(lambda text: text[:-1] + ", unfortunately."),
    "first person": in_first_block(lambda text: text[:-1] + " with me."),
    "paragraph": in_first_block(lambda text: text.replace(". ", ".\n", 1)),
    "missing block": lambda blocks: blocks.pop(0),
    "repeated block": lambda blocks: blocks.append(blocks[0]),
}


@pytest.mark.parametrize("rule", BAD)
def test_planted_mistakes_in_paragraphs_are_named_and_repaired_alone(rule, tmp_path):
    bad = spoiled(BAD[rule])
    sound = sound_reply(NATURALIZATION, COMPOSED)
    faults = NATURALIZATION.check(COMPOSED, NaturalReply.model_validate(bad))
    assert {fault.item_id for fault in faults} == {OPEN[0]}
    assert rule in {fault.rule for fault in faults}
    repaired = {"blocks": [block for block in sound["blocks"] if block["block_id"] == OPEN[0]]}
    script = [json.dumps(bad), json.dumps(repaired)]
    with Builder(lambda _, number: script[number - 1]) as server:
        client = Client(endpoint(server.url))
        result = run_async(run_stage(NATURALIZATION, [COMPOSED], client, tmp_path))
    request = json.loads(server.requests[1]["messages"][-1]["content"])
    assert {fault["id"] for fault in request["repair"]} == {OPEN[0]}
    assert request["send"] == "the named items alone"
    assert result.kept[0].blocks == done(NATURALIZATION, COMPOSED).blocks


def test_unknown_blocks_ask_for_the_whole_again():
    reply = sound_reply(NATURALIZATION, COMPOSED)
    reply["blocks"].append({"block_id": "b99", "memory_text": "The user does not sing."})
    faults = NATURALIZATION.check(COMPOSED, NaturalReply.model_validate(reply))
    assert [(f.item_id, f.rule) for f in faults] == [("", "unknown block")]


# Examples -----------------------------------------------------------------------------------------

FINISHED = done(NATURALIZATION, COMPOSED)


def test_a_finished_row_is_a_record_of_the_published_format(tmp_path):
    example = to_example(FINISHED)
    assert validate_examples(write_jsonl(tmp_path / "x.jsonl", [example])).violations == []
    assert Example.model_validate_json(example.to_json()) == example
    record = json.loads(example.to_json())
    assert record["schema_version"] == SCHEMA_VERSION
    assert record["difficulty_level"] == "level_2"


def test_the_blocks_of_a_record_hold_its_atoms_in_order():
    record = json.loads(to_example(FINISHED).to_json())
    atoms = {atom["atom_id"]: atom for atom in record["memories"]}
    in_blocks = chain.from_iterable(block["atom_ids"] for block in record["memory_blocks"])
    assert list(atoms) == list(in_blocks)
    texts = {atom.atom_id: atom.text.strip() for atom in FINISHED.atoms}
    for block in record["memory_blocks"]:
        concatenated = " ".join(texts[name] for name in block["atom_ids"])
        assert block["atomic_concat_text"] == concatenated
        assert block["memory_text"]
        for name in block["atom_ids"]:
            assert atoms[name]["parent_memory_id"] == block["parent_memory_id"]


def test_an_atom_of_a_record_says_where_it_comes_from():
    record = json.loads(to_example(FINISHED).to_json())
    atoms = {atom["atom_id"]: atom for atom in record["memories"]}
    assert atoms["p2_a1"]["counterfactual_contract"].keys() == {
        "without_memory_behavior",
        "with_memory_behavior",
        "observable_delta",
        "minimal_evidence",
    }
    assert atoms["p2_a1"]["counterfactual_contract"]["with_memory_behavior"] == "b"
    assert atoms["harda_01_a1"]["hard_a_family"] == "other_person"
    assert atoms["harda_01_a1"]["label_reason"] == "It sounds related."
    for name, atom in atoms.items():
        assert atom["origin"] == distractor_kind(name)
        assert len(atom["usage_rubric"]) == 9


def test_hard_distractors_alone_have_a_family():
    for atom in to_example(FINISHED).atoms:
        assert family_of(atom) == ("other_person" if atom.origin == "hard" else "")


def test_a_row_that_is_not_finished_is_refused():
    with pytest.raises(DataError, match=r"hens:0.*memory_text: found \d texts? for \d blocks?"):
        to_example(COMPOSED)
    with pytest.raises(DataError, match="memory_text: found 0 texts for 0 blocks"):
        to_example(RATED)
    homeless = FINISHED.atoms[0].model_copy(update={"atom_id": "p9_a9"})
    with pytest.raises(DataError, match="exactly one block"):
        to_example(FINISHED.model_copy(update={"atoms": [*FINISHED.atoms, homeless]}))


# The whole way ------------------------------------------------------------------------------------


def whole_way(folder, url, drafts):
    """The examples that a builder at this address makes of source rows."""

    def client():
        return Client(endpoint(url))

    folder.mkdir(exist_ok=True)
    annotated = run_async(build(client(), folder, drafts, FIRST_STAGES))[-1]
    drafts = rows_of_plans(annotated.kept, folder / "plans.jsonl")
    for stage in (DISTRACTORS, RUBRICS):
        drafts = run_async(run_stage(stage, drafts, client(), folder)).stream()
    result = run_async(run_stage(NATURALIZATION, map(compose, drafts), client(), folder))
    return [to_example(draft) for draft in result.stream()]


def test_rows_go_the_whole_way_and_come_out_the_same_in_any_order_of_completion(tmp_path):
    drafts = rows(12)
    with Builder(good) as server:
        first = whole_way(tmp_path / "first", server.url, drafts)
        again = whole_way(tmp_path / "first", server.url, drafts)
        calls = len(server.requests)
    assert calls == 6 * 12
    assert again == first
    assert [example.id for example in first] == [draft.id for draft in drafts]
    rng = random.Random(4)
    with Builder(good, wait=lambda number: rng.choice((0, 0.02))) as server:
        delayed = whole_way(tmp_path / "delayed", server.url, drafts)
    assert [example.to_json() for example in delayed] == [example.to_json() for example in first]
    atoms = list(chain.from_iterable(example.atoms for example in first))
    kinds = Counter(distractor_kind(atom.atom_id) for atom in atoms)
    assert kinds["hard"] == 12
    assert kinds["grounded"] == 36
    assert kinds["other"] == 0
    assert kinds["auxiliary"] > 12
    families = Counter(family_of(atom) for atom in atoms if atom.origin == "hard")
    assert max(families.values()) - min(families.values()) <= 1
    assert len(families) == 10


def test_every_family_and_plan_comes_through():
    for i, family in enumerate(FAMILIES):
        row = done(NATURALIZATION, compose(done(RUBRICS, done(DISTRACTORS, planned(family, i)))))
        assert to_example(row).id == f"hens:{i}"
