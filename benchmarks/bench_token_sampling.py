"""What an update on some of the tokens saves, and what it adds to the variance of the gradient.

    python benchmarks/bench_token_sampling.py [--batches 12] [--draws 4] [--rule gdpo]
    python benchmarks/bench_token_sampling.py --train SEED STEPS SHARE

The first form judges batches of the micro-world's cold start (world `long`, 2 prompts x 8 answers)
once and compares, for each way to draw tokens and each share that is kept in the mean, the gradient
with the whole one of the same batch. Printed are processor seconds of the update and the variance
of the gradient over batches and draws, both in parts of the whole update of the same batches,
interleaved in one run; then the product of both, for the update alone and for a whole step. The
second form trains one policy on prefixes (SHARE 1: on everything) and prints its SCS on 400 test
examples, its processor seconds, and those of its updates; exploratory.
"""

import argparse
import json
import time

import torch

from memcalib.credit.logprobs import response_logps
from memcalib.credit.prefix_groups import response_mask
from memcalib.credit.tree_attention import tree_logps
from memcalib.products.micro.loop import CreditLoop
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.reproduction.rule_runs import policy_scores
from memcalib.rules.base import rule_settings
from memcalib.trainer.rewards import assign_credit
from memcalib.trainer.token_sampling import (
    draw_tokens,
    kept_lengths,
    prefix_probabilities,
    token_probabilities,
    token_weights,
)
from memcalib.trainer.train_config import world_config

WORLD = WORLDS["long"]


class SampledLoop(CreditLoop):
    """`CreditLoop` with one update a step, on drawn tokens; `share` 1 is the whole update.

    The answers are the policy's own, so the ratio of the objective is 1 and no pass is needed
    before the update; only rules that read no log-probabilities are allowed."""

    share = 1.0
    prefixes = True
    update_seconds = 0.0

    def judged_batch(self):
        """The next prompts, answers, their token advantages and the mask of scored tokens."""
        examples, prompts, ids = self.sample()
        self.judged.read(examples, self.tokenizer.batch_decode(ids, skip_special_tokens=True), ids)
        credit, _ = assign_credit(
            self.model, self.token_credit, self.judged, generations=self.config.generations
        )
        mask = response_mask(ids) & self.judged.valid[:, None]
        return prompts, ids, credit.advantages, mask

    def backward(self, batch, share, prefixes, generator=None):
        """Add the gradient of one draw to the model's; returns how many tokens were read."""
        prompts, ids, advantages, mask = batch
        weights = mask.double()
        lengths = mask.sum(1)
        if share < 1:
            make = prefix_probabilities if prefixes else token_probabilities
            probabilities = make(advantages, mask, share)
            kept = draw_tokens(probabilities, generator, prefixes)
            weights = token_weights(kept, probabilities)
            lengths = kept_lengths(kept)
        rows = lengths.nonzero()[:, 0].tolist()
        cut_prompts = [prompts[row] for row in rows]
        cut_ids = [ids[row][: lengths[row]] for row in rows]
        now, _ = tree_logps(
            self.model, cut_prompts, cut_ids, temperature=self.config.temperature, grad=True
        )
        reference = response_logps(
            self.reference, cut_prompts, cut_ids, temperature=self.config.temperature
        )
        width = now.shape[1]
        ratio = (now - now.detach()).exp()
        gain = ratio * advantages[rows, :width]
        divergence = (reference - now).exp() - (reference - now) - 1
        terms = (self.config.beta * divergence - gain) * weights[rows, :width]
        inside = weights[rows, :width] > 0
        (torch.where(inside, terms, 0).sum() / mask.sum().clamp(min=1)).backward()
        return int(lengths.sum())

    def step(self):
        """One batch and its update."""
        batch = self.judged_batch()
        start = time.process_time()
        self.backward(batch, self.share, self.prefixes, self.generator)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update_seconds += time.process_time() - start
        self.updates += 1


def new_loop(rule: str, seed: int, steps: int) -> SampledLoop:
    """A loop that begins with the cold start."""
    model, tokenizer = load_policy(WORLD.policy)
    settings = dict(prompts=2, generations=8, minibatches=1, lr=6e-4, seed=seed, draws="row")
    config = world_config(WORLD, **settings, **rule_settings(rule))
    examples = make_examples(WORLD, 2 * steps, seed, "rl")
    return SampledLoop(model, tokenizer, config, examples, exact_judge)


def flat_gradient(loop: SampledLoop) -> torch.Tensor:
    """The gradient that `backward` left, which is then forgotten."""
    parts = [p.grad.flatten() for p in loop.model.parameters() if p.grad is not None]
    gradient = torch.cat(parts).double()
    loop.optimizer.zero_grad()
    return gradient


def measure(rule: str, batches: int, draws: int) -> None:
    """Print the table of ways and shares."""
    loop = new_loop(rule, seed=5, steps=batches)
    generator = torch.Generator().manual_seed(0)
    ways = [(share, prefixes) for prefixes in (False, True) for share in (0.75, 0.5, 0.25)]
    whole = []
    batch_seconds = 0.0  # sampling, judging and credit
    whole_seconds = 0.0
    whole_read = 0
    errors = dict.fromkeys(ways, 0.0)
    seconds = dict.fromkeys(ways, 0.0)
    read = dict.fromkeys(ways, 0)
    for _ in range(batches):
        start = time.process_time()
        batch = loop.judged_batch()
        batch_seconds += time.process_time() - start
        loop.backward(batch, 1.0, False)
        loop.optimizer.zero_grad()  # warm
        start = time.process_time()
        whole_read += loop.backward(batch, 1.0, False)
        whole_seconds += time.process_time() - start
        whole.append(flat_gradient(loop))
        for way in ways:
            for _ in range(draws):
                start = time.process_time()
                read[way] += loop.backward(batch, *way, generator)
                seconds[way] += time.process_time() - start
                errors[way] += float((flat_gradient(loop) - whole[-1]).square().sum())
    stacked = torch.stack(whole)
    between = float((stacked - stacked.mean(0)).square().sum() / (batches - 1))
    print(f"rule {rule}, {batches} batches, {draws} draws, world {WORLD.name}, cold start")
    update_share = whole_seconds / (batch_seconds + whole_seconds)
    print(f"the whole update is {update_share:.2f} of a step's processor seconds")
    print(
        "way       share  tokens read  seconds  variance  variance x seconds  x seconds of a step"
    )
    for share, prefixes in ways:
        way = (share, prefixes)
        cost = seconds[way] / draws / whole_seconds
        variance = 1 + errors[way] / (batches * draws) / between
        name = "prefixes" if prefixes else "tokens"
        row = f"{name:9} {share:5} {read[way] / draws / whole_read:12.2f} {cost:8.2f}"
        step = (1 - update_share + update_share * cost) * variance
        print(f"{row} {variance:9.2f} {cost * variance:19.2f} {step:20.2f}")


def train(rule: str, seed: int, steps: int, share: float) -> None:
    """Train one policy and print a line of JSON."""
    loop = new_loop(rule, seed, steps)
    loop.share = share
    start = time.process_time()
    for _ in range(steps):
        loop.step()
    total = time.process_time() - start
    tests = make_examples(WORLD, 400, 1000, "test")
    measured = policy_scores(loop.model.eval(), loop.tokenizer, tests, WORLD.max_new_tokens)
    line = dict(rule=rule, seed=seed, steps=steps, share=share, seconds=round(total, 1))
    print(
        json.dumps(
            line
            | dict(
                update_seconds=round(loop.update_seconds, 1), SCS=round(measured.scores["SCS"], 2)
            )
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--rule", default="gdpo")
    parser.add_argument("--train", nargs=3, metavar=("SEED", "STEPS", "SHARE"))
    options = parser.parse_args()
    if options.train:
        train(options.rule, int(options.train[0]), int(options.train[1]), float(options.train[2]))
    else:
        measure(options.rule, options.batches, options.draws)
