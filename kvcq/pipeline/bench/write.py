"""Write: the tokens of one decode step into 36 layers, or a whole chunk, by every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.kernels.arrays import Tables
from kvcq.kernels.cuda.compile import missing
from kvcq.kernels.reference import decode_rows, reference_write
from kvcq.kernels.windows import store_windows
from kvcq.kernels.write import write
from kvcq.pipeline.bench.candidate import Candidate, relative_error, trial
from kvcq.pipeline.bench.layers import Step, build_step, token_slots
from kvcq.pipeline.bench.result import Row
from kvcq.pipeline.bench.shapes import STEP_LAYERS, Shape

Backend = Literal["triton", "cuda"]

# A row may round to another neighbour than in float64, and a code at a border flips.
LIMIT = 2e-2
CHUNK_LAYERS = 8


def write_rows(op: str, shape: Shape, codecs: Sequence[str], repeats: int, bf16_us: float | None) -> Iterator[Row]:
    """Check and time each codec: ``append`` writes one token a request, ``prefill`` all of them."""
    backends: tuple[Backend, ...] = ("triton",) if missing() else ("cuda", "triton")
    for codec, backend in product(codecs, backends):

        def prepare(codec: str = codec, backend: Backend = backend) -> Candidate:
            layers = STEP_LAYERS if op == "append" else CHUNK_LAYERS
            return candidate(build_step(codec, shape, layers, fill=False), chunk=op == "prefill", backend=backend)

        yield trial(op, shape, codec, backend, prepare, repeats, bf16_us=bf16_us)


def candidate(step: Step, *, chunk: bool, backend: Backend = "triton") -> Candidate:
    """Return the kernel over the layers of a step.

    Args:
        step: Its requests' lengths count the tokens that are written.
        chunk: Write all tokens of the requests, hand out their exact rows and store the windows from those; otherwise
            the last one of each, windows included.
        backend: Whose kernel.
    """
    shape, requests = step.shape, step.requests
    first = 0 if chunk else shape.context - 1
    count = shape.context - first
    tokens = shape.batch * count
    size = (tokens, shape.heads, shape.d)
    pairs = [(step.random(*size), step.random(*size)) for _ in step.caches]
    rows = (step.random(*size), step.random(*size))
    slots = token_slots(requests, first, shape.context)
    options: dict[str, Any] = {"dtype": torch.int32, "device": step.device}
    positions = torch.arange(first, shape.context, **options).repeat(shape.batch)
    owners = torch.arange(shape.batch, **options).repeat_interleave(count)
    clamped = torch.zeros(1, dtype=torch.int64, device=step.device)
    where: dict[str, Any] = {"slots": slots, "positions": positions, "requests": owners, "batch": requests}

    def call(layer: int) -> None:
        tables, cache, (k, v) = step.tables[layer], step.caches[layer], pairs[layer]
        how: dict[str, Any] = {"rows": rows if chunk else None, "windows": not chunk, "backend": backend}
        write(tables, cache, k, v, **where, **how, clamped=clamped)
        if chunk:
            store_windows(cache, rows, positions, owners, requests)

    def error() -> float:
        tables, cache = step.tables[0], step.caches[0]
        wanted = replace(cache, pages=torch.full_like(cache.pages, 0xFF))
        reference_write(tables, wanted, *pairs[0], **where, windows=False)
        written = (read_slots(tables, one.pages, slots) for one in (cache, wanted))
        return max(relative_error(found, right) for found, right in zip(*written, strict=True))

    calls = [partial(call, layer) for layer in range(len(step.caches))]
    return Candidate(calls, [step.caches[0].pages], error, LIMIT)


def read_slots(tables: Tables, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decoded rows, float64 ``[H, tokens, d]``, of these slots."""
    own, place = torch.unique(slots // PAGE_TOKENS, return_inverse=True)
    at = place * PAGE_TOKENS + slots % PAGE_TOKENS
    k, v = decode_rows(tables, pages[own])
    return k[:, at], v[:, at]
