"""The site: menus, links, anchors, alternative text, names that link.

`make docs` opens the pages as well.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import memcalib

from tools.check_docs import (
    Page,
    browser_faults,
    configuration_faults,
    link_faults,
    links,
    option_faults,
    picture_faults,
    read_pages,
    size_faults,
)
from tools.release_notes import release_notes
from tools.show_docs import find, homes, link_names, pages, parameter_table
from tools.site import menus, sections

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"


def page(path: str, *cells: tuple[str, str, list]) -> Page:
    made = [
        {"id": f"c{k}", "cell_type": kind, "source": text, "outputs": outs}
        for k, (kind, text, outs) in enumerate(cells)
    ]
    return Page(path, made)


@pytest.fixture(scope="module")
def notebooks() -> list[Page]:
    return read_pages(NBS)


def as_shown(found: Page) -> Page:
    """A page with the headings that the site gives to what it exports."""
    module = next((module for module, path in pages().items() if path == found.path), None)
    names = "\n\n".join(f"### {name}" for name in homes().get(module, {}) if "." not in name)
    return Page(found.path, [*found.cells, {"cell_type": "markdown", "source": names}])


@pytest.fixture(scope="module")
def shown(notebooks) -> list[Page]:
    return [as_shown(found) for found in notebooks]


def test_every_link_of_every_page_leads_somewhere(shown):
    assert list(link_faults(shown, NBS, ROOT)) == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"])
def test_every_link_of_a_file_beside_the_notebooks_leads_somewhere(name, shown):
    beside = [replace(found, path=f"nbs/{found.path}") for found in shown]
    file = page(name, ("markdown", (ROOT / name).read_text(encoding="utf-8"), []))
    assert [fault for fault in link_faults([file, *beside], ROOT) if fault.startswith(name)] == []


def test_every_picture_has_alternative_text(notebooks):
    assert list(picture_faults(notebooks)) == []


def test_every_option_of_a_cell_is_yaml(notebooks):
    assert list(option_faults(notebooks)) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "#| fig-alt: more runs: 8 prompts\nplot()",
            "`#| fig-alt: more runs: 8 prompts` is no YAML",
        ),
        ("#| export\n#| fig-alt: [a\nplot()", "`#| fig-alt: [a` is no YAML"),
        ('#| fig-alt: "more runs: 8 prompts"\nplot()', None),
        ("#| default_exp io.records\n#| export\nx = 1\n#| a: b: c", None),
    ],
)
def test_an_option_that_is_no_yaml_is_named_with_page_and_cell(source, fault):
    """Quarto would stop at it, and the whole site with it."""
    faults = list(option_faults([page("a/one.ipynb", ("code", source, []))]))
    if fault is None:
        assert faults == []
    else:
        assert (
            len(faults) == 1
            and faults[0].startswith("a/one.ipynb: cell c0: ")
            and fault in faults[0]
        )


def test_no_page_is_heavier_than_its_figures_explain():
    assert list(size_faults(NBS)) == []


def test_faults_are_named_with_page_cell_and_what_is_allowed():
    here = page(
        "a/one.ipynb",
        (
            "markdown",
            "# Title\n\n## What a judge sees\n\n"
            "[x](two.ipynb#first-part) [y](two.ipynb#second) [z](#what-a-judge-sees)",
            [],
        ),
        ("markdown", '![](b.png) <a href="nothing.ipynb">n</a>\n\n<img src="c.png">\n', []),
        ("code", "plot()", [{"data": {"image/png": "…"}}]),
        ("code", "#| fig-alt: two lines that cross\nplot()", [{"data": {"image/png": "…"}}]),
    )
    there = page(
        "a/two.ipynb", ("markdown", "## First part\n\n## 1. First part\n\n## Third {#third}", [])
    )
    assert there.anchors() == {"first-part", "first-part-1", "third"}
    found = list(link_faults([here, there], NBS))
    assert [fault.split("link to ")[1].split(":")[0] for fault in found] == [
        "'two.ipynb#second'",
        "'b.png'",
        "'nothing.ipynb'",
        "'c.png'",
    ]
    assert found[0].startswith("a/one.ipynb: cell c0:") and "allowed:" in found[0]
    missing = list(picture_faults([here]))
    assert (
        len(missing) == 3
        and "'b.png'" in missing[0]
        and "<img>" in missing[1]
        and "cell c2" in missing[2]
    )


def test_the_menus_hold_every_page_once_in_the_order_of_reading():
    parts = sections(NBS)
    flat = [
        p
        for part in parts.values()
        for entry in part
        for p in ([entry] if isinstance(entry, str) else entry["contents"])
    ]
    assert sorted(flat) == sorted({*flat}) == sorted(found.path for found in read_pages(NBS))
    assert parts["The method"] == [
        f"{name}.ipynb" for name in sorted(p.stem for p in NBS.glob("0*.ipynb"))
    ]
    listed = [p for p in flat if p in {*pages().values()}]
    order = [p for p in pages().values() if "/" not in p] + [
        p for p in pages().values() if "/" in p
    ]
    assert sorted(listed, key=order.index)[:8] == listed[:8]
    bars = [item["text"] for item in menus(NBS)["website"]["navbar"]["left"]]
    assert bars[0] == "Start" and bars[-2:] == ["Reference", "Paper index"] and "The method" in bars


def test_configuration_names_files_that_exist(tmp_path):
    for name in ("styles.css", "favicon.svg"):
        (tmp_path / name).write_text("")
    (tmp_path / "_quarto.yml").write_text((ROOT / "_quarto.yml").read_text())
    for found in read_pages(NBS):
        (tmp_path / found.path).parent.mkdir(exist_ok=True)
        (tmp_path / found.path).write_text('{"cells": []}')
    (tmp_path / "nbdev.yml").write_text("{}")
    assert [fault for fault in configuration_faults(tmp_path) if "sidebar.yml" in fault] != []
    (tmp_path / "sidebar.yml").write_text(yaml.safe_dump(menus(NBS)))
    assert list(configuration_faults(tmp_path)) == []
    (tmp_path / "lost.ipynb").write_text('{"cells": []}')
    assert list(configuration_faults(tmp_path)) == ["lost.ipynb: found in no menu of the site"]


def test_there_is_one_configuration():
    assert (NBS / "_quarto.yml").is_symlink() and (
        NBS / "_quarto.yml"
    ).resolve() == ROOT / "_quarto.yml"


def test_a_name_in_prose_links_to_its_definition():
    linked = link_names(
        "`calibration_metrics`, [`score`](x.ipynb) and `answer`", "03_metrics.ipynb", "metrics"
    )
    assert (
        linked == "[`calibration_metrics`](#calibration_metrics), [`score`](x.ipynb) and `answer`"
    )
    assert (
        link_names("`mc.score()`", "report/02_tables.ipynb", "report.tables")
        == "[`mc.score()`](../03_metrics.ipynb#score)"
    )
    assert "(00_problem.ipynb#judgment)" in link_names(
        "`problem.Judgment.over`", "paper_index.ipynb", None
    )
    assert link_names("```\n`mc.score`\n```", "x.ipynb", None) == "```\n`mc.score`\n```"
    assert (
        find("score", "metrics").module == "metrics"
        and find("evaluation.breakdown", None) == pages()["evaluation.breakdown"]
    )
    assert (
        find("answer", "metrics") is None
        and find("answer", "metrics", frozenset(["answer"])).module == "micro.world"
    )


def test_every_name_of_the_paper_index_links():
    cells = json.loads((NBS / "paper_index.ipynb").read_text())["cells"]
    rows = [
        row
        for row in "".join("".join(cell["source"]) for cell in cells).splitlines()
        if row[:3].strip("| ").isdigit()
    ]
    assert len(rows) == 45
    for row in rows:
        names = [name for name in row.split(" | ")[3].split(", ") if not name.startswith("`trl.")]
        assert all(
            link_names(name, "paper_index.ipynb", None).startswith("[`") for name in names
        ), row


def test_a_definition_shows_its_parameters_and_its_source():
    home = homes()["metrics"]["calibration_metrics"]
    assert "| `rho` | `float` | `0.5` |" in parameter_table(home)
    line = int(home.source.rpartition("#L")[2])
    assert (
        "def calibration_metrics("
        in (ROOT / "memcalib" / "metrics.py").read_text().splitlines()[line - 1]
    )
    settings = parameter_table(homes()["trainer.train_config"]["TrainConfig"])
    assert "| `lr` |" in settings and "| `trl` |" in settings


@pytest.mark.slow
def test_a_page_that_is_too_wide_or_complains_is_found(tmp_path):
    """Needs Chromium, as `make docs` does."""
    pytest.importorskip("playwright")
    good = (
        "<p>short</p><div style='overflow-x:auto'><div style='width:3000px'>scrolls inside "
        "itself</div></div>"
    )
    bad = (
        "<div style='width:3000px'>runs off</div><script>console.error('broken')</script><img "
        "src='http://127.0.0.1:9/x.png'>"
    )
    for name, body in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><html><body>{body}</body></html>")
    found = browser_faults(tmp_path, ["good.ipynb", "bad.ipynb"])
    if found and "no Chromium" in found[0]:
        pytest.skip(found[0])
    assert found and all(fault.startswith("bad.ipynb") for fault in found)
    assert {
        width
        for width in ("1400", "390")
        if any(f"at {width} px wider" in fault for fault in found)
    } == {
        "1400",
        "390",
    }
    assert any("broken" in fault for fault in found) and any(
        "asks for http://127.0.0.1:9" in fault for fault in found
    )


def test_release_notes_are_the_section_of_a_version():
    text = "# Changelog\n\n## 0.2.0 (2027)\n\n- new\n\n## 0.1.0\n\n- first\n\n## Imports\n\n| a |\n"
    assert release_notes("0.2.0", text) == "- new" and release_notes("0.1.0", text) == "- first"
    with pytest.raises(ValueError, match=r"no version '0.3.0'; allowed: 0.2.0, 0.1.0"):
        release_notes("0.3.0", text)
    assert release_notes(memcalib.__version__, (ROOT / "CHANGELOG.md").read_text()).startswith("- ")


def test_a_search_for_what_people_want_finds_the_start_page(notebooks):
    """Quarto searches the text of sections nearly word by word."""
    (start,) = [found for found in notebooks if found.path == "start.ipynb"]
    text = "\n".join(text for _, text in start.texts()).lower()
    for wish in (
        "evaluate my own model",
        "train a model",
        "build a benchmark",
        "label answers",
        "reproduce a table",
    ):
        assert wish in text
    assert {"tutorials/evaluate_your_model.ipynb", "lab/label_answers.ipynb"} <= {
        target for _, target in links(start)
    }
