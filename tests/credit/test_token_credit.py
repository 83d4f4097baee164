"""Credit for any training loop: the same numbers as the trainer's reward step, from
log-probabilities of a plain loop.
"""

import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from micro_policy import EXAMPLES, TOKENIZER, policy

from memcalib.credit.divergences import token_divergences
from memcalib.credit.logprobs import response_logps, response_logps_reference
from memcalib.credit.token_credit import TokenCredit
from memcalib.inference.sampling import prompt_encoder, sample_tokens
from memcalib.products.micro.world import exact_judge
from memcalib.problem import judgment_for
from memcalib.rules.base import CreditConfig
from memcalib.trainer.rewards import ChannelRewards, assign_credit

torch.set_num_threads(1)
ENCODE = prompt_encoder(TOKENIZER, prompt_template="micro")
SMALL = dict(threshold_minimum=16, sentence_minimum=4, threshold_quantile=0.95)


@pytest.fixture(scope="module")
def batch():
    """A policy, and four judged answers to each of three examples; one judgment failed."""
    torch.manual_seed(1)
    model = policy()
    repeated = [example for example in EXAMPLES[:3] for _ in range(4)]
    answers = sample_tokens(
        model, [ENCODE(e) for e in repeated], ends=[TOKENIZER.eos_token_id], max_tokens=40
    )
    judged = [
        exact_judge(e, TOKENIZER.decode(ids, skip_special_tokens=True))
        for e, ids in zip(repeated, answers, strict=True)
    ]
    judged[5] = judgment_for(repeated[5], {}, error="timeout")
    return model, repeated, judged, answers


def plain(model, prompts, responses) -> list[list[float]]:
    rows = zip(prompts, responses, strict=True)
    return [
        response_logps_reference(model, [prompt], [response])[0].tolist()
        for prompt, response in rows
    ]


def used(batch, config, score=plain, **options):
    model, repeated, judged, answers = batch
    credit = TokenCredit(TOKENIZER, config, "micro")
    request = credit.requests(repeated, judged, answers, **options)
    advantages = credit.assign(request, score(model, request.prompts, request.responses))
    return credit, request, advantages


CASES = {
    "token": {},
    "sentence": dict(granularity="sentence"),
    "open pairs": dict(threshold_pool="open"),
    "absolute": dict(mode="absolute", merge_over_use=True),
    "channels": dict(eta={"C+": 1.0, "AB-": 0.5}, center=True, scale_unit="token"),
    "grpo": dict(method="grpo"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plain_loop_gets_the_advantages_of_the_trainers_reward_step(batch, name):
    model, repeated, judged, answers = batch
    config = CreditConfig(**(SMALL | CASES[name]))
    credit, request, advantages = used(batch, config)
    texts = [f"{k}" for k in range(len(answers))]
    desk = ChannelRewards(lambda e, text: judged[int(text)], EXAMPLES, config.merge_over_use)
    desk.read(repeated, texts, answers)
    trainers = TokenCredit(TOKENIZER, config, ENCODE)
    theirs, pairs = assign_credit(model, trainers, desk, generations=4)
    assert (advantages - theirs.advantages).abs().max() < 1e-4 and advantages.any()
    assert (request.pairs.rows, request.pairs.channels) == (pairs.rows, pairs.channels)
    assert torch.allclose(credit.thresholds.value, trainers.thresholds.value, atol=1e-5)
    assert credit.last.stats.keys() == theirs.stats.keys()
    for key in ("pairs", "localized", "unscored"):
        assert credit.last.stats.get(key) == theirs.stats.get(key)
    if config.method == "memcalib-rl":
        assert (trainers.thresholds.value != 0.02).any() and theirs.stats["localized"] > 0


def test_without_eta_it_is_gdpo_to_the_bit(batch):
    _, _, still = used(batch, CreditConfig(eta=0))
    gdpo, request, uniform = used(batch, CreditConfig(method="gdpo"))
    assert len(request) == 0 and torch.equal(still, uniform)
    live = request.mask & request.answers.valid[:, None]
    assert torch.equal(uniform, torch.where(live, gdpo.last.sequence[:, None], 0))


def test_each_distinct_row_is_asked_for_once(batch):
    model, repeated, judged, answers = batch
    repeated = repeated + repeated
    judged = judged + judged
    answers = answers + answers
    _, request, _ = used((model, repeated, judged, answers), CreditConfig())
    rows = [(tuple(p), tuple(y)) for p, y in zip(request.prompts, request.responses, strict=True)]
    assert len(set(rows)) == len(rows) < len(request.pairs)
    for k, (row, channel) in enumerate(
        zip(request.pairs.rows, request.pairs.channels, strict=True)
    ):
        assert rows[request.full[row]] == (tuple(ENCODE(repeated[row])), tuple(answers[row]))
        assert (
            rows[request.read_again[k]] == (tuple(request.pairs.prompts[k]), tuple(answers[row]))
            and channel
        )
    assert request.full[5] == -1, "an answer without a score needs none"


def test_log_probabilities_with_the_whole_memory_may_come_from_the_caller(batch):
    model, repeated, judged, answers = batch
    _, whole, expected = used(batch, CreditConfig())
    credit = TokenCredit(TOKENIZER, CreditConfig(), "micro")
    less = credit.requests(repeated, judged, answers, full=False)
    assert len(less) == len(whole) - len({k for k in whole.full if k >= 0})
    full = response_logps(model, [ENCODE(e) for e in repeated], answers)
    padded = response_logps(model, less.prompts, less.responses)
    assert torch.allclose(credit.assign(less, padded, full=full), expected, atol=1e-4)


def test_groups_are_examples_unless_the_caller_says_otherwise(batch):
    model, repeated, judged, answers = batch
    _, _, expected = used(batch, CreditConfig())
    order = [k * 4 + j for j in range(4) for k in range(3)]
    mixed = tuple([column[k] for k in order] for column in (repeated, judged, answers))
    _, _, mixed_advantages = used((model, *mixed), CreditConfig())
    assert torch.allclose(mixed_advantages, expected[order], atol=1e-5)
    for names in ([k // 4 for k in range(12)], ["abc"[k // 4] for k in range(12)]):
        assert torch.equal(used(batch, CreditConfig(), group_ids=names)[2], expected)
    assert not used(batch, CreditConfig(), group_ids=list(range(12)))[2].any(), (
        "groups of one say nothing"
    )


def test_unscored_and_empty_answers_have_no_credit_and_leave_their_group(batch):
    model, repeated, judged, answers = batch
    _, request, expected = used(batch, CreditConfig())
    assert not expected[5].any() and not request.answers.valid[5]
    empty = [*answers, []]
    credit, request, advantages = used(
        (model, [*repeated, repeated[0]], [*judged, judged[0]], empty), CreditConfig()
    )
    assert not advantages[-1].any() and torch.allclose(advantages[:-1], expected, atol=1e-5)
    assert credit.last.stats["unscored"] == 2 and len(advantages) == 13


def test_a_batch_of_empty_answers_has_no_credit_and_an_empty_batch_is_refused(batch):
    model, repeated, judged, _ = batch
    for method in ("gdpo", "memcalib-rl"):
        credit, request, advantages = used(
            (model, repeated[:4], judged[:4], [[]] * 4), CreditConfig(method=method)
        )
        assert (
            advantages.shape == (4, 0) and len(request) == 0 and credit.last.stats["unscored"] == 4
        )
    with pytest.raises(ValueError, match="the batch is empty"):
        used((model, [], [], []), CreditConfig())


def test_what_could_not_be_computed_keeps_uniform_credit_and_is_counted(batch):
    credit, request, expected = used(batch, CreditConfig())
    logps = plain(batch[0], request.prompts, request.responses)
    uniform = credit.last.sequence
    row = next(
        k
        for k in request.pairs.rows
        if (expected[k] - uniform[k]).abs()[request.mask[k]].max() > 1e-3
    )
    of_row = [k for k, r in enumerate(request.pairs.rows) if r == row]
    failed = {
        "without one channel": [request.read_again[of_row[0]]],
        "whole memory": [request.full[row]],
    }
    for failure, gone in failed.items():
        again = TokenCredit(TOKENIZER, CreditConfig(), "micro")
        advantages = again.assign(request, [None if k in gone else x for k, x in enumerate(logps)])
        lost = [k for k in of_row if failure == "whole memory" or request.read_again[k] in gone]
        assert again.last.stats["fallback_scoring"] == len(lost) > 0
        assert again.last.pairs.scored.tolist() == [
            k not in lost for k in range(len(request.pairs))
        ]
        assert torch.allclose(again.last.sequence, uniform, atol=1e-6)
        if failure == "whole memory":
            live = request.mask[row]
            assert (advantages[row][live] - uniform[row]).abs().max() < 1e-6


def test_wrong_input_is_named(batch):
    model, repeated, judged, answers = batch
    credit, request, _ = used(batch, CreditConfig())
    logps = plain(model, request.prompts, request.responses)
    with pytest.raises(ValueError, match=f"{len(logps) - 1} rows.*{len(logps)}"):
        credit.assign(request, logps[1:])
    with pytest.raises(ValueError, match="row 1 of the request"):
        credit.assign(request, [logps[0], logps[1][1:], *logps[2:]])
    broken = list(logps)
    broken[request.full[0]] = [float("nan")] * len(answers[0])
    with pytest.raises(ValueError, match="row 0, token 0.*not finite"):
        credit.assign(request, broken)
    with pytest.raises(ValueError, match="12 examples, 11 judgments"):
        credit.requests(repeated, judged[1:], answers)
    with pytest.raises(ValueError, match=f"row 0: found a judgment of '{repeated[4].id}'"):
        credit.requests(repeated, [judged[4], *judged[1:]], answers)


def test_thresholds_are_the_state(batch):
    credit, _, _ = used(batch, CreditConfig(**SMALL))
    other = TokenCredit(TOKENIZER, CreditConfig(**SMALL), "micro")
    other.load_state_dict(credit.state_dict())
    assert (
        torch.equal(other.thresholds.value, credit.thresholds.value)
        and (other.thresholds.value != 0.02).any()
    )
    with pytest.raises(ValueError, match="granularity"):
        TokenCredit(TOKENIZER, CreditConfig(granularity="sentence")).load_state_dict(
            credit.state_dict()
        )


def test_prompts_may_come_from_a_function(batch):
    _, repeated, judged, answers = batch
    named = TokenCredit(TOKENIZER, prompt_template="micro")
    from_function = TokenCredit(TOKENIZER, prompt_template=ENCODE)
    one, other = (each.requests(repeated, judged, answers) for each in (named, from_function))
    assert one.prompts == other.prompts
    assert TokenCredit(TOKENIZER).requests(repeated, judged, answers).prompts != one.prompts


@pytest.mark.parametrize(
    ("cut", "mode"), [(4, "ordered"), (6, "ordered"), (6, "evidence"), (6, "evidence-kl")]
)
def test_two_processes_give_what_one_gives(batch, cut, mode):
    """Each holds some of the rows, of one group perhaps;
    statistics and thresholds are those of all.
    """
    model, repeated, judged, answers = batch
    config = CreditConfig(
        mode=mode, granularity="sentence", scale_unit="token", threshold_pool="open", **SMALL
    )

    def measured(r):
        return (
            token_divergences(model, r.prompts, r.without, r.responses)
            if r.without
            else plain(model, r.prompts, r.responses)
        )

    whole = TokenCredit(TOKENIZER, config, "micro")
    asking = whole.requests(repeated, judged, answers)
    expected = whole.assign(asking, measured(asking))
    assert whole.last.stats["localized"] > 0
    held = [None, None]
    barrier = threading.Barrier(2)
    results = [None, None]

    def gather(process, values):
        held[process] = values
        barrier.wait()
        joined = torch.cat(held)
        barrier.wait()
        return joined

    def work(process):
        try:
            own_rows = slice(0, cut) if process == 0 else slice(cut, None)
            credit = TokenCredit(
                TOKENIZER, config, "micro", process=process, gather=partial(gather, process)
            )
            request = credit.requests(repeated[own_rows], judged[own_rows], answers[own_rows])
            results[process] = credit, credit.assign(request, logps(request))
        except BaseException:
            barrier.abort()
            raise

    lock = threading.Lock()

    def logps(request):
        with lock:
            return measured(request)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process, (credit, advantages) in enumerate(results):
        own_expected = expected[:cut] if process == 0 else expected[cut:]
        assert torch.allclose(advantages, own_expected[:, : advantages.shape[1]], atol=1e-4)
        assert credit.thresholds.state_dict()["value"] == pytest.approx(
            whole.thresholds.state_dict()["value"]
        )
        assert credit.thresholds.state_dict()["sentence"] == pytest.approx(
            whole.thresholds.state_dict()["sentence"]
        )


def test_it_needs_no_trainer():
    code = "import sys, memcalib.credit.token_credit; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert "torch" in loaded and not loaded & {"trl", "accelerate", "peft", "datasets"}
