"""Device functions that turn the bits of a page into float16 matrix operands, without a conversion of integers.

Two codes become two float16 numbers by setting an exponent around them: ``0x6400 | x`` is ``1024 + x`` for every
``x < 1024``, so a plane is masked in place, whatever its bits, and one multiply-add gives the code back exactly::

    plane p of a byte   (byte & (3 << 2p)) | 0x6400           = 1024 + 4^p code
    half a code         (1024 + 4^p code) 4^-p / 2 - 512 4^-p
    half an element     (code / 2) scale + bias / 2, rounded once

Halves, because ``3 scale + bias`` may pass the largest float16 by the rounding of scale and bias. ``asm`` is False in
Triton's interpreter, which has no inline assembly: the same numbers by plain operations.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _pair(number: float) -> str:
    """Return the bits of a power of two, or its negative, twice: two float16 in a register."""
    sign, size, power = (0x8000 if number < 0 else 0), abs(number), 15
    while size >= 2.0:
        size, power = size / 2, power + 1
    while size < 1.0:
        size, power = size * 2, power - 1
    half = sign | power << 10
    return f"0x{half << 16 | half:08x}"


def _elements(index: int, packed: str, scales: tuple[str, str], biases: tuple[str, str]) -> str:
    """Return PTX that decodes one plane of four bytes into the registers `low` and `high`."""
    mask, factor = 3 << 2 * index, 0.25**index / 2
    constants = (("factor", factor), ("shift", -1024 * factor), ("half", 0.5))
    lines = [f"mov.b32 {name}, {_pair(number)};" for name, number in constants]
    for name, select, scale, bias in zip(("low", "high"), ("0x4140", "0x4342"), scales, biases, strict=True):
        lines += [
            f"prmt.b32 {name}, {packed}, 0, {select};",
            f"lop3.b32 {name}, {name}, 0x{mask << 16 | mask:08x}, 0x64006400, 0xea;",
            f"fma.rn.f16x2 {name}, {name}, factor, shift;",
            f"mul.rn.f16x2 bias, {bias}, half;",
            f"fma.rn.f16x2 {name}, {name}, {scale}, bias;",
        ]
    return "\n".join(lines)


def _row_asm(index: int) -> str:
    return f"""{{
        .reg .b32 low, high, factor, shift, half, bias, s, b;
        prmt.b32 s, $5, $5, 0x1010;
        prmt.b32 b, $5, $5, 0x3232;
        {_elements(index, "$4", ("s", "s"), ("b", "b"))}
        mov.b32 {{$0, $1}}, low;
        mov.b32 {{$2, $3}}, high;
    }}"""


def _column_asm(index: int) -> str:
    return f"""{{
        .reg .b32 low, high, factor, shift, half, bias, s01, s23, b01, b23;
        prmt.b32 s01, $5, $6, 0x5410;
        prmt.b32 s23, $7, $8, 0x5410;
        prmt.b32 b01, $5, $6, 0x7632;
        prmt.b32 b23, $7, $8, 0x7632;
        {_elements(index, "$4", ("s01", "s23"), ("b01", "b23"))}
        mov.b32 {{$0, $1}}, low;
        mov.b32 {{$2, $3}}, high;
    }}"""


ROW_0 = tl.constexpr(_row_asm(0))
ROW_1 = tl.constexpr(_row_asm(1))
ROW_2 = tl.constexpr(_row_asm(2))
ROW_3 = tl.constexpr(_row_asm(3))
COLUMN_0 = tl.constexpr(_column_asm(0))
COLUMN_1 = tl.constexpr(_column_asm(1))
COLUMN_2 = tl.constexpr(_column_asm(2))
COLUMN_3 = tl.constexpr(_column_asm(3))
COORDINATES = tl.constexpr("""{
    .reg .b32 word, factor, shift, rho, low, high;
    mov.b32 factor, 0x20002000;
    mov.b32 shift, 0xc880c880;
    prmt.b32 rho, $5, $5, 0x1010;
    xor.b32 word, $4, 0x80808080;
    prmt.b32 low, word, 0x64646464, 0x4140;
    prmt.b32 high, word, 0x64646464, 0x4342;
    fma.rn.f16x2 low, low, factor, shift;
    fma.rn.f16x2 high, high, factor, shift;
    mul.rn.f16x2 low, low, rho;
    mul.rn.f16x2 high, high, rho;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")
NARROWED = tl.constexpr("""{
    .reg .b32 low, high;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    cvt.rn.satfinite.f16x2.f32 $0, high, low;
}""")


@triton.jit
def first_half(word):
    """Return the float16 in bits 0..15 of int32 words."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def second_half(word):
    """Return the float16 in bits 16..31 of int32 words."""
    return ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _plain(code, word, half: tl.constexpr):
    element = code.to(tl.float32) * first_half(word).to(tl.float32) + second_half(word).to(tl.float32)
    return (0.5 * element).to(half)


@triton.jit
def row_plane(packed, index: tl.constexpr, word, half: tl.constexpr, asm: tl.constexpr):
    """Return half the elements of one bit plane of rows of codes, each of four neighbouring bytes on its own.

    Args:
        packed: int32 ``[tokens, bytes / 4]``, four bytes of a token, little-endian.
        index: Plane, 0..3.
        word: Scale and bias of the tokens, int32 ``[tokens, 1]``.
        half: Dtype of the results; float16 where `asm`.
        asm: False in the interpreter.
    """
    if not asm:
        e0 = _plain((packed >> (2 * index)) & 3, word, half)
        e1 = _plain((packed >> (2 * index + 8)) & 3, word, half)
        e2 = _plain((packed >> (2 * index + 16)) & 3, word, half)
        e3 = _plain((packed >> (2 * index + 24)) & 3, word, half)
        return e0, e1, e2, e3
    code: tl.constexpr = ROW_0 if index == 0 else ROW_1 if index == 1 else ROW_2 if index == 2 else ROW_3
    return tl.inline_asm_elementwise(
        code,
        "=h,=h,=h,=h,r,r",
        [packed, word],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def column_plane(packed, index: tl.constexpr, w0, w1, w2, w3, half: tl.constexpr, asm: tl.constexpr):
    """Return half the elements of one bit plane of columns of codes, each of four neighbouring tokens on its own.

    Args:
        packed: int32 ``[bytes, tokens / 4]``, the bytes of four tokens, little-endian.
        index: Plane, 0..3.
        w0: Scale and bias of tokens 0, 4, 8, ..., int32 ``[1, tokens / 4]``.
        w1: Of tokens 1, 5, ...
        w2: Of tokens 2, 6, ...
        w3: Of tokens 3, 7, ...
        half: Dtype of the results; float16 where `asm`.
        asm: False in the interpreter.
    """
    if not asm:
        e0 = _plain((packed >> (2 * index)) & 3, w0, half)
        e1 = _plain((packed >> (2 * index + 8)) & 3, w1, half)
        e2 = _plain((packed >> (2 * index + 16)) & 3, w2, half)
        e3 = _plain((packed >> (2 * index + 24)) & 3, w3, half)
        return e0, e1, e2, e3
    code: tl.constexpr = COLUMN_0 if index == 0 else COLUMN_1 if index == 1 else COLUMN_2 if index == 2 else COLUMN_3
    return tl.inline_asm_elementwise(
        code,
        "=h,=h,=h,=h,r,r,r,r,r",
        [packed, w0, w1, w2, w3],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scaled_coordinates(word, rho, half: tl.constexpr, asm: tl.constexpr):
    """Return the four int8 coordinates of codebook words, little-endian, times rho / 128, rounded once.

    Args:
        word: int32 ``[words, tokens]``.
        rho: float16 in the low half of int32 ``[1, tokens]``.
        half: Dtype of the results; float16 where `asm`.
        asm: False in the interpreter.
    """
    if asm:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            COORDINATES,
            "=h,=h,=h,=h,r,r",
            [word, rho],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        scale = first_half(rho).to(tl.float32) * 0.0078125
        c0 = (word.to(tl.int8).to(tl.float32) * scale).to(half)
        c1 = ((word >> 8).to(tl.int8).to(tl.float32) * scale).to(half)
        c2 = ((word >> 16).to(tl.int8).to(tl.float32) * scale).to(half)
        c3 = ((word >> 24).to(tl.int8).to(tl.float32) * scale).to(half)
    return c0, c1, c2, c3


@triton.jit
def narrowed(x, half: tl.constexpr):
    """Return exact values in `half`; bfloat16 ones that float16 does not hold become its largest."""
    if x.dtype == half:
        return x
    return tl.inline_asm_elementwise(NARROWED, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def join_four(a, b, c, d):
    """Return ``[..., 2, 2]`` with the four at [0, 0], [0, 1], [1, 0] and [1, 1]."""
    return tl.join(tl.join(a, c), tl.join(b, d))
