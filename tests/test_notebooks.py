"""Every library notebook runs from top to bottom, under nbdev's own rules."""

from pathlib import Path

import pytest
from nbdev.test import test_nb as execute_notebook

NBS = Path(__file__).parents[1] / "nbs"
TRAINING = ("07_training", "07d_probes", "07e_sft", "08_report", "09a_pipeline")


def _marked(path: Path):
    return pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in TRAINING))


@pytest.fixture
def registers():
    """Notebooks run in this process, and some enter their own copies of functions into a table of the package."""
    import memcalib.dataset.lint
    from memcalib.dataset.lint import LINTS

    before = dict(LINTS)
    yield
    LINTS.clear()
    LINTS.update(before)


@pytest.mark.parametrize("path", [_marked(path) for path in sorted(NBS.glob("[0-9]*.ipynb"))])
@pytest.mark.timeout(300)
def test_notebook_runs(path, monkeypatch, registers):
    monkeypatch.chdir(NBS)
    passed, _ = execute_notebook(path, basepath=NBS)
    assert passed, f"{path.name} failed: see the traceback above"
