"""Trainings whose credit goes by what a judge quotes: what the judge is asked,
the rows and traces, resuming, refusals.
"""

import json

import pytest
import torch
from micro_policy import TOKENIZER, policy

from memcalib.inference.endpoint import Endpoint
from memcalib.judge import LLMJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.report.credit_viewer import answer_view, write_trace_page
from memcalib.trainer.train_config import world_config
from memcalib.trainer.trace_files import read_traces, trace_of
from memcalib.training import train

torch.set_num_threads(1)
EXAMPLES = make_examples("short", 6, seed=5)
SIZES = dict(prompts=2, generations=4, minibatches=1, max_tokens=40, lr=1e-3, threshold_minimum=16)
ASKED = []


class Recording(LLMJudge):
    """Remembers how it was asked."""

    async def ajudge(self, example, response, *, text=None, **fields):
        ASKED.append((self.config.text, self.config.every_quote))
        return await super().ajudge(example, response, text=text, **fields)


@pytest.fixture(scope="module")
def server():
    with MicroServer(EXAMPLES) as server:
        yield server


def trained(server, out, steps=2, resume=None, **changes):
    judge = Recording(Endpoint(model="micro-judge", base_url=server.base_url, key_env=""))
    settings = dict(
        mode="evidence-kl", granularity="sentence", save_every=1, trace_every=1, eval_every=steps
    )
    config = world_config(
        WORLDS["short"], steps=steps, **SIZES | settings | dict(eval_text="fluent") | changes
    )
    options = dict(tokenizer=TOKENIZER, out=out, validation=EXAMPLES[4:], resume=resume)
    return train(policy(), config, EXAMPLES[:4], judge, **options)


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """A run of two steps, its folder, and how its judge was asked."""
    out = tmp_path_factory.mktemp("straight")
    ASKED.clear()
    return trained(server, out), out, list(ASKED)


def test_every_place_is_asked_for_in_training_and_one_quote_in_validation(straight):
    _, _, judge_settings = straight
    assert set(judge_settings) == {("concat", True), ("fluent", False)}
    assert sum(every for _, every in judge_settings) <= 2 * 8 and len(judge_settings) >= 2 * 2


def test_rows_and_traces_say_what_the_quotes_were_good_for(straight):
    _, out, _ = straight
    rows = [
        row
        for row in map(json.loads, (out / "steps.jsonl").read_text().splitlines())
        if row["step"]
    ]
    for row in rows:
        assert (
            row["evidence_shown"] > 0
            and row["evidence_ungrounded"] == 0
            and row["evidence_mismatch"] == 0
        )
        assert (
            row["localized"] > 0
            and row["conservation_relative"] < 1e-6
            and "noise_floor" not in row
        )
    frame = read_traces(out)
    assert set(frame["mode"]) == {"evidence-kl"}
    trace = next(trace_of(frame, 2, row) for row in range(8) if trace_of(frame, 2, row)["channels"])
    for channel in trace["channels"].values():
        assert len(channel["d"]) == len(channel["m"]) == len(trace["tokens"])
        assert sum(channel["m"]) / len(channel["m"]) == pytest.approx(1, abs=1e-5)
    assert "evidence-kl" in write_trace_page(out).read_text(encoding="utf-8")
    [panel] = answer_view(trace, [next(iter(trace["channels"]))], "d")["panels"]
    assert panel["low"] == "signal 0" and not panel["signed"], (
        "a quote is there or not: nothing is less likely"
    )


@pytest.mark.slow
def test_a_resumed_run_is_the_same(straight, server, tmp_path):
    trainer, _, _ = straight
    trained(server, tmp_path, steps=1)
    again = trained(server, tmp_path, resume=True)
    assert again.thresholds.state_dict() == trainer.thresholds.state_dict()
    for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_judge_without_quotes_is_refused_before_the_run(tmp_path):
    def silent(example, response):
        raise AssertionError("asked")

    config = world_config(WORLDS["short"], steps=1, mode="evidence", **SIZES)
    with pytest.raises(ValueError, match="judge: found 'silent', which gives no quotes"):
        train(policy(), config, EXAMPLES[:4], silent, tokenizer=TOKENIZER, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_truncated_answers_and_a_single_process_train_by_evidence(tmp_path):
    config = world_config(
        WORLDS["short"],
        steps=1,
        mode="evidence",
        mask_truncated=True,
        **SIZES | dict(max_tokens=12),
    )
    trainer = train(policy(), config, EXAMPLES[:4], exact_judge, tokenizer=TOKENIZER, out=tmp_path)
    assert trainer.credit.stats["conservation_relative"] < 1e-6 and trainer.lost.total() == 0
