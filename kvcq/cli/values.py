"""Parsing of values that users write in shorthand."""

from __future__ import annotations

import re

from kvcq.errors import InputError

_LENGTH = re.compile(r"^([1-9][0-9]{0,11})([kKmM]?)$")
_SHARD = re.compile(r"^([0-9]{1,9})/([0-9]{1,9})$")
_SIZE = re.compile(r"^([1-9][0-9]{0,11})([kKmMgGtT]?)(i?[bB])?$")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_FACTOR = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_length(text: str, flag: str) -> int:
    """Read a token count such as ``4096``, ``4k`` (4096) or ``1m`` (1048576).

    Raises:
        InputError: anything else; names the flag.
    """
    match = _LENGTH.match(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a number of tokens", where=flag, fix="write for example 4096 or 4k")
    return int(match[1]) * _FACTOR[match[2].lower()]


def parse_lengths(text: str, flag: str) -> tuple[int, ...]:
    """Read a comma-separated list of token counts, sorted and without repeats."""
    return tuple(sorted({parse_length(item, flag) for item in text.split(",")}))


def parse_size(text: str, flag: str) -> int:
    """Read a number of bytes such as ``512M`` (536870912), ``2G`` or ``2GiB``; units are binary.

    Raises:
        InputError: anything else; names the flag.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a size", where=flag, fix="write for example 512M or 2G")
    return int(match[1]) * _UNITS[match[2].lower()]


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Read ``I/N``; whether such a shard exists is decided later.

    Raises:
        InputError: anything else.
    """
    if text is None:
        return None
    match = _SHARD.match(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a shard", where="--shard", fix="write I/N with I from 0 to N-1, e.g. 0/4")
    return int(match[1]), int(match[2])


def split_items(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list; empty items fall out."""
    return tuple(item.strip() for item in (text or "").split(",") if item.strip())
