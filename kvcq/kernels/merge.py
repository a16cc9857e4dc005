"""Join the partial outputs of a request and lead them out of the frame of values.

For query head i of KV head h and the items j of its request, each with a normalised output o_j, its largest logit m_j
in log2 units and its sum l_j; with a learned sink logit a (in log2 units, ``a - scaling q . mu`` without a softcap)::

    M  = max(m_j, a)           w_j = l_j 2^(m_j - M)           z = sum w_j + 2^(a - M)
    o' = sum w_j o_j / z       m   = sum w_j / z               o = o' R_V^T + nu m

Without a learned sink its term is absent and m is 1; a request that sees nothing gets zeros.

Many items a request take two launches: joining wants many small programs, each with all of its loads in flight, the
product with R_V tiles of rows that share their read of it. Few items are joined by such tiles right away: one launch.
Launches overlap, see `overlap`: R_V is on its way while the items are still worked off.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.kernels.arrays import Tables
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.kernels.overlap import await_last, overlap_of, start_next
from kvcq.kernels.plan import Partials, Plan
from kvcq.kernels.select import MAX_GROUP

LOG2E = math.log2(math.e)

# Coded items of a request, about, up to which one launch is faster: a program reads them one after the other.
JOINED_ITEMS = 12

# One launch: rows of a program, items whose loads are in flight at once, warps.
JOIN_ROWS, JOIN_ITEMS, JOIN_WARPS = 16, 4, 8

# Two launches: tile of the product, warps; bytes of R_V that a program of few rows holds.
ROTATE_ROWS, ROTATE_COLUMNS, ROTATE_WARPS = 16, 32, 4
ROTATED_BYTES = 32768


def mix_shape(rows: int, d_v: int, items: int) -> tuple[int, int]:
    """Return items and channels that a warp reads at once: few channels for latency, whole rows where there are many.

    Args:
        rows: Query heads of all requests.
        d_v: Value head dim.
        items: Of a request, about.
    """
    wide = power_of_two(d_v)
    if rows < 1024:
        return (128, min(wide, 32)) if rows < 128 else (64, min(wide, 64))
    columns = wide if items <= 2048 // wide else min(wide, 64)
    return 2048 // columns, columns


def rotate_columns(rows: int, d_v: int, size: int) -> int:
    """Return the channels of a tile of the product: as many as fit where rows alone cannot fill the device anyway.

    Args:
        rows: Query heads of all requests.
        d_v: Value head dim.
        size: Bytes of an element of R_V.
    """
    wide = power_of_two(d_v)
    return min(wide, ROTATED_BYTES // (wide * size) if rows < 128 else ROTATE_COLUMNS)


def join_columns(d_v: int) -> int:
    """Return the output channels that one launch maps at once: all of them, or 64 where R_V is too large to hold."""
    wide = power_of_two(d_v)
    return wide if wide <= 128 else 64


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

    Precondition: the launch in front on the stream is the decode of this plan and these partials, or one that the next
    launch waits for in whole; and what wrote R_V ran in front of that decode. R_V is read before this launch waits,
    see `overlap`: a merge behind another merge, or behind a launch that lets the next one come before it has waited
    itself, could read R_V while it is still written.

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
    check_tensor("partial.mixed", partial.mixed, (plan.max_batch, q_heads, d_v), torch.float32, device)
    check_tensor("partial.mass", partial.mass, (plan.max_batch, q_heads), torch.float32, device)
    check_tensor("plan.first", plan.first, (plan.max_batch + 1,), torch.int32, device)
    check_tensor("v.dual", dual, (tables.heads, d_v, d_v), dual.dtype, device)
    if nu is not None:
        check_tensor("v.offset", nu, (tables.heads, d_v), torch.float32, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (q_heads,), torch.float32, device)
    if offset is not None:
        check_tensor("offset", offset, (batch, q_heads), torch.float32, device)
    shifted = sinks is not None and offset is not None and softcap is None
    # Tensors in the place of what is absent are never read.
    sink_logits = partial.mass if sinks is None else sinks
    shifts = offset if offset is not None and shifted else partial.mass
    means = partial.mass if nu is None else nu
    rows, wide = batch * group, power_of_two(d_v)
    overlap = overlap_of(device)
    if rotate and plan.parts <= JOINED_ITEMS * batch:
        _join[(triton.cdiv(rows, JOIN_ROWS), tables.heads)](
            partial.o,
            partial.ml,
            plan.first,
            sink_logits,
            shifts,
            dual,
            means,
            out,
            rows,
            scaling * LOG2E,
            GROUP=group,
            D=d_v,
            WIDE=wide,
            ROWS=JOIN_ROWS,
            ITEMS=JOIN_ITEMS,
            COLUMNS=join_columns(d_v),
            SINKS=sinks is not None,
            SHIFTED=shifted,
            CENTRED=nu is not None,
            num_warps=JOIN_WARPS,
            **overlap,
        )
        return
    items, columns = mix_shape(batch * q_heads, d_v, plan.parts // batch)
    _mix[(batch * q_heads, triton.cdiv(d_v, columns))](
        partial.o,
        partial.ml,
        plan.first,
        sink_logits,
        shifts,
        partial.mixed if rotate else out,
        partial.mass,
        q_heads,
        scaling * LOG2E,
        D=d_v,
        COLUMNS=columns,
        ITEMS=items,
        SINKS=sinks is not None,
        SHIFTED=shifted,
        num_warps=1,
        **overlap,
    )
    if not rotate:
        return
    columns = rotate_columns(batch * q_heads, d_v, dual.element_size())
    _rotate[(triton.cdiv(rows, ROTATE_ROWS), tables.heads, triton.cdiv(d_v, columns))](
        partial.mixed,
        partial.mass,
        dual,
        means,
        out,
        rows,
        GROUP=group,
        D=d_v,
        WIDE=wide,
        ROWS=ROTATE_ROWS,
        COLUMNS=columns,
        CENTRED=nu is not None,
        num_warps=ROTATE_WARPS,
        **overlap,
    )


@triton.jit
def _columns(dual, first, D: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return columns first .. first + COLUMNS - 1 of R_V^T, ``[WIDE, COLUMNS]``; R_V lies at `dual`."""
    e = tl.arange(0, WIDE)
    c = first + tl.arange(0, COLUMNS)
    return tl.load(dual + c[None, :] * D + e[:, None], mask=(c < D)[None, :] & (e < D)[:, None], other=0.0)


@triton.jit
def _back(mixed, matrix):
    """Return the product of rows o' and columns of R_V^T."""
    high = mixed.to(matrix.dtype)
    back = tl.dot(high, matrix, input_precision="ieee")
    if matrix.dtype != tl.float32:
        # Two parts of the served dtype carry more bits than the output keeps.
        low = (mixed - high.to(tl.float32)).to(matrix.dtype)
        back = tl.dot(low, matrix, back)
    return back


@triton.jit
def _beside_sink(top, mass, extra):
    """Return the factor of sums that were relative to `top`, their mass by it, and the mass with a learned sink."""
    new_top = tl.maximum(top, extra)
    kept = tl.exp2(top - new_top)
    mass = mass * kept
    return kept, mass, mass + tl.exp2(extra - new_top)


@triton.jit(do_not_specialize=["total"])
def _join(
    o,
    ml,
    first,
    sinks,
    offset,
    dual,
    nu,
    out,
    total,
    scaling,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    CENTRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join and lead back ROWS rows of one KV head; row t is query head ``t mod GROUP`` of request ``t div GROUP``."""
    start_next(OVERLAP)
    kv_head = tl.program_id(1)
    q_heads = tl.num_programs(1) * GROUP
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < total
    # Constants of the layer: on their way while the items are still worked off.
    matrix = _columns(dual + kv_head * (D * D), 0, D, WIDE, COLUMNS)
    await_last(OVERLAP)
    request = t // GROUP
    head = kv_head * GROUP + t % GROUP
    row = request * q_heads + head
    begin = tl.load(first + request, mask=inside, other=0)
    count = tl.load(first + request + 1, mask=inside, other=0) - begin
    e = tl.arange(0, WIDE)
    top = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, tl.max(count, 0), ITEMS):
        # Item by item: a tile of rows, items and channels would cross warps.
        for step in tl.static_range(ITEMS):
            held = start + step < count
            at = (begin + start + step).to(tl.int64) * q_heads + head
            m = tl.load(ml + 2 * at, mask=held, other=-1e30)
            share = tl.load(ml + 2 * at + 1, mask=held, other=0.0)
            part = tl.load(o + at[:, None] * D + e[None, :], mask=held[:, None] & (e < D)[None, :], other=0.0)
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
            extra -= scaling * tl.load(offset + row, mask=inside, other=0.0)
        kept, mass, whole = _beside_sink(top, mass, extra)
        mixed = mixed * kept[:, None]
    # Nothing seen: mass and outputs are zero, and so is what is written.
    inverse = 1.0 / tl.where(whole > 0, whole, 1.0)
    mass = mass * inverse
    mixed = mixed * inverse[:, None]
    for column in tl.static_range(0, D, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        if column > 0:
            matrix = _columns(dual + kv_head * (D * D), column, D, WIDE, COLUMNS)
        back = _back(mixed, matrix)
        if CENTRED:
            back += mass[:, None] * tl.load(nu + kv_head * D + c, mask=c < D, other=0.0)[None, :]
        to = out + row.to(tl.int64)[:, None] * D + c[None, :]
        tl.store(to, back.to(out.dtype.element_ty), mask=inside[:, None] & (c < D)[None, :])


@triton.jit(do_not_specialize=["q_heads"])
def _mix(
    o,
    ml,
    first,
    sinks,
    offset,
    mixed,
    mass,
    q_heads,
    scaling,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEMS: tl.constexpr,
    SINKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the items of one query head of one request; one warp, so that no barrier lies between two steps."""
    start_next(OVERLAP)
    row = tl.program_id(0)
    head = row % q_heads
    request = row // q_heads
    await_last(OVERLAP)
    begin = tl.load(first + request)
    count = tl.load(first + request + 1) - begin
    place = tl.arange(0, ITEMS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = -1e30
    total = 0.0
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, count, ITEMS):
        held = start + place < count
        at = (begin + start + place).to(tl.int64) * q_heads + head
        m = tl.load(ml + 2 * at, mask=held, other=-1e30)
        share = tl.load(ml + 2 * at + 1, mask=held, other=0.0)
        part = tl.load(o + at[:, None] * D + c[None, :], mask=held[:, None] & (c < D)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(m, 0))
        kept = tl.exp2(top - new_top)
        weight = share * tl.exp2(m - new_top)
        total = total * kept + tl.sum(weight, 0)
        sums = sums * kept + tl.sum(part * weight[:, None], 0)
        top = new_top
    whole = total
    if SINKS:
        extra = tl.load(sinks + head) * 1.4426950408889634
        if SHIFTED:
            extra -= scaling * tl.load(offset + row)
        kept, total, whole = _beside_sink(top, total, extra)
        sums = sums * kept
    # Nothing seen: mass and outputs are zero, and so is what is written.
    inverse = 1.0 / tl.where(whole > 0, whole, 1.0)
    tl.store(mixed + row.to(tl.int64) * D + c, (sums * inverse).to(mixed.dtype.element_ty), mask=c < D)
    if tl.program_id(1) == 0:
        tl.store(mass + row, total * inverse)


@triton.jit(do_not_specialize=["total"])
def _rotate(
    mixed,
    mass,
    dual,
    nu,
    out,
    total,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Lead ROWS rows of one KV head back; row t is query head ``t mod GROUP`` of request ``t div GROUP``."""
    start_next(OVERLAP)
    kv_head = tl.program_id(1)
    q_heads = tl.num_programs(1) * GROUP
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < total
    row = (t // GROUP) * q_heads + kv_head * GROUP + t % GROUP
    e = tl.arange(0, WIDE)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    # Constants of the layer: on their way while the items are still joined.
    matrix = _columns(dual + kv_head * (D * D), tl.program_id(2) * COLUMNS, D, WIDE, COLUMNS)
    await_last(OVERLAP)
    x = tl.load(mixed + row.to(tl.int64)[:, None] * D + e[None, :], mask=inside[:, None] & (e < D)[None, :], other=0.0)
    back = _back(x, matrix)
    if CENTRED:
        share = tl.load(mass + row, mask=inside, other=0.0)
        back += share[:, None] * tl.load(nu + kv_head * D + c, mask=c < D, other=0.0)[None, :]
    to = out + row.to(tl.int64)[:, None] * D + c[None, :]
    tl.store(to, back.to(out.dtype.element_ty), mask=inside[:, None] & (c < D)[None, :])


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    mix_types = dict.fromkeys(("o", "ml"), "*fp32") | {"first": "*i32"}
    mix_types |= dict.fromkeys(("sinks", "offset", "mixed", "mass"), "*fp32") | {"q_heads": "i32", "scaling": "fp32"}
    rotate_types = {"mixed": "*fp32", "mass": "*fp32", "dual": "*bf16", "nu": "*fp32", "out": "*bf16", "total": "i32"}
    join_types = mix_types | rotate_types
    join_types = {name: join_types[name] for name in _join.arg_names if name in join_types}
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]] = []
    for d in (64, 80, 96, 128, 256):
        wide = power_of_two(d)
        for rows, group, plain in ((32, 8, True), (32, 1, True), (512, 5, False), (1024, 4, False), (1024, 1, False)):
            items, columns = mix_shape(rows, d, 12)
            constants = {"D": d, "COLUMNS": columns, "ITEMS": items, "SINKS": not plain, "SHIFTED": not plain}
            constants["OVERLAP"] = True
            found.append((f"merge-mix-{d}-items{items}", _mix, mix_types, constants, {"num_warps": 1}))
            folded = mix_types | {"mixed": "*bf16"}
            found.append((f"merge-mix-{d}-items{items}-folded", _mix, folded, constants, {"num_warps": 1}))
            tile = {"GROUP": group, "D": d, "WIDE": wide, "CENTRED": not plain, "OVERLAP": True}
            cut = {"ROWS": ROTATE_ROWS, "COLUMNS": rotate_columns(rows, d, 2)}
            found.append(
                (f"merge-rotate-{d}-group{group}", _rotate, rotate_types, tile | cut, {"num_warps": ROTATE_WARPS})
            )
            cut = {"ROWS": JOIN_ROWS, "ITEMS": JOIN_ITEMS, "COLUMNS": join_columns(d)}
            cut |= {"SINKS": not plain, "SHIFTED": not plain}
            found.append((f"merge-join-{d}-group{group}", _join, join_types, tile | cut, {"num_warps": JOIN_WARPS}))
    # Not all constants depend on rows and group.
    return list({(one[0], str(one[3])): one for one in found}.values())
