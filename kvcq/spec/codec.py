"""The closed vocabulary of codecs: how one head vector becomes 2-bit codes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvcq.spec.base import SpecModel

Transform = Literal["identity", "orthogonal", "metric"]
Quantizer = Literal["none", "uniform", "levels", "group_vq", "token_group"]
Metadata = Literal["fp16-bias", "fp32-zero"]
CodebookDtype = Literal["int8", "e4m3", "e5m2"]
Spacing = Literal["minmax", "lloyd-main", "lloyd-nova"]

VQ_GROUP = 4
VQ_WORDS = 256
SERVED_GROUPS = (1, 4)


class CodecSpec(SpecModel):
    """The codec of the keys or the values of one layer.

    Attributes:
        transform: Linear map into the stored frame: none, orthogonal, or metric (scores use its inverse).
        centred: A per-head offset is subtracted before the transform.
        quantizer: ``uniform`` min-max codes, or ``group_vq`` (4 channels share one of 256 words).
        bits: Bits per channel, codes only.
        groups: Scales per head vector (``uniform``); served layouts allow 1 or 4.
        clip: Rank ratio c of the symmetric clip, threshold sorted(|x|)[min(int(c d), d - 1)]; 1.0 is off.
        metadata: ``fp16-bias`` stores {scale, bias} in fp16 (served); ``fp32-zero`` {scale, zero} in float32.
        codebook: Codebook dtype of ``group_vq``; only ``int8`` is served.
        spacing: How an encoder places the levels of ``uniform`` (see `codecs.uniform`); decoders never need it.
    """

    transform: Transform = "identity"
    centred: bool = False
    quantizer: Quantizer = "uniform"
    bits: int = Field(default=2, ge=1, le=8)
    groups: int = Field(default=1, ge=1)
    clip: float = Field(default=1.0, gt=0.0, le=1.0)
    metadata: Metadata = "fp16-bias"
    codebook: CodebookDtype | None = None
    spacing: Spacing = "minmax"

    @model_validator(mode="after")
    def _consistent(self) -> CodecSpec:
        if (self.quantizer == "group_vq") != (self.codebook is not None):
            raise ValueError("a codebook dtype belongs to group_vq, and group_vq needs one")
        if self.quantizer == "group_vq" and self.groups != 1:
            raise ValueError("group_vq has one scale per token and head: groups must be 1")
        if self.spacing != "minmax" and (self.quantizer != "uniform" or self.bits != 2):
            raise ValueError("Lloyd-Max spacing belongs to uniform codes of 2 bits")
        return self

    @property
    def served(self) -> bool:
        """True when the serving kernels read this codec; the others are for accuracy only."""
        return (
            self.bits == 2
            and self.metadata == "fp16-bias"
            and self.groups in SERVED_GROUPS
            and (self.quantizer == "uniform" or (self.quantizer == "group_vq" and self.codebook == "int8"))
        )
