"""The grid of a sweep: from ``key=v1,v2`` to one resolved recipe a point, checked before anything runs."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcq.errors import SHOWN, InputError, shown
from kvcq.methods.base import Method
from kvcq.pipeline.recipes import COMMON, apply_settings, resolve
from kvcq.spec.plan import Windows
from kvcq.spec.recipe import Recipe
from kvcq.spec.sweep import SweepAxis, SweepPoint

MAX_POINTS = 32
FLAG = "--sweep"
CLIPS = ("clip_k", "clip_v")
_LENGTH = re.compile(r"^([0-9]{1,9})([kK]?)$")
_WINDOWS = re.compile(r"^([0-9]{1,9})/([0-9]{1,9})$")


@dataclass(frozen=True)
class Point:
    """One point: as the report names it, and what it is fitted with."""

    record: SweepPoint
    method: Method

    @property
    def name(self) -> str:
        """Name of its row."""
        return self.record.artifact

    @property
    def windows(self) -> Windows:
        """Exact tokens at both ends."""
        return self.recipe.windows

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self.record.recipe


def parse_axes(texts: Sequence[str]) -> tuple[SweepAxis, ...]:
    """Read ``key=v1,v2,...``, one axis a text.

    Raises:
        InputError: no ``=``, no value, an empty or repeated one, a key that is given twice.
    """
    axes: list[SweepAxis] = []
    for text in texts:
        key, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in rest.split(","))
        if not equals or not key or not all(values):
            raise InputError(
                f"{shown(text)} is not key=v1,v2", where=FLAG, fix="for example --sweep windows=0/0,64/256"
            )
        if key in (axis.key for axis in axes):
            raise InputError(f"{shown(key)} is swept twice", where=FLAG, fix="give all its values at once")
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise InputError(f"{shown(f'{key}={twice}')} is given twice", where=FLAG, fix="give each value once")
        axes.append(SweepAxis(key=key, values=values))
    if not axes:
        raise InputError("nothing to sweep", where=FLAG, fix="for example --sweep windows=0/0,64/256")
    return tuple(axes)


def make_grid(base: Mapping[str, Any], axes: Sequence[SweepAxis], where: str) -> tuple[Point, ...]:
    """Resolve every point of the grid; the last axis varies fastest.

    Args:
        base: Recipe fields that the points share.
        axes: What varies.
        where: Where the method was given, for errors.

    Raises:
        InputError: too many points, an unknown key or a value that the method does not take; names the point.
    """
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_POINTS:
        raise InputError(
            f"the grid has {count} points, a sweep takes at most {MAX_POINTS}", where=FLAG, fix="sweep fewer values"
        )
    _, method = resolve(dict(base), where)
    for axis in axes:
        _check_key(axis.key, method)
    points = []
    for values in itertools.product(*(axis.values for axis in axes)):
        words = ",".join(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
        parts = [point_settings(axis.key, value, method) for axis, value in zip(axes, values, strict=True)]
        settings = list(itertools.chain.from_iterable(parts))
        _refuse_overlap([setting.partition("=")[0] for setting in settings])
        try:
            recipe, own = resolve(apply_settings(base, settings), where)
        except InputError as error:
            raise InputError(error.what, where=f"{FLAG} {words}", fix=error.fix) from error
        record = SweepPoint(artifact=f"{recipe.method}[{words}]", values=values, recipe=recipe)
        points.append(Point(record, own))
    return tuple(points)


def point_settings(key: str, value: str, method: Method) -> list[str]:
    """Return the ``key=value`` settings that one swept value stands for.

    ``windows`` is sink/recent, ``clip`` every clip that the method has, ``skip_layers`` ids joined by ``+`` or
    ``none``, ``target_context`` a length such as 8k; any other key is a setting of its own.

    Raises:
        InputError: a value that is not of this form.
    """
    if key == "windows":
        match = _WINDOWS.match(value)
        if match is None:
            raise InputError(
                f"windows={shown(value)} is not SINK/RECENT", where=FLAG, fix="for example --sweep windows=0/0,64/256"
            )
        return [f"windows.sink={match[1]}", f"windows.recent={match[2]}"]
    if key == "clip":
        return [f"{name}={value}" for name in _clips(method)]
    if key == "skip_layers":
        return [f"skip_layers={'' if value == 'none' else value.replace('+', ',')}"]
    if key == "target_context" and (match := _LENGTH.match(value)):
        return [f"{key}={int(match[1]) * (1024 if match[2] else 1)}"]
    return [f"{key}={value}"]


def _refuse_overlap(keys: Sequence[str]) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"two swept keys set {key}", where=FLAG, fix="sweep one of them")


def _clips(method: Method) -> list[str]:
    own = {item.name for item in dataclasses.fields(method)}
    return [name for name in CLIPS if name in own]


def _check_key(key: str, method: Method) -> None:
    """Refuse a key that is neither a recipe field, a parameter of the method, nor a shorthand for such."""
    if key == "method":
        raise InputError(
            "a sweep varies one method", where=FLAG, fix="fit each method and validate the fits side by side"
        )
    own = [item.name for item in dataclasses.fields(method)]
    shorthands = ["windows", *(["clip"] if _clips(method) else [])]
    common = [name for name in COMMON if name not in ("method", "params", "windows")]
    known = [*shorthands, *own, "windows.sink", "windows.recent", *common]
    if key in known:
        return
    close = difflib.get_close_matches(key[:SHOWN], known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(
        f"{method.name} has nothing called {shown(key)} to sweep", where=FLAG, fix=f"{hint}known: {', '.join(known)}"
    )
