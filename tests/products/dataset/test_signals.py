"""The rule of signal words: it lets through what says something of a person,
and stops what does not.
"""

from pathlib import Path

import pytest
import yaml

from memcalib.products.dataset.screening import load_screen, screen_row
from memcalib.products.dataset.sources import SourceRow

ROWS = yaml.safe_load(
    (Path(__file__).parents[2] / "fixtures" / "sensible_rows.yaml").read_text(encoding="utf-8")
)
ANSWER = (
    "Start with what is at hand and change one thing at a time. Keep a short list of what you "
    "tried and what came of it, and ask somebody who knows the matter when it does not get better."
)


def broken_rule(domain, question):
    """The rule that stops a question; "" when it passes."""
    row = SourceRow(id="x", source="own", domain=domain, question=question, answer=ANSWER)
    outcome = screen_row(row, load_screen())
    return "" if isinstance(outcome, SourceRow) else outcome.rule


@pytest.mark.parametrize("domain", ROWS)
def test_sensible_rows_of_a_domain_are_kept(domain):
    assert len(ROWS[domain]) >= 10
    assert [question for question in ROWS[domain] if broken_rule(domain, question)] == []


@pytest.mark.parametrize(
    ("domain", "question"),
    [
        (
            "health",
            "Which fruits hold the largest amounts of potassium, and which hold the smallest ones?",
        ),
        ("general", "Why is the sky bluer overhead than near the horizon on clear afternoons?"),
    ],
)
def test_a_question_about_nobody_is_stopped(domain, question):
    assert broken_rule(domain, question) == "signals"
