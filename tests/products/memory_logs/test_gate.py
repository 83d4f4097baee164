"""The gate: verdicts, refusals, and the files that a build reads."""

import json
from xml.etree import ElementTree

import pytest
from command_line import run

from memcalib.commands.evaluate import load_evaluation
from memcalib.io.records import write_jsonl
from memcalib.products.memory_logs.own_answers import LogPlan, own_answers
from memcalib.problem import Block, Example, Level, judgment_for
from memcalib.report.comparison import compare_runs
from memcalib.products.memory_logs.gate import (
    GateSettings,
    gate_history,
    run_gate,
    save_baseline,
    trend_line,
)


def make_run(folder, wrong=(), count=40, judge="by hand", unscored=(), model="m", first=0):
    """A run of `count` questions of which those in `wrong` over-use one memory."""
    judgments = []
    for number in range(first, first + count):
        example = Example.of(
            f"Question {number}?", {"Allergic.": "C"}, {"Plays chess.": "A"}, id=f"q{number}"
        )
        level = None if number in unscored else ("C" if number in wrong else "A")
        judgments.append(
            judgment_for(
                example,
                {"m1_a1": "C", "m2_a1": level},
                judge=judge,
                model=model,
                example_hash=example.content_hash,
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "judgments.jsonl", judgments)
    return folder


def test_passed_failed_undecided(capsys, tmp_path):
    base = make_run(tmp_path / "base", {0})
    out = tmp_path / "gate"
    code, output, _ = run(capsys, "gate", base, "--baseline", base, "--out", out)
    assert code == 0 and output.startswith("gate passed: SCS")
    assert output.count("\n") == 2
    assert "\nWhat this gate can detect for SCS: 40 questions catch" in output
    worse = make_run(tmp_path / "worse", set(range(20)))
    code, output, _ = run(capsys, "gate", worse, "--baseline", base, "--out", out)
    assert code == 3 and "gate failed: SCS 98.1 → 62.5" in output
    little = make_run(tmp_path / "little", set(range(4)))
    code, output, _ = run(capsys, "gate", little, "--baseline", base, "--out", out)
    assert code == 0 and "gate undecided" in output and "needs" in output
    code, output, _ = run(capsys, "gate", little, "--baseline", base, "--out", out, "--strict")
    assert code == 3 and json.loads((out / "gate.json").read_text())["passed"] is False
    assert ElementTree.parse(out / "gate.xml").getroot().get("failures") == "1"


def test_a_gate_keeps_its_runs_and_says_how_they_go(capsys, tmp_path):
    out = tmp_path / "g"
    for number, wrong in enumerate((set(), set(), {0, 1, 2})):
        folder = make_run(tmp_path / f"r{number}", wrong)
        _, output, _ = run(capsys, "gate", folder, "--min", "SCS=0", "--out", out)
        assert ("over the last" in output) == (number > 0)
    first, second, third = gate_history(out)
    assert first["scores"] == second["scores"] != third["scores"]
    table = (out / "gate.md").read_text()
    assert "The last runs of this gate" in table and table.count(third["time"]) >= 1
    run(capsys, "gate", folder, "--min", "SCS=0", "--out", out)
    assert len(gate_history(out)) == 3  # the same run again
    assert trend_line([{"scores": {"SCS": 1.0}}]) == ""


def test_limits_need_no_baseline(capsys, tmp_path):
    folder = make_run(tmp_path / "run", set(range(20)))
    out = ["--out", tmp_path / "gate"]
    assert run(capsys, "gate", folder, "--min", "SCS=60", *out)[0] == 0
    code, output, _ = run(capsys, "gate", folder, "--min", "SCS=99", "--max", "sMOS=5", *out)
    assert code == 3 and "(and 1 more)" in output
    few = make_run(tmp_path / "few", {0, 1}, count=4)
    code, output, _ = run(capsys, "gate", few, "--min", "SCS=99", *out)
    assert code == 0 and "undecided" in output and "fewer than 6 questions" in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "found no run"),
        (["RUN"], 2, "neither a baseline nor a limit"),
        (["RUN", "--min", "SCS"], 2, "--min: found 'SCS'; allowed: METRIC=POINTS"),
        (["RUN", "--min", "SCSS=3"], 2, "SCSS"),
        (["RUN", "--min", "sMOS=3"], 2, "less is better; allowed: SCS, Exact"),
        (["RUN", "--max", "SCS=3"], 2, "more is better"),
        (["RUN", "--min", "SCS=3", "--metric", "scs"], 2, "scs"),
        (["RUN", "--min", "SCS=3", "--set", "false_alarms=2"], 2, "false_alarms"),
        (["RUN", "--max-dorp", "3"], 2, "--max-drop"),
    ],
)
def test_wrong_calls_say_what_is_allowed(capsys, tmp_path, arguments, code, message):
    folder = make_run(tmp_path / "run")
    words = [str(folder) if word == "RUN" else word for word in arguments]
    exit_code, output, errors = run(capsys, "gate", *words, "--out", tmp_path / "gate")
    assert exit_code == code and message in errors, errors
    assert not (tmp_path / "gate").exists() and output == ""


def test_help_and_exit_code_of_a_wrong_call_agree(capsys, tmp_path):
    assert "2 for a wrong option or value" in " ".join(run(capsys, "gate", "--help")[1].split())
    log = tmp_path / "log.jsonl"
    log.write_text('{"query": "a", "memories": ["b"]}\n')
    code, _, errors = run(capsys, "sweep", log, "--top-k", "two")
    assert code == 2 and "--top-k: found 'two'" in errors
    code, _, errors = run(capsys, "sweep", log, "--framing", "loud", "--model", "m")
    assert code == 2 and "loud" in errors


def test_runs_that_cannot_be_compared_leave_no_pass_behind(capsys, tmp_path):
    base = make_run(tmp_path / "base")
    out = tmp_path / "gate"
    assert run(capsys, "gate", base, "--baseline", base, "--out", out)[0] == 0
    others = make_run(tmp_path / "others", first=20)
    for baseline, reason in (
        (others, "20 only in"),
        (tmp_path / "nowhere", "this run folder does not exist"),
    ):
        code, output, errors = run(capsys, "gate", base, "--baseline", baseline, "--out", out)
        assert code == 1 and output == "" and reason in errors
        page = (out / "gate.md").read_text()
        assert "passed" not in page and "❌ cannot be compared" in page and reason in page
        content = json.loads((out / "gate.json").read_text())
        assert content["passed"] is False and content["verdict"] == "cannot be compared"
        suite = ElementTree.parse(out / "gate.xml").getroot()
        assert suite.get("errors") == "1" and reason in suite.find("testcase/error").get("message")


def test_a_baseline_that_cannot_be_compared_is_refused(tmp_path):
    new = make_run(tmp_path / "new")
    others = make_run(tmp_path / "others", first=20)
    with pytest.raises(ValueError, match="found 20 examples in both, 20 only in"):
        run_gate(new, others)
    assert run_gate(new, others, GateSettings(common=True)).checks[0].numbers["questions"] == 20
    judged = make_run(tmp_path / "judged", judge="someone else")
    with pytest.raises(ValueError, match="allowed: the same judge"):
        run_gate(new, judged)
    assert run_gate(new, judged, GateSettings(different_judges=True)).notes
    two = make_run(tmp_path / "two")
    rows = (two / "judgments.jsonl").read_text()
    second = make_run(tmp_path / "other model", model="n") / "judgments.jsonl"
    (two / "judgments.jsonl").write_text(rows + second.read_text())
    with pytest.raises(ValueError, match="found answers of 'm', 'n'; allowed: one"):
        run_gate(two, new)
    assert run_gate(two, two, GateSettings(side="n")).passed


def test_missing_scores_are_never_a_pass(tmp_path):
    base = make_run(tmp_path / "base")
    gaps = make_run(tmp_path / "gaps", unscored=set(range(10)))
    gate = run_gate(gaps, base)
    assert gate.verdict == "failed" and "10 of 40 answers are unscored (25.0 %)" in gate.line
    assert run_gate(gaps, base, GateSettings(max_unscored=30)).passed
    nothing = make_run(tmp_path / "nothing", unscored=set(range(40)))
    with pytest.raises(ValueError, match="no scored answer"):
        run_gate(nothing, base)


def test_a_kept_baseline_has_no_text_and_gives_the_same_gate(capsys, tmp_path):
    base = make_run(tmp_path / "base", {0})
    worse = make_run(tmp_path / "worse", set(range(20)))
    baseline = save_baseline(base, tmp_path / "kept")
    assert run_gate(worse, baseline).checks == run_gate(worse, base).checks
    code, output, _ = run(capsys, "gate", base, "--save", tmp_path / "again")
    assert code == 0 and "again" in output
    assert run(capsys, "gate", "--workflow")[1].startswith("# Copy to .github/workflows")


def test_hostile_ids_break_neither_markdown_nor_xml(tmp_path):
    from memcalib.products.memory_logs.gate import write_gate

    base = make_run(tmp_path / "base", model="<b>&|\x07]]>")
    out = write_gate(run_gate(base, base), tmp_path / "out")
    ElementTree.parse(out / "gate.xml")
    assert "\x07" not in (out / "gate.md").read_text()


# logs: the memory system itself may have changed


def log_rows(count=40, k=6, ids=True):
    """Rows of a log: the first of ten candidates decides, the fifth supports, the rest is noise."""
    rows = []
    for number in range(count):
        candidates = []
        for place in range(10):
            level = {0: "Control", 4: "Bound"}.get(place, "Ignore")
            text = f"Fact number {place} about person {number}"
            candidates.append({"memory": text, "score": 1 - place / 10, "level": level})
            candidates[-1]["in_prompt"] = place < k
        row = {"id": f"turn-{number}", "query": f"What of {number}?", "memories": candidates}
        row["answer"] = f"Answer {number}."
        if not ids:
            del row["id"]
        rows.append(row)
    return rows


def log_run(folder, rows, wrong=()):
    """A run of a log whose answers use what they were shown as they should, except in the queries
    of `wrong`, where a memory too many is used."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = own_answers(LogPlan(file=str(folder / "log.jsonl"), consent="terms"))
    by_id = {example.id: example for example in own.examples}
    judgments = []
    for rollout in own.rollouts:
        example = by_id[rollout.example_id]
        levels = dict(example.levels)
        if example.question in wrong:
            unneeded = [name for name, level in levels.items() if level == Level.IGNORE]
            levels[unneeded[0]] = Level.CONTROL
        fields = {"example_hash": example.content_hash, "sample": rollout.sample, "judge": "j"}
        judgments.append(judgment_for(example, levels, **fields))
    write_jsonl(folder / "examples.jsonl", own.examples)
    write_jsonl(folder / "judgments.jsonl", judgments)
    return folder


WRONG = ("What of 3?", "What of 7?")


def scs(gate):
    return gate.checks[0].numbers["before"], gate.checks[0].numbers["after"]


@pytest.mark.parametrize("kept", [False, True])
def test_logs_are_paired_by_question_when_retrieval_changed(tmp_path, kept):
    six = log_run(tmp_path / "six", log_rows(k=6), WRONG)
    if kept:
        six = save_baseline(six, tmp_path / "kept")
        texts = "".join(path.read_text() for path in six.iterdir())
        assert "Fact" not in texts and "What of" not in texts
    five = log_run(tmp_path / "five", log_rows(k=5))
    gate = run_gate(five, six)
    assert scs(gate) == (pytest.approx(100 - 2 * 75 / 40), 100) and gate.passed
    assert (
        "different memories were shown in 40 of 40 questions. The baseline alone showed 40 "
        "memories" in gate.notes[0]
    )
    four = log_run(tmp_path / "four", log_rows(k=4))
    gate = run_gate(four, six)  # the fifth memory was needed
    assert scs(gate)[1] == 50 and gate.verdict == "failed"
    back = run_gate(six, save_baseline(four, tmp_path / "kept four"))
    assert scs(back)[0] == 50 and back.passed
    limits = run_gate(four, six, GateSettings(minimum={"SCS": 99}))
    assert limits.checks[1].verdict == "passed"  # held against the run's own report
    with pytest.raises(ValueError, match="40 examples in two versions.*differs: memories in 40"):
        run_gate(four, six, GateSettings(pair="example"))


def test_scores_order_and_lines_of_rows_are_no_other_version(tmp_path):
    rows = log_rows(ids=False)
    base = log_run(tmp_path / "base", rows, WRONG)
    rescored = json.loads(json.dumps(rows))
    for row in rescored:
        row["memories"].reverse()
        for memory in row["memories"]:
            memory["score"] += 0.01
            memory["created_at"] = "2026-01-02T00:00:00Z"
    rescored.reverse()
    gate = run_gate(log_run(tmp_path / "new", rescored, WRONG), base)
    assert scs(gate)[0] == scs(gate)[1] < 100 and gate.checks[0].numbers["drop"] == 0
    assert gate.notes == [] and gate.changes.empty


def test_logs_with_other_questions_or_levels_are_refused_in_words(tmp_path):
    base = log_run(tmp_path / "base", log_rows(40))
    less = log_run(tmp_path / "less", log_rows(30), WRONG)
    with pytest.raises(ValueError, match=r"30 questions in both, 10 \(first 'turn-30'\) only in"):
        run_gate(less, base)
    gate = run_gate(less, base, GateSettings(common=True))
    assert gate.checks[0].numbers["questions"] == 30
    assert gate.notes == ["Left out: 10 questions that only one run has."]
    relabelled = log_rows(40)
    relabelled[5]["memories"][1]["level"] = "Bound"
    other = log_run(tmp_path / "other", relabelled)
    with pytest.raises(ValueError, match="another in .* in 1 question \\(first 'turn-5'\\)"):
        run_gate(other, base)
    gate = run_gate(other, base, GateSettings(common=True))
    assert gate.checks[0].numbers["questions"] == 39 and "two different ideal" in gate.notes[0]
    judged = (other / "judgments.jsonl").read_text().replace('"judge":"j"', '"judge":"k"')
    (other / "judgments.jsonl").write_text(judged)
    with pytest.raises(ValueError, match="allowed: the same judge"):
        run_gate(other, base)


def test_a_query_that_stands_there_twice_is_told_apart_by_id(tmp_path):
    rows = log_rows(20)
    for row in rows:
        row["query"] = "What now?"
    base = log_run(tmp_path / "base", rows)
    for row in rows:
        for memory in row["memories"]:
            memory["in_prompt"] = memory["level"] != "Ignore"
    gate = run_gate(log_run(tmp_path / "new", rows[::-1]), base)
    assert gate.checks[0].numbers["questions"] == 20 and scs(gate) == (100, 100)
    assert len(gate.notes) == 1
    for row in rows:
        del row["id"]
    lines = log_run(tmp_path / "lines", rows)
    assert "20 rows without an id" in run_gate(lines, lines).notes[-1]


def test_one_memory_in_other_words_is_known_by_its_id(tmp_path):
    rows = log_rows()
    for row in rows:
        for place, memory in enumerate(row["memories"]):
            memory["id"] = f"memory-{place}"
    base = log_run(tmp_path / "base", rows)
    for row in rows:
        for memory in row["memories"]:
            memory["memory"] = memory["memory"].replace("Fact number", "It is known as")
    assert run_gate(log_run(tmp_path / "new", rows), base).notes == []
    for row in rows:
        for memory in row["memories"]:
            del memory["id"]
    gate = run_gate(log_run(tmp_path / "no ids", rows), base)
    assert "The baseline alone showed 240 memories, and the run alone showed 240" in gate.notes[0]


def test_examples_may_differ_in_scores_and_times_alone(tmp_path):
    base = make_run(tmp_path / "base")
    new = make_run(tmp_path / "new")
    examples = []
    changed = []
    for number in range(40):
        memory = ({"Allergic.": "C"}, {"Plays chess.": "A"})
        example = Example.of(f"Question {number}?", *memory, id=f"q{number}")
        examples.append(example)
        blocks = [block.model_copy(update={"score": 0.5}) for block in example.blocks]
        assert isinstance(blocks[0], Block)
        changed.append(example.model_copy(update={"blocks": blocks}))
    write_jsonl(base / "examples.jsonl", examples)
    judgments = (new / "judgments.jsonl").read_text()
    for first, second in zip(examples, changed, strict=True):
        judgments = judgments.replace(first.content_hash, second.content_hash)
    (new / "judgments.jsonl").write_text(judgments)
    write_jsonl(new / "examples.jsonl", changed)
    assert run_gate(new, base).passed
    with pytest.raises(ValueError, match="what differs: scores in 40"):
        compare_runs([base, new])


def test_the_workflow_judges_the_log_that_its_step_writes(capsys, tmp_path):
    import configparser

    import yaml

    text = run(capsys, "gate", "--workflow")[1]
    steps = yaml.safe_load(text)["jobs"]["gate"]["steps"]
    commands = [step.get("run", "") for step in steps]
    settings = configparser.ConfigParser(interpolation=None)
    settings.read("settings.ini")
    assert settings["DEFAULT"]["install"] in commands
    yours = next(i for i, command in enumerate(commands) if "evals/questions.jsonl" in command)
    evaluated = next(i for i, command in enumerate(commands) if "memcalib evaluate" in command)
    assert yours < evaluated and " --yes " in commands[evaluated]
    file = tmp_path / "memory.yaml"
    file.write_text(run(capsys, "gate", "--workflow-settings")[1])
    evaluation = load_evaluation(file)
    assert evaluation.log.file in commands[yours] and evaluation.model is None
    assert f"secrets.{evaluation.judge.key_env} " in text
