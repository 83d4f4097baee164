"""Stages: repair of what failed, reasons for what is lost, and runs that are killed, resumed and stuck."""

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
from memcalib.dataset.stages import (
    Draft,
    DraftAtom,
    DraftBlock,
    Drop,
    Fault,
    Passage,
    build_prompts,
    load_build_prompt,
    repair_briefing,
)
from memcalib.inference.endpoint import CallError
from memcalib.inference.client import Client, Reply, run_async
from memcalib.problem import Level
from memcalib.io.records import DataError
from memcalib.inference.client import Form
from memcalib.dataset.stages import (
    Stage,
    StageError,
    StageRow,
    merge_by,
    read_drops,
    read_kept,
    run_stage,
    stage_hash,
)

ROOT = Path(__file__).parents[2]


class Word(Form):
    id: str
    word: str


class Words(Form):
    words: list[Word]


def check_words(draft, reply):
    counts = Counter(word.id for word in reply.words)
    faults = [
        Fault(i, "ids", f"found {counts[i]}, allowed is one") for i in "abc" if counts[i] != 1
    ]
    faults += [Fault(i, "ids", "there is no such id") for i in counts if i not in "abc"]
    return faults + [
        Fault(w.id, "capitals", f"found {w.word}") for w in reply.words if w.word != w.word.lower()
    ]


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
        super().__init__(
            endpoint("http://127.0.0.1:1/v1", concurrency=concurrency).model_copy(
                update={"model": model}
            )
        )
        self.replies = list(replies)
        self.by_row = by_row
        self.asked = []
        self.options = []

    async def ask(self, messages, **options):
        self.asked.append(messages)
        self.options.append(options)
        await asyncio.sleep(0)
        row = json.loads(messages[1]["content"])["id"]
        reply = self.by_row[row].pop(0) if self.by_row else self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return (
            reply
            if isinstance(reply, Reply)
            else Reply(reply, "stop", {"prompt_tokens": 7, "completion_tokens": 3, "seconds": 0.1})
        )


def said(**words):
    return json.dumps({"words": [{"id": i.rstrip("_"), "word": word} for i, word in words.items()]})


def one(stage, *replies, folder, **options):
    client = Scripted(*replies)
    result = run_async(run_stage(stage, rows(1), client, folder, **options))
    return client, result


def last(client, k):
    return json.loads(client.asked[k][-1]["content"])


# Repair -----------------------------------------------------------------------------------------------------------------


def test_a_good_reply_is_one_call(tmp_path):
    client, result = one(WORDS, said(a="x", b="y", c="z"), folder=tmp_path)
    assert (result.calls, result.done, result.found) == (1, 1, 0)
    assert result.kept[0].words == {"a": "x", "b": "y", "c": "z"}
    options = client.options[0]
    assert (
        options["temperature"] == 0.2
        and options["response_format"]["json_schema"]["name"] == "Words"
    )


def test_only_what_failed_is_asked_for_and_merged(tmp_path):
    replies = said(a="x", b="Y"), said(b="y", a="OTHER", c="z")
    client, result = one(WORDS, *replies, folder=tmp_path)
    asked = last(client, 1)
    assert asked["task"] == "words" and asked["send"] == "the named items alone"
    assert {(f["id"], f["rule"]) for f in asked["repair"]} == {("c", "ids"), ("b", "capitals")}
    assert client.asked[1][2] == {"role": "assistant", "content": replies[0]}
    assert result.kept[0].words == {"a": "x", "b": "y", "c": "z"}


def test_without_a_merge_the_whole_object_is_asked_for(tmp_path):
    client, result = one(
        WHOLE, said(a="x", b="Y"), said(b="y"), said(a="1", b="2", c="3"), folder=tmp_path
    )
    assert last(client, 1)["send"] == last(client, 2)["send"] == "the whole object"
    assert {f["id"] for f in last(client, 2)["repair"]} == {"a", "c"}
    assert result.kept[0].words == {"a": "1", "b": "2", "c": "3"}


def test_an_unreadable_first_reply_is_asked_for_whole_then_in_part(tmp_path):
    client, result = one(WORDS, "Sure!", said(a="x", b="Y", c="z"), said(b="y"), folder=tmp_path)
    assert (
        last(client, 1)["repair"][0]["rule"] == "invalid reply"
        and last(client, 1)["send"] == "the whole object"
    )
    assert [f["id"] for f in last(client, 2)["repair"]] == ["b"] and last(client, 2)[
        "send"
    ] == "the named items alone"
    assert result.kept[0].words["b"] == "y" and result.kept[0].notes["words"]["attempts"] == 3


def test_an_unreadable_repair_keeps_what_was_good(tmp_path):
    client, result = one(WORDS, said(a="x", b="Y", c="z"), "{", said(b="y"), folder=tmp_path)
    assert (
        last(client, 2)["repair"][0]["rule"] == "invalid reply"
        and last(client, 2)["send"] == "the named items alone"
    )
    assert result.kept[0].words == {"a": "x", "b": "y", "c": "z"}
    assert [m["role"] for m in client.asked[2]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        (["{", "", "?"], "invalid reply"),
        ([said(a="x", b="Y", c="z")] * 3, "capitals"),
        ([said(a="x", b="y")] * 3, "ids"),
        ([said(a="x", b="Y", c="z"), "?", "?"], "invalid reply"),
        (["?", said(a="x", b="y", c="Z"), said(c="Z")], "capitals"),
        ([Reply(said(a="x", b="y", c="z"), "length", {})] * 3, "invalid reply"),
    ],
)
def test_after_two_repairs_the_row_is_dropped_for_its_fault(tmp_path, replies, reason):
    client, result = one(WORDS, *replies, folder=tmp_path)
    assert len(client.asked) == 3 and [d.reason for d in result.dropped] == [reason]
    drop = result.dropped[0]
    assert (drop.stage, drop.id, drop.retry) == ("words", "hens:0", False) and drop.detail


@pytest.mark.parametrize("repairs", [0, 1, 5])
def test_repairs_are_counted(tmp_path, repairs):
    client, result = one(replace(WORDS, repairs=repairs), *["?"] * 9, folder=tmp_path)
    assert len(client.asked) == 1 + repairs and not result.kept


def test_a_repaired_item_is_checked_against_the_others(tmp_path):
    stage = replace(
        WORDS,
        check=lambda d, r: (
            check_words(d, r)
            or [Fault(w.id, "same", "twice") for w in r.words[1:] if w.word == r.words[0].word]
        ),
    )
    client, result = one(
        stage, said(a="x", b="Y", c="z"), said(b="x"), said(b="w"), folder=tmp_path
    )
    assert last(client, 2)["repair"] == [{"id": "b", "rule": "same", "detail": "twice"}]
    assert result.kept[0].words == {"a": "x", "b": "w", "c": "z"}


def test_long_replies_and_long_lists_of_faults_are_told_in_short():
    after = repair_briefing(
        "words", "<|im_end|>" * 10**6, [Fault(str(i), "rule", "x") for i in range(1000)]
    )
    assert (
        len(json.loads(after[1]["content"])["repair"]) == 20 and len(after[0]["content"]) < 200_000
    )
    assert (
        "<" not in after[0]["content"]
        and repair_briefing("words", "", [])[0]["content"] == "(no text)"
    )


entries = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from(["1", "2", "3"])), max_size=6
)


@given(entries, entries, st.sets(st.sampled_from("abcde")))
def test_merging_agrees_with_a_slow_reading_of_the_rule(old, new, failed):
    def make(pairs):
        return Words(words=[Word(id=i, word=w) for i, w in pairs])

    merged = [(w.id, w.word) for w in merge_by("words", "id")(make(old), make(new), failed).words]
    latest = dict(new)
    wanted = []
    for i, word in old:
        if i not in failed:
            wanted.append((i, word))
        elif i not in [j for j, _ in wanted]:
            wanted.append((i, latest.get(i, word)))
    wanted += [(i, latest[i]) for i in dict.fromkeys(i for i, _ in new) if i not in dict(old)]
    assert merged == wanted


# What is written ---------------------------------------------------------------------------------------------------------


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
    _, result = one(WORDS, said(a="x", b="Y", c="z"), said(b="y"), folder=tmp_path)
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
    client, result = one(second, "?", said(a="x", b="y", c="z"), folder=tmp_path)
    assert last(client, 1)["task"] == "words" and result.path.name == "words again.jsonl"
    assert result.kept[0].notes.keys() == {"words again"}


def test_every_kept_and_dropped_row_is_accounted_for(tmp_path):
    replies = {f"hens:{i}": [said(a="x", b="no" if i % 3 else "y", c="z")] for i in range(15)}
    result = run_async(run_stage(WORDS, rows(15), Scripted(by_row=replies), tmp_path))
    assert [d.id for d in result.kept] == [f"hens:{i}" for i in range(0, 15, 3)]
    assert [d.id for d in result.dropped] == [f"hens:{i}" for i in range(15) if i % 3]
    assert [d.id for d in read_kept(result.path)] == [d.id for d in result.kept]
    assert {d.reason for d in read_drops(result.path)} == {"a no"}


def test_no_rows_make_an_empty_file(tmp_path):
    result = run_async(run_stage(WORDS, [], Scripted(), tmp_path))
    assert result.kept == result.dropped == [] and result.path.read_bytes() == b""


# Failed calls ------------------------------------------------------------------------------------------------------------


def test_a_failed_call_is_made_again_and_a_row_too_long_is_not(tmp_path):
    down = CallError("server", "down")
    long = CallError("context_too_long", "9 tokens")
    replies = {"hens:0": [down], "hens:1": [said(a="x", b="y", c="z")], "hens:2": [long]}
    first = run_async(run_stage(WORDS, rows(3), Scripted(by_row=replies), tmp_path))
    assert [(d.reason, d.retry) for d in first.dropped] == [
        ("failed call", True),
        ("too long", False),
    ]
    assert "server: down" in first.dropped[0].detail
    client = Scripted(by_row={"hens:0": [said(a="x", b="y", c="z")]})
    second = run_async(run_stage(WORDS, rows(3), client, tmp_path))
    assert [d.id for d in second.kept] == ["hens:0", "hens:1"] and (second.done, second.found) == (
        1,
        2,
    )
    assert len(client.asked) == 1 and client.options[0]["attempt"] == 0


def test_a_call_that_fails_in_the_repair_is_a_failed_call(tmp_path):
    _, result = one(WORDS, "?", CallError("timeout", "slow"), folder=tmp_path)
    assert result.dropped[0].retry and result.calls == 1


def test_a_fatal_error_is_raised_and_what_is_done_stays(tmp_path):
    replies = [said(a="x", b="y", c="z")] * 5 + [CallError("auth", "key withdrawn")]
    with pytest.raises(CallError, match="withdrawn"):
        run_async(run_stage(WORDS, rows(9), Scripted(*replies), tmp_path))
    assert len(list(read_kept(tmp_path / "words.jsonl"))) == 5


def test_over_http_failures_are_rows_too(tmp_path):
    def answer(messages, seen):
        row = json.loads(messages[1]["content"])["question"]
        return (400, {"error": {"message": "flagged"}}) if "10 metres" in row else good(messages)

    with Builder(answer) as server:
        result = run_async(run_stage(SCREENING, rows(4), Client(endpoint(server.url)), tmp_path))
    assert [d.id for d in result.kept] == ["hens:1", "hens:2", "hens:3"]
    assert result.dropped[0].reason == "failed call" and "flagged" in result.dropped[0].detail


# Hopeless stages ---------------------------------------------------------------------------------------------------------


def test_a_builder_that_is_always_invalid_stops_the_stage(tmp_path):
    with Builder(lambda messages, seen: "I'd be happy to help!") as server:
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        with pytest.raises(StageError) as stopped:
            run_async(
                run_stage(
                    SCREENING, rows(100), client, tmp_path, command="memcalib build --profile hens"
                )
            )
        error = stopped.value
        assert (error.stage, error.reason, len(error.rows)) == ("screening", "invalid reply", 20)
        assert (
            error.path == tmp_path / "screening.jsonl"
            and error.command == "memcalib build --profile hens"
        )
        for part in (
            "screening",
            "invalid reply",
            error.rows[0],
            str(error.path),
            error.command,
            "not one JSON object",
        ):
            assert part in str(error)
        assert len(list(read_drops(error.path))) == 20
        asked = len(server.seen)
        server.answer = (
            good  # the builder is mended, and the cache must not bring its old replies back
        )
        result = run_async(run_stage(SCREENING, rows(100), client, tmp_path))
        assert len(result.kept) == result.done == 100 and result.remembered == 0
        assert 100 <= len(server.seen) - asked < 105  # a call that was cut off may still arrive


def test_a_builder_that_stays_hopeless_is_asked_anew_each_time(tmp_path):
    with Builder(lambda messages, seen: "No.") as server:
        client = Client(endpoint(server.url, concurrency=1), tmp_path / "calls.sqlite")
        for run in (1, 2, 3):
            with pytest.raises(StageError):
                run_async(run_stage(SCREENING, rows(30), client, tmp_path))
            assert len(server.seen) == 60 * run
        assert len(list(read_drops(tmp_path / "screening.jsonl"))) == 20


def test_a_stage_that_accepts_nothing_stops_and_can_go_on(tmp_path):
    fail = {"pass": False, "evidence": ""}

    def never(messages, seen):
        return json.dumps(screening(json.loads(messages[1]["content"]), plausibility=fail))

    with Builder(never) as server:
        client = Client(endpoint(server.url, concurrency=1))
        with pytest.raises(StageError, match="plausibility"):
            run_async(run_stage(SCREENING, rows(30), client, tmp_path))
        result = run_async(run_stage(SCREENING, rows(30), client, tmp_path))
        assert (result.done, result.found, result.kept, len(result.dropped)) == (10, 20, [], 30)
        assert len(server.seen) == 30  # these verdicts were sound: nobody is asked twice


def test_fewer_than_twenty_rows_come_to_an_end(tmp_path):
    result = run_async(run_stage(WORDS, rows(19), Scripted(*["?"] * 57), tmp_path))
    assert len(result.dropped) == 19 and result.kept == []


@pytest.mark.parametrize("count", [1, 7, 19])
def test_all_of_a_few_rows_lost_to_bad_replies_are_asked_again(tmp_path, count):
    with Builder(lambda messages, seen: "No." if seen % 2 else "{}") as server:
        client = Client(endpoint(server.url), tmp_path / "calls.sqlite")
        lost = run_async(run_stage(SCREENING, rows(count), client, tmp_path))
        assert lost.kept == [] and lost.done == count
        asked = len(server.seen)
        server.answer = good
        result = run_async(run_stage(SCREENING, rows(count), client, tmp_path))
        assert len(result.kept) == result.done == count and len(server.seen) == asked + count
        again = run_async(run_stage(SCREENING, rows(count), client, tmp_path))
        assert (again.done, again.found) == (0, count) and len(server.seen) == asked + count


def test_some_of_a_few_rows_lost_to_bad_replies_are_settled(tmp_path):
    replies = {f"hens:{i}": ["?"] * 3 if i else [said(a="x", b="y", c="z")] for i in range(5)}
    assert len(run_async(run_stage(WORDS, rows(5), Scripted(by_row=replies), tmp_path)).kept) == 1
    again = run_async(run_stage(WORDS, rows(5), Scripted(), tmp_path))
    assert (again.done, again.found, len(again.kept)) == (0, 5, 1)


@pytest.mark.parametrize("odd", [0, 7, 19])
def test_one_other_outcome_among_the_first_twenty_lets_the_stage_run(tmp_path, odd):
    for name, reply in (("kept", said(a="x", b="y", c="z")), ("other", said(a="x", b="no", c="z"))):
        replies = {f"hens:{i}": ["?"] * 3 if i != odd else [reply] for i in range(40)}
        result = run_async(run_stage(WORDS, rows(40), Scripted(by_row=replies), tmp_path / name))
        assert result.done == 40 and len(result.kept) == (name == "kept")


def test_twenty_failed_calls_stop_the_stage_and_are_made_again(tmp_path):
    with pytest.raises(StageError, match="failed call"):
        run_async(
            run_stage(WORDS, rows(30), Scripted(*[CallError("server", "down")] * 30), tmp_path)
        )
    client = Scripted(*[said(a="x", b="y", c="z")] * 30)
    assert len(run_async(run_stage(WORDS, rows(30), client, tmp_path)).kept) == 30
    assert {options["attempt"] for options in client.options} == {0}


def test_a_new_attempt_keeps_its_number_when_it_is_cut_short(tmp_path):
    with pytest.raises(StageError):
        run_async(run_stage(WORDS, rows(40), Scripted(*["?"] * 60), tmp_path))
    half = Scripted(*[said(a="x", b="y", c="z")] * 7, CallError("auth", "key withdrawn"))
    with pytest.raises(CallError):
        run_async(run_stage(WORDS, rows(40), half, tmp_path))
    rest = Scripted(*[said(a="x", b="y", c="z")] * 33)
    assert len(run_async(run_stage(WORDS, rows(40), rest, tmp_path)).kept) == 40
    assert {options["attempt"] for client in (half, rest) for options in client.options} == {1}


# Going on ----------------------------------------------------------------------------------------------------------------


def test_what_is_settled_is_not_asked_again(tmp_path):
    good_one = said(a="x", b="y", c="z")
    run_async(run_stage(WORDS, rows(5), Scripted(*[good_one] * 5), tmp_path))
    client = Scripted(*[good_one] * 3)
    result = run_async(run_stage(WORDS, rows(8), client, tmp_path))
    assert (result.done, result.found, len(result.kept)) == (3, 5, 8)
    fewer = run_async(run_stage(WORDS, rows(2), Scripted(), tmp_path))
    assert [d.id for d in fewer.kept] == ["hens:0", "hens:1"] and len(
        list(read_kept(fewer.path))
    ) == 8


def test_a_half_written_line_is_asked_for_again(tmp_path):
    good_one = said(a="x", b="y", c="z")
    whole = run_async(run_stage(WORDS, rows(3), Scripted(*[good_one] * 3), tmp_path)).path
    before = whole.read_bytes()
    whole.write_bytes(before[:-40])
    client = Scripted(good_one)
    run_async(run_stage(WORDS, rows(3), client, tmp_path))
    assert len(client.asked) == 1 and whole.read_bytes() == before


def test_rows_that_do_not_belong_are_refused_by_name(tmp_path):
    good_one = said(a="x", b="y", c="z")
    path = run_async(run_stage(WORDS, rows(3), Scripted(*[good_one] * 3), tmp_path)).path
    before = path.read_bytes()
    changed = [rows(1)[0].model_copy(update={"question": "Which geese?"}), *rows(3)[1:]]
    others = [
        (replace(WORDS, temperature=1.0), rows(3), Scripted(), "recipe"),
        (replace(WORDS, prompt="derivation-1"), rows(3), Scripted(), "recipe"),
        (replace(WORDS, repairs=9), rows(3), Scripted(), "recipe"),
        (WORDS, rows(3), Scripted(model="n"), "recipe"),
        (WORDS, changed, Scripted(), "draft"),
        (WORDS, [*rows(3), *rows(1)], Scripted(), "id"),
    ]
    for stage, given_rows, client, rule in others:
        with pytest.raises(DataError, match="words") as refused:
            run_async(run_stage(stage, given_rows, client, tmp_path))
        assert (
            refused.value.violations[0].rule == rule
            and refused.value.violations[0].example_id == "hens:0"
        )
        assert client.asked == [] and path.read_bytes() == before


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    good_one = said(a="x", b="y", c="z")
    path = run_async(run_stage(WORDS, rows(3), Scripted(*[good_one] * 3), tmp_path)).path
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{broken}\n" + lines[2])
    with pytest.raises(DataError, match=r"words\.jsonl:2"):
        run_async(run_stage(WORDS, rows(3), Scripted(), tmp_path))


def test_drafts_are_taken_as_they_are_needed(tmp_path):
    taken = []
    settled = []

    def stream():
        for draft in rows(60):
            taken.append(draft.id)
            assert len(taken) - len(settled) <= 5
            yield draft

    replies = [said(a="x", b="y", c="z")] * 60
    run_async(
        run_stage(
            WORDS,
            stream(),
            Scripted(*replies, concurrency=4),
            tmp_path,
            on_row=lambda row: settled.append(row.id),
        )
    )
    assert len(settled) == 60


# The same dataset ---------------------------------------------------------------------------------------------------------


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
    command = [sys.executable, ROOT / "tests" / "helpers" / "builder_server.py"]
    cache = tmp_path / "calls.sqlite"
    folder = tmp_path / "run"
    kills = (15, 55, 40)
    with Builder(fallible, wait=lambda number: 0.002) as server:
        for lines in kills:
            process = subprocess.Popen(
                [*command, server.url, folder, cache, "60"], stdout=subprocess.PIPE, text=True
            )
            with process:
                assert all(process.stdout.readline() for _ in range(lines))
                process.send_signal(signal.SIGKILL)
            assert process.returncode == -signal.SIGKILL
        stored = {name: len(data.splitlines()) for name, data in files(folder).items()}
        done = subprocess.run(
            [*command, server.url, folder, cache, "60"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        asked = server.conversations
        assert asked.keys() == straight[1].keys()
        assert sum(asked.values()) <= len(asked) + 8 * len(
            kills
        )  # at most what was under way at each death
        quiet = len(server.seen)
        subprocess.run([*command, server.url, folder, cache, "60"], check=True, timeout=60)
        assert len(server.seen) == quiet
    assert set(stored) == set(straight[0]) and len(done.stdout.split()) < sum(
        len(d.splitlines()) for d in straight[0].values()
    )
    assert files(folder) == straight[0]


# Size ---------------------------------------------------------------------------------------------------------------------


def test_rows_of_a_megabyte_go_through(tmp_path):
    big = [
        d.model_copy(update={"source": d.source | {"context": "The barn is red. " * 62_500}})
        for d in rows(3)
    ]
    with Builder(good) as server:
        results = run_async(build(Client(endpoint(server.url)), tmp_path, big))
    assert [len(result.kept) for result in results] == [3, 3, 3]
    assert (
        results[2].kept[0].context == big[0].context and results[0].path.stat().st_size > 3_000_000
    )


def test_a_reply_of_ten_megabytes_is_a_fault_like_any_other(tmp_path):
    huge = "x" * 10**7
    client, result = one(
        WORDS, huge, json.dumps({"words": huge}), said(a="x", b="y", c="z"), folder=tmp_path
    )
    assert result.kept and all(len(m["content"]) < 30_000 for m in client.asked[2])


# Prompts ------------------------------------------------------------------------------------------------------------------


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
        plain, named = (stage.messages(d)[0]["content"] for d in (rows(1)[0], draft))
        assert (plain == named) == (not language) and language in named
        assert json.loads(named.rsplit("\n\n", 1)[1])["title"] == stage.reply.__name__


def test_what_is_asked_for_is_explained():
    assert all(
        name in load_build_prompt("screening-1")
        for name in SCREENING.reply.model_fields["dimensions"].annotation.model_fields
    )
    for stage in (DERIVATION, ANNOTATION):
        for field in stage.reply.model_fields.values():
            inner = getattr(field.annotation, "__args__", [None])[0]
            assert all(
                f"`{name}`" in load_build_prompt(stage.prompt)
                for name in getattr(inner, "model_fields", {})
                if name != "text"
            )


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
    older = replace(DERIVATION, prompt="derivation-1")
    mine = tmp_path / "mine-1.md"
    mine.write_text("Divide it.")
    draft = rows(1)[0]
    here = endpoint("http://127.0.0.1:1/v1")
    for stage in (older, replace(DERIVATION, prompt=str(mine))):
        system, user = stage.messages(draft)
        assert (
            load_build_prompt(stage.prompt) in system["content"]
            and user == DERIVATION.messages(draft)[1]
        )
        assert stage_hash(stage, here) != stage_hash(DERIVATION, here)


def test_a_changed_prompt_is_another_recipe(tmp_path):
    path = tmp_path / "words-1.md"
    path.write_text("Say three words.")
    stage = replace(WORDS, prompt=str(path))
    here = endpoint("http://127.0.0.1:1/v1")
    before = stage_hash(stage, here)
    path.write_text("Say three words, please.")
    assert stage_hash(stage, here) != before and stage.recipe["prompt"] == "words-1"


def test_an_invented_answer_stays_out_of_the_system_message():
    system, user = SCREENING.messages(rows(1)[0])
    assert ANSWER not in system["content"] and json.loads(user["content"])["answer"] == ANSWER
