"""Builds of the micro-world without a server: drafts at each stage,
and how often the check of a stage sees a mistake.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import pandas as pd

from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.dataset.sources import SourceRow
from memcalib.products.dataset.stages import Draft, Stage
from memcalib.products.dataset.writing import (
    DISTRACTORS,
    NATURALIZATION,
    RUBRICS,
    compose,
    make_plans,
)
from memcalib.inference.client import Form, read_form
from memcalib.products.micro.practice.builder import Json
from memcalib.products.micro.practice.mistakes import (
    ALTERATIONS,
    BUILD_TASKS,
    MistakeRates,
    SimulatedModel,
    altered,
)
from memcalib.products.micro.practice.source import read_facts

STAGES = (SCREENING, DERIVATION, ANNOTATION, DISTRACTORS, RUBRICS, NATURALIZATION)
ALTERABLE = {DERIVATION: "passages", ANNOTATION: "atoms", NATURALIZATION: "blocks"}


def payload_of(stage: Stage, draft: Draft) -> Json:
    """What a stage asks the builder for."""
    return json.loads(stage.messages(draft)[1]["content"])


def checked(stage: Stage, draft: Draft, reply: Json) -> tuple[Form, list[str]]:
    """The reply as the stage reads it, and the rules that it breaks."""
    form, complaints = read_form(json.dumps(reply), stage.reply)
    if complaints:
        return form, [rule for _, rule in complaints]
    return form, [fault.rule for fault in stage.check(draft, form)]


def planned(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts with the plan of their distractors."""
    plans = make_plans(drafts)
    with_plan = []
    for draft in drafts:
        notes = {"plan": plans[draft.id].model_dump(mode="json")}
        with_plan.append(draft.model_copy(update={"notes": notes}))
    return with_plan


def prepared(stage: Stage, drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts as they enter a stage: with a plan, or with blocks, where the stage needs them."""
    if stage is DISTRACTORS:
        return planned(drafts)
    if stage is NATURALIZATION:
        return [compose(draft) for draft in drafts]
    return list(drafts)


@dataclass(frozen=True)
class ExactBuild:
    """A build without mistakes: the drafts that enter each stage, by its name,
    and the finished ones.
    """

    entering: Mapping[str, list[Draft]]
    finished: list[Draft]


def exact_build(rows: Sequence[SourceRow]) -> ExactBuild:
    """Build all rows without a mistake; fails where a stage has something against a reply."""
    drafts = [Draft.start(row) for row in rows]
    entering = {}
    for stage in STAGES:
        drafts = prepared(stage, drafts)
        entering[stage.name] = drafts
        after_stage = []
        for draft in drafts:
            reply = BUILD_TASKS[stage.name].make(payload_of(stage, draft))
            form, rules = checked(stage, draft, reply)
            assert rules == [], (stage.name, draft.id, rules)
            after_stage.append(stage.accept(draft, form))
        drafts = after_stage
    return ExactBuild(entering, drafts)


def planted_replies(stage: Stage, drafts: Sequence[Draft], mistake: str, count: int) -> list:
    """At most `count` pairs of a draft and the reply with a mistake,
    for drafts where it can be made; "none" is the good reply.
    """
    rates = MistakeRates.only() if mistake == "none" else MistakeRates.only(**{mistake: 1.0})
    model = SimulatedModel("planted", rates)

    def pairs():
        for draft in drafts:
            payload = payload_of(stage, draft)
            reply = json.loads(model([("user", json.dumps(payload))]))
            if mistake == "none" or reply != BUILD_TASKS[stage.name].make(payload):
                yield draft, reply

    return list(islice(pairs(), count))


def stage_table(entering: Mapping[str, Sequence[Draft]], count: int = 40) -> pd.DataFrame:
    """For each mistake of each stage how often it was planted, at most `count` times, and how often
    the check of the stage saw it; "none" is a sound reply.
    """
    rows = []
    for stage in STAGES:
        for mistake in ("none", *BUILD_TASKS[stage.name].mistakes):
            replies = planted_replies(stage, entering[stage.name], mistake, count)
            noticed = sum(bool(checked(stage, draft, reply)[1]) for draft, reply in replies)
            row = {
                "stage": stage.name,
                "mistake": mistake,
                "planted": len(replies),
                "seen": noticed,
                "seen %": 100 * noticed / len(replies) if replies else float("nan"),
            }
            rows.append(row)
    return pd.DataFrame(rows).set_index(["stage", "mistake"])


def _with_altered_fact(reply: Json, list_name: str, kind: str, rng: random.Random) -> Json:
    """A reply that says one of its facts otherwise."""
    text_field = "memory_text" if list_name == "blocks" else "text"
    stated = []
    for i, entry in enumerate(reply[list_name]):
        stated.extend((i, fact) for fact in read_facts(entry[text_field]) if fact.attribute)
    i, fact = rng.choice(stated)
    entries = [dict(entry) for entry in reply[list_name]]
    entries[i][text_field] = altered(fact, entries[i][text_field], kind, rng)
    changed = dict(reply)
    changed[list_name] = entries
    return changed


def alteration_table(entering: Mapping[str, Sequence[Draft]], count: int = 40) -> pd.DataFrame:
    """For each kind of alteration and each stage that can say a fact otherwise,
    the percentage that its check sees.
    """
    columns = {}
    for stage, list_name in ALTERABLE.items():
        column = {}
        for kind in ALTERATIONS:
            rng = random.Random(kind)
            drafts = entering[stage.name][:count]
            noticed = 0
            for draft in drafts:
                sound_reply = BUILD_TASKS[stage.name].make(payload_of(stage, draft))
                reply = _with_altered_fact(sound_reply, list_name, kind, rng)
                if checked(stage, draft, reply)[1]:
                    noticed += 1
            column[kind] = 100 * noticed / len(drafts)
        columns[stage.name] = column
    return pd.DataFrame(columns)
