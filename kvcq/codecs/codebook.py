"""Group codebooks: 4 channels share one of 256 words; snapping to the served dtype and the nearest search."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.spec.codec import VQ_GROUP, CodebookDtype

FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}

# Scores held at once: a tile that stays in the L2 cache of a CPU core, and 64 MiB on an accelerator.
CPU_TILE = 1 << 18
DEVICE_TILE = 1 << 24


def snap_int8(centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Snap centroids [..., words, 4] to int8 with one float32 scale [...] for each codebook: value = scale * int8.

    The scale is amax / 127. Snapping a snapped codebook changes nothing: fl(fl(127 s) / 127) = s for every float32
    quotient s. A codebook of zeros has scale 1.
    """
    values = centroids.to(torch.float32)
    largest = values.abs().amax((-2, -1))
    # Not by a number: CUDA then multiplies by a rounded 1 / 127, and words would not survive a second snapping.
    scale = largest / torch.full_like(largest, 127.0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    words = (values / scale[..., None, None]).round().clamp(-127, 127).to(torch.int8)
    return words, scale


def snap_float8(centroids: Tensor, name: CodebookDtype) -> Tensor:
    """Snap centroids to e4m3 or e5m2 without a scale, saturating, and return them as float16 (exact).

    Unscaled is idempotent: a loader that snaps once more reads the same words.
    """
    dtype, largest = FLOAT8[name]
    return centroids.to(torch.float32).clamp(-largest, largest).to(dtype).to(torch.float16)


def nearest(x: Tensor, words: Tensor) -> Tensor:
    """Return the index [..., n] uint8 of the word nearest to each row: argmax of <c, x> - |c|^2 / 2.

    The score is ((x0 c0 + x1 c1) + x2 c2) + x3 c3 - |c|^2 / 2 in float32, each operation rounded on its own, so an
    index depends on its own row alone, whatever the batch. Ties take the lowest index.

    Args:
        x: Rows [B, n, 4] float32, normalised.
        words: Snapped centroids [B, words, 4] float32, at most 256 words.
    """
    books, rows, _ = x.shape
    count = words.shape[1]
    columns = words.mT.contiguous()
    half = columns[:, 0] * columns[:, 0]
    for j in range(1, VQ_GROUP):
        half = half + columns[:, j] * columns[:, j]
    half = half / 2
    out = torch.empty(books, rows, dtype=torch.uint8, device=x.device)
    tile = max(1, (CPU_TILE if x.device.type == "cpu" else DEVICE_TILE) // count)
    row_step = max(1, min(rows, tile))
    book_step = max(1, tile // row_step)
    for b in range(0, books, book_step):
        book = slice(b, b + book_step)
        for start in range(0, rows, row_step):
            part = x[book, start : start + row_step]
            score = part[..., 0:1] * columns[book, None, 0]
            for j in range(1, VQ_GROUP):
                score += part[..., j : j + 1] * columns[book, None, j]
            score -= half[book, None]
            out[book, start : start + row_step] = score.argmax(-1).to(torch.uint8)
    return out


def lookup(index: Tensor, words: Tensor) -> Tensor:
    """Return rows [H, T, 4 G] float32 of the word indices [H, T, G] in codebooks [H, G, words, 4]."""
    heads, groups, count, _ = words.shape
    first = torch.arange(heads * groups, dtype=torch.int32, device=index.device).view(heads, 1, groups) * count
    # A word of 16 bytes is one element: the copy is several times that of rows of four.
    elements = words.reshape(-1, VQ_GROUP).view(torch.complex128).flatten()
    return (
        elements.index_select(0, (index + first).flatten())
        .view(torch.float32)
        .view(*index.shape[:2], VQ_GROUP * groups)
    )
