"""Texts compared by code: what is in a source, what a query gives away,
what a statement or a paragraph says otherwise.
"""

import re
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared.grounding import (
    actors,
    content_words,
    coverage,
    denied,
    exact_faults,
    find_exact,
    find_leak,
    first_person_word,
    foreign_numbers,
    full_forms,
    marks,
    names,
    numbers,
    quantities,
    source_faults,
    opposite_word,
    stems,
    swapped_actors,
    text_faults,
    too_close,
    unit_faults,
    word_faults,
)
from memcalib.problem import concat_text, sample_records

FIXTURES = Path(__file__).parents[2] / "fixtures"

# Tools --------------------------------------------------------------------------------------------

pieces = st.sampled_from(
    ["ab", "b", "a", "5", " ", "  ", "\n", "\t", ".", "-", "é", "ab c", "\u2003"]
)
strings = st.lists(pieces, max_size=12).map("".join)


def slow_find(quote, text):
    """The first slice, from the left, that equals the quotation up to white space and breaks no
    word.
    """
    quote_words = quote.split()
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stretch = text[start:end]
            if stretch != stretch.strip() or stretch.split() != quote_words:
                continue
            breaks_left = start > 0 and text[start - 1].isalnum() and stretch[0].isalnum()
            breaks_right = end < len(text) and stretch[-1].isalnum() and text[end].isalnum()
            if not breaks_left and not breaks_right:
                return stretch
    return ""


@given(strings, strings)
def test_finding_agrees_with_a_slow_search(quote, text):
    assert find_exact(quote, text) == slow_find(quote, text)


@given(strings, st.data())
def test_a_copied_stretch_is_found_and_is_part_of_the_text(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    copied = text[start:end]
    evidence = find_exact(copied, text)
    assert evidence in text
    assert not evidence or evidence.split() == copied.split()


def test_a_long_text_is_searched_in_linear_time():
    text = "ab " * 400_000
    assert find_exact("ab  ab", text) == "ab ab"
    assert find_exact("ab a", text) == ""
    assert find_exact(text + "c", text) == ""


VOCABULARY = [
    "fox",
    "hen",
    "yard",
    "noise",
    "may",
    "fence",
    "dog",
    "the",
    "and",
    "user",
    "has",
    "5",
    "12",
]
words = st.lists(st.sampled_from(VOCABULARY), max_size=9).map(" ".join)


def slow_leak(detail, query):
    detail_words = content_words(detail)
    query_words = content_words(query)
    if not detail_words:
        return False
    run_length = min(5, len(detail_words))
    for i in range(len(detail_words) - run_length + 1):
        for k in range(len(query_words)):
            if detail_words[i : i + run_length] == query_words[k : k + run_length]:
                return True
    share = sum(word in query_words for word in detail_words) / len(detail_words)
    return len(detail_words) >= 4 and share >= 0.65


@given(words, words)
def test_leaks_agree_with_a_slow_reading_of_the_rules(detail, query):
    leak = find_leak(detail, query)
    assert bool(leak) == slow_leak(detail, query)
    leaked_words = leak.replace("…", " ").split()
    assert all(word in content_words(query) for word in leaked_words)


@given(words)
def test_a_detail_leaks_into_itself(detail):
    assert bool(find_leak(detail, f"So, {detail}?")) == bool(content_words(detail))


@pytest.mark.parametrize(
    ("detail", "query", "leaks"),
    [
        ("The user is vegan.", "Which vegan dishes are quick?", True),
        ("The user is 21 years old.", "What should a 21 years old runner eat?", True),
        ("The user is 21 years old.", "What should a runner eat?", False),
        ("The user owns a dog.", "How do I train my dog?", False),
        (
            "The user has been trying for three years.",
            "What is usually done after three years of trying?",
            False,
        ),
        (
            "The user takes metformin twice a day with meals.",
            "I take metformin twice a day with meals. Is it safe?",
            True,
        ),
        (
            "The user lives in a small flat in Ulm with a cat.",
            "Which plants suit a flat in Ulm and a small cat?",
            True,
        ),
        ("The user.", "What does the user do?", False),
        ("", "What now?", False),
    ],
)
def test_what_is_a_leak(detail, query, leaks):
    assert bool(find_leak(detail, query)) == leaks


@given(words, words)
def test_coverage_is_a_share_and_full_for_a_part(statement, source):
    assert 0 <= coverage(statement, source) <= 1
    assert coverage(statement, f"{source} {statement}") == 1
    assert coverage(statement, "") == (0 if content_words(statement) else 1)


@pytest.mark.parametrize(
    ("statement", "source", "foreign"),
    [
        ("5 hens", "five hens", []),
        ("12 hens", "twelve hens", []),
        ("13 hens", "thirteen hens", []),
        ("13 hens", "thirty hens", ["13"]),
        ("thirteen hens", "30 hens", ["13"]),
        ("1000 mg", "1,000 mg", []),
        ("2.5 mg twice", "2.5 mg", []),
        ("25 mg", "2.5 mg", ["25"]),
        ("5 mg", "5mg", []),
        ("since 2012", "since 2021", ["2012"]),
        ("no number", "", []),
    ],
)
def test_numbers_have_to_be_there(statement, source, foreign):
    assert foreign_numbers(statement, source) == foreign


@pytest.mark.parametrize(
    "text",
    [
        "I keep hens.",
        "When I run, it hurts.",
        "It hurts me.",
        "My knee hurts.",
        "We moved.",
        "They told us.",
        "It is our yard.",
        "I'm tired.",
        "The user said: I am tired.",
        "The fox ate our hens",
        "the user and I",
        "(my hens)",
    ],
)
def test_first_person_is_seen(text):
    assert first_person_word(text)


@pytest.mark.parametrize(
    "text",
    [
        "The user has type I diabetes.",
        "The user fought in World War I.",
        "The user's disk has high I/O.",
        "The US visa ran out.",
        "The variable my_list is empty.",
        "The file my.cnf is missing.",
        "The user met Mehmet.",
        "The user is in stage I.",
        "The user works in a mine.",
        "The user's hours are long.",
        "The user listens to music.",
    ],
)
def test_third_person_is_left_alone(text):
    assert first_person_word(text) == ""


@given(words, words)
def test_closeness_is_symmetric_and_true_of_equals(atom, other_atom):
    assert too_close(atom, other_atom) == too_close(other_atom, atom)
    assert too_close(atom, atom) == bool(content_words(atom))


# Paragraphs that are right ------------------------------------------------------------------------

RIGHT = [
    (
        [
            "The user takes 5 mg of amlodipine every morning.",
            "The user's last reading was 150/95.",
            "The user is no smoker.",
        ],
        (
            "Every morning the user takes 5 mg of amlodipine. The last reading was 150/95. "
            "The user is no smoker."
        ),
    ),
    (
        [
            "The user works as a nurse on night shifts.",
            "The user drinks four cups of coffee in each shift.",
        ],
        "Working as a nurse on night shifts, the user drinks four cups of coffee in each shift.",
    ),
    (
        [
            "The user writes the backend in Go 1.22.",
            "The database is PostgreSQL 16.",
            "The user cannot change its schema.",
        ],
        (
            "The backend is written in Go 1.22, and the database is PostgreSQL 16, "
            "whose schema the user cannot change."
        ),
    ),
    (
        [
            "The user has a daughter named Ida.",
            "Ida is seven years old.",
            "Ida is allergic to peanuts.",
        ],
        "The user has a seven-year-old daughter named Ida, who is allergic to peanuts.",
    ),
    (
        [
            "The user lives in Porto.",
            "The user moved to Porto from Oslo in 2019.",
            "The user has never owned a car.",
        ],
        "The user, who moved from Oslo in 2019, lives in Porto. The user has never owned a car.",
    ),
    (
        [
            "The user wants short answers.",
            "The user wants no tables in answers.",
            "The user reads answers on a phone.",
        ],
        "The user wants short answers without tables and reads them on a phone.",
    ),
    (
        [
            "The user's budget is 1,200 euros.",
            "The user travels with a wheelchair.",
            "The user's sister Anna joins them.",
        ],
        (
            "With a budget of 1200 euros, the user travels with a wheelchair. "
            "The user's sister Anna joins them."
        ),
    ),
    (
        [
            "The user is learning Rust.",
            "The user has written Python for nine years.",
            "The user's laptop has an M2 chip.",
        ],
        (
            "The user, who has written Python for nine years, is learning Rust. "
            "The user's laptop has an M2 chip."
        ),
    ),
    (
        [
            "The user does not eat pork.",
            "The user does not drink wine.",
            "The user cooks with gas.",
        ],
        "The user does not eat pork or drink wine and cooks with gas.",
    ),
    (
        [
            "The user stopped taking azathioprine because of nausea.",
            "The user probably has Crohn's disease.",
        ],
        "The user stopped taking azathioprine because of nausea and probably has Crohn's disease.",
    ),
    (
        [
            "The build fails with TS2345.",
            "The user did not change tsconfig.json.",
            "The file max_tokens.py is new.",
        ],
        (
            "The build fails with TS2345. The user did not change tsconfig.json, "
            "and the file max_tokens.py is new."
        ),
    ),
    (
        [
            "The user found a brass bell in the attic in May 2014.",
            "The user hung the brass bell in the porch.",
        ],
        "In May 2014 the user found a brass bell in the attic and hung it in the porch.",
    ),
]
SHIPPED = []  # the atoms and the paragraph of each block that ships with the package
for example in sample_records():
    for block in example.blocks:
        atom_texts = [example.atom(atom_id).text for atom_id in block.atom_ids]
        SHIPPED.append((atom_texts, block.memory_text))
PAIRS = RIGHT + SHIPPED
STRANGERS = (
    "The user repaired a bicycle in Oslo.",
    "The user sings.",
    "The user's uncle sells honey at the station.",
    "The user was stung by a wasp in 1987.",
)


@pytest.mark.parametrize(("atoms", "text"), PAIRS)
def test_sound_paragraphs_pass(atoms, text):
    assert list(text_faults(atoms, text)) == []


@pytest.mark.parametrize(("atoms", "text"), SHIPPED)
def test_atoms_one_after_another_pass(atoms, text):
    assert list(text_faults(atoms, concat_text(atoms))) == []


def spoiled_lists(atoms, text):
    """(kind, atoms, text) with one atom more than the paragraph says."""
    for stranger in STRANGERS:
        yield "lost atom", [*atoms, stranger], text


def spoiled_paragraphs(atoms, text):
    """(kind, text) for each way of spoiling a paragraph of these atoms."""
    for stranger in STRANGERS:
        yield "added sentence", f"{text} {stranger}"
        yield "added sentence", f"{stranger} {text}"
    yield from without_a_sentence(text)
    yield "added cause", text[:-1] + ", due to the weather."
    yield "opinion", f"Interestingly, {text}"
    doubted = text.replace(" the user", " perhaps the user", 1)
    yield "doubt", doubted.replace("The user", "Perhaps the user", 1)
    for number in re.findall(r"(?<![\w.,:/])\d+(?![\w.,:/]*\d)", text):
        yield "number", text.replace(number, "97", 1)
    for name in set(names(text)):
        yield "name", text.replace(name, "Zorbia")
    for word in re.findall(r" (?:not|never|no|without|cannot) ", text):
        yield "negation gone", text.replace(word, " ", 1)
    for word in (" is ", " was ", " has "):
        if word in text:
            yield "negation new", text.replace(word, f"{word}not ", 1)
    yield from with_swapped_numbers(atoms, text)


def without_a_sentence(text):
    sentences = re.split(r"(?<=[.!?])\s+", text)
    if len(sentences) > 1:
        for i in range(len(sentences)):
            yield "lost sentence", " ".join(sentences[:i] + sentences[i + 1 :])


def with_swapped_numbers(atoms, text):
    """Two numbers change places that are each in one atom and not in the same."""

    def atom_of(number):
        return [atom for atom in atoms if number in numbers(atom) + names(atom)]

    text_numbers = dict.fromkeys(re.findall(r"(?<![\w.,:/])\d+(?![\w.,:/])", text))
    movable = [number for number in text_numbers if len(atom_of(number)) == 1]
    for first, second in combinations(movable, 2):
        if not any(first in atom and second in atom for atom in atoms):
            swapped = text.replace(first, "@").replace(second, first).replace("@", second)
            yield "numbers swapped", swapped


def all_spoiled():
    for atoms, text in PAIRS:
        yield from spoiled_lists(atoms, text)
        for kind, spoiled in spoiled_paragraphs(atoms, text):
            if spoiled != text:
                yield kind, atoms, spoiled


CASES = list(all_spoiled())


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in CASES}))
def test_spoiled_paragraphs_are_caught(kind):
    cases = [(atoms, text) for case_kind, atoms, text in CASES if case_kind == kind]
    missed = [text for atoms, text in cases if not list(text_faults(atoms, text))]
    assert len(missed) <= 0.05 * len(cases), missed[:5]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (
            "Ann is 24 years old. The user's son is 21 years old. Ann does not eat fish.",
            {"moved number"},
        ),
        ("Ann is 21 years old. The user's son is 24 years old. Ann eats fish.", {"lost negation"}),
        (
            "Ann is 21 years old. The user's son is not 24 years old. Ann eats fish.",
            {"moved negation"},
        ),
        (
            "Ann is 21 years old. The user's son is not 24 years old. Ann does not eat fish.",
            {"added negation"},
        ),
        (
            "Ann is 21 years old. The user's son Bob is 24 years old. Ann does not eat fish.",
            {"added name"},
        ),
        (
            "Bob is 21 years old. The user's son is 24 years old. Bob does not eat fish.",
            {"lost name"},
        ),
        (
            "Ann is 21 years old. The user's son is 25 years old. Ann does not eat fish.",
            {"lost number", "added number"},
        ),
        ("Ann is 21 years old, as is my son of 24 years. Ann does not eat fish.", {"first person"}),
        (
            "Ann is 21 years old.\nThe user's son is 24 years old. Ann does not eat fish.",
            {"paragraph"},
        ),
        (
            "Ann might be 21 years old. The user's son is 24 years old. Ann does not eat fish.",
            {"added certainty"},
        ),
    ],
)
def test_each_rule_by_itself(text, rules):
    atoms = ["Ann is 21 years old.", "The user's son is 24 years old.", "Ann does not eat fish."]
    assert rules <= {fault.rule for fault in text_faults(atoms, text)}


def test_names_that_change_places_are_caught():
    atoms = ["The cat Mina is grey.", "The dog Rex is loud."]
    swapped = "The cat Rex is grey and the dog Mina is loud."
    assert [fault.rule for fault in exact_faults(atoms, swapped)] == ["moved name"]
    assert list(exact_faults(atoms, "The dog Rex is loud and the cat Mina is grey.")) == []


def test_empty_and_odd_texts_do_no_harm():
    for text in (
        "",
        " ",
        "...",
        "\x00",
        "no",
        "12",
        "\ud800",
        "a" * 100_000,
        "x " * 30_000,
        "not " * 50_000,
        "1.1" * 50_000,
        "+" * 50_000,
    ):
        assert list(text_faults(["The user owns a boat."], text))
    assert list(exact_faults([], "")) == []
    assert list(word_faults([], "")) == []
    assert [fault.rule for fault in text_faults(["The user."], "")] == ["paragraph", "lost atom"]


texts = st.lists(
    st.sampled_from(
        [
            "The user",
            "not",
            "or",
            "never",
            "Ann",
            "owns",
            "5",
            "1,200",
            "boats",
            ".",
            ",",
            "but",
            "sings",
        ]
    ),
    max_size=12,
).map(" ".join)


@given(texts)
def test_a_text_has_no_exact_fault_against_itself(text):
    assert list(exact_faults([text], text)) == []


@given(texts, texts)
def test_exact_faults_are_those_of_sets_and_counts(atom, text):
    rules = {fault.rule for fault in exact_faults([atom], text)}
    assert ("lost number" in rules) == bool(set(numbers(atom)) - set(numbers(text)))
    assert ("added number" in rules) == bool(set(numbers(text)) - set(numbers(atom)))
    if any(name not in text.split() for name in names(atom)):
        assert "lost name" in rules
    atom_scopes, atom_alternatives = denied(atom)
    text_scopes, text_alternatives = denied(text)
    enough = len(atom_scopes) <= len(text_scopes) + text_alternatives
    not_too_many = len(text_scopes) <= len(atom_scopes) + atom_alternatives
    assert (enough and not_too_many) == (not rules & {"lost negation", "added negation"})


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("1,200 euros, 2.5 mg, 7:30, 24/7", ["1200", "2.5", "7:30", "24/7"]),
        ("Seven of nine, and -5 °C", ["7", "9", "-5"]),
        ("10-20 and B12, x86, 3-year-old", ["10", "20", "3"]),
        ("one day, seventeen days", ["17"]),
        ("forty-two of Ninety", ["42", "90"]),
    ],
)
def test_numbers(text, figures):
    assert numbers(text) == figures


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The user met Dr. Weber's dog in Ulm.", ["Dr", "Ulm"]),
        ("Ida sings. Ben sings, and Mia sings.", ["Mia"]),
        (
            "An iPhone, GPT-4, utf_8, a.out and node.js (C++).",
            ["iPhone", "GPT-4", "utf_8", "a.out", "node.js", "C++"],
        ),
        ("It was late, e.g. at night.", []),
    ],
)
def test_names(text, expected):
    assert names(text) == expected


def test_stems_forgive_endings_and_leave_negations_out():
    assert stems("watering waters watered") == ["water"] * 3
    assert stems("The user never owned boats.") == stems("owns boat")


# Marks, units, roles ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It may rain in May.", {("certainty", "possible")}),
        ("May is warm.", set()),
        ("no more than 3, No longer than that", {("limit", "at most")}),
        ("She no longer smokes.", {("time", "ended")}),
        (
            "He has lived here since 2016, since he likes it.",
            {("time", "since"), ("taste", "likes")},
        ),
        ("I can't sleep.", {("ability", "able"), ("negation", "not")}),
        ("They dislike it.", {("negation", "not"), ("taste", "likes")}),
        ("around the house, about 3 of them", {("limit", "about")}),
        ("mum and Mother", {("relation", "mother")}),
        ("", set()),
    ],
)
def test_marks(text, expected):
    assert marks(text) == expected


def test_short_forms_are_written_out():
    assert full_forms("The user can't, won't and doesn't; I'm unable to, she'll lack time.") == (
        "The user can not, will not and does not; I am not able to, she will not have time."
    )


def test_units_belong_to_their_numbers():
    assert quantities("7mg, 7 mg of it, €30, forty-year-old, 3 hens") == {
        ("7", "mg"),
        ("30", "euro"),
        ("40", "year"),
        ("3", ""),
    }
    assert [fault.rule for fault in unit_faults("7 g", "7 mg and 8 g")] == ["unit"]
    assert list(unit_faults("67 years old", "I'm 67")) == []
    assert list(unit_faults("7 g", "8 mg")) == []


def test_roles_are_an_order_that_a_passive_turns():
    assert actors("The user was helped by Ben.") == ["Ben", "user"]
    assert actors("Ben helped the user in Leeds.") == ["Ben", "user"]
    assert swapped_actors("The user helped Ben.", "Ben helped me.")
    assert not swapped_actors("Ben helped us.", "Ben met us.")


def test_opposites_are_only_those_of_one_group():
    assert opposite_word("the left ear", "my right ear")
    assert not opposite_word("the ear", "my right ear")


# Free paraphrases ---------------------------------------------------------------------------------


class Case(NamedTuple):
    """One line of a file of paraphrases or statements."""

    phase: str  # "tuned", seen while the rules were made, or "fresh"
    is_good: bool
    source: str
    text: str
    line: str


def read_cases(name):
    """All cases of a file; a bad one has a remark before its text."""
    table = yaml.safe_load((FIXTURES / f"{name}.yaml").read_text(encoding="utf-8"))
    for phase, lines_by_kind in table.items():
        for kind, lines in lines_by_kind.items():
            for line in lines:
                pair = line if kind == "good" else line.partition("; ")[2]
                source, text = pair.split(" => ")
                yield Case(phase, kind == "good", source, text, line)


# cases that the rules are wrong about, at most: bad ones that pass, good ones that are refused
ALLOWED = {
    ("paraphrases", "tuned"): (0, 0),
    ("paraphrases", "fresh"): (2, 1),
    ("statements", "tuned"): (1, 1),
    ("statements", "fresh"): (3, 2),
}


@pytest.mark.parametrize(("name", "phase"), ALLOWED)
def test_bad_paraphrases_are_refused_and_good_ones_pass(name, phase):
    def faults(case):
        if name == "paraphrases":
            return list(text_faults(case.source.split(" | "), case.text))
        return list(source_faults(case.text, case.source))

    cases = [case for case in read_cases(name) if case.phase == phase]
    passed = [case.line for case in cases if not case.is_good and not faults(case)]
    refused = [case.line for case in cases if case.is_good and faults(case)]
    most_passed, most_refused = ALLOWED[name, phase]
    assert len(passed) <= most_passed, passed
    assert len(refused) <= most_refused, refused


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_two_texts_can_be_compared(text, source):
    for fault in [*source_faults(text, source), *text_faults([text], source)]:
        assert fault.rule and fault.detail


def test_a_source_agrees_with_itself():
    for example in sample_records():
        for atom in example.atoms:
            assert list(source_faults(atom.text, atom.text)) == []
