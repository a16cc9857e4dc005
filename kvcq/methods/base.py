"""What a method is: a frozen dataclass of parameters that turns the statistics of a layer into codecs."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvcq.errors import InputError, shown
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import Windows

if TYPE_CHECKING:
    import numpy as np

    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class FitContext:
    """What all layers of one fit share: the recipe's seed and windows."""

    seed: int = 0
    windows: Windows = field(default_factory=Windows)


@dataclass(frozen=True)
class LayerFit:
    """One fitted layer.

    Attributes:
        k: Codec of the keys.
        v: Codec of the values.
        tensors: Served arrays by role (``k.transform`` ...), each with the KV heads first.
        notes: Measured facts worth a place in the fit header, e.g. how many rows stood behind a moment.
    """

    k: CodecSpec
    v: CodecSpec
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    notes: dict[str, tuple[float, ...]] = field(default_factory=dict)


def parameter(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] | None = None,
    low: float = -math.inf,
    high: float = math.inf,
) -> Any:
    """Declare a parameter of a method: a dataclass field with its documentation and the values it may take.

    The type of `default` (bool, int, float or str) is the type of the parameter; an int is accepted for a float.
    `low` and `high` are inclusive.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods. Subclasses are frozen dataclasses whose fields are declared with `parameter`.

    Constructing one checks every field against its declaration and raises `InputError` for the first bad one.

    Attributes:
        name: Registry name.
        summary: One line for ``kvcq methods``.
        paper: Where the method comes from, or the empty string.
        quantizes: False for the BF16 reference, whose layers are never fitted.
        unserved: Why no serving page holds its codes (as `CodecSpec.unserved` says it) whatever the parameters, or
            None for a method whose defaults are served.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    quantizes: ClassVar[bool] = True
    unserved: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _checked(self.name, item, getattr(self, item.name)))

    def check(self, layer: LayerGeometry) -> None:
        """Refuse a layer that these parameters cannot code, by its geometry alone: fit asks before any work.

        Raises:
            InputError: names the layer and what is allowed.
        """
        return

    def check_windows(self, windows: Windows) -> None:
        """Refuse windows under which the codes of these parameters would not be complete when they are read.

        Raises:
            InputError: names the parameter and what the windows allow.
        """
        return

    @abstractmethod
    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit one full-attention layer. Same statistics, parameters and seed must give the same bytes."""


def _checked(method: str, item: dataclasses.Field[Any], value: Any) -> Any:
    """Return `value` in the type of the field's default, or raise `InputError` with what is allowed."""
    wanted = type(item.default)
    # bool is an int to Python, but `groups: yes` in a recipe is a mistake.
    if wanted is float and type(value) is int:
        value = float(value)
    rules = item.metadata
    fits = type(value) is wanted and (rules["choices"] is None or value in rules["choices"])
    if fits and wanted in (int, float):
        fits = rules["low"] <= value <= rules["high"]
    if not fits:
        raise InputError(
            f"{item.name}={shown(value)} is not allowed", where=f"method {method}", fix=f"use {allowed_values(item)}"
        )
    return value


def allowed_values(item: dataclasses.Field[Any]) -> str:
    """Describe in words what a parameter may be, e.g. ``head or layer`` or ``a float from 0 to 1``."""
    rules = item.metadata
    if rules["choices"] is not None:
        return " or ".join(str(choice) for choice in rules["choices"])
    if isinstance(item.default, bool):
        return "true or false"
    kind = type(item.default).__name__
    low, high = rules["low"], rules["high"]
    article = "an" if kind[0] in "aeiou" else "a"
    if math.isinf(low) and math.isinf(high):
        return f"{article} {kind}"
    if math.isinf(high):
        return f"{article} {kind} of at least {low:g}"
    return f"{article} {kind} from {low:g} to {high:g}"
