"""Duplicates against all pairs compared one by one; order never matters;
splits never share a question.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass
from itertools import combinations, product
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from memcalib.products.dataset import duplicates as d
from memcalib.products.dataset import sources as s
from memcalib.problem import sample_records
from memcalib.io.records import DataError

VOCABULARY = [
    "".join(syllables)
    for syllables in product("bdfgk", ("ra", "le", "mi", "no"), ("st", "nd", "p", "ck", "lm"))
]


def sentence(rng, size):
    return " ".join(rng.choices(VOCABULARY, k=size)).capitalize() + "."


def row(n, text, score=0.0, source="t"):
    question, _, answer = text.partition("|")
    return s.SourceRow(
        id=f"t:{n}",
        source=source,
        domain="general",
        question=question,
        answer=answer,
        metadata={"score": score},
    )


def edited(rng, text, count):
    """A text in which so many words were replaced, deleted or inserted."""
    text_words = text.split()
    for _ in range(count):
        position = rng.randrange(len(text_words))
        kind = rng.choice(["replace", "delete", "insert"])
        if kind == "replace":
            text_words[position] = rng.choice(VOCABULARY)
        elif kind == "insert":
            text_words.insert(position, rng.choice(VOCABULARY) + rng.choice("xyz"))
        elif len(text_words) > 2:
            del text_words[position]
    return " ".join(text_words)


def corpus(seed, size=300, lengths=(9, 14, 20, 30, 38, 45, 80, 200)):
    rng = random.Random(seed)
    texts = []
    while len(texts) < size:
        text = sentence(rng, rng.choice(lengths))
        texts.append(text)
        for _ in range(rng.choice([0, 0, 1, 3])):
            texts.append(edited(rng, text, rng.randint(0, max(1, len(text.split()) // 12))))
    rng.shuffle(texts)
    return texts


def all_pairs(texts, threshold=0.88):
    word_sets = [set(d.words(text)) for text in texts]
    for earlier, later in combinations(range(len(texts)), 2):
        shared = word_sets[earlier] & word_sets[later]
        share = len(shared) / len(word_sets[earlier] | word_sets[later])
        if share >= threshold:
            yield earlier, later, share


@pytest.mark.parametrize("seed", range(3))
def test_pairs_against_comparing_everything(seed):
    texts = corpus(seed)
    slow = set(all_pairs(texts))
    quick = set(d.similar_pairs(texts))
    assert quick <= slow
    assert len(slow) > 60
    assert len(quick) >= 0.97 * len(slow), (len(quick), len(slow))


def greedy(texts, threshold=0.88):
    """Position of each dropped text -> position of the first kept text that it resembles."""
    kept_positions = []
    repeats = {}
    for position, text in enumerate(texts):
        for kept_position in kept_positions:
            if d.jaccard(texts[kept_position], text) >= threshold:
                repeats[position] = kept_position
                break
        else:
            kept_positions.append(position)
    return repeats


def test_greedy_choice_against_the_slow_one():
    agreeing = 0
    total = 0
    for seed in range(3):
        texts = corpus(seed, 200)
        slow = greedy(texts)
        quick = d.near_duplicates(texts)
        total += len(slow)
        for position, first in slow.items():
            if position in quick and quick[position][0] == first:
                agreeing += 1
        for position, (first, share) in quick.items():
            assert d.jaccard(texts[position], texts[first]) == share >= 0.88
            assert first not in quick
    assert total > 100
    assert agreeing >= 0.97 * total


def test_sketches_come_in_batches_without_a_seam(monkeypatch):
    texts = corpus(5, 60)
    in_one_batch = d.near_duplicates(texts)
    for size in (1, 7):
        monkeypatch.setattr(d, "_BATCH", size)
        assert d.near_duplicates(texts) == in_one_batch


@given(st.randoms(use_true_random=False), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_order_never_matters(rng, seed):
    texts = corpus(seed, 40, (12, 30))
    scores = random.Random(seed)
    rows = []
    for n, text in enumerate(texts):
        rows.append(row(n % 38, text + "|The answer.", scores.choice([0, 50, 90])))
    rows += [rows[0], row(3, texts[3].upper() + "|the ANSWER", 50)]
    mixed = list(rows)
    rng.shuffle(mixed)
    first = d.deduplicate(rows)
    second = d.deduplicate(mixed)
    assert as_lines(first.kept) == as_lines(second.kept)
    assert as_lines(first.dropped) == as_lines(second.dropped)
    assert len(first.kept) + len(first.dropped) == len(rows)
    assert len({kept_row.id for kept_row in first.kept}) == len(first.kept)


def as_lines(records):
    return sorted(record.to_json() for record in records)


def test_the_best_row_stays_and_losses_name_it():
    text = sentence(random.Random(1), 60)
    rows = [
        row(1, text, 70),
        row(2, text + " more", 95),
        row(3, text.upper() + "!!", 80),
        row(4, "Something else entirely", 10),
    ]
    passed = d.deduplicate(rows)
    assert [best.id for best in passed.kept] == ["t:2", "t:4"]
    assert {(drop.id, drop.rule, drop.other, drop.stage) for drop in passed.dropped} == {
        ("t:1", "exact duplicate", "t:3", "duplicates"),
        ("t:3", "near duplicate", "t:2", "duplicates"),
    }
    assert all(drop.found and drop.allowed and drop.source == "t" for drop in passed.dropped)


def test_equal_words_in_another_order_are_near_not_exact():
    rng = random.Random(2)
    text_words = sentence(rng, 30).lower().rstrip(".").split()
    swapped = [*text_words[15:], *text_words[:15]]
    passed = d.deduplicate([row(1, " ".join(text_words)), row(2, " ".join(swapped))])
    [drop] = passed.dropped
    assert drop.rule == "near duplicate"
    assert "1.000" in drop.found


@pytest.mark.parametrize("text", ["", "?!", "one", "two words", "日本語の質問です", "a a a a a a"])
def test_texts_with_few_or_no_words(text):
    assert d.near_duplicates([text, text, "another thing altogether"]) == {1: (0, 1.0)}
    assert d.jaccard(text, text) == 1.0
    assert len(d.deduplicate([row(1, text), row(2, text)]).kept) == 1


def test_nothing_and_one():
    assert d.near_duplicates([]) == {}
    assert d.deduplicate([]).kept == []
    assert d.groups_of_questions([]) == {}
    assert d.cross_split({}) == []
    assert d.choose_rows([], 5) == []
    assert len(d.deduplicate([row(1, "x")]).kept) == 1


def test_config_is_checked():
    with pytest.raises(ValidationError, match="7 bands do not evenly divide 100"):
        d.NearConfig(permutations=100, bands=7)
    with pytest.raises(ValidationError):
        d.NearConfig(threshold=1.5)
    texts = ["a b c d e f g h i j", "a b c d e f g h i k"]
    assert d.near_duplicates(texts) == {}
    assert list(d.near_duplicates(texts, d.NearConfig(threshold=0.8))) == [1]


@dataclass
class Item:
    id: str
    question: str


def test_groups_follow_chains_and_ignore_order():
    numbered = [f"w{n}" for n in range(80)]
    items = []
    for n, start in enumerate(range(0, 30, 3)):
        items.append(Item(f"q{n:02}", " ".join(numbered[start : start + 50])))
    items.append(Item("z", "Something else?"))
    groups = d.groups_of_questions(items)
    assert set(groups.values()) == {"q00", "z"}
    assert len(groups) == 11
    assert groups == d.groups_of_questions(items[::-1])


@pytest.mark.parametrize("seed", range(2))
def test_groups_against_a_plain_flood(seed):
    texts = corpus(seed, 120)
    items = [Item(f"i{n:03}", text) for n, text in enumerate(texts)]
    smallest = list(range(len(texts)))
    pairs = list(d.similar_pairs(texts))
    for _ in texts:
        for earlier, later, _ in pairs:
            smallest[earlier] = min(smallest[earlier], smallest[later])
            smallest[later] = smallest[earlier]
    expected = {f"i{n:03}": f"i{name:03}" for n, name in enumerate(smallest)}
    assert d.groups_of_questions(items) == expected


def test_a_thousand_equal_questions_are_one_group():
    items = [Item(f"i{n:04}", "How long does it take?" + "!" * (n % 3)) for n in range(1000)]
    assert set(d.groups_of_questions(items).values()) == {"i0000"}


def test_leaks_between_splits_by_question():
    long = sentence(random.Random(3), 40)
    splits = {
        "train": [
            Item("a", "Is it safe?"),
            Item("b", long),
            Item("c", "Only here, and nowhere else?"),
        ],
        "test": [Item("d", "is it SAFE"), Item("e", long + " Really?")],
        "validation": [Item("a", "Is it, safe?")],
    }
    leaks = d.cross_split(splits)
    assert sorted(sorted(leak.members.items()) for leak in leaks) == [
        [("test", ["d"]), ("train", ["a"]), ("validation", ["a"])],
        [("test", ["e"]), ("train", ["b"])],
    ]
    assert any("train: b" in str(leak) and "test: e" in str(leak) for leak in leaks)
    assert d.cross_split({"train": splits["train"]}) == []
    records = sample_records()
    assert d.cross_split({"train": records[:5], "test": records[5:]}) == []
    assert len(d.cross_split({"train": records[:5], "test": records[4:]})) == 1


def many(sizes, topics=1):
    """Rows of sources with these numbers of rows, of many lengths and scores."""
    rows = []
    for name, size in sizes.items():
        for n in range(size):
            rows.append(
                s.SourceRow(
                    id=f"{name}:{n}",
                    source=name,
                    domain="general",
                    question="x" * (n * 7 % 101),
                    answer="y",
                    topic=f"t{n % topics}",
                    metadata={"score": 60 + n * 13 % 40},
                )
            )
    return rows


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1),
    st.integers(0, 120),
    st.integers(1, 5),
)
def test_draws_have_the_asked_size_and_no_row_twice(sizes, count, topics):
    rows = many(sizes, topics)
    chosen = d.choose_rows(rows, count, seed=3)
    assert len(chosen) == min(count, len(rows))
    assert len({row.id for row in chosen}) == len(chosen)
    assert chosen == d.choose_rows(rows[::-1], count, seed=3)
    rows_of_source = Counter(row.source for row in chosen)
    for name, size in sizes.items():
        assert rows_of_source[name] >= min(size, count // len(sizes))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, {"health": 200, "general": 100, "coding": 100}),
        ({"health": 1, "general": 1, "coding": 2}, {"health": 100, "general": 100, "coding": 200}),
    ],
)
def test_draws_are_by_domain_however_many_sources_it_has(weights, expected):
    sources = {"health": "ab", "general": "cde", "coding": "fgh"}
    rows = []
    for domain, names in sources.items():
        for row in many(dict.fromkeys(names, 300)):
            rows.append(row.model_copy(update={"domain": domain}))
    options = {} if weights is None else {"domains": weights}
    chosen = d.choose_rows(rows, 400, **options)
    assert Counter(row.domain for row in chosen) == expected
    of_source = Counter(row.source for row in chosen)
    for domain, names in sources.items():
        counts = [of_source[name] for name in names]
        assert max(counts) - min(counts) <= 1, (domain, counts)


def test_a_domain_that_is_too_small_leaves_its_share_to_the_others():
    rows = [row.model_copy(update={"domain": "health"}) for row in many({"a": 20})]
    rows += [row.model_copy(update={"domain": "law"}) for row in many({"b": 300})]
    chosen = d.choose_rows(rows, 100)
    assert Counter(row.domain for row in chosen) == {"health": 20, "law": 80}


def test_draws_prefer_high_scores_and_hear_rare_topics():
    rows = []
    for n, one_row in enumerate(many({"a": 4000})):
        topic = "rare" if n % 100 == 0 else "common"
        rows.append(one_row.model_copy(update={"topic": topic}))
    chosen = d.choose_rows(rows, 400)
    assert mean(score_of(row) for row in chosen) > mean(score_of(row) for row in rows) + 1
    assert sum(row.topic == "rare" for row in chosen) == 36
    lengths = sorted(len(row.question) for row in rows)
    middle = lengths[4000 // 3]
    long = lengths[8000 // 3]
    common_lengths = [len(row.question) for row in chosen if row.topic == "common"]
    assert abs(sum(length < middle for length in common_lengths) - 91) <= 2
    assert abs(sum(length >= long for length in common_lengths) - 91) <= 2


def score_of(row):
    return row.metadata["score"]


def test_a_whole_stage_counts_every_row(tmp_path):
    rng = random.Random(4)
    rows = []
    for n in range(20, 60):
        question = (
            f"I am {n} years old and my knee hurts since {n}. {sentence(rng, 20)} "
            "Should I see a doctor, or can I wait for a week?"
        )
        answer = (
            "Rest the knee, cool it in the evening and see a doctor if it is still swollen "
            "after two weeks. "
        ) + sentence(rng, 20)
        rows.append({"q": question, "a": answer})
    rows += [
        rows[0],
        {"q": rows[1]["q"] + " Thanks.", "a": rows[1]["a"]},
        {"q": "Hm?", "a": "Yes."},
        {"q": [1], "a": "x"},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in rows))
    source = s.plain_source("q", "a", domain="health", name="clinic")
    passed = d.clean_rows(s.read_source(source, path))
    table = s.attrition(passed)
    assert table.loc[("", "read"), "clinic"] == 44
    assert table.loc[("", "kept"), "clinic"] == len(passed.kept) == 40
    assert {drop.stage for drop in passed.dropped} == {"reading", "screening", "duplicates"}


def test_a_stage_that_keeps_nothing_is_an_error():
    with pytest.raises(DataError, match="0 of 1 row accepted"):
        d.clean_rows([row(1, "no")])


def test_the_same_question_with_another_context_is_another_row():
    question = (
        "May I take this tablet in the morning, or is it better to wait until I have eaten "
        "something at noon?"
    )

    def with_context(name, context):
        return row(0, question).model_copy(update={"id": name, "context": context})

    rows = [
        with_context("a", "She is 31 and pregnant."),
        with_context("b", "She is 60 and pregnant."),
        with_context("c", ""),
    ]
    assert [best.id for best in d.deduplicate(rows).kept] == ["a", "b", "c"]
    [drop] = d.deduplicate([*rows, with_context("d", "She is 31, and pregnant!")]).dropped
    assert drop.rule == "exact duplicate"
    assert {drop.id, drop.other} == {"a", "d"}


def test_a_copy_names_where_it_was_read():
    copy = row(1, "the same words").model_copy(update={"file": "t.csv", "line": 12})
    [drop] = d.deduplicate([row(1, "the same words", 9), copy]).dropped
    assert (drop.file, drop.line) == ("t.csv", 12)
