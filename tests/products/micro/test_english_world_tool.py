"""Sheets for blind readers of answers in plain English, and what is made of their replies."""

import json
import random
from argparse import Namespace

import pytest

from memcalib.problem import Level, Rollout
from memcalib.products.micro.english import ENGLISH, answer, english_judge, noisy_levels
from tools import english_world


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sheet of twelve answers with known levels; the last one turns a thing down."""

    def items_of(policies, count, seed, bf16):
        for example in ENGLISH.examples(count, seed, "test"):
            rng = random.Random(example.id)
            response = answer(example, rng, noisy_levels(example, rng, 0.3))
            rollout = Rollout(example_id=example.id, response=response, finish_reason="stop")
            yield "oracle", example, rollout, english_judge(example, response)
        [atom, *_] = example.atoms
        response = f"Skip {atom.usage_rubric['marker']['noun']}."
        rollout = Rollout(example_id=example.id, response=response, finish_reason="stop")
        yield "oracle", example, rollout, english_judge(example, response)

    monkeypatch.setattr(english_world, "items_of", items_of)
    options = Namespace(policies=["oracle"], count=11, seed=3, bf16=False, out=tmp_path / "sheet")
    english_world.sheet(options)
    return options.out


def read(folder, answers):
    file = folder.parent / "answers.json"
    file.write_text(json.dumps(answers))
    return english_world.read(Namespace(folder=folder, answers=file))


def test_a_sheet_tells_nothing_and_a_reader_who_agrees_agrees(folder, capsys):
    rows = [json.loads(line) for line in (folder / "sheet.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        assert row.keys() == {"item", "request", "memory", "answer", "atoms"}
    verdicts = json.loads((folder / "verdicts.json").read_text())
    answers = {}
    for item, verdict in verdicts.items():
        answers[item] = {name: level for name, (level, _) in verdict["atoms"].items()}
    unscored = sum(level == "?" for levels in answers.values() for level in levels.values())
    assert unscored == 1
    assert read(folder, answers) == 0
    said = capsys.readouterr().out
    assert "100.0%" in said and "unscored by the judge 1," in said
    item, name = next(
        (i, n) for i, levels in answers.items() for n, x in levels.items() if x == "A"
    )
    answers[item][name] = "C"
    assert read(folder, answers) == 0
    assert f"{item} {name}: judge A (never named), reader C" in capsys.readouterr().out


@pytest.mark.parametrize("reply", [None, "D", Level.BOUND])
def test_a_reply_that_is_none_is_named(folder, capsys, reply):
    answers = {"i001": {"a1": reply}}
    assert read(folder, answers) == 1
    assert "i001 a1: found" in capsys.readouterr().out
