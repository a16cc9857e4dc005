"""The vocabulary of a local model out of ``tokenizer.json`` alone, where nothing else can add a token to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcq.models.fingerprint import tokens_digest

# Classes of tokenizers that have no special tokens of their own.
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")


def stated_vocabulary(folder: Path) -> str | None:
    """Return the digest of a folder's vocabulary as its identity has it; None where only the library knows it.

    It does where the tokenizer is of a class with tokens of its own, or where other files name tokens that
    ``tokenizer.json`` lacks.
    """
    try:
        whole, settings = _read(folder, "tokenizer.json"), _read(folder, "tokenizer_config.json")
        if settings.get("tokenizer_class") not in PLAIN or (folder / "added_tokens.json").exists():
            return None
        tokens = whole["model"]["vocab"]
        pairs = tokens.items() if isinstance(tokens, dict) else ((row[0], index) for index, row in enumerate(tokens))
        found = dict(pairs) | {added["content"]: added["id"] for added in whole.get("added_tokens") or ()}
        special = _read(folder, "special_tokens_map.json") if (folder / "special_tokens_map.json").exists() else {}
        if not {*_named(settings), *_named(special)} <= found.keys():
            return None
        return tokens_digest(found)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return None


def _read(folder: Path, name: str) -> dict[str, Any]:
    found = json.loads((folder / name).read_bytes())
    return found if isinstance(found, dict) else {}


def _named(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the tokens that settings name."""
    for name, value in settings.items():
        if name.endswith(("_token", "_tokens", "_tokens_decoder")):
            yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        inner = [value["content"]] if "content" in value else list(value.values())
        for each in inner:
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
