"""Scores in the form of the Hub: what is written, what is read back, and what is refused."""

import random

import pytest
import yaml
from command_line import run
from huggingface_hub import parse_eval_result_entries

from memcalib.io.records import write_jsonl
from memcalib.products.micro.world import answer, exact_judge, make_examples, noisy_levels
from memcalib.problem import judgment_for
from memcalib.report.hub_results import (
    hub_tasks,
    benchmark_text,
    hub_entries,
    write_benchmark,
    write_hub_results,
)
from memcalib.report.results import result_rows
from memcalib.report.run_data import load_run


def make_run(folder, models=("m",), unscored=0):
    examples = make_examples("short", 12, 7, "test")
    judgments = []
    for model in models:
        rng = random.Random(model)
        for number, example in enumerate(examples):
            facts = {"model": model, "seed": 42, "judge": "micro-exact"}
            if number < unscored:
                judgment = judgment_for(example, {}, error="away", **facts)
            else:
                text = answer(example, rng, noisy_levels(example, rng, 0.2))
                judgment = exact_judge(example, text).model_copy(update=facts)
            judgments.append(judgment)
    write_jsonl(folder / "examples.jsonl", examples)
    write_jsonl(folder / "judgments.jsonl", judgments)
    return folder


def read(file):
    return parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8")))


def test_what_is_written_is_read_back(tmp_path):
    folder = make_run(tmp_path / "run", unscored=3)
    (row,) = result_rows(load_run(folder))
    options = {"revision": "a" * 40, "source_url": "https://example.org/run", "date": "2026-11-27"}
    file = write_hub_results(folder, tmp_path / "model", "org/memory-use", **options)
    assert file == tmp_path / "model" / ".eval_results" / "memory-use.yaml"
    entries = read(file)
    assert {entry.task_id for entry in entries} == hub_tasks().keys()
    for entry in entries:
        metric = row["metrics"][hub_tasks()[entry.task_id]]
        assert entry.value == metric["value"] and entry.dataset_id == "org/memory-use"
        assert entry.dataset_revision == "a" * 40 and entry.date == "2026-11-27"
        assert entry.source_url == "https://example.org/run"
        assert "3 of 12 answers unscored" in entry.notes and "judge micro-exact" in entry.notes
        assert f"{metric['low']:.1f} to {metric['high']:.1f}" in entry.notes
        assert row["data"]["sha256"] in entry.notes


def test_the_tasks_of_both_files_are_the_same(tmp_path):
    benchmark = yaml.safe_load(benchmark_text("Memory use", "How far: “each” memory", split="core"))
    assert {task["id"] for task in benchmark["tasks"]} == hub_tasks().keys()
    assert {(task["config"], task["split"]) for task in benchmark["tasks"]} == {("default", "core")}
    assert benchmark["description"] == "How far: “each” memory"
    file = write_benchmark(tmp_path, "A", "b")
    assert file.name == "eval.yaml" and "evaluation_framework: memcalib" in file.read_text()
    with pytest.raises(ValueError, match="description: found an empty string"):
        benchmark_text("A", " ")


@pytest.mark.parametrize("name", ["memory-use", "org/", "a/b/c", "/x", "org/na me", ""])
def test_what_is_no_data_set_is_named(name, tmp_path):
    (row,) = result_rows(load_run(make_run(tmp_path)))
    with pytest.raises(ValueError, match="benchmark: found .*; allowed: the id of a data set"):
        hub_entries([row], name)


def test_one_model_must_be_meant(tmp_path):
    rows = result_rows(load_run(make_run(tmp_path / "two", ("a", "b"))))
    with pytest.raises(ValueError, match=r"found 2 results for any model in a \(full_memory"):
        hub_entries(rows, "org/x")
    with pytest.raises(ValueError, match="found 0 results for c in a"):
        hub_entries(rows, "org/x", model="c")
    assert hub_entries(rows, "org/x", model="b")[0].value == rows[1]["metrics"]["SCS"]["value"]
    nothing = result_rows(load_run(make_run(tmp_path / "none", unscored=12)))
    with pytest.raises(ValueError, match="found 0 results .* a run without scored answers"):
        hub_entries(nothing, "org/x")


def test_the_command_writes_it_and_names_half_a_wish(capsys, tmp_path):
    folder = make_run(tmp_path / "run")
    place = ("--hub-results", tmp_path / "model")
    code, output, errors = run(capsys, "report", folder, *place, "--benchmark", "org/memory-use")
    assert code == 0 and ".eval_results/memory-use.yaml" in output, errors
    assert len(read(tmp_path / "model" / ".eval_results" / "memory-use.yaml")) == 2
    code, _, errors = run(capsys, "report", folder, *place)
    assert code == 1 and "--hub-results: found no --benchmark" in errors
    code, _, errors = run(capsys, "report", folder, "--benchmark", "org/x")
    assert code == 1 and "found without --hub-results" in errors
