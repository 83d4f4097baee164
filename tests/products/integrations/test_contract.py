"""The contract with engines: our code against the reference file, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from micro_policy import TOKENIZER

from memcalib.channels import channel_rewards, judgment_tensors
from memcalib.products.integrations.contract import (
    CONTRACT,
    REFERENCE,
    BatchCredit,
    JudgedAnswer,
    TooManyUnscored,
    port_faults,
    reference_cases,
    token_run,
)
from memcalib.credit.token_credit import TokenCredit
from memcalib.io.settings import package_data
from memcalib.problem import judgment_for
from memcalib.rules.base import NOTHING, CreditConfig

torch.set_num_threads(1)
CASES = reference_cases()
GDPO = CreditConfig(method="gdpo")


def credit_for(case, **options) -> BatchCredit:
    reads = case.config.rule.reads != NOTHING
    scorer = case.batches[0].scorer if reads else None
    return BatchCredit(TOKENIZER, case.config, "micro", scorer=scorer, **options)


def ours(case) -> list[torch.Tensor]:
    credit = credit_for(case)
    results = []
    for batch in case.batches:
        if credit.scorer is not None:
            credit.scorer = batch.scorer
        results.append(credit.assign(batch.answers, batch.groups, batch.response_ids, batch.mask))
        thresholds = credit.state_dict()["thresholds"]
        for name, values in batch.thresholds.items():
            assert thresholds[name] == pytest.approx(values, abs=1e-9)
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_code_reproduces_the_reference_file(case):
    assert port_faults(ours, [case]) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bare_lists_give_the_same(case):
    """A port that takes the answers out of their padding itself, and knows TokenCredit alone."""
    credit = TokenCredit(TOKENIZER, case.config, "micro")
    for batch in case.batches:
        rows = [row for row, answer in enumerate(batch.answers) if answer is not None]
        answers = [batch.answers[row] for row in rows]
        ids = [batch.response_ids[row][batch.mask[row].bool()].tolist() for row in rows]
        request = credit.requests(
            [answer.example for answer in answers],
            [answer.judgment for answer in answers],
            ids,
            [batch.groups[row] for row in rows],
            texts=[answer.text for answer in answers],
        )
        advantages = credit.assign(request, batch.scorer(request) if len(request) else ())
        for number, row in enumerate(rows):
            expected = batch.advantages[row][batch.mask[row].bool()]
            assert advantages[number, : len(expected)] == pytest.approx(expected, abs=1e-6)
        if batch.units is not None:
            assert request.batch.units.tolist() == batch.units


def test_the_file_holds_what_the_page_says():
    content = json.loads(package_data(*REFERENCE).read_text())
    assert content["contract"] == CONTRACT
    assert content["pieces"] == [TOKENIZER.decode([k]) for k in range(len(TOKENIZER))]
    for case in CASES:
        for batch in case.batches:
            assert batch.answers[-1] is None and batch.rewards[-1] is None
            assert not batch.advantages[batch.mask == 0].any()
            assert sum(reward is None for reward in batch.rewards) == 3  # failed, empty, filler
            for answer, rewards in zip(batch.answers, batch.rewards, strict=True):
                if rewards is None:
                    continue
                ideal, actual, atoms, _ = judgment_tensors([answer.judgment])
                expected = channel_rewards(ideal, actual, atoms, case.config.merge_over_use)
                assert rewards == pytest.approx(expected[0].tolist())
    reads = {case.config.rule.reads for case in CASES}
    assert len(reads) == 3


def test_thresholds_move_between_the_batches_of_some_case():
    ordered = next(case for case in CASES if case.name == "ordered")
    first, second = ordered.batches
    start = TokenCredit(TOKENIZER, ordered.config).state_dict()
    assert start != first.thresholds != second.thresholds


def test_a_port_that_differs_is_told_where():
    case = CASES[0]

    def wrong(case):
        results = [batch.advantages.clone() for batch in case.batches]
        results[1][0, 1] += 1e-4
        return results

    (fault,) = port_faults(wrong, [case])
    assert fault.startswith(f"{case.name}, batch 1, row 0, token 1: ")
    short = replace(case, batches=case.batches[:1])
    (fault,) = port_faults(lambda case: [case.batches[0].advantages[:2]], [short])
    shape = tuple(case.batches[0].advantages.shape)
    assert fault.endswith(f"shape {(2, shape[1])}, must be {shape}") and shape[0] != 2


@pytest.fixture
def batch():
    return CASES[0].batches[0]


def gdpo(batch, answers=None, groups=None, mask=None, **options):
    credit = BatchCredit(TOKENIZER, options.pop("config", GDPO), "micro", **options)
    mask = batch.mask if mask is None else mask
    return credit, credit.assign(
        answers or batch.answers, groups or batch.groups, batch.response_ids, mask
    )


def test_a_group_that_was_cut_is_named(batch):
    cut = [f"{group}-{row > 3}" for row, group in enumerate(batch.groups)]
    gdpo(batch, group_size=4)
    with pytest.raises(ValueError, match=r"2 answers in this batch; allowed: 4 \(group_size\)"):
        gdpo(batch, groups=cut, group_size=4)


def test_a_group_with_answers_to_two_records_is_named(batch):
    with pytest.raises(
        ValueError, match="group 'one': found answers to .* and .*; allowed: .*one record"
    ):
        gdpo(batch, groups=["one"] * len(batch.groups))


def test_group_size_and_gather_exclude_each_other():
    with pytest.raises(ValueError, match="group_size: found 4 together with gather"):
        BatchCredit(TOKENIZER, GDPO, "micro", group_size=4, gather=lambda rows: rows)


def test_a_mask_with_gaps_is_named_by_its_row(batch):
    mask = batch.mask.clone()
    run = token_run(mask[3])
    mask[3, run.start + 1] = 0
    with pytest.raises(ValueError, match="row 3: the response mask has gaps"):
        gdpo(batch, mask=mask)


def test_what_stands_in_padding_and_the_order_of_rows_do_not_matter(batch):
    _, expected = gdpo(batch)
    noise = batch.response_ids.masked_fill(batch.mask == 0, 7)
    order = torch.randperm(len(batch.groups), generator=torch.Generator().manual_seed(0)).tolist()
    credit = BatchCredit(TOKENIZER, GDPO, "micro")
    shuffled = credit.assign(
        [batch.answers[k] for k in order],
        [batch.groups[k] for k in order],
        noise[order],
        batch.mask[order],
    )
    assert torch.allclose(shuffled, expected[order], atol=1e-6)


def test_a_rule_that_reads_the_policy_needs_a_scorer():
    with pytest.raises(ValueError, match="'ordered' reads log-probabilities .*no scorer"):
        BatchCredit(TOKENIZER, CreditConfig(), "micro")


def test_a_rule_by_quotes_refuses_a_batch_without_any(batch):
    def bare(answer):
        if answer is None:
            return None
        atoms = [a.model_copy(update={"quote": "", "spans": None}) for a in answer.judgment.atoms]
        return replace(answer, judgment=answer.judgment.model_copy(update={"atoms": atoms}))

    config = CreditConfig(mode="evidence")
    gdpo(batch, config=config)
    with pytest.raises(ValueError, match="needs the judge's quotes; found .* but no quote"):
        gdpo(batch, answers=[bare(answer) for answer in batch.answers], config=config)


def test_without_the_package_that_cuts_sentences_it_is_named(monkeypatch):
    monkeypatch.setattr("memcalib.products.integrations.contract.find_spec", lambda name: None)
    BatchCredit(TOKENIZER, GDPO, "micro")
    with pytest.raises(ModuleNotFoundError, match="pip install pysbd"):
        BatchCredit(TOKENIZER, CreditConfig(mode="evidence"), "micro")


def test_too_many_unscored_answers_stop_and_fewer_are_left_out(batch):
    def failed(answer):
        judgment = judgment_for(answer.example, {}, error="rate_limited: later", retry=True)
        return replace(answer, judgment=judgment)

    some = [failed(batch.answers[0]), *batch.answers[1:]]
    credit, advantages = gdpo(batch, answers=some)
    assert not advantages[0].any() and credit.stats["unscored"] == 2
    assert credit.stats["failed_calls"] == 2 and credit.stats["padding_rows"] == 1
    most = [failed(answer) for answer in batch.answers[:5]] + batch.answers[5:]
    with pytest.raises(TooManyUnscored, match="5 of the 8 .*50%.*rate_limited: later"):
        gdpo(batch, answers=most)


def test_shapes_that_do_not_fit_are_named(batch):
    credit = BatchCredit(TOKENIZER, GDPO, "micro")
    with pytest.raises(ValueError, match=r"8 answers and 9 groups"):
        credit.assign(batch.answers[:8], batch.groups, batch.response_ids, batch.mask)


def test_an_answer_survives_the_way_through_an_engine(batch):
    answer = batch.answers[0]
    again = JudgedAnswer.unpack(answer.pack())
    assert again.judgment == answer.judgment and again.text == answer.text
    assert again.example == answer.example
    with pytest.raises(ValueError, match="contract: found 2; allowed: 1"):
        JudgedAnswer.unpack(answer.pack().replace('"contract": 1', '"contract": 2'))
    for wrong in ("", "12", "no JSON", None):
        with pytest.raises(ValueError, match="allowed: a string made by JudgedAnswer.pack"):
            JudgedAnswer.unpack(wrong)


def test_the_state_of_a_checkpoint_goes_on(batch):
    ordered = next(case for case in CASES if case.name == "ordered")
    first, second = ordered.batches
    before = credit_for(ordered)
    before.assign(first.answers, first.groups, first.response_ids, first.mask)
    resumed = credit_for(ordered)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed.scorer = second.scorer
    advantages = resumed.assign(second.answers, second.groups, second.response_ids, second.mask)
    assert torch.allclose(advantages, second.advantages, atol=1e-6)
    with pytest.raises(ValueError, match="contract: found None"):
        resumed.load_state_dict({})
