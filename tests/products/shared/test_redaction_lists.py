"""Disguised private values and harmless strings that look like them:
few are left, and fewer changed.
"""

import argparse
import ast
import asyncio
import base64
import email
import inspect
import json
import logging
import random
import re
import socket
import ssl
import string
import typing
import unittest.mock
from collections import Counter
from pathlib import Path

import pytest

from memcalib.inference.endpoint import Endpoint
from memcalib.products.dataset.consent import plan_calls, terms_card
from memcalib.products.dataset.memory_drafts import memory_drafts
from memcalib.products.shared.redaction import RULES, Redactor, load_redactor, name_forms, name_rule

PEOPLE = [
    *(
        "Anna Berg",
        "Jürgen Müller",
        "Юрий Иванов",
        "Zofia Kowalska",
        "José García",
        "Marek Novák",
        "Sergey Petrov",
    ),
    *(
        "Mikko Virtanen",
        "Γιώργος Παπαδόπουλος",
        "Søren Ørsted",
        "Ayşe Yılmaz",
        "Łukasz Wójcik",
        "王小明",
    ),
    *(
        "Павел Хрущёв",
        "Ольга Смирнова",
        "Дмитрий Соколов",
        "Björn Åkesson",
        "Kateřina Dvořáková",
        "Thomas Weiß",
        "Ewa Nowak",
    ),
    "Αλέξης Δημητρίου",
]
REDACTOR = Redactor((*RULES, name_rule(PEOPLE)))
DATA = Path(__file__).parent / "data"


def lines(name):
    return [
        line
        for line in (DATA / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("# ")
    ]


def fragments_left(line):
    """Parts of the marked values of a line that are still there:
    of four letters and figures, or of three figures.
    """
    text = line.split(" | ", 1)[1]
    after = re.sub(r"\[[\w -]+\]", "", REDACTOR.row([re.sub("[«»]", "", text)]).texts[0])
    parts = {
        fragment
        for value in re.findall("«(.*?)»", text)
        for fragment in re.findall(r"[^\W_]+", value)
    }
    telling = {
        fragment
        for fragment in parts
        if len(fragment) >= 4 or (len(fragment) >= 3 and fragment.isdigit())
    }
    return {
        fragment
        for fragment in telling
        if re.search(rf"(?<![^\W_]){re.escape(fragment)}(?![^\W_])", after)
    }


@pytest.mark.parametrize("name", ["disguised", "disguised_held_out"])
def test_few_disguised_values_are_left(name):
    rows = lines(name)
    kinds = Counter(line.split(" | ")[0] for line in rows)
    assert len(kinds) >= 10 and min(kinds.values()) >= 2 and len(rows) >= 70
    lines_left = [line for line in rows if fragments_left(line)]
    assert len(lines_left) <= 5 / 70 * len(rows), lines_left


@pytest.mark.parametrize("name", ["harmless", "harmless_held_out"])
def test_few_harmless_strings_are_changed(name):
    rows = lines(name)
    changed = []
    for row in rows:
        after = REDACTOR.row([row]).texts[0]
        if after != row:
            changed.append((row, after))
    assert len(rows) >= 60 and len(changed) <= 2 / 60 * len(rows), changed


def unseen(name):
    """Rows of a list whose writer had seen no rule, page or test of redaction."""
    return rows_of(f"unseen_{name}.jsonl")


def rows_of(file):
    text = (DATA / file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def test_few_values_are_left_of_a_list_by_somebody_who_had_not_seen_the_rules():
    rows = unseen("private")
    left_values = [row for row in rows if row["private"] in Redactor().row([row["text"]]).texts[0]]
    promised = [row for row in left_values if row["kind"] != "id"]
    assert len(rows) == 60 and len(promised) <= 4, promised
    assert "numbers of documents" in Redactor().not_looked_for  # the three of kind id


def test_a_list_written_from_the_promise_alone():
    """Its writer had read what is said to be looked for, and nothing else of redaction; 2 of 55
    were left and 1 of 60 changed when it was first counted."""
    private = rows_of("blind_private.jsonl")
    harmless = rows_of("blind_harmless.jsonl")
    assert {row["kind"] for row in private} == set(load_redactor().looked_for)
    rows_left = [row for row in private if row["private"] in Redactor().row([row["text"]]).texts[0]]
    changed = [row for row in harmless if Redactor().row([row["text"]]).texts != [row["text"]]]
    assert (len(private), len(harmless)) == (55, 60)
    assert not rows_left and not changed, rows_left + changed


def test_a_second_list_written_from_the_promise_alone():
    """Written by another hand in the same way; 3 of 57 were left and none of 60 changed when it was
    first counted."""
    private = rows_of("promise_private.jsonl")
    harmless = rows_of("promise_harmless.jsonl")
    rows_left = [row for row in private if row["private"] in Redactor().row([row["text"]]).texts[0]]
    changed = [row for row in harmless if Redactor().row([row["text"]]).texts != [row["text"]]]
    assert (len(private), len(harmless)) == (57, 60)
    assert not rows_left and not changed, rows_left + changed


HEX = "3f5a9c0e7d1b2a4c6e8f0a1b2c3d4e5f60718293"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("::ffff:203.0.113.77 is the host", "[IP address 1] is the host"),
        ("64:ff9b::192.0.2.33 answers", "[IP address 1] answers"),
        (
            "The password was changed to Tulip-88 today.",
            "The password was changed to [key 1] today.",
        ),
        ("Its password has been changed to Violet-9.", "Its password has been changed to [key 1]."),
        ("The password was reset to hunter2!", "The password was reset to [key 1]!"),
        ("The password was set to Marigold.", "The password was set to [key 1]."),
        (
            "The wifi password at the hut is moss-and-fern-19.",
            "The wifi password at the hut is [key 1].",
        ),
        (f"paste {HEX} there", "paste [key 1] there"),
        (f"wandb_key={HEX}", "wandb_key=[key 1]"),
        ("my wandb key is abc123def", "my wandb key is [key 1]"),
        ("Authorization: Token pp9word77", "Authorization: Token [key 1]"),
        ("Authorization: ApiKey pp9word77", "Authorization: ApiKey [key 1]"),
        ("481-209 is your Amazon OTP", "[key 1] is your Amazon OTP"),
        ("Your code: X7K-29Q", "Your code: [key 1]"),
        ("Verification code AB-12-CD-34", "Verification code [key 1]"),
        ("smtp_pass: Teal(Barrel)5", "smtp_pass: [key 1]"),
    ],
)
def test_kinds_that_an_attack_had_found_left(text, expected):
    assert Redactor().row([text]).texts == [expected]


@pytest.mark.parametrize(
    "text",
    [
        f"Merged in {HEX} on the main branch",
        f"commit {HEX}",
        "The password was changed to meet the new policy.",
        "The password policy was set to twelve characters.",
        "my primary key is user_id42",
        "My house key is under mat22",
        "password: getpass.getpass()",
        "password = input('x')",
        "Our code is UTF-8 encoded",
        "the password at work is too long",
        "Mein Passwort im Büro ist zu lang.",
        "A node answers at 12:30:45 or at 1:2:3.",
    ],
)
def test_what_looks_like_these_kinds_and_is_none(text):
    assert Redactor().row([text]).texts == [text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Die PIN der EC-Karte lautet 4471", "Die PIN der EC-Karte lautet [key 1]"),
        ("Min engångskod är 771204.", "Min engångskod är [key 1]."),
        ("인증번호 482913 을 입력하세요", "인증번호 [key 1] 을 입력하세요"),
        ("验证码是603118", "验证码是[key 1]"),
        ("Şifrem: lale_7719", "Şifrem: [key 1]"),
        ("Lösenordet är Granris-88", "Lösenordet är [key 1]"),
        ("密码是Xiaomao2020，别告诉别人", "密码是[key 1]，别告诉别人"),
        (
            "git clone https://jonas:V9rt-Quell@git.werkstatt.example/lager.git",
            "git clone https://[login 1]@git.werkstatt.example/lager.git",
        ),
        ("postgres://u:Brume42@db.example:5432/x", "postgres://[login 1]@db.example:5432/x"),
        ("das Passwort ist erforderlich", "das Passwort ist erforderlich"),
        ("le mot de passe est obligatoire", "le mot de passe est obligatoire"),
    ],
)
def test_codes_in_more_languages_and_what_stands_beside_a_value(text, expected):
    assert Redactor().row([text]).texts == [expected]


TABLE = "| user | password |\n|---|---|\n| mara | {} |\n| jon | {} |\nThe end | of it."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("jdbc:oracle:thin:scott/tigerLily7@//db.example:1521/orcl",
         "jdbc:oracle:thin:[login 1]@//db.example:1521/orcl"),
        ("sqlplus -S scott/tigerLily7@orcl", "sqlplus -S [login 1][handle 1]"),
        ("Login is mara / cobalt_yak17", "Login is mara / [key 1]"),
        ("My credentials: mara | cobalt_yak17.", "My credentials: mara | [key 1]."),
        (TABLE.format("skua_rock12", "sunshine"), TABLE.format("[key 1]", "[key 2]")),
        ("username,password\nmara,teal_ibis55\n", "username,password\nmara,[key 1]\n"),
        ('"user";"Passwort"\n"mara";"teal_ibis55"', '"user";"Passwort"\n"mara";"[key 1]"'),
        ("host\tapi_key\na.example\tq7w8e9r0", "host\tapi_key\na.example\t[key 1]"),
        ("A senha do wifi é ipe_roxo19", "A senha do wifi é [key 1]"),
        ("La password della rete è lago_blu22", "La password della rete è [key 1]"),
        ("Het wachtwoord van de wifi is meeuw_duin7", "Het wachtwoord van de wifi is [key 1]"),
        (r"net use Z: \\srv\share /user:firm\mara Gorse!Hill9",
         r"net use Z: \\srv\share /user:firm\mara [key 1]"),
        (r"net use Z: \\srv\share Gorse!Hill9 /user:mara",
         r"net use Z: \\srv\share [key 1] /user:mara"),
        ("net user mara Gorse!Hill9 /add", "net user mara [key 1] /add"),
        ("ConvertTo-SecureString 'Larch#Pond8' -AsPlainText -Force",
         "ConvertTo-SecureString '[key 1]' -AsPlainText -Force"),
        ("CREATE USER mara IDENTIFIED BY 'larchpond';",
         "CREATE USER mara IDENTIFIED BY '[key 1]';"),
        ("ALTER ROLE mara WITH PASSWORD 'larchpond'", "ALTER ROLE mara WITH PASSWORD '[key 1]'"),
        ("echo larchpond | sudo -S reboot", "echo [key 1] | sudo -S reboot"),
        ("echo 'mara:larchpond' | chpasswd", "echo 'mara:[key 1]' | chpasswd"),
        ("htpasswd -b -c users mara larchpond", "htpasswd -b -c users mara [key 1]"),
        ("The safe opens with the combination 31-7-22.",
         "The safe opens with the combination [key 1]."),
        ("The combination of the bike lock is 4471", "The combination of the bike lock is [key 1]"),
        ("'petra.vogel'＠beispiel．example", "[e-mail 1]"),
        ('Petra <"petra vogel"@beispiel.example>', "Petra <[e-mail 1]>"),
        ("Write: https://wa.me/4915123456789", "Write: https://wa.me/[phone 1]"),
        ("wa.me/+4915123456789", "wa.me/[phone 1]"),
        ("redis-cli -a teal_ibis55 ping", "redis-cli -a [key 1] ping"),
        ("openssl enc -k teal_ibis55 -in a", "openssl enc -k [key 1] -in a"),
        ('wpa_passphrase "HomeNet" teal_ibis55', 'wpa_passphrase "HomeNet" [key 1]'),
        ("WIFI:T:WPA;S:HomeNet;P:teal_ibis55;;", "WIFI:T:WPA;S:HomeNet;P:[key 1];;"),
        ('<entry key="password">teal_ibis55</entry>', '<entry key="password">[key 1]</entry>'),
        ("<th>Password:</th>\n  <td><code>teal_ibis55</code></td>",
         "<th>Password:</th>\n  <td><code>[key 1]</code></td>"),
        ("Password? teal_ibis55", "Password? [key 1]"),
        ("il codice del portone è 4829", "il codice del portone è [key 1]"),
        ("steamcommunity.com/id/mossylark8", "steamcommunity.com/id/[handle 1]"),
        ("magic link: app.example.com/login?t=quiet-otter-991",
         "magic link: app.example.com/login?[query 1]"),
        ("Her passphrase used to be tundra_goat66 until May.",
         "Her passphrase used to be [key 1] until May."),
        ("pw for the printer → brine_crab21", "pw for the printer → [key 1]"),
        ("La contraseña nueva del router es roble_lince7",
         "La contraseña nueva del router es [key 1]"),
        ("Mein Kennwort habe ich auf ulme_dachs5 geändert.",
         "Mein Kennwort habe ich auf [key 1] geändert."),
        ("mot de passe Wi‑Fi : chêne_loutre3", "mot de passe Wi‑Fi : [key 1]"),
        ("  - name: DB_PASS\n    value: ferry-moss21", "  - name: DB_PASS\n    value: [key 1]"),
        ('{"key": "api_token", "value": "ferry-moss21"}',
         '{"key": "api_token", "value": "[key 1]"}'),
        ("Use 48 29 13 to sign in, the code expires soon.",
         "Use [key 1] to sign in, the code expires soon."),
        ("signal.me/#p/+4915123456789", "signal.me/#p/[phone 1]"),
        ("https://mastodon.example/@petravogel", "https://mastodon.example/@[handle 1]"),
        ("https://bsky.app/profile/petra.vogel", "https://bsky.app/profile/[handle 1]"),
        ("I set moss_lark31 as my password", "I set [key 1] as my password"),
        ("moss_lark31 is my password.", "[key 1] is my password."),
        ("moss-lark31 ist mein Passwort", "[key 1] ist mein Passwort"),
        ("Use moss_lark31 as the API key", "Use [key 1] as the API key"),
        ("log in with mara and moss_lark31 as password",
         "log in with mara and [key 1] as password"),
        ("The password I use everywhere is moss_lark31",
         "The password I use everywhere is [key 1]"),
        ("password – teal_ibis55", "password – [key 1]"),
        ("Hasło do wifi to sosna_3391", "Hasło do wifi to [key 1]"),
        ("<tr><th>password</th><td>teal_ibis55</td></tr>",
         "<tr><th>password</th><td>[key 1]</td></tr>"),
        ('<input type="password" name="p" value="teal_ibis55">',
         '<input type="password" name="p" value="[key 1]">'),
        ("PIN for the alarm: 5582", "PIN for the alarm: [key 1]"),
        ("The safe opens with 31-07-22", "The safe opens with [key 1]"),
        ("call me on five five five zero one double four", "call me on [phone 1]"),
        ("DB_PASSWORD: !!str ermine_coal9", "DB_PASSWORD: [key 2] [key 1]"),
        ("enter your password below", "enter your password below"),
        ("the password will be heron_51", "the password will be [key 1]"),
        ("la contraseña del wifi se cambió a Ballena_12",
         "la contraseña del wifi se cambió a [key 1]"),
        ("le mot de passe a été changé en Heron_51", "le mot de passe a été changé en [key 1]"),
        ("пароль изменён на Цапля51", "пароль изменён на [key 1]"),
        ("llámame al 612 34 57 81", "llámame al [phone 1]"),
        ("Ruf mich unter 3044827719 an", "Ruf mich unter [phone 1] an"),
        ("mi número de teléfono es 612345781", "mi número de teléfono es [phone 1]"),
    ],
)  # fmt: skip
def test_kinds_that_attackers_had_found_left(text, expected):
    assert Redactor().row([text]).texts == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "she was at home dot com boom",
        "--password is deprecated",
        "cookie: oatmeal is best",
        "the order number is 2049 3388 1102 7741",
        "five five five zero one four",
        "The gate opens with a beep at 7",
        "ORCID 0000-0002-1825-0097",
        "The combination 3-4-3 worked for the team.",
        "The combination of 25 mg and 50 mg is safe.",
        "token,count\nhello,3\nco2,17",
        "| password | set |\n|:---:|---|\n| | yes |\n| not set | no |",
        "Keys, password, phone\nand wallet, hat, gloves",
        "I lost my password, and then my login\nI found both, and then some",
        "net use Z: /delete",
        "I met him at example dot conference in May.",
        "The password manager for teams is 1Password.",
        '{"name": "max_tokens", "value": 4096}',
        '{"name": "token", "value": 300}',
        "Is it src/main.py or a.b/c? x=1",
        "Use Argon2id as the password hash.",
        "OAuth2 is the token protocol.",
        "gpt-4o is the API key owner",
        "The password you entered is misspelled.",
        "The password I chose is short-lived.",
        "password - see page 12",
        "https://unpkg.com/@babel/core7 and https://www.npmjs.com/package/@types/node20",
        "<tr><th>price</th><td>teal_ibis55</td></tr>",
        "User: mara / admin",
        "Login: see page 12 / 13 of the manual",
        "ConvertTo-SecureString '$secret' is a cmdlet",
        "echo hello | grep sudo",
        "la contraseña se cambió a tiempo en 2024",
        "le mot de passe a été changé en urgence",
        "пароль изменён на сервере",
        "Es ruft 2019 bis 2023 niemand an",
    ],
)
def test_what_looks_like_the_kinds_of_the_third_attack_and_is_none(text):
    assert Redactor().row([text]).texts == [text]


def test_few_harmless_texts_are_changed_of_a_list_by_somebody_who_had_not_seen_the_rules():
    rows = unseen("harmless")
    regions = load_redactor({"regions": ["CN", "JP", "KR", "TH", "FR", "RU", "US", "IN", "EG"]})
    for redactor in (Redactor(), regions):
        changed = [row for row in rows if redactor.row([row["text"]]).texts != [row["text"]]]
        assert len(rows) == 60 and len(changed) <= 2, changed


@pytest.mark.parametrize(
    "text",
    [
        *(
            "上午9点10点11点12点各一班",
            "一二三四五六七八九十",
            "圆周率是三点一四一五九二六五三五八九",
        ),
        *(
            "二〇二六年十一月二十六日",
            "하나 둘 셋, 일이삼사오",
            "공이 굴러간다",
            "他在地铁站圈a区等,三点半走",
        ),
        *("un, deux, trois, quatre, cinq, six, sept", "zéro faute, deux jours, trois nuits"),
        *("Пароль — это слово", "один два три четыре пять шесть семь восемь", "รหัสผ่านคือสิ่งสำคัญ"),
        *("He paid 4 dot 5 and 3 dot 2", "٢٠٢٦ سنة", "ข้อ ๑๒๓ และ ๔๕๖", "3・4・5 月"),
    ],
)
def test_what_looks_like_figures_in_words_stays(text):
    assert Redactor().row([text]).texts == [text]


NAMED = [
    *(
        "DB_PASSWORD=",
        "OPENAI_API_KEY=",
        "client_secret: ",
        "SECRET_KEY=",
        "aws_secret_access_key=",
    ),
    *("AWS_SESSION_TOKEN=", "accessToken=", "PGPASSWORD="),
]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "form", ["{}{}", "export {}{}", "'{}{}'", "see: {}{} please", "{}'{}'", "A=1\n{}{}\nB=2"]
)
def test_secrets_behind_names_with_several_parts(name, form):
    redacted = REDACTOR.row([form.format(name, "tulip-77x"), "tulip-77x again"]).texts
    assert redacted == [form.format(name, "[key 1]"), "[key 1] again"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "@dataclass\nclass A: ...",
            "@app.route('/')\ndef home(): ...",
            "  @my_decorator\n  async def f(): ...",
        ),
        *(
            "http://127.0.0.1:8000/v1",
            "10.0.0.0/8",
            "git@github.com:acme/tools.git",
            "ssh://git@host.example/x.git",
        ),
    ],
)
def test_what_belongs_to_programs_stays(text):
    assert REDACTOR.row([text]).texts == [text]


def test_a_machine_in_a_network_is_no_network():
    assert REDACTOR.row(["192.168.1.17/24 and 192.168.1.0/24"]).texts == [
        "[IP address 1]/24 and 192.168.1.0/24"
    ]


def test_disguises_of_an_address_in_all_combinations():
    at = [
        "@",
        "{at}",
        "<at>",
        " (AT) ",
        "(@)",
        " @ ",
        " at ",
        "-at-",
        " AT ",
        "&#64;",
        "%40",
        "(ät)",
    ]
    dot = [".", "{dot}", " dot ", "[dot]", " . ", " [.] ", " DOT ", "(.)"]
    disguises = [
        f"{user}{a}" + d.join(host)
        for a in at
        for d in dot
        for user in ("jo.b", "lena77")
        for host in (["oxbow", "org"],)
    ]
    not_redacted = [
        value
        for value in disguises
        if "oxbow" in Redactor().row([f"write to {value} soon"]).texts[0]
    ]
    assert not_redacted == [] and len(disguises) == 192


def test_strings_drawn_at_random_are_told_from_names_in_programs():
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits
    drawn = [
        "".join(rng.choice(letters) for _ in range(rng.choice([20, 24, 32]))) for _ in range(200)
    ]
    drawn += [
        base64.b64encode(rng.randbytes(rng.choice([16, 20, 32]))).decode() for _ in range(200)
    ]
    assert sum(
        f"it is {token}" == REDACTOR.row([f"it is {token}"]).texts[0] for token in drawn
    ) <= 0.05 * len(drawn)
    modules = (
        argparse,
        ast,
        asyncio,
        base64,
        email,
        inspect,
        logging,
        socket,
        ssl,
        typing,
        unittest.mock,
    )
    names = sorted({name for module in modules for name in dir(module)})
    assert (
        len(names) > 1000
        and [name for name in names if Redactor().row([name]).texts != [name]] == []
    )


def test_the_forms_of_a_name_have_an_order():
    """Their order would change from process to process in a set."""
    assert [*name_forms(["Anna Berg", "王小明"])] == [
        ("anna", "berg"),
        ("anna",),
        ("berg",),
        ("王小明",),
        ("wang", "xiaoming"),
        ("xiaoming", "wang"),
        ("wang", "xiao", "ming"),
    ]


def test_forms_of_one_name_have_one_placeholder():
    texts = REDACTOR.row(["Иванову, Ivanov; Mueller und Müllers", "Юрий Иванов"]).texts
    assert texts == ["[person 1], [person 1]; [person 2] und [person 2]", "[person 1]"]


def test_numbers_of_a_country_that_the_rules_name():
    assert load_redactor({"regions": ["ES"]}).row(["Ana: 612 345 678"]).texts == ["Ana: [phone 1]"]
    assert Redactor().row(["Ana: 612 345 678"]).texts == ["Ana: 612 345 678"]


def find_wards(text):
    return [match.span() for match in re.finditer(r"ward \d+", text)]


def test_a_detector_from_elsewhere():
    redactor = load_redactor({"rules": [{"name": "place", "find": f"{__name__}:find_wards"}]})
    assert (
        redactor.row(["in ward 7"]).texts == ["in [place 1]"]
        and "find_wards" in redactor.looked_for["place"]
    )


def test_what_was_not_looked_for_is_named():
    assert "names of people" in Redactor().not_looked_for[0]
    without = load_redactor({"names": ["Anna Berg"], "without": ["card"]})
    assert (
        any("card numbers" in entry for entry in without.not_looked_for)
        and "card" not in without.looked_for
    )
    assert not any("names of people" in entry for entry in without.not_looked_for)
    assert all(rule.seeks for rule in RULES)


def test_the_statement_says_what_was_looked_for_and_no_more(tmp_path):
    row = '{"query": "Where?", "memories": ["Jo rows, jo@example.org"], "consent": true}\n'
    (tmp_path / "log.jsonl").write_text(row, encoding="utf-8")
    result = memory_drafts(tmp_path / "log.jsonl")
    for text in (
        str(plan_calls(result, {"builder": Endpoint(model="m")})),
        terms_card(result.kept, result),
    ):
        vain, never = re.findall(r"(?:not found|Not looked for): (.*?)\.(?: |\n)", text)
        assert (
            "values after names of secrets in the listed forms (DB_PASSWORD=X, --token X)"
            in vain.split("; ")
        )
        assert "e-mail" not in vain and "password" not in vain.split("; ")
        assert "names of people, because no list was given" in never and "postal addresses" in never


@pytest.mark.parametrize(
    ("name", "forms", "others"),
    [
        ("Eva", ["Evu", "Evou", "Evy", "EVA"], ["Event", "Evening", "Every"]),
        ("Tim", ["Tims", "Timem"], ["Time", "Times", "Timing"]),
        ("Marek", ["Marka", "Markovi", "Marekem"], ["Mark", "Marks", "Market"]),
        ("Berg", ["Bergs", "Bergu"], ["Bergen", "Berge", "Bergson"]),
        ("Дмитрий", ["Дмитрия", "Dmitri", "Dmitry", "Dmitrij"], ["Дмит", "Demetrius"]),
        ("Virtanen", ["Virtasen", "Virtaselle"], ["Virtanus"]),
    ],
)
def test_forms_of_a_name_and_words_that_only_begin_like_it(name, forms, others):
    redactor = Redactor((name_rule([name]),))
    assert redactor.row(forms).texts == ["[person 1]"] * len(forms)
    assert redactor.row(others).texts == others


def test_the_name_of_a_variable_stays_before_its_value():
    text = "MYSQL_ROOT_PASSWORD=t0pH4tzz docker compose up"
    after = "MYSQL_ROOT_PASSWORD=[key 1] docker compose up"
    assert REDACTOR.row([text]).texts == [after]


def test_an_international_number_with_the_check_digit_of_a_card_is_a_telephone():
    assert REDACTOR.row(["WhatsApp +5511987650042 only"]).texts == ["WhatsApp [phone 1] only"]
    for card in ("4111 1111 1111 1111", "4111111111111111"):
        assert REDACTOR.row([f"Card {card}"]).texts == ["Card [card 1]"]
    assert "4111" not in REDACTOR.row(["Card +4111111111111111"]).texts[0]
