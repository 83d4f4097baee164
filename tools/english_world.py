"""What the world in plain English is worth, measured on policies of real weights.

    python -m tools.english_world measure MODEL [--adapter FOLDER] [--questions 100] [--samples 2]
    python -m tools.english_world sheet --out FOLDER --count 200 MODEL[+ADAPTER] ...
    python -m tools.english_world read FOLDER ANSWERS.json

`measure` prints tokens of prompts and answers, the six metrics of sampled answers, how many atoms
are unscored and why, and the share of tokens in Key sentences by channel. `sheet` samples answers
of one or more policies for a reader who is to know nothing: `sheet.jsonl` has request, memory,
answer and atoms in a drawn order, `instructions.md` says what to write, and `verdicts.json`, which
no reader may see, has what the judge said and which policy answered. `read` holds a reader's
answers against it. With --bf16 matrices are multiplied in half precision, which is faster on
processors that have units for it (AMX) and slower on all others.
"""

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from memcalib.inference.local import check_hashes, load_tokenizer
from memcalib.inference.sampling import answer_and_judge
from memcalib.metrics import summary
from memcalib.problem import Example, Judgment, Level, Rollout, encode_prompt, render
from memcalib.products.micro.english import ENGLISH, english_judge, sentence_roles

MAX_TOKENS = 96
CHANNELS = ("A+", "AB-", "AC-", "BA-", "B+", "BC-", "CA-", "CB-", "C+")  # 3 x ideal + actual
CANNOT_TELL = "?"
INSTRUCTIONS = """\
# How answers use memory

Every line of `sheet.jsonl` is one item: a request, what memory holds about the user, an answer, and
the atoms of memory, each with a name (`a1`, `a2`, ...). Judge the answer alone, not whether it is a
good one. For each atom say what the answer does with the thing that the atom names (the dish, the
drink, the place ...), by whatever words it names it:

- `C`: the answer settles on it, tells the user to take it, or builds on it.
- `B`: the answer mentions it as something optional, possible or additional, and leaves it open.
- `A`: the answer does not name it, also where it names something else in its place.
- `?`: it cannot be told.

Do not ask whether the use is right, nor whether the user would like it. Write one JSON object:
{"item name": {"a1": "C", "a2": "A"}, ...} with every item and every atom.
"""


def load(policy: str, adapter: str | None):
    """(model, tokenizer) of a folder or hub id, with an adapter where one is named."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    check_hashes(policy)
    tokenizer = load_tokenizer(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, use_safetensors=True)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval(), tokenizer


def sampled(
    model, tokenizer, examples: Sequence[Example], samples: int, seed: int, bf16: bool
) -> tuple[list[Rollout], list[Judgment]]:
    """Answers at temperature 1 to each example, judged."""
    half = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext()
    with half:
        return answer_and_judge(
            model,
            tokenizer,
            examples,
            english_judge,
            seed=seed,
            samples=samples,
            text="concat",
            max_tokens=MAX_TOKENS,
            batch_size=64,
        )


def key_shares(
    tokenizer, examples: Sequence[Example], rollouts: Sequence[Rollout], judged: Sequence[Judgment]
) -> pd.DataFrame:
    """Pairs of answer and atom by channel, and the mean share of an answer's tokens in the atom's
    Key sentences: of use, or for channels of under-use of what stands in its place."""
    by_id = {example.id: example for example in examples}
    shares = defaultdict(list)
    for rollout, judgment in zip(rollouts, judged, strict=True):
        sentences = sentence_roles(by_id[rollout.example_id], rollout.response)
        lengths = np.array([len(tokenizer(s.text)["input_ids"]) for s in sentences])
        for atom in judgment.atoms:
            if atom.actual is None or not lengths.sum():
                continue
            channel = CHANNELS[3 * atom.ideal + atom.actual]
            under = atom.actual < atom.ideal
            roles = [(s.violations if under else s.roles)[atom.atom_id] for s in sentences]
            is_key = np.array([role == "key" for role in roles])
            shares[channel].append(lengths[is_key].sum() / lengths.sum())
    rows = []
    for channel in CHANNELS[1:]:
        values = shares[channel]
        share = 100 * np.mean(values) if values else np.nan
        has_key = 100 * np.mean(np.array(values) > 0) if values else np.nan
        rows.append((channel, len(values), share, has_key))
    return pd.DataFrame(rows, columns=["channel", "pairs", "key tokens %", "with a key %"])


def measure(options: argparse.Namespace) -> None:
    model, tokenizer = load(options.model, options.adapter)
    examples = ENGLISH.examples(options.questions, 0, options.split)
    prompts = [len(encode_prompt(tokenizer, render(e, text="concat"))) for e in examples]
    rollouts, judgments = sampled(
        model, tokenizer, examples, options.samples, options.seed, options.bf16
    )
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    ended = [rollout.finish_reason == "stop" for rollout in rollouts]
    atoms = [atom for judgment in judgments for atom in judgment.atoms]
    scored = [j for j in judgments if all(atom.actual is not None for atom in j.atoms)]
    print(f"prompt tokens: mean {np.mean(prompts):.0f}, most {max(prompts)}")
    print(f"answer tokens: mean {np.mean(lengths):.1f}, most {max(lengths)}")
    print(f"answers that ended: {np.mean(ended):.1%}")
    why = Counter(atom.reason for atom in atoms if atom.actual is None)
    print(f"unscored: {why.total() / len(atoms):.1%} of {len(atoms)} atoms; {dict(why)}")
    print(f"scored answers: {len(scored)} of {len(judgments)}")
    if scored:
        right = [atom.actual == atom.ideal for judgment in scored for atom in judgment.atoms]
        row = {name: round(value, 1) for name, value in summary(scored).items()}
        print(json.dumps(row | {"atoms right %": round(100 * np.mean(right), 1)}))
    table = key_shares(tokenizer, examples, rollouts, judgments)
    print(table.round(1).to_string(index=False))
    print(f"key tokens, mean over channels: {table['key tokens %'].mean():.1f} %")


def items_of(
    policies: Sequence[str], count: int, seed: int, bf16: bool
) -> Iterator[tuple[str, Example, Rollout, Judgment]]:
    """(policy, example, answer, judgment): equally many answers of each policy, to other requests
    each."""
    each = count // len(policies)
    examples = ENGLISH.examples(each * len(policies), seed, "test")
    for k, policy in enumerate(policies):
        folder, _, adapter = policy.partition("+")
        model, tokenizer = load(folder, adapter)
        own = examples[k * each : (k + 1) * each]
        rollouts, judgments = sampled(model, tokenizer, own, 1, seed, bf16)
        yield from zip([policy] * each, own, rollouts, judgments, strict=True)


def sheet(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    drawn = list(items_of(options.policies, options.count, options.seed, options.bf16))
    rng.shuffle(drawn)
    rows = []
    verdicts = {}
    for number, (policy, example, rollout, judgment) in enumerate(drawn, 1):
        item = f"i{number:03}"
        judged = {atom.atom_id: atom for atom in judgment.atoms}
        atom_ids = list(judged)
        rng.shuffle(atom_ids)
        names = {f"a{k}": atom_id for k, atom_id in enumerate(atom_ids, 1)}
        row = {
            "item": item,
            "request": example.question,
            "memory": [block.memory_text for block in example.blocks],
            "answer": rollout.response,
            "atoms": {name: example.atom(atom_id).text for name, atom_id in names.items()},
        }
        rows.append(json.dumps(row, ensure_ascii=False) + "\n")
        levels = {}
        for name, atom_id in names.items():
            actual = judged[atom_id].actual
            letter = CANNOT_TELL if actual is None else actual.wire
            levels[name] = [letter, judged[atom_id].reason]
        verdicts[item] = {"policy": policy, "example": example.id, "atoms": levels}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sheet.jsonl").write_text("".join(rows), encoding="utf-8")
    (options.out / "instructions.md").write_text(INSTRUCTIONS, encoding="utf-8")
    (options.out / "verdicts.json").write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    print(f"{options.out}: {len(rows)} items; give a reader sheet.jsonl and instructions.md alone")


def read(options: argparse.Namespace) -> int:
    verdicts = json.loads((options.folder / "verdicts.json").read_text(encoding="utf-8"))
    lines = (options.folder / "sheet.jsonl").read_text(encoding="utf-8").splitlines()
    items = {row["item"]: row for row in map(json.loads, lines)}
    answers = json.loads(options.answers.read_text(encoding="utf-8"))
    allowed = [level.wire for level in Level] + [CANNOT_TELL]
    counts: Counter[str] = Counter()
    for item, verdict in verdicts.items():
        for name, (level, reason) in verdict["atoms"].items():
            found = answers.get(item, {}).get(name)
            if found not in allowed:
                print(f"{item} {name}: found {found!r}; allowed: {', '.join(allowed)}")
                return 1
            kind = "unscored" if level == CANNOT_TELL else "agree" if level == found else "differ"
            counts[kind] += 1
            if kind != "agree":
                row = items[item]
                print(f"{item} {name}: judge {level} ({reason}), reader {found}")
                print(f"  {row['atoms'][name]}\n  {row['answer']}")
    judged = counts["agree"] + counts["differ"]
    print(f"agree {counts['agree']} of {judged} judged atoms, {counts['agree'] / judged:.1%}")
    print(f"unscored by the judge {counts['unscored']}, {counts['unscored'] / counts.total():.1%}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("measure")
    verb.add_argument("model")
    verb.add_argument("--adapter")
    verb.add_argument("--questions", type=int, default=100)
    verb.add_argument("--samples", type=int, default=2)
    verb.add_argument("--split", default="validation")
    verb.set_defaults(do=measure)
    verb = verbs.add_parser("sheet")
    verb.add_argument("policies", nargs="+", metavar="MODEL[+ADAPTER]")
    verb.add_argument("--count", type=int, default=200)
    verb.add_argument("--out", type=Path, required=True)
    verb.set_defaults(do=sheet)
    verb = verbs.add_parser("read")
    verb.add_argument("folder", type=Path)
    verb.add_argument("answers", type=Path)
    verb.set_defaults(do=read)
    for name in ("measure", "sheet"):
        verbs.choices[name].add_argument("--seed", type=int, default=1)
        verbs.choices[name].add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    return options.do(options) or 0


if __name__ == "__main__":
    sys.exit(main())
