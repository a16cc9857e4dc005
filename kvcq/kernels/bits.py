"""Device functions for the bits of a page: planes of codes, halves of an affine word, digits of an integer.

``asm`` is False in Triton's interpreter, which has no inline assembly: the same bits by plain integer operations. On a
GPU one instruction serves the four bytes of a register, which the compiler does not find by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plane(packed, index: tl.constexpr, asm: tl.constexpr):
    """Return one bit plane of packed codes uint8 as int8: 0..3 for the planes 0 and 2, four times the code for 1 and 3.

    The factor stays in because the shift that would remove it costs an instruction for every four codes.
    """
    if not asm:
        mask: tl.constexpr = 3 if index % 2 == 0 else 12
        out = ((packed >> (4 * (index // 2))) & mask).to(tl.int8)
    elif index == 0:
        out = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x03030303;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    elif index == 1:
        out = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0c0c0c0c;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    elif index == 2:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a; shr.b32 a, $1, 4; and.b32 $0, a, 0x03030303;}",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a; shr.b32 a, $1, 4; and.b32 $0, a, 0x0c0c0c0c;}",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return out


@triton.jit
def plane_pair(packed, mask, index: tl.constexpr, asm: tl.constexpr):
    """Return planes 2 index and 2 index + 1 of bytes that occur twice: ``mask`` is 3 or 12, uint8, same shape."""
    if not asm:
        out = ((packed >> (4 * index)) & mask).to(tl.int8)
    elif index == 0:
        out = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [packed, mask], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        out = tl.inline_asm_elementwise(
            "{.reg .b32 a; shr.b32 a, $1, 4; and.b32 $0, a, $2;}",
            "=r,r,r",
            [packed, mask],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return out


@triton.jit
def coordinates(words, asm: tl.constexpr):
    """Return the four int8 coordinates of codebook words int32, as four tensors of their shape."""
    if not asm:
        first = words.to(tl.int8)
        second = (words >> 8).to(tl.int8)
        third = (words >> 16).to(tl.int8)
        fourth = (words >> 24).to(tl.int8)
    else:
        # Four neighbouring words are a 4 x 4 matrix of bytes: its transpose in eight permutations.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{.reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x5140;
            prmt.b32 b, $6, $7, 0x5140;
            prmt.b32 c, $4, $5, 0x7362;
            prmt.b32 d, $6, $7, 0x7362;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            prmt.b32 $2, c, d, 0x5410;
            prmt.b32 $3, c, d, 0x7632;}""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return first, second, third, fourth


@triton.jit
def low_half(word):
    """Return the float16 in bits 0..15 of int32 words as float32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    """Return the float16 in bits 16..31 of int32 words as float32."""
    return ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def query_digit(x, factor, low):
    """Round ``x * factor`` (at most 32512 in size) and return its int8 digit: ``256 high + low`` is the integer.

    Args:
        x: float32 values.
        factor: Broadcasts against x.
        low: True where the low digit (-128..127) is wanted, False for the high one.
    """
    whole = tl.floor(x * factor + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    return tl.where(low, whole - (high << 8), high).to(tl.int8)


@triton.jit
def weight_digits(p, factor):
    """Round ``p * factor`` (0..16256) and return ``(high, low)`` int8 digits of 7 bits: ``128 high + low``."""
    # Adding 2^23 leaves the rounded integer in the low bits of the float.
    bits = (p * factor + 8388608.0).to(tl.int32, bitcast=True)
    return ((bits >> 7) & 127).to(tl.int8), (bits & 127).to(tl.int8)
