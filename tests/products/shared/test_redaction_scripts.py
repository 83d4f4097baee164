"""Private values beside letters of scripts without blanks, and numbers that are nobody's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared.redaction import RULES, as_seen, redact_row

VALUES = {
    "card": "4111111111111111",
    "card in groups": "4111-1111-1111-1111",
    "IBAN": "DE89370400440532013000",
    "IP address": "192.0.2.44",
    "phone": "+8613800138000",
    "e-mail": "li.wei@example.com",
}
SENTENCES = {
    "Chinese": ("我的资料是", "谢谢"),
    "Japanese": ("これは", "です"),
    "katakana": ("データ", "ヨロシク"),
    "Korean": ("제것은", "입니다"),
    "Thai": ("ของฉัน", "ครับ"),
}


def redacted(text: str) -> str:
    return redact_row([text], RULES).texts[0]


@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_without_a_blank_around_it_is_replaced_and_its_neighbours_stay(kind, language):
    before, after = SENTENCES[language]
    text = redacted(before + VALUES[kind] + after)
    assert text.startswith(before + "[") and text.endswith("]" + after), text
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("电话：13800138000", "电话：[phone 1]"),
        ("我的电话是13800138000。", "我的电话是[phone 1]。"),
        ("手机号码13912345678，请回复", "手机号码[phone 1]，请回复"),
        ("전화번호는 010-1234-5678입니다", "전화번호는 [phone 1]입니다"),
        ("เบอร์โทร0812345678ค่ะ", "เบอร์โทร[phone 1]ค่ะ"),
        ("tél : 06.12.34.56.78", "tél : [phone 1]"),
        ("Tél. 06.12.34.56.78", "Tél. [phone 1]"),
        ("звони 8-912-345-67-89", "звони [phone 1]"),
        ("8 (912) 345-67-89", "[phone 1]"),
        ("用户@例子.公司", "[e-mail 1]"),
    ],
)
def test_telephones_as_they_are_written_elsewhere(text, expected):
    assert redacted(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "ISBN-10: 0-306-40615-2",
        "ISBN 0-306-40615-2",
        "call the helpline at 1-800-273-8255",
        "0800 1110111 is free of charge",
        "0 1 1 2 3 5 8 13 21 34",
        "it prints aGVsbG8gd29ybGQ=",
        "arXiv:2310.12345",
        "the net 10.20.30.0/24",
        "2023年12月25日",
        "第12345678号",
        "版本1.2.3.4",
        "on 06.12.2024 at 10:30",
    ],
)
def test_numbers_that_are_nobodys_stay(text):
    assert redacted(text) == text


@given(st.text(alphabet="我的ก하ア 1aB+(@.", max_size=20))
def test_only_blanks_are_added_between_scripts(text):
    look, positions = as_seen(text)
    characters = [
        c for n, c in enumerate(look) if n + 1 == len(look) or positions[n] != positions[n + 1]
    ]
    assert "".join(characters) == text
