"""The protocol of the practice server: whatever comes in is read or refused in the common shape,
and never anything else.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.micro.practice.server import (
    ApiError,
    chat_turns,
    completion,
    count_tokens,
    message_text,
    parse_request,
    truncate,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
some_request = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", "other"]) | json_values,
        "messages": st.lists(
            st.fixed_dictionaries({}, optional={"role": st.text(), "content": json_values})
        )
        | json_values,
        "n": st.sampled_from([1, 2, None]),
        "stream": st.booleans(),
        "response_format": json_values | st.just({"type": "json_schema"}),
    },
)


def as_json(value):
    return json.dumps(value).encode()


@given(st.binary(max_size=40) | json_values.map(as_json) | some_request.map(as_json))
def test_a_body_is_read_or_refused(body):
    try:
        request = parse_request(body, ["m"], json_schema=False)
        turns = chat_turns(request)
    except ApiError as error:
        assert error.status in (400, 404)
        assert error.body["error"].keys() == {"message", "type", "param", "code"}
        json.dumps(error.body)
    else:
        assert (
            request["model"] == "m" and request.get("n") in (None, 1) and not request.get("stream")
        )
        assert request.get("response_format") != {"type": "json_schema"}
        assert len(turns) == len(request["messages"]) > 0
        assert all(
            isinstance(turn_field, str) for turn in turns for turn_field in turn
        ) and "developer" not in dict(turns)


@given(st.text(max_size=60), st.integers(1, 20))
def test_a_text_is_kept_within_its_tokens(text, limit):
    shortened = truncate({"max_tokens": limit}, text)
    assert text.startswith(shortened) and count_tokens(shortened) <= limit
    assert shortened == text or count_tokens(text) > limit
    assert shortened == truncate({"max_completion_tokens": limit}, text)
    assert truncate({"max_tokens": None}, text) == truncate({}, text) == text


@given(st.lists(st.text(max_size=9), max_size=4))
def test_parts_are_one_text(parts):
    listed = [{"type": "text", "text": piece} for piece in parts]
    assert (
        message_text({"content": listed})
        == message_text({"content": "".join(parts)})
        == "".join(parts)
    )


@pytest.mark.parametrize("content", [None, 3, {}, [1, None, "x"], [{"type": "image_url"}]])
def test_what_is_no_text_is_empty(content):
    assert message_text({"content": content}) == ""


def test_usage_adds_up():
    body = completion({"model": "m"}, "twelve chars", "stop", 5, "0a")
    assert body["usage"]["completion_tokens"] == 3 and body["usage"]["total_tokens"] == 8
    assert body["id"] == "chatcmpl-0a" and body["model"] == "m" and len(body["choices"]) == 1


def test_errors_carry_headers_with_dashes():
    error = ApiError(429, "Later.", "requests", code="rate_limit_exceeded", Retry_After="7")
    assert error.headers == {"Retry-After": "7"} and str(error) == "Later."
    assert (
        error.body["error"]["code"] == "rate_limit_exceeded"
        and error.body["error"]["type"] == "requests"
    )
