"""The review: what counts as an approval, two reviewers, killed and resumed,
and every way a reviewer can fail.
"""

import json
import math
import random
from collections import Counter

import pytest
from faulty_server import FaultyServer, completion
from hypothesis import given
from hypothesis import strategies as st
from invented_rows import invented_examples
from planted_defects import DEFECTS, plant

from memcalib.products.dataset.writing import NATURALIZATION, compose, to_example
from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.dataset.writing import DISTRACTORS, RUBRICS
from memcalib.products.dataset.stages import Draft, DraftAtom, DraftBlock, Drop
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.products.dataset.lint import lint_example
from memcalib.inference.client import Client, Reply
from memcalib.products.micro.practice.mistakes import micro_roles
from memcalib.products.micro.practice.reviewer import as_reviewed, find_flaws
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.practice.source import micro_source_rows
from memcalib.inference.client import run_async
from memcalib.products.dataset.writing import rows_of_plans
from memcalib.inference.client import read_form
from memcalib.products.dataset.review import (
    ASKED,
    CRITERIA,
    REJECTED,
    Opinion,
    ReviewReply,
    agreement_counts,
    check_drafts,
    check_review,
    join_reviews,
    merge_reviews,
    objections_of,
    opinions,
    review_drafts,
    ask_review,
    asked_of,
    review_stage,
)
from memcalib.products.dataset.stages import StageError, run_stage
from memcalib.products.dataset.lint import LINTS
from memcalib.problem import Level


def as_draft(example):
    atoms = []
    for atom in example.atoms:
        fields = atom.model_dump()
        fields["rubric"] = atom.usage_rubric
        contract = atom.model_extra.get("counterfactual_contract", {})
        for name, text in contract.items():
            fields[name.removesuffix("_behavior")] = text
        atoms.append(DraftAtom(**fields))
    blocks = []
    for block in example.blocks:
        blocks.append(
            DraftBlock(
                parent_memory_id=block.parent_memory_id,
                atom_ids=block.atom_ids,
                memory_text=block.memory_text,
            )
        )
    return Draft(
        id=example.id,
        domain=example.domain,
        question=example.raw_query,
        query=example.question,
        atoms=atoms,
        blocks=blocks,
    )


ERROR_RULES = [name for name, check in LINTS.items() if check.severity == "error"]


DRAFTS = [
    as_draft(example)
    for example in invented_examples(30, seed=12)
    if not lint_example(example, ERROR_RULES)
]
DRAFT = DRAFTS[0]
ATOMS = [atom.atom_id for atom in DRAFT.atoms]
BLOCKS = [block.parent_memory_id for block in DRAFT.blocks]


def approving_reply(draft, **changes):
    """An approving reply as plain data."""
    reply_data = {
        "distinct": {"ok": True, "why": "", "ids": []},
        "query": {"excludes_memory": True, "answerable": True, "why": ""},
        "blocks": [
            {"block_id": name, "complete": True, "adds_nothing": True, "why": ""}
            for name in [block.parent_memory_id for block in draft.blocks]
        ],
        "safety": {"ok": True, "why": "", "ids": []},
        "fit": {"ok": True, "why": ""},
    }
    for criterion in ASKED:
        reply_data[criterion] = [verdict(name) for name in asked_of(draft, criterion)]
    reply_data.update(changes)
    return reply_data


def reply(**changes):
    return ReviewReply.model_validate(approving_reply(DRAFT, **changes))


class Scripted(Client):
    """A client whose model is a function from (draft, number of the try) to a reply,
    a text or an error.
    """

    def __init__(self, play, name="scripted", drafts=DRAFTS):
        super().__init__(Endpoint(model=name, base_url="http://127.0.0.1:1/v1", key_env=""))
        self.play = play
        self.calls = []
        self.tries = Counter()
        self.drafts = {ask_review(d)["example"]["query"] + d.atoms[0].text: d for d in drafts}

    @property
    def asked_rows(self):
        return [draft_id for draft_id, _, _ in self.calls]

    async def ask(self, messages, **settings):
        example = json.loads(messages[1]["content"])["example"]
        draft = self.drafts[example["query"] + example["atoms"][0]["text"]]
        self.calls.append((draft.id, messages, settings))
        self.tries[draft.id] += 1
        outcome = self.play(draft, self.tries[draft.id])
        if isinstance(outcome, Exception):
            raise outcome
        text = outcome if isinstance(outcome, str) else json.dumps(outcome)
        return Reply(text, "stop", {"prompt_tokens": 7.0})


def approve(draft, _):
    return approving_reply(draft)


def objecting(*ids, criterion="levels", why="It is another level."):
    def play(draft, _):
        reply_data = approving_reply(draft)
        if draft.id in ids:
            reply_data[criterion][0].update(ok=False, why=why)
        return reply_data

    return play


def review(drafts, first, second, folder):
    return run_async(review_drafts(drafts, [first, second], folder))


# Deterministic checks -----------------------------------------------------------------------------


def test_sound_drafts_pass_the_checks():
    passed, dropped, result = check_drafts(DRAFTS)
    assert passed == DRAFTS and dropped == [] and result.rows == len(DRAFTS)


NOT_IN_A_DRAFT = ("other_parent", "empty_text", "other_split")
COSTLY = [
    name
    for name, defect in DEFECTS.items()
    if LINTS[defect.check].severity == "error" and name not in NOT_IN_A_DRAFT
]


@pytest.mark.parametrize("name", COSTLY)
def test_a_draft_with_a_defect_is_dropped_under_the_name_of_its_check(name):
    rng = random.Random(name)
    check = DEFECTS[name].check
    planted = (plant(to_example(draft), name, rng) for draft in DRAFTS)
    spoiled = next(row for row in planted if row and check in _rules(row))
    draft = as_draft(spoiled)
    passed, [drop], _ = check_drafts([DRAFTS[1], draft])
    assert passed == [DRAFTS[1]] and drop.stage == "checks" and drop.id == draft.id
    rules_in_detail = [finding.split(",")[0] for finding in drop.detail.split("; ")]
    assert check in (drop.reason, *rules_in_detail)


def _rules(example):
    return {finding.rule for finding in lint_example(example)}


def test_warnings_cost_no_row():
    rng = random.Random(0)
    spoiled = plant(to_example(DRAFTS[2]), "strange_identifiers", rng)
    passed, dropped, result = check_drafts([as_draft(spoiled)])
    assert len(passed) == 1 and dropped == []
    assert result.of("rubric_identifiers")


def test_a_draft_that_is_no_example_is_a_loss_and_no_crash():
    empty_blocks = [b.model_copy(update={"memory_text": ""}) for b in DRAFTS[3].blocks]
    bad = [
        DRAFT.model_copy(update={"blocks": []}),
        DRAFTS[1].model_copy(update={"blocks": DRAFTS[1].blocks[1:]}),
        DRAFTS[2].model_copy(update={"query": "  "}),
        DRAFTS[3].model_copy(update={"blocks": empty_blocks}),
    ]
    passed, dropped, _ = check_drafts([*bad, DRAFTS[4]])
    assert passed == [DRAFTS[4]]
    assert [drop.reason for drop in dropped] == ["structure"] * 4


def test_one_id_twice_is_found():
    passed, dropped, _ = check_drafts([DRAFT, DRAFTS[1], DRAFT])
    assert passed == [DRAFTS[1]] and {drop.reason for drop in dropped} == {"unique_ids"}


def test_rules_can_be_chosen():
    rng = random.Random(0)
    spoiled = as_draft(plant(to_example(DRAFTS[2]), "told_verbatim", rng))
    assert check_drafts([spoiled], ["first_person"])[1] == []
    assert check_drafts([spoiled], ["question_leak"])[1][0].reason == "question_leak"
    with pytest.raises(ValueError, match="allowed: structure"):
        check_drafts([spoiled], ["typo"])


# One review ---------------------------------------------------------------------------------------


def test_a_reviewer_sees_what_the_paper_lists_and_no_more():
    system, user = review_stage("review-1").messages(DRAFT)
    request = json.loads(user["content"])
    example = request["example"]
    assert request["task"] == "review"
    assert set(example) == {"domain", "query", "source", "blocks", "atoms"}
    view = as_reviewed(to_example(DRAFT))
    shown_atoms = {atom["atom_id"]: atom for atom in example["atoms"]}
    assert shown_atoms == {atom["atom_id"]: atom for atom in view["atoms"]}
    assert example["blocks"] == view["blocks"] and example["query"] == view["query"]
    assert all(f"`{name}`" in system["content"] for name in ReviewReply.model_fields)
    assert "adds_nothing" in system["content"] and example["domain"] == DRAFT.domain
    used = next(atom for atom in example["atoms"] if atom["level"] != "A")
    assert used["action"] == "apply" and used["observable_delta"]
    assert used["without_memory"] != used["with_memory"]


def test_each_part_is_asked_of_its_atoms():
    hard = next(atom for atom in DRAFT.atoms if atom.origin == "hard")
    named = hard.model_copy(update={"hard_a_family": "outdated"})
    atoms = [named if atom is hard else atom for atom in DRAFT.atoms]
    draft = DRAFT.model_copy(update={"atoms": atoms})
    used = [atom.atom_id for atom in DRAFT.atoms if atom.ideal]
    assert asked_of(draft, "actions") == asked_of(draft, "contrasts") == used
    assert asked_of(draft, "families") == [hard.atom_id] and asked_of(DRAFT, "families") == []
    bare = [atom.model_copy(update={"with_memory": ""}) for atom in DRAFT.atoms]
    assert asked_of(DRAFT.model_copy(update={"atoms": bare}), "contrasts") == []


def test_an_approving_reply_has_no_fault_and_no_issue():
    assert check_review(DRAFT, reply()) == [] and objections_of(reply()) == []


def test_a_verdict_of_the_model_itself_changes_nothing():
    approving = approving_reply(DRAFT, verdict="reject", score=2)
    read, complaints = read_form(json.dumps(approving), ReviewReply)
    assert complaints == [] and objections_of(read) == []
    objecting_reply = approving_reply(DRAFT, verdict="accept")
    objecting_reply["levels"][0].update(ok=False, why="No.")
    read, _ = read_form(json.dumps(objecting_reply), ReviewReply)
    assert len(objections_of(read)) == 1


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
    assert read_form(json.dumps(approving_reply(DRAFT, **change)), ReviewReply)[0] is None


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


choices = st.sets(st.tuples(st.sampled_from(CRITERIA), st.sampled_from((ATOMS[0], ATOMS[1], "x"))))


def reply_to_choices(chosen):
    """A reply that objects to the chosen (criterion, item), and (criterion,
    item) of every objection in it; "x" is no atom.
    """
    objected = {criterion: set() for criterion in CRITERIA}
    for criterion, item in chosen:
        if item != "x":
            objected[criterion].add(item)
    data = {}
    objections = set()
    for criterion in ASKED:
        asked_atoms = asked_of(DRAFT, criterion)
        data[criterion] = [verdict(n, n not in objected[criterion], "No.") for n in asked_atoms]
        objections |= {(criterion, n) for n in objected[criterion] if n in asked_atoms}
    for criterion in ("distinct", "safety"):
        ids = sorted(objected[criterion])
        data[criterion] = {"ok": not ids, "why": "No.", "ids": ids}
        objections |= {(criterion, n) for n in ids}
    data["fit"] = {"ok": not objected["fit"], "why": "No."}
    if objected["fit"]:
        objections.add(("fit", "row"))
    data["query"] = {"why": "No."}
    for criterion, field in (("excludes memory", "excludes_memory"), ("answerable", "answerable")):
        data["query"][field] = not objected[criterion]
        if objected[criterion]:
            objections.add((criterion, "query"))
    data["blocks"] = [
        {"block_id": name, "complete": True, "adds_nothing": True, "why": "No."} for name in BLOCKS
    ]
    for criterion, field in (("complete", "complete"), ("adds nothing", "adds_nothing")):
        if objected[criterion]:
            data["blocks"][0][field] = False
            objections.add((criterion, BLOCKS[0]))
    return reply(**data), objections


@given(choices)
def test_the_verdict_is_the_and_of_all_parts(chosen):
    """Objections against a slow reading: one for each question answered in the negative."""
    review_reply, expected = reply_to_choices(chosen)
    assert check_review(DRAFT, review_reply) == []
    objections = objections_of(review_reply)
    assert {(objection.part, objection.item) for objection in objections} == expected
    positions = [CRITERIA.index(objection.part) for objection in objections]
    assert positions == sorted(positions)
    outcome = review_stage("r").accept(DRAFT, review_reply)
    assert (outcome is DRAFT) == (not expected)
    if expected:
        assert isinstance(outcome, Drop) and outcome.reason == REJECTED
        assert len(outcome.issues) == len(expected)


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
    assert check_review(DRAFT, merged) == []
    [objection] = objections_of(merged)
    assert (objection.part, objection.item, objection.why) == ("levels", ATOMS[1], "It is B.")
    assert merge_reviews(first, repaired, {"query"}).query == repaired.query


def test_a_faulty_reply_is_repaired_for_its_items(tmp_path):
    def play(draft, tries):
        rubrics = approving_reply(draft)["rubrics"]
        if tries == 1:
            return approving_reply(draft, rubrics=rubrics[1:])
        return approving_reply(draft, rubrics=rubrics[:1], levels=[])

    client = Scripted(play)
    result = run_async(run_stage(review_stage("review-1"), [DRAFT], client, tmp_path))
    assert len(result.kept) == 1 and result.calls == 2
    (_, _, settings), (_, repair_messages, _) = client.calls
    request = json.loads(repair_messages[-1]["content"])
    assert [fault["id"] for fault in request["repair"]] == [ATOMS[0]]
    assert request["send"] == "the named items alone"
    assert settings["temperature"] == 0.0


# Two reviews --------------------------------------------------------------------------------------


def test_a_row_needs_both_approvals(tmp_path):
    a, b, c, d = (draft.id for draft in DRAFTS[:4])
    first = Scripted(objecting(a, b), "one")
    second = Scripted(objecting(b, c, criterion="rubrics", why="Vague."), "two")
    result = review(DRAFTS[:4], first, second, tmp_path)
    assert [draft.id for draft in result.accepted] == [d]
    drops = {drop.id: drop for drop in result.dropped}
    assert {name: (drop.stage, drop.reason, drop.reviewers) for name, drop in drops.items()} == {
        a: ("review", "levels", ["review-1"]),
        b: ("review", "levels", ["review-1", "review-2"]),
        c: ("review", "rubrics", ["review-2"]),
    }
    for words in ("review-1: levels", "review-2: rubrics", "Vague."):
        assert words in drops[b].detail
    notes = result.accepted[0].notes
    assert notes["review-1"]["model"] == "one" and notes["review-2"]["model"] == "two"
    assert set(first.asked_rows) == set(second.asked_rows) == {a, b, c, d}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_agreement_agrees_with_a_slow_count(pairs):
    first = {i for i, (x, _) in enumerate(pairs) if x}
    second = {i for i, (_, y) in enumerate(pairs) if y}
    n = len(pairs)
    counts = agreement_counts(n, first, second)
    assert counts["judged"] == n and counts["both object"] == sum(x and y for x, y in pairs)
    if not n:
        return
    agreement = sum(x == y for x, y in pairs) / n
    assert counts["agree %"] == pytest.approx(100 * agreement)
    chance = 0.0
    for value in (True, False):
        first_share = sum(x == value for x, _ in pairs) / n
        second_share = sum(y == value for _, y in pairs) / n
        chance += first_share * second_share
    if chance < 1:
        assert counts["kappa"] == pytest.approx((agreement - chance) / (1 - chance))
    else:
        assert math.isnan(counts["kappa"])


def test_agreement_counts_questions_of_rows_that_both_judged(tmp_path):
    a, b, c = (draft.id for draft in DRAFTS[:3])
    objects_to_a = objecting(a)

    def play(draft, tries):
        if draft.id == c:
            return CallError("server", "no answer", 500)
        return objects_to_a(draft, tries)

    result = review(DRAFTS[:3], Scripted(play, "one"), Scripted(objecting(a, b), "two"), tmp_path)
    table = result.agreement()
    rows = table.loc["rows"]
    assert (rows["judged"], rows["both object"], rows["agree %"]) == (2, 1, 50)
    judged_by_both = DRAFTS[:2]
    assert table.loc["levels", "judged"] == sum(len(draft.atoms) for draft in judged_by_both)
    assert table.loc["complete", "judged"] == sum(len(draft.blocks) for draft in judged_by_both)
    assert table.loc["excludes memory", "judged"] == 2


def test_a_missing_review_is_neither_approval_nor_objection(tmp_path):
    a, b, c = (draft.id for draft in DRAFTS[:3])
    outcomes = {a: CallError("server", "no answer", 500), b: "not json"}

    def play(draft, _):
        return outcomes.get(draft.id) or approving_reply(draft)

    result = review(DRAFTS[:3], Scripted(play, "one"), Scripted(approve, "two"), tmp_path)
    drops = {drop.id: drop for drop in result.dropped}
    assert [draft.id for draft in result.accepted] == [c]
    assert (drops[a].reason, drops[a].retry) == ("failed call", True)
    assert (drops[b].reason, drops[b].retry) == ("invalid reply", False)
    assert result.opinions["review-1"][a].approved is None
    assert result.opinions["review-2"][a] == Opinion(True)
    recovered = Scripted(approve, "one")
    unasked = Scripted(approve, "two")
    again = review(DRAFTS[:3], recovered, unasked, tmp_path)
    assert recovered.asked_rows == [a] and unasked.asked_rows == []
    assert [draft.id for draft in again.accepted] == [a, c]


def test_a_reviewer_that_never_approves_stops_the_review(tmp_path):
    never = Scripted(objecting(*(draft.id for draft in DRAFTS)), "never")
    clients = [Scripted(approve, "one"), never]
    message = r"stage review-2: the first 20 rows .* not approved.*continue with: build again"
    with pytest.raises(StageError, match=message):
        run_async(review_drafts(DRAFTS, clients, tmp_path, command="build again"))
    assert len((tmp_path / "review-2.jsonl").read_text().splitlines()) == 20


def test_a_fatal_error_of_one_reviewer_ends_both_and_keeps_what_is_done(tmp_path):
    refused_id = DRAFTS[5].id

    def play(draft, _):
        if draft.id == refused_id:
            return CallError("auth", "wrong key", 401)
        return approving_reply(draft)

    with pytest.raises(CallError, match="wrong key"):
        review(DRAFTS, Scripted(play, "one"), Scripted(approve, "two"), tmp_path)
    first = Scripted(approve, "one")
    result = review(DRAFTS, first, Scripted(approve, "two"), tmp_path)
    assert [draft.id for draft in result.accepted] == [draft.id for draft in DRAFTS]
    assert refused_id in first.asked_rows


def test_reviewers_have_to_be_two(tmp_path):
    approving = Scripted(approve)
    three_models = [Scripted(approve, name) for name in "abc"]
    for clients in ([], [approving], [approving, Scripted(approve)], three_models):
        with pytest.raises(ValueError, match="allowed: two different models"):
            run_async(review_drafts(DRAFTS, clients, tmp_path))


def test_rows_that_one_reviewer_never_saw_are_refused(tmp_path):
    first = run_async(run_stage(review_stage("review-1"), DRAFTS[:2], Scripted(approve), tmp_path))
    second = run_async(run_stage(review_stage("review-2"), DRAFTS[:1], Scripted(approve), tmp_path))
    with pytest.raises(ValueError, match=f"{DRAFTS[1].id!r}: found no review by review-2"):
        join_reviews(DRAFTS[:2], [first, second])
    assert set(opinions(first)) == {draft.id for draft in DRAFTS[:2]}


def test_the_result_does_not_depend_on_the_order_of_completion(tmp_path):
    ids = [draft.id for draft in DRAFTS[::3]]
    results = []
    for concurrency in (1, 8):
        first = Scripted(objecting(*ids), "one")
        second = Scripted(objecting(*ids[1:], criterion="rubrics"), "two")
        first.endpoint = first.endpoint.model_copy(update={"concurrency": concurrency})
        results.append(review(DRAFTS, first, second, tmp_path / str(concurrency)))
    assert results[0].accepted == results[1].accepted
    assert results[0].dropped == results[1].dropped


def test_nothing_to_review(tmp_path):
    result = review([], Scripted(approve, "one"), Scripted(approve, "two"), tmp_path)
    assert result.accepted == result.dropped == [] and result.agreement().loc["rows", "judged"] == 0


# Over loopback ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    with MicroServer([], roles=micro_roles()) as server:
        yield server


def endpoint(server, model, **settings):
    return Endpoint(
        model=model, base_url=server.base_url, key_env="", thinking="default", **settings
    )


@pytest.fixture(scope="module")
def built(served, tmp_path_factory):
    """Rows of the micro-world made by an exact builder."""
    folder = tmp_path_factory.mktemp("built")
    drafts = [Draft.start(row) for row in micro_source_rows(30, rates={})]
    client = Client(endpoint(served, "micro-builder-exact"))
    for stage in (SCREENING, DERIVATION, ANNOTATION, DISTRACTORS, RUBRICS, NATURALIZATION):
        if stage is DISTRACTORS:
            drafts = rows_of_plans(drafts, folder / "plans.jsonl")
        if stage is NATURALIZATION:
            drafts = [compose(draft) for draft in drafts]
        drafts = run_async(run_stage(stage, drafts, client, folder)).kept
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
    other_levels = {"C": ("B", "supporting"), "B": ("C", "controlling")}
    spoiled = []
    for draft in built[:12]:
        atom = next(a for a in draft.atoms if a.ideal and a.origin == "grounded")
        level, weight = other_levels[atom.ideal.wire]
        rubric = dict(atom.rubric)
        rubric["memory_usage_weight"] = weight
        changed = atom.model_copy(update={"ideal": Level.parse(level), "rubric": rubric})
        atoms = [changed if a is atom else a for a in draft.atoms]
        spoiled.append(draft.model_copy(update={"atoms": atoms}))
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
    replies = [completion(json.dumps(approving_reply(draft))) for draft in drafts]
    refusal = (401, {"error": {"message": "stop"}})

    def review_by(server):
        url = server.url
        client = Client(Endpoint(model="m", base_url=url, key_env="", concurrency=1, attempts=1))
        return run_async(run_stage(review_stage("review-1"), drafts, client, tmp_path))

    with FaultyServer(*replies[:2], refusal) as server, pytest.raises(CallError):
        review_by(server)
    with FaultyServer(*replies[2:]) as server:
        result = review_by(server)
        assert len(server.requests) == 4
    assert [draft.id for draft in result.kept] == [draft.id for draft in drafts]
    assert result.found == 2
