"""Differences of arms over seeds and questions, against a slow bootstrap written out."""

import random

import numpy as np
import pytest

from memcalib.products.reproduction.rule_runs import GridRow
from memcalib.products.reproduction.rule_tables import question_scores, resampled_difference


def grid_row(seed: int, over: list[int], under: list[int] | None = None) -> GridRow:
    return GridRow(
        run={"rule": "gdpo", "lr": 1e-3, "seed": seed},
        scores={"SCS": 1.0},
        over=over,
        under=[0] * len(over) if under is None else under,
    )


def diverged_row(seed: int) -> GridRow:
    return GridRow(run={"rule": "gdpo", "lr": 1e-3, "seed": seed}, scores={"SCS": None})


def test_a_question_has_half_the_score_for_each_level_of_error():
    row = grid_row(1, [0, 1, 2], [0, 0, 1])
    assert question_scores(row, 3).tolist() == [100, 50, 12.5]


def test_a_run_without_finite_numbers_has_zero_for_every_question():
    assert question_scores(diverged_row(1), 3).tolist() == [0, 0, 0]
    gap = resampled_difference([diverged_row(1)], [grid_row(1, [0, 1])])
    assert gap.difference == -75


def test_the_interval_agrees_with_a_slow_bootstrap():
    generator = random.Random(3)
    arm = [grid_row(seed, [generator.randint(0, 2) for _ in range(12)]) for seed in range(5)]
    other = [grid_row(seed, [generator.randint(0, 3) for _ in range(12)]) for seed in range(5)]
    gap = resampled_difference(arm, other, draws=4000)
    means = []
    for _ in range(4000):
        seeds = [generator.randrange(5) for _ in range(5)]
        questions = [generator.randrange(12) for _ in range(12)]
        total = 0.0
        for seed in seeds:
            for question in questions:
                total += 100 * 0.5 ** arm[seed].over[question]
                total -= 100 * 0.5 ** other[seed].over[question]
        means.append(total / 60)
    low, high = np.quantile(means, [0.025, 0.975])
    assert abs(gap.low - low) < 1.5 and abs(gap.high - high) < 1.5
    assert gap.low < gap.difference < gap.high


def test_questions_count_and_not_only_seeds():
    """Seeds that agree to the last question leave the spread of the questions."""
    arm = [grid_row(seed, [0, 1, 2, 3] * 5) for seed in (1, 2)]
    other = [grid_row(seed, [1, 1, 1, 1] * 5) for seed in (1, 2)]
    gap = resampled_difference(arm, other)
    assert gap.high - gap.low > 5


def test_pairs_are_made_by_seed_and_others_are_left_out():
    arm = [grid_row(1, [0]), grid_row(2, [1])]
    other = [grid_row(2, [2]), grid_row(3, [0])]
    gap = resampled_difference(arm, other)
    assert (gap.seeds, gap.difference) == (1, 25)


@pytest.mark.parametrize(
    ("arm", "other", "words"),
    [
        ([grid_row(1, [0])], [grid_row(2, [0])], "found seeds [1] and [2]"),
        ([grid_row(1, [0]), grid_row(1, [1])], [grid_row(1, [0])], "found seed 1 twice"),
        ([grid_row(1, [0])], [grid_row(1, [0, 1])], "totals of 1 and 1 questions; there must be 2"),
    ],
)
def test_what_does_not_fit_is_named(arm, other, words):
    with pytest.raises(ValueError) as error:
        resampled_difference(arm, other)
    assert words in str(error.value)
