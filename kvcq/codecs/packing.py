"""The bits of the cache: this file is the definition of correct for every kernel.

Bit rule, keys and values, any head dim d: channel c lives in byte ``c mod (d/4)``, bits ``2 (c div (d/4))`` and up::

    byte b      bit  7 6     5 4     3 2     1 0
    channel      b+3d/4   b+2d/4    b+d/4     b

VQ puts the index of channel group g (channels 4g .. 4g+3) into byte g instead.

Page block, one contiguous block for each (layer, page of 64 tokens, KV head), G affine words a token::

    offset 0                K codes   [64 tokens][d_k/4 bytes]        token-major
    64 d_k/4                V codes   [d_v/4 bytes][64 tokens]        byte-column-major
    64 (d_k/4 + d_v/4)      affine    [64 tokens][G words of 8 bytes] {s_k, b_k, s_v, b_v} fp16, little-endian

A block takes 64 (d_k/4 + d_v/4 + 8 G) bytes: 2560 at d = 64 and 4608 at d = 128 with one group. The rest of a last
page is zero. V is column-major so that a matrix register holds 4 tokens of one channel without a transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE_TOKENS = 64
CODES_PER_BYTE = 4
WORD_HALVES = 4


def pack2(codes: Tensor) -> Tensor:
    """Pack 2-bit codes [..., d] uint8 (0..3) into [..., d/4] uint8.

    Raises:
        ValueError: d is not divisible by 4.
    """
    if codes.shape[-1] % CODES_PER_BYTE:
        raise ValueError(f"{codes.shape[-1]} channels do not fill whole bytes: 4 codes a byte")
    p0, p1, p2, p3 = codes.to(torch.uint8).chunk(CODES_PER_BYTE, -1)
    return p0 | (p1 << 2) | (p2 << 4) | (p3 << 6)


def unpack2(packed: Tensor) -> Tensor:
    """Return the codes [..., d] uint8 of packed bytes [..., d/4] uint8."""
    return torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1)


def block_bytes(d_k: int, d_v: int, groups: int) -> int:
    """Return the bytes of one page block (64 tokens of one KV head)."""
    return PAGE_TOKENS * (d_k // CODES_PER_BYTE + d_v // CODES_PER_BYTE + 2 * WORD_HALVES * groups)


def encode_pages(k_codes: Tensor, v_codes: Tensor, affine: Tensor) -> Tensor:
    """Lay out coded tokens as page blocks.

    Args:
        k_codes: [H, T, d_k/4] uint8.
        v_codes: [H, T, d_v/4] uint8.
        affine: [H, T, G, 4] float16, words {s_k, b_k, s_v, b_v}.

    Returns:
        uint8 [ceil(T / 64), H, block_bytes].

    Raises:
        ValueError: head dims not divisible by 16, or shapes and dtypes that do not fit together.
    """
    heads, tokens, k_bytes = k_codes.shape
    v_bytes, groups = v_codes.shape[-1], affine.shape[-2]
    if k_bytes % CODES_PER_BYTE or v_bytes % CODES_PER_BYTE:
        raise ValueError(f"head dims {4 * k_bytes} and {4 * v_bytes} must be divisible by 16")
    if v_codes.shape[:2] != (heads, tokens) or affine.shape != (heads, tokens, groups, WORD_HALVES):
        raise ValueError("codes and affine words differ in heads or tokens")
    if k_codes.dtype != torch.uint8 or v_codes.dtype != torch.uint8 or affine.dtype != torch.float16:
        raise ValueError("page blocks hold uint8 codes and float16 affine words")
    pages = -(-tokens // PAGE_TOKENS)
    words = affine.contiguous().view(torch.uint8).reshape(heads, tokens, 2 * WORD_HALVES * groups)
    rows = torch.zeros(heads, pages * PAGE_TOKENS, k_bytes + v_bytes + words.shape[-1], dtype=torch.uint8)
    rows = rows.to(k_codes.device)
    rows[:, :tokens] = torch.cat([k_codes, v_codes, words], -1)
    paged = rows.unflatten(1, (pages, PAGE_TOKENS)).transpose(0, 1)
    k, v, a = paged.split([k_bytes, v_bytes, words.shape[-1]], -1)
    return torch.cat([k.flatten(2), v.mT.flatten(2), a.flatten(2)], -1)


def decode_pages(pages: Tensor, tokens: int, d_k: int, d_v: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `encode_pages`: return k_codes, v_codes and affine of the first `tokens` tokens.

    Args:
        pages: uint8 [pages, H, block_bytes].
        tokens: T, at most 64 times the pages.
        d_k: Key head dim.
        d_v: Value head dim.
        groups: Affine words of a token and head.

    Raises:
        ValueError: the block size or the number of tokens does not fit.
    """
    count, heads, size = pages.shape
    if size != block_bytes(d_k, d_v, groups) or not 0 <= tokens <= count * PAGE_TOKENS:
        raise ValueError(f"{count} page blocks of {size} bytes do not hold {tokens} tokens of head dims {d_k}, {d_v}")
    k_bytes, v_bytes, a_bytes = d_k // CODES_PER_BYTE, d_v // CODES_PER_BYTE, 2 * WORD_HALVES * groups
    k, v, a = pages.split([PAGE_TOKENS * n for n in (k_bytes, v_bytes, a_bytes)], -1)
    v_rows = v.reshape(count, heads, v_bytes, PAGE_TOKENS).mT

    def join(part: Tensor, width: int) -> Tensor:
        rows = part.reshape(count, heads, PAGE_TOKENS, width).transpose(0, 1)
        return rows.reshape(heads, count * PAGE_TOKENS, width)[:, :tokens].contiguous()

    affine = join(a, a_bytes).view(torch.float16).reshape(heads, tokens, groups, WORD_HALVES)
    return join(k, k_bytes), join(v_rows, v_bytes), affine
