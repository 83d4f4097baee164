"""What real weights say about localization, read from the traces of a training.

    python -m tools.localization RUN [--steps 1 5 10] [--csv FOLDER]

RUN is the folder of a training on the world in plain English whose recipe has `train.trace_every`
above 0. Four tables, by channel:

- `distances`: how far d reaches in a pair of answer and channel (its largest value, in nats), and
  how many pairs are localized;
- `thresholds`: the adaptive threshold at the first and the last traced step, its least and largest
  value, and the share of steps at which it stands above its floor;
- `words`: the share of credit on the words that carry the atom beside their share of the tokens,
  and how often the strongest token is one of them (top-1). For an atom that was used these are its
  own words; for one that was not used enough, other values of its attribute too;
- `sentences`: how often one of the three sentences with most credit is Key or Partial, beside the
  chance of that for three sentences drawn blindly, which is high in answers of few sentences.

Pairs without credit, and pairs whose answer has no carrying word, are counted and left out of the
shares.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from memcalib.credit.audit import AuditedPair, sentence_credit, top_hit
from memcalib.problem import CHANNELS, RIGHT_OR_OVER, UNDER, Example
from memcalib.products.micro.english import english_words, read_answer, sentence_roles
from memcalib.trainer.recipe import load_recipe, recipe_examples
from memcalib.trainer.trace_files import read_traces

QUANTILES = (0.1, 0.5, 0.9)


def attribute_of() -> dict[str, str]:
    """The attribute of each value of the world, defaults included."""
    found = {}
    for attribute, entry in english_words()["attributes"].items():
        found.update(dict.fromkeys([*entry["default"], *entry["values"]], attribute))
    return found


def carried(channel: str, example: Example, atom_ids: Iterable[str], response: str) -> list[tuple]:
    """The places of an answer, (start, end) in characters, whose words carry these atoms."""
    attributes = attribute_of()
    values = set()
    for atom_id in atom_ids:
        value = example.atom(atom_id).usage_rubric["marker"]["noun"]
        values.add(value)
        if channel in UNDER:
            values |= {name for name in attributes if attributes[name] == attributes[value]}
    _, mentions = read_answer(response)
    return [(m.start, m.end) for m in mentions if m.value in values]


def tokens_in(places: Sequence[tuple], ends: Sequence[int]) -> np.ndarray:
    """Which tokens overlap one of the places; `ends` are the tokens' ends in characters."""
    ends = np.asarray(ends)
    starts = np.concatenate([[0], ends[:-1]])
    inside = np.zeros(len(ends), dtype=bool)
    for start, end in places:
        inside |= (starts < end) & (ends > start)
    return inside


def sentence_numbers(response: str, ends: Sequence[int]) -> np.ndarray:
    """The number of the sentence in which each token begins."""
    sentences, _ = read_answer(response)
    limits = [sentence.end for sentence in sentences]
    starts = [0, *ends][: len(ends)]
    numbers = np.searchsorted(limits, starts, side="right")
    return np.minimum(numbers, max(len(limits) - 1, 0))


def pair_roles(channel: str, example: Example, atom_ids: Sequence[str], response: str) -> list[str]:
    """The role of each sentence for a pair: the strongest of those for its atoms."""
    strongest = []
    for sentence in sentence_roles(example, response):
        roles = sentence.violations if channel in UNDER else sentence.roles
        found = {roles[atom_id] for atom_id in atom_ids}
        best = next(role for role in ("key", "partial", "irrelevant") if role in found)
        strongest.append(best)
    return strongest


def chance_of_a_hit(sentences: int, with_role: int, top: int = 3) -> float:
    """How often `top` of so many sentences, drawn blindly, hold one of those with a role."""
    drawn = min(top, sentences)
    return 1 - comb(sentences - with_role, drawn) / comb(sentences, drawn)


class Measured(NamedTuple):
    """What one pair of answer and channel shows; None where it shows nothing."""

    channel: str
    peak: float  # the largest d, in nats
    localized: bool
    has_words: bool
    credit_on_words: float | None
    tokens_on_words: float | None
    top1: bool | None
    top3: bool | None
    chance3: float | None


def measured_pair(channel: str, pair: Mapping, answer: Mapping, example: Example) -> Measured:
    """The row of a channel in the traces, measured against its answer."""
    d = np.asarray(pair["d"], dtype=float)
    q = np.asarray(pair["q"], dtype=float)
    inside = tokens_in(
        carried(channel, example, pair["atom_ids"], answer["response"]), answer["ends"]
    )
    has_credit = bool(pair["localized"]) and q.sum() > 0
    on_words = has_credit and bool(inside.any())
    top3 = chance = None
    if has_credit:
        units = sentence_numbers(answer["response"], answer["ends"])
        tokens, credit = sentence_credit(q, units)
        roles = pair_roles(channel, example, pair["atom_ids"], answer["response"])[: len(credit)]
        top3 = top_hit(AuditedPair(channel, tokens, credit, roles)).hit
        with_role = sum(role != "irrelevant" for role in roles)
        chance = chance_of_a_hit(len(roles), with_role)
    return Measured(
        channel=channel,
        peak=float(d.max()) if len(d) else 0.0,
        localized=has_credit,
        has_words=bool(inside.any()),
        credit_on_words=float(q[inside].sum() / q.sum()) if on_words else None,
        tokens_on_words=float(inside.mean()) if on_words else None,
        top1=bool(inside[d.argmax()]) if on_words else None,
        top3=top3,
        chance3=chance,
    )


def measured_pairs(traces: pd.DataFrame, examples: Mapping[str, Example]) -> pd.DataFrame:
    """One row for each pair of the traces whose channel is one that is localized; raises
    `ValueError` for an answer to an example that is not given."""
    answers = traces[traces["channel"].isna()].set_index(["step", "row"])
    pairs = traces[traces["channel"].isin(RIGHT_OR_OVER + UNDER)]
    rows = []
    for pair in pairs.to_dict("records"):
        example = examples.get(pair["example_id"])
        if example is None:
            raise ValueError(
                f"step {pair['step']}, row {pair['row']}: found example {pair['example_id']!r}; "
                "allowed: an example of the run's recipe"
            )
        answer = answers.loc[(pair["step"], pair["row"])]
        rows.append(measured_pair(pair["channel"], pair, answer, example))
    return pd.DataFrame(rows, columns=Measured._fields)


def distances(measured: pd.DataFrame) -> pd.DataFrame:
    """Quantiles of the peaks of d by channel, and the share of pairs that are localized."""
    by_channel = measured.groupby("channel")
    table = by_channel["peak"].quantile(list(QUANTILES)).unstack()
    table.columns = [f"peak d, {quantile:.0%}" for quantile in QUANTILES]
    table.insert(0, "pairs", by_channel.size())
    table["localized %"] = 100 * by_channel["localized"].mean()
    return table


def thresholds(traces: pd.DataFrame) -> pd.DataFrame:
    """The adaptive thresholds by channel over the traced steps. The floor is the least value that
    any channel has at any step, which is where all begin."""
    pairs = traces[traces["channel"].isin(CHANNELS)].dropna(subset=["threshold"])
    by_step = pairs.groupby(["channel", "step"])["threshold"].first().unstack("step")
    floor = by_step.min().min()
    rows = {}
    for channel, values in by_step.iterrows():
        seen = values.dropna()
        above = 100 * np.mean(seen > floor * 1.001)
        rows[channel] = (seen.iloc[0], seen.iloc[-1], seen.min(), seen.max(), above)
    columns = ["first", "last", "least", "largest", "steps above the floor %"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def words(measured: pd.DataFrame) -> pd.DataFrame:
    """Credit on the carrying words by channel, beside their share of the tokens, and top-1."""
    said = measured.dropna(subset=["credit_on_words"])
    by_channel = said.groupby("channel")
    table = pd.DataFrame(
        {
            "pairs": measured.groupby("channel").size(),
            "with credit": measured.groupby("channel")["localized"].sum(),
            "and words": by_channel.size(),
            "credit on words %": 100 * by_channel["credit_on_words"].mean(),
            "if uniform %": 100 * by_channel["tokens_on_words"].mean(),
            "top-1 %": 100 * by_channel["top1"].apply(lambda hits: np.mean(hits.astype(float))),
        }
    )
    return table.fillna({"and words": 0})


def sentences(measured: pd.DataFrame) -> pd.DataFrame:
    """Top-3 sentence hits by channel, beside chance."""
    credited = measured[measured["localized"]]
    by_channel = credited.groupby("channel")
    hits = by_channel["top3"].apply(lambda found: np.mean(found.astype(float)))
    return pd.DataFrame(
        {
            "pairs": by_channel.size(),
            "top-3 hits %": 100 * hits,
            "by chance %": 100 * by_channel["chance3"].mean(),
        }
    )


def tables(traces: pd.DataFrame, examples: Mapping[str, Example]) -> dict[str, pd.DataFrame]:
    """All four tables by name, their channels in the paper's order."""
    measured = measured_pairs(traces, examples)
    if measured.empty:
        raise ValueError("the traces hold no pair of a channel; allowed: those of a credited run")
    found = {
        "distances": distances(measured),
        "thresholds": thresholds(traces),
        "words": words(measured),
        "sentences": sentences(measured),
    }
    return {
        name: table.reindex([channel for channel in CHANNELS if channel in table.index])
        for name, table in found.items()
    }


def examples_of(run: Path) -> dict[str, Example]:
    """The training examples of a run by id, drawn again from its recipe."""
    recipe = load_recipe(run / "recipe.yaml")
    return {example.id: example for example in recipe_examples(recipe).train}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a training with traces")
    parser.add_argument("--steps", type=int, nargs="+", help="of the traced steps only these")
    parser.add_argument("--csv", type=Path, help="a folder for the tables, one file each")
    options = parser.parse_args()
    try:
        traces = read_traces(options.run, options.steps)
        found = tables(traces, examples_of(options.run))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, table in found.items():
        print(f"{name}\n{table.round(3).to_string()}\n")
        if options.csv:
            options.csv.mkdir(parents=True, exist_ok=True)
            table.to_csv(options.csv / f"{name}.csv", index_label="channel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
