"""The site: menus, links, anchors, alternative text, names that link.

`make docs` opens the pages as well.
"""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont
from typer.testing import CliRunner

import memcalib
from memcalib.commands.cli import app

from tools.check_docs import (
    Page,
    blank_line_faults,
    browser_faults,
    configuration_faults,
    front_matter_faults,
    link_faults,
    links,
    option_faults,
    picture_faults,
    read_pages,
    size_faults,
    widget_faults,
)
from tools.check_site import Quiet, home_faults, markdown_faults, static_faults
from tools.generated_pages import as_text, cite_page, command_page, news_page, samples_page, verbs
from tools.quarto_pages import (
    REFERENCE,
    as_markdown,
    first_screen,
    folded_reference,
    for_quarto,
    install_line,
    numbered,
    with_fig_alt,
)
from tools.release_notes import release_notes
from tools.samples import REPORTS, SAMPLES, as_page, with_icon
from tools.search_index import PHRASES, add_wishes, wishes
from tools.show_docs import (
    Home,
    call_form,
    find,
    homes,
    link_names,
    pages,
    parameter_table,
    parameters,
    signature,
)
from tools.site import markdown_file, menus, sections, to_markdown_links
from tools.trim_site import trim

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
WIDGET = "jupyter.widget-view"


def page(path: str, *cells: tuple[str, str, list]) -> Page:
    cell_list = [
        {"id": f"c{k}", "cell_type": kind, "source": text, "outputs": outs}
        for k, (kind, text, outs) in enumerate(cells)
    ]
    return Page(path, cell_list)


@pytest.fixture(scope="module")
def notebooks() -> list[Page]:
    return read_pages(NBS)


def as_shown(a_page: Page) -> Page:
    """A page with the headings that the site gives to what it exports."""
    module = next((module for module, path in pages().items() if path == a_page.path), None)
    names = "\n\n".join(f"### {name}" for name in homes().get(module, {}) if "." not in name)
    return Page(a_page.path, [*a_page.cells, {"cell_type": "markdown", "source": names}])


@pytest.fixture(scope="module")
def shown(notebooks) -> list[Page]:
    return [as_shown(a_page) for a_page in notebooks]


def test_every_link_of_every_page_leads_somewhere(shown):
    assert list(link_faults(shown, NBS, ROOT)) == []


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md", "LOG-archive.md"]
)
def test_every_link_of_a_file_beside_the_notebooks_leads_somewhere(name, shown):
    beside = [replace(a_page, path=f"nbs/{a_page.path}") for a_page in shown]
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
        ("#| code-fold: true\n#| code-fold: show\nx = 1", "gives 'code-fold' a second time"),
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


def test_front_matter_is_yaml_headings_stand_free_and_no_widget_is_stored(notebooks):
    assert list(front_matter_faults(notebooks)) == []
    assert list(blank_line_faults(notebooks)) == []
    assert list(widget_faults(notebooks)) == []


def test_front_matter_that_is_no_yaml_is_named_with_page_cell_and_line():
    bad = page("one.ipynb", ("raw", "---\ntitle: a\ndescription: b: c\n---", []))
    (fault,) = front_matter_faults([bad])
    assert fault.startswith("one.ipynb: cell c0: line 3: 'description: b: c' is no YAML")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("prose\n## Heading", 1),
        ("prose\n- item", 1),
        ("prose\n| a | b |", 1),
        ("prose\n\n## Heading\n\n- one\n- two\n  more\n- three", 0),
        ("```bash\nls\n# comment\n```", 0),
    ],
)
def test_what_pandoc_would_take_for_prose_is_found(text, faults):
    assert len(list(blank_line_faults([page("one.ipynb", ("markdown", text, []))]))) == faults


def test_a_stored_widget_is_named():
    out = {"output_type": "display_data", "data": {f"application/vnd.{WIDGET}+json": {}}}
    (fault,) = widget_faults([page("one.ipynb", ("code", "load()", [out]))])
    assert "one.ipynb: cell c0" in fault and "tools.strip_widgets" in fault


def test_a_link_to_a_page_that_was_moved_names_the_page():
    first_page = page("one.ipynb", ("markdown", "[x](old/03_judge.ipynb)", []))
    moved = page("02_judge.ipynb", ("markdown", "# Judge", []))
    (fault,) = link_faults([first_page, moved], NBS / "nowhere")
    assert fault.endswith("no such page or file; moved to 02_judge.ipynb?")


def test_no_page_is_heavier_than_its_figures_explain():
    assert list(size_faults(NBS)) == []


def test_faults_are_named_with_page_cell_and_what_is_allowed():
    first_page = page(
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
    second_page = page(
        "a/two.ipynb", ("markdown", "## First part\n\n## 1. First part\n\n## Third {#third}", [])
    )
    assert second_page.anchors() == {"first-part", "first-part-1", "third"}
    faults = list(link_faults([first_page, second_page], NBS))
    assert [fault.split("link to ")[1].split(":")[0] for fault in faults] == [
        "'two.ipynb#second'",
        "'b.png'",
        "'nothing.ipynb'",
        "'c.png'",
    ]
    assert faults[0].startswith("a/one.ipynb: cell c0:") and "allowed:" in faults[0]
    missing = list(picture_faults([first_page]))
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
        for entries in parts.values()
        for entry in entries
        for p in ([entry] if isinstance(entry, str) else entry["contents"])
    ]
    assert sorted(flat) == sorted({*flat}) == sorted(a_page.path for a_page in read_pages(NBS))
    assert parts["The method"] == [
        f"{name}.ipynb" for name in sorted(p.stem for p in NBS.glob("0*.ipynb"))
    ]
    listed = [p for p in flat if p in {*pages().values()}]
    order = [p for p in pages().values() if "/" not in p] + [
        p for p in pages().values() if "/" in p
    ]
    assert sorted(listed, key=order.index)[:8] == listed[:8]
    bars = [item["text"] for item in menus(NBS)["website"]["navbar"]["left"]]
    assert bars[0] == "Start" and bars[-1] == "Reference" and "The method" in bars
    assert parts["Tutorials"][0] == "tutorials/evaluate_your_model.ipynb"


def test_configuration_names_files_that_exist(tmp_path):
    for name in ("styles.css", "site.scss", "copy_page.html", "search_words.html", "favicon.svg"):
        (tmp_path / name).write_text("")
    (tmp_path / "_quarto.yml").write_text((ROOT / "_quarto.yml").read_text())
    for a_page in read_pages(NBS):
        (tmp_path / a_page.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / a_page.path).write_text('{"cells": []}')
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
        "`calibration_metrics`, [`score`](x.ipynb) and `rubric`", "03_metrics.ipynb", "metrics"
    )
    assert (
        linked == "[`calibration_metrics`](#calibration_metrics), [`score`](x.ipynb) and `rubric`"
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
        find("rubric", "metrics") is None
        and find("rubric", "metrics", frozenset(["rubric"])).module == "products.micro.world"
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
    assert "    rho: float = 0.5,\n" in signature(home)
    line = int(home.source.rpartition("#L")[2])
    assert (
        "def calibration_metrics("
        in (ROOT / "memcalib" / "metrics.py").read_text().splitlines()[line - 1]
    )
    home = homes()["trainer.train_config"]["TrainConfig"]
    assert "\n    lr: Annotated[Rate" in signature(home) or "\n    lr: Rate" in signature(home)
    settings = parameter_table(homes()["rules.base"]["CreditSettings"])
    assert "| <code>cap</code> |" in settings and "| largest multiplier |" in settings
    assert settings.startswith('<details class="definition"><summary>Parameters</summary>')
    # a bar in code: Pandoc would show the backslash that escapes it
    assert "&#124; None</code>" in settings and r"\|" not in settings


DEFINITIONS = '''
Count = Annotated[int, typer.Option("--count", help="How many rows.")]


def drawn(
    rows: list[str],  # what is drawn from
    count: Count = 3,
    seed: int = 0,
    # one for each row;
    # none: all the same
    weights: list[float] | None = None,
    other: float = 0.5,
    examples: list[Example] = (),
) -> list[str]:
    """Draw rows. The same `seed` draws the same."""


def joined(first: str, second: str) -> str:  # of both
    """Two texts."""


class Drawn(BaseModel):
    """What was drawn."""

    # the rows
    rows: list[str] = Field(description="in the order of the draw")
    kept: int  # | how many
    lost: int
'''


def definition_of(name: str) -> Home:
    lines = tuple(DEFINITIONS.splitlines())
    nodes = {getattr(node, "name", ""): node for node in ast.parse(DEFINITIONS).body}
    return Home("drawing", "drawing.ipynb", name, nodes[name], lines)


def test_each_parameter_is_described_by_the_nearest_thing_that_says_what_it_is():
    what = {row.name: row.what for row in parameters(definition_of("drawn"))}
    assert what["rows"] == "what is drawn from"
    assert what["count"] == "How many rows."
    assert what["seed"] == "The same `seed` draws the same."
    assert what["weights"] == "one for each row; none: all the same"
    assert what["other"] == ""
    assert what["examples"].startswith("`Example`: A query x, its memory blocks M")
    assert [row.what for row in parameters(definition_of("joined"))] == ["", ""]
    fields = {row.name: row.what for row in parameters(definition_of("Drawn"))}
    assert fields == {"rows": "the rows", "kept": "| how many", "lost": ""}


def test_a_table_of_parameters_has_no_row_without_a_description():
    table = parameter_table(definition_of("drawn"))
    assert "<code>other</code>" not in table and table.count("\n| <code>") == 5
    assert parameter_table(definition_of("joined")) == ""
    assert r"| \| how many |" in parameter_table(definition_of("Drawn"))


def test_a_definition_in_one_line():
    assert call_form(definition_of("drawn")) == (
        "drawn(rows, count, seed, weights, other, examples) → list[str]"
    )
    assert call_form(homes()["rules.base"]["CreditSettings"]).endswith(", gamma, mode, …)")


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
    faults = browser_faults(tmp_path, ["good.ipynb", "bad.ipynb"])
    if faults and "no Chromium" in faults[0]:
        pytest.skip(faults[0])
    assert faults and all(fault.startswith("bad.ipynb") for fault in faults)
    assert {
        width
        for width in ("1400", "390")
        if any(f"at {width} px wider" in fault for fault in faults)
    } == {
        "1400",
        "390",
    }
    assert any("broken" in fault for fault in faults) and any(
        "asks for http://127.0.0.1:9" in fault for fault in faults
    )


def test_release_notes_are_the_section_of_a_version():
    text = "# Changelog\n\n## 0.2.0 (2027)\n\n- new\n\n## 0.1.0\n\n- first\n\n## Imports\n\n| a |\n"
    assert release_notes("0.2.0", text) == "- new" and release_notes("0.1.0", text) == "- first"
    with pytest.raises(ValueError, match=r"no version '0.3.0'; allowed: 0.2.0, 0.1.0"):
        release_notes("0.3.0", text)
    assert release_notes(memcalib.__version__, (ROOT / "CHANGELOG.md").read_text()).startswith("- ")


def test_a_search_for_what_people_want_finds_the_start_page(notebooks):
    """Quarto searches the text of sections nearly word by word."""
    (start,) = [a_page for a_page in notebooks if a_page.path == "start.ipynb"]
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


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("judge", "NamedBlock", "class NamedBlock(name: str, block: Block, atoms: list"),
        ("scoring.judge_runs", "Judge", "class Judge"),
        ("judge", "ReplyReading", "    verdicts: dict[str, dict[str, Any]] = dict(),\n"),
        ("problem", "Level", "class Level(IntEnum)"),
        (
            "scoring.judge_runs",
            "judge_rollouts",
            "    *,\n    on_row: Callable[[Judgment], None] | None = None",
        ),
        ("inference.endpoint", "Endpoint", "    rpm: float | None = None,\n"),
    ],
)
def test_a_signature_says_how_an_object_is_made(module, name, text):
    """nbdev shows `**data` for a class of pydantic, and `*args` for many others."""
    shown = signature(homes()[module][name])
    assert text in shown and "**data" not in shown


def test_a_long_default_is_cut():
    text = signature(homes()["products.dataset.lint"]["LintLimits"])
    (line,) = [
        line for line in text.splitlines() if line.startswith("    common: str = 'across add")
    ]
    assert line.endswith("…',") and len(line) < 90


def test_no_signature_is_that_of_pydantic_itself():
    shown = [signature(home) for names in homes().values() for home in names.values()]
    assert len(shown) > 500 and [text for text in shown if "**data" in text] == []


def cell(kind: str, source: str, outputs: list | None = None) -> dict:
    fields = {"cell_type": kind, "id": "c0", "metadata": {}, "source": source}
    return fields | ({"outputs": outputs or []} if kind == "code" else {})


def test_a_page_for_quarto_has_no_widget_no_script_and_no_backslash_in_a_table():
    html = "<style scoped>a {}</style>\n<table><tr><td>1</td></tr></table><script>x()</script>"
    outputs = [
        {"output_type": "display_data", "data": {f"application/vnd.{WIDGET}+json": {}}},
        {"output_type": "execute_result", "data": {"text/html": html, "text/plain": "1"}},
    ]
    table = r"| a |" + "\n|---|\n" + r"| `str \| None` |"
    ready = for_quarto(
        "io/02_records.ipynb",
        {
            "metadata": {"widgets": {}},
            "cells": [cell("markdown", table), cell("code", "x", outputs)],
        },
    )
    assert ready["metadata"] == {} and "<code>str &#124; None</code>" in ready["cells"][0]["source"]
    (shown,) = ready["cells"][1]["outputs"]
    assert list(shown["data"]) == ["text/markdown"]
    assert "<td>1</td>" in shown["data"]["text/markdown"]
    assert "style" not in shown["data"]["text/markdown"]
    assert "script" not in shown["data"]["text/markdown"]


def test_titles_have_the_number_of_the_chapter_and_of_the_experiment():
    assert numbered("02_judge.ipynb", "The judge") == "Chapter 2: The judge"
    assert numbered("experiments/e05_x.ipynb", "X") == "e05: X"
    assert numbered("io/02_records.ipynb", "Records") == "Records"


def test_an_experiment_begins_with_what_came_out():
    cells = [
        cell("raw", "---\ntitle: X\noutput-file: x.html\n---"),
        cell("markdown", "Why."),
        cell("code", "import x"),
        cell("markdown", "## Runs"),
        cell("code", "run()"),
        cell("markdown", "## What came out"),
        cell("markdown", "A tie."),
        cell("markdown", "## Files"),
    ]
    ready_cells = for_quarto("experiments/e05_x.ipynb", {"metadata": {}, "cells": cells})["cells"]
    words = [made_cell["source"].splitlines()[-1] for made_cell in ready_cells[1:]]
    assert words == [
        *("Why.", "## What came out", "A tie.", "import x", "## Runs", "run()", "## Files")
    ]
    assert ready_cells[4]["source"].startswith("#| code-fold: true")
    assert "image: /images/social.png" in ready_cells[0]["source"]


def test_every_experiment_has_a_section_on_what_came_out(notebooks):
    pages_of = [a_page for a_page in notebooks if a_page.path.startswith("experiments/")]
    without = [
        a_page.path
        for a_page in pages_of
        if not any(each["source"].startswith("## What came out") for each in a_page.cells)
    ]
    assert len(pages_of) == 16 and without == []


def test_a_page_as_markdown_holds_prose_code_and_text():
    head = cell("raw", "---\ntitle: X\ndescription: what\noutput-file: x.html\n---")
    out = [{"output_type": "execute_result", "data": {"text/plain": "3"}}]
    text = as_markdown({"cells": [head, cell("markdown", "Prose."), cell("code", "1 + 2", out)]})
    assert text == "# X\n\n> what\n\nProse.\n\n```python\n1 + 2\n```\n\n```\n3\n```\n"


def test_the_install_line_is_said_in_one_place():
    line = install_line()
    assert line.startswith("pip install ") and line in first_screen()
    assert "INSTALL" not in first_screen()
    assert line not in (ROOT / "tools" / "first_screen.md").read_text()


def test_each_verb_has_a_page_with_all_its_options():
    for verb, command in verbs().items():
        text = command_page(verb, command)
        for parameter in command.params:
            if not parameter.hidden and parameter.param_type_name == "option":
                assert max(parameter.opts, key=len) in text, f"{verb}: {parameter.opts}"
    assert "cache clear" in verbs() and "--judge-key-env" in command_page(
        "evaluate", verbs()["evaluate"]
    )


def test_generated_pages_hold_what_their_sources_say():
    assert "2609.24259" in cite_page() and "Cao, Ruike" in cite_page()
    assert f"## {memcalib.__version__}" in news_page() and "](nbs/" not in news_page()
    assert all(f"samples/{name}.html" in samples_page() for name in SAMPLES)


def test_wishes_of_the_start_page_come_first_in_the_search(tmp_path, monkeypatch):
    start = json.loads((NBS / "start.ipynb").read_text())
    wish_rows = wishes(start)
    assert ("evaluate my own model", "tutorial", "tutorials/evaluate_your_model.ipynb") in wish_rows
    assert len(wish_rows) >= 12
    (tmp_path / "tutorials").mkdir()
    row = "| I want to | read |\n|---|---|\n| evaluate my own model | [t](tutorials/t.ipynb) |"
    (tmp_path / "start.ipynb").write_text(json.dumps({"cells": [cell("markdown", row)]}))
    head = cell("raw", "---\ntitle: T\noutput-file: t.html\n---")
    (tmp_path / "tutorials" / "t.ipynb").write_text(json.dumps({"cells": [head]}))
    tutorial = {"href": "tutorials/t.html", "title": "T", "text": "words"}
    dropped = [{"href": "news.html#x", "title": "News"}, {"href": "faq.html", "title": "List"}]
    (tmp_path / "search.json").write_text(json.dumps([tutorial, *dropped]))
    monkeypatch.setattr("tools.search_index.PHRASES", {"cost, Price": "tutorials/t.ipynb#price"})
    add_wishes(tmp_path / "start.ipynb", tmp_path / "search.json")
    entries = json.loads((tmp_path / "search.json").read_text())
    assert [entry["href"] for entry in entries] == ["tutorials/t.html#price", "tutorials/t.html"]
    assert entries[0]["phrases"] == ["cost", "price"]
    assert entries[1]["phrases"] == ["evaluate my own model", "evaluate my model"]
    assert entries[1]["text"] == "words"


def test_the_questions_are_listed_above_the_answers(notebooks):
    faq = [a_page for a_page in notebooks if a_page.path == "faq.ipynb"][0]
    markdown = [text for _, text in faq.texts()]
    questions = [head for text in markdown for head in re.findall(r"^## (.+)$", text, re.M)]
    listed = re.findall(r"\]\(#([\w-]+)\)", "\n".join(markdown[:2]))
    assert len(listed) == len(questions) >= 12
    assert set(listed) <= set(faq.anchors())


FORECAST = re.compile(r"^ *(?:model|judge) +\w+ +(\d+) +\d+ +(\d+) +(\d+) +\$(\d+\.\d+)$", re.M)
PRICE = "price={prompt: 0.3, completion: 1.2}"


@pytest.mark.parametrize("words", ["exam", "evaluate --quick", "evaluate"])
def test_the_costs_of_the_questions_page_are_those_of_the_forecast(words, notebooks, tmp_path):
    command = [*words.split(), "--dry-run", "--judge", "judge", "--set", f"judge.{PRICE}"]
    if "evaluate" in words:
        command += ["--model", "model", "--set", f"model.{PRICE}"]
    asked = CliRunner().invoke(app, [*command, "--cache", str(tmp_path / "calls.sqlite")])
    roles = FORECAST.findall(asked.output)
    faq = [a_page for a_page in notebooks if a_page.path == "faq.ipynb"][0]
    text = "\n".join(text for _, text in faq.texts())
    row = [line for line in text.splitlines() if line.startswith(f"| `memcalib {words}` |")][0]
    for calls, read, written, _ in roles:
        tokens = f"{int(read) / 1e6:.2f} + {int(written) / 1e6:.2f} million"
        assert f"| {int(calls):,} | {tokens} |" in row
    dollars = sum(float(role[3]) for role in roles)
    assert row.endswith(f"| ${dollars:.2f} |") and len(roles) == 1 + ("evaluate" in words)


def test_code_in_a_help_text_stays_whole():
    assert as_text("`memcalib a --log` and --x a_b") == "`memcalib a --log` and `--x` a\\_b"
    for verb, command in verbs().items():
        prose = re.sub(r"^```.*?^```", "", command_page(verb, command), flags=re.M | re.S)
        assert "``" not in prose, verb


def test_printed_frames_and_columns_are_marked():
    for text in ("\u256d\u2500 a", "model   SCS\nm    49.8\n"):
        notebook = {"metadata": {}, "cells": [cell("code", "f()", [{"text": text}])]}
        notebook["cells"][0]["outputs"][0]["output_type"] = "stream"
        made = for_quarto("tutorials/t.ipynb", notebook)["cells"]
        assert any("classes: as-printed" in str(each["source"]) for each in made)
    prose = cell("code", "f()", [{"text": "one line\nand another", "output_type": "stream"}])
    made = for_quarto("tutorials/t.ipynb", {"metadata": {}, "cells": [prose]})["cells"]
    assert not any("as-printed" in str(each["source"]) for each in made)


def test_each_short_search_leads_to_a_heading_that_exists(notebooks):
    by_path = {a_page.path: a_page for a_page in notebooks}
    for phrase, target in PHRASES.items():
        path, _, anchor = target.partition("#")
        assert path in by_path, phrase
        assert not anchor or anchor in by_path[path].anchors(), phrase


def test_faults_of_a_built_site_are_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="sub/">s</a><a href="sub/a.html#there">a</a><a href="sub/a.html#gone">b</a>'
        '<a href="gone.html">c</a><a href="https://example.org/x">d</a><img src="p.png">'
    )
    (tmp_path / "sub" / "index.html").write_text('<a href="/index.html">up</a>')
    (tmp_path / "sub" / "a.html").write_text('<h2 id="there">T</h2><img src="q.png" alt="q">')
    assert list(static_faults(tmp_path)) == [
        "index.html: picture 'p.png' without alternative text",
        "index.html: link to 'sub/a.html#gone': no such place on sub/a.html",
        "index.html: link to 'gone.html': no such page or file",
    ]


def test_links_below_the_published_path_and_missing_markdown_are_named(tmp_path):
    (tmp_path / "a.html").write_text('<a href="/site/a.html">a</a><a href="/a.html">b</a>')
    assert list(static_faults(tmp_path, "/site/")) == [
        "a.html: link to '/a.html': no such page or file"
    ]
    (tmp_path / "b.html").write_text('<script>link.className = "copy-page"</script>')
    assert list(markdown_faults(tmp_path)) == ["b.html: found no Markdown beside it; allowed: b.md"]
    (tmp_path / "b.md").write_text("# b")
    assert list(markdown_faults(tmp_path)) == []


def test_a_site_without_a_home_page_is_named(tmp_path):
    assert len(list(home_faults(tmp_path))) == 1
    sends_on = '<meta http-equiv="refresh" content="0;URL=x.html">'
    (tmp_path / "index.html").write_text(sends_on)
    assert len(list(home_faults(tmp_path))) == 1
    (tmp_path / "index.html").write_text("<h1>memcalib</h1>")
    assert list(home_faults(tmp_path)) == []


def test_the_site_is_served_below_its_published_path(tmp_path):
    (tmp_path / "a.html").write_text("here")
    handler = partial(Quiet, directory=str(tmp_path), base="/site/")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        with urlopen(f"{home}/site/a.html") as answer:
            assert answer.read() == b"here"
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{home}/a.html")
        server.shutdown()


def test_the_parts_of_a_reference_section_are_folded_and_their_definitions_lowered():
    shown = {"data": {"text/markdown": ["### name\n", "\n", "### not a heading of it"]}}
    cells = [
        cell("markdown", "## First"),
        cell("markdown", "### One"),
        cell("code", "x", [{"data": {"text/markdown": "### other"}}]),
        cell("markdown", "## The code, part by part\n\nFor those who change it."),
        cell("markdown", "### Departures"),
        cell("markdown", "### `Reading` & writing\n\nProse."),
        cell("code", "y", [shown]),
        cell("markdown", "More."),
        cell("markdown", "### Last"),
        cell("code", "z"),
    ]
    made = folded_reference(cells)
    texts = [each["source"].strip().splitlines()[0] for each in made]
    opens = [number for number, each in enumerate(made) if "<details" in each["source"]]
    closes = [number for number, each in enumerate(made) if "</details>" in each["source"]]
    assert texts[5] == "### `Reading` & writing" and opens == [6, 11] and closes == [9, 13]
    assert "Code and examples: Reading &amp; writing</summary>" in made[6]["source"]
    lowered = made[7]["outputs"][0]["data"]["text/markdown"]
    assert lowered == "#### name\n\n### not a heading of it"
    assert made[2]["outputs"][0]["data"]["text/markdown"] == "### other"
    assert len({each["id"] for each in made if each["id"] != "c0"}) == 4


def test_every_section_that_is_folded_is_one_of_a_page(notebooks):
    heads = "\n".join(text for found in notebooks for _, text in found.texts())
    for name in REFERENCE:
        assert f"## {name}\n" in heads, name


def test_the_words_of_a_picture_are_its_alternative_text():
    text = '[![A "big" report,\n[0, 1].](a/b.png)](c.html) ![](d.png){fig-alt="e"}'
    with_alt = with_fig_alt(text)
    first = "[![](a/b.png){fig-alt=\"A 'big' report, [0, 1].\"}](c.html)"
    assert with_alt == f'{first} ![](d.png){{fig-alt="e"}}'
    assert "[![A 'big' report, [0, 1].](a/b.png)](c.html)" in as_markdown(
        {"cells": [cell("markdown", with_alt)]}
    )


def test_links_of_the_markdown_of_a_page_lead_to_markdown():
    files = {"02_judge.ipynb": "judge.md", "cli/index.qmd": "cli/index.md"}
    text = "[a](../02_judge.ipynb#evidence) [b](../cli/index.qmd) [c](https://x.org/y.ipynb)"
    assert to_markdown_links(text, "io/02_records.ipynb", files) == (
        "[a](../judge.md#evidence) [b](../cli/index.md) [c](https://x.org/y.ipynb)"
    )
    assert markdown_file("io/02_records.ipynb", {"output-file": "records.html"}) == "io/records.md"


def test_each_sample_is_a_report_that_a_command_writes():
    assert set(SAMPLES) == {*REPORTS, "gate"}
    assert with_icon("<title>A</title>").endswith('<link rel="icon" href="data:,">')
    assert "<td>1</td>" in as_page("Gate", "| a |\n| --- |\n| 1 |\n")


def test_examples_of_a_command_stand_under_one_heading():
    text = command_page("evaluate", verbs()["evaluate"])
    assert text.count("## Example") == 1 and "## Examples" in text
    assert "Example: memcalib" not in text


def icon_font(file: Path) -> None:
    """A font of two icons."""
    builder = FontBuilder(1000)
    names = [".notdef", "arrow", "alarm"]
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({0xF12A: "arrow", 0xF12B: "alarm"})
    builder.setupGlyf({name: TTGlyphPen(None).glyph() for name in names})
    builder.setupHorizontalMetrics(dict.fromkeys(names, (500, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupOS2()
    builder.setupPost()
    builder.font.flavor = "woff"
    builder.save(file)


def test_a_site_loses_only_the_rules_and_icons_that_no_page_names(tmp_path):
    folder = tmp_path / "site_libs" / "bootstrap"
    folder.mkdir(parents=True)
    (tmp_path / "a.html").write_text('<p class="shown" id="top">text</p>')
    (tmp_path / "b.js").write_text('add("late"); add("side-" + where); icon = "arrow"')
    rules = {
        ".shown{a:b}": ".shown{a:b}",
        ".late,.never{a:b}": ".late{a:b}",
        ".never{a:b}": "",
        "p .side-left:not(.never){a:b}": "p .side-left:not(.never){a:b}",
        "#top,#gone .shown{a:b}": "#top{a:b}",
        "@media (min-width: 1px){.never{a:b}.late{a:b}}": "@media (min-width: 1px){.late{a:b}}",
        "@media print{.never{a:b}}": "",
        "@font-face{a:b}": "@font-face{a:b}",
        "body{a:b}": "body{a:b}",
    }
    (folder / "bootstrap.css").write_text("".join(rules))
    icons = '.bi-arrow::before{content:"\\f12a"}.bi-alarm::before{content:"\\f12b"}'
    (folder / "bootstrap-icons.css").write_text(icons)
    icon_font(folder / "bootstrap-icons.woff")
    trim(tmp_path)
    kept = (folder / "bootstrap.css").read_text()
    assert kept == '@charset "UTF-8";' + "".join(rules.values())
    assert "bi-alarm" not in (folder / "bootstrap-icons.css").read_text()
    assert list(TTFont(folder / "bootstrap-icons.woff").getBestCmap()) == [0xF12A]


def test_another_quarto_is_named_before_anything_is_rendered(tmp_path):
    program = tmp_path / "quarto"
    program.write_text("#!/bin/sh\necho 1.4.0\n")
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tools.site"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "found Quarto 1.4.0 on the path; allowed: 1.7.34, or --any-quarto\n"


def test_messages_of_the_page_of_questions_are_those_of_the_package():
    """Each heading below *Errors* is cut from a message, its parts joined by an ellipsis."""
    cells = json.loads((NBS / "faq.ipynb").read_text())["cells"]
    texts = ["".join(each["source"]) for each in cells]
    errors = next(text for text in texts if "## Errors" in text)
    files = (ROOT / "memcalib").rglob("*.py")
    source = " ".join(file.read_text() for file in files)
    joined = re.sub(r'"\s+f?"', "", source)
    heads = re.findall(r"^### (.+)", errors, re.M)[:-1]  # the last one is no message
    assert len(heads) > 6
    for head in heads:
        for phrase in head.split(" … "):
            assert phrase.replace("OPENAI_API_KEY", "{self.key_env}") in joined, phrase


def test_every_number_that_a_training_logs_is_explained():
    """The names that the code lists, and those of a row by the other parts of a step."""
    from memcalib.credit.statistics import FALLBACKS, PERCENTILES
    from memcalib.trainer.callbacks import LOGGED, LOST, STATS

    cells = json.loads((NBS / "logged_numbers.ipynb").read_text())["cells"]
    text = "".join("".join(each["source"]) for each in cells)
    explained = set(re.findall(r"`([a-z_A-Z0-9]+)(?:/CHANNEL)?`", text))
    expected = {*STATS, *LOGGED, *PERCENTILES, *(f"fallback_{each}" for each in FALLBACKS)}
    expected |= {f"lost_{each}" for each in LOST}
    expected |= {f"valid_{each}" for each in ("SCS", "Exact", "sMOS", "sMUS", "AOR", "AUR")}
    expected |= {"trigger", "nondegenerate", "all_best", "all_worst", "all_middle", "mixed"}
    assert expected - explained == set()
