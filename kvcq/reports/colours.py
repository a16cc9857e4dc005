"""The colour ramp of heat maps, as style rules for both colour schemes."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from kvcq.reports.svg import STEPS

# Stops from the lowest to the highest loss: on each ground the lowest recedes and the highest stands out.
LIGHT = ("#fbf0e2", "#f7d3ae", "#f0a184", "#d9647a", "#9a3d7c", "#43205c")
DARK = ("#20243a", "#45306b", "#8f3d78", "#d8586c", "#f59d62", "#fbe9a9")
# Where black and white text are equally easy to read: (L + 0.05)^2 = 0.05 * 1.05.
_EVEN = 0.1791


def ramp(stops: Sequence[str]) -> Markup:
    """Return the rules of all steps, interpolated between stops: ``.hN`` fills a cell, ``.tN`` text upon it."""
    rules = []
    for step in range(STEPS):
        place = step / (STEPS - 1) * (len(stops) - 1)
        base = min(int(place), len(stops) - 2)
        below, above = _channels(stops[base]), _channels(stops[base + 1])
        mixed = [round(a + (b - a) * (place - base)) for a, b in zip(below, above, strict=True)]
        text = "#000000" if _luminance(mixed) > _EVEN else "#ffffff"
        rules.append(f".h{step}{{fill:#{''.join(f'{value:02x}' for value in mixed)}}}svg .t{step}{{fill:{text}}}")
    return Markup("".join(rules))  # noqa: S704 - built from the constants above


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(channels: Sequence[int]) -> float:
    """Return the relative luminance of sRGB channels, as the accessibility guidelines define it."""
    shares = [value / 255 for value in channels]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
