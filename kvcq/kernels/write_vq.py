"""Device functions of `write` for keys in vector codes: the exact nearest word of every group of 4 channels.

The nearest word to r / rho has the least ``h |c|^2 - <c, r>``, with c its int8 coordinates and ``h = rho scale / 2``:
all factors that this leaves out are positive. One matrix product of 16 terms gives it, 4 for ``<c, r>``, 6 for the
norm: ``|c|^2 = 256 a + b`` and h as three bfloat16 that add up to it are exact, so nothing is rounded but sums. One
more term adds ``|r|^2 / 4h`` of the whole row or a bit more, which makes all of them positive: their bits are then
ordered like the numbers, and integers have a minimum of three, which halves the work.

256 numbers a group are too many for a search by index, so it has two steps. The minima of 8 words at a time show which
8 words hold the nearest one, and those are tried again, now with indices.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of the search table of a group, see `Tables.search`: coordinates 0..3, the two parts of the norm, ones, zeros.
NORM_ROW = tl.constexpr(4)
ONES_ROW = tl.constexpr(6)


@triton.jit
def _upper(x):
    """Return float32 x cut to the precision of bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def best_eight(
    rows, half, lift, search, quarter: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr
):
    """Return which run of eight words ``[M]`` (0..31) holds the nearest word of one group of channels.

    Args:
        rows: float32 ``[M, 16]``, rows of four neighbouring groups.
        half: ``rho scale / 2`` of the group, float32 ``[M]``.
        lift: At least ``|r|^2 / 4``, float32 ``[M]``.
        search: Its search table ``[8, 256]``.
        quarter: Which of the four groups.
        M: Rows.
        N: Words of one product.
        PRECISION: Of products of float32 operands.
    """
    term = (tl.arange(0, 16) + (16 - 4 * quarter)) % 16
    first = _upper(half)
    second = _upper(half - first)
    third = half - first - second
    a = tl.where((term < 4)[None, :], rows, 0.0)
    a = tl.where((term // 2 == 2)[None, :], first[:, None], a)
    a = tl.where((term // 2 == 3)[None, :], second[:, None], a)
    a = tl.where((term // 2 == 4)[None, :], third[:, None], a)
    a = tl.where((term == 10)[None, :], (lift / half)[:, None], a).to(search.dtype.element_ty)
    row = tl.where(term < 4, term, NORM_ROW + term % 2)
    table = search + tl.where(term < 10, row, ONES_ROW + (term > 10).to(tl.int32))[:, None] * 256
    run = tl.arange(0, N // 8)
    for part in tl.static_range(256 // N):
        b = tl.load(table + (part * N + tl.arange(0, N))[None, :])
        far = tl.dot(a, b, input_precision=PRECISION).to(tl.int32, bitcast=True)
        # Columns lie so that the eight words of a run are in one thread: see `Tables.search`.
        eights = tl.min(tl.reshape(far, [M, N // 32, 4, 4, 2]), 4)
        eights = tl.reshape(tl.min(eights, 2), [M, N // 8])
        least = tl.min(eights, 1)
        at = part * (N // 8) + tl.min(tl.where(eights == least[:, None], run[None, :], N // 8), 1)
        if part == 0:
            best = least
            chosen = at
        else:
            chosen = tl.where(least < best, at, chosen)
            best = tl.minimum(least, best)
    return chosen


@triton.jit
def _coordinate(word, index: tl.constexpr):
    """Return byte `index` of int32 words, signed, as float32, without the slow conversion of integers."""
    byte = ((word >> (8 * index)) & 0xFF) | 0x4B000000
    return byte.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def nearest_of_eight(rows, half, runs, codebook, M: tl.constexpr):
    """Return the nearest word ``[M, 4]`` (0..255) of four groups; ties take the lowest index.

    Args:
        rows: float32 ``[M, 16]``.
        half: ``rho scale / 2``, float32 ``[M, 4]``.
        runs: From `best_eight`, int32 ``[M, 4]``.
        codebook: int32 words ``[4, 256]`` of the groups.
        M: Rows.
    """
    eight = tl.arange(0, 8)
    first = tl.arange(0, 4)[None, :] * 256 + runs * 8
    # Bytes become 0..255, so that 128 more is taken off after the conversion.
    words = tl.load(codebook + first[:, :, None] + eight[None, None, :]) ^ -2139062144
    even, odd = tl.split(tl.reshape(rows, [M, 4, 2, 2]))
    r0, r2 = tl.split(even)
    r1, r3 = tl.split(odd)
    c0, c1, c2, c3 = _coordinate(words, 0), _coordinate(words, 1), _coordinate(words, 2), _coordinate(words, 3)
    product = c0 * r0[:, :, None] + c1 * r1[:, :, None] + c2 * r2[:, :, None] + c3 * r3[:, :, None]
    score = product - (c0 * c0 + c1 * c1 + c2 * c2 + c3 * c3) * half[:, :, None]
    best = tl.max(score, 2)
    return runs * 8 + tl.min(tl.where(score == best[:, :, None], eight[None, None, :], 8), 2)


@triton.jit
def four_columns(a, b, c, d, M: tl.constexpr):
    """Return ``[M, 4]`` with these columns."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [M, 4])
