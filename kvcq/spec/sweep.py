"""What a sweep varied: rows of a report that were fitted for it and exist nowhere else."""

from __future__ import annotations

from pydantic import Field

from kvcq.spec.base import SpecModel
from kvcq.spec.files import Sha256
from kvcq.spec.recipe import Recipe


class SweepAxis(SpecModel):
    """One swept key and its values as given, in their order."""

    key: str
    values: tuple[str, ...] = Field(min_length=1)


class SweepPoint(SpecModel):
    """One point of the grid: the row that measured it, its value on every axis, and the whole recipe."""

    artifact: str
    values: tuple[str, ...] = Field(min_length=1)
    recipe: Recipe


class Sweep(SpecModel):
    """A grid of recipes of one method on the same statistics.

    Attributes:
        method: The method.
        settings: Base settings that every point shares, ``key=value`` as given.
        stats_digest: Digest of the statistics that every point was fitted to.
        axes: What was varied; the last one varies fastest over `points`.
        points: The whole grid.
    """

    method: str
    settings: tuple[str, ...] = ()
    stats_digest: Sha256
    axes: tuple[SweepAxis, ...] = Field(min_length=1)
    points: tuple[SweepPoint, ...] = Field(min_length=1)
