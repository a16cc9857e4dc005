"""A device that only remembers who wrote which row: every row holds one number that says what it is."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import torch

from kvcq.runtime.layout import PAGE
from kvcq.runtime.sglang.windows import WindowBuffers
from kvcq.spec.plan import Windows

LONGEST = 1024
PLACES = np.arange(LONGEST)
WEIGHTS = np.random.default_rng(7).integers(1, 2**62, LONGEST, dtype=np.int64)


@dataclass
class Range:
    start: int
    end: int


@dataclass(eq=False)
class Req:
    """What of SGLang's ``Req`` is read, and the whole future of the request."""

    rid: str
    future: np.ndarray
    prompt: int
    extra_key: str | None
    input_embeds: list | None = None
    positional_embed_overrides: object = None
    known: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: list = field(default_factory=list)
    kv: int = 0
    life: int = 0
    aborted: bool = False
    req_pool_idx: int | None = None
    prefix_indices: range = range(0)
    extend_range: Range | None = None

    def __post_init__(self) -> None:
        self.known = self.prompt
        self._future = array("q", self.future.tolist())

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self._future[: self.known]

    def contents(self, salt: int) -> np.ndarray:
        """What the row of every position tells: it depends on all tokens before, what must agree, and the weights."""
        key = crc32(repr((self.extra_key, self.rid if self.input_embeds else None, salt)).encode())
        return np.cumsum((self.future + 1 + key) * WEIGHTS[: len(self.future)])

    def own(self) -> np.ndarray:
        """What the exact rows of this request tell: no other request writes the same."""
        return int(self.rid[1:]) * LONGEST + PLACES[: len(self.future)]


@dataclass
class Forward:
    """A forward on its way: requests with their life, row, first position, end, and the slots of the new tokens."""

    extend: bool
    entries: list[tuple[Req, int, int, int, int, list[int]]]
    ran: bool = False


class Device:
    """Pages by page and place, exact rows in the real buffers; every row holds one number that says what it is."""

    def __init__(self, windows: Windows, rows: int, entries: int, pages: int) -> None:
        self.windows = windows
        self.codes = np.zeros((pages + 1, PAGE), dtype=np.int64)
        self.buffers = WindowBuffers.reserve(
            layers=1, rows=rows, entries=entries, heads=1, dims=(1, 1), windows=windows, dtype=torch.int64, device="cpu"
        )
        self.sinks = self.buffers.sink_k[0, :, 0, :, 0].numpy()
        self.ring = self.buffers.ring_k[0, :, 0, :, 0].numpy()
        self.reads = 0

    def run(self, forward: Forward, salt: int) -> None:
        for req, life, row, first, end, pages in forward.entries:
            contents, own = req.contents(salt), req.own()
            at = PLACES[first:end]
            self.codes[[pages[p // PAGE] for p in at.tolist()], at % PAGE] = contents[at]
            live = req.life == life
            if forward.extend and live:
                self._read(req, row, first, contents, own)
            # What the kernels store: sinks, and of a chunk the last rows of the ring.
            sink = at[at < self.windows.sink]
            self.sinks[row, sink] = contents[sink]
            size = self.ring.shape[1]
            recent = at[at >= end - size]
            self.ring[row, recent % size] = own[recent]
            if not forward.extend and live:
                since = int(self.buffers.exact_from[row])
                assert since <= max(end - self.windows.recent, 0), "a window is not whole"
                self._read(req, row, end, contents, own)

    def _read(self, req: Req, row: int, n: int, contents: np.ndarray, own: np.ndarray) -> None:
        """Read all that a query behind the first n tokens reads."""
        sink, recent = self.windows.sink, self.windows.recent
        since = int(self.buffers.exact_from[row])
        oldest = min(max(n - recent, since, sink), n)
        head = min(sink, n)
        assert (self.sinks[row, :head] == contents[:head]).all(), "foreign sinks"
        at = PLACES[oldest:n]
        assert (self.ring[row, at % self.ring.shape[1]] == own[at]).all(), "foreign rows in a ring"
        if sink < oldest:
            pages = np.asarray(req.pages[: -(-oldest // PAGE)])
            codes = self.codes[pages].reshape(-1)[sink:oldest]
            assert (codes == contents[sink:oldest]).all(), "foreign codes"
        self.reads += 1
