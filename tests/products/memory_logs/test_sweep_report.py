"""The picture and the report of a sweep: what is marked, what a program reads, and odd tables."""

import json
import math

import pandas as pd
import pytest

from memcalib.products.memory_logs.sweep import PromptSetting, recommend
from memcalib.products.memory_logs.sweep_report import sweep_figure, write_sweep_report


def table_of(scores: dict[str, float], p: float, low: float = 5.0) -> pd.DataFrame:
    """A table as `sweep_table` makes it; the first setting is today's."""
    today = next(iter(scores.values()))
    rows = []
    for name, score in scores.items():
        row = {"setting": name, "tokens": 100.0 + len(rows)}
        for metric in ("SCS", "sMOS", "sMUS"):
            row |= {metric: score, f"{metric}_low": score - low, f"{metric}_high": score + low}
        row |= {"unscored": 0, "difference": score - today, "p_holm": p}
        row |= {"difference_low": score - today - low, "difference_high": score - today + low}
        rows.append(row)
    table = pd.DataFrame(rows)
    table.loc[0, ["difference", "difference_low", "difference_high", "p_holm"]] = math.nan
    return table


def drawn(figure) -> list[str]:
    (legend,) = figure.legends or [None]
    return [text.get_text() for text in legend.get_texts()] if legend else []


@pytest.mark.parametrize(
    ("scores", "p", "marks"),
    [
        ({"a": 50, "b": 70, "c": 40}, 0.01, ["today", "recommended", "tried"]),
        ({"a": 50, "b": 70, "c": 40}, 0.5, ["today", "tried"]),  # not shown to be better
        ({"a": 90, "b": 70}, 0.01, ["today", "tried"]),
        ({"a": 90}, 0.01, []),  # one series needs no legend
    ],
)
def test_only_what_beats_today_is_marked_as_recommended(scores, p, marks):
    table = table_of(scores, p)
    figure = sweep_figure(table, recommend(table))
    assert drawn(figure) == marks
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == list(scores)


def test_the_places_are_those_of_the_table():
    table = table_of({"a": 50, "b": 70}, 0.01)
    figure = sweep_figure(table, recommend(table))
    placed = {}
    for ax in figure.axes:
        values = []
        for line in ax.lines:
            if line.get_marker() in "sDo":
                values += map(float, line.get_xdata())
        placed[ax.get_title(loc="left").split()[0]] = sorted(values)
    assert placed == {"SCS": [50, 70], "sMOS": [50, 70], "sMUS": [50, 70], "tokens": [100, 101]}


def test_too_few_questions_for_intervals_still_draw(tmp_path):
    table = table_of({"a": 50, "b": 70}, math.nan, low=math.nan)
    recommendation = recommend(table)
    page = write_sweep_report(
        tmp_path, table, recommendation, PromptSetting(top_k=3), 2, ["A note."]
    )
    text = page.read_text(encoding="utf-8")
    assert "A note." in text and '<figure class="sweep"><svg' in text
    content = json.loads((tmp_path / "recommendation.json").read_text(encoding="utf-8"))
    assert content["setting"]["top_k"] == 3 and content["beats_today"] is False


def test_a_table_of_nothing_is_named():
    table = table_of({"a": 50}, 0.5)
    with pytest.raises(ValueError, match="found no setting; allowed"):
        sweep_figure(table.iloc[:0], recommend(table))
