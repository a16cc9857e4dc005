"""Packed rows of one request that kernels write and read; what they cannot express is left to torch, on the same rows.

A chunk is coded when it comes, and its exact rows reach sinks and ring once every layer has read the older ones there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.codecs.pair import HeadCodec
from kvcq.kernels.arrays import LayerCache, Tables
from kvcq.kernels.extend import extend
from kvcq.kernels.query import map_queries
from kvcq.kernels.windows import store_windows
from kvcq.kernels.write import write
from kvcq.runtime.hf.desk import Desk, Step
from kvcq.runtime.hf.reading import Reading
from kvcq.runtime.hf.rows import PackedRows, Pair, RequestRows, Shape
from kvcq.runtime.hf.turn import Turn
from kvcq.spec.plan import Windows

# Pages are held ahead in this proportion, so that growing copies a page about eight times however long a request is.
AHEAD = 8


class KernelRows(PackedRows):
    """The storage of `PackedRows`, exact rows in the dtype of the model, its pages with room ahead.

    Args:
        codec: The layer's codec.
        windows: Exact tokens at both ends.
        shape: Heads, dims and device.
        tables: The codec as the kernels take it.
        desk: What the layers of the cache share.
    """

    def __init__(self, codec: HeadCodec, windows: Windows, shape: Shape, tables: Tables, desk: Desk) -> None:
        super().__init__(codec, windows, replace(shape, dtype=tables.k.map.dtype))
        self.tables, self.desk = tables, desk
        self._clamped = self._clamped.reshape(1)
        self._room = self.pages
        self._stored: LayerCache | None = None
        self._late: tuple[Pair, Step] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RequestRows:
        """Copy what is stored, for another cache with a desk of its own."""
        twin = self.clone()
        twin.desk = copy.deepcopy(self.desk, memo)
        return twin

    @torch.no_grad()
    def take(self, keys: Tensor, values: Tensor, turn: Turn, *, causal: bool) -> Reading:
        """Store the rows of new tokens by kernels, unless their queries see by another rule than causality."""
        self._settle()
        if not causal:
            return super().take(keys, values, turn, causal=causal)
        self._grow(turn.stop)
        # The model may be on another device than the current one.
        with torch.cuda.device_of(keys):
            return self._write(keys, values, turn)

    def _write(self, keys: Tensor, values: Tensor, turn: Turn) -> Reading:
        step = self.desk.step(turn)
        k, v = (rows.transpose(0, 1).to(self.shape.dtype) for rows in (keys, values))
        rows = None if step.decode else (k.new_empty(k.shape), v.new_empty(v.shape))
        write(
            self.tables,
            self.stored(),
            k,
            v,
            slots=step.slots,
            positions=step.positions,
            requests=step.requests,
            batch=step.batch,
            rows=rows,
            windows=step.decode,
            clamped=self._clamped,
        )
        self.length = turn.stop
        self.held = max(self.held, self.lost(turn.stop))
        self._late = None if rows is None else (rows, step)
        return KernelReading(self, step, rows)

    def stored(self) -> LayerCache:
        """Return what is stored as the kernels take it."""
        if self._stored is None or self._stored.pages is not self._room:
            sink_k, sink_v, ring_k, ring_v = (rows[None] for rows in (*self.sinks, *self.ring))
            self._stored = LayerCache(self._room, sink_k, sink_v, ring_k, ring_v, self.windows)
        return self._stored

    def ahead_bytes(self) -> int:
        """Return the bytes of pages that are held for tokens to come."""
        return self._room.nbytes - self.pages.nbytes

    def exact(self, start: int, stop: int) -> Pair:
        """Read sink rows, or rows of the ring."""
        self._settle()
        return super().exact(start, stop)

    def crop(self, length: int) -> None:
        """Forget tokens and give back whole pages, those held ahead included."""
        self._settle()
        pages = self.pages.shape[0]
        super().crop(length)
        if self.pages.shape[0] < pages:
            self._room = self.pages

    def clone(self) -> KernelRows:
        """Return an independent copy for the same cache."""
        self._settle()
        twin = copy.copy(self)
        twin._own()
        return twin

    def close_turn(self) -> None:
        """Every layer has read: keep the exact rows of the latest chunk."""
        self._settle()

    def _settle(self) -> None:
        if self._late is not None:
            (rows, step), self._late = self._late, None
            with torch.cuda.device_of(rows[0]):
                store_windows(self.stored(), rows, step.positions, step.requests, step.batch)

    def _grow(self, tokens: int) -> None:
        pages, room = -(-tokens // PAGE_TOKENS), self._room.shape[0]
        if pages > room:
            ahead, most = room + room // AHEAD, self.desk.most
            if most is not None:
                ahead = min(ahead, -(-most // PAGE_TOKENS))
            larger = self._room.new_zeros(max(pages, ahead), *self._room.shape[1:])
            larger[: self.pages.shape[0]] = self.pages
            self._room = larger
        self.pages = self._room[: max(pages, self.pages.shape[0])]

    def _own(self) -> None:
        super()._own()
        self._room, self._stored, self._clamped = self.pages, None, self._clamped.clone()


class KernelReading(Reading):
    """Attention over the pages, the exact rows and, for a chunk, its own rows."""

    def __init__(self, rows: KernelRows, step: Step, own: Pair | None) -> None:
        self._rows, self._step, self._own = rows, step, own

    @torch.no_grad()
    def attend(
        self, query: Tensor, visible: Tensor | None, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend with float32 softmax weights; outputs in the dtype of the rows."""
        with torch.cuda.device_of(query):
            return self._attend(query, scaling, softcap, sinks)

    def _attend(self, query: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
        tables, step = self._rows.tables, self._step
        q = query.transpose(0, 1).to(tables.k.map.dtype)
        mapped = q.new_empty(q.shape)
        shifted = tables.k.offset is not None and (softcap is not None or sinks is not None)
        offset = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if shifted else None
        map_queries(tables, q, mapped, offset)
        out = q.new_empty(*q.shape[:2], tables.v.d)
        learned = None if sinks is None else sinks.float()
        stored = self._rows.stored()
        if self._own is None:
            self._rows.desk.decoder(tables, step, q.shape[1]).decode(
                tables,
                stored,
                step.batch,
                mapped,
                out,
                scaling=scaling,
                softcap=softcap,
                offset=offset,
                sinks=learned,
            )
        else:
            extend(
                tables,
                stored,
                step.batch,
                mapped,
                self._own,
                starts=step.starts,
                oldest=step.oldest,
                scaling=scaling,
                softcap=softcap,
                offset=offset,
                sinks=learned,
                out=out,
            )
        return out.transpose(0, 1)

    def close(self) -> None:
        """Keep the exact rows of the chunk."""
        self._rows.close_turn()
