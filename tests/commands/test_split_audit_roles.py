"""The verbs that split a file, draw the audit of a judge and draw sentences to label."""

from collections import Counter

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.commands.cli import WrongCall, main, part_sizes
from memcalib.commands.label import audit_from_sheet, audit_items, draw_audit, is_audit
from memcalib.commands.roles import draw_roles, examples_of_training
from memcalib.io.records import DataError, read_jsonl, write_jsonl
from memcalib.problem import Level, Rollout, iter_examples, judgment_for
from memcalib.products.annotation.labels import LabelItem, read_labels
from memcalib.products.annotation.sentence_roles import RoleItem, read_role_labels
from memcalib.products.dataset.splits import PUBLISHED_TRAIN_SIZES, split_file
from memcalib.products.micro.world import make_examples


def run(capsys, *arguments):
    """Exit code, output and error text of a command."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def examples_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    write_jsonl(file, make_examples("short", 120, seed=4))
    return file


def test_the_parts_of_the_papers_training_file():
    assert PUBLISHED_TRAIN_SIZES == {"cold_start": 4000, "rl": 8000, "validation": 1500}
    assert sum(PUBLISHED_TRAIN_SIZES.values()) == 13_500


def test_a_file_is_split_without_a_question_in_two_parts(examples_file, tmp_path, capsys):
    out = tmp_path / "parts"
    sizes = ("--size=cold_start=30", "--size=rl=60", "--size=validation=12")
    code, text, _ = run(capsys, "split", examples_file, "--out", out, *sizes)
    assert code == 0 and "18 examples were not put into any part" in text
    asked, ids = {}, {}
    for name, count in (("cold_start", 30), ("rl", 60), ("validation", 12)):
        rows = list(iter_examples(out / f"{name}.jsonl"))
        assert len(rows) == count
        assert (out / f"{name}-ids.txt").read_text().split() == sorted(row.id for row in rows)
        asked[name] = {row.question for row in rows}
        ids[name] = {row.id for row in rows}
    assert not asked["rl"] & asked["cold_start"] and not asked["rl"] & asked["validation"]
    assert sum(map(len, ids.values())) == len(set().union(*ids.values()))
    code, _, error = run(capsys, "split", examples_file, "--out", out, *sizes)
    assert code == 1 and "already contains splits" in error


def test_the_parts_of_a_private_run_are_closed_to_others(examples_file, tmp_path, capsys):
    run_folder = tmp_path / "run"
    run_folder.mkdir(mode=0o700)
    (run_folder / "parameters.json").write_text("{}")
    data = run_folder / "examples.jsonl"
    data.write_bytes(examples_file.read_bytes())
    out = tmp_path / "parts"
    code, _, _ = run(capsys, "split", data, "--out", out, "--size", "a=0.5", "--size", "b=0.5")
    assert code == 0
    assert out.stat().st_mode & 0o077 == 0


def test_a_split_larger_than_the_file_names_it_and_writes_nothing(examples_file, tmp_path, capsys):
    out = tmp_path / "parts"
    code, _, error = run(capsys, "split", examples_file, "--out", out)
    assert code == 1 and str(examples_file) in error
    assert "found 13,500 in all; allowed: at most 120, the number of examples, or shares" in error
    assert not out.exists()


def test_the_same_seed_gives_the_same_parts(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        split_file("starter", tmp_path / name, {"rl": 40, "test": 20}, seed)
    lists = [(tmp_path / name / "rl-ids.txt").read_text() for name in "abc"]
    assert lists[0] == lists[1] != lists[2]


@pytest.mark.parametrize("entry", ["rl", "=5", "rl=", "rl=many", "rl=1.x"])
def test_a_size_of_another_form_is_a_wrong_call(entry, examples_file, tmp_path, capsys):
    code, _, error = run(capsys, "split", examples_file, "--out", tmp_path / "x", "--size", entry)
    assert code == 2 and repr(entry) in error and "NAME=COUNT" in error


def test_a_size_given_twice_is_a_wrong_call():
    with pytest.raises(WrongCall, match="each name once"):
        part_sizes(["rl=1", "rl=2"])


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 9999), min_size=1))
@settings(max_examples=20)
def test_counts_are_read_as_they_are_written(sizes):
    assert part_sizes([f"{name}={count}" for name, count in sizes.items()]) == sizes


@pytest.fixture(scope="module")
def judged_run(tmp_path_factory):
    """A run whose judge takes every third used atom for one level too many."""
    folder = tmp_path_factory.mktemp("run")
    examples = make_examples("long", 60, seed=2)
    rollouts, judgments = [], []
    for number, example in enumerate(examples):
        fields = {"model": "m", "seed": 0, "example_hash": example.content_hash}
        rollouts.append(Rollout(example_id=example.id, response=f"Answer {number}.", **fields))
        actual = dict(example.levels)
        for k, atom_id in enumerate(actual):
            if (number + k) % 3 == 0:
                actual[atom_id] = Level((actual[atom_id] + 1) % 3)
        judgments.append(judgment_for(example, actual, judge="j", **fields))
    write_jsonl(folder / "examples.jsonl", examples)
    write_jsonl(folder / "rollouts.jsonl", rollouts)
    write_jsonl(folder / "judgments.jsonl", judgments)
    return folder


def test_an_audit_is_two_samples_that_share_no_atom(judged_run):
    items = audit_items(judged_run, 60, seed=3)
    names = [item.item for item in items]
    schemes = [item.scheme for item in items]
    assert len(set(names)) == 120 and schemes.count("natural") == schemes.count("stratified") == 60
    first_half = schemes[:60].count("natural")
    assert 15 < first_half < 45, "the sheet is in random order"
    assert names == [item.item for item in audit_items(judged_run, 60, seed=3)]
    assert names != [item.item for item in audit_items(judged_run, 60, seed=4)]


def test_the_filled_sheet_of_an_audit_gives_both_agreements(judged_run, tmp_path, capsys):
    out = tmp_path / "audit.jsonl"
    code, text, _ = run(capsys, "label", judged_run, "--audit", 60, "--out", out)
    assert code == 0 and "60 atoms drawn at random and 60 spread over the nine " in text
    assert is_audit(out)
    sheet = pd.read_csv(tmp_path / "audit.csv", dtype=str, keep_default_na=False)
    assert "judged" not in sheet and "ideal" not in sheet, "the judge's level is not shown"
    levels = {
        (example.id, atom_id): level.wire
        for example in iter_examples(judged_run / "examples.jsonl")
        for atom_id, level in example.levels.items()
    }
    items = list(read_jsonl(out, LabelItem))
    sheet["level"] = [levels[item.example_id, item.atom_id] for item in items]
    sheet.to_csv(tmp_path / "audit.csv", index=False)
    filled = ("--sheet", tmp_path / "audit.csv", "--labeller", "ana")
    code, text, _ = run(capsys, "label", judged_run, "--out", out, *filled)
    assert code == 0 and "drawn at random: " in text and "spread over the nine cells: " in text
    table = audit_from_sheet(judged_run, out, tmp_path / "audit.csv", "ana").set_index("scheme")
    assert table.loc["natural", "pairs"] == table.loc["stratified", "pairs"] == 60
    assert 50 < table.loc["natural", "exact"] < 85, "one in three is wrong"
    code, _, error = run(capsys, "label", judged_run, "--out", out, *filled[:2])
    assert code != 0 and "--labeller" in error
    # a second person reads the same sample, and nothing of the first is lost
    sheet.assign(level="A").to_csv(tmp_path / "ben.csv", index=False)
    audit_from_sheet(judged_run, out, tmp_path / "ben.csv", "ben")
    again = audit_from_sheet(judged_run, out, tmp_path / "audit.csv", "ana").set_index("scheme")
    assert again.equals(table)
    by_person = Counter(label.labeller for label in read_labels(tmp_path / "audit.labels.jsonl"))
    assert by_person == {"ana": 120, "ben": 120}


def test_a_file_of_an_audit_is_not_written_over(judged_run, tmp_path):
    draw_audit(judged_run, tmp_path / "audit.jsonl", 20)
    with pytest.raises(FileExistsError, match="may contain labels"):
        draw_audit(judged_run, tmp_path / "audit.jsonl", 20)


def test_more_atoms_than_the_run_has_are_refused(judged_run, tmp_path, capsys):
    code, _, error = run(
        capsys, "label", judged_run, "--audit", 10**6, "--out", tmp_path / "a.jsonl"
    )
    assert code == 1 and "--audit: found 1000000; allowed: 1 to " in error
    assert not (tmp_path / "a.jsonl").exists()
    both = ("--audit", 10, "--answers", 10, "--out", tmp_path / "a.jsonl")
    assert run(capsys, "label", judged_run, *both)[0] == 2


def test_a_sentence_role_page_needs_traces_and_examples(tmp_path, capsys):
    empty = tmp_path / "run"
    empty.mkdir()
    code, _, error = run(capsys, "roles", empty, "--out", tmp_path / "roles")
    assert code == 1 and str(empty) in error and "trace_every above 0" in error
    assert not (tmp_path / "roles").exists()
    with pytest.raises(ValueError, match="no manifest of a training.*--data"):
        examples_of_training(empty)


@pytest.mark.slow
def test_roles_of_a_training_with_traces(tmp_path, capsys):
    options = ["prompts=4", "generations=4", "steps=2", "trace_every=1"]
    settings_ = [f"--set=train.{option}" for option in options]
    code, _, error = run(
        capsys, "train", "micro", "--method", "memcalib-rl", "--out", tmp_path / "run", *settings_
    )
    assert code == 0, error
    out = tmp_path / "roles"
    code, text, error = run(capsys, "roles", tmp_path / "run", "--out", out, "--per-channel", 2)
    assert code == 0, error
    items = list(read_jsonl(out / "items.jsonl", RoleItem))
    sheet = pd.read_csv(out / "sheet.csv", dtype=str, keep_default_na=False)
    assert len(sheet) == sum(len(item.sentences) for item in items) and "credit" not in sheet
    sheet["role"] = "partial"
    sheet.to_csv(out / "sheet.csv", index=False)
    filled = ("--sheet", out / "sheet.csv", "--labeller", "ana")
    code, text, error = run(capsys, "roles", tmp_path / "run", "--out", out, *filled)
    assert code == 0, error
    assert f"{len(sheet)} of {len(sheet)} sentences are labelled" in text
    filled_by_ben = (*filled[:2], "--labeller", "ben")
    code, text, error = run(capsys, "roles", tmp_path / "run", "--out", out, *filled_by_ben)
    assert code == 0, error
    by_person = Counter(row.labeller for row in read_role_labels(out / "labels.jsonl"))
    assert by_person == {"ana": len(sheet), "ben": len(sheet)}
    with pytest.raises(FileExistsError):
        draw_roles(tmp_path / "run", out)
    sheet["role"] = "somewhat"
    sheet.to_csv(out / "sheet.csv", index=False)
    with pytest.raises(DataError, match="somewhat"):
        from memcalib.commands.roles import roles_from_sheet

        roles_from_sheet(tmp_path / "run", out, out / "sheet.csv", "ana")
