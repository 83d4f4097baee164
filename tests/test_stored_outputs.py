"""The tool that holds stored outputs against an execution."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.stored_outputs import comparable_text, differing_cells, main


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
    assert "page, cell 1\n     -1 +1 \n    -3\n    +2\n" in capsys.readouterr().out
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
