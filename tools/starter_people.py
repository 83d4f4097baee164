"""A sheet by which people label ideal levels of the starter set, and what came back.

    python -m tools.starter_people sheet --out FOLDER
    python -m tools.starter_people read FOLDER/sheet-1.csv FOLDER/sheet-2.csv

`sheet` draws 300 memories of 60 records, twelve of each subset, and writes instructions.md,
records.md and sheet.csv: send the three files. A person fills the column `level` with A, B, C, or a
question mark, and returns the sheet. `read` says how far each returned sheet agrees with the
written levels and with the others. No written level stands in what is sent.
"""

import argparse
import csv
import io
import random
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from memcalib.evaluation.agreement import confusion, kappa
from memcalib.problem import SUBSETS, Atom, Example, Level, load_examples

SEED = 20261127
COLUMNS = ("number", "record", "memory", "level", "note")
INSTRUCTIONS = """# How far should each memory count?

Thank you for reading. You will see {records} short requests to an assistant, and for each what a
memory system had stored about the person who asks. For {atoms} of these memories we ask one
question: **how far should a good answer to this request use it?** A language model wrote the
requests and memories; no person has read them before you, and we want to know whether you agree
with it. There is no trick. It takes some hours; stop and go on when you like.

## The three letters

- **A, ignore.** A good answer shows no trace of the memory: without it, every sentence would be the
  same. A memory can be true, close to the subject, and still be A: it is about another person or
  occasion, it no longer holds, or it gives nothing to this answer.
- **B, local.** The memory shapes a sentence, a detail or one item of the answer. The main line
  would be the same without it.
- **C, decisive.** The memory decides, narrows or orders what the answer mainly says. Health and
  safety limits are usually C, and so is whatever rules out the obvious answer.

What the person believes wrongly is A where nothing hangs on it, and B or C where a good answer has
to put it right. What was told in confidence can be B or C although it must not be said.

## How to do it

1. Open `records.md`. Read a record as a whole: the conversation before, where there is one, the
   request, and all its memories. Times stand beside them where they are known; the newest valid
   one counts.
2. Label the memories listed under it in `sheet.csv`, which has the same numbers: write A, B or C
   into the column `level`. Write `?` where you cannot decide; leave no line empty.
3. Where two letters can be defended, write the better one and name the other in `note`, with a word
   why. Remarks on facts, language or safety are welcome there too. A record in a language that you
   do not read gets `?` in all its lines.
4. Decide by yourself. Please talk with nobody who fills in the same sheet, and ask no language
   model.

## What to send back

`sheet.csv` alone, saved as CSV in UTF-8 under a name of your own such as `sheet-2.csv`, with its
{atoms} lines and five columns in place. A spreadsheet program may quote cells or use semicolons;
both are read.
"""


def drawn_atoms(
    examples: list[Example], count: int, seed: int = SEED
) -> list[tuple[Example, list[Atom]]]:
    """Records and the atoms of each that are to be labelled: five a record, two of them used where
    there are as many; records in equal numbers from each subset, all in drawn order.
    """
    generator = random.Random(seed)
    by_subset: dict[str, list[Example]] = {name: [] for name in SUBSETS}
    for example in examples:
        by_subset[(example.model_extra or {})["subset"]].append(example)
    per_subset = count // 5 // len(SUBSETS)
    drawn = []
    for subset in SUBSETS:
        for example in generator.sample(by_subset[subset], per_subset):
            used = [atom for atom in example.atoms if atom.ideal != Level.IGNORE]
            unused = [atom for atom in example.atoms if atom.ideal == Level.IGNORE]
            chosen = generator.sample(used, min(2, len(used)))
            chosen += generator.sample(unused, min(5 - len(chosen), len(unused)))
            remaining = [atom for atom in used if atom not in chosen]
            chosen += remaining[: 5 - len(chosen)]
            generator.shuffle(chosen)
            drawn.append((example, chosen))
    generator.shuffle(drawn)
    return drawn


def record_text(example: Example, first: int, atoms: list[Atom]) -> str:
    """What a person reads of one record; the memories to label are numbered from `first`."""
    generator = random.Random(f"{SEED} {example.id}")
    lines = [f"## Record {example.id}", ""]
    for turn in example.turns or ():
        time = f" ({turn.time})" if turn.time else ""
        lines += [f"*{turn.role}{time}:* {turn.content}", ""]
    lines += [f"**Request:** {example.question}", "", "What the memory holds:", ""]
    blocks = list(example.blocks)
    generator.shuffle(blocks)
    for block in blocks:
        time = f" (stored {block.time})" if block.time else ""
        texts = [example.atom(atom_id).text for atom_id in block.atom_ids]
        generator.shuffle(texts)
        lines.append(f"- {' / '.join(texts)}{time}")
    lines += ["", "To label:", ""]
    lines += [f"{number}. {atom.text}" for number, atom in enumerate(atoms, first)]
    return "\n".join(lines) + "\n"


def write_sheet(examples: list[Example], out: Path, count: int = 300) -> int:
    """Write instructions.md, records.md and sheet.csv; returns the number of atoms."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = drawn_atoms(examples, count)
    texts = []
    rows = []
    for example, atoms in drawn:
        texts.append(record_text(example, len(rows) + 1, atoms))
        for atom in atoms:
            rows.append((len(rows) + 1, example.id, atom.text, "", ""))
    instructions = INSTRUCTIONS.format(records=len(drawn), atoms=len(rows))
    (out / "instructions.md").write_text(instructions, encoding="utf-8")
    (out / "records.md").write_text("\n".join(texts), encoding="utf-8")
    with (out / "sheet.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return len(rows)


def read_sheet(path: Path, sheet_atoms: list[tuple[Example, Atom]]) -> list[Level | None]:
    """The levels of a returned sheet in the order of `sheet_atoms`, `None` for a question mark.

    Raises `SystemExit` with every line that cannot be read, or is about another memory than the one
    asked: file, line, value found, values allowed.
    """
    text = path.read_text(encoding="utf-8-sig")
    header = text.split("\n", 1)[0]
    delimiter = ";" if header.count(";") > header.count(",") else ","
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        allowed = ", ".join(COLUMNS)
        raise SystemExit(f"{path}:1: columns: found no {', '.join(missing)}; allowed: {allowed}")
    if len(rows) != len(sheet_atoms):
        raise SystemExit(f"{path}: found {len(rows)} memories; allowed: {len(sheet_atoms)}")
    faults = []
    levels: list[Level | None] = []
    for line, (row, (example, atom)) in enumerate(zip(rows, sheet_atoms, strict=True), 2):
        value = (row["level"] or "").strip().upper()
        if row["record"] != example.id or row["memory"] != atom.text:
            faults.append(
                f"{path}:{line}: memory: found {row['record']}, {row['memory']!r}; allowed: "
                f"{example.id}, {atom.text!r} (the order and text of the sheet that was sent)"
            )
        if value not in ("A", "B", "C", "?"):
            faults.append(f"{path}:{line}: level: found {row['level']!r}; allowed: A, B, C, ?")
        levels.append(Level.parse(value) if value in ("A", "B", "C") else None)
    if faults:
        raise SystemExit("\n".join(faults))
    return levels


def agreement_rows(
    title: str,
    written: list[Level | None],
    returned: list[Level | None],
    acceptable: list[set[Level]] | None = None,
) -> dict[str, str]:
    """One row of the table: pairs of levels, share alike, kappa; with `acceptable`, the share that
    names a level which can be defended.
    """
    both = [
        at for at in range(len(returned)) if returned[at] is not None and written[at] is not None
    ]
    row = {"levels": title, "pairs": str(len(both)), "undecided": str(len(returned) - len(both))}
    if not both:
        return row
    first = np.array([written[at] for at in both])
    second = np.array([returned[at] for at in both])
    row["alike, %"] = f"{100 * (first == second).mean():.1f}"
    if acceptable:
        defended = np.mean([returned[at] in acceptable[at] for at in both])
        row["alike or named, %"] = f"{100 * defended:.1f}"
    value = kappa(confusion(first, second), linear=True)
    row["kappa, linear"] = "" if np.isnan(value) else f"{value:.3f}"
    return row


def agreement_table(examples: list[Example], files: Iterable[Path], count: int) -> pd.DataFrame:
    """Each sheet against the written levels, in all, by level and by subset; then the sheets
    against each other.
    """
    sheet_atoms: list[tuple[Example, Atom]] = []
    for example, atoms in drawn_atoms(examples, count):
        sheet_atoms += [(example, atom) for atom in atoms]
    levels_of_file = {path.name: read_sheet(path, sheet_atoms) for path in files}
    rows = []
    for name, levels in levels_of_file.items():
        groups: dict[str, list[int]] = {"all": list(range(len(sheet_atoms)))}
        for at, (example, atom) in enumerate(sheet_atoms):
            subset = (example.model_extra or {})["subset"]
            groups.setdefault(f"written as {atom.ideal.label}", []).append(at)
            groups.setdefault(subset, []).append(at)
        for group, positions in groups.items():
            rows.append(
                agreement_rows(
                    f"{name}: {group}",
                    [sheet_atoms[at][1].ideal for at in positions],
                    [levels[at] for at in positions],
                    [set(sheet_atoms[at][1].acceptable_levels) for at in positions],
                )
            )
    for one, two in combinations(levels_of_file, 2):
        rows.append(agreement_rows(f"{one} and {two}", levels_of_file[one], levels_of_file[two]))
    return pd.DataFrame(rows).fillna("")


def main() -> None:
    """Write the files to send, or read returned sheets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("sheet", "read"))
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, default=Path("people"))
    parser.add_argument("--atoms", type=int, default=300)
    arguments = parser.parse_args()
    examples = load_examples("starter")
    if arguments.action == "sheet":
        written = write_sheet(examples, arguments.out, arguments.atoms)
        print(
            f"{written} memories to label: {arguments.out}/instructions.md, records.md, sheet.csv"
        )
        return
    if not arguments.files:
        parser.error("read: found no file; allowed: one or more filled sheets")
    print(agreement_table(examples, arguments.files, arguments.atoms).to_string(index=False))


if __name__ == "__main__":
    main()
