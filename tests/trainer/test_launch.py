"""Launch folders: recipes, accelerate and DeepSpeed files, start scripts,
and vLLM as far as it goes without a GPU.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers.integrations import deepspeed

import memcalib.trainer.train_config as settings
from memcalib.trainer.checkpoints import decisive
from memcalib.trainer.forecast import training_forecast, launch_file, strategy
from memcalib.trainer.forecast import GIB, model_shape
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.products.micro.policy import build_tokenizer
from memcalib.trainer.rewards import RetryingJudge
from memcalib.trainer.recipe import LABELS, load_recipe, method_config, shipped_recipes
from memcalib.trainer.train_config import TrainConfig, check_sampler, trl_config
from memcalib.trainer.callbacks import StepRows
from memcalib.trainer.recipe import Examples, teaching_rows

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "memcalib" / "trainer" / "launch"
NAMES = ["ministral-3-8b", "qwen3-8b", "qwen3.5-35b-a3b"]
FILES = {"README.md", "accelerate.yaml", "deepspeed.json", "recipe.yaml"}
PAIRS = [  # each folder with the paper's method, each method with one folder; the others are slow
    pytest.param(
        name,
        method,
        marks=() if method == "memcalib-rl" or name == "qwen3-8b" else pytest.mark.slow,
    )
    for method in LABELS.values()
    for name in NAMES
]


def test_every_folder_is_whole_and_linked():
    assert sorted(p.name for p in FOLDERS.iterdir()) == sorted([*NAMES, "launch.sh"])
    assert os.access(FOLDERS / "launch.sh", os.X_OK)
    assert all({p.name for p in (FOLDERS / name).iterdir()} >= FILES for name in NAMES)
    assert (ROOT / "runs" / "launch").resolve() == FOLDERS.resolve()
    assert shipped_recipes().keys() >= set(NAMES)


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_recipes_are_forecast_without_weights(name, method):
    plan = training_forecast(load_recipe(name), method)
    recipe = load_recipe(name)
    assert plan.gpus == 8 * recipe.launch.nodes
    assert not [text for text in plan.warnings if "fit" in text or "unknown:" in text]
    assert all(memory.peak < 80 * GIB for memory in plan.memory.values())
    assert "Judge, one epoch" in plan.text() and json.dumps(plan.to_dict())


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_papers(name):
    config = method_config(load_recipe(name), "memcalib-rl")
    paper = TrainConfig()
    stated_fields = {"accumulate", "sampler", "eval_every", "save_every", "trl", "method"}
    changed = {field for field, value in config if value != getattr(paper, field)}
    assert changed - stated_fields == ({"lr", "lora_rank"} if name == "qwen3.5-35b-a3b" else set())
    assert (config.lr, config.lora_rank) == ((5e-6, 64) if name == "qwen3.5-35b-a3b" else (1e-6, 0))
    taught = method_config(load_recipe(name), "sft")
    assert (taught.lora_rank, taught.lora_alpha, taught.batch_size, taught.lr, taught.warmup) == (
        32,
        64,
        32,
        1e-4,
        0.05,
    )


@pytest.mark.parametrize(
    ("name", "total"),
    [("qwen3-8b", 8.19e9), ("ministral-3-8b", 8.49e9), ("qwen3.5-35b-a3b", 34.66e9)],
)
def test_shapes_have_the_published_sizes(name, total):
    assert model_shape(load_recipe(name).launch.shape).parameters == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_its_file(name):
    recipe = load_recipe(name)
    launch_config = load_config_from_file(str(launch_file(recipe.launch.accelerate)))
    assert (
        launch_config.num_processes == recipe.launch.processes
        and launch_config.num_machines == recipe.launch.nodes
    )
    assert launch_config.mixed_precision == "bf16" and launch_config.distributed_type == "FSDP"
    known_actions = {action.dest for action in launch_command_parser()._actions}
    assert (
        launch_config.fsdp_config.keys() <= known_actions
        and launch_config.fsdp_config["fsdp_version"] == 2
    )
    assert strategy(recipe.launch) == "fsdp2"
    efficient = launch_config.fsdp_config["fsdp_cpu_ram_efficient_loading"]
    assert efficient == bool(method_config(recipe, "grpo").lora_rank), (
        "an empty reference on all processes but one"
    )


class Filled(HfDeepSpeedConfig):
    """What the trainer makes of a DeepSpeed file; its own class wants DeepSpeed installed."""

    _dtype = None
    mismatches: ClassVar[list[str]] = []
    dtype = deepspeed.HfTrainerDeepSpeedConfig.dtype
    is_auto = deepspeed.HfTrainerDeepSpeedConfig.is_auto
    fill_match = deepspeed.HfTrainerDeepSpeedConfig.fill_match
    fill_only = deepspeed.HfTrainerDeepSpeedConfig.fill_only
    process = deepspeed.HfTrainerDeepSpeedConfig.trainer_config_process
    finalize = deepspeed.HfTrainerDeepSpeedConfig.trainer_config_finalize


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_settings_fit_the_trainer(name, tmp_path):
    config = method_config(load_recipe(name), "gdpo")
    arguments = trl_config(
        config.model_copy(update={"trl": config.trl | {"bf16": False}}), tmp_path
    )
    filled = Filled(str(FOLDERS / name / "deepspeed.json"))
    filled.process(arguments)
    filled.finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=4096)), 250)
    assert "auto" not in json.dumps(filled.config) and filled.is_zero3() and filled.mismatches == []
    again = load_recipe(name, [f"launch.accelerate={name}/deepspeed.json"])
    assert (
        strategy(again.launch) == "zero3"
        and training_forecast(again, "gdpo").memory["expected"].peak < 80 * GIB
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [method for method in LABELS.values() if method != "sft"])
def test_trl_takes_every_option(name, method, tmp_path):
    config = method_config(load_recipe(name), method)
    arguments = trl_config(
        config.model_copy(update={"trl": config.trl | {"bf16": False}}), tmp_path
    )
    assert (
        arguments.use_vllm
        and arguments.vllm_mode == "colocate"
        and arguments.vllm_enable_sleep_mode
    )
    assert arguments.vllm_max_model_length == config.max_prompt + config.max_tokens
    assert (
        arguments.generation_batch_size == 512 and not arguments.vllm_importance_sampling_correction
    )


def run_script(tmp_path, name, *words, **variables):
    """What launch.sh would have started: `accelerate` and `vllm` are stand-ins that write down
    their words.
    """
    written = tmp_path / "seen"
    for command in ("accelerate", "vllm"):
        stand_in = tmp_path / command
        stand_in.write_text(
            f'#!/bin/sh\nprintf "%s\\n" {command} "$@" > {written}\nenv > {written}.env\n'
        )
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IEXEC)
    environment = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
    } | variables
    done = subprocess.run(
        ["bash", FOLDERS / "launch.sh", *([name] if name else []), *words],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    return done, written.read_text().splitlines() if written.exists() else []


@pytest.mark.parametrize("name", NAMES)
def test_the_script_starts_what_accelerate_understands(tmp_path, name):
    variables = dict(MACHINE_RANK="1", MAIN_ADDRESS="node0") if name == "qwen3.5-35b-a3b" else {}
    done, words = run_script(
        tmp_path,
        name,
        "memcalib-rl",
        "--seed",
        "43",
        JUDGE_URL="http://localhost:1/v1",
        **variables,
    )
    assert done.returncode == 0, done.stderr
    arguments = launch_command_parser().parse_args(words[2:])
    assert (
        words[:2] == ["accelerate", "launch"]
        and arguments.module
        and arguments.training_script == "memcalib"
    )
    recipe = arguments.training_script_args[1]
    arguments_left = arguments.training_script_args[2:]
    assert arguments.training_script_args[0] == "train" and arguments_left[-2:] == ["--seed", "43"]
    chosen = load_recipe(
        recipe, [arguments_left[i + 1] for i, word in enumerate(arguments_left) if word == "--set"]
    )
    assert (
        chosen.launch.processes == arguments.num_processes
        and chosen.judge.base_url == "http://localhost:1/v1"
    )
    assert arguments.config_file == str(FOLDERS / name / "accelerate.yaml")


def test_in_an_allocation_of_slurm_the_script_starts_itself_on_each_node(tmp_path):
    """`srun` and `scontrol` are stand-ins: the first runs the command once, as the second node."""
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/srun.words\nshift 4\n'
        'SLURM_NODEID=1 exec "$@"\n'
    )
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    for file in (srun, scontrol):
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    slurm = dict(SLURM_JOB_ID="12", SLURM_JOB_NODELIST="node[7-8]")
    done, words = run_script(tmp_path, "qwen3.5-35b-a3b", "gdpo", "--seed", "5", **slurm)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "srun.words").read_text().splitlines()
    assert asked[:4] == ["--nodes", "2", "--ntasks-per-node", "1"]
    arguments = launch_command_parser().parse_args(words[2:])
    assert (arguments.machine_rank, arguments.main_process_ip) == (1, "node7")
    assert arguments.training_script_args[-2:] == ["--seed", "5"]


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_what_the_script_would_start_passes_a_dry_run(tmp_path, name, method):
    variables = dict(MACHINE_RANK="0", MAIN_ADDRESS="node0") if name == "qwen3.5-35b-a3b" else {}
    done, words = run_script(tmp_path, name, method, **variables)
    assert done.returncode == 0, done.stderr
    _, recipe, *arguments_left = launch_command_parser().parse_args(words[2:]).training_script_args
    options = dict(zip(arguments_left[::2], arguments_left[1::2], strict=True))
    assert options["--method"] == method and options["--out"] == f"runs/{name}/{method}"
    shown = training_forecast(
        load_recipe(recipe, [options["--set"]]), method, settings=[options["--set"]]
    ).text()
    assert f"Memory of each of {load_recipe(name).launch.processes} GPUs" in shown


@pytest.mark.parametrize("name", NAMES)
def test_the_baseline_learns_from_all_examples(tmp_path, name):
    """The command of the page, with the demonstrations of both parts in one file."""
    page = (FOLDERS / name / "README.md").read_text()
    (line,) = [
        line for line in page.splitlines() if line.startswith("OUT=") and "demonstrations=" in line
    ]
    out_variable, script, *words = line.split()
    assert script == "runs/launch/launch.sh" and words[0] == name
    variables = dict(MACHINE_RANK="0", MAIN_ADDRESS="node0") if name == "qwen3.5-35b-a3b" else {}
    done, started = run_script(tmp_path, *words, OUT=out_variable.removeprefix("OUT="), **variables)
    assert done.returncode == 0, done.stderr
    _, recipe, *arguments_left = (
        launch_command_parser().parse_args(started[2:]).training_script_args
    )
    settings = [arguments_left[i + 1] for i, word in enumerate(arguments_left) if word == "--set"]
    assert (
        arguments_left[arguments_left.index("--out") + 1]
        == f"runs/{name}/sft-baseline"
        != f"runs/{name}/sft"
    )
    talk = {
        "prompt": [{"role": "user", "content": "x"}],
        "completion": [{"role": "assistant", "content": "y"}],
    }
    parts = [
        tmp_path / "data" / folder / "accepted.jsonl"
        for folder in ("demonstrations", "demonstrations-rl")
    ]
    for demonstrations_file, count in zip(parts, (4, 8), strict=True):
        demonstrations_file.parent.mkdir(parents=True)
        demonstrations_file.write_text(
            "".join(json.dumps(talk | {"example_id": f"{count}-{i}"}) + "\n" for i in range(count))
        )
    (join,) = [line for line in page.splitlines() if line.startswith("cat data/")]
    subprocess.run(["bash", "-c", join], cwd=tmp_path, check=True)
    chosen = load_recipe(
        recipe, [text.replace("=data/", f"={tmp_path}/data/") for text in settings]
    )
    assert (
        len(teaching_rows(chosen, Examples([])))
        == training_forecast(chosen, "sft").work["rows"]
        == 12
    )


@pytest.mark.parametrize("method", ["sft", "memcalib-rl"])
def test_a_run_goes_on_with_another_sampler_and_in_more_parts(tmp_path, method):
    """What the script changes for memory's sake does not make it another run."""
    decisive_settings = []
    for variables in ({}, dict(SAMPLER="server", ACCUMULATE="16", GPUS="4")):
        words = run_script(tmp_path, "qwen3-8b", method, "--resume", **variables)[1]
        _, recipe, *arguments_left = (
            launch_command_parser().parse_args(words[2:]).training_script_args
        )
        chosen = load_recipe(
            recipe,
            [arguments_left[i + 1] for i, word in enumerate(arguments_left) if word == "--set"],
        )
        decisive_settings.append(decisive(method_config(chosen, method).model_dump(mode="json")))
    assert (
        decisive_settings[0][0] == decisive_settings[1][0]
        and decisive_settings[0][1] != decisive_settings[1][1]
    )


@pytest.mark.parametrize(
    ("lines_added", "message"),
    [
        ("launch: {processes: 4}\n", "found launch a second time, after line"),
        ("train: [\n", "not readable as YAML"),
    ],
)
@pytest.mark.parametrize("word", ["serve", "grpo"])
def test_the_script_refuses_a_recipe_that_the_verb_would_refuse(
    tmp_path, word, lines_added, message
):
    own_folder = tmp_path / "mine"
    shutil.copytree(FOLDERS / "qwen3-8b", own_folder)
    with open(own_folder / "recipe.yaml", "a") as file:
        file.write(lines_added)
    done, words = run_script(tmp_path, str(own_folder), word)
    assert done.returncode == 1 and words == []
    assert (
        done.stderr.startswith(f"launch.sh: {own_folder / 'recipe.yaml'}: ")
        and message in done.stderr
    )
    assert "Traceback" not in done.stderr


NO_RECIPES = [
    "launch:\nstart: {model: m}\n",
    "train: {}\n",
    "launch: {nodes: 0}\nstart: {model: m}\n",
    "- 1\n",
]


@pytest.mark.parametrize("text", NO_RECIPES)
def test_the_script_sends_on_who_has_no_recipe(tmp_path, text):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text(text)
    done, words = run_script(tmp_path, str(tmp_path / "mine"), "serve")
    assert done.returncode == 1 and words == []
    assert "recipe.yaml" in done.stderr and "Traceback" not in done.stderr


def test_a_copied_folder_is_given_by_its_path(tmp_path):
    own_folder = tmp_path / "mine"
    shutil.copytree(FOLDERS / "qwen3-8b", own_folder)
    text = (
        (own_folder / "recipe.yaml")
        .read_text()
        .replace("processes: 8", "processes: 4")
        .replace("runs/qwen3-8b/sft", "elsewhere")
    )
    (own_folder / "recipe.yaml").write_text(text)
    done, words = run_script(tmp_path, str(own_folder), "grpo")
    assert done.returncode == 0, done.stderr
    arguments = launch_command_parser().parse_args(words[2:])
    assert arguments.num_processes == 4 and arguments.config_file == str(
        own_folder / "accelerate.yaml"
    )
    assert arguments.training_script_args[:2] == ["train", str(own_folder / "recipe.yaml")]
    done, words = run_script(tmp_path, str(own_folder), "serve")
    assert words[2] == "elsewhere/policy" and words[words.index("--max-model-len") + 1] == "6144"
    for name, gpus in (("qwen3-8b", "1"), ("qwen3.5-35b-a3b", "4")):
        words = run_script(tmp_path, name, "serve")[1]
        assert words[words.index("--tensor-parallel-size") + 1] == gpus


def test_the_script_knows_the_server_and_zero3(tmp_path):
    variables = dict(
        SAMPLER="server",
        SHARDING="zero3",
        GPUS="4",
        ACCUMULATE="16",
        SERVER_URL="http://localhost:8001",
    )
    done, words = run_script(tmp_path, "qwen3-8b", "grpo", **variables)
    assert done.returncode == 0, done.stderr
    arguments = launch_command_parser().parse_args(words[2:])
    assert (
        arguments.use_deepspeed
        and Path(arguments.deepspeed_config_file).is_file()
        and arguments.num_processes == 4
    )
    arguments_left = arguments.training_script_args
    config = method_config(
        load_recipe(
            "qwen3-8b",
            [arguments_left[i + 1] for i, word in enumerate(arguments_left) if word == "--set"],
        ),
        "grpo",
    )
    assert config.accumulate == 16 and config.trl["vllm_server_base_url"] == "http://localhost:8001"
    assert (
        trl_config(
            config.model_copy(update={"trl": config.trl | {"bf16": False}}), tmp_path
        ).vllm_mode
        == "server"
    )
    done, words = run_script(tmp_path, "qwen3-8b", "serve", SERVER_URL="http://localhost:8001")
    assert words[:2] == ["vllm", "serve"] and words[words.index("--port") + 1] == "8001"
    assert "VLLM_SERVER_DEV_MODE=1" in (tmp_path / "seen.env").read_text()
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("",), {}, "usage: launch.sh FOLDER METHOD"),
        (("qwen3-8b",), {}, "usage: launch.sh FOLDER METHOD"),
        (("grpo", "qwen3-8b"), {}, "no recipe.yaml in"),
        (("qwen3-8b", "grpo"), {"SHARDING": "tp"}, "allowed: fsdp2, zero3"),
        (("qwen3-8b", "grpo"), {"SAMPLER": "magic"}, "allowed: colocate, server"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(tmp_path, words, variables, message):
    done, started = run_script(tmp_path, *words, **variables)
    assert done.returncode != 0 and message in done.stderr and started == []


def test_folders_name_no_host_and_no_key():
    for file in FOLDERS.rglob("*"):
        if file.is_file():
            text = file.read_text()
            hosts = {address.split("/")[0].split(":")[0] for address in text.split("http://")[1:]}
            assert hosts <= {"localhost", "SERVER"} and "api_key:" not in text.lower(), file


@pytest.mark.slow
def test_text_only_cuts_a_checkpoint_that_sees(tmp_path):
    from transformers import AutoModelForCausalLM, Mistral3Config, Mistral3ForConditionalGeneration

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    text = dict(
        model_type="ministral3",
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(build_tokenizer()),
        **sizes,
    )
    seeing = dict(model_type="pixtral", head_dim=8, image_size=28, patch_size=14, **sizes)
    whole = Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=seeing, tie_word_embeddings=False)
    )
    whole.save_pretrained(tmp_path / "whole")
    build_tokenizer().save_pretrained(tmp_path / "whole")
    command = [FOLDERS / "ministral-3-8b" / "cut_text.sh", tmp_path / "whole", tmp_path / "text"]
    options = dict(capture_output=True, text=True, timeout=120)
    options["env"] = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert "FROM TO" in subprocess.run(command[:2], **options).stderr
    cut = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    ids = torch.arange(6, 14)[None]
    assert cut.config.model_type == "ministral3"
    assert model_shape(tmp_path / "text").parameters == sum(p.numel() for p in cut.parameters())
    with torch.no_grad():
        assert torch.allclose(
            cut(input_ids=ids).logits, whole.eval()(input_ids=ids).logits, atol=1e-6
        )


def test_vllm_is_asked_for_by_name(monkeypatch):
    with pytest.raises(ValueError, match=r"memcalib\[vllm\]"):
        check_sampler(TrainConfig(sampler="vllm"))
    monkeypatch.setattr(settings, "is_vllm_available", lambda: True)
    check_sampler(TrainConfig(sampler="vllm", top_p=0.9))
    with pytest.raises(ValueError, match="trl.use_vllm: found with sampler 'shared'"):
        TrainConfig(trl={"use_vllm": True})


@pytest.mark.parametrize("process", [0, 1])
def test_validation_by_vllm_shares_the_work(process):
    tokenizer = build_tokenizer()
    examples = make_examples("short", 3, seed=5)
    prompts_asked = []

    def generate(prompts, images, fields, count):
        prompts_asked.append(prompts)
        return [tokenizer("Keep July in mind.")["input_ids"] for _ in prompts], None

    trainer = SimpleNamespace(
        use_vllm=True,
        processing_class=tokenizer,
        judge=RetryingJudge(exact_judge),
        _generate_single_turn=generate,
        config=TrainConfig(prompt_template="micro", eval_text="concat"),
        accelerator=SimpleNamespace(process_index=process, num_processes=2),
        judged=SimpleNamespace(judge=None),
    )
    judged = StepRows(trainer, examples).judge_validation(None)
    assert len(prompts_asked[0]) == 2, "every process asks for the same number"
    assert [judgment.example_id for judgment in judged] == [e.id for e in examples[process::2]]


def test_a_missing_launch_file_is_named():
    with pytest.raises(FileNotFoundError, match="no file 'nowhere.yaml'"):
        launch_file("nowhere.yaml")
    assert yaml.safe_load(launch_file("qwen3-8b/accelerate.yaml").read_text())["num_processes"] == 8
