"""Levels that should not be trusted, and sheets of another folder: what `levels` and `evaluate`
say.
"""

import json
import shlex

import pytest
from command_line import run

from memcalib.products.memory_logs.levels import (
    LevelBook,
    LevelProposal,
    LevelsFile,
    items_to_settle,
    practice_levels,
)
from memcalib.evaluation.agreement import wilson
from memcalib.products.memory_logs.own_answers import alike_levels
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import Level

LEVELS = "ABC"
WARNING = "ideal levels of this log are Ignore"


def proposal(number: int, level: str, model: str = "m") -> LevelProposal:
    return LevelProposal(
        item=f"q{number}/m1_a1",
        example_id=f"q{number}",
        atom_id="m1_a1",
        question=f"What can I bake on day {number}?",
        memory="Is allergic to peanuts",
        first=level,
        second=level,
        model=model,
    )


def fill(folder, letters, name="sheet.csv"):
    """Decide the first items of a folder's sheet; those that follow stay open."""
    sheet = folder / name
    lines = sheet.read_text(encoding="utf-8-sig").splitlines()
    for number, letter in enumerate(letters, 1):
        item, rest = lines[number].split(",,", 1)
        lines[number] = f"{item},{letter},{rest}"
    sheet.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sheet


def test_the_error_rate_of_checked_levels_is_in_percent_once(tmp_path):
    """6 of 20 are wrong: 14.5 to 51.9 %, as Wilson's bounds of 0.3 with 20 pairs are."""
    levels = LevelsFile.write(tmp_path, [proposal(n, LEVELS[n % 3]) for n in range(30)])
    items = [line.split(",")[0] for line in (tmp_path / "sheet.csv").read_text().splitlines()[1:]]
    letters = []
    for position, item in enumerate(items):
        proposed = levels.proposals[item].first.wire
        others = [letter for letter in LEVELS if letter != proposed]
        letters.append(others[0] if position < 6 else proposed)
    assert levels.take_sheet(fill(tmp_path, letters), "anna") == 20
    wrong, checked, low, high = levels.error_rate()
    assert (wrong, checked) == (6, 20) and (low, high) == wilson(6, 20)
    assert low == pytest.approx(14.55, abs=0.05) and high == pytest.approx(51.9, abs=0.05)
    words = " ".join(levels.notes())
    assert "Of 20 agreed levels that a person drew and checked, 6 are wrong" in words
    assert "(95 % interval 14.5 to 51.9 %)" in words
    assert "the levels are unreliable: of the agreed ones at least 14.5 % are wrong" in words


@pytest.mark.parametrize(("wrong", "is_doubtful"), [(0, False), (2, False), (4, True)])
def test_only_an_error_rate_above_the_bound_is_a_warning(tmp_path, wrong, is_doubtful):
    """The lower bounds of 0, 2 and 4 of 20 are 0, 2.8 and 8.1 %."""
    levels = LevelsFile.write(tmp_path, [proposal(n, LEVELS[n % 3]) for n in range(30)])
    items = [line.split(",")[0] for line in (tmp_path / "sheet.csv").read_text().splitlines()[1:]]
    letters = [levels.proposals[item].first.wire for item in items]
    for position in range(wrong):
        letters[position] = "A" if letters[position] != "A" else "B"
    levels.take_sheet(fill(tmp_path, letters), "anna")
    assert any("unreliable" in note for note in levels.notes()) == is_doubtful


def test_levels_that_are_all_the_same_are_said_with_counts(tmp_path):
    assert alike_levels([Level.IGNORE] * 200).startswith(f"Warning: all 200 {WARNING}")
    assert alike_levels([Level.IGNORE] * 199 + [Level.BOUND]).startswith("Warning: 199 of 200")
    assert alike_levels([Level.IGNORE] * 197 + [Level.BOUND] * 3) == ""
    assert alike_levels([Level.IGNORE] * 9) == ""
    levels = LevelsFile.write(tmp_path, [proposal(n, "A", "micro-levels") for n in range(30)])
    [warning] = [note for note in levels.notes() if note.startswith("Warning")]
    assert f"all 30 {WARNING}" in warning and "micro-levels is for practice" in warning
    other = LevelsFile.write(tmp_path, [proposal(n, "A", "other") for n in range(30)])
    assert not any("micro-levels" in note for note in other.notes())


def test_a_sheet_beside_other_proposals_is_refused(tmp_path):
    rows = [proposal(n, LEVELS[n % 3]) for n in range(30)]
    mine = LevelsFile.write(tmp_path / "mine", rows)
    LevelsFile.write(tmp_path / "other", rows)
    sheet = fill(tmp_path / "other", "AAA")
    with pytest.raises(
        ValueError, match=r"found the sheet for the levels in .*other, not for .*mine"
    ):
        mine.take_sheet(sheet, "anna")
    assert not (tmp_path / "mine" / "settled.jsonl").exists()
    loose = tmp_path / "filled.csv"
    loose.write_text(fill(tmp_path / "mine", "AAA").read_text(), encoding="utf-8")
    assert mine.take_sheet(loose, "anna") == 3


def numbered(questions, start: int = 0) -> list[LevelProposal]:
    """Proposals for a log without ids, whose rows are named by their place."""
    rows = []
    for place, question in enumerate(questions, start):
        row = proposal(question, LEVELS[question % 3])
        changes = {"item": f"row-{place}/m1_a1", "example_id": f"row-{place}"}
        rows.append(row.model_copy(update=changes))
    return rows


def test_a_filled_sheet_is_never_overwritten(tmp_path):
    rows = [proposal(n, LEVELS[n % 3]) for n in range(30)]
    first = LevelsFile.write(tmp_path, rows)
    assert LevelsFile.write(tmp_path, rows).sheet == first.sheet == tmp_path / "sheet.csv"
    filled = fill(tmp_path, "AAAAA").read_bytes()
    grown = [proposal(n, LEVELS[n % 3]) for n in range(200)]
    for _ in range(2):
        levels = LevelsFile.write(tmp_path, grown)
        assert levels.sheet == tmp_path / "sheet-2.csv" and len(levels.left()) == 20
        assert (tmp_path / "sheet.csv").read_bytes() == filled
    assert levels.take_sheet(tmp_path / "sheet.csv", "anna") == 5
    assert len(levels.settled) == 5 and levels.unused == 0
    again = LevelsFile.write(tmp_path, grown)
    assert not {item.item for item in again.left()} & set(levels.settled)


def test_the_levels_of_a_second_person_do_not_replace_those_of_the_first(tmp_path):
    rows = [proposal(n, LEVELS[n % 3]) for n in range(30)]
    levels = LevelsFile.write(tmp_path, rows)
    sheet = fill(tmp_path, "A" * 20)
    assert levels.take_sheet(sheet, "anna") == 20
    before = levels.settled_file.read_bytes()
    sheet.write_text(sheet.read_text().replace("m1_a1,A,", "m1_a1,C,"))
    with pytest.raises(ValueError, match="levels by ben for 20 memories that anna has labelled"):
        levels.take_sheet(sheet, "ben")
    assert levels.settled_file.read_bytes() == before
    with pytest.raises(ValueError, match="another person has decided on all"):
        levels.book("ben")
    # the way on that the message names
    other = LevelsFile.write(tmp_path / "of ben", rows)
    copy = tmp_path / "of ben" / "filled.csv"
    copy.write_bytes(sheet.read_bytes())
    assert other.take_sheet(copy, "ben") == 20
    # somebody may change their own levels, and a page that was open all the time changes nothing
    assert levels.take_sheet(sheet, "anna") == 20
    with LevelBook(levels.settled_file, items_to_settle(rows), "ben") as book:
        book.put(next(iter(book.items)), Level.BOUND)
    assert {(row.labeller, row.level) for row in LevelsFile(tmp_path).settled.values()} == {
        ("anna", Level.CONTROL)
    }


def test_decisions_about_a_log_without_ids_are_found_after_rows_were_put_at_its_head(tmp_path):
    levels = LevelsFile.write(tmp_path, numbered(range(20, 40)))
    sheet = fill(tmp_path, "ABC" * 6 + "AB")
    assert levels.take_sheet(sheet, "anna") == 20
    decided = {levels.proposals[item].question: row.level for item, row in levels.settled.items()}
    grown = LevelsFile.write(tmp_path, numbered(range(40)))
    found = {grown.proposals[item].question: row.level for item, row in grown.settled.items()}
    assert found == decided and grown.unused == 0
    assert "a person decided 20" in grown.notes()[0]
    # the person goes on, although other rows are where the decisions were made
    assert grown.left()
    new = fill(tmp_path, "C" * len(grown.left()), grown.sheet.name)
    count = len(grown.left())
    assert grown.take_sheet(new, "anna") == count and len(grown.settled) == 20 + count


def test_decisions_that_cannot_be_found_are_counted(tmp_path):
    levels = LevelsFile.write(tmp_path, numbered(range(20)))
    assert levels.take_sheet(fill(tmp_path, "ABC"), "anna") == 3
    twice = LevelsFile.write(tmp_path, numbered([50, *range(20), *range(20)]))
    assert twice.unused == 3 and not twice.settled
    [note] = [note for note in twice.notes() if "could not be used" in note]
    assert note.startswith("3 decisions in settled.jsonl") and "ids" in note
    assert LevelsFile.write(tmp_path, numbered([50, *range(20)])).unused == 0


def log_rows(count: int, **changes) -> list[dict]:
    rows = []
    for number in range(count):
        row = {
            "id": f"q{number}",
            "query": f"What can I bake on day {number}?",
            "results": [
                {"id": "1", "memory": "Is vegan and eats no dairy"},
                {"id": "2", "memory": "Plays chess on Sundays"},
            ],
            "answer": "A cake without dairy.",
        }
        rows.append({**row, **changes})
    return rows


def write_log(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def server():
    roles = {"micro-levels": practice_levels}
    examples = make_examples("short", 2, 0)
    with MicroServer(examples, practice=PracticeJudge(reads=True), roles=roles) as started:
        yield started


def test_from_a_log_to_footprints_levels_and_scores(capsys, server, tmp_path, monkeypatch):
    """Each command names the next one whole, and no folder takes in what belongs to another."""
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "own.jsonl", log_rows(12))
    common = ["--consent", "terms", "--yes", "--no-cache"]
    model = ["--model", "micro-levels", "--base-url", server.base_url]
    judge = ["--judge", "micro-judge", "--judge-url", server.base_url, "--judge-key-env", ""]

    code, output, errors = run(capsys, "evaluate", "--log", log, "--out", "run", *judge, *common)
    assert code == 0, errors
    assert f"memcalib levels {log}" in output and "--out runs/levels" in output
    assert f"memcalib evaluate --log {log}" in output and "--levels runs/levels" in output

    code, output, errors = run(capsys, "levels", log, "--out", "my levels", *model, *common)
    assert code == 0, errors
    assert f"Warning: all 24 {WARNING}" in output and "micro-levels is for practice" in output
    [line] = [line for line in output.splitlines() if "--sheet" in line]
    words = shlex.split(line)
    assert words[1:5] == ["levels", str(log), "--out", "my levels"]
    fill(tmp_path / "my levels", "CC")
    code, output, errors = run(capsys, *words[1:])
    assert code == 0 and "2 new decisions by NAME" in output, errors

    levels = ["--levels", "my levels", *judge, *common]
    code, _, errors = run(capsys, "evaluate", "--log", log, "--out", "run", *levels)
    assert code == 1 and "The log is the same, but its ideal levels" in errors
    assert "--out run-levels" in errors and not (tmp_path / "run-levels").exists()
    code, output, errors = run(capsys, "evaluate", "--log", log, "--out", "run-levels", *levels)
    assert code == 0, errors
    page = (tmp_path / "run-levels" / "report.html").read_text(encoding="utf-8")
    assert "micro-levels" in page

    other = write_log(tmp_path / "other.jsonl", log_rows(12, answer="Bread."))
    code, _, errors = run(capsys, "evaluate", "--log", other, "--out", "run-levels", *levels)
    assert code == 1 and "levels are not" not in errors
    other_levels = ("levels", other, "--out", "my levels")
    for more in (["--sheet", "my levels/sheet.csv", "--labeller", "anna"], [*model, *common]):
        code, _, errors = run(capsys, *other_levels, *more)
        assert code == 1, more
        assert "found levels of the log own.jsonl, not of" in errors and "other.jsonl" in errors


def test_a_changed_log_is_said_to_be_another_one(capsys, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "own.jsonl", log_rows(12))
    judge = ["--judge", "micro-judge", "--judge-url", server.base_url, "--judge-key-env", ""]
    words = ["evaluate", "--log", log, "--out", "run", *judge]
    words += ["--consent", "terms", "--yes", "--no-cache"]
    assert run(capsys, *words)[0] == 0
    write_log(log, log_rows(13))
    code, _, errors = run(capsys, *words)
    assert code == 1 and "The log has changed, or is a different one; use --out run-log" in errors


def test_a_log_of_which_all_own_levels_are_alike_is_said_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bound_judge.py").write_text(
        "from memcalib.problem import Level, judgment_for\n\n\n"
        "def judge(example, response):\n"
        "    return judgment_for(example, dict.fromkeys(example.levels, Level.BOUND), judge='b')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    memories = [{"text": "Is vegan.", "level": "A"}, {"text": "Plays chess.", "level": "A"}]
    rows = [{"query": f"What, {n}?", "memories": memories, "answer": "Soup."} for n in range(12)]
    log = write_log(tmp_path / "own.jsonl", rows)
    words = ["evaluate", "--log", log, "--out", "run", "--judge", "bound_judge:judge"]
    code, output, errors = run(capsys, *words, "--consent", "terms", "--yes")
    assert code == 0, errors
    assert f"Warning: all 24 {WARNING}" in output
    assert WARNING in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    code, output, errors = run(capsys, "memories", tmp_path / "run")
    assert code == 0 and WARNING in output, errors


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("{}[response]", "KeyError"),
        ("int(response)", "ValueError"),
        ("response.nothing", "AttributeError"),
    ],
)
def test_a_judge_that_raises_is_named_with_the_kind_of_error(
    capsys, tmp_path, monkeypatch, body, kind
):
    name = f"raising_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(f"def judge(example, response):\n    return {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    log = write_log(tmp_path / "own.jsonl", log_rows(3))
    words = ["evaluate", "--log", log, "--out", tmp_path / "run", "--judge", f"{name}:judge"]
    code, _, errors = run(capsys, *words, "--consent", "terms", "--yes")
    assert code == 1 and f"judge {name}:judge raised {kind}: " in errors, errors


def test_a_key_that_a_judge_misses_later_is_no_message_either(capsys, tmp_path, monkeypatch):
    """The answer of the trial is judged, and those of the log raise."""
    (tmp_path / "late_judge.py").write_text(
        "from memcalib.scoring.judge_runs import TRIAL\n"
        "from memcalib.problem import judgment_for\n\n\n"
        "def judge(example, response):\n"
        "    {TRIAL: 1}[response]\n"
        "    return judgment_for(example, example.levels, judge='late')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    log = write_log(tmp_path / "own.jsonl", log_rows(3))
    words = ["evaluate", "--log", log, "--out", tmp_path / "run", "--judge", "late_judge:judge"]
    code, _, errors = run(capsys, *words, "--consent", "terms", "--yes")
    assert code == 1 and "judge late_judge:judge raised KeyError: " in errors, errors
    assert "on the answer to example " in errors and "unexpected" not in errors


def test_a_key_that_a_judge_misses_on_one_answer_names_judge_and_example(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "later_judge.py").write_text(
        "from memcalib.problem import judgment_for\n\n\n"
        "def judge(example, response):\n"
        "    {'q1': 1}.get(example.id) and {}['missing']\n"
        "    return judgment_for(example, example.levels, judge='later')\n\n\n"
        "judge.name = 'later'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    log = write_log(tmp_path / "own.jsonl", log_rows(3))
    words = ["evaluate", "--log", log, "--out", tmp_path / "run", "--judge", "later_judge:judge"]
    code, _, errors = run(capsys, *words, "--consent", "terms", "--yes")
    assert code == 1 and "judge later_judge:judge raised KeyError: 'missing'" in errors, errors
    assert "on the answer to example 'q1'" in errors and "unexpected" not in errors
