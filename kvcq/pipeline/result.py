"""How verbs without numbers of their own answer: a text for people and a record for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcq.errors import visible


@dataclass(frozen=True)
class Answer:
    """A result that is only shown.

    Attributes:
        lines: What a person reads.
        record: The same facts for ``--json``.
    """

    lines: tuple[str, ...]
    record: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the lines as one text."""
        return "\n".join(self.lines)

    def payload(self) -> dict[str, Any]:
        """Return the machine-readable record."""
        return self.record


def aligned(rows: list[tuple[str, str]], indent: str = "") -> list[str]:
    """Lay out (label, value) rows in two columns; foreign text cannot steer the terminal."""
    width = max((len(label) for label, _ in rows), default=0)
    return [f"{indent}{visible(label).ljust(width)}  {visible(value)}".rstrip() for label, value in rows]
