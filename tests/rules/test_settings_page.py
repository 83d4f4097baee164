"""The page of settings says of every setting of credit which part of the paper or which experiment
needs it.
"""

import json
import re
from pathlib import Path

import yaml

from memcalib.io.settings import package_data
from memcalib.rules.base import CreditSettings

PAGE = Path(__file__).parents[2] / "nbs" / "rules" / "01_base.ipynb"
ROW = re.compile(r"^\| `(\w+)` \|(.*?)\|(.+)\|$", re.M)


def rows() -> dict[str, tuple[str, str]]:
    """Of each setting in the table: the section of the paper, and who needs it."""
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    table = next(text for text in sources if text.startswith("### What each setting is there for"))
    return {name: (paper.strip(), reason.strip()) for name, paper, reason in ROW.findall(table)}


def test_every_setting_of_credit_has_one_row_in_the_order_of_the_class():
    assert list(rows()) == list(CreditSettings.model_fields)
    assert all(reason for _, reason in rows().values())


def test_the_sections_are_those_of_the_table_of_provenance():
    file = package_data("products", "reproduction", "provenance.yaml")
    facts = yaml.safe_load(file.read_text(encoding="utf-8"))
    sources = facts["method"]["memcalib.rules.base:CreditSettings"]
    for name, (section, _) in rows().items():
        where = str(sources[name].get("where", ""))
        assert re.split(r"[ ,:]", where)[0] == section, name
