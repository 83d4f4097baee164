"""The whole pipeline at its smallest: complete, repeatable, resumable,
and honest about other settings.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from memcalib.io.records import read_jsonl
from memcalib.io.runs import RunFolder
from memcalib.problem import Judgment, load_examples
from memcalib.products.reproduction.experiments import reproduce_experiments
from memcalib.products.reproduction.quickstart import run_quickstart
from memcalib.report.run_data import load_run
from memcalib.report.tables import results_table
from memcalib.report.training_report import sampled_steps
from memcalib.trainer.recipe import LABELS

pytestmark = pytest.mark.xdist_group("pipeline")

QUICK = Path(__file__).with_name("quick.yaml")
BASELINES = ("Base", "No memory", "Cold-start")
ROWS = ("examples.jsonl", "rollouts.jsonl", "judgments.jsonl", "path.jsonl", "traces.jsonl")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "smoke"
    run_quickstart(folder, QUICK)
    return folder


def tables(folder: Path) -> dict[str, bytes]:
    files = sorted(
        p
        for p in folder.rglob("*")
        if p.suffix in (".csv", ".tex", ".md") and len(p.relative_to(folder).parts) < 3
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_everything_is_there(smoke):
    judgments = list(read_jsonl(smoke / "judgments.jsonl", Judgment))
    assert len({j.key for j in judgments}) == len(judgments) and all(j.scored for j in judgments)
    counts = Counter(j.model for j in judgments)
    assert counts == {"Base": 48, "Cold-start": 48, "No memory": 24, **dict.fromkeys(LABELS, 48)}
    assert len(load_examples(smoke / "examples.jsonl")) == 24
    steps = [json.loads(line) for line in (smoke / "steps.jsonl").read_text().splitlines()]
    sampled = [name for name in LABELS if name != "SFT"]
    expected_steps = [(m, step) for m in sampled for step in (0, 1, 2)]
    assert [(r["method"], r["step"]) for r in steps if r["method"] != "SFT"] == expected_steps, (
        "step 0 is the validation before"
    )
    path = [json.loads(line) for line in (smoke / "path.jsonl").read_text().splitlines()]
    assert {row["method"] for row in path} == {*LABELS} and {row["seed"] for row in path} == {1}
    manifest = json.loads((smoke / "manifest.json").read_text())
    assert "short" in manifest["config"]["models"] and "torch" in json.dumps(manifest)
    assert tables(smoke) and (smoke / "report.html").stat().st_size > 10_000


def test_the_table_has_the_papers_rows_in_the_papers_order(smoke):
    table = results_table(load_run(smoke), resamples=50)
    measured = table[table["status"] == "measured"]
    assert list(measured["model"]) == ["Base", "Cold-start", *LABELS]
    assert measured["seeds"].tolist() == [2] * 8 and not measured[["SCS", "Exact"]].isna().any(
        axis=None
    )


def test_distillation_has_no_reward_and_that_is_no_zero(smoke):
    steps = load_run(smoke).steps
    rewarded = steps.groupby("method")["reward"].count()
    assert (
        rewarded[["OPSD-PG", "OPSD-GKD", "SFT"]].sum() == 0
        and (rewarded[["GRPO", "GDPO", "MemCalib-RL"]] == 2).all()
    )
    assert set(sampled_steps(steps)["method"]) == {*LABELS} - {"SFT"}


def test_report_opens_offline(smoke):
    page = (smoke / "report.html").read_text()
    for needle in ('src="http', "src='http", "@import", '<link rel="stylesheet" href="http'):
        assert needle not in page
    assert "MemCalib-RL" in page and "synthetic" in page.lower()


def test_a_finished_run_is_only_assembled_again(smoke, monkeypatch):
    before = {name: (smoke / name).read_bytes() for name in ROWS} | tables(smoke)
    monkeypatch.setattr("memcalib.products.reproduction.quickstart.run_tasks", None)
    run_quickstart(smoke, QUICK)
    assert {name: (smoke / name).read_bytes() for name in ROWS} | tables(smoke) == before


def test_a_result_that_is_gone_is_made_again(smoke):
    before = {name: (smoke / name).read_bytes() for name in ROWS}
    [folder] = (smoke / "evaluations" / "short").glob("base-*")
    for file in ("job.json", "judgments.jsonl", "rollouts.jsonl"):
        (folder / file).unlink()
    run_quickstart(smoke, QUICK)

    def untimed(content: bytes) -> list[dict]:
        rows = [json.loads(line) for line in content.splitlines()]
        return [{k: v for k, v in row.items() if k != "usage"} for row in rows]

    for name in ROWS:
        assert untimed((smoke / name).read_bytes()) == untimed(before[name]), name


@pytest.mark.slow
def test_killed_and_resumed_equals_straight(smoke, tmp_path):
    out = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "memcalib",
        "quickstart",
        "--profile",
        str(QUICK),
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last_part = out / "trainings" / "short"
    deadline = time.monotonic() + 120
    while not last_part.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert last_part.exists() and not (out / "judgments.jsonl").exists()
    run_quickstart(out, QUICK)
    for name in ("path.jsonl", "traces.jsonl", "examples.jsonl"):
        assert (out / name).read_bytes() == (smoke / name).read_bytes(), name
    assert load_run(out).judgments == load_run(smoke).judgments


def test_other_settings_are_refused(smoke, tmp_path):
    with pytest.raises(ValueError, match=r"other settings.*processes|other settings.*traces"):
        run_quickstart(smoke, QUICK, settings=["traces=2"])
    with pytest.raises(ValueError, match="models: found 2; allowed: one"):
        run_quickstart(tmp_path / "two", "smoke")
    RunFolder(tmp_path / "a", {"x": (1, 2)})
    RunFolder(tmp_path / "a", {"x": [1, 2]})


@pytest.mark.slow
def test_experiments_run_under_papermill_and_take_their_parameters(tmp_path):
    (done,) = reproduce_experiments(["main_results"], "smoke", tmp_path)
    assert done == tmp_path / "smoke" / "main_results" / "notebook.ipynb"
    executed = json.loads(done.read_text())
    injected = [
        c for c in executed["cells"] if "injected-parameters" in c["metadata"].get("tags", [])
    ]
    assert len(injected) == 1 and 'out_dir = "main_results"' in "".join(injected[0]["source"])
    assert (
        tables(done.parent)
        and (done.parent / "manifest.json").exists()
        and str(tmp_path) not in done.read_text()
    )
    assert not any(
        o["output_type"] == "error" for c in executed["cells"] for o in c.get("outputs", [])
    )


def test_dry_run_runs_nothing(tmp_path, capsys):
    assert reproduce_experiments([], "smoke", tmp_path, dry_run=True) == []
    assert "main_results" in capsys.readouterr().out and not list(tmp_path.iterdir())
