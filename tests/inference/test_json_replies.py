"""Replies in JSON: what is read, what is refused, what may go into a prompt."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.inference.client import Form, json_format, read_form, strict_json, to_data

TOKENS = (
    "<|im_end|>",
    "<s>",
    "[INST]",
    "[/INST]",
    "</think>",
    "<｜User｜>",
    "\u202e",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\x7f",
    "\ud800",
    "\U000e0041",
)
texts = st.lists(
    st.one_of(st.sampled_from(TOKENS), st.text(st.characters(exclude_categories=()), max_size=8)),
    max_size=5,
).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


class Item(Form):
    id: str
    count: int
    share: float
    good: bool


class Reply(Form):
    items: list[Item]


GOOD = {"items": [{"id": "a", "count": 1, "share": 0.5, "good": True}]}


@given(values)
def test_data_reads_back_and_holds_no_token(value):
    written = to_data(value)
    assert json.loads(written) == value
    assert (
        not any(token in written for token in TOKENS)
        and "<" not in written
        and not any(0xD800 <= ord(c) < 0xE000 for c in written)
    )


def sound(value):
    return not any(0xD800 <= ord(c) < 0xE000 for c in json.dumps(value, ensure_ascii=False))


@given(values.filter(sound))
def test_reading_agrees_with_the_standard_reader_where_that_is_strict_too(value):
    assert strict_json(json.dumps(value)) == value
    assert strict_json(f"```json\n{json.dumps(value)}\n```") == value
    assert strict_json(f" ```\n{json.dumps(value)}\n``` ") == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("Sure: {}", "not exactly one JSON object"),
        ("{} Done.", "not exactly one JSON object"),
        ('Sure:\n```json\n{"a": 1}\n```', "not exactly one JSON object"),
        ('```python\n{"a": 1}\n```', "not exactly one JSON object"),
        ('{"a": 1, "a": 1}', "'a' occurs twice"),
        ('{"b": {"a": 1, "c": 0, "a": 2}}', "'a' occurs twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1', "not exactly one JSON object"),
        ("[" * 200_000, "not exactly one JSON object"),
        ('{"a": ' * 200_000, "not exactly one JSON object"),
    ],
)
def test_what_is_not_one_value_alone_is_refused_with_a_reason(text, why):
    with pytest.raises(ValueError, match=why):
        strict_json(text)


@given(st.text(), st.sampled_from(["stop", "length", "content_filter"]))
def test_no_text_raises_and_no_complaint_is_empty(text, finish):
    parsed, complaints = read_form(text, Reply, finish)
    assert (parsed is None) == bool(complaints) and all(words for _, words in complaints)


@given(values)
def test_no_value_raises(value):
    parsed, complaints = read_form(json.dumps({"items": value}), Reply)
    assert (parsed is None) == bool(complaints)
    assert (parsed is not None) == (
        sound(value) and isinstance(value, list) and all(_fits(item) for item in value)
    )


def _fits(item):
    kinds = {"id": str, "count": int, "share": (int, float), "good": bool}
    if not isinstance(item, dict) or item.keys() != kinds.keys():
        return False
    return all(
        isinstance(item[name], kind) and isinstance(item[name], bool) == (kind is bool)
        for name, kind in kinds.items()
    )


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"id": 1}, "items.0.id"),
        ({"count": "1"}, "items.0.count"),
        ({"count": 1.5}, "items.0.count"),
        ({"count": True}, "items.0.count"),
        ({"good": 1}, "items.0.good"),
        ({"good": "true"}, "items.0.good"),
        ({"share": "0.5"}, "items.0.share"),
        ({"more": 0}, "items.0.more"),
        ({"id": None}, "items.0.id"),
    ],
)
def test_types_are_taken_at_their_word(change, location):
    parsed, complaints = read_form(json.dumps({"items": [GOOD["items"][0] | change]}), Reply)
    assert parsed is None and [where for where, _ in complaints] == [location]


def test_a_lone_surrogate_is_a_complaint_not_a_crash():
    odd = {"items": [GOOD["items"][0] | {"id": "a\ud800b"}]}
    for text in (json.dumps(odd), json.dumps(odd, ensure_ascii=False), json.dumps({"\udfff": 1})):
        parsed, complaints = read_form(text, Reply)
        assert (
            parsed is None and "half a character" in complaints[0][1] and complaints[0][1].encode()
        )
    whole = {"items": [GOOD["items"][0] | {"id": "\U0001f414"}]}
    assert (
        read_form(json.dumps(whole), Reply)[0]
        == read_form(json.dumps(whole, ensure_ascii=False), Reply)[0]
    )


def test_a_reply_cut_off_is_at_fault_whatever_it_holds():
    assert read_form(json.dumps(GOOD), Reply)[0].items[0].count == 1
    parsed, complaints = read_form(json.dumps(GOOD), Reply, "length")
    assert parsed is None and "cut off" in complaints[0][1]


def test_the_schema_allows_nothing_else():
    response_format = json_format(Reply)
    schema = response_format["json_schema"]["schema"]
    assert (
        response_format["json_schema"]["strict"] is True and schema["additionalProperties"] is False
    )
    assert schema["$defs"]["Item"]["required"] == ["id", "count", "share", "good"]
