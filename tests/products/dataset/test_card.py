"""The card: what is unknown is said, what is foreign is escaped,
and the hub's own library reads it.
"""

import re
from itertools import cycle

import pandas as pd
import pytest
import yaml
from huggingface_hub import DatasetCard
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.dataset import card as d
from memcalib.products.dataset.card import attrition_table, count_examples
from memcalib.products.dataset.stages import Drop
from memcalib.products.dataset.pilot import Frozen, PilotRecord, freeze_without_pilot
from memcalib.problem import sample_records
from memcalib.products.dataset.review import agreement_counts
from memcalib.products.dataset.sources import load_sources
from memcalib.products.dataset.splits import (
    PUBLISHED_SIZES,
    split_examples,
    split_table,
    write_split_files,
    write_splits,
)

RECORDS = sample_records()
SOURCES = load_sources()
SETTINGS = {
    "screening: prompt": "screening-1",
    "screening: prompt text": "abc",
    "screening: model": "m",
    "memcalib": "0.1",
}
PILOT = PilotRecord(
    batch=3,
    rows=50,
    passed=47,
    rate=0.94,
    low=0.8378,
    high=0.9794,
    domains={"health": 50},
    reviewers=["one", "two"],
    earlier=2,
    rows_hash="r",
    reviews_hash="v",
)


def clean_facts(**changes):
    """Facts of a build about which there is nothing to warn, but for the changes."""
    fields = {
        "settings": SETTINGS,
        "frozen": FROZEN,
        "checks": CHECKS,
        "attrition": attrition_table({"a": "health"}, []),
    }
    fields.update(changes)
    return facts(**fields)


FROZEN = Frozen(
    memcalib="0.1.0", frozen_at="2026-01-02T03:04:05+00:00", pilot=PILOT, settings=SETTINGS
)
CHECKS = pd.DataFrame(
    {
        "severity": ["error", "warning"],
        "rows looked at": 9,
        "rows flagged": [0, 2],
        "findings": [0, 3],
    },
    index=["leak", "person"],
)
CHECKS.index.name = "rule"


def sourced(*pairs):
    """The records with (source, licence) in turn."""
    examples = []
    for (name, licence), record in zip(cycle(pairs), RECORDS, strict=False):
        fields = {"source_dataset": name, "source_license": licence}
        examples.append(record.model_copy(update=fields))
    return examples


def facts(*pairs, **fields):
    examples = sourced(*(pairs or [("OASST1", "apache-2.0")]))
    return d.CardFacts("Nine", count_examples(examples), sources=SOURCES, **fields)


def section(text, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]


@pytest.mark.parametrize("licence", ["unknown", "", "Unknown", "  "])
def test_an_unknown_licence_stays_unknown_and_comes_first(licence):
    text = d.dataset_card(facts(("MedDialog", licence), ("OASST1", "apache-2.0")))
    assert DatasetCard(text).data.license == ["apache-2.0", "unknown"]
    first = section(text, "Know this first")
    assert "Licence unknown: 5 of 9 examples, from MedDialog (5)" in first


def test_licences_hubs_do_not_know_become_other_and_keep_their_name():
    text = d.dataset_card(facts(("mine", "Our House Rules v2"), ("OASST1", "MIT")))
    assert DatasetCard(text).data.license == ["mit", "other"]
    assert "Our House Rules v2" in section(text, "Sources and licences")


def test_a_clean_build_has_nothing_to_warn_of():
    clean = clean_facts()
    assert d.card_warnings(clean) == []
    text = d.dataset_card(clean)
    assert "Know this first" not in text
    rate = "47 of 50 rows passed (94.0 %, 95 % interval 83.8 to 97.9). Reviewed by: one, two."
    assert rate in section(text, "How it was made")


FAILED_CALL = Drop(id="a", stage="review", reason="failed call")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frozen": None}, "was not frozen"),
        (
            {"frozen": freeze_without_pilot(SETTINGS, "no need")},
            "No human reviewed a pilot batch. The reason on record: no need.",
        ),
        (
            {"settings": {**SETTINGS, "screening: model": "n"}},
            "for example screening: model: frozen m, now n",
        ),
        ({"checks": None}, "No deterministic check"),
        (
            {"checks": CHECKS.assign(**{"findings": [4, 0], "rows flagged": [2, 0]})},
            "Check leak: 4 findings in 2 examples.",
        ),
        (
            {"attrition": attrition_table({"a": "health"}, [("review", [FAILED_CALL])])},
            "1 row is missing because of failed calls",
        ),
    ],
)
def test_each_reason_to_worry_is_named(changes, words):
    [warning] = d.card_warnings(clean_facts(**changes))
    assert words in warning


def test_what_is_not_recorded_is_said_to_be_missing():
    text = d.dataset_card(facts(("", "unknown")))
    assert "a source not recorded (9)" in text
    assert "| not recorded |" in section(text, "Sources and licences")
    assert "Which prompts and models were used is not recorded" in text
    assert section(text, "Checks").strip() == "Not recorded."
    assert section(text, "Splits").strip() == "The dataset is not split."
    assert not re.search(r"\bnan\b|\bNone\b|<NA>", text)


def test_published_numbers_are_missing_where_there_are_none():
    examples = [RECORDS[0].model_copy(update={"domain": "law"})]
    text = d.dataset_card(d.CardFacts("Law", count_examples(examples)))
    assert re.search(r"\| law \| 1 \| \d+ \| \d+ \| – \| – \| – \|", text)


def test_rows_from_a_log_are_described_as_such():
    atoms = [atom.model_copy(update={"origin": "retrieved"}) for atom in RECORDS[0].atoms]
    counts = count_examples([RECORDS[0].model_copy(update={"atoms": atoms})])
    privacy = "## Private memory\n\nOnly ours."
    text = d.dataset_card(d.CardFacts("Log", counts, privacy=privacy))
    assert "Only ours." in section(text, "Private memory") and "asked in public" not in text
    assert "No distractor is invented" in text and "invented distractors" not in text
    assert "given by the volunteers" in section(d.dataset_card(facts()), "Consent and privacy")


EVIL = "a|b <script>alert(1)</script> `x` [y](http://z) \n# title\x1b"


def test_foreign_text_stays_in_its_cell():
    names = ("prompt", "prompt text", "model", "server")
    settings = {f"{EVIL}: {name}": EVIL for name in names}
    pilot = PILOT.model_copy(update={"reviewers": [EVIL]})
    frozen = FROZEN.model_copy(update={"pilot": pilot, "settings": settings})
    fields = {"domain": EVIL, "source_dataset": EVIL, "source_license": EVIL}
    counts = count_examples([RECORDS[0].model_copy(update=fields)])
    text = d.dataset_card(d.CardFacts(EVIL, counts, settings=settings, frozen=frozen))
    body = text.split("---\n", 2)[2]
    assert "<script" not in body and "\x1b" not in body and not re.search(r"^# title", body, re.M)
    own_rows = ("| `", "| field")  # of the table of fields, which is the card's own
    for line in body.splitlines():
        if line.startswith("|") and not line.startswith(own_rows):
            assert not re.search(r"(?<!\\)[`\[]", line)
    sources = section(text, "Sources and licences").splitlines()
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in sources if line.startswith("|")}
    assert len(bars) == 1


@given(st.text(max_size=60))
def test_any_title_leaves_the_yaml_readable(title):
    header = d.card_header(d.CardFacts(title, count_examples(RECORDS)))
    assert yaml.safe_load(header)["language"] == ["en"]


@pytest.mark.parametrize(
    ("n", "size"),
    [(1, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (15_000, "10K<n<100K"), (10**6, "n>1M")],
)
def test_size_categories(n, size):
    counts = count_examples(RECORDS)
    counts.domains["health"]["examples"] += n - counts.examples
    header = d.card_header(d.CardFacts("x", counts))
    assert DatasetCard(f"---\n{header}\n---\n").data.size_categories == [size]


def test_configs_name_the_files():
    default, parts = d.hub_configs(PUBLISHED_SIZES)
    train = {"split": "train", "path": ["cold_start.jsonl", "rl.jsonl"]}
    assert default["data_files"][0] == train
    split_names = [entry["split"] for entry in parts["data_files"]]
    assert split_names == ["cold_start", "rl", "validation", "test"]
    [undivided] = d.hub_configs({"train": 0.9, "hard-test": 0.1})
    assert undivided["config_name"] == "default"
    hard_test = {"split": "hard_test", "path": ["hard-test.jsonl"]}
    assert d.hub_configs({"hard-test": 3})[0]["data_files"] == [hard_test]
    assert d.hub_configs()[0]["data_files"][0]["path"] == ["examples.jsonl"]


def test_datasets_loads_the_folder_by_its_card(tmp_path, monkeypatch):
    from datasets import config, load_dataset

    examples = sourced(("OASST1", "apache-2.0"), ("APPS", "mit"))
    sizes = {"train": {"a": 3, "b": 2}, "dev-set": 2, "test": 2}
    splits = split_examples(examples, sizes)
    write_split_files(tmp_path, examples, splits, sizes)
    counts = count_examples(examples)
    table = split_table(examples, splits)
    card = d.CardFacts("Nine", counts, sources=SOURCES, sizes=sizes, splits=table)
    path = d.write_card(tmp_path, card)
    assert path.name == "README.md" and DatasetCard.load(path).data.pretty_name == "Nine"
    data = load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert {name: sorted(rows["id"]) for name, rows in data.items()} == {
        "train": splits["train"],
        "dev_set": splits["dev-set"],
        "test": splits["test"],
    }
    parts = load_dataset(str(tmp_path), "parts", cache_dir=str(tmp_path / "cache"))
    assert sorted(parts["a"]["id"]) == splits["a"]
    text = path.read_text()
    assert "memcalib validate test.jsonl" in text
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    program = text.partition("```python\n")[2].partition("```")[0]
    variables = {}
    exec(program, variables)  # what the card tells its reader to type
    assert sorted(variables["data"]["id"]) == splits["test"]


# what a build says of its sources


def test_language_consent_and_origin_come_from_the_build():
    tickets = d.Source(
        name="tickets",
        domain="general",
        columns={"question": "q", "answer": "a"},
        origin="tickets of our shop",
        consent="terms of 2024",
    )
    counts = count_examples(sourced(("tickets", "cc0-1.0"), ("elsewhere", "mit")))
    sources = {"tickets": tickets}
    card_facts = d.CardFacts("Own", counts, sources=sources, languages=("de", "en"))
    text = d.dataset_card(card_facts)
    assert DatasetCard(text).data.language == ["de", "en"]
    privacy = section(text, "Consent and privacy")
    assert "| tickets | 5 | tickets of our shop | terms of 2024 |" in privacy
    assert "| elsewhere | 4 | not recorded | not recorded |" in privacy
    assert "asked in public" not in text and "did not agree" not in text
    silent = "Consent is not on record for 4 of 9 examples, from elsewhere"
    assert any(silent in warning for warning in d.card_warnings(card_facts))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_known_source_says_who_wrote_it(name):
    assert SOURCES[name].origin and SOURCES[name].consent


def test_review_rates_and_pilots_stand_on_the_card():
    agreement = pd.DataFrame({"rows": agreement_counts(20, {1, 2}, {2, 3, 4})}).T
    pilots = pd.DataFrame({"batch": ["1", "2"], "examples": ["10", "10"], "passed": ["4", "10"]})
    review = section(d.dataset_card(facts(agreement=agreement, pilots=pilots)), "Review")
    for line in (
        "Approved by the first | 18 (90.0%)",
        "Approved by both | 16 (80.0%)",
        "Exact agreement on rows | 17 (85.0%)",
        "kappa on rows | 0.318",
        "| 2 | 10 | 10 |",
    ):
        assert line in review
    bare_card = d.dataset_card(facts())
    assert "not recorded" in section(bare_card, "Review")
    composition = section(bare_card, "Composition")
    assert "Mixed-target blocks" in composition and "Atoms per block (min--max)" in composition


@pytest.mark.parametrize("changes", [{}, {"checks": None}])
def test_a_withdrawn_pilot_is_not_praised_any_more(tmp_path, changes):
    card = d.write_card(tmp_path, clean_facts(**changes))
    assert "47 of 50 rows passed" in card.read_text()
    text = d.withdraw_on_card(card, FROZEN, "batch 3: 20 passed, 30 failed").read_text()
    assert "47 of 50" not in text
    for title in ("Know this first", "How it was made"):
        assert "20 passed, 30 failed" in section(text, title)
    assert text.count("## Know this first") == 1 and text.count("## How to load") == 1
    assert DatasetCard(text).data.language == ["en"]


def test_what_goes_to_a_hub_is_the_card_the_data_and_the_splits(tmp_path):
    build = tmp_path / "b"
    hub = tmp_path / "hub"
    sizes = {"train": 6, "test": 3}
    splits = split_examples(RECORDS, sizes)
    write_splits(build / "splits", RECORDS, splits, sizes)
    write_split_files(build, RECORDS, splits, sizes)
    with pytest.raises(FileNotFoundError, match="README.md"):
        d.lay_out_folder(build, hub)
    d.write_card(build, facts(sizes=sizes))
    (build / "losses.jsonl").write_text("secret")
    d.lay_out_folder(build, hub)
    names = {str(path.relative_to(hub)) for path in d.lay_out_folder(build, hub)}
    assert names == {
        "README.md",
        "train.jsonl",
        "test.jsonl",
        "splits/splits.json",
        "splits/train-ids.txt",
        "splits/test-ids.txt",
    }
    assert {str(path.relative_to(hub)) for path in hub.rglob("*") if path.is_file()} == names
    (build / "test.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="test.jsonl: this file does not exist, although"):
        d.lay_out_folder(build, tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    d.write_card(build, facts())
    (build / "examples.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="notes.txt"):
        d.lay_out_folder(build, tmp_path / "mine")
