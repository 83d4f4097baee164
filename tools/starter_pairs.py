"""Check a file of minimal pairs:  python -m tools.starter_pairs FILE [--records FILE ...]

Lists every fault with its line, or counts the pairs by form, direction, channel, language and
length.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from memcalib.evaluation.minimal_pairs import MinimalPair, load_pairs, pair_answers
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
        words = count_words(pair.response)
        counts["words"][
            "under 200" if words < 200 else "200 to 800" if words <= 800 else "more"
        ] += 1
        for stance in (pair.edit.stance_before, pair.edit.stance_after):
            counts["stance"][stance or "none"] += 1
        counts["record"][(example.model_extra or {}).get("subset", "")] += 1
        for answer in pair_answers(pair, example):
            actual = answer.levels[pair.edit.atom_id]
            ideal = example.levels[pair.edit.atom_id]
            counts["channel"][f"{ideal.wire}{actual.wire}"] += 1
    return counts


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
