"""Codes that name one of 2^b stored levels, and the levels that a Gaussian row wants."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvcq.codecs.uniform import FP16_MAX
from kvcq.spec.codec import CodecSpec

NORM_FLOOR = 1e-8
TOLERANCE = 1e-15
MAX_STEPS = 100_000


class LevelCodes(NamedTuple):
    """Codes [H, T, d] uint8; scale and bias [H, T, 1] in the metadata's dtype, [H, T, 0] when bounds are fixed."""

    codes: Tensor
    scale: Tensor
    bias: Tensor
    clamped: Tensor


@cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels of least squared error for N(0, 1), ascending (Lloyd-Max), in float64.

    Lloyd's iteration from the centres of equal cells on [-3, 3]: cell borders halfway between levels, each level the
    mean of its cell, (phi(a) - phi(b)) / (Phi(b) - Phi(a)). The result is made exactly symmetric.
    """
    count = 2**bits
    levels = [6.0 * (i + 0.5) / count - 3.0 for i in range(count)]
    for _ in range(MAX_STEPS):
        borders = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        moved = [_cell_mean(a, b) for a, b in pairwise(borders)]
        change = max(abs(a - b) for a, b in zip(levels, moved, strict=True))
        levels = moved
        if change < TOLERANCE:
            break
    return tuple((a - b) / 2 for a, b in zip(levels, reversed(levels), strict=True))


def _cell_mean(low: float, high: float) -> float:
    """Return the mean of N(0, 1) between two borders."""
    density = math.exp(-low * low / 2) - math.exp(-high * high / 2)
    # erfc of the nearer side: the difference of two values near 1 would lose the tail.
    if low > 0:
        mass = math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))
    else:
        mass = math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))
    return density / (mass * math.sqrt(math.pi / 2))


def encode_levels(
    rows: Tensor, levels: Tensor, spec: CodecSpec, bounds: Tensor | None, exact: Tensor | None = None
) -> LevelCodes:
    """Code rows by the nearest level; a value halfway between two takes the upper one.

    Args:
        rows: [H, T, d] float32.
        levels: [H, 2^b] float32, ascending.
        spec: Unit and metadata.
        bounds: Lower and upper bound of each channel [H, d, 2] float32, unit ``channel`` only.
        exact: Bool [H, T, d], entries kept elsewhere: they do not widen the range, and their codes mean nothing.
    """
    clamped = torch.zeros((), dtype=torch.int64, device=rows.device)
    if bounds is not None:
        middle, half = _channel_units(bounds)
        empty = rows.new_empty(*rows.shape[:2], 0)
        return LevelCodes(_nearest((rows - middle) / half, levels), empty, empty, clamped)
    if spec.metadata == "fp16-bias":
        clamped = (rows.abs() > FP16_MAX).sum()
        rows = rows.clamp(-FP16_MAX, FP16_MAX)
    scale, bias = _row_units(rows, spec, exact)
    if spec.metadata == "fp16-bias":
        scale, bias = scale.clamp(max=FP16_MAX).half(), bias.half()
    step = scale.float()
    # Codes are taken against the stored pair. A row of equal entries stores scale 0 and decodes to its bias.
    unit = torch.where(step > 0, (rows - bias.float()) / torch.where(step > 0, step, 1.0), 0.0)
    return LevelCodes(_nearest(unit, levels), scale, bias, clamped)


def decode_levels(codes: Tensor, scale: Tensor, bias: Tensor, levels: Tensor, bounds: Tensor | None) -> Tensor:
    """Return rows [H, T, d] float32: level times scale plus bias, both of the row or both of the channel."""
    heads, tokens, d = codes.shape
    value = levels.gather(1, codes.long().flatten(1)).reshape(heads, tokens, d)
    if bounds is not None:
        middle, half = _channel_units(bounds)
        return value * half + middle
    return value * scale.float() + bias.float()


def outlier_mask(rows: Tensor, spec: CodecSpec, bounds: Tensor | None) -> Tensor:
    """Return which entries of rows [H, T, d] are kept exact, bool.

    ``channel``: those outside the bounds. ``range``: in every row the `CodecSpec.row_outliers` entries farthest from
    its mean; of equal distances the lower channel is the outlier.
    """
    if bounds is not None:
        low, high = bounds.unsqueeze(1).unbind(-1)
        return (rows < low) | (rows > high)
    exact = rows.double()
    distance = (exact - exact.mean(-1, keepdim=True)).abs()
    order = distance.sort(stable=True, dim=-1, descending=True).indices[..., : spec.row_outliers(rows.shape[-1])]
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, order, True)


def levels_hat(rows: Tensor, levels: Tensor, spec: CodecSpec, bounds: Tensor | None) -> Tensor:
    """Return what is read back of rows [H, T, d] float32: float16 values of the outliers, levels of the others."""
    mask = outlier_mask(rows, spec, bounds)
    coded = encode_levels(rows, levels, spec, bounds, mask)
    decoded = decode_levels(coded.codes, coded.scale, coded.bias, levels, bounds)
    return torch.where(mask, rows.clamp(-FP16_MAX, FP16_MAX).half().float(), decoded)


def _nearest(unit: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the nearest level: how many borders, halfway between levels, a value reaches."""
    codes = torch.zeros_like(unit, dtype=torch.uint8)
    for border in ((levels[:, 1:] + levels[:, :-1]) / 2).unbind(1):
        codes += unit >= border[:, None, None]
    return codes


def _row_units(rows: Tensor, spec: CodecSpec, exact: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scale and bias [H, T, 1] float32 that put each row in its unit."""
    if spec.unit == "norm":
        scale = rows.double().square().sum(-1, keepdim=True).sqrt().float() + NORM_FLOOR
        return scale, torch.zeros_like(scale)
    outside = torch.zeros_like(rows, dtype=torch.bool) if exact is None else exact
    low = rows.masked_fill(outside, math.inf).amin(-1, keepdim=True)
    high = rows.masked_fill(outside, -math.inf).amax(-1, keepdim=True)
    return (high - low) / 2, (high + low) / 2


def _channel_units(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return middle and half width [H, 1, d] of bounds [H, d, 2]."""
    low, high = bounds.unsqueeze(1).unbind(-1)
    return (high + low) / 2, (high - low) / 2
