"""Rows never reach a foreign request, and nothing is lost, whatever a scheduler does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.errors import MismatchError
from kvcq.runtime.sglang import admission
from kvcq.runtime.sglang.store import SinkStore
from kvcq.spec.plan import Windows
from tests.runtime.sglang.host import Host


def soak(host: Host, steps: int, *, every: int = 97) -> None:
    random = host.random
    for step in range(steps):
        draw = random.random()
        if draw < 0.1 and len(host.waiting) < 8:
            host.arrive()
        elif draw < 0.106:
            host.abort()
        elif draw < 0.107:
            # A flush waits until nothing runs.
            host.waiting.clear()
            while not host.idle():
                host.step()
            assert host.flush()
        host.step()
        if step % every == 0:
            host.check()
    while not host.idle():
        host.step()
    host.check()
    assert len(host.rows.free_slots) == host.rows.size
    while (page := host.tree.evict()) is not None:
        host.free.append(page)
    assert sorted(host.free) == list(range(1, host.total + 1))
    # One more batch would carry out the last copies; then no entry is pinned.
    host.store.bind([])
    host.device.buffers.apply(host.store.drain())
    assert host.store.occupancy.rows == host.store.occupancy.pinned == 0
    host.store.check()
    admission.uninstall()


@pytest.mark.parametrize("steps", [10_000, pytest.param(25_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("seed", "sink", "recent", "requests", "entries", "pages", "overlap"),
    [
        (5, 64, 128, 6, 3, 40, True),
        (2, 64, 256, 4, 1, 24, True),
        (3, 100, 70, 8, 8, 60, True),
        (4, 64, 64, 4, 2, 26, False),
    ],
)
def test_no_row_is_ever_stale_and_the_ledger_is_exact_after_much_traffic(
    seed, sink, recent, requests, entries, pages, overlap, steps
):
    host = Host(
        seed,
        windows=Windows(sink=sink, recent=recent),
        requests=requests,
        entries=entries,
        pages=pages,
        budget=256,
        overlap=overlap,
    )
    soak(host, steps)
    # The traffic was what it claims to be.
    for event in ("hit", "miss", "chunk", "evict", "abort", "retract", "flush"):
        assert host.seen[event] > 5, (event, host.seen)
    assert host.device.reads > steps


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sink=st.sampled_from([0, 1, 63, 64, 65, 128]),
    recent=st.sampled_from([0, 1, 64, 200]),
    requests=st.integers(1, 5),
    entries=st.integers(0, 4),
    pages=st.integers(20, 50),
    budget=st.sampled_from([64, 128, 256]),
    overlap=st.booleans(),
)
def test_no_row_is_ever_stale_for_any_windows_and_sizes(seed, sink, recent, requests, entries, pages, budget, overlap):
    host = Host(
        seed,
        windows=Windows(sink=sink, recent=recent),
        requests=requests,
        entries=entries,
        pages=pages,
        budget=budget,
        overlap=overlap,
    )
    soak(host, 300, every=11)


def _too_early(store, drain):
    moves = drain(store)
    early = tuple((copy.row, copy.entry) for copy in store._under_way)
    store._under_way = []
    return replace(moves, keep=moves.keep + early)


SABOTAGES = {
    "sinks are kept before they are computed": ("drain", _too_early),
    "sinks are not restored": ("drain", lambda store, drain: replace(drain(store), restore=())),
    "sinks are not kept": ("drain", lambda store, drain: replace(drain(store), keep=())),
    "where exact rows begin is not told": ("drain", lambda store, drain: replace(drain(store), exact_from=())),
    "a flush keeps sinks of other weights": ("clear", lambda store, clear: store._bound.clear()),
    "the last window is reused": (
        "cap",
        lambda store, cap, n, *rest: max(n - 1, 0) // 64 * 64 * bool(cap(store, n, *rest)),
    ),
    "sinks need not be there": ("cap", lambda store, cap, n, *rest: max(n - store.windows.recent, 0) // 64 * 64),
    "tenants share sinks": ("_key", lambda store, key, ids, extra_key: key(store, ids, None)),
    "embeddings are found by their tokens": (
        "bind",
        lambda store, bind, batch: bind(store, [replace(r, private=False) for r in batch]),
    ),
}


@pytest.mark.parametrize("what", SABOTAGES)
def test_the_soak_notices_when(what, monkeypatch):
    name, broken = SABOTAGES[what]
    sound = getattr(SinkStore, name)
    monkeypatch.setattr(SinkStore, name, lambda store, *given: broken(store, sound, *given))
    with pytest.raises((AssertionError, MismatchError, RuntimeError)):
        soak(Host(1, windows=Windows(), requests=6, entries=8, pages=60, budget=256), 20_000)
