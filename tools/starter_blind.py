"""Blind readings of the starter set.

    python -m tools.starter_blind sheets records FILE --subset agentic --reader 1 --out FOLDER
    python -m tools.starter_blind read records FILE --subset agentic --answers ONE.json TWO.json
    python -m tools.starter_blind sheets pairs FILE --reader 1 --out FOLDER
    python -m tools.starter_blind read pairs FILE --answers ONE.json TWO.json

A sheet shows question, turns, memory and atoms in an order that is drawn for each reader, under
names that say nothing, and neither levels nor rubrics. Write sheets outside the repository.
Answers are {record: {atom: level}}; for pairs {answer: {atom: level or [level, stance]}}.
`read` prints kappas and disagreements; `--write` adds the rows to reading.json.
"""

import argparse
import json
import random
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np

from memcalib.evaluation.agreement import confusion, kappa
from memcalib.products.exam.minimal_pairs import MinimalPair, load_pairs, pair_answers
from memcalib.problem import Example, Level, Stance, blocks_by_atom, load_examples, text_hash
from tools.starter_pairs import records_for

FOLDER = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter"


@dataclass(frozen=True)
class Task:
    """One thing to read: a record, or an answer to one, under a name that says nothing."""

    name: str  # what the reader's answers call it
    example: Example
    response: str = ""  # empty for the ideal levels of a record


def drawn_blocks(task: Task, seed: int) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(text, time, [(name of the atom, atom id), ...]) of each block, blocks and atoms in drawn
    order.
    """
    generator = random.Random(f"{seed} {task.name}")
    blocks = list(task.example.blocks)
    generator.shuffle(blocks)
    drawn = []
    number = 0
    for block in blocks:
        atom_ids = list(block.atom_ids)
        generator.shuffle(atom_ids)
        names = []
        for atom_id in atom_ids:
            number += 1
            names.append((f"a{number:02}", atom_id))
        drawn.append((block.memory_text, block.time or "", names))
    return drawn


def atom_names(task: Task, seed: int) -> dict[str, str]:
    """Name of an atom on the sheet of this seed -> its id."""
    atom_ids = {}
    for _, _, names in drawn_blocks(task, seed):
        atom_ids.update(names)
    return atom_ids


def sheet_of(task: Task, seed: int) -> dict[str, Any]:
    """What a reader sees of one task."""
    memory = []
    for text, time, names in drawn_blocks(task, seed):
        block: dict[str, Any] = {"text": text}
        if time:
            block["time"] = time
        block["atoms"] = {name: task.example.atom(atom_id).text for name, atom_id in names}
        memory.append(block)
    shown: dict[str, Any] = {"name": task.name}
    if task.example.turns:
        shown["conversation before"] = [
            turn.model_dump(exclude_none=True) for turn in task.example.turns
        ]
    shown["question"] = task.example.question
    shown["memory"] = memory
    if task.response:
        shown["answer"] = task.response
    return shown


def record_tasks(file: Path, subset: str) -> list[Task]:
    """The records of a subset, under numbered names."""
    examples = []
    for example in load_examples(file):
        if not subset or (example.model_extra or {}).get("subset") == subset:
            examples.append(example)
    if not examples:
        raise SystemExit(f"{file}: no record of subset {subset!r}")
    return [Task(example.id, example) for example in examples]


def pair_tasks(pairs: list[MinimalPair], examples: list[Example]) -> dict[str, Task]:
    """Answer id -> task; a name is a hash, so that it tells neither the pair nor the side."""
    example_by_id = {example.id: example for example in examples}
    tasks = {}
    for pair in pairs:
        example = example_by_id[pair.example_id]
        for answer in pair_answers(pair, example):
            name = f"answer_{text_hash(answer.answer_id, 8)}"
            tasks[answer.answer_id] = Task(name, example, answer.response)
    return tasks


def in_two_rounds(tasks: dict[str, Task], seed: int) -> list[Task]:
    """Every pair has one answer in the first half and one in the second, drawn, so that the two are
    not read side by side.
    """
    generator = random.Random(seed)
    rounds: tuple[list[Task], list[Task]] = ([], [])
    pair_ids = list(dict.fromkeys(answer_id.rpartition(":")[0] for answer_id in tasks))
    for pair_id in pair_ids:
        sides = ["before", "after"]
        generator.shuffle(sides)
        for tasks_of_round, side in zip(rounds, sides, strict=True):
            tasks_of_round.append(tasks[f"{pair_id}:{side}"])
    for tasks_of_round in rounds:
        generator.shuffle(tasks_of_round)
    return [*rounds[0], *rounds[1]]


def write_sheets(tasks: list[Task], seed: int, out: Path, size: int) -> None:
    """Sheets of about so many atoms, and sheets.json, which says what they are of."""
    out.mkdir(parents=True, exist_ok=True)
    sheets: list[list[Task]] = [[]]
    for task in tasks:
        atoms = sum(len(other.example.atoms) for other in sheets[-1])
        if sheets[-1] and atoms + len(task.example.atoms) > size:
            sheets.append([])
        sheets[-1].append(task)
    for number, sheet in enumerate(sheets, 1):
        rows = [sheet_of(task, seed) for task in sheet]
        text = json.dumps(rows, indent=1, ensure_ascii=False)
        (out / f"sheet_{number:02}.json").write_text(text + "\n", encoding="utf-8")
    hashes = {task.name: text_hash(json.dumps(sheet_of(task, 0))) for task in tasks}
    described = {"seed": seed, "sheets": len(sheets), "hashes": hashes}
    (out / "sheets.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    print(f"{len(tasks)} to read, {len(sheets)} sheets, seed {seed}: {out}")


Said = dict[tuple[str, str], tuple[Level | None, str]]  # (task, atom id) -> level, stance


def read_answers(path: Path, tasks: list[Task]) -> Said:
    """The levels and stances of one reader's file, or folder of files; sheets.json beside them says
    with which seed.

    Raises `SystemExit` naming the record and atom for anything that does not fit the sheets.
    """
    folder = path if path.is_dir() else path.parent
    described = json.loads((folder / "sheets.json").read_text(encoding="utf-8"))
    files = sorted(path.glob("answers*.json")) if path.is_dir() else [path]
    answers: dict[str, Any] = {}
    for file in files:
        for name, levels in json.loads(file.read_text(encoding="utf-8")).items():
            if name in answers:
                raise SystemExit(f"{file}: {name} is answered in two files")
            answers[name] = levels
    readings: Said = {}
    faults = []
    for task in tasks:
        if task.name not in described["hashes"]:
            continue
        if described["hashes"][task.name] != text_hash(json.dumps(sheet_of(task, 0))):
            faults.append(f"{task.name}: changed since its sheet was written; not counted")
            continue
        names = atom_names(task, described["seed"])
        levels = answers.pop(task.name, {})
        for name in sorted(levels.keys() - names.keys()):
            faults.append(f"{task.name}: found atom {name!r}; allowed: {', '.join(names)}")
        for name, atom_id in names.items():
            level, stance = level_and_stance(levels.get(name))
            if level is None:
                faults.append(f"{task.name} {name}: found {levels.get(name)!r}; allowed: A, B, C")
            else:
                readings[task.name, atom_id] = level, stance
    faults += [f"{name}: not on the sheets of {folder}" for name in answers]
    print(f"{path}: {len(readings)} levels, {len(faults)} faults")
    for fault in faults[:40]:
        print(f"  {fault}")
    return readings


def level_and_stance(value: object) -> tuple[Level | None, str]:
    """What stands for one atom: "B", ["B", "follows"] or {"level": "B", "stance": "follows"}."""
    stance = ""
    if isinstance(value, dict):
        stance = str(value.get("stance") or "")
        value = value.get("level")
    elif isinstance(value, list) and value:
        stance = str(value[1] or "") if len(value) > 1 else ""
        value = value[0]
    if value not in ("A", "B", "C"):
        return None, ""
    return Level.parse(str(value)), stance if stance in get_args(Stance) else ""


def agreement_row(
    title: str, written: dict[tuple[str, str], Level], one: Said, two: Said
) -> dict[str, Any]:
    """One row of the table of agreement in reading.json."""
    both = [key for key in written if key in one and key in two]
    row: dict[str, Any] = {"labels": title, "atoms": f"{len(both):,}"}
    if not both:
        return row
    first = np.array([one[key][0] for key in both])
    second = np.array([two[key][0] for key in both])
    truth = np.array([written[key] for key in both])
    row["readers agree, %"] = f"{100 * (first == second).mean():.1f}"
    row["both as written, %"] = f"{100 * ((first == truth) & (second == truth)).mean():.1f}"
    row["kappa of the readers, linear"] = ""
    if len(np.unique(truth)) > 1:  # among atoms of one level kappa says nothing
        value = kappa(confusion(first, second), linear=True)
        row["kappa of the readers, linear"] = "" if np.isnan(value) else f"{value:.3f}"
    return row


def groups_of_records(examples: list[Example]) -> dict[str, dict[tuple[str, str], Level]]:
    """The written ideal levels of all atoms, and by level, kind, family and language."""
    groups: dict[str, dict[tuple[str, str], Level]] = {"all": {}}
    for example in examples:
        for atom in example.atoms:
            extra = atom.model_extra or {}
            titles = ["all", f"written as {atom.ideal.label}"]
            if extra.get("kind"):
                titles.append(extra["kind"])
            if extra.get("hard_a_family"):
                titles.append(extra["hard_a_family"].replace("_", " "))
            language = (example.model_extra or {}).get("language", "en")
            titles.append("English" if language == "en" else "other languages")
            for title in titles:
                groups.setdefault(title, {})[example.id, atom.atom_id] = atom.ideal
    return groups


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The rows as lines of a terminal."""
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))


def read_records(
    file: Path, subset: str, answers: list[Path], reading: str, out: Path | None
) -> list[dict[str, Any]]:
    """Agreement of two or more readers about ideal levels; atoms that not all read as written go to
    a file.
    """
    tasks = record_tasks(file, subset)
    readers = [read_answers(path, tasks) for path in answers]
    examples = [task.example for task in tasks]
    rows = []
    for one, two in combinations(readers, 2):
        for title, written in sorted(groups_of_records(examples).items()):
            row = agreement_row(f"ideal, {title}", written, one, two)
            rows.append({"reading": reading, **row})
    disputes = []
    for example in examples:
        block_of = blocks_by_atom(example)
        for atom in example.atoms:
            levels = [reader.get((example.id, atom.atom_id), (None, ""))[0] for reader in readers]
            if any(level is not None and level != atom.ideal for level in levels):
                disputes.append(
                    {
                        "id": example.id,
                        "atom": atom.atom_id,
                        "text": atom.text,
                        "block": block_of[atom.atom_id].memory_text,
                        "question": example.question,
                        "written": atom.ideal.wire,
                        "readers": [None if level is None else level.wire for level in levels],
                        "alternatives": [level.wire for level in atom.acceptable_levels[1:]],
                    }
                )
    print_rows(rows)
    against_all = sum(len({*d["readers"]}) == 1 for d in disputes)
    print(
        f"{len(disputes)} atoms of {len({d['id'] for d in disputes})} records were not read as "
        f"written by all; all readers say the same other level of {against_all}"
    )
    write_disputes(disputes, out)
    return rows


def read_pairs(
    file: Path, records: list[Path], answers: list[Path], reading: str, out: Path | None
) -> list[dict[str, Any]]:
    """Agreement of readers about the levels of the pairs' answers, and how many pairs each got
    right.
    """
    examples = records_for(records)
    pairs = load_pairs(file, examples)
    tasks = pair_tasks(pairs, examples)
    readers = [read_answers(path, list(tasks.values())) for path in answers]
    example_by_id = {example.id: example for example in examples}
    written: dict[str, dict[tuple[str, str], Level]] = {"all": {}, "edited": {}}
    disputes = []
    right = [Counter() for _ in readers]
    for pair in pairs:
        both = pair_answers(pair, example_by_id[pair.example_id])
        for answer in both:
            name = tasks[answer.answer_id].name
            for atom_id, level in answer.levels.items():
                written["all"][name, atom_id] = level
                written.setdefault(f"written as {level.label}", {})[name, atom_id] = level
            written["edited"][name, pair.edit.atom_id] = answer.levels[pair.edit.atom_id]
        for reader, counter in zip(readers, right, strict=True):
            outcome = pair_outcome(pair, both, tasks, reader)
            counter[pair.form, outcome] += 1
            counter["all", outcome] += 1
        levels_by_reader = []
        for reader in readers:
            levels_by_reader.append(
                [
                    reader.get((tasks[answer.answer_id].name, pair.edit.atom_id), (None, ""))
                    for answer in both
                ]
            )
        outcomes = [pair_outcome(pair, both, tasks, reader) for reader in readers]
        if any(outcome != "right" for outcome in outcomes):
            disputes.append(
                {
                    "pair": pair.pair_id,
                    "form": pair.form,
                    "direction": pair.edit.direction,
                    "outcomes": outcomes,
                    "atom": example_by_id[pair.example_id].atom(pair.edit.atom_id).text,
                    "passage": pair.edit.passage,
                    "replacement": pair.edit.replacement,
                    "why": pair.why,
                    "readers": [as_letters(levels) for levels in levels_by_reader],
                    "other atoms": other_differences(pair, both, tasks, readers),
                }
            )
    rows = []
    for one, two in combinations(readers, 2):
        for title, levels in sorted(written.items()):
            row = agreement_row(f"pairs, actual, {title}", levels, one, two)
            rows.append({"reading": reading, **row})
    print_rows(rows)
    for number, counter in enumerate(right, 1):
        for form in sorted({form for form, _ in counter}):
            listed = {outcome: count for (name, outcome), count in counter.items() if name == form}
            print(f"reader {number}, {form}: {listed}")
    write_disputes(disputes, out)
    return rows


def as_letters(levels: list[tuple[Level | None, str]]) -> list[tuple[str | None, str]]:
    """Levels and stances of one reader with the levels as letters, None where none was read."""
    letters: list[tuple[str | None, str]] = []
    for level, stance in levels:
        letters.append((None if level is None else level.wire, stance))
    return letters


def pair_outcome(pair: MinimalPair, both: tuple, tasks: dict[str, Task], reader: Said) -> str:
    """`right`, or what of a pair a reader did not get: `not read`, `edited atom`, `stance`, `other
    atoms`.
    """
    names = [tasks[answer.answer_id].name for answer in both]
    for answer, name in zip(both, names, strict=True):
        if any((name, atom_id) not in reader for atom_id in answer.levels):
            return "not read"
    stances = (pair.edit.stance_before, pair.edit.stance_after)
    for answer, name, stance in zip(both, names, stances, strict=True):
        level, said_stance = reader[name, pair.edit.atom_id]
        if level != answer.levels[pair.edit.atom_id]:
            return "edited atom"
        if pair.edit.direction == "stance" and said_stance != stance:
            return "stance"
    for atom_id in both[0].levels:
        if atom_id != pair.edit.atom_id:
            if reader[names[0], atom_id][0] != reader[names[1], atom_id][0]:
                return "other atoms"
    return "right"


def other_differences(
    pair: MinimalPair, both: tuple, tasks: dict[str, Task], readers: list[Said]
) -> list[str]:
    """The unedited atoms that a reader read otherwise than they are labelled."""
    lines = []
    for answer in both:
        name = tasks[answer.answer_id].name
        for atom_id, level in answer.levels.items():
            levels_read = [reader.get((name, atom_id), (None, ""))[0] for reader in readers]
            letters = ["?" if other is None else other.wire for other in levels_read]
            if atom_id != pair.edit.atom_id and any(x not in ("?", level.wire) for x in letters):
                side = answer.answer_id.rpartition(":")[2]
                lines.append(f"{side} {atom_id}: labelled {level.wire}, read {', '.join(letters)}")
    return lines


def write_disputes(disputes: list[dict[str, Any]], out: Path | None) -> None:
    """What was read otherwise, for the one who settles it."""
    if out is not None:
        out.write_text(json.dumps(disputes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(disputes)} disagreements: {out}")


def add_to_reading(rows: list[dict[str, Any]], subset: str) -> None:
    """Put the rows into reading.json in the place of earlier ones of the same reading; a subset
    counts as read from now on.
    """
    file = FOLDER / "reading.json"
    reading = json.loads(file.read_text(encoding="utf-8"))
    titles = {row["reading"] for row in rows}
    other_readings = [row for row in reading["agreement"] if row["reading"] not in titles]
    reading["agreement"] = other_readings + rows
    if subset and subset in reading.get("not_read", []):
        reading["not_read"].remove(subset)
    text = json.dumps(reading, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Write sheets, or read answers back."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("sheets", "read"))
    parser.add_argument("what", choices=("records", "pairs"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--records", type=Path, nargs="*", default=[])
    parser.add_argument("--subset", default="")
    parser.add_argument("--reader", type=int, default=1)
    parser.add_argument("--seed", type=int, default=20261126)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--atoms", type=int, default=160, help="about so many atoms on a sheet")
    parser.add_argument("--answers", type=Path, nargs="*", default=[])
    parser.add_argument("--reading", default="", help="title of the reading in the card")
    parser.add_argument("--write", action="store_true", help="add the rows to reading.json")
    arguments = parser.parse_args()
    reading = arguments.reading or arguments.subset or arguments.what
    if arguments.action == "sheets":
        if arguments.out is None:
            parser.error("--out: a folder outside the repository")
        if FOLDER.parents[2] in arguments.out.resolve().parents:
            parser.error(f"--out {arguments.out}: found a folder of the repository")
        seed = arguments.seed + arguments.reader
        if arguments.what == "records":
            tasks = record_tasks(arguments.file, arguments.subset)
            random.Random(seed).shuffle(tasks)
        else:
            examples = records_for(arguments.records)
            tasks = in_two_rounds(pair_tasks(load_pairs(arguments.file, examples), examples), seed)
        write_sheets(tasks, seed, arguments.out, arguments.atoms)
        return
    if len(arguments.answers) < 2:
        parser.error(f"--answers: found {len(arguments.answers)}; allowed: two or more")
    if arguments.what == "records":
        rows = read_records(
            arguments.file, arguments.subset, arguments.answers, reading, arguments.out
        )
    else:
        rows = read_pairs(
            arguments.file, arguments.records, arguments.answers, reading, arguments.out
        )
    if arguments.write:
        add_to_reading(rows, arguments.subset)


if __name__ == "__main__":
    main()
