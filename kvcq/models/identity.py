"""Fingerprints of a model: what must match, and where it came from."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from kvcq.models.fingerprint import BIAS_FLAGS, NORM_FLAGS, build_provenance, flags_of, tokens_digest
from kvcq.models.library import decoder_config
from kvcq.spec.canonical import digest
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.identity import Identity

NO_VOCABULARY = "none"

__all__ = [
    "BIAS_FLAGS",
    "NORM_FLAGS",
    "NO_VOCABULARY",
    "build_identity",
    "build_provenance",
    "geometry_digest",
    "stated_flags",
    "vocabulary_digest",
]


def build_identity(model: PreTrainedModel, tokenizer: Any | None, geometry: ModelGeometry) -> Identity:
    """Return what must match between the measured and the served model (see `Identity`)."""
    config = decoder_config(model)
    return Identity(
        geometry=geometry_digest(geometry, getattr(config, "rope_parameters", None)),
        vocabulary=NO_VOCABULARY if tokenizer is None else vocabulary_digest(tokenizer),
        norms=stated_flags(config, NORM_FLAGS),
        biases=stated_flags(config, BIAS_FLAGS),
    )


def geometry_digest(geometry: ModelGeometry, rope_parameters: dict[str, Any] | None) -> str:
    """Return the SHA-256 of the canonical geometry, the same on every device and library version.

    Left out: `unrotates` and the regime, which depend on the run, and the frequencies themselves, whose last bit
    depends on where they were computed; the parameters they are made from stand in for them.
    """
    plain = geometry.plain()
    for layer in plain["layers"]:
        del layer["unrotates"]
    for rope in plain["ropes"]:
        for field in ("inv_freq", "regime", "attention_scaling"):
            del rope[field]
    return digest({"geometry": plain, "rope_parameters": _stated(rope_parameters or {})})


def vocabulary_digest(tokenizer: Any) -> str:
    """Return the SHA-256 over (id, token bytes) sorted by id, added tokens included; see `tokens_digest`."""
    return tokens_digest(tokenizer.get_vocab())


def stated_flags(config: Any, names: tuple[str, ...]) -> dict[str, bool | str | float | None]:
    """Read the flags that are set; see `flags_of`."""
    return flags_of(config.to_dict(), names)


def _stated(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drop unset fields and the partial factor (the measured rotary dims hold it), in nested dicts too."""
    return {
        key: _stated(value) if isinstance(value, dict) else value
        for key, value in parameters.items()
        if value is not None and key != "partial_rotary_factor"
    }
