"""The quick tests that spare most texts a slow search change nothing that is found."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared import redaction as r

DATA = Path(__file__).parent / "data"
RULES = {rule.name: rule for rule in r.RULES}


def without_quick_test(rule, text):
    """What the slow search of a rule finds, whatever its quick test says."""
    return sorted(rule.find(text), key=lambda span: (span[0], -span[1]))


def texts_of_lists():
    for file in sorted(DATA.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]
    for file in sorted(DATA.glob("*.txt")):
        yield from file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", RULES)
def test_the_lists_give_the_same_with_and_without(name):
    rule = RULES[name]
    count = 0
    spared = 0
    for text in texts_of_lists():
        expected = without_quick_test(rule, text)
        assert rule.spans(text) == expected, text
        count += bool(expected)
        spared += not rule.needed(text)
    assert count >= 3
    assert spared >= 100


WORDS = """
ana at gmail . com dot example punkt de code is 4711 123-456 pin four seven two nine our the
verification seed phrase AB1C-DEFG use to log in (at) [dot] @ , 2025-03-02 call office on DE
89 3704 0044 0532 0130 00 IBAN : = -- -p <pass> </pass> password reset api-key x1y2z3Q! 10.0.
0.7 :: fe80 2a02 https:// / ? # token=q9 Bearer Cookie: tel +49 030 2312 45 4111 1111 1111 1111
12:30 - 2024-12-31 ( ) sk-abcdefgh12345678 eyJhbGci.eyJz set DB_URL ä 电话 dGhpcyBpcyBhIHRlc3Q=
"""
PIECES = st.sampled_from(WORDS.split())


@given(st.lists(PIECES, max_size=12).map(" ".join) | st.lists(PIECES, max_size=8).map("".join))
def test_any_text_gives_the_same_with_and_without(text):
    for rule in RULES.values():
        assert rule.spans(text) == without_quick_test(rule, text), rule.name


@given(st.text("0123456789 -./()+:aonDE@,", max_size=40))
def test_any_figures_give_the_same_with_and_without(text):
    for rule in RULES.values():
        assert rule.spans(text) == without_quick_test(rule, text), rule.name


@given(st.lists(st.text("abc", max_size=4)), st.text("abc", max_size=9))
def test_the_shortest_parts_stand_for_all_words(words, text):
    parts = r.shortest_parts(words)
    assert any(part in text for part in parts) == any(word in text for word in words)


def test_a_text_that_came_before_is_redacted_alike():
    redactor = r.Redactor()
    texts = ["Plays chess.", "Write to ana@example.org.", "ana@example.org plays chess."]
    first = redactor.row(texts, "chess-club").texts
    assert redactor.row(texts, "chess-club").texts == first == r.Redactor().row(texts).texts
    assert redactor.row(["Plays chess."], "chess").texts == ["Plays [user]."]
