"""Take widgets out of the stored outputs of notebooks: progress bars, which say nothing later and
make a page of the site call other hosts. `python -m tools.strip_widgets` does all of nbs/.
"""

import json
from pathlib import Path

from tools.quarto_pages import is_widget

NBS = Path(__file__).parents[1] / "nbs"


def strip(file: Path) -> int:
    """Remove the widgets of a notebook; returns how many."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    removed = 0
    for cell in notebook["cells"]:
        outputs = [output for output in cell.get("outputs", []) if not is_widget(output)]
        removed += len(cell.get("outputs", [])) - len(outputs)
        if "outputs" in cell:
            cell["outputs"] = outputs
    removed += notebook["metadata"].pop("widgets", None) is not None
    if removed:
        text = json.dumps(notebook, ensure_ascii=False, indent=1)
        file.write_text(f"{text}\n", encoding="utf-8")
    return removed


if __name__ == "__main__":
    for file in sorted(NBS.rglob("*.ipynb")):
        count = strip(file)
        if count:
            print(f"{file.relative_to(NBS)}: {count} removed")
