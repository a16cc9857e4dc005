"""Tables wider than the terminal: drawn in parts, one under the other, so that no number is ever cut.

The rule: columns keep their order, and a part takes as many as fit beside the first one, which names the rows and is
repeated. A column of numbers needs its whole width, a column of text its longest word, or 16 characters where
that is longer. Nothing is left out, whatever the width.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

LONGEST_WORD = 16
# One character of padding and one of the box lie between two columns.
GAP = 2


class Stacked:
    """A rich table that splits by the width of the console that draws it."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table whole where it fits, else its parts with a blank line between them."""
        columns = self.table.columns
        parts = split([_needed(column, console, options) for column in columns], options.max_width)
        if len(parts) == 1:
            yield self.table
            return
        for number, part in enumerate(parts):
            if number:
                yield ""
            yield self._part([columns[index] for index in part])

    def _part(self, columns: Sequence[Column]) -> Table:
        whole = self.table
        part = Table(box=whole.box, show_edge=whole.show_edge, pad_edge=whole.pad_edge, padding=whole.padding)
        for column in columns:
            part.add_column(column.header, justify=column.justify, overflow=column.overflow, no_wrap=column.no_wrap)
        for row, cells in zip(whole.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
            part.add_row(*cells, end_section=row.end_section)
        return part


def split(needed: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns of each part: the first one always, and as many more, at least one, as fit.

    Args:
        needed: Characters that each column needs.
        width: Characters of a line.
    """
    parts = [[0]]
    used = 0
    for index, need in enumerate(needed[1:], 1):
        used += GAP + need
        if len(parts[-1]) > 1 and needed[0] + used > width:
            parts.append([0])
            used = GAP + need
        parts[-1].append(index)
    return parts


def _needed(column: Column, console: Console, options: ConsoleOptions) -> int:
    cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    if column.no_wrap:
        return max(cell.maximum for cell in cells)
    return min(LONGEST_WORD, max(cell.minimum for cell in cells))
