"""The report as one HTML file: no scripts, no links to elsewhere, inline style and drawings, light and dark."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from kvcq.reports import colours, layers, tables
from kvcq.reports.heat import heat_map, heat_scale
from kvcq.reports.kl_chart import kl_chart
from kvcq.reports.summary import (
    BF16_BITS,
    bits_at,
    candidates,
    closest,
    contexts,
    is_reference,
    longest_stored,
    metrics_at,
    skipped,
    verdict,
    warnings,
)
from kvcq.reports.sweep import sweep_charts, sweep_sentence, sweep_table
from kvcq.reports.tables import Cell, Column, Table
from kvcq.reports.task_page import task_facts, task_page
from kvcq.reports.templating import environment
from kvcq.reports.text import ABSENT, clean, context_label, number, percent, size
from kvcq.spec.report import ArtifactReport, Report

# Beyond so many artifacts only the map of the best one is open: a page of twenty stays readable.
OPEN_MAPS = 6


def render_html(report: Report) -> str:
    """Return the whole page. The same report gives the same bytes, whatever its `digest` and `files`.

    Every foreign string is escaped; the page declares a policy that forbids loading anything.
    """
    scale = heat_scale(report)
    best, tasks, fidelity = closest(report), task_page(report), tables.report_fidelity(report)
    chosen = _chosen(report, best)
    folded = len(chosen) > OPEN_MAPS
    return environment().get_template("report.html.j2").render(
        report=report,
        contents=_contents(report, bool(fidelity), tasks is not None),
        verdict=verdict(report),
        facts=_facts(report),
        gates=tables.gates_table(report),
        bits=tables.bits_table(report),
        bars=_bars(report),
        longest=max(contexts(report), default=0),
        stored=longest_stored(report),
        sweep=_sweep(report),
        bytes=tables.bytes_table(report),
        fidelity=fidelity,
        chart=kl_chart(report),
        chart_table=_chart_table(report),
        shares=layers.share_table(report),
        tasks=tasks,
        worst=tables.worst_table(report, 5),
        maps=[
            (clean(a.name), heat_map(a, scale, key=f"map{i}"), _heat_table(a), folded and a is not best)
            for i, a in enumerate(chosen)
        ],
        details=[_detail(a, opened=a is best) for a in chosen],
        skipped=tables.skipped_table(report),
        folds=tables.fold_table(report),
        warnings=warnings(report),
        artifacts=tables.artifact_table(report),
        heat_light=colours.ramp(colours.LIGHT),
        heat_dark=colours.ramp(colours.DARK),
    )  # fmt: skip


def _contents(report: Report, attention: bool, tasks: bool) -> list[tuple[str, str]]:
    """Return (id, title) of the sections that the page has."""
    shown = [("bits", "Bits"), ("bytes", "Bytes")]
    shown = [("sweep", "Sweep"), *shown] if report.sweep is not None else shown
    shown += [("tasks", "Tasks")] if tasks else []
    shown += [("fidelity", "Fidelity"), ("worst", "Worst heads"), ("layers", "Layers")] if attention else []
    return [*shown, ("skipped", "Skipped"), ("warnings", "Warnings"), ("reproduce", "Reproduce")]


def _chosen(report: Report, best: ArtifactReport | None) -> list[ArtifactReport]:
    """Return the artifacts shown layer by layer: of a sweep only the best point, next to those that are no points."""
    points = set() if report.sweep is None else {point.artifact for point in report.sweep.points}
    return [row for row in candidates(report) if row.name not in points or row is best]


@dataclass(frozen=True)
class SweepPage:
    """The section of a sweep; `charts` holds (caption, drawing, table)."""

    sentence: str
    table: Table
    charts: list[tuple[str, Markup, Table]]


def _sweep(report: Report) -> SweepPage | None:
    if report.sweep is None:
        return None
    return SweepPage(sweep_sentence(report.sweep), sweep_table(report), sweep_charts(report))


@dataclass(frozen=True)
class Detail:
    """The layers and heads of one artifact: sorted by loss, in natural order, and whether they are shown at once."""

    name: str
    note: str
    by_loss: Table
    by_layer: Table
    heads: Table
    opened: bool


def _detail(artifact: ArtifactReport, *, opened: bool) -> Detail:
    return Detail(
        name=clean(artifact.name),
        note=layers.concentration(artifact.layers),
        by_loss=layers.layer_table(artifact),
        by_layer=layers.layer_table(artifact, "layer"),
        heads=layers.head_table(artifact),
        opened=opened,
    )


def _facts(report: Report) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) of the artifact closest to BF16, for the head of the page."""
    best, longest = closest(report), max(contexts(report), default=0)
    if best is None:
        return []
    metrics, facts = metrics_at(best, longest), []
    if metrics is not None:
        facts.append(("Attention KL", number(metrics.kl), f"nats at {context_label(longest)}"))
        facts.append(("Top-1 agreement", percent(metrics.top1), "strongest key unchanged"))
    facts += task_facts(best.tasks)
    if bits := bits_at(best, stored := longest_stored(report)):
        remark = f"{BF16_BITS / bits:.1f}× below BF16 at {context_label(stored)}"
        facts.append(("Bits per element", f"{bits:.2f}", remark))
    if best.bytes_per_token:
        facts.append(("Cache per token", size(best.bytes_per_token), f"{2**30 / best.bytes_per_token:,.0f} tokens/GiB"))
    return facts


def _bars(report: Report) -> list[tuple[str, float, list[tuple[str, str, float]]]]:
    """Return (name, total bits, [(class, title, percent of 16 bits)]) of each artifact at the longest context."""
    longest = longest_stored(report)
    bars = []
    for artifact in report.artifacts:
        total, entry = bits_at(artifact, longest), tables.storage_at(artifact, longest)
        if total is None:
            continue
        parts = [("exact" if is_reference(artifact) else "codes", "all", total)]
        if entry is not None and not is_reference(artifact):
            parts = [("codes", "codes", entry.codes), ("meta", "scales and biases", entry.metadata)]
            parts.append(("exact", "BF16 windows", entry.windows))
        scaled = [
            (kind, f"{title}: {bits:.2f} bits", 100 * bits / max(BF16_BITS, total)) for kind, title, bits in parts
        ]
        bars.append((clean(artifact.name), total, scaled))
    return bars


def _chart_table(report: Report) -> Table:
    lengths = contexts(report)
    columns = (tables.NAME, *(Column(context_label(n), f"Mean KL in nats at {n} tokens") for n in lengths))
    rows = []
    for artifact in report.artifacts:
        found = [metrics_at(artifact, n) for n in lengths]
        rows.append((Cell(clean(artifact.name)), *(Cell(number(m.kl) if m else ABSENT) for m in found)))
    return Table(columns, (tables.Group("", tuple(rows)),))


def _heat_table(artifact: ArtifactReport) -> Table:
    heads = max((len(row.kl_heads) for row in artifact.layers), default=0)
    columns = (
        Column("Layer", numeric=False),
        Column("Mean"),
        *(Column(f"h{head}", f"Query head {head}") for head in range(heads)),
    )
    values = {row.layer: [number(row.metrics.kl), *map(number, row.kl_heads)] for row in artifact.layers}
    values |= {layer: ["BF16"] for layer in skipped(artifact) if layer not in values}
    rows = [
        tuple(Cell(text) for text in [str(layer), *cells, *[""] * (heads + 1 - len(cells))])
        for layer, cells in sorted(values.items())
    ]
    return Table(columns, (tables.Group("", tuple(rows)),))
