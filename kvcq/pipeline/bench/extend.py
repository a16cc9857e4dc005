"""Extend: a chunk of new tokens over the coded prefix, the windows and itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kvcq.codecs.windows import oldest_by_query
from kvcq.kernels.extend import extend
from kvcq.kernels.reference import reference_extend
from kvcq.pipeline.bench.candidate import Candidate, relative_error, trial
from kvcq.pipeline.bench.layers import Step, build_step, random_queries
from kvcq.pipeline.bench.result import Row
from kvcq.pipeline.bench.shapes import WINDOWS, Shape

# Products in 16 bits, as in BF16 flash attention.
LIMIT = 5e-3
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
    pairs = [tuple(step.random(tokens, shape.heads, shape.d) for _ in range(2)) for _ in step.caches]
    starts = torch.arange(0, tokens + 1, shape.chunk, dtype=torch.int32, device=step.device)
    oldest = oldest_by_query(shape.context - shape.chunk, shape.chunk, WINDOWS).repeat(shape.batch)
    common: dict[str, Any] = {"starts": starts, "oldest": oldest.to(step.device, torch.int32), "scaling": step.scaling}
    outs = [torch.empty_like(q) for q in queries]
    layers: list[Any] = list(zip(step.tables, step.caches, queries, pairs, outs, strict=True))

    def call(layer: int) -> None:
        tables, cache, q, rows, out = layers[layer]
        extend(tables, cache, requests, q, rows, out=out, **common)

    def error() -> float:
        tables, cache, q, rows, out = layers[0]
        return relative_error(out, reference_extend(tables, cache, requests, q, rows, **common))

    return Candidate([partial(call, layer) for layer in range(len(layers))], outs, error, LIMIT)
