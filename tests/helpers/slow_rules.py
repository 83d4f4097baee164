"""Every shipped rule of credit in slow, obvious loops over numbers, from judgments to token
advantages; and answers to try them on.

Of the package only its types, its settings, the cut into sentences and the truth of the micro-world
are used; what the rules share with the paper's step (rewards, advantages, weights, multipliers,
thresholds) is in `reference`. Channels are numbered 3 * ideal + actual.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import reference
from micro_policy import EXAMPLES, TOKENIZER

from memcalib.credit.sentences import response_units
from memcalib.inference.token_rows import token_spans
from memcalib.products.micro.world import answer, exact_judge, noisy_levels, sentence_roles
from memcalib.problem import Example, Judgment, Level, judgment_for
from memcalib.rules.base import CreditConfig

UNDER_USE = (3, 6, 7)  # BA-, CA-, CB-


def judged_answers(
    seed: int, cut: bool = False
) -> tuple[list[Example], list[Judgment], list[list[int]]]:
    """Four answers to each of two examples, judged, with quotes that are right, wrong,
    shared or everywhere; one has no score.

    Levels are drawn, so that every kind of pair occurs: errors that are blamed, successes that are
    praised, and those whose reward and advantage point different ways.
    """
    rng = random.Random(seed)
    examples = []
    judged = []
    answers = []
    for example in EXAMPLES[:2]:
        for _ in range(4):
            text = answer(example, rng, noisy_levels(example, rng, 0.4))
            text = f"{text.split('.')[0]}. {text}" if rng.random() < 0.5 else text
            ids = [*TOKENIZER(text, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id]
            ids = ids[: rng.randint(1, len(ids))] if cut else ids
            text = TOKENIZER.decode(ids, skip_special_tokens=True)
            judgment = exact_judge(example, text)
            for atom in judgment.atoms:
                atom.actual = Level(rng.randrange(3)) if rng.random() < 0.3 else atom.actual
                kind = rng.random()
                if kind < 0.1:
                    atom.quote = "not in there"
                    atom.spans = []
                elif kind < 0.2 and len(text) > 5:
                    start = rng.randrange(len(text) - 1)
                    atom.spans = [(start, rng.randint(start + 1, len(text)))]
                elif kind < 0.25:
                    atom.spans = [(0, len(text))] if text else []
            examples.append(example)
            judged.append(judgment)
            answers.append(ids)
    judged[5] = judgment_for(examples[5], {}, error="timeout")
    return examples, judged, answers


def log_probabilities(prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Stands in for a model: numbers that depend on prompt and answer,
    and differ between two prompts in some tokens only.
    """
    usual = random.Random(f"{list(ids)}")
    changed = random.Random(f"{list(prompt)} {list(ids)}")
    changes = [0.0, 0.0, 0.0, 0.01, 0.3, -0.3, 5.0, -5.0]
    return [
        -10 * usual.random() + changed.choice(changes) * changed.random() for _ in range(len(ids))
    ]


def divergences(prompt: Sequence[int], without: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Stands in for a model: how far its distributions behind two prompts lie apart."""
    rng = random.Random(f"{list(prompt)} {list(without)} {list(ids)}")
    return [rng.choice([0.0, 0.01, 0.3, 5.0]) * rng.random() for _ in range(len(ids))]


@dataclass
class Part:
    """A share of a pair's advantage, the weights of the answer's tokens that it follows,
    and the signal that thresholds learn from.
    """

    share: float
    q: list[float]
    learns: list[float] = field(default_factory=list)


@dataclass
class Placement:
    """A pair of an answer and a column, and where its advantage goes."""

    row: int
    column: int
    opened: bool
    strength: float
    parts: list[Part]


@dataclass
class View:
    """A judged batch in lists: what a slow rule may look at."""

    config: CreditConfig
    examples: list[Example]
    judged: list[Judgment]
    answers: list[list[int]]
    valid: list[bool]
    rewards: list[list[float]]  # of the columns
    advantages: list[list[float]]
    units: list[list[int]]
    thresholds: list[float]
    sentence_thresholds: list[float]

    def prompt(self, row: int, gone: Sequence[str] = ()) -> list[int]:
        """The prompt of an answer, without some atoms."""
        return reference.prompt_ids(TOKENIZER, self.examples[row], "micro", gone)

    def pairs(self) -> Iterator[tuple[int, int, tuple[str, ...], bool]]:
        """Row, channel, atoms, and whether the pair is open, of all channels but A+: reward and
        advantage point the same way, or, without this condition, there is an advantage.
        """
        for row, judgment in enumerate(self.judged):
            if not self.valid[row] or not self.answers[row]:
                continue
            sets = reference.atoms_by_channel(judgment, self.config.merge_over_use)
            for h, atoms in sets.items():
                if h != 0:
                    advantage = self.advantages[row][h]
                    opened = self.rewards[row][h] * advantage > 0
                    if not self.config.direction_check:
                        opened = advantage != 0
                    yield row, h, atoms, opened

    def q(self, row: int, h: int, z: list[float], threshold: bool = True) -> list[float]:
        """Weights of a signal, by tokens or by sentences."""
        cut = self.thresholds[h] if threshold else 0.0
        sentence_cut = 0.0
        if threshold and self.sentence_thresholds:
            sentence_cut = self.sentence_thresholds[h]
        return reference._weights(self.config, z, self.units[row][: len(z)], cut, sentence_cut)


def _counterfactual(view: View, mode: str, by_divergence: bool) -> Iterator[Placement]:
    """Each channel by what its atoms changed."""
    config = view.config
    for row, h, atoms, opened in view.pairs():
        if reference.signal(h, [], mode, config.under_use) is None:
            continue
        if config.threshold_pool == "open" and not opened:
            continue
        ids = view.answers[row]
        if by_divergence:
            d = divergences(view.prompt(row), view.prompt(row, atoms), ids)
        else:
            whole = log_probabilities(view.prompt(row), ids)
            less = log_probabilities(view.prompt(row, atoms), ids)
            d = [a - b for a, b in zip(whole, less, strict=True)]
        z = reference.signal(h, d, mode, config.under_use)
        gain = Part(1.0, view.q(row, h, z), z)
        yield Placement(row, h, opened, reference._eta(config, h), [gain])


def _evidence(view: View, with_divergence: bool) -> Iterator[Placement]:
    """Each channel by the sentences that the judge quotes,
    and what left no trace uniform or by divergence.
    """
    config = view.config
    for row, h, atoms, opened in view.pairs():
        if h in UNDER_USE and config.under_use == "uniform":
            continue
        ids = view.answers[row]
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        by_id = {atom.atom_id: atom for atom in view.judged[row].atoms}
        shown = []
        omitted = []
        for atom in (by_id[name] for name in atoms):
            if atom.spans and all(0 <= start < end <= len(text) for start, end in atom.spans):
                shown.append(atom)
            elif not atom.spans and not atom.quote:
                omitted.append(atom.atom_id)
        reached = set()
        for t, (start, end) in enumerate(token_spans(TOKENIZER, ids)):
            for atom in shown:
                for first, last in atom.spans:
                    if start < end and start < last and first < end:
                        reached.add(view.units[row][t])
        z = [float(view.units[row][t] in reached) for t in range(len(ids))]
        share = 0.0 if all(z) else len(shown) / len(atoms)
        parts = [Part(share, view.q(row, h, z, threshold=False))]
        if with_divergence and h in UNDER_USE and omitted and opened:
            z = divergences(view.prompt(row), view.prompt(row, omitted), ids)
            parts.append(Part(len(omitted) / len(atoms), view.q(row, h, z), z))
        yield Placement(row, h, opened, reference._eta(config, h), parts)


def _contrast(view: View) -> Iterator[Placement]:
    """The one advantage of an answer by what the whole memory changed."""
    for row, ids in enumerate(view.answers):
        if not view.valid[row] or not ids:
            continue
        whole = log_probabilities(view.prompt(row), ids)
        bare = log_probabilities(view.prompt(row, tuple(view.examples[row].levels)), ids)
        q = [2 / (1 + math.exp(b - a)) for a, b in zip(whole, bare, strict=True)]
        yield Placement(row, 0, True, 1.0, [Part(1.0, q)])


PLACEMENTS = {
    "grpo": lambda view: iter(()),
    "gdpo": lambda view: iter(()),
    "ordered": lambda view: _counterfactual(view, "ordered", False),
    "absolute": lambda view: _counterfactual(view, "absolute", False),
    "positive_only": lambda view: _counterfactual(view, "positive_only", False),
    "divergence": lambda view: _counterfactual(view, "absolute", True),
    "evidence": lambda view: _evidence(view, False),
    "evidence-kl": lambda view: _evidence(view, True),
    "contrast": _contrast,
    "exact": lambda view: iter(()),
}


@dataclass
class SlowCredit:
    """Token advantages of each answer, the thresholds after the batch,
    and the pairs that were placed.
    """

    advantages: list[list[float]]
    thresholds: list[float]
    placements: list[Placement]


def slow_credit(rule: str, config: CreditConfig, examples, judged, answers) -> SlowCredit:
    """Credit by a rule, of answers four to a prompt, with the thresholds at their first values."""
    rows = range(len(answers))
    valid = [judgment.scored for judgment in judged]
    levels = [[] for _ in rows]
    for row in rows:
        if valid[row]:
            levels[row] = [(int(atom.ideal), int(atom.actual)) for atom in judged[row].atoms]
    rewards = [reference.channel_rewards(atoms, config.merge_over_use) for atoms in levels]
    whole = rule in ("grpo", "contrast")
    if whole:
        rewards = [[math.fsum(row)] for row in rewards]
    advantages = reference.group_advantages(rewards, [row // 4 for row in rows], valid)
    sums = [math.fsum(row) for row in advantages]
    scale = 1.0 if whole else reference.rms(sums, valid)
    by_sentence = config.granularity == "sentence"
    view = View(
        config,
        examples,
        judged,
        answers,
        valid,
        rewards,
        advantages,
        [row.tolist() for row in response_units(TOKENIZER, answers)],
        [config.threshold_start] * 9,
        [config.sentence_start] * 9 if by_sentence else [],
    )
    placements = list(PLACEMENTS[rule](view))
    tokens = [[sums[row] if valid[row] else 0.0] * len(answers[row]) for row in rows]
    pools = [[] for _ in range(9)]
    for placement in placements:
        advantage = advantages[placement.row][placement.column]
        for portion in placement.parts:
            pools[placement.column] += [
                reference.clip(x, -config.d_max, config.d_max) for x in portion.learns
            ]
            if not placement.opened or not math.fsum(portion.q) > 0:
                continue
            for t, m in enumerate(reference.multipliers(portion.q, config.cap)):
                tokens[placement.row][t] += advantage * placement.strength * portion.share * (m - 1)
    tokens = [[value / scale for value in row] for row in tokens]
    if rule == "exact":
        tokens = _with_exact(view, tokens)
    options = dict(
        floor=config.gate,
        share=config.threshold_quantile,
        decay=config.threshold_decay,
        minimum=config.threshold_minimum,
    )
    after = [
        reference.next_threshold(value, pool, **options)
        for value, pool in zip(view.thresholds, pools, strict=True)
    ]
    return SlowCredit(tokens, after, placements)


def _with_exact(view: View, uniform: list[list[float]]) -> list[list[float]]:
    """Three quarters by what each atom gained over its group, on the sentences that name it;
    scaled so that means have mean square 1.
    """
    exact = [[0.0] * len(ids) for ids in view.answers]
    for start in range(0, len(view.answers), 4):
        rows = [row for row in range(start, start + 4) if view.valid[row]]
        for k in range(len(view.judged[rows[0]].atoms)):
            gains = {}
            for row in rows:
                atom = view.judged[row].atoms[k]
                alike = [other for other in view.judged[row].atoms if other.ideal == atom.ideal]
                right = atom.ideal == atom.actual
                gains[row] = (1 if right else -abs(atom.ideal - atom.actual)) / len(alike)
            mean = sum(gains.values()) / len(gains)
            for row in rows:
                ids = view.answers[row]
                text = TOKENIZER.decode(ids, skip_special_tokens=True)
                name = view.judged[row].atoms[k].atom_id
                for sentence in sentence_roles(view.examples[row], text):
                    if sentence.roles.get(name) != "key":
                        continue
                    for t, (_, end) in enumerate(token_spans(TOKENIZER, ids)):
                        if sentence.start < end <= sentence.end:
                            exact[row][t] += gains[row] - mean
    means = [math.fsum(row) / len(row) for row in exact]
    scale = reference.rms(means, view.valid)
    eta = view.config.eta
    return [
        [(1 - eta) * a + eta * b / scale for a, b in zip(*pair, strict=True)]
        for pair in zip(uniform, exact, strict=True)
    ]
