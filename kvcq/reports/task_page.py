"""The section of model-level tasks in the page."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from kvcq.reports import task_tables
from kvcq.reports.lines import Series, line_chart, log_axis, log_places
from kvcq.reports.needle_map import needle_map
from kvcq.reports.summary import candidates
from kvcq.reports.tables import NAME, Cell, Column, Table, flat, name_cell
from kvcq.reports.task_settings import settings
from kvcq.reports.task_summary import at_context, contexts_of, flaws, has_tasks
from kvcq.reports.text import ABSENT, clean, context_label, factor, number, percent, plural, quantity
from kvcq.spec.report import ArtifactReport, Report
from kvcq.spec.tasks import DecodeKLScore, TaskScores


@dataclass(frozen=True)
class TaskPage:
    """Tables and drawings, each empty when its task did not run; `maps` holds (name, drawing, table)."""

    perplexity: Table
    needle: Table
    subtasks: Table
    maps: tuple[tuple[str, Markup, Table], ...]
    flaws: str
    agreement: Table
    decode: Table
    decode_chart: Markup | None
    decode_values: Table
    pairs: Table
    settings: tuple[tuple[str, str], ...]


def task_page(report: Report) -> TaskPage | None:
    """Return what the tasks' section shows, or None when only attention was measured."""
    if not has_tasks(report):
        return None
    rows = report.artifacts
    maps = [
        (clean(row.name), needle_map(row.name, needle, key=f"needle{i}"), task_tables.depth_table(needle))
        for i, row in enumerate(rows)
        if row.tasks is not None and (needle := row.tasks.needle) is not None
    ]
    return TaskPage(
        perplexity=task_tables.perplexity_table(rows),
        needle=task_tables.needle_table(rows),
        subtasks=task_tables.subtask_table(rows),
        maps=tuple(maps),
        flaws=flaws(report),
        agreement=task_tables.agreement_table(rows),
        decode=task_tables.decode_kl_table(rows),
        decode_chart=decode_chart(report),
        decode_values=_decode_values(report),
        pairs=task_tables.pairs_table(report),
        settings=tuple(settings(report)),
    )


def task_facts(scores: TaskScores | None) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) of one artifact's tasks for the head of the page, longest contexts."""
    facts = []
    if scores is not None and scores.perplexity:
        ppl = max(scores.perplexity, key=lambda score: score.context)
        remark = f"{factor(ppl.ratio)} BF16 at {context_label(ppl.context)}"
        facts.append(("Perplexity", quantity(ppl.perplexity), remark))
    if scores is not None and scores.needle is not None:
        facts.append(("Needles found", percent(scores.needle.score), plural(len(scores.needle.items), "item")))
    return facts


def decode_chart(report: Report, *, key: str = "decode-chart") -> Markup | None:
    """Draw the mean decode KL against context, both logarithmic, or None when it was not measured.

    A KL of zero has no place on the axis: such points are left out, and rows without any other are named below.
    """
    lengths = _decode_lengths(report)
    if not lengths:
        return None
    series: list[Series] = []
    absent: list[str] = []
    for index, row in enumerate(candidates(report)):
        found = [at_context(_decode(row), n) for n in lengths]
        values = tuple(score.kl if score is not None and score.kl > 0 else None for score in found)
        if any(values):
            series.append(Series(clean(row.name), index, values))
        elif any(found):
            absent.append(clean(row.name))
    if not series:
        return None
    return line_chart(
        series,
        log_places(lengths, [context_label(n) for n in lengths]),
        log_axis([kl for line in series for kl in line.values if kl is not None]),
        key=key,
        title="Decode KL against context",
        across="context in tokens",
        up="decode KL, nats",
        what="decode KL",
        unit="nats",
        note=f"not drawn, KL 0: {', '.join(absent)}" if absent else "",
    )


def _decode(row: ArtifactReport) -> tuple[DecodeKLScore, ...]:
    return row.tasks.decode_kl if row.tasks is not None else ()


def _decode_lengths(report: Report) -> list[int]:
    return contexts_of(score for row in report.artifacts for score in _decode(row))


def _decode_values(report: Report) -> Table:
    lengths = _decode_lengths(report)
    columns = (NAME, *(Column(context_label(n), f"Mean decode KL in nats after {n} tokens") for n in lengths))
    rows = []
    for row in report.artifacts:
        found = [at_context(_decode(row), n) for n in lengths]
        rows.append((name_cell(row), *(Cell(number(score.kl) if score else ABSENT) for score in found)))
    return flat(columns, rows)
