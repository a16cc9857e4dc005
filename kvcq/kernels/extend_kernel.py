"""Device code of `extend`: queries as float16, and the attention of one block of them over the tiers."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.kernels.extend_tiles import (
    block_at,
    column_tile,
    first_token,
    gather_words,
    load_codes,
    load_others,
    row_tile,
    vector_tile,
)
from kvcq.kernels.halves import narrowed

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
PAGE = tl.constexpr(PAGE_TOKENS)
Q_TOP = tl.constexpr(256.0)


@triton.jit
def _channels(PAD: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr):
    """Return channel and validity of the `PAD` columns of a tile: planes of bytes one after another, each padded."""
    column = tl.arange(0, PAD)
    if PLANES and PAD != D:
        byte = column % (PAD // 4)
        channel = column // (PAD // 4) * (D // 4) + byte
        real = byte < D // 4
    else:
        channel = column
        real = column < D
    return channel, real


@triton.jit
def _step(acc, m, norm, products, unit, shift, cap, seen, v, down: tl.constexpr, HALF: tl.constexpr,
          CAP: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Take one tile of keys into the running softmax; `m` in log2 units, `unit` turns products into them.

    With a softcap `unit` and `shift` hold 2 log2(e) / cap and `cap` the cap in log2 units. The accumulator holds half
    the sums: of half elements as they are, of whole ones (`down` = 1) with half the weights.
    """
    if CAP:
        x = cap - 2.0 * cap / (tl.exp2(products * unit[:, None] + shift[:, None]) + 1.0)
        if MASK:
            x = tl.where(seen, x, float("-inf"))
        new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - (new + down)[:, None])
    else:
        if MASK:
            products = tl.where(seen, products, float("-inf"))
        new = tl.maximum(m, tl.max(products, 1) * unit)
        p = tl.exp2(products * unit[:, None] - (new + down)[:, None])
    alpha = tl.exp2(m - new)
    norm = norm * alpha + (1 + down) * tl.sum(p, 1)
    acc = tl.dot(p.to(HALF), v, acc * alpha[:, None], input_precision="ieee")
    return acc, new, norm


@triton.jit
def _seen(position, j, oldest, window, sink, CODED: tl.constexpr, WINDOW: tl.constexpr):
    """Return which of the keys `j` each query reads from this tier."""
    seen = j[None, :] <= position[:, None]
    if CODED:
        seen &= j[None, :] < oldest[:, None]
    else:
        seen &= (j < sink)[None, :] | (j[None, :] >= oldest[:, None])
    if WINDOW:
        seen &= j[None, :] > position[:, None] - window
    return seen


@triton.jit
def _coded(
    acc, m, norm, q, unit, shift, cap, pages, table, book, head, kv_heads, begin, gap, resume, end,
    position, oldest, window, sink, lo, hi,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, KG: tl.constexpr, VG: tl.constexpr,
    WORDS: tl.constexpr, VQ: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, HALF: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to tiles of pages: numbers [begin, gap) and [resume, end) of tiles of N tokens, each within a page.

    Loads follow from one another: number of a page, codes, words of the codebook. Each is a tile ahead of the next,
    and a tile is decoded from registers.
    """
    CK: tl.constexpr = DK // 4
    CV: tl.constexpr = DV // 4
    KW: tl.constexpr = KP // 16
    VB: tl.constexpr = VP // 4
    NW: tl.constexpr = N // 4
    BLOCK: tl.constexpr = 64 * (CK + CV + 8 * WORDS)
    AHEAD: tl.constexpr = 2 if VQ else 1
    token = tl.arange(0, N)
    quad = tl.arange(0, NW)
    token4 = 4 * quad[:, None] + tl.arange(0, 4)[None, :]
    if VQ:
        # Lanes along tokens: they gather from one table, so from few lines of the L1.
        k_word = tl.arange(0, KW)[:, None]
        k_at = token[None, :] * CK + 4 * k_word
        groups = tl.minimum(k_word, CK // 4 - 1) * 1024
    else:
        k_word = tl.arange(0, KW)[None, :]
        k_at = token[:, None] * (CK // 4) + k_word
    quads = pages.to(tl.pointer_type(tl.int32))

    stop = end - (resume - gap)
    first = first_token(begin, gap, resume, N)
    block = block_at(table, first, begin < stop, head, kv_heads, BLOCK)
    codes = load_codes(pages, block, first, k_at, k_word, begin < stop, CK, VQ)
    a0, a1, a2, a3, b0, b1, b2, b3, packed = load_others(
        quads, block, first, begin < stop, lo, hi, token, token4, quad, CK, CV, VB, KG, VG, WORDS, MASK
    )
    next_first = first
    next_block = block
    if VQ:
        k0, k1, k2, k3 = gather_words(book, codes, groups)
        next_first = first_token(begin + 1, gap, resume, N)
        next_block = block_at(table, next_first, begin + 1 < stop, head, kv_heads, BLOCK)
        codes = load_codes(pages, next_block, next_first, k_at, k_word, begin + 1 < stop, CK, VQ)
    last_first = first_token(begin + AHEAD, gap, resume, N)
    last_block = block_at(table, last_first, begin + AHEAD < stop, head, kv_heads, BLOCK)
    for step in range(begin, stop):
        if VQ:
            k = tl.reshape(vector_tile(k0, k1, k2, k3, a0, HALF, ASM), (KP, N))
        else:
            k = tl.trans(tl.reshape(row_tile(codes, a0, a1, a2, a3, KG, HALF, ASM), (N, KP)))
        v = tl.trans(tl.reshape(column_tile(packed, b0, b1, b2, b3, NW, VG, HALF, ASM), (VP, N)))
        j = first + token

        if VQ:
            k0, k1, k2, k3 = gather_words(book, codes, groups)
            first = next_first
            block = next_block
            next_first = last_first
            next_block = last_block
        else:
            first = last_first
            block = last_block
        codes = load_codes(pages, last_block, last_first, k_at, k_word, step + AHEAD < stop, CK, VQ)
        a0, a1, a2, a3, b0, b1, b2, b3, packed = load_others(
            quads, block, first, step + 1 < stop, lo, hi, token, token4, quad, CK, CV, VB, KG, VG, WORDS, MASK
        )
        last_first = first_token(step + AHEAD + 1, gap, resume, N)
        last_block = block_at(table, last_first, step + AHEAD + 1 < stop, head, kv_heads, BLOCK)

        products = tl.dot(q, k, input_precision="ieee")
        seen = _seen(position, j, oldest, window, sink, True, WINDOW)
        if MASK:
            seen &= ((j >= lo) & (j < hi))[None, :]
        acc, m, norm = _step(acc, m, norm, products, unit, shift, cap, seen, v, 0, HALF, CAP, MASK)
    return acc, m, norm


@triton.jit
def _own(
    acc, m, norm, q, unit, shift, cap, k_rows, v_rows, kv_heads, begin, end, position, k_channel, k_real, v_channel,
    v_real, DK: tl.constexpr, DV: tl.constexpr, CAP: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend to tiles of the chunk that all queries see whole, from the rows at `k_rows` and `v_rows` on."""
    token = tl.arange(0, N)
    for tile in range(begin, end):
        row = ((tile * N + token) * kv_heads).to(tl.int64)
        k = tl.load(k_rows + (row * DK)[:, None] + k_channel[None, :], mask=k_real[None, :], other=0.0)
        v = tl.load(v_rows + (row * DV)[:, None] + v_channel[None, :], mask=v_real[None, :], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        acc, m, norm = _step(
            acc, m, norm, products, unit, shift, cap, position[:, None] >= 0, narrowed(v, HALF), 1, HALF, CAP, False
        )
    return acc, m, norm


@triton.jit(do_not_specialize=["rows"])
def halve_kernel(
    q, book_scale, halves, units, rows, q_heads,
    GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, VQ: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Write queries as float16 times a unit a row, 2^-8 of the power of two below its largest element.

    float16 then holds a bfloat16 row exactly, but for elements 2^-23 times the largest.
    """
    row = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.arange(0, PAD)
    inside = (row < rows)[:, None] & (channel < D)[None, :]
    at = (row.to(tl.int64) * D)[:, None] + channel[None, :]
    x = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    if VQ:
        scale = book_scale + (row % q_heads // GROUP * (D // 4))[:, None] + (channel // 4)[None, :]
        x *= tl.load(scale, mask=inside, other=0.0)
    power = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.where(power == 0, 1.0, power.to(tl.float32, bitcast=True))
    tl.store(halves + at, (x * (1.0 / power * Q_TOP)[:, None]).to(halves.dtype.element_ty), mask=inside)
    tl.store(units + row, power * (1.0 / Q_TOP), mask=row < rows)


@triton.jit(do_not_specialize=["batch", "columns", "sink", "ring", "window"])
def extend_kernel(
    q, halves, units, pages, table, lengths, exact_from, slots, starts, oldest, sink_k, sink_v, ring_k, ring_v,
    rows_k, rows_v, book, offset, sinks, dual, nu, out,
    batch, columns, kv_heads, sink, ring, window, scaling, softcap,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, KG: tl.constexpr,
    VG: tl.constexpr, WORDS: tl.constexpr, VQ: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    SHIFTED: tl.constexpr, WINDOW: tl.constexpr, ROTATE: tl.constexpr, CENTRED: tl.constexpr, HALF: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one request and KV head. See the module for the formula."""
    TOKENS: tl.constexpr = M // GROUP
    head = tl.program_id(1)
    # Late blocks see the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    # Request b has the blocks from starts[b] // TOKENS + b on, some of them empty.
    below = 0
    above = batch
    while below < above:
        middle = (below + above) // 2
        if tl.load(starts + middle) // TOKENS + middle <= block:
            below = middle + 1
        else:
            above = middle
    request = below - 1
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    block -= start // TOKENS + request
    if block * TOKENS >= count:
        return
    first = tl.load(lengths + request) - count
    row = tl.arange(0, M)
    local = block * TOKENS + row // GROUP
    real = (row < TOKENS * GROUP) & (local < count)
    position = first + local
    q_head = (start + local).to(tl.int64) * (kv_heads * GROUP) + head * GROUP + row % GROUP
    low = first + block * TOKENS
    high = first + tl.minimum((block + 1) * TOKENS, count)
    # Nothing exact is left before the ring's first row or the last prefix hit.
    floor = tl.maximum(first - ring, tl.load(exact_from + request))
    bound = tl.maximum(tl.load(oldest + start + local, mask=real, other=0), floor)
    bound_low = tl.min(tl.where(real, bound, 2147483647), 0)
    bound_high = tl.max(tl.where(real, bound, floor), 0)
    view_low = tl.maximum(low - window + 1, 0) if WINDOW else 0
    view_high = tl.maximum(high - window, 0) if WINDOW else 0

    acc = tl.zeros([M, VP], tl.float32)
    m = tl.full([M], NOTHING, tl.float32)
    norm = tl.zeros([M], tl.float32)
    k_channel, k_real = _channels(KP, DK, not VQ)
    v_channel, v_real = _channels(VP, DV, True)
    factor = 2.0 * LOG2E * scaling / softcap if CAP else LOG2E * scaling
    cap = softcap * LOG2E
    off = tl.load(offset + q_head, mask=real, other=0.0) if SHIFTED else tl.zeros([M], tl.float32)
    shift = off * factor

    # Tiles of the history: all of them from `begin` to `end`, whole for every query from `inner` to `outer`.
    lo = tl.maximum(sink, view_low)
    hi = tl.minimum(bound_high, high)
    begin = lo // N
    end = tl.where(lo < hi, tl.cdiv(hi, N), begin)
    inner = tl.minimum(tl.cdiv(tl.maximum(sink, view_high), N), end)
    outer = tl.minimum(tl.maximum(tl.minimum(bound_low, low + 1) // N, inner), end)
    q_tile = tl.load(
        halves + (q_head * DK)[:, None] + k_channel[None, :], mask=real[:, None] & k_real[None, :], other=0.0
    )
    # Keys of uniform codes come halved, those of vector codes by 128.
    unit = tl.load(units + q_head, mask=real, other=1.0) * (factor * (128.0 if VQ else 2.0))
    pages_of = table + tl.cast(request, tl.int64) * columns
    book_of = book + head * (DK // 4) * 256
    acc, m, norm = _coded(
        acc, m, norm, q_tile, unit, shift, cap, pages, pages_of, book_of, head, kv_heads, inner, outer, outer, outer,
        position, bound, window, sink, lo, hi,
        DK, DV, KP, VP, KG, VG, WORDS, VQ, CAP, WINDOW, HALF, N, False, ASM,
    )  # fmt: skip
    acc, m, norm = _coded(
        acc, m, norm, q_tile, unit, shift, cap, pages, pages_of, book_of, head, kv_heads, begin, inner, outer, end,
        position, bound, window, sink, lo, hi,
        DK, DV, KP, VP, KG, VG, WORDS, VQ, CAP, WINDOW, HALF, N, True, ASM,
    )  # fmt: skip

    # Exact rows: of the sinks, of the ring, of the chunk itself; `own` is where the chunk's first tile begins.
    q_tile = tl.load(q + (q_head * DK)[:, None] + k_channel[None, :], mask=real[:, None] & k_real[None, :], other=0.0)
    unit = tl.full([M], factor, tl.float32)
    sink_end = tl.minimum(sink, first)
    sink_tiles = tl.cdiv(tl.maximum(sink_end - view_low, 0), N)
    recent = tl.maximum(tl.maximum(sink, bound_low), view_low)
    ring_tiles = tl.cdiv(tl.maximum(first - recent, 0), N)
    own = tl.maximum(first, view_low)
    if first >= sink:
        own = tl.maximum(own, bound_low)
    own_tiles = tl.cdiv(tl.maximum(high - own, 0), N)
    own_inner = tl.minimum(tl.cdiv(tl.maximum(tl.maximum(bound_high, view_high) - own, 0), N), own_tiles)
    own_outer = tl.minimum(tl.maximum((low + 1 - own) // N, own_inner), own_tiles)
    k_own = rows_k + ((start + own - first).to(tl.int64) * kv_heads + head) * DK
    v_own = rows_v + ((start + own - first).to(tl.int64) * kv_heads + head) * DV
    acc, m, norm = _own(
        acc, m, norm, q_tile, unit, shift, cap, k_own, v_own, kv_heads, own_inner, own_outer, position,
        k_channel, k_real, v_channel, v_real, DK, DV, CAP, HALF, N,
    )  # fmt: skip
    buffer = tl.load(slots + request).to(tl.int64) * kv_heads + head
    token = tl.arange(0, N)
    before = sink_tiles + ring_tiles
    for step in range(before + own_inner + (own_tiles - own_outer)):
        if step < sink_tiles:
            k_base = sink_k + buffer * sink * DK
            v_base = sink_v + buffer * sink * DV
            j = view_low + step * N + token
            stop = sink_end
            index = j
            stride = 1
        elif step < before:
            k_base = ring_k + buffer * ring * DK
            v_base = ring_v + buffer * ring * DV
            j = recent + (step - sink_tiles) * N + token
            stop = first
            index = j % ring
            stride = 1
        else:
            k_base = k_own
            v_base = v_own
            index = step - before
            index = tl.where(index < own_inner, index, index + (own_outer - own_inner)) * N + token
            j = own + index
            stop = high
            stride = kv_heads
        live = j < stop
        at = (index * stride).to(tl.int64)
        k = tl.load(k_base + (at * DK)[:, None] + k_channel[None, :], mask=live[:, None] & k_real[None, :], other=0.0)
        v = tl.load(v_base + (at * DV)[:, None] + v_channel[None, :], mask=live[:, None] & v_real[None, :], other=0.0)
        seen = _seen(position, j, bound, window, sink, False, WINDOW) & live[None, :]
        products = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        acc, m, norm = _step(acc, m, norm, products, unit, shift, cap, seen, narrowed(v, HALF), 1, HALF, CAP, True)

    total = norm
    if SINKS:
        extra = tl.load(sinks + head * GROUP + row % GROUP) * LOG2E
        if not CAP:
            extra -= shift
        new = tl.maximum(m, extra)
        alpha = tl.exp2(m - new)
        acc = acc * alpha[:, None]
        norm = norm * alpha
        total = norm + tl.exp2(extra - new)
    inverse = tl.where(norm > 0, 1.0 / tl.maximum(total, 1e-30), 0.0)
    o = acc * (2.0 * inverse)[:, None]
    o_at = out + (q_head * DV)[:, None]
    if ROTATE:
        mass = norm * inverse
        WIDE: tl.constexpr = min(VP, 64) if VP <= 128 else 32
        served = out.dtype.element_ty
        o_high = o.to(served)
        o_low = (o - o_high.to(tl.float32)).to(served)
        for at in range(0, DV, WIDE):
            channel = at + tl.arange(0, WIDE)
            inside = channel < DV
            weights = tl.load(
                dual + (head * DV + channel)[None, :] * DV + v_channel[:, None],
                mask=v_real[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            turned = tl.dot(o_high, weights, input_precision="ieee")
            turned = tl.dot(o_low, weights, turned, input_precision="ieee")
            if CENTRED:
                turned += tl.load(nu + head * DV + channel, mask=inside, other=0.0)[None, :] * mass[:, None]
            tl.store(o_at + channel[None, :], turned.to(served), mask=real[:, None] & inside[None, :])
    else:
        tl.store(o_at + v_channel[None, :], o.to(out.dtype.element_ty), mask=real[:, None] & v_real[None, :])
