"""Are stance errors in a log found as often as the judge's exam says?

    python benchmarks/bench_stance.py [--each 60] [--seed 0] [--draws 1000]

A log is planted whose stances are known: so many right uses, misread memories, false beliefs that
are followed and false beliefs that are corrected. A judge behind the practice server knows all
stances, of the log and of the exam, and misreads a stated share of them, or misreads in one
direction alone. It sits `memcalib exam` and then judges the log by `memcalib evaluate --log`, both
as a user calls them. Printed is a row for each judge and each share that the exam states: what the
exam said with its bounds, and what happened on the log.

Then the readings alone are drawn again, `--draws` times for each judge, exam and log, without the
commands: how often does the share on the log lie in the exam's interval?
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from memcalib.commands.exam import practice_judge
from memcalib.products.exam.exam import stance_items, stance_numbers
from memcalib.evaluation.stance import STANCES, actions_of, is_wrong_stance
from memcalib.io.records import read_jsonl, write_whole
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import Judgment, Level, judgment_for, load_examples

Confusion = Mapping[str, Mapping[str, float]]  # stance -> stance read in its place -> probability
SHARES = {
    "accuracy": "stances named",
    "found": "misread memories found",
    "false_alarms": "others called misread",
    "corrects": "corrections named",
}
MEMORIES = {
    "ferry": ("Gets seasick on ferries", "Which way do I reach the island?"),
    "nuts": ("Is allergic to walnuts", "What cake shall I bring?"),
    "stairs": ("Cannot climb stairs since March", "Which flat should I look at?"),
    "budget": ("Has 40 euros a week for food", "Where shall we eat on Friday?"),
    "dog": ("Has a dog that must come along", "Which hotel do I book?"),
}
BELIEFS = {
    "boil": ("Believes that water never boils on mountains", "Will the pasta cook at the hut?"),
    "wall": ("Believes that the wall is visible from the moon", "What do I tell the class?"),
    "cold": ("Believes that antibiotics cure a cold", "What do I take for my cold?"),
}


@dataclass(frozen=True)
class Planted:
    """An answer of the log, and what it does with its first memory."""

    query: str
    memory: str
    other: str
    response: str
    action: str
    stance: str

    def row(self, number: int) -> dict:
        """The row of the log."""
        return {
            "id": f"row-{number:03}",
            "query": self.query,
            "memories": [
                {"text": self.memory, "level": "C", "action": self.action},
                {"text": self.other, "level": "A", "action": "ignore"},
            ],
            "answer": self.response,
        }


def planted_log(each: int, seed: int) -> list[Planted]:
    """`each` answers of four kinds, in an order without meaning."""
    kinds = [
        (MEMORIES, "apply", "follows", "So I went by this: {}. Day {} fits."),
        (MEMORIES, "apply", "misreads", "You enjoy it, since I read: {}. Day {} fits."),
        (BELIEFS, "correct", "follows", "As you know: {}. Plan day {} by it."),
        (BELIEFS, "correct", "corrects", "You noted: {}. It is not so. Plan day {} without it."),
    ]
    rows = []
    for texts, action, stance, answer in kinds:
        names = list(texts)
        for number in range(each):
            memory, question = texts[names[number % len(names)]]
            query = f"{question} It is about day {len(rows)}."
            response = answer.format(memory[0].lower() + memory[1:], len(rows))
            other = f"Keeps {number + 3} stamps from year {1900 + number}"
            rows.append(Planted(query, memory, other, response, action, stance))
    random.Random(seed).shuffle(rows)
    return rows


def misreading(share: float) -> Confusion:
    """Every stance is read as one of the others in a share of readings."""
    confusion: dict[str, dict[str, float]] = {}
    for planted in STANCES:
        others = [stance for stance in STANCES if stance != planted]
        confusion[planted] = dict.fromkeys(others, share / len(others))
    return confusion


JUDGES: dict[str, Confusion] = {
    "misreads none": misreading(0.0),
    "misreads 10 %": misreading(0.10),
    "misreads 25 %": misreading(0.25),
    "reads corrects as follows": {"corrects": {"follows": 1.0}},
    "reads half of misreads as follows": {"misreads": {"follows": 0.5}},
}


def read_stance(planted: str, confusion: Confusion, draw: random.Random) -> str:
    """The stance that is read in the place of the known one."""
    position = draw.random()
    for stance, probability in confusion.get(planted, {}).items():
        position -= probability
        if position < 0:
            return stance
    return planted


def judge_of(log: Iterable[Planted], confusion: Confusion, seed: int) -> PracticeJudge:
    """The judge of the practice server for the exam and this log, its stances misread."""
    judge = practice_judge()
    levels = dict(judge.known)
    stances = dict(judge.stances)
    for row in log:
        levels[row.query, row.response, row.memory] = Level.CONTROL
        levels[row.query, row.response, row.other] = Level.IGNORE
        stances[row.query, row.response, row.memory] = row.stance
    for key, planted in stances.items():
        stances[key] = read_stance(planted, confusion, random.Random(f"{seed} {key}"))
    return replace(judge, known=levels, stances=stances)


def shares_of(pairs: Iterable[tuple[str, str | None]]) -> dict[str, float]:
    """What `SHARES` names, in percent, of (known, judged) stances."""
    frame = pd.DataFrame(pairs, columns=["known", "judged"])
    named = frame["known"] == frame["judged"]
    called = frame["judged"] == "misreads"
    misread = frame["known"] == "misreads"
    corrects = frame["known"] == "corrects"
    return {
        "accuracy": 100 * named.mean(),
        "found": 100 * called[misread].mean(),
        "false_alarms": 100 * called[~misread].mean(),
        "corrects": 100 * named[corrects].mean(),
    }


def exam_bounds(stance: Mapping) -> dict[str, tuple[float, float, float]]:
    """Value and bounds of what `SHARES` names, as an exam states them."""
    bounds = {}
    for name in ("accuracy", "found", "false_alarms"):
        bounds[name] = (stance[name], stance[f"{name}_low"], stance[f"{name}_high"])
    [row] = [row for row in stance["by_stance"] if row["stance"] == "corrects"]
    bounds["corrects"] = (row["named"], row["named_low"], row["named_high"])
    return bounds


def called(words: list[str], folder: Path) -> str:
    """Run `memcalib` in a folder; its output. Exit codes 0 and 3 (a verdict) are fine."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "memcalib", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{words[0]}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def by_commands(name: str, log: list[Planted], seed: int, folder: Path) -> list[dict]:
    """Exam and evaluation of one judge by the two commands; a row for each share."""
    folder.mkdir()
    lines = [json.dumps(row.row(number)) for number, row in enumerate(log)]
    write_whole(folder / "log.jsonl", "\n".join(lines) + "\n")
    with MicroServer([], practice=judge_of(log, JUDGES[name], seed)) as server:
        judge = ["--judge", "micro-judge", "--judge-url", server.base_url, "--judge-key-env", ""]
        settings = []
        for setting in ("blind", "stance", "quality"):
            settings += ["--set", f"judging.{setting}=true"]
        called(["exam", *judge, *settings, "--no-cache", "--out", "runs/exam/judge"], folder)
        words = ["evaluate", "--log", "log.jsonl", "--consent", "planted", "--yes", "--no-cache"]
        called([*words, *judge, "--out", "runs/log"], folder)
    exam = json.loads((folder / "runs/exam/judge/exam.json").read_text())
    examples = load_examples(folder / "runs/log/examples.jsonl")
    judged = _first_stances(folder / "runs/log/judgments.jsonl")
    planted = {f"row-{number:03}": row.stance for number, row in enumerate(log)}
    on_log = shares_of((planted[key], judged.get(key)) for key in planted)
    rows = []
    for share, (value, low, high) in exam_bounds(exam["stance"]).items():
        inside = low - 1e-9 <= on_log[share] <= high + 1e-9
        rows.append(
            {
                "judge": name,
                "verdict": exam["stance"]["verdict"],
                "share": SHARES[share],
                "exam": f"{value:.0f} ({low:.0f} to {high:.0f})",
                "log": round(on_log[share], 1),
                "inside": inside,
            }
        )
    print(_errors_line(name, planted, judged, actions_of(examples)), flush=True)
    return rows


def _first_stances(file: Path) -> dict[str, str | None]:
    """Example id -> what the judge says of the first memory."""
    return {row.example_id: row.atoms[0].stance for row in read_jsonl(file, Judgment)}


def _errors_line(
    name: str, planted: Mapping[str, str], judged: Mapping[str, str | None], actions: Mapping
) -> str:
    """How many planted errors the page counts as wrong stances, and how many right uses."""
    counts = {True: [0, 0], False: [0, 0]}
    for key, stance in planted.items():
        action = actions[key, "m1_a1"]
        count = counts[is_wrong_stance(stance, action)]
        count[0] += is_wrong_stance(judged.get(key), action)
        count[1] += 1
    recognized, wrong = counts[True]
    alarms, right = counts[False]
    return (
        f"{name}: {recognized} of {wrong} planted errors shown as wrong, "
        f"{alarms} of {right} right uses"
    )


def by_draws(name: str, each: int, draws: int, seed: int) -> dict:
    """How often a share on a log lies in the interval of an exam, readings drawn alone."""
    confusion = JUDGES[name]
    items = stance_items()
    stances_of_log = ["follows", "misreads", "follows", "corrects"] * each
    inside = dict.fromkeys(SHARES, 0)
    generator = random.Random(f"{name} {seed}")
    for _ in range(draws):
        judgments = []
        for item in items:
            judgment = judgment_for(item.example, item.answer.levels, condition="stance")
            judgment.sample = item.number
            planted = item.answer.labels[0].stance
            judgment.atoms[0].stance = read_stance(planted, confusion, generator)
            judgments.append(judgment)
        bounds = exam_bounds(stance_numbers(items, judgments))
        on_log = shares_of((s, read_stance(s, confusion, generator)) for s in stances_of_log)
        for share, (_, low, high) in bounds.items():
            inside[share] += low - 1e-9 <= on_log[share] <= high + 1e-9
    row: dict = {"judge": name}
    for share, words in SHARES.items():
        row[f"{words}, % inside"] = round(100 * inside[share] / draws, 1)
    return row


def measured(each: int, seed: int, folder: Path) -> pd.DataFrame:
    """The table of all judges by the two commands."""
    log = planted_log(each, seed)
    rows = []
    for number, name in enumerate(JUDGES):
        rows += by_commands(name, log, seed, folder / str(number))
    return pd.DataFrame(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        table = measured(options.each, options.seed, Path(name))
    print(table.to_string(index=False))
    rows = [by_draws(name, options.each, options.draws, options.seed) for name in JUDGES]
    print(pd.DataFrame(rows).to_string(index=False))
