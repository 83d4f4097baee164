"""The audit's arithmetic against loops, and its rules for ties, gaps and draws."""

import itertools
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memcalib.products.annotation.audit import (
    ROLES,
    RIGHT_OR_OVER,
    UNDER,
    AuditedPair,
    PairWords,
    bootstrap_interval,
    channel_group,
    draw_pairs,
    hits_by_chance,
    hits_table,
    role_shares,
    sentence_credit,
    shares_table,
    simulated_role_audits,
    tokens_in_spans,
    top_hit,
    words_table,
)

weights = st.floats(0, 5)
counts = st.integers(1, 9)


@st.composite
def pairs(draw, roles=ROLES):
    size = draw(st.integers(1, 7))
    raw = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=size, max_size=size))
    assume(sum(raw) > 0)
    tokens = np.array(draw(st.lists(counts, min_size=size, max_size=size)))
    labels = draw(st.lists(st.sampled_from(roles), min_size=size, max_size=size))
    return AuditedPair(
        draw(st.sampled_from(RIGHT_OR_OVER + UNDER)), tokens, np.array(raw) / sum(raw), labels, "p"
    )


@given(st.lists(st.tuples(weights, st.integers(0, 3)), min_size=1, max_size=20))
def test_sentence_credit_is_a_sum_over_its_tokens(drawn):
    drawn = sorted(drawn, key=lambda pair: pair[1])
    names = {unit: k for k, unit in enumerate(dict.fromkeys(unit for _, unit in drawn))}
    q = [q for q, _ in drawn]
    units = [names[unit] for _, unit in drawn]
    assume(sum(q) > 1e-9)
    tokens, credit = sentence_credit(q, units)
    for j in range(len(names)):
        assert tokens[j] == sum(unit == j for unit in units)
        assert credit[j] == pytest.approx(
            sum(x for x, unit in zip(q, units, strict=True) if unit == j) / sum(q)
        )
    assert credit.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("q", "units", "message"),
    [
        ([1.0], [0, 0], "1 weights and 2 sentence numbers"),
        ([], [], "0 weights"),
        ([0.0, 0.0], [0, 1], "all weights are 0"),
        ([1.0, -1.0], [0, 1], "weights from -1.0"),
        ([1.0, float("nan")], [0, 1], "finite"),
        ([1.0, 1.0], [0, -1], "sentence numbers from -1"),
    ],
)
def test_weights_that_are_none_are_refused(q, units, message):
    with pytest.raises(ValueError, match=message):
        sentence_credit(q, units)


@given(pairs())
def test_shares_are_those_counted_by_hand(pair):
    of_tokens, of_credit = role_shares(pair)
    for k, role in enumerate(ROLES):
        numbers = [j for j, label in enumerate(pair.roles) if label == role]
        assert of_tokens[k] == pytest.approx(
            sum(pair.tokens[j] for j in numbers) / sum(pair.tokens)
        )
        assert of_credit[k] == pytest.approx(sum(pair.credit[j] for j in numbers))


@given(pairs(), st.integers(1, 4))
def test_hits_and_ties_are_those_of_all_orders(pair, top):
    given_credit = [j for j in range(len(pair.roles)) if pair.credit[j] > 0]
    outcomes = set()
    first = None
    for order in itertools.permutations(given_credit):
        if all(pair.credit[a] >= pair.credit[b] for a, b in itertools.pairwise(order)):
            hit = any(pair.roles[j] in ("key", "partial") for j in order[:top])
            outcomes.add(hit)
            first = hit if first is None else first
    assert top_hit(pair, top) == (first, len(outcomes) == 2)


def test_sentences_without_credit_are_never_among_the_highest():
    pair = AuditedPair("C+", np.ones(3), np.array([1.0, 0, 0]), ["irrelevant", "key", "key"])
    assert top_hit(pair) == (False, False)


def mean_over_channels(members, value):
    """The mean over channels of each channel's mean over its pairs."""
    values_of = {}
    for pair in members:
        values_of.setdefault(pair.channel, []).append(value(pair))
    return sum(sum(values) / len(values) for values in values_of.values()) / len(values_of)


@given(st.lists(pairs(), min_size=1, max_size=12))
def test_tables_average_over_channels_and_within_one_over_pairs(audited):
    table = shares_table(audited, resamples=50)
    hits = hits_table(audited, resamples=50).set_index("slice")
    for name in table["slice"].unique():
        members = [p for p in audited if name in ("all", p.channel, channel_group(p.channel))]
        rows = table[table["slice"] == name]
        assert (rows["pairs"] == len(members)).all()
        for k, role in enumerate(ROLES):
            row = rows[rows["role"] == role].iloc[0]
            token_share = mean_over_channels(members, lambda p, k=k: role_shares(p)[0][k])
            credit_share = mean_over_channels(members, lambda p, k=k: role_shares(p)[1][k])
            assert row["token_share"] == pytest.approx(token_share)
            assert row["credit_share"] == pytest.approx(credit_share)
            assert row["credit_share_low"] - 1e-9 <= row["credit_share_high"]
        assert rows["credit_share"].sum() == pytest.approx(1)
        assert hits.loc[name, "hits"] == sum(top_hit(p).hit for p in members)
        assert hits.loc[name, "rate"] == pytest.approx(
            mean_over_channels(members, lambda p: top_hit(p).hit)
        )


@given(st.lists(pairs(roles=(*ROLES, None)), min_size=1, max_size=10))
def test_incomplete_pairs_are_counted_and_left_out(drawn_pairs):
    whole = [p for p in drawn_pairs if None not in p.roles]
    if not whole:
        with pytest.raises(ValueError, match="found no pair with a label for each"):
            shares_table(drawn_pairs, resamples=10)
        with pytest.raises(ValueError, match="found no pair with a label for each"):
            hits_table(drawn_pairs, resamples=10)
        return
    shares = shares_table(drawn_pairs, resamples=10)
    hits = hits_table(drawn_pairs, resamples=10).set_index("slice")
    assert list(shares["slice"].unique()) == list(hits.index)
    assert {name for name in hits.index if name[-1] in "+-"} == {p.channel for p in drawn_pairs}
    alone = (
        shares_table(whole, resamples=10).set_index(["slice", "role"]).drop(columns="incomplete")
    )
    for _, row in shares.iterrows():
        slice_pairs = [
            p for p in drawn_pairs if row["slice"] in ("all", p.channel, channel_group(p.channel))
        ]
        for counts in (row, hits.loc[row["slice"]]):
            assert counts["pairs"] == sum(p.complete for p in slice_pairs)
            assert counts["incomplete"] == sum(not p.complete for p in slice_pairs)
        numbers = row.drop(["slice", "role", "incomplete"])
        if row["pairs"]:
            assert numbers.tolist() == alone.loc[(row["slice"], row["role"])].tolist()
        else:
            assert (
                numbers.drop("pairs").isna().all()
                and hits.loc[row["slice"], ["rate", "low", "high"]].isna().all()
            )
            assert not hits.loc[row["slice"], ["hits", "tied", "short", "roleless"]].any()


def test_the_bootstrap_is_that_of_a_loop_and_seeded():
    """Questions are drawn; the mean of a draw is that of its channels,
    each over the pairs that were drawn.
    """
    values = np.random.default_rng(3).random((23, 2))
    channels = np.array(["B+", "C+", "CA-"])[np.arange(23) % 3]
    questions = np.array([f"q{k:02d}" for k in np.arange(23) // 4])
    low, high = bootstrap_interval(values, channels, questions, resamples=500, seed=7)
    names = sorted(set(questions))
    draws = np.random.default_rng(7).multinomial(6, np.full(6, 1 / 6), size=500)
    means = []
    for times_drawn in draws:
        in_draw = []
        for name, times in zip(names, times_drawn, strict=True):
            in_draw += [k for k in range(23) if questions[k] == name] * times
        of_channel = []
        for channel in ("B+", "C+", "CA-"):
            numbers = [k for k in in_draw if channels[k] == channel]
            if numbers:
                of_channel.append(values[numbers].mean(axis=0))
        means.append(np.mean(of_channel, axis=0))
    assert np.allclose(low, np.quantile(means, 0.025, axis=0))
    assert np.allclose(high, np.quantile(means, 0.975, axis=0))
    again = bootstrap_interval(values, channels, questions, resamples=500, seed=7)
    assert (again[0] == low).all() and (again[1] == high).all()
    assert (bootstrap_interval(values, channels, questions, resamples=500, seed=8)[0] != low).any()


def test_pairs_of_one_question_count_as_one():
    values = (np.arange(40) % 2)[:, None].astype(float)
    alone = bootstrap_interval(values, resamples=2000)
    repeated = np.repeat(values, 5, axis=0)
    questions = np.repeat(np.arange(40), 5).astype(str)
    together = bootstrap_interval(repeated, questions=questions, resamples=2000)
    assert together[1] - together[0] == pytest.approx(alone[1] - alone[0], rel=0.1)
    as_pairs = bootstrap_interval(repeated, resamples=2000)
    assert as_pairs[1] - as_pairs[0] < 0.6 * (together[1] - together[0])


def test_one_pair_has_an_interval_of_one_point():
    low, high = bootstrap_interval(np.array([[0.25]]), resamples=20)
    assert low == high == 0.25
    with pytest.raises(ValueError, match="no pairs"):
        bootstrap_interval(np.zeros((0, 3)))


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(RIGHT_OR_OVER + UNDER), st.booleans()),
        min_size=1,
        max_size=60,
    ),
    st.integers(0, 5),
)
def test_draws_are_localized_stratified_and_blind_to_the_order_of_rows(rows, seed):
    columns = {
        "step": [s for s, _, _ in rows],
        "row": range(len(rows)),
        "channel": [c for _, c, _ in rows],
    }
    frame = pd.DataFrame(
        columns | {"localized": pd.Series([flag for *_, flag in rows], dtype=object)}
    )
    answers = pd.DataFrame({"step": [1], "row": [999], "channel": [None], "localized": [None]})
    frame = pd.concat([answers, frame], ignore_index=True)
    open_pairs = frame[frame["localized"] == True]  # noqa: E712
    if open_pairs.empty:
        with pytest.raises(ValueError, match="none of which was localized"):
            draw_pairs(frame, 2, seed)
        return
    drawn = draw_pairs(frame, 2, seed)
    sizes = open_pairs["channel"].value_counts().clip(upper=2).to_dict()
    assert drawn["channel"].value_counts().to_dict() == sizes and drawn["localized"].all()
    shuffled = frame.sample(frac=1, random_state=seed)
    assert draw_pairs(shuffled, 2, seed)["row"].tolist() == drawn["row"].tolist()
    assert drawn["row"].is_unique


def test_draws_depend_on_the_seed():
    frame = pd.DataFrame({"step": 1, "row": range(200), "channel": "C+", "localized": True})
    first = draw_pairs(frame, 20, 0)
    second = draw_pairs(frame, 20, 1)
    assert len(first) == 20 and first["row"].tolist() != second["row"].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channel": "A+"}, "channel: found 'A\\+'; allowed: AB-"),
        ({"channel": "D+"}, "channel: found 'D\\+'"),
        ({"roles": ["key"]}, "1 labels for 2 sentences"),
        ({"roles": ["key", "great"]}, "role 'great'; allowed: key, partial, irrelevant"),
    ],
)
def test_pairs_that_are_none_are_refused(options, message):
    fields = {
        "channel": "C+",
        "tokens": np.ones(2),
        "credit": np.full(2, 0.5),
        "roles": ["key", "key"],
    } | options
    with pytest.raises(ValueError, match=message):
        AuditedPair(**fields)


def population(seed: int = 0) -> list[AuditedPair]:
    """Pairs of three channels, one of them rare and unlike the others."""
    rng = np.random.default_rng(seed)
    audited = []
    for channel, size, favour in (("B+", 60, 6), ("C+", 40, 3), ("CA-", 12, 1)):
        for _ in range(size):
            credit = rng.dirichlet([favour, 1, 1, 1])
            roles = ["key", *rng.choice(["partial", "irrelevant"], 3)]
            audited.append(AuditedPair(channel, rng.integers(2, 9, 4), credit, roles))
    return audited


def test_repeated_audits_aim_at_the_mean_over_channels():
    audited = population()
    audits = simulated_role_audits(audited, per_channel=10, audits=5, resamples=50)
    for k, role in enumerate(ROLES):
        for j, share_name in enumerate(("token", "credit")):
            channels = [
                [100 * role_shares(p)[j][k] for p in audited if p.channel == c]
                for c in ("B+", "C+", "CA-")
            ]
            truth = np.mean([np.mean(values) for values in channels])
            assert audits.loc[
                audits["measure"] == f"{share_name} share, {role}", "truth"
            ].tolist() == pytest.approx([truth] * 5)
    hits = audits[audits["measure"] == "top-3 hits, under-use"]["truth"].iloc[0]
    assert hits == pytest.approx(
        100 * np.mean([top_hit(p)[0] for p in audited if p.channel == "CA-"])
    )
    assert (audits["low"] <= audits["estimate"]).all() and (
        audits["estimate"] <= audits["high"]
    ).all()


def test_an_audit_of_everything_finds_the_mean_of_what_it_read():
    audited = [p for p in population() if p.channel == "B+"]
    audits = simulated_role_audits(audited, per_channel=100, audits=2, resamples=20)
    assert audits["estimate"].to_numpy() == pytest.approx(audits["truth"].to_numpy())
    assert "top-3 hits, under-use" not in set(audits["measure"]), "no pair of that group"
    with pytest.raises(ValueError, match="found no pair with a label"):
        simulated_role_audits([AuditedPair("B+", np.ones(1), np.ones(1), [None])])


def slow_marks(ends, spans):
    """One token and one character after the other."""
    marks = []
    start = 0
    for end in ends:
        characters = set(range(start, end))
        marks.append(any(characters & set(range(*span)) for span in spans))
        start = end
    return marks


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=4),
)
def test_marks_of_tokens_are_those_of_their_characters(widths, spans):
    ends = np.cumsum(widths).tolist()
    spans = [(start, start + length) for start, length in spans]
    expected = slow_marks(ends, spans)
    marks = tokens_in_spans(ends, spans)
    for width, mark, wanted in zip(widths, marks.tolist(), expected, strict=True):
        if width:  # a token without text has no character to share
            assert mark == wanted


def test_words_table_is_the_mean_of_channel_means():
    rng = np.random.default_rng(0)
    pairs = []
    for number in range(30):
        length = int(rng.integers(3, 9))
        carries = rng.random(length) < 0.4
        carries[0] = number % 5 > 0  # in some answers perhaps no word at all
        credit = rng.random(length)
        channel = ("B+", "C+", "CA-")[number % 3 if number < 24 else 0]
        pairs.append(
            PairWords(channel, rng.normal(size=length), credit, carries, f"q{number // 3}")
        )
    table = words_table(pairs, resamples=200).set_index("slice")
    for name, channels in (("all", ("B+", "C+", "CA-")), ("support", ("B+", "C+"))):
        means = []
        for channel in channels:
            shares = []
            for pair in pairs:
                if pair.channel == channel and pair.carries.any():
                    on_words = 0.0
                    for q, mark in zip(pair.credit, pair.carries, strict=True):
                        on_words += q if mark else 0.0
                    shares.append(on_words / sum(pair.credit))
            means.append(np.mean(shares))
        assert np.isclose(table.loc[name, "credit_share"], np.mean(means))
    assert table.loc["all", "pairs"] == 30
    assert table.loc["all", "silent"] == sum(not pair.carries.any() for pair in pairs)
    differences = np.concatenate([pair.difference for pair in pairs])
    assert np.isclose(table.loc["all", "d_p95"], np.percentile(differences, 95))
    assert (table["credit_share_low"] <= table["credit_share_high"]).all()


def test_tied_tokens_share_the_first_place():
    tied = PairWords("C+", np.zeros(4), np.ones(4), np.array([True, False, False, False]))
    assert tied.top_share == 0.25 == tied.token_share


@pytest.mark.parametrize(
    ("channel", "lengths", "credit", "expected"),
    [
        ("A+", (2, 2, 2), 1.0, "A+"),
        ("C+", (2, 3, 2), 1.0, "2 differences, 3 weights and 2 marks"),
        ("C+", (2, 2, 2), 0.0, "not localized"),
    ],
)
def test_pairs_that_cannot_be_read_by_words(channel, lengths, credit, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        PairWords(
            channel,
            np.zeros(lengths[0]),
            np.full(lengths[1], credit),
            np.ones(lengths[2], bool),
        )


def test_a_table_of_words_needs_a_pair():
    with pytest.raises(ValueError, match="no localized pairs"):
        words_table([])


@given(pairs())
def test_chance_of_a_hit_is_that_of_all_orders(pair):
    if len(pair.roles) > 6:
        return
    hits = [set(order[:3]) != {"irrelevant"} for order in itertools.permutations(pair.roles)]
    chance = hits_by_chance([pair]).set_index("slice")
    assert np.isclose(chance.loc[pair.channel, "chance"], np.mean(hits))
    assert chance.loc["all", "sentences"] == len(pair.roles)


def test_a_channel_that_waits_for_labels_has_no_chance_yet():
    complete = AuditedPair("C+", np.ones(2), np.array([0.5, 0.5]), ["key", "irrelevant"])
    waiting = AuditedPair("B+", np.ones(2), np.array([0.5, 0.5]), ["key", None])
    chance = hits_by_chance([complete, waiting]).set_index("slice")
    assert np.isnan(chance.loc["B+", "chance"]) and chance.loc["all", "chance"] == 1
