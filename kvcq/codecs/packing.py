"""The bits of the cache: this file is the definition of correct for every kernel.

Bit rule, keys and values, any head dim d: channel c lives in byte ``c mod (d/4)``, bits ``2 (c div (d/4))`` and up::

    byte b      bit  7 6     5 4     3 2     1 0
    channel      b+3d/4   b+2d/4    b+d/4     b

VQ puts the index of channel group g (channels 4g .. 4g+3) into byte g instead. Codes of 4 bits fill twice the bytes:
channel c lives in byte ``c mod (d/2)``, bits ``4 (c div (d/2))`` and up.

Page block, one contiguous block for each (layer, page of 64 tokens, KV head), G affine words a token, 2 bits::

    offset 0                K codes   [64 tokens][d_k/4 bytes]        token-major
    64 d_k/4                V codes   [d_v/4 bytes][64 tokens]        byte-column-major
    64 (d_k/4 + d_v/4)      affine    [64 tokens][G words of 8 bytes] {s_k, b_k, s_v, b_v} fp16, little-endian

A block takes 64 (d_k/4 + d_v/4 + 8 G) bytes: 2560 at d = 64 and 4608 at d = 128 with one group. A side of 4 bits
takes d/2 instead of d/4 bytes a token and is laid out alike. The rest of a last page is zero. V is column-major so that
a matrix register holds 4 tokens of one channel without a transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE_TOKENS = 64
CODES_PER_BYTE = 4
WORD_HALVES = 4
TWO_BITS = (2, 2)


def pack2(codes: Tensor) -> Tensor:
    """Pack 2-bit codes [..., d] uint8 (0..3) into [..., d/4] uint8.

    Raises:
        ValueError: d is not divisible by 4.
    """
    if codes.shape[-1] % CODES_PER_BYTE:
        raise ValueError(f"{codes.shape[-1]} channels do not fill whole bytes: 4 codes a byte")
    p0, p1, p2, p3 = codes.to(torch.uint8).chunk(CODES_PER_BYTE, -1)
    return p0 | (p1 << 2) | (p2 << 4) | (p3 << 6)


def unpack2(packed: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the codes [..., d] of packed bytes [..., d/4] uint8, in `dtype`."""
    width = packed.shape[-1]
    codes = torch.empty(*packed.shape[:-1], CODES_PER_BYTE * width, dtype=dtype, device=packed.device)
    for part in range(CODES_PER_BYTE):
        codes[..., part * width : (part + 1) * width] = (packed >> (2 * part)) & 3
    return codes


def pack4(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., d] uint8 (0..15) into [..., d/2] uint8.

    Raises:
        ValueError: d is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} channels do not fill whole bytes: 2 codes a byte")
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def unpack4(packed: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the codes [..., d] of packed bytes [..., d/2] uint8, in `dtype`."""
    return torch.cat([packed & 15, packed >> 4], -1).to(dtype)


def row_bytes(d: int, bits: int = 2) -> int:
    """Return the bytes of the codes of one row of d channels."""
    return d * bits // 8


def block_bytes(d_k: int, d_v: int, groups: int, bits: tuple[int, int] = TWO_BITS) -> int:
    """Return the bytes of one page block (64 tokens of one KV head), codes of `bits` for keys and for values."""
    return PAGE_TOKENS * (row_bytes(d_k, bits[0]) + row_bytes(d_v, bits[1]) + 2 * WORD_HALVES * groups)


def page_views(
    pages: Tensor, d_k: int, d_v: int, groups: int, bits: tuple[int, int] = TWO_BITS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three parts of page blocks as views to read and write through.

    Args:
        pages: uint8 [pages, H, block_bytes].
        d_k: Key head dim.
        d_v: Value head dim.
        groups: Affine words of a token and head.
        bits: Bits of a code, keys and values.

    Returns:
        K codes uint8 [pages, H, 64, d_k/4], V codes uint8 [pages, H, 64, d_v/4] (bytes of one column are adjacent in
        memory; d/2 with 4 bits), affine words float16 [pages, H, 64, G, 4].

    Raises:
        ValueError: the block size does not fit.
    """
    if pages.shape[-1] != block_bytes(d_k, d_v, groups, bits):
        raise ValueError(f"page blocks of {pages.shape[-1]} bytes do not hold head dims {d_k}, {d_v}, {groups} groups")
    k_bytes, v_bytes, a_bytes = row_bytes(d_k, bits[0]), row_bytes(d_v, bits[1]), 2 * WORD_HALVES * groups
    k, v, a = pages.split([PAGE_TOKENS * n for n in (k_bytes, v_bytes, a_bytes)], -1)
    words = a.view(torch.float16).unflatten(-1, (PAGE_TOKENS, groups, WORD_HALVES))
    return k.unflatten(-1, (PAGE_TOKENS, k_bytes)), v.unflatten(-1, (v_bytes, PAGE_TOKENS)).mT, words


def write_tokens(views: tuple[Tensor, Tensor, Tensor], start: int, rows: tuple[Tensor, Tensor, Tensor]) -> None:
    """Store coded tokens at positions start, start + 1, ... of the pages behind `views`.

    Args:
        views: From `page_views`; the pages must reach that far.
        start: Position of the first token.
        rows: K codes [H, T, d_k/4] and V codes [H, T, d_v/4] uint8, affine words [H, T, G, 4] float16.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    tokens = rows[0].shape[1]
    page: Tensor | int
    slot: Tensor | int
    if tokens == 1:
        page, slot = divmod(start, PAGE_TOKENS)
    else:
        at = torch.arange(start, start + tokens, device=rows[0].device)
        page, slot = at // PAGE_TOKENS, at % PAGE_TOKENS
    for view, part in zip(views, rows, strict=True):
        if part.dtype != view.dtype or part.shape != (view.shape[1], tokens, *view.shape[3:]):
            raise ValueError(f"coded rows {part.dtype} {list(part.shape)} do not fit pages {list(view.shape)}")
        view[page, :, slot] = part[:, 0] if tokens == 1 else part.transpose(0, 1)


def read_tokens(views: tuple[Tensor, Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return K codes, V codes and affine words of the tokens at [start, stop), shaped as `write_tokens` takes them."""
    first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
    inside = slice(start - first * PAGE_TOKENS, stop - first * PAGE_TOKENS)
    k, v, words = (view[first:last].transpose(0, 1).flatten(1, 2)[:, inside] for view in views)
    return k, v, words


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
    d_k, d_v, groups = CODES_PER_BYTE * k_bytes, CODES_PER_BYTE * v_codes.shape[-1], affine.shape[-2]
    if k_bytes % CODES_PER_BYTE or v_codes.shape[-1] % CODES_PER_BYTE:
        raise ValueError(f"head dims {d_k} and {d_v} must be divisible by 16")
    shape = (-(-tokens // PAGE_TOKENS), heads, block_bytes(d_k, d_v, groups))
    pages = torch.zeros(shape, dtype=torch.uint8, device=k_codes.device)
    write_tokens(page_views(pages, d_k, d_v, groups), 0, (k_codes, v_codes, affine))
    return pages


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
    if not 0 <= tokens <= pages.shape[0] * PAGE_TOKENS:
        raise ValueError(f"{pages.shape[0]} pages do not hold {tokens} tokens")
    k, v, words = read_tokens(page_views(pages, d_k, d_v, groups), 0, tokens)
    return k.contiguous(), v.contiguous(), words.contiguous()
