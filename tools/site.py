"""The web site, built by Quarto, and checked as Quarto builds it.

`python -m tools.site` writes to _proc/ (ignored by git) what nbdev makes of nbs/, checks what can
be checked before a page is rendered (`tools.check_docs`), adds the pages that are generated
(`tools.generated_pages`), has Quarto build _docs/, and opens every page of it in headless Chromium
(`tools.check_site`). Without Quarto the own preview is checked instead, and one line says what that
does not cover.
"""

import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import yaml
from nbdev.config import get_config
from nbdev.serve import proc_nbs

from tools.check_docs import check, pages_in, read_pages
from tools.check_site import site_faults
from tools.generated_pages import COMMANDS, START, generated_pages, llms_index, write_pages
from tools.quarto_pages import (
    SOCIAL_IMAGE,
    as_markdown,
    for_quarto,
    front_matter,
    read_notebook,
    write_notebook,
)
from tools.samples import write_samples
from tools.search_index import add_wishes
from tools.show_docs import pages
from tools.trim_site import trim

ROOT = Path(__file__).parents[1]
QUARTO = "1.7.34"  # the version with which the site is checked
NO_QUARTO = (
    "Quarto is not on the path: the own preview was checked instead, which says nothing about what "
    "Quarto makes of the pages (search, menus, folded code, warnings). Unpack "
    f"quarto-{QUARTO}-linux-amd64.tar.gz of https://quarto.org/docs/download/ and put its bin/ on "
    "PATH."
)
FIRST = ("tutorials",)  # folders of pages that stand before the chapters
TUTORIALS = (
    "evaluate_your_model",
    "evaluate_your_logs",
    "does_my_memory_help",
    "a_memory_that_hijacks",
    "benchmark_from_logs",
    "evaluate_what_you_built",
    "score_and_plot",
    "train",
    "training_loop",
)
FOLDERS = {
    "evaluation": "Evaluation",
    "report": "Tables, figures, report pages",
    "inference": "Asking models",
    "io": "Files and runs",
    "settings": "Settings and judges",
    "trainer": "Training",
    "rules": "Rules of credit",
    "credit": "Credit of tokens",
    "commands": "What a command does",
    "scoring": "Quotes and labels behind the scores",
    "products": "Products: what each adds",
    "products/shared": "Products: what they share",
    "products/memory_logs": "Product: logs of memory systems",
    "products/exam": "Product: the judge's exam",
    "products/dataset": "Product: building a benchmark",
    "products/annotation": "Product: labels by people",
    "products/micro": "Product: the micro-world",
    "products/micro/practice": "Product: practice models and server",
    "products/integrations": "Product: other training engines",
    "products/reproduction": "Product: the paper's experiments",
}  # what a folder of the package holds, in the order of the menu


def sections(nbs: Path) -> dict[str, list[str | dict]]:
    """The pages of each part of the site, by paths below nbs/: a sidebar each.
    A folder is a section of its own.

    Chapters and subpackages come in the order of nbs/ORDER,
    other folders by the names of their files.
    """
    ordered = list(pages().values())
    on_disk = sorted(
        p.relative_to(nbs).as_posix()
        for p in nbs.rglob("[!._]*.ipynb")
        if not hidden(p.relative_to(nbs))
    )
    chapters = [page for page in ordered if "/" not in page]
    parts = list(dict.fromkeys(page.rpartition("/")[0] for page in ordered if "/" in page))
    more = [page for page in on_disk if page not in ordered]
    folders = list(dict.fromkeys(page.rpartition("/")[0] for page in more if "/" in page))

    def inside(folder, among):
        return [page for page in among if page.rpartition("/")[0] == folder]

    reference = [
        f"{name}.ipynb" for name in ("public_api", "glossary", "paper_index", "logged_numbers")
    ]
    first = ["index.ipynb", "start.ipynb", "faq.ipynb"]
    start = [page for page in more if "/" not in page and page not in (*first, *reference)]
    found = {"Start": [*(page for page in first if page in more), *start]}
    for name in FIRST:
        if name in folders:
            found[name.capitalize()] = sorted(inside(name, more), key=by_use)
    found["The method"] = chapters
    found |= {
        name.capitalize(): inside(name, more) for name in folders if name not in (*FIRST, *parts)
    }
    found["Reference"] = [page for page in reference if page in more]
    order = [*FOLDERS, *parts]
    found["Reference"] += [
        {
            "section": FOLDERS.get(part, part.capitalize()),
            "contents": inside(part, ordered) + inside(part, more),
        }
        for part in sorted(parts, key=order.index)
    ]
    return found


def by_use(page: str) -> tuple[int, str]:
    """Where a tutorial stands: in the order of use, a new one at the end."""
    name = Path(page).stem
    return (TUTORIALS.index(name) if name in TUTORIALS else len(TUTORIALS), name)


def hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def menus(nbs: Path) -> dict:
    """Navbar and sidebars as Quarto reads them, generated pages among them;
    the chapters of the method are a menu.
    """
    bars = []
    sides = []
    for title, contents in sections(nbs).items():
        entries = list(contents)
        if title == "Start":
            entries += START
        if title == "Reference":
            entries.insert(0, {"section": "Command line", "contents": COMMANDS})
        name = title.lower().replace(" ", "-")
        first = next(pages_in(contents))
        bars.append(
            {"text": title, "menu": entries}
            if title == "The method"
            else {"text": title, "href": first}
        )
        if len(entries) > 1:
            sides.append(
                {
                    "id": name,
                    "title": title,
                    "style": "floating",
                    "collapse-level": 1,
                    "contents": entries,
                }
            )
    return {"website": {"navbar": {"left": bars}, "sidebar": sides}}


def settings() -> dict:
    """What Quarto must know of settings.ini."""
    cfg = get_config()
    site = {
        "title": cfg.title,
        "description": cfg.description,
        "site-url": f"{cfg.doc_host}{cfg.doc_baseurl}",
        "image": SOCIAL_IMAGE,
        "page-footer": {
            "left": f"{cfg.title} {cfg.version}, Apache-2.0",
            "center": [
                {"text": "What is new", "href": "news.qmd"},
                {"text": "Cite this", "href": "cite.qmd"},
                {"text": "Licence", "href": f"{cfg.git_url}/blob/{cfg.branch}/LICENSE"},
            ],
            "right": [{"icon": "github", "href": cfg.git_url, "aria-label": "Repository"}],
        },
    }
    repository = {
        "repo-url": cfg.git_url,
        "repo-branch": cfg.branch,
        "repo-subdir": Path(cfg.nbs_path).name,
    }
    return {"project": {"output-dir": Path(cfg.doc_path).name}, "website": site | repository}


def process() -> Path:
    """All pages, processed, with the files that _quarto.yml names; returns their folder."""
    shutil.rmtree(ROOT / "_proc", ignore_errors=True)
    made = Path(proc_nbs(n_workers=0))
    for name, content in (("nbdev.yml", settings()), ("sidebar.yml", menus(ROOT / "nbs"))):
        (made / name).write_text(
            yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
    return made


def quarto_version() -> str:
    """The version of Quarto on the path, or no text."""
    if shutil.which("quarto") is None:
        return ""
    done = subprocess.run(["quarto", "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def prepare(made: Path, work: Path) -> None:
    """A copy of the processed pages in `work`, as Quarto is to read them,
    with the pages that are generated.
    """
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made, work, ignore=shutil.ignore_patterns("_html", "_docs", ".quarto"))
    for page in read_pages(work):
        notebook = for_quarto(page.path, read_notebook(work / page.path))
        write_notebook(work / page.path, notebook)
    write_pages(work)


def render(work: Path) -> list[str]:
    """Have Quarto build `work`/_docs; returns its warnings. What it says is shown as it comes."""
    command = ["quarto", "render", "--no-execute"]
    said = []
    with subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, text=True) as program:
        for line in program.stderr:
            said.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()))
            print(said[-1], file=sys.stderr)
    if program.returncode:
        sys.exit(f"quarto render: exit code {program.returncode}")
    return [f"quarto: {line}" for line in said if re.match(r"\W*(WARN|ERROR)", line)]


def add_markdown(work: Path) -> None:
    """Beside each page its Markdown, and llms.txt, which lists them. Pages that are generated as
    Markdown are copied.
    """
    site = work / "_docs"
    pages_by_path = {page.path: read_notebook(work / page.path) for page in read_pages(work)}
    heads = {path: front_matter(notebook) for path, notebook in pages_by_path.items()}
    files = {path: markdown_file(path, head) for path, head in heads.items()}
    for path, notebook in pages_by_path.items():
        text = to_markdown_links(as_markdown(notebook), path, files)
        (site / files[path]).write_text(text, encoding="utf-8")
    for page in generated_pages():
        source = (work / page).read_text(encoding="utf-8")
        heads[page] = yaml.safe_load(source.split("---")[1])
        files[page] = markdown_file(page, heads[page])
        body = source.split("---\n", 2)[2].strip()
        text = f"# {heads[page]['title']}\n\n> {heads[page]['description']}\n\n{body}\n"
        text = to_markdown_links(text, page, files)
        (site / files[page]).write_text(text, encoding="utf-8")
    entries = [(files[path], heads[path]) for path in files]
    (site / "llms.txt").write_text(llms_index(entries), encoding="utf-8")


def markdown_file(path: str, head: dict) -> str:
    """Where the Markdown of a page stands on the site."""
    name = str(head.get("output-file", Path(path).name))
    return Path(path).with_name(name).with_suffix(".md").as_posix()


PAGE_LINK = re.compile(r"\]\((?P<path>[\w./-]+\.(?:ipynb|qmd))(?P<anchor>#[^)\s]*)?\)")


def to_markdown_links(text: str, path: str, files: dict[str, str]) -> str:
    """Markdown of the page at `path` in which links to pages lead to their Markdown."""

    def to_file(match: re.Match) -> str:
        target = os.path.normpath(Path(path).parent / match["path"])
        default = Path(target).with_suffix(".md").as_posix()
        relative = os.path.relpath(files.get(target, default), Path(path).parent)
        return f"]({relative}{match['anchor'] or ''})"

    return PAGE_LINK.sub(to_file, text)


def main() -> int:
    parser = ArgumentParser(prog="python -m tools.site", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-browser", action="store_true", help="do not open the pages in headless Chromium"
    )
    parser.add_argument(
        "--pictures", type=Path, help="a folder for pictures of the main pages at both widths"
    )
    parser.add_argument(
        "--any-quarto", action="store_true", help=f"render with another version than {QUARTO}"
    )
    parser.add_argument(
        "--samples", type=Path, help="a folder that `python -m tools.samples` wrote before"
    )
    options = parser.parse_args()
    version = quarto_version()
    if version and version != QUARTO and not options.any_quarto:
        print(f"found Quarto {version} on the path; allowed: {QUARTO}, or --any-quarto")
        return 2
    made = process()
    faults = check(
        made, preview=not version, browser=not options.no_browser, pictures=options.pictures
    )
    if faults or not version:
        print("\n".join([*faults, *([] if version else [NO_QUARTO])]))
        return 1 if faults else 0
    work = made / "_site"
    prepare(made, work)
    faults = render(work)
    site = work / "_docs"
    if options.samples:
        shutil.copytree(options.samples, site / "samples")
    else:
        write_samples(site / "samples")
    add_markdown(work)
    add_wishes(work / "start.ipynb", site / "search.json")
    trim(site)
    faults += site_faults(
        site,
        base=f"{get_config().doc_baseurl}/",
        browser=not options.no_browser,
        pictures=options.pictures,
    )
    shutil.rmtree(ROOT / "_docs", ignore_errors=True)
    shutil.move(work / "_docs", ROOT / "_docs")
    print("\n".join(faults) or f"the site is in {ROOT / '_docs'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
