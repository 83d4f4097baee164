"""Ranks of judges, paired differences against a slow count, and judges that do not read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.judge import JudgeConfig
from memcalib.problem import Level
from memcalib.products.exam import rank as x
from memcalib.products.exam.exam import exam_items, starter_answers
from memcalib.products.exam.minimal_pairs import HARD_FORMS, pair_items, starter_pairs

EXAMPLES, ANSWERS = starter_answers()
PAIRS = starter_pairs(EXAMPLES)
OUTCOMES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=30)


def rows(triples, column):
    return [
        {"pair_id": f"p{n}", "question_id": f"q{triple[0]}", "right": triple[column]}
        for n, triple in enumerate(triples)
    ]


@settings(max_examples=60, deadline=None)
@given(OUTCOMES)
def test_a_paired_difference_is_the_difference_of_shares_over_common_pairs(triples):
    result = x.paired_difference(rows(triples, 1), rows(triples, 2), resamples=50)
    opposite = x.paired_difference(rows(triples, 2), rows(triples, 1), resamples=50)
    assert result["pairs"] == len(triples)
    if not triples:
        assert result["difference"] is None
        return
    slow = 100 * (sum(t[1] for t in triples) - sum(t[2] for t in triples)) / len(triples)
    assert result["difference"] == pytest.approx(slow)
    assert opposite["difference"] == pytest.approx(-slow)
    if result["low"] is not None:
        assert result["low"] <= result["high"]
        assert opposite["low"] == pytest.approx(-result["high"])


def test_pairs_that_only_one_judge_read_do_not_count():
    triples = [(n, True, False) for n in range(6)]
    result = x.paired_difference(rows(triples, 1), rows(triples, 2)[:4])
    assert result["pairs"] == 4 and result["difference"] == 100


def test_places_are_an_interval_and_judges_alike_share_them():
    good = [(n % 40, True, True) for n in range(80)]
    mixed = [(n % 40, n % 3 > 0, n % 2 > 0) for n in range(80)]
    table = x.rank_judges(
        {
            "good": rows(good, 1),
            "as good": rows(good, 2),
            "two thirds": rows(mixed, 1),
            "none": rows([(n % 40, False, False) for n in range(80)], 1),
        }
    ).set_index("judge")
    assert table.loc["good", ["best", "worst"]].tolist() == [1, 2]
    assert table.loc["as good", ["best", "worst"]].tolist() == [1, 2]
    assert table.loc["two thirds", ["best", "worst"]].tolist() == [3, 3]
    assert table.loc["none", ["best", "worst"]].tolist() == [4, 4]


def test_a_judge_is_ranked_blind_and_otherwise_as_it_is_asked():
    judging = JudgeConfig(prompt="footprint-2", stance=True, temperature=0.5)
    ranked = x.rank_judging(judging)
    assert ranked.blind and not ranked.stance
    assert (ranked.prompt, ranked.temperature) == ("footprint-2", 0.5)


def test_hard_pairs_are_those_of_the_hard_forms():
    hard = x.hard_pairs(PAIRS)
    assert len(hard) >= 200 and {pair.form for pair in hard} == set(HARD_FORMS)
    assert len({pair.example_id for pair in hard}) > 90


@pytest.mark.slow
def test_judges_that_do_not_read_get_few_pairs_and_many_atoms():
    hard = x.hard_pairs(PAIRS)
    items = exam_items(EXAMPLES, ANSWERS, None, probes=0) + pair_items(PAIRS, EXAMPLES)
    table = x.trivial_table(items, PAIRS, hard).set_index("judge")
    assert table.loc["copies the ideal level", "pairs"] == 0
    assert table.loc["copies the ideal level", "macro accuracy"] == pytest.approx(100 / 3)
    assert table.loc["says Ignore to everything", "atoms"] > 50
    assert (table["hard pairs"] <= 20).all()


def test_a_table_without_pairs_or_real_answers_says_so():
    items = exam_items(EXAMPLES, ANSWERS, 20, probes=0)
    table = x.trivial_table(items, [], [])
    assert table["pairs"].isna().all() and table["used atoms of real answers"].isna().all()
    assert table["atoms"].notna().all()


def test_counted_words_are_those_that_the_query_lacks():
    example = EXAMPLES[0]
    atom = example.atoms[0]
    judge = x.CountsWords()
    assert judge.judge(example, "")[atom.atom_id] == Level.IGNORE
    assert judge.judge(example, atom.text)[atom.atom_id] == Level.CONTROL
    assert set(judge.judge(example, example.question).values()) == {Level.IGNORE}


def test_lines_say_what_was_not_measured():
    assert "not measured" in x.rank_line(None) and "not measured" in x.help_line(None)
    rank = {"right": 61.0, "right_low": 50.0, "right_high": 71.0, "read": 60}
    line = x.rank_line(rank, [{"hard pairs": 0.0}, {"hard pairs": None}, {"hard pairs": 4.2}])
    assert "61.0 % of 60" in line and "4.2 %" in line and "every atom" not in line
    assert "44.0 % with every atom of both answers right" in x.rank_line(rank | {"flawless": 44.0})
    no_bounds = {"pairs": 3, "with_rubric": 100.0, "blind": 100.0, "difference": 0.0}
    no_bounds |= {"low": None, "high": None}
    assert x.help_line(no_bounds).endswith("100.0 % without.")
    assert np.isnan(x.right_share(x.exam_frame([], [])))
