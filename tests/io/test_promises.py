"""What is promised about private text is said in one place."""

import json
from pathlib import Path

import pytest

import memcalib
from memcalib.inference.endpoint import Endpoint
from memcalib.io.promises import KEPT, LOOKED_FOR, SENDING
from memcalib.products.dataset.consent import CallPlan, NotAgreed
from memcalib.products.memory_logs.own_answers import LogPlan, own_answers

PACKAGE = Path(memcalib.__file__).parent
SENTENCES = [*KEPT.values(), *SENDING.values(), *LOOKED_FOR.values()]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_promise_is_written_once(sentence):
    beginning = sentence[:40].lower()
    holders = [
        file.name
        for file in PACKAGE.rglob("*.py")
        if beginning in file.read_text(encoding="utf-8").lower()
    ]
    assert holders == ["promises.py"]


def test_the_statement_before_a_build_takes_them():
    terms = {name: {} for name in ("consent", "licence", "redacted", "left out")}
    terms.update(rows=1, memories=2, users=1)
    terms.update({"found nothing": {}, "not looked for": ["positions (GPS)"]})
    statement = str(CallPlan((), terms))
    assert all(text in statement for text in (*SENDING.values(), KEPT["cache"]))
    assert LOOKED_FOR["limits"] in statement and "Not looked for: positions (GPS)" in statement


def test_the_statement_before_a_log_is_judged_and_the_notes_of_its_report_take_them(tmp_path):
    log = tmp_path / "log.jsonl"
    row = {
        "user_id": "u",
        "query": "Write to anna@example.org?",
        "answer": "Yes.",
        "memories": ["They sail."],
    }
    log.write_text(json.dumps(row) + "\n")
    answers = own_answers(LogPlan(file=str(log), consent="given in a test"))
    judge = Endpoint(model="j", base_url="http://localhost:9/v1", key_env="")
    statement = answers.statement([judge])
    assert f"{SENDING['again']}. {KEPT['cache']}." in statement
    assert LOOKED_FOR["limits"] in statement and "Not looked for: " in statement
    assert answers.statement([]) == "", "nothing is sent to a judge that is a function"
    (note,) = [note for note in answers.notes() if LOOKED_FOR["left"] in note]
    assert note.startswith("Log: 1 private value was replaced")


def test_a_stop_before_anything_was_sent_says_so_in_the_same_words():
    error = NotAgreed.with_way_on(" --yes", "A statement.")
    assert str(error) == f"A statement.\n\n{SENDING['nothing'].lower()}. To continue, use --yes"
