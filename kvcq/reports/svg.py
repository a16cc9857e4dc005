"""Pieces of charts as inline SVG without scripts, fonts or links: colours come from classes of the page's style."""

from __future__ import annotations

from markupsafe import escape

STEPS = 16
HUES = 8
WIDTH = 760
LABEL_CHARS = 22
_MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,-4.8L4.6,3.6H-4.6z",
)


def series_class(index: int) -> str:
    """Return the colour class of the series at `index`."""
    return f"s{index % HUES}"


def marker(index: int) -> str:
    """Return the path of the marker of the series at `index`, centred on the origin."""
    return _MARKERS[index % len(_MARKERS)]


def opening(width: float, height: float, key: str, title: str, description: str) -> str:
    """Return the opening tag with an accessible name; `key` distinguishes the ids of this drawing in the page."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>'
    )


def label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    """Return a text element; the text is escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def upright(x: float, y: float, text: str) -> str:
    """Return the name of a vertical axis, read from below."""
    return (
        f'<text class="axis" text-anchor="middle" transform="translate({x:.0f},{y:.1f}) rotate(-90)">'
        f"{escape(text)}</text>"
    )


def cell(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """Return a box; `fill` is an attribute, `title` is escaped."""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {box} {fill}><title>{escape(title)}</title></rect>"


def stride(count: int, pitch: float, room: float) -> int:
    """Return the smallest round step between labels that leaves `room` for each."""
    return next((n for n in (1, 2, 5, 10, 20, 50) if n * pitch >= room), max(1, count))


def short(name: str) -> str:
    """Cut a name to what a chart has room for."""
    return name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1] + "…"
