"""The core at one end of the ranges of openai and rich: what an installation without extras must
do.
"""

import importlib.metadata
import sys

import core_install
from rich.console import Console

from memcalib.products.micro.world import make_examples


def test_the_core_runs(tmp_path):
    outcome = core_install.run_elsewhere(sys.executable, tmp_path, [])
    assert outcome["codes"]["evaluate"] == 0 and outcome["codes"]["exam"] == 3, outcome["errors"]
    assert outcome["codes"]["validate"] == outcome["codes"]["score"] == 0


def test_the_installed_versions_are_ends_of_the_ranges():
    openai = importlib.metadata.version("openai")
    rich = importlib.metadata.version("rich")
    assert (openai.startswith("2.54.") and rich.startswith("13.9.")) or (
        openai.startswith("3.") and rich.startswith("15.")
    )


def test_rich_shows_a_record(capsys):
    example = make_examples("short", 1, seed=0)[0]
    Console(width=100).print(example)
    assert example.question.split()[0] in capsys.readouterr().out
