"""The page of memories of a large log: seconds and memory.

Usage: bench_memories.py [QUESTIONS] [MEMORIES]. An invented run, 5,000 questions with 40 memories
each by default, of a store with 2,000 memories; the page has to be there in a minute and 1 GB.
"""

import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from memcalib.io.records import write_jsonl
from memcalib.problem import Example, Level, Rollout, judgment_for

MOST_SECONDS = 60
MOST_MEGABYTES = 1000
STORE = 2000  # memories
WORDS = ("lake", "train", "chess", "garden", "office", "recipe", "invoice", "doctor", "summer")


def store_memory(number: int) -> dict[str, str]:
    """A memory of the invented store."""
    words = " ".join(random.Random(number).choices(WORDS, k=6))
    day = f"20{20 + number % 7}-{1 + number % 12:02d}-{1 + number % 28:02d}"
    return {"id": f"id-{number}", "text": f"Note {number} on {words}", "time": day}


def example_of(number: int, count: int, rng: random.Random) -> Example:
    """A question with so many memories of the store, as a log gives them."""
    blocks = []
    atoms = []
    for position, memory_number in enumerate(rng.sample(range(STORE), count), 1):
        memory = store_memory(memory_number)
        block_id = f"m{position}"
        blocks.append(
            {
                "parent_memory_id": block_id,
                "memory_text": memory["text"],
                "atomic_concat_text": memory["text"],
                "atom_ids": [f"{block_id}_a1"],
                "time": memory["time"],
                "score": round(1 - position / (count + 1), 3),
                "store_ids": [memory["id"]],
                "source": f"source {memory_number % 5}",
            }
        )
        level = rng.choices("ABC", (8, 1, 1))[0]
        atoms.append(
            {
                "atom_id": f"{block_id}_a1",
                "parent_memory_id": block_id,
                "text": memory["text"],
                "u_star": level,
            }
        )
    record = {
        "id": f"q{number}",
        "domain": "general",
        "question": f"Question {number}?",
        "memory_blocks": blocks,
        "memories": atoms,
    }
    return Example.model_validate(record)


def write_run(folder: Path, questions: int, count: int) -> None:
    """A run folder whose judge found every tenth memory used wrongly."""
    rng = random.Random(0)
    examples = [example_of(number, count, rng) for number in range(questions)]
    write_jsonl(folder / "examples.jsonl", examples)
    answers = (Rollout(example_id=row.id, response="It is so [mem:1].") for row in examples)
    write_jsonl(folder / "rollouts.jsonl", answers)

    def judged(example: Example):
        levels = {}
        for atom in example.atoms:
            wrong = rng.random() < 0.1
            levels[atom.atom_id] = Level(rng.randrange(3)) if wrong else atom.ideal
        return judgment_for(example, levels, judge="invented")

    write_jsonl(folder / "judgments.jsonl", map(judged, examples))


def page_in_a_process(folder: Path) -> tuple[float, float]:
    """Seconds and peak megabytes of a new process that makes the page of a run."""
    import subprocess

    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "memcalib", "memories", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - start
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000


def main() -> None:
    questions = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, questions, count)
        seconds, megabytes = page_in_a_process(folder)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = usage.ru_utime + usage.ru_stime
        size = (folder / "memories.html").stat().st_size / 1e6
    print(
        f"{questions:,} questions x {count} memories: {seconds:.1f} s ({processor:.1f} s of a "
        f"processor), {megabytes:.0f} MB, page {size:.2f} MB"
    )
    assert processor < MOST_SECONDS, processor
    assert megabytes < MOST_MEGABYTES, megabytes


if __name__ == "__main__":
    main()
