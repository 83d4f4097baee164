"""Execute pages of nbs/ and say which of the outputs that they store are no longer what comes out:

    python -m tools.stored_outputs [--write] [--matching PATTERN] [PAGE ...]

A page is named as in nbs/ORDER (`02_judge`, `tutorials/train`); without one, all that
`make test-notebooks` runs are executed, about ten minutes on one core. `--matching` executes only
those of them that store an output in which this regular expression occurs. `--write` puts the
outputs that came out into the pages, in the form that `make export` gives them. What differs from
one execution to the next (times, temporary paths, addresses, ids) does not count as a difference.
Pages of nbs/experiments are not meant: they show the committed run (`tools.store_runs`).
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.clean import nbdev_clean
from tqdm.auto import tqdm

from tools.store_runs import kept_outputs

ROOT = Path(__file__).resolve().parents[1]
SECONDS_A_CELL = 900
OF_THE_MOMENT = (
    (re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]"), ""),  # colours and movements of a terminal
    (re.compile(r"\b\d+:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|seconds|minutes|min|µs)\b"), "TIME"),
    (re.compile(r"'(seconds|created)': [\d.]+"), "TIME"),
    (re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?"), "DATE"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"/tmp/[\w./-]+"), "PATH"),
    (re.compile(r"0x[0-9a-f]{6,}"), "ID"),
    (re.compile(r'id="[^"]*"|#T_\w+'), "ID"),  # a styled table has new ones each time
    (re.compile(r"<style.*?</style>", re.DOTALL), ""),
)  # what to look for, and what stands in its place when outputs are compared
LINES_SHOWN = 8


def library_pages() -> list[str]:
    """The pages that the tests execute, as nbs/ORDER names them."""
    from tests.test_notebooks import EXTRA, PAGES

    return [*PAGES, *EXTRA]


def executed_cells(page: Path) -> list[dict]:
    """The cells of a page after an execution from top to bottom in the page's folder.

    Cells with `#| eval: false` are left as they are. Raises `CellExecutionError` where a cell
    fails.
    """
    notebook = nbformat.read(page, as_version=4)
    left_out = {}
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and re.search(r"#\|\s*eval:\s*false", cell.source):
            left_out[position] = dict(cell)
            cell.source = ""
    resources = {"metadata": {"path": str(page.parent)}}
    NotebookClient(notebook, timeout=SECONDS_A_CELL, resources=resources).execute()
    for position, cell in left_out.items():
        notebook.cells[position].update(cell)
    return notebook.cells


def comparable_text(cell: dict) -> str:
    """What a code cell shows, as text: of a PNG its bytes, of a table the HTML or Markdown."""
    parts = []
    for output in kept_outputs(cell):
        data = output.get("data", {})
        kinds = ("image/png", "text/html", "text/markdown", "text/plain")
        shown = next((data[kind] for kind in kinds if data.get(kind)), "")
        parts.append("".join(shown or output.get("text", "")))
    text = "\n".join(parts)
    for pattern, replacement in OF_THE_MOMENT:
        text = pattern.sub(replacement, text)
    return text


def differing_cells(stored: Sequence[dict], fresh: Sequence[dict]) -> dict[int, str]:
    """The code cells whose outputs differ, by their position: a few lines of the difference."""
    differences = {}
    for position, (before, after) in enumerate(zip(stored, fresh, strict=True)):
        if before["cell_type"] != "code":
            continue
        stored_text = comparable_text(before)
        fresh_text = comparable_text(after)
        if stored_text != fresh_text:
            lines = difflib.unified_diff(
                stored_text.splitlines(), fresh_text.splitlines(), lineterm="", n=0
            )
            shown = [line[:120] for line in list(lines)[2 : 2 + LINES_SHOWN]]
            differences[position] = "\n".join(f"    {line}" for line in shown)
    return differences


def write_outputs(page: Path, fresh: Sequence[dict], positions: Sequence[int]) -> None:
    """Put the outputs of these cells into the page: text as a list of lines, cleaned by nbdev."""
    notebook = nbformat.read(page, as_version=4)
    for position in positions:
        notebook.cells[position].outputs = nbformat.from_dict(kept_outputs(fresh[position]))
    nbformat.write(notebook, page)
    nbdev_clean(str(page))


def stores_match(page: Path, pattern: str) -> bool:
    """Whether a regular expression occurs in an output that the page stores."""
    cells = nbformat.read(page, as_version=4).cells
    for output in chain.from_iterable(cell.get("outputs", []) for cell in cells):
        shown = [output.get("text", ""), *output.get("data", {}).values()]
        if any(isinstance(value, str) and re.search(pattern, value) for value in shown):
            return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a page fails, or where outputs differ and are not written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="put what came out into the pages")
    parser.add_argument(
        "--matching",
        metavar="PATTERN",
        default="",
        help="only pages that store an output with this regular expression, such as severe.share",
    )
    parser.add_argument("--nbs", type=Path, default=ROOT / "nbs", help="folder of the pages")
    options = parser.parse_args(arguments)
    missing = [name for name in options.pages if not (options.nbs / f"{name}.ipynb").is_file()]
    if missing:
        parser.error(f"PAGE: found {missing[0]}; allowed: a page below {options.nbs}, no .ipynb")
    names = options.pages or library_pages()
    if options.matching:
        pages = {name: options.nbs / f"{name}.ipynb" for name in names}
        names = [name for name, page in pages.items() if stores_match(page, options.matching)]
        if not names:
            parser.error(
                f"--matching: found {options.matching!r}, which occurs in no stored output"
            )
    # pictures inline, as Jupyter draws them, whatever the environment says
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    code = 0
    for name in tqdm(names, unit="page"):
        page = options.nbs / f"{name}.ipynb"
        try:
            fresh = executed_cells(page)
        except CellExecutionError as error:
            print(f"{name}: a cell failed\n{str(error)[-600:]}")
            code = 1
            continue
        stored = json.loads(page.read_text(encoding="utf-8"))["cells"]
        differences = differing_cells(stored, fresh)
        for position, lines in differences.items():
            print(f"{name}, cell {position}\n{lines}")
        if options.write:
            write_outputs(page, fresh, [*differences])
        elif differences:
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
