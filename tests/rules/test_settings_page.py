"""The page of settings says of every setting of credit which part of the paper or which experiment
needs it, and which functions read it. Its table is made of the class and of the code.
"""

import re
from pathlib import Path

import pytest

from memcalib.rules import settings_table
from memcalib.rules.base import CreditSettings, setting
from memcalib.rules.settings_table import credit_settings_table, setting_readers


def rows() -> dict[str, list[str]]:
    """The cells of each row, by the name of the setting."""
    lines = credit_settings_table().splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {name.strip("`"): rest for name, *rest in cells}


def test_every_setting_of_credit_has_one_row_in_the_order_of_the_class():
    table = rows()
    assert list(table) == list(CreditSettings.model_fields)
    for name, (default, _, need, read_by) in table.items():
        assert default == str(getattr(CreditSettings(), name))
        assert need.strip() and read_by.startswith("`"), name


def test_the_last_column_names_who_reads_a_setting():
    assert setting_readers(["cap"]) == {"cap": ["redistribution.place_pairs"]}, "read in one place"
    sentences = setting_readers(["segment_min"])["segment_min"]
    assert sentences == ["rules.base.CreditConfig", "credit.token_credit.TokenCredit"]


TESTS = Path(__file__).parents[1]


def files_that_test_credit() -> list[Path]:
    """The tests of the method and the slow reference code, without those that take every field."""
    names = ("channels", "localization", "redistribution", "protected_lines")
    chapters = [TESTS / f"test_{name}.py" for name in names]
    references = [TESTS / "helpers" / name for name in ("reference.py", "slow_rules.py")]
    rooms = [*(TESTS / "credit").glob("*.py"), *(TESTS / "rules").glob("*.py")]
    of_all_fields = {Path(__file__).name, "test_credit_settings.py"}
    return [*chapters, *references, *(file for file in rooms if file.name not in of_all_fields)]


def test_every_setting_of_credit_is_tried_in_a_test_of_what_it_does():
    texts = [file.read_text(encoding="utf-8") for file in files_that_test_credit()]
    readers = setting_readers(CreditSettings.model_fields)
    for name, functions in readers.items():
        tried = any(re.search(rf"\b{name}\b", text) for text in texts)
        assert tried, (
            f"{name}: found no test that names it; test what it does beside the tests of the "
            f"functions that read it ({', '.join(functions) or 'none yet'}): "
            f"tests/test_redistribution.py for place_pairs, tests/test_localization.py for the "
            f"weights of a rule and for thresholds, tests/credit/test_assignment.py for scales"
        )


def test_a_setting_that_nothing_reads_or_nobody_needs_is_refused(monkeypatch):
    class Unread(CreditSettings):
        cap_of_nothing: int = setting(1, "nobody", why="a test")

    monkeypatch.setattr(settings_table, "CreditSettings", Unread)
    with pytest.raises(ValueError, match="cap_of_nothing: found no function.*nbs/rules"):
        credit_settings_table()

    class Unneeded(CreditSettings):
        invented_setting: int = 1

    monkeypatch.setattr(settings_table, "CreditSettings", Unneeded)
    with pytest.raises(ValueError, match="invented_setting: found no words.*in nbs/rules"):
        credit_settings_table()
