"""A full disk is said with the file that could not be written."""

import errno
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from command_line import run

from memcalib.evaluation.run import evaluate
from memcalib.io.records import naming_file, write_jsonl, write_whole
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.report.figures import save_figure, write_figures
from memcalib.report.tables import write_tables

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "report.html.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="report.html") as error:
        write_whole(tmp_path / "report.html", "text")
    assert error.value.errno == errno.ENOSPC and not (tmp_path / "report.html").exists()


def test_a_table_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "scores.csv.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="scores.csv"):
        write_tables(tmp_path, {"Scores": pd.DataFrame({"a": [1]})})


def test_a_figure_that_cannot_be_written_is_named(tmp_path):
    figure, _ = plt.subplots()
    (tmp_path / "plane.svg.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="plane.svg"):
        save_figure(figure, tmp_path / "plane")
    plt.close(figure)


def test_nothing_is_written_through_a_link_that_somebody_left(tmp_path):
    """A folder from elsewhere may hold a link in the place of the unfinished file."""
    own_file = tmp_path / "mine.txt"
    own_file.write_text("precious")
    for target in (own_file, tmp_path / "new.txt"):
        (tmp_path / "report.html.part").symlink_to(target)
        write_whole(tmp_path / "report.html", "text")
    assert own_file.read_text() == "precious" and not (tmp_path / "new.txt").exists()
    assert (tmp_path / "report.html").read_text() == "text"


def test_nothing_is_written_through_a_hard_link_that_somebody_left(tmp_path):
    own_file = tmp_path / "mine.txt"
    own_file.write_text("precious")
    (tmp_path / "report.html.part").hardlink_to(own_file)
    write_whole(tmp_path / "report.html", "text")
    assert own_file.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "text"


def test_a_figure_is_not_written_through_a_link(tmp_path):
    own_file = tmp_path / "mine.txt"
    own_file.write_text("precious")
    (tmp_path / "plane.svg").symlink_to(own_file)
    figure, _ = plt.subplots()
    save_figure(figure, tmp_path / "plane")
    plt.close(figure)
    assert own_file.read_text() == "precious"
    assert not (tmp_path / "plane.svg").is_symlink()


@pytest.mark.parametrize("name", ["tables", "figures"])
def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "run" / name
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    figure, _ = plt.subplots()
    with pytest.raises(ValueError, match=f"{name}: found a link to .*elsewhere"):
        if name == "tables":
            write_tables(folder, {"Scores": pd.DataFrame({"a": [1]})})
        else:
            write_figures(folder, {"plane": figure})
    plt.close(figure)
    assert not any(elsewhere.iterdir())


def test_an_error_that_names_its_file_keeps_it(tmp_path):
    with pytest.raises(OSError, match="nowhere"), naming_file("other.txt"):
        (tmp_path / "nowhere").read_text()


@pytest.fixture
def no_room_for_temporary_files(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", tempfile.gettempdir())

    for name in (
        "mkdtemp",
        "mkstemp",
        "NamedTemporaryFile",
        "TemporaryFile",
        "SpooledTemporaryFile",
    ):
        monkeypatch.setattr(tempfile, name, full)


def test_commands_need_no_room_for_temporary_files(
    capsys, tmp_path, monkeypatch, no_room_for_temporary_files
):
    """Everything that a run writes stands in its folder: a full TMPDIR stops nothing."""
    monkeypatch.chdir(tmp_path)
    examples = make_examples("short", 3, 7, "test")
    write_jsonl(tmp_path / "data.jsonl", examples)
    with MicroServer(examples) as server:
        words = ["evaluate", "data.jsonl", "--model", "micro-model", "--judge", "micro-exact"]
        words += ["--base-url", server.base_url, "--key-env", "", "--out", "run"]
        code, _, errors = run(capsys, *words, "--cache", tmp_path / "calls.sqlite")
    assert code == 0, errors
    words = ["train", "micro", "--method", "grpo", "--out", "t", "--no-cache"]
    for setting in ("steps=1", "prompts=2", "generations=4", "eval_every=0", "save_every=1"):
        words += ["--set", f"train.{setting}"]
    world = "{name: short, train: 8, validation: 0, test: 4, demonstrations: 48}"
    code, _, errors = run(capsys, *words, "--set", f"data.world={world}")
    assert code == 0, errors


def test_an_evaluation_from_python_without_a_folder_says_that_there_is_no_room(
    no_room_for_temporary_files,
):
    [example] = make_examples("short", 1, 7, "test")
    rows = [{"example": example, "model": "m", "response": "An answer."}]
    with pytest.raises(OSError, match="No space left on device"):
        evaluate(rows, judge=exact_judge)
