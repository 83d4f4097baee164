"""The pages of the site that are made from something else: the command line from the same source
as `--help`, what is new from CHANGELOG.md, how to cite from CITATION.cff, and llms.txt.
"""

import re
from pathlib import Path

import typer
import yaml
from nbdev.config import get_config

from memcalib.commands.cli import app
from tools.samples import SAMPLES

ROOT = Path(__file__).parents[1]
START = ["samples.qmd", "news.qmd", "cite.qmd"]
PROGRAM = typer.main.get_command(app)


def verbs() -> dict[str, object]:
    """Every verb, `cache list` among them, with its command, in the order of `memcalib --help`."""
    commands = {}
    for name, command in PROGRAM.commands.items():
        commands[name] = command
        for below, inner in getattr(command, "commands", {}).items():
            commands[f"{name} {below}"] = inner
    return commands


def page_of(verb: str) -> str:
    return f"cli/{verb.replace(' ', '-')}.qmd"


COMMANDS = ["cli/index.qmd", *(page_of(verb) for verb in verbs())]


def front(title: str, description: str, **more: object) -> str:
    head = {"title": title, "description": description, "image": "/images/social.png"} | more
    head["repo-actions"] = False  # there is no file of the repository to edit
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n"


def as_text(words: str) -> str:
    """Words of a help text as Markdown: what stands between backticks stays as it is, elsewhere
    signs that Markdown would read are escaped, and options become code.
    """
    parts = re.split(r"(`[^`]*`)", words)
    return "".join(part if part.startswith("`") else plain_text(part) for part in parts)


def plain_text(words: str) -> str:
    """Words without code as Markdown."""
    escaped = re.sub(r"([\\*_\[\]<>$|#@])", r"\\\1", words)
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", escaped)


def paragraphs(help_text: str) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", help_text) if part.strip()]


def parameter_rows(command: object, verb: str) -> dict[str, list[tuple[str, str]]]:
    """(name, what it is) of the arguments and options of a verb, as `--help` has them."""
    context = command.make_context(verb, [], resilient_parsing=True)
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            rows[kind].append(record)
    return rows


EXAMPLE = "Example: "  # begins a paragraph of a help text


def command_page(verb: str, command: object) -> str:
    """The page of a verb: what it does, how it is called, each argument and option."""
    first, *rest = paragraphs(command.help or "")
    parts = [front(f"memcalib {verb}", first)]
    parts += [as_text(text) for text in rest if not text.startswith(EXAMPLE)]
    examples = [text.removeprefix(EXAMPLE) for text in rest if text.startswith(EXAMPLE)]
    if examples:
        parts.append("## Example" if len(examples) == 1 else "## Examples")
    parts += [f"```bash\n{example}\n```" for example in examples]
    for title, rows in parameter_rows(command, verb).items():
        if rows:
            entries = [f"`{name}`\n\n:   {as_text(' '.join(what.split()))}" for name, what in rows]
            parts.append(f"## {title}\n\n" + "\n\n".join(entries))
    parts.append(
        "This page is made from the source of `--help`. What the functions behind it do: "
        "[the command line](../commands/07_cli.ipynb)."
    )
    return "\n\n".join(parts) + "\n"


def command_index() -> str:
    """All verbs with their first sentence."""
    rows = [
        f"[`memcalib {verb}`]({page_of(verb).removeprefix('cli/')})\n\n"
        f":   {as_text(paragraphs(command.help or '')[0])}"
        for verb, command in verbs().items()
    ]
    head = front("Command line", "Every command with its arguments and options.")
    return head + "\n\n".join(rows) + "\n"


def news_page() -> str:
    """CHANGELOG.md as a page; links into nbs/ lead to pages."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").removeprefix("# Changelog\n")
    text = re.sub(r"\]\(nbs/", "](", text)
    cfg = get_config()
    text = re.sub(r"\]\(((?:LOG|README|CONTRIBUTING)\.md)", rf"]({cfg.git_url}/blob/main/\1", text)
    return front("What is new", "Changes that a user can see, by version.") + text.strip() + "\n"


def cite_page() -> str:
    """How to cite the package and the paper, from CITATION.cff."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    cfg = get_config()
    paper = cff["references"][0]
    authors = " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"])
    number = paper["notes"].removeprefix("arXiv ")
    year = f"20{number[:2]}"
    software = (
        f"@software{{memcalib,\n  title = {{{{{cff['title']}}}}},\n"
        f"  author = {{{{{cff['authors'][0]['name']}}}}},\n  version = {{{cfg.version}}},\n"
        f"  license = {{{cff['license']}}},\n  url = {{{cfg.git_url}}}\n}}"
    )
    article = (
        f"@misc{{memcalib_paper,\n  title = {{{paper['title']}}},\n  author = {{{authors}}},\n"
        f"  year = {{{year}}},\n  eprint = {{{number}}},\n  archivePrefix = {{arXiv}}\n}}"
    )
    return (
        front("Cite this", "How to cite the package and the paper whose method it implements.")
        + f"{cff['message']}\n\n## The package\n\n```bibtex\n{software}\n```\n\n"
        + f"## The paper\n\n```bibtex\n{article}\n```\n\n"
        + "Name the commit or version, the judge with the hash of its prompt, and the data set "
        + "beside a score: `model-card.md` in the folder of a run holds all of them.\n"
    )


def samples_page() -> str:
    """Which sample reports there are."""
    rows = [
        f'[{title}](samples/{name}.html){{target="_blank"}}\n\n:   {what}'
        for name, (title, what) in SAMPLES.items()
    ]
    return (
        front("Sample reports", "Reports as the commands write them, opened in the browser.")
        + "Each is one HTML file that asks no other host. The models and judges are those of the "
        + "[practice server](products/micro/practice/03_server.ipynb), on the synthetic "
        + "micro-world: the numbers say nothing about real models.\n\n"
        + "\n\n".join(rows)
        + "\n"
    )


def missing_page() -> str:
    return front("There is no such page", "The address leads nowhere.", toc=False) + (
        "Pages move when the package changes. The search at the top finds them by their words; "
        "[the start page](start.ipynb) lists what one may want to do, and the "
        "[reference](public_api.ipynb) all public names.\n"
    )


def write_pages(work: Path) -> None:
    """All generated pages, beside the notebooks in `work`."""
    (work / "cli").mkdir(exist_ok=True)
    (work / "cli" / "index.qmd").write_text(command_index(), encoding="utf-8")
    for verb, command in verbs().items():
        (work / page_of(verb)).write_text(command_page(verb, command), encoding="utf-8")
    for name, text in (
        ("news", news_page()),
        ("cite", cite_page()),
        ("samples", samples_page()),
        ("404", missing_page()),
    ):
        (work / f"{name}.qmd").write_text(text, encoding="utf-8")


def generated_pages() -> list[str]:
    """The paths of the generated pages that a menu has."""
    return [*START, *COMMANDS]


def llms_index(entries: list[tuple[str, dict]]) -> str:
    """llms.txt: what the project is, and the Markdown of every page with its line."""
    cfg = get_config()
    base = f"{cfg.doc_host}{cfg.doc_baseurl}"
    lines = [f"# {cfg.title}", "", f"> {cfg.description}", "", "## Pages", ""]
    for path, head in entries:
        lines.append(f"- [{head.get('title', path)}]({base}/{path}): {head.get('description', '')}")
    return "\n".join(lines) + "\n"
