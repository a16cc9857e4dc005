"""A file layer with faults: every write point below a folder is counted, and at one of them something happens."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED = 9
WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


def die() -> None:
    """End the process as SIGKILL does: no handler runs, no buffer is flushed."""
    os._exit(KILLED)


def failing(number: int) -> Callable[[], None]:
    """Return an action that raises this system error."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


class Faults:
    """Counts opens for writing, writes, flushes, renames and (with `removals`) removals; acts at the `at`-th.

    A faulty write has written half of its bytes. Installing cannot be undone: call it in a forked child.
    """

    def __init__(self, folder: Path, at: int, act: Callable[[], None], *, removals: bool) -> None:
        self.folder, self.at, self.act, self.removals = str(folder), at, act, removals
        self.count = 0
        self.descriptors: set[int] = set()

    def install(self) -> None:
        for name in ("mkdir", "rename", "replace"):
            setattr(os, name, self._by_path(getattr(os, name)))
        if self.removals:
            for name in ("unlink", "rmdir"):
                setattr(os, name, self._by_path(getattr(os, name)))
        os.fsync = self._always(os.fsync)
        os.open, os.write = self._open(os.open), self._write(os.write)
        io.open = self._file(io.open)

    def point(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.act()

    def _inside(self, path: Any, kwargs: dict[str, Any]) -> bool:
        if kwargs.get("dir_fd") is not None:  # shutil.rmtree, which is used below the folder only
            return True
        return not isinstance(path, int) and str(Path(path).absolute()).startswith(self.folder)

    def _by_path(self, original: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside(path, kwargs):
                self.point()
            return original(path, *args, **kwargs)

        return call

    def _always(self, original: Any) -> Any:
        def call(*args: Any) -> Any:
            self.point()
            return original(*args)

        return call

    def _open(self, original: Any) -> Any:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            ours = flags & WRITING and self._inside(path, kwargs)
            if ours:
                self.point()
            descriptor = original(path, flags, *args, **kwargs)
            if ours:
                self.descriptors.add(descriptor)
            return descriptor

        return call

    def _write(self, original: Any) -> Any:
        def call(descriptor: int, data: bytes) -> int:
            if descriptor in self.descriptors:
                original(descriptor, data[: len(data) // 2])
                self.point()
                data = data[len(data) // 2 :]
            return original(descriptor, data)

        return call

    def _file(self, original: Any) -> Any:
        def call(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wxa+") or not self._inside(path, {}):
                return original(path, mode, *args, **kwargs)
            self.point()
            return TornFile(original(path, mode, *args, **kwargs), self)

        return call


class TornFile:
    """A file whose first write is a write point: half of it reaches the disk before the fault."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults, self._first = file, faults, True

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if self._first:
            self._first = False
            half = memoryview(data)[: len(data) // 2]
            self._file.write(half)
            self._file.flush()
            self._faults.point()
            data = memoryview(data)[len(half) :]
        return self._file.write(data)
