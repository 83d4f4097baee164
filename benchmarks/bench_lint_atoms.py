"""All checks on one record of many atoms: how the time grows with them.

python benchmarks/bench_lint_atoms.py [atoms]

Prints seconds of processor for a quarter of the atoms, half of them, and all (2,000), and fails
where twice the atoms take more than three times as long.
"""

import json
import sys
import time

from memcalib.problem import Example
from memcalib.products.dataset.lint import lint_example
from memcalib.products.micro.world import WORLDS, make_examples

atom_count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000


def record(count: int) -> Example:
    """A record of one block with so many atoms, each with a rubric that has words of its own."""
    [example] = make_examples(WORLDS["short"], 1, 7, "test")
    row = json.loads(example.to_json())
    sentences = [f"The user's {n} pet number {n * n} is animal {n * 7}." for n in range(count)]
    atoms = []
    for number, sentence in enumerate(sentences):
        rubric = dict(row["memories"][0]["usage_rubric"])
        rubric["correct_use"] = f"mention animal {number * 7} once in a remark about the pet"
        atom = {**row["memories"][0], "atom_id": f"a{number}", "text": sentence}
        atoms.append({**atom, "usage_rubric": rubric})
    text = " ".join(sentences)
    block = {
        **row["memory_blocks"][0],
        "memory_text": text,
        "atomic_concat_text": text,
        "atom_ids": [atom["atom_id"] for atom in atoms],
    }
    return Example.model_validate({**row, "memory_blocks": [block], "memories": atoms})


def seconds(count: int) -> float:
    example = record(count)
    start = time.process_time()
    lint_example(example)
    return time.process_time() - start


seconds(10)  # word lists are read once
taken = {}
for count in (atom_count // 4, atom_count // 2, atom_count):
    taken[count] = seconds(count)
    print(f"{count:,} atoms: {taken[count]:.2f} s")
few, half, whole = taken.values()
print(f"twice the atoms: {half / few:.1f} and {whole / half:.1f} times the time")
if whole > 3 * half:
    sys.exit("FAIL: the time grows faster than the number of atoms")
