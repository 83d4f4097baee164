"""A run on two processes that is told to stop: `torchrun stop_signal.py FOLDER WHERE`.

Both stop together, and go on together.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from run_files import weights

from memcalib import training
from memcalib.micro.world import WORLDS, exact_judge, make_examples
from memcalib.micro.policy import build_tokenizer, load_policy
from memcalib.trainer.train_config import world_config
from memcalib.trainer.checkpoints import Interrupted

EXAMPLES = make_examples("short", 8, seed=5)
RANK = int(os.environ.get("RANK", 0))
TURNS = {"sampling": 3, "judging": 20, "update": 5}  # in the third step, of 8 answers a process
counts = dict.fromkeys(TURNS, 0)


def tell(place: str, where: str) -> None:
    """The second process hears a signal; under the launcher both wait in their judge until it comes."""
    counts[place] += 1
    is_turn = counts[place] == TURNS[place]
    if where == place and is_turn and RANK == 1:
        signal.raise_signal(signal.SIGTERM)
    if where == "launcher" and place == "judging" and is_turn:
        if RANK == 0:
            print("judging", flush=True)
        time.sleep(600)


def go(out: Path, where: str = "", resume=None):
    config = world_config(
        WORLDS["short"], prompts=4, generations=4, steps=4, max_tokens=12, save_every=50
    )
    plain_sample = training.sample_tokens
    plain_loss = training.GRPOTrainer.compute_loss

    def sample(*args, **options):
        tell("sampling", where)
        return plain_sample(*args, **options)

    def loss(*args, **options):
        tell("update", where)
        return plain_loss(*args, **options)

    def judge(example, response):
        tell("judging", where)
        return exact_judge(example, response)

    counts.update(dict.fromkeys(counts, 0))
    training.sample_tokens = sample
    training.GRPOTrainer.compute_loss = loss
    try:
        model = load_policy("cold-short")[0]
        options = dict(tokenizer=build_tokenizer(), out=out, resume=resume)
        return training.train(model, config, EXAMPLES, judge, **options)
    finally:
        training.sample_tokens = plain_sample
        training.GRPOTrainer.compute_loss = plain_loss


def main(folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    try:
        go(folder / "cut", where)
    except Interrupted as error:
        end = {"message": str(error), "code": error.exit_code}
    if where != "launcher":
        resumed = go(folder / "cut", resume=True)
        whole = go(folder / "whole")
        end["same"] = torch.equal(weights(resumed.model), weights(whole.model))
    (folder / f"{RANK}.json").write_text(json.dumps(end))
    sys.exit(end["code"] if where == "launcher" else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
