"""Kitty: KIVI with more bits for the channels of largest keys (arXiv 2511.18643)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcq.methods.base import FitContext, LayerFit, parameter
from kvcq.methods.by_channel import ByChannelMethod

if TYPE_CHECKING:
    from kvcq.stats.view import LayerStats


@dataclass(frozen=True)
class Kitty(ByChannelMethod):
    """Key channels in INT2 per group of tokens, those of largest mean magnitude in the group in INT4.

    Channels are chosen anew for each group and head, from the group's own keys. Needs no statistics.
    """

    name = "kitty"
    summary = "KIVI with the strongest key channels of each group in INT4"
    paper = "arXiv 2511.18643"

    promoted: float = parameter(0.125, "share of the key channels in INT4", low=0.0, high=0.5)

    def fit_layer(self, stats: LayerStats, context: FitContext) -> LayerFit:
        """Return both codecs; nothing is estimated."""
        return LayerFit(self.keys(context, self.promoted), self.values(stats.geometry.d_v))
