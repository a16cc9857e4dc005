"""The closed vocabulary of codecs: how one head vector becomes 2-bit codes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from kvcq.spec.base import GrowingModel

Transform = Literal["identity", "orthogonal", "metric"]
Quantizer = Literal["none", "uniform", "levels", "group_vq", "token_group"]
Metadata = Literal["fp16-bias", "fp32-zero"]
CodebookDtype = Literal["int8", "e4m3", "e5m2"]
Spacing = Literal["minmax", "lloyd-main", "lloyd-nova"]
Unit = Literal["norm", "range", "channel"]

VQ_GROUP = 4
VQ_WORDS = 256
SERVED_GROUPS = (1, 4)
MAX_LEVEL_BITS = 4


class CodecSpec(GrowingModel):
    """The codec of the keys or the values of one layer.

    Attributes:
        transform: Linear map into the stored frame: none, orthogonal, or metric (scores use its inverse).
        centred: A per-head offset is subtracted before the transform.
        quantizer: ``uniform`` min-max codes; ``group_vq`` (4 channels share one of 256 words); ``levels``, the nearest
            of 2^bits stored levels; ``token_group``, min-max codes of each channel over a run of tokens.
        bits: Bits per channel, codes only.
        groups: Scales per head vector (``uniform``); served layouts allow 1 or 4.
        clip: Rank ratio c of the symmetric clip, threshold sorted(|x|)[min(int(c d), d - 1)]; 1.0 is off.
        metadata: ``fp16-bias`` stores {scale, bias} in fp16 (served); ``fp32-zero`` {scale, zero} in float32.
        codebook: Codebook dtype of ``group_vq``; only ``int8`` is served.
        spacing: How an encoder places the levels of ``uniform`` (see `codecs.uniform`); decoders never need it.
        unit: What ``levels`` are levels of: ``norm``, r / |r| with |r| stored; ``range``, r on [-1, 1] of its own
            minimum and maximum, middle and half width stored; ``channel``, r on [-1, 1] of fixed bounds by channel.
        outliers: Share of the entries that ``levels`` keep exact in a list: of ``range``, as many of every row, those
            farthest from its mean; of ``channel``, the entries outside the bounds.
        pre_rope: Keys are coded as they were before RoPE: un-rotated, coded, rotated again. The transform then belongs
            to the un-rotated row, and the stored frame is that of the cache.
        reordered: Scales cover runs of channels of all KV heads of the token, in a stored order, as many as without.
        group_tokens: Tokens that share the scales of a channel (``token_group``).
        group_start: Position at which the first group starts: the end of the sink.
        promoted: Share of the channels, those of largest mean magnitude in a group, that get twice the bits.
    """

    LATER: ClassVar[frozenset[str]] = frozenset(
        {"spacing", "unit", "outliers", "pre_rope", "reordered", "group_tokens", "group_start", "promoted"}
    )

    transform: Transform = "identity"
    centred: bool = False
    quantizer: Quantizer = "uniform"
    bits: int = Field(default=2, ge=1, le=8)
    groups: int = Field(default=1, ge=1)
    clip: float = Field(default=1.0, gt=0.0, le=1.0)
    metadata: Metadata = "fp16-bias"
    codebook: CodebookDtype | None = None
    spacing: Spacing = "minmax"
    unit: Unit | None = None
    outliers: float = Field(default=0.0, ge=0.0, lt=0.5)
    pre_rope: bool = False
    reordered: bool = False
    group_tokens: int = Field(default=1, ge=1)
    group_start: int = Field(default=0, ge=0)
    promoted: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _consistent(self) -> CodecSpec:
        if (self.quantizer == "group_vq") != (self.codebook is not None):
            raise ValueError("a codebook dtype belongs to group_vq, and group_vq needs one")
        if self.quantizer == "group_vq" and self.groups != 1:
            raise ValueError("group_vq has one scale per token and head: groups must be 1")
        if self.spacing != "minmax" and (self.quantizer != "uniform" or self.bits != 2):
            raise ValueError("Lloyd-Max spacing belongs to uniform codes of 2 bits")
        self._levels()
        self._token_groups()
        if self.pre_rope and (self.centred or self.transform == "metric" or self.quantizer == "group_vq"):
            raise ValueError("rows coded before RoPE are neither centred, nor in a metric, nor in vector codes")
        if self.reordered and (self.quantizer != "uniform" or self.clip < 1.0):
            raise ValueError("reordered channels have uniform codes and no clip")
        return self

    def _levels(self) -> None:
        if (self.quantizer == "levels") != (self.unit is not None):
            raise ValueError("a unit belongs to levels, and levels need one")
        if self.unit is None and self.outliers:
            raise ValueError("an outlier list belongs to levels")
        if self.unit is not None and (self.bits > MAX_LEVEL_BITS or self.groups != 1 or self.clip < 1.0):
            raise ValueError(f"levels have at most {MAX_LEVEL_BITS} bits, one group and no clip")
        if self.unit == "norm" and self.outliers:
            raise ValueError("rows in units of their norm keep no outliers")

    def _token_groups(self) -> None:
        if self.quantizer != "token_group":
            if self.group_tokens != 1 or self.group_start or self.promoted:
                raise ValueError("group_tokens, group_start and promoted belong to token_group")
        elif self.groups != 1 or self.clip < 1.0 or self.bits > MAX_LEVEL_BITS:
            raise ValueError(f"token groups have one scale a channel, no clip and at most {MAX_LEVEL_BITS} bits")

    @property
    def by_row(self) -> bool:
        """True when a head's row alone gives its codes, whatever its position, its neighbours and other heads."""
        return not (self.quantizer == "token_group" or self.pre_rope or self.reordered or self.outliers)

    @property
    def absorbs_mean(self) -> bool:
        """True when the mean of a channel costs no codes: an offset, or a scale of the channel's own or of its like."""
        return self.centred or self.quantizer == "token_group" or self.unit == "channel" or self.reordered

    def promoted_channels(self, d: int) -> int:
        """Return how many of `d` channels a token group gives twice the bits."""
        return int(self.promoted * d)

    def row_outliers(self, d: int) -> int:
        """Return how many entries of every row of `d` channels are kept exact (unit ``range``)."""
        return max(1, round(self.outliers * d)) if self.unit == "range" and self.outliers else 0

    @property
    def unserved(self) -> str | None:
        """Why the serving pages do not hold this codec, in words; None when they do."""
        reasons = {
            "keeps rows exact": self.quantizer == "none",
            "codes keys before RoPE": self.pre_rope,
            "codes groups of tokens": self.quantizer == "token_group",
            "scales across heads": self.reordered,
            "levels without an affine form": self.quantizer == "levels",
            f"{self.bits} bits": self.bits != 2,
            f"metadata {self.metadata}": self.metadata != "fp16-bias",
            f"{self.groups} groups": self.groups not in SERVED_GROUPS,
            f"codebook {self.codebook}": self.quantizer == "group_vq" and self.codebook != "int8",
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    @property
    def served(self) -> bool:
        """True when the serving kernels read this codec; the others are for accuracy only."""
        return self.unserved is None
