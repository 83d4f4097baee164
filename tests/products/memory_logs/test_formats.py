"""What each memory system leaves behind is read whole, or refused by name;
a row that has a key twice is refused.
"""

import csv
import io
import json

import pytest

from memcalib.products.shared.dropped import Dropped
from memcalib.io.jsonl import read_rows
from memcalib.io.records import DataError
from memcalib.products.dataset.consent import summarise_terms
from memcalib.products.dataset.memory_drafts import memory_drafts
from memcalib.products.memory_logs.exports import LogRow, day_of, to_log_row
from memcalib.products.memory_logs.files import _table_rows
from memcalib.products.memory_logs.formats import read_log

MADE = "2025-03-02T10:29:36Z"
EDGE = {
    "uuid": "e1",
    "name": "OWNS",
    "fact": "Mia owns a kayak",
    "created_at": MADE,
    "valid_at": MADE,
    "score": 0.7,
}
NODE = {
    "uuid": "n1",
    "name": "Kayak club",
    "summary": "Mia paddles there.",
    "labels": ["Entity"],
    "created_at": MADE,
}
EPISODE = {
    "uuid": "p1",
    "content": "My kayak is red.",
    "role": "Mia",
    "role_type": "user",
    "created_at": MADE,
}
NODE_SDK = {
    "id": "m1",
    "memory": "Mia paddles on Sundays",
    "userId": "mia-7",
    "createdAt": MADE,
    "score": 0.4,
}
RELATION = {"source": "mia-7", "relationship": "member_of", "destination": "kayak_club"}
DOCUMENT = {
    "page_content": "Mia's kayak is red.",
    "metadata": {"created_at": MADE, "user_id": "mia-7"},
}
CONTEXT = """FACTS and ENTITIES follow.
# format: FACT (Date range: from - to)
<FACTS>
  - Mia owns a kayak. (2024-05-01 - present)
  - Mia sold her bike. (2023-01-01 - 2024-01-01)
</FACTS>
<ENTITIES>
Kayak club: Mia paddles there.
</ENTITIES>"""


def read(path, *rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows),
        encoding="utf-8",
    )
    read_rows = [*read_log(path)]
    return [x for x in read_rows if isinstance(x, LogRow)], [
        x for x in read_rows if isinstance(x, Dropped)
    ]


@pytest.mark.parametrize(
    ("answer", "system", "texts", "day", "user"),
    [
        ({"results": [NODE_SDK]}, "mem0", ["Mia paddles on Sundays"], "2025-03-02", "mia-7"),
        (
            {"results": [NODE_SDK], "relations": [RELATION]},
            "mem0",
            ["Mia paddles on Sundays", "mia-7 member of kayak club"],
            "2025-03-02",
            "mia-7",
        ),
        (
            {"relations": [{"source": "a", "relationship": "b", "target": "c"}]},
            "mem0",
            ["a b c"],
            "",
            "",
        ),
        (
            {
                "status": "success",
                "data": [{"id": "m1", "memory": "Mia rows"}],
                "scope": {"user_id": "mia-7"},
            },
            "mem0",
            ["Mia rows"],
            "",
            "mia-7",
        ),
        (
            {"edges": [EDGE], "nodes": [NODE], "episodes": [EPISODE], "context": CONTEXT},
            "zep",
            ["Mia owns a kayak", "Kayak club: Mia paddles there.", "My kayak is red."],
            "2025-03-02",
            "",
        ),
        (
            {"edges": [EDGE | {"invalid_at": MADE}]},
            "zep",
            ["Mia owns a kayak (until 2025-03-02)"],
            "2025-03-02",
            "",
        ),
        ({"facts": ["Mia owns a kayak"]}, "plain", ["Mia owns a kayak"], "", ""),
        (
            {"context": CONTEXT},
            "zep",
            [
                "Mia owns a kayak. (2024-05-01 - present)",
                "Mia sold her bike. (2023-01-01 - 2024-01-01)",
                "Kayak club: Mia paddles there.",
            ],
            "",
            "",
        ),
        (
            {"memories": ["Mia owns a kayak", "Mia rows"]},
            "plain",
            ["Mia owns a kayak", "Mia rows"],
            "",
            "",
        ),
        ({"documents": [DOCUMENT]}, "langchain", ["Mia's kayak is red."], "2025-03-02", "mia-7"),
        (
            {"context": [DOCUMENT, [DOCUMENT, 0.3]]},
            "langchain",
            ["Mia's kayak is red."] * 2,
            "2025-03-02",
            "mia-7",
        ),
        (
            {"docs": [{"lc": 1, "type": "constructor", "id": ["langchain"], "kwargs": DOCUMENT}]},
            "langchain",
            ["Mia's kayak is red."],
            "2025-03-02",
            "mia-7",
        ),
        (
            {"results": [{"pageContent": "Mia rows.", "metadata": {}}]},
            "langchain",
            ["Mia rows."],
            "",
            "",
        ),
        (
            {
                "results": [
                    {"timestamp": MADE, "role": "user", "type": "user_message", "message": "I row."}
                ]
            },
            "letta",
            ["I row."],
            "2025-03-02",
            "",
        ),
    ],
)
def test_each_form_is_read_whole(tmp_path, answer, system, texts, day, user):
    for around in (answer, {"response": answer}):
        [row], losses = read(tmp_path / "log.jsonl", {"query": "Any plans?"} | around)
        assert not losses and [memory.text for memory in row.memories] == texts
        assert (row.system, row.memories[0].created_at, row.user) == (system, day, user)


def test_scores_of_pairs_and_of_edges():
    row = to_log_row({"query": "?", "docs": [[DOCUMENT, 0.25], [DOCUMENT, 0]], "edges": [EDGE]})
    assert [memory.score for memory in row.memories] == [0.25, 0, 0.7]


def test_the_statement_counts_users_of_the_node_package_and_their_name_is_taken_out(tmp_path):
    record = {
        "query": "Where does mia-7 row?",
        "results": [NODE_SDK],
        "relations": [RELATION],
        "consent": True,
    }
    (tmp_path / "log.jsonl").write_text(json.dumps(record) + "\n")
    result = memory_drafts(tmp_path / "log.jsonl")
    assert summarise_terms(result.kept, result)["users"] == 1
    assert (
        result.kept[0].query == "Where does [user] row?" and "mia-7" not in result.kept[0].to_json()
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"context": "A page about kayaks, long and without any fact."},
        {"response": "- Buy a kayak.\n- Row."},
        {"threads": [{"text": "Mia rows"}]},
    ],
)
def test_what_is_no_list_of_memories_is_refused_by_name(tmp_path, answer):
    good = {"query": "?", "memories": ["Mia rows"]}
    _, [loss] = read(tmp_path / "log.jsonl", good, {"query": "?"} | answer)
    assert (
        loss.rule == "shape"
        and "relations" in loss.allowed
        and "Mia" not in str(loss)
        and "kayak" not in str(loss)
    )


@pytest.mark.parametrize(
    ("timestamp", "day"),
    [
        (1740911376, "2025-03-02"),
        (1740911376.25, "2025-03-02"),
        (1740911376000, "2025-03-02"),
        (1740911376000000, "2025-03-02"),
        (1740911376000000000, "2025-03-02"),
        ("1740911376", "2025-03-02"),
        ("20250302", "2025-03-02"),
        ("2025-03-02 10:29:36", "2025-03-02"),
        (None, ""),
        (float("nan"), ""),
    ],
)
def test_times(timestamp, day):
    assert day_of(timestamp) == day


@pytest.mark.parametrize(
    "timestamp", [True, 0, 12, -1740911376, float("inf"), "last May", "", [2025]]
)
def test_times_that_are_none(timestamp):
    with pytest.raises(ValueError):
        day_of(timestamp)


# searches of a conversation in Letta's agent file


def turn(returned):
    call = {
        "id": "c1",
        "function": {"name": "conversation_search", "arguments": '{"query": "kayak"}'},
    }
    return {
        "agents": [
            {
                "id": "a",
                "messages": [
                    {"role": "user", "content": "Which colour was it?"},
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": returned},
                    {"role": "assistant", "content": "Red."},
                ],
            }
        ]
    }


ITEM = {"timestamp": MADE, "time_ago": "1d ago", "role": "user", "content": "My kayak is red."}


@pytest.mark.parametrize(
    ("returned", "texts"),
    [
        (str({"message": "Showing 1 results:", "results": [ITEM]}), ["My kayak is red."]),
        (
            json.dumps(
                {
                    "status": "OK",
                    "message": str({"message": "Showing 1 results:", "results": [ITEM]}),
                }
            ),
            ["My kayak is red."],
        ),
        (
            json.dumps(
                {
                    "status": "OK",
                    "message": (
                        'Showing 2 of 7 results (page 0/1): ["user - It is red.", "user - Yes."]'
                    ),
                }
            ),
            ["user - It is red.", "user - Yes."],
        ),
    ],
)
def test_a_search_of_the_conversation_is_a_row(tmp_path, returned, texts):
    (tmp_path / "a.af").write_text(json.dumps(turn(returned)))
    [row] = read_log(tmp_path / "a.af")
    assert [memory.text for memory in row.memories] == texts and row.answer == "Red."


@pytest.mark.parametrize(
    "returned", ["No results found.", str({"message": "No results found.", "results": []})]
)
def test_a_search_that_found_nothing_is_a_loss_by_name(tmp_path, returned):
    (tmp_path / "a.af").write_text(json.dumps(turn(returned)))
    [loss] = read_log(tmp_path / "a.af")
    assert loss.rule == "memories"


def test_an_agent_that_never_searched_is_not_called_empty(tmp_path):
    (tmp_path / "a.af").write_text(
        json.dumps({"agents": [{"messages": [{"role": "user", "content": "Hi"}]}]})
    )
    with pytest.raises(DataError, match="no answer to a user: 1") as error:
        [*read_log(tmp_path / "a.af")]
    assert "letta agent file" in str(error.value)


# keys that occur twice

TWICE = '{"query": "?", "memories": ["Mia rows"], "consent": false, "id": "q2", "consent": "study"}'


@pytest.mark.parametrize("form", ["lines", "array", "one"])
def test_a_row_with_two_consents_does_not_pass(tmp_path, form):
    if form == "lines":
        rows, [loss] = read(
            tmp_path / "log.jsonl", {"query": "?", "memories": ["Mia rows"]}, TWICE + "\n"
        )
        assert len(rows) == 1 and loss.line == 2 and loss.rule == "json"
        assert loss.found == "the key 'consent' occurs twice in one object"
    else:
        (tmp_path / "log.json").write_text(f"[{TWICE}]" if form == "array" else TWICE)
        with pytest.raises(DataError, match="cannot be read"):
            [*read_log(tmp_path / "log.json")]


def test_a_key_that_says_something_is_not_repeated(tmp_path):
    secret = "the PIN is 4711"
    _, [loss] = read(
        tmp_path / "log.jsonl",
        {"query": "?", "memories": ["a"]},
        f'{{"{secret}": 1, "{secret}": 2}}\n',
    )
    assert "4711" not in str(loss) and "occurs twice" in loss.found


def test_records_with_a_key_twice_name_the_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": {"a": 1, "a": 2}}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: json: .*the key 'a' occurs twice"):
        read_rows(tmp_path / "rows.jsonl")


def test_the_limit_of_a_cell_is_the_usual_one_after_readers_that_end_in_another_order():
    """The limit is that of the process, so a sheet that is read later would not be refused."""
    usual = csv.field_size_limit()
    readers = [_table_rows(io.StringIO("query,answer\nq,a\n"), "t.csv") for _ in range(2)]
    for reader in readers:
        next(reader)
    for reader in readers:
        assert not [*reader]
    assert csv.field_size_limit() == usual
