"""Items without the judge's decision, labels that survive, and what they say about the judge."""

import html.parser
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalib as mc
from memcalib.evaluation.agreement import judged_atoms, sample_atoms
from memcalib.products.annotation.labels import (
    Label,
    LabelBook,
    LabelItem,
    audit_frame,
    item_html,
    label_items,
    read_labels,
)
from memcalib.products.shared.questionnaire import blind_rubric, rubric_lines
from memcalib.io.records import display_text
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.problem import Level, Rollout, judgment_for
from memcalib.io.records import DataError, read_jsonl, write_jsonl

EXAMPLES = make_examples("short", 12, 5, "test")
ROLLOUTS = [
    Rollout(example_id=e.id, model="m", seed=s, response=f"Said {i}, {s}.")
    for i, e in enumerate(EXAMPLES)
    for s in (0, 1)
]


def judged(rng_seed=0, **fields):
    rng = random.Random(rng_seed)
    return [
        judgment_for(
            e,
            {i: Level(rng.randrange(3)) for i in e.levels},
            model="m",
            seed=s,
            **({"judge": "j"} | fields),
        )
        for e in EXAMPLES
        for s in (0, 1)
    ]


def items_of(judgments, n=20, scheme="stratified", **options):
    return label_items(
        sample_atoms(judged_atoms(judgments), n, scheme), EXAMPLES, ROLLOUTS, **options
    )


ITEMS = items_of(judged())


def test_items_say_nothing_that_the_judge_decided():
    sample = sample_atoms(judged_atoms(judged()), 20, "stratified")
    flipped = sample.assign(judged=2 - sample["judged"], cell=0, population=1)
    assert label_items(sample, EXAMPLES, ROLLOUTS) == label_items(flipped, EXAMPLES, ROLLOUTS)
    quoted = [
        j.model_copy(
            update={
                "atoms": [
                    a.model_copy(update={"quote": "zebra", "reason": "zebra"}) for a in j.atoms
                ]
            }
        )
        for j in judged()
    ]
    items = items_of(quoted)
    assert items == ITEMS and "zebra" not in "".join(i.to_json() for i in items)


def test_items_hold_what_the_model_and_the_judge_read():
    for item in ITEMS:
        example = next(e for e in EXAMPLES if e.id == item.example_id)
        assert item.question == example.question and item.atom == example.atom(item.atom_id).text
        assert item.memory == [(b.number, b.memory_text) for b in example.blocks]
        assert item.atom_id in example.blocks[item.block - 1].atom_ids
        assert item.rubric == blind_rubric(example.atom(item.atom_id).usage_rubric)
        assert item.response == next(
            r.response for r in ROLLOUTS if (r.example_id, r.seed) == (item.example_id, item.seed)
        )
    assert all(item.rubric is None for item in items_of(judged(), rubric=False))
    whole = items_of(judged(), rubric=True)
    assert [i.rubric for i in whole] == [
        next(e for e in EXAMPLES if e.id == i.example_id).atom(i.atom_id).usage_rubric
        for i in whole
    ]


def test_the_card_does_not_give_the_ideal_level_away():
    """As in the shipped records, whose rubrics say so in three entries,
    and in others by 'not applicable'.
    """
    (record, *_) = mc.load_examples("samples")
    rubrics = {atom.atom_id: blind_rubric(atom.usage_rubric) for atom in record.atoms}
    item = ITEMS[0]
    for atom in record.atoms:
        shown = item_html(item.model_copy(update={"rubric": rubrics[atom.atom_id]})).lower()
        assert "observable checks" in shown and "over use" in shown
        for telling in (
            "memory usage weight",
            "failure direction",
            "expected answer",
            "not applicable",
        ):
            assert telling not in shown
        assert "memory usage weight" in item_html(
            item.model_copy(update={"rubric": atom.usage_rubric})
        )


def test_items_show_exact_atoms_where_the_run_did():
    rollouts = [r.model_copy(update={"settings": {"text": "concat"}}) for r in ROLLOUTS]
    item = label_items(sample_atoms(judged_atoms(judged()), 1), EXAMPLES, rollouts)[0]
    example = next(e for e in EXAMPLES if e.id == item.example_id)
    assert [text for _, text in item.memory] == [b.atomic_concat_text for b in example.blocks]


def test_items_stream_from_a_file_and_go_through_one(tmp_path):
    file = write_jsonl(tmp_path / "rollouts.jsonl", ROLLOUTS)
    items = label_items(
        sample_atoms(judged_atoms(judged()), 20, "stratified"), iter(EXAMPLES), file
    )
    assert items == ITEMS
    assert list(read_jsonl(write_jsonl(tmp_path / "items.jsonl", items), LabelItem)) == items


def test_joins_that_fail_list_every_reason():
    sample = sample_atoms(judged_atoms(judged()), 5)
    with pytest.raises(DataError) as caught:
        label_items(sample, [], ROLLOUTS)
    assert len(caught.value.violations) == 5 and "none of this id" in str(caught.value)
    for rollouts, message in (([], "found 0 for"), (ROLLOUTS * 2, "found 2 for")):
        with pytest.raises(DataError, match=message):
            label_items(sample, EXAMPLES, rollouts)
    edited = [
        e.model_copy(
            update={
                "atoms": [a.model_copy(update={"ideal": Level((a.ideal + 1) % 3)}) for a in e.atoms]
            }
        )
        for e in EXAMPLES
    ]
    with pytest.raises(DataError, match="atom 'grounded_1'.*found ideal level|found ideal level"):
        label_items(sample, edited, ROLLOUTS)
    other = [r.model_copy(update={"example_hash": "0ld"}) for r in ROLLOUTS]
    with pytest.raises(DataError, match="the same version in examples, answers and judgments"):
        label_items(sample, EXAMPLES, other)
    hashed = sample_atoms(judged_atoms(judged(example_hash="0ld")), 5)
    with pytest.raises(DataError, match="dataset version"):
        label_items(hashed, EXAMPLES, ROLLOUTS)


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = set()
        self.text = []

    def handle_starttag(self, tag, attrs):
        self.tags.add((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data):
        self.text.append(data)


PLAIN = {(tag, attrs) for tag in ("div", "table") for attrs in (("style",),)} | {
    (tag, ()) for tag in ("b", "i", "tr", "td")
}


@given(st.lists(st.text(max_size=40), min_size=6, max_size=6))
def test_card_holds_no_tag_of_the_data(texts):
    bad = '<img src=x onerror="alert(1)">'
    fields = dict(zip(("question", "response", "atom"), (bad + t for t in texts[:3]), strict=True))
    item = ITEMS[0].model_copy(
        update=fields
        | {"memory": [(1, bad + texts[3])], "rubric": {bad + texts[4]: [bad, texts[5]]}}
    )
    parser = Tags()
    parser.feed(item_html(item))
    assert parser.tags <= PLAIN and sum(text.count("<img") for text in parser.text) == 6


def test_card_marks_the_atoms_block_and_shows_control_characters():
    card = item_html(
        ITEMS[0].model_copy(
            update={"memory": [(1, "one"), (3, "three")], "block": 3, "response": "\u202eevil\x00"}
        )
    )
    marked = card.index("border-left")
    assert card.index("1. one") < marked < card.index("3. three") and r"\u202eevil\x00" in card
    assert "(empty answer)" in item_html(ITEMS[0].model_copy(update={"response": ""}))


def test_long_text_is_cut_visibly():
    assert display_text("x" * 50, 50) == "x" * 50
    assert (
        display_text("x" * 51 + "y" * 999, 50)
        == "x" * 50 + " … [1,000 more characters are not shown]"
    )
    assert len(item_html(ITEMS[0].model_copy(update={"response": "<" * 10_000_000}))) < 1_000_000


def test_rubric_lines_take_anything():
    rubric = {
        "correct_use": "x",
        "observable_checks": ["a", "b"],
        "odd": {"n": [1]},
        "none": None,
        "empty": "",
        "zero": 0,
    }
    assert rubric_lines(rubric) == [
        ("correct use", "x"),
        ("observable checks", "a; b"),
        ("odd", '{"n": [1]}'),
        ("zero", "0"),
    ]
    assert rubric_lines(None) == []


# ---- labels


@given(
    st.lists(
        st.tuples(
            st.integers(0, 19), st.sampled_from([*Level, None]), st.text(max_size=20), st.booleans()
        ),
        max_size=30,
    )
)
def test_a_book_is_a_dictionary_that_survives(tmp_path_factory, actions):
    path = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    book = LabelBook(path, ITEMS)
    model = {}
    for k, level, note, reopen in actions:
        book.put(ITEMS[k].item, level, note)
        model[ITEMS[k].item] = level
        if reopen:
            book.close()
            book = LabelBook(path, ITEMS)
        assert {i.item: book.get(i.item).level for i in ITEMS if book.get(i.item)} == model
        decided = sum(level is not None for level in model.values())
        assert book.counts() == {
            "labelled": decided,
            "undecided": len(model) - decided,
            "left": 20 - len(model),
        }
    book.close()
    assert len(path.read_bytes().splitlines()) == len(actions)
    if actions:
        assert {label.item: label.level for label in read_labels(path)} == model


def test_every_decision_is_on_disk_at_once(tmp_path):
    book = LabelBook(tmp_path / "l.jsonl", ITEMS)
    for k, item in enumerate(ITEMS[:5], 1):
        book.put(item.item, Level.BOUND)
        assert len((tmp_path / "l.jsonl").read_text().splitlines()) == k


def test_a_torn_line_costs_one_decision_and_not_the_file(tmp_path):
    path = tmp_path / "l.jsonl"
    book = LabelBook(path, ITEMS)
    for item in ITEMS[:3]:
        book.put(item.item, Level.CONTROL)
    path.write_bytes(path.read_bytes()[:-7])
    assert LabelBook(path, ITEMS).counts()["labelled"] == 2


def test_books_keep_people_and_samples_apart(tmp_path):
    path = tmp_path / "l.jsonl"
    LabelBook(path, ITEMS, "one").put(ITEMS[0].item, Level.IGNORE)
    LabelBook(path, ITEMS[:2], "two").put(ITEMS[0].item, Level.CONTROL)
    assert LabelBook(path, ITEMS, "one").get(ITEMS[0].item).level == Level.IGNORE
    assert LabelBook(path, ITEMS[1:], "one").counts() == {"labelled": 0, "undecided": 0, "left": 19}
    assert [label.labeller for label in read_labels(path)] == ["one", "two"]


def test_labels_of_another_answer_are_refused_and_never_counted(tmp_path):
    path = tmp_path / "l.jsonl"
    LabelBook(path, ITEMS).put(ITEMS[0].item, Level.BOUND)
    changed = [ITEMS[0].model_copy(update={"response": "new"}), *ITEMS[1:]]
    with pytest.raises(
        DataError, match=f"l.jsonl: item '{ITEMS[0].item}': label: found given for a different text"
    ):
        LabelBook(path, changed)
    assert audit_frame(changed, read_labels(path), judged())["first"].isna().all()


def test_bad_items_and_unknown_ones(tmp_path):
    for items in ([], [ITEMS[0], ITEMS[0]]):
        with pytest.raises(ValueError, match="at least one item, and each item once"):
            LabelBook(tmp_path / "l.jsonl", items)
    with pytest.raises(KeyError):
        LabelBook(tmp_path / "l.jsonl", ITEMS).put("item-0", Level.BOUND)
    assert (tmp_path / "l.jsonl").read_text() == ""


def test_a_damaged_labels_file_names_the_line(tmp_path):
    path = tmp_path / "l.jsonl"
    book = LabelBook(path, ITEMS)
    book.put(ITEMS[0].item, Level.BOUND)
    row = json.loads(path.read_text()) | {"level": "D", "saved": 1}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"l.jsonl:2: level: found 'D'; allowed: .*A, B, C"):
        LabelBook(path, ITEMS)


def test_notes_with_odd_characters_are_kept_readable(tmp_path):
    book = LabelBook(tmp_path / "l.jsonl", ITEMS)
    assert book.put(ITEMS[0].item, None, "a\nb \ud800 \x1b").note == r"a" + "\n" + r"b \ud800 \x1b"
    assert read_labels(tmp_path / "l.jsonl")[0].note.startswith("a\nb")


# ---- audit


def test_audit_puts_labels_beside_levels_and_leaves_gaps():
    judgments = judged()
    labels = [
        Label(item=i.item, level=k % 3, answer_hash=i.answer_hash) for k, i in enumerate(ITEMS[:10])
    ]
    labels.append(Label(item=ITEMS[10].item, level=None, answer_hash=ITEMS[10].answer_hash))
    rows = audit_frame(ITEMS, labels, judgments)
    levels = judged_atoms(judgments).set_index("item")["judged"]
    assert list(rows["item"]) == [i.item for i in ITEMS] and list(rows["second"]) == [
        levels[i.item] for i in ITEMS
    ]
    assert (
        rows["first"].tolist()[:10] == [k % 3 for k in range(10)]
        and rows["first"][10:].isna().all()
    )
    drawn = sample_atoms(judged_atoms(judgments), 20, "stratified")
    assert (
        rows["cell"].tolist() == drawn["cell"].tolist()
        and rows["population"].tolist() == drawn["population"].tolist()
    )
    assert set(rows["scheme"]) == {"stratified"}


def test_audit_of_another_judge_has_levels_but_no_cells():
    rows = audit_frame(ITEMS, [], judged(1, judge="other"))
    assert (
        rows["second"].notna().all()
        and rows["cell"].isna().all()
        and rows["population"].isna().all()
    )


def test_audit_refuses_mixed_people_missing_judgments_and_other_versions():
    labels = [
        Label(item=ITEMS[0].item, level=0, labeller=name, answer_hash=ITEMS[0].answer_hash)
        for name in ("one", "two")
    ]
    with pytest.raises(ValueError, match="labels by 'one', 'two'"):
        audit_frame(ITEMS, labels, judged())
    assert audit_frame(ITEMS, labels, judged(), "two")["first"].notna().sum() == 1
    with pytest.raises(ValueError, match=r"found no judgment of \d+ items?"):
        audit_frame(ITEMS, labels[:1], judged()[:3])
    with pytest.raises(ValueError, match="another version of the data set"):
        audit_frame(ITEMS, [], judged(example_hash="0ld"))


def test_an_unscored_atom_stays_missing():
    second = [
        j.model_copy(
            update={"judge": "k", "atoms": [a.model_copy(update={"actual": None}) for a in j.atoms]}
        )
        for j in judged()
    ]
    rows = audit_frame(ITEMS, [], second)
    assert rows["second"].isna().all() and np.isnan(rows["first"]).all()


def test_exact_judge_labels_end_to_end(tmp_path):
    judgments = [
        exact_judge(e, r.response).model_copy(update={"model": "m", "seed": r.seed})
        for e, r in zip(np.repeat(EXAMPLES, 2), ROLLOUTS, strict=True)
    ]
    items = items_of(judgments, 30, "natural")
    truth = judged_atoms(judgments).set_index("item")["judged"]
    book = LabelBook(tmp_path / "l.jsonl", items)
    for item in items:
        book.put(item.item, Level(int(truth[item.item])))
    rows = audit_frame(items, read_labels(tmp_path / "l.jsonl"), judgments)
    assert (rows["first"] == rows["second"]).all()
