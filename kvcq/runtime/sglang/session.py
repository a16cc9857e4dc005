"""What kernels are told of a batch of SGLang, computed on the device from what the batch holds there.

A request has a row of ``req_to_token``: the slot of each of its tokens, ``64 page + place``, pages never split. Its
sink and ring rows lie in the buffers of the same number. Row 0 and slot 0 belong to nobody; SGLang pads batches with
them, so a token whose slot is 0 is padding: it is not stored, sees nothing and nobody sees it::

    decode     one token a request, the newest of n: position n - 1; oldest exact position max(n - W, exact_from)
    extend     tokens first .. n - 1 of each request, one after another; of all of them max(first - W, exact_from)

The second is the ``served`` semantics of chunks: a prefix hit sets `exact_from` to its length (a cached boundary), a
request that goes on finds the last W rows of the chunk before in its ring (a carried boundary). Nothing here waits
for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.kernels.arrays import Requests
from kvcq.spec.plan import Windows

PAGE_BITS = PAGE_TOKENS.bit_length() - 1


class Batch(Protocol):
    """What of SGLang's ``ForwardBatch`` is read.

    Attributes:
        req_pool_indices: ``[B]``, row of each request.
        seq_lens: ``[B]``, tokens of each request, those of this forward included.
        out_cache_loc: ``[T]``, slot of each token of this forward; 0 is padding.
        extend_seq_lens: ``[B]``, how many of the tokens are new; None in decode.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    extend_seq_lens: Any


@dataclass(frozen=True)
class Step:
    """Arguments of kernels for one forward.

    Attributes:
        batch: The requests.
        slots: int64 ``[T]``, place of each token in the pages; -1 for padding.
        positions: int32 ``[T]``.
        requests: int32 ``[T]``, row of each token in `batch`.
    """

    batch: Requests
    slots: Tensor
    positions: Tensor
    requests: Tensor

    @property
    def tokens(self) -> int:
        """Tokens T, padding included."""
        return self.slots.shape[0]


@dataclass(frozen=True)
class ExtendStep(Step):
    """Arguments of an extend.

    Attributes:
        starts: int32 ``[B + 1]``, where the tokens of each request begin.
        oldest: int32 ``[T]``, oldest position behind the sinks that a query reads exactly.
    """

    starts: Tensor
    oldest: Tensor

    def narrow(self, tokens: int) -> ExtendStep:
        """Return the step without the padding behind its first `tokens` tokens.

        Raises:
            ValueError: the step has fewer tokens.
        """
        if tokens == self.tokens:
            return self
        if tokens > self.tokens:
            raise ValueError(f"{tokens} tokens in a forward that was prepared for {self.tokens}")
        return replace(
            self,
            slots=self.slots[:tokens],
            positions=self.positions[:tokens],
            requests=self.requests[:tokens],
            oldest=self.oldest[:tokens],
        )


def page_view(req_to_token: Tensor) -> Tensor:
    """Return the slots of tokens 0, 64, 128 ... of every row, ``[rows, columns]``, a view: their pages times 64."""
    return req_to_token[:, ::PAGE_TOKENS]


def extend_step(batch: Batch, req_to_token: Tensor, exact_from: Tensor, windows: Windows) -> ExtendStep:
    """Return the arguments of an extend.

    Args:
        batch: The forward; the tokens of its requests lie one after another, padding behind them.
        req_to_token: int32 ``[rows, context]``.
        exact_from: int32 ``[rows]``, before this position a request has no exact row, sinks apart.
        windows: S and W.
    """
    rows, device = batch.req_pool_indices.long(), req_to_token.device
    table = page_view(req_to_token).index_select(0, rows) >> PAGE_BITS
    lengths, counts = batch.seq_lens.int(), batch.extend_seq_lens.int()
    starts = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    since = exact_from.index_select(0, rows)
    # A token belongs to the request whose end is the first behind it: those without new tokens are passed over.
    order = torch.arange(batch.out_cache_loc.shape[0], dtype=torch.int32, device=device)
    owner = torch.bucketize(order, starts[1:], out_int32=True, right=True)
    padding = owner >= counts.shape[0]
    requests = owner.clamp(max=counts.shape[0] - 1)
    first = lengths - counts
    positions = (first - starts[:-1]).index_select(0, requests) + order
    slots = batch.out_cache_loc.long()
    slots = torch.where((slots == 0) | padding, -1, slots)
    oldest = torch.maximum(first - windows.recent, since).index_select(0, requests)
    return ExtendStep(
        Requests(table, rows.int(), lengths, since),
        slots,
        torch.where(padding, 0, positions),
        requests,
        starts,
        oldest,
    )


class Board:
    """The arguments of decode steps, always at the same addresses, so that CUDA graphs can read them.

    Args:
        rows: Most requests of a step.
        req_to_token: int32 ``[rows, context]``, SGLang's.
        exact_from: int32 ``[rows]``, see `extend_step`.
    """

    def __init__(self, rows: int, req_to_token: Tensor, exact_from: Tensor) -> None:
        device = req_to_token.device
        self._pages, self._since = page_view(req_to_token), exact_from
        self._table = torch.zeros(rows, self._pages.shape[1], dtype=torch.int32, device=device)
        parts = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4))
        self._slots, self._lengths, self._exact, self._positions = parts
        self._requests = torch.arange(rows, dtype=torch.int32, device=device)
        self._places = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def rows(self) -> int:
        """Most requests of a step."""
        return self._places.shape[0]

    def step(self, size: int) -> Step:
        """Return the views that `fill` writes for a batch of `size`."""
        batch = Requests(self._table[:size], self._slots[:size], self._lengths[:size], self._exact[:size])
        return Step(batch, self._places[:size], self._positions[:size], self._requests[:size])

    def fill(self, batch: Batch) -> Step:
        """Write the arguments of a decode step; every size is known from shapes, so a graph can record it.

        Raises:
            ValueError: more requests than there is room for, or not one token for each of them.
        """
        rows, size = batch.req_pool_indices, batch.req_pool_indices.shape[0]
        if size > self.rows or batch.out_cache_loc.shape[0] != size or batch.seq_lens.shape[0] != size:
            raise ValueError(
                f"a decode step of {size} requests, {batch.seq_lens.shape[0]} lengths and "
                f"{batch.out_cache_loc.shape[0]} tokens: room is for {self.rows} requests of one token"
            )
        step = self.step(size)
        torch.index_select(self._pages, 0, rows, out=step.batch.page_table)
        step.batch.page_table.bitwise_right_shift_(PAGE_BITS)
        torch.index_select(self._since, 0, rows, out=step.batch.exact_from)
        step.batch.slots.copy_(rows)
        step.slots.copy_(batch.out_cache_loc)
        padding = step.slots == 0
        step.slots.masked_fill_(padding, -1)
        step.batch.lengths.copy_(batch.seq_lens)
        step.batch.lengths.masked_fill_(padding, 0)
        torch.sub(step.batch.lengths, 1, out=step.positions)
        step.positions.clamp_(min=0)
        return step
