"""The report as one HTML file: no scripts, no links to elsewhere, inline style and drawings, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvcq.reports import layers, svg, tables
from kvcq.reports.heat import heat_map, heat_scale
from kvcq.reports.kl_chart import kl_chart
from kvcq.reports.summary import (
    BF16_BITS,
    bits_at,
    candidates,
    closest,
    contexts,
    is_reference,
    metrics_at,
    skipped,
    verdict,
    warnings,
)
from kvcq.reports.tables import Cell, Column, Table
from kvcq.reports.templating import environment
from kvcq.reports.text import ABSENT, clean, context_label, number, percent, size
from kvcq.spec.report import ArtifactReport, Report

# Colour stops from the lowest to the highest KL: on each ground the lowest recedes and the highest stands out.
_LIGHT = ("#fbf0e2", "#f7d3ae", "#f0a184", "#d9647a", "#9a3d7c", "#43205c")
_DARK = ("#20243a", "#45306b", "#8f3d78", "#d8586c", "#f59d62", "#fbe9a9")


def render_html(report: Report) -> str:
    """Return the whole page. The same report gives the same bytes, whatever its `digest` and `files`.

    Every foreign string is escaped; the page declares a policy that forbids loading anything.
    """
    scale = heat_scale(report)
    chosen, best = candidates(report), closest(report)
    return environment().get_template("report.html.j2").render(
        report=report,
        verdict=verdict(report),
        facts=_facts(report),
        gates=tables.gates_table(report),
        bits=tables.bits_table(report),
        bars=_bars(report),
        longest=max(contexts(report), default=0),
        bytes=tables.bytes_table(report),
        fidelity=tables.report_fidelity(report),
        chart=kl_chart(report),
        chart_table=_chart_table(report),
        shares=layers.share_table(report),
        worst=tables.worst_table(report, 5),
        maps=[(clean(a.name), heat_map(a, scale, key=f"map{i}"), _heat_table(a)) for i, a in enumerate(chosen)],
        details=[_detail(a, opened=a is best) for a in chosen],
        skipped=tables.skipped_table(report),
        folds=tables.fold_table(report),
        warnings=warnings(report),
        artifacts=tables.artifact_table(report),
        heat_light=_ramp(_LIGHT),
        heat_dark=_ramp(_DARK),
    )  # fmt: skip


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
    metrics = None if best is None else metrics_at(best, longest)
    if best is None or metrics is None:
        return []
    facts = [
        ("Attention KL", number(metrics.kl), f"nats at {context_label(longest)}"),
        ("Top-1 agreement", percent(metrics.top1), "strongest key unchanged"),
    ]
    if bits := bits_at(best, longest):
        facts.append(("Bits per element", f"{bits:.2f}", f"{BF16_BITS / bits:.1f}× below BF16"))
    if best.bytes_per_token:
        facts.append(("Cache per token", size(best.bytes_per_token), f"{2**30 / best.bytes_per_token:,.0f} tokens/GiB"))
    return facts


def _bars(report: Report) -> list[tuple[str, float, list[tuple[str, str, float]]]]:
    """Return (name, total bits, [(class, title, percent of 16 bits)]) of each artifact at the longest context."""
    longest = max(contexts(report), default=0)
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


def _ramp(stops: Sequence[str]) -> Markup:
    """Return the fill rules of all heat steps, interpolated between colour stops."""
    channels = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]
    rules = []
    for step in range(svg.STEPS):
        place = step / (svg.STEPS - 1) * (len(stops) - 1)
        base = min(int(place), len(stops) - 2)
        mixed = [a + (b - a) * (place - base) for a, b in zip(channels[base], channels[base + 1], strict=True)]
        rules.append(f".h{step}{{fill:#{''.join(f'{round(value):02x}' for value in mixed)}}}")
    return Markup("".join(rules))  # noqa: S704 - built from the constants above
