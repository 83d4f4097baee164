"""Codes that somebody wrote another way: in words, with hyphens, behind a clause, as an option."""

import pytest

from memcalib.products.shared.redaction import load_redactor

REDACTOR = load_redactor()
LEFT_BEFORE = {  # value that must go -> the text
    "four seven two nine": "My PIN is four seven two nine, keep it.",
    "vier sieben zwei neun": "Meine PIN: vier sieben zwei neun",
    "quatre sept deux neuf": "Le code de vérification est quatre sept deux neuf.",
    "one, two, two, nine, five, five": "The one-time code: one, two, two, nine, five, five.",
    "double four seven nine one": "The OTP was double four seven nine one",
    "4-8-2-9-1-3": "OTP: 4-8-2-9-1-3",
    "9-1-3-7": "Your verification code is 9-1-3-7.",
    "blue-Harbour7": "The password, which you must not tell anybody, is blue-Harbour7.",
    "Tiger99!x": "Mot de passe c'est Tiger99!x",
    "soleil42": "Le mot de passe, c’est soleil42",
    "hunter2secret": "curl -u anna:hunter2secret https://host.example/api",
    "s3cr3t-Word": "curl -u 'anna:s3cr3t-Word' -X POST https://host.example",
    "pa55word": "wget --user=anna:pa55word https://host.example/file",
    "proxy-Pass1": "curl --proxy-user anna:proxy-Pass1 https://host.example",
}
STAYS = [
    "We counted one two three four five six people at the door.",
    "My pin board has four, five, or six, seven notes on it.",
    "Chapters 4-8-2 were cut; the code is in chapter nine.",
    "The pin came loose after four days.",
    "docker run -u 1000:1000 image",
    "docker run --user 1000:1000 image",
    "rsync -u host:/srv/data .",
    "git push -u origin main",
    "The code has one, two or three branches, four at most.",
    "The password, as I said, is forgotten.",
    "Le mot de passe, c'est important.",
    "The dress code, for one, is two-piece suits.",
    "Bug 4-8-2 of the error code list",
    "The train leaves at 4-5-6 pm, depending on the day.",
    "sort -u name:asc is no option here",
]


@pytest.mark.parametrize("value", LEFT_BEFORE)
def test_a_code_written_another_way_is_replaced(value):
    text = LEFT_BEFORE[value]
    after = REDACTOR.row([text]).texts[0]
    assert value not in after and "[key 1]" in after, after
    assert after.split("[key 1]")[0] == text.split(value)[0]


@pytest.mark.parametrize("text", STAYS)
def test_what_is_no_code_stays(text):
    assert REDACTOR.row([text]).texts[0] == text


def test_a_recovery_phrase_without_a_figure_is_replaced():
    words = "apple river stone window garden paper candle bridge forest mirror basket thunder"
    after = REDACTOR.row([f"My seed phrase: {words}"]).texts[0]
    assert after == "My seed phrase: [key 1]"
