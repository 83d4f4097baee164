"""All experiments at their smallest: everything made once, nothing twice, the same again,
and every parameter arrives.
"""

import gzip
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from memcalib.io.records import ForeseenError
from memcalib.products.reproduction.experiments import (
    PAPER_ITEMS,
    Run,
    experiments,
    item_rows,
    reproduce_experiments,
)
from memcalib.products.reproduction.jobs import unpack_rows
from memcalib.products.reproduction.profiles import load_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NAMES = sorted({name for _, parts in PAPER_ITEMS.values() for name in parts})
# A parameter of each notebook, with another value, that needs no further training. The window of
# mechanism_figure smooths longer curves than those of this profile: test_mechanism_figure tries it.
CHANGED = {
    "benchmark_statistics": "rows=30",
    "model_survey": "examples=5",
    "main_results": "published_model=Qwen3.5-35B-A3B",
    "channel_proportions": "end=GDPO",
    "localization_ablation": "ddof=1",
    "eta_sensitivity": "ddof=1",
    "training_dynamics": "window=1",
    "localization_audit": "examples=6",
    "judge_audit": "n=40",
    "judge_stability": "strengths=[0, 2]",
    "rpeval_transfer": "ddof=0",
    "diagrams": "example_seed=4",
}


def contents(folder: Path) -> dict[str, bytes]:
    """The tables of a run as CSV, by name."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.glob("*/tables/*.csv"))
    }


def outputs(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    return json.dumps(
        [
            cell.get("outputs")
            for cell in cells
            if "injected-parameters" not in cell["metadata"].get("tags", [])
        ]
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, float]:
    """The run of all experiments, and the processor seconds that it took."""
    out = tmp_path_factory.mktemp("experiments")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reproduce_experiments([], "smoke", out)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return out / "smoke", after.ru_utime - before.ru_utime


def test_every_label_is_there_in_four_minutes_of_two_cores(smoke):
    folder, seconds = smoke
    run = Run(folder, load_profile("smoke"), "smoke")
    rows = item_rows(run)
    assert {row["label"] for row in rows} == {*PAPER_ITEMS} and len(PAPER_ITEMS) == 21
    assert [
        (row["label"], row["status"], row["why"])
        for row in rows
        if row["status"] not in ("measured", "published only")
    ] == []
    lines = 2 + len(rows) + len(PAPER_ITEMS)  # two tables with their heads
    assert (folder / "index.html").read_text().count("<tr>") == lines
    assert (folder / "index.ipynb").is_file()
    assert seconds < 2 * 240
    for name in NAMES:
        text = (folder / name / "notebook.ipynb").read_text()
        assert str(folder) not in text and '"output_type": "error"' not in text, name
        assert list((folder / name / "tables").glob("*.csv")), name


def test_the_rows_of_each_table_are_kept_packed_and_come_back(smoke):
    folder, _ = smoke
    run = Run(folder, load_profile("smoke"), "smoke")
    kept_rows = dict.fromkeys(
        ("main_results", "rpeval_transfer", "model_survey"), "judgments.jsonl"
    )
    kept_rows |= dict.fromkeys(
        ("judge_audit", "judge_stability", "eta_sensitivity"), "answers.jsonl"
    )
    kept_rows |= {"localization_ablation": "answers.jsonl", "training_dynamics": "steps.jsonl"}
    kept_rows |= {"localization_audit": "pairs.jsonl", "diagrams": "trace.jsonl"}
    kept_rows["benchmark_statistics"] = "examples.jsonl"
    for name, file in kept_rows.items():
        experiment = run.experiments[name]
        record = experiment.record
        assert file in {Path(row).name for row in record["rows"]}, name
        assert record["rows"]
        for row in record["rows"]:
            packed_file = experiment.folder / "rows" / f"{row}.gz"
            assert (
                gzip.decompress(packed_file.read_bytes()) == (experiment.folder / row).read_bytes()
            )
    # a figure is computed again from the rows that a repository keeps
    experiment = run.experiments["eta_sensitivity"]
    rows = pd.read_json(
        experiment.folder / "rows" / "answers.jsonl.gz", lines=True, dtype={"arm": str}
    )
    exact = 100 * (rows["ideal"] == rows["actual"]).groupby(rows["arm"]).mean()
    table = pd.read_csv(
        experiment.folder / "tables" / "tab-eta-sweep-by-training.csv", dtype={"arm": str}
    )
    assert exact.round(2).tolist() == table.groupby("arm")["Exact"].mean().round(2).tolist()
    survey = run.experiments["main_results"]
    before = (survey.folder / "judgments.jsonl").read_bytes()
    (survey.folder / "judgments.jsonl").unlink()
    assert not run.jobs.lost("main_results")
    unpack_rows(survey.folder)
    assert (survey.folder / "judgments.jsonl").read_bytes() == before


def test_a_run_with_nothing_changed_makes_nothing(smoke):
    folder, _ = smoke
    before = {
        file: file.stat().st_mtime_ns
        for file in folder.rglob("*")
        if file.is_file() and "index" not in file.name
    }
    command = [
        sys.executable,
        "-m",
        "memcalib",
        "reproduce",
        "--profile",
        "smoke",
        "--out",
        str(folder.parent),
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (
        done.returncode == 0
        and "79 jobs, 0 to do" in done.stdout
        and time.monotonic() - started < 60
    )
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.fixture(scope="module")
def shared(smoke, tmp_path_factory) -> Path:
    """A copy of the run, in which notebooks are run again with other parameters."""
    out = tmp_path_factory.mktemp("changed")
    shutil.copytree(smoke[0], out / "smoke")
    return out


def test_a_parameter_of_every_other_notebook_is_changed():
    assert set(NAMES) - set(CHANGED) == {"mechanism_figure"}


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_parameter_arrives_and_changes_the_output(shared, smoke, name):
    trainings = (shared / "smoke" / "trainings").glob("*/*/policy")
    before = {path: path.stat().st_mtime_ns for path in trainings}
    reproduce_experiments([name], "smoke", shared, settings=[f"experiments.{name}.{CHANGED[name]}"])
    old, new = (folder / name / "notebook.ipynb" for folder in (smoke[0], shared / "smoke"))
    assert CHANGED[name].split("=")[0] + " = " in "".join(cell_sources(new)) and outputs(
        old
    ) != outputs(new)
    assert before and {path: path.stat().st_mtime_ns for path in before} == before


def cell_sources(notebook: Path) -> list[str]:
    """The sources of the cell that papermill wrote."""
    cells = json.loads(notebook.read_text())["cells"]
    return [
        "".join(c["source"])
        for c in cells
        if "injected-parameters" in c["metadata"].get("tags", [])
    ]


def test_two_runs_with_the_same_seeds_give_the_same_tables(smoke, tmp_path):
    """From the first training on, and once killed on the way."""
    names = ["eta_sensitivity", "channel_proportions"]
    command = [
        sys.executable,
        "-m",
        "memcalib",
        "reproduce",
        *names,
        "--profile",
        "smoke",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while (
        len(list(tmp_path.glob("smoke/trainings/*/*/job.json"))) < 2
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = list(tmp_path.glob("smoke/trainings/*/*/job.json"))
    assert len(finished) >= 2 and not (tmp_path / "smoke" / "eta_sensitivity").exists()
    before = {path: path.stat().st_mtime_ns for path in finished}
    while True:  # killed outright, the engine itself works on and holds the folder
        try:
            reproduce_experiments(names, "smoke", tmp_path)
            break
        except ForeseenError as error:
            assert "another command is working" in str(error) and time.monotonic() < deadline + 600
            time.sleep(5)
    assert {path: path.stat().st_mtime_ns for path in finished} == before, (
        "what was made before the kill is kept"
    )
    again = contents(tmp_path / "smoke")
    unbroken = contents(smoke[0])
    assert len(again) > 10 and again == {name: unbroken[name] for name in again}


def test_a_failing_cell_leaves_its_notebook_and_says_how_to_go_on(smoke, tmp_path):
    shutil.copytree(smoke[0], tmp_path / "smoke")
    command = [
        sys.executable,
        "-m",
        "memcalib",
        "reproduce",
        "channel_proportions",
        "--profile",
        "smoke",
        "--out",
        str(tmp_path),
    ]
    command += ["--set", "experiments.channel_proportions.end=Nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (
        done.returncode == 1
        and "e04_channel_proportions.ipynb, cell" in done.stderr
        and "AssertionError" in done.stderr
    )
    assert (
        "executed so far" in done.stderr
        and "continue with: memcalib reproduce channel_proportions" in done.stderr
    )
    assert (
        '"output_type": "error"'
        in (tmp_path / "smoke" / "channel_proportions" / "notebook.ipynb").read_text()
    )
    assert experiments()["channel_proportions"].name == "e04_channel_proportions.ipynb"
