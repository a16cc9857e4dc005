"""Attention of all layers over pages and exact rows, one forward at a time; knows batches, not SGLang's classes.

::

    extend    write codes, keep frame rows aside - map queries, attend - store the windows' rows
              where a prompt begins, a library may attend instead, to queries that are not mapped
    decode    map queries - write codes and the windows' rows - attend

In an extend the windows are stored last: its queries still read what the rings held before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcq.kernels.arrays import LayerCache, Tables
from kvcq.kernels.attention import Decoder
from kvcq.kernels.causal import LEAST, attend_causal
from kvcq.kernels.extend import extend
from kvcq.kernels.plan import Partials
from kvcq.kernels.query import map_queries
from kvcq.kernels.windows import store_windows
from kvcq.kernels.write import write, writers
from kvcq.runtime.sglang.begins import Begins, find_begins
from kvcq.runtime.sglang.session import Batch, Board, ExtendStep, Step, extend_step
from kvcq.spec.plan import Windows


@dataclass(frozen=True)
class Rule:
    """How a layer weighs keys.

    Attributes:
        scaling: Factor on products.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        window: A query at i sees only ``j > i - window``.
        sinks: Learned sink logits ``[Hq]``.
    """

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Tell whether products are only scaled."""
        return self.softcap is None and self.window is None and self.sinks is None

    def shifted(self, tables: Tables) -> bool:
        """Tell whether the part of products that centred keys lack is read."""
        return tables.k.offset is not None and (self.softcap is not None or self.sinks is not None)


class Place(NamedTuple):
    """Which layers share a work list, in steps of up to `size` requests."""

    size: int
    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    words: int
    vq: bool
    window: int | None


class Attention:
    """Attention of the layers of one rank.

    Args:
        tables: Constants by layer id.
        caches: What is stored, by layer id.
        req_to_token: int32 ``[rows, context]``: slots of the tokens of each request.
        exact_from: int32 ``[rows]``: before this position a request has no exact row, sinks apart.
        q_heads: Query heads of every layer.
        max_batch: Most requests of a decode step.
        library: Layers whose prompts that begin a library attends to, see `prepare_layers`.

    Attributes:
        clamped: int64 ``[1]``, values that float16 could not hold so far.

    Raises:
        UnsupportedError: no kernel for a layer on this device.
    """

    def __init__(
        self,
        tables: Mapping[int, Tables],
        caches: Mapping[int, LayerCache],
        req_to_token: Tensor,
        exact_from: Tensor,
        *,
        q_heads: int,
        max_batch: int,
        library: frozenset[int] = frozenset(),
    ) -> None:
        self._tables, self._caches, self._q_heads = dict(tables), dict(caches), q_heads
        self._req_to_token, self._exact_from = req_to_token, exact_from
        self.windows: Windows = next(iter(self._caches.values())).windows
        self.clamped = torch.zeros(1, dtype=torch.int64, device=req_to_token.device)
        self._step: Step | None = None
        self._padded = True
        self._begins: Begins | None = None
        self._library = library
        self.reserve(max_batch)

    def reserve(self, max_batch: int) -> None:
        """Hold everything that decode steps of up to so many requests need; before the first graph is captured.

        Raises:
            UnsupportedError: no kernel for a layer on this device.
        """
        device, layers = self._req_to_token.device, list(self._tables.values())
        self._max_batch = max_batch
        self._board = Board(max_batch, self._req_to_token, self._exact_from)
        self._decoders: dict[Place, Decoder] = {}
        # Of heads and channels, the largest workspace: decoders run one after another.
        self._partials: dict[tuple[int, int], Partials] = {}
        self._planned: set[Place] = set()
        rows = max_batch * self._q_heads
        widest = max(layer.k.d for layer in layers)
        self._mapped = torch.zeros(rows * widest, dtype=layers[0].k.map.dtype, device=device)
        self._shift = torch.zeros(rows, dtype=torch.float32, device=device)
        # The largest first, whose workspace the others share.
        for size in sorted({size_for(batch, max_batch) for batch in range(1, max_batch + 1)}, reverse=True):
            for layer in layers:
                self._decoder(self._place(layer, size, None), layer)

    @property
    def max_batch(self) -> int:
        """Most requests of a decode step."""
        return self._max_batch

    @property
    def kernels(self) -> dict[int, str]:
        """What attends in large batches, by layer id, and what else attends or writes."""
        found = {}
        for number, layer in self._tables.items():
            backend = self._decoder(self._place(layer, self._max_batch, None), layer).choice.backend
            writer = writers(layer, layer.k.map.dtype, self._req_to_token.device)
            parts = [backend, *([] if writer == backend else [f"written by {writer}"])]
            found[number] = ", ".join(parts + ["long prompts by cuDNN"] * (number in self._library))
        return found

    def begin_decode(self, batch: Batch) -> None:
        """Prepare a step of one token a request; recorded by a graph, it is done anew in every replay."""
        self._planned.clear()
        self._step = self._board.fill(batch)

    def begin_extend(
        self, batch: Batch, tokens: int | None = None, lengths: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        """Prepare a prefill, or a chunk of it, of every request of a batch.

        Args:
            batch: The forward.
            tokens: Its tokens without padding, None if unknown.
            lengths: Of each request the tokens before and the new ones, None if unknown on the host.
        """
        step = extend_step(batch, self._req_to_token, self._exact_from, self.windows)
        self._step, self._begins = step, None
        self._padded = tokens is None or tokens != step.tokens
        if lengths is not None and self._library:
            self._begins = find_begins(step, *lengths, LEAST)

    def begin_nothing(self) -> None:
        """Forget the latest step: what follows attends to nothing."""
        self._step = None

    def decode(self, number: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule, *, save: bool = True) -> Tensor:
        """Attend with the newest token of every request.

        Args:
            number: Layer id.
            q: Post-RoPE queries ``[B, Hq, d_k]``.
            k: Keys ``[B, H, d_k]``, post-RoPE.
            v: Values ``[B, H, d_v]``.
            rule: How the layer weighs keys.
            save: Whether to store the tokens; False: they are stored already.

        Returns:
            ``[B, Hq, d_v]``; zeros for padding.

        Raises:
            ValueError: no decode step of this size has begun, or tensors that do not fit.
        """
        tables, cache, step = self._tables[number], self._caches[number], self._step
        if step is None or isinstance(step, ExtendStep) or step.tokens != q.shape[0]:
            raise ValueError(f"layer {number} decodes {q.shape[0]} tokens, prepared was {_told(step)}")
        served, size = tables.k.map.dtype, q.shape[0] * q.shape[1]
        mapped = self._mapped[: size * q.shape[2]].view(q.shape)
        offset = self._shift[:size].view(q.shape[:2]) if rule.shifted(tables) else None
        map_queries(tables, q.to(served), mapped, offset)
        if save:
            self._write(tables, cache, k, v, step, step.slots, None)
        out = torch.empty(*q.shape[:2], tables.v.d, dtype=served, device=q.device)
        place = self._place(tables, size_for(q.shape[0], self._max_batch), rule.window)
        decoder = self._decoder(place, tables)
        if place not in self._planned:
            decoder.plan(step.batch, rule.window)
            self._planned.add(place)
        decoder.decode(
            tables,
            cache,
            step.batch,
            mapped,
            out,
            scaling=rule.scaling,
            softcap=rule.softcap,
            offset=offset,
            sinks=None if rule.sinks is None else rule.sinks.float(),
        )
        return out

    def extend(self, number: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule, *, save: bool = True) -> Tensor:
        """Attend causally with the new tokens of every request; arguments as in `decode`, ``[T, ...]``.

        Returns:
            ``[T, Hq, d_v]``; zeros for padding.

        Raises:
            ValueError: no extend of so many tokens has begun, or tensors that do not fit.
        """
        tables, cache, step = self._tables[number], self._caches[number], self._step
        if not isinstance(step, ExtendStep):
            raise ValueError(f"layer {number} extends by {q.shape[0]} tokens, prepared was {_told(step)}")
        step = step.narrow(q.shape[0])
        served = tables.k.map.dtype
        rows = (
            torch.empty(k.shape, dtype=served, device=q.device),
            torch.empty(v.shape, dtype=served, device=q.device),
        )
        # Frame rows are wanted either way; a negative slot stores nothing.
        slots = step.slots if save else torch.full_like(step.slots, -1)
        self._write(tables, cache, k, v, step, slots, rows)
        new = torch.zeros if self._padded else torch.empty
        out = new((*q.shape[:2], tables.v.d), dtype=served, device=q.device)
        begins = self._begins if rule.plain and number in self._library else None
        if begins is None:
            self._attend(tables, cache, step, q.to(served), rows, rule, out)
        else:
            attend_causal(q.to(served), k.to(served), v.to(served), begins.spans, rule.scaling, out)
            if begins.rest is not None:
                some, some_k, some_v = (x.index_select(0, begins.tokens) for x in (q.to(served), *rows))
                answer = out.new_empty((some.shape[0], *out.shape[1:]))
                self._attend(tables, cache, begins.rest, some, (some_k, some_v), rule, answer)
                out.index_copy_(0, begins.tokens, answer)
        if save:
            store_windows(cache, rows, step.positions, step.requests, step.batch, step.slots)
        return out

    def _attend(
        self,
        tables: Tables,
        cache: LayerCache,
        step: ExtendStep,
        q: Tensor,
        rows: tuple[Tensor, Tensor],
        rule: Rule,
        out: Tensor,
    ) -> None:
        mapped = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        offset = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if rule.shifted(tables) else None
        map_queries(tables, q, mapped, offset)
        extend(
            tables,
            cache,
            step.batch,
            mapped,
            rows,
            starts=step.starts,
            oldest=step.oldest,
            scaling=rule.scaling,
            softcap=rule.softcap,
            offset=offset,
            sinks=None if rule.sinks is None else rule.sinks.float(),
            window=rule.window,
            out=out,
        )

    def _write(
        self,
        tables: Tables,
        cache: LayerCache,
        k: Tensor,
        v: Tensor,
        step: Step,
        slots: Tensor,
        rows: tuple[Tensor, Tensor] | None,
    ) -> None:
        served = tables.k.map.dtype
        write(
            tables,
            cache,
            k.to(served),
            v.to(served),
            slots=slots,
            positions=step.positions,
            requests=step.requests,
            batch=step.batch,
            rows=rows,
            windows=rows is None,
            clamped=self.clamped,
        )

    def _place(self, tables: Tables, size: int, window: int | None) -> Place:
        return Place(size, self._q_heads, tables.heads, tables.k.d, tables.v.d, tables.words, tables.vq, window)

    def _decoder(self, place: Place, tables: Tables) -> Decoder:
        if place not in self._decoders:
            device, context = self._req_to_token.device, self._req_to_token.shape[1]
            heads = (place.q_heads, tables.v.d)
            held = self._partials.get(heads)
            sizes = (place.q_heads, place.size, context, device)
            made = Decoder.reserve(tables, self.windows, *sizes, share=held)
            if held is None or made.partials.o.shape[0] > held.o.shape[0]:
                self._partials[heads] = made.partials
            self._decoders[place] = made
        return self._decoders[place]


def size_for(batch: int, most: int) -> int:
    """Return the size that a work list for `batch` requests is cut for: a power of two, at most `most`."""
    return min(1 << (batch - 1).bit_length(), most)


def _told(step: Step | None) -> str:
    if step is None:
        return "nothing"
    return f"{'an extend' if isinstance(step, ExtendStep) else 'a decode step'} of {step.tokens}"
