"""Counts of memories, citations and sweeps: properties, bad input, and planted faults."""

import json
import math

import pandas as pd
import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.memory_logs.citations import (
    audit_citations,
    citation_table,
    cited_blocks,
    marks_of,
)
from memcalib.products.memory_logs.memory_use import findings, memory_key, memory_table, use_frame
from memcalib.products.memory_logs.sweep import (
    PromptSetting,
    SweepGrid,
    recommend,
    score_scale,
    setting_example,
    shown_blocks,
    whole_judgment,
)
from memcalib.products.memory_logs.own_answers import LogPlan, own_answers
from memcalib.products.micro.practice.memory_system import practice_log, practice_store
from memcalib.problem import Example, Rollout, judgment_for

LEVELS = st.lists(
    st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from(["A", "B", "C", None])), min_size=1),
    min_size=1,
    max_size=6,
)


def judged(answers):
    """Examples by id and judgments with these (ideal, actual) levels."""
    examples = {}
    judgments = []
    for number, levels in enumerate(answers):
        blocks = [{f"Memory {position}.": ideal} for position, (ideal, _) in enumerate(levels)]
        example = Example.of(f"Question {number}?", *blocks, id=f"q{number}")
        actual = dict(
            zip(example.levels, [actual_level for _, actual_level in levels], strict=True)
        )
        examples[example.id] = example
        judgments.append(judgment_for(example, actual, judge="x"))
    return examples, judgments


@given(LEVELS)
def test_losses_add_up_and_counts_stay_apart(answers):
    examples, judgments = judged(answers)
    frame = use_frame(judgments, examples)
    scored = [row for row in judgments if row.scored]
    lost = sum(100 * (1 - 0.5 ** (row.over + row.under)) for row in scored)
    assert math.isclose(frame["lost"].sum(), lost, abs_tol=1e-6)
    table = memory_table(frame)
    pairs = [pair for levels in answers for pair in levels]
    assert table["in_prompt"].sum() == len(pairs)
    assert table["unscored"].sum() == sum(actual is None for _, actual in pairs)
    assert table["over_used"].sum() == sum(actual is not None and actual > i for i, actual in pairs)
    assert table["under_used"].sum() == sum(
        actual is not None and actual < i for i, actual in pairs
    )
    assert table["cited"].isna().all() and table["retrieved"].isna().all()


def test_chance_alone_gives_no_finding():
    import random

    rng = random.Random(3)
    answers = []
    for _ in range(300):
        answers.append([("A", rng.choices("ABC", (8, 1, 1))[0]) for _ in range(20)])
    examples, judgments = judged(answers)
    frame = use_frame(judgments, examples)
    finding_rows = findings(memory_table(frame), frame)
    assert "hijacks" not in set(finding_rows["finding"])


def newsletter_answers(count=40, actual="B", every=3):
    """Two memories that are used as they should be, and one that gets into each third answer."""
    answers = []
    for number in range(count):
        leaked = actual if number % every == 0 else "A"
        answers.append([("C", "C"), ("B" if number % 2 else "A",) * 2, ("A", leaked)])
    return answers


@pytest.mark.parametrize(("actual", "finding"), [("B", "intrudes"), ("C", "hijacks")])
def test_a_memory_that_gets_into_answers_is_named_once_by_how_far(actual, finding):
    examples, judgments = judged(newsletter_answers(actual=actual))
    frame = use_frame(judgments, examples)
    [row] = findings(memory_table(frame), frame).to_dict("records")
    assert (row["finding"], row["text"]) == (finding, "Memory 2.")
    verb = "used in" if finding == "intrudes" else "decided"
    assert row["why"] == f"{verb} 14 of 40 answers in which it should leave no trace"


def test_memories_that_are_never_used_do_not_make_the_others_intrude():
    """All three get into answers alike, and five stand beside them without a trace."""
    answers = []
    for number in range(60):
        intruding = [("A", "B" if (number + shift) % 3 == 0 else "A") for shift in range(3)]
        answers.append([*intruding, *[("A", "A")] * 5])
    examples, judgments = judged(answers)
    frame = use_frame(judgments, examples)
    assert set(findings(memory_table(frame), frame)["finding"]) == {"never used"}


def test_chance_alone_rarely_intrudes_or_is_most_harmful():
    """A judge that misreads 5 % of eight memories in 40 answers, in 40 stores: a rule of 5 %."""
    import random

    from memcalib.products.memory_logs.memories import MemoryReport, most_harmful

    intruding = 0
    harmful = 0
    for seed in range(40):
        rng = random.Random(seed)
        answers = [[("A", rng.choices("AB", (95, 5))[0]) for _ in range(8)] for _ in range(40)]
        examples, judgments = judged(answers)
        frame = use_frame(judgments, examples)
        table = memory_table(frame)
        rows = findings(table, frame)
        intruding += "intrudes" in set(rows["finding"])
        harmful += bool(most_harmful(MemoryReport(table, rows, {}, 40, 40)))
    assert intruding <= 4 and harmful <= 4


def test_the_first_sentence_names_the_memory_with_most_harm(capsys, tmp_path):
    from memcalib.io.records import write_jsonl

    examples, judgments = judged(newsletter_answers())
    write_jsonl(tmp_path / "examples.jsonl", examples.values())
    write_jsonl(tmp_path / "judgments.jsonl", judgments)
    code, output, errors = run(capsys, "memories", tmp_path)
    assert code == 0, errors
    first = "Most harm comes from 'Memory 2.'. It was used wrongly in 14 of 40 answers, and 100 %"
    assert output.startswith(first)
    assert "Of these memories, 1 intrudes into answers." in output
    page = (tmp_path / "memories.html").read_text(encoding="utf-8")
    assert "used wrongly in 14 of 40 answers" in page and "<h3>intrudes" in page


def test_two_wrong_uses_are_no_most_harmful_memory(capsys, tmp_path):
    from memcalib.io.records import write_jsonl

    examples, judgments = judged([[("A", "B")], [("A", "B")], *[[("A", "A")]] * 8])
    write_jsonl(tmp_path / "examples.jsonl", examples.values())
    write_jsonl(tmp_path / "judgments.jsonl", judgments)
    code, output, _ = run(capsys, "memories", tmp_path)
    assert code == 0 and "Most harm" not in output


def test_a_log_that_says_what_entered_is_not_told_that_it_does_not(capsys, tmp_path):
    """Where `in_prompt` is true of every memory, all that was found entered."""
    from memcalib.evaluation.run import evaluate

    def as_they_should_be(example, response):
        return judgment_for(example, example.levels, judge="kind")

    says_not = "does not say which retrieved memories were left out"
    for says_so in (True, False):
        rows = practice_log(12)
        for row in rows:
            del row["candidates"]
            if says_so:
                row["memories"] = [{**memory, "in_prompt": True} for memory in row["memories"]]
        log = write_jsonl_rows(tmp_path / f"log-{says_so}.jsonl", rows)
        folder = tmp_path / f"run-{says_so}"
        evaluate(log, judge=as_they_should_be, out=folder, log={"file": log, "consent": "x"})
        code, output, errors = run(capsys, "memories", folder)
        assert code == 0 and (says_not in output) != says_so, errors


def test_without_levels_nothing_is_called_wrong():
    examples, judgments = judged([[("A", "C"), ("A", "A")]] * 12)
    unknown = {"settings": {"ideal_levels": "unknown"}}
    frame = use_frame([row.model_copy(update=unknown) for row in judgments], examples)
    table = memory_table(frame)
    assert table[["over_used", "under_used", "lost", "should_use"]].isna().all().all()
    assert findings(table, frame)["finding"].tolist() == ["never used"]


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("so [mem:3].", ["3"]),
        ("so [memory 3] and [Mem: a-1, mem:4]", ["3", "a-1", "4"]),
        ("see [3] and [memory of a lake] and [member:3]", []),
        ('{"used_memories": ["m1", 2, true, {"id": "x"}, null]}', ["m1", "2", "x"]),
        ('Text.\n{"memory_ids": ["a"]}', ["a"]),
        ('```json\n{"citations": ["a"]}\n```', ["a"]),
        ('{"used_memories": "m1"', []),
        ("<oai-mem-citation><citation_entries>\nnone\n</citation_entries></oai-mem-citation>", []),
        ("[" * 50_000 + "mem:1", []),
    ],
)
def test_marks(text, marks):
    assert marks_of(text) == marks


def test_ids_come_before_numbers_and_files_before_guesses():
    example = Example.of("Q?", {"One.": "A"}, {"Two.": "A"})
    example.blocks[0].model_extra["store_ids"] = ["2"]
    example.blocks[1].model_extra["source"] = "notes/travel.md"
    assert cited_blocks("[mem:2]", example) == ({"m1"}, [])
    entry = "<oai-mem-citation><citation_entries>\ntravel.md:1-2|note=[x]\n</citation_entries>"
    assert cited_blocks(f"{entry}</oai-mem-citation>", example) == ({"m2"}, [])
    assert cited_blocks("[mem:7]", example) == (set(), ["7"])


def test_precision_and_recall_by_hand():
    examples, judgments = judged([[("C", "C"), ("A", "C"), ("B", "A"), ("A", None)]])
    answer = Rollout(example_id="q0", response="[mem:1] [mem:3] [mem:4]")
    table = citation_table(audit_citations(judgments, examples.values(), [answer]))
    percent = table.set_index("share")["percent"]
    assert percent["precision: marked memories that were used"] == 50
    assert percent["recall: used memories that are marked"] == 50
    assert percent["recall, over-used"] == 0
    assert percent["marked, under-used without a trace"] == 100
    silent = answer.model_copy(update={"response": "Nothing marked."})
    with pytest.raises(ValueError, match="found no mark in 1 answer; allowed"):
        audit_citations(judgments, examples.values(), [silent])


def test_candidates_of_a_log(tmp_path):
    rows = practice_log(6)
    plan = LogPlan(file="rows", consent="x")
    shown = own_answers(plan, rows)
    every = own_answers(plan.model_copy(update={"candidates": True, "merge": False}), rows)
    assert {len(row.blocks) for row in shown.examples} == {8}
    assert {len(row.blocks) for row in every.examples} == {10}
    assert all(len(row.model_extra["left_out"]) == 2 for row in shown.examples)
    setting = PromptSetting()
    assert all(len(shown_blocks(row, setting)) == 8 for row in every.examples)
    flagged = [{**row, "memories": row["candidates"]} for row in rows]
    for row in flagged:
        del row["candidates"]
        for position, memory in enumerate(row["memories"]):
            row["memories"][position] = {**memory, "in_prompt": position < 3}
    assert {len(row.blocks) for row in own_answers(plan, flagged).examples} == {3}
    for row in flagged:
        row["memories"] = [{**memory, "in_prompt": False} for memory in row["memories"]]
    with pytest.raises(ValueError, match="no memory in the prompt"):
        own_answers(plan, flagged)


@given(st.integers(0, 12), st.floats(0, 1))
def test_what_is_not_shown_counts_as_ignored(k, threshold):
    plan = LogPlan(file="rows", consent="x", candidates=True, merge=False)
    [example] = own_answers(plan, practice_log(1)).examples
    setting = PromptSetting(top_k=k, threshold=threshold)
    shown_example = setting_example(example, setting)
    assert len(shown_example.blocks) <= k
    assert all(block.score >= threshold for block in shown_example.blocks)
    judgment = (
        judgment_for(shown_example, shown_example.levels, judge="x")
        if shown_example.blocks
        else None
    )
    whole = whole_judgment(example, judgment, setting)
    missing = example.levels.keys() - shown_example.levels.keys()
    assert whole.under == sum(example.levels[atom_id] for atom_id in missing) and whole.over == 0


def test_scores_that_cannot_be_compared_are_refused():
    def with_scores(*scores):
        example = Example.of("Q?", *({f"M{n}.": "A"} for n in range(len(scores))))
        for block, score in zip(example.blocks, scores, strict=True):
            block.score = score
        return example

    assert score_scale([with_scores(0.9, 0.5), with_scores(0.7, 0.7)]) == "similarity"
    assert score_scale([with_scores(0.1, 0.5)]) == "distance"
    with pytest.raises(ValueError, match="found none for a candidate in 1 of 2"):
        score_scale([with_scores(0.9, 0.5), with_scores(0.9, None)])
    with pytest.raises(ValueError, match="as similarities do.*as distances do"):
        score_scale([with_scores(0.9, 0.5), with_scores(0.5, 0.9)])
    with pytest.raises(ValueError, match="up to 1 in 1 questions"):
        score_scale([with_scores(0.9, 0.5), with_scores(90, 50)])


def test_grids_name_each_setting_once():
    grid = SweepGrid(top_k=(2, 2, 4), thresholds=(0.5,), framings=("advice", "facts"))
    names = [setting.name for setting in grid.settings()]
    assert len(names) == len(set(names)) == 5 and names[0] == "as in the log, advice"
    full = grid.model_copy(update={"full": True})
    assert len(full.settings()) == 8
    with pytest.raises(ValueError, match="top_k: found -1"):
        SweepGrid(top_k=(-1,))


def test_the_page_names_what_was_planted(capsys, tmp_path):
    """The practice store's faults, from the log's own answers, read by a judge of words."""
    from memcalib.evaluation.run import evaluate
    from memcalib.products.micro.practice.models import PracticeJudge

    reader = PracticeJudge(reads=True)

    def by_words(example, response):
        rows = [{"text": atom.text, "atom_id": atom.atom_id} for atom in example.atoms]
        judged_rows = reader.judgments(example.question, response, rows)
        levels = {row["atom_id"]: row["predicted_usage_level"] for row in judged_rows}
        return judgment_for(example, levels, judge="by words")

    log = write_jsonl_rows(tmp_path / "log.jsonl", practice_log(120))
    evaluate(log, judge=by_words, out=tmp_path / "run", log={"file": log, "consent": "x"})
    code, output, _ = run(capsys, "memories", tmp_path / "run")
    assert code == 0 and "Report:" in output
    import pandas as pd

    finding_rows = pd.read_csv(tmp_path / "run" / "tables" / "memory-findings.csv")
    planted = {memory.text: memory.fault for memory in practice_store() if memory.fault}
    fault_of = {"hijacks": "hijack", "stale": "stale", "never used": "unused"}
    named = [
        (row.text, fault_of.get(row.finding, row.finding)) for row in finding_rows.itertuples()
    ]
    assert sorted(named) == sorted(planted.items()), "exactly what was planted, each once"
    assert output.splitlines()[-1].startswith("Report:")
    assert "Most harm comes from '" in output


def write_jsonl_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_wrong_folders_are_named(capsys, tmp_path):
    for verb in ("memories", "citations"):
        code, _, errors = run(capsys, verb, tmp_path)
        assert code == 1 and "found no examples.jsonl" in errors


def test_stale_memories_alone_are_those_with_a_newer_one_on_their_subject():
    example = Example.of(
        "Where do I live?",
        {"The user lives in Leeds.": "A"},
        {"The user lives in Hull.": "C"},
        {"Plays chess on Sundays.": "A"},
        {"The user lives in York.": "A"},
    )
    days = ("2024-01-05", "2025-03-02", "2024-02-02", None)
    for block, day in zip(example.blocks, days, strict=True):
        block.time = day
    assert shown_blocks(example, PromptSetting(stale_only=True)) == ["m1"]
    assert shown_blocks(example, PromptSetting()) == ["m1", "m2", "m3", "m4"]
    names = [setting.name for setting in SweepGrid(stale_only=True).settings()]
    assert names[-1] == "as in the log, stale only, advice" and len(names) == len(set(names))
    table = pd.DataFrame(
        {"setting": ["as in the log, advice", names[-1]], "SCS": [50.0, 90.0], "tokens": [9, 5]}
    )
    assert recommend(table).setting == "as in the log, advice"


def test_one_text_with_and_without_an_id_is_one_memory():
    examples, judgments = judged([[("A", "A")], [("A", "B")], [("A", "A")]])
    examples["q0"].blocks[0].model_extra["store_ids"] = ["m-1"]
    frame = use_frame(judgments, examples)
    assert memory_table(frame)[["memory", "in_prompt"]].to_numpy().tolist() == [["m-1", 3]]
    key = memory_key(examples["q1"].blocks[0])
    assert memory_table(frame, {key: 2, "m-1": 1})["retrieved"].tolist() == [6]
    examples["q1"].blocks[0].model_extra["store_ids"] = ["m-2"]  # two entries of a store
    assert memory_table(use_frame(judgments, examples))["memory"].nunique() == 3
