"""Experiments of a run: planned, done once, found again, shown as stale,
resumed after a fault, listed by label.
"""

import errno
import json
from pathlib import Path

import pytest
from command_line import run as call
from plan_runs import run_jobs_here

import memcalib.products.reproduction.experiments as driver
import memcalib.products.reproduction.plan_steps as plan_steps
from memcalib.products.reproduction.experiments import (
    PAPER_ITEMS,
    Run,
    experiments,
    item_rows,
    notebook_parameters,
)
from memcalib.products.reproduction.code_hash import code_modules
from memcalib.products.reproduction.jobs import RECORD, STARTED, alone
from memcalib.products.reproduction.plan import TRAINED_BY
from memcalib.products.reproduction.profiles import load_profile
from memcalib.io.records import ForeseenError
from memcalib.io.settings import package_data

PROFILE = """
models: {short: {label: short, recipe: micro}}
traces: 0
"""


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
    Path("smoke.yaml").write_text(PROFILE)
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
                raise ForeseenError(f"{path.name}, cell {k + 1}: {error}") from None
            space |= parameters if k == 0 else {}
        return folder / "notebook.ipynb"

    def run(*arguments, **options):
        run_jobs_here(*arguments, **options, ran=ran)

    monkeypatch.setattr(driver, "run_jobs", run)
    monkeypatch.setattr(plan_steps, "run_notebook", execute)
    return ran


def states(out: Path) -> dict[str, str]:
    run = driver.open_run("smoke.yaml", out)
    return {
        row["label"]: row["status"]
        for row in item_rows(run)
        if row["experiment"] in ("first", "second")
    }


def test_an_experiment_brings_what_it_reads_and_nothing_is_done_twice(checkout, in_process):
    done = driver.reproduce_experiments(["second"], "smoke.yaml", "runs")
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
        if path.is_file() and "index" not in path.name and path.name != "plan.json"
    }
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == ["first", "second"]
    assert [path for path, content in before.items() if path.read_bytes() != content] == []
    page = Path("runs/smoke/index.html").read_text()
    assert (
        "tab:eta-sweep" in page
        and 'href="first/tables/tab-eta-sweep.csv"' in page
        and "published only" in page
    )


def test_a_stale_folder_is_shown_moved_away_and_made_again_with_all_that_reads_it(
    checkout, in_process, capsys
):
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    Path("runs/smoke/first/left.txt").write_text("of the earlier run")
    notebook(
        checkout / "nbs/experiments/e01_first.ipynb",
        *(text.replace("rows = 3", "rows = 4") for text in FIRST),
    )
    assert states(Path("runs")) == {"tab:eta-sweep": "stale", "tab:judge-stability": "stale"}
    driver.reproduce_experiments([], "smoke.yaml", "runs", dry_run=True)
    text = capsys.readouterr().out
    assert "stale (code, rows changed)" in text and "stale (first changed)" in text
    driver.reproduce_experiments([], "smoke.yaml", "runs")
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
    driver.reproduce_experiments([], "smoke.yaml", "runs")
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
        driver.reproduce_experiments([], "smoke.yaml", "runs")
        cells = json.loads(executed.read_text())["cells"]
        assert [cell["id"] for cell in cells] == ["c0", "m0", "injected", "c1"] and in_process == [
            "first",
            "second",
        ]
        assert cells[3]["outputs"][0]["text"] == ["looked at"] and cells[3]["source"].startswith(
            "#| fig-alt"
        )


def test_two_commands_do_not_work_in_one_folder(checkout, in_process):
    with (
        alone(Path("runs/smoke"), "plan", ""),
        pytest.raises(RuntimeError, match="another command is working in this folder"),
    ):
        driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == []


def test_a_parameter_of_the_profile_arrives_and_makes_only_its_experiment_stale(
    checkout, in_process
):
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    driver.reproduce_experiments(
        [], "smoke.yaml", "runs", settings=["experiments.second.factor=10"]
    )
    assert in_process == ["first", "second", "second"]
    assert (
        Path("runs/smoke/second/tables/tab-judge-stability-published.csv").read_text() == "n\n30\n"
    )


def test_a_failing_cell_is_named_and_the_command_goes_on_where_it_stopped(checkout, in_process):
    with pytest.raises(RuntimeError) as error:
        driver.reproduce_experiments(
            [], "smoke.yaml", "runs", settings=["experiments.second.fail=true"]
        )
    assert "e02_second.ipynb, cell 3: as asked" in str(error.value)
    command = str(error.value).partition("continue with: ")[2]
    asked = "--set experiments.second.fail=true"
    assert command == f"memcalib reproduce --profile smoke.yaml --out runs {asked}"
    run = driver.open_run("smoke.yaml", "runs", ["experiments.second.fail=true"])
    state, reason = run.experiments["second"].state()
    assert state == "failed" and "e02_second.ipynb, cell 3: as asked" in reason
    assert (
        Path("runs/smoke/second/notebook.ipynb").is_file()
        and "failed: notebook: e02" in Path("runs/smoke/index.html").read_text()
    )
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == ["first", "second", "second"], (
        "what was right before the fault is not done again"
    )


def test_a_fault_stops_those_that_need_it_and_no_others(checkout, in_process):
    folder = checkout / "nbs/experiments"
    notebook(folder / "e01_first.ipynb", FIRST[0], "1 / 0")
    notebook(folder / "e03_third.ipynb", *FIRST)
    with pytest.raises(RuntimeError, match="second: needs first, which does not exist"):
        driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == ["first", "third"]


def test_a_full_disk_is_one_line_and_a_way_on(checkout, in_process):
    full = f"raise OSError({errno.ENOSPC}, 'No space left on device')"
    notebook(checkout / "nbs/experiments/e01_first.ipynb", FIRST[0], full)
    with pytest.raises(RuntimeError, match="No space left on device") as error:
        driver.reproduce_experiments(["first"], "smoke.yaml", "runs")
    assert "continue with: memcalib reproduce first" in str(error.value)


def test_a_run_that_was_killed_goes_on_in_its_folder(checkout, in_process, monkeypatch):
    with monkeypatch.context() as killed:
        stop = (_ for _ in ()).throw
        killed.setattr(plan_steps, "run_notebook", lambda *_: stop(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            driver.reproduce_experiments(["first"], "smoke.yaml", "runs")
    Path("runs/smoke/first/half.txt").write_text("made before the kill")
    assert Path("runs/smoke/first", STARTED).is_file()
    assert states(Path("runs"))["tab:eta-sweep"] == "unfinished"
    driver.reproduce_experiments(["first"], "smoke.yaml", "runs")
    assert Path("runs/smoke/first/half.txt").exists()
    assert states(Path("runs"))["tab:eta-sweep"] == "measured"


def test_rows_that_are_not_kept_are_made_again_only_for_those_that_read_them(checkout, in_process):
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    record = Path("runs/smoke/first", RECORD)
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"rows": ["judgments.jsonl"]}))  # as in a clone
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == ["first", "second"], "all is shown and valid"
    driver.reproduce_experiments(
        ["second"], "smoke.yaml", "runs", settings=["experiments.second.factor=1"]
    )
    assert in_process == ["first", "second", "first", "second"]


def test_packed_rows_are_read_in_a_clone_instead_of_a_second_run(checkout, in_process):
    write = "Path(out_dir, 'judgments.jsonl').write_text('{}\\n')"
    notebook(checkout / "nbs/experiments/e01_first.ipynb", *FIRST, write)
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    folder = Path("runs/smoke/first")
    assert json.loads((folder / RECORD).read_text())["rows"] == ["judgments.jsonl"]
    assert (folder / "rows/judgments.jsonl.gz").is_file()
    (folder / "judgments.jsonl").unlink()  # as in a clone of the repository
    driver.reproduce_experiments(
        ["second"], "smoke.yaml", "runs", settings=["experiments.second.factor=1"]
    )
    assert in_process == ["first", "second", "second"]
    assert (folder / "judgments.jsonl").read_text() == "{}\n"


def test_results_of_other_code_are_accepted_with_a_reason(checkout, in_process, capsys):
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    path = checkout / "nbs/experiments/e01_first.ipynb"
    notebook(path, *FIRST, "# a remark")
    assert states(Path("runs"))["tab:eta-sweep"] == "stale"
    driver.reproduce_experiments([], "smoke.yaml", "runs", accept="a remark changes nothing")
    assert "2 results accepted: first, second" in capsys.readouterr().out
    assert states(Path("runs"))["tab:eta-sweep"] == "accepted"
    index = Path("runs/smoke/index.ipynb").read_text()
    assert "- first: a remark changes nothing" in index and "stale: " not in index
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == ["first", "second"]
    assert json.loads(Path("runs/smoke/first", RECORD).read_text())["accepted"]["reason"]


def test_the_packed_rows_of_the_committed_run_stay_small():
    packed = Path(__file__).parents[3].glob("runs/micro/*/rows/**/*.gz")
    assert sum(file.stat().st_size for file in packed) < 15_000_000


def test_what_goes_beyond_the_paper_runs_only_when_it_is_named(checkout, in_process):
    notebook(checkout / "nbs/experiments/e04_more.ipynb", *FIRST)
    driver.reproduce_experiments([], "smoke.yaml", "runs")
    assert in_process == ["first", "second"]
    driver.reproduce_experiments(["more"], "smoke.yaml", "runs")
    assert in_process == ["first", "second", "more"]


@pytest.mark.parametrize(
    ("names", "settings", "needle"),
    [
        (["frist"], [], "perhaps you meant first"),
        (
            [],
            ["experiments.second.facter=1"],
            "experiments.second.facter: perhaps you meant factor",
        ),
        ([], ["experiment={}"], "experiments"),
        ([], ["experiments.thrid.factor=1"], "experiments.thrid: there is no such experiment"),
    ],
)
def test_mistakes_are_named_before_anything_runs(checkout, in_process, names, settings, needle):
    with pytest.raises(ValueError, match="allowed") as error:
        driver.reproduce_experiments(names, "smoke.yaml", "runs", settings=settings)
    assert needle in str(error.value) and not in_process and not Path("runs/smoke/first").exists()


def test_parameters_must_be_plain_values_in_one_cell(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"e09_x\.ipynb: the cell tagged `parameters` contains more than plain "
        r"values",
    ):
        notebook_parameters(notebook(tmp_path / "e09_x.ipynb", "a = max(1, 2)"))
    bare = notebook(tmp_path / "e08_x.ipynb", "a = 1")
    bare.write_text(bare.read_text().replace('"parameters"', '"other"'))
    with pytest.raises(ValueError, match="found 0 cells tagged `parameters`"):
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


def test_code_that_a_training_never_reads_does_not_decide_it():
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


LABELLED = {name for _, parts in PAPER_ITEMS.values() for name in parts}


@pytest.mark.parametrize("profile", ["smoke", "micro", "small", "paper"])
def test_every_notebook_can_be_planned(profile, tmp_path):
    """Its parameters can be read, those of the profile are known, and what it reads has jobs."""
    run = Run(tmp_path, load_profile(profile), profile)
    assert set(run.experiments) >= LABELLED
    if profile in ("smoke", "micro"):
        assert set(run.experiments) == set(experiments())
    for name, experiment in run.experiments.items():
        assert experiment.parameters.keys() == experiment.defaults.keys(), name
        assert run.jobs.needed([name])[-1] == name and "out_dir" in experiment.defaults


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
