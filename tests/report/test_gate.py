"""The gate: verdicts, refusals, and the files that a build reads."""

import json
from xml.etree import ElementTree

import pytest
from command_line import run

from memcalib.io.records import write_jsonl
from memcalib.problem import Example, judgment_for
from memcalib.report.gate import GateSettings, run_gate, save_baseline


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
    assert code == 0 and output.startswith("gate passed: SCS") and output.count("\n") == 1
    worse = make_run(tmp_path / "worse", set(range(20)))
    code, output, _ = run(capsys, "gate", worse, "--baseline", base, "--out", out)
    assert code == 3 and "gate failed: SCS 98.1 → 62.5" in output
    little = make_run(tmp_path / "little", set(range(4)))
    code, output, _ = run(capsys, "gate", little, "--baseline", base, "--out", out)
    assert code == 0 and "gate undecided" in output and "needs" in output
    code, output, _ = run(capsys, "gate", little, "--baseline", base, "--out", out, "--strict")
    assert code == 3 and json.loads((out / "gate.json").read_text())["passed"] is False
    assert ElementTree.parse(out / "gate.xml").getroot().get("failures") == "1"


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
        ([], 1, "found no run"),
        (["RUN"], 1, "neither a baseline nor a limit"),
        (["RUN", "--min", "SCS"], 1, "--min: found 'SCS'; allowed: METRIC=POINTS"),
        (["RUN", "--min", "SCSS=3"], 1, "SCSS"),
        (["RUN", "--min", "sMOS=3"], 1, "less is better; allowed: SCS, Exact"),
        (["RUN", "--max", "SCS=3"], 1, "more is better"),
        (["RUN", "--min", "SCS=3", "--metric", "scs"], 1, "scs"),
        (["RUN", "--min", "SCS=3", "--set", "false_alarms=2"], 1, "false_alarms"),
        (["RUN", "--baseline", "nowhere"], 1, "nowhere: no such run folder"),
        (["RUN", "--max-dorp", "3"], 2, "--max-drop"),
    ],
)
def test_wrong_calls_say_what_is_allowed(capsys, tmp_path, arguments, code, message):
    folder = make_run(tmp_path / "run")
    words = [str(folder) if word == "RUN" else word for word in arguments]
    exit_code, output, errors = run(capsys, "gate", *words, "--out", tmp_path / "gate")
    assert exit_code == code and message in errors, errors
    assert not (tmp_path / "gate").exists() and output == ""


def test_a_baseline_that_cannot_be_compared_is_refused(tmp_path):
    new = make_run(tmp_path / "new")
    others = make_run(tmp_path / "others", first=20)
    with pytest.raises(ValueError, match="found 20 examples in both, 20 only in"):
        run_gate(new, others)
    assert run_gate(new, others, GateSettings(common=True)).checks[0].numbers["questions"] == 20
    judged = make_run(tmp_path / "judged", judge="someone else")
    with pytest.raises(ValueError, match="allowed: one judge"):
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
    from memcalib.report.gate import write_gate

    base = make_run(tmp_path / "base", model="<b>&|\x07]]>")
    out = write_gate(run_gate(base, base), tmp_path / "out")
    ElementTree.parse(out / "gate.xml")
    assert "\x07" not in (out / "gate.md").read_text()
