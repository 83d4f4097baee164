"""The records: every broken invariant is found and named;
removal, rendering and round trips are exact.
"""

import copy
import gzip
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib import problem as p
from memcalib.io.records import read_jsonl, write_jsonl

RECORDS = p.sample_records()


def raw(index: int = 0) -> dict:
    return json.loads(RECORDS[index].to_json())


def broken(change) -> list[p.Violation]:
    row = raw()
    change(row)
    return [v for v in p.check_example(row) if v.severity == "error"]


def test_sample_records_are_intact():
    for record in RECORDS:
        assert p.check_example(json.loads(record.to_json())) == []
        weights = set()
        for atom in record.atoms:
            assert len(atom.usage_rubric) == 9, (record.id, atom.atom_id)
            weights.add(atom.usage_rubric["memory_usage_weight"])
        assert {"none", "controlling"} <= weights


def second_home(row):
    row["memory_blocks"][1]["atom_ids"].append(row["memory_blocks"][0]["atom_ids"][0])


def repeat_atom(row):
    row["memories"].append(copy.deepcopy(row["memories"][0]))


FAULTS = {
    "unknown level": (lambda r: r["memories"][0].update(u_star="X"), "u_star", "'X'"),
    "number level": (lambda r: r["memories"][0].update(u_star=1), "u_star", "1"),
    "missing level": (lambda r: r["memories"][0].pop("u_star"), "u_star", "nothing"),
    "two blocks": (second_home, "atom in blocks", "blocks"),
    "no block": (lambda r: r["memory_blocks"][0]["atom_ids"].pop(), "atom in blocks", "no block"),
    "wrong parent": (
        lambda r: r["memories"][0].update(parent_memory_id="zz"),
        "parent_memory_id",
        "'zz'",
    ),
    "repeated atom": (repeat_atom, "atom_id", "2 times"),
    "repeated in block": (
        lambda r: r["memory_blocks"][0]["atom_ids"].append(r["memory_blocks"][0]["atom_ids"][0]),
        "atom_ids",
        "2 times",
    ),
    "repeated block": (
        lambda r: r["memory_blocks"].append(copy.deepcopy(r["memory_blocks"][0])),
        "parent_memory_id",
        "2 times",
    ),
    "empty text": (lambda r: r["memories"][0].update(text=" "), "text", "' '"),
    "null text": (lambda r: r["memories"][0].update(text=None), "text", "None"),
    "empty question": (lambda r: r.update(question=""), "question", "''"),
    "no question": (lambda r: r.pop("question"), "question", "nothing"),
    "empty domain": (lambda r: r.update(domain=""), "domain", "''"),
    "number id": (lambda r: r.update(id=7), "id", "7"),
    "concat": (
        lambda r: r["memory_blocks"][0].update(atomic_concat_text="x"),
        "atomic_concat_text",
        "'x'",
    ),
    "no concat": (
        lambda r: r["memory_blocks"][0].pop("atomic_concat_text"),
        "atomic_concat_text",
        "None",
    ),
    "no fluent text": (lambda r: r["memory_blocks"][0].update(memory_text=""), "memory_text", "''"),
    "no blocks": (lambda r: r.update(memory_blocks=[]), "memory_blocks", "[]"),
    "blocks no list": (lambda r: r.update(memory_blocks={}), "memory_blocks", "{}"),
    "atoms no objects": (lambda r: r["memories"].append(3), "memories", "1 entry"),
    "unknown atom": (
        lambda r: r["memory_blocks"][0]["atom_ids"].append("ghost"),
        "atom_ids",
        "'ghost'",
    ),
    "atom ids of numbers": (
        lambda r: r["memory_blocks"][0].update(atom_ids=[1, [2]]),
        "atom_ids",
        "1",
    ),
    "wrong action": (
        lambda r: r["memories"][0].update(u_star="A", memory_action="apply"),
        "memory_action",
        "'apply'",
    ),
    "rubric no object": (
        lambda r: r["memories"][0].update(usage_rubric="x"),
        "usage_rubric",
        "'x'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name):
    change, rule, value_found = FAULTS[name]
    violations = broken(change)
    matching = [v for v in violations if v.rule == rule and value_found in v.found]
    assert matching, [str(v) for v in violations]
    assert matching[0].allowed
    assert matching[0].example_id == ("" if name == "number id" else raw()["id"])


def test_all_faults_are_listed_not_the_first():
    row = raw()
    for change in (
        FAULTS["unknown level"][0],
        FAULTS["empty question"][0],
        FAULTS["concat"][0],
        FAULTS["no block"][0],
    ):
        change(row)
    rules = {v.rule for v in p.check_example(row)}
    assert {"u_star", "question", "atomic_concat_text", "atom in blocks"} <= rules


@pytest.mark.parametrize("row", [None, 3, "x", [], [1]])
def test_a_record_must_be_an_object(row):
    assert [v.rule for v in p.check_example(row)] == ["record"]


field_names = st.sampled_from(
    [
        "id",
        "domain",
        "question",
        "memories",
        "memory_blocks",
        "atom_ids",
        "atom_id",
        "text",
        "u_star",
        "parent_memory_id",
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(field_names, inner, max_size=6),
    max_leaves=20,
)


@given(json_values)
def test_any_json_is_checked_without_a_crash_and_only_sound_records_pass(row):
    if not [v for v in p.check_example(row) if v.severity == "error"]:
        p.Example.model_validate(row)


def test_all_ignore_is_a_warning_only():
    row = raw()
    for atom in row["memories"]:
        atom.update(u_star="A", memory_action="ignore")
    assert [(v.rule, v.severity) for v in p.check_example(row)] == [("levels", "warning")]


def test_unknown_fields_survive_and_health_alias():
    row = raw()
    row["custom"] = {"deep": [1]}
    row["memories"][0]["note"] = "kept"
    row["domain"] = "health_seed"
    example = p.Example.model_validate(row)
    assert example.domain == "health"
    written = json.loads(example.to_json())
    assert written["custom"] == {"deep": [1]}
    assert written["memories"][0]["note"] == "kept"
    assert written["domain"] == "health_seed"
    row["domain"] = "law"
    assert p.check_example(row) == []


def write(path, lines: list[bytes]):
    path.write_bytes(b"\n".join(lines))
    return path


def test_lines_are_reported_where_they_are(tmp_path):
    good = RECORDS[0].to_json().encode()
    not_utf8 = RECORDS[1].to_json().encode().replace(b"The", b"\xff\xfe", 1)
    lines = [b"\xef\xbb\xbf" + good, b"", b"{oops", not_utf8, good, b"[]"]
    file = write(tmp_path / "x.jsonl", lines)
    validation = p.validate_examples(file)
    lines_and_rules = [(v.line, v.rule) for v in validation.violations]
    assert lines_and_rules == [(3, "json"), (4, "encoding"), (5, "id"), (6, "record")]
    assert validation.examples == 1
    assert all(v.file == str(file) for v in validation.violations)
    with pytest.raises(p.DataError, match=r"x\.jsonl:3: json"):
        p.load_examples(file)
    stream = p.iter_examples(file)
    assert next(stream).id == RECORDS[0].id
    with pytest.raises(p.DataError):
        next(stream)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_file_is_an_error(tmp_path, content):
    (tmp_path / "e.jsonl").write_bytes(content)
    with pytest.raises(p.DataError, match="no records"):
        p.load_examples(tmp_path / "e.jsonl")
    with pytest.raises(p.DataError, match="no records"):
        list(read_jsonl(tmp_path / "e.jsonl", p.Judgment))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "a/b/c", "./nothing"])
def test_missing_file(name):
    with pytest.raises(FileNotFoundError, match="nothing|missing|a/b/c"):
        p.load_examples(name)


def test_gzip_parquet_and_datasets_agree(tmp_path):
    lines = [r.to_json() for r in RECORDS]
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", encoding="utf-8") as f:
        f.write("\n".join(lines))
    assert p.load_examples(tmp_path / "x.jsonl.gz") == RECORDS

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in lines]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    from_parquet = p.load_examples(tmp_path / "x.parquet")
    assert [e.levels for e in from_parquet] == [e.levels for e in RECORDS]

    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    from_dataset = p.load_examples(tmp_path / "saved")
    assert [e.question for e in from_dataset] == [e.question for e in RECORDS]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text("\n".join(lines))
    assert [e.id for e in p.load_examples(tmp_path / "folder")] == [e.id for e in RECORDS]


def test_truncated_gzip_and_bad_parquet(tmp_path):
    whole = gzip.compress("\n".join(r.to_json() for r in RECORDS).encode())
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    rules = {v.rule for v in p.validate_examples(tmp_path / "t.jsonl.gz").errors}
    assert rules & {"gzip", "json"}
    (tmp_path / "t.parquet").write_bytes(b"not parquet")
    assert p.validate_examples(tmp_path / "t.parquet").errors[0].rule == "parquet"


@given(st.integers(0, 8), st.data())
def test_removal_is_exact(index, data):
    example = RECORDS[index]
    atom_ids = list(example.levels)
    removed = set(data.draw(st.lists(st.sampled_from(atom_ids), unique=True)))
    shorter = p.remove_atoms(example, removed)
    assert list(shorter.levels) == [i for i in atom_ids if i not in removed]
    numbers = {b.parent_memory_id: b.number for b in example.blocks}
    for block in shorter.blocks:
        assert block.number == numbers[block.parent_memory_id]
        texts = [example.atom(i).text.strip() for i in block.atom_ids]
        assert block.atomic_concat_text == " ".join(texts)
    untouched = [b for b in example.blocks if not removed & set(b.atom_ids)]
    assert [b for b in shorter.blocks if b in untouched] == untouched
    assert example == RECORDS[index]


def test_removing_everything_leaves_the_query_alone():
    bare = p.remove_atoms(RECORDS[0], RECORDS[0].levels)
    assert p.render(bare)[-1]["content"] == f"Query:\n{RECORDS[0].question}"


def test_render_refuses_unknown_options():
    with pytest.raises(ValueError, match="'loose'.*fluent, concat"):
        p.render(RECORDS[0], "loose")
    with pytest.raises(ValueError, match="'fancy'.*plain"):
        p.render(RECORDS[0], prompt_template="fancy")


def test_braces_in_memory_are_text():
    row = raw()
    row["question"] = "What does {question} and %s mean? {0}"
    assert "{question} and %s" in p.render(p.Example.model_validate(row))[-1]["content"]


def test_neutralised_tokens_never_become_ids(tmp_path):
    from memcalib.products.micro.policy import build_tokenizer

    tokenizer = build_tokenizer()
    control_ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    clean = p.encode_prompt(tokenizer, [{"role": "user", "content": "hello"}])
    attack = "".join(tokenizer.all_special_tokens)
    hostile = p.encode_prompt(tokenizer, [{"role": "user", "content": f"hello {attack}"}])
    control_ids_in_clean = [i for i in clean if i in control_ids]
    control_ids_in_hostile = [i for i in hostile if i in control_ids]
    assert len(control_ids_in_hostile) == len(control_ids_in_clean)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        p.encode_prompt(tokenizer, [{"role": "user", "content": "x"}])


def test_html_card_escapes_everything():
    row = raw()
    row["question"] = "<script>alert(1)</script>"
    row["memory_blocks"][0]["memory_text"] = "<img src=x onerror=y>"
    row["id"] = "../../etc/<b>"
    card = p.card_html(p.Example.model_validate(row))
    for markup in ("<script", "<img", "<b>/"):
        assert markup not in card
    assert "&lt;script&gt;" in card


def test_judgments_are_checked_against_their_example():
    example = RECORDS[0]
    fine = p.judgment_for(example, example.levels)
    assert p.check_judgment(example, fine) is fine
    assert fine.scored and fine.over == fine.under == 0
    first, *others = fine.atoms
    ghost = p.AtomJudgment(atom_id="ghost", ideal="A", actual="A")
    with pytest.raises(p.DataError, match="'ghost'"):
        p.check_judgment(example, fine.model_copy(update={"atoms": [*fine.atoms, ghost]}))
    with pytest.raises(p.DataError, match="missing"):
        p.check_judgment(example, fine.model_copy(update={"atoms": others}))
    flipped = first.model_copy(update={"ideal": p.Level((first.ideal + 1) % 3)})
    with pytest.raises(p.DataError, match="ideal"):
        p.check_judgment(example, fine.model_copy(update={"atoms": [flipped, *others]}))
    with pytest.raises(p.DataError, match="the example that was asked about"):
        p.check_judgment(example, fine.model_copy(update={"example_id": "another"}))
    with pytest.raises(ValueError, match="found 1 examples and 2"):
        p.judge_all(lambda e, r: fine, [example], ["a", "b"])


def test_unscored_is_null_in_the_file_and_never_a_number(tmp_path):
    example = RECORDS[0]
    unscored = p.judgment_for(example, {})
    write_jsonl(tmp_path / "j.jsonl", [unscored])
    assert '"actual":null' in (tmp_path / "j.jsonl").read_text()
    (read_back,) = read_jsonl(tmp_path / "j.jsonl", p.Judgment)
    assert read_back == unscored and not read_back.scored
    with pytest.raises(ValueError, match="unscored"):
        _ = read_back.over
    with pytest.raises(ValueError, match="more than once"):
        p.Judgment(example_id="x", domain="d", question_id="q", atoms=[unscored.atoms[0]] * 2)


def test_writing_again_replaces_only_when_complete(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, RECORDS[:2])

    def failing():
        yield RECORDS[2]
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        write_jsonl(file, failing())
    assert len(p.load_examples(file)) == 2


def test_nothing_from_a_file_reaches_a_terminal_raw():
    hostile = "\x1b[2Jx\nmemcalib: all fine\u202e\x07"
    row = raw()
    row["id"] = hostile
    row["memory_blocks"][0]["atom_ids"].append(hostile)
    for violation in p.check_example(row):
        assert not set(str(violation)) & set("\x1b\n\x07\u202e")
    assert p.printable("naïve 中文 👍") == "naïve 中文 👍"


def test_found_values_are_short_however_large():
    row = raw()
    row["question"] = ["x" * 10**6] * 100
    assert all(len(str(v)) < 1000 for v in p.check_example(row))


@pytest.mark.parametrize(
    "line", [b'{"id": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"id": "x\\ud800"}']
)
def test_odd_json_is_a_violation_with_its_line(tmp_path, line):
    file = write(tmp_path / "o.jsonl", [RECORDS[0].to_json().encode(), line])
    validation = p.validate_examples(file)
    assert validation.examples == 1
    assert {v.line for v in validation.errors} == {2}


def test_records_that_only_pydantic_refuses_are_violations(tmp_path):
    row = raw()
    row["question"] = "surrogate \ud800"
    (tmp_path / "s.jsonl").write_text(json.dumps(row))
    (error,) = p.validate_examples(tmp_path / "s.jsonl").errors
    assert error.rule == "question" and error.line == 1


def test_a_block_number_in_a_file_changes_nothing():
    row = raw()
    row["memory_blocks"][0]["number"] = "abc"
    assert [b.number for b in p.Example.model_validate(row).blocks] == [
        b.number for b in RECORDS[0].blocks
    ]


def test_damaged_gzip_and_wrong_suffix(tmp_path):
    whole = bytearray(gzip.compress("\n".join(r.to_json() for r in RECORDS).encode()))
    whole[60:90] = b"\x00" * 30
    (tmp_path / "d.jsonl.gz").write_bytes(bytes(whole))
    assert p.validate_examples(tmp_path / "d.jsonl.gz").errors
    (tmp_path / "x.txt").write_text(RECORDS[0].to_json())
    with pytest.raises(ValueError, match=r"unknown suffix '\.txt'"):
        p.load_examples(tmp_path / "x.txt")


def test_self_overlapping_tokens_are_broken():
    for text, token in (
        ("#####", "###"),
        ("abababa", "aba"),
        ("aaa", "a"),
        ("<|im_<|im_end|>end|>", "<|im_end|>"),
    ):
        assert token not in p.neutralise(text, [token])


def test_a_judgment_with_an_error_is_unscored():
    failed = p.judgment_for(RECORDS[0], RECORDS[0].levels, error="no tokens")
    assert not failed.scored
    with pytest.raises(ValueError, match="no tokens"):
        _ = failed.under


def test_an_example_from_plain_texts_is_a_record_like_any_other(tmp_path):
    dinner = p.Example.of(
        "Plan a dinner.",
        {"The user is vegan.": "control", " Tea at five. ": 1},
        {"Chess.": "A"},
        source_id="x",
    )
    assert dinner.levels == {
        "m1_a1": p.Level.CONTROL,
        "m1_a2": p.Level.BOUND,
        "m2_a1": p.Level.IGNORE,
    }
    assert dinner.blocks[0].atomic_concat_text == "The user is vegan. Tea at five."
    assert dinner.blocks[1].number == 2
    assert p.check_example(json.loads(dinner.to_json())) == []
    assert dinner.model_extra["source_id"] == "x"
    with pytest.raises(ValueError, match="allowed: A, B, C"):
        p.Example.of("Plan.", {"The user is vegan.": "decisive"})
    with pytest.raises(p.DataError, match="memories"):
        p.Example.of("Plan.")
    with pytest.raises(p.DataError, match="question"):
        p.Example.of(" ", {"The user is vegan.": "C"})


def test_examples_come_from_rows_and_data_sets_as_from_files(tmp_path):
    write_jsonl(tmp_path / "nine.jsonl", RECORDS)
    dataset = p.to_dataset(RECORDS)
    for source in (tmp_path / "nine.jsonl", dataset, RECORDS):
        assert p.load_examples(source) == RECORDS
    assert p.load_examples([raw(i) for i in range(3)]) == RECORDS[:3]
    dataset.save_to_disk(tmp_path / "saved")
    assert p.load_examples(tmp_path / "saved") == RECORDS
    assert p.load_examples("starter")
    with pytest.raises(p.DataError, match=r"rows:2: .*u_star: found 'D'"):
        row = raw(1)
        row["memories"][0]["u_star"] = "D"
        p.load_examples([raw(0), row])
    with pytest.raises(p.DataError, match="no records"):
        p.load_examples([])


def nested(levels: int):
    value = "deep"
    for _ in range(levels):
        value = {"inner": [value]}
    return value


CANNOT_BE_STORED = {
    "NaN": ({"note": float("nan")}, "note: found nan; allowed: a finite number"),
    "Infinity in a list": ({"scores": [1, float("-inf")]}, "scores.1: found -inf"),
    "half a character": ({"note": "x\ud800"}, r"note: found \\ud800, half a character"),
    "half a character in a name": ({"\udcff": 1}, r"half a character; allowed: whole characters"),
    "a nesting of 300": ({"note": nested(150)}, r"note\.inner\.0.*found more than 100"),
}


@pytest.mark.parametrize("name", CANNOT_BE_STORED)
@pytest.mark.parametrize("in_rubric", [False, True])
def test_what_a_later_step_cannot_carry_is_refused_with_its_place(tmp_path, name, in_rubric):
    """Such a record was read, asked about and paid for,
    and could then not be written or reported.
    """
    fields, message = CANNOT_BE_STORED[name]
    row = raw()
    (row["memories"][0]["usage_rubric"] if in_rubric else row).update(fields)
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{RECORDS[1].to_json()}\n{json.dumps(row)}\n")
    (error,) = p.validate_examples(file).errors
    assert error.line == 2 and error.file == str(file) and error.example_id == row["id"]
    assert re.search(message, str(error))
    assert error.rule.startswith("memories.0.usage_rubric.") == in_rubric
    with pytest.raises(p.DataError, match=r"rows\.jsonl:2"):
        p.load_examples(file)


storable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5).map("x{}".format), storable, max_size=4))
def test_the_copy_of_a_record_hashes_as_its_source(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("copy")
    row = raw()
    row.update(fields)
    (folder / "source.jsonl").write_text(json.dumps(row))
    if p.validate_examples(folder / "source.jsonl").errors:
        return  # infinity
    (source,) = p.load_examples(folder / "source.jsonl")
    write_jsonl(folder / "copy.jsonl", [source])
    (copied,) = p.load_examples(folder / "copy.jsonl")
    assert copied.to_json() == source.to_json()
    assert copied.content_hash == source.content_hash


@pytest.mark.parametrize("letter", ["\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u202e"])
@pytest.mark.parametrize("place", ["id", "atom_id", "parent_memory_id"])
def test_an_id_with_a_character_that_nobody_sees_is_refused(place, letter):
    row = copy.deepcopy(p.sample_records()[0])
    row = row if isinstance(row, dict) else json.loads(row.to_json())
    ids = {"id": row["id"], "atom_id": row["memories"][0]["atom_id"]}
    ids["parent_memory_id"] = row["memory_blocks"][0]["parent_memory_id"]
    hidden = ids[place][:1] + letter + ids[place][1:]
    text = json.dumps(row).replace(json.dumps(ids[place]), json.dumps(hidden))
    violations = p.check_example(json.loads(text))
    [fault] = [each for each in violations if each.rule == place]
    assert "visible characters" in str(fault) and letter not in str(fault)
    assert f"\\u{ord(letter):04x}" in str(fault) or f"\\x{ord(letter):02x}" in str(fault)


def test_every_shipped_template_is_known_without_another_import():
    """A program that imports this module alone can name each of them."""
    program = (
        "from memcalib.problem import SHIPPED_TEMPLATES, render, sample_records; "
        "example = sample_records()[0]; "
        "print(len({str(render(example, prompt_template=name)) for name in SHIPPED_TEMPLATES}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "5\n", done.stderr
