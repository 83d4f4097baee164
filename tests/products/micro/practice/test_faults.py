"""Faults fall where their hash says, at their rate; limits count as a slow reading of the rule
would.
"""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from memcalib.products.micro.practice.server import (
    CONTENT,
    TRANSPORT,
    Faults,
    RateLimit,
    apply_fault,
)

REPLY = {
    "atom_judgments": [
        {
            "atom_id": "a1",
            "u_star": "A",
            "predicted_usage_level": "A",
            "evidence_quote": "",
            "reason": "none",
        },
        {
            "atom_id": "a2",
            "u_star": "C",
            "predicted_usage_level": "B",
            "evidence_quote": "tea",
            "reason": "once",
        },
    ]
}


@given(st.text(max_size=30), st.integers(0, 9), st.floats(0, 1 / 8))
def test_a_draw_is_a_function_of_key_and_seed(key, seed, rate):
    faults = Faults.each(rate, seed=seed)
    assert faults.draw(TRANSPORT, key) == Faults.each(rate, seed=seed).draw(TRANSPORT, key)
    assert faults.draw(CONTENT, key) in ("", *CONTENT)
    if rate == 0:
        assert faults.draw(TRANSPORT, key) == faults.draw(CONTENT, key) == ""


@given(st.sampled_from(TRANSPORT), st.text(max_size=10))
def test_a_certain_fault_always_falls(name, key):
    assert Faults(**{name: 1.0}).draw(TRANSPORT, key) == name


def test_rates_hold_and_families_are_independent():
    faults = Faults.each(0.1)
    keys = [str(k) for k in range(20_000)]
    pairs = Counter((faults.draw(TRANSPORT, key), faults.draw(CONTENT, key)) for key in keys)
    for names in (TRANSPORT, CONTENT):
        for name in names:
            assert abs(sum(n for pair, n in pairs.items() if name in pair) / len(keys) - 0.1) < 0.01
    assert abs(pairs["hang", "empty"] / len(keys) - 0.01) < 0.004


def test_more_rate_keeps_the_faults_there_were_for_one_class():
    few = Faults(drop=0.05)
    many = Faults(drop=0.2)
    keys = [str(k) for k in range(2000)]
    assert {k for k in keys if few.draw(TRANSPORT, k)} < {
        k for k in keys if many.draw(TRANSPORT, k)
    }


@pytest.mark.parametrize(
    "fields, named",
    [({"drop": 1.5}, "drop"), ({"dorp": 0.1}, "dorp"), ({"drop": 0.6, "hang": 0.6}, "sum to 1.2")],
)
def test_impossible_faults_are_refused(fields, named):
    with pytest.raises(ValidationError, match=named):
        Faults(**fields)


def test_spoiled_replies_are_wrong_in_the_way_they_are_named():
    def ids(text):
        return [row["atom_id"] for row in json.loads(text)["atom_judgments"]]

    def stars(text):
        return [row["u_star"] for row in json.loads(text)["atom_judgments"]]

    text = json.dumps(REPLY)
    assert apply_fault("", REPLY) == (text, "stop")
    assert ids(apply_fault("wrong_id", REPLY)[0]) == ["a1", "a2_x"]
    assert ids(apply_fault("repeated_id", REPLY)[0]) == ["a1", "a2", "a1"]
    assert ids(apply_fault("missing_id", REPLY)[0]) == ["a1"]
    assert stars(apply_fault("altered_ideal", REPLY)[0]) == ["B", "C"]
    assert apply_fault("fences", REPLY) == (f"```json\n{text}\n```", "stop")
    assert apply_fault("empty", REPLY) == ("", "stop")
    assert apply_fault("truncated_json", REPLY) == (text[: len(text) // 2], "stop")
    assert apply_fault("length", REPLY) == (text[: len(text) // 2], "length")
    assert apply_fault("length", "Keep tea in mind.") == ("Keep tea", "length")
    assert json.dumps(REPLY) == text
    with pytest.raises(KeyError):
        apply_fault("smoke", REPLY)


@given(
    st.integers(1, 5),
    st.sampled_from([1.0, 2.5, 60.0]),
    st.lists(st.floats(0, 3, allow_nan=False), max_size=40),
)
def test_a_limit_agrees_with_the_rule_read_slowly(limit, seconds, steps):
    limiter = RateLimit(limit, seconds)
    now = 0.0
    accepted = []
    for step in steps:
        now += step
        recent = [t for t in accepted if t > now - seconds]
        wait = limiter.wait(now)
        assert (wait == 0) == (len(recent) < limit)
        if wait == 0:
            accepted.append(now)
        else:
            assert wait == pytest.approx(recent[0] + seconds - now)
