"""From a plan of real answers to their labels: what runs wrote, what readers see, what two readings
make of it.
"""

import json

import pytest

from memcalib.problem import Example, Level
from memcalib.products.exam.real_answers import check_real_answer, plan_real_answers
from tools import starter_real as x

EXAMPLES = {
    f"e{number}": Example.of(
        f"How do I get to town {number}?",
        {"The user has no car.": "C", "The user likes rain.": "A"},
        id=f"e{number}",
    )
    for number in range(4)
}
CAR, RAIN = EXAMPLES["e0"].levels


@pytest.fixture
def folder(tmp_path):
    """A plan for four records and two runs, with answers."""
    plan = plan_real_answers([(name, CAR) for name in EXAMPLES], EXAMPLES, 2)
    lines = [planned.to_json() for planned in plan]
    (tmp_path / "plan.jsonl").write_text("\n".join(lines))
    for run in (1, 2):
        rows = []
        for planned in plan:
            text = "Drive there." if run in planned.without else "Take the bus at nine."
            rows.append({"item": planned.item, "answer": f"{planned.example_id}.{run}: {text}"})
        (tmp_path / f"answers_{run}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path, plan


def readings(folder, answers, *changes):
    """Two readers who find the bus wherever it is; `changes` edit what they say of an answer."""
    key = json.loads((folder / "key.json").read_text())
    removed = {answer.answer_id: answer.removed for answer in answers}
    files = []
    for number in (0, 1):
        rows = []
        for item, entry in key.items():
            row = {"item": item, "levels": {}, "quotes": {}}
            if not removed[entry["answer_id"]]:
                row |= {"levels": {CAR: "C"}, "quotes": {CAR: ["Take the bus"]}}
            for reader, answer_id, change in changes:
                if reader == number and answer_id == entry["answer_id"]:
                    row |= change
            rows.append(row)
        file = folder / f"reader{number}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows))
        files.append(file)
    return files


def test_what_readers_see_tells_neither_atom_nor_run_and_every_answer_is_in_one_half(folder):
    path, plan = folder
    answers = x.written_answers(path, plan)
    x.write_sheets(path, answers, EXAMPLES, 1)
    key = json.loads((path / "key.json").read_text())
    halves = []
    for number in (1, 2):
        text = (path / f"half_{number}.jsonl").read_text()
        halves.append([json.loads(line) for line in text.splitlines()])
        assert "real_" not in text and "u_star" not in text and "removed" not in text
    assert len(key) == 8 and [len(half) for half in halves] == [4, 4]
    for half in halves:
        shown = [key[row["item"]]["answer_id"] for row in half]
        assert {answer_id[-1] for answer_id in shown} == {"1", "2"}
        assert len({answer_id[:-2] for answer_id in shown}) == 4
        atoms = [atom["text"] for row in half for block in row["memory"] for atom in block]
        assert atoms.count("The user has no car.") == 4


def test_a_level_on_which_both_agree_is_the_label_and_any_other_is_disputed(folder):
    path, plan = folder
    answers = x.written_answers(path, plan)
    x.write_sheets(path, answers, EXAMPLES, 1)
    changes = [
        (1, "real_001_2", {"levels": {CAR: "B"}}),
        (1, "real_002_2", {"levels": {CAR: "C"}, "quotes": {CAR: ["Drive there."]}}),
        (0, "real_003_2", {"levels": {CAR: "C", RAIN: "B"}, "quotes": {CAR: ["the bus"]}}),
    ]
    files = readings(path, answers, *changes)
    labelled, read = x.labelled(answers, EXAMPLES, path / "key.json", files)
    done = {answer.answer_id: answer for answer in labelled}
    labels = {name: {la.atom_id: la for la in a.labels} for name, a in done.items()}
    assert labels["real_001_2"][CAR].disputed and labels["real_001_2"][CAR].actual == Level.BOUND
    assert labels["real_002_2"][CAR].disputed and labels["real_002_2"][CAR].actual == Level.IGNORE
    assert labels["real_003_2"][RAIN].disputed
    assert labels["real_004_1"][CAR].actual == Level.CONTROL
    assert labels["real_004_1"][CAR].quotes == ["Take the bus"]
    assert sum(la.disputed for by_atom in labels.values() for la in by_atom.values()) == 3
    for answer in done.values():
        assert not check_real_answer(answer, EXAMPLES[answer.example_id])
    table = x.agreement_table(labelled, read).set_index("atoms")
    assert table.loc["all", "number"] == 16 and table.loc["all", "CB"] == 1
    assert table.loc["all", "alike, %"] == round(100 * 13 / 16, 1)
    assert table.loc["tested, not in the memory", ["AA", "AC"]].tolist() == [3, 1]
    assert table.loc["used by a reader", "number"] == 6


def test_a_use_without_words_of_the_answer_and_an_answer_read_once_are_refused(folder):
    path, plan = folder
    answers = x.written_answers(path, plan)
    x.write_sheets(path, answers, EXAMPLES, 1)
    wrong = {"quotes": {CAR: ["Take a train"]}}
    files = readings(path, answers, (0, "real_001_2", wrong), (1, "real_001_2", wrong))
    with pytest.raises(SystemExit, match="real_001_2 .*no quote"):
        x.labelled(answers, EXAMPLES, path / "key.json", files)
    with pytest.raises(SystemExit, match="found 1 readings; allowed: two"):
        x.labelled(answers, EXAMPLES, path / "key.json", files[:1])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "real_004: found 0 times"),
        (json.dumps({"item": "real_009", "answer": "x"}), "real_009: not in the plan"),
        (json.dumps({"item": "real_004", "answer": " "}), "real_004: not in the plan, or without"),
    ],
)
def test_a_missing_empty_or_unknown_answer_is_named(folder, line, named):
    path, plan = folder
    file = path / "answers_2.jsonl"
    kept = file.read_text().splitlines()[:3]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(SystemExit, match=named):
        x.written_answers(path, plan)
