"""A sweep in terminal and page: every point once, the best marked, values placed by size or in their order."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcq.reports import render_html, report_text
from kvcq.reports.lines import fitting_axis, log_axis
from kvcq.reports.sweep import measures, sweep_charts, sweep_sentence, sweep_table, value_places
from tests.reports.task_sample import WINDOW_VALUES, sweep_report
from tests.reports.test_html import HOSTILE, Outline


def test_the_table_has_every_point_with_the_numbers_of_its_row():
    report = sweep_report()
    table = sweep_table(report)
    labels = [column.label for column in table.columns]
    assert labels == ["windows", "Bits 8k", "KL", "Output", "Perplexity", "Needles", "Agreement", "Decode KL"]
    assert [row[0].text for row in table.groups[0].rows] == list(WINDOW_VALUES)
    for row, own in zip(table.groups[0].rows, report.artifacts[1:], strict=True):
        kl = own.contexts[-1].metrics
        assert row[2].text == f"{kl.kl:.4f}" and row[3].text == f"{kl.output_error:.4f}"
        assert row[4].text == f"{own.tasks.perplexity[-1].perplexity:.2f}"
        assert row[5].text == f"{100 * own.tasks.needle.score:.1f}%"
    assert [row[0].text for row in table.groups[1].rows] == ["bf16 reference"]
    assert [row[0].text for row in table.groups[0].rows if row[2].tone == "best"] == ["256/1024"]
    assert not any(row[1].tone == "best" for row in table.groups[0].rows)  # fewer bits are no quality


def test_measures_that_did_not_run_have_no_column():
    assert [own.column.label for own in measures(sweep_report(tasks=False))] == ["Bits 8k", "KL", "Output"]


def test_one_chart_a_measure_and_one_line_for_every_other_value():
    report = sweep_report(clips=("0.9", "1.0"))
    charts = sweep_charts(report)
    assert [caption for caption, _, _ in charts][:3] == [
        "KL against windows", "Output against windows", "Perplexity against windows",
    ]  # fmt: skip
    for _, drawing, table in charts:
        assert ">clip=0.9<title>" in drawing and ">clip=1.0<title>" in drawing
        assert drawing.count('class="dot"') == 10
        assert [column.label for column in table.columns] == ["windows", "clip=0.9", "clip=1.0"]
        assert [row[0].text for row in table.groups[0].rows] == list(WINDOW_VALUES)
    point = report.artifacts[1]
    kl = point.contexts[-1].metrics.kl
    assert f"clip=0.9 at 0/0: KL {kl:.4f} nats" in charts[0][1]


def test_the_page_shows_layers_of_the_best_point_only():
    page = render_html(sweep_report())
    section = page[page.index('id="layers"') : page.index('id="skipped"')]
    assert re.findall(r"<h3>(.*?)</h3>", section) == ["nova[windows=256/1024]"]
    assert page.index('id="sweep"') < page.index('id="bits"') and 'href="#sweep"' in page


def test_points_are_said_to_be_no_fits():
    report = sweep_report()
    said = sweep_sentence(report.sweep)
    assert said.startswith("nova over 5 values of windows, with rows=4096: 5 points")
    assert "To pack a point, fit it and validate that fit." in said
    assert said in render_html(report) and "Sweep (* best point)" in report_text(report)


def test_hostile_keys_and_values_stay_text():
    report = sweep_report()
    axis = report.sweep.axes[0].model_copy(update={"key": HOSTILE, "values": (HOSTILE, *WINDOW_VALUES[1:])})
    first = report.sweep.points[0].model_copy(update={"values": (HOSTILE,)})
    sweep = report.sweep.model_copy(
        update={"axes": (axis,), "points": (first, *report.sweep.points[1:]), "settings": (HOSTILE,), "method": HOSTILE}
    )
    page = render_html(report.model_copy(update={"sweep": sweep}))
    Outline(page)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page and "\u202e" not in page
    assert "\x1b" not in report_text(report.model_copy(update={"sweep": sweep}))


@pytest.mark.parametrize(
    ("values", "places"),
    [
        (("0/0", "32/128", "64/256"), [0, 0.5, 1]),  # no numbers: evenly
        (("0.9", "0.95", "1.0"), [0, 0.5, 1]),
        (("0.9", "1.0", "0.95"), [0, 0.5, 1]),  # not rising: in the order given
        (("256", "1024", "4096"), [0, 0.5, 1]),  # a wide range: by ratio
        (("0", "1", "4"), [0, 0.25, 1]),
        (("int8",), [0.5]),
    ],
)
def test_values_stand_by_size_or_in_their_order(values, places):
    assert [place.at for place in value_places(values)] == pytest.approx(places)
    assert [place.label for place in value_places(values)] == list(values)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=8))
def test_axes_hold_their_values(values):
    for axis in (fitting_axis(values), log_axis(values)):
        assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
        assert len(axis.ticks) >= 2 and all(-1e-6 <= axis.share(tick) <= 1 + 1e-6 for tick in axis.ticks)


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [0.0, 1.0], [5.0, 5.0], [-1.0, 1.0]])
def test_axes_of_zeros_and_equal_values_have_a_range(values):
    axis = fitting_axis(values)
    assert axis.high > axis.low and all(0 <= axis.share(value) <= 1 for value in values)
