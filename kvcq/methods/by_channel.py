"""Parameters of the methods that code keys by channel over groups of tokens, and values by token."""

from __future__ import annotations

from dataclasses import dataclass

from kvcq.errors import InputError
from kvcq.methods.base import FitContext, Method, parameter
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import Windows

TOKENS = "tokens of a group, which share a key channel's scale; windows.recent must hold one"
CHANNELS = "channels that share a value scale; a whole head where it has fewer"


@dataclass(frozen=True)
class ByChannelMethod(Method):
    """Base of KIVI and Kitty: 2-bit keys per channel over groups of tokens, 2-bit values per token.

    Groups start at the end of the sink. A group is complete before any query reads one of its keys coded: that needs
    a recent window of a group at least, see `codecs.token_group`.
    """

    unserved = "codes groups of tokens"

    group_tokens: int = parameter(128, TOKENS, low=2, high=4096)
    group_channels: int = parameter(128, CHANNELS, low=4)

    def check(self, layer: LayerGeometry) -> None:
        """Refuse value groups that do not divide the head dimension."""
        if layer.d_v > self.group_channels and layer.d_v % self.group_channels:
            raise InputError(
                f"group_channels={self.group_channels} does not divide the head dimension {layer.d_v} of layer "
                f"{layer.layer}",
                where=f"method {self.name}",
                fix=f"use group_channels={layer.d_v}",
            )

    def check_windows(self, windows: Windows) -> None:
        """Refuse a recent window shorter than a group."""
        if windows.recent < self.group_tokens:
            raise InputError(
                f"group_tokens={self.group_tokens} exceeds windows.recent={windows.recent}: keys would be read coded "
                "before their group is complete",
                where=f"method {self.name}",
                fix=f"use group_tokens of at most {windows.recent}, or a longer window",
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
        return CodecSpec(groups=max(1, d // self.group_channels))
