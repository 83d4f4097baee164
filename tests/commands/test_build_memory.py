"""From a memory log to a data set through the verb: nothing goes anywhere before a yes;
bad logs are told what is wrong.
"""

import dataclasses
import json
import re
from itertools import product
from pathlib import Path

import pytest
from build_files import fill_in, role_settings, write_description
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.commands.build import ask_first
from memcalib.products.dataset.build import Build
from memcalib.products.dataset.build_run import MemoryRun
from memcalib.products.dataset.pilot import FreezeError, check_frozen, read_frozen
from memcalib.products.dataset.pipeline import MemoryPipeline
from memcalib.products.dataset.review import review_stage
from memcalib.products.dataset.stages import Draft
from memcalib.io.records import DataError
from memcalib.products.dataset import consent as disclosure
from memcalib.products.dataset.consent import FIELDS, SENT, WORK, NotAgreed, undisclosed
from memcalib.products.dataset.memory_drafts import MEMORY_STAGES, RETRIEVED
from memcalib.products.micro.practice.mistakes import micro_roles
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.practice.source import LOST, MISHAPS, micro_memory_log, write_micro_log
from memcalib.problem import check_example, load_examples

MICRO = Build(micro=1, memory={"log": "micro"}, seed=4)
STAGES = {stage.task or stage.name: stage for stage in (*MEMORY_STAGES, review_stage("review-1"))}


@pytest.fixture
def server():
    with MicroServer([], roles=micro_roles()) as server:
        yield server


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    home = tmp_path_factory.mktemp("memory")
    run = MemoryRun(MICRO, home / "build", home / "calls.sqlite").agree(yes=True)
    run.run()
    return run


# the whole way


def test_the_shipped_frozen_file_is_that_of_the_code(tmp_path):
    settings = MemoryPipeline(MICRO, tmp_path).settings()
    assert check_frozen(settings, read_frozen("micro-memory").settings) == []


def test_rows_of_the_log_become_examples_with_their_terms(built):
    examples = load_examples(built.folder / "examples.jsonl")
    usable = {row["id"]: row for mishap, row in micro_memory_log(60, 4) if mishap not in LOST}
    assert len(examples) > 0.6 * len(usable)
    for example in examples:
        extra = example.model_extra
        assert example.question == usable[example.id]["query"]
        assert extra["source_consent"] == "invented"
        assert re.fullmatch(r"u[1-5]", extra["source_user"])
        assert len(extra["retrieval"]["ranks"]) == len(example.blocks)
        record = json.loads(example.to_json())
        assert [v for v in check_example(record) if v.severity == "error"] == []


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_row_of_the_log_is_accounted_for(built):
    losses = rows_of(built.folder / "losses.jsonl")
    drops = rows_of(built.folder / "dropped.jsonl")
    examples = load_examples(built.folder / "examples.jsonl")
    assert len(losses) + len(drops) + len(examples) == 60
    assert len(losses) == sum(mishap in LOST for mishap, _ in micro_memory_log(60, 4))
    assert all(drop["stage"] and drop["reason"] for drop in drops)
    assert all(loss["rule"] for loss in losses)
    table = (built.folder / "tables" / "attrition.csv").read_text()
    assert "dataset,kept," in table and "consent refused" in table


def test_manifest_and_card_keep_what_was_agreed_to(built):
    manifest = json.loads((built.folder / "manifest.json").read_text())
    statement = built.pipeline.planned().to_dict()
    assert manifest["disclosure"] == json.loads(json.dumps(statement))
    assert manifest["redaction"]["hash"] == built.pipeline.redactor.hash
    assert manifest["frozen"] == read_frozen("micro-memory").hash
    card = (built.folder / "README.md").read_text()
    assert "## Private memory" in card and "asked in public" not in card
    assert "No distractor is invented" in card
    calls = sum(stage["calls"] for stage in manifest["usage"].values())
    assert calls == sum(result.spent["calls"] for result in built.pipeline.results)


def test_the_dataset_passes_the_checks(capsys, built):
    code, out, _ = run(capsys, "lint", built.folder / "examples.jsonl")
    assert code == 0 and "0 errors" in out


def test_old_memories_with_new_ends_pass(built):
    ids = {row["id"] for mishap, row in micro_memory_log(60, 4) if mishap == "old with new"}
    assert ids & {example.id for example in load_examples(built.folder / "examples.jsonl")}


def test_private_values_are_in_no_file_but_the_log(built):
    for path in built.folder.rglob("*"):
        if path.is_file() and path.name != "micro-log.jsonl":
            assert not re.search(rb"desk\d+@|micro-user-\d|202 555", path.read_bytes()), path.name


def test_a_new_folder_is_open_to_its_owner_alone(built):
    assert built.folder.stat().st_mode & 0o077 == 0


def test_a_second_run_asks_nobody(built, tmp_path):
    before = (built.folder / "examples.jsonl").read_bytes()
    second = MemoryRun(MICRO, built.folder, tmp_path / "other.sqlite").agree(yes=True)
    second.run()
    assert all(result.calls == 0 for result in second.pipeline.results)
    assert (built.folder / "examples.jsonl").read_bytes() == before


# the gate


def test_without_a_yes_nothing_is_sent(capsys, tmp_path, server):
    log = write_micro_log(tmp_path / "log.jsonl", 8)
    file = write_description(tmp_path / "own.yaml", server.base_url, micro=1)
    paths = ["--out", tmp_path / "b", "--cache", tmp_path / "c.sqlite"]
    arguments = ["build", file, "--from-memory", log, *paths]
    code, out, err = run(capsys, *arguments)
    assert code == 1 and server.stats()["requests"] == 0
    assert not (tmp_path / "b" / "parameters.json").exists()
    for words in (
        "to micro-builder at 127.0.0.1 (this machine)",
        "calls: ",
        "Rows as they would be sent",
    ):
        assert words in out
    assert err.strip().endswith("--yes") and str(log) in err
    code, _, err = run(capsys, *arguments, "--pilot", 2)
    assert code == 1 and server.stats()["requests"] == 0
    code, out, err = run(capsys, *arguments, "--preview")
    assert code == 0 and server.stats()["requests"] == 0
    assert "Nothing has been sent" in out and err == ""
    code, out, err = run(capsys, *arguments, "--yes")
    assert code == 0 and server.stats()["requests"] > 0, err


@pytest.mark.parametrize(
    ("answer", "agreed"),
    [("yes", True), (" YES ", True), ("y", False), ("", False), ("no", False)],
)
def test_a_person_at_a_terminal_is_asked(monkeypatch, tmp_path, answer, agreed):
    prompts = []

    def answer_prompt(prompt):
        prompts.append(prompt)
        return answer

    at_a_terminal(monkeypatch, answer_prompt)
    run = MemoryRun(MICRO, tmp_path)
    if agreed:
        assert ask_first(run).pipeline.agreed
    else:
        with pytest.raises(NotAgreed, match="nothing has been sent"):
            ask_first(run)
    assert len(prompts) == 1 and run.pipeline.agreed is agreed


def at_a_terminal(monkeypatch, answer) -> None:
    """A terminal at which `asked` answers."""
    monkeypatch.setattr("builtins.input", answer)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)


def test_a_terminal_that_is_closed_is_a_no_and_no_unexpected_error(monkeypatch, capsys, tmp_path):
    def closed(prompt):
        raise EOFError("EOF when reading a line")

    at_a_terminal(monkeypatch, closed)
    code, _, err = run(capsys, "build", "--from-memory", "micro", "--out", tmp_path / "b")
    assert code == 1 and "nothing has been sent" in err and "unexpected" not in err
    assert not (tmp_path / "b" / "stages").exists()


def test_the_gate_holds_in_python_too(tmp_path):
    private = MemoryRun(MICRO, tmp_path)
    with pytest.raises(NotAgreed, match="--yes"):
        private.run()
    with pytest.raises(NotAgreed, match="--yes"):
        private.pilot(3)
    assert not list(tmp_path.rglob("annotation.jsonl"))
    assert not private.run_folder.bound


# what is sent is what was said


def sent_draft(task: str, built) -> Draft:
    """A row as it is sent for a task: as the log gave it for the annotation,
    with atoms and rubrics for the others.
    """
    if task == "annotation":
        return built.pipeline.log_rows.kept[0]
    return built.pipeline.results[1].kept[0]


@pytest.mark.parametrize("task", sorted(STAGES))
def test_each_message_has_the_fields_that_the_statement_names(built, task):
    messages = STAGES[task].messages(sent_draft(task, built))
    assert undisclosed(task, messages) == [] and len(messages) == 2
    paths = set(disclosure._paths(json.loads(messages[1]["content"])))
    for word in SENT[task]:  # and the statement names nothing that is not there
        fields = FIELDS[word]
        assert any(
            path == field or path.startswith(f"{field}.") for path, field in product(paths, fields)
        ), word


def test_the_statement_covers_every_stage():
    assert SENT.keys() == STAGES.keys() == {stage for stages in WORK.values() for stage in stages}


@pytest.mark.parametrize("task", sorted(STAGES))
@settings(max_examples=15, deadline=None)
@given(field=st.sampled_from(["user", "consent", "day", "x y", "queries"]), deep=st.booleans())
def test_a_field_that_nobody_was_told_of_is_found(built, task, field, deep):
    system, user = STAGES[task].messages(sent_draft(task, built))
    request = json.loads(user["content"])
    extended = request
    if deep:
        inner = [*request.get("passages", []), *request.get("atoms", []), request.get("example")]
        extended = next(filter(None, inner))
    extended[field] = "secret"
    paths = undisclosed(task, [system, {"role": "user", "content": json.dumps(request)}])
    assert [path.rpartition(".")[2] for path in paths] == [field]


def test_a_stage_that_sends_more_is_stopped_before_the_first_call(tmp_path, server):
    def asks(draft):
        user = draft.source["metadata"]["user"]
        return {"query": draft.query, "passages": [], "answer": "", "user": user}

    fields = MICRO.model_dump(exclude={"builder", "reviewer", "reviewer2"})
    build = Build.model_validate({**fields, **role_settings(server.base_url)})
    pipeline = MemoryPipeline(build, tmp_path)
    pipeline.agreed = True
    pipeline.steps = [(dataclasses.replace(RETRIEVED, asks=asks), "builder")]
    with pytest.raises(NotAgreed, match="user would be sent"):
        pipeline.make(pipeline.pool().kept, tmp_path)
    assert server.stats()["requests"] == 0


# bad logs

NUTS = {
    "query": "What can I cook?",
    "memories": [{"text": "Likes pasta with Rosa."}, {"text": "Is allergic to nuts."}],
}


def nuts(**fields) -> str:
    """A line of a log."""
    return json.dumps({**NUTS, **fields}) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        (
            '{"query": "a b c?", "memories": [{"te',
            "line 1 of the file, the end of the file inside a record",
        ),
        (
            '{"title": "x", "body": "private words"}\n',
            "shape: found no query in rows with the fields title, body; allowed: a map",
        ),
        (nuts(), "--set memory.consent=NAME"),
        (nuts(consent=False), "consent refused"),
        (nuts(consent="yes"), "true, false, or the name of an agreement"),
        (nuts(memories=[]), "without memories there is nothing to test"),
        (nuts(query="word " * 200_000, consent=True), "query length"),
    ],
)
def test_a_log_that_gives_no_row(capsys, tmp_path, server, content, message):
    log = tmp_path / "log.jsonl"
    file = write_description(tmp_path / "own.yaml", server.base_url)
    arguments = ["build", file, "--from-memory", log, "--out", tmp_path / "b"]
    log.write_text(content)
    code, _, err = run(capsys, *arguments, "--yes")
    assert (code, "private words" in err) == (1, False)
    assert message in err, err
    assert server.stats()["requests"] == 0
    log.write_text(nuts(consent=True))
    code, out, err = run(capsys, *arguments, "--preview")
    assert code == 0 and "rows: 1" in out, "the same folder takes the corrected log"


def test_consent_rules_and_domain_from_the_command_line(capsys, tmp_path, server):
    log = tmp_path / "log.jsonl"
    log.write_text(nuts())
    rules = tmp_path / "rules.yaml"
    rules.write_text("names: [Rosa]\n")
    file = write_description(tmp_path / "own.yaml", server.base_url)

    def preview(*memory_settings):
        options = ["--set", "memory.domain=food"]
        for setting in memory_settings:
            options += ["--set", f"memory.{setting}"]
        paths = ["--out", tmp_path / "b", "--preview"]
        return run(capsys, "build", file, "--from-memory", log, *paths, *options)

    code, out, _ = preview("consent=trial 2025", f"redaction={rules}")
    assert code == 0 and "Consent: trial 2025: 1" in out and "name: 1" in out and "Rosa" not in out
    code, out, _ = preview("without_consent=true")
    assert code == 0 and "Consent: none on record: 1" in out and "Rosa" in out
    rules.write_text("nams: [Rosa]\n")
    code, _, err = preview("without_consent=true", f"redaction={rules}")
    assert code == 1 and "allowed: rules, names, regions and without" in err


def test_a_log_of_ids_with_its_store(capsys, tmp_path, server):
    log = tmp_path / "log.jsonl"
    store = tmp_path / "store.json"
    file = write_description(tmp_path / "own.yaml", server.base_url)
    row = {"query": "What can I cook?", "memory_ids": ["7"], "consent": True}
    log.write_text(json.dumps(row) + "\n")
    memory = {"id": "7", "memory": "Is allergic to nuts.", "user_id": "u"}
    store.write_text(json.dumps({"results": [memory]}))
    arguments = ["build", file, "--from-memory", log, "--out", tmp_path / "b", "--preview"]
    code, out, _ = run(capsys, *arguments, "--set", f"memory.store={store}")
    assert code == 0 and "memory 1: Is allergic to nuts." in out
    code, _, err = run(capsys, *arguments)
    assert code == 1 and "memory" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "memory.consent=x"], "--log FILE"),
        (["--preview"], "found a build from sources"),
        (["--from-memory", "nothing.jsonl"], "nothing.jsonl"),
        (["--from-memory", "micro", "--set", "memory.redaction=nothing.yaml"], "nothing.yaml"),
    ],
)
def test_options_that_do_not_fit(capsys, tmp_path, arguments, message):
    code, _, err = run(capsys, "build", *arguments, "--out", tmp_path / "b")
    assert code == 1 and message in err


def test_rows_of_the_command_line_are_those_of_the_log(capsys, tmp_path):
    arguments = ["build", "--from-memory", "micro", "--rows", 7, "--dry-run"]
    code, out, _ = run(capsys, *arguments, "--out", tmp_path / "b")
    assert code == 0 and "annotation: builder, at most 7 rows" in out


def test_the_micro_world_does_not_read_other_logs(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(nuts(consent=True))
    private = MemoryRun(Build(micro=1, memory={"log": str(log)}), tmp_path / "b")
    with pytest.raises(DataError, match="names endpoints for builder, reviewer and reviewer2"):
        private.preview_text()


def test_a_bound_folder_takes_no_other_log_or_rules(tmp_path, built):
    log = write_micro_log(tmp_path / "log.jsonl", 10)
    other = Build(micro=1, memory={"log": str(log)}, seed=4)
    with pytest.raises(ValueError, match="contains a run with other settings"):
        MemoryRun(other, built.folder)


def test_rules_changed_after_freezing_are_refused_before_any_call(tmp_path):
    (tmp_path / "rules.yaml").write_text("without: [phone]\n")
    build = Build(micro=1, memory={"log": "micro", "redaction": str(tmp_path / "rules.yaml")})
    private = MemoryRun(build, tmp_path / "b").agree(yes=True)
    with pytest.raises(FreezeError, match="redaction: hash"):
        private.run()
    assert not private.pipeline.results


def test_pilot_and_freeze_of_a_log(capsys, tmp_path, server):
    log = write_micro_log(tmp_path / "log.jsonl", 30)
    file = write_description(tmp_path / "own.yaml", server.base_url)
    paths = ["--out", tmp_path / "b", "--cache", tmp_path / "c.sqlite"]
    arguments = ["build", file, "--from-memory", log, *paths]
    code, _, err = run(capsys, *arguments, "--yes")
    assert code == 1 and "this pipeline is not frozen" in err and "--pilot 50" in err
    assert server.stats()["requests"] == 0
    code, out, err = run(capsys, *arguments, "--yes", "--pilot", 4)
    assert code == 0 and "batch 1: 4 examples" in out, err
    sheet = fill_in(tmp_path / "b" / "pilots" / "batch-01" / "sheet.csv")
    code, out, err = run(capsys, *arguments, "--reviews", sheet, "--reviewer", "a reader")
    assert code == 0 and "4 passed" in out, err
    code, out, err = run(capsys, *arguments, "--freeze")
    assert code == 0 and (tmp_path / "b" / "frozen.json").is_file(), err
    code, out, err = run(capsys, *arguments, "--yes")
    assert code == 0 and "Card:" in out, err


# the invented log


def test_a_longer_log_begins_like_a_shorter_one():
    short = micro_memory_log(15, 9)
    assert micro_memory_log(40, 9)[:15] == short != micro_memory_log(15, 8)


def test_rates_of_mishaps():
    names = [name for name, _ in micro_memory_log(1500, 1)]
    for name, mishap in MISHAPS.items():
        assert abs(names.count(name) / 1500 - mishap.rate) < 0.03, name
    assert {name for name, _ in micro_memory_log(50, 0, {"torn": 1.0})} == {"torn"}


@pytest.mark.parametrize("rates", [{"torn": 0.8, "refused": 0.3}, {"lost": 0.1}, {"torn": -0.1}])
def test_rates_that_cannot_be(rates):
    with pytest.raises(ValueError, match="rates: found"):
        micro_memory_log(3, 0, rates)


def test_rows_are_of_the_log_where_the_file_names_it(capsys, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("micro: 1\nmemory: {log: micro}\n")
    code, out, err = run(capsys, "build", file, "--rows", 5, "--dry-run", "--out", tmp_path / "b")
    assert code == 0, err
    assert "annotation: builder, at most 5 rows" in out


def test_the_command_that_agrees_has_the_step_and_the_cache_that_were_asked_for(capsys, tmp_path):
    paths = ["--out", tmp_path / "b"]
    arguments = ["build", "--from-memory", "micro", "--rows", 5, "--pilot", 3, "--no-cache"]
    code, _, err = run(capsys, *arguments, *paths)
    assert code == 1
    assert "--pilot 3 --yes" in err and "--no-cache" in err and "--rows 5" in err
