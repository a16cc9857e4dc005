"""The layout of a safetensors file: 8 bytes of header length, JSON padded with spaces to 8, then the data.

Wide dtypes come first, then by name: byte for byte what the library writes. kvcq writes the header itself because
bytes must not depend on the library's version, and rebuilds it to compare when it reads, so that duplicate keys,
metadata, holes and overlaps cannot occur.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from math import prod
from typing import Any

from kvcq.spec import canonical
from kvcq.spec.files import TensorEntry

MAX_HEADER = canonical.MAX_BYTES
MAX_DIMS = 8

# safetensors name -> (bytes, numpy name or None, torch name), in the library's order: the last is written first.
DTYPES: dict[str, tuple[int, str | None, str]] = {
    "BOOL": (1, "bool", "bool"),
    "U8": (1, "uint8", "uint8"),
    "I8": (1, "int8", "int8"),
    "I16": (2, "int16", "int16"),
    "U16": (2, "uint16", "uint16"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, None, "bfloat16"),
    "I32": (4, "int32", "int32"),
    "U32": (4, "uint32", "uint32"),
    "F32": (4, "float32", "float32"),
    "F64": (8, "float64", "float64"),
    "I64": (8, "int64", "int64"),
    "U64": (8, "uint64", "uint64"),
}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
BY_TORCH = {torch_name: name for name, (_, _, torch_name) in DTYPES.items()}
LAYER_NAME = re.compile(r"layers\.\d+\.(.+)")


def data_bytes(index: Iterable[TensorEntry]) -> int:
    """Return the bytes that the data of these tensors takes in a file, header excluded."""
    return sum(nbytes(entry) for entry in index)


def index_digest(index: tuple[TensorEntry, ...], data: Iterable[memoryview]) -> str:
    """Return the SHA-256 of the canonical JSON of the index followed by the data of its tensors, in index order."""
    sha256 = hashlib.sha256(canonical.dumps([entry.plain() for entry in index]))
    for view in data:
        sha256.update(view)
    return sha256.hexdigest()


def nbytes(entry: TensorEntry) -> int:
    """Return the bytes of one tensor's data."""
    return prod(entry.shape) * DTYPES[entry.dtype][0]


def file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return entries in the order of their data in the file."""
    return sorted(entries, key=lambda entry: (-_RANK[entry.dtype], entry.name))


def file_header(entries: list[TensorEntry]) -> bytes:
    """Return length and padded JSON for entries in file order."""
    table, offset = {}, 0
    for entry in entries:
        end = offset + nbytes(entry)
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_entries(table: Any) -> list[TensorEntry]:
    """Return the entries of a decoded header, offsets ignored: the caller rebuilds the header and compares.

    Raises:
        ValueError, TypeError, KeyError: not a table of tensors.
    """
    if not isinstance(table, dict):
        raise ValueError("not an object")
    entries = []
    for name, slot in table.items():
        match = LAYER_NAME.fullmatch(name)
        shape = tuple(slot["shape"])
        if slot["dtype"] not in DTYPES or len(shape) > MAX_DIMS or not all(_is_size(n) for n in shape):
            raise ValueError(name)
        role = match.group(1) if match else name
        entries.append(TensorEntry(name=name, role=role, shape=shape, dtype=slot["dtype"]))
    return entries


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < canonical.MAX_INTEGER
