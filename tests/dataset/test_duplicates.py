"""Duplicates against all pairs compared one by one; order never matters; splits never share a question."""

import json
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from memcalib.dataset import duplicates as d
from memcalib.dataset import sources as s
from memcalib.problem import sample_records
from memcalib.io.records import DataError

VOCABULARY = [
    f"{a}{b}{c}"
    for a in "bdfgk"
    for b in ("ra", "le", "mi", "no")
    for c in ("st", "nd", "p", "ck", "lm")
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
    found = text.split()
    for _ in range(count):
        place = rng.randrange(len(found))
        kind = rng.choice(["replace", "delete", "insert"])
        if kind == "replace":
            found[place] = rng.choice(VOCABULARY)
        elif kind == "insert":
            found.insert(place, rng.choice(VOCABULARY) + rng.choice("xyz"))
        elif len(found) > 2:
            del found[place]
    return " ".join(found)


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
    sets = [set(d.words(text)) for text in texts]
    for b in range(len(sets)):
        for a in range(b):
            share = len(sets[a] & sets[b]) / len(sets[a] | sets[b])
            if share >= threshold:
                yield a, b, share


@pytest.mark.parametrize("seed", range(3))
def test_pairs_against_comparing_everything(seed):
    texts = corpus(seed)
    wanted = set(all_pairs(texts))
    found = set(d.similar_pairs(texts))
    assert found <= wanted
    assert len(wanted) > 60 and len(found) >= 0.97 * len(wanted), (len(found), len(wanted))


def greedy(texts, threshold=0.88):
    kept = []
    found = {}
    for n, text in enumerate(texts):
        first = next((k for k in kept if d.jaccard(texts[k], text) >= threshold), None)
        if first is None:
            kept.append(n)
        else:
            found[n] = first
    return found


def test_greedy_choice_against_the_slow_one():
    agree = total = 0
    for seed in range(3):
        texts = corpus(seed, 200)
        slow = greedy(texts)
        quick = d.near_duplicates(texts)
        total += len(slow)
        agree += sum(quick.get(n, (None,))[0] == first for n, first in slow.items())
        assert all(
            d.jaccard(texts[n], texts[first]) == share >= 0.88
            for n, (first, share) in quick.items()
        )
        assert not {first for first, _ in quick.values()} & quick.keys()
    assert total > 100 and agree >= 0.97 * total


def test_sketches_come_in_batches_without_a_seam(monkeypatch):
    texts = corpus(5, 60)
    whole = d.near_duplicates(texts)
    for size in (1, 7):
        monkeypatch.setattr(d, "_BATCH", size)
        assert d.near_duplicates(texts) == whole


@given(st.randoms(use_true_random=False), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_order_never_matters(rng, seed):
    texts = corpus(seed, 40, (12, 30))
    scores = random.Random(seed)
    rows = [
        row(n % 38, text + "|The answer.", scores.choice([0, 50, 90]))
        for n, text in enumerate(texts)
    ]
    rows += [rows[0], row(3, texts[3].upper() + "|the ANSWER", 50)]
    mixed = list(rows)
    rng.shuffle(mixed)
    first = d.deduplicate(rows)
    second = d.deduplicate(mixed)
    assert sorted(r.to_json() for r in first.kept) == sorted(r.to_json() for r in second.kept)
    assert sorted(x.to_json() for x in first.dropped) == sorted(x.to_json() for x in second.dropped)
    assert len(first.kept) + len(first.dropped) == len(rows)
    assert len({r.id for r in first.kept}) == len(first.kept)


def test_the_best_row_stays_and_losses_name_it():
    text = sentence(random.Random(1), 60)
    rows = [
        row(1, text, 70),
        row(2, text + " more", 95),
        row(3, text.upper() + "!!", 80),
        row(4, "Something else entirely", 10),
    ]
    passed = d.deduplicate(rows)
    assert [r.id for r in passed.kept] == ["t:2", "t:4"]
    assert {(x.id, x.rule, x.other, x.stage) for x in passed.dropped} == {
        ("t:1", "exact duplicate", "t:3", "duplicates"),
        ("t:3", "near duplicate", "t:2", "duplicates"),
    }
    assert all(x.found and x.allowed and x.source == "t" for x in passed.dropped)


def test_equal_words_in_another_order_are_near_not_exact():
    rng = random.Random(2)
    found = sentence(rng, 30).lower().rstrip(".").split()
    swapped = [*found[15:], *found[:15]]
    passed = d.deduplicate([row(1, " ".join(found)), row(2, " ".join(swapped))])
    assert [x.rule for x in passed.dropped] == ["near duplicate"] and "1.000" in passed.dropped[
        0
    ].found


@pytest.mark.parametrize("text", ["", "?!", "one", "two words", "日本語の質問です", "a a a a a a"])
def test_texts_with_few_or_no_words(text):
    assert d.near_duplicates([text, text, "another thing altogether"]) == {1: (0, 1.0)}
    assert d.jaccard(text, text) == 1.0
    assert len(d.deduplicate([row(1, text), row(2, text)]).kept) == 1


def test_nothing_and_one():
    assert d.near_duplicates([]) == {} and d.deduplicate([]).kept == []
    assert d.question_groups([]) == {} and d.cross_split({}) == [] and d.choose_rows([], 5) == []
    assert len(d.deduplicate([row(1, "x")]).kept) == 1


def test_config_is_checked():
    with pytest.raises(ValidationError, match="7 bands do not divide 100"):
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
    windows = [" ".join(f"w{n}" for n in range(start, start + 50)) for start in range(0, 30, 3)]
    items = [Item(f"q{n:02}", text) for n, text in enumerate(windows)] + [
        Item("z", "Something else?")
    ]
    groups = d.question_groups(items)
    assert set(groups.values()) == {"q00", "z"} and len(groups) == 11
    assert groups == d.question_groups(items[::-1])


@pytest.mark.parametrize("seed", range(2))
def test_groups_against_a_plain_flood(seed):
    texts = corpus(seed, 120)
    items = [Item(f"i{n:03}", text) for n, text in enumerate(texts)]
    names = list(range(len(texts)))
    pairs = list(d.similar_pairs(texts))
    for _ in texts:
        for a, b, _ in pairs:
            names[a] = names[b] = min(names[a], names[b])
    assert d.question_groups(items) == {f"i{n:03}": f"i{name:03}" for n, name in enumerate(names)}


def test_a_thousand_equal_questions_are_one_group():
    items = [Item(f"i{n:04}", "How long does it take?" + "!" * (n % 3)) for n in range(1000)]
    assert set(d.question_groups(items).values()) == {"i0000"}


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
    assert sorted(tuple(sorted(leak.members.items())) for leak in leaks) == [
        (("test", ["d"]), ("train", ["a"]), ("validation", ["a"])),
        (("test", ["e"]), ("train", ["b"])),
    ]
    assert any("train: b" in str(leak) and "test: e" in str(leak) for leak in leaks)
    assert d.cross_split({"train": splits["train"]}) == []
    records = sample_records()
    assert d.cross_split({"train": records[:5], "test": records[5:]}) == []
    assert len(d.cross_split({"train": records[:5], "test": records[4:]})) == 1


def many(sizes, topics=1):
    return [
        s.SourceRow(
            id=f"{name}:{n}",
            source=name,
            domain="general",
            question="x" * (n * 7 % 101),
            answer="y",
            topic=f"t{n % topics}",
            metadata={"score": 60 + n * 13 % 40},
        )
        for name, size in sizes.items()
        for n in range(size)
    ]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1),
    st.integers(0, 120),
    st.integers(1, 5),
)
def test_draws_have_the_asked_size_and_no_row_twice(sizes, count, topics):
    rows = many(sizes, topics)
    chosen = d.choose_rows(rows, count, seed=3)
    assert len(chosen) == min(count, len(rows)) == len({r.id for r in chosen})
    assert chosen == d.choose_rows(rows[::-1], count, seed=3)
    per_source = {name: sum(r.source == name for r in chosen) for name in sizes}
    for name, size in sizes.items():
        assert per_source[name] >= min(size, count // len(sizes))


def test_draws_prefer_high_scores_and_hear_rare_topics():
    rows = [
        r.model_copy(update={"topic": "rare" if n % 100 == 0 else "common"})
        for n, r in enumerate(many({"a": 4000}))
    ]
    chosen = d.choose_rows(rows, 400)

    def mean(found):
        return sum(r.metadata["score"] for r in found) / len(found)

    assert mean(chosen) > mean(rows) + 1
    assert sum(r.topic == "rare" for r in chosen) == 36

    def size(r):
        return len(r.question)

    low = sorted(map(size, rows))[4000 // 3]
    high = sorted(map(size, rows))[8000 // 3]
    common = [r for r in chosen if r.topic == "common"]
    assert (
        abs(sum(size(r) < low for r in common) - 91) <= 2
        and abs(sum(size(r) >= high for r in common) - 91) <= 2
    )


def test_a_whole_stage_counts_every_row(tmp_path):
    rng = random.Random(4)
    ask = "I am {} years old and my knee hurts since {}. {} Should I see a doctor, or can I wait for a week?"
    tell = "Rest the knee, cool it in the evening and see a doctor if it is still swollen after two weeks. {}"
    rows = [
        {"q": ask.format(n, n, sentence(rng, 20)), "a": tell.format(sentence(rng, 20))}
        for n in range(20, 60)
    ]
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
    assert (
        table.loc[("", "read"), "clinic"] == 44
        and table.loc[("", "kept"), "clinic"] == len(passed.kept) == 40
    )
    assert {x.stage for x in passed.dropped} == {"reading", "screening", "duplicates"}
    with pytest.raises(DataError, match="0 of 1 rows accepted"):
        d.clean_rows([row(1, "no")])


def test_the_same_question_with_another_context_is_another_row():
    asked = "May I take this tablet in the morning, or is it better to wait until I have eaten something at noon?"

    def make(name, context):
        return row(0, asked).model_copy(update={"id": name, "context": context})

    apart = [
        make("a", "She is 31 and pregnant."),
        make("b", "She is 60 and pregnant."),
        make("c", ""),
    ]
    assert [r.id for r in d.deduplicate(apart).kept] == ["a", "b", "c"]
    lost = d.deduplicate([*apart, make("d", "She is 31, and pregnant!")]).dropped
    assert [(drop.rule, {drop.id, drop.other}) for drop in lost] == [
        ("exact duplicate", {"a", "d"})
    ]


def test_a_copy_names_where_it_was_read():
    copy = row(1, "the same words").model_copy(update={"file": "t.csv", "line": 12})
    (drop,) = d.deduplicate([row(1, "the same words", 9), copy]).dropped
    assert (drop.file, drop.line) == ("t.csv", 12)
