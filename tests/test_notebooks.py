"""Every library notebook runs from top to bottom, under nbdev's own rules.

Pages that train, serve or run a whole pipeline (`LONG`) are slow tests;
`make test-notebooks` runs all pages.
"""

import atexit
import re
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
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
]  # pages without a module
EXTRA += [f"tutorials/{p.stem}" for p in sorted((NBS / "tutorials").glob("*.ipynb"))]
EXTRA += [
    f"products/integrations/{p.stem}"
    for p in sorted((NBS / "products" / "integrations").glob("[a-z]*.ipynb"))
]
LONG = re.compile(
    r"07_training|extend|(trainer|products/micro|commands|tutorials)/.*"
    r"|.*_(local|sentence_roles|agreement|inspect|exam)"
    r"|(report|products/\w+)/.*_(report|evaluation|figures|comparison)"
)


def _marked(page: str):
    return pytest.param(
        NBS / f"{page}.ipynb", id=page, marks=[pytest.mark.slow] * bool(LONG.fullmatch(page))
    )


@pytest.fixture
def registers():
    """Notebooks run in this process, and some enter their own copies of functions into a table of
    the package.
    """
    import memcalib.products.dataset.lint
    from memcalib.io import parts
    from memcalib.products.dataset.lint import LINTS

    before = dict(LINTS)
    modules = list(parts._modules)
    added = {kind: dict(entries) for kind, entries in parts._added.items()}
    yield
    LINTS.clear()
    LINTS.update(before)
    parts._modules[:] = modules
    parts._added.clear()
    parts._added.update(added)
    parts._table.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def main_module():
    """The shell of a page puts a module of its own in the place of `__main__`."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture
def shell(monkeypatch):
    """The page's namespace ends with the page: IPython keeps every shell,
    and empties all of them when the process ends.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(
        "IN_TEST", "1"
    )  # nbdev sets it and leaves it set; the verb `nbdev_export` then does nothing
    monkeypatch.setattr(InteractiveShell, "_instance", None)
    yield
    if page := InteractiveShell._instance:
        page.displayhook.do_full_cache = False  # or each page ends with a full garbage collection
        page.atexit_operations()
        atexit.unregister(page.atexit_operations)


@pytest.mark.parametrize("path", map(_marked, [*PAGES, *EXTRA]))
@pytest.mark.timeout(900)  # a tutorial trains and serves
def test_notebook_runs(path, monkeypatch, registers, shell):
    monkeypatch.chdir(path.parent)
    passed, _ = execute_notebook(path, basepath=NBS)
    assert passed, f"{path.name} failed: see the traceback above"
