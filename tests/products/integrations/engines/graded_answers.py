"""Answers of the micro-world with their right grades, and a judge that says nothing."""

import json
import random
from pathlib import Path

from memcalib.products.integrations.grading import Grade, grade_of
from memcalib.products.micro.world import answer, exact_judge, make_examples

EXAMPLES = make_examples("short", 4, seed=1)
RECORDS = [json.loads(example.to_json()) for example in EXAMPLES]
ANSWERS = [
    answer(EXAMPLES[0], random.Random(0)),
    "Nothing of this.",
    answer(EXAMPLES[2], random.Random(0)),
    "Nothing of that.",
]


def expected() -> list[Grade]:
    """The grades by the exact judge, which the practice server's judge repeats."""
    pairs = zip(EXAMPLES, ANSWERS, strict=True)
    return [grade_of(example, exact_judge(example, text)) for example, text in pairs]


def silent(turns: object) -> str:
    """A judge whose reply cannot be read."""
    return "I would rather not."


def judge_settings(judge: str, url: str, folder: Path) -> dict[str, str]:
    """The variables of the environment that name a judge of the practice server."""
    return {
        "MEMCALIB_JUDGE": judge,
        "MEMCALIB_JUDGE_URL": url,
        "MEMCALIB_JUDGE_KEY_ENV": "",
        "MEMCALIB_CACHE": str(folder / "calls.sqlite"),
    }
