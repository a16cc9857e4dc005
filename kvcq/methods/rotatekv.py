"""RotateKV: keys before RoPE, a Hadamard rotation, then channels of alike means together (arXiv 2501.16383)."""

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
    """Un-rotated keys times H, the channels of all heads in the order of their signed sums; values times H; INT2.

    The order comes from E k H before RoPE: channels of alike means share a scale, which costs nothing in bits. H mixes
    the channels of one head; the release's runs over groups of heads. Tokens of massive activations are kept by the
    sink window.
    """

    name = "rotatekv"
    summary = "keys before RoPE: Hadamard, channels reordered across heads, min-max INT2; values: Hadamard, INT2"
    paper = "arXiv 2501.16383"

    group_channels: int = parameter(128, CHANNELS, low=4)

    def check(self, layer: LayerGeometry) -> None:
        """Refuse layers that do not un-rotate and groups that do not divide a head dimension."""
        super().check(layer)
        check_channels(self.name, layer, (layer.d_k, layer.d_v), self.group_channels)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Order the channels and return both rotations."""
        from kvcq.methods.rotation import served, walsh

        geometry = stats.geometry
        heads = geometry.kv_heads
        hadamard = walsh(heads, geometry.d_k)
        means = stats.moments["k0_mean" if "k0_mean" in stats.moments else "k_mean"]
        rotated = (means.unsqueeze(1) @ hadamard).flatten()
        order = rotated.sort(stable=True).indices.reshape(heads, geometry.d_k)
        return LayerFit(
            k=CodecSpec(
                transform="orthogonal", groups=scales(geometry.d_k, self.group_channels), pre_rope=True, reordered=True
            ),
            v=CodecSpec(transform="orthogonal", groups=scales(geometry.d_v, self.group_channels)),
            tensors={
                "k.transform": served(hadamard),
                "k.order": order.int().numpy(),
                "v.transform": served(walsh(heads, geometry.d_v)),
            },
        )
