"""The review: what counts as an approval, two reviewers, killed and resumed, and every way a reviewer can fail."""

import json
import random
from collections import Counter

import pytest
from faulty_server import FaultyServer, completion
from hypothesis import given
from hypothesis import strategies as st
from invented_rows import invented_examples
from planted_defects import DEFECTS, plant

from memcalib.dataset.writing import NATURALIZATION, compose, to_example
from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.dataset.writing import DISTRACTORS, RUBRICS
from memcalib.dataset.stages import Draft, DraftAtom, DraftBlock, Drop
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.dataset.lint import lint_example
from memcalib.inference.client import Client, Reply
from memcalib.practice.builder import as_reviewed, find_flaws, micro_roles
from memcalib.practice.server import MicroServer
from memcalib.practice.source import source_rows
from memcalib.inference.client import run_async
from memcalib.dataset.writing import plan_rows
from memcalib.inference.client import read_form
from memcalib.dataset.review import (
    ASKED,
    PARTS,
    REJECTED,
    Opinion,
    ReviewReply,
    agreement_counts,
    check_drafts,
    check_review,
    error_rules,
    join_reviews,
    merge_reviews,
    objections_of,
    opinions,
    review_drafts,
    ask_review,
    asked_of,
    review_stage,
)
from memcalib.dataset.stages import StageError, run_stage
from memcalib.dataset.lint import LINTS


def as_draft(example):
    def contract(a):
        return {
            name.removesuffix("_behavior"): text
            for name, text in a.model_extra.get("counterfactual_contract", {}).items()
        }

    atoms = [
        DraftAtom(**(a.model_dump() | {"rubric": a.usage_rubric} | contract(a)))
        for a in example.atoms
    ]
    texts = [(b.parent_memory_id, b.atom_ids, b.memory_text) for b in example.blocks]
    blocks = [
        DraftBlock(parent_memory_id=name, atom_ids=ids, memory_text=text)
        for name, ids, text in texts
    ]
    head = {
        "id": example.id,
        "domain": example.domain,
        "question": example.raw_query,
        "query": example.question,
    }
    return Draft(**head, atoms=atoms, blocks=blocks)


DRAFTS = [
    as_draft(example)
    for example in invented_examples(30, seed=12)
    if not lint_example(example, error_rules())
]
DRAFT = DRAFTS[0]
ATOMS = [atom.atom_id for atom in DRAFT.atoms]
OWN = [atom.atom_id for atom in DRAFT.atoms if atom.origin == "grounded"]
BLOCKS = [block.parent_memory_id for block in DRAFT.blocks]


def said(draft, **changes):
    """An approving reply as plain data."""

    def verdict(name):
        return {"atom_id": name, "ok": True, "why": ""}

    fine = {"ok": True, "why": ""}
    good = {
        "distinct": fine | {"ids": []},
        "query": {"excludes_memory": True, "answerable": True, "why": ""},
        "blocks": [
            {"block_id": b.parent_memory_id, "complete": True, "adds_nothing": True, "why": ""}
            for b in draft.blocks
        ],
        "safety": fine | {"ids": []},
        "fit": fine,
    } | {part: [verdict(name) for name in asked_of(draft, part)] for part in ASKED}
    return good | changes


def reply(**changes):
    return ReviewReply.model_validate(said(DRAFT, **changes))


class Scripted(Client):
    """A client whose model is a function from (draft, number of the try) to a reply, a text or an error."""

    def __init__(self, play, name="scripted", drafts=DRAFTS):
        super().__init__(Endpoint(model=name, base_url="http://127.0.0.1:1/v1", key_env=""))
        self.play = play
        self.asked = []
        self.tries = Counter()
        self.drafts = {ask_review(d)["example"]["query"] + d.atoms[0].text: d for d in drafts}

    async def ask(self, messages, **settings):
        example = json.loads(messages[1]["content"])["example"]
        draft = self.drafts[example["query"] + example["atoms"][0]["text"]]
        self.asked.append((draft.id, messages, settings))
        self.tries[draft.id] += 1
        found = self.play(draft, self.tries[draft.id])
        if isinstance(found, Exception):
            raise found
        return Reply(
            found if isinstance(found, str) else json.dumps(found), "stop", {"prompt_tokens": 7.0}
        )


def approve(draft, _):
    return said(draft)


def objecting(*ids, part="levels", why="It is another level."):
    def play(draft, _):
        found = said(draft)
        if draft.id in ids:
            found[part][0] |= {"ok": False, "why": why}
        return found

    return play


def review(drafts, one, two, folder):
    return run_async(review_drafts(drafts, [one, two], folder))


# Deterministic checks -----------------------------------------------------------------------------------------------------


def test_sound_drafts_pass_the_checks():
    kept, lost, found = check_drafts(DRAFTS)
    assert kept == DRAFTS and lost == [] and found.rows == len(DRAFTS)


NOT_IN_A_DRAFT = ("other_parent", "empty_text", "other_split")
COSTLY = [
    n for n, d in DEFECTS.items() if LINTS[d.check].severity == "error" and n not in NOT_IN_A_DRAFT
]


@pytest.mark.parametrize("name", COSTLY)
def test_a_draft_with_a_defect_is_dropped_under_the_name_of_its_check(name):
    rng = random.Random(name)
    spoiled = next(
        s
        for s in (plant(to_example(d), name, rng) for d in DRAFTS)
        if s and DEFECTS[name].check in _rules(s)
    )
    draft = as_draft(spoiled)
    kept, lost, _ = check_drafts([DRAFTS[1], draft])
    assert kept == [DRAFTS[1]] and lost[0].stage == "checks" and lost[0].id == draft.id
    assert DEFECTS[name].check in (
        lost[0].reason,
        *(part.split(",")[0] for part in lost[0].detail.split("; ")),
    )


def _rules(example):
    return {finding.rule for finding in lint_example(example)}


def test_warnings_cost_no_row():
    rng = random.Random(0)
    spoiled = plant(to_example(DRAFTS[2]), "strange_identifiers", rng)
    kept, lost, found = check_drafts([as_draft(spoiled)])
    assert (
        len(kept) == 1
        and lost == []
        and [f.rule for f in found.findings if f.rule == "rubric_identifiers"]
    )


def test_a_draft_that_is_no_example_is_a_loss_and_no_crash():
    bad = [
        DRAFT.model_copy(update={"blocks": []}),
        DRAFTS[1].model_copy(update={"blocks": DRAFTS[1].blocks[1:]}),
        DRAFTS[2].model_copy(update={"query": "  "}),
        DRAFTS[3].model_copy(
            update={"blocks": [b.model_copy(update={"memory_text": ""}) for b in DRAFTS[3].blocks]}
        ),
    ]
    kept, lost, _ = check_drafts([*bad, DRAFTS[4]])
    assert (
        kept == [DRAFTS[4]] and {drop.reason for drop in lost} == {"structure"} and len(lost) == 4
    )


def test_one_id_twice_is_found():
    kept, lost, _ = check_drafts([DRAFT, DRAFTS[1], DRAFT])
    assert kept == [DRAFTS[1]] and {drop.reason for drop in lost} == {"unique_ids"}


def test_rules_can_be_chosen():
    rng = random.Random(0)
    spoiled = as_draft(plant(to_example(DRAFTS[2]), "told_verbatim", rng))
    assert check_drafts([spoiled], ["first_person"])[1] == []
    assert check_drafts([spoiled], ["question_leak"])[1][0].reason == "question_leak"
    with pytest.raises(ValueError, match="allowed are structure"):
        check_drafts([spoiled], ["typo"])


# One review ---------------------------------------------------------------------------------------------------------------


def test_a_reviewer_sees_what_the_paper_lists_and_no_more():
    system, user = review_stage("review-1").messages(DRAFT)
    asked = json.loads(user["content"])
    assert asked["task"] == "review" and set(asked["example"]) == {
        "domain",
        "query",
        "source",
        "blocks",
        "atoms",
    }
    view = as_reviewed(to_example(DRAFT))
    assert {a["atom_id"]: a for a in asked["example"]["atoms"]} == {
        a["atom_id"]: a for a in view["atoms"]
    }
    assert (
        asked["example"]["blocks"] == view["blocks"] and asked["example"]["query"] == view["query"]
    )
    assert all(f"`{name}`" in system["content"] for name in ReviewReply.model_fields)
    assert "adds_nothing" in system["content"] and asked["example"]["domain"] == DRAFT.domain
    used = next(atom for atom in asked["example"]["atoms"] if atom["level"] != "A")
    assert (
        used["action"] == "apply"
        and used["observable_delta"]
        and used["without_memory"] != used["with_memory"]
    )


def test_each_part_is_asked_of_its_atoms():
    hard = next(atom for atom in DRAFT.atoms if atom.origin == "hard")
    named = hard.model_copy(update={"hard_a_family": "outdated"})
    draft = DRAFT.model_copy(
        update={"atoms": [named if atom is hard else atom for atom in DRAFT.atoms]}
    )
    used = [atom.atom_id for atom in DRAFT.atoms if atom.ideal]
    assert asked_of(draft, "actions") == asked_of(draft, "contrasts") == used
    assert asked_of(draft, "families") == [hard.atom_id] and asked_of(DRAFT, "families") == []
    bare = [atom.model_copy(update={"with_memory": ""}) for atom in DRAFT.atoms]
    assert asked_of(DRAFT.model_copy(update={"atoms": bare}), "contrasts") == []


def test_an_approving_reply_has_no_fault_and_no_issue():
    assert check_review(DRAFT, reply()) == [] and objections_of(reply()) == []


def test_a_verdict_of_the_model_itself_changes_nothing():
    approving = said(DRAFT) | {"verdict": "reject", "score": 2}
    objections = said(DRAFT)
    objections["levels"][0] |= {"ok": False, "why": "No."}
    found, complaints = read_form(json.dumps(approving), ReviewReply)
    assert complaints == [] and objections_of(found) == []
    found, _ = read_form(json.dumps(objections | {"verdict": "accept"}), ReviewReply)
    assert len(objections_of(found)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"levels": None},
        {"query": {"excludes_memory": "yes", "answerable": True, "why": ""}},
        {"distinct": {"ok": True, "why": ""}},
        {
            "blocks": [
                {"block_id": "m1", "complete": True, "adds_nothing": True, "why": "", "extra": 1}
            ]
        },
        {"rubrics": [{"atom_id": "p1_a1", "ok": 1, "why": ""}]},
    ],
)
def test_a_reply_of_another_form_is_not_read(change):
    assert read_form(json.dumps(said(DRAFT) | change), ReviewReply)[0] is None


def verdict(name, ok=True, why=""):
    return {"atom_id": name, "ok": ok, "why": why}


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"levels": [verdict(n) for n in ATOMS[1:]]}, {"missing verdict in levels"}),
        ({"levels": [verdict(n) for n in [*ATOMS, ATOMS[0]]]}, {"repeated verdict in levels"}),
        ({"rubrics": [verdict(n) for n in [*ATOMS, "zz"]]}, {"unknown verdict in rubrics"}),
        ({"faithful": [verdict(n) for n in ATOMS]}, {"unknown verdict in faithful"}),
        ({"faithful": []}, {"missing verdict in faithful"}),
        ({"blocks": []}, {"missing verdict in blocks"}),
        ({"levels": [verdict(n, n != ATOMS[0], " ") for n in ATOMS]}, {"no reason"}),
        ({"query": {"excludes_memory": False, "answerable": True, "why": ""}}, {"no reason"}),
        ({"distinct": {"ok": False, "why": "Two alike.", "ids": []}}, {"no atom named"}),
        ({"distinct": {"ok": False, "why": "Two alike.", "ids": ["zz"]}}, {"unknown atom"}),
        ({"distinct": {"ok": False, "why": "", "ids": ATOMS[:2]}}, {"no reason"}),
        ({"distinct": {"ok": False, "why": "Alike.", "ids": ATOMS[:2]}}, set()),
        ({"safety": {"ok": False, "why": "Harm.", "ids": []}}, {"no atom named"}),
        ({"safety": {"ok": False, "why": "Harm.", "ids": ["zz"]}}, {"unknown atom"}),
        ({"fit": {"ok": False, "why": " "}}, {"no reason"}),
        ({"actions": []}, {"missing verdict in actions"}),
        ({"contrasts": [verdict(n) for n in ATOMS]}, {"unknown verdict in contrasts"}),
    ],
)
def test_faults_of_a_reply(change, rules):
    assert {fault.rule for fault in check_review(DRAFT, reply(**change))} == rules


choices = st.sets(
    st.sampled_from([(part, name) for part in PARTS for name in (ATOMS[0], ATOMS[1], "x")])
)


@given(choices)
def test_the_verdict_is_the_and_of_all_parts(chosen):
    """Issues against a slow reading: one for each question answered in the negative."""
    flags = {part: {name for p, name in chosen if p == part and name != "x"} for part in PARTS}
    blocks = BLOCKS[:1]
    change = {
        part: [verdict(n, n not in flags[part], "No.") for n in asked_of(DRAFT, part)]
        for part in ASKED
    }
    for part in ("distinct", "safety"):
        change[part] = {"ok": not flags[part], "why": "No.", "ids": sorted(flags[part])}
    change["fit"] = {"ok": not flags["fit"], "why": "No."}
    change["query"] = {
        "excludes_memory": not flags["excludes memory"],
        "answerable": not flags["answerable"],
        "why": "No.",
    }
    change["blocks"] = [
        {
            "block_id": b,
            "complete": not (flags["complete"] and b in blocks),
            "adds_nothing": not (flags["adds nothing"] and b in blocks),
            "why": "No.",
        }
        for b in BLOCKS
    ]
    found = reply(**change)
    wanted = {(p, n) for p in ASKED for n in flags[p] & {*asked_of(DRAFT, p)}}
    wanted |= {(p, n) for p in ("distinct", "safety") for n in flags[p]} | {
        ("fit", "row") for _ in flags["fit"]
    }
    wanted |= {(p, "query") for p in ("excludes memory", "answerable") if flags[p]}
    wanted |= {(p, blocks[0]) for p in ("complete", "adds nothing") if flags[p]}
    assert check_review(DRAFT, found) == []
    assert {(i.part, i.item) for i in objections_of(found)} == wanted and [
        PARTS.index(i.part) for i in objections_of(found)
    ] == sorted(PARTS.index(i.part) for i in objections_of(found))
    outcome = review_stage("r").accept(DRAFT, found)
    assert (outcome is DRAFT) == (not wanted)
    if wanted:
        assert (
            isinstance(outcome, Drop)
            and outcome.reason == REJECTED
            and len(outcome.issues) == len(wanted)
        )


def test_merging_takes_the_named_items_alone():
    first = reply(levels=[verdict(n, n != ATOMS[1], " ") for n in ATOMS[:-1]])
    repaired = reply(
        levels=[
            verdict(ATOMS[1], False, "It is B."),
            verdict(ATOMS[-1]),
            verdict(ATOMS[0], False, "Changed unasked."),
        ],
        query={"excludes_memory": False, "answerable": True, "why": "Changed unasked."},
    )
    merged = merge_reviews(first, repaired, {ATOMS[1], ATOMS[-1]})
    assert check_review(DRAFT, merged) == [] and [
        (i.part, i.item, i.why) for i in objections_of(merged)
    ] == [("levels", ATOMS[1], "It is B.")]
    assert merge_reviews(first, repaired, {"query"}).query == repaired.query


def test_a_faulty_reply_is_repaired_for_its_items(tmp_path):
    def play(draft, tries):
        found = said(draft)
        return (
            found | {"rubrics": found["rubrics"][1:]}
            if tries == 1
            else found | {"rubrics": found["rubrics"][:1], "levels": []}
        )

    client = Scripted(play)
    result = run_async(run_stage(review_stage("review-1"), [DRAFT], client, tmp_path))
    assert len(result.kept) == 1 and result.calls == 2
    asked = json.loads(client.asked[1][1][-1]["content"])
    assert [fault["id"] for fault in asked["repair"]] == [ATOMS[0]] and asked[
        "send"
    ] == "the named items alone"
    assert client.asked[0][2]["temperature"] == 0.0


# Two reviews --------------------------------------------------------------------------------------------------------------


def test_a_row_needs_both_approvals(tmp_path):
    a, b, c, d = (draft.id for draft in DRAFTS[:4])
    one = Scripted(objecting(a, b), "one")
    two = Scripted(objecting(b, c, part="rubrics", why="Vague."), "two")
    result = review(DRAFTS[:4], one, two, tmp_path)
    assert [draft.id for draft in result.accepted] == [d]
    lost = {drop.id: drop for drop in result.dropped}
    assert {name: (drop.stage, drop.reason, drop.reviewers) for name, drop in lost.items()} == {
        a: ("review", "levels", ["review-1"]),
        b: ("review", "levels", ["review-1", "review-2"]),
        c: ("review", "rubrics", ["review-2"]),
    }
    assert (
        "review-1: levels" in lost[b].detail
        and "review-2: rubrics" in lost[b].detail
        and "Vague." in lost[b].detail
    )
    assert (
        result.accepted[0].notes["review-1"]["model"] == "one"
        and result.accepted[0].notes["review-2"]["model"] == "two"
    )
    assert {name for name, _, _ in one.asked} == {name for name, _, _ in two.asked} == {a, b, c, d}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_agreement_agrees_with_a_slow_count(pairs):
    first = {i for i, (x, _) in enumerate(pairs) if x}
    second = {i for i, (_, y) in enumerate(pairs) if y}
    found = agreement_counts(len(pairs), first, second)
    n = len(pairs)
    assert found["judged"] == n and found["both object"] == sum(x and y for x, y in pairs)
    if n:
        same = sum(x == y for x, y in pairs) / n
        assert found["agree %"] == pytest.approx(100 * same)
        chance = sum(
            (sum(x == v for x, _ in pairs) / n) * (sum(y == v for _, y in pairs) / n)
            for v in (True, False)
        )
        if chance < 1:
            assert found["kappa"] == pytest.approx((same - chance) / (1 - chance))
        else:
            assert found["kappa"] != found["kappa"]


def test_agreement_counts_questions_of_rows_that_both_judged(tmp_path):
    a, b, c = (draft.id for draft in DRAFTS[:3])

    def lost(draft, tries):
        return (
            CallError("server", "no answer", 500) if draft.id == c else objecting(a)(draft, tries)
        )

    result = review(DRAFTS[:3], Scripted(lost, "one"), Scripted(objecting(a, b), "two"), tmp_path)
    table = result.agreement()
    both = DRAFTS[:2]
    assert (
        table.loc["rows", "judged"] == 2
        and table.loc["rows", "both object"] == 1
        and table.loc["rows", "agree %"] == 50
    )
    assert table.loc["levels", "judged"] == sum(len(draft.atoms) for draft in both)
    assert table.loc["complete", "judged"] == sum(len(draft.blocks) for draft in both)
    assert table.loc["excludes memory", "judged"] == 2


def test_a_missing_review_is_neither_approval_nor_objection(tmp_path):
    a, b, c = (draft.id for draft in DRAFTS[:3])

    def play(draft, _):
        return {a: CallError("server", "no answer", 500), b: "not json"}.get(draft.id) or said(
            draft
        )

    result = review(DRAFTS[:3], Scripted(play, "one"), Scripted(approve, "two"), tmp_path)
    lost = {drop.id: drop for drop in result.dropped}
    assert [d.id for d in result.accepted] == [c]
    assert (lost[a].reason, lost[a].retry) == ("failed call", True) and (
        lost[b].reason,
        lost[b].retry,
    ) == (
        "invalid reply",
        False,
    )
    assert result.opinions["review-1"][a].approved is None and result.opinions["review-2"][
        a
    ] == Opinion(True)
    again = review(
        DRAFTS[:3], mended := Scripted(approve, "one"), quiet := Scripted(approve, "two"), tmp_path
    )
    assert [name for name, _, _ in mended.asked] == [a] and quiet.asked == []
    assert [d.id for d in again.accepted] == [a, c]


def test_a_reviewer_that_never_approves_stops_the_review(tmp_path):
    never = Scripted(objecting(*(draft.id for draft in DRAFTS)), "never")
    with pytest.raises(
        StageError,
        match=r"stage review-2: the first 20 rows .* not approved.*go on with: build again",
    ):
        run_async(
            review_drafts(
                DRAFTS, [Scripted(approve, "one"), never], tmp_path, command="build again"
            )
        )
    assert len((tmp_path / "review-2.jsonl").read_text().splitlines()) == 20


def test_a_fatal_error_of_one_reviewer_ends_both_and_keeps_what_is_done(tmp_path):
    def play(draft, _):
        return CallError("auth", "wrong key", 401) if draft.id == DRAFTS[5].id else said(draft)

    with pytest.raises(CallError, match="wrong key"):
        review(DRAFTS, Scripted(play, "one"), Scripted(approve, "two"), tmp_path)
    one = Scripted(approve, "one")
    two = Scripted(approve, "two")
    result = review(DRAFTS, one, two, tmp_path)
    assert [d.id for d in result.accepted] == [d.id for d in DRAFTS]
    assert DRAFTS[5].id in {name for name, _, _ in one.asked}


def test_reviewers_have_to_be_two(tmp_path):
    for clients in (
        [],
        [Scripted(approve)],
        [Scripted(approve), Scripted(approve)],
        [Scripted(approve, n) for n in "abc"],
    ):
        with pytest.raises(ValueError, match="allowed are two different models"):
            run_async(review_drafts(DRAFTS, clients, tmp_path))


def test_rows_that_one_reviewer_never_saw_are_refused(tmp_path):
    stage = review_stage("review-1")
    other = review_stage("review-2")
    one = run_async(run_stage(stage, DRAFTS[:2], Scripted(approve), tmp_path))
    two = run_async(run_stage(other, DRAFTS[:1], Scripted(approve), tmp_path))
    with pytest.raises(ValueError, match=f"{DRAFTS[1].id!r}: found no review by review-2"):
        join_reviews(DRAFTS[:2], [one, two])
    assert set(opinions(one)) == {d.id for d in DRAFTS[:2]}


def test_the_result_does_not_depend_on_the_order_of_completion(tmp_path):
    ids = [draft.id for draft in DRAFTS[::3]]
    runs = []
    for i, drafts in enumerate((DRAFTS, DRAFTS)):
        one = Scripted(objecting(*ids), "one")
        two = Scripted(objecting(*ids[1:], part="rubrics"), "two")
        one.endpoint = one.endpoint.model_copy(update={"concurrency": (1, 8)[i]})
        runs.append(review(drafts, one, two, tmp_path / str(i)))
    assert runs[0].accepted == runs[1].accepted and runs[0].dropped == runs[1].dropped


def test_nothing_to_review(tmp_path):
    result = review([], Scripted(approve, "one"), Scripted(approve, "two"), tmp_path)
    assert result.accepted == result.dropped == [] and result.agreement().loc["rows", "judged"] == 0


# Over loopback ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    with MicroServer([], roles=micro_roles()) as server:
        yield server


def endpoint(server, model, **more):
    return Endpoint(model=model, base_url=server.base_url, key_env="", thinking="default", **more)


@pytest.fixture(scope="module")
def built(served, tmp_path_factory):
    """Rows of the micro-world made by an exact builder."""
    folder = tmp_path_factory.mktemp("built")
    drafts = [Draft.start(row) for row in source_rows(30, rates={})]
    for stage in (SCREENING, DERIVATION, ANNOTATION, DISTRACTORS, RUBRICS, NATURALIZATION):
        drafts = plan_rows(drafts, folder / "plans.jsonl") if stage is DISTRACTORS else drafts
        drafts = [compose(draft) for draft in drafts] if stage is NATURALIZATION else drafts
        drafts = run_async(
            run_stage(stage, drafts, Client(endpoint(served, "micro-builder-exact")), folder)
        ).kept
    return drafts


def test_rows_of_an_exact_builder_pass_checks_and_exact_reviews(served, built, tmp_path):
    assert len(built) >= 25 and check_drafts(built)[1] == []
    clients = [
        Client(endpoint(served, "micro-reviewer-exact")),
        Client(endpoint(served, "micro-reviewer")),
    ]
    result = run_async(review_drafts(built, clients, tmp_path))
    assert all(opinion.approved for opinion in result.opinions["review-1"].values())
    assert len(result.accepted) >= 0.8 * len(built)


def test_an_exact_reviewer_sees_what_no_check_of_words_can(served, built, tmp_path):
    spoiled = []
    for draft in built[:12]:
        atom = next(a for a in draft.atoms if a.ideal and a.origin == "grounded")
        other = "B" if atom.ideal.wire == "C" else "C"
        weight = {"B": "supporting", "C": "controlling"}[other]
        changed = atom.model_copy(
            update={
                "ideal": type(atom.ideal).parse(other),
                "rubric": atom.rubric | {"memory_usage_weight": weight},
            }
        )
        spoiled.append(
            draft.model_copy(update={"atoms": [changed if a is atom else a for a in draft.atoms]})
        )
    assert check_drafts(spoiled)[1] == []
    clients = [
        Client(endpoint(served, "micro-reviewer-exact")),
        Client(endpoint(served, "micro-reviewer-2")),
    ]
    result = run_async(review_drafts(spoiled, clients, tmp_path))
    assert result.accepted == [] and {drop.reason for drop in result.dropped} == {"levels"}
    assert all(find_flaws(to_example(draft)) for draft in spoiled)


def test_killed_between_calls_and_resumed_nothing_is_paid_twice(built, tmp_path):
    drafts = built[:6]
    with FaultyServer(
        *(completion(json.dumps(said(draft))) for draft in drafts[:2]),
        (401, {"error": {"message": "stop"}}),
    ) as server:
        client = Client(
            Endpoint(model="m", base_url=server.url, key_env="", concurrency=1, attempts=1)
        )
        with pytest.raises(CallError):
            run_async(run_stage(review_stage("review-1"), drafts, client, tmp_path))
    with FaultyServer(*(completion(json.dumps(said(draft))) for draft in drafts[2:])) as server:
        client = Client(
            Endpoint(model="m", base_url=server.url, key_env="", concurrency=1, attempts=1)
        )
        result = run_async(run_stage(review_stage("review-1"), drafts, client, tmp_path))
        assert len(server.seen) == 4
    assert [d.id for d in result.kept] == [d.id for d in drafts] and result.found == 2
