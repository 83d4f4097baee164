"""Log-probabilities against their slow reference: prefix groups, shared caches, self-check,
memory, contexts.
"""

import functools
import gc
import logging
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import OTHERS, a_workload, tiny

from memcalib.credit import prefix_groups as models
from memcalib.credit import logprobs as scoring
from memcalib.credit.prefix_groups import (
    cache_fault,
    sample_rows,
    sharing_faults,
    split_model,
    token_scores,
)
from memcalib.credit.prefix_groups import batched_groups, prefix_groups
from memcalib.inference.token_rows import response_mask
from memcalib.credit.logprobs import batch_noise, response_logps, response_logps_reference
from memcalib.credit.tree_attention import trees_agree
from memcalib.products.micro.policy import load_policy

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
NAN = float("nan")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return tiny(tie_word_embeddings=True)


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([1, 20, 64, 4096]),
    share=st.booleans(),
    head=st.sampled_from(["auto", "model"]),
)
def test_scoring_equals_the_reference(model, seed, budget, share, head):
    prompts, responses = a_workload(seed, empty=True)
    slow = response_logps_reference(model, prompts, responses, temperature=0.7)
    fast = response_logps(
        model,
        prompts,
        responses,
        temperature=0.7,
        token_budget=budget,
        share=share,
        head=head,
        logit_chunk=77,
    )
    assert fast.shape == slow.shape and fast.dtype == torch.float32
    assert (fast - slow).abs().max() < 1e-4
    assert not fast[~response_mask(responses)].any()


def test_a_model_in_float64_is_read_in_float64():
    double = tiny(tie_word_embeddings=True).double()
    (prompts, responses) = a_workload(4, empty=True)
    slow = response_logps_reference(double, prompts, responses, temperature=0.7)
    assert slow.dtype == torch.float64
    for share in (True, False):
        fast = response_logps(
            double, prompts, responses, temperature=0.7, share=share, logit_chunk=77
        )
        assert fast.dtype == torch.float64 and (fast - slow).abs().max() < 1e-12


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations_see_through_the_padding(attention):
    other = tiny(
        "Llama", num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention
    )
    prompts, responses = a_workload(3)
    slow = response_logps_reference(other, prompts, responses)
    assert (response_logps(other, prompts, responses) - slow).abs().max() < 1e-4


def test_row_order_does_not_matter_and_mode_and_gradients_are_left_alone(model):
    prompts, responses = a_workload(5)
    model.train()
    out = response_logps(model, prompts, responses)
    assert model.training and not out.requires_grad
    model.eval()
    order = list(range(len(prompts)))[::-1]
    again = response_logps(model, [prompts[i] for i in order], [responses[i] for i in order])
    assert torch.allclose(again[order], out, atol=1e-5)


def test_each_distinct_prompt_passes_through_the_model_once(model, monkeypatch):
    stem = list(range(1, 31))
    rng = random.Random(0)
    pool = [stem[:25], [*stem[:20], 40, 41], [*stem[:20], 42, 43, 44]]
    prompts = [pool[i % 3] for i in range(24)]
    responses = [[rng.randrange(1, 50) for _ in range(5)] for _ in prompts]
    cells = []
    forward = model.model.forward

    def counting(**kw):
        cells.append(kw["input_ids"].numel())
        return forward(**kw)

    response_logps(model, prompts, responses)  # the self-check of a model passes through it, once
    monkeypatch.setattr(model.model, "forward", counting)
    response_logps(model, prompts, responses)
    shared = sum(cells)
    cells.clear()
    response_logps(model, prompts, responses, share=False)
    assert shared <= 20 + 3 * 5 + 24 * 5 < sum(cells) / 4


def test_scaled_logits_come_from_the_model_itself(model):
    assert split_model(model)[1] is not None
    model.config.final_logit_softcapping = 30.0
    try:
        assert split_model(model) == (model, None)
        assert split_model(model, "chunked")[1] is not None
    finally:
        del model.config.final_logit_softcapping
    with pytest.raises(ValueError, match="head: found 'fast'; allowed: 'auto'"):
        split_model(model, "fast")


SCALED = {
    "granite": ("Granite", {"logits_scaling": 8.0}),
    "cohere": ("Cohere", {"logit_scale": 0.2}),
    "soft cap": (
        "Gemma2",
        {"final_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 2, "head_dim": 16},
    ),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("share", [True, False])
def test_a_model_that_scales_its_logits_makes_few_of_them(name, share, monkeypatch):
    other = tiny(SCALED[name][0], **SCALED[name][1])
    rng = random.Random(0)

    def word(n):
        return [rng.randrange(1, 50) for _ in range(n)]

    stem = word(150)
    prompts = [
        prompt for prompt in (stem + word(rng.randint(20, 30)) for _ in range(4)) for _ in range(4)
    ]
    responses = [word(rng.randint(10, 15)) for _ in prompts]
    logit_counts = []
    slow = response_logps_reference(other, prompts, responses)
    other.get_output_embeddings().register_forward_hook(
        lambda module, inputs, out: logit_counts.append(out.shape[0] * out.shape[1])
    )
    for room, largest in ((2**24, 16 * 25), (50 * 60, 60), (1, 15)):
        logit_counts.clear()
        monkeypatch.setattr(scoring, "LOGITS", room)
        fast = response_logps(other, prompts, responses, share=share, token_budget=4096)
        assert (fast - slow).abs().max() < 1e-4
        assert max(logit_counts) <= largest and sum(logit_counts) <= 2 * sum(map(len, responses))


def test_scoring_edge_cases_and_bad_input(model):
    assert response_logps(model, [], []).shape == (0, 0)
    assert response_logps(model, [[1, 2]], [[]]).shape == (1, 0)
    with pytest.raises(ValueError, match="row 1: the prompt is empty"):
        response_logps(model, [[1], []], [[1], [2]])
    with pytest.raises(ValueError, match="2 prompts and 1 responses"):
        response_logps(model, [[1], [2]], [[1]])
    for temperature in (0, -1, NAN):
        with pytest.raises(ValueError, match="temperature"):
            response_logps(model, [[1]], [[1]], temperature=temperature)
    with pytest.raises(ValueError, match="token_budget is 0"):
        response_logps(model, [[1]], [[1]], token_budget=0)


@SETTINGS
@given(st.lists(st.lists(st.integers(1, 3), max_size=8), min_size=1, max_size=12))
def test_groups_cover_every_prompt_once_and_really_share(prompts):
    groups = prefix_groups(prompts)
    assert sorted(i for g in groups for i in g.members) == list(range(len(prompts)))
    for group in groups:
        base = prompts[group.base]
        assert group.shared[group.members.index(group.base)] == len(base)
        for i, n in zip(group.members, group.shared, strict=True):
            assert prompts[i][:n] == base[:n]
            longer = n < min(len(base), len(prompts[i]))
            assert not longer or i == group.base or prompts[i][n] != base[n]


@SETTINGS
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_pieces_keep_within_the_cache_and_lose_nobody(prompts, budget):
    batches = list(batched_groups(prefix_groups(prompts), list(map(len, prompts)), budget))
    assert sorted(i for batch in batches for f in batch for i in f.members) == list(
        range(len(prompts))
    )
    for batch in batches:
        for f in batch:
            assert all(
                prompts[i][:n] == prompts[f.base][:n]
                for i, n in zip(f.members, f.shared, strict=True)
            )
            assert (
                len(f.members) == 1
                or len(f.members) * max(len(prompts[i]) for i in f.members) <= budget
            )


def test_a_common_system_prompt_does_not_merge_examples():
    system = [9] * 10
    prompts = [[*system, *[e] * 12, k] for e in (1, 2, 3) for k in (1, 2, 3)]
    assert sorted(sorted(f.members) for f in prefix_groups(prompts)) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_architectures_that_cannot_share_are_scored_plainly_with_one_logged_reason(name, caplog):
    kind, options, reason = OTHERS[name]
    other = tiny(kind, **options)
    assert reason in cache_fault(other)
    prompts, responses = a_workload(8)
    slow = response_logps_reference(other, prompts, responses)
    caplog.set_level(logging.WARNING, logger="memcalib")
    for _ in range(2):
        assert (response_logps(other, prompts, responses) - slow).abs().max() < 1e-4
    assert reason in sharing_faults(other)["cache"]
    assert sum(reason in message for message in caplog.messages) == 1


def test_a_model_that_shares_wrongly_is_found_out(model, monkeypatch, caplog):
    other = tiny()
    honest = scoring.score_shared

    def off(*args):
        return {k: piece - 0.01 for k, piece in honest(*args).items()}

    monkeypatch.setattr(scoring, "score_shared", off)
    prompts, responses = a_workload(4)
    slow = response_logps_reference(other, prompts, responses)
    assert (response_logps(other, prompts, responses) - slow).abs().max() < 1e-4
    assert "differs from the plain computation by 0.01 nats" in sharing_faults(other)["cache"]
    assert "differs" in caplog.text

    def broken(*args):
        raise TypeError("forward() got an unexpected keyword argument")

    monkeypatch.setattr(scoring, "score_shared", broken)
    third = tiny()
    response_logps(third, prompts, responses)
    assert sharing_faults(third)["cache"].startswith("it fails with TypeError")


def test_sharing_is_checked_in_nats_whatever_is_read():
    other = tiny()
    prompts, responses = a_workload(4)

    def large_states(head, states, targets):
        return 1e6 * states

    scoring.score_responses(other, prompts, responses, large_states)
    assert sharing_faults(other) == {"cache": ""}


def maskless(module, query, key, value, attention_mask, scaling, **options):
    """Causal attention that takes no mask, as kernels for rows without padding:
    the last query sees all keys.
    """
    heads = query.shape[1] // key.shape[1]
    visible = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2]).bool()
    rows = (query, key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1))
    out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=visible, scale=scaling)
    return out.transpose(1, 2), None


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_without_masks_is_found_out_and_scored_plainly(seed, caplog):
    from transformers import AttentionInterface

    AttentionInterface.register("maskless", maskless)
    other = tiny(attn_implementation="maskless")
    honest = tiny()
    prompts, responses = a_workload(seed)
    slow = response_logps_reference(other, prompts, responses)
    assert torch.allclose(slow, response_logps_reference(honest, prompts, responses), atol=1e-5)
    assert (response_logps(other, prompts, responses) - slow).abs().max() < 1e-4
    assert (
        "differs from the plain computation" in sharing_faults(other)["cache"]
        and "(cache)" in caplog.text
    )
    assert (response_logps(other, prompts, responses, share=True) - slow).abs().max() > 1e-2
    assert (
        not trees_agree(other, prompts, responses)
        and "'maskless' does not accept our mask" in sharing_faults(other)["tree"]
    )


@SETTINGS
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6))
def test_the_sample_has_different_prompts_and_two_answers_to_one(seed, count):
    prompts, responses = a_workload(seed, empty=True)
    picked = sample_rows(prompts, responses, count)

    def rows(some):
        return sorted((prompts[i], responses[i]) for i in some)

    order = random.Random(seed).sample(range(len(prompts)), len(prompts))
    again = sample_rows([prompts[i] for i in order], [responses[i] for i in order], count)
    assert rows(picked) == rows(order[i] for i in again) and all(responses[i] for i in picked)
    full = [i for i, y in enumerate(responses) if y]
    assert len(set(picked)) == len(picked) == min(count, len(full))
    distinct = {tuple(prompts[i]) for i in full}
    repeated = len(distinct) < len(full)
    assert len({tuple(prompts[i]) for i in picked}) >= min(len(distinct), count - repeated)
    assert not repeated or count < 2 or prompts[picked[0]] == prompts[picked[1]]


NANS = torch.full((2,), NAN)


@pytest.mark.parametrize(
    ("shared", "plain", "verdict"),
    [
        (NANS[:0], NANS[:0], models.UNDECIDED),
        (NANS, NANS, models.UNDECIDED),
        (torch.zeros(2), NANS, models.UNDECIDED),
        (torch.tensor([0.5, NAN]), torch.tensor([0.5, NAN]), ""),
        (torch.tensor([0.5, 1.0]), torch.tensor([0.5, NAN]), ""),
        (torch.tensor([0.7, NAN]), torch.tensor([0.5, NAN]), "by 0.2 nats"),
        (NANS, torch.zeros(2), "by nan nats"),
    ],
)
def test_only_finite_numbers_of_the_plain_way_are_compared(shared, plain, verdict):
    for half in (False, True):
        why = models.agrees(shared, plain, half)
        assert why == verdict if verdict in ("", models.UNDECIDED) else verdict in why


def test_what_is_undecided_is_asked_again(caplog):
    other = tiny("Llama")
    sides = [(NANS, NANS), (NANS[:0], NANS[:0]), (torch.zeros(1), torch.zeros(1))]

    def check():
        return sides.pop(0)

    verdicts = [
        models.sharing_fault(other, "way", lambda: "", check, together=together)
        for together in (True, False, True, True)
    ]
    assert (
        verdicts == [models.UNDECIDED, models.UNDECIDED, "", ""]
        and not sides
        and not caplog.messages
    )
    assert sharing_faults(other) == {"way": ""}


def test_faults_are_forgotten_with_their_model():
    gc.collect()
    before = len(models._FAULTS)
    other = tiny("Llama")
    response_logps(other, [[1, 2], [1, 2]], [[3], [4]])
    assert sharing_faults(other) == {"cache": ""} and len(models._FAULTS) == before + 1
    del other
    gc.collect()
    assert len(models._FAULTS) == before


@pytest.mark.parametrize("adapter_on_head", [False, True])
def test_adapters_are_scored_with(model, adapter_on_head):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj", *(["lm_head"] if adapter_on_head else [])]
    adapted = get_peft_model(
        tiny("Llama"), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    ).eval()
    prompts, responses = a_workload(6)
    slow = response_logps_reference(adapted, prompts, responses)
    fast = response_logps(adapted, prompts, responses)
    assert (fast - slow).abs().max() < 1e-4
    with adapted.disable_adapter():
        base = response_logps(adapted, prompts, responses)
    assert (base - fast).abs().max() > 1e-3


def test_half_precision_is_close_and_summed_in_float32():
    prompts, responses = a_workload(2)
    full = tiny()
    half = tiny().to(torch.bfloat16)
    half.load_state_dict(full.state_dict())
    out = response_logps(half, prompts, responses)
    full_logps = response_logps(full, prompts, responses)
    assert out.dtype == torch.float32 and sharing_faults(half) == {"cache": ""}
    assert (out - full_logps).abs().max() < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        cast = response_logps(full, prompts, responses)
    assert cast.dtype == torch.float32 and (cast - full_logps).abs().max() < 0.05


def test_checkpointing_and_training_mode_change_nothing(model):
    other = tiny()
    other.gradient_checkpointing_enable()
    other.train()
    prompts, responses = a_workload(9)
    slow = response_logps_reference(other, prompts, responses)
    assert (response_logps(other, prompts, responses) - slow).abs().max() < 1e-4 and other.training


class Memory:
    """Stands before a model's forward and runs out of memory beyond a number of new tokens,
    or at one token.
    """

    def __init__(self, network, monkeypatch, cells=10**9, poison=None):
        self.calls = 0
        forward = network.forward

        @functools.wraps(forward)
        def limited(**inputs):
            ids = inputs["input_ids"]
            self.calls += 1
            if ids.numel() > cells or (poison is not None and (ids == poison).any()):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return forward(**inputs)

        monkeypatch.setattr(network, "forward", limited)


@pytest.mark.parametrize("share", [True, False])
def test_out_of_memory_is_met_with_smaller_pieces(model, monkeypatch, share):
    prompts, responses = a_workload(12)
    slow = response_logps_reference(model, prompts, responses)
    memory = Memory(model.model, monkeypatch, cells=40)
    lost = Counter()
    fast = response_logps(model, prompts, responses, share=share, lost=lost)
    assert (fast - slow).abs().max() < 1e-4 and not lost and memory.calls > 3


def test_a_row_that_never_fits_is_nan_and_counted(model, monkeypatch, caplog):
    prompts, responses = a_workload(13)
    prompts = [[t if t != 49 else 48 for t in p] for p in prompts]
    responses = [[t if t != 49 else 48 for t in y] + [1] for y in responses]
    responses[3] = [49, *responses[3]]
    slow = response_logps_reference(model, prompts, responses)
    Memory(model.model, monkeypatch, poison=49)
    lost = Counter()
    fast = response_logps(model, prompts, responses, share=True, lost=lost)
    same = [
        i
        for i, (p, y) in enumerate(zip(prompts, responses, strict=True))
        if (p, y) == (prompts[3], responses[3])
    ]
    assert dict(lost) == {"out_of_memory": len(same)} and "rows were not scored" in caplog.text
    assert fast[3, : len(responses[3])].isnan().all() and not fast[3, len(responses[3]) :].any()
    keep = [i for i in range(len(prompts)) if i not in same]
    assert (fast[keep] - slow[keep]).abs().max() < 1e-4


def test_other_errors_are_not_swallowed(model, monkeypatch):
    broken = functools.wraps(model.model.forward)(lambda **inputs: 1 / 0)
    monkeypatch.setattr(model.model, "forward", broken)
    with pytest.raises(ZeroDivisionError):
        response_logps(model, [[1, 2]], [[3]], share=True)


def test_rows_beyond_the_context_are_nan_and_counted(model):
    prompts = [[1] * 250, [2, 3]]
    responses = [[4] * 7, [5, 6]]
    lost = Counter()
    out = response_logps(model, prompts, responses, lost=lost)
    assert lost == {"context": 1} and out[0].isnan().all() and out[1, :2].isfinite().all()
    assert response_logps(model, [[1] * 250], [[4] * 6]).isfinite().all()


@SETTINGS
@given(st.integers(1, 400), st.integers(1, 12), st.floats(0.3, 3))
def test_head_in_chunks_gives_values_entropies_and_gradients(chunk, n, temperature):
    torch.manual_seed(n)
    head = torch.nn.Linear(8, 30)
    hidden = torch.randn(n, 8, requires_grad=True)
    targets = torch.randint(0, 30, (n,))
    logp = (head(hidden) / temperature).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    chunked = token_scores(head, hidden, targets, temperature, chunk, entropy=True)
    for a, b in zip(chunked, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    weights = torch.linspace(-1, 1, n)
    slow, fast = (
        torch.autograd.grad((a * weights).sum() + b.sum(), [hidden, *head.parameters()])
        for a, b in (expected, chunked)
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(slow, fast, strict=True))


def test_processes_wait_for_each_other():
    """Every forward announces itself, and one without rows keeps running empty forwards while the
    other works.
    """
    busy_flags = []
    busy_processes = [2]

    def sync(busy):
        busy_flags.append(busy)
        busy_processes[0] -= not busy
        return busy or busy_processes[0] >= 0

    other = tiny()
    response_logps(other, [[1, 2], [1, 3]], [[3], [4]], sync=sync, share=True)
    assert busy_flags[:-3] == [True] * (len(busy_flags) - 3) and busy_flags[-3:] == [False] * 3
    busy_flags.clear()
    busy_processes[0] = 1
    assert response_logps(other, [], [], sync=sync).shape == (0, 0) and busy_flags == [False, False]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast_rounds_no_logits_of_a_head_in_float32(kind):
    """The layers before it may compute in 16 bits; a head in 16 bits stays as it is."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 40).to(kind)
    hidden = torch.randn(30, 16).bfloat16()
    targets = torch.arange(30)
    with torch.autocast("cpu", torch.bfloat16):
        logps, entropy = token_scores(head, hidden, targets, entropy=True, logit_chunk=200)
    exact = head.float()(hidden.float()).log_softmax(-1)
    wrong = (logps - exact[range(30), targets]).abs().max()
    assert logps.dtype == torch.float32
    assert wrong < 1e-5 if kind == torch.float32 else 1e-3 < wrong < 0.1
    assert kind != torch.float32 or torch.allclose(
        entropy, -(exact.exp() * exact).sum(-1), atol=1e-5
    )


def test_a_head_in_float32_has_its_gradient_under_autocast():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 40)
    hidden = torch.randn(30, 16).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logps, _ = token_scores(head, hidden, torch.arange(30), logit_chunk=200)
    logps.sum().backward()
    weight = head.weight.detach().clone().requires_grad_()
    states = hidden.detach().clone().requires_grad_()
    logp = torch.nn.functional.linear(states.float(), weight, head.bias.detach()).log_softmax(-1)
    logp[range(30), range(30)].sum().backward()
    assert torch.allclose(head.weight.grad, weight.grad, atol=1e-5)
    assert (
        torch.allclose(hidden.grad.float(), states.grad.float(), atol=1e-2)
        and hidden.grad.dtype == torch.bfloat16
    )


def test_noise_is_measured_between_two_batches():
    """In 16 bits the same answers differ from batch to batch; in float32 by millionths."""
    model = load_policy("cold-short")[0]
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 400) for _ in range(rng.randrange(20, 60))] for _ in range(6)]
    responses = [[rng.randrange(4, 400) for _ in range(n)] for n in (12, 1, 30, 30, 0, 7)]
    exact = batch_noise(model, prompts, responses)
    assert exact.shape == (6,) and exact[4] == 0 and 0 < exact.max() < 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        half = batch_noise(model, prompts, responses)
    assert half.max() > 100 * exact.max()
    damaged = batch_noise(model, prompts, responses, context=40)
    assert damaged.isnan().any(), "a row that was not scored has no known noise"


@pytest.mark.parametrize(
    ("prompt_tokens", "passes"),
    [
        (9, 1),  # a cache of 8 tokens: a quarter of 4 + 8 is less than the 4 tokens of an answer
        (37, 3),  # a cache of 36 tokens: an answer counts as 10 tokens, and two make a pass
    ],
)
def test_a_long_cache_leaves_room_for_fewer_answers(model, monkeypatch, prompt_tokens, passes):
    """Six answers of four tokens behind one prompt, with room for 24 new tokens in a pass."""
    prompt = [2 + k % 30 for k in range(prompt_tokens)]
    answers = [[3 + k, 4, 5, 6] for k in range(6)]
    forward = model.model.forward
    widths = []

    def counting(**options):
        inputs = options.get("input_ids")
        widths.append((inputs if inputs is not None else options["inputs_embeds"]).shape[1])
        return forward(**options)

    monkeypatch.setattr(model.model, "forward", counting)
    response_logps(model, [prompt] * 6, answers, share=True, token_budget=24)
    assert widths.count(4) == passes, widths
