"""What a settings file may do: nothing in a dry run, and no key for a host it was not given for."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command_line import run

from memcalib.settings import files as settings_files
from memcalib.commands.evaluate import load_evaluation
from memcalib.settings.files import allowing_hosts, prompt_files_in, with_settings
from memcalib.trainer.demonstrations import DemonstrationConfig, load_demonstration_prompt
from memcalib.products.dataset.sources import _hub_lines, folder_files, load_sources
from memcalib.products.memory_logs.files import folder_logs
from memcalib.products.memory_logs.levels import LevelsFile
from memcalib.products.memory_logs.notes import note_files
from memcalib.products.reproduction.experiments import _sending_of_plan
from memcalib.products.reproduction.plan import Plan, making_words
from memcalib.products.reproduction.profiles import load_profile
from memcalib.io.records import DataError, Violation, iter_rows, write_jsonl
from memcalib.io.settings import SettingErrors, dry_run_scope, import_object
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.practice.server import MicroServer

EXAMPLES = make_examples(WORLDS["short"], 4, 7, "test")
KEYS = ("AWS_SECRET_KEY", "ANY_KEY", "DEEPSEEK_API_KEY", "MY_KEY", "OPENAI_API_KEY", "OTHER_KEY")
SPY = """
from pathlib import Path
Path(__file__).with_name("imported").write_text("yes")
def judge(example, answer): return None
def find(text): return []
def rows(): return []
method = rule = None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a module that leaves a mark when it is imported, and a log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("MEMCALIB_ALLOW_IMPORT", "MEMCALIB_ALLOW_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name in KEYS:
        monkeypatch.setenv(name, "a-key-of-" + name.lower())
    (tmp_path / "spy34.py").write_text(SPY)
    (tmp_path / "rules.yaml").write_text("rules: [{name: own, find: 'spy34:find'}]\n")
    write_jsonl(tmp_path / "data.jsonl", EXAMPLES)
    yield tmp_path
    sys.modules.pop("spy34", None)


def evaluation_file(folder: Path, **judge) -> Path:
    settings = {
        "data": "data.jsonl",
        "model": {"model": "m", "base_url": "http://localhost:9/v1", "key_env": ""},
        "judge": judge or "spy34:judge",
    }
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


LOOKING = {
    "judge of an evaluation": ["evaluate", "--config", "theirs.yaml", "--dry-run"],
    "judge of an exam": ["exam", "--judge", "spy34:judge", "--dry-run"],
    "judge of a training": ["train", "micro", "--set", "judge=spy34:judge", "--dry-run"],
    "method": ["train", "micro", "--method", "spy34:method", "--dry-run"],
    "rule of credit": ["train", "micro", "--set", "train.mode=spy34:rule", "--dry-run"],
    "source": ["build", "micro", "--set", "sources=[{source: 'spy34:rows'}]", "--dry-run"],
    "redaction, dry run": ["build", "--set", "memory.redaction=rules.yaml", "--dry-run"],
    "redaction, preview": ["build", "--set", "memory.redaction=rules.yaml", "--preview"],
}


@pytest.mark.parametrize("name", LOOKING)
def test_whoever_only_looks_runs_nothing_of_the_folder(capsys, folder, name):
    evaluation_file(folder)
    words = LOOKING[name]
    if words[0] == "build":
        words = [*words, "--out", "b", *(["--from-memory", "micro"] if "redaction" in name else [])]
    code, output, errors = run(capsys, *words)
    assert not (folder / "imported").exists()
    assert "spy34" in output + errors, "what would be imported is shown"
    assert code == 0 or "MEMCALIB_ALLOW_IMPORT=1" in errors, errors


OTHERS_CODE = "memcalib.io.settings:os.system"  # found in a module of this package


@pytest.mark.parametrize("find", [OTHERS_CODE, "memcalib.io.records:one_line"])
def test_a_preview_calls_no_function_that_settings_name(capsys, folder, find):
    """A log could hold shell commands, and its settings name what runs them."""
    (folder / "rules.yaml").write_text(f"rules: [{{name: own, find: '{find}'}}]\n")
    text = "touch ran"
    row = {"user_id": "u", "query": text, "answer": text, "memories": [text, "They sail."]}
    (folder / "log.jsonl").write_text(json.dumps(row) + "\n")
    words = ["build", "--from-memory", "log.jsonl", "--out", "b", "--preview"]
    words += ["--set", "memory.redaction=rules.yaml", "--set", "memory.consent=given in a test"]
    code, _, errors = run(capsys, *words)
    assert not (folder / "ran").exists()
    assert code != 0 and find in errors and "MEMCALIB_ALLOW_IMPORT=1" in errors


@pytest.mark.parametrize(
    "path",
    [
        OTHERS_CODE,
        "memcalib.io.settings:os",
        "memcalib.io.signals:signal.raise_signal",
        "memcalib.inference.client:threading.Thread",
        "memcalib.io.settings:yaml.unsafe_load",
    ],
)
def test_a_dry_run_gives_out_no_code_of_others_by_a_module_of_this_package(path):
    with dry_run_scope(), pytest.raises(ValueError, match="is code"):
        import_object(path)
    assert import_object(path) is not None


def test_a_judge_of_this_package_opens_no_way_to_the_folder(folder):
    """Other packages try to import what need not be installed, and would find it there."""
    (folder / "theirs.yaml").write_text(
        "judge: memcalib.products.micro.world:exact_judge\n"
        "model: {model: m, base_url: 'http://127.0.0.1:9/v1', key_env: ''}\n"
    )
    for name in ("numexpr", "brotli", "orjson", "wandb", "pytz", "zstandard"):
        (folder / f"{name}.py").write_text("open('ran', 'w').write(__name__)\n__version__ = '99'\n")
    program = (
        "import sys, os\n"
        "from memcalib.commands.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert os.getcwd() not in sys.path and '' not in sys.path, sys.path\n"
        "raise SystemExit(code)\n"
    )
    words = ["evaluate", "starter", "--config", "theirs.yaml", "--dry-run", "--out", "o"]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program, *words],
        capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert not (folder / "ran").exists()


def test_a_judge_that_is_installed_elsewhere_does_not_open_the_folder(folder, monkeypatch):
    """Packages look for modules that need not be installed, and would find them in the folder."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "installed52.py").write_text("judge = print\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    monkeypatch.syspath_prepend(str(elsewhere))
    assert import_object("installed52:judge") is print
    assert str(folder) not in sys.path
    assert import_object("spy34:judge").__module__ == "spy34"
    assert str(folder) in sys.path, "a module of the folder is found"


def test_what_one_has_read_may_be_imported_in_a_preview(capsys, folder, monkeypatch):
    monkeypatch.setenv("MEMCALIB_ALLOW_IMPORT", "1")
    words = ["build", "--from-memory", "micro", "--out", "b", "--preview", "--set", "memory.rows=3"]
    code, output, errors = run(capsys, *words, "--set", "memory.redaction=rules.yaml")
    assert code == 0, errors
    assert (folder / "imported").exists() and "Rows as they would be sent" in output


def test_a_dry_run_holds_for_its_command_alone(capsys, folder):
    evaluation_file(folder)
    assert run(capsys, *LOOKING["judge of an evaluation"])[0] == 0
    assert import_object("spy34:judge") is not None
    with dry_run_scope(), pytest.raises(ValueError, match="is code"):
        import_object("json:loads")


STRANGE = {"model": "j", "base_url": "https://collect.example/v1", "key_env": "AWS_SECRET_KEY"}


def refusal(file: Path, *settings: str, **options) -> str:
    """What is said against the keys of a file; empty where they may go."""
    try:
        load_evaluation(file, options, settings)
    except SettingErrors as error:
        return str(error)
    return ""


def test_a_key_goes_only_to_the_host_it_was_given_for(folder, monkeypatch):
    file = evaluation_file(folder, **STRANGE)
    message = refusal(file)
    assert "judge.base_url: found 'collect.example'" in message and "theirs.yaml" in message
    assert "AWS_SECRET_KEY" in message and "--allow-host collect.example" in message
    with allowing_hosts("collect.example"):
        assert not refusal(file)
    with allowing_hosts("example"):
        assert refusal(file), "a part of a name is another host"
    monkeypatch.setenv("MEMCALIB_ALLOW_HOST", "a.org, collect.example")
    assert not refusal(file)


@pytest.mark.parametrize(
    ("judge", "settings", "allowed"),
    [
        ({"base_url": "https://api.deepseek.com/v1", "key_env": "DEEPSEEK_API_KEY"}, [], True),
        (
            {"base_url": "https://api.deepseek.com.evil.net", "key_env": "DEEPSEEK_API_KEY"},
            [],
            False,
        ),
        ({"base_url": "https://api.deepseek.com/v1", "key_env": "AWS_SECRET_KEY"}, [], False),
        ({"base_url": "http://api.deepseek.com/v1", "key_env": "DEEPSEEK_API_KEY"}, [], False),
        ({"base_url": "https://gateway.example/v1"}, [], False),  # OpenAI's key, by default
        ({"base_url": "http://127.0.0.1:8000/v1", "key_env": "ANY_KEY"}, [], True),
        ({"base_url": "https://collect.example/v1", "key_env": ""}, [], True),
        ({}, ["judge.base_url=https://mine.example/v1"], True),
        ({"key_env": "AWS_SECRET_KEY"}, ["judge.base_url=https://mine.example/v1"], False),
        (
            {"key_env": "AWS_SECRET_KEY"},
            ["judge.base_url=https://mine.example/v1", "judge.key_env=MY_KEY"],
            True,
        ),
        ({"base_url": "https://mine.example/v1"}, ["judge.key_env=MY_KEY"], False),
    ],
)
def test_which_pairs_of_key_and_host_need_no_question(folder, judge, settings, allowed):
    assert (not refusal(evaluation_file(folder, model="j", **judge), *settings)) is allowed


def test_a_refused_key_for_a_typed_address_is_named_by_its_variable(folder):
    file = evaluation_file(folder, model="j", key_env="AWS_SECRET_KEY")
    message = refusal(file, "judge.base_url=https://mine.example/v1")
    assert "theirs.yaml: judge.key_env: found 'AWS_SECRET_KEY'" in message
    assert "the address https://mine.example/v1 was typed" in message
    assert "--allow-host mine.example, or type key_env too" in message


EVIL = {"base_url": "https://evil.example/v1", "key_env": "ANY_KEY"}
IN_PROFILES = {
    "survey": {"survey": {"x": {"model": "m", **EVIL}}},
    "names that begin alike": {
        "survey": {
            "gpt-4": {"model": "m", **EVIL},
            "gpt-4.1": {"model": "m", "base_url": "http://localhost:9/v1", "key_env": ""},
        }
    },
    "settings of a model": {"models": {"short": {"settings": {"judge": {"model": "j", **EVIL}}}}},
    "settings by place": {
        "models": {"short": {"settings": {f"judge.{name}": value for name, value in EVIL.items()}}}
    },
    "an address alone": {
        "models": {"short": {"settings": {"judge.base_url": "https://evil.example/v1"}}}
    },
    "a key alone": {"models": {"short": {"settings": {"judge": {"key_env": "ANY_KEY"}}}}},
    "demonstrations": {"demonstrations": {"writer": {"model": "m", **EVIL}}},
    "a grid": {"grids": {"g": {"runs": [{"judge": {"model": "m", **EVIL}}]}}},
    "an experiment": {"experiments": {"e01_x": {"judge": {"model": "m", **EVIL}}}},
}


@pytest.mark.parametrize("place", IN_PROFILES)
def test_a_profile_sends_no_key_to_a_strange_host(folder, monkeypatch, place):
    (folder / "p.yaml").write_text(yaml.safe_dump({"extends": "smoke", **IN_PROFILES[place]}))
    with pytest.raises(SettingErrors, match="--allow-host (evil.example|api.openai.com)"):
        load_profile(folder / "p.yaml")
    with allowing_hosts("evil.example", "api.openai.com"):
        try:
            load_profile(folder / "p.yaml")
        except SettingErrors as error:  # of another kind: not every such profile makes sense
            assert "allow-host" not in str(error)


def test_settings_that_name_a_host_and_a_key_together_are_checked_together(folder):
    """An address without a key, and a key without an address, which a row lays over it."""
    judge = {"model": "j", "base_url": "https://evil.example/v1", "key_env": ""}
    models = list(load_profile("smoke").models)
    profile = {
        "extends": "smoke",
        "models": {name: {"settings": {"judge": judge}} for name in models},
        "rows": {"MemCalib-RL": {"settings": {"judge.key_env": "OPENAI_API_KEY"}}},
    }
    (folder / "p.yaml").write_text(yaml.safe_dump(profile))
    loaded = load_profile(folder / "p.yaml")
    with pytest.raises(ValueError, match="--allow-host evil.example"):
        Plan(loaded, folder / "root")
    with allowing_hosts("evil.example"):
        Plan(loaded, folder / "root")
    typed = "model: j, base_url: 'https://evil.example/v1', key_env: ANY_KEY"
    words = [f"models.{name}.settings.judge={{{typed}}}" for name in models]
    plain = load_profile("smoke", words)
    with pytest.raises(ValueError, match="--allow-host evil.example"):
        Plan(plain, folder / "root")
    Plan(plain, folder / "root", with_settings({}, words))


SERVERS = {
    name: {"model": "m", "base_url": "http://localhost:9/v1", "key_env": ""}
    for name in ("evaluator", "evaluator2")
}
TEACHERS = {
    "a name with an equals sign": (
        {
            "teacher": {"model": "t", "key_env": "OPENAI_API_KEY"},
            "teacher.base_url=https://evil.example/v1 #": 1,
        },
        "found a setting named 'teacher.base_url=https://evil.example/v1 #'; allowed: letters",
    ),
    "a name with a blank": (
        {"teacher": {"model": "t", "base_url": EVIL["base_url"]}, " teacher.key_env": "ANY_KEY"},
        "found a setting named ' teacher.key_env'",
    ),
    "a mapping that replaces a place": (
        {
            "teacher.base_url": "http://localhost:9/v1",
            "teacher": {"model": "t", "key_env": "ANY_KEY"},
        },
        "demonstrations.teacher.base_url: .*--allow-host api.openai.com",
    ),
}


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_plan_of_demonstrations_is_checked_as_its_command_reads_it(folder, teacher):
    making, said = TEACHERS[teacher]
    with pytest.raises(ValueError, match=said):
        making_words({**SERVERS, **making})
    assert making_words(SERVERS)[1].startswith("evaluator={")
    if "allow-host" in said:
        with allowing_hosts("api.openai.com"):
            assert making_words(making)


def test_a_dry_run_of_a_plan_shows_addresses_and_files(capsys, folder):
    """They stand in settings that other classes read later."""
    (folder / "secret.md").write_text("a text")
    judging = {"prompt": str(folder / "secret.md")}
    settings = {"judge.model": "j", "judge.base_url": EVIL["base_url"], "judging": judging}
    profile = {"extends": "smoke", "models": {"short": {"settings": settings}}}
    (folder / "p.yaml").write_text(yaml.safe_dump(profile))
    words = ["reproduce", "main_results", "--profile", "p.yaml", "--dry-run", "--out", "o"]
    code, output, errors = run(capsys, *words)
    assert code == 0, errors
    assert "requests would go to https://evil.example/v1, with the key in OPENAI_API_KEY" in output
    assert f"the text of {folder / 'secret.md'} would be read and sent to a model" in output


def test_a_plan_names_the_template_of_its_evaluations(folder):
    """It is laid over each evaluation, and no recipe holds it."""
    (folder / "template.txt").write_text("a text")
    model = {"sampling": {"prompt_template": str(folder / "template.txt")}}
    profile = {"extends": "smoke", "models": {"short": model}}
    (folder / "p.yaml").write_text(yaml.safe_dump(profile))
    run = SimpleNamespace(profile=load_profile("p.yaml"), plan=SimpleNamespace(models={}))
    line = f"# models.short.sampling.prompt_template: the text of {folder / 'template.txt'} would"
    assert line in _sending_of_plan(run)


def test_a_row_names_no_file_that_is_opened(folder, monkeypatch):
    """A picture in a data set is a path, or an address, which `datasets` opens to decode it."""
    from datasets import Dataset, Features, Image, Value

    rows = {"a": ["x"], "picture": [{"path": str(folder / "data.jsonl"), "bytes": None}]}
    features = Features({"a": Value("string"), "picture": Image()})
    data = Dataset.from_dict(rows, features=features)
    data.save_to_disk(folder / "saved")
    (folder / "rows").mkdir()
    data.to_parquet(folder / "rows" / "train.parquet")

    def opened(*arguments, **options):
        raise AssertionError("a picture is decoded")

    monkeypatch.setattr(Image, "decode_example", opened)
    for place in ("saved", "rows"):
        [(_, row)] = iter_rows(folder / place)
        assert row["a"] == "x" and row["picture"]["path"].endswith("data.jsonl"), row
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: data.to_iterable_dataset())
    [(_, row)] = iter_rows("owner/name")
    assert row["a"] == "x" and row["picture"]["path"].endswith("data.jsonl"), row
    source = next(iter(load_sources().values())).model_copy(update={"hub": "own/set"})
    [(_, row)] = _hub_lines(source)
    assert row["a"] == "x" and row["picture"]["path"].endswith("data.jsonl"), row


def test_a_name_on_a_hub_is_no_folder_here(folder):
    """`datasets` would take the folder, and read what its README names."""
    (folder / "own" / "set").mkdir(parents=True)
    source = next(iter(load_sources().values())).model_copy(update={"hub": "own/set"})
    with pytest.raises(DataError, match="found own/set, which is also a folder here"):
        next(iter(_hub_lines(source)))


def test_every_kind_of_settings_file_is_checked(capsys, folder):
    role = yaml.safe_dump(STRANGE, default_flow_style=True).strip()
    other = role.replace("model: j", "model: k")
    files = {
        "exam": f"judge: {role}\n",
        "train": "start: {model: cold-short}\nbase: {model: pretrained}\n"
        "data: {world: {name: short, train: 8, validation: 0, test: 4, seed: 7}}\n"
        f"judge: {role}\n",
        "build": f"sources: [{{source: x, path: data.jsonl, question: question, answer: id}}]\n"
        f"builder: {role}\nreviewer: {role}\nreviewer2: {other}\n",
        "demonstrations": (
            f"data: data.jsonl\nteacher: {role}\nevaluator: {other}\nevaluator2: {role}\n"
        ),
    }
    for verb, text in files.items():
        (folder / f"{verb}.yaml").write_text(text)
        config = ["--config"] if verb in ("exam", "demonstrations") else []
        code, _, errors = run(capsys, verb, *config, f"{verb}.yaml", "--out", verb)
        assert code == 1 and "may not be sent to this host" in errors, (verb, errors)


def test_allow_host_holds_for_its_command_alone(capsys, folder):
    file = evaluation_file(folder, **STRANGE)
    words = ["evaluate", "--config", file, "--out", "e", "--limit", "1"]
    _, _, errors = run(capsys, *words, "--allow-host", "collect.example")
    assert "may not be sent to this host" not in errors
    assert "may not be sent to this host" in run(capsys, *words)[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "question_count"), [("yes\n", 1), ("no\n", 2), ("", 2)])
def test_a_person_is_asked_once(folder, monkeypatch, answer, question_count):
    file = evaluation_file(folder, **STRANGE)
    terminal = Terminal()
    monkeypatch.setattr(settings_files.sys, "stderr", terminal)
    for _ in range(2):
        monkeypatch.setattr(settings_files.sys, "stdin", Terminal(answer))
        assert bool(refusal(file)) is (answer != "yes\n")
    assert terminal.getvalue().count("Type yes") == question_count
    assert "AWS_SECRET_KEY" in terminal.getvalue() and "collect.example" in terminal.getvalue()
    other = evaluation_file(folder, **{**STRANGE, "key_env": "OTHER_KEY"})
    monkeypatch.setattr(settings_files.sys, "stdin", Terminal(""))
    assert refusal(other), "a yes is for one key and one host"


def agree(file, monkeypatch) -> None:
    """A person says yes to a key and a host, which is remembered."""
    monkeypatch.setattr(settings_files.sys, "stderr", Terminal())
    monkeypatch.setattr(settings_files.sys, "stdin", Terminal("yes\n"))
    assert not refusal(file)
    monkeypatch.setattr(settings_files.sys, "stdin", io.StringIO())
    assert not refusal(file), "it is remembered"


@pytest.mark.parametrize("change", ["other owner", "writable for a group", "writable for all"])
def test_a_yes_that_somebody_else_could_have_written_is_none(folder, monkeypatch, change):
    file = evaluation_file(folder, **STRANGE)
    agree(file, monkeypatch)
    agreed = settings_files._agreed_file()
    assert agreed.is_file() and not agreed.stat().st_mode & 0o022
    if change == "other owner":
        owner = os.geteuid()
        monkeypatch.setattr(settings_files.os, "geteuid", lambda: owner + 1)
    else:
        agreed.chmod(0o664 if "group" in change else 0o666)
    assert refusal(file)


def test_a_yes_is_not_looked_for_in_the_working_folder(folder, monkeypatch, tmp_path):
    """A relative XDG_CONFIG_HOME names another place in every folder, also in a stranger's."""
    file = evaluation_file(folder, **STRANGE)
    agree(file, monkeypatch)
    agreed = settings_files._agreed_file()
    planted = Path("theirs") / "memcalib"
    planted.mkdir(parents=True)
    (planted / "key_hosts.jsonl").write_bytes(agreed.read_bytes())
    monkeypatch.setenv("XDG_CONFIG_HOME", "theirs")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert refusal(file)


def test_a_key_that_is_missing_is_named_before_its_host(capsys, folder, monkeypatch):
    evaluation_file(folder, **STRANGE)
    words = ["evaluate", "--config", "theirs.yaml", "--out", "e", "--limit", "1"]
    assert "may not be sent to this host" in run(capsys, *words)[2]
    monkeypatch.delenv("AWS_SECRET_KEY")
    code, _, errors = run(capsys, *words)
    assert code == 1 and "set AWS_SECRET_KEY in the environment" in errors
    assert "may not be sent to this host" not in errors


def test_a_dry_run_names_the_files_whose_text_would_be_sent(capsys, folder):
    """The prompt of a judge may be any file: whoever looks sees which one."""
    secret = folder / "secret.txt"
    secret.write_text("the words of a secret file")
    looks = {
        "judging.prompt": ["evaluate", "--config", "theirs.yaml", "--set", "judging.prompt=FILE"],
        "judging.prompt of a training": ["train", "micro", "--set", "judging.prompt=FILE"],
        "prompts.rubrics": ["build", "micro", "--out", "b", "--set", "prompts.rubrics=FILE"],
    }
    evaluation_file(folder, model="j", base_url="http://localhost:9/v1", key_env="")
    for name, words in looks.items():
        words = [word.replace("FILE", str(secret)) for word in words]
        code, output, errors = run(capsys, *words, "--dry-run")
        assert code == 0, errors
        line = f"# {name.split()[0]}: the text of {secret} would be read and sent to a model"
        assert line in output and "words of a secret" not in output


def test_a_prompt_file_that_is_named_like_a_shipped_prompt_of_another_kind_is_named(capsys, folder):
    """`derivation-1` is a prompt of builds, so a judge reads the file of this name."""
    evaluation_file(folder, model="j", base_url="http://localhost:9/v1", key_env="")
    looks = {
        "judging.prompt": ("derivation-1", ["evaluate", "--config", "theirs.yaml"]),
        "prompts.rubrics": ("rpeval-1", ["build", "micro", "--out", "b"]),
    }
    for setting, (name, words) in looks.items():
        (folder / name).write_text("the words of a secret file")
        words = [*words, "--dry-run", "--set", f"{setting}={name}"]
        code, output, errors = run(capsys, *words)
        assert code == 0, errors
        assert f"# {setting}: the text of {name} would be read and sent to a model" in output
    (folder / "teacher-1").write_text("the words of a secret file")
    demonstrations = DemonstrationConfig(prompt="teacher-1")
    assert [*prompt_files_in(demonstrations)] == [("prompt", "teacher-1")]
    assert load_demonstration_prompt("teacher-1") == "the words of a secret file"
    (folder / "footprint-1").write_text("is not read")
    _, output, _ = run(capsys, "evaluate", "--config", "theirs.yaml", "--dry-run")
    assert "would be read" not in output


def test_an_address_without_a_key_is_not_asked_about_and_is_shown(capsys, folder):
    file = evaluation_file(folder, model="j", base_url="https://collect.example/v1", key_env="")
    assert not refusal(file)
    _, output, _ = run(capsys, "evaluate", "--config", file, "--dry-run")
    assert "https://collect.example/v1" in output


def test_a_dry_run_shows_a_strange_address_and_asks_nothing(capsys, folder):
    evaluation_file(folder, **STRANGE)
    code, output, _ = run(capsys, "evaluate", "--config", "theirs.yaml", "--dry-run")
    assert code == 0 and "https://collect.example/v1" in output


AUDIT = """
import json, sys
opened = []
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and sys.argv[1] in arguments[0]:
        opened.append(arguments[0])
sys.addaudithook(note)
from memcalib.commands.cli import main
try:
    main(sys.argv[2:])
except SystemExit as end:
    print(json.dumps({"code": end.code, "opened": opened}))
"""
NAMES = ("memcalib.yaml", "evaluation.yaml", "recipe.yaml", "redaction.yaml", "settings.json")


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "SET/data.jsonl"],
        ["lint", "SET/data.jsonl"],
        ["show", "SET/data.jsonl"],
        ["evaluate", "SET/data.jsonl", "--model", "m", "--judge", "micro-exact", "--dry-run"],
        ["build", "--from-memory", "SET/log.jsonl", "--preview", "--out", "OUT/b"],
    ],
    ids=lambda words: words[0],
)
def test_settings_that_came_with_data_are_not_read(folder, tmp_path, words):
    """Files of settings and modules beside the data, and fields of them in the rows, do nothing."""
    came = tmp_path / "set"
    came.mkdir()
    hostile = {"judge": "spy34:judge", "rules": [{"name": "own", "find": "spy34:find"}]}
    for name in NAMES:
        (came / name).write_text(json.dumps(hostile))
    for name in ("spy34.py", "data.py", "sitecustomize.py", "set.py"):
        (came / name).write_text(SPY)
    rows = [json.loads(example.to_json()) for example in EXAMPLES]
    (came / "data.jsonl").write_text("".join(json.dumps({**row, **hostile}) + "\n" for row in rows))
    log = {
        "user_id": "u",
        "query": "Where did I park?",
        "answer": "On deck two.",
        "memories": ["They parked on deck two."],
        **hostile,
    }
    (came / "log.jsonl").write_text(json.dumps(log) + "\n")
    words = [word.replace("SET", str(came)).replace("OUT", str(tmp_path)) for word in words]
    ended = subprocess.run(
        [sys.executable, "-c", AUDIT, str(came), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    observed = json.loads(ended.stdout.splitlines()[-1])
    assert {Path(name).name for name in observed["opened"]} <= {"data.jsonl", "log.jsonl"}
    assert not list(tmp_path.rglob("imported"))


@pytest.mark.parametrize("elsewhere", ["an address", "another file", "a link", "no file"])
def test_a_folder_of_data_is_read_and_its_readme_is_not(capsys, folder, elsewhere):
    """`datasets` reads the head of a README.md, which can name files anywhere."""
    data = folder / "theirs"
    data.mkdir()
    hidden = folder / "hidden.jsonl"
    write_jsonl(hidden, EXAMPLES)
    write_jsonl(data / "data.jsonl", EXAMPLES[:1])
    with MicroServer([]) as server:
        place = server.base_url + "/x.jsonl" if elsewhere == "an address" else str(hidden)
        head = (
            f'configs:\n- config_name: default\n  data_files: [{{split: train, path: "{place}"}}]'
        )
        (data / "README.md").write_text(f"---\n{head}\n---\n")
        if elsewhere == "a link":
            (data / "more.jsonl").symlink_to(hidden)
        if elsewhere == "no file":
            (data / "data.jsonl").unlink()
        code, output, errors = run(capsys, "validate", "theirs")
        assert not server.stats()["requests"]
    said = output + errors
    if elsewhere in ("an address", "another file"):
        assert code == 0 and "1 usable example" in said, said
    else:
        is_named = "a link that leads out of the folder" in said or "found 0 files" in said
        assert code == 1 and is_named, said


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_the_files_of_a_split_are_told_by_their_names(folder, split):
    data = folder / "theirs"
    (data / "data").mkdir(parents=True)
    names = {"train": ["train-0.jsonl", "data/train-1.jsonl"], "validation": ["dev.jsonl"]}
    for number, name in enumerate(names["train"] + names["validation"]):
        write_jsonl(data / name, EXAMPLES[number : number + 1])
    found = [row for _, row in iter_rows(data, split)]
    if split == "test":
        assert "split 'test'" in str(found[0])
    else:
        expected = EXAMPLES[:2] if split == "train" else EXAMPLES[2:3]
        assert {row["id"] for row in found} == {example.id for example in expected}


@pytest.mark.parametrize("place", ["state.json", "dataset_dict.json"])
def test_a_saved_folder_names_no_file_elsewhere(folder, place):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"a": 1}])
    rows.save_to_disk(folder / "elsewhere")
    DatasetDict(train=rows).save_to_disk(folder / "saved")
    assert [row for _, row in iter_rows(folder / "saved")] == [{"a": 1}]
    if place == "state.json":
        file = folder / "saved" / "train" / place
        content = json.loads(file.read_text())
        content["_data_files"] = [{"filename": "../../elsewhere/data-00000-of-00001.arrow"}]
    else:
        file = folder / "saved" / place
        content = {"splits": ["train", "../elsewhere"]}
    file.write_text(json.dumps(content))
    [(_, fault)] = iter_rows(folder / "saved")
    assert "elsewhere" in str(fault) and place in str(fault)


def test_a_saved_folder_has_no_link_to_a_file_elsewhere(folder):
    from datasets import Dataset

    Dataset.from_list([{"a": "private"}]).save_to_disk(folder / "elsewhere")
    Dataset.from_list([{"a": "theirs"}]).save_to_disk(folder / "saved")
    [arrow] = (folder / "saved").glob("*.arrow")
    arrow.unlink()
    arrow.symlink_to(folder / "elsewhere" / arrow.name)
    [(_, fault)] = iter_rows(folder / "saved")
    assert "a link that leads out of the folder" in str(fault)


@pytest.mark.parametrize("name", ["s.jsonl", "export.json", "notes.md", "rows.csv"])
def test_a_folder_of_a_log_or_source_has_no_link_to_a_file_elsewhere(folder, name):
    (folder / "elsewhere").write_text('{"query": "What is private?", "answer": "This."}')
    (folder / "theirs").mkdir()
    (folder / "theirs" / name).symlink_to(folder / "elsewhere")
    readers = {"notes.md": note_files, "rows.csv": folder_files}
    with pytest.raises(DataError, match="a link that leads out of the folder"):
        readers.get(name, folder_logs)(folder / "theirs")


READERS = {
    "log": folder_logs,
    "notes": note_files,
    "source": folder_files,
    "data": lambda path: only_rows(iter_rows(path)),
}


def only_rows(rows):
    """The rows; raises the first fault among them."""
    for _, row in rows:
        if isinstance(row, Violation):
            raise DataError([row])
        yield row


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_has_no_link_to_a_folder_elsewhere(folder, reader):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "a.jsonl").write_text('{"query": "What is private?"}\n')
    theirs = folder / "theirs"
    (theirs / "inside").mkdir(parents=True)
    for name in ("b.jsonl", "b.md", "b.csv"):
        (theirs / name).write_text('{"query": "q", "answer": "This."}\n')
    (theirs / "within").symlink_to(theirs / "inside")
    assert list(READERS[reader](theirs))
    (theirs / "inside" / "link").symlink_to(folder / "elsewhere")
    with pytest.raises(DataError, match="a link that leads out of the folder"):
        list(READERS[reader](theirs))


@pytest.mark.parametrize(
    "name", ["judgments.jsonl", "rollouts.jsonl", "examples.jsonl", "manifest.json"]
)
def test_a_run_folder_has_no_link_to_a_file_elsewhere(capsys, folder, name):
    (folder / "elsewhere").write_text("{}\n")
    (folder / "run").mkdir()
    judgments = [exact_judge(example, "Yes.") for example in EXAMPLES]
    write_jsonl(folder / "run" / "judgments.jsonl", judgments)
    assert run(capsys, "report", "run")[0] == run(capsys, "score", "run")[0] == 0
    (folder / "run" / name).unlink(missing_ok=True)
    (folder / "run" / name).symlink_to(folder / "elsewhere")
    for words in (["report", "run"], ["score", "run"], ["compare", "run", "run"]):
        if words[0] != "score" or name != "manifest.json":
            code, _, errors = run(capsys, *words)
            assert code == 1 and "a link that leads out of the folder" in errors, words


@pytest.mark.parametrize("name", ["proposals.jsonl", "settled.jsonl"])
def test_a_folder_of_levels_has_no_link_to_a_file_elsewhere(folder, name):
    (folder / "elsewhere").write_text("{}\n")
    (folder / "levels").mkdir()
    (folder / "levels" / "proposals.jsonl").write_text("{}\n")
    (folder / "levels" / name).unlink(missing_ok=True)
    (folder / "levels" / name).symlink_to(folder / "elsewhere")
    with pytest.raises(DataError, match="a link that leads out of the folder"):
        LevelsFile(folder / "levels")


def test_links_within_the_cache_of_a_hub_are_followed(folder):
    blobs = folder / "datasets--x" / "blobs"
    snapshot = folder / "datasets--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_jsonl(blobs / "0a1b", EXAMPLES)
    (snapshot / "train.jsonl").symlink_to(blobs / "0a1b")
    assert len(list(iter_rows(snapshot))) == len(EXAMPLES)
    (folder / "theirs").mkdir()
    (folder / "theirs" / "train.jsonl").symlink_to(blobs / "0a1b")
    [(_, fault)] = iter_rows(folder / "theirs")
    assert "a link that leads out of the folder" in str(fault)


def test_a_folder_that_is_only_named_snapshots_is_no_cache_of_a_hub(folder):
    theirs = folder / "copy" / "snapshots" / "mine"
    theirs.mkdir(parents=True)
    (folder / "copy" / "blobs").mkdir()
    write_jsonl(folder / "copy" / "blobs" / "0a1b", EXAMPLES)
    (theirs / "train.jsonl").symlink_to(folder / "copy" / "blobs" / "0a1b")
    [(_, fault)] = iter_rows(theirs)
    assert "a link that leads out of the folder" in str(fault)


def test_a_run_folder_of_a_stranger_is_read_and_not_run(capsys, folder):
    """A report of a run whose manifest names code imports none of it."""
    out = folder / "run"
    with MicroServer(EXAMPLES) as server:
        words = ["evaluate", "data.jsonl", "--model", "micro-model", "--base-url", server.base_url]
        code, _, errors = run(capsys, *words, "--judge", "micro-exact", "--out", out)
    assert code == 0, errors
    for name in ("parameters.json", "manifest.json"):
        file = out / name
        file.write_text(file.read_text().replace("micro-exact", "spy34:judge"))
        assert "spy34:judge" in file.read_text()
    for verb in (["report", out], ["show", "data.jsonl"], ["label", out], ["compare", out, out]):
        run(capsys, *verb)
    assert not (folder / "imported").exists()


def test_a_proxy_is_named_in_a_dry_run_and_in_the_manifest(capsys, folder, monkeypatch):
    """Whoever runs a proxy of the network sees what goes through it."""
    strange = {**STRANGE, "base_url": "http://collect.example/v1"}
    evaluation_file(folder, **strange)
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with MicroServer(EXAMPLES) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://me:word@127.0.0.1:{server.port}")
        words = ["evaluate", "--config", "theirs.yaml", "--allow-host", "collect.example"]
        words += ["--set", "judge.model=micro-judge", "--set", "model.model=micro-model"]
        words += ["--set", f"model.base_url={server.base_url}"]
        _, output, errors = run(capsys, *words, "--dry-run")
        proxy = f"http://***@127.0.0.1:{server.port}"
        line = f"# judge: requests would go through the proxy {proxy} (environment)"
        assert line in output, errors
        assert "# model: requests" not in output, "what is on this machine has no proxy"
        run(capsys, *words, "--out", "e", "--no-cache")
    manifest = json.loads((folder / "e" / "manifest.json").read_text())
    assert manifest["proxies"] == {"judge": proxy}
    assert "me:word" not in "".join(file.read_text() for file in (folder / "e").glob("*.json*"))
