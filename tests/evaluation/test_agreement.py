"""Agreement of two readers: formulas against definitions, sampling, pairing."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from strategies import judgment_lists, levels, make

from memcalib.evaluation.agreement import (
    agreement,
    allocate,
    confusion,
    confusion_figure,
    coverage_table,
    item_id,
    judged_atoms,
    kappa,
    level_agreement,
    method_agreement,
    natural_estimate,
    pair_judgments,
    ranking_agreement,
    resampled_counts,
    row_percent,
    sample_atoms,
    simulated_audits,
    wilson,
)
from memcalib.io.records import write_jsonl
from memcalib.metrics import LEAST_GROUPS

pairs_of_levels = st.lists(st.tuples(levels, levels), min_size=1, max_size=40)


def frame(pairs, questions=None):
    first, second = zip(*pairs, strict=True)
    return pd.DataFrame(
        {"first": first, "second": second, "question_id": questions or range(len(pairs))}
    )


def kappa_by_definition(pairs, weight):
    """Observed over expected disagreement, every pair of the two readers' labels enumerated,
    in exact fractions.
    """
    n = len(pairs)
    observed = Fraction(sum(weight(a, b) for a, b in pairs), n)
    expected = Fraction(sum(weight(a, b) for a, _ in pairs for _, b in pairs), n * n)
    return float(1 - observed / expected) if expected else math.nan


@given(pairs_of_levels)
def test_kappa_is_its_definition(pairs):
    counts = confusion(*zip(*pairs, strict=True))
    for linear, weight in ((False, lambda a, b: int(a != b)), (True, lambda a, b: abs(a - b))):
        assert kappa(counts, linear) == pytest.approx(
            kappa_by_definition(pairs, weight), abs=1e-12, nan_ok=True
        )


@given(pairs_of_levels)
def test_kappa_does_not_care_who_reads_first_and_takes_stacks(pairs):
    counts = confusion(*zip(*pairs, strict=True))
    stack = np.stack([counts, counts.T, 3 * counts])
    for linear in (False, True):
        assert kappa(stack, linear) == pytest.approx(
            [kappa(counts, linear)] * 3, abs=1e-12, nan_ok=True
        )


def test_kappa_refuses_what_is_no_table():
    for bad in (np.zeros((2, 3)), np.array([[1, -1], [0, 1]]), np.zeros(3)):
        with pytest.raises(ValueError, match="a square table of counts of 0 or more"):
            kappa(bad)


def test_kappa_of_nothing_and_of_one_level_is_missing_not_zero():
    assert np.isnan(kappa(np.zeros((3, 3)))) and np.isnan(kappa(np.diag([0, 7, 0]), linear=True))


@given(pairs_of_levels)
def test_confusion_counts_every_pair_once(pairs):
    counts = confusion(*zip(*pairs, strict=True))
    pair_counts = Counter(pairs)
    assert all(
        counts[cell] == pair_counts[cell] for cell in np.ndindex(3, 3)
    ) and counts.sum() == len(pairs)


def test_confusion_leaves_out_missing_levels_and_refuses_others():
    assert confusion([0, np.nan, 2], [np.nan, 1, 2]).tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert confusion([], []).sum() == 0
    for bad in (3, 0.5, -1):
        with pytest.raises(ValueError, match="allowed: 0, 1, 2"):
            confusion([bad], [0])
    with pytest.raises(ValueError):
        confusion([0, 1], [0])


@given(st.integers(1, 500), st.data())
def test_wilson_is_its_formula(n, data):
    k = data.draw(st.integers(0, n))
    z = 1.959963984540054
    p = k / n
    width = z * math.sqrt(k / n * (1 - k / n) / n + z**2 / (4 * n**2))
    low, high = ((p + z**2 / (2 * n) + sign * width) / (1 + z**2 / n) for sign in (-1, 1))
    assert wilson(k, n) == pytest.approx((100 * max(low, 0), 100 * min(high, 1)), abs=1e-9)


@pytest.mark.parametrize("agreed, pairs", [(0, 0), (3, 2), (-1, 5)])
def test_wilson_of_nothing_raises(agreed, pairs):
    with pytest.raises(ValueError, match=f"found {agreed} agreeing pairs out of {pairs}"):
        wilson(agreed, pairs)


def test_row_percent_of_an_empty_row_is_missing():
    shares = row_percent(np.array([[3, 1, 0], [0, 0, 0], [0, 0, 2]]))
    assert shares[0].tolist() == [75, 25, 0] and np.isnan(shares[1]).all() and shares[2, 2] == 100


# ---- sampling


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any), st.data())
def test_allocation_is_as_even_as_sizes_allow(sizes, data):
    n = data.draw(st.integers(1, sum(sizes)))
    given_ = allocate(sizes, n)
    assert sum(given_) == n and all(0 <= g <= size for g, size in zip(given_, sizes, strict=True))
    with_room = [g for g, size in zip(given_, sizes, strict=True) if g < size]
    assert not with_room or max(given_) - min(with_room) <= 1
    if n < sum(sizes):
        assert all(a <= b for a, b in zip(given_, allocate(sizes, n + 1), strict=True))


@pytest.mark.parametrize("n", [0, -3, 7])
def test_allocation_refuses_impossible_sizes(n):
    with pytest.raises(ValueError, match=f"found {n}; allowed: 1 to 6"):
        allocate([4, 2], n)


def test_a_remainder_goes_to_rare_cells():
    assert allocate([5, 1, 9], 4) == [2, 1, 1]
    assert allocate([9, 5, 2], 5) == [1, 2, 2]


def many(count=60, seed=0):
    rng = np.random.default_rng(seed)

    def draw(k, p):
        return [int(x) for x in rng.choice(3, size=k, p=p)]

    return [
        make(draw(6, [0.8, 0.1, 0.1]), draw(6, [0.7, 0.2, 0.1]), f"e{i}", judge="j", seed=i % 3)
        for i in range(count)
    ]


@given(judgment_lists(), st.sampled_from(["natural", "stratified"]), st.data())
def test_samples_hold_scored_atoms_once_and_larger_ones_hold_smaller_ones(judgments, scheme, data):
    atoms = judged_atoms(judgments)
    scored = int(atoms["judged"].notna().sum())
    if not scored:
        with pytest.raises(ValueError, match="sample size"):
            sample_atoms(atoms, 1, scheme)
        return
    n = data.draw(st.integers(1, scored))
    drawn = sample_atoms(atoms, n, scheme)
    assert len(drawn) == n and drawn["item"].is_unique and drawn["judged"].notna().all()
    assert set(drawn["item"]) <= set(sample_atoms(atoms, min(n + 1, scored), scheme)["item"])
    assert drawn["item"].is_monotonic_increasing
    sizes = Counter(zip(atoms["ideal"], atoms["judged"], strict=True))
    assert all(row.population == sizes[row.ideal, row.judged] for row in drawn.itertuples())


def test_a_sample_depends_on_the_seed_and_not_on_the_order_of_the_file():
    atoms = judged_atoms(many())
    for scheme in ("natural", "stratified"):
        drawn = sample_atoms(atoms, 40, scheme, seed=1)
        shuffled = sample_atoms(judged_atoms(many()[::-1]), 40, scheme, seed=1)
        assert drawn.equals(shuffled[drawn.columns])
        assert set(drawn["item"]) != set(sample_atoms(atoms, 40, scheme, seed=2)["item"])
    with pytest.raises(ValueError, match="allowed: natural, stratified"):
        sample_atoms(atoms, 5, "random")


def test_natural_sampling_is_uniform_over_atoms():
    atoms = judged_atoms(many(10))
    times = Counter(
        item for seed in range(400) for item in sample_atoms(atoms, 12, seed=seed)["item"]
    )
    expected = 400 * 12 / len(atoms)
    assert len(times) == len(atoms)
    assert (
        sum((times[i] - expected) ** 2 / expected for i in times) < 110
    )  # chi-square, 59 degrees, far tail


def test_the_order_of_a_stratified_sample_does_not_tell_the_cell():
    atoms = judged_atoms(many(200))
    ranks = []
    for seed in range(40):
        drawn = sample_atoms(atoms, 150, "stratified", seed)
        rare = drawn["population"] < drawn["population"].median()
        ranks.append(np.flatnonzero(rare).mean() - np.flatnonzero(~rare).mean())
    assert abs(np.mean(ranks)) < 6  # of 150 places; in the order of the draw it is over 40


def test_item_ids_name_the_answer_and_never_the_judge_or_a_number():
    a = make([0], [1], judge="a")
    assert item_id(a, "p1_a1") == item_id(make([0], [2], judge="b"), "p1_a1")
    others = [
        make([0], [1], **change)
        for change in ({"seed": 1}, {"sample": 1}, {"condition": "x"}, {"model": "n"})
    ]
    assert (
        len({item_id(a, "p1_a1"), item_id(a, "p1_a2"), *(item_id(o, "p1_a1") for o in others)}) == 6
    )
    assert item_id(a, "p1_a1").startswith("item-")


def test_judged_atoms_refuses_doubles_mixtures_and_nothing(tmp_path):
    with pytest.raises(ValueError, match="judged twice"):
        judged_atoms([make([0], [1]), make([0], [2])])
    with pytest.raises(ValueError, match="judged twice"):
        judged_atoms([make([0], [1], judge="a"), make([0], [1], judge="b")])
    with pytest.raises(ValueError, match="'a', 'b'"):
        judged_atoms([make([0], [1], judge="a"), make([0], [1], "e2", judge="b")])
    with pytest.raises(ValueError, match="undefined"):
        judged_atoms([])
    file = write_jsonl(tmp_path / "judgments.jsonl", many(5))
    assert judged_atoms(file).equals(judged_atoms(many(5)))


def test_a_stratified_sample_takes_from_no_cell_more_than_it_holds():
    atoms = judged_atoms(many())
    sample = sample_atoms(atoms, 50, "stratified")
    drawn = confusion(sample["ideal"], sample["judged"])
    held = confusion(atoms["ideal"], atoms["judged"])
    assert drawn.sum() == 50
    assert held.sum() == len(atoms)
    assert (drawn <= held).all()


# ---- tables


@given(pairs_of_levels, st.data())
def test_agreement_row(pairs, data):
    missing = data.draw(
        st.lists(st.sampled_from([(0, np.nan), (np.nan, 2), (np.nan, np.nan)]), max_size=4)
    )
    row = agreement(frame(pairs + missing), resamples=20).iloc[0]
    assert (row["pairs"], row["missing"]) == (len(pairs), len(missing))
    assert row["exact"] == pytest.approx(100 * sum(a == b for a, b in pairs) / len(pairs))
    assert (row["lower"], row["higher"]) == (
        sum(b < a for a, b in pairs),
        sum(b > a for a, b in pairs),
    )
    assert not row["exact_low"] > row["exact"] + 30 and not row["exact_high"] < row["exact"] - 30


def test_agreement_of_groups_keeps_missing_apart():
    rows = frame([(0, 0), (0, 1), (1, np.nan), (2, 2)]).assign(domain=["a", "a", "b", "c"])
    table = agreement(rows, by="domain").set_index("domain")
    assert table["pairs"].tolist() == [2, 0, 1] and table["missing"].tolist() == [0, 1, 0]
    assert (
        table["exact"].tolist()[::2] == [50, 100]
        and np.isnan(table.loc["b", ["exact", "kappa", "wilson_low"]]).all()
    )
    assert np.isnan(
        table.loc["c", ["exact_low", "kappa"]]
    ).all()  # one question has no interval, one level no kappa
    with pytest.raises(ValueError, match="allowed: a column"):
        agreement(rows, by="colour")
    with pytest.raises(ValueError, match="no pairs"):
        agreement(rows.head(0))


def bootstrap_by_hand(pairs, questions, resamples, seed):
    """Draw questions, collect their pairs in a list, compute the share: the definition."""
    names = sorted(set(map(str, questions)))
    rng = np.random.default_rng(seed)
    shares = []
    for draw in rng.integers(len(names), size=(resamples, len(names))):
        got = [p for k in draw for p, q in zip(pairs, questions, strict=True) if str(q) == names[k]]
        shares.append(100 * sum(a == b for a, b in got) / len(got))
    return np.percentile(shares, [2.5, 97.5])


@given(st.lists(st.tuples(levels, levels, st.integers(0, 11)), min_size=2, max_size=20))
def test_bounds_resample_questions(rows):
    pairs = [(a, b) for a, b, _ in rows]
    questions = [q for *_, q in rows]
    row = agreement(frame(pairs, questions), resamples=40, seed=3).iloc[0]
    if len(set(questions)) < LEAST_GROUPS:
        assert np.isnan(row["exact_low"])
    elif row["exact"] in (0, 100):
        share = proportion_bounds(row["exact"], len(set(questions)))
        assert [row["exact_low"], row["exact_high"]] == pytest.approx(share)
    else:
        assert [row["exact_low"], row["exact_high"]] == pytest.approx(
            bootstrap_by_hand(pairs, questions, 40, 3)
        )


def test_resampled_counts_do_not_depend_on_the_slices(monkeypatch):
    counts = np.arange(27).reshape(3, 9)
    whole = resampled_counts(counts, 50, 1)
    monkeypatch.setattr("memcalib.evaluation.agreement._DRAWS_AT_ONCE", 21)
    assert np.array_equal(resampled_counts(counts, 50, 1), whole) and whole.shape == (50, 9)
    assert len({tuple(row) for row in whole}) > 5


def proportion_bounds(percent, questions):
    """Clopper-Pearson bounds for none or all of so many questions."""
    bounds = binomtest(round(questions * percent / 100), questions).proportion_ci(method="exact")
    return [100 * bounds.low, 100 * bounds.high]


@given(pairs_of_levels)
def test_level_agreement_counts(pairs):
    table = level_agreement(frame(pairs), resamples=20)
    for k, row in enumerate(table.itertuples()):
        ours = sum(a == k for a, _ in pairs)
        theirs = sum(b == k for _, b in pairs)
        both = sum(a == b == k for a, b in pairs)
        assert (row.first, row.second, row.both) == (ours, theirs, both)
        assert row.of_first == pytest.approx(100 * both / ours if ours else math.nan, nan_ok=True)
        assert row.of_second == pytest.approx(
            100 * both / theirs if theirs else math.nan, nan_ok=True
        )
        collapsed = [(int(a == k), int(b == k)) for a, b in pairs]
        assert row.kappa == pytest.approx(
            kappa_by_definition(collapsed, lambda a, b: int(a != b)), abs=1e-12, nan_ok=True
        )


def test_level_agreement_of_nothing_raises():
    with pytest.raises(ValueError, match="found 1 pair, none of which has two levels"):
        level_agreement(frame([(0, np.nan)]))


def test_estimate_from_a_complete_sample_is_the_truth_itself():
    rng = np.random.default_rng(0)
    atoms = judged_atoms(many())
    for scheme in ("natural", "stratified"):
        drawn = sample_atoms(atoms, len(atoms), scheme)
        pairs = drawn.assign(first=rng.integers(0, 3, len(drawn)), second=drawn["judged"])
        whole = agreement(pairs, resamples=10).iloc[0]
        estimate = natural_estimate(pairs)
        assert estimate["exact"] == pytest.approx(whole["exact"]) and estimate["covered"] == 100
        assert estimate["kappa"] == pytest.approx(whole["kappa"]) and estimate[
            "linear"
        ] == pytest.approx(whole["linear"])
        assert estimate["low"] < estimate["exact"] < estimate["high"]


def test_estimate_weighs_cells_by_their_size_and_tells_what_it_does_not_cover():
    rows = [(0, 0, 0, 900)] * 10 + [(2, 1, 5, 100)] * 5 + [(1, 1, 5, 100)] * 5
    pairs = pd.DataFrame(rows, columns=["first", "second", "cell", "population"])
    estimate = natural_estimate(pairs)
    assert (
        estimate["exact"] == pytest.approx(90 + 5)
        and estimate["low"] < 75
        and estimate["high"] < 100
    )
    table = np.array([[18, 0, 0], [0, 1, 0], [0, 1, 0]])
    assert estimate["kappa"] == pytest.approx(kappa(table)) and estimate["linear"] == pytest.approx(
        kappa(table, linear=True)
    )
    unseen = pd.concat([pairs, pd.DataFrame([(np.nan, 2, 8, 1000)], columns=pairs.columns)])
    assert natural_estimate(unseen)["covered"] == pytest.approx(50)
    with pytest.raises(ValueError, match="no labelled pair"):
        natural_estimate(unseen.tail(1))


# ---- two judges


@given(judgment_lists())
def test_pairing_a_file_with_itself_agrees(judgments):
    pairs = pair_judgments(
        judgments, [j.model_copy(update={"judge": "other"}) for j in judgments[::-1]]
    )
    same = pairs["first"].eq(pairs["second"]) | (pairs["first"].isna() & pairs["second"].isna())
    assert same.all() and len(pairs) == sum(len(j.atoms) for j in judgments)
    assert agreement(pairs, resamples=10)["missing"][0] == sum(
        a.actual is None for j in judgments for a in j.atoms
    )


def test_pairing_keeps_answers_that_only_one_judge_has():
    first = [make([0, 1], [0, 1], "e1"), make([2], [2], "e2")]
    second = [make([0, 1], [0, 2], "e1", judge="b")]
    pairs = pair_judgments(first, second)
    assert (
        len(pairs) == 3 and pairs["second"].isna().sum() == 1 and pairs["example_id"].notna().all()
    )
    row = agreement(pairs, resamples=10).iloc[0]
    assert (row["pairs"], row["missing"], row["exact"]) == (2, 1, 50)
    assert len(pair_judgments(second, first)) == 3


def test_pairing_refuses_other_answers_and_other_versions():
    with pytest.raises(ValueError, match="none in common"):
        pair_judgments([make([0], [0], "e1")], [make([0], [0], "e2")])
    with pytest.raises(
        ValueError,
        match=r"example 'e1' atom 'p1_a1': found ideal 0 and 1, .*one version of the data set",
    ):
        pair_judgments([make([0], [0])], [make([1], [0])])
    with pytest.raises(ValueError, match="example_hash aa and bb"):
        pair_judgments([make([0], [0], example_hash="aa")], [make([0], [0], example_hash="bb")])
    assert len(pair_judgments([make([0], [0], example_hash="aa")], [make([0], [0])])) == 1


# ---- methods


def spearman_by_definition(a, b):
    def rank(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    return np.corrcoef(rank(a), rank(b))[0, 1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=8))
def test_method_correlations(values):
    a, b = (list(map(float, column)) for column in zip(*values, strict=True))
    row = method_agreement(pd.DataFrame({"SCS": a}), pd.DataFrame({"SCS": b})).iloc[0]
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert np.isnan(row["spearman"]) and np.isnan(row["pearson"])
    else:
        assert row["spearman"] == pytest.approx(spearman_by_definition(a, b))
        assert row["pearson"] == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_method_correlations_leave_out_what_one_judge_lacks():
    first = pd.DataFrame(
        {"SCS": [1, 2, 3, 4.0], "AOR": [1, 2, np.nan, np.nan], "x": 1.0}, index=list("abcd")
    )
    second = pd.DataFrame({"SCS": [9, 3, 2, 1.0], "AOR": [1.0, 2, 3, 4]}, index=list("zcba"))
    table = method_agreement(first, second).set_index("metric")
    assert table["methods"].tolist() == [3, 2] and table.loc["SCS", "spearman"] == 1
    assert np.isnan(table.loc["AOR", "spearman"])  # two methods correlate with anything
    with pytest.raises(ValueError, match="'a' twice"):
        method_agreement(first.rename(index={"b": "a"}), second)
    with pytest.raises(ValueError, match="found 0 shared methods"):
        method_agreement(first, second.rename(index=str.upper))


def test_confusion_figure_shows_names_as_plain_text():
    figure = confusion_figure(
        {"$x$ _a\x1b[0m": np.eye(3, dtype=int), "b": np.zeros((3, 3), int)}, first="$", second="j"
    )
    title = figure.axes[0].title
    assert title.get_text() == r"$x$ _a\x1b[0m" and not title.get_parse_math()
    texts = [t.get_text() for ax in figure.axes for t in ax.texts]
    assert len(texts) == 18 and texts[0] == "1\n100.0 %" and texts[-1] == "0\nnone"


def judged_file(n: int, seed: int = 0) -> pd.DataFrame:
    """Atoms with the level a careful person reads, and a judge that reads Bound and Control less
    surely than Ignore.
    """
    rng = np.random.default_rng(seed)
    first = rng.choice(3, n, p=[0.7, 0.15, 0.15])
    wrong = rng.random(n) < np.array([0.02, 0.3, 0.2])[first]
    judged = np.where(wrong, (first + rng.integers(1, 3, n)) % 3, first)
    return pd.DataFrame(
        {
            "item": [f"i{k}" for k in range(n)],
            "ideal": rng.choice(3, n),
            "first": first,
            "judged": judged,
        }
    )


def test_repeated_audits_are_single_audits():
    file = judged_file(400)
    audits = simulated_audits(file, audits=3, n=60, seed=2)
    assert audits["truth"].unique().tolist() == pytest.approx(
        [100 * (file["first"] == file["judged"]).mean()]
    )
    for audit, rows in audits.groupby("audit"):
        rows = rows.set_index("measure")
        for scheme, name in (
            ("natural", "natural, Wilson"),
            ("stratified", "stratified, at face value"),
        ):
            drawn = sample_atoms(file, 60, scheme, 2 * 3 + audit)
            agreed = int((drawn["first"] == drawn["judged"]).sum())
            expected = [100 * agreed / 60, *wilson(agreed, 60)]
            assert rows.loc[name, ["estimate", "low", "high"]].tolist() == pytest.approx(expected)
        weighted = natural_estimate(
            sample_atoms(file, 60, "stratified", 6 + audit).assign(second=lambda r: r["judged"])
        )
        assert rows.loc["stratified, reweighted", "estimate"] == pytest.approx(weighted["exact"])


def test_coverage_counts_the_intervals_that_hold_the_truth():
    rows = [("a", 50 + k, 48 + k, 52 + k, 50.0) for k in range(5)] + [("b", 1.0, 0.0, 2.0, 9.0)] * 4
    columns = ["measure", "estimate", "low", "high", "truth"]
    table = coverage_table(pd.DataFrame(rows, columns=columns)).set_index("measure")
    assert table["covered"].tolist() == [60.0, 0.0] and table["audits"].tolist() == [5, 4]
    assert table.loc["a", ["mean", "width"]].tolist() == [52.0, 4.0]
    assert table.loc["b", ["covered_low", "covered_high"]].tolist() == pytest.approx(wilson(0, 4))


def test_the_natural_interval_holds_and_face_value_does_not():
    table = coverage_table(simulated_audits(judged_file(500, 3), audits=40, n=80)).set_index(
        "measure"
    )
    assert (
        table.loc["natural, Wilson", "covered"] > 80
        and table.loc["stratified, reweighted", "covered"] > 75
    )
    assert abs(table.loc["stratified, at face value", "mean"] - table["truth"].iloc[0]) > 3


def test_ranking_agreement_is_a_loop_over_resamples():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    first = pd.DataFrame(rng.normal([0, 0.2, 0.4, 0.6], 1, (30, 4)), columns=list("abcd"))
    second = first + rng.normal(0, 0.6, first.shape)
    ranking = ranking_agreement(first, second, resamples=40, seed=7)
    rng = np.random.default_rng(7)
    slow = []
    best = 0
    swapped = 0
    for _ in range(40):
        rows = rng.integers(30, size=30)
        one, two = (table.iloc[rows].mean() for table in (first, second))
        slow.append(spearmanr(one, two)[0])
        best += one.idxmax() == two.idxmax()
        pairs = [(x, y) for x in "abcd" for y in "abcd" if x < y]
        swapped += sum((one[x] - one[y]) * (two[x] - two[y]) < 0 for x, y in pairs)
    assert ranking["spearman"] == pytest.approx(spearmanr(first.mean(), second.mean())[0])
    assert [ranking["low"], ranking["high"]] == pytest.approx(np.percentile(slow, [2.5, 97.5]))
    assert ranking["same_best"] == pytest.approx(100 * best / 40) and ranking[
        "swapped"
    ] == pytest.approx(swapped / 40)
    with pytest.raises(ValueError, match="the same questions and methods"):
        ranking_agreement(first, second.iloc[1:])
