"""Where an omitted atom's credit goes without a second pass, and what a shared pass saves.

    python benchmarks/bench_omission_signal.py [--batches 12]
    python benchmarks/bench_omission_signal.py --train SIGNAL SEED STEPS

evidence-kl places the credit of atoms that left no trace by the divergence of the policy with and
without them, which reads the answer twice. SIGNAL is one of: `none` (GDPO); `kl` (as shipped);
`shared` (the pass with the whole memory is the one of the update, so the answer is read once more
and not twice); `entropy` (the entropy of the policy at each token, which the pass of the update
gives, in the place of the divergence). The first form takes batches of the micro-world's cold start
(world `long`, 2 prompts x 8 answers) and prints, interleaved in one run: processor seconds of the
credit in parts of a step of GDPO; how noisy the gradient is (its variance over batches by the
squared length of its mean, itself corrected for noise; unstable under some hundred batches) and
that times the seconds of a step; how
far the two signals agree within an answer; and how far shared and shipped divergences differ. The
second form trains one policy and prints its SCS on 400 test examples and its processor seconds;
exploratory.
"""

import argparse
import copy
import json
import time

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from memcalib.credit.divergences import token_divergences
from memcalib.credit.logprobs import response_logps
from memcalib.credit.prefix_groups import token_scores
from memcalib.inference.token_rows import response_mask
from memcalib.credit.tree_attention import best_pack, spread, tree_states
from memcalib.credit.token_credit import TokenCredit
from memcalib.localization import Thresholds
from memcalib.products.micro.loop import CreditLoop
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.reproduction.rule_runs import policy_scores
from memcalib.rules.base import rule_settings
from memcalib.trainer.train_config import world_config

WORLD = WORLDS["long"]
SIGNALS = ("none", "kl", "shared", "entropy")


class UpdatePass:
    """The forward pass of an update: log-probabilities, entropies and states of the answers."""

    def __init__(self, model, prompts: list[list[int]], ids: list[list[int]], temperature: float):
        packed = best_pack(model, prompts, ids)
        self.states, self.head = tree_states(model, packed)
        targets = packed.targets.flatten()[packed.answers]
        logps, entropies = token_scores(
            self.head, self.states, targets, temperature, 2**24, entropy=True
        )
        self.mask = response_mask(ids)
        self.logps = spread(logps, self.mask)
        self.entropies = spread(entropies.detach(), self.mask)
        self.states_of_answer = self.states.detach().split([len(answer) for answer in ids])


class SignalLoop(CreditLoop):
    """`CreditLoop` with one update a step and a choice of the omission signal."""

    signal = "kl"

    def credit_by(self, signal: str) -> TokenCredit:
        """The credit of a signal, which learns thresholds of its own."""
        if not hasattr(self, "credits"):
            self.credits = {}
        if signal not in self.credits:
            own = copy.copy(self.token_credit)
            own.thresholds = Thresholds(self.config.credit)
            self.credits[signal] = own
        return self.credits[signal]

    def judged_batch(self):
        """The next prompts and answers, judged."""
        examples, prompts, ids = self.sample()
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        self.judged.read(examples, texts, ids)
        return prompts, ids

    def divergences_after(self, request, update_pass: UpdatePass) -> Tensor:
        """As `token_divergences`, with the states of the update for the whole memory."""
        scores = torch.zeros(len(request), update_pass.mask.shape[1])
        if not len(request):
            return scores
        row_of_reading = dict(zip(request.read_again, request.pairs.rows, strict=True))
        with torch.no_grad():
            packed = best_pack(self.model, request.without, request.responses)
            states, head = tree_states(self.model, packed)
            lengths = [len(response) for response in request.responses]
            for reading, less in enumerate(states.split(lengths)):
                whole = update_pass.states_of_answer[row_of_reading[reading]]
                p = (head(whole) / self.config.temperature).log_softmax(-1)
                q = (head(less) / self.config.temperature).log_softmax(-1)
                scores[reading, : len(less)] = (p.exp() * (p - q)).sum(-1).clamp(min=0)
        return scores

    def advantages(self, ids: list[list[int]], update_pass: UpdatePass, signal: str) -> Tensor:
        """Token advantages by a signal; `scores` keeps the signal of each reading."""
        judged = self.judged
        groups = [row // self.config.generations for row in range(len(ids))]
        token_credit = self.credit_by(signal)
        request = token_credit.requests(
            judged.examples, judged.judgments, ids, groups, full=False, texts=judged.texts
        )
        self.scores = ()
        if signal == "kl":
            self.scores = token_divergences(
                self.model,
                request.prompts,
                request.without,
                request.responses,
                temperature=self.config.temperature,
            )
        elif signal == "shared":
            self.scores = self.divergences_after(request, update_pass)
        elif signal == "entropy":
            row_of_reading = dict(zip(request.read_again, request.pairs.rows, strict=True))
            rows = [row_of_reading[reading] for reading in range(len(request))]
            self.scores = update_pass.entropies[rows]
        return token_credit.assign(request, self.scores)

    def whole_loss(self, prompts, ids, update_pass: UpdatePass, advantages: Tensor) -> Tensor:
        """The objective of on-policy answers: the ratio is 1."""
        mask = update_pass.mask & self.judged.valid[:, None]
        reference = response_logps(
            self.reference, prompts, ids, temperature=self.config.temperature
        )
        old = update_pass.logps.detach()
        loss, _ = self.loss(update_pass.logps, old, reference, advantages, mask)
        return loss

    def step(self):
        """One batch and its update."""
        prompts, ids = self.judged_batch()
        update_pass = UpdatePass(self.model, prompts, ids, self.config.temperature)
        advantages = self.advantages(ids, update_pass, self.signal)
        self.whole_loss(prompts, ids, update_pass, advantages).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1


def new_loop(signal: str, seed: int, steps: int, lr: float = 6e-4) -> SignalLoop:
    """A loop that begins with the cold start."""
    model, tokenizer = load_policy(WORLD.policy)
    rule = "gdpo" if signal == "none" else "evidence-kl"
    settings = dict(prompts=2, generations=8, minibatches=1, lr=lr, seed=seed, draws="row")
    config = world_config(WORLD, **settings, **rule_settings(rule))
    examples = make_examples(WORLD, 2 * steps, seed, "rl")
    loop = SignalLoop(model, tokenizer, config, examples, exact_judge)
    loop.signal = signal
    return loop


def flat_gradient(loop: SignalLoop) -> Tensor:
    """The gradient that a backward pass left, which is then forgotten."""
    parts = [p.grad.flatten() for p in loop.model.parameters() if p.grad is not None]
    gradient = torch.cat(parts).double()
    loop.optimizer.zero_grad()
    return gradient


def noise_ratio(gradients: list[Tensor]) -> float:
    """Variance over batches by the squared length of the mean, corrected for its own noise."""
    stacked = torch.stack(gradients)
    variance = float((stacked - stacked.mean(0)).square().sum() / (len(stacked) - 1))
    length = float(stacked.mean(0).square().sum()) - variance / len(stacked)
    return variance / length if length > 0 else float("nan")


class Measured:
    """What is gathered over batches, by signal."""

    def __init__(self):
        self.seconds = dict.fromkeys(SIGNALS, 0.0)
        self.gradients: dict[str, list[Tensor]] = {signal: [] for signal in SIGNALS}
        self.step_seconds = 0.0  # of all but the credit
        self.agreement: list[float] = []  # of divergence and entropy within an answer
        self.largest_gap = 0.0  # between shipped and shared divergences


def measure_batch(loop: SignalLoop, measured: Measured) -> None:
    """One batch by every signal."""
    start = time.process_time()
    prompts, ids = loop.judged_batch()
    update_pass = UpdatePass(loop.model, prompts, ids, loop.config.temperature)
    measured.step_seconds += time.process_time() - start
    scores = {}
    for signal in SIGNALS:
        start = time.process_time()
        if signal == "none":
            advantages = loop.plain.advantages_of(loop)
        else:
            advantages = loop.advantages(ids, update_pass, signal)
            scores[signal] = loop.scores
        measured.seconds[signal] += time.process_time() - start
        start = time.process_time()
        loss = loop.whole_loss(prompts, ids, update_pass, advantages)
        loss.backward(retain_graph=True)
        if signal == "none":
            measured.step_seconds += time.process_time() - start
        measured.gradients[signal].append(flat_gradient(loop))
    if not len(scores["kl"]):
        return
    width = scores["kl"].shape[1]
    gap = float((scores["kl"] - scores["shared"][:, :width]).abs().max())
    measured.largest_gap = max(measured.largest_gap, gap)
    lengths = (scores["entropy"] > 0).sum(1)
    readings = zip(scores["kl"], scores["entropy"], lengths, strict=True)
    for divergences, entropies, length in readings:
        pair = spearmanr(divergences[:length].numpy(), entropies[:length].numpy())
        measured.agreement.append(float(pair.statistic))


class PlainCredit:
    """GDPO's credit for the batch that another loop has judged."""

    def __init__(self):
        self.loop = new_loop("none", 0, 1)

    def advantages_of(self, loop: SignalLoop) -> Tensor:
        """Token advantages without any place."""
        self.loop.judged = loop.judged
        return self.loop.advantages(loop.judged.ids, None, "none")


def measure(batches: int) -> None:
    """Print the table of signals."""
    loop = new_loop("kl", seed=5, steps=batches + 1)
    loop.plain = PlainCredit()
    measure_batch(loop, Measured())  # warm
    measured = Measured()
    for _ in range(batches):
        measure_batch(loop, measured)
    print(f"{batches} batches, world {WORLD.name}, cold start; a step of GDPO without its credit: ")
    print(f"{measured.step_seconds / batches:.3f} processor seconds")
    whole = measured.step_seconds + measured.seconds["none"]
    base = noise_ratio(measured.gradients["none"])
    print("signal    credit, steps of GDPO  a step  noise / GDPO's  noise x seconds")
    for signal in SIGNALS:
        credit = measured.seconds[signal] / whole
        step = (measured.step_seconds + measured.seconds[signal]) / whole
        noise = noise_ratio(measured.gradients[signal]) / base
        print(f"{signal:9} {credit:21.3f} {step:7.3f} {noise:15.2f} {noise * step:16.2f}")
    mean_by_signal = {name: torch.stack(all_).mean(0) for name, all_ in measured.gradients.items()}
    cosine = torch.nn.functional.cosine_similarity
    for signal in ("none", "entropy"):
        value = float(cosine(mean_by_signal["kl"], mean_by_signal[signal], dim=0))
        print(f"cosine of the mean gradients, kl and {signal}: {value:.3f}")
    spread_out = np.nanpercentile(measured.agreement, [25, 50, 75]).round(2)
    print(f"Spearman of divergence and entropy, {len(measured.agreement)} readings: {spread_out}")
    print(f"largest gap between shipped and shared divergences: {measured.largest_gap:.1e} nats")


def train(signal: str, seed: int, steps: int) -> None:
    """Train one policy and print a line of JSON."""
    loop = new_loop(signal, seed, steps)
    start = time.process_time()
    for _ in range(steps):
        loop.step()
    seconds = round(time.process_time() - start, 1)
    tests = make_examples(WORLD, 400, 1000, "test")
    measured = policy_scores(loop.model.eval(), loop.tokenizer, tests, WORLD.max_new_tokens)
    line = dict(signal=signal, seed=seed, steps=steps, seconds=seconds)
    for name in ("SCS", "sMOS", "sMUS", "length"):
        line[name] = round(measured.scores[name], 2)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--train", nargs=3, metavar=("SIGNAL", "SEED", "STEPS"))
    options = parser.parse_args()
    if options.train and options.train[0] not in SIGNALS:
        parser.error(f"signal {options.train[0]!r}: allowed are {', '.join(SIGNALS)}")
    if options.train:
        train(options.train[0], int(options.train[1]), int(options.train[2]))
    else:
        measure(options.batches)
