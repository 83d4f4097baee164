"""The whole pipeline on the micro-world: it ends, it resumes, it refuses, and its frozen file is that of the code."""

import csv
import json

import pytest
from command_line import run

from memcalib.dataset import stages as drafts
from memcalib.commands.build import Build, BuildRun, load_build, row_lineage, settings_of
from memcalib.dataset.pilot import FreezeError, check_frozen, read_frozen
from memcalib.practice.mistakes import micro_roles
from memcalib.practice.server import MicroServer
from memcalib.reproduction.experiments import experiments, run_notebook
from memcalib.problem import Example, load_examples
from memcalib.io.records import DataError, read_jsonl
from memcalib.dataset.splits import read_splits


def test_the_shipped_frozen_file_is_that_of_the_code():
    assert check_frozen(settings_of(load_build("micro")), read_frozen("micro").settings) == []


def test_build_makes_lints_splits_and_documents(capsys, tmp_path):
    arguments = [
        "build",
        "micro",
        "--rows",
        24,
        "--out",
        tmp_path / "b",
        "--cache",
        tmp_path / "c.sqlite",
    ]
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    assert "near duplicate" in out and "Card:" in out
    folder = tmp_path / "b"
    examples = load_examples(folder / "examples.jsonl")
    splits = read_splits(folder / "splits", examples)
    assert {i for ids in splits.values() for i in ids} == {e.id for e in examples} and set(
        splits
    ) == {"train", "test"}
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


def test_a_pilot_is_read_and_unlocks_freezing(capsys, tmp_path):
    build = Build(micro=80, rows=12, seed=2)
    own = BuildRun(build, tmp_path / "b", tmp_path / "c.sqlite", "memcalib build x.yaml")
    with pytest.raises(FreezeError, match="no pilot batch"):
        own.freeze()
    said = own.pilot(4)
    assert "4 examples" in said and "--reviews" in said
    sheet = tmp_path / "b" / "pilots" / "batch-01" / "sheet.csv"
    with pytest.raises(FreezeError, match="needed are all rows reviewed"):
        own.freeze()
    rows = list(csv.DictReader(sheet.open(encoding="utf-8-sig", newline="")))
    column = next(name for name in rows[0] if name.lower() in ("result", "pass or fail", "verdict"))
    for row in rows:
        row[column] = "pass"
    with sheet.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert "4 passed" in own.take_reviews(sheet, "a reader")
    assert own.freeze().is_file()
    assert own.run().is_file() and list(read_jsonl(tmp_path / "b" / "examples.jsonl", Example))


def test_settings_changed_after_freezing_are_refused_before_any_call(tmp_path):
    changed = BuildRun(
        Build(micro=60, rows=10, plan={"seed": 5}),
        tmp_path / "b",
        tmp_path / "c.sqlite",
        "memcalib build y",
    )
    with pytest.raises(FreezeError, match="plan"):
        changed.run()
    assert not changed.results and not (tmp_path / "b" / "stages").exists()


def test_faults_of_a_description_are_named(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("sources: [{source: OASST1}]\n")
    with pytest.raises(ValueError, match="builder"):
        load_build(bad)
    bad.write_text("sources: [{source: oasst1}]\n")
    with pytest.raises(
        ValueError, match=r"bad.yaml: sources.0: found 'oasst1'; allowed are MedDialog, .*OASST1"
    ):
        load_build(bad)
    for name in ("examples", "pool"):
        bad.write_text(f"micro: 3\nsplits: {{train: 0.5, {name}: 0.5}}\n")
        with pytest.raises(ValueError, match=f"splits: found the name {name}"):
            load_build(bad)
    bad.write_text("rows: many\nmicro: 3\n")
    with pytest.raises(ValueError, match=r"bad.yaml: rows: found 'many'; allowed: whole numbers"):
        load_build(bad)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "found None; allowed is a mapping with some of sources"),
        ("- micro", "found \\['micro'\\]; allowed is a mapping"),
        ("micro: 3\nnear: {treshold: 0.9}", "near.treshold: .*allowed: .*threshold"),
        (
            "sources: [{path: a, question: q, answer: a, domian: x}]",
            "sources.0.domian: .*allowed: .*domain",
        ),
        ("micro: 3\nsplits: {train: 0.9, test: 0.9}", "found 1.8 in all"),
        ("micro: 3\nsplits: {train: x}", "found 'x' for train"),
        ("micro: 3\nsplits: {../../x: 0.5}", "found the name '../../x'"),
        ("micro: 3\nrows: 50\nsplits: {train: 60}", "found 60 in all; allowed are up to 50"),
    ],
)
def test_what_cannot_be_is_refused_before_a_row_is_read(tmp_path, content, said):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ValueError, match=f"bad.yaml: .*{said}"):
        load_build(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    "steps",
    [["--pilot", 3, "--freeze"], ["--reviews", "s.csv", "--pilot", 3], ["--freeze", "--preview"]],
)
def test_two_steps_at_once_are_refused(capsys, tmp_path, steps):
    code, _, err = run(capsys, "build", "micro", "--out", tmp_path / "b", *steps)
    assert (
        code == 1
        and "found together; allowed is one step at a time" in err
        and not (tmp_path / "b").exists()
    )


def test_a_file_is_no_folder(capsys, tmp_path):
    (tmp_path / "b").write_text("mine")
    code, _, err = run(capsys, "build", "micro", "--out", tmp_path / "b", "--pilot", 3)
    assert (
        code == 1
        and "b: found a file; allowed is a folder" in err
        and (tmp_path / "b").read_text() == "mine"
    )


def test_a_key_in_a_description_is_not_repeated(tmp_path):
    key = "sk-" + "a1b2c3d4" * 4
    end = f"{{model: m, base_url: 'http://127.0.0.1:1/v1', api_key: {key}, max_tokens: {key}}}"
    (tmp_path / "bad.yaml").write_text(f"micro: 3\nbuilder: {end}\n")
    with pytest.raises(ValueError, match="builder.api_key: .*key_env") as error:
        load_build(tmp_path / "bad.yaml")
    assert key not in str(error.value)
    with pytest.raises(FileNotFoundError, match="allowed are micro"):
        load_build("nothing")


def test_sources_of_ones_own_that_all_fail_are_counted_by_reason(tmp_path):
    (tmp_path / "rows.csv").write_text("q,a\nhi,yes\nhello,no\n")
    source = {"path": str(tmp_path / "rows.csv"), "question": "q", "answer": "a"}
    role = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": ""}
    build = Build(sources=[source], builder=role, reviewer=role, reviewer2=role | {"model": "n"})
    with pytest.raises(DataError, match="0 of 2 rows accepted"):
        BuildRun(build, tmp_path / "b", tmp_path / "c.sqlite").pilot(5)


# bad input, as a user meets it

ASK = "Please plan a trip for work. My food is pizza and I must avoid ferry, what do you think I should do about it?"
ANSWER = "Here is one way to do it. Build the plan on pizza. Keep ferry in mind and leave it out, that is what I would do."


@pytest.fixture
def server():
    with MicroServer([], roles=micro_roles()) as server:
        yield server


def described(
    path,
    server,
    builder="micro-builder",
    reviewer="micro-reviewer",
    reviewer2="micro-reviewer-2",
    **more,
):
    def role(model):
        return {"model": model, "base_url": server.base_url, "key_env": "", "thinking": "default"}

    roles = {"builder": role(builder), "reviewer": role(reviewer), "reviewer2": role(reviewer2)}
    path.write_text(json.dumps(roles | more))
    return path


def table(path, **more) -> dict:
    return {"path": str(path), "question": "q", "answer": "a"} | more


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"frage,antwort\nWhy?,So.\n", "columns frage, antwort"),
        ("a.jsonl", b"", "no records"),
        ("a.jsonl", b'{"q": "hi", "a": "yes"}\n' * 3, "0 of 3 rows accepted: 3 by question length"),
        ("a.jsonl", '{"q": "caf\xe9", "a": "x"}\n'.encode("latin-1"), "encoding"),
        (
            "a.jsonl",
            json.dumps({"q": "word " * 200_000, "a": ANSWER}).encode() + b"\n",
            "999999 characters",
        ),
        (
            "a.jsonl",
            json.dumps({"q": ASK, "a": "x" * 1_000_000}).encode() + b"\n",
            "1000000 characters",
        ),
    ],
)
def test_sources_that_give_no_row(capsys, tmp_path, server, name, content, said):
    (tmp_path / name).write_bytes(content)
    build = described(tmp_path / "own.yaml", server, sources=[table(tmp_path / name)])
    arguments = [
        "build",
        build,
        "--out",
        tmp_path / "b",
        "--cache",
        tmp_path / "c.sqlite",
        "--pilot",
        2,
    ]
    code, _, err = run(capsys, *arguments)
    assert code == 1 and said in err and server.stats()["requests"] == 0
    if "accepted" in err:
        assert (
            "losses.jsonl" in err
            and f"go on with: memcalib build {build}" in err
            and err.strip().endswith("--pilot 2")
        )
        assert (tmp_path / "b" / "losses.jsonl").stat().st_size


def test_mixed_encodings_and_huge_rows_cost_themselves_alone(tmp_path, server):
    good = [
        json.dumps({"q": f"{ASK} {extra}", "a": ANSWER}).encode()
        for extra in ("", "Or a party, with cake and games and songs?")
    ]
    bad = [
        '{"q": "caf\xe9", "a": "x"}'.encode("latin-1"),
        '{"q": "u", "a": "x"}'.encode("utf-16"),
        json.dumps({"q": "w " * 500_000, "a": "x"}).encode(),
    ]
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join([bad[0], good[0], bad[1].replace(b"\n", b""), good[1], bad[2]]) + b"\n"
    )
    own = BuildRun(
        load_build(described(tmp_path / "own.yaml", server, sources=[table(tmp_path / "a.jsonl")])),
        tmp_path / "b",
    )
    passed = own.pool()
    assert len(passed.kept) == 2 and sorted(drop.rule for drop in passed.dropped) == [
        "encoding",
        "encoding",
        "question length",
    ]
    assert [drop.line for drop in passed.dropped if drop.rule == "encoding"] == [1, 3]


@pytest.mark.parametrize(
    ("roles", "stage", "reason", "before"),
    [
        ({"builder": "micro-builder-broken"}, "screening", "invalid reply", 0),
        ({"reviewer": "micro-reviewer-never"}, "review-1", "not approved", 6),
    ],
)
def test_a_model_that_never_does_it(capsys, tmp_path, server, roles, stage, reason, before):
    build = described(tmp_path / "own.yaml", server, **roles, micro=120, seed=2)
    arguments = [
        "build",
        build,
        "--out",
        tmp_path / "b",
        "--cache",
        tmp_path / "c.sqlite",
        "--pilot",
        30,
    ]
    code, _, err = run(capsys, *arguments)
    assert code == 1 and f"stage {stage}: the first 20 rows" in err and reason in err
    assert err.count("go on with") == 1 and "--pilot 30" in err
    assert ("--set reviewer.model=NAME" in err) == ("reviewer" in roles)
    files = {
        path.stem: path
        for path in (tmp_path / "b" / "pilots" / "making-01" / "stages").glob("*.jsonl")
    }
    assert (
        len(files) == before + 1
        and files[stage].read_bytes().count(b"\n") == 20
        and str(files[stage]) in err
    )
    code, _, err = run(capsys, "build", build, "--out", tmp_path / "b")
    assert code == 1 and "not the one frozen in micro" in err and "Put the settings back" in err


def test_few_rows_and_a_reviewer_that_never_approves(tmp_path, server):
    build = described(
        tmp_path / "own.yaml", server, reviewer="micro-reviewer-never", micro=60, seed=2
    )
    own = BuildRun(
        load_build(build), tmp_path / "b", tmp_path / "c.sqlite", "memcalib build own.yaml"
    )
    with pytest.raises(
        DataError, match=r"stage review-1: found every row lost \(\d+ by 'not approved'"
    ) as error:
        own.pilot(4)
    assert "go on with: memcalib build own.yaml --pilot 4" in str(error.value)


def test_one_model_is_not_two_reviewers(tmp_path, server):
    with pytest.raises(ValueError, match="allowed are two different models"):
        load_build(described(tmp_path / "own.yaml", server, reviewer2="micro-reviewer", micro=5))


def test_prompts_changed_after_freezing_are_refused(monkeypatch, capsys, tmp_path):
    text = drafts.load_build_prompt("rubrics-2")
    shipped = drafts._shipped
    monkeypatch.setattr(
        drafts,
        "_shipped",
        lambda name: f"{text} Be brief." if name == "rubrics-2" else shipped(name),
    )
    code, _, err = run(capsys, "build", "micro", "--rows", 10, "--out", tmp_path / "b")
    assert code == 1 and "rubrics: prompt text: frozen" in err and "annotation" not in err
    assert "--pilot 50" in err and "--freeze" in err and not (tmp_path / "b" / "stages").exists()


def test_a_sheet_with_wrong_values_changes_nothing(capsys, tmp_path):
    own = BuildRun(
        Build(micro=120, rows=30, seed=2),
        tmp_path / "b",
        tmp_path / "c.sqlite",
        "memcalib build x.yaml",
    )
    with pytest.raises(
        FileNotFoundError, match="no batch yet; make one with: memcalib build x.yaml --pilot 50"
    ):
        own.take_reviews(tmp_path / "sheet.csv", "a reader")
    own.pilot(4)
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
        own.take_reviews(tmp_path / "wrong.csv", "a reader")
    said = str(error.value)
    assert all(
        part in said
        for part in (
            "wrong.csv:2",
            "'maybe'",
            "wrong.csv:3",
            "without an issue",
            "wrong.csv:4",
            "'stranger'",
        )
    )
    with pytest.raises(FreezeError, match="0 passed, 0 failed, 4 left of 4"):
        own.freeze()


def test_the_way_of_a_row_ends_where_it_was_lost(tmp_path):
    own = BuildRun(Build(micro=120, rows=50, seed=2), tmp_path / "b", tmp_path / "c.sqlite")
    own.run()
    kept = load_examples(tmp_path / "b" / "examples.jsonl")[0]
    way = row_lineage(own.folder, kept.id)
    assert list(way.index) == [
        "source",
        *(stage.name for stage in own.made),
        "review-1",
        "review-2",
        "data set",
    ]
    assert (
        kept.question in way.loc["derivation", "what it added"]
        and way.loc["data set", "outcome"] == "kept"
    )
    for line in (tmp_path / "b" / "dropped.jsonl").read_text().splitlines():
        drop = json.loads(line)
        way = row_lineage(own.folder, drop["id"])
        assert (
            way.iloc[-1]["outcome"] == f"lost: {drop['reason']}" and way.index[-1] == drop["stage"]
        )
    with pytest.raises(KeyError, match="no row 'nobody'"):
        row_lineage(own.folder, "nobody")


def test_a_build_that_does_not_exist_is_named_with_those_that_do(capsys, tmp_path):
    code, _, err = run(capsys, "build", "nothing", "--out", tmp_path / "b")
    assert code == 1 and "allowed are micro" in err


def test_the_command_to_go_on_has_every_option_that_counts(capsys, tmp_path):
    (tmp_path / "own.yaml").write_text(json.dumps({"micro": 60, "plan": {"seed": 5}}))
    code, _, err = run(
        capsys,
        "build",
        tmp_path / "own.yaml",
        "--rows",
        7,
        "--out",
        tmp_path / "b",
        "--cache",
        tmp_path / "c",
    )
    assert (
        code == 1 and f"--out {tmp_path / 'b'} --rows 7 --cache {tmp_path / 'c'} --pilot 50" in err
    )


@pytest.mark.slow
def test_the_experiment_on_benchmark_statistics_runs_under_papermill(tmp_path):
    folder = tmp_path / "statistics"
    given = {"out_dir": str(folder), "rows": 30, "log_rows": 20}
    assert run_notebook(experiments()["benchmark_statistics"], folder, given).is_file()
    for name in ("from_sources", "from_log"):
        assert (folder / name / "examples.jsonl").stat().st_size and (
            folder / name / "README.md"
        ).is_file()
    assert "published" in (folder / "tables" / "tab-benchmark-structure.md").read_text()
