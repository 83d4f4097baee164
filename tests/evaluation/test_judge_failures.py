"""A judge that fails in the middle, answers that were withheld,
and what `retry_unscored` asks again.
"""

import ast
import errno
import json
import os
from pathlib import Path

import pytest
from faulty_server import FaultyServer, Late, completion

import memcalib
from memcalib.evaluation.footprints import FootprintJudge
from memcalib.evaluation.run import evaluate
from memcalib.inference.cache import CallCache
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.io.records import DataError, read_jsonl, write_jsonl
from memcalib.judge import JudgeConfig, LLMJudge, judge_request
from memcalib.scoring.judge_runs import Judge, check_judge_answers, judge_rollouts
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.problem import Judgment, Rollout

EXAMPLES = make_examples("short", 60, 0, "test")


def endpoint(url, **fields):
    return Endpoint(
        **(
            {"model": "m", "base_url": url, "key_env": "", "backoff": 0.001, "concurrency": 1}
            | fields
        )
    )


def verdict(example, response="An answer."):
    rows = [
        {
            "atom_id": name,
            "u_star": ideal,
            "predicted_usage_level": "A",
            "evidence_quote": "",
            "reason": "absent",
        }
        for name, ideal in judge_request(example, response, JudgeConfig()).ideal_letters.items()
    ]
    return completion(json.dumps({"atom_judgments": rows}))


def answers(path, examples, **fields):
    rows = [
        {"example_id": e.id, "model": "m", "response": "An answer.", "example_hash": e.content_hash}
        for e in examples
    ]
    return write_jsonl(path, [Rollout(**row | fields) for row in rows])


def judged(path):
    return {row.example_id: row for row in read_jsonl(path, Judgment)}


def test_a_judge_that_dies_in_the_middle_stops_the_run(tmp_path):
    rollouts = answers(tmp_path / "r.jsonl", EXAMPLES)
    out = tmp_path / "j.jsonl"
    with FaultyServer(*map(verdict, EXAMPLES[:14]), *[(500, {})] * 200) as server:
        with pytest.raises(RuntimeError, match="20 judgments in a row failed in the same way"):
            judge_rollouts(EXAMPLES, rollouts, LLMJudge(endpoint(server.url, attempts=1)), out)
        assert len(judged(out)) == 34 and len(server.requests) == 34
        server.script[:] = map(verdict, EXAMPLES[14:])
        result = judge_rollouts(EXAMPLES, rollouts, LLMJudge(endpoint(server.url, attempts=1)), out)
    assert (result.found_before, result.judged, result.failed) == (14, 46, 0)
    assert all(row.scored for row in judged(out).values())


def test_failures_between_good_replies_do_not_stop_a_run(tmp_path):
    script = [step for e in EXAMPLES[:30] for step in ((500, {}), (500, {}))][:30]
    mixed = [script[k] if k % 3 else verdict(e) for k, e in enumerate(EXAMPLES[:30])]
    with FaultyServer(*mixed) as server:
        rollouts = answers(tmp_path / "r.jsonl", EXAMPLES[:30])
        out = tmp_path / "j.jsonl"
        result = judge_rollouts(EXAMPLES, rollouts, LLMJudge(endpoint(server.url, attempts=1)), out)
    assert (result.judged, result.failed) == (30, 20)


@pytest.mark.parametrize("cached", [True, False])
def test_only_what_is_unscored_is_asked_again_and_really_asked(tmp_path, cached):
    examples = EXAMPLES[:3]
    sorry = completion("I cannot judge this.")
    rollouts = answers(tmp_path / "r.jsonl", examples)
    out = tmp_path / "j.jsonl"
    cache = CallCache(tmp_path / "calls.sqlite") if cached else None

    def run(server, **options):
        return judge_rollouts(
            examples, rollouts, LLMJudge(endpoint(server.url), cache=cache), out, **options
        )

    with FaultyServer(verdict(examples[0]), sorry, sorry, verdict(examples[2])) as server:
        assert run(server).unscored == 1 and len(server.requests) == 4
        judged_before = judged(out)
        assert run(server).judged == 0 and len(server.requests) == 4, (
            "without being told, it is final"
        )
        server.script[:] = [sorry, sorry]
        assert run(server, retry_unscored=True).unscored == 1 and len(server.requests) == 6, (
            "asked anew, in vain"
        )
        server.script[:] = [sorry, verdict(examples[1])]
        result = run(server, retry_unscored=True)
        assert (result.judged, result.found_before, result.unscored, len(server.requests)) == (
            1,
            2,
            0,
            8,
        )
        assert run(server, retry_unscored=True).judged == 0 and len(server.requests) == 8
    assert all(row.scored for row in judged(out).values())
    assert [judged(out)[e.id] for e in (examples[0], examples[2])] == [
        judged_before[e.id] for e in (examples[0], examples[2])
    ]


class Forgetful(Judge):
    """Finds no level, until it is asked anew."""

    name = "forgetful"

    def __init__(self, is_anew: bool = False):
        self.is_anew = is_anew

    def anew(self):
        return Forgetful(is_anew=True)

    def judge(self, example, response):
        return dict.fromkeys(example.levels, "A") if self.is_anew else {}


@pytest.mark.parametrize("judge", [Forgetful(), FootprintJudge(Forgetful())])
def test_any_judge_is_asked_anew_about_what_stayed_unscored(tmp_path, judge):
    rollouts = answers(tmp_path / "r.jsonl", EXAMPLES[:3])
    out = tmp_path / "j.jsonl"
    assert judge_rollouts(EXAMPLES, rollouts, judge, out).unscored == 3
    assert judge_rollouts(EXAMPLES, rollouts, judge, out).judged == 0
    again = judge_rollouts(EXAMPLES, rollouts, judge, out, retry_unscored=True)
    assert (again.judged, again.unscored) == (3, 0)
    assert all(row.scored for row in judged(out).values())


class Partial(Judge):
    """Leaves one atom out, until it is asked anew: then it fails, or finds no level at all."""

    name = "partial"

    def __init__(self, later=None):
        self.later = later
        self.is_anew = False

    def anew(self):
        judge = Partial(self.later)
        judge.is_anew = True
        return judge

    def judge(self, example, response):
        if not self.is_anew:
            return dict.fromkeys(list(example.levels)[1:], "A")
        if isinstance(self.later, BaseException):
            raise self.later
        return self.later or {}


@pytest.mark.parametrize(
    "later",
    [
        CallError("auth", "no key", status=401),
        CallError("server", "busy", status=503),
        KeyboardInterrupt(),
        {},
    ],
    ids=["refused", "failed", "stopped", "worse"],
)
def test_rows_that_are_asked_anew_stay_until_a_better_reply_is_there(tmp_path, later):
    rollouts = answers(tmp_path / "r.jsonl", EXAMPLES[:3])
    out = tmp_path / "j.jsonl"
    assert judge_rollouts(EXAMPLES, rollouts, Partial(), out).unscored == 3
    before = out.read_bytes()
    try:
        judge_rollouts(EXAMPLES, rollouts, Partial(later), out, retry_unscored=True)
    except (CallError, KeyboardInterrupt) as error:
        assert error is later
    assert out.read_bytes() == before


def test_a_better_reply_takes_the_place_of_the_row_before(tmp_path):
    examples = EXAMPLES[:3]
    rollouts = answers(tmp_path / "r.jsonl", examples)
    out = tmp_path / "j.jsonl"
    judge_rollouts(examples, rollouts, Partial(), out)
    order = list(judged(out))
    all_found = dict.fromkeys(examples[1].levels, "A")
    result = judge_rollouts(
        examples, rollouts, Replying(examples[1].id, all_found), out, retry_unscored=True
    )
    assert (result.judged, result.found_before, result.unscored) == (3, 0, 2)
    assert list(judged(out)) == order
    assert [row.scored for row in judged(out).values()] == [False, True, False]


class Replying(Partial):
    """Finds all levels of one example, and none of the others."""

    def __init__(self, example_id, levels):
        self.example_id = example_id
        self.levels = levels

    def anew(self):
        return self

    def judge(self, example, response):
        return self.levels if example.id == self.example_id else {}


def test_an_error_inside_a_judge_of_the_package_keeps_its_traceback(tmp_path, monkeypatch):
    """That of another judge is said in one sentence, with its name."""
    rollouts = answers(tmp_path / "r.jsonl", EXAMPLES[:1])

    def breaks(self, example, response):
        raise KeyError("levels")

    monkeypatch.setattr(Forgetful, "judge", breaks)
    with pytest.raises(RuntimeError, match="Forgetful raised KeyError: 'levels' on the answer"):
        judge_rollouts(EXAMPLES, rollouts, Forgetful(), tmp_path / "j.jsonl")
    monkeypatch.setattr(Forgetful, "__module__", "memcalib.judge")
    with pytest.raises(KeyError, match="levels"):
        judge_rollouts(EXAMPLES, rollouts, Forgetful(), tmp_path / "j.jsonl")


def test_a_good_reply_in_the_cache_is_used_again(tmp_path):
    """A run was stopped between the reply to the second question and its row."""
    examples = EXAMPLES[:1]
    sorry = completion("I cannot judge this.")
    rollouts = answers(tmp_path / "r.jsonl", examples)
    cache = CallCache(tmp_path / "calls.sqlite")
    with FaultyServer(sorry, sorry, verdict(examples[0])) as server:

        def make():
            return LLMJudge(endpoint(server.url), cache=cache)

        judge_rollouts(examples, rollouts, make(), tmp_path / "j.jsonl")
        judge_rollouts(examples, rollouts, make(), tmp_path / "j.jsonl", retry_unscored=True)
        judge_rollouts(examples, rollouts, make(), tmp_path / "k.jsonl")
        result = judge_rollouts(
            examples, rollouts, make(), tmp_path / "k.jsonl", retry_unscored=True
        )
        assert len(server.requests) == 3 and result.unscored == 0


@pytest.mark.parametrize("finish", ["content_filter", "tool_calls"])
def test_a_withheld_answer_is_unscored_and_a_silent_one_is_not(tmp_path, finish):
    rollouts = answers(tmp_path / "r.jsonl", EXAMPLES[:30], response="", finish_reason=finish)
    out = tmp_path / "j.jsonl"
    silent = answers(tmp_path / "s.jsonl", EXAMPLES[:3], response="")
    with FaultyServer() as server:
        for judge in (LLMJudge(endpoint(server.url)), exact_judge):
            result = judge_rollouts(
                EXAMPLES, rollouts, judge, tmp_path / f"{type(judge).__name__}.jsonl"
            )
            assert (result.judged, result.unscored, result.failed) == (30, 30, 0)
            assert judge_rollouts(EXAMPLES, rollouts, judge, result.path).judged == 0, "final"
            assert all(
                row.error.startswith("not an answer") for row in judged(result.path).values()
            )
        assert judge_rollouts(EXAMPLES, silent, LLMJudge(endpoint(server.url)), out).unscored == 0
        assert not server.requests, "nobody is asked about answers without words"


def test_filtered_words_are_judged_as_any_answer(tmp_path):
    rollouts = answers(tmp_path / "r.jsonl", EXAMPLES[:1], finish_reason="content_filter")
    with FaultyServer(verdict(EXAMPLES[0])) as server:
        assert (
            judge_rollouts(
                EXAMPLES, rollouts, LLMJudge(endpoint(server.url)), tmp_path / "j.jsonl"
            ).unscored
            == 0
        )


def test_the_judge_is_tried_before_the_first_answer_is_paid_for(monkeypatch, tmp_path):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with MicroServer(EXAMPLES) as server:
        model = Endpoint(model="micro-model", base_url=server.base_url, key_env="")
        for judge, kind in (
            ({"key_env": "NO_SUCH_KEY"}, "no key"),
            ({"model": "micro-jugde"}, "does not exist"),
        ):
            judge = Endpoint(
                **{"model": "micro-judge", "base_url": server.base_url, "key_env": ""} | judge
            )
            with pytest.raises(CallError, match=kind):
                evaluate(EXAMPLES, model=model, judge=judge, out=tmp_path)
        assert server.stats()["answered"] == 0 and not (tmp_path / "rollouts.jsonl").exists()


def test_an_unreadable_reply_to_the_first_question_is_no_reason_to_stop():
    with FaultyServer(*[completion("Hm.")] * 2) as server:
        check_judge_answers(LLMJudge(endpoint(server.url)), EXAMPLES[0])
        assert len(server.requests) == 2
    with (
        FaultyServer(*[(500, {})] * 9) as server,
        pytest.raises(RuntimeError, match="did not reply to a first test question"),
    ):
        check_judge_answers(LLMJudge(endpoint(server.url, attempts=2)), EXAMPLES[0])


def disk_is_full(row):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_replies_on_their_way_are_kept_when_a_row_cannot_be_written(tmp_path):
    examples = EXAMPLES[:12]
    rollouts = answers(tmp_path / "r.jsonl", examples)
    reply = completion("Hm.")
    with FaultyServer(reply, *[Late(reply, 0.3)] * 11) as server:
        judge = LLMJudge(
            endpoint(server.url, concurrency=12),
            JudgeConfig(repair=False),
            CallCache(tmp_path / "calls.sqlite"),
        )
        with pytest.raises(OSError, match="No space left"):
            judge_rollouts(examples, rollouts, judge, tmp_path / "j.jsonl", on_row=disk_is_full)
        assert len(server.requests) == 12
        result = judge_rollouts(examples, rollouts, judge, tmp_path / "j.jsonl")
        assert (result.found_before, result.judged) == (1, 11)
        assert len(server.requests) == 12, "every reply that was paid for was in the cache"


def test_replies_on_their_way_are_kept_when_twenty_failed_alike(tmp_path):
    example = EXAMPLES[0]
    rows = [
        Rollout(example_id=example.id, model="m", sample=k, response=f"Answer {k}.")
        for k in range(24)
    ]
    rollouts = write_jsonl(tmp_path / "r.jsonl", rows)
    slow = Late(verdict(example), 0.5)
    with FaultyServer(*[slow] * 4, *[(500, {})] * 20) as server:
        judge = LLMJudge(
            endpoint(server.url, concurrency=24, attempts=1),
            cache=CallCache(tmp_path / "calls.sqlite"),
        )
        with pytest.raises(RuntimeError, match="20 judgments in a row failed in the same way"):
            judge_rollouts([example], rollouts, judge, tmp_path / "j.jsonl")
        assert len(server.requests) == 24
        server.script[:] = [verdict(example)] * 20
        result = judge_rollouts([example], rollouts, judge, tmp_path / "j.jsonl")
        assert (result.judged, result.unscored, result.failed) == (24, 0, 0)
        assert len(server.requests) == 44, "the four slow replies were in the cache"


def functions_that_call(tree, name):
    """The names of the functions of a module in whose body a function is called by its bare
    name.
    """
    callers = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                    callers.add(function.name)
    return callers


def test_whoever_runs_many_calls_closes_them():
    """A generator of calls that is left to the garbage collector is closed after the connections
    are.
    """
    unclosed = []
    for file in Path(memcalib.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        closing = functions_that_call(tree, "aclosing")
        for name in functions_that_call(tree, "run_many") - closing:
            unclosed.append(f"{file.name}: {name}")
    assert not unclosed


def test_quality_outside_its_scale_is_refused_by_name(tmp_path):
    judgment = exact_judge(EXAMPLES[0], "An answer.")
    row = json.loads(judgment.to_json())
    row["task_quality"] = 99
    (tmp_path / "j.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"j\.jsonl.*task_quality.*99"):
        list(read_jsonl(tmp_path / "j.jsonl", Judgment))


def test_a_stop_that_was_foreseen_is_shown_by_its_words_alone():
    from memcalib.commands.cli import _message
    from memcalib.io.records import ForeseenError

    assert _message(ForeseenError("20 judgments in a row failed")).startswith("20 judgments")
    assert _message(RuntimeError("odd")).startswith("unexpected RuntimeError: odd")


def test_a_log_beside_a_model_is_refused_and_not_ignored():
    with pytest.raises(ValueError, match="log: found .*consent.* together with a model"):
        evaluate(EXAMPLES[:1], model=lambda _: "Yes.", judge=exact_judge, log={"consent": "terms"})
