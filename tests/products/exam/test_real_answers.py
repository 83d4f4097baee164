"""Plans and files of real answers, and what they say of records and judges."""

import json

import pytest

from memcalib.io.records import DataError
from memcalib.problem import Example, Level, judgment_for
from memcalib.products.exam import real_answers as x
from memcalib.products.exam.exam import exam_frame


def example(number: int) -> Example:
    return Example.of(
        f"Which way do I take on day {number}?",
        {"The user has no car.": "C", "The user likes rain.": "A"},
        {"The bus is full on Mondays.": "B"},
        id=f"e{number}",
    )


EXAMPLES = {e.id: e for e in (example(n) for n in range(4))}
TESTED = [(e.id, e.atoms[0].atom_id) for e in EXAMPLES.values()]


def answer(example_id="e0", run=1, removed=False, level="C", **changes):
    atoms = EXAMPLES[example_id].atoms
    labels = [{"atom_id": atom.atom_id, "actual": "A"} for atom in atoms]
    labels[0] |= {"actual": level, "quotes": ["bus"] if level != "A" else []}
    row = {"answer_id": f"{example_id}_{run}", "example_id": example_id, "kind": "real"}
    row |= {"run": run, "tested": atoms[0].atom_id, "removed": removed, "labels": labels}
    return row | {"response": f"Take the bus, run {run}."} | changes


def loaded(rows, tmp_path):
    file = tmp_path / "real.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return x.load_real_answers(file, EXAMPLES.values())


@pytest.mark.parametrize("runs", [2, 6])
def test_every_run_answers_each_record_once_and_half_of_them_without_the_atom(runs):
    plan = x.plan_real_answers(TESTED, EXAMPLES, runs)
    for planned in plan:
        assert len(planned.without) == runs // 2
    for run in range(1, runs + 1):
        prompts = x.real_prompts(plan, EXAMPLES, run)
        assert len(prompts) == len({prompt["item"] for prompt in prompts}) == len(TESTED)
        without = [EXAMPLES[p.example_id].atoms[0].text for p in plan if run in p.without]
        assert len(without) == len(TESTED) // 2
        texts = "\n".join(prompt["messages"][-1]["content"] for prompt in prompts)
        assert texts.count("The user has no car.") == len(TESTED) - len(without)


def test_the_two_prompts_differ_in_the_sentence_of_the_atom_alone():
    plan = x.plan_real_answers(TESTED[:1], EXAMPLES, 2)
    cut, whole = (x.real_prompts(plan, EXAMPLES, run)[0]["messages"] for run in (1, 2))
    assert cut[:-1] == whole[:-1]
    assert whole[-1]["content"].replace("The user has no car. ", "") == cut[-1]["content"]


@pytest.mark.parametrize(
    ("tested", "runs", "named"),
    [
        (TESTED, 3, "found 3"),
        (TESTED, 0, "found 0"),
        ([("e0", EXAMPLES["e0"].atoms[1].atom_id)], 2, "Ignore"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tested, runs, named):
    with pytest.raises(ValueError, match=named):
        x.plan_real_answers(tested, EXAMPLES, runs)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([answer(removed=True)], "removed"),
        ([answer(tested="p9_a9", level="A")], "tested"),
        ([answer(tested=EXAMPLES["e0"].atoms[1].atom_id)], "Control"),
        ([answer(), answer(answer_id="other", response="Take a bus.")], "example_id and run"),
        ([answer(kind="over")], "kind"),
        ([answer(run=0)], "run"),
    ],
)
def test_bad_answers_are_named_with_file_and_line(rows, named, tmp_path):
    with pytest.raises(DataError) as error:
        loaded(rows, tmp_path)
    assert named in str(error.value) and "real.jsonl" in str(error.value)


def test_a_record_is_borne_out_where_every_run_says_so(tmp_path):
    rows = []
    for run in (1, 2):
        rows.append(answer("e0", run, False, "C"))
        rows.append(answer("e0", run + 2, True, "A"))
        rows.append(answer("e1", run, False, "C" if run == 1 else "B"))
        rows.append(answer("e1", run + 2, True, "A"))
        disputed = answer("e2", run + 2, True, "A")
        disputed["labels"][0]["disputed"] = True
        rows += [answer("e2", run, False, "C"), disputed]
    table = x.certificates(loaded(rows, tmp_path), EXAMPLES.values()).set_index("record")
    assert table.loc["e0", ["decides", "repeats"]].tolist() == [True, True]
    assert table.loc["e1", "with the atom"] == "C B" and not table.loc["e1", "decides"]
    assert table.loc["e2", "without it"] == "? ?" and not table.loc["e2", "repeats"]
    assert table.loc["e2", "decides"]


def test_a_smaller_sample_has_every_record_before_a_second_answer_of_any(tmp_path):
    rows = [answer(e, r, r > 1, "A" if r > 1 else "C") for e in ("e0", "e1") for r in (1, 2, 3)]
    answers = loaded(rows, tmp_path)
    chosen = x.real_items(answers, EXAMPLES.values(), 4)
    assert {(i.answer.example_id, i.answer.removed) for i in chosen} == {
        (e, removed) for e in ("e0", "e1") for removed in (False, True)
    }
    whole = x.real_items(answers, EXAMPLES.values())
    assert len({i.key for i in whole}) == 6 and chosen == whole[:4]


def test_shares_of_a_judge_leave_out_what_is_disputed_or_unread(tmp_path):
    rows = [
        answer("e0", 1),
        answer("e0", 2, True, "A"),
        answer("e1", 1),
        answer("e1", 2, True, "A"),
    ]
    rows[3]["labels"][0]["disputed"] = True
    answers = loaded(rows, tmp_path)
    items = x.real_items(answers, EXAMPLES.values())
    judgments = []
    for item in items:
        levels = dict(item.example.levels)
        if item.answer.answer_id == "e1_1":
            levels[item.answer.tested] = None
        judgment = judgment_for(item.example, levels, condition="plain")
        judgments.append(judgment.model_copy(update={"sample": item.number}))
    numbers = x.real_numbers(answers, exam_frame(items, judgments))
    assert numbers["answers"] == 4 and numbers["unread"] == 1
    assert (numbers["used"], numbers["used_atoms"]) == (100, 1)
    assert (numbers["false_traces"], numbers["false_traces_atoms"]) == (100, 1)
    assert numbers["tested_atoms"] == 2 and numbers["tested"] == 50
    assert x.real_numbers(answers, exam_frame([], [])) is None


def test_a_removed_atom_has_no_level_but_ignore(tmp_path):
    answers = loaded([answer("e0", 2, True, "A")], tmp_path)
    assert answers[0].tested_level == Level.IGNORE
