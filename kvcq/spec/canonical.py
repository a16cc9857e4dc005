"""Byte-canonical JSON and the digests built on it.

One value has exactly one encoding: UTF-8, sorted keys, separators ``,`` and ``:``, no ASCII escapes, integers
below 2^53, floats as the ``repr`` of a finite float64, -0.0 as 0.0, one final newline. A reader re-serialises
and compares, so a flipped byte, a duplicate key or a stray space is an error.

Limits keep a hostile file from exhausting memory. They are counted in the bytes, before anything is parsed: nothing
that kvcq writes comes near them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

MAX_INTEGER = 2**53
MAX_BYTES = 16 << 20
MAX_DEPTH = 32
# Bytes that open or separate values, and how many a document may have: a container costs memory even when empty.
LIMITS = ((b"[{", 1 << 17), (b":", 1 << 18), (b",", 1 << 20))


def check_limits(data: bytes | memoryview) -> None:
    """Refuse JSON text that would take too much memory to parse.

    Raises:
        ValueError: more than 16 MiB, or too many containers, fields or values.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than the {MAX_BYTES} allowed")
    text = bytes(data)
    for signs, limit in LIMITS:
        found = sum(text.count(sign) for sign in signs)
        if found > limit:
            raise ValueError(f"{found} of the characters {signs.decode()}, more than the {limit} allowed")


def _normalise(value: Any, path: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) >= MAX_INTEGER:
            raise ValueError(f"{path}: integer {value} is not below 2^53")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} is not finite")
        return 0.0 if value == 0.0 else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{path}: keys must be strings")
        return {key: _normalise(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalise(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{path}: {type(value).__name__} has no canonical form")


def dumps(value: Any) -> bytes:
    """Encode a JSON value canonically.

    Raises:
        ValueError: a non-finite float, an integer of 2^53 or more, a non-string key, or an unknown type.
    """
    text = json.dumps(
        _normalise(value, "$"), ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return text.encode("utf-8") + b"\n"


def loads(data: bytes) -> Any:
    """Decode canonical JSON and refuse every other encoding of the same value.

    Raises:
        ValueError: not JSON, beyond the limits, too deeply nested, or not byte-canonical.
    """
    check_limits(data)
    try:
        value = json.loads(data.decode("utf-8"))
        again = dumps(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if again != data:
        raise ValueError("not canonical JSON (an edited or damaged file)")
    return value


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical encoding of `value`."""
    return sha256(dumps(value))
