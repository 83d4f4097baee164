"""A training step in slow, obvious loops over numbers, written from the paper.

Of the package only its types, its settings and the text of a prompt are used, and for sentences
their numbers. Channels are numbered 3 * ideal + actual, with Ignore 0, Bound 1, Control 2; a row is
one answer. Names of sections are the paper's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from memcalib.inference.sampling import evaluating
from memcalib.problem import PROMPT_TEMPLATES, Example, Judgment, encode_prompt
from memcalib.rules.base import CreditConfig

PAIRS = list(product(range(3), range(3)))  # (ideal, actual) of each channel
NAMES = ["A+", "AB-", "AC-", "BA-", "B+", "BC-", "CA-", "CB-", "C+"]


def channel_rewards(atoms: Sequence[tuple[int, int]], merged: bool = False) -> list[float]:
    """R of the nine channels, of the (ideal, actual) levels of one answer's atoms (Ordered reward
    channels).
    """
    rewards = []
    for ideal, actual in PAIRS:
        count = atoms.count((ideal, actual))
        z = max(1, sum(level == ideal for level, _ in atoms))
        value = 1 if ideal == actual else -abs(actual - ideal)
        rewards.append(count / z * value)
    if merged:
        rewards[1] += rewards[2]
        rewards[2] = 0.0
    return rewards


def group_advantages(rewards, group, valid, eps=1e-6, sigma_min=1e-6, ddof=0) -> list[list[float]]:
    """A of each row and column (Group normalization); 0 where a group has one scored row,
    or where all are alike.
    """
    advantages = [[0.0] * len(row) for row in rewards]
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
                    advantages[i][h] = (v - mean) / (sigma + eps)
    return advantages


def rms(sums: Sequence[float], valid: Sequence[bool], eps: float = 1e-6) -> float:
    """sigma_S (eq. gdpo-aggregation): over scored rows, the mean not removed."""
    scored_sums = [s for s, scored in zip(sums, valid, strict=True) if scored]
    return math.sqrt(math.fsum(s * s for s in scored_sums) / max(len(scored_sums), 1) + eps)


def prompt_ids(
    tokenizer, example: Example, prompt_template: str, gone: Sequence[str] = ()
) -> list[int]:
    """The prompt without some atoms: a block keeps its number,
    and one without atoms is left out.
    """
    text_of = {atom.atom_id: atom.text.strip() for atom in example.atoms}
    memory = []
    for number, block in enumerate(example.blocks, 1):
        texts = [text_of[atom_id] for atom_id in block.atom_ids if atom_id not in gone]
        if texts:
            memory.append((number, " ".join(texts)))
    template = PROMPT_TEMPLATES[prompt_template]
    messages = []
    if template.system:
        messages.append({"role": "system", "content": template.system})
    messages.append({"role": "user", "content": template.user(example.question, memory)})
    return encode_prompt(tokenizer, messages)


def logps(model, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """log p of each token of one answer behind one prompt, by one plain forward;
    with a gradient where one is wanted.
    """
    with evaluating(model):
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = logits[len(prompt) - 1 : len(prompt) + len(answer) - 1] / temperature
    return logits.log_softmax(-1)[range(len(answer)), list(answer)]


def signal(
    h: int, d: Sequence[float], mode: str = "ordered", under_use: str = "suppressed"
) -> list[float] | None:
    """z of one channel (Bidirectional counterfactual localization);
    None where the channel is not localized.
    """
    ideal, actual = PAIRS[h]
    is_under_use = actual < ideal
    if ideal == actual == 0 or (is_under_use and under_use == "uniform"):
        return None
    if is_under_use and under_use != "suppressed":
        is_absolute = under_use == "absolute"
    else:
        is_absolute = mode == "absolute"
    if is_absolute:
        return [abs(x) for x in d]
    if mode == "positive_only":
        return None if actual == 0 else list(d)
    return [-x for x in d] if is_under_use else list(d)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def token_weights(
    z: Sequence[float], threshold: float, *, gate: float, d_max: float
) -> list[float]:
    """q of each token (Bidirectional counterfactual localization)."""
    if max(z, default=-math.inf) <= gate:
        return [0.0] * len(z)
    return [max(clip(x, -d_max, d_max) - threshold, 0.0) for x in z]


def sentence_means(z: Sequence[float], units: Sequence[int], d_max: float) -> dict[int, float]:
    """The mean clipped signal of each sentence; `units` are the sentences' numbers, one a token."""
    means = {}
    for j in sorted(set(units)):
        signals = [clip(x, -d_max, d_max) for x, unit in zip(z, units, strict=True) if unit == j]
        means[j] = math.fsum(signals) / len(signals)
    return means


def sentence_weights(
    z, units, threshold, sentence_threshold, *, gate, sentence_gate, d_max, gamma
) -> list[float]:
    """q of each token's sentence, spread evenly over its tokens (Sentence-level localization)."""
    means = sentence_means(z, units, d_max)
    weights = [0.0] * len(z)
    if max(z) <= gate or max(means.values()) <= sentence_gate:
        return weights
    for j, mean in means.items():
        tokens = [t for t, unit in enumerate(units) if unit == j]
        coverage = sum(z[t] > threshold for t in tokens) / len(tokens)
        for t in tokens:
            weights[t] = max(mean - sentence_threshold, 0.0) * coverage**gamma / len(tokens)
    return weights


def multipliers(q: Sequence[float], cap: float) -> list[float]:
    """m of each token: T q / Q, shifted and clipped so that the mean stays 1 (Mean-preserving
    redistribution).
    """
    total = math.fsum(q)
    if total <= 0:
        return [1.0] * len(q)
    m = [len(q) * x / total for x in q]
    low = min(m) - cap
    high = max(m)
    for _ in range(200):
        tau = (low + high) / 2
        if math.fsum(clip(x - tau, 0, cap) for x in m) > len(m):
            low = tau
        else:
            high = tau
    return [clip(x - (low + high) / 2, 0.0, cap) for x in m]


def quantile(values: Sequence[float], share: float) -> float:
    """The empirical quantile, linear between two values."""
    ranked = sorted(values)
    rank = share * (len(ranked) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (rank - below) * (ranked[above] - ranked[below])


def next_threshold(value: float, pool: Sequence[float], *, floor, share, decay, minimum) -> float:
    """A threshold after a batch (Channel-specific threshold initialization and updates)."""
    if len(pool) < minimum:
        return value
    return decay * value + (1 - decay) * max(floor, quantile(pool, share))


@dataclass
class Counterfactual:
    """One answer read without the atoms of one channel:
    what was removed, and what each stage gives.
    """

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
    atom_ids: dict[int, tuple[str, ...]] = {}
    for atom in judgment.atoms:
        h = 3 * int(atom.ideal) + int(atom.actual)
        if merged and h == 2:
            h = 1
        atom_ids[h] = (*atom_ids.get(h, ()), atom.atom_id)
    return dict(sorted(atom_ids.items()))


def _weights(
    config: CreditConfig, z, units, threshold: float, sentence_threshold: float
) -> list[float]:
    if config.granularity == "token":
        return token_weights(z, threshold, gate=config.gate, d_max=config.d_max)
    return sentence_weights(
        z,
        units,
        threshold,
        sentence_threshold,
        gate=config.gate,
        sentence_gate=config.sentence_gate,
        d_max=config.d_max,
        gamma=config.gamma,
    )


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
    # the sentence of each token, for the granularity `sentence`
    units: Sequence[Sequence[int]] = (),
) -> Step:
    """Token advantages of a batch of judged answers, `generations` of each prompt,
    from rewards to RMS scaling.
    """
    rows = range(len(answers))
    valid = [_is_scored(judgment) for judgment in judgments]
    rewards = []
    for judgment, is_scored in zip(judgments, valid, strict=True):
        atoms = [(int(a.ideal), int(a.actual)) for a in judgment.atoms] if is_scored else []
        rewards.append(channel_rewards(atoms, config.merge_over_use))
    group = [i // generations for i in rows]
    statistics = {"eps": config.eps, "sigma_min": config.sigma_min, "ddof": config.ddof}
    if config.method == "grpo":
        sums = [[math.fsum(row)] for row in rewards]
        channels = group_advantages(sums, group, valid, **statistics)
        scale = 1.0
    else:
        channels = group_advantages(rewards, group, valid, **statistics)
        scale = rms([math.fsum(a) for a in channels], valid, config.eps_scale)
    prompts = [encode(example, ()) for example in examples]
    full = [read(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    pairs = []
    for i in rows:
        if config.method != "memcalib-rl" or not valid[i]:
            continue
        for h, atoms in atoms_by_channel(judgments[i], config.merge_over_use).items():
            is_aligned = rewards[i][h] * channels[i][h] > 0
            is_localized = signal(h, [], config.mode, config.under_use) is not None
            if not is_localized or (config.threshold_pool == "open" and not is_aligned):
                continue
            prompt = encode(examples[i], atoms)
            ablated = read(prompt, answers[i])
            d = [a - b for a, b in zip(full[i], ablated, strict=True)]
            z = signal(h, d, config.mode, config.under_use)
            if units:
                q = _weights(config, z, units[i], thresholds[h], sentence_thresholds[h])
            else:
                q = _weights(config, z, (), thresholds[h], 0.0)
            strength = _eta(config, h) if is_aligned and math.fsum(q) > 0 else 0.0
            m = multipliers(q, config.cap)
            pairs.append(Counterfactual(i, h, atoms, prompt, ablated, d, q, m, strength))
    advantages = []
    for i in rows:
        advantage = math.fsum(channels[i]) if valid[i] else 0.0
        advantages.append([advantage] * len(answers[i]))
    for pair in pairs:
        a = channels[pair.row][pair.channel]
        for t, m in enumerate(pair.m):
            advantages[pair.row][t] += a * ((1 - pair.strength) + pair.strength * m) - a
    advantages = [[a / scale for a in row] for row in advantages]
    tokens, sentences = _pools(config, pairs, units)
    return Step(
        prompts,
        rewards,
        valid,
        channels,
        scale,
        full,
        pairs,
        advantages,
        _next_thresholds(config, thresholds, tokens),
        _next_sentence_thresholds(config, sentence_thresholds, sentences),
    )


def _is_scored(judgment: Judgment) -> bool:
    if judgment.error or not judgment.atoms:
        return False
    return all(atom.actual is not None for atom in judgment.atoms)


def _next_thresholds(
    config: CreditConfig, thresholds: Sequence[float], pools: Sequence[Sequence[float]]
) -> list[float]:
    after = []
    for value, pool in zip(thresholds, pools, strict=True):
        after.append(
            next_threshold(
                value,
                pool,
                floor=config.threshold_floor,
                share=config.threshold_quantile,
                decay=config.threshold_decay,
                minimum=config.threshold_minimum,
            )
        )
    return after


def _next_sentence_thresholds(
    config: CreditConfig, thresholds: Sequence[float], pools: Sequence[Sequence[float]]
) -> list[float]:
    after = []
    for value, pool in zip(thresholds, pools, strict=False):
        after.append(
            next_threshold(
                value,
                pool,
                floor=config.sentence_floor,
                share=config.sentence_quantile,
                decay=config.threshold_decay,
                minimum=config.sentence_minimum,
            )
        )
    return after


def loss(
    rows: Sequence[tuple[Tensor, Tensor, Tensor, Sequence[float]]], clip_by: float, beta: float
) -> Tensor:
    """The clipped objective, as a loss, of rows (log p now, old, under the reference,
    advantages of the tokens).

    A mean over all tokens of the mini-batch (eq. grpo-objective),
    with the k3 estimate of the divergence.
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
    """Of each pair of an answer and a channel, the first reason why its credit stays uniform;
    None where it was moved.
    """
    reasons_of_pairs = []
    for k in range(len(detail.row)):
        if not detail.scored[k]:
            reasons_of_pairs.append("scoring")
        elif not detail.above_gate[k]:
            reasons_of_pairs.append("weak")
        elif not detail.q[k].sum() > 0:
            reasons_of_pairs.append("empty")
        else:
            reasons_of_pairs.append(None if detail.strength[k] > 0 else "closed")
    return reasons_of_pairs
