"""Readers of foreign text on hostile repetition: how many times longer ten times the text takes.

python benchmarks/bench_growth.py [letters]    (default 20000, and ten times as many)

About 10 where the time is linear; readers beyond 50 are named at the end, for one that looks at
every pair of places needs 100 times as long. Readings of less than 5 ms count as 5 ms.
"""

import sys
import time
from collections.abc import Callable

from memcalib.credit.sentences import Parse
from memcalib.scoring.quotes import grounded
from memcalib.products.dataset.lint import lint_example
from memcalib.problem import sample_records
from memcalib.products.shared.redaction import Redactor
from memcalib.products.dataset.screening import load_screen, screen_row
from memcalib.credit.sentences import segment
from memcalib.products.dataset.sources import SourceRow
from memcalib.judge import JudgeConfig, judge_request, read_reply

LEAST = 0.005
LIMIT = 50
EXAMPLE = sample_records()[0]
REQUEST = judge_request(EXAMPLE, "Pack insulin.", JudgeConfig())
SCREEN = load_screen({"limits": {"general": {"answer_chars": [1, 10**8]}}})
ROW = SourceRow(
    id="bench:1",
    source="bench",
    domain="general",
    question="What should I cook for ten people?",
    answer="-",
)


def cut(text: str) -> None:
    segment(
        text, [(a, min(a + 4, len(text))) for a in range(0, len(text), 4)], lambda text: Parse()
    )


def lint(text: str) -> None:
    block = EXAMPLE.blocks[0].model_copy(
        update={"memory_text": f"{EXAMPLE.blocks[0].memory_text} {text}"}
    )
    lint_example(EXAMPLE.model_copy(update={"blocks": [block, *EXAMPLE.blocks[1:]]}))


READERS: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "segment": (cut, ["[", "“a ", "!", "😀", "*_", "\u200b", "` ", "$$a ", "A. ", "> "]),
    "redact": (
        lambda text: Redactor().row([text]),
        ["a", "1 ", "a.", "a@", "http://", "password is ", "DE12 ", "pin:", "+1 "],
    ),
    "quotes": (
        lambda text: grounded(["a" * 60 + "b", "ab" * 5000], text),
        ["a", "ab", "é", "](a", "1. ", "word . . . more ... "],
    ),
    "reply": (lambda text: read_reply(text, REQUEST), [" ", "```", "{", '{"a": ', "[", '"']),
    "lint": (lint, ["a ", "x_", "I ", "1,", "not ", "“", "`", "ÃÂ", "a.", "aB", "(", "The user. "]),
    "screen": (
        lambda text: screen_row(ROW.model_copy(update={"answer": text}), SCREEN),
        ["a!", "!", "is it so ", "é"],
    ),
}


def seconds(read: Callable[[str], object], piece: str, letters: int, times: int) -> float:
    text = piece * (letters // len(piece))
    times_measured = []
    for _ in range(times):
        start = time.perf_counter()
        read(text)
        times_measured.append(time.perf_counter() - start)
    return min(times_measured)


def main() -> None:
    letters = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    beyond = []
    for name, (read, pieces) in READERS.items():
        read(pieces[0])  # what is built at the first use
        for piece in pieces:
            small = max(seconds(read, piece, letters, 3), LEAST)
            large = max(seconds(read, piece, 10 * letters, 1), LEAST)
            print(
                f"{name:8} {piece!r:22} {1000 * small:8.1f} ms {1000 * large:9.1f} ms  "
                f"{large / small:6.1f} times"
            )
            beyond += [f"{name} {piece!r}"] if large > LIMIT * small else []
    print(f"more than {LIMIT} times as long for ten times the text: {', '.join(beyond) or 'none'}")


if __name__ == "__main__":
    main()
