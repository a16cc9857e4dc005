"""Structure-aware mutations of JSON, YAML and safetensors headers, drawn by hypothesis.

A JSON document is mutated as a value and then written by hand, so that it can hold what no writer would write:
repeated keys, numbers of a thousand digits, NaN, half surrogates, a hundred thousand brackets.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from hypothesis import strategies as st

RAW = "\ue000raw:"
"""Prefix of a string that stands for the JSON text after it, unquoted."""

HOSTILE_TEXT = (
    "", "a", "nan", "../../etc/passwd", "/dev/zero", "C:\\x", "x\x00y", "\x1b[2J\x1b]0;owned\x07", "line\nbreak\r",
    "\u202eevil", "\u200b", "{{ 7*7 }}", "{% include '/etc/passwd' %}", "<script>alert(1)</script>", "](javascript:x)",
    "!!python/object/apply:os.system [id]", "ｋｖｃｑ", "e\u0301", "é", "𝟙𝟚", "²", "٣", "-1", "1e9", "9" * 400,
    "x" * 70_000, "\ud800", "[bold red]x[/]", "=1+1", "| a | b |",
)  # fmt: skip
HOSTILE_RAW = (
    "NaN", "-Infinity", "1e400", "-0", "-0.0", "1E5", "0.10", "9" * 5000, "-" + "9" * 400, "9007199254740992",
    "9223372036854775808", "1" + "0" * 300, "1e-320", "[" * 500 + "]" * 500, '{"a":' * 300 + "1" + "}" * 300,
    "[" * 100_000, "[[]" + ",[]" * 3000 + "]", '{"x":1,"x":2}', '"\\ud800"', "tru", "", "\x00",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**53 - 1, 2**53, -(2**63), 0.0, 0.5, 1.0, -2.5, 1e308, 5e-324)

values = st.one_of(
    st.sampled_from(HOSTILE_TEXT),
    st.sampled_from(HOSTILE_RAW).map(lambda text: RAW + text),
    st.sampled_from(NUMBERS),
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.just({}),
    st.just([]),
    st.just([[], {}, None]),
    st.just({"a": {"b": [1]}}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all nodes below the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in items:
        found += [(*path, key), *places(item, (*path, key))]
    return found


def _parent(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def _other_type(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return {str(i): item for i, item in enumerate(value)}
    if isinstance(value, dict):
        return list(value.values())
    return "null"


@st.composite
def edits(draw: st.DrawFn, document: Any) -> Any:
    """Draw a document with one to three edits; the original is left alone."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        known = places(document)
        if not known:
            break
        path = draw(st.sampled_from(known))
        holder, key = _parent(document, path), path[-1]
        action = draw(st.sampled_from(("replace", "replace", "nudge", "delete", "repeat", "retype", "copy", "rename")))
        if action == "replace":
            holder[key] = copy.deepcopy(draw(values))
        elif action == "nudge" and type(holder[key]) in (int, float):
            holder[key] = draw(st.sampled_from((holder[key] + 1, -holder[key], holder[key] * 2, holder[key] / 2)))
        elif action == "delete":
            del holder[key]
        elif action == "repeat":
            if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            else:
                holder[RAW + render(key)] = copy.deepcopy(holder[key])
        elif action == "retype":
            holder[key] = _other_type(holder[key])
        elif action == "copy":
            other = draw(st.sampled_from(known))
            source = _parent(document, other)
            holder[key] = copy.deepcopy(source[other[-1]]) if _has(source, other[-1]) else None
        elif action == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(HOSTILE_TEXT))] = holder.pop(key)
    return document


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else isinstance(holder, list) and key < len(holder)


def render(value: Any) -> str:
    """Write JSON in canonical layout; strings that start with `RAW` are written as they are."""
    if isinstance(value, str):
        return value.removeprefix(RAW) if value.startswith(RAW) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ",".join(f"{render(key)}:{render(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(render, value)) + "]"
    return json.dumps(value)


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def sealed(document: Any) -> bytes:
    """Write a header with the digest that its text has: the mutation reaches everything behind the digest."""
    if isinstance(document, dict):
        body = {key: value for key, value in document.items() if key != "digest"}
        digest = hashlib.sha256(as_bytes(render(body)) + b"\n").hexdigest()
        document = {**body, "digest": digest}
    return as_bytes(render(document)) + b"\n"


@st.composite
def raw_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw `data` with flipped, cut, repeated or inserted bytes."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        action = draw(st.sampled_from(("flip", "flip", "cut", "insert", "drop", "repeat")))
        if action == "flip" and changed:
            changed[at] ^= draw(st.integers(1, 255))
        elif action == "cut":
            del changed[at:]
        elif action == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif action == "drop":
            del changed[at : at + draw(st.integers(1, 40))]
        elif action == "repeat":
            changed[at:at] = changed[at : at + 64] * draw(st.integers(1, 40))
    return bytes(changed)
