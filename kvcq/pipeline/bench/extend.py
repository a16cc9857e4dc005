"""Extend: a chunk of new tokens over the coded prefix, the windows and itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.windows import oldest_by_query
from kvcq.kernels.extend import extend
from kvcq.kernels.reference import reference_extend, reference_windows
from kvcq.pipeline.bench.candidate import Candidate, relative_error, trial
from kvcq.pipeline.bench.layers import Step, build_step, random_queries
from kvcq.pipeline.bench.result import Row
from kvcq.pipeline.bench.shapes import WINDOWS, Shape

# Products in 16 bits, as in BF16 flash attention.
LIMIT = 5e-3
# Queries at each end of a chunk that are compared; a float64 pass over all of them takes longer than all timings.
CHECKED = 128
# Arithmetic bounds it: what the cache of the chip holds does not matter.
LAYERS = 4


def extend_rows(shape: Shape, codecs: Sequence[str], repeats: int, bf16_us: float | None) -> Iterator[Row]:
    """Check and time each codec at one chunk length, inverse rotation included."""
    for codec in codecs:

        def prepare(codec: str = codec) -> Candidate:
            return candidate(build_step(codec, shape, LAYERS))

        yield trial("extend", shape, codec, "triton", prepare, repeats, bf16_us=bf16_us)


def candidate(step: Step) -> Candidate:
    """Return the kernel over the layers of a step whose caches hold everything before the chunk."""
    shape, requests = step.shape, step.requests
    tokens = shape.batch * shape.chunk
    queries = random_queries(step)
    size = (tokens, shape.heads, shape.d)
    pairs = [(step.random(*size), step.random(*size)) for _ in step.caches]
    starts = torch.arange(0, tokens + 1, shape.chunk, dtype=torch.int32, device=step.device)
    oldest = oldest_by_query(shape.context - shape.chunk, shape.chunk, WINDOWS).repeat(shape.batch)
    oldest = oldest.to(step.device, torch.int32)
    outs = [torch.empty_like(q) for q in queries]
    layers: list[Any] = list(zip(step.tables, step.caches, queries, pairs, outs, strict=True))

    def call(layer: int) -> None:
        tables, cache, q, rows, out = layers[layer]
        extend(tables, cache, requests, q, rows, starts=starts, oldest=oldest, scaling=step.scaling, out=out)

    def error() -> float:
        if not bool(outs[0].isfinite().all()):
            return math.inf
        parts = sorted({(0, min(CHECKED, shape.chunk)), (max(shape.chunk - CHECKED, 0), shape.chunk)})
        wanted = (expected(step, queries[0], pairs[0], oldest, *part) for part in parts)
        found = (outs[0][_rows(step, *part)] for part in parts)
        return relative_error(torch.cat(list(found)), torch.cat(list(wanted)))

    return Candidate([partial(call, layer) for layer in range(len(layers))], outs, error, LIMIT)


def expected(step: Step, q: Tensor, rows: tuple[Tensor, Tensor], oldest: Tensor, first: int, stop: int) -> Tensor:
    """Return the outputs of the queries first .. stop - 1 of each request's chunk in the first layer, float64.

    They are a chunk of their own once sinks and rings hold the exact rows of the queries before them.
    """
    shape, requests, cache = step.shape, step.requests, step.caches[0]
    start = shape.context - shape.chunk
    tiers = {name: getattr(cache, name).clone() for name in ("sink_k", "sink_v", "ring_k", "ring_v")}
    cache = replace(cache, **tiers)
    before, own = _rows(step, 0, first), _rows(step, first, stop)
    positions, owners = start + before % shape.chunk, before // shape.chunk
    earlier = replace(requests, lengths=torch.full_like(requests.lengths, start + first))
    reference_windows(cache, (rows[0][before], rows[1][before]), positions, owners, earlier)
    return reference_extend(
        step.tables[0],
        cache,
        replace(requests, lengths=torch.full_like(requests.lengths, start + stop)),
        q[own],
        (rows[0][own], rows[1][own]),
        starts=torch.arange(0, len(own) + 1, stop - first, dtype=torch.int32, device=step.device),
        oldest=oldest[own],
        scaling=step.scaling,
    )


def _rows(step: Step, first: int, stop: int) -> Tensor:
    """Return the rows of the queries first .. stop - 1 of every chunk."""
    begins = torch.arange(step.shape.batch, device=step.device) * step.shape.chunk
    return (begins[:, None] + torch.arange(first, stop, device=step.device)).flatten()
