"""The whole pipeline on the micro-world: it ends, it resumes, it refuses,
and its frozen file is that of the code.
"""

import json
from pathlib import Path

import pytest
from build_files import fill_in, role_settings, write_description
from command_line import run

from memcalib.commands.build import load_build
from memcalib.commands.cli import build
from memcalib.products.dataset import stages
from memcalib.products.dataset.build import STAGES, Build
from memcalib.products.dataset.build_run import BuildRun
from memcalib.products.dataset.pilot import FreezeError, check_frozen, read_frozen
from memcalib.products.dataset.pipeline import Pipeline, row_lineage
from memcalib.products.dataset.splits import read_splits
from memcalib.products.dataset.stages import Drop
from memcalib.io.records import DataError, read_jsonl
from memcalib.products.dataset.consent import NotAgreed
from memcalib.products.micro.practice.mistakes import micro_roles
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import load_examples
from memcalib.products.reproduction.experiments import experiments
from memcalib.products.reproduction.plan_steps import run_notebook


def test_the_shipped_frozen_file_is_that_of_the_code(tmp_path):
    settings = Pipeline(load_build("micro"), tmp_path).settings()
    assert check_frozen(settings, read_frozen("micro").settings) == []


def folder_options(tmp_path) -> list:
    """Where a build of a test lies, as options."""
    return ["--out", tmp_path / "b", "--cache", tmp_path / "c.sqlite"]


def test_build_makes_lints_splits_and_documents(capsys, tmp_path):
    arguments = ["build", "micro", "--rows", 24, *folder_options(tmp_path)]
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    assert "near duplicate" in out and "Card:" in out
    folder = tmp_path / "b"
    examples = load_examples(folder / "examples.jsonl")
    splits = read_splits(folder / "splits", examples)
    assert set(splits) == {"train", "test"}
    assert sorted(splits["train"] + splits["test"]) == sorted(e.id for e in examples)
    for name, ids in splits.items():  # the files that the card names
        assert sorted(e.id for e in load_examples(folder / f"{name}.jsonl")) == ids
    for file in (
        "README.md",
        "manifest.json",
        "tables/structure.md",
        "tables/checks.csv",
        "tables/reviewers.tex",
    ):
        assert (folder / file).stat().st_size
    first = (folder / "examples.jsonl").read_bytes()
    code, _, err = run(capsys, *arguments)
    assert code == 0 and (folder / "examples.jsonl").read_bytes() == first, err
    code, out, _ = run(capsys, "lint", folder / "examples.jsonl")
    assert code == 0 and "0 errors" in out


def micro_run(tmp_path, **settings) -> BuildRun:
    """A build of the micro-world whose command is `memcalib build x.yaml`."""
    build = Build(micro=120, seed=2, **settings)
    return BuildRun(build, tmp_path / "b", tmp_path / "c.sqlite", "memcalib build x.yaml")


def test_a_pilot_is_read_and_unlocks_freezing(tmp_path):
    build_run = micro_run(tmp_path, rows=12)
    with pytest.raises(FreezeError, match="no pilot batch"):
        build_run.freeze()
    text = build_run.pilot(4)
    assert "4 examples" in text and "--reviews" in text
    with pytest.raises(FreezeError, match="all rows must be reviewed"):
        build_run.freeze()
    sheet = fill_in(tmp_path / "b" / "pilots" / "batch-01" / "sheet.csv")
    assert "4 passed" in build_run.take_reviews(sheet, "a reader")
    assert build_run.freeze().is_file()
    assert build_run.run().is_file() and load_examples(tmp_path / "b" / "examples.jsonl")


def test_settings_changed_after_freezing_are_refused_before_any_call(tmp_path):
    changed = micro_run(tmp_path, rows=10, plan={"seed": 5})
    with pytest.raises(FreezeError, match="plan"):
        changed.run()
    assert not changed.pipeline.results and not (tmp_path / "b" / "stages").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sources: [{source: OASST1}]", "builder"),
        (
            "sources: [{source: oasst1}]",
            r"bad.yaml: sources.0: found 'oasst1'; allowed: MedDialog, .*OASST1",
        ),
        ("micro: 3\nsplits: {train: 0.5, examples: 0.5}", "splits: found the name examples"),
        ("micro: 3\nsplits: {train: 0.5, pool: 0.5}", "splits: found the name pool"),
        ("rows: many\nmicro: 3", "bad.yaml: rows: found 'many'; allowed: whole numbers"),
        ("", "bad.yaml: .*found None; allowed: a mapping with some of sources"),
        ("- micro", "bad.yaml: .*found \\['micro'\\]; allowed: a mapping"),
        ("micro: 3\nnear: {treshold: 0.9}", "bad.yaml: .*near.treshold: .*allowed: .*threshold"),
        (
            "sources: [{path: a, question: q, answer: a, domian: x}]",
            "bad.yaml: .*sources.0.domian: .*allowed: .*domain",
        ),
        ("micro: 3\nsplits: {train: 0.9, test: 0.9}", "bad.yaml: .*found 1.8 in all"),
        ("micro: 3\nsplits: {train: x}", "bad.yaml: .*found 'x' for train"),
        ("micro: 3\nsplits: {../../x: 0.5}", "bad.yaml: .*found the name '../../x'"),
        (
            "micro: 3\nrows: 50\nsplits: {train: 60}",
            "bad.yaml: .*found 60 in all; allowed: at most 50",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_row_is_read(tmp_path, content, message):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_build(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    "steps",
    [["--pilot", 3, "--freeze"], ["--reviews", "s.csv", "--pilot", 3], ["--freeze", "--preview"]],
)
def test_two_steps_at_once_are_refused(capsys, tmp_path, steps):
    code, _, err = run(capsys, "build", "micro", "--out", tmp_path / "b", *steps)
    assert code == 1 and "found together; allowed: one of them" in err
    assert not (tmp_path / "b").exists()


def test_a_file_is_no_folder(capsys, tmp_path):
    (tmp_path / "b").write_text("mine")
    code, _, err = run(capsys, "build", "micro", "--out", tmp_path / "b", "--pilot", 3)
    assert code == 1 and "b: found a file; allowed: a folder" in err
    assert (tmp_path / "b").read_text() == "mine"


def test_a_key_in_a_description_is_not_repeated(tmp_path):
    key = "sk-" + "a1b2c3d4" * 4
    end = f"{{model: m, base_url: 'http://127.0.0.1:1/v1', api_key: {key}, max_tokens: {key}}}"
    (tmp_path / "bad.yaml").write_text(f"micro: 3\nbuilder: {end}\n")
    with pytest.raises(ValueError, match="builder.api_key: .*key_env") as error:
        load_build(tmp_path / "bad.yaml")
    assert key not in str(error.value)
    with pytest.raises(FileNotFoundError, match="allowed: micro"):
        load_build("nothing")


def test_sources_of_ones_own_that_all_fail_are_counted_by_reason(tmp_path):
    (tmp_path / "rows.csv").write_text("q,a\nhi,yes\nhello,no\n")
    build = Build(sources=[table(tmp_path / "rows.csv")], **role_settings("http://127.0.0.1:9/v1"))
    with pytest.raises(DataError, match="0 of 2 rows accepted"):
        BuildRun(build, tmp_path / "b", tmp_path / "c.sqlite").pilot(5)


# bad input, as a user meets it

ASK = (
    "Please plan a trip for work. My food is pizza and I must avoid ferry, "
    "what do you think I should do about it?"
)
ANSWER = (
    "Here is one way to do it. Build the plan on pizza. Keep ferry in mind and leave it out, "
    "that is what I would do."
)


@pytest.fixture
def server():
    with MicroServer([], roles=micro_roles()) as server:
        yield server


def table(path) -> dict:
    return {"path": str(path), "question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"frage,antwort\nWhy?,So.\n", "columns frage, antwort"),
        ("a.jsonl", b"", "no records"),
        ("a.jsonl", b'{"q": "hi", "a": "yes"}\n' * 3, "0 of 3 rows accepted: 3 by question length"),
        ("a.jsonl", '{"q": "caf\xe9", "a": "x"}\n'.encode("latin-1"), "encoding"),
        (
            "a.jsonl",
            json.dumps({"q": "word " * 200_000, "a": ANSWER}).encode() + b"\n",
            "999,999 characters",
        ),
        (
            "a.jsonl",
            json.dumps({"q": ASK, "a": "x" * 1_000_000}).encode() + b"\n",
            "1,000,000 characters",
        ),
    ],
)
def test_sources_that_give_no_row(capsys, tmp_path, server, name, content, message):
    (tmp_path / name).write_bytes(content)
    file = tmp_path / "own.yaml"
    write_description(file, server.base_url, sources=[table(tmp_path / name)])
    code, _, err = run(capsys, "build", file, *folder_options(tmp_path), "--pilot", 2)
    assert code == 1 and message in err and server.stats()["requests"] == 0
    if "accepted" in err:
        assert "losses.jsonl" in err and f"continue with: memcalib build {file}" in err
        assert err.strip().endswith("--pilot 2")
        assert (tmp_path / "b" / "losses.jsonl").stat().st_size


def test_mixed_encodings_and_huge_rows_cost_themselves_alone(tmp_path, server):
    longer = f"{ASK} Or a party, with cake and games and songs?"
    lines = [
        '{"q": "caf\xe9", "a": "x"}'.encode("latin-1"),
        json.dumps({"q": ASK, "a": ANSWER}).encode(),
        '{"q": "u", "a": "x"}'.encode("utf-16").replace(b"\n", b""),
        json.dumps({"q": longer, "a": ANSWER}).encode(),
        json.dumps({"q": "w " * 500_000, "a": "x"}).encode(),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    file = tmp_path / "own.yaml"
    write_description(file, server.base_url, sources=[table(tmp_path / "a.jsonl")])
    passed = BuildRun(load_build(file), tmp_path / "b").pool()
    assert len(passed.kept) == 2
    rules = sorted(drop.rule for drop in passed.dropped)
    assert rules == ["encoding", "encoding", "question length"]
    assert [drop.line for drop in passed.dropped if drop.rule == "encoding"] == [1, 3]


@pytest.mark.parametrize(
    ("models", "stage", "reason", "before"),
    [
        ({"builder": "micro-builder-broken"}, "screening", "invalid reply", 0),
        ({"reviewer": "micro-reviewer-never"}, "review-1", "not approved", 6),
    ],
)
def test_a_model_that_never_does_it(capsys, tmp_path, server, models, stage, reason, before):
    file = tmp_path / "own.yaml"
    write_description(file, server.base_url, models, micro=120, seed=2)
    code, _, err = run(capsys, "build", file, *folder_options(tmp_path), "--pilot", 30)
    assert code == 1 and f"stage {stage}: the first 20 rows" in err and reason in err
    assert err.count("continue with") == 1 and "--pilot 30" in err
    assert ("--set reviewer.model=NAME" in err) == ("reviewer" in models)
    stages = tmp_path / "b" / "pilots" / "draw-01" / "stages"
    assert len(list(stages.glob("*.jsonl"))) == before + 1
    file_of_stage = stages / f"{stage}.jsonl"
    assert file_of_stage.read_bytes().count(b"\n") == 20 and str(file_of_stage) in err
    code, _, err = run(capsys, "build", file, "--out", tmp_path / "b")
    assert code == 1 and "not the one frozen in micro" in err and "Restore the settings" in err


def test_few_rows_and_a_reviewer_that_never_approves(tmp_path, server):
    never = {"reviewer": "micro-reviewer-never"}
    file = write_description(tmp_path / "own.yaml", server.base_url, never, micro=60, seed=2)
    build_run = BuildRun(
        load_build(file), tmp_path / "b", tmp_path / "c.sqlite", "memcalib build own.yaml"
    )
    message = r"stage review-1: found every row lost \(\d+ by 'not approved'"
    with pytest.raises(DataError, match=message) as error:
        build_run.pilot(4)
    assert "continue with: memcalib build own.yaml --pilot 4" in str(error.value)


def test_one_model_is_not_two_reviewers(tmp_path, server):
    same = {"reviewer2": "micro-reviewer"}
    file = write_description(tmp_path / "own.yaml", server.base_url, same, micro=5)
    with pytest.raises(ValueError, match="allowed: two different models"):
        load_build(file)


def test_prompts_changed_after_freezing_are_refused(monkeypatch, capsys, tmp_path):
    text = stages.load_build_prompt("rubrics-2")
    shipped = stages._shipped

    def changed_prompt(name):
        return f"{text} Be brief." if name == "rubrics-2" else shipped(name)

    monkeypatch.setattr(stages, "_shipped", changed_prompt)
    code, _, err = run(capsys, "build", "micro", "--rows", 10, "--out", tmp_path / "b")
    assert code == 1 and "rubrics: prompt text: frozen" in err and "annotation" not in err
    assert "--pilot 50" in err and "--freeze" in err and not (tmp_path / "b" / "stages").exists()


def test_a_sheet_with_wrong_values_changes_nothing(tmp_path):
    build_run = micro_run(tmp_path, rows=30)
    message = "found no batch; make one with: memcalib build x.yaml --pilot 50"
    with pytest.raises(FileNotFoundError, match=message):
        build_run.take_reviews(tmp_path / "sheet.csv", "a reader")
    build_run.pilot(4)
    sheet = tmp_path / "b" / "pilots" / "batch-01" / "sheet.csv"
    head, *rows = sheet.read_text(encoding="utf-8-sig").splitlines()
    wrong = [
        head,
        rows[0].replace(",,", ",maybe,", 1),
        rows[1].replace(",,", ",fail,", 1),
        ",stranger,pass,,,,,",
    ]
    (tmp_path / "wrong.csv").write_text("\n".join(wrong) + "\n")
    with pytest.raises(DataError) as error:
        build_run.take_reviews(tmp_path / "wrong.csv", "a reader")
    for words in (
        "wrong.csv:2",
        "'maybe'",
        "wrong.csv:3",
        "without an issue",
        "wrong.csv:4",
        "'stranger'",
    ):
        assert words in str(error.value)
    with pytest.raises(FreezeError, match="0 passed, 0 failed, 4 left of 4"):
        build_run.freeze()


def test_the_way_of_a_row_ends_where_it_was_lost(tmp_path):
    build_run = micro_run(tmp_path, rows=50)
    build_run.run()
    example = load_examples(tmp_path / "b" / "examples.jsonl")[0]
    lineage = row_lineage(build_run.folder, example.id)
    assert list(lineage.index) == ["source", *STAGES, "data set"]
    assert example.question in lineage.loc["derivation", "what it added"]
    assert lineage.loc["data set", "outcome"] == "kept"
    for drop in read_jsonl(tmp_path / "b" / "dropped.jsonl", Drop):
        lineage = row_lineage(build_run.folder, drop.id)
        assert lineage.index[-1] == drop.stage
        assert lineage.iloc[-1]["outcome"] == f"lost: {drop.reason}"
    with pytest.raises(KeyError, match="no row 'nobody'"):
        row_lineage(build_run.folder, "nobody")


def test_a_build_that_does_not_exist_is_named_with_those_that_do(capsys, tmp_path):
    code, _, err = run(capsys, "build", "nothing", "--out", tmp_path / "b")
    assert code == 1 and "allowed: micro" in err


REFUSED = [
    ({"name": "nothing"}, FileNotFoundError),
    ({"pilot": 2, "freeze": True}, ValueError),
    ({"reviews": Path("none.csv")}, FileNotFoundError),
    ({"freeze": True}, FreezeError),
    ({"from_memory": "nowhere.jsonl"}, FileNotFoundError),
    ({"from_memory": "empty.jsonl"}, DataError),
    ({"from_memory": "micro", "rows": 3}, NotAgreed),
]


@pytest.mark.parametrize(("options", "error"), REFUSED, ids=str)
def test_what_build_refuses_ends_with_1(options, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    with pytest.raises(error) as caught:
        build(**{"out": tmp_path / "b", "no_cache": True, **options})
    assert getattr(caught.value, "exit_code", 1) == 1


def test_the_command_to_go_on_has_every_option_that_counts(capsys, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"micro": 60, "plan": {"seed": 5}}))
    cache = tmp_path / "c"
    options = ["--rows", 7, "--out", tmp_path / "b", "--cache", cache]
    code, _, err = run(capsys, "build", file, *options)
    assert code == 1
    assert f"--out {tmp_path / 'b'} --rows 7 --cache {cache} --pilot 50" in err


@pytest.mark.slow
def test_the_experiment_on_benchmark_statistics_runs_under_papermill(tmp_path):
    folder = tmp_path / "statistics"
    parameters = {"out_dir": str(folder), "rows": 30, "log_rows": 20}
    assert run_notebook(experiments()["benchmark_statistics"], folder, parameters).is_file()
    for name in ("from_sources", "from_log"):
        assert (folder / name / "examples.jsonl").stat().st_size
        assert (folder / name / "README.md").is_file()
    assert "published" in (folder / "tables" / "tab-benchmark-structure.md").read_text()
