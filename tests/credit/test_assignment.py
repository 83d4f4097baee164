"""The whole step of credit, from rewards to token advantages: the invariants a training run
relies on, two processes against one, and bad input.
"""

import math
import random

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.credit.advantages import group_advantages, sequence_advantages
from memcalib.credit.assignment import credit_from_rewards
from memcalib.localization import Thresholds
from memcalib.problem import CHANNELS
from memcalib.rules.base import CreditConfig, Pairs

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)
NAN = float("nan")
LOCALIZABLE = [h for h in range(9) if h]


def a_batch(seed, prompts=3, group_size=4, width=12, unscored=0.2):
    """Everything `credit_from_rewards` takes, made up but consistent:
    rewards, ragged answers, log-probabilities, pairs.
    """
    g = torch.Generator().manual_seed(seed)
    rows = prompts * group_size
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    valid = torch.rand(rows, generator=g) >= unscored
    sign = torch.tensor([1, -1, -2, -1, 1, -1, -2, -1, 1]).double()
    rewards = sign * torch.randint(0, 3, (rows, 9), generator=g) / 2
    rewards = torch.where(valid[:, None], rewards, NAN)
    full = -torch.rand(rows, width, generator=g)
    row, channel = (
        torch.nonzero((rewards != 0) & valid[:, None]).T.tolist() if valid.any() else ([], [])
    )
    keep = [i for i, h in enumerate(channel) if h in LOCALIZABLE]
    row = [row[i] for i in keep]
    channel = [channel[i] for i in keep]
    pairs = Pairs(row, channel, [("a",)] * len(row), [[0]] * len(row))
    noise = torch.randn(len(row), width, generator=g) * (
        torch.rand(len(row), width, generator=g) > 0.5
    )
    ablated = full[row] - noise * 2
    group = torch.arange(prompts).repeat_interleave(group_size)
    return {
        "rewards": rewards,
        "group": group,
        "valid": valid,
        "mask": mask,
        "full": full,
        "pairs": pairs,
        "scores": ablated,
    }


def run(batch, **settings):
    return credit_from_rewards(**batch, thresholds=Thresholds(), config=CreditConfig(**settings))


def sentences(batch, **settings):
    config = CreditConfig(granularity="sentence", **settings)
    return credit_from_rewards(**batch, thresholds=Thresholds(config), config=config)


def random_units(batch, seed):
    """Sentences of one to five tokens for each row, -1 at padding."""
    draw = random.Random(seed)
    units = torch.full(batch["mask"].shape, -1)
    for row, live in enumerate(batch["mask"].tolist()):
        number = -1
        tokens_left = 0
        for t, is_live in enumerate(live):
            if is_live:
                if not tokens_left:
                    number = number + 1
                    tokens_left = draw.randint(1, 5)
                units[row, t] = number
                tokens_left -= 1
    return units


seeds = st.integers(0, 10_000)
choices = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["ordered", "absolute", "positive_only"]),
        "under_use": st.sampled_from(["suppressed", "uniform", "absolute"]),
        "eta": st.floats(0, 1),
        "cap": st.floats(1, 16),
        "ddof": st.sampled_from([0, 1]),
        "center": st.booleans(),
        "scale_unit": st.sampled_from(["response", "token"]),
    }
)


def cancelling(**options):
    """Two answers of a group in which what A+ praises C+ blames,
    each channel carried by one word of four.
    """
    rewards = torch.zeros(2, 9, dtype=torch.float64)
    rewards[0, 0] = 1.0
    rewards[1, 8] = 1.0
    pairs = Pairs([0, 1], [8, 8], [("a",)] * 2, [[0]] * 2)
    full = torch.zeros(2, 4)
    ablated = -torch.eye(4)[:2]
    rows = rewards, torch.zeros(2).long(), torch.ones(2).bool(), torch.ones(2, 4).bool()
    config = CreditConfig(**options)
    return credit_from_rewards(
        *rows, config=config, full=full, pairs=pairs, scores=ablated, thresholds=Thresholds(config)
    )


def test_the_largest_advantage_is_reported_and_may_be_bounded():
    free = cancelling()
    bounded = cancelling(max_advantage=30)
    wide = cancelling(max_advantage=3000)
    assert free.stats["rms"] == pytest.approx(1e-3) and free.stats[
        "largest_advantage"
    ] == pytest.approx(2250, rel=1e-5)
    assert (
        free.advantages.abs().max() == pytest.approx(2250, rel=1e-5) and "bounded" not in free.stats
    )
    assert (
        torch.equal(bounded.advantages, free.advantages.clamp(-30, 30))
        and bounded.stats["bounded"] == 4
    )
    assert bounded.stats["largest_advantage"] == free.stats["largest_advantage"], (
        "of before the bound"
    )
    assert (
        bounded.stats["conservation_error"] == pytest.approx(15)
        and free.stats["conservation_error"] < 1e-3
    )
    assert torch.equal(wide.advantages, free.advantages) and wide.stats["bounded"] == 0
    with pytest.raises(ValueError, match="max_advantage"):
        CreditConfig(max_advantage=0)


@SETTINGS
@given(seeds, choices, st.floats(0.01, 5))
def test_a_bound_changes_nothing_but_what_is_beyond_it(seed, options, bound):
    batch = a_batch(seed)
    free = run(batch, **options)
    cut = run(batch, **options, max_advantage=bound)
    assert torch.equal(cut.advantages, free.advantages.clamp(-bound, bound))
    assert torch.equal(cut.sequence, free.sequence) and cut.stats["rms"] == free.stats["rms"]
    assert cut.stats["bounded"] <= (free.advantages.abs() >= bound * (1 - 1e-6)).sum()


@SETTINGS
@given(seeds, choices)
def test_every_mean_is_preserved_whatever_the_options(seed, options):
    batch = a_batch(seed)
    out = run(batch, **options)
    live = batch["mask"] & batch["valid"][:, None]
    mean = torch.where(live, out.advantages, 0).sum(1) / live.sum(1).clamp(min=1)
    assert (mean - out.sequence).abs().max() < 2e-6
    assert not out.advantages[~live].any() and out.advantages.isfinite().all()
    assert out.stats["conservation_error"] < 2e-6 and out.stats["channel_conservation_error"] < 1e-6
    detail = out.pairs
    inside = batch["mask"][detail.row]
    assert (detail.m.sum(1) / inside.sum(1) - 1).abs().max() < 1e-6 if len(detail.row) else True
    assert not len(detail.row) or (detail.m.min() >= 0 and detail.m.max() <= options["cap"])


@SETTINGS
@given(seeds)
def test_redistribution_matches_the_formula_channel_by_channel(seed):
    batch = a_batch(seed)
    out = run(batch)
    advantages = group_advantages(batch["rewards"], batch["group"], batch["valid"])
    expected = torch.zeros(batch["mask"].shape, dtype=torch.float64)
    factor = {
        (r, h): k
        for k, (r, h) in enumerate(zip(batch["pairs"].rows, batch["pairs"].channels, strict=True))
    }
    for r in range(len(expected)):
        for h in range(9):
            a = advantages[r, h]
            k = factor.get((r, h))
            q = out.pairs.q[k] if k is not None else torch.zeros(1)
            chi = k is not None and batch["rewards"][r, h] * a > 0 and q.sum() > 0
            eta = 0.75 * chi
            m = out.pairs.m[k] if k is not None else 1.0
            expected[r] += a * ((1 - eta) + eta * m)
    sigma = reference.rms(advantages.sum(1).tolist(), batch["valid"].tolist())
    live = batch["mask"] & batch["valid"][:, None]
    assert torch.allclose(
        out.advantages.double(), torch.where(live, expected / sigma, 0), atol=1e-5
    )


@SETTINGS
@given(seeds, st.sampled_from(["ordered", "absolute", "positive_only"]))
def test_without_eta_it_is_gdpo_to_the_bit(seed, mode):
    batch = a_batch(seed)
    gdpo = credit_from_rewards(
        *(batch[k] for k in ("rewards", "group", "valid", "mask")),
        config=CreditConfig(method="gdpo"),
    )
    assert torch.equal(run(batch, eta=0, mode=mode).advantages, gdpo.advantages)
    assert torch.equal(
        run(batch, eta=dict.fromkeys(CHANNELS, 0), mode=mode).advantages, gdpo.advantages
    )
    expected = sequence_advantages(batch["rewards"], batch["group"], batch["valid"])
    assert torch.allclose(gdpo.sequence.double(), expected, atol=1e-6)


@SETTINGS
@given(seeds)
def test_grpo_is_the_group_normalized_sum(seed):
    batch = a_batch(seed)
    out = credit_from_rewards(
        *(batch[k] for k in ("rewards", "group", "valid", "mask")),
        config=CreditConfig(method="grpo"),
    )
    expected = sequence_advantages(batch["rewards"], batch["group"], batch["valid"], "grpo").float()
    live = batch["mask"] & batch["valid"][:, None]
    assert torch.equal(out.advantages, torch.where(live, expected[:, None], 0))


def reorder(batch, order):
    new_row = {old: new for new, old in enumerate(order)}
    p = batch["pairs"]
    by = sorted(range(len(p)), key=lambda i: new_row[p.rows[i]])
    pairs = Pairs(
        [new_row[p.rows[i]] for i in by],
        [p.channels[i] for i in by],
        [p.atoms[i] for i in by],
        [p.prompts[i] for i in by],
    )
    tensors = {k: batch[k][order] for k in ("rewards", "group", "valid", "mask", "full")}
    return tensors | {"pairs": pairs, "scores": batch["scores"][by]}


@SETTINGS
@given(seeds, st.randoms(use_true_random=False))
def test_batch_order_and_padding_do_not_matter(seed, random):
    batch = a_batch(seed)
    out = run(batch)
    order = list(range(len(batch["group"])))
    random.shuffle(order)
    assert torch.allclose(run(reorder(batch, order)).advantages, out.advantages[order], atol=1e-6)
    wide = dict(batch)
    wide["mask"] = torch.nn.functional.pad(batch["mask"], (0, 3))
    wide["full"] = torch.nn.functional.pad(batch["full"], (0, 3), value=NAN)
    wide["scores"] = torch.nn.functional.pad(batch["scores"], (0, 3), value=-9.0)
    assert torch.equal(run(wide).advantages[:, :-3], out.advantages)


@SETTINGS
@given(seeds)
def test_an_unscored_answer_leaves_statistics_rms_and_pools(seed):
    batch = a_batch(seed, unscored=0.4)
    keep = batch["valid"].nonzero()[:, 0].tolist()
    if not keep:
        return
    whole = Thresholds(CreditConfig(threshold_minimum=1))
    some = Thresholds(CreditConfig(threshold_minimum=1))
    out = credit_from_rewards(**batch, thresholds=whole)
    of_scored = credit_from_rewards(
        **reorder(batch, keep) if len(keep) == len(batch["group"]) else _only(batch, keep),
        thresholds=some,
    )
    assert torch.allclose(out.advantages[keep], of_scored.advantages, atol=1e-6)
    assert torch.allclose(whole.value, some.value)
    assert out.stats["rms"] == pytest.approx(of_scored.stats["rms"])
    assert out.stats["unscored"] == len(batch["group"]) - len(keep)


def _only(batch, keep):
    new_row = {old: new for new, old in enumerate(keep)}
    p = batch["pairs"]
    pairs = Pairs([new_row[r] for r in p.rows], p.channels, p.atoms, p.prompts)
    return {k: batch[k][keep] for k in ("rewards", "group", "valid", "mask", "full")} | {
        "pairs": pairs,
        "scores": batch["scores"],
    }


@pytest.mark.parametrize("unit", ["response", "token"])
def test_two_processes_give_what_one_gives(unit):
    batch = a_batch(5, prompts=4)
    config = CreditConfig(scale_unit=unit)
    one = Thresholds(CreditConfig(threshold_minimum=1))
    whole = credit_from_rewards(**batch, thresholds=one, config=config)
    halves = []
    for rows in (slice(0, 8), slice(8, 16)):
        inside = [i for i, r in enumerate(batch["pairs"].rows) if rows.start <= r < rows.stop]
        p = batch["pairs"]
        pairs = Pairs(
            [p.rows[i] - rows.start for i in inside],
            [p.channels[i] for i in inside],
            [()] * len(inside),
            [[0]] * len(inside),
        )
        inputs = {
            "mask": batch["mask"][rows],
            "full": batch["full"][rows],
            "pairs": pairs,
            "scores": batch["scores"][inside],
        }
        halves.append((rows, inputs))

    def everywhere(local):
        """Stands in for a collective: what every process would hold after concatenation."""
        if (
            local.shape == (8,)
            and local.dtype == torch.int64
            and unit == "token"
            and "lengths" not in gathered
        ):
            gathered.add("lengths")
            return batch["mask"].sum(1)
        return local

    for rows, inputs in halves:
        gathered = set()
        out = credit_from_rewards(
            batch["rewards"],
            batch["group"],
            batch["valid"],
            **inputs,
            config=config,
            thresholds=Thresholds(),
            local=rows,
            gather=everywhere,
        )
        assert torch.allclose(out.advantages, whole.advantages[rows], atol=1e-6)


def test_a_group_with_one_scored_answer_and_an_all_unscored_batch_are_zero():
    batch = a_batch(1, prompts=1, unscored=0)
    batch["valid"] = torch.tensor([True, False, False, False])
    batch["pairs"] = Pairs([0], [4], [("a",)], [[0]])
    batch["scores"] = batch["scores"][:1]
    batch["rewards"][0, 4] = 1.0
    assert not run(batch).advantages.any()
    batch["valid"] = torch.zeros(4, dtype=torch.bool)
    batch["pairs"] = Pairs()
    batch["scores"] = torch.zeros(0, batch["mask"].shape[1])
    out = run(batch)
    assert not out.advantages.any() and out.stats["unscored"] == 4


def test_a_constant_channel_adds_nothing():
    batch = a_batch(3, unscored=0)
    batch["rewards"][:, 4] = 0
    keep = [i for i, h in enumerate(batch["pairs"].channels) if h != 4]
    p = batch["pairs"]
    batch["pairs"] = Pairs(
        [p.rows[i] for i in keep],
        [p.channels[i] for i in keep],
        [p.atoms[i] for i in keep],
        [p.prompts[i] for i in keep],
    )
    batch["scores"] = batch["scores"][keep]
    before = run(batch).advantages
    batch["rewards"][:, 4] = 0.5
    assert torch.equal(run(batch).advantages, before)


def test_one_token_answers_stay_as_they_are():
    batch = a_batch(2, width=1, unscored=0)
    out = run(batch)
    assert torch.allclose(out.advantages[:, 0], out.sequence, atol=1e-7)


def test_a_pair_whose_scoring_failed_stays_uniform_and_is_counted():
    batch = a_batch(7, unscored=0)
    first = batch["pairs"].rows[0]
    others = [i for i, r in enumerate(batch["pairs"].rows) if r == first]
    batch["scores"] = batch["scores"].clone()
    batch["scores"][others, 0] = NAN
    thresholds = Thresholds(CreditConfig(threshold_minimum=1))
    out = credit_from_rewards(**batch, thresholds=thresholds)
    live = batch["mask"][first]
    assert (out.advantages[first][live] - out.sequence[first]).abs().max() < 1e-7
    assert out.stats["fallback_scoring"] == len(others) and thresholds.value.isfinite().all()
    reasons = sum(out.stats[f"fallback_{r}"] for r in ("scoring", "weak", "empty", "closed"))
    assert reasons + out.stats["localized"] == out.stats["pairs"]


def test_open_pool_gives_the_same_advantages_as_long_as_thresholds_agree():
    batch = a_batch(11, unscored=0)
    whole = run(batch)
    keep = (whole.pairs.strength > 0).nonzero()[:, 0].tolist()
    p = batch["pairs"]
    some = Pairs(
        [p.rows[i] for i in keep],
        [p.channels[i] for i in keep],
        [p.atoms[i] for i in keep],
        [p.prompts[i] for i in keep],
    )
    out = run(batch | {"pairs": some, "scores": batch["scores"][keep]})
    assert 0 < len(keep) < len(p) and torch.allclose(out.advantages, whole.advantages, atol=1e-7)


def test_bad_batches_are_named():
    batch = a_batch(4, unscored=0)
    broken = batch["mask"].clone()
    broken[2] = False
    with pytest.raises(ValueError, match="row 2: found an empty answer"):
        run(batch | {"mask": broken})
    full = batch["full"].clone()
    full[1, 0] = NAN
    with pytest.raises(ValueError, match="row 1, token 0: a log-probability"):
        run(batch | {"full": full})
    rewards = batch["rewards"].clone()
    rewards[3, 2] = NAN
    with pytest.raises(ValueError, match="row 3, column 2"):
        run(batch | {"rewards": rewards})
    with pytest.raises(ValueError, match="needs full, pairs, scores"):
        run(batch | {"full": None})
    with pytest.raises(ValueError, match="scores"):
        run(batch | {"scores": batch["scores"][1:]})
    valid = batch["valid"].clone()
    valid[batch["pairs"].rows[0]] = False
    with pytest.raises(ValueError, match="pair from an unscored answer"):
        run(batch | {"valid": valid})
    nothing = (
        torch.zeros(0, 9),
        torch.zeros(0).long(),
        torch.zeros(0).bool(),
        torch.zeros(0, 3).bool(),
    )
    with pytest.raises(ValueError, match="the batch is empty"):
        credit_from_rewards(*nothing, config=CreditConfig(method="gdpo"))
    with pytest.raises(ValueError, match="granularity 'sentence' needs units"):
        run(batch, granularity="sentence")
    short = torch.zeros(len(batch["mask"]), 1, dtype=torch.long)
    with pytest.raises(ValueError, match="with a sentence number for each token"):
        sentences(batch | {"units": short})
    with pytest.raises(ValueError, match="with a sentence number for each token"):
        sentences(batch | {"units": torch.full(batch["mask"].shape, -1)})
    with pytest.raises(ValueError, match=r"granularity\n.*'word'"):
        CreditConfig(granularity="word")


@SETTINGS
@given(seeds, choices, st.floats(0, 2))
def test_sentences_preserve_every_mean_and_match_the_slow_reference(seed, options, gamma):
    batch = a_batch(seed)
    units = random_units(batch, seed)
    options |= {"gamma": gamma}
    out = sentences(batch | {"units": units}, **options)
    live = batch["mask"] & batch["valid"][:, None]
    mean = torch.where(live, out.advantages, 0).sum(1) / live.sum(1).clamp(min=1)
    assert (mean - out.sequence).abs().max() < 2e-6
    config = CreditConfig(granularity="sentence", **options)
    detail = out.pairs
    rule = dict(
        gate=config.gate, sentence_gate=config.sentence_gate, d_max=config.d_max, gamma=gamma
    )
    for k, (row, h) in enumerate(zip(detail.row.tolist(), detail.channel.tolist(), strict=True)):
        inside = batch["mask"][row]
        d = detail.d[k, inside].tolist()
        z = reference.signal(h, d, config.mode, config.under_use) or [0.0] * len(d)
        expected = reference.sentence_weights(z, units[row, inside].tolist(), 0.02, 0.02, **rule)
        assert (
            detail.q[k, inside] - torch.tensor(expected, dtype=torch.float64)
        ).abs().max() < 1e-9
        assert not detail.q[k, ~inside].any()


def test_sentence_thresholds_move_and_are_kept():
    batch = a_batch(3)
    config = CreditConfig(granularity="sentence", sentence_minimum=1)
    thresholds = Thresholds(config)
    credit_from_rewards(**batch, units=random_units(batch, 3), thresholds=thresholds, config=config)
    assert (thresholds.sentence.value != 0.01).any()
    again = Thresholds(config)
    again.load_state_dict(thresholds.state_dict())
    assert torch.equal(again.sentence.value, thresholds.sentence.value) and torch.equal(
        again.value, thresholds.value
    )
    with pytest.raises(ValueError, match="another granularity"):
        Thresholds().load_state_dict(thresholds.state_dict())


@SETTINGS
@given(seeds)
def test_group_outcomes_are_four_and_add_up_over_the_groups_with_such_atoms(seed):
    batch = a_batch(seed)
    out = run(batch)
    for h, name in enumerate(CHANNELS):
        top, bottom = (1, 0) if name.endswith("+") else (0, -abs(h % 3 - h // 3))
        expected = {"all_best": 0, "all_worst": 0, "all_middle": 0, "mixed": 0}
        for g in batch["group"][batch["valid"]].unique().tolist():
            rewards = batch["rewards"][(batch["group"] == g) & batch["valid"]]
            values = rewards[:, h].tolist()
            if not rewards[:, 3 * (h // 3) : 3 * (h // 3) + 3].any():
                continue
            if max(values) != min(values):
                expected["mixed"] += 1
            else:
                expected[{top: "all_best", bottom: "all_worst"}.get(values[0], "all_middle")] += 1
        total = sum(expected.values())
        assert out.stats[f"groups/{name}"] == total
        for kind, count in expected.items():
            share = out.stats[f"{kind}/{name}"]
            assert share == pytest.approx(count / total) if total else math.isnan(share)


def test_a_prompt_without_bound_atoms_is_no_group_of_bound_channels():
    rewards = torch.zeros(8, 9, dtype=torch.float64)
    rewards[:, 0] = 1
    rewards[4:, 4] = 1  # all right; only the second prompt has a Bound atom
    group = torch.arange(8) // 4
    valid = torch.ones(8, dtype=torch.bool)
    mask = torch.ones(8, 3, dtype=torch.bool)
    stats = credit_from_rewards(
        rewards, group, valid, mask, config=CreditConfig(method="gdpo")
    ).stats
    assert stats["all_best/B+"] == 1 and stats["all_worst/B+"] == 0 and stats["groups/B+"] == 1
    assert stats["groups/C+"] == 0 and math.isnan(stats["all_best/C+"])


def test_merged_over_use_has_eight_channels_and_a_lower_bottom():
    rewards = torch.zeros(4, 9, dtype=torch.float64)
    rewards[:, 1] = -2
    group = torch.zeros(4, dtype=torch.long)
    valid = torch.ones(4, dtype=torch.bool)
    mask = torch.ones(4, 2, dtype=torch.bool)
    config = CreditConfig(method="gdpo", merge_over_use=True)
    stats = credit_from_rewards(rewards, group, valid, mask, config=config).stats
    assert stats["all_worst/AB-"] == 1 and not any(name.endswith("AC-") for name in stats)


def test_thresholds_follow_the_settings():
    tokens = Thresholds()
    both = Thresholds(CreditConfig(granularity="sentence", gate=0.5, threshold_floor=0.05))
    assert tokens.sentence is None
    for thresholds, start, rule in (
        (tokens, 0.02, (0.02, 0.75, 0.9, 256)),
        (both, 0.02, (0.05, 0.75, 0.9, 256)),
        (both.sentence, 0.02, (0.02, 0.75, 0.9, 256)),
    ):
        assert thresholds.value.tolist() == [start] * 9
        assert (thresholds.floor, thresholds.quantile, thresholds.decay, thresholds.minimum) == rule
    for name, value in (
        ("threshold_quantile", 1.5),
        ("threshold_decay", -0.1),
        ("threshold_minimum", 0),
        ("segment_max", 3),
        ("threshold_start", math.nan),
    ):
        with pytest.raises(ValueError, match=name):
            CreditConfig(**{name: value})


def test_sentence_thresholds_are_reported_where_there_are_any():
    batch = a_batch(1)
    assert not any(name.startswith("sentence_threshold/") for name in run(batch).stats)
    out = sentences(batch | {"units": random_units(batch, 1)})
    assert all(out.stats[f"sentence_threshold/{name}"] >= 0.01 for name in CHANNELS)
    assert out.stats["multiplier_p5"] <= out.stats["multiplier_p95"] <= out.stats["multiplier_max"]


@pytest.mark.parametrize("why", ["no pairs", "no eta"])
def test_what_nothing_was_localized_for_is_missing(why):
    batch = a_batch(1)
    if why == "no pairs":
        batch["pairs"] = Pairs()
        batch["scores"] = torch.zeros(0, batch["mask"].shape[1])
    stats = run(batch, **({"eta": 0.0} if why == "no eta" else {})).stats
    missing = {
        name
        for name, value in stats.items()
        if name == "cap_share" or name.startswith("multiplier_")
    }
    assert (
        stats["localized"] == 0
        and len(missing) == 7
        and all(math.isnan(stats[name]) for name in missing)
    )
    moved = run(a_batch(1)).stats
    assert moved["localized"] > 0 and all(math.isfinite(moved[name]) for name in missing)


@SETTINGS
@given(seeds)
def test_channel_numbers_are_counted_over_scored_answers_and_their_groups(seed):
    batch = a_batch(seed, unscored=0.4)
    out = run(batch)
    valid = batch["valid"].tolist()
    rewards = batch["rewards"].tolist()
    group = batch["group"].tolist()
    advantages = group_advantages(batch["rewards"], batch["group"], batch["valid"]).tolist()
    scored = [i for i, is_valid in enumerate(valid) if is_valid]
    groups = sorted({group[i] for i in scored})
    for h, name in enumerate(CHANNELS):
        channel_rewards = [rewards[i][h] for i in scored]
        moved = [any(advantages[i][h] for i in scored if group[i] == g) for g in groups]
        expected = {
            "trigger": [r != 0 for r in channel_rewards],
            "reward": channel_rewards,
            "nondegenerate": moved,
        }
        for kind, values in expected.items():
            mean = sum(values) / len(values) if values else NAN
            assert out.stats[f"{kind}/{name}"] == pytest.approx(mean, nan_ok=True), (kind, name)


@SETTINGS
@given(seeds)
def test_multiplier_numbers_are_of_the_localized_pairs_alone(seed):
    batch = a_batch(seed)
    out = run(batch)
    pairs = out.pairs
    stats = out.stats
    on = [k for k, strength in enumerate(pairs.strength.tolist()) if strength > 0]
    multipliers = [pairs.m[k][batch["mask"][pairs.row[k]]] for k in on]
    capped = sum(bool((m >= 4 - 1e-6).any()) for m in multipliers)
    assert stats["cap_share"] == pytest.approx(capped / len(on) if on else NAN, nan_ok=True)
    if on:
        assert stats["multiplier_max"] == pytest.approx(torch.cat(multipliers).max().item())
        assert stats["multiplier_p50"] == pytest.approx(
            torch.cat(multipliers).quantile(0.5).item(), abs=1e-5
        )
    for h, name in enumerate(CHANNELS):
        assert stats[f"candidates/{name}"] == batch["pairs"].channels.count(h)
        assert stats[f"localized/{name}"] == sum(batch["pairs"].channels[k] == h for k in on)


@SETTINGS
@given(seeds)
def test_each_channel_has_its_own_eta(seed):
    batch = a_batch(seed)
    eta = {name: (h + 1) / 10 for h, name in enumerate(CHANNELS)}
    with_own = run(batch, eta=eta).pairs
    same = run(batch, eta=1.0).pairs
    expected = same.strength * torch.tensor(
        [(h + 1) / 10 for h in batch["pairs"].channels], dtype=torch.float64
    )
    torch.testing.assert_close(with_own.strength.double(), expected)


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_pairs_whose_scoring_failed_are_in_no_pool(granularity):
    """The thresholds move as if there were no such pairs."""
    batch = a_batch(7, unscored=0)
    pairs = batch["pairs"]
    lost = set(range(0, len(batch["pairs"]), 2))
    some = [k for k in range(len(pairs)) if k not in lost]
    only = Pairs(
        *(
            [column[k] for k in some]
            for column in (pairs.rows, pairs.channels, pairs.atoms, pairs.prompts)
        )
    )
    failed = batch["scores"].clone()
    failed[sorted(lost)] = NAN
    states = []
    for change in ({"scores": failed}, {"pairs": only, "scores": batch["scores"][some]}):
        config = CreditConfig(granularity=granularity, threshold_minimum=1, sentence_minimum=1)
        thresholds = Thresholds(config)
        credit_from_rewards(
            **batch | change, units=random_units(batch, 7), thresholds=thresholds, config=config
        )
        states.append(thresholds.state_dict())
    assert states[0] == states[1] != Thresholds(config).state_dict()


@SETTINGS
@given(seeds)
def test_where_nothing_was_found_nothing_is_moved(seed):
    """An open direction is not enough: without a weight there is no place to move the advantage
    to.
    """
    batch = a_batch(seed)
    pairs = run(batch, gate=0.5).pairs
    stats = run(batch, gate=0.5).stats
    empty = pairs.q.sum(1) == 0
    assert (
        not pairs.strength[empty].any()
        and (pairs.m[empty] == batch["mask"][pairs.row[empty]]).all()
    )
    assert (
        stats["localized"]
        == int((pairs.strength > 0).sum())
        == sum(stats[f"localized/{name}"] for name in CHANNELS)
    )


def test_either_gate_of_a_sentence_shuts_it():
    batch = a_batch(3, unscored=0) | {"units": random_units(a_batch(3, unscored=0), 3)}
    opened = sentences(batch)
    assert opened.stats["localized"] and opened.pairs.above_gate.any()
    for gates in ({"gate": 100.0}, {"sentence_gate": 100.0}):
        shut = sentences(batch, **gates)
        assert not shut.pairs.q.any() and not shut.pairs.above_gate.any()
        assert shut.stats["fallback_weak"] == shut.stats["pairs"] == len(batch["pairs"])


LEARNS_AT_ONCE = {"threshold_minimum": 1, "threshold_quantile": 1.0, "threshold_decay": 0.0}


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_thresholds_learn_from_clipped_signals(granularity):
    batch = a_batch(11)
    units = random_units(batch, 11) if granularity == "sentence" else None
    config = CreditConfig(
        granularity=granularity,
        d_max=0.25,
        sentence_minimum=1,
        sentence_quantile=1.0,
        **LEARNS_AT_ONCE,
    )
    thresholds = Thresholds(config)
    credit_from_rewards(**batch, units=units, thresholds=thresholds, config=config)
    largest_signal = (batch["full"][batch["pairs"].rows] - batch["scores"]).abs().max()
    assert largest_signal > 1
    learned = [thresholds.value.max()]
    if granularity == "sentence":
        learned.append(thresholds.sentence.value.max())
    assert all(0.02 < value <= 0.25 for value in learned)


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_thresholds_learn_from_the_pairs_of_all_processes(granularity):
    batch = a_batch(12)
    units = random_units(batch, 12) if granularity == "sentence" else None
    config = CreditConfig(
        granularity=granularity,
        sentence_minimum=1,
        sentence_quantile=1.0,
        **LEARNS_AT_ONCE,
    )
    elsewhere = 5.0  # larger than any signal of this process
    channel_elsewhere = CHANNELS.index("BC-")

    def gather(local):
        """What this process has, and one score of another process."""
        value = elsewhere if local.is_floating_point() else channel_elsewhere
        return torch.cat([local, local.new_full((1,), value)])

    alone = Thresholds(config)
    together = Thresholds(config)
    credit_from_rewards(**batch, units=units, thresholds=alone, config=config)
    credit_from_rewards(**batch, units=units, thresholds=together, config=config, gather=gather)
    learned = [(alone, together)]
    if granularity == "sentence":
        learned.append((alone.sentence, together.sentence))
    for of_one, of_all in learned:
        assert of_one.value[channel_elsewhere] < elsewhere
        assert of_all.value[channel_elsewhere] == elsewhere
