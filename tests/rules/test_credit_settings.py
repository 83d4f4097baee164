"""Settings of credit that cannot be meant are refused by name."""

import math

import pytest
from pydantic import ValidationError

from memcalib.products.reproduction import provenance
from memcalib.rules.base import CreditConfig, CreditSettings, eta_by_channel, setting
from memcalib.trainer.recipe import load_recipe

NAN = float("nan")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"eta": 1.1}, r"eta[^\n]*\n.*1\.1"),
        ({"eta": -0.1}, r"eta[^\n]*\n.*-0\.1"),
        ({"eta": NAN}, r"eta[^\n]*\n.*nan"),
        ({"eta": {"B+": 1.1}}, r"eta\n.*B\+: found 1\.1; allowed: numbers from 0 to 1"),
        ({"eta": {"B": 0.5}}, r"B: found 0\.5; allowed: the channels 'A\+'"),
        ({"cap": 0.5}, r"cap[^\n]*\n.*0\.5"),
        ({"cap": math.inf}, r"cap[^\n]*\n.*inf"),
        ({"d_max": -1}, r"d_max\n.*-1"),
        ({"ddof": -1}, r"ddof\n.*-1"),
        ({"eps": 0}, r"eps\n.*input_value=0"),
        ({"method": "ppo"}, r"method\n.*'grpo'.*'ppo'"),
        ({"mode": "both"}, r"mode\n.*allowed: ordered, absolute, positive_only.*'both'"),
        ({"under_use": "none"}, r"under_use\n.*'suppressed'.*'none'"),
        ({"threshold_pool": "some"}, r"threshold_pool\n.*'all' or 'open'.*'some'"),
        ({"scale_unit": "word"}, r"scale_unit\n.*'word'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        CreditConfig(**option)


def values_outside(schema: dict) -> list[float]:
    """The numbers next to the limits that a JSON schema states, on their wrong sides."""
    if "anyOf" in schema:
        numbers = [part for part in schema["anyOf"] if part.get("type") in ("integer", "number")]
        return values_outside(numbers[0]) if numbers else []
    if schema.get("type") not in ("integer", "number"):
        return []
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    highest = schema.get("maximum", schema.get("exclusiveMaximum"))
    assert lowest is not None and highest is not None, "a number needs two limits"
    return [lowest - 1, highest + 1, math.inf]


@pytest.mark.parametrize("name", CreditSettings.model_fields)
def test_a_number_outside_its_limits_is_refused_by_name(name):
    for value in values_outside(CreditSettings.model_json_schema()["properties"][name]):
        with pytest.raises(ValidationError) as refused:
            CreditConfig(**{name: value})
        assert all(fault["loc"][0] == name for fault in refused.value.errors()), name


def test_a_setting_without_an_origin_is_refused_with_the_line_to_write(monkeypatch):
    class Longer(CreditSettings):
        invented_setting: int = 1

    monkeypatch.setattr(provenance, "resolve_name", lambda _: Longer)
    entries = {"method": {"memcalib.rules.base:CreditSettings": {}}}
    with pytest.raises(ValueError) as refused:
        list(provenance.read_provenance(entries))
    message = str(refused.value)
    assert "the setting 'invented_setting'" in message and "nbs/rules/01_base.ipynb" in message
    assert "invented_setting: TYPE = setting(DEFAULT, 'who needs it'" in message


def test_a_setting_that_says_nobody_needs_it_cannot_be_defined():
    with pytest.raises(TypeError, match="need"):
        setting(1)


def test_eta_by_channel_covers_numbers_and_names():
    assert eta_by_channel(0.3).tolist() == [0.3] * 9
    assert eta_by_channel({"C+": 1}).tolist() == [0.0] * 8 + [1.0]
    for bad in (1.1, -0.1, NAN, {"C+": 2}):
        with pytest.raises(ValueError, match="allowed: numbers from 0 to 1"):
            eta_by_channel(bad)


def test_a_channel_that_does_not_exist_is_named_with_its_setting_and_value():
    with pytest.raises(ValueError) as refused:
        load_recipe("micro", settings=["train.eta.B=0.5"])
    assert "train.eta.B: found 0.5; allowed: the channels 'A+', 'AB-'" in str(refused.value)


def test_a_number_out_of_range_is_named_with_its_channel():
    with pytest.raises(ValueError) as refused:
        load_recipe("micro", settings=["train.eta.B+=1.5"])
    assert "train.eta.B+: found 1.5; allowed: numbers from 0 to 1" in str(refused.value)
