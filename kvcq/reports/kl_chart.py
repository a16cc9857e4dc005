"""Attention KL against context."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from kvcq.reports.lines import Series, line_chart, log_axis, log_places
from kvcq.reports.summary import candidates, contexts, is_reference, metrics_at
from kvcq.reports.svg import short
from kvcq.reports.text import clean, context_label, number
from kvcq.spec.report import ArtifactReport, Report


def kl_chart(report: Report, *, key: str = "kl-chart") -> Markup:
    """Draw mean KL against context, both logarithmic, one series an artifact with its name at the line's end.

    The reference would stretch the axis by decades, and a KL of zero has no place on it: both are named below the
    plot with their value instead.
    """
    lengths = contexts(report)
    series: list[Series] = []
    absent = [a for a in report.artifacts if is_reference(a)]
    for index, artifact in enumerate(candidates(report)):
        found = (metrics_at(artifact, n) for n in lengths)
        values = tuple(m.kl if m is not None and m.kl > 0 else None for m in found)
        if any(values):
            series.append(Series(clean(artifact.name), index, values))
        else:
            absent.append(artifact)
    return line_chart(
        series,
        log_places(lengths, [context_label(n) for n in lengths]),
        log_axis([kl for line in series for kl in line.values if kl is not None]),
        key=key,
        title="KL against context",
        across="context in tokens",
        up="attention KL, nats",
        what="KL",
        unit="nats",
        note="not drawn: " + ", ".join(_aside(artifact, lengths) for artifact in absent) if absent else "",
    )


def _aside(artifact: ArtifactReport, lengths: Sequence[int]) -> str:
    metrics = metrics_at(artifact, lengths[-1]) if lengths else None
    return short(clean(artifact.name)) + (f" (KL {number(metrics.kl)})" if metrics else "")
