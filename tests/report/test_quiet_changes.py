"""Numbers that somebody changed, or that another model made, are refused or said with counts."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import run

from memcalib.io.records import write_jsonl
from memcalib.products.micro.world import WORLDS, make_examples
from memcalib.products.micro.practice.server import MicroServer

EXAMPLES = make_examples(WORLDS["short"], 6, 7, "test")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished run of six examples, with and without memory."""
    folder = tmp_path_factory.mktemp("made")
    write_jsonl(folder / "data.jsonl", EXAMPLES)
    from memcalib.commands.evaluate import Evaluation, EvaluationRun
    from memcalib.inference.endpoint import Endpoint
    from memcalib.inference.rollout import Sampling

    with MicroServer(EXAMPLES) as server:
        model = Endpoint(model="micro-model", base_url=server.base_url, key_env="")
        evaluation = Evaluation(
            data=str(folder / "data.jsonl"),
            model=model,
            judge="micro-exact",
            sampling=Sampling(seeds=(0,)),
        )
        EvaluationRun(evaluation, folder / "run").run()
    return folder / "run"


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def change_rows(file: Path, change, rows=lambda number, row: True) -> int:
    """Change rows of a file; returns how many."""
    lines = file.read_text().splitlines()
    count = 0
    for number, line in enumerate(lines):
        row = json.loads(line)
        if rows(number, row):
            change(row)
            count += 1
        lines[number] = json.dumps(row)
    file.write_text("".join(f"{line}\n" for line in lines))
    return count


def raise_ideal(row) -> None:
    """What was not used enough is said to be right."""
    for atom in row["atoms"]:
        atom["ideal"] = atom["actual"] or atom["ideal"]


def drop_wrong(row) -> None:
    row["atoms"] = [atom for atom in row["atoms"] if atom["ideal"] == atom["actual"]] or row[
        "atoms"
    ][:1]


def rename_atom(row) -> None:
    row["atoms"][0]["atom_id"] = "a-new-one"


CHANGES = {"ideal": raise_ideal, "judged atom": drop_wrong, "judged atom ": rename_atom}
READERS = {
    "report": ["report", "run"],
    "score": ["score", "run/judgments.jsonl"],
    "compare": ["compare", "run", "other"],
    "compare, second": ["compare", "other", "run"],
    "gate": ["gate", "run", "--min", "SCS=1"],
    "gate, baseline": ["gate", "other", "--baseline", "run"],
    "memories": ["memories", "run"],
    "label": ["label", "run", "--answers", "3"],
}


@pytest.mark.parametrize("reader", READERS)
def test_ideal_levels_are_held_against_the_examples(capsys, folder, made, monkeypatch, reader):
    monkeypatch.chdir(folder.parent)
    shutil.copytree(made, folder.parent / "other")
    assert run(capsys, *READERS[reader])[0] in (0, 3)
    for name in ("labels.jsonl", "labels.csv"):
        (folder.parent / name).unlink(missing_ok=True)
    unchanged = (folder / "judgments.jsonl").read_bytes()
    for name, change in CHANGES.items():
        (folder / "judgments.jsonl").write_bytes(unchanged)
        judged = change_rows(
            folder / "judgments.jsonl",
            change,
            lambda _, row: any(atom["ideal"] != atom["actual"] for atom in row["atoms"]),
        )
        assert judged
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        code, output, errors = run(capsys, *READERS[reader])
        assert code == 1, f"{name}: {output}"
        assert "judgments.jsonl" in errors and name.strip() in errors and "allowed" in errors
        if reader != "gate":
            after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            assert before == after, name


def test_an_evaluation_that_goes_on_refuses_edited_levels(capsys, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stored = json.loads((folder / "parameters.json").read_text())
    words = ["evaluate", stored["data"], "--model", "micro-model", "--judge", "micro-exact"]
    words += ["--base-url", stored["model"]["url"], "--out", "run", "--no-cache"]
    words += ["--set", "sampling.seeds=[0]"]
    assert run(capsys, *words)[0] == 0
    change_rows(folder / "judgments.jsonl", raise_ideal)
    code, _, errors = run(capsys, *words)
    assert code == 1 and "ideal" in errors and "judgments.jsonl" in errors
    assert "as the example has it" in errors, "before anything is asked or judged"


def test_a_file_of_judgments_alone_is_scored_as_it_is(capsys, folder, tmp_path):
    """Without the examples beside it there is nothing to hold it against."""
    alone = tmp_path / "alone" / "judgments.jsonl"
    alone.parent.mkdir()
    shutil.copy(folder / "judgments.jsonl", alone)
    change_rows(alone, raise_ideal)
    assert run(capsys, "score", alone)[0] == 0


OTHER = "other-cheap-model\x1b[31m"


def test_another_model_under_the_judges_name_is_said_with_counts(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    full = lambda number, row: row["condition"] == "full_memory"  # noqa: E731
    judged = change_rows(
        folder / "judgments.jsonl", lambda row: row.update(answered_by=OTHER), full
    )
    answered = change_rows(
        folder / "rollouts.jsonl",
        lambda row: row.update(answered_by="elsewhere"),
        lambda number, row: row["condition"] == "full_memory" and number % 2,
    )
    assert judged == 6 and answered == 3
    assert run(capsys, "report", "run")[0] == 0
    sentences = (
        "6 of 12 judgments under the name micro-exact-v1 were made by other-cheap-model\\x1b[31m, "
        "according to the server.",
        "3 of 12 answers under the name micro-model were given by elsewhere, "
        "according to the server.",
    )
    page = (folder / "report.html").read_text()
    card = (folder / "model-card.md").read_text().replace("\\\\", "\\").replace("\\_", "_")
    for sentence in sentences:
        assert sentence in page
        assert sentence.replace("\\x1b[31m", "") in card.replace("\\x1b\\[31m", "").replace(
            "\\x1b[31m", ""
        )
    [result] = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert result["judge"]["answered_by"] == {"other-cheap-model\\x1b[31m": 6}
    assert result["answered_by"] == {"elsewhere": 3}
    stored = json.loads((folder / "parameters.json").read_text())
    words = ["evaluate", stored["data"], "--model", "micro-model", "--judge", "micro-exact"]
    words += ["--base-url", stored["model"]["url"], "--out", "run", "--no-cache"]
    words += ["--set", "sampling.seeds=[0]"]
    code, output, errors = run(capsys, *words)
    assert code == 0, errors
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["answered_by"] == {
        "judge": {"other-cheap-model\\x1b[31m": 6},
        "model": {"elsewhere": 3},
    }
    assert "3 of 12 answers under the name micro-model were given by elsewhere" in output
    shutil.copytree(folder, folder.parent / "other")
    change_rows(folder.parent / "other/judgments.jsonl", lambda row: row.pop("answered_by", None))
    code, output, _ = run(capsys, "compare", "other", "run")
    assert "6 of 12 judgments" in output and "\x1b" not in output
    _, output, _ = run(capsys, "gate", "run", "--min", "SCS=1")
    assert "6 of 12 judgments" in output


def test_nothing_is_said_where_nobody_else_answered(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert run(capsys, "report", "run")[0] == 0
    assert "according to the server" not in (folder / "report.html").read_text()
    [result] = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert result["answered_by"] == {} and result["judge"]["answered_by"] == {}


def test_a_report_on_half_of_the_answers_says_so_on_the_terminal(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert "not been judged" not in run(capsys, "report", "run")[2]
    judgments = folder / "judgments.jsonl"
    judgments.write_text("".join(judgments.read_text().splitlines(keepends=True)[:5]))
    code, _, errors = run(capsys, "report", "run")
    assert code == 0
    assert "run: 7 of 12 answers (58.3 %) have not been judged yet" in errors


def test_answers_that_were_edited_after_judging_are_said_with_counts(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    shutil.copytree(folder, folder.parent / "other")
    edited = change_rows(
        folder / "rollouts.jsonl",
        lambda row: row.update(response=row["response"] + " And more."),
        lambda number, row: number < 5,
    )
    code, _, errors = run(capsys, "report", "run")
    line = f"{edited} of 12 answers were changed after they were judged"
    assert code == 0 and line in errors and line in (folder / "report.html").read_text()
    assert line in (folder / "model-card.md").read_text()
    changed = "run: rollouts.jsonl is not as manifest.json describes it"
    assert changed in errors and changed in run(capsys, "score", "run")[2]
    assert line in run(capsys, "compare", "other", "run")[1]
    assert line in run(capsys, "gate", "run", "--min", "SCS=1")[1]


def test_levels_that_were_edited_after_the_end_are_said_on_the_terminal(
    capsys, folder, monkeypatch
):
    """Nothing else in the folder holds what a judge read, but the manifest has the file's hash."""
    monkeypatch.chdir(folder.parent)
    assert "manifest" not in run(capsys, "report", "run")[2]

    def all_right(row):
        for atom in row["atoms"]:
            atom["actual"] = atom["ideal"]

    shutil.copytree(folder, folder.parent / "other")
    change_rows(folder / "judgments.jsonl", all_right)
    code, _, errors = run(capsys, "report", "run")
    line = "judgments.jsonl is not as manifest.json describes it"
    assert code == 0 and f"run: {line}" in errors
    assert line in (folder / "report.html").read_text()
    assert line in (folder / "model-card.md").read_text().replace("\\", "")
    for words in (
        ["gate", "run", "--baseline", "other"],
        ["gate", "run", "--min", "SCS=1"],
        ["compare", "other", "run"],
        ["compare", "run", "other"],
        ["score", "run"],
        ["memories", "run"],
    ):
        _, output, errors = run(capsys, *words)
        assert line in output + errors, words
    assert line not in "".join(run(capsys, "score", "other")[1:])


@pytest.mark.parametrize("content", [None, "{}", '{"data_sha256": {}}'])
def test_a_missing_manifest_is_said(capsys, folder, monkeypatch, content):
    monkeypatch.chdir(folder.parent)
    shutil.copytree(folder, folder.parent / "other")
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    line = "manifest.json is missing or describes no rows, so edits cannot be noticed"
    for words in (
        ["gate", "run", "--baseline", "other"],
        ["gate", "run", "--min", "SCS=1"],
        ["gate", "run", "--save", "saved"],
        ["compare", "other", "run"],
        ["score", "run"],
        ["report", "run"],
    ):
        _, output, errors = run(capsys, *words)
        assert line in output + errors, words
    assert line in (folder / "report.html").read_text()
    assert line not in "".join(run(capsys, "gate", "other", "--baseline", "saved")[1:])


def test_an_edited_run_is_not_saved_as_a_baseline(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert run(capsys, "gate", "run", "--save", "saved")[0] == 0
    (folder.parent / "saved/judgments.jsonl").unlink()

    def all_right(row):
        for atom in row["atoms"]:
            atom["actual"] = atom["ideal"]

    change_rows(folder / "judgments.jsonl", all_right)
    code, _, errors = run(capsys, "gate", "run", "--save", "saved")
    assert code == 1 and "found judgments.jsonl changed since its evaluation" in errors
    assert not (folder.parent / "saved/judgments.jsonl").exists()


def test_a_run_folder_is_scored_by_its_name(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert run(capsys, "score", "run") == run(capsys, "score", "run/judgments.jsonl")
    (folder / "judgments.jsonl").unlink()
    code, _, errors = run(capsys, "score", "run")
    assert code == 1 and "run/judgments.jsonl" in errors


@pytest.mark.parametrize("hidden", ["\u200b", "\u2060", "\ufeff", "\u061c", "\u202e"])
def test_a_name_with_characters_that_nobody_sees_is_another_name(
    capsys, folder, monkeypatch, hidden
):
    monkeypatch.chdir(folder.parent)
    change_rows(
        folder / "judgments.jsonl", lambda row: row.update(answered_by=f"micro{hidden}-exact-v1")
    )
    assert run(capsys, "report", "run")[0] == 0
    shown = f"micro{hidden.encode('unicode_escape').decode()}-exact-v1"
    page = (folder / "report.html").read_text()
    assert shown in page and hidden not in page
    _, output, _ = run(capsys, "gate", "run", "--min", "SCS=1")
    assert shown in output and hidden not in output


JUDGE = """
from memcalib.problem import Level, judgment_for
def judge(example, response):
    return judgment_for(example, dict.fromkeys(example.levels, Level.BOUND), judge="own")
"""


def test_a_judge_that_was_changed_on_the_way_is_said_on_the_terminal(
    capsys, caplog, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_jsonl(tmp_path / "data.jsonl", EXAMPLES)
    (tmp_path / "changing_judge52.py").write_text(JUDGE)
    with MicroServer(EXAMPLES) as server:
        words = ["evaluate", "data.jsonl", "--model", "micro-model", "--out", "run", "--no-cache"]
        words += ["--judge", "changing_judge52:judge"]
        words += ["--base-url", server.base_url, "--key-env", ""]
        code, _, errors = run(capsys, *words)
        assert code == 0 and "another version" not in errors, errors
        rows = (tmp_path / "run" / "judgments.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "run" / "judgments.jsonl").write_text("".join(rows[:4]))
        (tmp_path / "changing_judge52.py").write_text(JUDGE + "# changed\n")
        assert "another version" not in caplog.text
        code, _, errors = run(capsys, *words)
    assert code == 0, errors
    said = "the judge is not the same version as before: file changing_judge52.py (edited)"
    assert said in caplog.text
