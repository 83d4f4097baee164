"""Everything about the site that can be checked without Quarto.

Configuration, links and their anchors, alternative text; then each page as HTML through nbconvert,
opened in headless Chromium as wide as a desk and as a phone: nothing wider than the page, no error
on the console, nothing from a network. A fault is one line: the page, the place, what was found,
what is allowed.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

WIDTHS = (1400, 390)
READER = MarkdownIt("commonmark", {"html": True}).enable("table")
ATTRIBUTES = re.compile(r"(?<=\))\{[^}\n]*\}")  # of a link, as Pandoc writes them


@dataclass
class Page:
    """A notebook of the site, by its path below the folder of pages,
    with all its Markdown and HTML.
    """

    path: str
    cells: list[dict]
    read_as: dict[str, list[Token]] = field(
        default_factory=dict, repr=False
    )  # of each text, read once

    @classmethod
    def read(cls, folder: Path, path: Path) -> "Page":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            cell["source"] = "".join(cell["source"])
            for out in cell.get("outputs", []):
                if "text" in out:
                    out["text"] = "".join(out["text"])
                for kind, data in out.get("data", {}).items():
                    out["data"][kind] = "".join(data) if isinstance(data, list) else data
        return cls(path.relative_to(folder).as_posix(), cells)

    def texts(self) -> Iterator[tuple[str, str]]:
        """(cell, Markdown) of the prose and of Markdown and HTML that cells put out."""
        for number, cell in enumerate(self.cells):
            cell_name = f"cell {cell.get('id', number)}"
            if cell["cell_type"] == "markdown":
                yield cell_name, cell["source"]
            for out in cell.get("outputs", []):
                yield from (
                    (cell_name, out["data"][k])
                    for k in ("text/markdown", "text/html")
                    if k in out.get("data", {})
                )

    def parsed(self, text: str) -> list[Token]:
        """The tokens of a text, attributes of links left out."""
        if text not in self.read_as:
            self.read_as[text] = READER.parse(ATTRIBUTES.sub("", text))
        return self.read_as[text]

    def tokens(self) -> Iterator[tuple[str, Token]]:
        """(cell, token) of everything in the texts, from outside to inside."""
        for cell_name, text in self.texts():
            for token in self.parsed(text):
                yield cell_name, token
                yield from ((cell_name, child) for child in token.children or [])

    def anchors(self) -> set[str]:
        """Where a link may lead: headings under the names that Pandoc gives them,
        and ids in HTML.
        """
        anchors: list[str] = []
        for text in (text for _, text in self.texts() if "#" in text or "id=" in text):
            tokens = self.parsed(text)
            heads = (
                tokens[k + 1] for k, token in enumerate(tokens) if token.type == "heading_open"
            )
            for head in heads:
                own_id = re.search(r"\{#([\w-]+)[^}]*\}\s*$", head.content)
                name = own_id[1] if own_id else pandoc_id(plain(head))
                again = sum(
                    re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None
                    for other in anchors
                )
                anchors.append(f"{name}-{again}" if again and not own_id else name)
            anchors += re.findall(r"""\bid=["']([\w.-]+)["']""", text)
        return set(anchors)


def plain(inline: Token) -> str:
    """The words of a heading."""
    return "".join(
        child.content for child in inline.children or [] if child.type in ("text", "code_inline")
    )


def pandoc_id(words: str) -> str:
    """The name that Pandoc, and so Quarto, gives to a heading."""
    cleaned = re.sub(r"[^\w\s.-]", "", words.lower())
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", cleaned.strip())) or "section"


def read_pages(folder: Path) -> list[Page]:
    """All pages below a folder, in the order of their paths."""
    pages = []
    for path in sorted(folder.rglob("[!._]*.ipynb")):
        if not any(name[0] in "._" for name in path.relative_to(folder).parts):
            pages.append(Page.read(folder, path))
    return pages


def data_of_outputs(cell: dict) -> dict[str, list[object]]:
    """What a cell puts out, by the type of the content."""
    data_by_type: dict[str, list[object]] = {}
    for out in cell.get("outputs", []):
        for kind, data in out.get("data", {}).items():
            data_by_type.setdefault(kind, []).append(data)
    return data_by_type


class Tags(HTMLParser):
    """Links and pictures in HTML: `found` holds (tag, attributes)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in ("a", "img"):
            self.tags.append((tag, dict(attrs)))


def links(page: Page) -> Iterator[tuple[str, str]]:
    """(cell, target) of every link and picture of a page."""
    for cell_name, token in page.tokens():
        if token.type in ("link_open", "image"):
            yield cell_name, str(token.attrs.get("href") or token.attrs.get("src"))
        elif token.type in ("html_block", "html_inline"):
            targets = (
                attributes.get("href") or attributes.get("src")
                for _, attributes in Tags(token.content).tags
            )
            yield from ((cell_name, target) for target in targets if target)


def link_faults(pages: Iterable[Page], folder: Path, root: Path | None = None) -> Iterator[str]:
    """A fault for each link that leads nowhere: no such page or file, or no such heading on it.

    Links of a page may lead to files below `folder`; with `root`,
    also to files of the repository, seen from there.
    """
    pages = list(pages)
    anchors = {page.path: page.anchors() for page in pages}
    for page in pages:
        for cell_name, target in links(page):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            full = (
                Path(os.path.normpath(Path(page.path).parent / path)).as_posix()
                if path
                else page.path
            )
            if full in anchors:
                if anchor and anchor not in anchors[full]:
                    allowed = near(anchor, anchors[full])
                    yield (
                        f"{page.path}: {cell_name}: link to {target!r}: no such heading; allowed: "
                        f"{allowed}"
                    )
            elif not (folder / full).exists() and not (root and (root / path).exists()):
                moved = [name for name in anchors if same_name(name, full)]
                hint = f"; moved to {', '.join(moved)}?" if moved else ""
                yield f"{page.path}: {cell_name}: link to {target!r}: no such page or file{hint}"


def same_name(path: str, other: str) -> bool:
    """Whether two pages have one name, but for the number and the folder."""
    names = [re.sub(r"^[0-9]+_", "", Path(each).stem) for each in (path, other)]
    return names[0] == names[1] and other.endswith(".ipynb")


def near(anchor: str, headings: set[str]) -> str:
    """The headings most like a wrong one."""
    from difflib import get_close_matches

    return (
        ", ".join(get_close_matches(anchor, sorted(headings), 3, 0.4))
        or f"one of {len(headings)} headings"
    )


def picture_faults(pages: Iterable[Page]) -> Iterator[str]:
    """A fault for each picture without alternative text:
    one in Markdown or HTML, or one that a cell draws.
    """
    for page in pages:
        for cell_name, token in page.tokens():
            if token.type == "image" and not token.content.strip():
                src = token.attrs["src"]
                yield (
                    f"{page.path}: {cell_name}: picture {src!r} without alternative text; allowed: "
                    "![what it shows](file)"
                )
            if token.type in ("html_block", "html_inline"):
                bare = [
                    a
                    for tag, a in Tags(token.content).tags
                    if tag == "img" and not (a.get("alt") or "").strip()
                ]
                yield from (
                    f"{page.path}: {cell_name}: <img> without alternative text" for _ in bare
                )
        for cell in page.cells:
            kinds = data_of_outputs(cell)
            if any(kind.startswith("image/") for kind in kinds) and not alternative_text(cell):
                where = f"{page.path}: cell {cell.get('id')}"
                yield (
                    f"{where}: a figure without alternative text; allowed: a line `#| fig-alt: "
                    "what it shows`"
                )


OPTION_LINE = re.compile(
    r"#\|\s*([\w-]+:(?:\s.*)?)$"
)  # an option for Quarto; `#| export` is nbdev's


def option_lines(cell: dict) -> Iterator[str]:
    """The options that a code cell gives to Quarto, each as the text after `#|`."""
    for line in cell["source"].splitlines():
        if not line.startswith("#|"):
            return
        match = OPTION_LINE.match(line)
        if match:
            yield match[1]


def option_faults(pages: Iterable[Page]) -> Iterator[str]:
    """A fault for each option of a code cell that is no YAML: one of them stops the whole site."""
    allowed = "allowed is one `name: value` in YAML; put a value that holds ': ' in quotes"
    for page in pages:
        for cell in page.cells:
            if cell["cell_type"] != "code":
                continue
            names: set[str] = set()
            for line in option_lines(cell):
                where = f"{page.path}: cell {cell.get('id')}: `#| {line}`"
                try:
                    yaml.safe_load(line)
                except yaml.YAMLError:
                    yield f"{where} is no YAML; {allowed}"
                name = line.partition(":")[0]
                if name in names:
                    yield f"{where} gives {name!r} a second time; allowed: each option once"
                names.add(name)


def front_matter_faults(pages: Iterable[Page]) -> Iterator[str]:
    """A fault for each raw cell in front of a page that is no YAML: it stops the whole site."""
    for page in pages:
        for cell in page.cells:
            if cell["cell_type"] != "raw" or not cell["source"].startswith("---"):
                continue
            try:
                yaml.safe_load(cell["source"].strip().strip("-"))
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                number = mark.line if mark else 0
                line = cell["source"].splitlines()[number]
                yield (
                    f"{page.path}: cell {cell.get('id')}: line {number + 1}: {line!r} is no YAML; "
                    "allowed is `name: value` in YAML between two lines of ---"
                )


NEEDS_BLANK = re.compile(r"#{1,6} |[-*+] |\d+\. |\|")  # heading, list, table: as Pandoc reads them


def blank_line_faults(pages: Iterable[Page]) -> Iterator[str]:
    """A fault for each heading, list or table right below a line of prose: Jupyter shows it, Pandoc
    takes it for more prose.
    """
    for page in pages:
        for cell in page.cells:
            if cell["cell_type"] != "markdown":
                continue
            is_fenced = False
            before = ""
            for line in cell["source"].splitlines():
                begins = NEEDS_BLANK.match(line)
                continues = NEEDS_BLANK.match(before) or before.startswith((" ", ">", ":::"))
                if begins and before.strip() and not is_fenced and not continues:
                    yield (
                        f"{page.path}: cell {cell.get('id')}: {line[:60]!r} right below a line of "
                        "prose; allowed: a blank line between them"
                    )
                is_fenced ^= line.lstrip().startswith("```")
                before = line


def widget_faults(pages: Iterable[Page]) -> Iterator[str]:
    """A fault for each stored widget, most of them progress bars: they call other hosts."""
    for page in pages:
        for cell in page.cells:
            kinds = data_of_outputs(cell)
            if any("widget" in kind for kind in kinds):
                yield (
                    f"{page.path}: cell {cell.get('id')}: a stored widget; "
                    "`python -m tools.strip_widgets` takes it out"
                )


def option(cell: dict, name: str) -> str:
    """The value of an option that a code cell gives to Quarto as `#| name: value`, or no text."""
    for line in option_lines(cell):
        if line.startswith(f"{name}:"):
            value = yaml.safe_load(line)[name]
            return "" if value is None else str(value)
    return ""


def alternative_text(cell: dict) -> str:
    return option(cell, "fig-alt")


def configuration_faults(folder: Path) -> Iterator[str]:
    """A fault for each file that the configuration of the site names and that is not there,
    or page that no menu has.
    """
    config = yaml.safe_load((folder / "_quarto.yml").read_text(encoding="utf-8"))
    parts = [config]
    for name in config.get("metadata-files", []):
        if (folder / name).is_file():
            parts.append(yaml.safe_load((folder / name).read_text(encoding="utf-8")))
        else:
            yield f"_quarto.yml: metadata-files: found no file {name!r}"
    style = config["format"]["html"]
    named = [style["css"], *style["include-after-body"], config["website"]["favicon"]]
    named += [name for name in style["theme"]["light"] if name.endswith(".scss")]
    menus: list[str] = []
    for menu_file in parts:
        menus += pages_in(menu_file.get("website", {}))
    yield from (
        f"_quarto.yml: found no file {name!r}"
        for name in [*named, *menus]
        if not (folder / name).is_file()
    )
    for page in sorted({page.path for page in read_pages(folder)} - {*menus}):
        yield f"{page}: found in no menu of the site"


def pages_in(tree: object) -> Iterator[str]:
    """Every notebook that a menu names, at any depth."""
    if isinstance(tree, str):
        if tree.endswith(".ipynb"):
            yield tree
    elif isinstance(tree, dict):
        yield from pages_in(list(tree.values()))
    elif isinstance(tree, list):
        for entry in tree:
            yield from pages_in(entry)


def size_faults(folder: Path, limit: int = 400_000) -> Iterator[str]:
    """A fault for each page above `limit` bytes whose figures alone do not explain it."""
    for page in read_pages(folder):
        size = (folder / page.path).stat().st_size
        drawn = 0
        for cell in page.cells:
            for kind, contents in data_of_outputs(cell).items():
                if kind.startswith("image/"):
                    drawn += sum(map(len, contents))
        if size - drawn > limit:
            measured = f"{size // 1000} kB, {drawn // 1000} kB of them figures"
            allowed = f"{limit // 1000} kB without figures"
            yield f"{page.path}: found {measured}; allowed: {allowed}"


def check(
    folder: Path, *, preview: bool = True, browser: bool = True, pictures: Path | None = None
) -> list[str]:
    """Every fault of the processed pages in `folder`; with `preview` their HTML is written to
    `folder`/_html, and opened with `browser`.
    """
    from tools.preview import write_site

    pages = read_pages(folder)
    unreadable = [*option_faults(pages), *front_matter_faults(pages)]
    if unreadable:
        return unreadable
    faults = [
        *configuration_faults(folder),
        *link_faults(pages, folder),
        *picture_faults(pages),
        *blank_line_faults(pages),
        *size_faults(folder),
    ]
    if preview:
        site = write_site(folder, pages, folder / "_html")
        if browser:
            faults += browser_faults(site, [page.path for page in pages], pictures)
    print(f"{len(pages)} pages checked, {len(faults)} faults")
    return faults


TOO_WIDE = """() => {
  const wide = document.documentElement.clientWidth;
  const scrolling = ['auto', 'scroll', 'hidden', 'clip'];
  const right = e => Math.round(e.getBoundingClientRect().right);
  const scrolls = e => scrolling.includes(getComputedStyle(e).overflowX);
  const inside = e => e && e !== document.body && (scrolls(e) || inside(e.parentElement));
  const tooWide = e => right(e) > wide + 1 && !inside(e.parentElement);
  const faults = [...document.body.querySelectorAll('*')].filter(tooWide);
  const start = e => e.textContent.trim().slice(0, 60);
  const message = e => `${e.tagName.toLowerCase()} up to ${right(e)} px: ${start(e)}`;
  return faults.slice(0, 3).map(message);
}"""
MAIN = [
    *(
        "index",
        "start",
        "public_api",
        "paper_index",
        "00_problem",
        "02_judge",
        "03_metrics",
        "05_localization",
    ),
    *("07_training", "experiments/e03_main_results", "products/exam/02_exam", "report/03_figures"),
]


def chromium_on_path() -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    return None


def browser_faults(site: Path, paths: Iterable[str], pictures: Path | None = None) -> list[str]:
    """What headless Chromium finds on the pages at both widths;
    with `pictures`, saves there how the main pages look.
    """
    from playwright.sync_api import sync_playwright

    chromium = chromium_on_path()
    if chromium is None:
        return [
            (
                "browser: found no Chromium on the path; allowed: "
                "`apt-get install chromium`, or `--no-browser`"
            )
        ]
    faults: list[str] = []
    heard: list[str] = []  # from the page that is open
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium)
        for width in WIDTHS:
            tab = browser.new_page(viewport={"width": width, "height": 900})
            tab.on(
                "console",
                lambda message: heard.append(message.text) if message.type == "error" else None,
            )
            tab.on("pageerror", lambda error: heard.append(str(error)))
            tab.on(
                "request",
                lambda request: (
                    heard.append(f"asks for {request.url}") if request.url[:4] == "http" else None
                ),
            )
            for path in paths:
                heard.clear()
                tab.goto((site / path).with_suffix(".html").resolve().as_uri())
                faults += [f"{path}: at {width} px: {message}" for message in heard]
                faults += [
                    f"{path}: at {width} px wider than the page: {element}"
                    for element in tab.evaluate(TOO_WIDE)
                ]
                if pictures and path.removesuffix(".ipynb") in MAIN:
                    pictures.mkdir(parents=True, exist_ok=True)
                    name = path.removesuffix(".ipynb").replace("/", "-")
                    tab.screenshot(path=pictures / f"{name}-{width}.png", full_page=True)
        browser.close()
    return faults
