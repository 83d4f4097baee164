"""What a setting may be, in words: ranges, kinds, names that were meant."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, field_validator

from memcalib.fields import allowed, fault_line, nearest

ENDS = st.floats(-1e6, 1e6, allow_nan=False)


class Page(BaseModel, extra="forbid"):
    share: float = Field(0.5, ge=0, lt=1)
    count: int = Field(3, ge=1)
    kind: Literal["a", "b"] = "a"
    on: bool = True
    either: Annotated[int, Field(ge=2, le=5)] | None = None
    many: list[Annotated[int, Field(le=9)]] = []
    method: str = "x"

    @field_validator("method")
    @classmethod
    def _known(cls, value):
        if value not in "xyz":
            raise ValueError("allowed are x, y, z")
        return value


def faults(**given) -> list[dict]:
    with pytest.raises(ValidationError) as error:
        Page(**given)
    return error.value.errors()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("share", "numbers of at least 0, below 1"),
        ("count", "whole numbers of at least 1"),
        ("kind", "a, b"),
        ("on", "true, false"),
        ("either", "whole numbers from 2 to 5, or null"),
        ("many", "lists of whole numbers at most 9"),
        ("method", "texts"),
    ],
)
def test_words(name, words):
    assert allowed(Page, name) == words


@given(ENDS, ENDS, st.booleans(), st.booleans())
def test_words_state_the_limits(low, high, open_low, open_high):
    limits = {"gt" if open_low else "ge": low, "lt" if open_high else "le": high}
    model = type("M", (BaseModel,), {"__annotations__": {"x": float}, "x": Field(low, **limits)})
    words = allowed(model, "x")
    numbers = [
        float(part.strip(",").replace(",", ""))
        for part in words.split()
        if part.strip(",-").replace(",", "")[0:1].isdigit()
    ]
    assert sorted(numbers) == pytest.approx(sorted([low, high]))
    assert ("above" in words) == open_low and ("below" in words) == open_high


@given(st.sampled_from(sorted(Page.model_fields)), st.data())
def test_a_letter_too_many_is_found(name, data):
    place = data.draw(st.integers(0, len(name)))
    assert len(name) < 4 or nearest(name[:place] + "q" + name[place:], Page.model_fields) == name


def test_nothing_is_offered_where_nothing_is_near():
    assert nearest("temperature", ["kind", "on"]) is None and nearest("x", []) is None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"share": 1}, "p.share: found 1; allowed: numbers of at least 0, below 1"),
        ({"count": "many"}, "p.count: found 'many'; allowed: whole numbers of at least 1"),
        ({"kind": ["a"]}, "p.kind: found ['a']; allowed: a, b"),
        ({"method": "q"}, "p.method: found 'q'; allowed are x, y, z"),
        (
            {"cuont": 2},
            "p.cuont: unknown option; meant is perhaps count; allowed: share, count, kind, on, either, many",
        ),
    ],
)
def test_lines(given, line):
    (fault,) = faults(**given)
    assert fault_line(f"p.{fault['loc'][0]}", fault, Page, fault["loc"][0], leave=("method",)) == line


def test_a_secret_is_not_shown():
    (fault,) = faults(count="hidden words")
    assert "hidden" in fault_line("p.count", fault, Page, "count")
    assert fault_line("p.count", fault, Page, "count", show=False) == "p.count: allowed: whole numbers of at least 1"
