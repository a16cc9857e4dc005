"""Checks of decode and extend over ragged batches, against float64 over the dequantized cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvcq.codecs.windows import oldest_by_query
from kvcq.errors import UnsupportedError
from kvcq.kernels.attention import Decoder
from kvcq.kernels.extend import extend
from kvcq.kernels.reference import reference_decode, reference_extend
from kvcq.pipeline.bench.check_cases import DecodeCase, ExtendCase
from kvcq.pipeline.bench.decode import LIMIT as DECODE_LIMIT
from kvcq.pipeline.bench.extend import LIMIT as EXTEND_LIMIT
from kvcq.pipeline.bench.ragged import Place, ragged_step
from kvcq.pipeline.bench.verdict import Verdict, after_replay, rows_verdict

# A kernel and its check, or why it cannot run here.
Attempt = tuple[str, Callable[[], Verdict] | str]

# Every so many requests one has a prefix that came without exact rows, so that half of W is read coded.
HIT = 4


def decode_attempts(case: DecodeCase, place: Place) -> Iterator[Attempt]:
    """Yield the kernels that decode a case; outputs and workspaces hold NaN before."""
    half = place.windows.recent // 2
    since = [n - half if i % HIT == HIT - 1 and n > 2 * half else 0 for i, n in enumerate(case.lengths)]
    step = ragged_step(case.codec, case.d, case.group, case.lengths, place, exact_from=since)
    tables, shape = step.tables[0], step.shape
    q = step.random(shape.batch, shape.q_heads, case.d)
    shifted = tables.k.offset is not None and (case.learned or case.softcap is not None)
    options: dict[str, Any] = {
        "scaling": step.scaling,
        "softcap": case.softcap,
        "offset": torch.randn(q.shape[:2], device=step.device) if shifted else None,
        "sinks": torch.randn(shape.q_heads, device=step.device) if case.learned else None,
    }
    arrays = (tables, step.caches[0], step.requests, q)
    wanted = reference_decode(*arrays, window=case.window, **options)

    def attempt(decoder: Decoder) -> Verdict:
        out, work = torch.empty_like(q), decoder.partials

        def call() -> None:
            decoder.plan(step.requests, case.window)
            decoder.decode(*arrays, out, **options)

        judge = partial(rows_verdict, out, wanted, DECODE_LIMIT)
        return after_replay(call, [out], judge, before=(work.o, work.ml, work.mixed, work.mass))

    for backend in case.backends:
        sizes = (shape.q_heads, shape.batch, shape.context)
        try:
            decoder = Decoder.reserve(tables, place.windows, *sizes, step.device, backend=backend)
        except UnsupportedError as refusal:
            # Triton has them all.
            if backend == "triton":
                raise
            yield backend, str(refusal)
            continue
        yield backend, partial(attempt, decoder)


def extend_attempts(case: ExtendCase, place: Place) -> Iterator[Attempt]:
    """Yield the kernel with a case of its own: what of the chunks is in the pages, and nothing of them in the rings."""
    firsts, lengths = [first for first, _ in case.chunks], [first + count for first, count in case.chunks]
    step = ragged_step(case.codec, case.d, case.group, lengths, place, held=firsts)
    counts = torch.tensor([0, *(count for _, count in case.chunks)])
    tokens, heads = int(counts.sum()), step.shape.heads
    q = step.random(tokens, step.shape.q_heads, case.d)
    oldest = torch.cat([oldest_by_query(*chunk, place.windows) for chunk in case.chunks])
    options: dict[str, Any] = {
        "starts": counts.cumsum(0).to(step.device, torch.int32),
        "oldest": oldest.to(step.device, torch.int32),
        "scaling": step.scaling,
    }
    rows = step.random(tokens, heads, case.d), step.random(tokens, heads, case.d)
    arrays = (step.tables[0], step.caches[0], step.requests, q, rows)
    out = torch.empty_like(q)

    def attempt() -> Verdict:
        wanted = reference_extend(*arrays, **options)
        judge = partial(rows_verdict, out, wanted, EXTEND_LIMIT)
        return after_replay(partial(extend, *arrays, out=out, **options), [out], judge)

    yield "triton", attempt
