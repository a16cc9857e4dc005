"""Decode attention through the CUDA kernel: what `kernels.decode` computes, for the shapes that it serves fastest.

The arithmetic is that of `kernels.decode`; `decode.cu` says how it lies on the warps.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.kernels.cuda.compile import Shape, Variant, core, kernel, unserved
from kvcq.kernels.cuda.launch import WARP, config, stream
from kvcq.kernels.decode import check_decode, log2_units
from kvcq.kernels.overlap import overlap_of
from kvcq.kernels.plan import Partials, Plan


def decode_partials_cuda(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    plan: Plan,
    partials: Partials,
    *,
    shape: Shape,
    scaling: float,
    softcap: float | None = None,
    offset: Tensor | None = None,
) -> None:
    """Attend with the newest token of every request, one partial result an item; `merge.merge` joins them.

    One launch on the current stream; its grid depends on shapes alone, and after the first call with these constants
    it neither compiles nor allocates: it can be captured in a CUDA graph.

    Args:
        tables: Constants of the layer.
        cache: What is stored.
        requests: The batch, as `plan` was last updated with.
        q: Mapped queries ``[B, Hq, d]``, bfloat16.
        plan: The work list.
        partials: Written: every element of used items, nothing of unused ones.
        shape: Warps and blocks, from `select.launch_shape`.
        scaling: Factor on products.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        offset: ``q . mu`` float32 ``[B, Hq]``, read with a softcap only; None is zeros.

    Raises:
        UnsupportedError: a codec or geometry without a CUDA kernel.
        ValueError: tensors that do not fit, with the numbers.
        UnavailableError: `cuda.core` is not installed.
    """
    group = check_decode(tables, cache, requests, q, plan, partials, softcap, offset)
    reason = unserved(tables.k.d, tables.v.d, group, tables.words)
    if reason is None and q.dtype != torch.bfloat16:
        reason = f"rows in {q.dtype}: the CUDA kernel has bfloat16"
    if reason is not None:
        raise UnsupportedError(reason, fix="use the Triton kernel")
    loaded = {
        "q": q, "sink_k": cache.sink_k, "sink_v": cache.sink_v, "ring_k": cache.ring_k, "ring_v": cache.ring_v,
        "codebook": tables.codebook,
    }  # fmt: skip
    for name, tensor in loaded.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{name} at address {tensor.data_ptr():#x} is not aligned to 16 bytes")
    variant = Variant(tables.k.d, group, tables.vq, softcap is not None, shape)
    unit, cap = log2_units(scaling, softcap)
    toolkit, device = core(), q.device.index or 0
    overlap = overlap_of(q.device)["OVERLAP"]
    pointers = (
        partials.o, partials.ml, q, cache.pages, tables.codebook, tables.codebook_scale, offset, cache.sink_k,
        cache.sink_v, cache.ring_k, cache.ring_v, requests.page_table, plan.spans, plan.items,
        plan.leads,
    )  # fmt: skip
    numbers = (tables.heads, requests.page_table.stride(0), cache.sink_k.shape[2], cache.ring)
    # Layers of one model may lie on several devices.
    with torch.cuda.device(q.device):
        toolkit.launch(
            stream(torch.cuda.current_stream(q.device).cuda_stream, device),
            config(plan.size * tables.heads, WARP * variant.shape.warps, variant.shared_bytes, overlap),
            kernel(variant, torch.cuda.get_device_capability(q.device), device),
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            *(ctypes.c_int32(number) for number in numbers),
            ctypes.c_float(unit),
            ctypes.c_float(cap),
        )
