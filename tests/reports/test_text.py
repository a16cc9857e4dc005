import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.reports.text import clean, context_label, number, percent, plural, ranges, size, to_ascii


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.00"), (0.74, "0.740"), (0.0114, "0.0114"), (0.00123, "0.0012"), (1.234e-5, "1.2e-5"),
        (123.4, "123"), (25123.0, "2.5e4"), (-0.5, "-0.500"),
    ],
)  # fmt: skip
def test_numbers_have_about_three_digits(value, text):
    assert number(value) == text


def test_units():
    assert [size(n) for n in (0, 900, 4896, 4128768, 3 * 2**30, 5 * 2**41)] == [
        "0 B", "900 B", "4.8 KiB", "3.9 MiB", "3.0 GiB", "10.0 TiB",
    ]  # fmt: skip
    assert [context_label(n) for n in (512, 2048, 3000, 131072)] == ["512", "2k", "3000", "128k"]
    assert (percent(0.981), plural(1, "gate"), plural(2, "gate")) == ("98.1%", "1 gate", "2 gates")
    assert ranges([9, 3, 4, 5, 0, 4]) == "0, 3-5, 9" and ranges([]) == ""


@given(st.text())
def test_cleaned_text_is_one_visible_line_and_spells_in_ascii(text):
    safe = clean(text)
    assert not any(char in safe for char in "\n\r\t\x1b\x07\u202e\u2066\u200b\x9b")
    safe.encode("utf-8")
    assert to_ascii(safe).isascii()


def test_hidden_characters_become_visible():
    assert clean("a\x1b[31mb\u202ec\nd") == "a\\x1b[31mb\\u202ec d"
