"""Drawn tokens against the whole gradient of a policy, every draw written down."""

from itertools import product

import pytest
import torch

from memcalib.credit.tree_attention import tree_logps
from memcalib.products.micro.policy import load_policy
from memcalib.trainer.token_sampling import (
    draw_tokens,
    kept_lengths,
    prefix_probabilities,
    token_probabilities,
    token_weights,
)

torch.set_num_threads(1)
PROMPT = list(range(5, 25))
ANSWERS = [[11, 40, 23, 9], [8, 17]]
LENGTHS = [len(answer) for answer in ANSWERS]
ADVANTAGES = torch.tensor([[0.1, 1.5, -0.2, 0.4], [0.0, -0.7, 0.0, 0.0]])
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]


@pytest.fixture(scope="module")
def policy():
    model, _ = load_policy("cold-short")
    return model.double()


def gradient(model, weights, lengths):
    """The gradient of the weighted sum of losses, of answers cut to these lengths; flat."""
    model.zero_grad()
    answers = [answer[:length] for answer, length in zip(ANSWERS, lengths, strict=True)]
    read = [row for row, answer in enumerate(answers) if answer]
    if not read:
        return torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    logps, _ = tree_logps(
        model, [PROMPT] * len(read), [answers[row] for row in read], temperature=1.0, grad=True
    )
    width = logps.shape[1]
    scaled = (weights * ADVANTAGES)[read, :width]
    (
        torch.where(MASK[read, :width] & (weights[read, :width] > 0), logps, 0) * scaled
    ).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def every_draw(probabilities, prefixes):
    """Each draw that may happen, with its probability."""
    if prefixes:
        rows = []
        for row, length in enumerate(LENGTHS):
            falling = [1.0, *probabilities[row, :length].tolist(), 0.0]
            rows.append(
                [
                    (length_kept, falling[length_kept] - falling[length_kept + 1])
                    for length_kept in range(length + 1)
                ]
            )
        for (first, chance), (second, other) in product(*rows):
            kept_mask = torch.arange(4) < torch.tensor([first, second])[:, None]
            yield kept_mask, chance * other
        return
    inside = MASK.nonzero().tolist()
    for pattern in product([True, False], repeat=len(inside)):
        kept_mask = torch.zeros_like(MASK)
        chance = 1.0
        for (row, token), flag in zip(inside, pattern, strict=True):
            kept_mask[row, token] = flag
            one = probabilities[row, token].item()
            chance *= one if flag else 1 - one
        yield kept_mask, chance


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_mean_gradient_over_all_draws_is_the_whole_one(policy, prefixes, share):
    """All 64 draws of six tokens, or all 15 pairs of prefixes: unbiased, not nearly so."""
    make = prefix_probabilities if prefixes else token_probabilities
    probabilities = make(ADVANTAGES, MASK, share)
    whole = gradient(policy, MASK.double(), LENGTHS)
    mean = torch.zeros_like(whole)
    total = 0.0
    for kept_mask, chance in every_draw(probabilities, prefixes):
        if chance > 0:
            weights = token_weights(kept_mask, probabilities)
            mean += chance * gradient(policy, weights, kept_lengths(kept_mask).tolist())
            total += chance
    assert total == pytest.approx(1, abs=1e-9)
    # scores are float32: 1e-6 is their rounding
    assert (mean - whole).abs().max() < 1e-6 * whole.abs().max()


def test_without_the_weights_the_mean_is_another(policy):
    probabilities = token_probabilities(ADVANTAGES, MASK, 0.5)
    whole = gradient(policy, MASK.double(), LENGTHS)
    unweighted = gradient(policy, probabilities, LENGTHS)
    assert (unweighted - whole).abs().max() > 0.01 * whole.abs().max()


@pytest.mark.parametrize("prefixes", [False, True])
def test_probabilities_keep_the_share_and_never_vanish(prefixes):
    make = prefix_probabilities if prefixes else token_probabilities
    generator = torch.Generator().manual_seed(7)
    for share in (0.05, 0.3, 0.9, 1.0):
        for _ in range(20):
            advantages = torch.randn(4, 12, generator=generator).pow(3)
            mask = torch.arange(12) < torch.randint(1, 13, (4, 1), generator=generator)
            probabilities = make(advantages, mask, share)
            assert probabilities.sum() == pytest.approx(share * mask.sum().item(), rel=1e-9)
            assert ((probabilities > 0) == mask).all() and probabilities.max() <= 1
            if prefixes:
                assert (probabilities[:, :-1] >= probabilities[:, 1:] - 1e-12).all()


def test_draws_come_as_often_as_they_should():
    """4,000 draws: shares within four standard errors; drawn prefixes are prefixes."""
    generator = torch.Generator().manual_seed(3)
    for prefixes in (False, True):
        make = prefix_probabilities if prefixes else token_probabilities
        probabilities = make(ADVANTAGES, MASK, 0.5)
        drawn = torch.stack([draw_tokens(probabilities, generator, prefixes) for _ in range(4000)])
        error = (probabilities * (1 - probabilities) / 4000).sqrt()
        assert ((drawn.double().mean(0) - probabilities).abs() <= 4 * error + 1e-12).all()
        if prefixes:
            assert all(
                torch.equal(kept_lengths(kept_mask), kept_mask.sum(1)) for kept_mask in drawn
            )


def test_no_variance_is_smaller_among_proportional_probabilities():
    """Sum of squares over probabilities, against 200 other probabilities of the same sum."""
    generator = torch.Generator().manual_seed(5)
    size = ADVANTAGES[0].abs()[None] + 0.01
    inside = torch.ones_like(size, dtype=torch.bool)
    for _ in range(200):
        other = torch.rand(1, 4, generator=generator, dtype=torch.float64)
        other = (other * 2 / other.sum()).clamp(max=1)
        share = other.sum().item() / 4
        best = token_probabilities(size, inside, share, floor=1e-6)
        assert (size**2 / best).sum() <= (size**2 / other).sum() + 1e-9
        falling = other.sort(descending=True).values
        best_falling = prefix_probabilities(size, inside, share, floor=1e-6)
        assert (size**2 / best_falling).sum() <= (size**2 / falling).sum() + 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(share=0), "share 0, must be above 0"),
        (dict(share=1.5), "share 1.5"),
        (dict(floor=0), "floor 0"),
        (dict(mask=MASK[:, :3]), "must share one"),
        (dict(mask=torch.zeros_like(MASK)), "without tokens"),
        (dict(advantages=ADVANTAGES.clone().fill_(torch.nan)), "row 0, token 0: advantage not"),
    ],
)
def test_input_at_fault_is_refused(change, message):
    arguments = dict(advantages=ADVANTAGES, mask=MASK, share=0.5) | change
    for make in (token_probabilities, prefix_probabilities):
        with pytest.raises(ValueError, match=message):
            make(**arguments)


def test_an_answer_without_any_advantage_is_drawn_evenly():
    probabilities = token_probabilities(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), 0.5)
    assert probabilities.tolist() == [[0.5] * 4]
