"""Device code of `write`: a tile of tokens of one head and side into the frame, coded, and stored."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcq.kernels.write_uniform import FULL, half_bits, uniform_codes
from kvcq.kernels.write_vq import best_eight, four_columns, nearest_of_eight

RHO_FLOOR = tl.constexpr(1e-8)
# A quarter, and more than rounding to bfloat16 may take away.
LIFT = tl.constexpr(0.2525)


@triton.jit
def _channel(column, D: tl.constexpr, PAD: tl.constexpr):
    """Return the channel of padded columns, which are ordered by bit plane, and whether there is one.

    With ``d / 4`` no power of two every plane is filled up by itself.
    """
    if D == PAD:
        return column, column < D
    byte = column % (PAD // 4)
    return column // (PAD // 4) * (D // 4) + byte, byte < D // 4


@triton.jit
def _mapped(
    x, at, given, matrix, shift, channel, inside, D: tl.constexpr, KB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return frame rows ``[M, N]`` at `channel` in the served dtype: the products of x with columns of the map."""
    rows = tl.zeros([M, N], tl.float32)
    for start in tl.static_range(0, D, KB):
        inner = start + tl.arange(0, KB)
        a = tl.load(x + at[:, None] + inner[None, :], mask=given[:, None] & (inner < D)[None, :], other=0.0)
        b = tl.load(
            matrix + inner[:, None] * D + channel[None, :], mask=(inner < D)[:, None] & inside[None, :], other=0.0
        )
        rows = tl.dot(a, b, rows, input_precision=PRECISION)
    rows -= tl.load(shift + channel, mask=inside, other=0.0)[None, :]
    return rows.to(matrix.dtype.element_ty)


@triton.jit
def _keep(
    rows, channel, inside, given, stored, token, position, length, buffer, head, heads, out, sinks, ring, S, R,
    D: tl.constexpr, ROWS: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Store exact rows ``[M, N]``: all of them to `out`, those of the windows to sinks and rings."""
    if ROWS:
        at = (token.to(tl.int64) * heads + head) * D
        tl.store(out + at[:, None] + channel[None, :], rows, mask=given[:, None] & inside[None, :])
    if WINDOWS:
        sink = stored & (position < S)
        recent = stored & (position >= length - R)
        if tl.max((sink | recent).to(tl.int32), 0) > 0:
            place = buffer.to(tl.int64) * heads + head
            at = (place * S + position) * D
            tl.store(sinks + at[:, None] + channel[None, :], rows, mask=sink[:, None] & inside[None, :])
            at = (place * R + position % R) * D
            tl.store(ring + at[:, None] + channel[None, :], rows, mask=recent[:, None] & inside[None, :])


@triton.jit
def _uniform_side(
    x, matrix, shift, out, sinks, ring, pages, words, clamped, at, given, stored, token, position, length, buffer, page,
    place, head, heads, S, R,
    VALUES: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, KB: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, OUTER: tl.constexpr, K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, WINDOWS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write one side of one head with uniform codes."""
    BLOCK: tl.constexpr = 64 * (K_BYTES + V_BYTES + 8 * WORDS)
    channel, inside = _channel(tl.arange(0, PAD), D, PAD)
    rows = _mapped(x, at, given, matrix + head * D * D, shift + head * D, channel, inside, D, KB, M, PAD, PRECISION)
    _keep(
        rows, channel, inside, given, stored, token, position, length, buffer, head, heads, out, sinks, ring, S, R,
        D, ROWS, WINDOWS,
    )  # fmt: skip
    packed, affine, large = uniform_codes(rows, inside, stored, D, PAD, GROUPS, BITS, RANK, STEP, OUTER, M, ASM)
    if large > 0:
        tl.atomic_add(clamped, large.to(tl.int64))

    block = page * heads + head
    column = tl.arange(0, PAD * BITS // 8)
    byte = column
    filled = byte < D * BITS // 8
    if D != PAD:
        byte = column // (PAD // 4) * (D // 4) + column % (PAD // 4)
        filled = column % (PAD // 4) < D // 4
    if VALUES:
        # Tokens along the threads: consecutive ones fill whole sectors, wherever the others are.
        start = block * BLOCK + 64 * K_BYTES + place
        tl.store(pages + byte[:, None] * 64 + start[None, :], tl.trans(packed), mask=filled[:, None] & stored[None, :])
    else:
        start = block * BLOCK + place * K_BYTES
        tl.store(pages + start[:, None] + byte[None, :], packed, mask=stored[:, None] & filled[None, :])
    start = block * (BLOCK // 4) + 16 * (K_BYTES + V_BYTES) + place * (2 * WORDS)
    group = tl.arange(0, 4)
    tl.store(
        words + start[:, None] + (group * 2 + VALUES)[None, :], affine,
        mask=stored[:, None] & (group < WORDS)[None, :],
    )  # fmt: skip


@triton.jit
def _vector_side(
    x, matrix, shift, codebook, search, scales, out, sinks, ring, words, clamped, at, given, stored, token, position,
    length, buffer, page, place, head, heads, S, R, part, parts,
    D: tl.constexpr, DP: tl.constexpr, NB: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, WINDOWS: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write the keys of one head in vector codes: every `parts`-th slab of 16 channels, beginning at `part`."""
    BLOCK: tl.constexpr = 16 * (K_BYTES + V_BYTES + 8 * WORDS)
    matrix += head * D * D
    shift += head * D
    squares = tl.zeros([M], tl.float32)
    for first in range(0, D, NB):
        channel = first + tl.arange(0, NB)
        inside = channel < D
        rows = _mapped(x, at, given, matrix, shift, channel, inside, D, DP, M, NB, PRECISION)
        if part == 0:
            _keep(
                rows, channel, inside, given, stored, token, position, length, buffer, head, heads, out, sinks, ring, S,
                R, D, ROWS, WINDOWS,
            )  # fmt: skip
        exact = tl.where(inside[None, :], rows.to(tl.float32), 0.0)
        squares += tl.sum(exact * exact, 1)
    size = tl.maximum(tl.sqrt_rn(tl.div_rn(squares, tl.full([M], D, tl.float32))), RHO_FLOOR)
    rho = tl.minimum(size, FULL).to(tl.float16)
    start = (page * heads + head) * BLOCK
    if part == 0:
        large = tl.sum((stored & (size > FULL)).to(tl.int32), 0)
        if large > 0:
            tl.atomic_add(clamped, large.to(tl.int64))
        affine = start + 16 * (K_BYTES + V_BYTES) + place * (2 * WORDS)
        group = tl.arange(0, 4)
        value = tl.broadcast_to(half_bits(rho)[:, None], [M, 4])
        tl.store(words + affine[:, None] + (group * 2)[None, :], value, mask=stored[:, None] & (group < WORDS)[None, :])
    # A row too small for float16 has rho 0; the codec then searches the word nearest to 0.
    held = rho.to(tl.float32)
    some = held > 0
    half = tl.where(some, held, 1.0) * 0.5
    lift = tl.where(some, squares, 1.0) * LIFT
    for slab in range(part, D // 16, parts):
        channel = slab * 16 + tl.arange(0, 16)
        inside = channel < D
        rows = _mapped(x, at, given, matrix, shift, channel, inside, D, DP, M, 16, PRECISION).to(tl.float32)
        rows = tl.where(some[:, None], rows, 0.0)
        group = head * (D // 4) + slab * 4
        table = search + group.to(tl.int64) * 2048
        # One after the other: a list of four would not stay in registers.
        e0 = best_eight(rows, half * tl.load(scales + group), lift, table, 0, M, N, PRECISION)
        e1 = best_eight(rows, half * tl.load(scales + group + 1), lift, table + 2048, 1, M, N, PRECISION)
        e2 = best_eight(rows, half * tl.load(scales + group + 2), lift, table + 4096, 2, M, N, PRECISION)
        e3 = best_eight(rows, half * tl.load(scales + group + 3), lift, table + 6144, 3, M, N, PRECISION)
        four = tl.arange(0, 4)
        halves = half[:, None] * tl.load(scales + group + four)[None, :]
        index = nearest_of_eight(rows, halves, four_columns(e0, e1, e2, e3, M), codebook + group * 256, M)
        packed = tl.sum(index << (8 * four)[None, :], 1)
        tl.store(words + start + place * (K_BYTES // 4) + slab, packed, mask=stored)


@triton.jit(do_not_specialize=["tokens", "S", "R", "parts"])
def write_kernel(
    k, v, map_k, map_v, shift_k, shift_v, codebook, search, scales, pages, words, slots, positions, requests, buffers,
    lengths, sink_k, sink_v, ring_k, ring_v, out_k, out_v, clamped,
    tokens, heads, k_token, k_head, v_token, v_head, S, R, parts,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, KBK: tl.constexpr, KBV: tl.constexpr,
    KG: tl.constexpr, VG: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_RANK: tl.constexpr,
    V_RANK: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, K_OUTER: tl.constexpr, V_OUTER: tl.constexpr,
    WORDS: tl.constexpr, VQ: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, WINDOWS: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Write M tokens of one head: program axis 2 is the parts of the keys, unless without them, then the values."""
    K_BYTES: tl.constexpr = DK * K_BITS // 8
    V_BYTES: tl.constexpr = DV * V_BITS // 8
    head = tl.program_id(1)
    part = tl.program_id(2)
    token = tl.program_id(0) * M + tl.arange(0, M)
    given = token < tokens
    slot = tl.load(slots + token, mask=given, other=-1)
    stored = slot >= 0
    page = slot >> 6
    place = slot & 63
    position = tl.zeros([M], tl.int32)
    length = position
    buffer = position
    if WINDOWS:
        request = tl.load(requests + token, mask=stored, other=0)
        position = tl.load(positions + token, mask=stored, other=0)
        length = tl.load(lengths + request, mask=stored, other=0)
        buffer = tl.load(buffers + request, mask=stored, other=0)
    if not KEYS or part == parts:
        at = token.to(tl.int64) * v_token + head.to(tl.int64) * v_head
        _uniform_side(
            v, map_v, shift_v, out_v, sink_v, ring_v, pages, words, clamped, at, given, stored, token, position, length,
            buffer, page, place, head, heads, S, R,
            True, DV, PV, KBV, VG, V_BITS, V_RANK, V_STEP, V_OUTER, K_BYTES, V_BYTES, WORDS, ROWS, WINDOWS, PRECISION,
            M, ASM,
        )  # fmt: skip
    else:
        at = token.to(tl.int64) * k_token + head.to(tl.int64) * k_head
        if VQ:
            _vector_side(
                k, map_k, shift_k, codebook, search, scales, out_k, sink_k, ring_k, words, clamped, at, given, stored,
                token, position, length, buffer, page, place, head, heads, S, R, part, parts,
                DK, KBK, NB, K_BYTES, V_BYTES, WORDS, ROWS, WINDOWS, PRECISION, M, N,
            )  # fmt: skip
        else:
            _uniform_side(
                k, map_k, shift_k, out_k, sink_k, ring_k, pages, words, clamped, at, given, stored, token, position,
                length, buffer, page, place, head, heads, S, R,
                False, DK, PK, KBK, KG, K_BITS, K_RANK, K_STEP, K_OUTER, K_BYTES, V_BYTES, WORDS, ROWS, WINDOWS,
                PRECISION, M, ASM,
            )  # fmt: skip
