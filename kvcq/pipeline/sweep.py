"""validate --sweep: fit a grid of recipes to one set of statistics and measure all points in one run.

Points live in memory only: nothing of them is written but their rows in the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcq.artifacts.stats_file import StatsArtifact, read_stats
from kvcq.data.documents import check_sources
from kvcq.errors import KvcqError
from kvcq.evaluation.gates import check_gates, load_gates
from kvcq.methods.base import FitContext
from kvcq.pipeline.fit import base_fields, check_recipe, fit_layers, refuse_shard
from kvcq.pipeline.grid import Point, make_grid, parse_axes
from kvcq.pipeline.output import exclusive
from kvcq.pipeline.progress import SILENT, Reporter
from kvcq.pipeline.requests import SweepRequest
from kvcq.pipeline.result import Answer, aligned
from kvcq.pipeline.subjects import Subject, open_subjects, subject_of
from kvcq.pipeline.task_plan import check_windows, task_contexts
from kvcq.pipeline.validate import ValidateResult, measure
from kvcq.spec.header import FitHeader
from kvcq.spec.report import Report
from kvcq.spec.sweep import Sweep


@exclusive
def sweep(request: SweepRequest, reporter: Reporter = SILENT) -> ValidateResult | Answer:
    """Measure every point of a grid, beside the artifacts of the request; a dry run lists the points.

    Raises:
        InputError: everything that `validate` refuses; an unknown key or value, too many points, windows that leave
            nothing of a context to measure, each with the name of the point. All of it before the model is loaded.
        KvcqError: whatever fit raises, with the name of the point.
    """
    check_sources(request.data)
    base, axes = base_fields(request), parse_axes(request.sweep)
    points = make_grid(base, axes, str(request.recipe or "--method"))
    beside = open_subjects(request.artifacts) if request.artifacts else []
    names = [*(point.name for point in points), *(subject.name for subject in beside)]
    tasks = task_contexts(request)
    for point in points:
        with _named(point):
            check_windows(request, tasks, [point])
    check_gates(load_gates(request.gates) if request.gates else (), names, tasks)
    reporter.stage(f"reading statistics {request.stats.name}")
    stats = read_stats(request.stats)
    refuse_shard(stats.header, request.stats)
    for point in points:
        with _named(point):
            check_recipe(point.recipe, point.method, stats.header)
    if request.dry_run:
        return _plan(points)
    fitter = _Fitter(stats, set(), {})
    subjects = []
    for number, point in enumerate(points, start=1):
        with _named(point):
            told = _PointReporter(reporter, f"fitting {point.name}, point {number} of {len(points)}", fitter.told)
            subjects.append(fitter.fit(point, told))
    record = Sweep(
        method=points[0].recipe.method,
        settings=request.settings,
        stats_digest=stats.digest,
        axes=axes,
        points=tuple(point.record for point in points),
    )
    # Points have no fit that pack could seal, so a canary of theirs would be of no use.
    wanted = tuple(subject.name for subject in beside) if request.canary is None else request.canary
    request = dataclasses.replace(request, canary=wanted)
    return measure(request, [*subjects, *beside], reporter, lambda report: _finish(report, record, request, names))


class WindowWatch(FitContext):
    """A context that notices whether the method looks at the windows."""

    looked = False

    def __getattribute__(self, name: str) -> Any:
        if name == "windows":
            object.__setattr__(self, "looked", True)
        return super().__getattribute__(name)


@dataclass(frozen=True)
class _Fitter:
    """Fits points, and fits once what differs only in windows that no part of the fit looks at.

    `told` are the warnings given so far, `known` the fits that may serve further points, by recipe without windows.
    """

    stats: StatsArtifact
    told: set[str]
    known: dict[str, tuple[FitHeader, dict[str, np.ndarray]]]

    def fit(self, point: Point, reporter: Reporter) -> Subject:
        key = repr(sorted(point.recipe.model_dump(exclude={"windows"}).items()))
        found = self.known.get(key)
        if found is None:
            watch = WindowWatch(seed=point.recipe.seed, windows=point.recipe.windows)
            found = fit_layers(self.stats, point.recipe, point.method, reporter, watch)
            # Statistics averaged for a target context leave out the sink tokens.
            if not watch.looked and point.recipe.target_context is None:
                self.known[key] = found
        # A shared fit has the windows of the point that it was made for.
        return dataclasses.replace(subject_of(point.name, *found), windows=point.recipe.windows)


def _finish(report: Report, record: Sweep, request: SweepRequest, names: Sequence[str]) -> Report:
    """Add the record, and name in the command what the points were made from instead of the points."""
    words = ["kvcq validate", *names[len(record.points) :], f"--stats {request.stats.name}"]
    words += [f"--recipe {request.recipe.name}"] if request.recipe is not None else []
    words += [f"--method {request.method}"] if request.method is not None else []
    words += [f"--set {setting}" for setting in request.settings]
    words += [f"--target-context {request.target_context}"] if request.target_context is not None else []
    words += [f"--sweep {axis.key}={','.join(axis.values)}" for axis in record.axes]
    plain = " ".join(["kvcq validate", *names])
    command = " ".join(words) + report.command.removeprefix(plain)
    return report.model_copy(update={"sweep": record, "command": command})


def _plan(points: Sequence[Point]) -> Answer:
    rows = [(point.name, f"sink {point.recipe.windows.sink}, recent {point.recipe.windows.recent}") for point in points]
    lines = [f"dry run: {len(points)} points, nothing fitted, measured or written", *aligned(rows, indent="  ")]
    record = {"path": None, "points": [point.record.plain() for point in points]}
    return Answer(tuple(lines), record)


@contextmanager
def _named(point: Point) -> Iterator[None]:
    """Add the name of the point to whatever is refused inside."""
    try:
        yield
    except KvcqError as error:
        where = f"{point.name}, {error.where}" if error.where else point.name
        raise type(error)(error.what, where=where, fix=error.fix) from error


@dataclass(frozen=True)
class _PointReporter:
    """Names the point in the stage, and tells a warning that many points share once."""

    inner: Reporter
    label: str
    told: set[str]

    def stage(self, text: str) -> None:
        self.inner.stage(self.label)

    def advance(self, done: int, total: int, unit: str) -> None:
        self.inner.advance(done, total, unit)

    def note(self, text: str) -> None:
        self.inner.note(text)

    def warn(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            self.inner.warn(text)
