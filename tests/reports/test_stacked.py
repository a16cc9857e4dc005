import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.reports import manifest_text, report_text
from kvcq.reports.stacked import GAP, split
from tests.reports.sample import sample_manifest, sample_report

NUMBER = re.compile(r"\*?\d[\d,.]*(?:e-?\d+)?[%×]?")


def numbers(text):
    """All numbers of the tables of a text, row names aside."""
    found = [NUMBER.findall(line.partition("  ")[2]) for line in text.splitlines()]
    return sorted(number for line in found for number in line)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 80))
def test_parts_keep_the_order_lose_nothing_and_fit_where_two_columns_fit(needed, width):
    parts = split(needed, width)
    assert [index for part in parts for index in part if index] == list(range(1, len(needed)))
    for part in parts:
        assert part[0] == 0
        taken = sum(needed[index] + GAP for index in part) - GAP
        assert taken <= width or len(part) <= 2
    assert parts == [list(range(len(needed)))] or sum(need + GAP for need in needed) - GAP > width


@pytest.mark.parametrize("width", [34, 48, 60, 79])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_narrow_terminals_cut_no_number(width, ascii_only):
    def tables(columns):
        text = report_text(sample_report(), width=columns, ascii_only=ascii_only)
        return text[text.index("Fidelity against") : text.index("Keys read from")]

    wide, narrow = tables(200), tables(width)
    assert numbers(narrow) == numbers(wide)
    assert max(map(len, narrow.splitlines())) <= width
    # Each part names its rows and says to which context they belong.
    parts = narrow.count("Artifact ")
    assert (parts > 1) == (width < 79)  # there, folding one name is enough
    assert all(narrow.count(f"Context {context}") == parts for context in ("2k", "4k", "8k"))


def test_wide_terminals_see_each_table_once():
    for text in (report_text(sample_report(), width=100), manifest_text(sample_manifest(), width=80)):
        assert text.count("KL p95") == 1


def test_a_bundle_fits_a_narrow_terminal():
    text = manifest_text(sample_manifest(), width=50)
    fidelity = text[text.index("Fidelity against") : text.index("Kept in")]
    assert fidelity.count("Context") > 1 and max(map(len, fidelity.splitlines())) <= 50
