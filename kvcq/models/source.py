"""Where a model comes from: a hub id, a folder, a GGUF file, or a builtin name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcq.errors import InputError
from kvcq.models.builtin import BUILTINS

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """A resolved model argument. `location` is a hub id, a path as given, or a builtin name."""

    kind: Literal["hub", "folder", "gguf", "builtin"]
    location: str
    revision: str | None = None

    @property
    def label(self) -> str:
        """The name to show and store: the hub id or builtin name, or the last path component, never a path."""
        return self.location if self.kind in ("hub", "builtin") else Path(self.location).resolve().name


def resolve_source(model: str, revision: str | None = None) -> ModelSource:
    """Decide what a model argument means. Touches the file system, never the network.

    Builtin names win (write ``./NAME`` for a folder of that name), then existing paths, then hub ids.

    Raises:
        InputError: empty, a path that does not exist, a file that is no GGUF, neither path nor hub id, or a
            revision for something that is not on the hub.
    """
    source = _resolve(model, revision)
    if revision is not None and source.kind != "hub":
        raise InputError("a revision is for hub models only", where="--revision", fix=f"{source.label} is local")
    return source


def _resolve(model: str, revision: str | None) -> ModelSource:
    if model in BUILTINS:
        return ModelSource("builtin", model)
    if not model.strip():
        raise InputError("the model name is empty", fix="give a hub id, a folder or a .gguf file")
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource("folder", str(path))
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelSource("gguf", str(path))
        raise InputError("a model is a folder or a .gguf file, not this file", where=model)
    looks_like_path = model.startswith((".", "/", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1
    if looks_like_path or "\\" in model:
        raise InputError("no such model folder or file", where=model)
    if not HUB_ID.fullmatch(model):
        raise InputError(
            "neither an existing path nor a hub id", where=model, fix="a hub id reads NAME or ORGANISATION/NAME"
        )
    return ModelSource("hub", model, revision)
