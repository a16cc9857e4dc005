"""Byte-canonical JSON and the digests built on it.

One value has exactly one encoding: UTF-8, sorted keys, separators ``,`` and ``:``, no ASCII escapes, integers
below 2^53, floats as the ``repr`` of a finite float64, -0.0 as 0.0, one final newline. A reader re-serialises
and compares, so a flipped byte, a duplicate key or a stray space is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

MAX_INTEGER = 2**53


def _normalise(value: Any, path: str) -> Any:
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
        return {key: _normalise(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalise(item, f"{path}[{i}]") for i, item in enumerate(value)]
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
        ValueError: not JSON, too deeply nested, or not byte-canonical.
    """
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
