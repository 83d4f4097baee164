"""Source rows about hens, and a loopback server that plays the builder of a benchmark with them,
mistakes included.

As a program it takes rows through the three first stages:
`builder_server.py ADDRESS FOLDER CACHE ROWS`, one line of output for each row settled.
"""

import asyncio
import json
import random
import sys
from collections import Counter

from aiohttp import web
from faulty_server import FaultyServer, completion

from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.dataset.stages import Draft
from memcalib.inference.endpoint import Endpoint
from memcalib.inference.client import Client, run_async
from memcalib.products.dataset.sources import SourceRow
from memcalib.products.dataset.stages import run_stage

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


def screening(request: dict, **changes) -> dict:
    evidence_of = {
        "question_completeness": ASK,
        "answer_relevance": "Quiet breeds",
        "answer_substance": "Lock them up",
        "memory_extractability": request["question"].split(".")[0],
        "text_integrity": "A fox came",
        "plausibility": "foxes come back.",
    }
    dimensions = {name: {"pass": True, "evidence": text} for name, text in evidence_of.items()}
    dimensions.update(changes)
    return {"dimensions": dimensions}


def derivation(request: dict, query: str = ASK) -> dict:
    passages = []
    for sentence in request["question"].removesuffix(ASK).strip().split(". "):
        evidence = sentence.rstrip(".") + "."
        text = evidence.replace("My ", "The user's ")
        text = text.replace("A fox came", "A fox came to the user")
        passages.append({"text": text, "evidence": evidence})
    return {"query": query, "passages": passages}


def annotation(request: dict, levels: str = "ACB") -> dict:
    atoms = []
    for passage, level in zip(request["passages"], levels, strict=True):
        atom = {"passage": passage["index"], "text": passage["text"], "level": level}
        atom["reason"] = "so it is"
        atom["without_memory"] = "Names breeds."
        if level == "A":
            atom["action"] = "ignore"
            atom["with_memory"] = "Names breeds."
            atom["observable_delta"] = "none"
            atom["minimal_evidence"] = ""
        else:
            atom["action"] = "apply"
            atom["with_memory"] = f"Adds advice on {passage['index']}."
            atom["observable_delta"] = f"Advice on {passage['index']} is added."
            atom["minimal_evidence"] = "the advice"
        atoms.append(atom)
    return {"atoms": atoms}


MAKE = {"screening": screening, "derivation": derivation, "annotation": annotation}


def good(messages: list[dict], requests_so_far: int = 0) -> str:
    """What a builder without mistakes replies."""
    request = json.loads(messages[1]["content"])
    return json.dumps(MAKE[request["task"]](request))


def fallible(messages: list[dict], requests_so_far: int = 0) -> str:
    """A builder whose mistakes depend on the conversation alone:
    repaired at once, repaired late, never repaired, or a verdict.
    """
    request = json.loads(messages[1]["content"])
    turn = len(messages) // 2 - 1
    task = request["task"]
    reply = MAKE[task](request)
    number = random.Random(messages[1]["content"]).random()
    if number < 0.1 and turn == 0:
        return "Certainly! Here it is."
    if number < 0.2 and turn < 2:
        return json.dumps(reply)[:-1]
    if number < 0.25:
        reply.popitem()
    elif number < 0.4 and task == "screening":
        reply = screening(request, plausibility={"pass": False, "evidence": ""})
    elif number < 0.4 and task == "derivation" and turn == 0:
        reply = derivation(request, query=f"My neighbour complains about noise. {ASK}")
    elif number < 0.4 and task == "annotation":
        reply = annotation(request, levels="AAA")
    return json.dumps(reply)


class Builder(FaultyServer):
    """Replies to each conversation as `answer(messages, number of requests so far)` says:
    a text, or (status, body).
    """

    def __init__(self, answer=good, wait=lambda number: 0.0):
        super().__init__()
        self.answer = answer
        self.wait = wait

    async def _step(self, request):
        body = await request.json()
        messages = body["messages"]
        self.requests.append(body)
        reply = self.answer(messages, len(self.requests))
        await asyncio.sleep(self.wait(len(self.requests)))
        if isinstance(reply, str):
            usage = (len(str(messages)), len(reply))
            return web.json_response(completion(reply, usage=usage))
        status, error = reply
        return web.json_response(error, status=status)

    @property
    def conversations(self) -> Counter:
        return Counter(json.dumps(body["messages"]) for body in self.requests)


async def build(client: Client, folder, drafts, stages=STAGES, on_row=None, **options) -> list:
    """The rows through stage after stage; the results."""
    results = []
    for stage in stages:
        results.append(await run_stage(stage, drafts, client, folder, on_row=on_row, **options))
        drafts = results[-1].stream()
    return results


def endpoint(url: str, **options) -> Endpoint:
    fields = {"backoff": 0.01, "concurrency": 8}
    fields.update(options)
    return Endpoint(model="builder", base_url=url, key_env="", **fields)


if __name__ == "__main__":
    url, folder, cache, count = sys.argv[1:]

    def show(row):
        print(row.id, flush=True)

    run_async(build(Client(endpoint(url), cache), folder, rows(int(count)), on_row=show))
