"""Device functions of `write` for uniform codes: the exact rank clip, the levels of a row, the codes, their bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcq.codecs.uniform import FP16_MAX, VARIANCE_FLOOR

FULL = tl.constexpr(FP16_MAX)
GAUSS_FLOOR = tl.constexpr(VARIANCE_FLOOR)
# 2^23: floats from here to twice as much are whole numbers, in their lowest bits.
WHOLE = tl.constexpr(8388608.0)
WHOLE_BITS = tl.constexpr(0x4B000000)


@triton.jit
def _saturated_sum(a, b, asm: tl.constexpr):
    """Return ``min(max(a + b, 0), 1)``, one instruction of the multiply-add units."""
    if asm:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.minimum(tl.maximum(a + b, 0.0), 1.0)


@triton.jit
def _quotient(a, b, inverse, asm: tl.constexpr):
    """Return a / b correctly rounded, b a float16 number and `inverse` 1 / b.

    One step of Newton's with fused operations is exact, for b does not have a significand of ones; tiny results apart.
    """
    if asm:
        near = a * inverse
        return tl.fma(tl.fma(-near, b, a), inverse, near)
    return tl.div_rn(a, b)


@triton.jit
def _bound(rows, inside, RANK: tl.constexpr, M: tl.constexpr, ASM: tl.constexpr):
    """Return ``sorted(|row|)[RANK]`` of rows ``[M, N]`` exactly, float32 ``[M]``.

    Magnitudes are ordered as their bits are: the bits of the threshold are found one by one, from the highest.
    """
    if rows.dtype == tl.float32:
        size = tl.where(inside[None, :], rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFF)
        low = tl.zeros([M], tl.int32)
        width = 1 << 30
        for _ in range(31):
            below = tl.sum((size < (low + width)[:, None]).to(tl.int32), 1)
            low = tl.where(below <= RANK, low + width, low)
            width = width >> 1
        bound = low.to(tl.float32, bitcast=True)
    else:
        # Bits around 2^23 make the magnitude a float without a conversion, and counting arithmetic: the difference of
        # what is tried and the magnitude, both whole numbers, saturates to 1 or 0.
        size = (rows.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) | WHOLE_BITS
        size = tl.where(inside[None, :], -size.to(tl.float32, bitcast=True), -WHOLE - 32768.0)
        low = tl.full([M], WHOLE, tl.float32)
        span = 16384.0
        for _ in range(15):
            below = tl.sum(_saturated_sum(size, tl.broadcast_to((low + span)[:, None], size.shape), ASM), 1)
            low = tl.where(below <= RANK, low + span, low)
            span = span * 0.5
        low = low.to(tl.int32, bitcast=True) & 0x7FFF
        bound = low.to(tl.int16).to(rows.dtype, bitcast=True).to(tl.float32)
    return bound


@triton.jit
def _whole(x, asm: tl.constexpr):
    """Return ``floor(x)`` as int32, x in 0..255."""
    if asm:
        # Added to 2^23 and rounded down, the whole part is in the lowest bits; a conversion is many times slower.
        moved = tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B000000;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
        return moved & 0xFF
    return tl.floor(x).to(tl.int32)


@triton.jit
def _placed(x, valid, GROUPS: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, LEVELS: tl.constexpr):
    """Return the lowest level and the distance of levels, float32 ``[M, 4]``, of rows by bit plane ``[M, 4, N]``."""
    if STEP == 0.0:
        low = tl.min(tl.where(valid, x, float("inf")), 2)
        high = tl.max(tl.where(valid, x, float("-inf")), 2)
        if GROUPS == 1:
            low = tl.broadcast_to(tl.min(low, 1)[:, None], low.shape)
            high = tl.broadcast_to(tl.max(high, 1)[:, None], low.shape)
        distance = tl.div_rn(high - low, tl.full(low.shape, LEVELS, tl.float32))
    else:
        # float64 as in the codec: the last bits of a float32 sum depend on how it is split, and codes must not.
        exact = tl.where(valid, x, 0.0).to(tl.float64)
        mean = tl.sum(exact, 2)
        if GROUPS == 1:
            mean = tl.broadcast_to(tl.sum(mean, 1)[:, None], mean.shape)
        mean = mean / (D // GROUPS)
        apart = tl.where(valid, exact - mean[:, :, None], 0.0)
        spread = tl.sum(apart * apart, 2)
        if GROUPS == 1:
            spread = tl.broadcast_to(tl.sum(spread, 1)[:, None], mean.shape)
        scale = STEP * tl.sqrt(spread / (D // GROUPS) + GAUSS_FLOOR)
        low = (mean - 1.5 * scale).to(tl.float32)
        distance = scale.to(tl.float32)
    return low, distance


@triton.jit
def half_bits(x):
    """Return the bits of float16 values as int32 0..65535."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def uniform_codes(
    rows, inside, stored, D: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    RANK: tl.constexpr, STEP: tl.constexpr, OUTER: tl.constexpr, M: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Code frame rows ``[M, PAD]``, columns by bit plane.

    Returns:
        Bytes uint8 ``[M, PAD BITS / 8]``, affine halves int32 ``[M, 4]`` of the bit planes (scale in the low bits) and
        the number of values that float16 does not hold.
    """
    CP: tl.constexpr = PAD // 4
    LEVELS: tl.constexpr = 2**BITS - 1
    x = rows.to(tl.float32)
    # The largest magnitude clips nothing.
    bound = tl.max(tl.where(inside[None, :], tl.abs(x), 0.0), 1)
    if RANK < D - 1:
        bound = _bound(rows, inside, RANK, M, ASM)
    large = 0
    if tl.max(tl.where(stored, bound, 0.0), 0) > FULL:
        beyond = (stored & (bound > FULL))[:, None] & inside[None, :] & (tl.abs(x) > FULL)
        large = tl.sum(tl.sum(beyond.to(tl.int32), 1), 0)
    bound = tl.minimum(bound, FULL)[:, None]
    x = tl.reshape(tl.minimum(tl.maximum(x, -bound), bound), [M, 4, CP])
    valid = (tl.arange(0, CP) < D // 4)[None, None, :]
    low, wanted = _placed(x, valid, GROUPS, D, STEP, LEVELS)
    scale = tl.minimum(wanted, FULL).to(tl.float16)
    bias = tl.minimum(tl.maximum(low, -FULL), FULL).to(tl.float16)
    step = scale.to(tl.float32)
    divisor = tl.where(step > 0, step, 1.0)
    inverse = tl.broadcast_to(tl.div_rn(tl.full(step.shape, 1.0, tl.float32), divisor)[:, :, None], x.shape)
    divisor = tl.broadcast_to(divisor[:, :, None], x.shape)
    # The very quotient of the codec: anything else may land on the other side of a border.
    where = _quotient(x - bias.to(tl.float32)[:, :, None], divisor, inverse, ASM)
    where = tl.where((step > 0)[:, :, None], where, 0.0)
    if STEP == 0.0:
        codes = _whole(tl.minimum(tl.maximum(where + 0.5, 0.0), LEVELS + 0.5), ASM)
    else:
        codes = (where >= 1.5 - OUTER).to(tl.int32) + (where >= 1.5).to(tl.int32) + (where >= 1.5 + OUTER).to(tl.int32)
    codes = tl.where(valid, codes, 0)
    if BITS == 2:
        packed = tl.sum(codes << (2 * tl.arange(0, 4))[None, :, None], 1)
    else:
        nibbles = tl.reshape(codes, [M, 2, 2 * CP])
        packed = tl.sum(nibbles << (4 * tl.arange(0, 2))[None, :, None], 1)
    return packed.to(tl.uint8), half_bits(scale) | (half_bits(bias) << 16), large
