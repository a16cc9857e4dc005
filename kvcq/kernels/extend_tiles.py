"""Device code of `extend`: tiles of the coded history, loaded and decoded to float16."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.kernels.halves import column_plane, join_four, row_plane, scaled_coordinates

PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def row_tile(codes, words, words1, words2, words3, GROUPS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Decode words of codes ``[N, KW]`` to ``[N, 2, 2, KW, 2, 2]``: plane, word, byte."""
    w0 = words[:, None]
    w1 = w0
    w2 = w0
    w3 = w0
    if GROUPS == 4:
        w1 = words1[:, None]
        w2 = words2[:, None]
        w3 = words3[:, None]
    p0, p1, p2, p3 = row_plane(codes, 0, w0, HALF, ASM)
    q0, q1, q2, q3 = row_plane(codes, 1, w1, HALF, ASM)
    r0, r1, r2, r3 = row_plane(codes, 2, w2, HALF, ASM)
    s0, s1, s2, s3 = row_plane(codes, 3, w3, HALF, ASM)
    p = join_four(p0, p1, p2, p3)
    q = join_four(q0, q1, q2, q3)
    r = join_four(r0, r1, r2, r3)
    s = join_four(s0, s1, s2, s3)
    return tl.permute(join_four(p, q, r, s), (0, 4, 5, 1, 2, 3))


@triton.jit
def vector_tile(c0, c1, c2, c3, words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Scale words of the codebook ``[KW, N]``, those of every fourth group, to ``[KW, 2, 2, 2, 2, N]``."""
    w = words[None, :]
    p0, p1, p2, p3 = scaled_coordinates(c0, w, HALF, ASM)
    q0, q1, q2, q3 = scaled_coordinates(c1, w, HALF, ASM)
    r0, r1, r2, r3 = scaled_coordinates(c2, w, HALF, ASM)
    s0, s1, s2, s3 = scaled_coordinates(c3, w, HALF, ASM)
    p = join_four(p0, p1, p2, p3)
    q = join_four(q0, q1, q2, q3)
    r = join_four(r0, r1, r2, r3)
    s = join_four(s0, s1, s2, s3)
    return tl.permute(join_four(p, q, r, s), (0, 4, 5, 2, 3, 1))


@triton.jit
def gather_words(book, codes, groups):
    """Return the words of the codebook of four neighbouring groups."""
    c0 = tl.load(book + groups + (codes & 255))
    c1 = tl.load(book + groups + 256 + ((codes >> 8) & 255))
    c2 = tl.load(book + groups + 512 + ((codes >> 16) & 255))
    c3 = tl.load(book + groups + 768 + ((codes >> 24) & 255))
    return c0, c1, c2, c3


@triton.jit
def _fours(words, NW: tl.constexpr):
    """Split the words of ``[NW, 4]`` tokens into those of every fourth token."""
    even, odd = tl.split(tl.reshape(words, (NW, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0[None, :], w1[None, :], w2[None, :], w3[None, :]


@triton.jit
def column_tile(packed, words, words1, words2, words3, NW: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
                 ASM: tl.constexpr):  # fmt: skip
    """Decode ``[bytes, NW]`` codes of four tokens each to ``[2, 2, bytes, NW, 2, 2]``.

    The tokens are joined last: as neighbours in registers they go to shared memory in wide stores.
    """
    a0, a1, a2, a3 = _fours(words, NW)
    p0, p1, p2, p3 = column_plane(packed, 0, a0, a1, a2, a3, HALF, ASM)
    if GROUPS == 4:
        a0, a1, a2, a3 = _fours(words1, NW)
    q0, q1, q2, q3 = column_plane(packed, 1, a0, a1, a2, a3, HALF, ASM)
    if GROUPS == 4:
        a0, a1, a2, a3 = _fours(words2, NW)
    r0, r1, r2, r3 = column_plane(packed, 2, a0, a1, a2, a3, HALF, ASM)
    if GROUPS == 4:
        a0, a1, a2, a3 = _fours(words3, NW)
    s0, s1, s2, s3 = column_plane(packed, 3, a0, a1, a2, a3, HALF, ASM)
    t0 = join_four(p0, q0, r0, s0)
    t1 = join_four(p1, q1, r1, s1)
    t2 = join_four(p2, q2, r2, s2)
    t3 = join_four(p3, q3, r3, s3)
    return tl.permute(join_four(t0, t1, t2, t3), (2, 3, 0, 1, 4, 5))


@triton.jit
def _words(at, live, GROUPS: tl.constexpr):
    """Load the affine words of tokens, of one group or of four."""
    w0 = tl.load(at, mask=live, other=0)
    if GROUPS == 4:
        w1 = tl.load(at + 2, mask=live, other=0)
        w2 = tl.load(at + 4, mask=live, other=0)
        w3 = tl.load(at + 6, mask=live, other=0)
    else:
        w1 = w0
        w2 = w0
        w3 = w0
    return w0, w1, w2, w3


@triton.jit
def _live(j, lo, hi, MASK: tl.constexpr):
    """Return whose affine words are read: those of unseen tokens may be NaN."""
    if MASK:
        return (j >= lo) & (j < hi)
    return j < hi


@triton.jit
def first_token(step, gap, resume, N: tl.constexpr):
    """Return the first token of the tile of a step."""
    return tl.where(step < gap, step, step + (resume - gap)) * N


@triton.jit
def block_at(table, first, more, head, kv_heads, BLOCK: tl.constexpr):
    """Return where the block of the tokens from `first` on begins; of a tile behind the last one anything."""
    page = tl.load(table + first // PAGE, mask=more, other=0)
    return (page.to(tl.int64) * kv_heads + head) * BLOCK


@triton.jit
def load_codes(pages, block, first, at, word, more, CK: tl.constexpr, VQ: tl.constexpr):
    """Load words of four codes of keys; for vector codes `at` are bytes."""
    real = word < tl.where(more, CK // 4, 0)
    if VQ:
        # The compiler does not see that words of a token are neighbours and gives a lane one of each token.
        bytes = pages + (block + first % PAGE * CK) + at
        return tl.load(bytes.to(tl.pointer_type(tl.int32)), mask=real, other=0)
    quads = pages.to(tl.pointer_type(tl.int32))
    return tl.load(quads + (block // 4 + first % PAGE * (CK // 4)) + at, mask=real, other=0)


@triton.jit
def load_others(
    quads, block, first, more, lo, hi, token, token4, quad, CK: tl.constexpr, CV: tl.constexpr, VB: tl.constexpr,
    KG: tl.constexpr, VG: tl.constexpr, WORDS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Load the affine words of keys and values, and words of four codes of values ``[bytes, tokens / 4]``."""
    top = tl.where(more, hi, 0)
    words = quads + (block // 4 + 16 * (CK + CV) + first % PAGE * (2 * WORDS))
    a0, a1, a2, a3 = _words(words + token * (2 * WORDS), _live(first + token, lo, top, MASK), KG)
    b0, b1, b2, b3 = _words(words + 1 + token4 * (2 * WORDS), _live(first + token4, lo, top, MASK), VG)
    byte = tl.arange(0, VB)[:, None]
    columns = quads + (block // 4 + 16 * CK + first % PAGE // 4) + byte * 16 + quad[None, :]
    packed = tl.load(columns, mask=byte < tl.where(more, CV, 0), other=0)
    return a0, a1, a2, a3, b0, b1, b2, b3, packed
