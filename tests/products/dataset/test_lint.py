"""Checks against slow readings of their rules, on files in every state, and on planted defects."""

import gzip
import json
import random
import re

import planted_defects
import pytest
from planted_defects import DEFECTS, plant, rebuilt, with_atom, with_rubric, with_text
from invented_rows import invented_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.products.shared import grounding
from memcalib.products.dataset import lint as lint_page
from memcalib.products.dataset.lint import RUBRIC_FIELDS, shares, strange_marks
from memcalib.products.shared.grounding import too_close
from memcalib.products.dataset.lint import (
    LintResult,
    choose_lints,
    lint_example,
    lint_files,
    lint_splits,
    sentence_vectors,
)
from memcalib.products.micro.world import make_examples
from memcalib.problem import Alternative, Atom, Block, Example, Level, sample_records
from memcalib.io.records import write_jsonl
from memcalib.products.dataset.lint import (
    LINTS,
    ExampleView,
    Lint,
    LintLimits,
    cut_stems,
    distinctive_stems,
    lint,
)

RECORDS = sample_records()
RECORD = RECORDS[4]
SETS = {
    "shipped": RECORDS,
    "micro": make_examples("short", 40, seed=21) + make_examples("long", 40, seed=21),
    "invented": invented_examples(180, seed=21),
}


def rules(example, *names, limits=None):
    return {finding.rule for finding in lint_example(example, names or None, limits)}


def atom(text="The user owns a green kayak.", name="p1_a1", parent="m1", ideal="A", **fields):
    return Atom(atom_id=name, parent_memory_id=parent, text=text, ideal=ideal, **fields)


def example(*texts, question="What is a good breakfast?", memory=None, **fields):
    atoms = [atom(text, f"p1_a{i}") for i, text in enumerate(texts, 1)]
    block = {
        "memory_text": memory or " ".join(texts),
        "atomic_concat_text": " ".join(t.strip() for t in texts),
    }
    blocks = [Block(parent_memory_id="m1", atom_ids=[a.atom_id for a in atoms], **block)]
    return Example(
        id="e", domain="general", question=question, blocks=blocks, atoms=atoms, **fields
    )


# Words --------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_cutting_never_fails_and_ignores_case(text):
    assert all(isinstance(stem, str) and stem for stem in cut_stems(text))
    assert distinctive_stems(text, LintLimits()) <= set(cut_stems(text))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("nephew's", "nephew"),
        ("drums", "drum"),
        ("The user's naps", "nap"),
        ("Walking", "walked"),
        ("KAYAK", "kayak"),
    ],
)
def test_forms_of_a_word_share_a_stem(one, other):
    assert cut_stems(one) == cut_stems(other) != []


def test_common_words_tie_nothing():
    assert (
        distinctive_stems("The answer mentions this and leaves it out.", LintLimits())
        == frozenset()
    )
    assert distinctive_stems("The answer mentions this.", LintLimits(common="")) == {
        "answer",
        "mentio",
    }


def test_limits_are_named_by_their_content():
    assert LintLimits().hash == LintLimits(other=1 / 3).hash
    assert len({LintLimits().hash, LintLimits(own=0.2).hash, LintLimits(common="a").hash}) == 3
    with pytest.raises(ValueError, match="spelling"):
        LintLimits(spelling=1)


# Single checks ------------------------------------------------------------------------------------


def slow_shares(row, name, limits):
    rubric_stems = distinctive_stems(
        " ".join(str(v) for v in row.atom(name).usage_rubric.values()), limits
    )
    stems_of_atom = {a.atom_id: distinctive_stems(a.text, limits) for a in row.atoms}
    near = [
        a.atom_id
        for a in row.atoms
        if a.parent_memory_id == row.atom(name).parent_memory_id and a.atom_id != name
    ]
    counted = {
        i: [w for w in ws if i not in near or w not in stems_of_atom[name]]
        for i, ws in stems_of_atom.items()
    }
    return {
        i: sum(w in rubric_stems for w in counted[i]) / len(ws)
        for i, ws in stems_of_atom.items()
        if ws
    }


def test_shares_of_words_agree_with_a_slow_count():
    for row in [*RECORDS, *SETS["invented"][:20]]:
        for a in row.atoms:
            assert shares(ExampleView(row), a.atom_id) == pytest.approx(
                slow_shares(row, a.atom_id, LintLimits())
            )


def slow_alignment(row, limits):
    wrong = set()
    for a in row.atoms:
        share = slow_shares(row, a.atom_id, limits)
        own_share = share.pop(a.atom_id)
        sizes = {other.atom_id: len(distinctive_stems(other.text, limits)) for other in row.atoms}
        best = max(
            (
                other_share
                for name, other_share in share.items()
                if round(other_share * sizes[name]) >= min(2, sizes[name] - 1)
            ),
            default=0,
        )
        swapped = best >= limits.other and best >= own_share + limits.margin
        if swapped or (own_share < limits.own and strange_marks(ExampleView(row), a.atom_id)):
            wrong.add(a.atom_id)
    return wrong


@pytest.mark.parametrize("limits", [LintLimits(), LintLimits(other=0.2, margin=0.05, own=0.3)])
def test_alignment_agrees_with_a_slow_reading(limits):
    rng = random.Random(1)
    finding_count = 0
    for row in [*RECORDS, *SETS["invented"][:30]]:
        for spoiled in (
            row,
            plant(row, "swapped_rubrics", rng),
            plant(row, "foreign_rubric_with_identifiers", rng),
        ):
            flagged = {f.item for f in lint_example(spoiled, ["rubric_alignment"], limits)}
            assert flagged == {f"rubric of {name!r}" for name in slow_alignment(spoiled, limits)}
            finding_count += len(flagged)
    assert finding_count > 30


def test_the_incident_is_noticed():
    """All rubrics of a row shifted by one place: every id in order, every row flagged."""
    for row in RECORDS:
        moved = [*row.atoms[1:], row.atoms[0]]
        untouched_fields = ("memory_usage_weight", "under_use")
        shifted = [
            a.model_copy(
                update={
                    "usage_rubric": b.usage_rubric
                    | {k: a.usage_rubric[k] for k in untouched_fields}
                }
            )
            for a, b in zip(row.atoms, moved, strict=True)
        ]
        spoiled = rebuilt(row, shifted)
        assert "rubric_alignment" in rules(spoiled) and "structure" not in rules(spoiled)


@pytest.mark.parametrize(
    ("rubric_text", "marks"),
    [
        ("Calls `fetch all` twice.", ["`fetch all`"]),
        ("Uses read_csv and toJson().", ["read_csv", "toJson"]),
        ("Takes 48.75 mmol or 12 drops.", ["48.75", "12"]),
        ("Takes 3 drops.", []),
        ("Names PostgreSQL.", ["PostgreSQL"]),
        ("Names the Kayak, and 1,200 euros.", []),
        ("", []),
    ],
)
def test_marks_that_the_record_has_not(rubric_text, marks):
    row = example("The user owns a kayak for 1,200 euros.")
    row = with_atom(row, row.atoms[0], usage_rubric={"correct_use": rubric_text})
    assert strange_marks(ExampleView(row), "p1_a1") == marks


VOCABULARY = ["fox", "hen", "yard", "noise", "fence", "dog", "barn"]
short = st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=6).map(
    lambda ws: "The user has " + " ".join(ws)
)


@given(short, short)
def test_independence_agrees_with_the_builder_where_words_have_no_endings(one, other):
    is_flagged = "independence" in rules(example(one, other), "independence")
    assert is_flagged == too_close(one, other)


@pytest.mark.parametrize(
    ("texts", "memory", "rule"),
    [
        (["The user owns 5 kayaks."], "The user owns five kayaks.", ""),
        (["The user owns five kayaks."], "The user owns 5 kayaks.", ""),
        (["The user moved in the tenth week."], "The user moved in week ten.", ""),
        (["The user has two cats."], "Both cats are the user's.", ""),
        (["The user paid 1,200 euros."], "The user paid 1200 euros.", ""),
        (["The user owns 5 kayaks."], "The user owns 6 kayaks.", "block_numbers"),
        (["The user owns 5 kayaks."], "The user owns kayaks.", "block_numbers"),
        (["The user owns kayaks."], "The user owns 12 kayaks.", "block_numbers"),
        (
            ["The user owns a kayak.", "The user bakes bread."],
            "The user owns a kayak.",
            "block_keeps_atoms",
        ),
        (
            ["The user owns a kayak.", "The user bakes bread."],
            "A kayak is the user's; bread is what he bakes.",
            "",
        ),
        (
            ["The user owns a kayak."],
            "The user owns a kayak. Every autumn geese rest on the pond.",
            "block_adds_nothing",
        ),
        (["The user does not eat fish."], "The user eats fish.", "block_negation"),
        (["The user eats fish."], "The user never eats fish.", "block_negation"),
        (["The user does not eat fish."], "The user never eats fish.", ""),
    ],
)
def test_what_a_block_may_say(texts, memory, rule):
    blocks = ("block_numbers", "block_keeps_atoms", "block_adds_nothing", "block_negation")
    assert rules(example(*texts, memory=memory), *blocks) == ({rule} if rule else set())


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("The user’s café in Łódź – “quiet”.", False),
        ("Ångström, ÀÂÃ, Straße, naïve, â, 日本語, 😀", False),
        ("The userâ€™s cafÃ© is quiet.", True),
        ("The user owns a \ufffd kayak.", True),
        ("The user owns a kayak.\x00", True),
        ("The user<|im_start|> owns a kayak.", True),
        ("[INST] The user owns a kayak.", True),
        ("The user has a list [INSTANCE] and <b>.", False),
        ("As an AI language model, I cannot know.", True),
        ("The user owns a kayak\u202e.", True),
    ],
)
def test_damaged_texts(text, broken):
    row = example("The user owns a kayak.")
    assert (
        "text_integrity" in rules(with_text(row, row.blocks[0], text), "text_integrity")
    ) == broken
    assert (
        "text_integrity" in rules(row.model_copy(update={"question": text}), "text_integrity")
    ) == broken


@pytest.mark.parametrize(
    ("text", "is_flagged"),
    [
        ("My kayak is green.", True),
        ("The user said “I love my kayak”.", False),
        ('The note reads "call me".', False),
        ("The variable `my_list` is empty.", False),
        ("The user has type I diabetes.", False),
    ],
)
def test_the_first_person(text, is_flagged):
    assert ("first_person" in rules(example(text), "first_person")) == is_flagged


@pytest.mark.parametrize(
    ("level", "weight", "under", "wrong"),
    [
        ("A", "none", "not applicable", 0),
        ("A", "none", "A has no under-use.", 0),
        ("A", "none", "N/A", 0),
        ("A", "none", "Nothing is said of the kayak.", 1),
        ("A", "supporting", "not_applicable_for_A", 1),
        ("B", "supporting", "The kayak is not applicable to the plan and missing.", 0),
        ("B", "supporting", "Not applicable.", 1),
        ("C", "none", "n/a", 2),
        ("C", "controlling", "Silence about the kayak.", 0),
    ],
)
def test_level_against_rubric(level, weight, under, wrong):
    row = example("The user owns a kayak.")
    rubric = {"memory_usage_weight": weight, "under_use": under}
    row = with_atom(row, row.atoms[0], ideal=Level.parse(level), usage_rubric=rubric)
    assert len(lint_example(row, ["level_vs_rubric"])) == wrong


@pytest.mark.parametrize(
    "text, under",
    [
        (
            "Der Nutzer hat ein Kajak, das er mit der Familie von nebenan auf dem See fährt.",
            "Entfällt.",
        ),
        ("用户有一条皮划艇，是和邻居一起买的。", "不适用。"),
        ("У пользователя есть каяк, и он стоит в гараже.", "Не применимо."),
    ],
)
def test_other_languages_say_not_applicable_in_their_own_words(text, under):
    row = example(text)
    for level, weight, under_use, wrong in (
        ("A", "none", under, 0),
        ("B", "supporting", "Not applicable.", 1),
    ):
        rubric = {"memory_usage_weight": weight, "under_use": under_use}
        other = with_atom(row, row.atoms[0], ideal=Level.parse(level), usage_rubric=rubric)
        assert len(lint_example(other, ["level_vs_rubric"])) == wrong


@pytest.mark.parametrize("name", RUBRIC_FIELDS)
@pytest.mark.parametrize("value", [None, "", "  ", [], [" "], 3])
def test_every_rubric_field_is_needed(name, value):
    assert rules(with_rubric(RECORD, RECORD.atoms[0], **{name: value}), "rubric_fields") == {
        "rubric_fields"
    }
    assert rules(with_atom(RECORD, RECORD.atoms[0], usage_rubric=None), "rubric_fields") == {
        "rubric_fields"
    }


def test_evidence_is_looked_for_only_where_there_is_a_source():
    row = example("The user owns a kayak.")
    grounded = with_atom(row, row.atoms[0], evidence="my kayak", origin="grounded")
    assert LINTS["evidence_substring"].check(grounded) is None
    for source, finding_count in (
        ("I love my  kayak.", 0),
        ("I love my kayaks.", 1),
        ("A kayak is mine.", 1),
    ):
        assert (
            len(
                LINTS["evidence_substring"].check(grounded.model_copy(update={"raw_query": source}))
            )
            == finding_count
        )
    bare = with_atom(row, row.atoms[0], origin="grounded").model_copy(
        update={"source_context": "I love my kayak."}
    )
    assert "no evidence" in LINTS["evidence_substring"].check(bare)[0].found
    noise = with_atom(row, row.atoms[0], origin="noise").model_copy(
        update={"raw_query": "A kayak."}
    )
    assert LINTS["evidence_substring"].check(noise) == []


def test_order_within_a_passage():
    texts = ["The user owns a kayak.", "The user bakes bread.", "The user sings."]
    assert rules(example(*texts), "atom_order") == set()
    row = example(*texts)
    turned = rebuilt(
        row, blocks=[row.blocks[0].model_copy(update={"atom_ids": ["p1_a3", "p1_a1", "p1_a2"]})]
    )
    assert [f.item for f in lint_example(turned, ["atom_order"])] == ["atom 'p1_a1'"]


@settings(max_examples=40)
@given(
    st.sampled_from(RECORDS),
    st.sampled_from(["memory_text", "text", "question", "rubric"]),
    st.text(max_size=80),
)
def test_no_text_makes_a_check_fail(row, field, text):
    if field == "memory_text":
        row = with_text(row, row.blocks[0], text)
    elif field == "text":
        row = with_atom(row, row.atoms[0], text=text)
    elif field == "rubric":
        row = with_rubric(row, row.atoms[0], correct_use=text, observable_checks=[text])
    else:
        row = row.model_copy(update={"question": text})
    for finding in lint_example(row):
        assert finding.rule in LINTS and finding.example_id == row.id and str(finding)


# Files --------------------------------------------------------------------------------------------


def test_a_file_is_linted_with_lines_and_counts(tmp_path):
    rng = random.Random(0)
    spoiled = plant(RECORD, "wrong_action", rng)
    path = write_jsonl(tmp_path / "data.jsonl", [*RECORDS[:3], spoiled])
    result = lint_files([path])
    assert (
        result.rows == 4
        and result.flagged["action_level"] == 1
        and result.checked["action_level"] == 4
    )
    assert [(f.line, f.file, f.example_id) for f in result.errors] == [(4, str(path), RECORD.id)]
    assert result.checked["evidence_substring"] == 0 and result.checked["split_duplicates"] == 0
    data = result.to_dict()
    assert (
        json.loads(json.dumps(data)) == data
        and data["errors"] == 1
        and data["rules"]["action_level"]["rows_flagged"] == 1
    )
    assert "action_level" in result.text() and "4 rows in 1 file: 1 error" in result.text()


def test_the_same_findings_in_memory_and_from_files(tmp_path):
    rng = random.Random(3)
    rows = [
        plant(row, name, rng) or row
        for row, name in zip(SETS["invented"], list(DEFECTS) * 7, strict=False)
    ]
    rows = [row for row in rows if all(a.text for a in row.atoms)]
    rows = [row.model_copy(update={"id": f"{i}"}) for i, row in enumerate(rows)]
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(row.to_json() + "\n" for row in rows)
    one = lint_files([path])
    two = lint_splits({str(path): rows})
    assert one.findings == two.findings and one.flagged == two.flagged and len(one.findings) > 60
    each = [finding for row in rows for finding in lint_example(row)]
    assert [
        (f.rule, f.example_id, f.item) for f in one.findings if LINTS[f.rule].scope == "row"
    ] == [(f.rule, f.example_id, f.item) for f in each]


def test_processes_change_nothing_in_the_result(tmp_path):
    rng = random.Random(3)
    rows = []
    for number, (row, name) in enumerate(zip(SETS["invented"], list(DEFECTS) * 7, strict=False)):
        spoiled = plant(row, name, rng) or row
        rows.append(spoiled.model_copy(update={"id": str(number)}))
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    with open(path, "ab") as file:
        file.write(b'{"id": 4}\n' + RECORDS[2].to_json().encode() + b"\n")

    @lint("warning")
    def own_check(view):
        """An id of one character."""
        return [("id", view.example.id, "two characters")] if len(view.example.id) == 1 else []

    try:
        alone = lint_files([path])
        beside = lint_files([path], processes=2)
    finally:
        del LINTS["own_check"]
    assert beside.findings == alone.findings and len(alone.findings) > 60
    assert beside.checked == alone.checked and beside.flagged == alone.flagged
    assert beside.rows == alone.rows == len(rows) + 2
    assert alone.flagged["own_check"] == 10 and len(alone.of("structure")) > 0
    with pytest.raises(ValueError, match=r"found processes=0; allowed: 1 or more"):
        lint_files([path], processes=0)


def test_splits_share_no_question_and_no_id():
    again = RECORD.model_copy(update={"id": "again", "question": RECORD.question.upper() + "!"})
    near = RECORD.model_copy(
        update={"id": "near", "question": RECORD.question.replace("Please", "Now please")}
    )
    assert (
        lint_splits({"train": [RECORD, again]}, ["split_duplicates"]).checked["split_duplicates"]
        == 0
    )
    for copy in (again, near):
        result = lint_splits({"train": RECORDS, "test": [copy]}, ["split_duplicates", "unique_ids"])
        assert [f.rule for f in result.errors] == ["split_duplicates"] and "train" in result.errors[
            0
        ].found
    result = lint_splits({"train": RECORDS, "test": [RECORD]})
    assert {f.rule for f in result.errors} == {"split_duplicates", "unique_ids"}
    assert lint_splits({"train": RECORDS[:4], "test": RECORDS[5:]}).errors == []


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"3",
        b'{"id": 4}',
        b"\xff\xfe{}",
        b'{"id": "x", "domain": "general", "question": "q", "memories": 5}',
    ],
)
def test_a_row_that_is_no_example_is_an_error_whatever_was_asked(tmp_path, line):
    path = write_jsonl(tmp_path / "data.jsonl", RECORDS[:2])
    with open(path, "ab") as file:
        file.write(line + b"\n" + RECORDS[2].to_json().encode() + b"\n")
    for names in (None, ["question_leak"]):
        result = lint_files([path], names)
        assert result.rows == 4 and {f.rule for f in result.errors} == {"structure"}
        assert {f.line for f in result.errors} == {3} and result.flagged["structure"] == 1
    assert result.checked["question_leak"] == 3


def test_bad_arguments(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", RECORDS[:1])
    with pytest.raises(ValueError, match=r"'speling'; allowed: structure"):
        lint_files([path], ["speling"])
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        lint_files([tmp_path / "none.jsonl"])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no row in .*empty\.jsonl"):
        lint_files([tmp_path / "empty.jsonl"])
    with pytest.raises(ValueError, match=r"sentence model: found .*nowhere"):
        lint_files([path], model=tmp_path / "nowhere")
    for again in (path, tmp_path / ".." / tmp_path.name / path.name):
        with pytest.raises(ValueError, match=r"found .*data\.jsonl twice.*each file once"):
            lint_files([path, again])


def test_a_check_named_twice_is_made_once(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", RECORDS[:2])
    result = lint_files([path], ["unique_ids", "unique_ids"])
    assert [x.name for x in result.lints] == ["unique_ids"] and result.checked["unique_ids"] == 2


def test_rules_can_be_chosen_and_added():
    assert [check.name for check in choose_lints(["atom_order", "structure"])] == [
        "atom_order",
        "structure",
    ]
    assert len(choose_lints()) == len(LINTS)

    @lint("warning")
    def quiet(view):
        """Nothing is shouted."""
        return (
            [("question", view.example.question, "lower case")]
            if view.example.question.isupper()
            else []
        )

    try:
        loud = RECORD.model_copy(update={"question": "HELP!"})
        assert rules(loud, "quiet") == {"quiet"} and rules(RECORD) == set()
        assert isinstance(LINTS["quiet"], Lint) and LINTS["quiet"].what == "Nothing is shouted."
    finally:
        del LINTS["quiet"]


def test_each_check_says_what_it_looks_for():
    for check in LINTS.values():
        assert re.fullmatch(r"[A-Z][^\n]+\.", check.what), check.name
        assert check.severity in ("error", "warning") and check.scope in ("row", "files")


def test_a_record_without_rubrics_has_a_warning_and_no_error():
    atoms = [atom.model_copy(update={"usage_rubric": None}) for atom in RECORD.atoms]
    findings = lint_example(RECORD.model_copy(update={"atoms": atoms}))
    assert [(f.rule, f.severity) for f in findings] == [("rubrics_absent", "warning")]


def test_old_rubrics_with_other_keys_are_read():
    old = {
        "controlling_factor": "the kayak",
        "nested": {"a": 1},
        "correct_use": "Names the kayak.",
        "maximum_footprint": None,
    }
    row = example("The user owns a kayak.")
    findings = lint_example(with_atom(row, row.atoms[0], usage_rubric=old))
    assert {f.rule for f in findings} == {"rubric_fields", "all_ignore"}


# Meaning ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """A sentence model that is a bag of random word vectors."""
    import torch
    from transformers import BertConfig, BertModel

    from memcalib.products.micro.policy import build_tokenizer

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    size = {
        "hidden_size": 32,
        "num_attention_heads": 1,
        "num_hidden_layers": 0,
        "intermediate_size": 1,
    }
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **size))
    model.embeddings.position_embeddings.weight.data.zero_()
    model.embeddings.token_type_embeddings.weight.data.zero_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_vectors_have_length_one_and_padding_changes_nothing(bag):
    encode = sentence_vectors(bag)
    texts = ["The user must avoid garlic.", "Plan a dinner."]
    together = encode(texts)
    alone = encode(texts[1:])
    assert abs(together @ together.T).diagonal() == pytest.approx([1, 1], abs=1e-5)
    assert together[1] == pytest.approx(alone[0], abs=1e-5)


def test_a_query_that_means_an_atom_is_a_warning(bag, tmp_path):
    clean = SETS["micro"][0]
    leaking = clean.model_copy(update={"question": clean.atoms[0].text})
    path = write_jsonl(tmp_path / "data.jsonl", [leaking])
    result = lint_files([path], ["structure"], model=bag, limits=LintLimits(meaning=0.99))
    assert [(f.rule, f.severity, f.item) for f in result.findings] == [
        ("question_meaning", "warning", f"atom {clean.atoms[0].atom_id!r}")
    ]
    assert "question_meaning" not in LINTS


# Size ---------------------------------------------------------------------------------------------


def test_every_row_of_a_file_is_linted(tmp_path):
    rows = [row.model_copy(update={"id": f"{row.id}-{i}"}) for i in range(12) for row in RECORDS]
    result = lint_files([write_jsonl(tmp_path / "data.jsonl", rows)])
    assert isinstance(result, LintResult) and result.rows == 12 * len(RECORDS)


def test_words_and_texts_that_come_again_are_read_once(tmp_path):
    """Most of the time of a lint went into the same words and texts, check after check."""
    file = write_jsonl(tmp_path / "data.jsonl", RECORDS)
    readers = (
        lint_page._stem,
        grounding._stems,
        grounding._located_numbers,
    )
    lint_files([file])
    before = [reader.cache_info() for reader in readers]
    lint_files([file])
    after = [reader.cache_info() for reader in readers]
    for first, second in zip(before, after, strict=True):
        assert second.hits > first.hits and second.misses == first.misses, (first, second)


@pytest.mark.parametrize(
    "piece", ["a ", "x_", "I ", "1,", "not ", "“", "`", "ÃÂ", "a.", "aB", "(", "The user. "]
)
def test_a_megabyte_in_one_text_is_linted(piece):
    row = example(
        "The user owns a kayak.",
        memory="The user owns a kayak. " + piece * (1_000_000 // len(piece)),
    )
    row = with_atom(
        row, row.atoms[0], usage_rubric={"correct_use": piece * (200_000 // len(piece))}
    )
    findings = lint_example(row)
    assert findings and all(len(str(finding)) < 2_000 for finding in findings)


def test_a_conversation_with_times_scores_and_reasons_that_make_sense_passes():
    talk = planted_defects.with_talk(RECORD)
    dated = planted_defects.with_times(talk, "2026-03-02T23:00", "2025-01-01", None)
    scored = []
    for k, block in enumerate(dated.blocks):
        scored.append(block.model_copy(update={"score": 0.9 - 0.1 * k}))
    sensible = dated.model_copy(update={"blocks": scored, "group": "user 1"})
    reason = "It may shape the tone of the whole letter."
    level = Level((RECORD.atoms[0].ideal + 1) % 3)
    sensible = with_atom(
        sensible, sensible.atoms[0], alternative=[Alternative(level=level, reason=reason)]
    )
    assert lint_example(sensible) == []
    other = RECORDS[5].model_copy(update={"group": "user 2"})
    assert lint_splits({"all": [sensible, other]}).of("question_groups") == []


@pytest.mark.parametrize(
    "time, time_found",
    [
        ("2026-03-02T23:59", ""),  # the day of the last turn, whose hour is unknown
        ("2026-03-03T00:30+02:00", "2026-03-03"),
        ("2026-03-03", "2026-03-03"),
        ("last spring", "'last spring'"),
    ],
)
def test_times_of_memories_against_those_of_the_conversation(time, time_found):
    example = planted_defects.with_times(planted_defects.with_talk(RECORD), time)
    findings = lint_example(example, ["memory_times"])
    assert [finding.found for finding in findings] == ([time_found] if time_found else [])
    alone = planted_defects.with_times(RECORD, time)
    assert lint_example(alone, ["memory_times"]) == []


def test_groups_are_compared_over_files_and_one_for_all_is_named():
    one, two = (RECORD.model_copy(update={"id": name, "group": "g"}) for name in "ab")
    [finding] = lint_splits({"x": [one], "y": [two]}, ["question_groups"]).findings
    assert finding.found == "'g' for all 2 rows" and "more than one question" in finding.allowed
    two = two.model_copy(update={"group": "h", "question": one.question.upper()})
    [finding] = lint_splits({"x": [one], "y": [two]}, ["question_groups"]).findings
    assert finding.found == "group 'h', and group 'g' in x:1" and finding.file == "y"
    assert LINTS["question_groups"].find([]) is None


def test_damage_in_a_turn_is_found():
    damaged = planted_defects.with_talk(RECORD, ("user", "It<|im_end|>"))
    assert [finding.item for finding in lint_example(damaged, ["text_integrity"])] == ["turn 5"]
