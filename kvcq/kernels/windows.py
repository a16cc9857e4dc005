"""Copy the exact rows of a chunk into sinks and rings, once the chunk's queries have read what the rings held before.

For every token at position p of a request of length n, its own included: ``sink[p] = row`` where ``p < S`` and
``ring[p mod R] = row`` where ``p >= n - R``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.kernels.arrays import LayerCache, Requests
from kvcq.kernels.checks import check_platform, check_tensor

TOKENS = 16


@triton.jit
def _copy(
    rows, sinks, ring, token, sink, recent, position, place, head, heads, S, R, D: tl.constexpr, PAD: tl.constexpr
):
    channel = tl.arange(0, PAD)
    inside = (channel < D)[None, :]
    at = (token.to(tl.int64) * heads + head) * D
    row = tl.load(rows + at[:, None] + channel[None, :], mask=(sink | recent)[:, None] & inside, other=0.0)
    tl.store(sinks + ((place * S + position) * D)[:, None] + channel[None, :], row, mask=sink[:, None] & inside)
    tl.store(ring + ((place * R + position % R) * D)[:, None] + channel[None, :], row, mask=recent[:, None] & inside)


@triton.jit(do_not_specialize=["tokens", "S", "R"])
def windows_kernel(
    k, v, slots, positions, requests, buffers, lengths, sink_k, sink_v, ring_k, ring_v, tokens, heads, S, R,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Copy what the windows hold of M tokens of one head."""
    head = tl.program_id(1)
    token = tl.program_id(0) * M + tl.arange(0, M)
    given = token < tokens
    if SLOTS:
        given = given & (tl.load(slots + token, mask=given, other=-1) >= 0)
    request = tl.load(requests + token, mask=given, other=0)
    position = tl.load(positions + token, mask=given, other=0)
    length = tl.load(lengths + request, mask=given, other=0)
    sink = given & (position < S)
    recent = given & (position >= length - R)
    # Of a long chunk most tokens are in neither.
    if tl.max((sink | recent).to(tl.int32), 0) > 0:
        place = tl.load(buffers + request, mask=given, other=0).to(tl.int64) * heads + head
        _copy(k, sink_k, ring_k, token, sink, recent, position, place, head, heads, S, R, DK, PK)
        _copy(v, sink_v, ring_v, token, sink, recent, position, place, head, heads, S, R, DV, PV)


def store_windows(
    cache: LayerCache,
    rows: tuple[Tensor, Tensor],
    positions: Tensor,
    requests: Tensor,
    batch: Requests,
    slots: Tensor | None = None,
) -> None:
    """Copy frame rows of a chunk into sinks and rings.

    Args:
        cache: Written to.
        rows: r ``[T, H, d_k]`` and v' ``[T, H, d_v]``, served dtype.
        positions: int32 ``[T]``.
        requests: int32 ``[T]``, row of each token in `batch`.
        batch: The requests, these tokens included in their lengths.
        slots: int64 ``[T]`` as `write` takes them: tokens with a negative one are left out. None: all are stored.

    Raises:
        UnsupportedError: a platform without kernels.
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    tokens, heads, d_k, d_v = _check(cache, rows, positions, requests, batch, slots)
    if tokens == 0:
        return
    windows_kernel[(triton.cdiv(tokens, TOKENS), heads)](
        *rows, positions if slots is None else slots, positions, requests, batch.slots, batch.lengths,
        cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, tokens, heads, cache.windows.sink, cache.ring,
        SLOTS=slots is not None, **_constants(d_k, d_v), num_warps=4,
    )  # fmt: skip


def _constants(d_k: int, d_v: int) -> dict[str, Any]:
    padded = {"PK": triton.next_power_of_2(d_k), "PV": triton.next_power_of_2(d_v)}
    return {"DK": d_k, "DV": d_v, **padded, "M": TOKENS}


def _check(
    cache: LayerCache,
    rows: tuple[Tensor, Tensor],
    positions: Tensor,
    requests: Tensor,
    batch: Requests,
    slots: Tensor | None,
) -> tuple[int, int, int, int]:
    """Check every assumption of the kernel and return T, H, d_k and d_v."""
    k, v = rows
    check_platform(k.device)
    tokens, heads, d_k = k.shape
    d_v, served, buffers = v.shape[2], k.dtype, cache.ring_k.shape[0]
    expected: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("rows[0]", k, served, (tokens, heads, d_k)),
        ("rows[1]", v, served, (tokens, heads, d_v)),
        ("sink_k", cache.sink_k, served, (buffers, heads, cache.windows.sink, d_k)),
        ("sink_v", cache.sink_v, served, (buffers, heads, cache.windows.sink, d_v)),
        ("ring_k", cache.ring_k, served, (buffers, heads, cache.ring, d_k)),
        ("ring_v", cache.ring_v, served, (buffers, heads, cache.ring, d_v)),
        ("positions", positions, torch.int32, (tokens,)),
        ("requests", requests, torch.int32, (tokens,)),
        ("slots", slots, torch.int64, (tokens,)),
        ("batch.slots", batch.slots, torch.int32, (batch.batch,)),
        ("batch.lengths", batch.lengths, torch.int32, (batch.batch,)),
    ]
    for name, tensor, dtype, shape in expected:
        if tensor is not None:
            check_tensor(name, tensor, shape, dtype, k.device)
    return tokens, heads, d_k, d_v


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Return what to compile for a check without a GPU: name, kernel, signature, constants, options."""
    signature = {"k": "*bf16", "v": "*bf16", "slots": "*i64"}
    signature |= dict.fromkeys(("positions", "requests", "buffers", "lengths"), "*i32")
    signature |= dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v"), "*bf16")
    signature |= dict.fromkeys(("tokens", "heads", "S", "R"), "i32")
    found = []
    for d_k, d_v in ((16, 16), (80, 80), (128, 128), (192, 128), (256, 256)):
        constants = _constants(d_k, d_v) | {"SLOTS": True}
        every = signature | dict.fromkeys(constants, "constexpr")
        found.append((f"windows-{d_k}-{d_v}", windows_kernel, every, constants, {"num_warps": 4}))
    return found
