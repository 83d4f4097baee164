"""Snakemake runs the plan: in order, beside each other, past a failure; stopped or killed, started
twice, without what it needs.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memcalib.io.records import ForeseenError
from memcalib.io.tasks import TasksFailed
from memcalib.products.reproduction import engine
from memcalib.products.reproduction.engine import check_gpus, plan_text, run_jobs, snakemake_words
from memcalib.products.reproduction.jobs import LOG, Job, Jobs
from memcalib.products.reproduction.plan import Plan
from memcalib.products.reproduction.plan_rows import planned_results
from memcalib.products.reproduction.profiles import load_profile

TINY = [
    "rows={Cold-start: {start: start}, GDPO: {method: gdpo, begins: Cold-start}}",
    "models.long=null",
    "models.short.settings.train={steps: 2, prompts: 2, generations: 4, eval_every: 1}",
    "models.short.settings.data={world: {name: short, validation: 4, test: 6}}",
    "ablations={eta_sensitivity: {begins: Cold-start, arms: {'0.00': {method: gdpo}}}}",
    "rpeval=null",
    "eval_seeds=[42]",
    "traces=0",
]


def quiet(line: str) -> None:
    pass


def shell(name: str, script: str, **fields) -> Job:
    return Job(name, fields.pop("kind", "say"), ("sh", "-c", script), {"of": name}, **fields)


def test_a_tiny_plan_runs_through_its_public_commands_and_only_once(tmp_path, monkeypatch):
    """Training, evaluation and examples of the micro-world by the engine; the arm that is a row of
    the main table is the same job.
    """
    plan = Plan(load_profile("smoke", TINY), tmp_path / "tiny")
    jobs = plan.jobs()
    assert sorted(job.kind for job in jobs) == ["evaluate", "evaluate", "examples", "train"]
    said: list[str] = []
    plan.write_rows()
    run_jobs(jobs, say=said.append)
    assert jobs.to_do() == [] and sum("done" in line for line in said) == 4
    rows = planned_results(plan.root, "main_results")
    assert [row.row for row in rows] == ["Cold-start", "GDPO"]
    assert [step["step"] for step in rows[1].steps()] == [0, 1, 2]
    assert len(rows[1].judgments()) == 6 and {j.model for j in rows[1].judgments()} == {"GDPO"}
    assert len(rows[0].judgments(memory=False)) == 6
    [arm] = planned_results(plan.root, "eta_sensitivity")
    assert arm.folders == rows[1].folders and {j.model for j in arm.judgments()} == {"0.00"}
    monkeypatch.setattr(engine.subprocess, "Popen", None)
    run_jobs(jobs, say=said.append)  # nothing is started

    more = Plan(load_profile("smoke", [*TINY, "train_seeds=[2]"]), plan.root)
    kept = {job.name for job in jobs} & {job.name for job in more.jobs()}
    assert {more.by_name[name].kind for name in kept} == {"evaluate", "examples"}
    assert [more.by_name[n].kind for n in more.jobs().to_do()] == ["train", "evaluate"]


@pytest.mark.parametrize(
    ("log", "said"), [("plan.log", "found a link to"), (f"one/{LOG}", "it did not start")]
)
def test_a_log_is_not_written_through_a_link(tmp_path, log, said):
    (tmp_path / "precious.txt").write_text("precious")
    (tmp_path / "root" / "one").mkdir(parents=True)
    (tmp_path / "root" / log).symlink_to(tmp_path / "precious.txt")
    with pytest.raises((OSError, TasksFailed), match=said):
        run_jobs(Jobs(tmp_path / "root", [shell("one", "echo said")]), say=quiet)
    assert (tmp_path / "precious.txt").read_text() == "precious"


def test_a_failure_takes_along_what_needs_it_and_nothing_else(tmp_path):
    jobs = Jobs(
        tmp_path,
        [
            shell("bad", "echo no such weights; exit 1", title="8B: train gdpo"),
            shell("after", "true", reads=("bad",), kind="evaluate"),
            shell("good", "true"),
        ],
    )
    with pytest.raises(TasksFailed) as error:
        run_jobs(jobs, say=quiet, advice="continue with: memcalib reproduce")
    text = str(error.value)
    assert "8B: train gdpo: no such weights (exit code 1" in text
    assert "after: needs bad, which does not exist" in text and "continue with: memcalib" in text
    assert jobs.state("good") == ("done", "")
    repaired = Jobs(
        tmp_path, [shell("bad", "true"), shell("after", "true", reads=("bad",), kind="evaluate")]
    )
    run_jobs(repaired, say=quiet)
    assert repaired.to_do() == []
    (tmp_path / "good" / "left").touch()
    changed = Job("good", "say", ("true",), {"of": "another"})
    stale = Jobs(tmp_path, [changed])
    assert stale.state("good")[0] == "stale"
    run_jobs(stale, say=quiet)  # its record of then is there, and is no reason to leave it out
    assert stale.state("good") == ("done", "") and not (tmp_path / "good" / "left").exists()
    assert (tmp_path / "stale" / "good" / "left").exists()


DRIVER = """
import signal
import sys
from pathlib import Path
from memcalib.products.reproduction.engine import run_jobs
from memcalib.products.reproduction.jobs import Job, Jobs
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line has it
root = Path(sys.argv[1])
script = f"echo x >> {root}/slow/n; until test -e {root}/go; do sleep 0.2; done"
slow = Job("slow", "say", ("sh", "-c", script), {})
run_jobs(Jobs(root, [Job("fast", "say", ("true",), {}), slow]))
"""


def driver(root: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(root)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 400
    while not (root / "slow" / "n").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    return process


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_plan_that_is_stopped_in_the_middle_loses_nothing_and_goes_on(tmp_path, how):
    process = driver(tmp_path)
    second = Jobs(tmp_path, [shell("other", "true")])
    with pytest.raises(
        ForeseenError, match="another command is working in this folder; wait until it has finished"
    ):
        run_jobs(second, say=quiet)
    process.send_signal(how)
    process.wait(400)
    if how == signal.SIGTERM:
        assert not (tmp_path / "slow" / "job.json").exists()
    deadline = time.monotonic() + 400
    (tmp_path / "go").touch()
    while True:  # killed outright, the engine is still at work and holds the folder
        try:
            process = subprocess.run(
                [sys.executable, "-c", DRIVER, str(tmp_path)], capture_output=True, text=True
            )
            assert process.returncode == 0, process.stderr
            break
        except AssertionError:
            assert time.monotonic() < deadline and "another command" in process.stderr
            time.sleep(1)
    jobs = Jobs(tmp_path, [])
    assert jobs.record("slow")["exit"] == 0 and jobs.record("fast")["exit"] == 0
    assert (tmp_path / "slow" / "n").read_text().startswith("x\n")


def test_what_is_missing_is_said_before_anything_runs(tmp_path):
    jobs = Jobs(
        tmp_path,
        [shell("a", "true", missing=("data.test: x does not exist",)), shell("b", "true")],
    )
    with pytest.raises(ForeseenError, match=r"1 thing is missing(.|\n)*data.test: x"):
        run_jobs(jobs, say=quiet)
    assert not (tmp_path / "b").exists()


def test_without_the_engine_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("memcalib.io.extras.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'memcalib\[plan\]'"):
        run_jobs(Jobs(tmp_path, [shell("a", "true")]), say=quiet)


def test_gpus_that_this_machine_lacks_are_refused_unless_a_profile_names_a_cluster(monkeypatch):
    large = Job("a", "train", (), {}, gpus=8, title="8B: train gdpo")
    check_gpus([large], 8)
    with pytest.raises(ForeseenError, match=r"8B: train gdpo: needs 1 nodes with 8 GPUs.* has 2"):
        check_gpus([large], 2)
    monkeypatch.setenv(engine.PROFILE_VARIABLE, "cluster")
    check_gpus([large], 0)
    words = snakemake_words(Path("x"), 2, 0)
    assert "--cores" not in words, "how many run at once says the cluster's profile"


def test_a_plan_for_a_cluster_asks_for_nodes_gpus_and_time(tmp_path):
    """What Snakemake would submit for a job on two nodes, in a dry run of its own."""
    large = Job("large", "train", ("true",), {}, nodes=2, gpus=8, hours=160)
    jobs = Jobs(tmp_path, [large, shell("small", "true", reads=("large",), kind="evaluate")])
    jobs.write(["large", "small"])
    words = [*snakemake_words(tmp_path, 16, 8), "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert "nodes=2" in text and "gpu=8" in text and "runtime=1800" in text
    assert "train" in text and "evaluate" in text


def test_the_engine_plans_the_jobs_that_the_dry_run_lists(tmp_path):
    plan = Plan(load_profile("smoke", TINY), tmp_path)
    jobs = plan.jobs()
    jobs.write(jobs.to_do())
    words = [*snakemake_words(tmp_path, 2, 0), "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True)
    text = done.stdout + done.stderr
    for kind in ("train", "evaluate", "examples"):
        count = sum(job.kind == kind for job in jobs)
        assert any(line.split() == [kind, str(count)] for line in text.splitlines()), text
    listed = plan_text(jobs, [], 2)
    assert "Together 4 jobs, 4 to do" in listed and "short: train GDPO, seed 1" in listed
