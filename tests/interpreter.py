"""Triton's interpreter in less time: it prepares its language once a launch, not at every call of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def languages(function: Callable[..., Any]) -> frozenset[str]:
    """Return which modules of the language a function sees; those are what is prepared for it."""
    seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    return frozenset(module.__name__ for module in seen)


class Launch:
    """What was prepared for a kernel, and for which modules the functions that it calls are prepared too."""

    def __init__(self, scope: Any, function: Callable[..., Any], running: list[Launch]) -> None:
        self.scope, self.prepared, self.running = scope, {languages(function)}, running
        running.append(self)

    def restore(self) -> None:
        self.running.remove(self)
        self.scope.restore()


def prepare_once() -> None:
    """Replace what the interpreter does before it runs a function; one of another make is left alone."""
    if not hasattr(interpreter, "_patch_lang"):
        return
    prepare, running = interpreter._patch_lang, list[Launch]()

    def once(function: Callable[..., Any]) -> Launch | None:
        if not running:
            return Launch(prepare(function), function, running)
        # Nobody restores what is prepared for a call inside a launch.
        if languages(function) not in running[-1].prepared:
            running[-1].prepared.add(languages(function))
            prepare(function)
        return None

    interpreter._patch_lang = once
