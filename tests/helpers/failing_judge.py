"""A judge that fails on one of two processes: `torchrun failing_judge.py FOLDER`. Both stop together, and go on together."""

import json
import os
import sys
from pathlib import Path

import torch
from run_files import newest_checkpoint, weights

from memcalib.trainer.checkpoints import read_state
from memcalib.micro.world import WORLDS, exact_judge, make_examples
from memcalib.micro.policy import build_tokenizer, load_policy
from memcalib.trainer.callbacks import StepRows
from memcalib.trainer.rewards import JudgeStopped, RetryingJudge
from memcalib.trainer.train_config import world_config
from memcalib.training import train

EXAMPLES = make_examples("short", 8, seed=5)
RANK = int(os.environ.get("RANK", 0))
now = [0.0]
down = []


def sleep(seconds: float) -> None:
    now[0] += seconds


def judge(example, response):
    """On the second process nobody answers once the run has told it to be down."""
    if down and RANK == 1:
        raise ConnectionError("refused")
    return exact_judge(example, response)


def go(out: Path, resume=None, step: int = 9):
    config = world_config(
        WORLDS["short"], prompts=4, generations=4, steps=3, max_tokens=16, eval_every=1
    )
    patient = RetryingJudge(judge, 0.4, 10, clock=lambda: now[0], sleep=sleep)
    model = load_policy("cold-short")[0]
    tokenizer = build_tokenizer()
    options = dict(tokenizer=tokenizer, out=out, validation=EXAMPLES[:3], resume=resume)
    plain = StepRows.on_log

    def on_log(self, args, state, control, logs=None, **options):
        plain(self, args, state, control, logs=logs, **options)
        if "loss" in logs and state.global_step == 2 * step:
            down.append(1)

    StepRows.on_log = on_log
    try:
        return train(model, config, EXAMPLES, patient, **options)
    finally:
        StepRows.on_log = plain
        down.clear()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    whole = go(folder / "whole")
    try:
        go(folder / "cut", step=2)
    except JudgeStopped as error:
        message = str(error)
    state = read_state(newest_checkpoint(folder / "cut"))
    resumed = go(folder / "cut", resume=True)
    same = torch.equal(weights(resumed.model), weights(whole.model))
    outcome = dict(
        message=message, step=state["step"], processes=state["processes"], same=same, waited=now[0]
    )
    (folder / f"{RANK}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
