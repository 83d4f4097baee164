"""The files that a page tells a reader to copy, taken from the page itself."""

import json
import re
from pathlib import Path

PAGES = Path(__file__).parents[4] / "nbs" / "products" / "integrations"


def write_files(page: str, folder: Path) -> dict[str, Path]:
    """Writes every block of a page that begins with a comment of a file's name; name -> path."""
    notebook = json.loads((PAGES / f"{page}.ipynb").read_text(encoding="utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    blocks = re.findall(r"^```\w+\n(# ([\w.]+\.(?:py|yaml))\n.*?)^```", text, re.S | re.M)
    files = {}
    for content, name in blocks:
        files[name] = folder / name
        files[name].write_text(content, encoding="utf-8")
    return files


def json_line(page: str) -> dict:
    """The one line of JSON that a page shows."""
    notebook = json.loads((PAGES / f"{page}.ipynb").read_text(encoding="utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    (line,) = re.findall(r"^```json\n(.*?)\n```", text, re.S | re.M)
    return json.loads(line)
