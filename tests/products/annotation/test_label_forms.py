"""The page and the spreadsheet: one key one decision, nothing lost, nothing run,
nothing in the wrong row.
"""

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_labels import ITEMS

from memcalib.products.annotation.labels import Label, LabelBook, read_labels
from memcalib.products.shared.questionnaire import KeyPage
from memcalib.problem import Level
from memcalib.io.records import DataError, write_jsonl
from memcalib.io.decisions import cell_text, sheet_cell

KEYS = LabelBook.keys()

# ---- page


def key(page, text):
    """What a browser sends when more is typed: all that stands in the field now."""
    page._keys.set_state({"value": page._keys.value + text})


def test_single_keys_label_and_move_on(tmp_path):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    for k, (text, level) in enumerate(KEYS.items()):
        assert page.session.index == k
        key(page, text.upper())
        assert page.session.book.get(ITEMS[k].item).level == level
    assert (
        page._keys.value == "".join(KEYS).upper()
    )  # the kernel never touches what somebody is typing
    assert len((tmp_path / "l.jsonl").read_text().splitlines()) == len(KEYS)


@pytest.mark.parametrize("text", ["x", "é", "<", "4", " ", "\n"])
def test_anything_but_one_known_key_saves_nothing(tmp_path, text):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    key(page, text)
    assert (tmp_path / "l.jsonl").read_text() == "" and page.session.index == 0
    assert "Nothing was saved" in page._status.value and "<" not in page._status.value


def test_a_new_page_goes_on_where_the_file_stops(tmp_path):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    for text in "123":
        key(page, text)
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    assert page.session.index == 3 and "3 labelled, 0 undecided, 17 left" in page._head.value
    key(page, "p")
    assert (
        page.session.index == 2
        and page._buttons["3"].button_style == "success"
        and page._buttons["1"].button_style == ""
    )
    key(page, "1")
    assert page.session.book.get(ITEMS[2].item).level == Level.IGNORE and page.session.index == 3


def test_moving_stays_inside_and_finds_gaps(tmp_path):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS[:3]))
    for text, position in (
        ("p", 0),
        ("n", 1),
        ("n", 2),
        ("n", 2),
        ("2", 0),
        ("1", 1),
        ("n", 2),
        ("u", 1),
        ("3", 1),
    ):
        key(page, text)
        assert page.session.index == position, text
    assert "All items are labelled" in page._status.value


def test_buttons_do_what_keys_do(tmp_path):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    for text in ("2", "0", "p"):
        page._buttons[text].click()
    assert page.session.index == 1 and [page.session.book.get(i.item).level for i in ITEMS[:2]] == [
        Level.BOUND,
        None,
    ]


def test_notes_are_saved_with_the_decision_or_after_it(tmp_path):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    page._note.set_state({"value": "early"})
    assert (tmp_path / "l.jsonl").read_text() == ""
    key(page, "n")
    assert page._note.value == ""
    key(page, "p")
    assert page._note.value == "early"
    key(page, "2")
    key(page, "p")
    page._note.set_state({"value": "late"})
    label = read_labels(tmp_path / "l.jsonl")[0]
    assert (label.level, label.note) == (
        Level.BOUND,
        "late",
    ) and page._status.value == "Note saved."


def test_a_full_disk_is_told_and_nothing_moves(tmp_path, monkeypatch):
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", ITEMS))
    key(page, "1")

    def full(row):
        raise OSError(28, "labels.jsonl: No space left <on> device")

    with monkeypatch.context() as patch:
        patch.setattr(page.session.book._journal, "append", full)
        page._note.set_state({"value": "kept"})
        key(page, "2")
        assert page.session.index == 1 and page.session.book.get(ITEMS[1].item) is None
        assert (
            "NOT saved" in page._status.value
            and "&lt;on&gt;" in page._status.value
            and page._note.value == "kept"
        )
    key(page, "2")
    assert page.session.book.get(ITEMS[1].item).note == "kept" and page.session.index == 2
    with monkeypatch.context() as patch:
        patch.setattr(page.session.book._journal, "append", full)
        key(page, "p")
        page._note.set_state({"value": "edited"})
        assert page._note.value == "edited" and "NOT saved" in page._status.value
    key(page, "2")
    assert page.session.book.get(ITEMS[1].item).note == "edited"


def test_the_page_shows_the_card_and_no_decision_of_a_judge(tmp_path):
    evil = [ITEMS[0].model_copy(update={"response": "<script>alert(1)</script>"})]
    page = KeyPage(LabelBook(tmp_path / "l.jsonl", evil))
    text = "".join(w.value for w in (page._head, page._body, page._status))
    assert (
        "<script" not in text
        and "&lt;script" in text
        and evil[0].judge not in re.sub(r"<[^>]*>", "", page._head.value)
    )
    assert "application/vnd.jupyter.widget-view+json" in page._repr_mimebundle_()


KERNEL = """
from memcalib.products.annotation.labels import LabelBook, LabelItem
from memcalib.products.shared.questionnaire import KeyPage
from memcalib.io.records import read_jsonl
page = KeyPage(LabelBook({labels!r}, list(read_jsonl({items!r}, LabelItem))))
print(page._keys.comm.comm_id)
page
"""


def press_in_a_kernel(code, key, ask):
    """What `ask` shows in a real kernel that ran `code`, after a key was sent to the field whose id
    `code` prints.
    """
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        printed = []
        shown = []

        def collect(message):
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])
            elif message["msg_type"] in ("display_data", "execute_result"):
                shown.append(message["content"]["data"])

        reply = client.execute_interactive(code, timeout=60, output_hook=collect)
        assert (
            reply["content"]["status"] == "ok"
            and "application/vnd.jupyter.widget-view+json" in shown[0]
        )
        update = {"method": "update", "state": {"value": key}, "buffer_paths": []}
        content = {"comm_id": "".join(printed).strip(), "data": update}
        client.shell_channel.send(client.session.msg("comm_msg", content))
        client.execute_interactive(ask, timeout=60, output_hook=collect)
        return shown[-1]["text/plain"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_in_a_real_kernel_a_key_from_the_browser_reaches_the_disk(tmp_path):
    items = write_jsonl(tmp_path / "items.jsonl", ITEMS)
    labels = tmp_path / "labels.jsonl"
    code = KERNEL.format(items=str(items), labels=str(labels))
    counts = press_in_a_kernel(code, "3", "page.session.book.counts()")
    assert counts == "{'labelled': 1, 'undecided': 0, 'left': 19}"
    assert read_labels(labels)[0].level == Level.CONTROL


# ---- sheet


@given(st.text(st.characters(codec="utf-8"), max_size=30) | st.text("'=+-@ \t\n\r＝0a", max_size=8))
def test_cells_come_back_and_never_start_a_formula(text):
    cell = sheet_cell(text)
    assert cell_text(cell) == text
    assert not re.match(r"[=+\-@\t\r\n\0＝＋－＠]", cell) and not re.match(r"[=+\-@]", cell.strip())


notes = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp", "Cs"])
    | st.sampled_from("\n\t'=+,;\""),
    max_size=15,
)


@given(
    st.lists(st.tuples(st.sampled_from([*Level, None, "none"]), notes), min_size=20, max_size=20)
)
def test_sheets_round_trip(tmp_path_factory, decisions):
    folder = tmp_path_factory.mktemp("sheet")
    pairs = [
        (item, level, note)
        for item, (level, note) in zip(ITEMS, decisions, strict=True)
        if level != "none"
    ]
    labels = [
        Label(item=item.item, level=level, note=note, answer_hash=item.answer_hash)
        for item, level, note in pairs
    ]
    back = LabelBook.read_sheet(LabelBook.write_sheet(folder / "s.csv", ITEMS, labels), ITEMS)
    assert [(b.item, b.level, b.note, b.answer_hash) for b in back] == [
        (a.item, a.level, a.note, a.answer_hash) for a in labels
    ]
    assert LabelBook.import_sheet(folder / "s.csv", ITEMS, folder / "l.jsonl") == len(labels)
    assert LabelBook.import_sheet(folder / "s.csv", ITEMS, folder / "l.jsonl") == 0


def test_labels_of_another_answer_do_not_come_back_through_a_sheet(tmp_path):
    LabelBook(tmp_path / "l.jsonl", ITEMS, "ann").put(ITEMS[0].item, Level.CONTROL)
    changed = [ITEMS[0].model_copy(update={"response": "new"}), *ITEMS[1:]]
    labels = read_labels(tmp_path / "l.jsonl")
    with pytest.raises(
        DataError, match=f"labels: item '{ITEMS[0].item}': label: found given for a different text"
    ):
        LabelBook.write_sheet(tmp_path / "s.csv", changed, labels)
    assert not (tmp_path / "s.csv").exists()
    LabelBook.write_sheet(
        tmp_path / "s.csv", changed[1:], labels
    )  # a label of an item that is not in the sheet is no fault
    assert LabelBook.read_sheet(tmp_path / "s.csv", changed[1:]) == []


def test_a_sheet_is_of_one_person(tmp_path):
    levels = {"ann": Level.CONTROL, "bob": Level.IGNORE}
    for person, level in levels.items():
        LabelBook(tmp_path / "l.jsonl", ITEMS, person).put(ITEMS[0].item, level)
    labels = read_labels(tmp_path / "l.jsonl")
    with pytest.raises(ValueError, match="found labels by 'ann', 'bob'"):
        LabelBook.write_sheet(tmp_path / "s.csv", ITEMS, labels)
    for person, level in levels.items():
        (label,) = LabelBook.read_sheet(
            LabelBook.write_sheet(tmp_path / "s.csv", ITEMS, labels, person), ITEMS, person
        )
        assert (label.level, label.labeller) == (level, person)
    LabelBook.write_sheet(tmp_path / "s.csv", ITEMS[1:], labels)  # nobody labelled these


def table(tmp_path):
    text = LabelBook.write_sheet(tmp_path / "s.csv", ITEMS).read_text(encoding="utf-8-sig")
    return list(csv.reader(io.StringIO(text, newline="")))


def save(path, rows, delimiter=",", encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def test_sheet_has_the_texts_and_not_the_source(tmp_path):
    rows = table(tmp_path)
    assert tuple(rows[0]) == LabelBook.columns and [row[0] for row in rows[1:]] == [
        i.item for i in ITEMS
    ]
    assert all(row[1] == row[2] == "" for row in rows[1:])
    text = (tmp_path / "s.csv").read_text(encoding="utf-8-sig")
    assert not any(
        word in text for word in (ITEMS[0].example_id, "stratified", ITEMS[0].atom_id + '"')
    )
    assert (tmp_path / "s.csv").read_bytes().startswith(b"\xef\xbb\xbf")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_reading_takes_other_delimiters_orders_columns_and_words(tmp_path, delimiter):
    rows = table(tmp_path)
    for row, level in zip(rows[1:], ("a", "Bound", " CONTROL ", "?"), strict=False):
        row[1] = level
    rows = [[*row[::-1], "mine"] for row in [rows[0], *rows[:0:-1]]]
    rows[0][-1] = "extra"
    rows.insert(3, [" "] * 9)
    labels = LabelBook.read_sheet(save(tmp_path / "t.csv", rows, delimiter), ITEMS, "me")
    assert {f.item: f.level for f in labels} == dict(
        zip([i.item for i in ITEMS], [*Level, None], strict=False)
    )
    assert {f.labeller for f in labels} == {"me"}


def test_a_missing_row_or_cell_is_not_labelled(tmp_path):
    rows = table(tmp_path)[:4]
    rows[1][1] = "C"
    labels = LabelBook.read_sheet(save(tmp_path / "t.csv", rows), ITEMS)
    assert [(f.item, f.level) for f in labels] == [(ITEMS[0].item, Level.CONTROL)]
    assert LabelBook.import_sheet(tmp_path / "t.csv", ITEMS, tmp_path / "l.jsonl") == 1
    assert LabelBook(tmp_path / "l.jsonl", ITEMS).counts() == {
        "labelled": 1,
        "undecided": 0,
        "left": 19,
    }


FAULTS = {
    "level": (
        lambda rows: rows[1].__setitem__(1, "D"),
        r"t.csv:2: item 'item-.*': level: found 'D'; allowed: A, B, C",
    ),
    "number": (lambda rows: rows[1].__setitem__(1, "1"), "level: found '1'"),
    "unknown": (
        lambda rows: rows[2].__setitem__(0, "item-0"),
        "t.csv:3: .*found 'item-0'; allowed: one of the .* items of this sample",
    ),
    "twice": (lambda rows: rows.append(list(rows[3])), "t.csv:22: .*a second time, after row 4"),
    "note": (lambda rows: rows[1].__setitem__(2, "hm"), "note: found a note without a level"),
    "moved": (
        lambda rows: rows[1].__setitem__(3, "Another atom."),
        "atom: found 'Another atom.'; allowed: .*mixed up",
    ),
    "query": (lambda rows: rows[1].__setitem__(5, "Another?"), "query: found 'Another"),
    "made again": (
        lambda rows: rows[1].__setitem__(6, "An older answer."),
        "answer: found 'An older answer",
    ),
    "cells": (lambda rows: rows[1].append("more"), "cells: found 9; allowed: 8"),
    "header": (lambda rows: rows[0].__setitem__(1, "label"), "t.csv:1: header: found item, label"),
    "header twice": (lambda rows: rows[0].__setitem__(2, "level"), "t.csv:1: header"),
    "no item": (lambda rows: rows[1].__setitem__(0, ""), "found ''; allowed: one of the"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_reading_refuses_and_saves_nothing(tmp_path, name):
    rows = table(tmp_path)
    for row in rows[4:]:
        row[1] = "A"
    break_it, message = FAULTS[name]
    break_it(rows)
    with pytest.raises(DataError, match=message):
        LabelBook.import_sheet(save(tmp_path / "t.csv", rows), ITEMS, tmp_path / "l.jsonl")
    assert not (tmp_path / "l.jsonl").exists()


def test_all_faults_are_listed_together(tmp_path):
    rows = table(tmp_path)
    for row in rows[1:6]:
        row[1] = "X"
    with pytest.raises(DataError) as caught:
        LabelBook.read_sheet(save(tmp_path / "t.csv", rows), ITEMS)
    assert [v.line for v in caught.value.violations] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "t.csv:1: header: found nothing"),
        (
            "item,level\nit\xe9m,A\n".encode("latin-1"),
            "encoding: found byte 0xe9 at place 13; allowed: UTF-8",
        ),
        ("item\tlevel\n".encode("utf-16"), "encoding"),
        (b'item,level\n"' + b"x" * 200_000 + b'",A\n', "csv: found field larger than"),
        (b"\x00\x01\x02", "header"),
    ],
)
def test_files_that_are_no_sheet(tmp_path, content, message):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        LabelBook.read_sheet(tmp_path / "t.csv", ITEMS)
    with pytest.raises(FileNotFoundError):
        LabelBook.read_sheet(tmp_path / "none.csv", ITEMS)


def test_an_empty_cell_withdraws_nothing_and_a_question_mark_does(tmp_path):
    book = LabelBook(tmp_path / "l.jsonl", ITEMS)
    for item in ITEMS[:2]:
        book.put(item.item, Level.BOUND)
    rows = table(tmp_path)
    rows[2][1] = "?"
    assert LabelBook.import_sheet(save(tmp_path / "t.csv", rows), ITEMS, tmp_path / "l.jsonl") == 1
    assert [label.level for label in read_labels(tmp_path / "l.jsonl")] == [Level.BOUND, None]
    rows[1][1:3] = ["B", "why"]
    assert LabelBook.import_sheet(save(tmp_path / "t.csv", rows), ITEMS, tmp_path / "l.jsonl") == 1
    assert read_labels(tmp_path / "l.jsonl")[0].note == "why"


def test_hostile_and_huge_texts_travel_as_plain_cells(tmp_path):
    atom = '=HYPERLINK("http://x","y")'
    items = [
        ITEMS[0].model_copy(
            update={
                "atom": atom,
                "question": "'=1",
                "response": "＝" * 100_000,
                "rubric": {"=k": "@v"},
            }
        )
    ]
    text = LabelBook.write_sheet(tmp_path / "s.csv", items).read_text(encoding="utf-8-sig")
    row = list(csv.reader(io.StringIO(text, newline="")))[1]
    assert all(not re.match(r"\s*[=+\-@＝]", cell) and len(cell) < 32_767 for cell in row)
    cells = dict(zip(LabelBook.columns, row, strict=True))
    assert cells["atom"] == "'" + atom and "more characters are not shown" in cells["answer"]
    cells["level"] = "B"
    cells["atom"] = atom  # a spreadsheet may drop the apostrophe
    back = LabelBook.read_sheet(
        save(tmp_path / "t.csv", [list(cells), list(cells.values())]), items
    )
    assert back[0].level == Level.BOUND


def test_two_thousand_rows_come_back(tmp_path):
    items = [
        ITEMS[0].model_copy(update={"item": f"item-{k}", "response": "x " * 500})
        for k in range(2000)
    ]
    labels = [
        Label(item=i.item, level=k % 3, answer_hash=i.answer_hash) for k, i in enumerate(items)
    ]
    back = LabelBook.read_sheet(LabelBook.write_sheet(tmp_path / "s.csv", items, labels), items)
    assert [(label.item, label.level) for label in back] == [
        (label.item, label.level) for label in labels
    ]
