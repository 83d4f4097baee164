"""The best and the second of a table: ties, blocks, cells without a number, and what files say."""

import random

import pandas as pd
import pytest

from memcalib.report.tables import (
    LONGEST_PRINTED,
    MarkedTable,
    best_and_second,
    flat_headings,
    stored_table,
    to_latex,
    to_markdown,
    write_tables,
)


def marks_of(cells, **options) -> list[list[str]]:
    return best_and_second(pd.DataFrame(cells), **options).marks.to_numpy().tolist()


def column(*cells: str, heading: str = "SCS ↑", **options) -> list[str]:
    return [row[0] for row in marks_of({heading: cells}, **options)]


def test_the_arrow_says_which_way_is_better():
    assert column("1.0", "3.0", "2.0") == ["", "best", "second"]
    assert column("1.0", "3.0", "2.0", heading="sMOS ↓") == ["best", "", "second"]
    assert column("1.0", "3.0", "2.0", heading="answers") == ["", "", ""]


def test_equal_values_share_a_mark_and_the_next_different_one_is_second():
    assert column("3.00", "3.00", "2.00", "1.00") == ["best", "best", "second", ""]
    assert column("3.00", "2.00", "2.00", "1.00") == ["best", "second", "second", ""]


def test_what_is_printed_is_compared_and_not_its_spread():
    assert column("3.00 ± 0.50", "3.00 ± 0.10", "2.99 ± 0.01") == ["best", "best", "second"]


@pytest.mark.parametrize("cells", [("2.0", "2.0"), ("2.0",), ("not run", ""), ("2.0", "not run")])
def test_nothing_is_marked_where_nothing_is_better(cells):
    assert set(column(*cells)) == {""}


@pytest.mark.parametrize("missing", ["", "not run", "not scored", "undefined", "not published"])
@pytest.mark.parametrize("heading", ["SCS ↑", "sMOS ↓"])
def test_a_missing_value_is_no_zero(missing, heading):
    """As a zero it would be the best of an error that is better when lower."""
    assert column(missing, "5.0", "4.0", heading=heading)[0] == ""


def test_negative_values_are_numbers():
    assert column("-3.0", "-1.0", "-2.0") == ["", "best", "second"]


def test_blocks_are_compared_apart():
    cells = {"model": ["a", "a", "b", "b"], "SCS ↑": ["1", "2", "9", "8"]}
    assert [row[1] for row in marks_of(cells, within="model")] == [
        "second",
        "best",
        "best",
        "second",
    ]


def test_rows_that_do_not_take_part_are_not_marked_and_take_no_mark_away():
    assert column("9.0", "1.0", "2.0", compared=[False, True, True]) == ["", "second", "best"]


def test_faults_are_named():
    cells = pd.DataFrame({"method": ["a"], "SCS ↑": ["1"]})
    with pytest.raises(ValueError, match="within: found 'model'; allowed: method, SCS ↑"):
        best_and_second(cells, within="model")
    with pytest.raises(ValueError, match="compared: found 2 rows; allowed: 1"):
        best_and_second(cells, compared=[True, True])
    with pytest.raises(ValueError, match=r"marks: found \(1, 1\); allowed: \(1, 2\)"):
        MarkedTable(cells, cells[["method"]])


def test_against_sorting():
    """A slow reading of the rule on drawn columns."""
    draw = random.Random(0)
    for _ in range(200):
        values = [draw.choice([None, *range(5)]) for _ in range(draw.randint(1, 6))]
        cells = ["" if value is None else f"{value:.2f} ± 1.00" for value in values]
        better = sorted({value for value in values if value is not None}, reverse=True)
        mark_of_value = {}
        if len(better) > 1:
            mark_of_value = {better[0]: "best", better[1]: "second"}
        assert column(*cells) == [mark_of_value.get(value, "") for value in values], cells


def test_files_carry_the_marks_and_csv_stays_plain(tmp_path):
    wide = pd.concat(
        {
            "measured": pd.DataFrame({"SCS ↑": ["2.00 ± 0.10", "1.00"]}),
            "published, X": pd.DataFrame({"SCS ↑": ["3.00", ""]}),
        },
        axis=1,
    )
    wide.insert(0, ("", "method"), ["a_b", "*c*"])
    table = best_and_second(wide)
    write_tables(tmp_path, {"tab:main": table}, {"tab:main": "Said."})
    latex, markdown = ((tmp_path / f"tab-main.{kind}").read_text() for kind in ("tex", "md"))
    assert r"a\_b & \textbf{2.00 $\pm$ 0.10} & 3.00" in latex
    assert r"\textit{1.00}" in latex and r" & measured & published, X" in latex
    assert "| **2.00 ± 0.10** | 3.00 |" in markdown and r"| \*c\* | *1.00* |  |" in markdown
    again = stored_table(tmp_path, "tab:main")
    assert (
        list(again) == flat_headings(wide) == ["method", "measured, SCS ↑", "published, X, SCS ↑"]
    )
    assert again.iloc[1].tolist() == ["*c*", "1.00", ""]


def test_text_cannot_become_a_command():
    odd = pd.DataFrame({"SCS ↑": ["2 \ue000\ue002 \\input{x}", "1 **bold**"]})
    marked = best_and_second(odd)
    assert r"\textbf{2  \textbackslash input\{x\}}" in to_latex(marked)
    assert r"*1 \*\*bold\*\**" in to_markdown(marked)


def test_a_plain_table_is_written_as_before():
    plain = pd.DataFrame({"method": ["a"], "SCS ↑": [1.5]})
    assert to_markdown(plain).splitlines()[2] == "| a | 1.50 |"
    assert "a & 1.50" in to_latex(plain)


def test_a_table_that_is_not_there_is_named(tmp_path):
    write_tables(tmp_path, {"one": pd.DataFrame({"a": ["1"]})})
    with pytest.raises(
        FileNotFoundError, match="two.csv: found no table with this name; allowed: one"
    ):
        stored_table(tmp_path, "two")


@pytest.mark.parametrize("cell", ["", "not run", "NA", "nan", "007", "1.50"])
def test_cells_are_read_as_the_text_they_were(tmp_path, cell):
    write_tables(tmp_path, {"one": pd.DataFrame({"a": [cell, "x"]})})
    assert stored_table(tmp_path, "one")["a"].tolist() == [cell, "x"]


def test_a_table_that_nobody_prints_is_written_as_csv_alone(tmp_path):
    short = pd.DataFrame({"value": range(LONGEST_PRINTED)})
    long = pd.DataFrame({"value": range(LONGEST_PRINTED + 1)})
    files = write_tables(tmp_path, {"short": short, "long": long})
    names = {file.name for file in files}
    assert names == {"short.csv", "short.tex", "short.md", "long.csv"}
    assert len((tmp_path / "long.csv").read_text().splitlines()) == len(long) + 1
