"""`make setup` looks at the version of Python before it makes or keeps an environment."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD_PYTHON = '#!/bin/sh\ncase "$1" in -V) echo Python 3.9.18 ;; *) exit 1 ;; esac\n'


@pytest.fixture
def clone(tmp_path):
    for name in ("Makefile", "constraints.txt", "settings.ini", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "old-python"
    python.write_text(OLD_PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(clone, *options):
    return subprocess.run(
        ["make", "setup", *options], cwd=clone, capture_output=True, text=True, timeout=60
    )


def test_a_python_that_does_not_fit_is_named_and_makes_nothing(clone):
    done = setup(clone, "PYTHON=./old-python")
    assert done.returncode != 0
    assert (
        "./old-python is Python 3.9.18; this package needs Python 3.11, 3.12 or 3.13" in done.stderr
    )
    assert "make setup PYTHON=python3.12" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_that_is_not_there_is_named(clone):
    done = setup(clone, "PYTHON=no-such-python")
    assert done.returncode != 0 and "no-such-python was not found" in done.stderr


def test_an_environment_of_another_python_is_not_kept(clone):
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(clone / "old-python", clone / ".venv" / "bin" / "python")
    done = setup(clone, "PYTHON=./old-python")
    assert "does not fit, so it is removed" in done.stdout
    assert done.returncode != 0 and not (clone / ".venv").exists()
