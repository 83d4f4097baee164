"""Trees of rows against one row at a time: values, entropies, gradients, masks,
and models that cannot be packed.
"""

import functools
import logging
import random

import pytest
import small_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from memcalib.credit import tree_attention as trees
from memcalib.credit.prefix_groups import sharing_faults
from memcalib.credit.logprobs import response_logps_reference
from memcalib.credit.tree_attention import (
    attention_width,
    best_trees,
    pack_trees,
    prompt_trees,
    tree_fault,
    tree_logps,
    trees_agree,
    unpad,
)

SETTINGS = settings(max_examples=20, deadline=None, derandomize=True)
torch.set_num_threads(1)

MODELS = {
    "qwen3 sdpa": lambda: tiny(),
    "qwen3 eager": lambda: tiny(attn_implementation="eager"),
    "llama": lambda: tiny("Llama"),
    "mistral": lambda: tiny("Mistral", sliding_window=None, attn_implementation="eager"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def a_workload(seed, empty=False):
    return small_models.a_workload(seed, 8, empty, 4)


def plain_scores(model, prompt, answer, temperature):
    """One row through the model, differentiable: log-probabilities and entropies of the answer's
    tokens.
    """
    logits = (
        model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
        / temperature
    )
    logp = logits.log_softmax(-1)
    return logp.gather(1, torch.tensor(answer)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def fused(model, temperature=1.0):
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model


def gradient(model, total):
    gradients = torch.autograd.grad(
        total, [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    return torch.cat([g.flatten() for g in gradients if g is not None])


@SETTINGS
@given(seed=st.integers(0, 10_000), parts=st.sampled_from([None, 1, 3]))
def test_trees_equal_the_reference(model, seed, parts):
    prompts, responses = a_workload(seed, empty=True)
    slow = response_logps_reference(model, prompts, responses, temperature=0.7)
    fast, nothing = tree_logps(
        model, prompts, responses, temperature=0.7, parts=parts, logit_chunk=77
    )
    assert nothing is None and not fast.requires_grad
    assert fast.shape == slow.shape and (fast - slow).abs().max() < 1e-4


@settings(SETTINGS, max_examples=8)
@given(
    seed=st.integers(0, 10_000), head=st.sampled_from(["own", "fused"]), checkpointing=st.booleans()
)
def test_values_entropies_and_gradients_are_the_plain_ones(seed, head, checkpointing):
    model = fused(tiny(), 0.8)
    temperature = 0.8
    prompts, responses = a_workload(seed)
    weights = [torch.linspace(-1, i + 1, len(y)) for i, y in enumerate(responses)]
    rows = [plain_scores(model, p, y, temperature) for p, y in zip(prompts, responses, strict=True)]
    slow = gradient(model, sum((w * a).sum() for w, (a, _) in zip(weights, rows, strict=True)))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    options = dict(
        temperature=temperature, grad=True, entropy=True, fused=model if head == "fused" else None
    )
    logps, entropies = tree_logps(model, prompts, responses, **options, logit_chunk=100)
    for i, (a, b) in enumerate(rows):
        assert (logps[i, : len(a)] - a).abs().max() < 1e-5 and not logps[i, len(a) :].any()
        assert (entropies[i, : len(b)] - b).abs().max() < 1e-5
    fast = gradient(model, sum((w * logps[i, : len(w)]).sum() for i, w in enumerate(weights)))
    assert (fast - slow).norm() < 1e-4 * slow.norm()


@pytest.mark.parametrize("head", ["own", "fused"])
def test_adapters_learn_the_same(head):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.0
    )
    model = get_peft_model(fused(tiny("Llama")), config)
    prompts, responses = a_workload(6)
    rows = [
        plain_scores(model, p, y, 1.0)[0].sum() for p, y in zip(prompts, responses, strict=True)
    ]
    slow = gradient(model, sum(rows))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
            model.train()
        logps, _ = tree_logps(
            model, prompts, responses, grad=True, fused=model if head == "fused" else None
        )
        fast = gradient(model, logps.sum())
        assert len(fast) == len(slow) and (fast - slow).norm() < 1e-4 * slow.norm()


def test_order_of_rows_does_not_matter(model):
    prompts, responses = a_workload(5)
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    out, _ = tree_logps(model, prompts, responses)
    again, _ = tree_logps(model, [prompts[i] for i in order], [responses[i] for i in order])
    assert torch.allclose(again, out[order], atol=1e-5)


def test_padding_and_company_change_nothing(model):
    prompts, responses = a_workload(7)
    alone, _ = tree_logps(model, prompts[:1], responses[:1])
    longer = ([[3] * 60], [[4] * 30])
    beside, _ = tree_logps(model, prompts[:1] + longer[0], responses[:1] + longer[1])
    assert (
        torch.allclose(beside[:1, : alone.shape[1]], alone, atol=1e-5)
        and not beside[0, len(responses[0]) :].any()
    )


def test_each_prompt_passes_through_the_model_once(monkeypatch):
    model = tiny()
    stem = list(range(1, 41))
    rng = random.Random(0)
    pool = [stem, [*stem[:20], 42, 43, 44], [*stem[:30], 45]]
    prompts = [pool[i % 3] for i in range(24)]
    responses = [[rng.randrange(1, 50) for _ in range(5)] for _ in prompts]
    cells = []
    forward = model.model.forward

    def counting(**inputs):
        cells.append(inputs["input_ids"].numel())
        return forward(**inputs)

    monkeypatch.setattr(model.model, "forward", counting)
    tree_logps(model, prompts, responses, parts=1)
    assert cells == [39 + (22 - 20) + (30 - 30) + 24 * 5]


def test_group_of_eight_reads_its_prompt_once():
    prompts = [[1] * 1000] * 8
    responses = [[2] * 300] * 8
    (tree,) = prompt_trees(prompts, responses)
    assert sum(map(len, tree)) == 999 + 8 * 300
    packed = pack_trees(best_trees(prompts, responses, 20_000))
    assert packed.ids.numel() == 999 + 8 * 300 and len(packed.starts) == 8


@SETTINGS
@given(seed=st.integers(0, 10_000), parts=st.integers(1, 4))
def test_mask_shows_each_answer_its_own_past_and_nothing_else(seed, parts):
    prompts, responses = a_workload(seed, empty=True)
    packed = pack_trees(prompt_trees(prompts, responses, parts))
    assert packed.mask.any(-1).all() and sorted(packed.starts) == list(range(len(prompts)))
    for i, (prompt, answer) in enumerate(zip(prompts, responses, strict=True)):
        b, first = packed.starts[i]
        row = [*prompt, *answer[:-1]]
        for t in range(len(answer)):
            visible = packed.mask[b, 0, first + t]
            order = packed.positions[b, visible].argsort()
            assert packed.ids[b, visible][order].tolist() == row[: len(prompt) + t]
            assert packed.positions[b, visible].sort().values.tolist() == list(
                range(len(prompt) + t)
            )
            assert packed.targets[b, first + t] == answer[t]


def test_small_trees_share_a_row():
    prompts = [[k, k] for k in range(1, 7)]
    packed = pack_trees(prompt_trees([*prompts, [9] * 12], [[1, 2]] * 7))
    assert packed.ids.shape == (3, 13) and (packed.targets >= 0).sum() == 14


def test_cost_rule_cuts_trees_where_attention_weighs_more():
    rows = ([[1] * 100] * 8, [[2] * 100] * 8)
    assert len(best_trees(*rows, 1e9)) == 1 and len(best_trees(*rows, 10)) > 1
    assert len(best_trees([], [], 10)) == 0
    tall = tiny()
    per_layer = sum(p.numel() for p in tall.model.layers[0].parameters())
    assert attention_width(tall) == pytest.approx(per_layer / 64, rel=0.3)


@pytest.mark.parametrize("rows", [([], []), ([[1, 2]], [[]]), ([[1]], [[2]])])
def test_edge_cases(rows):
    model = tiny()
    out, entropies = tree_logps(model, *rows, entropy=True)
    assert out.shape == (len(rows[0]), max(map(len, rows[1]), default=0)) == entropies.shape
    assert torch.allclose(out, response_logps_reference(model, *rows), atol=1e-5)


def test_an_update_without_a_single_token_still_has_a_gradient():
    model = fused(tiny())
    for fused_head in (model, None):
        out, _ = tree_logps(model, [[1, 2], [3]], [[], []], grad=True, fused=fused_head)
        padded = torch.nn.functional.pad(out, (0, 3))
        assert padded.shape == (2, 3) and not padded.any() and padded.requires_grad
        assert not gradient(model, padded.sum()).any()


@pytest.mark.parametrize("name", small_models.OTHERS)
def test_models_that_cannot_be_packed_say_why_once(name, caplog):
    kind, options, reason = small_models.OTHERS[name]
    model = tiny(kind, **options)
    caplog.set_level(logging.WARNING, logger="memcalib")
    rows = a_workload(3)
    for _ in range(2):
        assert not trees_agree(model, *rows)
    assert reason in tree_fault(model) and reason in sharing_faults(model)["tree"]
    assert sum(reason in message for message in caplog.messages) == 1


def test_kernels_without_masks_are_refused():
    model = tiny("Llama")
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in tree_fault(model) and "'sdpa' or 'eager'" in tree_fault(model)


def test_a_model_that_reads_masks_wrongly_is_found_out(monkeypatch):
    model = tiny("Llama")
    forward = model.model.forward

    @functools.wraps(forward)
    def careless(**inputs):
        return forward(
            **(inputs | {"attention_mask": None} if inputs["attention_mask"].ndim == 4 else inputs)
        )

    monkeypatch.setattr(model.model, "forward", careless)
    stem = [5, 6, 7]
    assert not trees_agree(model, [stem, stem], [[1, 2, 3], [4, 5, 6]])
    assert "differs from the plain computation" in sharing_faults(model)["tree"]


def all_before(mask, shelf):
    """Instead of `fill_mask`: each token sees all tokens before it in its row,
    those of other answers too.
    """
    mask.copy_(torch.ones_like(mask).tril())


def test_a_sample_without_an_answer_decides_nothing(monkeypatch, caplog):
    monkeypatch.setattr(trees, "fill_mask", all_before)
    model = tiny()
    prompts = [[3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 7]]
    answers = [[8, 9, 10], [11, 12], [13, 14, 15]]
    assert (
        not trees_agree(model, prompts, [[], [], []])
        and sharing_faults(model) == {}
        and not caplog.messages
    )
    assert (
        not trees_agree(model, [[3, 4], [5]], [[5] * 300, [6] * 280])
        and sharing_faults(model) == {}
    )
    assert not trees_agree(model, [*prompts, [3, 4]], [*answers, [5] * 300]), (
        "one answer beyond the context"
    )
    assert "differs from the plain computation" in sharing_faults(model)["tree"]


def test_a_sample_without_an_answer_does_not_end_sharing():
    model = tiny()
    rows = a_workload(3)
    assert (
        not trees_agree(model, [[1, 2]], [[]])
        and trees_agree(model, *rows)
        and trees_agree(model, [[1, 2]], [[]])
    )
    assert sharing_faults(model) == {"tree": ""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_that_see_each_other_are_found_out_where_the_cheapest_trees_hold_one_each(
    monkeypatch, dtype
):
    monkeypatch.setattr(trees, "attention_width", lambda model: 5.0)
    rng = random.Random(0)
    models = [tiny().to(dtype) for _ in range(2)]
    for weight in (p for model in models for p in model.parameters()):
        weight.data.mul_(4)  # attention that matters

    def word(n):
        return [rng.randrange(1, 50) for _ in range(n)]

    prompts = [word(20), word(21), word(22), word(23)]
    rows = [*prompts, prompts[3]], [word(30) for _ in range(5)]
    planted = best_trees(*rows, 5.0)
    assert all(sum(node.row >= 0 for node in tree) == 1 for tree in planted) and len(planted) == 5
    assert trees_agree(models[0], *rows)
    monkeypatch.setattr(trees, "fill_mask", all_before)
    assert not trees_agree(models[1], *rows) and "differs" in sharing_faults(models[1])["tree"]


def test_half_precision_agrees():
    full = tiny()
    half = tiny().to(torch.bfloat16)
    half.load_state_dict(full.state_dict())
    prompts, responses = a_workload(2)
    expected = response_logps_reference(full, prompts, responses)
    out, _ = tree_logps(half, prompts, responses)
    assert trees_agree(half, prompts, responses)
    assert out.dtype == torch.float32 and (out - expected).abs().max() < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        assert (tree_logps(full, prompts, responses)[0] - expected).abs().max() < 0.05


def test_scaled_logits_need_a_head_that_knows():
    model = tiny("Llama")
    model.config.logit_scale = 0.5
    with pytest.raises(ValueError, match="scales its logits"):
        tree_logps(model, [[1]], [[2]])


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_unpad_inverts_the_trainers_rectangle(seed):
    prompts, responses = a_workload(seed, empty=True)
    prompt_width = max(map(len, prompts))
    right = max(1, *map(len, responses))
    ids = [
        [0] * (prompt_width - len(p)) + p + y + [0] * (right - len(y))
        for p, y in zip(prompts, responses, strict=True)
    ]
    mask = [
        [0] * (prompt_width - len(p)) + [1] * len(p + y) + [0] * (right - len(y))
        for p, y in zip(prompts, responses, strict=True)
    ]
    assert unpad(torch.tensor(ids), torch.tensor(mask), right) == (prompts, responses)


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 4}, {"trl": {"gradient_checkpointing": True}}], ids=str
)
def test_the_trainers_update_is_the_plain_one(tmp_path, changes):
    from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
    from memcalib.products.micro.policy import build_policy, build_tokenizer
    from memcalib.trainer.train_config import trl_config, world_config
    from memcalib.training import CreditTrainer

    tokenizer = build_tokenizer()
    examples = make_examples("short", 4, seed=5)
    config = world_config(
        WORLDS["short"], prompts=4, generations=4, steps=1, max_tokens=12, temperature=0.8
    )
    config = config.model_validate(config.model_dump() | changes)
    options = dict(
        args=trl_config(config, tmp_path),
        train_dataset=examples,
        processing_class=tokenizer,
        peft_config=small_models.random_lora() if config.lora_rank else None,
    )
    trainer = CreditTrainer(build_policy(0), judge=exact_judge, **options)
    trainer.model.train()
    g = torch.Generator().manual_seed(0)

    def word(n):
        return torch.randint(5, 200, (n,), generator=g).tolist()

    prompts = [p for p in (word(20), word(31), word(25)) for _ in range(4)]
    answers = [word(3 + k % 5) if k != 2 else [] for k in range(12)]
    ids = torch.tensor(
        [
            [0] * (31 - len(p)) + p + y + [0] * (8 - len(y))
            for p, y in zip(prompts, answers, strict=True)
        ]
    )
    mask = torch.tensor(
        [
            [0] * (31 - len(p)) + [1] * len(p + y) + [0] * (8 - len(y))
            for p, y in zip(prompts, answers, strict=True)
        ]
    )
    results = {}
    for share in (True, False):
        trainer.config = config.model_copy(update={"share_prompts": share})
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 8, compute_entropy=True
        )
        weights = torch.linspace(-1, 2, 12)[:, None] * mask[:, 31:]
        results[share] = (
            logps.detach(),
            entropies.detach(),
            gradient(trainer.model, (weights * logps).sum()),
        )
    assert sharing_faults(trainer.model) == {"tree": ""}
    for a, b in zip(results[True][:2], results[False][:2], strict=True):
        assert a.shape == (12, 8) and (a - b).abs().max() < 1e-5
    assert (results[True][2] - results[False][2]).norm() < 1e-4 * results[False][2].norm()
