"""Checks of write: what tokens leave behind does not depend on how many come together, nor on graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS, page_views
from kvcq.kernels.arrays import LayerCache
from kvcq.kernels.cuda.compile import missing
from kvcq.kernels.limits import device_limits
from kvcq.kernels.reference import reference_write
from kvcq.kernels.windows import store_windows
from kvcq.kernels.write import cuda_sides, write
from kvcq.pipeline.bench.candidate import poison, relative_error
from kvcq.pipeline.bench.check_cases import Backend, WriteCase
from kvcq.pipeline.bench.check_decode import Attempt
from kvcq.pipeline.bench.layers import Step
from kvcq.pipeline.bench.ragged import Place, ragged_step
from kvcq.pipeline.bench.verdict import Verdict, after_replay, captured, same_bits
from kvcq.pipeline.bench.write import read_slots

PARTS = ("pages", "sink_k", "sink_v", "ring_k", "ring_v")


@dataclass(frozen=True)
class Tokens:
    """All tokens of all requests, one after the other.

    Attributes:
        k, v: ``[T, H, d]``.
        slots: int64 ``[T]``.
        positions, owners: int32 ``[T]``.
        starts: Where each request begins.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    positions: Tensor
    owners: Tensor
    starts: list[int]


def write_attempts(case: WriteCase, place: Place) -> Iterator[Attempt]:
    """Yield the kernels that write a case."""
    step = ragged_step(case.codec, case.d, 1, case.lengths, place, fill=False)
    tokens = _tokens(step, case.lengths)
    for backend in case.backends:
        reason = None if backend == "triton" else _unserved(step, place)
        yield backend, reason or partial(_attempt, step, tokens, case, backend)


def _unserved(step: Step, place: Place) -> str | None:
    reason = missing()
    if reason is None and not any(cuda_sides(step.tables[0], place.dtype, device_limits(step.device))):
        reason = "no CUDA kernel writes this layer on this device"
    return reason


def _tokens(step: Step, lengths: tuple[int, ...]) -> Tokens:
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(step.device)
    at = torch.cat([torch.arange(n) for n in lengths]).to(step.device)
    pages = step.requests.page_table.long()[owners, at // PAGE_TOKENS]
    size = (len(at), step.shape.heads, step.shape.d)
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    slots = pages * PAGE_TOKENS + at % PAGE_TOKENS
    return Tokens(step.random(*size), step.random(*size), slots, at.int(), owners.int(), starts)


def _attempt(step: Step, tokens: Tokens, case: WriteCase, backend: Backend) -> Verdict:
    """Write in bulk, compare with the codecs, then append one by one, eagerly and out of a graph."""
    tables, bulk, clamped = step.tables[0], _copy(step.caches[0]), _counter(step)
    rows = torch.empty_like(tokens.k), torch.empty_like(tokens.v)
    where: dict[str, Any] = {"slots": tokens.slots, "positions": tokens.positions, "requests": tokens.owners}
    where |= {"batch": step.requests}

    def whole() -> None:
        more: dict[str, Any] = {"rows": rows, "windows": False, "clamped": clamped, "backend": backend}
        write(tables, bulk, tokens.k, tokens.v, **where, **more)
        store_windows(bulk, rows, tokens.positions, tokens.owners, step.requests)

    def judge() -> Verdict:
        wanted = _copy(step.caches[0])
        exact = reference_write(tables, wanted, tokens.k, tokens.v, **where, windows=True)
        coded = (read_slots(tables, one.pages, tokens.slots) for one in (bulk, wanted))
        pairs = [*zip(*coded, strict=True), *zip(rows, exact[:2], strict=True)]
        for name in PARTS[1:]:
            found, right = getattr(bulk, name), getattr(wanted, name)
            if not torch.equal(found.isnan(), right.isnan()):
                return torch.inf, f"{name} holds other rows than it should"
            pairs.append((found[~found.isnan()], right[~right.isnan()]))
        return max(relative_error(found, right.double()) for found, right in pairs if right.numel()), None

    error, problem = after_replay(whole, [*(getattr(bulk, name) for name in PARTS), *rows], judge)
    return error, problem or _appended(step, tokens, case, backend, bulk)


def _appended(step: Step, tokens: Tokens, case: WriteCase, backend: Backend, bulk: LayerCache) -> str | None:
    """Say how tokens that are appended one by one end up otherwise than in bulk, or None."""
    chosen = [appended(n, bulk.windows.sink, bulk.ring) for n in case.lengths]
    steps = max(map(len, chosen))
    # A request that is done, or has not begun, is a padding row.
    order = torch.full((steps, len(chosen)), -1)
    for b, own in enumerate(chosen):
        order[steps - len(own) :, b] = torch.tensor(own) + tokens.starts[b]
    order = order.to(step.device)
    expected = _expected(step, bulk, tokens, order[order >= 0])
    appending = Appending(step, tokens, backend)
    cache = appending.cache
    for how in ("one by one", "one by one in a graph"):
        appending.load(order[0])
        # The first round has compiled what is captured.
        launch = captured(appending.launch) if how.endswith("graph") and cache.pages.is_cuda else appending.launch
        poison([getattr(cache, name) for name in PARTS])
        for index in order:
            appending.load(index)
            launch()
        for name in PARTS:
            if not same_bits(getattr(cache, name), getattr(expected, name)):
                return f"{name}: tokens that came {how} are stored otherwise than in bulk"
    return None


class Appending:
    """Arguments of a decode step, loaded anew for every token."""

    def __init__(self, step: Step, tokens: Tokens, backend: Backend) -> None:
        batch = step.shape.batch
        self.cache = _copy(step.caches[0])
        self._step, self._tokens, self._backend = step, tokens, backend
        self._k, self._v = (torch.empty_like(rows[:batch]) for rows in (tokens.k, tokens.v))
        self._slots = torch.empty(batch, dtype=torch.int64, device=step.device)
        self._positions = torch.empty(batch, dtype=torch.int32, device=step.device)
        self._owners = torch.arange(batch, dtype=torch.int32, device=step.device)
        self._requests = replace(step.requests, lengths=torch.zeros_like(step.requests.lengths))
        self._clamped = _counter(step)

    def load(self, index: Tensor) -> None:
        """Take the tokens `index` ``[B]``, one a request; -1: none of it."""
        tokens, given, at = self._tokens, index >= 0, index.clamp(min=0)
        self._k.copy_(tokens.k[at])
        self._v.copy_(tokens.v[at])
        self._slots.copy_(torch.where(given, tokens.slots[at], -1))
        self._positions.copy_(torch.where(given, tokens.positions[at], 0))
        self._requests.lengths.copy_(torch.where(given, tokens.positions[at] + 1, 0))

    def launch(self) -> None:
        """Write them, windows included."""
        write(
            self._step.tables[0],
            self.cache,
            self._k,
            self._v,
            slots=self._slots,
            positions=self._positions,
            requests=self._owners,
            batch=self._requests,
            rows=None,
            windows=True,
            clamped=self._clamped,
            backend=self._backend,
        )


def appended(n: int, sink: int, ring: int) -> list[int]:
    """Return the positions that are appended one by one: sinks, both sides of every edge of a page, the whole ring."""
    edges = (at + side for at in range(0, n + 1, PAGE_TOKENS) for side in (-1, 0))
    wanted = {*range(min(sink, n)), *range(max(n - ring, 0), n), *(at for at in edges if 0 <= at < n)}
    return sorted(wanted)


def _expected(step: Step, bulk: LayerCache, tokens: Tokens, chosen: Tensor) -> LayerCache:
    """Return what is left when only these tokens have been stored: their codes, all windows, nothing else."""
    expected, tables, d = replace(bulk, pages=torch.full_like(bulk.pages, 0xFF)), step.tables[0], step.shape.d
    bits = (tables.k.bits, tables.v.bits)
    page, place = tokens.slots[chosen] // PAGE_TOKENS, tokens.slots[chosen] % PAGE_TOKENS
    for to, source in zip(*(page_views(one.pages, d, d, tables.words, bits) for one in (expected, bulk)), strict=True):
        to[page, :, place] = source[page, :, place]
    return expected


def _copy(cache: LayerCache) -> LayerCache:
    return replace(cache, **{name: getattr(cache, name).clone() for name in PARTS})


def _counter(step: Step) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=step.device)
