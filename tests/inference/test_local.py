"""The sampler against the library's and against slow references, local weights as a back end,
and vLLM's interface.
"""

import contextlib
import math
import sys
from collections import Counter
from itertools import chain
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from micro_policy import EXAMPLES, TOKENIZER
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from memcalib.inference.local import LocalBackend, VllmBackend
from memcalib.inference.sampling import (
    decoding,
    draw,
    end_tokens,
    answer_and_judge,
    evaluating,
    prompt_encoder,
    sample_answers,
    sample_tokens,
    uniform_numbers,
)
from memcalib.products.micro.world import exact_judge
from memcalib.products.micro.policy import build_policy, load_policy, policy_path
from memcalib.problem import Rollout
from memcalib.io.records import read_jsonl
from memcalib.inference.rollout import Sampling, generate, requests

torch.set_num_threads(1)
MICRO = Sampling(seeds=(42, 43), max_tokens=40, text="concat", prompt_template="micro")
chances = st.lists(st.integers(0, 20), min_size=2, max_size=9).filter(any)


def local(**changes) -> LocalBackend:
    model, tokenizer = load_policy("cold-short")
    return LocalBackend(model, tokenizer, name="cold", **changes)


def requests_of(backend, sampling=MICRO, examples=EXAMPLES):
    """All requests that a back end gets."""
    return list(requests(examples, sampling, backend.name, **backend.settings))


def responses(rows) -> dict[tuple, str]:
    """The responses of rows by their keys."""
    return {row.key: row.response for row in rows}


def encode_all(examples, copies=1) -> list[list[int]]:
    """The prompts of the examples under the template `micro`, each so many times in a row."""
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    prompts = []
    for example in examples:
        prompts += [encode(example)] * copies
    return prompts


# drawing


def token_slowly(weights: list[int], number: float, top_p: float = 1.0) -> int:
    """Walk over the tokens of the nucleus until their share of the mass passes the number."""
    heaviest_first = sorted(range(len(weights)), key=lambda i: -weights[i])
    nucleus = set()
    mass = 0.0
    for i in heaviest_first:
        if weights[i] and mass < top_p * sum(weights):
            nucleus.add(i)
        mass += weights[i]
    total = sum(weights[i] for i in nucleus)
    cumulated = 0
    for i in sorted(nucleus):
        cumulated += weights[i]
        if cumulated > number * total:
            return i
    raise AssertionError("no token")


@given(chances, st.integers(0, 2**12 - 1))
def test_a_number_picks_the_token_of_the_slow_reference(weights, k):
    number = (k + 0.5) / 2**12
    edges = np.cumsum(weights) / sum(weights)
    if np.abs(edges - number).min() < 1e-5:
        return
    logits = torch.tensor([weights], dtype=torch.float32).log()
    assert draw(logits, numbers=torch.tensor([number])).item() == token_slowly(weights, number)


@given(
    st.permutations([1, 2, 4, 8, 16, 32]),
    st.integers(0, 2**12 - 1),
    st.sampled_from([0.3, 0.6, 0.8, 0.9]),
)
def test_the_nucleus_of_the_slow_reference(weights, k, top_p):
    number = (k + 0.5) / 2**12
    logits = torch.tensor([weights], dtype=torch.float32).log()
    allowed = {token_slowly(weights, number + shift, top_p) for shift in (-1e-6, 1e-6)}
    assert draw(logits, top_p=top_p, numbers=torch.tensor([number])).item() in allowed


@given(chances)
def test_the_ends_of_the_dice_never_pick_an_impossible_token(weights):
    logits = torch.tensor([weights], dtype=torch.float32).log()
    for number in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
        token = draw(logits, numbers=torch.tensor([number])).item()
        assert 0 <= token < len(weights) and weights[token] > 0


@given(
    st.lists(st.integers(0, 2**48), min_size=1, max_size=5), st.integers(1, 30), st.integers(1, 30)
)
def test_dice_depend_on_the_seed_alone(seeds, short, long):
    numbers = uniform_numbers(seeds, short)
    assert numbers.shape == (len(seeds), short) and ((numbers >= 0) & (numbers < 1)).all()
    for row, seed in zip(numbers, seeds, strict=True):
        assert (row[: min(short, long)] == uniform_numbers([seed], long)[0, :short]).all()


@pytest.mark.parametrize("seeds_of_rows", [False, True])
def test_sampling_follows_the_policy(seeds_of_rows):
    policy = build_policy(0)
    prompts = encode_all(EXAMPLES[:1], copies=4000)
    if seeds_of_rows:
        randomness = {"seeds": range(4000)}
    else:
        randomness = {"generator": torch.Generator().manual_seed(0)}
    rows = sample_tokens(policy, prompts, ends=[2], max_tokens=1, temperature=0.7, **randomness)
    with torch.no_grad():
        logits = policy(torch.tensor(prompts[:1])).logits[0, -1]
    expected = torch.softmax(logits / 0.7, -1)
    tokens = torch.tensor([row[0] for row in rows])
    shares = torch.bincount(tokens, minlength=len(expected)) / 4000
    mean_deviation = (2 * expected * (1 - expected) / (4000 * math.pi)).sqrt().sum()
    assert (shares - expected).abs().sum() < 3.5 * mean_deviation


# the loop


@pytest.mark.parametrize("copies", [1, 3])
def test_greedy_sampling_equals_generate(copies):
    policy = build_policy(3)
    with torch.no_grad():
        policy.lm_head.weight[TOKENIZER.eos_token_id] *= 2.5
    prompts = encode_all(EXAMPLES, copies)
    end = TOKENIZER.eos_token_id
    ours = sample_tokens(policy, prompts, ends=[end], max_tokens=30, temperature=0)
    padded = TOKENIZER.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    generated = policy.generate(**padded, max_new_tokens=30, do_sample=False)
    theirs = generated[:, padded["input_ids"].shape[1] :].tolist()
    assert ours == [up_to_first(row, [end]) for row in theirs]


def up_to_first(row: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the first end, which is kept; all of them where there is none."""
    for length, token in enumerate(row, 1):
        if token in ends:
            return row[:length]
    return row


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"num_hidden_layers": 2}),
        ("mistral", {"num_hidden_layers": 2, "sliding_window": 6}),
        ("qwen3_5_text", LINEAR),
    ],
    ids=["full attention", "sliding window", "linear attention"],
)
def test_every_kind_of_cache_loses_and_copies_rows(kind, options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **options)).eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [9], [12, 13]]
    endless = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    rows = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=16, **endless)
        rows.append(output[0, len(prompt) :].tolist())
    ends = [rows[3][2], rows[1][5]]
    expected = [up_to_first(row, ends) for row in rows]
    assert sample_tokens(model, prompts, ends=ends, max_tokens=16, temperature=0) == expected
    assert len({len(row) for row in expected}) > 1


def decoded(model, **options):
    return sample_tokens(
        model, [[1, 2, 3], [4, 5, 6, 7, 8]], ends=[0], max_tokens=12, temperature=0, **options
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sampling_leaves_the_model_as_it_was(attention):
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **TINY, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded(model)
    assert model.config._attn_implementation == attention
    assert model.training and not any(weight.requires_grad for weight in model.parameters())
    model.lm_head.weight.fill_(torch.nan)
    with (
        pytest.raises(FloatingPointError),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        decoded(model)
    assert model.config._attn_implementation == attention
    assert model.training and not any(weight.requires_grad for weight in model.parameters())


def test_weights_that_are_converted_once_give_the_same_answers():
    """Inside an adapter, too, where the base weights are frozen and the adapter's are not."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **TINY, num_hidden_layers=2)
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    ).eval()
    ids = torch.arange(1, 13).reshape(2, 6)
    last, before = ids[:, -1:], ids[:, :-1]
    logits = []
    gradients = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for block in (contextlib.nullcontext, lambda: decoding(model)):
            with block():
                gradients.append(all(weight.requires_grad for weight in model.parameters()))
                cache = model(input_ids=before, use_cache=True).past_key_values
                logits.append(model(input_ids=last, past_key_values=cache).logits)
    assert gradients == [False, True]  # autocast keeps the copies of weights with a gradient
    assert logits[0].dtype == torch.bfloat16
    torch.testing.assert_close(*logits, rtol=2**-6, atol=2**-6)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_rows_do_not_depend_on_their_company():
    policy, tokenizer = load_policy("cold-short")
    prompts = encode_all(EXAMPLES, copies=2)
    options = {"ends": end_tokens(policy, tokenizer), "max_tokens": 40}
    together = sample_tokens(policy, prompts, seeds=range(16), **options)
    backwards = sample_tokens(policy, prompts[::-1], seeds=range(15, -1, -1), **options)
    alone = []
    for k, prompt in enumerate(prompts):
        alone += sample_tokens(policy, [prompt], seeds=[k], **options)
    assert together == backwards[::-1] == alone
    assert len({tuple(row) for row in together}) > 8


def test_each_row_has_its_own_limit():
    policy = build_policy(0)
    prompts = encode_all(EXAMPLES[:4])
    whole = sample_tokens(policy, prompts, ends=[2], max_tokens=12, seeds=range(4))
    limits = [1, 12, 3, 7]
    cut = sample_tokens(policy, prompts, ends=[2], max_tokens=limits, seeds=range(4))
    assert cut == [row[:limit] for row, limit in zip(whole, limits, strict=True)]


def test_the_mode_is_left_alone_even_by_an_error():
    policy = build_policy(0).train()
    sample_answers(policy, TOKENIZER, EXAMPLES[:1], max_tokens=2, prompt_template="micro")
    assert policy.training
    with pytest.raises(RuntimeError, match="inside"), evaluating(policy):
        assert not policy.training
        raise RuntimeError("inside")
    assert policy.training


def test_damaged_weights_are_an_error():
    policy = build_policy(0)
    with torch.no_grad():
        policy.model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        list(LocalBackend(policy, TOKENIZER).answers(requests(EXAMPLES, MICRO, "m")))


# a policy in memory


def test_no_memory_asks_without_and_judges_with():
    options = dict(condition="no_memory", prompt_template="micro", max_tokens=4, name="x")
    rollouts, judgments = answer_and_judge(
        build_policy(0), TOKENIZER, EXAMPLES[:2], exact_judge, **options
    )
    assert [len(j.atoms) for j in judgments] == [len(e.atoms) for e in EXAMPLES[:2]]
    assert {rollout.condition for rollout in rollouts} == {"no_memory"}
    assert {(j.condition, j.model) for j in judgments} == {("no_memory", "x")}


def test_an_unknown_condition_is_refused():
    with pytest.raises(ValueError, match="no_memory"):
        sample_answers(build_policy(0), TOKENIZER, EXAMPLES[:1], condition="no memory")


# local weights


def test_answers_are_whole_rows():
    backend = local()
    all_requests = requests_of(backend)
    rows = list(backend.answers(iter(all_requests)))
    assert len(rows) == 16
    assert {row.key for row in rows} == {request.key for request in all_requests}
    for row in rows:
        has_ended = row.token_ids[-1] in end_tokens(backend.model, backend.tokenizer)
        assert row.finish_reason == ("stop" if has_ended else "length")
        assert row.response == backend.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        assert row.usage["completion_tokens"] == len(row.token_ids)
        assert row.usage["prompt_tokens"] > 10
        assert row.settings["engine"] == "transformers"
        assert row.settings["dtype"] == "float32"
        assert row.example_hash


@pytest.mark.parametrize(
    "changes", [{"batch_tokens": 1}, {"batch_tokens": 300}, {"window": 3}], ids=str
)
def test_batches_do_not_change_answers(changes):
    expected = responses(local().answers(requests_of(local())))
    assert responses(local(**changes).answers(requests_of(local()))) == expected


def test_batches_keep_the_budget(monkeypatch):
    backend = local(batch_tokens=400)
    sizes = []
    sample = backend.sample

    def record_and_sample(batch):
        longest_prompt = max(len(encoded.prompt_ids) for encoded in batch)
        sizes.append((len(batch), longest_prompt + 40))
        return sample(batch)

    monkeypatch.setattr(backend, "sample", record_and_sample)
    list(backend.answers(requests_of(backend)))
    assert sum(count for count, _ in sizes) == 16 and len(sizes) > 3
    assert all(count == 1 or count * width <= 400 for count, width in sizes)


def test_killed_and_resumed_gives_the_same_answers(tmp_path):
    def stop(row):
        if len((tmp_path / "a.jsonl").read_text().splitlines()) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(EXAMPLES, local(batch_tokens=500), MICRO, tmp_path / "a.jsonl", on_row=stop)
    resumed = generate(EXAMPLES, local(), MICRO, tmp_path / "a.jsonl")
    generate(EXAMPLES, local(), MICRO, tmp_path / "b.jsonl")
    assert (resumed.found_before, resumed.new) == (5, 11)

    def read(name):
        return responses(read_jsonl(tmp_path / name, Rollout))

    assert read("a.jsonl") == read("b.jsonl")


def test_two_samplings_do_not_share_a_batch():
    backend = local()
    greedy = MICRO.model_copy(update={"temperature": 0.0})
    random_requests = requests_of(backend)
    greedy_requests = requests_of(backend, greedy)
    random_responses = responses(backend.answers(random_requests))
    greedy_responses = responses(backend.answers(greedy_requests))
    in_turns = chain.from_iterable(zip(random_requests, greedy_requests, strict=True))
    assert responses(backend.answers(in_turns)) == {**random_responses, **greedy_responses}
    same_for_both_seeds = Counter((key[0], text) for key, text in greedy_responses.items())
    assert set(same_for_both_seeds.values()) == {2}


def test_a_prompt_that_does_not_fit_is_a_row_that_says_so():
    backend = local()
    all_requests = requests_of(backend)
    whole = responses(backend.answers(all_requests))
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    lengths = {request.key: len(encode(request.example)) for request in all_requests}
    backend.limit = sorted(lengths.values())[len(lengths) // 2]
    rows = list(backend.answers(all_requests))
    assert len(rows) == 16
    for row in rows:
        length = lengths[row.key]
        if length < backend.limit:
            assert row.finish_reason != "error"
            assert length + len(row.token_ids) <= backend.limit
            assert whole[row.key].startswith(row.response.rstrip())
        else:
            assert row.finish_reason == "error" and row.error.startswith("context_too_long: ")
            for words in (repr(row.example_id), str(length), f"limit is {backend.limit}"):
                assert words in row.error


class Cramped(LocalBackend):
    """A machine that holds `room` answers at once."""

    room = 3

    def sample(self, batch):
        if len(batch) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().sample(batch)


def test_out_of_memory_halves_the_batch(caplog):
    backend = Cramped(*load_policy("cold-short"), name="cold")
    rows = list(backend.answers(requests_of(backend)))
    assert len(rows) == 16
    assert responses(rows) == responses(local().answers(requests_of(local())))
    assert caplog.records[0].args == (16,) and "out of memory" in caplog.text
    warnings = len(caplog.records)
    assert len(list(backend.answers(requests_of(backend)))) == 16
    assert len(caplog.records) == warnings, "the smaller budget holds"


def test_an_answer_too_large_for_the_machine_is_a_row():
    backend = Cramped(*load_policy("cold-short"), name="cold")
    backend.room = 0
    rows = list(backend.answers(requests_of(backend, examples=EXAMPLES[:1])))
    assert [row.finish_reason for row in rows] == ["error", "error"]
    assert all(row.error.startswith(f"out_of_memory: example {row.example_id!r}") for row in rows)


def test_another_error_of_the_model_is_not_swallowed(monkeypatch):
    def fail(batch):
        raise RuntimeError("CUDA error: bad luck")

    backend = local()
    monkeypatch.setattr(backend, "sample", fail)
    with pytest.raises(RuntimeError, match="bad luck"):
        list(backend.answers(requests_of(backend)))


def test_names_and_what_is_missing(tmp_path):
    assert LocalBackend(policy_path("cold-short")).name == "cold-short"
    assert LocalBackend(policy_path("cold-short"), name="mine").name == "mine"
    assert LocalBackend(build_policy(0), TOKENIZER).name == "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match="tokenizer"):
        LocalBackend(build_policy(0))
    with pytest.raises(OSError, match="nothing"):
        LocalBackend(tmp_path / "nothing")
    with pytest.raises(OSError, match="no-such"):
        LocalBackend("owner/no-such-model")


def test_weights_are_read_when_the_first_request_comes(monkeypatch, tmp_path):
    backend = LocalBackend(policy_path("cold-short"), dtype="float32", device="cpu")
    assert list(backend.answers([])) == [] and "model" not in vars(backend)
    rows = list(backend.answers(requests_of(backend, examples=EXAMPLES[:1])))
    assert "model" in vars(backend)
    assert backend.model.dtype == torch.float32 and backend.limit == 1024
    in_memory = local()
    expected = in_memory.answers(requests_of(in_memory, examples=EXAMPLES[:1]))
    assert [row.response for row in rows] == [row.response for row in expected]


def test_thoughts_are_no_part_of_the_answer(monkeypatch):
    backend = local()
    monkeypatch.setattr(
        backend.tokenizer, "decode", lambda ids, **_: "<think>Peanuts?</think>\n\nNone."
    )
    assert {row.response for row in backend.answers(requests_of(backend))} == {"None."}


# vLLM: its interface, on a stand-in that records what it is asked


@pytest.fixture
def vllm(monkeypatch):
    class LLM:
        def __init__(self, model, **options):
            self.model = model
            self.options = options
            self.calls = []
            self.finish = {}
            self.model_config = SimpleNamespace(max_model_len=options.get("max_model_len", 1000))

        def generate(self, prompts, sampling_params, *, use_tqdm=True):
            assert len(prompts) == len(sampling_params) and use_tqdm is False
            self.calls.append(list(zip(prompts, sampling_params, strict=True)))
            outputs = []
            for prompt in prompts:
                finish_reason = self.finish.get(tuple(prompt["prompt_token_ids"]), "stop")
                completion = SimpleNamespace(
                    text="Hope this helps.", token_ids=(7, 8, 2), finish_reason=finish_reason
                )
                outputs.append(SimpleNamespace(outputs=[completion], num_cached_tokens=None))
            return outputs

    fake = ModuleType("vllm")
    fake.LLM = LLM
    fake.SamplingParams = SimpleNamespace
    fake.TokensPrompt = dict
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return fake


def test_vllm_is_asked_in_token_ids_with_a_seed_for_each_answer(vllm):
    backend = VllmBackend(policy_path("cold-short"), chunk=5, tensor_parallel_size=2)
    assert "llm" not in vars(backend)
    all_requests = requests_of(backend, MICRO.model_copy(update={"top_p": 0.9}))
    rows = list(backend.answers(all_requests))
    assert [row.key for row in rows] == [request.key for request in all_requests]
    assert [len(call) for call in backend.llm.calls] == [5, 5, 5, 1]
    assert backend.llm.options == {"tensor_parallel_size": 2}
    assert backend.llm.model == str(policy_path("cold-short"))
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    prompts_and_parameters = chain.from_iterable(backend.llm.calls)
    for (prompt, parameters), request in zip(prompts_and_parameters, all_requests, strict=True):
        assert prompt == {"prompt_token_ids": encode(request.example)}
        assert vars(parameters) == {
            "temperature": 1.0,
            "top_p": 0.9,
            "max_tokens": 40,
            "seed": request.answer_seed,
        }
    assert rows[0].token_ids == [7, 8, 2] and rows[0].finish_reason == "stop"
    assert rows[0].settings["engine"] == "vllm"
    assert rows[0].usage["completion_tokens"] == 3 and rows[0].usage["cached_tokens"] == 0


def test_vllm_marks_what_went_wrong(vllm):
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    prompts = {example.id: encode(example) for example in EXAMPLES}
    room = max(map(len, prompts.values()))
    backend = VllmBackend(policy_path("cold-short"), max_model_len=room)
    fitting = [example for example in EXAMPLES if len(prompts[example.id]) < room]
    assert 2 <= len(fitting) < len(EXAMPLES)
    aborted = fitting[0].id
    cut_off = fitting[1].id
    backend.llm.finish = {tuple(prompts[aborted]): "abort", tuple(prompts[cut_off]): "length"}
    one_seed = MICRO.model_copy(update={"seeds": (1,)})
    rows = {row.example_id: row for row in backend.answers(requests_of(backend, one_seed))}
    assert rows[aborted].error.startswith("engine: ") and "abort" in rows[aborted].error
    assert rows[cut_off].finish_reason == "length"
    for example in EXAMPLES:
        is_too_long = (rows[example.id].error or "").startswith("context_too_long")
        assert is_too_long == (example not in fitting)


def test_vllm_missing_or_asked_to_run_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r"memcalib\[vllm\]"):
        VllmBackend(policy_path("cold-short"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        VllmBackend(policy_path("cold-short"), trust_remote_code=True)
