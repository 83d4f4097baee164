"""Which part may import which: the contracts of .importlinter hold, and a broken one names both
modules.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).parent / "lint-imports"


@pytest.fixture
def check(tmp_path):
    """Checks the contracts on a copy of the package, in which lines were added to modules."""
    ignored = shutil.ignore_patterns("__pycache__", "data", "weights")
    shutil.copytree(ROOT / "memcalib", tmp_path / "memcalib", ignore=ignored)
    shutil.copy(ROOT / ".importlinter", tmp_path)

    def contracts(**added_by_module: str) -> tuple[int, str]:
        for module, lines in added_by_module.items():
            with (
                (tmp_path / "memcalib" / module.replace("__", "/"))
                .with_suffix(".py")
                .open("a") as file
            ):
                file.write(f"\n\n{lines}\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
        options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        done = subprocess.run([COMMAND, "--no-cache"], **options)
        return done.returncode, done.stdout + done.stderr

    return contracts


def test_every_contract_is_kept(check):
    code, told = check()
    assert code == 0, told


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("metrics", "memcalib.products.exam.exam"),  # the core, a product
        ("channels", "memcalib.training"),  # upwards
        ("rules__base", "memcalib.credit.advantages"),  # upwards, from a rule to what calls it
        ("localization", "memcalib.rules.counterfactual"),  # upwards, within rules
        ("redistribution", "memcalib.credit.statistics"),
        ("credit__assignment", "memcalib.credit.token_credit"),  # upwards, within credit
        ("products__exam__rank", "memcalib.products.memory_logs.gate"),  # beside each other
        ("products__shared__words", "memcalib.products.dataset.lint"),  # what all share, a product
        ("products__micro__world", "memcalib.products.reproduction.jobs"),  # a world, a product
        ("products__exam__rank", "memcalib.products.micro.world"),  # not an experiment
    ],
)
def test_a_broken_contract_names_both_modules(check, module, imported):
    code, told = check(**{module: f"def late():\n    import {imported}"})
    importer = "memcalib." + module.replace("__", ".")
    assert code == 1 and f"{importer} -> {imported}" in told


@pytest.mark.parametrize("package", ["credit", "rules"])
def test_every_module_of_credit_and_of_its_rules_has_its_layer(package):
    """A page that is added to these packages gets its place among the layers."""
    contracts = (ROOT / ".importlinter").read_text(encoding="utf-8")
    for file in (ROOT / "memcalib" / package).glob("[!_]*.py"):
        name = re.escape(f"memcalib.{package}.{file.stem}")
        assert re.search(rf"(?m)^ .*{name}\b", contracts), name
