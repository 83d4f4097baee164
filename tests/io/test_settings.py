"""What a setting may be, in words: ranges, kinds, names that were meant;
and files of settings, each name in them once.
"""

import pickle
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, field_validator

import memcalib
from memcalib.commands.build import load_build
from memcalib.commands.evaluate import load_evaluation
from memcalib.io.settings import (
    SettingError,
    SettingErrors,
    allowed,
    changed,
    nearest,
    package_data,
    parse_yaml,
    read_yaml,
    setting_error,
    shipped_names,
)
from memcalib.inference.rollout import load_prompt_template
from memcalib.products.reproduction.profiles import load_profile
from memcalib.products.dataset.writing import load_phrases
from memcalib.trainer.recipe import load_recipe
from memcalib.products.shared.redaction import load_redactor
from memcalib.products.dataset.screening import load_screen
from memcalib.products.dataset.sources import load_sources

ENDS = st.floats(-1e6, 1e6, allow_nan=False)


class Recording(BaseModel, extra="forbid"):
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
            raise ValueError("allowed: x, y, z")
        return value


def faults(**options) -> list[dict]:
    with pytest.raises(ValidationError) as error:
        Recording(**options)
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
    assert allowed(Recording, name) == words


@given(ENDS, ENDS, st.booleans(), st.booleans())
def test_words_state_the_limits(low, high, open_low, open_high):
    limits = {"gt" if open_low else "ge": low, "lt" if open_high else "le": high}
    model = type("M", (BaseModel,), {"__annotations__": {"x": float}, "x": Field(low, **limits)})
    words = allowed(model, "x")
    numbers = [
        float(word.strip(",").replace(",", ""))
        for word in words.split()
        if word.strip(",-").replace(",", "")[0:1].isdigit()
    ]
    assert sorted(numbers) == pytest.approx(sorted([low, high]))
    assert ("above" in words) == open_low and ("below" in words) == open_high


@given(st.sampled_from(sorted(Recording.model_fields)), st.data())
def test_a_letter_too_many_is_found(name, data):
    split = data.draw(st.integers(0, len(name)))
    mistyped = name[:split] + "q" + name[split:]
    assert len(name) < 4 or nearest(mistyped, Recording.model_fields) == name


def test_nothing_is_offered_where_nothing_is_near():
    assert nearest("temperature", ["kind", "on"]) is None and nearest("x", []) is None


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"share": 1}, "p.share: found 1; allowed: numbers of at least 0, below 1"),
        ({"count": "many"}, "p.count: found 'many'; allowed: whole numbers of at least 1"),
        ({"kind": ["a"]}, "p.kind: found ['a']; allowed: a, b"),
        ({"method": "q"}, "p.method: found 'q'; allowed: x, y, z"),
        (
            {"cuont": 2},
            (
                "p.cuont: unknown option; perhaps you meant count; allowed: "
                "share, count, kind, on, either, many"
            ),
        ),
    ],
)
def test_lines(options, line):
    (fault,) = faults(**options)
    name = fault["loc"][0]
    error = setting_error(f"p.{name}", fault, Recording, name, leave=("method",))
    assert str(error) == line and error.setting == f"p.{name}"


def test_a_secret_is_not_shown():
    (fault,) = faults(count="hidden words")
    assert "hidden" in str(setting_error("p.count", fault, Recording, "count"))
    error = setting_error("p.count", fault, Recording, "count", show=False)
    assert str(error) == "p.count: allowed: whole numbers of at least 1" and not error.value


class Tape(BaseModel, extra="forbid"):
    side: str

    @field_validator("side")
    @classmethod
    def _two_sides(cls, side):
        if side not in "AB":
            raise SettingError("label", "allowed: A, B", "a label")
        return side


def test_an_error_that_a_validator_raised_keeps_its_parts():
    with pytest.raises(ValidationError) as error:
        Tape(side="C")
    (fault,) = error.value.errors()
    at_fault = setting_error("tape.side", fault, Tape, "side")
    assert (at_fault.setting, at_fault.value) == ("tape.side.label", "a label")
    assert str(at_fault) == "tape.side.label: found a label; allowed: A, B"


def test_errors_of_a_file_are_lines_that_begin_with_it_and_travel_between_processes():
    errors = SettingErrors(
        [SettingError("lr", "allowed: numbers", "'fast'"), SettingError("", "nothing to train")],
        "r.yaml",
    )
    assert str(errors) == "r.yaml: lr: found 'fast'; allowed: numbers\nr.yaml: nothing to train"
    copy = pickle.loads(pickle.dumps(errors))
    assert str(copy) == str(errors) and copy.errors[0].setting == "lr"
    assert str(errors.errors[0].at("train.lr")) == "train.lr: found 'fast'; allowed: numbers"


@pytest.mark.parametrize(
    ("text", "line", "first"),
    [
        ("lr: 1\nsteps: 2\nlr: 3\n", 3, 1),
        ("train:\n  lr: 1\n  steps: 2\n  'lr': 3\n", 4, 2),
        ("- {a: 1,\n   a: 2}\n", 2, 1),
        ("a: &x {b: 1, b: 1}\n", 1, 1),
    ],
)
def test_a_name_that_stands_twice_is_refused_with_its_lines(text, line, first):
    with pytest.raises(
        ValueError,
        match=rf"^here\.yaml: .*line {line}: found \w+ a second time, after line {first}",
    ):
        parse_yaml(text, "here.yaml")


NAMES = st.text("abc", min_size=1, max_size=2)
NESTED = st.recursive(
    st.integers() | st.booleans() | st.none() | NAMES,
    lambda inner: st.dictionaries(NAMES, inner, max_size=4) | st.lists(inner, max_size=3),
)


@given(NESTED)
def test_settings_without_repetitions_are_read_as_ever(content):
    text = yaml.safe_dump(content)
    assert parse_yaml(text, "here") == yaml.safe_load(text) == content


@given(st.lists(st.tuples(NAMES, st.integers(0, 9)), max_size=6))
def test_only_repetitions_are_refused(pairs):
    text = "{" + ", ".join(f"'{name}': {value}" for name, value in pairs) + "}"
    if len(dict(pairs)) == len(pairs):
        assert parse_yaml(text, "here") == dict(pairs)
    else:
        with pytest.raises(ValueError, match="a second time"):
            parse_yaml(text, "here")


def test_what_is_merged_may_be_set_anew():
    text = (
        "{base: &b {x: 1, y: 2}, own: {inner: &i {<<: *b, x: 3}}, more: {<<: *i, y: 4}, both: "
        "{<<: *b, <<: *i}}"
    )
    settings = parse_yaml(text, "here")
    assert settings == yaml.safe_load(text)
    assert settings["own"]["inner"]["x"] == 3 and settings["more"] == {"x": 3, "y": 4}


@pytest.mark.parametrize(
    "content",
    [b"\xff\xff", b"a: [", b"a: 2024-13-45", b"[" * 20_000, b"a: !!python/name:os.system"],
)
def test_a_file_that_is_no_yaml_is_named(tmp_path, content):
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"^odd: not readable as YAML: "):
        read_yaml(tmp_path / "odd.yaml", "odd")


@pytest.mark.parametrize(
    "written", ["1:30", "-1:30", "190:20:30", "1:30.5", "+12:05", "010", "-0_7", "007"]
)
def test_numbers_of_another_base_are_texts(written):
    """PyYAML takes 1:30 for 90, and 010 for 8."""
    assert not isinstance(yaml.safe_load(written), str)
    assert parse_yaml(f"[{written}, {{a: {written}}}]", "here") == [written, {"a": written}]


@pytest.mark.parametrize("written", ["0", "10", "1_000", "0x1F", "1.5", "0.5", "1.0e-3", "-7"])
def test_other_numbers_are_read_as_ever(written):
    assert parse_yaml(written, "here") == yaml.safe_load(written)
    assert parse_yaml("2026-11-29 10:30:00", "here") == datetime(2026, 11, 29, 10, 30)


def test_there_is_one_reader_of_yaml():
    sources = Path(memcalib.__file__).parent.rglob("*.py")
    assert [
        path.name for path in sources if re.search(r"yaml\.(safe_|full_)?load", path.read_text())
    ] == ["settings.py"]


READERS = {
    "recipe": load_recipe,
    "evaluation": load_evaluation,
    "build": load_build,
    "profile": load_profile,
    "phrases": load_phrases,
    "redaction": load_redactor,
    "sources": load_sources,
    "screening": load_screen,
    "prompt_template": load_prompt_template,
}


@pytest.mark.parametrize("kind", READERS)
def test_every_file_of_settings_is_refused_with_its_name_and_line(tmp_path, kind):
    file = tmp_path / f"{kind}.yaml"
    file.write_text("first: {}\nsecond: {}\nfirst: {}\n")
    with pytest.raises(
        ValueError, match=rf"{kind}\.yaml: .*line 3: found first a second time, after line 1"
    ):
        READERS[kind](file)


SETTINGS = st.dictionaries(NAMES, st.integers(0, 2), max_size=5)


@given(SETTINGS, SETTINGS, SETTINGS)
def test_only_a_setting_that_is_not_stored_may_have_its_default(stored, requested, defaults):
    def same(name):
        return name in stored and name in requested and stored[name] == requested[name]

    def younger(name):
        return name not in stored and name in defaults and defaults[name] == requested[name]

    differ = {name for name in {*stored, *requested} if not same(name) and not younger(name)}
    lines = changed(stored, requested, defaults)
    assert {line.partition(":")[0] for line in lines} == differ


def test_shipped_files_are_found_by_name():
    assert package_data("data", "samples.jsonl").is_file() and package_data().name == "memcalib"
    names = shipped_names("trainer", "recipes")
    assert "micro" in names and names == sorted(names)
    assert {f"{name}.yaml" for name in names} == {
        path.name for path in package_data("trainer", "recipes").glob("*.yaml")
    }
    assert shipped_names("trainer", "recipes", suffix=".none") == []
