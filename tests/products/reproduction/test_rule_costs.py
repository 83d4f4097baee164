"""What a step of each rule costs beside GDPO, against sums by hand."""

import pytest

from memcalib.products.reproduction.profiles import load_profile
from memcalib.products.reproduction.rule_costs import (
    gdpo_steps,
    priced_steps,
    rule_costs,
    rule_costs_figure,
)

PRICE = {"prompt": 0.3, "completion": 1.2}


def test_costs_are_the_sums_of_the_forecast():
    costs = rule_costs(load_profile("paper"), ["gdpo", "ordered"], PRICE)
    assert list(costs["recipe"].unique()) == ["qwen3-8b", "ministral-3-8b", "qwen3.5-35b-a3b"]
    rows = costs[costs["recipe"] == "qwen3-8b"].set_index("rule")
    row_tokens = 1500
    gdpo = 500 / 2500 + (3 + 2) * row_tokens / 20000  # sampled; update, policy and reference
    assert rows.loc["gdpo", "GPU seconds of an answer"] == pytest.approx(gdpo)
    ordered = gdpo + 4 * row_tokens / 20000
    assert rows.loc["ordered", "GPU seconds of an answer"] == pytest.approx(ordered)
    judgment = (5375 * 0.3 + 1115 * 1.2) / 1e6
    assert rows.loc["gdpo", "dollars of a judgment"] == pytest.approx(judgment)
    assert rows.loc["ordered", "judgment, times GDPO"] == 1
    priced = priced_steps(rows.reset_index(), gpu_hour=3.0).set_index("rule")
    parts = judgment / (gdpo * 3.0 / 3600)
    assert priced.loc["ordered", "judgment, parts of an answer"] == pytest.approx(parts)
    expected = (ordered / gdpo + parts) / (1 + parts)
    assert priced.loc["ordered", "steps of GDPO"] == pytest.approx(expected)


def test_a_step_lies_between_its_answer_and_its_judgment():
    for price in (0.0, 0.1, 1.0, 10.0):
        steps = gdpo_steps(1.5, 1.1, price)
        assert 1.1 <= steps <= 1.5
        assert gdpo_steps(1.0, 1.0, price) == 1
    assert gdpo_steps(1.5, 1.1, 0.0) == 1.5


def test_a_panel_for_each_model_and_a_line_for_each_rule():
    costs = rule_costs(load_profile("paper"), ["gdpo", "evidence-kl"], PRICE)
    figure = rule_costs_figure(costs, gpu_hour=2.0)
    assert len(figure.axes) == 3
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]
    assert len(curves) == 2
    falling = curves[1].get_ydata()
    assert falling[0] > falling[-1] > 1


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="allowed"):
        rule_costs(load_profile("paper"), ["nosuch"], PRICE)
