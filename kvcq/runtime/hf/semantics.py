"""What a query of a prefill reads exactly: a function of positions, never of how forwards were cut.

After the prompt all semantics are one: key j is exact for query i iff ``j < sink`` or ``j > i - recent``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcq.codecs.windows import oldest_by_query, oldest_served
from kvcq.spec.boundary import Boundary, check_boundaries
from kvcq.spec.plan import Windows


@dataclass(frozen=True)
class ByQuery:
    """The window rule for every query: the reference, independent of chunks."""

    def oldest(self, first: int, count: int, windows: Windows) -> Tensor:
        """Return the oldest exact position of the queries first .. first + count - 1, int64 ``[count]``."""
        return oldest_by_query(first, count, windows)


@dataclass(frozen=True)
class Served:
    """Prefill in chunks, as an engine does it: the rows of a chunk are exact for that chunk.

    Attributes:
        prompt: Length of the prompt whose boundaries are listed; None: every forward of more than one token is a
            chunk behind a carried boundary, and a forward of one token is a decode step.
        boundaries: Starts of the chunks after the first, carried or cached; needs `prompt`.

    Raises:
        ValueError: boundaries that do not increase inside the prompt, or boundaries without a prompt.
    """

    prompt: int | None = None
    boundaries: tuple[Boundary, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt is None and self.boundaries:
            raise ValueError("boundaries need the length of the prompt that they cut")
        if self.prompt is not None:
            check_boundaries(self.prompt, self.boundaries)

    def oldest(self, first: int, count: int, windows: Windows) -> Tensor:
        """Return the oldest exact position of the queries first .. first + count - 1, int64 ``[count]``."""
        decode = oldest_by_query(first, count, windows)
        if self.prompt is None:
            # A single token is a decode step; with first 0 there is nothing before it either way.
            return decode if count == 1 else torch.full_like(decode, first - windows.recent)
        cached = max((b.position for b in self.boundaries if b.kind == "cached"), default=0)
        inside = min(max(self.prompt - first, 0), count)
        # Rows from before a prefix hit have no exact form, not even for the decode steps after the prompt.
        oldest = decode.clamp(min=cached)
        if inside:
            oldest[:inside] = oldest_served(self.prompt, self.boundaries, windows)[first : first + inside]
        return oldest


@dataclass(frozen=True)
class Deferred:
    """Exact prefill, quantized afterwards: queries of the prompt read every key exactly.

    Attributes:
        prompt: Length of the prompt; None: every forward of more than one token belongs to it.
    """

    prompt: int | None = None

    def oldest(self, first: int, count: int, windows: Windows) -> Tensor:
        """Return the oldest exact position of the queries first .. first + count - 1, int64 ``[count]``."""
        oldest = oldest_by_query(first, count, windows)
        inside = min(max(self.prompt - first, 0), count) if self.prompt is not None else count * (count > 1)
        oldest[:inside] = 0
        return oldest


Semantics = ByQuery | Served | Deferred
