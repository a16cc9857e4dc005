"""The rank clip: a symmetric bound at a fixed rank of the magnitudes of one row."""

from __future__ import annotations

from torch import Tensor


def rank_threshold(rows: Tensor, ratio: float) -> Tensor:
    """Return ``sorted(|x|)[min(int(ratio * d), d - 1)]`` of rows [..., d] as [..., 1]; no interpolation.

    The rank runs over the whole head vector, also when scales are grouped (OSCAR prefill rule).
    """
    d = rows.shape[-1]
    return rows.abs().kthvalue(min(int(ratio * d), d - 1) + 1, dim=-1, keepdim=True).values


def clip_rows(rows: Tensor, ratio: float) -> Tensor:
    """Clamp rows [..., d] to plus or minus their rank threshold; a ratio whose rank is the last changes nothing."""
    if int(ratio * rows.shape[-1]) >= rows.shape[-1] - 1:
        return rows
    bound = rank_threshold(rows, ratio)
    return rows.clamp(-bound, bound)
