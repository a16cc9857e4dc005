"""One forward of one request: where its queries stand and what they read exactly, told once to all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcq.runtime.hf.semantics import Semantics
from kvcq.spec.plan import Windows


@dataclass(frozen=True)
class Turn:
    """The new tokens of one request, each a query of its own.

    Attributes:
        row: Row of the batch.
        first: Position of the first.
        count: How many, at least one.
        oldest: The oldest position behind the sinks that each query reads exactly, int64 ``[count]`` on the CPU.
        low: The oldest position behind the sinks that some query reads exactly; may lie before it all.
        high: The largest of `oldest`: tokens from here on are read decoded by no query.
    """

    row: int
    first: int
    count: int
    oldest: Tensor
    low: int
    high: int

    @property
    def stop(self) -> int:
        """Tokens once the new ones are stored."""
        return self.first + self.count


class Turns:
    """The turns of the latest forward; the layers of one cache share it."""

    def __init__(self, semantics: Semantics, windows: Windows) -> None:
        self._semantics, self._windows = semantics, windows
        self._latest: dict[int, Turn] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        """Return one without turns: they come anew with the next forward."""
        return Turns(self._semantics, self._windows)

    def of(self, row: int, first: int, count: int) -> Turn:
        """Return the turn of a request: a function of its positions alone."""
        turn = self._latest.get(row)
        if turn is None or (turn.first, turn.count) != (first, count):
            oldest = self._semantics.oldest(first, count, self._windows)
            low = max(int(oldest.min()), self._windows.sink)
            turn = self._latest[row] = Turn(row, first, count, oldest, low, int(oldest.max()))
        return turn
