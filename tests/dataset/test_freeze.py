"""Freezing: whatever shapes the rows is named when it changes; nothing runs unproved, refusals say how to go on."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.dataset import pilot as z
from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.dataset.duplicates import NearConfig
from memcalib.inference.endpoint import Endpoint, Price
from memcalib.micro.world import make_examples
from memcalib.dataset.pilot import PilotIssue, ReviewBook, pilot_items, write_batch
from memcalib.io.records import DataError
from memcalib.dataset.screening import load_screen
from memcalib.dataset.writing import PlanConfig

BUILDER = Endpoint(model="builder", base_url="https://models.example.org/v1")
STAGES = (SCREENING, DERIVATION, ANNOTATION)
EXAMPLES = make_examples("short", 60, 0, "rl")


def table(stages=STAGES, builder=BUILDER, screen=None, near=None, plan=None):
    tables = {
        "source screening": load_screen(screen),
        "near duplicates": near or NearConfig(),
        "plan": plan or PlanConfig(),
    }
    return z.pipeline_settings([(stage, builder) for stage in stages], tables)


NOW = table()


def changed(**more):
    return [change.name for change in z.check_frozen(table(**more), NOW)]


def swapped(stage, **fields):
    return tuple(replace(s, **fields) if s is stage else s for s in STAGES)


def test_each_kind_of_change_is_named(tmp_path):
    prompt = tmp_path / "annotation-2.md"
    prompt.write_text("Do it otherwise.")
    assert changed() == []
    assert changed(stages=swapped(ANNOTATION, prompt=str(prompt))) == ["annotation: prompt text"]
    assert changed(stages=swapped(SCREENING, reply=DERIVATION.reply)) == ["screening: prompt text"]
    assert changed(stages=swapped(DERIVATION, repairs=5, temperature=1.0)) == [
        "derivation: repairs",
        "derivation: temperature",
    ]
    assert changed(stages=STAGES[:2]) == [
        name for name in sorted(NOW) if name.startswith("annotation: ")
    ]
    assert changed(builder=BUILDER.model_copy(update={"model": "other"})) == [
        f"{s.name}: model" for s in sorted(STAGES, key=lambda s: s.name)
    ]
    assert len(changed(builder=BUILDER.model_copy(update={"thinking": "default"}))) == 3
    assert (
        len(
            changed(
                builder=BUILDER.model_copy(update={"base_url": "https://elsewhere.example.org/v1"})
            )
        )
        == 3
    )
    assert len(changed(builder=BUILDER.model_copy(update={"extra_body": {"top_k": 5}}))) == 3
    assert changed(screen={"limits": {"health": {"score": 70}}}) == [
        "source screening: limits.health.score"
    ]
    assert changed(screen={"requests": "help please"}) == ["source screening: requests"]
    assert changed(near=NearConfig(threshold=0.9)) == ["near duplicates: threshold"]
    assert changed(plan=PlanConfig(seed=3)) == ["plan: seed"]


def test_what_changes_the_bill_alone_is_no_change():
    more = {
        "concurrency": 2,
        "rpm": 3.0,
        "timeout": 5.0,
        "attempts": 1,
        "price": Price(prompt=1, completion=2),
        "key_env": "OTHER_KEY",
    }
    assert changed(builder=BUILDER.model_copy(update=more)) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4000/v1",
        "http://localhost:1/v1",
        "http://[::1]:8000/v1",
        "http://127.9.9.9/v1",
    ],
)
def test_servers_on_this_machine_are_one(url):
    assert z.server_name(BUILDER.model_copy(update={"base_url": url})) == "this machine"


def test_other_servers_are_told_apart():
    names = {
        z.server_name(BUILDER.model_copy(update={"base_url": url}))
        for url in (None, "http://127.example.org/v1", "http://h:1/v1", "http://h:2/v1")
    }
    assert len(names) == 4 and "this machine" not in names


def test_numbers_are_compared_by_value_and_the_version_by_two_places(monkeypatch):
    assert table(near=NearConfig(threshold=1)) == table(near=NearConfig(threshold=1.0))
    monkeypatch.setattr(z, "__version__", ".".join([*z.__version__.split(".")[:2], "99"]))
    assert changed() == []
    monkeypatch.setattr(z, "__version__", "99.0.0")
    assert changed() == ["memcalib"]


def test_two_stages_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'screening' twice"):
        table(stages=(SCREENING, SCREENING))


tables = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", "2"]), max_size=6)


@given(tables, tables)
def test_every_difference_and_nothing_else_is_listed(now, frozen):
    found = z.check_frozen(now, frozen)
    assert {c.name: (c.frozen, c.now) for c in found} == {
        name: (frozen.get(name), now.get(name))
        for name in now.keys() | frozen.keys()
        if now.get(name) != frozen.get(name)
    }
    assert [c.name for c in found] == sorted(c.name for c in found)
    assert all(("not there" in str(c)) == (None in (c.frozen, c.now)) for c in found)


# ---- freezing


def batch_of(folder, examples, settings=NOW, passed=None, reviewer="reader"):
    batch = write_batch(folder, pilot_items(examples), settings)
    book = ReviewBook(batch.reviews, batch.items, reviewer)
    for item, verdict in zip(batch.items, passed or [], strict=False):
        book.put(item.id, verdict, [] if verdict else [PilotIssue(stage="rubrics", text="wrong")])
    book.close()
    return batch


def refusal(*arguments, call=z.freeze):
    with pytest.raises(z.FreezeError) as caught:
        call(*arguments)
    return caught.value


@given(st.lists(st.sampled_from([True, True, True, True, False, None]), min_size=1, max_size=20))
def test_only_nine_in_ten_of_all_rows_unlock(tmp_path_factory, verdicts):
    folder = tmp_path_factory.mktemp("pilot")
    decided = [v for v in verdicts if v is not None]
    batch_of(folder, EXAMPLES[: len(verdicts)], passed=decided)
    if len(decided) == len(verdicts) and 10 * sum(decided) >= 9 * len(verdicts):
        frozen = z.freeze(folder, NOW)
        assert (frozen.pilot.passed, frozen.pilot.rows) == (sum(decided), len(verdicts))
        assert z.check_frozen(NOW, frozen.settings) == []
        return
    error = refusal(folder, NOW)
    hopeless = 10 * (len(verdicts) - decided.count(False)) < 9 * len(verdicts)
    assert ("memcalib build --pilot 50" in error.go_on) == hopeless
    assert hopeless or (
        "Review the rest" in error.go_on and "memcalib build --freeze" in error.go_on
    )


def test_no_batch_no_freezing(tmp_path):
    error = refusal(tmp_path, NOW)
    assert "no pilot batch" in str(error) and error.go_on.endswith("memcalib build --pilot 50")


def test_settings_changed_after_the_batch(tmp_path):
    batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    error = refusal(tmp_path, table(near=NearConfig(threshold=0.9)))
    assert error.reasons == [
        "changed since batch 1: near duplicates: threshold: then 0.88, now 0.9"
    ]
    assert [c.name for c in error.changes] == [
        "near duplicates: threshold"
    ] and "fresh batch" in error.go_on


def test_the_latest_batch_counts_and_has_to_be_fresh(tmp_path):
    batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    second = batch_of(tmp_path, EXAMPLES[10:20])
    assert "10 left of 10" in str(refusal(tmp_path, NOW))
    book = ReviewBook(second.reviews, second.items)
    for item in second.items:
        book.put(item.id, True)
    frozen = z.freeze(tmp_path, NOW)
    assert (frozen.pilot.batch, frozen.pilot.earlier, frozen.pilot.reviewers) == (
        2,
        1,
        ["not named"],
    )
    (tmp_path / "batch-02").rename(tmp_path / "kept")
    (tmp_path / "batch-01").rename(tmp_path / "batch-03")
    (tmp_path / "kept").rename(tmp_path / "batch-01")
    for name in ("batch-03",):
        says = json.loads((tmp_path / name / "batch.json").read_text()) | {"number": 3}
        (tmp_path / name / "batch.json").write_text(json.dumps(says))
    assert z.freeze(tmp_path, NOW).pilot.batch == 3


def test_rows_seen_before_do_not_count(tmp_path):
    first = batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    other = batch_of(tmp_path / "elsewhere", EXAMPLES[5:15], passed=[True] * 10)
    says = json.loads((other.folder / "batch.json").read_text()) | {"number": 2}
    (other.folder / "batch.json").write_text(json.dumps(says))
    other.folder.rename(tmp_path / "batch-02")
    assert first.number == 1
    assert "5 rows were in an earlier batch" in str(refusal(tmp_path, NOW))


def test_the_record_names_rows_and_reviews(tmp_path):
    one = batch_of(tmp_path / "a", EXAMPLES[:10], passed=[True] * 10)
    first = z.freeze(tmp_path / "a", NOW)
    ReviewBook(one.reviews, one.items, "second").put(one.items[0].id, True)
    second = z.freeze(tmp_path / "a", NOW)
    assert (
        first.pilot.rows_hash == second.pilot.rows_hash
        and first.pilot.reviews_hash != second.pilot.reviews_hash
    )
    assert (
        second.pilot.reviewers == ["reader", "second"] and sum(second.pilot.domains.values()) == 10
    )
    assert (
        first.hash
        == second.hash
        != z.freeze_without_pilot(table(near=NearConfig(seed=2)), "why").hash
    )


# ---- the file


def test_a_frozen_file_comes_back(tmp_path):
    frozen = z.freeze_without_pilot(NOW, "a world that knows the truth")
    path = z.write_frozen(tmp_path / "deep" / "frozen.json", frozen)
    assert z.read_frozen(path) == frozen == z.require_frozen(NOW, path)
    assert list(tmp_path.rglob("*.part")) == []
    with pytest.raises(FileNotFoundError):
        z.read_frozen(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"settings": {}}',
        '{"memcalib": "1", "frozen_at": "x", "settings": {"a": "b"}}',
        "\xff",
    ],
)
def test_a_damaged_file_is_an_error_with_its_name(tmp_path, text):
    path = tmp_path / "frozen.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"frozen\.json"):
        z.require_frozen(NOW, path)


def test_pilot_or_reason_never_both_or_none(tmp_path):
    batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    frozen = z.freeze(tmp_path, NOW)
    for more in ({"pilot": None}, {"reason": "and why"}):
        with pytest.raises(ValueError, match="allowed is one of them"):
            z.Frozen(**(frozen.model_dump() | more))


def test_shipped_ones_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(z, "_SHIPPED", tmp_path)
    frozen = z.freeze_without_pilot(NOW, "shipped")
    z.write_frozen(tmp_path / "micro.json", frozen)
    assert z.shipped_frozen() == ["micro"] and z.require_frozen(NOW, "micro") == frozen
    monkeypatch.setattr(z, "_SHIPPED", tmp_path / "none")
    assert z.shipped_frozen() == []


def test_an_unfrozen_or_changed_pipeline_is_refused(tmp_path):
    path = tmp_path / "frozen.json"
    commands = z.Commands("build --pilot 7", "build --freeze now")
    error = refusal(NOW, path, commands, call=z.require_frozen)
    assert "this pipeline is not frozen" in str(error)
    assert "build --pilot 7" in error.go_on and "build --freeze now" in error.go_on
    z.write_frozen(path, z.freeze_without_pilot(NOW, "why"))
    now = table(stages=swapped(ANNOTATION, repairs=9), near=NearConfig(threshold=0.9))
    error = refusal(now, path, commands, call=z.require_frozen)
    assert error.reasons == [
        "annotation: repairs: frozen 2, now 9",
        "near duplicates: threshold: frozen 0.88, now 0.9",
    ]
    assert "Put the settings back" in error.go_on and "build --pilot 7" in error.go_on


def test_many_reasons_are_cut():
    error = z.FreezeError("head", [str(n) for n in range(50)], "go on")
    assert (
        len(str(error).splitlines()) == 23
        and "and 30 more" in str(error)
        and len(error.reasons) == 50
    )
