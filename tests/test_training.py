"""The trainer against its base, its degenerate inputs, and the sampler against the library's."""

import copy
import json
import logging
import math
import random
import sys
import types
import itertools
from itertools import accumulate

import pandas as pd
import pytest
import torch
from datasets import Dataset
from trainer_logger import hear
from micro_policy import EXAMPLES, TOKENIZER
from run_files import rows as read_rows
from run_files import weights
from safetensors.torch import load_file
from trl import GRPOTrainer

from memcalib.channels import channel_rewards, judgment_tensors
from memcalib.trainer.checkpoints import checkpoints, read_state
from memcalib.trainer.rewards import prompt_dataset
from memcalib.inference.sampling import sample_tokens
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, policy_path
from memcalib.report.run_data import METHOD_LABELS
from memcalib.trainer.callbacks import Diverged, repetition
from memcalib.problem import Level, encode_prompt, judge_all, judgment_for, render
from memcalib.credit.logprobs import response_logps_reference
from memcalib.inference.token_rows import response_mask
from memcalib.trainer.train_config import (
    METHODS,
    CreditGRPOConfig,
    TrainConfig,
    TrainingMethod,
    trl_config,
    world_config,
)
from memcalib.training import CreditTrainer, StepRows, answer_seed, train

torch.set_num_threads(1)


def settings(**changes):
    return world_config(
        WORLDS["short"], **(dict(prompts=4, generations=4, steps=1, max_tokens=12) | changes)
    )


def run(tmp_path, judge=exact_judge, seed=0, **changes):
    trainer = train(
        build_policy(seed), settings(**changes), EXAMPLES, judge, tokenizer=TOKENIZER, out=tmp_path
    )
    return trainer, read_rows(tmp_path)


def total_reward(completions, example, **_):
    judged = judge_all(
        exact_judge, [EXAMPLES[i] for i in example], [c[0]["content"] for c in completions]
    )
    ideal, actual, mask, _ = judgment_tensors(judged)
    return channel_rewards(ideal, actual, mask).sum(1).tolist()


@pytest.mark.parametrize(("minibatches", "loss"), [(1, "dapo"), (2, "bnpo")])
def test_grpo_is_the_base_trainer_when_definitions_agree(tmp_path, minibatches, loss):
    config = settings(
        method="grpo",
        ddof=1,
        eps=1e-4,
        sampler="generate",
        share_prompts=False,
        minibatches=minibatches,
        steps=2,
    )
    ours, _ = run(tmp_path / "ours", **config.model_dump(exclude_unset=True))
    policy = build_policy(0)
    policy.save_pretrained(tmp_path / "start")
    policy.config._name_or_path = str(tmp_path / "start")
    arguments = trl_config(config, tmp_path / "base")
    arguments.loss_type = loss
    base = GRPOTrainer(
        policy,
        [total_reward],
        arguments,
        prompt_dataset(config, TOKENIZER, EXAMPLES),
        processing_class=TOKENIZER,
    )
    base.train()
    start = weights(build_policy(0))
    moved = (weights(base.model) - start).norm()
    assert moved > 0.01
    assert (weights(ours.model) - weights(base.model)).norm() < 1e-3 * moved


def test_shared_prompts_change_nothing_but_time(tmp_path):
    start = weights(build_policy(0))
    shared, rows = run(tmp_path / "a", sampler="generate", share_prompts=True)
    plain, others = run(tmp_path / "b", sampler="generate", share_prompts=False)
    assert (weights(shared.model) - weights(plain.model)).norm() < 1e-2 * (
        weights(plain.model) - start
    ).norm()
    assert rows[0]["reward"] == others[0]["reward"]


def test_eta_zero_is_gdpo(tmp_path):
    zero, _ = run(tmp_path / "zero", eta=0.0, steps=2)
    gdpo, _ = run(tmp_path / "gdpo", method="gdpo", steps=2)
    assert torch.equal(zero.credit.advantages, gdpo.credit.advantages)
    assert torch.equal(weights(zero.model), weights(gdpo.model))


def test_same_seed_same_weights(tmp_path):
    (first, rows) = run(tmp_path / "a", steps=2)
    (second, again) = run(tmp_path / "b", steps=2)
    assert torch.equal(weights(first.model), weights(second.model))
    for row in rows + again:
        row.pop("seconds")
    assert rows == again


def unscored(example, response):
    judgment = exact_judge(example, response)
    return judgment.model_copy(
        update={"atoms": [a.model_copy(update={"actual": None}) for a in judgment.atoms]}
    )


@pytest.mark.parametrize("method", ["grpo", "gdpo", "memcalib-rl"])
def test_all_unscored_skips_the_step(tmp_path, method):
    trainer, rows = run(tmp_path, judge=unscored, method=method, beta=0.1, max_failed=1)
    assert torch.equal(weights(trainer.model), weights(build_policy(0)))
    assert rows[0]["unscored"] == 16 and rows[0]["skipped"] == 2 and rows[0]["reward"] is None
    assert rows[0]["loss"] == 0


def test_momentum_does_not_move_an_unscored_step(tmp_path):
    state = {"calls": 0}

    class Fading:
        def batch(self, examples, responses):
            state["calls"] += 1
            judge = exact_judge if state["calls"] == 1 else unscored
            return [
                judge(example, response)
                for example, response in zip(examples, responses, strict=True)
            ]

    trainer, rows = run(tmp_path / "two", judge=Fading(), steps=2, method="gdpo", max_failed=1)
    single, _ = run(tmp_path / "one", steps=1, method="gdpo")
    assert [row["skipped"] for row in rows] == [0, 2]
    assert torch.equal(weights(trainer.model), weights(single.model))


def test_an_unscored_answer_leaves_group_and_loss(tmp_path):
    def judge(example, response):
        state["n"] += 1
        return unscored(example, response) if state["n"] == 1 else exact_judge(example, response)

    state = {"n": 0}
    trainer, rows = run(tmp_path, judge=judge, method="grpo")
    assert rows[0]["unscored"] == 1
    assert trainer.credit.advantages[0].abs().sum() == 0
    other_rows = trainer.credit.sequence[1:4].double()
    assert other_rows.sum().abs() < 1e-5
    tokens = sum(
        len(ids)
        for ids, valid in zip(trainer.judged.ids, trainer.judged.valid, strict=True)
        if valid
    )
    parts = trainer._buffered_inputs
    assert sum(int(minibatch["completion_mask"].sum()) for minibatch in parts) == tokens
    assert [float(p["num_items_in_batch"]) / 2 for p in parts] == [
        float(p["completion_mask"].sum()) for p in parts
    ]


@pytest.mark.parametrize("answer", ["nothing", "an end", "a word"])
def test_answers_of_zero_and_one_token(tmp_path, monkeypatch, answer):
    import memcalib.training as training

    def short(model, prompts, *, ends, **options):
        drawn = sample_tokens(model, prompts, ends=ends, **options)
        first = {"nothing": [], "an end": [ends[0]], "a word": TOKENIZER("July")["input_ids"][:1]}[
            answer
        ]
        return [first, *drawn[1:]]

    monkeypatch.setattr(training, "sample_tokens", short)
    trainer, rows = run(tmp_path)
    assert rows[0]["unscored"] == (answer != "a word")
    assert trainer.credit.advantages.isfinite().all()
    assert weights(trainer.model).isfinite().all()


def test_damaged_weights_stop_the_run(tmp_path):
    policy = build_policy(0)
    with torch.no_grad():
        policy.model.norm.weight.fill_(math.nan)
    with pytest.raises(Diverged, match=r"step 1: .*NaN.* the run began. .* No checkpoint"):
        train(policy, settings(), EXAMPLES, exact_judge, tokenizer=TOKENIZER, out=tmp_path)


def test_masked_truncated_answers_stay_out_of_the_loss(tmp_path):
    trainer, _ = run(tmp_path, mask_truncated=True, max_tokens=6)
    tokens_in_loss = sum(
        int(minibatch["completion_mask"].sum()) for minibatch in trainer._buffered_inputs
    )
    ended = sum(len(ids) for ids in trainer.judged.ids if ids[-1] == TOKENIZER.eos_token_id)
    assert tokens_in_loss == ended < sum(map(len, trainer.judged.ids))
    assert trainer.credit.advantages.isfinite().all()


def test_answers_that_are_masked_are_read_all_the_same(tmp_path):
    """They are in the thresholds' pools: with the log-probabilities under the policy,
    not with the zeros of the mask.
    """
    trainer, _ = run(tmp_path, mask_truncated=True, max_tokens=6)
    pairs = trainer.credit.pairs
    model = build_policy(0)
    ids = trainer.judged.ids
    cut = [row for row in trainer.pairs.rows if ids[row][-1] != TOKENIZER.eos_token_id]
    whole = [trainer.encode(trainer.judged.examples[row]) for row in trainer.pairs.rows]
    answers = [ids[row] for row in trainer.pairs.rows]
    full, ablated = (
        response_logps_reference(model, prompts, answers)
        for prompts in (whole, trainer.pairs.prompts)
    )
    assert cut and pairs.d.abs().max() > 1e-3
    torch.testing.assert_close(pairs.d.float(), full - ablated, rtol=0, atol=1e-4)


def test_answers_are_drawn_as_the_settings_say(tmp_path, monkeypatch):
    import memcalib.training as training

    sampling_options = []
    plain = training.sample_tokens

    def sample(model, prompts, **options):
        return sampling_options.append(options) or plain(model, prompts, **options)

    monkeypatch.setattr(training, "sample_tokens", sample)
    trainer, (row,) = run(tmp_path, temperature=0.6, max_tokens=7, method="gdpo")
    ends = trainer.eos_token_ids
    assert (
        sampling_options == [{"temperature": 0.6, "max_tokens": 7, "ends": ends}]
        and TOKENIZER.eos_token_id in ends
    )
    assert max(map(len, trainer.judged.ids)) == 7 and row["response_length"] <= 7


def test_the_share_of_clipped_tokens_counts_both_sides(tmp_path):
    trainer, (row,) = run(
        tmp_path, any_level, method="gdpo", clip=1e-3, lr=1e-2, minibatches=2, generations=8
    )
    (logged,) = (entry for entry in trainer.state.log_history if "clip_ratio/low_mean" in entry)
    low = logged["clip_ratio/low_mean"]
    high = logged["clip_ratio/high_mean"]
    assert low > 0 and high > 0 and row["clipped"] == pytest.approx(low + high, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(method="ppo"), "memcalib-rl"),
        (dict(learning_rate=1), "Extra inputs"),
        (dict(sampler="sglang"), "generate"),
        (dict(eta=2.0), "eta"),
        (dict(mode="sideways"), "ordered"),
        (dict(top_p=0.9), "top_p"),
        (dict(prompts=0), "greater"),
    ],
)
def test_unknown_settings_raise(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


def test_config_is_frozen_and_trl_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().lr = 1.0
    with pytest.raises(ValueError, match="no_such_option"):
        TrainConfig(trl={"no_such_option": 1})
    with pytest.raises(ValueError, match="divided"):
        trl_config(TrainConfig(prompts=3, generations=3), tmp_path)
    with pytest.raises(ValueError, match="no prompt"):
        prompt_dataset(settings(max_prompt=3), TOKENIZER, EXAMPLES)


def test_a_step_needs_as_many_examples_as_prompts(tmp_path):
    config = settings(prompts=len(EXAMPLES) + 1, generations=2)
    with pytest.raises(ValueError, match=f"only {len(EXAMPLES)} examples can be used"):
        train(build_policy(0), config, EXAMPLES, exact_judge, tokenizer=TOKENIZER, out=tmp_path)


def test_thresholds_are_kept_in_checkpoints(tmp_path):
    trainer, _ = run(tmp_path, save_every=1)
    saved = read_state(tmp_path / "checkpoint-2")
    assert saved["thresholds"] == trainer.thresholds.state_dict() and saved["step"] == 1


def test_validation_rows(tmp_path):
    config = settings(eval_every=2, method="grpo", steps=3)
    train(
        build_policy(0),
        config,
        EXAMPLES,
        exact_judge,
        tokenizer=TOKENIZER,
        out=tmp_path,
        validation=EXAMPLES[:2],
    )
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "reward" not in rows[0]
    validated = [row for row in rows if "valid_SCS" in row]
    assert [row["step"] for row in validated] == [0, 2], (
        "every second step, and once before the first"
    )
    assert all(0 <= row["valid_SCS"] <= 100 and row["valid_unscored"] == 0 for row in validated)


def test_repetition():
    assert repetition([]) == 0 and repetition([1] * 10) == 1 - 1 / 7


def test_surface():
    assert TrainConfig(eta=0.5).credit.eta == 0.5
    assert issubclass(CreditTrainer, GRPOTrainer) and StepRows and Dataset


@pytest.mark.parametrize(
    "method",
    [
        "memcalib-rl",
        "opsd-gkd",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("grpo", "gdpo", "opsd-pg")),
    ],
)
def test_a_batch_may_be_padded_further(tmp_path, method):
    changes = dict(method=method, teacher_prompt_template="micro")
    plain, (row,) = run(tmp_path / "plain", **changes)
    padded, (same,) = run(tmp_path / "padded", trl={"pad_to_multiple_of": 7}, **changes)
    assert max(map(len, plain.judged.ids)) % 7 and padded.judged.ids == plain.judged.ids
    torch.testing.assert_close(
        padded.advantages, plain.advantages, rtol=0, atol=1e-5, equal_nan=True
    )
    assert same["loss"] == pytest.approx(row["loss"], abs=1e-5)
    torch.testing.assert_close(weights(padded.model), weights(plain.model), rtol=0, atol=2e-3)


@pytest.mark.parametrize("method", ["grpo", "memcalib-rl"])
def test_the_base_trainers_table_has_our_advantages(tmp_path, method):
    def judge(example, answer):
        return (
            unscored(example, answer)
            if example.id == EXAMPLES[0].id
            else exact_judge(example, answer)
        )

    options = dict(
        prompts=8, steps=2, max_failed=0.9, trl={"log_completions": True}, report_to="none"
    )
    trainer, _ = run(tmp_path, judge, method=method, **options)
    table = pd.read_parquet(max((tmp_path / "completions").glob("*.parquet")))
    means = [
        sum(row[: len(ids)]) / len(ids)
        for row, ids in zip(trainer.advantages.tolist(), trainer.judged.ids, strict=True)
    ]
    expected = [
        mean if valid else math.nan for mean, valid in zip(means, trainer.judged.valid, strict=True)
    ]
    assert table["advantage"].tolist() == pytest.approx(expected, abs=1e-6, nan_ok=True)
    scored = trainer.credit.sequence[trainer.judged.valid].tolist()
    assert [mean for mean in expected if mean == mean] == pytest.approx(scored, abs=2e-6) and len(
        scored
    ) == 28


def any_level(example, response):
    """Levels that depend on the answer's text alone."""
    draw = random.Random(example.id + response)
    return judgment_for(example, {atom: draw.choice(list(Level)) for atom in example.levels})


def test_open_pairs_are_those_whose_reward_and_advantage_agree(tmp_path):
    """The others are read for the thresholds alone, which move after they were used."""
    whole, _ = run(tmp_path / "all", any_level, generations=8)
    some, rows = run(tmp_path / "open", any_level, generations=8, threshold_pool="open")
    agree = whole.judged.rewards * whole.credit.channels
    looked = list(zip(whole.pairs.rows, whole.pairs.channels, strict=True))
    assert any(agree[at] < 0 for at in looked) and rows[0]["unscored"] == 0
    assert list(zip(some.pairs.rows, some.pairs.channels, strict=True)) == [
        at for at in looked if agree[at] > 0
    ]
    torch.testing.assert_close(some.credit.advantages, whole.credit.advantages, rtol=0, atol=1e-3)


def test_a_part_without_a_scored_answer_does_not_hold_back_the_update(tmp_path):
    """Two answers of a step are scored; of the four parts that make an update together some are
    empty.
    """

    class Few:
        def batch(self, examples, responses):
            judged = judge_all(any_level, examples, responses)
            lost = list(map(unscored, examples, responses))
            return [*judged[:2], *lost[2:]]

    start = weights(build_policy(0))
    updates = []
    for count in (1, 4):
        options = dict(
            method="gdpo",
            minibatches=1,
            accumulate=count,
            max_failed=1,
            lr=1.0,
            trl={"optim": "sgd"},
        )
        trainer, (row,) = run(tmp_path / str(count), Few(), **options)
        assert (
            row["unscored"] == 14
            and row["skipped"] == 0
            and trainer.credit.advantages.abs().sum() > 0
        )
        updates.append(weights(trainer.model) - start)
    parts = [int(minibatch["completion_mask"].sum()) for minibatch in trainer._buffered_inputs]
    assert len(parts) == 4 and 0 in parts and updates[0].norm() > 1e-3
    assert (updates[1] - updates[0]).norm() < 1e-3 * updates[0].norm()


def test_on_step_sees_every_row(tmp_path):
    rows_reported = []
    train(
        build_policy(0),
        settings(steps=2),
        EXAMPLES,
        exact_judge,
        tokenizer=TOKENIZER,
        out=tmp_path,
        on_step=rows_reported.append,
    )
    assert [row["step"] for row in rows_reported] == [1, 2]


class Plain(CreditTrainer):
    """A method from outside the package: one advantage a token, which needs no group."""

    def token_advantages(self, batch):
        sums = self.judged.rewards.sum(1).float().masked_fill(~self.judged.valid, 0)
        return response_mask(self.judged.ids) * sums[:, None]


PLAIN = TrainingMethod("plain", "Plain", True, False, False, f"{__name__}:Plain")


def test_a_method_from_outside_is_named_by_its_import_path(tmp_path):
    trainer, rows = run(tmp_path, method=f"{__name__}:PLAIN", steps=2, trace_every=1)
    assert type(trainer) is Plain and {row["method"] for row in rows} == {f"{__name__}:PLAIN"}
    expected = trainer.judged.rewards.sum(1)[:, None] * response_mask(trainer.judged.ids)
    assert torch.allclose(trainer.advantages.double(), expected, atol=1e-6)
    for wrong, why in (
        ("gpdo", "allowed: 'sft'"),
        ("math:pi", "of type float"),
        ("nowhere:X", "No module named"),
    ):
        with pytest.raises(ValueError, match=f"method.*{wrong}.*{why}"):
            settings(method=wrong)
    with pytest.raises(ValueError, match="'sft', which imitates demonstrations"):
        settings(method="sft")


def test_a_method_from_outside_may_keep_the_credit_of_another(monkeypatch):
    method = METHODS["memcalib-rl"]._replace(name="own")
    monkeypatch.setitem(sys.modules, "own_method", types.SimpleNamespace(OWN=method))
    assert settings(method="own_method:OWN").credit == settings(method="memcalib-rl").credit
    assert settings(method="own_method:OWN").credit.method == "memcalib-rl"


def test_tables_and_trainings_call_methods_by_the_same_labels():
    assert {method.name: method.label for method in METHODS.values()} == METHOD_LABELS


def drifting(monkeypatch, lengths):
    import memcalib.trainer.callbacks as module

    steps = iter(lengths)
    stats = module.answer_stats

    def longer(*args):
        lengths_found = stats(*args)
        lengths_found[:, 0] = next(steps)
        return lengths_found

    monkeypatch.setattr(module, "answer_stats", longer)


def test_drift_warns_once_and_may_stop_the_run(tmp_path, monkeypatch, caplog):
    logging.disable(logging.NOTSET)
    drifting(monkeypatch, [10, 10, 40, 40, 40, 40] * 2)
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer, rows = run(tmp_path / "on", steps=6, drift_steps=2)
    assert [("drift" in row) for row in rows] == [False, False, False, True, False, False]
    assert (
        trainer.stopped is None
        and sum("moved from 10" in message for message in caplog.messages) == 1
    )
    trainer, stopped = run(tmp_path / "off", steps=6, drift_steps=2, stop_on_drift=True)
    assert len(stopped) == 4 and "response_length moved from 10" in trainer.stopped
    assert read_state(tmp_path / "off" / "checkpoint-8")["drift"]["drifting"] == ["response_length"]


def test_response_ids_are_never_encoded_again(tmp_path, monkeypatch):
    import memcalib.trainer.rewards as page
    import memcalib.training as training

    odd = [TOKENIZER.pad_token_id, TOKENIZER.unk_token_id or 1, 7, 7]
    assert TOKENIZER(TOKENIZER.decode(odd, skip_special_tokens=True))["input_ids"] != odd
    scored = []
    plain = page.response_logps

    def strange(model, prompts, *, ends, **options):
        return [[*odd, *answer] for answer in sample_tokens(model, prompts, ends=ends, **options)]

    def spy(model, prompts, responses, **options):
        scored.extend(responses)
        return plain(model, prompts, responses, **options)

    monkeypatch.setattr(training, "sample_tokens", strange)
    monkeypatch.setattr(page, "response_logps", spy)
    trainer, rows = run(tmp_path, granularity="sentence")
    assert scored and all(ids[:4] == odd and ids in trainer.judged.ids for ids in scored)
    trained = [
        ids[mask.bool()].tolist()
        for minibatch in trainer._buffered_inputs
        for ids, mask in zip(minibatch["completion_ids"], minibatch["completion_mask"], strict=True)
    ]
    assert sorted(trained) == sorted(trainer.judged.ids)
    assert trainer.credit.advantages.isfinite().all() and rows[0]["unscored"] == 0


def test_a_tokenizer_without_chat_template(tmp_path):
    bare = copy.deepcopy(TOKENIZER)
    bare.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        train(build_policy(0), settings(), EXAMPLES, exact_judge, tokenizer=bare, out=tmp_path)


def test_overlong_prompts_are_listed(tmp_path):
    lengths = {e.id: len(encode_prompt(TOKENIZER, render(e, "concat", "micro"))) for e in EXAMPLES}
    limit = sorted(lengths.values())[4]
    _, rows = run(tmp_path, max_prompt=limit)
    listed = [json.loads(line) for line in (tmp_path / "overlong.jsonl").read_text().splitlines()]
    over = {name: tokens for name, tokens in lengths.items() if tokens > limit}
    assert {row["example_id"]: row["tokens"] for row in listed} == over and rows[0][
        "overlong"
    ] == len(over) > 0
    assert {(row["prompt"], row["max_prompt"]) for row in listed} == {("training", limit)}
    run(tmp_path)
    assert not (tmp_path / "overlong.jsonl").exists(), "the second run leaves nothing out"


@pytest.mark.parametrize("text", ["concat", "fluent"])
def test_a_prompt_that_leaves_no_room_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="context of 1024"):
        run(tmp_path, max_tokens=1000, text=text)


def test_a_reward_that_is_not_finite(tmp_path, monkeypatch):
    import memcalib.trainer.rewards as page

    plain = page.judgment_rewards

    def damaged(*args):
        rewards, scored = plain(*args)
        return rewards.index_fill(0, torch.tensor([5]), math.nan), scored

    monkeypatch.setattr(page, "judgment_rewards", damaged)
    with pytest.raises(
        ValueError,
        match=r"step 1, row 5 \(example .*\), channel A\+: the reward of a scored answer is nan",
    ):
        run(tmp_path)


def test_log_probabilities_that_are_not_finite(tmp_path, monkeypatch):
    import memcalib.training as layers

    plain = layers.response_logps

    def damaged(*args, **options):
        logps = plain(*args, **options).clone()
        logps[3, 0] = math.nan
        return logps

    monkeypatch.setattr(layers, "response_logps", damaged)
    with pytest.raises(Diverged, match="step 1: .*under the policy of row 3, token 0 is nan"):
        run(tmp_path)


def test_rows_without_memory_are_named_as_such(tmp_path, monkeypatch):
    import memcalib.training as layers

    plain = layers.response_logps

    def full(*args, lost=None, **options):
        logps = plain(*args, **options).clone()
        logps[3] = math.nan
        lost["out_of_memory"] += 1
        return logps

    monkeypatch.setattr(layers, "response_logps", full)
    with pytest.raises(
        Diverged, match=r"answers could not be scored \({'out_of_memory': 2}\): check the memory"
    ) as caught:
        run(tmp_path)
    assert "learning rate" not in str(caught.value)


def test_pairs_that_could_not_be_scored_stay_uniform(tmp_path, monkeypatch):
    import memcalib.trainer.rewards as page

    plain = page.response_logps

    def without(model, prompts, responses, lost=None, **options):
        lost["out_of_memory"] += len(prompts)
        return torch.full_like(plain(model, prompts, responses, **options), math.nan)

    gdpo, _ = run(tmp_path / "gdpo", method="gdpo")
    monkeypatch.setattr(page, "response_logps", without)
    trainer, rows = run(tmp_path / "lost", steps=2)
    for row in rows:
        assert row["fallback_scoring"] == row["pairs"] >= row["lost_out_of_memory"] > 0, (
            "of each step alone"
        )
        assert row["localized"] == row["lost_context"] == 0
    trainer, rows = run(tmp_path / "once")
    assert torch.equal(trainer.credit.advantages, gdpo.credit.advantages)


def test_a_gate_below_what_rounding_changes_is_warned_of(tmp_path, caplog):
    logging.disable(logging.NOTSET)
    with caplog.at_level(logging.WARNING, "memcalib"):
        _, rows = run(tmp_path / "fine", steps=2)
        assert not [message for message in caplog.messages if "rounding" in message]
        _, low = run(tmp_path / "low", gate=1e-9, threshold_start=1e-9)
    assert 0 < rows[0]["noise_floor"] < 1e-4 and low[0]["noise_floor"] == rows[0]["noise_floor"]
    assert "noise_floor" not in rows[1], "it is measured at the start of a run"
    (warning,) = [
        message for message in caplog.messages if "rounding alone opens the gate" in message
    ]
    assert f"up to {low[0]['noise_floor']:.3g} nats" in warning and "gate 1e-09" in warning
    _, gdpo = run(tmp_path / "gdpo", method="gdpo")
    assert "noise_floor" not in gdpo[0], "nothing is localized"


def untimed(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_answers_do_not_depend_on_how_many_are_sampled_at_once(tmp_path, monkeypatch, caplog):
    """Whole batches, pieces of one row, and pieces that had to be halved:
    the same rows, to the last digit.
    """
    import memcalib.training as page

    sizes = []
    plain = page.sample_tokens

    def small(model, prompts, **options):
        sizes.append(len(prompts))
        if memory and len(prompts) > memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, prompts, **options)

    monkeypatch.setattr(page, "sample_tokens", small)
    logging.disable(logging.NOTSET)
    outcome_of = {}
    memory = 0
    for name, changes in {"whole": {}, "single": {"sampling_tokens": 1}, "halved": {}}.items():
        sizes.clear()
        memory = 3 if name == "halved" else 0
        with caplog.at_level(logging.WARNING, "memcalib"):
            trainer, rows = run(tmp_path / name, draws="row", steps=2, max_tokens=24, **changes)
        outcome_of[name] = untimed(rows), trainer.judged.ids, list(sizes)
    assert outcome_of["whole"][2] == [16] * 2 and outcome_of["single"][2] == [1] * 32
    assert outcome_of["halved"][2] == [16, 8, 4, 2, *[2] * 7, *[2] * 8], (
        "what fitted in the first step is kept"
    )
    assert outcome_of["whole"][:2] == outcome_of["single"][:2] == outcome_of["halved"][:2]
    assert sum("out of memory while 16 answers" in message for message in caplog.messages) == 1
    assert len({tuple(ids) for ids in outcome_of["whole"][1]}) > 4, "rows of a group differ"


def test_memory_that_ends_with_one_answer_is_an_error(tmp_path, monkeypatch):
    def never(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("memcalib.training.sample_tokens", never)
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, draws="row")


def test_the_answers_of_a_row_are_its_own():
    """They depend on seed, step and place: not on the process that has the row."""
    seeds = {
        answer_seed(seed, step, row) for seed in (1, 2) for step in (0, 2) for row in range(50)
    }
    assert len(seeds) == 200 and answer_seed(1, 0, 3) == answer_seed(1, 0, 3) >= 0
    assert (
        settings().draws == "batch"
        and TrainConfig().draws
        == CreditGRPOConfig("x", use_cpu=True, bf16=False).settings().draws
        == "row"
    )


def opposed():
    """A judge for which of four answers two are right about Ignore and wrong about the rest,
    and two the other way round.
    """
    number = itertools.count()

    def judge(example, response):
        first = next(number) % 2

        def wrong(ideal):
            return Level.BOUND if ideal == Level.IGNORE else Level.IGNORE

        actual = {
            a: i if (i == Level.IGNORE) == first else wrong(i) for a, i in example.levels.items()
        }
        return judgment_for(example, actual)

    return judge


def test_thresholds_that_never_act_are_said_at_the_end(tmp_path, caplog):
    logging.disable(logging.NOTSET)
    with caplog.at_level(logging.WARNING, "memcalib"):
        run(tmp_path / "idle", steps=2)
        (idle,) = [message for message in caplog.messages if "never had an effect" in message]
        assert "thresholds of tokens never had an effect: in 2 batches" in idle
        assert "stayed at 0.02" in idle
        assert "constant threshold" in idle
        caplog.clear()
        moving = {"threshold_start": 0.0, "threshold_floor": 0.0, "threshold_minimum": 1}
        trainer, _ = run(tmp_path / "moving", steps=2, **moving)
        assert trainer.thresholds.acted
        run(tmp_path / "gdpo", method="gdpo", steps=2)
        assert not [message for message in caplog.messages if "never had an effect" in message]


def test_a_batch_in_which_channels_cancel_is_warned_of_and_may_be_bounded(tmp_path, caplog):
    logging.disable(logging.NOTSET)
    levels = (Level.IGNORE, Level.BOUND)
    two = [e for e in make_examples("short", 200, 1) if {*e.levels.values()} == {*levels}][:4]
    config = settings(mode="absolute", gate=0.0, threshold_start=0.0)

    def start(out, config):
        return train(build_policy(0), config, two, opposed(), tokenizer=TOKENIZER, out=out)

    with caplog.at_level(logging.WARNING, "memcalib"):
        start(tmp_path / "free", config)
        trainer = start(tmp_path / "bound", config.model_copy(update={"max_advantage": 5.0}))
    (free,) = read_rows(tmp_path / "free")
    (bounded,) = read_rows(tmp_path / "bound")
    assert free["rms"] < 0.01 and free["largest_advantage"] == bounded["largest_advantage"] > 100
    assert (
        trainer.advantages.abs().max() == 5
        and bounded["bounded"] > 0
        and bounded["worst_mean"] > 0.01
    )
    warnings = [message for message in caplog.messages if "a token has an advantage of" in message]
    assert (
        len(warnings) == 2
        and "step 1" in warnings[0]
        and "max_advantage would limit it" in warnings[0]
    )
    assert "max_advantage" not in warnings[1]


def test_rows_reach_the_loggers(tmp_path):
    trainer, rows = run(tmp_path, steps=2)
    logged = [entry for entry in trainer.state.log_history if "memcalib/reward" in entry]
    assert [entry["memcalib/reward"] for entry in logged] == [row["reward"] for row in rows]
    assert {
        "memcalib/response_length",
        "memcalib/worst_mean",
        "memcalib/threshold/B+",
        "kl",
    } <= logged[0].keys()


def test_rows_say_how_log_probabilities_were_computed(tmp_path, monkeypatch):
    import memcalib.credit.tree_attention as trees

    _, (row,) = run(tmp_path / "shared")
    assert row["sharing_faults"] == {} and row["lost_context"] == row["lost_out_of_memory"] == 0
    monkeypatch.setattr(trees, "tree_fault", lambda model: "no trees here")
    _, (row,) = run(tmp_path / "plain")
    assert row["sharing_faults"] == {"tree": "no trees here"}
    _, (row,) = run(tmp_path / "none", share_prompts=False, method="gdpo", sampler="generate")
    assert not {"sharing_faults", "lost_context", "lost_out_of_memory"} & row.keys(), (
        "nothing known is not zero"
    )
    _, (row,) = run(tmp_path / "pairs", share_prompts=False, sampler="generate")
    assert row["lost_context"] == 0 and row["sharing_faults"] == {}


@pytest.mark.parametrize("quantity", ["loss", "gradient norm"])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_before_the_update(
    tmp_path, monkeypatch, quantity
):
    plain = GRPOTrainer.training_step

    def step(self, model, *args):
        loss = plain(self, model, *args)
        if self.state.global_step == 3 and quantity == "gradient norm":
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = math.nan
        return loss * math.inf if self.state.global_step == 3 and quantity == "loss" else loss

    policy = build_policy(0)
    one = build_policy(0)
    config = settings(steps=3, save_every=1)
    options = dict(tokenizer=TOKENIZER)
    monkeypatch.setattr(GRPOTrainer, "training_step", step)
    with pytest.raises(
        Diverged,
        match=rf"step 2: {quantity} (nan|inf).*learning rate \(.*float32.*checkpoint-2 .* from "
        "before",
    ):
        train(policy, config, EXAMPLES, exact_judge, out=tmp_path / "bad", **options)
    assert weights(policy).isfinite().all()
    assert [path.name for path in checkpoints(tmp_path / "bad")] == ["checkpoint-2"]
    monkeypatch.setattr(GRPOTrainer, "training_step", plain)
    train(one, settings(save_every=1), EXAMPLES, exact_judge, out=tmp_path / "one", **options)
    saved = load_file(tmp_path / "bad" / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in one.named_parameters()), (
        "the last good one is as it was"
    )


@pytest.mark.parametrize("value", [1e30, math.nan])
@pytest.mark.parametrize("last", [True, False])
def test_ruined_weights_are_not_kept(tmp_path, value, last):
    """As a learning rate of 1e30 leaves them: the losses are numbers still,
    and the rows look well.
    """
    policy = build_policy(0)

    def ruin(row):
        if row["step"] == 1:
            with torch.no_grad():
                for p in policy.parameters():
                    p.add_(value)

    config = settings(
        steps=1 if last else 3, eval_every=0 if last else 1, save_every=0 if last else 1
    )
    options = dict(tokenizer=TOKENIZER, validation=EXAMPLES[:2], on_step=ruin, out=tmp_path)
    with pytest.raises(
        Diverged, match=r"step 1: after the update, weight .* of norm (inf|nan).*No checkpoint"
    ):
        train(policy, config, EXAMPLES, exact_judge, **options)
    assert checkpoints(tmp_path) == []
    if not last:
        saved = load_file(tmp_path / "best" / "model.safetensors")
        assert all(torch.isfinite(p).all() and p.abs().max() < 1e3 for p in saved.values())


def test_weights_ruined_between_steps_end_the_run_with_the_same_error(tmp_path):
    policy = build_policy(0)
    rows_reported = []

    def ruin(row):
        rows_reported.append(row)
        with torch.no_grad():
            policy.model.norm.weight.fill_(math.nan)

    with pytest.raises(Diverged, match="step 2: .*NaN.*learning rate") as caught:
        train(
            policy,
            settings(steps=3),
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=tmp_path,
            on_step=ruin,
        )
    assert (
        len(rows_reported) == 1
        and "resume" not in str(caught.value)
        and isinstance(caught.value, ValueError)
    )


def test_validation_with_ruined_weights(tmp_path, monkeypatch):
    import memcalib.trainer.rewards as page

    def nan(*args, **options):
        raise FloatingPointError("the policy's logits are NaN")

    config = settings(steps=2, eval_every=2, save_every=1)
    options = dict(tokenizer=TOKENIZER, out=tmp_path, validation=EXAMPLES[:2])
    keep = page.sample_answers

    def spoil(row):
        return monkeypatch.setattr(page, "sample_answers", nan if row["step"] == 1 else keep)

    with pytest.raises(Diverged, match=r"step 2: the policy's logits are NaN.*checkpoint-2"):
        train(build_policy(0), config, EXAMPLES, exact_judge, on_step=spoil, **options)


def test_unknown_logger(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        run(tmp_path, report_to="nowhere")


def test_mean_preservation_over_a_run(tmp_path):
    _, rows = run(tmp_path, steps=5, max_tokens=40, generations=8)
    assert [row["worst_mean"] for row in rows] == [
        *accumulate((r["conservation_relative"] for r in rows), max)
    ]
    assert rows[-1]["worst_mean"] < 2e-6


def test_traces_are_written_when_asked(tmp_path):
    from memcalib.trainer.trace_files import read_traces

    trainer, _ = run(tmp_path, steps=2, trace_every=2, threshold_minimum=1)
    assert trainer.thresholds_before.tolist() != trainer.thresholds.value.tolist(), (
        "a trace has those that were used"
    )
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step-000002.parquet"]
    assert {"example_id", "channel", "advantage"} <= {*read_traces(tmp_path / "traces").columns}


def test_the_loss_is_the_clipped_objective_with_a_plain_kl(tmp_path):
    """Value and gradient where the policy has left the old policy and the reference,
    against the formula.
    """
    trainer, _ = run(tmp_path, method="gdpo", beta=0.3, minibatches=1, clip=0.2)
    rows = 16
    tokens = 5
    torch.manual_seed(1)
    old = -torch.rand(rows, tokens) * 3
    ref = -torch.rand(rows, tokens) * 3
    advantages = torch.randn(rows, tokens)
    mask = torch.rand(rows, tokens) < 0.8
    now = (old + 0.4 * torch.randn(rows, tokens)).requires_grad_()

    def as_they_are(*arguments, **options):
        return now, now.detach() * 0, None

    trainer._get_per_token_logps_and_entropies = as_they_are
    trainer.current_gradient_accumulation_steps = 1
    inputs = dict(prompt_ids=torch.ones(rows, 2).long(), prompt_mask=torch.ones(rows, 2).long())
    inputs |= dict(
        completion_ids=torch.ones(rows, tokens).long(),
        completion_mask=mask.long(),
        advantages=advantages,
    )
    inputs |= dict(old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=mask.sum())
    loss = trainer.compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, now)
    x = now.detach().clone().requires_grad_()
    ratio = (x - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (ref - x).exp() - (ref - x) - 1
    expected_loss = -((gain - 0.3 * kl) * mask).sum() / mask.sum()
    (slope,) = torch.autograd.grad(expected_loss, x)
    assert ((ratio - 1).abs() > 0.2).any() and kl.max() > 0.5
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert torch.allclose(gradient, slope, atol=1e-6)


def copying(example, response):
    """A judge for which every second answer uses all Ignore memory fully and the others use it
    lightly.
    """
    level = Level.CONTROL if len(response) % 2 else Level.BOUND
    return judgment_for(
        example, {a: level if i == Level.IGNORE else i for a, i in example.levels.items()}
    )


def test_merged_over_use_is_one_channel_in_training(tmp_path):
    trainer, rows = run(tmp_path, copying, merge_over_use=True)
    _, apart = run(tmp_path / "apart", copying)
    assert rows[0]["reward"] == pytest.approx(apart[0]["reward"])
    assert (trainer.judged.rewards[:, 2] == 0).all() and trainer.judged.rewards[:, 1].min() == -2
    assert "reward/AC-" not in rows[0] and apart[0]["reward/AC-"] < 0 > rows[0]["reward/AB-"]
    assert rows[0]["candidates/AB-"] == apart[0]["candidates/AB-"] + apart[0]["candidates/AC-"]
    assert rows[0]["localized/AB-"] > 0


class Reader:
    """An exact judge that notes which text of memory it was asked to read."""

    def __init__(self, text=None, texts_read=None):
        self.text = text
        self.texts_read = [] if texts_read is None else texts_read

    def as_read(self, text):
        return Reader(text, self.texts_read)

    def __call__(self, example, response):
        self.texts_read.append(self.text)
        return exact_judge(example, response)


def test_the_judge_reads_what_the_policy_read(tmp_path, monkeypatch):
    import memcalib.trainer.rewards as page

    sampling_options = []
    plain = page.sample_answers

    def sample(*arguments, **options):
        return sampling_options.append(options) or plain(*arguments, **options)

    monkeypatch.setattr(page, "sample_answers", sample)
    judge = Reader()
    config = settings(eval_every=1, text="concat", eval_text="fluent")
    train(
        build_policy(0),
        config,
        EXAMPLES,
        judge,
        tokenizer=TOKENIZER,
        out=tmp_path,
        validation=EXAMPLES[:3],
    )
    assert (
        judge.texts_read.count("concat") == 16
        and judge.texts_read.count("fluent") == 6
        and len(judge.texts_read) == 22
    )
    assert (
        sampling_options
        == [{"text": "fluent", "prompt_template": "micro", "max_tokens": 12, "seed": config.seed}]
        * 2
    )


def test_an_answer_without_words_is_not_scored(tmp_path, monkeypatch):
    def silent(model, prompts, **_):
        return [[TOKENIZER.eos_token_id]] * len(prompts)

    monkeypatch.setattr("memcalib.training.sample_tokens", silent)
    _, rows = run(tmp_path)
    assert rows[0]["unscored"] == 16 and rows[0]["reward"] is None


def test_sizes_of_segments_and_thresholds_are_settings(tmp_path, monkeypatch):
    import memcalib.credit.token_credit as page

    units = []
    plain = page.response_units
    monkeypatch.setattr(
        page,
        "response_units",
        lambda *rows, **sizes: units.append(plain(*rows, **sizes)) or units[-1],
    )
    trainer, rows = run(
        tmp_path,
        granularity="sentence",
        threshold_start=0.5,
        segment_min=2,
        segment_max=3,
        threshold_minimum=10**6,
    )
    assert trainer.thresholds.value.tolist() == [0.5] * 9 and rows[0]["fallback_segments"] == 0
    assert {row[row >= 0].bincount().max().item() for row in units[0]} <= {1, 2, 3} and len(
        units[0]
    ) == 16
    assert trainer.checkpoints.identity["config"]["splitter"] in ("spacy", "pysbd")
    with pytest.raises(ValueError, match="segment_min 9"):
        settings(segment_min=9, segment_max=3)


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"report_to": "missing"}, "report_to: found 'missing', which is not installed here"),
        ({"max_tokens": 100_000}, "max_tokens: found 100000; allowed: fewer than"),
        ({"lora_rank": 4000}, "lora_rank: found 4000; allowed: at most"),
        ({"method": "opsd-gkd", "top_k": 99_999}, "top_k: found 99999; allowed: at most"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, path, changes, message
):
    hear(monkeypatch)
    model = str(policy_path("cold-short")) if path else build_policy(0)
    with pytest.raises(ValueError, match=message):
        train(
            model,
            settings(**changes),
            EXAMPLES,
            exact_judge,
            tokenizer=TOKENIZER,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
