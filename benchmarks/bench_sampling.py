"""Time of sampling on one thread of a CPU, with `decoding` and without it, in one run.

    python benchmarks/bench_sampling.py [--rows 32] [--prompt 250] [--tokens 40] [--rounds 2]

The network has the shape of SmolLM2-135M and random weights, so nothing has to be downloaded. It is
sampled in two forms: with an adapter of rank 32 under `torch.autocast`, as a training in half
precision samples, and with all weights in single precision, as an evaluation does. A fourth of the
prompts are distinct, as in groups of four answers. The ways take turns. Printed: processor seconds
of each, and the ratio of their sums.
"""

import argparse
import time
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from memcalib.inference import sampling

SHAPE = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


@contextmanager
def usual_way():
    """Sampling as it is without `decoding`."""
    with mock.patch.object(sampling, "decoding", lambda model: nullcontext()):
        yield


def seconds(model, prompts, tokens: int, half: bool, usual: bool) -> float:
    """Processor seconds in which each prompt gets an answer of so many tokens."""
    with ExitStack() as blocks:
        if usual:
            blocks.enter_context(usual_way())
        if half:
            blocks.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        started = time.process_time()
        answers = sampling.sample_tokens(
            model, prompts, ends=[SHAPE.vocab_size], max_tokens=tokens, seeds=range(len(prompts))
        )
        spent = time.process_time() - started
    assert all(len(answer) == tokens for answer in answers)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"rows": 32, "prompt": 250, "tokens": 40, "rounds": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = LlamaForCausalLM(SHAPE).eval()
    distinct = torch.randint(1, SHAPE.vocab_size, (-(-options.rows // 4), options.prompt)).tolist()
    prompts = [distinct[row // 4] for row in range(options.rows)]
    adapter = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear")
    print(f"{options.rows} rows, prompts of {options.prompt} tokens, {options.tokens} new tokens")
    for half in (False, True):
        model = get_peft_model(network, adapter) if half else network
        spent = {False: 0.0, True: 0.0}
        for _ in range(options.rounds):
            for usual in (True, False):
                spent[usual] += seconds(model, prompts, options.tokens, half, usual)
        form = "adapter, autocast to bfloat16" if half else "whole weights, float32"
        print(
            f"{form:32} usual {spent[True]:6.1f} s  decoding {spent[False]:6.1f} s  "
            f"ratio {spent[False] / spent[True]:.2f}"
        )


if __name__ == "__main__":
    main()
