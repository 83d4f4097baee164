"""Judging inside an engine: bounded, cached, never raising; settings and versions that are
refused.
"""

import asyncio
import importlib.metadata
import subprocess
import sys

import pydantic
import pytest

from memcalib.inference.client import run_async
from memcalib.inference.endpoint import CallError
from memcalib.products.integrations.judging import (
    ENGINES,
    AnswerJudge,
    check_engine,
    engine_settings,
    reward_numbers,
)
from memcalib.problem import CHANNELS, judgment_for
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.practice.server import MicroServer

EXAMPLES = make_examples("short", 6, seed=5)
TEXT = "Keep it in mind. That is all."


def settings(**changes):
    return engine_settings({"judge": "micro-exact", **changes})


def judged(judge, **changes):
    async def one():
        return await AnswerJudge(settings(**changes), judge)(EXAMPLES[0], TEXT)

    return run_async(one()).judgment


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("broken"), "ConnectionError: broken"),
        (CallError("rate_limited", "later"), "rate_limited: later"),
        (CallError("auth", "the key is refused"), "auth: the key is refused"),
        (KeyError("atom"), "KeyError: 'atom'"),
    ],
)
def test_a_judge_that_raises_costs_one_answer(error, words):
    def judge(example, text):
        raise error

    judgment = judged(judge)
    assert not judgment.scored and judgment.retry and judgment.error == words


def test_a_judgment_of_another_record_is_no_judgment():
    judgment = judged(lambda example, text: exact_judge(EXAMPLES[1], text))
    assert not judgment.scored and EXAMPLES[1].id in judgment.error


def test_judges_may_be_functions_coroutines_or_objects():
    async def coroutine(example, text):
        return exact_judge(example, text)

    expected = exact_judge(EXAMPLES[0], TEXT)
    assert judged(exact_judge).atoms == judged(coroutine).atoms == expected.atoms


def test_an_empty_answer_is_not_asked_about():
    def judge(example, text):
        raise AssertionError("asked")

    answer = run_async(AnswerJudge(settings(), judge)(EXAMPLES[0], " \n"))
    assert answer.judgment.error == "empty answer" and not answer.judgment.retry


def test_no_more_than_at_once_are_judged_together():
    running = []
    most = []

    async def judge(example, text):
        running.append(example)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return exact_judge(example, text)

    async def all_of_them():
        answer_judge = AnswerJudge(settings(at_once=2), judge)
        return await asyncio.gather(*(answer_judge(example, TEXT) for example in EXAMPLES))

    assert len(run_async(all_of_them())) == len(EXAMPLES) and max(most) == 2


def test_a_slow_judge_holds_nothing_up_beyond_its_time():
    async def judge(example, text):
        await asyncio.sleep(60)

    assert judged(judge, seconds=0.05).error == "timeout: no judgment within 0.05 seconds"


def test_a_rule_by_quotes_has_them_asked_for_and_refuses_a_judge_without(tmp_path):
    evidence = {"credit": {"mode": "evidence"}, "cache": str(tmp_path / "cache.sqlite")}
    with pytest.raises(ValueError, match="'plain', which gives no quotes"):

        def plain(example, text):
            return exact_judge(example, text)

        AnswerJudge(settings(**evidence), plain)
    with MicroServer(EXAMPLES) as server:
        endpoint = {"model": "micro-judge", "base_url": server.base_url, "key_env": ""}
        judge = AnswerJudge(engine_settings({"judge": endpoint, **evidence}))
        assert judge.judge.config.every_quote and judge.judge.config.text == "concat"
        answer = run_async(judge(EXAMPLES[0], TEXT))
    assert answer.judgment.scored


def test_settings_are_checked_and_missing_ones_named():
    with pytest.raises(
        ValueError, match="memcalib: found no settings in the engine's configuration"
    ):
        engine_settings(None)
    with pytest.raises(pydantic.ValidationError, match="promt_template"):
        settings(promt_template="plain")
    same = settings()
    assert engine_settings(same) is same


def test_other_versions_of_an_engine_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.0")
    for name in ENGINES:
        with pytest.raises(RuntimeError, match=rf"{name}: found version 0.10.0; allowed: "):
            check_engine(name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{ENGINES[name]}.1")
    assert check_engine("verl") == "0.9.1"


def test_an_unscored_answer_has_no_channel_rewards():
    numbers = reward_numbers(judgment_for(EXAMPLES[0], {}, error="timeout"))
    assert numbers["unscored"] == 1 and numbers["reward"] == 0
    assert all(numbers[f"channel_{name}"] != numbers[f"channel_{name}"] for name in CHANNELS)


def test_the_adapters_load_without_their_engines():
    hidden = ("verl", "verifiers", "skyrl", "prime_rl", "ray", "trl", "accelerate", "transformers")
    program = (
        "import sys, importlib, pkgutil, memcalib.products.integrations as package\n"
        f"sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "names = [module.name for module in pkgutil.iter_modules(package.__path__)]\n"
        "for name in names: importlib.import_module(f'memcalib.products.integrations.{name}')\n"
        "print(names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "judging" in done.stdout, done.stderr
