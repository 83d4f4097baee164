"""Stages: repair of what failed, reasons for what is lost, and runs that are killed,
resumed and stuck.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from builder_server import ANSWER, STAGES, Builder, build, endpoint, fallible, good, rows, screening
from hypothesis import given
from hypothesis import strategies as st

from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.dataset.stages import (
    Draft,
    DraftAtom,
    DraftBlock,
    Drop,
    Fault,
    Passage,
    Stage,
    StageError,
    StageRow,
    build_prompts,
    load_build_prompt,
    merge_by,
    read_drops,
    read_kept,
    repair_briefing,
    run_stage,
    stage_hash,
)
from memcalib.inference.client import Client, Form, Reply, run_async
from memcalib.inference.endpoint import CallError
from memcalib.io.records import DataError
from memcalib.problem import Level

ROOT = Path(__file__).parents[3]


class Word(Form):
    id: str
    word: str


class Words(Form):
    words: list[Word]


def check_words(draft, reply):
    counts = Counter(word.id for word in reply.words)
    faults = []
    for word_id in "abc":
        if counts[word_id] != 1:
            faults.append(Fault(word_id, "ids", f"found {counts[word_id]}; allowed: one"))
    for word_id in counts:
        if word_id not in "abc":
            faults.append(Fault(word_id, "ids", "there is no such id"))
    for word in reply.words:
        if word.word != word.word.lower():
            faults.append(Fault(word.id, "capitals", f"found {word.word}"))
    return faults


def accept_words(draft, reply):
    words = {word.id: word.word for word in reply.words}
    if "no" in words.values():
        return Drop(id=draft.id, stage="words", reason="a no", detail=str(words))
    return draft.model_copy(update={"words": dict(sorted(words.items()))})


def ask_words(draft):
    return {"id": draft.id}


WORDS = Stage(
    "words",
    "screening-1",
    Words,
    ask_words,
    check_words,
    accept_words,
    merge=merge_by("words", "id"),
)
WHOLE = replace(WORDS, merge=None)


class Scripted(Client):
    """Prepared replies in order, or by row; a `CallError` among them is raised."""

    def __init__(self, *replies, by_row=None, model="m", concurrency=1):
        address = endpoint("http://127.0.0.1:1/v1", concurrency=concurrency)
        super().__init__(address.model_copy(update={"model": model}))
        self.replies = list(replies)
        self.by_row = by_row
        self.conversations = []
        self.options = []

    async def ask(self, messages, **options):
        self.conversations.append(messages)
        self.options.append(options)
        await asyncio.sleep(0)
        row = json.loads(messages[1]["content"])["id"]
        reply = self.by_row[row].pop(0) if self.by_row else self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Reply):
            return reply
        return Reply(reply, "stop", {"prompt_tokens": 7, "completion_tokens": 3, "seconds": 0.1})


def words_reply(**words):
    entries = [{"id": word_id, "word": word} for word_id, word in words.items()]
    return json.dumps({"words": entries})


GOOD = words_reply(a="x", b="y", c="z")


def run(stage, drafts, client, folder, **options):
    return run_async(run_stage(stage, drafts, client, folder, **options))


def run_one(stage, *replies, folder, **options):
    """The client and the result of one row that meets these replies."""
    client = Scripted(*replies)
    return client, run(stage, rows(1), client, folder, **options)


def last_request(client, call):
    """The last message of a call, counted from 0."""
    return json.loads(client.conversations[call][-1]["content"])


# Repair -------------------------------------------------------------------------------------------


def test_a_good_reply_is_one_call(tmp_path):
    client, result = run_one(WORDS, GOOD, folder=tmp_path)
    assert result.calls == 1
    assert (result.done, result.found) == (1, 0)
    assert result.kept[0].words == {"a": "x", "b": "y", "c": "z"}
    options = client.options[0]
    assert options["temperature"] == 0.2
    assert options["response_format"]["json_schema"]["name"] == "Words"


def test_only_what_failed_is_asked_for_and_merged(tmp_path):
    replies = words_reply(a="x", b="Y"), words_reply(b="y", a="OTHER", c="z")
    client, result = run_one(WORDS, *replies, folder=tmp_path)
    request = last_request(client, 1)
    assert request["task"] == "words"
    assert request["send"] == "the named items alone"
    assert {(f["id"], f["rule"]) for f in request["repair"]} == {("c", "ids"), ("b", "capitals")}
    assert client.conversations[1][2] == {"role": "assistant", "content": replies[0]}
    assert result.kept[0].words == {"a": "x", "b": "y", "c": "z"}


def test_without_a_merge_the_whole_object_is_asked_for(tmp_path):
    replies = words_reply(a="x", b="Y"), words_reply(b="y"), words_reply(a="1", b="2", c="3")
    client, result = run_one(WHOLE, *replies, folder=tmp_path)
    assert last_request(client, 1)["send"] == "the whole object"
    assert last_request(client, 2)["send"] == "the whole object"
    assert {fault["id"] for fault in last_request(client, 2)["repair"]} == {"a", "c"}
    assert result.kept[0].words == {"a": "1", "b": "2", "c": "3"}


def test_an_unreadable_first_reply_is_asked_for_whole_then_in_part(tmp_path):
    replies = "Sure!", words_reply(a="x", b="Y", c="z"), words_reply(b="y")
    client, result = run_one(WORDS, *replies, folder=tmp_path)
    first_repair = last_request(client, 1)
    second_repair = last_request(client, 2)
    assert first_repair["repair"][0]["rule"] == "invalid reply"
    assert first_repair["send"] == "the whole object"
    assert [fault["id"] for fault in second_repair["repair"]] == ["b"]
    assert second_repair["send"] == "the named items alone"
    assert result.kept[0].words["b"] == "y"
    assert result.kept[0].notes["words"]["attempts"] == 3


def test_an_unreadable_repair_keeps_what_was_good(tmp_path):
    replies = words_reply(a="x", b="Y", c="z"), "{", words_reply(b="y")
    client, result = run_one(WORDS, *replies, folder=tmp_path)
    second_repair = last_request(client, 2)
    assert second_repair["repair"][0]["rule"] == "invalid reply"
    assert second_repair["send"] == "the named items alone"
    assert result.kept[0].words == {"a": "x", "b": "y", "c": "z"}
    roles = [message["role"] for message in client.conversations[2]]
    assert roles == ["system", "user"] + ["assistant", "user"] * 2


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        (["{", "", "?"], "invalid reply"),
        ([words_reply(a="x", b="Y", c="z")] * 3, "capitals"),
        ([words_reply(a="x", b="y")] * 3, "ids"),
        ([words_reply(a="x", b="Y", c="z"), "?", "?"], "invalid reply"),
        (["?", words_reply(a="x", b="y", c="Z"), words_reply(c="Z")], "capitals"),
        ([Reply(GOOD, "length", {})] * 3, "invalid reply"),
    ],
)
def test_after_two_repairs_the_row_is_dropped_for_its_fault(tmp_path, replies, reason):
    client, result = run_one(WORDS, *replies, folder=tmp_path)
    assert len(client.conversations) == 3
    assert [drop.reason for drop in result.dropped] == [reason]
    drop = result.dropped[0]
    assert (drop.stage, drop.id, drop.retry) == ("words", "hens:0", False)
    assert drop.detail


@pytest.mark.parametrize("repairs", [0, 1, 5])
def test_repairs_are_counted(tmp_path, repairs):
    client, result = run_one(replace(WORDS, repairs=repairs), *["?"] * 9, folder=tmp_path)
    assert len(client.conversations) == 1 + repairs and not result.kept


def check_words_and_repetition(draft, reply):
    faults = check_words(draft, reply)
    if faults:
        return faults
    first, *others = reply.words
    return [Fault(word.id, "same", "twice") for word in others if word.word == first.word]


def test_a_repaired_item_is_checked_against_the_others(tmp_path):
    stage = replace(WORDS, check=check_words_and_repetition)
    replies = words_reply(a="x", b="Y", c="z"), words_reply(b="x"), words_reply(b="w")
    client, result = run_one(stage, *replies, folder=tmp_path)
    repair = last_request(client, 2)["repair"]
    assert repair == [{"id": "b", "rule": "same", "detail": "twice"}]
    assert result.kept[0].words == {"a": "x", "b": "w", "c": "z"}


def test_long_replies_and_long_lists_of_faults_are_told_in_short():
    faults = [Fault(str(i), "rule", "x") for i in range(1000)]
    reply, repair = repair_briefing("words", "<|im_end|>" * 10**6, faults)
    assert len(json.loads(repair["content"])["repair"]) == 20
    assert len(reply["content"]) < 200_000
    assert "<" not in reply["content"]
    assert repair_briefing("words", "", [])[0]["content"] == "(no text)"


entries = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from(["1", "2", "3"])), max_size=6
)


@given(entries, entries, st.sets(st.sampled_from("abcde")))
def test_merging_agrees_with_a_slow_reading_of_the_rule(reply, repaired, failed):
    def words_of(pairs):
        return Words(words=[Word(id=word_id, word=word) for word_id, word in pairs])

    merged = merge_by("words", "id")(words_of(reply), words_of(repaired), failed)
    latest = dict(repaired)
    expected = []
    for word_id, word in reply:
        if word_id not in failed:
            expected.append((word_id, word))
        elif word_id not in [placed_id for placed_id, _ in expected]:
            expected.append((word_id, latest.get(word_id, word)))
    for word_id in latest:
        if word_id not in dict(reply):
            expected.append((word_id, latest[word_id]))
    assert [(word.id, word.word) for word in merged.words] == expected


# What is written ----------------------------------------------------------------------------------


names = st.text(min_size=1, max_size=8)
atoms = st.builds(
    lambda **fields: DraftAtom(**fields),
    atom_id=names,
    text=names,
    ideal=st.sampled_from(Level),
    origin=st.sampled_from(["grounded", "hard", "noise", "auxiliary", "retrieved"]),
    evidence=st.text(max_size=8),
    rubric=st.none() | st.dictionaries(names, st.text(max_size=5), max_size=3),
    passage=st.none() | st.integers(1, 9),
)
drafts = st.builds(
    Draft,
    id=names,
    domain=st.sampled_from(["health", "general", "coding"]),
    source=st.dictionaries(names, st.text(max_size=5), max_size=3),
    question=st.text(max_size=20),
    query=st.text(max_size=20),
    passages=st.lists(st.builds(Passage, text=names, evidence=names), max_size=3),
    atoms=st.lists(atoms, max_size=3),
    blocks=st.lists(
        st.builds(DraftBlock, parent_memory_id=names, atom_ids=st.lists(names, max_size=3)),
        max_size=2,
    ),
)


@given(drafts)
def test_a_draft_survives_its_line_and_the_published_names_are_written(draft):
    row = StageRow(id=draft.id, kept=draft, recipe="r", draft=draft.hash)
    line = row.to_json()
    assert StageRow.model_validate_json(line) == row and "\n" not in line
    assert StageRow.model_validate_json(line).kept.hash == draft.hash
    for atom in json.loads(line)["kept"]["atoms"]:
        assert atom["u_star"] in "ABC" and "ideal" not in atom and "rubric" not in atom


def test_the_note_says_who_and_with_what_and_not_when(tmp_path):
    _, result = run_one(
        WORDS, words_reply(a="x", b="Y", c="z"), words_reply(b="y"), folder=tmp_path
    )
    note = result.kept[0].notes["words"]
    assert note == {
        "model": "m",
        "prompt": "screening-1",
        "text": WORDS.recipe["text"],
        "attempts": 2,
        "usage": {"prompt_tokens": 14, "completion_tokens": 6},
    }
    assert result.usage["seconds"] == pytest.approx(0.2)


def test_two_stages_may_share_a_task(tmp_path):
    second = replace(WORDS, name="words again", task="words")
    client, result = run_one(second, "?", GOOD, folder=tmp_path)
    assert last_request(client, 1)["task"] == "words" and result.path.name == "words again.jsonl"
    assert result.kept[0].notes.keys() == {"words again"}


def test_every_kept_and_dropped_row_is_accounted_for(tmp_path):
    replies = {
        f"hens:{i}": [words_reply(a="x", b="no" if i % 3 else "y", c="z")] for i in range(15)
    }
    result = run(WORDS, rows(15), Scripted(by_row=replies), tmp_path)
    assert [d.id for d in result.kept] == [f"hens:{i}" for i in range(0, 15, 3)]
    assert [d.id for d in result.dropped] == [f"hens:{i}" for i in range(15) if i % 3]
    assert [d.id for d in read_kept(result.path)] == [d.id for d in result.kept]
    assert {d.reason for d in read_drops(result.path)} == {"a no"}


def test_no_rows_make_an_empty_file(tmp_path):
    result = run(WORDS, [], Scripted(), tmp_path)
    assert result.kept == result.dropped == [] and result.path.read_bytes() == b""


# Failed calls -------------------------------------------------------------------------------------


def test_a_failed_call_is_made_again_and_a_row_too_long_is_not(tmp_path):
    down = CallError("server", "down")
    long = CallError("context_too_long", "9 tokens")
    replies = {"hens:0": [down], "hens:1": [GOOD], "hens:2": [long]}
    first = run(WORDS, rows(3), Scripted(by_row=replies), tmp_path)
    outcomes = [(drop.reason, drop.retry) for drop in first.dropped]
    assert outcomes == [("failed call", True), ("too long", False)]
    assert "server: down" in first.dropped[0].detail
    client = Scripted(by_row={"hens:0": [GOOD]})
    second = run(WORDS, rows(3), client, tmp_path)
    assert [d.id for d in second.kept] == ["hens:0", "hens:1"]
    assert (second.done, second.found) == (1, 2)
    assert len(client.conversations) == 1
    assert client.options[0]["attempt"] == 0


def test_a_call_that_fails_in_the_repair_is_a_failed_call(tmp_path):
    _, result = run_one(WORDS, "?", CallError("timeout", "slow"), folder=tmp_path)
    assert result.dropped[0].retry and result.calls == 1


def test_a_fatal_error_is_raised_and_what_is_done_stays(tmp_path):
    replies = [GOOD] * 5 + [CallError("auth", "key withdrawn")]
    with pytest.raises(CallError, match="withdrawn"):
        run(WORDS, rows(9), Scripted(*replies), tmp_path)
    assert len(list(read_kept(tmp_path / "words.jsonl"))) == 5


def test_over_http_failures_are_rows_too(tmp_path):
    def answer(messages, _):
        question = json.loads(messages[1]["content"])["question"]
        if "10 metres" in question:
            return 400, {"error": {"message": "flagged"}}
        return good(messages)

    with Builder(answer) as server:
        result = run(SCREENING, rows(4), Client(endpoint(server.url)), tmp_path)
    assert [d.id for d in result.kept] == ["hens:1", "hens:2", "hens:3"]
    assert result.dropped[0].reason == "failed call" and "flagged" in result.dropped[0].detail


# Hopeless stages ----------------------------------------------------------------------------------


def test_a_builder_that_is_always_invalid_stops_the_stage(tmp_path):
    command = "memcalib build --profile hens"
    with Builder(lambda messages, _: "I'd be happy to help!") as server:
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        with pytest.raises(StageError) as stopped:
            run(SCREENING, rows(100), client, tmp_path, command=command)
        error = stopped.value
        assert (error.stage, error.reason, len(error.rows)) == ("screening", "invalid reply", 20)
        assert error.path == tmp_path / "screening.jsonl"
        assert error.command == command
        facts = ("screening", "invalid reply", error.rows[0], str(error.path), error.command)
        for fact in (*facts, "not exactly one JSON object"):
            assert fact in str(error)
        assert len(list(read_drops(error.path))) == 20
        calls = len(server.requests)
        server.answer = good  # again, and the cache must not bring its old replies back
        result = run(SCREENING, rows(100), client, tmp_path)
        assert len(result.kept) == result.done == 100
        assert result.remembered == 0
        assert 100 <= len(server.requests) - calls < 105  # a call that was cut off may still arrive


def test_a_builder_that_stays_hopeless_is_asked_anew_each_time(tmp_path):
    with Builder(lambda messages, _: "No.") as server:
        client = Client(endpoint(server.url, concurrency=1), tmp_path / "calls.sqlite")
        for attempt in (1, 2, 3):
            with pytest.raises(StageError):
                run(SCREENING, rows(30), client, tmp_path)
            assert len(server.requests) == 60 * attempt
        assert len(list(read_drops(tmp_path / "screening.jsonl"))) == 20


def test_a_stage_that_accepts_nothing_stops_and_can_go_on(tmp_path):
    fail = {"pass": False, "evidence": ""}

    def never(messages, _):
        return json.dumps(screening(json.loads(messages[1]["content"]), plausibility=fail))

    with Builder(never) as server:
        client = Client(endpoint(server.url, concurrency=1))
        with pytest.raises(StageError, match="plausibility"):
            run(SCREENING, rows(30), client, tmp_path)
        result = run(SCREENING, rows(30), client, tmp_path)
        assert (result.done, result.found) == (10, 20)
        assert result.kept == [] and len(result.dropped) == 30
        assert len(server.requests) == 30  # these verdicts were sound: nobody is asked twice


def test_fewer_than_twenty_rows_come_to_an_end(tmp_path):
    result = run(WORDS, rows(19), Scripted(*["?"] * 57), tmp_path)
    assert len(result.dropped) == 19 and result.kept == []


@pytest.mark.parametrize("count", [1, 7, 19])
def test_all_of_a_few_rows_lost_to_bad_replies_are_asked_again(tmp_path, count):
    with Builder(lambda messages, number: "No." if number % 2 else "{}") as server:
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        lost = run(SCREENING, rows(count), client, tmp_path)
        assert lost.kept == [] and lost.done == count
        calls = len(server.requests)
        server.answer = good
        result = run(SCREENING, rows(count), client, tmp_path)
        assert len(result.kept) == result.done == count
        assert len(server.requests) == calls + count
        again = run(SCREENING, rows(count), client, tmp_path)
        assert (again.done, again.found) == (0, count)
        assert len(server.requests) == calls + count


def test_some_of_a_few_rows_lost_to_bad_replies_are_settled(tmp_path):
    replies = {f"hens:{i}": ["?"] * 3 for i in range(5)}
    replies["hens:0"] = [GOOD]
    first = run(WORDS, rows(5), Scripted(by_row=replies), tmp_path)
    assert len(first.kept) == 1
    again = run(WORDS, rows(5), Scripted(), tmp_path)
    assert (again.done, again.found) == (0, 5)
    assert len(again.kept) == 1


@pytest.mark.parametrize("odd", [0, 7, 19])
def test_one_other_outcome_among_the_first_twenty_lets_the_stage_run(tmp_path, odd):
    replies = {f"hens:{i}": ["?"] * 3 for i in range(40)}
    replies[f"hens:{odd}"] = [GOOD]
    result = run(WORDS, rows(40), Scripted(by_row=replies), tmp_path / "kept")
    assert result.done == 40 and len(result.kept) == 1

    replies = {f"hens:{i}": ["?"] * 3 for i in range(40)}
    replies[f"hens:{odd}"] = [words_reply(a="x", b="no", c="z")]
    result = run(WORDS, rows(40), Scripted(by_row=replies), tmp_path / "dropped")
    assert result.done == 40 and result.kept == []


def test_twenty_failed_calls_stop_the_stage_and_are_made_again(tmp_path):
    down = [CallError("server", "down")] * 30
    with pytest.raises(StageError, match="failed call"):
        run(WORDS, rows(30), Scripted(*down), tmp_path)
    client = Scripted(*[GOOD] * 30)
    assert len(run(WORDS, rows(30), client, tmp_path).kept) == 30
    assert {options["attempt"] for options in client.options} == {0}


def test_a_new_attempt_keeps_its_number_when_it_is_cut_short(tmp_path):
    with pytest.raises(StageError):
        run(WORDS, rows(40), Scripted(*["?"] * 60), tmp_path)
    first_seven = Scripted(*[GOOD] * 7, CallError("auth", "key withdrawn"))
    with pytest.raises(CallError):
        run(WORDS, rows(40), first_seven, tmp_path)
    all_others = Scripted(*[GOOD] * 33)
    assert len(run(WORDS, rows(40), all_others, tmp_path).kept) == 40
    for client in (first_seven, all_others):
        assert {options["attempt"] for options in client.options} == {1}


# Going on -----------------------------------------------------------------------------------------


def test_what_is_settled_is_not_asked_again(tmp_path):
    run(WORDS, rows(5), Scripted(*[GOOD] * 5), tmp_path)
    client = Scripted(*[GOOD] * 3)
    result = run(WORDS, rows(8), client, tmp_path)
    assert (result.done, result.found) == (3, 5)
    assert len(result.kept) == 8
    fewer = run(WORDS, rows(2), Scripted(), tmp_path)
    assert [draft.id for draft in fewer.kept] == ["hens:0", "hens:1"]
    assert len(list(read_kept(fewer.path))) == 8


def test_a_half_written_line_is_asked_for_again(tmp_path):
    path = run(WORDS, rows(3), Scripted(*[GOOD] * 3), tmp_path).path
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    client = Scripted(GOOD)
    run(WORDS, rows(3), client, tmp_path)
    assert len(client.conversations) == 1
    assert path.read_bytes() == content


def test_rows_that_do_not_belong_are_refused_by_name(tmp_path):
    path = run(WORDS, rows(3), Scripted(*[GOOD] * 3), tmp_path).path
    content = path.read_bytes()
    changed = [rows(1)[0].model_copy(update={"question": "Which geese?"}), *rows(3)[1:]]
    refusals = [
        (replace(WORDS, temperature=1.0), rows(3), Scripted(), "recipe"),
        (replace(WORDS, prompt="derivation-1"), rows(3), Scripted(), "recipe"),
        (replace(WORDS, repairs=9), rows(3), Scripted(), "recipe"),
        (WORDS, rows(3), Scripted(model="n"), "recipe"),
        (WORDS, changed, Scripted(), "draft"),
        (WORDS, [*rows(3), *rows(1)], Scripted(), "id"),
    ]
    for stage, stage_rows, client, rule in refusals:
        with pytest.raises(DataError, match="words") as refused:
            run(stage, stage_rows, client, tmp_path)
        violation = refused.value.violations[0]
        assert violation.rule == rule
        assert violation.example_id == "hens:0"
        assert client.conversations == []
        assert path.read_bytes() == content


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    path = run(WORDS, rows(3), Scripted(*[GOOD] * 3), tmp_path).path
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{broken}\n" + lines[2])
    with pytest.raises(DataError, match=r"words\.jsonl:2"):
        run(WORDS, rows(3), Scripted(), tmp_path)


def test_drafts_are_taken_as_they_are_needed(tmp_path):
    started = []
    settled = []

    def stream():
        for draft in rows(60):
            started.append(draft.id)
            assert len(started) - len(settled) <= 5
            yield draft

    client = Scripted(*[GOOD] * 60, concurrency=4)
    run(WORDS, stream(), client, tmp_path, on_row=lambda row: settled.append(row.id))
    assert len(settled) == 60


# The same dataset ---------------------------------------------------------------------------------


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.jsonl"))}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Sixty rows through three stages, one call at a time, with a builder that makes mistakes."""
    folder = tmp_path_factory.mktemp("straight")
    with Builder(fallible) as server:
        results = run_async(build(Client(endpoint(server.url, concurrency=1)), folder, rows(60)))
        conversations = server.conversations
    assert all(result.kept and result.dropped for result in results)
    assert set(conversations.values()) == {1}
    return files(folder), conversations


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_completion_leaves_no_trace(straight, tmp_path, seed):
    dice = random.Random(seed)
    with Builder(fallible, wait=lambda number: dice.random() * 0.01) as server:
        run_async(build(Client(endpoint(server.url, concurrency=16)), tmp_path, rows(60)))
        assert server.most > 4 and server.conversations == straight[1]
    assert files(tmp_path) == straight[0]


def test_killed_in_each_stage_and_resumed_it_is_the_same_and_paid_once(straight, tmp_path):
    straight_files, straight_conversations = straight
    program = [sys.executable, ROOT / "tests" / "helpers" / "builder_server.py"]
    folder = tmp_path / "run"
    lines_until_kill = (15, 55, 40)
    with Builder(fallible, wait=lambda number: 0.002) as server:
        command = [*program, server.url, folder, tmp_path / "calls.sqlite", "60"]
        for lines in lines_until_kill:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            with process:
                assert all(process.stdout.readline() for _ in range(lines))
                process.send_signal(signal.SIGKILL)
            assert process.returncode == -signal.SIGKILL
        stored_files = set(files(folder))
        resumed = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert resumed.returncode == 0, resumed.stderr
        conversations = server.conversations
        assert conversations.keys() == straight_conversations.keys()
        under_way = 8 * len(lines_until_kill)  # what may have been cut off at the deaths
        assert sum(conversations.values()) <= len(conversations) + under_way
        calls = len(server.requests)
        subprocess.run(command, check=True, timeout=60)
        assert len(server.requests) == calls
    assert stored_files == set(straight_files)
    all_rows = sum(len(content.splitlines()) for content in straight_files.values())
    assert len(resumed.stdout.split()) < all_rows
    assert files(folder) == straight_files


# Size ---------------------------------------------------------------------------------------------


def test_rows_of_a_megabyte_go_through(tmp_path):
    context = "The barn is red. " * 62_500
    big = [
        draft.model_copy(update={"source": {**draft.source, "context": context}})
        for draft in rows(3)
    ]
    with Builder(good) as server:
        results = run_async(build(Client(endpoint(server.url)), tmp_path, big))
    assert [len(result.kept) for result in results] == [3, 3, 3]
    assert results[2].kept[0].context == context
    assert results[0].path.stat().st_size > 3_000_000


def test_a_reply_of_ten_megabytes_is_a_fault_like_any_other(tmp_path):
    huge = "x" * 10**7
    replies = huge, json.dumps({"words": huge}), GOOD
    client, result = run_one(WORDS, *replies, folder=tmp_path)
    assert result.kept
    assert all(len(message["content"]) < 30_000 for message in client.conversations[2])


# Prompts ------------------------------------------------------------------------------------------


def test_every_shipped_prompt_can_be_sent():
    assert {"screening-1", "derivation-1", "annotation-1", "derivation-2", "annotation-2"} <= set(
        build_prompts()
    )
    for stage in STAGES:
        system, user = stage.messages(rows(1)[0])
        assert system["role"] == "system" and load_build_prompt(stage.prompt) in system["content"]
        assert json.loads(system["content"].rsplit("\n\n", 1)[1])["title"] == stage.reply.__name__
        assert json.loads(user["content"])["task"] == stage.name
        assert "JSON object" in system["content"] and "<" not in user["content"]


@pytest.mark.parametrize(
    ("question", "language"),
    [
        (
            "Wie werde ich den Geruch in der Küche los, der nach dem Kochen mit Fisch bleibt?",
            "German",
        ),
        ("¿Cómo puedo quitar el olor que queda en la cocina después de freír pescado?", "Spanish"),
        ("做完鱼以后厨房里的味道怎么才能去掉？", "Chinese"),
        ("How do I get rid of the smell in the kitchen after frying fish?", ""),
    ],
)
def test_a_row_in_another_language_names_it(question, language):
    draft = rows(1)[0].model_copy(update={"question": question})
    for stage in STAGES:
        plain = stage.messages(rows(1)[0])[0]["content"]
        named = stage.messages(draft)[0]["content"]
        assert (plain == named) == (not language)
        assert language in named
        assert json.loads(named.rsplit("\n\n", 1)[1])["title"] == stage.reply.__name__


def test_what_is_asked_for_is_explained():
    dimensions = SCREENING.reply.model_fields["dimensions"].annotation
    assert all(name in load_build_prompt("screening-1") for name in dimensions.model_fields)
    for stage in (DERIVATION, ANNOTATION):
        prompt = load_build_prompt(stage.prompt)
        for field in stage.reply.model_fields.values():
            entry_type = getattr(field.annotation, "__args__", [None])[0]
            for name in getattr(entry_type, "model_fields", {}):
                assert name == "text" or f"`{name}`" in prompt


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "no such prompt"), (b"", "empty"), (b"\xff\xfe", "UTF-8"), (b" \n", "empty")],
)
def test_a_prompt_that_cannot_be_used_is_named(tmp_path, content, why):
    path = tmp_path / "mine-1.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"mine-1.*{why}.*screening-1"):
        load_build_prompt(str(path))


def test_another_version_of_a_prompt_can_be_chosen(tmp_path):
    path = tmp_path / "mine-1.md"
    path.write_text("Divide it.")
    draft = rows(1)[0]
    address = endpoint("http://127.0.0.1:1/v1")
    for prompt in ("derivation-1", str(path)):
        stage = replace(DERIVATION, prompt=prompt)
        system, user = stage.messages(draft)
        assert load_build_prompt(stage.prompt) in system["content"]
        assert user == DERIVATION.messages(draft)[1]
        assert stage_hash(stage, address) != stage_hash(DERIVATION, address)


def test_a_changed_prompt_is_another_recipe(tmp_path):
    path = tmp_path / "words-1.md"
    path.write_text("Say three words.")
    stage = replace(WORDS, prompt=str(path))
    address = endpoint("http://127.0.0.1:1/v1")
    old_hash = stage_hash(stage, address)
    path.write_text("Say three words, please.")
    assert stage_hash(stage, address) != old_hash
    assert stage.recipe["prompt"] == "words-1"


def test_an_invented_answer_stays_out_of_the_system_message():
    system, user = SCREENING.messages(rows(1)[0])
    assert ANSWER not in system["content"] and json.loads(user["content"])["answer"] == ANSWER
