"""Put a subset's records into the starter set:  python -m tools.starter_assemble FILE SUBSET

The rows of the subset are replaced by those of the file, when all of them are valid and
lint finds no error, no id is used twice, and no question or memory is nearly another record's.
Run tools.starter_card afterwards.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from memcalib.products.dataset.duplicates import similar_pairs
from memcalib.products.dataset.lint import lint_files
from memcalib.problem import SUBSETS, Example, load_examples

FOLDER = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter"
CANARY = "memcalib starter set canary 8c1f6d52-0b7e-4b53-9a86-61f3a2c0d7e4"
SAME = {"source": "memcalib starter set", "source_license": "Apache-2.0", "canary": CANARY}


def faults_of(examples: list[Example], subset: str) -> list[str]:
    """What keeps records out of the set, beyond the format: subset, language, licence, canary,
    times that run backwards, the last turn.
    """
    faults = []
    for example in examples:
        extra = example.model_extra or {}
        expected = {"subset": subset, **SAME}
        for name, value in expected.items():
            if extra.get(name) != value:
                faults.append(
                    f"{example.id}: {name}: found {extra.get(name)!r}; allowed: {value!r}"
                )
        if not extra.get("language"):
            faults.append(f"{example.id}: language: found nothing; allowed: a code such as 'en'")
        if subset == "conversations" and not any(
            turn.role == "user" for turn in example.turns or ()
        ):
            faults.append(f"{example.id}: turns: found no user's turn; allowed: one or more")
        times = [turn.time for turn in example.turns or () if turn.time]
        if times != sorted(times):
            faults.append(f"{example.id}: turns: found times {times}; allowed: in order")
    return faults


def repeated(examples: list[Example]) -> list[str]:
    """Ids used twice, and pairs of records whose questions or memories are nearly the same."""
    faults = []
    for example_id, count in Counter(example.id for example in examples).items():
        if count > 1:
            faults.append(f"{example_id}: found {count} times; allowed: once")
    questions = [example.question for example in examples]
    memories = []
    for example in examples:
        memories.append(" ".join(block.memory_text for block in example.blocks))
    for title, texts in (("question", questions), ("memory", memories)):
        for pair in similar_pairs(texts):
            faults.append(f"{title}: {examples[pair[0]].id} and {examples[pair[1]].id} are alike")
    return faults


def main() -> None:
    """Check a file of one subset and put it into records.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("subset", choices=SUBSETS)
    arguments = parser.parse_args()
    new = load_examples(arguments.file)
    faults = faults_of(new, arguments.subset)
    faults += [str(fault) for fault in lint_files([str(arguments.file)]).errors]
    shipped = load_examples(FOLDER / "records.jsonl")
    other_subsets = [
        each for each in shipped if (each.model_extra or {})["subset"] != arguments.subset
    ]
    faults += repeated([*other_subsets, *new])
    if faults:
        print("\n".join(faults))
        raise SystemExit(f"{len(faults)} faults; nothing was written")
    lines = []
    for file in (FOLDER / "records.jsonl", arguments.file):
        for line in file.read_text(encoding="utf-8").split("\n"):
            is_replaced = file != arguments.file and f'"subset": "{arguments.subset}"' in line
            if line and not is_replaced:
                lines.append(line)
    rows = sorted(lines, key=lambda line: SUBSETS.index(json.loads(line)["subset"]))
    (FOLDER / "records.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(new)} records of {arguments.subset}, {len(rows)} in all")


if __name__ == "__main__":
    main()
