"""The algorithm for prime-rl, called by stand-ins with the fields of its source (commit 559b4477):
episodes, traces and message nodes, and the four names that the adapter imports. prime-rl itself
does not run here.
"""

import importlib.metadata
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from memcalib.products.integrations.contract import (
    BatchCredit,
    JudgedAnswer,
    TooManyUnscored,
    reference_cases,
)
from memcalib.credit.token_credit import TokenCredit
from memcalib.inference.client import run_async
from memcalib.products.integrations.prime_rl import (
    COMMIT,
    GroupCredit,
    algorithm_class,
    register,
)
from memcalib.products.integrations.verifiers import INFO
from memcalib.products.micro.policy import build_tokenizer
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.problem import judgment_for
from memcalib.rules.base import CreditConfig

TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 2, seed=3)
EVIDENCE = CreditConfig(mode="evidence")
CASES = [case for case in reference_cases() if case.name in ("grpo", "gdpo", "evidence")]


@dataclass
class StandInNode:
    token_ids: list[int]
    mask: list[bool]
    advantages: list[float] | None = None


@dataclass
class StandInTrace:
    id: str
    nodes: list[StandInNode]
    info: dict
    has_error: bool = False
    agent: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(trainable=True))


@dataclass
class StandInEpisode:
    traces: list[StandInTrace]
    group: SimpleNamespace


class StandInAlgorithm:
    action_loss_type: ClassVar[str] = "rl"

    def __init__(self, config, policy_pool):
        self.policy_pool = policy_pool


def stand_in_traces(episodes):
    for episode in episodes:
        for trace in episode.traces:
            sampled = any(any(node.mask) for node in trace.nodes)
            if sampled and trace.agent.trainable and not trace.has_error:
                yield episode, trace


def stand_in_assign(trace, values):
    nodes = [node for node in trace.nodes if any(node.mask)]
    assert len(values) == sum(sum(node.mask) for node in nodes)
    for node in nodes:
        size = sum(node.mask)
        node.advantages = values[:size]
        values = values[size:]


@pytest.fixture
def algorithms(monkeypatch):
    """The stand-ins where the adapter imports prime-rl from; returns its table of algorithms."""
    algo = ModuleType("prime_rl.orchestrator.algo")
    algo.ALGORITHM_CLASSES = {"grpo": StandInAlgorithm}
    algo.Algorithm = StandInAlgorithm
    algo.assign_advantages = stand_in_assign
    base = ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = stand_in_traces
    for module in (ModuleType("prime_rl"), ModuleType("prime_rl.orchestrator"), algo, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    return algo.ALGORITHM_CLASSES


def answer(example, text, judgment=None):
    return JudgedAnswer(example, judgment or exact_judge(example, text), text)


def episode(judged, number, group="g", tokens=None):
    ids = tokens or TOKENIZER(judged.text)["input_ids"]
    prompt = StandInNode([1, 2], [False, False])
    reply = StandInNode([2, *ids, 2], [False, *[True] * len(ids), False])
    trace = StandInTrace(f"trace-{number}", [prompt, reply], {INFO: judged.pack()})
    return StandInEpisode([trace], SimpleNamespace(id=group))


def group_of(example, atoms=(2, 3, 4)):
    texts = ["That is all.", *(f"{example.atoms[k].text} That is all." for k in atoms)]
    return [answer(example, text) for text in texts]


def unquoted(judged):
    atoms = [atom.model_copy(update={"quote": "", "spans": []}) for atom in judged.judgment.atoms]
    return answer(judged.example, judged.text, judged.judgment.model_copy(update={"atoms": atoms}))


def unscored(example):
    return answer(example, "That is all.", judgment_for(example, {}, error="timeout: late"))


def episodes_of(answers):
    return [episode(judged, number) for number, judged in enumerate(answers)]


def traces_of(answers):
    return [one.traces[0] for one in episodes_of(answers)]


def scored_by(algorithm, episodes):
    run_async(algorithm.score_group(episodes))
    return [one.traces[0].nodes[1].advantages for one in episodes]


def reference_groups(case):
    """The first batch of a case of the contract's reference file, its answers that have tokens:
    for each group the rows, the answers and the token ids."""
    batch = case.batches[0]
    rows_of = {}
    for row, judged in enumerate(batch.answers):
        if judged is not None and batch.mask[row].any():
            rows_of.setdefault(batch.groups[row], []).append(row)
    for rows in rows_of.values():
        ids = [batch.response_ids[row][batch.mask[row].bool()].tolist() for row in rows]
        yield rows, [batch.answers[row] for row in rows], ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_group_has_the_advantages_of_token_credit(algorithms, case):
    assert register(TOKENIZER, case.config) == "0.8.0"
    algorithm = algorithms["grpo"](SimpleNamespace(length_penalty=None), "pool")
    values = set()
    for _, answers, ids in reference_groups(case):
        episodes = [
            episode(judged, number, tokens=tokens)
            for number, (judged, tokens) in enumerate(zip(answers, ids, strict=True))
        ]
        scored_advantages = scored_by(algorithm, episodes)
        bare = TokenCredit(TOKENIZER, case.config)
        request = bare.requests(
            [judged.example for judged in answers],
            [judged.judgment for judged in answers],
            ids,
            texts=[judged.text for judged in answers],
        )
        expected = bare.assign(request)
        assert expected.any()
        for row, tokens in enumerate(ids):
            row_advantages = expected[row, : len(tokens)]
            assert torch.allclose(
                torch.tensor(scored_advantages[row]), row_advantages, rtol=0, atol=1e-6
            )
            values.add(len(set(scored_advantages[row])))
    assert (max(values) > 1) == (case.name == "evidence")  # within an answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_scale_is_the_groups_and_the_only_difference_from_a_batch(case):
    batch = case.batches[0]
    whole = BatchCredit(TOKENIZER, case.config)
    advantages_of_batch = whole.assign(batch.answers, batch.groups, batch.response_ids, batch.mask)
    assert torch.allclose(advantages_of_batch, batch.advantages, rtol=0, atol=1e-6)
    by_group = GroupCredit(TOKENIZER, case.config)
    scales = []
    for rows, answers, ids in reference_groups(case):
        traces = [
            episode(judged, number, tokens=tokens).traces[0]
            for number, (judged, tokens) in enumerate(zip(answers, ids, strict=True))
        ]
        group = by_group.assign(traces)
        scales.append(by_group.credit.last.stats["rms"])
        factor = whole.last.stats["rms"] / scales[-1]
        for row, advantages in zip(rows, group, strict=True):
            row_advantages = batch.advantages[row][batch.mask[row].bool()] * factor
            assert torch.allclose(torch.tensor(advantages), row_advantages, rtol=0, atol=1e-6)
    if case.name == "grpo":
        assert set(scales) == {1.0}
    else:
        assert abs(scales[0] - scales[1]) > 0.01


def test_failed_and_frozen_traces_are_left_out_and_a_small_group_is_counted(algorithms, caplog):
    register(TOKENIZER, EVIDENCE, group_size=5)
    algorithm = algorithms["grpo"](SimpleNamespace(), "pool")
    episodes = episodes_of(group_of(EXAMPLES[0]))
    episodes[1].traces[0].has_error = True
    episodes[2].traces[0].agent.trainable = False
    scored_advantages = scored_by(algorithm, episodes)
    assert (
        scored_advantages[1] is None and scored_advantages[2] is None and any(scored_advantages[0])
    )
    assert algorithm.credit.stats["small_groups"] == 1 and "4 of 5 episodes" in caplog.text
    episodes[3].traces[0].has_error = True
    assert not any(scored_by(algorithm, episodes)[0])  # one alone
    episodes[0].traces[0].has_error = True
    scored_by(algorithm, episodes)
    assert algorithm.credit.stats["groups"] == 2


def test_answers_without_a_score_get_zeros_until_they_are_too_many():
    credit = GroupCredit(TOKENIZER, EVIDENCE, window=8)
    answers = [*group_of(EXAMPLES[0])[:3], unscored(EXAMPLES[0])]
    advantages = credit.assign(traces_of(answers))
    assert set(advantages[3]) == {0.0} and any(advantages[0])
    with pytest.raises(TooManyUnscored, match=r"5 of the newest 8 answers .* timeout: late"):
        credit.assign(traces_of([unscored(EXAMPLES[0])] * 4))


def test_missing_quotes_are_named_once_a_window_is_full():
    answers = [unquoted(judged) for judged in group_of(EXAMPLES[0])]
    credit = GroupCredit(TOKENIZER, EVIDENCE, window=8)
    credit.assign(traces_of(answers))
    with pytest.raises(ValueError, match=r"evidence.* found 4 atoms .* newest 8 .* no quote"):
        credit.assign(traces_of(answers))
    uniform = GroupCredit(TOKENIZER, CreditConfig(method="gdpo"), window=4)
    assert uniform.assign(traces_of(answers))


def test_groups_that_are_none_are_named():
    credit = GroupCredit(TOKENIZER, EVIDENCE, group_size=2)
    episodes = episodes_of(group_of(EXAMPLES[0]))
    with pytest.raises(ValueError, match=r"group 'g': found 4 episodes; allowed: 2"):
        credit.check_group(episodes)
    episodes[0].group = SimpleNamespace(id="other")
    with pytest.raises(ValueError, match=r"episodes of the groups g, other"):
        credit.check_group(episodes)
    mixed = traces_of([group_of(EXAMPLES[0])[0], group_of(EXAMPLES[1])[0]])
    with pytest.raises(ValueError, match=rf"trace-1.*{EXAMPLES[1].id}.*{EXAMPLES[0].id}"):
        credit.assign(mixed)


def test_traces_that_are_no_single_answer_are_named():
    def refused(change):
        (trace,) = traces_of(group_of(EXAMPLES[0])[:1])
        change(trace)
        with pytest.raises(ValueError, match=r"trace 'trace-0': ") as caught:
            GroupCredit(TOKENIZER, EVIDENCE).assign([trace])
        return str(caught.value)

    def hole(trace):
        trace.nodes[1].mask[2] = False

    assert "memcalib-env" in refused(lambda trace: trace.info.clear())
    assert "2 messages" in refused(lambda trace: trace.nodes.append(trace.nodes[1]))
    assert "gaps" in refused(hole)
    assert "the same length" in refused(lambda trace: trace.nodes[1].mask.append(True))


@pytest.mark.parametrize("mode", ["ordered"])
def test_rules_that_read_the_policy_are_refused_before_a_run(algorithms, mode):
    with pytest.raises(ValueError, match=rf"rule '{mode}' reads log-probabilities"):
        register(TOKENIZER, CreditConfig(mode=mode))
    assert algorithms == {"grpo": StandInAlgorithm}


def test_a_length_penalty_is_refused(algorithms):
    algorithm = algorithm_class(TOKENIZER, EVIDENCE)
    with pytest.raises(ValueError, match=r"length_penalty"):
        algorithm(SimpleNamespace(length_penalty=object()), "pool")


def test_another_version_and_other_names_are_refused(algorithms, monkeypatch):
    monkeypatch.delattr(sys.modules["prime_rl.orchestrator.algo"], "assign_advantages")
    with pytest.raises(RuntimeError, match=rf"prime-rl 0.8.0: .*assign_advantages.*{COMMIT}"):
        register(TOKENIZER, EVIDENCE)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(RuntimeError, match=r"prime-rl: found version 0.9.0; allowed: 0.8"):
        register(TOKENIZER, EVIDENCE)
