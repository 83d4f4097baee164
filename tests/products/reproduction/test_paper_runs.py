"""The paper's own runs are checked before they are run:
every file, model and key that is missing, calls, hours, dollars.
"""

import pytest
from command_line import run as call

from memcalib.products.reproduction.paper_runs import (
    evaluation_work,
    load_paper_runs,
    paper_text,
    paper_work,
    run_paper,
)
from memcalib.inference.endpoint import Endpoint


@pytest.fixture(scope="module")
def work():
    return paper_work(load_paper_runs())


def test_each_command_is_listed_once_and_all_that_is_missing(work, monkeypatch):
    assert len({one.command for one in work}) == len(work)
    trained = [one for one in work if ": train " in one.title]
    assert len(trained) == 3 * 6 + 6 and all(one.gpu_hours > 0 for one in trained)
    missing = {line for one in work for line in one.missing}
    for needle in (
        "data.train: data/rl.jsonl",
        "JUDGE_API_KEY",
        "JUDGE2_API_KEY",
        "OPENAI_API_KEY",
        "Qwen/Qwen3-8B",
        "data/test.jsonl",
    ):
        assert any(needle in line for line in missing), needle
    assert not any("runs/qwen3-8b/sft/policy" in line for line in missing), (
        "an earlier command makes it"
    )
    text = paper_text(work)
    assert (
        f"Together {len(work)} commands" in text
        and "cost unknown" in text
        and "price: not given" in text
    )


def test_a_method_begins_with_what_the_command_before_it_leaves(work):
    first = load_paper_runs()
    for name in first.recipes:
        commands = [one.command for one in work if one.title.startswith(f"{name}: ")]
        policy_folder = (
            next(c for c in commands if "--method sft" in c).partition("--out ")[2].split()[0]
            + "/policy"
        )
        others = [c for c in commands if "memcalib train" in c and "--method sft" not in c]
        assert len(others) >= 5 and all(f"--set start.model={policy_folder}" in c for c in others)
    cold = next(one.command for one in work if one.title.endswith("evaluate cold start"))
    assert f"--weights {first.out}/{first.recipes[0]}/sft/policy" in cold


def test_the_second_judge_reads_the_answers_of_the_first(work):
    again = [one for one in work if "second judge" in one.title]
    evaluation_folders = [
        one.command.rpartition("--out ")[2] for one in work if ": evaluate " in one.title
    ]
    assert len(again) == 6 and all(one.gpu_hours == 0 and one.calls > 0 for one in again)
    for one in again:
        words = one.command.split()
        assert (
            words[:2] == ["memcalib", "judge"]
            and words[2].removesuffix("/rollouts.jsonl") in evaluation_folders
        )


def test_a_price_gives_a_cost_and_a_key_is_no_longer_missing(monkeypatch):
    plan = load_paper_runs(settings=["price.prompt=1", "price.completion=2"])
    judge = Endpoint(model="judge", base_url="http://localhost:1/v1", key_env="A_KEY")
    options = dict(experiments=("main_results",), judge=judge, data="data/test.jsonl", examples=10)
    one = evaluation_work(plan, "x: evaluate y", ["--weights", "y"], **options)
    assert one.calls == 30 and one.cost == pytest.approx(
        (one.prompt_tokens + 2 * one.completion_tokens) / 1e6
    )
    assert any("A_KEY" in line for line in one.missing)
    monkeypatch.setenv("A_KEY", "secret")
    again = evaluation_work(plan, "x: evaluate y", ["--weights", "y"], **options)
    assert not any("A_KEY" in line for line in again.missing) and "secret" not in again.command


def test_it_refuses_to_run_with_anything_missing(tmp_path, capsys):
    with pytest.raises(ValueError, match="things are missing; see them with --dry-run"):
        run_paper(load_paper_runs(), tmp_path, ["eta_sensitivity"])
    assert not list(tmp_path.iterdir())
    capsys.readouterr()


def test_the_command_line_says_the_same(capsys, tmp_path):
    code, out, _ = call(
        capsys,
        "reproduce",
        "eta_sensitivity",
        "--profile",
        "paper",
        "--out",
        str(tmp_path),
        "--dry-run",
    )
    assert (
        code == 0
        and "memcalib train qwen3-8b --method memcalib-rl" in out
        and "Missing on this machine" in out
    )
    code, _, err = call(capsys, "reproduce", "diagrams", "--profile", "paper", "--dry-run")
    assert code == 1 and "no runs at the paper's size; allowed are channel_proportions" in err


@pytest.mark.parametrize(
    ("setting", "needle"),
    [
        ("speed={}", "speed: nothing for recipe 'qwen3-8b'"),
        ("methods=[ppo]", "'ppo'"),
        ("eval_seed=[1]", "eval_seeds"),
    ],
)
def test_mistakes_in_it_are_named(setting, needle):
    with pytest.raises(ValueError) as error:
        load_paper_runs(settings=[setting])
    assert needle in str(error.value)
