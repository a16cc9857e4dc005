"""Extend: a chunk of new tokens over the coded prefix, the windows and itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.windows import oldest_by_query
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.kernels.extend import extend
from kvcq.kernels.reference import reference_extend
from kvcq.pipeline.bench.candidate import Candidate, relative_error, trial
from kvcq.pipeline.bench.layers import SERVED, build_step, random_queries
from kvcq.pipeline.bench.result import Row
from kvcq.pipeline.bench.shapes import WINDOWS, Shape

# Products in 16 bits, as in BF16 flash attention.
LIMIT = 5e-3
# Arithmetic bounds it: what the cache of the chip holds does not matter.
LAYERS = 4

Rows = tuple[Tensor, Tensor]


def extend_rows(shape: Shape, codecs: Sequence[str], repeats: int, bf16_us: float | None) -> Iterator[Row]:
    """Check and time each codec at one chunk length, inverse rotation included."""
    for codec in codecs:
        yield trial("extend", shape, codec, "triton", partial(_prepare, shape, codec), repeats, bf16_us=bf16_us)


def _prepare(shape: Shape, codec: str) -> Candidate:
    step = build_step(codec, shape, LAYERS)
    tokens = shape.batch * shape.chunk
    queries = random_queries(shape, LAYERS)
    size = (tokens, shape.heads, shape.d)
    pairs = [(_random(size), _random(size)) for _ in range(LAYERS)]
    first = shape.context - shape.chunk
    starts = torch.arange(0, tokens + 1, shape.chunk, dtype=torch.int32, device="cuda")
    oldest = oldest_by_query(first, shape.chunk, WINDOWS).repeat(shape.batch).to("cuda", torch.int32)
    outs = [torch.empty_like(q) for q in queries]
    common: dict[str, Any] = {"starts": starts, "oldest": oldest, "scaling": step.scaling}
    layers = [(*layer, step.requests) for layer in zip(step.tables, step.caches, queries, pairs, outs, strict=True)]

    def call(tables: Tables, cache: LayerCache, q: Tensor, rows: Rows, out: Tensor, requests: Requests) -> None:
        extend(tables, cache, requests, q, rows, out=out, **common)

    def error() -> float:
        tables, cache, q, rows, out, requests = layers[0]
        return relative_error(out, reference_extend(tables, cache, requests, q, rows, **common))

    return Candidate([partial(call, *layer) for layer in layers], outs, error, LIMIT)


def _random(size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, dtype=SERVED, device="cuda")
