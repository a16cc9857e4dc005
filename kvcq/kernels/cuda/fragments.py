"""Tables of a layer in the order in which registers of matrix instructions hold them."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a word's constant stays in the range of float16; such a word is too long to be nearest to any row.
LOWEST = -60000.0


def map_fragments(matrix: Tensor) -> Tensor:
    """Order a map ``[H, d, d]`` as second operands of products of 16 x 16 x 8.

    Returns:
        int32 ``[H, d/8, d/32, 32, 4]``: of 8 columns, two steps of 16 rows and a lane the registers of both steps; a
        register is two neighbouring rows of a column, the first in the low half.
    """
    heads, d, _ = matrix.shape
    # Rows: two steps, step, half of a step, quad, element; columns: tile, row of the lane.
    split = matrix.reshape(heads, d // 32, 2, 2, 4, 2, d // 8, 8)
    ordered = split.permute(0, 6, 1, 7, 4, 2, 3, 5).contiguous()
    return ordered.view(torch.int32).reshape(heads, d // 8, d // 32, 32, 4)


def word_terms(codebook: Tensor, scale: Tensor) -> Tensor:
    """Return the factors of a word's score, float16 ``[H, d/4, 256, 8]``.

    The first four stand at the coordinates, the others at rho: three that add up to ``-scale (|c|^2 - |c'|^2) / 2`` and
    a zero, c' the word nearest to zero. The score of c' is zero.

    Args:
        codebook: int32 ``[H, d/4, 256]``.
        scale: float32 ``[H, d/4]``.
    """
    words = codebook[..., None].view(torch.int8).to(torch.int32)
    norms = words.square().sum(-1)
    least, center = norms.min(-1, keepdim=True)
    apart = words - words.gather(2, center[..., None].expand(-1, -1, -1, 4))
    left = ((norms - least) * scale.double()[..., None] * -0.5).clamp(min=LOWEST)
    pieces = []
    for _ in range(3):
        pieces.append(left.half())
        left = left - pieces[-1].double()
    return torch.cat([apart.half(), torch.stack([*pieces, torch.zeros_like(pieces[0])], -1)], -1)


def search_fragments(codebook: Tensor, scale: Tensor) -> Tensor:
    """Order the words of every group as second operands of products of 16 x 8 x 8, and append the words themselves.

    Word ``16 q + 4 j + 2 p + e`` (j < 4; p, e < 2) is column ``2 j + e`` of tile ``2 q + p``: the results of two tiles
    give the lanes of quad j four neighbouring words. Odd groups have their coordinates in the last four rows.

    Args:
        codebook: int32 ``[H, d/4, 256]``.
        scale: float32 ``[H, d/4]``.

    Returns:
        int32 ``[H, d/4, 1280]``: of four tiles and a lane four registers, then 256 codewords.
    """
    terms = word_terms(codebook, scale)
    terms[:, 1::2] = terms[:, 1::2].roll(4, -1)
    split = terms.reshape(*terms.shape[:2], 8, 2, 4, 2, 2, 4, 2)
    ordered = split.permute(0, 1, 2, 4, 6, 7, 3, 5, 8).contiguous()
    return torch.cat([ordered.view(torch.int32).flatten(2), codebook], -1).contiguous()
