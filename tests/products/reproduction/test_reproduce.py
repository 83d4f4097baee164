"""The whole pipeline at its smallest: complete, repeatable, resumable,
and honest about other settings.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memcalib.products.reproduction.main_results import (
    BASELINES,
    load_profile,
    run_main_results,
    run_quickstart,
)
from memcalib.products.reproduction.experiments import reproduce_experiments
from memcalib.io.runs import RunFolder
from memcalib.problem import Judgment, load_examples
from memcalib.io.records import read_jsonl
from memcalib.trainer.recipe import LABELS
from memcalib.report.run_data import load_run
from memcalib.report.tables import results_table
from memcalib.report.training_report import sampled_steps

pytestmark = pytest.mark.xdist_group("pipeline")

ROWS = ("examples.jsonl", "rollouts.jsonl", "judgments.jsonl", "path.jsonl", "traces.jsonl")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "smoke"
    run_quickstart(folder, "smoke")
    return folder


def tables(folder: Path) -> dict[str, bytes]:
    files = sorted(
        p
        for p in folder.rglob("*")
        if p.suffix in (".csv", ".tex", ".md") and "parts" not in p.parts
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_everything_is_there(smoke):
    profile = load_profile("smoke")
    judgments = list(read_jsonl(smoke / "judgments.jsonl", Judgment))
    seeds = len(profile.eval_seeds)
    assert len(judgments) == profile.eval_examples * seeds * (len(BASELINES) + len(profile.methods))
    assert len({j.key for j in judgments}) == len(judgments) and all(j.scored for j in judgments)
    assert {j.model for j in judgments} == {*BASELINES, *profile.methods}
    assert len(load_examples(smoke / "examples.jsonl")) == profile.eval_examples
    steps = [json.loads(line) for line in (smoke / "steps.jsonl").read_text().splitlines()]
    sampled = [m for m in profile.methods if m != "SFT"]
    assert profile.methods == tuple(LABELS) and len(sampled) == 5
    expected_steps = [(m, step) for m in sampled for step in range(1 + profile.train.steps)]
    assert [(r["method"], r["step"]) for r in steps if r["method"] != "SFT"] == expected_steps, (
        "step 0 is the validation before"
    )
    path = [json.loads(line) for line in (smoke / "path.jsonl").read_text().splitlines()]
    assert {row["method"] for row in path} == {*LABELS} and {row["seed"] for row in path} == {1}
    manifest = json.loads((smoke / "manifest.json").read_text())
    assert manifest["config"]["world"] == "short" and "torch" in json.dumps(manifest)
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
    for work in (
        "inference.local.evaluate",
        "training.train",
        "trainer.sft.sft",
        "trainer.traces.trace_answers",
    ):
        monkeypatch.setattr(f"memcalib.{work}", None)
    run_quickstart(smoke, "smoke")
    assert {name: (smoke / name).read_bytes() for name in ROWS} | tables(smoke) == before


def test_a_damaged_part_is_done_again(smoke):
    before = {name: (smoke / name).read_bytes() for name in ROWS}
    base_judgments = smoke / "parts" / "Base" / "judgments.jsonl"
    for damage in (b"", base_judgments.read_bytes()[:-40]):
        base_judgments.write_bytes(damage)
        run_main_results(smoke, "smoke")
        assert {name: (smoke / name).read_bytes() for name in ROWS} == before


@pytest.mark.slow
def test_killed_and_resumed_equals_straight(smoke, tmp_path):
    out = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "memcalib",
        "quickstart",
        "--profile",
        "smoke",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last_part = out / "parts" / "OPSD-GKD-1"
    deadline = time.monotonic() + 120
    while not last_part.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert last_part.exists() and not (out / "judgments.jsonl").exists()
    run_quickstart(out, "smoke")
    for name in ROWS:
        assert (out / name).read_bytes() == (smoke / name).read_bytes(), name
    assert tables(out) == tables(smoke)


def test_other_settings_are_refused(smoke, tmp_path):
    profile = tmp_path / "other.yaml"
    profile.write_text("world: short\neval_examples: 25\n")
    with pytest.raises(ValueError, match="other settings.*eval_examples: 24 there, 25 now"):
        run_main_results(smoke, profile)
    RunFolder(tmp_path / "a", {"x": (1, 2)})
    RunFolder(tmp_path / "a", {"x": [1, 2]})


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("methods: [GRPO, DPO]", "'DPO'"),
        ("world: tiny", "'tiny'"),
        ("eval_examples: 0", "eval_examples"),
        ("train_seeds: [1, 2]", "train_seeds"),
        ("train: {eta: 2}", "eta"),
        ("sft: {epochs: 0}", "epochs"),
        ("sft: {rank: 3}", "lora_rank"),
        ("sft_examples: 0", "sft_examples"),
        ("train: {cap: 0.5}", "cap"),
        ("train: {mode: sideways}", "sideways"),
        ("steps: 3", "allowed: world"),
        ("- 1", "profile"),
        ("", "profile"),
        ("methods: []", "methods"),
        ("train_seeds: [1, 1]\neval_seeds: [4, 5]", "train_seeds"),
        ("eval_seeds: [42, 42]", "eval_seeds"),
        ("eval_seeds: [-1]", "seed -1"),
        ("train: {trl: {nonsense: 1}}", "nonsense"),
        ("train: {prompt_template: nope}", "nope"),
        ("train: {lr: .inf}", "lr"),
        ("train: {prompts: 3, generations: 3}", "9 answers"),
        ("train_examples: 1", "train_examples"),
        ("overrides: {OPSD: {lr: 1.0}}", "unknown method 'OPSD'"),
        ("overrides: {opsd-pg: {top_j: 1}}", "top_j"),
        ("overrides: {opsd-pg: {lr: -1}}", "lr"),
    ],
)
def test_bad_profiles_name_the_fault(tmp_path, text, needle):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"p\.yaml") as error:
        load_profile(path)
    assert needle in str(error.value)


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
