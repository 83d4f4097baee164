"""A full disk is said with the file that could not be written."""

import errno
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from memcalib.io.records import naming_file, write_whole
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
