"""What the checks of `memcalib.products.dataset.lint` are worth:
how many planted defects they catch, how many sound rows they flag.

Each defect of `tests/helpers/planted_defects.py` is planted fifty times in each of three sets of
sound rows: the records that ship with the package, the micro-world, and invented rows in free
words. An error should hit at most one sound row in a hundred, because a row with an error is not
even shown to a reviewer.

python benchmarks/bench_checks.py    (about a minute)
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from invented_rows import invented_examples
from planted_defects import alarm_table, catch_rate, catch_table, with_text

from memcalib.products.shared.grounding import text_faults
from memcalib.products.dataset.lint import LintLimits, lint_example
from memcalib.products.micro.world import make_examples
from memcalib.problem import Example, sample_records

ExampleSets = Mapping[str, Sequence[Example]]
LIMITS = {
    "as reported": LintLimits(other=0.34, own=0.10, common=""),
    "chosen": LintLimits(),
}  # after the exchange of rubrics in the published benchmark, and those of the package
EXCHANGES = {"rubric_alignment": "swapped_rubrics", "rubric_unrelated": "foreign_rubric"}


def limits_table(planting_sets: ExampleSets, sound_sets: ExampleSets) -> pd.DataFrame:
    """For the checks of rubrics, by set and limits, the percentages of sound rows flagged and of
    defects caught.
    """
    rows = {}
    for title, limits in LIMITS.items():
        alarms = alarm_table(sound_sets, limits)
        for check, defect_name in EXCHANGES.items():
            for set_name, examples in planting_sets.items():
                planted, caught = catch_rate(examples, defect_name, limits=limits)
                rows[check, set_name, title] = {
                    "sound rows flagged %": alarms.loc[check, set_name],
                    "planted and caught %": 100 * caught / planted,
                }
    return pd.DataFrame(rows).T


def smuggled_clauses(examples: Sequence[Example]) -> dict[str, int]:
    """In how many rows a short clause added to a paragraph is seen by the check and by the
    builder's stricter one.
    """
    counts = {"rows": len(examples), "lint": 0, "builder's check": 0}
    for example in examples:
        block = example.blocks[0]
        text = block.memory_text.rstrip(".") + ", and keeps bees."
        if lint_example(with_text(example, block, text), ["block_adds_nothing"]):
            counts["lint"] += 1
        atom_texts = [example.atom(atom_id).text for atom_id in block.atom_ids]
        if any("added" in rule for rule, _ in text_faults(atom_texts, text)):
            counts["builder's check"] += 1
    return counts


def main() -> None:
    """Print the four tables; exit with an error when more than one sound row in a hundred has an
    error.
    """
    pd.set_option("display.width", 200, "display.max_rows", None, "display.max_columns", None)
    planting_sets = {
        "shipped": sample_records(),
        "micro-world": make_examples("short", 60, seed=9) + make_examples("long", 60, seed=9),
        "invented": invented_examples(360, seed=1),
    }
    sound_sets = {
        "shipped": sample_records(),
        "micro-world": make_examples("short", 300, seed=4) + make_examples("long", 300, seed=4),
        "invented": invented_examples(1080, seed=2),
    }
    caught = catch_table(planting_sets)
    print("Planted defects", caught.round(0), sep="\n", end="\n\n")
    alarms = alarm_table(sound_sets)
    titles = list(sound_sets)
    ever_flagged = (alarms[titles] > 0).any(axis=1) | (alarms.index == "any error")
    counts = ", ".join(f"{title} {len(examples)}" for title, examples in sound_sets.items())
    print(f"Sound rows flagged, % ({counts})", alarms[ever_flagged].round(2), sep="\n", end="\n\n")
    limits = limits_table(planting_sets, sound_sets).unstack()
    print("The choice of limits", limits.round(1), sep="\n", end="\n\n")
    print("A clause too many:", smuggled_clauses(planting_sets["invented"]))
    if (alarms.loc["any error", titles] > 1).any():
        sys.exit("more than one sound row in a hundred has an error")


if __name__ == "__main__":
    main()
