"""The processed pages, made ready for Quarto: what Jupyter shows well and Quarto would show badly.

Widgets are left out (they call other hosts). HTML that a cell puts out becomes a raw block without
styles and scripts. A bar in the code of a table loses its backslash. Chapters and experiments get
their number into the title, an experiment begins with what came out, and the home page with
`tools/first_screen.md`.
"""

import html
import json
import re
from configparser import ConfigParser
from pathlib import Path

import yaml

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"
SOCIAL_IMAGE = "images/social.png"
REFERENCE = (
    "The code, part by part",
    "How the trainer is built",
    "The checks",
    "Plans",
)  # sections whose parts are folded: looked up more often than read
LONG_CODE = 25  # lines above which the code of an example is folded
Cell = dict[str, object]


def for_quarto(path: str, notebook: dict) -> dict:
    """A processed notebook, changed in place. `path` is its path below the folder of pages."""
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = with_fig_alt(table_bars(text_of(cell["source"])))
        if cell["cell_type"] == "code":
            outputs = [without_scripts(out) for out in cell["outputs"] if not is_widget(out)]
            cell["outputs"] = outputs
    set_front_matter(path, notebook)
    if path.startswith("experiments/"):
        notebook["cells"] = outcome_first(notebook["cells"])
        for cell in notebook["cells"]:
            fold(cell, 0)
    else:
        for cell in notebook["cells"]:
            fold(cell, LONG_CODE)
    for cell in notebook["cells"]:
        keep_lines(cell)
    notebook["cells"] = folded_reference(notebook["cells"])
    if path.startswith("tutorials/"):
        notebook["cells"] = with_colab_link(path, notebook["cells"])
    if path == "index.ipynb":
        notebook["cells"] = with_first_screen(notebook["cells"])
    return notebook


def text_of(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def is_widget(output: dict) -> bool:
    """Whether an output is a widget, or the progress bar that stands for one in plain text."""
    if WIDGET in output.get("data", {}):
        return True
    text = text_of(output.get("text", ""))
    is_progress = re.match(r"(Loading weights|Writing model shards|Building labels)\b", text)
    return output["output_type"] == "stream" and is_progress is not None


def without_scripts(output: dict) -> dict:
    """An output whose HTML is a raw block of Markdown, and whose Markdown is as Pandoc reads it.

    A notebook with an output of type text/html makes Quarto load jquery and require.js from
    another host.
    """
    data = output.get("data", {})
    if "text/html" in data:
        raw = re.sub(r"<(style|script)\b.*?</\1>", "", text_of(data.pop("text/html")), flags=re.S)
        raw = "\n".join(line for line in raw.splitlines() if line.strip())
        data.clear()
        data["text/markdown"] = f"`````{{=html}}\n{raw}\n`````"
    elif "text/markdown" in data:
        data["text/markdown"] = table_bars(text_of(data["text/markdown"]))
    return output


PICTURE = re.compile(r"!\[(?P<words>(?:[^\[\]]|\[[^\]]*\])+)\]\((?P<file>[^)\s]+)\)(?!\{)")
PICTURE_WITH_ALT = re.compile(r'!\[\]\((?P<file>[^)\s]+)\)\{fig-alt="(?P<words>[^"]*)"\}')


def with_fig_alt(text: str) -> str:
    """Markdown in which the words of a picture are its alternative text: Pandoc makes a caption of
    them where a picture is a paragraph, and leaves the picture without text.
    """

    def to_alt(match: re.Match) -> str:
        words = " ".join(match["words"].split()).replace('"', "'")
        return f'![]({match["file"]}){{fig-alt="{words}"}}'

    return PICTURE.sub(to_alt, text)


def table_bars(text: str) -> str:
    r"""Markdown in which code in a table that holds `\|` is HTML: Pandoc shows the backslash."""

    def as_html(match: re.Match) -> str:
        code = html.escape(match[1].replace(r"\|", "|"), quote=False).replace("|", "&#124;")
        return f"<code>{code}</code>"

    lines = text.split("\n")
    fenced = False
    for number, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and line.startswith("|") and r"\|" in line:
            lines[number] = re.sub(r"`([^`]*\\\|[^`]*)`", as_html, line)
    return "\n".join(lines)


def front_matter(notebook: dict) -> dict:
    """What the raw cell in front says: title, description, the name of the file on the site."""
    settings: dict = {}
    for cell in notebook["cells"]:
        source = text_of(cell["source"])
        if cell["cell_type"] == "raw" and source.startswith("---"):
            settings.update(yaml.safe_load(source.strip().strip("-")) or {})
    return settings


def set_front_matter(path: str, notebook: dict) -> None:
    """Number in the title, and a social image that is no SVG."""
    for cell in notebook["cells"]:
        source = text_of(cell["source"])
        if cell["cell_type"] != "raw" or not source.startswith("---"):
            continue
        head = yaml.safe_load(source.strip().strip("-")) or {}
        if "title" not in head:
            continue
        head["title"] = numbered(path, str(head["title"]))
        head["image"] = "/" + SOCIAL_IMAGE
        text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
        cell["source"] = f"---\n{text}---"


def numbered(path: str, title: str) -> str:
    """The title of a page, with the number by which prose speaks of a chapter or experiment."""
    chapter = re.match(r"0(\d)_\w+\.ipynb$", path)
    if chapter:
        return f"Chapter {chapter[1]}: {title}"
    experiment = re.match(r"experiments/(e\d\d)_", path)
    return f"{experiment[1]}: {title}" if experiment else title


def outcome_first(cells: list[dict]) -> list[dict]:
    """The cells of an experiment, its section *What came out* moved behind the introduction."""
    starts = [k for k, cell in enumerate(cells) if heading(cell)]
    named = [k for k in starts if heading(cells[k]) == "What came out"]
    if not named or named[0] == starts[0]:
        return cells
    start = named[0]
    later = [k for k in starts if k > start]
    end = later[0] if later else len(cells)
    before = starts[0]
    while before > 0 and cells[before - 1]["cell_type"] == "code":
        before -= 1  # imports and parameters stand with what they are for
    front = [cell for cell in cells[:before] if cell["cell_type"] != "code"]
    parameters = [cell for cell in cells[:before] if cell["cell_type"] == "code"]
    return [*front, *cells[start:end], *parameters, *cells[before:start], *cells[end:]]


def heading(cell: dict) -> str:
    """The heading of the second level with which a cell begins, or no text."""
    match = re.match(r"## ([^\n{]+)", text_of(cell["source"]))
    return match[1].strip() if match and cell["cell_type"] == "markdown" else ""


def fold(cell: dict, lines: int) -> None:
    """Fold the code of a cell that is longer than `lines`, unless its options say otherwise."""
    if cell["cell_type"] != "code":
        return
    source = text_of(cell["source"])
    code = [line for line in source.splitlines() if not line.startswith("#|")]
    if len(code) > lines and not re.search(r"^#\| *(code-fold|echo):", source, re.M):
        cell["source"] = "#| code-fold: true\n" + source


FRAME = re.compile(r"[\u2500-\u257f]|\S {3,}\S.*\n.*\S {3,}\S")  # a drawn line, or columns


def keep_lines(cell: dict) -> None:
    """Mark a cell that printed frames or columns: on a phone they scroll (`styles.css`), since
    broken lines cannot be read there.
    """
    printed = [text_of(output.get("text", "")) for output in cell.get("outputs", [])]
    if any(FRAME.search(text) for text in printed):
        cell["source"] = "#| classes: as-printed\n" + text_of(cell["source"])


def folded_reference(cells: list[dict]) -> list[dict]:
    """The cells of a page; in the sections of `REFERENCE`, what follows the prose that opens a part
    is folded.
    """
    made: list[dict] = []
    is_reference = False
    title = ""  # of the part that is folded, if there is one
    for number, cell in enumerate(cells):
        opened = part_heading(cell)
        if opened is None:
            if title:
                lower_definitions(cell)
            made.append(cell)
            continue
        if title:
            made.append(added(f"end{number:05d}", FOLD_END))
            title = ""
        made.append(cell)
        level, words = opened
        if level == "##":
            is_reference = words in REFERENCE
        follows = cells[number + 1 :]
        has_content = bool(follows) and part_heading(follows[0]) is None
        if is_reference and level == "###" and has_content:
            title = html.escape(words.replace("`", ""))
            made.append(added(f"fold{number:04d}", FOLD_START.format(title=title)))
    if title:
        made.append(added("endoflast", FOLD_END))
    return made


def lower_definitions(cell: dict) -> None:
    """Set the headings of definitions a level lower: Pandoc ends a part at one of its own level."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "text/markdown" in data:
            data["text/markdown"] = re.sub(r"\A### ", "#### ", text_of(data["text/markdown"]))


def part_heading(cell: dict) -> tuple[str, str] | None:
    """(signs, words) of a heading of the second or third level with which prose begins."""
    match = re.match(r"(##|###) ([^\n{]+)", text_of(cell["source"]))
    if match is None or cell["cell_type"] != "markdown":
        return None
    return match[1], match[2].strip()


FOLD_START = """`````{{=html}}
<details class="part"><summary>Code and examples: {title}</summary>
`````

:::::::: {{.part-content}}
"""
FOLD_END = """::::::::

`````{=html}
</details>
`````"""


def install_line() -> str:
    """How the package is installed, from settings.ini: the one place that says it."""
    settings = ConfigParser(delimiters=["="])
    settings.read(HERE.parent / "settings.ini", encoding="utf-8")
    return settings["DEFAULT"]["install"]


def first_screen() -> str:
    """What the home page shows before anything else."""
    text = (HERE / "first_screen.md").read_text(encoding="utf-8")
    return text.replace("INSTALL", install_line())


def first_prose(cells: list[dict]) -> int:
    """Where the prose of a page begins, behind front matter and nbdev's comment."""
    for number, cell in enumerate(cells):
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown" and not source.startswith("<!--"):
            return number
    return len(cells)


def added(name: str, source: str) -> dict:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


def with_colab_link(path: str, cells: list[dict]) -> list[dict]:
    """The cells of a tutorial, with a link that opens it in Colab: no picture of another host."""
    settings = ConfigParser(delimiters=["="])
    settings.read(HERE.parent / "settings.ini", encoding="utf-8")
    repository = settings["DEFAULT"]["git_url"].removeprefix("https://github.com/")
    branch = settings["DEFAULT"]["branch"]
    url = f"https://colab.research.google.com/github/{repository}/blob/{branch}/nbs/{path}"
    first = first_prose(cells)
    text = (
        f"[Open in Colab]({url}): it runs without a key. Say `!{install_line()}` in a first cell. "
        "Colab itself was not tested."
    )
    return [*cells[:first], added("colablnk", text), *cells[first:]]


def with_first_screen(cells: list[dict]) -> list[dict]:
    """The cells of the home page, the first screen in front of the prose."""
    first = first_prose(cells)
    screen = added("firstscr", with_fig_alt(first_screen()))
    return [*cells[:first], screen, *cells[first:]]


def read_notebook(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def write_notebook(file: Path, notebook: dict) -> None:
    """Write a notebook with its texts as lists of lines: of a text in one piece Quarto loses the
    ends of lines.
    """
    for cell in notebook["cells"]:
        cell["source"] = text_of(cell["source"]).splitlines(keepends=True)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for kind in [kind for kind in data if kind.startswith("text/")]:
                data[kind] = text_of(data[kind]).splitlines(keepends=True)
    file.write_text(json.dumps(notebook, ensure_ascii=False, indent=1), encoding="utf-8")


def as_markdown(notebook: dict) -> str:
    """A page ready for Quarto as plain Markdown: prose, code, and what cells put out as text."""
    head = front_matter(notebook)
    parts = [f"# {head.get('title', '')}"]
    if head.get("description"):
        parts.append(f"> {head['description']}")
    for cell in notebook["cells"]:
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown" and not source.startswith("<!--"):
            prose = re.sub(r"^:::+.*$", "", source, flags=re.M)
            parts.append(PICTURE_WITH_ALT.sub(r"![\g<words>](\g<file>)", prose).strip())
        if cell["cell_type"] == "code":
            code = "\n".join(line for line in source.splitlines() if not line.startswith("#|"))
            if code.strip() and "echo: false" not in source:
                parts.append(f"```python\n{code.strip()}\n```")
            parts += map(output_text, cell["outputs"])
    return "\n\n".join(text for text in parts if text) + "\n"


def output_text(output: dict) -> str:
    """What an output says as Markdown; a picture is its file of the site, and says nothing here."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return text_of(data["text/markdown"]).replace("`````{=html}\n", "").replace("\n`````", "")
    text = text_of(output.get("text", data.get("text/plain", "")))
    if any(kind.startswith("image/") for kind in data) or not text.strip():
        return ""
    return f"```\n{text.rstrip()}\n```"
