"""Lines of the method that once could be broken without a test noticing, one test for each."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memcalib import training
from memcalib.credit.assignment import _with_own
from memcalib.products.annotation.audit import ROLES, AuditedPair, _measures
from memcalib.credit.sentences import Boundaries, first_segments
from memcalib.evaluation.agreement import sample_atoms
from memcalib.evaluation.merged import counted_singly
from memcalib.evaluation.run import existing_answers
from memcalib.io.records import DataError
from memcalib.localization import threshold_scores
from memcalib.metrics import few_questions
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.problem import CHANNELS, Level, judgment_for
from memcalib.redistribution import check_means, place_pairs
from memcalib.rules.base import (
    ChannelWeights,
    CreditConfig,
    CreditRule,
    JudgedAnswers,
    JudgedBatch,
    OwnAdvantages,
    Pairs,
)
from memcalib.trainer.demonstrations import answer_objections
from memcalib.trainer.train_config import TrainConfig, world_config

LIVE = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize("mean", [0.9, 1.1])
def test_a_mean_below_or_above_the_advantage_is_refused(mean):
    rule = CreditConfig().rule
    check_means(rule, torch.full((1, 4), 1.0), torch.tensor([1.0]), LIVE)
    with pytest.raises(ValueError, match="the mean of the tokens' advantages"):
        check_means(rule, torch.full((1, 4), mean), torch.tensor([1.0]), LIVE)


def test_segments_of_one_length_are_allowed_and_a_least_above_the_most_is_not():
    assert CreditConfig(segment_min=7, segment_max=7).segment_max == 7
    with pytest.raises(ValueError, match="segment_min <= segment_max"):
        CreditConfig(segment_min=8, segment_max=7)


def test_the_signal_is_clipped_at_three_nats():
    assert CreditConfig().d_max == 3.0


def test_training_reads_the_memory_atom_by_atom_and_evaluation_as_paragraphs():
    assert TrainConfig().text == "concat"
    assert TrainConfig().eval_text == "fluent"


class Halves(CreditRule):
    """A rule of two parts: half of the credit on the first token, half on the second."""

    name = "halves"

    def opens(self, batch):
        return torch.ones_like(batch.rewards, dtype=torch.bool)


def test_each_part_of_a_pair_meets_the_mask_of_its_own_answer():
    """Two answers of different length and two parts: the mask of part p, pair k is that of pair k.
    Were the masks repeated in another order, a weight of the long answer would lie outside.
    """
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    pairs = Pairs(rows=[0, 1], channels=[4, 4], atoms=[("a",), ("a",)], prompts=[[], []])
    weights = torch.zeros(2, 2, 4)  # part, pair, token
    weights[0, 0, 0] = weights[1, 0, 1] = 1
    weights[0, 1, 2] = weights[1, 1, 3] = 1
    placed = ChannelWeights(
        weights=weights,
        shares=torch.full((2, 2), 0.5),
        above_gate=torch.tensor([True, True]),
        scored=torch.tensor([True, True]),
        signal=weights.sum(0),
        pool=torch.zeros(2, 2, 4),
        pooled=torch.zeros(2, 2, dtype=torch.bool),
    )
    config = CreditConfig(mode="tests.test_protected_lines:Halves", eta=1.0)
    batch = JudgedBatch(
        config=config,
        rewards=torch.ones(2, 9),
        advantages=torch.ones(2, 9),
        group=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
        mask=mask,
        thresholds=torch.full((9,), 0.02),
    )
    detail = place_pairs(batch, pairs, placed)
    assert (detail.m[0, 2:] == 0).all(), "no multiplier outside the short answer"
    means = (detail.m * mask).sum(1) / mask.sum(1)
    assert means.tolist() == pytest.approx([1, 1])
    assert detail.m[1, 2] > detail.m[1, 0] and detail.m[1, 3] > detail.m[1, 1]


def test_an_adapter_of_the_reinforcement_learning_recipe_has_the_scale_one(monkeypatch, tmp_path):
    seen = {}

    class Stop(Exception):
        pass

    def remember(*_, peft_config, **__):
        seen["config"] = peft_config
        raise Stop

    monkeypatch.setattr(training, "trainer_class", lambda method: remember)
    config = world_config(WORLDS["short"], lora_rank=4, prompts=2, generations=2, minibatches=1)
    with pytest.raises(Stop):
        training.train(
            build_policy(0),
            config,
            make_examples("short", 2, 0),
            exact_judge,
            tokenizer=build_tokenizer(),
            out=tmp_path / "run",
        )
    assert (seen["config"].r, seen["config"].lora_alpha) == (4, 4)


def test_only_the_boundaries_that_a_token_passed_make_its_segment_hard():
    """Three tokens of one character, each the start of a segment: the second start is hard, the
    third is soft.
    """
    marks = Boundaries({0: False, 1: True, 2: False, 3: False}, lambda position: False, [])
    starts, hard = first_segments("abc", [(0, 1), (1, 2), (2, 3)], marks)
    assert starts == [0, 1, 2]
    assert hard == {0, 1}


class Outright(CreditRule):
    """A rule that gives advantages of its own."""

    name = "outright"
    keeps_means = False


def test_advantages_of_a_rules_own_are_zero_outside_the_answer():
    """Zeros behind a short answer are what is wanted; any other value there is refused."""
    batch = JudgedBatch(
        config=CreditConfig(mode="tests.test_protected_lines:Outright"),
        rewards=torch.ones(2, 9),
        advantages=torch.ones(2, 9),
        group=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
        mask=torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(),
        thresholds=torch.full((9,), 0.02),
    )
    values = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 4.0]])
    final = torch.ones(2, 3)
    shared = _with_own(OwnAdvantages(values, 0.5), final, batch, lambda rows: rows)
    scale = ((1 + 2**2) / 2) ** 0.5  # the root mean square of the answers' means 1 and 2
    expected = 0.5 * final + 0.5 * values / scale
    assert torch.allclose(shared, expected, atol=1e-5)
    values[0, 2] = 3.0
    with pytest.raises(ValueError, match=r"row 0, token 2: found 3; allowed: .* 0 outside"):
        _with_own(OwnAdvantages(values, 0.5), final, batch, lambda rows: rows)


def test_advantages_of_a_rules_own_have_one_value_for_each_token():
    batch = JudgedBatch(
        config=CreditConfig(mode="tests.test_protected_lines:Outright"),
        rewards=torch.ones(2, 9),
        advantages=torch.ones(2, 9),
        group=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
        mask=torch.ones(2, 3, dtype=torch.bool),
        thresholds=torch.full((9,), 0.02),
    )
    too_narrow = OwnAdvantages(torch.ones(2, 1), 0.5)
    with pytest.raises(ValueError, match=r"shape \(2, 1\).*\(2, 3\)"):
        _with_own(too_narrow, torch.ones(2, 3), batch, lambda rows: rows)


@pytest.mark.parametrize(("merged", "channel"), [(False, "AC-"), (True, "AB-")])
def test_the_papers_rule_places_merged_over_use_in_one_channel(merged, channel):
    example = make_examples("short", 1, 0, "test")[0]
    levels = dict(example.levels)
    stray = next(atom_id for atom_id, ideal in levels.items() if ideal == Level.IGNORE)
    levels[stray] = Level.CONTROL
    answers = JudgedAnswers(
        examples=[example],
        judgments=[judgment_for(example, levels)],
        ids=[[1, 2]],
        texts=None,
        tokenizer=None,
        encode=lambda shown: [1],
    )
    config = CreditConfig(merge_over_use=merged)
    batch = JudgedBatch(
        config=config,
        rewards=torch.ones(1, 9),
        advantages=torch.ones(1, 9),
        group=torch.tensor([0]),
        valid=torch.tensor([True]),
        mask=torch.ones(1, 2, dtype=torch.bool),
        thresholds=torch.full((9,), 0.02),
        answers=answers,
    )
    pairs = config.rule.pairs(batch)
    placed = {
        CHANNELS[number]: atoms for number, atoms in zip(pairs.channels, pairs.atoms, strict=True)
    }
    assert placed[channel] == (stray,)
    assert {"AB-", "AC-"} & placed.keys() == {channel}


def test_a_token_that_the_atoms_make_likelier_has_a_positive_difference():
    """Log-probability with the whole memory less that without the atoms of a pair."""
    batch = JudgedBatch(
        config=CreditConfig(),
        rewards=torch.ones(1, 9),
        advantages=torch.ones(1, 9),
        group=torch.tensor([0]),
        valid=torch.tensor([True]),
        mask=torch.ones(1, 2, dtype=torch.bool),
        thresholds=torch.full((9,), 0.02),
        full=torch.tensor([[-0.5, -2.0]]),
    )
    without = torch.tensor([[-1.5, -1.0]])
    differences = CreditConfig().rule.differences(batch, torch.tensor([0]), without)
    assert differences.tolist() == [[1.0, -1.0]]


def test_one_reward_that_is_not_finite_is_enough_to_stop_a_training():
    rewards = torch.zeros(2, 9)
    judged = SimpleNamespace(
        valid=torch.tensor([True, False]),
        rewards=rewards,
        examples=[SimpleNamespace(id="first"), SimpleNamespace(id="second")],
    )
    trainer = SimpleNamespace(judged=judged, _step_number=3)
    rewards[1, 0] = math.nan  # an answer without a score may hold anything
    training.CreditTrainer._check_rewards(trainer)
    rewards[0, 4] = math.inf
    with pytest.raises(
        ValueError, match=r"step 3, row 0 .*'first'.*channel B.*the reward .* is inf"
    ):
        training.CreditTrainer._check_rewards(trainer)


@pytest.mark.parametrize("noises", [[0.01, 0.03, math.nan], [math.nan]])
def test_the_noise_of_rounding_is_the_largest_at_the_temperature_of_the_training(
    noises, monkeypatch
):
    asked = {}

    def noise(model, prompts, ids, **options):
        asked.update(options, prompts=prompts, ids=ids)
        return torch.tensor(noises)

    monkeypatch.setattr(training, "batch_noise", noise)
    trainer = SimpleNamespace(
        judged=SimpleNamespace(examples=["a", "b"], ids=[[1], [2]]),
        encode=lambda example: [ord(example)],
        concatenate=lambda values: values,
        temperature=0.7,
        config=SimpleNamespace(gate=1.0),
    )
    floor = training.CreditTrainer.noise_floor(trainer, None, answers=1)
    assert asked == {"temperature": 0.7, "prompts": [[97]], "ids": [[1]]}
    assert floor == pytest.approx(0.03) if len(noises) > 1 else math.isnan(floor)


def test_what_an_audit_measures_stands_at_its_own_pair():
    """The number of a pair is its own, wherever in the list the pair stands."""
    key, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    roles = [ROLES[0], ROLES[-1]]
    pairs = [
        AuditedPair("C+", np.array([1, 3]), key, roles, "p"),
        AuditedPair("AB-", np.array([2, 2]), other, roles, "q"),
        AuditedPair("CA-", np.array([1, 1]), key, roles, "r"),
    ]
    measured, turned = _measures(pairs), _measures(pairs[::-1])
    assert measured["token share, key"].tolist() == [25, 50, 50]
    assert measured["credit share, key"].tolist() == [100, 0, 100]
    for name, values in measured.items():
        np.testing.assert_array_equal(values, turned[name][::-1], err_msg=name)


@pytest.mark.parametrize("scheme", ["", "random"])
def test_an_unknown_scheme_of_an_audit_is_refused(scheme):
    with pytest.raises(ValueError, match=f"scheme: found {scheme!r}; allowed: natural, stratified"):
        sample_atoms(None, 1, scheme)


def test_merged_memories_are_counted_one_by_one_in_every_answer():
    """Of three answers, the first two have an atom that stands for three wordings."""
    first, second, third = (exact_judge(example, "") for example in make_examples("short", 3, 0))
    merged = {
        (first.example_id, first.atoms[0].atom_id): 2,
        (second.example_id, second.atoms[-1].atom_id): 2,
    }
    counted = counted_singly([first, second, third], merged)
    for before, after, more in zip((first, second, third), counted, (2, 2, 0), strict=True):
        assert after.key == before.key
        assert len(after.atoms) == len(before.atoms) + more
        names = [atom.atom_id for atom in after.atoms]
        assert len(set(names)) == len(names)
    assert [atom.ideal for atom in counted[0].atoms[:3]] == [first.atoms[0].ideal] * 3


def test_two_records_of_one_id_among_rows_of_answers_are_refused():
    first, second = make_examples("short", 2, 0)
    other = second.model_copy(update={"id": first.id})
    rows = [{"example": first, "response": ""}, {"example": other, "response": ""}]
    assert len(existing_answers(rows[:1] * 2)[1]) == 2
    with pytest.raises(DataError, match=r"another record with the id .*one record"):
        existing_answers(rows)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "are only 0 questions"), (1, "is only 1 question"), (2, "are only 2 questions")],
)
def test_few_questions_are_counted_in_words(count, words):
    assert few_questions(count).startswith(f"There {words}. ")


def test_a_teacher_is_told_what_was_found_and_then_what_is_wanted():
    example = make_examples("short", 1, 0)[0]
    levels = {atom.atom_id: atom.ideal for atom in example.atoms}
    wrong = next(atom for atom in example.atoms if atom.ideal == Level.CONTROL)
    levels[wrong.atom_id] = Level.IGNORE
    judgment = judgment_for(example, levels).model_copy(
        update={"task_quality": 4, "safety_failure": False}
    )
    (objection,) = answer_objections(judgment, "first", 3)
    assert (objection.rule, objection.atom_id) == ("under-use", wrong.atom_id)
    assert objection.detail.startswith("found Ignore, wanted Control.")


def test_only_tokens_of_an_answer_enter_the_pool_of_thresholds():
    """A short answer beside a long one: what stands behind it is no score, whatever it is."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    batch = JudgedBatch(
        config=CreditConfig(),
        rewards=torch.ones(3, 9),
        advantages=torch.ones(3, 9),
        group=torch.tensor([0, 0, 0]),
        valid=torch.ones(3, dtype=torch.bool),
        mask=mask,
        thresholds=torch.full((9,), 0.02),
    )
    pairs = Pairs(rows=[0, 1, 2], channels=[4, 8, 8], atoms=[("a",)] * 3, prompts=[[]] * 3)
    signal = torch.tensor([[0.5, 9.0, 0.0, 7.0], [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0]])
    placed = ChannelWeights(
        weights=signal[None],
        shares=torch.ones(1, 3),
        above_gate=torch.ones(3, dtype=torch.bool),
        scored=torch.ones(3, dtype=torch.bool),
        signal=signal,
        pool=signal[None],
        pooled=torch.tensor([[True, True, False]]),
    )
    scores, channels = threshold_scores(batch, pairs, placed)
    assert scores.tolist() == pytest.approx([0.5, 3.0, 0.1, 0.2, 0.3, 0.4])
    assert channels.tolist() == [4, 4, 8, 8, 8, 8]
