"""Launches that a CUDA graph replays write the bits of eager ones: one request, a few, as many as were reserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.kernels.extend import extend
from kvcq.kernels.merge import merge
from kvcq.kernels.plan import Partials, Plan
from kvcq.kernels.windows import store_windows
from kvcq.kernels.write import write
from kvcq.pipeline.bench.verdict import after_replay
from tests.kernels.build import SMALL, build_case
from tests.kernels.test_extend import build_chunks

pytestmark = pytest.mark.gpu

MOST = 40
BATCHES = (1, 3, MOST)
LENGTHS = [(n * 37) % 330 + 1 for n in range(MOST)]


def assert_replays_agree(call: Callable[[], object], outs: list[Tensor]) -> None:
    """Over NaN, so that what a replay leaves out shows."""
    assert after_replay(call, outs, lambda: (0.0, None)) == (0.0, None)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["int2", "vq", "groups"])
@pytest.mark.parametrize("chunk", [False, True])
def test_write(batch: int, kind: str, chunk: bool, device: torch.device, dtype: torch.dtype) -> None:
    lengths = LENGTHS[:batch]
    case = build_case(kind, lengths, d_k=64, dtype=dtype, device=device, fill=False)
    owners = torch.repeat_interleave(torch.arange(batch), torch.tensor(lengths)).to(device)
    at = torch.cat([torch.arange(n) for n in lengths]).to(device)
    # A decode step has the last token of each request.
    kept = torch.arange(len(at), device=device) if chunk else torch.tensor(lengths, device=device).cumsum(0) - 1
    owners, at, k, v = owners[kept], at[kept], torch.cat(case.k)[kept], torch.cat(case.v)[kept]
    slots = case.requests.page_table.long()[owners, at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
    cache, clamped = case.cache, torch.zeros(1, dtype=torch.int64, device=device)
    rows = (torch.empty_like(k), torch.empty_like(v)) if chunk else None
    where: dict[str, Any] = {"positions": at.int(), "requests": owners.int(), "batch": case.requests}
    backends: tuple[Literal["cuda", "triton"] | None, ...] = (None, "triton")
    for backend in backends:
        more: dict[str, Any] = {"rows": rows, "windows": rows is None, "clamped": clamped, "backend": backend}

        def call(more: dict[str, Any] = more) -> None:
            write(case.tables, cache, k, v, slots=slots, **where, **more)
            if rows is not None:
                store_windows(cache, rows, where["positions"], where["requests"], case.requests)

        outs = [cache.pages, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, *(rows or ())]
        assert_replays_agree(call, outs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["int2", "vq", "groups"])
def test_extend(batch: int, kind: str, device: torch.device, dtype: torch.dtype) -> None:
    chunks = [(first, (first * 7) % 70) for first in LENGTHS[:batch]]
    built = build_chunks(kind, chunks, dtype, device, d_k=64, group=4)
    out = torch.empty_like(built.q)
    options: dict[str, Any] = {"starts": built.starts, "oldest": built.oldest, "scaling": 0.1, "out": out}
    arrays = (built.tables, built.cache, built.requests, built.q, built.rows)
    assert_replays_agree(lambda: extend(*arrays, **options), [out])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_merge(batch: int, rotate: bool, learned: bool, device: torch.device, dtype: torch.dtype) -> None:
    # Enough query heads that the largest batch takes one launch, the others two.
    case = build_case("centred", LENGTHS[:batch], group=16, d_k=64, dtype=dtype, device=device, fill=False)
    q_heads = case.q.shape[1]
    plan = Plan.reserve(MOST, parts=80, exact_rows=16, windows=SMALL, device=device)
    plan.update(case.requests, SMALL)
    partial, draw = Partials.reserve(plan, q_heads, 64), torch.Generator().manual_seed(1)
    partial.o.copy_(torch.randn(partial.o.shape, generator=draw))
    partial.ml[..., 0] = (torch.randn(partial.ml.shape[:2], generator=draw) * 5).to(device)
    partial.ml[..., 1] = (torch.rand(partial.ml.shape[:2], generator=draw) * 60 + 1).to(device)
    sinks = torch.linspace(-3, 8, q_heads, device=device) if learned else None
    out = torch.empty(batch, q_heads, 64, dtype=dtype, device=device)
    more: dict[str, Any] = {"sinks": sinks, "offset": torch.zeros(batch, q_heads, device=device), "scaling": 0.3}
    more |= {"softcap": None, "rotate": rotate}
    assert_replays_agree(lambda: merge(case.tables, plan, partial, out, **more), [out])
    assert bool(out.isfinite().all())
