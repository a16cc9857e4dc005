"""Heat map of the needle task: context by depth, one small map an artifact."""

from __future__ import annotations

from markupsafe import Markup

from kvcq.reports.svg import STEPS, cell, label, opening, stride, upright
from kvcq.reports.task_summary import needle_grid
from kvcq.reports.text import clean, context_label, percent, plural
from kvcq.spec.tasks import NeedleScore

_WIDTH, _LEFT, _TOP, _BOTTOM = 320, 60, 6, 40


def needle_map(name: str, needle: NeedleScore, *, key: str) -> Markup:
    """Draw the share of needles found at every context and depth, its percent written in the cell.

    Args:
        name: Of the artifact.
        needle: Its scores; subtasks are averaged, weighted by their items.
        key: Distinguishes the ids of this drawing within the page.
    """
    grid = needle_grid(needle)
    lengths = sorted({context for context, _ in grid})
    depths = sorted({depth for _, depth in grid})
    wide = (_WIDTH - _LEFT - 8) / max(1, len(lengths))
    tall = 24.0 if len(depths) <= 12 else max(9.0, 288 / len(depths))
    height = _TOP + tall * len(depths) + _BOTTOM
    parts = [
        opening(_WIDTH, height, key, f"Needles found by context and depth, {clean(name)}", "Cells that stand out lost"
                " needles; the table below holds the same values."),
    ]  # fmt: skip
    for column, context in enumerate(lengths):
        x = _LEFT + column * wide
        for row, depth in enumerate(depths):
            y = _TOP + row * tall
            place = f"{context_label(context)}, depth {depth:g} %"
            square = grid.get((context, depth))
            if square is None:
                parts.append(cell(x, y, wide - 1.5, tall - 1.5, 'class="zero"', f"{place}: not asked"))
                continue
            step = round((1 - square.score) * (STEPS - 1))
            title = f"{place}: {percent(square.score)} of the needles found in {plural(square.items, 'item')}, "
            title += f"all of them in {percent(square.exact)}"
            parts.append(cell(x, y, wide - 1.5, tall - 1.5, f'class="h{step}"', title))
            if wide >= 26 and tall >= 15:
                middle = x + wide / 2 - 0.75, y + tall / 2 + 3.5
                parts.append(label(*middle, f"{100 * square.score:.0f}", "middle", f"in t{step}"))
        if column % stride(len(lengths), wide, 30) == 0:
            parts.append(label(x + wide / 2, height - _BOTTOM + 15, context_label(context), "middle"))
    for row in range(0, len(depths), stride(len(depths), tall, 13)):
        parts.append(label(_LEFT - 6, _TOP + (row + 0.5) * tall + 4, f"{depths[row]:g} %", "end"))
    parts.append(label(_LEFT + wide * len(lengths) / 2, height - 5, "context", "middle", "axis"))
    parts.append(upright(10, _TOP + tall * len(depths) / 2, "depth"))
    return Markup("".join(parts) + "</svg>")  # noqa: S704 - every foreign string above went through escape
