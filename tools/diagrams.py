"""Draw the schematic pictures of the book: `python tools/diagrams.py` writes nbs/images/*.svg.

Pictures of data are drawn by the pages themselves. These show no data: boxes, arrows and words.
Each has a light ground of its own, so it reads on light and dark pages alike, and a title and a
description for readers who cannot see it.
"""

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "nbs" / "images"
INK = "#1f2933"
SOFT = "#52606d"
LINE = "#7b8794"
GROUND = "#fbfbf9"
BLUE = "#e3edf7"
GREEN = "#e4f2e6"
SAND = "#fbf0da"
WHITE = "#ffffff"
LEVEL = {"Ignore": "#8a8f98", "Bound": "#c98a00", "Control": "#c8322b"}


class Picture:
    """An SVG that grows by boxes, texts and arrows; coordinates are pixels at its natural size."""

    def __init__(self, name: str, width: int, height: int, title: str, description: str):
        self.name = name
        self.parts = []
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-labelledby="t d" '
            f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">\n'
            f'<title id="t">{escape(title)}</title>\n<desc id="d">{escape(description)}</desc>\n'
            '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" '
            'orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="10" fill="{GROUND}" stroke="#d9dee4"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        colour: str = INK,
        weight: str = "",
        anchor: str = "start",
    ):
        bold = f' font-weight="{weight}"' if weight else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}"{bold}>{escape(words)}</text>'
        )

    def line(self, x: float, y: float, *parts: tuple[str, str], size: int = 12):
        """A line of text in parts, each with its colour; a part that is coloured is bold."""
        marked = []
        for words, colour in parts:
            bold = "" if colour == INK else ' font-weight="600"'
            marked.append(f'<tspan fill="{colour}"{bold}>{escape(words)}</tspan>')
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" '
            f'xml:space="preserve">{"".join(marked)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        title: str,
        *lines: str,
        fill: str = WHITE,
        edge: str = LINE,
    ):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{edge}"/>'
        )
        top = y + h / 2 - 8.5 * len(lines) + 4.5
        self.text(x + w / 2, top, title, weight="600", anchor="middle")
        for number, line in enumerate(lines, 1):
            self.text(x + w / 2, top + 17 * number, line, size=12, colour=SOFT, anchor="middle")

    def arrow(self, *points: tuple[float, float], dashed: bool = False):
        path = "M" + " L".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" '
            f'marker-end="url(#tip)"{dash}/>'
        )

    def chip(self, x: float, y: float, w: float, level: str, words: str):
        """One atom: a bar in the colour of its level, the words, the level behind them."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="4" height="22" fill="{LEVEL[level]}"/>')
        self.text(x + 12, y + 15, words, size=12)
        self.text(x + w, y + 15, level, size=12, colour=LEVEL[level], weight="600", anchor="end")

    def save(self) -> None:
        (IMAGES / self.name).write_text(
            "\n".join([self.head, *self.parts, "</svg>"]) + "\n", encoding="utf-8"
        )


def flow() -> Picture:
    description = (
        "A record goes to the model under test, its answer to a judge; the levels go to six "
        "metrics and a report, or to nine channels, localization, redistribution and an update of "
        "the model."
    )
    p = Picture(
        "flow.svg", 860, 300, "From a record to a report, and back into the model", description
    )
    p.text(24, 34, "Measure", size=12, colour=SOFT, weight="600")
    p.text(24, 184, "Train", size=12, colour=SOFT, weight="600")
    above = [
        ("Record", "query, memory,", "ideal levels"),
        ("Answer", "of the model", "under test"),
        ("Judge", "actual level of", "each atom"),
        ("Metrics", "six numbers", "with intervals"),
        ("Report", "scores, quotes,", "worst answers"),
    ]
    for k, words in enumerate(above):
        p.box(24 + 168 * k, 46, 132, 78, *words, fill=BLUE if k < 3 else GREEN)
        if k:
            p.arrow((24 + 168 * k - 36, 85), (24 + 168 * k - 3, 85))
    below = [
        ("Update", "the policy", "learns from it"),
        ("Redistribution", "the advantage", "of each token"),
        ("Localization", "words that change", "without an atom"),
        ("Channels", "nine rewards, and", "advantages"),
    ]
    for k, words in enumerate(below):
        p.box(192 + 168 * k, 196, 132, 78, *words, fill=SAND)
        if k:
            p.arrow((192 + 168 * k - 3, 235), (192 + 168 * k - 33, 235))
    p.arrow((426, 124), (426, 160), (762, 160), (762, 193))
    p.arrow((258, 196), (258, 127), dashed=True)
    return p


def record() -> Picture:
    description = (
        "The query asks for houseplants. Block 1 holds an atom at level Ignore and one at Bound, "
        "block 2 an atom at Ignore and one at Control."
    )
    p = Picture(
        "record.svg",
        760,
        300,
        "One record: a query, two blocks of memory, and the ideal level of each atom",
        description,
    )
    p.box(24, 20, 712, 44, "Query: Which houseplants would do well on the windowsill?", fill=BLUE)
    p.text(
        24,
        92,
        "The model sees paragraphs, in which all is mixed",
        size=12,
        colour=SOFT,
        weight="600",
    )
    p.text(
        404, 92, "The record knows atoms and their ideal levels", size=12, colour=SOFT, weight="600"
    )
    blocks = [
        (
            ["1. The user moved into a flat in Leeds last month,", "which only gets morning sun."],
            [("Ignore", "moved to Leeds last month"), ("Bound", "the flat only gets morning sun")],
        ),
        (
            [
                "2. The user was late for a rehearsal, and has a cat",
                "that chews every leaf she can reach.",
            ],
            [("Ignore", "was late for a rehearsal"), ("Control", "a cat chews every leaf")],
        ),
    ]
    for k, (lines, atoms) in enumerate(blocks):
        y = 104 + 82 * k
        p.parts.append(
            f'<rect x="24" y="{y}" width="344" height="70" rx="6" fill="{WHITE}" stroke="{LINE}"/>'
        )
        for i, line in enumerate(lines):
            p.text(36, y + 30 + 20 * i, line, size=12.5)
        for i, (level, words) in enumerate(atoms):
            p.chip(404, y + 8 + 32 * i, 332, level, words)
            p.arrow((370, y + 35), (399, y + 19 + 32 * i))
    p.text(
        24,
        288,
        "Ignore: leave no trace.   Bound: give local support.   Control: decide.",
        size=12,
        colour=SOFT,
    )
    return p


def stages() -> Picture:
    description = (
        "Screening, derivation, annotation, distractors and rubrics, blocks, review; a row that "
        "fails a check is repaired once more or dropped with the reason."
    )
    p = Picture(
        "stages.svg",
        860,
        250,
        "Six stages from a question that someone asked to an accepted record",
        description,
    )
    rows = [
        ("1 Screening", "is anything here", "to remember?", BLUE),
        ("2 Derivation", "query here,", "passages there", BLUE),
        ("3 Annotation", "atoms, each", "with its level", BLUE),
        ("4 Distractors", "what tempts;", "rubrics", SAND),
        ("5 Blocks", "atoms mixed", "into paragraphs", SAND),
        ("6 Review", "code, then two", "readers agree", GREEN),
    ]
    p.text(
        24,
        36,
        "A question that a person once asked, with its answer",
        size=12,
        colour=SOFT,
        weight="600",
    )
    p.text(836, 36, "A record", size=12, colour=SOFT, weight="600", anchor="end")
    for k, (title, one, two, fill) in enumerate(rows):
        x = 24 + 139 * k
        p.box(x, 52, 117, 78, title, one, two, fill=fill)
        if k:
            p.arrow((x - 22, 91), (x - 3, 91))
        p.arrow((x + 58, 130), (x + 58, 178), dashed=True)
    p.parts.append(
        f'<rect x="24" y="181" width="812" height="44" rx="6" fill="{WHITE}" stroke="{LINE}" '
        'stroke-dasharray="5 4"/>'
    )
    p.text(
        430,
        208,
        (
            "a reply that code refuses is asked for once more, with the faults named; a row that "
            "still fails is dropped, with the reason"
        ),
        size=12,
        colour=SOFT,
        anchor="middle",
    )
    return p


def judge() -> Picture:
    description = (
        "The judge reads query, atoms with rubrics and the answer, and returns a level with a "
        "quote for each atom; code looks each quote up in the answer and flags those that are not "
        "there, but cannot see a level that is too high; a reply that cannot be read twice is "
        "unscored."
    )
    p = Picture(
        "judge.svg",
        860,
        270,
        "A judge is asked for levels with evidence, and believed as far as the evidence holds",
        description,
    )
    p.box(
        24,
        24,
        190,
        74,
        "Query, memory, atoms",
        "with ideal level and rubric,",
        "unless the judge is blind",
        fill=BLUE,
    )
    p.parts.append(
        f'<rect x="24" y="112" width="190" height="124" rx="6" fill="{WHITE}" stroke="{LINE}"/>'
    )
    p.text(36, 134, "The answer", weight="600")
    answer = [
        [("A spider plant is ", ""), ("safe for", "Control")],
        [("cats", "Control"), (" and content with", "")],
        [("a few hours of sun", "Bound"), (".", "")],
        [("Avoid lilies.", "")],
    ]
    for i, parts in enumerate(answer):
        p.line(36, 156 + 19 * i, *((words, LEVEL.get(level, INK)) for words, level in parts))
    p.box(264, 92, 120, 78, "Judge", "a language", "model", fill=SAND)
    p.arrow((214, 58), (238, 58), (238, 115), (261, 115))
    p.arrow((214, 174), (238, 174), (238, 147), (261, 147))
    p.parts.append(
        f'<rect x="434" y="40" width="218" height="182" rx="6" fill="{WHITE}" stroke="{LINE}"/>'
    )
    p.text(446, 62, "Levels with evidence", weight="600")
    rows = [
        ("Control", "cat chews leaves", "“safe for cats”"),
        ("Control", "morning sun", "“a few hours of sun”"),
        ("Bound", "moved to Leeds", "“your new kitchen”"),
    ]
    for i, (level, words, quote) in enumerate(rows):
        y = 76 + 48 * i
        p.chip(446, y, 194, level, words)
        shown = (LEVEL["Control"], LEVEL["Bound"], SOFT)[i]
        p.text(458, y + 33, quote, size=12, colour=shown, weight="600" if i < 2 else "")
    p.arrow((384, 131), (431, 131))
    p.text(668, 62, "Code looks quotes up", weight="600")
    for y, words, colour in (
        (104, "in the answer: kept", "#2f7d32"),
        (152, "in the answer: kept", "#2f7d32"),
        (168, "(too high: code can't tell)", SOFT),
        (200, "not in it: kept,", LEVEL["Control"]),
        (216, "flagged, counted", LEVEL["Control"]),
    ):
        p.text(668, y, words, size=12, colour=colour, weight="600")
    p.text(
        430,
        254,
        (
            "A reply that cannot be read is asked for once more. What is still missing is "
            "unscored: never zero, always counted."
        ),
        size=12,
        colour=SOFT,
        anchor="middle",
    )
    return p


def ablation() -> Picture:
    description = (
        "The same answer is scored under the full prompt and under a prompt without the atom; "
        "words whose probability falls carry the atom."
    )
    p = Picture(
        "ablation.svg",
        860,
        290,
        "The same words, with the atom in the prompt and without it",
        description,
    )
    for y, title, text, fill in (
        (28, "Full prompt", "… only morning sun. A cat chews every leaf.", BLUE),
        (98, "Ablated prompt", "… only morning sun.", WHITE),
    ):
        p.parts.append(
            f'<rect x="24" y="{y}" width="300" height="54" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        p.text(36, y + 22, title, weight="600")
        p.text(36, y + 42, text, size=12, colour=SOFT)
        p.arrow((324, y + 27), (357, y + 27))
    p.text(
        600, 20, "log-probability of each word of the answer", size=12, colour=SOFT, anchor="middle"
    )
    words = [
        ("Choose", -1.1, -1.1),
        ("a", -0.2, -0.2),
        ("plant", -0.3, -0.3),
        ("safe", -0.6, -2.6),
        ("for", -0.1, -0.2),
        ("cats", -0.2, -4.1),
        (".", -0.1, -0.1),
    ]
    for k, (word, full, bare) in enumerate(words):
        x = 364 + 68 * k
        strong = full - bare > 1
        p.text(x + 30, 60, f"{full:.1f}", anchor="middle")
        p.text(
            x + 30,
            130,
            f"{bare:.1f}",
            anchor="middle",
            colour=LEVEL["Control"] if strong else INK,
            weight="600" if strong else "",
        )
        height = 18 * (full - bare)
        p.parts.append(
            f'<rect x="{x + 12}" y="{248 - height}" width="36" height="{max(height, 1.5)}" '
            f'fill="{LEVEL["Control"] if strong else LINE}"/>'
        )
        p.text(x + 30, 268, word, anchor="middle", weight="600" if strong else "")
    p.text(36, 200, "difference d = full minus ablated", weight="600")
    p.text(36, 222, "large where the answer needed the atom,", size=12, colour=SOFT)
    p.text(36, 240, "near zero everywhere else (invented numbers)", size=12, colour=SOFT)
    return p


def training_step() -> Picture:
    description = (
        "Prompts, several answers to each, a judgment of each answer, an advantage for each token, "
        "an update of the weights, and back; beside it rows, checkpoints and validation."
    )
    p = Picture(
        "training_step.svg",
        860,
        270,
        "One training step: sample, judge, assign credit, update",
        description,
    )
    rows = [
        ("Prompts", "16 records", "", BLUE),
        ("Sample", "8 answers to", "each prompt", BLUE),
        ("Judge", "level of each", "atom, or unscored", SAND),
        ("Credit", "one advantage", "for each token", SAND),
        ("Update", "clipped loss,", "optimizer step", GREEN),
    ]
    for k, (title, one, two, fill) in enumerate(rows):
        x = 24 + 170 * k
        p.box(x, 40, 132, 78, title, *filter(None, (one, two)), fill=fill)
        if k:
            p.arrow((x - 38, 79), (x - 3, 79))
    p.arrow((770, 40), (770, 20), (260, 20), (260, 37))
    p.text(515, 15, "new weights", size=12, colour=SOFT, anchor="middle")
    p.box(364, 168, 132, 70, "Judge fails?", "pause, try again", fill=WHITE)
    p.box(534, 168, 132, 70, "Thresholds", "move with the batch", fill=WHITE)
    p.box(704, 168, 132, 70, "After a step", "row in steps.jsonl,", "sealed checkpoint", fill=WHITE)
    for x in (430, 600, 770):
        p.arrow((x, 118), (x, 165), dashed=True)
    return p


if __name__ == "__main__":
    for draw in (flow, record, stages, judge, ablation, training_step):
        draw().save()
