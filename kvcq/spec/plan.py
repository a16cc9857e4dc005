"""What happens to each layer of a model: its codecs, or BF16 with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from kvcq.spec.base import SpecModel
from kvcq.spec.canonical import digest
from kvcq.spec.codec import CodecSpec


class Windows(SpecModel):
    """Tokens kept exact: key j is exact for query i iff ``j < sink`` or ``j > i - recent``."""

    sink: int = Field(default=64, ge=0)
    recent: int = Field(default=256, ge=0)


class LayerPlan(SpecModel):
    """One layer: either both codecs, or none of them and the reason why it stays BF16."""

    layer: int = Field(ge=0)
    k: CodecSpec | None = None
    v: CodecSpec | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> LayerPlan:
        if (self.k is None) != (self.v is None):
            raise ValueError("a layer has codecs for both K and V or for neither")
        if (self.k is None) != (self.reason is not None):
            raise ValueError("a BF16 layer states its reason, a quantized one has none")
        return self

    @property
    def quantized(self) -> bool:
        """True when this layer's cache is stored in codes."""
        return self.k is not None


def plan_digest(plan: Sequence[LayerPlan]) -> str:
    """Return the SHA-256 of a plan: plans of equal tensors may still differ, e.g. in a clip or the groups."""
    return digest([entry.plain() for entry in plan])
