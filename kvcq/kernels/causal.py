"""Causal attention of prompts that begin: nothing of theirs is coded yet, so a library attends.

``o_i = sum_j softmax(scaling q_i . k_j) v_j`` over ``j <= i``, in the model's own frame: queries need no map, outputs
none back. cuDNN, through torch, is the library: on Hopper it is faster than `kvcq.kernels.extend`, which is made for
pages. It makes a plan for each length that it meets, so lengths are rounded up; the rows behind a prompt are seen by
none of its queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# The shortest prompt, the step of lengths, and the longest one that is planned for in advance. One H200, 32 query and 8
# KV heads, d = 128: 1.06 ms with the copies at 8192 tokens, the kernel and its queries 1.74; 0.13 and 0.22 at 2048. At
# 1024, 0.06 and 0.08, but the calls take the host longer: 0.24.
LEAST, STEP, PLANNED = 2048, 512, 16384
HOPPER = 9
WIDEST = 128


def prepare(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
) -> bool:
    """Plan for prompts of `LEAST` to `longest` tokens; tell whether cuDNN attends to them.

    A plan takes 50 to 75 ms and belongs to the thread that asks for it, so this is for the thread that will attend.

    Args:
        heads: Query and KV heads.
        dims: Head dims of keys and values.
        dtype: Served dtype.
        device: Where it attends.
        longest: Tokens of the longest prompt. Beyond `PLANNED` a length is planned when it is first met.
    """
    if dims[0] != dims[1] or dims[0] > WIDEST or longest < LEAST:
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    longest = min(longest + -longest % STEP, PLANNED)
    rows = torch.zeros(longest, heads[0] + 2 * heads[1], dims[0], dtype=dtype, device=device)
    q, k, v = rows.split([heads[0], heads[1], heads[1]], 1)
    heads_first = (x[:LEAST].transpose(0, 1)[None] for x in (q, k, v))
    if not can_use_cudnn_attention(SDPAParams(*heads_first, None, 0.0, True, True)):  # type: ignore[call-arg]
        return False
    out = torch.empty_like(q)
    try:
        for length in range(LEAST, longest + 1, STEP):
            # Plans are for any scale.
            attend_causal(q, k, v, [(0, length)], 1.0, out)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:
        # A head shape that its checks let through and its planner does not: the kernel attends.
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
