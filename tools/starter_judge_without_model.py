"""The strongest judge without a language model that was found, on the minimal pairs of the starter
set:

    python -m tools.starter_judge_without_model [--write]

It measures each atom against an answer (words, n-grams of characters, place, rarity, negation,
other atoms of the record), and boosted trees learn the levels from the answers to other records:
those of the exam, those of other pairs and real ones. It prints what it read right; `--write` puts
the tables into reading.json, for the card.
The trees are written in numpy, as the package depends on no library of trees.
"""

import argparse
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from memcalib.products.exam.exam import KnownAnswer, starter_answers
from memcalib.products.exam.minimal_pairs import (
    HARD_FORMS,
    MinimalPair,
    pair_answers,
    starter_pairs,
)
from memcalib.products.exam.real_answers import RealAnswer, starter_real_answers
from memcalib.problem import Example, blocks_by_atom

READING = Path(__file__).resolve().parents[1] / "memcalib" / "data" / "starter" / "reading.json"
TITLES = {
    "atom and answer alone, levels alike": False,
    "the same, and the ideal levels of the atoms": True,
}  # title -> whether the ideal levels are shown
SEED = 20261126
FOLDS = 5
STANCES = ("follows", "turns_down", "corrects", "misreads")
EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")
PIECE = re.compile(r"(?<=[.!?:;])\s+|\n+|(?<=[。！？；])")
NEGATION = re.compile(
    r"\b(no|not|never|n't|without|instead|but|although|however|rather|leave out|nicht|kein\w*|ohne|"
    r"sondern|aber|no|sin|pero|sino|ne|pas|sans|mais|não|sem|mas)\b|n't|不|没|ない|ません",
    re.I,
)
ADDRESS = re.compile(
    r"\b(your?|you've|since|because|as you|so that|dein\w*|du|ihr\w*|weil|da|tu|su|porque|ta|ton|"
    r"tes|vous|votre|puisque|car|você|sua|seu|pois)\b|您|你|因为|ので|あなた",
    re.I,
)


@dataclass
class Text:
    """What is compared of a piece of text."""

    words: Counter = field(default_factory=Counter)
    grams: Counter = field(default_factory=Counter)


def words_of(text: str) -> list[str]:
    """Words in small letters, cut after eight letters so that endings count less; characters of
    Chinese and Japanese one by one.
    """
    return [word[:8] for word in WORD.findall(text.lower())]


def text_of(text: str) -> Text:
    """Words and n-grams of four characters."""
    words = words_of(text)
    joined = " " + " ".join(words) + " "
    grams = Counter(joined[start : start + 4] for start in range(len(joined) - 3))
    return Text(Counter(words), grams)


@dataclass
class Rarity:
    """How rare a word or n-gram is among atoms and answers."""

    counts: Counter
    documents: int

    @classmethod
    def of(cls, texts: list[Counter]) -> "Rarity":
        """Count in how many texts each occurs."""
        counts: Counter = Counter()
        for text in texts:
            counts.update(text.keys())
        return cls(counts, len(texts))

    def weight(self, token: str) -> float:
        """Logarithm of the inverse share of texts that have it."""
        return float(np.log((self.documents + 1) / (self.counts[token] + 0.5)))

    def shared(self, atom: Counter, other: Counter) -> float:
        """Share of the atom's weight that the other text has as well, from 0 to 1."""
        total = 0.0
        both = 0.0
        for token in atom:
            weight = self.weight(token)
            total += weight
            if token in other:
                both += weight
        return both / total if total else 0.0


@dataclass
class Answer:
    """An answer cut into pieces, with what is asked once of it."""

    text: Text
    pieces: list[Text]
    is_heading: list[bool]
    is_code: list[bool]
    raw: list[str]


def answer_of(response: str) -> Answer:
    """Cut an answer at line ends and sentence ends; say which pieces are headings, bold or code."""
    pieces = []
    raw = []
    is_heading = []
    is_code = []
    inside_code = False
    for line in response.split("\n"):
        if line.strip().startswith("```"):
            inside_code = not inside_code
            continue
        for piece in PIECE.split(line):
            if piece and piece.strip():
                raw.append(piece)
                pieces.append(text_of(piece))
                is_heading.append(line.startswith("#") or "**" in piece)
                is_code.append(inside_code)
    return Answer(text_of(response), pieces, is_heading, is_code, raw)


def features(
    example: Example, response: str, word_rarity: Rarity, gram_rarity: Rarity
) -> dict[str, list[float]]:
    """Numbers for each atom of an example with this answer."""
    answer = answer_of(response)
    turns = " ".join(turn.content for turn in example.turns or ())
    question = text_of(f"{example.question} {turns}")
    atoms = {atom.atom_id: text_of(atom.text) for atom in example.atoms}
    block_of = blocks_by_atom(example)
    count = len(answer.pieces)
    by_words = {}
    by_grams = {}
    for atom_id, atom in atoms.items():
        by_words[atom_id] = [word_rarity.shared(atom.words, p.words) for p in answer.pieces]
        by_grams[atom_id] = [gram_rarity.shared(atom.grams, p.grams) for p in answer.pieces]
    combined = {a: np.array(by_words[a]) + np.array(by_grams[a]) for a in atoms}
    matrix = np.array([combined[a] for a in atoms])  # (atoms, pieces)
    best_of_atom = matrix.max(axis=1)
    own_words_of_answer = word_rarity.shared(question.words, answer.text.words)
    rows = {}
    for number, (atom_id, atom) in enumerate(atoms.items()):
        words = np.sort(by_words[atom_id])[::-1]
        grams = np.sort(by_grams[atom_id])[::-1]
        best = int(combined[atom_id].argmax())
        others = np.delete(matrix[:, best], number)
        rivals = others.max() if len(others) else 0.0
        beyond = Counter({w: 1 for w in atom.words if w not in question.words})
        beyond_grams = Counter({g: 1 for g in atom.grams if g not in question.grams})
        in_best = [w for w in atom.words if w in answer.pieces[best].words]
        rare = sorted(
            (word_rarity.weight(w) for w in beyond if w in answer.text.words), key=lambda x: -x
        )
        rare_missing = sorted(
            (word_rarity.weight(w) for w in beyond if w not in answer.text.words), key=lambda x: -x
        )
        figures = [w for w in atom.words if w.isdigit()]
        neighbours = answer.raw[max(0, best - 1) : best + 2]
        block = block_of[atom_id]
        mates = [m for m in block.atom_ids if m != atom_id]
        mate_best = max((best_of_atom[list(atoms).index(m)] for m in mates), default=0.0)
        strong = combined[atom_id] > 0.5
        headings = combined[atom_id][np.array(answer.is_heading)]
        code = combined[atom_id][np.array(answer.is_code)]
        start = combined[atom_id][: max(1, count // 5)]
        beyond_by_piece = [word_rarity.shared(beyond, p.words) for p in answer.pieces]
        grams_beyond = sorted(
            (gram_rarity.shared(beyond_grams, p.grams) for p in answer.pieces), reverse=True
        )
        windows = [
            gram_rarity.shared(atom.grams, answer.pieces[i].grams + answer.pieces[i + 1].grams)
            for i in range(count - 1)
        ] or [0.0]
        rows[atom_id] = [
            word_rarity.shared(atom.words, answer.text.words),
            gram_rarity.shared(atom.grams, answer.text.grams),
            word_rarity.shared(beyond, answer.text.words),
            gram_rarity.shared(beyond_grams, answer.text.grams),
            word_rarity.shared(atom.words, question.words),
            gram_rarity.shared(atom.grams, question.grams),
            words[0],
            words[1] if count > 1 else 0.0,
            words[2] if count > 2 else 0.0,
            grams[0],
            grams[1] if count > 1 else 0.0,
            grams[2] if count > 2 else 0.0,
            max(beyond_by_piece),
            grams_beyond[0],
            grams_beyond[1] if count > 1 else 0.0,
            max(windows),
            best / count,
            combined[atom_id][best] - rivals,
            float((best_of_atom > best_of_atom[number]).sum()),
            float((best_of_atom > best_of_atom[number]).mean()),
            best_of_atom[number] - np.median(best_of_atom),
            best_of_atom[number] - best_of_atom.max(),
            float(strong.sum()),
            float(strong.mean()),
            headings.max() if len(headings) else 0.0,
            code.max() if len(code) else 0.0,
            start.max(),
            combined[atom_id][0],
            rare[0] if rare else 0.0,
            sum(rare[:3]),
            rare_missing[0] if rare_missing else 0.0,
            sum(rare_missing[:3]),
            float(len(rare)),
            float(len(in_best)),
            float(len(figures)),
            float(sum(w in answer.text.words for w in figures)),
            float(sum(w in answer.pieces[best].words for w in figures)),
            float(len(NEGATION.findall(answer.raw[best]))),
            float(sum(len(NEGATION.findall(piece)) for piece in neighbours)),
            float(len(ADDRESS.findall(answer.raw[best]))),
            float(sum(len(ADDRESS.findall(piece)) for piece in neighbours)),
            float(len(NEGATION.findall(example.atom(atom_id).text))),
            float(len(answer.pieces[best].words)),
            float(answer.is_heading[best]),
            float(answer.is_code[best]),
            float(len(atom.words)),
            max(word_rarity.weight(w) for w in atom.words),
            float(np.mean([word_rarity.weight(w) for w in atom.words])),
            float(len(atoms)),
            float(len(example.blocks)),
            float(list(atoms).index(atom_id) / len(atoms)),
            float(len(mates)),
            mate_best,
            float(sum(answer.text.words.values())),
            float(count),
            float("```" in response),
            own_words_of_answer,
            float(matrix.max(axis=0).mean()),
        ]
    return rows


BINS = 32


def fit_trees(
    x: np.ndarray,
    y: np.ndarray,
    weights: np.ndarray,
    kinds: int,
    rounds: int,
    depth: int,
    seed: int,
) -> tuple[list, np.ndarray]:
    """Gradient boosting: a tree for each kind and round, on binned features (rows, features).

    Returns trees and the edges of the bins. Rate 0.08; each round sees 70 % of the rows and half of
    the features.
    """
    generator = np.random.default_rng(seed)
    edges = np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1], axis=0)  # (BINS - 1, features)
    binned = binned_features(x, edges)
    scores = np.zeros((len(x), kinds))
    target = np.eye(kinds)[y]
    trees = []
    for _ in range(rounds):
        exponent = np.exp(scores - scores.max(1, keepdims=True))
        shares = exponent / exponent.sum(1, keepdims=True)
        rows = np.flatnonzero(generator.random(len(x)) < 0.7)
        columns = generator.choice(x.shape[1], x.shape[1] // 2, replace=False)
        trees_of_round = []
        for kind in range(kinds):
            gradient = (shares[:, kind] - target[:, kind]) * weights
            curvature = np.maximum(shares[:, kind] * (1 - shares[:, kind]), 1e-4) * weights
            tree = fit_tree(binned, gradient, curvature, rows, columns, depth)
            trees_of_round.append(tree)
            scores[:, kind] += tree_values(tree, binned)
        trees.append(trees_of_round)
    return trees, edges


def binned_features(x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Bin of each value, (rows, features)."""
    binned = np.empty(x.shape, np.int64)
    for column in range(x.shape[1]):
        binned[:, column] = np.searchsorted(edges[:, column], x[:, column], side="right")
    return binned


def fit_tree(
    binned: np.ndarray,
    gradient: np.ndarray,
    curvature: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    depth: int,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """A tree of a fixed depth: for each level the feature of each node and the last bin to its
    left, and the values of the leaves.
    """
    penalty = 5.0
    node = np.zeros(len(rows), np.int64)
    splits = []
    for level in range(depth):
        nodes = 2**level
        best_gain = np.full(nodes, -np.inf)
        feature = np.zeros(nodes, np.int64)
        border = np.full(nodes, BINS, np.int64)
        for column in columns:
            cell = node * BINS + binned[rows, column]
            g = np.bincount(cell, gradient[rows], nodes * BINS).reshape(nodes, BINS).cumsum(1)
            h = np.bincount(cell, curvature[rows], nodes * BINS).reshape(nodes, BINS).cumsum(1)
            g_all = g[:, -1:]
            h_all = h[:, -1:]
            gain = g**2 / (h + penalty) + (g_all - g) ** 2 / (h_all - h + penalty)
            gain[(h < 1.0) | (h_all - h < 1.0)] = -np.inf
            at = gain.argmax(1)
            value = gain[np.arange(nodes), at]
            better = value > best_gain
            best_gain[better] = value[better]
            feature[better] = column
            border[better] = at[better]
        splits.append((feature, border))
        node = 2 * node + (binned[rows, feature[node]] > border[node])
    leaves = 2**depth
    g = np.bincount(node, gradient[rows], leaves)
    h = np.bincount(node, curvature[rows], leaves)
    return splits, -0.08 * g / (h + penalty)


def tree_values(
    tree: tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray], binned: np.ndarray
) -> np.ndarray:
    """The value of the leaf that each row falls into."""
    splits, values = tree
    node = np.zeros(len(binned), np.int64)
    at = np.arange(len(binned))
    for feature, border in splits:
        node = 2 * node + (binned[at, feature[node]] > border[node])
    return values[node]


def tree_scores(trees: list, edges: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Scores of each kind, (rows, kinds)."""
    binned = binned_features(x, edges)
    scores = np.zeros((len(x), len(trees[0])))
    for trees_of_round in trees:
        for kind, tree in enumerate(trees_of_round):
            scores[:, kind] += tree_values(tree, binned)
    return scores


def fit_and_predict(
    x: np.ndarray, y: np.ndarray, in_training: np.ndarray, kinds: int, tempering: float, seed: int
) -> np.ndarray:
    """Log shares of the kinds for the rows that are not in training, by trees fitted to those that
    are; `tempering` 1 weighs the kinds alike, 0 the rows.
    """
    counts = np.bincount(y[in_training], minlength=kinds).clip(1)
    weight_of_kind = (len(y[in_training]) / (kinds * counts)) ** tempering
    weights = weight_of_kind[y[in_training]]
    trees, edges = fit_trees(x[in_training], y[in_training], weights, kinds, 150, 4, seed)
    return tree_scores(trees, edges, x[~in_training])


@dataclass
class Readings:
    """Atoms of answers: features, levels, stances, and whose they are."""

    x: np.ndarray
    y: np.ndarray
    stance: np.ndarray  # index into STANCES, -1 without
    record: list[str]
    answer: list[str]
    atom: list[str]
    ideal: np.ndarray


def readings_of(examples: dict[str, Example], answers: list[KnownAnswer]) -> Readings:
    """Features and levels of every labelled atom."""
    texts = []
    for example in examples.values():
        texts += [text_of(atom.text) for atom in example.atoms]
    texts += [text_of(answer.response) for answer in answers]
    word_rarity = Rarity.of([text.words for text in texts])
    gram_rarity = Rarity.of([text.grams for text in texts])
    lists: tuple[list, ...] = ([], [], [], [], [], [], [])
    for answer in answers:
        example = examples[answer.example_id]
        rows = features(example, answer.response, word_rarity, gram_rarity)
        for label in answer.labels:
            if label.disputed and isinstance(answer, RealAnswer):
                continue  # nobody is graded by it, and no tree learns from it
            stance = STANCES.index(label.stance) if label.stance else -1
            values = (
                rows[label.atom_id],
                int(label.actual),
                stance,
                answer.example_id,
                answer.answer_id,
                label.atom_id,
                int(example.levels[label.atom_id]),
            )
            for column, value in zip(lists, values, strict=True):
                column.append(value)
    x, y, stance, record, answer_id, atom, ideal = lists
    return Readings(
        np.array(x), np.array(y), np.array(stance), record, answer_id, atom, np.array(ideal)
    )


def read_pairs_without_model(
    examples: dict[str, Example],
    answers: list[KnownAnswer],
    pairs: list[MinimalPair],
    real: list[RealAnswer],
    with_ideal: bool = False,
    tempering: float = 1.0,
    seed: int = SEED,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Levels and stances read in every atom of the pairs and of real answers, and a row for each
    pair; the answers to a record are read by trees that saw none of them.

    `with_ideal` shows the trees the ideal level too, as a judge sees it that is not blind.
    """
    both: list[KnownAnswer] = []
    for pair in pairs:
        both += pair_answers(pair, examples[pair.example_id])
    data = readings_of(examples, [*answers, *both, *real])
    x = data.x
    if with_ideal:
        x = np.hstack([x, data.ideal[:, None]])
    records = sorted(set(data.record))
    np.random.default_rng(seed).shuffle(records)
    fold_of_record = {record: number % FOLDS for number, record in enumerate(records)}
    fold = np.array([fold_of_record[record] for record in data.record])
    is_read = np.isin(data.answer, [answer.answer_id for answer in [*both, *real]])
    level = np.full(len(x), -1)
    stance = np.full(len(x), -1)
    has_stance = data.stance >= 0
    for number in range(FOLDS):
        in_training = fold != number
        level[~in_training] = fit_and_predict(x, data.y, in_training, 3, tempering, seed).argmax(1)
        scores = fit_and_predict(
            x[has_stance], data.stance[has_stance], in_training[has_stance], 4, 1, seed
        )
        stance[np.flatnonzero(has_stance & ~in_training)] = scores.argmax(1)
    frame = pd.DataFrame(
        {
            "answer": data.answer,
            "atom": data.atom,
            "ideal": data.ideal,
            "actual": data.y,
            "read": level,
            "stance": data.stance,
            "stance read": stance,
        }
    )[is_read]
    return frame, pair_rows(pairs, frame)


def pair_rows(pairs: list[MinimalPair], frame: pd.DataFrame) -> pd.DataFrame:
    """Whether each pair was read right: edited atom in both answers, and no other atom changed."""
    by_answer = {name: rows.set_index("atom") for name, rows in frame.groupby("answer")}
    rows = []
    for pair in pairs:
        sides = [by_answer[f"{pair.pair_id}:{side}"] for side in ("before", "after")]
        edited = [side.loc[pair.edit.atom_id] for side in sides]
        changed = all(row["read"] == row["actual"] for row in edited)
        if pair.edit.direction == "stance":
            changed = changed and all(row["stance read"] == row["stance"] for row in edited)
        others = sides[0].index != pair.edit.atom_id
        after = sides[1].reindex(sides[0].index)
        unchanged = bool((sides[0]["read"] == after["read"])[others].all())
        rows.append(
            {
                "form": pair.form,
                "direction": pair.edit.direction,
                "changed": changed,
                "unchanged": unchanged,
                "right": changed and unchanged,
            }
        )
    return pd.DataFrame(rows)


def macro_accuracy(frame: pd.DataFrame) -> float:
    """Mean over the three actual levels of the percent read right."""
    right = frame["actual"] == frame["read"]
    return float(100 * right.groupby(frame["actual"]).mean().mean())


def shares(frame: pd.DataFrame, rows: pd.DataFrame, edited: set[tuple[str, str]]) -> dict:
    """What one judge read right, as a row of the card: by level, of edited atoms, of pairs of the
    first forms and of the hard ones, and of used atoms of real answers.
    """
    keys = zip(frame["answer"], frame["atom"], strict=True)
    is_edited = np.array([key in edited for key in keys])
    is_real = frame["answer"].str.startswith("real_").to_numpy()
    is_hard = rows["form"].isin(HARD_FORMS)
    used = frame[is_real & (frame["actual"] > 0).to_numpy()]
    row = {
        "by level, all atoms, %": macro_accuracy(frame[~is_real]),
        "by level, edited atoms, %": macro_accuracy(frame[is_edited]),
        "edited atom right in both, %": 100 * rows["changed"].mean(),
        "pairs of the first forms right, %": 100 * rows["right"][~is_hard].mean(),
        "hard pairs right, %": 100 * rows["right"][is_hard].mean(),
    }
    if len(used):
        row["used atoms of real answers, %"] = 100 * (used["actual"] == used["read"]).mean()
    return {name: f"{share:.1f}" for name, share in row.items()}


def main() -> None:
    """Print the shares read right, in all and by form, without and with the ideal levels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into reading.json")
    arguments = parser.parse_args()
    examples, answers = starter_answers()
    pairs = starter_pairs(examples)
    real = starter_real_answers(examples)
    example_by_id = {example.id: example for example in examples}
    edited = set()
    for pair in pairs:
        edited.update((f"{pair.pair_id}:{side}", pair.edit.atom_id) for side in ("before", "after"))
    judges = []
    by_form = pd.DataFrame()
    for title, with_ideal in TITLES.items():
        frame, rows = read_pairs_without_model(example_by_id, answers, pairs, real, with_ideal)
        judges.append({"judge": title, **shares(frame, rows, edited)})
        if not with_ideal:
            grouped = rows.groupby("form")["right"].agg(["size", "mean"]).reset_index()
            by_form = pd.DataFrame(
                {
                    "form": grouped["form"].str.replace("_", " "),
                    "pairs": grouped["size"],
                    "right without a model, %": (100 * grouped["mean"]).round().astype(int),
                }
            )
    print(pd.DataFrame(judges).T.to_string(header=False))
    print(by_form.to_string(index=False))
    if arguments.write:
        reading = json.loads(READING.read_text(encoding="utf-8"))
        reading["judge_without_model"]["judges"] = judges
        reading["judge_without_model"]["by form"] = by_form.to_dict("records")
        text = json.dumps(reading, indent=1, ensure_ascii=False)
        READING.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
