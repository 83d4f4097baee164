"""Does the world `fair` have the properties that were fixed for it? Its cold start, and GDPO alone.

    python benchmarks/bench_fair_world.py [--world fair] [--questions 48] [--gdpo SEED LR]

Printed are, for answers of the world's cold start to test questions (eight each): the share of
tokens in Key sentences by channel, as in experiment e08, and the share of the credit there; and by
channel where the adaptive threshold would move to (the 75th percentile of its signals, floor 0.02)
with the number of scores. With `--gdpo` one training of GDPO: score, length and ends before and
after.
"""

import argparse
import tempfile

import numpy as np
import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from memcalib.products.annotation.sentence_roles import audited_pairs, role_items, true_roles
from memcalib.products.annotation.audit import draw_pairs, shares_table
from memcalib.problem import RIGHT_OR_OVER, UNDER
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.reproduction.rule_grid import load_plan
from memcalib.products.reproduction.rule_runs import GridRun, train_one
from memcalib.trainer.traces import TraceWriter, sample_credit
from memcalib.trainer.trace_files import read_traces
from memcalib.trainer.train_config import world_config

BATCH = 16  # questions


def traced_answers(world: str, questions: int) -> tuple[pd.DataFrame, list]:
    """Traces of the cold start's answers under the paper's rule, and the examples asked."""
    model, tokenizer = load_policy(WORLDS[world].policy)
    examples = make_examples(world, questions, 0, "test")
    config = world_config(WORLDS[world])
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(folder)
        for step, start in enumerate(range(0, questions, BATCH)):
            asked = examples[start : start + BATCH]
            credited = sample_credit(model, tokenizer, asked, exact_judge, config, seed=step)
            writer.write(step, *credited, tokenizer, method="memcalib-rl")
        return read_traces(folder), examples


def key_shares(traces: pd.DataFrame, examples: list) -> pd.DataFrame:
    """Share of tokens and of credit in Key sentences, for all pairs and by channel."""
    drawn = draw_pairs(traces, per_channel=len(traces))
    items = role_items(drawn, traces, examples)
    pairs = audited_pairs(items, true_roles(items, examples), traces)
    shares = shares_table(pairs, resamples=100)
    columns = ["pairs", "token_share", "credit_share"]
    return shares[shares["role"] == "key"].set_index("slice")[columns]


def threshold_targets(traces: pd.DataFrame) -> pd.DataFrame:
    """For each channel the 75th percentile of its clipped signals, and how many there are."""
    rows = []
    scored = traces.dropna(subset=["channel"])
    for channel, of_channel in scored.groupby("channel"):
        if channel not in (*RIGHT_OR_OVER, *UNDER):
            continue
        signals = np.concatenate([np.asarray(d, dtype=float) for d in of_channel["d"]])
        if channel in UNDER:
            signals = -signals
        target = float(np.quantile(signals.clip(-3, 3), 0.75))
        rows.append((channel, len(of_channel), len(signals), target, target > 0.02))
    columns = ["channel", "pairs", "scores", "75th percentile", "above the floor"]
    return pd.DataFrame(rows, columns=columns).set_index("channel")


def train_gdpo(world: str, seed: int, lr: float) -> None:
    """Print what GDPO makes of the cold start, at the sizes of the registered plan."""
    settings = dict(load_plan("fair").plain)
    settings.update(world=world, rule="gdpo", split="validation", seed=seed, lr=lr, tests=200)
    columns = ["SCS", "accuracy", "length", "end_rate", "repeated", "named", "processor_seconds"]
    rows = {}
    for steps in (0, settings["steps"]):
        rows[f"{steps} steps"] = train_one(GridRun(**settings | {"steps": steps})).scores
    print(pd.DataFrame(rows).T[columns].round(2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="fair")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--gdpo", nargs=2, metavar=("SEED", "LR"))
    options = parser.parse_args()
    if options.gdpo:
        train_gdpo(options.world, int(options.gdpo[0]), float(options.gdpo[1]))
    else:
        traces, examples = traced_answers(options.world, options.questions)
        print(key_shares(traces, examples).round(3))
        print(threshold_targets(traces).round(4))
