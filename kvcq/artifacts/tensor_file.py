"""Reading safetensors from any buffer: the hashed bytes of a file, or of an archive member, are parsed in place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from kvcq.artifacts.integrity import load_file, refuse_lfs_pointer
from kvcq.artifacts.kinds import AGAIN, size_cap
from kvcq.artifacts.layout import DTYPES, MAX_HEADER, file_header, file_order, index_digest, nbytes, parse_entries
from kvcq.errors import CorruptArtifactError
from kvcq.spec import canonical
from kvcq.spec.files import TensorEntry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorFile:
    """A parsed safetensors file: `entries` by name, raw bytes as views of the loaded file."""

    entries: dict[str, TensorEntry]
    _data: dict[str, memoryview]

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor, little-endian and row-major."""
        return self._data[name]

    def as_numpy(self, name: str) -> np.ndarray:
        """Return a tensor as an array that shares the file's private memory; bfloat16 widens to float32, exactly."""
        entry = self.entries[name]
        kind = DTYPES[entry.dtype][1]
        if kind is None:
            wide = np.frombuffer(self._data[name], "<u2").astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(entry.shape)
        return np.frombuffer(self._data[name], np.dtype(kind).newbyteorder("<")).reshape(entry.shape)

    def as_torch(self, name: str) -> torch.Tensor:
        """Return a tensor that shares the file's private memory, in its own dtype."""
        import torch

        entry = self.entries[name]
        dtype = getattr(torch, DTYPES[entry.dtype][2])
        if not self._data[name]:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._data[name], dtype=dtype).reshape(entry.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all tensors as arrays, by name."""
        return {name: self.as_numpy(name) for name in sorted(self.entries)}

    def torch_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors as torch tensors, by name."""
        return {name: self.as_torch(name) for name in sorted(self.entries)}

    def index(self) -> tuple[TensorEntry, ...]:
        """Return the entries sorted by name."""
        return tuple(self.entries[name] for name in sorted(self.entries))

    def digest(self) -> str:
        """Return the tensors digest of this file; see `tensors_digest`."""
        return index_digest(self.index(), (self._data[name] for name in sorted(self.entries)))


@overload
def read_tensors(path: Path, framework: Literal["np"] = "np") -> dict[str, np.ndarray]: ...
@overload
def read_tensors(path: Path, framework: Literal["pt"]) -> dict[str, torch.Tensor]: ...
def read_tensors(path: Path, framework: Literal["np", "pt"] = "np") -> dict[str, Any]:
    """Read a stand-alone safetensors file written by kvcq.

    Raises:
        CorruptArtifactError: truncated, extended, altered header, or a Git LFS pointer.
    """
    data = load_file(Path(path), size_cap(Path(path).name))
    refuse_lfs_pointer(data, Path(path))
    file = parse_tensors(data, str(path))
    return file.arrays() if framework == "np" else file.torch_tensors()


def parse_tensors(data: memoryview, where: str) -> TensorFile:
    """Parse a safetensors file in memory.

    Raises:
        CorruptArtifactError: any difference from the file that kvcq would write for the same tensors.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8 or size > MAX_HEADER:
        raise CorruptArtifactError("truncated or not a safetensors file", where=where, fix=AGAIN)
    header = bytes(data[: 8 + size])
    try:
        canonical.check_limits(header[8:])
        entries = parse_entries(json.loads(header[8:].decode("utf-8")))
        same = file_header(file_order(entries)) == header
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptArtifactError("unreadable safetensors header", where=where, fix=AGAIN) from error
    if not same:
        raise CorruptArtifactError("safetensors header is not canonical", where=where, fix=AGAIN)
    views, start = {}, 8 + size
    for entry in file_order(entries):
        views[entry.name] = data[start : start + nbytes(entry)]
        start += nbytes(entry)
    if start != len(data):
        what = "truncated" if start > len(data) else "trailing bytes"
        raise CorruptArtifactError(f"{what}: {len(data)} bytes of {start}", where=where, fix=AGAIN)
    return TensorFile({entry.name: entry for entry in entries}, views)
