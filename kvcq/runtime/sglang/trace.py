"""Where the prefill of every request was cut: with tokens and bundle all that its answer depends on.

A line of JSON for each time that a request held a row, written when it lets go of it::

    {"rid": "a1", "prompt": 900, "boundaries": [[384, "cached"], [640, "carried"]],
     "decoded": [[300, 320]], "adopted": []}                                            without the break

``prompt`` counts what was prefilled, after a retraction the tokens generated before it too. The rows of a reused prefix
were computed by others, cut where *their* boundaries were: those come first. ``decoded`` are the positions of the
prefix whose rows were computed by decode steps, one token each; the window rule held for them.

``adopted`` are positions whose codes are those of another computation than the boundaries tell: where a request
computes tokens that the radix tree holds already, as the last W of a hit, SGLang drops its pages for the tree's. The
tokens are the same and the codes nearly so; a replay is exact for requests without any.

Which boundaries a page has behind it is remembered by its number, when tokens are computed in it. With a trace every
prefill waits for the device to read page numbers; without one nothing is done.

A trace that cannot be written any more, on a full disk, ends with one line on stderr and the server goes on: no answer
depends on it, and other requests would be lost. Its last line may have no end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.errors import ResourceError, visible
from kvcq.spec.boundary import Boundary

Range = tuple[int, int]


class Sink(Protocol):
    """Something lines are written to."""

    def write(self, text: str, /) -> Any:
        """Write."""

    def flush(self) -> Any:
        """Pass on what was written."""

    def close(self) -> Any:
        """Write no more."""


class History(NamedTuple):
    """How tokens came about: boundaries of chunks, and ranges of positions that decode steps computed."""

    boundaries: tuple[Boundary, ...] = ()
    decoded: tuple[Range, ...] = ()

    def before(self, stop: int) -> History:
        """Return the part of it that tokens before a position have."""
        return History(
            tuple(found for found in self.boundaries if found.position < stop),
            tuple((a, min(b, stop)) for a, b in self.decoded if a < stop),
        )


NOTHING = History()


@dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
        rid: SGLang's id of the request.
        prompt: Tokens prefilled, a reused prefix included.
        boundaries: Starts of chunks after the first, those of the prefix included.
        decoded: Positions of the prefix that decode steps computed, ranges ``[start, stop)``.
        adopted: Positions whose codes others computed, cut in another way than `boundaries` say; ranges.
    """

    rid: str
    prompt: int
    boundaries: tuple[Boundary, ...] = ()
    decoded: tuple[Range, ...] = ()
    adopted: tuple[Range, ...] = ()

    def line(self) -> str:
        """Return the line, with its end."""
        boundaries = [[boundary.position, boundary.kind] for boundary in self.boundaries]
        plain = {"rid": self.rid, "prompt": self.prompt, "boundaries": boundaries}
        plain |= {"decoded": list(self.decoded), "adopted": list(self.adopted)}
        return json.dumps(plain, separators=(",", ":")) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Record:
        """Read a line.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        plain = json.loads(line)
        boundaries = tuple(Boundary(position, kind) for position, kind in plain["boundaries"])
        decoded, adopted = (tuple((a, b) for a, b in plain[name]) for name in ("decoded", "adopted"))
        return cls(plain["rid"], plain["prompt"], boundaries, decoded, adopted)


@dataclass
class _Pass:
    stop: int
    history: History = NOTHING
    pages: list[int] = field(default_factory=list)
    adopted: set[int] = field(default_factory=set)

    def bound(self, position: int, kind: Literal["carried", "cached"]) -> None:
        boundaries = (*self.history.boundaries, Boundary(position, kind))
        self.history = self.history._replace(boundaries=boundaries)

    def turn(self, pages: Sequence[Any]) -> None:
        """Take note of the pages that the request has now; one that changed is the tree's."""
        self.adopted |= {index for index, (old, new) in enumerate(zip(self.pages, pages, strict=False)) if old != new}
        self.pages = list(pages)


class Trace:
    """Boundaries of running requests and of the pages that they computed. Not safe for threads.

    Args:
        out: Gets a line a request.
        name: Of it, for people.

    Attributes:
        active: Lines can still be written; nothing is noted otherwise.
    """

    def __init__(self, out: Sink, name: str = "trace") -> None:
        self._out, self._name = out, name
        self.active = True
        self._running: dict[str, _Pass] = {}
        # Of each page, what lies before its end, of whoever computed it.
        self._pages: dict[int, History] = {}

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Append to a file, made if need be.

        Raises:
            ResourceError: it cannot be written to.
        """
        try:
            return cls(path.open("a", encoding="utf-8"), str(path))
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
        if not self.active:
            return
        for rid, first, count, row in zip(rids, firsts, counts, pages, strict=True):
            if not count:
                continue
            current, stop = self._running.get(rid), first + count
            if current is None:
                current = self._running[rid] = _Pass(first)
                if first:
                    self._reuse(current, row[: -(-first // PAGE_TOKENS)])
            elif first:
                current.bound(first, "carried")
            current.turn(row[: -(-stop // PAGE_TOKENS)])
            self._remember(current, first, stop)

    def finish(self, rid: str, tokens: int, pages: Sequence[Any] = ()) -> Record | None:
        """Write the line of a request that lets go of its row.

        Args:
            rid: Its id; one that never prefilled gets no line, and none does once writing has failed.
            tokens: Tokens that are stored of it, decoded ones included.
            pages: Pages of these tokens.
        """
        current = self._running.pop(rid, None)
        if current is None:
            return None
        prompt, history = current.stop, current.history
        current.turn(pages[: -(-tokens // PAGE_TOKENS)])
        if tokens > prompt:
            current.history = history._replace(decoded=(*history.decoded, (prompt, tokens)))
            self._remember(current, prompt, tokens)
        record = Record(rid, prompt, *history, adopted=_ranges(current.adopted, prompt))
        try:
            self._out.write(record.line())
            self._out.flush()
        except OSError as error:
            self._end(error)
        return record

    def _end(self, error: OSError) -> None:
        self.active = False
        self._running.clear()
        self._pages.clear()
        why = visible(f"{error.strerror or error} ({self._name})")
        print(f"kvcq: the trace ends, the server goes on: {why}", file=sys.stderr, flush=True)
        # Closing writes what is left once more.
        with suppress(OSError):
            self._out.close()

    def _reuse(self, current: _Pass, pages: Sequence[Any]) -> None:
        """Begin behind a prefix: its last page knows what is behind it, and the others should know the same."""
        whole = self._pages.get(pages[-1], NOTHING)
        current.history = whole.before(current.stop)
        current.bound(current.stop, "cached")
        for index, page in enumerate(pages):
            if self._pages.get(page, NOTHING) != whole.before((index + 1) * PAGE_TOKENS):
                current.adopted.add(index)

    def _remember(self, current: _Pass, start: int, stop: int) -> None:
        current.stop = stop
        for index in range(start // PAGE_TOKENS, len(current.pages)):
            self._pages[current.pages[index]] = current.history.before(min((index + 1) * PAGE_TOKENS, stop))


def _ranges(pages: Iterable[int], stop: int) -> tuple[Range, ...]:
    """Return the positions before `stop` of pages, by their places in a request, as few ranges."""
    found: list[Range] = []
    for index in sorted(pages):
        start, end = index * PAGE_TOKENS, min((index + 1) * PAGE_TOKENS, stop)
        if start >= end:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return tuple(found)


def read_trace(path: Path) -> tuple[Record, ...]:
    """Read the lines of a trace, in the order in which requests ended; a request that was retracted has several.

    What has no end of line, as where a disk was full, is no line.
    """
    return tuple(Record.of_line(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1])
