"""Where the prefill of every request was cut: with tokens and bundle all that its answer depends on.

A line of JSON for each time that a request held a row, written when it lets go of it::

    {"rid": "a1", "prompt": 900, "boundaries": [[384, "cached"], [640, "carried"]], "decoded": [[300, 320]]}

``prompt`` counts what was prefilled, after a retraction the tokens generated before it too. The rows of a reused prefix
were computed by others, cut where *their* boundaries were: those come first. ``decoded`` are the positions of the
prefix whose rows were computed by decode steps, one token each; the window rule held for them.

Which boundaries a page has behind it is remembered by its number, when tokens are computed in it. With a trace every
prefill waits for the device to read page numbers; without one nothing is done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.errors import ResourceError
from kvcq.spec.boundary import Boundary

Range = tuple[int, int]


class Sink(Protocol):
    """Something lines are written to."""

    def write(self, text: str, /) -> Any:
        """Write."""

    def flush(self) -> Any:
        """Pass on what was written."""


@dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
        rid: SGLang's id of the request.
        prompt: Tokens prefilled, a reused prefix included.
        boundaries: Starts of chunks after the first, those of the prefix included.
        decoded: Positions of the prefix that decode steps computed, ranges ``[start, stop)``.
    """

    rid: str
    prompt: int
    boundaries: tuple[Boundary, ...] = ()
    decoded: tuple[Range, ...] = ()

    def line(self) -> str:
        """Return the line, with its end."""
        boundaries = [[boundary.position, boundary.kind] for boundary in self.boundaries]
        plain = {"rid": self.rid, "prompt": self.prompt, "boundaries": boundaries, "decoded": list(self.decoded)}
        return json.dumps(plain, separators=(",", ":")) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Record:
        """Read a line.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        plain = json.loads(line)
        boundaries = tuple(Boundary(position, kind) for position, kind in plain["boundaries"])
        return cls(plain["rid"], plain["prompt"], boundaries, tuple((a, b) for a, b in plain["decoded"]))


@dataclass
class _Pass:
    stop: int
    boundaries: list[Boundary] = field(default_factory=list)
    decoded: list[Range] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Trace:
    """Boundaries of running requests and of the pages that they computed. Not safe for threads.

    Args:
        out: Gets a line a request.
    """

    def __init__(self, out: Sink) -> None:
        self._out = out
        self._running: dict[str, _Pass] = {}
        # Of each page, what lies before its end: boundaries and decoded ranges of whoever computed it.
        self._pages: dict[int, tuple[tuple[Boundary, ...], tuple[Range, ...]]] = {}

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Append to a file, made if need be.

        Raises:
            ResourceError: it cannot be written to.
        """
        try:
            return cls(path.open("a", encoding="utf-8"))
        except OSError as error:
            raise ResourceError(f"no trace can be written: {error.strerror}", where=path) from error

    def extend(self, rids: Sequence[str], firsts: Sequence[int], counts: Sequence[int], pages: Sequence[Any]) -> None:
        """Take note of a prefill, or of a chunk of it.

        Args:
            rids: Ids of the requests of the batch.
            firsts: Tokens that each has before this forward.
            counts: Tokens that each gets now.
            pages: Pages of each, at least those of all its tokens now.
        """
        for rid, first, count, row in zip(rids, firsts, counts, pages, strict=True):
            if not count:
                continue
            current = self._running.get(rid)
            if current is None:
                current = self._running[rid] = _Pass(first)
                if first:
                    boundaries, decoded = self._pages.get(row[(first - 1) // PAGE_TOKENS], ((), ()))
                    current.boundaries = [found for found in boundaries if found.position < first]
                    current.decoded = [(a, min(b, first)) for a, b in decoded if a < first]
                    current.boundaries.append(Boundary(first, "cached"))
            elif first:
                current.boundaries.append(Boundary(first, "carried"))
            current.stop = first + count
            current.pages = list(row[: -(-current.stop // PAGE_TOKENS)])
            self._remember(current, first, current.stop, ())

    def finish(self, rid: str, tokens: int, pages: Sequence[Any] = ()) -> Record | None:
        """Write the line of a request that lets go of its row.

        Args:
            rid: Its id; one that never prefilled gets no line.
            tokens: Tokens that are stored of it, decoded ones included.
            pages: Pages of these tokens.
        """
        current = self._running.pop(rid, None)
        if current is None:
            return None
        if tokens > current.stop:
            current.pages = list(pages[: -(-tokens // PAGE_TOKENS)])
            self._remember(current, current.stop, tokens, ((current.stop, tokens),))
        record = Record(rid, current.stop, tuple(current.boundaries), tuple(current.decoded))
        self._out.write(record.line())
        self._out.flush()
        return record

    def _remember(self, current: _Pass, start: int, stop: int, own: tuple[Range, ...]) -> None:
        decoded = (*current.decoded, *own)
        for index in range(start // PAGE_TOKENS, len(current.pages)):
            end = min((index + 1) * PAGE_TOKENS, stop)
            behind = tuple(found for found in current.boundaries if found.position < end)
            self._pages[current.pages[index]] = (behind, tuple((a, min(b, end)) for a, b in decoded if a < end))


def read_trace(path: Path) -> tuple[Record, ...]:
    """Read the lines of a trace, in the order in which requests ended; a request that was retracted has several."""
    return tuple(Record.of_line(line) for line in path.read_text(encoding="utf-8").splitlines())
