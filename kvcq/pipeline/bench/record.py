"""Where a benchmark keeps its record: refused before anything is measured, and replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcq.artifacts.disk import disk_errors, sync_folder
from kvcq.errors import InputError


def check_out(out: Path | None, force: bool) -> None:
    """Refuse what is no place for a record, without touching it.

    Args:
        out: JSON file; None: there is to be no record.
        force: It may replace a file.

    Raises:
        InputError: another suffix, or something is there.
    """
    if out is None:
        return
    if out.suffix != ".json":
        raise InputError(f"{out.name} does not end in .json", where="--out", fix="name it FILE.json")
    refuse_existing(out, force)


def refuse_existing(path: Path, force: bool) -> None:
    """Refuse a path where something is, unless it is a file that may be replaced.

    Raises:
        InputError: something is there.
    """
    if path.exists() and not (force and path.is_file()):
        raise InputError("the output exists", where=path, fix="choose another path, or replace it: --force")


def try_place(path: Path) -> None:
    """Find out before minutes of measuring that a file could not be written; its folder is created.

    Raises:
        InputError: it cannot.
        ResourceError: the disk is full.
    """
    staging = _staging(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.touch()
        finally:
            staging.unlink(missing_ok=True)


def save_record(plain: Mapping[str, Any], out: Path) -> None:
    """Write a record in place of what is there; whatever happens meanwhile, one of the two is there whole.

    Raises:
        InputError: it cannot be written.
        ResourceError: the disk is full.
    """
    save_text(json.dumps(plain, indent=1, sort_keys=True) + "\n", out)


def save_text(text: str, out: Path) -> None:
    """Write a text file likewise."""
    staging = _staging(out)
    with disk_errors(out):
        try:
            with staging.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(out)
            sync_folder(out.parent)
        finally:
            staging.unlink(missing_ok=True)


def _staging(out: Path) -> Path:
    return out.with_name(f".{out.name}.staging")
