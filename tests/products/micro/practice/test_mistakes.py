"""Builders and reviewers of the micro-world: wrong as often as stated, the same every time,
and repaired when they are told.
"""

import asyncio
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from practice_builds import STAGES, checked, exact_build, payload_of, prepared, stage_table
from practice_facts import bounds

from memcalib.products.dataset.duplicates import clean_rows
from memcalib.products.dataset.review import objections_of, review_drafts, review_stage
from memcalib.products.dataset.stages import Draft, Drop, StageError, run_stage
from memcalib.products.dataset.writing import (
    DISTRACTORS,
    NATURALIZATION,
    compose,
    rows_of_plans,
    to_example,
)
from memcalib.inference.client import Client, read_form, run_async
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.products.micro.world import WORDS, answer, exact_judge
from memcalib.products.micro.practice.builder import mark
from memcalib.products.micro.practice.mistakes import (
    BUILD_TASKS,
    BUILDERS,
    REVIEW,
    REVIEWERS,
    MistakeRates,
    SimulatedModel,
    micro_roles,
    read_conversation,
)
from memcalib.products.micro.practice.models import ExampleIndex
from memcalib.products.micro.practice.reviewer import as_reviewed, find_flaws, make_review, verdicts
from memcalib.products.micro.practice.server import Faults, MicroServer
from memcalib.products.micro.practice.source import micro_source_rows


@pytest.fixture(scope="module")
def exact():
    return exact_build(micro_source_rows(120, seed=11, rates={}))


def user_turn(payload):
    return [("user", json.dumps(payload))]


def screening_turn(row, task="screening"):
    return user_turn(
        {"task": task, "question": row.question, "context": row.context, "answer": row.answer}
    )


# Mistakes

RULES = {
    "detail_in_query": {"memory in query"},
    "invented_evidence": {"evidence"},
    "first_person": {"first person"},
    "missing_phrase": {"phrases"},
    "swapped_rubrics": {"misplaced rubric"},
    "missing_delta": {"contract"},
    "stray_auxiliary": {"subject"},
    "telling_auxiliary": {"matters"},
}  # the rules by which the check of a stage sees a mistake, always
HIDDEN = (
    "passes_bad",
    "fails_good",
    "hint_in_query",
    "wrong_level",
    "wrong_action",
    "wrong_contrast",
    "doubled_passage",
)  # from the check of its stage, always
PARTLY_HIDDEN = (
    "duplicate_atom",
    "added_words",
    "altered_fact",
    "altered_atom",
    "altered_paragraph",
    "invented_fact",
    "wrong_family",
    "mattering_distractor",
)
FURTHER_FLAWS = {
    "altered_atom": {"altered_fact", "wrong_level", "wrong_contrast", "invented_fact"},
    "altered_fact": {"invented_fact"},
    "altered_paragraph": {"dropped_atom", "added_words"},
    "dropped_atom": {"altered_paragraph"},
}  # what else a mistake makes wrong
WITHOUT_TRACE = (
    "passes_bad",
    "fails_good",
    "missing_item",
    "missing_phrase",
    "invented_evidence",
    "detail_in_query",
    "doubled_passage",
    "missing_delta",
)  # in a finished row
SELDOM_FOUND = (
    "altered_fact",
    "altered_paragraph",
)  # a fact that cannot be read any more may be in no atom of the row
TASK_MISTAKES = []
for task_name, build_task in BUILD_TASKS.items():
    TASK_MISTAKES.extend((task_name, mistake) for mistake in build_task.mistakes)
TRACED = [pair for pair in TASK_MISTAKES if pair[1] not in WITHOUT_TRACE]


def always(mistake):
    """A model that makes this mistake wherever it can, and no other."""
    return SimulatedModel("p", MistakeRates.only(**{mistake: 1.0}))


def drafts_for(exact, task, mistake):
    """Drafts that enter a stage; for a bad row that passes they must be bad."""
    if mistake != "passes_bad":
        return exact.entering[task][:60]
    rows = micro_source_rows(40, seed=2, rates={"vague answer": 0.5, "contradiction": 0.5})
    return [Draft.start(row) for row in rows]


@pytest.mark.parametrize(("task", "mistake"), TASK_MISTAKES)
def test_each_mistake_is_made_wherever_it_can_be_and_seen_as_the_page_says(exact, task, mistake):
    [stage] = [stage for stage in STAGES if stage.name == task]
    drafts = drafts_for(exact, task, mistake)
    model = always(mistake)
    spoiled_replies = 0
    rules_seen = Counter()
    for draft in drafts:
        payload = payload_of(stage, draft)
        reply = json.loads(model(user_turn(payload)))
        if reply == BUILD_TASKS[task].make(payload):
            continue
        spoiled_replies += 1
        _, rules = checked(stage, draft, reply)
        rules_seen.update(set(rules) or {"none"})
    assert spoiled_replies >= 0.5 * len(drafts)
    assert spoiled_replies == len(model.mistakes[mistake])
    if mistake in HIDDEN:
        assert set(rules_seen) == {"none"}
    elif mistake in RULES:
        assert set(rules_seen) <= RULES[mistake] | {"name"}
    elif mistake in PARTLY_HIDDEN:
        assert 0 < rules_seen["none"] < spoiled_replies
    elif mistake in ("missing_item", "dropped_atom"):
        assert rules_seen["none"] <= 0.05 * spoiled_replies


def let_through(exact, task, mistake, count=40, model=None):
    """Finished drafts whose one mistake was let through by checks that look the other way."""
    model = model or always(mistake)
    names = [stage.name for stage in STAGES]
    later_stages = STAGES[names.index(task) :]
    finished = []
    for draft in exact.entering[task][:count]:
        for stage in later_stages:
            if stage.name != task:
                [draft] = prepared(stage, [draft])
            payload = payload_of(stage, draft)
            if stage.name == task:
                reply = json.loads(model(user_turn(payload)))
            else:
                reply = BUILD_TASKS[stage.name].make(payload)
            form, _ = read_form(json.dumps(reply), stage.reply)
            draft = stage.accept(draft, form)
            if isinstance(draft, Drop):
                break
        else:
            finished.append(draft)
    return finished


@pytest.mark.parametrize(("task", "mistake"), TRACED)
def test_the_truth_names_the_mistake_and_no_other(exact, task, mistake):
    model = always(mistake)
    examples = [to_example(draft) for draft in let_through(exact, task, mistake, model=model)]
    assert len(examples) >= 15
    allowed = {mistake} | FURTHER_FLAWS.get(mistake, set())
    with_flaw = 0
    for example in examples:
        named = {flaw.mistake for flaw in find_flaws(example)}
        assert named <= allowed
        if named:
            with_flaw += 1
    expected_share = 0.5 if mistake in SELDOM_FOUND else 0.9
    assert with_flaw >= expected_share * min(len(examples), len(model.mistakes[mistake]))


def test_a_bad_row_that_passes_stays_known():
    [row] = micro_source_rows(1, rates={"contradiction": 1.0})
    view = {
        "query": "Plan a trip for work.",
        "source": {"question": row.question, "context": row.context, "answer": row.answer},
        "blocks": [],
        "atoms": [],
    }
    [flaw] = find_flaws(view)
    assert flaw.mistake == "passes_bad"
    assert flaw.item_id == "plausibility"


def test_mistakes_come_at_their_rates():
    rates = MistakeRates()
    model = SimulatedModel("micro-builder", rates)
    for row in micro_source_rows(1200, seed=21, rates={}):
        model(screening_turn(row, "screening"))
        model(screening_turn(row, "derivation"))
    for mistake in ("fails_good", "detail_in_query", "hint_in_query", "invented_evidence"):
        low, high = bounds(1200, getattr(rates, mistake))
        assert low <= len(model.mistakes[mistake]) <= high, mistake
    low, high = bounds(2400, rates.invalid_json)
    assert low <= len(model.mistakes["invalid_json"]) <= high


def test_the_table_of_stages_counts_what_checks_see(exact):
    entering = {name: drafts[:12] for name, drafts in exact.entering.items()}
    table = stage_table(entering, count=8)
    seen_shares = table["seen %"].droplevel("stage")
    assert (seen_shares["none"] == 0).all()
    assert (table["seen"] <= table["planted"]).all()
    always_seen = ["missing_delta", "stray_auxiliary", "missing_item", "invented_evidence"]
    assert (seen_shares[always_seen] == 100).all()
    assert {stage.name for stage in STAGES} == set(table.index.get_level_values("stage"))


# Repairs


def repair(*item_ids, send="the whole object"):
    """The turns in which a builder is told what was wrong with these items."""
    faults = [{"id": item_id, "rule": "r", "detail": "d"} for item_id in item_ids]
    return [("assistant", "x"), *user_turn({"task": "t", "repair": faults, "send": send})]


def rubric_turns(count=6):
    """A request for the rubrics of some atoms at Ignore."""
    atoms = []
    for i, noun in enumerate(WORDS["health"]["diet"][:count]):
        atom = {"atom_id": f"p1_a{i}", "text": f"The user's diet was {noun}.", "level": "A"}
        atoms.append(atom)
    return user_turn({"task": "rubrics", "query": "Plan a dinner for family.", "atoms": atoms})


def test_what_is_named_is_repaired_and_what_is_not_stays():
    model = always("swapped_rubrics")

    def rubrics(*later_turns):
        return json.loads(model([*rubric_turns(), *later_turns]))["rubrics"]

    sound = BUILD_TASKS["rubrics"].make(json.loads(rubric_turns()[0][1]))["rubrics"]
    spoiled = rubrics()
    swapped = [entry["atom_id"] for entry in spoiled if entry not in sound]
    others = [entry["atom_id"] for entry in spoiled if entry in sound]
    assert len(swapped) == 2
    assert rubrics(*repair(others[0])) == spoiled
    assert rubrics(*repair("")) == spoiled, "the whole names no item"
    named = rubrics(*repair(swapped[0], send="the named items alone"))
    assert named == [entry for entry in sound if entry["atom_id"] == swapped[0]]
    assert rubrics(*repair(swapped[1]), *repair(others[0])) == sound


def test_broken_json_is_repaired_when_the_whole_is_named():
    model = always("invalid_json")
    with pytest.raises(ValueError):
        json.loads(model(rubric_turns()))
    with pytest.raises(ValueError):
        json.loads(model(rubric_turns() + repair("p1_a1")))
    assert json.loads(model(rubric_turns() + repair("")))["rubrics"]


def test_a_repair_has_its_probability():
    model = SimulatedModel("p", MistakeRates.only(invalid_json=1.0, repaired=0.7))
    repaired = 0
    total = 600
    for i in range(total):
        turns = user_turn({"task": "naturalization", "blocks": [], "n": i})
        text = model(turns + repair(""))
        try:
            json.loads(text)
            repaired += 1
        except ValueError:
            assert text == model(turns)
    low, high = bounds(total, 0.7)
    assert low <= repaired <= high


@settings(max_examples=30)
@given(st.sampled_from(sorted(BUILDERS)), st.integers(0, 200), st.booleans())
def test_a_model_has_no_memory(name, number, talked_before):
    """The same reply from a fresh model and from one that has talked about other things."""
    row = micro_source_rows(number + 1)[number]
    model = SimulatedModel(name, BUILDERS[name])
    if talked_before:
        model(rubric_turns())
    fresh_model = SimulatedModel(name, BUILDERS[name])
    assert model(screening_turn(row)) == fresh_model(screening_turn(row))


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "first user message"),
        ([("user", "[1]")], "one JSON object"),
        ([("user", "{}")], "a JSON object with a task"),
        ([("user", '{"task": "poems"}')], "'poems'; allowed: screening"),
        ([("user", '{"task": "annotation", "query": "x"}')], "KeyError 'passages'"),
        ([("user", '{"task": "annotation", "query": 3, "passages": [4]}')], "TypeError"),
        ([*rubric_turns(), ("user", '{"task": "rubrics"}')], "a list named repair"),
        ([*rubric_turns(), ("user", '{"repair": ["p1_a1"]}')], "a list named repair"),
    ],
)
def test_unknown_payloads_are_named(turns, message):
    with pytest.raises(ValueError, match="found|task") as error:
        SimulatedModel("p", MistakeRates())(turns)
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_rates_outside_zero_to_one_are_refused():
    with pytest.raises(ValueError, match="wrong_level"):
        MistakeRates(wrong_level=1.2)
    with pytest.raises(ValueError, match="typo"):
        MistakeRates.only(typo=0.1)


def test_conversations_are_known_by_what_was_asked_for():
    turns = rubric_turns()
    key = read_conversation(turns).key
    assert key == read_conversation(turns + repair("a")).key
    assert key != read_conversation(rubric_turns(5)).key
    twice = read_conversation(turns + repair("a", "b") + repair("c"))
    assert twice.repairs == (frozenset("ab"), frozenset("c"))


# Reviewers


def review_turns(example):
    return user_turn({"task": "review", "example": as_reviewed(example)})


def reviewer(name, rates=None):
    return SimulatedModel(name, rates or REVIEWERS[name], {"review": REVIEW})


def approvals(model, examples):
    """How many examples a reviewer approves of."""
    reviews = [json.loads(model(review_turns(example))) for example in examples]
    return sum(all(verdicts(review).values()) for review in reviews)


def test_reviewers_see_and_miss_at_their_rates(exact):
    clean = [to_example(draft) for draft in exact.finished]
    spoiled = [to_example(draft) for draft in let_through(exact, "annotation", "wrong_level", 120)]
    flawed = [example for example in spoiled if find_flaws(example)]
    assert approvals(reviewer("micro-reviewer-exact"), clean) == len(clean)
    assert approvals(reviewer("micro-reviewer-exact"), flawed) == 0
    assert approvals(reviewer("micro-reviewer-never"), clean) == 0
    low, high = bounds(len(flawed), 0.3)
    assert low <= approvals(reviewer("blind", MistakeRates.only(missed_flaw=0.3)), flawed) <= high
    low, high = bounds(len(clean), 0.6)
    assert low <= approvals(reviewer("nervous", MistakeRates.only(false_alarm=0.4)), clean) <= high


def reviewed(exact, model):
    """(flaws, objections of the reviewer, objections of the right review) of sound and flawed
    drafts.
    """
    stage = review_stage("review-1")
    wrong_levels = let_through(exact, "annotation", "wrong_level")
    added_words = let_through(exact, "naturalization", "added_words")
    assert len(wrong_levels) + len(added_words) >= 30
    for draft in [*exact.finished[:25], *wrong_levels, *added_words]:
        payload = payload_of(stage, draft)
        reply, rules = checked(stage, draft, json.loads(model(user_turn(payload))))
        assert rules == []
        right = objections_of(stage.reply.model_validate(make_review(payload)))
        yield find_flaws(to_example(draft)), objections_of(reply), right


def test_objections_of_a_reviewer_without_mistakes_are_the_flaws(exact):
    for flaws, objections, _ in reviewed(exact, reviewer("p", MistakeRates.only())):
        assert {issue.item for issue in objections} == {flaw.item_id for flaw in flaws}


def test_a_reviewer_that_misses_flaws_has_no_objection(exact):
    for _, objections, _ in reviewed(exact, reviewer("p", MistakeRates.only(missed_flaw=1.0))):
        assert objections == []


def test_a_false_alarm_is_one_objection_more(exact):
    for _, objections, right in reviewed(exact, reviewer("p", MistakeRates.only(false_alarm=1.0))):
        assert len(objections) == len(right) + 1


def test_a_row_about_another_domain_is_noticed(exact):
    draft = exact.finished[0]
    other_domain = "coding" if draft.domain == "health" else "health"
    moved = draft.model_copy(update={"domain": other_domain})
    assert [flaw.mistake for flaw in find_flaws(to_example(moved))] == ["wrong_domain"]
    stage = review_stage("review-1")
    review = stage.reply.model_validate(make_review(payload_of(stage, moved)))
    assert [issue.part for issue in objections_of(review)] == ["fit"]


def test_what_has_to_be_avoided_may_not_be_left_out(exact):
    for draft in let_through(exact, "annotation", "wrong_level", 120):
        review = make_review(payload_of(review_stage("review-1"), draft))
        harmful = []
        for flaw in find_flaws(to_example(draft)):
            if flaw.detail.startswith("A instead") and "must avoid" in flaw.detail:
                harmful.append(flaw.item_id)
        assert review["safety"]["ids"] == harmful
        assert review["safety"]["ok"] == (not harmful)


def test_a_review_that_lacks_an_item_is_repaired_by_that_item(exact):
    stage = review_stage("review-1")
    draft = exact.finished[0]
    model = reviewer("p", MistakeRates.only(missing_item=1.0))
    turns = user_turn(payload_of(stage, draft))
    reply, _ = read_form(model(turns), stage.reply)
    [fault] = stage.check(draft, reply)
    assert fault.rule == "missing verdict in levels"
    named_alone = repair(fault.item_id, send="the named items alone")
    second, _ = read_form(model(turns + named_alone), stage.reply)
    assert {verdict.atom_id for verdict in second.levels} == {fault.item_id}
    assert {verdict.atom_id for verdict in second.rubrics} == {fault.item_id}
    assert stage.check(draft, stage.merge(reply, second, {fault.item_id})) == []


def test_two_reviewers_differ():
    turns = []
    for i in range(300):
        view = {
            "query": f"Plan a trip for work {i}.",
            "source": {"question": "", "context": "", "answer": ""},
            "blocks": [],
            "atoms": [],
        }
        turns.append(user_turn({"task": "review", "example": view}))
    first = reviewer("micro-reviewer")
    second = reviewer("micro-reviewer-2")
    assert [first(turn) for turn in turns] != [second(turn) for turn in turns]


# Behind a port


def ask_server(server, model, payload):
    """The reply of a model of the server."""
    messages = [{"role": "system", "content": "Work."}, {"role": "user", "content": payload}]

    async def ask():
        async with client(server, model) as asking:
            return await asking.ask(messages)

    return asyncio.run(ask())


def client(server, model):
    return Client(Endpoint(model=model, base_url=server.base_url, key_env=""))


def test_the_server_speaks_for_models_and_names_what_it_does_not_know():
    with MicroServer([], roles=micro_roles()) as server:
        payload = rubric_turns()[0][1]
        reply = ask_server(server, "micro-builder-exact", payload)
        assert len(json.loads(reply.text)["rubrics"]) == 6
        with pytest.raises(CallError, match="poems.*allowed: screening") as error:
            ask_server(server, "micro-builder", '{"task": "poems"}')
        assert error.value.kind == "bad_request"
        assert error.value.status == 400
        with pytest.raises(CallError, match="micro-reviewer-never") as error:
            ask_server(server, "nobody", payload)
        assert error.value.kind == "not_found"
        with pytest.raises(CallError, match="allowed: review"):
            ask_server(server, "micro-reviewer", payload)


async def build(
    rows, server, folder, model="micro-builder", reviewers=("micro-reviewer", "micro-reviewer-2")
):
    """(finished drafts, what the reviewers made of them)"""
    drafts = [Draft.start(row) for row in rows]
    for stage in STAGES:
        if stage is DISTRACTORS:
            drafts = rows_of_plans(drafts, folder / "plans.jsonl")
        if stage is NATURALIZATION:
            drafts = [compose(draft) for draft in drafts]
        drafts = (await run_stage(stage, drafts, client(server, model), folder)).kept
    return drafts, await review_drafts(drafts, [client(server, name) for name in reviewers], folder)


def build_over_loopback(rows, folder, faults=None):
    """(finished drafts, what the reviewers made of them)"""
    folder.mkdir()
    with MicroServer([], roles=micro_roles(), faults=faults) as server:
        return run_async(build(rows, server, folder))


@pytest.mark.slow
def test_a_build_over_loopback_repeats_itself_and_can_be_judged(tmp_path):
    rows = clean_rows(micro_source_rows(70, seed=41)).kept
    drafts, reviews = build_over_loopback(rows, tmp_path / "one")
    faults = Faults(server_error=0.02, seed=1)
    drafts_again, reviews_again = build_over_loopback(rows, tmp_path / "two", faults)
    assert drafts == drafts_again
    assert reviews.accepted == reviews_again.accepted
    assert reviews.dropped == reviews_again.dropped
    assert len(drafts) > 0.6 * len(rows)
    assert len(reviews.accepted) > 0.6 * len(drafts)
    flaws_before = Counter()
    flawed_before = 0
    for draft in drafts:
        mistakes = {flaw.mistake for flaw in find_flaws(to_example(draft))}
        flaws_before.update(mistakes)
        if mistakes:
            flawed_before += 1
    seen_by_checks = ("swapped_rubrics", "invented_evidence", "missing_item")
    assert sum(flaws_before[mistake] for mistake in seen_by_checks) == 0
    accepted = [to_example(draft) for draft in reviews.accepted]
    flawed_after = sum(bool(find_flaws(example)) for example in accepted)
    assert flawed_after <= 2 < flawed_before
    marked = [mark(example) for example in accepted]
    assert len(ExampleIndex(marked).examples) == len(marked)
    for example in marked:
        judgment = exact_judge(example, answer(example, random.Random(1)))
        assert all(atom.actual == atom.ideal for atom in judgment.atoms), find_flaws(example)


def test_hopeless_models_stop_a_pipeline(tmp_path):
    rows = micro_source_rows(30, rates={})
    with MicroServer([], roles=micro_roles()) as server:
        with pytest.raises(StageError, match="invalid reply"):
            run_async(build(rows, server, tmp_path, "micro-builder-broken"))
        (tmp_path / "never").mkdir()
        reviewers = ("micro-reviewer-never", "micro-reviewer-exact")
        with pytest.raises(StageError, match="review-1.*not approved"):
            run_async(build(rows, server, tmp_path / "never", "micro-builder-exact", reviewers))
