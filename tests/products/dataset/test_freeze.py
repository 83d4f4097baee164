"""Freezing: whatever shapes the rows is named when it changes;
nothing runs unproved, refusals say how to go on.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.dataset import pilot as z
from memcalib.construction import ANNOTATION, DERIVATION, SCREENING
from memcalib.products.dataset.duplicates import NearConfig
from memcalib.inference.endpoint import Endpoint, Price
from memcalib.products.micro.world import make_examples
from memcalib.products.dataset.pilot import PilotIssue, ReviewBook, pilot_items, write_batch
from memcalib.io.records import DataError
from memcalib.products.dataset.screening import load_screen
from memcalib.products.dataset.writing import PlanConfig

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


def changed(**changes):
    """The names of the settings that differ from `NOW` in a pipeline with these changes."""
    return [change.name for change in z.check_frozen(table(**changes), NOW)]


def changed_builder(**fields):
    return changed(builder=BUILDER.model_copy(update=fields))


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
    annotation_settings = [name for name in sorted(NOW) if name.startswith("annotation: ")]
    assert changed(stages=STAGES[:2]) == annotation_settings
    stage_names = sorted(stage.name for stage in STAGES)
    assert changed_builder(model="other") == [f"{name}: model" for name in stage_names]
    assert len(changed_builder(thinking="default")) == 3
    assert len(changed_builder(base_url="https://elsewhere.example.org/v1")) == 3
    assert len(changed_builder(extra_body={"top_k": 5})) == 3
    assert changed(screen={"limits": {"health": {"score": 70}}}) == [
        "source screening: limits.health.score"
    ]
    assert changed(screen={"requests": "help please"}) == ["source screening: requests"]
    assert changed(near=NearConfig(threshold=0.9)) == ["near duplicates: threshold"]
    assert changed(plan=PlanConfig(seed=3)) == ["plan: seed"]


def test_what_changes_the_bill_alone_is_no_change():
    fields = {
        "concurrency": 2,
        "rpm": 3.0,
        "timeout": 5.0,
        "attempts": 1,
        "price": Price(prompt=1, completion=2),
        "key_env": "OTHER_KEY",
    }
    assert changed_builder(**fields) == []


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
    urls = (None, "http://127.example.org/v1", "http://h:1/v1", "http://h:2/v1")
    names = {z.server_name(BUILDER.model_copy(update={"base_url": url})) for url in urls}
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
    changes = z.check_frozen(now, frozen)
    assert {change.name: (change.frozen, change.now) for change in changes} == {
        name: (frozen.get(name), now.get(name))
        for name in now.keys() | frozen.keys()
        if now.get(name) != frozen.get(name)
    }
    names = [change.name for change in changes]
    assert names == sorted(names)
    for change in changes:
        assert ("not there" in str(change)) == (None in (change.frozen, change.now))


# ---- freezing


def batch_of(folder, examples, settings=NOW, passed=(), reviewer="reader"):
    batch = write_batch(folder, pilot_items(examples), settings)
    book = ReviewBook(batch.reviews, batch.items, reviewer)
    for item, verdict in zip(batch.items, passed, strict=False):
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
    count = len(verdicts)
    decided = [verdict for verdict in verdicts if verdict is not None]
    batch_of(folder, EXAMPLES[:count], passed=decided)
    if len(decided) == count and 10 * sum(decided) >= 9 * count:
        frozen = z.freeze(folder, NOW)
        assert (frozen.pilot.passed, frozen.pilot.rows) == (sum(decided), count)
        assert z.check_frozen(NOW, frozen.settings) == []
        return
    error = refusal(folder, NOW)
    hopeless = 10 * (count - decided.count(False)) < 9 * count
    assert ("memcalib build --pilot 50" in error.go_on) == hopeless
    if not hopeless:
        assert "Review the rest" in error.go_on and "memcalib build --freeze" in error.go_on


def test_no_batch_no_freezing(tmp_path):
    error = refusal(tmp_path, NOW)
    assert "no pilot batch" in str(error) and error.go_on.endswith("memcalib build --pilot 50")


def test_settings_changed_after_the_batch(tmp_path):
    batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    error = refusal(tmp_path, table(near=NearConfig(threshold=0.9)))
    assert error.reasons == [
        "changed since batch 1: near duplicates: threshold: then 0.88, now 0.9"
    ]
    assert [change.name for change in error.changes] == ["near duplicates: threshold"]
    assert "new batch" in error.go_on


def test_the_latest_batch_counts_and_has_to_be_fresh(tmp_path):
    batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    second = batch_of(tmp_path, EXAMPLES[10:20])
    assert "10 left of 10" in str(refusal(tmp_path, NOW))
    book = ReviewBook(second.reviews, second.items)
    for item in second.items:
        book.put(item.id, True)
    pilot = z.freeze(tmp_path, NOW).pilot
    assert (pilot.batch, pilot.earlier, pilot.reviewers) == (2, 1, ["not named"])


def test_rows_seen_before_do_not_count(tmp_path):
    """`write_batch` refuses them; a list that was edited by hand does not help."""
    batch_of(tmp_path, EXAMPLES[:10], passed=[True] * 10)
    second = batch_of(tmp_path, EXAMPLES[10:20], passed=[True] * 10)
    pilots = z.read_pilots(tmp_path)
    pilots.batches[0].ids[5:] = [item.id for item in second.items[:5]]
    (tmp_path / "pilots.json").write_text(pilots.model_dump_json())
    assert "5 rows were in an earlier batch" in str(refusal(tmp_path, NOW))


def test_the_record_names_rows_and_reviews(tmp_path):
    batch = batch_of(tmp_path / "a", EXAMPLES[:10], passed=[True] * 10)
    first = z.freeze(tmp_path / "a", NOW)
    ReviewBook(batch.reviews, batch.items, "second").put(batch.items[0].id, True)
    second = z.freeze(tmp_path / "a", NOW)
    assert first.pilot.rows_hash == second.pilot.rows_hash
    assert first.pilot.reviews_hash != second.pilot.reviews_hash
    assert second.pilot.reviewers == ["reader", "second"]
    assert sum(second.pilot.domains.values()) == 10
    other = z.freeze_without_pilot(table(near=NearConfig(seed=2)), "why")
    assert first.hash == second.hash != other.hash


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
    for change in ({"pilot": None}, {"reason": "and why"}):
        fields = z.freeze(tmp_path, NOW).model_dump()
        fields.update(change)
        with pytest.raises(ValueError, match="allowed: one of the two"):
            z.Frozen(**fields)


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
    assert "Restore the settings" in error.go_on and "build --pilot 7" in error.go_on


def test_many_reasons_are_cut():
    error = z.FreezeError("head", [str(n) for n in range(50)], "go on")
    assert len(str(error).splitlines()) == 23
    assert "and 30 more" in str(error) and len(error.reasons) == 50
