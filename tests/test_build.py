"""The whole pipeline on the micro-world: it ends, it resumes, it refuses, and its frozen file is that of the code."""

import csv

import pytest

from memcalib.build import Build, BuildRun, load_build, settings_of
from memcalib.cli import main
from memcalib.freeze import FreezeError, check_frozen, read_frozen
from memcalib.problem import DataError, Example, load_examples, read_jsonl
from memcalib.splits import read_splits


def run(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return exit.value.code or 0, out, err


def test_the_shipped_frozen_file_is_that_of_the_code():
    assert check_frozen(settings_of(load_build("micro")), read_frozen("micro").settings) == []


def test_build_makes_lints_splits_and_documents(capsys, tmp_path):
    arguments = ["build", "micro", "--rows", 40, "--out", tmp_path / "b", "--cache", tmp_path / "c.sqlite"]
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    assert "near duplicate" in out and "Card:" in out
    folder = tmp_path / "b"
    examples = load_examples(folder / "examples.jsonl")
    splits = read_splits(folder / "splits", examples)
    assert {i for ids in splits.values() for i in ids} == {e.id for e in examples} and set(splits) == {"train", "test"}
    for file in ("README.md", "manifest.json", "tables/structure.md", "tables/checks.csv", "tables/reviewers.tex"):
        assert (folder / file).stat().st_size
    first = (folder / "examples.jsonl").read_bytes()
    code, _, err = run(capsys, *arguments)
    assert code == 0 and (folder / "examples.jsonl").read_bytes() == first, err
    code, out, _ = run(capsys, "lint", folder / "examples.jsonl")
    assert code == 0 and "0 errors" in out


def test_a_pilot_is_read_and_unlocks_freezing(capsys, tmp_path):
    build = Build(micro=120, rows=30, seed=2)
    own = BuildRun(build, tmp_path / "b", tmp_path / "c.sqlite", "memcalib build x.yaml")
    with pytest.raises(FreezeError, match="no pilot batch"):
        own.freeze()
    said = own.pilot(9)
    assert "9 examples" in said and "--reviews" in said
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
    assert "9" in own.take_reviews(sheet, "a reader")
    assert own.freeze().is_file()
    assert own.run().is_file() and list(read_jsonl(tmp_path / "b" / "examples.jsonl", Example))


def test_settings_changed_after_freezing_are_refused_before_any_call(tmp_path):
    changed = BuildRun(
        Build(micro=60, rows=10, plan={"seed": 5}), tmp_path / "b", tmp_path / "c.sqlite", "memcalib build y"
    )
    with pytest.raises(FreezeError, match="plan"):
        changed.run()
    assert not changed.results and not (tmp_path / "b" / "stages").exists()


def test_faults_of_a_description_are_named(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("sources: [{source: oasst1}]\n")
    with pytest.raises(ValueError, match="builder"):
        load_build(bad)
    bad.write_text("rows: many\nmicro: 3\n")
    with pytest.raises(ValueError, match=r"bad.yaml: rows: .*integer"):
        load_build(bad)
    with pytest.raises(FileNotFoundError, match="allowed are micro"):
        load_build("nothing")


def test_sources_of_ones_own_that_all_fail_are_counted_by_reason(tmp_path):
    (tmp_path / "rows.csv").write_text("q,a\nhi,yes\nhello,no\n")
    source = {"path": str(tmp_path / "rows.csv"), "question": "q", "answer": "a"}
    role = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": ""}
    build = Build(sources=[source], builder=role, reviewer=role, reviewer2=role | {"model": "n"})
    with pytest.raises(DataError, match="0 of 2 rows accepted"):
        BuildRun(build, tmp_path / "b", tmp_path / "c.sqlite").pilot(5)
