"""Accuracy of an exam by what may make an answer hard, against a slow count."""

import numpy as np
import pandas as pd

from memcalib.products.exam.exam import EXAM_COLUMNS
from memcalib.products.exam.exam_slices import exam_scope, exam_slices


def frame(rows):
    plain = {name: "" for name in EXAM_COLUMNS} | {"probe": "plain"}
    return pd.DataFrame([{**plain, **row} for row in rows])


def invented(seed=0, count=300):
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        judged = generator.choice([0, 1, 2, np.nan], p=[0.3, 0.3, 0.3, 0.1])
        rows.append(
            {
                "answer_id": f"a{number // 5}",
                "question_id": f"q{number // 15}",
                "kind": str(generator.choice(["over", "under"])),
                "language": str(generator.choice(["en", "de"])),
                "domain": "health",
                "characters": int(10 ** generator.uniform(1, 4)),
                "ideal": int(generator.integers(3)),
                "actual": int(generator.integers(3)),
                "judged": judged,
                "probe": str(generator.choice(["plain", "order"], p=[0.9, 0.1])),
            }
        )
    return frame(rows)


def test_shares_equal_the_loop():
    atoms = invented()
    table = exam_slices(atoms).set_index(["by", "part"])
    for language in ("en", "de"):
        right = high = low = scored = unscored = 0
        for row in atoms.to_dict("records"):
            if row["probe"] != "plain" or row["language"] != language:
                continue
            if np.isnan(row["judged"]):
                unscored += 1
                continue
            scored += 1
            right += row["judged"] == row["actual"]
            high += row["judged"] > row["actual"]
            low += row["judged"] < row["actual"]
        slice_row = table.loc["language", language]
        assert (slice_row["atoms"], slice_row["unscored"]) == (scored, unscored)
        assert np.allclose(
            slice_row[["accuracy", "too_high", "too_low"]].astype(float),
            [100 * right / scored, 100 * high / scored, 100 * low / scored],
        )
        assert slice_row["accuracy_low"] < slice_row["accuracy"] < slice_row["accuracy_high"]
    assert list(table.loc["ideal level"].index) == ["Ignore", "Bound", "Control"]
    assert (
        table.loc["characters"].index[0] == "0 to 249"
        and "4,000 and more" in table.loc["characters"].index
    )
    assert "trick" not in table.index.get_level_values("by")


def test_a_part_without_errors_has_an_exact_bound_and_one_without_levels_none():
    rows = [
        {"answer_id": f"a{n}", "question_id": f"q{n}", "kind": kind, "ideal": 0, "actual": 0}
        | {"judged": judged, "characters": 100, "domain": "d", "language": ""}
        for n in range(20)
        for kind, judged in (("over", 0.0), ("under", np.nan))
    ]
    table = exam_slices(frame(rows)).set_index(["by", "part"])
    assert np.isclose(table.loc[("kind", "over"), "accuracy_low"], 100 * 0.025 ** (1 / 20))
    assert np.isnan(table.loc[("kind", "under"), "accuracy"])
    assert table.loc[("kind", "under"), "unscored"] == 20


def test_the_scope_names_what_was_asked_and_nothing_else():
    atoms = invented()
    assert "health" in exam_scope(atoms) and "en (" in exam_scope(atoms)
    assert exam_scope(atoms.assign(language="")).startswith("answers of ")
    assert exam_scope(atoms[:0]) == ""
