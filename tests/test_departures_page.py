"""The page of departures names what it must name, and links to places that are there."""

import json
import re
from pathlib import Path

from memcalib.problem import SHIPPED_TEMPLATES
from memcalib.products.dataset.writing import FAMILIES

NBS = Path(__file__).parents[1] / "nbs"
CELLS = json.loads((NBS / "departures.ipynb").read_text())["cells"]
PROSE = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")


def test_every_family_of_distractors_is_a_kind_of_one_of_the_papers():
    rows = [line for line in PROSE.splitlines() if line.startswith(("| topical", "| plausible"))]
    assert len(rows) == 2
    named = re.findall(r"`([a-z_]+)`", "\n".join(rows))
    assert sorted(named) == sorted(FAMILIES)


def test_the_neutral_template_is_offered():
    assert "prompt_template=neutral" in PROSE and "neutral" in SHIPPED_TEMPLATES


def test_each_row_of_the_first_table_leads_to_a_section_of_the_page():
    sections = {
        re.sub(r"[^a-z -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^##+ (.+)$", PROSE, re.M)
    }
    for anchor in re.findall(r"\]\(#([a-z-]+)\)", PROSE):
        assert anchor in sections, anchor


def test_pages_that_speak_of_departures_find_the_section():
    sections = {
        re.sub(r"[^a-z -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^##+ (.+)$", PROSE, re.M)
    }
    wanted = {}
    for page in NBS.rglob("*.ipynb"):
        for anchor in re.findall(r"departures\.ipynb#([a-z-]+)", page.read_text()):
            wanted.setdefault(anchor, page.name)
    assert wanted and not {a: page for a, page in wanted.items() if a not in sections}


def test_measured_numbers_stand_where_a_measurement_is_promised():
    assert "RESULT_" not in PROSE
