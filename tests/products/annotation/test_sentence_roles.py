"""Labelling sentence roles: items, labels that survive, sheets with faults,
and the way to the audit.
"""

import csv
import html
import json
import random
import re
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spreadsheets import sheet_rows
from test_label_forms import press_in_a_kernel

from memcalib.products.annotation.audit import (
    ROLES,
    UNDER,
    draw_pairs,
    hits_table,
    sentence_credit,
    shares_table,
)
from memcalib.localization import tokens_with_role
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples, sentence_roles
from memcalib.products.micro.policy import load_policy
from memcalib.io.records import DataError, read_jsonl, write_jsonl
from memcalib.products.shared.questionnaire import KeyPage, KeySession
from memcalib.products.annotation.sentence_roles import (
    RoleBook,
    RoleItem,
    RoleLabel,
    Target,
    audited_pairs,
    cut_sentences,
    item_view,
    latest_roles,
    read_role_labels,
    role_html,
    role_items,
    true_roles,
    write_role_page,
)
from memcalib.trainer.train_config import world_config
from memcalib.trainer.traces import TraceWriter, sample_credit
from memcalib.trainer.trace_files import read_traces

KEYS = RoleBook.keys()
EVIL = '<script>alert("x")</script>\x1b[31m\u202e'
roles = st.one_of(st.none(), st.sampled_from(ROLES))


def an_item(name="1/2/C+", sentences=("First one here.", " Second one.", " =third()"), **fields):
    tokens = 4 * len(sentences)
    head = {
        "item": name,
        "step": 1,
        "row": 2,
        "channel": "C+",
        "example_id": "e",
        "question": "Why?",
    }
    cut = {"sentences": list(sentences), "firsts": list(range(0, tokens, 4)), "tokens": tokens}
    return RoleItem(**(head | {"atoms": [Target(atom_id="a", text="Likes tea.")]} | cut | fields))


ITEMS = [an_item(), an_item("1/3/CA-", channel="CA-", row=3, sentences=("Only one.",))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Examples, the traces of one step, and items drawn from them."""
    folder = tmp_path_factory.mktemp("traces")
    model, tokenizer = load_policy("cold-short")
    examples = make_examples("short", 6, 0, "test")
    batch = sample_credit(model, tokenizer, examples, exact_judge, world_config(WORLDS["short"]))
    TraceWriter(folder).write(1, *batch, tokenizer)
    traces = read_traces(folder)
    return examples, traces, role_items(draw_pairs(traces, 4), traces, examples)


def test_items_cover_their_answers_and_hide_the_credit(run):
    _, traces, items = run
    for item in items:
        answer_row = traces[(traces["row"] == item.row) & traces["channel"].isna()].iloc[0]
        assert "".join(item.sentences) == answer_row["response"] and item.tokens == len(
            answer_row["tokens"]
        )
        assert item.units.tolist() == sorted(item.units) and set(item.units) == set(
            range(len(item.sentences))
        )
        page = html.unescape(role_html(item))
        assert all(atom.text in page for atom in item.atoms)
    names = set(RoleItem.model_fields) | set(items[0].model_dump())
    assert not names & {"q", "d", "m", "credit", "advantage", "reward", "token_advantage"}


@given(
    st.lists(
        st.sampled_from(
            ["One.", " Two is here.", "\n\n- item", " 🍵", "", " e.g. this", "\n```\ncode\n```\n"]
        ),
        max_size=8,
    )
)
def test_sentences_make_up_the_answer(pieces):
    response = "".join(pieces)
    ends = [*range(1, len(response) + 1), len(response)]
    firsts, texts = cut_sentences(response, ends)
    assert "".join(texts) == response and len(firsts) == len(texts)
    assert firsts[0] == 0 and all(a < b for a, b in pairwise(firsts)) and firsts[-1] < len(ends)


def test_pairs_without_example_atom_or_answer_are_all_listed(run):
    examples, traces, _ = run
    drawn = draw_pairs(traces, 2).iloc[:3].copy()
    drawn["example_id"] = ["gone", *drawn["example_id"][1:]]
    drawn.at[1, "atom_ids"] = ["no_such_atom"]
    drawn.loc[2, "row"] = 999
    with pytest.raises(DataError) as error:
        role_items(drawn, traces, examples)
    faults = {fault.rule: fault for fault in error.value.violations}
    assert set(faults) == {"example", "atom", "answer"}
    assert faults["example"].example_id == "gone" and "no_such_atom" in faults["atom"].found
    assert "row 999" in faults["answer"].item


@pytest.mark.parametrize(
    "fields",
    [
        {"channel": "A+"},
        {"firsts": [0, 4]},
        {"firsts": [1, 4, 8]},
        {"firsts": [0, 8, 4]},
        {"tokens": 8},
        {"sentences": []},
    ],
)
def test_items_that_do_not_fit_are_refused(fields):
    with pytest.raises(ValueError, match="allowed|least 1"):
        an_item(**fields)


def test_items_survive_a_file(run, tmp_path):
    write_jsonl(tmp_path / "items.jsonl", run[2])
    assert list(read_jsonl(tmp_path / "items.jsonl", RoleItem)) == run[2]


@given(st.lists(st.tuples(st.integers(0, 3), roles), max_size=12))
def test_the_latest_label_counts_whatever_was_stopped(tmp_path_factory, decisions):
    path = tmp_path_factory.mktemp("book") / "roles.jsonl"
    sentence_keys = [(ITEMS[0].item, 1), (ITEMS[0].item, 2), (ITEMS[0].item, 3), (ITEMS[1].item, 1)]
    expected = {}
    for key_number, role in decisions:
        book = RoleBook(path, ITEMS, "ann")
        book.put(*sentence_keys[key_number], role)
        book.close()
        expected[sentence_keys[key_number]] = role
    book = RoleBook(path, ITEMS, "ann")
    assert {sentence_key: book.get(*sentence_key).role for sentence_key in expected} == expected
    counts = book.counts()
    assert counts["left"] == 4 - len(expected) and counts["undecided"] == list(
        expected.values()
    ).count(None)
    assert sum(counts[name] for name in ("labelled", "undecided", "left")) == 4
    book.close()
    given_roles = latest_roles(read_role_labels(path)) if decisions else {}
    assert {
        (i, n): r
        for i, roles_by_sentence in given_roles.items()
        for n, r in roles_by_sentence.items()
    } == expected


def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path):
    path = tmp_path / "roles.jsonl"
    book = RoleBook(path, ITEMS)
    book.put(ITEMS[0].item, 1, "key")
    book.close()
    path.write_bytes(path.read_bytes() + b'{"item": "1/2')
    book = RoleBook(path, ITEMS)
    assert book.roles_of(ITEMS[0].item) == {1: "key"}
    book.close()


def test_people_do_not_see_each_other(tmp_path):
    first, second = (RoleBook(tmp_path / "roles.jsonl", ITEMS, name) for name in ("ann", "bob"))
    first.put(ITEMS[0].item, 1, "key")
    assert second.get(ITEMS[0].item, 1) is None
    first.close()
    second.close()
    assert KeySession(RoleBook(tmp_path / "roles.jsonl", ITEMS, "bob")).place[1] == 1


def test_labels_for_other_sentences_are_refused(tmp_path):
    path = tmp_path / "roles.jsonl"
    book = RoleBook(path, ITEMS)
    book.put(ITEMS[0].item, 1, "key")
    book.close()
    changed = [an_item(sentences=("Another one.", " Second one.", " =third()")), ITEMS[1]]
    with pytest.raises(DataError, match="given for a different text"):
        RoleBook(path, changed)
    with pytest.raises(DataError, match="roles.jsonl"):
        KeySession(RoleBook(path, changed))


def test_bad_labels_in_the_file_are_named(tmp_path):
    path = tmp_path / "roles.jsonl"
    path.write_text(json.dumps({"item": ITEMS[0].item, "sentence": 1, "role": "great"}) + "\n")
    with pytest.raises(DataError, match="roles.jsonl:1"):
        RoleBook(path, ITEMS)
    with pytest.raises(DataError, match="great"):
        read_role_labels(path)


def test_places_that_do_not_exist_are_refused(tmp_path):
    book = RoleBook(tmp_path / "roles.jsonl", ITEMS)
    for sentence in (0, 4, -1):
        with pytest.raises(KeyError, match="1 to 3"):
            book.put(ITEMS[0].item, sentence, "key")
    with pytest.raises(KeyError):
        book.put("nobody", 1, "key")
    with pytest.raises(ValueError, match="key"):
        book.put(ITEMS[0].item, 1, "great")
    book.close()
    assert (tmp_path / "roles.jsonl").read_text() == ""
    with pytest.raises(ValueError, match="each item once"):
        RoleBook(tmp_path / "roles.jsonl", [ITEMS[0], ITEMS[0]])


@given(st.lists(st.sampled_from([*KEYS, "n", "p", "u", "x", "", " 1 "]), max_size=20))
def test_keys_do_what_they_say(tmp_path_factory, keys):
    path = tmp_path_factory.mktemp("session") / "roles.jsonl"
    session = KeySession(RoleBook(path, ITEMS))
    expected = {}
    for key in keys:
        sentence_key = session.item.item, session.place[1]
        session.press(key)
        if key.strip() in KEYS:
            expected[sentence_key] = KEYS[key.strip()]
            pair = [item.item for item in ITEMS].index(sentence_key[0]) + 1
            assert session.status.startswith(
                f"Saved: Pair {pair} of 2, sentence {sentence_key[1]}: "
            )
        elif key not in "npu" or not key:
            assert (
                session.status.startswith("Nothing was saved")
                and (session.item.item, session.place[1]) == sentence_key
            )
    roles_by_item = latest_roles(read_role_labels(path)) if expected else {}
    assert {
        (i, n): r
        for i, roles_by_sentence in roles_by_item.items()
        for n, r in roles_by_sentence.items()
    } == expected
    session.book.close()


def test_a_session_ends_when_all_is_labelled_and_can_be_corrected(tmp_path):
    session = KeySession(RoleBook(tmp_path / "roles.jsonl", ITEMS))
    for key in "1230":
        session.press(key)
    assert (
        session.status.endswith("All sentences are labelled.")
        and session.book.counts()["pairs done"] == 2
    )
    session.press("p")
    session.press("1")
    assert session.book.roles_of(ITEMS[0].item)[3] == "key"


def test_what_cannot_be_saved_is_said_and_the_place_kept(tmp_path, monkeypatch):
    session = KeySession(RoleBook(tmp_path / "roles.jsonl", ITEMS))

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(session.book._journal, "append", full)
    session.press("1")
    assert session.status == "NOT saved: No space left on device" and session.place[1] == 1
    assert session.book.roles_of(ITEMS[0].item) == {}


def test_the_widget_labels_and_resumes(tmp_path):
    page = KeyPage(RoleBook(tmp_path / "roles.jsonl", ITEMS))
    page._keys.value = "1"
    assert page._keys.value == "1" and "sentence 2" in page._head.value
    page._buttons["3"].click()
    page._buttons["p"].click()
    assert page._buttons["3"].button_style == "success" and page._buttons["1"].button_style == ""
    page.session.book.close()
    again = KeyPage(RoleBook(tmp_path / "roles.jsonl", ITEMS))
    assert again.session.place[1] == 3 and "2 labelled, 0 undecided, 2 left" in again._head.value
    assert 'class="key"' in again._body.value and 'class="here"' in again._body.value


KERNEL = """
from memcalib.products.shared.questionnaire import KeyPage
from memcalib.products.annotation.sentence_roles import RoleBook, RoleItem
from memcalib.io.records import read_jsonl
page = KeyPage(RoleBook({labels!r}, list(read_jsonl({items!r}, RoleItem)), "ann"))
print(page._keys.comm.comm_id)
page
"""


def test_in_a_real_kernel_a_key_labels_a_sentence(tmp_path):
    items = write_jsonl(tmp_path / "items.jsonl", ITEMS)
    labels = tmp_path / "roles.jsonl"
    code = KERNEL.format(items=str(items), labels=str(labels))
    head = press_in_a_kernel(code, "2", "page._head.value")
    assert (
        "Pair 1 of 2, sentence 2" in head
        and "1 labelled, 0 undecided, 3 left, 0 pairs done" in head
    )
    assert [(label.sentence, label.role) for label in read_role_labels(labels)] == [(1, "partial")]


def test_notes_are_kept_by_the_page_and_outlive_a_new_decision(tmp_path):
    page = KeyPage(RoleBook(tmp_path / "roles.jsonl", ITEMS, "ann"))
    page._note.value = "which tea?"
    assert (tmp_path / "roles.jsonl").read_text() == ""
    page._keys.value = "2"
    page._buttons["p"].click()
    assert page._note.value == "which tea?" and page._buttons["2"].button_style == "success"
    page._keys.value = "21"
    label = page.session.book.get(ITEMS[0].item, 1)
    assert (label.role, label.note, label.labeller) == (
        "key",
        "which tea?",
        "ann",
    ) and page._note.value == ""
    page.session.book.close()


def test_names_of_rubrics_keep_their_width_beside_the_style_of_a_notebook():
    """JupyterLab floats `dt` and `dd` and makes them a share of the width:
    rules of ours with a higher rank undo that.
    """
    page = role_html(ITEMS[0])
    for tag, inherited_weight in (("dt", " font-weight: inherit;"), ("dd", "")):
        assert re.search(
            rf"\.roles dl {tag} {{[^}}]*width: auto; float: none;{inherited_weight}", page
        )
    assert "max-content) 1fr" not in page


def test_nothing_on_the_page_runs(tmp_path):
    rubric = {EVIL: EVIL}
    item = an_item(
        EVIL,
        sentences=(EVIL, " more."),
        question=EVIL,
        atoms=[Target(atom_id=EVIL, text=EVIL, rubric=rubric)],
    )
    for page in (
        role_html(item, {1: "key"}),
        write_role_page([item], tmp_path / "page.html").read_text(),
    ):
        assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
        assert html.escape("<script>") in page
    assert "default-src 'none'" in page and "http:" not in page and "https:" not in page
    assert item_view(item)["sentences"][0]["role"] == ""


def test_the_page_shows_labels_and_both_questions(tmp_path):
    identity = {"item": ITEMS[0].item, "answer_hash": ITEMS[0].answer_hash}
    labels = [RoleLabel(**identity, sentence=2, role="partial"), RoleLabel(**identity, sentence=3)]
    page = write_role_page(ITEMS, tmp_path / "page.html", labels).read_text()
    assert "2 pairs, 4 sentences, 2 labelled." in page
    assert page.count('class="partial"') == 1 and page.count('class="undecided"') == 1
    assert (
        "Where do the target atoms show?" in page and "break what the target atoms demand?" in page
    )


def write_sheet(items, path, *labels):
    return RoleBook.write_sheet(path, items, *labels)


@pytest.mark.parametrize("write", [write_role_page, write_sheet])
def test_what_goes_out_holds_labels_of_one_person_for_these_sentences_alone(tmp_path, write):
    item = an_item(sentences=("One here.", " Another one."))
    path = tmp_path / "roles.out"
    identity = {"item": item.item, "answer_hash": item.answer_hash}
    ann, bob = (
        RoleLabel(**identity, sentence=1, role=role, labeller=labeller)
        for labeller, role in (("ann", "key"), ("bob", None))
    )
    others = [
        RoleLabel(item="9/9/C+", sentence=n, role="key", labeller="eve", answer_hash="x")
        for n in (1, 2)
    ]
    with pytest.raises(ValueError, match="found labels by 'ann', 'bob'"):
        write([item], path, [ann, bob, *others])
    stale = ann.model_copy(update={"answer_hash": "of another answer"})
    late = ann.model_copy(update={"sentence": 3})
    with pytest.raises(
        DataError, match="labels: item .*sentence 1: .*given for a different text"
    ) as caught:
        write([item], path, [stale, late])
    assert len(caught.value.violations) == 2 and not path.exists()
    texts = [
        write([item], path, [ann, bob, *others], person).read_text()
        for person in ("ann", "bob", "eve")
    ]
    if write is write_role_page:
        assert [re.search('"lead">(.*)</p>', text)[1] for text in texts] == [
            f"1 pair, 2 sentences, {labelled_count} labelled." for labelled_count in (1, 1, 0)
        ]
    else:
        assert [text.splitlines()[1].split(",")[2] for text in texts] == ["key", "?", ""]


def save(path, rows, names=RoleBook.columns):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@given(st.lists(roles | st.just("left"), min_size=4, max_size=4), st.booleans())
def test_a_sheet_brings_back_what_was_labelled(tmp_path_factory, given_roles, shuffled):
    folder = tmp_path_factory.mktemp("sheet")
    sentence_keys = [(ITEMS[0].item, 1), (ITEMS[0].item, 2), (ITEMS[0].item, 3), (ITEMS[1].item, 1)]
    chosen = {
        sentence_key: role
        for sentence_key, role in zip(sentence_keys, given_roles, strict=True)
        if role != "left"
    }
    hashes = {item.item: item.answer_hash for item in ITEMS}
    labels = [
        RoleLabel(item=i, sentence=n, role=role, note="=note", answer_hash=hashes[i])
        for (i, n), role in chosen.items()
    ]
    rows = sheet_rows(RoleBook.write_sheet(folder / "sheet.csv", ITEMS, labels))
    assert len(rows) == 4 and all(not row["text"].startswith("=") for row in rows)
    if shuffled:
        random.Random(1).shuffle(rows)
    labels_read = RoleBook.read_sheet(save(folder / "back.csv", rows), ITEMS, "ann")
    assert {(label.item, label.sentence): label.role for label in labels_read} == chosen
    assert {label.note for label in labels_read} <= {"=note"} and {
        label.labeller for label in labels_read
    } <= {"ann"}


@pytest.mark.parametrize("word", ["Key", "KEY ", "k", " partial", "p", "Irrelevant", "i", "?", "1"])
def test_words_for_roles(tmp_path, word):
    rows = sheet_rows(RoleBook.write_sheet(tmp_path / "sheet.csv", ITEMS))
    rows[0]["role"] = word
    path = save(tmp_path / "back.csv", rows)
    if word == "1":
        with pytest.raises(DataError, match="key, partial, irrelevant"):
            RoleBook.read_sheet(path, ITEMS)
    else:
        (label,) = RoleBook.read_sheet(path, ITEMS)
        assert (
            label.role
            == {"k": "key", "p": "partial", "i": "irrelevant", "?": None}[word.strip().lower()[0]]
        )


FAULTS = {
    "item": lambda rows: rows[0].update(item="9/9/C+"),
    "role": lambda rows: rows[0].update(role="great"),
    "sentence": lambda rows: rows[0].update(sentence="4"),
    "again": lambda rows: rows.append(dict(rows[1])),
    "note": lambda rows: rows[0].update(note="hm"),
    "text": lambda rows: rows[0].update(text=rows[1]["text"]),
    "number": lambda rows: rows[0].update(sentence="two"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_alone(tmp_path, name):
    rows = sheet_rows(RoleBook.write_sheet(tmp_path / "sheet.csv", ITEMS))
    FAULTS[name](rows)
    with pytest.raises(DataError) as error:
        RoleBook.read_sheet(save(tmp_path / "back.csv", rows), ITEMS)
    (fault,) = error.value.violations
    assert fault.rule == {"again": "sentence", "number": "sentence"}.get(name, name)
    assert fault.line == (6 if name == "again" else 2) and fault.file.endswith("back.csv")


def test_all_faults_are_listed_and_nothing_is_saved(tmp_path):
    rows = sheet_rows(RoleBook.write_sheet(tmp_path / "sheet.csv", ITEMS))
    rows[0]["role"] = "key"
    rows[1]["role"] = "great"
    rows[2]["sentence"] = "77"
    rows[3]["role"] = "??"
    path = save(tmp_path / "back.csv", rows)
    with pytest.raises(DataError) as error:
        RoleBook.import_sheet(path, ITEMS, tmp_path / "roles.jsonl")
    assert [fault.line for fault in error.value.violations] == [3, 4, 5]
    assert not (tmp_path / "roles.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header"),
        (b"item,role\n", "item, sentence, role"),
        (b"item,sentence,role,role\n", "each once"),
        ("item,sentence,role\n1/2/C+,1,ké".encode("latin-1"), "UTF-8"),
        (b"item,sentence,role\n1/2/C+,1,key,more\n", "as many as the header"),
    ],
)
def test_files_that_are_no_sheets(tmp_path, content, message):
    path = tmp_path / "sheet.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        RoleBook.read_sheet(path, ITEMS)


def test_a_sheet_is_imported_once(tmp_path):
    rows = sheet_rows(RoleBook.write_sheet(tmp_path / "sheet.csv", ITEMS))
    rows[0]["role"] = "key"
    rows[1]["role"] = "?"
    rows[1]["note"] = "which tea?"
    path = save(tmp_path / "back.csv", rows, ("item", "sentence", "role", "note"))
    assert RoleBook.import_sheet(path, ITEMS, tmp_path / "roles.jsonl", "ann") == 2
    assert RoleBook.import_sheet(path, ITEMS, tmp_path / "roles.jsonl", "ann") == 0
    labels = read_role_labels(tmp_path / "roles.jsonl")
    assert [(label.sentence, label.role, label.note) for label in labels] == [
        (1, "key", ""),
        (2, None, "which tea?"),
    ]


def test_a_sheet_with_odd_characters_is_imported_once_too(tmp_path):
    rows = sheet_rows(RoleBook.write_sheet(tmp_path / "sheet.csv", ITEMS))
    rows[0]["role"] = "key"
    rows[0]["note"] = "a\x1b[31m b\u202e"
    path = save(tmp_path / "back.csv", rows)
    assert [RoleBook.import_sheet(path, ITEMS, tmp_path / "roles.jsonl") for _ in range(2)] == [
        1,
        0,
    ]
    assert read_role_labels(tmp_path / "roles.jsonl")[0].note == r"a\x1b[31m b\u202e"


def test_true_roles_agree_with_the_world(run):
    examples, _, items = run
    by_id = {example.id: example for example in examples}
    for label in true_roles(items, examples):
        item = next(item for item in items if item.item == label.item)
        start = sum(map(len, item.sentences[: label.sentence - 1]))
        end = start + len(item.sentences[label.sentence - 1])
        truth = sentence_roles(by_id[item.example_id], "".join(item.sentences))
        roles = set()
        for sentence in truth:
            if max(sentence.start, start) < min(sentence.end, end):
                role_by_atom = sentence.violations if item.channel in UNDER else sentence.roles
                roles |= {role_by_atom[atom.atom_id] for atom in item.atoms}
        assert label.role == next((role for role in ROLES if role in roles), "irrelevant")


def test_key_credit_is_the_localization_precision_where_sentences_agree(run):
    examples, traces, items = run
    by_id = {example.id: example for example in examples}
    pairs = audited_pairs(items, true_roles(items, examples), traces)
    checked = 0
    for item, pair in zip(items, pairs, strict=True):
        if item.channel in UNDER:  # where Key is a violation
            continue
        answer_row = traces[(traces["row"] == item.row) & traces["channel"].isna()].iloc[0]
        truth = sentence_roles(by_id[item.example_id], answer_row["response"])
        if [s.text for s in truth] != [text.strip() for text in item.sentences]:
            continue
        q = (
            traces[(traces["row"] == item.row) & (traces["channel"] == item.channel)]
            .iloc[0]["q"]
            .astype(float)
        )
        spans = list(zip([0, *answer_row["ends"][:-1]], answer_row["ends"], strict=True))
        carries = tokens_with_role(spans, truth, [atom.atom_id for atom in item.atoms]).numpy()
        key = sum(c for c, role in zip(pair.credit, pair.roles, strict=True) if role == "key")
        assert key == pytest.approx(q[carries].sum() / q.sum())
        checked += 1
    assert checked > 5


def slow_audit(files, drawn, roles_of, rng):
    """The audit again: rows of the Parquet files as dictionaries, plain loops,
    one bootstrap draw at a time.
    """
    audited_pairs_found = []
    for file in files:
        rows = pq.read_table(file).to_pylist()
        for pair in (row for row in rows if (row["step"], row["row"], row["channel"]) in drawn):
            (answer_row,) = [
                row for row in rows if row["row"] == pair["row"] and row["channel"] is None
            ]
            sentences = roles_of[pair["step"], pair["row"], pair["channel"]]
            sentence_number = 0
            credit = [0.0] * len(sentences)
            size = [0] * len(sentences)
            text = ""
            for weight, start, end in zip(
                pair["q"], [0, *answer_row["ends"]], answer_row["ends"], strict=False
            ):
                credit[sentence_number] += weight
                size[sentence_number] += 1
                text += answer_row["response"][start:end]
                if text == sentences[sentence_number][0] and sentence_number + 1 < len(sentences):
                    sentence_number = sentence_number + 1
                    text = ""
            share = {role: 0.0 for role in ROLES}
            tokens = {role: 0 for role in ROLES}
            for (_, role), sentence_weight, count in zip(sentences, credit, size, strict=True):
                share[role] += sentence_weight / sum(pair["q"])
                tokens[role] += count / len(answer_row["ends"])
            best = sorted(range(len(credit)), key=lambda k: -credit[k])[:3]
            hit = any(sentences[k][1] != "irrelevant" for k in best if credit[k] > 0)
            question = answer_row["example_id"]
            audited_pairs_found.append((pair["channel"], share, tokens, hit, question))
    questions = sorted({question for *_, question in audited_pairs_found})
    means = []
    for _ in range(4000):
        drawn_questions = [rng.choice(questions) for _ in questions]
        again = [
            audited
            for name in drawn_questions
            for audited in audited_pairs_found
            if audited[-1] == name
        ]
        means.append(mean_of_channel_means(again, lambda audited: audited[1]["key"]))
    return audited_pairs_found, sorted(means)


def mean_of_channel_means(audited_rows, value):
    """The mean over channels of each channel's mean; the channel stands first in a row."""
    values_of = {}
    for row in audited_rows:
        values_of.setdefault(row[0], []).append(value(row))
    return sum(sum(values) / len(values) for values in values_of.values()) / len(values_of)


def test_the_whole_audit_equals_a_slow_one_from_the_files(tmp_path):
    """Two steps, 20 pairs of each channel where there are as many,
    the world's own labels through a file and a book.
    """
    model, tokenizer = load_policy("cold-short")
    examples = make_examples("short", 12, 3, "test")
    for step in (1, 2):
        batch = sample_credit(
            model, tokenizer, examples, exact_judge, world_config(WORLDS["short"]), seed=step
        )
        TraceWriter(tmp_path / "traces").write(step, *batch, tokenizer)
    traces = read_traces(tmp_path)
    drawn = draw_pairs(traces, per_channel=20, seed=1)
    assert drawn["channel"].value_counts().max() == 20 and len(drawn) > 60
    items = role_items(drawn, traces, examples)
    with RoleBook(tmp_path / "roles.jsonl", items, "micro-world") as book:
        assert book.add(true_roles(items, examples)) == sum(len(item.sentences) for item in items)
        assert book.counts()["pairs done"] == len(items)
    labels = read_role_labels(tmp_path / "roles.jsonl")
    pairs = audited_pairs(items, labels, traces)
    shares = shares_table(pairs).set_index(["slice", "role"])
    hits = hits_table(pairs).set_index("slice")

    given_roles = latest_roles(labels)
    item_of_pair = {(item.step, item.row, item.channel): item for item in items}
    roles_of = {
        p: list(zip(i.sentences, given_roles[i.item].values(), strict=True))
        for p, i in item_of_pair.items()
    }
    files = sorted((tmp_path / "traces").glob("*.parquet"))
    slow_pairs, means = slow_audit(files, set(item_of_pair), roles_of, random.Random(0))
    assert len(slow_pairs) == len(items)
    for name in ("all", *drawn["channel"].unique()):
        slice_pairs = [pair for pair in slow_pairs if name in ("all", pair[0])]
        for role in ROLES:
            row = shares.loc[(name, role)]
            credit_share = mean_of_channel_means(
                slice_pairs, lambda audited, role=role: audited[1][role]
            )
            token_share = mean_of_channel_means(
                slice_pairs, lambda audited, role=role: audited[2][role]
            )
            assert row["credit_share"] == pytest.approx(credit_share, abs=1e-6)
            assert row["token_share"] == pytest.approx(token_share, abs=1e-9)
        rate = mean_of_channel_means(slice_pairs, lambda audited: audited[3])
        assert hits.loc[name, "rate"] == pytest.approx(rate)
        assert hits.loc[name, "pairs"] == len(slice_pairs)
    row = shares.loc[("all", "key")]
    width = means[-1] - means[0]
    assert row["credit_share_low"] == pytest.approx(means[100], abs=0.05 * width)
    assert row["credit_share_high"] == pytest.approx(means[-101], abs=0.05 * width)


def test_unlabelled_pairs_stay_as_incomplete(run):
    _, traces, items = run
    label = RoleLabel(item=items[0].item, sentence=1, role="key", answer_hash=items[0].answer_hash)
    pairs = audited_pairs(items[:2], [label], traces)
    assert pairs[0].roles[0] == "key" and not pairs[0].complete and set(pairs[1].roles) == {None}
    pair_row = traces[
        (traces["row"] == items[0].row) & (traces["channel"] == items[0].channel)
    ].iloc[0]
    assert np.allclose(pairs[0].credit, sentence_credit(pair_row["q"], items[0].units)[1])


def test_labels_of_several_people_are_not_mixed(run):
    _, traces, items = run
    identity = {"item": items[0].item, "sentence": 1, "answer_hash": items[0].answer_hash}
    labels = [
        RoleLabel(**identity, role="key", labeller="ann"),
        RoleLabel(**identity, role="partial", labeller="bob"),
    ]
    with pytest.raises(ValueError, match="'ann', 'bob'"):
        audited_pairs(items[:1], labels, traces)
    assert audited_pairs(items[:1], labels, traces, "bob")[0].roles[0] == "partial"


def test_stale_labels_and_pairs_that_the_traces_lack_are_all_listed(run):
    _, traces, items = run
    stale = RoleLabel(item=items[0].item, sentence=1, role="key", answer_hash="other")
    moved = items[1].model_copy(update={"row": 999})
    longer = items[2].model_copy(update={"tokens": items[2].tokens + 1})
    with pytest.raises(DataError) as error:
        audited_pairs([items[0], moved, longer], [stale], traces)
    values_found = [fault.found for fault in error.value.violations]
    assert (
        values_found[:2] == ["given for a different text", "no such pair"]
        and values_found[2] == f"{items[2].tokens} tokens"
    )
