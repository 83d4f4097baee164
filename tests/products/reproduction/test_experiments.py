"""Experiments of a run: planned, done once, found again, shown as stale,
resumed after a fault, listed by label.
"""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run as call
from filelock import FileLock

import memcalib.products.reproduction.experiments as driver
from memcalib.products.reproduction.experiments import (
    PAPER_ITEMS,
    Run,
    experiments,
    item_rows,
    notebook_parameters,
)
from memcalib.products.reproduction.main_results import load_profile, main_trainings, training_grid
from memcalib.products.reproduction.training_store import Training, TrainingStore, code_modules
from memcalib.io.settings import package_data

SMOKE = load_profile("smoke")


def notebook(path: Path, *sources: str) -> Path:
    """A notebook with these code cells; the first has the parameters."""

    def tags(k):
        return {"tags": ["parameters"]} if k == 0 else {}

    cells = [
        {
            "cell_type": "code",
            "id": f"c{k}",
            "metadata": tags(k),
            "source": s,
            "outputs": [],
            "execution_count": None,
        }
        for k, s in enumerate(sources)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


WRITE = "from pathlib import Path\nPath(out_dir, 'tables').mkdir(exist_ok=True)\n"
FIRST = (
    "rows = 3\nout_dir = 'x'",
    WRITE + "Path(out_dir, 'tables', 'tab-eta-sweep.csv').write_text(f'n\\n{rows}\\n')",
)
SECOND = (
    "factor = 2\nfail = False\nfirst_dir = 'y'\nout_dir = 'x'",
    WRITE + "n = int(Path(first_dir, 'tables', 'tab-eta-sweep.csv').read_text().split()[1])",
    "assert not fail, 'as asked'",
    (
        "Path(out_dir, 'tables', 'tab-judge-stability-published.csv').write_text(f'n\\n{n * "
        "factor}\\n')"
    ),
)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout with two experiments, the second of which reads the first; commands run there."""
    folder = tmp_path / "checkout" / "nbs" / "experiments"
    notebook(folder / "e01_first.ipynb", *FIRST)
    notebook(folder / "e02_second.ipynb", *SECOND)
    items = {
        "tab:eta-sweep": ("sweep", {"first": ""}),
        "tab:judge-stability": ("ranks", {"second": ""}),
    }
    items |= {"tab:third": ("another", {"third": ""})}
    monkeypatch.setattr(driver, "PAPER_ITEMS", PAPER_ITEMS | items)
    monkeypatch.chdir(folder.parents[1])
    return folder.parents[1]


@pytest.fixture
def in_process(monkeypatch) -> list[str]:
    """Notebooks are executed here, as plain Python and one after the other;
    the names of those that ran.
    """
    ran = []

    def execute(path, folder, parameters, cwd=None):
        (folder / "notebook.ipynb").write_text(path.read_text())
        space: dict = {}
        for k, cell in enumerate(driver.notebook_cells(path)):
            try:
                with pytest.MonkeyPatch.context() as patches:
                    patches.chdir(cwd)
                    exec(cell["source"], space)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001
                raise RuntimeError(f"{path.name}, cell {k + 1}: {error}") from None
            space |= parameters if k == 0 else {}
        return folder / "notebook.ipynb"

    def run_tasks(tasks, processes, say=print):
        failed = {}
        for task in tasks:
            broken = sorted(task.needs & failed.keys())
            if broken:
                failed[task.name] = f"needs {broken[0]}, which failed"
                continue
            ran.append(task.name)
            try:
                task.work(*task.arguments)
            except Exception as error:  # noqa: BLE001
                failed[task.name] = str(error)
        return failed

    monkeypatch.setattr(driver, "run_notebook", execute)
    monkeypatch.setattr(driver, "run_tasks", run_tasks)
    return ran


def states(out: Path) -> dict[str, str]:
    run = Run(out.resolve() / "smoke", SMOKE, "smoke")
    return {
        row["label"]: row["status"]
        for row in item_rows(run)
        if row["experiment"] in ("first", "second")
    }


def test_an_experiment_brings_what_it_reads_and_nothing_is_done_twice(checkout, in_process):
    done = driver.reproduce_experiments(["second"], "smoke", "runs")
    assert in_process == ["first", "second"] and [path.parent.name for path in done] == [
        "first",
        "second",
    ]
    assert (
        Path("runs/smoke/second/tables/tab-judge-stability-published.csv").read_text() == "n\n6\n"
    )
    assert states(Path("runs")) == {
        "tab:eta-sweep": "measured",
        "tab:judge-stability": "published only",
    }
    before = {
        path: path.read_bytes()
        for path in Path("runs").rglob("*")
        if path.is_file() and "index" not in path.name
    }
    driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == ["first", "second"] and all(
        path.read_bytes() == content for path, content in before.items()
    )
    page = Path("runs/smoke/index.html").read_text()
    assert (
        "tab:eta-sweep" in page
        and 'href="first/tables/tab-eta-sweep.csv"' in page
        and "published only" in page
    )


def test_a_stale_folder_is_shown_moved_away_and_made_again_with_all_that_reads_it(
    checkout, in_process, capsys
):
    driver.reproduce_experiments([], "smoke", "runs")
    Path("runs/smoke/first/left.txt").write_text("of the earlier run")
    notebook(
        checkout / "nbs/experiments/e01_first.ipynb",
        *(text.replace("rows = 3", "rows = 4") for text in FIRST),
    )
    assert states(Path("runs")) == {"tab:eta-sweep": "stale", "tab:judge-stability": "stale"}
    driver.reproduce_experiments([], "smoke", "runs", dry_run=True)
    text = capsys.readouterr().out
    assert (
        "first                    stale (notebook, rows changed)" in text
        and "stale (reads changed)" in text
    )
    driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == ["first", "second"] * 2
    assert (
        not Path("runs/smoke/first/left.txt").exists()
        and Path("runs/smoke/stale/first/left.txt").exists()
    )
    assert (
        Path("runs/smoke/second/tables/tab-judge-stability-published.csv").read_text() == "n\n8\n"
    )


def test_prose_written_after_looking_comes_into_the_executed_notebook_and_repeats_nothing(
    checkout, in_process
):
    driver.reproduce_experiments([], "smoke", "runs")
    source = checkout / "nbs/experiments/e01_first.ipynb"
    executed = Path("runs/smoke/first/notebook.ipynb")
    looked_at = json.loads(executed.read_text())
    looked_at["cells"][1]["outputs"] = [
        {"output_type": "stream", "name": "stdout", "text": ["looked at"]}
    ]
    looked_at["cells"].insert(
        1, looked_at["cells"][0] | {"id": "injected", "source": "rows = 3"}
    )  # papermill's
    executed.write_text(json.dumps(looked_at))
    written = json.loads(source.read_text())
    written["cells"][1]["source"] = "#| fig-alt: nothing to see\n" + FIRST[1]
    written["cells"].insert(
        1, {"cell_type": "markdown", "id": "m0", "metadata": {}, "source": "Rows came out as 3."}
    )
    source.write_text(json.dumps(written))
    for _ in range(2):
        driver.reproduce_experiments([], "smoke", "runs")
        cells = json.loads(executed.read_text())["cells"]
        assert [cell["id"] for cell in cells] == ["c0", "m0", "injected", "c1"] and in_process == [
            "first",
            "second",
        ]
        assert cells[3]["outputs"][0]["text"] == ["looked at"] and cells[3]["source"].startswith(
            "#| fig-alt"
        )


def test_two_commands_do_not_work_in_one_folder(checkout, in_process):
    Path("runs/smoke").mkdir(parents=True)
    with (
        FileLock("runs/smoke/.lock"),
        pytest.raises(RuntimeError, match="another command is at work there"),
    ):
        driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == []


def test_a_parameter_of_the_profile_arrives_and_makes_only_its_experiment_stale(
    checkout, in_process
):
    driver.reproduce_experiments([], "smoke", "runs")
    driver.reproduce_experiments([], "smoke", "runs", settings=["experiments.second.factor=10"])
    assert in_process == ["first", "second", "second"]
    assert (
        Path("runs/smoke/second/tables/tab-judge-stability-published.csv").read_text() == "n\n30\n"
    )


def test_a_failing_cell_is_named_and_the_command_goes_on_where_it_stopped(checkout, in_process):
    with pytest.raises(RuntimeError) as error:
        driver.reproduce_experiments([], "smoke", "runs", settings=["experiments.second.fail=true"])
    assert "second: e02_second.ipynb, cell 3: as asked" in str(error.value)
    command = str(error.value).partition("go on with: ")[2]
    assert (
        command
        == "memcalib reproduce second --profile smoke --out runs --set experiments.second.fail=true"
    )
    run = Run(
        Path("runs/smoke").resolve(),
        load_profile("smoke", ["experiments.second.fail=true"]),
        "smoke.yaml",
    )
    assert run.experiments["second"].state() == ("failed", "e02_second.ipynb, cell 3: as asked")
    assert (
        Path("runs/smoke/second/notebook.ipynb").is_file()
        and "failed: e02" in Path("runs/smoke/index.html").read_text()
    )
    driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == ["first", "second", "second"], (
        "what was right before the fault is not done again"
    )


def test_a_fault_stops_those_that_need_it_and_no_others(checkout, in_process):
    folder = checkout / "nbs/experiments"
    notebook(folder / "e01_first.ipynb", FIRST[0], "1 / 0")
    notebook(folder / "e03_third.ipynb", *FIRST)
    with pytest.raises(RuntimeError, match="second: needs first, which failed"):
        driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == ["first", "third"]


def test_a_full_disk_is_one_line_and_a_way_on(checkout, in_process):
    full = f"raise OSError({errno.ENOSPC}, 'No space left on device')"
    notebook(checkout / "nbs/experiments/e01_first.ipynb", FIRST[0], full)
    with pytest.raises(RuntimeError, match="No space left on device") as error:
        driver.reproduce_experiments(["first"], "smoke", "runs")
    assert "go on with: memcalib reproduce first" in str(error.value)


def test_a_run_that_was_killed_goes_on_in_its_folder(checkout, in_process, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(driver, "run_notebook", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            driver.run_experiment(
                Run(Path("runs/smoke").resolve(), SMOKE, "smoke").experiments["first"]
            )
    Path("runs/smoke/first/half.txt").write_text("made before the kill")
    assert states(Path("runs"))["tab:eta-sweep"] == "unfinished"
    driver.reproduce_experiments(["first"], "smoke", "runs")
    assert (
        Path("runs/smoke/first/half.txt").exists()
        and states(Path("runs"))["tab:eta-sweep"] == "measured"
    )


def test_rows_that_are_not_kept_are_made_again_only_for_those_that_read_them(checkout, in_process):
    driver.reproduce_experiments([], "smoke", "runs")
    record = Path("runs/smoke/first/experiment.json")
    content = json.loads(record.read_text())
    record.write_text(
        json.dumps(content | {"files": [*content["files"], "judgments.jsonl"]})
    )  # as in a clone of the repository
    driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == ["first", "second"], "all is shown and valid"
    driver.reproduce_experiments(
        ["second"], "smoke", "runs", settings=["experiments.second.factor=1"]
    )
    assert in_process == ["first", "second", "first", "second"]


def test_packed_rows_are_read_in_a_clone_instead_of_a_second_run(checkout, in_process):
    driver.reproduce_experiments([], "smoke", "runs")
    folder = Path("runs/smoke/first")
    (folder / "asked").mkdir()
    (folder / "asked/judgments.jsonl").write_text('{"example_id": "e1"}\n')
    (folder / "parts").mkdir()
    (folder / "parts/judgments.jsonl").write_text("{}\n")
    experiment = driver.open_run("smoke", "runs").experiments["first"]
    packed = experiment.pack_rows()
    assert packed == ["rows/asked/judgments.jsonl.gz"] == experiment.pack_rows()
    content = experiment.record | {"rows": experiment.rows(), "packed": packed}
    (folder / "experiment.json").write_text(json.dumps(content))
    (folder / "asked/judgments.jsonl").unlink()  # as in a clone of the repository
    driver.reproduce_experiments(
        ["second"], "smoke", "runs", settings=["experiments.second.factor=1"]
    )
    assert in_process == ["first", "second", "second"]
    assert (folder / "asked/judgments.jsonl").read_text() == '{"example_id": "e1"}\n'


def test_the_packed_rows_of_the_committed_run_stay_small():
    packed = Path(__file__).parents[3].glob("runs/micro/*/rows/**/*.gz")
    assert sum(file.stat().st_size for file in packed) < 15_000_000


def test_what_goes_beyond_the_paper_runs_only_when_it_is_named(checkout, in_process):
    notebook(checkout / "nbs/experiments/e04_more.ipynb", *FIRST)
    driver.reproduce_experiments([], "smoke", "runs")
    assert in_process == ["first", "second"]
    driver.reproduce_experiments(["more"], "smoke", "runs")
    assert in_process == ["first", "second", "more"]


@pytest.mark.parametrize(
    ("names", "settings", "needle"),
    [
        (["frist"], [], "meant is perhaps first"),
        ([], ["experiments.second.facter=1"], "experiments.second.facter: meant is perhaps factor"),
        ([], ["experiment={}"], "experiments"),
        ([], ["experiments.thrid.factor=1"], "experiments.thrid: no such experiment"),
    ],
)
def test_mistakes_are_named_before_anything_runs(checkout, in_process, names, settings, needle):
    with pytest.raises(ValueError, match="allowed") as error:
        driver.reproduce_experiments(names, "smoke", "runs", settings=settings)
    assert needle in str(error.value) and not in_process and not Path("runs/smoke/first").exists()


def test_parameters_must_be_plain_values_in_one_cell(tmp_path):
    with pytest.raises(
        ValueError, match=r"e09_x\.ipynb: the cell tagged parameters holds more than plain values"
    ):
        notebook_parameters(notebook(tmp_path / "e09_x.ipynb", "a = max(1, 2)"))
    bare = notebook(tmp_path / "e08_x.ipynb", "a = 1")
    bare.write_text(bare.read_text().replace('"parameters"', '"other"'))
    with pytest.raises(ValueError, match="found 0 cells tagged parameters"):
        notebook_parameters(bare)


def test_notebooks_are_found_in_an_installed_package(tmp_path, monkeypatch):
    """Away from a checkout the notebooks that travel with the package are taken."""
    package = tmp_path / "site" / "memcalib"
    notebook(package / "products" / "reproduction" / "experiments" / "e01_first.ipynb", *FIRST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "package_data", lambda *names: package.joinpath(*names))
    assert experiments() == {
        "first": package / "products" / "reproduction" / "experiments" / "e01_first.ipynb"
    }
    (package / "products" / "reproduction" / "experiments" / "e01_first.ipynb").unlink()
    with pytest.raises(FileNotFoundError, match="no experiment notebooks"):
        experiments()


def test_a_stranger_in_the_command_is_named(capsys):
    code, _, err = call(capsys, "reproduce", "no_such_experiment", "--profile", "smoke")
    assert code == 1 and "no experiment 'no_such_experiment'" in err and "main_results" in err
    code, _, err = call(capsys, "reproduce", "--profile", "huge")
    assert code == 1 and "huge" in err and "smoke" in err


def test_every_label_of_the_paper_is_listed_once():
    assert len(PAPER_ITEMS) == 21 and sum(label.startswith("fig:") for label in PAPER_ITEMS) == 7
    assert all(parts for _, parts in PAPER_ITEMS.values())


# -- trainings -------------------------------------------------------------------------------------


def test_what_decides_a_training_decides_its_folder(monkeypatch):
    base = main_trainings(SMOKE)["GDPO", 1]

    def other(**changes):
        return main_trainings(SMOKE.model_copy(update=changes))["GDPO", 1].key

    assert other() == base.key and other(eval_examples=77, eval_seeds=(1,), traces=9) == base.key
    different = [
        other(train=SMOKE.train.model_copy(update={"lr": 1e-5})),
        other(train_examples=99),
        other(path_examples=3),
        other(data_seed=8),
    ]
    different += [replace(base, seed=2).key, replace(base, method="grpo").key]
    monkeypatch.setattr(
        "memcalib.products.reproduction.training_store.code_hash", lambda modules: "other code"
    )
    different += [main_trainings(SMOKE)["GDPO", 1].key]
    assert len({base.key, *different}) == 1 + len(different)


def test_a_grid_shares_cells_with_the_main_results():
    arms = {"GDPO": {"method": "gdpo"}, "ordered": {}, "absolute": {"mode": "absolute"}}
    grid = training_grid(
        SMOKE, arms, {"short": {}, "long": {"steps": 1, "train_examples": 8}}, [1, 2]
    )
    main = {training.key for training in main_trainings(SMOKE).values()}
    assert len(grid) == 12 and len({training.key for training in grid.values()}) == 12
    assert {cell for cell, training in grid.items() if training.key in main} == {
        ("short", "GDPO", 1),
        ("short", "ordered", 1),
    }
    assert (
        grid["long", "absolute", 2].config.steps == 1
        and grid["long", "absolute", 2].config.mode == "absolute"
    )


def test_what_an_arm_says_counts_more_than_what_the_profile_says_of_its_method():
    profile = load_profile("smoke", ["overrides.memcalib-rl.eta=0.5"])
    grid = training_grid(profile, {"low": {"eta": 0.25}, "as it is": {}}, {"short": {}}, [1])
    assert [grid["short", arm, 1].config.eta for arm in ("low", "as it is")] == [0.25, 0.5]


@pytest.mark.parametrize("arm", [{"mode": "sideways"}, {"method": "ppo"}, {"stepz": 3}])
def test_settings_of_an_arm_at_fault_are_named(arm):
    with pytest.raises(ValueError, match="world short, arm wrong: "):
        training_grid(SMOKE, {"wrong": arm}, {"short": {}}, [1])


def test_a_training_needs_a_world():
    from memcalib.trainer.recipe import Recipe

    files = Recipe.model_validate(
        {"start": {"model": "cold-short"}, "data": {"train": "x.jsonl"}, "judge": "micro-exact"}
    )
    with pytest.raises(ValueError, match="allowed here: one that draws them from a world"):
        Training(files, "gdpo", 1)


def test_a_training_is_made_once_and_a_killed_one_begins_anew(tmp_path, monkeypatch):
    trained = []
    store = TrainingStore(tmp_path)
    one = main_trainings(SMOKE)["GDPO", 1]
    unfinished = tmp_path / f"{one.key}.part" / "work"
    unfinished.mkdir(parents=True)
    (unfinished / "steps.jsonl").write_text('{"step": 1}\n{"st')
    assert store.steps_so_far(one) == 0, "a torn line is no step"
    (unfinished / "steps.jsonl").write_text('{"step": 1}\n')
    assert store.steps_so_far(one) == 1 and one not in store

    def train(training, out, report=None):
        trained.append(training.key)
        Path(out).mkdir(parents=True)
        (Path(out) / "steps.jsonl").write_text('{"step": 1, "loss": 0}\n{"step": 2, "loss": 0}\n')

    monkeypatch.setattr("memcalib.products.reproduction.training_store.train_policy", train)
    monkeypatch.setattr(
        "memcalib.products.micro.policy.save_policy", lambda model, path, story: Path(path).mkdir()
    )
    assert store.make(one) == store.make(one) == tmp_path / one.key and trained == [one.key]
    assert store.missing([one]) == [] and [row["step"] for row in store.steps(one)] == [1, 2]
    assert json.loads((tmp_path / one.key / "training.json").read_text())["seed"] == 1


def test_code_that_a_training_never_reads_does_not_decide_it():
    from memcalib.products.reproduction.training_store import TRAINED_BY

    modules = code_modules(TRAINED_BY)
    assert {
        "memcalib.redistribution",
        "memcalib.trainer.distillation",
        "memcalib.products.micro.world",
        "memcalib.judge",
    } <= {*modules}
    assert not [
        name
        for name in modules
        if name.startswith(("memcalib.report", "memcalib.commands", "memcalib.products.dataset"))
    ]


# -- the shipped notebooks -------------------------------------------------------------------------


@pytest.mark.parametrize("name", experiments())
@pytest.mark.parametrize("profile", ["smoke", "micro"])
def test_every_notebook_can_be_planned(name, profile, tmp_path):
    """Its parameters can be read, those of the profile are known, and its trainings resolve."""
    run = Run(tmp_path, load_profile(profile), profile)
    experiment = run.experiments[name]
    assert (
        experiment.parameters.keys() == experiment.defaults.keys()
        and "out_dir" in experiment.defaults
    )
    assert all(
        training.config.steps if training.method != "sft" else training.steps
        for training in experiment.trainings
    )
    assert run.chosen([name])[-1] is experiment


@pytest.mark.parametrize("name", experiments())
def test_every_parameter_is_used(name):
    """A parameter that no cell reads could be passed without any effect;
    `profile` may only name the run.
    """
    import ast

    cells = [c for c in driver.notebook_cells(experiments()[name]) if c["cell_type"] == "code"]
    other_sources = "\n".join(
        c["source"] for c in cells if "parameters" not in c["metadata"].get("tags", [])
    )
    read = {node.id for node in ast.walk(ast.parse(other_sources)) if isinstance(node, ast.Name)}
    assert {*notebook_parameters(experiments()[name])} - {"profile"} <= read


def test_the_wheel_takes_the_notebooks_along():
    root = package_data().resolve().parent
    if not (root / "setup.py").is_file():
        pytest.skip("needs a checkout")
    assert "recursive-include nbs/experiments e*.ipynb" in (root / "MANIFEST.in").read_text()
    assert {path.name for path in experiments().values()} == {
        p.name for p in (root / "nbs" / "experiments").glob("e*.ipynb")
    }
