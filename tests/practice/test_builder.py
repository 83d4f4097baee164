"""Sources, builder and reviewers of the micro-world: true, wrong as often as told, and the same every time."""

import asyncio
import json
import math
import random
from collections import Counter

import pytest
from builder_replies import asked_of
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.dataset.writing import NATURALIZATION, compose, to_example
from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.dataset.writing import DISTRACTORS, RUBRICS
from memcalib.dataset.stages import Draft, Drop
from memcalib.dataset.duplicates import clean_rows
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.practice.server import Faults
from memcalib.inference.client import Client, run_async
from memcalib.practice.builder import (
    BUILDERS,
    BUILD_TASKS,
    MistakeRates,
    SimulatedModel,
    read_conversation,
)
from memcalib.practice.builder import added_words, hard_distractor, paragraph, stray_facts
from memcalib.practice.builder import (
    REVIEW,
    REVIEWERS,
    as_reviewed,
    find_flaws,
    mark,
    mark_all,
    micro_roles,
    mistake_table,
    verdicts,
    make_review,
    stage_table,
)
from memcalib.practice.models import ExampleIndex
from memcalib.practice.server import MicroServer
from memcalib.practice.source import (
    ATTRIBUTES,
    BAD,
    DOMAIN_OF,
    Fact,
    Request,
    contradiction,
    fact_kind,
    fact_level,
    read_facts,
    read_request,
    source_rows,
    stopped,
    weak_points,
)
from memcalib.micro.world import (
    NOUNS,
    OWNERS,
    REQUESTS,
    SCOPES,
    WORDS,
    answer,
    exact_judge,
    make_examples,
)
from memcalib.dataset.writing import make_plans, plan_rows
from memcalib.problem import Example, Level
from memcalib.inference.client import read_form
from memcalib.dataset.review import objections_of, review_drafts, review_stage
from memcalib.dataset.writing import FAMILIES
from memcalib.dataset.stages import StageError, run_stage

STAGES = (SCREENING, DERIVATION, ANNOTATION, DISTRACTORS, RUBRICS, NATURALIZATION)


def every_fact():
    pairs = [(a, noun) for a, domain in ATTRIBUTES.items() for noun in WORDS[domain][a]]
    pairs += [("", thing) for things in REQUESTS.values() for thing in things]
    return st.builds(
        lambda owner, pair, past, occasion: Fact(owner, *pair, past, occasion),
        st.sampled_from(("user", *OWNERS)),
        st.sampled_from(pairs),
        st.booleans(),
        st.sampled_from(("", *SCOPES)),
    )


def every_request():
    def built(task, scope, rng, count):
        return Request(task, scope, tuple(rng.sample(REQUESTS[task], count)))

    return st.builds(
        built,
        st.sampled_from(sorted(DOMAIN_OF)),
        st.sampled_from(SCOPES),
        st.randoms(use_true_random=False),
        st.integers(0, 4),
    )


# What texts say


@given(st.lists(every_fact(), max_size=8), st.randoms(use_true_random=False))
def test_facts_are_read_in_order_in_either_voice(facts, rng):
    told = [fact.text if rng.random() < 0.5 else f"You know, {fact.said}." for fact in facts]
    assert read_facts(" ".join(told)) == tuple(facts)
    assert read_facts(", and ".join(fact.said for fact in facts).upper()) == tuple(facts)


@given(st.text(max_size=60), every_fact())
def test_only_facts_are_read(text, fact):
    assert all(found.noun in NOUNS for found in read_facts(text))
    swapped = fact.text.replace(fact.noun, "nothing")
    assert read_facts(swapped) == ()


@given(every_request(), every_fact())
def test_levels_follow_the_rules_of_the_world(request, fact):
    """Against the rules said slowly: only the user's own, current facts of this occasion can matter."""
    mine = (
        fact.owner == "user"
        and not fact.past
        and fact.occasion != SCOPES[1 - SCOPES.index(request.scope)]
    )
    if not mine:
        expected = Level.IGNORE
    elif not fact.attribute:
        expected = Level.CONTROL if fact.noun in request.things else Level.IGNORE
    else:
        expected = Level.IGNORE
        for attribute, letter in zip(WORDS[request.domain], _letters(request), strict=True):
            if attribute == fact.attribute:
                expected = Level.parse(letter)
    assert fact_level(fact, request) == expected
    assert (fact_kind(fact, request) == "grounded") == (expected != Level.IGNORE)
    assert read_request(f"Could you {request.text[0].lower()}{request.text[1:-1]}?") == request


def _letters(request):
    from memcalib.micro.world import TASKS as TABLE

    return TABLE[request.domain][request.task]


@given(st.lists(every_fact(), max_size=10))
def test_contradictions_against_all_pairs(facts):
    def clash(one, two):
        same = (one.owner, one.attribute, one.past, one.occasion) == (
            two.owner,
            two.attribute,
            two.past,
            two.occasion,
        )
        return same and one.attribute and one.noun != two.noun

    pairs = [(one, two) for i, one in enumerate(facts) for two in facts[i + 1 :] if clash(one, two)]
    assert (contradiction(facts) is None) == (not pairs)


def test_examples_of_the_world_are_read_as_written():
    for world in ("short", "long"):
        for example in make_examples(world, 100, 3, "rl"):
            request = read_request(example.question)
            for atom in example.atoms:
                [fact] = read_facts(atom.text)
                assert fact.text == atom.text and fact_level(fact, request) == atom.ideal


# Sources


def test_rows_repeat_and_planted_rates_hold():
    rows = source_rows(2000, seed=3)
    assert rows[:50] == source_rows(50, seed=3) != source_rows(50, seed=4)
    counts = Counter(row.metadata.get("planted", "") for row in rows)
    for name, bad in BAD.items():
        low, high = _bounds(2000, bad.rate)
        assert low <= counts[name] <= high, name
    assert len({row.id for row in rows}) == 2000 and {row.domain for row in rows} == set(WORDS)


def _bounds(n, rate, width=4.5):
    slack = width * math.sqrt(n * rate * (1 - rate))
    return n * rate - slack, n * rate + slack


def test_rates_are_checked():
    for rates in ({"nonsense": 0.1}, {"loop": 0.6, "copy": 0.6}, {"loop": -0.1}):
        with pytest.raises(ValueError, match="rates: found"):
            source_rows(5, rates=rates)


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_of_bad_row_is_stopped_where_it_should_be(kind):
    rates = {kind: 0.5} if BAD[kind].stage == "duplicates" else {kind: 1.0}
    rows = source_rows(60, seed=5, rates=rates)
    passed = clean_rows([*rows, *source_rows(1, seed=6, rates={})])
    table = stopped(rows, [row.id for row in passed.kept])
    assert table.loc[kind, "rows"] > 15
    if BAD[kind].stage in ("screening", "duplicates"):
        assert table.loc[kind, "share"] == 1
        assert {drop.stage for drop in passed.dropped} == {BAD[kind].stage}
        return
    assert table.loc[kind, "share"] < 0.5
    for row in rows:
        assert BAD[kind].stage in weak_points(row.question, row.context, row.answer), row


def test_good_rows_pass_every_rule_and_have_no_weak_point():
    rows = source_rows(600, seed=8, rates={})
    passed = clean_rows(rows)
    assert len(passed.kept) >= 0.99 * len(rows)
    assert all(not weak_points(row.question, row.context, row.answer) for row in rows)
    for row in rows:
        request = read_request(row.question)
        facts = read_facts(f"{row.question} {row.context}")
        assert (
            request.domain == row.domain
            and 4 <= len(facts) <= 9
            and any(fact_level(fact, request) for fact in facts)
        )


# A builder without mistakes


def checked(stage, draft, made):
    """(reply, rules of its faults)"""
    reply, complaints = read_form(json.dumps(made), stage.reply)
    return reply, [rule for _, rule in complaints] or [
        fault.rule for fault in stage.check(draft, reply)
    ]


def planned(drafts):
    plans = make_plans(drafts)
    return [
        draft.model_copy(update={"notes": {"plan": plans[draft.id].model_dump(mode="json")}})
        for draft in drafts
    ]


@pytest.fixture(scope="module")
def exact():
    """For each stage the rows that enter it, built without mistakes; and the rows that come out at the end."""
    drafts = [Draft.start(row) for row in source_rows(120, seed=11, rates={})]
    entering = {}
    for stage in STAGES:
        if stage is DISTRACTORS:
            drafts = planned(drafts)
        if stage is NATURALIZATION:
            drafts = [compose(draft) for draft in drafts]
        entering[stage.name] = drafts
        after = []
        for draft in drafts:
            reply, rules = checked(
                stage, draft, BUILD_TASKS[stage.name].make(asked_of(stage, draft))
            )
            assert rules == []
            after.append(stage.accept(draft, reply))
        drafts = after
    return entering, drafts


def test_a_builder_without_mistakes_passes_every_check_at_once(exact):
    entering, built = exact
    assert all(len(drafts) == 120 for drafts in entering.values()) and all(
        isinstance(draft, Draft) for draft in built
    )
    for draft in built:
        example = to_example(draft)
        nouns = [fact.noun for atom in example.atoms for fact in read_facts(atom.text)]
        assert len(nouns) == len(set(nouns)) == len(example.atoms)
        assert find_flaws(example) == []
    assert max(len(draft.atoms) for draft in built) > 30


@given(
    every_request(),
    st.lists(every_fact(), max_size=9),
    st.sampled_from(FAMILIES),
    st.integers(0, 1000),
)
def test_distractors_never_matter_nor_repeat_a_noun(request, facts, family, seed):
    rng = random.Random(seed)
    taken = {fact.noun for fact in facts} | set(request.things)
    hard = hard_distractor(family, request, facts, taken, rng)
    assert fact_level(hard, request) == Level.IGNORE
    strays = list(stray_facts(request, [*facts, hard], taken | {hard.noun}, rng))
    assert all(fact_level(fact, request) == Level.IGNORE for fact in strays)
    assert len(strays) >= 57 and len({fact.noun for fact in strays} - taken - {hard.noun}) == len(
        strays
    )
    assert contradiction(strays) is None


@given(st.lists(every_fact(), min_size=1, max_size=12, unique=True), st.data())
def test_paragraphs_keep_all_and_additions_show(facts, data):
    atoms = [fact.text for fact in facts]
    text = paragraph(atoms)
    assert read_facts(text) == tuple(facts) and added_words(atoms, text) == []
    word = data.draw(st.text("bcdfg", min_size=1, max_size=8))
    assert added_words(atoms, f"{text} {word}.") == [word]


# Mistakes

SEEN = {
    "detail_in_query": {"memory in query"},
    "invented_evidence": {"evidence"},
    "first_person": {"first person"},
    "missing_phrase": {"phrases"},
    "swapped_rubrics": {"misplaced rubric"},
    "missing_delta": {"contract"},
    "stray_auxiliary": {"subject"},
    "telling_auxiliary": {"matters"},
}
HIDDEN = (
    "passes_bad",
    "fails_good",
    "hint_in_query",
    "wrong_level",
    "wrong_action",
    "wrong_contrast",
    "doubled_passage",
)
PARTLY = (
    "duplicate_atom",
    "added_words",
    "altered_fact",
    "altered_atom",
    "altered_paragraph",
    "invented_fact",
    "wrong_family",
    "mattering_distractor",
)
BESIDE = {  # what else a mistake makes wrong
    "altered_atom": {"altered_fact", "wrong_level", "wrong_contrast", "invented_fact"},
    "altered_fact": {"invented_fact"},
    "altered_paragraph": {"dropped_atom", "added_words"},
    "dropped_atom": {"altered_paragraph"},
}
UNKNOWN = (  # to the truth, since nothing of them is left in a finished row
    "passes_bad",
    "fails_good",
    "missing_item",
    "missing_phrase",
    "invented_evidence",
    "detail_in_query",
    "doubled_passage",
    "missing_delta",
)
SELDOM = (
    "altered_fact",
    "altered_paragraph",
)  # a fact that cannot be read any more may be in no atom of the row
SLIPS = [(task, slip) for task in BUILD_TASKS for slip in BUILD_TASKS[task].mistakes]


@pytest.mark.parametrize(("task", "slip"), SLIPS)
def test_each_mistake_alone(exact, task, slip):
    """It is made wherever it can be made; the check sees it or not, as the page says; the truth knows it when it passes."""
    stage = next(stage for stage in STAGES if stage.name == task)
    entering = exact[0][task]
    if slip == "passes_bad":
        entering = [
            Draft.start(row)
            for row in source_rows(40, seed=2, rates={"vague answer": 0.5, "contradiction": 0.5})
        ]
    player = SimulatedModel("p", MistakeRates.only(**{slip: 1.0}))
    made = 0
    seen = Counter()
    for draft in entering[:60]:
        asked = asked_of(stage, draft)
        reply = json.loads(player([("user", json.dumps(asked))]))
        if reply == BUILD_TASKS[task].make(asked):
            continue
        made += 1
        _, rules = checked(stage, draft, reply)
        seen.update(set(rules) or {""})
        if rules and slip in HIDDEN:
            raise AssertionError((slip, rules))
    assert made >= 0.5 * len(entering[:60]) and made == len(player.mistakes[slip])
    if slip in SEEN:
        assert set(seen) <= SEEN[slip] | {"name"} and "" not in seen, seen
    elif slip in PARTLY:
        assert 0 < seen[""] < made
    elif slip in ("missing_item", "dropped_atom"):
        assert seen[""] <= 0.05 * made


def spoiled(exact, task, slip, count=40, player=None):
    """Drafts whose one mistake was let through by checks that look the other way."""
    stages = [stage.name for stage in STAGES]
    player = player or SimulatedModel("p", MistakeRates.only(**{slip: 1.0}))
    finished = []
    for draft in exact[0][task][:count]:
        for stage in STAGES[stages.index(task) :]:
            if stage is DISTRACTORS and "plan" not in draft.notes:
                [draft] = planned([draft])
            if stage is NATURALIZATION and not draft.blocks:
                draft = compose(draft)
            asked = asked_of(stage, draft)
            made = (
                json.loads(player([("user", json.dumps(asked))]))
                if stage.name == task
                else BUILD_TASKS[stage.name].make(asked)
            )
            draft = stage.accept(draft, read_form(json.dumps(made), stage.reply)[0])
            if isinstance(draft, Drop):
                break
        else:
            finished.append(draft)
    return finished


@pytest.mark.parametrize(
    ("task", "slip"),
    [(t, s) for t, s in SLIPS if s not in UNKNOWN],
)
def test_the_truth_names_the_mistake_and_no_other(exact, task, slip):
    player = SimulatedModel("p", MistakeRates.only(**{slip: 1.0}))
    examples = [to_example(draft) for draft in spoiled(exact, task, slip, player=player)]
    found = [Counter(flaw.mistake for flaw in find_flaws(example)) for example in examples]
    assert len(examples) >= 15
    allowed = {slip} | BESIDE.get(slip, set())
    assert all(set(flaws) <= allowed for flaws in found), Counter(
        name for flaws in found for name in flaws
    )
    assert sum(bool(flaws) for flaws in found) >= (0.5 if slip in SELDOM else 0.9) * min(
        len(examples), len(player.mistakes[slip])
    )


def test_a_bad_row_that_passes_stays_known():
    [row] = source_rows(1, rates={"contradiction": 1.0})
    view = {
        "query": "Plan a trip for work.",
        "source": {"question": row.question, "context": row.context, "answer": row.answer},
        "blocks": [],
        "atoms": [],
    }
    assert [(flaw.mistake, flaw.item_id) for flaw in find_flaws(view)] == [
        ("passes_bad", "plausibility")
    ]


def test_mistakes_come_at_their_rates():
    slips = MistakeRates()
    player = SimulatedModel("micro-builder", slips)
    rows = source_rows(1200, seed=21, rates={})
    for row in rows:
        for task in ("screening", "derivation"):
            player(
                [
                    (
                        "user",
                        json.dumps(
                            {
                                "task": task,
                                "question": row.question,
                                "context": row.context,
                                "answer": row.answer,
                            }
                        ),
                    )
                ]
            )
    for slip in ("fails_good", "detail_in_query", "hint_in_query", "invented_evidence"):
        low, high = _bounds(1200, getattr(slips, slip))
        assert low <= len(player.mistakes[slip]) <= high, slip
    low, high = _bounds(2400, slips.invalid_json)
    assert low <= len(player.mistakes["invalid_json"]) <= high


# Repairs


def repair(*names, send="the whole object"):
    return [
        ("assistant", "x"),
        (
            "user",
            json.dumps(
                {
                    "task": "t",
                    "repair": [{"id": n, "rule": "r", "detail": "d"} for n in names],
                    "send": send,
                }
            ),
        ),
    ]


def rubric_turns(count=6):
    request = "Plan a dinner for family."
    atoms = [
        {"atom_id": f"p1_a{i}", "text": f"The user's diet was {noun}.", "level": "A"}
        for i, noun in enumerate(WORDS["health"]["diet"][:count])
    ]
    return [("user", json.dumps({"task": "rubrics", "query": request, "atoms": atoms}))]


def test_what_is_named_is_mended_and_what_is_not_stays():
    player = SimulatedModel("p", MistakeRates.only(swapped_rubrics=1.0))
    good = BUILD_TASKS["rubrics"].make(json.loads(rubric_turns()[0][1]))["rubrics"]
    first = json.loads(player(rubric_turns()))["rubrics"]
    swapped = [entry["atom_id"] for entry, other in zip(first, good, strict=True) if entry != other]
    assert len(swapped) == 2
    others = [entry["atom_id"] for entry in good if entry["atom_id"] not in swapped]
    assert json.loads(player(rubric_turns() + repair(others[0])))["rubrics"] == first
    assert json.loads(player(rubric_turns() + repair("")))["rubrics"] == first, (
        "the whole names no item"
    )
    named = json.loads(player(rubric_turns() + repair(swapped[0], send="the named items alone")))[
        "rubrics"
    ]
    assert named == [entry for entry in good if entry["atom_id"] == swapped[0]]
    assert (
        json.loads(player(rubric_turns() + repair(swapped[1]) + repair(others[0])))["rubrics"]
        == good
    )


def test_broken_json_is_mended_when_the_whole_is_named():
    player = SimulatedModel("p", MistakeRates.only(invalid_json=1.0))
    with pytest.raises(ValueError):
        json.loads(player(rubric_turns()))
    with pytest.raises(ValueError):
        json.loads(player(rubric_turns() + repair("p1_a1")))
    assert json.loads(player(rubric_turns() + repair("")))["rubrics"]


def test_mending_has_its_probability():
    player = SimulatedModel("p", MistakeRates.only(invalid_json=1.0, mended=0.7))
    mended = 0
    total = 600
    for i in range(total):
        turns = [("user", json.dumps({"task": "naturalization", "blocks": [], "n": i}))]
        try:
            json.loads(player(turns + repair("")))
            mended += 1
        except ValueError:
            assert player(turns + repair("")) == player(turns)
    low, high = _bounds(total, 0.7)
    assert low <= mended <= high


@settings(max_examples=30)
@given(st.sampled_from(sorted(BUILDERS)), st.integers(0, 200), st.booleans())
def test_a_player_has_no_memory(name, number, warmed):
    """The same reply from a fresh player and from one that has talked about other things."""
    [row] = source_rows(number + 1)[number:]
    turns = [
        (
            "user",
            json.dumps(
                {
                    "task": "screening",
                    "question": row.question,
                    "context": row.context,
                    "answer": row.answer,
                }
            ),
        )
    ]
    player = SimulatedModel(name, BUILDERS[name])
    if warmed:
        player(rubric_turns())
    assert player(turns) == SimulatedModel(name, BUILDERS[name])(turns)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([], "first user message"),
        ([("user", "[1]")], "one JSON object"),
        ([("user", "{}")], "a JSON object with a task"),
        ([("user", '{"task": "poems"}')], "'poems'; allowed here: screening"),
        ([("user", '{"task": "annotation", "query": "x"}')], "KeyError 'passages'"),
        ([("user", '{"task": "annotation", "query": 3, "passages": [4]}')], "TypeError"),
        ([*rubric_turns(), ("user", '{"task": "rubrics"}')], "a list named repair"),
        ([*rubric_turns(), ("user", '{"repair": ["p1_a1"]}')], "a list named repair"),
    ],
)
def test_unknown_payloads_are_named(turns, said):
    with pytest.raises(ValueError, match="found|task") as error:
        SimulatedModel("p", MistakeRates())(turns)
    assert said in str(error.value) and len(str(error.value)) < 500


def test_rates_outside_zero_to_one_are_refused():
    with pytest.raises(ValueError, match="wrong_level"):
        MistakeRates(wrong_level=1.2)
    with pytest.raises(ValueError, match="typo"):
        MistakeRates.only(typo=0.1)


def test_bad_rows_can_be_worked_on_without_an_error():
    """A pipeline that lets everything through still gets replies of the right form."""
    for row in source_rows(400, seed=31, rates=dict.fromkeys(BAD, 1 / len(BAD))):
        draft = Draft.start(row)
        for stage in (SCREENING, DERIVATION, ANNOTATION):
            reply, complaints = read_form(
                json.dumps(BUILD_TASKS[stage.name].make(asked_of(stage, draft))), stage.reply
            )
            assert not complaints
            if stage is not SCREENING and not isinstance(found := stage.accept(draft, reply), Drop):
                draft = found


# Reviewers


def review_turns(example):
    return [("user", json.dumps({"task": "review", "example": as_reviewed(example)}))]


def judge_of(name, slips=None):
    return SimulatedModel(name, slips or REVIEWERS[name], {"review": REVIEW})


def test_reviewers_see_and_miss_at_their_rates(exact):
    clean = [to_example(draft) for draft in exact[1]]
    flawed = [to_example(draft) for draft in spoiled(exact, "annotation", "wrong_level", 120)]
    flawed = [example for example in flawed if find_flaws(example)]
    seer = judge_of("micro-reviewer-exact")
    never = judge_of("micro-reviewer-never")

    def approves(player, example):
        return all(verdicts(json.loads(player(review_turns(example)))).values())

    assert all(approves(seer, example) for example in clean) and not any(
        approves(seer, example) for example in flawed
    )
    assert not any(approves(never, example) for example in clean)
    blind = judge_of("blind", MistakeRates.only(missed_flaw=0.3))
    low, high = _bounds(len(flawed), 0.3)
    assert low <= sum(approves(blind, example) for example in flawed) <= high
    nervous = judge_of("nervous", MistakeRates.only(false_alarm=0.4))
    low, high = _bounds(len(clean), 0.6)
    assert low <= sum(approves(nervous, example) for example in clean) <= high


@pytest.mark.parametrize("slip", ["none", "false_alarm", "missed_flaw"])
def test_reviews_are_in_order_whatever_they_say(exact, slip):
    """Right or wrong, a review passes the check of its stage, and issues are what the truth says they are."""
    stage = review_stage("review-1")
    player = judge_of("p", MistakeRates.only(**({} if slip == "none" else {slip: 1.0})))
    flawed = [
        draft
        for task, name in (("annotation", "wrong_level"), ("naturalization", "added_words"))
        for draft in spoiled(exact, task, name)
    ]
    for draft in [*exact[1][:25], *flawed]:
        reply, rules = checked(
            stage, draft, json.loads(player([("user", stage.messages(draft)[1]["content"])]))
        )
        issues = objections_of(reply)
        flaws = find_flaws(to_example(draft))
        assert rules == []
        if slip == "none":
            assert {issue.item for issue in issues} == {flaw.item_id for flaw in flaws}
        elif slip == "missed_flaw":
            assert issues == []
        else:
            right = make_review(asked_of(stage, draft))
            assert len(issues) == len(objections_of(stage.reply.model_validate(right))) + 1
    assert len(flawed) >= 30


def test_a_row_about_another_domain_is_noticed(exact):
    draft = exact[1][0]
    moved = draft.model_copy(update={"domain": "health" if draft.domain != "health" else "coding"})
    assert [flaw.mistake for flaw in find_flaws(to_example(moved))] == ["wrong_domain"]
    reply = read_form(
        json.dumps(make_review(asked_of(review_stage("review-1"), moved))), review_stage("r").reply
    )[0]
    assert [issue.part for issue in objections_of(reply)] == ["fit"]


def test_what_has_to_be_avoided_may_not_be_left_out(exact):
    for draft in spoiled(exact, "annotation", "wrong_level", 120):
        flaws = find_flaws(to_example(draft))
        reply = make_review(asked_of(review_stage("review-1"), draft))
        harmful = [
            flaw.item_id
            for flaw in flaws
            if flaw.found.startswith("A instead") and "must avoid" in flaw.found
        ]
        assert reply["safety"]["ids"] == harmful and reply["safety"]["ok"] == (not harmful)


def test_the_table_of_stages_counts_what_checks_see(exact):
    table = stage_table({stage: exact[0][stage.name][:12] for stage in STAGES}, each=8)
    seen = table["seen %"].droplevel("stage")
    assert (seen["none"] == 0).all() and (table["seen"] <= table["planted"]).all()
    assert (
        seen[["missing_delta", "stray_auxiliary", "missing_item", "invented_evidence"]] == 100
    ).all()
    assert {stage.name for stage in STAGES} == set(table.index.get_level_values("stage"))


def test_a_review_that_lacks_an_item_is_mended_by_that_item(exact):
    stage = review_stage("review-1")
    draft = exact[1][0]
    player = judge_of("p", MistakeRates.only(missing_item=1.0))
    turns = [("user", stage.messages(draft)[1]["content"])]
    reply = read_form(player(turns), stage.reply)[0]
    [fault] = stage.check(draft, reply)
    assert fault.rule == "missing verdict in levels"
    second = read_form(
        player(turns + repair(fault.item_id, send="the named items alone")), stage.reply
    )[0]
    assert (
        {verdict.atom_id for verdict in second.levels}
        == {fault.item_id}
        == {verdict.atom_id for verdict in second.rubrics}
    )
    assert stage.check(draft, stage.merge(reply, second, {fault.item_id})) == []


def test_two_reviewers_differ():
    names = ("micro-reviewer", "micro-reviewer-2")
    turns = [
        [
            (
                "user",
                json.dumps(
                    {
                        "task": "review",
                        "example": {
                            "query": f"Plan a trip for work {i}.",
                            "source": {"question": "", "context": "", "answer": ""},
                            "blocks": [],
                            "atoms": [],
                        },
                    }
                ),
            )
        ]
        for i in range(300)
    ]
    replies = {name: [judge_of(name)(turn) for turn in turns] for name in names}
    assert replies[names[0]] != replies[names[1]]


# Behind a port


def asking(server, model, payload, **options):
    async def ask():
        async with Client(
            Endpoint(model=model, base_url=server.base_url, key_env="", **options)
        ) as client:
            return await client.ask(
                [{"role": "system", "content": "Work."}, {"role": "user", "content": payload}]
            )

    return asyncio.run(ask())


def test_the_server_speaks_for_players_and_names_what_it_does_not_know():
    with MicroServer([], roles=micro_roles()) as server:
        payload = rubric_turns()[0][1]
        assert len(json.loads(asking(server, "micro-builder-exact", payload).text)["rubrics"]) == 6
        with pytest.raises(CallError, match="poems.*allowed here: screening") as error:
            asking(server, "micro-builder", '{"task": "poems"}')
        assert error.value.kind == "bad_request" and error.value.status == 400
        with pytest.raises(CallError, match="micro-reviewer-never") as error:
            asking(server, "nobody", payload)
        assert error.value.kind == "not_found"
        with pytest.raises(CallError, match="allowed here: review"):
            asking(server, "micro-reviewer", payload)


def client(server, model):
    return Client(Endpoint(model=model, base_url=server.base_url, key_env=""))


async def build(
    rows, server, folder, model="micro-builder", reviewers=("micro-reviewer", "micro-reviewer-2")
):
    """(finished drafts, what the reviewers made of them)"""
    drafts = [Draft.start(row) for row in rows]
    for stage in STAGES:
        if stage is DISTRACTORS:
            drafts = plan_rows(drafts, folder / "plans.jsonl")
        if stage is NATURALIZATION:
            drafts = [compose(draft) for draft in drafts]
        drafts = (await run_stage(stage, drafts, client(server, model), folder)).kept
    return drafts, await review_drafts(drafts, [client(server, name) for name in reviewers], folder)


@pytest.mark.slow
def test_a_build_over_loopback_repeats_itself_and_can_be_judged(tmp_path):
    rows = clean_rows(source_rows(70, seed=41)).kept
    built = []
    for name in ("one", "two"):
        faults = Faults(server_error=0.02, seed=1) if name == "two" else None
        roles = micro_roles()
        with MicroServer([], roles=roles, faults=faults) as server:
            (tmp_path / name).mkdir()
            built.append(run_async(build(rows, server, tmp_path / name)))
    assert (
        built[0][0] == built[1][0]
        and built[0][1].accepted == built[1][1].accepted
        and built[0][1].dropped == built[1][1].dropped
    )
    before, after = (
        [to_example(draft) for draft in drafts] for drafts in (built[0][0], built[0][1].accepted)
    )
    assert len(before) > 0.6 * len(rows) and len(after) > 0.6 * len(before)
    table = mistake_table([roles["micro-builder"]], before)
    assert (
        table.loc[["swapped_rubrics", "invented_evidence", "missing_item"], "left"] == 0
    ).all() and table.left.sum() > 0

    def flawed(examples):
        return sum(bool(find_flaws(example)) for example in examples)

    assert flawed(after) <= 2 < flawed(before)
    marked, refused = mark_all(after)
    assert refused == [] and len(ExampleIndex(marked).examples) == len(marked)
    for example in marked:
        judgment = exact_judge(example, answer(example, random.Random(1)))
        assert all(atom.actual == atom.ideal for atom in judgment.atoms), find_flaws(example)


def test_hopeless_players_stop_a_pipeline(tmp_path):
    with MicroServer([], roles=micro_roles()) as server:
        with pytest.raises(StageError, match="invalid reply"):
            run_async(build(source_rows(30, rates={}), server, tmp_path, "micro-builder-broken"))
        (tmp_path / "never").mkdir()
        reviewers = ("micro-reviewer-never", "micro-reviewer-exact")
        with pytest.raises(StageError, match="review-1.*not approved"):
            run_async(
                build(
                    source_rows(30, rates={}),
                    server,
                    tmp_path / "never",
                    "micro-builder-exact",
                    reviewers,
                )
            )


# Markers


def test_marks_are_made_from_text_and_refused_with_reasons(exact):
    example = to_example(exact[1][0])
    marked = mark(example)
    assert (
        mark(Example.model_validate_json(marked.to_json())) == marked
        and example.content_hash != marked.content_hash
    )
    assert all(
        set(atom.usage_rubric) == {*example.atoms[0].usage_rubric, "marker"}
        for atom in marked.atoms
    )
    twin = example.model_copy(
        update={
            "atoms": [
                atom.model_copy(update={"text": example.atoms[0].text}) for atom in example.atoms
            ]
        }
    )
    for bad, said in (
        (example.model_copy(update={"question": "Plan."}), "'Plan.'"),
        (twin, "a noun of its own"),
        (example.model_copy(update={"domain": "law"}), "allowed"),
    ):
        with pytest.raises(ValueError, match=example.id) as error:
            mark(bad)
        assert said in str(error.value)


def test_known_examples_of_the_world_get_the_markers_they_have():
    for example in make_examples("long", 100, 5, "test"):
        bare = example.model_copy(
            update={"atoms": [a.model_copy(update={"usage_rubric": {}}) for a in example.atoms]}
        )
        assert [a.usage_rubric["marker"] for a in mark(bare).atoms] == [
            a.usage_rubric["marker"] for a in example.atoms
        ]


def test_talks_are_known_by_what_was_asked():
    turns = rubric_turns()
    assert (
        read_conversation(turns).key
        == read_conversation(turns + repair("a")).key
        != read_conversation(rubric_turns(5)).key
    )
    assert read_conversation(turns + repair("a", "b") + repair("c")).repairs == (
        frozenset("ab"),
        frozenset("c"),
    )
