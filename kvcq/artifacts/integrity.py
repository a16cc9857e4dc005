"""The files of an artifact: listed without following links, capped, and hashed as they are loaded.

A file is opened once. What is hashed is what is parsed: a private copy in memory, which nothing on disk can change
afterwards. Statistics beyond `COPY_LIMIT` are mapped from the same descriptor instead: they are read once and never
served.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcq.artifacts.archive import archive_members
from kvcq.artifacts.claim import restore
from kvcq.artifacts.disk import disk_errors
from kvcq.artifacts.kinds import AGAIN, MIB, size_cap
from kvcq.errors import CorruptArtifactError, InputError, ResourceError
from kvcq.spec.files import FileEntry

COPY_LIMIT = 256 * MIB
MAPPED = frozenset({"moments.safetensors", "samples.safetensors"})
MAX_FILES = 1024
ARCHIVE_CAP = 65536 * MIB
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Files:
    """The regular files of one artifact and their sizes in bytes; `load` reads one of them, whole."""

    path: Path
    archive: bool
    sizes: Mapping[str, int]
    _load: Callable[[str], memoryview]

    def load(self, name: str) -> memoryview:
        """Return the content of a file, private to this process.

        Raises:
            CorruptArtifactError: the file is missing, too large, not a regular file or a Git LFS pointer.
        """
        if name not in self.sizes:
            raise CorruptArtifactError(f"{name} is missing", where=self.path, fix=AGAIN)
        if self.sizes[name] > size_cap(name):
            raise CorruptArtifactError(
                f"{name} has {self.sizes[name]} bytes, more than the {size_cap(name)} allowed", where=self.path
            )
        data = self._load(name)
        refuse_lfs_pointer(data, self.path / name)
        return data

    def load_checked(self, entries: Iterable[FileEntry], *, unsealed: frozenset[str]) -> dict[str, memoryview]:
        """Load every listed file, and refuse any difference between the list and what is there.

        Args:
            entries: The files that the manifest lists.
            unsealed: The manifest itself and other files that carry their own seal.

        Raises:
            CorruptArtifactError: a missing, unlisted, truncated, extended or altered file.
        """
        listed = {entry.name: entry for entry in entries}
        if extra := sorted(set(self.sizes) - set(listed) - unsealed):
            raise CorruptArtifactError(f"unlisted file {extra[0]!a}", where=self.path, fix="remove it")
        for name, entry in listed.items():
            found = self.sizes.get(name)
            if found is None:
                raise CorruptArtifactError(f"{name} is missing", where=self.path, fix=AGAIN)
            if found != entry.size:
                self.load(name)  # a Git LFS pointer has the wrong size, and deserves its own message
                change = "truncated" if found < entry.size else "too long"
                raise CorruptArtifactError(
                    f"{name} is {change}: {found} bytes of {entry.size}", where=self.path, fix=AGAIN
                )
        loaded = {}
        for name, entry in listed.items():
            loaded[name] = self.load(name)
            if hashlib.sha256(loaded[name]).hexdigest() != entry.sha256:
                raise CorruptArtifactError(f"{name} is altered: its SHA-256 differs", where=self.path, fix=AGAIN)
        return loaded


def open_files(path: Path) -> Files:
    """List the files of an artifact folder, or of a single-file archive.

    Raises:
        InputError: nothing there, or no permission.
        CorruptArtifactError: a link, a sub-folder or a device among the files, or a broken archive.
    """
    path = Path(path)
    with disk_errors(path):
        if not path.exists():
            restore(path)
        if path.is_dir():
            return _folder(path)
        if not path.exists():
            raise InputError("no such file or folder", where=path, fix="check the path")
        data = load_file(path, ARCHIVE_CAP)
        refuse_lfs_pointer(data, path)
        members = archive_members(data, path)
        return Files(path, True, {name: len(member) for name, member in members.items()}, members.__getitem__)


def load_file(path: Path, cap: int) -> memoryview:
    """Read one regular file whole, without following a link at its last component.

    Raises:
        CorruptArtifactError: not a regular file, larger than `cap` bytes, or shortened while it was read.
    """
    # O_NONBLOCK: opening a pipe that was put in place of a file must not wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise CorruptArtifactError("a symbolic link, not a file", where=path, fix="copy the file it points to")
    with disk_errors(path):
        descriptor = os.open(path, flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptArtifactError("not a regular file", where=path)
            if status.st_size > cap:
                raise CorruptArtifactError(f"{status.st_size} bytes, more than the {cap} allowed", where=path)
            return _content(descriptor, status.st_size, path)
        finally:
            os.close(descriptor)


def refuse_lfs_pointer(data: memoryview, path: Path) -> None:
    """Raise CorruptArtifactError when the content is the text that Git LFS leaves in place of a file."""
    if bytes(data[: len(LFS_POINTER)]) == LFS_POINTER:
        raise CorruptArtifactError("a Git LFS pointer, not the file itself", where=path, fix="run git lfs pull")


def _content(descriptor: int, size: int, path: Path) -> memoryview:
    if size > COPY_LIMIT and path.name in MAPPED:
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    if size > COPY_LIMIT and size > free_memory():
        need = f"it takes {size // MIB} MiB of memory and {free_memory() // MIB} MiB are free"
        raise ResourceError(need, where=path, fix="use a machine with more memory")
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = os.readv(descriptor, [view[done:]])
        if count == 0:
            raise CorruptArtifactError("the file shrank while it was read", where=path, fix=AGAIN)
        done += count
    return view


def free_memory() -> int:
    """Return the bytes of memory that can be had without swapping, as far as the system tells."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields.get("MemAvailable", fields.get("MemFree", "0")).split()[0]) << 10


def _folder(path: Path) -> Files:
    sizes: dict[str, int] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if len(sizes) == MAX_FILES:
                raise CorruptArtifactError(f"more than {MAX_FILES} files", where=path)
            if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
                what = "symbolic link" if entry.is_symlink() else "folder or device"
                raise CorruptArtifactError(f"{what} {entry.name!a} among the files", where=path, fix="remove it")
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return Files(path, False, sizes, lambda name: load_file(path / name, size_cap(name)))
