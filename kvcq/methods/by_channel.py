"""Parameters of the methods that code keys by channel over groups of tokens, and values by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcq.errors import InputError
from kvcq.methods.base import FitContext, Method, parameter
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import Windows

TOKENS = "tokens of a group, which share a key channel's scale; windows.recent must hold one"
LEAST = 2
CHANNELS = "channels that share a scale; a whole head where it has fewer"


@dataclass(frozen=True)
class ByChannelMethod(Method):
    """Base of KIVI and Kitty: 2-bit keys per channel over groups of tokens, 2-bit values per token.

    Groups start at the end of the sink. A group is complete before any query reads one of its keys coded: that needs
    a recent window of a group at least, see `codecs.token_group`.
    """

    unserved = "codes groups of tokens"

    group_tokens: int = parameter(128, TOKENS, low=LEAST, high=4096)
    group_channels: int = parameter(128, CHANNELS, low=4)

    def check(self, layer: LayerGeometry) -> None:
        """Refuse value groups that do not divide the head dimension."""
        check_channels(self.name, layer, (layer.d_v,), self.group_channels)

    def check_windows(self, windows: Windows) -> None:
        """Refuse a recent window shorter than a group."""
        if windows.recent < self.group_tokens:
            raise InputError(
                f"group_tokens={self.group_tokens} exceeds windows.recent={windows.recent}: keys would be read coded "
                "before their group is complete",
                where=f"method {self.name}",
                fix="use a longer window"
                if windows.recent < LEAST
                else f"use group_tokens of at most {windows.recent}, or a longer window",
            )

    def keys(self, context: FitContext, promoted: float = 0.0) -> CodecSpec:
        """Return the key codec under the windows of the recipe."""
        return CodecSpec(
            quantizer="token_group",
            group_tokens=self.group_tokens,
            group_start=context.windows.sink,
            promoted=promoted,
        )

    def values(self, d: int) -> CodecSpec:
        """Return the value codec of head dimension `d`."""
        return CodecSpec(groups=scales(d, self.group_channels))


def scales(d: int, group_channels: int) -> int:
    """Return how many scales a row of `d` channels has."""
    return max(1, d // group_channels)


def check_channels(method: str, layer: LayerGeometry, dims: Iterable[int], group_channels: int) -> None:
    """Refuse groups of channels that do not divide a head dimension which exceeds them.

    Raises:
        InputError: names the layer.
    """
    for d in dims:
        if d > group_channels and d % group_channels:
            raise InputError(
                f"group_channels={group_channels} does not divide the head dimension {d} of layer {layer.layer}",
                where=f"method {method}",
                fix=f"use group_channels={d}",
            )
