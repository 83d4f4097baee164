"""Credit from evidence: against a slow reference in loops, what it preserves,
quotes at fault, divergences, judges.
"""

import math
import random
from itertools import pairwise

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_policy import EXAMPLES, TOKENIZER, policy
from slow_rules import judged_answers
from small_models import a_workload, tiny

from memcalib.credit.divergences import token_divergences
from memcalib.credit.sentences import response_units
from memcalib.inference.token_rows import token_spans
from memcalib.credit.token_credit import TokenCredit
from memcalib.inference.sampling import prompt_encoder
from memcalib.problem import CHANNELS, Judgment, Level
from memcalib.products.micro.world import answer, exact_judge
from memcalib.rules.base import CreditConfig
from memcalib.rules.evidence import evidence_tokens
from memcalib.trainer.rewards import ChannelRewards, RetryingJudge, assign_credit, quoting_judge

torch.set_num_threads(1)
ENCODE = prompt_encoder(TOKENIZER, prompt_template="micro")
SMALL = dict(threshold_minimum=16, sentence_minimum=4)
SETTINGS = settings(max_examples=6, deadline=None, derandomize=True)


def slow(
    config: CreditConfig, examples, judged, answers, divergence, thresholds, sentence_thresholds
):
    """Token advantages by evidence in loops; `divergence[row, channel]` is that of the omitted
    atoms.
    """
    rows = range(len(answers))
    valid = [judgment.scored for judgment in judged]
    levels = [
        [(int(a.ideal), int(a.actual)) for a in j.atoms] if v else []
        for j, v in zip(judged, valid, strict=True)
    ]
    rewards = [reference.channel_rewards(atoms, config.merge_over_use) for atoms in levels]
    channels = reference.group_advantages(rewards, [row // 4 for row in rows], valid)
    scale = reference.rms([math.fsum(a) for a in channels], valid)
    units = [row.tolist() for row in response_units(TOKENIZER, answers)]
    out = [[math.fsum(channels[i]) if valid[i] else 0.0] * len(answers[i]) for i in rows]
    pools = [[] for _ in CHANNELS]
    sentence_pools = [[] for _ in CHANNELS]
    for i in [row for row in rows if valid[row]]:
        text = TOKENIZER.decode(answers[i], skip_special_tokens=True)
        spans_of_tokens = token_spans(TOKENIZER, answers[i])
        for h, atoms in reference.atoms_by_channel(judged[i], config.merge_over_use).items():
            if h == 0:
                continue
            atom_of_id = {atom.atom_id: atom for atom in judged[i].atoms}
            inside = {
                a: all(0 <= x < y <= len(text) for x, y in atom_of_id[a].spans or ()) for a in atoms
            }
            shown = [atom_of_id[a] for a in atoms if atom_of_id[a].spans and inside[a]]
            omitted = [
                atom_of_id[a] for a in atoms if not atom_of_id[a].spans and not atom_of_id[a].quote
            ]
            reached = {
                units[i][t]
                for t, (a, b) in enumerate(spans_of_tokens)
                for atom in shown
                for x, y in atom.spans
                if a < y and x < b and a < b
            }
            z = [float(units[i][t] in reached) for t in range(len(answers[i]))]
            parts = [(len(shown) / len(atoms) if not all(z) else 0.0, z, 0.0, 0.0)]
            aligned = rewards[i][h] * channels[i][h] > 0
            if config.mode == "evidence-kl" and h in (3, 6, 7) and omitted and aligned:
                z = divergence(i, h)
                parts.append(
                    (
                        len(omitted) / len(atoms),
                        z,
                        thresholds[h],
                        sentence_thresholds[h] if sentence_thresholds else 0.0,
                    )
                )
                pools[h] += [reference.clip(x, -config.d_max, config.d_max) for x in z]
                sentence_pools[h] += reference.sentence_means(
                    z, units[i][: len(z)], config.d_max
                ).values()
            for share, z, threshold, sentence_threshold in parts:
                q = reference._weights(config, z, units[i][: len(z)], threshold, sentence_threshold)
                if aligned and math.fsum(q) > 0:
                    for t, m in enumerate(reference.multipliers(q, config.cap)):
                        out[i][t] += channels[i][h] * reference._eta(config, h) * share * (m - 1)
    rule = dict(
        floor=config.gate,
        share=config.threshold_quantile,
        decay=config.threshold_decay,
        minimum=config.threshold_minimum,
    )
    after = [reference.next_threshold(v, p, **rule) for v, p in zip(thresholds, pools, strict=True)]
    return [[a / scale for a in row] for row in out], after


def drawn(row: int, channel: int, length: int) -> list[float]:
    rng = random.Random(f"{row} {channel}")
    return [rng.choice([0.0, 0.01, 0.3, 5.0]) * rng.random() for _ in range(length)]


@SETTINGS
@given(
    st.integers(0, 10_000),
    st.sampled_from(["evidence", "evidence-kl"]),
    st.sampled_from(["token", "sentence"]),
    st.booleans(),
    st.booleans(),
)
def test_it_equals_the_slow_reference_and_keeps_every_mean(seed, mode, granularity, cut, merged):
    examples, judged, answers = judged_answers(seed, cut)
    config = CreditConfig(
        mode=mode,
        granularity=granularity,
        merge_over_use=merged,
        eta={name: 0.2 + 0.1 * h for h, name in enumerate(CHANNELS)} | {"A+": 0.0},
        **SMALL,
    )
    credit = TokenCredit(TOKENIZER, config, ENCODE)
    request = credit.requests(examples, judged, answers)
    pair_of_row = {
        k: (row, h)
        for k, row, h in zip(
            request.read_again, request.pairs.rows, request.pairs.channels, strict=True
        )
        if k >= 0
    }
    advantages = credit.assign(
        request, [drawn(*pair_of_row[k], len(request.responses[k])) for k in range(len(request))]
    )
    sentences = [0.02] * 9 if granularity == "sentence" else []
    expected, after = slow(
        config,
        examples,
        judged,
        answers,
        lambda i, h: drawn(i, h, len(answers[i])),
        [0.02] * 9,
        sentences,
    )
    for row, values in enumerate(expected):
        assert torch.allclose(
            advantages[row, : len(values)].double(), torch.tensor(values).double(), atol=2e-5
        )
        assert not advantages[row, len(values) :].any()
    assert credit.thresholds.value.tolist() == pytest.approx(after, abs=1e-9)
    detail = credit.last.pairs
    inside = request.mask[detail.row]
    means = torch.where(inside, detail.strength[:, None] * (detail.m - 1), 0).sum(1) / inside.sum(1)
    assert means.abs().max() < 1e-9, "each channel of each answer keeps its mean"
    assert credit.last.stats["conservation_relative"] < 1e-6
    if mode == "evidence":
        assert len(request) == 0 and not any(request.pairs.prompts)
    still = TokenCredit(
        TOKENIZER,
        CreditConfig(mode=mode, granularity=granularity, merge_over_use=merged, eta=0),
        ENCODE,
    )
    gdpo = TokenCredit(TOKENIZER, CreditConfig(method="gdpo", merge_over_use=merged), ENCODE)
    again = still.requests(examples, judged, answers)
    same = still.assign(
        again, [drawn(*pair_of_row[k], len(again.responses[k])) for k in range(len(again))]
    )
    assert torch.equal(same, gdpo.assign(gdpo.requests(examples, judged, answers)))


@SETTINGS
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3),
    st.data(),
)
def test_a_span_takes_whole_sentences(sizes, spans, data):
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    units = torch.tensor(
        data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    ).cumsum(0)
    spans = [(min(a, b), max(a, b)) for a, b in spans if a != b]
    token_ends = list(pairwise([0, *ends]))
    reached = {
        int(units[t])
        for t, (a, b) in enumerate(token_ends)
        if any(x < b and a < y and a < b for x, y in spans)
    }
    assert evidence_tokens(spans, ends, units).tolist() == [int(unit) in reached for unit in units]


def test_a_judgment_from_before_spans_gives_the_same_credit():
    examples, judged, answers = judged_answers(3)
    for example, judgment, ids in zip(examples, judged, answers, strict=True):
        if judgment.scored:
            text = TOKENIZER.decode(ids, skip_special_tokens=True)
            for atom, exact in zip(judgment.atoms, exact_judge(example, text).atoms, strict=True):
                shown_once = len(exact.spans) <= 1
                atom.quote, atom.spans = (exact.quote, exact.spans) if shown_once else ("", [])
    older = [
        Judgment.model_validate_json(
            j.model_copy(
                update={"atoms": [a.model_copy(update={"spans": None}) for a in j.atoms]}
            ).to_json()
        )
        for j in judged
    ]
    assert "spans" not in older[0].to_json() and "spans" in judged[0].to_json()
    advantages = []
    for judgments in (judged, older):
        credit = TokenCredit(TOKENIZER, CreditConfig(mode="evidence"), ENCODE)
        advantages.append(credit.assign(credit.requests(examples, judgments, answers)))
    assert torch.equal(*advantages) and advantages[0].any()


def test_quotes_are_looked_up_in_the_part_of_an_answer_that_was_judged():
    """As where a thought stands before the answer: the judge has not seen it,
    and counts characters without it.
    """
    examples, judged, answers = judged_answers(4)
    thought = TOKENIZER("Take it step by step. ", add_special_tokens=False).input_ids
    longer = [[*thought, *ids] for ids in answers]
    texts = TOKENIZER.batch_decode(answers, skip_special_tokens=True)
    shown = []
    for ids, responses in (
        (answers, None),
        (longer, [text.strip() for text in texts]),
        (longer, ["not in it"] * 8),
    ):
        credit = TokenCredit(TOKENIZER, CreditConfig(mode="evidence"), ENCODE)
        request = credit.requests(examples, judged, ids, texts=responses)
        rows = zip(request.pairs.rows, request.pairs.shown, strict=True)
        held = [
            [i for i, is_shown in zip(ids[row], tokens.tolist(), strict=False) if is_shown]
            for row, tokens in rows
        ]
        shown.append(
            [text.strip() for text in TOKENIZER.batch_decode(held, skip_special_tokens=True)]
        )
    assert any(shown[0]) and not any(shown[2])
    whole = [text.strip() for text in texts]
    for alone, behind, row in zip(shown[0], shown[1], request.pairs.rows, strict=True):
        assert alone == behind or (not alone and behind == whole[row]), (
            "quoted everywhere: everything but the thought"
        )


def test_quotes_at_fault_are_uniform_and_counted():
    example = EXAMPLES[0]
    text = answer(example, random.Random(0))
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    plain = answer(example, random.Random(0), dict.fromkeys(example.levels, Level.IGNORE))
    other = TOKENIZER(plain, add_special_tokens=False).input_ids

    def counted(spans, quote=""):
        judged = [exact_judge(example, text), exact_judge(example, plain)]
        for atom in judged[0].atoms:
            atom.spans = spans
            atom.quote = quote
        credit = TokenCredit(TOKENIZER, CreditConfig(mode="evidence"), ENCODE)
        advantages = credit.assign(credit.requests([example] * 2, judged, [ids, other]))
        return advantages[0, : len(ids)], credit.last.stats

    used = sum(atom.ideal > 0 for atom in exact_judge(example, text).atoms)
    for spans, quote, name, count in (
        ([], "never said", "evidence_ungrounded", used),
        ([(0, len(text) + 1)], "", "evidence_ungrounded", used),
        ([(0, len(text))], "", "evidence_everywhere", 2),
    ):
        advantages, stats = counted(spans, quote)
        assert (advantages - advantages[0]).abs().max() < 1e-6 and stats[name] >= count
    advantages, stats = counted([(0, 3)])
    assert (
        stats["evidence_overlapping"] > 1
        and stats["localized"] > 0
        and advantages.unique().numel() > 1
    )


def test_a_quote_of_the_whole_answer_shows_no_token():
    example = EXAMPLES[0]
    text = answer(example, random.Random(0))
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    judgment = exact_judge(example, text)
    for atom in judgment.atoms:
        atom.spans = [(0, len(text))]
    credit = TokenCredit(TOKENIZER, CreditConfig(mode="evidence"), ENCODE)
    pairs = credit.requests([example], [judgment], [ids]).pairs
    assert len(pairs) and not pairs.shown.any() and not pairs.shares.any()


def test_thresholds_that_divergences_have_do_not_hold_for_quotes():
    examples, judged, answers = judged_answers(3)
    placed = []
    for threshold in (0.02, 1.5):
        config = CreditConfig(mode="evidence", threshold_start=threshold)
        credit = TokenCredit(TOKENIZER, config, ENCODE)
        placed.append(credit.assign(credit.requests(examples, judged, answers)))
        assert credit.last.stats["localized"] > 0
    assert torch.equal(*placed)


def slow_divergence(model, prompt, without, answer, temperature) -> list[float]:
    sides = []
    with torch.no_grad():
        for before in (prompt, without):
            logits = (
                model(torch.tensor([[*before, *answer]])).logits[0, len(before) - 1 : -1].double()
            )
            sides.append((logits / temperature).log_softmax(-1))
    p, q = sides
    return [
        sum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True))
        for x, y in zip(p.tolist(), q.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"head": "model"}, {"held": 1, "logit_chunk": 1}, {"share": False, "token_budget": 30}],
    ids=str,
)
def test_divergences_are_those_of_whole_distributions_however_the_work_is_cut(options):
    model = tiny()
    prompts, answers = a_workload(3, rows=6, empty=True)
    without = [[*prompt[:1], *prompt[2:]] or [1] for prompt in prompts]
    divergences = token_divergences(model, prompts, without, answers, temperature=0.7, **options)
    assert divergences.shape == (6, max(map(len, answers))) and (divergences >= 0).all()
    for row, (prompt, less, y) in enumerate(zip(prompts, without, answers, strict=True)):
        slow = slow_divergence(model, prompt, less, y, 0.7) if y else []
        assert (
            divergences[row, : len(y)].tolist() == pytest.approx(slow, abs=1e-4)
            and not divergences[row, len(y) :].any()
        )
    assert token_divergences(model, [], [], []).shape == (0, 0)


def test_a_row_that_cannot_be_scored_keeps_its_share_uniform():
    model = tiny(max_position_embeddings=16)
    prompts = [[1, 2, 3], [1] * 14]
    without = [[1, 3], [1] * 13]
    answers = [[4, 5], [6, 7, 8]]
    divergences = token_divergences(model, prompts, without, answers)
    assert divergences[0, :2].isfinite().all() and divergences[1].isnan().all()
    examples, judged, answers = judged_answers(11)
    config = CreditConfig(mode="evidence-kl")
    rows = []
    for lost in (False, True):
        credit = TokenCredit(TOKENIZER, config, ENCODE)
        request = credit.requests(examples, judged, answers)
        values = [None if lost else [0.0] * len(y) for y in request.responses]
        rows.append(credit.assign(request, values))
        assert len(request) and (credit.last.stats["fallback_scoring"] > 0) == lost
    assert torch.equal(*rows), "no divergence and no known divergence move nothing"
    with pytest.raises(ValueError, match="rows of log-probabilities; there must be"):
        credit.assign(request, [])


def test_the_trainers_reward_step_is_that_of_a_plain_loop():
    model = policy()
    (examples, judged, answers) = judged_answers(7)
    for mode in ("evidence", "evidence-kl"):
        config = CreditConfig(mode=mode, **SMALL)
        loop_credit = TokenCredit(TOKENIZER, config, ENCODE)
        theirs = TokenCredit(TOKENIZER, config, ENCODE)
        request = loop_credit.requests(examples, judged, answers)
        slow = [
            slow_divergence(model, *row, 1.0)
            for row in zip(request.prompts, request.without, request.responses, strict=True)
        ]
        desk = ChannelRewards(lambda e, text: judged[int(text)], EXAMPLES)
        desk.read(examples, [str(k) for k in range(len(answers))], answers)
        desk.texts = TOKENIZER.batch_decode(answers, skip_special_tokens=True)
        trainer_credit, pairs = assign_credit(model, theirs, desk, generations=4)
        assert (
            torch.allclose(loop_credit.assign(request, slow), trainer_credit.advantages, atol=1e-4)
            and pairs.rows == request.pairs.rows
        )
        assert trainer_credit.stats["evidence_shown"] > 0 and trainer_credit.stats["localized"] > 0


def test_a_judge_without_quotes_is_refused_by_name():
    class Silent:
        name = "silent"

        def __call__(self, example, response):
            return exact_judge(example, response)

    for judge in (Silent(), RetryingJudge(Silent())):
        with pytest.raises(
            ValueError, match="judge: found 'silent', which gives no quotes.*gives_quotes = True"
        ):
            quoting_judge(judge)
    honest = Silent()
    honest.gives_quotes = True
    assert quoting_judge(honest) is honest and quoting_judge(RetryingJudge(honest)).gives_quotes
