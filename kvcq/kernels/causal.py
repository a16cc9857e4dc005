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
HOPPER = 9
WIDEST = 128


def usable(q_heads: int, kv_heads: int, d_k: int, d_v: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether cuDNN attends on a device: tried once, on zeros as serving has them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER or d_k != d_v or d_k > WIDEST:
        return False
    lengths = (STEP, STEP - 1)
    fused = torch.zeros(sum(lengths), q_heads + 2 * kv_heads, d_k, dtype=dtype, device=device)
    q, k, v = fused.split([q_heads, kv_heads, kv_heads], 1)
    try:
        attend_causal(q, k, v, [(0, STEP), (STEP, sum(lengths))], 1.0, torch.empty_like(q))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], scaling: float, out: Tensor
) -> None:
    """Attend within each of several prompts.

    Args:
        q: Post-RoPE queries ``[T, Hq, d]``, served dtype.
        k: Keys ``[T, H, d]``, post-RoPE.
        v: Values ``[T, H, d]``.
        spans: Where each prompt begins and ends among the tokens; others are left alone.
        scaling: Factor on products.
        out: ``[T, Hq, d]``, served dtype.
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        for start, stop in spans:
            behind = (start - stop) % STEP
            # A copy even where nothing is behind: plans are for layouts too.
            heads_first = [pad(x[start:stop], (0, 0, 0, 0, 0, behind)).transpose(0, 1)[None] for x in (q, k, v)]
            own_q, own_k, own_v = heads_first
            found = scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True, scale=scaling, enable_gqa=True)
            out[start:stop] = found[0].transpose(0, 1)[: stop - start]
