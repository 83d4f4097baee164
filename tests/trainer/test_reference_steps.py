"""Whole steps of the trainer, stage by stage, against slow loops written from the paper: in float64 they are equal."""

import copy
import random
from functools import partial

import pytest
import reference
import torch
from micro_policy import EXAMPLES, TOKENIZER

import memcalib.training as training
from memcalib.micro.world import WORLDS, exact_judge
from memcalib.micro.policy import load_policy
from memcalib.credit.prefix_groups import sharing_faults
from memcalib.problem import Level, judgment_for
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
    """A judge whose levels depend on the answer's text alone; one answer in eight cannot be judged."""
    draw = random.Random(example.id + response)
    if draw.random() < 1 / 8:
        return judgment_for(example, {}, error="timeout")
    return judgment_for(example, {atom: draw.choice(list(Level)) for atom in example.levels})


def plain(model):
    """A copy of a model with the forward of its class, without what the trainer has put in its place."""
    model = copy.deepcopy(model)
    for module in model.modules():
        vars(module).pop("forward", None)
    return model


class Watched(training.CreditTrainer):
    """Keeps of each rollout batch and each update what it started from and what was made of it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.batches = []
        self.updates = []

    def _generate_and_score_completions(self, inputs):
        seen = {
            "policy": plain(self.accelerator.unwrap_model(self.model)),
            "before": copy.deepcopy(self.thresholds),
        }
        seen["batch"] = super()._generate_and_score_completions(inputs)
        seen |= {"judged": copy.copy(self.judged), "after": copy.deepcopy(self.thresholds)}
        self.batches.append(seen | {"pairs": self.pairs, "credit": self.credit})
        return seen["batch"]

    def compute_loss(self, model, inputs, *args, **options):
        policy = plain(self.accelerator.unwrap_model(model))
        number = self.state.global_step
        loss = super().compute_loss(model, inputs, *args, **options)
        if number == len(self.updates):  # the first of those that make one update together
            self.updates.append(
                {"policy": policy, "parts": [], "loss": 0.0, "batch": self.batches[-1]}
            )
        self.updates[-1]["parts"].append(inputs)
        self.updates[-1]["loss"] += loss.item()
        return loss

    def training_step(self, model, *args, **options):
        loss = super().training_step(model, *args, **options)
        found = self.accelerator.unwrap_model(model).named_parameters()
        self.updates[-1]["gradient"] = {
            name: p.grad.clone() for name, p in found if p.grad is not None
        }
        return loss


def watch(out, *, double=True, judge=drawn, **changes) -> Watched:
    """Two steps of two updates each, from a policy that has learnt some of its task."""
    model = load_policy("cold-short")[0]
    config = world_config(WORLDS["short"], **(SIZES | UPDATE | changes))
    kept = training.trainer_class
    training.trainer_class = lambda method: Watched
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
        training.trainer_class = kept


@torch.no_grad()
def read(model, temperature, prompt, answer) -> list[float]:
    return reference.logps(model, prompt, answer, temperature).tolist()


def slow_step(trainer, seen, reader=None) -> reference.Step:
    """The slow reading of a rollout batch from what the judge said of it; `reader` in the place of its policy."""
    config = trainer.config.credit
    judged = seen["judged"]
    before = seen["before"]
    encode = partial(
        reference.prompt_ids, TOKENIZER, prompt_template=trainer.config.prompt_template
    )
    cut = response_units(TOKENIZER, judged.ids) if config.granularity == "sentence" else []
    return reference.step(
        reader or partial(read, seen["policy"], trainer.temperature),
        lambda example, gone: encode(example, gone=gone),
        config,
        judged.examples,
        judged.judgments,
        judged.ids,
        trainer.config.generations,
        before.value.tolist(),
        before.sentence.value.tolist() if before.sentence else (),
        [row[: len(ids)].tolist() for row, ids in zip(cut, judged.ids, strict=False)],
    )


def ragged(rows) -> torch.Tensor:
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def apart(found, wanted, rounding: float = 0.0) -> float:
    """The largest difference between a rectangle and ragged rows, or of two rows, beyond a relative rounding."""
    nested = bool(len(wanted)) and isinstance(wanted[0], list)
    wanted = ragged(wanted) if nested else torch.tensor(wanted, dtype=torch.float64)
    found = torch.as_tensor(found).double()
    if nested:
        assert not found[:, wanted.size(1) :].any()
        found = found[:, : wanted.size(1)]
    assert found.shape == wanted.shape or not found.numel() + wanted.numel()
    return ((found - wanted).abs() - rounding * wanted.abs()).max().item() if found.numel() else 0.0


def gaps(seen, slow: reference.Step) -> dict[str, float]:
    """The largest difference of each stage between what the trainer made and the slow reading."""
    judged = seen["judged"]
    credit = seen["credit"]
    pairs = seen["pairs"]
    assert judged.valid.tolist() == slow.valid
    out = {
        "rewards": apart(
            judged.rewards[judged.valid],
            [r for r, v in zip(slow.rewards, slow.valid, strict=True) if v],
        )
    }
    out |= {
        "channels": apart(credit.channels, slow.channels),
        "scale": abs(credit.stats["rms"] - slow.scale),
    }
    assert pairs.rows == [p.row for p in slow.pairs] and pairs.channels == [
        p.channel for p in slow.pairs
    ]
    assert pairs.atoms == [p.atoms for p in slow.pairs] and pairs.prompts == [
        p.prompt for p in slow.pairs
    ]
    out["old"] = apart(seen["batch"]["old_per_token_logps"], slow.full)
    if credit.pairs is not None:
        found = credit.pairs
        out |= {
            name: apart(getattr(found, name), [getattr(p, name) for p in slow.pairs])
            for name in ("d", "q", "m")
        }
        out["strength"] = apart(found.strength, [p.strength for p in slow.pairs])
        out["thresholds"] = apart(seen["after"].value, slow.thresholds)
    if slow.sentence_thresholds:
        out["sentence thresholds"] = apart(seen["after"].sentence.value, slow.sentence_thresholds)
    return out | {"advantages": apart(credit.advantages, slow.advantages, ROUNDING)}


def slow_update(trainer, update, slow: reference.Step, start):
    """Loss and gradient of one update from plain forwards, and how far it is from the old policy and the reference."""
    answers = update["batch"]["judged"].ids
    known = {
        (tuple(p), tuple(y)): i for i, (p, y) in enumerate(zip(slow.prompts, answers, strict=True))
    }
    rows = []
    moved = []
    for part in update["parts"]:
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        for p, pm, y, ym in zip(*(part[name] for name in names), strict=True):
            prompt = p[pm.bool()].tolist()
            answer = y[ym.bool()].tolist()
            if answer:  # one without a judgment is in no loss
                at = known[tuple(prompt), tuple(answer)]
                assert slow.valid[at]
                now = reference.logps(update["policy"], prompt, answer, trainer.temperature)
                anchor = torch.tensor(
                    read(start, trainer.temperature, prompt, answer), dtype=torch.float64
                )
                old = torch.tensor(slow.full[at], dtype=torch.float64)
                rows.append((now, old, anchor, slow.advantages[at]))
                moved.append(torch.stack([now.detach() - old, now.detach() - anchor]).abs())
    loss = reference.loss(rows, trainer.config.clip, trainer.config.beta)
    trained = {name: p for name, p in update["policy"].named_parameters() if p.requires_grad}
    far = torch.cat(moved, 1).amax(1).tolist()
    return (
        loss,
        dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True)),
        far,
    )


LONG = {
    "exact judge",
    "sentences by channel",
    "absolute",
    "positive only",
    "merged",
    "plain",
}  # left to `make test-slow`


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in CASES],
)
def trained(request, tmp_path_factory):
    """One run of a case in float64, and the slow reading of its batches."""
    trainer = watch(tmp_path_factory.mktemp("run"), **CASES[request.param])
    return request.param, trainer, [slow_step(trainer, seen) for seen in trainer.batches]


LIMITS = dict(
    rewards=1e-12, channels=1e-12, scale=1e-12, old=1e-11, d=1e-11, q=1e-11, m=1e-9, advantages=1e-9
)


def test_every_stage_of_the_credit_is_the_slow_one(trained):
    case, trainer, slow = trained
    limits = dict.fromkeys(("strength", "thresholds", "sentence thresholds"), 1e-11) | LIMITS
    if case == "plain":  # the library reads the old policy in float32
        limits["old"] = 1e-5
    for seen, wanted in zip(trainer.batches, slow, strict=True):
        assert {
            name: gap for name, gap in gaps(seen, wanted).items() if not gap < limits[name]
        } == {}
    ways = {"cache": ""} if case == "plain" else {"cache": "", "tree": ""}
    assert sharing_faults(trainer.model) == ways, "the fast ways were used"


def test_every_update_is_the_slow_one(trained):
    """To float32, in which the library's output head gives the log-probabilities of an update."""
    _, trainer, slow = trained
    start = load_policy("cold-short")[0].double()
    clip = trainer.config.clip
    assert len(trainer.updates) == 2 * len(slow)
    for number, update in enumerate(trainer.updates):
        loss, gradient, (old, anchor) = slow_update(trainer, update, slow[number // 2], start)
        assert abs(update["loss"] - loss.item()) < 1e-6
        assert gradient.keys() == update["gradient"].keys()
        norm = sum(g.square().sum() for g in gradient.values()).sqrt()
        gap = sum(
            (g - update["gradient"][name]).square().sum() for name, g in gradient.items()
        ).sqrt()
        assert gap < 1e-5 * norm and norm > 1e-3
        assert (old > clip) == (number % 2 == 1) and (anchor > clip) == (number > 0), (
            "there is something to clip"
        )
    tokens = sum(
        part["completion_mask"].sum().item()
        for update in trainer.updates
        for part in update["parts"]
    )
    assert tokens == sum(
        len(row)
        for step in slow
        for row, scored in zip(step.full, step.valid, strict=True)
        if scored
    )


@pytest.mark.parametrize("trained", ["token"], indirect=True)
def test_the_first_case_holds_what_it_should(trained):
    _, trainer, slow = trained
    pairs = [pair for step in slow for pair in step.pairs]
    assert {pair.channel for pair in pairs} == set(range(1, 9)) and {
        pair.strength for pair in pairs
    } == {0.0, 0.75}
    assert not all(slow[0].valid) and sum(slow[0].valid) > 8
    assert (
        max(slow[0].thresholds) > 0.03 and trainer.batches[1]["before"].value.tolist() != [0.02] * 9
    )
    assert any(max(pair.m) == 4 for pair in pairs) and any(set(pair.m) == {1.0} for pair in pairs)


def as_read(seen, slow: reference.Step) -> dict[tuple, list[float]]:
    """The log-probabilities that the trainer read, by prompt and answer."""
    full = seen["batch"]["old_per_token_logps"].double()
    d = seen["credit"].pairs.d
    answers = seen["judged"].ids
    known = {
        (*p, -1, *y): full[i, : len(y)].tolist()
        for i, (p, y) in enumerate(zip(slow.prompts, answers, strict=True))
    }
    for k, pair in enumerate(slow.pairs):
        answer = answers[pair.row]
        known[*pair.prompt, -1, *answer] = (
            full[pair.row, : len(answer)] - d[k, : len(answer)]
        ).tolist()
    return known


SINGLE = [("token", drawn), ("sentence", drawn)]
SINGLE += [
    pytest.param(case, marks=pytest.mark.slow)
    for case in (("token", exact_judge), ("sentence", exact_judge))
]


@pytest.fixture(scope="module", params=SINGLE, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def single(request, tmp_path_factory):
    """One run in float32, and the slow reading of its batches, in float32 too."""
    granularity, judge = request.param
    trainer = watch(
        tmp_path_factory.mktemp("run"), double=False, granularity=granularity, judge=judge
    )
    return trainer, [slow_step(trainer, seen) for seen in trainer.batches]


def test_in_float32_the_same_log_probabilities_give_the_same_credit(single):
    trainer, slow = single
    for seen, other in zip(trainer.batches, slow, strict=True):
        known = as_read(seen, other)
        same = slow_step(
            trainer, seen, lambda prompt, answer, known=known: known[*prompt, -1, *answer]
        )
        found = gaps(seen, same)
        assert found["m"] < 1e-11 and found["advantages"] < 1e-11


def test_in_float32_the_fast_and_the_slow_forward_round_alike(single):
    trainer, slow = single
    for seen, other in zip(trainer.batches, slow, strict=True):
        exact = slow_step(trainer, seen, partial(read, copy.deepcopy(seen["policy"]).double(), 1.0))
        fast = seen["batch"]["old_per_token_logps"]
        plain = ragged(other.full)
        assert (
            apart(fast, exact.full) < 5e-5
            and apart(plain, exact.full) < 5e-5
            and apart(fast, other.full) < 5e-5
        )


def test_in_float32_advantages_differ_by_what_rounding_allows(single):
    """A multiplier is T q / Q, moved to the nearest point of a convex set: it changes by at most 2 T |dq| / Q.

    So where the signals sum to little, the rounding of a forward pass is made larger, whichever way it is done.
    """
    trainer, slow = single
    for seen, other in zip(trainer.batches, slow, strict=True):
        found = seen["credit"].pairs
        allowed = [[1e-9 + ROUNDING * abs(a) for a in row] for row in other.advantages]
        strengths = found.strength.tolist()
        turned = 0
        for pair, strength, q, m in zip(
            other.pairs, strengths, found.q.tolist(), found.m.tolist(), strict=True
        ):
            moved = sum(abs(a - b) for a, b in zip(q, pair.q, strict=False))
            change = max(abs(a - b) for a, b in zip(m, pair.m, strict=False))
            total = max(sum(q), sum(pair.q))
            assert not total or change <= 2 * len(pair.m) * moved / total + 1e-9
            if bool(strength) != bool(pair.strength):  # rounding opened or closed the gate
                turned = turned + 1
                change = torch.inf
            part = (
                abs(other.channels[pair.row][pair.channel])
                / other.scale
                * max(strength, pair.strength)
            )
            allowed[pair.row] = [
                limit + part * change if part else limit for limit in allowed[pair.row]
            ]
        assert turned <= 1
        gap = (
            seen["credit"].advantages[:, : ragged(allowed).size(1)] - ragged(other.advantages)
        ).abs()
        assert (gap <= ragged(allowed)).all()
