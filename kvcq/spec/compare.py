"""Records compared field by field: what the message says when two things do not belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = 4
LONG = 24


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested JSON values by dotted path; empty containers are leaves."""
    if isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list) and value:
        items = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= flatten(item, f"{path}.{key}" if path else key)
    return leaves


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differing fields of two plain records in words, e.g. ``chunk 64, not 32``, in order of their path."""
    a, b = flatten(dict(left)), flatten(dict(right))
    return tuple(
        f"{path} {_short(a.get(path))}, not {_short(b.get(path))}"
        for path in sorted(a.keys() | b.keys())
        if a.get(path) != b.get(path)
    )


def listed(found: tuple[str, ...]) -> str:
    """Join differences into one phrase; a long list is cut and counted."""
    rest = len(found) - SHOWN
    return "; ".join(found[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= LONG else text[: LONG - 3] + "..."
