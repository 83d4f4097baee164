"""A judge that fails on one of two processes: `torchrun failing_judge.py FOLDER`.

Both stop together, and go on together.
"""

import json
import os
import sys
from pathlib import Path

import torch
from run_files import newest_checkpoint, weights

from memcalib.trainer.checkpoints import read_state
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_tokenizer, load_policy
from memcalib.trainer.callbacks import StepRows
from memcalib.trainer.rewards import JudgeStopped, RetryingJudge
from memcalib.trainer.train_config import world_config
from memcalib.training import train

EXAMPLES = make_examples("short", 8, seed=5)
RANK = int(os.environ.get("RANK", 0))


class BrittleJudge:
    """The exact judge, until it is `down`: then nobody answers on the second process.

    Its time passes in `sleep` alone.
    """

    def __init__(self):
        self.down = False
        self.now = 0.0

    def __call__(self, example, response):
        if self.down and RANK == 1:
            raise ConnectionError("refused")
        return exact_judge(example, response)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(out: Path, judge: BrittleJudge, resume=None, last_step: int = 9):
    """Train for three steps; after the step `last_step` the judge is down."""
    config = world_config(
        WORLDS["short"], prompts=4, generations=4, steps=3, max_tokens=16, eval_every=1
    )
    on_log = StepRows.on_log

    def log_and_break(self, args, state, control, logs=None, **options):
        on_log(self, args, state, control, logs=logs, **options)
        if "loss" in logs and state.global_step == 2 * last_step:
            judge.down = True

    StepRows.on_log = log_and_break
    try:
        return train(
            load_policy("cold-short")[0],
            config,
            EXAMPLES,
            RetryingJudge(judge, 0.4, 10, clock=judge.clock, sleep=judge.sleep, function_tries=1),
            tokenizer=build_tokenizer(),
            out=out,
            validation=EXAMPLES[:3],
            resume=resume,
        )
    finally:
        StepRows.on_log = on_log
        judge.down = False


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    judge = BrittleJudge()
    whole = run(folder / "whole", judge)
    try:
        run(folder / "cut", judge, last_step=2)
    except JudgeStopped as error:
        message = str(error)
    state = read_state(newest_checkpoint(folder / "cut"))
    resumed = run(folder / "cut", judge, resume=True)
    outcome = {
        "message": message,
        "step": state["step"],
        "processes": state["processes"],
        "same": torch.equal(weights(resumed.model), weights(whole.model)),
        "waited": judge.now,
    }
    (folder / f"{RANK}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # threads left to the interpreter's end can abort it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
