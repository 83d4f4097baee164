"""Pilots: balanced, fresh batches; reviews that survive; a rate over all rows;
forms that run nothing and lose nothing.
"""

import base64
import csv
import hashlib
import io
import json
import math
import random
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spreadsheets import sheet_rows

from memcalib.products.dataset import pilot as p
from memcalib.products.dataset import pilot_page as f
from memcalib.products.micro.world import make_examples
from memcalib.problem import sample_records
from memcalib.io.records import DataError, Violation

EXAMPLES = make_examples("short", 40, 0, "rl")
RECORDS = sample_records()
EVIL = "<script>alert(1)</script>\x1b[2J\u202e =1+1 \"'>"


@pytest.fixture
def batch(tmp_path):
    return p.write_batch(
        tmp_path / "pilot", p.pilot_items(RECORDS), {"annotation: prompt": "annotation-1"}
    )


def issue(stage="rubrics", text="wrong", item=""):
    return p.PilotIssue(stage=stage, text=text, item=item)


def decide(batch, decisions, reviewer=""):
    book = p.ReviewBook(batch.reviews, batch.items, reviewer)
    for item, passed in zip(batch.items, decisions, strict=False):
        if passed is not None:
            book.put(item.id, passed, [] if passed else [issue()])
    book.close()


# ---- batches

row_lists = st.lists(st.sampled_from("abcd"), max_size=60).map(
    lambda domains: [SimpleNamespace(id=f"{d}{n}", domain=d) for n, d in enumerate(domains)]
)


@given(row_lists, st.integers(1, 30), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_batch_is_as_balanced_as_can_be_and_minds_no_order(rows, count, seed, rng):
    used_ids = {row.id for row in rows if rng.random() < 0.2}
    fresh = [row for row in rows if row.id not in used_ids]
    if len(fresh) < count:
        with pytest.raises(ValueError, match=f"found {len(fresh)} fresh row"):
            p.choose_batch(rows, count, seed, used_ids)
        return
    chosen = p.choose_batch(rows, count, seed, used_ids)
    chosen_ids = {row.id for row in chosen}
    assert len(chosen_ids) == count and not chosen_ids & used_ids
    assert p.choose_batch(rng.sample(rows, len(rows)), count, seed, used_ids) == chosen
    chosen_counts = Counter(row.domain for row in chosen)
    fresh_counts = Counter(row.domain for row in fresh)
    largest = max(chosen_counts.values())
    for domain, available in fresh_counts.items():
        if chosen_counts[domain] < available:
            assert chosen_counts[domain] >= largest - 1


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="pilot of 0"):
        p.choose_batch(EXAMPLES, 0)


def test_another_seed_draws_other_rows():
    drawn = [tuple(row.id for row in p.choose_batch(EXAMPLES, 9, seed)) for seed in range(4)]
    assert len(set(drawn)) == 4


def test_what_is_read_is_what_was_written(batch):
    read_back = p.read_batch(batch.folder)
    assert read_back == batch and [item.example for item in read_back.items] == RECORDS
    assert batch.folder.name == "batch-01"
    assert p.seen_ids(batch.folder.parent) == {record.id for record in RECORDS}


def test_batches_are_numbered_and_fresh(batch):
    folder = batch.folder.parent
    second = p.write_batch(folder, p.pilot_items(EXAMPLES[:3]), {})
    assert second.number == 2
    assert [path.name for path in p.list_batches(folder)] == ["batch-01", "batch-02"]
    with pytest.raises(DataError, match="a row of an earlier batch"):
        p.write_batch(folder, p.pilot_items([EXAMPLES[3], RECORDS[0]]), {})
    with pytest.raises(DataError, match="2 times"):
        p.write_batch(folder, p.pilot_items([EXAMPLES[3], EXAMPLES[3]]), {})
    with pytest.raises(DataError, match="no rows"):
        p.write_batch(folder, [], {})
    assert len(p.list_batches(folder)) == 2


@pytest.mark.parametrize("writer", ["write_jsonl", "write_whole"])
def test_a_batch_appears_whole_or_not_at_all(tmp_path, monkeypatch, writer):
    """Whatever cannot be written: the rows, or the list of the batches."""

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(p, writer, fail)
    with pytest.raises(OSError, match="disk full"):
        p.write_batch(tmp_path, p.pilot_items(RECORDS), {})
    assert p.list_batches(tmp_path) == []
    monkeypatch.undo()
    assert p.write_batch(tmp_path, p.pilot_items(RECORDS), {}).number == 1


def test_changed_items_are_noticed(batch):
    path = batch.folder / "items.jsonl"
    path.write_text(path.read_text().replace(RECORDS[0].question, "Another question?"))
    with pytest.raises(DataError, match="as written"):
        p.read_batch(batch.folder)
    (batch.folder.parent / "pilots.json").write_text('{"batches": [{"number": "x"}]}')
    with pytest.raises(DataError, match=r"pilots\.json: .*number"):
        p.read_batch(batch.folder)


def test_a_folder_that_is_no_batch_is_named(batch):
    with pytest.raises(FileNotFoundError, match="batch-02: this batch does not exist; .*batch-01"):
        p.read_batch(batch.folder.with_name("batch-02"))


def test_a_draw_that_led_to_a_batch_is_linked_in_one_write(tmp_path):
    draw, rows = p.next_draw(tmp_path, {}, 2, EXAMPLES)
    p.save_draw(tmp_path, draw)
    batch = p.write_batch(tmp_path, p.pilot_items(rows[:2]), {}, [draw.ended([])])
    [saved_draw] = p.read_pilots(tmp_path).draws
    assert (saved_draw.batch, saved_draw.lost) == (batch.number, {})


def test_findings_go_to_their_rows():
    findings = [
        Violation("leak", "a", "b", example_id=RECORDS[1].id),
        Violation("leak", "c", "d", "atom 'x'", RECORDS[1].id),
    ]
    items = p.pilot_items(RECORDS, findings, ["leak", "person"])
    assert [len(item.checks["leak"]) for item in items[:3]] == [0, 2, 0]
    assert items[1].checks["leak"][1] == "atom 'x': found c; allowed: d"
    assert items[0].checks["person"] == []


# ---- reviews


def test_a_decision_is_on_disk_at_once_and_the_last_one_counts(batch):
    book = p.ReviewBook(batch.reviews, batch.items)
    name = batch.items[0].id
    for n, passed in enumerate((True, False, None, True), 1):
        book.put(name, passed, [issue()] if passed is False else [])
        assert len(batch.reviews.read_text().splitlines()) == n
        assert book.get(name) == (None if passed is None else p.read_reviews(batch.reviews)[0])
    assert p.ReviewBook(batch.reviews, batch.items).get(name).passed is True


def test_impossible_decisions_save_nothing(batch):
    book = p.ReviewBook(batch.reviews, batch.items)
    name = batch.items[0].id
    for passed, issues, error in (
        (False, [], ValueError),
        (True, [issue()], ValueError),
        (None, [issue()], ValueError),
        (False, [issue("prompt")], ValueError),
    ):
        with pytest.raises(error):
            book.put(name, passed, issues)
    with pytest.raises(KeyError):
        book.put("nobody", True)
    with pytest.raises(ValueError):
        issue(text="")
    assert batch.reviews.read_text() == "" and book.get(name) is None


def test_a_torn_line_is_cut_and_the_rest_stays(batch):
    decide(batch, [True, False])
    batch.reviews.write_text(batch.reviews.read_text() + '{"item": "h')
    book = p.ReviewBook(batch.reviews, batch.items)
    assert book.get(batch.items[1].id).issues == [issue()]
    assert len(batch.reviews.read_text().splitlines()) == 2


def test_reviews_of_other_texts_are_refused(batch):
    decide(batch, [True])
    other_text = RECORDS[0].model_copy(update={"question": "Another?"})
    changed_items = [p.PilotItem(example=other_text), *batch.items[1:]]
    reviews = p.read_reviews(batch.reviews)
    with pytest.raises(DataError, match="given for another text"):
        p.ReviewBook(batch.reviews, changed_items)
    with pytest.raises(DataError, match="given for another text"):
        p.pass_rate(changed_items, reviews)
    with pytest.raises(DataError, match="no such row"):
        p.pass_rate(batch.items[1:], reviews)
    with pytest.raises(ValueError, match="at least one"):
        p.ReviewBook(batch.reviews, [])


def wilson(k, n, z=1.959963984540054):
    centre = (k + z * z / 2) / (n + z * z)
    half = z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return centre - half, centre + half


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=40))
def test_the_rate_is_over_all_rows(decisions):
    n = len(decisions)
    items = p.pilot_items(EXAMPLES[:n])
    reviews = []
    for item, passed in zip(items, decisions, strict=True):
        if passed is not None:
            issues = [] if passed else [issue()]
            reviews.append(
                p.PilotReview(item=item.id, passed=passed, issues=issues, item_hash=item.hash)
            )
    random.Random(0).shuffle(reviews)
    rate = p.pass_rate(items, reviews)
    passed_count = decisions.count(True)
    assert (rate.items, rate.passed) == (n, passed_count)
    assert (rate.failed, rate.undecided) == (decisions.count(False), decisions.count(None))
    if None in decisions:
        assert math.isnan(rate.rate) and not rate.unlocks and "left" in str(rate)
    else:
        assert rate.rate == passed_count / n
        assert (rate.low, rate.high) == pytest.approx(wilson(passed_count, n))
        assert rate.unlocks == (passed_count * 10 >= n * 9)
        assert rate.out_of_reach == (not rate.unlocks)
    assert rate.out_of_reach == ((n - rate.failed) * 10 < 9 * n)


def test_one_person_who_fails_a_row_is_enough(batch):
    decide(batch, [True] * 9, "first")
    decide(batch, [False, True], "second")
    rate = p.pass_rate(batch.items, p.read_reviews(batch.reviews))
    assert (rate.passed, rate.failed, rate.undecided) == (8, 1, 0) and not rate.unlocks
    rate_of_nothing = p.pass_rate([], [])
    assert rate_of_nothing.undecided == 0 and math.isnan(rate_of_nothing.rate)


def test_a_decision_taken_back_is_no_decision(batch):
    decide(batch, [True] * 9)
    p.ReviewBook(batch.reviews, batch.items).put(batch.items[0].id, None)
    assert p.pass_rate(batch.items, p.read_reviews(batch.reviews)).undecided == 1


# ---- the page


class Tags(HTMLParser):
    """The tags of a page, and whether every one that was opened was closed."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.names = Counter()
        self.open = []
        self.attributes = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def evil_example():
    record = RECORDS[0]
    rubric = {EVIL: [EVIL], "x": {"y": EVIL}}
    atoms = [a.model_copy(update={"text": EVIL, "usage_rubric": rubric}) for a in record.atoms]
    blocks = [b.model_copy(update={"memory_text": EVIL}) for b in record.blocks]
    names = ("id", "domain", "question")
    source_names = ("source_dataset", "source_license", "raw_query", "source_answer")
    fields = dict.fromkeys((*names, *source_names), EVIL)
    fields.update(atoms=atoms, blocks=blocks)
    return record.model_copy(update=fields)


def test_foreign_text_stays_text_on_the_page(tmp_path):
    examples = [evil_example(), *RECORDS[1:3]]
    finding = Violation(EVIL, EVIL, EVIL, EVIL, EVIL)
    batch = p.write_batch(tmp_path, p.pilot_items(examples, [finding], [EVIL]), {EVIL: EVIL})
    p.ReviewBook(batch.reviews, batch.items).put(EVIL, False, [issue(text=EVIL, item=EVIL)])
    page = f.write_review_page(batch).read_text()
    card = f.row_html(batch.items[0], p.read_reviews(batch.reviews)[0])
    script = re.search("<script>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "alert(1)" not in script
    for text, scripts in ((page, 1), (card, 0)):
        tags = Tags(text)
        assert tags.open == [] and tags.names["script"] == scripts and not tags.names["img"]
        assert not {name for name in tags.attributes if name.startswith("on")}
        assert "\x1b" not in text and "\\x1b" in text and "\u202e" not in text


def test_the_page_has_all_that_a_reader_needs(batch):
    decide(batch, [True, False])
    text = f.write_review_page(batch).read_text()
    for words in ("1 passed, 1 failed, 7 left of 9", "annotation-1", "default-src 'none'"):
        assert words in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
    for record in RECORDS:
        assert record.domain in text
        assert all(atom.atom_id in text for atom in record.atoms)
    for name in p.STAGES:
        assert f"<td>{name}</td>" in text and f'<option value="{name}">' in text
    assert text.count('class="atom') == sum(len(record.atoms) for record in RECORDS)


def test_a_failure_is_shown_before_the_pass_of_another_person(batch):
    decide(batch, [True] * 9, "first")
    decide(batch, [False], "second")
    text = f.write_review_page(batch).read_text()
    assert text.count('<p class="verdict">fail</p>') == 1
    assert text.count('<p class="verdict">pass</p>') == 8


def test_names_of_rubrics_keep_their_width_beside_the_style_of_a_notebook(batch):
    page = f.row_html(batch.items[0])
    assert re.search(r"\.pilot dl dt {[^}]*width: auto; float: none; font-weight: inherit;", page)
    assert re.search(r"\.pilot dl dd {[^}]*width: auto; float: none;", page)
    assert "max-content) 1fr" not in page


def test_very_long_texts_are_cut_visibly(tmp_path):
    record = RECORDS[0].model_copy(update={"source_answer": "x" * 1_000_000})
    batch = p.write_batch(tmp_path, p.pilot_items([record]), {})
    text = f.write_review_page(batch).read_text()
    assert len(text) < 200_000 and "more characters are not shown" in text


JUDGED = {
    "label_reason": "the dose decides",
    "memory_action": "correct",
    "hard_a_family": "near_topic",
    "origin": "hard",
    "safety_relevance": "a wrong dose harms",
    "counterfactual_contract": {
        "without_memory_behavior": "names any tablet",
        "with_memory_behavior": "names the safe tablet",
        "observable_delta": "which tablet",
        "minimal_evidence": "its name",
    },
}


def test_the_page_shows_what_a_reviewer_judges_by(tmp_path):
    first_atom = RECORDS[0].atoms[0].model_copy(update=JUDGED)
    fields = {"atoms": [first_atom, *RECORDS[0].atoms[1:]], "difficulty_level": "level_2"}
    record = RECORDS[0].model_copy(update=fields)
    batch = p.write_batch(tmp_path, p.pilot_items([record]), {})
    for text in (f.write_review_page(batch).read_text(), f.row_html(batch.items[0])):
        for words in (
            "the dose decides",
            "names any tablet",
            "names the safe tablet",
            "near_topic",
            "difficulty level: level_2",
            "which tablet",
            "its name",
            "a wrong dose harms",
            "action: correct",
        ):
            assert words in text
        assert "<details open" not in text and text.count(">rubric</summary>") == len(record.atoms)


def test_rows_have_the_numbers_of_the_sheet(batch, tmp_path):
    text = f.write_review_page(batch).read_text()
    rows = sheet_rows(f.write_review_sheet(batch, tmp_path / "s.csv"))
    assert [row["row"] for row in rows] == [str(k) for k in range(1, 10)]
    for row in rows:
        assert f'<h2 id="row-{row["row"]}">' in text
        assert f'data-row="{row["row"]}" data-item="{row["item"]}"' in text


def test_a_sheet_does_without_the_numbers(batch, tmp_path):
    rows = sheet_rows(f.write_review_sheet(batch, tmp_path / "s.csv"))
    for row in rows:
        del row["row"]
        row["result"] = "pass"
    write_rows(tmp_path / "unnumbered.csv", rows)
    assert f.import_reviews(tmp_path / "unnumbered.csv", batch) == 9


def test_decisions_that_were_made_are_set_on_the_page(batch):
    decide(batch, [True, False])
    text = f.write_review_page(batch).read_text()
    forms = re.findall(r'<form class="decide".*?</form>', text, re.S)
    assert ['value="pass" checked' in form for form in forms[:3]] == [True, False, False]
    assert ['value="fail" checked' in form for form in forms[:3]] == [False, True, False]
    assert ">wrong</textarea>" in forms[1]


DRIVE = """
const fs = require("fs"), vm = require("vm");
const data = JSON.parse(fs.readFileSync(0, "utf8"));
const nothing = {
  classList: { toggle() {} },
  addEventListener() {},
  replaceChildren() {},
  querySelectorAll: () => [],
};
const element = (more) => ({ dataset: {}, querySelector: () => element({}), ...nothing, ...more });
const forms = data.forms.map((form) => element({ dataset: form }));
const tools = element({ dataset: { key: "k" } });
const document = {
  getElementById: () => tools, querySelectorAll: () => forms, querySelector: () => null,
};
const context = vm.createContext({ document, localStorage: { getItem: () => null, setItem() {} } });
vm.runInContext(data.script + ";globalThis.made = { sheet, fault };", context);
const sheet = context.made.sheet(data.decisions);
const faults = data.decisions.map(context.made.fault);
process.stdout.write(JSON.stringify({ sheet, faults }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the script of the page is run by node")
def test_the_sheet_that_the_page_saves_is_taken_in(tmp_path):
    records = [evil_example(), *RECORDS[1:5]]
    batch = p.write_batch(tmp_path, p.pilot_items(records), {})
    page = f.write_review_page(batch).read_text()
    forms = []
    for item in batch.items:
        forms.append({"row": str(item.number), "item": item.id, **f.PilotBook.cells(item)})
    issues = [
        {"stage": "rubrics", "about": EVIL, "issue": EVIL},
        {"stage": "other", "about": "", "issue": '-"two"\nlines'},
    ]
    decisions = [
        {"result": "fail", "issues": issues},
        {"result": "pass", "issues": []},
        {"result": "", "issues": []},
        {"result": "fail", "issues": []},
        {"result": "pass", "issues": issues},
    ]
    script = re.search("<script>(.*?)</script>", page, re.S)[1]
    program_input = json.dumps({"script": script, "forms": forms, "decisions": decisions})
    done = subprocess.run(
        ["node", "-e", DRIVE], input=program_input, capture_output=True, text=True, check=True
    )
    output = json.loads(done.stdout)
    assert [bool(fault) for fault in output["faults"]] == [False, False, False, True, True]
    lines = csv.reader(io.StringIO(output["sheet"].removeprefix("\ufeff"), newline=""))
    faultless = [line for line in lines if line[1] not in (records[3].id, records[4].id)]
    with open(tmp_path / "s.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(faultless)
    assert f.import_reviews(tmp_path / "s.csv", batch, "in a browser") == 2
    first, second = p.read_reviews(batch.reviews)
    assert second.passed is True
    assert first.issues[0].stage == "rubrics"
    assert first.issues[1].text == issues[1]["issue"]


# ---- session and widgets


def test_a_session_goes_on_where_the_file_stops(batch):
    session = f.PilotSession(batch)
    session.accept()
    session.complain("sources", " broken ")
    session.complain("rubrics", "and this", "p1_a1")
    assert session.index == 1 and [i.text for i in session.label.issues] == ["broken", "and this"]
    session.move(0)
    assert session.index == 2
    again = f.PilotSession(batch)
    assert again.index == 2 and again.progress.startswith("1 passed, 1 failed, 7 left")
    again.move(-1)
    again.withdraw()
    assert again.label is None and again.status == "Saved: row 2 is undecided."
    again.move(-5)
    assert again.index == 0
    again.move(99)
    assert again.index == 8


def test_accepting_withdraws_issues(batch):
    session = f.PilotSession(batch)
    session.complain("sources", "broken")
    session.accept()
    session.move(-1)
    assert session.label.passed is True and session.label.issues == []


@pytest.mark.parametrize(
    ("stage", "text"), [("", "words"), ("rubrics", ""), ("rubrics", " \n"), ("nowhere", "words")]
)
def test_a_complaint_needs_stage_and_words(batch, stage, text):
    session = f.PilotSession(batch)
    session.complain(stage, text)
    assert session.status.startswith("NOT saved")
    assert batch.reviews.read_text() == "" and session.label is None


def test_a_full_disk_is_said_and_changes_nothing(batch, monkeypatch):
    session = f.PilotSession(batch)

    def full(row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.book._journal, "append", full)
    session.accept()
    assert "NOT saved" in session.status and session.index == 0 and session.label is None
    monkeypatch.undo()
    session.accept()
    assert session.index == 1


def test_the_widgets_do_what_the_session_does(batch):
    page = f.PilotPage(batch)
    page._issue.value = "too vague"
    page._stage.value = "distractors"
    page._buttons["pass"].click()
    assert "typed an issue but did not add it" in page._status.value
    assert batch.reviews.read_text() == ""
    page._about.value = batch.items[0].example.atoms[0].atom_id
    page._add.click()
    assert page.session.label.issues[0].item == batch.items[0].example.atoms[0].atom_id
    assert page._issue.value == page._stage.value == ""
    page._buttons["next"].click()
    page._buttons["pass"].click()
    assert page.session.index == 2 and "1 passed, 1 failed" in page._head.value
    page._buttons["previous"].click()
    assert page._buttons["pass"].button_style == "success"
    page._buttons["take back"].click()
    assert page._buttons["pass"].button_style == "" and page.session.label is None
    assert batch.items[1].example.question[:20] in page._body.value
    assert page._repr_mimebundle_()


@pytest.mark.parametrize("name", ["pass", "take back", "previous", "next", "next unread"])
def test_an_issue_that_was_typed_stays_with_its_row(batch, name):
    page = f.PilotPage(batch)
    page._buttons["pass"].click()
    page.session.complain("sources", "broken")
    page._issue.value = "too vague"
    saved = batch.reviews.read_text()
    page._buttons[name].click()
    assert "typed an issue but did not add it" in page._status.value and page.session.index == 1
    assert batch.reviews.read_text() == saved and page._issue.value == "too vague"
    page._issue.value = "  "
    page._buttons[name].click()
    assert "typed an issue but did not add it" not in page._status.value


def test_foreign_names_do_no_harm_in_widgets(tmp_path):
    batch = p.write_batch(tmp_path, p.pilot_items([evil_example()]), {})
    page = f.PilotPage(batch)
    page.session.status = EVIL
    page.show()
    assert "<script" not in page._body.value + page._status.value + page._head.value


# ---- the sheet


def write_rows(path, rows, delimiter=","):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def test_a_sheet_comes_back_as_it_went(batch, tmp_path):
    book = p.ReviewBook(batch.reviews, batch.items)
    first_id, second_id = (item.id for item in batch.items[:2])
    issues = [issue("rubrics", "=1+1", "-a"), issue("other", "two\nlines")]
    book.put(first_id, True)
    book.put(second_id, False, issues)
    sheet = f.write_review_sheet(batch, tmp_path / "s.csv")
    for row in sheet_rows(sheet):
        assert not any(re.match(r"\s*[=+\-@]", cell) for cell in row.values())
    reviews = {row.item: row for row in f.PilotBook.read_sheet(sheet, batch.items)}
    assert reviews.keys() == {first_id, second_id}
    assert (reviews[first_id].passed, reviews[first_id].issues) == (True, [])
    assert (reviews[second_id].passed, reviews[second_id].issues) == (False, issues)
    assert f.import_reviews(sheet, batch) == 0


@given(st.data())
def test_any_decisions_survive_the_sheet(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("sheet")
    batch = p.write_batch(folder, p.pilot_items(RECORDS), {})
    words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)
    any_issue = st.builds(issue, st.sampled_from(list(p.STAGES)), words, words)
    some_issues = st.lists(any_issue, min_size=1, max_size=3)
    book = p.ReviewBook(batch.reviews, batch.items)
    expected = {}
    for item in batch.items:
        issues = data.draw(st.one_of(st.none(), st.just([]), some_issues))
        if issues is not None:
            book.put(item.id, not issues, issues)
            expected[item.id] = (not issues, book.get(item.id).issues)
    sheet = f.write_review_sheet(batch, folder / "s.csv")
    rows = f.PilotBook.read_sheet(sheet, batch.items)
    assert {row.item: (row.passed, row.issues) for row in rows} == expected


def test_a_sheet_filled_in_elsewhere(batch, tmp_path):
    rows = sheet_rows(f.write_review_sheet(batch, tmp_path / "s.csv"))
    random.Random(0).shuffle(rows)
    for row in rows:
        row.update(result=" PASS ", extra="")
    rows[0].update(result="Fail", stage="other", issue="odd", extra="1")
    write_rows(tmp_path / "back.csv", rows, ";")
    assert f.import_reviews(tmp_path / "back.csv", batch, "reader") == 9
    rate = p.pass_rate(batch.items, p.read_reviews(batch.reviews))
    assert (rate.passed, rate.failed) == (8, 1)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"item": "nobody"}, "item"),
        ({"result": "maybe"}, "result"),
        ({"result": "fail"}, "stage"),
        ({"result": "fail", "stage": "rubrics"}, "stage"),
        ({"result": "fail", "stage": "prompt", "issue": "x"}, "stage"),
        ({"result": "pass", "issue": "x"}, "issue"),
        ({"stage": "rubrics"}, "issue"),
        ({"query": "Another?"}, "query"),
    ],
)
def test_a_sheet_with_a_fault_saves_nothing(batch, tmp_path, change, rule):
    rows = sheet_rows(f.write_review_sheet(batch, tmp_path / "s.csv"))
    for row in rows[:3]:
        row["result"] = "pass"
    rows[4] |= change
    write_rows(tmp_path / "bad.csv", rows)
    with pytest.raises(DataError) as caught:
        f.import_reviews(tmp_path / "bad.csv", batch)
    assert [(v.rule, v.line) for v in caught.value.violations] == [(rule, 6)]
    assert not batch.reviews.exists() or batch.reviews.read_text() == ""


def test_pass_and_fail_for_one_row_contradict(batch, tmp_path):
    undecided = sheet_rows(f.write_review_sheet(batch, tmp_path / "s.csv"))[0]
    passed = {**undecided, "result": "pass"}
    failed = {**undecided, "result": "fail", "stage": "rubrics", "issue": "x"}
    for pair in ([passed, failed], [failed, undecided], [undecided, undecided]):
        write_rows(tmp_path / "bad.csv", pair)
        with pytest.raises(DataError, match="one line for each row"):
            f.PilotBook.read_sheet(tmp_path / "bad.csv", batch.items)
    write_rows(tmp_path / "good.csv", [failed, {**failed, "issue": "y"}])
    [row] = f.PilotBook.read_sheet(tmp_path / "good.csv", batch.items)
    assert row.item == batch.items[0].id and [issue.text for issue in row.issues] == ["x", "y"]


@pytest.mark.parametrize("content", [b"", b"item,result\na,pass\n", b"\xff\xfe\x00"])
def test_no_sheet_at_all(batch, tmp_path, content):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError):
        f.PilotBook.read_sheet(tmp_path / "x.csv", batch.items)


def test_review_json_is_plain(batch):
    decide(batch, [False])
    line = json.loads(batch.reviews.read_text())
    assert line["passed"] is False
    assert line["issues"] == [{"stage": "rubrics", "text": "wrong", "item": ""}]
