"""k-means of numbers: exact Lloyd steps over sorted values, the same on any machine."""

from __future__ import annotations

import numpy as np

MAX_STEPS = 1000


def line_kmeans(values: np.ndarray, count: int) -> np.ndarray:
    """Return `count` levels, ascending, of float64 values ``[n]``: Lloyd steps from their quantiles to a fixed point.

    Sorted values make a cell a run, and prefix sums its mean. A cell without values keeps its level. Unweighted; no
    seed enters. Values that are fewer than the levels repeat.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("no values to fit levels to")
    ordered = np.sort(values.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    ranks = ((2 * np.arange(count) + 1) * len(ordered)) // (2 * count)
    levels = ordered[ranks]
    for _ in range(MAX_STEPS):
        inner = np.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2, side="left")
        borders = np.concatenate([[0], inner, [len(ordered)]])
        sizes = np.diff(borders)
        moved = np.where(sizes > 0, np.diff(sums[borders]) / np.maximum(sizes, 1), levels)
        if np.array_equal(moved, levels):
            break
        levels = moved
    return np.sort(levels)
