"""The stored form of the keys or values of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Encoded:
    """Coded rows of all KV heads of one layer.

    Attributes:
        codes: uint8 [H, T, d/4], packed 2-bit codes or VQ indices; [H, T, d] for other bit widths; for the
            quantizer ``none`` the float rows themselves [H, T, d].
        scale: [H, T, G] float16 (float32 with ``fp32-zero``); VQ: the row's rho; ``none``: [H, T, 0].
        bias: Same shape and dtype; with ``fp32-zero`` the zero point; VQ: zeros.
        clamped: 0-dim int64, how many values beyond the float16 range were clamped.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor
    clamped: Tensor


def affine_words(k: Encoded, v: Encoded) -> Tensor:
    """Return the affine words {s_k, b_k, s_v, b_v} [H, T, G, 4] float16 of the page block.

    With G unequal, the side with one group repeats its pair in every word.
    """
    groups = max(k.scale.shape[-1], v.scale.shape[-1])
    parts = [part.expand(*part.shape[:2], groups) for part in (k.scale, k.bias, v.scale, v.bias)]
    return torch.stack(parts, -1).to(torch.float16)
