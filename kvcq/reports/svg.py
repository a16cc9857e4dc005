"""Charts as inline SVG without scripts, fonts or links: colours come from classes that the page's style defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape

from kvcq.reports.summary import candidates, contexts, is_reference, metrics_at, skipped
from kvcq.reports.text import clean, context_label, number
from kvcq.spec.report import ArtifactReport, Report

STEPS = 16
HUES = 8
_MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,-4.8L4.6,3.6H-4.6z",
)
_WIDTH = 760
_LABEL_CHARS = 22


@dataclass(frozen=True)
class HeatScale:
    """Range of log10 KL that the colours span, shared by all maps of a report."""

    low: int
    high: int

    def step(self, kl: float) -> int:
        """Return the colour step 0 (lowest) to 15 of a positive KL; values outside are clamped."""
        share = (log10(kl) - self.low) / (self.high - self.low)
        return min(STEPS - 1, max(0, floor(share * STEPS)))


def heat_scale(report: Report) -> HeatScale:
    """Return whole decades that hold every positive head KL, five at most counted from the top."""
    logs = [log10(kl) for a in candidates(report) for row in a.layers for kl in row.kl_heads if kl > 0]
    if not logs:
        return HeatScale(-1, 0)
    high = ceil(max(logs))
    return HeatScale(min(max(floor(min(logs)), high - 5), high - 1), high)


def series_class(report: Report, artifact: ArtifactReport) -> str:
    """Return the colour class of an artifact, the same in every chart."""
    return f"s{candidates(report).index(artifact) % HUES}"


def marker(index: int) -> str:
    """Return the path of the marker of the series at `index`, centred on the origin."""
    return _MARKERS[index % len(_MARKERS)]


def heat_map(artifact: ArtifactReport, scale: HeatScale, *, key: str) -> Markup:
    """Draw log10 of the mean KL of every (layer, query head) at the longest context.

    Args:
        artifact: A quantized artifact; its BF16 layers are hatched.
        scale: Colour range, the same for all artifacts of a report.
        key: Distinguishes the ids of this drawing within the page.
    """
    rows = {row.layer: row.kl_heads for row in artifact.layers}
    kept = skipped(artifact)
    layers = 1 + max([*rows, *kept], default=0)
    heads = max([len(values) for values in rows.values()], default=1)
    left, top, bottom = 44, 40, 36
    wide = max(6.0, min(26.0, (_WIDTH - left - 12) / layers))
    tall = max(7.0, min(18.0, 288 / heads))
    width, height = max(float(_WIDTH), left + layers * wide + 12), top + heads * tall + bottom
    gap = 1 if wide > 9 else 0.4
    name = clean(artifact.name)
    parts = [
        _open(width, height, key, f"KL by layer and query head, {name}", "Darker or brighter cells lose more; the table"
              " below holds the same values."),
        f'<defs><pattern id="{key}-hatch" width="6" height="6" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)"><path class="hatch" d="M0,0V6"/></pattern></defs>',
        _legend(scale, left),
    ]  # fmt: skip
    for layer in sorted({*rows, *kept}):
        x = left + layer * wide
        if layer not in rows:
            reason = escape(f"layer {layer}: BF16, {clean(kept[layer])}")
            parts.append(_cell(x, top, wide - gap, heads * tall - gap, f'fill="url(#{key}-hatch)"', reason))
            continue
        for head, kl in enumerate(rows[layer]):
            fill = f'class="h{scale.step(kl)}"' if kl > 0 else 'class="zero"'
            label = f"layer {layer}, head {head}: KL {number(kl)} nats"
            parts.append(_cell(x, top + head * tall, wide - gap, tall - gap, fill, label))
    for layer in range(0, layers, _stride(layers, wide, 24)):
        parts.append(_text(left + (layer + 0.5) * wide - gap / 2, top + heads * tall + 15, str(layer), "middle"))
    for head in range(0, heads, _stride(heads, tall, 13)):
        parts.append(_text(left - 7, top + (head + 0.5) * tall + 4, str(head), "end"))
    parts.append(_text(left + layers * wide / 2, height - 4, "layer", "middle", "axis"))
    middle = top + heads * tall / 2
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(12,{middle:.1f}) rotate(-90)">query head</text>'
    )
    return Markup("".join(parts) + "</svg>")  # noqa: S704 - every foreign string above went through escape


def kl_chart(report: Report, *, key: str = "kl-chart") -> Markup:
    """Draw mean KL against context, both logarithmic, one series an artifact with its name at the line's end.

    The reference would stretch the axis by decades, and a KL of zero has no place on it: both are named below the
    plot with their value instead.
    """
    lengths = contexts(report)
    series: list[tuple[int, ArtifactReport, list[tuple[int, float]]]] = []
    absent = [a for a in report.artifacts if is_reference(a)]
    for index, artifact in enumerate(candidates(report)):
        found = ((n, metrics_at(artifact, n)) for n in lengths)
        points = [(n, metrics.kl) for n, metrics in found if metrics is not None and metrics.kl > 0]
        if points:
            series.append((index, artifact, points))
        else:
            absent.append(artifact)
    values = [kl for _, _, points in series for _, kl in points]
    low, high = _decades(values)
    labels = [_short(clean(artifact.name)) for _, artifact, _ in series]
    left, right, top = 62, 24 + 7.6 * max(map(len, labels), default=0), 18
    plot_w, plot_h = _WIDTH - left - right, max(260.0, 20.0 * len(series))
    height = top + plot_h + (66 if absent else 44)

    def x_of(context: int) -> float:
        if len(lengths) < 2:
            return left + plot_w / 2
        return left + plot_w * (log10(context / lengths[0]) / log10(lengths[-1] / lengths[0]))

    def y_of(kl: float) -> float:
        return top + plot_h * (high - log10(kl)) / (high - low)

    parts = [_open(_WIDTH, height, key, "KL against context", "One line an artifact; the table holds the same values.")]
    for value in _ticks(low, high):
        y, major = y_of(value), log10(value).is_integer()
        parts.append(f'<path class="{"grid" if major else "grid minor"}" d="M{left},{y:.1f}H{left + plot_w:.1f}"/>')
        parts.append(_text(left - 9, y + 4, f"{value:g}", "end"))
    for context in lengths:
        x = x_of(context)
        parts.append(f'<path class="grid minor" d="M{x:.1f},{top}V{top + plot_h:.1f}"/>')
        parts.append(_text(x, top + plot_h + 18, context_label(context), "middle"))
    parts.append(_text(left + plot_w / 2, top + plot_h + 37, "context in tokens", "middle", "axis"))
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(13,{top + plot_h / 2:.1f}) rotate(-90)">'
        "attention KL, nats</text>"
    )
    ends = _spread([y_of(points[-1][1]) for _, _, points in series], 17, top, top + plot_h)
    for (index, artifact, points), label, end in zip(series, labels, ends, strict=True):
        hue, name = series_class(report, artifact), clean(artifact.name)
        where = [(x_of(n), y_of(kl)) for n, kl in points]
        dash = ' stroke-dasharray="6 4"' if index >= HUES else ""
        line = "L".join(f"{x:.1f},{y:.1f}" for x, y in where)
        parts.append(f'<g class="{hue}"><path class="line" d="M{line}"{dash}/>')
        for (x, y), (n, kl) in zip(where, points, strict=True):
            title = escape(f"{name} at {context_label(n)}: KL {number(kl)} nats")
            parts.append(f'<path class="dot" transform="translate({x:.1f},{y:.1f})" d="{marker(index)}">')
            parts.append(f"<title>{title}</title></path>")
        x, y = where[-1]
        parts.append(f'<path class="lead" d="M{x + 6:.1f},{y:.1f}L{left + plot_w + 9:.1f},{end:.1f}"/>')
        parts.append(
            f'<text class="name" x="{left + plot_w + 13:.1f}" y="{end + 4:.1f}">{escape(label)}'
            f"<title>{escape(name)}</title></text></g>"
        )
    if absent:
        note = escape("not drawn: " + ", ".join(_aside(artifact, lengths) for artifact in absent))
        parts.append(f'<text class="axis" x="{left}" y="{height - 6:.1f}">{note}</text>')
    return Markup("".join(parts) + "</svg>")  # noqa: S704 - every foreign string above went through escape


def _open(width: float, height: float, key: str, title: str, description: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _cell(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {box} {fill}><title>{title}</title></rect>"


def _legend(scale: HeatScale, left: float) -> str:
    """Draw the colour steps with one tick a decade, above the map at its left so that narrow screens show it."""
    step, y = 13, 8
    parts = [_text(left, y + 9, "KL, nats", "start", "axis")]
    left += 74
    parts += [f'<rect class="h{i}" x="{left + i * step}" y="{y}" width="{step}" height="9"/>' for i in range(STEPS)]
    for decade in range(scale.low, scale.high + 1):
        x = left + STEPS * step * (decade - scale.low) / (scale.high - scale.low)
        parts.append(_text(x, y + 22, f"{10.0**decade:g}", "middle"))
    return "".join(parts)


def _stride(count: int, pitch: float, room: float) -> int:
    """Return the smallest round step between labels that leaves `room` for each."""
    return next((n for n in (1, 2, 5, 10, 20, 50) if n * pitch >= room), max(1, count))


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the log10 range of an axis: tight multiples of 1, 2 and 5 around the values."""
    if not values:
        return -1.0, 0.0
    marks = [
        log10(m) + d for d in range(floor(log10(min(values))) - 1, ceil(log10(max(values))) + 2) for m in (1, 2, 5)
    ]
    low = max(mark for mark in marks if mark < log10(min(values)) - 0.03)
    high = min(mark for mark in marks if mark > log10(max(values)) + 0.03)
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Return labelled values within a log10 range: powers of ten, with 2 and 5 between them when there is room."""
    steps = (1, 2, 5) if high - low <= 2.6 else (1,)
    marks = [m * 10.0**d for d in range(floor(low), ceil(high) + 1) for m in steps]
    return [float(f"{mark:.0e}") for mark in marks if low - 1e-9 <= log10(mark) <= high + 1e-9]


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart by at least `gap`, keeping their order and staying within the plot where they fit."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    placed = [min(max(wanted[i], low), high) for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    limit = high
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return [placed[order.index(i)] for i in range(len(wanted))]


def _aside(artifact: ArtifactReport, lengths: Sequence[int]) -> str:
    metrics = metrics_at(artifact, lengths[-1]) if lengths else None
    return _short(clean(artifact.name)) + (f" (KL {number(metrics.kl)})" if metrics else "")


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_CHARS else name[: _LABEL_CHARS - 1] + "…"
