"""Files as their owners have them: each is read rightly or refused by its name with what would
help, and nothing is lost without a reason.
"""

import gzip
import io
import json
import struct
import zipfile
from contextlib import suppress
from copy import deepcopy
from random import Random

import pandas as pd
import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st

from memcalib.io.records import RATIO_ALLOWED, DataError, Violation
from memcalib.products.memory_logs.account import Account, Unbalanced
from memcalib.products.memory_logs.exports import day_of, read_actions
from memcalib.products.memory_logs.field_maps import read_all
from memcalib.products.memory_logs.files import file_values, structure_in
from memcalib.products.memory_logs.formats import read_log
from memcalib.products.memory_logs.messages import (
    conversation_rows,
    is_memory_search,
    read_message,
)
from memcalib.products.memory_logs.notes import mapping_lines, note_entries, system_memories
from memcalib.products.memory_logs.own_answers import LogPlan, own_answers


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def texts(row):
    return [memory.text for memory in row.memories]


def own(source, **plan):
    plan = {"file": str(source), "without_consent": True, **plan}
    return own_answers(LogPlan(**plan), answers_needed=False)


# conversations that go on after a tool

SYSTEM = {"role": "system", "content": "Relevant memories:\n- Moved to Hull in May"}
ASK = {"role": "user", "content": "Which train do I take to Leeds?"}
SAY = {"role": "assistant", "content": "Take the 7:05 from Hull."}
TALK = [ASK, SAY]
TOOL_FORMS = {
    "openai": (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "t", "function": {"name": "timetable", "arguments": '{"to": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t", "content": "7:05"},
    ),
    "older openai": (
        {"role": "assistant", "function_call": {"name": "timetable", "arguments": '{"to": 1}'}},
        {"role": "function", "name": "timetable", "content": "7:05"},
    ),
    "responses": (
        {"type": "function_call", "call_id": "t", "name": "timetable", "arguments": '{"to": 1}'},
        {"type": "function_call_output", "call_id": "t", "output": "7:05"},
    ),
    "anthropic": (
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "timetable", "input": {"to": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "7:05"}],
        },
    ),
    "langchain": (
        {
            "type": "ai",
            "content": "",
            "tool_calls": [{"id": "t", "name": "timetable", "args": {"to": 1}}],
        },
        {"type": "tool", "tool_call_id": "t", "content": "7:05"},
    ),
    "gemini": (
        {"role": "model", "parts": [{"functionCall": {"name": "timetable", "args": {"to": 1}}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "timetable", "response": {"at": "7:05"}}}],
        },
    ),
    "opentelemetry": (
        {
            "role": "assistant",
            "parts": [
                {"type": "tool_call", "id": "t", "name": "timetable", "arguments": {"to": 1}}
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t", "response": "7:05"}]},
    ),
}


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_a_conversation_that_goes_on_after_a_tool_is_a_row(tmp_path, form):
    call, result = TOOL_FORMS[form]
    talk = {"id": "c1", "messages": [SYSTEM, ASK, call, result, SAY]}
    reading = read_all(lines(tmp_path / "log.jsonl", talk))
    [row] = reading.rows
    assert (row.query, row.answer) == (ASK["content"], SAY["content"])
    assert texts(row) == ["Moved to Hull in May"]
    assert [str(action) for action in row.actions] == ['[action] timetable {"to": 1}']
    assert row.turns[-1].role == "tool" and "7:05" in row.turns[-1].content
    assert reading.account.to_dict()["turn"] == {"found": 5, "used": 5, "left": {}}


def test_what_gives_no_row_is_counted(tmp_path):
    talks = [
        {"id": "c1", "messages": [SYSTEM, ASK, SAY]},
        {"id": "c2", "messages": [SYSTEM, ASK]},
        {"id": "c3", "messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]},
        {"id": "c4", "messages": [SYSTEM, SAY]},
    ]
    account = read_all(lines(tmp_path / "log.jsonl", *talks)).account.check()
    told = account.to_dict()
    assert told["conversation"]["found"] == 4 and told["conversation"]["used"] == 1
    assert told["conversation"]["left"] == {
        "no answer to a user": 1,
        "no memories in it": 1,
        "no turn by a user": 1,
    }


def test_parts_of_a_content_and_pictures(tmp_path):
    question = [{"type": "text", "text": {"value": "Plan dinner."}}, {"type": "image_url"}]
    answer = [{"type": "text", "text": {"value": "Tofu curry."}}]
    talk = {"messages": [SYSTEM, {"role": "user", "content": question}]}
    talk["messages"].append({"role": "assistant", "content": answer})
    reading = read_all(lines(tmp_path / "log.jsonl", talk))
    assert (reading.rows[0].query, reading.rows[0].answer) == ("Plan dinner.", "Tofu curry.")
    assert reading.account.remarks["parts without a text (image_url)"] == 1


def test_a_conversation_of_ten_thousand_turns(tmp_path):
    talk = [SYSTEM]
    for number in range(5000):
        talk.append({"role": "user", "content": f"Question {number}?"})
        talk.append({"role": "assistant", "content": f"Answer {number}."})
    reading = read_all(lines(tmp_path / "log.jsonl", {"id": "c", "messages": talk}))
    assert len(reading.rows) == 5000 and len(reading.rows[-1].turns) == 100
    assert reading.rows[-1].turns[-1].content == "Answer 4998."
    assert reading.account.tallies["turn"].used == 10_001


SPOKEN = st.sampled_from(["user", "assistant", "tool", "system", "critic"])
SAID = st.sampled_from(["", "Hello.", "Memories:\n- Is vegan", "<memory>Rows</memory>", "Tea?"])


@given(st.lists(st.tuples(SPOKEN, SAID), max_size=12), st.booleans())
def test_the_account_of_any_conversation_balances(turns, with_memory):
    account = Account()
    messages = [read_message({"role": role, "content": text}) for role, text in turns]
    standing = [{"text": "Is vegan"}] if with_memory else []
    rows = list(conversation_rows(messages, account, "c", {}, standing))
    account.check()
    assert account.tallies["turn"].found == len(turns)
    assert bool(rows) == bool(account.tallies["conversation"].used)
    answers = [i for i, (role, text) in enumerate(turns) if role == "assistant" and text]
    users = [
        i for i, (role, text) in enumerate(turns) if role == "user" and text.startswith(("H", "T"))
    ]
    if with_memory and users and any(i > users[0] for i in answers):
        assert rows  # whatever stands between


# actions


def test_actions_are_part_of_the_answer_and_redacted_like_text(tmp_path):
    call = {
        "role": "assistant",
        "content": "Booked.",
        "tool_calls": [
            {"function": {"name": "book", "arguments": '{"mail": "ana@example.org"}'}},
            {"function": {"name": "pay", "arguments": "amount=5; mail=ana@example.org"}},
        ],
    }
    answers = own(lines(tmp_path / "log.jsonl", {"id": "c", "messages": [SYSTEM, ASK, call]}))
    [rollout] = answers.rollouts
    assert rollout.response == (
        'Booked.\n\n[action] book {"mail": "[e-mail 1]"}\n[action] pay amount=5; mail=[e-mail 1]'
    )
    remarks = answers.reading.account.remarks
    assert remarks["actions, which are part of the answers"] == 2
    assert remarks["actions whose arguments are not JSON, kept as text"] == 1


def test_an_answer_of_actions_alone_is_an_answer(tmp_path):
    row = {
        "query": "Install it.",
        "memories": ["Use pnpm."],
        "tool_calls": [{"name": "Bash", "args": {"c": "npm i"}}],
    }
    [rollout] = own(lines(tmp_path / "log.jsonl", row)).rollouts
    assert rollout.response == '[action] Bash {"c": "npm i"}'
    assert read_actions([{"id": "x"}, "y"]) == []


# one record, several memories


def test_one_record_may_hold_several_memories(tmp_path):
    block = {"label": "human", "value": "Name: Ana\n- Is vegan\n", "limit": 5000}
    entity = {"name": "Ana", "entityType": "person", "observations": ["Rows", "Bakes"]}
    row = {"query": "?", "memories": [block, entity, "Likes tea"], "answer": "!"}
    reading = read_all(lines(tmp_path / "log.jsonl", row))
    expected = ["Name: Ana", "Is vegan", "Ana: Rows", "Ana: Bakes", "Likes tea"]
    assert texts(reading.rows[0]) == expected
    assert reading.account.tallies["memory"].found == 5


# which field is what


def test_a_gold_answer_is_named_and_not_judged(tmp_path):
    rows = [
        {
            "question": "When did Ana join?",
            "answer": "7 May",
            "response": "I do not know.",
            "memories": ["x y"],
        },
        {
            "question": "When did Bo paint?",
            "answer": 2022,
            "response": "Not in there.",
            "memories": ["x z"],
        },
    ]
    reading = read_all(lines(tmp_path / "log.jsonl", *rows))
    assert [row.answer for row in reading.rows] == ["I do not know.", "Not in there."]
    told = reading.text()
    assert "answer: read from response (guessed)" in told
    assert "answer: the field answer also contains text, which differs in 2 rows" in told
    mapped = read_all(tmp_path / "log.jsonl", field_map={"answer": "answer"})
    assert [row.answer for row in mapped.rows] == ["7 May", "2022"]


def test_where_each_role_was_read_from_is_always_said(tmp_path):
    row = {"query": "?", "results": [{"memory": "Rows"}], "answer": "!", "model": "m"}
    told = read_all(lines(tmp_path / "log.jsonl", row)).text()
    for line in (
        "query: read from query (its plain name)",
        "memories: read from results (as a memory system returns them)",
        "answer: read from answer (its plain name)",
        "model: read from model (its plain name)",
    ):
        assert line in told
    without = read_all(lines(tmp_path / "b.jsonl", {"query": "?", "memories": ["Rows"]})).text()
    assert "answer: not found in any field" in without


def test_other_words_for_thoughts(tmp_path):
    rows = [
        {"query": "?", "memories": ["Rows"], "answer": "<think>\nRows?\n</think>\n\nA cake."},
        {
            "query": "!",
            "memories": ["Rows"],
            "answer": "The user rows.\n</think>\n\nTake the 7:05.",
        },
    ]
    reading = read_all(lines(tmp_path / "log.jsonl", *rows))
    assert [row.answer for row in reading.rows] == ["A cake.", "Take the 7:05."]
    assert reading.account.remarks["answers from which reasoning was removed"] == 2


# cells, times, numbers, ids


@pytest.mark.parametrize(
    "cell",
    [
        str([{"text": "Is allergic"}, {"text": "Plays chess"}]),
        json.dumps([{"text": "Is allergic"}, {"text": "Plays chess"}]),
        "[{'text': 'Is allergic'}\n {'text': 'Plays chess'}]",
        "['Is allergic' 'Plays chess']",
        "['Is allergic'\n 'Plays chess']",
        "[{'text': 'Is allergic', 'score': nan}, {'text': 'Plays chess', 'score': 0.5}]",
        "({'text': 'Is allergic'}, {'text': 'Plays chess'})",
    ],
)
def test_a_list_in_a_cell_is_as_many_memories(tmp_path, cell):
    frame = pd.DataFrame([{"query": "What?", "memories": cell, "answer": "A cake."}])
    frame.to_csv(tmp_path / "log.csv", index=False)
    [row] = read_all(tmp_path / "log.csv").rows
    assert texts(row) == ["Is allergic", "Plays chess"]


@pytest.mark.parametrize(
    "cell", ["[{'text': 'Is allergic'}, ...]", "[<Memory object at 0x7>]", "[{'text': 'Is"]
)
def test_a_list_in_a_cell_that_cannot_be_read_whole_is_a_loss(tmp_path, cell):
    good = {"query": "What?", "memories": "Rows", "answer": "Yes."}
    pd.DataFrame([good, {**good, "memories": cell}]).to_csv(tmp_path / "log.csv", index=False)
    reading = read_all(tmp_path / "log.csv")
    assert len(reading.rows) == 1 and reading.dropped[0].rule == "memories"
    assert "cannot be read" in reading.dropped[0].found


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(
    st.lists(
        TEXT | st.none() | st.booleans() | st.integers() | st.dictionaries(TEXT, TEXT, max_size=2)
    )
)
def test_what_python_prints_is_read_back(values):
    assert structure_in(repr(values)) == values
    assert structure_in(json.dumps(values)) == values
    joined = "[" + "\n ".join(map(repr, values)) + "]"  # as numpy prints it
    assert structure_in(joined) == values


@pytest.mark.parametrize("name", ["created_at", "createdAt", "timestamp", "date"])
@pytest.mark.parametrize("text", ["text", "memory", "content"])
def test_a_memory_with_a_time_keeps_both(tmp_path, text, name):
    memories = [
        {text: "Lives in Graz", name: "2025-08-15T17:10:40", "score": 0.7},
        {text: "Climbs"},
    ]
    [row] = read_all(lines(tmp_path / "log.jsonl", {"query": "?", "memories": memories})).rows
    assert texts(row) == ["Lives in Graz", "Climbs"]
    assert [memory.created_at for memory in row.memories] == ["2025-08-15", ""]


def test_a_row_with_a_time_is_no_memory(tmp_path):
    row = {
        "trace_id": "t1",
        "timestamp": "2026-09-09T17:54:11",
        "query": "Where can I climb?",
        "retrieved_chunks": [{"id": "m1", "text": "Lives in Graz", "score": 0.7}],
        "llm_response": "Near Graz.",
    }
    [read] = read_all(lines(tmp_path / "log.jsonl", row)).rows
    assert (texts(read), read.answer, read.id) == (["Lives in Graz"], "Near Graz.", "t1")
    other = {
        "trace_id": "t1",
        "timestamp": "2026-09-09T17:54:11",
        "said": "Where to?",
        "note": "Graz",
    }
    with pytest.raises(
        DataError, match="no query in rows with the fields trace_id, timestamp, said"
    ):
        read_all(lines(tmp_path / "other.jsonl", other))


def test_an_id_that_is_not_in_the_store_costs_no_row(tmp_path):
    (tmp_path / "store.json").write_text(
        json.dumps({"results": [{"id": "a1", "memory": "Is vegan"}]})
    )
    rows = [
        {"query": "What?", "memory_ids": ["a1", "deleted-7"], "answer": "Tofu."},
        {"query": "Else?", "memory_ids": ["gone"], "answer": "Bread."},
    ]
    reading = read_all(lines(tmp_path / "log.jsonl", *rows), tmp_path / "store.json")
    [row] = reading.rows
    assert texts(row) == ["Is vegan"] and reading.dropped[0].rule == "id not in the store"
    assert reading.account.to_dict()["memory"]["left"] == {
        "its id is not in the store": 1,
        "its row is left out (id not in the store)": 1,
    }


def test_numbers_of_pandas(tmp_path):
    text = (
        '{"id": 1.0, "query": "Dinner", "memories": [{"text": "Is vegan"}], "answer": "Tofu"}\n'
        '{"id": 2, "query": "Lunch", "memories": [{"text": "Is vegan", "score": NaN}]}\n'
        '{"id": 3, "query": "Tea", "memories": [{"text": "Vegan", "level": 2, "action": "ADD"}]}\n'
    )
    (tmp_path / "log.jsonl").write_text(text)
    rows = read_all(tmp_path / "log.jsonl").rows
    assert [row.id for row in rows] == ["1", "2", "3"] and rows[1].memories[0].score is None
    assert rows[2].memories[0].level is None and rows[2].memories[0].action == ""
    mapped = read_all(tmp_path / "log.jsonl", field_map={"level": "level"}).rows
    assert mapped[2].memories[0].level.label == "Control"


# bytes


@pytest.mark.parametrize("name", ["log.jsonl.gz", "log.csv.gz", "log.zip"])
def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path, name):
    path = tmp_path / name
    cell = "x" * 60_000_000
    if name == "log.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("log.jsonl", cell)
    else:
        row = json.dumps({"query": cell}) if name == "log.jsonl.gz" else f"query\n{cell}"
        path.write_bytes(gzip.compress(f"{row}\n".encode()))
    found = [value for _, value in file_values(path)]
    assert [(fault.rule, fault.allowed) for fault in found] == [
        ("zip" if name == "log.zip" else "gzip", RATIO_ALLOWED)
    ]


@pytest.mark.parametrize("name", ["log.jsonl.gz", "log.zip", "log.parquet"])
def test_of_a_file_that_is_far_larger_no_row_is_read(tmp_path, name):
    """The first rows alone would be allowed."""
    rows = [{"query": f"q{n}", "memories": ["a"], "answer": "x" * 400_000} for n in range(100)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path = tmp_path / name
    if name == "log.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.writestr("a.jsonl", json.dumps(rows[0]))
            archive.writestr("b.jsonl.gz", gzip.compress(text.encode()))
    elif name == "log.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match="allowed: at most 500 times as many") as refused:
        next(read_log(path))
    assert len(refused.value.violations) == 1


def test_a_gzip_file_that_is_cut_off_is_read_to_its_end(tmp_path):
    rows = [f'{{"query": "q{n}", "memories": ["{n * n}"]}}\n' for n in range(20_000)]
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress("".join(rows).encode())[:-2000])
    found = [value for _, value in file_values(path)]
    assert len(found) > 1000 and [f for f in found if isinstance(f, Violation)] == [found[-1]]
    assert found[-1].allowed == "a complete gzip file"


def test_the_files_of_an_archive_count_together(tmp_path):
    row = json.dumps({"query": "a", "memories": ["b"], "answer": "c"}) + " " * 9_900_000 + "\n"
    path = tmp_path / "log.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number in range(5):
            archive.writestr(f"log{number}.jsonl", row)
    found = [value for _, value in file_values(path)]
    assert [fault.allowed for fault in found] == [RATIO_ALLOWED]


def test_a_gzip_file_in_an_archive_counts_by_its_size_in_the_archive(tmp_path):
    """Each of the two alone stays below the limit."""
    row = b'{"query": "a"}' + b" " * (2**20 - 15) + b"\n"
    inner = io.BytesIO()
    with gzip.GzipFile(fileobj=inner, mode="wb", compresslevel=1, mtime=0) as file:
        for _ in range(60):
            file.write(row)
    path = tmp_path / "log.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("log.jsonl.gz", inner.getvalue())
    assert 60 * len(row) < 500 * len(inner.getvalue()) and path.stat().st_size < 20_000
    found = [value for _, value in file_values(path)]
    assert [fault.allowed for fault in found] == [RATIO_ALLOWED]


def test_gzip_files_of_an_archive_count_together(tmp_path):
    """Each of them stays below the 10 MB that are free."""
    row = json.dumps({"query": "q", "memories": ["a"], "answer": "x" + " " * 4_000_000})
    path = tmp_path / "log.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number in range(12):
            archive.writestr(f"l{number:02}.jsonl.gz", gzip.compress(f"{row}\n".encode(), 9))
    found = [value for _, value in file_values(path)]
    assert [fault.allowed for fault in found] == [RATIO_ALLOWED]


def test_an_archive_that_lists_a_file_twice_is_refused(tmp_path):
    """Its rows would be read twice, and a small archive could become any number of rows."""
    path = tmp_path / "log.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("l.jsonl", '{"query": "q", "memories": ["a"], "answer": "x"}\n')
        start = archive.start_dir
    packed = path.read_bytes()
    entry, end = packed[start:-22], packed[-22:]
    sizes = struct.pack("<HHII", 40, 40, 40 * len(entry), start)
    path.write_bytes(packed[:start] + 40 * entry + end[:8] + sizes + end[20:])
    with pytest.raises(DataError, match="'l.jsonl', which the archive lists 40 times"):
        [*file_values(path)]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".jsonl.gz", ".af"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "utf-16-le", "utf-32"]
)
def test_one_rule_for_bytes_in_every_suffix(tmp_path, suffix, encoding):
    row = {"query": "Büro?", "memories": ["Für Ana"], "answer": "Ja."}
    text = json.dumps(row, ensure_ascii=False) + "\n"
    if suffix == ".csv":
        text = "query,memories,answer\nBüro?,Für Ana,Ja.\n"
    data = text.encode(encoding)
    path = tmp_path / f"log{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    if encoding in ("utf-8", "utf-8-sig", "utf-16"):
        [read] = read_all(path).rows
        assert (read.query, texts(read)) == ("Büro?", ["Für Ana"])
        return
    with pytest.raises(DataError, match="encoding") as error:
        read_all(path)
    assert path.name in str(error.value) and "UTF-8" in str(error.value)
    if encoding == "cp1252":
        assert "byte 0xfc" in str(error.value) and "iconv" in str(error.value)


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE")]
)
def test_two_bytes_without_a_mark_get_the_command_that_converts_them(tmp_path, encoding, name):
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps({"query": "Q?"}).encode(encoding))
    with pytest.raises(DataError, match=f"without a byte order mark.*iconv -f {name} -t UTF-8"):
        read_all(path)


def test_json_in_a_text_and_arrays_in_lines(tmp_path):
    row = {"query": "?", "memories": ["Rows"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(json.dumps(row)) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps([row, {**row, "query": "!"}]) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps(row, indent=2) + "\n")
    (tmp_path / "d.json").write_text(json.dumps({"data": [row, row], "next": None}))
    assert [
        len(read_all(tmp_path / f"{name}").rows)
        for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.json")
    ] == [1, 2, 1, 2]


def test_an_array_is_streamed_and_a_cut_one_says_so(tmp_path):
    rows = [
        {"id": str(i), "query": f"Question {i}?", "memories": ["word " * 300]} for i in range(2000)
    ]
    text = json.dumps(rows)
    (tmp_path / "log.json").write_text(text)
    assert len(read_all(tmp_path / "log.json").rows) == 2000
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    reading = read_all(tmp_path / "cut.json")
    assert 900 < len(reading.rows) < 1100 and reading.dropped[-1].rule == "json"
    assert reading.account.to_dict()["record"]["left"] == {"cannot be read (json)": 1}


def test_two_formats_in_one_file(tmp_path):
    agent = {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "Hello"}}
    records = [
        {"id": "c", "messages": [SYSTEM, ASK, SAY]},
        {"query": "?", "memories": ["Rows"], "answer": "!"},
        agent,
    ]
    reading = read_all(lines(tmp_path / "log.jsonl", *records))
    assert [row.query for row in reading.rows] == [ASK["content"], "?"]
    told = reading.account.to_dict()
    assert told["record"]["left"] == {"its conversation or trace gave no row": 1}


def test_only_a_balanced_account_passes():
    account = Account()
    account.find("row")
    with pytest.raises(Unbalanced, match="rows: 1 found, 0 used"):
        account.check()
    account.use("row")
    with pytest.raises(Unbalanced, match="rows: 1 used, and 0 are there"):
        account.check({"row": 0})


# formats

LOCOMO = {
    "sample_id": "talk",
    "conversation": {
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [{"speaker": "Ana", "dia_id": "D1:1", "text": "I joined yesterday."}],
    },
    "observation": {"session_1_observation": {"Ana": [["Ana joined a group.", "D1:1"]]}},
    "qa": [{"question": "When?", "answer": "7 May", "prediction": "In May."}],
}
LONGMEMEVAL = {
    "question_id": "q1",
    "question": "Where do I live?",
    "answer": "Graz",
    "haystack_dates": ["2023/05/20 (Sat) 02:21"],
    "haystack_session_ids": ["s1"],
    "haystack_sessions": [
        [{"role": "user", "content": "I moved to Graz."}, {"role": "assistant", "content": "Nice."}]
    ],
    "hypothesis": "In Graz.",
}
LETTA_MESSAGES = [
    {
        "message_type": "assistant_message",
        "id": "m3",
        "date": "2026-01-02T10:00:03Z",
        "content": "Tofu.",
    },
    {
        "message_type": "reasoning_message",
        "id": "m2",
        "date": "2026-01-02T10:00:02Z",
        "reasoning": "Vegan?",
    },
    {
        "message_type": "user_message",
        "id": "m1",
        "date": "2026-01-02T10:00:01Z",
        "content": "Dinner?",
    },
    {
        "message_type": "system_message",
        "id": "m0",
        "date": "2026-01-02T10:00:00Z",
        "content": "<memory_blocks>\n<human>\n<value>\nIs vegan\n</value></human></memory_blocks>",
    },
]
CLAUDE = {
    "uuid": "c1",
    "name": "Dinner",
    "chat_messages": [
        {
            "uuid": "a",
            "sender": "human",
            "text": "Dinner?",
            "content": [{"type": "text", "text": "Dinner?"}],
        },
        {"uuid": "b", "sender": "assistant", "text": "Tofu.", "attachments": [{"file_name": "x"}]},
    ],
}
THREAD = [
    {
        "object": "thread.message",
        "thread_id": "t",
        "role": "assistant",
        "created_at": 3,
        "content": [{"type": "text", "text": {"value": "Tofu."}}],
    },
    {
        "object": "thread.message",
        "thread_id": "t",
        "role": "user",
        "created_at": 2,
        "content": [{"type": "text", "text": {"value": "Dinner?"}}],
    },
    {
        "object": "thread.run",
        "thread_id": "t",
        "created_at": 1,
        "instructions": "Memories:\n- Is vegan",
    },
]
CODEX = [
    {"type": "session_meta", "payload": {"id": "s1"}},
    {
        "type": "response_item",
        "payload": {
            "type": "message",
            "role": "user",
            "content": [
                {
                    "type": "input_text",
                    "text": "# AGENTS.md\n\n<INSTRUCTIONS>\n- Is vegan\n</INSTRUCTIONS>",
                }
            ],
        },
    },
    {
        "type": "response_item",
        "payload": {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Dinner?"}],
        },
    },
    {"type": "response_item", "payload": {"type": "reasoning", "summary": []}},
    {
        "type": "response_item",
        "payload": {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Tofu."}],
        },
    },
]
OPENCLAW = [
    {"type": "session", "id": "s1", "cwd": "/home/ana", "version": 3},
    {
        "type": "message",
        "id": "1",
        "parentId": None,
        "message": {"role": "user", "content": [{"type": "text", "text": "Dinner?"}]},
    },
    {
        "type": "message",
        "id": "2",
        "parentId": "1",
        "message": {
            "role": "assistant",
            "content": [
                {
                    "type": "toolCall",
                    "id": "t",
                    "name": "memory_search",
                    "arguments": {"query": "food"},
                }
            ],
        },
    },
    {
        "type": "message",
        "id": "3",
        "parentId": "2",
        "message": {
            "role": "toolResult",
            "toolCallId": "t",
            "toolName": "memory_search",
            "content": [
                {"type": "text", "text": '{"results": [{"text": "Is vegan", "path": "MEMORY.md"}]}'}
            ],
        },
    },
    {
        "type": "message",
        "id": "4",
        "parentId": "3",
        "message": {"role": "assistant", "content": [{"type": "text", "text": "Tofu."}]},
    },
]
LANGSMITH = [
    {
        "id": "r1",
        "trace_id": "r1",
        "run_type": "chain",
        "inputs": {"question": "Dinner?"},
        "outputs": {"answer": "Tofu."},
        "start_time": "2026-01-01T00:00:00",
    },
    {
        "id": "r2",
        "trace_id": "r1",
        "parent_run_id": "r1",
        "run_type": "retriever",
        "inputs": {"query": "food"},
        "outputs": {"documents": [{"page_content": "Is vegan", "metadata": {}}]},
        "start_time": "2026-01-01T00:00:01",
    },
]
LANGFUSE = [
    {
        "id": "o1",
        "traceId": "t",
        "type": "SPAN",
        "name": "chat",
        "startTime": "1",
        "input": {"query": "Dinner?"},
        "output": "Tofu.",
    },
    {
        "id": "o2",
        "traceId": "t",
        "parentObservationId": "o1",
        "type": "RETRIEVER",
        "startTime": "2",
        "input": "food",
        "output": [{"memory": "Is vegan", "id": "m"}],
    },
]
SPANS = [
    {
        "context": {"trace_id": "t", "span_id": "a"},
        "parent_id": None,
        "span_kind": "CHAIN",
        "start_time": "1",
        "attributes": {"input": {"value": "Dinner?"}, "output": {"value": "Tofu."}},
    },
    {
        "context": {"trace_id": "t", "span_id": "b"},
        "parent_id": "a",
        "span_kind": "RETRIEVER",
        "start_time": "2",
        "attributes": {"retrieval": {"documents": [{"document": {"content": "Is vegan"}}]}},
    },
]
RESULTS = {
    "user_0": [
        {
            "question": "Dinner?",
            "answer": "Seitan",
            "response": "Tofu.",
            "speaker_1_memories": [{"memory": "Is vegan", "timestamp": "8 May 2023"}],
        }
    ]
}
HELD = {
    "locomo": ([LOCOMO], "When?", "In May.", ["Ana joined a group."]),
    "longmemeval": ([LONGMEMEVAL], "Where do I live?", "In Graz.", ["I moved to Graz."]),
    "letta messages": (LETTA_MESSAGES, "Dinner?", "Tofu.", ["Is vegan"]),
    "assistants thread": (THREAD, "Dinner?", "Tofu.", ["Is vegan"]),
    "codex session": (CODEX, "Dinner?", "Tofu.", ["Is vegan"]),
    "session of a coding agent": (OPENCLAW, "Dinner?", "Tofu.", ["Is vegan"]),
    "langsmith": (LANGSMITH, "Dinner?", "Tofu.", ["Is vegan"]),
    "langfuse": (LANGFUSE, "Dinner?", "Tofu.", ["Is vegan"]),
    "spans": (SPANS, "Dinner?", "Tofu.", ["Is vegan"]),
    "results of an evaluation": ([RESULTS], "Dinner?", "Tofu.", ["Is vegan"]),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_formats_that_people_have(tmp_path, name, suffix):
    records, query, answer, memories = HELD[name]
    path = tmp_path / f"log{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        lines(path, *records)
    reading = read_all(path)
    [row] = reading.rows
    assert (row.query, row.answer, texts(row)) == (query, answer, memories)
    assert set(reading.source.record_counts) == {name}
    assert reading.account.tallies["record"].used >= 1
    assert f"({name})" in reading.text()


REFUSED = {
    "chatgpt": (
        {
            "mapping": {
                "a": {
                    "id": "a",
                    "parent": None,
                    "message": {"author": {"role": "user"}, "content": {"parts": ["Hi"]}},
                }
            },
            "current_node": "a",
        },
        "Manage",
    ),
    "claude": (CLAUDE, "memories.json"),
    "session of a coding agent": (
        {
            "type": "user",
            "sessionId": "s",
            "uuid": "u",
            "message": {"role": "user", "content": "Hi"},
        },
        "CLAUDE.md",
    ),
    "langfuse": (
        {"id": "t", "input": "Dinner?", "output": "Tofu.", "observations": []},
        "RETRIEVER",
    ),
    "langsmith": (LANGSMITH[0], "child_runs"),
    "spans": (SPANS[0], "gen_ai.memory.records"),
    "history of mem0": (
        {"id": "1", "memory_id": "m", "old_memory": None, "new_memory": "Rows", "event": "ADD"},
        "memory.search",
    ),
    "conversation": ({"messages": [ASK, SAY]}, "--store"),
    "personamem": (
        {
            "persona_id": 0,
            "question_id": "q",
            "user_question_or_message": "?",
            "correct_answer": "(a)",
        },
        "shared_contexts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_without_a_row_is_refused_by_name_with_what_helps(tmp_path, name):
    record, help_ = REFUSED[name]
    with pytest.raises(DataError) as error:
        read_all(lines(tmp_path / "log.jsonl", record))
    assert name in str(error.value) and help_ in str(error.value)


def test_results_without_memories_say_what_helps(tmp_path):
    path = lines(tmp_path / "log.jsonl", {"user_0": [{"question": "When?", "answer": "7 May"}]})
    with pytest.raises(DataError, match="the results contain no memories"):
        own(path)


@pytest.mark.parametrize("name", ["claude", "session", "conversation"])
def test_a_store_is_what_stood_before_every_answer(tmp_path, name):
    (tmp_path / "CLAUDE.md").write_text("# Rules\n- Is vegan\n- Use pnpm, never npm.\n")
    talk = {
        "claude": [CLAUDE],
        "session": [OPENCLAW[1], {**OPENCLAW[4], "parentId": "1"}],
        "conversation": [
            {
                "messages": [
                    {"role": "user", "content": "Dinner?"},
                    {"role": "assistant", "content": "Tofu."},
                ]
            }
        ],
    }[name]
    [row] = read_all(lines(tmp_path / "log.jsonl", *talk), tmp_path / "CLAUDE.md").rows
    assert (row.query, row.answer) == ("Dinner?", "Tofu.")
    assert texts(row) == ["Is vegan", "Use pnpm, never npm."]


def test_the_archive_of_claude_with_its_memories(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("conversations.json", json.dumps([CLAUDE]))
        archive.writestr(
            "memories.json", json.dumps([{"conversations_memory": "**Food**\n\nIs vegan."}])
        )
        archive.writestr(
            "users.json", json.dumps([{"uuid": "u", "email_address": "ana@example.org"}])
        )
    reading = read_all(tmp_path / "data.zip")
    [row] = reading.rows
    assert row.answer == "Tofu." and "Is vegan." in texts(row)
    assert reading.account.remarks["parts without a text (attachment)"] == 1


def test_stores_of_an_mcp_server_and_of_langgraph(tmp_path):
    graph = [
        {
            "type": "entity",
            "name": "Ana",
            "entityType": "person",
            "observations": ["Is vegan", "Rows"],
        },
        {"type": "relation", "from": "Ana", "to": "Graz", "relationType": "lives_in"},
    ]
    lines(tmp_path / "memory.json", *graph)
    talk = {"messages": [ASK, SAY]}
    [row] = read_all(lines(tmp_path / "log.jsonl", talk), tmp_path / "memory.json").rows
    assert texts(row) == ["Ana: Is vegan", "Ana: Rows", "Ana lives in Graz"]
    with pytest.raises(DataError, match="memories without queries"):
        read_all(tmp_path / "memory.json")
    item = {"namespace": ["m"], "key": "k", "value": {"content": "Is vegan"}}
    lines(tmp_path / "store.jsonl", item)
    [row] = read_all(tmp_path / "log.jsonl", tmp_path / "store.jsonl").rows
    assert texts(row) == ["Is vegan"]


def test_a_folder_of_sessions(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("a", "b"):
        lines(folder / f"{name}.jsonl", *({**line, "sessionId": name} for line in OPENCLAW))
    reading = read_all(folder)
    assert len(reading.rows) == 2


# further forms of files that people have


def test_the_state_of_a_thread_of_langgraph(tmp_path):
    call = {"name": "set_theme", "args": {"theme": "dark"}, "id": "t", "type": "tool_call"}
    state = {
        "values": {
            "messages": [
                {"type": "human", "content": "Which theme?"},
                {"type": "ai", "content": "", "tool_calls": [call]},
                {"type": "tool", "content": "ok", "tool_call_id": "t"},
                {"type": "ai", "content": "Dark."},
            ]
        },
        "next": [],
        "metadata": {"thread_id": "th1"},
    }
    (tmp_path / "thread.json").write_text(json.dumps(state))
    lines(tmp_path / "store.jsonl", {"namespace": ["m"], "key": "k", "value": {"content": "Dark"}})
    [row] = read_all(tmp_path / "thread.json", tmp_path / "store.jsonl").rows
    assert (row.query, row.answer, texts(row)) == ("Which theme?", "Dark.", ["Dark"])
    assert [action.tool for action in row.actions] == ["set_theme"]


def test_entities_and_relations_of_one_search_are_both_read(tmp_path):
    found = {
        "entities": [{"name": "Kim", "entityType": "person", "observations": ["Rows", "Bakes"]}],
        "relations": [{"from": "Kim", "to": "Acme", "relationType": "works_at"}],
    }
    call = {"id": "x", "type": "function", "function": {"name": "search_nodes", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "Is Kim free?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": json.dumps(found)},
        {"role": "assistant", "content": "No."},
    ]
    [row] = read_all(lines(tmp_path / "log.jsonl", {"messages": talk})).rows
    assert texts(row) == ["Kim: Rows", "Kim: Bakes", "Kim works at Acme"]


def test_pages_of_an_interface_in_one_file(tmp_path):
    dump = {
        "messages": {"object": "list", "data": THREAD[:2], "has_more": False},
        "runs": {"object": "list", "data": THREAD[2:]},
    }
    (tmp_path / "thread.json").write_text(json.dumps(dump))
    [row] = read_all(tmp_path / "thread.json").rows
    assert (row.query, row.answer, texts(row)) == ("Dinner?", "Tofu.", ["Is vegan"])


def test_contexts_of_personamem_are_a_store_by_context_and_place(tmp_path):
    talk = [
        {"role": "system", "content": "Persona: Kai."},
        {"role": "user", "content": "I loved The Remains of the Day."},
        {"role": "assistant", "content": "A fine book."},
        {"role": "user", "content": "Later."},
    ]
    other = [{"role": "user", "content": "I hate books."}]
    lines(tmp_path / "contexts.jsonl", {"c1": talk}, {"c2": other})
    question = {
        "persona_id": 0,
        "question_id": "q",
        "user_question_or_message": "Any book?",
        "correct_answer": "(c)",
        "shared_context_id": "c1",
        "end_index_in_shared_context": 3,
        "response": "A novel.",
    }
    reading = read_all(lines(tmp_path / "log.jsonl", question), tmp_path / "contexts.jsonl")
    [row] = reading.rows
    assert texts(row) == ["Persona: Kai.", "I loved The Remains of the Day."]
    told = "turns of the assistant in the contexts, which are not memories"
    assert reading.account.remarks[told] == 1


def test_headings_of_what_claude_remembers_are_no_memories(tmp_path):
    remembered = {"conversations_memory": "**Work context**\n\nDraws.\n\n**Home**\n\nTwo dogs."}
    lines(tmp_path / "memories.jsonl", remembered)
    [row] = read_all(lines(tmp_path / "log.jsonl", CLAUDE), tmp_path / "memories.jsonl").rows
    assert texts(row) == ["Draws.", "Two dogs."]


def test_a_request_and_a_reply_of_the_responses_interface(tmp_path):
    row = {
        "request": {
            "instructions": "<memories>\n- Never meets before 10\n</memories>",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "A call?"}]}],
        },
        "response": {
            "output": [
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "f", "name": "book", "arguments": '{"at": 9}'},
                {"type": "web_search_call", "id": "w"},
                {"type": "compaction", "id": "c"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Done."}],
                },
            ]
        },
    }
    reading = read_all(lines(tmp_path / "log.jsonl", row))
    [row] = reading.rows
    assert (row.query, texts(row)) == ("A call?", ["Never meets before 10"])
    assert row.response == 'Done.\n\n[action] book {"at": 9}\n[action] web_search'
    assert (
        reading.account.tallies["turn"].left["in an unknown format (known: a role and content)"]
        == 1
    )


@pytest.mark.parametrize(
    ("command", "result", "memories", "actions"),
    [
        (
            "view",
            "Here's the content of /memories/a.md with line numbers:\n     1\tSigns J.\n"
            "     2\tRows",
            ["Signs J.", "Rows"],
            0,
        ),
        ("create", "File created successfully", [], 1),
    ],
)
def test_the_memory_tool_of_claude(tmp_path, command, result, memories, actions):
    use = {"type": "tool_use", "id": "t", "name": "memory", "input": {"command": command}}
    talk = {
        "system": "<memories>\n- Is vegan\n</memories>",
        "messages": [
            {"role": "user", "content": "Draft it"},
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
        ],
    }
    [row] = read_all(lines(tmp_path / "log.jsonl", talk)).rows
    assert texts(row) == ["Is vegan", *memories] and len(row.actions) == actions


def test_a_map_reaches_into_the_list_around_the_rows(tmp_path):
    rows = [{"request": {"text": "When?"}, "recall": [{"body": "In May"}], "reply": "May."}]
    (tmp_path / "log.json").write_text(json.dumps({"page": 1, "stuff": rows}))
    places = {"query": "request.text", "memories": "recall", "text": "body"}
    [row] = read_all(tmp_path / "log.json", field_map=places).rows
    assert (row.query, row.answer, texts(row)) == ("When?", "May.", ["In May"])


def test_a_table_of_excel_with_a_list_that_numpy_printed(tmp_path):
    table = "Frage;retrieved_memories;Antwort\r\nWas?;\"['Kein Fleisch' 'Mag Kürbis']\";Suppe.\r\n"
    (tmp_path / "log.csv").write_bytes(table.encode("utf-8-sig"))
    [row] = read_all(tmp_path / "log.csv", field_map={"query": "Frage", "answer": "Antwort"}).rows
    assert texts(row) == ["Kein Fleisch", "Mag Kürbis"] and row.answer == "Suppe."


@pytest.mark.parametrize(
    ("time", "day"),
    [
        ("1:56 pm on 8 May, 2023", "2023-05-08"),
        ("2023/05/20 (Sat) 02:21", "2023-05-20"),
        ("8 May 2023", "2023-05-08"),
        ("Sep 3, 2024", "2024-09-03"),
        ("September 13 2024, 10:05", "2024-09-13"),
    ],
)
def test_times_with_the_month_in_letters(time, day):
    assert day_of(time) == day


@pytest.mark.parametrize("time", ["8 Smarch, 2023", "31 June 2023", "2023/13/01", "May"])
def test_times_that_are_no_day(time):
    with pytest.raises(ValueError):
        day_of(time)


# in the terminal


def test_the_recipe_of_an_unknown_file_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = {
        "talks": [
            {
                "asked": "When did Ana join?",
                "said": "On 7 May.",
                "notes": [{"fact_": "Ana joined."}],
            }
        ]
        * 2
    }
    (tmp_path / "log.json").write_text(json.dumps(whole))
    code, output, _ = run(capsys, "logs", "log.json", "--lines")
    assert code == 0 and "json.load(log)" in output and "# a guess" in output
    exec(compile(output, "recipe", "exec"), {})
    assert [row.query for row in read_all(tmp_path / "plain.jsonl").rows] == [
        "When did Ana join?"
    ] * 2
    assert "record['ANSWER']" in mapping_lines({"memories": ["a"]})


def test_the_preview_has_the_account_and_keeps_only_what_it_shows(tmp_path, capsys):
    rows = [
        {"id": str(i), "query": f"Question {i}?", "memories": ["Rows"], "answer": "!"}
        for i in range(50)
    ]
    rows.append({"query": "No memory", "memories": []})
    path = lines(tmp_path / "log.jsonl", *rows)
    code, output, _ = run(capsys, "logs", path, "--rows", "2")
    assert code == 0 and "rows: 51 found, 50 used, 1 not (no memories: 1)" in output
    assert "50 answers to 50 questions can be judged" in output
    shown = own_answers(LogPlan(file=str(path), without_consent=True), shown=2)
    assert len(shown.examples) == 2 and len(shown.rollouts) == 2 and shown.answer_count == 50


def test_what_a_limit_leaves_out_is_in_the_account(tmp_path):
    rows = [
        {"id": str(i), "query": f"Question {i}?", "memories": ["Rows", "Bakes"], "answer": "!"}
        for i in range(5)
    ]
    path = lines(tmp_path / "log.jsonl", *rows)
    answers = own_answers(LogPlan(file=str(path), without_consent=True, memories=1), limit=2)
    told = answers.reading.account.check({"row": 2, "memory": 2}).to_dict()
    assert told["row"]["left"] == {"beyond the first 2 questions": 3}
    assert told["memory"]["left"]["beyond the first 1 of its row"] == 5


# a second set of files, written afresh


def test_a_search_that_stands_whole_in_a_field_of_its_own_name(tmp_path):
    found = {"results": [{"id": "m1", "memory": "Is vegan"}], "relations": []}
    row = {"user_message": "Dinner?", "search": found, "assistant_message": "Tofu."}
    lines(tmp_path / "log.jsonl", row, row)
    [first, _] = read_all(tmp_path / "log.jsonl").rows
    assert (first.query, texts(first), first.answer) == ("Dinner?", ["Is vegan"], "Tofu.")


def test_blocks_as_memgpt_writes_them():
    text = (
        '### Core Memory\n<persona characters="12/2000">\nI am calm.\n</persona>\n'
        '<human characters="20/2000">\nName: Bo\nKeeps bees\n</human>'
    )
    found = [(memory["text"], memory["type"]) for memory in system_memories(text)]
    assert found == [("I am calm.", "persona"), ("Name: Bo", "human"), ("Keeps bees", "human")]


def test_entities_of_zep_that_take_several_lines():
    context = (
        "<ENTITIES>\nName: Bakery\nLabel: Organization\nSummary: Twelve staff.\n"
        "Name: Emre\nSummary: A chef.\n</ENTITIES>"
    )
    assert [memory["text"] for memory in system_memories(context)] == [
        "Name: Bakery; Label: Organization; Summary: Twelve staff.",
        "Name: Emre; Summary: A chef.",
    ]


def test_the_day_of_an_edge_is_that_from_which_it_holds(tmp_path):
    edge = {"fact": "Emre works here", "created_at": "2026-01-01", "valid_at": "2024-11-14"}
    ended = {**edge, "fact": "Emre worked there", "invalid_at": "2025-02-01T00:00:00Z"}
    row = {"query": "Where?", "edges": [edge, ended, {**edge, "valid_at": None}], "answer": "Here."}
    [read] = read_all([row]).rows
    assert [(memory.text, memory.created_at) for memory in read.memories] == [
        ("Emre works here", "2024-11-14"),
        ("Emre worked there (until 2025-02-01)", "2024-11-14"),
        ("Emre works here", "2026-01-01"),
    ]


def test_saved_memories_in_a_text_file(tmp_path):
    lines(tmp_path / "log.jsonl", {"messages": TALK})
    (tmp_path / "saved.txt").write_text("Is vegan\nLives in Graz\n\nPlays chess\n")
    [row] = read_all(tmp_path / "log.jsonl", tmp_path / "saved.txt").rows
    assert texts(row) == ["Is vegan", "Lives in Graz", "Plays chess"]
    (tmp_path / "saved.txt").write_text("About me\n- Is vegan\n  since May\n- Plays chess\n")
    [row] = read_all(tmp_path / "log.jsonl", tmp_path / "saved.txt").rows
    assert texts(row) == ["About me", "Is vegan since May", "Plays chess"]
    (tmp_path / "saved.docx").write_text("Is vegan")
    with pytest.raises(ValueError, match=r"'\.docx'; allowed: \.json, .*\.md or \.txt"):
        read_all(tmp_path / "log.jsonl", tmp_path / "saved.docx")


def openclaw_session(name, question, found):
    call = {"type": "toolCall", "id": "t", "name": "memory_search", "arguments": {"query": "x"}}
    returned = {"role": "toolResult", "toolCallId": "t", "toolName": "memory_search"}
    results = [{"type": "text", "text": json.dumps({"results": found})}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": question}]},
        {"role": "assistant", "content": [call]},
        {**returned, "content": results},
        {"role": "assistant", "content": [{"type": "text", "text": f"Answer to {question}"}]},
    ]
    head = {"type": "session", "version": 3, "id": name, "cwd": "/w"}
    return [head, *({"type": "message", "parentId": name, "message": m} for m in messages)]


def test_each_file_of_openclaw_is_a_session_and_its_snippets_are_memories(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    found = [{"path": "MEMORY.md", "snippet": "Is vegan", "score": 0.8}, {"odd": 1}]
    lines(folder / "a.jsonl", *openclaw_session("a", "Dinner?", found))
    lines(folder / "b.jsonl", *openclaw_session("b", "Lunch?", found[:1]))
    reading = read_all(folder)
    assert [(row.id, row.query, texts(row)) for row in reading.rows] == [
        ("a/1", "Dinner?", ["Is vegan"]),
        ("b/1", "Lunch?", ["Is vegan"]),
    ]
    assert not reading.rows[1].turns  # nothing of the other session
    assert reading.rows[0].memories[0].source == "MEMORY.md"
    account = reading.account.to_dict()
    assert account["conversation"] == {"found": 2, "used": 2, "left": {}}
    assert account["remarks"]["results of searches in no form that is known"] == 1
    assert "with a conversation before the query: 0 rows" in reading.text()


def test_each_file_of_codex_is_a_session(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    for name in ("a", "b"):
        said = [
            ("user", "<INSTRUCTIONS>\n- Use tabs.\n</INSTRUCTIONS>"),
            ("user", f"Question {name}?"),
            ("assistant", f"Answer {name}."),
        ]
        items = [
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in said
        ]
        head = {"type": "session_meta", "payload": {"id": name}}
        rest = [{"type": "response_item", "payload": item} for item in items]
        lines(folder / f"{name}.jsonl", head, *rest)
    reading = read_all(folder)
    assert [(row.id, len(row.turns)) for row in reading.rows] == [("a/1", 0), ("b/1", 0)]


def test_lines_that_name_no_session_belong_to_the_one_beside_them(tmp_path):
    said = [
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "Dinner?"}},
        {
            "type": "assistant",
            "sessionId": "s",
            "message": {"role": "assistant", "content": "Tofu."},
        },
    ]
    summary = {"type": "summary", "summary": "Dinner", "leafUuid": "x"}
    lines(tmp_path / "log.jsonl", summary, *said)
    (tmp_path / "notes.md").write_text("- Is vegan\n")
    account = read_all(tmp_path / "log.jsonl", tmp_path / "notes.md").account.to_dict()
    assert account["conversation"] == {"found": 1, "used": 1, "left": {}}
    assert account["record"] == {"found": 3, "used": 3, "left": {}}


def test_answers_to_longmemeval_beside_its_questions(tmp_path):
    answers = [
        {"question_id": "q1", "hypothesis": "Graz."},
        {"question_id": "?", "hypothesis": "No."},
    ]
    lines(tmp_path / "answers.jsonl", *answers)
    question = {name: value for name, value in LONGMEMEVAL.items() if name != "hypothesis"}
    (tmp_path / "questions.json").write_text(json.dumps([question]))
    reading = read_all(tmp_path / "answers.jsonl", tmp_path / "questions.json")
    [row] = reading.rows
    assert (row.id, row.query, row.answer) == ("q1", "Where do I live?", "Graz.")
    assert [(m.text, m.created_at) for m in row.memories] == [("I moved to Graz.", "2023-05-20")]
    assert reading.account.to_dict()["record"]["left"] == {"its question is not in the store": 1}
    with pytest.raises(DataError, match="give longmemeval_.*json as --store"):
        read_all(tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    "printed",
    [
        "[Item(namespace=['m'], key='k', value={'data': 'Is vegan'}, created_at='2026-08-01')]",
        "[SearchItem(key='k', value={'data': 'Is vegan'}, "
        "created_at=datetime.datetime(2026, 8, 1, 9, 0, tzinfo=datetime.timezone.utc))]",
        "[Document(metadata={'created_at': '2026-08-01'}, page_content='Is vegan')]",
    ],
)
def test_objects_as_python_prints_them(tmp_path, printed):
    call = {"name": "search_memory", "args": {"query": "food"}, "id": "c", "type": "tool_call"}
    messages = [
        {"type": "human", "content": "Dinner?"},
        {"type": "ai", "content": "", "tool_calls": [call]},
        {"type": "tool", "content": printed, "tool_call_id": "c"},
        {"type": "ai", "content": "Tofu."},
    ]
    [row] = read_all([{"messages": messages}]).rows
    assert [(m.text, m.created_at) for m in row.memories] == [("Is vegan", "2026-08-01")]


def test_words_that_look_like_an_object_stay_two_entries():
    assert structure_in("['Calls foo(1)' 'Plays chess']") == ["Calls foo(1)", "Plays chess"]
    assert structure_in("[foo(1)]") is None
    assert structure_in("[Item(id=UUID('a-1'))]") == [{"id": "a-1"}]


def test_a_search_that_cannot_be_read_costs_no_row_that_has_other_memories(tmp_path):
    call = {"name": "search_memory", "args": {}, "id": "c", "type": "tool_call"}
    messages = [
        {"type": "human", "content": "Dinner?"},
        {"type": "ai", "content": "", "tool_calls": [call]},
        {"type": "tool", "content": "3 hits, of which", "tool_call_id": "c"},
        {"type": "ai", "content": "Tofu."},
    ]
    lines(tmp_path / "log.jsonl", {"messages": messages})
    (tmp_path / "notes.md").write_text("- Is vegan\n")
    reading = read_all(tmp_path / "log.jsonl", tmp_path / "notes.md")
    assert texts(reading.rows[0]) == ["Is vegan"]
    remark = "searches of the memory whose result cannot be read"
    assert reading.account.to_dict()["remarks"][remark] == 1
    alone = read_all(tmp_path / "log.jsonl")
    assert (
        not alone.rows and alone.dropped[0].found == "a text of 16 characters that cannot be read"
    )


def test_what_is_no_memory_in_a_store_is_counted(tmp_path):
    lines(tmp_path / "log.jsonl", {"messages": TALK})
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "MEMORY.md").write_text("- [Food](food.md): what the user eats\n")
    (folder / "food.md").write_text("Is vegan\n")
    reading = read_all(tmp_path / "log.jsonl", folder)
    assert texts(reading.rows[0]) == ["Is vegan"]
    remark = "entries of the store that are no memory: a link to another note"
    assert reading.account.to_dict()["remarks"][remark] == 1
    (tmp_path / "store.jsonl").write_text('{"text": "Is vegan"}\n{"text": \n{"odd": 1}\n')
    remarks = read_all(tmp_path / "log.jsonl", tmp_path / "store.jsonl").account.remarks
    assert remarks["entries of the store that are no memory: cannot be read (json)"] == 1
    assert remarks["entries of the store that are no memory: in no form that is known"] == 1


def test_the_questions_of_one_talk_are_questions_of_their_own(tmp_path):
    talk = {**LOCOMO, "qa": [{"question": f"Who is {n}?", "prediction": "She."} for n in "abc"]}
    (tmp_path / "log.json").write_text(json.dumps([talk]))
    plan = LogPlan(file=str(tmp_path / "log.json"), consent="mine", unlabelled=True)
    assert "3 answers to 3 questions" in own_answers(plan).preview()


def test_the_preview_says_what_is_judged_as_one():
    row = {"query": "Dinner?", "memories": ["Is vegan", "is vegan."], "answer": "Tofu."}
    other = {"query": "Lunch?", "memories": ["Is vegan"], "answer": "Soup."}
    plan = LogPlan(file="rows", consent="mine", unlabelled=True)
    said = "1 memory says nearly the same as another memory of the same row"
    for shown in (None, 1):
        answers = own_answers(plan, [row, other], shown=shown)
        assert said in answers.preview() and any(said in note for note in answers.notes())
    answers.leave_out([answers.examples[0].id], "a reason")
    assert said not in answers.preview()


FOUND = json.dumps([{"namespace": ["m"], "key": "k", "value": {"content": "Is vegan"}}])
GRAPH = {"entities": [{"name": "Ana", "observations": ["Is vegan"]}], "relations": []}
SEARCHES_IN_TRACES = {
    "a text": {"output": FOUND},
    "a message of the tool": {"output": {"content": FOUND, "type": "tool", "tool_call_id": "c"}},
    "parts": {"content": [{"type": "text", "text": json.dumps(GRAPH)}]},
    "documents": {"documents": [{"page_content": "Is vegan", "metadata": {}}]},
}


@pytest.mark.parametrize("returned", SEARCHES_IN_TRACES.values(), ids=SEARCHES_IN_TRACES)
def test_what_a_tool_found_in_the_memory_is_read_from_its_step(returned):
    root = {"trace_id": "r", "inputs": {"input": "Dinner?"}, "outputs": {"output": "Tofu."}}
    step = {"trace_id": "r", "parent_run_id": "r", "run_type": "tool", "name": "search_memory"}
    runs = [{**root, "id": "r", "run_type": "chain", "name": "agent"}]
    runs.append({**step, "id": "k", "inputs": {"query": "food"}, "outputs": returned})
    [row] = read_all(runs).rows
    assert (row.query, row.answer) == ("Dinner?", "Tofu.")
    assert [text.removeprefix("Ana: ") for text in texts(row)] == ["Is vegan"]


def test_messages_that_stand_alone_are_a_conversation(tmp_path):
    system = {"role": "system", "content": "Memories:\n- Is vegan"}
    lines(tmp_path / "log.jsonl", system, *TALK)
    (tmp_path / "log.json").write_text(json.dumps([system, *TALK]))
    for path in (tmp_path / "log.jsonl", tmp_path / "log.json"):
        [row] = read_all(path).rows
        assert (row.query, row.answer) == (ASK["content"], SAY["content"])
        assert texts(row) == ["Is vegan"]
    mixed = [{**message, "session_id": name} for message in [system, *TALK] for name in ("a", "b")]
    assert [row.id for row in read_all(mixed).rows] == ["a/1", "b/1"]
    with pytest.raises(DataError, match="format 'messages'.*as --store"):
        read_all(TALK)


def test_a_folder_of_hermes_holds_a_session_a_file(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    for name in ("a", "b"):
        lines(folder / f"{name}.jsonl", {"role": "session_meta", "tools": []}, *TALK)
    (tmp_path / "USER.md").write_text("Is vegan\n§\nLives in Graz\n")
    reading = read_all(folder, tmp_path / "USER.md")
    assert [(texts(row), row.turns) for row in reading.rows] == [
        (["Is vegan", "Lives in Graz"], [])
    ] * 2
    assert reading.account.to_dict()["conversation"]["used"] == 2


@pytest.mark.parametrize(
    ("item", "action"),
    [
        ({"type": "web_search_call", "action": {"query": "tofu"}}, 'web_search {"query": "tofu"}'),
        ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, None),
        ({"type": "mcp_call", "name": "order", "arguments": '{"n": 1}'}, 'order {"n": 1}'),
    ],
)
def test_tools_of_the_host_are_actions(tmp_path, item, action):
    head = {"type": "session_meta", "payload": {"id": "s"}}
    said = [CODEX[1], CODEX[2], {"type": "response_item", "payload": item}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [head, *said]))
    [row] = read_all(tmp_path / "log.jsonl").rows
    assert row.response == f"[action] {action or 'local_shell ' + json.dumps(item['action'])}"


def test_an_export_that_was_unpacked_is_a_folder(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    remembered = [{"conversations_memory": "Is vegan.", "project_memories": {}}]
    for name, value in {
        "conversations.json": [CLAUDE],
        "memories.json": remembered,
        "users.json": [{"uuid": "u"}],
    }.items():
        (folder / name).write_text(json.dumps(value))
    [row] = read_all(folder).rows
    assert (row.query, texts(row)) == ("Dinner?", ["Is vegan."])


def test_the_notes_of_a_folder_that_has_sessions_too_are_its_store(tmp_path):
    home = tmp_path / "home"
    (home / "memory").mkdir(parents=True)
    (home / "memory" / "state.json").write_text("{}")
    (home / "MEMORY.md").write_text("- Is vegan\n")
    lines(home / "session.jsonl", *TALK)
    [row] = read_all(home, home).rows
    assert texts(row) == ["Is vegan"]


def test_one_call_that_is_written_twice_is_one_action():
    call = {"name": "note", "args": {"text": "fish"}, "id": "c", "type": "tool_call"}
    part = {"type": "tool_use", "id": "c", "name": "note", "input": {"text": "fish"}}
    said = {"type": "ai", "content": [{"type": "text", "text": "OK."}, part], "tool_calls": [call]}
    assert len(read_message(said).calls) == 1
    other = {**call, "id": "d"}
    assert len(read_message({**said, "tool_calls": [call, other]}).calls) == 2


def test_of_the_states_of_a_thread_the_last_one_counts(tmp_path):
    system = {"type": "system", "content": "<memories>\n- Is vegan\n</memories>"}
    talk = [{"type": "human", "content": "Dinner?"}, {"type": "ai", "content": "Tofu."}]
    later = [{"type": "human", "content": "Lunch?"}, {"type": "ai", "content": "Soup."}]
    states = []
    for messages in ([system, *talk, *later], [system, *talk], [system]):
        states.append({"values": {"messages": messages}, "metadata": {"thread_id": "t"}})
    states.append({"values": {"messages": [system, *talk]}, "checkpoint": {"thread_id": "u"}})
    reading = read_all(states)
    assert [row.id for row in reading.rows] == ["t/1", "t/2", "u/1"]
    left = reading.account.to_dict()["record"]["left"]
    assert left == {"an earlier state of the same thread": 2}


def test_an_export_of_a_store_is_not_put_before_answers_that_show_their_search(tmp_path):
    call = {"name": "search_memory", "args": {"query": "food"}, "id": "c", "type": "tool_call"}
    messages = [
        {"type": "human", "content": "Dinner?"},
        {"type": "ai", "content": "", "tool_calls": [call]},
        {"type": "tool", "content": FOUND, "tool_call_id": "c"},
        {"type": "ai", "content": "Tofu."},
    ]
    lines(tmp_path / "log.jsonl", {"messages": messages})
    lines(tmp_path / "store.jsonl", {"text": "Is vegan"}, {"text": "Plays chess"})
    reading = read_all(tmp_path / "log.jsonl", tmp_path / "store.jsonl")
    assert texts(reading.rows[0]) == ["Is vegan"]
    assert any("show what was searched" in line for line in reading.account.lines())
    (tmp_path / "notes.md").write_text("- Plays chess\n")
    [row] = read_all(tmp_path / "log.jsonl", tmp_path / "notes.md").rows
    assert texts(row) == ["Plays chess", "Is vegan"]


def test_graph_memories_and_speakers_of_the_results_of_mem0(tmp_path):
    relation = {"source": "ana", "relationship": "friend_of", "target": "bo"}
    question = {"question": "Who?", "answer": "", "response": "Bo.", "category": 5}
    question["speaker_1_memories"] = [{"memory": "Paints", "timestamp": "8 May, 2023"}]
    question["speaker_1_graph_memories"] = [relation]
    (tmp_path / "log.json").write_text(json.dumps({"0": [question, {**question, "answer": "B"}]}))
    reading = read_all(tmp_path / "log.json")
    assert [(m.text, m.type) for m in reading.rows[0].memories] == [
        ("Paints", "speaker_1"),
        ("ana friend of bo", ""),
    ]
    assert [n for what, n in reading.account.remarks.items() if "reference answers" in what] == [1]


def test_memories_of_a_project_of_claude_stand_before_its_conversations_alone(tmp_path):
    remembered = {"conversations_memory": "Is vegan.", "project_memories": {"p": "Draws birds."}}
    with_project = {**CLAUDE, "uuid": "c2", "project": {"uuid": "p"}}
    reading = read_all([remembered, CLAUDE, with_project])
    assert list(map(texts, reading.rows)) == [["Is vegan."], ["Is vegan.", "Draws birds."]]
    assert any("memories of a project" in what for what in reading.account.remarks)


@pytest.mark.parametrize("written", ["mara_k", "mara k", "Mara-K", "mara.k"])
def test_the_name_of_a_user_goes_in_every_spelling(tmp_path, written):
    row = {"query": "Where?", "memories": [f"{written} rows"], "answer": "Here.", "user": "mara_k"}
    [example] = own(lines(tmp_path / "log.jsonl", row)).examples
    assert example.blocks[0].memory_text == "[user] rows"


def test_the_name_of_a_user_in_a_relation_is_taken_out(tmp_path):
    relation = {"source": "mara_k", "relationship": "lives_in", "destination": "hamburg"}
    row = {"query": "Where?", "results": [], "relations": [relation], "user_id": "mara_k"}
    path = lines(tmp_path / "log.jsonl", {**row, "answer": "In Hamburg."})
    [example] = own(path).examples
    assert example.blocks[0].memory_text == "[user] lives in hamburg"


def test_marks_of_citations_of_chatgpt_are_no_words_of_an_answer():
    text = "Call Lotte \ue200cite\ue202turn0search1\ue201. She knows."
    node = {"content": {"content_type": "text", "parts": [text]}, "author": {"role": "assistant"}}
    talk = [
        {"content": {"content_type": "model_editable_context", "model_set_context": "Rows"}},
        {"content": {"content_type": "text", "parts": ["Whom?"]}, "author": {"role": "user"}},
        node,
    ]
    mapping = {
        str(number): {"parent": str(number - 1) if number else None, "message": message}
        for number, message in enumerate(talk)
    }
    [row] = read_all([{"mapping": mapping, "current_node": "2", "title": "t"}]).rows
    assert row.answer == "Call Lotte. She knows."


def test_a_memory_that_is_said_twice_keeps_the_day_that_is_known(tmp_path):
    memories = [{"text": "Is vegan"}, {"text": "is vegan.", "created_at": "2025-03-04"}]
    row = {"query": "Dinner?", "memories": memories, "answer": "Tofu."}
    [example] = own(lines(tmp_path / "log.jsonl", row)).examples
    assert example.blocks[0].time == "2025-03-04"


def test_a_file_that_was_cut_off_says_so(tmp_path):
    whole = json.dumps([{"query": "Dinner?", "memories": ["Is vegan"], "answer": "Tofu."}] * 2)
    (tmp_path / "log.json").write_text(whole[:40])
    with pytest.raises(DataError, match="line 1 of the file, the end of the file inside"):
        read_all(tmp_path / "log.json")
    (tmp_path / "log.json").write_text(whole[:-30])
    reading = read_all(tmp_path / "log.json")
    assert len(reading.rows) == 1 and "cut off" in reading.text()
    told = (
        "1 part of the file left out, json: first in line 1 of the file, found the end of the file"
    )
    assert told in reading.text() and "allowed: a complete file" in reading.text()
    (tmp_path / "log.zip").write_bytes(b"PK and no more")
    with pytest.raises(DataError, match="part of one; .*load it again"):
        read_all(tmp_path / "log.zip")


def test_files_of_an_archive_that_are_not_opened_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr("conversations.json", json.dumps([CLAUDE]))
        archive.writestr("memories.json", json.dumps([{"conversations_memory": "Is vegan."}]))
        archive.writestr("users.json", "[]")
        archive.writestr("picture of Ana.png", b"1")
    told = read_all(tmp_path / "export.zip").account.lines()
    assert "files of the archive that were not opened (users.json and others): 2" in told


def test_a_trace_names_the_model_that_answered_and_what_it_was_not_shown():
    def call(name, model, said, asked="Which lease?"):
        asked = [{"role": "user", "content": asked}]
        step = {"type": "GENERATION", "name": name, "model": model, "input": asked}
        return {**step, "output": {"role": "assistant", "content": said}}

    found = [
        {"id": "1", "content": "Lease runs to 2028", "metadata": {"created_at": "2026-02-01"}},
        {"id": "2", "content": "Owns a parrot"},
    ]
    prompt = "Memories:\n- Lease runs to 2028\n\nWhich lease?"
    steps = [
        call("rewrite", "small", "lease"),
        {"type": "RETRIEVER", "name": "memory", "output": found},
        call("answer", "large", "To 2028.", prompt),
        call("extract", "small", "nothing new"),
    ]
    observations = [{**step, "startTime": f"2026-01-0{n}"} for n, step in enumerate(steps, 1)]
    trace = {"id": "t", "timestamp": "2026-01-01", "input": {"query": "Which lease?"}}
    reading = read_all([{**trace, "output": {"answer": "To 2028."}, "observations": observations}])
    [row] = reading.rows
    assert row.model == "large"
    told = [(m.text, m.created_at, m.in_prompt) for m in row.memories]
    assert told == [
        ("Lease runs to 2028", "2026-02-01", True),
        ("Owns a parrot", "", False),
    ]
    assert "candidates that did not enter the prompt: 1 of 2 memories" in reading.text()


def test_a_memory_that_the_prompt_quotes_again_counts_once(tmp_path):
    system = {"role": "system", "content": "Memories:\n- [2026-01-02] Is vegan\n- Rows"}
    talk = [system, *TALK]
    (tmp_path / "notes.md").write_text("- Is vegan\n")
    reading = read_all(lines(tmp_path / "log.jsonl", {"messages": talk}), tmp_path / "notes.md")
    assert texts(reading.rows[0]) == ["Is vegan", "Rows"]
    assert reading.rows[0].memories[0].created_at == "2026-01-02"
    remark = "memories that a message quotes once more, which count once"
    assert reading.account.remarks[remark] == 1
    assert "store: notes.md, memories: 1" in reading.text()
    assert "different memories: 2" in reading.text()


def test_an_error_of_the_interface_is_no_answer(tmp_path):
    error = {"role": "assistant", "content": [{"type": "text", "text": "API Error: 529"}]}
    said = [
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "Dinner?"}},
        {"type": "assistant", "sessionId": "s", "isApiErrorMessage": True, "message": error},
    ]
    (tmp_path / "notes.md").write_text("- Is vegan\n")
    with pytest.raises(DataError, match="no answer to a user"):
        read_all(lines(tmp_path / "log.jsonl", *said), tmp_path / "notes.md")


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (
            "- Ask Noor\n\n```sh\nmake\n- x\n```\n- Next",
            ["Ask Noor", "```sh\nmake\n- x\n```", "Next"],
        ),
        ("Run it:\n```sh\nmake\n```", ["Run it:\n```sh\nmake\n```"]),
        ("- Ask\n\n  ```sh\n  make\n  ```", ["Ask\n  ```sh\n  make\n  ```"]),
    ],
)
def test_code_after_an_empty_line_is_an_entry_of_its_own(text, entries):
    assert [entry for _, entry in note_entries(text)] == entries


def test_notes_in_a_folder_of_sessions_and_broken_lines_are_named(tmp_path):
    folder = tmp_path / "project"
    (folder / "memory").mkdir(parents=True)
    (folder / "memory" / "MEMORY.md").write_text("- Is vegan\n")
    for name in ("a", "b"):
        said = [{**message, "session_id": name} for message in TALK]
        lines(folder / f"{name}.jsonl", *said)
    with open(folder / "b.jsonl", "a") as file:
        file.write('{"role": "user", "content": "And')
    reading = read_all(folder, folder / "memory")
    assert [row.id for row in reading.rows] == ["a/1", "b/1"]
    assert reading.dropped[0].found.startswith("in b.jsonl: ")
    what = "notes in the folder that are not read (they are read as --store)"
    assert reading.account.remarks[what] == 1


def test_a_second_store_is_refused(tmp_path, capsys):
    path = lines(tmp_path / "log.jsonl", {"messages": TALK})
    code, _, errors = run(capsys, "logs", path, "--store", "a.md", "--store", "b.md")
    assert code != 0 and "--store: found 2; allowed: one file or one folder" in errors


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("- Cents as int\n  - never floats\n- Next", ["Cents as int: never floats", "Next"]),
        (
            "- Keep money in cents, as int.\n  - Never floats\n    - not even once\n- Next",
            ["Keep money in cents, as int. Never floats; not even once", "Next"],
        ),
        ("- **Family**\n  - Ana\n  - Leo\n\n- Rows", ["Family: Ana", "Family: Leo", "Rows"]),
        ("1. Work:\n   - Projects:\n     - Halden", ["Work: Projects: Halden"]),
        ("  - Rows\n  - Is vegan", ["Rows", "Is vegan"]),
        ("- Work:\n\nA paragraph.\n  - Rows", ["Work:", "A paragraph.", "Rows"]),
        ("- Work:\n# Home\n  - Rows", ["Work:", "Rows"]),
    ],
)
def test_bullets_inside_a_bullet_belong_to_it(text, entries):
    assert [entry for _, entry in note_entries(text)] == entries


def test_a_section_of_a_prompt_keeps_its_entries_apart_and_gives_them_their_title():
    flat = "Memories:\n- Moved to Hull in May\n  - Likes tea\n- Family:\n  - Ana\n  - Leo"
    assert [memory["text"] for memory in system_memories(flat)] == [
        "Moved to Hull in May",
        "Likes tea",
        "Family: Ana",
        "Family: Leo",
    ]


CALL = {"id": "t", "type": "function", "function": {"name": "mail", "arguments": '{"to": 1}'}}


@pytest.mark.parametrize(
    ("answer", "words", "actions"),
    [
        ({"role": "assistant", "content": "Tofu."}, "Tofu.", []),
        ([{"type": "text", "text": "Tofu."}], "Tofu.", []),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "", ["mail"]),
        ({"choices": [{"message": {"role": "assistant", "content": "Tofu."}}]}, "Tofu.", []),
        ({"answer": "Tofu.", "confidence": 0.9, "sources": []}, "Tofu.", []),
        ({"dish": "Tofu", "answer": "Tofu."}, '{"dish": "Tofu", "answer": "Tofu."}', []),
        ({"rows": [1, 2]}, '{"rows": [1, 2]}', []),
    ],
)
def test_an_answer_that_is_json_in_a_text(answer, words, actions):
    row = {"query": "Dinner?", "memories": ["Is vegan"], "answer": json.dumps(answer)}
    reading = read_all([row])
    assert reading.rows[0].answer == words
    assert [action.tool for action in reading.rows[0].actions] == actions
    stands = reading.account.remarks["answers that are JSON, judged as they stand"]
    assert stands == words.startswith("{")
    assert read_all([{**row, "answer": answer}]).rows[0].response == reading.rows[0].response


def test_a_byte_in_an_archive_names_the_archive_and_its_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr("data/log.jsonl", '{"query": "Caf\xe9?"}'.encode("cp1252"))
    with pytest.raises(DataError, match="export.zip/log.jsonl: encoding: .*unpack export.zip") as e:
        read_all(tmp_path / "export.zip")
    assert "iconv -f WINDOWS-1252 -t UTF-8 log.jsonl > utf8-log.jsonl" in str(e.value)


def test_the_fields_of_this_file_are_named(tmp_path):
    asked = {"question": "Dinner?", "answer": "Tofu", "response": "Rice."}
    results = {"ana": [{**asked, "speaker_1_memories": [{"memory": "Is vegan"}]}]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    text = read_all(tmp_path / "results.json").text()
    assert "answer: read from response (results of an evaluation)" in text
    assert "memories: read from speaker_1_memories (results of an evaluation)" in text
    row = {"query": "Dinner?", "edges": [{"fact": "Is vegan"}], "answer": "Tofu."}
    other = {"query": "Tea?", "context": "<FACTS>\n- Rows\n</FACTS>", "answer": "Yes."}
    told = read_all(lines(tmp_path / "zep.jsonl", row, other)).text()
    assert "memories: read from edges, context (as a memory system returns them)" in told


def test_further_calls_and_errors_of_traces_are_counted():
    asked = [{"role": "system", "content": "Memories:\n- Is vegan"}, ASK]
    step = {"type": "GENERATION", "startTime": "2026-01-02", "input": asked, "model": "m"}
    said = [
        {**step, "output": {"role": "assistant", "content": "tofu"}},
        {**step, "output": {"role": "assistant", "content": "Tofu."}, "startTime": "2026-01-03"},
    ]
    failed = [{**step, "level": "ERROR", "statusMessage": "429", "output": None}]
    traces = [
        {"id": "1", "timestamp": "2026-01-01", "output": "Tofu.", "observations": said},
        {"id": "2", "timestamp": "2026-01-01", "output": None, "observations": failed},
    ]
    remarks = read_all(traces).account.remarks
    assert remarks["further calls of a model in a trace, which did not give its answer"] == 2
    assert remarks["traces that ended in an error and gave no row"] == 1


def test_what_a_store_imports_is_counted(tmp_path):
    (tmp_path / "CLAUDE.md").write_text("- Read @docs/style.md first.\n- Mail ana@example.org\n")
    reading = read_all(lines(tmp_path / "log.jsonl", {"messages": TALK}), tmp_path / "CLAUDE.md")
    what = "memories of the store that import another file (@path), which is not read"
    assert reading.account.remarks[what] == 1


# what a second list of files had in it


def test_a_request_with_its_reply_is_one_row_and_memories_written_after_it_are_none():
    asked = [ASK, SAY, {"role": "user", "content": "And back?"}]
    reply = {"choices": [{"message": {"role": "assistant", "content": "At 18:05."}}]}
    added = {"results": [{"memory": "Went to Leeds"}]}
    found = {"results": [{"memory": "Lives in Hull"}]}
    row = {"memory_add": added, "memory_search": found, "messages": asked, "completion": reply}
    [read] = read_all([row]).rows
    assert (read.query, read.answer, texts(read)) == ("And back?", "At 18:05.", ["Lives in Hull"])
    assert [turn.content for turn in read.turns] == [ASK["content"], SAY["content"]]


def test_the_last_branch_of_claude_counts_where_no_leaf_is_named():
    def said(uuid, parent, sender, text):
        content = [{"type": "text", "text": text}]
        return {"uuid": uuid, "parent_message_uuid": parent, "sender": sender, "content": content}

    talk = [
        said("1", "0", "human", "Plan a run"),
        said("2", "1", "assistant", "Which?"),
        said("3", "0", "human", "Plan a long run"),
        said("4", "3", "assistant", "On Sunday."),
    ]
    records = [
        {"conversations_memory": "Runs with Kari."},
        {"uuid": "c", "chat_messages": talk},
    ]
    reading = read_all(records)
    assert [row.query for row in reading.rows] == ["Plan a long run"]
    assert reading.account.tallies["turn"].left["on a branch that was edited away"] == 2


def test_a_result_without_an_id_belongs_to_the_call_before_it():
    def call(name):
        return {"type": "tool_use", "id": None, "name": name, "input": {"q": 1}}

    def result(name, text):
        return {"type": "tool_result", "tool_use_id": None, "name": name, "content": text}

    found = json.dumps([{"memory": "Lives in Hull"}])
    weather = json.dumps([{"text": "rain"}])
    content = [call("search_memory"), result(None, found), call("weather"), result(None, weather)]
    messages = [ASK, *({"role": "assistant", "content": [part]} for part in content), SAY]
    [row] = read_all([{"messages": messages}]).rows
    assert texts(row) == ["Lives in Hull"] and [a.tool for a in row.actions] == ["weather"]


def test_marks_of_sources_and_hidden_messages_are_no_words_of_an_answer():
    value = {"value": "Size 43【4:0†shoes.md】.", "annotations": []}
    messages = [
        {"object": "thread.run", "created_at": 1, "instructions": SYSTEM["content"]},
        {"object": "thread.message", "created_at": 2, **ASK},
        {
            "object": "thread.message",
            "created_at": 3,
            "role": "assistant",
            "content": [{"type": "text", "text": value}],
        },
    ]
    [row] = read_all(messages).rows
    assert row.answer == "Size 43."


@pytest.mark.parametrize(
    "tool", ["mem0.search", "mem0_search_memory", "zep.get_context", "search-mem0"]
)
def test_tools_named_after_a_memory_system_search_the_memory(tool):
    assert is_memory_search(tool)


@pytest.mark.parametrize("tool", ["mem0_add", "search_web", "zephyr_query", "get_time"])
def test_other_tools_do_not(tool):
    assert not is_memory_search(tool)


def test_a_trace_whose_root_alone_has_the_conversation():
    talk = [SYSTEM, ASK, SAY]
    root = {"id": "r", "trace_id": "r", "run_type": "chain", "name": "graph", "start_time": "1"}
    run_of = {**root, "inputs": {"messages": [ASK]}, "outputs": {"messages": talk}}
    [row] = read_all([run_of]).rows
    assert (row.answer, texts(row)) == (SAY["content"], ["Moved to Hull in May"])


def test_a_memory_that_a_search_and_its_result_in_the_prompt_show_counts_once():
    found = json.dumps([{"content": "Wants a quiet room"}])
    parts = [
        {"role": "user", "parts": [{"type": "text", "content": "A room?"}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "t", "name": "recall_memory", "arguments": {}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t", "response": found}]},
    ]
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "Room 41."}]}]
    spans = [
        ("tool", {"gen_ai.tool.name": "recall_memory", "gen_ai.tool.call.result": found}),
        (
            "chat",
            {
                "gen_ai.input.messages": json.dumps(parts),
                "gen_ai.output.messages": json.dumps(said),
            },
        ),
    ]
    records = [
        {"traceId": "t", "spanId": name, "parentSpanId": "0", "name": name, "attributes": values}
        for name, values in spans
    ]
    reading = read_all(records)
    [memory] = reading.rows[0].memories
    assert (memory.text, memory.in_prompt) == ("Wants a quiet room", True)


def test_the_retrieved_context_of_locomo_and_longmemeval(tmp_path):
    session = [
        {"speaker": "Ana", "dia_id": "D1:1", "text": "I have a dog!"},
        {"speaker": "Bo", "dia_id": "D1:2", "text": "Nice", "blip_caption": "a photo of a dog"},
    ]
    asked = {"question": "Which pet?", "answer": "A dog"}
    rag = {"m_prediction": "A dog.", "m_prediction_context": ["D1:2"]}
    talk = {"conversation": {"session_1": session, "session_1_date_time": "8 May, 2023"}}
    reading = read_all([{**talk, "qa": [{**asked, **rag}, asked]}])
    assert [texts(row) for row in reading.rows] == [
        ["Bo: Nice (shares a photo of a dog)"],
        ["Ana: I have a dog!", "Bo: Nice (shares a photo of a dog)"],
    ]
    lost = {**asked, **rag, "m_prediction_context": ["D9:9"]}
    what = "questions whose retrieved context is not among the memories"
    assert read_all([{**talk, "qa": [lost]}]).account.remarks[what] == 1
    ranked = [{"corpus_id": "s2", "text": "I moved to Graz.", "timestamp": "2023/05/21"}]
    question = {"question_id": "1", "question": "Where?", "retrieval_results": {}}
    question["haystack_sessions"] = [[{"role": "user", "content": "I live in Ulm."}]]
    assert texts(read_all([question]).rows[0]) == ["I live in Ulm."]
    question["retrieval_results"] = {"ranked_items": ranked}
    assert texts(read_all([question]).rows[0]) == ["I moved to Graz."]


def test_a_fact_that_zep_says_twice_is_one_memory():
    found = {"facts": ["Rows"], "relevant_facts": [{"fact": "Rows", "created_at": "2025-05-05"}]}
    [row] = read_all([{"query": "Sport?", "memory": found, "answer": "Rowing."}]).rows
    assert [(m.text, m.created_at) for m in row.memories] == [("Rows", "2025-05-05")]


@pytest.mark.parametrize("tool", ["send_message", "book"])
def test_words_beside_a_call_are_thoughts_of_an_agent_that_speaks_by_a_tool(tool):
    call = {"id": "c", "function": {"name": tool, "arguments": '{"message": "Booked."}'}}
    messages = [
        {"id": "1", "role": "user", "content": "Book a board"},
        {"id": "2", "role": "assistant", "content": "I will.", "tool_calls": [call]},
    ]
    core = [{"label": "human", "value": "Surfs"}]
    [row] = read_all([{"id": "a", "messages": messages, "core_memory": core}]).rows
    assert row.answer == ("Booked." if tool == "send_message" else "I will.")


def test_a_checkpoint_is_a_state_of_its_thread():
    def state(*messages):
        checkpoint = {"channel_values": {"messages": list(messages)}}
        return {"config": {"configurable": {"thread_id": "t"}}, "checkpoint": checkpoint}

    reading = read_all([state(SYSTEM, ASK), state(SYSTEM, ASK, SAY)])
    assert [row.id for row in reading.rows] == ["t/1"]
    assert reading.account.tallies["record"].left["an earlier state of the same thread"] == 1


def test_a_memory_that_comes_after_an_answer_did_not_stand_before_it():
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    reading = read_all([{"messages": [*earlier, SYSTEM, ASK, SAY]}])
    assert [row.query for row in reading.rows] == [ASK["content"]]
    assert [turn.content for turn in reading.rows[0].turns] == ["Hi", "Hello."]


def test_an_error_of_chatgpt_is_no_answer():
    parts = [
        ("system", {"content_type": "model_editable_context", "model_set_context": "- Is vegan"}),
        ("user", {"content_type": "text", "parts": ["Dinner?"]}),
        ("assistant", {"content_type": "system_error", "text": "Something went wrong"}),
        ("assistant", {"content_type": "text", "parts": ["Tofu."]}),
    ]
    mapping = {
        str(number): {
            "parent": str(number - 1),
            "message": {"author": {"role": role}, "content": content},
        }
        for number, (role, content) in enumerate(parts)
    }
    mapping["2"]["message"]["metadata"] = {"is_visually_hidden_from_conversation": True}
    [row] = read_all([{"mapping": mapping, "current_node": "3"}]).rows
    assert row.answer == "Tofu."
    hidden = {"content_type": "text", "parts": ["cite sources"]}
    mapping["2"]["message"]["content"] = hidden
    reading = read_all([{"mapping": mapping, "current_node": "3"}])
    assert reading.rows[0].answer == "Tofu."
    assert reading.account.tallies["turn"].left["hidden from the user"] == 1


def test_a_table_with_numbers_of_numpy_in_a_cell(tmp_path):
    cell = "[{'memory': 'Drinks oolong', 'score': np.float64(0.5), 'at': Timestamp('2026-01-01')}]"
    path = tmp_path / "log.tsv"
    path.write_text(f'user_prompt\tretrieved_memories\tbot_reply\nTea?\t"{cell}"\tOolong.\n')
    [row] = read_all(path).rows
    assert (row.query, row.answer, row.memories[0].score) == ("Tea?", "Oolong.", 0.5)


def test_headings_in_bold_and_with_a_colon_are_no_memories():
    text = (
        "**Food**\n- Hates coriander\n\nPeople I know:\n- Ana\n\n*Not* a heading:\nas this goes on."
    )
    assert note_entries(text) == [
        ("Food", "Hates coriander"),
        ("People I know", "Ana"),
        ("People I know", "*Not* a heading: as this goes on."),
    ]
    section = "## Memories\n\n**Food**\n- Hates coriander\n\n**Work**\n- Rows on Mondays"
    found = [memory["text"] for memory in system_memories(section)]
    assert found == ["Hates coriander", "Rows on Mondays"]


def test_an_unknown_memory_is_refused_with_the_forms_that_are_known(tmp_path):
    row = {"query": "Tea?", "memories": [{"a": 1}], "answer": "Yes."}
    with pytest.raises(DataError) as error:
        own(lines(tmp_path / "log.jsonl", row))
    assert "llamaindex, langgraph" in str(error.value) and "{" not in str(error.value)


def test_a_table_that_pandas_wrote_column_by_column():
    spans = [
        {"name": "root", "attributes.input.value": "Where?", "attributes.output.value": "Level 2."},
        {"name": "r", "parent_id": "s0", "attributes.retrieval.documents": None},
    ]
    spans[1]["attributes.retrieval.documents"] = [{"document.content": "Parks on level 2"}]
    spans = [{**span, "context.trace_id": "t"} for span in spans]
    names = sorted({name for span in spans for name in span})
    table = {name: {str(n): span.get(name) for n, span in enumerate(spans)} for name in names}
    [row] = read_all([table]).rows
    assert (row.query, row.answer, texts(row)) == ("Where?", "Level 2.", ["Parks on level 2"])


def test_contents_and_a_system_instruction_of_gemini():
    talk = [
        {"role": "user", "parts": [{"text": "Which scissors?"}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "Left ones."}]},
    ]
    system = {"parts": [{"text": "Known about the user:\n- Left-handed"}]}
    [row] = read_all([{"systemInstruction": system, "contents": talk}]).rows
    assert (row.answer, texts(row)) == ("Left ones.", ["Left-handed"])


@pytest.mark.parametrize("as_text", [True, False])
def test_roles_inside_what_went_in_and_came_out(as_text):
    asked = {"question": "Tea?", "memories": [{"memory": "Drinks oolong"}]}
    said = {"answer": "Oolong."}
    row = {"input": asked, "output": said, "metadata": {}}
    if as_text:
        row = {name: json.dumps(value) for name, value in row.items()}
    reading = read_all([row])
    assert (reading.rows[0].query, reading.rows[0].answer) == ("Tea?", "Oolong.")
    assert texts(reading.rows[0]) == ["Drinks oolong"]
    assert "query: read from input.question (guessed)" in reading.text()
    talk = {"input": {"messages": [SYSTEM, ASK]}, "output": SAY}
    assert read_all([talk]).rows[0].answer == SAY["content"]


def test_memories_a_line_in_a_cell_and_in_a_result(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text('question,retrieved_memories,response\nTea?,"1. Oolong\n2. No milk",Oolong.\n')
    assert texts(read_all(path).rows[0]) == ["Oolong", "No milk"]
    call = {"id": "1", "function": {"name": "get_memories", "arguments": "{}"}}
    found = {"role": "tool", "tool_call_id": "1", "content": "Found 2:\n- Oolong\n- No milk"}
    messages = [ASK, {"role": "assistant", "tool_calls": [call]}, found, SAY]
    assert texts(read_all([{"messages": messages}]).rows[0]) == ["Oolong", "No milk"]
    found["content"] = "I looked.\nNothing much: - a dash"
    account = read_all([{"messages": [SYSTEM, *messages]}]).account
    assert account.remarks["searches of the memory whose result cannot be read"] == 1


def test_a_damaged_file_in_an_archive_is_named(tmp_path):
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("conversations.json", json.dumps([CLAUDE]))
        archive.writestr("memories.json", json.dumps([{"conversations_memory": "Is vegan."}]))
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"Is vegan")] = ord("i")  # no longer what the sum of the file says
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="Bad CRC.*complete zip archive|no memories in it"):
        read_all(path)
    told = {item.rule: item for _, item in file_values(path) if isinstance(item, Violation)}
    assert told["zip"].file == "export.zip/memories.json"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_stands_in_a_record_is_read_or_refused(seed):
    """Values of other kinds in place of those that a format has, at random places."""
    random = Random(seed)
    files = [records for records, *_ in HELD.values()]
    others = [None, "", [], {}, 0, 1.5, True, ["a"], [None], [[]], "[1,", '{"a": 1}', float("nan")]

    def places(value, path=()):
        inner = value.items() if isinstance(value, dict) else []
        inner = enumerate(value) if isinstance(value, list) else inner
        return [
            place for key, item in inner for place in [(*path, key), *places(item, (*path, key))]
        ]

    for _ in range(300):
        records = deepcopy(random.choice(files))
        *path, last = random.choice(places(records))
        inside = records
        for key in path:
            inside = inside[key]
        inside[last] = deepcopy(random.choice(others))
        with suppress(DataError):
            read_all([record for record in records if isinstance(record, dict)]).account.check()


# what a second stranger found


@pytest.mark.parametrize("shown", ["Lives in Porto", "Lives in Braga"])
def test_a_change_of_core_memory_stands_before_later_answers_alone(shown):
    def said(number, role, text, **more):
        return {"id": str(number), "role": role, "content": text, **more}

    def call(number, tool, **arguments):
        function = {"name": tool, "arguments": json.dumps(arguments)}
        return {"id": f"c{number}", "function": function}

    change = {"old_content": "Lives in Porto", "new_content": "Lives in Braga"}
    change = call(1, "core_memory_replace", label="human", **change)
    added = call(2, "core_memory_append", label="human", content="Surfs")
    failed = call(3, "core_memory_append", label="human", content="Skis")
    system = f"<human>\n<value>\n{shown}\n{'Surfs' if 'Braga' in shown else ''}\n</value>\n</human>"
    messages = [
        said(0, "system", system),
        said(1, "user", "Where do I live?"),
        said(2, "assistant", "Porto."),
        said(3, "user", "I moved to Braga."),
        said(4, "assistant", "Noted.", tool_calls=[change, added, failed]),
        said(5, "tool", '{"status": "Failed"}', tool_call_id="c3"),
        said(6, "user", "And now?"),
        said(7, "assistant", "Braga."),
    ]
    reading = read_all([{"id": "a", "messages": messages, "core_memory": []}])
    assert [texts(row) for row in reading.rows] == [
        ["Lives in Porto"],
        ["Lives in Porto"],
        ["Lives in Braga", "Surfs"],
    ]
    assert reading.account.remarks["changes of memory in the conversation"] == 2


def test_rows_of_a_table_are_numbered_as_a_spreadsheet_numbers_them(tmp_path):
    path = tmp_path / "log.csv"
    found = '"[{""memory"": ""Drinks oolong""}]"'
    path.write_text(
        f'user_message,found,reply\n"Hi\nthere",{found},Yes.\nTea?,[],No.\n'
        f'Milk?,"[{{""memory"": ""Dri",No.\nRum?,{found},No.\n'
    )
    reading = read_all(path)
    assert [row.id for row in reading.rows] == ["line-2", "line-5"]
    assert "1 row left out, memories: first in row 3, found none" in reading.text()
    assert "first in row 4, found a list written as text that cannot be read" in reading.text()
    assert "records: 4 found, 4 read" in reading.text()


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        ({"user_message": "Tea?", "b": 1, "reply": "Yes."}, "no memories in rows with the fields"),
        ({"a": "x y", "found": ["z"]}, "no query"),
    ],
)
def test_a_refusal_says_what_is_not_found_and_names_all_fields(row, lacks):
    more = {f"field_{number}": number for number in range(12)}
    with pytest.raises(DataError) as error:
        read_all([{**row, **more}])
    assert lacks in str(error.value) and "field_11" in str(error.value)


def test_what_claude_remembers_searches_and_was_sent(tmp_path):
    memory = "**Brief history**\n\n*Recent months*\n\nTom bakes.\n\n*Earlier context*\n\nTom ran."
    (tmp_path / "memories.json").write_text(json.dumps([{"conversations_memory": memory}]))
    found = "<chat url='u' updated_at='2026-03-01T10:00:00Z'>Human: I love\nelderflower.</chat>"
    code = "```\nThis block is not supported on your current device yet.\n```"
    parts = [
        {"type": "tool_use", "id": None, "name": "conversation_search", "input": {}},
        {"type": "tool_result", "name": "conversation_search", "content": found},
        {"type": "text", "text": f"{code}\n\nElderflower."},
    ]
    attached = {"file_name": "a.py", "extracted_content": "print 'hi'"}
    asked = {"sender": "human", "text": "A drink?", "attachments": [attached, {"file_name": "b"}]}
    talk = {"uuid": "c", "chat_messages": [asked, {"sender": "assistant", "content": parts}]}
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([talk]))
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        for file in (path, tmp_path / "memories.json"):
            archive.write(file, file.name)
    of_zip = read_all(tmp_path / "export.zip")
    [row] = of_zip.rows
    assert [memory.model_dump() for memory in row.memories] == [
        memory.model_dump()
        for memory in read_all(path, tmp_path / "memories.json").rows[0].memories
    ]
    assert texts(row) == ["Tom bakes.", "Tom ran.", "Human: I love elderflower."]
    assert row.memories[2].created_at == "2026-03-01"
    assert (row.query, row.answer) == ("A drink?\n\n[a.py]\nprint 'hi'", "Elderflower.")
    assert of_zip.account.remarks["memories of the export, as they were when it was made"] == 2
    assert of_zip.account.remarks["parts without a text (attachment)"] == 1


def test_blocks_of_a_store_stand_before_answers_that_searched(tmp_path):
    blocks = [{"label": "human", "value": "Surfs"}]
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    call = {"id": "1", "function": {"name": "archival_memory_search", "arguments": "{}"}}
    found = {
        "role": "tool",
        "tool_call_id": "1",
        "content": '[{"content": "Skis", "timestamp": 1}]',
    }
    talk = {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}, found, SAY]}
    path = lines(tmp_path / "log.jsonl", talk)
    assert texts(read_all(path, tmp_path / "blocks.json").rows[0]) == ["Surfs", "Skis"]


def test_a_trace_that_failed_has_no_answer_of_a_helper():
    root = {"id": "r", "trace_id": "r", "run_type": "chain", "name": "chat", "start_time": "1"}
    root = {**root, "inputs": {"question": "How fast?"}, "outputs": None, "error": "429"}
    child = {"trace_id": "r", "parent_run_id": "r", "name": "llm", "run_type": "llm"}
    asked = {"messages": [{"role": "user", "content": "How fast?"}]}
    said = {"messages": [{"role": "assistant", "content": "What pace should the user run?"}]}
    found = {"documents": [{"page_content": "Runs"}]}
    search = {**child, "id": "b", "run_type": "retriever", "start_time": "3", "inputs": {}}
    runs = [
        root,
        {**child, "id": "a", "start_time": "2", "inputs": asked, "outputs": said},
        {**search, "outputs": found},
        {**search, "id": "c", "outputs": found},
        {**child, "id": "d", "start_time": "4", "inputs": asked, "outputs": None, "error": "429"},
    ]
    whole = {**SAY, "id": "w", "messages": [SYSTEM, ASK, SAY]}
    reading = read_all([*runs, whole])
    assert [row.answer for row in reading.rows] == [SAY["content"]]
    account = reading.account.check()
    assert account.remarks["traces that ended in an error and gave no row"] == 1
    assert account.remarks["memories that a second search found again, which count once"] == 1
    assert account.tallies["memory"].left["its trace gave no row"] == 1


def test_without_a_root_what_is_json_alone_is_no_answer():
    step = {"trace_id": "r", "parent_run_id": "r", "name": "llm", "run_type": "llm"}
    asked = {"messages": [SYSTEM, ASK]}
    runs = [
        {**step, "id": "a", "start_time": "1", "inputs": asked, "outputs": {"messages": [SAY]}},
        {**step, "id": "b", "start_time": "2", "inputs": asked, "outputs": {}},
    ]
    runs[1]["outputs"] = {"messages": [{"role": "assistant", "content": "[]"}]}
    reading = read_all(runs)
    assert reading.rows[0].answer == SAY["content"]
    assert reading.account.remarks["traces without their root, of which the last call counts"] == 1


def test_memories_before_no_answer_are_counted():
    call = {"id": "1", "function": {"name": "search_memory", "arguments": "{}"}}
    found = {"role": "tool", "tool_call_id": "1", "content": '[{"content": "Skis"}]'}
    unanswered = [SYSTEM, ASK, {"role": "assistant", "tool_calls": [call]}, found]
    reading = read_all([{"messages": unanswered}, {"messages": [SYSTEM, *TALK]}])
    memories = reading.account.check().to_dict()["memory"]
    assert memories == {"found": 3, "used": 1, "left": {"no answer came after it": 2}}


@pytest.mark.parametrize("heading", ["Use these facts about the user:", "## Known about the user"])
def test_other_headings_of_memory(heading):
    assert system_memories(f"{heading}\n- Is vegan") == [{"text": "Is vegan"}]


def test_what_a_channel_of_openclaw_puts_around_words(tmp_path):
    def said(number, role, text, day="2026-06-10"):
        message = {"role": role, "content": [{"type": "text", "text": text}]}
        line = {"type": "message", "id": str(number), "timestamp": f"{day}T09:00:00Z"}
        return {**line, "message": message}

    info = 'Conversation info (untrusted metadata):\n```json\n{"sender_id": "88"}\n```\n\n'
    session = [
        {"type": "session", "id": "s", "cwd": "/w"},
        said(
            1,
            "user",
            "[Telegram Lea (@lea) id:88 2026-06-10 09:00 GMT+2] Dentist?\n[message_id: 4]",
        ),
        said(2, "assistant", "[[reply_to_current]] On the 18th."),
        said(3, "user", "Read HEARTBEAT.md if it exists (workspace context). Follow it."),
        said(4, "assistant", "I checked the mail."),
        said(5, "user", f"{info}[Wed 2026-06-10 09:05 GMT+2] Which day?"),
        said(6, "assistant", "NO_REPLY"),
        said(7, "user", "And now?", "2026-06-12"),
        said(8, "assistant", "Friday."),
    ]
    store = tmp_path / "workspace"
    (store / "memory").mkdir(parents=True)
    (store / "USER.md").write_text("- **Name:** Lea _(how to call them)_\n- **Notes:**\n")
    (store / "memory" / "2026-06-11.md").write_text("- Uses Node 22\n")
    reading = read_all(lines(tmp_path / "s.jsonl", *session), store)
    rows = [(row.query, row.answer, texts(row)) for row in reading.rows]
    assert rows == [
        ("Dentist?", "On the 18th.", ["**Name:** Lea"]),
        ("And now?", "Friday.", ["**Name:** Lea", "Uses Node 22"]),
    ]
    remarks = reading.account.check().remarks
    assert remarks["memories of the store from a day after the question"] == 2
    assert remarks["entries of the store that are no memory: a label with nothing behind it"] == 1


def test_pieces_of_notes_that_a_search_found():
    def answered(tool, result):
        call = {"id": "1", "function": {"name": tool, "arguments": "{}"}}
        found = {"role": "tool", "tool_call_id": "1", "content": json.dumps(result)}
        [row] = read_all(
            [{"messages": [ASK, {"role": "assistant", "tool_calls": [call]}, found, SAY]}]
        ).rows
        return [(memory.text, memory.created_at) for memory in row.memories]

    snippet = {"path": "memory/2026-06-08.md", "snippet": "- On the 18th\n- Line 5", "score": 0.5}
    expected = [("On the 18th", "2026-06-08"), ("Line 5", "2026-06-08")]
    assert answered("memory_search", {"results": [snippet]}) == expected
    note = {"path": "memory/2026-06-08.md", "text": "# 8 June\n\n- On the 18th\n- Line 5"}
    assert answered("memory_get", note) == expected


def test_the_second_of_a_fact_is_cut_off():
    context = "<FACTS>\n- Ana rows. (2024-11-14 02:03:58+00:00 - present)\n</FACTS>"
    assert system_memories(context) == [{"text": "Ana rows. (2024-11-14 - present)"}]
