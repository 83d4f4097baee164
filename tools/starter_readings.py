"""Blind readings of answers against the labels that were written for them:

    python -m tools.starter_readings LABELS.jsonl ... --key KEY.json ... --readings ONE.jsonl ...

LABELS hold minimal pairs or known answers. KEY says what each item of a reading is:
{item: {"pair_id": ..., "side": "before" or "after"}} or {item: {"answer_id": ...}}. A reading has a
line for each item: {"item", "levels": {atom: "B" or "C"}, "unsure": [atom], "note"}; an atom
without a level is at Ignore. Each file of readings is one reader's. Where several readers read
an answer, they count in the order of the files. An entry of the key may have a "hash" of the answer
that was read (`text_hash`); an answer that was changed since is not counted as read.

It prints how many pairs were read right, by form, language and direction, what was read at each
level, and how far readers agree; `--out` lists every answer that somebody read otherwise than it is
labelled. Readings of other items than those of LABELS are left out and counted. `--write TITLE`
puts the tables into reading.json, for the card.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from memcalib.evaluation.agreement import confusion, kappa, wilson
from memcalib.io.records import DataError, Violation, iter_rows, short_repr
from memcalib.problem import Example, Level, load_examples, text_hash
from memcalib.products.exam.exam import KnownAnswer, load_known_answers
from memcalib.products.exam.minimal_pairs import MinimalPair, load_pairs, pair_answers

SHIPPED = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter" / "records.jsonl"


@dataclass(frozen=True)
class AnswerReading:
    """What one reader said of one answer; an atom that is not in `levels` is at Ignore."""

    reader: str
    levels: dict[str, Level]
    unsure: frozenset[str] = frozenset()
    note: str = ""

    def level(self, atom_id: str) -> Level:
        """The level that was read."""
        return self.levels.get(atom_id, Level.IGNORE)


@dataclass
class ReadAnswers:
    """Known answers by id, and what readers said of each, in the order of their files."""

    answers: dict[str, KnownAnswer]
    readings: dict[str, list[AnswerReading]] = field(default_factory=dict)
    left_out: int = 0  # readings of items whose answers are not at hand
    changed: int = 0  # readings of answers that were changed since

    def of(self, answer_id: str) -> list[AnswerReading]:
        """The readings of an answer; none where nobody read it."""
        return self.readings.get(answer_id, [])


def answer_hash(answer: KnownAnswer) -> str:
    """By which a key says what text was read."""
    return text_hash(answer.response)


def answer_id_of(entry: dict[str, str]) -> str:
    """The answer that an entry of the key stands for."""
    if "answer_id" in entry:
        return entry["answer_id"]
    return f"{entry['pair_id']}:{entry['side']}"


def read_answers(
    answers: Iterable[KnownAnswer], key_files: Iterable[Path], reading_files: Sequence[Path]
) -> ReadAnswers:
    """Every reading beside its answer.

    Raises `DataError` with every fault of the files: an item that is not in the key or is read
    twice by one reader, an atom that the answer's record does not have, a level other than A, B, C.
    """
    key: dict[str, dict[str, str]] = {}
    for file in key_files:
        key.update(json.loads(file.read_text(encoding="utf-8")))
    read = ReadAnswers({answer.answer_id: answer for answer in answers})
    faults = []
    for file in reading_files:
        items_so_far: set[str] = set()
        for line, row in iter_rows(file):
            if isinstance(row, Violation):
                faults.append(row)
                continue
            item = row.get("item")
            if item not in key or item in items_so_far:
                allowed = "an item of the key" if item not in key else "an item once"
                faults.append(
                    Violation("item", short_repr(item), allowed, line=line, file=str(file))
                )
                continue
            items_so_far.add(item)
            answer_id = answer_id_of(key[item])
            if answer_id not in read.answers:
                read.left_out += 1
                continue
            answer = read.answers[answer_id]
            if key[item].get("hash", answer_hash(answer)) != answer_hash(answer):
                read.changed += 1
                continue
            row_faults = _reading_faults(row, answer)
            faults += [
                Violation(name, found, allowed, item, line=line, file=str(file))
                for name, found, allowed in row_faults
            ]
            if not row_faults:
                reading = AnswerReading(
                    file.stem,
                    {atom: Level.parse(level) for atom, level in row["levels"].items()},
                    frozenset(row.get("unsure") or ()),
                    row.get("note") or "",
                )
                read.readings.setdefault(answer_id, []).append(reading)
    if faults:
        raise DataError(faults)
    return read


def _reading_faults(row: dict[str, Any], answer: KnownAnswer) -> list[tuple[str, str, str]]:
    """(field, found, allowed) of what cannot be read in a line."""
    levels = row.get("levels")
    if not isinstance(levels, dict):
        return [("levels", short_repr(levels), "an object of atom id and level")]
    atom_ids = ", ".join(answer.levels)
    faults = []
    for atom_id, level in levels.items():
        if atom_id not in answer.levels:
            faults.append(("levels", short_repr(atom_id), f"one of {atom_ids}"))
        if level not in ("A", "B", "C"):
            faults.append((f"level of {atom_id}", short_repr(level), "A, B, C"))
    for atom_id in row.get("unsure") or ():
        if atom_id not in answer.levels:
            faults.append(("unsure", short_repr(atom_id), f"one of {atom_ids}"))
    return faults


def undisputed(answer: KnownAnswer) -> dict[str, Level]:
    """Atom id -> level of the labels that are not disputed."""
    return {label.atom_id: label.actual for label in answer.labels if not label.disputed}


PAIR_COLUMNS = ("changed", "unchanged", "right")


def pair_outcome(
    pair: MinimalPair,
    before: KnownAnswer,
    after: KnownAnswer,
    readings: tuple[AnswerReading, AnswerReading],
) -> dict[str, bool]:
    """Whether the edited atom was read as it is in both answers, every other one alike in the two,
    and both. Disputed atoms do not count. Stances are not read.
    """
    edited = pair.edit.atom_id
    changed = True
    for answer, reading in zip((before, after), readings, strict=True):
        changed = changed and reading.level(edited) == answer.levels[edited]
    others = [atom_id for atom_id in undisputed(before) if atom_id != edited]
    unchanged = all(readings[0].level(atom_id) == readings[1].level(atom_id) for atom_id in others)
    return {"changed": changed, "unchanged": unchanged, "right": changed and unchanged}


def pair_rows(
    pairs: Sequence[MinimalPair], examples: dict[str, Example], read: ReadAnswers
) -> pd.DataFrame:
    """A row for each pair and each time that both its answers were read: the n-th reading of one
    beside the n-th of the other.
    """
    rows = []
    for pair in pairs:
        example = examples[pair.example_id]
        before, after = pair_answers(pair, example)
        both = zip(read.of(before.answer_id), read.of(after.answer_id), strict=False)
        for number, readings in enumerate(both, 1):
            rows.append(
                {
                    "pair": pair.pair_id,
                    "form": pair.form,
                    "language": pair.language or (example.model_extra or {}).get("language", ""),
                    "direction": pair.edit.direction,
                    "reading": number,
                    **pair_outcome(pair, before, after, readings),
                }
            )
    columns = ["pair", "form", "language", "direction", "reading", *PAIR_COLUMNS]
    return pd.DataFrame(rows, columns=columns)


def pairs_table(rows: pd.DataFrame, by: str | None = None) -> pd.DataFrame:
    """Percent of pairs right with Wilson bounds, in each reading and in all of them: a row for each
    value of a column, or one for all pairs.
    """
    groups = [("all", rows)] if by is None else list(rows.groupby(by))
    table = []
    for name, group in groups:
        line: dict[str, Any] = {by or "pairs": name, "pairs read": group["pair"].nunique()}
        for number, reading in group.groupby("reading"):
            line[f"right, reading {number}"] = share_text(reading["right"])
            line[f"edited atom right, reading {number}"] = share_text(reading["changed"])
        right_in_all = group.groupby("pair")["right"].all()
        line["right in every reading"] = share_text(right_in_all)
        table.append(line)
    return pd.DataFrame(table)


def share_text(flags: "pd.Series") -> str:
    """A share in percent with its Wilson bounds."""
    low, high = wilson(int(flags.sum()), len(flags))
    return f"{100 * flags.mean():.1f} ({low:.0f} to {high:.0f})"


def atom_rows(read: ReadAnswers) -> pd.DataFrame:
    """A row for each undisputed atom of each reading: labelled level, level read, and whether the
    reader was unsure.
    """
    rows = []
    for answer_id, answer in read.answers.items():
        for number, reading in enumerate(read.of(answer_id), 1):
            for atom_id, level in undisputed(answer).items():
                rows.append(
                    {
                        "answer": answer_id,
                        "atom": atom_id,
                        "reading": number,
                        "labelled": int(level),
                        "read": int(reading.level(atom_id)),
                        "unsure": atom_id in reading.unsure,
                    }
                )
    return pd.DataFrame(rows, columns=["answer", "atom", "reading", "labelled", "read", "unsure"])


def levels_table(atoms: pd.DataFrame) -> pd.DataFrame:
    """For each labelled level: atoms read, percent read as each level, percent unsure; and for all
    atoms that are used by their label.
    """
    groups: list[tuple[str, pd.DataFrame]] = []
    for level in Level:
        groups.append((level.label, atoms[atoms["labelled"] == level]))
    groups.append(("used (Bound or Control)", atoms[atoms["labelled"] > 0]))
    groups.append(("all", atoms))
    table = []
    for name, group in groups:
        if group.empty:
            continue
        line: dict[str, Any] = {"labelled": name, "atoms read": len(group)}
        line["as labelled, %"] = round(100 * (group["read"] == group["labelled"]).mean(), 1)
        for level in Level:
            line[f"read {level.label}, %"] = round(100 * (group["read"] == level).mean(), 1)
        line["unsure, %"] = round(100 * group["unsure"].mean(), 1)
        table.append(line)
    return pd.DataFrame(table)


def agreement_lines(atoms: pd.DataFrame) -> list[str]:
    """How far each reading agrees with the labels and readings with each other, as lines: atoms,
    percent alike, linear kappa.
    """
    lines = []
    for number, reading in atoms.groupby("reading"):
        lines.append(
            _agreement(f"reading {number} and labels", reading["labelled"], reading["read"])
        )
    if atoms["reading"].nunique() > 1:
        both = atoms.pivot(index=["answer", "atom"], columns="reading", values="read").dropna()
        if len(both):
            lines.append(_agreement("readings 1 and 2", both[1].astype(int), both[2].astype(int)))
    return lines


def _agreement(title: str, one: pd.Series, two: pd.Series) -> str:
    first = np.asarray(one)
    second = np.asarray(two)
    value = kappa(confusion(first, second), linear=True)
    alike = 100 * (first == second).mean()
    return f"{title}: {len(first):,} atoms, {alike:.1f} % alike, linear kappa {value:.3f}"


def disagreements(
    read: ReadAnswers, examples: dict[str, Example], edited: dict[str, str]
) -> list[dict[str, Any]]:
    """Every answer that somebody read otherwise than it is labelled, with the atoms in question.

    `edited` is the atom that the edit of a pair changes, by answer id.
    """
    found = []
    for answer_id, answer in read.answers.items():
        readings = read.of(answer_id)
        atoms = []
        for label in answer.labels:
            levels = [reading.level(label.atom_id) for reading in readings]
            if all(level == label.actual for level in levels):
                continue
            atoms.append(
                {
                    "atom": label.atom_id,
                    "text": examples[answer.example_id].atom(label.atom_id).text,
                    "ideal": examples[answer.example_id].levels[label.atom_id].wire,
                    "labelled": label.actual.wire,
                    "disputed": label.disputed,
                    "edited": edited.get(answer_id) == label.atom_id,
                    "read": [
                        level.wire + ("?" if label.atom_id in reading.unsure else "")
                        for level, reading in zip(levels, readings, strict=True)
                    ],
                }
            )
        notes = [f"{reading.reader}: {reading.note}" for reading in readings if reading.note]
        if atoms:
            found.append(
                {
                    "answer": answer_id,
                    "example": answer.example_id,
                    "readers": [reading.reader for reading in readings],
                    "atoms": atoms,
                    "notes": notes,
                }
            )
    return found


def load_labels(
    files: Iterable[Path], examples: Sequence[Example]
) -> tuple[list[MinimalPair], list[KnownAnswer]]:
    """The minimal pairs and the known answers of files of either kind, told by their first line."""
    pairs: list[MinimalPair] = []
    answers: list[KnownAnswer] = []
    for file in files:
        first = next((row for _, row in iter_rows(file) if isinstance(row, dict)), {})
        if "pair_id" in first:
            pairs += load_pairs(file, examples)
        else:
            answers += load_known_answers(file, examples)
    return pairs, answers


def main() -> None:
    """Print the tables; write the disagreements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--key", type=Path, nargs="+", required=True)
    parser.add_argument("--readings", type=Path, nargs="+", required=True)
    parser.add_argument("--records", type=Path, default=SHIPPED)
    parser.add_argument("--out", type=Path, help="a file for the list of disagreements")
    parser.add_argument("--write", metavar="TITLE", help="put the tables into reading.json")
    arguments = parser.parse_args()
    examples = load_examples(arguments.records)
    example_by_id = {example.id: example for example in examples}
    try:
        pairs, answers = load_labels(arguments.labels, examples)
        edited = {}
        for pair in pairs:
            for answer in pair_answers(pair, example_by_id[pair.example_id]):
                answers.append(answer)
                edited[answer.answer_id] = pair.edit.atom_id
        read = read_answers(answers, arguments.key, arguments.readings)
    except DataError as error:
        print("\n".join(str(violation) for violation in error.violations))
        raise SystemExit(f"{len(error.violations)} faults") from None
    times_read = Counter(len(read.of(answer_id)) for answer_id in read.answers)
    print(
        f"answers by times read: {dict(sorted(times_read.items()))}; readings left out: "
        f"{read.left_out}, of answers changed since: {read.changed}"
    )
    tables = tables_of(pairs, example_by_id, read, edited)
    for name, table in tables.items():
        print(f"\n{name}\n{table.to_string(index=False)}")
    lines = agreement_lines(atom_rows(read))
    print("\n" + "\n".join(lines))
    if arguments.write:
        add_to_reading(arguments.write, tables, lines)
    found = disagreements(read, example_by_id, edited)
    print(f"\n{len(found)} answers were read otherwise than labelled by somebody")
    if arguments.out:
        text = json.dumps(found, indent=1, ensure_ascii=False)
        arguments.out.write_text(text + "\n", encoding="utf-8")
        print(f"listed in {arguments.out}")


def tables_of(
    pairs: Sequence[MinimalPair],
    examples: dict[str, Example],
    read: ReadAnswers,
    edited: dict[str, str],
) -> dict[str, pd.DataFrame]:
    """All tables of a reading by name; those of pairs only where there are pairs."""
    tables = {}
    rows = pair_rows(pairs, examples, read)
    if len(rows):
        for by in (None, "form", "language", "direction"):
            tables[by or "pairs"] = pairs_table(rows, by)
    atoms = atom_rows(read)
    tables["levels"] = levels_table(atoms)
    is_edited = [
        edited.get(answer) == atom
        for answer, atom in zip(atoms["answer"], atoms["atom"], strict=True)
    ]
    if any(is_edited):
        tables["levels of edited atoms"] = levels_table(atoms[is_edited])
    return tables


def add_to_reading(title: str, tables: dict[str, pd.DataFrame], lines: Sequence[str]) -> None:
    """Put the tables of a reading into reading.json, in the place of earlier ones of the title."""
    file = SHIPPED.parent / "reading.json"
    reading = json.loads(file.read_text(encoding="utf-8"))
    entry: dict[str, Any] = {"agreement": list(lines)}
    entry["tables"] = {name: table.to_dict("records") for name, table in tables.items()}
    reading.setdefault("blind_readings", {})[title] = entry
    text = json.dumps(reading, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
