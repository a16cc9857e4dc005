"""A drawing as a file of its own: charts take their colours from the page around them, a file brings them along."""

from __future__ import annotations

from markupsafe import Markup

from kvcq.reports.svg import HUES

_LIGHT = ("#265ecb", "#b54e10", "#0d7259", "#b93578", "#7a4fd0", "#7d6000", "#1d7099", "#626878")
_DARK = ("#72a5ff", "#f79a5e", "#47c9a4", "#f283b5", "#b79bf8", "#dfbf53", "#79c8ee", "#a9afbf")
_RULES = (
    "svg{font-family:system-ui,sans-serif;background:var(--card)}"
    "text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}"
    "text.axis{font-size:12.5px}text.name{font-size:13.5px;font-weight:650;fill:var(--hue)}"
    ".grid{stroke:var(--rule);stroke-width:1;fill:none}.grid.minor{stroke-dasharray:2 4}"
    ".line{stroke:var(--hue);stroke-width:2.4;fill:none;stroke-linejoin:round;stroke-linecap:round}"
    ".dot{fill:var(--hue);stroke:var(--card);stroke-width:1.5}"
    ".lead{stroke:var(--hue);stroke-width:1;opacity:.45;fill:none}"
)


def standalone(drawing: Markup) -> str:
    """Return a chart of `kvcq.reports.lines` as the text of an SVG file, for light and dark grounds."""
    light = "svg{--card:#ffffff;--soft:#4b5161;--rule:#d9dce4}" + _hues(_LIGHT)
    dark = "svg{--card:#14161d;--soft:#b3b8c6;--rule:#343947}" + _hues(_DARK)
    style = f"<style>{light}{_RULES}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    head, _, rest = str(drawing).partition(">")
    return (
        f"{head.replace('<svg', '<svg xmlns=' + chr(34) + 'http://www.w3.org/2000/svg' + chr(34), 1)}>{style}{rest}\n"
    )


def _hues(colours: tuple[str, ...]) -> str:
    return "".join(f".s{index}{{--hue:{colours[index % len(colours)]}}}" for index in range(HUES))
