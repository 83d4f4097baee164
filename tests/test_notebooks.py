"""Every library notebook runs from top to bottom, under nbdev's own rules.

Pages that train, serve, read a whole exam or run a whole pipeline (`LONG`) are slow tests;
`make test-notebooks` runs all pages.
"""

import atexit
import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest
from nbdev.test import test_nb as execute_notebook

NBS = Path(__file__).parents[1] / "nbs"
PAGES = [
    line.split("|")[1].strip()
    for line in (NBS / "ORDER").read_text().splitlines()
    if "|" in line and line[0] != "#"
]
EXTRA = [
    "public_api",
    "glossary",
    "paper_index",
    "architecture",
    "extend",
    "trust",
    "results",
    "real_answers",
]  # pages without a module
EXTRA += [f"tutorials/{p.stem}" for p in sorted((NBS / "tutorials").glob("*.ipynb"))]
EXTRA += [
    f"products/integrations/{p.stem}"
    for p in sorted((NBS / "products" / "integrations").glob("[a-z]*.ipynb"))
]
LONG = re.compile(
    r"07_training|extend|(trainer|products/micro|commands|tutorials)/.*"
    r"|.*_(local|sentence_roles|agreement|inspect|exam|pipeline|build_run|quickstart|rank|engine)"
    r"|(report|products/\w+)/.*_(report|evaluation|figures|comparison)"
)
SHARED_IMPORTS = [  # what most pages need and takes seconds to import
    "nbdev.test",
    "matplotlib.pyplot",
    "scipy.stats",
    "memcalib.training",
    "memcalib.report.evaluation_report",
    "memcalib.products.dataset.lint",
]


def _marked(page: str):
    return pytest.param(
        NBS / f"{page}.ipynb", id=page, marks=[pytest.mark.slow] * bool(LONG.fullmatch(page))
    )


@pytest.fixture(scope="module")
def processes(request):
    """Where the processes of pages come from: one that has made the imports is copied for each."""
    context = multiprocessing.get_context("forkserver")
    pages = [item for item in request.session.items if item.path == Path(__file__)]
    if len(pages) > 5:
        context.set_forkserver_preload(SHARED_IMPORTS)
    return context


def _run(page: Path, printed: Path) -> None:
    """Execute a page. The exit status says whether it passed; what it prints goes to `printed`."""
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["IN_TEST"] = "1"  # as nbdev does, so that the verb `nbdev_export` does nothing
    os.chdir(page.parent)
    passed, _ = execute_notebook(page, basepath=NBS)
    atexit._run_exitfuncs()  # temporary folders of the page go; multiprocessing would leave them
    sys.exit(not passed)


@pytest.mark.parametrize("path", map(_marked, [*PAGES, *EXTRA]))
@pytest.mark.timeout(900)  # a tutorial trains and serves
def test_notebook_runs(path, processes, tmp_path):
    """Each page has a process of its own: names, settings and parts that it adds end with it."""
    printed = tmp_path / "printed.txt"
    process = processes.Process(target=_run, args=(path, printed))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    print(printed.read_text(encoding="utf-8", errors="replace"))
    assert process.exitcode == 0, f"{path.name} failed: see the traceback above"
