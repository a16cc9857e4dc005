"""QuaRot-style INT2: a Hadamard rotation, then min-max codes (arXiv 2404.00456, KV cache part)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit
from kvcq.methods.uniform import UniformMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class QuarotInt2(UniformMethod):
    """The same Hadamard matrix on keys, queries and values of every head; needs no statistics.

    This is the form that OSCAR and NOVA-KV compare with: OSCAR's quantizer after the rotation. Upstream QuaRot
    rounds its zero point to an integer and widens the range to contain zero.
    """

    name = "quarot-int2"
    summary = "Hadamard rotation, then min-max INT2 per token"
    paper = "arXiv 2404.00456"

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Return Hadamard codecs, block-diagonal for head dimensions that are not powers of two."""
        from kvcq.methods.rotation import served, walsh

        geometry = stats.geometry
        tensors = {
            "k.transform": served(walsh(geometry.kv_heads, geometry.d_k)),
            "v.transform": served(walsh(geometry.kv_heads, geometry.d_v)),
        }
        return LayerFit(*self.codecs(geometry, "orthogonal"), tensors)
