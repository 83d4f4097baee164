"""The sampler against the library's and against slow references, local weights as a back end, and vLLM's interface."""

import math
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from micro_policy import EXAMPLES, TOKENIZER
from transformers import AutoConfig, AutoModelForCausalLM

from memcalib.inference.local import (
    LocalBackend,
    VllmBackend,
    draw,
    end_tokens,
    evaluate,
    evaluating,
    prompt_encoder,
    sample_answers,
    sample_tokens,
    uniform_numbers,
)
from memcalib.micro.world import exact_judge
from memcalib.micro.policy import build_policy, load_policy, policy_path
from memcalib.problem import Rollout
from memcalib.io.records import read_jsonl
from memcalib.inference.rollout import Sampling, generate, requests

torch.set_num_threads(1)
MICRO = Sampling(seeds=(42, 43), max_tokens=40, text="concat", prompt_template="micro")
chances = st.lists(st.integers(0, 20), min_size=2, max_size=9).filter(any)


def local(**changes) -> LocalBackend:
    model, tokenizer = load_policy("cold-short")
    return LocalBackend(model, tokenizer, name="cold", **changes)


def asked(backend, sampling=MICRO, examples=EXAMPLES):
    return list(requests(examples, sampling, backend.name, **backend.settings))


def said(rows) -> dict[tuple, str]:
    return {row.key: row.response for row in rows}


# drawing


def token_slowly(weights: list[int], number: float, top_p: float = 1.0) -> int:
    """Walk over the kept tokens until their share of the mass passes the number."""
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = set()
    mass = 0.0
    for i in order:
        if weights[i] and mass < top_p * sum(weights):
            kept.add(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    passed = 0
    for i, weight in enumerate(weights):
        passed += weight if i in kept else 0
        if passed > number * total:
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
    kept = [i for i in range(6) if token_slowly(weights, 0.0, top_p) is not None]
    assert kept
    wanted = {token_slowly(weights, number + d, top_p) for d in (-1e-6, 1e-6)}
    assert draw(logits, top_p=top_p, numbers=torch.tensor([number])).item() in wanted


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


@pytest.mark.parametrize("own", [False, True])
def test_sampling_follows_the_policy(own):
    policy = build_policy(0)
    prompt = prompt_encoder(TOKENIZER, prompt_template="micro")(EXAMPLES[0])
    dice = dict(seeds=range(4000)) if own else dict(generator=torch.Generator().manual_seed(0))
    drawn = sample_tokens(policy, [prompt] * 4000, ends=[2], max_tokens=1, temperature=0.7, **dice)
    with torch.no_grad():
        expected = torch.softmax(policy(torch.tensor([prompt])).logits[0, -1] / 0.7, -1)
    counts = torch.bincount(torch.tensor([row[0] for row in drawn]), minlength=len(expected)) / 4000
    assert (counts - expected).abs().sum() < 3.5 * (
        2 * expected * (1 - expected) / (4000 * math.pi)
    ).sqrt().sum()


# the loop


@pytest.mark.parametrize("copies", [1, 3])
def test_greedy_sampling_equals_generate(copies):
    policy = build_policy(3)
    with torch.no_grad():
        policy.lm_head.weight[TOKENIZER.eos_token_id] *= 2.5
    prompts = [
        prompt_encoder(TOKENIZER, prompt_template="micro")(e)
        for e in EXAMPLES
        for _ in range(copies)
    ]
    ends = [TOKENIZER.eos_token_id]
    ours = sample_tokens(policy, prompts, ends=ends, max_tokens=30, temperature=0)
    padded = TOKENIZER.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    theirs = policy.generate(**padded, max_new_tokens=30, do_sample=False)[
        :, padded["input_ids"].shape[1] :
    ].tolist()
    assert ours == [row[: row.index(ends[0]) + 1] if ends[0] in row else row for row in theirs]


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
    ("kind", "more"),
    [
        ("qwen3", {"num_hidden_layers": 2}),
        ("mistral", {"num_hidden_layers": 2, "sliding_window": 6}),
        ("qwen3_5_text", LINEAR),
    ],
    ids=["full attention", "sliding window", "linear attention"],
)
def test_every_kind_of_cache_loses_and_copies_rows(kind, more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **more)).eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [9], [12, 13]]
    alone = [
        model.generate(
            torch.tensor([p]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(p) :]
        for p in prompts
    ]
    wanted = [row.tolist() for row in alone]
    ends = [wanted[3][2], wanted[1][5]]
    cut = [
        next((row[: t + 1] for t, token in enumerate(row) if token in ends), row) for row in wanted
    ]
    assert sample_tokens(model, prompts, ends=ends, max_tokens=16, temperature=0) == cut
    assert len({len(row) for row in cut}) > 1


def test_rows_do_not_depend_on_their_company():
    policy, tokenizer = load_policy("cold-short")
    prompts = [
        prompt_encoder(tokenizer, prompt_template="micro")(e) for e in EXAMPLES for _ in range(2)
    ]
    options = dict(ends=end_tokens(policy, tokenizer), temperature=1.0)
    together = sample_tokens(policy, prompts, max_tokens=40, seeds=range(16), **options)
    backwards = sample_tokens(
        policy, prompts[::-1], max_tokens=40, seeds=range(15, -1, -1), **options
    )[::-1]
    alone = [
        sample_tokens(policy, [p], max_tokens=40, seeds=[k], **options)[0]
        for k, p in enumerate(prompts)
    ]
    assert together == backwards == alone
    assert len({tuple(row) for row in together}) > 8


def test_each_row_has_its_own_limit():
    policy = build_policy(0)
    prompts = [prompt_encoder(TOKENIZER, prompt_template="micro")(e) for e in EXAMPLES[:4]]
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
    rollouts, judgments = evaluate(build_policy(0), TOKENIZER, EXAMPLES[:2], exact_judge, **options)
    assert [len(j.atoms) for j in judgments] == [len(e.atoms) for e in EXAMPLES[:2]]
    found = {(r.condition, j.condition, j.model) for r, j in zip(rollouts, judgments, strict=True)}
    assert found == {("no_memory", "no_memory", "x")}


def test_an_unknown_condition_is_refused():
    with pytest.raises(ValueError, match="no_memory"):
        sample_answers(build_policy(0), TOKENIZER, EXAMPLES[:1], condition="no memory")


# local weights


def test_answers_are_whole_rows():
    backend = local()
    wanted = asked(backend)
    rows = list(backend.answers(iter(wanted)))
    assert {row.key for row in rows} == {request.key for request in wanted} and len(rows) == 16
    for row in rows:
        ended = row.token_ids[-1] in end_tokens(backend.model, backend.tokenizer)
        assert row.finish_reason == ("stop" if ended else "length")
        assert row.response == backend.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        assert (
            row.usage["completion_tokens"] == len(row.token_ids) and row.usage["prompt_tokens"] > 10
        )
        assert (
            row.settings["engine"] == "transformers"
            and row.settings["dtype"] == "float32"
            and row.example_hash
        )


@pytest.mark.parametrize(
    "changes", [{"batch_tokens": 1}, {"batch_tokens": 300}, {"window": 3}], ids=str
)
def test_batches_do_not_change_answers(changes):
    whole = said(local().answers(asked(local())))
    assert said(local(**changes).answers(asked(local()))) == whole


def test_batches_keep_the_budget(monkeypatch):
    backend = local(batch_tokens=400)
    sizes = []
    inner = backend.sample

    def watched(batch):
        sizes.append((len(batch), max(len(ids) for _, ids in batch) + 40))
        return inner(batch)

    monkeypatch.setattr(backend, "sample", watched)
    list(backend.answers(asked(backend)))
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
    assert (resumed.kept, resumed.new) == (5, 11)

    def read(name):
        return said(read_jsonl(tmp_path / name, Rollout))

    assert read("a.jsonl") == read("b.jsonl")


def test_two_samplings_do_not_share_a_batch():
    backend = local()
    greedy = MICRO.model_copy(update={"temperature": 0.0})
    mixed = [r for pair in zip(asked(backend), asked(backend, greedy), strict=True) for r in pair]
    rows = said(backend.answers(mixed))
    assert rows == said(backend.answers(asked(backend))) | said(
        backend.answers(asked(backend, greedy))
    )
    by_example = Counter(
        (key[0], rows[key]) for key in rows if key[-1] == asked(backend, greedy)[0].key[-1]
    )
    assert set(by_example.values()) == {2}


def test_a_prompt_that_does_not_fit_is_a_row_that_says_so():
    backend = local()
    wanted = asked(backend)
    whole = said(backend.answers(wanted))
    lengths = {
        r.key: len(prompt_encoder(TOKENIZER, prompt_template="micro")(r.example)) for r in wanted
    }
    backend.limit = sorted(lengths.values())[len(lengths) // 2]
    rows = list(backend.answers(wanted))
    assert len(rows) == 16
    for row in rows:
        fits = lengths[row.key] < backend.limit
        assert (row.finish_reason == "error") == (not fits)
        if fits:
            assert lengths[row.key] + len(row.token_ids) <= backend.limit and whole[
                row.key
            ].startswith(row.response.rstrip())
        else:
            assert repr(row.example_id) in row.error and str(lengths[row.key]) in row.error
            assert f"limit is {backend.limit}" in row.error and row.error.startswith(
                "context_too_long: "
            )


class Cramped(LocalBackend):
    """A machine that holds `room` answers at once."""

    room = 3

    def sample(self, batch):
        if len(batch) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().sample(batch)


def test_out_of_memory_halves_the_batch(caplog):
    backend = Cramped(*load_policy("cold-short"), name="cold")
    rows = list(backend.answers(asked(backend)))
    assert said(rows) == said(local().answers(asked(local()))) and len(rows) == 16
    assert [record.args for record in caplog.records][0] == (16,) and "out of memory" in caplog.text
    before = len(caplog.records)
    assert len(list(backend.answers(asked(backend)))) == 16 and len(caplog.records) == before


def test_an_answer_too_large_for_the_machine_is_a_row():
    backend = Cramped(*load_policy("cold-short"), name="cold")
    backend.room = 0
    rows = list(backend.answers(asked(backend, examples=EXAMPLES[:1])))
    assert {row.finish_reason for row in rows} == {"error"} and len(rows) == 2
    assert all(row.error.startswith(f"out_of_memory: example {row.example_id!r}") for row in rows)


def test_another_error_of_the_model_is_not_swallowed(monkeypatch):
    backend = local()
    monkeypatch.setattr(
        backend, "sample", lambda batch: (_ for _ in ()).throw(RuntimeError("CUDA error: bad luck"))
    )
    with pytest.raises(RuntimeError, match="bad luck"):
        list(backend.answers(asked(backend)))


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
    rows = list(backend.answers(asked(backend, examples=EXAMPLES[:1])))
    assert (
        "model" in vars(backend) and backend.model.dtype == torch.float32 and backend.limit == 1024
    )
    assert [r.response for r in rows] == [
        r.response for r in local().answers(asked(local(), examples=EXAMPLES[:1]))
    ]


def test_thoughts_are_no_part_of_the_answer(monkeypatch):
    backend = local()
    monkeypatch.setattr(
        backend.tokenizer, "decode", lambda ids, **_: "<think>Peanuts?</think>\n\nNone."
    )
    assert {row.response for row in backend.answers(asked(backend))} == {"None."}


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
                finish = self.finish.get(tuple(prompt["prompt_token_ids"]), "stop")
                done = SimpleNamespace(
                    text="Hope this helps.", token_ids=(7, 8, 2), finish_reason=finish
                )
                outputs.append(SimpleNamespace(outputs=[done], num_cached_tokens=None))
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
    wanted = asked(backend, MICRO.model_copy(update={"top_p": 0.9}))
    rows = list(backend.answers(wanted))
    assert [row.key for row in rows] == [request.key for request in wanted]
    assert [len(call) for call in backend.llm.calls] == [5, 5, 5, 1]
    assert backend.llm.options == {"tensor_parallel_size": 2} and backend.llm.model == str(
        policy_path("cold-short")
    )
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    for (prompt, params), request in zip(
        (pair for call in backend.llm.calls for pair in call), wanted, strict=True
    ):
        assert prompt == {"prompt_token_ids": encode(request.example)}
        assert vars(params) == {
            "temperature": 1.0,
            "top_p": 0.9,
            "max_tokens": 40,
            "seed": request.own_seed,
        }
    assert (
        rows[0].token_ids == [7, 8, 2]
        and rows[0].finish_reason == "stop"
        and rows[0].settings["engine"] == "vllm"
    )
    assert rows[0].usage["completion_tokens"] == 3 and rows[0].usage["cached_tokens"] == 0


def test_vllm_marks_what_went_wrong(vllm):
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    prompts = {example.id: encode(example) for example in EXAMPLES}
    room = max(map(len, prompts.values()))
    backend = VllmBackend(policy_path("cold-short"), max_model_len=room)
    fitting = [example for example in EXAMPLES if len(prompts[example.id]) < room]
    assert 2 <= len(fitting) < len(EXAMPLES)
    backend.llm.finish = {
        tuple(prompts[fitting[0].id]): "abort",
        tuple(prompts[fitting[1].id]): "length",
    }
    rows = {
        row.example_id: row
        for row in backend.answers(asked(backend, MICRO.model_copy(update={"seeds": (1,)})))
    }
    assert rows[fitting[0].id].error.startswith("engine: ") and "abort" in rows[fitting[0].id].error
    assert rows[fitting[1].id].finish_reason == "length"
    for example in EXAMPLES:
        assert (example in fitting) == (
            not (rows[example.id].error or "").startswith("context_too_long")
        )


def test_vllm_missing_or_asked_to_run_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r"memcalib\[vllm\]"):
        VllmBackend(policy_path("cold-short"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        VllmBackend(policy_path("cold-short"), trust_remote_code=True)
