"""Statistics of paired items: bootstrap intervals, exact McNemar tests, majority votes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcq.spec.tasks import Interval, PairTest

# Fewer items than this are warned about.
FEW_ITEMS = 30
RESAMPLES = 10_000
BLOCK_ELEMENTS = 1 << 22

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Maps column sums ``[resamples, columns]`` to ``[resamples]``."""


def bootstrap(columns: ArrayLike, statistic: Statistic, seed: int, resamples: int = RESAMPLES) -> Interval:
    """Return the 95 % percentile bootstrap interval of a function of sums over items.

    Items (rows) are drawn with replacement, all columns of a row together, so paired sums stay paired.

    Args:
        columns: One row an item, ``[items, columns]``.
        statistic: Maps column sums of the resamples to the quantity.
        seed: Of the resampling; the same seed draws the same items whatever the columns hold.
        resamples: How many.

    Raises:
        ValueError: no items.
    """
    table = np.asarray(columns, np.float64)
    if table.ndim != 2 or not len(table):
        raise ValueError(f"a bootstrap needs rows of items, not shape {table.shape}")
    count = len(table)
    generator = np.random.default_rng(seed)
    step = max(1, BLOCK_ELEMENTS // count)
    values = []
    for start in range(0, resamples, step):
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=min(step, resamples - start))
        values.append(statistic(drawn.astype(np.float64) @ table))
    low, high = np.percentile(np.concatenate(values), [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def mean_interval(values: Sequence[float], seed: int, resamples: int = RESAMPLES) -> Interval:
    """Return the 95 % percentile bootstrap interval of the mean of `values`, one an item."""
    column = np.asarray(values, np.float64)[:, None]
    return bootstrap(column, lambda sums: sums[:, 0] / len(column), seed, resamples)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int, resamples: int = RESAMPLES
) -> Interval:
    """Return the 95 % interval of sum(numerators) / sum(denominators), items drawn as pairs.

    Denominators must be positive.
    """
    table = np.column_stack([numerators, denominators])
    return bootstrap(table, lambda sums: sums[:, 0] / sums[:, 1], seed, resamples)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Under equal shares each discordant pair is a fair coin: p = min(1, 2 P[X <= min(b, c)]), X ~ B(b + c, 1/2).
    """
    discordant = only_first + only_second
    tail = sum(math.comb(discordant, k) for k in range(min(only_first, only_second) + 1))
    # Whole numbers up to the one division: exact for any count.
    return min(1.0, 2 * tail / 2**discordant)


def majority(votes: Sequence[Sequence[bool]]) -> list[bool]:
    """Return of each item whether more than half of its samples are right; a tie is wrong.

    Raises:
        ValueError: an item without samples.
    """
    if not all(votes):
        raise ValueError("an item has no samples to vote")
    return [2 * sum(samples) > len(samples) for samples in votes]


def pair_test(task: str, first: str, second: str, right: Sequence[bool], other: Sequence[bool]) -> PairTest:
    """Compare two artifacts on the same items.

    Args:
        task: Name of the task.
        first: Name of one artifact.
        second: Name of the other.
        right: Of each item, whether the first got it right.
        other: The same of the second.

    Raises:
        ValueError: no items, or different numbers of them.
    """
    pairs = list(zip(right, other, strict=True))
    if not pairs:
        raise ValueError("no items to compare")
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    return PairTest(
        task=task,
        first=first,
        second=second,
        items=len(pairs),
        only_first=only_first,
        only_second=only_second,
        difference=(only_first - only_second) / len(pairs),
        standard_error=math.sqrt(only_first + only_second) / len(pairs),
        p_value=mcnemar(only_first, only_second),
    )


def pair_tests(task: str, outcomes: Sequence[tuple[str, Sequence[bool]]]) -> tuple[PairTest, ...]:
    """Compare every two artifacts, given as (name, outcome of each item), in order."""
    return tuple(
        pair_test(task, first, second, right, other) for (first, right), (second, other) in combinations(outcomes, 2)
    )


def few_items(count: int, what: str = "items") -> list[str]:
    """Return a warning where so few items were asked that scores say little."""
    if count >= FEW_ITEMS:
        return []
    return [f"few {what} ({count}): intervals come out too narrow, and a difference of a few answers may be chance"]
