"""Files that a build needs: a description with the micro-world's models at an address,
a sheet that somebody filled in.
"""

import csv
import json
from pathlib import Path

from memcalib.products.dataset.build import MICRO_ROLES


def role_settings(url: str, **models: str) -> dict[str, dict[str, str]]:
    """The three endpoints of a build at one address; `models` replace those of the micro-world by
    role.
    """
    settings = {}
    for role, model in {**MICRO_ROLES, **models}.items():
        settings[role] = {"model": model, "base_url": url, "key_env": "", "thinking": "default"}
    return settings


def write_description(
    path: Path, url: str, models: dict[str, str] | None = None, **settings
) -> Path:
    """A YAML file of a build with these settings, whose endpoints are at one address."""
    path.write_text(json.dumps({**role_settings(url, **(models or {})), **settings}))
    return path


def fill_in(sheet: Path, fails: int = 0) -> Path:
    """The sheet of a pilot with a decision on every row: the first ones fail, the others pass."""
    with open(sheet, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows[:fails]:
        row.update(result="fail", stage="derivation", issue="the query says it already")
    for row in rows[fails:]:
        row.update(result="pass", stage="", issue="")
    with open(sheet, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return sheet
