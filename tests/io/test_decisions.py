"""Books of decisions, the walk through them and sheets,
against dictionaries and the obvious code.
"""

import asyncio
import csv
from itertools import chain, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from memcalib.io.decisions import latest, of_one_person
from memcalib.products.shared.questionnaire import (
    KeyPage,
    KeySession,
    Questionnaire,
    Walk,
    typed,
)
from memcalib.io.records import DataError, Record, Violation
from memcalib.io.decisions import (
    cell_faults,
    cell_text,
    read_cell,
    read_sheet_rows,
    sheet_cell,
    copied_text_faults,
    write_csv,
)


class Claim(Record):
    item: str
    text: str = ""


class Decision(Record):
    item: str
    sentence: int = 1
    value: int | None = None
    note: str = ""
    labeller: str = ""
    text: str = ""
    saved: int = Field(0)

    @property
    def key(self):
        return self.item, self.sentence, self.labeller, self.saved


class ClaimBook(Questionnaire[Claim, Decision]):
    kind = Decision
    says = "value"
    choices = (("1", 1, "one"), ("2", 2, "two"), ("0", None, "cannot tell"))

    def card(self, *item_place):
        return ""

    def places(self):
        return list(product(self.items, (1, 2)))

    def faults(self, rows):
        faults = []
        for row in rows:
            text_now = self.items[row.item].text
            if row.text != text_now:
                faults.append(Violation("text", row.text, text_now, row.item, file=str(self.path)))
        return faults

    def row(self, item, sentence, value, note=""):
        text = self.items[item].text
        return Decision(
            item=item, sentence=sentence, value=value, note=note, labeller=self.person, text=text
        )

    def put(self, item, sentence, value, note=""):
        return self.keep(self.row(item, sentence, value, note))


class YesNoBook(ClaimBook):
    unit = "claim"
    choices = (("y", 1, "yes"), ("x", 2, "no"))


CLAIMS = [Claim(item=name, text=name.upper()) for name in "abc"]
PLACES = list(product("abc", (1, 2)))
PEOPLE = ("", "ann", "bob")
people = st.sampled_from(PEOPLE)
values = st.sampled_from([None, 1, 2])


@given(
    st.lists(
        st.tuples(people, st.integers(0, 5), values, st.text(max_size=5), st.booleans()),
        max_size=15,
    )
)
def test_a_book_is_a_dictionary_for_each_person(tmp_path_factory, actions):
    path = tmp_path_factory.mktemp("book") / "rows.jsonl"
    expected = {person: {} for person in PEOPLE}
    for person, k, value, note, torn in actions:
        with ClaimBook(path, CLAIMS, person) as book:
            book.put(*PLACES[k], value, note.encode("utf-8", "replace").decode())
        expected[person][PLACES[k]] = value
        if torn:
            path.write_bytes(path.read_bytes() + b'{"item": "a", "part')
    for person in PEOPLE:
        values_of_person = expected[person]
        undecided = list(values_of_person.values()).count(None)
        with ClaimBook(path, CLAIMS, person) as book:
            decided = {
                item_place: book.get(*item_place).value
                for item_place in PLACES
                if book.get(*item_place)
            }
            assert decided == values_of_person
            assert book.counts() == {
                "labelled": len(values_of_person) - undecided,
                "undecided": undecided,
                "left": 6 - len(values_of_person),
            }
    rows = [Decision.model_validate_json(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(actions)
    last_values = {person: {} for person in PEOPLE}
    for row in latest(rows):
        last_values[row.labeller][row.item, row.sentence] = row.value
    assert last_values == expected
    assert len(latest(rows)) == sum(map(len, expected.values()))


@given(st.lists(st.tuples(st.integers(0, 5), values, st.sampled_from(["", "why"])), max_size=10))
def test_added_rows_are_written_when_they_say_something_new(tmp_path_factory, decisions):
    path = tmp_path_factory.mktemp("book") / "rows.jsonl"
    latest_decision = {}
    expected = 0
    added = 0
    with ClaimBook(path, CLAIMS) as book:
        for k, value, note in decisions:
            if latest_decision.get(k) != (value, note):
                expected += 1
            latest_decision[k] = value, note
            added += book.add([book.row(*PLACES[k], value, note)])
        assert added == expected == len(path.read_text().splitlines())
        same_rows = [book.row(*PLACES[k], *decision) for k, decision in latest_decision.items()]
        assert book.add(same_rows) == 0


def test_times_never_stand_still(tmp_path, monkeypatch):
    monkeypatch.setattr("memcalib.io.decisions.time.time_ns", lambda: 7)
    with ClaimBook(tmp_path / "rows.jsonl", CLAIMS) as book:
        assert [book.put("a", 1, k).saved for k in (1, 2, 1)] == [7, 8, 9]
    with ClaimBook(tmp_path / "rows.jsonl", CLAIMS) as book:
        assert book.put("a", 1, None).saved == 10


def test_a_stale_row_closes_the_book_again_and_other_peoples_do_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ClaimBook(path, CLAIMS, "ann") as book:
        book.put("a", 1, 1)
        book.put("b", 1, 1)
    changed = [Claim(item="a", text="other"), *CLAIMS[1:]]
    with pytest.raises(DataError, match="rows.jsonl: a: text: found A; allowed: other"):
        ClaimBook(path, changed, "ann")
    ClaimBook(path, changed, "bob").close()
    ClaimBook(path, CLAIMS[1:], "ann").close()


@pytest.mark.parametrize("items", [[], [CLAIMS[0], CLAIMS[0]]])
def test_items_come_once(tmp_path, items):
    with pytest.raises(ValueError, match=f"found {len(items)} items"):
        ClaimBook(tmp_path / "rows.jsonl", items)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"item": "a"}\n{"part": "x"}\n{"item": "b"}\n')
    with pytest.raises(DataError, match="rows.jsonl:2"):
        ClaimBook(path, CLAIMS)


@given(st.lists(st.tuples(people, st.integers(0, 3)), max_size=8), st.none() | people)
def test_one_person_or_none(pairs, person):
    rows = [Decision(item=str(k), labeller=name, saved=n) for n, (name, k) in enumerate(pairs)]
    several = len({name for name, _ in pairs}) > 1
    if person is None and several:
        with pytest.raises(ValueError, match="one person"):
            of_one_person(rows)
    else:
        expected = [row for row in rows if person is None or row.labeller == person]
        assert of_one_person(rows, person) == expected


@given(st.sets(st.integers(0, 5)), st.lists(st.integers(-7, 7), max_size=6))
def test_a_walk_stays_inside_and_finds_the_next_open_place(tmp_path_factory, decided, steps):
    with ClaimBook(tmp_path_factory.mktemp("walk") / "rows.jsonl", CLAIMS) as book:
        for k in decided:
            book.put(*PLACES[k], 1)
        walk = Walk(book)
        undecided = [k for k in range(6) if k not in decided]
        assert walk.index == (undecided[0] if undecided else 0)
        for step in steps:
            before = walk.index
            walk.move(step)
            if step:
                expected = min(max(before + step, 0), 5)
            else:
                ahead = [k for k in undecided if k >= before]
                expected = (ahead or undecided or [before])[0]
            assert walk.index == expected
            assert walk.place == PLACES[walk.index] and walk.item.item == walk.place[0]
            assert (walk.label is None) == (walk.index in undecided)


@given(st.lists(st.sampled_from([*"120npu", "12", "x", "", " 1", "note"]), max_size=20))
@example(["1"] * 6 + ["p", "u"])
def test_keys_and_notes_do_what_they_say(tmp_path_factory, actions):
    """Against a model with two dictionaries: what was decided and what waits as a draft."""
    path = tmp_path_factory.mktemp("keys") / "rows.jsonl"
    session = KeySession(ClaimBook(path, CLAIMS))
    value_of_key = {"1": 1, "2": 2, "0": None}
    decided = {}
    drafts = {}
    index = 0

    def next_undecided(start):
        for k in range(start, start + 6):
            if k % 6 not in decided:
                return k % 6
        return start

    for number, action in enumerate(actions):
        key = action.strip()
        saved = f"Saved: Item {index + 1} of 6: "
        if action == "note":
            session.write(f"note {number}")
            if index in decided:
                decided[index] = decided[index][0], f"note {number}"
            else:
                drafts[index] = f"note {number}"
        else:
            session.press(action)
            if key in value_of_key:
                _, earlier_note = decided.get(index, (None, ""))
                decided[index] = value_of_key[key], drafts.pop(index, earlier_note)
                index = next_undecided(index)
                assert session.status.startswith(saved)
                assert ("All items" in session.status) == (len(decided) == 6)
            elif key == "n":
                index = min(index + 1, 5)
            elif key == "p":
                index = max(index - 1, 0)
            elif key == "u":
                index = next_undecided(0) if len(decided) < 6 else index
            else:
                assert session.status.startswith("Nothing was saved")
        assert session.index == index
        _, saved_note = decided.get(index, (None, ""))
        assert session.note == drafts.get(index, saved_note)
    session.book.close()
    with ClaimBook(path, CLAIMS) as book:
        rows = {
            k: book.get(*item_place) for k, item_place in enumerate(PLACES) if book.get(*item_place)
        }
        assert {k: (row.value, row.note) for k, row in rows.items()} == decided


@given(st.text("120npux", max_size=12), st.data())
def test_quick_keys_are_those_of_slow_ones(tmp_path_factory, keys, data):
    """However many keys the browser sends together, each counts once, in its order."""
    folder = tmp_path_factory.mktemp("quick")
    outcomes = []
    for name in ("slow", "quick"):
        book = ClaimBook(folder / name, CLAIMS)
        page = KeyPage(book)
        sent = 0
        while sent < len(keys):
            sent += 1 if name == "slow" else data.draw(st.integers(1, 6))
            page._keys.set_state({"value": keys[:sent]})
        assert page._keys.value == keys
        book.close()
        rows = [book.get(*item_place) for item_place in PLACES]
        decisions = [row and row.value for row in rows]
        outcomes.append((decisions, page.session.index))
    assert outcomes[0] == outcomes[1]


@given(
    st.lists(
        st.tuples(st.text("120npux", min_size=1, max_size=4), st.sampled_from(["", *"12n"])),
        max_size=6,
    )
)
def test_keys_count_once_when_the_field_is_emptied_between_them(tmp_path_factory, bursts):
    """Keys come in bursts; after each the field is emptied,
    and a key may be typed before the browser hears of that.
    """
    with ClaimBook(tmp_path_factory.mktemp("rests") / "said", CLAIMS) as book:
        page = KeyPage(book)
        pressed = []
        page.session.press = pressed.append
        for keys, late in bursts:
            for key in keys:
                page._keys.set_state({"value": page._keys.value + key})
            value_before = page._keys.value
            page.empty()
            if late:
                page._keys.set_state({"value": value_before + late})
        assert "".join(pressed) == "".join(keys + late for keys, late in bursts)


def test_the_same_key_in_place_of_all_that_was_selected_counts(tmp_path, monkeypatch):
    """A kernel empties the field when the hand rests, so that what a browser sends differs from
    what stood there.
    """

    async def label(page, rounds=3):
        monkeypatch.setattr("memcalib.products.shared.questionnaire.QUIET", 0)
        for _ in range(rounds):
            page._keys.set_state({"value": "1"})
            while page._keys.value:
                await asyncio.sleep(0)

    with ClaimBook(tmp_path / "said", CLAIMS) as book:
        asyncio.run(label(KeyPage(book)))
        assert book.counts()["labelled"] == 3


@given(st.text("12", max_size=6), st.text("12", max_size=6), st.text("12", max_size=3))
def test_keys_are_what_was_put_into_a_field(before, after, keys):
    assert typed(before, before + keys) == keys
    assert sorted(typed(before + after, before + keys + after)) == sorted(keys)
    assert typed(before + after, before) == "" == typed(before + keys + after, before + keys)
    assert typed(before, "x") == "x"


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12)


@given(st.lists(st.tuples(texts, texts), max_size=6), st.sampled_from(",;\t"), st.booleans())
def test_sheets_bring_back_every_text(tmp_path_factory, pairs, delimiter, saved_again):
    folder = tmp_path_factory.mktemp("sheet")
    rows = [{"item": f"i{k}", "note": note, "more": text} for k, (note, text) in enumerate(pairs)]
    path = write_csv(folder / "s.csv", ("item", "note", "more"), rows)
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines = list(csv.reader(file))
    for cell in chain.from_iterable(lines):
        assert not cell.lstrip().startswith(("=", "+", "-", "@"))
    if saved_again:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(lines)
    rows_read = read_sheet_rows(
        path, ("item", "note"), lambda line, number: ([], (number, dict(line)))
    )
    assert rows_read == [(k + 2, row) for k, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("item,good\na,1,2\n", r"s.csv:2: item 'a': cells: found 3; allowed: 2"),
        ("item,good,good\n", "s.csv:1: header: found item, good, good"),
        ("item\n", "allowed: item, good and any others, each once"),
        ("", "header: found nothing"),
    ],
)
def test_files_that_are_no_sheets(tmp_path, content, message):
    (tmp_path / "s.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        read_sheet_rows(tmp_path / "s.csv", ("item", "good"), lambda line, number: ([], None))


def test_all_faults_of_a_sheet_come_together_and_with_the_row_a_spreadsheet_shows(tmp_path):
    (tmp_path / "s.csv").write_text('item,good,text\na,x,one\n,,\n"b\nc",1,two\nd,,three\n')

    def faults(line):
        return [
            *cell_faults(line, "good", int, "numbers"),
            *copied_text_faults(line, "text", "one"),
        ]

    with pytest.raises(DataError) as error:
        read_sheet_rows(
            tmp_path / "s.csv", ("item", "good"), lambda line, number: (faults(line), line["item"])
        )
    lines_and_columns = [(fault.line, fault.rule) for fault in error.value.violations]
    assert lines_and_columns == [(2, "good"), (4, "text"), (5, "text")]


@given(texts)
def test_cells_are_undone_exactly_once(text):
    assert cell_text(sheet_cell(text)) == text
    assert cell_text(sheet_cell(sheet_cell(text))) == sheet_cell(text)


def test_empty_and_unsure_cells():
    decisions = [read_cell(cell, int) for cell in ("", "  ", "?", " 7 ")]
    assert decisions == [(False, None), (False, None), (True, None), (True, 7)]
    assert not list(cell_faults({"good": "?", "note": "hm"}, "good", int, "numbers"))
    faults = list(cell_faults({"good": "", "note": "hm"}, "good", int, "numbers"))
    assert [column for column, _, _ in faults] == ["note"]
    assert "note" in faults[0][1]


@pytest.mark.parametrize(
    ("kind", "first", "refused", "field"),
    [
        (
            ClaimBook,
            "Type 1, 2 or 0 in the field.",
            "Keys: 1 one, 2 two, 0 cannot tell; n p u to move.",
            "1 2 0 · n p u",
        ),
        (
            YesNoBook,
            "Type y or x in the field.",
            "Keys: y yes, x no; n p u to move.",
            "y x · n p u",
        ),
    ],
)
def test_the_texts_of_a_page_name_the_keys_of_its_kind(tmp_path, kind, first, refused, field):
    with kind(tmp_path / "rows.jsonl", CLAIMS) as book:
        session = KeySession(book)
        assert session.status == first
        session.press("3")
        assert session.status.endswith(refused) and book.counts()["left"] == 6
        assert KeyPage(book)._keys.placeholder == field
