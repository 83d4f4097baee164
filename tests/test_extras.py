"""An installation without extras: no torch, trl or peft, and what must run all the same."""

import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from core_install import run_elsewhere
from packaging.requirements import Requirement

from memcalib.io.extras import EXTRAS

ROOT = Path(__file__).parents[1]
WORKED = {
    "validate": 0,
    "evaluate": 0,
    "exam": 3,
    "score": 0,
    "train": 1,
}  # sixty answers leave an exam undecided
BROUGHT = {
    "phonenumbers": "phonenumberslite",
    "stdnum": "python-stdnum",
    "inspect_ai": "inspect-ai",
}
TRAINING = "needs torch, which is not installed: pip install 'memcalib[train]'"


def settings() -> dict[str, str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def check(result: dict) -> None:
    assert result["codes"] == WORKED, result["errors"]
    assert result["loaded"] == [] and result["said"].endswith(TRAINING)
    assert TRAINING in result["errors"] and "Traceback" not in result["errors"]


def test_without_the_packages_of_all_extras_the_core_runs(tmp_path):
    """As in an environment of its own, but in seconds: every package that an extra brings is hidden."""
    block = [package for packages in EXTRAS.values() for package in packages]
    check(
        run_elsewhere(sys.executable, tmp_path, block, env=os.environ | {"PYTHONPATH": str(ROOT)})
    )


def test_the_table_of_extras_is_that_of_the_settings():
    asked = settings()
    for extra, packages in EXTRAS.items():
        names = {Requirement(need).name for need in asked[f"{extra}_requirements"].split()}
        assert {BROUGHT.get(package, package) for package in packages} <= names
    core = {Requirement(need).name for need in asked["requirements"].split()}
    assert not core & {
        BROUGHT.get(package, package) for packages in EXTRAS.values() for package in packages
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_environment_with_the_core_alone(tmp_path):
    """Installed as somebody would who only evaluates: `pip install .` under the pinned versions."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        ROOT / "constraints.txt",
    ]
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in (
        listed.stdout.splitlines() if listed.returncode == 0 else pytest.skip("needs a clone")
    ):
        if (ROOT / name).is_file() and not name.startswith(("nbs/", "runs/", "tests/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([*pip, source], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    listed = subprocess.run(
        [python, "-m", "pip", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "trl", "peft", "transformers", "ipywidgets"} & {
        line.split()[0] for line in listed.splitlines()
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    check(run_elsewhere(python, tmp_path, [], env=environment, cwd=tmp_path))
