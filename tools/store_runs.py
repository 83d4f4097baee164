"""Put the outputs of the committed run into the pages of nbs/experiments:
python -m tools.store_runs [runs/micro]

The pages of the site then show what the tables and figures under runs/ show.
A page keeps its outputs where the run has none.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.quarto_pages import is_widget

ROOT = Path(__file__).resolve().parents[1]


def kept_outputs(cell: dict) -> list[dict]:
    """The outputs of a code cell as a page stores them: without progress bars, without what
    libraries say on standard error, without counts of execution.
    """
    outputs = []
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr" or is_widget(output):
            continue
        without_count = {"execution_count": None} if "execution_count" in output else {}
        outputs.append({**output, **without_count})
    return outputs


def code_outputs(notebook: Path) -> dict[str, list[dict]]:
    """The outputs of each code cell that a page would store, by the cell's id."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return {cell.get("id"): kept_outputs(cell) for cell in cells if cell["cell_type"] == "code"}


def with_outputs(cell: dict, outputs_by_cell: dict[str, list[dict]]) -> dict:
    """A code cell with its outputs of a run; other cells as they are."""
    if cell["cell_type"] != "code":
        return cell
    return {**cell, "outputs": outputs_by_cell.get(cell["id"], []), "execution_count": None}


def stored(root: Path) -> Iterator[tuple[Path, list[dict], list[dict]]]:
    """Each page that the run has executed with its own cells,
    and the cells with the outputs of the run.
    """
    for page in sorted((ROOT / "nbs" / "experiments").glob("e[0-9][0-9]_*.ipynb")):
        executed = root / page.stem.partition("_")[2] / "notebook.ipynb"
        if executed.is_file():
            cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
            outputs_by_cell = code_outputs(executed)
            yield page, cells, [with_outputs(cell, outputs_by_cell) for cell in cells]


def main() -> None:
    run = sys.argv[1] if sys.argv[1:] else "runs/micro"
    for page, cells, cells_of_run in stored(ROOT / run):
        if cells != cells_of_run:
            content = json.loads(page.read_text(encoding="utf-8"))
            content["cells"] = cells_of_run
            text = json.dumps(content, indent=1, ensure_ascii=False)
            page.write_text(f"{text}\n", encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
