"""pyproject.toml repeats nothing that settings.ini and setup.py do not say."""

import json
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, runpy, setuptools
kept = {}
setuptools.setup = lambda **given: kept.update(given)
runpy.run_path("setup.py", run_name="__main__")
fields = ("name", "version", "python_requires", "install_requires", "extras_require")
fields += ("entry_points",)
print(json.dumps({field: kept[field] for field in fields}))
"""


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def setup_arguments() -> dict:
    """What setup.py hands to setuptools."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def settings() -> dict[str, str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def test_what_is_written_out_is_what_setup_says():
    project = pyproject()["project"]
    given = setup_arguments()
    assert project["name"] == given["name"]
    assert project["requires-python"] == given["python_requires"]
    points = {"console_scripts": project["scripts"], **project["entry-points"]}
    written = {
        group: [f"{name}={target}" for name, target in names.items()]
        for group, names in points.items()
    }
    said = {
        group: [line.replace(" ", "") for line in lines]
        for group, lines in given["entry_points"].items()
    }
    assert written == said


def test_what_is_dynamic_is_there_and_nothing_is_both():
    project = pyproject()["project"]
    assert {"version", "dependencies", "optional-dependencies"} <= set(project["dynamic"])
    assert set(project).isdisjoint(project["dynamic"])
    given = setup_arguments()
    assert given["version"] == settings()["version"]
    assert given["install_requires"] == settings()["requirements"].split()


def test_the_group_that_a_clone_installs_is_the_extra_of_inspect():
    extras = setup_arguments()["extras_require"]
    assert pyproject()["dependency-groups"]["inspect"] == extras["inspect"]
    assert pyproject()["tool"]["uv"]["default-groups"] == ["inspect"]
    for pair in pyproject()["tool"]["uv"]["conflicts"]:
        assert {side["extra"] for side in pair} <= extras.keys()


def test_the_metadata_that_is_built_has_both(tmp_path):
    """What an installer reads after the build: version, needs and extras of settings.ini."""
    program = (
        "import sys; from setuptools import build_meta; "
        "print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / done.stdout.split()[-1]
    lines = (folder / "METADATA").read_text(encoding="utf-8").splitlines()
    assert "Name: memcalib" in lines and f"Version: {settings()['version']}" in lines
    needs = {
        Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if "-Dist:" in line
    }
    core = {str(need) for need in needs if need.marker is None}
    assert core == {str(Requirement(need)) for need in settings()["requirements"].split()}
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if "-Extra:" in line}
    assert extras == setup_arguments()["extras_require"].keys()
    points = (folder / "entry_points.txt").read_text(encoding="utf-8")
    for group in setup_arguments()["entry_points"]:
        assert f"[{group}]" in points
