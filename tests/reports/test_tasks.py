"""Model-level tasks in terminal, page and card: complete, escaped, readable, and every number from the report."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from kvcq.reports import bundle_card, render_html, report_text
from kvcq.reports.colours import DARK, LIGHT, ramp
from kvcq.reports.needle_map import needle_map
from kvcq.reports.summary import method_beside
from kvcq.reports.task_settings import settings
from kvcq.reports.task_summary import needle_grid, needle_subtasks, subtask_label
from kvcq.reports.task_tables import divergence, needle_table, perplexity_table
from kvcq.spec.tasks import NeedleCell
from tests.reports.sample import METHODS, artifact, reference, sample_manifest, sample_report
from tests.reports.task_sample import DEPTHS, LENGTHS, MANY, SUBTASKS, many_report, sweep_report, task_report
from tests.reports.test_accessibility import Page, contrast
from tests.reports.test_html import HOSTILE, Outline

PAGES = {
    "tasks": task_report,
    "tasks alone": lambda: task_report(attention=False),
    "twenty": many_report,
    "sweep": sweep_report,
    "grid": lambda: sweep_report(clips=("0.9", "1.0")),
}


@pytest.fixture(scope="module", params=PAGES, ids=str)
def made(request):
    report = PAGES[request.param]()
    return report, render_html(report)


def tables(page):
    """Return {caption: [rows of cell texts]} of a page."""
    found = {}
    for table in re.findall(r"<table>(.*?)</table>", page, re.DOTALL):
        caption = re.search(r"<caption[^>]*>(.*?)</caption>", table)[1]
        rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
        found[caption] = [
            [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
            for row in rows
        ]
    return found


def test_a_report_of_attention_alone_has_no_trace_of_tasks():
    page, text = render_html(sample_report()), report_text(sample_report())
    assert 'id="tasks"' not in page and 'id="sweep"' not in page and "Needles" not in page + text
    assert "Tasks through" not in bundle_card(sample_manifest(), sample_report().artifacts[-1])


def test_tasks_alone_show_no_section_of_attention():
    report = task_report(attention=False)
    page, text = render_html(report), report_text(report)
    ids = Outline(page).ids
    assert "tasks" in ids and not {"fidelity", "worst", "layers"} & set(ids)
    assert "Fidelity against" not in text and "Worst layers" not in text and "attention KL" not in text
    assert "nova is closest to BF16: perplexity" in text and "3.25 bits per element at 8k" in text


def test_pages_keep_the_rules_of_every_page(made):
    report, page = made
    outline, parsed = Outline(page), Page(page)
    assert len(outline.ids) == len(set(outline.ids))
    assert all(v.startswith("#") and v[1:] in outline.ids for n, v in outline.attributes if n == "href")
    assert not {"script", "img", "link", "iframe"} & set(outline.tags)
    assert not re.search(r"https?:|//[a-z]|@import|data:", page)
    levels = [int(tag[1]) for tag, _, _ in parsed.all("h1", "h2", "h3", "h4")]
    assert all(below - above <= 1 for above, below in pairwise(levels))
    ids = {attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes}
    for _, attributes, _ in parsed.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= ids
    assert len(parsed.all("table")) == len(parsed.all("caption"))
    assert len(parsed.all("summary")) == len(parsed.all("details"))
    charts = [a for tag, a, _ in parsed.elements if tag == "svg" and a.get("role") == "img"]
    figures = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    assert len(figures) == len(charts) > len(report.artifacts) * (report.sweep is None)
    assert all("<table>" in figure.split("</svg>", 1)[1] for figure in figures)


def test_nothing_reads_as_a_missing_value(made):
    report, page = made
    text = " ".join(Outline(page).words) + report_text(report)
    assert not re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text)
    assert "Undefined" not in text and "{{" not in text


def test_every_perplexity_stands_in_the_page():
    report = task_report()
    rows = tables(render_html(report))["Perplexity"]
    for context in LENGTHS:
        start = next(n for n, row in enumerate(rows) if row[0].startswith(f"Context {context // 1024}k"))
        assert "4 passages" in rows[start][0] and f"{2 * context:,} tokens scored" in rows[start][0]
        for row, own in zip(rows[start + 1 :], report.artifacts, strict=False):
            score = next(s for s in own.tasks.perplexity if s.context == context)
            assert row[0] == own.name
            assert float(row[1].replace(",", "")) == pytest.approx(score.perplexity, rel=1e-3)
            low, high = (float(end.replace(",", "")) for end in row[2].split("–"))
            assert (low, high) == (
                pytest.approx(score.interval.low, rel=1e-3),
                pytest.approx(score.interval.high, rel=1e-3),
            )
            assert float(row[3]) == pytest.approx(score.ratio, rel=5e-3)


def test_every_needle_score_stands_in_the_page():
    report = task_report()
    found = tables(render_html(report))
    for row, own in zip(found["Needles"][1:], report.artifacts, strict=True):
        needle = own.tasks.needle
        assert row[0] == own.name and row[1] == f"{100 * needle.score:.1f}%" and row[3] == f"{100 * needle.exact:.1f}%"
        assert row[4:7] == [f"{100 * entry.score:.1f}%" for entry in needle.lengths]
        assert row[7] == f"{needle.truncated} of {len(needle.items)}"
        assert needle.truncated == sum(item.truncated for item in needle.items)
    for row, own in zip(found["Needles by subtask"][1:], report.artifacts, strict=True):
        assert row[1:] == [f"{100 * square.score:.1f}%" for square in needle_subtasks(own.tasks.needle).values()]
    cells = [cell for cell in report.artifacts[-1].tasks.needle.cells if (cell.context, cell.depth) == (8192, 50.0)]
    table = found["Needles by context and depth, nova"]
    assert table[3][3] == f"{100 * sum(c.score for c in cells) / len(cells):.1f}% of {len(cells)}"


def test_every_decode_kl_agreement_and_pair_stands_in_the_page():
    report = task_report()
    found, page = tables(render_html(report)), render_html(report)
    own = report.artifacts[-1]
    score = own.tasks.decode_kl[-1]
    assert ["nova", f"{score.kl:.4f}", f"{score.interval.low:.4f}–{score.interval.high:.4f}"] == found["Decode KL"][-1][
        :3
    ]
    assert found["Decode KL"][-1][7] == f"+{score.nll - score.nll_reference:.4f}"
    assert page.count("decode KL") >= 3 * len(METHODS)
    agreed = own.tasks.agreement[-1]
    assert found["Agreement"][-1][1] == f"{100 * agreed.agreement:.1f}%"
    diverged = sum(index is not None for index in agreed.first_divergence)
    assert found["Agreement"][-1][3] == f"{diverged} of {agreed.prompts}"
    assert len(found["Paired tests"]) == 1 + len(report.pairs)
    pair = report.pairs[0]
    assert found["Paired tests"][1] == [
        "needle", pair.first, pair.second, "90", str(pair.only_first), str(pair.only_second),
        f"{100 * pair.difference:+.1f} ± {100 * pair.standard_error:.1f} %", "0.0371",
    ]  # fmt: skip


def test_the_first_divergence_counts_prompts_without_one_as_infinite():
    score = task_report().artifacts[-1].tasks.agreement[0]
    at = lambda *first: divergence(score.model_copy(update={"first_divergence": first}))  # noqa: E731
    assert at(4, None, 9) == ("4", "9")
    assert at(None, None) == ("none", "none")
    assert at(3, None) == ("3", "none") and at(1, 2) == ("1", "1.5")


def test_the_heat_map_weights_subtasks_by_their_items():
    needle = task_report().artifacts[-1].tasks.needle
    cells = (
        NeedleCell(context=2048, depth=50, task="single_1", items=3, score=1.0, exact=1.0),
        NeedleCell(context=2048, depth=50, task="multivalue", items=1, score=0.5, exact=0.0),
        NeedleCell(context=4096, depth=0, task="single_1", items=2, score=0.0, exact=0.0),
    )
    own = needle.model_copy(update={"cells": cells})
    grid = needle_grid(own)
    assert (grid[2048, 50.0].items, grid[2048, 50.0].score, grid[2048, 50.0].exact) == (4, 0.875, 0.75)
    titles = re.findall(r"<title>(.*?)</title></rect>", needle_map("x", own, key="k"))
    assert "2k, depth 50 %: 87.5% of the needles found in 4 items, all of them in 75.0%" in titles
    assert "4k, depth 0 %: 0.0% of the needles found in 2 items, all of them in 0.0%" in titles
    assert titles.count("2k, depth 0 %: not asked") == 1 and len(titles) == 4


def test_the_heat_map_has_a_titled_cell_for_every_context_and_depth():
    needle = task_report().artifacts[1].tasks.needle
    drawn = needle_map("naive", needle, key="m")
    assert len(re.findall(r"<title>\w+, depth", drawn)) == len(LENGTHS) * len(DEPTHS)
    assert drawn.count('class="in t') == len(LENGTHS) * len(DEPTHS)


@pytest.mark.parametrize("stops", [LIGHT, DARK])
def test_text_upon_every_step_of_the_ramp_is_readable(stops):
    rules = ramp(stops)
    fills = dict(re.findall(r"\.h(\d+)\{fill:(#\w{6})\}", rules))
    texts = dict(re.findall(r"svg \.t(\d+)\{fill:(#\w{6})\}", rules))
    assert fills.keys() == texts.keys() and len(fills) == 16
    assert min(contrast(fills[step], texts[step]) for step in fills) >= 4.5


def test_settings_say_what_the_numbers_depend_on():
    said = dict(settings(task_report()))
    assert said["Cache"] == (
        "packed codes; served semantics, chunks of 512, a prefix of 1,024 tokens found in the cache"
    )
    assert "2,000 resamples" in said["Intervals"] and "seed 7" in said["Intervals"]
    assert "stride 8,192, chunk 512" in said["Perplexity"] and "50.0%" in said["Perplexity"]
    assert all(task in said["Needles"] for task in SUBTASKS) and "the model's chat template" in said["Needles"]
    assert f"builtin:noise (SHA-256 {'f' * 16})" in said["Needles"] and "single_1 32" in said["Needles"]
    assert "256 greedy tokens" in said["Agreement"] and "within 0.1 nats" in said["Agreement"]
    assert "32 single-token steps" in said["Decode KL"]
    page, text = render_html(task_report()), report_text(task_report(), width=400)
    assert all(words.replace("'", "&#39;") in page and words in text for words in said.values())


def test_cut_answers_and_failed_items_are_said():
    report = task_report()
    cut = sum(row.tasks.needle.truncated for row in report.artifacts)
    said = f"{cut} of 540 answers reached the token limit and were judged as they stood; no items failed to run"
    assert said in render_html(report) and said in report_text(report, width=200)
    row = report.artifacts[1]
    failed = row.model_copy(
        update={"tasks": row.tasks.model_copy(update={"needle": row.tasks.needle.model_copy(update={"errors": 2})})}
    )
    assert [column.label for column in needle_table([failed]).columns][-1] == "Failed"
    assert "2 items failed to run" in render_html(report.model_copy(update={"artifacts": (reference(), failed)}))


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("make", [task_report, many_report, sweep_report], ids=["six", "twenty", "sweep"])
def test_terminals_cut_nothing(make, width):
    report = make().model_copy(update={"command": ""})
    text, wide = report_text(report, width=width), report_text(report, width=300)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    numbers = re.compile(r"\d+\.\d+%|0\.\d{3,4}")
    section = slice(text.index("Perplexity through"), text.index("Settings of"))
    other = slice(wide.index("Perplexity through"), wide.index("Settings of"))
    assert sorted(numbers.findall(text[section])) == sorted(numbers.findall(wide[other]))


def test_the_best_quantized_value_is_marked_and_the_reference_never():
    table = perplexity_table(task_report().artifacts)
    for group in table.groups:
        assert [row[0].text for row in group.rows if row[1].tone == "best"] == ["nova"]
        assert group.rows[0][1].tone == "muted"
    alone = [reference(), task_report().artifacts[1]]
    assert not any(
        cell.tone == "best" for group in perplexity_table(alone).groups for row in group.rows for cell in row
    )


def test_rows_without_a_score_show_as_absent():
    rows = [task_report().artifacts[0], artifact("plain", 0.1), task_report().artifacts[1]]
    report = sample_report(gated=False).model_copy(update={"artifacts": tuple(rows)})
    page = render_html(report)
    assert ["plain", "–", "–", "–", "–"] in tables(page)["Perplexity"]
    assert [row[0] for row in tables(page)["Needles"][1:]] == ["bf16 reference", "naive-int2"]


def test_twenty_rows_fold_their_maps_and_their_pairs():
    report = many_report()
    page = render_html(report.model_copy(update={"pairs": report.pairs * 6}))
    assert page.count('<details class="map">') == len(MANY) - 1 and "All 18 pairs" in page
    assert '<details class="map">' not in render_html(task_report())
    text = report_text(report.model_copy(update={"pairs": report.pairs * 6}))
    assert "Only those with bf16 reference or method-00; report.html has all 18." in text


def test_hostile_names_stay_text():
    row = task_report().artifacts[-1]
    needle = row.tasks.needle
    cells = tuple(cell.model_copy(update={"task": HOSTILE + cell.task}) for cell in needle.cells)
    own = row.model_copy(
        update={"name": HOSTILE, "method": HOSTILE + "m",
                "tasks": row.tasks.model_copy(update={"needle": needle.model_copy(update={"cells": cells})})}
    )  # fmt: skip
    asked = task_report().tasks
    asked = asked.model_copy(
        update={"needle": asked.needle.model_copy(
            update={"haystack": HOSTILE, "tasks": (HOSTILE,), "new_tokens": {HOSTILE: 3}})}
    )  # fmt: skip
    pair = task_report().pairs[0].model_copy(update={"task": HOSTILE, "first": HOSTILE, "second": HOSTILE})
    report = task_report().model_copy(
        update={"artifacts": (task_report().artifacts[0], own), "tasks": asked, "pairs": (pair,)}
    )
    page, text = render_html(report), report_text(report, width=300)
    Outline(page)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page and "\u202e" not in page
    assert "\x1b" not in text and "\u202e" not in text
    card = bundle_card(sample_manifest(), own)
    assert "<script" not in card and "\x1b" not in card


def test_subtasks_are_called_by_short_names():
    assert subtask_label("niah_multikey_2") == ("multikey 2", "multi-\nkey 2")
    assert subtask_label("single_1") == ("single 1", "single\n1")
    assert subtask_label("multivalue") == ("multivalue", "multi-\nvalue")
    assert subtask_label("own-task") == ("own-task", "own-task")


def test_the_method_stands_beside_a_name_that_does_not_say_it():
    row = artifact("run-7", 0.01).model_copy(update={"method": "nova"})
    same = artifact("oscar-centered", 0.02).model_copy(update={"method": "oscar_centered"})
    report = sample_report(gated=False).model_copy(update={"artifacts": (reference(), row, same)})
    page, text = render_html(report), report_text(report)
    assert '<th scope="row">run-7 <span class="remark">nova</span></th>' in page
    assert "run-7 (nova)" in text and "oscar-centered (" not in text and "reference (" not in text
    assert method_beside(sweep_report().artifacts[1]) == ""


def test_the_card_tells_the_tasks_of_its_own_row():
    row = task_report().artifacts[-1]
    card = bundle_card(sample_manifest(), row)
    assert "## Tasks through the cache" in card and "perplexity 12.50 at 8k (1.011× BF16)" in card
    for title in ("### Perplexity", "### Needles found", "### Greedy tokens against BF16", "### KL of the next token"):
        assert title in card
    ppl = row.tasks.perplexity[0]
    assert f"| 2k | {ppl.perplexity:.2f} | {ppl.interval.low:.2f}–{ppl.interval.high:.2f} |" in card
