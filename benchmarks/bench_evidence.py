"""Time of one training step of credit from evidence beside GDPO,
MemCalib-RL and TRL's GRPO, interleaved in one run.

    python benchmarks/bench_evidence.py [--world long] [--prompts 4] [--generations 8]
                                        [--steps 4] [--rounds 2] [--threads 1]

Everything is as in `bench_step.py`: the same weights, prompts and exact judge, medians over the
steps after the first one, ratios of processor time. A second table says what the extra passes are:
rows that are read again for each answer of one batch, and the processor time of assigning credit to
it.
"""

import argparse
import logging
import time
from itertools import chain

import torch
from bench_step import measure, start_policy, table

from memcalib.credit.logprobs import response_logps
from memcalib.credit.token_credit import TokenCredit
from memcalib.inference.sampling import prompt_encoder, sample_answers
from memcalib.products.micro.policy import build_tokenizer
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.trainer.rewards import ChannelRewards, assign_credit
from memcalib.trainer.train_config import world_config

VARIANTS = {
    "TRL GRPO (base)": None,
    "GDPO": dict(method="gdpo"),
    "evidence": dict(mode="evidence"),
    "evidence-kl": dict(mode="evidence-kl"),
    "MemCalib-RL": dict(mode="ordered"),
}


def credit_alone(world: str, prompts: int, generations: int, policy) -> str:
    """Of one judged batch: rows read again for each answer, and processor seconds of its credit."""
    model = start_policy(policy or WORLDS[world].policy)
    tokenizer = build_tokenizer()
    lines = []
    examples = make_examples(world, prompts, seed=0)
    encode = prompt_encoder(tokenizer, prompt_template="micro")
    options = dict(
        text="concat", prompt_template="micro", max_tokens=WORLDS[world].max_new_tokens, seed=0
    )
    rollouts = sample_answers(model, tokenizer, examples, samples=generations, **options)
    repeated = list(chain.from_iterable([example] * generations for example in examples))
    judged = ChannelRewards(exact_judge, examples)
    judged.read(
        repeated,
        [rollout.response for rollout in rollouts],
        [rollout.token_ids for rollout in rollouts],
    )
    full = response_logps(model, [encode(example) for example in repeated], judged.ids)
    lines.append(f"{'credit of one batch':32}{'rows again':>12}{'an answer':>12}{'CPU s':>10}")
    for name, change in VARIANTS.items():
        if change is not None:
            config = world_config(WORLDS[world], **change).credit
            credit = TokenCredit(tokenizer, config, encode)
            request = credit.requests(repeated, judged.judgments, judged.ids, full=False)
            rows = len(request) * (2 if request.without else 1)
            start = time.process_time()
            assign_credit(model, credit, judged, generations=generations, full=full)
            lines.append(
                f"{name:32}{rows:12}{rows / len(repeated):12.2f}{time.process_time() - start:10.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="long", choices=sorted(WORLDS))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--policy", default=None, help="folder or shipped name; default: the world's; 'untrained'"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    sizes = dict(prompts=options.prompts, generations=options.generations, policy=options.policy)
    print(
        f"{options.world}, {options.prompts} prompts x {options.generations} answers, "
        f"{options.threads} threads"
    )
    print(table(measure(VARIANTS, options.world, options.steps, options.rounds, **sizes)))
    print(credit_alone(options.world, **sizes))


if __name__ == "__main__":
    main()
