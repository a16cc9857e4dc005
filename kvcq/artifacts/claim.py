"""Who may write an output, and what a killed writer of it left behind.

Beside an output NAME stand, while it is written, ``.NAME.lock``, ``.NAME.staging`` (the new one) and ``.NAME.old``
(the one that it replaces, for the moment between two renames). Their names are fixed: whoever holds the lock owns
them, so the next writer finds and clears what a killed one left.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcq.artifacts.disk import disk_errors
from kvcq.artifacts.kinds import CHECKPOINT, FILES, MANIFESTS
from kvcq.artifacts.lock import FileLock
from kvcq.errors import InputError

ATTEMPTS = 10
ARCHIVE_START = b"kvcq.json\0"

_held: dict[Path, tuple[int, int]] = {}


@contextmanager
def claim(target: Path) -> Iterator[None]:
    """Be the only writer of an output, with its folder made and every leftover of a killed writer cleared.

    A thread may enter its own claim again. Folders that were made for it and stay empty are removed at the end.

    Raises:
        InputError: another process writes the output, the path is no place to write to, or a file of somebody else
            has the name of a leftover.
        ResourceError: the disk is full.
    """
    place = located(target)
    me = (os.getpid(), threading.get_ident())
    if _held.get(place) == me:
        yield
        return
    made: list[Path] = []
    try:
        with disk_errors(place):
            lock = _lock(place, made)
        try:
            _held[place] = me
            with disk_errors(place):
                _recover(place)
            yield
        finally:
            _held.pop(place, None)
            lock.release()
    finally:
        _remove_empty(made)


def check_target(target: Path, force: bool) -> None:
    """Refuse an output that exists, or with `force` one that is no kvcq artifact: before the work, not after it.

    Raises:
        InputError: it exists, is a symbolic link, or is not a name.
    """
    place = located(target)
    if place.is_symlink():
        raise InputError("the output is a symbolic link", where=place, fix="name the real path")
    if not place.exists():
        return
    if not force:
        raise InputError("the output exists", where=place, fix="choose another path, or replace it: --force")
    if not is_ours(place):
        raise InputError("the output exists and is not a kvcq artifact", where=place, fix="--force never replaces it")


def restore(target: Path) -> None:
    """Bring back an artifact that a killed ``--force`` had just moved aside; does nothing otherwise."""
    if Path(target).name not in ("", "..") and sibling(located(target), "old").exists():
        with claim(target):
            pass


def located(target: Path) -> Path:
    """Return the absolute path of an output; a link at its end stays a link.

    Raises:
        InputError: the path ends in no name.
    """
    target = Path(target)
    if target.name in ("", ".."):
        raise InputError("not a path to write to", where=target, fix="name a new folder or file")
    return target.parent.resolve() / target.name


def sibling(place: Path, purpose: str) -> Path:
    """Return the hidden path beside an output that serves `purpose`."""
    return place.parent / f".{place.name}.{purpose}"


def remove(path: Path) -> None:
    """Remove a file or a folder with its content, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_ours(path: Path, *extra: str) -> bool:
    """Return True for an empty folder and for what looks like an artifact or checkpoint, intact or not."""
    if path.is_symlink():
        return False
    if path.is_file():
        with path.open("rb") as file:
            return file.read(len(ARCHIVE_START)) == ARCHIVE_START
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    known = frozenset(MANIFESTS.values()).union(*FILES.values(), extra, {CHECKPOINT})
    canaries = {name for name in names if name.startswith("canary-") and name.endswith(".safetensors")}
    return names - canaries <= known


def _lock(place: Path, made: list[Path]) -> FileLock:
    for _ in range(ATTEMPTS):
        try:
            for folder in reversed([folder for folder in place.parents if not folder.exists()]):
                folder.mkdir(exist_ok=True)
                made.append(folder)
            return FileLock(sibling(place, "lock"), place)
        except FileNotFoundError:
            continue  # another process that made the same folder took it away again
    raise InputError("the folder vanishes while the output is claimed", where=place, fix="make it first")


def _recover(place: Path) -> None:
    old = sibling(place, "old")
    if old.exists() and not place.exists() and is_ours(old):
        old.rename(place)
    for leftover in (old, sibling(place, "staging")):
        if leftover.exists() or leftover.is_symlink():
            if not is_ours(leftover, place.name):
                raise InputError("a file that is not kvcq's is in the way", where=leftover, fix="move it away")
            remove(leftover)


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()
