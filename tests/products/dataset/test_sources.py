"""Sources: each of the eight published shapes, the hub's arguments, and every kind of bad file."""

import csv
import gzip
import json
import sys
import zipfile

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.dataset import sources as s
from memcalib.io.records import DataError, write_jsonl

TABLE = s.load_sources()


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(source, path, **options):
    return s.collect(s.read_source(source, path, **options))


MEDDIALOG_RAW = """id=11
https://example.com/q/11
Description
Q. Is a resting pulse of 95 too fast?

Dialogue
Patient:
Hello doctor,
My resting pulse is 95 and I drink four coffees a day.
Doctor:
Hi.
Halve the coffee first, then measure again.
Patient:
Thank you.


id=12
https://example.com/q/12
Description
Q. May I take iron with milk?
Dialogue
Patient:

Doctor:
Better with juice.
"""

CHATDOCTOR = [
    {
        "instruction": "Answer as a doctor.",
        "input": "I sleep four hours a night since June.",
        "output": "Rest more.",
    }
]

ULTRACHAT = [
    {
        "prompt": "Plan a picnic for nine.",
        "prompt_id": "ab12",
        "messages": [
            {"content": "Plan a picnic for nine.", "role": "user"},
            {"content": "Bring three blankets.", "role": "assistant"},
            {"content": "And if it rains?", "role": "user"},
            {"content": "Move to the porch.", "role": "assistant"},
        ],
    }
]


def message(message_id, parent, role, text, rank=None, lang="en", deleted=False):
    return {
        "message_id": message_id,
        "parent_id": parent,
        "user_id": "u",
        "text": text,
        "role": role,
        "rank": rank,
        "created_date": "2023-02-01",
        "review_result": True,
        "deleted": deleted,
        "synthetic": False,
        "lang": lang,
        "message_tree_id": "t",
        "tree_state": "ready_for_export",
    }


OASST = [
    message("p1", None, "prompter", "Name a river."),
    message("a1", "p1", "assistant", "The worst reply.", rank=2),
    message("a2", "p1", "assistant", "Deleted but first.", rank=0, deleted=True),
    message("a3", "p1", "assistant", "The Inn.", rank=1),
    message("a4", "p1", "assistant", "Der Inn.", rank=0, lang="de"),
    message("b1", "a3", "prompter", "Another?"),
    message("b2", "b1", "assistant", "The Isar.", rank=0),
    message("p2", None, "prompter", "Nenne einen Fluss.", lang="de"),
    message("a5", "p2", "assistant", "Der Lech.", lang="de", rank=0),
    message("p3", None, "prompter", "Nobody answers this."),
]

STACK = [
    {
        "qid": 5,
        "question": (
            "<p>How do I sort a <code>dict</code> by value?</p><pre><code>d = {'a': 2}\n"
            "print(d)\n"
            "</code></pre>"
        ),
        "answers": [
            {
                "answer_id": 9,
                "author": "x",
                "author_id": 1,
                "author_profile": "",
                "pm_score": 7,
                "selected": False,
                "text": "<p>No.</p>",
            },
            {
                "answer_id": 8,
                "author": "y",
                "author_id": 2,
                "author_profile": "",
                "pm_score": 3,
                "selected": True,
                "text": "<p>Use sorted &amp; a key.</p>",
            },
        ],
        "date": "2015/02/01",
        "metadata": [
            "https://stackoverflow.com/questions/5",
            "https://stackoverflow.com",
            "https://stackoverflow.com/users/1/",
        ],
    }
]

APPS = [
    {
        "id": 0,
        "question": "Read two numbers and print their sum.",
        "solutions": json.dumps(["a, b = map(int, input().split())\nprint(a + b)", "second"]),
        "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]}),
        "starter_code": "def solve():",
        "difficulty": "interview",
        "url": "https://example.com/p/0",
    },
    {
        "id": 1,
        "question": "Unsolved.",
        "solutions": "",
        "input_output": "",
        "starter_code": "",
        "difficulty": "x",
    },
]

MAGICODER = [
    {
        "lang": "rust",
        "raw_index": 77,
        "index": 3,
        "seed": "fn main() {}",
        "openai_fingerprint": "f",
        "problem": "Write a counter.",
        "solution": "```rust\nfn main() {}\n```",
    }
]


def test_meddialog_raw_text(tmp_path):
    (tmp_path / "dialogue_1.txt").write_text(MEDDIALOG_RAW)
    first, second = read("MedDialog", tmp_path / "dialogue_1.txt").kept
    assert (first.id, first.domain, first.licence) == ("MedDialog:11", "health", "unknown")
    assert first.question == "Hello doctor, My resting pulse is 95 and I drink four coffees a day."
    assert first.answer == "Hi. Halve the coffee first, then measure again."
    assert first.metadata == {
        "description": "Q. Is a resting pulse of 95 too fast?",
        "url": "https://example.com/q/11",
    }
    assert (second.question, second.answer) == (
        "Q. May I take iron with milk?",
        "Better with juice.",
    )


def test_meddialog_tidied_and_table_forms(tmp_path):
    utterances = ["patient: I fell on my wrist.", "doctor: Cool it: ten minutes.", "patient: ok"]
    tidy = [{"description": "Wrist", "utterances": utterances}]
    (tmp_path / "tidy.json").write_text(json.dumps(tidy))
    turns = {"speaker": [0, 1], "utterance": ["I fell on my wrist.", "Cool it: ten minutes."]}
    row = {"dialogue_id": 4, "dialogue_url": "u", "dialogue_turns": turns}
    [first] = read("MedDialog", tmp_path / "tidy.json").kept
    [second] = read("MedDialog", jsonl(tmp_path / "table.jsonl", [row])).kept
    assert (first.question, first.answer) == (second.question, second.answer)
    assert second.id == "MedDialog:4"
    assert first.id.startswith("MedDialog:")
    assert len(first.id) == len("MedDialog:") + 16


def in_every_format(folder, rows):
    """Paths of the same rows as JSONL, JSON, Parquet and packed JSONL."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        file.write(lines)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "rows", "question", "answer"),
    [
        (
            "ChatDoctor-HealthCareMagic",
            CHATDOCTOR,
            "I sleep four hours a night since June.",
            "Rest more.",
        ),
        ("UltraChat-200k", ULTRACHAT, "Plan a picnic for nine.", "Bring three blankets."),
        ("Magicoder-OSS-Instruct", MAGICODER, "Write a counter.", "```rust\nfn main() {}\n```"),
    ],
)
def test_a_dataset_is_the_same_in_every_format(tmp_path, name, rows, question, answer):
    paths = in_every_format(tmp_path, rows)
    assert len(paths) == 4
    [first] = read(name, paths[0]).kept
    assert (first.question, first.answer) == (question, answer)
    assert all(read(name, path).kept == [first] for path in paths)
    if name == "Magicoder-OSS-Instruct":
        assert first.id == "Magicoder-OSS-Instruct:77"
        assert first.topic == "rust"


@pytest.mark.parametrize("name", ["OASST1", "OASST2"])
def test_oasst_messages_in_any_order_and_trees_agree(tmp_path, name):
    passed = read(name, jsonl(tmp_path / "messages.jsonl", OASST))
    answers = {row.id: row.answer for row in passed.kept}
    assert answers == {f"{name}:p1": "The Inn.", f"{name}:p3": ""}
    assert [(drop.rule, drop.id) for drop in passed.dropped] == [("selection", f"{name}:p2")]
    backwards = read(name, jsonl(tmp_path / "backwards.jsonl", OASST[::-1]))
    assert sorted(row.id for row in backwards.kept) == list(answers)
    trees = [
        {"message_tree_id": prompt["message_id"], "prompt": with_replies(prompt)}
        for prompt in OASST
        if prompt["parent_id"] is None
    ]
    assert read(name, jsonl(tmp_path / "trees.jsonl", trees)).kept == passed.kept
    pd.DataFrame(OASST).to_parquet(tmp_path / "messages.parquet")
    assert read(name, tmp_path / "messages.parquet").kept == passed.kept


def with_replies(node):
    """A message with its replies, and theirs."""
    replies = [reply for reply in OASST if reply["parent_id"] == node["message_id"]]
    return {**node, "replies": [with_replies(reply) for reply in replies]}


def test_stack_exchange_html_and_choice(tmp_path):
    pd.DataFrame(STACK).to_parquet(tmp_path / "train.parquet")
    [row] = read("Stack-Exchange-Preferences", tmp_path / "train.parquet").kept
    assert row.question == "How do I sort a dict by value?\n\n```\nd = {'a': 2}\nprint(d)\n\n```"
    assert (row.answer, row.topic, row.metadata) == (
        "Use sorted & a key.",
        "stackoverflow.com",
        {"date": "2015/02/01"},
    )
    assert row.licence == "cc-by-sa-4.0"
    STACK[0]["answers"][1]["selected"] = False
    [row] = read("Stack-Exchange-Preferences", jsonl(tmp_path / "x.jsonl", STACK)).kept
    STACK[0]["answers"][1]["selected"] = True
    assert row.answer == "No."


def test_apps_solutions_are_a_list_in_a_string(tmp_path):
    solved, unsolved = read("APPS", jsonl(tmp_path / "train.jsonl", APPS)).kept
    assert solved.answer.endswith("print(a + b)")
    assert solved.context == "def solve():"
    assert solved.topic == "interview"
    assert unsolved.answer == "" and unsolved.id == "APPS:1"


def test_hub_arguments_pin_every_revision():
    for source in TABLE.values():
        arguments = s.hub_arguments(source)
        assert arguments["streaming"] and arguments["split"] == source.split
        pinned = arguments.get("revision") or arguments["data_files"]
        assert source.revision in pinned
    unpinned = [name for name, source in TABLE.items() if source.revision == "main"]
    assert unpinned == ["ChatDoctor-HealthCareMagic"]


def test_hub_rows_come_through_the_datasets_library(tmp_path, monkeypatch):
    folder = tmp_path / "repo"
    folder.mkdir()
    jsonl(folder / "train.jsonl", CHATDOCTOR * 3)
    with zipfile.ZipFile(tmp_path / "english.zip", "w") as archive:
        archive.writestr("English/healthcaremagic_1.txt", MEDDIALOG_RAW)
        archive.writestr("English/icliniq.txt", MEDDIALOG_RAW.replace("id=1", "id=2"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    chat = TABLE["ChatDoctor-HealthCareMagic"]
    local = {"path": str(folder), "split": "train", "streaming": True}
    monkeypatch.setattr(s, "hub_arguments", lambda source: local)
    assert [row.answer for row in s.read_source(chat)] == ["Rest more."] * 3
    assert len(list(s.read_source(chat, limit=2))) == 2
    zipped = {"path": "text", "split": "train", "streaming": True, "encoding_errors": "replace"}
    zipped["data_files"] = f"zip://**/*.txt::{tmp_path / 'english.zip'}"
    monkeypatch.setattr(s, "hub_arguments", lambda source: zipped)
    rows = [row for row in s.read_source("MedDialog") if isinstance(row, s.SourceRow)]
    assert sorted(row.id for row in rows) == [f"MedDialog:{n}" for n in (11, 12, 21, 22)]


def test_a_silent_hub_says_what_to_do(monkeypatch):
    def refuse(**arguments):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    message = "no route to the hub.*OpenAssistant/oasst2 at revision 179d.*or a local path"
    with pytest.raises(DataError, match=message):
        next(s.read_source("OASST2"))


@pytest.mark.parametrize("name", list(TABLE))
def test_missing_columns_name_file_found_and_needed(tmp_path, name):
    path = jsonl(tmp_path / "wrong.jsonl", [{"query": "a", "response": "b"}] * 3)
    with pytest.raises(DataError) as error:
        read(name, path)
    message = str(error.value)
    assert "wrong.jsonl" in message and "query" in message and name in message
    needed = TABLE[name].columns["question"].split("|")[0]
    assert needed in message


def test_one_incomplete_record_is_a_loss_and_not_an_error(tmp_path):
    rows = [{"output": "x"}, *CHATDOCTOR, {"input": ["a", "list"], "output": "y"}, 5, None]
    passed = read("ChatDoctor-HealthCareMagic", jsonl(tmp_path / "x.jsonl", rows))
    assert [row.question for row in passed.kept] == ["", CHATDOCTOR[0]["input"]]
    assert [(d.rule, d.line) for d in passed.dropped] == [
        ("question", 3),
        ("record", 4),
        ("record", 5),
    ]
    assert "list" in passed.dropped[0].found


def test_mixed_encodings(tmp_path):
    latin = '{"input": "Caf\xe9 every day?", "output": "No."}'.encode("latin-1")
    good = json.dumps(CHATDOCTOR[0]).encode()
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, latin, good]))
    passed = read("ChatDoctor-HealthCareMagic", tmp_path / "x.jsonl")
    assert (
        len(passed.kept) == 2
        and passed.dropped[0].rule == "encoding"
        and passed.dropped[0].line == 2
    )
    (tmp_path / "x.csv").write_bytes(
        b"input,output\nfine,yes\n" + "Caf\xe9,no\n".encode("latin-1") + b"ok,yes\n"
    )
    passed = read("ChatDoctor-HealthCareMagic", tmp_path / "x.csv")
    assert [row.question for row in passed.kept] == ["fine", "ok"]
    assert [(d.rule, d.line, d.file) for d in passed.dropped] == [("encoding", 3, "x.csv")]
    (tmp_path / "x.json").write_bytes(b"[" + good + b"," + latin + b"]")
    kept_rows = read("ChatDoctor-HealthCareMagic", tmp_path / "x.json").kept
    assert [("�" in row.question) for row in kept_rows] == [False, True]
    (tmp_path / "x.txt").write_bytes(MEDDIALOG_RAW.replace("coffees", "caf\xe9s").encode("latin-1"))
    assert "�" in read("MedDialog", tmp_path / "x.txt").kept[0].question


def test_half_a_surrogate_pair_can_be_written_afterwards(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        '{"input": "Broken \\ud83d emoji?", "output": "Fine \\ud83d\\ude00."}\n'
    )
    [row] = read("ChatDoctor-HealthCareMagic", tmp_path / "x.jsonl").kept
    assert "�" in row.question and row.answer == "Fine 😀."
    write_jsonl(tmp_path / "out.jsonl", [row])
    again = s.SourceRow.model_validate_json((tmp_path / "out.jsonl").read_text())
    assert again == row


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_rows_of_a_megabyte(tmp_path, suffix):
    rows = [{"input": "word " * 200_000, "output": 'long, with "quotes",\nand lines'}, *CHATDOCTOR]
    path = tmp_path / f"x.{suffix}"
    if suffix == "jsonl":
        jsonl(path, rows)
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["input", "output", "instruction"])
            writer.writeheader()
            writer.writerows(rows)
    long, short = read("ChatDoctor-HealthCareMagic", path).kept
    assert len(long.question) == 999_999
    assert long.answer.count("\n") == 1
    assert short.answer == "Rest more."


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", b""),
        ("x.json", b"[]"),
        ("x.json", b"[{"),
        ("x.csv", b""),
        ("x.csv", b"a,b\n"),
        ("x.jsonl", b"\n\n"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError):
        read("ChatDoctor-HealthCareMagic", tmp_path / name)


def test_a_binary_file_and_missing_paths(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(DataError, match="encoding"):
        read("APPS", tmp_path / "x.jsonl")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="parquet"):
        read("APPS", tmp_path / "x.parquet")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read("APPS", tmp_path / "nowhere.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\.parquet"):
        read("APPS", tmp_path / "empty")


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", [{**MAGICODER[0], "raw_index": ord(name)}])
    ids = [row.id for row in read("Magicoder-OSS-Instruct", tmp_path).kept]
    assert ids == ["Magicoder-OSS-Instruct:97", "Magicoder-OSS-Instruct:98"]


def test_changes_to_the_table(tmp_path):
    changes = {
        "APPS": {"columns": {"question": "task", "answer": "code"}},
        "Shop": {"domain": "general", "columns": {"question": "q", "answer": "a"}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changes))
    table = s.load_sources(tmp_path / "mine.yaml")
    assert len(table) == 9
    assert table["APPS"].licence == "mit"
    assert table["Shop"].licence == "unknown"
    [row] = read(table["APPS"], jsonl(tmp_path / "x.jsonl", [{"task": "t", "code": "c"}])).kept
    assert row.answer == "c"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"APPS": {"column": {}}}, "column"),
        ({"APPS": {"gather": "trees"}}, "oasst"),
        ({"New": {"domain": "x", "columns": {"question": "q"}}}, "found nothing for answer"),
        ({"New": {"columns": {"question": "q", "answer": "a"}}}, "domain"),
        ({"APPS": ["a"]}, "mapping"),
    ],
)
def test_changes_that_make_no_sense_are_refused(changes, word):
    with pytest.raises(ValueError, match=word):
        s.load_sources(changes)


def test_generic_source_takes_readers_and_extra_columns(tmp_path):
    source = s.plain_source(
        "chat|user", "chat|reply", context="notes", topic="kind", id="key", name="desk", since="y"
    )
    chat = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "There."}]
    rows = [{"key": 1, "chat": chat, "notes": "n", "kind": "k", "y": 2020}, {"chat": "oops"}]
    passed = read(source, jsonl(tmp_path / "x.jsonl", rows))
    [row] = passed.kept
    assert (row.id, row.question, row.answer) == ("desk:1", "Where?", "There.")
    assert (row.context, row.topic) == ("n", "k")
    assert row.metadata == {"since": "2020"}
    assert passed.dropped[0].rule == "question"


def test_no_row_accepted_is_counted_by_reason():
    drops = [
        s.Dropped(id=f"x{n}", stage="screening", rule="length", found=f"{n}", allowed="40")
        for n in range(3)
    ]
    drops.append(s.Dropped(id="y", stage="screening", rule="language", found="fr", allowed="en"))
    message = r"0 of 4 rows accepted: 3 by length, for instance x0.*1 by language"
    with pytest.raises(DataError, match=message):
        s.Passed([], drops).require("screening")
    with pytest.raises(DataError, match="is empty"):
        s.Passed().require("screening")


def test_attrition_adds_up(tmp_path):
    first = read("OASST1", jsonl(tmp_path / "a.jsonl", OASST))
    second = read("APPS", jsonl(tmp_path / "b.jsonl", [*APPS, 5]))
    both = s.Passed(first.kept + second.kept, first.dropped + second.dropped)
    table = s.attrition(both)
    assert table.loc[("", "read")].tolist() == [3, 3, 6]
    assert table.loc[("", "kept")].tolist() == [2, 2, 4]
    assert table.loc[("reading", "selection"), "OASST1"] == 1
    assert table.loc[("reading", "record"), "APPS"] == 1
    assert s.attrition(both, by="domain").columns.tolist() == ["coding", "general", "all"]
    first_row, *other_rows = both.kept
    drops = [s.Dropped(id=row.id, source=row.source, stage="t", rule="r") for row in other_rows]
    table = s.attrition(both.then(s.Passed([first_row], drops)))
    assert (table.iloc[0] == table.iloc[1:].sum()).all()


texts = st.text(max_size=40)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), max_size=6))
def test_chat_readers_against_a_plain_loop(turns):
    question = ""
    answer = ""
    spoken = False
    for role, text in turns:
        if role == "user" and not spoken:
            question = text
            spoken = True
        elif role == "assistant" and spoken:
            answer = text
            break
    messages = [{"role": role, "content": text} for role, text in turns]
    assert (s.user(messages), s.reply(messages)) == (question, answer)


@given(st.permutations([("a", None, False), ("b", 1, False), ("c", 0, False), ("d", 0, True)]))
def test_best_reply_does_not_depend_on_order(order):
    replies = [
        {
            "message_id": name,
            "rank": rank,
            "text": name,
            "role": "assistant",
            "lang": "en",
            "deleted": deleted,
        }
        for name, rank, deleted in order
    ]
    assert s.best_reply({"lang": "en", "replies": replies}) == "c"


@given(
    st.recursive(
        st.none() | st.integers() | texts | st.floats(),
        lambda x: st.lists(x) | st.dictionaries(texts, x),
    )
)
def test_any_json_value_gives_a_row_or_a_reason(value):
    for name, source in TABLE.items():
        path = source.columns["question"].split("|")[0].split(".")[0]
        outcome = s.to_row(source, {path: value})
        assert isinstance(outcome, s.SourceRow | s.Dropped), name
        outcome.to_json().encode()


MODULE = """
from memcalib.products.dataset.sources import Source

def posts(path):
    lines = ["A?|B.", "|lost", "C?|D."] if path is None else path.read_text().splitlines()
    for number, line in enumerate(lines):
        asked, answered = line.split("|")
        yield {"number": number, "asked": asked or ["no text"], "answered": answered, "year": 2021}

COLUMNS = {"id": "number", "question": "asked", "answer": "answered", "since": "year"}
FORUM = Source(name="forum", domain="coding", licence="cc0-1.0", columns=COLUMNS, records=posts)
forum = {"domain": "coding", "licence": "cc0-1.0", "columns": COLUMNS, "records": posts}
wrong = {**forum, "licens": "mit"}
EMPTY = FORUM.model_copy(update={"records": lambda path: ()})
OTHER = FORUM.model_copy(update={"columns": {**COLUMNS, "question": "title"}})
"""


@pytest.fixture
def forum(tmp_path, monkeypatch):
    (tmp_path / "a_forum_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_forum_of_mine"
    sys.modules.pop("a_forum_of_mine", None)


def test_a_source_of_another_module_is_read_by_its_name(forum, tmp_path):
    passed = s.collect(s.read_source(f"{forum}:FORUM"))
    assert [(row.id, row.question) for row in passed.kept] == [("forum:0", "A?"), ("forum:2", "C?")]
    for row in passed.kept:
        assert (row.domain, row.licence) == ("coding", "cc0-1.0")
        assert row.metadata == {"since": "2021"}
    [drop] = passed.dropped
    assert (drop.source, drop.rule, drop.line) == ("forum", "question", 2)
    (tmp_path / "posts.txt").write_text("One?|1\nTwo?|2\nThree?|3\n")
    few = list(s.read_source(f"{forum}:FORUM", tmp_path / "posts.txt", limit=2))
    assert [row.question for row in few] == ["One?", "Two?"]
    assert s.find_source(f"{forum}:FORUM") == s.find_source(f"{forum}:FORUM", {})
    assert s.find_source(f"{forum}:forum") == s.find_source(f"{forum}:FORUM")
    assert s.find_source("APPS") == TABLE["APPS"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("nowhere", "not the name of a source in the table"),
        ("no_such_module_here:FORUM", "no_such_module_here"),
        ("a_forum_of_mine:BOARD", "BOARD"),
        ("a_forum_of_mine:posts", "function"),
        (":", "package.module:name, where the module"),
    ],
)
def test_a_name_that_names_no_source_is_refused_with_what_is_allowed(forum, name, fault):
    with pytest.raises(ValueError) as refused:
        s.find_source(name)
    message = str(refused.value)
    assert repr(name) in message
    assert fault in message
    assert "MedDialog" in message
    assert "package.module:name" in message


def test_settings_of_a_source_from_outside_are_checked(forum):
    with pytest.raises(ValueError, match=f"{forum}:wrong: licens: found 'mit'"):
        s.find_source(f"{forum}:wrong")


@pytest.mark.parametrize(("name", "fault"), [("EMPTY", "no records"), ("OTHER", "title")])
def test_a_source_from_outside_is_checked_like_any_other(forum, name, fault):
    with pytest.raises(DataError, match=fault):
        list(s.read_source(f"{forum}:{name}"))


# tables of one's own

OWN = s.plain_source("q", "a", "c", name="own", id="no", domain_column="area", domain="general")


def test_ids_and_domains_come_from_named_columns(tmp_path):
    (tmp_path / "t.csv").write_text("no;q;a;c;area\nK7;Why?;So.;;health\nK8;Why?;So.;;\n")
    rows = list(s.read_source(OWN, tmp_path / "t.csv"))
    assert [(row.id, row.domain) for row in rows] == [("own:K7", "health"), ("own:K8", "general")]
    (tmp_path / "t.csv").write_text("no;q;a;c\nK7;Why?;So.;\n")
    with pytest.raises(DataError, match="none of them area"):
        list(s.read_source(OWN, tmp_path / "t.csv"))


def test_a_row_without_an_id_is_named_by_its_context_too():
    source = s.plain_source("q", "a", "c", name="own")
    ids = []
    for context in ("I am 3.", "I am 90.", ""):
        ids.append(s.to_row(source, {"q": "May I?", "a": "Yes.", "c": context}).id)
    assert len(set(ids)) == 3
    assert ids[2] == f"own:{s.text_hash('May I?' + chr(0) + 'Yes.')}"
    without_column = s.plain_source("q", "a", name="own")
    assert ids[2] == s.to_row(without_column, {"q": "May I?", "a": "Yes."}).id


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_is_cut_as_its_header_is_and_losses_name_the_line(tmp_path, mark):
    lines = [
        ["q", "a"],
        ['"One\nand two?"', "Yes."],
        ["Three?"],
        ["Four?", "No.", "no"],
        ["Five?", "Yes."],
    ]
    (tmp_path / "t.csv").write_text(
        "\n".join(mark.join(line) for line in lines) + "\n", encoding="utf-8-sig"
    )
    passed = s.collect(s.read_source(s.plain_source("q", "a"), tmp_path / "t.csv"))
    assert [(row.question, row.file, row.line) for row in passed.kept] == [
        ("One\nand two?", "t.csv", 2),
        ("Five?", "t.csv", 6),
    ]
    assert [(drop.rule, drop.file, drop.line) for drop in passed.dropped] == [
        ("csv", "t.csv", 4),
        ("csv", "t.csv", 5),
    ]
    assert "1 cell" in passed.dropped[0].found and "header" in passed.dropped[0].allowed


def test_rows_of_a_folder_know_their_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"q": "Why?", "a": name}) + "\n{oops\n")
    passed = s.collect(s.read_source(s.plain_source("q", "a"), tmp_path))
    assert [(row.file, row.line) for row in passed.kept] == [("a.jsonl", 1), ("b.jsonl", 1)]
    assert [(drop.file, drop.line) for drop in passed.dropped] == [("a.jsonl", 2), ("b.jsonl", 2)]
    assert str(passed.dropped[0]).startswith("custom a.jsonl line 2: ")


TURNS = (
    ["Hi?", "Hello."],
    '["Hi?", "Hello."]',
    [
        {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "Hello."},
    ],
    json.dumps([{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]),
)


@pytest.mark.parametrize("turns", TURNS)
def test_a_list_of_turns_is_read_or_says_how_it_can_be(turns):
    row = s.to_row(s.plain_source("t|user", "t|reply"), {"t": turns}, 3, "t.jsonl")
    assert (row.question, row.answer) == ("Hi?", "Hello.")
    lost = s.to_row(s.plain_source("t", "a"), {"t": turns, "a": "x"}, 3, "t.jsonl")
    if isinstance(turns, list):
        assert "'t|user' for the question" in lost.allowed
        assert (lost.file, lost.line) == ("t.jsonl", 3)


def test_the_place_of_a_row_is_not_written():
    row = s.to_row(s.plain_source("q", "a"), {"q": "Why?", "a": "So."}, 3, "t.jsonl")
    assert {"file", "line"}.isdisjoint(json.loads(row.to_json()))
    assert row == s.SourceRow.model_validate_json(row.to_json())
