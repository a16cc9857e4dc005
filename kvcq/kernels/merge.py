"""Join the partial outputs of a request and lead them out of the frame of values.

For query head i of KV head h and the items j of its request, each with a normalised output o_j, its largest logit m_j
in log2 units and its sum l_j; with a learned sink logit a (in log2 units, ``a - scaling q . mu`` without a softcap)::

    M  = max(m_j, a)           w_j = l_j 2^(m_j - M)           z = sum w_j + 2^(a - M)
    o' = sum w_j o_j / z       m   = sum w_j / z               o = o' R_V^T + nu m

Without a learned sink its term is absent and m is 1; a request that sees nothing gets zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.kernels.arrays import Tables
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.kernels.plan import Partials, Plan

LOG2E = math.log2(math.e)
MAX_GROUP = 16

# Rows, a row being one query head of one request, from which sixteen share a program and its read of R_V.
SHARED_ROWS = 512
MIN_DOT = 16


@dataclass(frozen=True)
class Shape:
    """How one program is cut.

    Attributes:
        rows: Query heads of one KV head, over requests: 1 or 16.
        items: Items read at once.
        columns: Output channels mapped at once.
        warps: Warps.
    """

    rows: int
    items: int
    columns: int
    warps: int


def launch_shape(batch: int, q_heads: int, d_v: int) -> Shape:
    """Return the cut for a batch: single rows for latency, sixteen where reading R_V once a row costs more."""
    wide = power_of_two(d_v)
    if batch * q_heads < SHARED_ROWS:
        return Shape(1, max(8192 // wide, 16), min(wide, 16384 // wide), 8)
    return Shape(MIN_DOT, 4, min(wide, 64), 4)


def merge(
    tables: Tables,
    plan: Plan,
    partial: Partials,
    out: Tensor,
    *,
    sinks: Tensor | None,
    offset: Tensor | None,
    scaling: float,
    softcap: float | None,
    rotate: bool,
) -> None:
    """Write the attention outputs of a step; every element of `out` is written.

    Args:
        tables: Constants of the layer.
        plan: Updated for this step.
        partial: What the items of the plan gave.
        out: Written, ``[B, Hq, d_v]`` in the served dtype.
        sinks: Learned sink logits float32 ``[Hq]``, or None.
        offset: ``q . mu`` float32 ``[B, Hq]``, or None for keys that are not centred; only learned sinks read it.
        scaling: Factor on products.
        softcap: The cap that the logits of the items went through, or None.
        rotate: False writes o' and leaves the rotation and nu to the caller.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, with the numbers.
        UnsupportedError: no kernel on this platform.
    """
    device = out.device
    check_platform(device)
    if out.ndim != 3:
        raise ValueError(f"out has shape {list(out.shape)}, not [B, Hq, d_v]")
    batch, q_heads, d_v = out.shape
    group = q_heads // tables.heads
    if group * tables.heads != q_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{q_heads} query heads on {tables.heads} KV heads: groups have 1 to {MAX_GROUP}")
    if not 1 <= batch <= plan.max_batch:
        raise ValueError(f"{batch} requests: this plan has room for 1 to {plan.max_batch}")
    dual, nu = tables.v.dual, tables.v.offset
    check_tensor("out", out, (batch, q_heads, tables.v.d), dual.dtype, device)
    check_tensor("partial.o", partial.o, (plan.size, q_heads, d_v), torch.float32, device)
    check_tensor("partial.ml", partial.ml, (plan.size, q_heads, 2), torch.float32, device)
    check_tensor("plan.first", plan.first, (plan.max_batch + 1,), torch.int32, device)
    check_tensor("v.dual", dual, (tables.heads, d_v, d_v), dual.dtype, device)
    if nu is not None:
        check_tensor("v.offset", nu, (tables.heads, d_v), torch.float32, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (q_heads,), torch.float32, device)
    shifted = sinks is not None and offset is not None and softcap is None
    if offset is not None:
        check_tensor("offset", offset, (batch, q_heads), torch.float32, device)
    shape = launch_shape(batch, q_heads, d_v)
    _merge[(triton.cdiv(batch * group, shape.rows), tables.heads)](
        partial.o,
        partial.ml,
        plan.first,
        dual,
        out if nu is None else nu,
        out if sinks is None else sinks,
        offset if shifted else out,
        out,
        batch * group,
        scaling * LOG2E,
        GROUP=group,
        D=d_v,
        WIDE=power_of_two(d_v),
        ROWS=shape.rows,
        ITEMS=shape.items,
        COLUMNS=shape.columns,
        ROTATE=rotate,
        CENTRED=rotate and nu is not None,
        SINKS=sinks is not None,
        SHIFTED=shifted,
        num_warps=shape.warps,
    )


@triton.jit
def _matrix(dual, head, first, D: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows first .. first + COLUMNS - 1 of R_V ``[COLUMNS, WIDE]``, zeros outside."""
    c = first + tl.arange(0, COLUMNS)
    e = tl.arange(0, WIDE)
    at = dual + head * (D * D) + c[:, None] * D + e[None, :]
    return tl.load(at, mask=(c[:, None] < D) & (e[None, :] < D), other=0.0)


@triton.jit(do_not_specialize=["total"])
def _merge(
    o,
    ml,
    first,
    dual,
    nu,
    sinks,
    offset,
    out,
    total,
    scaling,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTATE: tl.constexpr,
    CENTRED: tl.constexpr,
    SINKS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Merge ROWS rows of one KV head; row t is query head ``t mod GROUP`` of request ``t div GROUP``."""
    kv_head = tl.program_id(1)
    q_heads = tl.num_programs(1) * GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < total
    request = row // GROUP
    head = kv_head * GROUP + row % GROUP
    begin = tl.load(first + request, mask=inside, other=0)
    count = tl.load(first + request + 1, mask=inside, other=0) - begin
    ahead: tl.constexpr = ROTATE and ROWS == 1 and COLUMNS == WIDE
    if ahead:
        # Asked for before the items: its latency is hidden behind theirs.
        matrix = _matrix(dual, kv_head, 0, D, WIDE, COLUMNS)
    e = tl.arange(0, WIDE)
    top = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, tl.max(count, 0), ITEMS):
        if ROWS == 1:
            place = start + tl.arange(0, ITEMS)
            held = place[None, :] < count[:, None]
            at = (begin[:, None] + place[None, :]).to(tl.int64) * q_heads + head[:, None]
            m = tl.load(ml + 2 * at, mask=held, other=-1e30)
            share = tl.load(ml + 2 * at + 1, mask=held, other=0.0)
            read = held[:, :, None] & (e < D)[None, None, :]
            part = tl.load(o + at[:, :, None] * D + e[None, None, :], mask=read, other=0.0)
            new_top = tl.maximum(top, tl.max(m, 1))
            kept = tl.exp2(top - new_top)
            weight = share * tl.exp2(m - new_top[:, None])
            mass = mass * kept + tl.sum(weight, 1)
            mixed = mixed * kept[:, None] + tl.sum(part * weight[:, :, None], 1)
            top = new_top
        else:
            # Item by item: a tile of rows, items and channels would cross warps.
            for step in tl.static_range(ITEMS):
                held = start + step < count
                at = (begin + start + step).to(tl.int64) * q_heads + head
                m = tl.load(ml + 2 * at, mask=held, other=-1e30)
                share = tl.load(ml + 2 * at + 1, mask=held, other=0.0)
                read = held[:, None] & (e < D)[None, :]
                part = tl.load(o + at[:, None] * D + e[None, :], mask=read, other=0.0)
                new_top = tl.maximum(top, m)
                kept = tl.exp2(top - new_top)
                weight = share * tl.exp2(m - new_top)
                mass = mass * kept + weight
                mixed = mixed * kept[:, None] + part * weight[:, None]
                top = new_top
    whole = mass
    if SINKS:
        extra = tl.load(sinks + head) * 1.4426950408889634
        if SHIFTED:
            extra -= scaling * tl.load(offset + request * q_heads + head, mask=inside, other=0.0)
        new_top = tl.maximum(top, extra)
        kept = tl.exp2(top - new_top)
        mass = mass * kept
        mixed = mixed * kept[:, None]
        whole = mass + tl.exp2(extra - new_top)
    # Nothing seen: mass and outputs are zero, and so is what is written.
    inverse = 1.0 / tl.where(whole > 0, whole, 1.0)
    mass = mass * inverse
    mixed = mixed * inverse[:, None]
    if not ROTATE:
        to = out + (request.to(tl.int64) * q_heads + head)[:, None] * D + e[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=inside[:, None] & (e < D)[None, :])
    else:
        # A product of matrices has 16 rows: a single one is repeated, and the first one kept.
        tile: tl.constexpr = ROWS if ROWS >= 16 else 16
        mixed = tl.broadcast_to(mixed, [tile, WIDE])
        mass = tl.broadcast_to(mass, [tile])
        place = tl.arange(0, tile)
        row = tl.program_id(0) * ROWS + place
        inside = (place < ROWS) & (row < total)
        to = out + ((row // GROUP).to(tl.int64) * q_heads + kv_head * GROUP + row % GROUP)[:, None] * D
        high = mixed.to(dual.dtype.element_ty)
        for column in tl.static_range(0, D, COLUMNS):
            c = column + tl.arange(0, COLUMNS)
            if not ahead:
                matrix = _matrix(dual, kv_head, column, D, WIDE, COLUMNS)
            back = tl.dot(high, tl.trans(matrix), input_precision="ieee")
            if dual.dtype.element_ty != tl.float32:
                # Two parts of the served dtype carry more bits than the output keeps.
                low = (mixed - high.to(tl.float32)).to(matrix.dtype)
                back = tl.dot(low, tl.trans(matrix), back)
            if CENTRED:
                back += mass[:, None] * tl.load(nu + kv_head * D + c, mask=c < D, other=0.0)[None, :]
            tl.store(to + c[None, :], back.to(out.dtype.element_ty), mask=inside[:, None] & (c < D)[None, :])


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    floats = dict.fromkeys(("o", "ml", "nu", "sinks", "offset"), "*fp32")
    signature = floats | {"first": "*i32", "dual": "*bf16", "out": "*bf16", "total": "i32", "scaling": "fp32"}
    order = ("o", "ml", "first", "dual", "nu", "sinks", "offset", "out", "total", "scaling")
    found = []
    for d in (64, 80, 96, 128, 256):
        for batch, group, plain in ((1, 8, True), (1, 5, False), (128, 4, True), (128, 3, False)):
            shape = launch_shape(batch, 8 * group, d)
            for rotate in (True, False) if plain else (True,):
                constants = {
                    "GROUP": group,
                    "D": d,
                    "WIDE": power_of_two(d),
                    "ROWS": shape.rows,
                    "ITEMS": shape.items,
                    "COLUMNS": shape.columns,
                    "ROTATE": rotate,
                    "CENTRED": rotate and not plain,
                    "SINKS": not plain,
                    "SHIFTED": not plain,
                }
                name = f"merge-{d}-rows{shape.rows}-group{group}{'' if rotate else '-unrotated'}"
                types = {key: signature[key] for key in order}
                found.append((name, _merge, types, constants, {"num_warps": shape.warps}))
    return found
