"""Rows of a log are for their owner: under every umask, in folders that exist and that do not."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import run

from memcalib.commands.cli import _private_where_named
from memcalib.io.jsonl import append_to
from memcalib.io.private import files_named_in, of_private_run, private_folder
from memcalib.io.runs import RunFolder
from memcalib.products.memory_logs.levels import practice_levels
from memcalib.products.micro.practice.memory_system import memory_assistant, practice_log
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.trainer.recipe import load_recipe, recipe_examples

PRIVATE = "Marta keeps a secret garden"
ROLES = {"micro-memory-model": memory_assistant, "micro-levels": practice_levels}
JUDGE = """
from memcalib.problem import Level, judgment_for
def judge(example, response):
    return judgment_for(example, dict.fromkeys(example.levels, Level.BOUND), judge='b')
"""


def is_private(folder):
    """By its mode alone: the function of the package is among what is tested here."""
    return folder.stat().st_mode & 0o777 == 0o700


@contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(params=[0o000, 0o022, 0o002, 0o077], ids=lambda mask: f"umask {mask:03o}")
def any_umask(request):
    with umask(request.param):
        yield request.param


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """A working folder that others may read, with a log of answers and a judge."""
    folder = tmp_path / "work"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "bound_judge52.py").write_text(JUDGE)
    rows = []
    for number in range(12):
        memories = [{"text": f"{PRIVATE}.", "level": "B"}, {"text": "Rows.", "level": "A"}]
        query = f"What can I plant on day {number}?"
        rows.append({"id": f"q{number}", "query": query, "memories": memories, "answer": "Peas."})
    (folder / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def readable_by_others(root: Path) -> list[str]:
    """The files below a folder that hold the private text and that another user could open."""
    found = []

    def look(folder: Path) -> None:
        if not folder.stat().st_mode & 0o077:
            return
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                look(path)
            elif path.is_symlink():
                continue  # as private as the folders on the way to its end
            elif path.stat().st_mode & 0o077 and PRIVATE.encode() in path.read_bytes():
                found.append(str(path.relative_to(root)))

    look(root)
    return [name for name in found if name != "own.jsonl"]


def evaluate(capsys, *more) -> tuple[int, str, str]:
    words = ["evaluate", "--log", "own.jsonl", "--consent", "terms", "--yes"]
    return run(capsys, *words, "--judge", "bound_judge52:judge", "--out", "run", *more)


@pytest.fixture(scope="module")
def made_before(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("made-before")


@pytest.fixture
def evaluated(capsys, work, made_before) -> Path:
    """The working folder with two evaluations of the log, `run` and `run2`. They are made once and
    copied with their modes, since most tests only need that they exist.
    """
    for name in ("run", "run2"):
        if (made_before / name).exists():
            shutil.copytree(made_before / name, work / name)
        else:
            code, _, errors = evaluate(capsys, "--out", name)
            assert code == 0, errors
            shutil.copytree(work / name, made_before / name)
        assert is_private(work / name) and readable_by_others(work) == []
    return work


STATES = [
    *[(mask, state) for mask in (0o000, 0o022) for state in ("new", "empty", "below new folders")],
    (0o002, "new"),
    (0o077, "below new folders"),
]


@pytest.mark.parametrize(
    ("mask", "state"), STATES, ids=[f"umask {mask:03o}-{state}" for mask, state in STATES]
)
def test_an_evaluation_of_a_log_is_closed(capsys, work, mask, state):
    out = "a/b/run" if state == "below new folders" else "run"
    if state == "empty":
        (work / "run").mkdir()
        (work / "run").chmod(0o755)
    with umask(mask):
        code, _, errors = evaluate(capsys, "--out", out)
    assert code == 0, errors
    assert is_private(work / out) and readable_by_others(work) == []


def test_a_run_of_before_is_closed_when_it_goes_on(capsys, work):
    assert evaluate(capsys)[0] == 0
    (work / "run").chmod(0o755)
    code, _, errors = evaluate(capsys)
    assert code == 0, errors
    assert is_private(work / "run")


def test_a_folder_of_other_things_is_not_closed_but_refused(capsys, work):
    """A shared folder that a command closed would be gone for those who share it."""
    (work / "run").mkdir()
    (work / "run").chmod(0o755)
    (work / "run" / "notes.txt").write_text("ours")
    code, _, errors = evaluate(capsys)
    assert code == 1 and "run: found a folder that other users can enter (mode 755)" in errors
    assert "chmod 700 run" in errors and "another folder" in errors
    assert [path.name for path in (work / "run").iterdir()] == ["notes.txt"]
    assert (work / "run").stat().st_mode & 0o777 == 0o755
    (work / "run").chmod(0o700)
    assert evaluate(capsys)[0] == 0


@pytest.mark.parametrize("state", ["new", "existing"])
def test_a_build_from_a_log_is_closed(capsys, tmp_path, state):
    out = tmp_path / "pre"
    if state == "existing":
        out.mkdir()
        out.chmod(0o755)
    words = ["build", "micro", "--from-memory", "micro", "--out", out, "--yes", "--no-cache"]
    code, _, errors = run(capsys, *words, "--pilot", "3", "--set", "memory.rows=6")
    assert code == 0, errors
    assert is_private(out)


@pytest.fixture
def server():
    with MicroServer([], roles=ROLES, practice=PracticeJudge(reads=True)) as started:
        yield started


@pytest.mark.parametrize("state", ["new", "existing"])
def test_levels_of_a_log_are_closed(capsys, work, server, any_umask, state):
    if state == "existing":
        (work / "levels").mkdir()
        (work / "levels").chmod(0o755)
    words = ["levels", "own.jsonl", "--consent", "terms", "--yes", "--no-cache", "--out", "levels"]
    code, _, errors = run(capsys, *words, "--model", "micro-levels", "--base-url", server.base_url)
    assert code == 0, errors
    assert is_private(work / "levels") and readable_by_others(work) == []


def test_a_sweep_of_a_log_is_closed(capsys, work, server, any_umask):
    rows = practice_log(3)
    (work / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (work / "sweep").mkdir()
    (work / "sweep").chmod(0o755)
    words = ["sweep", "log.jsonl", "--out", "sweep", "--consent", "terms", "--no-cache", "--yes"]
    words += ["--top-k", "0,4", "--today-framing", "authoritative"]
    words += ["--model", "micro-memory-model", "--base-url", server.base_url]
    code, _, errors = run(capsys, *words, "--judge", "micro-judge", "--judge-url", server.base_url)
    assert code == 0, errors
    assert is_private(work / "sweep")


DERIVED = {
    "memories": ["memories", "run", "--out", "derived"],
    "compare": ["compare", "run", "run2", "--out", "derived"],
    "gate": ["gate", "run", "--max-drop", "50", "--baseline", "run2", "--out", "derived"],
    "label": ["label", "run", "--answers", "4", "--out", "derived/labels.jsonl"],
}


@pytest.mark.parametrize("state", ["new", "existing"])
@pytest.mark.parametrize("verb", DERIVED)
def test_what_is_made_from_a_private_run_is_private(capsys, evaluated, verb, state):
    work = evaluated
    if state == "existing":
        (work / "derived").mkdir()
        (work / "derived").chmod(0o755)
        (work / "derived" / "notes.txt").write_text("ours")
    code, _, errors = run(capsys, *DERIVED[verb])
    assert code == 0, errors
    made = [path for path in (work / "derived").rglob("*") if path.name != "notes.txt"]
    assert made and readable_by_others(work) == []
    if state == "new":
        assert is_private(work / "derived")
    else:
        assert not [path for path in made if path.is_file() and path.stat().st_mode & 0o077]


def test_a_second_step_is_as_private_as_the_first(capsys, evaluated, server):
    """Parts of a private run are private rows, and so is all that is made of them."""
    work = evaluated
    judged = ["--judge", "bound_judge52:judge"]
    model = ["--model", "micro-memory-model", "--base-url", server.base_url, "--key-env", ""]
    steps = [
        ["split", "run/examples.jsonl", "--out", "parts", "--size", "a=0.5", "--size", "b=0.5"],
        ["split", "parts/a.jsonl", "--out", "parts2", "--size", "c=0.5", "--size", "d=0.5"],
        ["evaluate", "parts/a.jsonl", *model, *judged, "--out", "run3"],
        ["generate", "parts/a.jsonl", *model, "--out", "answers.jsonl"],
        ["generate", "--set", "data=parts/b.jsonl", *model, "--out", "b.jsonl"],
        ["judge", "answers.jsonl", "--data", "parts/a.jsonl", "--model", "bound_judge52:judge"],
    ]
    for step in steps:
        code, _, errors = run(capsys, *step)
        assert code in (0, 3), errors
    assert (work / "parts2" / "c.jsonl").is_file() and (work / "b.jsonl").is_file()
    assert readable_by_others(work) == []


@pytest.mark.parametrize("link", ["file", "folder", "relative", "link to a link"])
def test_a_link_is_as_private_as_its_end(capsys, evaluated, link):
    work = evaluated
    data = work / "run" / "examples.jsonl"
    data.chmod(0o644)
    if link == "folder":
        (work / "link").symlink_to(work / "run")
        name = "link/examples.jsonl"
    else:
        name = "link.jsonl"
        (work / name).symlink_to("run/examples.jsonl" if link == "relative" else data)
    if link == "link to a link":
        (work / "second.jsonl").symlink_to(name)
        name = "second.jsonl"
    with umask(0o022):
        words = ["split", name, "--out", "parts", "--size", "a=0.5", "--size", "b=0.5"]
        code, _, errors = run(capsys, *words)
        assert code == 0, errors
        words = ["generate", name, "--model", "m", "--base-url", "http://127.0.0.1:9/v1"]
        run(
            capsys,
            *words,
            "--key-env",
            "",
            "--out",
            "made/answers.jsonl",
            "--set",
            "model.attempts=1",
        )
    assert is_private(work / "parts") and readable_by_others(work) == []
    made = list((work / "made").rglob("*"))
    assert made and not any(path.stat().st_mode & 0o077 for path in made)


def test_a_sweep_writes_through_no_link(capsys, work, server):
    rows = practice_log(3)
    (work / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (work / "elsewhere").mkdir()
    (work / "sweep").mkdir(mode=0o700)
    (work / "sweep" / "settings").symlink_to(work / "elsewhere")
    words = ["sweep", "log.jsonl", "--out", "sweep", "--consent", "terms", "--no-cache", "--yes"]
    words += ["--top-k", "0,4", "--model", "micro-memory-model", "--base-url", server.base_url]
    code, _, errors = run(capsys, *words, "--judge", "micro-judge", "--judge-url", server.base_url)
    assert code == 1 and "settings: found a link to" in errors, errors
    assert list((work / "elsewhere").iterdir()) == []


def test_a_part_of_a_run_is_no_link(work):
    run_folder = RunFolder(work / "run", {"a": 1}, private=True)
    (work / "elsewhere").mkdir()
    (work / "run" / "parts").symlink_to(work / "elsewhere")
    with pytest.raises(ValueError, match="parts: found a link to"):
        run_folder.part("rows")


PRIVATE_SETTING = {
    "demonstrations": "teach.jsonl",
    "start.adapter": "adapter",
    "data.train": "a.jsonl",
}


@pytest.mark.parametrize("setting", PRIVATE_SETTING)
def test_whatever_settings_name_counts(work, setting):
    """At any depth: training data, demonstrations, the weights to begin with."""
    path = work / PRIVATE_SETTING[setting]
    path.write_text("rows")
    nested: dict = {"recipe": [{setting.split(".")[-1]: str(path)}], "steps": 3}
    path.chmod(0o644)
    assert not of_private_run(*files_named_in(nested))
    path.chmod(0o600)
    assert of_private_run(*files_named_in(nested))


def test_a_training_on_private_demonstrations_is_private(capsys, work):
    recipe = load_recipe("micro", ["data.world={name: short, train: 8, validation: 0, test: 4}"])
    rows = [
        {"example_id": example.id, "response": PRIVATE, "status": "accepted"}
        for example in recipe_examples(recipe).train
    ]
    (work / "teach.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (work / "teach.jsonl").chmod(0o600)
    (work / "recipe.yaml").write_text(
        "base: {model: pretrained}\nstart: {model: cold-short}\njudge: micro-exact\n"
        "data: {world: {name: short, train: 8, validation: 0, test: 4}}\n"
        "demonstrations: teach.jsonl\nsft: {epochs: 1, batch_size: 4}\n"
    )
    with umask(0o022):
        words = ["train", "recipe.yaml", "--method", "sft", "--no-cache", "--out", "trained"]
        code, _, errors = run(capsys, *words)
    assert code == 0, errors
    assert is_private(work / "trained")
    made = [path for path in (work / "trained").rglob("*") if path.is_file()]
    assert not [path for path in made if path.stat().st_mode & 0o077]


def test_a_saved_data_set_is_as_private_as_its_rows(work):
    (work / "saved").mkdir()
    for name in ("state.json", "data-00000-of-00001.arrow"):
        (work / "saved" / name).write_text("{}")
        (work / "saved" / name).chmod(0o644)
    assert not of_private_run(work / "saved")
    (work / "saved" / "data-00000-of-00001.arrow").chmod(0o600)
    assert of_private_run(work / "saved")


@pytest.mark.parametrize("word", ["{}", "--data={}", "data={}", "--set=memory.file={}"])
def test_a_file_among_the_words_of_a_command_is_seen(work, monkeypatch, word):
    monkeypatch.setenv("HOME", str(work))
    (work / "rows.jsonl").write_text("{}")
    for mode, mask in ((0o600, 0o077), (0o644, 0o022)):
        (work / "rows.jsonl").chmod(mode)
        for name in ("rows.jsonl", "~/rows.jsonl"):
            with umask(0o022), _private_where_named(["build", word.format(name)]):
                within = os.umask(0o022)
            assert within == mask, name


def test_every_file_is_closed_where_settings_name_private_rows(capsys, work, server):
    """The files too, and not the folder alone: a file may be moved."""
    assert evaluate(capsys)[0] == 0
    (work / "rows.jsonl").write_bytes((work / "run" / "examples.jsonl").read_bytes())
    (work / "rows.jsonl").chmod(0o600)
    words = ["evaluate", "--set", "data=rows.jsonl", "--judge", "bound_judge52:judge"]
    words += ["--model", "micro-memory-model", "--base-url", server.base_url, "--key-env", ""]
    with umask(0o022):
        code, _, errors = run(capsys, *words, "--limit", "2", "--out", "named", "--no-cache")
    assert code in (0, 3), errors
    made = [path for path in (work / "named").rglob("*") if path.is_file()]
    assert len(made) > 5 and not [path for path in made if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("place", ["data.jsonl", "data/train.jsonl"])
def test_a_folder_of_data_is_as_private_as_its_files(capsys, evaluated, place):
    work = evaluated
    file = work / "theirs" / place
    file.parent.mkdir(parents=True)
    file.write_bytes((work / "run" / "examples.jsonl").read_bytes())
    for mode, is_closed in ((0o600, True), (0o644, False)):
        file.chmod(mode)
        out = f"parts{mode:o}"
        with umask(0o022):
            words = ["split", "theirs", "--out", out, "--size", "a=0.5", "--size", "b=0.5"]
            code, _, errors = run(capsys, *words)
        assert code == 0, errors
        assert is_private(work / out) is is_closed


def test_from_python_a_log_is_as_private(work):
    from memcalib.evaluation.run import evaluate as evaluate_from_python

    def judge(example, response):
        return dict.fromkeys(example.levels, "Bound")

    with umask(0o022):
        log = {"consent": "terms"}
        evaluate_from_python("own.jsonl", judge=judge, log=log, out="api")
        assert (work / "api" / "judgments.jsonl").is_file()
        evaluate_from_python("api", judge=judge, out="again")
        model = lambda messages: "Peas."  # noqa: E731
        evaluate_from_python("api/examples.jsonl", model=model, judge=judge, out="new")
    assert is_private(work / "api") and readable_by_others(work) == []


def test_a_file_of_its_owner_alone_makes_nothing_for_others(capsys, work):
    """However it came out of its folder, as by `cp`."""
    assert evaluate(capsys)[0] == 0
    (work / "copy.jsonl").write_bytes((work / "run" / "examples.jsonl").read_bytes())
    (work / "copy.jsonl").chmod(0o600)
    words = ["split", "copy.jsonl", "--out", "parts", "--size", "a=0.5", "--size", "b=0.5"]
    code, _, errors = run(capsys, *words)
    assert code == 0, errors
    assert is_private(work / "parts") and readable_by_others(work) == []


def test_a_file_that_is_written_on_is_closed(capsys, work, server):
    """An answer file that is there is gone on with, whoever may read it."""
    assert evaluate(capsys)[0] == 0
    data = work / "own_rows.jsonl"
    data.write_bytes((work / "run" / "examples.jsonl").read_bytes())
    data.chmod(0o600)
    for name in ("answers.jsonl", "judged.jsonl"):
        (work / name).touch()
        (work / name).chmod(0o644)
    words = ["generate", data, "--model", "micro-memory-model", "--base-url", server.base_url]
    with umask(0o022):
        code, _, errors = run(capsys, *words, "--key-env", "", "--out", "answers.jsonl")
        assert code in (0, 3), errors
        words = ["judge", "answers.jsonl", "--data", data, "--model", "bound_judge52:judge"]
        code, _, errors = run(capsys, *words, "--out", "judged.jsonl")
        assert code in (0, 3), errors
    assert (work / "answers.jsonl").stat().st_size and (work / "judged.jsonl").stat().st_size
    assert readable_by_others(work) == []


def test_rows_for_everybody_are_written_on_as_they_are(tmp_path):
    with umask(0o022):
        append_to(tmp_path / "rows.jsonl").close()
        (tmp_path / "rows.jsonl").chmod(0o664)
        append_to(tmp_path / "rows.jsonl").close()
    assert (tmp_path / "rows.jsonl").stat().st_mode & 0o777 == 0o664


def test_rows_for_everybody_stay_so(capsys, work):
    with umask(0o022):
        words = ["split", "starter:core", "--out", "parts", "--size", "a=0.5", "--size", "b=0.5"]
        code, _, errors = run(capsys, *words)
    assert code == 0, errors
    assert (work / "parts" / "a.jsonl").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_cannot_be_closed_is_refused(tmp_path, monkeypatch):
    """A file system without permissions, or the folder of somebody else."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setattr("memcalib.io.private.os.chmod", lambda path, mode: None)
    with pytest.raises(ValueError, match="cannot be closed to other users"):
        private_folder(folder)

    def refused(path, mode):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("memcalib.io.private.os.chmod", refused)
    with pytest.raises(ValueError, match="Operation not permitted"):
        private_folder(folder)
