"""Source rows about hens, and a loopback server that plays the builder of a benchmark with them, mistakes included.

As a program it takes rows through the three first stages: `builder_server.py ADDRESS FOLDER CACHE ROWS`, one line of
output for each row settled.
"""

import asyncio
import json
import random
import sys
from collections import Counter

from aiohttp import web
from faulty_server import FaultyServer, completion

from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.dataset.stages import Draft
from memcalib.inference.endpoint import Endpoint
from memcalib.inference.client import Client, run_async
from memcalib.dataset.sources import SourceRow
from memcalib.dataset.stages import run_stage

FACTS = (
    ("My yard is {n} metres long.", "The user's yard is {n} metres long."),
    ("A fox came twice in May {y}.", "A fox came to the user twice in May {y}."),
    ("My neighbour complains about noise.", "The user's neighbour complains about noise."),
)
ASK = "Which hens should I buy?"
ANSWER = "Quiet breeds lay well. Lock them up at night, because foxes come back."
STAGES = (SCREENING, DERIVATION, ANNOTATION)


def source_row(i: int) -> SourceRow:
    facts = [fact.format(n=i + 10, y=2000 + i % 20) for fact, _ in FACTS]
    question = " ".join([*facts, ASK])
    return SourceRow(
        id=f"hens:{i}", source="hens", domain="general", question=question, answer=ANSWER
    )


def rows(count: int) -> list[Draft]:
    return [Draft.start(source_row(i)) for i in range(count)]


def screening(asked: dict, **changes) -> dict:
    good = {
        "question_completeness": ASK,
        "answer_relevance": "Quiet breeds",
        "answer_substance": "Lock them up",
        "memory_extractability": asked["question"].split(".")[0],
        "text_integrity": "A fox came",
        "plausibility": "foxes come back.",
    }
    points = {name: {"pass": True, "evidence": evidence} for name, evidence in good.items()}
    return {"dimensions": points | changes}


def derivation(asked: dict, query: str = ASK) -> dict:
    said = asked["question"].removesuffix(ASK).strip().split(". ")
    said = [part.rstrip(".") + "." for part in said]
    told = [
        part.replace("My ", "The user's ").replace("A fox came", "A fox came to the user")
        for part in said
    ]
    return {
        "query": query,
        "passages": [{"text": t, "evidence": s} for t, s in zip(told, said, strict=True)],
    }


def annotation(asked: dict, levels: str = "ACB") -> dict:
    atoms = []
    for passage, level in zip(asked["passages"], levels, strict=True):
        atom = {
            "passage": passage["index"],
            "text": passage["text"],
            "level": level,
            "reason": "so it is",
        }
        atom |= {"action": "ignore" if level == "A" else "apply", "without_memory": "Names breeds."}
        atom |= {
            "with_memory": "Names breeds."
            if level == "A"
            else f"Adds advice on {passage['index']}."
        }
        contract = (
            ("none", "")
            if level == "A"
            else (f"Advice on {passage['index']} is added.", "the advice")
        )
        atoms.append(
            atom | dict(zip(("observable_delta", "minimal_evidence"), contract, strict=True))
        )
    return {"atoms": atoms}


MAKE = {"screening": screening, "derivation": derivation, "annotation": annotation}


def good(messages: list[dict], seen: int = 0) -> str:
    """What a builder without mistakes replies."""
    asked = json.loads(messages[1]["content"])
    return json.dumps(MAKE[asked["task"]](asked))


def fallible(messages: list[dict], seen: int = 0) -> str:
    """A builder whose mistakes depend on the conversation alone: mended at once, mended late, never mended, or a verdict."""
    asked = json.loads(messages[1]["content"])
    turn = len(messages) // 2 - 1
    task = asked["task"]
    dice = random.Random(messages[1]["content"]).random()
    if dice < 0.1 and turn == 0:
        return "Certainly! Here it is."
    if dice < 0.2 and turn < 2:
        return json.dumps(MAKE[task](asked))[:-1]
    if dice < 0.25:
        return json.dumps(MAKE[task](asked) | {"remark": "none"})
    if dice < 0.4 and task == "screening":
        return json.dumps(screening(asked, plausibility={"pass": False, "evidence": ""}))
    if dice < 0.4 and task == "derivation" and turn == 0:
        return json.dumps(derivation(asked, query=f"My neighbour complains about noise. {ASK}"))
    if dice < 0.4 and task == "annotation":
        return json.dumps(annotation(asked, levels="AAA"))
    return json.dumps(MAKE[task](asked))


class Builder(FaultyServer):
    """Replies to each conversation as `answer(messages, number of requests so far)` says: a text, or (status, body)."""

    def __init__(self, answer=good, wait=lambda number: 0.0):
        super().__init__()
        self.answer = answer
        self.wait = wait

    async def _step(self, request):
        asked = await request.json()
        self.seen.append(asked)
        reply = self.answer(asked["messages"], len(self.seen))
        await asyncio.sleep(self.wait(len(self.seen)))
        if isinstance(reply, str):
            return web.json_response(
                completion(reply, usage=(len(str(asked["messages"])), len(reply)))
            )
        status, body = reply
        return web.json_response(body, status=status)

    @property
    def conversations(self) -> Counter:
        return Counter(json.dumps(asked["messages"]) for asked in self.seen)


async def build(client: Client, folder, drafts, stages=STAGES, on_row=None, **options) -> list:
    """The rows through stage after stage; the results."""
    results = []
    for stage in stages:
        results.append(await run_stage(stage, drafts, client, folder, on_row=on_row, **options))
        drafts = results[-1].stream()
    return results


def endpoint(url: str, **options) -> Endpoint:
    return Endpoint(
        model="builder", base_url=url, key_env="", **{"backoff": 0.01, "concurrency": 8} | options
    )


if __name__ == "__main__":
    url, folder, cache, count = sys.argv[1:]

    def show(row):
        return print(row.id, flush=True)

    run_async(build(Client(endpoint(url), cache), folder, rows(int(count)), on_row=show))
