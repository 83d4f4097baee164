"""Further shapes of logs, each from the form of a real export, and what is said of unknown ones."""

import json

import pytest
from command_line import run

from memcalib.commands.sweep import retrieved_rows
from memcalib.products.memory_logs.exports import (
    SHAPES,
    RawMemory,
    Shape,
    check_log_row,
    record_kind,
    shape_of,
)
from memcalib.products.memory_logs.field_maps import read_all
from memcalib.products.memory_logs.formats import format_of, read_store
from memcalib.products.memory_logs.notes import mapping_lines, note_memories, system_memories
from memcalib.products.memory_logs.own_answers import LogPlan, own_answers
from memcalib.products.memory_logs.traces import _is_in

ZEP = {
    "query": "What can I bake?",
    "edges": [
        {
            "uuid": "e1",
            "name": "ALLERGIC_TO",
            "fact": "User is allergic to nuts",
            "created_at": "2026-01-05T10:00:00Z",
            "valid_at": "2026-01-02T00:00:00Z",
            "invalid_at": None,
            "score": 0.83,
            "source_node_uuid": "n1",
            "target_node_uuid": "n2",
        }
    ],
}
MEM0_NODE = {
    "query": "What can I bake?",
    "results": [
        {
            "id": "0d3f",
            "memory": "Allergic to nuts",
            "hash": "91aa",
            "createdAt": "2026-01-02T10:00:00Z",
            "updatedAt": "2026-01-03T10:00:00Z",
            "score": 0.83,
            "userId": "anna",
            "metadata": {"category": "health"},
        }
    ],
    "relations": [],
}
LLAMAINDEX = {
    "query": "What can I bake?",
    "memories": [
        {
            "node": {
                "id_": "n-1",
                "text": "Allergic to nuts",
                "metadata": {"created_at": "2026-01-02", "source": "chat"},
                "class_name": "TextNode",
            },
            "score": 0.83,
            "class_name": "NodeWithScore",
        }
    ],
}
TALK = {
    "id": "c1",
    "messages": [
        {
            "role": "system",
            "content": "Be kind.\n<memory>\n- [2026-01-02] Allergic to nuts\n</memory>",
        },
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What can I bake?"},
        {"role": "assistant", "content": "No nuts."},
    ],
}


@pytest.mark.parametrize(
    ("record", "system", "memory_id", "score"),
    [
        (ZEP, "zep", "e1", 0.83),
        (MEM0_NODE, "mem0", "0d3f", 0.83),
        (LLAMAINDEX, "llamaindex", "n-1", 0.83),
    ],
    ids=["zep", "mem0 node", "llamaindex"],
)
def test_exports_of_systems(record, system, memory_id, score):
    [row] = read_all([{**record, "answer": "No nuts."}]).rows
    [memory] = row.memories
    assert row.system == system and memory.id == memory_id and memory.score == score
    assert memory.created_at == "2026-01-02" and "nuts" in memory.text


def test_conversations_with_memory_in_the_system_message(tmp_path):
    log = tmp_path / "talks.jsonl"
    log.write_text(json.dumps(TALK) + "\n")
    first, second = read_all(str(log)).rows
    assert (first.query, second.query) == ("Hello", "What can I bake?")
    assert second.answer == "No nuts." and [turn.content for turn in second.turns] == [
        "Hello",
        "Hello.",
    ]
    assert second.memories[0].created_at == "2026-01-02"
    answers = own_answers(LogPlan(file=str(log), consent="x"))
    assert len(answers.examples) == 2 and answers.examples[1].turns


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("You are kind.\n\n# Model Set Context\n1. [2025-05-02]. A b.\n2. C.\n", ["A b.", "C."]),
        ("## User memories\n- One.\n- Two.\n\n## Tools\n- Search.\n", ["One.", "Two."]),
        ("<memories><fact>One.</fact>\n<fact>Two.</fact></memories>", ["One.", "Two."]),
        ("You have a good memory and use it.", []),
        ("", []),
    ],
)
def test_sections_of_memory(text, texts):
    assert [entry["text"] for entry in system_memories(text)] == texts


def test_a_folder_of_notes_is_a_store(capsys, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "MEMORY.md").write_text("- [Nuts](nuts.md) allergy\n")
    (notes / "nuts.md").write_text("---\nname: nuts\ntype: user\n---\nAllergic to nuts.\n")
    (notes / "broken.md").write_text("---\nname: [\n---\nStill read.\n")
    log = tmp_path / "log.jsonl"
    rows = {"query": "What can I bake?", "memory_ids": ["nuts.md"], "answer": "No nuts."}
    log.write_text(json.dumps(rows) + "\n")
    code, output, _ = run(capsys, "logs", log, "--store", notes)
    assert code == 0 and "memory 1: Allergic to nuts." in output
    code, _, errors = run(capsys, "logs", notes)
    assert code == 1 and "memories without queries, 2 notes" in errors and "--store" in errors


def test_an_unknown_shape_gets_its_nearest_and_ten_lines_that_work(capsys, tmp_path):
    record = {
        "in": {"says": "What can I bake?"},
        "found_items": [{"w": "Allergic to nuts.", "score": 0.8, "id": "a"}],
        "out": "A cake without.",
    }
    log = tmp_path / "odd.jsonl"
    log.write_text(json.dumps(record) + "\n")
    code, _, errors = run(capsys, "logs", log)
    assert code == 1 and "nearest known format" in errors and "--lines" in errors
    code, output, _ = run(capsys, "logs", log, "--lines")
    assert code == 0 and output.strip() == mapping_lines(record, str(log))
    assert shape_of(record["found_items"][0]) == ""
    lines = mapping_lines(record, str(log)).replace(
        '"plain.jsonl"', repr(str(tmp_path / "plain.jsonl"))
    )
    exec(compile(lines, "lines", "exec"), {})  # as a user would
    [row] = read_all(str(tmp_path / "plain.jsonl")).rows
    assert row.query == "What can I bake?" and row.memories[0].text == "Allergic to nuts."
    assert row.answer == "A cake without."


@pytest.mark.parametrize(
    "top", ["a: [", "- a list", "date: 2026-13-45", "a: 1\na: 2", "a: " + "[" * 3000]
)
def test_front_matter_that_cannot_be_read_is_text_of_the_note(top):
    (memory,) = note_memories(f"---\n{top}\n---\nTea is drunk at four.\n", "tea.md")
    assert memory["text"].endswith("Tea is drunk at four.") and memory["text"].startswith("---")


MEM0 = {"id": "0d3f", "memory": "Allergic to nuts"}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"query": "What?", "results": [MEM0]}, "row"),
        ({"question": "What?", **MEM0}, "row"),
        ({"input": {"says": "What?"}}, "row"),
        ({"memory_ids": ["0d3f"]}, "row"),
        ({"says": "What can I bake?", "results": [MEM0]}, "row"),
        ({"nothing": 1}, "row"),
        (MEM0, "memory"),
        ({"type": "relation", "from": "a", "to": "b"}, "memory"),
        ({"text": "About nuts", "memories": [MEM0]}, "row"),
        ({"results": [MEM0, MEM0]}, "store"),
    ],
)
def test_a_record_is_a_row_a_memory_or_a_store(record, kind):
    assert record_kind(record) == kind
    assert (format_of(record).name == "memories") == (kind != "row")


def test_a_form_that_is_added_is_a_memory_and_a_store_without_another_edit(monkeypatch, tmp_path):
    tastes = Shape(
        '{"tastes": [...]}',
        lambda item: isinstance(item, dict) and isinstance(item.get("tastes"), list),
        lambda item: [RawMemory(text) for text in item["tastes"]],
    )
    record = {"tastes": ["Likes tea.", "Likes rowing."]}
    assert record_kind(record) == "row"
    monkeypatch.setitem(SHAPES, "tastes", tastes)
    assert record_kind(record) == "memory" and format_of(record).name == "memories"
    (tmp_path / "tastes.json").write_text(json.dumps([record, record]))
    assert len(read_store(tmp_path / "tastes.json").items) == 2


PROFILE = {"topic": "food", "memos": [{"content": "Is vegan"}, {"content": "Bakes with rye"}]}


def test_the_memories_in_a_form_that_is_added_may_be_objects(monkeypatch, tmp_path):
    profile = Shape(
        '{"topic", "memos"}',
        lambda item: isinstance(item, dict) and item.keys() >= {"topic", "memos"},
        lambda item: [RawMemory(memo["content"], type=item["topic"]) for memo in item["memos"]],
        inner_lists=("memos",),
    )
    monkeypatch.setitem(SHAPES, "profile", profile)
    assert record_kind(PROFILE) == "memory"
    assert record_kind({"results": [PROFILE]}) == "store"
    assert record_kind({"query": "Dinner?", "memories": [PROFILE]}) == "row"
    assert record_kind({**PROFILE, "memories": [MEM0]}) == "row"  # of others, not of its own
    (tmp_path / "store.jsonl").write_text(f"{json.dumps(PROFILE)}\n" * 2)
    assert len(read_store(tmp_path / "store.jsonl").items) == 2
    [row] = read_all([{"query": "Dinner?", "memories": [PROFILE], "answer": "Tofu."}]).rows
    assert [(memory.text, memory.type) for memory in row.memories] == [
        ("Is vegan", "food"),
        ("Bakes with rye", "food"),
    ]


# entities of the MCP memory server


def entity(*observations, **fields) -> dict:
    return {"name": "Mia", "entityType": "person", "observations": [*observations], **fields}


def row_with(*memories) -> dict:
    return {"query": "Sport?", "memories": [*memories], "answer": "Row."}


@pytest.mark.parametrize(
    "observations", [["Rows"], [{"content": "Rows"}, {"text": "Bakes"}], [{"text": "Rows"}, ""]]
)
def test_an_entity_is_a_memory_with_texts_and_with_objects(tmp_path, observations):
    record = entity(*observations)
    assert record_kind(record) == "memory" and format_of(record).name == "memories"
    assert record_kind({"entities": [record]}) == "store"
    (tmp_path / "memory.jsonl").write_text(json.dumps(record))
    assert read_store(tmp_path / "memory.jsonl").items == [record]


@pytest.mark.parametrize("nothing", [{"created_at": "2026-01-02"}, {"text": None}, " ", None])
def test_an_observation_without_a_text_is_left_out_and_counted(nothing):
    reading = read_all([row_with(entity("Rows", nothing, {"content": "Bakes"}, id="e7"))])
    [row] = reading.rows
    told = [(memory.text, memory.id) for memory in row.memories]
    assert told == [("Mia: Rows", "e7#1"), ("Mia: Bakes", "e7#3")]
    assert row.left_memories == {"no text": 1}
    tally = reading.account.tallies["memory"]
    assert (tally.found, tally.used) == (3, 2)


def test_an_entity_without_any_text_is_left_out_beside_other_memories():
    [row] = read_all([row_with(entity(" ", {}), "Rows")]).rows
    assert [memory.text for memory in row.memories] == ["Rows"]
    assert row.left_memories == {"no text": 2}
    [fault, _] = check_log_row(row_with(entity(" ", {})))
    assert fault.rule == "memory text"


@pytest.mark.parametrize("observation", [7, {"text": ["Rows"]}])
def test_an_observation_that_is_no_text_is_refused(observation):
    [fault] = check_log_row(row_with(entity("Bakes", observation)))
    assert fault.rule == "memory text" and fault.found.endswith(" in memory 1")


@pytest.mark.parametrize(
    ("fields", "day", "score"),
    [
        ({}, "2026-01-01", 0.5),
        ({"created_at": "2026-03-04", "score": 0}, "2026-03-04", 0),
        ({"timestamp": "2026-03-04"}, "2026-03-04", 0.5),
        ({"metadata": {"date": "2026-03-04"}}, "2026-03-04", 0.5),
    ],
)
def test_the_time_of_an_observation_is_before_that_of_its_entity(fields, day, score):
    whole = {"created_at": "2026-01-01", "score": 0.5}
    [row] = read_all([row_with(entity({"text": "Rows", **fields}, **whole))]).rows
    [memory] = row.memories
    assert (memory.created_at, memory.score) == (day, score)


def test_a_blank_memory_does_not_say_whether_the_prompt_has_its_record():
    assert _is_in(entity("Rows", ""), "Mia: Rows") and not _is_in(entity("", " "), "Mia: Rows")


def test_a_blank_memory_that_a_sweep_retrieves_is_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row_with("Swims")))
    plan = LogPlan(file=str(log), consent="x")
    found = retrieved_rows(str(log), plan, lambda query, k: [entity("Rows", {})], 3)
    [row] = read_all(found).rows
    assert "Mia: Rows" in [memory.text for memory in row.memories]
    assert row.left_memories == {"no text": 1}
