"""The paper index: every display equation has a row, and everything that a row points to exists."""

import json
import re
from pathlib import Path

import pytest

from memcalib.io.settings import package_data, shipped_names
from test_glossary import resolve

NBS = Path(__file__).parents[1] / "nbs"
CELLS = [
    "".join(c["source"])
    for c in json.loads((NBS / "paper_index.ipynb").read_text(encoding="utf-8"))["cells"]
]
EQUATIONS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in re.findall(r"^\| (\d.*) \|$", CELLS[1], re.M)
]
HOMES = dict(
    [cell.strip() for cell in line.split("|")[:2]]
    for line in (NBS / "ORDER").read_text().splitlines()
    if "|" in line and line[0] != "#"
)


def links(text: str) -> list[tuple[str, str]]:
    return re.findall(r"\]\(([\w/]+\.ipynb)(?:#([\w-]+))?\)", text)


def test_every_display_equation_has_a_row():
    assert [int(row[0]) for row in EQUATIONS] == list(range(1, 46))


@pytest.mark.parametrize("row", EQUATIONS, ids=lambda row: row[0])
def test_an_equation_points_to_functions_and_to_their_pages(row):
    names = re.findall(r"`([\w.]+)`", row[3])
    ours = [name for name in names if not name.startswith("trl.")]
    assert (
        ours
        and all(resolve(name) is not None for name in ours)
        and set(names) - {*ours} <= {"trl.GRPOTrainer"}
    )
    modules = [
        next(m for m in sorted(HOMES, key=len, reverse=True) if name.startswith(f"{m}."))
        for name in ours
    ]
    assert [page for page, _ in links(row[4])] == [
        f"{HOMES[m]}.ipynb" for m in dict.fromkeys(modules)
    ]


def test_every_link_leads_to_a_page_and_a_heading():
    for page, anchor in links("".join(CELLS)):
        text = "\n".join(
            "".join(c["source"]) for c in json.loads((NBS / page).read_text())["cells"]
        )
        headings = {
            re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-")
            for head in re.findall(r"^#+ (.*)$", text, re.M)
        }
        assert not anchor or anchor in headings, (page, anchor)


def test_data_and_commands_of_tables_and_figures_exist():
    from memcalib.commands.cli import app

    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    verbs = {name.replace("_", "-") for name in names}
    shipped = shipped_names("data", "reference", suffix=".csv")
    assert package_data("data", "reference").is_dir()
    assert {name for name in re.findall(r"`(\w+)\.csv`", CELLS[2])} <= {*shipped}
    assert {name for name in re.findall(r"`memcalib ([\w-]+)", CELLS[2])} <= verbs
    named = {name for name in re.findall(r"`([a-z]\w*_[a-z_]+)`", CELLS[2])}
    assert all(
        any(name in path.read_text() for path in package_data().rglob("*.py")) for name in named
    )


def test_every_label_has_its_notebook_and_command():
    """Each of the paper's 21 labels stands in a row with the notebooks that regenerate it,
    linked, and their command.
    """
    from memcalib.products.reproduction.experiments import PAPER_ITEMS, experiments

    rows = [line for line in CELLS[2].splitlines() if line.startswith("| ")]
    for label, (_, parts) in PAPER_ITEMS.items():
        rows_of_label = [row for row in rows if re.search(rf"(?<![\w:-]){label}(?![\w-])", row)]
        for name in parts:
            [row] = [row for row in rows_of_label if f"`memcalib reproduce {name}`" in row]
            assert f"experiments/{experiments()[name].name}" in row, (label, name)
