"""`memcalib label` and `--target-labels`: from a run to an estimate without the judge's errors, and
files of labels that must not be used.
"""

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from memcalib.commands import cli, label
from memcalib.scoring.target_labels import load_target_labels
from memcalib.io.records import read_jsonl, write_jsonl
from memcalib.metrics import load_judgments, score
from memcalib.products.micro.world import exact_judge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import Example, Rollout

PLUGIN = '''
from memcalib.scoring.judge_runs import Judge
from memcalib.products.micro.world import exact_judge
from memcalib.problem import text_hash


class Careless(Judge):
    """Overlooks what two of ten atoms do."""

    name = "careless"

    def judge(self, example, response):
        exact = exact_judge(example, response)
        levels = {}
        for atom in exact.atoms:
            overlooked = int(text_hash(f"{response} {atom.atom_id}")[:8], 16) % 10 < 2
            levels[atom.atom_id] = 0 if overlooked else atom.actual
        return levels


careless = Careless()
'''


def call(*arguments):
    done = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    error = done.exception
    shown = repr(error) if error and not isinstance(error, SystemExit) else ""
    return done.exit_code, done.output + shown


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder with a run of 60 examples that a careless judge of one's own has judged, and the
    options that made it.
    """
    folder = tmp_path_factory.mktemp("label")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        (folder / "careless_judge.py").write_text(PLUGIN)
        from memcalib.products.micro.world import make_examples

        examples = make_examples("short", 60, seed=4)
        write_jsonl(folder / "data.jsonl", examples)
        with MicroServer(examples) as server:
            options = ["evaluate", "data.jsonl", "--model", "micro-model"]
            options += ["--base-url", server.base_url, "--judge", "careless_judge:careless"]
            options += ["--no-cache", "--out", "run", "--set", "sampling.seeds=[42]"]
            code, text = call(*options)
            assert code == 0, text
            yield folder, options


@pytest.fixture
def workplace(evaluated, tmp_path, monkeypatch):
    folder, options = evaluated
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path, options


def true_levels(folder):
    """The exact judge's level of each atom of each answer."""
    examples = {
        example.id: example for example in read_jsonl(folder / "run/examples.jsonl", Example)
    }
    levels = {}
    for rollout in read_jsonl(folder / "run/rollouts.jsonl", Rollout):
        judged = exact_judge(examples[rollout.example_id], rollout.response)
        for atom in judged.atoms:
            levels[*rollout.key[:-1], atom.atom_id] = atom.actual
    return levels


def filled(folder, name="labels.jsonl"):
    """The drawn rows with true levels, written back."""
    levels = true_levels(folder)
    rows = []
    for row in load_target_labels(folder / name).rows:
        level = levels[*row.answer_key, row.atom_id]
        rows.append(row.model_copy(update={"level": level, "labeller": "ana"}))
    return write_jsonl(folder / name, rows)


def test_from_a_run_to_an_estimate_in_terminal_page_and_json(workplace):
    folder, options = workplace
    code, text = call("label", "run")
    assert (
        code == 0 and "no help" in text and "± " in text and not (folder / "labels.jsonl").exists()
    )
    assert "then labels can help even less than no help says" in text
    code, text = call("label", "run", "--answers", 40, "--seed", 1)
    assert code == 0 and "labels.csv" in text
    rows = load_target_labels("labels.jsonl").rows
    assert {row.probability for row in rows} == {40 / 60} and all(row.answer_hash for row in rows)
    sheet = pd.read_csv("labels.csv", dtype=str, keep_default_na=False)
    levels = true_levels(folder)
    sheet["level"] = [levels[*row.answer_key, row.atom_id].wire for row in rows]
    sheet.to_csv("labels.csv", index=False)
    code, text = call("label", "run", "--sheet", "labels.csv", "--labeller", "ana")
    assert code == 0 and "40 of 40 drawn answers are labelled" in text
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 0, text
    assert "based on labels by ana for 40 answers drawn at random" in text
    row = json.loads((folder / "run/results.jsonl").read_text().splitlines()[0])
    estimate = row["prediction_powered"]["SCS"]
    careless = row["metrics"]["SCS"]["value"]
    judged = load_judgments("run/judgments.jsonl")
    judged = [judgment for judgment in judged if judgment.condition == "full_memory"]
    exact = []
    for judgment in judged:
        key = judgment.key[:-1]
        atoms = [a.model_copy(update={"actual": levels[*key, a.atom_id]}) for a in judgment.atoms]
        exact.append(judgment.model_copy(update={"atoms": atoms}))
    truth = score(exact, resamples=10)["SCS"].iloc[0]
    assert estimate["low"] <= truth <= estimate["high"] and abs(careless - truth) > 1
    page = (folder / "run/report.html").read_text()
    assert "prediction-powered estimate" in page and "ana" in page
    assert "prediction-powered estimate" in (folder / "run/model-card.md").read_text()
    # a report made later knows the labels, and so does the verb `score`
    code, _ = call("report", "run")
    assert code == 0 and "Prediction-powered" in (folder / "run/report.html").read_text()
    code, text = call("score", "run/judgments.jsonl", "--labels", "labels.jsonl", "--json")
    table = json.loads(text)["prediction-powered estimate"]
    assert table[0]["prediction_powered"] == pytest.approx(estimate["value"], abs=1e-3)


def test_a_second_judge_labels_the_draw_and_the_report_says_whose_errors_stay(workplace):
    _, options = workplace
    call("label", "run", "--answers", 30)
    code, text = call("label", "run", "--judge", "micro-exact")
    assert code == 0 and "30 of 30" in text, text
    assert load_target_labels("labels.jsonl").rows[0].labeller_kind == "judge"
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 0 and "It corrects towards " in text and "whose own errors remain" in text
    code, text = call("label", "run", "--answers", 30)
    assert code == 1 and "may contain labels" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {"answer_hash": "0" * 16}, "the answer of the run"),
        (lambda row: {"example_hash": "0" * 16}, "labels of this data set"),
        (lambda row: {"probability": None}, "chosen by hand would bias"),
        (lambda row: {"model": "another"}, "an answer of the run"),
        (lambda row: {"level": None}, "found 30 drawn answers, the first of which is not labelled"),
    ],
)
def test_labels_that_do_not_fit_stop_the_command_and_change_nothing(workplace, change, words):
    folder, options = workplace
    call("label", "run", "--answers", 30)
    filled(folder)
    rows = load_target_labels("labels.jsonl").rows
    write_jsonl("labels.jsonl", [row.model_copy(update=change(row)) for row in rows])
    before = (folder / "run/results.jsonl").read_text()
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 1 and words in text, text
    assert (folder / "run/results.jsonl").read_text() == before
    assert not (folder / "run/target-labels.jsonl").exists()


def test_labels_in_the_folder_that_no_longer_fit_are_left_out_with_a_note(workplace):
    folder, _ = workplace
    call("label", "run", "--answers", 30)
    filled(folder)
    rows = load_target_labels("labels.jsonl").rows
    other = [row.model_copy(update={"example_hash": "0" * 16}) for row in rows]
    write_jsonl("run/target-labels.jsonl", other)
    code, _ = call("report", "run")
    page = (folder / "run/report.html").read_text()
    assert code == 0 and "target-labels.jsonl was not used" in page
    row = json.loads((folder / "run/results.jsonl").read_text().splitlines()[0])
    assert row["prediction_powered"] is None and np.isfinite(row["metrics"]["SCS"]["value"])


@pytest.fixture
def half_judged(workplace):
    """The run as it was when 30 of its 60 answers with memory had been judged."""
    folder, options = workplace
    whole = (folder / "run/judgments.jsonl").read_text().splitlines(keepends=True)
    with_memory = [line for line in whole if json.loads(line)["condition"] == "full_memory"]
    (folder / "run/judgments.jsonl").write_text("".join(with_memory[:30]))

    def finish():
        (folder / "run/judgments.jsonl").write_text("".join(whole))

    return folder, options, finish


def test_a_draw_from_an_unfinished_run_says_so_and_is_carried_on(half_judged):
    """The labels of a person are not lost when the run comes to its end."""
    folder, options, finish = half_judged
    draw = ["label", "run", "--answers", "20", "--out", "labels.jsonl"]
    code, text = call(*draw)
    assert code == 0 and "the 30 of 60 answers that are judged so far" in text, text
    filled(folder)
    given = {(r.answer_key, r.atom_id): r.level for r in load_target_labels("labels.jsonl").rows}
    finish()
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 1 and "memcalib spot-check" in text
    code, text = call(*draw, "--seed", "1")
    assert code == 1 and "the seed with which labels.jsonl was drawn" in text
    code, text = call(*draw)
    assert code == 0 and "carried on" in text and "labels-2.csv" in text
    assert "not finished" not in text
    assert "20 of which cannot be used yet" in text
    rows = load_target_labels("labels.jsonl").rows
    kept = {(r.answer_key, r.atom_id): r.level for r in rows if r.level is not None}
    assert kept == given
    drawn = {row.answer_key for row in rows}
    assert 20 < len(drawn) < 60 and {round(len(drawn) / r.probability) for r in rows} == {60}
    to_fill = pd.read_csv("labels-2.csv")
    assert len(to_fill) == sum(row.level is None for row in rows)
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 1, "answers are missing that were drawn before labelled ones"
    # the first lines of the new sheet are enough, and the printed command works
    levels = true_levels(folder)
    wanted = [row for row in rows if row.level is None]
    first_open = set(list(dict.fromkeys(row.answer_key for row in wanted))[:20])
    to_fill = pd.read_csv("labels-2.csv", dtype=str, keep_default_na=False)
    to_fill["level"] = [
        levels[*row.answer_key, row.atom_id].wire if row.answer_key in first_open else ""
        for row in wanted
    ]
    to_fill.to_csv("labels-2.csv", index=False)
    code, text = call("label", "run", "--sheet", "labels-2.csv", "--labeller", "ana")
    assert code == 0 and "40 of" in text and "to use the others, repeat your evaluate" in text
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 0 and "Estimated from labels of a random sample" in text, text
    page = (folder / "run/report.html").read_text()
    assert "cannot be used yet, because an answer that was drawn earlier has no labels" in page
    write_jsonl(
        "labels.jsonl",
        [
            row.model_copy(
                update={"level": levels[*row.answer_key, row.atom_id], "labeller": "ana"}
            )
            for row in rows
        ],
    )
    code, text = call(*options, "--target-labels", "labels.jsonl")
    assert code == 0 and "Estimated from labels of a random sample" in text, text


def test_a_draw_of_a_finished_run_is_not_drawn_again(workplace):
    draw = ["label", "run", "--answers", "8", "--out", "labels.jsonl"]
    code, text = call(*draw)
    assert code == 0 and "not finished" not in text
    code, text = call(*draw)
    assert code == 1 and "may contain labels" in text


def test_an_extended_draw_is_the_draw_of_all_answers(workplace):
    """The same answers as if all had been there from the beginning, whatever came first."""
    from memcalib.scoring.target_labels import draw_answers, extend_draw

    folder, _ = workplace
    judgments = [
        judgment
        for judgment in load_judgments(folder / "run/judgments.jsonl")
        if judgment.condition == "full_memory"
    ]
    for seed in range(5):
        early = judgments[seed::3]
        labels = load_target_labels(draw_answers(early, 6, seed))
        extended = extend_draw(labels, judgments, seed)
        keys = list(dict.fromkeys(row.answer_key for row in extended))
        at_once = draw_answers(judgments, len(keys), seed)
        assert [row.answer_key for row in at_once] == [row.answer_key for row in extended]
        assert {row.probability for row in extended} == {len(keys) / len(judgments)}
        assert {row.answer_key for row in labels.rows} <= set(keys)


def test_a_second_sheet_takes_no_level_of_somebody_else_away(workplace):
    """The second of two who fill the same sheet is told, and nothing of the first is lost."""
    assert call("label", "run", "--answers", 6, "--seed", 1)[0] == 0
    sheet = pd.read_csv("labels.csv", dtype=str, keep_default_na=False)
    for name, level in (("ana", "A"), ("ben", "C")):
        sheet.assign(level=level).to_csv(f"{name}.csv", index=False)
    label.fill_from_sheet("run", "labels.jsonl", "ana.csv", "ana")
    before = Path("labels.jsonl").read_bytes()
    count = len(sheet)
    with pytest.raises(ValueError, match=f"levels by ben for {count} atoms that ana has labelled"):
        label.fill_from_sheet("run", "labels.jsonl", "ben.csv", "ben")
    assert Path("labels.jsonl").read_bytes() == before
    sheet.assign(level="B").to_csv("ana.csv", index=False)
    rows = label.fill_from_sheet("run", "labels.jsonl", "ana.csv", "ana")
    assert {row.level.wire for row in rows} == {"B"}
    reading = label.SecondReading(judge="micro-exact")
    rows = label.fill_from_judge("run", "labels.jsonl", reading)
    assert {row.labeller for row in rows} == {"ana"} and {row.level.wire for row in rows} == {"B"}


def test_a_person_who_labels_after_a_judge_counts_as_a_person(workplace):
    """So that neither another person nor a judge takes the levels away."""
    assert call("label", "run", "--answers", 12, "--seed", 1)[0] == 0
    sheet = pd.read_csv("labels.csv", dtype=str, keep_default_na=False)
    reading = label.SecondReading(judge="micro-exact")
    rows = label.fill_from_judge("run", "labels.jsonl", reading)
    assert {row.labeller_kind for row in rows} == {"judge"}
    sheet.assign(level="B").to_csv("ana.csv", index=False)
    rows = label.fill_from_sheet("run", "labels.jsonl", "ana.csv", "ana")
    assert {(row.labeller, row.labeller_kind) for row in rows} == {("ana", "person")}
    with pytest.raises(ValueError, match="that ana has labelled"):
        label.fill_from_sheet("run", "labels.jsonl", "ana.csv", "ben")
    rows = label.fill_from_judge("run", "labels.jsonl", reading)
    assert {(row.labeller, row.level.wire) for row in rows} == {("ana", "B")}


def test_labels_of_too_few_questions_are_not_called_usable(workplace):
    assert call("label", "run", "--answers", 6, "--seed", 1)[0] == 0
    filled(Path())
    text = label.labels_text("run", load_target_labels("labels.jsonl").rows, "labels.jsonl")
    assert "6 of 6 drawn answers are labelled" in text and "repeat your evaluate" not in text
    assert "at least 10 questions" in text


def test_two_labellers_who_give_back_their_sheets_at_once_lose_nothing(workplace, monkeypatch):
    assert call("label", "run", "--answers", 6, "--seed", 1)[0] == 0
    sheet = pd.read_csv("labels.csv", dtype=str, keep_default_na=False)
    for name, first in (("ana", 0), ("ben", 1)):
        part = sheet.copy()
        part.loc[part.index % 2 == first, "level"] = "B"
        part.to_csv(f"{name}.csv", index=False)

    def slowly(path, rows):
        time.sleep(0.3)
        return write_jsonl(path, rows)

    monkeypatch.setattr(label, "write_jsonl", slowly)
    work = [
        threading.Thread(
            target=label.fill_from_sheet, args=("run", "labels.jsonl", f"{name}.csv", name)
        )
        for name in ("ana", "ben")
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    rows = load_target_labels("labels.jsonl").rows
    assert len(rows) == len(sheet) and {row.labeller for row in rows} == {"ana", "ben"}
    assert all(row.level is not None for row in rows)
