"""Whole steps of the trainer, stage by stage, against slow loops written from the paper:
in float64 they are equal.
"""

import copy
import random
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest
import reference
import torch
from micro_policy import EXAMPLES, TOKENIZER

import memcalib.training as training
from memcalib.products.micro.world import WORLDS, exact_judge
from memcalib.products.micro.policy import load_policy
from memcalib.credit.prefix_groups import sharing_faults
from memcalib.problem import Level, judgment_for
from memcalib.credit.assignment import Credit
from memcalib.localization import Thresholds
from memcalib.rules.base import Pairs
from memcalib.trainer.rewards import ChannelRewards
from memcalib.credit.sentences import response_units
from memcalib.trainer.train_config import world_config

torch.set_num_threads(1)
SIZES = dict(
    prompts=4,
    generations=4,
    steps=2,
    minibatches=2,
    max_tokens=32,
    threshold_minimum=16,
    sentence_minimum=4,
)
UPDATE = dict(beta=0.3, clip=0.02, lr=0.1, trl={"optim": "sgd"})
STRENGTHS = {
    "AB-": 0.3,
    "AC-": 1.0,
    "BA-": 0.5,
    "B+": 0.75,
    "CA-": 0.9,
    "C+": 0.6,
}  # and none for the other two
ROUNDING = 2**-24  # advantages are handed to the loss in float32
CASES = {
    "token": dict(threshold_quantile=0.95),
    "exact judge": dict(judge=exact_judge),
    "channels": dict(eta=STRENGTHS, temperature=0.8),
    "sentence": dict(granularity="sentence"),
    "sentences by channel": dict(granularity="sentence", eta=STRENGTHS, gamma=0.5),
    "absolute": dict(mode="absolute", steps=1),
    "absolute sentences": dict(
        mode="absolute", granularity="sentence", threshold_pool="open", steps=1
    ),
    "positive only": dict(mode="positive_only", threshold_pool="open", steps=1),
    "merged": dict(merge_over_use=True, under_use="absolute", steps=1),
    "adapter": dict(lora_rank=4, lr=1.0, clip=0.001),
    "window": dict(accumulate=2, under_use="uniform", steps=1),
    "plain": dict(share_prompts=False, sampler="generate"),
    "gdpo": dict(method="gdpo", steps=1),
    "grpo": dict(method="grpo", steps=1),
}


def drawn(example, response):
    """A judge whose levels depend on the answer's text alone;
    one answer in eight cannot be judged.
    """
    draw = random.Random(example.id + response)
    if draw.random() < 1 / 8:
        return judgment_for(example, {}, error="timeout")
    return judgment_for(example, {atom: draw.choice(list(Level)) for atom in example.levels})


def plain(model):
    """A copy of a model with the forward of its class, without what the trainer has put in its
    place.
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        vars(module).pop("forward", None)
    return model


@dataclass
class RolloutRecord:
    """What a rollout batch started from, and what was made of it."""

    policy: torch.nn.Module
    before: Thresholds
    batch: dict
    judged: ChannelRewards
    after: Thresholds
    pairs: Pairs
    credit: Credit


@dataclass
class UpdateRecord:
    """What an update started from, and what was made of it."""

    policy: torch.nn.Module
    rollout: RolloutRecord
    parts: list[dict] = field(default_factory=list)
    loss: float = 0.0
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)


class Watched(training.CreditTrainer):
    """Keeps a record of each rollout batch and of each update."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rollouts: list[RolloutRecord] = []
        self.updates: list[UpdateRecord] = []

    def _generate_and_score_completions(self, inputs):
        policy = plain(self.accelerator.unwrap_model(self.model))
        before = copy.deepcopy(self.thresholds)
        batch = super()._generate_and_score_completions(inputs)
        self.rollouts.append(
            RolloutRecord(
                policy=policy,
                before=before,
                batch=batch,
                judged=copy.copy(self.judged),
                after=copy.deepcopy(self.thresholds),
                pairs=self.pairs,
                credit=self.credit,
            )
        )
        return batch

    def compute_loss(self, model, inputs, *args, **options):
        policy = plain(self.accelerator.unwrap_model(model))
        number = self.state.global_step
        loss = super().compute_loss(model, inputs, *args, **options)
        if number == len(self.updates):  # the first of those that make one update together
            self.updates.append(UpdateRecord(policy, self.rollouts[-1]))
        self.updates[-1].parts.append(inputs)
        self.updates[-1].loss += loss.item()
        return loss

    def training_step(self, model, *args, **options):
        loss = super().training_step(model, *args, **options)
        for name, weight in self.accelerator.unwrap_model(model).named_parameters():
            if weight.grad is not None:
                self.updates[-1].gradient[name] = weight.grad.clone()
        return loss


def watch(out, *, double=True, judge=drawn, **changes) -> Watched:
    """Two steps of two updates each, from a policy that has learnt some of its task."""
    model = load_policy("cold-short")[0]
    config = world_config(WORLDS["short"], **{**SIZES, **UPDATE, **changes})
    class_of_method = training.trainer_class

    def watched_class(method):
        return Watched

    training.trainer_class = watched_class
    try:
        return training.train(
            model.double() if double else model,
            config,
            EXAMPLES,
            judge,
            tokenizer=TOKENIZER,
            out=out,
        )
    finally:
        training.trainer_class = class_of_method


@torch.no_grad()
def read(model, temperature, prompt, answer) -> list[float]:
    return reference.logps(model, prompt, answer, temperature).tolist()


def slow_step(trainer, rollout: RolloutRecord, reader=None) -> reference.Step:
    """The slow reading of a rollout batch from what the judge said of it;
    `reader` in the place of its policy.
    """
    config = trainer.config.credit
    judged = rollout.judged
    template = trainer.config.prompt_template
    encode = partial(reference.prompt_ids, TOKENIZER, prompt_template=template)
    units = []
    if config.granularity == "sentence":
        cut = response_units(TOKENIZER, judged.ids)
        units = [row[: len(ids)].tolist() for row, ids in zip(cut, judged.ids, strict=True)]
    sentence = rollout.before.sentence
    return reference.step(
        reader or partial(read, rollout.policy, trainer.temperature),
        lambda example, gone: encode(example, gone=gone),
        config,
        judged.examples,
        judged.judgments,
        judged.ids,
        trainer.config.generations,
        rollout.before.value.tolist(),
        sentence.value.tolist() if sentence else (),
        units,
    )


def ragged(rows) -> torch.Tensor:
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def gap(values, expected, rounding: float = 0.0) -> float:
    """The largest difference between a rectangle and ragged rows, or of two rows,
    beyond a relative rounding.
    """
    values = torch.as_tensor(values).double()
    if len(expected) and isinstance(expected[0], list):
        expected = ragged(expected)
        assert not values[:, expected.size(1) :].any()
        values = values[:, : expected.size(1)]
    else:
        expected = torch.tensor(expected, dtype=torch.float64)
    if not values.numel() and not expected.numel():
        return 0.0
    assert values.shape == expected.shape
    return ((values - expected).abs() - rounding * expected.abs()).max().item()


def gaps(rollout: RolloutRecord, slow: reference.Step) -> dict[str, float]:
    """The largest difference of each stage between what the trainer made and the slow reading."""
    judged = rollout.judged
    credit = rollout.credit
    assert judged.valid.tolist() == slow.valid
    assert rollout.pairs.rows == [pair.row for pair in slow.pairs]
    assert rollout.pairs.channels == [pair.channel for pair in slow.pairs]
    assert rollout.pairs.atoms == [pair.atoms for pair in slow.pairs]
    assert rollout.pairs.prompts == [pair.prompt for pair in slow.pairs]
    scored = [row for row, valid in enumerate(slow.valid) if valid]
    stages = {
        "rewards": gap(judged.rewards[scored], [slow.rewards[row] for row in scored]),
        "channels": gap(credit.channels, slow.channels),
        "scale": abs(credit.stats["rms"] - slow.scale),
        "old": gap(rollout.batch["old_per_token_logps"], slow.full),
        "advantages": gap(credit.advantages, slow.advantages, ROUNDING),
    }
    if credit.pairs is not None:
        for name in ("d", "q", "m", "strength"):
            of_pairs = [getattr(pair, name) for pair in slow.pairs]
            stages[name] = gap(getattr(credit.pairs, name), of_pairs)
        stages["thresholds"] = gap(rollout.after.value, slow.thresholds)
    if slow.sentence_thresholds:
        sentence = rollout.after.sentence.value
        stages["sentence thresholds"] = gap(sentence, slow.sentence_thresholds)
    return stages


class SlowUpdate(NamedTuple):
    loss: torch.Tensor
    gradient: dict[str, torch.Tensor]
    from_old: float  # the largest change of a log-probability since the answers were written
    from_reference: float


def answers_of(parts: list[dict]):
    """Prompt and answer of each row of an update that is in the loss."""
    for microbatch in parts:
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        for prompt, prompt_mask, answer, mask in zip(
            *(microbatch[name] for name in names), strict=True
        ):
            if mask.any():  # an answer without a judgment is in no loss
                yield prompt[prompt_mask.bool()].tolist(), answer[mask.bool()].tolist()


def slow_update(trainer, update: UpdateRecord, slow: reference.Step, start) -> SlowUpdate:
    """Loss and gradient of one update from plain forwards,
    and how far it is from the old policy and the reference.
    """
    row_by_text = {}
    for row, (prompt, answer) in enumerate(
        zip(slow.prompts, update.rollout.judged.ids, strict=True)
    ):
        row_by_text[tuple(prompt), tuple(answer)] = row
    rows = []
    changes = []
    for prompt, answer in answers_of(update.parts):
        row = row_by_text[tuple(prompt), tuple(answer)]
        assert slow.valid[row]
        logps = reference.logps(update.policy, prompt, answer, trainer.temperature)
        of_reference = read(start, trainer.temperature, prompt, answer)
        of_reference = torch.tensor(of_reference, dtype=torch.float64)
        old = torch.tensor(slow.full[row], dtype=torch.float64)
        rows.append((logps, old, of_reference, slow.advantages[row]))
        now = logps.detach()
        changes.append(torch.stack([now - old, now - of_reference]).abs())
    loss = reference.loss(rows, trainer.config.clip, trainer.config.beta)
    trained = {name: p for name, p in update.policy.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, [*trained.values()])
    from_old, from_reference = torch.cat(changes, 1).amax(1).tolist()
    return SlowUpdate(loss, dict(zip(trained, gradients, strict=True)), from_old, from_reference)


LONG = {
    "exact judge",
    "sentences by channel",
    "absolute",
    "positive only",
    "merged",
    "plain",
}  # left to `make test-slow`


def marked(case: str):
    return pytest.param(case, marks=pytest.mark.slow) if case in LONG else case


@pytest.fixture(scope="module", params=[marked(case) for case in CASES])
def trained(request, tmp_path_factory):
    """One run of a case in float64, and the slow reading of its batches."""
    trainer = watch(tmp_path_factory.mktemp("run"), **CASES[request.param])
    return request.param, trainer, [slow_step(trainer, rollout) for rollout in trainer.rollouts]


LIMITS = dict(
    rewards=1e-12, channels=1e-12, scale=1e-12, old=1e-11, d=1e-11, q=1e-11, m=1e-9, advantages=1e-9
)


def test_every_stage_of_the_credit_is_the_slow_one(trained):
    case, trainer, slow = trained
    limits = {"strength": 1e-11, "thresholds": 1e-11, "sentence thresholds": 1e-11, **LIMITS}
    if case == "plain":  # the library reads the old policy in float32
        limits["old"] = 1e-5
    for rollout, step in zip(trainer.rollouts, slow, strict=True):
        for stage, difference in gaps(rollout, step).items():
            assert difference < limits[stage], stage
    ways = {"cache": ""} if case == "plain" else {"cache": "", "tree": ""}
    assert sharing_faults(trainer.model) == ways, "the fast ways were used"


def test_every_update_is_the_slow_one(trained):
    """To float32, in which the library's output head gives the log-probabilities of an update."""
    _, trainer, slow = trained
    start = load_policy("cold-short")[0].double()
    clip = trainer.config.clip
    assert len(trainer.updates) == 2 * len(slow)
    for number, update in enumerate(trainer.updates):
        expected = slow_update(trainer, update, slow[number // 2], start)
        assert abs(update.loss - expected.loss.item()) < 1e-6
        assert expected.gradient.keys() == update.gradient.keys()
        squares = [g.square().sum() for g in expected.gradient.values()]
        differences = [
            (g - update.gradient[name]).square().sum() for name, g in expected.gradient.items()
        ]
        norm = sum(squares).sqrt()
        assert norm > 1e-3
        assert sum(differences).sqrt() < 1e-5 * norm
        assert (expected.from_old > clip) == (number % 2 == 1), "there is something to clip"
        assert (expected.from_reference > clip) == (number > 0)
    tokens = 0
    for update in trainer.updates:
        tokens += sum(microbatch["completion_mask"].sum().item() for microbatch in update.parts)
    expected_tokens = 0
    for step in slow:
        for row, scored in zip(step.full, step.valid, strict=True):
            expected_tokens += len(row) if scored else 0
    assert tokens == expected_tokens


@pytest.mark.parametrize("trained", ["token"], indirect=True)
def test_the_first_case_holds_what_it_should(trained):
    _, trainer, slow = trained
    pairs = [*slow[0].pairs, *slow[1].pairs]
    assert {pair.channel for pair in pairs} == set(range(1, 9))
    assert {pair.strength for pair in pairs} == {0.0, 0.75}
    assert 8 < sum(slow[0].valid) < len(slow[0].valid)
    assert max(slow[0].thresholds) > 0.03
    assert trainer.rollouts[1].before.value.tolist() != [0.02] * 9
    assert any(max(pair.m) == 4 for pair in pairs)
    assert any(set(pair.m) == {1.0} for pair in pairs)


def logps_read(rollout: RolloutRecord, slow: reference.Step) -> dict[tuple, list[float]]:
    """The log-probabilities that the trainer read, by prompt and answer."""
    full = rollout.batch["old_per_token_logps"].double()
    d = rollout.credit.pairs.d
    answers = rollout.judged.ids
    logps = {}
    for row, (prompt, answer) in enumerate(zip(slow.prompts, answers, strict=True)):
        logps[tuple(prompt), tuple(answer)] = full[row, : len(answer)].tolist()
    for k, pair in enumerate(slow.pairs):
        answer = answers[pair.row]
        without = full[pair.row, : len(answer)] - d[k, : len(answer)]
        logps[tuple(pair.prompt), tuple(answer)] = without.tolist()
    return logps


SINGLE = [
    ("token", drawn),
    ("sentence", drawn),
    pytest.param(("token", exact_judge), marks=pytest.mark.slow),
    pytest.param(("sentence", exact_judge), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SINGLE, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def single(request, tmp_path_factory):
    """One run in float32, and the slow reading of its batches, in float32 too."""
    granularity, judge = request.param
    out = tmp_path_factory.mktemp("run")
    trainer = watch(out, double=False, granularity=granularity, judge=judge)
    return trainer, [slow_step(trainer, rollout) for rollout in trainer.rollouts]


def test_in_float32_the_same_log_probabilities_give_the_same_credit(single):
    trainer, slow = single
    for rollout, step in zip(trainer.rollouts, slow, strict=True):
        logps = logps_read(rollout, step)

        def look_up(prompt, answer, logps=logps):
            return logps[tuple(prompt), tuple(answer)]

        differences = gaps(rollout, slow_step(trainer, rollout, look_up))
        assert differences["m"] < 1e-11
        assert differences["advantages"] < 1e-11


def test_in_float32_the_fast_and_the_slow_forward_round_alike(single):
    trainer, slow = single
    for rollout, step in zip(trainer.rollouts, slow, strict=True):
        in_double = partial(read, copy.deepcopy(rollout.policy).double(), 1.0)
        exact = slow_step(trainer, rollout, in_double)
        fast = rollout.batch["old_per_token_logps"]
        assert gap(fast, exact.full) < 5e-5
        assert gap(ragged(step.full), exact.full) < 5e-5
        assert gap(fast, step.full) < 5e-5


def test_in_float32_advantages_differ_by_what_rounding_allows(single):
    """A multiplier is T q / Q, moved to the nearest point of a convex set:
    it changes by at most 2 T |dq| / Q.

    So where the signals sum to little, the rounding of a forward pass is made larger,
    whichever way it is done.
    """
    trainer, slow = single
    for rollout, step in zip(trainer.rollouts, slow, strict=True):
        pairs = rollout.credit.pairs
        allowed = (1e-9 + ROUNDING * ragged(step.advantages).abs()).tolist()
        turned = 0
        for pair, strength, q, m in zip(
            step.pairs, pairs.strength.tolist(), pairs.q.tolist(), pairs.m.tolist(), strict=True
        ):
            moved = sum(abs(a - b) for a, b in zip(q, pair.q, strict=False))
            change = max(abs(a - b) for a, b in zip(m, pair.m, strict=False))
            total = max(sum(q), sum(pair.q))
            if total:
                assert change <= 2 * len(pair.m) * moved / total + 1e-9
            if bool(strength) != bool(pair.strength):  # rounding opened or closed the gate
                turned += 1
                change = torch.inf
            advantage = abs(step.channels[pair.row][pair.channel]) / step.scale
            weight = advantage * max(strength, pair.strength)
            if weight:
                allowed[pair.row] = [limit + weight * change for limit in allowed[pair.row]]
        assert turned <= 1
        width = ragged(step.advantages).size(1)
        difference = rollout.credit.advantages[:, :width] - ragged(step.advantages)
        assert (difference.abs() <= ragged(allowed)[:, :width]).all()
