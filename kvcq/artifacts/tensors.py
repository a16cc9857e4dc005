"""Writing tensors, numpy or torch, and the digest by which report, card and pack name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from kvcq.artifacts.layout import BY_TORCH, LAYER_NAME, file_header, file_order, index_digest
from kvcq.artifacts.store import Staging
from kvcq.errors import InputError
from kvcq.spec.files import TENSOR_NAME, FileEntry, TensorEntry

Array = Any
"""A numpy array or a torch tensor on any device."""


def tensor_entry(name: str, tensor: Array) -> TensorEntry:
    """Describe one tensor; its role is the name without ``layers.<id>.``.

    Raises:
        InputError: a dtype that has no place in a file, or a name outside letters, digits, ``_`` and dots.
    """
    kind = tensor.dtype.name if isinstance(tensor, np.ndarray) else str(tensor.dtype).removeprefix("torch.")
    if kind not in BY_TORCH:
        raise InputError(f"tensor {name!a} has dtype {kind}", fix=f"allowed: {', '.join(BY_TORCH)}")
    if not re.fullmatch(TENSOR_NAME, name):
        raise InputError(f"{name!a} is not a tensor name", fix="use letters, digits, _ and dots")
    match = LAYER_NAME.fullmatch(name)
    role = match.group(1) if match else name
    shape = tuple(int(n) for n in tensor.shape)
    return TensorEntry(name=name, role=role, shape=shape, dtype=BY_TORCH[kind])


def tensor_index(tensors: Mapping[str, Array]) -> tuple[TensorEntry, ...]:
    """Return the entries of these tensors, sorted by name: the canonical tensor index."""
    return tuple(tensor_entry(name, tensors[name]) for name in sorted(tensors))


def tensors_digest(index: Iterable[TensorEntry], tensors: Mapping[str, Array]) -> str:
    """Return the SHA-256 of the canonical JSON of the index followed by the data of its tensors, in index order."""
    entries = tuple(index)
    return index_digest(entries, (raw_bytes(tensors[entry.name]) for entry in entries))


def write_tensors(stage: Staging, name: str, tensors: Mapping[str, Array]) -> FileEntry:
    """Write tensors as the staged file `name`, one at a time in memory; same tensors, same bytes."""
    return stage.write(name, tensor_chunks(tensors))


def tensor_chunks(tensors: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the safetensors file that holds these tensors."""
    entries = file_order(tensor_index(tensors))
    yield file_header(entries)
    for entry in entries:
        yield raw_bytes(tensors[entry.name])


def raw_bytes(tensor: Array) -> memoryview:
    """Return the little-endian, row-major bytes of an array or tensor, copied only if needed."""
    if isinstance(tensor, np.ndarray):
        flat = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(-1)
        return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]
    import torch

    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
