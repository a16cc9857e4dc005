"""Heat map of the attention KL: layers by query heads, one map an artifact, one colour scale a report."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

from kvcq.reports.summary import candidates, skipped
from kvcq.reports.svg import STEPS, WIDTH, cell, label, opening, stride, upright
from kvcq.reports.text import clean, number
from kvcq.spec.report import ArtifactReport, Report


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
    wide = max(6.0, min(26.0, (WIDTH - left - 12) / layers))
    tall = max(7.0, min(18.0, 288 / heads))
    width, height = max(float(WIDTH), left + layers * wide + 12), top + heads * tall + bottom
    gap = 1 if wide > 9 else 0.4
    parts = [
        opening(width, height, key, f"KL by layer and query head, {clean(artifact.name)}", "Darker or brighter cells"
                " lose more; the table below holds the same values."),
        f'<defs><pattern id="{key}-hatch" width="6" height="6" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)"><path class="hatch" d="M0,0V6"/></pattern></defs>',
        _legend(scale, left),
    ]  # fmt: skip
    for layer in sorted({*rows, *kept}):
        x = left + layer * wide
        if layer not in rows:
            reason = f"layer {layer}: BF16, {clean(kept[layer])}"
            parts.append(cell(x, top, wide - gap, heads * tall - gap, f'fill="url(#{key}-hatch)"', reason))
            continue
        for head, kl in enumerate(rows[layer]):
            fill = f'class="h{scale.step(kl)}"' if kl > 0 else 'class="zero"'
            title = f"layer {layer}, head {head}: KL {number(kl)} nats"
            parts.append(cell(x, top + head * tall, wide - gap, tall - gap, fill, title))
    for layer in range(0, layers, stride(layers, wide, 24)):
        parts.append(label(left + (layer + 0.5) * wide - gap / 2, top + heads * tall + 15, str(layer), "middle"))
    for head in range(0, heads, stride(heads, tall, 13)):
        parts.append(label(left - 7, top + (head + 0.5) * tall + 4, str(head), "end"))
    parts.append(label(left + layers * wide / 2, height - 4, "layer", "middle", "axis"))
    parts.append(upright(12, top + heads * tall / 2, "query head"))
    return Markup("".join(parts) + "</svg>")  # noqa: S704 - every foreign string above went through escape


def _legend(scale: HeatScale, left: float) -> str:
    """Draw the colour steps with one tick a decade, above the map at its left so that narrow screens show it."""
    step, y = 13, 8
    parts = [label(left, y + 9, "KL, nats", "start", "axis")]
    left += 74
    parts += [f'<rect class="h{i}" x="{left + i * step}" y="{y}" width="{step}" height="9"/>' for i in range(STEPS)]
    for decade in range(scale.low, scale.high + 1):
        x = left + STEPS * step * (decade - scale.low) / (scale.high - scale.low)
        parts.append(label(x, y + 22, f"{10.0**decade:g}", "middle"))
    return "".join(parts)
