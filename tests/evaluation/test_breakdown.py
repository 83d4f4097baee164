"""Channels, slices and comparisons against slow, obvious loops."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import judgment_lists, make
import memcalib
from memcalib.evaluation import breakdown
from memcalib.metrics import METRICS, metric_table
from memcalib.problem import Level

REFERENCE = Path(memcalib.__file__).parent / "data" / "reference"
drawn = settings(max_examples=60, deadline=None, derandomize=True)


@drawn
@given(judgment_lists())
def test_channels_and_atoms_equal_the_loop(judgments):
    table = [[0] * 3 for _ in range(3)]
    for j in judgments:
        for a in j.atoms:
            if a.actual is not None:
                table[a.ideal][a.actual] += 1
    scored = sum(map(sum, table))
    if not scored:
        with pytest.raises(ValueError, match="nothing"):
            breakdown.channel_counts(judgments)
        return
    assert breakdown.channel_counts(judgments).tolist() == table
    rows = breakdown.atom_table(judgments, "ideal", resamples=20).set_index("ideal")
    for level in Level:
        if any(table[level]):
            assert rows.loc[level.label, "accuracy"] == pytest.approx(
                100 * table[level][level] / sum(table[level])
            )
    assert (rows["atoms"] - rows["unscored_atoms"]).sum() == scored
    percent = breakdown.channel_proportions(np.array(table))
    if all(map(sum, table)):
        diagonal = [100 * table[k][k] / sum(table[k]) for k in range(3)]
        assert breakdown.macro_accuracy(percent) == pytest.approx(sum(diagonal) / 3)
    else:
        with pytest.raises(ValueError, match="no scored atom of ideal level"):
            breakdown.macro_accuracy(percent)


@drawn
@given(judgment_lists(), st.integers(0, 9))
def test_comparison_equals_the_loop(judgments, seed):
    rng = np.random.default_rng(seed)
    other = []
    for j in judgments:
        atoms = [a.model_copy(update={"actual": Level(int(rng.integers(3)))}) for a in j.atoms]
        other.append(j.model_copy(update={"model": "n", "atoms": atoms}))
    values = {}
    for j in judgments + other:
        if j.scored:
            value = 100 * 0.5 ** (j.over + j.under)
            values.setdefault((j.domain, j.question_id), {}).setdefault(j.model, []).append(value)
    gaps = [np.mean(v["n"]) - np.mean(v["m"]) for v in values.values() if len(v) == 2]
    if not gaps:
        with pytest.raises(ValueError, match="no scored question"):
            breakdown.compare(judgments + other, "m", "n", resamples=10)
        return
    table = breakdown.compare(judgments + other, "m", "n", resamples=10)
    row = table[(table["domain"] == "all") & (table["metric"] == "SCS")].iloc[0]
    assert row["difference"] == pytest.approx(np.mean(gaps))
    assert row["better"] == sum(g > 1e-9 for g in gaps) and row["worse"] == sum(
        g < -1e-9 for g in gaps
    )
    assert row["better"] + row["tied"] + row["worse"] == row["questions"] == len(gaps)
    back = breakdown.compare(judgments + other, "n", "m", resamples=10)
    np.testing.assert_allclose(back["difference"], -table["difference"], atol=1e-9)
    assert (back["better"] == table["worse"]).all() and np.allclose(back["p"], table["p"])


def test_comparison_with_itself_finds_nothing():
    js = [make([0], [k % 3], f"e{k}") for k in range(5)]
    table = breakdown.compare(js, "m", "m")
    assert (table["difference"] == 0).all() and (table["p"] == 1).all()


def test_comparison_names_the_runs_it_knows():
    js = [make([0], [0]), make([0], [0], condition="no_memory")]
    with pytest.raises(ValueError, match=r"'x'.*full_memory.*no_memory"):
        breakdown.compare(js, "x", "m")
    with pytest.raises(ValueError, match="found 2 runs with this name"):
        breakdown.compare(js, "m", "m")
    table = breakdown.compare(js, ("m", "no_memory"), ("m", "full_memory"))
    assert (table["difference"] == 0).all()


def test_unscored_survives_the_file(tmp_path):
    path = tmp_path / "judgments.jsonl"
    path.write_text(
        make([0, 2], [0, None]).to_json() + "\n" + make([0, 2], [0, 2], "e2").to_json() + "\n"
    )
    tables = json.loads(breakdown.score_text(path, as_json=True, resamples=50))
    assert [row["unscored_atoms"] for row in tables["scores"]] == [1]
    assert tables["channels"][-1]["channel"] == "macro accuracy"
    assert tables["channels"][-1]["m atoms"] == 3


def test_published_macro_accuracy_is_the_mean_of_the_diagonal():
    table = pd.read_csv(REFERENCE / "test_channels.csv")
    for column, want in (("cold_start_pct", 77.94), ("memcalib_rl_pct", 94.75)):
        square = table[column].to_numpy()[:9].reshape(3, 3)
        assert round(breakdown.macro_accuracy(square), 2) == want


def test_unknown_slices_are_named():
    with pytest.raises(ValueError, match=r"'size'.*block_size"):
        breakdown.atom_table([make([0], [0])], by="size")


def test_a_level_without_scored_atoms_has_no_accuracy():
    table = breakdown.atom_table([make([0, 1], [0, None])], by="ideal").set_index("ideal")
    assert table.loc["Ignore", "accuracy"] == 100 and math.isnan(table.loc["Bound", "accuracy"])
    assert table.loc["Bound", "unscored_atoms"] == 1


def test_kinds_of_your_own_slice_the_atoms():
    kinds = {"first": r"p1_", "later": r"p\d"}
    table = breakdown.atom_table([make([0, 1, 2], [0, 2, 2])], by="kind", kinds=kinds)
    by_kind = table.set_index("kind")["atoms"].to_dict()
    assert by_kind == {"first": 1, "later": 2}


def test_kinds_of_the_micro_world_are_known():
    from memcalib.products.micro import world as microworld

    examples = microworld.make_examples(microworld.WORLDS["short"], 20, 0, "test")
    kinds = {breakdown.distractor_kind(i) for example in examples for i in example.levels}
    assert "grounded" in kinds and "other" not in kinds


def test_block_sizes_count_the_atoms_of_one_block():
    frame = breakdown.atom_frame([make([0] * 5, [0] * 5)])
    assert frame["block"].tolist() == [3, 2, 3, 2, 3]


def test_score_text_prints_what_it_is_asked_for(tmp_path):
    import json

    path = tmp_path / "judgments.jsonl"
    path.write_text("".join(make([0, 1], [0, k % 2], f"e{k}").to_json() + "\n" for k in range(4)))
    printed = breakdown.score_text(path, by=["block_size", "kind"])
    assert all(
        word in printed for word in ("all Bound", "atoms by block size", "atoms by kind", "AB-")
    )
    parsed = json.loads(breakdown.score_text(path, as_json=True))
    assert parsed["scores"][0]["Exact"] == 50 and parsed["scores"][0]["SCS_std"] is None
    with pytest.raises(ValueError, match="'size'"):
        breakdown.score_text(path, by=["size"])


def test_a_model_of_which_nothing_is_scored_does_not_hide_the_others(tmp_path):
    from memcalib.evaluation.breakdown import score_text
    from memcalib.problem import judgment_for, sample_records
    from memcalib.io.records import write_jsonl

    records = sample_records()
    scored = [judgment_for(r, r.levels, model="good") for r in records]
    lost = [judgment_for(r, {}, model="lost") for r in records]
    text = score_text(write_jsonl(tmp_path / "j.jsonl", [*scored, *lost]))
    assert "good" in text and "lost" in text and "100.0" in text


def brute_force_p(differences):
    """The share of all patterns of signs whose sum is as far from zero."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in product([1, -1], repeat=len(differences))
    ]
    return np.mean([value >= observed - 1e-9 for value in sums])


@drawn
@given(st.lists(st.integers(-4, 4).map(lambda k: 12.5 * k), min_size=1, max_size=9))
def test_p_is_that_of_the_mean_difference(differences):
    p_values = breakdown.sign_flip_p(np.array(differences)[:, None])
    assert np.isclose(p_values[0], brute_force_p(differences))


def test_drawn_patterns_give_the_p_of_all_patterns():
    differences = np.random.default_rng(1).normal(6, 15, 13)
    every_pattern = breakdown.sign_flip_p(differences[:, None])[0]
    with_ties = np.append(differences, 0.0)  # a fourteenth question without a difference
    assert abs(breakdown.sign_flip_p(with_ties[:, None])[0] - every_pattern) < 0.01


def test_many_small_losses_and_few_large_gains_are_no_difference():
    """25 questions lose a little and 9 gain much: a sign test has p = 0.009,
    the mean difference is near zero.
    """
    right = [0] * 8
    slip = [0] * 7 + [1]
    wrong = [2] * 8
    rows = []
    for k in range(20):
        before, after = (wrong, right) if k < 9 else (right, slip)
        rows.append(make(right, before, f"e{k}", model="old"))
        rows.append(make(right, after, f"e{k}", model="new"))
    for k in range(20, 34):
        rows.append(make(right, right, f"e{k}", model="old"))
        rows.append(make(right, slip, f"e{k}", model="new"))
    scs = breakdown.compare(rows, "old", "new").iloc[0]
    assert (scs["better"], scs["worse"]) == (9, 25)
    assert scs["low"] < 0 < scs["high"] and scs["p"] > 0.05


@pytest.mark.parametrize(
    "p_values, corrected",
    [
        ([0.01], [0.01]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holm_by_hand(p_values, corrected):
    assert np.allclose(breakdown.holm(p_values), corrected)


def test_every_test_of_a_comparison_is_counted_once():
    rows = []
    for model, actual in (("old", [1]), ("new", [0])):
        for k in range(8):
            domain = "coding" if k % 2 else "legal"
            rows.append(make([0], actual, f"e{k}", model=model, domain=domain))
    compared = breakdown.compare(rows, "old", "new")
    is_of_six = compared["metric"].isin(METRICS)
    assert is_of_six.sum() == 3 * len(METRICS) and len(compared) == 3 * len(metric_table())
    two_domains = compared[is_of_six]
    assert np.allclose(two_domains["p_holm"], breakdown.holm(two_domains["p"]))
    for _, apart in compared[~is_of_six].groupby("metric"):
        assert np.allclose(apart["p_holm"], breakdown.holm(apart["p"]))
    one_domain = breakdown.compare(
        [row.model_copy(update={"domain": "legal"}) for row in rows], "old", "new"
    )
    is_over_all = one_domain["domain"] == "all"
    over_all = one_domain[is_over_all & one_domain["metric"].isin(METRICS)]
    assert np.allclose(over_all["p_holm"], breakdown.holm(over_all["p"]))
    of_the_domain = one_domain.loc[~is_over_all, "p_holm"]
    assert of_the_domain.tolist() == one_domain.loc[is_over_all, "p_holm"].tolist()


@pytest.mark.slow
def test_no_difference_is_called_one_in_one_of_twenty_comparisons():
    """Two runs of one model: 40 questions of very different difficulty, two seeds,
    over- and under-use at random.
    """
    generator = np.random.default_rng(7)
    questions = np.repeat(np.arange(40), 2)
    simulations = 1500
    rejected = np.zeros(2)
    for _ in range(simulations):
        difficulty = generator.gamma(0.8, 1.2, 40)[questions]
        frames = []
        for model in ("old", "new"):
            totals = generator.poisson(difficulty), generator.poisson(difficulty / 2)
            frame = pd.DataFrame({"over": totals[0], "under": totals[1], "question_id": questions})
            frame = frame.assign(model=model, condition="full_memory", judge="", domain="all of it")
            frames.append(frame.assign(scored=True, seed=np.tile([1, 2], 40)))
        table = breakdown.compare(pd.concat(frames, ignore_index=True), "old", "new", resamples=1)
        over_all = table[table["domain"] == "all"].set_index("metric")
        rejected += over_all.loc[["SCS", "sMOS"], "p"].to_numpy() < 0.05
    assert ((rejected / simulations > 0.04) & (rejected / simulations < 0.06)).all()
