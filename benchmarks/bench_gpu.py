"""One training step at a real model's shapes with random weights:
time, memory against the forecast, equality with the CPU.

    python benchmarks/bench_gpu.py [--shape small] [--steps 2] [--layers N] [--prompts N]
                                   [--generations N] [--tokens N] [--sampler shared]
                                   [--method memcalib-rl] [--no-trl]

`--shape qwen3-8b` (or another folder of memcalib/trainer/launch) takes the model's sizes from the
recipe and runs in bfloat16 where there is a GPU; `small` runs anywhere in float32. Weights are
random, so answers run to their limit: every token is paid for. The judge draws levels by the hash
of an answer, which opens every channel. Updates are plain gradient steps, since the states of Adam
do not fit beside 8 billion parameters on one GPU; the phases are otherwise those of the recipe.
`--layers` cuts the model short where memory is less. TRL's own GRPO runs with the same prompts,
sizes and rewards.

Printed: seconds of sampling, of the counterfactual pass with the credit, and of the rest
(log-probabilities, reference, update), medians without the first step; the arithmetic of the
update; the most memory beyond what each phase began with, and the forecast of it; the largest
difference of log-probabilities and the share of equal sampled answers between this device and the
CPU, in float32 with two layers.
"""

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from total_reward import total_reward
from memcalib.trainer.forecast import GIB, TrainingPlan, estimate_memory, model_shape
from memcalib.trainer.recipe import read_config
from memcalib.credit.logprobs import response_logps, response_logps_reference
from memcalib.inference.sampling import sample_tokens
from memcalib.io.settings import package_data, read_yaml
from memcalib.scoring.judge_runs import Judge
from memcalib.problem import Level, encode_prompt, load_examples, render, text_hash
from memcalib.trainer.rewards import prompt_dataset
from memcalib.trainer.train_config import TrainConfig, trl_config
from memcalib.training import CreditTrainer

SMALL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SIZES = {
    "small": (4, 4, 24)
}  # prompts and answers of a step, tokens of an answer; others: (8, 8, 512), one GPU's share
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def text_tokenizer(examples) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 2,000 pieces, learned from the prompts:
    lengths in tokens are near those of a real one.
    """
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = []
    for example in examples:
        memories = [block.memory_text for block in example.blocks]
        texts.append("\n".join([example.question, *memories]))
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=special[0], eos_token=special[1], padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_model(shape: dict, tokenizer, dtype: torch.dtype, device: str):
    """A model of the shape with random weights, made on its device."""
    config = read_config(
        {
            **shape,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        }
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Dice(Judge):
    """Draws the level of each atom by the hash of question and answer."""

    name = "dice"

    def judge(self, example, response):
        rng = random.Random(text_hash(f"{example.id}\n{response}"))
        return {atom_id: Level(rng.randrange(3)) for atom_id in example.levels}


PHASES = {
    "_generate": "sampling",
    "token_advantages": "counterfactual pass",
    "training_step": "step",
}


class Phases:
    """Seconds and most memory of the phases of a trainer's steps, told by its methods."""

    def __init__(self, trainer, parts: int):
        self.parts = parts
        self.seconds = defaultdict(list)
        self.memory = defaultdict(float)
        self.inside = 0.0
        self.gpu = trainer.accelerator.device.type == "cuda"
        for method, phase in PHASES.items():
            if hasattr(trainer, method):
                setattr(trainer, method, self.timed(getattr(trainer, method), phase))

    def timed(self, inner, phase: str):
        def run(*args, **kwargs):
            if self.gpu:
                torch.cuda.synchronize()
                if phase != "step":
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            if self.gpu:
                torch.cuda.synchronize()
                most = torch.cuda.max_memory_allocated() - before
                self.memory[phase] = max(self.memory[phase], most)
                torch.cuda.reset_peak_memory_stats()
            self.seconds[phase].append(time.perf_counter() - start)
            return result

        return run

    def medians(self) -> dict[str, float]:
        """Seconds of each phase in a rollout batch, without the first one;
        what is left of a step is "update".
        """
        steps = [
            sum(self.seconds["step"][i : i + self.parts])
            for i in range(0, len(self.seconds["step"]), self.parts)
        ]
        phases = {
            name: statistics.median(times[1:] or times)
            for name, times in self.seconds.items()
            if name != "step"
        }
        whole = statistics.median(steps[1:] or steps)
        return {**phases, "update": whole - sum(phases.values()), "step": whole}


def base_trainer(config: TrainConfig, model, tokenizer, examples, out: Path) -> GRPOTrainer:
    """TRL's own trainer on the same prompts, sizes and rewards."""
    model.save_pretrained(out / "start")  # of which TRL loads its reference
    model.config._name_or_path = model.name_or_path = str(out / "start")
    return GRPOTrainer(
        model,
        [total_reward(Dice(), examples)],
        trl_config(config, out),
        prompt_dataset(config, tokenizer, examples),
        processing_class=tokenizer,
    )


def difference(shape: dict, tokenizer, examples, device: str) -> dict[str, float]:
    """Of this device and the CPU, in float32 with two layers:
    log-probabilities, sampled answers, and the slow reference.
    """
    two_layers = {**shape, "num_hidden_layers": 2}
    cpu = random_model(two_layers, tokenizer, torch.float32, "cpu")
    prompts = []
    for example in examples[:4]:
        prompts += [encode_prompt(tokenizer, render(example, text="concat"))] * 2

    def draw(model):
        return sample_tokens(
            model, prompts, ends=[tokenizer.eos_token_id], max_tokens=24, seeds=range(len(prompts))
        )

    answers = draw(cpu)
    slow = None
    slow = response_logps_reference(cpu, prompts, answers)
    fast = response_logps(cpu, prompts, answers)
    on_device = cpu.to(device)
    again = draw(on_device)
    on_device_logps = response_logps(on_device, prompts, answers).cpu()
    return {
        "shared prompts against one row at a time, nats": (slow - fast).abs().max().item(),
        f"{device} against the CPU, nats": (on_device_logps - fast).abs().max().item(),
        "answers sampled alike, %": 100
        * sum(a == b for a, b in zip(answers, again, strict=True))
        / len(answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape",
        default="small",
        help="small, or a folder of memcalib/trainer/launch such as qwen3-8b",
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--generations", type=int)
    parser.add_argument("--tokens", type=int, help="of an answer")
    parser.add_argument("--sampler", default="shared", choices=["shared", "generate", "vllm"])
    parser.add_argument("--method", default="memcalib-rl", choices=["grpo", "gdpo", "memcalib-rl"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-trl", action="store_true", help="without TRL's own GRPO")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bar()
    shape = SMALL
    if options.shape != "small":
        shape = read_yaml(package_data("trainer", "launch", options.shape, "recipe.yaml"))[
            "launch"
        ]["shape"]
    shape = dict(shape) | ({"num_hidden_layers": options.layers} if options.layers else {})
    defaults = SIZES.get(options.shape, (8, 8, 512))
    chosen = (options.prompts, options.generations, options.tokens)
    prompts, generations, tokens = (g or d for g, d in zip(chosen, defaults, strict=True))
    half = options.device == "cuda"
    dtype = torch.bfloat16 if half and options.shape != "small" else torch.float32
    examples = [e for e in load_examples("starter:core") if e.model_extra["language"] == "en"][
        : prompts * options.steps
    ]
    tokenizer = text_tokenizer(examples)
    extra = {"optim": "sgd", "bf16": dtype == torch.bfloat16, "gradient_checkpointing": half}
    extra |= {"use_cpu": True} if options.device == "cpu" else {}
    extra |= {"model_init_kwargs": {"dtype": str(dtype).removeprefix("torch.")}}  # of the reference
    sizes = dict(
        prompts=prompts,
        generations=generations,
        steps=options.steps,
        max_tokens=tokens,
        minibatches=2,
    )
    accumulate = (
        max(1, prompts * generations // 2 // 4) if half else 1
    )  # four answers at once, as in the recipe
    config = TrainConfig(
        method=options.method,
        sampler=options.sampler,
        accumulate=accumulate,
        eval_every=0,
        save_every=0,
        trl=extra,
        **sizes,
    )
    lengths = [len(encode_prompt(tokenizer, render(e, text="concat"))) for e in examples]
    print(
        (
            f"{options.shape}: {shape['num_hidden_layers']} layers, {dtype} on {options.device}, "
            f"{prompts} prompts x "
        ),
        end="",
    )
    print(
        f"{generations} answers of {tokens} tokens, prompts of {statistics.mean(lengths):.0f} "
        f"tokens, {options.steps} steps"
    )
    phases_by_name: dict[str, Phases] = {}
    for name in (options.method, *(() if options.no_trl else ("TRL GRPO",))):
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(shape, tokenizer, dtype, options.device)
            if name == "TRL GRPO":
                plain = config.model_copy(
                    update={
                        "sampler": "generate" if options.sampler == "shared" else options.sampler
                    }
                )
                trainer = base_trainer(plain, model, tokenizer, examples, Path(folder))
            else:
                arguments = dict(
                    args=trl_config(config, folder),
                    train_dataset=examples,
                    processing_class=tokenizer,
                )
                trainer = CreditTrainer(model, judge=Dice(), **arguments)
            trainer.remove_callback(PrinterCallback)
            phases_by_name[name] = Phases(trainer, config.minibatches * config.accumulate)
            trainer.train()
            del trainer, model
        if half:
            torch.cuda.empty_cache()
    columns = ["sampling", "counterfactual pass", "update", "step"]
    print(f"\n{'seconds of':24}" + "".join(f"{c:>22}" for c in columns))
    for name, phases in phases_by_name.items():
        medians = phases.medians()
        print(
            f"{name:24}"
            + "".join(f"{medians[c]:22.3f}" if c in medians else f"{'-':>22}" for c in columns)
        )
    plan = TrainingPlan(
        rows=prompts * generations // config.minibatches // config.accumulate,
        prompt=round(statistics.mean(lengths)),
        answer=tokens,
        checkpointing=half,
        half=half,
        copies=1,
        sampled=prompts * generations if options.sampler == "shared" else 0,
    )
    sizes = model_shape(shape)
    forecast = estimate_memory(sizes, plan)
    work = (
        (8 if half else 6)
        * sizes.parameters
        * prompts
        * generations
        * (plan.prompt + plan.answer)
        / 1e12
    )
    rates = (
        f"{name} {work / phases.medians()['update']:.3g}" for name, phases in phases_by_name.items()
    )
    print(
        "update, TFLOP/s as if no prompt were shared, to hold against the device's limit: "
        f"{', '.join(rates)}"
    )
    print(f"\n{'GiB beyond the model and its states':41}{'measured':>11}{'forecast':>11}")
    working = {
        "sampling": ("key-value cache",),
        "counterfactual pass": ("scoring cache",),
        "step": ("activations", "output head"),
    }
    for phase, names in working.items():
        measured = f"{phases_by_name[options.method].memory[phase] / GIB:.3f}" if half else "-"
        print(f"{phase:41}{measured:>11}{sum(forecast.parts[name] for name in names) / GIB:11.3f}")
    print()
    for quantity, value in difference(shape, tokenizer, examples, options.device).items():
        print(f"{quantity:50}{value:12.3g}")


if __name__ == "__main__":
    main()
