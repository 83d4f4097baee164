"""Dates, times, ranges, versions and measurements are no telephone numbers, and a telephone number
beside one is still replaced.
"""

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.shared.redaction import Redactor, load_redactor, without_dates

HARMLESS = """Ana worked at the bakery (2019 - 2024)
Ana worked at the library (2024-02-01 - present)
Ana lived in Graz 2024-07-30 00:00:00 - 2024-08-30 00:00:00
Plan my trip (2026-03-02 - 2026-03-09)
Ana is running a command (2025-08-27 19:05:52 - present)
Ana lived in Graz (2020-01-01 00:00:00 - 2024-05-01 00:00:00)
Worked there 2019–2024
In the seasons 2019/20 - 2023/24
Away 01.-03.05.2024
Away 24.12. - 26.12.2024
Away 01.12. - 06.12.
On the job 02/2024 - 05/2024
On the job 01.02.2024-03.02.2024
On the job 01/02/2024 - 03/02/2024
On the job 01. 02. 2024 - 03. 02. 2024
On the job 12.06.24-18.06.24
On the job 2024-02-01/2024-03-01
Open 09.30 - 10.45
Open 0930-1045 daily
On holiday 08/15 - 08/22
Posted Wed Oct 10 20:19:24 +0000 2018
Posted Wed Oct 10 20:19:24 +1000 2018
Committed 1740911376 +0100
At +47.0707 +15.4395
At (47.0707 15.4395)
From 0 - 1000000 rows
The town grew by +12 000 000 people
Costs (100 000 - 150 000)
Runs build (10.0.19045.3803)
Lost 0-0 1-0 2-1 3-1
Saved as 20240730 101500
Room 0 2024-02-01 10
Call (2024-07-30 10:00)
Eats (1500-2000) kcal
Lived there 2001-2005, 2007-2010, 2012-2020
Owns ISBN (978-3-16-148410-0)
Born 03 05 1985
Logged 2025-08-15T17:10:40+02:00 - 2025-08-16T17:10:40Z
Temperature rose by +10.25 - 12.75""".splitlines()


@pytest.mark.parametrize("text", HARMLESS)
def test_dates_ranges_and_measurements_stay(text):
    assert Redactor().row([text]).texts == [text]
    of_countries = load_redactor({"regions": ["DE", "US", "AT", "FR", "GB"]})
    if "(10.0" not in text and "15.4395" not in text:  # what the numbering plans alone decide
        assert "[phone" not in of_countries.row([text]).texts[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call 0316 123456 2024-02-01", "call [phone 1] 2024-02-01"),
        ("2024-02-01 0316 123456", "2024-02-01 [phone 1]"),
        ("(0316) 123456 (2019 - 2024)", "[phone 1] (2019 - 2024)"),
        ("(+43) 316 873511 since 2019", "[phone 1] since 2019"),
        ("from 09:30 to 10:45 on +49 30 1234567", "from 09:30 to 10:45 on [phone 1]"),
        ("Tel. 2123-4567 (2019 - 2024)", "Tel. [phone 1] (2019 - 2024)"),
        ("06.12.34.56.78, 02.03.2024", "[phone 1], 02.03.2024"),
        ("0664 2019 2024", "[phone 1]"),
        ("0699 / 123 45 67", "[phone 1]"),
    ],
)
def test_a_telephone_number_beside_a_date_is_still_replaced(text, expected):
    assert Redactor().row([text]).texts == [expected]


FORMS = (
    "%Y-%m-%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%Y/%m/%d",
    "%d.%m.%y",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d %H:%M:%S",
    "%d. %m. %Y",
    "%Y%m%d",
    "%H:%M",
    "%a %b %d %H:%M:%S +0200 %Y",
)
TIMES = st.datetimes(datetime(1950, 1, 1), datetime(2080, 1, 1))
BRACKETS = st.sampled_from([("", ""), ("(", ")"), ("[", "]"), ("Date range: ", "")])


@given(
    TIMES,
    st.timedeltas(timedelta(0), timedelta(5000)),
    st.sampled_from(FORMS),
    st.sampled_from([" - ", "-", " – ", "/", " to ", " bis "]),
    BRACKETS,
)
def test_any_range_of_dates_stays(start, length, form, between, brackets):
    first, last = brackets
    one = f"Ana lived in Graz {first}{start.strftime(form)}{last}."
    both = start.strftime(form) + between + (start + length).strftime(form)
    two = f"Ana lived in Graz {first}{both}{last}."
    assert Redactor().row([one, two]).texts == [one, two]


@given(TIMES, st.sampled_from(FORMS), st.integers(100_000, 9_999_999), st.booleans())
def test_a_number_beside_any_date_is_replaced(time, form, number, before):
    phone = f"+43 316 {number}"
    words = [f"on {time.strftime(form)},", f"call {phone}"]
    text = " ".join(words if before else words[::-1])
    assert str(number) not in Redactor().row([text]).texts[0]


@given(st.text(alphabet="0123456789-./: ()+", max_size=60))
def test_what_is_blanked_keeps_its_place(text):
    blanked = without_dates(text)
    assert len(blanked) == len(text)
    assert all(new in ("\0", old) for new, old in zip(blanked, text, strict=True))
