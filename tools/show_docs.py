"""What nbdev does to a page before Quarto sees it, where this project wants something else;
settings.ini names these parts.

`Renderer` shows an annotation that cannot be evaluated as it is written. `FoldPlumbing` keeps the
code of plumbing on the page, folded. `Names` adds parameter tables, and links each name of the
package to its definition and source.
"""

import ast
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nbdev.config import get_config
from nbdev.process import Processor
from nbdev.showdoc import BasicMarkdownRenderer


class AsWritten:
    """The text of an annotation, shown without quotes."""

    def __init__(self, text: str) -> None:
        self.__name__ = text


def keep_unresolved(function) -> None:
    """Replace each string annotation of `function` that does not evaluate by its text."""
    notes = getattr(function, "__annotations__", None)
    names = getattr(function, "__globals__", None)
    if not isinstance(notes, dict) or names is None:
        return
    for name, note in notes.items():
        if isinstance(note, str):
            try:
                eval(note, names)  # noqa: S307 - what inspect.signature(eval_str=True) does next
            except (NameError, AttributeError):
                notes[name] = AsWritten(note)


class Renderer(BasicMarkdownRenderer):
    def __init__(self, sym, *args, **options) -> None:
        parts = [
            getattr(sym, name, None)
            for name in ("__init__", "__new__", "__call__", "fget", "func", "__func__")
        ]
        for part in (sym, *parts):
            keep_unresolved(getattr(part, "__wrapped__", part))
        super().__init__(sym, *args, **options)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Home:
    """Where a public name is defined: its module, the page of that module below nbs/,
    and the definition itself.
    """

    module: str
    page: str
    name: str
    node: Definition
    lines: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """Of the heading that shows it; a method is shown with its class."""
        return self.name.partition(".")[0].lower()

    @property
    def source(self) -> str:
        """The definition in the repository."""
        settings = get_config()
        file = f"{settings.lib_name}/{self.module.replace('.', '/')}.py"
        return f"{settings.git_url}/blob/{settings.branch}/{file}#L{self.node.lineno}"


@cache
def pages() -> dict[str, str]:
    """The page of each module, from nbs/ORDER."""
    lines = (Path(get_config().nbs_path) / "ORDER").read_text(encoding="utf-8").splitlines()
    rows = (line.split("|") for line in lines if "|" in line and not line.startswith("#"))
    return {module.strip(): f"{page.strip()}.ipynb" for module, page, *_ in rows}


@cache
def homes() -> dict[str, dict[str, Home]]:
    """Every public function, class and method of the package, by module."""
    found: dict[str, dict[str, Home]] = {}
    for module, page in pages().items():
        text = (Path(get_config().lib_path) / f"{module.replace('.', '/')}.py").read_text(
            encoding="utf-8"
        )
        lines = tuple(text.splitlines())
        names = found.setdefault(module, {})
        for node in ast.parse(text).body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                inner = node.body if isinstance(node, ast.ClassDef) else []
                methods = [
                    m for m in inner if isinstance(m, Definition) and not m.name.startswith("_")
                ]
                for name, part in [
                    (node.name, node),
                    *((f"{node.name}.{m.name}", m) for m in methods),
                ]:
                    names[name] = Home(module, page, name, part, lines)
    return found


@cache
def public_names() -> dict[str, str]:
    """The names of `import memcalib`, each with its module."""
    tree = ast.parse((Path(get_config().lib_path) / "__init__.py").read_text(encoding="utf-8"))

    def is_table(node):
        return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"

    table = ast.literal_eval(next(node.value for node in tree.body if is_table(node)))
    return {name: module for module, names in table.items() for name in names}


def find(name: str, here: str | None, imported: frozenset[str] = frozenset()) -> Home | str | None:
    """What a name in the prose of the page of module `here` stands for:
    a definition, the page of a module, or nothing.

    A dotted name says its module. A bare name is this page's own, else a public one, else the only
    one of the package. A lower-case word such as `answer` may be anything, so it counts only if it
    is this page's, imported by it, or public.
    """
    name = name.removeprefix("memcalib.").removeprefix("mc.")
    if here and name in homes().get(here, {}):
        return homes()[here][name]
    if (top := name.partition(".")[0]) in public_names():
        module = public_names()[top]
        return homes()[module].get(name) or homes()[module].get(top)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        rest = ".".join(parts[cut:])
        if module in homes():
            return homes()[module].get(rest) or homes()[module].get(parts[cut])
    if len(parts) > 1 and name in pages():
        return pages()[name]
    owners = [names[name] for names in homes().values() if name in names]
    distinct = re.search(r"[A-Z_.]", name) or name in imported
    return owners[0] if len(owners) == 1 and distinct else None


CODE = re.compile(r"(?<![\[`\w])`([A-Za-z_][\w.]*)(\(\))?`(?![`\]])")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)\s]*\)")


def link_names(
    text: str, page: str, here: str | None, imported: frozenset[str] = frozenset()
) -> str:
    """Markdown in which each name of the package that stands in backticks links to its definition.

    `page` is the page's path below nbs/. Fenced code, headings and what is linked already stay as
    they are.
    """
    folder = Path(page).parent

    def to_link(match: re.Match) -> str:
        found = find(match[1], here, imported)
        if found is None:
            return match[0]
        target, anchor = (found, "") if isinstance(found, str) else (found.page, f"#{found.anchor}")
        place = (
            "" if target == page and anchor else Path(os.path.relpath(target, folder)).as_posix()
        )
        return f"[{match[0]}]({place}{anchor})"

    fenced = False
    lines = []
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith(("#", "    ")):
            kept = LINK.findall(line)
            line = "".join(
                CODE.sub(to_link, part) + link
                for part, link in zip(LINK.split(line), [*kept, ""], strict=True)
            )
        lines.append(line)
    return "\n".join(lines)


def class_fields(node: ast.ClassDef, lines: tuple[str, ...]) -> list[ast.AnnAssign]:
    """The fields of a class in the order of its definition,
    those of its bases in the same module first.
    """
    around = {
        part.name: part
        for part in ast.parse("\n".join(lines)).body
        if isinstance(part, ast.ClassDef)
    }
    bases = [
        around[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in around
    ]
    own = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
    return [field for base in bases for field in class_fields(base, lines)] + own


def parameters(home: Home) -> list[tuple[str, str, str, str]]:
    """(name, type, default, comment) of a function's parameters,
    or of what makes an object of a class.
    """
    node = home.node
    rows = []
    if isinstance(node, ast.ClassDef):
        init = next(
            (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None
        )
        if init is None:
            fields = class_fields(node, home.lines)
            rows = [(f.target.id, f.annotation, f.value, f.end_lineno) for f in fields]
            rows = [
                row
                for row in rows
                if not row[0].startswith("_") and "ClassVar" not in ast.unparse(row[1])
            ]
        node = init
    if node is not None:
        plain = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(plain) - len(node.args.defaults)) + node.args.defaults
        named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        pairs = [*zip(plain, defaults, strict=True), *named]
        rows = [
            (a.arg, a.annotation, value, a.end_lineno)
            for a, value in pairs
            if a.arg not in ("self", "cls")
        ]
    shown = []
    for name, kind, value, line in rows:
        comment = home.lines[line - 1].partition("  # ")[2].removeprefix("noqa").strip()
        if isinstance(kind, ast.Constant):  # a quoted annotation
            kind = ast.parse(str(kind.value), mode="eval").body
        shown.append(
            (name, ast.unparse(kind) if kind else "", ast.unparse(value) if value else "", comment)
        )
    return shown


def parameter_table(home: Home) -> str:
    """The parameters as Markdown; empty where the signature says as much:
    below three of them, and no comment.
    """
    rows = parameters(home)
    if len(rows) < 3 and not any(row[3] for row in rows):
        return ""
    columns = ["parameter", "type", "default", "what"][: 4 if any(row[3] for row in rows) else 3]

    def code(text):
        return f"`{' '.join(text.split())}`" if text else ""

    cells = [
        (code(name), code(kind), code(value), comment)[: len(columns)]
        for name, kind, value, comment in rows
    ]
    table = [columns, ["---"] * len(columns), *cells]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in table]
    return "\n".join(["", '<div class="parameters">', "", *lines, "", "</div>", ""])


class Names(Processor):
    """Parameter tables and exact source links for what a page defines,
    and a link for each name in its prose.
    """

    def begin(self) -> None:
        self.page = (
            Path(self.nb.path_)
            .resolve()
            .relative_to(Path(get_config().nbs_path).resolve())
            .as_posix()
        )
        self.module = next((module for module, page in pages().items() if page == self.page), None)
        text = "\n".join(
            cell.source for cell in self.nb.cells if cell.cell_type == "code" and cell.source
        )
        imported = re.findall(r"^from memcalib\S* import (.+?)(?:\)|$)", text, re.M)
        self.imported = frozenset(re.findall(r"\w+", " ".join(imported)))

    def cell(self, cell) -> None:
        if cell.cell_type == "markdown":
            cell.source = self.to_site(
                link_names(cell.source, self.page, self.module, self.imported)
            )
        shown = (
            re.search(r"^show_doc\((\w+)\)", cell.source, re.M)
            if cell.cell_type == "code"
            else None
        )
        home = homes().get(self.module, {}).get(shown[1]) if shown else None
        for out in cell.get("outputs", []) if home else []:
            text = "".join(out["data"]["text/markdown"])
            text = re.sub(r"\\\((.+?)\\\)", r"$\1$", text)  # as docstrings write mathematics
            text = re.sub(
                r"^### .*", f"### {home.name}", text, count=1, flags=re.M
            )  # a decorator may have changed it
            text = re.sub(r"\[source\]\([^)]*\)", f"[source]({home.source})", text, count=1)
            text = (
                link_names(text, self.page, self.module, self.imported)
                + "\n"
                + parameter_table(home)
            )
            out["data"] = {"text/markdown": text.splitlines(keepends=True)}

    def to_site(self, text: str) -> str:
        """Links to files of the repository that are no page lead to the repository;
        a folder is its first page.
        """
        nbs = Path(get_config().nbs_path).resolve()
        settings = get_config()

        def place(match: re.Match) -> str:
            path = match[2]
            anchor = match[3] or ""
            target = nbs / Path(self.page).parent / path
            if target.is_dir() and (first := sorted(target.glob("*.ipynb"))):
                return f"{match[1]}({path.rstrip('/')}/{first[0].name})"
            inside = target.exists() and target.resolve().is_relative_to(nbs)
            file = next((f for f in (target.resolve(), nbs.parent / path) if f.exists()), None)
            if inside or file is None or not file.is_relative_to(nbs.parent):
                return match[0]
            where = file.relative_to(nbs.parent).as_posix()
            return f"{match[1]}({settings.git_url}/blob/{settings.branch}/{where}{anchor})"

        return re.sub(r"(?<!!)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([\w./-]+)(#[\w.-]+)?\)", place, text)


class FoldPlumbing(Processor):
    """What a cell exports is described above it, in the order of definition;
    plumbing is folded, imports are left out.
    """

    def begin(self) -> None:
        cells = self.nb.cells
        for cell in [
            c
            for c in cells
            if c.cell_type == "code"
            and c.source
            and {*(c.directives_ or {})} & {"export", "exports"}
        ]:
            place = cells.index(cell)
            end = next(
                (k for k in range(place + 1, len(cells)) if not getattr(cells[k], "has_sd", False)),
                len(cells),
            )
            cells[place:end] = [
                *reversed(cells[place + 1 : end]),
                cell,
            ]  # nbdev puts the last definition first
            if self.is_plumbing(cell):
                cell.source = (
                    f'#| code-fold: true\n#| code-summary: "{self.summary(cell)}"\n{cell.source}'
                )

    def cell(self, cell) -> None:
        marks = cell.directives_.keys() if cell.directives_ else set()
        if marks & {"default_exp", "hide"} or ("export" in marks and not self.is_plumbing(cell)):
            del cell["source"]

    @staticmethod
    def summary(cell) -> str:
        """What a folded cell defines, in a few words."""
        names = []
        for node in ast.parse(cell.source).body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            )
            names += [
                getattr(target, "name", None) or getattr(target, "id", None) for target in targets
            ]
        names = [name for name in names if name]
        return (
            "Code of " + ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
            if names
            else "Code"
        )

    @staticmethod
    def is_plumbing(cell) -> bool:
        """Whether a cell holds exported code that a reader may want to see."""
        if not cell.directives_ or "export" not in cell.directives_ or "hide" in cell.directives_:
            return False
        return any(
            not isinstance(node, ast.Import | ast.ImportFrom | ast.If)
            for node in ast.parse(cell.source).body
        )
