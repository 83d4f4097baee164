"""Where each default comes from: every setting is in the table, every value is the class's, and no
page calls something the paper's that is not.
"""

import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import memcalib
from memcalib.inference.client import Form
from memcalib.io.records import Record
from memcalib.products.reproduction.provenance import (
    Said,
    false_claims,
    own_settings,
    provenance,
    provenance_table,
    read_provenance,
)

ROOT = Path(__file__).parents[3]

# Classes with defaults that decide neither method, training, judging, evaluation nor construction.
OTHER_CLASSES = {
    "memcalib.commands.demonstrate:DemonstrationPlan": "files and models",
    "memcalib.commands.exam:Exam": "the judge's exam is not in the paper",
    "memcalib.commands.label:SecondReading": "a second judge of labels",
    "memcalib.commands.sweep:Sweep": "a sweep is not in the paper",
    "memcalib.inference.endpoint:Price": "what a call costs",
    "memcalib.inference.rollout:TemplateFile": "the form of a template file",
    "memcalib.trainer.recipe:": "files, models and machines of a recipe",
    "memcalib.trainer.train_config:TrainConfig": "the method, as in CreditConfig",
    "memcalib.products.dataset.build:MemoryPlan": "building from logs is not in the paper",
    "memcalib.products.dataset.build:SourcePlan": "columns of a file",
    "memcalib.products.dataset.pilot:": "what was drawn and frozen",
    "memcalib.products.dataset.sources:": "columns of a source",
    "memcalib.products.dataset.writing:PhraseBook": "words of noise",
    "memcalib.products.integrations.": "settings of other engines",
    "memcalib.products.memory_logs.": "tools for logs are not in the paper",
    "memcalib.products.micro.": "a world and a server for practice",
    "memcalib.products.reproduction.": "sizes and plans of runs",
}


def settings_classes():
    """Every class of the package whose fields have defaults and that is no row of a file."""
    for module in pkgutil.walk_packages(memcalib.__path__, "memcalib."):
        if ".integrations" in module.name or module.name.endswith("inspect_task"):
            continue
        for name, held in vars(importlib.import_module(module.name)).items():
            is_class = isinstance(held, type) and issubclass(held, BaseModel)
            if is_class and held.__module__ == module.name and not issubclass(held, Record | Form):
                if own_settings(held):
                    yield f"{module.name}:{name}"


def test_every_settings_class_is_in_the_table():
    in_table = {row.holder for row in provenance()}
    missing = [
        name
        for name in settings_classes()
        if name not in in_table and not name.startswith(tuple(OTHER_CLASSES))
    ]
    assert not missing, f"{missing}: say in provenance.yaml where their defaults come from"


def test_the_list_of_other_classes_is_not_longer_than_it_must_be():
    names = [*settings_classes()]
    in_table = {row.holder for row in provenance()}
    for prefix in OTHER_CLASSES:
        if ".integrations." in prefix:
            continue
        assert any(name.startswith(prefix) for name in names), f"{prefix} mentions nothing"
    assert not in_table & OTHER_CLASSES.keys()


def test_each_default_is_said_once_and_has_a_place_or_a_reason():
    rows = provenance()
    assert len({(row.holder, row.setting) for row in rows}) == len(rows) > 200
    for row in rows:
        assert row.said.why or row.origin == "the paper", row
        assert row.said.where or not row.said.gives("paper"), row


PAPER_VALUES = {  # written down from the text of the paper, by hand and a second time
    "eta": 0.75,
    "cap": 4.0,
    "threshold_start": 0.02,
    "threshold_floor": 0.02,
    "threshold_quantile": 0.75,
    "threshold_decay": 0.9,
    "threshold_minimum": 256,
    "sentence_start": 0.02,
    "sentence_floor": 0.02,
    "sentence_quantile": 0.75,
    "sentence_minimum": 256,
    "eps": 1e-6,
    "prompts": 64,
    "generations": 8,
    "steps": 125,
    "lora_alpha": 64,
    "warmup": 0.05,
    "rho": 0.5,
    "top_k": 64,
    "PILOT_SIZE": 50,
    "PASS_RATE": 0.9,
    "per_channel": 20,
    "domains": {"health": 2.0, "general": 1.0, "coding": 1.0},
}


@pytest.mark.parametrize("setting", PAPER_VALUES)
def test_values_of_the_paper(setting):
    (row, *_) = [row for row in provenance() if row.setting == setting]
    assert (row.value, row.origin) == (PAPER_VALUES[setting], "the paper")


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("sentence_start", 0.01),
        ("sentence_floor", 0.01),
        ("sentence_quantile", 0.7),
        ("sentence_minimum", 32),
        ("merge_over_use", True),
    ],
)
def test_where_the_published_code_differs_its_value_is_shown(setting, code):
    table = provenance_table("method")
    (row,) = table[table["setting"] == setting].to_dict("records")
    assert row["from"] == "the paper" and row["the paper has"] == ""
    assert row["the published code has"] == str(code)


def test_what_differs_from_the_paper_shows_its_value():
    table = provenance_table("training")
    (row, *_) = table[table["setting"] == "text"].to_dict("records")
    assert row["from"] == "published code"
    assert row["the paper has"] == "fluent" and row["why"]


def test_no_default_drifts_from_the_value_that_is_written_down():
    """A default has the paper's value or the published code's wherever one of them is written
    down, and leaves the paper in five places only.
    """
    written = [row for row in provenance() if row.said.gives("paper") or row.said.gives("code")]
    assert not [row.setting for row in written if row.origin == "ours"]
    leaving = [
        (row.holder.rsplit(":")[-1], row.setting)
        for row in written
        if row.said.gives("paper") and row.origin != "the paper"
    ]
    assert leaving == [("RunSettings", "text")]


@pytest.mark.parametrize("setting", ["beta", "clip", "d_max", "gate", "gamma", "sentence_gate"])
def test_what_the_paper_leaves_open_is_not_called_its(setting):
    (row,) = [row for row in provenance() if row.setting == setting]
    assert row.origin == "published code" and not row.said.gives("paper")


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))


@given(value=scalars, paper=scalars, code=scalars, given_paper=st.booleans())
def test_the_origin_is_found_by_comparison(value, paper, code, given_paper):
    said = Said(code=code, why="so", **({"paper": paper, "where": "1"} if given_paper else {}))
    origin = said.origin(value)
    if given_paper and value == paper:
        assert origin == "the paper"
    elif value == code:
        assert origin == "published code"
    else:
        assert origin == "ours"


def test_a_default_that_leaves_the_paper_needs_a_reason(monkeypatch):
    entries = {"memcalib.products.annotation.audit:top_hit": {"top": {"paper": 3, "where": "5.4"}}}
    assert [row.origin for row in read_provenance({"audits": entries})] == ["the paper"]
    from memcalib.products.annotation import audit

    monkeypatch.setattr(audit.top_hit, "__defaults__", (5,))
    with pytest.raises(ValueError, match="top: the default 5 is not the paper's"):
        list(read_provenance({"audits": entries}))


def prose():
    """(place, text) of everything that a reader is told: cells of pages, comments and docstrings in
    them, READMEs and the comments of settings files."""
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                comments = [line.split("#", 1)[1] for line in text.splitlines() if "#" in line]
                text = "\n\n".join(re.findall(r'"""(.*?)"""', text, re.S) + comments)
            yield f"{path.relative_to(ROOT)} #{cell['id']}", text
    for pattern in ("README.md", "CONTRIBUTING.md", "memcalib/**/*.md", "memcalib/**/*.yaml"):
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_nothing_is_called_the_papers_that_is_not():
    found = [
        f"{place}: {claim.setting or 'all defaults'}: {claim.sentence[:200]}"
        for place, text in prose()
        if "provenance" not in place  # the table, and a page whose examples are wrong on purpose
        for claim in false_claims(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "Everything else has its default, and the defaults are the paper's: KL weight 0.01.",
        "# the paper's: KL weight 0.01",
        "The absolute threshold of 0.02 is the paper's.",
        "`train.max_prompt=4096` is the paper's value.",
        "What is not said has its default, which is the paper's: 64 prompts.",
        "The paper uses a KL weight of 0.01.",
        "Following the paper, weight decay is 0.",
        "As in the paper, `max_tokens` is 2048.",
    ],
)
def test_sentences_that_mislead_are_found(sentence):
    assert false_claims(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "The defaults are the paper's where it gives a value.",
        "The paper's rule moves credit.",
        "`eta` is the paper's.",
        "`beta` is 0.01, and the paper gives no weight; the paper's rule is unchanged.",
        "`gate` is 0.02 in the published code.",
        "The paper has a KL term and gives neither its form nor its weight.",
    ],
)
def test_sentences_that_do_not_mislead_pass(sentence):
    assert not false_claims(sentence)
