"""Sound rows about invented people, in free words: eighteen topics, six each for health,
general and coding.

Checks of words are measured on rows whose words no check has seen. Each fact comes in several
wordings: as an atom, in fluent prose, and as the user would say it. The fluent wordings are freer
than a careful builder's: *The user's age is 31* stands for *The user is 31 years old*. Rubrics vary
too: most restate the fact that they are about, one in seven is terse. The wordings stand in
`tests/fixtures/invented_topics.yaml`, one fact a line; a name in braces is drawn once for a row.
"""

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memcalib.products.dataset.lint import cut_stems
from memcalib.io.settings import read_yaml
from memcalib.problem import Atom, Block, Example, concat_text

TOPICS_FILE = Path(__file__).parents[1] / "fixtures" / "invented_topics.yaml"
TERSE_SHARE = 0.15  # of rubrics that do not restate their fact
OWN_WORDS_SHARE = 0.35  # of sentences of a paragraph that take the atom's own words
JOINED_SHARE = 0.3  # of sentences of a paragraph that are joined to the one before


class InventedFact(NamedTuple):
    """One atom in its wordings, with what a rubric says of it."""

    level: str
    text: str  # as an atom
    fluent: str  # in prose, without a full stop
    spoken: str  # as the user said it
    topic: str  # a noun phrase
    use: str  # what an answer should do with it
    under: str  # how an answer neglects it
    over: str  # how an answer overdoes it


class PlacedFact(NamedTuple):
    """A fact as an atom of a row."""

    atom_id: str
    origin: str
    fact: InventedFact


@dataclass
class InventedBlock:
    """A block of a row, before its paragraph is written."""

    block_id: str
    facts: list[PlacedFact]


@cache
def topics_file() -> dict[str, Any]:
    """The wordings: words to draw from, topics, distractors and what rubrics say of under-use at
    Ignore.
    """
    return read_yaml(TOPICS_FILE)


def _lines(text: str) -> list[str]:
    return text.strip().splitlines()


def parse_fact(line: str, drawn_words: Mapping[str, str]) -> InventedFact:
    """The fact of a line of the file, with the drawn words in place of the names in braces.

    A distractor has four fields, a fact at Ignore six, and a fact above Ignore eight.
    """
    fields = []
    for wording in line.split(" | "):
        fields.append(re.sub(r"\{(\w+)\}", lambda m: drawn_words[m[1]], wording.strip()))
    if len(fields) == 4:
        text, fluent, topic, over = fields
        return InventedFact("A", text, fluent, "", topic, "", "", over)
    if len(fields) == 6:
        level, text, fluent, spoken, topic, over = fields
        return InventedFact(level, text, fluent, spoken, topic, "", "", over)
    return InventedFact(*fields)


def parse_facts(lines: Iterable[str], drawn_words: Mapping[str, str]) -> list[InventedFact]:
    """The facts of several lines of the file."""
    return [parse_fact(line, drawn_words) for line in lines]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _clause(text: str) -> str:
    """A sentence as it stands inside another one."""
    text = text.rstrip(".")
    if text.split()[0] in ("The", "A", "An", "In", "At", "Every"):
        return text[:1].lower() + text[1:]
    return text


def _rubric_at_ignore(fact: InventedFact, terse: bool, rng: random.Random) -> dict[str, Any]:
    topic = fact.topic
    over = fact.over
    restated = rng.choice(
        [
            f"The answer reads the same to somebody who does not know that {_clause(fact.text)}.",
            f"That {fact.fluent} leaves no trace.",
        ]
    )
    without = [
        f"The answer is given without {topic}.",
        f"Nothing in the answer depends on {topic}.",
        f"The reply never brings up {topic}.",
    ]
    scopes = [
        "Has no bearing on this request.",
        f"Concerns {topic}, which the query does not ask about.",
    ]
    uses = ["Leave it out.", f"Leave {topic} out.", f"Pass over {topic} in silence."]
    overuses = [f"The answer {over}.", f"{_capital(over)}."]
    roles = ["A premise of any recommendation.", "A source of examples or small talk."]
    second_check = f"It is not the case that the answer {over}." if terse else restated
    return {
        "expected_answer_behavior": rng.choice(without),
        "memory_usage_weight": "none",
        "validity_scope": rng.choice(scopes),
        "correct_use": rng.choice(uses),
        "under_use": rng.choice(topics_file()["filler"]),
        "over_use": rng.choice(overuses),
        "forbidden_memory_role": rng.choice(roles),
        "failure_direction": rng.choice(["Over-use is the only failure.", "over-use"]),
        "observable_checks": [f"No mention of {topic}.", second_check],
    }


def _rubric_above_ignore(fact: InventedFact, terse: bool, rng: random.Random) -> dict[str, Any]:
    topic = fact.topic
    use = fact.use
    under = fact.under
    if terse:
        behaviors = [f"The answer should {use}.", f"A good answer will {use}."]
    else:
        behaviors = [
            f"Because {fact.fluent}, the answer should {use}.",
            f"Knowing that {_clause(fact.text)}, a good answer will {use}.",
        ]
    scopes = ["Holds for this request.", f"Holds as long as nothing changes about {topic}."]
    rubric: dict[str, Any] = {
        "expected_answer_behavior": rng.choice(behaviors),
        "memory_usage_weight": "supporting" if fact.level == "B" else "controlling",
        "validity_scope": rng.choice(scopes),
        "correct_use": f"{_capital(use)}.",
        "under_use": rng.choice([f"The answer {under}.", f"{_capital(under)}."]),
        "over_use": f"{_capital(fact.over)}.",
    }
    if fact.level == "B":
        rubric["forbidden_memory_role"] = "The centre of the whole answer."
        rubric["failure_direction"] = "Both directions are possible."
    else:
        roles = ["An excuse to refuse.", f"A basis for claims that {topic} does not support."]
        rubric["forbidden_memory_role"] = rng.choice(roles)
        rubric["failure_direction"] = "Under-use is the likelier failure."
    rubric["observable_checks"] = [
        f"A reader finds that the answer does {use}.",
        f"It is not the case that the answer {under}.",
    ]
    return rubric


def invent_rubric(fact: InventedFact, rng: random.Random) -> dict[str, Any]:
    """A rubric for a fact, terse or talkative."""
    terse = rng.random() < TERSE_SHARE
    if fact.level == "A":
        return _rubric_at_ignore(fact, terse, rng)
    return _rubric_above_ignore(fact, terse, rng)


def _topic_blocks(
    topic: Mapping[str, Any], drawn_words: Mapping[str, str], rng: random.Random
) -> list[InventedBlock]:
    """Most facts of a topic, the first of them always, one or two to a block."""
    all_facts = parse_facts(_lines(topic["facts"]), drawn_words)
    facts = [fact for fact in all_facts if rng.random() < 0.85 or fact is all_facts[0]]
    blocks: list[InventedBlock] = []
    while facts:
        size = rng.randint(1, 2)
        number = len(blocks) + 1
        placed = []
        for i, fact in enumerate(facts[:size], 1):
            placed.append(PlacedFact(f"p{number}_a{i}", "grounded", fact))
        blocks.append(InventedBlock(f"m{number}", placed))
        facts = facts[size:]
    return blocks


def _named_subjects(block: InventedBlock) -> list[str]:
    """What the atoms of a block are about, as far as their texts name it."""
    subjects = []
    for _, origin, fact in block.facts:
        named_in_text = set(cut_stems(fact.topic)) & set(cut_stems(fact.text))
        if origin != "auxiliary" and named_in_text:
            subjects.append(fact.topic)
    return subjects


def _add_distractors(
    blocks: list[InventedBlock],
    topic: Mapping[str, Any],
    drawn_words: Mapping[str, str],
    rng: random.Random,
) -> list[InventedBlock]:
    """The blocks with a hard distractor and a few others,
    some in blocks of their own and some in another's.

    Blocks of the topic keep their order among themselves; everything else is shuffled.
    """
    hard = parse_fact(rng.choice(_lines(topic["hard"])), drawn_words)
    blocks = [*blocks, InventedBlock("harda_01", [PlacedFact("harda_01_a1", "hard", hard)])]
    noise_count = rng.randint(3, 9)
    noise = parse_facts(rng.sample(_lines(topics_file()["distractors"]), noise_count), drawn_words)
    auxiliary_lines = _lines(topics_file()["beside"])
    auxiliary_lines = rng.sample(auxiliary_lines, len(auxiliary_lines))
    for number in range(1, 10):
        size = rng.randint(1, 3)
        batch = noise[:size]
        noise = noise[size:]
        if not batch:
            continue
        if rng.random() >= 0.4:
            placed = []
            for i, fact in enumerate(batch, 1):
                placed.append(PlacedFact(f"noise_{number:02d}_a{i}", "noise", fact))
            blocks.append(InventedBlock(f"noise_{number:02d}", placed))
            continue
        host = rng.choice([block for block in blocks if not block.block_id.startswith("noise_")])
        subjects = _named_subjects(host)
        for i in range(1, len(batch) + 1):
            if not subjects or not auxiliary_lines:
                break
            line = auxiliary_lines.pop()
            fact = parse_fact(line, {**drawn_words, "about": rng.choice(subjects)})
            host.facts.append(PlacedFact(f"aux_b{number:02d}_a{i:02d}", "auxiliary", fact))
    shuffled = rng.sample(blocks, len(blocks))
    topic_blocks = iter([block for block in blocks if block.block_id.startswith("m")])
    return [next(topic_blocks) if b.block_id.startswith("m") else b for b in shuffled]


def _contract(fact: InventedFact) -> dict[str, str]:
    """The difference that a fact of the source makes to an answer."""
    if fact.level == "A":
        nothing = f"Nothing is said of {fact.topic}."
        return {
            "without_memory_behavior": nothing,
            "with_memory_behavior": nothing,
            "observable_delta": "none",
            "minimal_evidence": "",
        }
    return {
        "without_memory_behavior": f"The answer {fact.under}.",
        "with_memory_behavior": f"A good answer will {fact.use}.",
        "observable_delta": f"It does {fact.use}.",
        "minimal_evidence": fact.topic,
    }


def _paragraph(facts: Iterable[InventedFact], rng: random.Random) -> str:
    sentences: list[str] = []
    for fact in facts:
        stated = _clause(fact.text) if rng.random() < OWN_WORDS_SHARE else fact.fluent
        if sentences and rng.random() < JOINED_SHARE:
            sentences[-1] += rng.choice([", and ", "; ", ", while "]) + stated
        else:
            sentences.append(stated)
    return " ".join(f"{_capital(sentence)}." for sentence in sentences)


def _atom(placed: PlacedFact, block: InventedBlock, rng: random.Random) -> Atom:
    fact = placed.fact
    extra_fields: dict[str, Any] = {"origin": placed.origin, "evidence": fact.spoken}
    if placed.origin == "grounded":
        extra_fields["counterfactual_contract"] = _contract(fact)
    return Atom(
        atom_id=placed.atom_id,
        parent_memory_id=block.block_id,
        text=fact.text,
        ideal=fact.level,
        memory_action="ignore" if fact.level == "A" else "apply",
        usage_rubric=invent_rubric(fact, rng),
        **extra_fields,
    )


def _block(block: InventedBlock, rng: random.Random) -> Block:
    facts = [placed.fact for placed in block.facts]
    return Block(
        parent_memory_id=block.block_id,
        memory_text=_paragraph(facts, rng),
        atom_ids=[placed.atom_id for placed in block.facts],
        atomic_concat_text=concat_text(fact.text for fact in facts),
    )


def _invent(i: int, seed: int) -> Example:
    rng = random.Random(f"{seed} invented {i}")
    topics = topics_file()["topics"]
    topic = topics[i % len(topics)]
    drawn_words = {}
    for name, options in topics_file()["words"].items():
        drawn_words[name] = rng.choice(options.split(", "))
    invented_blocks = _topic_blocks(topic, drawn_words, rng)
    question = rng.choice(topic["ask"])
    sentences = []
    for block in invented_blocks:
        sentences.extend(placed.fact.spoken for placed in block.facts)
    invented_blocks = _add_distractors(invented_blocks, topic, drawn_words, rng)
    atoms = []
    for block in invented_blocks:
        atoms.extend(_atom(placed, block, rng) for placed in block.facts)
    blocks = [_block(block, rng) for block in invented_blocks]
    return Example(
        id=f"invented-{seed}-{i:04d}",
        domain=topic["domain"],
        question=question,
        blocks=blocks,
        atoms=rng.sample(atoms, len(atoms)),
        raw_query=" ".join([*sentences, question]),
    )


def invented_examples(n: int, seed: int = 0) -> list[Example]:
    """`n` sound examples about invented people: the same for the same arguments,
    and a prefix of any longer draw.
    """
    return [_invent(i, seed) for i in range(n)]
