"""`memcalib exam` against the practice server: verdicts, resume,
and what an evaluation says of its judge.
"""

import json

from pathlib import Path

import numpy as np
import pytest
from faulty_server import FaultyServer
from typer.testing import CliRunner

from memcalib.commands import cli
from memcalib.commands import exam as c
from memcalib.judge import judge_request
from memcalib.products.exam.exam import confusion_of, find_exam
from memcalib.products.exam.minimal_pairs import HARD_FORMS
from memcalib.products.exam.rank import rank_judging
from memcalib.inference.endpoint import Endpoint, Price
from memcalib.products.micro.practice.server import MicroServer


@pytest.fixture(scope="module")
def server():
    with MicroServer([], practice=c.practice_judge()) as server:
        yield server


ANSWERS_ALONE = {"pairs": 0, "rank_pairs": 0, "real": 0}


def at(server, model="micro-judge"):
    return Endpoint(model=model, base_url=server.base_url, key_env="")


def call(*arguments):
    done = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    return done.exit_code, done.output + (
        repr(done.exception)
        if done.exception and not isinstance(done.exception, SystemExit)
        else ""
    )


def examine(server, *options):
    return call("exam", "--judge", "micro-judge", "--judge-url", server.base_url, *options)


@pytest.fixture(scope="module")
def sat(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exam")
    priced = at(server).model_copy(update={"price": Price(prompt=2.0, completion=8.0)})
    run = c.ExamRun(c.Exam(judge=priced, answers=90, **ANSWERS_ALONE, probes=10), folder)
    return folder, run.forecast(), run.run()


def test_a_judge_that_errs_never_has_a_perfect_exam_and_a_rerun_asks_nothing(server, sat):
    folder, todo, exam = sat
    assert (
        todo["to ask"] == 110
        and exam["numbers"]["macro"] == 100
        and exam["verdict"] in ("passed", "undecided")
    )
    request_count = server.stats()["requests"]
    again = c.ExamRun(c.Exam(judge=at(server), answers=90, **ANSWERS_ALONE, probes=10), folder)
    assert (
        again.forecast()["to ask"] == 0
        and again.run() == exam
        and server.stats()["requests"] == request_count
    )
    assert {"exam.json", "exam.html", "judgments.jsonl", "rollouts.jsonl"} <= {
        p.name for p in folder.iterdir()
    }
    usage = json.loads((folder / "exam.json").read_text())["usage"]
    assert usage["seconds"] > 0 and usage["calls"] >= 110
    assert usage["cost"] == pytest.approx(
        (2 * usage["prompt_tokens"] + 8 * usage["completion_tokens"]) / 1e6
    )
    assert "seconds of replies, cost in US dollars: 0." in c.exam_text(exam)
    with pytest.raises(ValueError, match="answers"):
        c.ExamRun(c.Exam(judge=at(server), answers=80, **ANSWERS_ALONE, probes=10), folder)


@pytest.mark.slow
def test_a_stated_confusion_matrix_comes_back(tmp_path):
    noise = np.array([[0.9, 0.08, 0.02], [0.1, 0.8, 0.1], [0.0, 0.15, 0.85]])
    with MicroServer([], practice=c.practice_judge(noise.tolist())) as server:
        exam = c.ExamRun(
            c.Exam(judge=at(server), answers=240, **ANSWERS_ALONE, probes=0), tmp_path
        ).run()
    counts = np.array(exam["question_counts"]).sum(0).reshape(3, 3, 3).sum(0)
    shares = counts / counts.sum(1, keepdims=True)
    n = counts.sum(1, keepdims=True)
    assert (
        np.abs(shares - noise) <= 3 * np.sqrt(np.maximum(noise * (1 - noise), 1e-3) / n) + 0.01
    ).all()
    assert exam["verdict"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "verdict"),
    [(np.eye(3), "passed"), ([[1, 0, 0]] * 3, "failed"), (confusion_of(0.7), "failed")],
)
def test_the_exit_code_is_the_verdict(table, verdict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MicroServer([], practice=c.practice_judge(np.asarray(table, float).tolist())) as server:
        code, text = examine(server, "--no-cache", "--set", "probes=5", "--set", "answers=270")
    assert (code, f": {verdict}" in text) == (0 if verdict == "passed" else 3, True), text
    stored = json.loads((tmp_path / "runs/exam/micro-judge/exam.json").read_text())
    assert stored["verdict"] == verdict and find_exam(stored["judge"])["date"] == stored["date"]


@pytest.mark.slow
def test_an_evaluation_says_what_is_known_of_its_judge(server, sat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _, exam = sat
    options = [
        "--model",
        "micro-model",
        "--base-url",
        server.base_url,
        "--judge",
        "micro-judge",
        "--no-cache",
        "--limit",
        12,
        "--set",
        "sampling.seeds=[42]",
    ]
    code, text = call("evaluate", *options, "--set", f"exams={folder}", "--out", "one")
    assert code == 0 and f"exam {exam['verdict']}" in text
    row = json.loads((tmp_path / "one/results.jsonl").read_text().splitlines()[0])
    assert row["judge"]["exam"]["verdict"] == exam["verdict"]
    if exam["verdict"] == "passed":
        corrected = row["corrected"]["SCS"]["value"]
        assert corrected == pytest.approx(row["metrics"]["SCS"]["value"], abs=1e-4)
    else:
        assert row["corrected"] is None
        assert (
            "not corrected for the judge's errors, because the judge's exam ended "
            f"{exam['verdict']}."
        ) in text
    code, text = call("evaluate", *options, "--out", "two")
    assert (
        code == 0
        and "not examined" in text
        and json.loads((tmp_path / "two/results.jsonl").read_text().splitlines()[0])["judge"][
            "exam"
        ]
        is None
    )
    code, text = call("compare", "one/results.jsonl", "two/results.jsonl")
    assert code == 0 and "difference" in text


def test_a_dry_run_asks_nothing_and_writes_nothing(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request_count = server.stats()["requests"]
    code, text = examine(server, "--dry-run", "--set", "judge.price={prompt: 1, completion: 2}")
    assert (
        code == 0
        and "$" in text
        and server.stats()["requests"] == request_count
        and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "judge"),
        (("--judge", "no.module:thing"), "no.module"),
        (("--judge", "micro-exact", "--set", "answers=0"), "answers"),
    ],
)
def test_bad_calls_are_named(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = call("exam", *arguments)
    assert code != 0 and named in text


def test_a_sheet_for_people_is_written_and_read_and_a_bad_level_is_named(tmp_path):
    code, text = call("exam", "--write-sheet", tmp_path / "people.csv")
    lines = (tmp_path / "people.csv").read_text(encoding="utf-8-sig").splitlines()
    assert (
        code == 0 and "people.csv" in text and "ideal" not in lines[0] and "actual" not in lines[0]
    )
    import pandas as pd

    sheet = pd.read_csv(tmp_path / "people.csv", dtype=str, keep_default_na=False)
    assert len(sheet) == 270
    sheet["level"] = "A"
    sheet.to_csv(tmp_path / "people.csv", index=False)
    code, text = call("exam", "--labels", tmp_path / "people.csv")
    assert code == 0 and "Ignore" in text and "33" in text
    sheet.loc[3, "level"] = "D"
    sheet.to_csv(tmp_path / "people.csv", index=False)
    code, text = call("exam", "--labels", tmp_path / "people.csv")
    assert code != 0 and "'D'" in text and "A, B, C" in text


@pytest.mark.parametrize(
    "judge, folder",
    [
        ("..", "judge"),
        (".", "judge"),
        ("../..", "-.."),
        ("/etc/passwd", "-etc-passwd"),
        ("org/judge-7b", "org-judge-7b"),
        ("judge", "judge"),
    ],
)
def test_an_exam_stays_below_its_folder(judge, folder):
    assert c.exam_folder(judge) == Path("runs/exam") / folder
    assert c.exam_folder(judge).resolve().parent == Path("runs/exam").resolve()


def test_an_exam_of_one_answer_that_is_not_read_ends_with_a_verdict(tmp_path):
    with FaultyServer() as server:
        judge = Endpoint(model="sorry", base_url=server.url, key_env="")
        exam = c.ExamRun(c.Exam(judge=judge, answers=1, **ANSWERS_ALONE, probes=0), tmp_path).run()
    assert exam["verdict"] == "failed" and "left unread (100.0 %)" in exam["reasons"][0]
    assert (tmp_path / "exam.html").is_file()
    json.loads((tmp_path / "exam.json").read_text())


@pytest.mark.slow
def test_a_judge_that_failed_corrects_nothing(tmp_path, monkeypatch):
    """By this judge a true SCS of 66 once came out as 104.7."""
    monkeypatch.chdir(tmp_path)
    noise = confusion_of(0.8).tolist()
    with MicroServer([], practice=c.practice_judge(noise)) as server:
        code, _ = examine(server, "--no-cache", "--set", "probes=5", "--set", "answers=270")
        assert code == 3
        exam = json.loads((tmp_path / "runs/exam/micro-judge/exam.json").read_text())
        options = [
            "--model",
            "micro-model",
            "--base-url",
            server.base_url,
            "--judge",
            "micro-judge",
        ]
        code, text = call("evaluate", *options, "--no-cache", "--limit", 12, "--out", "one")
    assert exam["verdict"] == "failed" and len(exam["error_check"]) == 5 * 6
    assert code == 0 and "not corrected for the judge's errors" in text
    assert "corrected_low" not in text
    page = (tmp_path / "one/report.html").read_text()
    assert "the judge&#39;s exam ended failed" in page or "the judge's exam ended failed" in page
    assert "model-based estimate" not in page


def test_forty_pairs_are_read_beside_the_answers_those_of_stance_alone_by_a_judge_of_stance(
    tmp_path,
):
    judge = "micro-exact"
    by_default = c.ExamRun(c.Exam(judge=judge, answers=1, probes=0), tmp_path / "a", dry_run=True)
    kinds = [item.answer.kind for item in by_default.items]
    assert len(by_default.pairs) == 40 and kinds.count("pair") == 80
    assert kinds.count("real") == min(30, by_default.data["real answers"])
    assert all(pair.edit.direction != "stance" for pair in by_default.pairs)
    everything = c.Exam(judge=judge, answers=1, probes=0, pairs=None, judging={"stance": True})
    pairs = c.ExamRun(everything, tmp_path / "b", dry_run=True).pairs
    assert len(pairs) > 200 and any(pair.edit.direction == "stance" for pair in pairs)


def test_half_of_the_pairs_are_those_that_the_rank_begins_with(tmp_path):
    judge = "micro-exact"
    run = c.ExamRun(c.Exam(judge=judge, answers=1, probes=0), tmp_path / "a", dry_run=True)
    rank = {pair.pair_id for pair in run.rank_pairs}
    both_ways = [pair for pair in run.pairs if pair.pair_id in rank]
    assert len(rank) == 60 and len(both_ways) == 20
    assert {pair.form for pair in run.rank_pairs} <= set(HARD_FORMS)
    fewer = c.Exam(judge=judge, answers=1, probes=0, pairs=10, rank_pairs=5)
    smaller = c.ExamRun(fewer, tmp_path / "b", dry_run=True)
    assert {p.pair_id for p in smaller.pairs} <= {p.pair_id for p in run.pairs}
    assert {p.pair_id for p in smaller.rank_pairs} <= rank
    too_many = c.Exam(judge=judge, answers=1, probes=0, rank_pairs=5000)
    with pytest.raises(ValueError, match="rank_pairs of the exam: found 5000"):
        c.ExamRun(too_many, tmp_path / "c", dry_run=True)


def test_the_rank_is_read_blind_and_stands_beside_those_of_others(tmp_path):
    noisy = confusion_of(0.9).tolist()
    settings = {"answers": 30, "probes": 2, "pairs": 6, "rank_pairs": 12, "real": 0}
    exams = {}
    for name, table in (("good", None), ("noisy", noisy)):
        with MicroServer([], practice=c.practice_judge(table)) as server:
            exam = c.Exam(judge=at(server), **settings)
            exams[name] = c.ExamRun(exam, tmp_path / name).run()
            if name == "good":
                asked = server.stats()["requests"]
                again = c.ExamRun(exam, tmp_path / name)
                assert again.forecast()["to ask"] == 0 and again.run() == exams[name]
                assert server.stats()["requests"] == asked
    good = exams["good"]
    assert good["rank"]["right"] == good["rank"]["flawless"] == 100 and good["rank"]["read"] == 12
    assert good["rank"]["judge"] != good["judge"]
    assert good["rubric_help"]["pairs"] == 3 and good["rubric_help"]["difference"] == 0
    assert good["numbers"]["used_accuracy"] == 100
    assert exams["noisy"]["rank"]["right"] < 100
    readings = (tmp_path / "good" / "blind-judgments.jsonl").read_text().splitlines()
    assert len(readings) == 24
    lines = c.exam_text(good)
    assert "(the floor)" in lines and "12 hard pairs right, read blind" in lines
    assert "for comparison, a judge that copies the ideal level" in lines
    page = (tmp_path / "noisy" / "exam.html").read_text()
    assert "Judges that do not read" in page and "Hard pairs, read blind" in page
    assert find_exam(good["judge"], tmp_path / "good")["rank"]["right"] == 100


def test_an_exam_that_cannot_be_compared_has_no_place_and_is_counted(tmp_path):
    run = c.ExamRun(
        c.Exam(judge="micro-exact", answers=1, probes=0), tmp_path / "own", dry_run=True
    )
    outcomes = [{"pair_id": "p1", "question_id": "e1", "right": True}]
    alike = {"schema": "memcalib-exam-1", "data": {"hash": run.data["hash"]}}
    rank = {"rank": {"outcomes": [{**outcomes[0], "right": False}]}}
    others = {
        "compared": {**alike, "judge": "other", **rank},
        "of-an-earlier-edition": {"schema": "memcalib-exam-1", "judge": "early"},
        "without-a-rank": {**alike, "judge": "unranked", "rank": None},
        "on-other-data": {**alike, "judge": "elsewhere", **rank, "data": {"hash": "f0"}},
        "without-a-name": {**alike, **rank},
    }
    for name, exam in others.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "exam.json").write_text(json.dumps(exam))
    places = run._places({"judge": "own", "rank": {"outcomes": outcomes}})
    assert set(places["judge"]) == {"own", "other"}
    assert run.notes == [
        f"places: 4 exams in {tmp_path} could not be compared, because of other data or a missing "
        "rank"
    ]


def test_what_a_blind_judge_is_sent_has_no_level_and_no_rubric(tmp_path):
    run = c.ExamRun(c.Exam(judge="micro-exact", answers=1, probes=0), tmp_path, dry_run=True)
    item = run.rank_items[0]
    for judging, shown in ((run.exam.judging, True), (rank_judging(run.exam.judging), False)):
        request = judge_request(item.example, item.answer.response, judging)
        sent = request.messages[-1]["content"]
        assert ('"u_star"' in sent) == shown and ("under_use" in sent) == shown
