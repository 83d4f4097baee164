"""Real answers of the starter set: who answers what, what readers see, and the file of it all.

    python -m tools.starter_real plan ATOMS.txt --out FOLDER     # a line: record and atom
    python -m tools.starter_real sheets FOLDER
    python -m tools.starter_real assemble FOLDER --readings ONE.jsonl TWO.jsonl ... [--write]

`plan` writes plan.jsonl and, for each run, prompts_RUN.jsonl: {item, messages}. A language model
answers one of them, from the prompts alone, into answers_RUN.jsonl: {item, answer}.
`sheets` writes two halves for blind readers, half_1.jsonl and half_2.jsonl, and key.json: an answer
beside query and whole memory, whether or not it was written with all of it. Both halves have
answers of every run and record.
A reading has a line for each item: {item, levels: {atom: B or C}, quotes: {atom: [words of the
answer]}, unsure, note}. `assemble` takes two readings of every answer: a level on which both agree
is the label, any other one is disputed. An atom that was removed before the answer was written is
at Ignore, and disputed where a reader found it. It prints how far the two readings agree, over all
labels, disputed ones included. `--write` writes real.jsonl into the starter set, and the agreement
into reading.json, for the card.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from memcalib.evaluation.agreement import confusion, kappa
from memcalib.io.records import DataError, Violation, iter_rows, read_jsonl, write_jsonl
from memcalib.problem import Example, Level, load_examples, text_hash
from memcalib.products.exam.exam import KnownAnswer, KnownLabel
from memcalib.products.exam.real_answers import (
    PlannedRecord,
    RealAnswer,
    certificates,
    check_real_answer,
    plan_real_answers,
    real_prompts,
)
from tools.starter_readings import AnswerReading, ReadAnswers, add_to_reading, read_answers

FOLDER = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter"


def write_plan(atoms_file: Path, out: Path, examples: dict[str, Example], runs: int) -> None:
    """The plan and the prompts of each run."""
    tested = []
    for line in atoms_file.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            example_id, atom_id = line.split()
            tested.append((example_id, atom_id))
    plan = plan_real_answers(tested, examples, runs)
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "plan.jsonl", plan)
    for run in range(1, runs + 1):
        lines = [
            json.dumps(prompt, ensure_ascii=False) for prompt in real_prompts(plan, examples, run)
        ]
        (out / f"prompts_{run}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(plan)} records, {runs} runs: {out}")


def written_answers(folder: Path, plan: Sequence[PlannedRecord]) -> list[RealAnswer]:
    """What the runs wrote, without labels.

    Raises `SystemExit` naming file and item for an answer that is missing, empty, written twice, or
    not in the plan.
    """
    planned_by_item = {planned.item: planned for planned in plan}
    answers = []
    faults = []
    for run in range(1, plan[0].runs + 1):
        file = folder / f"answers_{run}.jsonl"
        rows = [row for _, row in iter_rows(file) if isinstance(row, dict)]
        items = [row.get("item") for row in rows]
        for item in planned_by_item:
            if items.count(item) != 1:
                faults.append(f"{file}: {item}: found {items.count(item)} times; allowed: once")
        for row in rows:
            planned = planned_by_item.get(row.get("item"))
            response = row.get("answer")
            if planned is None or not isinstance(response, str) or not response.strip():
                faults.append(f"{file}: {row.get('item')}: not in the plan, or without an answer")
                continue
            answers.append(
                RealAnswer(
                    answer_id=f"{planned.item}_{run}",
                    example_id=planned.example_id,
                    run=run,
                    tested=planned.tested,
                    removed=run in planned.without,
                    response=response,
                    labels=[],
                )
            )
    if faults:
        raise SystemExit("\n".join(faults))
    return answers


def write_sheets(
    folder: Path, answers: Sequence[RealAnswer], examples: dict[str, Example], seed: int
) -> None:
    """Two halves for readers, and the key to both."""
    generator = random.Random(seed)
    key: dict[str, dict[str, str]] = {}
    halves: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for number, answer in enumerate(answers):
        example = examples[answer.example_id]
        item = f"item_{generator.randrange(10**6):06d}"
        while item in key:
            item = f"item_{generator.randrange(10**6):06d}"
        key[item] = {"answer_id": answer.answer_id, "hash": text_hash(answer.response)}
        texts = {atom.atom_id: atom.text for atom in example.atoms}
        row: dict[str, Any] = {"item": item, "query": example.question}
        if example.turns:
            row["conversation"] = [turn.model_dump(exclude_none=True) for turn in example.turns]
        row["memory"] = [
            [{"atom": atom_id, "text": texts[atom_id]} for atom_id in block.atom_ids]
            for block in example.blocks
        ]
        row["answer"] = answer.response
        of_record = number % len({each.example_id for each in answers})
        halves[(of_record + answer.run) % 2].append(row)
    for number, half in enumerate(halves, 1):
        generator.shuffle(half)
        lines = [json.dumps(row, ensure_ascii=False) for row in half]
        (folder / f"half_{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "key.json").write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")
    print(f"{len(halves[0])} and {len(halves[1])} answers to read: {folder}")


def quotes_of(readings: Sequence[Path], key: dict[str, dict[str, str]]) -> dict:
    """(answer id, atom id) -> the words that readers quoted."""
    quotes: dict[tuple[str, str], list[str]] = {}
    for file in readings:
        for _, row in iter_rows(file):
            if isinstance(row, dict) and row.get("item") in key:
                answer_id = key[row["item"]]["answer_id"]
                for atom_id, quoted in (row.get("quotes") or {}).items():
                    listed = [quoted] if isinstance(quoted, str) else list(quoted)
                    quotes.setdefault((answer_id, atom_id), []).extend(listed)
    return quotes


def label_of(
    answer: RealAnswer, atom_id: str, readings: Sequence[AnswerReading], quoted: Sequence[str]
) -> KnownLabel:
    """The label of one atom from two readings: disputed where they differ, or where a reader found
    an atom that was removed.
    """
    levels = [reading.level(atom_id) for reading in readings]
    if answer.removed and atom_id == answer.tested:
        return KnownLabel(atom_id=atom_id, actual=Level.IGNORE, disputed=any(levels))
    level = min(levels)
    kept = list(dict.fromkeys(quote for quote in quoted if quote in answer.response))
    if level and not kept:
        return KnownLabel(atom_id=atom_id, actual=Level.IGNORE, disputed=True)
    return KnownLabel(
        atom_id=atom_id,
        actual=level,
        quotes=kept[:3] if level else [],
        disputed=len(set(levels)) > 1,
    )


def agreement_table(answers: Sequence[RealAnswer], read: ReadAnswers) -> pd.DataFrame:
    """How far the two readings of each answer agree: a row for all atoms, for those that a reader
    calls used, and for the tested atom with and without it in the memory.

    `alike` is the percent of atoms with one level in both readings, `kappa` linear; the rest counts
    atoms by what the first and the second reading say.
    """
    rows = []
    for answer in answers:
        first, second = read.of(answer.answer_id)
        for label in answer.labels:
            is_tested = label.atom_id == answer.tested
            group = "tested, not in the memory" if answer.removed else "tested, in the memory"
            rows.append(
                {
                    "group": group if is_tested else "other",
                    "first": int(first.level(label.atom_id)),
                    "second": int(second.level(label.atom_id)),
                }
            )
    atoms = pd.DataFrame(rows)
    groups = {"all": atoms, "used by a reader": atoms[(atoms["first"] + atoms["second"]) > 0]}
    for name in ("tested, in the memory", "tested, not in the memory"):
        groups[name] = atoms[atoms["group"] == name]
    table = []
    for name, group in groups.items():
        alike = group["first"] == group["second"]
        counts = confusion(group["first"].to_numpy(), group["second"].to_numpy())
        line: dict[str, Any] = {"atoms": name, "number": len(group)}
        line["alike, %"] = round(100 * float(alike.mean()), 1)
        if name == "all":
            line["linear kappa"] = round(float(kappa(counts, linear=True)), 3)
        else:
            line["linear kappa"] = ""
        for one in Level:
            for two in Level:
                line[f"{one.wire}{two.wire}"] = int(counts[one, two])
        table.append(line)
    return pd.DataFrame(table)


def labelled(
    answers: Sequence[RealAnswer],
    examples: dict[str, Example],
    key_file: Path,
    reading_files: Sequence[Path],
) -> tuple[list[RealAnswer], ReadAnswers]:
    """The answers with the labels of their two readings, and the readings.

    Raises `SystemExit` naming each answer that was not read twice, and each atom above Ignore of
    which no reader quoted words that stand in the answer.
    """
    key = json.loads(key_file.read_text(encoding="utf-8"))
    bare = []
    for answer in answers:
        labels = [
            KnownLabel(atom_id=atom_id, actual=Level.IGNORE)
            for atom_id in examples[answer.example_id].levels
        ]
        bare.append(answer.model_copy(update={"labels": labels}))
    as_known: list[KnownAnswer] = list(bare)
    read = read_answers(as_known, [key_file], reading_files)
    quotes = quotes_of(reading_files, key)
    faults = []
    done = []
    for answer in bare:
        readings = read.of(answer.answer_id)
        if len(readings) != 2:
            faults.append(f"{answer.answer_id}: found {len(readings)} readings; allowed: two")
            continue
        labels = []
        for atom_id in examples[answer.example_id].levels:
            quoted = quotes.get((answer.answer_id, atom_id), [])
            labels.append(label_of(answer, atom_id, readings, quoted))
            used = min(reading.level(atom_id) for reading in readings) > 0
            if used and not labels[-1].actual and not (answer.removed and atom_id == answer.tested):
                faults.append(f"{answer.answer_id} {atom_id}: no quote that stands in the answer")
        done.append(answer.model_copy(update={"labels": labels}))
    if faults:
        raise SystemExit("\n".join(faults))
    return done, read


def main() -> None:
    """Write the plan, the sheets of readers, or the file of real answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("plan", "sheets", "assemble"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path, help="a folder outside the repository, for a plan")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=20261128)
    parser.add_argument("--readings", type=Path, nargs="*", default=[])
    parser.add_argument("--write", action="store_true", help="write real.jsonl")
    arguments = parser.parse_args()
    examples = {example.id: example for example in load_examples(FOLDER / "records.jsonl")}
    if arguments.action == "plan":
        if arguments.out is None:
            parser.error("--out: a folder outside the repository")
        write_plan(arguments.path, arguments.out, examples, arguments.runs)
        return
    plan = list(read_jsonl(arguments.path / "plan.jsonl", PlannedRecord))
    answers = written_answers(arguments.path, plan)
    if arguments.action == "sheets":
        write_sheets(arguments.path, answers, examples, arguments.seed)
        return
    try:
        done, read = labelled(answers, examples, arguments.path / "key.json", arguments.readings)
    except DataError as error:
        raise SystemExit("\n".join(str(violation) for violation in error.violations)) from None
    faults: list[Violation] = []
    for answer in done:
        faults += check_real_answer(answer, examples[answer.example_id])
    if faults:
        raise SystemExit("\n".join(str(fault) for fault in faults))
    table = certificates(done, examples.values())
    print(table.drop(columns="atom").to_string(index=False))
    print(f"{len(done)} answers; {table['decides'].sum()} of {len(table)} records decide")
    agreement = agreement_table(done, read)
    print(f"\nhow far the two readings agree\n{agreement.to_string(index=False)}")
    disputed = sum(label.disputed for answer in done for label in answer.labels)
    print(f"\n{disputed} of {agreement['number'].iloc[0]} labels are disputed")
    if arguments.write:
        write_jsonl(FOLDER / "real.jsonl", done)
        labels = f"{agreement['number'].iloc[0]:,} labels"
        line = f"{disputed} of {labels} were disputed after these readings"
        add_to_reading("the two readings of the real answers", {"agreement": agreement}, [line])


if __name__ == "__main__":
    main()
