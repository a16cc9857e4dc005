"""Which keys a query reads exactly: one number a query, the oldest exact position behind the sinks.

Key j is exact for query i iff ``j < sink`` or ``j >= oldest_i``; otherwise it is read decoded. Positions count the
request's own tokens from 0. Causality is not part of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcq.spec.boundary import Boundary, check_boundaries
from kvcq.spec.plan import Windows


def oldest_by_query(first: int, count: int, windows: Windows) -> Tensor:
    """Return ``i - recent + 1``, int64 ``[count]``, of the queries at positions first .. first + count - 1."""
    return torch.arange(first, first + count) - windows.recent + 1


def oldest_served(n: int, boundaries: Sequence[Boundary], windows: Windows) -> Tensor:
    """Return the oldest exact position, int64 ``[n]``, of a prefill in chunks that start at 0 and at `boundaries`.

    A query reads exactly the rows of its own chunk and, behind a carried boundary, the last `recent` rows before it,
    as far as they were computed after the last cached boundary.

    Raises:
        ValueError: boundaries that do not increase inside (0, n).
    """
    check_boundaries(n, boundaries)
    oldest = torch.zeros(n, dtype=torch.long)
    cached = 0
    for boundary in boundaries:
        if boundary.kind == "cached":
            cached = boundary.position
        oldest[boundary.position :] = max(boundary.position - windows.recent, cached)
    return oldest
