"""Every row of the paper's tables, every panel of its figures and every setting of its appendix has
a job in `paper`, and in `small`; where one is taken away, it is named.
"""

import json
from pathlib import Path

import pandas as pd
import pytest

from memcalib.products.reproduction.completeness import check_complete, paper_rows, unproduced
from memcalib.products.reproduction.experiments import PAPER_ITEMS
from memcalib.products.reproduction.plan import Plan
from memcalib.products.reproduction.profiles import load_profile

REFERENCE = Path(__file__).parents[3] / "runs" / "reference"
COMPLETE = ("paper", "small")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    root = tmp_path_factory.mktemp("plans")
    return {name: Plan(load_profile(name), root / name) for name in COMPLETE}


def column(table: str, *names: str) -> list[tuple]:
    rows = pd.read_csv(REFERENCE / f"{table}.csv")
    return list(dict.fromkeys(rows[list(names)].itertuples(index=False, name=None)))


@pytest.mark.parametrize("name", COMPLETE)
def test_nothing_of_the_paper_is_without_a_job(plans, name):
    assert unproduced(plans[name]) == []
    check_complete(plans[name])


def test_the_rows_that_are_asked_for_are_those_of_the_published_tables():
    """The walk is checked against the files themselves, so that it cannot lose a row unseen."""
    wanted = {}
    for row in paper_rows():
        wanted.setdefault(row.label, []).append((row.model, row.row))
    main = column("main_results", "model", "method")
    assert len(main) == 24
    assert wanted["tab:main-results"] == wanted["tab:full-main-results"] == main
    assert [model for model, _ in wanted["tab:model-survey"]] == [
        model for (model,) in column("model_survey", "model")
    ]
    assert len(wanted["tab:model-survey"]) == 9
    arms = [f"{a}, {b}" for a, b in column("localization_ablation", "granularity", "signal")]
    assert [row for _, row in wanted["tab:localization-ablation"]] == arms and len(arms) == 4
    etas = [f"{eta:.2f}" for (eta,) in column("eta_sweep", "eta")]
    assert [row for _, row in wanted["tab:eta-sweep"]] == etas and len(etas) == 5
    for label, table in (
        ("tab:alternative-judge-results", "alternative_judge"),
        ("tab:rpeval-results", "rpeval"),
    ):
        methods = [method for (method,) in column(table, "method")]
        assert [row for _, row in wanted[label]] == methods and len(methods) == 8
    panels = {label[-1] for label in wanted if label.startswith("fig:mechanism-analysis ")}
    assert panels == set("abcdefgh")
    results = {
        label.partition(" ")[0] for label in wanted if not label.startswith("fig:mechanism")
    } | {"fig:mechanism-analysis"}
    drawn_from_no_run = {
        "fig:overview",
        "fig:method",
        "fig:data",
        "fig:judge-human-audit",
        "tab:benchmark-comparison",
        "tab:source-datasets",
        "tab:benchmark-composition",
        "tab:benchmark-structure",
        "tab:channels",
    }
    assert results | drawn_from_no_run == set(PAPER_ITEMS), "each label is in one of the two"


@pytest.mark.parametrize("name", COMPLETE)
def test_a_row_that_is_taken_away_is_named(name, tmp_path):
    """One thing at a time: a row, an arm, a judge, a test, traces, a model of the survey."""
    whole = load_profile(name)
    arms = dict(whole.ablations["eta_sensitivity"].arms)
    del arms["0.50"]
    cells = dict(whole.ablations["localization_ablation"].arms)
    del cells["Sentence, Absolute"]
    removed = {  # setting -> what is named
        f"ablations.eta_sensitivity.arms={arms}": "tab:eta-sweep: 0.50",
        f"ablations.localization_ablation.arms={cells}": (
            "tab:localization-ablation: Sentence, Absolute"
        ),
        "second_judge=null": "tab:judge-stability: Base",
        "rpeval=null": "tab:rpeval-results: MemCalib-RL",
        "rows.MemCalib-RL.settings.trace_every=0": "fig:localization-case-support",
        "ablations.training_dynamics=null": "fig:mechanism-analysis d",
        "rows.Base=null": "tab:full-main-results: Base",
    }
    if name == "paper":
        removed |= {
            "survey.DeepSeek-V4-Flash=null": "tab:model-survey: as it is, DeepSeek-V4-Flash",
            "models.ministral-3-8b=null": "Ministral-3-8B-Instruct",
            "models.ministral-3-8b.rows=[Base, Cold-start]": "tab:main-results: SFT, Ministral",
        }
    for setting, named in removed.items():
        plan = Plan(load_profile(name, [setting]), tmp_path)
        with pytest.raises(ValueError, match="(has|have) no job in this profile") as error:
            check_complete(plan)
        assert named in str(error.value), setting


def test_small_says_what_it_does_not_run(plans):
    survey = {model for (model,) in column("model_survey", "model")}
    models = {model for model, _ in column("main_results", "model", "method")}
    not_run = set(plans["small"].profile.not_run)
    assert not_run == (survey | models) - {"Qwen3-8B"}
    assert plans["paper"].profile.not_run == ()
    assert plans["small"].profile.models["smollm2-135m"].stands_for == "Qwen3-8B"


def test_small_is_paper_with_a_file_of_overrides(plans):
    small, paper = (plans[name].profile for name in ("small", "paper"))
    assert list(small.rows) == list(paper.rows)
    assert {name: small.ablations[name].arms for name in small.ablations} == {
        name: paper.ablations[name].arms for name in paper.ablations
    }
    assert small.search.rows == paper.search.rows and small.eval_seeds == paper.eval_seeds


# -- the appendix


def training(plan: Plan, row: str, model: str = ""):
    model = model or plan.profile.first_model
    planned = next(r for r in plan.rows_of("main_results") if (r.model, r.row) == (model, row))
    return plan.by_name[planned.jobs["train"]]


@pytest.mark.parametrize("name", COMPLETE)
def test_sft_and_cold_start_are_two_models(plans, name):
    plan = plans[name]
    sft, cold = training(plan, "SFT"), training(plan, "Cold-start")
    assert sft.name != cold.name
    learnt = [[other for other in job.reads if other.startswith("data/")] for job in (sft, cold)]
    assert learnt[0] != learnt[1] and all(learnt)
    for method in ("OPSD-PG", "OPSD-GKD", "GRPO", "GDPO", "MemCalib-RL"):
        assert cold.name in training(plan, method).reads, method
    assert cold.name not in sft.reads


def test_demonstrations_are_of_12000_and_of_4000_examples(plans):
    """app:sft-data: SFT on all training examples, the cold start on 4,000 of them."""
    plan = plans["paper"]
    split = plan.by_name["data/split"]
    assert split.settings["sizes"] == {
        "train": {"cold_start": 4000, "rl": 8000},
        "validation": 1500,
    }
    assert "data/demonstrations-all" in training(plan, "SFT").reads
    assert "data/demonstrations-cold_start" in training(plan, "Cold-start").reads
    both = plan.by_name["data/demonstrations-all"].reads
    assert both == ("data/demonstrations-cold_start", "data/demonstrations-rl")
    for model in plan.profile.models:
        words = training(plan, "GRPO", model).command
        assert any(word.endswith("data/split/rl.jsonl") for word in words)
        assert any(word.endswith("data/split/validation.jsonl") for word in words)


def test_fine_tuning_is_the_papers(plans):
    """app:training-details: LoRA 32/64, one epoch, batch 32, 5 % warm-up, cosine."""
    for row in ("SFT", "Cold-start"):
        config = training(plans["paper"], row).settings["config"]
        assert (config["lora_rank"], config["lora_alpha"], config["epochs"]) == (32, 64, 1)
        assert (config["batch_size"], config["warmup"], config["schedule"]) == (32, 0.05, "cosine")
    assert training(plans["paper"], "Cold-start").settings["config"]["lr"] == 1e-4


def test_reinforcement_is_the_papers(plans):
    """64 queries x 8 answers, 125 steps, mini-batches of 256, temperature 1, eta 0.75, cap 4."""
    plan = plans["paper"]
    for model in plan.profile.models:
        for row in ("GRPO", "GDPO", "MemCalib-RL", "OPSD-PG", "OPSD-GKD"):
            settings = training(plan, row, model).settings
            config = settings["config"]
            shape = (config["prompts"], config["generations"], settings["steps"])
            assert shape == (64, 8, 125) and config["minibatches"] == 2, (model, row)
            assert config["temperature"] == 1
    config = training(plan, "MemCalib-RL").settings["config"]
    assert (config["eta"], config["cap"]) == (0.75, 4)
    large = training(plan, "GDPO", "qwen3.5-35b-a3b").settings["config"]
    assert (large["lora_rank"], large["lr"]) == (64, 5e-6)
    assert training(plan, "GDPO", "ministral-3-8b").settings["config"]["lr"] == 1e-6
    assert training(plan, "GDPO", "ministral-3-8b").settings["config"]["lora_rank"] == 0


@pytest.mark.parametrize("name", COMPLETE)
def test_every_method_has_as_many_tries_on_validation(plans, name):
    """All methods' learning rates are chosen on validation, none on what is measured."""
    plan = plans[name]
    searches = {job.name: job for job in plan.jobs() if job.kind == "choose"}
    methods = {"sft", "opsd-pg", "opsd-gkd", "grpo", "gdpo", "memcalib-rl"}
    first = plan.profile.first_model
    assert set(searches) == {f"search/{first}/{name}" for name in methods}
    assert len({len(job.reads) for job in searches.values()}) == 1
    measured = {job for row in plan.rows for job in row.jobs.values()}
    for job in searches.values():
        assert not measured & set(job.reads), "a try is never a row"
    chosen = training(plan, "MemCalib-RL")
    assert f"search/{first}/memcalib-rl" in chosen.reads
    assert any("@{search/" in word for word in chosen.command)


def test_the_middle_try_is_the_papers_rate(plans):
    tried = [value for value, _ in plans["paper"].by_name["search/qwen3-8b/gdpo"].settings["tries"]]
    assert tried[1] == 1e-6
    tried = [value for value, _ in plans["paper"].by_name["search/qwen3-8b/sft"].settings["tries"]]
    assert tried[1] == 1e-4


@pytest.mark.parametrize("name", COMPLETE)
def test_three_seeds_of_evaluation_and_one_judge_for_all(plans, name):
    plan = plans[name]
    judges = set()
    for row in plan.rows_of("main_results"):
        settings = plan.by_name[row.jobs["evaluate"]].settings
        assert settings["sampling"]["seeds"] == [42, 43, 44]
        judges.add(json.dumps(settings["judge"], sort_keys=True))
    assert len(judges) == 1
    if name == "paper":
        assert "deepseek-v4-pro" in judges.pop()


def test_the_second_judge_reads_the_answers_of_the_first(plans):
    for plan in plans.values():
        for row in plan.rows_of("judge_stability"):
            reading = plan.by_name[row.jobs["judge"]]
            assert row.jobs["evaluate"] in reading.reads
            assert any(f"{row.jobs['evaluate']}/rollouts.jsonl" in word for word in reading.command)


def test_trainings_at_the_papers_size_go_through_the_launcher(plans):
    """Nothing that needs eight GPUs is started as one process."""
    plan = plans["paper"]
    for job in plan.jobs():
        if job.kind == "train":
            assert job.command[0] == "bash" and job.command[1].endswith("launch.sh"), job.name
            assert job.gpus == 8 and job.environment["OUT"].endswith(job.name)
    nodes = {job.nodes for job in plan.jobs() if "/qwen3.5-35b-a3b/" in job.name}
    assert nodes == {1, 2}, "evaluations on one node, trainings on two"


def test_demonstrations_are_written_and_checked_by_the_papers_models():
    """Appendix E.1 names the teacher and the two evaluators."""
    profile = load_profile("paper")
    models = {role: endpoint["model"] for role, endpoint in profile.demonstrations.items()}
    assert models == {
        "teacher": "qwen3.7-max",
        "evaluator": "qwen3.7-plus",
        "evaluator2": "deepseek-v4-pro",
    }
    assert profile.second_judge.model == "qwen3.8-max"
