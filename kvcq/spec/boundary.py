"""Where a prefill was cut: with the tokens and the bundle, all that an answer depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True)
class Boundary:
    """Start of a prefill chunk after the first.

    ``carried``: the same request goes on and its ring holds the last `recent` rows before the boundary.
    ``cached``: a prefix hit; no exact row before the boundary is left except the sinks.

    Raises:
        ValueError: another kind.
    """

    position: int
    kind: Literal["carried", "cached"]

    def __post_init__(self) -> None:
        if self.kind not in ("carried", "cached"):
            raise ValueError(f"a boundary is carried or cached, not {self.kind!r}")


def check_boundaries(n: int, boundaries: Sequence[Boundary]) -> None:
    """Refuse boundaries that do not increase inside (0, n).

    Raises:
        ValueError: names the positions.
    """
    starts = [boundary.position for boundary in boundaries]
    if any(b <= a for a, b in pairwise([0, *starts, n])):
        raise ValueError(f"chunk boundaries {starts} do not increase inside (0, {n})")


def served_boundaries(n: int, chunk: int, cached_at: int | None = None) -> tuple[Boundary, ...]:
    """Return the boundaries of `n` tokens prefilled `chunk` at a time, after a prefix hit at `cached_at` if given.

    Raises:
        ValueError: `chunk` below 1 or `cached_at` outside (0, n).
    """
    if chunk < 1 or (cached_at is not None and not 0 < cached_at < n):
        raise ValueError(f"cannot cut {n} tokens into chunks of {chunk} with a cached prefix of {cached_at}")
    first = 0 if cached_at is None else cached_at
    before = [Boundary(position, "carried") for position in range(chunk, first, chunk)]
    hit = [] if cached_at is None else [Boundary(cached_at, "cached")]
    return (*before, *hit, *(Boundary(position, "carried") for position in range(first + chunk, n, chunk)))
