"""The page of settings says of every setting of credit which part of the paper or which experiment
needs it, and which functions read it.
"""

import ast
import json
import re
from pathlib import Path

import yaml

from memcalib.io.settings import package_data
from memcalib.rules.base import CreditSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "nbs" / "rules" / "01_base.ipynb"
ROW = re.compile(r"^\| `(\w+)` \|(.*?)\|(.+)\|(.+)\|$", re.M)


def rows() -> dict[str, tuple[str, str, str]]:
    """Of each setting in the table: the section of the paper, who needs it, and who reads it."""
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    table = next(text for text in sources if text.startswith("### What each setting is there for"))
    return {name: tuple(map(str.strip, cells)) for name, *cells in ROW.findall(table)}


def test_every_setting_of_credit_has_one_row_in_the_order_of_the_class():
    assert list(rows()) == list(CreditSettings.model_fields)
    assert all(reason for _, reason, _ in rows().values())


def test_the_sections_are_those_of_the_table_of_provenance():
    file = package_data("products", "reproduction", "provenance.yaml")
    facts = yaml.safe_load(file.read_text(encoding="utf-8"))
    sources = facts["method"]["memcalib.rules.base:CreditSettings"]
    for name, (section, _, _) in rows().items():
        where = str(sources[name].get("where", ""))
        assert re.split(r"[ ,:]", where)[0] == section, name


def readers() -> dict[str, list[str]]:
    """The functions and classes of the method that read each setting, as `module.name`."""
    package = ROOT / "memcalib"
    files = [
        *sorted((package / "rules").glob("[!_]*.py")),
        *(package / f"{name}.py" for name in ("localization", "redistribution")),
        *sorted((package / "credit").glob("[!_]*.py")),
    ]
    found: dict[str, list[str]] = {name: [] for name in CreditSettings.model_fields}
    for file in files:
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            owners = {"config", "batch.config", "self.config"}
            if node.name == "CreditConfig":
                owners = {"self"}
            for access in ast.walk(node):
                if not isinstance(access, ast.Attribute) or access.attr not in found:
                    continue
                name = f"{module}.{node.name}"
                if ast.unparse(access.value) in owners and name not in found[access.attr]:
                    found[access.attr].append(name)
    return found


def test_the_last_column_names_who_reads_a_setting():
    listed = {name: re.findall(r"`([\w.]+)`", column) for name, (_, _, column) in rows().items()}
    assert listed == readers()
    assert listed["cap"] == ["redistribution.place_pairs"], "one number, read in one place"
