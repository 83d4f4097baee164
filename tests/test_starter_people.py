"""The sheet by which people label levels of the starter set: what is sent tells no level, what
comes back is read line by line.
"""

import csv

import pytest

from memcalib.problem import load_examples
from tools.starter_people import (
    COLUMNS,
    agreement_table,
    drawn_atoms,
    read_sheet,
    write_sheet,
)

EXAMPLES = load_examples("starter")


def filled(folder, name, change=None, delimiter=","):
    """The sheet filled with the written levels; `change` edits the rows."""
    rows = []
    for example, atoms in drawn_atoms(EXAMPLES, 300):
        for atom in atoms:
            rows.append([str(len(rows) + 1), example.id, atom.text, atom.ideal.wire, "a\nnote"])
    if change:
        change(rows)
    path = folder / name
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([COLUMNS, *rows])
    return path


def test_what_is_sent_has_all_memories_and_tells_no_level(tmp_path):
    assert write_sheet(EXAMPLES, tmp_path) == 300
    with (tmp_path / "sheet.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300 and not any(row["level"] or row["note"] for row in rows)
    records = (tmp_path / "records.md").read_text(encoding="utf-8")
    for example, atoms in drawn_atoms(EXAMPLES, 300):
        assert records.count(f"## Record {example.id}\n") == 1
        for atom in example.atoms:
            assert atom.text in records
        for atom in atoms:
            expected = (atom.usage_rubric or {}).get("expected_answer_behavior", atom.atom_id)
            assert str(expected) not in records and atom.atom_id not in records
    assert "300 of these memories" in (tmp_path / "instructions.md").read_text(encoding="utf-8")
    subsets = [example.model_extra["subset"] for example, _ in drawn_atoms(EXAMPLES, 300)]
    assert {subsets.count(subset) for subset in subsets} == {12}


def test_a_returned_sheet_is_compared_with_the_written_levels_and_with_others(tmp_path):
    def doubtful(rows):
        rows[0][3] = "?"
        for row in rows[1:31]:
            row[3] = {"A": "B", "B": "C", "C": "B"}[row[3]]

    files = [filled(tmp_path, "one.csv"), filled(tmp_path, "two.csv", doubtful, ";")]
    table = agreement_table(EXAMPLES, files, 300).set_index("levels")
    assert table.loc["one.csv: all", "alike, %"] == "100.0"
    assert table.loc["two.csv: all", "undecided"] == "1"
    assert table.loc["one.csv and two.csv", "alike, %"] == f"{100 * 269 / 299:.1f}"
    assert float(table.loc["two.csv: all", "alike or named, %"]) >= 100 * 269 / 299 - 0.1


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [
        (3, "", "sheet.csv:6: level: found ''; allowed: A, B, C, ?"),
        (3, "Bound", "sheet.csv:6: level: found 'Bound'"),
        (2, "Another memory.", "sheet.csv:6: memory: found starter_"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, column, value, named):
    def spoil(rows):
        rows[4][column] = value

    path = filled(tmp_path, "sheet.csv", spoil)
    sheet_atoms = [(e, atom) for e, atoms in drawn_atoms(EXAMPLES, 300) for atom in atoms]
    with pytest.raises(SystemExit) as error:
        read_sheet(path, sheet_atoms)
    assert named in str(error.value)


def test_a_sheet_with_lines_missing_is_named(tmp_path):
    path = filled(tmp_path, "sheet.csv", lambda rows: rows.pop())
    with pytest.raises(SystemExit, match="found 299 memories; allowed: 300"):
        agreement_table(EXAMPLES, [path], 300)
