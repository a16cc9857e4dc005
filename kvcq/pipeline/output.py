"""What every verb that writes does first: refuse a bad output before hours of work, and keep other writers away."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from kvcq.artifacts.claim import check_target, claim
from kvcq.artifacts.verify import detect
from kvcq.errors import CorruptArtifactError, InputError


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


# What each verb writes, and the fields of requests that name artifacts it reads.
KINDS = {
    "collect": "stats",
    "merge": "stats",
    "fit": "fit",
    "validate": "report",
    "validate_server": "scores",
    "sweep": "report",
    "pack": "bundle",
}
INPUTS = ("stats", "fit", "report", "artifacts", "shards")

Verb = TypeVar("Verb", bound=Callable[..., Any])


def exclusive(verb: Verb) -> Verb:
    """Let a verb run as the only writer of its request's output, and only if it may write there.

    A dry run checks the output and claims nothing.

    Raises:
        InputError: the output exists and may not be replaced, is one of the inputs, or another process writes it.
    """

    @wraps(verb)
    def guarded(request: Writes, *args: Any, **kwargs: Any) -> Any:
        check_target(request.out, request.force)
        check_apart(request)
        check_kind(request.out, KINDS[verb.__name__])
        if request.dry_run:
            return verb(request, *args, **kwargs)
        with claim(request.out):
            check_target(request.out, request.force)
            return verb(request, *args, **kwargs)

    return cast(Verb, guarded)


def check_apart(request: Writes) -> None:
    """Refuse to replace what the verb reads.

    Raises:
        InputError: the output is an input, contains one, or lies inside one.
    """
    out = request.out.resolve()
    for field in INPUTS:
        value = getattr(request, field, ())
        for path in value if isinstance(value, tuple) else (value,):
            given = Path(path).resolve()
            if out == given or out in given.parents or given in out.parents:
                raise InputError(
                    f"the output would replace the input {path}", where="--out", fix="choose another --out"
                )


def check_kind(out: Path, kind: str) -> None:
    """Let ``--force`` replace an artifact by one of its own kind only; a damaged one may go.

    Raises:
        InputError: an intact-looking artifact of another kind is there.
    """
    if not out.exists():
        return
    try:
        found = detect(out)
    except (CorruptArtifactError, InputError):
        return
    if found != kind:
        raise InputError(f"{out.name} holds {found}, not {kind}", where="--out", fix="choose another --out")
