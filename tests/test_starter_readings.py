"""Blind readings beside labels, and what keeps a new pair out of the starter set."""

import json

import pytest

from memcalib.io.records import DataError
from memcalib.problem import Example, text_hash
from memcalib.products.exam.minimal_pairs import MinimalPair, check_pair, pair_answers
from tools import starter_add_pairs as add
from tools import starter_readings as x

EXAMPLE = Example.of(
    "How do I get to the old town?",
    {"The user walks with a stick.": "B", "The user's brother collects tickets.": "A"},
    {"The user has no phone with them.": "C"},
    id="station",
)
STICK, BROTHER, PHONE = EXAMPLE.levels


def pair(pair_id="p1", **changes) -> MinimalPair:
    row = {
        "pair_id": pair_id,
        "example_id": "station",
        "form": "silent_control",
        "response": f"Way {pair_id}: follow the signs. Tram 4 goes there. No app is needed.",
        "edit": {
            "atom_id": STICK,
            "passage": "Tram 4 goes there.",
            "replacement": "There are benches at each corner.",
            "from": "A",
            "to": "B",
            "to_stance": "follows",
            "to_quotes": ["benches at each corner"],
        },
        "labels": [
            {
                "atom_id": PHONE,
                "actual": "C",
                "quotes": ["No app is needed"],
                "stance": "follows",
            }
        ],
        "unlisted": "A",
    }
    return MinimalPair.model_validate(row | changes)


def written(tmp_path, pairs, *readings, hashed=False):
    """A key and files of readings: {pair id and side: levels}, a file for each."""
    key = {}
    for each in pairs:
        for side, text in zip(("before", "after"), each.responses, strict=True):
            entry = {"pair_id": each.pair_id, "side": side}
            key[f"{each.pair_id}:{side}"] = entry | ({"hash": text_hash(text)} if hashed else {})
    (tmp_path / "key.json").write_text(json.dumps(key))
    files = []
    for number, reading in enumerate(readings):
        file = tmp_path / f"reader{number}.jsonl"
        rows = [{"item": item, "levels": levels} for item, levels in reading.items()]
        file.write_text("\n".join(json.dumps(row) for row in rows))
        files.append(file)
    return [tmp_path / "key.json"], files


def read(pairs, key, files):
    answers = [answer for each in pairs for answer in pair_answers(each, EXAMPLE)]
    return x.read_answers(answers, key, files)


RIGHT = {"p1:before": {PHONE: "C"}, "p1:after": {PHONE: "C", STICK: "B"}}


def test_pairs_are_right_where_the_edit_is_read_and_nothing_else_changes(tmp_path):
    pairs = [pair()]
    other = RIGHT | {"p1:after": {PHONE: "B", STICK: "B"}}
    missed = RIGHT | {"p1:after": {PHONE: "C"}}
    said = read(pairs, *written(tmp_path, pairs, RIGHT, other, missed))
    rows = x.pair_rows(pairs, {"station": EXAMPLE}, said)
    assert rows["changed"].tolist() == [True, True, False]
    assert rows["unchanged"].tolist() == [True, False, True]
    assert rows["right"].tolist() == [True, False, False]
    table = x.pairs_table(rows, "form")
    assert table["right, reading 1"].tolist() == ["100.0 (21 to 100)"]
    assert table["right in every reading"].tolist() == ["0.0 (0 to 79)"]


def test_disputed_atoms_count_neither_for_nor_against(tmp_path):
    row = json.loads(pair().to_json())
    row["labels"][0]["disputed"] = True
    pairs = [MinimalPair.model_validate(row)]
    wavering = {"p1:before": {PHONE: "B"}, "p1:after": {PHONE: "C", STICK: "B"}}
    said = read(pairs, *written(tmp_path, pairs, wavering))
    assert x.pair_rows(pairs, {"station": EXAMPLE}, said)["right"].tolist() == [True]
    assert PHONE not in set(x.atom_rows(said)["atom"])


def test_levels_read_are_counted_by_level_and_disagreements_are_listed(tmp_path):
    pairs = [pair()]
    missed = RIGHT | {"p1:after": {PHONE: "C"}}
    said = read(pairs, *written(tmp_path, pairs, RIGHT, missed))
    table = x.levels_table(x.atom_rows(said)).set_index("labelled")
    assert (
        table.loc["Bound", "as labelled, %"] == 50
        and table.loc["Control", "read Control, %"] == 100
    )
    assert table.loc["all", "atoms read"] == 12
    found = x.disagreements(said, {"station": EXAMPLE}, {"p1:after": STICK})
    assert [entry["answer"] for entry in found] == ["p1:after"]
    assert found[0]["atoms"][0]["read"] == ["B", "A"] and found[0]["atoms"][0]["edited"]
    lines = x.agreement_lines(x.atom_rows(said))
    assert "readings 1 and 2: 6 atoms, 83.3 % alike" in lines[-1]


@pytest.mark.parametrize(
    ("reading", "named"),
    [
        ({"p9:before": {}}, "p9:before"),
        ({"p1:before": {"p7_a7": "B"}}, "p7_a7"),
        ({"p1:before": {PHONE: "D"}}, "'D'"),
        ({"p1:before": ["C"]}, "levels"),
    ],
)
def test_a_reading_that_does_not_fit_is_named_with_its_line(reading, named, tmp_path):
    pairs = [pair()]
    with pytest.raises(DataError) as error:
        read(pairs, *written(tmp_path, pairs, RIGHT, reading))
    assert named in str(error.value) and "reader1.jsonl" in str(error.value)


def test_a_reading_of_an_answer_that_was_changed_since_does_not_count(tmp_path):
    pairs = [pair()]
    key, files = written(tmp_path, pairs, RIGHT, hashed=True)
    assert read(pairs, key, files).changed == 0
    corrected = [pair(response="Corrected: Tram 4 goes there. No app is needed.")]
    said = read(corrected, key, files)
    assert said.changed == 2 and not said.readings


def test_a_pair_of_two_equal_answers_is_refused():
    same = json.loads(pair().to_json())
    same["edit"]["replacement"] = "Tram 4  goes\nthere."
    found = add.text_faults(MinimalPair.model_validate(same))
    assert len(found) == 1 and "equal" in found[0]
    assert not add.text_faults(pair())


def test_an_edit_of_two_passages_is_refused():
    kept = " ".join(f"word{n}" for n in range(40))
    row = json.loads(pair().to_json())
    row["response"] = f"Tram 4 goes there. {kept} No app is needed at all."
    row["edit"]["passage"] = f"Tram 4 goes there. {kept} No app"
    row["edit"]["replacement"] = f"There are benches at each corner. {kept} No telephone"
    found = add.text_faults(MinimalPair.model_validate(row))
    assert len(found) == 1 and "41 words" in found[0] and "more than one passage" in found[0]
    row["edit"]["passage"] = f"Tram 4 goes there. {kept}"
    row["edit"]["replacement"] = f"There are benches at each corner. {kept}"
    assert not add.text_faults(MinimalPair.model_validate(row))


def test_a_pair_whose_unchanged_atom_differs_is_refused(tmp_path):
    pairs = [pair()]
    differs = RIGHT | {"p1:before": {PHONE: "B"}}
    said = read(pairs, *written(tmp_path, pairs, differs, differs))
    found = add.reading_faults(pairs[0], EXAMPLE, said)
    assert len(found) == 1 and PHONE in found[0] and "the same in both" in found[0]
    one_wavers = read(pairs, *written(tmp_path, pairs, differs, RIGHT))
    assert not add.reading_faults(pairs[0], EXAMPLE, one_wavers)
    labelled_twice = json.loads(pair().to_json())
    labelled_twice["labels"].append({"atom_id": STICK, "actual": "A"})
    faults = check_pair(MinimalPair.model_validate(labelled_twice), EXAMPLE)
    assert any("2 of" in str(fault) for fault in faults)


def test_a_pair_whose_edit_no_reader_sees_is_refused(tmp_path):
    pairs = [pair()]
    missed = RIGHT | {"p1:after": {PHONE: "C"}}
    said = read(pairs, *written(tmp_path, pairs, missed, missed))
    found = add.reading_faults(pairs[0], EXAMPLE, said)
    assert len(found) == 1 and "labelled B, found A by every reader" in found[0]


def test_texts_and_records_are_not_repeated_and_numbers_have_no_gap():
    pairs = [pair(f"p{n}") for n in range(5)]
    assert any("found 5 pairs" in fault for fault in add.repeated(pairs))
    copied = pair("p9", response=pairs[0].response)
    assert any(
        "p9: answer: found a text of p0" in fault for fault in add.repeated([pairs[0], copied])
    )
    numbers = [each.pair_id for each in add.renumbered(pairs, 401)]
    assert numbers == ["pair_401", "pair_402", "pair_403", "pair_404", "pair_405"]
