"""What a person reads before and after a command: `--help`, its examples, and the commands that are
printed to be typed next.
"""

import errno
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from command_line import run
from typer.main import get_command

from memcalib.commands.cli import RENAMED, VERB_GROUPS, app
from memcalib.commands.exam import practice_judge
from memcalib.io.records import write_jsonl
from memcalib.products.memory_logs.levels import practice_levels
from memcalib.products.micro.practice.memory_system import memory_assistant, write_practice_log
from memcalib.products.micro.practice.server import MicroServer, _practice_commands
from memcalib.products.micro.world import make_examples

ROOT = Path(__file__).parents[2]
COMMANDS = get_command(app).commands
EXAMPLE = re.compile(r"Example: (memcalib .*?)(?:\n\n|\Z)", re.S)


def parsed(command: str) -> dict:
    """The parameters of a command as it would be typed; raises for one that is refused."""
    program, verb, *words = shlex.split(command)
    assert program == "memcalib"
    assert verb in COMMANDS, f"{command}: no verb {verb!r}"
    try:
        with COMMANDS[verb].make_context(verb, words) as context:
            return context.params
    except Exception as error:
        raise AssertionError(f"{command}: {error}") from error


def examples_of(verb: str) -> list[str]:
    return [" ".join(text.split()) for text in EXAMPLE.findall(COMMANDS[verb].help)]


def test_every_verb_is_in_one_group():
    grouped = [name for names in VERB_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    assert not set(RENAMED) & set(COMMANDS) and set(RENAMED.values()) <= set(COMMANDS)


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_help_begins_with_whole_sentences(verb):
    first = " ".join(COMMANDS[verb].help.split("\n\n")[0].split())
    assert first[0].isupper() and first.endswith(".") and "…" not in first, first
    for parameter in COMMANDS[verb].params:
        text = getattr(parameter, "help", None) or ""
        assert text.endswith((".", "].")), f"{verb} {parameter.name}: {text!r}"


@pytest.mark.parametrize("verb", sorted(set(COMMANDS) - {"cache"}))
def test_help_has_an_example_that_the_verb_accepts(verb):
    examples = examples_of(verb)
    assert examples, f"{verb}: no example"
    for example in examples:
        assert example.split()[1] == verb
        parsed(example)


@pytest.mark.parametrize(
    "verb",
    [verb for verb in sorted(COMMANDS) if any(p.name == "dry_run" for p in COMMANDS[verb].params)],
)
def test_examples_run_dry(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("test.jsonl", "train.jsonl"):
        write_jsonl(tmp_path / name, make_examples("short", 6, 0, "test"))
    for name in ("log.jsonl", "service.jsonl"):
        write_practice_log(tmp_path / name, 12)
    write_jsonl(tmp_path / "rollouts.jsonl", [])
    for example in examples_of(verb):
        words = shlex.split(example)[1:]
        if verb == "judge":
            continue  # it needs answers; the test below runs it
        if "request.text" in example:
            words = [word.replace("request.text", "query") for word in words]
        words += [] if "--dry-run" in words else ["--dry-run"]
        if verb == "sweep":
            words += ["--consent", "test"]
        code, output, errors = run(capsys, *words)
        assert code == 0, f"{example}: {errors}{output[-500:]}"


def test_help_lists_what_each_verb_takes(capsys):
    code, output, _ = run(capsys, "--help")
    assert code == 0
    assert not re.search(r"[a-z]\.\.\.", output), "a sentence that is cut"
    places = [output.index(f"\n{group}:") for group in VERB_GROUPS]
    assert places == sorted(places)
    for text in ("logs FILE", "show FILE [ID]", "evaluate [DATA]", "compare RUNS...", "sweep LOG"):
        assert re.search(rf"^  {re.escape(text)}  ", output, re.M), text


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_works_with_a_note(old, new, capsys):
    code, output, errors = run(capsys, old, "--help")
    assert code == 0 and re.match(rf"Usage: \S+ {new} ", output)
    assert f"`memcalib {old}` is now `memcalib {new}`" in errors


# The commands that are printed -------------------------------------------------------------------

PRINTED = re.compile(rf"(?:^|[\s:`(])(memcalib (?:{'|'.join(COMMANDS)})\b[^`\n]*?)(?=`|\n|$)", re.M)


def printed_commands(text: str) -> list[str]:
    """Commands in what was printed; those with `...` only name a verb."""
    return [found.strip() for found in PRINTED.findall(text) if "..." not in found]


@pytest.fixture(scope="module")
def server():
    def roles(_examples):
        return {"micro-levels": practice_levels, "micro-memory-model": memory_assistant}

    examples = make_examples("short", 6, 0, "test")
    with MicroServer(examples, practice=practice_judge(), roles=roles(examples)) as running:
        yield running


@pytest.fixture
def place(tmp_path, monkeypatch, server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMCALIB_CACHE", str(tmp_path / "calls.sqlite"))
    write_jsonl(tmp_path / "data.jsonl", make_examples("short", 6, 0, "test"))
    write_practice_log(tmp_path / "log.jsonl", 12)
    return server.base_url


def type_all(capsys, commands: list[str]) -> str:
    """Type commands one after the other; each must succeed. Returns what they print."""
    printed = ""
    for command in commands:
        code, output, errors = run(capsys, *shlex.split(command)[1:])
        assert code in (0, 3), f"{command}\n{errors}{output[-800:]}"
        printed += output + errors
    return printed


def test_what_the_practice_server_prints_can_be_typed(capsys, place):
    commands = [line.strip() for line in _practice_commands(place, "data.jsonl", "log.jsonl")]
    printed = type_all(capsys, commands)
    assert "Report: runs/first/memories.html" in printed
    for command in printed_commands(printed):
        parsed(command)


def test_what_each_verb_prints_can_be_typed(capsys, place):
    roles = f"--model micro-model --judge micro-judge --base-url {place}"
    judge = f"--judge micro-judge --judge-url {place}"
    typed = [
        "memcalib show data.jsonl",
        "memcalib logs log.jsonl",
        f"memcalib evaluate data.jsonl {roles} --out runs/a --set sampling.seeds=[1]",
        f"memcalib evaluate data.jsonl {roles} --out runs/b --set sampling.seeds=[2]",
        "memcalib compare runs/a runs/b --common",
        "memcalib spot-check runs/a",
        "memcalib spot-check runs/a --answers 4 --out labels.jsonl",
        "memcalib memories runs/a",
        "memcalib gate runs/b --baseline runs/a --common",
        f"memcalib exam {judge} --dry-run",
        f"memcalib generate data.jsonl --model micro-model --base-url {place} --out answers.jsonl",
        "memcalib judge answers.jsonl --data data.jsonl --model micro-exact --out judged.jsonl",
        "memcalib score judged.jsonl",
        "memcalib report runs/a",
        "memcalib build micro --out runs/data --set rows=8",
        "memcalib build --log micro --out runs/own --preview",
        f"memcalib sweep log.jsonl --consent t --model micro-memory-model {judge} --dry-run "
        f"--base-url {place}",
        "memcalib cache stats",
    ]
    printed = type_all(capsys, typed)
    for command in printed_commands(printed):
        parsed(command)


def test_what_levels_prints_runs_as_it_stands(capsys, place):
    start = (
        "memcalib levels log.jsonl --consent 'terms of 2026' --map text=memory "
        f"--model micro-levels "
        f"--base-url {place} --yes --out runs/levels"
    )
    printed = type_all(capsys, [start])
    read_sheet, judge_them = [command for command in printed_commands(printed) if "--" in command]
    # nobody has filled in the sheet: it gives no decision, and leaves nothing behind
    for _ in range(2):
        unfilled = type_all(capsys, [read_sheet])
        assert "0 new decisions" in unfilled
        assert not Path("runs/levels/settled.jsonl").exists()
    judge_them = judge_them.replace("--judge micro-levels", "--judge micro-judge")
    assert parsed(judge_them)["map_"] == ["text=memory"]
    type_all(capsys, [f"{judge_them} --yes --out runs/own"])


def test_what_footprints_print_runs_as_it_stands(capsys, place):
    judge = f"--judge micro-judge --judge-url {place}"
    start = (
        "memcalib evaluate --log log.jsonl --unlabelled --consent 'terms of 2026' "
        f"--map text=memory {judge} --yes --out runs/footprints"
    )
    printed = type_all(capsys, [start])
    levels, again = [command for command in printed_commands(printed) if "--consent" in command]
    assert "..." not in levels + again and "text=memory" in levels and "text=memory" in again
    levels = levels.replace("--model micro-judge", "--model micro-levels")
    type_all(capsys, [f"{levels} --yes", f"{again} --yes"])


# What is left behind -----------------------------------------------------------------------------


def test_an_unfilled_sheet_leaves_nothing_that_blocks(capsys, place):
    roles = f"--model micro-model --judge micro-judge --base-url {place} --set sampling.seeds=[1]"
    type_all(capsys, [f"memcalib evaluate data.jsonl {roles} --out runs/a"])
    for draw, out in (("--answers 4", "labels.jsonl"), ("--audit 6", "audit.jsonl")):
        sheet = out.replace(".jsonl", ".csv")
        read = f"memcalib spot-check runs/a --sheet {sheet} --labeller ana --out {out}"
        type_all(capsys, [f"memcalib spot-check runs/a {draw} --out {out}", read, read])


def test_empty_files_of_rows_are_started_anew(capsys, place):
    """As a run leaves them that was killed before its first row."""
    roles = f"--model micro-model --judge micro-judge --base-url {place} --set sampling.seeds=[1]"
    evaluate = f"memcalib evaluate data.jsonl {roles} --out runs/a"
    generate = f"memcalib generate data.jsonl --model micro-model --base-url {place} --out a.jsonl"
    judge = "memcalib judge a.jsonl --data data.jsonl --model micro-exact --out j.jsonl"
    levels = (
        f"memcalib levels log.jsonl --consent t --model micro-levels --base-url {place} --yes "
        "--out runs/levels"
    )
    read = "memcalib levels log.jsonl --out runs/levels --sheet runs/levels/sheet.csv --labeller a"
    type_all(capsys, [evaluate, generate, judge, levels])
    for name in ("runs/a/rollouts.jsonl", "runs/a/judgments.jsonl", "j.jsonl"):
        assert Path(name).stat().st_size
        Path(name).write_text("")
    Path("runs/levels/settled.jsonl").write_text("")
    type_all(capsys, [evaluate, judge, read, levels])


def test_nothing_is_said_to_be_kept_where_nothing_was_written(capsys, place, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    nothing = "memcalib evaluate data.jsonl --model m --judge j --base-url http://127.0.0.1:9/v1"
    code, _, errors = run(capsys, *shlex.split(f"{nothing} --out runs/none")[1:])
    assert code == 1 and "Nothing was written yet." in errors and "kept" not in errors
    no_key = "memcalib evaluate data.jsonl --model m --judge j --base-url https://api.openai.com/v1"
    code, _, errors = run(capsys, *shlex.split(f"{no_key} --out runs/key")[1:])
    assert code == 1 and "OPENAI_API_KEY" in errors and "Nothing was written yet." in errors


@pytest.mark.parametrize("typed", ["--out runs/a", "--out=runs/a", ""])
def test_a_folder_that_cannot_be_written_to_is_named(typed, capsys, place, monkeypatch):
    def read_only(self, *arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    command = f"memcalib evaluate data.jsonl --model m --judge micro-exact --base-url {place}"
    code, _, errors = run(capsys, *shlex.split(f"{command} {typed}")[1:])
    assert code == 1 and "Read-only file system" in errors and "You cannot write to" in errors
    (again,) = [line for line in errors.splitlines() if "--out" in line]
    again = again.partition("folder: ")[2]
    assert again.count("--out") == 1 and parsed(again)["out"].parent == Path.home() / "memcalib"


def test_a_port_that_is_taken_is_named(capsys, place):
    port = place.rpartition(":")[2].partition("/")[0]
    code, _, errors = run(capsys, "practice", "data.jsonl", "--port", port)
    assert code == 1 and f"port {port}: another program is using this port" in errors
    assert "--port 0" in errors


def test_after_footprints_the_commands_name_the_store_and_the_judge(capsys, place):
    talk = [{"role": "user", "content": "Dinner?"}, {"role": "assistant", "content": "Tofu."}]
    Path("talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    Path("notes.md").write_text("- Is vegan\n")
    shared = ["--log", "talk.jsonl", "--store", "notes.md", "--consent", "terms of 2026"]
    judge = ["--judge", "micro-judge", "--judge-url", place, "--judge-key-env", ""]
    command = shlex.join(["memcalib", "evaluate", *shared, *judge, "--unlabelled", "--yes"])
    propose, again = printed_commands(type_all(capsys, [command]))
    assert parsed(propose)["store"] == parsed(again)["store"] == ["notes.md"]
    propose = propose.replace("micro-judge", "micro-levels")
    type_all(capsys, [f"{propose} --yes", f"{again} --yes"])


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_file_of_examples_given_to_score_is_named(verb, capsys, place):
    code, _, errors = run(capsys, "score", "data.jsonl")
    assert code == 1 and "found examples" in errors and "score needs judgments" in errors
    (command,) = printed_commands(errors.replace("yours: memcalib", "yours:\nmemcalib"))[-1:]
    parsed(command)
    generate = f"memcalib generate data.jsonl --model micro-model --base-url {place} --out a.jsonl"
    type_all(capsys, [generate])
    code, _, errors = run(capsys, "score", "a.jsonl")
    assert code == 1 and "found answers" in errors and "memcalib judge a.jsonl" in errors


# The README --------------------------------------------------------------------------------------


def readme_block(title: str) -> list[str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"## {title}")[2]
    section = section.partition("\n## ")[0]
    return [
        line
        for block in re.findall(r"```bash\n(.*?)```", section, re.S)
        for line in block.splitlines()
        if line.startswith("memcalib ")
    ]


def test_two_minutes_without_a_key_as_the_readme_has_them(capsys, place, tmp_path):
    start, *commands = readme_block("Two minutes without a key")
    assert parsed(start)["log"] == Path("log.jsonl") and len(commands) == 2
    write_practice_log(tmp_path / "log.jsonl", parsed(start)["rows"])
    printed = type_all(
        capsys, [command.replace("http://localhost:8765/v1", place) for command in commands]
    )
    assert "Of these memories, 3 hijack answers, 1 is stale, 5 were never used." in printed
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in re.search(r"```text\n(.*?)```", readme, re.S)[1].splitlines():
        assert line.rstrip(".") in printed, line


def test_commands_of_the_readme_are_accepted():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    judge = "--judge deepseek-chat --judge-url https://api.deepseek.com/v1"
    found = re.findall(r"`(memcalib [a-z-]+ [^`]+)`", readme)
    found += re.findall(r"^(memcalib [a-z-]+ .*)$", readme, re.M)
    assert len(found) >= 6
    for command in found:
        parsed(command.replace("$JUDGE", judge))


def test_the_table_of_results_is_that_of_the_committed_run():
    import pandas as pd

    tables = ROOT / "runs" / "micro" / "main_results" / "tables"
    rows = pd.read_csv(tables / "results.csv").set_index("method")
    names = {"before training": "Cold-start"}
    names["MemCalib-RL, the paper's method"] = "MemCalib-RL"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in readme.splitlines()
        if line.startswith("|") and "±" in line
    ]
    assert len(lines) == 4
    for name, *cells in lines:
        row = rows.loc[names.get(name, name)]
        for cell, column in zip(cells, ("SCS ↑", "sMOS ↓", "sMUS ↓"), strict=True):
            for shown, exact in zip(cell.split(" ± "), row[column].split(" ± "), strict=True):
                assert abs(float(shown) - float(exact)) <= 0.0501, (name, column)
