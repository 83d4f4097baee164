"""Input that was made to do harm: on the terminal, in a reader of YAML, in time, in memory."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import run

from memcalib.commands.cli import main
from memcalib.io.records import write_jsonl
from memcalib.io.settings import parse_yaml
from memcalib.problem import Example
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import WORLDS, make_examples
from memcalib.products.reproduction.engine import snakemake_words
from memcalib.products.reproduction.jobs import LOG
from memcalib.products.reproduction.jobs import _run_command as run_command

HOSTILE = "\x1b[31mD\x9b1m\u202e\r"


# The terminal -------------------------------------------------------------------------------------


@pytest.fixture
def hostile_run(tmp_path, capsys, monkeypatch) -> Path:
    """A finished run whose examples carry control characters wherever a record has a text."""
    examples = []
    for number, example in enumerate(make_examples(WORLDS["short"], 4, 7, "test")):
        row = json.loads(example.to_json())
        row.update(domain=f"{HOSTILE}{number % 2}", subset=f"{HOSTILE}sub")
        examples.append(Example.model_validate(row))
    write_jsonl(tmp_path / "hostile.jsonl", examples)
    (tmp_path / "bound52.py").write_text(
        "from memcalib.problem import judgment_for\n\n\n"
        "def judge(example, response):\n"
        "    return judgment_for(example, example.levels, judge='\\x1b[31mb')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with MicroServer(examples) as server:
        words = ["evaluate", tmp_path / "hostile.jsonl", "--model", "micro-model", "--no-cache"]
        words += ["--base-url", server.base_url, "--judge", "bound52:judge", "--out"]
        code, output, errors = run(capsys, *words, tmp_path / "run")
        assert code == 0, errors
        assert_clean(output + errors)
        assert run(capsys, *words, tmp_path / "other")[0] == 0
    return tmp_path / "run"


def assert_clean(text: str) -> None:
    found = [c for c in text if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    found += [c for c in text if c in "\u202e\u2066\u200f"]
    assert not found, (found, text[max(0, text.find(found[0]) - 80) :][:160])


COMMANDS = {
    "score": ["score", "run/judgments.jsonl", "--by", "domain"],
    "compare": ["compare", "run", "other", "--out", "c"],
    "gate": ["gate", "run", "--baseline", "other", "--out", "g"],
    "memories": ["memories", "run"],
    "lint": ["lint", "hostile.jsonl"],
    "validate": ["validate", "hostile.jsonl"],
    "show": ["show", "hostile.jsonl"],
    "label": ["label", "run"],
}


def test_no_control_character_reaches_the_terminal_or_a_table(capsys, hostile_run, monkeypatch):
    monkeypatch.chdir(hostile_run.parent)
    for name, words in COMMANDS.items():
        _, output, errors = run(capsys, *words)
        assert output + errors, name
        assert_clean(output + errors)
    tables = [
        file for file in hostile_run.parent.rglob("*") if file.suffix in (".csv", ".md", ".tex")
    ]
    assert len(tables) > 5
    for file in tables:
        assert_clean(file.read_text(encoding="utf-8"))
    assert any("\\x1b[31mD" in file.read_text(encoding="utf-8") for file in tables)


def test_where_an_error_was_is_shown_without_keys_and_control_characters(
    capsys, tmp_path, monkeypatch
):
    """MEMCALIB_DEBUG=1 shows more, and not in another way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMCALIB_DEBUG", "1")
    key = "sk-" + "proj-Ab12Cd34Ef56Gh78Ij93"
    with pytest.raises(SystemExit, match="1"):
        main(["validate", f"no\x1b]0;t\x07{key}.jsonl"])
    errors = capsys.readouterr().err
    assert "Traceback" in errors and "records.py" in errors
    assert_clean(errors)
    assert key not in errors and "***" in errors
    [example] = make_examples(WORLDS["short"], 1, 7, "test")
    row = {**json.loads(example.to_json()), "domain": f"{HOSTILE}{key} is mine"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    code, output, errors = run(capsys, "show", "rows.jsonl")
    assert code == 0 and "is mine" in output
    assert_clean(output)
    assert key not in output


# YAML ---------------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
YAMLS = {
    "aliases that multiply": BOMB,
    "a mapping in itself": "a: &a\n  b: *a\n",
    "a list in itself": "a: &a [1, *a]\n",
    "merges that multiply": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{y{n}: 1, <<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 30)),
    "lists in lists": "a: " + "[" * 5000 + "]" * 5000 + "\n",
    "lists in lists, as blocks": "".join(f"{' ' * n}-\n" for n in range(900)),
}


@pytest.mark.parametrize("name", YAMLS)
def test_yaml_that_would_never_end_is_refused_with_its_place(name):
    started = time.process_time()
    with pytest.raises(ValueError, match=r"^theirs\.yaml: .*line \d+") as caught:
        parse_yaml(YAMLS[name], "theirs.yaml")
    assert time.process_time() - started < 5
    assert "allowed" in str(caught.value)


def test_yaml_with_some_aliases_is_read():
    text = "common: &c {lr: 1, steps: [1, 2]}\none: {<<: *c, lr: 2}\ntwo: *c\nthree: [*c, *c]\n"
    value = parse_yaml(text, "mine.yaml")
    assert value["one"] == {"lr": 2, "steps": [1, 2]} and value["three"] == [value["two"]] * 2
    deep = "[" * 40 + "]" * 40
    assert parse_yaml(deep, "mine.yaml")


@pytest.mark.parametrize("name", ["aliases that multiply", "a mapping in itself", "lists in lists"])
def test_a_command_refuses_such_settings(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"    {line}\n" for line in YAMLS[name].splitlines())
    text = f"model:\n  model: m\n  extra_body:\n{lines}judge: micro-exact\n"
    (tmp_path / "theirs.yaml").write_text(text)
    code, _, errors = run(capsys, "evaluate", "--config", "theirs.yaml", "--dry-run")
    assert code == 1 and errors.startswith("memcalib: theirs.yaml: ") and "line" in errors
    assert "unexpected" not in errors


# Time and memory ----------------------------------------------------------------------------------


def many_atoms(count: int) -> dict:
    """A record of one block with so many atoms, no two alike."""
    [example] = make_examples(WORLDS["short"], 1, 7, "test")
    row = json.loads(example.to_json())
    atom = row["memories"][0]
    block = row["memory_blocks"][0]
    sentences = [f"The user's {n} pet number {n * n} is animal {n * 7}." for n in range(count)]
    atoms = []
    for number, sentence in enumerate(sentences):
        atoms.append({**atom, "atom_id": f"a{number}", "text": sentence})
    block = {
        **block,
        "memory_text": " ".join(sentences),
        "atomic_concat_text": " ".join(sentences),
        "atom_ids": [atom["atom_id"] for atom in atoms],
    }
    return {**row, "memory_blocks": [block], "memories": atoms}


def test_lint_does_not_compare_every_pair_of_atoms(monkeypatch):
    """2,000 atoms are two million pairs; benchmarks/bench_lint_atoms.py has the time."""
    from memcalib.products.dataset import lint

    compared = []
    say_the_same = lint._say_the_same

    def counted(first, second, alike):
        compared.append((first, second))
        return say_the_same(first, second, alike)

    monkeypatch.setattr(lint, "_say_the_same", counted)
    violations = lint.lint_example(Example.model_validate(many_atoms(2000)), ["independence"])
    assert violations == [] and len(compared) < 4000
    row = many_atoms(2000)
    for atom in row["memories"]:
        atom["text"] = "The user's pet is a turtle."
    violations = lint.lint_example(Example.model_validate(row), ["independence"])
    assert len(violations) == 1999 and len(compared) < 8000


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
from memcalib.commands.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("kind", ["one line", "many lines", "one record of blanks"])
def test_a_gz_bomb_is_refused_at_a_ratio_that_is_said(tmp_path, kind):
    path = tmp_path / "bomb.jsonl.gz"
    many_lines = (b" " * 7 + b"\n") * 2**17
    piece = {"one line": b"x" * 2**20, "many lines": many_lines}.get(kind, b" " * 2**20)
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(100):
            file.write(piece)
    words = [sys.executable, "-c", LIMITED, "validate", str(path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 1, text
    assert "bomb.jsonl.gz" in text and "allowed" in text and "times" in text, text
    assert "MemoryError" not in text and "Traceback" not in text


def test_rows_that_compress_well_are_read(tmp_path):
    """Rows that are much alike: a hundred times smaller is nothing strange."""
    row = json.dumps(many_atoms(30))
    with gzip.open(tmp_path / "alike.jsonl.gz", "wt") as file:
        for number in range(3000):
            file.write(row.replace("micro-short-test-7-00000", f"id{number}") + "\n")
    from memcalib.io.records import iter_rows

    assert sum(1 for _ in iter_rows(tmp_path / "alike.jsonl.gz")) == 3000


# The working folder -------------------------------------------------------------------------------

NAMES = ("json", "typer", "yaml", "torch", "openai", "logging", "readline", "numpy", "pandas")


@pytest.mark.parametrize("flags", [[], ["-c"]], ids=["module", "module named with its package"])
def test_python_m_imports_nothing_of_the_working_folder(tmp_path, flags):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            "open('ran', 'w').write(__name__)\nraise SystemExit(7)\n"
        )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = ["-m", "memcalib"] if not flags else ["-m", "memcalib.__main__"]
    ended = subprocess.run(
        [sys.executable, *words, "evaluate", "starter", "--model", "m", "--judge", "micro-exact",
         "--base-url", "http://127.0.0.1:9/v1", "--dry-run"],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "ran").exists()


def test_a_plan_runs_no_module_of_the_working_folder(tmp_path):
    """Its engine and its jobs are processes of their own."""
    for name in ("snakemake", "random", "yaml", "memcalib"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "plan.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [*snakemake_words(tmp_path / "root", 1, 0), "--version"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    program = "from memcalib.products.reproduction.plan_steps import step_main"
    (tmp_path / "job").mkdir()
    code = run_command([sys.executable, "-c", program], tmp_path / "job", tmp_path, environment)
    assert code == 0, (tmp_path / "job" / LOG).read_text()
    assert not (tmp_path / "ran").exists()


def test_a_judge_of_the_working_folder_is_still_found(capsys, tmp_path):
    (tmp_path / "mine52.py").write_text(
        "from memcalib.problem import judgment_for\n\n\n"
        "def judge(example, response):\n    return judgment_for(example, example.levels)\n"
    )
    examples = make_examples(WORLDS["short"], 2, 7, "test")
    write_jsonl(tmp_path / "data.jsonl", examples)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with MicroServer(examples) as server:
        ended = subprocess.run(
            [sys.executable, "-m", "memcalib", "evaluate", "data.jsonl", "--model", "micro-model",
             "--judge", "mine52:judge", "--base-url", server.base_url, "--no-cache", "--out", "o"],
            capture_output=True, text=True, cwd=tmp_path, env=environment,
        )  # fmt: skip
    assert "No module named 'mine52'" not in ended.stderr, ended.stderr
    assert (tmp_path / "o" / "judgments.jsonl").exists(), ended.stderr
