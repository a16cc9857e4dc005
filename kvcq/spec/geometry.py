"""Attention geometry of a model: what each layer caches and how its positions are encoded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from kvcq.spec.base import SpecModel

LayerKind = Literal["full", "sliding", "chunked", "linear", "shared"]

FLOAT32_MAX = 3.4028234663852886e38
Float32 = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]


class RopeSpec(SpecModel):
    """Rotary position embedding of one kind of layer.

    A channel pair (a, b) at position p is turned by the angle ``sense * p * inv_freq[i]`` and multiplied by
    `attention_scaling` (YaRN; 1.0 elsewhere). Channels outside ``[offset, offset + rotary_dims)`` do not move.

    Attributes:
        rotary_dims: Channels that turn, an even number.
        offset: First channel that turns.
        pairing: ``half``: channel i turns with i + rotary_dims / 2; ``interleaved``: 2i turns with 2i + 1.
        sense: +1 for (a cos - b sin, b cos + a sin), -1 for the opposite turn.
        inv_freq: Angular frequencies in radians a token, float32 values, one a pair.
        attention_scaling: Factor on the rotated vector, contained in captured q and k.
        regime: RoPE type with the branch in force, e.g. ``default``, ``llama3``, ``longrope:short``.
    """

    rotary_dims: PositiveInt
    offset: int = Field(default=0, ge=0)
    pairing: Literal["half", "interleaved"] = "half"
    sense: Literal[1, -1] = 1
    inv_freq: tuple[Float32, ...]
    attention_scaling: Float32 = 1.0
    regime: str = "default"

    @property
    def by_length(self) -> bool:
        """True if the length of the sequence selects the frequencies (longrope, dynamic NTK)."""
        return ":" in self.regime

    @model_validator(mode="after")
    def _pairs(self) -> RopeSpec:
        if self.rotary_dims != 2 * len(self.inv_freq):
            raise ValueError(f"{self.rotary_dims} rotary channels need {self.rotary_dims // 2} frequencies")
        return self


class LayerGeometry(SpecModel):
    """One layer of the model. `rope` indexes `ModelGeometry.ropes`; None means no rotation (NoPE).

    `unrotates` is True when the shift check proved that q and k at position p are the rotation of their
    position-0 form; without it only post-RoPE statistics exist. `source` is the layer whose cache a shared layer
    reads: its queries belong to the statistics of that layer.
    """

    layer: int = Field(ge=0)
    kind: LayerKind
    q_heads: int = Field(ge=0)
    kv_heads: int = Field(ge=0)
    d_k: int = Field(ge=0)
    d_v: int = Field(ge=0)
    scaling: float = 1.0
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    rope: int | None = None
    unrotates: bool = False
    source: int | None = None

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q_heads // self.kv_heads


class ModelGeometry(SpecModel):
    """All layers of a model, in order of their real layer id."""

    model_type: str
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_positions: int | None = None
    ropes: tuple[RopeSpec, ...] = ()
    layers: tuple[LayerGeometry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> ModelGeometry:
        for layer in self.layers:
            if layer.rope is not None and not 0 <= layer.rope < len(self.ropes):
                raise ValueError(f"layer {layer.layer} names RoPE {layer.rope} of {len(self.ropes)}")
            rope = self.rope_of(layer)
            if layer.kind == "full" and rope is not None and rope.offset + rope.rotary_dims > layer.d_k:
                raise ValueError(f"layer {layer.layer} turns {rope.rotary_dims} of {layer.d_k} channels")
            if layer.kind == "full" and (layer.kv_heads == 0 or layer.q_heads % layer.kv_heads):
                raise ValueError(f"layer {layer.layer} has {layer.q_heads} query heads for {layer.kv_heads} KV heads")
        return self

    def rope_of(self, layer: LayerGeometry) -> RopeSpec | None:
        """Return the RoPE of a layer, or None for a layer without positions."""
        return None if layer.rope is None else self.ropes[layer.rope]

    def length_regimes(self) -> list[str]:
        """Return the RoPE regimes that depend on the sequence length, e.g. ``longrope:short``."""
        return sorted({rope.regime for rope in self.ropes if rope.by_length})

    def quantizable(self) -> tuple[LayerGeometry, ...]:
        """Return the full-attention layers: the only ones whose cache grows with the context."""
        return tuple(layer for layer in self.layers if layer.kind == "full")
