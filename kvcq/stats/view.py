"""What a method sees of one layer: means of moments, sampled rows and the probe."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcq.spec.geometry import LayerGeometry, RopeSpec


@dataclass(frozen=True)
class ProbeRows:
    """One probe passage of one layer: held out of the moments and of the sampled rows.

    Attributes:
        k: Keys of every probe token, post-RoPE, ``[H, T, d_k]`` float32.
        v: Values, ``[H, T, d_v]`` float32.
        q: Queries at `q_index`, post-RoPE, ``[Hq, nq, d_k]`` float32.
        q_index: Row of `k` that each query belongs to, ``[nq]`` int64; it sees the rows up to and including it.
        positions: RoPE position of each row, ``[T]`` int64.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    q_index: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one layer, averaged over `tokens` tokens.

    Attributes:
        geometry: The layer.
        rope: Its rotary embedding; None for a layer without positions.
        tokens: Tokens behind the moments.
        moments: Means in float64, frame of the cache (post-RoPE): ``k_mean [H, d_k]``, ``k_second [H, d_k, d_k]``
            (E k'k, uncentred), ``v_mean``, ``v_second``, ``q_mean`` and ``q_second`` (mean over tokens and over the
            query heads of the group: C_Q of one KV head, OSCAR section 3), ``o_second [H, d_v, d_v]`` (attention
            outputs, C_S as the paper defines it). A layer with ``geometry.unrotates`` and a rotation also has
            ``k0_mean, k0_second, q0_mean, q0_second``: the same of the position-0 form of k and q.
        k_rows: Sampled keys ``[H, n, d_k]`` float32, post-RoPE.
        v_rows: Values of the same tokens ``[H, n, d_v]``.
        q_rows: Queries ``[Hq, m, d_k]`` of the first m of these tokens.
        row_positions: RoPE positions ``[n]`` int64 of `k_rows`.
        q_row_positions: RoPE positions ``[m]`` int64 of `q_rows`.
        probes: Held-out passages; every choice made by measured attention error uses them.
        extrema: ``k_min, k_max [H, d_k]``, ``v_min, v_max [H, d_v]`` float32.
    """

    geometry: LayerGeometry
    rope: RopeSpec | None
    tokens: int
    moments: dict[str, Tensor]
    k_rows: Tensor
    v_rows: Tensor
    q_rows: Tensor
    row_positions: Tensor
    q_row_positions: Tensor
    probes: tuple[ProbeRows, ...] = ()
    extrema: dict[str, Tensor] = field(default_factory=dict)

    @property
    def k_cov(self) -> Tensor:
        """Centred second moment of the keys, ``[H, d_k, d_k]`` float64."""
        return self._centred("k")

    @property
    def v_cov(self) -> Tensor:
        """Centred second moment of the values, ``[H, d_v, d_v]`` float64."""
        return self._centred("v")

    @property
    def mean_ratio(self) -> Tensor:
        """|mean k|^2 / total variance of k per KV head, ``[H]`` float64: above 4, plain codes mostly store the mean."""
        energy = self.moments["k_mean"].square().sum(-1)
        variance = torch.diagonal(self.k_cov, dim1=-2, dim2=-1).sum(-1)
        return energy / variance.clamp_min(torch.finfo(torch.float64).tiny)

    def _centred(self, name: str) -> Tensor:
        mean = self.moments[f"{name}_mean"]
        return self.moments[f"{name}_second"] - mean.unsqueeze(-1) * mean.unsqueeze(-2)
