"""A server that is up: what `serve` tells its caller, whichever engine answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ready:
    """A server that accepts requests.

    Attributes:
        url: Where.
        record: What is served, for machines.
        stop: Ends it, with the seconds that running requests still have; safe from any thread.
    """

    url: str
    record: dict[str, Any]
    stop: Callable[[float], None]

    def text(self) -> str:
        """Return the line for people."""
        return f"ready: {self.url}/v1 serves {self.record['model']} with bundle {self.record['digest'][:16]}"

    def payload(self) -> dict[str, Any]:
        """Return the machine-readable record."""
        return self.record
