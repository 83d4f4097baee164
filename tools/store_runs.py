"""Put the outputs of the committed run into the pages of nbs/experiments:
python -m tools.store_runs [runs/micro]

The pages of the site then show what the tables and figures under runs/ show.
A page keeps its outputs where the run has none.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def of_the_moment(output: dict) -> bool:
    """Progress bars and what libraries say on standard error."""
    return output.get(
        "name"
    ) == "stderr" or "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def stored(root: Path) -> Iterator[tuple[Path, list[dict], list[dict]]]:
    """Each page that the run has executed with its own cells,
    and the cells with the outputs of the run.
    """
    for page in sorted((ROOT / "nbs" / "experiments").glob("e[0-9][0-9]_*.ipynb")):
        executed = root / page.stem.partition("_")[2] / "notebook.ipynb"
        if executed.is_file():
            cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
            outputs = {
                cell.get("id"): [one for one in cell["outputs"] if not of_the_moment(one)]
                for cell in json.loads(executed.read_text(encoding="utf-8"))["cells"]
                if cell["cell_type"] == "code"
            }

            def blank(found):
                return [
                    {**one, "execution_count": None} if "execution_count" in one else one
                    for one in found
                ]

            shown = [
                {**cell, "outputs": blank(outputs.get(cell["id"], [])), "execution_count": None}
                if cell["cell_type"] == "code"
                else cell
                for cell in cells
            ]
            yield page, cells, shown


if __name__ == "__main__":
    for page, cells, shown in stored(ROOT / (sys.argv[1] if sys.argv[1:] else "runs/micro")):
        if cells != shown:
            content = json.loads(page.read_text(encoding="utf-8")) | {"cells": shown}
            page.write_text(
                json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            print(page.relative_to(ROOT))
