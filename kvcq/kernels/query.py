"""Map queries into the frame of keys.

For query head i of KV head h = i // group::

    q~ = q S_h                 products with frame rows: q~ . r = q . (k - mu)
    offset = q . mu_h          what those lack; softcap and learned sinks need it back
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import Tables
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.kernels.select import MAX_GROUP


@dataclass(frozen=True)
class Shape:
    """How one program is cut: rows of one KV head, output channels, warps."""

    rows: int
    columns: int
    warps: int


def launch_shape(tokens: int, q_heads: int, d_k: int) -> Shape:
    """Return the cut: small tiles, many programs for a decode step; large ones for a chunk."""
    wide, rows = power_of_two(d_k), tokens * q_heads
    if rows < 1024:
        return Shape(16, min(wide, 32), 4)
    if rows < 4096:
        return Shape(32, min(wide, 64, 8192 // wide), 4)
    # Larger tiles of wider heads exceed the 64 KB of shared memory that small devices have.
    return Shape(64 if rows < 65536 or wide > 128 else 128, min(wide, 64, 8192 // wide), 4)


def map_queries(tables: Tables, q: Tensor, out: Tensor, offset: Tensor | None) -> None:
    """Write ``q~ = q S`` and, on demand, ``q . mu``.

    Args:
        tables: Constants of the layer.
        q: Post-RoPE queries ``[T, Hq, d_k]`` in the served dtype, the last dimension contiguous.
        out: Written, ``[T, Hq, d_k]`` in the served dtype, contiguous.
        offset: Written, float32 ``[T, Hq]``; zeros for keys that are not centred. None: not computed.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, with the numbers.
        UnsupportedError: no kernel for this group or on this platform.
    """
    device = out.device
    check_platform(device)
    if q.ndim != 3:
        raise ValueError(f"q has shape {list(q.shape)}, not [T, Hq, d_k]")
    tokens, q_heads, d_k = q.shape
    group = q_heads // tables.heads
    if group * tables.heads != q_heads or not 1 <= group <= MAX_GROUP:
        raise UnsupportedError(f"{q_heads} query heads on {tables.heads} KV heads: groups have 1 to {MAX_GROUP}")
    dual, mu = tables.k.dual, tables.k.offset
    check_tensor("q", q, (tokens, q_heads, tables.k.d), dual.dtype, device, contiguous=False)
    check_tensor("out", out, (tokens, q_heads, d_k), dual.dtype, device)
    check_tensor("k.dual", dual, (tables.heads, d_k, d_k), dual.dtype, device)
    if mu is not None:
        check_tensor("k.offset", mu, (tables.heads, d_k), torch.float32, device)
    if offset is not None:
        check_tensor("offset", offset, (tokens, q_heads), torch.float32, device)
    if tokens == 0:
        return
    shape = launch_shape(tokens, q_heads, d_k)
    grid = (triton.cdiv(tokens * group, shape.rows), tables.heads, triton.cdiv(d_k, shape.columns))
    _map[grid](
        q,
        dual,
        dual if mu is None else mu,
        out,
        out if offset is None else offset,
        tokens * group,
        q.stride(0),
        q.stride(1),
        GROUP=group,
        D=d_k,
        WIDE=power_of_two(d_k),
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        OFFSET=offset is not None,
        CENTRED=mu is not None,
        num_warps=shape.warps,
    )


@triton.jit(do_not_specialize=["total"])
def _map(
    q,
    dual,
    mu,
    out,
    offset,
    total,
    token_stride,
    head_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Map ROWS rows of one KV head; row t is query head ``t mod GROUP`` of token ``t div GROUP``."""
    kv_head = tl.program_id(1)
    q_heads = tl.num_programs(1) * GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < total
    token = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, WIDE)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    from_row = q + token * token_stride + head * head_stride
    x = tl.load(from_row[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    at = dual + kv_head * (D * D) + d[:, None] * D + c[None, :]
    matrix = tl.load(at, mask=(d < D)[:, None] & (c < D)[None, :], other=0.0)
    mapped = tl.dot(x, matrix, input_precision="ieee").to(out.dtype.element_ty)
    to = token * q_heads + head
    tl.store(out + to[:, None] * D + c[None, :], mapped, mask=inside[:, None] & (c < D)[None, :])
    # Nested: OFFSET is known to the compiler, which then drops the branch.
    if OFFSET:  # noqa: SIM102
        if tl.program_id(2) == 0:
            value = tl.zeros([ROWS], tl.float32)
            if CENTRED:
                mean = tl.load(mu + kv_head * D + d, mask=d < D, other=0.0)
                value = tl.sum(x.to(tl.float32) * mean[None, :], 1)
            tl.store(offset + to, value, mask=inside)


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    pointers = {"q": "*bf16", "dual": "*bf16", "mu": "*fp32", "out": "*bf16", "offset": "*fp32"}
    signature = pointers | dict.fromkeys(("total", "token_stride", "head_stride"), "i32")
    found = []
    for d in (64, 80, 96, 128, 256):
        for tokens, group, centred in ((1, 8, False), (1, 5, True), (1, 1, True), (8192, 4, True), (8192, 1, False)):
            shape = launch_shape(tokens, 8 * group, d)
            constants = {
                "GROUP": group,
                "D": d,
                "WIDE": power_of_two(d),
                "ROWS": shape.rows,
                "COLUMNS": shape.columns,
                "OFFSET": centred,
                "CENTRED": centred,
            }
            options = {"num_warps": shape.warps}
            found.append((f"query-{d}-rows{shape.rows}-group{group}", _map, signature, constants, options))
    return found
