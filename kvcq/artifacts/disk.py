"""Operating system errors as kvcq errors, and the flush that makes a write survive a crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcq.errors import CorruptArtifactError, InputError, ResourceError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` raised inside into one line that names `path`.

    Raises:
        ResourceError: the disk, a quota, a file size limit or memory is exhausted.
        CorruptArtifactError: the device cannot read the data.
        InputError: everything else, e.g. no permission or a read-only file system.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in FULL:
            raise ResourceError(f"cannot write: {reason}", where=path, fix="free disk space and run again") from error
        if error.errno == errno.ENOMEM:
            raise ResourceError(reason, where=path, fix="free memory and run again") from error
        if error.errno == errno.EIO:
            raise CorruptArtifactError(f"cannot read: {reason}", where=path, fix="check the disk") from error
        raise InputError(reason, where=path, fix="choose a path that you may read and write") from error


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder, so that a finished rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
