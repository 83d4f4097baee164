"""What the card says of the exam's third edition: hard pairs, labels read again, rubrics, real
answers, and what judges get that do not read. The words stand in reading.json under `exam`, the
tables there under `blind_readings` or are counted from the files.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pandas as pd

from memcalib.problem import Example
from memcalib.products.exam.exam import KnownAnswer, exam_items
from memcalib.products.exam.minimal_pairs import HARD_FORMS, MinimalPair, pair_items
from memcalib.products.exam.rank import hard_pairs, trivial_table
from memcalib.products.exam.real_answers import RealAnswer, certificates, real_items

Grid = Callable[[pd.DataFrame], str]
SIGNPOSTS = (
    r"because (?:you|of your)|since you|as you|given your|decide[sd]?|everything|follows from|"
    r"weil (?:du|Sie|dein|Ihr)|da (?:du|Sie)|entscheide[nt]|porque (?:tú|tu|usted|ustedes)|"
    r"decide|todo lo|parce que (?:tu|vous)|puisque|comme vous|décide|tout le reste|"
    r"como você|porque você|decide|tudo"
)
SIGNPOST = re.compile(
    rf"\b(?:{SIGNPOSTS})\b|因为您|因为你|由于您|决定|ご希望なので|決まります", re.IGNORECASE
)


def signpost_shares(pairs: list[MinimalPair]) -> tuple[float, float]:
    """Percent of the pairs of the first forms, and of the hard ones, that have a signpost word in
    the edited passage on either side.
    """
    found: Counter[bool] = Counter()
    counts: Counter[bool] = Counter()
    for pair in pairs:
        is_hard = pair.form in HARD_FORMS
        counts[is_hard] += 1
        passages = (pair.edit.passage, pair.edit.replacement)
        found[is_hard] += any(SIGNPOST.search(passage) for passage in passages)
    shares = [100 * found[kind] / counts[kind] if counts[kind] else 0.0 for kind in (False, True)]
    return shares[0], shares[1]


def hard_sizes(pairs: list[MinimalPair], examples: dict[str, Example]) -> str:
    """Form, language and direction of the hard pairs, and words of the edit, as a list."""
    hard = hard_pairs(pairs)
    counts: dict[str, Counter] = {name: Counter() for name in ("form", "language", "direction")}
    for pair in hard:
        example = examples[pair.example_id]
        counts["form"][pair.form.replace("_", " ")] += 1
        counts["language"][pair.language or (example.model_extra or {})["language"]] += 1
        counts["direction"][pair.edit.direction] += 1
    lines = [f"{len(hard)} pairs about {len({pair.example_id for pair in hard})} records:", ""]
    for name, counter in counts.items():
        listed = ", ".join(f"{value} {count}" for value, count in sorted(counter.items()))
        lines.append(f"- {name}: {listed}")
    first, of_hard = signpost_shares(pairs)
    lines.append(
        f"- signpost words in the edited passage: {of_hard:.0f} % of these pairs, {first:.0f} % of "
        "the first forms"
    )
    return "\n".join(lines)


def certificate_table(real: list[RealAnswer], examples: list[Example]) -> pd.DataFrame:
    """The certificates of the records, with `yes` and `no`."""
    table = certificates(real, examples)
    for name in ("decides", "repeats"):
        table[name] = ["yes" if value else "no" for value in table[name]]
    return table


def exam_section(
    pairs: list[MinimalPair],
    real: list[RealAnswer],
    answers: list[KnownAnswer],
    examples: list[Example],
    reading: dict[str, Any],
    grid: Grid,
) -> str:
    """The whole section, ready for the card."""
    examples_by_id = {example.id: example for example in examples}
    items = exam_items(examples, answers, None, probes=0) + pair_items(pairs, examples)
    items += real_items(real, examples)
    trivial = trivial_table(items, pairs, hard_pairs(pairs))
    counted = {
        "hard pairs": hard_sizes(pairs, examples_by_id),
        "judges that do not read": grid(trivial.round(1)),
        "certificates": grid(certificate_table(real, examples)) if real else "",
    }
    parts = ["## The third edition of the exam"]
    for entry in reading["exam"]:
        parts.append(f"### {entry['title']}")
        parts.append(entry["text"])
        for name in entry.get("counted", ()):
            parts.append(counted[name])
        for title in entry.get("readings", ()):
            parts.append(reading_text(title, reading["blind_readings"][title], grid))
        for name, rows in entry.get("tables", {}).items():
            parts.append(f"*{name}*\n\n{grid(pd.DataFrame(rows))}")
    return "\n\n".join(part for part in parts if part) + "\n"


def reading_text(title: str, entry: dict[str, Any], grid: Grid) -> str:
    """One blind reading: its tables, and how far the readers agree."""
    parts = [f"**{title[0].upper()}{title[1:]}**"]
    for rows in entry["tables"].values():
        table = pd.DataFrame(rows)
        for column in table.columns[:1]:
            table[column] = table[column].astype(str).str.replace("_", " ")
        parts.append(grid(table))
    parts.append("\n".join(f"- {line}" for line in entry["agreement"]))
    return "\n\n".join(parts)
