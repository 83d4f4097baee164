"""Which mistakes of a builder the check of its stage sees,
made at a rate of one in up to forty rows of the micro-world.

What is at zero is the reviewers' part: a hint in one word, a wrong level or action, a contrast of
another atom, a distractor that matters. A doubled passage is no fault, since the stage leaves it
out. A wrong family is not seen either as long as the sentence carries the sign of the right one.
The row *none* is the reply without a mistake: what is seen there is a false alarm.

python benchmarks/bench_builder.py    (about ten seconds)
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from practice_builds import alteration_table, exact_build, stage_table

from memcalib.products.micro.practice.source import micro_source_rows


def main() -> None:
    """Print both tables; exit with an error when a sound reply was objected to."""
    pd.set_option("display.width", 200, "display.max_rows", None)
    entering = exact_build(micro_source_rows(150, rates={})).entering
    table = stage_table(entering)
    print(table.round(0), end="\n\n")
    print("Facts said otherwise, seen %", alteration_table(entering).round(0), sep="\n")
    if table["seen %"].xs("none", level="mistake").any():
        sys.exit("a sound reply was objected to")


if __name__ == "__main__":
    main()
