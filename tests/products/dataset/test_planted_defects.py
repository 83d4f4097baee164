"""Sound rows pass, spoiled rows are caught, and the table of the first chapter says so."""

import json
import random
from pathlib import Path

import pytest
from invented_rows import invented_examples
from planted_defects import DEFECTS, alarm_table, catch_rate, plant

from memcalib.products.dataset.lint import LINTS
from memcalib.products.micro.world import make_examples
from memcalib.problem import Atom, Block, Example, check_example, sample_records

CHAPTER = Path(__file__).parents[3] / "nbs" / "01_construction.ipynb"
SOUND_SETS = {
    "shipped": sample_records(),
    "micro": make_examples("short", 40, seed=21) + make_examples("long", 40, seed=21),
    "invented": invented_examples(180, seed=21),
}


@pytest.mark.parametrize("name", SOUND_SETS)
def test_at_most_one_sound_row_in_a_hundred_has_an_error(name):
    alarms = alarm_table({name: SOUND_SETS[name]})
    assert alarms.loc["any error", name] <= 1


def test_sound_rows_are_valid_and_reproducible():
    rows = invented_examples(40, seed=3)
    assert rows == invented_examples(60, seed=3)[:40]
    assert rows != invented_examples(40, seed=4)
    for row in rows:
        assert check_example(row.model_dump(mode="json", exclude_none=True)) == []
        assert any(atom.ideal for atom in row.atoms)
        assert all(atom.evidence in row.raw_query for atom in row.atoms)
        assert "{" not in row.to_json().replace('{"', "").replace("[{", "")
    assert len({row.id for row in rows}) == 40
    assert len({row.domain for row in rows}) == 3


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_is_caught_by_its_check(name):
    counts = [catch_rate(rows, name, 50, seed=5) for rows in SOUND_SETS.values()]
    planted = sum(count for count, _ in counts)
    caught = sum(count for _, count in counts)
    assert planted >= 50, counts
    assert caught >= 0.95 * planted, counts


def test_every_check_has_a_defect_but_two():
    checks_with_defect = {planted.check for planted in DEFECTS.values()}
    assert len(DEFECTS) == 47
    assert checks_with_defect <= set(LINTS)
    assert set(LINTS) - checks_with_defect == {"all_ignore", "unique_ids"}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_row_differs_and_the_original_stays(name):
    rng = random.Random(name)
    rows = SOUND_SETS["invented"][:12]
    before = [row.to_json() for row in rows]
    spoiled_rows = [plant(row, name, rng) for row in rows]
    assert [row.to_json() for row in rows] == before
    assert any(spoiled_rows)
    for spoiled, original in zip(spoiled_rows, before, strict=True):
        assert spoiled is None or spoiled.to_json() != original


def test_planting_is_reproducible_and_unknown_defects_are_refused():
    record = sample_records()[4]
    first = plant(record, "swapped_rubrics", random.Random(7))
    assert plant(record, "swapped_rubrics", random.Random(7)) == first
    with pytest.raises(ValueError, match="typo.*swapped_rubrics"):
        plant(record, "typo", random.Random(0))


@pytest.mark.parametrize(
    "name",
    [
        "swapped_rubrics",
        "dropped_atom",
        "changed_number",
        "swapped_order",
        "misquoted_evidence",
        "other_parent",
    ],
)
def test_a_defect_that_does_not_fit_is_not_planted(name):
    text = "The user owns a green kayak."
    atom = Atom(atom_id="p1_a1", parent_memory_id="m1", text=text, ideal="A")
    block = Block(
        parent_memory_id="m1", memory_text=text, atomic_concat_text=text, atom_ids=["p1_a1"]
    )
    bare = Example(id="e", domain="general", question="What is good?", blocks=[block], atoms=[atom])
    assert plant(bare, name, random.Random(0)) is None


def chapter_table():
    """The rows of the chapter's table: defect, what is planted, planted, caught,
    sound rows flagged.
    """
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    [text] = [text for text in texts if text.startswith("## What the checks catch")]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[field.strip() for field in line.strip("|").split("|")] for line in lines[1:]]


def test_the_first_chapter_states_what_is_counted():
    sound = invented_examples(60)
    alarms = alarm_table({"sound": sound})["sound"]
    counted = []
    for name, *_ in chapter_table():
        planted, caught = catch_rate(sound, name, 25)
        flagged = round(alarms[DEFECTS[name].check])
        counted.append([name, DEFECTS[name].description, str(planted), str(caught), str(flagged)])
    assert chapter_table() == counted
    assert sum(int(row[3]) for row in counted) == 374
    assert sum(int(row[2]) for row in counted) == 375
