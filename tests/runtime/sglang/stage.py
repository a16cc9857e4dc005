"""A scheduler of a few requests as SGLang lays them out, and a tiny model whose attention is the backend's."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from kvcq.kernels.arrays import LayerCache, Tables
from kvcq.models.attention import attention_hook
from kvcq.models.library import forward
from kvcq.runtime.layout import RING_SLACK
from kvcq.runtime.sglang.attend import Attention, Rule
from kvcq.runtime.sglang.backend import lengths_of
from kvcq.spec.plan import Windows

PAGE = 64


@dataclass
class Request:
    """A running request: its row, its tokens and how many of them are stored."""

    row: int
    tokens: torch.Tensor
    stored: int = 0
    pages: list[int] = field(default_factory=list)


class Stage:
    """Row 0 and page 0 are padding; pages are handed out in descending order, rows ascending."""

    def __init__(self, layers: dict[int, Tables], windows: Windows, *, rows=4, pages=16, context=256) -> None:
        self.tables, self.windows = layers, windows
        self.req_to_token = torch.zeros(rows + 1, context, dtype=torch.int32)
        self.exact_from = torch.zeros(rows + 1, dtype=torch.int32)
        self.caches = {number: self._cache(layer, rows + 1, pages) for number, layer in layers.items()}
        self._pages, self._rows = list(range(1, pages)), list(range(rows, 0, -1))

    def _cache(self, tables: Tables, rows: int, pages: int) -> LayerCache:
        def buffer(count: int, d: int) -> torch.Tensor:
            return torch.full((rows, tables.heads, count, d), torch.nan, dtype=tables.k.map.dtype)

        counts = (self.windows.sink, self.windows.recent + RING_SLACK)
        tiers = (buffer(count, d) for count in counts for d in (tables.k.d, tables.v.d))
        block = torch.full((pages, tables.heads, tables.block_bytes), 0xFF, dtype=torch.uint8)
        return LayerCache(block, *tiers, windows=self.windows)

    def admit(self, tokens: torch.Tensor, donor: Request | None = None, shared: int = 0) -> Request:
        """Take a row; the first `shared` tokens, whole pages, are read from the donor's pages, its sinks copied."""
        request = Request(self._rows.pop(), tokens, shared)
        self.exact_from[request.row] = shared
        if donor is not None:
            request.pages = donor.pages[: shared // PAGE]
            self.req_to_token[request.row, :shared] = self.req_to_token[donor.row, :shared]
            for cache in self.caches.values():
                for sinks in (cache.sink_k, cache.sink_v):
                    sinks[request.row] = sinks[donor.row]
        return request

    def _grow(self, request: Request, count: int) -> torch.Tensor:
        positions = range(request.stored, request.stored + count)
        while len(request.pages) * PAGE < request.stored + count:
            request.pages.append(self._pages.pop())
        slots = torch.tensor([PAGE * request.pages[p // PAGE] + p % PAGE for p in positions])
        self.req_to_token[request.row, positions.start : positions.stop] = slots.int()
        request.stored += count
        return slots

    def extend(self, parts: list[tuple[Request, int]], padding: int = 0) -> SimpleNamespace:
        """The next `count` tokens of each request; `padding` tokens behind them all."""
        firsts = [request.stored for request, _ in parts]
        slots = [self._grow(request, count) for request, count in parts]
        pairs = list(zip(parts, firsts, strict=True))
        ids = [request.tokens[first : first + count] for (request, count), first in pairs]
        places = [torch.arange(first, first + count) for (_, count), first in pairs]
        blank = torch.zeros(padding, dtype=torch.long)
        return SimpleNamespace(
            mode="extend",
            req_pool_indices=torch.tensor([request.row for request, _ in parts]),
            seq_lens=torch.tensor([request.stored for request, _ in parts]),
            extend_seq_lens=torch.tensor([count for _, count in parts], dtype=torch.int32),
            extend_prefix_lens_cpu=firsts,
            extend_seq_lens_cpu=[count for _, count in parts],
            extend_num_tokens=sum(count for _, count in parts),
            out_cache_loc=torch.cat([*slots, blank]),
            input_ids=torch.cat([*ids, blank]),
            positions=torch.cat([*places, blank]),
        )

    def decode(self, requests: list[Request], padding: int = 0) -> SimpleNamespace:
        """The next token of each request; padding rows as CUDA graphs have them: row 0, slot 0, length 1."""
        slots = [self._grow(request, 1) for request in requests]
        blank = [0] * padding
        return SimpleNamespace(
            mode="decode",
            req_pool_indices=torch.tensor([request.row for request in requests] + blank),
            seq_lens=torch.tensor([request.stored for request in requests] + [1] * padding),
            extend_seq_lens=None,
            out_cache_loc=torch.cat([*slots, torch.tensor(blank, dtype=torch.long)]),
            input_ids=torch.tensor([int(request.tokens[request.stored - 1]) for request in requests] + blank),
            positions=torch.tensor([request.stored - 1 for request in requests] + blank),
        )


@contextmanager
def served(model, attention: Attention):
    """A function from batches to logits ``[T, vocab]``: all tokens of a batch in one row, as SGLang forwards them."""
    mode = ["extend"]

    def attend(call):
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        rule = Rule(call.scaling, call.softcap, call.window, call.sinks)
        run = attention.decode if mode[0] == "decode" else attention.extend
        return run(call.layer, q, k, v, rule).transpose(0, 1)[None]

    def answer(batch):
        mode[0] = batch.mode
        if batch.mode == "decode":
            attention.begin_decode(batch)
        else:
            attention.begin_extend(batch, batch.extend_num_tokens, lengths_of(batch))
        return forward(model, batch.input_ids[None], positions=batch.positions)[0]

    with attention_hook(model, attend):
        yield answer
