"""SAW-INT4: small Hadamard blocks on keys and 4-bit codes (arXiv 2604.19157)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.errors import InputError
from kvcq.methods.base import FitContext, LayerFit, Method, parameter
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats

BITS = 4


@dataclass(frozen=True)
class SawInt4(Method):
    """Keys times a block-diagonal Hadamard matrix, values as they are, both in min-max INT4 per token.

    The same matrix on every head, queries with it. Needs no statistics.
    """

    name = "saw-int4"
    summary = "Hadamard blocks on keys, then min-max INT4 per token"
    paper = "arXiv 2604.19157"
    unserved = f"{BITS} bits"

    order: int = parameter(16, "channels that a Hadamard block mixes", choices=(16, 64, 128))
    rotate_values: bool = parameter(False, "rotate values as well")

    def check(self, layer: LayerGeometry) -> None:
        """Refuse blocks that do not divide a head dimension."""
        for dims in (layer.d_k, layer.d_v) if self.rotate_values else (layer.d_k,):
            if dims % self.order:
                raise InputError(
                    f"order={self.order} does not divide the head dimension {dims} of layer {layer.layer}",
                    where=f"method {self.name}",
                    fix="use order=16",
                )

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Return the block rotation; nothing is estimated."""
        from kvcq.methods.rotation import served
        from kvcq.transforms.hadamard import block_hadamard

        geometry = stats.geometry
        heads = geometry.kv_heads
        rotated, plain = CodecSpec(transform="orthogonal", bits=BITS), CodecSpec(bits=BITS)
        tensors = {"k.transform": served(block_hadamard(geometry.d_k, self.order).expand(heads, -1, -1))}
        if self.rotate_values:
            tensors["v.transform"] = served(block_hadamard(geometry.d_v, self.order).expand(heads, -1, -1))
        return LayerFit(rotated, rotated if self.rotate_values else plain, tensors)
