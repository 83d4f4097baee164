"""From a memory log to a data set through the verb: nothing goes anywhere before a yes; bad logs are told what is wrong."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from command_line import run

from memcalib.memory_logs import consent as disclosure
from memcalib.commands import build as memory_build
from memcalib.commands.build import Build
from memcalib.memory_logs.consent import FIELDS, SENT, WORK, NotAgreed, undisclosed
from memcalib.dataset.stages import Draft
from memcalib.dataset.pilot import FreezeError, check_frozen, read_frozen
from memcalib.commands.build import MemoryRun
from memcalib.memory_logs.examples import MEMORY_STAGES, RETRIEVED
from memcalib.practice.source import LOST, MISHAPS, micro_memory_log, write_micro_log
from memcalib.practice.mistakes import micro_roles
from memcalib.practice.server import MicroServer
from memcalib.problem import check_example, load_examples
from memcalib.io.records import DataError
from memcalib.dataset.review import review_stage

MICRO = Build(micro=1, memory={"log": "micro"}, seed=4)
STAGES = {stage.task or stage.name: stage for stage in (*MEMORY_STAGES, review_stage("review-1"))}


@pytest.fixture
def server():
    with MicroServer([], roles=micro_roles()) as server:
        yield server


def description(path: Path, url: str, builder="micro-builder", **more) -> Path:
    def role(model):
        return {"model": model, "base_url": url, "key_env": "", "thinking": "default"}

    roles = {
        "builder": role(builder),
        "reviewer": role("micro-reviewer"),
        "reviewer2": role("micro-reviewer-2"),
    }
    path.write_text(json.dumps(roles | more))
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    home = tmp_path_factory.mktemp("memory")
    made = MemoryRun(MICRO, home / "build", home / "calls.sqlite").agree(yes=True)
    made.run()
    return made


# the whole way


def test_the_shipped_frozen_file_is_that_of_the_code(tmp_path):
    assert (
        check_frozen(MemoryRun(MICRO, tmp_path).settings(), read_frozen("micro-memory").settings)
        == []
    )


def test_rows_of_the_log_become_examples_with_their_terms(built):
    examples = load_examples(built.folder / "examples.jsonl")
    rows = micro_memory_log(60, 4)
    good = {row["id"]: row for name, row in rows if name not in LOST}
    assert len(examples) > 0.6 * len(good) and {example.id for example in examples} <= good.keys()
    for example in examples:
        extra = example.model_extra
        assert (
            example.question == good[example.id]["query"] and extra["source_consent"] == "invented"
        )
        assert re.fullmatch(r"u[1-5]", extra["source_user"]) and len(
            extra["retrieval"]["ranks"]
        ) == len(example.blocks)
        record = json.loads(example.to_json())
        assert [v for v in check_example(record) if v.severity == "error"] == []


def test_every_row_of_the_log_is_accounted_for(built):
    losses, dropped = (
        [json.loads(line) for line in (built.folder / name).read_text().splitlines()]
        for name in ("losses.jsonl", "dropped.jsonl")
    )
    kept = [example.id for example in load_examples(built.folder / "examples.jsonl")]
    assert len(losses) + len(dropped) + len(kept) == 60
    assert len(losses) == sum(name in LOST for name, _ in micro_memory_log(60, 4))
    assert all(drop["stage"] and drop["reason"] for drop in dropped) and all(
        loss["rule"] for loss in losses
    )
    table = (built.folder / "tables" / "attrition.csv").read_text()
    assert "dataset,kept," in table and "consent refused" in table


def test_manifest_and_card_keep_what_was_agreed_to(built):
    manifest = json.loads((built.folder / "manifest.json").read_text())
    assert manifest["disclosure"] == json.loads(json.dumps(built.planned().to_dict()))
    assert (
        manifest["redaction"]["hash"] == built.redactor.hash
        and manifest["frozen"] == read_frozen("micro-memory").hash
    )
    card = (built.folder / "README.md").read_text()
    assert (
        "## Private memory" in card
        and "asked in public" not in card
        and "No distractor is invented" in card
    )
    calls = sum(stage["calls"] for stage in manifest["usage"].values())
    assert calls == sum(result.spent["calls"] for result in built.results)


def test_the_dataset_passes_the_checks(capsys, built):
    code, out, _ = run(capsys, "lint", built.folder / "examples.jsonl")
    assert code == 0 and "0 errors" in out


def test_old_memories_with_new_ends_pass(built):
    ids = {row["id"] for name, row in micro_memory_log(60, 4) if name == "old with new"}
    assert ids & {example.id for example in load_examples(built.folder / "examples.jsonl")}


def test_private_values_are_in_no_file_but_the_log(built):
    for path in built.folder.rglob("*"):
        if path.is_file() and path.name != "micro-log.jsonl":
            assert not re.search(rb"desk\d+@|micro-user-\d|202 555", path.read_bytes()), path.name


def test_a_new_folder_is_open_to_its_owner_alone(built):
    assert built.folder.stat().st_mode & 0o077 == 0


def test_a_second_run_asks_nobody(built, tmp_path):
    before = (built.folder / "examples.jsonl").read_bytes()
    again = MemoryRun(MICRO, built.folder, tmp_path / "other.sqlite").agree(yes=True)
    again.run()
    assert (
        all(result.calls == 0 for result in again.results)
        and (built.folder / "examples.jsonl").read_bytes() == before
    )


# the gate


def test_without_a_yes_nothing_is_sent(capsys, tmp_path, server):
    log = write_micro_log(tmp_path / "log.jsonl", 8)
    build = description(tmp_path / "own.yaml", server.base_url, micro=1)
    arguments = [
        "build",
        build,
        "--from-memory",
        log,
        "--out",
        tmp_path / "b",
        "--cache",
        tmp_path / "c.sqlite",
    ]
    code, out, err = run(capsys, *arguments)
    assert (
        code == 1
        and server.stats()["requests"] == 0
        and not (tmp_path / "b" / "parameters.json").exists()
    )
    assert (
        "to micro-builder at 127.0.0.1 (this machine)" in out
        and "calls: " in out
        and "Rows as they would be sent" in out
    )
    assert err.strip().endswith("--yes") and str(log) in err
    code, _, err = run(capsys, *arguments, "--pilot", 2)
    assert code == 1 and server.stats()["requests"] == 0
    code, out, err = run(capsys, *arguments, "--preview")
    assert (
        code == 0
        and server.stats()["requests"] == 0
        and "Nothing has been sent" in out
        and err == ""
    )
    code, out, err = run(capsys, *arguments, "--yes")
    assert code == 0 and server.stats()["requests"] > 0, err


@pytest.mark.parametrize(
    ("said", "agreed"), [("yes", True), (" YES ", True), ("y", False), ("", False), ("no", False)]
)
def test_a_person_at_a_terminal_is_asked(monkeypatch, tmp_path, said, agreed):
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or said)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    run = MemoryRun(MICRO, tmp_path)
    if agreed:
        assert memory_build.ask_first(run).agreed
    else:
        with pytest.raises(NotAgreed, match="nothing has been sent"):
            memory_build.ask_first(run)
    assert len(asked) == 1 and run.agreed is agreed


@pytest.mark.parametrize("step", ["run", "pilot"])
def test_the_gate_holds_in_python_too(tmp_path, step):
    run = MemoryRun(MICRO, tmp_path)
    with pytest.raises(NotAgreed, match="--yes"):
        getattr(run, step)(*([3] if step == "pilot" else []))
    assert not list(tmp_path.rglob("annotation.jsonl"))


# what is sent is what was said


def sent_draft(name: str, built) -> Draft:
    drafts = [row for row in built.results[1].kept] if name != "annotation" else built.found.kept
    return drafts[0]


@pytest.mark.parametrize("name", sorted(STAGES))
def test_each_message_has_the_fields_that_the_statement_names(built, name):
    messages = STAGES[name].messages(sent_draft(name, built))
    assert undisclosed(name, messages) == [] and len(messages) == 2
    said = messages[1]["content"]
    for word in SENT[name]:  # and the statement names nothing that is not there
        asked = json.loads(said)
        there = {path for path in disclosure._paths(asked)}
        assert any(
            path == place or path.startswith(f"{place}.")
            for path in there
            for place in FIELDS[word]
        ), word


def test_the_statement_covers_every_stage():
    assert SENT.keys() == STAGES.keys() == {stage for stages in WORK.values() for stage in stages}


@pytest.mark.parametrize("name", sorted(STAGES))
@settings(max_examples=15, deadline=None)
@given(field=st.sampled_from(["user", "consent", "day", "x y", "queries"]), deep=st.booleans())
def test_a_field_that_nobody_was_told_of_is_found(built, name, field, deep):
    messages = STAGES[name].messages(sent_draft(name, built))
    asked = json.loads(messages[1]["content"])
    place = asked
    if deep:
        place = next(
            value
            for value in [
                asked.get("passages", [None])[0],
                asked.get("atoms", [None])[0],
                asked.get("example"),
            ]
            if value
        )
    place[field] = "secret"
    found = undisclosed(name, [messages[0], {"role": "user", "content": json.dumps(asked)}])
    assert [path.rpartition(".")[2] for path in found] == [field]


def test_a_stage_that_sends_more_is_stopped_before_the_first_call(tmp_path, server, monkeypatch):
    def asks(draft):
        return {
            "query": draft.query,
            "passages": [],
            "answer": "",
            "user": draft.source["metadata"]["user"],
        }

    def role(model):
        return {"model": model, "base_url": server.base_url, "key_env": "", "thinking": "default"}

    build = Build.model_validate(
        MICRO.model_dump(exclude={"builder", "reviewer", "reviewer2"})
        | {
            "builder": role("micro-builder"),
            "reviewer": role("micro-reviewer"),
            "reviewer2": role("micro-reviewer-2"),
        }
    )
    run = MemoryRun(build, tmp_path).agree(yes=True)
    monkeypatch.setattr(run, "made", [dataclasses.replace(RETRIEVED, asks=asks)])
    with pytest.raises(NotAgreed, match="user would be sent"):
        run.make(run.pool().kept, tmp_path)
    assert server.stats()["requests"] == 0


# bad logs

NUTS = {
    "query": "What can I cook?",
    "memories": [{"text": "Likes pasta with Rosa."}, {"text": "Is allergic to nuts."}],
}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is empty"),
        ('{"query": "a b c?", "memories": [{"te', "line 1 cannot be read (json)"),
        ('{"title": "x", "body": "private words"}\n', "an object with body, title"),
        (json.dumps(NUTS) + "\n", "--set memory.consent=NAME"),
        (json.dumps(NUTS | {"consent": False}) + "\n", "consent refused"),
        (json.dumps(NUTS | {"consent": "yes"}) + "\n", "true, false, or the name of an agreement"),
        (json.dumps(NUTS | {"memories": []}) + "\n", "without them there is nothing to test"),
        (json.dumps(NUTS | {"query": "word " * 200_000, "consent": True}) + "\n", "query length"),
    ],
)
def test_a_log_that_gives_no_row(capsys, tmp_path, server, content, said):
    log = tmp_path / "log.jsonl"
    build = description(tmp_path / "own.yaml", server.base_url)
    log.write_text(content)
    code, out, err = run(
        capsys, "build", build, "--from-memory", log, "--out", tmp_path / "b", "--yes"
    )
    assert (
        code == 1 and said in err and "private words" not in err and server.stats()["requests"] == 0
    )
    log.write_text(json.dumps(NUTS | {"consent": True}) + "\n")
    code, out, err = run(
        capsys, "build", build, "--from-memory", log, "--out", tmp_path / "b", "--preview"
    )
    assert code == 0 and "rows: 1" in out, "the same folder takes the mended log"


def test_consent_rules_and_domain_from_the_command_line(capsys, tmp_path, server):
    log = tmp_path / "log.jsonl"
    build = description(tmp_path / "own.yaml", server.base_url)
    log.write_text(json.dumps(NUTS) + "\n")
    (tmp_path / "rules.yaml").write_text("names: [Rosa]\n")
    arguments = [
        "build",
        build,
        "--from-memory",
        log,
        "--out",
        tmp_path / "b",
        "--preview",
        "--set",
        "memory.domain=food",
    ]
    code, out, _ = run(
        capsys,
        *arguments,
        "--set",
        "memory.consent=trial 2025",
        "--set",
        f"memory.redaction={tmp_path / 'rules.yaml'}",
    )
    assert code == 0 and "Consent: trial 2025: 1" in out and "name: 1" in out and "Rosa" not in out
    code, out, _ = run(capsys, *arguments, "--set", "memory.without_consent=true")
    assert code == 0 and "Consent: none on record: 1" in out and "Rosa" in out
    (tmp_path / "rules.yaml").write_text("nams: [Rosa]\n")
    code, _, err = run(
        capsys,
        *arguments,
        "--set",
        "memory.without_consent=true",
        "--set",
        f"memory.redaction={tmp_path / 'rules.yaml'}",
    )
    assert code == 1 and "allowed are rules, names, regions and without" in err


def test_a_log_of_ids_with_its_store(capsys, tmp_path, server):
    log = tmp_path / "log.jsonl"
    store = tmp_path / "store.json"
    build = description(tmp_path / "own.yaml", server.base_url)
    log.write_text(
        json.dumps({"query": "What can I cook?", "memory_ids": ["7"], "consent": True}) + "\n"
    )
    store.write_text(
        json.dumps({"results": [{"id": "7", "memory": "Is allergic to nuts.", "user_id": "u"}]})
    )
    arguments = ["build", build, "--from-memory", log, "--out", tmp_path / "b", "--preview"]
    code, out, _ = run(capsys, *arguments, "--set", f"memory.store={store}")
    assert code == 0 and "memory 1: Is allergic to nuts." in out
    code, _, err = run(capsys, *arguments)
    assert code == 1 and "memory" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "memory.consent=x"], "--from-memory LOG"),
        (["--preview"], "found a build from sources"),
        (["--from-memory", "nothing.jsonl"], "nothing.jsonl"),
        (["--from-memory", "micro", "--set", "memory.redaction=nothing.yaml"], "nothing.yaml"),
    ],
)
def test_options_that_do_not_fit(capsys, tmp_path, arguments, said):
    code, _, err = run(capsys, "build", *arguments, "--out", tmp_path / "b")
    assert code == 1 and said in err


def test_the_micro_world_does_not_read_other_logs(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps(NUTS | {"consent": True}) + "\n")
    with pytest.raises(DataError, match="names endpoints for builder, reviewer and reviewer2"):
        MemoryRun(
            Build(micro=1, memory={"log": str(tmp_path / "log.jsonl")}), tmp_path / "b"
        ).preview_text()


def test_a_bound_folder_takes_no_other_log_or_rules(tmp_path, built):
    log = write_micro_log(tmp_path / "log.jsonl", 10)
    other = Build(micro=1, memory={"log": str(log)}, seed=4)
    with pytest.raises(ValueError, match="holds a run of other settings"):
        MemoryRun(other, built.folder)


def test_rules_changed_after_freezing_are_refused_before_any_call(tmp_path):
    (tmp_path / "rules.yaml").write_text("without: [phone]\n")
    build = Build(micro=1, memory={"log": "micro", "redaction": str(tmp_path / "rules.yaml")})
    run = MemoryRun(build, tmp_path / "b").agree(yes=True)
    with pytest.raises(FreezeError, match="redaction: hash"):
        run.run()
    assert not run.results


def test_pilot_and_freeze_of_a_log(capsys, tmp_path, server):
    log = write_micro_log(tmp_path / "log.jsonl", 30)
    build = description(tmp_path / "own.yaml", server.base_url)
    arguments = [
        "build",
        build,
        "--from-memory",
        log,
        "--out",
        tmp_path / "b",
        "--cache",
        tmp_path / "c.sqlite",
    ]
    code, _, err = run(capsys, *arguments, "--yes")
    assert (
        code == 1
        and "this pipeline is not frozen" in err
        and "--pilot 50" in err
        and server.stats()["requests"] == 0
    )
    code, out, err = run(capsys, *arguments, "--yes", "--pilot", 4)
    assert code == 0 and "batch 1: 4 examples" in out, err
    sheet = tmp_path / "b" / "pilots" / "batch-01" / "sheet.csv"
    sheet.write_text(
        re.sub(r"(?m)^(\d+,micro-\d+),", r"\1,pass", sheet.read_text(encoding="utf-8-sig")),
        encoding="utf-8",
    )
    code, out, err = run(capsys, *arguments, "--reviews", sheet, "--reviewer", "a reader")
    assert code == 0 and "4 passed" in out, err
    code, out, err = run(capsys, *arguments, "--freeze")
    assert code == 0 and (tmp_path / "b" / "frozen.json").is_file(), err
    code, out, err = run(capsys, *arguments, "--yes")
    assert code == 0 and "Card:" in out, err


# the invented log


def test_a_longer_log_begins_like_a_shorter_one():
    assert micro_memory_log(40, 9)[:15] == micro_memory_log(15, 9) and micro_memory_log(
        15, 9
    ) != micro_memory_log(15, 8)


def test_rates_of_mishaps():
    counts = [name for name, _ in micro_memory_log(1500, 1)]
    for name, mishap in MISHAPS.items():
        assert abs(counts.count(name) / 1500 - mishap.rate) < 0.03, name
    assert {name for name, _ in micro_memory_log(50, 0, {"torn": 1.0})} == {"torn"}
    assert {name for name, _ in micro_memory_log(20, 0, {})} == {""}


@pytest.mark.parametrize("rates", [{"torn": 0.8, "refused": 0.3}, {"lost": 0.1}, {"torn": -0.1}])
def test_rates_that_cannot_be(rates):
    with pytest.raises(ValueError, match="rates: found"):
        micro_memory_log(3, 0, rates)
