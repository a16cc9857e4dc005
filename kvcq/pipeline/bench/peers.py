"""Foreign kernels timed in the same run: a Python file with ``prepare(shape)``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcq.errors import InputError
from kvcq.pipeline.bench.shapes import Shape
from kvcq.pipeline.bench.timing import Call

FIX = "write NAME=FILE.py, a file that defines prepare(shape)"


@dataclass(frozen=True)
class Peer:
    """A foreign kernel.

    Attributes:
        name: As rows call it.
        prepare: Allocates one layer of a decode shape and returns what launches the kernel on it. It is called once
            for each layer, and all launches of a timing go into one CUDA graph.
    """

    name: str
    prepare: Callable[[Shape], Call]


def load_peers(texts: Sequence[str]) -> list[Peer]:
    """Load peers written as ``NAME=PATH``.

    Raises:
        InputError: not of that form, no such file, a file that does not load or defines no ``prepare``.
    """
    return [_load(text) for text in texts]


def _load(text: str) -> Peer:
    name, equals, place = text.partition("=")
    path = Path(place)
    if not (name and equals and path.suffix == ".py" and path.is_file()):
        raise InputError(f"{text!r} names no Python file", where="--peer", fix=FIX)
    spec = importlib.util.spec_from_file_location(f"kvcq_peer_{name}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded", where="--peer", fix=FIX)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} fails to load: {type(error).__name__}: {error}", where="--peer", fix=FIX) from error
    prepare = getattr(module, "prepare", None)
    if not callable(prepare):
        raise InputError(f"{path} defines no prepare(shape)", where="--peer", fix=FIX)
    return Peer(name, prepare)
