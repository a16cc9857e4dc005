"""Fingerprints of a model: what must match, and where it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvcq.models.library import decoder_config
from kvcq.spec.canonical import digest
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.identity import Identity, Provenance, WeightFile

# Fixed lists: a flag that a later library version adds with a default must not change the identity.
NORM_FLAGS = (
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "qk_layernorm",
    "qk_norm",
    "rms_norm_eps",
    "use_qk_norm",
)
BIAS_FLAGS = ("add_qkv_bias", "attention_bias", "bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias")
NO_VOCABULARY = "none"
BLOCKS = 64
BLOCK_BYTES = 4096


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
    """Return the SHA-256 over (id, token bytes) sorted by id, added tokens included.

    Each entry is the id and the byte length of the token as two 8-byte little-endian integers, then its UTF-8 bytes.
    """
    state = hashlib.sha256()
    for index, token in sorted((index, token) for token, index in tokenizer.get_vocab().items()):
        data = token.encode("utf-8", "surrogatepass")
        state.update(index.to_bytes(8, "little") + len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def build_provenance(source: str, revision: str | None = None, folder: Path | None = None) -> Provenance:
    """Return where a model came from; `folder` is read for the headers of its safetensors files."""
    weights = () if folder is None else tuple(_weight_files(sorted(folder.glob("*.safetensors"))))
    return Provenance(source=source, revision=revision, weights=weights)


def _weight_files(paths: Iterable[Path]) -> Iterable[WeightFile]:
    for path in paths:
        size = path.stat().st_size
        blocks = hashlib.sha256()
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
            start = file.tell()
            for number in range(BLOCKS):
                file.seek(start + max(size - start - BLOCK_BYTES, 0) * number // (BLOCKS - 1))
                blocks.update(file.read(BLOCK_BYTES))
        yield WeightFile(
            name=path.name,
            size=size,
            header_sha256=hashlib.sha256(length + header).hexdigest(),
            blocks_sha256=blocks.hexdigest(),
        )


def stated_flags(config: Any, names: tuple[str, ...]) -> dict[str, bool | str | float | None]:
    """Read the flags that are set; GGUF holds an epsilon as float32, so numbers keep six digits."""
    fields = config.to_dict()
    found = {name: fields[name] for name in names if isinstance(fields.get(name), bool | str | float)}
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def _stated(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drop unset fields and the partial factor (the measured rotary dims hold it), in nested dicts too."""
    return {
        key: _stated(value) if isinstance(value, dict) else value
        for key, value in parameters.items()
        if value is not None and key != "partial_rotary_factor"
    }
