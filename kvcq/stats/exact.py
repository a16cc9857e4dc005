"""Sums that do not depend on order: a float64 value as two int64 limbs.

    hi = rint(x 2^10)        lo = rint((x - hi 2^-10) 2^50)        x = hi 2^-10 + lo 2^-50

Integer addition is associative, so shards, resumed runs and one long run agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUE_LIMIT = 2.0**52
LIMB_LIMIT = 2**62


def fold(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float64 values into their limbs (hi, lo), both int64.

    Raises:
        ValueError: a value is not finite or not below 2^52; the message holds its index.
    """
    bad = ~(x.abs() < VALUE_LIMIT)
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{x[index].item()} at {list(index)} is not below 2^52")
    high = torch.round(x * 2.0**10)
    low = torch.round((x - high * 2.0**-10) * 2.0**50)
    return high.to(torch.int64), low.to(torch.int64)


class ExactSum:
    """A running sum of float64 arrays of one shape, exact to 2^-51 per term whatever the order."""

    def __init__(self, hi: Tensor, lo: Tensor) -> None:
        if hi.dtype != torch.int64 or lo.dtype != torch.int64 or hi.shape != lo.shape:
            raise ValueError("limbs are two int64 arrays of one shape")
        _check((hi, lo))
        self.hi = hi
        self.lo = lo

    @classmethod
    def zeros(cls, *shape: int) -> ExactSum:
        """Return an empty sum on the CPU."""
        return cls(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))

    def add(self, x: Tensor) -> None:
        """Add float64 values of the sum's shape.

        Raises:
            ValueError: as `fold`, or a limb would pass 2^62; the sum is then unchanged.
        """
        self._add(*fold(x.to(device="cpu", dtype=torch.float64)))

    def merge(self, other: ExactSum) -> None:
        """Add another sum.

        Raises:
            ValueError: the shapes differ, or a limb would pass 2^62; the sum is then unchanged.
        """
        if other.hi.shape != self.hi.shape:
            raise ValueError(f"sums of shape {list(self.hi.shape)} and {list(other.hi.shape)} do not add")
        self._add(other.hi, other.lo)

    def value(self) -> Tensor:
        """Return the sum in float64."""
        return self.hi.to(torch.float64) * 2.0**-10 + self.lo.to(torch.float64) * 2.0**-50

    def _add(self, hi: Tensor, lo: Tensor) -> None:
        # Both operands are within the limit, so the int64 sum cannot wrap before it is checked.
        sums = (self.hi + hi, self.lo + lo)
        _check(sums)
        self.hi, self.lo = sums


def _check(limbs: tuple[Tensor, Tensor]) -> None:
    for limb in limbs:
        bad = (limb > LIMB_LIMIT) | (limb < -LIMB_LIMIT)
        if bad.any():
            raise ValueError(f"the sum at {bad.nonzero()[0].tolist()} passes 2^62")
