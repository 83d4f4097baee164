"""The tool that holds stored outputs against an execution."""

import json
from difflib import ndiff

import nbformat
import pytest
from nbdev.clean import nbdev_clean
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.stored_outputs import (
    comparable_text,
    differing_cells,
    main,
    stores_match,
    write_outputs,
)


def shown(text: str) -> list:
    return [new_output("execute_result", data={"text/plain": text}, execution_count=None)]


@pytest.fixture
def pages(tmp_path):
    """Of four code cells one stores what it no longer gives."""
    cells = [
        new_markdown_cell("# A page"),
        new_code_cell("1 + 1", outputs=shown("3")),
        new_code_cell("2 + 2", outputs=shown("4")),
        new_code_cell("'2026-11-27 in 0.3 s'", outputs=shown("'2026-01-01 in 12 s'")),
        new_code_cell("#| eval: false\n1 / 0", outputs=shown("never")),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "page.ipynb")
    broken = new_notebook(cells=[new_code_cell("1 / 0")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    return tmp_path


def outputs_of(page) -> list:
    cells = json.loads(page.read_text())["cells"]
    return ["".join(cell["outputs"][0]["data"]["text/plain"]) for cell in cells[1:]]


@pytest.mark.slow
def test_the_stale_output_is_named_and_written_on_demand(pages, capsys):
    page = pages / "page.ipynb"
    before = page.read_bytes()
    assert main(["--nbs", str(pages), "page"]) == 1
    assert "page, cell 1\n    @@ -1 +1 @@\n    -3\n    +2\n" in capsys.readouterr().out
    assert page.read_bytes() == before
    assert main(["--nbs", str(pages), "page", "--write"]) == 0
    assert outputs_of(page) == ["2", "4", "'2026-01-01 in 12 s'", "never"]
    assert main(["--nbs", str(pages), "page"]) == 0


@pytest.mark.slow
def test_a_page_that_fails_is_named_and_left_alone(pages, capsys):
    before = (pages / "broken.ipynb").read_bytes()
    assert main(["--nbs", str(pages), "broken", "--write"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("broken: a cell failed") and "ZeroDivisionError" in said
    assert (pages / "broken.ipynb").read_bytes() == before


def executed(cells: list) -> list:
    """The cells as an execution leaves them, with three lines of text and a picture."""
    stream = new_output("stream", name="stdout", text="one\ntwo\n")
    data = {"text/plain": "a\nb\nc", "image/png": "iVBORw0KGgo=\n"}
    picture = new_output("display_data", data=data, metadata={"needs_background": "light"})
    cells = [nbformat.from_dict(cell) for cell in cells]
    cells[1].update(outputs=[stream, picture], execution_count=7)
    return cells


def test_outputs_are_written_as_a_clean_page_has_them(pages):
    page = pages / "page.ipynb"
    write_outputs(page, executed(nbformat.read(page, 4).cells), [1])
    text = page.read_text()
    content = json.loads(text)
    stream, picture = content["cells"][1]["outputs"]
    assert stream["text"] == ["one\n", "two\n"]
    assert picture["data"] == {"image/png": "iVBORw0KGgo=", "text/plain": ["a\n", "b\n", "c"]}
    assert text == json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    nbdev_clean(str(page))
    assert page.read_text() == text


def test_lines_of_an_output_that_did_not_change_are_not_in_the_diff(pages):
    page = pages / "page.ipynb"
    cells = executed(nbformat.read(page, 4).cells)
    write_outputs(page, cells, [1])
    before = page.read_text()
    write_outputs(page, cells, [1])
    assert page.read_text() == before
    cells[1].outputs[0].text = "one\n2\n"
    write_outputs(page, cells, [1])
    changes = ndiff(before.splitlines(), page.read_text().splitlines())
    changed = [line.split() for line in changes if line[0] in "+-"]
    assert changed == [["-", '"two\\n"'], ["+", '"2\\n"']]


@pytest.mark.parametrize(
    "pattern, is_stored", [("2026.01", True), ("never", True), (r"1 \+ 1", False)]
)
def test_pages_in_whose_outputs_a_pattern_occurs(pages, pattern, is_stored):
    assert stores_match(pages / "page.ipynb", pattern) is is_stored


def test_only_pages_that_match_are_executed(pages, monkeypatch):
    taken = []

    def stored_cells(page):
        taken.append(page.stem)
        return nbformat.read(page, 4).cells

    monkeypatch.setattr("tools.stored_outputs.executed_cells", stored_cells)
    assert main(["--nbs", str(pages), "--matching", "in 12 s", "broken", "page"]) == 0
    assert taken == ["page"]


def test_a_pattern_that_occurs_on_no_page(pages, capsys):
    with pytest.raises(SystemExit):
        main(["--nbs", str(pages), "--matching", "severe", "broken", "page"])
    assert "--matching: found 'severe', which occurs in no stored output" in capsys.readouterr().err


def test_a_page_that_is_not_there(pages, capsys):
    with pytest.raises(SystemExit):
        main(["--nbs", str(pages), "chapter"])
    assert "PAGE: found chapter; allowed: a page below" in capsys.readouterr().err


def test_moments_are_no_difference_and_figures_are():
    one = new_code_cell("", outputs=shown("127.0.0.1:8765 wrote /tmp/a/b in 3.2 s, SCS 49.8"))
    other = new_code_cell("", outputs=shown("127.0.0.1:9001 wrote /tmp/c in 10 s, SCS 49.8"))
    assert comparable_text(one) == comparable_text(other)
    changed = new_code_cell("", outputs=shown("127.0.0.1:9001 wrote /tmp/c in 10 s, SCS 50.0"))
    assert [*differing_cells([one], [changed])] == [0]


def test_a_table_in_markdown_is_compared_by_its_text():
    def table(text: str):
        data = {"text/markdown": text, "text/plain": "<IPython.core.display.Markdown object>"}
        return new_code_cell("", outputs=[new_output("execute_result", data=data)])

    assert [*differing_cells([table("| a |")], [table("| b |")])] == [0]
    assert not differing_cells([table("| a |")], [table("| a |")])


def test_progress_and_warnings_are_not_compared():
    bar = new_output("stream", name="stderr", text="50 %")
    with_bar = new_code_cell("", outputs=[bar, *shown("1")])
    assert comparable_text(with_bar) == comparable_text(new_code_cell("", outputs=shown("1")))
