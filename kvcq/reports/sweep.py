"""A sweep in a report: one table over all points, and each metric drawn against the swept values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from markupsafe import Markup

from kvcq.reports.lines import Place, Series, fitting_axis, line_chart, log_places
from kvcq.reports.summary import bits_at, bits_contexts, contexts, is_reference, metrics_at
from kvcq.reports.tables import Cell, Column, Group, Table, Tone, flat
from kvcq.reports.task_summary import contexts_of
from kvcq.reports.text import ABSENT, clean, context_label, number, percent, quantity
from kvcq.spec.report import ArtifactReport, Report
from kvcq.spec.sweep import Sweep
from kvcq.spec.tasks import TaskScores

# From this ratio of the largest to the smallest value on, equal ratios are drawn as equal distances.
LOG_SPAN = 8.0

Read = Callable[[ArtifactReport], float | None]


@dataclass(frozen=True)
class Measure:
    """One measured number of a row, at the longest context of what measured it; `best` is None for no ranking."""

    column: Column
    read: Read
    write: Callable[[float], str] = number
    best: Callable[[list[float]], float] | None = min


def measures(report: Report) -> list[Measure]:
    """Return what the rows of a sweep were measured by, bits first."""
    longest, lengths = max(contexts(report), default=0), _bits_lengths(report)
    bits = [
        Measure(
            Column(f"Bits {context_label(n)}", f"Bits per cached element at {n} tokens, everything counted"),
            partial(_bits, n),
            lambda value: f"{value:.2f}",
            None,
        )
        for n in lengths
    ]
    found = [
        *bits,
        Measure(Column("KL", f"Mean attention KL in nats at {longest} tokens"), _attention(longest, "kl")),
        Measure(
            Column("Output", f"Relative squared error of the attention output at {longest} tokens"),
            _attention(longest, "output_error"),
        ),
        Measure(
            Column("Perplexity", "Read through the cache, longest context"),
            _tasks(lambda t: max(t.perplexity, key=lambda s: s.context).perplexity if t.perplexity else None),
            quantity,
        ),
        Measure(
            Column("Needles", "Share of needles found"),
            _tasks(lambda t: t.needle.score if t.needle is not None else None),
            percent,
            max,
        ),
        Measure(
            Column("Agreement", "Greedy tokens equal to those of the BF16 cache, longest context"),
            _tasks(lambda t: max(t.agreement, key=lambda s: s.context).agreement if t.agreement else None),
            percent,
            max,
        ),
        Measure(
            Column("Decode KL", "Mean KL of the next token in nats, longest context"),
            _tasks(lambda t: max(t.decode_kl, key=lambda s: s.context).kl if t.decode_kl else None),
        ),
    ]
    return [own for own in found if any(own.read(row) is not None for row in report.artifacts if not is_reference(row))]


def point_rows(report: Report, sweep: Sweep) -> list[tuple[tuple[str, ...], ArtifactReport]]:
    """Return (values on the axes, row) of every point of the grid that the report has."""
    rows = {row.name: row for row in report.artifacts}
    return [(point.values, rows[point.artifact]) for point in sweep.points if point.artifact in rows]


def sweep_table(report: Report) -> Table:
    """One row a point, and below them the other rows of the report; the best point of a column is marked."""
    sweep = report.sweep
    if sweep is None:
        return Table(())
    shown, points = measures(report), point_rows(report, sweep)
    columns = [Column(clean(axis.key), numeric=False) for axis in sweep.axes] + [own.column for own in shown]
    groups = [Group("", tuple((*map(_value, values), *_cells(row, shown, points)) for values, row in points))]
    inside = {row.name for _, row in points}
    others = [row for row in report.artifacts if row.name not in inside]
    if others:
        blank = [Cell("")] * (len(sweep.axes) - 1)
        rows = [
            (Cell(clean(row.name), "muted" if is_reference(row) else ""), *blank, *_cells(row, shown, []))
            for row in others
        ]
        groups.append(Group("Beside the sweep", tuple(rows)))
    return Table(tuple(columns), tuple(groups))


def sweep_charts(report: Report) -> list[tuple[str, Markup, Table]]:
    """Return (caption, drawing, table) of every measure except bits, against the axis with the most values."""
    sweep = report.sweep
    if sweep is None:
        return []
    points = point_rows(report, sweep)
    across = max(range(len(sweep.axes)), key=lambda n: len(sweep.axes[n].values))
    axis = sweep.axes[across]
    lines: dict[str, dict[str, ArtifactReport]] = {}
    for values, row in points:
        rest = [f"{a.key}={v}" for n, (a, v) in enumerate(zip(sweep.axes, values, strict=True)) if n != across]
        lines.setdefault(clean(", ".join(rest)) or clean(sweep.method), {})[values[across]] = row
    found = []
    for number_of, own in enumerate(measure for measure in measures(report) if measure.best is not None):
        series = [
            Series(name, n, tuple(own.read(rows[value]) if value in rows else None for value in axis.values))
            for n, (name, rows) in enumerate(lines.items())
        ]
        series = [line for line in series if any(value is not None for value in line.values)]
        drawn = [value for line in series for value in line.values if value is not None]
        label, unit = own.column.label, "nats" if own.column.label.endswith("KL") else ""
        drawing = line_chart(
            series,
            value_places(axis.values),
            fitting_axis(drawn),
            key=f"sweep{number_of}",
            title=f"{label} against {clean(axis.key)}",
            across=clean(axis.key),
            up=f"{label}, {unit}" if unit else label,
            what=label,
            unit=unit,
        )
        found.append((f"{label} against {clean(axis.key)}", drawing, _values(axis.key, axis.values, series, own)))
    return found


def value_places(values: Sequence[str]) -> list[Place]:
    """Place swept values: rising numbers by their size, all others evenly in the order given."""
    names = [clean(value) for value in values]
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    rising = len(numbers) > 1 and all(a < b for a, b in pairwise(numbers))
    if rising and numbers[0] > 0 and numbers[-1] / numbers[0] >= LOG_SPAN:
        return log_places(numbers, names)
    if rising:
        span = numbers[-1] - numbers[0]
        return [Place((value - numbers[0]) / span, name) for value, name in zip(numbers, names, strict=True)]
    return _even(names)


def sweep_sentence(sweep: Sweep) -> str:
    """Say what was swept, and that its points are not fits that pack could seal."""
    keys = " and ".join(f"{len(axis.values)} values of {clean(axis.key)}" for axis in sweep.axes)
    base = f", with {', '.join(map(clean, sweep.settings))}" if sweep.settings else ""
    return (
        f"{clean(sweep.method)} over {keys}{base}: {len(sweep.points)} points, each fitted to the same statistics "
        f"(SHA-256 {sweep.stats_digest[:16]}) for this measurement only. To pack a point, fit it and validate that fit."
    )


def _bits_lengths(report: Report) -> list[int]:
    """Return where bits are told: the longest context that was measured, where windows count, and the longest known."""
    known = bits_contexts(report)
    scores = [row.tasks for row in report.artifacts if row.tasks is not None]
    found = {n for own in scores for part in (own.perplexity, own.agreement, own.decode_kl) for n in contexts_of(part)}
    measured = [n for n in {*contexts(report), *found} if n in known]
    return sorted({max(measured, default=0), max(known, default=0)} - {0})


def _bits(context: int, row: ArtifactReport) -> float | None:
    return bits_at(row, context)


def _even(names: Sequence[str]) -> list[Place]:
    steps = max(1, len(names) - 1)
    return [Place(0.5 if len(names) == 1 else n / steps, name) for n, name in enumerate(names)]


def _attention(context: int, field: str) -> Read:
    def read(row: ArtifactReport) -> float | None:
        metrics = metrics_at(row, context)
        return None if metrics is None else float(getattr(metrics, field))

    return read


def _tasks(read: Callable[[TaskScores], float | None]) -> Read:
    return lambda row: None if row.tasks is None else read(row.tasks)


def _cells(
    row: ArtifactReport, shown: Sequence[Measure], points: Sequence[tuple[tuple[str, ...], ArtifactReport]]
) -> list[Cell]:
    cells = []
    for own in shown:
        value = own.read(row)
        known = [v for _, other in points if (v := own.read(other)) is not None]
        tone: Tone = "muted" if is_reference(row) else ""
        if own.best is not None and len(known) > 1 and value == own.best(known):
            tone = "best"
        cells.append(Cell(ABSENT if value is None else own.write(value), tone))
    return cells


def _value(value: str) -> Cell:
    return Cell(clean(value))


def _values(key: str, values: Sequence[str], series: Sequence[Series], own: Measure) -> Table:
    columns = (Column(clean(key), numeric=False), *(Column(line.name) for line in series))
    rows = [
        (_value(value), *(Cell(ABSENT if (v := line.values[n]) is None else own.write(v)) for line in series))
        for n, value in enumerate(values)
    ]
    return flat(columns, rows)
