"""An evaluation from the command line to the report, over loopback:
whole, stopped, resumed, and with bad input.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from memcalib.commands.cli import main
from memcalib.commands.evaluate import Evaluation, evaluation_forecast
from memcalib.metrics import load_judgments, score
from memcalib.products.micro.practice.models import PracticeJudge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import WORLDS, make_examples
from memcalib.products.micro.policy import policy_path
from memcalib.problem import Rollout
from memcalib.io.records import read_jsonl, write_jsonl

EXAMPLES = make_examples(WORLDS["short"], 10, 7, "test")
KEY = "sk-test-" + "k9" * 12


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "examples.jsonl", EXAMPLES)


@pytest.fixture
def server():
    with MicroServer(EXAMPLES, key=KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("MICRO_KEY", KEY)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err and KEY not in out + err
    return exit.value.code or 0, out, err


PLACES = {
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "seeds": "sampling.seeds",
    "text": "sampling.text",
    "framing": "sampling.prompt_template",
    "prompt": "judging.prompt",
    "concurrency": "model.concurrency",
    "rpm": "model.rpm",
    "judge2": "judge2.model",
    "judge2_url": "judge2.base_url",
    "judge2_key_env": "judge2.key_env",
}  # of settings without a flag


def options(data, server, tmp_path, **changes) -> list[str]:
    """The words of an evaluation on the practice server;
    a change of `None` leaves an option out.
    """
    values = {
        "model": "micro-model",
        "base_url": server.base_url,
        "key_env": "MICRO_KEY",
        "judge": "micro-judge",
        "judge_key_env": "MICRO_KEY",
        "max_tokens": 64,
        "out": tmp_path / "run",
        "cache": tmp_path / "calls.sqlite",
        **changes,
    }
    words = ["evaluate", str(data)]
    for name, value in values.items():
        if value is None:
            continue
        if name in PLACES:
            words += ["--set", f"{PLACES[name]}={value}"]
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def test_evaluate_writes_everything_and_no_key(capsys, data, server, tmp_path):
    code, out, err = run(capsys, *options(data, server, tmp_path))
    assert code == 0, err
    for needle in ("to ask", "no price given", "all Ignore", "report.html"):
        assert needle in out
    folder = tmp_path / "run"
    assert len(list(read_jsonl(folder / "rollouts.jsonl", Rollout))) == 10 * 3 + 10
    for file in [*folder.rglob("*"), *tmp_path.glob("calls.sqlite*")]:
        if file.is_file():
            assert KEY.encode() not in file.read_bytes(), file
    assert (tmp_path / "calls.sqlite").stat().st_mode & 0o077 == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["usage"]["model"]["rows"] == 40 and manifest["usage"]["model"]["cost"] is None
    requests = server.stats()["requests"]
    code, out, _ = run(capsys, *options(data, server, tmp_path))
    assert code == 0 and server.stats()["requests"] == requests


def test_price_and_chance_stand_beside_the_effect_of_memory(capsys, data, server, tmp_path):
    code, out, err = run(capsys, *options(data, server, tmp_path))
    assert code == 0, err
    assert "per answer, compared with an answer without memory: +" in out
    assert "prompt tokens" in out
    assert (
        "A/A: micro-model, asked again with another seed, differs from its own earlier answers by"
        in out
    )
    prices = pd.read_csv(tmp_path / "run/tables/price-of-memory.csv").iloc[0]
    answers = list(read_jsonl(tmp_path / "run/rollouts.jsonl", Rollout))
    for condition, sign in (("full_memory", 1), ("no_memory", -1)):
        tokens = [a.usage["prompt_tokens"] for a in answers if a.condition == condition]
        prices["more prompt tokens"] -= sign * sum(tokens) / len(tokens)
    assert prices["more prompt tokens"] == pytest.approx(0, abs=1e-6)
    again = pd.read_csv(tmp_path / "run/tables/a-a.csv").iloc[0]
    assert again["pairs of seeds"] == 3
    assert 0 <= again["mean difference"] <= again["largest difference"] <= 100
    page = (tmp_path / "run/report.html").read_text()
    assert "Price of memory" in page and "A/A" in page


def test_dry_run_asks_nobody_and_writes_nothing(capsys, data, server, tmp_path):
    code, out, _ = run(capsys, *options(data, server, tmp_path), "--dry-run")
    assert code == 0 and "micro-judge" in out
    assert not (tmp_path / "run").exists() and not server.stats()["requests"]


def test_priced_forecast_is_the_sum_of_its_parts(data, server, tmp_path):
    price = {"prompt": 1.0, "completion": 2.0}
    role = {"model": "micro-model", "base_url": server.base_url, "key_env": "", "price": price}
    evaluation = Evaluation(
        data=str(data), model=role, judge="micro-exact", sampling={"max_tokens": 64}
    )
    row = evaluation_forecast(evaluation, EXAMPLES, tmp_path / "none")[0]
    assert row["cost"] == pytest.approx((row["prompt tokens"] + 2 * row["completion tokens"]) / 1e6)
    assert row["to ask"] == row["wanted"] == 40 and row["completion tokens"] == 40 * 64


def test_steps_alone_give_the_same_table(capsys, data, server, tmp_path):
    run(capsys, *options(data, server, tmp_path), "--set", "control=false")
    common = ["--key-env", "MICRO_KEY", "--base-url", server.base_url, "--no-cache"]
    answers = tmp_path / "a.jsonl"
    judged = tmp_path / "j.jsonl"
    code, out, err = run(
        capsys,
        "generate",
        data,
        "--model",
        "micro-model",
        "--set",
        "sampling.max_tokens=64",
        "--out",
        answers,
        *common,
    )
    assert code == 0 and "30 answers, 30 of them new" in out, err
    code, out, err = run(
        capsys, "judge", answers, "--data", data, "--model", "micro-judge", "--out", judged, *common
    )
    assert code == 0 and "30 judged now" in out, err
    columns = ["SCS", "Exact", "sMOS", "sMUS", "AOR", "AUR", "SCS_low", "SCS_high"]
    whole = score(load_judgments(tmp_path / "run" / "judgments.jsonl"))
    assert score(load_judgments(judged))[columns].equals(whole[columns])


def test_other_settings_are_never_mixed(capsys, data, server, tmp_path):
    run(capsys, *options(data, server, tmp_path), "--set", "control=false")
    before = (tmp_path / "run" / "rollouts.jsonl").read_bytes()
    code, _, err = run(
        capsys, *options(data, server, tmp_path, temperature=0.5), "--set", "control=false"
    )
    assert code == 1 and "contains a run with other settings" in err and "temperature" in err
    assert (tmp_path / "run" / "rollouts.jsonl").read_bytes() == before
    write_jsonl(data, [EXAMPLES[0].model_copy(update={"domain": "other"}), *EXAMPLES[1:]])
    code, _, err = run(capsys, *options(data, server, tmp_path), "--set", "control=false")
    assert code == 1 and "data_hash" in err


@pytest.mark.parametrize(
    "change, needle",
    [
        ({"model": "nobody"}, "nobody"),
        ({"base_url": "http://127.0.0.1:9/v1"}, "127.0.0.1:9"),
        ({"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
)
def test_hopeless_calls_stop_with_the_command_that_goes_on(
    capsys, data, server, tmp_path, change, needle
):
    code, _, err = run(capsys, *options(data, server, tmp_path, **change))
    assert code == 1 and needle in err and "run the same command again" in err


@pytest.mark.parametrize(
    "change",
    [
        {"model": "nobody"},
        pytest.param({"base_url": "http://127.0.0.1:9/v1"}, marks=pytest.mark.slow),
        {"judge": "nobody"},
        pytest.param({"framing": "none.yaml"}, marks=pytest.mark.slow),
        {"prompt": "none.md"},
    ],
)
def test_a_wrong_name_spoils_no_folder(capsys, data, server, tmp_path, change):
    code, _, _ = run(capsys, *options(data, server, tmp_path, **change), "--set", "control=false")
    assert code == 1
    requests_before = server.stats()["requests"]
    code, _, err = run(capsys, *options(data, server, tmp_path), "--set", "control=false")
    assert code == 0, err
    # empty answers are asked for twice and not judged; the judge is tried once
    assert 50 <= server.stats()["requests"] - requests_before <= 71
    run_folder = tmp_path / "run"
    parameters = json.loads((run_folder / "parameters.json").read_text())
    assert parameters["model"]["model"] == "micro-model"
    rows = read_jsonl(run_folder / "rollouts.jsonl", Rollout)
    assert {row.model for row in rows} == {"micro-model"}


def test_another_path_of_the_same_data_goes_on(capsys, data, server, tmp_path, monkeypatch):
    assert run(capsys, *options(data, server, tmp_path), "--set", "control=false")[0] == 0
    answered = server.stats()["requests"]
    monkeypatch.chdir(data.parent)
    code, _, err = run(capsys, *options(data.name, server, tmp_path), "--set", "control=false")
    assert code == 0 and server.stats()["requests"] == answered, err


@pytest.mark.parametrize("name", ["rollouts.jsonl", "judgments.jsonl"])
def test_a_torn_file_goes_on(capsys, data, server, tmp_path, name):
    assert run(capsys, *options(data, server, tmp_path), "--set", "control=false")[0] == 0
    file = tmp_path / "run" / name
    answered = server.stats()["requests"]
    whole = load_judgments(tmp_path / "run" / "judgments.jsonl")
    os.truncate(file, file.stat().st_size - 30)
    code, _, err = run(capsys, *options(data, server, tmp_path), "--set", "control=false")
    assert code == 0 and server.stats()["requests"] <= answered + 1, err

    def levels(judgments):
        return sorted((row.key, [atom.actual for atom in row.atoms]) for row in judgments)

    assert levels(load_judgments(tmp_path / "run" / "judgments.jsonl")) == levels(whole)


def test_the_judge_reads_a_torn_file_and_says_so(capsys, data, server, tmp_path):
    assert run(capsys, *options(data, server, tmp_path), "--set", "control=false")[0] == 0
    file = tmp_path / "run" / "rollouts.jsonl"
    whole = len(file.read_bytes().splitlines())
    os.truncate(file, file.stat().st_size - 30)
    judge = [
        "--data",
        str(data),
        "--model",
        "micro-judge",
        "--base-url",
        server.base_url,
        "--key-env",
        "MICRO_KEY",
    ]
    code, out, err = run(
        capsys, "judge", str(file), *judge, "--no-cache", "--out", str(tmp_path / "again.jsonl")
    )
    assert code == 0 and f"{whole - 1} judged now" in out and "is incomplete" in out, err


def test_a_missing_template_is_named_with_the_shipped_ones(capsys, data, server, tmp_path):
    missing = tmp_path / "none.yaml"
    code, _, err = run(capsys, *options(data, server, tmp_path, framing=missing))
    assert code == 1 and "none.yaml" in err and "background" in err


def test_a_wrong_key_is_said_and_not_shown(capsys, data, server, tmp_path, monkeypatch):
    monkeypatch.setenv("WRONG_KEY", "sk-wrong-" + "z" * 20)
    code, _, err = run(capsys, *options(data, server, tmp_path, key_env="WRONG_KEY"))
    assert code == 1 and "401" in err and "sk-wrong" not in err


def test_context_too_long_is_a_row_with_a_reason(capsys, data, tmp_path):
    with MicroServer(EXAMPLES, context=20) as server:
        words = options(data, server, tmp_path, key_env="", judge="micro-exact", judge_key_env=None)
        code, _, err = run(capsys, *words)
    assert code == 1 and "context_too_long" in err
    rows = list(read_jsonl(tmp_path / "run" / "rollouts.jsonl", Rollout))
    assert rows and all(
        row.finish_reason == "error" and "context_too_long" in row.error for row in rows
    )


def test_other_libraries_answer_the_rest_only_when_told_to(capsys, caplog, tmp_path):
    file = write_jsonl(tmp_path / "examples.jsonl", EXAMPLES[:3])
    out = tmp_path / "run"
    words = [file, "--weights", policy_path("cold-short"), "--judge", "micro-exact", "--out", out]
    for setting in ("prompt_template=micro", "text=concat", "seeds=[1]", "max_tokens=8"):
        words += ["--set", f"sampling.{setting}"]
    code, _, err = run(capsys, "evaluate", *words)
    assert code == 0, err
    history = json.loads((out / "versions.json").read_text())
    history[-1]["torch"] = "2.0.0"
    answers = (out / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (out / "rollouts.jsonl").write_text("".join(answers[:-1]))
    (out / "versions.json").write_text(json.dumps(history))
    code, _, err = run(capsys, "evaluate", *words)
    assert code == 1 and "torch: '2.0.0' there" in err and "--resume-anyway" in err
    code, _, err = run(capsys, "evaluate", *words, "--resume-anyway")
    assert code == 0 and "numbers may differ: torch" in caplog.text
    assert len((out / "rollouts.jsonl").read_text().splitlines()) == len(answers)
    (out / "versions.json").write_text(json.dumps(history))
    code, _, err = run(capsys, "evaluate", *words)
    assert code == 0, "no answer is left that could differ"


def test_a_prompt_without_room_in_weights_of_ones_own_is_named_and_unscored(capsys, tmp_path):
    """Its length and the model's context stand in its row and on the page;
    the others are scored; missing is not zero.
    """
    long = EXAMPLES[0].model_copy(update={"id": "too-long", "question": EXAMPLES[0].question * 300})
    file = write_jsonl(tmp_path / "examples.jsonl", [long, *EXAMPLES[1:4]])
    out = tmp_path / "run"
    words = [
        "--weights",
        policy_path("cold-short"),
        "--set",
        "sampling.prompt_template=micro",
        "--set",
        "sampling.text=concat",
        "--set",
        "sampling.seeds=[1]",
    ]
    words += ["--set", "sampling.max_tokens=32", "--judge", "micro-exact", "--out", out]
    code, text, err = run(capsys, "evaluate", file, *words)
    assert code == 3 and "1 of 4" in text and "2 of 8 answers are not scored" in err

    def with_memory(rows):
        return {row.example_id: row for row in rows if row.condition == "micro"}

    answer = with_memory(read_jsonl(out / "rollouts.jsonl", Rollout))["too-long"]
    tokens = int(answer.usage["prompt_tokens"])
    reason = (
        f"example 'too-long': the prompt has {tokens} tokens; the model's limit is 1024, including "
        "the answer"
    )
    assert answer.error == f"context_too_long: {reason}" and tokens > 1024
    judgments = with_memory(load_judgments(out / "judgments.jsonl"))
    unscored = [name for name, judgment in judgments.items() if not judgment.scored]
    assert unscored == ["too-long"] and len(judgments) == 4
    assert "context_too_long" in (out / "tables" / "reasons.csv").read_text()


def _start(arguments: list[str], **environment: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-c",
        "import sys; from memcalib.commands.cli import main; main(sys.argv[1:])",
        *arguments,
    ]
    env = {**os.environ, "MICRO_KEY": KEY, **environment}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _until_rows(file: Path, count: int, process: subprocess.Popen) -> None:
    limit = time.time() + 60
    while time.time() < limit and process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{file}: fewer than {count} rows; {process.communicate()[1]}")


@pytest.mark.parametrize(
    "stop", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_stopped_run_goes_on(data, tmp_path, stop):
    with MicroServer(EXAMPLES, key=KEY, latency=0.05) as server:
        arguments = [*options(data, server, tmp_path, concurrency=4), "--set", "control=false"]
        process = _start(arguments)
        _until_rows(tmp_path / "run" / "rollouts.jsonl", 7, process)
        process.send_signal(stop)
        _, err = process.communicate(timeout=60)
        if stop == signal.SIGINT:
            assert process.returncode == 130, err
            assert "interrupted" in err and "continue with: memcalib evaluate" in err
        process = _start(arguments)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert len(load_judgments(tmp_path / "run" / "judgments.jsonl")) == 30
        # replies that were on the wire when the process died
        assert len(server.stats()["asked_again"]) <= 4


def test_a_full_disk_keeps_what_is_there(capsys, data, server, tmp_path):
    (tmp_path / "run").mkdir()
    run_folder = tmp_path / "run"
    (run_folder / "rollouts.jsonl").symlink_to("/dev/full")
    code, _, err = run(capsys, *options(data, server, tmp_path))
    assert code == 1 and "No space left" in err and "rollouts.jsonl" in err
    assert "run the same command again to continue from there" in err


def test_judge_limits_without_a_second_judge_and_prices_on_the_command_line(
    capsys, data, server, tmp_path
):
    settings = {
        "judge.concurrency": 4,
        "judge.rpm": 60_000,
        "model.price": "{prompt: 1, completion: 2}",
        "judge.price": "{prompt: 3, completion: 4, cached: 0.5}",
    }
    words = options(data, server, tmp_path)
    for setting, value in settings.items():
        words += ["--set", f"{setting}={value}"]
    code, out, err = run(capsys, *words, "--dry-run")
    assert code == 0 and "no price given" not in out and out.count("$") == 2, err
    code, _, err = run(capsys, *words, "--set", "model.price=cheap", "--dry-run")
    assert code == 2 and "model.price: allowed: a mapping" in err


def test_a_judge_at_the_models_address_uses_the_models_key_and_another_address_does_not(
    capsys, data, server, tmp_path, monkeypatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    code, _, err = run(
        capsys,
        *options(data, server, tmp_path, judge_key_env=None),
        "--set",
        "control=false",
        "--limit",
        2,
    )
    assert code == 0, err
    elsewhere = {
        "judge_key_env": None,
        "judge_url": "http://judge.invalid/v1",
        "out": tmp_path / "other",
    }
    code, _, err = run(
        capsys,
        *options(data, server, tmp_path, **elsewhere),
        "--set",
        "control=false",
        "--limit",
        2,
    )
    assert code == 1 and "OPENAI_API_KEY" in err


def test_what_is_missing_is_said_with_the_option_that_gives_it(capsys, data):
    code, _, err = run(capsys, "evaluate", data)
    assert code == 2
    assert "model: missing option; give --model" in err
    assert "judge: missing option; give --judge" in err


def test_other_settings_are_named_to_the_leaf(capsys, data, server, tmp_path):
    run(capsys, *options(data, server, tmp_path), "--set", "control=false", "--limit", 2)
    code, _, err = run(
        capsys,
        *options(data, server, tmp_path),
        "--set",
        "control=false",
        "--limit",
        2,
        "--set",
        "judging.blind=true",
    )
    assert code == 1 and "(judging.blind: False there, True now)" in err


def test_calls_of_earlier_calls_are_added_up(capsys, data, server, tmp_path):
    for limit in (1, 1):
        run(capsys, *options(data, server, tmp_path), "--set", "control=false", "--limit", limit)
    session = json.loads((tmp_path / "run" / "manifest.json").read_text())["session"]
    assert (
        session["model"]["calls"] == session["judge"]["calls"] + session["judge"]["cached"] - 1 == 3
    )
    run(
        capsys,
        *options(data, server, tmp_path, out=tmp_path / "again"),
        "--set",
        "control=false",
        "--limit",
        1,
    )
    session = json.loads((tmp_path / "again" / "manifest.json").read_text())["session"]
    assert (session["model"]["calls"], session["model"]["cached"]) == (0, 3)


def test_compare_from_the_command_line(capsys, data, server, tmp_path):
    run(capsys, *options(data, server, tmp_path), "--set", "control=false")
    other = {"model": "micro-model-weak", "out": tmp_path / "weak"}
    run(capsys, *options(data, server, tmp_path, **other), "--set", "control=false")
    code, out, err = run(
        capsys, "compare", tmp_path / "run", tmp_path / "weak", "--out", tmp_path / "comparison"
    )
    assert code == 0 and "baseline: micro-model" in out and "each question counts once" in out, err
    assert (tmp_path / "comparison" / "comparison.html").is_file()
    blind = {"out": tmp_path / "blind"}
    run(
        capsys,
        *options(data, server, tmp_path, **blind),
        "--set",
        "control=false",
        "--set",
        "judging.blind=true",
    )
    code, _, err = run(
        capsys, "compare", tmp_path / "run", tmp_path / "blind", "--out", tmp_path / "comparison"
    )
    assert code == 1 and "--different-judges" in err


def test_nested_nonsense_in_any_file_is_named(capsys, data, server, tmp_path):
    deep = tmp_path / "deep.yaml"
    deep.write_text("[" * 5000)
    for arguments in (
        ["evaluate", "--config", deep],
        options(data, server, tmp_path, framing=deep),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 1 and "unexpected" not in err and "deep.yaml" in err, err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("[" * 100_000)
    code, _, err = run(capsys, "report", tmp_path / "other")
    assert code == 0 and "manifest.json" in (tmp_path / "other" / "report.html").read_text(), err


def test_the_recorded_command_holds_no_key(monkeypatch):
    from memcalib.commands.cli import command_line

    monkeypatch.setattr(sys, "argv", ["memcalib", "evaluate", "x.jsonl", "--model", KEY])
    assert command_line() == "memcalib evaluate x.jsonl --model ***"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert command_line() is None


def test_the_end_of_an_evaluation_of_the_starter_set_says_that_no_person_has_read_it(
    capsys, tmp_path
):
    with MicroServer([], practice=PracticeJudge(reads=True)) as server:
        model = ("--model", "micro-model", "--base-url", server.base_url, "--key-env", "")
        judge = ("--judge", "micro-judge")
        few = ("--limit", "6", "--set", "control=false", "--set", "sampling.seeds=[42]")
        code, out, err = run(capsys, "evaluate", *model, *judge, *few, "--out", tmp_path / "run")
    assert code == 0, err
    assert "No human has read its records and levels" in out.partition("SCS")[2]
