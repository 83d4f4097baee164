"""What people type into the search, brought to the page that answers it.

Quarto's search looks for a phrase nearly word by word, in the text of sections. The table of the
start page says what people want and which page helps; each of its rows becomes an entry of the
search of its own.
"""

import json
import re
from pathlib import Path

from tools.quarto_pages import front_matter, read_notebook, text_of

ROW = re.compile(r"^\| (?P<wish>[^|]+?) \| (?P<pages>[^|]+?) \|", re.M)
TARGET = re.compile(r"\[([^\]]+)\]\(([\w./-]+)\.ipynb(#[\w-]+)?\)")


def wishes(start: dict) -> list[tuple[str, str, str]]:
    """(wish, words of the link, path of the page with its anchor) of each row of the table."""
    found = []
    for cell in start["cells"]:
        if cell["cell_type"] == "markdown":
            for row in ROW.finditer(text_of(cell["source"])):
                link = TARGET.search(row["pages"])
                if link:
                    found.append((row["wish"], link[1], f"{link[2]}.ipynb{link[3] or ''}"))
    return found


def add_wishes(start: Path, index: Path) -> None:
    """Add the rows of the start page's table to the search index of a built site, in front."""
    entries = json.loads(index.read_text(encoding="utf-8"))
    added = []
    for wish, words, target in wishes(read_notebook(start)):
        path, _, anchor = target.partition("#")
        file = start.parent / path
        head = front_matter(read_notebook(file))
        href = Path(path).with_name(head["output-file"]).as_posix()
        for number, phrase in enumerate(phrases(wish)):
            added.append(
                {
                    "objectID": f"{href}#wish-{len(added)}",
                    "href": f"{href}#{anchor}" if anchor else href,
                    "title": f"{phrase[0].upper()}{phrase[1:]}",
                    "section": "",
                    "text": f"{head['title']}: {head.get('description', words)}",
                    "crumbs": ["Start here"],
                }
            )
            assert number < 10
    index.write_text(json.dumps(added + entries, ensure_ascii=False, indent=2), encoding="utf-8")


def phrases(wish: str) -> list[str]:
    """A wish as people may type it: *evaluate my own model*, and *evaluate my model*."""
    shorter = wish.replace(" my own ", " my ")
    return list(dict.fromkeys([wish, shorter]))
