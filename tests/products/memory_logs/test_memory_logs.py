"""Memory logs: the real shapes of three systems, redaction that nothing survives, consent,
and the way to an example.
"""

import gzip
import json
import random
import re

import pandas as pd
import pytest
from builder_server import Builder, endpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.products.dataset import consent as d
from memcalib.products.dataset import memory_drafts as ml
from memcalib.products.memory_logs import admission
from memcalib.products.memory_logs import exports as me
from memcalib.products.memory_logs import formats as mf
from memcalib.products.shared import redaction as r
from memcalib.products.dataset.writing import to_example
from memcalib.construction import AnnotationReply
from memcalib.products.shared.grounding import short_stems
from memcalib.products.dataset.writing import RUBRICS
from memcalib.products.dataset.stages import Draft, Drop
from memcalib.inference.endpoint import Endpoint
from memcalib.inference.client import Client, run_async
from memcalib.products.micro.practice.builder import make_annotation, make_rubrics
from memcalib.products.micro.practice.source import micro_log
from memcalib.products.micro.world import make_examples
from memcalib.problem import check_example
from memcalib.io.records import DataError
from memcalib.products.shared.dropped import Dropped
from memcalib.products.dataset.stages import run_stage

PLAIN = {
    "text": "The user is allergic to peanuts.",
    "id": "7",
    "score": 0.81,
    "created_at": "2025-03-02",
}
MEM0 = {
    "id": "0d3f",
    "memory": "Likes to bake on Sundays",
    "hash": "91aa",
    "metadata": {"category": "hobbies"},
    "score": 0.42,
    "created_at": "2025-03-02T10:29:36.630547-07:00",
    "updated_at": None,
    "user_id": "u-17",
    "categories": ["hobbies"],
}
STORE = {
    "namespace": ["memories", "u-17"],
    "key": "c1",
    "value": {"kind": "Memory", "content": {"content": "The user moved to Leeds."}},
    "created_at": "2025-03-02T10:29:36+00:00",
    "updated_at": "2025-03-02T10:29:36+00:00",
    "score": 0.5,
}
LETTA = {
    "id": "passage-4",
    "timestamp": "2025-03-02T10:29:36+00:00",
    "content": "The user plays chess.",
    "tags": ["games"],
    "relevance": {"rrf_score": 0.03, "vector_rank": 1},
}
PASSAGE = {
    "id": "passage-5",
    "text": "The user sings.",
    "created_at": "2025-03-02T10:29:36.117Z",
    "embedding": [0.1],
    "tags": [],
}
ROW = {"id": "q1", "query": "What can I bake for the office?", "memories": [PLAIN], "consent": True}


def jsonl(path, rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows),
        encoding="utf-8",
    )
    return path


def read(path, store=None):
    read_rows = [*mf.read_log(path, store)]
    return [x for x in read_rows if isinstance(x, me.LogRow)], [
        x for x in read_rows if isinstance(x, Dropped)
    ]


# shapes


@pytest.mark.parametrize(
    ("answer", "system", "text"),
    [
        ([PLAIN], "plain", "The user is allergic to peanuts."),
        ([PASSAGE], "plain", "The user sings."),
        ([MEM0], "mem0", "Likes to bake on Sundays"),
        (
            {"results": [MEM0], "relations": [{"source": "a", "relationship": "b", "target": "c"}]},
            "mem0",
            "Likes to bake on Sundays",
        ),
        ([STORE], "langgraph", "The user moved to Leeds."),
        ({"items": [STORE]}, "langgraph", "The user moved to Leeds."),
        (json.dumps([STORE]), "langgraph", "The user moved to Leeds."),
        ({"count": 1, "results": [LETTA]}, "letta", "The user plays chess."),
    ],
)
@pytest.mark.parametrize("field", ["response", "results", "memories"])
def test_what_systems_return_is_read(tmp_path, answer, system, text, field):
    log = jsonl(tmp_path / "log.jsonl", [{"query": "Any plans?", field: answer}])
    [row], losses = read(log)
    assert (row.system, row.memories[0].text, row.memories[0].created_at) == (
        system,
        text,
        "2025-03-02",
    )
    assert row.id == "line-1" and not losses and row.consent is None


def test_search_responses_spread_into_the_row(tmp_path):
    log = jsonl(
        tmp_path / "log.jsonl",
        [
            {"query": "a?", "user_id": 17} | {"results": [MEM0]},
            {"query": "b?"} | {"count": 1, "results": [LETTA]},
        ],
    )
    rows, _ = read(log)
    assert [row.user for row in rows] == ["17", ""] and [row.memories[0].score for row in rows] == [
        0.42,
        0.03,
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"content": "a b"}, "a b"),
        ({"kind": "Memory", "content": "a b"}, "a b"),
        (
            {"kind": "T", "content": {"subject": "x", "object": "y", "context": None}},
            "subject: x; object: y",
        ),
        ({"data": "a b"}, "a b"),
        ({"food": "pizza", "times": 3, "tags": ["a"]}, 'food: pizza; times: 3; tags: ["a"]'),
        ({"text": "a b", "mood": "good"}, "text: a b; mood: good"),
        ({"rules": {"short": True}}, "rules: short: true"),
    ],
)
def test_values_of_a_store_become_text(value, text):
    assert me.value_text(value) == text


def test_javascript_spelling_of_a_store_item():
    item = {
        "namespace": ["m"],
        "key": "c",
        "value": {"text": "x"},
        "createdAt": "2025-03-02T10:29:36Z",
        "updatedAt": "2025-03-02T10:29:36Z",
    }
    row = me.to_log_row({"query": "?", "items": [item]})
    assert row.memories[0].created_at == "2025-03-02" and row.memories[0].text == "x"


def test_a_letta_result_without_a_time():
    row = me.to_log_row(
        {"query": "?", "results": [LETTA | {"timestamp": "Unknown", "relevance": None}]}
    )
    assert row.memories[0].created_at == "" and row.memories[0].score is None


# validation

SECRET = "hunter2@example.org"


@pytest.mark.parametrize(
    ("change", "rule", "shape"),
    [
        ({"query": ""}, "query", "text of 0 characters"),
        ({"query": None}, "query", "nothing"),
        ({"query": 7}, "query", "a number"),
        ({"memories": []}, "memories", "none"),
        ({"memories": [7]}, "memory shape", "a number as memory 1"),
        ({"memories": [" "]}, "memory text", "text of 1 character in memory 1"),
        ({"memories": [[SECRET, 1]]}, "memory shape", "a list of 2 as memory 1"),
        ({"memories": [{"fact": [SECRET]}]}, "memory text", "a list of 1 in memory 1"),
        (
            {"memories": [{"fact": "a", "invalid_at": SECRET}]},
            "memory shape",
            "an object with fact, invalid_at as memory 1",
        ),
        (
            {"memories": [{"timestamp": "2025-03-02", "role": "user"}]},
            "memory text",
            "nothing in memory 1",
        ),
        (
            {"memories": [{"source": [SECRET], "relationship": "a", "target": "b"}]},
            "memory shape",
            "an object with relationship, source, target as memory 1",
        ),
        ({"memories": [{"page_content": 7}]}, "memory text", "a number in memory 1"),
        (
            {"memories": [PLAIN, {"note": SECRET}]},
            "memory shape",
            "an object with note as memory 2",
        ),
        ({"memories": [{SECRET: 1}]}, "memory shape", "an object with 1 field as memory 1"),
        ({"memories": [{"text": ""}]}, "memory text", "text of 0 characters in memory 1"),
        ({"memories": [{"text": [SECRET]}]}, "memory text", "a list of 1 in memory 1"),
        (
            {"memories": [{"text": "a", "score": SECRET}]},
            "memory score",
            "text of 19 characters in memory 1",
        ),
        ({"memories": [{"text": "a", "score": True}]}, "memory score", "true or false in memory 1"),
        ({"consent": "yes"}, "consent", "'yes'"),
        ({"consent": " "}, "consent", "' '"),
        ({"consent": 1}, "consent", "a number"),
        ({"consent": [SECRET]}, "consent", "a list of 1"),
        ({"id": {"a": SECRET}}, "id", "an object with a"),
        ({"user": True}, "user", "true or false"),
        ({"userId": [SECRET]}, "userId", "a list of 1"),
        ({"answer": [SECRET]}, "answer", "a list of 1"),
        ({"licence": 4}, "licence", "a number"),
    ],
)
def test_each_fault_of_a_row_is_named_and_repeats_nothing(tmp_path, change, rule, shape):
    log = jsonl(tmp_path / "log.jsonl", [ROW, "\n", {**ROW, "id": "q2", **change}])
    rows, [loss] = read(log)
    assert len(rows) == 1 and (loss.rule, loss.found, loss.line, loss.file) == (
        rule,
        shape,
        3,
        "log.jsonl",
    )
    assert loss.allowed and SECRET not in str(loss)


def test_numbers_without_end(tmp_path):
    endless = '{"query": "?", "memories": [{"text": "a", "score": Infinity}]}\n'
    rows, [loss] = read(jsonl(tmp_path / "log.jsonl", [ROW, endless]))
    assert len(rows) == 1 and loss.found == "a number without end in memory 1"
    none = '{"query": "?", "memories": [{"text": "a", "score": NaN}]}\n'
    [_, row], losses = read(jsonl(tmp_path / "log.jsonl", [ROW, none]))
    assert row.memories[0].score is None and not losses


def test_broken_lines_do_not_show_themselves(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(json.dumps(ROW).encode() + b'\n{"query": "My PIN is 4711\n' + b"[1]\n")
    rows, losses = read(log)
    assert [loss.rule for loss in losses] == ["json", "shape"] and len(rows) == 1
    assert "4711" not in str(losses)


def test_repeated_ids(tmp_path):
    rows, losses = read(
        jsonl(tmp_path / "log.jsonl", [ROW, ROW, ROW | {"id": 5}, ROW | {"id": "5"}])
    )
    assert [row.id for row in rows] == ["q1", "5"] and [
        (loss.rule, loss.line) for loss in losses
    ] == [
        ("id", 2),
        ("id", 4),
    ]


@pytest.mark.parametrize(
    ("name", "content", "shape"),
    [
        ("a.jsonl", '{"title": "x", "body": "secret"}\n', "rows with the fields title, body"),
        ("a.jsonl", "", "nothing in which memories were retrieved"),
        ("a.jsonl", "not json\n", "nothing in which memories were retrieved"),
        ("a.json", "3", "a number"),
    ],
)
def test_another_file_is_told_of_maps_and_of_the_formats_in_the_help(
    tmp_path, name, content, shape
):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        [*mf.read_log(tmp_path / name)]
    message = str(error.value)
    assert shape in message and "secret" not in message and str(tmp_path) not in message
    assert all(word in message for word in ("--map query=", "`memcalib logs --help` names"))
    assert len(error.value.violations) == 1
    assert all(word in " ".join(mf.known_shapes()) for word in ("memory_ids", "agents"))


@pytest.mark.parametrize(
    ("name", "content", "shape", "help_"),
    [
        ("a.json", json.dumps({"results": [MEM0]}), "memories without queries", "--store"),
        ("a.jsonl", json.dumps(STORE) + "\n", "memories without queries", "--store"),
        (
            "a.af",
            json.dumps({"agents": [{"messages": []}], "blocks": []}),
            "the format 'letta agent file'",
            "an agent file with memory",
        ),
    ],
)
def test_a_file_without_a_row_is_refused_by_its_name(tmp_path, name, content, shape, help_):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        [*mf.read_log(tmp_path / name)]
    assert shape in str(error.value) and help_ in str(error.value)


def test_missing_and_strange_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        [*mf.read_log(tmp_path / "none.jsonl")]
    with pytest.raises(FileNotFoundError):
        [*mf.read_log(tmp_path / "none.af")]
    (tmp_path / "log.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"unknown suffix '.xlsx'"):
        [*mf.read_log(tmp_path / "log.xlsx")]


@pytest.mark.parametrize("form", ["lines", "array", "one", "gzip", "parquet", "lines as json"])
def test_all_forms_of_a_file(tmp_path, form):
    rows = [ROW, ROW | {"id": "q2"}]
    path = tmp_path / {
        "array": "l.json",
        "one": "l.json",
        "gzip": "l.jsonl.gz",
        "parquet": "l.parquet",
        "lines as json": "l.json",
    }.get(form, "l.jsonl")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if form == "gzip":
        path.write_bytes(gzip.compress(lines.encode()))
    elif form == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text(
            {"array": json.dumps(rows, indent=1), "one": json.dumps(ROW, indent=1)}.get(form, lines)
        )
    read_rows, losses = read(path)
    assert [row.id for row in read_rows] == (
        ["q1"] if form == "one" else ["q1", "q2"]
    ) and not losses


def test_rows_of_a_megabyte(tmp_path):
    log = jsonl(
        tmp_path / "log.jsonl",
        [ROW, {**ROW, "id": "big", "memories": [{"text": "word " * 200_000}]}],
    )
    result = ml.memory_drafts(log)
    assert [drop.rule for drop in result.dropped] == ["memory length"] and len(result.kept) == 1


# Letta's agent file


def tool_call(name, call="c1", **arguments):
    return {
        "id": call,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def parts(text):
    return [{"type": "text", "text": text}]


def packed(message):
    return json.dumps(
        {"status": "OK", "message": message, "time": "2025-03-02 10:00:00 AM UTC+0000"}
    )


def user_message(text):
    return {
        "role": "user",
        "content": parts(
            json.dumps({"type": "user_message", "message": text, "time": "2025-03-02"})
        ),
    }


SEARCH = {
    "role": "assistant",
    "content": parts("Let me look."),
    "tool_calls": [tool_call("archival_memory_search", query="chess")],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": parts(packed(str([LETTA])))}
SENT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [tool_call("send_message", "c2", message="A game?")],
}


def rows_of_agent(agent):
    """The rows of an agent, whose account balances."""
    reading = mf.LogContext()
    rows = list(mf.found_rows([{"agents": [agent]}], reading))
    reading.account.check()
    return rows


def turns(*messages):
    return [
        row.fields
        for row in rows_of_agent(
            {
                "id": "agent-0",
                "messages": [{"id": f"message-{i}"} | m for i, m in enumerate(messages)],
            }
        )
    ]


def test_a_turn_with_a_search_is_a_row():
    [turn] = turns(
        {"role": "system", "content": parts("You are.")},
        user_message("Any plans?"),
        SEARCH,
        RESULT,
        SENT,
        user_message("Fine."),
        SENT,
    )
    assert turn == {
        "id": "agent-0/message-1",
        "query": "Any plans?",
        "answer": "A game?",
        "turns": [],
        "memories": [LETTA],
    }


def test_newer_agents_answer_in_their_own_words_and_return_in_parallel():
    twice = {
        "role": "assistant",
        "tool_calls": [
            tool_call("archival_memory_search", "a", query="x"),
            tool_call("archival_memory_search", "b", query="y"),
        ],
    }
    other = LETTA | {"id": "passage-9", "content": "The user swims."}
    returns = [
        {"tool_call_id": "a", "status": "success", "func_response": packed([LETTA])},
        {"tool_call_id": "b", "func_response": packed([other, LETTA])},
    ]
    both = {"role": "tool", "content": parts("both"), "tool_returns": returns}
    [turn] = turns(
        {"role": "user", "content": "Any plans?"},
        twice,
        both,
        {"role": "assistant", "content": parts("Swim.")},
    )
    assert (
        turn["memories"] == [LETTA, other]
        and turn["answer"] == "Swim."
        and turn["query"] == "Any plans?"
    )


def test_older_results_are_pairs_and_results_of_other_tools_are_none():
    old = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": parts(packed(str(([{"timestamp": "2025-03-02", "content": "Chess."}], 1)))),
    }
    stranger = {"role": "tool", "tool_call_id": "zz", "content": parts(packed(str([LETTA])))}
    [turn] = turns(user_message("Any plans?"), SEARCH, old, stranger, SENT)
    assert [item["content"] for item in turn["memories"]] == ["Chess."]


@pytest.mark.parametrize("kind", ["heartbeat", "login", "system_alert"])
def test_events_are_not_the_users_words(kind):
    event = {
        "role": "user",
        "content": parts(json.dumps({"type": kind, "message": "x", "reason": "x"})),
    }
    assert turns(event, SEARCH, RESULT, SENT) == []
    assert len(turns(user_message("Any plans?"), SEARCH, event, RESULT, SENT)) == 1


def test_results_that_were_cut_off_drop_the_turn(tmp_path):
    cut = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": parts(packed(str([LETTA])[:40] + "... [NOTE: function output was truncated]")),
    }
    agent = {
        "agents": [
            {
                "id": "a",
                "messages": [
                    user_message("Any plans?"),
                    SEARCH,
                    cut,
                    SENT,
                    user_message("And now?"),
                    SEARCH,
                    RESULT,
                    SENT,
                ],
            }
        ],
        "blocks": [],
    }
    (tmp_path / "agent.af").write_text(json.dumps(agent, indent=2))
    [row], [loss] = read(tmp_path / "agent.af")
    assert (
        row.query == "And now?"
        and row.system.startswith("letta")
        and row.answer == "A game?"
        and (loss.rule, loss.found[-19:]) == ("memories", "that cannot be read")
    )


def test_the_legacy_agent_file_and_damaged_ones(tmp_path):
    legacy = {
        "agent_type": "memgpt_agent",
        "core_memory": [],
        "name": "ann",
        "messages": [user_message("Any plans?"), SEARCH, RESULT, SENT],
        "version": "0.6",
    }
    (tmp_path / "a.af").write_text(json.dumps(legacy))
    [row], _ = read(tmp_path / "a.af")
    assert row.id == "ann/0"
    odd = [
        None,
        "x",
        {
            "role": "assistant",
            "tool_calls": [
                None,
                {"function": None},
                {"function": {"name": "archival_memory_search"}},
            ],
        },
    ]
    assert turns(*[m for m in odd if isinstance(m, dict)]) == [] and [
        *rows_of_agent({"messages": odd})
    ] == [] == [*rows_of_agent({})]


@given(st.text(max_size=80), st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=4))
def test_whatever_is_said_in_an_agent_file_is_read_back(question, texts):
    items = [LETTA | {"id": str(i), "content": text} for i, text in enumerate(texts)]
    for message in (str(items), items, str((items, len(items)))):
        read_turns = turns(
            user_message(question),
            SEARCH,
            {"role": "tool", "tool_call_id": "c1", "content": parts(packed(message))},
            SENT,
        )
        assert [turn["query"] for turn in read_turns] == ([question] if question else [])
        assert not read_turns or read_turns[0]["memories"] == items


# a log of ids beside an export


@pytest.mark.parametrize("form", ["results", "lines", "items"])
def test_ids_are_joined_with_the_export(tmp_path, form):
    other = (
        MEM0 | {"id": "5e", "memory": "Moved to Leeds"}
        if form != "items"
        else STORE | {"key": "5e", "value": {"content": "Moved to Leeds"}}
    )
    first = MEM0 if form != "items" else STORE | {"key": "0d3f"}
    content = {
        "results": json.dumps({"results": [first, other]}),
        "items": json.dumps({"items": [first, other]}),
    }
    export = tmp_path / ("store.jsonl" if form == "lines" else "store.json")
    export.write_text(
        content.get(form) or "".join(json.dumps(item) + "\n" for item in (first, other))
    )
    log = jsonl(
        tmp_path / "log.jsonl",
        [{"query": "a?", "memory_ids": ["5e", "0d3f"]}, {"query": "b?", "memory_ids": ["gone"]}],
    )
    [row], [loss] = read(log, export)
    assert (
        row.memories[0].text == "Moved to Leeds"
        and len(row.memories) == 2
        and loss.rule == "id not in the store"
        and loss.found == "1 id that is not in the store"
    )


def test_an_export_without_memories(tmp_path):
    (tmp_path / "store.json").write_text('{"users": [1]}')
    with pytest.raises(DataError, match="no memory"):
        read(jsonl(tmp_path / "log.jsonl", [ROW]), tmp_path / "store.json")


# redaction


def slow_luhn(digits):
    total = 0
    for position, digit in enumerate(reversed([int(c) for c in digits])):
        value = digit if position % 2 == 0 else 2 * digit
        total += value // 10 + value % 10
    return total % 10 == 0


@given(st.from_regex("[2-6][0-9]{12,18}", fullmatch=True))
def test_cards_against_the_sum_of_digits(digits):
    assert r.is_card(digits) == slow_luhn(digits) == r.is_card("-".join(digits))


def card(rng):
    head = rng.choice("3456") + "".join(rng.choice("0123456789") for _ in range(14))
    return next(head + last for last in "0123456789" if slow_luhn(head + last))


def iban(rng):
    def figures(n):
        return "".join(rng.choice("0123456789") for _ in range(n))

    def letters(n):
        return "".join(rng.choice("ABCDEFGH") for _ in range(n))

    country, account = rng.choice(
        [
            ("DE", figures(18)),
            ("GB", letters(4) + figures(14)),
            ("NO", figures(11)),
            ("FR", figures(23)),
        ]
    )
    number = int("".join(str(int(c, 36)) for c in account + country)) * 100
    return f"{country}{98 - number % 97:02d}{account}"


@given(st.randoms(use_true_random=False))
def test_account_numbers_and_cards_are_found_in_groups_or_not(rng):
    for value, rule in ((card(rng), r.CARD), (iban(rng), r.IBAN)):
        groups = [value[i : i + 4] for i in range(0, len(value), 4)]
        for text in (value, *(mark.join(groups) for mark in " .-_/")):
            [(start, end)] = rule.find(f"It is {text}.")
            assert f"It is {text}."[start:end] == text


def test_one_wrong_figure_is_another_number():
    rng = random.Random(1)
    for _ in range(200):
        value = iban(rng)
        position = rng.randrange(8, 15)
        wrong = value[:position] + ("1" if value[position] != "1" else "2") + value[position + 1 :]
        assert r.is_account(value) and not r.is_account(wrong)


SECRETS = {
    "mail": lambda rng: (
        f"{rng.choice(['anna', 'Jo.B+x', 'k_9'])}{rng.randint(0, 99)}"
        f"@{rng.choice(['example.org', 'mail.example.co.uk'])}"
    ),
    "card": card,
    "iban": iban,
    "ip": lambda rng: f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(1, 255)}",
    "phone": lambda rng: f"+49 {rng.randint(100, 999)} {rng.randint(100000, 9999999)}",
    "key": lambda rng: "sk-" + "".join(rng.choice("abcdefgh0123") for _ in range(24)),
    "handle": lambda rng: f"@user_{rng.randint(10, 999)}",
    "name": lambda rng: rng.choice(
        ["Annabel", "Zwerling", "Omar Haddad", "ZWERLING", "omar haddad"]
    ),
}
PEOPLE = ["Annabel", "Zwerling", "Omar Haddad"]
FILLER = [
    "The user swims.",
    "Meet at 12:30 on 2024-05-01!",
    "costs 1,200.50",
    "(see below)",
    "wrote to",
    "-",
    "Version 3.11",
    "[e-mail 3]",
    "ward 12B",
    "\n",
]
REDACTOR = r.Redactor((*r.RULES, r.name_rule(PEOPLE)))


@st.composite
def private_texts(draw):
    rng = draw(st.randoms(use_true_random=False))
    values = [
        SECRETS[draw(st.sampled_from(sorted(SECRETS)))](rng) for _ in range(draw(st.integers(1, 4)))
    ]

    def text():
        return " ".join(
            draw(st.sampled_from([*FILLER, *values])) for _ in range(draw(st.integers(1, 8)))
        )

    return [text() for _ in range(draw(st.integers(1, 4)))], values


@given(private_texts())
def test_no_value_survives_and_twice_is_once(private):
    texts, values = private
    redacted = REDACTOR.row(texts)
    for value in values:
        for text in redacted.texts:
            assert not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.I), (value, text)
    assert (
        REDACTOR.row(redacted.texts).texts == redacted.texts
        and not REDACTOR.row(redacted.texts).places
    )


@given(private_texts())
def test_the_same_value_has_the_same_placeholder_everywhere_in_a_row(private):
    texts, values = private
    marked = [f"{text} ~ {values[0]} ~" for text in texts]
    placeholders = {
        text.split(" ~ ")[-2 if text.endswith("~") and text.count(" ~ ") > 1 else -1].removesuffix(
            " ~"
        )
        for text in REDACTOR.row(marked).texts
    }
    assert len(placeholders) == 1 and re.fullmatch(r"\[[\w -]+ \d+\]", placeholders.pop())


@given(private_texts(), private_texts())
def test_rows_know_nothing_of_each_other(one, other):
    alone = REDACTOR.row(one[0]).texts
    REDACTOR.row(other[0])
    assert REDACTOR.row(one[0]).texts == alone


@given(st.lists(st.text(max_size=60), max_size=4))
def test_any_text_can_be_redacted_and_again(texts):
    redacted = REDACTOR.row(texts)
    assert REDACTOR.row(redacted.texts).texts == redacted.texts and len(redacted.texts) == len(
        texts
    )


@given(private_texts())
def test_what_is_no_value_stays(private):
    texts, _ = private
    plain = [
        re.sub(r"\S*[@\d]\S*|\b(?:annabel|zwerling|omar|haddad)\b", "x", text, flags=re.I)
        for text in texts
    ]
    assert REDACTOR.row(plain).texts == plain


def test_numbers_count_in_each_row_from_one_past_those_that_stand_there():
    texts = ["[e-mail 7] and a@example.org, [phone 2]", "b@example.org A@example.org"]
    assert r.Redactor().row(texts).texts == [
        "[e-mail 7] and [e-mail 8], [phone 2]",
        "[e-mail 9] [e-mail 8]",
    ]


def test_a_value_known_by_its_context_is_found_without_it():
    texts = [
        "my password is tulip7, ok",
        "the Tulip7 again; tulip70 is another",
        "https://x.example/?id=tulip7",
    ]
    assert r.Redactor().row(texts).texts == [
        "my password is [key 1], ok",
        "the [key 1] again; tulip70 is another",
        "https://x.example/?[query 1]",
    ]


@pytest.mark.parametrize(
    ("user", "texts", "after"),
    [
        ("alice", ["Alice swims, alice_b too; malice"], ["[user] swims, alice_b too; malice"]),
        (
            "a@example.org",
            ["Write to a@example.org or b@example.org"],
            ["Write to [user] or [e-mail 1]"],
        ),
        ("user", ["The user swims."], ["The user swims."]),
        ("my", ["my dog"], ["my dog"]),
        ("Will", ["Will it?"], ["Will it?"]),
        ("u-17", ["u-17 and u-170"], ["[user] and u-170"]),
    ],
)
def test_the_one_who_asks(user, texts, after):
    redacted = r.Redactor().row(texts, user)
    assert redacted.texts == after and r.Redactor().row(redacted.texts, user).texts == after


@pytest.mark.parametrize(
    ("people", "text", "after"),
    [
        (
            ["Anna Berg"],
            "anna, Anna Berg, BERG and Annabel Berger",
            "[person 1], [person 1], [person 1] and Annabel Berger",
        ),
        (
            ["Anna Berg", "Anna Lee"],
            "Anna Berg met Anna Lee, then Anna",
            "[person 1] met [person 2], then [person 3]",
        ),
        ([["Robert Poe", "Bob"]], "Bob is Robert's name", "[person 1] is [person 1]'s name"),
        (["Will Poe"], "Will will ask", "[person 1] will ask"),
        (
            ["Jean-Luc O'Brien"],
            "jean-luc o’brien and Jean Luc",
            "[person 1] and [person 1] [person 1]",
        ),
        (["José"], "Jose\u0301 came", "[person 1] came"),
        (["小明"], "我和小明去", "我和[person 1]去"),
        (["X"], "x marks X", "x marks X"),
        ([""], "nobody", "nobody"),
    ],
)
def test_names(people, text, after):
    redactor = r.Redactor((r.name_rule(people),))
    assert redactor.row([text]).texts == [after] and redactor.row([after]).texts == [after]


def test_a_long_list_of_names():
    people = [
        (
            f"Name{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)} "
            f"Surname{chr(97 + i % 26)}x"
        )
        for i in range(10_000)
    ]
    redactor = r.Redactor((r.name_rule(people),))
    row = redactor.row(["Nameaaa is here. " * 300, "Namebaa Surnamebx and Surnamebx"])
    assert row.texts[0] == "[person 1] is here. " * 300 and "Name" not in row.texts[1]


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "1 ",
        "1",
        "a.",
        "a@",
        "http://",
        "-",
        "password is ",
        "DE12 ",
        ":a",
        "@a",
        "pin:",
        "-----BEGIN PRIVATE KEY-----",
        "0",
        "+1 ",
        "sk-",
    ],
)
def test_endless_texts_are_redacted_once_and_for_all(unit):
    row = r.Redactor().row([unit * (10_000 // len(unit))])
    assert r.Redactor().row(row.texts).texts == row.texts


LOOKS = {
    "wide": lambda c: chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c,
    "nothing between": lambda c: c + "\u200b",
    "soft hyphen": lambda c: "\u00ad" + c,
    "other spaces and hyphens": lambda c: {" ": "\u00a0", "-": "\u2011"}.get(c, c),
    "thin spaces": lambda c: {" ": "\u2009", "-": "\u2212"}.get(c, c),
}


@pytest.mark.parametrize("kind", sorted(SECRETS))
@pytest.mark.parametrize("look", sorted(LOOKS))
@given(rng=st.randoms(use_true_random=False))
def test_values_that_look_the_same_are_the_same(look, kind, rng):
    value = SECRETS[kind](rng)
    typed = "".join(map(LOOKS[look], value))
    texts = [
        r.as_seen(text)[0]
        for text in REDACTOR.row([f"this ({typed}) here", f"this ({value}) here"]).texts
    ]
    assert texts[0] == texts[1] and re.fullmatch(r"this \(\[[\w -]+ 1\]\) here", texts[0])


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_each_character_of_the_look_knows_its_place(text):
    look, positions = r.as_seen(text)
    assert len(look) == len(positions) and list(positions) == sorted(positions)
    for number, (character, position) in enumerate(zip(look, positions, strict=True)):
        is_added = number + 1 < len(positions) and positions[number + 1] == position
        shown = " " if is_added else r.as_seen(text[position])[0]
        assert character == shown
    assert r.as_seen(look)[0] == look


@pytest.mark.parametrize(
    "text",
    [
        "jo at example dot org",
        "jo @ example.org",
        "jo%40example.org",
        "jo&#64;example.org",
        "4111.1111.1111.1111",
        "password：tulip7",
    ],
)
def test_other_spellings(text):
    assert re.search(r"\[(e-mail|card|key) 1\]", r.Redactor().row([f"It is {text} today"]).texts[0])


@pytest.mark.parametrize(
    "text", ["2 kg @ 3.50", "look at the dot", "0.41111111 of it", "Pages 12\u201314, 5² m"]
)
def test_other_spellings_of_nothing(text):
    assert r.Redactor().row([text]).texts == [text]


def test_a_passphrase_in_quotes_goes_as_a_whole():
    texts = r.Redactor().row(["my password is “four green hens”", "type four green hens"]).texts
    assert texts == ["my password is “[key 1]”", "type [key 1]"]


def test_a_pattern_that_never_ends_is_stopped_and_named(monkeypatch):
    monkeypatch.setattr(r, "_SECONDS", 0.2)
    redactor = r.load_redactor({"rules": [{"name": "a", "pattern": "(a|aa)+$"}]})
    with pytest.raises(
        ValueError,
        match=r"rules.0.pattern: found '\(a\|aa\)\+\$', which took more than 0.2 seconds",
    ):
        redactor.row(["a" * 60 + "!"])


@pytest.mark.parametrize("content", [b"rules: [", b"\xff\xfe\x00", b"names: none.txt", b"names: ."])
def test_rules_that_cannot_be_read(tmp_path, content):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ValueError, match="^r.yaml: "):
        r.load_redactor(tmp_path / "r.yaml")


def test_rules_of_ones_own(tmp_path):
    (tmp_path / "people.txt").write_text("Anna Berg\n\nRobert Poe, Bob\n")
    (tmp_path / "r.yaml").write_text(
        "rules:\n"
        "  - name: patient\n"
        "    pattern: 'P-(?P<value>\\d+)'\n"
        "names: people.txt\n"
        "without: [handle, phone]\n"
    )
    redactor = r.load_redactor(tmp_path / "r.yaml")
    assert redactor.row(["P-77 is Bob @bob +49 30 1234567"]).texts == [
        "P-[patient 1] is [person 1] @[person 1] +49 30 1234567"
    ]
    assert (
        r.load_redactor() == r.Redactor()
        and r.load_redactor({"names": None}).hash == r.Redactor().hash != redactor.hash
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], None),
        ([1], "found \\[1\\]; allowed: rules, names, regions and without"),
        ({"rule": []}, "found {'rule': \\[\\]}"),
        ({"rules": {"a": 1}}, "redaction: rules: found {'a': 1}; allowed: a list"),
        (
            {"rules": [{"name": "a"}]},
            "rules.0: found {'name': 'a'}; allowed: name, pattern or find",
        ),
        (
            {"rules": [{"name": "a", "pattern": "x", "find": "math:pi"}]},
            "allowed: name, pattern or find",
        ),
        (
            {"rules": [{"name": "a", "find": "math:pi"}]},
            "rules.0.find: found 'math:pi', which is not a function",
        ),
        (
            {"rules": [{"name": "a", "find": "no.where:x"}]},
            "rules.0.find: found 'no.where:x'; ModuleNotFoundError",
        ),
        ({"regions": ["Spain"]}, "regions: found 'Spain'; allowed: two-letter country codes"),
        ({"rules": [{"name": "a", "pattern": "x", "colour": 1}]}, "rules.0: found"),
        ({"rules": [{"name": "a", "pattern": "("}]}, "rules.0.pattern: found '\\('"),
        ({"rules": [{"name": "a", "pattern": "x*"}]}, "matches an empty string"),
        (
            {"rules": [{"name": "a", "pattern": "x", "label": "[a]"}]},
            "rules.0.label: found '\\[a\\]'",
        ),
        ({"rules": [{"name": "a", "pattern": "x", "label": "a 1"}]}, "rules.0.label"),
        ({"names": 3}, "names: found 3; allowed: a list"),
        ({"names": ["Anna", {"a": 2}]}, "names.1: found {'a': 2}; allowed: a name, or a list"),
        ({"names": [["Anna", 4]]}, "names.0: found \\['Anna', 4\\]"),
        ({"without": ["mail"]}, "without: found 'mail'; allowed: URL login"),
    ],
)
def test_settings_that_are_wrong(bad, message):
    if message is None:
        assert r.load_redactor(bad) == r.Redactor()
    else:
        with pytest.raises(ValueError, match=message):
            r.load_redactor(bad)


def test_own_rules_that_would_eat_placeholders_do_not():
    redactor = r.load_redactor(
        {
            "rules": [
                {"name": "figure", "pattern": r"\d"},
                {"name": "mail", "pattern": "e-mail", "label": "word"},
            ]
        }
    )
    redacted = redactor.row(["e-mail a@example.org 7"]).texts
    assert (
        redacted == ["[word 1] [e-mail 1] [figure 1]"] and redactor.row(redacted).texts == redacted
    )


# drafts


def row(**change):
    return me.LogRow(
        **(
            {
                "id": "q1",
                "query": "Which hose?",
                "memories": [{"text": "The garden is 18 m long."}],
                "consent": True,
                "line": 3,
            }
            | change
        )
    )


@pytest.mark.parametrize(
    "word", ["no", "Declined.", "opt-out", "not given", "n/a", "—", " ", "x" * 201]
)
def test_words_that_name_no_agreement(tmp_path, word):
    _, [loss] = read(jsonl(tmp_path / "log.jsonl", [ROW, ROW | {"id": "q2", "consent": word}]))
    assert loss.rule == "consent" and len(loss.found) < 60
    if word:
        with pytest.raises(ValueError, match="allowed: the name of an agreement"):
            admission.LogConfig(consent=word)


@pytest.mark.parametrize(
    ("consent", "config", "rule"),
    [
        (True, {}, None),
        ("trial", {}, None),
        (None, {}, "no consent"),
        (None, {"consent": "terms"}, None),
        (None, {"without_consent": True}, None),
        (False, {}, "consent refused"),
        (False, {"without_consent": True, "consent": "terms"}, "consent refused"),
    ],
)
def test_consent(consent, config, rule):
    why = admission.refusal(row(consent=consent), admission.LogConfig(**config))
    assert (why and why[0]) == rule


def test_consent_is_kept_with_each_row(tmp_path):
    rows = [
        {"query": f"{i}?", "memories": [PLAIN]} | consent
        for i, consent in enumerate(
            [{"consent": True}, {"consent": "trial"}, {}, {"consent": None}]
        )
    ]
    log = jsonl(tmp_path / "log.jsonl", rows)

    def consents(**config):
        return [
            draft.source["metadata"]["consent"]
            for draft in ml.memory_drafts(log, config=admission.LogConfig(**config)).kept
        ]

    assert consents() == ["given", "trial"]
    assert consents(consent="terms") == ["given", "trial", "terms", "terms"]
    assert consents(without_consent=True) == ["given", "trial", "none on record", "none on record"]


def slow_says_again(later, earlier):
    later_stems = short_stems(later)
    theirs = short_stems(earlier)
    endings = [theirs[i:] for i in range(len(theirs) + 1)]
    if any(ending[: len(later_stems)] == later_stems for ending in endings):
        return True
    odd = [w for w in {*later_stems, *theirs} if (w in later_stems) != (w in theirs)]
    return 5 * len(odd) <= len({*later_stems, *theirs}) and not any(
        re.search(r"[^a-z]", w) for w in odd
    )


@given(
    *[
        st.lists(
            st.sampled_from(["garden", "hose", "long", "pump", "water", "seed", "18", "19", "bed"]),
            max_size=8,
        ).map(" ".join)
    ]
    * 2
)
def test_repetition_against_a_slow_definition(later, earlier):
    assert admission.says_again(later, earlier) == slow_says_again(later, earlier)


@given(
    st.lists(
        st.sampled_from(
            [
                "The garden is 18 m.",
                "garden is 18 m",
                "The garden is 19 m.",
                "The user keeps bees.",
                "Bees",
            ]
        ),
        max_size=8,
    )
)
def test_the_first_of_those_that_say_the_same_is_kept(texts):
    first_indices = admission.distinct_memories(texts)
    assert first_indices == sorted(first_indices) and (not texts or first_indices[0] == 0)
    assert all(
        any(admission.says_again(texts[i], texts[j]) for j in first_indices)
        for i in range(len(texts))
    )
    assert admission.distinct_memories([texts[i] for i in first_indices]) == list(
        range(len(first_indices))
    )


def test_a_draft_has_everything_where_the_stages_look_for_it():
    memories = [
        {"text": f"Memory {name} is about {name}.", "score": i / 30, "created_at": "2025-01-01"}
        for i, name in enumerate("abcdefghijklmnopqrstuvwxy")
    ]
    draft, _ = ml.to_draft(
        row(memories=memories, answer="20 m.", domain="gardens", licence="MIT"),
        r.Redactor(),
        admission.LogConfig(memories=5),
        "u1",
    )
    assert (draft.query, draft.question, draft.answer, draft.domain, draft.source["licence"]) == (
        "Which hose?",
        "Which hose?",
        "20 m.",
        "gardens",
        "MIT",
    )
    assert len(draft.passages) == 5 and draft.source["metadata"]["retrieved"] == 25
    assert all(p.text == p.evidence and p.evidence in draft.context for p in draft.passages)
    assert (
        draft.source["metadata"]["ranks"] == [1, 2, 3, 4, 5]
        and len(draft.source["metadata"]["scores"]) == 5
    )


def test_ids_that_tell_something_are_replaced_and_stay_apart(tmp_path):
    ids = ["a@example.org", "b@example.org", "line-1", "jo17/q1", "plain"]
    log = jsonl(tmp_path / "log.jsonl", [ROW | {"id": name, "user": "jo17"} for name in ids])
    assert [draft.id for draft in ml.memory_drafts(log).kept] == [
        "line-1",
        "line-2",
        "line-1+",
        "line-4",
        "plain",
    ]


def test_rows_without_a_word_and_logs_without_a_row(tmp_path):
    log = jsonl(
        tmp_path / "log.jsonl", [ROW | {"memories": [{"text": "?!"}, {"text": "so be it"}]}]
    )
    result = ml.memory_drafts(log)
    assert [drop.rule for drop in result.dropped] == ["empty memories"]
    with pytest.raises(DataError, match="0 of 1 row accepted: 1 by empty memories"):
        result.require()
    with pytest.raises(DataError, match="0 of 1 rows"):
        d.plan_calls(result, {})


@given(st.lists(private_texts(), min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_nothing_private_is_left_anywhere_in_drafts_or_losses(tmp_path_factory, private_rows, rng):
    rows = []
    values = []
    for i, (texts, private_values) in enumerate(private_rows):
        values += private_values

        def pick(private_values=private_values, texts=texts):
            return rng.choice([rng.choice(private_values), *texts])

        fields = {
            "query": f"Which {pick()}?",
            "answer": pick(),
            "user": rng.choice(private_values),
            "id": rng.choice([f"q{i}", rng.choice(private_values)]),
        }
        terms = {
            "consent": f"agreement of {rng.choice(private_values)}",
            "licence": f"terms of {rng.choice(private_values)}",
        }
        rows.append(
            fields
            | terms
            | {
                "memories": [{"text": f"A memory of {text}"} for text in texts]
                + [{"text": f"It was {rng.choice(private_values)}"}]
            }
        )
        rows.append(
            fields
            | {
                "memories": [{"text": rng.choice(private_values)}] * 2,
                "consent": False,
                "id": None,
                "domain": rng.choice(private_values),
            }
        )
        rows.append(
            {
                "query": [rng.choice(private_values)],
                "memories": [{rng.choice(private_values): 1}],
                "id": rng.choice(private_values) + "x",
            }
        )
    log = jsonl(tmp_path_factory.mktemp("log") / "log.jsonl", rows)
    result = ml.memory_drafts(log, redactor=REDACTOR)
    written = "\n".join(
        [draft.to_json() for draft in result.kept]
        + [drop.to_json() for drop in result.dropped]
        + [str(d.summarise_terms(result.kept, result))]
    )
    for value in values:
        assert not re.search(
            rf"(?<!\w){re.escape(json.dumps(value)[1:-1])}(?!\w)", written, re.I
        ), value
    assert len(result.kept) + len(result.dropped) == len(rows)


def test_the_same_log_gives_the_same_drafts(tmp_path):
    log = jsonl(
        tmp_path / "log.jsonl", [ROW | {"id": f"q{i}", "user": f"u{i % 2}x"} for i in range(6)]
    )
    one = ml.memory_drafts(log)
    two = ml.memory_drafts(log)
    assert [draft.hash for draft in one.kept] == [draft.hash for draft in two.kept]
    assert {draft.source["metadata"]["user"] for draft in one.kept} == {"u1", "u2"}


# annotation

MEMORIES = ["The garden is 18 m long and has no tap.", "Likes to chat with Ben", "Ordered 3 roses."]


def draft_of(texts=MEMORIES, query="Which hose do you recommend?"):
    return ml.to_draft(
        row(query=query, memories=[{"text": text} for text in texts]),
        r.Redactor(),
        admission.LogConfig(),
    )[0]


def atom(passage, text, level="A", **change):
    action, plan = ("ignore", "Names one.") if level == "A" else ("apply", "Names a long one.")
    head = {"passage": passage, "text": text, "level": level, "reason": "so", "action": action}
    return head | {"without_memory": "Names one.", "with_memory": plan} | change


GOOD = [
    atom(1, "The user's garden is 18 m long.", "C"),
    atom(1, "The user's garden has no tap.", "B"),
    atom(2, "The user likes to chat with Ben."),
    atom(3, "The user ordered 3 roses."),
]


def faults(atoms, draft=None):
    return [
        (fault.item_id, fault.rule)
        for fault in ml.check_retrieved(
            draft or draft_of(), AnnotationReply.model_validate({"atoms": atoms})
        )
    ]


@pytest.mark.parametrize(
    ("atoms", "expected"),
    [
        (GOOD, []),
        ([], [("atoms", "atom count")]),
        (GOOD * 16, [("atoms", "atom count")]),
        (GOOD[:3], [("passages.3", "memory atoms"), ("passages.3", "incomplete")]),
        ([GOOD[0], *GOOD[2:]], [("passages.1", "incomplete")]),
        (
            [GOOD[0], atom(1, "The user's garden has a tap."), *GOOD[2:]],
            [("passages.1", "incomplete"), ("atoms.1", "grounding")],
        ),
        (
            [*GOOD[:2], atom(2, "The user likes to chat with a neighbour."), GOOD[3]],
            [("passages.2", "incomplete"), ("atoms.2", "grounding")],
        ),
        (
            [*GOOD[:3], atom(3, "The user ordered 5 roses.")],
            [("passages.3", "incomplete"), ("atoms.3", "grounding")],
        ),
        ([*GOOD, atom(3, "The user ordered 3 roses.")], [("atoms.4", "distinct")]),
        ([*GOOD, atom(9, "The user sings.")], [("atoms.4", "passage")]),
        ([*GOOD[:3], atom(3, "I ordered 3 roses.")], [("atoms.3", "first person")]),
        (
            [*GOOD[:3], atom(3, "The user ordered 3 roses.", "B", action="ignore")],
            [("atoms.3", "action")],
        ),
        (
            [*GOOD[:3], atom(3, "The user ordered 3 roses.", "B", with_memory="names one.")],
            [("atoms.3", "contrast")],
        ),
        (
            [*GOOD, atom(3, "The user sailed to Iceland with seven penguins.")],
            [("atoms.4", "grounding")],
        ),
    ],
)
def test_planted_faults_of_an_annotation(atoms, expected):
    assert faults(atoms) == expected


def test_a_later_memory_need_not_say_again_what_an_earlier_one_said():
    draft = draft_of(["The garden is 18 m long.", "The garden is 18 m long and the soil is wet."])
    assert len(draft.passages) == 2
    assert (
        faults(
            [atom(1, "The user's garden is 18 m long.", "C"), atom(2, "The user's soil is wet.")],
            draft,
        )
        == []
    )


def accept(atoms, draft=None):
    return ml.accept_retrieved(
        draft or draft_of(), AnnotationReply.model_validate({"atoms": atoms})
    )


def test_accepted_rows_have_the_memories_as_blocks_in_order():
    done = accept([GOOD[3], GOOD[2], GOOD[0], GOOD[1]])
    assert [block.memory_text for block in done.blocks] == MEMORIES and [
        block.parent_memory_id for block in done.blocks
    ] == ["m1", "m2", "m3"]
    assert [atom.atom_id for atom in done.atoms] == [
        "retrieved_01_a1",
        "retrieved_01_a2",
        "retrieved_02_a1",
        "retrieved_03_a1",
    ]
    assert {atom.origin for atom in done.atoms} == {"retrieved"} and all(
        atom.evidence in done.context for atom in done.atoms
    )


def test_rows_without_a_relevant_atom_and_rows_whose_query_tells_one_are_dropped():
    none = accept([{**entry, **atom(entry["passage"], entry["text"])} for entry in GOOD])
    assert isinstance(none, Drop) and (none.stage, none.reason) == (
        "annotation",
        "no bound or control atom",
    )
    leaked = accept(GOOD, draft_of(query="I ordered 3 roses; which hose?"))
    assert isinstance(leaked, Drop) and leaked.reason == "atom in query"


@given(st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_any_accepted_row_becomes_a_record_of_the_format(rng):
    words = ["garden", "hose", "pump", "seed", "spade", "roof", "fence", "apple", "pear", "plum"]
    texts = [
        f"The user's {word} is {rng.randint(2, 99)} m from the {rng.choice(words[5:])}."
        for word in rng.sample(words[:5], rng.randint(1, 5))
    ]
    draft = draft_of(texts, query="What now?")
    atoms = [atom(i, p.text, rng.choice("ABC")) for i, p in enumerate(draft.passages, 1)]
    done = accept(atoms, draft)
    if isinstance(done, Drop):
        assert all(entry["level"] == "A" for entry in atoms)
        return
    filled = done.model_copy(
        update={
            "atoms": [
                a.model_copy(update={"rubric": {"memory_usage_weight": "none"}}) for a in done.atoms
            ]
        }
    )
    example = ml.with_terms(to_example(filled), filled)
    record = json.loads(example.to_json())
    assert [v for v in check_example(record) if v.severity == "error"] == []
    assert [block["memory_text"] for block in record["memory_blocks"]] == [
        p.text for p in draft.passages
    ]
    assert record["source_consent"] == "given" and record["retrieval"]["retrieved"] == len(texts)


def micro_builder(messages, _):
    request = json.loads(messages[1]["content"])
    return json.dumps(
        {"annotation": make_annotation, "rubrics": make_rubrics}[request["task"]](request)
    )


def test_a_log_of_the_micro_world_becomes_the_examples_it_was_made_from(tmp_path):
    result = ml.memory_drafts(jsonl(tmp_path / "log.jsonl", micro_log(25, seed=3)))
    assert len(result.kept) == 25 and {
        draft.source["metadata"]["user"] for draft in result.kept
    } == {
        "u1",
        "u2",
        "u3",
        "u4",
        "u5",
    }
    with Builder(micro_builder) as server:
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        drafts = result.kept
        for stage in ml.MEMORY_STAGES:
            drafts = run_async(run_stage(stage, drafts, client, tmp_path / "build")).kept
        assert len(server.requests) == 2 * len(drafts)
    for draft, truth in zip(drafts, make_examples("long", 25, 3, "test"), strict=True):
        example = to_example(draft)

        def level_of(example_made):
            return {atom.text: atom.ideal for atom in example_made.atoms}

        assert level_of(example) == level_of(truth)
        assert [block.memory_text for block in example.blocks] == [
            block.atomic_concat_text for block in truth.blocks
        ]


# what is sent, and only after a yes


def rubric(level, text):
    weight, under = (
        ("none", "not applicable")
        if level == "A"
        else ("supporting" if level == "B" else "controlling", f"Nothing of this: {text}")
    )
    head = {
        "expected_answer_behavior": text,
        "memory_usage_weight": weight,
        "validity_scope": "all of it",
        "under_use": under,
    }
    uses = {
        "correct_use": f"Just right: {text}",
        "over_use": f"Only this: {text}",
        "forbidden_memory_role": "none",
    }
    return head | uses | {"failure_direction": "over", "observable_checks": [text]}


def play(messages, _):
    request = json.loads(messages[1]["content"])
    if request["task"] == "annotation":

        def level(index):
            return "C" if index == 1 else "A"

        atoms = [
            atom(
                p["index"],
                re.sub(r"^(\w)", lambda m: f"The user: {m[1]}", p["text"]),
                level(p["index"]),
            )
            for p in request["passages"]
        ]
        return json.dumps({"atoms": atoms})
    return json.dumps(
        {
            "rubrics": [
                {"atom_id": a["atom_id"], "usage_rubric": rubric(a["level"], a["text"])}
                for a in request["atoms"]
            ]
        }
    )


PRIVATE = ["jo@example.org", "4111 1111 1111 1111", "Ann Lee", "jo17", "hunter2x"]


def private_log(path):
    memories = [
        {"text": f"Garden of {PRIVATE[2]} has {n} beds, bill to {PRIVATE[0]}"} for n in (3, 4)
    ] + [{"text": f"Card {PRIVATE[1]}, password: {PRIVATE[4]}"}]
    rows = [
        {
            "query": f"Where do I plant number {i}, {PRIVATE[3]} asks?",
            "user": PRIVATE[3],
            "memories": memories,
            "consent": True,
        }
        for i in range(4)
    ]
    return jsonl(
        path,
        [
            *rows,
            rows[0] | {"consent": False, "query": "UNSEEN?"},
            rows[0] | {"consent": None, "query": "UNSEEN?"},
        ],
    )


def test_from_log_to_example_and_nothing_private_reaches_the_server(tmp_path):
    result = ml.memory_drafts(
        private_log(tmp_path / "log.jsonl"),
        redactor=r.Redactor((*r.RULES, r.name_rule(["Ann Lee"]))),
    )
    with Builder(play) as server:
        plan = d.plan_calls(result, {"builder": endpoint(server.url)})
        with pytest.raises(d.NotAgreed, match="--yes"):
            plan.agree()
        assert (
            server.requests == []
            and plan.calls[0].place == "this machine"
            and plan.calls[0].rows == 4
        )
        plan.agree(yes=True)
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        drafts = result.kept
        for stage in ml.MEMORY_STAGES:
            drafts = run_async(run_stage(stage, drafts, client, tmp_path / "build")).kept
        sent = json.dumps(server.requests)
    assert len(drafts) == 4 and "[e-mail 1]" in sent and "[person 1]" in sent
    examples = [ml.with_terms(to_example(draft), draft) for draft in drafts]
    everything = (
        sent
        + "".join(e.to_json() for e in examples)
        + str(plan)
        + d.terms_card(drafts, result)
        + d.preview(result.kept, 9)
    )
    everything += "".join(path.read_text() for path in (tmp_path / "build").glob("*.jsonl"))
    assert not any(secret.lower() in everything.lower() for secret in [*PRIVATE, "UNSEEN", "4111"])
    assert [level.wire for level in examples[0].levels.values()] == ["C", "A", "A"] and len(
        examples[0].blocks
    ) == 3


def test_messages_hold_the_fields_that_the_plan_names(tmp_path):
    draft = draft_of()

    def keys(stage, draft):
        return set(json.loads(stage.messages(draft)[1]["content"])) - {"task"}

    assert keys(ml.RETRIEVED, draft) == {"query", "passages", "answer"} and keys(
        RUBRICS, accept(GOOD)
    ) == {
        "domain",
        "query",
        "answer",
        "atoms",
    }
    assert d.SENT.keys() == {stage for stages in d.WORK.values() for stage in stages}


@pytest.mark.parametrize("answer", [False, None, 0, 1, "yes", "true", "--yes", [True]])
def test_only_true_is_a_yes(tmp_path, answer):
    plan = d.plan_calls(
        ml.memory_drafts(private_log(tmp_path / "log.jsonl")),
        {"builder": Endpoint(model="m", base_url="https://api.example.org/v1")},
    )
    with pytest.raises(d.NotAgreed) as error:
        plan.agree(answer)
    assert all(
        word in str(error.value)
        for word in (
            "m at api.example.org (another machine)",
            "rows: 4",
            "consent refused: 1",
            "no consent: 1",
            "--yes",
        )
    )


def test_roles_that_are_unknown(tmp_path):
    with pytest.raises(
        ValueError, match="roles: found 'judge'; allowed: builder, reviewer, reviewer2"
    ):
        d.plan_calls(
            ml.memory_drafts(private_log(tmp_path / "log.jsonl")), {"judge": Endpoint(model="m")}
        )


@pytest.mark.parametrize(
    ("url", "location"),
    [
        (None, "another machine"),
        ("http://127.0.0.1:1/v1", "this machine"),
        ("http://127.9.9.9/v1", "this machine"),
        ("http://[::1]:8000/v1", "this machine"),
        ("http://localhost/v1", "this machine"),
        ("http://192.168.1.4/v1", "a private network"),
        ("http://8.8.8.8/v1", "another machine"),
        ("http://127.0.0.1.example.org/v1", "another machine"),
        ("http://box/v1", "another machine"),
    ],
)
def test_where_an_endpoint_is(url, location):
    assert d.place_of(Endpoint(model="m", base_url=url)) == location


def test_left_names_counts_rows():
    drafts = [
        draft_of(["We met Omar in Lyon.", "Then Omar left."]),
        draft_of(["We met Omar here."]),
        draft_of(["nobody at all"]),
    ]
    names_left = d.left_names(drafts)
    assert (
        names_left["Omar"] == 2 and names_left["Lyon"] == 1 and list(names_left.index)[0] == "Omar"
    )


def test_tables_say_zero_for_rules_that_found_nothing(tmp_path):
    result = ml.memory_drafts(private_log(tmp_path / "log.jsonl"))
    table = result.table()
    assert (
        table.loc["e-mail"].tolist() == [4, 4, 8]
        and table.loc["IBAN"].tolist() == [0, 0, 0]
        and "user" in table.index
    )
    assert isinstance(result.kept[0], Draft)
