"""The reference file of the contract with engines: `python -m tools.contract` writes it anew.

Records, answers and judgments are the micro-world's; what the policy says is that of the shipped
policy `cold-short`, and stands in the file as numbers. The tests in
`tests/products/integrations/test_contract.py` compare our code with the file as it was written: a
change of any number in it is a change of the contract.
"""

import json
from pathlib import Path
from typing import Any

import torch

from memcalib.products.integrations.contract import CONTRACT, REFERENCE, BatchCredit, JudgedAnswer
from memcalib.credit.divergences import token_divergences
from memcalib.credit.logprobs import response_logps
from memcalib.credit.token_credit import CreditRequest
from memcalib.inference.sampling import prompt_encoder, sample_tokens
from memcalib.io.settings import package_data
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.problem import Example, Judgment, judgment_for
from memcalib.rules.base import DIVERGENCES, NOTHING, CreditConfig

ANSWERS = 4  # to each record
BATCHES = 2
SMALL = {"threshold_minimum": 16, "threshold_quantile": 0.9, "sentence_minimum": 4}
OF_SENTENCES = {"sentence_start": 0.01, "sentence_floor": 0.01, "sentence_quantile": 0.7}
CASES: dict[str, dict[str, Any]] = {
    "gdpo": {"method": "gdpo"},
    "grpo": {"method": "grpo"},
    "gdpo, token scale": {"method": "gdpo", "scale_unit": "token", "center": True},
    "evidence": {"mode": "evidence"},
    "evidence-kl": {"mode": "evidence-kl", **SMALL},
    "ordered": SMALL,
    "ordered, both sides": {"direction_check": False, "eta": 0.5, **SMALL},
    "ordered, by sentence": {"granularity": "sentence", **OF_SENTENCES, **SMALL},
    "absolute": {"mode": "absolute", "merge_over_use": True, **SMALL},
}


class Recorder:
    """A scorer that asks the shipped policy, and keeps what it said of the newest request."""

    def __init__(self, policy, config: CreditConfig):
        self.policy = policy
        self.reads = config.rule.reads
        self.readings: list[dict[str, Any]] = []

    def __call__(self, request: CreditRequest) -> list[list[float]]:
        if self.reads == DIVERGENCES:
            table = token_divergences(
                self.policy, request.prompts, request.without, request.responses
            )
        else:
            table = response_logps(self.policy, request.prompts, request.responses)
        self.readings = []
        values = []
        for row, (prompt, response) in enumerate(
            zip(request.prompts, request.responses, strict=True)
        ):
            numbers = [round(float(x), 9) for x in table[row, : len(response)]]
            without = request.without[row] if request.without else None
            self.readings.append(
                {"prompt": prompt, "without": without, "response": response, "values": numbers}
            )
            values.append(numbers)
        return values


def make_batch(policy, tokenizer, records: list[Example], number: int) -> dict[str, Any]:
    """The inputs of a batch: groups in turns, padding on both sides, a failed judgment, a truncated
    answer, one without tokens in the loss, and a row that fills the batch.
    """
    encode = prompt_encoder(tokenizer, prompt_template="micro")
    examples = records[2 * number : 2 * number + 2] * ANSWERS
    torch.manual_seed(number)
    ids = sample_tokens(
        policy, [encode(e) for e in examples], ends=[tokenizer.eos_token_id], max_tokens=40
    )
    ids[1] = ids[1][: len(ids[1]) // 2]
    width = max(map(len, ids)) + 2
    rows = [[0] * width for _ in range(len(ids) + 1)]
    mask = [[0] * width for _ in range(len(ids) + 1)]
    answers: list[dict[str, Any] | None] = []
    for row, tokens in enumerate(ids):
        first = 0 if row % 2 else width - len(tokens)
        rows[row][first : first + len(tokens)] = tokens
        if row != 5:
            mask[row][first : first + len(tokens)] = [1] * len(tokens)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        judgment = exact_judge(examples[row], text)
        if row == 2:
            judgment = judgment_for(examples[row], {}, error="timeout: no reply", retry=True)
        answers.append(
            {
                "record": records.index(examples[row]),
                "judgment": json.loads(judgment.to_json()),
                "text": text,
            }
        )
    answers.append(None)
    groups = [example.id for example in examples]
    return {
        "answers": answers,
        "groups": [*groups, "filler"],
        "response_ids": rows,
        "mask": mask,
    }


def rounded(numbers: list[float]) -> list[float]:
    """To nine figures, so that two machines write the same."""
    return [float(f"{number:.9g}") for number in numbers]


def solve(batch: dict[str, Any], records: list[Example], credit: BatchCredit) -> dict[str, Any]:
    """The batch with what our code makes of it."""
    answers = [
        answer
        and JudgedAnswer(
            records[answer["record"]],
            Judgment.model_validate(answer["judgment"]),
            answer["text"],
        )
        for answer in batch["answers"]
    ]
    advantages = credit.assign(
        answers, batch["groups"], torch.tensor(batch["response_ids"]), torch.tensor(batch["mask"])
    )
    rewards: list[list[float] | None] = [None] * len(answers)
    for row in range(len(answers) - 1):
        if bool(credit.request.answers.valid[row]):
            rewards[row] = credit.request.answers.rewards[row].tolist()
    units = credit.request.batch.units
    solved: dict[str, Any] = {}
    solved["readings"] = list(credit.scorer.readings) if credit.scorer else []
    solved["units"] = None if units is None else units.tolist()
    solved["rewards"] = rewards
    solved["advantages"] = [rounded(row) for row in advantages.tolist()]
    solved["thresholds"] = credit.state_dict()["thresholds"]
    return solved


def content() -> dict[str, Any]:
    """The whole file."""
    policy, tokenizer = load_policy("cold-short")
    records = make_examples("short", 2 * BATCHES, seed=11)
    batches = [make_batch(policy, tokenizer, records, number) for number in range(BATCHES)]
    cases = []
    for name, settings in CASES.items():
        config = CreditConfig(**settings)
        scorer = None if config.rule.reads == NOTHING else Recorder(policy, config)
        credit = BatchCredit(tokenizer, config, "micro", scorer=scorer)
        solved = []
        for number, batch in enumerate(batches):
            solved.append({"inputs": number, **solve(batch, records, credit)})
        cases.append({"name": name, "settings": settings, "batches": solved})
    pieces = [tokenizer.decode([number]) for number in range(len(tokenizer))]
    return {
        "contract": CONTRACT,
        "pieces": pieces,
        "records": [json.loads(record.to_json()) for record in records],
        "inputs": batches,
        "cases": cases,
    }


def main() -> None:
    torch.set_num_threads(1)
    path: Path = package_data(*REFERENCE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content(), ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
