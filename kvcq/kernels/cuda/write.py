"""Write through the CUDA kernels: what `kernels.write` does, for the shapes that they serve.

`rows.cuh`, `uniform.cuh` and `write_keys.cu` say how the work lies on the warps. Sums are in an order of their own: on
a border between two roundings, or two words, they may decide otherwise than the Triton kernel, never otherwise for one
token than for thousands.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import LayerCache, Requests, SideTables, Tables
from kvcq.kernels.cuda.compile import HEAD_DIMS, RowsVariant, Shape, core, kernel
from kvcq.kernels.cuda.launch import WARP, config, stream
from kvcq.kernels.select import LOWEST_CAPABILITY, Limits

AFFINE_BYTES = 8

# Warps with tokens of their own read every table once a block; teams share out the work on 32 tokens.
ALONE = Shape(4, 4)
TEAM_WARPS = 16  # of a multiprocessor
# Blocks of a multiprocessor from which on warps are alone, and so many that teams of them are shared out to.
ENOUGH = 1.5
FILLED = 2


@dataclass(frozen=True)
class Tokens:
    """What `kernels.write.write` takes of tokens, checked there.

    Attributes:
        slots, positions, requests, batch: Where each token belongs.
        rows: Outputs for frame rows of keys and values, or None.
        windows: Whether rows are stored in sinks and rings.
        clamped: Counter.
    """

    slots: Tensor
    positions: Tensor
    requests: Tensor
    batch: Requests
    rows: tuple[Tensor, Tensor] | None
    windows: bool
    clamped: Tensor


def device_unserved(dtype: torch.dtype, limits: Limits) -> str | None:
    """Say why no CUDA kernel writes rows of this dtype on a device, None when they do."""
    if dtype != torch.bfloat16:
        return f"rows in {dtype}: the CUDA kernel has bfloat16"
    if limits.hip is not None or limits.capability is None or limits.capability < LOWEST_CAPABILITY:
        return "no NVIDIA GPU of compute capability 8.0 or later"
    return None


def keys_unserved(tables: Tables) -> str | None:
    """Say why no CUDA kernel writes the keys of a layer in vector codes, None when one does."""
    if not tables.vq:
        return "uniform codes: this CUDA kernel has vector codes"
    return _dim_unserved(tables.k.d)


def uniform_unserved(side: SideTables) -> str | None:
    """Say why no CUDA kernel writes a side in uniform codes, None when one does."""
    if (side.groups, side.bits, side.spacing) != (1, 2, "minmax"):
        return f"{side.groups} groups, {side.bits} bits, {side.spacing}: the CUDA kernel has 1, 2 and minmax"
    return _dim_unserved(side.d)


def _dim_unserved(d: int) -> str | None:
    return None if d in HEAD_DIMS else f"head dim {d}: the CUDA kernel has {HEAD_DIMS[0]} or {HEAD_DIMS[1]}"


def choose_rows(
    entry: Literal["write_keys", "write_uniform"], d: int, tokens: int, heads: int, multiprocessors: int
) -> tuple[RowsVariant, int]:
    """Return the kernel for so many tokens and the parts that groups are shared out in. Codes do not depend on it.

    Args:
        entry: Which kernel.
        d: Head dim, 64 or 128.
        tokens: T.
        heads: KV heads, of both sides if both are written.
        multiprocessors: Of the device.
    """
    alone = RowsVariant(entry, d, 1, ALONE)
    if -(-tokens // alone.tokens) * heads >= ENOUGH * multiprocessors:
        return alone, 1
    warps = d // 16
    team = RowsVariant(entry, d, warps, Shape(warps, TEAM_WARPS // warps))
    blocks = -(-tokens // team.tokens) * heads
    parts = min(FILLED * multiprocessors // blocks, d // 4 // warps) if entry == "write_keys" else 1
    return team, max(1, parts)


def write_rows(
    tables: Tables, cache: LayerCache, k: Tensor, v: Tensor, tokens: Tokens, limits: Limits, *, values: bool
) -> None:
    """Write keys, and values if `values`: in one launch, but for vector codes of another head dim than that of values.

    Args:
        tables: Constants of the layer.
        cache: Written to.
        k: Keys ``[T, H, d_k]`` bfloat16.
        v: Values ``[T, H, d_v]``, likewise.
        tokens: Where they belong.
        limits: Of the device.
        values: Whether values are written; uniform keys are only with them.

    Raises:
        UnsupportedError: a codec or geometry without a CUDA kernel.
        ValueError: rows to write that are not aligned.
        UnavailableError: `cuda.core` is not installed.
    """
    if not tables.vq:
        write_uniform(tables, cache, k, v, tokens, limits, keys=True)
        return
    together = values and tables.k.d == tables.v.d
    write_keys(tables, cache, k, v if together else None, tokens, limits)
    if values and not together:
        write_uniform(tables, cache, k, v, tokens, limits, keys=False)


def write_keys(tables: Tables, cache: LayerCache, k: Tensor, v: Tensor | None, tokens: Tokens, limits: Limits) -> None:
    """Write keys in vector codes, values in uniform ones beside them, in one launch on the current stream.

    After the first call for a layer and kernel it neither compiles nor allocates: it can be captured in a CUDA graph.

    Args:
        tables: Constants of the layer.
        cache: Written to.
        k: Keys ``[T, H, d]`` bfloat16.
        v: Values ``[T, H, d]``, likewise, or None: values are not written.
        tokens: Where they belong.
        limits: Of the device.

    Raises:
        UnsupportedError: a codec or geometry without a CUDA kernel.
        ValueError: rows to write that are not aligned.
        UnavailableError: `cuda.core` is not installed.
    """
    reason = keys_unserved(tables) or device_unserved(k.dtype, limits)
    if v is not None:
        reason = reason or uniform_unserved(tables.v) or (None if tables.k.d == tables.v.d else "two head dims")
    if reason is not None:
        raise UnsupportedError(reason, fix="use the Triton kernel")
    count, heads, d = k.shape
    variant, parts = choose_rows("write_keys", d, count, heads, limits.multiprocessors)
    tiles, batch, out = -(-count // variant.tokens), tokens.batch, (None, None) if tokens.rows is None else tokens.rows
    of_values: tuple[Tensor | None, ...] = (None,) * 6
    if v is not None:
        of_values = (v, tables.value_map, tables.v.shift, cache.sink_v, cache.ring_v, out[1])
        _check_aligned(*of_values[3:])
    _check_aligned(cache.pages, cache.sink_k, cache.ring_k, out[0])
    pointers = (
        k, tables.key_map, tables.k.shift, cache.sink_k, cache.ring_k, out[0], *of_values,
        tables.key_search, tables.codebook_scale, cache.pages, tokens.slots, tokens.positions, tokens.requests,
        batch.slots, batch.lengths, tokens.clamped,
    )  # fmt: skip
    side = (0, 0) if v is None else (v.stride(0), v.stride(1))
    numbers = (*_numbers(tables, cache, count, tokens), tiles, parts, int(v is not None))
    numbers += (_stripe(variant, tiles * heads, limits.multiprocessors), tables.v.rank)
    grid = (tiles * heads * (parts + (v is not None)), 1, 1)
    _launch(variant, k.device, grid, pointers, (k.stride(0), k.stride(1), *side), numbers)


def _stripe(variant: RowsVariant, blocks: int, multiprocessors: int) -> int:
    """Return how many blocks of keys come before as many of values.

    Where warps are alone four blocks fit on a multiprocessor, and two of them shall be of keys from the start; they are
    dealt out to the multiprocessors one after another.

    Args:
        variant: The kernel.
        blocks: Of either side, keys counted once.
        multiprocessors: Of the device.
    """
    if variant.team > 1:
        return blocks
    return max(1, multiprocessors if blocks <= 2 * multiprocessors else 2 * multiprocessors)


def write_uniform(
    tables: Tables, cache: LayerCache, k: Tensor, v: Tensor, tokens: Tokens, limits: Limits, *, keys: bool
) -> None:
    """Write values in uniform codes, keys too if `keys`, in one launch on the current stream, as `write_keys` does.

    Args:
        tables: Constants of the layer.
        cache: Written to.
        k: Keys ``[T, H, d_k]`` bfloat16.
        v: Values ``[T, H, d_v]``, likewise; with `keys` d_k = d_v.
        tokens: Where they belong.
        limits: Of the device.
        keys: Whether keys are written.

    Raises:
        UnsupportedError: a codec or geometry without a CUDA kernel.
        ValueError: rows to write that are not aligned.
        UnavailableError: `cuda.core` is not installed.
    """
    reason = uniform_unserved(tables.v) or device_unserved(v.dtype, limits)
    if keys:
        reason = reason or uniform_unserved(tables.k) or (None if tables.k.d == tables.v.d else "two head dims")
    if reason is not None:
        raise UnsupportedError(reason, fix="use the Triton kernel")
    count, heads, d = v.shape
    sides = 2 if keys else 1
    variant, _ = choose_rows("write_uniform", d, count, heads * sides, limits.multiprocessors)
    batch, out = tokens.batch, (None, None) if tokens.rows is None else tokens.rows
    _check_aligned(cache.pages, cache.sink_k, cache.ring_k, cache.sink_v, cache.ring_v, *out)
    pointers = (
        k, tables.key_map if keys else None, tables.k.shift, cache.sink_k, cache.ring_k, out[0],
        v, tables.value_map, tables.v.shift, cache.sink_v, cache.ring_v, out[1],
        cache.pages, tokens.slots, tokens.positions, tokens.requests, batch.slots, batch.lengths, tokens.clamped,
    )  # fmt: skip
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    numbers = (*_numbers(tables, cache, count, tokens), tables.k.rank, tables.v.rank)
    _launch(variant, v.device, (-(-count // variant.tokens), heads, sides), pointers, strides, numbers)


def _numbers(tables: Tables, cache: LayerCache, count: int, tokens: Tokens) -> tuple[int, ...]:
    """Return what the kernels take of sizes."""
    affine = tables.block_bytes - PAGE_TOKENS * AFFINE_BYTES * tables.words
    return (
        count, tables.heads, cache.windows.sink, cache.ring, tables.block_bytes, affine, tables.words,
        int(tokens.windows),
    )  # fmt: skip


def _check_aligned(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"rows {list(tensor.shape)} at address {tensor.data_ptr():#x} are not aligned to 16 bytes")


def _launch(
    variant: RowsVariant,
    device: torch.device,
    grid: tuple[int, int, int],
    pointers: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    numbers: tuple[int, ...],
) -> None:
    with torch.cuda.device(device):
        core().launch(
            stream(torch.cuda.current_stream(device).cuda_stream, device.index or 0),
            config(grid, WARP * variant.shape.warps, variant.shared_bytes),
            kernel(variant, torch.cuda.get_device_capability(device), device.index or 0),
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            *(ctypes.c_int64(number) for number in strides),
            *(ctypes.c_int32(number) for number in numbers),
        )
