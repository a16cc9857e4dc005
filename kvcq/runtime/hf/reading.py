"""What the queries of one forward of one request read: the same for torch and for kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from kvcq.codecs.attend import Tier, attend
from kvcq.codecs.pair import HeadCodec
from kvcq.runtime.hf.turn import Turn


class Reading(ABC):
    """The rows of one request for the queries of one forward, open until every layer that shares them has read."""

    @abstractmethod
    def attend(
        self, query: Tensor, visible: Tensor | None, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend over the request's cache, the new rows included.

        Args:
            query: Post-RoPE queries ``[Hq, n, d_k]`` of the new tokens.
            visible: Bool ``[n, N]`` over all positions, as the rows were taken; None: causal.
            scaling: Factor on ``q . k``.
            softcap: Logits become ``softcap tanh(logits / softcap)``.
            sinks: Learned sink logits ``[Hq]``.

        Returns:
            Outputs ``[Hq, n, d_v]`` in the original frame.
        """

    def close(self) -> None:  # noqa: B027 - most readings leave nothing behind
        """Every reader has read."""


class TierReading(Reading):
    """The reference: rows are decoded and attended to by torch."""

    def __init__(self, codec: HeadCodec, tiers: Sequence[Tier], turn: Turn) -> None:
        self._codec, self._tiers, self._turn = codec, tiers, turn

    def attend(
        self, query: Tensor, visible: Tensor | None, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend in float32, or float64 for float64 queries, see `kvcq.codecs.attend`."""
        return attend(
            self._codec,
            query,
            self._tiers,
            self._turn.oldest,
            first=self._turn.first,
            visible=visible,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
