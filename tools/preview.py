"""The processed pages as plain HTML through nbconvert: what `tools.check_docs` opens,
and a site to read without Quarto.

The options of cells that Quarto knows (`echo`, `code-fold`, `fig-alt`) hold here too.
Formulas become MathML.
"""

import html
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import nbformat
import yaml
from latex2mathml.converter import convert as to_mathml
from markdown_it import MarkdownIt
from mdit_py_plugins.attrs import attrs_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbconvert import HTMLExporter
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

if TYPE_CHECKING:
    from tools.check_docs import Page

HERE = Path(__file__).parent


def highlighted(code: str, language: str, _: str = "") -> str:
    """Code as HTML with classes for its colours."""
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


def formula(text: str, options: dict) -> str:
    return to_mathml(text, display="block" if options["display_mode"] else "inline")


def reader() -> MarkdownIt:
    """Markdown as the site reads it: tables, attributes of links, formulas as MathML,
    headings with Pandoc's names.
    """
    from tools.check_docs import pandoc_id, plain

    markdown = MarkdownIt("commonmark", {"html": True, "highlight": highlighted}).enable(
        ["table", "strikethrough"]
    )
    markdown.use(attrs_plugin).use(dollarmath_plugin, renderer=formula, double_inline=True)

    def name_headings(state) -> None:
        for token, inline in zip(state.tokens, state.tokens[1:], strict=False):
            if token.type == "heading_open":
                token.attrs.setdefault("id", pandoc_id(plain(inline)))

    markdown.core.ruler.push("name_headings", name_headings)
    return markdown


READER = reader()
CODE = [".highlight", "pre code"]


def as_page(cell: dict) -> dict | None:
    """A cell as Quarto shows it: Markdown for `echo: false` and folded code,
    figures with their alternative text.
    """
    from tools.check_docs import alternative_text, option

    if cell["cell_type"] == "raw":
        return None
    if cell["cell_type"] != "code":
        return nbformat.v4.new_markdown_cell(cell["source"])
    outputs = [nbformat.from_dict(out) for out in cell.get("outputs", [])]
    if option(cell, "echo") == "False":
        text = "\n\n".join(out["data"].get("text/markdown", "") for out in outputs)
        return nbformat.v4.new_markdown_cell(text)
    fold = option(cell, "code-fold")
    summary = option(cell, "code-summary")
    code = re.sub(r"^#\|.*\n", "", cell["source"], flags=re.M)
    if fold and not outputs:
        state = " open" if fold == "show" else ""
        return nbformat.v4.new_markdown_cell(
            f"<details{state}><summary>{summary or 'Code'}</summary>\n\n"
            "```python\n"
            f"{code}\n"
            "```\n\n"
            "</details>"
        )
    for out in outputs:
        for kind in [kind for kind in out.get("data", {}) if kind.startswith("image/")]:
            out.setdefault("metadata", {})[kind] = {"alt": alternative_text(cell)}
    return nbformat.v4.new_code_cell(code, outputs=outputs)


def front_matter(page: "Page") -> dict:
    """What the first cell of a processed page says: title, description,
    the name of its file on the site.
    """
    settings = {}
    for cell in page.cells:
        if cell["cell_type"] == "raw" and cell["source"].startswith("---"):
            settings |= yaml.safe_load(cell["source"].strip().strip("-")) or {}
    return settings


def to_html_links(text: str) -> str:
    return re.sub(r'(href="(?![a-z]+:)[^"#]*)\.ipynb\b', r"\1.html", text)


def markdown_to_html(text: str, **_: object) -> str:
    """The filter of nbconvert's templates, by the reader of this site."""
    return READER.render(text)


def write_site(folder: Path, pages: list["Page"], target: Path) -> Path:
    """Every page of `folder` as HTML in `target`, each with the menus of sidebar.yml;
    returns `target`.
    """
    from tools.check_docs import pages_in

    shutil.rmtree(target, ignore_errors=True)
    heads = {page.path: front_matter(page) for page in pages}
    menus = yaml.safe_load((folder / "sidebar.yml").read_text(encoding="utf-8"))["website"]
    colours = HtmlFormatter().get_style_defs(CODE)
    dark = HtmlFormatter(style="github-dark").get_style_defs(CODE)
    plain = (HERE / "preview.css").read_text(encoding="utf-8")
    style = f"{plain}\n{colours}\n@media (prefers-color-scheme: dark) {{ {dark} }}"
    exporter = HTMLExporter(template_name="basic")
    exporter.environment.filters["markdown2html"] = markdown_to_html
    outline = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=False
    ).get_template("preview.html.j2")
    for page in pages:
        top = "../" * page.path.count("/")
        file = (target / page.path).with_suffix(".html")
        file.parent.mkdir(parents=True, exist_ok=True)

        def place(path, page_path=page.path):
            return to_html(os.path.relpath(path, Path(page_path).parent))

        side = next(
            (menu for menu in menus["sidebar"] if page.path in pages_in(menu)),
            {"contents": [], "title": ""},
        )
        entries = []
        for item in side["contents"]:
            if isinstance(item, dict):
                entries.append({"text": item["section"], "href": None})
            for path in pages_in(item):
                title = html.escape(heads[path].get("title", path))
                entries.append({"text": title, "href": place(path), "here": path == page.path})
        firsts = [
            (item["text"], item.get("href") or item["menu"][0]) for item in menus["navbar"]["left"]
        ]
        bar = [
            {"text": text, "href": place(first), "here": text == side["title"]}
            for text, first in firsts
        ]
        cells = list(filter(None, map(as_page, page.cells)))
        body, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))
        head = heads[page.path]
        shown = {
            name: READER.renderInline(str(head.get(name, ""))) for name in ("title", "description")
        }
        text = outline.render(
            **shown,
            top=top,
            css=style,
            bar=bar,
            side=entries,
            part=side["title"],
            body=to_html_links(body),
        )
        file.write_text(text, encoding="utf-8")
    for path in folder.rglob("*"):
        if path.suffix in (".svg", ".png", ".css") and not path.is_relative_to(target):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return target


def to_html(path: str) -> str:
    return Path(path).with_suffix(".html").as_posix()
