"""Walsh-Hadamard rotation in natural (Sylvester) order."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two_divisor(d: int) -> int:
    """Return the largest power of two that divides `d`.

    Raises:
        ValueError: `d` is not positive.
    """
    if d < 1:
        raise ValueError(f"a head dim must be positive, not {d}")
    return d & -d


def hadamard(d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the symmetric orthogonal matrix [d, d] with entries of equal magnitude inside each block.

    A power of two gives H / sqrt(d). Any other d gives equal blocks on the diagonal, of the size of its largest
    power-of-two divisor b, each over sqrt(b): 80 -> 16, 96 -> 32, 192 -> 64.
    """
    block = power_of_two_divisor(d)
    signs = torch.ones(1, 1, dtype=torch.float64)
    while signs.shape[0] < block:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)], 0)
    return torch.block_diag(*[signs / block**0.5] * (d // block)).to(dtype)


def block_hadamard(d: int, order: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return equal Hadamard blocks of `order` channels on the diagonal of [d, d], each over sqrt(order).

    Raises:
        ValueError: `order` is no power of two that divides `d`.
    """
    if power_of_two_divisor(order) != order or d % order:
        raise ValueError(f"Hadamard blocks of {order} channels do not divide a head dim of {d}")
    return torch.block_diag(*[hadamard(order)] * (d // order)).to(dtype)
