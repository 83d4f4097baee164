"""Forty-six ways to spoil a sound row, each with the check that should notice,
and how often it does.

A defect has a name, the check that should catch it, and a function that plants it. Not every row
can bear every defect: where there is no number, none can be changed. Then nothing is planted, and
the row does not count.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd

from memcalib.products.shared.grounding import content_words
from memcalib.products.dataset.lint import (
    LINTS,
    RUBRIC_FIELDS,
    LintLimits,
    cut_stems,
    distinctive_stems,
    lint_example,
    lint_splits,
)
from memcalib.products.dataset.writing import SIGNS, WEIGHTS
from memcalib.problem import (
    Alternative,
    Atom,
    Block,
    Example,
    Level,
    Turn,
    concat_text,
    sample_records,
)

Planter = Callable[[Example, random.Random], Example]
CandidateT = TypeVar("CandidateT")


# Changed copies -----------------------------------------------------------------------------------


def rebuilt(
    example: Example,
    atoms: Iterable[Atom] | None = None,
    blocks: Iterable[Block] | None = None,
    **fields: Any,
) -> Example:
    """The example with other atoms, blocks or fields, and exact concatenations to match."""
    atoms = list(atoms or example.atoms)
    texts = {atom.atom_id: atom.text for atom in atoms}
    rejoined = []
    for block in blocks or example.blocks:
        exact_text = concat_text(texts[atom_id] for atom_id in block.atom_ids)
        rejoined.append(block.model_copy(update={"atomic_concat_text": exact_text}))
    return example.model_copy(update={"atoms": atoms, "blocks": rejoined, **fields})


def with_atom(example: Example, atom: Atom, **fields: Any) -> Example:
    """The example with other fields in one atom."""
    atoms = []
    for candidate in example.atoms:
        if candidate.atom_id == atom.atom_id:
            candidate = candidate.model_copy(update=fields)
        atoms.append(candidate)
    return rebuilt(example, atoms)


def with_rubric(example: Example, atom: Atom, **fields: Any) -> Example:
    """The example with other fields in the rubric of one atom."""
    rubric = dict(atom.usage_rubric or {})
    rubric.update(fields)
    return with_atom(example, atom, usage_rubric=rubric)


def with_text(example: Example, block: Block, text: str) -> Example:
    """The example with another fluent text in one block."""
    blocks = []
    for candidate in example.blocks:
        if candidate.parent_memory_id == block.parent_memory_id:
            candidate = candidate.model_copy(update={"memory_text": text})
        blocks.append(candidate)
    return rebuilt(example, blocks=blocks)


def extra_field(atom: Atom, name: str, default: Any = "") -> Any:
    """A field of an atom that the schema does not name."""
    return (atom.model_extra or {}).get(name, default)


def atoms_of_origin(example: Example, origin: str) -> list[Atom]:
    """The atoms that come from the source ("grounded"), or are distractors of one kind."""
    return [atom for atom in example.atoms if extra_field(atom, "origin") == origin]


# The table ----------------------------------------------------------------------------------------


class NothingToSpoil(ValueError):
    """A row that cannot have a defect."""


def choose(candidates: Sequence[CandidateT], rng: random.Random) -> CandidateT:
    """One of the candidates; raises `NothingToSpoil` when there is none."""
    if not candidates:
        raise NothingToSpoil("no place in this row can bear the defect")
    return rng.choice(candidates)


@dataclass(frozen=True)
class Defect:
    """A way to spoil a row, and the check that should notice."""

    name: str
    description: str
    check: str
    make: Planter


DEFECTS: dict[str, Defect] = {}


def defect(check: str) -> Callable[[Planter], Planter]:
    """Enter a function in `DEFECTS` under its own name, with the check that should catch what it
    does.
    """

    def enter(make: Planter) -> Planter:
        DEFECTS[make.__name__] = Defect(make.__name__, make.__doc__ or "", check, make)
        return make

    return enter


def plant(example: Example, defect_name: str, rng: random.Random) -> Example | None:
    """The example with a defect, or None when it cannot have this one;
    raises `ValueError` for an unknown defect.
    """
    if defect_name not in DEFECTS:
        raise ValueError(f"defect: found {defect_name!r}; allowed: {', '.join(DEFECTS)}")
    try:
        return DEFECTS[defect_name].make(example, rng)
    except NothingToSpoil:
        return None


# Rubrics ------------------------------------------------------------------------------------------
# The exchange of two rubrics that befell the published benchmark, and its relatives.
# Weight and under-use stay with an atom
# of another level: otherwise the check of levels would notice,
# and nothing would be learned about the check of words.


def _rubric_for(receiver: Atom, giver: Atom) -> dict[str, Any]:
    """What of the giver's rubric moves to the receiver."""
    fields = dict(giver.usage_rubric or {})
    if receiver.ideal != giver.ideal:
        fields.pop("memory_usage_weight", None)
        fields.pop("under_use", None)
    return fields


@defect("rubric_alignment")
def swapped_rubrics(example: Example, rng: random.Random) -> Example:
    """Two atoms of a row have each other's rubric."""
    pairs = []
    for i, first in enumerate(example.atoms):
        pairs.extend((first, second) for second in example.atoms[:i])
    of_one_level = [pair for pair in pairs if pair[0].ideal == pair[1].ideal]
    first, second = choose(of_one_level or pairs, rng)
    changed = with_rubric(example, first, **_rubric_for(first, second))
    return with_rubric(changed, second, **_rubric_for(second, first))


@defect("rubric_unrelated")
def foreign_rubric(example: Example, rng: random.Random) -> Example:
    """An atom has the rubric of an atom of another dataset and domain."""
    atom = rng.choice(example.atoms)
    foreign_atoms: list[Atom] = []
    for record in sample_records():
        if record.domain != example.domain:
            foreign_atoms.extend(other for other in record.atoms if other.ideal == atom.ideal)
    return with_atom(example, atom, usage_rubric=rng.choice(foreign_atoms).usage_rubric)


STRANGE_IDENTIFIERS = (
    "`retry_policy_v2`",
    "HikariPool",
    "`flushAll()`",
    "48.75 mmol",
    "ACME_TOKEN",
    "0.0625 units",
    "libvorbis_enc",
)


@defect("rubric_identifiers")
def strange_identifiers(example: Example, rng: random.Random) -> Example:
    """A rubric asks for an identifier or a figure that the row has nowhere."""
    atom = rng.choice(example.atoms)
    identifier = rng.choice(STRANGE_IDENTIFIERS)
    rubric = atom.usage_rubric or {}
    return with_rubric(
        example,
        atom,
        correct_use=f"{rubric['correct_use']} Names {identifier}.",
        observable_checks=[*rubric["observable_checks"], f"{identifier} is given."],
    )


@defect("rubric_alignment")
def foreign_rubric_with_identifiers(example: Example, rng: random.Random) -> Example:
    """An atom has a rubric of another domain that asks for an unknown identifier."""
    changed = foreign_rubric(example, rng)
    rubrics_before = {atom.atom_id: atom.usage_rubric for atom in example.atoms}
    changed_atoms = [a for a in changed.atoms if a.usage_rubric != rubrics_before[a.atom_id]]
    identifier = rng.choice(STRANGE_IDENTIFIERS)
    return with_rubric(changed, changed_atoms[0], correct_use=f"Names {identifier}.")


@defect("rubric_question")
def query_as_rubric(example: Example, rng: random.Random) -> Example:
    """A rubric restates the query."""
    if len(distinctive_stems(example.question, LintLimits())) < 4:
        raise NothingToSpoil("the query has too few words of its own")
    return with_rubric(
        example,
        rng.choice(example.atoms),
        expected_answer_behavior=f"The answer responds to: {example.question}",
        correct_use=f"Deal with this. {example.question}",
    )


@defect("level_vs_rubric")
def wrong_weight(example: Example, rng: random.Random) -> Example:
    """The weight of a rubric is that of another level."""
    atom = rng.choice(example.atoms)
    other_weights = [weight for level, weight in WEIGHTS.items() if level != atom.ideal]
    return with_rubric(example, atom, memory_usage_weight=rng.choice(other_weights))


@defect("level_vs_rubric")
def wrong_filler(example: Example, rng: random.Random) -> Example:
    """Under-use is described at Ignore, or called not applicable above."""
    atom = rng.choice(example.atoms)
    under_use = "Not applicable." if atom.ideal else "The answer forgets what the user said."
    return with_rubric(example, atom, under_use=under_use)


@defect("rubric_fields")
def missing_field(example: Example, rng: random.Random) -> Example:
    """A rubric lacks a field."""
    atom = rng.choice(example.atoms)
    missing = rng.choice(RUBRIC_FIELDS)
    rubric = dict(atom.usage_rubric or {})
    rubric.pop(missing, None)
    return with_atom(example, atom, usage_rubric=rubric)


@defect("rubric_fields")
def empty_field(example: Example, rng: random.Random) -> Example:
    """A field of a rubric is blank."""
    name = rng.choice(RUBRIC_FIELDS)
    atom = rng.choice(example.atoms)
    blanks = ([], [" "]) if name == "observable_checks" else ("", "  ")
    return with_rubric(example, atom, **{name: rng.choice(blanks)})


@defect("rubrics_absent")
def without_rubrics(example: Example, rng: random.Random) -> Example:
    """No atom has a rubric."""
    atoms = [atom.model_copy(update={"usage_rubric": {}}) for atom in example.atoms]
    return rebuilt(example, atoms)


# Query and evidence -------------------------------------------------------------------------------


@defect("question_leak")
def told_verbatim(example: Example, rng: random.Random) -> Example:
    """The query contains an atom word for word."""
    return rebuilt(example, question=f"{rng.choice(example.atoms).text} {example.question}")


@defect("question_leak")
def told_in_other_words(example: Example, rng: random.Random) -> Example:
    """The query contains most content words of an atom, in a different order."""
    words_by_atom = [content_words(atom.text) for atom in example.atoms]
    words = choose([words for words in words_by_atom if len(words) >= 4], rng)
    three_quarters = -(-3 * len(words) // 4)
    *first_words, last_word = rng.sample(words, three_quarters)
    hint = f"This is about {', '.join(first_words)} and {last_word}."
    return rebuilt(example, question=f"{example.question} {hint}")


@defect("evidence_substring")
def misquoted_evidence(example: Example, rng: random.Random) -> Example:
    """A word is missing inside the evidence."""
    quotable = [a for a in example.atoms if len(extra_field(a, "evidence").split()) >= 4]
    atom = choose(quotable, rng)
    words = extra_field(atom, "evidence").split()
    del words[rng.randrange(1, len(words) - 1)]
    return with_atom(example, atom, evidence=" ".join(words))


# An atom says otherwise what its source says, by a single word. Its evidence stays as it was.


def _with_other_words(
    example: Example, pattern: str, replace: Callable[[re.Match], str], rng: random.Random
) -> Example:
    """One match of a pattern in an atom of the source is replaced."""
    matches: list[tuple[Atom, re.Match]] = []
    for atom in atoms_of_origin(example, "grounded"):
        matches.extend((atom, match) for match in re.finditer(pattern, atom.text))
    atom, match = choose(matches, rng)
    text = atom.text[: match.start()] + replace(match) + atom.text[match.end() :]
    return with_atom(example, atom, text=text)


@defect("atom_source")
def other_number(example: Example, rng: random.Random) -> Example:
    """A number in an atom is ten times the number in the source."""
    number = r"(?<![\w.,])[1-9]\d*(?![\w.,:]*\d)"
    return _with_other_words(example, number, lambda match: f"{match[0]}0", rng)


OTHER_UNITS = {
    "mg": "g",
    "years": "months",
    "months": "years",
    "weeks": "days",
    "days": "weeks",
    "hours": "minutes",
    "minutes": "hours",
    "euros": "dollars",
    "GB": "MB",
    "MB": "GB",
}


@defect("atom_source")
def other_unit(example: Example, rng: random.Random) -> Example:
    """A number in an atom has a different unit."""
    unit = rf"(?<=\d )(?:{'|'.join(OTHER_UNITS)})\b"
    return _with_other_words(example, unit, lambda match: OTHER_UNITS[match[0]], rng)


@defect("atom_source")
def other_name(example: Example, rng: random.Random) -> Example:
    """A name in an atom was replaced by another one."""
    names = ("Reykjavik", "Quentin", "Zagreb", "Oktober")
    name = r"(?<=[a-z] )[A-Z][a-z]{3,}(?![\w.])"
    return _with_other_words(example, name, lambda match: rng.choice(names), rng)


def _denied(match: re.Match) -> str:
    if match[0] in ("not ", "never "):
        return ""
    return f"{match[0]}not "


@defect("atom_source")
def other_denial(example: Example, rng: random.Random) -> Example:
    """An atom denies what its source affirms, or the other way round."""
    verb_or_denial = r"\b(?:is|are|was|has|can|will) (?!not|no\b)|\b(?:not|never) "
    return _with_other_words(example, verb_or_denial, _denied, rng)


@defect("atom_source")
def other_certainty(example: Example, rng: random.Random) -> Example:
    """An atom is less certain than its source."""
    verb = r"(?<=[a-z] )(?:is|has|takes|wants|needs|lives|works|uses) "
    return _with_other_words(example, verb, lambda match: f"probably {match[0]}", rng)


OTHER_TIMES = {
    "since": "until",
    "until": "since",
    "before": "after",
    "after": "before",
    "last": "next",
    "next": "last",
    "ago": "from now",
}


@defect("atom_source")
def other_time(example: Example, rng: random.Random) -> Example:
    """An atom has a different time: until instead of since, after instead of before, next \
instead of last."""
    time = rf"\b(?:{'|'.join(OTHER_TIMES)})\b"
    return _with_other_words(example, time, lambda match: OTHER_TIMES[match[0]], rng)


@defect("atom_source")
def other_person(example: Example, rng: random.Random) -> Example:
    """An atom says about the user's aunt what is true of the user."""
    user = r"\b[Tt]he user(?!['’])"
    return _with_other_words(example, user, lambda match: f"{match[0]}'s aunt", rng)


# Atoms --------------------------------------------------------------------------------------------


def _with_added_atom(example: Example, atom: Atom, text: str) -> Example:
    """The example with one more atom in the block of another."""
    added = atom.model_copy(update={"atom_id": f"{atom.atom_id}_again", "text": text})
    blocks = []
    for block in example.blocks:
        if atom.atom_id in block.atom_ids:
            longer = {
                "atom_ids": [*block.atom_ids, added.atom_id],
                "memory_text": f"{block.memory_text} {text}",
            }
            block = block.model_copy(update=longer)
        blocks.append(block)
    return rebuilt(example, [*example.atoms, added], blocks)


@defect("independence")
def repeated_atom(example: Example, rng: random.Random) -> Example:
    """An atom occurs twice, the second time with an introductory phrase."""
    atom = rng.choice(example.atoms)
    opening = rng.choice(("It is also so that", "As it is,", "And then there is this:"))
    text = f"{opening} {atom.text[:1].lower()}{atom.text[1:]}"
    return _with_added_atom(example, atom, text)


@defect("independence")
def contained_atom(example: Example, rng: random.Random) -> Example:
    """An atom contains another one of at least three stems."""
    atom = choose([atom for atom in example.atoms if len(cut_stems(atom.text)) >= 3], rng)
    endings = (
        "which surprised the neighbours",
        "and this has been discussed with colleagues",
        "to the delight of a friend",
    )
    return _with_added_atom(example, atom, f"{atom.text.rstrip('.')}, {rng.choice(endings)}.")


def _in_first_person(text: str) -> str:
    text = re.sub(r"\b[Tt]he user['’]s\b", "my", text)
    return re.sub(r"\b[Tt]he user\b", "I", text)


@defect("first_person")
def own_voice(example: Example, rng: random.Random) -> Example:
    """An atom is written in the first person."""
    about_user = [atom for atom in example.atoms if _in_first_person(atom.text) != atom.text]
    atom = choose(about_user, rng)
    return with_atom(example, atom, text=_in_first_person(atom.text))


@defect("action_level")
def wrong_action(example: Example, rng: random.Random) -> Example:
    """The memory action belongs to another level."""
    atom = rng.choice(example.atoms)
    action = "ignore" if atom.ideal else rng.choice(("apply", "correct"))
    return with_atom(example, atom, memory_action=action)


def _passage_of(atom_id: str) -> str:
    """An atom id without its number: `p1_a` of `p1_a2`."""
    return re.sub(r"\d+$", "", atom_id)


@defect("atom_order")
def swapped_order(example: Example, rng: random.Random) -> Example:
    """Two atoms of one passage stand in each other's place."""
    atom_ids = list(example.levels)
    pairs = []
    for i, later in enumerate(atom_ids):
        if not re.search(r"_a\d+$", later):
            continue
        for earlier in atom_ids[:i]:
            if _passage_of(earlier) == _passage_of(later):
                pairs.append((later, earlier))
    later, earlier = choose(pairs, rng)
    swapped_id = {later: earlier, earlier: later}
    block_of = {atom.atom_id: atom.parent_memory_id for atom in example.atoms}
    atoms = []
    for atom in example.atoms:
        new_block = block_of[swapped_id.get(atom.atom_id, atom.atom_id)]
        atoms.append(atom.model_copy(update={"parent_memory_id": new_block}))
    blocks = []
    for block in example.blocks:
        new_ids = [swapped_id.get(atom_id, atom_id) for atom_id in block.atom_ids]
        blocks.append(block.model_copy(update={"atom_ids": new_ids}))
    return rebuilt(example, atoms, blocks)


@defect("structure")
def other_parent(example: Example, rng: random.Random) -> Example:
    """An atom names another block than the one it stands in."""
    atom = rng.choice(example.atoms)
    block_ids = [block.parent_memory_id for block in example.blocks]
    other_ids = [block_id for block_id in block_ids if block_id != atom.parent_memory_id]
    return with_atom(example, atom, parent_memory_id=choose(other_ids, rng))


@defect("structure")
def empty_text(example: Example, rng: random.Random) -> Example:
    """An atom or a block has no text."""
    if rng.random() < 0.5:
        return with_text(example, rng.choice(example.blocks), " ")
    return with_atom(example, rng.choice(example.atoms), text="")


# Contracts and distractors ------------------------------------------------------------------------


def _atom_with_contract(
    example: Example, above_ignore: bool, rng: random.Random
) -> tuple[Atom, dict[str, Any]]:
    """An atom above Ignore or at it, and a copy of the difference that it is said to make."""
    with_contract = [
        atom
        for atom in example.atoms
        if bool(atom.ideal) == above_ignore and extra_field(atom, "counterfactual_contract")
    ]
    atom = choose(with_contract, rng)
    return atom, dict(extra_field(atom, "counterfactual_contract"))


@defect("contract_level")
def no_difference(example: Example, rng: random.Random) -> Example:
    """An atom above Ignore makes no difference, or no visible one."""
    atom, contract = _atom_with_contract(example, True, rng)
    contract.update(rng.choice(({"observable_delta": "None."}, {"minimal_evidence": ""})))
    return with_atom(example, atom, counterfactual_contract=contract)


@defect("contract_level")
def difference_at_ignore(example: Example, rng: random.Random) -> Example:
    """An atom at Ignore makes a difference."""
    atom, contract = _atom_with_contract(example, False, rng)
    contract["observable_delta"] = "A remark is added."
    contract["minimal_evidence"] = "the remark"
    return with_atom(example, atom, counterfactual_contract=contract)


@defect("hard_family")
def unknown_family(example: Example, rng: random.Random) -> Example:
    """A hard distractor is of a family that does not exist."""
    atom = choose(atoms_of_origin(example, "hard"), rng)
    family = rng.choice(("tempting", "topical", "other person"))
    return with_atom(example, atom, hard_a_family=family)


@defect("hard_family")
def unsigned_family(example: Example, rng: random.Random) -> Example:
    """A hard distractor has no sign of its family."""
    unsigned = []
    for atom in atoms_of_origin(example, "hard"):
        for family, (sign, *_) in SIGNS.items():
            if not sign.search(atom.text):
                unsigned.append((atom, family))
    atom, family = choose(unsigned, rng)
    return with_atom(example, atom, hard_a_family=family)


STRAY_SENTENCES = (
    "A bank called twice about a lost card.",
    "Momo the cat sleeps on the fax machine.",
    "Everyone at the bridge club owes the caretaker an apology.",
    "The lighthouse diary sells well abroad.",
    "Somebody signed the guest book with green ink.",
    "An organ builder from Bergen sent an invoice.",
    "Mushrooms from the forest dry above the stove.",
    "Two swans nest beside the railway bridge.",
)


@defect("auxiliary_block")
def stray_auxiliary(example: Example, rng: random.Random) -> Example:
    """An auxiliary atom is about something that its block does not name."""
    atom = choose(atoms_of_origin(example, "auxiliary"), rng)
    return with_atom(example, atom, text=rng.choice(STRAY_SENTENCES))


@defect("distractor_apart")
def telling_auxiliary(example: Example, rng: random.Random) -> Example:
    """An auxiliary atom takes up what the query asks."""
    memory_words = set()
    for atom in example.atoms:
        memory_words.update(content_words(atom.text))
    query_words = [w for w in content_words(example.question) if w not in memory_words]
    if len(query_words) < 4:
        raise NothingToSpoil("the query has too few words of its own")
    atom = choose(atoms_of_origin(example, "auxiliary"), rng)
    hint = f"with {', '.join(rng.sample(query_words, 4))} in mind"
    return with_atom(example, atom, text=f"{atom.text.rstrip('.')}, {hint}.")


# Blocks and characters ----------------------------------------------------------------------------


@defect("block_keeps_atoms")
def dropped_atom(example: Example, rng: random.Random) -> Example:
    """The text of a block passes over one of its atoms."""
    block = choose([block for block in example.blocks if len(block.atom_ids) > 1], rng)
    dropped = rng.choice(block.atom_ids)
    remaining = [example.atom(name).text for name in block.atom_ids if name != dropped]
    return with_text(example, block, concat_text(remaining))


@defect("block_adds_nothing")
def added_sentence(example: Example, rng: random.Random) -> Example:
    """The text of a block has a sentence more, first or last."""
    block = rng.choice(example.blocks)
    sentences = [block.memory_text, rng.choice(STRAY_SENTENCES)]
    return with_text(example, block, " ".join(rng.sample(sentences, 2)))


@dataclass(frozen=True)
class BlockEdit:
    """A stretch of a block's text and what would stand there instead."""

    block: Block
    start: int
    end: int
    replacement: str


def _with_one_edit(example: Example, edits: Sequence[BlockEdit], rng: random.Random) -> Example:
    edit = choose(edits, rng)
    text = edit.block.memory_text
    changed = text[: edit.start] + edit.replacement + text[edit.end :]
    return with_text(example, edit.block, changed)


@defect("block_numbers")
def changed_number(example: Example, rng: random.Random) -> Example:
    """A number in a block is another one."""
    edits = []
    for block in example.blocks:
        for match in re.finditer(r"(?<![\w.,])\d+(?![\w.,:]*\d)", block.memory_text):
            number = str(int(match[0]) + rng.randint(1, 9))
            edits.append(BlockEdit(block, match.start(), match.end(), number))
    return _with_one_edit(example, edits, rng)


@defect("block_negation")
def changed_negation(example: Example, rng: random.Random) -> Example:
    """A block denies what its atoms affirm, or the other way round."""
    verb = r"\b(?:is|are|was|were|has|had|can|may|must|will|would) "
    removals = []
    insertions = []
    for block in example.blocks:
        for match in re.finditer(r"\b(?:not|never|no) ", block.memory_text):
            removals.append(BlockEdit(block, match.start(), match.end(), ""))
        for match in re.finditer(verb, block.memory_text):
            insertions.append(BlockEdit(block, match.end(), match.end(), "not "))
    return _with_one_edit(example, removals + insertions, rng)


def _typographic(match: re.Match) -> str:
    return "’" if match[0] == "'" else " – "


def _mangled(text: str) -> str:
    """A text with one typographic sign, read with the wrong encoding."""
    with_sign = re.sub(r"'|(?<=\w) (?=\w)", _typographic, text, count=1)
    return with_sign.encode().decode("cp1252", "replace")


@defect("text_integrity")
def mojibake(example: Example, rng: random.Random) -> Example:
    """An atom or a block was read with the wrong encoding."""
    if rng.random() < 0.5:
        block = rng.choice(example.blocks)
        return with_text(example, block, _mangled(block.memory_text))
    atom = rng.choice(example.atoms)
    return with_atom(example, atom, text=_mangled(atom.text))


@defect("text_integrity")
def control_token(example: Example, rng: random.Random) -> Example:
    """A block ends with a token of a chat template."""
    block = rng.choice(example.blocks)
    token = rng.choice(("<|im_end|>", "<|eot_id|>", " [/INST]"))
    return with_text(example, block, block.memory_text + token)


@defect("split_duplicates")
def other_split(example: Example, rng: random.Random) -> Example:
    """Another row asks the same, in other letters."""
    question = example.question
    variants = (question.upper(), f"{question.rstrip('?.')} ...", f"“{question}”")
    changed = rebuilt(example, question=rng.choice(variants))
    return changed.model_copy(update={"id": f"{example.id}-again"})


# Conversation, times, scores, other levels, groups ------------------------------------------------


SMALL_TALK = (
    ("user", "Good morning, I am back from the lake."),
    ("assistant", "Welcome back. How was the weather there?"),
    ("user", "Dry, with a little wind on the second afternoon."),
    ("assistant", "That sounds pleasant. What may I do for you today?"),
)


def with_talk(example: Example, *last: tuple[str, str], day: str = "2026-03-02") -> Example:
    """The example after small talk of one day that says nothing of its memory, and `last` turns."""
    turns = [Turn(role=role, content=text, time=day) for role, text in (*SMALL_TALK, *last)]
    return rebuilt(example, turns=turns)


def with_times(example: Example, *times: str | None) -> Example:
    """The example with these times of its first blocks."""
    blocks = list(example.blocks)
    for i, time in enumerate(times):
        blocks[i] = blocks[i].model_copy(update={"time": time})
    return rebuilt(example, blocks=blocks)


@defect("turns_before_query")
def query_as_turn(example: Example, rng: random.Random) -> Example:
    """The conversation ends in the query."""
    return with_talk(example, ("user", rng.choice((example.question, example.question.upper()))))


@defect("turns_before_query")
def repeated_turn(example: Example, rng: random.Random) -> Example:
    """A turn stands there twice."""
    return with_talk(example, SMALL_TALK[-1])


@defect("turn_leak")
def told_in_conversation(example: Example, rng: random.Random) -> Example:
    """A turn says an atom."""
    return with_talk(example, ("user", f"By the way: {rng.choice(example.atoms).text} You knew."))


@defect("memory_times")
def memory_after_conversation(example: Example, rng: random.Random) -> Example:
    """A memory is dated after the last turn."""
    return with_times(with_talk(example), rng.choice(("2026-03-03", "2027-01-01T08:00")))


@defect("memory_scores")
def one_score_for_all(example: Example, rng: random.Random) -> Example:
    """All memories have one score, or one of them lost its own."""
    scores = [1.0] * len(example.blocks)
    if len(scores) < 3 or rng.random() < 0.5:
        choose(scores[1:], rng)
        scores = [None, *(0.9 / k for k in range(1, len(scores)))]
    blocks = []
    for block, score in zip(example.blocks, scores, strict=True):
        blocks.append(block.model_copy(update={"score": score}))
    return rebuilt(example, blocks=blocks)


@defect("alternative_levels")
def idle_alternative(example: Example, rng: random.Random) -> Example:
    """Another level has a word for a reason, or every level can be defended."""
    atom = rng.choice(example.atoms)
    others = [level for level in Level if level != atom.ideal]
    reason = "A reader may well see it so."
    alternatives = [Alternative(level=level, reason=f"{reason} {level.label}.") for level in others]
    if rng.random() < 0.5:
        alternatives = [Alternative(level=rng.choice(others), reason=atom.text)]
    return with_atom(example, atom, alternative=alternatives)


@defect("question_groups")
def other_group(example: Example, rng: random.Random) -> Example:
    """Another row asks the same in a group of its own."""
    return rebuilt(example, id=f"{example.id}-again", group=f"user {rng.randrange(100)}")


# What is caught -----------------------------------------------------------------------------------


def _is_caught(example: Example, spoiled: Example, check: str, limits: LintLimits | None) -> bool:
    if LINTS[check].scope == "files":
        return bool(lint_splits({"one": [example], "other": [spoiled]}, [check]).findings)
    return bool(lint_example(spoiled, [check], limits))


def catch_rate(
    examples: Sequence[Example],
    defect_name: str,
    max_planted: int = 50,
    seed: int = 0,
    limits: LintLimits | None = None,
) -> tuple[int, int]:
    """How often a defect could be planted, at most `max_planted` times,
    and how often its check caught it.

    A check that had a finding before the planting would be right for the wrong reason;
    such rows are passed over.
    """
    check = DEFECTS[defect_name].check
    checks_rows = LINTS[check].scope == "row"
    planted = 0
    caught = 0
    rng = random.Random(f"{seed} {defect_name}")
    for _ in range(20 * max_planted):
        example = rng.choice(examples)
        spoiled = plant(example, defect_name, rng)
        if spoiled is None:
            continue
        if checks_rows and lint_example(example, [check], limits):
            continue
        planted += 1
        if _is_caught(example, spoiled, check, limits):
            caught += 1
        if planted == max_planted:
            break
    return planted, caught


def catch_table(
    sets: Mapping[str, Sequence[Example]], max_planted: int = 50, seed: int = 0
) -> pd.DataFrame:
    """For each defect its check and, by set of sound rows, how many were planted and caught;
    last, the percentage of all.
    """
    rows = []
    for name, planted_defect in DEFECTS.items():
        row: dict[str, Any] = {"check": planted_defect.check}
        planted_in_all = 0
        caught_in_all = 0
        for title, examples in sets.items():
            planted, caught = catch_rate(examples, name, max_planted, seed)
            row[f"{title}: planted"] = planted
            row[f"{title}: caught"] = caught
            planted_in_all += planted
            caught_in_all += caught
        row["caught %"] = 100 * caught_in_all / planted_in_all
        rows.append(row)
    return pd.DataFrame(rows, index=list(DEFECTS))


def alarm_table(
    sets: Mapping[str, Sequence[Example]], limits: LintLimits | None = None
) -> pd.DataFrame:
    """For each check of rows its severity and, by set of sound rows,
    the percentage that it flags; first, of any error.
    """
    row_checks = {name: check for name, check in LINTS.items() if check.scope == "row"}
    errors = [name for name, check in row_checks.items() if check.severity == "error"]
    columns: dict[str, dict[str, Any]] = {"severity": {"any error": "error"}}
    for name, check in row_checks.items():
        columns["severity"][name] = check.severity
    for title, examples in sets.items():
        flags_by_row = []
        for example in examples:
            flags_by_row.append({finding.rule for finding in lint_example(example, None, limits)})
        with_error = sum(not flags.isdisjoint(errors) for flags in flags_by_row)
        percentages = {"any error": 100 * with_error / len(flags_by_row)}
        for name in row_checks:
            flagged = sum(name in flags for flags in flags_by_row)
            percentages[name] = 100 * flagged / len(flags_by_row)
        columns[title] = percentages
    return pd.DataFrame(columns)
