"""The single-file form of a bundle: an uncompressed tar with exactly one encoding.

Members follow each other as one 512-byte ustar header (mode 0644, no owner, time 0) and the content, padded with
zeros to 512; two zero blocks end the file. The manifest comes first, the rest by name. The reader builds the
header that the writer would have written and compares, so no other byte sequence is an archive.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvcq.artifacts.kinds import AGAIN, MANIFESTS
from kvcq.errors import CorruptArtifactError
from kvcq.spec.files import FILE_NAME

BLOCK = 512
END = bytes(2 * BLOCK)


def archive_chunks(members: Mapping[str, bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the archive of these files, in order."""
    for name in _ordered(members):
        yield _header(name, len(members[name]))
        yield members[name]
        yield bytes(-len(members[name]) % BLOCK)
    yield END


def archive_members(data: memoryview, path: Path) -> dict[str, memoryview]:
    """Split an archive into its files, as views of `data`.

    Raises:
        CorruptArtifactError: any difference from what `archive_chunks` writes.
    """
    members: dict[str, memoryview] = {}
    offset = 0
    while data[offset:] != END:
        header = bytes(data[offset : offset + BLOCK])
        name, size = _parse(header)
        start = offset + BLOCK
        offset = start + size + -size % BLOCK
        # The end marker must still follow, so a size beyond the file is refused here.
        if name is None or name in members or header != _header(name, size) or offset + len(END) > len(data):
            raise CorruptArtifactError("not a canonical kvcq archive", where=path, fix=AGAIN)
        if any(data[start + size : offset]):
            raise CorruptArtifactError(f"padding after {name} is altered", where=path, fix=AGAIN)
        members[name] = data[start : start + size]
    if list(members) != _ordered(members):
        raise CorruptArtifactError("archive members out of order", where=path, fix=AGAIN)
    return members


def _ordered(members: Mapping[str, bytes | memoryview]) -> list[str]:
    return sorted(members, key=lambda name: (name != MANIFESTS["bundle"], name))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _parse(header: bytes) -> tuple[str | None, int]:
    """Return name and size of a header block; the name is None when it cannot be one of ours."""
    name = header[:100].rstrip(b"\0").decode("ascii", "replace")
    digits = header[124:135].decode("ascii", "replace")
    if not re.fullmatch(FILE_NAME, name) or not re.fullmatch("[0-7]{11}", digits):
        return None, 0
    return name, int(digits, 8)
