"""The page on trust names tests that exist: at least one for each guarantee and each net."""

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = json.loads((TESTS.parent / "nbs" / "trust.ipynb").read_text(encoding="utf-8"))
TEXT = "\n".join("".join(cell["source"]) for cell in PAGE["cells"])
BEFORE, _, TABLES = TEXT.partition("\n## Tests\n")
GUARANTEES = re.findall(r"^(\d+)\. \*\*([^*]+)\.\*\*", BEFORE, re.MULTILINE)
ROWS = re.findall(r"^\| (\d+) ([^|]+) \| (.+) \|$", TABLES, re.MULTILINE)
PLACES = re.findall(r"`([\w/]+\.py)`((?:[:,] `test_\w+`)*)", TABLES)


def test_each_guarantee_has_a_row_of_tests():
    assert [(number, name) for number, name, _ in ROWS] == GUARANTEES
    assert [number for number, _ in GUARANTEES] == [str(i + 1) for i in range(len(ROWS))]
    assert len(ROWS) > 15 and all(".py`" in tests for *_, tests in ROWS)


def test_each_net_has_a_row_of_tests():
    nets = BEFORE.partition("## Safety nets")[2]
    named = re.findall(r"^\| \*\*([^*]+)\*\*", nets, re.MULTILINE)
    rows = TABLES.partition("| net | tests |")[2]
    assert len(named) == 6
    for name in named:
        assert name.casefold() in rows.casefold(), name


@pytest.mark.parametrize(("file", "names"), PLACES)
def test_the_tests_that_the_page_names_exist(file, names):
    text = (TESTS / file).read_text(encoding="utf-8")
    for name in re.findall(r"test_\w+", names):
        assert f"\ndef {name}(" in text, name
    assert "\ndef test_" in text
