"""The glossary names what exists."""

import importlib
import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "nbs" / "glossary.ipynb"
ROWS = [
    line.split("|")
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    for line in "".join(cell["source"]).splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]
NAMES = sorted(
    {name for row in ROWS for name in re.findall(r"`([a-z_0-9]+(?:\.\w+)+)`", "|".join(row))}
    | {"judge.Judge"}
)


def resolve(dotted: str):
    """The object of a dotted name below the package: the longest part that is a module,
    then attributes.
    """
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            named = importlib.import_module(".".join(["memcalib", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            fields = {
                **getattr(named, "model_fields", {}),
                **getattr(named, "__dataclass_fields__", {}),
            }
            named = fields[name] if name in fields else getattr(named, name)
        return named
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_glossary_exists(name):
    assert resolve(name) is not None


def test_the_glossary_is_a_table_of_many_terms():
    assert len(ROWS) > 50 and len(NAMES) > 40 and all(row[1].strip() for row in ROWS)
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        resolve("channels.no_such_name")
