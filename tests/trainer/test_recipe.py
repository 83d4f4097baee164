"""Recipes: what is read, what is refused and how, and whose setting wins."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.io.settings import SettingErrors, allowed
from memcalib.trainer.recipe import (
    LABELS,
    Recipe,
    check_recipe,
    load_recipe,
    method_config,
    preflight,
    recipe_examples,
    shipped_recipes,
)
from memcalib.settings.files import with_settings
from memcalib.problem import PROMPT_TEMPLATES, render
from memcalib.trainer.train_config import TrainConfig
from memcalib.trainer.sft import SftConfig

MICRO = {"start": {"model": "cold-short"}, "data": {"world": {}}, "judge": "micro-exact"}
words = st.text("abcdefg", min_size=1, max_size=3)
values = st.one_of(st.integers(-9, 9), st.booleans(), words)
nested = st.recursive(values, lambda inner: st.dictionaries(words, inner, max_size=3), max_leaves=8)


def written(folder: Path, content) -> Path:
    path = folder / "r.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def leaves(content, names=()):
    """The values of nested settings by the names on the way to them."""
    if not isinstance(content, dict) or not content:
        return {names: content}
    values = {}
    for name, below in content.items():
        values.update(leaves(below, (*names, name)))
    return values


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(words, nested, max_size=3), st.lists(words, min_size=1, max_size=4), values)
def test_one_setting_changes_one_place(content, names, value):
    before = yaml.safe_dump(content)
    changed = with_settings(content, [f"{'.'.join(names)}={yaml.safe_dump(value)}"])
    assert yaml.safe_dump(content) == before, "the given mapping stays as it is"
    changed_value = changed
    for name in names:
        changed_value = changed_value[name]
    assert changed_value == value and type(changed_value) is type(value)

    def off_the_path(leaf):
        below = leaf[: len(names)] == tuple(names)
        above = tuple(names)[: len(leaf)] == leaf
        return not below and not above

    untouched = {leaf: value for leaf, value in leaves(content).items() if off_the_path(leaf)}
    assert untouched == {
        leaf: value for leaf, value in leaves(changed).items() if off_the_path(leaf)
    }


@pytest.mark.parametrize("text", ["", "x", "=1", "a..b=1", ".a=1", "a.=1", "a=[1"])
def test_settings_that_say_nothing(text):
    with pytest.raises(ValueError, match="--set"):
        with_settings({}, [text])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["train", "methods.gdpo", "methods.grpo"]), unique=True),
    st.lists(st.integers(1, 50), min_size=3, max_size=3),
)
def test_the_method_wins_over_the_shared_part_and_that_over_the_world(parts, numbers):
    steps = dict(zip(parts, numbers, strict=False))
    content = with_settings(
        MICRO, [f"{section}.steps={number}" for section, number in steps.items()]
    )
    recipe = Recipe.model_validate(content)
    for method in ("grpo", "gdpo", "memcalib-rl"):
        expected = steps.get(f"methods.{method}", steps.get("train", 110))
        config = method_config(recipe, method, seed=9)
        assert (config.steps, config.method, config.seed) == (expected, method, 9)


def test_every_fault_has_a_line(tmp_path):
    wrong = {
        "start": {"modle": "x"},
        "data": {"train": "a.jsonl", "world": {"name": "short"}},
        "judge": {"model": "m", "rmp": 3},
        "judging": {"temperature": -1},
        "train": {"lr": "fast", "stepz": 3},
        "methods": {"grpo": {"prompts": 0}, "ppo": {}},
        "launch": {"processes": 0},
        "seed": 3,
    }
    with pytest.raises(SettingErrors) as error:
        load_recipe(written(tmp_path, wrong))
    lines = str(error.value).splitlines()
    assert all(line.startswith(str(tmp_path / "r.yaml")) for line in lines)
    assert error.value.source == str(tmp_path / "r.yaml")
    assert {"train.lr", "methods.grpo.prompts"} <= {each.setting for each in error.value.errors}
    for needle in (
        "start.model: missing",
        "start.modle: unknown option; perhaps you meant model; allowed: model, adapter",
        "data: found both world and train",
        "judge.rmp: unknown option; perhaps you meant rpm; allowed: model, base_url",
        "judging.temperature: found -1",
        "train.lr: found 'fast'; allowed: numbers above 0, at most 1",
        "train.stepz: unknown option; perhaps you meant steps; allowed: prompts",
        "methods.grpo.prompts: found 0; allowed: whole numbers from 1 to",
        "methods.ppo",
        "launch.processes: found 0; allowed: whole numbers of at least 1",
        ": seed: unknown option; did you mean train.seed? Allowed: start, base",
    ):
        assert sum(needle in line for line in lines) == 1, (needle, lines)


@pytest.mark.parametrize("content", ["", "- 1", "7", "[", "start: *x", "\x00"])
def test_what_is_no_mapping(tmp_path, content):
    with pytest.raises(ValueError, match=r"r\.yaml"):
        load_recipe(written(tmp_path, content))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*Recipe.model_fields, "x"]), nested, max_size=4))
def test_any_mapping_is_read_or_refused_by_place(content):
    try:
        check_recipe(content)
    except SettingErrors as errors:
        assert errors.errors and all(":" in str(error) for error in errors.errors)


def test_a_recipe_takes_the_file_of_a_prompt_template(tmp_path):
    file = tmp_path / "polite.yaml"
    file.write_text("user: '{memory} -- please: {query}'")
    path = written(tmp_path, MICRO)
    recipe = load_recipe(
        path,
        [
            "data.world.train=2",
            f"train.prompt_template={file}",
            f"methods.opsd-pg.teacher_prompt_template={file}",
        ],
    )
    config = method_config(recipe, "gdpo")
    shown = render(recipe_examples(recipe).train[0], prompt_template=config.prompt_template)
    assert config.prompt_template == "polite" and " -- please: " in shown[-1]["content"]
    assert method_config(recipe, "opsd-pg").teacher_prompt_template == "polite"

    def refused(message):
        with pytest.raises(ValueError, match="train.prompt_template: .*" + re.escape(message)):
            load_recipe(path, [f"train.prompt_template={file}"])

    file.write_text("user: no places")
    refused("user: found no place {memory}")
    file.unlink()
    refused("no such template file")
    PROMPT_TEMPLATES.pop("polite")


def test_a_recipe_is_written_as_it_was_read(tmp_path):
    settings_given = {
        "train": {"lr": 2e-6, "drift_length": None},
        "methods": {"gdpo": {"eta": {"C+": 0.5}}},
    }
    content = MICRO | settings_given
    recipe = load_recipe(written(tmp_path, content))
    dumped = recipe.model_dump(mode="json", exclude_none=True)
    assert (dumped["train"], dumped["methods"]) == (
        settings_given["train"],
        settings_given["methods"],
    )
    assert dumped["sft"] == {}
    assert Recipe.model_validate(recipe.model_dump()).own_settings("gdpo") == {"eta": {"C+": 0.5}}


@pytest.mark.parametrize(
    ("setting", "needle"),
    [
        (
            "train.prompt_template=nope",
            "train.prompt_template: unknown prompt template 'nope'; allowed: plain",
        ),
        ("train.trl={nonsense: 1}", "nonsense"),
        (
            "train.trl.output_dir=elsewhere",
            "train.trl: output_dir cannot be set here; it is replaced by the folder of the run",
        ),
        ("train.trl={max_steps: -5}", "max_steps cannot be set here; it is replaced by steps"),
        (
            "train.trl.learning_rate=2e-6",
            "train.trl: learning_rate cannot be set here; it is replaced by lr",
        ),
        ("train.trl.max_grad_norm=strong", "train.trl: max_grad_norm: found 'strong'"),
        (
            "train.trl.top_k=5",
            (
                "trl.top_k: found with sampler 'shared', which does not read it; allowed: sampler "
                "'generate' or"
            ),
        ),
        (
            "train.trl.use_transformers_continuous_batching=true",
            "with sampler 'shared', which does not read it",
        ),
        (
            "train.trl.reward_weights=[1, 1]",
            "train.trl: reward_weights cannot be set here; it is replaced by method",
        ),
        (
            "train.trl.scale_rewards=none",
            "train.trl: scale_rewards cannot be set here; it is replaced by method",
        ),
        (
            "train.trl.multi_objective_aggregation=normalize_then_sum",
            "multi_objective_aggregation cannot be set here",
        ),
        (
            "train.trl.chat_template_kwargs={enable_thinking: true}",
            "train.trl: chat_template_kwargs cannot be set here; it is replaced by the chat "
            "template of the",
        ),
        (
            "sft.trl.num_train_epochs=2",
            "sft.trl: num_train_epochs cannot be set here; it is replaced by epochs",
        ),
        (
            "train.report_to=wandbb",
            "train.report_to: found 'wandbb'; perhaps you meant wandb; allowed: none, all",
        ),
        ("train.report_to=[none, wandb]", "allowed: none, all, or any of"),
        ("sft.report_to=paper", "sft.report_to: found 'paper'; allowed: none, all"),
        ("train.method=gdpo", "train.method: found 'gdpo'; not set here: --method says it"),
        ("lr=1e-5", "lr: unknown option; did you mean train.lr? Allowed: start"),
        ("trian.lr=1e-5", "trian: unknown option; perhaps you meant train; allowed: start"),
        ("train.epohcs=3", "train.epohcs: unknown option"),
        ("train.eta={C+: 2}", "train.eta.C+: found 2; allowed: numbers from 0 to 1"),
        ("start=[a]", "start: found ['a']; allowed: a mapping of options"),
        ("data.world=short", "data.world: found 'short'; allowed: a mapping of options"),
        ("methods.gdpo={prompts: 3, generations: 3}", "9 answers"),
        (
            "judge=human",
            "judge: found 'human'; allowed: micro-exact, micro-english, package.module:name, "
            "or an endpoint",
        ),
        ("train={1: 2}", "train: found 1 as the name of an option; allowed: strings: prompts"),
        ("sft={1: 2}", "sft: found 1 as the name of an option; allowed: strings: lora_rank"),
        (
            "methods.gdpo={1: 2}",
            "methods.gdpo: found 1 as the name of an option; allowed: strings: prompts",
        ),
        (
            "judge={model: m, base_url: 'http://a:b@c/v1'}",
            "judge.base_url: found *** (not repeated); this looks like a key",
        ),
        ("judging.prompt=/nope", "judging.prompt: found '/nope'; allowed: footprint-1"),
        (
            "train.teacher_prompt_template=nope",
            "train.teacher_prompt_template: unknown prompt template 'nope'; allowed: plain",
        ),
        (
            "methods.gdpo.prompt_template=nope",
            "methods.gdpo.prompt_template: unknown prompt template 'nope'; allowed: plain",
        ),
        ("train.trl.per_device_train_batch_size=3", "minibatches and accumulate replace it"),
    ],
)
def test_what_only_shows_when_all_is_put_together(tmp_path, setting, needle):
    path = written(tmp_path, MICRO)
    assert load_recipe(path, ["judge="]).judge is None
    with pytest.raises(ValueError, match="r.yaml") as error:
        load_recipe(path, [setting])
    assert needle in str(error.value)


WIDE = {
    "lr": (5, "numbers above 0, at most 1"),
    "lora_rank": (10**6, "whole numbers from 0 to 4,096"),
    "generations": (1, "whole numbers from 2 to 10,000"),
    "prompts": (10**9, "whole numbers from 1 to 1,048,576"),
    "d_max": (-1, "numbers from 0 to 1,000"),
    "eta": (1.5, "numbers from 0 to 1, or mappings"),
    "top_k": (0, "whole numbers from 1 to 1,048,576"),
    "max_tokens": (10**9, "whole numbers from 1 to 1,048,576"),
    "drift_length": (1, "numbers above 1, at most 1,000, or null"),
    "temperature": (float("inf"), "numbers above 0, at most 100"),
    "mode": ("sideways", "ordered, absolute, positive_only"),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_value_out_of_range_is_one_line_with_what_is_allowed(tmp_path, name):
    value, allowed = WIDE[name]
    with pytest.raises(ValueError, match="r.yaml") as error:
        load_recipe(written(tmp_path, MICRO | {"train": {name: value}}))
    (line,) = str(error.value).splitlines()
    assert f": train.{name}: found {value!r}; allowed: {allowed}" in line


@pytest.mark.parametrize("kind", [TrainConfig, SftConfig])
def test_every_number_has_a_range(kind):
    for name in kind.model_fields:
        description = allowed(kind, name)
        is_bounded = any(sign.isdigit() for sign in description)
        assert "numbers" not in description or is_bounded, (name, description)


def test_numbers_for_the_base_trainer_are_numbers(tmp_path):
    recipe = load_recipe(
        written(tmp_path, MICRO), ["train.trl.adam_epsilon=1e-8", "sft.trl.max_grad_norm=5e-1"]
    )
    assert method_config(recipe, "grpo").trl == {"adam_epsilon": 1e-8}
    assert method_config(recipe, "sft").trl == {"max_grad_norm": 0.5}


def test_no_key_in_a_fault(tmp_path):
    secret = "sk" + "-0123456789abcdefghijklmnop"
    for judge in ({"model": "m", "timeout": secret}, {"model": 3, "extra_body": secret}):
        with pytest.raises(ValueError, match="judge") as error:
            load_recipe(written(tmp_path, MICRO | {"judge": judge}))
        assert secret not in str(error.value)


def test_shipped_recipes_load():
    assert "micro" in shipped_recipes()
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert Recipe.model_validate(recipe.model_dump()) == recipe
        for method in LABELS.values():
            method_config(recipe, method, 1)


def test_names_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="micro"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="opsd-gkd"):
        method_config(Recipe.model_validate(MICRO), "ppo")
    with pytest.raises(FileNotFoundError, match="no recipe"):
        load_recipe("../recipes/micro")
    with pytest.raises(
        FileNotFoundError,
        match="no recipe 'micr': perhaps you meant micro; allowed: english, micro",
    ):
        load_recipe("micr")


def test_a_judge_without_quotes_is_refused_where_credit_goes_by_them(tmp_path, monkeypatch):
    (tmp_path / "levels_only.py").write_text(
        "def judge(example, answer):\n    raise AssertionError('asked')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe("micro", ["judge=levels_only:judge"])
    for mode, refused in (("ordered", False), ("evidence", True), ("evidence-kl", True)):
        config = method_config(recipe, "memcalib-rl").model_copy(update={"mode": mode})
        lines = [*preflight(recipe, "memcalib-rl", config, 100, 0, local=True)]
        assert bool(lines) == refused
        for line in lines:
            assert "gives no quotes" in line and "gives_quotes = True" in line
    exact = load_recipe("micro", ["train.mode=evidence-kl"])
    config = method_config(exact, "memcalib-rl")
    assert (
        config.credit.rule.needs_quotes
        and not method_config(exact, "gdpo").credit.rule.needs_quotes
    )
    assert not [*preflight(exact, "memcalib-rl", config, 100, 0, local=True)]
