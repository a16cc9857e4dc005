"""What of a model's fingerprints needs no library of models: flags of a configuration, tokens, weight files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcq.spec.identity import Provenance, WeightFile

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
BLOCKS = 64
BLOCK_BYTES = 4096


def flags_of(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, bool | str | float | None]:
    """Read the flags that are set; GGUF holds an epsilon as float32, so numbers keep six digits."""
    found = {name: fields[name] for name in names if isinstance(fields.get(name), bool | str | float)}
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def tokens_digest(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256 over (id, token bytes) sorted by id, added tokens included.

    Each entry is the id and the byte length of the token as two 8-byte little-endian integers, then its UTF-8 bytes.
    """
    state = hashlib.sha256()
    for index, token in sorted((index, token) for token, index in vocabulary.items()):
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
