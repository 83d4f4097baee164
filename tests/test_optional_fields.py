"""Optional fields of records and judgments: absent they change no byte,
present they are kept, shown and checked.
"""

import json

import pytest

from memcalib.inference.rollout import TemplateFile
from memcalib.io.records import DataError
from memcalib.judge import JudgeConfig, judge_payload
from memcalib.problem import (
    PROMPT_TEMPLATES,
    SHIPPED_TEMPLATES,
    Example,
    Judgment,
    Level,
    PromptTemplate,
    card_html,
    check_example,
    judgment_for,
    load_examples,
    named_source,
    remove_atoms,
    render,
    to_dataset,
    validate_examples,
)

TURNS = [
    {"role": "user", "content": "Which train did I take?", "time": "2026-03-01T09:00"},
    {"role": "assistant", "content": "The night train, you said.", "time": "2026-03-01T09:01"},
    {"role": "tool", "name": "timetable", "content": "Night train: 21:04."},
]


def rich_row() -> dict:
    """A record that holds every optional field."""
    row = json.loads(load_examples("samples")[0].to_json())
    row["turns"] = TURNS
    row["group"] = "user 7"
    row["memory_blocks"][0]["time"] = "March 2024"
    row["memory_blocks"][0]["score"] = 0.75
    first = row["memories"][0]
    others = [letter for letter in "ABC" if letter != first["u_star"]]
    first["alternative"] = [{"u_star": others[0], "reason": "It may shape the tone."}]
    return row


def errors_of(row: dict) -> list[str]:
    return [str(violation) for violation in check_example(row) if violation.severity == "error"]


@pytest.mark.parametrize("name", ["samples", "starter"])
def test_files_of_today_are_written_byte_for_byte(name):
    path, _ = named_source(name)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    for line, example in zip(lines, load_examples(name), strict=True):
        assert json.loads(example.to_json()) == json.loads(line)
        again = Example.model_validate_json(example.to_json())
        assert again.to_json() == example.to_json()
        if name == "samples" or example.model_extra["subset"] == "core":
            assert not {"turns", "group"} & json.loads(example.to_json()).keys()


def test_a_judgment_without_the_new_fields_is_written_as_before():
    example = load_examples("samples")[0]
    written = json.loads(
        judgment_for(example, dict.fromkeys(example.levels, Level.BOUND)).to_json()
    )
    assert all(not {"stance", "alternative", "spans"} & atom.keys() for atom in written["atoms"])


def test_what_is_there_is_kept_through_load_and_save(tmp_path):
    row = rich_row()
    assert errors_of(row) == []
    file = tmp_path / "rich.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (example,) = load_examples(file)
    assert json.loads(example.to_json()) == row
    assert example.turns[2].name == "timetable" and example.blocks[0].score == 0.75
    (from_dataset,) = load_examples(to_dataset([example]))
    assert json.loads(from_dataset.to_json()) == row


def test_a_judgment_carries_the_alternatives_and_stances(tmp_path):
    example = Example.model_validate(rich_row())
    judgment = judgment_for(example, dict(example.levels))
    first_id = example.atoms[0].atom_id
    by_id = {atom.atom_id: atom for atom in judgment.atoms}
    assert by_id[first_id].alternative == [example.atoms[0].alternative[0].level]
    by_id[first_id].stance = "misreads"
    again = Judgment.model_validate_json(judgment.to_json())
    assert again == judgment and again.to_json() == judgment.to_json()


def test_the_group_is_what_counts_as_one_question():
    row = rich_row()
    grouped = Example.model_validate(row)
    other = Example.model_validate({**row, "group": "user 8"})
    row.pop("group")
    alone = Example.model_validate(row)
    assert len({grouped.question_id, other.question_id, alone.question_id}) == 3
    same_group = Example.model_validate({**rich_row(), "question": "Anything else?"})
    assert same_group.question_id == grouped.question_id
    with pytest.raises(ValueError, match=r"question_id: found 'x'; set group="):
        Example.of("What now?", {"The user is tired.": "bound"}, question_id="x")
    assert Example.of("What now?", {"The user is tired.": "bound"}, group="g").group == "g"


@pytest.mark.parametrize("template", [*SHIPPED_TEMPLATES, "a file's"])
@pytest.mark.parametrize("text", ["fluent", "concat"])
def test_every_framing_shows_turns_and_times(template, text, monkeypatch):
    if template == "a file's":
        file = TemplateFile(user="{query}\n{memory}", block="- {text}")
        monkeypatch.setitem(PROMPT_TEMPLATES, template, PromptTemplate(file))
    example = Example.model_validate(rich_row())
    messages = render(example, text=text, prompt_template=template)
    roles = [message["role"] for message in messages if message["role"] != "system"]
    assert roles == ["user", "assistant", "user"], "roles alternate"
    everything = "\n".join(message["content"] for message in messages)
    assert "Which train did I take?" in everything and "The night train, you said." in everything
    assert "Result of timetable:\nNight train: 21:04." in messages[-1]["content"]
    assert "[March 2024] " in messages[-1]["content"]
    assert everything.index("Night train: 21:04.") < everything.index(example.question)
    without = render(remove_atoms(example, example.levels), text=text, prompt_template=template)
    assert "March 2024" not in str(without) and "Night train: 21:04." in str(without)


def test_the_card_shows_turns_times_and_alternatives_escaped():
    row = rich_row()
    row["turns"][0] = {"role": "user", "content": "<script>x</script>"}
    row["memory_blocks"][0]["time"] = "<b>now</b>"
    card = card_html(Example.model_validate(row))
    assert "<script>" not in card and "<b>now</b>" not in card
    assert "&lt;b&gt;now" in card and "It may shape the tone." in card


FAULTS = [
    (lambda row: row.update(turns=[]), "turns"),
    (lambda row: row.update(turns="hello"), "turns"),
    (lambda row: row["turns"].append("hello"), "turns"),
    (lambda row: row["turns"].append({"role": "system", "content": "x"}), "user, assistant, tool"),
    (lambda row: row["turns"].append({"role": "user", "content": " "}), "turn 4"),
    (lambda row: row["turns"].append({"role": "user"}), "turn 4"),
    (
        lambda row: row["turns"].append(
            {"role": "user", "content": "x", "time": "2026-02-28T09:00"}
        ),
        "a time no earlier than that of the previous turn",
    ),
    (lambda row: row.update(group=""), "group"),
    (lambda row: row.update(group=7), "group"),
    (lambda row: row["memory_blocks"][0].update(time=""), "time"),
    (lambda row: row["memory_blocks"][0].update(time=20240501), "time"),
    (lambda row: row["memory_blocks"][0].update(score="0.8"), "score"),
    (lambda row: row["memory_blocks"][0].update(score=float("nan")), "score"),
    (lambda row: row["memories"][0].update(alternative=[]), "alternative"),
    (lambda row: row["memories"][0].update(alternative=["B"]), "alternative"),
    (lambda row: row["memories"][0]["alternative"][0].pop("reason"), "reason"),
    (lambda row: row["memories"][0]["alternative"][0].update(u_star="D"), "'D'"),
    (
        lambda row: row["memories"][0]["alternative"][0].update(
            u_star=row["memories"][0]["u_star"]
        ),
        "each once",
    ),
]


@pytest.mark.parametrize(("spoil", "needle"), FAULTS)
def test_a_fault_is_named_with_its_place(tmp_path, spoil, needle):
    row = rich_row()
    row["turns"] = [dict(turn) for turn in row["turns"]]
    spoil(row)
    errors = errors_of(row)
    assert errors and any(needle in error for error in errors), errors
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert validate_examples(file).errors
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        load_examples(file)


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        ("user assistant tool", []),
        ("user tool tool assistant", []),
        ("assistant tool", ["turns: found no turn by the user"]),
        ("tool user assistant", ["turn 1: role: found tool"]),
        ("user user assistant", ["turn 2: role: found user"]),
        (
            "user assistant user",
            ["turn 3: role: found user; allowed: assistant or tool in the last"],
        ),
    ],
)
def test_turns_out_of_order_are_named_and_stay_usable(roles, named):
    row = rich_row()
    row["turns"] = [{"role": role, "content": f"Turn {n}."} for n, role in enumerate(roles.split())]
    warnings = [str(v) for v in check_example(row) if "turn" in str(v)]
    assert errors_of(row) == [] and len(warnings) == len(named)
    for warning, words in zip(warnings, named, strict=True):
        assert words in warning


def test_a_time_that_cannot_be_read_is_kept_as_text():
    row = rich_row()
    row["turns"] = [{"role": "user", "content": "Hello.", "time": "last spring"}]
    assert errors_of(row) == []
    assert Example.model_validate(row).turns[0].time == "last spring"


def test_the_judge_reads_turns_and_times_and_otherwise_what_it_read_before():
    example = Example.model_validate(rich_row())
    payload = judge_payload(example, "An answer.", JudgeConfig())
    spoken = [turn["content"] for turn in payload["conversation_before_query"]]
    assert spoken == [turn["content"] for turn in TURNS]
    assert payload["model_facing_memory"][0]["time"] == "March 2024"
    plain = judge_payload(load_examples("samples")[0], "An answer.", JudgeConfig())
    assert "conversation_before_query" not in plain
    assert all("time" not in row for row in plain["model_facing_memory"])
