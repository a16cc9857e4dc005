"""Staged writing: an artifact appears under its name complete, or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from kvcq.artifacts.disk import disk_errors, sync_folder
from kvcq.artifacts.kinds import FILES, MANIFESTS
from kvcq.errors import InputError
from kvcq.spec.files import FileEntry

Buffer = bytes | bytearray | memoryview


class Staging:
    """A hidden folder beside the target that takes its place when the block ends without an error.

    Any failure, KeyboardInterrupt included, removes the folder and leaves the target as it was. With `force` an
    older artifact stays in place until the new one is complete on disk; anything that is not a kvcq artifact is
    never replaced.

    Args:
        target: Folder to create, or the file with `single_file`.
        force: Replace an existing artifact.
        single_file: The target is one file: the block writes exactly `name` and it is moved into place.

    Raises:
        InputError: the target exists, is a symbolic link or may not be written.
        ResourceError: the disk is full.
    """

    def __init__(self, target: Path, *, force: bool = False, single_file: bool = False) -> None:
        self.target = Path(target).parent.resolve() / Path(target).name
        self.force = force
        self.single_file = single_file
        self.name = Path(target).name
        self.folder = self._sibling("staging")
        self._parents: list[Path] = []

    def __enter__(self) -> Staging:
        with disk_errors(self.target):
            self._refuse_existing()
            try:
                self._make_parents()
                self.folder.mkdir()
            except BaseException:
                self._discard()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with disk_errors(self.target):
                if isinstance(error, OSError):
                    raise error
                if error is None:
                    self._commit()
                    self._parents = []
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

    def _sibling(self, purpose: str) -> Path:
        return self.target.parent / f".{self.name}.{purpose}-{secrets.token_hex(4)}"

    def _refuse_existing(self) -> None:
        if self.name in ("", ".."):
            raise InputError("not a path to write to", where=self.target, fix="name a new folder or file")
        if self.target.is_symlink():
            raise InputError("the output is a symbolic link", where=self.target, fix="name the real path")
        if not self.target.exists():
            return
        if not self.force:
            raise InputError("the output exists", where=self.target, fix="choose another path, or replace it: --force")
        if not _replaceable(self.target):
            raise InputError(
                "the output exists and is not a kvcq artifact", where=self.target, fix="--force never replaces it"
            )

    def _make_parents(self) -> None:
        missing = [folder for folder in self.target.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            self._parents.append(folder)

    def _commit(self) -> None:
        sync_folder(self.folder)
        source = self.folder / self.name if self.single_file else self.folder
        if not self.force:
            self._refuse_existing()
        if self.target.exists() and not (self.single_file and self.target.is_file()):
            self._swap(source)
        else:
            source.replace(self.target)
        sync_folder(self.target.parent)

    def _swap(self, source: Path) -> None:
        # A folder cannot be renamed over another, so the old one steps aside and comes back if anything fails.
        old = self._sibling("old")
        try:
            self.target.rename(old)
            source.rename(self.target)
        finally:
            if old.exists() and not self.target.exists():
                old.rename(self.target)
        _remove(old)

    def _discard(self) -> None:
        _remove(self.folder)
        for folder in reversed(self._parents):
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _replaceable(target: Path) -> bool:
    """Return True for an empty folder and for what looks like an artifact, intact or not."""
    if target.is_file():
        with target.open("rb") as file:
            return file.read(10) == b"kvcq.json\0"
    if not target.is_dir():
        return False
    names = {entry.name for entry in target.iterdir()}
    known = frozenset(MANIFESTS.values()).union(*FILES.values())
    canaries = {name for name in names if name.startswith("canary-") and name.endswith(".safetensors")}
    return names - canaries <= known
