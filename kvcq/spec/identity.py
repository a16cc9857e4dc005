"""Which model an artifact belongs to: what must match, and what is only recorded."""

from __future__ import annotations

from kvcq.spec.base import SpecModel
from kvcq.spec.canonical import digest


class Identity(SpecModel):
    """What must match between the model that was measured and the one that is served (exit 5).

    Attributes:
        geometry: SHA-256 of the canonical geometry without `unrotates` (layers, heads, dims, RoPE).
        vocabulary: SHA-256 over (id, token bytes) sorted by id, added tokens included.
        norms: Names of the normalisation flags found in the configuration, with their values.
        biases: Names of the bias flags found in the configuration, with their values.
    """

    geometry: str
    vocabulary: str
    norms: dict[str, bool | str | float | None]
    biases: dict[str, bool | str | float | None]

    def digest(self) -> str:
        """Return one SHA-256 over all identity fields."""
        return digest(self.plain())


class WeightFile(SpecModel):
    """One weight file: size in bytes, SHA-256 of its safetensors header, and of 64 evenly spaced 4 KiB blocks of data.

    Fine-tuned models share sizes and headers with their base; the blocks tell them apart without reading gigabytes.
    """

    name: str
    size: int
    header_sha256: str
    blocks_sha256: str


class Provenance(SpecModel):
    """Where the model came from. A mismatch warns; ``--strict`` refuses.

    `source` is a hub id, or the last path component of a local model: never a machine path.
    """

    source: str
    revision: str | None = None
    weights: tuple[WeightFile, ...] = ()
