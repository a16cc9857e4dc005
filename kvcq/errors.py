"""The one exception tree of kvcq: each class owns its exit code and reads as one line.

Every error prints as ``WHAT (WHERE): FIX``, where WHERE names the file or flag and FIX what to do next.
Anything that is not a `KvcqError` is a bug and ends with exit code 1.
"""

from __future__ import annotations

from pathlib import Path

SHOWN = 60


def visible(text: str) -> str:
    """Make foreign text one line that is safe to print: what would steer a terminal becomes a visible escape."""
    flat = " ".join(text.split())
    if flat.isprintable():
        return flat
    # Not printable: terminal escapes, direction overrides, half surrogates that no stream can encode, unassigned.
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in flat)


def shown(value: object) -> str:
    """Return the ``repr`` of a foreign value, cut to 60 characters: an error is a line, not a copy of the input."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


class KvcqError(Exception):
    """Base of all errors that kvcq raises on purpose.

    Args:
        what: What went wrong, without a final full stop.
        where: The file, flag, layer or field at fault.
        fix: What the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | Path | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix

    def __str__(self) -> str:
        line = self.what
        if self.where:
            line += f" ({self.where})"
        if self.fix:
            line += f": {self.fix}"
        return visible(line)


class Interrupted(BaseException):
    """A signal ended the work. Not an `Exception`, so that nothing on the way takes it for a failure.

    Args:
        number: The signal; the exit code is 128 more, as shells count.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class EvaluationError(KvcqError):
    """An evaluation item failed to run: no score can be given for it (exit 1)."""


class InputError(KvcqError):
    """A bad flag, recipe, file or text given by the user (exit 2)."""

    exit_code = 2


class UnsupportedError(InputError):
    """An architecture or feature that kvcq refuses, with the reason (exit 2)."""


class GateFailed(KvcqError):
    """A validation gate did not hold (exit 3)."""

    exit_code = 3


class CorruptArtifactError(KvcqError):
    """An artifact is unreadable, truncated, altered or not canonical (exit 4)."""

    exit_code = 4


class MismatchError(KvcqError):
    """An artifact does not fit this model, host, version or layout (exit 5)."""

    exit_code = 5


class ResourceError(KvcqError):
    """Memory or disk ran out, or would (exit 6)."""

    exit_code = 6


class UnavailableError(KvcqError):
    """Something is not reachable or not installed: offline, a missing extra, a gated model (exit 7)."""

    exit_code = 7
