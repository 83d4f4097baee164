"""What a training would be and cost, and what it holds, against real models and slow counts."""

import json
import math

import pytest
import torch
import yaml
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from trainer_logger import hear
from memcalib.trainer.forecast import (
    epoch_work,
    training_forecast,
    measure_texts,
    resolved,
    strategy,
    training_plan,
)
from memcalib.trainer.forecast import GIB, TrainingPlan, ModelShape, estimate_memory, model_shape
from memcalib.trainer.recipe import read_config
from memcalib.products.micro.world import make_examples
from memcalib.products.micro.policy import policy_path
from memcalib.problem import encode_prompt, render
from memcalib.io.records import write_jsonl
from memcalib.trainer.recipe import LABELS, Launch, load_recipe, method_config
from memcalib.trainer.train_config import TrainConfig

SMALL = dict(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=101,
)
MODELS = {
    "qwen3": SMALL | dict(model_type="qwen3", intermediate_size=96),
    "tied": SMALL | dict(model_type="qwen3", intermediate_size=96, tie_word_embeddings=True),
    "mistral": SMALL | dict(model_type="mistral", intermediate_size=80),
    "ministral3": SMALL | dict(model_type="ministral3", intermediate_size=80),
    "llama": {k: v for k, v in SMALL.items() if k != "head_dim"}
    | dict(model_type="llama", intermediate_size=80),
    "moe": SMALL
    | dict(
        model_type="qwen3_moe",
        intermediate_size=96,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "mixtral": SMALL
    | dict(model_type="mixtral", intermediate_size=40, num_local_experts=4, num_experts_per_tok=2),
    "hybrid": SMALL
    | dict(
        model_type="qwen3_5_moe_text",
        num_hidden_layers=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_num_value_heads=4,
        linear_value_head_dim=8,
    ),
}


def built(name: str):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_a_real_model(name):
    model = built(name)
    assert model_shape(MODELS[name]).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_is_that_of_peft(name):
    options = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(built(name), options)
    assert model_shape(MODELS[name], 4).adapter == sum(
        p.numel() for p in adapted.parameters() if p.requires_grad
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hybrid"])
def test_the_cache_is_as_large_as_a_real_one(name):
    with torch.no_grad():
        cache = built(name)(input_ids=torch.arange(7)[None], use_cache=True).past_key_values
    real = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert model_shape(MODELS[name]).cache * 7 == real


def test_linear_layers_keep_no_keys_and_values():
    shape = model_shape(MODELS["hybrid"])
    config = read_config(MODELS["hybrid"])
    full = config.layer_types.count("full_attention")
    assert 0 < full < 4 and shape.cache == 2 * 2 * 16 * full


def saved(model, tokens: int) -> float:
    """Elements of a token in a layer that PyTorch keeps for the backward pass, parameters apart."""
    size_by_storage = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        size_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model.get_decoder()(input_ids=torch.arange(tokens)[None] % 101, use_cache=False)[0]
        states.sum().backward()
    size = sum(size for storage, size in size_by_storage.items() if storage not in parameters)
    return size / 4 / tokens / model.config.num_hidden_layers


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_activations_are_near_what_pytorch_keeps(kind):
    wide = MODELS[kind] | dict(
        hidden_size=512, intermediate_size=1536, head_dim=64, num_attention_heads=8
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**wide))
    assert model_shape(wide).inner == pytest.approx(saved(model, 64), rel=0.3)


def test_a_folder_tells_the_same_as_its_keys():
    folder = policy_path("cold-short")
    keys = json.loads((folder / "config.json").read_text())
    assert model_shape(folder) == model_shape(keys)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "model_type: found None"),
        ({"model_type": "magic"}, "'magic'"),
        ("no/such/folder", "no folder with a config"),
    ],
)
def test_unknown_shapes_are_named(source, message):
    with pytest.raises(ValueError, match=message):
        read_config(source)


SHAPES = strategies.builds(
    ModelShape,
    parameters=strategies.integers(10**6, 10**10),
    adapter=strategies.sampled_from([0, 10**6]),
    block=strategies.integers(10**4, 10**6),
    layers=strategies.integers(1, 80),
    hidden=strategies.integers(16, 8192),
    inner=strategies.integers(100, 10**5),
    cache=strategies.integers(100, 10**5),
    vocab=strategies.integers(100, 250_000),
)
KINDS = strategies.sampled_from(["fsdp2", "zero3"])


@hypothesis_settings(max_examples=60, deadline=None)
@given(SHAPES, KINDS, strategies.integers(1, 64), strategies.integers(0, 2))
def test_sharding_divides_what_is_held(shape, kind, gpus, copies):
    one = estimate_memory(shape, TrainingPlan(kind, gpus=1, copies=copies)).parts
    many = estimate_memory(shape, TrainingPlan(kind, gpus=gpus, copies=copies)).parts
    for name in ("weights", "gradients", "optimizer", "reference or teacher"):
        assert many[name] * gpus == pytest.approx(one[name])
    trained = shape.adapter or shape.parameters
    states = one["weights"] + one["gradients"] + one["optimizer"]
    assert states == 16 * trained + (2 * shape.parameters if shape.adapter else 0)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    SHAPES,
    strategies.sampled_from(["none", "ddp", "fsdp2", "zero3"]),
    strategies.integers(1, 64),
    strategies.integers(1, 4000),
)
def test_more_tokens_never_need_less(shape, kind, rows, answer):
    small = estimate_memory(shape, TrainingPlan(kind, 8, rows=rows, answer=answer))
    large = estimate_memory(shape, TrainingPlan(kind, 8, rows=rows, answer=answer + 1))
    assert small.update <= large.update and small.peak <= large.peak
    assert all(value >= 0 and math.isfinite(value) for value in large.parts.values())
    uncut = estimate_memory(
        shape, TrainingPlan(kind, 8, rows=rows, answer=answer, checkpointing=False)
    )
    if shape.layers > 2 and shape.inner > 8 * shape.hidden:
        assert uncut.parts["activations"] >= small.parts["activations"]


def test_a_sleeping_sampler_leaves_room_for_the_update():
    shape = model_shape(MODELS["qwen3"])
    awake = estimate_memory(shape, TrainingPlan(colocated=0.5, sleeping=False, gpu_gib=80))
    asleep = estimate_memory(shape, TrainingPlan(colocated=0.5, sleeping=True, gpu_gib=80))
    assert awake.update - asleep.update == 40 * GIB and awake.sampling == asleep.sampling


def test_settings_say_who_set_them():
    changes = ["train.lr=0.01", "methods.grpo.clip=0.3"]
    recipe = load_recipe("micro", changes)

    def by_name(*arguments, **options):
        return {setting.name: setting for setting in resolved(recipe, *arguments, **options)}

    grpo = by_name("grpo", seed=7, settings=changes)
    gdpo = by_name("gdpo", settings=changes[:1])
    assert grpo.keys() == TrainConfig.model_fields.keys()
    assert (grpo["clip"].value, grpo["clip"].source) == (0.3, "command")
    assert (grpo["seed"].value, grpo["seed"].source) == (7, "command")
    assert gdpo["clip"].source == gdpo["seed"].source == "default"
    assert by_name("grpo")["clip"].source == "recipe for this method"
    assert by_name("sft")["lr"].value == method_config(recipe, "sft").lr


@pytest.mark.parametrize(
    ("method", "changes", "name", "source"),
    [
        ("memcalib-rl", ["train.eta=0.5"], "eta", "recipe for this method"),
        ("gdpo", ["train.eta=0.5"], "eta", "command"),
        ("memcalib-rl", ["methods.memcalib-rl.eta=0.5"], "eta", "command"),
        (
            "memcalib-rl",
            ["methods.memcalib-rl.eta.CA-=0.5"],
            "eta",
            "recipe for this method and command",
        ),
        ("grpo", ["methods.grpo={lr: 0.001}"], "lr", "command"),
        ("grpo", ["train={lr: 0.001}"], "lr", "command"),
        ("grpo", ["train.trl.vllm_mode=server"], "trl", "recipe and command"),
        ("grpo", ["train.trl={vllm_mode: server}"], "trl", "command"),
        ("grpo", ["sft.trl.bf16=false"], "trl", "recipe"),
        ("sft", ["sft.trl.bf16=false", "train.lr=0.1"], "trl", "command"),
        ("sft", ["sft.trl.bf16=false", "train.lr=0.1"], "lr", "world"),
        ("grpo", ["methods={grpo: {lr: 0.5}}"], "lr", "command"),
    ],
)
def test_who_set_a_setting_is_who_set_the_value_in_force(tmp_path, method, changes, name, source):
    content = {
        "start": {"model": "cold-short"},
        "data": {"world": {}},
        "judge": "micro-exact",
        "methods": {"memcalib-rl": {"eta": {"C+": 0.25}}},
        "train": {"trl": {"bf16": False}, "lr": 0.01},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    recipe = load_recipe(tmp_path / "r.yaml", changes)
    settings = resolved(recipe, method, settings=changes)
    sources = {setting.name: setting.source for setting in settings}
    assert sources[name] == source and sources["seed"] == "default"


def test_prompts_are_counted_with_the_tokenizer(tmp_path):
    from memcalib.products.micro.policy import load_policy

    examples = make_examples("short", 9, seed=3)
    write_jsonl(tmp_path / "train.jsonl", examples)
    recipe = load_recipe(
        "micro",
        [
            f"data={{train: {tmp_path / 'train.jsonl'}}}",
            "train.prompt_template=micro",
            "train.prompts=2",
        ],
    )
    texts = measure_texts(recipe, method_config(recipe, "grpo"))
    tokenizer = load_policy("cold-short")[1]
    prompts = [render(e, text="concat", prompt_template="micro") for e in examples]
    lengths = [len(encode_prompt(tokenizer, prompt)) for prompt in prompts]
    assert (texts.examples, texts.longest) == (9, max(lengths))
    assert texts.prompt == pytest.approx(sum(lengths) / 9)
    assert texts.atoms == pytest.approx(sum(len(e.atoms) for e in examples) / 9)
    work = epoch_work(method_config(recipe, "grpo"), texts)
    assert work["steps per epoch"] == 4 and work["answers"] == 4 * 2 * 8, (
        "the ninth example fills no step"
    )


def test_limits_are_kept(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", make_examples("short", 9, seed=3))
    recipe = load_recipe(
        "micro",
        [
            f"data={{train: {{path: {tmp_path / 'train.jsonl'}, limit: 4}}}}",
            "train.prompt_template=micro",
        ],
    )
    assert measure_texts(recipe, method_config(recipe, "grpo")).examples == 4


PRICED = (
    "judge={model: j, base_url: 'http://localhost:1/v1', key_env: '', price: {prompt: "
    "1.0, completion: 2.0}}"
)


@pytest.mark.parametrize("method", ["grpo", "memcalib-rl", "opsd-pg", "sft"])
def test_only_methods_with_rewards_pay_for_answers(method):
    recipe = load_recipe("qwen3-8b", [PRICED])
    judge = training_forecast(recipe, method).judge
    held_out = 0 if method == "sft" else 5 * 1500
    answers = 64_000 if method in ("grpo", "memcalib-rl") else 0
    assert judge["calls"] == answers + held_out and judge["of them validation"] == held_out
    assert judge["cost"] == pytest.approx(
        (judge["prompt tokens"] + 2 * judge["completion tokens"]) / 1e6
    )


def test_fine_tuning_scores_nothing_before_its_first_step():
    settings = ["sft.eval_every=5", "train.eval_every=5"]
    recipe = load_recipe("micro", settings)
    for method, before in (("sft", 0), ("grpo", 1), ("opsd-gkd", 1)):
        plan = training_forecast(recipe, method)
        rounds = before + plan.work["steps per epoch"] // 5
        assert plan.judge["of them validation"] == rounds * recipe.data.world.validation > 0


@pytest.mark.parametrize("method", ["opsd-pg", "opsd-gkd"])
def test_a_teacher_reads_every_answer_behind_its_own_prompt(tmp_path, method):
    from memcalib.products.micro.policy import load_policy
    from memcalib.trainer.distillation import teacher_encoder

    examples = make_examples("short", 9, seed=3)
    write_jsonl(tmp_path / "train.jsonl", examples)
    file = f"data={{train: {tmp_path / 'train.jsonl'}}}"
    recipe = load_recipe(
        "micro",
        [
            file,
            "train.prompt_template=micro",
            "train.prompts=3",
            "train.teacher_prompt_template=micro-hinted",
        ],
    )
    config = method_config(recipe, method)
    encode = teacher_encoder(load_policy("cold-short")[1], prompt_template="micro-hinted")
    texts = measure_texts(recipe, config)
    assert texts.teacher == pytest.approx(sum(len(encode(e)) for e in examples) / 9)
    assert texts.teacher > texts.prompt

    def tokens_read(config, texts):
        return epoch_work(config, texts)["tokens read by the teacher"]

    answer = min(500, config.max_tokens)
    answers = 9 * config.generations
    assert tokens_read(config, texts) == pytest.approx(answers * (texts.teacher + answer))
    limited = config.model_copy(update={"max_teacher": 2})
    assert tokens_read(limited, texts) == answers * (2 + answer)
    without_teacher = method_config(recipe, "gdpo")
    assert tokens_read(without_teacher, measure_texts(recipe, without_teacher)) == 0


def test_an_unknown_price_is_not_zero():
    plan = training_forecast(load_recipe("qwen3-8b"), "grpo")
    assert plan.judge["cost"] is None and "cost                unknown" in plan.text()
    assert any("judge.price" in text for text in plan.warnings)


def test_counterfactuals_are_read_by_one_method_alone():
    read = {
        m: training_forecast(load_recipe("micro"), m).work["tokens read by counterfactuals"]
        for m in ("gdpo", "memcalib-rl")
    }
    assert read["gdpo"] == 0 < read["memcalib-rl"]
    by = {
        m: training_forecast(load_recipe("micro", [f"train.mode={m}"]), "memcalib-rl")
        for m in ("evidence", "evidence-kl")
    }
    read |= {mode: plan.work["tokens read by counterfactuals"] for mode, plan in by.items()}
    assert read["evidence"] == 0 < read["evidence-kl"] < read["memcalib-rl"]
    assert not any("channels" in text for text in by["evidence"].assumptions)
    assert any("left atoms out" in text for text in by["evidence-kl"].assumptions)


QUOTING = """
from memcalib.rules.base import CreditRule


class Quoting(CreditRule):
    name = "quoting"
    needs_quotes = QUOTES


RULE = Quoting()
"""


@pytest.mark.parametrize("quotes", [True, False])
def test_a_judge_writes_more_for_any_rule_that_needs_quotes(tmp_path, monkeypatch, quotes):
    module = f"quoting_{quotes}".lower()
    (tmp_path / f"{module}.py").write_text(QUOTING.replace("QUOTES", str(quotes)))
    monkeypatch.syspath_prepend(str(tmp_path))
    gdpo = training_forecast(load_recipe("qwen3-8b", [PRICED]), "gdpo").judge
    recipe = load_recipe("qwen3-8b", [PRICED, f"train.mode={module}:RULE"])
    plan = training_forecast(recipe, "memcalib-rl")
    read = plan.judge["prompt tokens"] - gdpo["prompt tokens"]
    written = plan.judge["completion tokens"] - gdpo["completion tokens"]
    # 64,000 answers are trained on; 7,500 of validation are judged as always
    assert written == (64_000 * 15.5 * 2 if quotes else 0)
    assert (150 * 64_000 < read < 250 * 64_000) if quotes else read == 0
    assert any("quotes every place" in text for text in plan.assumptions) == quotes
    assert plan.beside_gdpo["read by the model"] == 1
    assert (plan.beside_gdpo["judge, completion tokens"] > 1) == quotes


@pytest.mark.parametrize("method", ["gdpo", "opsd-pg", "sft"])
def test_what_has_no_rule_of_its_own_is_not_set_beside_gdpo(method):
    plan = training_forecast(load_recipe("qwen3-8b"), method)
    assert plan.beside_gdpo == {}
    assert "in steps of GDPO" not in plan.text()


def test_a_step_is_set_beside_one_of_gdpo():
    text = training_forecast(
        load_recipe("qwen3-8b", ["train.mode=evidence-kl"]), "memcalib-rl"
    ).text()
    lines = text.partition("A step, in steps of GDPO\n")[2].splitlines()[:3]
    assert [line.split()[-1] for line in lines] == ["1.32", "1.03", "1.03"]


def test_a_distilled_policy_holds_one_frozen_copy():
    recipe = load_recipe("qwen3-8b")
    without_reference = load_recipe("qwen3-8b", ["train.beta=0"])

    def copies(recipe, method):
        return training_plan(recipe, method_config(recipe, method), 1000, 500).copies

    assert [copies(recipe, method) for method in ("grpo", "opsd-pg", "opsd-gkd")] == [1, 1, 1]
    methods = ("grpo", "opsd-pg", "sft")
    assert [copies(without_reference, method) for method in methods] == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["launch.processes=3"], "cannot be divided into"),
        (["launch.accelerate=missing.yaml"], "no file 'missing.yaml'"),
        (["train.cap=0.5"], "cap"),
    ],
)
def test_faults_are_named(changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        training_forecast(load_recipe("qwen3-8b", changes), "memcalib-rl")


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (["train.accumulate=1", "launch.memory_gib=40"], "does not fit"),
        (["launch.accelerate=null", "start.dtype=bfloat16"], "8 significant bits"),
        (["train.sampler=shared"], "all weights are transferred"),
        (["launch.shape={}"], "the memory is unknown"),
        (["launch.memory_gib=null"], "cannot be compared with a limit"),
    ],
)
def test_mistakes_are_warned_of(changes, warning):
    plan = training_forecast(load_recipe("qwen3-8b", changes), "grpo")
    assert any(warning in text for text in plan.warnings)


def test_strategies(tmp_path):
    for content, expected in (
        ("distributed_type: MULTI_GPU", "ddp"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}", "zero3"),
    ):
        (tmp_path / "a.yaml").write_text(content)
        assert strategy(Launch(accelerate=str(tmp_path / "a.yaml"), processes=2)) == expected
    for content in (
        "distributed_type: TPU",
        "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2}}",
    ):
        (tmp_path / "a.yaml").write_text(content)
        with pytest.raises(ValueError, match="allowed: FSDP"):
            strategy(Launch(accelerate=str(tmp_path / "a.yaml"), processes=2))


def test_the_page_says_where_the_memory_is(tmp_path):
    for changes, title in (
        ([], "Memory of one process on the CPU, GiB"),
        (["launch.memory_gib=24"], "Memory of one GPU, GiB"),
        (["launch.processes=4", "launch.memory_gib=24"], "Memory of each of 4 GPUs, GiB"),
    ):
        text = training_forecast(load_recipe("micro", changes), "memcalib-rl").text()
        assert title in text and "vLLM" not in text, "a part that holds nothing is left out"
        assert ("runtime" in text) == ("GPU" in title), "the CPU has no runtime of its own"
    assert "vLLM's share" in training_forecast(load_recipe("qwen3-8b"), "grpo").text()
    assert "gradients" in training_forecast(load_recipe("qwen3-8b"), "sft").text()


def test_what_a_run_would_be_refused_for_on_this_machine(monkeypatch):
    hear(monkeypatch)
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)

    def refused(method, *changes, name="qwen3-8b"):
        return training_forecast(load_recipe(name, changes), method).refused

    needle = "judge.key_env: found 'JUDGE_API_KEY'"
    needs_key = [m for m in LABELS.values() if any(needle in text for text in refused(m))]
    expected = ["opsd-pg", "opsd-gkd", "grpo", "gdpo", "memcalib-rl"]
    assert needs_key == expected, "fine-tuning asks no judge here"
    monkeypatch.setenv("JUDGE_API_KEY", "any")
    assert not any("JUDGE_API_KEY" in text for text in refused("grpo"))
    changes = ["train.report_to=missing", "train.max_tokens=5000", "sft.report_to=notes"]
    assert [text.split(":")[0] for text in refused("grpo", *changes, name="micro")] == [
        "train.report_to",
        "train.max_tokens",
    ]
    assert refused("sft", *changes, name="micro") == []
    assert not any("prompts" in text for text in refused("grpo")), (
        "nobody knows how many examples there are"
    )


def test_fine_tuning_begins_with_its_own_model():
    rough = ["start.dtype=bfloat16", "base.dtype=float32"]
    for changes, method, warned in (
        (rough, "sft", []),
        (rough, "gdpo", ["start.dtype"]),
        (["base.dtype=bfloat16"], "sft", ["base.dtype"]),
        (["start.model=owner/name", "base.model=pretrained"], "sft", []),
        (["base.model=owner/base"], "sft", ["the memory is unknown, because owner/base"]),
    ):
        warnings = training_forecast(load_recipe("micro", changes), method).warnings
        heads = [text.split(" bfloat16")[0].split(" is not")[0] for text in warnings]
        assert heads == warned, changes
    wide = load_recipe("micro", ["launch.memory_gib=80", "start.model=owner/name"])
    assert (
        training_forecast(wide, "sft").shape.parameters > 200_000
        and training_forecast(wide, "gdpo").shape is None
    )
