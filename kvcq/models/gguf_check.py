"""A GGUF header is read here first, with caps, before any library trusts its counts.

The readers behind it believe what a file says: the ``gguf`` package maps the file, but walks as many array elements
as a length field claims, past the end of the file, and keeps an object for each. Here every count is held against the
bytes that are left before anything is walked, so the work is bounded by the size of the file::

    magic "GGUF", version u32, tensors u64, entries u64
    entry   key (u64 length, UTF-8), type u32, value        a string is like a key, an array: type u32, u64 length, ...
    tensor  name, dimensions u32, each u64, type u32, offset u64      blocks start at the next multiple of the alignment
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvcq.errors import InputError, ResourceError, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# What real files need, with room: the largest vocabularies have 0.8 million tokens and merges, chat templates 60 KB,
# mixtures of experts stored one by one 50 thousand tensors, 126 blocks.
MAX_TENSORS = 1 << 17
MAX_ENTRIES = 1 << 12
MAX_ELEMENTS = 1 << 22
MAX_BLOCKS = 1 << 9
MAX_NAME = 1 << 8
MAX_TEXT = 1 << 20
MAX_WORD = 1 << 12
MAX_DIMENSIONS = 4
# One-bit weights take 18 bytes for 128 numbers, which are 256 bytes in bfloat16: 14.2 times as many.
MAX_GROWTH = 16

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a plausible file says.

    Attributes:
        values: Metadata that is a number, a flag or a text.
        lengths: Number of elements of metadata that is an array.
        shapes: Dimensions of each tensor by name, fastest first.
        numbers: Numbers in all tensors together.
    """

    values: dict[str, Value]
    lengths: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    numbers: int

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        return 2 * self.numbers


def read_header(path: Path) -> GgufHeader:
    """Read and judge the header of a GGUF file; nothing of the file's size is allocated.

    Raises:
        InputError: no GGUF file, truncated, big-endian, a version or type that is not known, or a header that
            contradicts itself or the size of the file.
        ResourceError: the tensors would decode to more than 16 times the file, or a count is beyond its cap.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise InputError("not a GGUF file", where=path.name, fix="check that the download is complete")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, path.name).header()
    except OSError as error:
        raise InputError(f"cannot read the GGUF file: {error.strerror or error}", where=path.name) from error


class _Reader:
    """Walks a header; `at` never leaves the file."""

    def __init__(self, data: mmap.mmap, label: str) -> None:
        self.data, self.size, self.label, self.at = data, len(data), label, 4
        self.elements = 0

    def header(self) -> GgufHeader:
        version = self.scalar("<I")
        if version not in VERSIONS:
            self.refuse_version(int(version))
        tensors = self.count("tensors", MAX_TENSORS, 8 + 4 + 4 + 8)
        entries = self.count("metadata entries", MAX_ENTRIES, 8 + 4 + 1)
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(entries):
            key = self.text(MAX_NAME, "a metadata key")
            if key in values or key in lengths:
                self.refuse(f"the metadata key {shown(key)} is given twice")
            kind = self.scalar("<I")
            if kind == _ARRAY:
                lengths[key] = self.array(key)
            else:
                values[key] = self.value(int(kind), key)
        found = [self.tensor() for _ in range(tensors)]
        shapes = {name: shape for name, shape, _, _ in found}
        if len(shapes) < tensors:
            self.refuse("a tensor is given twice")
        header = GgufHeader(values, lengths, shapes, sum(prod(shape) for shape in shapes.values()))
        self.check_places(found, values.get("general.alignment", 32), header)
        self.check_sizes(header)
        return header

    def refuse(self, what: str) -> NoReturn:
        raise InputError(f"the GGUF file cannot be read: {what}", where=self.label)

    def refuse_version(self, version: int) -> NoReturn:
        if version & 0xFFFF == 0 and version:
            self.refuse("it is big-endian, only little-endian files are read")
        self.refuse(f"it has version {version}, known are {' and '.join(map(str, VERSIONS))}")

    def take(self, count: int) -> int:
        """Return where the next `count` bytes start, and step over them."""
        start = self.at
        if count > self.size - start:
            self.refuse(f"it ends after {self.size} bytes, inside its header")
        self.at = start + count
        return start

    def scalar(self, code: str) -> Value:
        value: Value = struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]
        return value

    def count(self, what: str, cap: int, least_bytes: int) -> int:
        """Read a count of things of at least `least_bytes` bytes each."""
        value = int(self.scalar("<Q"))
        if value * least_bytes > self.size - self.at:
            self.refuse(f"its {self.size} bytes have no room for {value} {what}")
        if value > cap:
            raise ResourceError(f"{value} {what}, more than {cap}", where=self.label)
        return value

    def text(self, cap: int, what: str) -> str:
        length = int(self.scalar("<Q"))
        if length > self.size - self.at:
            self.refuse(f"{what} of {length} bytes goes beyond its end")
        if length > cap:
            raise ResourceError(f"{what} has {length} bytes, more than {cap}", where=self.label)
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")

    def value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self.text(MAX_TEXT, f"the value of {shown(key)}")
        if kind not in _SCALARS:
            self.refuse(f"{shown(key)} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, key: str) -> int:
        kind = int(self.scalar("<I"))
        if kind == _ARRAY:
            self.refuse(f"{shown(key)} is an array of arrays")
        if kind != _STRING and kind not in _SCALARS:
            self.refuse(f"{shown(key)} has the unknown type {kind}")
        width = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        length = self.count(f"elements of {shown(key)}", MAX_ELEMENTS, width)
        self.elements += length
        if self.elements > MAX_ELEMENTS:
            raise ResourceError(f"more than {MAX_ELEMENTS} metadata elements", where=self.label)
        if kind == _STRING:
            for _ in range(length):
                self.text(MAX_WORD, f"an element of {shown(key)}")
        else:
            self.take(length * width)
        return length

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, dimensions, bytes and offset of a tensor."""
        name = self.text(MAX_NAME, "a tensor name")
        dimensions = int(self.scalar("<I"))
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.refuse(f"{shown(name)} has {dimensions} dimensions")
        shape = tuple(int(self.scalar("<Q")) for _ in range(dimensions))
        kind, offset = int(self.scalar("<I")), int(self.scalar("<Q"))
        try:
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            self.refuse(f"{shown(name)} has the unknown type {kind}")
        if not all(shape) or shape[0] % block:
            self.refuse(f"{shown(name)} has the shape {shown(shape)}, in blocks of {block}")
        return name, shape, prod(shape) // block * width, offset

    def check_places(
        self, found: list[tuple[str, tuple[int, ...], int, int]], alignment: Value, header: GgufHeader
    ) -> None:
        """Hold every tensor against the end of the file and against the tensors beside it."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.refuse(f"the alignment {shown(alignment)} is no power of two")
        start = -(-self.at // alignment) * alignment
        places = sorted((offset, count, name) for name, _, count, offset in found)
        for offset, count, name in places:
            if offset % alignment or start + offset + count > self.size:
                self.refuse(f"{shown(name)} lies outside its {self.size} bytes; is the download complete?")
        if header.decoded_bytes > MAX_GROWTH * self.size:
            what = f"{self.size} bytes of file would decode to {header.decoded_bytes}, more than {MAX_GROWTH} times"
            raise ResourceError(what, where=self.label)
        for (offset, count, first), (following, _, second) in pairwise(places):
            if offset + count > following:
                self.refuse(f"{shown(first)} and {shown(second)} overlap")

    def check_sizes(self, header: GgufHeader) -> None:
        """Refuse counts of blocks, heads, experts and tokens that no tensor bears out: models are built by them."""
        architecture = header.values.get("general.architecture")
        if not isinstance(architecture, str) or not header.shapes:
            self.refuse("it has no architecture or no tensors")
        widest = max(max(shape) for shape in header.shapes.values())
        # A block has two tensors at least, an attention and a feed-forward part or their like.
        most = {"block_count": min(MAX_BLOCKS, len(header.shapes) // 2), "embedding_length": widest}
        for name in most:
            # Where they are absent, the library takes those of a model of billions of numbers.
            if type(header.values.get(f"{architecture}.{name}")) is not int:
                self.refuse(f"it has no {shown(f'{architecture}.{name}')}")
        for key, value in header.values.items():
            name = key.removeprefix(f"{architecture}.")
            if name == key or type(value) is not int or not (name in most or name.endswith("_count")):
                continue
            if not 0 <= value <= most.get(name, widest):
                self.refuse(f"{shown(key)} is {value}, its tensors have room for {most.get(name, widest)}")
        rows = header.shapes.get("token_embd.weight", (widest,))[-1]
        tokens = header.lengths.get("tokenizer.ggml.tokens", 0)
        if tokens > rows:
            self.refuse(f"it has {tokens} tokens, but embeddings of {rows}")
