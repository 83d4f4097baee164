"""One public name means one thing: no two modules define a class or a function of the same name."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "memcalib"
MODULES = [path for path in PACKAGE.rglob("*.py") if path.name[0] != "_"]
ALLOWED = {  # a name of several modules: why it is one
    "the same of the other micro-world": [
        "answer",
        "demonstrations",
        "noisy_levels",
        "read_answer",
        "sentence_roles",
    ],
    "the same for another engine": ["advantage_estimator", "register"],
    "a fixture of pytest and a task of Inspect, each under the name that its users type": [
        "memory_use"
    ],
    "a check or a rule is named as its settings and drops name it": ["score"],
}


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a module, read once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_in(path: Path) -> list[str]:
    """The public classes and functions of a module."""
    tree = tree_of(path)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]


def test_no_two_modules_define_the_same_public_name():
    modules_by_name = defaultdict(list)
    for path in MODULES:
        for name in defined_in(path):
            modules_by_name[name].append(path.relative_to(PACKAGE).as_posix())
    allowed = {name for names in ALLOWED.values() for name in names}
    twice = {}
    for name, modules in modules_by_name.items():
        without_verbs = [module for module in modules if module != "commands/cli.py"]
        if len(without_verbs) > 1 and name not in allowed:
            twice[name] = without_verbs
    assert twice == {}


def test_every_allowed_name_still_stands_twice():
    counts = defaultdict(int)
    for path in MODULES:
        for name in defined_in(path):
            counts[name] += 1
    once = [name for names in ALLOWED.values() for name in names if counts[name] < 2]
    assert once == []


def test_no_module_adds_a_part_when_it_is_imported():
    """The set of metrics, worlds and judges never depends on what was imported before: parts of the
    package stand in tables, and functions alone call `add_part` or `add_metric`.
    """
    adding = ("add_part", "add_metric")
    wrong = []
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
            if names & set(adding):
                wrong.append((path.relative_to(PACKAGE).as_posix(), node.lineno))
    assert wrong == []
