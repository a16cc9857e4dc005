"""What every verb that writes does first: refuse a bad output before hours of work, and keep other writers away."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from kvcq.artifacts.claim import check_target, claim


class Writes(Protocol):
    """A request that names an output."""

    @property
    def out(self) -> Path:
        """Path to write."""

    @property
    def force(self) -> bool:
        """Replace an existing artifact."""

    @property
    def dry_run(self) -> bool:
        """Write nothing."""


Verb = TypeVar("Verb", bound=Callable[..., Any])


def exclusive(verb: Verb) -> Verb:
    """Let a verb run as the only writer of its request's output, and only if it may write there.

    A dry run checks the output and claims nothing.

    Raises:
        InputError: the output exists and may not be replaced, or another process is writing it.
    """

    @wraps(verb)
    def guarded(request: Writes, *args: Any, **kwargs: Any) -> Any:
        check_target(request.out, request.force)
        if request.dry_run:
            return verb(request, *args, **kwargs)
        with claim(request.out):
            check_target(request.out, request.force)
            return verb(request, *args, **kwargs)

    return cast(Verb, guarded)
