"""SCS before and after a short self-distillation on the world `short`, with either teacher,
beside GRPO.

`python benchmarks/bench_distillation.py [STEPS [SEED...]]` prints one JSON line a run;
batches of 8 prompts by 8 answers.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from memcalib.inference.sampling import prompt_encoder
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import load_policy
from memcalib.trainer.train_config import world_config
from memcalib.trainer.distillation import prompted_scores
from memcalib.training import train

HINTED = {"teacher": "teacher-short", "teacher_prompt_template": "micro-hinted"}
RUNS = [("opsd-pg", {}), ("opsd-gkd", {}), ("opsd-pg", HINTED), ("opsd-gkd", HINTED), ("grpo", {})]
WORLD = WORLDS["short"]
SHOWN = ("SCS", "AOR", "AUR")


def scores(model, tokenizer) -> dict[str, float]:
    """Sampled answers of 300 test examples behind the student's prompt."""
    encode = prompt_encoder(tokenizer, prompt_template="micro")
    tests = make_examples(WORLD, 300, 7, "test")
    all_scores = prompted_scores(
        model, tokenizer, tests, exact_judge, encode, max_tokens=WORLD.max_new_tokens
    )
    return {name: round(all_scores[name], 1) for name in SHOWN}


def run(method: str, changes: dict, steps: int, seed: int) -> dict:
    """One training run from the cold start."""
    model, tokenizer = load_policy(WORLD.policy)
    before = scores(model, tokenizer)
    config = world_config(
        WORLD, method=method, prompts=8, generations=8, steps=steps, seed=seed, **changes
    )
    with tempfile.TemporaryDirectory() as out:
        examples = make_examples(WORLD, 400, 1, "rl")
        trainer = train(model, config, examples, exact_judge, tokenizer=tokenizer, out=out)
        rows = [json.loads(line) for line in (Path(out) / "steps.jsonl").read_text().splitlines()]
    agreement = [round(row["agreement"], 3) for row in (rows[0], rows[-1]) if "agreement" in row]
    return {
        "method": method,
        "teacher": config.teacher or "frozen start",
        "steps": steps,
        "seed": seed,
        "before": before,
        "after": scores(trainer.model, tokenizer),
        "agreement": agreement,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps, *seeds = [int(argument) for argument in sys.argv[1:]] or [30]
    for seed in seeds or [42]:
        for method, changes in RUNS:
            print(json.dumps(run(method, changes, steps, seed)), flush=True)
