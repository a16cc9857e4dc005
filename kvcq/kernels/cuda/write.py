"""Write keys in vector codes through the CUDA kernel: the keys' half of `kernels.write`, for the shapes that it serves.

`write_keys.cu` says how the work lies on the warps. Its rows and sums are in an order of their own: on a border between
two words, or two roundings, it may decide otherwise than the Triton kernel, never otherwise for one token than for
thousands.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.kernels.cuda.compile import HEAD_DIMS, KeysVariant, Shape, core, kernel
from kvcq.kernels.cuda.launch import WARP, config, stream
from kvcq.kernels.select import LOWEST_CAPABILITY, Limits

PAGE_TOKENS = 64
AFFINE_BYTES = 8

# Warps with tokens of their own read every table once a block; teams share out the groups of 32 tokens.
ALONE = Shape(4, 4)
TEAM_BLOCKS = 2
# Blocks of a multiprocessor from which on warps are alone.
FILLED = 2


def keys_unserved(d_k: int, vq: bool, dtype: torch.dtype, limits: Limits) -> str | None:
    """Say why the CUDA kernel does not write the keys of a layer, None when it does.

    Args:
        d_k: Key head dim.
        vq: Keys are in vector codes.
        dtype: Served dtype.
        limits: Of the device.
    """
    if not vq:
        return "uniform codes: the CUDA kernel has vector codes"
    if d_k not in HEAD_DIMS:
        return f"head dim {d_k}: the CUDA kernel has {HEAD_DIMS[0]} or {HEAD_DIMS[1]}"
    if dtype != torch.bfloat16:
        return f"rows in {dtype}: the CUDA kernel has bfloat16"
    if limits.hip is not None or limits.capability is None or limits.capability < LOWEST_CAPABILITY:
        return "no NVIDIA GPU of compute capability 8.0 or later"
    return None


def choose_keys(d_k: int, tokens: int, heads: int, multiprocessors: int) -> tuple[KeysVariant, int]:
    """Return the kernel for so many tokens and the parts that its groups are shared out in. Codes do not depend on it.

    Args:
        d_k: Key head dim, 64 or 128.
        tokens: T.
        heads: KV heads.
        multiprocessors: Of the device.
    """
    alone = KeysVariant(d_k, 1, ALONE)
    if -(-tokens // alone.tokens) * heads >= FILLED * multiprocessors:
        return alone, 1
    warps = d_k // 16
    team = KeysVariant(d_k, warps, Shape(warps, TEAM_BLOCKS * 8 // warps))
    blocks = -(-tokens // team.tokens) * heads
    return team, max(1, min(FILLED * multiprocessors // blocks, d_k // 4 // warps))


def write_keys(
    tables: Tables,
    cache: LayerCache,
    k: Tensor,
    *,
    slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    batch: Requests,
    rows: Tensor | None,
    windows: bool,
    clamped: Tensor,
    limits: Limits,
) -> None:
    """Code keys into their pages and keep their exact rows, in one launch on the current stream.

    After the first call for a layer and kernel it neither compiles nor allocates: it can be captured in a CUDA graph.

    Args:
        tables: Constants of the layer.
        cache: Written to: keys and their affine halves, sinks and rings of keys.
        k: Keys ``[T, H, d_k]`` bfloat16.
        slots: As in `kernels.write.write`, which has checked all of them.
        positions: Likewise.
        requests: Likewise.
        batch: Likewise.
        rows: Output ``[T, H, d_k]`` for frame rows, or None.
        windows: Whether rows are stored in sinks and rings.
        clamped: Likewise.
        limits: Of the device.

    Raises:
        UnsupportedError: a codec or geometry without a CUDA kernel.
        ValueError: rows to write that are not aligned.
        UnavailableError: `cuda.core` is not installed.
    """
    reason = keys_unserved(tables.k.d, tables.vq, k.dtype, limits)
    if reason is not None or tables.key_search is None:
        raise UnsupportedError(str(reason), fix="use the Triton kernel")
    for name, tensor in (("sink_k", cache.sink_k), ("ring_k", cache.ring_k), ("rows[0]", rows), ("pages", cache.pages)):
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{name} at address {tensor.data_ptr():#x} is not aligned to 16 bytes")
    tokens, heads, d = k.shape
    variant, parts = choose_keys(d, tokens, heads, limits.multiprocessors)
    device = k.device.index or 0
    pointers = (
        k, tables.key_map, tables.k.shift, tables.key_search, tables.codebook_scale, cache.pages, slots, positions,
        requests, batch.slots, batch.lengths, cache.sink_k, cache.ring_k, rows, clamped,
    )  # fmt: skip
    affine = tables.block_bytes - PAGE_TOKENS * AFFINE_BYTES * tables.words
    numbers = (
        tokens, heads, cache.sink_k.shape[2], cache.ring, tables.block_bytes, affine, tables.words, int(windows),
    )  # fmt: skip
    grid = (-(-tokens // variant.tokens), heads, parts)
    with torch.cuda.device(k.device):
        core().launch(
            stream(torch.cuda.current_stream(k.device).cuda_stream, device),
            config(grid, WARP * variant.shape.warps, variant.shared_bytes),
            kernel(variant, torch.cuda.get_device_capability(k.device), device),
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            *(ctypes.c_int64(number) for number in (k.stride(0), k.stride(1))),
            *(ctypes.c_int32(number) for number in numbers),
        )
