"""Every library notebook runs from top to bottom, under nbdev's own rules."""

from pathlib import Path

import pytest
from nbdev.test import test_nb as execute_notebook

NBS = Path(__file__).parents[1] / "nbs"
PAGES = [line.split("|")[1].strip() for line in (NBS / "ORDER").read_text().splitlines() if "|" in line and line[0] != "#"]
TRAINING = ("07_training", "trainer/07_sft", "trainer/11_traces", "report/06_training_report", "commands/03_reproduce")


def _marked(page: str):
    return pytest.param(NBS / f"{page}.ipynb", id=page, marks=[pytest.mark.slow] * (page in TRAINING))


@pytest.fixture
def registers():
    """Notebooks run in this process, and some enter their own copies of functions into a table of the package."""
    import memcalib.dataset.lint
    from memcalib.dataset.lint import LINTS

    before = dict(LINTS)
    yield
    LINTS.clear()
    LINTS.update(before)


@pytest.mark.parametrize("path", map(_marked, PAGES))
@pytest.mark.timeout(300)
def test_notebook_runs(path, monkeypatch, registers):
    monkeypatch.chdir(path.parent)
    passed, _ = execute_notebook(path, basepath=NBS)
    assert passed, f"{path.name} failed: see the traceback above"
