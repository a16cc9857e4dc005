"""Figures of a run as drawings: one SVG file for each kind of cell that has more than one place."""

from __future__ import annotations

from pathlib import Path

from kvcq.artifacts.disk import disk_errors
from kvcq.errors import InputError
from kvcq.pipeline.bench.record import refuse_existing, save_text
from kvcq.pipeline.bench_serve.result import ServeBenchResult
from kvcq.pipeline.bench_serve.rows import Row
from kvcq.reports.lines import Place, Series, fitting_axis, line_chart
from kvcq.reports.standalone import standalone

DRAWN = {
    "decode": ("Tokens per second while all requests decode", "tokens/s"),
    "hits": ("Tokens per second by the share of prefix hits", "tokens/s"),
    "split": ("Decode step by the profiler", "ms"),
}


def write_charts(result: ServeBenchResult, folder: Path) -> list[Path]:
    """Write the drawings that there are figures for and return their paths.

    Raises:
        InputError: the folder cannot be written.
        ResourceError: the disk is full.
    """
    written = []
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for kind in DRAWN:
        if drawing := draw_kind(result, kind):
            path = chart_path(folder, kind)
            save_text(drawing, path)
            written.append(path)
    return written


def check_charts(folder: Path, force: bool) -> None:
    """Refuse a folder in which a drawing is that may not be replaced.

    Raises:
        InputError: names the drawing.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("not a folder", where=f"--charts {folder}", fix="name a folder")
    for kind in DRAWN:
        refuse_existing(chart_path(folder, kind), force)


def chart_path(folder: Path, kind: str) -> Path:
    """Return where the drawing of a kind of cells is."""
    return folder / f"{kind}.svg"


def draw_kind(result: ServeBenchResult, kind: str) -> str:
    """Return the drawing of one kind of cells, a line an arm; empty where nothing was measured."""
    title, unit = DRAWN[kind]
    found = {(row.arm, row.cell): _value(row) for row in result.rows if row.kind == kind}
    cells = list(dict.fromkeys(cell for _, cell in found))
    arms = [arm for arm in dict.fromkeys(arm for arm, _ in found) if any(found.get((arm, cell)) for cell in cells)]
    values = [value for value in found.values() if value]
    if not values:
        return ""
    places = [Place((i + 0.5) / len(cells), cell) for i, cell in enumerate(cells)]
    series = [Series(arm, i, tuple(found.get((arm, cell)) for cell in cells)) for i, arm in enumerate(arms)]
    return standalone(
        line_chart(
            series,
            places,
            fitting_axis(values),
            key=kind,
            title=f"{title}: {result.model}",
            across="cell",
            up=unit,
            what=unit,
        )
    )


def _value(row: Row) -> float | None:
    return row.step_ms if row.kind == "split" else row.tokens_per_s
