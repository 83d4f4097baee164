"""A training step in slow, obvious loops over numbers, written from the paper.

Of the package only its types, its settings and the text of a prompt are used, and for sentences their numbers. Channels
are numbered 3 * ideal + actual, with Ignore 0, Bound 1, Control 2; a row is one answer. Names of sections are the paper's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from memcalib.inference.local import evaluating
from memcalib.problem import PROMPT_TEMPLATES, Example, Judgment, encode_prompt
from memcalib.rules.base import CreditConfig

PAIRS = list(product(range(3), range(3)))  # (ideal, actual) of each channel
NAMES = ["A+", "AB-", "AC-", "BA-", "B+", "BC-", "CA-", "CB-", "C+"]


def channel_rewards(atoms: Sequence[tuple[int, int]], merged: bool = False) -> list[float]:
    """R of the nine channels, of the (ideal, actual) levels of one answer's atoms (Ordered reward channels)."""
    out = [0.0] * 9
    for h, (ideal, actual) in enumerate(PAIRS):
        z = max(1, sum(i == ideal for i, _ in atoms))
        out[h] = (
            sum(pair == (ideal, actual) for pair in atoms)
            / z
            * (1 if ideal == actual else -abs(actual - ideal))
        )
    if merged:
        out[1] = out[1] + out[2]
        out[2] = 0.0
    return out


def group_advantages(rewards, group, valid, eps=1e-6, sigma_min=1e-6, ddof=0) -> list[list[float]]:
    """A of each row and column (Group normalization); 0 where a group has one scored row, or where all are alike."""
    out = [[0.0] * len(row) for row in rewards]
    for g in set(group):
        members = [i for i in range(len(group)) if group[i] == g and valid[i]]
        if len(members) <= max(1, ddof):
            continue
        for h in range(len(rewards[0])):
            x = [rewards[i][h] for i in members]
            mean = math.fsum(x) / len(x)
            sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (len(x) - ddof))
            if sigma >= sigma_min:
                for i, v in zip(members, x, strict=True):
                    out[i][h] = (v - mean) / (sigma + eps)
    return out


def rms(sums: Sequence[float], valid: Sequence[bool], eps: float = 1e-6) -> float:
    """sigma_S (eq. gdpo-aggregation): over scored rows, the mean not removed."""
    known = [s for s, scored in zip(sums, valid, strict=True) if scored]
    return math.sqrt(math.fsum(s * s for s in known) / max(len(known), 1) + eps)


def prompt_ids(
    tokenizer, example: Example, prompt_template: str, gone: Sequence[str] = ()
) -> list[int]:
    """The prompt without some atoms: a block keeps its number, and one without atoms is left out."""
    texts = {atom.atom_id: atom.text.strip() for atom in example.atoms}
    memory = []
    for number, block in enumerate(example.blocks, 1):
        kept = [texts[atom] for atom in block.atom_ids if atom not in gone]
        if kept:
            memory.append((number, " ".join(kept)))
    turns = [
        ("system", PROMPT_TEMPLATES[prompt_template].system),
        ("user", PROMPT_TEMPLATES[prompt_template].user(example.question, memory)),
    ]
    return encode_prompt(
        tokenizer, [{"role": role, "content": text} for role, text in turns if text]
    )


def logps(model, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """log p of each token of one answer behind one prompt, by one plain forward; with a gradient where one is wanted."""
    with evaluating(model):
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits[len(prompt) - 1 : len(prompt) + len(answer) - 1] / temperature
    return logits.log_softmax(-1)[range(len(answer)), list(answer)]


def signal(
    h: int, d: Sequence[float], mode: str = "ordered", under_use: str = "suppressed"
) -> list[float] | None:
    """z of one channel (Bidirectional counterfactual localization); None where the channel is not localized."""
    ideal, actual = PAIRS[h]
    under = actual < ideal
    if ideal == actual == 0 or (under and under_use == "uniform"):
        return None
    if (under and under_use == "absolute") or (
        mode == "absolute" and not (under and under_use != "suppressed")
    ):
        return [abs(x) for x in d]
    if mode == "positive_only":
        return None if actual == 0 else list(d)
    return [-x for x in d] if under else list(d)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def token_weights(
    z: Sequence[float], threshold: float, *, gate: float, d_max: float
) -> list[float]:
    """q of each token (Bidirectional counterfactual localization)."""
    opened = max(z, default=-math.inf) > gate
    return [max(clip(x, -d_max, d_max) - threshold, 0.0) if opened else 0.0 for x in z]


def sentence_means(z: Sequence[float], units: Sequence[int], d_max: float) -> dict[int, float]:
    """The mean clipped signal of each sentence; `units` are the sentences' numbers, one a token."""
    parts = {
        j: [x for x, unit in zip(z, units, strict=True) if unit == j] for j in sorted(set(units))
    }
    return {
        j: math.fsum(clip(x, -d_max, d_max) for x in part) / len(part) for j, part in parts.items()
    }


def sentence_weights(
    z, units, threshold, sentence_threshold, *, gate, sentence_gate, d_max, gamma
) -> list[float]:
    """q of each token's sentence, spread evenly over its tokens (Sentence-level localization)."""
    means = sentence_means(z, units, d_max)
    opened = max(z) > gate and max(means.values()) > sentence_gate
    out = [0.0] * len(z)
    for j, mean in means.items():
        inside = [t for t, unit in enumerate(units) if unit == j]
        coverage = sum(z[t] > threshold for t in inside) / len(inside)
        for t in inside:
            out[t] = opened * max(mean - sentence_threshold, 0.0) * coverage**gamma / len(inside)
    return out


def multipliers(q: Sequence[float], cap: float) -> list[float]:
    """m of each token: T q / Q, shifted and clipped so that the mean stays 1 (Mean-preserving redistribution)."""
    total = math.fsum(q)
    if total <= 0:
        return [1.0] * len(q)
    m = [len(q) * x / total for x in q]
    low = min(m) - cap
    high = max(m)
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (
            (tau, high) if math.fsum(clip(x - tau, 0, cap) for x in m) > len(m) else (low, tau)
        )
    return [clip(x - (low + high) / 2, 0.0, cap) for x in m]


def quantile(values: Sequence[float], share: float) -> float:
    """The empirical quantile, linear between two values."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    return ranked[below] + (place - below) * (
        ranked[min(below + 1, len(ranked) - 1)] - ranked[below]
    )


def next_threshold(value: float, pool: Sequence[float], *, floor, share, decay, minimum) -> float:
    """A threshold after a batch (Channel-specific threshold initialization and updates)."""
    return (
        value
        if len(pool) < minimum
        else decay * value + (1 - decay) * max(floor, quantile(pool, share))
    )


@dataclass
class Counterfactual:
    """One answer read without the atoms of one channel: what was removed, and what each stage gives."""

    row: int
    channel: int
    atoms: tuple[str, ...]
    prompt: list[int]
    ablated: list[float]
    d: list[float]
    q: list[float]
    m: list[float]
    strength: float  # eta where the gate is open, else 0


@dataclass
class Step:
    """What a batch of answers gives, stage by stage; lists are by row, then by channel or token."""

    prompts: list[list[int]]
    rewards: list[list[float]]
    valid: list[bool]
    channels: list[list[float]]  # A
    scale: float
    full: list[list[float]]
    pairs: list[Counterfactual]
    advantages: list[list[float]]
    thresholds: list[float]  # after the batch
    sentence_thresholds: list[float]


def atoms_by_channel(judgment: Judgment, merged: bool) -> dict[int, tuple[str, ...]]:
    """The atoms of each channel that has any, as their order in the judgment."""
    found: dict[int, tuple[str, ...]] = {}
    for atom in judgment.atoms:
        h = 3 * int(atom.ideal) + int(atom.actual)
        h = 1 if merged and h == 2 else h
        found[h] = (*found.get(h, ()), atom.atom_id)
    return dict(sorted(found.items()))


def _weights(
    config: CreditConfig, z, units, threshold: float, sentence_threshold: float
) -> list[float]:
    options = dict(gate=config.gate, d_max=config.d_max)
    if config.granularity == "token":
        return token_weights(z, threshold, **options)
    options |= dict(sentence_gate=config.sentence_gate, gamma=config.gamma)
    return sentence_weights(z, units, threshold, sentence_threshold, **options)


def _pools(
    config: CreditConfig, pairs: Sequence[Counterfactual], units
) -> tuple[list[list[float]], list[list[float]]]:
    """Clipped signals of each channel's tokens, and of its sentences."""
    tokens = [[] for _ in PAIRS]
    sentences = [[] for _ in PAIRS]
    for pair in pairs:
        z = signal(pair.channel, pair.d, config.mode, config.under_use)
        tokens[pair.channel] += [clip(x, -config.d_max, config.d_max) for x in z]
        if config.granularity == "sentence":
            sentences[pair.channel] += sentence_means(z, units[pair.row], config.d_max).values()
    return tokens, sentences


def _eta(config: CreditConfig, h: int) -> float:
    return config.eta if isinstance(config.eta, float) else config.eta.get(NAMES[h], 0.0)


def step(
    read,  # (prompt, answer) -> log-probabilities of the answer's tokens
    encode,  # (example, atoms left out) -> prompt
    config: CreditConfig,
    examples: Sequence[Example],  # one a row
    judgments: Sequence[Judgment],
    answers: Sequence[Sequence[int]],
    generations: int,
    thresholds: Sequence[float],
    sentence_thresholds: Sequence[float] = (),
    units: Sequence[
        Sequence[int]
    ] = (),  # the sentence of each token, for the granularity `sentence`
) -> Step:
    """Token advantages of a batch of judged answers, `generations` of each prompt, from rewards to RMS scaling."""
    rows = range(len(answers))
    valid = [
        not j.error and bool(j.atoms) and all(atom.actual is not None for atom in j.atoms)
        for j in judgments
    ]
    levels = [
        [(int(a.ideal), int(a.actual)) for a in j.atoms] if v else []
        for j, v in zip(judgments, valid, strict=True)
    ]
    rewards = [channel_rewards(atoms, config.merge_over_use) for atoms in levels]
    columns = [[math.fsum(row)] for row in rewards] if config.method == "grpo" else rewards
    rule = dict(eps=config.eps, sigma_min=config.sigma_min, ddof=config.ddof)
    channels = group_advantages(columns, [i // generations for i in rows], valid, **rule)
    scale = (
        1.0
        if config.method == "grpo"
        else rms([math.fsum(a) for a in channels], valid, config.eps_scale)
    )
    prompts = [encode(example, ()) for example in examples]
    full = [read(p, y) for p, y in zip(prompts, answers, strict=True)]
    pairs = []
    for i in rows if config.method == "memcalib-rl" else ():
        for h, atoms in (
            atoms_by_channel(judgments[i], config.merge_over_use).items() if valid[i] else ()
        ):
            aligned = rewards[i][h] * channels[i][h] > 0
            if signal(h, [], config.mode, config.under_use) is None or (
                config.threshold_pool == "open" and not aligned
            ):
                continue
            prompt = encode(examples[i], atoms)
            ablated = read(prompt, answers[i])
            d = [a - b for a, b in zip(full[i], ablated, strict=True)]
            z = signal(h, d, config.mode, config.under_use)
            here = (
                (units[i], thresholds[h], sentence_thresholds[h])
                if units
                else ((), thresholds[h], 0.0)
            )
            q = _weights(config, z, *here)
            strength = _eta(config, h) if aligned and math.fsum(q) > 0 else 0.0
            pairs.append(
                Counterfactual(
                    i, h, atoms, prompt, ablated, d, q, multipliers(q, config.cap), strength
                )
            )
    advantages = [[math.fsum(channels[i]) if valid[i] else 0.0] * len(answers[i]) for i in rows]
    for pair in pairs:
        a = channels[pair.row][pair.channel]
        for t, m in enumerate(pair.m):
            advantages[pair.row][t] += a * ((1 - pair.strength) + pair.strength * m) - a
    advantages = [[a / scale for a in row] for row in advantages]
    tokens, sentences = _pools(config, pairs, units)
    rule = dict(floor=config.gate, share=config.threshold_quantile, decay=config.threshold_decay)
    after = [
        next_threshold(v, p, **rule, minimum=config.threshold_minimum)
        for v, p in zip(thresholds, tokens, strict=True)
    ]
    rule |= dict(
        floor=config.sentence_gate, share=config.sentence_quantile, minimum=config.sentence_minimum
    )
    sentence_after = [
        next_threshold(v, p, **rule) for v, p in zip(sentence_thresholds, sentences, strict=False)
    ]
    return Step(
        prompts, rewards, valid, channels, scale, full, pairs, advantages, after, sentence_after
    )


def loss(
    rows: Sequence[tuple[Tensor, Tensor, Tensor, Sequence[float]]], clip_by: float, beta: float
) -> Tensor:
    """The clipped objective, as a loss, of rows (log p now, old, under the reference, advantages of the tokens).

    A mean over all tokens of the mini-batch (eq. grpo-objective), with the k3 estimate of the divergence.
    """
    total = 0.0
    count = 0
    for now, old, reference, advantages in rows:
        for t, a in enumerate(advantages):
            ratio = (now[t] - old[t]).exp()
            gain = torch.minimum(ratio * a, ratio.clamp(1 - clip_by, 1 + clip_by) * a)
            gap = reference[t] - now[t]
            total = total + gain - beta * (gap.exp() - gap - 1)
            count = count + 1
    return -total / count


def reasons(detail) -> list[str | None]:
    """Of each pair of an answer and a channel, the first reason why its credit stays uniform; None where it was moved."""
    found = []
    for k in range(len(detail.row)):
        if not detail.scored[k]:
            found.append("scoring")
        elif not detail.found[k]:
            found.append("weak")
        elif not detail.q[k].sum() > 0:
            found.append("empty")
        else:
            found.append(None if detail.strength[k] > 0 else "closed")
    return found
