"""A count on the device that the host comes to know without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

SECONDS = 1.0


class Later:
    """Reads a count by a copy that is asked for now and read when it has arrived, at the next occasion.

    The copy runs beside the forwards that add to the count: it holds what had been counted at some moment since.

    Args:
        source: int64 ``[1]``.
        seconds: Shortest time between two copies.
        clock: Seconds.
    """

    def __init__(self, source: Tensor, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._seconds, self._clock = source, seconds, clock
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=source.is_cuda)
        self._arrived = torch.cuda.Event() if source.is_cuda else None
        self._asked = False
        self._next = clock()

    def poll(self) -> int | None:
        """Return what an earlier call asked for, where it has arrived, else ask for it; None: nothing new."""
        if self._asked:
            if self._arrived is not None and not self._arrived.query():
                return None
            self._asked = False
            return int(self._host)
        if self._clock() >= self._next:
            self._host.copy_(self._source, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._asked, self._next = True, self._clock() + self._seconds
        return None
