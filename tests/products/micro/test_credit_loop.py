"""The loop for small policies against the trainer of the product,
and the rules that only a comparison needs.
"""

import copy
import math
from unittest import mock

import pytest
import torch
from trl.trainer import grpo_trainer

from memcalib.inference.token_rows import response_mask
from memcalib.products.micro import loop as training
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.loop import CreditLoop
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.problem import judgment_for, remove_atoms
from memcalib.products.reproduction.rule_runs import VARIANTS, compared_rule
from memcalib.rules.base import channel_atoms, rule_names
from memcalib.trainer import rewards
from memcalib.trainer.train_config import world_config
from memcalib.training import train

SMALL = dict(prompts=2, generations=4, steps=3, max_tokens=40, draws="row", lr=1e-3, seed=3)


def config(rule: str, **changes):
    return world_config(
        WORLDS["short"],
        **(SMALL | dict(minibatches=1) | changes | compared_rule(rule).settings),
    )


def same_cut(seed: int):
    """TRL's shuffle of a rollout batch before it is cut, with the loop's own permutation."""
    draw = torch.randperm
    shuffle = grpo_trainer.shuffle_sequence_dict
    generator = torch.Generator().manual_seed(seed)

    def shuffled(batch):
        with mock.patch("torch.randperm", lambda n, **_: draw(n, generator=generator)):
            return shuffle(batch)

    return shuffled


def gap(one, other) -> float:
    """The distance of two policies' weights."""
    return (
        sum(
            (a - b).square().sum().item()
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )
        ** 0.5
    )


SLOW = [
    pytest.param(rule, parts, temperature, marks=pytest.mark.slow)
    for rule, parts, temperature in (
        *(("grpo", 1, 1), ("gdpo", 2, 1), ("ordered", 1, 1), ("uniform", 1, 1), ("evidence", 1, 1)),
        *(("evidence-kl", 2, 1), ("ordered", 1, 0.5), ("evidence-kl", 1, 0.5)),
    )
]


@pytest.mark.parametrize("rule, minibatches, temperature", [("ordered", 2, 1), *SLOW])
def test_loop_takes_the_steps_of_the_trainer(rule, minibatches, temperature, tmp_path, monkeypatch):
    chosen = config(rule, minibatches=minibatches, temperature=temperature)
    examples = make_examples("short", 5, 1)
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", same_cut(chosen.seed))
    product, tokenizer = load_policy("cold-short")
    rows = []
    train(
        product,
        chosen,
        examples,
        exact_judge,
        tokenizer=tokenizer,
        out=tmp_path,
        on_step=rows.append,
    )
    lean, _ = load_policy("cold-short")
    loop = CreditLoop(lean, tokenizer, chosen, examples, exact_judge)
    loop_rows = [loop.step() for _ in range(chosen.steps)]
    for name in ("response_length", "end_rate", "repetition", "closing_advantage", "kl"):
        assert [row[name] for row in loop_rows] == pytest.approx(
            [row[name] for row in rows], abs=1e-4
        ), name
    start, _ = load_policy("cold-short")
    apart = gap(lean, product)
    moved = gap(lean, start)
    assert apart < 0.02 * moved and moved > 0.01


RULES = [*rule_names(), *VARIANTS]


@pytest.fixture(scope="module")
def loops():
    """A loop of each rule after its first step, all of the same answers."""
    examples = make_examples("short", 2, 1)
    stepped = {}
    for rule in RULES:
        model, tokenizer = load_policy("cold-short")
        stepped[rule] = CreditLoop(model, tokenizer, config(rule), examples, exact_judge)
        stepped[rule].step()
    return stepped


def advantages(loop) -> torch.Tensor:
    return loop.token_credit.last.advantages


def means(loop) -> torch.Tensor:
    mask = response_mask(loop.judged.ids)
    return (advantages(loop) * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("grpo", "exact")])
def test_rules_move_the_advantage_of_an_answer_and_keep_its_mean(rule, loops):
    base = "grpo" if rule == "contrast" else "gdpo"
    torch.testing.assert_close(means(loops[rule]), means(loops[base]), atol=2e-6, rtol=0)
    moved = (advantages(loops[rule]) - advantages(loops[base])).abs().max()
    assert moved > 0.01 or rule in ("gdpo", "grpo")


def test_divergence_is_what_one_row_at_a_time_gives(loops):
    loop = loops["divergence"]
    (model, _) = load_policy("cold-short")
    pairs = loop.token_credit.last.pairs
    pair = 0
    row = int(pairs.row[0])
    example = loop.judged.examples[row]
    ids = loop.judged.ids[row]
    atoms = channel_atoms(loop.judged.judgments[row])[int(pairs.channel[0])]
    encode = loop.token_credit.encode

    def after(prompt):
        return (
            model(input_ids=torch.tensor([[*prompt, *ids]]))
            .logits[0]
            .log_softmax(-1)[len(prompt) - 1 : -1]
        )

    whole = after(encode(example))
    without = after(encode(remove_atoms(example, atoms)))
    divergence = (whole.exp() * (whole - without)).sum(-1).detach().double()
    torch.testing.assert_close(pairs.d[pair, : len(ids)], divergence, atol=2e-5, rtol=0)


def test_exact_credit_leaves_a_quarter_where_no_atom_is_carried(loops):
    ids = loops["exact"].judged.ids
    mask = response_mask(ids)
    uniform = means(loops["gdpo"])
    closing = torch.stack(
        [row[len(ids[k]) - 1] for k, row in enumerate(advantages(loops["exact"]))]
    )
    torch.testing.assert_close(closing, 0.25 * uniform, atol=1e-6, rtol=0)
    exact = (advantages(loops["exact"]) - 0.25 * uniform[:, None]) * mask
    size = exact.sum(1) / mask.sum(1) / 0.75
    assert size.square().mean().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule not in ("grpo", "gdpo", "exact", "evidence")]
)
def test_all_log_probabilities_are_taken_at_the_temperature_of_the_answers(rule, monkeypatch):
    temperatures = []

    def listening(function):
        def called(*args, temperature=1.0, **options):
            temperatures.append(temperature)
            return function(*args, temperature=temperature, **options)

        return called

    for module in (training, rewards):
        for name in ("response_logps", "token_divergences", "tree_logps"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, listening(getattr(module, name)))
    model, tokenizer = load_policy("cold-short")
    chosen = config(rule, temperature=0.5, beta=0.0)
    CreditLoop(
        model,
        tokenizer,
        chosen,
        make_examples("short", 2, 1),
        exact_judge,
    ).step()
    assert len(temperatures) >= 2 and {*temperatures} == {0.5}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"mask_truncated": True, "max_prompt": 64},
            "found max_prompt 64, mask_truncated True, .* allowed: max_prompt 4096",
        ),
        ({"draws": "batch"}, "found draws 'batch', .*; allowed: draws 'row'"),
        ({"accumulate": 2, "lora_rank": 4}, "found accumulate 2, lora_rank 4"),
        ({"trl": {"loss_type": "grpo"}}, "found trl"),
        ({"method": "opsd-pg"}, "method 'opsd-pg'"),
        ({"minibatches": 5}, "8 answers per step cannot be divided into 5 mini-batches"),
    ],
)
def test_settings_that_the_loop_does_not_have_are_refused(changes, message):
    model, tokenizer = load_policy("cold-short")
    with pytest.raises(ValueError, match=message):
        CreditLoop(
            model,
            tokenizer,
            world_config(WORLDS["short"], **(SMALL | dict(minibatches=1) | changes)),
            [],
            exact_judge,
        )


def test_unknown_rule_is_named():
    with pytest.raises(ValueError, match="rule: found 'gdop'; allowed: .*'grpo', 'gdpo'"):
        compared_rule("gdop")


def failing_judge(example, response):
    return judgment_for(example, {}, error="timeout: no reply")


def loop_of(judge, **changes):
    model, tokenizer = load_policy("cold-short")
    return CreditLoop(
        model, tokenizer, config("gdpo", **changes), make_examples("short", 2, 1), judge
    )


def test_a_divergence_that_is_not_measured_is_no_zero():
    row = loop_of(exact_judge, beta=0.0).step()
    assert math.isnan(row["kl"]) and row["grad_norm"] > 0 and row["skipped"] == 0
    assert loop_of(exact_judge, beta=0.01).step()["kl"] == pytest.approx(0, abs=1e-6)


def test_a_step_without_a_scored_answer_updates_nothing_and_says_so():
    loop = loop_of(exact_judge, minibatches=2)
    loop.step()
    weights = [weight.detach().clone() for weight in loop.model.parameters()]
    moments = copy.deepcopy(loop.optimizer.state_dict()["state"])
    loop.judged.judge = failing_judge
    row = loop.step()
    assert row["skipped"] == 2 and row["step"] == 2
    assert all(math.isnan(row[name]) for name in ("reward", "kl", "grad_norm"))
    for weight, before in zip(loop.model.parameters(), weights, strict=True):
        assert torch.equal(weight, before)
    for number, state in loop.optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], moments[number][name]) for name in state)
    loop.judged.judge = exact_judge
    assert loop.step()["skipped"] == 2 and loop.updates == 6


def test_a_mini_batch_without_a_scored_answer_is_left_out_of_the_means():
    loop = loop_of(exact_judge, minibatches=2)
    judged = []

    def halves(rows):
        return torch.arange(rows).chunk(2)

    def judge(example, response):
        judged.append(example)
        return exact_judge(example, response) if len(judged) <= 4 else failing_judge(example, "")

    loop.cut = halves
    loop.judged.judge = judge
    row = loop.step()
    assert row["skipped"] == 1 and math.isfinite(row["kl"]) and row["grad_norm"] > 0
    assert {int(state["step"]) for state in loop.optimizer.state.values()} == {1}
