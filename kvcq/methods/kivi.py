"""KIVI: keys by channel, values by token, no rotation (arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit
from kvcq.methods.by_channel import ByChannelMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class Kivi(ByChannelMethod):
    """Min-max INT2: keys per channel over groups of tokens, values per token over groups of channels.

    Needs no statistics. Sink and recent windows are those of the recipe, as for every method; the paper has no sink
    and a residual of as many tokens as a block of keys.
    """

    name = "kivi"
    summary = "keys per channel over groups of tokens, values per token, min-max INT2"
    paper = "arXiv 2402.02750"

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Return both codecs; nothing is estimated."""
        return LayerFit(self.keys(context), self.values(stats.geometry.d_v))
