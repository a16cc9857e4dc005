"""The kernel of decode attention, see `decode` for what it computes.

The arithmetic of a coded tile: with r = s code + b a row's product is ``s (q~ . code) + b sum(q~)``, and ``q~ . code``
runs on the integer tensor cores: q~ is rounded to 15 bits of its largest element and split into two int8 digits, which
fill neighbouring columns. ``sum_j p_j v'_j = sum_j (p_j s_j) code_j + sum_j p_j b_j`` likewise, with p s in 14 bits of
the tile's largest. The operands are swapped (tokens and channels fill the rows, heads the columns), and one warp works
through an item alone, so that nothing ever waits at a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcq.kernels.bits import coordinates, high_half, low_half, plane, plane_pair, query_digit, weight_digits
from kvcq.kernels.overlap import await_last, start_next

NOTHING = tl.constexpr(-1e30)
Q_STEPS = tl.constexpr(32512.0)
P_STEPS = tl.constexpr(16256.0)


@triton.jit
def _join_digits(high, low, R: tl.constexpr, W: tl.constexpr):
    return tl.reshape(tl.join(high, low), [R, W])


@triton.jit
def _whole(product, R: tl.constexpr, GP: tl.constexpr, base: tl.constexpr):
    """Put the two digit columns of each head together again, float32 ``[R, GP]``."""
    high, low = tl.split(tl.reshape(product, [R, GP, 2]))
    return (high * base + low).to(tl.float32)


@triton.jit
def _of_head(columns, GP: tl.constexpr):
    """Return one value a head of values ``[W]`` that are the same in both digit columns."""
    value, _ = tl.split(tl.reshape(columns, [GP, 2]))
    return value


@triton.jit
def _to_log2(product, off, unit, cap, CAP: tl.constexpr):
    """Turn ``q~ . r`` times `unit` into logits in log2 units, see `decode.log2_units`."""
    if CAP:
        return cap - 2.0 * cap / (tl.exp2(product + off[None, :]) + 1.0)
    return product


@triton.jit
def _weigh(p, sv, be, R: tl.constexpr, W: tl.constexpr):
    """Return the digits ``[R, W]`` of ``p sv`` and the unit ``[GP]`` of what their products are in."""
    top = tl.maximum(tl.max(sv, 0), 1e-12)
    high, low = weight_digits(p, (sv * (1.0 / top * P_STEPS))[:, None])
    return _join_digits(high, low, R, W), be * (top / P_STEPS)


@triton.jit
def _add(old, al, unit, codes, digits, R: tl.constexpr, GP: tl.constexpr):
    """Return an accumulator of one plane of values, rescaled by `al`, plus this tile's products."""
    product = _whole(tl.dot(codes, digits, out_dtype=tl.int32), R, GP, 128)
    return old * al[None, :] + unit[None, :] * product


@triton.jit
def _slab_query(q_at, scale_at, index: tl.constexpr, CK: tl.constexpr):
    """Return the queries, float32 ``[32, W]``, that meet coordinates 2 i and 2 i + 1 (i = index % 2) of 16 groups.

    Rows 0..15 are the one coordinate of groups ``16 (index // 2) ..``, rows 16..31 the other; zeros behind the last.
    """
    row = tl.arange(0, 32)
    group = index // 2 * 16 + row % 16
    inside = group < CK
    scale = tl.load(scale_at + group, mask=inside, other=0.0)
    at = q_at + (4 * group + index % 2 * 2 + row // 16)[:, None]
    return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32) * scale[:, None]


@triton.jit
def _look_up(acc, rows, book, one, two, slab: tl.constexpr, CK: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr):
    """Add the products of 16 groups of vector codes.

    A lane holds whole tokens: the 32 look-ups of one load instruction then fall into the kilobyte of one group, which
    takes half as many cache lines as those of two groups would.
    """
    group = slab * 16 + tl.arange(0, 16)
    index = tl.load(rows + group[:, None])
    words = tl.load(book + index.to(tl.int32) + tl.minimum(group, CK - 1)[:, None] * 256)
    c0, c1, c2, c3 = coordinates(words, ASM)
    first = tl.reshape(tl.permute(tl.join(c0, c1), (1, 2, 0)), [N, 32])
    second = tl.reshape(tl.permute(tl.join(c2, c3), (1, 2, 0)), [N, 32])
    acc = tl.dot(first, one, acc, out_dtype=tl.int32)
    return tl.dot(second, two, acc, out_dtype=tl.int32)


@triton.jit
def _coded(
    q_rows, pages, words, table, book, book_scale, off, o_rows, ml_rows, head, kv_heads, start, stop, lo, hi, unit, cap,
    count, GP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KG: tl.constexpr, VG: tl.constexpr,
    WORDS: tl.constexpr, VQ: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens of one coded item: positions start .. stop - 1 in pages, those in [lo, hi) visible."""
    CK: tl.constexpr = DK // 4
    CV: tl.constexpr = DV // 4
    W: tl.constexpr = 2 * GP
    BLOCK: tl.constexpr = 64 * (CK + CV + 8 * WORDS)
    SLABS: tl.constexpr = (CK + 15) // 16
    # Sixteen bytes of a key fill half a matrix instruction: each is loaded twice, for two planes at once.
    TWICE: tl.constexpr = CK == 16 and KG == 1 and not VQ

    column = tl.arange(0, W)
    low = (column % 2 == 1)[None, :]
    byte = tl.arange(0, KB)
    q_at = q_rows + tl.minimum(column // 2, count - 1)[None, :] * DK
    if VQ:
        q0 = _slab_query(q_at, book_scale + head * CK, 0, CK)
        q1 = _slab_query(q_at, book_scale + head * CK, 1, CK)
        q2 = _slab_query(q_at, book_scale + head * CK, 2, CK)
        q3 = _slab_query(q_at, book_scale + head * CK, 3, CK)
        q4 = _slab_query(q_at, book_scale + head * CK, 4, CK)
        q5 = _slab_query(q_at, book_scale + head * CK, 5, CK)
        q6 = _slab_query(q_at, book_scale + head * CK, 6, CK)
        q7 = _slab_query(q_at, book_scale + head * CK, 7, CK)
    elif TWICE:
        q0 = tl.load(q_at + byte[:, None]).to(tl.float32)
        q1 = tl.load(q_at + 32 + byte[:, None]).to(tl.float32)
        q2 = q0
        q3 = q1
    else:
        # Bytes behind a row's end belong to the next one: they meet zeros here.
        inside = (byte < CK)[:, None]
        q0 = tl.load(q_at + byte[:, None], mask=inside, other=0.0).to(tl.float32)
        q1 = tl.load(q_at + CK + byte[:, None], mask=inside, other=0.0).to(tl.float32)
        q2 = tl.load(q_at + 2 * CK + byte[:, None], mask=inside, other=0.0).to(tl.float32)
        q3 = tl.load(q_at + 3 * CK + byte[:, None], mask=inside, other=0.0).to(tl.float32)
    top01 = tl.maximum(tl.max(tl.abs(q0), 0), tl.max(tl.abs(q1), 0))
    top23 = tl.maximum(tl.max(tl.abs(q2), 0), tl.max(tl.abs(q3), 0))
    peak = tl.maximum(tl.maximum(top01, top23), 1e-20)
    if VQ and SLABS > 2:
        top45 = tl.maximum(tl.max(tl.abs(q4), 0), tl.max(tl.abs(q5), 0))
        top67 = tl.maximum(tl.max(tl.abs(q6), 0), tl.max(tl.abs(q7), 0))
        peak = tl.maximum(peak, tl.maximum(top45, top67))
    f = (1.0 / peak * Q_STEPS)[None, :]
    q_unit = _of_head(peak, GP) * (unit / Q_STEPS)
    if TWICE:
        half = tl.where(byte < 16, 1.0, 0.25)[:, None]
        d0 = query_digit(q0, f * half, low)
        d1 = query_digit(q1, f * half, low)
        masks = tl.where((tl.zeros([N, 1], tl.int32) + byte[None, :]) < 16, 3, 12).to(tl.uint8)
        sum0 = _of_head(tl.sum(q0 + q1, 0), GP) * unit
    else:
        # Planes 1 and 3 come as four times the code; with a scale for each plane their products are divided instead.
        quarter: tl.constexpr = 1.0 if VQ or KG == 4 else 0.25
        d0 = query_digit(q0, f, low)
        d1 = query_digit(q1, f * quarter, low)
        d2 = query_digit(q2, f, low)
        d3 = query_digit(q3, f * quarter, low)
        if VQ:
            d4 = query_digit(q4, f, low)
            d5 = query_digit(q5, f, low)
            d6 = query_digit(q6, f, low)
            d7 = query_digit(q7, f, low)
        if KG == 4:
            sum0 = _of_head(tl.sum(q0, 0), GP) * unit
            sum1 = _of_head(tl.sum(q1, 0), GP) * unit
            sum2 = _of_head(tl.sum(q2, 0), GP) * unit
            sum3 = _of_head(tl.sum(q3, 0), GP) * unit
        elif not VQ:
            sum0 = _of_head(tl.sum(q0 + q1 + q2 + q3, 0), GP) * unit

    m = tl.full([GP], NOTHING, tl.float32)
    l = tl.zeros([GP], tl.float32)  # noqa: E741
    b0 = tl.zeros([GP], tl.float32)
    b1 = b0
    b2 = b0
    b3 = b0
    a0 = tl.zeros([VB, GP], tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    place = tl.arange(0, N)
    v_byte = tl.minimum(tl.arange(0, VB), CV - 1)
    for tile in range(start, stop, N):
        block = tl.load(table + (tile >> 6)).to(tl.int64) * kv_heads + head
        spot = (tile & 63) + place if N < 64 else place
        codes = pages + block * BLOCK
        if not VQ:
            k = tl.load(codes + (spot * CK)[:, None] + (byte % CK if TWICE else byte)[None, :])
        v = tl.load(codes + 64 * CK + (v_byte * 64)[:, None] + spot[None, :])
        at = words + block * (BLOCK // 4) + 16 * (CK + CV) + spot * (2 * WORDS)
        # Places outside [lo, hi) may hold anything, NaN too.
        valid = ((tile + place) >= lo) & ((tile + place) < hi)
        k_word = tl.where(valid, tl.load(at), 0)
        v_word = tl.where(valid, tl.load(at + 1), 0)

        if VQ:
            acc = tl.zeros([N, W], tl.int32)
            acc = _look_up(acc, codes + (spot * CK)[None, :], book + head * CK * 256, d0, d1, 0, CK, N, ASM)
            if SLABS > 1:
                acc = _look_up(acc, codes + (spot * CK)[None, :], book + head * CK * 256, d2, d3, 1, CK, N, ASM)
            if SLABS > 2:
                acc = _look_up(acc, codes + (spot * CK)[None, :], book + head * CK * 256, d4, d5, 2, CK, N, ASM)
            if SLABS > 3:
                acc = _look_up(acc, codes + (spot * CK)[None, :], book + head * CK * 256, d6, d7, 3, CK, N, ASM)
            x = _whole(acc, N, GP, 256) * q_unit[None, :] * low_half(k_word)[:, None]
        elif TWICE:
            acc = tl.dot(plane_pair(k, masks, 0, ASM), d0, out_dtype=tl.int32)
            acc = tl.dot(plane_pair(k, masks, 1, ASM), d1, acc, out_dtype=tl.int32)
            x = _whole(acc, N, GP, 256) * q_unit[None, :] * low_half(k_word)[:, None]
            x += sum0[None, :] * high_half(k_word)[:, None]
        elif KG == 1:
            acc = tl.dot(plane(k, 0, ASM), d0, out_dtype=tl.int32)
            acc = tl.dot(plane(k, 1, ASM), d1, acc, out_dtype=tl.int32)
            acc = tl.dot(plane(k, 2, ASM), d2, acc, out_dtype=tl.int32)
            acc = tl.dot(plane(k, 3, ASM), d3, acc, out_dtype=tl.int32)
            x = _whole(acc, N, GP, 256) * q_unit[None, :] * low_half(k_word)[:, None]
            x += sum0[None, :] * high_half(k_word)[:, None]
        else:
            k1 = tl.where(valid, tl.load(at + 2), 0)
            k2 = tl.where(valid, tl.load(at + 4), 0)
            k3 = tl.where(valid, tl.load(at + 6), 0)
            x = _whole(tl.dot(plane(k, 0, ASM), d0, out_dtype=tl.int32), N, GP, 256) * low_half(k_word)[:, None]
            x += _whole(tl.dot(plane(k, 1, ASM), d1, out_dtype=tl.int32), N, GP, 256) * (0.25 * low_half(k1))[:, None]
            x += _whole(tl.dot(plane(k, 2, ASM), d2, out_dtype=tl.int32), N, GP, 256) * low_half(k2)[:, None]
            x += _whole(tl.dot(plane(k, 3, ASM), d3, out_dtype=tl.int32), N, GP, 256) * (0.25 * low_half(k3))[:, None]
            x = x * q_unit[None, :]
            x += sum0[None, :] * high_half(k_word)[:, None] + sum1[None, :] * high_half(k1)[:, None]
            x += sum2[None, :] * high_half(k2)[:, None] + sum3[None, :] * high_half(k3)[:, None]
        x = _to_log2(x, off, unit, cap, CAP)
        x = tl.where(valid[:, None], x, NOTHING)

        best = tl.max(x, 0)
        new = tl.maximum(m, best)
        al = tl.exp2(m - new)
        be = tl.exp2(best - new)
        m = new
        p = tl.exp2(x - best[None, :])
        l = l * al + be * tl.sum(p, 0)  # noqa: E741
        b0 = b0 * al + be * tl.sum(p * high_half(v_word)[:, None], 0)
        digits, v_unit = _weigh(p, low_half(v_word), be, N, W)
        a0 = _add(a0, al, v_unit, plane(v, 0, ASM), digits, VB, GP)
        if VG == 4:
            v1 = tl.where(valid, tl.load(at + 3), 0)
            b1 = b1 * al + be * tl.sum(p * high_half(v1)[:, None], 0)
            digits, v_unit = _weigh(p, low_half(v1), be, N, W)
        a1 = _add(a1, al, v_unit, plane(v, 1, ASM), digits, VB, GP)
        if VG == 4:
            v2 = tl.where(valid, tl.load(at + 5), 0)
            b2 = b2 * al + be * tl.sum(p * high_half(v2)[:, None], 0)
            digits, v_unit = _weigh(p, low_half(v2), be, N, W)
        a2 = _add(a2, al, v_unit, plane(v, 2, ASM), digits, VB, GP)
        if VG == 4:
            v3 = tl.where(valid, tl.load(at + 7), 0)
            b3 = b3 * al + be * tl.sum(p * high_half(v3)[:, None], 0)
            digits, v_unit = _weigh(p, low_half(v3), be, N, W)
        a3 = _add(a3, al, v_unit, plane(v, 3, ASM), digits, VB, GP)

    l = tl.where(m > 0.5 * NOTHING, l, 0.0)  # noqa: E741
    inverse = tl.where(l > 0, 1.0 / l, 0.0)
    heads = tl.arange(0, GP)
    out_byte = tl.arange(0, VB)
    kept = (out_byte < CV)[:, None] & (heads < count)[None, :]
    o_at = o_rows + heads[None, :] * DV + out_byte[:, None]
    if VG == 1:
        b1 = b0
        b2 = b0
        b3 = b0
    tl.store(o_at, a0 * inverse[None, :] + (b0 * inverse)[None, :], mask=kept)
    tl.store(o_at + CV, a1 * (0.25 * inverse)[None, :] + (b1 * inverse)[None, :], mask=kept)
    tl.store(o_at + 2 * CV, a2 * inverse[None, :] + (b2 * inverse)[None, :], mask=kept)
    tl.store(o_at + 3 * CV, a3 * (0.25 * inverse)[None, :] + (b3 * inverse)[None, :], mask=kept)
    tl.store(ml_rows + heads * 2, m, mask=heads < count)
    tl.store(ml_rows + heads * 2 + 1, l, mask=heads < count)


@triton.jit
def _exact(
    q_rows, sink_k, sink_v, ring_k, ring_v, off, o_rows, ml_rows, buffer, start, stop,
    sink_lo, sink_n, recent_lo, sink_rows, ring_rows, unit, cap,
    count, GP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CAP: tl.constexpr,
    N: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend to the rows of one exact item: virtual indices start .. stop - 1 over sinks and ring, see `plan.Plan`."""
    W: tl.constexpr = 2 * GP
    heads = tl.arange(0, GP)
    k_at = tl.arange(0, KP)
    v_at = tl.arange(0, VP)
    q = tl.load(
        q_rows + tl.minimum(heads, count - 1)[None, :] * DK + k_at[:, None], mask=(k_at < DK)[:, None], other=0.0
    )
    m = tl.full([GP], NOTHING, tl.float32)
    l = tl.zeros([GP], tl.float32)  # noqa: E741
    a = tl.zeros([VP, GP], tl.float32)
    place = tl.arange(0, N)
    sink_stop = tl.minimum(stop, sink_n)
    sink_tiles = tl.cdiv(tl.maximum(sink_stop - start, 0), N)
    behind = tl.maximum(start, sink_n)
    tiles = sink_tiles + tl.cdiv(tl.maximum(stop - behind, 0), N)
    for tile in tl.range(tiles, num_stages=1):
        # A tile never mixes the two buffers: rows of sinks first, then of the ring.
        if tile < sink_tiles:
            k_base = sink_k + buffer * sink_rows * DK
            v_base = sink_v + buffer * sink_rows * DV
            first = sink_lo + start + tile * N
            last = sink_lo + sink_stop
            size = sink_rows
        else:
            k_base = ring_k + buffer * ring_rows * DK
            v_base = ring_v + buffer * ring_rows * DV
            first = recent_lo + behind - sink_n + (tile - sink_tiles) * N
            last = recent_lo + stop - sink_n
            size = ring_rows
        row = first % size + place
        row = tl.where(row >= size, row - size, row)
        valid = first + place < last
        k = tl.load(k_base + (row * DK)[:, None] + k_at[None, :], mask=valid[:, None] & (k_at < DK)[None, :], other=0.0)
        v = tl.load(v_base + (row * DV)[:, None] + v_at[None, :], mask=valid[:, None] & (v_at < DV)[None, :], other=0.0)
        x = tl.dot(k, q, input_precision="ieee") * unit
        x = tl.where(valid[:, None], _to_log2(x, off, unit, cap, CAP), NOTHING)
        new = tl.maximum(m, tl.max(x, 0))
        al = tl.exp2(m - new)
        m = new
        p = tl.exp2(x - new[None, :])
        l = l * al + tl.sum(p, 0)  # noqa: E741
        if SPLIT:
            # A second column holds what rounding p to the dtype of v loses.
            high = p.to(v.dtype)
            pair = _join_digits(high, (p - high.to(tl.float32)).to(v.dtype), N, W)
            main, rest = tl.split(tl.reshape(tl.dot(tl.trans(v), pair), [VP, GP, 2]))
            a = a * al[None, :] + (main + rest)
        else:
            a = a * al[None, :] + tl.dot(tl.trans(v), p, input_precision="ieee")

    inverse = tl.where(l > 0, 1.0 / l, 0.0)
    kept = (v_at < DV)[:, None] & (heads < count)[None, :]
    tl.store(o_rows + heads[None, :] * DV + v_at[:, None], a * inverse[None, :], mask=kept)
    tl.store(ml_rows + heads * 2, m, mask=heads < count)
    tl.store(ml_rows + heads * 2 + 1, l, mask=heads < count)


@triton.jit(do_not_specialize=["columns", "kv_heads", "sink_rows", "ring_rows"])
def decode_kernel(
    q, pages, words, table, spans, items, sink_k, sink_v, ring_k, ring_v, book, book_scale, offset, o, ml,
    columns, kv_heads, sink_rows, ring_rows, unit, cap,
    GROUP: tl.constexpr, GP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KG: tl.constexpr, VG: tl.constexpr,
    WORDS: tl.constexpr, VQ: tl.constexpr, CAP: tl.constexpr, OFF: tl.constexpr, N: tl.constexpr, NE: tl.constexpr,
    KB: tl.constexpr, VB: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, SPLIT: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Work off one item for up to GP query heads of one KV head."""
    await_last(OVERLAP)
    start_next(OVERLAP)
    TILES: tl.constexpr = (GROUP + GP - 1) // GP
    program = tl.program_id(0)
    lead = program % TILES * GP
    head = program // TILES % kv_heads
    item = program // TILES // kv_heads
    request = tl.load(items + item * 4)
    kind = tl.load(items + item * 4 + 1)
    start = tl.load(items + item * 4 + 2)
    stop = tl.load(items + item * 4 + 3)
    if start >= stop:
        return
    # Heads that only fill up a power of two repeat the last real one and are not stored.
    count = tl.minimum(GROUP - lead, GP) if TILES > 1 else GROUP
    q_head = (request * kv_heads + head).to(tl.int64) * GROUP + lead
    o_head = (item * kv_heads + head).to(tl.int64) * GROUP + lead
    span = spans + request * 8
    if CAP and OFF:
        off = tl.load(offset + q_head + tl.minimum(tl.arange(0, GP), count - 1)) * unit
    else:
        off = tl.zeros([GP], tl.float32)
    if kind == 0:
        _coded(
            q + q_head * DK, pages, words, table + request.to(tl.int64) * columns, book, book_scale, off,
            o + o_head * DV, ml + o_head * 2, head, kv_heads, start, stop, tl.load(span), tl.load(span + 1), unit, cap,
            count, GP, DK, DV, KG, VG, WORDS, VQ, CAP, N, KB, VB, ASM,
        )  # fmt: skip
    else:
        buffer = tl.load(span + 7).to(tl.int64) * kv_heads + head
        _exact(
            q + q_head * DK, sink_k, sink_v, ring_k, ring_v, off, o + o_head * DV, ml + o_head * 2, buffer, start, stop,
            tl.load(span + 2), tl.load(span + 3), tl.load(span + 4), sink_rows, ring_rows, unit, cap,
            count, GP, DK, DV, CAP, NE, KP, VP, SPLIT,
        )  # fmt: skip
