"""A population of answers with true levels, read by a judge whose errors follow one of four
patterns; for tests of estimates without its errors.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

ATOMS = 8
KINDS = ("calibrated", "over", "under", "mixed")
CASES = ("even", "uneven by kind", "concentrated", "field worse than exam")


@dataclass(frozen=True)
class Answers:
    """Levels of answers by answer and atom, the question and the kind of each answer."""

    ideal: np.ndarray
    actual: np.ndarray
    judged: np.ndarray
    question: np.ndarray
    kind: np.ndarray


def answers_read(
    rng: np.random.Generator, case: str, questions: int, each: int, in_exam: bool
) -> Answers:
    """`each` answers to each of so many questions, as they are and as a judge with the errors of
    `case` reads them.
    """
    answers = questions * each
    question = np.repeat(np.arange(questions), each)
    shares_of_levels = [0.34, 0.33, 0.33] if in_exam else [0.7, 0.15, 0.15]
    ideal = rng.choice(3, size=(questions, ATOMS), p=shares_of_levels)[question]
    hardness = rng.beta(2, 2, size=questions)[question]  # answers to one question are alike
    kind = rng.choice(4, size=answers, p=[0.25] * 4 if in_exam else [0.5, 0.2, 0.2, 0.1])
    actual = _with_kind(rng, ideal, kind, hardness)
    rate = _error_rates(rng, case, kind, in_exam)
    return Answers(ideal, actual, _misread(rng, actual, rate), question, kind)


def _with_kind(rng, ideal, kind, hardness):
    """Actual levels: an answer departs from the ideal in the direction of its kind by a level or
    two, more often at hard questions.
    """
    departs = rng.random(ideal.shape) < (0.1 + 0.5 * hardness)[:, None]
    step = np.array([0, 1, -1, 0])[kind][:, None] + np.zeros_like(ideal)
    coins = rng.choice([-1, 1], size=ideal.shape)
    step = np.where((kind == 3)[:, None], coins, step)
    slip = (kind == 0)[:, None] & (rng.random(ideal.shape) < 0.04)
    step = np.where(slip, coins, step) * rng.choice([1, 2], size=ideal.shape, p=[0.6, 0.4])
    return np.clip(ideal + np.where(departs | slip, step, 0), 0, 2)


def _error_rates(rng, case, kind, in_exam):
    """The share of atoms that the judge misreads in each answer."""
    if case == "even":
        return np.full(len(kind), 0.04)
    if case == "uneven by kind":
        return np.where(np.isin(kind, (1, 3)), 0.12, 0.01)
    if case == "concentrated":
        return np.where(rng.random(len(kind)) < 0.25, 0.35, 0.0)
    return np.full(len(kind), 0.015 if in_exam else 0.12)


def _misread(rng, actual, rate):
    """Levels with this share of each answer's atoms read as one of the two others."""
    wrong = (actual + rng.integers(1, 3, size=actual.shape)) % 3
    return np.where(rng.random(actual.shape) < rate[:, None], wrong, actual)


def metrics_of(ideal: np.ndarray, level: np.ndarray) -> np.ndarray:
    """The six metrics of each answer in percent."""
    from memcalib.metrics import response_scores

    difference = level - ideal
    return 100 * response_scores(
        np.maximum(difference, 0).sum(axis=1), np.maximum(-difference, 0).sum(axis=1)
    )


def exam_frame_of(answers: Answers) -> pd.DataFrame:
    """The answers as the frame of an exam, as far as counts and checks read it."""
    n = len(answers.kind)
    return pd.DataFrame(
        {
            "answer_id": np.repeat([f"a{i}" for i in range(n)], ATOMS),
            "question_id": np.repeat([f"q{i}" for i in answers.question], ATOMS),
            "kind": np.repeat(np.array(KINDS)[answers.kind], ATOMS),
            "probe": "plain",
            "atom_id": np.tile([f"m{k}" for k in range(ATOMS)], n),
            "ideal": answers.ideal.ravel(),
            "actual": answers.actual.ravel(),
            "judged": answers.judged.ravel().astype(float),
        }
    )
