"""The scoring engine against its slow oracle, the signal rules against the paper's table,
and bad input.
"""

import subprocess
import sys

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from memcalib.problem import CHANNELS, UNDER, Level, judgment_for, remove_atoms, sample_records
from memcalib.localization import (
    Thresholds,
    ablation_pairs,
    tokens_with_role,
    clip_signal,
    localization_signal,
    localization_weights,
    with_under_use,
)
from memcalib.inference.token_rows import prefix_spans
from memcalib.rules.base import CreditConfig, channel_atoms, credit_rule

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
NAN = float("nan")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return tiny(tie_word_embeddings=True)


def table(mode: str = "ordered", under_use: str = "suppressed") -> list:
    """What the rule makes of d = -2 in each channel; 0 where it has nothing."""
    signals = with_under_use(credit_rule(mode).signals, under_use)
    d = torch.tensor([-2.0])
    return [signals[name](d).item() if name in signals else 0 for name in CHANNELS]


def test_rules_are_the_papers_table():
    assert table() == [0, -2, -2, 2, -2, -2, 2, 2, -2]
    assert table("absolute") == [0] + [2] * 8
    assert table("positive_only") == [0, -2, -2, 0, -2, -2, 0, -2, -2]
    for mode in ("ordered", "absolute", "positive_only"):
        under = [CHANNELS.index(name) for name in UNDER]
        assert not any(table(mode, "uniform")[h] for h in under)
        assert all(table(mode, "absolute")[h] == 2 for h in under)
    for bad in ({"mode": "sign"}, {"under_use": "up"}):
        with pytest.raises(ValueError, match="(sign|up).*allowed:"):
            table(**bad)


SQUARES = {"C+": lambda d: d**2, "CB-": lambda d: -d}
WRONG = {"D+": lambda d: d}


def test_a_rule_from_outside_is_found_by_its_path():
    path = f"{__name__}:SQUARES"
    channel = torch.tensor([CHANNELS.index(name) for name in ("C+", "CB-", "B+")])
    d = torch.full((3, 2), 3.0)
    signals = credit_rule(path).signals
    assert localization_signal(d, channel, signals)[:, 0].tolist() == [9, -3, 0]
    assert with_under_use(signals, "uniform").keys() == {"C+"}
    assert with_under_use(signals, "absolute").keys() == {"C+", *UNDER}
    assert CreditConfig(mode=path).mode == path
    for wrong, named in (("WRONG", "D+"), ("NOT_THERE", "NOT_THERE"), ("NAN", "float")):
        with pytest.raises(ValueError, match=named):
            CreditConfig(mode=f"{__name__}:{wrong}")
    with pytest.raises(ValueError, match="no_such_package"):
        CreditConfig(mode="no_such_package:rule")


def test_the_chapters_of_pure_tensors_load_torch_and_no_model_library():
    code = "import sys, memcalib.localization, memcalib.redistribution; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert "torch" in loaded and not loaded & {"transformers", "accelerate", "trl", "datasets"}


@SETTINGS
@given(st.integers(0, 10_000), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0.5, 5))
def test_weights_match_a_scalar_reading_of_the_equations(seed, delta, gate, d_max):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(4, 6, generator=g, dtype=torch.float64) * 2
    mask = torch.rand(4, 6, generator=g) > 0.3
    q, opened = localization_weights(
        z, mask, torch.full((4,), delta, dtype=torch.float64), gate=gate, d_max=d_max
    )
    for p in range(4):
        live = [z[p, t].item() for t in range(6) if mask[p, t]]
        assert opened[p] == (bool(live) and max(live) > gate) and not q[p, ~mask[p]].any()
        expected = reference.token_weights(live, delta, gate=gate, d_max=d_max)
        assert q[p, mask[p]].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_gate_reads_the_unclipped_signal():
    z = torch.tensor([[0.4, 0.1]])
    mask = torch.ones(1, 2).bool()
    assert localization_weights(z, mask, torch.zeros(1), gate=0.3, d_max=0.2)[1].item()
    assert clip_signal(z, 0.2).max() == pytest.approx(0.2)
    assert not localization_weights(z, mask, torch.zeros(1), gate=0.4)[1].item()
    assert localization_weights(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.zeros(2))[
        0
    ].shape == (2, 0)
    assert localization_signal(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (0, 3)


@SETTINGS
@given(st.integers(0, 10_000), st.integers(1, 400))
def test_threshold_update_is_numpys_linear_quantile(seed, n):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, generator=g)
    channel = torch.randint(0, 9, (n,), generator=g)
    thresholds = Thresholds(CreditConfig(threshold_minimum=20))
    thresholds.update(scores, channel)
    for h in range(9):
        pool = scores[channel == h].double().numpy()
        expected = (
            0.9 * 0.02 + 0.1 * max(0.02, np.quantile(pool, 0.75)) if len(pool) >= 20 else 0.02
        )
        assert thresholds.value[h].item() == pytest.approx(expected, abs=1e-12)
    order = torch.randperm(n, generator=g)
    again = Thresholds(CreditConfig(threshold_minimum=20))
    again.update(scores[order], channel[order])
    assert torch.equal(again.value, thresholds.value)


def test_threshold_state_and_bad_input():
    thresholds = Thresholds(CreditConfig(threshold_start=0.5))
    thresholds.update(torch.full((256,), -1.0), torch.full((256,), 3))
    assert thresholds.value[3].item() == pytest.approx(0.9 * 0.5 + 0.1 * 0.02)
    other = Thresholds()
    other.load_state_dict(thresholds.state_dict())
    assert torch.equal(other.value, thresholds.value)
    with pytest.raises(ValueError, match="8 thresholds, must be 9"):
        other.load_state_dict({"value": [0.1] * 8})
    with pytest.raises(ValueError, match="NaN or infinity"):
        other.update(torch.tensor([NAN]), torch.tensor([1]))
    other.update(torch.zeros(0), torch.zeros(0, dtype=torch.long))


def judged(example, level=Level.BOUND):
    return judgment_for(example, dict.fromkeys(example.levels, level))


def test_pairs_remove_exactly_the_channels_atoms():
    example = sample_records()[0]
    judgment = judged(example)
    shown_atoms = []

    def encode(e):
        return shown_atoms.append(set(e.levels)) or [1, 2, len(e.atoms) + 3]

    pairs = ablation_pairs([example, example], [judgment, judgment], encode)
    groups = channel_atoms(judgment)
    assert sorted(a for atoms in groups.values() for a in atoms) == sorted(example.levels)
    assert len(pairs) == 2 * len(groups) and len(shown_atoms) == len(groups)
    for shown, (_, _, atoms) in zip(
        shown_atoms, zip(pairs.rows, pairs.channels, pairs.atoms, strict=True), strict=False
    ):
        assert shown == set(remove_atoms(example, atoms).levels)


def test_pairs_leave_out_unscored_closed_and_uniform_channels():
    example = sample_records()[0]
    good = judged(example, Level.IGNORE)

    def encode(e):
        return [1]

    unscored = judgment_for(example, {})
    broken = good.model_copy(update={"error": "timeout"})
    assert not len(ablation_pairs([example] * 2, [unscored, broken], encode))

    def names(keep=None, **settings):
        config = CreditConfig(**settings)
        channels = config.rule.signals_with(config)
        pairs = ablation_pairs([example], [good], encode, channels, keep)
        return {CHANNELS[h] for h in pairs.channels}

    assert (
        names() == {"BA-", "CA-"} & {CHANNELS[h] for h in channel_atoms(good)}
        and "A+" not in names()
    )
    assert names(under_use="uniform") == set() and names(mode="positive_only") == set()
    open_pairs = torch.zeros(1, 9, dtype=torch.bool)
    assert names(keep=open_pairs) == set()
    open_pairs[0, 3] = True
    assert names(keep=open_pairs) <= {"BA-"}
    over = judged(example, Level.CONTROL)
    assert "AC-" not in {
        CHANNELS[h] for h in ablation_pairs([example], [over], encode, merge_over_use=True).channels
    }
    with pytest.raises(ValueError, match="shorter|longer|argument"):
        ablation_pairs([example], [good, good], encode)


def test_tokens_belong_to_the_sentence_in_which_they_end():
    class Sentence:
        def __init__(self, start, end, role):
            self.start = start
            self.end = end
            self.roles = {"a": role}

    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return " ".join("xyz"[: i + 1] for i in ids)

    spans = prefix_spans(Words(), [0, 1, 2])
    assert spans == [(0, 1), (1, 4), (4, 8)]
    sentences = [Sentence(0, 4, "irrelevant"), Sentence(4, 8, "key")]
    assert tokens_with_role(spans, sentences, ["a"]).tolist() == [False, False, True]
    assert not tokens_with_role(spans, sentences, ["b"]).any()


@pytest.mark.parametrize("of_sentences", [False, True])
def test_idle_thresholds_say_why(of_sentences):
    thresholds = Thresholds(CreditConfig(), of_sentences=of_sentences)
    minimum, floor = thresholds.minimum, thresholds.floor
    assert thresholds.idle_text() == "", "nothing is said before the first batch"
    thresholds.update(torch.ones(minimum - 1), torch.full((minimum - 1,), 4))
    assert f"no channel had {minimum} scores in a batch" in thresholds.idle_text()
    assert f"the largest pool had {minimum - 1}" in thresholds.idle_text()
    thresholds.update(torch.full((minimum,), floor), torch.full((minimum,), 4))
    assert not thresholds.acted
    text = thresholds.idle_text()
    assert f"in 1 batch of a channel with {minimum} scores or more" in text
    assert f"at or below the floor {floor:g}" in text and text.startswith("in 2 batches")
    thresholds.update(torch.full((minimum,), floor + 1), torch.full((minimum,), 4))
    assert thresholds.acted and thresholds.idle_text() == ""


def test_the_floor_is_not_the_gate():
    scores, channel = torch.full((300,), -1.0), torch.full((300,), 4)
    for gate, floor in ((0.5, 0.02), (0.0, 0.3)):
        config = CreditConfig(gate=gate, threshold_floor=floor, threshold_start=0.9)
        thresholds = Thresholds(config)
        for _ in range(400):
            thresholds.update(scores, channel)
        assert abs(thresholds.value[4] - floor) < 1e-9
