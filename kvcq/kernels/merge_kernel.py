"""Device code of `merge`: items joined, and led out of the frame of values, in one launch or in two."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcq.kernels.overlap import await_last, start_next


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
def join_kernel(
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
def mix_kernel(
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
def rotate_kernel(
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
