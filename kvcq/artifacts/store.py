"""Staged writing: an artifact appears under its name complete, or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from kvcq.artifacts.claim import check_target, claim, located, remove, sibling
from kvcq.artifacts.disk import disk_errors, sync_folder
from kvcq.spec.files import FileEntry

Buffer = bytes | bytearray | memoryview


class Staging:
    """A hidden folder beside the target that takes its place when the block ends without an error.

    Any failure, KeyboardInterrupt included, removes the folder and leaves the target as it was. With `force` an
    older artifact stays in place until the new one is complete on disk; anything that is not a kvcq artifact is
    never replaced. The target is claimed meanwhile: a second writer is refused.

    Args:
        target: Folder to create, or the file with `single_file`.
        force: Replace an existing artifact.
        single_file: The target is one file: the block writes exactly `name` and it is moved into place.

    Raises:
        InputError: the target exists, is a symbolic link, is being written or may not be written.
        ResourceError: the disk is full.
    """

    def __init__(self, target: Path, *, force: bool = False, single_file: bool = False) -> None:
        self.target = located(target)
        self.force = force
        self.single_file = single_file
        self.name = self.target.name
        self.folder = sibling(self.target, "staging")
        self._claim = ExitStack()

    def __enter__(self) -> Staging:
        check_target(self.target, self.force)
        with ExitStack() as claimed:
            claimed.enter_context(claim(self.target))
            with disk_errors(self.target):
                # What a killed writer moved aside has come back by now.
                check_target(self.target, self.force)
                self.folder.mkdir()
            self._claim = claimed.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._claim:
            try:
                with disk_errors(self.target):
                    if isinstance(error, OSError):
                        raise error
                    if error is None:
                        self._commit()
            finally:
                self._discard()

    def write(self, name: str, chunks: Iterable[Buffer]) -> FileEntry:
        """Write a new file from its chunks, flush it to disk and return its entry."""
        size, sha256 = self.stream(name, chunks)
        return FileEntry(name=name, size=size, sha256=sha256)

    def stream(self, name: str, chunks: Iterable[Buffer]) -> tuple[int, str]:
        """Write a new file of any name; return its size in bytes and SHA-256."""
        size, sha256 = 0, hashlib.sha256()
        with disk_errors(self.target), (self.folder / name).open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                sha256.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        return size, sha256.hexdigest()

    def _commit(self) -> None:
        sync_folder(self.folder)
        source = self.folder / self.name if self.single_file else self.folder
        check_target(self.target, self.force)
        if self.target.exists() and not (self.single_file and self.target.is_file()):
            self._swap(source)
        else:
            source.replace(self.target)
        sync_folder(self.target.parent)

    def _swap(self, source: Path) -> None:
        # A folder cannot be renamed over another, so the old one steps aside and comes back if anything fails. A
        # writer killed between the renames leaves it aside: `claim` and `restore` bring it back.
        old = sibling(self.target, "old")
        try:
            self.target.rename(old)
            source.rename(self.target)
        finally:
            if old.exists() and not self.target.exists():
                old.rename(self.target)

    def _discard(self) -> None:
        remove(self.folder)
        if self.target.exists():
            remove(sibling(self.target, "old"))
