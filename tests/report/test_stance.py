"""Wrong stances are asked for, counted beside the six metrics, and come first among the worst
answers.
"""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.exam.exam import stance_items, stance_line, stance_numbers
from memcalib.evaluation.stance import actions_of, stance_table, wrong_stances
from memcalib.io.records import write_jsonl
from memcalib.judge import JudgeConfig, judge_name, judge_request, judgment_from, read_reply
from memcalib.inference.endpoint import Endpoint
from memcalib.problem import Example, Level, Rollout, judgment_for
from memcalib.report.evaluation_report import evaluation_text, write_evaluation_report
from memcalib.report.page import answer_html, gravest, segments

CONFIG = JudgeConfig(blind=True, stance=True)


def example_of(number: int, action: str | None = None) -> Example:
    example = Example.of(
        f"Question {number}?", {f"Fact {number}.": "C"}, {"Likes films.": "A"}, id=f"e{number}"
    )
    example.atoms[0].memory_action = action
    return example


def judged(example, stance=None, actual=(Level.CONTROL, Level.IGNORE), **fields):
    levels = dict(zip(example.levels, actual, strict=True))
    judgment = judgment_for(example, levels, judge="j", model="m", **fields)
    judgment.atoms[0].stance = stance
    return judgment


def reply_of(stances) -> str:
    rows = []
    for name, letter, stance in stances:
        row = {"atom_id": name, "predicted_usage_level": letter, "stance": stance}
        rows.append({**row, "evidence_quote": "words" if letter != "A" else "", "reason": "r"})
    return json.dumps({"atom_judgments": rows})


def test_the_stance_of_a_used_atom_is_read_and_that_of_another_is_not():
    request = judge_request(example_of(1), "words", CONFIG)
    [first, second] = request.atom_ids
    reading = read_reply(reply_of([(first, "C", "misreads"), (second, "A", "follows")]), request)
    assert reading.faults == []
    judgment = judgment_from(example_of(1), "words", request, [reading])
    stance_of = {atom.atom_id: atom.stance for atom in judgment.atoms}
    assert stance_of[request.atom_ids[first]] == "misreads"
    assert stance_of[request.atom_ids[second]] is None


def test_an_unknown_or_missing_stance_is_a_fault():
    request = judge_request(example_of(1), "words", CONFIG)
    [first, second] = request.atom_ids
    reading = read_reply(reply_of([(first, "C", "agrees"), (second, "A", "none")]), request)
    assert any("stance" in fault for fault in reading.faults)


def test_without_the_setting_nothing_of_the_prompt_or_the_name_changes():
    endpoint = Endpoint(model="m", key_env="")
    plain = JudgeConfig(blind=True)
    assert "misreads" not in json.dumps(judge_request(example_of(1), "a", plain).messages)
    assert judge_name(endpoint, plain) == judge_name(
        endpoint, JudgeConfig(blind=True, stance=False)
    )
    assert judge_name(endpoint, plain) != judge_name(endpoint, CONFIG)


@pytest.mark.parametrize(
    ("action", "stance", "wrong"),
    [
        ("apply", "follows", False),
        ("apply", "turns_down", True),
        ("apply", "corrects", True),
        ("apply", "misreads", True),
        ("correct", "follows", True),
        ("correct", "corrects", False),
        ("correct", "turns_down", False),
        (None, "turns_down", False),
        (None, "misreads", True),
        ("apply", None, False),
    ],
)
def test_which_stance_is_wrong_depends_on_what_should_be_done(action, stance, wrong):
    example = example_of(1, action)
    wrong_atoms = wrong_stances(judged(example, stance), actions_of([example]))
    assert bool(wrong_atoms) is wrong


def test_the_table_counts_answers_with_a_wrong_stance():
    examples = [example_of(1, "correct"), example_of(2, "apply")]
    judgments = [judged(examples[0], "follows"), judged(examples[1], "follows")]
    [row] = stance_table(judgments, actions_of(examples)).to_dict("records")
    assert row["answers with a wrong stance"] == 1 and row["wrong stance, %"] == 50
    assert not len(stance_table([judged(examples[0])], {}))


def test_planted_errors_are_all_in_the_first_third():
    """Ten misread memories and false beliefs that are followed, among answers with many harmless
    levels too high.
    """
    rng = random.Random(0)
    judgments = []
    examples = []
    planted = set()
    for number in range(60):
        action = "correct" if number % 12 == 6 else "apply"
        example = example_of(number, action)
        examples.append(example)
        if number % 6 == 0:
            stance = "misreads" if action == "apply" else "follows"
            planted.add(example.id)
            judgments.append(judged(example, stance))
        else:
            other = rng.choice([Level.IGNORE, Level.BOUND, Level.CONTROL])
            stance = "corrects" if action == "correct" else "follows"
            judgments.append(judged(example, stance, (Level.CONTROL, other)))
    rng.shuffle(judgments)
    worst = gravest(judgments, actions_of(examples), count=60)
    first_third = {judgment.example_id for judgment, _ in worst[: len(judgments) // 3]}
    assert planted <= first_third
    assert all("misread" in w.reasons[0] or "stance" in w.reasons[0] for _, w in worst[:10])


def test_stance_and_its_reason_are_on_the_page_and_in_the_terminal(tmp_path):
    example = example_of(1, "correct")
    judgment = judged(example, "follows")
    judgment.atoms[0].quote = "never said"
    rollout = Rollout(example_id="e1", model="m", response="**Yes**, never.")
    write_jsonl(tmp_path / "examples.jsonl", [example])
    write_jsonl(tmp_path / "rollouts.jsonl", [rollout])
    write_jsonl(tmp_path / "judgments.jsonl", [judgment])
    page = write_evaluation_report(tmp_path).read_text(encoding="utf-8")
    assert (
        f"wrong stance: follows: {example.atoms[0].text}" in page and "<strong>Yes</strong>" in page
    )
    assert "never said" in page and "not in the answer" in page
    assert 'id="stance"' in page and "not recorded" not in page.split('id="protocol"')[0]
    wrong = "a memory is used in the wrong way (wrong stance) in 1 answer (100.0 %)"
    assert wrong in evaluation_text(tmp_path)


def test_a_failed_exam_is_a_banner(tmp_path):
    write_jsonl(tmp_path / "examples.jsonl", [example_of(1)])
    write_jsonl(tmp_path / "judgments.jsonl", [judged(example_of(1))])
    exam = {
        "judge": "j",
        "verdict": "failed",
        "reasons": ["weighted kappa: 0.31; allowed: 0.6 or more"],
        "date": "2026-01-01",
        "numbers": {"macro": 40.0},
        "file": "runs/exam/Deep-V3/exam.json",
        "data": {"edited": []},
    }
    (tmp_path / "exam.json").write_text(json.dumps(exam))
    page = write_evaluation_report(tmp_path).read_text(encoding="utf-8")
    assert 'class="banner"' in page and "weighted kappa: 0.31" in page
    assert "runs/exam/Deep-V3/exam.json" in page


def test_the_exam_counts_known_stances():
    items = stance_items()
    judgments = []
    for item in items:
        judgment = judgment_for(item.example, item.answer.levels, condition="stance")
        judgment.sample = item.number
        true_stance = item.answer.labels[0].stance
        judgment.atoms[0].stance = "follows" if true_stance == "corrects" else true_stance
        judgments.append(judgment)
    numbers = stance_numbers(items, judgments)
    expected = {"atoms": 32, "unread": 0, "accuracy": 75.0, "found": 100.0, "false_alarms": 0.0}
    assert expected.items() <= numbers.items()
    assert numbers["verdict"] == "failed" and "corrects named" in numbers["reasons"][0]
    [corrects] = [row for row in numbers["by_stance"] if row["stance"] == "corrects"]
    assert corrects["named"] == 0 and corrects["read_as"] == {"follows": 8}
    assert "corrects named in 0 % of 8 (read as follows 8)" in stance_line(numbers)
    assert stance_numbers([], judgments) is None


@pytest.mark.parametrize(
    ("missed", "alarms", "verdict"),
    [(0, 0, "passed"), (1, 0, "passed"), (2, 0, "undecided"), (8, 0, "failed"), (0, 12, "failed")],
)
def test_the_verdict_says_whether_a_judge_may_be_used_for_stance(missed, alarms, verdict):
    judgments = []
    for item in stance_items():
        judgment = judgment_for(item.example, item.answer.levels, condition="stance")
        judgment.sample = item.number
        read_stance = item.answer.labels[0].stance
        if read_stance == "misreads" and missed:
            missed -= 1
            read_stance = "follows"
        elif read_stance != "misreads" and alarms:
            alarms -= 1
            read_stance = "misreads"
        judgment.atoms[0].stance = read_stance
        judgments.append(judgment)
    numbers = stance_numbers(stance_items(), judgments)
    assert numbers["verdict"] == verdict
    words = {"passed": "may be used", "failed": "may not be used", "undecided": "not decided"}
    assert words[verdict] in stance_line(numbers)


PIECES = st.sampled_from(
    [
        "**bold** ",
        "word ",
        "\n\n- item ",
        "\n\n```\ncode\n```\n\n",
        "<script>x</script>",
        "`c`",
        "| a |",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.data())
def test_marks_are_closed_inside_every_tag_and_nothing_of_the_answer_runs(text, data):
    positions = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = {}
    for number, (start, end) in enumerate(zip(positions[::2], positions[1::2], strict=False), 1):
        if start < end:
            spans[number] = [(start, end)]
    pieces = segments(text, spans, dict.fromkeys(spans, "over"))
    shown = answer_html(pieces)
    assert shown.count("<mark") == shown.count("</mark>")
    assert "<script" not in shown and "<a " not in shown and "<img" not in shown
    assert not any("\ue000" <= character <= "\uf8ff" for character in shown)
    stack = []
    for tag in re.findall(r"<(/?)(\w+)[^>]*?(/?)>", shown):
        closing, name, alone = tag
        if closing:
            assert stack.pop() == name
        elif not alone and name not in ("br", "hr"):
            stack.append(name)
    assert stack == []
