"""The public API: every name loads, none is that of a module, and what is light stays light."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memcalib as mc
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import make_examples

ROOT = Path(mc.__file__).parent


@pytest.mark.parametrize("name", sorted(set(mc.__all__) - {"__version__"}))
def test_every_public_name_loads_and_is_its_modules_own(name):
    home = importlib.import_module(f"memcalib.{mc._HOME[name]}")
    assert getattr(mc, name) is getattr(home, name) and name in home.__all__ and name in dir(mc)
    assert not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists(), (
        "a public name is never that of a subpackage or chapter"
    )


def test_editors_see_what_programs_get():
    block = next(
        node
        for node in ast.parse((ROOT / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    home_of_name = {
        alias.name: node.module.removeprefix("memcalib.")
        for node in block.body
        for alias in node.names
    }
    assert home_of_name == mc._HOME and {*mc.__all__} == {*home_of_name, "__version__"}


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="'scores'.*public names: .*score"):
        mc.scores  # noqa: B018


def test_the_package_and_scoring_load_nothing_heavy():
    code = (
        "import sys, memcalib as mc; first = [m for m in ('pandas', 'numpy', 'pydantic', "
        "'torch') if m in sys.modules];"
        "import pandas as pd; mc.score(pd.DataFrame({'example_id': ['e'], 'ideal': "
        "['A'], 'actual': ['B']}));"
        "print(first, [m for m in ('torch', 'transformers', 'trl', 'datasets', "
        "'openai') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] []", done.stdout + done.stderr


def test_the_python_of_the_start_page_runs():
    """Against the practice server, which has addresses, models and examples of its own;
    every other word as it stands.
    """
    cells = json.loads((ROOT.parent / "nbs" / "start.ipynb").read_text())["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    examples = make_examples("short", 4, 0, "test")
    with MicroServer(examples) as server:
        changes = {
            "http://localhost:8000/v1": server.base_url,
            "https://api.deepseek.com/v1": server.base_url,
            "Qwen3-8B": "micro-model",
            "deepseek-chat": "micro-judge",
            "DEEPSEEK_API_KEY": "",
            "evaluate([example]": "evaluate(examples",
        }
        for real, practice in changes.items():
            assert real in block
            block = block.replace(real, practice)
        names = {"examples": examples}
        exec(compile(block, "start.ipynb", "exec"), names)
    assert names["example"].levels == {"m1_a1": mc.Level.CONTROL, "m1_a2": mc.Level.IGNORE}
    assert len(names["judgments"]) == 12 and {j.seed for j in names["judgments"]} == {42, 43, 44}
    assert mc.score(names["judgments"])["model"].tolist() == ["micro-model"]
