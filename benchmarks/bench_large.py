"""Scoring, steps and memory on a random-weight Qwen3-style model with prompts of 1,000 tokens and
answers of 300.

    python benchmarks/bench_large.py score            # counterfactual pass or one row at a time
    python benchmarks/bench_large.py step             # a step of TRL's GRPO against ours
    python benchmarks/bench_large.py distil           # a step of OPSD-GKD, prompts shared or not
    python benchmarks/bench_large.py memory           # peak memory, each in a process of its own
    python benchmarks/bench_large.py                  # the first three, with two layers
        [--size 100m|100m-150k|tiny|8b] [--layers N] [--groups 1]
        [--prompt 1000] [--answer 300] [--device cpu|cuda] [--seed 0]

The examples are the package's own records with blocks of other records added as distractors until
the plain prompt fills the prompt; the tokenizer is a byte-level BPE trained here on those records.
Levels are drawn: an atom is judged right with probability 0.95 (ideal level Ignore) or 0.75.
Sampling is left out: every trainer gets the same fixed answers, pieces of the records' rubrics, so
that what is compared is scoring and update. A step is one rollout batch with two optimizer updates
and a KL term, in float32 on one thread of a CPU, bfloat16 elsewhere. Ratios are of processor time
(on a GPU of wall time), because the machine may be shared. `100m-150k` has the vocabulary of Qwen3
(58 of its 100 million parameters are the head), `8b` the shape of Qwen3-8B with LoRA adapters of
rank 64 and wants a GPU of 80 GB.
"""

import argparse
import functools
import hashlib
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

from memcalib import training
from memcalib.channels import channel_rewards, judgment_tensors
from memcalib.trainer.rewards import prompt_dataset
from memcalib.localization import ablation_pairs
from memcalib.credit.prefix_groups import sharing_faults
from memcalib.credit.prefix_groups import prefix_groups
from memcalib.problem import (
    Example,
    Level,
    encode_prompt,
    judge_all,
    judgment_for,
    render,
    sample_records,
)
from memcalib.credit.logprobs import response_logps, response_logps_reference
from memcalib.trainer.train_config import TrainConfig, trl_config
from memcalib.credit.tree_attention import tree_logps

SIZES = {
    "tiny": dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=8192,
        tie_word_embeddings=True,
    ),
    "100m": dict(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        vocab_size=32768,
        tie_word_embeddings=True,
    ),
    "100m-150k": dict(
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "8b": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    ),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 words, trained on the package's records."""
    text = [render(e)[1]["content"] for e in sample_records()] + [
        e.to_json() for e in sample_records()
    ]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    options = dict(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words.train_from_iterator(text, trainers.BpeTrainer(show_progress=False, **options))
    names = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **names)


def long_example(number: int, tokens: int, tokenizer, rng: random.Random) -> Example:
    """One of our records among blocks of the others, as many as fill the prompt."""
    pool = sample_records()
    base = pool[number % len(pool)]
    atoms = list(base.atoms)
    blocks = list(base.blocks)
    foreign = []
    for other in pool:
        if other.id != base.id:
            foreign += [(other, block) for block in other.blocks]
    for k, (other, block) in enumerate(rng.sample(foreign, len(foreign))):
        parent = f"block-{k}"
        ids = [f"block-{k}-{a}" for a in block.atom_ids]
        blocks.append(block.model_copy(update={"parent_memory_id": parent, "atom_ids": ids}))
        changes = {"parent_memory_id": parent, "ideal": Level.IGNORE}
        named = zip(ids, block.atom_ids, strict=True)
        atoms += [other.atom(a).model_copy(update={"atom_id": new, **changes}) for new, a in named]
        shuffled = rng.sample(blocks, len(blocks))
        fields = dict(
            domain=base.domain, question=base.question, memory_blocks=shuffled, memories=atoms
        )
        example = Example(id=f"large-{number}", **fields)
        if len(encode_prompt(tokenizer, render(example, text="concat"))) >= tokens:
            break
    return example


def drawn_judge(example: Example, response: str):
    """Levels drawn from the example and the answer: mostly right,
    so that few channels of an answer hold atoms.
    """
    rng = random.Random(hashlib.sha256((example.id + response).encode()).hexdigest())
    actual = {}
    for atom, ideal in example.levels.items():
        right = rng.random() < (0.95 if ideal == Level.IGNORE else 0.75)
        actual[atom] = ideal if right else rng.choice([level for level in Level if level != ideal])
    return judgment_for(example, actual)


def length_of(spans: list[tuple[int, int]]) -> int:
    """Tokens in all spans together."""
    return sum(end - start for start, end in spans)


class Work:
    """Model, prompts, answers and counterfactual pairs of one rollout batch."""

    def __init__(self, options):
        self.options = options
        rng = random.Random(options.seed)
        self.tokenizer = build_tokenizer()
        numbers = range(options.groups)
        self.examples = [
            long_example(number, options.prompt, self.tokenizer, rng) for number in numbers
        ]
        rubrics = []
        for example in sample_records():
            rubrics += [json.dumps(atom.usage_rubric) for atom in example.atoms]
        text = self.tokenizer(" ".join(rubrics), add_special_tokens=False).input_ids
        self.many = []
        for example in self.examples:
            self.many += [example] * 8
        starts = [rng.randrange(len(text) - options.answer) for _ in self.many]
        self.answers = [
            [*text[a : a + options.answer - 1], self.tokenizer.eos_token_id] for a in starts
        ]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.answers]
        pairs = ablation_pairs(self.many, judge_all(drawn_judge, self.many, texts), self.encode)
        self.prompts = pairs.prompts
        self.responses = [self.answers[row] for row in pairs.rows]

    def model(self) -> Qwen3ForCausalLM:
        torch.manual_seed(0)
        sizes = SIZES[self.options.size] | (
            {"num_hidden_layers": self.options.layers} if self.options.layers else {}
        )
        config = Qwen3Config(max_position_embeddings=16384, **sizes)
        with torch.device(self.options.device):
            dtype = torch.float32 if self.options.device == "cpu" else torch.bfloat16
            return Qwen3ForCausalLM(config).to(dtype).eval()

    def spans(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """First and last position of every run of tokens that is read:
        row by row, and with shared prefixes.
        """
        distinct = [list(p) for p in dict.fromkeys(map(tuple, self.prompts))]
        alone = [(0, len(p) + len(y)) for p, y in zip(self.prompts, self.responses, strict=True)]
        shared = []
        for group in prefix_groups(distinct):
            shared.append((0, len(distinct[group.base])))
            shared += [
                (n, len(distinct[i])) for i, n in zip(group.members, group.shared, strict=True)
            ]
        jobs = {(tuple(p), tuple(y)) for p, y in zip(self.prompts, self.responses, strict=True)}
        return alone, shared + [(len(p), len(p) + len(y)) for p, y in jobs]

    def encode(self, example: Example) -> list[int]:
        """The prompt of an example, as token ids."""
        return encode_prompt(self.tokenizer, render(example, text="concat"))

    def describe(self, model) -> str:
        alone, shared = self.spans()
        lengths = [len(self.encode(e)) for e in self.examples]
        answers = sum(map(len, self.responses))
        tokens = [length_of(spans) for spans in (alone, shared)]
        sums = [arithmetic(model, spans, answers) for spans in (alone, shared)]
        return (
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, vocabulary "
            f"{model.config.vocab_size}, {model.config.num_hidden_layers} layers; "
            f"{len(self.examples)} groups of 8, prompts of {lengths} tokens with "
            f"{[len(e.atoms) for e in self.examples]} atoms, answers of {self.options.answer}\n"
            f"{len(self.prompts)} counterfactual pairs, {len(set(map(tuple, self.prompts)))} "
            f"distinct ablated prompts: {tokens[0]} tokens row by row, {tokens[1]} with shared "
            f"prefixes ({tokens[0] / tokens[1]:.2f}x fewer); {sums[0] / 1e12:.2f} and "
            f"{sums[1] / 1e12:.2f} tera multiply-adds ({sums[0] / sums[1]:.2f}x fewer: what "
            "sharing without approximation can win where time is arithmetic)"
        )


def arithmetic(model, spans: list[tuple[int, int]], answers: int) -> float:
    """Multiply-adds of the weights, of attention to what stands before each token,
    and of the head at `answers` tokens.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    weights = sum(p.numel() for p in model.parameters()) - head * (
        1 if config.tie_word_embeddings else 2
    )
    attended = sum((a + b + 1) * (b - a) / 2 for a, b in spans)
    look = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return weights * sum(b - a for a, b in spans) + look * attended + head * answers


class Timer:
    """Processor seconds on a CPU, wall seconds on a GPU."""

    def __init__(self, device: str):
        self.device = device

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, function) -> tuple[float, object]:
        start = self.now()
        out = function()
        return self.now() - start, out


def score(work: Work) -> None:
    """(a) the counterfactual pass, shared, in trees, and one row at a time (a sample of the rows,
    scaled).
    """
    model = work.model()
    timer = Timer(work.options.device)
    few = work.options.rows
    print(work.describe(model))
    pairs = list(zip(work.prompts, work.responses, strict=True))
    sample = pairs[:: max(1, len(pairs) // few)][:few]

    def alone(p, y):
        return response_logps(model, [p], [y], share=False)

    def naive(p, y):
        return response_logps_reference(model, [p], [y])

    response_logps(model, [[1, 2]] * 2, [[3], [4]])
    seconds = {"one row at a time": 0.0, "one row at a time, all logits": 0.0}
    alone_logps = []
    halves = []
    middle = len(sample) // 2
    for half in (sample[:middle], sample[middle:]):
        took, logps = timer(lambda half=half: [alone(p, y)[0] for p, y in half])
        seconds["one row at a time"] += took * len(pairs) / len(sample)
        alone_logps += logps
        if not halves:
            took, out = timer(lambda: response_logps(model, work.prompts, work.responses))
            halves.append(seconds.setdefault("shared caches", took))
    took, _ = timer(lambda: [naive(p, y) for p, y in sample[:2]])
    seconds["one row at a time, all logits"] = took * len(pairs) / 2
    if work.options.trees:
        seconds["trees"], _ = timer(lambda: tree_logps(model, work.prompts, work.responses))
    at = [pairs.index(pair) for pair in sample]
    gap = max(
        (out[i, : len(y)] - y).abs().max().item() for i, y in zip(at, alone_logps, strict=True)
    )
    print(f"largest difference to one row at a time: {gap:.1e}; verdicts {sharing_faults(model)}")
    for name, value in seconds.items():
        print(f"  {name:32}{value:10.1f} s   {value / seconds['shared caches']:5.2f}x")


def total_reward(examples: list[Example]):
    """The sum of the nine channels, as the one reward of TRL's trainer."""

    def total(completions, example, **_):
        judged = judge_all(
            drawn_judge, [examples[i] for i in example], [c[0]["content"] for c in completions]
        )
        ideal, actual, mask, _ = judgment_tensors(judged)
        return channel_rewards(ideal, actual, mask).sum(1).tolist()

    return total


def fixed_answers(work: Work):
    """Answers in place of sampling: a function of prompt ids, row by row."""
    answers_by_prompt = {
        tuple(work.encode(e)): work.answers[8 * k : 8 * k + 8] for k, e in enumerate(work.examples)
    }

    def answer_ids(prompts) -> list[list[int]]:
        uses: dict[tuple, int] = {}
        out = []
        for prompt in map(tuple, prompts):
            out.append(answers_by_prompt[prompt][uses.get(prompt, 0)])
            uses[prompt] = uses.get(prompt, 0) + 1
        return out

    return answer_ids


def build_trainer(work: Work, method: str, out: Path, share: bool = True):
    """TRL's GRPO trainer for `base`, else ours; both sample nothing and get the same answers."""
    options = work.options
    answers_of = fixed_answers(work)
    trl = {"bf16": options.device != "cpu", "use_cpu": options.device == "cpu"}
    trl["gradient_checkpointing"] = options.checkpointing
    sizes = dict(
        prompts=options.groups,
        generations=8,
        steps=1 + options.warm,
        max_tokens=options.answer,
        lr=1e-6,
    )
    config = TrainConfig(
        method="gdpo" if method == "base" else method, **sizes, share_prompts=share, trl=trl
    )
    model = work.model()
    peft = (
        LoraConfig(r=64, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
        if options.size == "8b"
        else None
    )

    def sample_tokens(model, prompts, **_):
        return answers_of(prompts)

    training.sample_tokens = sample_tokens
    if method != "base":
        trainer_class = training.trainer_class(method)
        options = dict(
            args=trl_config(config, out),
            train_dataset=work.examples,
            processing_class=work.tokenizer,
        )
        return trainer_class(model, judge=drawn_judge, peft_config=peft, **options)
    if peft is None:
        model.save_pretrained(out / "reference")
        model.config._name_or_path = str(out / "reference")

    def rollout(prompts, trainer):
        ids = [encode_prompt(work.tokenizer, prompt) for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": answers_of(ids), "logprobs": None}

    dataset = prompt_dataset(config, work.tokenizer, work.examples)
    arguments = trl_config(config, out)
    reward = [total_reward(work.examples)]
    other_arguments = dict(processing_class=work.tokenizer, rollout_func=rollout, peft_config=peft)
    return GRPOTrainer(model, reward, arguments, dataset, **other_arguments)


def one_step(work: Work, method: str, share: bool = True) -> tuple[float, object]:
    """Seconds of a whole step of one trainer: rewards, old and reference log-probabilities,
    credit, two updates.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(work, method, Path(folder), share)
        timer = Timer(work.options.device)
        spent = []
        inner = trainer.training_step

        def timed(*args, **kwargs):
            took, loss = timer(lambda: inner(*args, **kwargs))
            spent.append(took)
            return loss

        trainer.training_step = timed
        trainer.train()
    return sum(spent[-2:]), trainer


def step(work: Work) -> None:
    """(b, c) whole steps, one trainer after the other."""
    print(work.describe(work.model()))
    methods = {"base": "TRL GRPO", "gdpo": "GDPO", "memcalib-rl": "MemCalib-RL"}
    base = None
    for method, name in methods.items():
        took, trainer = one_step(work, method)
        base = base or took
        shared = sharing_faults(trainer.accelerator.unwrap_model(trainer.model))
        print(f"  {name:16}{took:10.1f} s   {took / base:5.2f}   {shared or ''}", flush=True)


def distil(work: Work) -> None:
    """A whole step of OPSD-GKD: the teacher's lesson, old and reference log-probabilities,
    two updates.
    """
    print(work.describe(work.model()))
    took = {}
    for share in (False, True):
        took[share], trainer = one_step(work, "opsd-gkd", share)
        lengths = sorted({len(trainer.teacher_prompt(example)) for example in work.examples})
        name = "shared prompts" if share else "no shared prompts"
        faults = sharing_faults(trainer.model)
        print(
            f"  {name:18}{took[share]:10.1f} s   {took[False] / took[share]:5.2f}x   {faults}",
            flush=True,
        )
    print(f"  teacher's prompts of {lengths} tokens, read once in both")


def peak(work: Work, kind: str) -> None:
    """Peak memory of one kind of work beyond model and data,
    printed as JSON (a child process of `memory`).
    """
    model = work.model()
    device = work.options.device
    prompts = [work.encode(e) for e in work.many]

    def usage():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    if device != "cpu":
        usage = torch.cuda.max_memory_allocated
    tree_logps(model, [[1, 2]] * 2, [[3], [4]])
    if kind in ("update, plain", "update, trees"):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    before = usage()
    if kind == "counterfactual":
        response_logps(model, work.prompts, work.responses)
    elif kind == "update, trees":
        half = [range(k, len(prompts), 2) for k in (0, 1)][0]
        rows = [prompts[i] for i in half], [work.answers[i] for i in half]
        tree_logps(model, *rows, grad=True, entropy=True)[0].sum().backward()
    elif kind == "update, plain":
        rows = torch.tensor(
            [p + y for p, y in list(zip(prompts, work.answers, strict=True))[: len(prompts) // 2]]
        )
        training_rows(model.to(device), rows.to(device), work.options.answer)
    print(json.dumps({"bytes": usage() - before}))


def training_rows(model, rows: torch.Tensor, width: int) -> None:
    """TRL's own pass of an update over half of the answers."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    labels = rows.clone()
    labels[:, :-width] = -100
    out = model(
        input_ids=rows, attention_mask=torch.ones_like(rows), labels=labels, fused_lm_head=True
    )
    out.log_probs.sum().backward()


def memory(work: Work) -> None:
    """(d) peak memory beyond model, gradients and data, of the counterfactual pass and of the pass
    of an update.
    """
    print(work.describe(work.model()))
    for kind in ("counterfactual", "update, trees", "update, plain"):
        command = [sys.executable, __file__, "peak", *sys.argv[2:], "--kind", kind]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(f"  {kind:16}{json.loads(out.strip().splitlines()[-1])['bytes'] / 2**20:10.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "verb",
        nargs="?",
        default="all",
        choices=["all", "score", "step", "distil", "memory", "peak"],
        help="left out: score, step and distil, with two layers unless --layers says otherwise",
    )
    parser.add_argument("--size", default="100m", choices=sorted(SIZES))
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the size has")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=300)
    parser.add_argument(
        "--rows", type=int, default=4, help="score: rows timed one at a time; the time is scaled"
    )
    parser.add_argument(
        "--trees", action="store_true", help="score: time trees without gradients as well"
    )
    parser.add_argument(
        "--warm", type=int, default=0, help="step: steps before the one that is timed"
    )
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        help="step: gradient checkpointing, for all trainers",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if options.verb == "all" and options.layers is None:
        options.layers = 2
    work = Work(options)
    verbs = {"score": score, "step": step, "distil": distil, "memory": memory}
    if options.verb == "all":
        for name in ("score", "step", "distil"):
            print(f"\n{name}, {options.layers} layers")
            verbs[name](work)
        return
    verbs["peak"] = functools.partial(peak, kind=options.kind)
    verbs[options.verb](work)


if __name__ == "__main__":
    main()
