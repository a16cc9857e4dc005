"""RotateKV: keys before RoPE, channels reordered, then a Hadamard rotation (arXiv 2501.16383)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.by_channel import CHANNELS, check_channels, scales
from kvcq.methods.pre_rope import PreRopeMethod
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class Rotatekv(PreRopeMethod):
    """Un-rotated keys with channels in the order of their signed sums, times H; values times H; grouped INT2.

    The order comes from E k before RoPE, per KV head. Both maps mix the channels of one head; the paper's transform of
    keys runs over groups of heads. Tokens of massive activations are kept by the sink window.
    """

    name = "rotatekv"
    summary = "keys before RoPE: reordered channels, Hadamard, min-max INT2; values: Hadamard, INT2"
    paper = "arXiv 2501.16383"

    group_channels: int = parameter(128, CHANNELS, low=4)

    def check(self, layer: LayerGeometry) -> None:
        """Refuse layers that do not un-rotate and groups that do not divide a head dimension."""
        super().check(layer)
        check_channels(self.name, layer, (layer.d_k, layer.d_v), self.group_channels)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Order the channels and return both rotations."""
        import torch

        from kvcq.methods.rotation import served, walsh

        geometry = stats.geometry
        sums = stats.moments["k0_mean" if "k0_mean" in stats.moments else "k_mean"]
        order = sums.sort(stable=True, dim=-1).indices
        hadamard = walsh(geometry.kv_heads, geometry.d_k)
        # Row order[c] of A is row c of H: x A = x[order] H.
        reordered = torch.zeros_like(hadamard).scatter(1, order.unsqueeze(-1).expand_as(hadamard), hadamard)
        return LayerFit(
            k=CodecSpec(transform="orthogonal", groups=scales(geometry.d_k, self.group_channels), pre_rope=True),
            v=CodecSpec(transform="orthogonal", groups=scales(geometry.d_v, self.group_channels)),
            tensors={
                "k.transform": served(reordered),
                "v.transform": served(walsh(geometry.kv_heads, geometry.d_v)),
            },
        )
