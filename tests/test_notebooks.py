"""Every library notebook runs from top to bottom, under nbdev's own rules."""

from pathlib import Path

import pytest
from nbdev.test import test_nb as execute_notebook

NBS = Path(__file__).parents[1] / "nbs"


@pytest.mark.parametrize("path", sorted(NBS.glob("[0-9]*.ipynb")), ids=lambda p: p.stem)
@pytest.mark.timeout(300)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.chdir(NBS)
    passed, _ = execute_notebook(path, basepath=NBS)
    assert passed, f"{path.name} failed: see the traceback above"
