"""What the kernels of one cache share: the arguments of a forward on the device, and workspaces.

Every request is a batch of its own: its pages follow one another in its own storage, so its page table counts up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.kernels.arrays import Requests, Tables
from kvcq.kernels.attention import Decoder
from kvcq.runtime.hf.turn import Turn
from kvcq.spec.plan import Windows

LEAST_COLUMNS = 64


@dataclass(frozen=True)
class Step:
    """A turn on the device.

    Attributes:
        turn: What it is.
        decode: One token whose oldest exact position is that of the window rule or later.
        slots: int64 ``[n]``, places of the new tokens in the pages.
        positions: int32 ``[n]``.
        requests: int32 ``[n]``, zeros: the only request.
        batch: The request.
        starts: int32 ``[2]``: 0 and n.
        oldest: int32 ``[n]``, see `Turn.oldest`.
    """

    turn: Turn
    decode: bool
    slots: Tensor
    positions: Tensor
    requests: Tensor
    batch: Requests
    starts: Tensor
    oldest: Tensor


class Place(NamedTuple):
    """Which layers of which row share a work list."""

    row: int
    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    words: int
    vq: bool


class Desk:
    """Steps and workspaces of the rows of a batch; one for all layers of a cache.

    Attributes:
        most: Tokens that a request will not exceed, if known: no pages are held ahead beyond them.
    """

    def __init__(self, windows: Windows, device: torch.device) -> None:
        self._windows, self._device = windows, device
        self.most: int | None = None
        self._zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._table = torch.zeros(1, 0, dtype=torch.int32, device=device)
        self._steps: dict[int, Step] = {}
        self._decoders: dict[Place, tuple[Decoder, Step | None]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Desk:
        """Return an empty one: another cache may be used at the same time."""
        twin = Desk(self._windows, self._device)
        twin.most = self.most
        return twin

    def step(self, turn: Turn) -> Step:
        """Return the arguments of a turn, made when the first layer asks."""
        latest = self._steps.get(turn.row)
        if latest is None or latest.turn is not turn:
            latest = self._steps[turn.row] = self._make(turn)
        return latest

    def decoder(self, tables: Tables, step: Step, q_heads: int) -> Decoder:
        """Return the decoder of a geometry with its work list for `step`, made when the first layer asks."""
        place = Place(step.turn.row, q_heads, tables.heads, tables.k.d, tables.v.d, tables.words, tables.vq)
        decoder, planned = self._decoders.get(place, (None, None))
        if decoder is None:
            longest = self._table.shape[1] * PAGE_TOKENS
            decoder = Decoder.reserve(tables, self._windows, q_heads, 1, longest, self._device)
        if planned is not step:
            decoder.plan(step.batch)
            self._decoders[place] = (decoder, step)
        return decoder

    def _make(self, turn: Turn) -> Step:
        count, stop, by_window = turn.count, turn.stop, turn.stop - self._windows.recent
        decode = count == 1 and turn.high >= by_window
        # Where the window rule holds, lengths say it all.
        start = max(turn.high, 0) if decode and turn.high > by_window else 0
        batch = Requests(self._columns(stop), self._zero, self._full(stop), self._full(start) if start else self._zero)
        if decode:
            slots, positions = self._full(turn.first).long(), self._full(turn.first)
            return Step(turn, True, slots, positions, self._zero, batch, self._zero, self._zero)
        slots = torch.arange(turn.first, stop, device=self._device)
        starts = torch.arange(0, count + 1, count, dtype=torch.int32, device=self._device)
        oldest = turn.oldest.to(self._device, torch.int32)
        return Step(turn, False, slots, slots.int(), torch.zeros_like(oldest), batch, starts, oldest)

    def _full(self, number: int) -> Tensor:
        return torch.full((1,), number, dtype=torch.int32, device=self._device)

    def _columns(self, tokens: int) -> Tensor:
        columns = -(-tokens // PAGE_TOKENS)
        if columns > self._table.shape[1]:
            wide = max(columns, 2 * self._table.shape[1], LEAST_COLUMNS)
            self._table = torch.arange(wide, dtype=torch.int32, device=self._device)[None]
        return self._table
