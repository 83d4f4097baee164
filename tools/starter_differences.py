"""Which differences the starter set shows:  python -m tools.starter_differences [--write]

Practice models of a chosen SCS answer every record three times: half the width of the 95 %
interval of SCS, and the smallest difference between two of them that is found four times in five.
`--write` puts the table into reading.json, for the card.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

from memcalib.products.exam.exam import resolvable_difference
from memcalib.metrics import response_frame, score
from memcalib.problem import Atom, Example, Judgment, Level, judgment_for, load_examples

READING = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter" / "reading.json"
SEEDS = (42, 43, 44)
TARGETS = (40, 60, 80)
SPREAD = 0.8  # standard deviation of a record's difficulty, on the log scale of the error rate
SHAPES = ("errors by kind", "errors anywhere")


def susceptibility(atom: Atom, shape: str) -> float:
    """How likely an error in this atom is, against one that should be used; by kind, a hard
    distractor is half as likely, and any other memory without use a twentieth.
    """
    if shape == "errors anywhere" or atom.ideal != Level.IGNORE:
        return 1.0
    return 0.5 if (atom.model_extra or {}).get("kind") == "hard" else 0.05


def error_rates(examples: list[Example], difficulty: np.ndarray, base: float, shape: str) -> list:
    """For each record the chance of an error in each of its atoms, at most nine tenths."""
    rates = []
    for example, factor in zip(examples, difficulty, strict=True):
        shares = np.array([susceptibility(atom, shape) for atom in example.atoms])
        rates.append(np.minimum(base * factor * shares, 0.9))
    return rates


def expected_score(examples: list[Example], rates: list[np.ndarray]) -> float:
    """SCS of a model that moves an atom to one of the two other levels, alike, at these rates."""
    scores = []
    for example, rate in zip(examples, rates, strict=True):
        mean_factors = []
        for atom in example.atoms:
            distances = [abs(atom.ideal - level) for level in Level if level != atom.ideal]
            mean_factors.append(np.mean([0.5**distance for distance in distances]))
        scores.append(np.prod(1 - rate * (1 - np.array(mean_factors))))
    return 100 * float(np.mean(scores))


def base_rate(examples: list[Example], difficulty: np.ndarray, target: float, shape: str) -> float:
    """The rate at which the expected SCS is the target, by bisection."""
    low = 0.0
    high = 50.0
    for _ in range(60):
        middle = (low + high) / 2
        rates = error_rates(examples, difficulty, middle, shape)
        if expected_score(examples, rates) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def practice_judgments(
    examples: list[Example], rates: list[np.ndarray], name: str, generator: np.random.Generator
) -> list[Judgment]:
    """What a practice model does with every record, once for each seed."""
    judgments = []
    for seed in SEEDS:
        for example, rate in zip(examples, rates, strict=True):
            levels: dict[str, Level | None] = {}
            for atom, chance in zip(example.atoms, rate, strict=True):
                levels[atom.atom_id] = atom.ideal
                if generator.random() < chance:
                    others = [level for level in Level if level != atom.ideal]
                    levels[atom.atom_id] = others[generator.integers(2)]
            judgments.append(judgment_for(example, levels, model=name, judge="exact", seed=seed))
    return judgments


def scores_by_question(judgments: list[Judgment]) -> pd.Series:
    """Mean SCS of each question over the seeds."""
    frame = response_frame(judgments)
    scores = 100 * 0.5 ** (frame["over"] + frame["under"])
    return scores.groupby(frame["question_id"]).mean().sort_index()


def differences_table(examples: list[Example], seed: int = 20261127) -> pd.DataFrame:
    """Half-width and smallest difference for each subset, shape of errors and SCS."""
    by_subset: dict[str, list[Example]] = {"all": examples}
    for example in examples:
        by_subset.setdefault((example.model_extra or {})["subset"], []).append(example)
    rows = []
    for subset, records in by_subset.items():
        for shape in SHAPES:
            row: dict[str, object] = {
                "records": subset,
                "questions": len(records),
                "practice model": shape,
            }
            for target in TARGETS:
                generator = np.random.default_rng([seed, target, SHAPES.index(shape)])
                difficulty = generator.lognormal(0.0, SPREAD, len(records))
                base = base_rate(records, difficulty, target, shape)
                rates = error_rates(records, difficulty, base, shape)
                first = practice_judgments(records, rates, "first", generator)
                second = practice_judgments(records, rates, "second", generator)
                bounds = score(first).iloc[0]
                half_width = (bounds["SCS_high"] - bounds["SCS_low"]) / 2
                smallest = resolvable_difference(
                    scores_by_question(first).tolist(), scores_by_question(second).tolist()
                )
                row[f"SCS {target}: ±"] = f"{half_width:.1f}"
                row[f"SCS {target}: difference"] = f"{smallest:.1f}"
            rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Print the table; with --write, put it into reading.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into reading.json")
    arguments = parser.parse_args()
    table = differences_table(load_examples("starter"))
    print(table.to_string(index=False))
    if arguments.write:
        reading = json.loads(READING.read_text(encoding="utf-8"))
        reading["differences"] = table.to_dict("records")
        text = json.dumps(reading, indent=1, ensure_ascii=False)
        READING.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
