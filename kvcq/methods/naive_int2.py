"""Naive INT2: min-max codes of the raw key and value vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit
from kvcq.methods.uniform import UniformMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class NaiveInt2(UniformMethod):
    """Per token asymmetric INT2 over the head dimension, post-RoPE, no rotation: the floor of every comparison."""

    name = "naive-int2"
    summary = "min-max INT2 per token, no rotation"

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Return identity codecs; nothing is estimated."""
        return LayerFit(*self.codecs(stats.geometry))
