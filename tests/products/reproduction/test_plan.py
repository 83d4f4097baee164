"""From a profile to jobs: named by settings alone, shared where they are the same, refused where
something does not fit.
"""

import json

import pytest

from memcalib.products.reproduction.plan import Plan, kind_code
from memcalib.products.reproduction.plan_steps import taught
from memcalib.products.reproduction.profiles import load_profile
from memcalib.trainer.train_config import find_world


def names(plan: Plan, kind: str) -> set[str]:
    return {job.name for job in plan.jobs() if job.kind == kind}


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    return Plan(load_profile("micro"), tmp_path_factory.mktemp("micro"))


def test_the_reference_run_has_as_many_trainings_as_it_has_different_settings(micro):
    assert len(names(micro, "train")) == 78
    rows = micro.rows_of("main_results") + micro.rows_of("localization_ablation")
    rows += micro.rows_of("eta_sensitivity") + micro.rows_of("training_dynamics")
    used = [row.jobs["train"] for row in rows if "train" in row.jobs]
    assert set(used) == names(micro, "train") and len(used) > len(set(used))


def test_names_and_identities_do_not_depend_on_where_the_run_lies(tmp_path):
    here, there = (Plan(load_profile("smoke"), tmp_path / name).jobs() for name in "ab")
    assert [job.name for job in here] == [job.name for job in there]
    assert all(here.identity(job.name) == there.identity(job.name) for job in here)


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("models.short.settings.train.steps=3", True),
        ("models.short.settings.train.lr=0.5", True),
        ("train_seeds=[9]", True),
        ("rows.GDPO.settings={eta: 0.5}", False),  # of another method's row
        ("models.short.settings.data.world.test=30", False),
        ("models.short.settings.train.save_every=1", False),
        ("eval_seeds=[7]", False),
        ("processes=1", False),
    ],
)
def test_what_decides_a_training_decides_its_name(tmp_path, setting, changes):
    if "data.world.test" in setting:
        world = "{name: short, seed: 7, train: 2000, validation: 12, test: 30, demonstrations: 48}"
        setting = f"models.short.settings={{data.world: {world}, train: {{steps: 2, prompts: 2, "
        setting += "generations: 4, eval_every: 1}, sft: {eval_every: 2}}"
        base = setting.replace("test: 30", "test: 24")
    else:
        base = "traces=1"
    before = Plan(load_profile("smoke", [base]), tmp_path)
    after = Plan(load_profile("smoke", [setting]), tmp_path)

    def training(plan):
        row = next(row for row in plan.rows_of("main_results") if row.row == "GRPO")
        return row.jobs["train"]

    assert (training(before) != training(after)) == changes


def test_an_arm_that_cannot_be_is_named_with_its_experiment(tmp_path):
    arms = "ablations.eta_sensitivity.arms={odd: {mode: sideways}}"
    with pytest.raises(ValueError, match=r"ablations.eta_sensitivity: short: odd.*sideways"):
        Plan(load_profile("smoke", [arms]), tmp_path)


@pytest.mark.parametrize(
    ("setting", "needle"),
    [
        ("models.qwen3-8b.gpus=4", "needs 8 GPUs on 1 nodes, but its launcher has 1 nodes with 4"),
        ("models.qwen3.5-35b-a3b.nodes=1", "unknown option"),
        ("models.ministral-3-8b.gpus=0", "launch.processes="),
    ],
)
def test_a_recipe_that_needs_more_gpus_than_its_launcher_has_is_refused(tmp_path, setting, needle):
    with pytest.raises(ValueError, match=needle):
        Plan(load_profile("paper", [setting]), tmp_path)


@pytest.mark.parametrize(
    ("setting", "needle"),
    [
        ("rows.GDPO.begins=Cold-strat", "perhaps you meant Cold-start"),
        ("rows.GDPO.method=ppo", "allowed: sft, opsd-pg"),
        ("ablations.eta_sensitivity.models=[shrot]", "perhaps you meant short"),
        ("train_seeds=[1, 1]", "each only once"),
        ("train_seeds=[1, 2, 3]", "as many as there are eval_seeds"),
        ("search={rows: [GDPO], values: [1.0e-3], seed: 1}", "a training seed"),
        ("search={rows: [GDOP], values: [1.0e-3], seed: 5}", "perhaps you meant GDPO"),
        (
            "search={rows: [GDPO], values: [1.0, 2.0], by_row: {GDPO: [1.0]}, seed: 5}",
            "the same number of values for each row",
        ),
        ("taught={all: {rows: {esperanto: 8}}}", "unknown world 'esperanto'; allowed: short"),
        ("taught={all: {rows: {english: 0}}}", "taught.all.rows.english: found 0"),
        ("modles={}", "unknown option"),
    ],
)
def test_a_profile_at_fault_is_refused_with_what_is_allowed(setting, needle):
    with pytest.raises(ValueError, match=needle):
        load_profile("smoke", [setting])


def test_a_profile_extends_another_and_never_itself(tmp_path):
    (tmp_path / "a.yaml").write_text(f"extends: {tmp_path}/b.yaml\n")
    (tmp_path / "b.yaml").write_text(f"extends: {tmp_path}/a.yaml\n")
    with pytest.raises(ValueError, match="does not extend this one"):
        load_profile(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("extends: smoke\nrows: {OPSD-PG: null}\n")
    assert "OPSD-PG" not in load_profile(tmp_path / "c.yaml").rows
    (tmp_path / "d.yaml").write_text("extends: smkoe\n")
    with pytest.raises(FileNotFoundError, match="smoke"):
        load_profile(tmp_path / "d.yaml")


def test_registered_tries_each_arm_as_often_and_measures_on_other_seeds(tmp_path):
    plan = Plan(load_profile("registered"), tmp_path)
    seeds = {}
    for row in plan.rows_of("main_results"):
        seeds.setdefault(row.row, []).append(row.seed)
    assert seeds == {
        "Cold-start": [42],
        "GRPO": [801, 802, 803],
        "GDPO": [801, 802, 803, 804, 805],
        "MemCalib-RL": [801, 802, 803, 804, 805],
        "MemCalib-RL, two-sided": [801, 802, 803, 804, 805],
        "Evidence + KL": [801, 802, 803],
    }
    searches = [job for job in plan.jobs() if job.kind == "choose"]
    assert len(searches) == 5 and {len(job.reads) for job in searches} == {2}


def test_small_is_in_plain_english_and_shorter_in_its_tries(tmp_path):
    """Worlds, judges and the length of a try are the profile's; code of the world counts."""
    plan = Plan(load_profile("small"), tmp_path)
    trainings = [job for job in plan.jobs() if job.kind == "train"]
    assert {job.settings["world"]["name"] for job in trainings} == {"english"}
    tries = [name for job in plan.jobs() if job.kind == "choose" for name in job.reads]
    steps = {plan.by_name[name].settings["steps"] for name in tries if "/sft-" not in name}
    assert steps == {10}
    row = next(row for row in plan.rows_of("judge_stability") if row.row == "GDPO")
    assert plan.by_name[row.jobs["train"]].settings["steps"] == 30
    second = plan.by_name[row.jobs["judge"]]
    assert second.settings["judge"].endswith(":SECOND_ENGLISH_JUDGE")
    assert kind_code("judge", "english") != kind_code("judge", "short")
    assert second.code == kind_code("judge", "english")


def test_demonstrations_of_two_worlds_share_no_example(tmp_path):
    taught({"english": 5, "english-noisy": 3}, 0, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "accepted.jsonl").read_text().splitlines()]
    assert len({row["example_id"] for row in rows}) == 8
    alone = find_world("english").demonstrations(5, 0)
    assert [row["completion"] for row in rows[:5]] == [row["completion"] for row in alone]
