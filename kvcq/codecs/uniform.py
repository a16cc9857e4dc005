"""Asymmetric min-max codes, one {scale, bias} for each run of d / G channels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.spec.codec import Metadata

FP16_MAX = 65504.0


def encode_uniform(
    rows: Tensor, groups: int, bits: int = 2, metadata: Metadata = "fp16-bias"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Code rows [..., d] float32; group g covers channels [g d/G, (g+1) d/G).

    ``fp16-bias``: scale = fp16((max - min) / levels), bias = fp16(min); codes are computed against the rounded
    pair, round half up. A scale that rounds to 0 gives code 0 and the value as bias. ``fp32-zero``:
    scale = max(max - min, 1e-8) / levels, zero = -min / scale, both float32 and unrounded (the reference release).

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
    low, high = x.aminmax(dim=-1, keepdim=True)
    if metadata == "fp16-bias":
        scale = ((high - low) / levels).clamp(max=FP16_MAX).half()
        bias = low.half()
        step = scale.float()
        position = torch.where(step > 0, (x - bias.float()) / torch.where(step > 0, step, 1.0), 0.0)
    else:
        scale = (high - low).clamp(min=1e-8) / levels
        bias = -low / scale
        position = x / scale + bias
    codes = (position + 0.5).floor().clamp(0, levels).to(torch.uint8)
    return codes.flatten(-2), scale.squeeze(-1), bias.squeeze(-1), clamped


def decode_uniform(codes: Tensor, scale: Tensor, bias: Tensor, metadata: Metadata = "fp16-bias") -> Tensor:
    """Return rows [..., d] float32 of codes [..., d]: scale * code + bias, or (code - zero) * scale."""
    grouped = codes.float().unflatten(-1, (scale.shape[-1], -1))
    step, offset = scale.float().unsqueeze(-1), bias.float().unsqueeze(-1)
    value = grouped * step + offset if metadata == "fp16-bias" else (grouped - offset) * step
    return value.flatten(-2)
