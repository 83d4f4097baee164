"""What keeps the repository honest: exports, notebooks, imports, secrets."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from configparser import ConfigParser, SectionProxy
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools.store_runs import stored

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
CHAPTERS = sorted(p for p in NBS.rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in p.parts)
LIB = ROOT / "memcalib"
EXPERIMENTS = sorted((NBS / "experiments").glob("e*.ipynb"))
NOTEBOOKS = sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
ORDER, PAGES = zip(
    *(
        [cell.strip() for cell in line.split("|")[:2]]
        for line in (NBS / "ORDER").read_text().splitlines()
        if "|" in line and not line.startswith("#")
    ),
    strict=True,
)
MODULES = sorted(
    p for p in LIB.rglob("*.py") if p.name not in ("__init__.py", "__main__.py", "_modidx.py")
)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(LIB).with_suffix("").parts)


def cells(path: Path) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def code(path: Path) -> list[str]:
    return [cell["source"] for cell in cells(path) if cell["cell_type"] == "code"]


def module_name(path: Path) -> str:
    return re.findall(r"#\| default_exp (\S+)", "\n".join(code(path)))[0]


@cache
def imports(source: str) -> frozenset[str]:
    """Every memcalib module and top-level package that a piece of code imports, at any depth."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    imported = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"memcalib.{node.module or ''}" if node.level else node.module
            imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return frozenset(imported)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of what nbdev reads and writes, so that the checks change nothing here."""
    target = tmp_path_factory.mktemp("repo")
    for name in ("nbs", "memcalib", "tools"):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("settings.ini", "setup.py", "_quarto.yml"):
        shutil.copy(ROOT / name, target / name)
    return target


def run(command: str, cwd: Path) -> None:
    """Run a verb of nbdev."""
    options = dict(cwd=cwd, capture_output=True, text=True, timeout=120)
    done = subprocess.run([Path(sys.executable).parent / command], **options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_export_leaves_no_difference(copy):
    before = {p.relative_to(ROOT): p.read_text() for p in LIB.rglob("*.py")}
    run("nbdev_export", copy)
    after = {p.relative_to(copy): p.read_text() for p in (copy / "memcalib").rglob("*.py")}
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_page_is_processed_for_the_documentation(copy):
    """What `make docs` does before Quarto, in one process:
    each signature is shown.
    """
    program = "from nbdev.serve import proc_nbs; print(proc_nbs(n_workers=0))"
    done = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    processed = {path.relative_to(copy / "_proc") for path in (copy / "_proc").rglob("*.ipynb")}
    assert processed == {path.relative_to(NBS) for path in NOTEBOOKS}
    shown = "".join((copy / "_proc" / f"{page}.ipynb").read_text() for page in PAGES)
    assert "-> pd.DataFrame" in shown and "tools.show_docs" not in shown
    assert "show_doc(" in shown and not re.search(r"\*\*data\b", shown)


def test_notebooks_are_clean(copy):
    run("nbdev_clean", copy)
    changed = [
        p.name for p in NOTEBOOKS if (copy / p.relative_to(ROOT)).read_text() != p.read_text()
    ]
    assert changed == []


def test_text_in_notebooks_is_stored_as_lists_of_lines():
    """As Jupyter and `make outputs WRITE=--write` store it; a diff then shows single lines."""
    stored_otherwise = [
        page.relative_to(NBS)
        for page in NOTEBOOKS
        if page.read_text() != nbformat.writes(nbformat.read(page, as_version=4)) + "\n"
    ]
    assert stored_otherwise == []


def test_readme_follows_index(tmp_path):
    command = [
        Path(sys.executable).parent / "jupyter",
        "nbconvert",
        "--log-level",
        "ERROR",
        "--to",
        "markdown",
    ]
    subprocess.run(
        [*command, "--output-dir", tmp_path, "--output", "README", NBS / "index.ipynb"],
        check=True,
        timeout=120,
    )
    readme = (ROOT / "README.md").read_text()
    page = re.sub(
        r"\]\(((?:[\w/]+\.ipynb|images|experiments)\b)",
        r"](nbs/\1",
        (tmp_path / "README.md").read_text(),
    )
    assert page == readme
    assert len(readme.split()) <= 1500  # words; a page that is read in five minutes


def test_functions_that_contributing_sends_a_reader_to_exist():
    defined = set(
        re.findall(
            r"^(?:class|def|async def) (\w+)", "\n".join(path.read_text() for path in MODULES), re.M
        )
    )
    for section in ("| I want to change", "## Following a value"):
        name = "CONTRIBUTING.md"
        text = (ROOT / name).read_text().split(section)[1].split("\n\n## ")[0]
        named = set(re.findall(r"`([a-z]+_[a-z_]+|[A-Z][a-zA-Z]+)`", text)) - {
            "prompt_template",
            "memory_logs",
        }
        assert len(named) > 5 and named <= defined, (name, named - defined)
        files = re.findall(r"`(memcalib/[\w/.-]+)`", (ROOT / name).read_text())
        assert [file for file in files if "NAME" not in file and not (ROOT / file).exists()] == []
        pages = re.findall(r"\]\(([\w/]+\.ipynb)\)", text)
        assert pages and all((ROOT / page).is_file() for page in pages)


@pytest.mark.parametrize(
    "path", [*CHAPTERS, *EXPERIMENTS], ids=lambda p: "-".join(p.with_suffix("").parts[-2:])
)
def test_notebook_opens_with_title_and_one_line(path):
    first = next(cell for cell in cells(path) if cell["cell_type"] != "raw")
    assert first["cell_type"] == "markdown"
    assert re.fullmatch(r"# [^\n]+\n\n?> [^\n]+", first["source"].strip()), first["source"]


def test_each_chapter_has_one_module():
    names = [module_name(path) for path in CHAPTERS]
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(map(dotted, MODULES))


def test_no_two_pages_of_a_folder_have_the_same_number():
    numbers = Counter((page.parent, page.name.partition("_")[0]) for page in CHAPTERS)
    assert [number for number, count in numbers.items() if count > 1] == []


def test_numbers_of_pages_follow_the_reading_order():
    numbers = defaultdict(list)
    for page in PAGES:
        folder, _, name = page.rpartition("/")
        numbers[folder].append(int(name.partition("_")[0]))
    wrong = {
        folder: found
        for folder, found in numbers.items()
        if found != list(range(found[0], found[0] + len(found)))
    }
    assert wrong == {}


def test_exported_code_imports_what_stands_before_it():
    """Exported code imports what stands before it in nbs/ORDER;
    examples may use what a page of a reader's own would.
    """
    for_examples = ("products.", "commands.", "trainer.", "problem", "rules.settings_table")
    rank = {name: k for k, name in enumerate(ORDER)}
    assert sorted(rank) == sorted(map(dotted, MODULES))
    wrong = []
    for path in CHAPTERS:
        module = module_name(path)
        for source in code(path):
            ours = re.search(r"^#\|\s*exports?\b", source, re.M)
            used = {
                name.removeprefix("memcalib.")
                for name in imports(source)
                if name.startswith("memcalib.")
            }
            wrong += [
                (module, name)
                for name in used & rank.keys()
                if rank[name] > rank[module] and (ours or not name.startswith(for_examples))
            ]
    assert not wrong


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: "-".join(p.with_suffix("").parts[-2:]))
def test_import_cells_hold_imports_only(path):
    for source in code(path):
        body = ast.parse(
            "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))
        ).body
        kinds = {isinstance(node, ast.Import | ast.ImportFrom) for node in body}
        assert kinds != {True, False}, f"{path.name}: imports and code in one cell:\n{source[:200]}"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: "-".join(p.with_suffix("").parts[-2:]))
def test_experiment_notebooks(path):
    tagged = [cell for cell in cells(path) if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1, f"{path.name} has {len(tagged)} cells with the tag parameters"
    first = cells(path)[0]
    assert first["cell_type"] == "raw" and "skip_exec: true" in first["source"]
    for source in code(path):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 6, (
                    f"{path.name}: move {node.name} into a chapter"
                )


def test_clean_keeps_the_parameters_tag():
    assert "tags" in settings()["allowed_cell_metadata_keys"].split()


PYTEST_PLUGIN = "pytest_plugin.py"  # loaded by pytest, and by nothing else


@pytest.mark.parametrize("path", MODULES, ids=lambda p: "-".join(p.with_suffix("").parts[-2:]))
def test_package_needs_no_development_tool(path):
    tops = {name.split(".")[0] for name in imports(path.read_text())}
    refused = {"fastcore", "nbdev", "execnb", "pytest", "hypothesis"}
    if path.name == PYTEST_PLUGIN:
        refused.remove("pytest")
    assert not tops & refused


def settings() -> SectionProxy:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


def distributions(words: str) -> dict[str, SpecifierSet]:
    """Names of distributions as packaging writes them, with the versions asked for."""
    return {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in map(Requirement, words.split())
    }


NAMED = {
    "markdown_it": "markdown-it-py",
    "phonenumbers": "phonenumberslite",
    "stdnum": "python-stdnum",
    "yaml": "PyYAML",
}
OPTIONAL = {
    "deepspeed",
    "inspect_ai",
    "pytest",
    "spacy",
    "vllm",
    *(
        "omegaconf",
        "prime_rl",
        "skyrl_gym",
        "skyrl",
        "transfer_queue",
        "verifiers",
        "verl",
    ),  # engines, in their own environments
}


def test_every_import_is_declared():
    """An imported package stands in settings.ini; an optional one is imported in a function,
    or by the pages of Inspect and pytest.
    """
    needed = [
        settings()[f"{kind}requirements"] for kind in ("", "data_", "train_", "build_", "notebook_")
    ]
    declared = distributions(" ".join(needed))
    missing = {}
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tops = {name.split(".")[0] for name in imports(path.read_text(encoding="utf-8"))} - {
            "memcalib"
        }
        for name in tops - sys.stdlib_module_names - OPTIONAL:
            if canonicalize_name(NAMED.get(name, name)) not in declared:
                missing.setdefault(name, []).append(dotted(path))
        if path.name not in ("inspect_task.py", PYTEST_PLUGIN):
            first = ast.Module(
                [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
            )
            assert not {name.split(".")[0] for name in imports(ast.unparse(first))} & OPTIONAL, (
                path.name
            )
    assert missing == {}


def test_constraints_pin_what_settings_ask_for():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    groups = [
        distributions(settings()[f"{kind}requirements"])
        for kind in ("", "data_", "train_", "build_", "notebook_", "dev_", "inspect_")
    ]
    assert [name for group in groups for name in group if name not in pins] == []
    assert [
        name for group in groups for name, allowed in group.items() if pins[name] not in allowed
    ] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that `python -m build` makes from its own source distribution,
    of the files that git knows or would add.
    """
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("needs a clone")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and (
            name.startswith("nbs/experiments/") or not name.startswith(("nbs/", "runs/", "tests/"))
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list((folder / "dist").glob("memcalib-*.tar.gz"))) == 1
    return next((folder / "dist").glob("memcalib-*.whl"))


@pytest.mark.slow
def test_a_wheel_made_from_the_source_distribution_works(wheel, tmp_path):
    """Installed alone into a folder: modules, data files,
    the mark of types and both entry points are there.
    """
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path / "site",
    ]
    subprocess.run([*pip, wheel], check=True, timeout=240)
    package = tmp_path / "site" / "memcalib"
    package_files = {
        path.relative_to(LIB)
        for path in LIB.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    package_files |= {
        Path("products", "reproduction", "experiments", path.name) for path in EXPERIMENTS
    }
    installed_files = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert {
        path for path in installed_files if "__pycache__" not in path.parts
    } == package_files and Path("py.typed") in package_files
    points = next((tmp_path / "site").glob("memcalib-*.dist-info/entry_points.txt")).read_text()
    assert "memcalib = memcalib.commands.cli:main" in points and "[inspect_ai]" in points
    program = (
        "import memcalib; from memcalib.commands.cli import main; "
        "print(memcalib.__file__); main(['--help'])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", program], **options)
    assert done.returncode == 0 and done.stdout.startswith(str(package)), done.stdout + done.stderr


@pytest.fixture(scope="module")
def empty_environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel, and what it depends on lent by this one; its programs'
    folder.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=240)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    (site_packages / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_lines_of_the_home_page_run_from_the_wheel(empty_environment, tmp_path):
    """The vLLM tab and the tab of a Python function, as they stand, the practice server in the
    place of model and judge.
    """
    from memcalib.products.micro.world import make_examples
    from memcalib.products.micro.practice.server import MicroServer

    text = (ROOT / "tools" / "first_screen.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^memcalib evaluate .*localhost:8000.*$", text, re.M)
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "PATH": f"{empty_environment}:{os.environ['PATH']}",
        "MEMCALIB_CACHE": str(tmp_path / "calls.sqlite"),
        "HF_HUB_OFFLINE": "1",
    }
    options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    with MicroServer(make_examples("short", 4, 0, "test")) as server:
        for old, new in (
            ("Qwen/Qwen3-8B", "micro-model"),
            ("http://localhost:8000/v1", server.base_url),
            ("https://api.openai.com/v1", server.base_url),
            ("JUDGE", "micro-judge"),
        ):
            line = line.replace(old, new)
        done = subprocess.run([*shlex.split(line), "--limit", "2"], **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert (tmp_path / "runs" / "evaluation" / "report.html").is_file()
        connection = f'base_url="{server.base_url}", key_env=""'
        program = program.replace('model="JUDGE"', f'model="micro-judge", {connection}')
        program = f"{program}\nprint(mc.__file__)"
        done = subprocess.run([empty_environment / "python", "-c", program], **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "SCS" in done.stdout
    assert str(empty_environment.parent) in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: "-".join(p.with_suffix("").parts[-2:]))
def test_every_figure_is_stored(path):
    """A cell that describes its picture holds it; experiments that were never run hold nothing at
    all.
    """
    page = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    if path in EXPERIMENTS and not any(cell["outputs"] for cell in page):
        pytest.skip("not run yet")
    kinds = {"image/png", "image/svg+xml"}
    drawn = [cell for cell in page if re.search(r"^#\|\s*fig-alt:", cell["source"], re.M)]

    def stored(cell):
        return kinds & {kind for output in cell["outputs"] for kind in output.get("data", {})}

    assert [cell["id"] for cell in drawn if not stored(cell)] == [], (
        "execute the page and store its outputs"
    )


SECRETS = re.compile(
    r"sk-[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{20,}|/home/\w+|/root/|/Users/\w+|/tmp/\w+|C:\\\\Users"
)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: "-".join(p.with_suffix("").parts[-2:]))
def test_no_key_or_home_path_in_notebooks(path):
    assert SECRETS.findall(path.read_text(encoding="utf-8")) == []


def test_secret_pattern_bites():
    assert (
        SECRETS.search("sk-" + "a1" * 10)
        and SECRETS.search("/home/ann/x")
        and not SECRETS.search("task-oriented")
    )


def test_every_long_case_exists():
    """A case of long.txt that was renamed would silently become a fast one."""
    lines = (ROOT / "tests" / "long.txt").read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), line


def test_help_is_fast_because_nothing_heavy_is_imported():
    heavy = ("torch", "transformers", "trl", "datasets", "pandas", "matplotlib", "scipy", "seaborn")
    probe = f"import sys, memcalib.commands.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_experiment_pages_show_the_committed_run():
    for page, cells, shown in stored(ROOT / "runs" / "micro"):
        wrong = [one["id"] for one, other in zip(cells, shown, strict=True) if one != other]
        assert not wrong, (
            f"{page.name}: outputs of {wrong} are of another run; run python -m tools.store_runs"
        )
