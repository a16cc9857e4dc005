"""Causal attention of prompts that begin: nothing of theirs is coded yet, so a library attends.

``o_i = sum_j softmax(scaling q_i . k_j) v_j`` over ``j <= i``, in the model's own frame: queries need no map, outputs
none back. cuDNN, through torch, is the library: on Hopper it is faster than `kvcq.kernels.extend`, which is made for
pages. It builds a plan for every length that it meets, so lengths are rounded up; the rows behind a prompt are seen by
none of its queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# Shorter prompts are not worth a call each.
LEAST, STEP = 1024, 512
HOPPER = (9, 0)
WIDEST = 128


def usable(q_heads: int, kv_heads: int, d_k: int, d_v: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether cuDNN attends on a device: tried once, on zeros."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER or d_k != d_v or d_k > WIDEST:
        return False
    q, kv = (torch.zeros(STEP, heads, d_k, dtype=dtype, device=device) for heads in (q_heads, kv_heads))
    try:
        _attend(q, kv, kv, 1.0)
    except RuntimeError:
        return False
    return True


def attend_causal(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scaling: float, out: Tensor) -> None:
    """Attend within each of several prompts.

    Args:
        q: Post-RoPE queries ``[T, Hq, d]``, served dtype, the prompts one after another; what lies behind them is
            left alone.
        k: Keys ``[T, H, d]``, post-RoPE.
        v: Values ``[T, H, d]``.
        lengths: Tokens of each prompt.
        scaling: Factor on products.
        out: ``[T, Hq, d]``, served dtype.
    """
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        out[part] = _attend(q[part], k[part], v[part], scaling)
        start += length


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    length = q.shape[0]
    behind = -length % STEP
    rows = (pad(x, (0, 0, 0, 0, 0, behind)) if behind else x for x in (q, k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in rows)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return found[0].transpose(0, 1)[:length]
