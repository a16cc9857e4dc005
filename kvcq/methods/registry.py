"""Names of methods and how to make one: the built-in table, then the entry-point group ``kvcq.methods``.

Listing and describing methods imports neither torch nor numpy for the built-in ones. An entry point names a
subclass of `kvcq.methods.base.Method`; it cannot take the name of a built-in method.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from kvcq.errors import SHOWN, InputError, UnavailableError, shown
from kvcq.methods.base import Method, allowed_values
from kvcq.spec.recipe import Scalar

GROUP = "kvcq.methods"

BUILT_IN = {
    "bf16": "kvcq.methods.bf16:Bf16",
    "naive-int2": "kvcq.methods.naive_int2:NaiveInt2",
    "quarot-int2": "kvcq.methods.quarot_int2:QuarotInt2",
    "klt-int2": "kvcq.methods.klt_int2:KltInt2",
    "oscar": "kvcq.methods.oscar:Oscar",
    "oscar-centered": "kvcq.methods.oscar_centered:OscarCentered",
    "oscar-lloyd": "kvcq.methods.oscar_lloyd:OscarLloyd",
    "oscar-vq": "kvcq.methods.oscar_vq:OscarVq",
    "nova": "kvcq.methods.nova:Nova",
    "nova-sq": "kvcq.methods.nova_sq:NovaSq",
    "kivi": "kvcq.methods.kivi:Kivi",
    "kitty": "kvcq.methods.kitty:Kitty",
    "saw-int4": "kvcq.methods.saw_int4:SawInt4",
    "turboquant": "kvcq.methods.turboquant:Turboquant",
    "kvquant-nuq": "kvcq.methods.kvquant_nuq:KvquantNuq",
    "rotatekv": "kvcq.methods.rotatekv:Rotatekv",
}


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a method, for display: its default, what it may be, and what it means."""

    name: str
    default: Scalar
    allowed: str
    doc: str


@dataclass(frozen=True)
class MethodInfo:
    """One method, for display. `origin` is ``kvcq`` or the distribution that brings it.

    `problem` says why a third-party method cannot be used; its other fields are then empty. `unserved` says why its
    codes are for accuracy only, or is None.
    """

    name: str
    summary: str
    paper: str
    origin: str
    parameters: tuple[ParameterInfo, ...] = ()
    problem: str | None = None
    unserved: str | None = None


def available() -> list[str]:
    """Return the names of all methods: the built-in ones in their order, then others sorted."""
    return [*BUILT_IN, *sorted(_third_party())]


def load(name: str) -> type[Method]:
    """Return the class behind a name.

    Raises:
        InputError: no method has this name.
        UnavailableError: an installed third-party method fails to import or is not a `Method`.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    point = _third_party().get(name)
    if point is None:
        raise InputError(f"no method {shown(name)}", where="--method", fix=_suggest(name, available()))
    try:
        found = point.load()
    except Exception as error:  # whatever a foreign module raises, the user needs one line with its name
        raise UnavailableError(
            f"method {name!r} fails to import: {type(error).__name__}: {error}",
            where=_origin(point),
            fix="repair or uninstall that package",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UnavailableError(f"method {name!r} is not a kvcq Method", where=_origin(point), fix="report it there")
    loose = [item.name for item in dataclasses.fields(found) if "doc" not in item.metadata]
    if loose:
        raise UnavailableError(
            f"method {name!r} has a field without a declaration: {loose[0]}",
            where=_origin(point),
            fix="declare it with kvcq.methods.base.parameter",
        )
    return found


def create(name: str, params: Mapping[str, Any] | None = None) -> Method:
    """Make a method with the given parameters, the others at their defaults.

    Raises:
        InputError: an unknown method or parameter, or a value that is not allowed.
        UnavailableError: a third-party method that cannot be loaded.
    """
    kind = load(name)
    known = [item.name for item in dataclasses.fields(kind)]
    for key in params or {}:
        if key not in known:
            raise InputError(f"no parameter {shown(key)}", where=f"method {name}", fix=_suggest(key, known))
    return kind(**(params or {}))


def describe() -> list[MethodInfo]:
    """Return what ``kvcq methods`` prints, in the order of `available`. Never raises for a broken third party."""
    points = _third_party()
    rows = []
    for name in available():
        origin = _origin(points[name]) if name in points else "kvcq"
        try:
            kind = load(name)
        except UnavailableError as error:
            rows.append(MethodInfo(name, "", "", origin, problem=str(error)))
            continue
        parameters = tuple(
            ParameterInfo(item.name, cast(Scalar, item.default), allowed_values(item), item.metadata["doc"])
            for item in dataclasses.fields(kind)
        )
        rows.append(MethodInfo(name, kind.summary, kind.paper, origin, parameters, unserved=kind.unserved))
    return rows


def _third_party() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name)[:SHOWN], known, n=1)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(known)})"
    return f"known: {', '.join(known)}" if known else "this method has no parameters"
