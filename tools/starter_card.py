"""Write card.md and hashes.json of the starter set from its files:  python -m tools.starter_card

Run it after every change of records.jsonl, answers.jsonl, pairs.jsonl or real.jsonl;
reading.json holds what the blind readings found.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from memcalib.products.dataset.card import (
    composition_table,
    count_examples,
    origin_table,
    structure_table,
)
from memcalib.evaluation.disputed import disputed_atoms
from memcalib.products.exam.exam import KnownAnswer, load_known_answers
from memcalib.products.exam.minimal_pairs import load_pairs
from memcalib.products.exam.real_answers import starter_real_answers
from memcalib.io.runs import file_hash
from memcalib.metrics import score
from memcalib.problem import Example, Level, judgment_for, load_examples
from tools.starter_differences import SPREAD
from tools.starter_exam_card import exam_section
from tools.starter_pairs import pairs_section

FOLDER = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter"
AIM = 65.0  # % balanced that words, place, block and length may tell of used or ignored
CANARY = "memcalib starter set canary 8c1f6d52-0b7e-4b53-9a86-61f3a2c0d7e4"
HEAD = """---
license: apache-2.0
language: [{languages}]
tags: [memory, agents, evaluation]
---
# The starter set

> {records} records and {answers} answers with {labels:,} labelled atoms:
> to see how a model uses memory, and whether a judge can tell.

**Written and checked by a large language model. No person has read it yet.** A language model wrote
the records, the rubrics, the answers and their labels for this package, from no source. The numbers
on agreement below are the self-agreement of one language model; they are no evidence that people
would agree. For people: `python -m tools.starter_people sheet --out FOLDER` writes a sheet of 300 drawn
memories whose ideal level is to be labelled, with instructions, ready to send, and `read` compares
what comes back; `memcalib exam --sheet FILE` and `--labels FILE` do the same for actual levels.

Do not train on this set. Data for training can be searched for its canary:

    {canary}

## What it is for

`memcalib evaluate` without data uses all records (`starter`); `starter:NAME` is one subset
(`starter:core` the first {core}), and `--quick` 60 drawn evenly over the subsets. A report has a row
for each subset. `memcalib exam` has a judge read the answers, all of which belong to core records,
and pairs about records of every subset. The set is small: *Which differences it shows* says what to
expect. It is not the paper's benchmark, and scores on it cannot be compared with the paper's.
{unread}"""


UNREAD = """
**Not yet read blind: {subsets}.** Nobody but their writer, a language model, has read these {count}
records; their ideal levels are one reader's opinion. That is why the core records are the default, and
why a report on the others says so. What stands below under *How it was checked* is about the core records.
"""


DISPUTED = """### Disputed levels

Two ideal levels can be defended for {atoms} atoms of {records} records; {named} of these atoms name the other level with
its reason (`alternative`), any others are only marked `disputed`. No person has decided between them. `memcalib evaluate` gives the metrics under the first
reading, under the best of both and without these atoms, and says where that makes a difference. A model that is perfect under
the other reading of every disputed atom has an SCS of {scs:.1f} and an Exact of {exact:.1f} under the first.
"""


DIFFERENCES = """### Which differences it shows

Two practice models of each SCS answer every record with three seeds (`python -m
tools.starter_differences`): ± is half the width of the 95 % interval of SCS (questions resampled), and
*difference* the smallest true difference of two such models that is found four times in five at the
5 % level, paired by question. The models are simulated: an atom is moved to another level at a
rate that differs by record (log-normal, standard deviation {spread}) and either is alike for all atoms (*errors
anywhere*) or, for Ignore, half as high in hard distractors and a twentieth in other atoms (*errors
by kind*). Models that fail on questions of their own, as real ones do, need somewhat more.

{table}
"""


GUIDE = """## How to read it

The levels: **Ignore** (A) leaves no trace in a good answer, **Bound** (B) gives bounded local
support, **Control** (C) decides what the answer mainly says. An atom is *grounded* (a fact the
question may call for), *auxiliary* (belongs to its paragraph, of no use to the question), *noise*
(a paragraph of unrelated facts), or *hard*, a distractor of a family: same user, near topic, other
person, other occasion, outdated, belief offered as evidence, scope overreached, superseded
preference, neighbour in style, trigger absent. A paragraph with atoms of several ideal levels is a
mixed-target block. Tricks of adversarial answers: an atom used by implication; a use denied; a
quote that steers nothing; a use inside code; memory followed against the query; words to the judge.

A record (without its rubrics) and one of its answers:

```json
{record}
```

```json
{answer}
```

```bash
memcalib show starter starter_general_001     # a record as a card
memcalib evaluate --model M --base-url URL --judge J
memcalib exam --judge J
```
"""


SURFACE = """### Does the form of a sentence tell its level?

A distractor must not be known by its wording. A logistic regression on words, neighbouring words
and the opening of each atom in English, without query, memory or rubric, guesses the levels of
records that it was not fitted to:

{table}

Before the core sentences were worded anew it was right in 78.9 % (74.7 % by level) of the first guess
and 70.7 % (50.3 %) of the second. What is left is partly subject matter: an atom that counts often
names a limit or a thing to use. Before free records of the second edition were edited
(*How it was checked*), the first guess was right in 66.3 % by level.

That fit is drawn to Ignore, the largest level. Fitted so that used (Bound or Control) and ignored
weigh the same, in all languages, a logistic regression tells them apart as follows, in % right
balanced over the two (chance: 50). *Words* are those of the atom; *place, block, length* are the
atom's place in its block, the size, place, time rank and mean length of the block, and the atom's
length, alone and against its block and record. The last column is fitted to the group's own
records alone.

{form}

*Subset alone* is what knowing a record's subset tells, without a look at the memory: an atom of a core
record counts far more often than one of a long record. No wording can undo that part.

The aim is at most 65.0 % by both; it is {verdict}. Before any edits both told 77.5 %, after a first round 71.9 %
(words 68.3 %, place, block and length 65.7 %; by subset 69.9 to 81.4 % and 68.8 to 73.6 %). In a second round 1,156 Ignore
atoms got another fact in the shape of an atom that counts in another record, 170 a detail more, and
491 used atoms were said in other words (*How it was checked*). What is left is mostly
words that go with subject matter: core records, fitted to themselves, still tell about 75 %.
"""


def as_json(row: Example | KnownAnswer) -> str:
    """A record without rubrics, or an answer, for the card."""
    fields = json.loads(row.to_json())
    for atom in fields.get("memories", ()):
        atom.pop("usage_rubric")
    return json.dumps(fields, indent=1, ensure_ascii=False)


def grid(table: pd.DataFrame) -> str:
    """A frame as a Markdown table."""
    rows = [list(table.columns), *table.itertuples(index=False)]
    lines = []
    for row in rows:
        cells = [str(cell).replace("--", "–") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|" + "---|" * len(table.columns))
    return "\n".join(lines)


def surface_cues(text: str) -> set[str]:
    """The words of a sentence, pairs of neighbours, and its opening; figures count as one word."""
    plain = re.sub(r"\d+", "#", text.lower().replace("'s", "s"))
    words = ["<start>", *re.findall(r"[a-z]+|#", plain)]
    pairs = [" ".join(pair) for pair in pairwise(words)]
    return {*words, *pairs}


def word_cues(text: str) -> set[str]:
    """The cues of a sentence in any language: those of `surface_cues`, and for East Asian scripts each
    character and each pair of neighbouring characters.
    """
    plain = re.sub(r"\d+", "#", text.lower().replace("'s", "s"))
    cues = set()
    words = ["<start>"]
    for run in re.findall(r"[^\W_]+|#", plain):
        if re.search(r"[\u3040-\u30ff\u3400-\u9fff]", run):
            cues.update(run)
            cues.update(first + second for first, second in pairwise(run))
        else:
            words.append(run)
    pairs = [" ".join(pair) for pair in pairwise(words)]
    return {*cues, *words, *pairs}


def binned(value: float, edges: list[float]) -> int:
    """The number of edges at or below the value."""
    return sum(value >= edge for edge in edges)


def form_cues(example: Example) -> dict[str, set[str]]:
    """For each atom of a record where it stands and how long it is, in bins: position in the block, size
    of the block, place of the block, rank of the block by time and by score, length in characters,
    and length against the mean of the block and of the record.
    """
    blocks = example.blocks
    text_by_id = {atom.atom_id: atom.text for atom in example.atoms}
    record_mean = np.mean([len(text) for text in text_by_id.values()])
    by_time = sorted({block.time for block in blocks if block.time}, reverse=True)
    by_score = sorted({block.score for block in blocks if block.score is not None}, reverse=True)
    cues_by_id = {}
    for number, block in enumerate(blocks):
        atom_ids = block.atom_ids
        block_mean = np.mean([len(text_by_id[atom_id]) for atom_id in atom_ids])
        of_block = {
            f"<size {min(len(atom_ids), 7)}>",
            f"<block {min(number, 5)}>",
            f"<blocks behind {min(len(blocks) - 1 - number, 5)}>",
            f"<time {min(by_time.index(block.time), 5) if block.time else 'none'}>",
            f"<score {by_score.index(block.score) if block.score is not None else 'none'}>",
            f"<block text {binned(block_mean / record_mean, [0.8, 0.9, 1.0, 1.1, 1.25])}>",
        }
        for position, atom_id in enumerate(atom_ids):
            length = len(text_by_id[atom_id])
            ratio_edges = [0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.8]
            cues_by_id[atom_id] = {
                *of_block,
                f"<place {min(position, 5)}>",
                f"<places behind {min(len(atom_ids) - 1 - position, 5)}>",
                f"<length {binned(length, [20, 30, 40, 50, 60, 75, 90, 110, 140])}>",
                f"<against block {binned(length / block_mean, ratio_edges)}>",
                f"<against record {binned(length / record_mean, ratio_edges)}>",
            }
    return cues_by_id


def fit_levels(
    cues: csr_matrix, levels: np.ndarray, kinds: int, ridge: float = 3.0, evenly: bool = False
) -> np.ndarray:
    """Weights (cues + 1, kinds) of a logistic regression with an intercept and a ridge penalty;
    fitted evenly, every level weighs the same in all.
    """
    targets = np.eye(kinds)[levels]
    weight_by_level = np.ones(kinds)
    if evenly:
        weight_by_level = len(levels) / kinds / np.maximum(np.bincount(levels, minlength=kinds), 1)
    atom_weights = weight_by_level[levels][:, None]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(-1, kinds)
        scores = cues @ weights[:-1] + weights[-1]
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        error = atom_weights * (shares - targets)
        gradient = np.vstack([cues.T @ error + ridge * weights[:-1], error.sum(0)])
        log_likelihood = (atom_weights[:, 0] * np.log((shares * targets).sum(1) + 1e-12)).sum()
        penalty = ridge / 2 * (weights[:-1] ** 2).sum()
        return penalty - log_likelihood, gradient.ravel()

    start = np.zeros((cues.shape[1] + 1) * kinds)
    fitted = minimize(loss, start, jac=True, method="L-BFGS-B")
    return fitted.x.reshape(-1, kinds)


def cue_matrix(cues_by_atom: list[set[str]]) -> csr_matrix:
    """Which cue stands in which atom, (atoms, cues); cues of fewer than three atoms are left
    out.
    """
    counts = Counter()
    for cues in cues_by_atom:
        counts.update(cues)
    frequent = sorted(cue for cue, count in counts.items() if count >= 3)
    column_by_cue = {cue: column for column, cue in enumerate(frequent)}
    rows = []
    columns = []
    for row, cues in enumerate(cues_by_atom):
        for cue in sorted(cues & column_by_cue.keys()):
            rows.append(row)
            columns.append(column_by_cue[cue])
    shape = (len(cues_by_atom), len(column_by_cue))
    return csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)


def guessed_levels(
    cues: csr_matrix, record: np.ndarray, levels: np.ndarray, evenly: bool = False
) -> np.ndarray:
    """The level of each atom as guessed from the atoms of nine tenths of the records, its own not
    among them.
    """
    kinds = int(levels.max()) + 1
    guessed = np.zeros_like(levels)
    for fold in range(10):
        is_left_out = record % 10 == fold
        weights = fit_levels(cues[~is_left_out], levels[~is_left_out], kinds, evenly=evenly)
        scores = cues[is_left_out] @ weights[:-1] + weights[-1]
        guessed[is_left_out] = scores.argmax(1)
    return guessed


def surface_table(examples: list[Example]) -> pd.DataFrame:
    """How often the level of an atom in English is guessed from its form alone, a tenth of the
    records left out in turn.
    """
    english = [example for example in examples if example.model_extra["language"] == "en"]
    cues_by_atom = []
    record_of_atom = []
    ideal_of_atom = []
    for number, example in enumerate(english):
        for atom in example.atoms:
            cues_by_atom.append(surface_cues(atom.text))
            record_of_atom.append(number)
            ideal_of_atom.append(int(atom.ideal))
    cues = cue_matrix(cues_by_atom)
    record = np.array(record_of_atom)
    ideal = np.array(ideal_of_atom)
    rows = []
    for guess, levels in (("Ignore or not", np.minimum(ideal, 1)), ("three levels", ideal)):
        guessed = guessed_levels(cues, record, levels)
        kinds = int(levels.max()) + 1
        right_by_level = [(guessed[levels == level] == level).mean() for level in range(kinds)]
        shares = {
            "largest level, %": np.bincount(levels).max() / len(levels),
            "right, %": (guessed == levels).mean(),
            "right by level, %": np.mean(right_by_level),
            "chance by level, %": 1 / kinds,
        }
        row = {"guess": guess, "atoms": len(levels)}
        for name, share in shares.items():
            row[name] = f"{100 * share:.1f}"
        rows.append(row)
    return pd.DataFrame(rows)


def balanced_share(guessed: np.ndarray, levels: np.ndarray) -> float:
    """Mean over Ignore and the rest of the share guessed right."""
    return np.mean([(guessed[levels == level] == level).mean() for level in (0, 1)])


def cues_of_atoms(
    examples: list[Example],
) -> Iterator[tuple[int, Example, bool, set[str], set[str]]]:
    """For each atom the number of its record, the record, whether it counts (Bound or Control), its
    cues of words and its cues of form.
    """
    for number, example in enumerate(examples):
        form_by_id = form_cues(example)
        for atom in example.atoms:
            is_used = atom.ideal != Level.IGNORE
            yield number, example, is_used, word_cues(atom.text), form_by_id[atom.atom_id]


def form_table(examples: list[Example]) -> pd.DataFrame:
    """How often used (Bound or Control) is told from ignored, balanced over the two, by the subset
    alone and by three sets of cues: words, form (place, block, length), and both; one model for all
    records, fitted evenly, a tenth of the records left out in turn; and by both, fitted to the
    group's own records alone.
    """
    cue_sets = {"subset alone": [], "words": [], "place, block, length": [], "both": []}
    rows_of_group = {}
    record_of_atom = []
    used_of_atom = []
    for number, example, is_used, words, form in cues_of_atoms(examples):
        subset = example.model_extra["subset"]
        language = "English" if example.model_extra["language"] == "en" else "other languages"
        cue_sets["subset alone"].append({f"<subset {subset}>"})
        cue_sets["words"].append(words)
        cue_sets["place, block, length"].append(form)
        cue_sets["both"].append(words | form)
        groups = ["all", language, subset]
        if subset != "core" and language == "English":
            groups.append(f"{subset}, English")
        for group in groups:
            rows_of_group.setdefault(group, []).append(len(record_of_atom))
        record_of_atom.append(number)
        used_of_atom.append(int(is_used))
    record = np.array(record_of_atom)
    used = np.array(used_of_atom)
    matrices = {name: cue_matrix(cues) for name, cues in cue_sets.items()}
    guesses = {}
    for name, cues in matrices.items():
        guesses[name] = guessed_levels(cues, record, used, evenly=True)
    rows = []
    first = ["all", "English", "other languages"]
    for group in sorted(rows_of_group, key=lambda name: first.index(name) if name in first else 3):
        atoms = rows_of_group[group]
        row = {"records": group, "atoms": f"{len(atoms):,}"}
        for name, guessed in guesses.items():
            row[name] = f"{100 * balanced_share(guessed[atoms], used[atoms]):.1f}"
        own_guesses = guesses["both"][atoms]
        if group != "all":
            own_guesses = guessed_levels(
                matrices["both"][atoms], record[atoms], used[atoms], evenly=True
            )
        row["both, own records"] = f"{100 * balanced_share(own_guesses, used[atoms]):.1f}"
        rows.append(row)
    return pd.DataFrame(rows)


def told_by_foldings(examples: list[Example], seeds: range) -> list[float]:
    """`both` of `form_table` for all records, % balanced, where other tenths are left out in turn: the
    records are numbered in an order drawn with each seed.
    """
    cues_by_atom = []
    record_of_atom = []
    used_of_atom = []
    for number, _, is_used, words, form in cues_of_atoms(examples):
        cues_by_atom.append(words | form)
        record_of_atom.append(number)
        used_of_atom.append(int(is_used))
    cues = cue_matrix(cues_by_atom)
    used = np.array(used_of_atom)
    shares = []
    for seed in seeds:
        drawn_number = np.random.default_rng(seed).permutation(len(examples))
        guessed = guessed_levels(cues, drawn_number[record_of_atom], used, evenly=True)
        shares.append(100 * balanced_share(guessed, used))
    return shares


def count_table(counts: Counter, *names: str) -> pd.DataFrame:
    """Counts in the order of their keys; a key that is a tuple fills several columns."""
    rows = []
    for key, count in sorted(counts.items()):
        values = key if isinstance(key, tuple) else (key,)
        rows.append((*values, count))
    return pd.DataFrame(rows, columns=[*names, "count"])


def channel_table(examples: list[Example], answers: list[KnownAnswer]) -> pd.DataFrame:
    """Labelled atoms by ideal level (rows) and actual one (columns)."""
    example_by_id = {example.id: example for example in examples}
    channels = Counter()
    for answer in answers:
        ideal_levels = example_by_id[answer.example_id].levels
        for atom_id, actual in answer.levels.items():
            channels[ideal_levels[atom_id], actual] += 1
    rows = []
    for ideal in Level:
        row = {"": f"ideally {ideal.label}"}
        for actual in Level:
            row[f"actually {actual.label}"] = f"{channels[ideal, actual]:,}"
        rows.append(row)
    return pd.DataFrame(rows)


def subset_table(examples: list[Example]) -> pd.DataFrame:
    """Size and shape of each subset, and of all."""
    of_subset = {}
    for example in examples:
        of_subset.setdefault(example.model_extra["subset"], []).append(example)
    rows = []
    for subset, records in {**of_subset, "all": examples}.items():
        atoms = list(chain.from_iterable(example.atoms for example in records))
        ignored = sum(atom.ideal == Level.IGNORE for atom in atoms)
        other = sum(example.model_extra["language"] != "en" for example in records)
        rows.append(
            {
                "subset": subset,
                "records": len(records),
                "atoms": f"{len(atoms):,}",
                "atoms a record": f"{len(atoms) / len(records):.1f}",
                "blocks a record": f"{sum(len(e.blocks) for e in records) / len(records):.1f}",
                "Ignore, %": f"{100 * ignored / len(atoms):.1f}",
                "with turns": sum(bool(example.turns) for example in records),
                "not in English": other,
            }
        )
    return pd.DataFrame(rows)


def tables(examples: list[Example], answers: list[KnownAnswer]) -> list[tuple[str, pd.DataFrame]]:
    """Titles and tables of the card."""
    counts = count_examples(examples)
    families = Counter()
    profiles = Counter()
    for example in examples:
        profiles["".join(sorted({atom.ideal.wire for atom in example.atoms}))] += 1
        for atom in example.atoms:
            family = (atom.model_extra or {}).get("hard_a_family")
            if family:
                families[family] += 1
    languages = Counter(example.model_extra["language"] for example in examples)
    blocks = Counter(len(example.blocks) for example in examples)
    kinds = Counter((answer.kind, answer.trick or "") for answer in answers)
    return [
        ("Subsets", subset_table(examples)),
        ("Records, blocks, atoms", composition_table(counts, beside=False)),
        ("Structure", structure_table(counts, beside=False)),
        ("Atoms by origin", origin_table(counts)),
        ("Blocks of a record", count_table(blocks, "blocks")),
        ("Levels that occur in a record", count_table(profiles, "levels")),
        ("Languages", count_table(languages, "language")),
        ("Families of hard distractors", count_table(families, "family")),
        ("Answers", count_table(kinds, "kind", "trick")),
        ("Labelled atoms by channel", channel_table(examples, answers)),
    ]


def disputed_text(examples: list[Example]) -> str:
    """What the card says of disputed levels, with the score of a model that takes the other reading
    of each.

    An atom that does not name another level is read one level higher, or lower where it is at
    Control.
    """
    disputed = disputed_atoms(examples)
    judgments = []
    for example in examples:
        levels = dict(example.levels)
        for atom_id, ideal in example.levels.items():
            if (example.id, atom_id) in disputed:
                other = disputed[example.id, atom_id][1:]
                levels[atom_id] = other[0] if other else Level(1 if ideal != Level.BOUND else 2)
        judgments.append(judgment_for(example, levels))
    scores = score(judgments, resamples=10).iloc[0]
    return DISPUTED.format(
        atoms=len(disputed),
        records=len({example_id for example_id, _ in disputed}),
        named=sum(len(levels) > 1 for levels in disputed.values()),
        scs=scores["SCS"],
        exact=scores["Exact"],
    )


def main() -> None:
    """Check the files, then write card.md and hashes.json."""
    examples = load_examples(FOLDER / "records.jsonl")
    answers = load_known_answers(FOLDER / "answers.jsonl", examples)
    reading = json.loads((FOLDER / "reading.json").read_text(encoding="utf-8"))
    hashed = ("records.jsonl", "answers.jsonl", "pairs.jsonl", "real.jsonl")
    hashes = {name: file_hash(FOLDER / name) for name in hashed if (FOLDER / name).is_file()}
    (FOLDER / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    labels = sum(len(answer.labels) for answer in answers)
    unread = reading.get("not_read", [])
    unread_records = sum(example.model_extra["subset"] in unread for example in examples)
    said_unread = UNREAD.format(subsets=", ".join(unread), count=unread_records)
    counts = {
        "records": len(examples),
        "answers": len(answers),
        "labels": labels,
        "core": sum(example.model_extra["subset"] == "core" for example in examples),
        "languages": ", ".join(sorted({e.model_extra["language"] for e in examples})),
        "unread": said_unread if unread else "",
    }
    sections = [HEAD.format(**counts, canary=CANARY)]
    for title, table in tables(examples, answers):
        sections.append(f"### {title}\n\n{grid(table)}\n")
    sections.append(disputed_text(examples))
    differences = grid(pd.DataFrame(reading["differences"]))
    sections.append(DIFFERENCES.format(table=differences, spread=SPREAD))
    surface = grid(surface_table(examples))
    form = form_table(examples)
    told = form.set_index("records").loc["all", "both"]
    others = told_by_foldings(examples, range(5))
    verdict = "reached" if float(told) <= AIM and max(others) <= AIM else "missed"
    verdict += (
        f" ({told} %; {min(others):.1f} to {max(others):.1f} % where other tenths are left out)"
    )
    sections.append(SURFACE.format(table=surface, form=grid(form), verdict=verdict))
    sections.append(GUIDE.format(record=as_json(examples[0]), answer=as_json(answers[0])))
    sections.append("## How it was checked\n")
    sections += [f"{text}\n" for text in reading["text"]]
    sections.append(grid(pd.DataFrame(reading["agreement"])) + "\n")
    pairs = load_pairs(FOLDER / "pairs.jsonl", examples)
    sections.append(pairs_section(pairs, examples, reading, grid))
    real = starter_real_answers(examples)
    sections.append(exam_section(pairs, real, answers, examples, reading, grid))
    sections.append("## Files\n")
    sections += [f"- `{name}`: SHA-256 `{value}`" for name, value in hashes.items()]
    (FOLDER / "card.md").write_text("\n".join(sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
