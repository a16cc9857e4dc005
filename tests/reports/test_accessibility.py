"""What a page owes to people who cannot see its colours, use a mouse, or like motion."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from kvcq.reports import render_html
from tests.reports.sample import METHODS, artifact, reference, sample_report

VOID = {"meta", "br", "hr", "input"}
# What each text colour stands on, in both schemes; a series' hue is also the colour of its name in the chart.
GROUNDS = {
    "ink": ("ground", "card", "tint", "warn-tint"),
    "soft": ("ground", "card", "tint"),
    "faint": ("ground", "card"),
    "accent": ("ground", "card", "tint"),
    "pass": ("card", "pass-tint"),
    "fail": ("card", "fail-tint"),
    "warn": ("card", "warn-tint"),
} | {f"s{i}": ("card",) for i in range(8)}


class Page(HTMLParser):
    """Elements in order: (tag, attributes, open ancestors)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}, tuple(self.stack)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}, tuple(self.stack)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def all(self, *tags):
        return [element for element in self.elements if element[0] in tags]


@pytest.fixture(scope="module")
def text():
    return render_html(sample_report())


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def schemes(text):
    """Return the colour variables of the light and the dark scheme."""
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    found = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", half)) for half in (light, dark)]
    assert found[0].keys() == found[1].keys()
    return {"light": found[0], "dark": found[1]}


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_the_guidelines_say():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_colour_has_enough_contrast(text, scheme):
    colours = schemes(text)[scheme]
    poor = {
        (name, ground): round(contrast(colours[name], colours[ground]), 2)
        for name, grounds in GROUNDS.items()
        for ground in grounds
        if contrast(colours[name], colours[ground]) < 4.5
    }
    assert poor == {}


def test_no_text_colour_escapes_the_check(text):
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    used = set(re.findall(r"(?:[{; ]color|svg text[^{]*\{ *fill): *var\(--([\w-]+)\)", style))
    assert used <= {*GROUNDS, "hue"} and not re.search(r"[; {]color: *#", style)
    assert "opacity" not in "".join(re.findall(r"[^}]*\{[^}]*[{; ]color:[^}]*\}", style))


def test_language_title_and_zoom(page, text):
    (html,) = page.all("html")
    assert html[1]["lang"] == "en" and "<title>FAIL: HuggingFaceTB" in text
    assert "maximum-scale" not in text and "user-scalable" not in text


def test_landmarks_hold_everything_and_have_names(page):
    assert [len(page.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    ids = {attributes["id"] for _, attributes, _ in page.elements if "id" in attributes}
    for _, attributes, above in page.all("section"):
        assert "main" in above and attributes["aria-labelledby"] in ids
    for tag, _, above in page.all("header", "footer"):
        assert "main" not in above, tag
    for _, attributes, _ in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(attributes.get(name, "").split()) <= ids


def test_headings_descend_one_level_at_a_time(page):
    levels = [int(tag[1]) for tag, _, _ in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))


def test_the_keyboard_reaches_everything(page, text):
    """Native elements only: links and disclosures; what scrolls can be focused; the focus is seen."""
    assert len(page.all("summary")) == len(page.all("details")) > 10
    assert not page.all("button", "input", "select", "script")
    for tag, attributes, _ in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("tabindex", "0") == "0", tag
        if "scroll" in attributes.get("class", "").split():
            assert attributes["tabindex"] == "0" and attributes["role"] == "region" and attributes["aria-label"]
    assert re.search(r":focus-visible *\{ *outline: *2px solid", text) and "outline: none" not in text
    skip = page.all("a")[0]
    assert skip[1]["class"] == "skip" and skip[1]["href"] == "#verdict"


def test_nothing_is_told_to_a_mouse_alone(page, text):
    """HTML has no `title`; those of charts repeat what the table beside them says."""
    assert all("title" not in attributes for _, attributes, above in page.elements if "svg" not in above)
    assert not re.search(r"\bhover\b", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL), re.IGNORECASE)


def test_every_chart_has_a_name_and_a_table_with_its_values(page, text):
    drawn = [attributes for tag, attributes, _ in page.elements if tag == "svg"]
    charts = [attributes for attributes in drawn if attributes.get("role") == "img"]
    assert len(charts) == 1 + len(METHODS) and len(drawn) == len(charts) + 1
    assert [a for a in drawn if a not in charts] == [{"viewbox": "0 0 20 20", "aria-hidden": "true"}]
    figures = re.findall(r"<figure>(.*?)</figure>", text, re.DOTALL)
    assert len(figures) == len(charts)
    for figure in figures:
        assert "<svg" in figure and "<table>" in figure.split("</svg>", 1)[1]
    report = sample_report()
    head = report.artifacts[1].layers[0].kl_heads[0]
    assert f'<td class="num ">{head:#.3g}</td>'.replace(' "', '"') in text.replace(' "', '"')
    # Bars are decoration beside the table of bits.
    assert re.search(r'<div class="bars" aria-hidden="true">', text)


def test_tables_have_captions_and_scoped_headings(page):
    assert len(page.all("table")) == len(page.all("caption")) > 15
    assert all(attributes.get("scope") in ("col", "row", "rowgroup") for _, attributes, _ in page.all("th"))


def test_results_are_words_and_signs_before_they_are_colours(text):
    assert ">FAIL</td>" in text and ">pass</td>" in text and 'content: "★ "' in text
    assert re.search(r'<td class="num">[\d.]+ !</td>', text)  # a large mean is marked by a sign


def test_motion_is_kept_still_where_it_is_asked_to_be(text):
    assert "@media (prefers-reduced-motion: reduce)" in text
    moving = re.findall(r"@media \(([^)]*)\) \{ html \{ scroll-behavior: smooth", text)
    assert moving == ["prefers-reduced-motion: no-preference"]
    assert "@keyframes" not in text and "<animate" not in text


def test_layers_come_sorted_by_loss_and_in_their_order(page, text):
    report = sample_report()
    section = text[text.index('id="layers"') : text.index('id="skipped"')]
    assert section.count("<details open>") == 1 and section.count("Sorted by KL, worst first") == len(METHODS)
    assert section.count("In the order of the model") == len(METHODS)
    tables = re.findall(r"<table>.*?</table>", section.split("<h3>nova</h3>")[1], re.DOTALL)
    by_loss, by_layer = ([int(n) for n in re.findall(r'<th scope="row">(\d+)</th>', table)] for table in tables[:2])
    losses = {row.layer: row.metrics.kl for row in report.artifacts[-1].layers}
    assert by_layer == sorted(losses) and by_loss == sorted(losses, key=lambda layer: -losses[layer])
    assert "The three worst layers hold" in section


def test_a_report_of_one_artifact_and_of_none_keeps_the_rules():
    for rows in ((reference(), artifact("nova", 0.01)), (reference(),)):
        made = Page(render_html(sample_report(gated=False).model_copy(update={"artifacts": rows})))
        levels = [int(tag[1]) for tag, _, _ in made.all("h1", "h2", "h3", "h4")]
        assert all(below - above <= 1 for above, below in pairwise(levels))
        assert all("title" not in attributes for _, attributes, above in made.elements if "svg" not in above)
