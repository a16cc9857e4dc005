"""Unit rotations of RoPE applied to stored rows, and their averages over ranges of positions.

A row (a, b, rest) at position p is ``(a cos - b sin, b cos + a sin, rest)``: with the swap ``P`` that sends
(a, b, rest) to (-b, a, 0) this reads ``R_p x = x * c + (x P) * s`` with c = 1 and s = 0 on channels that do not
turn. Attention scaling (YaRN) is no rotation: it stays in the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcq.spec.geometry import RopeSpec

_BLOCK = 8192


class Turn(NamedTuple):
    """Cosine and sine of each pair's angle, both ``[T, rotary_dims / 2]``."""

    cos: Tensor
    sin: Tensor


class RotationMoments(NamedTuple):
    """Averages over positions in channel form: c, s ``[d]``; cc, cs, ss ``[d, d]`` with cs[i, j] = mean(c_i s_j)."""

    c: Tensor
    s: Tensor
    cc: Tensor
    cs: Tensor
    ss: Tensor


def pair_slices(rope: RopeSpec) -> tuple[slice, slice]:
    """Return the channels a and b of all pairs."""
    start, stop, half = rope.offset, rope.offset + rope.rotary_dims, rope.rotary_dims // 2
    if rope.pairing == "half":
        return slice(start, start + half), slice(start + half, stop)
    return slice(start, stop, 2), slice(start + 1, stop, 2)


def turn_table(rope: RopeSpec, positions: Tensor) -> Turn:
    """Return the float64 angles' cosine and sine for `positions` ``[T]`` (negative ones turn back)."""
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float64, device=positions.device)
    angles = rope.sense * positions.to(torch.float64).unsqueeze(-1) * frequencies
    return Turn(angles.cos(), angles.sin())


def apply_turn(x: Tensor, rope: RopeSpec, turn: Turn, *, inverse: bool = False, out: Tensor | None = None) -> Tensor:
    """Rotate rows by a table.

    Args:
        x: Rows ``[..., T, d]``.
        rope: The rotation's layout.
        turn: Table of the T positions.
        inverse: Turn the other way.
        out: Result buffer of x's shape, not x itself.

    Returns:
        The rotated rows, in x's dtype.
    """
    first, second = pair_slices(rope)
    cos, sin = turn.cos.to(x.dtype), turn.sin.to(x.dtype)
    sign = -1.0 if inverse else 1.0
    a, b = x[..., first], x[..., second]
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rope.rotary_dims < x.shape[-1]:
        out.copy_(x)
    torch.mul(a, cos, out=out[..., first])
    out[..., first].addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., second])
    out[..., second].addcmul_(a, sin, value=sign)
    return out


def rotate(x: Tensor, positions: Tensor, rope: RopeSpec | None, inverse: bool = False) -> Tensor:
    """Turn rows ``[..., T, d]`` by the unit rotation of their `positions` ``[T]``; computed in x's dtype.

    Without a rope the rows are returned as they are.
    """
    if rope is None:
        return x
    return apply_turn(x, rope, turn_table(rope, positions), inverse=inverse)


def swap_pairs(x: Tensor, rope: RopeSpec) -> Tensor:
    """Return ``x P``: channels (a, b, rest) become (-b, a, 0)."""
    first, second = pair_slices(rope)
    out = torch.zeros_like(x)
    out[..., first] = -x[..., second]
    out[..., second] = x[..., first]
    return out


def mean_rotation_moments(rope: RopeSpec, lo: int, hi: int, d: int) -> RotationMoments:
    """Average the rotation's coefficients and their products over positions ``lo .. hi - 1``, in float64.

    Args:
        rope: The rotation.
        lo: First position.
        hi: One past the last position.
        d: Head dimension; channels that do not turn have c = 1, s = 0.

    Raises:
        ValueError: the range is empty.
    """
    if hi <= lo:
        raise ValueError(f"no position in [{lo}, {hi})")
    first, second = pair_slices(rope)
    sums = [torch.zeros(n, d, dtype=torch.float64) for n in (1, 1, d, d, d)]
    for start in range(lo, hi, _BLOCK):
        positions = torch.arange(start, min(start + _BLOCK, hi))
        turn = turn_table(rope, positions)
        c = torch.ones(len(positions), d, dtype=torch.float64)
        s = torch.zeros(len(positions), d, dtype=torch.float64)
        c[:, first] = c[:, second] = turn.cos
        s[:, first] = s[:, second] = turn.sin
        one = torch.ones(1, len(positions), dtype=torch.float64)
        for total, part in zip(sums, (one @ c, one @ s, c.T @ c, c.T @ s, s.T @ s), strict=True):
            total += part
    means = [total / (hi - lo) for total in sums]
    return RotationMoments(means[0][0], means[1][0], *means[2:])


def average_mean(mean: Tensor, rope: RopeSpec, over: RotationMoments) -> Tensor:
    """Return the mean ``[..., d]`` of rows turned to every position, from their position-0 mean."""
    return mean * over.c + swap_pairs(mean, rope) * over.s


def average_second(second: Tensor, rope: RopeSpec, over: RotationMoments) -> Tensor:
    """Return E x'x ``[..., d, d]`` over all positions, from the position-0 second moment (exact, no sampling)."""
    right = swap_pairs(second, rope)
    left = swap_pairs(second.transpose(-1, -2), rope).transpose(-1, -2)
    both = swap_pairs(left, rope)
    return second * over.cc + right * over.cs + left * over.cs.T + both * over.ss
