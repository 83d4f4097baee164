"""Sound replies of a builder that is asked for distractors, rubrics and paragraphs,
and rows to ask about.
"""

import json

import builder_server

from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.shared.grounding import content_words
from memcalib.products.dataset.writing import DISTRACTORS, RUBRICS
from memcalib.products.dataset.stages import Draft, DraftAtom
from memcalib.products.dataset.writing import make_plans
from memcalib.products.dataset.writing import PlanConfig

HARD = {
    "same_user": "The user keeps a diary of every sunrise.",
    "near_topic": "The user once read a novel in which hens speak Latin.",
    "other_person": "The user's cousin Olga breeds silent ducks.",
    "other_occasion": "For the village fete the user needs cardboard cockerels.",
    "outdated": "The user used to keep geese and sold them all.",
    "belief_as_evidence": "The user has heard that roosters predict thunder.",
    "scope_overreach": "In the choir hall the user wants feathers only.",
    "superseded_preference": "The user once preferred brown eggs and has given that up since.",
    "style_neighbour": "The user wants the village newsletter in rhymes.",
    "trigger_absent": "Whenever the circus is in town, the user wants a coop with wheels.",
}
VERBS = (
    "sketched",
    "described",
    "remembered",
    "photographed",
    "mentioned",
    "dreamed of",
    "wrote down",
    "asked about",
)


def distractors(request: dict) -> dict:
    """One sentence for each: noise holds its phrases, the others go on about the first words of
    their block.
    """
    atoms = []
    task = request["want"]
    hard_text = HARD[task["family"]]
    for i, noise in enumerate(task["noise"]):
        text = f"The user {VERBS[i % len(VERBS)]} {', then '.join(noise['phrases'])}."
        atoms.append({"atom_id": noise["atom_id"], "text": text})
    for block in task["blocks"]:
        texts = []
        for atom in block["atoms"]:
            texts.append(hard_text if atom["atom_id"] == "hard" else atom["text"])
        for auxiliary in block["write"]:
            number = len(atoms)
            verb = VERBS[number % len(VERBS)]
            subject = " and ".join(content_words(texts[number % len(texts)])[:2])
            text = (
                f"The user {verb} {subject} to postman {number + 40}, {number + 60} snails and a "
                "kite."
            )
            atoms.append({"atom_id": auxiliary["atom_id"], "text": text})
    hard = {"text": hard_text, "why_tempting": "It sounds related."}
    return {"hard": hard, "others": atoms}


def rubric(level: str, text: str) -> dict:
    used = {
        "A": "No sentence is there because of this",
        "B": "A remark rests on this",
        "C": "The plan rests on this",
    }
    under = "Not applicable." if level == "A" else f"The answer passes over this: {text}"
    return {
        "expected_answer_behavior": f"{used[level]}: {text}",
        "memory_usage_weight": {"A": "none", "B": "supporting", "C": "controlling"}[level],
        "validity_scope": "The whole request.",
        "correct_use": f"{used[level]}: {text}",
        "under_use": under,
        "over_use": f"The answer speaks of nothing else than this: {text}",
        "forbidden_memory_role": "A reason to refuse.",
        "failure_direction": "Too much.",
        "observable_checks": [f"One sentence repeats: {text}"],
    }


def rubrics(request: dict) -> dict:
    rows = []
    for atom in request["atoms"]:
        usage_rubric = rubric(atom["level"], atom["text"])
        rows.append({"atom_id": atom["atom_id"], "usage_rubric": usage_rubric})
    return {"rubrics": rows}


def naturalization(request: dict) -> dict:
    blocks = []
    for block in request["blocks"]:
        memory_text = " ".join(block["atoms"])
        blocks.append({"block_id": block["block_id"], "memory_text": memory_text})
    return {"blocks": blocks}


builder_server.MAKE["distractors"] = distractors
builder_server.MAKE["rubrics"] = rubrics
builder_server.MAKE["naturalization"] = naturalization

FACTS = (
    ("p1_a1", "The user's yard is 12 metres long.", "A"),
    ("p2_a1", "A fox came to the user twice in May 2003.", "C"),
    ("p3_a1", "The user's neighbour complains about noise.", "B"),
)
COUNTS = PlanConfig(blocks={4: 1}, difficulty={2: 1}, largest={2: {4: 1}}, atoms=(8, 63))


def planned(family: str = "other_person", i: int = 0) -> Draft:
    """A row with atoms and a plan."""
    atoms = [
        DraftAtom(
            atom_id=name,
            text=text,
            ideal=level,
            origin="grounded",
            passage=n,
            without_memory="a",
            with_memory="b",
        )
        for n, (name, text, level) in enumerate(FACTS, 1)
    ]
    draft = Draft(
        id=f"hens:{i}",
        domain="general",
        question=builder_server.ASK,
        query=builder_server.ASK,
        atoms=atoms,
    )
    plan = make_plans([draft], COUNTS.model_copy(update={"families": (family,)}))[draft.id]
    return draft.model_copy(update={"notes": {"plan": plan.model_dump(mode="json")}})


def asked_of(stage, draft: Draft) -> dict:
    """The data of a stage's first message."""
    return json.loads(stage.messages(draft)[1]["content"])


def sound_reply(stage, draft: Draft) -> dict:
    """The reply of a builder without mistakes."""
    reply = builder_server.MAKE[stage.name]
    return reply(asked_of(stage, draft))


def done(stage, draft: Draft) -> Draft:
    """The row after a stage with a builder without mistakes."""
    reply = stage.reply.model_validate(sound_reply(stage, draft))
    assert stage.check(draft, reply) == []
    return stage.accept(draft, reply)


FIRST_STAGES = (SCREENING, DERIVATION, ANNOTATION)
CLUTTERED = done(DISTRACTORS, planned())
RATED = done(RUBRICS, CLUTTERED)
