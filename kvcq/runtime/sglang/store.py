"""Whose sink rows lie where, in plain Python: decided while requests are scheduled, carried out on the device later.

Every running request has a row of sinks and ring. After a prefix hit it does not compute its first S tokens, so their
exact rows must come from elsewhere: from an entry that keeps the sinks of an earlier request with the same beginning.
The key is ``(extra_key, first S token ids)``; an input embedding has no key and never hits::

    cap        how much of a prompt may be reused: all but the last W tokens, nothing unless its entry is there
    bind       a prefill batch got its rows: what hits is copied from its entry, what computed its sinks gets one
    drain      the batch goes to the device: the copies that come before it
    release    a request lets go of its row

A row's sinks exist once its forward has run, so they are copied into the entry before the next prefill; the row keeps
them that long, whoever owns it, because only a prefill writes there. The entry is found from the moment the forward
was started: what finds it is started later, on the same stream. Where none is free the entry unused for longest gives
way, though not before all hits of the batch have named theirs; copies are carried out in the order in which they were
decided, so one to come may still name it. Everything follows from the order of calls: all ranks decide alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvcq.errors import MismatchError
from kvcq.runtime.layout import PAGE
from kvcq.spec.plan import Windows

Key = tuple[str | None, bytes]


@dataclass(frozen=True)
class Prefill:
    """A request of a prefill batch, at its first chunk or a later one.

    Attributes:
        row: Its row, ``req_pool_idx``.
        name: Its id, to tell it from the row's owners before it.
        ids: All tokens known of it, the prompt first.
        prefix: Tokens that were there before this forward: reused, or computed by earlier chunks.
        end: Tokens that are there after it.
        extra_key: What besides tokens must agree to share a prefix.
        private: Its tokens do not tell its rows (input embeddings): it is never found by others.
    """

    row: int
    name: str
    ids: Sequence[int]
    prefix: int
    end: int
    extra_key: str | None = None
    private: bool = False


@dataclass(frozen=True)
class Moves:
    """Copies on the device before a prefill, in this order.

    Attributes:
        keep: (row, entry): the row's sinks into the entry.
        restore: (entry, row): back into a row.
        exact_from: (row, position): the request that begins in the row has no exact row before the position.
    """

    keep: tuple[tuple[int, int], ...] = ()
    restore: tuple[tuple[int, int], ...] = ()
    exact_from: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Occupancy:
    """What is in use: rows of running requests, entries that copies to come name, other entries with sinks."""

    rows: int
    pinned: int
    cached: int


@dataclass
class _Bound:
    name: str
    key: Key | None
    settled: bool


@dataclass(frozen=True)
class _Copy:
    row: int
    entry: int


class SinkStore:
    """Rows of running requests and entries of kept sinks. Not safe for threads: one scheduler owns it.

    Args:
        windows: S and W.
        rows: Rows of the request table; row 0 is padding and never bound.
        entries: Sinks kept for later requests.

    Raises:
        ValueError: sizes out of range.
    """

    def __init__(self, windows: Windows, rows: int, entries: int) -> None:
        if rows < 2 or entries < 0:
            raise ValueError(f"{rows} rows and {entries} entries: there are at least 2 rows and 0 entries")
        self.windows, self.rows, self.entries = windows, rows, entries
        self._bound: dict[int, _Bound] = {}
        # A batch was bound whose copies have not gone to the device.
        self.pending = False
        self._empty()

    def _empty(self) -> None:
        # Unused for longest first.
        self._found: OrderedDict[Key, int] = OrderedDict()
        self._free = list(reversed(range(self.entries)))
        # Copies into entries: decided; then under way, the forward that computes the sinks having been started; then
        # due, another batch having been bound since.
        self._decided: dict[Key, _Copy] = {}
        self._under_way: list[_Copy] = []
        self._due: list[_Copy] = []
        self._restore: list[tuple[int, int]] = []
        self._exact_from: list[tuple[int, int]] = []

    @property
    def occupancy(self) -> Occupancy:
        """Rows and entries in use."""
        copies = (*self._decided.values(), *self._under_way, *self._due)
        pinned = len({*(copy.entry for copy in copies), *(entry for entry, _ in self._restore)})
        return Occupancy(len(self._bound), pinned, self.entries - len(self._free) - pinned)

    def cap(self, input_len: int, ids: Sequence[int], extra_key: str | None = None, private: bool = False) -> int:
        """Return how many tokens of a prompt may come from the cache: whole pages, and the last W never.

        Args:
            input_len: Tokens of the prompt, generated ones included after a retraction.
            ids: Its tokens, at least the first S.
            extra_key: What besides tokens must agree to share a prefix.
            private: Its tokens do not tell its rows.
        """
        sink, recent = self.windows.sink, self.windows.recent
        if private or input_len < sink + recent:
            return 0
        if sink and self._key(ids, extra_key) not in self._found:
            return 0
        return (input_len - recent) // PAGE * PAGE

    def bind(self, batch: Sequence[Prefill]) -> None:
        """Take note of a prefill batch, once its requests have rows and before its forward is started.

        Raises:
            MismatchError: a reused prefix without its entry or nearer to the end than W, a row with two owners, a row
                that does not exist: rows would be read that nobody wrote. A bug, here or in the host.
        """
        self._due += self._under_way
        self._under_way = []
        self.pending = True
        # All hits name their entries before any entry is taken from its key.
        for request in batch:
            self._begin(request)
        for request in batch:
            self._settle(request)

    def plant(self, ids: Sequence[int], extra_key: str | None = None) -> None:
        """Count an entry as keeping the sinks of a prompt that nobody computed: for benchmarks, with any rows in it."""
        key = self._key(ids, extra_key)
        if key in self._found:
            self._found.move_to_end(key)
        elif self.windows.sink and (entry := self._take()) is not None:
            self._found[key] = entry

    def release(self, row: int) -> None:
        """Let go of a request's row: it has finished, was aborted or retracted. A row that nobody holds is no fault.

        What it computed stays to be copied; what it was to compute in a forward that was never started does not.
        """
        if self._bound.pop(row, None) is None:
            return
        for key, copy in list(self._decided.items()):
            if copy.row == row:
                del self._decided[key]
                self._free.append(copy.entry)
        self._restore = [(entry, target) for entry, target in self._restore if target != row]
        self._exact_from = [(target, position) for target, position in self._exact_from if target != row]

    def drain(self) -> Moves:
        """Return the copies that the batch bound last needs before it, once; the batch counts as started then."""
        moves = Moves(
            tuple((copy.row, copy.entry) for copy in self._due), tuple(self._restore), tuple(self._exact_from)
        )
        self._due, self._restore, self._exact_from = [], [], []
        for key, copy in self._decided.items():
            self._found[key] = copy.entry
            self._under_way.append(copy)
        self._decided, self.pending = {}, False
        return moves

    def clear(self) -> None:
        """Forget all requests and entries: the host has flushed its cache, its weights may be others."""
        self._bound.clear()
        self.pending = False
        self._empty()

    def check(self) -> None:
        """Hold the books against each other.

        Raises:
            RuntimeError: an entry is lost, or has two keys: a bug.
        """
        held = [*self._free, *self._found.values(), *(copy.entry for copy in self._decided.values())]
        if sorted(held) != list(range(self.entries)):
            raise RuntimeError(f"{self.entries} entries of sinks, but {sorted(held)} are accounted for")

    def _begin(self, request: Prefill) -> None:
        row = request.row
        if not 1 <= row < self.rows:
            raise _broken(f"request {request.name} has row {row}, buffers have rows 1 to {self.rows - 1}")
        bound = self._bound.get(row)
        if bound is not None:
            if bound.name != request.name:
                raise _broken(f"row {row} of request {bound.name} was given to {request.name}")
            return
        has_key = self.windows.sink and not request.private and len(request.ids) >= self.windows.sink
        key = self._key(request.ids, request.extra_key) if has_key else None
        bound = _Bound(request.name, key, settled=key is None)
        if request.prefix and request.prefix > len(request.ids) - self.windows.recent:
            raise _broken(
                f"request {request.name} reuses {request.prefix} of {len(request.ids)} tokens, the last "
                f"{self.windows.recent} are to be computed"
            )
        if request.prefix and self.windows.sink:
            if key is None or key not in self._found:
                raise _broken(f"request {request.name} reuses {request.prefix} tokens, but their sinks are not kept")
            self._restore.append((self._found[key], row))
            self._found.move_to_end(key)
            bound.settled = True
        self._exact_from.append((row, request.prefix))
        self._bound[row] = bound

    def _settle(self, request: Prefill) -> None:
        """Give the sinks that this forward completes an entry, unless there is one or none can be had."""
        bound = self._bound[request.row]
        if bound.settled or bound.key is None or request.end < self.windows.sink:
            return
        bound.settled = True
        if bound.key in self._found:
            self._found.move_to_end(bound.key)
        elif bound.key not in self._decided:
            entry = self._take()
            if entry is not None:
                self._decided[bound.key] = _Copy(request.row, entry)

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._found.popitem(last=False)[1] if self._found else None

    def _key(self, ids: Sequence[int], extra_key: str | None) -> Key:
        return extra_key, array("q", ids[: self.windows.sink]).tobytes()


def _broken(what: str) -> MismatchError:
    return MismatchError(what, where="sinks", fix="update kvcq and SGLang together")
