"""The plan against a plain Python law: every position of every request is read once, in items of bounded size."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import Requests
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.kernels.plan import Partials, Plan, max_items
from kvcq.spec.plan import Windows

lengths_ragged = st.one_of(st.integers(0, 100_000), st.integers(0, 400), st.sampled_from([0, 1, 63, 64, 65, 8192]))


REQUEST_PAGES = 10_007


def batch_of(lengths: list[int], exact_from: list[int], device: torch.device, longest: int = 0) -> Requests:
    """Page t of request b is ``REQUEST_PAGES b + t``."""

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = [7 * b % 5 for b in range(len(lengths))]
    pages = torch.arange(max(-(-max(*lengths, longest) // 64), 1), dtype=torch.int32, device=device)
    own = torch.arange(len(lengths), dtype=torch.int32, device=device) * REQUEST_PAGES
    return Requests(own[:, None] + pages, column(slots), column(lengths), column(exact_from))


def planned(
    lengths: list[int],
    exact_from: list[int],
    windows: Windows,
    window: int | None,
    parts: int,
    exact_rows: int,
    device: torch.device,
    spare: int = 0,
) -> Plan:
    plan = Plan.reserve(len(lengths) + spare, parts=parts, exact_rows=exact_rows, windows=windows, device=device)
    plan.items.fill_(-1)
    plan.leads.fill_(-1)
    plan.update(batch_of(lengths, exact_from, device), windows, window)
    return plan


def check(plan: Plan, lengths: list[int], exact_from: list[int], windows: Windows, window: int | None) -> None:
    """The law: positions of a request in plain Python ranges, against what its items cover."""
    first, items, spans = plan.first.tolist(), plan.items.tolist(), plan.spans.tolist()
    leads = plan.leads.tolist()
    assert first[0] == 0
    coded_items, chunks = 0, []
    for b, n in enumerate(lengths):
        oldest = max(n - windows.recent, exact_from[b], windows.sink)
        seen = 0 if window is None else max(n - window, 0)
        coded_lo, coded_hi, sink_lo, sink_n, recent_lo, recent_n, length, slot = spans[b]
        assert (length, slot) == (n, 7 * b % 5)
        assert range(sink_lo, sink_lo + sink_n) == range(seen, min(windows.sink, n))
        assert range(coded_lo, coded_hi) == range(max(seen, windows.sink), min(oldest, n))
        assert range(recent_lo, recent_lo + recent_n) == range(max(seen, oldest), n)
        assert sink_n + coded_hi - coded_lo + recent_n == n - seen
        own = items[first[b] : first[b + 1]]
        assert all(item[0] == b for item in own)
        kinds = [item[1] for item in own]
        assert kinds == sorted(kinds, reverse=True)
        row = 0
        for _, _, start, stop in own[: sum(kinds)]:
            assert start == row and 0 < stop - start <= plan.exact_rows
            row = stop
        assert row == sink_n + recent_n
        for (_, kind, start, stop), lead in zip(own, leads[first[b] : first[b + 1]], strict=True):
            tiles = [REQUEST_PAGES * b + tile for tile in range(start // 64, stop // 64)]
            assert lead == ([sink_lo, sink_n, recent_lo, slot] if kind else [*tiles, 0, 0, 0][:4])
        pages = [(start, stop) for _, kind, start, stop in own if kind == 0]
        assert bool(pages) == (coded_hi > coded_lo)
        if pages:
            assert pages[0][0] == coded_lo // 64 * 64 and pages[-1][1] == -(-coded_hi // 64) * 64
            assert all(left[1] == right[0] for left, right in pairwise(pages))
            assert all(start % 64 == 0 and stop % 64 == 0 and stop > start for start, stop in pages)
            chunks.append([(stop - start) // 64 for start, stop in pages])
        coded_items += len(pages)
    batch, used = len(lengths), first[len(lengths)]
    assert coded_items <= max(plan.parts, batch)
    total = sum(sum(sizes) for sizes in chunks)
    limit = max(1, -(-total // max(plan.parts - batch, 1)))
    assert all(max(sizes) <= limit and max(sizes) - min(sizes) <= 1 for sizes in chunks)
    assert all(len(sizes) == -(-sum(sizes) // limit) for sizes in chunks)
    assert used <= len(items)
    assert all(item == [0, 0, 0, 0] for item in items[used:] + leads[used:])


@settings(max_examples=40)
@given(
    lengths=st.lists(lengths_ragged, min_size=1, max_size=64),
    windows=st.sampled_from([Windows(sink=64, recent=256), Windows(sink=0, recent=0), Windows(sink=3, recent=100)]),
    window=st.sampled_from([None, 1, 128, 5000]),
    parts=st.sampled_from([1, 7, 64, 264, 1056]),
    exact_rows=st.sampled_from([16, 64, 320]),
    spare=st.integers(0, 3),
    data=st.data(),
)
def test_every_position_is_covered_once(
    lengths: list[int],
    windows: Windows,
    window: int | None,
    parts: int,
    exact_rows: int,
    spare: int,
    data: Any,
    device: torch.device,
) -> None:
    exact_from = [data.draw(st.sampled_from([0, 0, n // 2, n])) for n in lengths]
    plan = planned(lengths, exact_from, windows, window, parts, exact_rows, device, spare)
    check(plan, lengths, exact_from, windows, window)


@pytest.mark.parametrize("batch", [65, 300, pytest.param(4096, marks=pytest.mark.exhaustive)])
def test_large_batches(batch: int, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 3000, (batch,), generator=draw).tolist()
    windows = Windows(sink=64, recent=256)
    plan = planned(lengths, [0] * batch, windows, None, 1056, 320, device)
    check(plan, lengths, [0] * batch, windows, None)


def test_smaller_steps_leave_nothing_of_larger_ones(device: torch.device) -> None:
    windows = Windows(sink=4, recent=8)
    plan = Plan.reserve(20, parts=50, exact_rows=4, windows=windows, device=device)
    for lengths in ([5000] * 20, [70], [0, 0, 300]):
        plan.update(batch_of(lengths, [0] * len(lengths), device), windows)
        check(plan, lengths, [0] * len(lengths), windows, None)


@pytest.mark.gpu
def test_a_captured_update_follows_the_lengths(device: torch.device) -> None:
    windows = Windows(sink=64, recent=256)
    plan = Plan.reserve(3, parts=50, exact_rows=64, windows=windows, device=device)
    requests = batch_of([100, 7000, 0], [0, 0, 0], device, longest=90_000)
    plan.update(requests, windows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(requests, windows)
    for lengths in ([1, 1, 1], [90_000, 0, 300]):
        requests.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        check(plan, lengths, [0, 0, 0], windows, None)


def test_smaller_windows_fit_a_plan(device: torch.device) -> None:
    plan = Plan.reserve(2, parts=8, exact_rows=16, windows=Windows(sink=16, recent=64), device=device)
    for windows in (Windows(sink=64, recent=16), Windows(sink=0, recent=8)):
        plan.update(batch_of([1000, 9], [0, 0], device), windows)
        check(plan, [1000, 9], [0, 0], windows, None)


def test_partials_have_room_for_every_item(device: torch.device) -> None:
    windows = Windows(sink=64, recent=256)
    plan = Plan.reserve(3, parts=8, exact_rows=64, windows=windows, device=device)
    partials = Partials.reserve(plan, 12, 80)
    assert plan.size == max_items(3, 8, 64, windows) == 8 + 3 * 5
    assert partials.o.shape == (plan.size, 12, 80) and partials.ml.shape == (plan.size, 12, 2)


def test_partials_of_a_smaller_plan_are_the_same_memory(device: torch.device) -> None:
    windows = Windows(sink=64, recent=256)
    plans = [Plan.reserve(batch, parts=8, exact_rows=64, windows=windows, device=device) for batch in (3, 1)]
    partials = Partials.reserve(plans[0], 12, 80)
    part = partials.narrowed(plans[1])
    assert part is not None
    for name in ("o", "ml", "mixed", "mass"):
        mine, whole, own = (getattr(of, name) for of in (part, partials, Partials.reserve(plans[1], 12, 80)))
        assert mine.data_ptr() == whole.data_ptr() and mine.is_contiguous() and mine.shape == own.shape
    assert part.narrowed(plans[0]) is None


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    windows = Windows(sink=4, recent=8)
    for sizes in ({"max_batch": 0}, {"max_batch": 4097}, {"parts": 0}, {"exact_rows": 0}):
        with pytest.raises(ValueError, match=r"\d"):
            Plan.reserve(
                **{"max_batch": 1, "parts": 1, "exact_rows": 1, **sizes},  # type: ignore[arg-type]
                windows=windows,
                device=device,
            )
    plan = Plan.reserve(2, parts=8, exact_rows=16, windows=windows, device=device)
    with pytest.raises(ValueError, match="3 requests"):
        plan.update(batch_of([1, 1, 1], [0, 0, 0], device), windows)
    with pytest.raises(ValueError, match="5 \\+ 8"):
        plan.update(batch_of([1], [0], device), Windows(sink=5, recent=8))
    with pytest.raises(ValueError, match="window of 0"):
        plan.update(batch_of([1], [0], device), windows, 0)
    wrong = batch_of([1], [0], device)
    with pytest.raises(ValueError, match="int64"):
        plan.update(Requests(wrong.page_table, wrong.slots.long(), wrong.lengths, wrong.exact_from), windows)


def test_checks_name_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cpu = torch.zeros(2, 3), torch.device("cpu")
    check_tensor("x", x, (None, 3), torch.float32, cpu)
    check_tensor("x", torch.zeros(2, 6)[:, :3], (2, 3), None, cpu, contiguous=False)
    for tensor, shape, dtype, device, options, said in (
        (x, (2, 4), None, cpu, {}, r"\[2, 3\], not \[2, 4\]"),
        (x, (2,), None, cpu, {}, "shape"),
        (x, (2, 3), torch.float16, cpu, {}, "float16"),
        (x, (2, 3), None, torch.device("meta"), {}, "meta"),
        (torch.zeros(2, 6)[:, :3], (2, 3), None, cpu, {}, "not contiguous"),
        (torch.zeros(3, 2).T, (2, 3), None, cpu, {"contiguous": False}, "last dimension"),
    ):
        with pytest.raises(ValueError, match=said):
            check_tensor("x", tensor, shape, dtype, device, **options)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedError, match="not tested on HIP"):
        check_platform(torch.device("cuda"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_platform(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="tensors on cuda:1, but the current device is cuda:0"):
        check_platform(torch.device("cuda", 1))


def test_the_interpreter_alone_takes_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(UnsupportedError, match="run on CUDA"):
        check_platform(torch.device("cpu"))


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 80, 256)] == [1, 1, 2, 4, 4, 8, 128, 256]
