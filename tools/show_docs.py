"""What nbdev does to a page before Quarto sees it, where this project wants something else;
settings.ini names these parts.

No page is run for it: `Names` shows each definition as the source has it, with its signature,
docstring and commented parameters, and links each name of the package to its definition.
`FoldPlumbing` keeps the code of plumbing on the page, folded.
"""

import ast
import html
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nbdev.config import get_config
from nbdev.process import Processor


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
    order = (Path(get_config().nbs_path) / "ORDER").read_text(encoding="utf-8")
    page_by_module = {}
    for line in order.splitlines():
        if "|" in line and not line.startswith("#"):
            module, page, *_ = line.split("|")
            page_by_module[module.strip()] = f"{page.strip()}.ipynb"
    return page_by_module


def is_public_definition(node: ast.AST) -> bool:
    return isinstance(node, Definition) and not node.name.startswith("_")


@cache
def homes() -> dict[str, dict[str, Home]]:
    """Every public function, class and method of the package, by module."""
    homes_by_module: dict[str, dict[str, Home]] = {}
    for module, page in pages().items():
        file = Path(get_config().lib_path) / f"{module.replace('.', '/')}.py"
        text = file.read_text(encoding="utf-8")
        lines = tuple(text.splitlines())
        definitions = {}
        for node in filter(is_public_definition, statements_of(lines)):
            definitions[node.name] = node
            if isinstance(node, ast.ClassDef):
                for method in filter(is_public_definition, node.body):
                    definitions[f"{node.name}.{method.name}"] = method
        homes_by_module[module] = {
            name: Home(module, page, name, node, lines) for name, node in definitions.items()
        }
    return homes_by_module


@cache
def public_names() -> dict[str, str]:
    """The names of `import memcalib`, each with its module."""
    tree = ast.parse((Path(get_config().lib_path) / "__init__.py").read_text(encoding="utf-8"))

    def is_table(node):
        return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"

    names_by_module = ast.literal_eval(next(node.value for node in tree.body if is_table(node)))
    module_by_name = {}
    for module, names in names_by_module.items():
        module_by_name.update(dict.fromkeys(names, module))
    return module_by_name


def find(
    name: str, module: str | None, imported: frozenset[str] = frozenset()
) -> Home | str | None:
    """What a name in the prose of the page of `module` stands for:
    a definition, the page of a module, or nothing.

    A dotted name says its module. A bare name is this page's own, else a public one, else the only
    one of the package. A lower-case word such as `answer` may be anything, so it counts only if it
    is this page's, imported by it, or public.
    """
    name = name.removeprefix("memcalib.").removeprefix("mc.")
    if module and name in homes().get(module, {}):
        return homes()[module][name]
    first, *_ = parts = name.split(".")
    if first in public_names():
        names = homes()[public_names()[first]]
        return names.get(name) or names.get(first)
    for cut in range(len(parts) - 1, 0, -1):
        names = homes().get(".".join(parts[:cut]))
        if names is not None:
            return names.get(".".join(parts[cut:])) or names.get(parts[cut])
    if len(parts) > 1 and name in pages():
        return pages()[name]
    owners = [names[name] for names in homes().values() if name in names]
    is_distinct = re.search(r"[A-Z_.]", name) or name in imported
    return owners[0] if len(owners) == 1 and is_distinct else None


CODE = re.compile(r"(?<![\[`\w])`([A-Za-z_][\w.]*)(\(\))?`(?![`\]])")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)\s]*\)")


def link_names(
    text: str, page: str, module: str | None, imported: frozenset[str] = frozenset()
) -> str:
    """Markdown in which each name of the package that stands in backticks links to its definition.

    `page` is the page's path below nbs/, `module` the module that it defines. Fenced code, headings
    and what is linked already stay as they are.
    """
    folder = Path(page).parent

    def to_link(match: re.Match) -> str:
        home = find(match[1], module, imported)
        if home is None:
            return match[0]
        if isinstance(home, Home) and home.page == page:
            return f"[{match[0]}](#{home.anchor})"
        if isinstance(home, Home):
            return f"[{match[0]}]({relative(home.page, folder)}#{home.anchor})"
        return f"[{match[0]}]({relative(home, folder)})"

    fenced = False
    lines = []
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith(("#", "    ")):
            line = sub_outside_links(CODE, to_link, line)
        lines.append(line)
    return "\n".join(lines)


def relative(target: str, folder: Path) -> str:
    return Path(os.path.relpath(target, folder)).as_posix()


def sub_outside_links(pattern: re.Pattern, to_link: Callable[[re.Match], str], line: str) -> str:
    """A line in which `to_link` replaces what matches, its links left as they are."""
    changed = []
    position = 0
    for link in LINK.finditer(line):
        changed += [pattern.sub(to_link, line[position : link.start()]), link[0]]
        position = link.end()
    return "".join(changed) + pattern.sub(to_link, line[position:])


@cache
def statements_of(lines: tuple[str, ...]) -> list[ast.stmt]:
    return ast.parse("\n".join(lines)).body


@cache
def classes_of(lines: tuple[str, ...]) -> dict[str, ast.ClassDef]:
    return {part.name: part for part in statements_of(lines) if isinstance(part, ast.ClassDef)}


def class_fields(node: ast.ClassDef, lines: tuple[str, ...]) -> list[ast.AnnAssign]:
    """The fields of a class in the order of its definition,
    those of its bases in the same module first.
    """
    class_by_name = classes_of(lines)
    fields = []
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in class_by_name:
            fields += class_fields(class_by_name[base.id], lines)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields.append(statement)
    return fields


class Parameter(NamedTuple):
    """A parameter of a function, or a field of a class, as it is written."""

    name: str
    annotation: ast.expr | None
    default: ast.expr | None
    first_line: int
    line: int  # the last one of its definition, which may hold a comment


def function_parameters(node: ast.FunctionDef) -> list[Parameter]:
    """The parameters of a function but `self` and `cls`; a starred one is left out."""
    positional = [*node.args.posonlyargs, *node.args.args]
    without_default = len(positional) - len(node.args.defaults)
    defaults = [None] * without_default + node.args.defaults + node.args.kw_defaults
    rows = []
    for argument, default in zip([*positional, *node.args.kwonlyargs], defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            last = default if default is not None else argument
            row = Parameter(
                argument.arg, argument.annotation, default, argument.lineno, last.end_lineno
            )
            rows.append(row)
    return rows


def field_parameters(node: ast.ClassDef, lines: tuple[str, ...]) -> list[Parameter]:
    """The public fields of a class that has no `__init__` of its own."""
    rows = []
    for field in class_fields(node, lines):
        name = field.target.id
        if not name.startswith("_") and "ClassVar" not in ast.unparse(field.annotation):
            row = Parameter(name, field.annotation, field.value, field.lineno, field.end_lineno)
            rows.append(row)
    return rows


def comment_of(row: Parameter, lines: tuple[str, ...]) -> str:
    """The comment at the end of a parameter's last line, else the one right above it.

    A line that several parameters share describes none of them.
    """
    starts_line = lines[row.first_line - 1].lstrip().startswith(row.name)
    if not starts_line or re.search(r"\bdef ", lines[row.first_line - 1]):
        return ""
    beside = lines[row.line - 1].partition("  # ")[2]
    if beside and not beside.startswith("noqa"):
        return beside.strip()
    above = []
    number = row.first_line - 2
    while number >= 0 and re.match(r"\s*# (?!%%)", lines[number]):
        above.insert(0, lines[number].strip().removeprefix("# "))
        number -= 1
    return " ".join(above)


@cache
def annotated_names(lines: tuple[str, ...]) -> dict[str, ast.expr]:
    """The names that a module gives to annotations, such as those of command line options."""
    named = {}
    for statement in statements_of(lines):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if ast.unparse(statement.value).startswith("Annotated["):
                named[statement.targets[0].id] = statement.value
    return named


def help_of(row: Parameter, lines: tuple[str, ...]) -> str:
    """What `help` of an option of the command line, or `description` of a field, says."""
    annotation = row.annotation
    if isinstance(annotation, ast.Name):
        annotation = annotated_names(lines).get(annotation.id, annotation)
    for expression in (annotation, row.default):
        if expression is None:
            continue
        for call in ast.walk(expression):
            if not isinstance(call, ast.Call):
                continue
            for option in call.keywords:
                is_text = isinstance(option.value, ast.Constant)
                if option.arg in ("help", "description") and is_text:
                    return str(option.value.value)
    return ""


def sentences_of(docstring: str) -> list[str]:
    """The sentences of a docstring, and the parts of one that a colon or semicolon ends."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        for sentence in re.split(r"(?<=[.:;])\s+", " ".join(paragraph.split())):
            sentences.append(sentence.rstrip(":;"))
    return sentences


def sentence_about(name: str, docstring: str) -> str:
    """The first sentence of a docstring that names a parameter, or no text."""
    return next((each for each in sentences_of(docstring) if f"`{name}`" in each), "")


@cache
def what_a_class_is(name: str) -> str:
    """A class of the package with the first sentence about it; no text for another name."""
    home = find(name, None)
    if not isinstance(home, Home) or not isinstance(home.node, ast.ClassDef):
        return ""
    first = sentences_of(ast.get_docstring(home.node) or "")[0]
    return f"`{name}`: {first}" if first else ""


def what_the_type_is(annotation: ast.expr | None) -> str:
    """The first class of the package that a type names, with what it is."""
    if annotation is None:
        return ""
    names = re.findall(r"\b[A-Z]\w+", note(annotation))
    return next((text for text in map(what_a_class_is, names) if text), "")


class Described(NamedTuple):
    """A parameter as its table shows it."""

    name: str
    annotation: str
    default: str
    what: str
    is_written: bool  # whether `what` was written for this parameter alone


def parameters(home: Home) -> list[Described]:
    """The parameters of a function, or what makes an object of a class, each with what the source
    says of it: a comment, the help of an option, a sentence of the docstring, or what its type is.
    """
    node = home.node
    if isinstance(node, ast.ClassDef):
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        node = methods.get("__init__")
    if node is None:
        rows = field_parameters(home.node, home.lines)
    else:
        rows = function_parameters(node)
    docstring = ast.get_docstring(home.node) or ""
    described = []
    for row in rows:
        own = comment_of(row, home.lines) or help_of(row, home.lines)
        what = own or sentence_about(row.name, docstring) or what_the_type_is(row.annotation)
        annotation = note(row.annotation) if row.annotation else ""
        default = default_of(row.default) if row.default else ""
        described.append(Described(row.name, annotation, default, what, bool(own)))
    return described


SHORT_TABLE = 8  # rows up to which a table of parameters is open
LONG_SIGNATURE = 12  # lines above which a signature is folded


def parameter_rows(rows: list[Described]) -> str:
    """A table of parameters, as Markdown."""
    widths = "| ---- | ------ | ---- | ---------- |"  # as Pandoc parts the page between columns
    table = ["| parameter | type | default | what |", widths]
    for row in rows:
        what = re.sub(r"(?<!\\)\|", r"\|", row.what)
        cells = [code_cell(row.name), code_cell(row.annotation), code_cell(row.default), what]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def parameter_table(home: Home, *, folds: bool = True) -> str:
    """What the source says of the parameters, as Markdown; empty where it says nothing of its own.
    A parameter of which nothing is said is left out: types and defaults stand in the signature.

    A long table is folded, unless what is around it is (`folds`).
    """
    rows = [row for row in parameters(home) if row.what]
    if not any(row.is_written for row in rows):
        return ""
    table = parameter_rows(rows)
    if len(rows) <= SHORT_TABLE or not folds:
        return f'<div class="parameters">\n\n{table}\n\n</div>'
    return folded("Parameters", table)


def folded(summary: str, content: str) -> str:
    """Markdown that is shown when its line is clicked."""
    start = f'<details class="definition"><summary>{summary}</summary>'
    return f"{start}\n\n{content}\n\n</details>"


def call_form(home: Home) -> str:
    """A definition in one line: the names of its parameters and what it returns."""
    node = home.node
    if isinstance(node, ast.ClassDef):
        names = [row.name for row in parameters(home)]
        returned = ""
    else:
        names = [text.partition(":")[0].partition("=")[0] for text in function_texts(node)]
        returned = f" → {note(node.returns)}" if node.returns else ""
    shown = [name for name in names if name != "*"]
    if len(shown) > SHORT_TABLE:
        shown = [*shown[:SHORT_TABLE], "…"]
    return f"{home.name}({', '.join(shown)}){returned}"


def code_cell(text: str) -> str:
    """Code in a table. Pandoc would show the backslash of an escaped bar in backticks."""
    words = html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
    return f"<code>{words}</code>" if text else ""


RECORDS = {"BaseModel", "NamedTuple", "TypedDict"}  # classes that are made from their fields


def is_record(node: ast.ClassDef) -> bool:
    """Whether an object of a class is made from the fields that the class lists."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(re.match(r"(dataclasses\.)?dataclass\b", decorator) for decorator in decorators):
        return True
    for base in node.bases:
        name = ast.unparse(base).rpartition(".")[2]
        if name in RECORDS:
            return True
        homes_of_base = [names[name] for names in homes().values() if name in names]
        if len(homes_of_base) == 1 and isinstance(homes_of_base[0].node, ast.ClassDef):
            if is_record(homes_of_base[0].node):
                return True
    return False


FIELD_FUNCTIONS = {"field", "pydantic.field", "setting"}  # their first argument is the default
LONGEST_DEFAULT = 60  # characters of a default that are shown


def default_of(node: ast.expr) -> str:
    """The default of a field, also if `field`, `Field` or `setting` says how it is made, cut if
    long."""
    text = whole_default(node)
    if len(text) <= LONGEST_DEFAULT:
        return text
    end = text[-1] if text[-1] in "'\")]}" else ""
    return f"{text[:LONGEST_DEFAULT]}…{end}"


def whole_default(node: ast.expr) -> str:
    if not isinstance(node, ast.Call) or ast.unparse(node.func).lower() not in FIELD_FUNCTIONS:
        return ast.unparse(node)
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    if "default_factory" in options:
        factory = options["default_factory"]
        if isinstance(factory, ast.Lambda):
            return ast.unparse(factory.body)
        return f"{ast.unparse(factory)}()"
    value = options.get("default", node.args[0] if node.args else None)
    is_required = value is None or ast.unparse(value) == "..."
    return "" if is_required else ast.unparse(value)


def note(annotation: ast.expr) -> str:
    """An annotation without quotes, and without what `Annotated` adds."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation)


def written(parameter: Parameter) -> str:
    """A parameter as a signature shows it."""
    annotation = parameter.annotation
    text = parameter.name
    if annotation is not None:
        text += f": {note(annotation)}"
    default = default_of(parameter.default) if parameter.default is not None else ""
    if default:
        text += f" = {default}" if annotation is not None else f"={default}"
    return text


def signature(home: Home) -> str:
    """How a function is called, or an object of a class is made: in one line if it has room,
    else a parameter to a line.
    """
    node = home.node
    if isinstance(node, ast.ClassDef):
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        if "__init__" in methods:
            texts = function_texts(methods["__init__"])
        elif is_record(node):
            texts = [written(row) for row in field_parameters(node, home.lines)]
        else:
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            return f"class {node.name}({bases})" if bases else f"class {node.name}"
        start, end = f"class {node.name}(", ")"
    else:
        texts = function_texts(node)
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        start = f"{kind} {home.name}("
        end = f") -> {note(node.returns)}" if node.returns else ")"
    line = f"{start}{', '.join(texts)}{end}"
    if len(line) <= 76:
        return line
    return "\n".join([start, *(f"    {text}," for text in texts), end])


def function_texts(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The parameters of a function as its signature shows them, starred ones too."""
    rows = {row.name: written(row) for row in function_parameters(node)}
    positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    texts = [rows[name] for name in positional if name in rows]
    if node.args.vararg:
        texts.append(f"*{starred(node.args.vararg)}")
    elif node.args.kwonlyargs:
        texts.append("*")
    texts += [rows[arg.arg] for arg in node.args.kwonlyargs]
    if node.args.kwarg:
        texts.append(f"**{starred(node.args.kwarg)}")
    return texts


def starred(argument: ast.arg) -> str:
    return argument.arg + (f": {note(argument.annotation)}" if argument.annotation else "")


class Names(Processor):
    """Parameter tables and exact source links for what a page defines,
    and a link for each name in its prose.
    """

    def begin(self) -> None:
        nbs = Path(get_config().nbs_path).resolve()
        self.page = Path(self.nb.path_).resolve().relative_to(nbs).as_posix()
        module_by_page = {page: module for module, page in pages().items()}
        self.module = module_by_page.get(self.page)
        code = [cell.source for cell in self.nb.cells if cell.cell_type == "code" and cell.source]
        imports = r"^from memcalib\S* import (.+?)(?:\)|$)"
        imported = re.findall(imports, "\n".join(code), re.M)
        self.imported = frozenset(re.findall(r"\w+", " ".join(imported)))
        self.plumbing = self.plumbing_names()

    def plumbing_names(self) -> frozenset[str]:
        """What the page exports without showing its code."""
        names = set()
        for cell in self.nb.cells:
            if cell.cell_type == "code" and "export" in (cell.directives_ or {}):
                definitions = filter(is_public_definition, ast.parse(cell.source).body)
                names |= {node.name for node in definitions}
        return frozenset(names)

    def cell(self, cell) -> None:
        if cell.cell_type == "markdown":
            cell.source = self.to_site(self.linked(cell.source))
        if cell.cell_type != "code":
            return
        shown = re.search(r"^show_doc\((\w+)\)", cell.source, re.M)
        if shown is None:
            return
        home = homes().get(self.module, {}).get(shown[1])
        if home is None:  # not public, or not a function or class
            del cell["source"]
            return
        text = self.definition(home).splitlines(keepends=True)
        data = {"text/markdown": text}
        cell.outputs = [{"output_type": "display_data", "data": data, "metadata": {}}]

    def linked(self, text: str) -> str:
        return link_names(text, self.page, self.module, self.imported)

    def definition(self, home: Home) -> str:
        """A definition under its name: its source, its signature, its docstring, its parameters.

        Of plumbing, and of what has a long signature, all but the first paragraph is folded.
        """
        docstring = ast.get_docstring(home.node) or ""
        docstring = re.sub(r"\\\((.+?)\\\)", r"$\1$", docstring)  # as docstrings write mathematics
        head = f"### {home.name}\n\n" + f'[source]({home.source}){{.source target="_blank"}}'
        lines = signature(home).splitlines()
        code = "\n".join(["```python", *lines, "```"])
        first, _, rest = self.linked(docstring).partition("\n\n")
        table = self.linked(parameter_table(home, folds=False))
        hides = len(lines) > 1 or rest or table
        if hides and (home.name in self.plumbing or len(lines) > LONG_SIGNATURE):
            content = "\n\n".join(part for part in (code, rest, table) if part)
            summary = f"<code>{html.escape(call_form(home), quote=False)}</code>"
            parts = [head, first, folded(summary, content)]
        else:
            table = self.linked(parameter_table(home))
            parts = [head, code, first, rest, table]
        return "\n\n".join(part for part in parts if part)

    def to_site(self, text: str) -> str:
        """Links to files of the repository that are no page lead to the repository;
        a folder is its first page.
        """
        link = r"(?<!!)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([\w./-]+)(#[\w.-]+)?\)"
        return re.sub(link, self.site_link, text)

    def site_link(self, match: re.Match) -> str:
        settings = get_config()
        nbs = Path(settings.nbs_path).resolve()
        words, path, anchor = match.groups(default="")
        target = nbs / Path(self.page).parent / path
        pages_of_folder = sorted(target.glob("*.ipynb")) if target.is_dir() else []
        if pages_of_folder:
            return f"{words}({path.rstrip('/')}/{pages_of_folder[0].name})"
        if target.exists() and target.resolve().is_relative_to(nbs):
            return match[0]
        for file in (target.resolve(), nbs.parent / path):
            if file.exists() and file.is_relative_to(nbs.parent):
                in_repository = file.relative_to(nbs.parent).as_posix()
                url = f"{settings.git_url}/blob/{settings.branch}/{in_repository}{anchor}"
                return f"{words}({url})"
        return match[0]


LONG = 15  # lines of code above which a cell is folded


class FoldPlumbing(Processor):
    """What a cell exports is described above it, in the order of definition;
    plumbing and long code are folded, imports are left out.
    """

    def begin(self) -> None:
        cells = self.nb.cells
        for cell in [cell for cell in cells if self.exports(cell)]:
            start = cells.index(cell)
            end = start + 1
            while end < len(cells) and getattr(cells[end], "has_sd", False):
                end += 1
            descriptions = cells[start + 1 : end]  # nbdev puts the last definition first
            cells[start:end] = [*reversed(descriptions), cell]
            if self.is_plumbing(cell) or self.is_long(cell):
                cell.source = re.sub(r"^#\| *code-(fold|summary):.*\n", "", cell.source, flags=re.M)
                options = f'#| code-fold: true\n#| code-summary: "{self.summary(cell)}"\n'
                cell.source = options + cell.source

    @staticmethod
    def is_long(cell) -> bool:
        """Whether shown code is too long to read in passing."""
        return "exports" in cell.directives_ and len(cell.source.splitlines()) > LONG

    @staticmethod
    def exports(cell) -> bool:
        """Whether code of a cell becomes part of a module."""
        if cell.cell_type != "code" or not cell.source:
            return False
        return bool({"export", "exports"} & set(cell.directives_ or {}))

    def cell(self, cell) -> None:
        marks = cell.directives_.keys() if cell.directives_ else set()
        if marks & {"default_exp", "hide"} or ("export" in marks and not self.is_plumbing(cell)):
            del cell["source"]

    @staticmethod
    def summary(cell) -> str:
        """What a folded cell defines, in a few words."""
        names = []
        for node in ast.parse(cell.source).body:
            targets = [getattr(node, "target", node)]
            if isinstance(node, ast.Assign):
                targets = node.targets
            for target in targets:
                name = getattr(target, "name", None) or getattr(target, "id", None)
                if name:
                    names.append(name)
        if not names:
            return "Code"
        more = " …" if len(names) > 3 else ""
        return f"Code of {', '.join(names[:3])}{more}"

    @staticmethod
    def is_plumbing(cell) -> bool:
        """Whether a cell holds exported code that a reader may want to see."""
        if not cell.directives_ or "export" not in cell.directives_ or "hide" in cell.directives_:
            return False
        return any(
            not isinstance(node, ast.Import | ast.ImportFrom | ast.If)
            for node in ast.parse(cell.source).body
        )
