"""Asymmetric affine codes, one {scale, bias} for each run of d / G channels: min-max, or spaced for Gaussian rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.spec.codec import Metadata, Spacing

FP16_MAX = 65504.0

# Lloyd-Max of the standard normal with 2 bits: the outer thresholds of z as both OSCAR releases have them.
LLOYD_THRESHOLD = 0.98106527
# Distance of the equally spaced levels in standard deviations: OSCAR's own, 2 * 1.50955856 / 3 * 1.16, which is too
# wide for those thresholds, and the one of least squared error, which the NOVA-KV fork uses.
LLOYD_STEPS = {"lloyd-main": 2 * 1.50955856 / 3 * 1.16, "lloyd-nova": 0.98773677}
VARIANCE_FLOOR = 1e-8


def encode_uniform(
    rows: Tensor, groups: int, bits: int = 2, metadata: Metadata = "fp16-bias", spacing: Spacing = "minmax"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Code rows [..., d] float32; group g covers channels [g d/G, (g+1) d/G).

    ``fp16-bias``: scale = fp16((max - min) / levels), bias = fp16(min); codes are computed against the rounded
    pair, round half up. A scale that rounds to 0 gives code 0 and the value as bias. ``fp32-zero``:
    scale = max(max - min, 1e-8) / levels, zero = -min / scale, both float32 and unrounded (the reference release).

    Lloyd-Max `spacing` (2 bits) puts the levels at m + (code - 1.5) scale, scale = c s, with m and s the mean and the
    standard deviation of the group and c of `LLOYD_STEPS`; a code counts the thresholds -t, 0, t that (x - m) / s
    reaches, in terms of the stored pair: 1.5 - t/c, 1.5, 1.5 + t/c of (x - bias) / scale.

    Returns:
        Codes [..., d] uint8; scale [..., G]; bias [..., G] (or zero); the number of |x| > 65504 that were clamped
        (0-dim int64, always 0 with float32 metadata).
    """
    levels = 2**bits - 1
    clamped = torch.zeros((), dtype=torch.int64, device=rows.device)
    if metadata == "fp16-bias":
        clamped = (rows.abs() > FP16_MAX).sum()
        rows = rows.clamp(-FP16_MAX, FP16_MAX)
    x = rows.unflatten(-1, (groups, -1))
    if spacing == "minmax":
        low, high = x.aminmax(dim=-1, keepdim=True)
        span = high - low if metadata == "fp16-bias" else (high - low).clamp(min=1e-8)
        # Not by a number: CUDA then multiplies by a rounded 1 / levels, and codes would depend on the device.
        wanted = span / torch.full_like(span, levels)
    else:
        low, wanted = _lloyd(x, LLOYD_STEPS[spacing])
    if metadata == "fp16-bias":
        scale = wanted.clamp(max=FP16_MAX).half()
        bias = low.clamp(-FP16_MAX, FP16_MAX).half()
        step = scale.float()
        position = torch.where(step > 0, (x - bias.float()) / torch.where(step > 0, step, 1.0), 0.0)
    else:
        scale = wanted
        bias = -low / scale
        position = x / scale + bias
    if spacing == "minmax":
        codes = (position + 0.5).floor().clamp(0, levels).to(torch.uint8)
    else:
        outer = LLOYD_THRESHOLD / LLOYD_STEPS[spacing]
        codes = (position >= 1.5 - outer).to(torch.uint8) + (position >= 1.5) + (position >= 1.5 + outer)
    return codes.flatten(-2), scale.squeeze(-1), bias.squeeze(-1), clamped


def _lloyd(x: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Return the lowest level m - 1.5 step s and the scale step s of groups [..., n], both [..., 1] float32."""
    # float64: the last bits of a float32 sum depend on how it is split, and codes must not.
    exact = x.double()
    mean = exact.mean(-1, keepdim=True)
    scale = step * ((exact - mean).square().mean(-1, keepdim=True) + VARIANCE_FLOOR).sqrt()
    return (mean - 1.5 * scale).float(), scale.float()


def decode_uniform(codes: Tensor, scale: Tensor, bias: Tensor, metadata: Metadata = "fp16-bias") -> Tensor:
    """Return rows [..., d] float32 of codes [..., d]: scale * code + bias, or (code - zero) * scale."""
    rows = codes.to(torch.float32, copy=True)
    grouped = rows.unflatten(-1, (scale.shape[-1], -1))
    step, offset = scale.float().unsqueeze(-1), bias.float().unsqueeze(-1)
    if metadata == "fp16-bias":
        grouped.mul_(step).add_(offset)
    else:
        grouped.sub_(offset).mul_(step)
    return rows
