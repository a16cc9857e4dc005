"""Decode: one token a request over pages and windows, by every backend; and what else a step costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.attention import Decoder
from kvcq.kernels.query import map_queries
from kvcq.kernels.reference import reference_decode, reference_query
from kvcq.kernels.select import BACKENDS, Backend
from kvcq.pipeline.bench.candidate import Candidate, relative_error, trial
from kvcq.pipeline.bench.layers import Step, build_step, random_queries, words_of
from kvcq.pipeline.bench.result import Row
from kvcq.pipeline.bench.shapes import Shape, layers_for

LIMIT = 2e-3
# One rounding to the served dtype.
QUERY_LIMIT = 2e-3


def decode_rows(shape: Shape, codecs: Sequence[str], repeats: int, bf16_us: float | None) -> Iterator[Row]:
    """Check and time each codec and backend, with the inverse rotation of the values and without it."""
    for codec in codecs:
        count = shape.read_bytes(words_of(codec))
        step = build_step(codec, shape, layers_for(count))
        queries = random_queries(step)
        for rotate in (True, False):
            wanted = expected(step, queries[0], rotate)
            for backend in BACKENDS:
                prepare = partial(candidate, step, queries, backend, rotate, wanted)
                name = backend if rotate else f"{backend}, folded"
                yield trial("decode", shape, codec, name, prepare, repeats, bytes_read=count, bf16_us=bf16_us)
        yield trial("step", shape, codec, "queries into the frame", partial(query_candidate, step, queries), repeats)
        yield trial("step", shape, codec, "plan, once a step", partial(plan_candidate, step), repeats)


def choice_of(codec: str, shape: Shape) -> str:
    """Say what serving would take, and why."""
    step = build_step(codec, replace(shape, batch=1, context=1), 1)
    try:
        choice = _reserve(step, shape, None).choice
    except UnsupportedError as refusal:
        return f"torch ({refusal})"
    return f"{choice.backend} ({choice.reason})"


def expected(step: Step, q: Tensor, rotate: bool) -> Tensor:
    """Return the output of the first layer for the first and the last request, float64."""
    arrays = (step.tables[0], step.caches[0], step.requests, q)
    return reference_decode(*arrays, scaling=step.scaling, rotate=rotate, rows=_checked(step))


def candidate(step: Step, queries: list[Tensor], backend: Backend, rotate: bool, wanted: Tensor) -> Candidate:
    """Return a backend over the layers of a step, partial results and merge.

    Raises:
        UnsupportedError: it does not have the codec or the shape.
    """
    decoder = _reserve(step, step.shape, backend)
    decoder.plan(step.requests)
    outs = [torch.empty_like(q) for q in queries]

    def call(layer: int) -> None:
        arrays = (step.tables[layer], step.caches[layer], step.requests, queries[layer], outs[layer])
        decoder.decode(*arrays, scaling=step.scaling, rotate=rotate)

    def error() -> float:
        return relative_error(outs[0][_checked(step)], wanted)

    return Candidate([partial(call, layer) for layer in range(len(queries))], outs, error, LIMIT)


def query_candidate(step: Step, queries: list[Tensor]) -> Candidate:
    """Return the map of the queries of each layer."""
    outs = [torch.empty_like(q) for q in queries]
    calls = [partial(map_queries, *layer, None) for layer in zip(step.tables, queries, outs, strict=True)]
    wanted, _ = reference_query(step.tables[0], queries[0])
    return Candidate(calls, outs, lambda: relative_error(outs[0], wanted), QUERY_LIMIT)


def plan_candidate(step: Step) -> Candidate:
    """Return the work list of a step. Nothing compares it here: every decode row depends on what is in it."""
    decoder = _reserve(step, step.shape, None)
    return Candidate([partial(decoder.plan, step.requests)] * 20, [], None, 0.0)


def _reserve(step: Step, shape: Shape, backend: Backend | None) -> Decoder:
    sizes = (shape.q_heads, shape.batch, shape.context)
    return Decoder.reserve(step.tables[0], step.caches[0].windows, *sizes, step.device, backend=backend)


def _checked(step: Step) -> list[int]:
    return sorted({0, step.shape.batch - 1})
