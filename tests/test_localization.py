"""The scoring engine against its slow oracle, the signal rules against the paper's table, and bad input."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.channels import CHANNELS
from memcalib.localization import (
    Thresholds,
    ablation_pairs,
    carrying_tokens,
    channel_atoms,
    clip_signal,
    localization_precision,
    localization_signal,
    localization_weights,
    prompt_families,
    response_logps,
    response_logps_reference,
    response_mask,
    score_pairs,
    shares_cache,
    signal_rule,
    split_model,
    token_spans,
)
from memcalib.problem import Level, judgment_for, remove_atoms, sample_records

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
NAN = float("nan")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    """Two layers of the architecture the micro-world uses, untrained."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def a_workload(seed, rows=12, empty=False):
    """Prompts that share beginnings, some identical, some one token long; ragged answers."""
    rng = random.Random(seed)
    word = lambda n: [rng.randrange(1, 50) for _ in range(n)]
    stems = [word(rng.randint(1, 12)) for _ in range(3)]
    pool = [rng.choice(stems) + word(rng.randint(0, 9)) for _ in range(5)] + [word(1)]
    prompts = [list(rng.choice(pool)) for _ in range(rows)]
    return prompts, [word(rng.randint(0 if empty else 1, 8)) for _ in range(rows)]


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([1, 20, 64, 4096]),
    share=st.booleans(),
    head=st.sampled_from(["auto", "model"]),
)
def test_engine_equals_the_reference(model, seed, budget, share, head):
    prompts, responses = a_workload(seed, empty=True)
    slow = response_logps_reference(model, prompts, responses, temperature=0.7)
    fast = response_logps(
        model, prompts, responses, temperature=0.7, token_budget=budget, share=share, head=head, logit_chunk=77
    )
    assert fast.shape == slow.shape and fast.dtype == torch.float32
    assert (fast - slow).abs().max() < 1e-4
    assert not fast[~response_mask(responses)].any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations_see_through_the_padding(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation=attention,
    )  # fmt: skip
    other = LlamaForCausalLM(config).eval()
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
    stem, rng = list(range(1, 31)), random.Random(0)
    pool = [stem[:25], [*stem[:20], 40, 41], [*stem[:20], 42, 43, 44]]
    prompts = [pool[i % 3] for i in range(24)]
    responses = [[rng.randrange(1, 50) for _ in range(5)] for _ in prompts]
    cells, forward = [], model.model.forward

    def counting(**kw):
        cells.append(kw["input_ids"].numel())
        return forward(**kw)

    monkeypatch.setattr(model.model, "forward", counting)
    response_logps(model, prompts, responses)
    shared = sum(cells)
    cells.clear()
    response_logps(model, prompts, responses, share=False)
    assert shared <= 20 + 3 * 5 + 24 * 5 < sum(cells) / 4


def test_models_without_plain_caches_fall_back(model):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, sliding_window=6,
    )  # fmt: skip
    sliding = MistralForCausalLM(config).eval()
    assert shares_cache(model) and not shares_cache(sliding)
    prompts, responses = a_workload(8)
    slow = response_logps_reference(sliding, prompts, responses)
    assert (response_logps(sliding, prompts, responses) - slow).abs().max() < 1e-4


def test_scaled_logits_come_from_the_model_itself(model):
    assert split_model(model)[1] is not None
    model.config.final_logit_softcapping = 30.0
    try:
        assert split_model(model) == (model, None)
        assert split_model(model, "chunked")[1] is not None
    finally:
        del model.config.final_logit_softcapping
    with pytest.raises(ValueError, match="head 'fast', allowed are 'auto'"):
        split_model(model, "fast")


def test_engine_edge_cases_and_bad_input(model):
    assert response_logps(model, [], []).shape == (0, 0)
    assert response_logps(model, [[1, 2]], [[]]).shape == (1, 0)
    with pytest.raises(ValueError, match="row 1: empty prompt"):
        response_logps(model, [[1], []], [[1], [2]])
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        response_logps(model, [[1], [2]], [[1]])
    for temperature in (0, -1, NAN):
        with pytest.raises(ValueError, match="temperature"):
            response_logps(model, [[1]], [[1]], temperature=temperature)
    with pytest.raises(ValueError, match="token_budget 0"):
        response_logps(model, [[1]], [[1]], token_budget=0)


@SETTINGS
@given(st.lists(st.lists(st.integers(1, 3), max_size=8), min_size=1, max_size=12))
def test_families_cover_every_prompt_once_and_really_share(prompts):
    families = prompt_families(prompts)
    assert sorted(i for _, members in families for i in members) == list(range(len(prompts)))
    for length, members in families:
        assert len({tuple(prompts[i][:length]) for i in members}) == 1
        assert all(len(prompts[i]) >= length for i in members)


def test_signal_rules_are_the_papers_table():
    sign, magnitude = signal_rule()
    assert sign.tolist() == [0, 1, 1, -1, 1, 1, -1, -1, 1] and not magnitude.any()
    sign, magnitude = signal_rule("absolute")
    assert not sign.any() and magnitude.tolist() == [False] + [True] * 8
    sign, magnitude = signal_rule("positive_only")
    assert [CHANNELS[i] for i in range(9) if sign[i] == 0] == ["A+", "BA-", "CA-"]
    for mode in ("ordered", "absolute", "positive_only"):
        sign, magnitude = signal_rule(mode, "uniform")
        assert not sign[[3, 6, 7]].any() and not magnitude[[3, 6, 7]].any()
        assert signal_rule(mode, "absolute")[1][[3, 6, 7]].all()
    for bad in ({"mode": "sign"}, {"under_use": "up"}):
        with pytest.raises(ValueError, match="allowed are"):
            signal_rule(**bad)


@SETTINGS
@given(st.integers(0, 10_000), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0.5, 5))
def test_weights_match_a_scalar_reading_of_the_equations(seed, delta, gate, d_max):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(4, 6, generator=g, dtype=torch.float64) * 2
    mask = torch.rand(4, 6, generator=g) > 0.3
    q, opened = localization_weights(z, mask, torch.full((4,), delta), gate=gate, d_max=d_max)
    for p in range(4):
        live = [z[p, t].item() for t in range(6) if mask[p, t]]
        strong = bool(live) and max(live) > gate
        assert opened[p] == strong
        for t in range(6):
            value = max(min(max(z[p, t].item(), -d_max), d_max) - float(np.float32(delta)), 0.0)
            expected = value if strong and mask[p, t] else 0.0
            assert q[p, t].item() == pytest.approx(expected, abs=1e-6)


def test_the_gate_reads_the_unclipped_signal():
    z, mask = torch.tensor([[0.4, 0.1]]), torch.ones(1, 2).bool()
    assert localization_weights(z, mask, torch.zeros(1), gate=0.3, d_max=0.2)[1].item()
    assert clip_signal(z, 0.2).max() == pytest.approx(0.2)
    assert not localization_weights(z, mask, torch.zeros(1), gate=0.4)[1].item()
    assert localization_weights(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.zeros(2))[0].shape == (2, 0)
    assert localization_signal(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (0, 3)


@SETTINGS
@given(st.integers(0, 10_000), st.integers(1, 400))
def test_threshold_update_is_numpys_linear_quantile(seed, n):
    g = torch.Generator().manual_seed(seed)
    scores, channel = torch.randn(n, generator=g), torch.randint(0, 9, (n,), generator=g)
    thresholds = Thresholds(minimum=20)
    thresholds.update(scores, channel)
    for h in range(9):
        pool = scores[channel == h].double().numpy()
        expected = 0.9 * 0.02 + 0.1 * max(0.02, np.quantile(pool, 0.75)) if len(pool) >= 20 else 0.02
        assert thresholds.value[h].item() == pytest.approx(expected, abs=1e-12)
    order = torch.randperm(n, generator=g)
    again = Thresholds(minimum=20)
    again.update(scores[order], channel[order])
    assert torch.equal(again.value, thresholds.value)


def test_threshold_state_and_bad_input():
    thresholds = Thresholds(start=0.5)
    thresholds.update(torch.full((256,), -1.0), torch.full((256,), 3))
    assert thresholds.value[3].item() == pytest.approx(0.9 * 0.5 + 0.1 * 0.02)
    other = Thresholds()
    other.load_state_dict(thresholds.state_dict())
    assert torch.equal(other.value, thresholds.value)
    with pytest.raises(ValueError, match="8 thresholds, must be 9"):
        other.load_state_dict({"value": [0.1] * 8})
    with pytest.raises(ValueError, match="NaN or infinity"):
        other.update(torch.tensor([NAN]), torch.tensor([1]))
    for option in ({"quantile": 1.5}, {"decay": -1}, {"minimum": 0}):
        with pytest.raises(ValueError, match="must be in"):
            Thresholds(**option)
    other.update(torch.zeros(0), torch.zeros(0, dtype=torch.long))


def judged(example, level=Level.BOUND):
    return judgment_for(example, dict.fromkeys(example.levels, level))


def test_pairs_remove_exactly_the_channels_atoms():
    example = sample_records()[0]
    judgment, seen = judged(example), []
    encode = lambda e: seen.append(set(e.levels)) or [1, 2, len(e.atoms) + 3]
    pairs = ablation_pairs([example, example], [judgment, judgment], encode)
    groups = channel_atoms(judgment)
    assert sorted(a for atoms in groups.values() for a in atoms) == sorted(example.levels)
    assert len(pairs) == 2 * len(groups) and len(seen) == len(groups)
    for left, (_, _, atoms) in zip(seen, zip(pairs.rows, pairs.channels, pairs.atoms, strict=True), strict=False):
        assert left == set(remove_atoms(example, atoms).levels)


def test_pairs_leave_out_unscored_closed_and_uniform_channels():
    example = sample_records()[0]
    good, encode = judged(example, Level.IGNORE), lambda e: [1]
    unscored = judgment_for(example, {})
    broken = good.model_copy(update={"error": "timeout"})
    assert not len(ablation_pairs([example] * 2, [unscored, broken], encode))
    names = lambda **kw: {CHANNELS[h] for h in ablation_pairs([example], [good], encode, **kw).channels}
    assert names() == {"BA-", "CA-"} & {CHANNELS[h] for h in channel_atoms(good)} and "A+" not in names()
    assert names(under_use="uniform") == set() and names(mode="positive_only") == set()
    open_pairs = torch.zeros(1, 9, dtype=torch.bool)
    assert names(open=open_pairs) == set()
    open_pairs[0, 3] = True
    assert names(open=open_pairs) <= {"BA-"}
    over = judged(example, Level.CONTROL)
    assert "AC-" not in {CHANNELS[h] for h in ablation_pairs([example], [over], encode, merge_over_use=True).channels}
    with pytest.raises(ValueError, match="shorter|longer|argument"):
        ablation_pairs([example], [good, good], encode)


def test_score_pairs_is_as_wide_as_the_batch(model):
    example = sample_records()[0]
    encode = lambda e: [1 + len(a.text) % 49 for a in e.atoms] + [7]
    responses = [[3, 4, 5], [6] * 9]
    pairs, ablated = score_pairs(model, [example] * 2, [judged(example), judgment_for(example, {})], responses, encode)
    assert set(pairs.rows) == {0} and ablated.shape == (len(pairs), 9) and not ablated[:, 3:].any()
    pairs, ablated = score_pairs(model, [example], [judgment_for(example, {})], [[3]], encode)
    assert len(pairs) == 0 and ablated.shape == (0, 1)


def test_precision_counts_only_what_is_defined():
    q = torch.tensor([[1.0, 3, 0, 9], [0, 0, 0, 0], [1, 1, 1, 1]])
    carries = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]).bool()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    share, uniform = localization_precision(q, carries, mask)
    assert share[0] == 0.75 and uniform[0] == pytest.approx(2 / 3)
    assert math.isnan(share[1]) and math.isnan(share[2]) and math.isnan(uniform[2])


def test_tokens_belong_to_the_sentence_in_which_they_end():
    class Sentence:
        def __init__(self, start, end, role):
            self.start, self.end, self.roles = start, end, {"a": role}

    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return " ".join("xyz"[: i + 1] for i in ids)

    spans = token_spans(Words(), [0, 1, 2])
    assert spans == [(0, 1), (1, 4), (4, 8)]
    sentences = [Sentence(0, 4, "irrelevant"), Sentence(4, 8, "key")]
    assert carrying_tokens(spans, sentences, ["a"]).tolist() == [False, False, True]
    assert not carrying_tokens(spans, sentences, ["b"]).any()
