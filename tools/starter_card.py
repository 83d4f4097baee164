"""Write card.md and hashes.json of the starter set from its files:  python tools/starter_card.py

Run it after every change of records.jsonl or answers.jsonl;
reading.json holds what the blind readings found.
"""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from memcalib.dataset.card import composition_table, count_examples, origin_table, structure_table
from memcalib.evaluation.exam import KnownAnswer, load_known_answers
from memcalib.io.runs import file_hash
from memcalib.problem import Example, Level, load_examples

FOLDER = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter"
CANARY = "memcalib starter set canary 8c1f6d52-0b7e-4b53-9a86-61f3a2c0d7e4"
HEAD = """---
license: apache-2.0
language: [en, de, es, zh]
tags: [memory, agents, evaluation]
---
# The starter set

> {records} records and {answers} answers with {labels:,} labelled atoms:
> to see how a model uses memory, and whether a judge can tell.

**Written and checked by a large language model. No person has read it yet.** A language model wrote
the records, the rubrics, the answers and their labels for this package, from no source. The numbers
on agreement below are the self-agreement of one language model; they are no evidence that people
would agree. `memcalib exam --sheet FILE` writes a sheet for a person to label, and
`memcalib exam --labels FILE` says how far a filled one agrees.

Do not train on this set. Data for training can be searched for its canary:

    {canary}

## What it is for

`memcalib evaluate` without data uses the records; `memcalib exam` has a judge read the answers. It
is small: the page nbs/evaluation/06_exam.ipynb says which differences {records} questions can show.
It is not the paper's benchmark, and scores on it cannot be compared with the paper's.
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

Before the sentences were worded anew it was right in 78.9 % (74.7 % by level) of the first guess
and 70.7 % (50.3 %) of the second. What is left is partly subject matter: an atom that counts often
names a limit or a thing to use.
"""


def as_json(row: Example | KnownAnswer) -> str:
    """A record without rubrics, or an answer, for the card."""
    found = json.loads(row.to_json())
    for atom in found.get("memories", ()):
        atom.pop("usage_rubric")
    return json.dumps(found, indent=1, ensure_ascii=False)


def grid(table: pd.DataFrame) -> str:
    """A frame as a Markdown table."""

    def line(cells):
        return "| " + " | ".join(str(cell).replace("--", "–") for cell in cells) + " |"

    return "\n".join(
        [
            line(table.columns),
            "|" + "---|" * len(table.columns),
            *map(line, table.itertuples(index=False)),
        ]
    )


def surface_cues(text: str) -> set[str]:
    """The words of a sentence, pairs of neighbours, and its opening; figures count as one word."""
    words = [
        "<start>",
        *re.findall(r"[a-z]+|#", re.sub(r"\d+", "#", text.lower().replace("'s", "s"))),
    ]
    return {*words, *(" ".join(pair) for pair in itertools.pairwise(words))}


def fit_levels(cues: csr_matrix, levels: np.ndarray, kinds: int, ridge: float = 3.0) -> np.ndarray:
    """Weights (cues + 1, kinds) of a logistic regression with an intercept and a ridge penalty."""
    wanted = np.eye(kinds)[levels]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(-1, kinds)
        scores = cues @ weights[:-1] + weights[-1]
        odds = np.exp(scores - scores.max(1, keepdims=True))
        odds /= odds.sum(1, keepdims=True)
        miss = odds - wanted
        slope = np.vstack([cues.T @ miss + ridge * weights[:-1], miss.sum(0)])
        return -np.log((odds * wanted).sum(1) + 1e-12).sum() + ridge / 2 * (
            weights[:-1] ** 2
        ).sum(), slope.ravel()

    return minimize(
        loss, np.zeros((cues.shape[1] + 1) * kinds), jac=True, method="L-BFGS-B"
    ).x.reshape(-1, kinds)


def surface_table(examples: list[Example]) -> pd.DataFrame:
    """How often the level of an atom in English is guessed from its form alone,
    each record left out in turn.
    """
    english = [e for e in examples if e.model_extra["language"] == "en"]
    rows = [(i, surface_cues(a.text), int(a.ideal)) for i, e in enumerate(english) for a in e.atoms]
    counts = Counter(cue for _, found, _ in rows for cue in found)
    place = {cue: k for k, cue in enumerate(sorted(cue for cue, n in counts.items() if n >= 3))}
    cells = [
        (row, place[cue])
        for row, (_, found, _) in enumerate(rows)
        for cue in sorted(found)
        if cue in place
    ]
    cues = csr_matrix(
        (np.ones(len(cells)), tuple(zip(*cells, strict=True))), shape=(len(rows), len(place))
    )
    fold = np.array([i for i, _, _ in rows])
    ideal = np.array([u for _, _, u in rows])
    found = []
    for what, levels in (("Ignore or not", np.minimum(ideal, 1)), ("three levels", ideal)):
        kinds = int(levels.max()) + 1
        guessed = np.zeros_like(levels)
        for k in range(len(english)):
            weights = fit_levels(cues[fold != k], levels[fold != k], kinds)
            guessed[fold == k] = (cues[fold == k] @ weights[:-1] + weights[-1]).argmax(1)
        shares = (np.bincount(levels).max() / len(levels), (guessed == levels).mean())
        shares = (
            *shares,
            np.mean([(guessed[levels == u] == u).mean() for u in range(kinds)]),
            1 / kinds,
        )
        found.append((what, len(levels), *(f"{100 * share:.1f}" for share in shares)))
    names = [
        "guess",
        "atoms",
        "largest level, %",
        "right, %",
        "right by level, %",
        "chance by level, %",
    ]
    return pd.DataFrame(found, columns=names)


def tables(examples: list[Example], answers: list[KnownAnswer]) -> list[tuple[str, pd.DataFrame]]:
    """Titles and tables of the card."""
    counts = count_examples(examples)
    pool = {e.id: e for e in examples}
    hard = [(a.model_extra or {}).get("hard_a_family") for e in examples for a in e.atoms]
    families = Counter(filter(None, hard))
    languages = Counter(e.model_extra["language"] for e in examples)
    profiles = Counter("".join(sorted({a.ideal.wire for a in e.atoms})) for e in examples)
    blocks = Counter(len(e.blocks) for e in examples)
    kinds = Counter((a.kind, a.trick or "") for a in answers)
    channels = Counter(
        (pool[a.example_id].levels[i], level) for a in answers for i, level in a.levels.items()
    )
    labelled = [[f"ideally {i.label}", *(f"{channels[i, a]:,}" for a in Level)] for i in Level]

    def frame(counter: Counter, *names: str) -> pd.DataFrame:
        rows = [
            (*(key if isinstance(key, tuple) else (key,)), n) for key, n in sorted(counter.items())
        ]
        return pd.DataFrame(rows, columns=[*names, "count"])

    return [
        ("Records, blocks, atoms", composition_table(counts, beside=False)),
        ("Structure", structure_table(counts, beside=False)),
        ("Atoms by origin", origin_table(counts)),
        ("Blocks of a record", frame(blocks, "blocks")),
        ("Levels that occur in a record", frame(profiles, "levels")),
        ("Languages", frame(languages, "language")),
        ("Families of hard distractors", frame(families, "family")),
        ("Answers", frame(kinds, "kind", "trick")),
        (
            "Labelled atoms by channel",
            pd.DataFrame(labelled, columns=["", *(f"actually {a.label}" for a in Level)]),
        ),
    ]


def main() -> None:
    """Check the files, then write card.md and hashes.json."""
    examples = load_examples(FOLDER / "records.jsonl")
    answers = load_known_answers(FOLDER / "answers.jsonl", examples)
    reading = json.loads((FOLDER / "reading.json").read_text(encoding="utf-8"))
    hashes = {name: file_hash(FOLDER / name) for name in ("records.jsonl", "answers.jsonl")}
    (FOLDER / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    labels = sum(len(a.labels) for a in answers)
    parts = [HEAD.format(records=len(examples), answers=len(answers), labels=labels, canary=CANARY)]
    parts += [f"### {title}\n\n{grid(table)}\n" for title, table in tables(examples, answers)]
    parts += [SURFACE.format(table=grid(surface_table(examples)))]
    parts += [GUIDE.format(record=as_json(examples[0]), answer=as_json(answers[0]))]
    parts += ["## How it was checked\n", *(f"{text}\n" for text in reading["text"])]
    parts += [
        grid(pd.DataFrame(reading["agreement"])) + "\n",
        "## Files\n",
        *(f"- `{name}`: SHA-256 `{value}`" for name, value in hashes.items()),
    ]
    (FOLDER / "card.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
