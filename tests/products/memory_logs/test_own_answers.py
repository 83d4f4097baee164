"""Logs of answers that exist: names of fields, what is left out, consent, redaction, and the way to
a page.
"""

import json
import warnings

import pandas as pd
import pytest

import memcalib as mc
from memcalib.products.memory_logs.levels import (
    LevelProposal,
    LevelsFile,
    practice_levels,
    level_reading,
    read_levels,
)
from memcalib.commands.cli import main
from memcalib.evaluation.footprints import is_footprint
from memcalib.io.records import DataError
from memcalib.products.dataset.memory_drafts import memory_drafts
from memcalib.products.memory_logs.field_maps import guess_fields, read_all, read_map, understood
from memcalib.evaluation.footprints import has_levels
from memcalib.products.memory_logs.own_answers import LogPlan, members_of, own_answers
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import Level, judgment_for, load_examples

CONSENT = {"consent": "trial 2025"}


def mem0_row(number: int, **changes) -> dict:
    row = {
        "id": f"q{number}",
        "query": f"What can I bake on day {number}?",
        "results": [
            {"id": "1", "memory": "Is allergic to peanuts", "created_at": "2025-03-02T10:00:00Z"},
            {"id": "2", "memory": "Plays chess on Sundays", "score": 0.4},
        ],
        "answer": "A cake without peanuts, to which you are allergic.",
    }
    return {**row, **changes}


def write(path, rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def all_bound(example, response):
    return judgment_for(example, dict.fromkeys(example.levels, Level.BOUND), judge="all bound")


def test_the_map_reads_nested_places_and_refuses_what_is_not_there():
    row = {"in": {"q": "What?"}, "ctx": {"docs": [{"body": "A.", "at": "2025-01-01"}]}, "out": [1]}
    fields = read_map(["query=in.q", "memories=ctx.docs", "text=body", "time=at"])
    plain = understood([row], fields).translate(row)
    assert plain["query"] == "What?"
    assert plain["memories"] == [{"text": "A.", "created_at": "2025-01-01"}]
    with pytest.raises(
        DataError, match=r"query=in\.question.*allowed: an existing field: in, in\.q"
    ):
        understood([row], {"query": "in.question"})
    with pytest.raises(DataError, match="text=words.*body"):
        understood([row], {"memories": "ctx.docs", "text": "words"})
    for entries in (["query"], ["question=q"], ["query=a", "query=b"]):
        with pytest.raises(ValueError, match="map: found"):
            read_map(entries)


def test_names_are_guessed_only_where_the_plain_ones_are_missing():
    assert guess_fields([mem0_row(1)]) == {}
    rows = [{"prompt": "What?", "contexts": ["A."], "completion": "B."}]
    assert guess_fields(rows) == {
        "query": "prompt",
        "memories": "contexts",
        "answer": "completion",
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    rows = [{"question": "What?", "retrieved": '["Likes tea."]', "output": "Tea."}]
    file = tmp_path / f"log{suffix}"
    frame = pd.DataFrame(rows)
    if suffix == ".csv":
        frame.to_csv(file, index=False)
    elif suffix == ".parquet":
        frame.to_parquet(file)
    elif suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        write(file, rows)
    reading = read_all(file, field_map={"memories": "retrieved"})
    [row] = reading.rows
    assert (row.query, row.memories[0].text, row.answer) == ("What?", "Likes tea.", "Tea.")


def test_nothing_is_lost_without_being_counted():
    rows = [
        mem0_row(1),
        mem0_row(2, results=[]),
        mem0_row(3, results=[{"memory": " "}]),
        mem0_row(4, answer=""),
        mem0_row(5, consent=False),
        mem0_row(6, results=[{"memory": "Moved.", "created_at": "last May"}]),
        mem0_row(1, answer="Another answer."),
        mem0_row(1, query="Another question?"),
    ]
    answers = own_answers(LogPlan(file="rows", **CONSENT), rows)
    assert len(answers.losses()) + len(answers.rollouts) == len(rows)
    assert {drop.rule for drop in answers.losses()} == {
        "memories",
        "memory text",
        "no answer",
        "consent refused",
    }
    assert [rollout.sample for rollout in answers.rollouts if rollout.example_id == "q1"] == [0, 1]
    assert answers.repeated == 1 and [example.id for example in answers.examples] == [
        "q1",
        "q6",
        "q1+",
    ]
    assert answers.examples[1].blocks[0].time == "last May"
    text = answers.preview()
    assert "1 time cannot be read and is kept as text" in text
    assert "1 row left out, memories: first in row 2" in text


def test_a_row_without_consent_on_record_needs_a_name():
    with pytest.raises(DataError, match="--consent NAME"):
        own_answers(LogPlan(file="rows"), [mem0_row(1)])


def test_private_values_of_every_text_are_taken_out():
    row = mem0_row(
        1,
        query="Write to anna@example.org",
        answer="I wrote to anna@example.org.",
        turns=[{"role": "user", "content": "My address is anna@example.org"}],
    )
    answers = own_answers(LogPlan(file="rows", **CONSENT), [row])
    everything = answers.examples[0].to_json() + answers.rollouts[0].to_json() + answers.preview()
    assert "anna@example.org" not in everything
    assert answers.replaced.total() == 1


def test_times_and_turns_reach_example_and_judge():
    turns = [
        {"role": "human", "content": "I moved."},
        {"role": "ai", "content": "Where to?"},
        {"role": "user", "content": "What can I bake on day 1?"},
    ]
    answers = own_answers(LogPlan(file="rows", **CONSENT), [mem0_row(1, turns=turns)])
    [example] = answers.examples
    assert [turn.role for turn in example.turns] == ["user", "assistant"]
    assert example.blocks[0].time == "2025-03-02" and example.blocks[1].score == 0.4
    payload = mc.render(example)[-1]["content"]
    assert "[2025-03-02] Is allergic to peanuts" in payload


def test_the_same_words_of_two_people_are_two_questions_and_a_group_joins_them():
    rows = [mem0_row(1, query="What?"), mem0_row(2, query="What?")]
    rows[1]["results"] = [{"memory": "Is late"}]
    answers = own_answers(LogPlan(file="rows", **CONSENT), rows)
    assert len({example.question_id for example in answers.examples}) == 2
    joined = own_answers(LogPlan(file="rows", **CONSENT), [{**row, "group": "g"} for row in rows])
    assert f"{len(joined.rollouts)} answers to 1 question can be judged" in joined.preview()
    assert len({example.question_id for example in joined.examples}) == 1


def test_what_the_store_knows_about_a_memory_stays_with_its_block():
    row = {
        "q": "What now?",
        "ctx": [
            {"mid": 4, "body": "Is tired after work.", "origin": "chat", "kind": "state"},
            {"mid": 9, "body": "Is tired after the work.", "origin": "chat", "kind": "state"},
            {"mid": "bo@example.org", "body": "Owns a kayak."},
        ],
        "a": "Rest.",
    }
    fields = ["query=q", "memories=ctx", "text=body", "answer=a"]
    answers = own_answers(LogPlan(file="rows", map=read_map(fields), **CONSENT), [row, row])
    first, third = answers.examples[0].blocks
    assert first.model_extra == {"store_ids": ["4", "9"], "source": "chat", "type": "state"}
    assert third.model_extra["store_ids"][0].startswith("id ")
    assert "bo@example.org" not in answers.examples[0].to_json()
    named = own_answers(
        LogPlan(file="rows", map=read_map([*fields, "memory_id=origin"]), **CONSENT), [row]
    )
    assert named.examples[0].blocks[0].model_extra["store_ids"] == ["chat", "chat"]
    plain = mem0_row(1)
    assert [
        b.model_extra["store_ids"]
        for b in own_answers(LogPlan(file="rows", **CONSENT), [plain]).examples[0].blocks
    ] == [["1"], ["2"]]


def test_a_log_of_another_language_is_read():
    row = {"query": "今晚吃什么？", "memories": ["用户对花生过敏。"], "answer": "不含花生的面。"}
    answers = own_answers(LogPlan(file="rows", **CONSENT), [row])
    assert answers.examples[0].atoms[0].text == "用户对花生过敏。"


def test_evaluate_judges_rows_that_carry_answers():
    labelled = mem0_row(
        1, results=[{"text": "A.", "level": "B"}, {"text": "B.", "level": "Ignore"}]
    )
    [judgment] = mc.evaluate([labelled], judge=all_bound, log=CONSENT)
    assert judgment.scored and judgment.over == 1
    assert mc.score([judgment])["SCS"].tolist() == [50]
    [footprint] = mc.evaluate([mem0_row(1)], judge=all_bound, log=CONSENT)
    assert is_footprint(footprint)
    with pytest.raises(ValueError, match="without known ideal levels"):
        mc.score([footprint])


def test_evaluate_takes_a_frame_and_a_folder(tmp_path):
    [example] = load_examples("samples")[:1]
    frame = pd.DataFrame([{"example": example, "model": m, "response": "Yes."} for m in "ab"])
    out = tmp_path / "run"
    judgments = mc.evaluate(frame, judge=all_bound, out=out)
    assert {judgment.model for judgment in judgments} == {"a", "b"}
    again = mc.evaluate(out, judge=all_bound)
    assert {judgment.key for judgment in again} == {judgment.key for judgment in judgments}
    with pytest.raises(DataError, match="example, model and response"):
        mc.evaluate([{"example": example, "response": 3}], judge=all_bound)
    with pytest.raises(ValueError, match="model: found no model"):
        mc.evaluate("starter", judge=all_bound)


def test_what_does_not_enter_is_said_in_a_warning():
    with pytest.warns(UserWarning, match="1 row left out, no answer"):
        mc.evaluate([mem0_row(1), mem0_row(2, answer="")], judge=all_bound, log=CONSENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mc.evaluate([mem0_row(1)], judge=all_bound, log=CONSENT)


def test_the_build_reads_by_the_same_map(tmp_path):
    from memcalib.products.memory_logs.admission import LogConfig

    rows = [{"q": {"t": "What can I bake?"}, "ctx": [{"body": "Likes rye bread."}], "a": "Rye."}]
    config = LogConfig(map=["query=q.t", "memories=ctx", "text=body", "answer=a"], **CONSENT)
    drafts = memory_drafts(write(tmp_path / "log.jsonl", rows), config=config)
    assert [draft.query for draft in drafts.kept] == ["What can I bake?"]
    assert "text: read from body (as the map says)" in drafts.understood


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code


def test_from_a_log_to_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labelled = [
        mem0_row(n, results=[{"text": "Likes rye.", "level": "B"}, {"text": "Rows.", "level": "A"}])
        for n in range(3)
    ]
    write(tmp_path / "own.jsonl", labelled)
    assert run("logs", "own.jsonl") == 0
    assert "3 answers to 3 questions can be judged, 3 with ideal levels" in capsys.readouterr().out
    judge = ("--judge", "tests.products.memory_logs.test_own_answers:all_bound")
    options = ("--log", "own.jsonl", "--consent", "trial", *judge, "--out", "run")
    assert run("evaluate", *options) == 0
    assert "SCS" in capsys.readouterr().out
    page = (tmp_path / "run/report.html").read_text()
    assert "Use of memory" in page
    assert (
        "not recorded" not in page
        and "There is only one seed" not in page
        and ">Seeds<" not in page
    )
    footprints = ("--unlabelled", *options[:-1], "foot")
    assert run("evaluate", *footprints) == 0
    assert (
        "6 memories in the prompt (2 different): 6 left a trace, and 0 decided"
        in capsys.readouterr().out
    )
    page = (tmp_path / "foot/report.html").read_text()
    assert "Footprints only" in page and "SCS" not in page
    assert run("evaluate", *options, "--map", "query=nothing") == 1
    assert "query=nothing" in capsys.readouterr().err


def test_nothing_is_sent_without_a_yes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.jsonl", [mem0_row(1)])
    judge = ("--judge", "j", "--judge-url", "http://127.0.0.1:9/v1", "--judge-key-env", "")
    options = ("--log", "own.jsonl", "--consent", "trial", *judge, "--no-cache")
    assert run("evaluate", *options) == 1
    captured = capsys.readouterr()
    assert "nothing has been sent" in captured.err
    assert "Sent to j at http://127.0.0.1:9/v1 (this machine)" in captured.out
    assert not any((tmp_path / "runs/evaluation").glob("judgments*"))


def test_levels_are_known_only_where_every_memory_has_one():
    rows = [mem0_row(1, results=[{"text": "A.", "level": "B"}, {"text": "B."}])]
    answers = own_answers(LogPlan(file="rows", **CONSENT), rows)
    assert not has_levels(answers.examples[0]) and answers.labelled == []


def test_memories_that_say_the_same_are_one_atom_unless_their_levels_or_figures_differ():
    row = mem0_row(
        1,
        results=[
            {"memory": "User is allergic to peanuts."},
            {"memory": "The user is allergic to peanuts"},
            {"memory": "The user has 2 cats"},
            {"memory": "The user has 3 cats"},
        ],
    )
    [example] = own_answers(LogPlan(file="rows", **CONSENT), [row]).examples
    assert [atom.atom_id for atom in example.atoms] == ["m1_a1", "m3_a1", "m4_a1"]
    assert members_of(example) == {"m1_a1": ["The user is allergic to peanuts"]}
    apart = LogPlan(file="rows", merge=False, **CONSENT)
    assert len(own_answers(apart, [row]).examples[0].atoms) == 4
    labelled = [
        {"text": "User is allergic to peanuts.", "level": "C"},
        {"text": "The user is allergic to peanuts", "level": "A"},
    ]
    [other] = own_answers(LogPlan(file="rows", **CONSENT), [mem0_row(1, results=labelled)]).examples
    assert len(other.atoms) == 2


def test_the_report_counts_merged_memories_one_by_one_beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    twice = [{"text": text, "level": "C"} for text in ("Likes rye.", "Likes rye")]
    write(tmp_path / "own.jsonl", [mem0_row(n, results=twice) for n in range(2)])
    judge = ("--judge", "tests.products.memory_logs.test_own_answers:all_bound")
    assert run("evaluate", "--log", "own.jsonl", "--consent", "t", *judge, "--out", "run") == 0
    table = pd.read_csv(tmp_path / "run/tables/merged-memories.csv")
    assert table["SCS"].tolist() == [50, 25]
    page = (tmp_path / "run/report.html").read_text()
    assert "judged together with: Likes rye" in page


def proposals_of(tmp_path, levels):
    """A folder of levels for one question, from {memory number: (first, second)}."""
    answers = own_answers(LogPlan(file="rows", **CONSENT), [mem0_row(1)])
    [example] = answers.examples
    proposals = []
    for number, (first, second) in levels.items():
        atom = example.atoms[number - 1]
        proposals.append(
            LevelProposal(
                item=f"{example.id}/{atom.atom_id}",
                example_id=example.id,
                atom_id=atom.atom_id,
                question=example.question,
                memory=atom.text,
                first=first,
                second=second,
                action="apply",
                model="m",
            )
        )
    return answers, LevelsFile.write(tmp_path / "levels", proposals)


def test_settled_levels_count_and_open_disagreements_are_disputed(tmp_path):
    answers, levels = proposals_of(tmp_path, {1: ("C", "B"), 2: ("A", "A")})
    [example], [rollout] = levels.apply_all(answers.examples, answers.rollouts)
    assert [atom.ideal.wire for atom in example.atoms] == ["C", "A"]
    assert example.atoms[0].alternative[0].level == Level.BOUND
    assert rollout.example_hash == example.content_hash
    sheet = (tmp_path / "levels/sheet.csv").read_text(encoding="utf-8-sig")
    lines = sheet.replace("q1/m1_a1,,", "q1/m1_a1,B,").replace("q1/m2_a1,,", "q1/m2_a1,C,")
    filled = tmp_path / "filled.csv"
    filled.write_text(lines, encoding="utf-8")
    assert levels.take_sheet(filled, "anna") == 2
    [example], _ = levels.apply_all(answers.examples, answers.rollouts)
    assert [atom.ideal.wire for atom in example.atoms] == ["B", "C"]
    assert levels.error_rate()[:2] == (1, 1)
    assert any("1 is wrong" in note for note in levels.notes())


def test_a_memory_without_a_proposal_leaves_the_question_without_levels(tmp_path):
    answers, levels = proposals_of(tmp_path, {1: ("C", "C")})
    assert not has_levels(levels.apply(answers.examples[0]))
    _, levels = proposals_of(tmp_path, {1: ("C", "C"), 2: (None, None)})
    assert not has_levels(levels.apply(answers.examples[0]))
    with pytest.raises(FileNotFoundError, match="memcalib levels"):
        LevelsFile(tmp_path / "nothing")


def test_a_reply_that_cannot_be_used_proposes_nothing():
    [example] = own_answers(LogPlan(file="rows", **CONSENT), [mem0_row(1)]).examples
    for text in ("", "no json", '{"memories": 3}', '{"memories": [{"memory_id": "m1_a1"}]}'):
        assert read_levels(text, example) == {}
    entry = {"memory_id": "m1_a1", "level": "C", "action": "apply", "reason": "r"}
    twice = json.dumps({"memories": [entry, entry]})
    assert read_levels(twice, example) == {}
    other = json.dumps({"memories": [entry, {**entry, "memory_id": "m9_a1"}]})
    assert set(read_levels(other, example)) == {"m1_a1"}


def test_from_a_log_without_levels_to_scores_in_three_commands(tmp_path, capsys, monkeypatch):
    """200 questions in mem0's form with the practice server: levels, page."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.jsonl", [mem0_row(n) for n in range(200)])
    with MicroServer(
        make_examples("short", 2, 0),
        practice=PracticeJudge(reads=True),
        roles={"micro-levels": practice_levels},
    ) as server:
        address = ("--base-url", server.base_url, "--key-env", "")
        common = ("--consent", "trial", "--yes", "--cache", str(tmp_path / "calls.sqlite"))
        exit_code = run(
            "levels", "own.jsonl", "--model", "micro-levels", *address, *common, "--out", "l"
        )
        assert exit_code == 0
        assert "agree on 400 of 400 memories" in capsys.readouterr().out
        judge = ("--judge", "micro-judge", "--judge-url", server.base_url, "--judge-key-env", "")
        assert run("evaluate", "--log", "own.jsonl", "--levels", "l", *judge, *common) == 0
    output = capsys.readouterr().out
    assert "SCS" in output and "wrong stance" in output
    page = (tmp_path / "runs/evaluation/report.html").read_text()
    assert "error rate is unknown" in page


def test_a_memory_without_text_is_left_out_and_counted_and_its_row_stays():
    row = mem0_row(1)
    row["results"].append({"id": "3", "memory": None})
    row["results"].append({"id": "4", "memory": "  "})
    reading = read_all([row, mem0_row(2, results=[{"id": "5", "memory": ""}])])
    assert [len(row.memories) for row in reading.rows] == [2]
    assert "memories: 5 found, 2 used, 3 not (no text: 2" in reading.text()
    assert any("no text: 2" in note for note in reading.notes())
    assert [drop.rule for drop in reading.dropped] == ["memory text"]


def test_texts_in_cells_and_answers_in_parts_are_read_without_a_map():
    cells = {"query": "What?", "memories": "- Likes soup.\n- Owns a boat.", "answer": "Soup."}
    parts = {**cells, "answer": {"content": [{"type": "text", "text": "Soup."}]}}
    reading = read_all([cells, parts, {**cells, "memories": " "}])
    assert [len(row.memories) for row in reading.rows] == [2, 2]
    assert {row.answer for row in reading.rows} == {"Soup."}
    assert [drop.found for drop in reading.dropped] == ["none"]


def test_a_log_in_which_nothing_is_known_says_which_fields_it_has():
    row = {"req": {"said": "What?"}, "recalled": [{"note": "Likes soup.", "rank": "first"}]}
    with pytest.raises(DataError, match=r"no query in rows with the fields req, req\.said"):
        read_all([row])
    reading = read_all([row], field_map={"query": "req.said", "memories": "recalled"})
    assert [memory.text for memory in reading.rows[0].memories] == ["Likes soup."]


def test_the_rows_of_a_file_that_is_one_object_around_them_are_read(tmp_path):
    rows = [{"asked": "What?", "hits": [{"note": "Likes soup."}]}] * 3
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"export": "v7", "items": rows}))
    reading = read_all(file, field_map={"query": "asked", "memories": "hits"})
    assert [(row.query, len(row.memories)) for row in reading.rows] == [("What?", 1)] * 3


def test_rows_with_an_id_that_stands_before_are_counted_in_the_preview():
    rows = [mem0_row(1), mem0_row(1, answer="A tart."), mem0_row(2, id="q1")]
    preview = own_answers(LogPlan(file="rows", **CONSENT), rows).preview()
    assert "1 row reuses the id of an earlier, different question" in preview
    assert "several answers of one model: 1 question" in preview


@pytest.mark.parametrize(
    ("wrapped", "is_read"),
    [
        ("<think>Which {{one}}?</think>\n{}", True),
        ("Which {{one}}?\n</think>\n\n{}", True),
        ("```json\n{}\n```\nI hope this helps.", True),
        ("```json\n{}\n```", True),
        ("", False),
        ("I cannot.", False),
    ],
)
def test_levels_are_read_as_the_judge_reads_its_replies(wrapped, is_read):
    [example] = own_answers(LogPlan(file="rows", **CONSENT), [mem0_row(1)]).examples
    memories = [
        {"memory_id": atom.atom_id, "level": "B", "action": "apply", "reason": "Because."}
        for atom in example.atoms
    ]
    for extra in ({}, {"summary": "Two memories."}):
        text = wrapped.replace("{}", json.dumps({"memories": memories, **extra}))
        text = text.replace("{{", "{").replace("}}", "}")
        reading = level_reading(text, example)
        assert bool(reading.levels) == is_read and bool(reading.fault) != is_read
    assert "cut off" in level_reading("{}", example, "length").fault


def test_another_limit_is_not_said_to_be_other_levels(tmp_path):
    from memcalib.commands.evaluate import Evaluation, EvaluationRun

    plan = LogPlan(file=write(tmp_path / "log.jsonl", map(mem0_row, range(5))), **CONSENT)
    evaluation = Evaluation(log=plan, judge="micro-exact", limit=3)
    EvaluationRun(evaluation, tmp_path / "run").generate()
    with pytest.raises(ValueError, match="limit: 3 there, 4 now") as refused:
        EvaluationRun(evaluation.model_copy(update={"limit": 4}), tmp_path / "run")
    assert "ideal levels" not in str(refused.value)
