"""The web site: pages as Quarto reads them, its menus, and the site itself where Quarto is at hand.

`python -m tools.site` writes to _proc/ (ignored by git) what nbdev makes of nbs/, with menus drawn
from nbs/ORDER and from what lies on disk, checks it (`tools.check_docs`), and has Quarto build
_docs/. Without Quarto it says how to get it.
"""

import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import yaml
from nbdev.config import get_config
from nbdev.serve import proc_nbs

from tools.check_docs import check
from tools.show_docs import pages

ROOT = Path(__file__).parents[1]
GET_QUARTO = (
    "Quarto is not on the path, so _docs/ was not built; everything that can be checked without it "
    "was.\n"
    "It needs no administrator: unpack quarto-VERSION-linux-amd64.tar.gz from "
    "https://quarto.org/docs/download/\n"
    "anywhere, put its bin/ on PATH, and say `make docs` again."
)
FIRST = ("tutorials",)  # folders of pages that stand before the chapters


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
    parts = list(dict.fromkeys(page.split("/")[0] for page in ordered if "/" in page))
    more = [page for page in on_disk if page not in ordered]
    folders = list(dict.fromkeys(page.split("/")[0] for page in more if "/" in page))

    def inside(folder, among):
        return [page for page in among if page.startswith(f"{folder}/")]

    reference = ["public_api.ipynb", "glossary.ipynb"]
    first = ["index.ipynb", "start.ipynb"]
    start = [
        page
        for page in more
        if "/" not in page and page not in (*first, *reference, "paper_index.ipynb")
    ]
    found = {"Start": [*(page for page in first if page in more), *start]}
    found |= {name.capitalize(): inside(name, more) for name in FIRST if name in folders}
    found["The method"] = chapters
    found |= {
        name.capitalize(): inside(name, more) for name in folders if name not in (*FIRST, *parts)
    }
    found["Reference"] = [page for page in reference if page in more]
    found["Reference"] += [
        {"section": part, "contents": inside(part, ordered) + inside(part, more)} for part in parts
    ]
    return found | {"Paper index": ["paper_index.ipynb"]}


def hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def menus(nbs: Path) -> dict:
    """Navbar and sidebars as Quarto reads them; the method's chapters are a menu."""
    bars = []
    sides = []
    for title, contents in sections(nbs).items():
        name = title.lower().replace(" ", "-")
        first = contents[0] if isinstance(contents[0], str) else contents[0]["contents"][0]
        bars.append(
            {"text": title, "menu": contents}
            if title == "The method"
            else {"text": title, "href": first}
        )
        if len(contents) > 1:
            sides.append(
                {
                    "id": name,
                    "title": title,
                    "style": "floating",
                    "collapse-level": 1,
                    "contents": contents,
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


def main() -> int:
    parser = ArgumentParser(prog="python -m tools.site", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-browser", action="store_true", help="do not open the pages in headless Chromium"
    )
    parser.add_argument(
        "--pictures", type=Path, help="a folder for pictures of the main pages at both widths"
    )
    options = parser.parse_args()
    made = process()
    faults = check(made, browser=not options.no_browser, pictures=options.pictures)
    print("\n".join(faults))
    if faults:
        return 1
    if shutil.which("quarto") is None:
        print(GET_QUARTO)
        return 0
    subprocess.run(["quarto", "render", "--no-execute"], cwd=made, check=True)
    shutil.rmtree(ROOT / "_docs", ignore_errors=True)
    shutil.move(made / "_docs", ROOT / "_docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
