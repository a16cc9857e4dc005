import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from kvcq.reports import render_html
from kvcq.reports.heat import heat_map, heat_scale
from kvcq.reports.kl_chart import kl_chart
from tests.reports.sample import HEADS, LAYERS, METHODS, artifact, reference, sample_manifest, sample_report

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>{{ 7*7 }}&\u202e\x1b"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Checks nesting and collects tags, attributes, ids and text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.ids, self.words = [], [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def hostile_report():
    report = sample_report()
    rows = [reference(), artifact(HOSTILE, 0.01, skip={"0": HOSTILE})]
    rows[1] = rows[1].model_copy(update={"method": HOSTILE, "warnings": (HOSTILE,)})
    provenance = report.provenance.model_copy(update={"source": HOSTILE, "revision": HOSTILE})
    data = report.data.model_copy(update={"sources": (HOSTILE,), "sha256": HOSTILE, "template": HOSTILE})
    gate = report.gates[0].model_copy(update={"artifact": HOSTILE, "metric": HOSTILE})
    return report.model_copy(
        update={
            "artifacts": tuple(rows), "provenance": provenance, "data": data, "gates": (gate,), "cast": HOSTILE,
            "warnings": (HOSTILE,), "versions": {HOSTILE: HOSTILE}, "command": HOSTILE,
        }
    )  # fmt: skip


def test_sections_keep_the_order():
    page = render_html(sample_report())
    assert page.startswith("<!doctype html>")
    assert Outline(page).ids.count("verdict") == 1
    order = ["verdict", "bits", "bytes", "fidelity", "worst", "skipped", "warnings", "reproduce"]
    assert [i for i in Outline(page).ids if i in order] == order


@pytest.mark.parametrize("make", [sample_report, hostile_report])
def test_the_page_is_well_formed_and_loads_nothing(make):
    page = render_html(make())
    outline = Outline(page)
    assert not {"script", "img", "link", "iframe", "object", "use", "image"} & set(outline.tags)
    assert len(outline.ids) == len(set(outline.ids))
    names = {name for name, _ in outline.attributes}
    assert all(
        value.startswith("#") and value[1:] in outline.ids for name, value in outline.attributes if name == "href"
    )
    assert not {"src", "xlink:href", "action"} & names and not any(n.startswith("on") for n in names)
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|data:", page)
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", page))
    assert "default-src 'none'" in page


def test_hostile_text_stays_text():
    page = render_html(hostile_report())
    assert "<script" not in page and "<img" not in page and "\x1b" not in page and "\u202e" not in page
    assert "{{ 7*7 }}" in page and "&lt;script&gt;" in page


def test_both_colour_schemes_have_a_whole_ramp():
    page = render_html(sample_report())
    light, dark = page.split("@media (prefers-color-scheme: dark)", 1)
    for half in (light, dark):
        assert [f".h{i}{{fill:#" in half for i in range(16)] == [True] * 16


def test_the_same_report_gives_the_same_bytes():
    report = sample_report()
    assert render_html(sample_report()) == render_html(report)
    # the page is a file of the report, so it cannot quote what is sealed after it
    assert render_html(report.model_copy(update={"digest": "9" * 64, "files": ()})) == render_html(report)


def test_charts_contain_every_artifact():
    report = sample_report()
    chart, page = kl_chart(report), render_html(report)
    for name in METHODS:
        assert chart.count(f"{name} at ") == 3 and f">{name}<title>" in chart
        assert f"KL by layer and query head, {name}</title>" in page
    assert "not drawn: bf16 reference (KL 2.0e-6)" in chart
    assert page.count("The same values as a table") == 1 + len(METHODS)


def test_the_heat_map_has_a_titled_cell_for_every_head():
    row = artifact("nova", 0.01)
    drawn = heat_map(row, heat_scale(sample_report()), key="m")
    titles = re.findall(r"<title>(layer .*?)</title>", drawn)
    assert len(titles) == (LAYERS - 2) * HEADS + 2
    assert "layer 0: BF16, |mean k|^2 / variance is 41: kept by skip_layers" in titles
    assert "KL, nats" in drawn and drawn.count('class="h') >= (LAYERS - 2) * HEADS


def boxes(drawn, pattern):
    return [tuple(map(float, found)) for found in re.findall(pattern, drawn)]


@pytest.mark.parametrize(("count", "spread"), [(1, 1.0), (6, 1.02), (14, 1.001)])
def test_chart_labels_never_overlap_and_stay_inside(count, spread):
    rows = [artifact(f"a-rather-long-name-{i:02d}-{'x' * 30}", 0.01 * spread**i, i) for i in range(count)]
    report = sample_report(gated=False).model_copy(update={"artifacts": (reference(), *rows)})
    drawn = kl_chart(report)
    width, height = boxes(drawn, r'viewBox="0 0 (\d+) (\d+)"')[0]
    labels = boxes(drawn, r'class="name" x="([\d.]+)" y="([\d.]+)"')
    ends = sorted(y for _, y in labels)
    assert len(labels) == count and all(b - a >= 16 for a, b in itertools.pairwise(ends))
    assert all(0 < y < height and x + 22 * 7 < width for x, y in labels)
    dots = boxes(drawn, r"translate\(([\d.]+),([\d.]+)\)\" d=")
    assert all(0 < x < width and 0 < y < height for x, y in dots)


def test_equal_distances_in_log_context_are_equal_on_the_axis():
    drawn = kl_chart(sample_report())
    xs = [x for x, _ in boxes(drawn, r"translate\(([\d.]+),([\d.]+)\)\" d=")][:3]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


def test_one_context_zero_kl_and_no_artifact_still_draw():
    report = sample_report(gated=False)
    short = artifact("short", 0.01)
    short = short.model_copy(update={"contexts": short.contexts[:1]})
    exact = artifact("exact", 0.0)
    for rows in ((reference(), short, exact), (reference(),), (reference(), exact)):
        page = render_html(report.model_copy(update={"artifacts": rows}))
        Outline(page)
        assert "bf16" in page and ("exact" not in [r.name for r in rows] or 'class="zero"' in page)
    bare = {"artifacts": (), "warnings": (), "command": "", "data": report.data.model_copy(update={"sources": ()})}
    assert "Only the BF16 reference" in render_html(report.model_copy(update=bare))


def test_reports_need_neither_torch_nor_transformers():
    code = "import kvcq.reports, sys; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_sample_is_a_valid_report():
    report = sample_report()
    assert type(report).model_validate(report.plain()) == report
    manifest = sample_manifest()
    assert type(manifest).model_validate(manifest.plain()) == manifest
