"""BF16: the untouched cache, the reference of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, Method
from kvcq.spec.codec import CodecSpec

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class Bf16(Method):
    """Keeps every layer as the model computes it; a fit of it has a plan of BF16 layers and no tensors."""

    name = "bf16"
    summary = "the exact cache: the reference of every comparison"
    quantizes = False
    unserved = "keeps rows exact"

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Return the codecs that change nothing. A fit never asks: `quantizes` is False."""
        return LayerFit(CodecSpec(quantizer="none"), CodecSpec(quantizer="none"))
