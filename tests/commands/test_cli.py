"""The command line: exit codes, messages without tracebacks, speed of help."""

import json
import subprocess
import sys

import pytest
from command_line import run

from memcalib.commands.cli import main
from memcalib.problem import sample_records
from memcalib.io.records import write_jsonl


@pytest.fixture
def good(tmp_path):
    return str(write_jsonl(tmp_path / "nine.jsonl", sample_records()))


def test_validate_passes_and_fails(capsys, good, tmp_path):
    assert run(capsys, "validate", good)[0] == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x"}\n{oops\n')
    code, out, _ = run(capsys, "validate", str(bad))
    assert code == 1 and "bad.jsonl:1" in out and "bad.jsonl:2: json" in out
    code, out, _ = run(capsys, "validate", str(bad), "--json")
    rows = json.loads(out)["violations"]
    assert code == 1 and {row["line"] for row in rows} == {1, 2}
    assert all(row["found"] and row["allowed"] and row["file"] == str(bad) for row in rows)


def test_validate_names_edited_files_of_the_starter_set_alone(capsys, monkeypatch):
    message = "records.jsonl: edited after it was checked"
    monkeypatch.setattr("memcalib.products.exam.exam.edited_files", lambda: [message])
    code, out, _ = run(capsys, "validate", "starter:sensitive")
    assert code == 0 and f"warning: {message}" in out
    code, out, _ = run(capsys, "validate", "starter:sensitive", "--json")
    assert json.loads(out)["edited"] == [message]
    assert message not in run(capsys, "validate", "samples")[1]


@pytest.mark.parametrize("verb", ["validate", "show", "score"])
@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe\x00", b"{", b"[]", b'"x"', b"null", b"{}"]
)
def test_bad_files_give_one_message(capsys, tmp_path, verb, content):
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(capsys, verb, str(path))
    assert code == 1 and "x.jsonl" in out + err


def test_show_knows_the_ids(capsys, good):
    record = sample_records()[4]
    code, out, _ = run(capsys, "show", good)
    assert code == 0 and len(out.splitlines()) == 9
    code, out, _ = run(capsys, "show", good, record.id)
    assert code == 0 and record.atoms[0].atom_id in out
    code, out, _ = run(capsys, "show", good, record.id, "--html")
    assert code == 0 and out.startswith("<!doctype html>")
    code, _, err = run(capsys, "show", good, "../../nope")
    assert code == 1 and "no example '../../nope'" in err


def test_wrong_calls(capsys, good):
    assert run(capsys, "validate", good, "--nonsense")[0] == 2
    assert run(capsys, "nonsense")[0] == 2
    code, _, err = run(capsys, "quickstart", "--profile", "no-such-profile")
    assert code == 1 and "no-such-profile" in err and "quickstart" in err
    code, _, err = run(capsys, "reproduce", "no_such_experiment", "--profile", "smoke")
    assert code == 1 and "no_such_experiment" in err and "main_results" in err


def test_unknown_option_in_a_profile(capsys, tmp_path):
    profile = tmp_path / "p.yaml"
    profile.write_text("models: {}\nstepz: 3\n")
    code, _, err = run(
        capsys, "quickstart", "--profile", str(profile), "--out", str(tmp_path / "o")
    )
    assert code == 1 and "stepz" in err and "eval_seeds" in err and "p.yaml" in err
    profile.write_text("world: [\n")
    code, _, err = run(
        capsys, "quickstart", "--profile", str(profile), "--out", str(tmp_path / "o")
    )
    assert code == 1 and "p.yaml" in err
    profile.write_text("extends: quickstart\nrows: {MemCalib-RL: {settings: {eta: 1.5}}}\n")
    code, _, err = run(
        capsys, "quickstart", "--profile", str(profile), "--out", str(tmp_path / "o")
    )
    assert code == 1 and "eta" in err


def test_a_closed_pipe_is_no_error(good):
    command = (
        f"'{sys.executable}' -c 'from memcalib.commands.cli import main; main()' show '{good}' | "
        "head -1"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_help_loads_no_large_library():
    """What makes a verb slow to answer is what it imports."""
    probe = (
        "import atexit, runpy, sys; atexit.register(lambda: "
        "print(*{n.partition('.')[0] for n in sys.modules}))\n"
    )
    probe += "sys.argv = ['memcalib', '--help']; runpy.run_module('memcalib', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, timeout=60
    )
    *help_lines, last = done.stdout.splitlines()
    assert "quickstart" in "".join(help_lines) and {"memcalib", "typer"} <= {*last.split()}
    assert not {*last.split()} & {
        "torch",
        "transformers",
        "pandas",
        "numpy",
        "pydantic",
        "openai",
        "matplotlib",
    }


def test_show_and_errors_keep_escape_sequences_off_the_terminal(capsys, tmp_path):
    row = json.loads(sample_records()[0].to_json())
    row["id"] = "a\x1b]0;owned\x07b"
    row["question"] = "what\x1b[2J now?"
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps(row) + "\n")
    for arguments in (
        ("show", str(path)),
        ("show", str(path), row["id"]),
        ("show", str(path), "\x1bx"),
        ("validate", str(path)),
    ):
        _, out, err = run(capsys, *arguments)
        assert "\x1b]" not in out + err and "\x07" not in out + err and "\x1b[2J" not in out + err


@pytest.mark.parametrize(
    "option", ["--model", "--key-env", "--judge-key-env", "--base-url", "--judge-url"]
)
def test_a_key_on_the_command_line_is_not_printed(option, capsys, tmp_path):
    options = {
        "--model": "m",
        "--judge": "j",
        "--base-url": "http://127.0.0.1:9/v1",
        "--out": str(tmp_path / "run"),
    }
    for key in (
        "sk" + "-0123456789abcdefghijklmnop",
        "0123456789abcdefghijklmnop" if "key-env" in option else "http://me:pass@h/v1",
    ):
        words = [word for pair in (options | {option: key}).items() for word in pair]
        with pytest.raises(SystemExit) as caught:
            main(["evaluate", str(tmp_path / "none.jsonl"), *words])
        printed = capsys.readouterr()
        assert (
            caught.value.code in (1, 2)
            and "0123456789abc" not in printed.err + printed.out
            and "me:pass" not in printed.err
        )
