"""The quick tests that spare most texts a slow search change nothing that is found."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared import redaction as r

DATA = Path(__file__).parent / "data"
SLOW = {  # rule -> its search without the quick test
    "e-mail": r.pattern_rule("e-mail", r.EMAIL.recipe, flags=2).find,
    "one-time code": r._code_spans,
}
RULES = {"e-mail": r.EMAIL, "one-time code": r.CODE}


def texts_of_lists():
    for file in sorted(DATA.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]
    for file in sorted(DATA.glob("*.txt")):
        yield from file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", RULES)
def test_the_lists_give_the_same_with_and_without(name):
    count = 0
    for text in texts_of_lists():
        expected = list(SLOW[name](text))
        assert list(RULES[name].find(text)) == expected, text
        count += bool(expected)
    assert count >= 10


PIECES = st.sampled_from(
    "ana at gmail . com dot example punkt de code is 4711 123-456 pin four seven two nine our the "
    "verification seed phrase AB1C-DEFG use to log in (at) [dot] @ , 2025-03-02 call office".split()
)


@given(st.lists(PIECES, max_size=12).map(" ".join) | st.lists(PIECES, max_size=8).map("".join))
def test_any_text_gives_the_same_with_and_without(text):
    for name, rule in RULES.items():
        assert list(rule.find(text)) == list(SLOW[name](text))


def test_a_text_that_came_before_is_redacted_alike():
    redactor = r.Redactor()
    texts = ["Plays chess.", "Write to ana@example.org.", "ana@example.org plays chess."]
    first = redactor.row(texts, "chess-club").texts
    assert redactor.row(texts, "chess-club").texts == first == r.Redactor().row(texts).texts
    assert redactor.row(["Plays chess."], "chess").texts == ["Plays [user]."]
