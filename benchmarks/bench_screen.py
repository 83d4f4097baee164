"""Screening and near-duplicates on invented documents:
time, memory, growth, recall, precision; rensa beside datasketch.

python benchmarks/bench_screen.py [documents ...] (default 5000 10000;
the stated target is 250000 in ten minutes)

Each size runs in a process of its own, so that its peak memory is its own.
"""

import random
import re
import resource
import subprocess
import sys
import time
from itertools import product

import numpy as np

from memcalib.products.dataset.duplicates import NearConfig, deduplicate
from memcalib.products.dataset.screening import load_screen, screen
from memcalib.products.dataset.sources import SourceRow, collect

SMALL = (
    "the of and to a in is that it for i my have with on be this was you at as are not but from or "
    "what when how which do does can could should if after since they there all would about me so "
    "up out just get has had been were will"
)
SIGNS = (
    "years old mother daughter since days weeks pain fever headache tablet mg blood test results "
    "smoke sleep"
)
STOCK = (
    "Hello, welcome to the forum and thank you for your question.",
    "I have read all of it with care and understand your concern.",
    "Hope this helps, take care.",
    "Feel free to ask again, with regards.",
)
EDITS = ("replace", "delete", "insert", "reorder", "append", "case")


class Corpus:
    """Invented documents of a given length: words by Zipf's law, stock phrases in two of five,
    and planted copies.
    """

    def __init__(self, seed: int, vocabulary: int = 60_000):
        self.rng = np.random.default_rng(seed)
        self.random = random.Random(seed)
        syllables = ["".join(letters) for letters in product("bcdfghjklmnprstvwz", "aeiou")]
        words = set()
        while len(words) < vocabulary:
            words.add("".join(self.random.choices(syllables, k=self.random.randint(2, 4))))
        self.rare = np.array(sorted(words))
        self.rng.shuffle(self.rare)
        self.small = np.array(SMALL.split())
        self.signs = SIGNS.split()
        self.chance = [self._zipf(len(self.small), 3), self._zipf(vocabulary, 10)]

    @staticmethod
    def _zipf(size: int, shift: int) -> np.ndarray:
        weights = np.cumsum(1 / (np.arange(size) + shift))
        return weights / weights[-1]

    def words(self, count: int) -> list[str]:
        small, rare = (np.searchsorted(chance, self.rng.random(count)) for chance in self.chance)
        return np.where(self.rng.random(count) < 0.45, self.small[small], self.rare[rare]).tolist()

    def sentences(self, count: int) -> str:
        words = self.words(count)
        sentences = []
        while words:
            size = self.random.randint(8, 17)
            sentences.append(" ".join(words[:size]).capitalize() + ".")
            del words[:size]
        return " ".join(sentences)

    def row(self, number: int, size: int = 200) -> SourceRow:
        question = (
            f"{self.sentences(size * 3 // 10 - 6)} My "
            f"{' '.join(self.random.sample(self.signs, 3))} is it safe?"
        )
        answer = self.sentences(size * 7 // 10)
        if self.random.random() < 0.4:
            answer = f"{self.random.choice(STOCK[:2])} {answer}"
        if self.random.random() < 0.4:
            answer = f"{answer} {self.random.choice(STOCK[2:])}"
        return SourceRow(
            id=f"bench:{number}", source="bench", domain="health", question=question, answer=answer
        )

    def edit(self, text: str, kind: str, count: int) -> str:
        words = text.split()
        positions = sorted(
            self.random.sample(range(len(words)), min(count, len(words))), reverse=True
        )
        for position in positions:
            if kind == "replace":
                words[position] = self.words(1)[0]
            elif kind == "delete":
                del words[position]
            elif kind == "insert":
                words.insert(position, self.words(1)[0])
        if kind == "reorder":
            sentences = text.split(". ")
            self.random.shuffle(sentences)
            words = ". ".join(sentences).split()
        if kind == "append":
            words += self.words(count)
        joined = " ".join(words)
        return joined.upper() if kind == "case" else joined

    def copy(self, row: SourceRow, kind: str, count: int, number: int) -> SourceRow:
        parts = {
            name: self.edit(getattr(row, name), kind, count) for name in ("question", "answer")
        }
        return row.model_copy(update={"id": f"bench:{number}", **parts})


def plain_jaccard(a: SourceRow, b: SourceRow) -> float:
    own_words, theirs = (
        set(re.findall(r"\w+", f"{row.question} {row.answer}".lower())) for row in (a, b)
    )
    return len(own_words & theirs) / len(own_words | theirs)


def documents(count: int, seed: int = 0) -> tuple[list[SourceRow], list[tuple[int, int, float]]]:
    """Rows in random order, and the planted pairs (position, position, similarity)."""
    corpus = Corpus(seed)
    rows = []
    pairs = []
    while len(rows) < count:
        rows.append(corpus.row(len(rows)))
        if corpus.random.random() < 0.15 and len(rows) < count:
            copy = corpus.copy(
                rows[-1], corpus.random.choice(EDITS), corpus.random.randint(1, 12), len(rows)
            )
            pairs.append((len(rows) - 1, len(rows), plain_jaccard(rows[-1], copy)))
            rows.append(copy)
    positions = corpus.random.sample(range(count), count)
    order = sorted(range(count), key=positions.__getitem__)
    return [rows[n] for n in order], [
        (positions[a], positions[b], similarity) for a, b, similarity in pairs
    ]


def measure(count: int) -> None:
    rows, pairs = documents(count)
    words = sum(len(row.text.split()) for row in rows) / count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    cpu = time.process_time()
    screened = collect(screen(rows, load_screen()))
    middle = time.perf_counter()
    passed = deduplicate(screened.kept)
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ids = {row.id: row for row in screened.kept}
    lost = {drop.id for drop in passed.dropped}
    near = [d for d in passed.dropped if d.rule == "near duplicate"]
    pairs = [
        (rows[a].id, rows[b].id, s) for a, b, s in pairs if rows[a].id in ids and rows[b].id in ids
    ]
    gone = [(s >= 0.88, a in lost or b in lost) for a, b, s in pairs]
    recalled = gone.count((True, True))
    planted = sum(reach for reach, _ in gone)
    edge = [lost for (reach, lost), (_, _, s) in zip(gone, pairs, strict=True) if reach and s < 0.9]
    right = sum(plain_jaccard(ids[d.id], ids[d.other]) >= 0.88 for d in near)
    lines = (
        f"{count:>7} documents of {words:.0f} words: screening {middle - start:.1f} s, "
        f"{len(screened.dropped)} dropped; duplicates {end - middle:.1f} s, {len(passed.dropped)} "
        "dropped",
        f"together {end - start:.1f} s, {cpu:.1f} s of one core, {cpu / count * 1e6:.0f} us each; "
        f"peak {peak:.2f} GB, {before:.2f} GB before",
        f"recall {recalled}/{planted} = {recalled / planted:.4f}, precision {right}/{len(near)} = "
        f"{right / len(near):.4f}, {gone.count((False, True))} of {len(gone) - planted} pairs "
        f"below 0.88 dropped; recall from 0.88 to 0.90 {sum(edge)}/{len(edge)}",
    )
    print("\n        ".join(lines), flush=True)


def compare_libraries(count: int) -> None:
    """Sketch, query and insert the same shingles with the same permutations and bands;
    candidates are verified alike.
    """
    from datasketch import MinHash, MinHashLSH
    from rensa import RMinHash, RMinHashLSH

    from memcalib.products.dataset.duplicates import shingles
    from memcalib.products.shared.words import words

    config = NearConfig()
    rows, pairs = documents(count, seed=1)
    runs = [shingles(words(row.text), config.shingle) for row in rows]
    in_reach = [(a, b) for a, b, s in pairs if s >= 0.88]
    times = {}
    for name in ("rensa", "datasketch"):
        start = time.perf_counter()
        if name == "rensa":
            sketches = RMinHash.from_token_sets(runs, config.permutations, config.seed)
            index = RMinHashLSH(config.threshold, config.permutations, config.bands)
        else:
            coded = (map(str.encode, texts) for texts in runs)
            sketches = MinHash.bulk(coded, num_perm=config.permutations, seed=config.seed)
            index = MinHashLSH(
                num_perm=config.permutations,
                params=(config.bands, config.permutations // config.bands),
            )
        middle = time.perf_counter()
        met = []
        for number, sketch in enumerate(sketches):
            met.append(set(index.query(sketch)))
            index.insert(number, sketch)
        end = time.perf_counter()
        recalled = sum(min(a, b) in met[max(a, b)] for a, b in in_reach)
        times[name] = end - start
        print(
            f"{name:>10}: sketches {middle - start:.2f} s, index {end - middle:.2f} s for {count} "
            f"documents; {sum(map(len, met))} candidates, recall of planted pairs "
            f"{recalled}/{len(in_reach)} = {recalled / len(in_reach):.4f}"
        )
    print(
        f"rensa needs 1/{times['datasketch'] / times['rensa']:.0f} of datasketch's time", flush=True
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(int(sys.argv[2]))
    else:
        compare_libraries(2_000)
        costs = {}
        for size in map(int, sys.argv[1:] or (5_000, 10_000)):
            command = [sys.executable, __file__, "--one", str(size)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(output, end="", flush=True)
            costs[size] = float(re.search(r"(\d+) us each", output)[1])
        first, *larger = costs
        for size in larger:
            times = size / first
            each = costs[size] / costs[first]
            print(
                f"growth: {times:g} times the documents, {each:.2f} times the processor time of "
                "each"
            )
