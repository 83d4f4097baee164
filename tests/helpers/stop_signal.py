"""A run on two processes that is told to stop: `torchrun stop_signal.py FOLDER WHERE`.

Both stop together, and go on together.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from run_files import weights

from memcalib import training
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_tokenizer, load_policy
from memcalib.trainer.train_config import world_config
from memcalib.trainer.checkpoints import Interrupted

EXAMPLES = make_examples("short", 8, seed=5)
RANK = int(os.environ.get("RANK", 0))
# which call of each kind is the one to stop at: in the third step; a process has 8 answers a step
STOP_AT = {"sampling": 3, "judging": 20, "update": 5}


class StopSignal:
    """Sends the signal in a call of the kind `where`; under the launcher both processes wait in
    their judge until it comes.
    """

    def __init__(self, where: str):
        self.where = where
        self.calls = Counter()

    def count(self, kind: str) -> None:
        """Note a call, and stop at the right one."""
        self.calls[kind] += 1
        if self.calls[kind] != STOP_AT[kind]:
            return
        if self.where == kind and RANK == 1:
            signal.raise_signal(signal.SIGTERM)
        if self.where == "launcher" and kind == "judging":
            if RANK == 0:
                print("judging", flush=True)
            time.sleep(600)


def run(out: Path, where: str = "", resume=None):
    """Train for four steps, with a signal in a call of the kind `where`."""
    config = world_config(
        WORLDS["short"], prompts=4, generations=4, steps=4, max_tokens=12, save_every=50
    )
    stop = StopSignal(where)
    sample_tokens = training.sample_tokens
    compute_loss = training.GRPOTrainer.compute_loss

    def count_and_sample(*args, **options):
        stop.count("sampling")
        return sample_tokens(*args, **options)

    def count_and_compute(*args, **options):
        stop.count("update")
        return compute_loss(*args, **options)

    def count_and_judge(example, response):
        stop.count("judging")
        return exact_judge(example, response)

    training.sample_tokens = count_and_sample
    training.GRPOTrainer.compute_loss = count_and_compute
    try:
        model = load_policy("cold-short")[0]
        options = {"tokenizer": build_tokenizer(), "out": out, "resume": resume}
        return training.train(model, config, EXAMPLES, count_and_judge, **options)
    finally:
        training.sample_tokens = sample_tokens
        training.GRPOTrainer.compute_loss = compute_loss


def main(folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    try:
        run(folder / "cut", where)
    except Interrupted as error:
        outcome = {"message": str(error), "code": error.exit_code}
    if where != "launcher":
        resumed = run(folder / "cut", resume=True)
        whole = run(folder / "whole")
        outcome["same"] = torch.equal(weights(resumed.model), weights(whole.model))
    (folder / f"{RANK}.json").write_text(json.dumps(outcome))
    torch.distributed.destroy_process_group()  # threads left to the interpreter's end can abort it
    sys.exit(outcome["code"] if where == "launcher" else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
