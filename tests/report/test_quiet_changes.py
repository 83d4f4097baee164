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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reader", READERS)
def test_ideal_levels_are_held_against_the_examples(
    capsys, folder, made, monkeypatch, reader, change
):
    monkeypatch.chdir(folder.parent)
    shutil.copytree(made, folder.parent / "other")
    assert run(capsys, *READERS[reader])[0] in (0, 3)
    for name in ("labels.jsonl", "labels.csv"):
        (folder.parent / name).unlink(missing_ok=True)
    judged = change_rows(
        folder / "judgments.jsonl",
        CHANGES[change],
        lambda _, row: any(atom["ideal"] != atom["actual"] for atom in row["atoms"]),
    )
    assert judged
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, output, errors = run(capsys, *READERS[reader])
    assert code == 1, output
    assert "judgments.jsonl" in errors and change.strip() in errors and "allowed" in errors
    if reader not in ("gate",):
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
