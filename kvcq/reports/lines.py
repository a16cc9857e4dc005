"""Line charts: named series over common places on the horizontal axis, names at the ends of the lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape

from kvcq.reports.svg import HUES, WIDTH, label, marker, opening, series_class, short, upright
from kvcq.reports.text import number

# Values that differ by less than this factor are told apart better on a linear axis.
LOG_FROM = 4.0
_DASHES = ("", ' stroke-dasharray="6 4"', ' stroke-dasharray="1.5 5"')


@dataclass(frozen=True)
class Place:
    """A labelled place of the horizontal axis, `at` from 0 (left) to 1."""

    at: float
    label: str


@dataclass(frozen=True)
class Series:
    """One line; `index` gives its colour and marker, a value of None leaves a gap at that place."""

    name: str
    index: int
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Axis:
    """Range and labelled values of the vertical axis; a logarithmic one spans log10 of its values."""

    log: bool
    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return how far up a value stands, from 0 to 1."""
        return ((log10(value) if self.log else value) - self.low) / (self.high - self.low)

    def minor(self, tick: float) -> bool:
        """Say whether a tick is drawn faintly."""
        return self.log and not log10(tick).is_integer()


def log_axis(values: Sequence[float]) -> Axis:
    """Return an axis of tight multiples of 1, 2 and 5 around positive values."""
    low, high = _decades(values)
    return Axis(True, low, high, tuple(_ticks(low, high)))


def fitting_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis for positive values that span a wide range, else a linear one."""
    if not values or (min(values) > 0 and max(values) / min(values) >= LOG_FROM):
        return log_axis(values)
    low, high = min(values), max(values)
    raw = (high - low) / 4 or abs(high) / 4 or 0.25
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first, last = floor(low / step), ceil(high / step)
    last += first == last
    return Axis(False, first * step, last * step, tuple(float(f"{n * step:.6g}") for n in range(first, last + 1)))


def line_chart(
    series: Sequence[Series],
    places: Sequence[Place],
    axis: Axis,
    *,
    key: str,
    title: str,
    across: str,
    up: str,
    what: str,
    unit: str = "",
    note: str = "",
) -> Markup:
    """Draw series over places.

    Args:
        series: Lines, in the order of their colours; values must be positive on a logarithmic axis.
        places: Of the horizontal axis, the same for all series.
        axis: Of the values.
        key: Distinguishes the ids of this drawing within the page.
        title: Accessible name.
        across: Name of the horizontal axis.
        up: Name of the vertical axis.
        what: Quantity, for the titles of the points.
        unit: Its unit, likewise.
        note: A line below the plot.
    """
    names = [short(line.name) for line in series]
    left, right, top = 62, 24 + 7.6 * max(map(len, names), default=0), 18
    plot_w, plot_h = WIDTH - left - right, max(260.0, 20.0 * len(series))
    height = top + plot_h + (66 if note else 44)

    def x_of(place: Place) -> float:
        return left + plot_w * place.at

    def y_of(value: float) -> float:
        return top + plot_h * (1 - axis.share(value))

    parts = [opening(WIDTH, height, key, title, "One line a row; the table holds the same values.")]
    for tick in axis.ticks:
        kind = "grid minor" if axis.minor(tick) else "grid"
        parts.append(f'<path class="{kind}" d="M{left},{y_of(tick):.1f}H{left + plot_w:.1f}"/>')
        parts.append(label(left - 9, y_of(tick) + 4, f"{tick:g}", "end"))
    for place in places:
        parts.append(f'<path class="grid minor" d="M{x_of(place):.1f},{top}V{top + plot_h:.1f}"/>')
        parts.append(label(x_of(place), top + plot_h + 18, place.label, "middle"))
    parts.append(label(left + plot_w / 2, top + plot_h + 37, across, "middle", "axis"))
    parts.append(upright(13, top + plot_h / 2, up))
    drawn = [(line, [(p, v) for p, v in zip(places, line.values, strict=True) if v is not None]) for line in series]
    ends = spread([y_of(points[-1][1]) for _, points in drawn], 17, top, top + plot_h)
    for (line, points), name, end in zip(drawn, names, ends, strict=True):
        where = [(x_of(place), y_of(value)) for place, value in points]
        dash = _DASHES[line.index // HUES % len(_DASHES)]
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in where)
        parts.append(f'<g class="{series_class(line.index)}"><path class="line" d="M{path}"{dash}/>')
        for (x, y), (place, value) in zip(where, points, strict=True):
            text = f"{line.name} at {place.label}: {what} {number(value)} {unit}".rstrip()
            parts.append(f'<path class="dot" transform="translate({x:.1f},{y:.1f})" d="{marker(line.index)}">')
            parts.append(f"<title>{escape(text)}</title></path>")
        x, y = where[-1]
        parts.append(f'<path class="lead" d="M{x + 6:.1f},{y:.1f}L{left + plot_w + 9:.1f},{end:.1f}"/>')
        parts.append(
            f'<text class="name" x="{left + plot_w + 13:.1f}" y="{end + 4:.1f}">{escape(name)}'
            f"<title>{escape(line.name)}</title></text></g>"
        )
    if note:
        parts.append(label(left, height - 6, note, "start", "axis"))
    return Markup("".join(parts) + "</svg>")  # noqa: S704 - every foreign string above went through escape


def log_places(lengths: Sequence[float], names: Sequence[str]) -> list[Place]:
    """Place positive numbers so that equal ratios are equal distances; a single one stands in the middle."""
    if len(lengths) < 2:
        return [Place(0.5, name) for name in names]
    span = log10(lengths[-1] / lengths[0])
    return [Place(log10(n / lengths[0]) / span, name) for n, name in zip(lengths, names, strict=True)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
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


def _decades(values: Sequence[float]) -> tuple[float, float]:
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
