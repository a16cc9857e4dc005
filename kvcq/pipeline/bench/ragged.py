"""One layer with requests of many lengths; what no kernel may read is not a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS, page_views
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.pipeline.bench.layers import RING_SLACK, SERVED, Step, random_pages, random_tables
from kvcq.pipeline.bench.shapes import WINDOWS, Shape
from kvcq.spec.plan import Windows

# Page table columns, and sink and ring buffers, that are nobody's.
SPARE = 2


@dataclass(frozen=True)
class Place:
    """Where and how large a layer is.

    Attributes:
        heads: KV heads.
        windows: S and W.
        slack: Rows of a ring beyond W.
        device: Where everything lies.
        dtype: Served dtype.
    """

    heads: int = 8
    windows: Windows = WINDOWS
    slack: int = RING_SLACK
    device: torch.device | str = "cuda"
    dtype: torch.dtype = SERVED


def ragged_step(
    codec: str,
    d: int,
    group: int,
    lengths: Sequence[int],
    place: Place,
    *,
    held: Sequence[int] | None = None,
    exact_from: Sequence[int] | None = None,
    fill: bool = True,
) -> Step:
    """Build one layer whose requests have these lengths, pages in random order.

    NaN are: pages, sink and ring rows of nobody; the scales behind the last token of a request; sink and ring rows that
    its length does not reach. With `fill` False everything is.

    Args:
        codec: Of `layers.CODECS`.
        d: Head dim.
        group: Query heads of a KV head.
        lengths: Tokens of each request; 0 is a padding row.
        place: Heads, windows, device.
        held: Lengths that sinks and rings are of, None: the same.
        exact_from: Position before which a request has no exact row, None: 0.
        fill: Whether tokens are stored.
    """
    shape = Shape(len(lengths), max(*lengths, 1), d, place.heads * group, place.heads)
    device = torch.device(place.device)
    tables = random_tables(codec, shape, device, place.dtype)
    since = [0] * len(lengths) if exact_from is None else list(exact_from)
    requests = ragged_requests(lengths, since, device)
    step = Step(shape, [tables], [empty_cache(tables, requests, lengths, place)], requests, d**-0.5)
    if fill:
        _fill_pages(step, lengths)
        _fill_windows(step, lengths if held is None else held, since)
    return step


def ragged_requests(lengths: Sequence[int], exact_from: Sequence[int], device: torch.device) -> Requests:
    """Return requests whose pages lie anywhere; columns behind them name the last page, which is nobody's."""
    counts = [pages_of(n) for n in lengths]
    order = torch.randperm(sum(counts))
    table = torch.full((len(lengths), max(counts) + SPARE), sum(counts))
    for row, own in zip(table, order.split(counts), strict=True):
        row[: len(own)] = own
    slots = torch.randperm(len(lengths) + SPARE)[: len(lengths)]
    parts = (table, slots, torch.tensor(lengths), torch.tensor(exact_from))
    return Requests(*(part.to(device, torch.int32) for part in parts))


def pages_of(tokens: int) -> int:
    """Return the pages of a request."""
    return -(-tokens // PAGE_TOKENS)


def empty_cache(tables: Tables, requests: Requests, lengths: Sequence[int], place: Place) -> LayerCache:
    """Return storage in which nothing is a number."""
    options: dict[str, Any] = {"device": requests.lengths.device}
    count = sum(map(pages_of, lengths)) + 1
    pages = torch.full((count, tables.heads, tables.block_bytes), 0xFF, dtype=torch.uint8, **options)

    def rows(n: int, d: int) -> Tensor:
        size = (requests.batch + SPARE, tables.heads, n, d)
        return torch.full(size, torch.nan, dtype=place.dtype, **options)

    sink, ring = place.windows.sink, place.windows.recent + place.slack
    d_k, d_v = tables.k.d, tables.v.d
    return LayerCache(pages, rows(sink, d_k), rows(sink, d_v), rows(ring, d_k), rows(ring, d_v), place.windows)


def _fill_pages(step: Step, lengths: Sequence[int]) -> None:
    tables, pages, d = step.tables[0], step.caches[0].pages, step.shape.d
    pages[:-1] = random_pages(pages.shape[0] - 1, step.shape, tables)
    _, _, words = page_views(pages, d, d, tables.words)
    for b, n in enumerate(lengths):
        if n % PAGE_TOKENS:
            words[int(step.requests.page_table[b, n // PAGE_TOKENS]), :, n % PAGE_TOKENS :] = torch.nan


def _fill_windows(step: Step, lengths: Sequence[int], exact_from: Sequence[int]) -> None:
    cache, heads, d = step.caches[0], step.shape.heads, step.shape.d
    for b, (n, since) in enumerate(zip(lengths, exact_from, strict=True)):
        slot, sink = int(step.requests.slots[b]), min(cache.windows.sink, n)
        recent = torch.arange(max(n - cache.ring, since, 0), n, device=step.device) % cache.ring
        for sinks, ring in ((cache.sink_k, cache.ring_k), (cache.sink_v, cache.ring_v)):
            sinks[slot, :, :sink] = step.random(heads, sink, d)
            ring[slot, :, recent] = step.random(heads, len(recent), d)
