"""No key gets into a file of a run: refused in settings at any depth, masked in what is written."""

import base64
import html
import json
import os
import re
import string
from pathlib import Path
from urllib.parse import quote

import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st

import memcalib
from memcalib.commands.evaluate import Evaluation, EvaluationRun
from memcalib.settings.files import check_settings
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.io.keys import hide_key, hide_printed, hide_secrets, key_places
from memcalib.io.records import short_repr, write_jsonl
from memcalib.io.runs import RunFolder
from memcalib.io.settings import SettingErrors
from memcalib.products.shared.redaction import load_redactor
from memcalib.products.micro.world import WORLDS, make_examples
from memcalib.products.micro.practice.server import MicroServer

EXAMPLES = make_examples(WORLDS["short"], 3, 7, "test")
HEX = "3f9a0c7d1e5b8264" * 4
MIXED = "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY" * 3
CAPITALS = "Q7W3E9R1T5Y2U8I4O6P0"
DIGITS = "482913750264"
# put together here, so that no line of this file has the form of a key
FORMS = {
    "OpenAI": "sk-" + MIXED[:48],
    "OpenAI, project": "sk-proj-" + MIXED[:40] + "_" + MIXED[:20],
    "Anthropic": "sk-ant-api03-" + MIXED[:40] + "-" + MIXED[:30],
    "OpenRouter": "sk-or-v1-" + HEX,
    "small letters alone": "sk-" + "a" * 24,
    "GitHub": "ghp_" + MIXED[:36],
    "GitHub, server": "ghs_" + MIXED[:36],
    "GitHub, fine-grained": "github_pat_" + MIXED[:22] + "_" + MIXED[:59],
    "GitLab": "glpat-" + MIXED[:20],
    "GitLab, runner": "glrt-" + MIXED[:20],
    "AWS": "AKIA" + CAPITALS[:16],
    "AWS, session": "ASIA" + CAPITALS[:16],
    "Google": "AIza" + MIXED[:35],
    "Google, OAuth": "ya29." + MIXED[:60],
    "Google, client": "GOCSPX-" + MIXED[:28],
    "Google, refresh": "1//0" + MIXED[:40],
    "Slack, bot": f"xoxb-{DIGITS}-{DIGITS}-" + MIXED[:24],
    "Slack, app": f"xapp-1-A{DIGITS}-{DIGITS}-" + HEX,
    "Stripe": "sk_live_" + MIXED[:24],
    "Stripe, restricted": "rk_test_" + MIXED[:24],
    "Stripe, webhook": "whsec_" + MIXED[:32],
    "Hugging Face": "hf_" + MIXED[:34],
    "Groq": "gsk_" + MIXED[:52],
    "xAI": "xai-" + MIXED[:80],
    "NVIDIA": "nvapi-" + MIXED[:64],
    "Perplexity": "pplx-" + MIXED[:48],
    "npm": "npm_" + MIXED[:36],
    "PyPI": "pypi-" + MIXED[:70],
    "Docker": "dckr_pat_" + MIXED[:27],
    "DigitalOcean": "dop_v1_" + HEX,
    "SendGrid": "SG." + MIXED[:22] + "." + MIXED[:43],
    "Mailgun": "key-" + HEX[:32],
    "Mailchimp": HEX[:32] + "-us12",
    "Twilio": "AC" + HEX[:32],
    "Telegram": DIGITS[:10] + ":" + MIXED[:35],
    "Discord": "M" + MIXED[:23] + "." + MIXED[:6] + "." + MIXED[:38],
    "Shopify": "shpat_" + HEX[:32],
    "Databricks": "dapi" + HEX[:32],
    "Airtable": "pat" + MIXED[:14] + "." + HEX,
    "Postman": "PMAK-" + HEX[:24] + "-" + HEX[:34],
    "New Relic": "NRAK-" + CAPITALS + "A1B2C3D",
    "Atlassian": "ATATT3xFfGF0" + MIXED[:60],
    "LangSmith": "lsv2_pt_" + HEX[:32] + "_" + HEX[:10],
    "Vault": "hvs." + MIXED[:40],
    "Tailscale": "tskey-auth-" + MIXED[:16] + "-" + MIXED[:32],
    "Notion": "ntn_" + MIXED[:46],
    "age": "AGE-SECRET-KEY-1" + CAPITALS * 2,
    "JSON web token": "eyJ" + MIXED[:20] + ".eyJ" + MIXED[:40] + "." + MIXED[:43],
    "a header": "Bearer " + MIXED[:32],
    "an address": "https://me:" + MIXED[:16] + "@host.example/v1",
    "a licence": "AB12C-DE34F-GH56I-JK78L-MN90P",
    "a private key": "-----BEGIN PRIVATE KEY-----\n" + MIXED + "\n-----END PRIVATE KEY-----",
}
each_form = pytest.mark.parametrize("name", FORMS)


def core(name: str) -> str:
    """What of a form must be nowhere."""
    return FORMS[name].removeprefix("Bearer ").removeprefix("https://me:")[:24].split("@")[0]


def test_there_are_forty_forms_and_more():
    assert len(FORMS) >= 40 and len({*FORMS.values()}) == len(FORMS)


@each_form
def test_one_list_for_messages_settings_and_redaction(name):
    text = f"It says {FORMS[name]} and more."
    assert core(name) not in hide_secrets(text)
    assert hide_secrets(text).startswith("It says ") and hide_secrets(text).endswith(" and more.")
    assert [*key_places({"a": [text]})] == ["a.0"]
    assert core(name) not in load_redactor().row([text]).texts[0]


HARMLESS = [
    "runs/sk-small",
    "runs/pat-2024-01-15-evaluation",
    "data/sk-wikipedia-2024-11-dump.jsonl",
    "pplx-70b-online",
    "hf-internal-testing/tiny-random-LlamaForCausalLM",
    "accounts/fireworks/models/llama-v3p1-405b-instruct",
    "deepseek-chat",
    "gpt-4o-2024-08-06",
    "claude-sonnet-4-5-20250929",
    "owner/name@8d969eef6ecad3c29a3a629280e686cf0c3f5d5a",
    "npm-workspaces-for-beginners",
    "package.module:my_judge_of_keys",
    "http://localhost:8000/v1",
    "https://api.openai.com/v1",
    "Do not repeat the key: sk-... is enough.",
    "key-value-memory-2024",
    "the bearer of bad news must not be punished",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_names_are_no_keys(text):
    assert hide_secrets(text) == text and not [*key_places({"a": text})]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(string.ascii_lowercase + " ", max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(string.ascii_lowercase, min_size=1, max_size=5), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def planted(value, key, data, path=()):
    """A copy of a JSON value with a key in one place, and the place."""
    if isinstance(value, dict) and value:
        name = data.draw(st.sampled_from(sorted(value)))
        inner, place = planted(value[name], key, data, (*path, name))
        return {**value, name: inner}, place
    if isinstance(value, list) and value:
        position = data.draw(st.integers(0, len(value) - 1))
        inner, place = planted(value[position], key, data, (*path, str(position)))
        return [*value[:position], inner, *value[position + 1 :]], place
    return key, ".".join(path)


@given(json_values, st.sampled_from(sorted(FORMS)), st.data())
def test_a_key_is_found_in_any_place(value, name, data):
    with_key, place = planted({"setting": value}, FORMS[name], data)
    assert [*key_places(with_key)] == [place]
    assert not [*key_places({"setting": value})]


def test_a_key_as_the_name_of_an_option_is_found_and_not_repeated():
    [place] = key_places({"model": {"extra_body": {FORMS["GitHub"]: 1}}})
    assert place == "model.extra_body.***"


PLACES = [
    "data",
    "split",
    "exams",
    "target_labels",
    "model.model",
    "model.base_url",
    "model.key_env",
    "model.extra_body.user_token",
    "model.extra_body.deep.er.than.that",
    "judge.extra_body.metadata",
    "judging.prompt",
    "sampling.prompt_template",
    "log.file",
    "colour",
]


@pytest.mark.parametrize("place", PLACES)
@each_form
def test_settings_refuse_every_form_in_every_place(place, name):
    content = {"data": "d.jsonl", "model": {"model": "m"}, "judge": {"model": "j"}}
    *names, last = place.split(".")
    inner = content
    for step in names:
        inner = inner.setdefault(step, {})
    inner[last] = FORMS[name]
    with pytest.raises(SettingErrors) as caught:
        check_settings(Evaluation, content, "theirs.yaml")
    message = str(caught.value)
    assert message.startswith(f"theirs.yaml: {place}: found ") and "***" in message
    assert core(name) not in message and "key_env" in message


@each_form
def test_an_endpoint_refuses_every_form(name):
    for fields in (
        {"model": FORMS[name]},
        {"base_url": f"https://host.example/{FORMS[name]}"},
        {"extra_body": {"metadata": [{"note": FORMS[name]}]}},
    ):
        with pytest.raises(CallError) as caught:
            Endpoint(**{"model": "m", **fields})
        assert core(name) not in str(caught.value)


VERBS = {
    "evaluate": ["--model", "m", "--set", "model.extra_body.user_token=KEY"],
    "generate": ["--model", "m", "--set", "model.extra_body.user_token=KEY"],
    "exam": ["--judge", "KEY"],
    "train": ["micro", "--set", "launch.accelerate=KEY"],
    "build": ["micro", "--set", "builder.extra_body={a: [KEY]}"],
    "demonstrations": ["data.jsonl", "--set", "teacher.extra_body.x=KEY"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_takes_a_key(capsys, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", EXAMPLES)
    key = FORMS["GitHub"]
    words = [word.replace("KEY", key) for word in VERBS[verb]]
    if verb in ("evaluate", "generate"):
        words = ["data.jsonl", *words, "--base-url", "http://127.0.0.1:9/v1"]
    code, output, errors = run(capsys, verb, *words, "--out", "o")
    assert code in (1, 2) and "***" in errors, errors
    assert key not in output + errors
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file


def test_what_a_run_folder_keeps_is_masked(tmp_path):
    """Settings may come from a program, past the reader of settings."""
    settings = {"note": dict(FORMS), FORMS["AWS"]: [*FORMS.values()]}
    folder = RunFolder(tmp_path / "run", settings)
    RunFolder(tmp_path / "run", settings)  # the same settings open it again
    folder.write_manifest(command=f"memcalib --x {FORMS['Stripe']}", facts=[{"a": dict(FORMS)}])
    text = "".join(file.read_text() for file in (tmp_path / "run").iterdir())
    assert not [name for name in FORMS if core(name) in text]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["command"].endswith("***")


def test_a_whole_run_leaves_no_key(tmp_path, monkeypatch):
    """Every place of the settings that a program may fill, and a key in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", FORMS["OpenAI"])
    write_jsonl(tmp_path / "data.jsonl", EXAMPLES)
    with MicroServer(EXAMPLES) as server:
        model = Endpoint(model="micro-model", base_url=server.base_url, key_env="MY_KEY")
        evaluation = Evaluation(
            data="data.jsonl", model=model, judge="micro-exact", exams=FORMS["GitHub"]
        )
        EvaluationRun(evaluation, tmp_path / "run", command=f"x --exams {FORMS['GitHub']}").run()
    contents = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(contents) > 10
    for name in FORMS:
        assert not [file for file, content in contents.items() if core(name).encode() in content]


def in_base64_behind(before: str):
    def spell(key: str) -> str:
        return base64.b64encode(f"{before}{key}:after".encode()).decode()

    return spell


SPELLINGS = {
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of the web": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    "base64 behind one": in_base64_behind("u"),
    "base64 behind two": in_base64_behind("u:"),
    "base64 behind three": in_base64_behind("me:"),
    "a URL": lambda key: quote(key, safe=""),
    "a URL with its slashes": lambda key: quote(key),
    "JSON": lambda key: json.dumps(key)[1:-1],
    "JSON of PHP": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "Python": lambda key: repr(key)[1:-1],
    "HTML": html.escape,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "key", ["correct-horse-7>~battery", "Zq7/Yx+3?Wv9~Uts", "ä7ö2ü9è4é6ñ8", "gor'se!Hill99x"]
)
def test_a_known_key_is_found_however_a_server_spells_it(monkeypatch, key, spelling):
    """As a server does that logs the header which it got."""
    monkeypatch.setenv("MY_PROVIDER_KEY", key)
    spelled = SPELLINGS[spelling](key)
    hidden = hide_secrets(f"401: found {spelled} instead of a key")
    assert "***" in hidden and "instead of a key" in hidden
    left = hidden.removeprefix("401: found ").split(" instead")[0].replace("***", "")
    assert len(left) <= len(spelled) - len(key)


BEFORE = ["\\n", "\\t", "\\u0022", "\\x0a", "%22", "%0A", "=3D", "é", "'", "key_"]
BEFORE += ["\x1b[1;32m", "\\x1b[31m", "\x1b[38;5;196m"]


@pytest.mark.parametrize("before", BEFORE)
def test_a_key_is_seen_behind_what_belongs_to_another_character(before):
    """`repr` writes the line break before a key that was pasted as a letter."""
    for name in ("OpenAI", "GitHub", "AWS"):
        hidden = hide_secrets(f"found '{before}{FORMS[name]}\\n'")
        assert hidden == f"found '{before}***\\n'", name


BEARERS = [
    " ",
    "  ",
    "\t\t",
    ": ",
    " = ",
    "+",
    '": "',
    ' "',
    "\n",
    "%20",
    "\\u0020",
    " `",
    " “",
    ": «",
]


@pytest.mark.parametrize("between", BEARERS)
@pytest.mark.parametrize(
    "token", ["abcdef1234567890abcd", "12|abcdefghijklmnopqrstuv", "a" * 15 + "1"]
)
def test_what_follows_bearer_is_hidden(between, token):
    hidden = hide_secrets(f"found auth_Bearer{between}{token} there")
    assert hidden == f"found auth_Bearer{between}*** there"


@pytest.mark.parametrize(
    "text",
    [
        "Bearer abcdefghijklmnop",  # no digit
        "Bearer abcdef123456789",  # 15 characters
        "the bearer, who is named below, has 1 card",
        "forbearer 2024-01-15-evaluation",
    ],
)
def test_what_is_no_bearer_token_stays(text):
    assert hide_secrets(text) == text


ADDRESSES = {
    "http://mara:goat_tundra99@proxy:80/": "http://***@proxy:80/",
    "http://goat_tundra99@proxy:80/": "http://***@proxy:80/",
    "http://mara:goat/tundra99@proxy:80/x": "http://***@proxy:80/x",
    "https:\\/\\/mara:goat_tundra99@proxy": "https:\\/\\/***@proxy",
    "http://127.0.0.1:8000/v1/@team": "http://127.0.0.1:8000/v1/@team",
    "https://example.org/@team": "https://example.org/@team",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_user_and_password_of_an_address_are_hidden(address):
    assert hide_secrets(f"by {address} there") == f"by {ADDRESSES[address]} there"


@pytest.mark.parametrize("name", ["DB_PASS2", "AWS_CREDS", "MY_CRED", "X_PWD1"])
def test_a_variable_of_such_a_name_holds_a_secret(monkeypatch, name):
    monkeypatch.setenv(name, "kelpie8moth40x")
    assert hide_secrets("found kelpie8moth40x") == "found ***"


@pytest.mark.parametrize(
    "body",
    [
        {"access_token": "tundragoat66xx-lark"},
        {"auth": {"passwd": "tundragoat66xx"}},
        {"headers": [{"credentials": "tundragoat66xx"}]},
        {"sessionToken": ["tundragoat66xx"]},
        {"auth": "tundragoat66xx"},
        {"access token": "tundragoat66xx"},
        {"x/token": "tundragoat66xx"},
        {"token:": "tundragoat66xx"},
        {"pwd": "<tundragoat66"},
        {"metadata": {"api-key": "x"}},
        {"APIToken": "tundragoat66xx"},
        {"JWTToken": "tundragoat66xx"},
        {"HTTPCookie": "tundragoat66xx"},
        {"DBPass": "tundragoat66xx"},
        {"token2": "tundragoat66xx"},
        {"my_creds": "tundragoat66xx"},
        {"token": "tundragoat66xx\n"},
    ],
)
def test_a_field_that_is_named_like_a_secret_is_refused(body):
    with pytest.raises(CallError, match="put the key into the variable that key_env names"):
        Endpoint(model="m", base_url="http://localhost:9/v1", key_env="", extra_body=body)


def test_fields_of_a_request_that_only_sound_like_a_secret_stay():
    body = {"max_tokens_to_think": 500, "stop_token": "<|im_end|>", "eos_token": "</s>"}
    body |= {"author": "a-language-model", "token_type_ids": [1, 2], "pass": True}
    assert Endpoint(model="m", extra_body=body).extra_body == body


def test_a_private_key_is_hidden_where_the_text_was_cut_off():
    lines = [base64.b64encode(os.urandom(48)).decode() for _ in range(4)]
    for line_end in ("\n", "\\n", "\\r\\n"):
        text = line_end.join(["-----BEGIN RSA PRIVATE KEY-----", *lines[:3], lines[3][:20]])
        assert not [
            line for line in lines if line[:16] in hide_secrets(f"found {text}... in a.yaml")
        ]
    assert hide_secrets("it begins with -----BEGIN PRIVATE KEY----- and so on") == (
        "it begins with -----BEGIN PRIVATE KEY----- and so on"
    )


def test_a_key_of_several_lines_is_found_as_json_writes_it(monkeypatch):
    monkeypatch.setenv("MY_PROVIDER_KEY", "line1abcdefgh\nline2ijklmnop9")
    assert hide_secrets(json.dumps(os.environ["MY_PROVIDER_KEY"])) == '"***"'


def test_a_key_pasted_with_its_line_break_is_not_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"id": "k", "question": "q", "domain": "d", "memory_blocks": f"\n{FORMS['OpenAI']}"}
    (tmp_path / "k.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "k.yaml").write_text(f'a: {{text: "a\\n{FORMS["OpenAI"]}\n')
    for words in (["validate", "k.jsonl"], ["evaluate", "--config", "k.yaml", "--dry-run"]):
        code, output, errors = run(capsys, *words)
        assert code == 1 and core("OpenAI") not in output + errors, words


@given(st.text(min_size=12, max_size=40), st.text(max_size=40))
def test_words_that_are_not_the_key_stay(key, text):
    if key.lower() not in text.lower() and key not in text:
        assert hide_key(f"<{text}>", key) == f"<{text}>" or key in f"<{text}>"


def test_a_key_that_is_no_text_stops_nothing(monkeypatch):
    """A variable holds bytes, which need not be UTF-8."""
    monkeypatch.setitem(os.environ, "SESSION_KEY", "a1b2c3d4\udcff\udcfee5f6")
    assert hide_secrets("nothing here") == "nothing here"
    assert hide_secrets("<a1b2c3d4\udcff\udcfee5f6>") == "<***>"


SECRETIVE = """
from memcalib.problem import Level, judgment_for

class Judge:
    name = "own"
    def __init__(self):
        self.api_key = KEY
        self.mode = "strict"
    def __call__(self, example, response):
        return judgment_for(example, dict.fromkeys(example.levels, Level.BOUND), judge=self.name)

judge = Judge()
"""


def test_a_key_inside_of_a_judge_of_ones_own_stays_there(tmp_path, monkeypatch, capsys):
    """What a judge is made of is written down, to see that it was changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    key = FORMS["Groq"]
    (tmp_path / "own_judge52k.py").write_text(SECRETIVE.replace("KEY", repr(key)))
    write_jsonl(tmp_path / "data.jsonl", EXAMPLES)
    with MicroServer(EXAMPLES) as server:
        words = [
            "evaluate",
            "data.jsonl",
            "--model",
            "micro-model",
            "--judge",
            "own_judge52k:judge",
        ]
        words += ["--base-url", server.base_url, "--key-env", "", "--out", "run", "--no-cache"]
        code, _, errors = run(capsys, *words)
    assert code == 0, errors
    assert '"mode": "strict"' in (tmp_path / "run" / "judge-binding.json").read_text()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not [file for file in files if key.encode() in file.read_bytes()]


def test_a_key_that_a_message_shows_shortened_is_hidden(monkeypatch):
    """Its beginning and its end stand beside an ellipsis."""
    key = "Zq8Lw2Vn5Tg7" * 7 + "x9Kd93"
    monkeypatch.setenv("LONG_TOKEN", key)
    for value in (key, {"a": [key]}, "word " * 10**4 + key, f"{key} " + "word " * 10**4):
        shown = hide_printed(f"found {short_repr(value)}; allowed: a word")
        assert "***" in shown and "Zq8" not in shown and "Kd93" not in shown, shown
        assert shown.endswith("; allowed: a word")


@pytest.mark.parametrize(
    "name", ["AWS", "Databricks", "Twilio", "Mailgun", "Mailchimp", "a licence", "OpenAI"]
)
def test_a_key_is_seen_before_an_underscore(name):
    assert core(name) not in hide_secrets(f"found {FORMS[name]}_prod.json")


CUT = {
    "known": "Zq8LwPm3Xv7Tn2Rk5Yb9Hc4Jd6",
    "address": "https://mara:goat_tundra99xyzxyz@proxy.example/",
    "Databricks": FORMS["Databricks"],
    "Google": FORMS["Google"],
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_left_of_a_key_that_was_cut_off_is_not_printed(monkeypatch, name):
    """Whoever shortens a text need not think of keys: the way out does."""
    monkeypatch.setenv("LONG_TOKEN", CUT["known"])
    shown = CUT[name][: CUT[name].index("@") if "@" in CUT[name] else -2]
    for text in (f"xxx {shown}", f"found b'xxx {shown}' (a)", f"x {shown}… y", f"{shown}\nmore"):
        printed = hide_printed(text)
        assert shown[8:20] not in printed and "***" in printed, printed
    assert hide_printed(f"the end of it, {CUT['known'][5:]}") == "the end of it, ***"


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1",
        "requests would go to 'http://127.0.0.1:8000'",
        "http://localhost:8000",
        "https://HOST:PORT",
        "found b'hf_internal_testing' and key-word",
        "the token-of-the-day",
    ],
)
def test_what_only_ends_like_a_cut_key_is_printed(monkeypatch, text):
    monkeypatch.setenv("LONG_TOKEN", "token-of-the-moment")
    assert hide_printed(text) == text


def test_nothing_that_show_and_validate_print_has_a_key(capsys, tmp_path, monkeypatch):
    """The card breaks lines and the list shortens questions, before or after a key."""
    known = CUT["known"]
    monkeypatch.setenv("LONG_TOKEN", known)
    secrets = [known, CUT["address"], FORMS["OpenAI, project"], f"Bearer {MIXED[:32]}"]
    cores = [secret[-20:-10] for secret in secrets] + ["goat_tundra"]
    example = EXAMPLES[0]
    for ahead in (0, 30, 55):
        question = "x" * ahead + " " + " and ".join(secrets)
        record = example.model_copy(update={"question": question})
        file = tmp_path / "e.jsonl"
        write_jsonl(file, [record])
        for words in ([], [record.id], [record.id, "--html"]):
            code, out, err = run(capsys, "show", file, *words)
            assert code == 0, err
            assert "***" in out and not [part for part in cores if part in out], out
        broken = tmp_path / "broken.jsonl"
        broken.write_text(f'{{"q": "{question}\n')
        _, out, err = run(capsys, "validate", broken)
        assert not [part for part in cores if part in out + err], out


def test_every_text_leaves_by_the_one_way_out():
    """No page of the package writes to standard output past it."""
    package = Path(memcalib.__file__).parent
    past = re.compile(r"sys\.__stdout__|stdout\.(?:buffer|stream|_stream)|os\.write\(1\b")
    for file in package.rglob("*.py"):
        assert not past.search(file.read_text(encoding="utf-8")), file
