"""KVQuant: non-uniform levels with an outlier list, keys per channel before RoPE (arXiv 2401.18079)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.errors import InputError
from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.pre_rope import PreRopeMethod, unrotated_keys
from kvcq.spec.codec import CodecSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from kvcq.stats.view import LayerStats

# A channel that never changed in calibration still needs bounds apart from each other.
WIDTH_FLOOR = 1e-6


@dataclass(frozen=True)
class KvquantNuq(PreRopeMethod):
    """Levels of a KV head by 1-D k-means of normalised entries; entries beyond the bounds are kept exact.

    Keys: un-rotated, on [-1, 1] of fixed bounds by channel, which leave the share `outliers` of the calibration keys
    outside. Values: on [-1, 1] of the row's own range without its outliers. k-means is unweighted: the paper weighs
    entries by Fisher information, which needs gradients. The sink window keeps the first tokens exact.
    """

    name = "kvquant-nuq"
    summary = "keys before RoPE per channel, values per token: non-uniform levels (unweighted k-means), exact outliers"
    paper = "arXiv 2401.18079"

    bits: int = parameter(2, "bits of a channel", choices=(2, 3, 4))
    outliers: float = parameter(0.01, "share of the entries kept exact", low=0.0, high=0.1)
    level_rows: int = parameter(8192, "sampled tokens behind bounds and levels, at most", low=256)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Fit bounds of the keys and levels of both sides.

        Raises:
            InputError: no sampled rows.
        """
        from kvcq.codecs.levels import outlier_mask
        from kvcq.methods.rotation import served

        keys, values = unrotated_keys(stats, self.level_rows), stats.v_rows[:, : self.level_rows]
        if keys.shape[1] == 0:
            raise InputError(
                f"layer {stats.geometry.layer} has no sampled rows", where="stats", fix="collect with --rows"
            )
        shared = {"quantizer": "levels", "bits": self.bits, "outliers": self.outliers}
        spec_k, spec_v = CodecSpec(**shared, unit="channel", pre_rope=True), CodecSpec(**shared, unit="range")
        bounds = channel_bounds(keys, self.outliers)
        low, high = bounds.double().unsqueeze(1).unbind(-1)
        out_k = (keys < low) | (keys > high)
        out_v = outlier_mask(values, spec_v, None)
        tensors = {
            "k.bounds": served(bounds),
            "k.levels": _levels((keys - (high + low) / 2) / ((high - low) / 2), out_k, self.bits),
            "v.levels": _levels(_row_units(values.double(), out_v), out_v, self.bits),
        }
        return LayerFit(spec_k, spec_v, tensors, {"level_rows": (float(keys.shape[1]),)})


def channel_bounds(rows: Tensor, outliers: float) -> Tensor:
    """Return lower and upper bound of each channel of rows ``[H, n, d]``, ``[H, d, 2]`` float32.

    They are order statistics that leave out int(outliers n / 2) rows on either side, rounded outwards.
    """
    import torch

    ordered = rows.sort(1).values
    skip = int(outliers * rows.shape[1] / 2)
    low, high = ordered[:, skip], ordered[:, -1 - skip]
    margin = WIDTH_FLOOR * torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return torch.stack([low - margin, high + margin], -1).float()


def _row_units(rows: Tensor, outside: Tensor) -> Tensor:
    """Put every row on [-1, 1] of its entries that are not outside; a row of equal entries becomes 0."""
    import torch

    low = rows.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
    high = rows.masked_fill(outside, -torch.inf).amax(-1, keepdim=True)
    half = (high - low) / 2
    return torch.where(half > 0, (rows - (high + low) / 2) / torch.where(half > 0, half, 1.0), 0.0)


def _levels(units: Tensor, outside: Tensor, bits: int) -> np.ndarray:
    """Return the levels ``[H, 2^bits]`` float32 of each head's entries that are not outside."""
    import numpy as np

    from kvcq.methods.line import line_kmeans

    heads = [line_kmeans(row[~mask].numpy(), 2**bits) for row, mask in zip(units, outside, strict=True)]
    return np.stack(heads).astype(np.float32)
