"""What is measured, as it is written on the command line: ``BATCHxINPUT``, ``full`` for as many as the pool holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvcq.errors import InputError, shown
from kvcq.reports.text import context_label
from kvcq.runtime.layout import PAGE

FULL = "full"
# What SGLang sets aside for each request besides its tokens, in its own count of what fits.
SPARE = 2 * PAGE

_CELL = re.compile(r"(?P<batch>full|[1-9]\d{0,3})x(?P<input>[1-9]\d{0,6})(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Cell:
    """So many requests of so many prompt tokens.

    Attributes:
        batch: Requests; None: as many as the pool holds at once.
        input: Tokens of each prompt.
    """

    batch: int | None
    input: int

    @property
    def label(self) -> str:
        """The cell as it is written on the command line."""
        return f"{FULL if self.batch is None else self.batch}x{context_label(self.input)}"

    def requests(self, capacity: int, output: int, most: int) -> int:
        """Return how many requests are sent.

        Args:
            capacity: Tokens of the pool.
            output: Tokens that each request generates.
            most: Requests that the server runs at once.
        """
        return min(fitting(capacity, self.input, output), most) if self.batch is None else self.batch


def fitting(capacity: int, length: int, output: int) -> int:
    """Return how many requests of `length` prompt tokens a pool of `capacity` tokens holds until they end."""
    return capacity // (-(-length // PAGE) * PAGE + output + SPARE)


def parse_cells(items: Sequence[str], flag: str, *, full: bool = False) -> tuple[Cell, ...]:
    """Read cells; one that is named twice is measured once.

    Args:
        items: One each.
        flag: Where they were given.
        full: Whether the number of requests may be ``full``.

    Raises:
        InputError: not a cell; names it and shows how one is written.
    """
    found = []
    for item in items:
        match = _CELL.fullmatch(item)
        if match is None or (match["batch"] == FULL and not full):
            example = "4x90k" + (" or fullx30k" if full else "")
            raise InputError(f"{shown(item)} is no cell", where=flag, fix=f"write BATCHxINPUT, for example {example}")
        batch = None if match["batch"] == FULL else int(match["batch"])
        found.append(Cell(batch, int(match["input"]) * _UNITS[match["unit"].lower()]))
    return tuple(dict.fromkeys(found))
