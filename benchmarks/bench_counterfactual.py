"""Counterfactual scoring with shared prompts against the two ways without, in one run.

    python benchmarks/bench_counterfactual.py [rounds]

Shapes of one small training step: 16 examples of the micro-world, eight answers each (about 22
tokens), one counterfactual for each answer and localizable channel. Printed: milliseconds of CPU
time on one thread (median over rounds, the ways taking turns), the ratio to the shared scorer, and
the largest difference to the slow reference. "Best plain padded batch" is the fastest of several
budgets; it too computes logits at answer positions only. "unique" is the same with repeated rows
scored once. "trees" packs prompts, ablated suffixes and answers into one forward, as the update
does; without gradients it is the slower way, so `response_logps` keeps to shared caches.
"""

import statistics
import sys
import time
from functools import partial
from itertools import chain

import torch

from memcalib.inference.sampling import answer_and_judge
from memcalib.localization import ablation_pairs
from memcalib.credit.logprobs import response_logps, response_logps_reference
from memcalib.credit.logprobs import AnswerToScore, Scorer, score_plain
from memcalib.credit.tree_attention import tree_logps
from memcalib.credit.prefix_groups import split_model, token_logps
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.policy import load_policy
from memcalib.problem import encode_prompt, render


def workload(prompts: int = 16, answers: int = 8):
    """The shipped cold-started policy, and of one step of its own answers the ablated prompt ids
    and answer ids.
    """
    model, tokenizer = load_policy("cold-short")
    pool = make_examples("short", prompts, 0, "rl")
    options = dict(text="concat", prompt_template="micro", max_tokens=192)
    examples = list(chain.from_iterable([example] * answers for example in pool))
    rollouts, judgments = answer_and_judge(
        model, tokenizer, pool, exact_judge, seed=0, samples=answers, **options
    )
    ids = [rollout.token_ids for rollout in rollouts]

    def encode(e):
        return encode_prompt(tokenizer, render(e, text="concat", prompt_template="micro"))

    pairs = ablation_pairs(examples, judgments, encode)
    return model, pairs.prompts, [ids[row] for row in pairs.rows]


def one_at_a_time(model, prompts, responses):
    """Each row by itself through the plain scorer."""
    rows = [
        response_logps(model, [p], [r], share=False)[0]
        for p, r in zip(prompts, responses, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def every_row(model, prompts, responses, budget):
    """One padded batch after another with every row in it, repeated rows too,
    as a plain scorer does.
    """
    scorer = Scorer(*split_model(model), token_logps, model.device)
    jobs = [AnswerToScore(row, list(response)) for row, response in enumerate(responses)]
    with torch.no_grad():
        return score_plain(scorer, [list(p) for p in prompts], jobs, budget)


def first_of_trees(model, prompts, responses):
    """Log-probabilities of the answers, in trees."""
    return tree_logps(model, prompts, responses)[0]


def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    model, prompts, responses = workload()
    distinct = {tuple(p) for p in prompts}
    rows = {(tuple(p), tuple(y)) for p, y in zip(prompts, responses, strict=True)}

    def mean(rows):
        return sum(map(len, rows)) / len(rows)

    print(
        f"{len(prompts)} pairs ({len(rows)} distinct), {len(distinct)} distinct prompts of "
        f"{mean(prompts):.0f} tokens, answers of {mean(responses):.0f} tokens, 1 thread"
    )
    batch = (model, prompts, responses)
    ways = {"shared": partial(response_logps, *batch), "trees": partial(first_of_trees, *batch)}
    for way in ways.values():
        way()
    for budget in (1024, 2048, 4096, 8192):
        ways[f"plain {budget}"] = partial(every_row, *batch, budget)
        ways[f"unique {budget}"] = partial(response_logps, *batch, share=False, token_budget=budget)
    ways["one at a time"] = partial(one_at_a_time, *batch)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(rounds):
        for name, way in ways.items():
            if name == "one at a time" and step > 0:
                continue
            start = time.process_time()
            out = way()
            times[name].append(time.process_time() - start)
            if step == 0 and name == "shared":
                slow = response_logps_reference(model, prompts, responses)
                print(f"largest difference to the reference: {(out - slow).abs().max():.1e}")
    took = {name: 1000 * statistics.median(t) for name, t in times.items()}
    best = min([name for name in took if name.startswith("plain")], key=took.get)
    best_unique = min([name for name in took if name.startswith("unique")], key=took.get)
    for name, ms in took.items():
        print(f"  {name:14s} {ms:8.1f} ms   {ms / took['shared']:.2f}x")
    print(
        f"shared is {took['one at a time'] / took['shared']:.2f}x one at a time, "
        f"{took[best] / took['shared']:.2f}x {best}, "
        f"{took[best_unique] / took['shared']:.2f}x {best_unique}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
