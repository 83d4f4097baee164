"""Check a file of minimal pairs:  python -m tools.starter_pairs FILE [--records FILE ...]

Lists every fault with its line, or counts the pairs by form, direction, channel, language and
length.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from memcalib.commands.exam import Exam
from memcalib.products.exam.minimal_pairs import (
    HARD_FORMS,
    MinimalPair,
    load_pairs,
    pair_answers,
)
from memcalib.io.records import DataError
from memcalib.problem import Example, load_examples

SHIPPED = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter" / "records.jsonl"


def records_for(files: list[Path]) -> list[Example]:
    """The records of these files and of the starter set; a later file wins over an earlier one."""
    examples = {}
    for file in (SHIPPED, *files):
        for example in load_examples(file):
            examples[example.id] = example
    return list(examples.values())


def count_words(text: str) -> int:
    """Words of a text; two East Asian characters count as one."""
    east_asian = re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]", text)
    others = re.sub(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]", " ", text)
    return len(others.split()) + len(east_asian) // 2


def size_of(text: str) -> str:
    """How long an answer is, in words, in three sizes."""
    words = count_words(text)
    if words < 200:
        return "under 200"
    return "200 to 800" if words <= 800 else "more"


def counts_of(pairs: list[MinimalPair], examples: list[Example]) -> dict[str, Counter]:
    """How many pairs there are of each form, direction, language and length, and so on."""
    example_by_id = {example.id: example for example in examples}
    counts: dict[str, Counter] = {
        name: Counter()
        for name in ("form", "direction", "language", "words", "stance", "channel", "record")
    }
    for pair in pairs:
        example = example_by_id[pair.example_id]
        language = pair.language or (example.model_extra or {}).get("language", "en")
        counts["form"][pair.form] += 1
        counts["direction"][pair.edit.direction] += 1
        counts["language"][language] += 1
        counts["words"][size_of(pair.response)] += 1
        for stance in (pair.edit.stance_before, pair.edit.stance_after):
            counts["stance"][stance or "none"] += 1
        counts["record"][(example.model_extra or {}).get("subset", "")] += 1
        for answer in pair_answers(pair, example):
            actual = answer.levels[pair.edit.atom_id]
            ideal = example.levels[pair.edit.atom_id]
            counts["channel"][f"{ideal.wire}{actual.wire}"] += 1
    return counts


SECTION = """## The minimal pairs

{pairs} pairs of answers (pairs.jsonl) about {records} of the records. The two answers of a pair
differ in one passage, which changes the level of one atom, or what the answer does with it (its
stance), and leaves every other atom as it was. A language model wrote them; no person has read
them. They have 200 to 800 words, with headings, lists, tables and code. `memcalib exam` reads
{drawn} of them beside the known answers, where they change no verdict, and {rank} hard ones blind.

{sizes}

What follows is about the {first} pairs of the first thirteen forms; *The third edition of the exam*
is about those of the hard forms. Two separate runs of the same model, which had not written them,
read all answers blind, with the judge's prompt. The two answers of a pair stood in different halves
of their sheets. *Right* is a pair whose edited atom was read as it is in both answers (the stance
too, where it alone changes), with no other atom read otherwise in one answer than in the other:

{by_form}

A third reading, by the run that then corrected them and so was not blind, took up the {disputed}
pairs that a reader did not get right and {more} others in which both readers were against a label.
It upheld {upheld} as they stood (one reader had wavered), and corrected {text} in their text and
{label} in a label alone; none was dropped. The corrected pairs were then read blind by two further
runs (*pairs, corrected* in the table of readings): one pair had its edited atom one level lower by
one of them, all others were right by both. Those readers met both answers of a pair within ten
sheets, so their two readings of a pair are less independent than the first ones. The kappas of
*pairs, as first written* are of those. Of the {disputed} pairs that a reader missed, {upheld}
were a slip of that reader; in the others the pair was at fault.

The table is about the pairs as first written. Fifteen of *asking back*, which words alone gave
away, were then replaced by harder ones, read blind by two runs that had not written them (*pairs,
asking back once more*); 13 were right by both. The two others, a table in a third, and twelve
pairs that a later reading found faults in were corrected in their text and not read blind again.

{without_model}
"""


def pairs_section(
    pairs: list[MinimalPair],
    examples: list[Example],
    reading: dict[str, Any],
    grid: Callable[[pd.DataFrame], str],
) -> str:
    """What the card says of the minimal pairs; `reading` is what reading.json holds."""
    counts = counts_of(pairs, examples)
    sizes = []
    for name in ("direction", "channel", "stance", "language", "record"):
        listed = ", ".join(f"{value} {count}" for value, count in sorted(counts[name].items()))
        sizes.append(f"- {name}: {listed}")
    whole = reading["pairs"][0]
    missed = whole["pairs"] - whole["right, both"]
    settled = len(reading["third_reading"])
    return SECTION.format(
        pairs=len(pairs),
        records=len({pair.example_id for pair in pairs}),
        drawn=Exam.model_fields["pairs"].default,
        rank=Exam.model_fields["rank_pairs"].default,
        first=sum(pair.form not in HARD_FORMS for pair in pairs),
        sizes="\n".join(sizes),
        by_form=grid(pd.DataFrame(reading["pairs"])),
        disputed=missed,
        more=settled - missed,
        upheld=whole["upheld against a reader"],
        text=whole["corrected in a text"],
        label=whole["corrected in a label alone"],
        without_model=without_model_text(reading, grid),
    )


def without_model_text(reading: dict[str, Any], grid: Callable[[pd.DataFrame], str]) -> str:
    """What the card says of judges that use no language model."""
    measured = reading["judge_without_model"]
    tables = [grid(pd.DataFrame(measured[name])) for name in ("judges", "by form")]
    return "\n\n".join(["### A judge without a language model", measured["text"], *tables])


def main() -> None:
    """Faults of a file of pairs, or its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--records", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    examples = records_for(arguments.records)
    try:
        pairs = load_pairs(arguments.file, examples)
    except DataError as error:
        print("\n".join(str(violation) for violation in error.violations))
        raise SystemExit(f"{len(error.violations)} faults") from None
    print(f"{len(pairs)} pairs without a fault")
    for name, counter in counts_of(pairs, examples).items():
        listed = ", ".join(f"{value} {count}" for value, count in sorted(counter.items()))
        print(f"{name}: {listed}")


if __name__ == "__main__":
    main()
