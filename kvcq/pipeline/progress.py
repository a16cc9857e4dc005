"""How a verb tells its caller what it is doing, without knowing whether anybody watches."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress; all methods are cheap and never raise."""

    def stage(self, text: str) -> None:
        """Begin a stage of the work, e.g. ``loading model``."""

    def advance(self, done: int, total: int, unit: str) -> None:
        """Report that `done` of `total` units of the current stage are finished."""

    def note(self, text: str) -> None:
        """Tell something worth one line that is neither progress nor a problem."""

    def warn(self, text: str) -> None:
        """Tell about a problem that does not stop the work."""


class Silent:
    """The reporter of a caller who does not watch."""

    def stage(self, text: str) -> None:
        """Ignore."""

    def advance(self, done: int, total: int, unit: str) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""

    def warn(self, text: str) -> None:
        """Ignore."""


SILENT = Silent()
