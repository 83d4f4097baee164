"""The recipes of the shipped policies and of their teachers."""

import json

import pytest
import torch

from memcalib.products.micro.policy import build_tokenizer, load_policy, policy_path
from memcalib.products.micro.shipped import (
    COLD_STARTS,
    averaged,
    build_policies,
    build_teachers,
    micro_teacher,
    teacher_of,
)
from memcalib.products.micro.world import WORLDS

torch.set_num_threads(1)
VOCABULARY = build_tokenizer().get_vocab()


def test_every_world_has_a_recipe():
    assert {world.policy for world in WORLDS.values()} == set(COLD_STARTS)
    assert all(recipe["world"] in WORLDS for recipe in COLD_STARTS.values())
    with pytest.raises(KeyError, match="nowhere"):
        build_policies("unused", ["nowhere"])


@pytest.mark.slow
def test_the_recipe_repeats_itself(tmp_path):
    stories = []
    weights = []
    for name in ("a", "b"):
        build_policies(tmp_path / name, ["short"], shorten=0.002)
        folder = tmp_path / name / "cold-short"
        stories.append((folder / "policy.json").read_text())
        weights.append(min(folder.glob("*.safetensors")).read_bytes())
    assert stories[0] == stories[1]
    assert json.loads(stories[0])["base"] == "pretrained"
    assert weights[0] == weights[1]


def test_averages_leave_out_what_is_missing():
    assert averaged([{"step": 1, "answer": 2.0}]) == []
    rows = [{"step": 1}, {"step": 2, "audit": 4.0}]
    assert averaged(rows, every=2) == [{"step": 2, "audit": 4.0}]


def test_reading_lessons_are_the_same_for_the_same_seed_and_move_the_weights():
    def trained(seed):
        return micro_teacher("short", 3, seed=seed, size=4, pool=12).state_dict()

    def same(state, expected):
        return all(torch.equal(weight, expected[name]) for name, weight in state.items())

    taught = trained(0)
    assert same(taught, trained(0))
    assert not same(taught, trained(1))
    assert not same(taught, load_policy("cold-short")[0].state_dict())
    with pytest.raises(KeyError, match="nowhere"):
        micro_teacher("nowhere", 1)


def test_built_teachers_tell_their_story(tmp_path):
    build_teachers(tmp_path, ["short"], count=4, steps=2, size=4, pool=12)
    folder = tmp_path / "teacher-short"
    story = json.loads((folder / "policy.json").read_text())
    assert story["base"] == "cold-short"
    assert story["steps"] == 2
    assert [row["prompt"] for row in story["measured"]] == ["student", "teacher"]
    assert load_policy(folder)[1].get_vocab() == VOCABULARY


@pytest.mark.parametrize("world", ["short", "long"])
def test_shipped_teachers_describe_themselves(world):
    name = teacher_of(WORLDS[world])
    model, tokenizer = load_policy(name)
    story = json.loads((policy_path(name) / "policy.json").read_text())
    student, teacher = story["measured"]
    assert model.dtype == torch.float32
    assert tokenizer.get_vocab() == VOCABULARY
    assert teacher["SCS"] > student["SCS"] + 20
    assert story["base"] == WORLDS[world].policy
