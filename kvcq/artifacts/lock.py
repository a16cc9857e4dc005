"""A lock file that ends with its process: held by the kernel, so that a killed owner leaves nothing to wait for."""

from __future__ import annotations

import fcntl
import os
import platform
from pathlib import Path

from kvcq.errors import InputError

OWNER_BYTES = 300
UNSUPPORTED = "the file system has no file locks"


class FileLock:
    """One exclusive lock. The file names its owner for others to read, and is gone after `release`.

    Args:
        path: The lock file; its folder exists.
        target: The output that it guards, for messages.

    Raises:
        InputError: another process holds it; the line names process and host.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._descriptor = _acquire(path, target)
        try:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {platform.node()}\n".encode("utf-8", "replace"))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Remove the file and let others in; the file goes first, while nobody else can hold it."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)


def _acquire(path: Path, target: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner may have removed the file between open and lock: then this is a lock on nothing.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            owner = os.pread(descriptor, OWNER_BYTES, 0).decode("utf-8", "replace").strip() or "another process"
            os.close(descriptor)
            fix = "wait until it ends, or choose another --out"
            raise InputError(f"{owner} is writing this output", where=target, fix=fix) from None
        except OSError as error:
            os.close(descriptor)
            raise InputError(
                f"{UNSUPPORTED}: {error.strerror}", where=target, fix="choose a path on another one"
            ) from error
