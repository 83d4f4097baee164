"""An installation without extras: no torch, trl or peft, and what must run all the same."""

import os
import subprocess
import sys
from configparser import ConfigParser
from itertools import chain
from pathlib import Path

import pytest
from core_install import run_elsewhere
from packaging.requirements import Requirement

from memcalib.io.extras import EXTRAS

ROOT = Path(__file__).parents[1]
EXIT_CODES = {
    "validate": 0,
    "evaluate": 0,
    "exam": 3,  # sixty answers leave an exam undecided
    "score": 0,
    "train": 1,
}
DISTRIBUTIONS = {  # of packages that are installed under another name
    "phonenumbers": "phonenumberslite",
    "stdnum": "python-stdnum",
    "inspect_ai": "inspect-ai",
}
TRAINING = "needs torch, which is not installed: pip install 'memcalib[train]'"


def settings() -> dict[str, str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def check(outcome: dict) -> None:
    assert outcome["codes"] == EXIT_CODES, outcome["errors"]
    assert outcome["loaded"] == [] and outcome["error_of_trainer"].endswith(TRAINING)
    assert TRAINING in outcome["errors"] and "Traceback" not in outcome["errors"]


def test_without_the_packages_of_all_extras_the_core_runs(tmp_path):
    """As in an environment of its own, but in seconds:
    every package that an extra brings is hidden.
    """
    hidden = list(chain.from_iterable(EXTRAS.values()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    check(run_elsewhere(sys.executable, tmp_path, hidden, env=environment))


def test_the_table_of_extras_is_that_of_the_settings():
    requirements = settings()
    core = {Requirement(need).name for need in requirements["requirements"].split()}
    for extra, packages in EXTRAS.items():
        names = {Requirement(need).name for need in requirements[f"{extra}_requirements"].split()}
        distributions = {DISTRIBUTIONS.get(package, package) for package in packages}
        assert distributions <= names
        assert not core & distributions


def copy_sources(folder: Path) -> None:
    """Copy what an installation is made from: the files of the clone without pages,
    runs and tests.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip("needs a clone")
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("nbs/", "runs/", "tests/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_environment_with_the_core_alone(tmp_path):
    """Installed as somebody would who only evaluates: `pip install .` under the pinned versions."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    source = tmp_path / "source"
    copy_sources(source)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--constraint", ROOT / "constraints.txt", source]
    process = subprocess.run(install, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-3000:]
    process = subprocess.run(
        [python, "-m", "pip", "list"], capture_output=True, text=True, check=True
    )
    installed = {line.split()[0] for line in process.stdout.splitlines()}
    assert not installed & {"torch", "trl", "peft", "transformers", "ipywidgets"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    check(run_elsewhere(python, tmp_path, [], env=environment, cwd=tmp_path))
