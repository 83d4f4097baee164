"""Put new minimal pairs into the starter set:

    python -m tools.starter_add_pairs FILE --key KEY.json ... --readings ONE.jsonl ...

The pairs are checked, numbered on from the shipped ones without a gap, and written behind them.
Nothing is written where one pair is refused: its two answers are equal but for blanks; its edit
changes more than one passage; another atom than the edited one was read at one level in the first
answer and at another in the second, by all who read them; the atom that is edited was not read as
labelled by anybody; it is about a record, or says a text, that another pair has. Run
tools.starter_card afterwards.
"""

import argparse
import json
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

from memcalib.io.records import DataError
from memcalib.problem import Example, load_examples
from memcalib.products.exam.minimal_pairs import MinimalPair, load_pairs, pair_answers
from tools.starter_readings import ReadAnswers, read_answers, undisputed

FOLDER = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter"
LONGEST_KEPT = 30  # words that an edit may leave as they are between two of its changes
PAIRS_OF_RECORD = 4


def passage_words(text: str) -> list[str]:
    """The words of a passage; characters of Chinese and Japanese in pairs."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]{1,2}|[^\s\u3040-\u30ff\u3400-\u9fff]+", text)


def longest_kept(pair: MinimalPair) -> int:
    """How many words in a row the edit leaves as they are between two of its changes."""
    before = passage_words(pair.edit.passage)
    after = passage_words(pair.edit.replacement)
    longest = 0
    for match in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        at_start = match.a == 0 and match.b == 0
        at_end = match.a + match.size == len(before) and match.b + match.size == len(after)
        if not at_start and not at_end:
            longest = max(longest, match.size)
    return longest


def text_faults(pair: MinimalPair) -> list[str]:
    """What is wrong with the two texts of a pair."""
    before, after = pair.responses
    if before.split() == after.split():
        return [f"{pair.pair_id}: answers: found two that are equal; allowed: one passage differs"]
    kept = longest_kept(pair)
    if kept > LONGEST_KEPT:
        return [
            f"{pair.pair_id}: edit: found {kept} words in a row that stay as they are between two "
            f"changes; allowed: {LONGEST_KEPT}, or the edit changes more than one passage"
        ]
    return []


def reading_faults(pair: MinimalPair, example: Example, read: ReadAnswers) -> list[str]:
    """What readers found that keeps a pair out; nothing where an answer was not read."""
    answers = pair_answers(pair, example)
    readings = [read.of(answer.answer_id) for answer in answers]
    if not all(readings):
        return []
    faults = []
    edited = pair.edit.atom_id
    for answer, side in zip(answers, readings, strict=True):
        levels = {reading.level(edited) for reading in side}
        if answer.levels[edited] not in levels:
            found = ", ".join(sorted(level.wire for level in levels))
            faults.append(
                f"{answer.answer_id}: edited atom {edited}: labelled "
                f"{answer.levels[edited].wire}, found {found} by every reader"
            )
    for atom_id in undisputed(answers[0]):
        before, after = ({reading.level(atom_id) for reading in side} for side in readings)
        if atom_id != edited and len(before) == len(after) == 1 and before != after:
            faults.append(
                f"{pair.pair_id}: atom {atom_id}: read {before.pop().wire} in the first answer and "
                f"{after.pop().wire} in the second; allowed: the same in both"
            )
    return faults


def repeated(pairs: Iterable[MinimalPair]) -> list[str]:
    """Answers that two pairs have, and records that too many pairs are about."""
    faults = []
    pair_of_text: dict[str, str] = {}
    pairs_of_record: dict[str, list[str]] = {}
    for pair in pairs:
        pairs_of_record.setdefault(pair.example_id, []).append(pair.pair_id)
        for text in pair.responses:
            other = pair_of_text.setdefault(text, pair.pair_id)
            if other != pair.pair_id:
                faults.append(
                    f"{pair.pair_id}: answer: found a text of {other}; allowed: one that no other "
                    "pair has"
                )
    for record, pair_ids in pairs_of_record.items():
        if len(pair_ids) > PAIRS_OF_RECORD:
            faults.append(
                f"{record}: found {len(pair_ids)} pairs ({', '.join(pair_ids)}); allowed: "
                f"{PAIRS_OF_RECORD}"
            )
    return faults


def renumbered(pairs: Iterable[MinimalPair], first: int) -> list[MinimalPair]:
    """The pairs with ids that count on from a number."""
    return [
        pair.model_copy(update={"pair_id": f"pair_{number}"})
        for number, pair in enumerate(pairs, first)
    ]


def main() -> None:
    """Check new pairs and write them behind the shipped ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--key", type=Path, nargs="*", default=[])
    parser.add_argument("--readings", type=Path, nargs="*", default=[])
    parser.add_argument("--first", type=int, required=True, help="number of the first new pair")
    parser.add_argument("--write", action="store_true", help="write them into pairs.jsonl")
    arguments = parser.parse_args()
    examples = load_examples(FOLDER / "records.jsonl")
    example_by_id = {example.id: example for example in examples}
    try:
        shipped = load_pairs(FOLDER / "pairs.jsonl", examples)
        new = load_pairs(arguments.file, examples)
        answers = []
        for pair in new:
            answers += pair_answers(pair, example_by_id[pair.example_id])
        read = read_answers(answers, arguments.key, arguments.readings)
    except DataError as error:
        print("\n".join(str(violation) for violation in error.violations))
        raise SystemExit(f"{len(error.violations)} faults; nothing was written") from None
    faults = repeated([*shipped, *new])
    for pair in new:
        faults += text_faults(pair)
        faults += reading_faults(pair, example_by_id[pair.example_id], read)
    numbered = renumbered(new, arguments.first)
    taken = {pair.pair_id for pair in shipped}
    for pair in numbered:
        if pair.pair_id in taken:
            faults.append(f"{pair.pair_id}: found a shipped pair; allowed: a number that is free")
    if faults:
        print("\n".join(faults))
        raise SystemExit(f"{len(faults)} faults; nothing was written")
    unread = sum(not read.of(answer.answer_id) for answer in answers)
    print(f"{len(new)} pairs without a fault; {unread} of their answers were not read")
    if arguments.write:
        with (FOLDER / "pairs.jsonl").open("a", encoding="utf-8") as file:
            for pair in numbered:
                row = pair.model_dump(mode="json", by_alias=True, exclude_defaults=True)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
