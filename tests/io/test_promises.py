"""What is promised about private text is said in one place."""

from pathlib import Path

import pytest

import memcalib
from memcalib.io.promises import KEPT, LOOKED_FOR, SENDING
from memcalib.memory_logs.consent import CallPlan

PACKAGE = Path(memcalib.__file__).parent
SENTENCES = [*KEPT.values(), *SENDING.values(), *LOOKED_FOR.values()]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_promise_is_written_once(sentence):
    beginning = sentence[:40]
    holders = [
        file.name for file in PACKAGE.rglob("*.py") if beginning in file.read_text(encoding="utf-8")
    ]
    assert holders == ["promises.py"]


def test_the_statement_before_a_build_takes_them():
    terms = {name: {} for name in ("consent", "licence", "redacted", "left out")}
    terms.update(rows=1, memories=2, users=1)
    terms.update({"found nothing": {}, "not looked for": ["positions (GPS)"]})
    statement = str(CallPlan((), terms))
    assert all(text in statement for text in (*SENDING.values(), KEPT["cache"]))
    assert LOOKED_FOR["limits"] in statement and "Not looked for: positions (GPS)" in statement
