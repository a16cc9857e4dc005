"""Times of launches inside CUDA graphs, and the rate at which this chip reads memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]

WARM = 2
# About 200 us of device work ahead of a timed replay: the processor has launched the graph long before it ends.
AHEAD_CYCLES = 400_000
CEILING_BYTES = 4 << 30


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call on the device: median, least and most of the replays."""

    us: float
    low: float
    high: float
    calls: int


def time_calls(calls: Sequence[Call], repeats: int, *, captured: Call | None = None) -> Timing:
    """Time calls that follow one another in one CUDA graph: gaps between them count, Python does not.

    Nor does the launch of the graph: the device is kept busy until the processor has launched all of it. On an idle
    device the first event would be recorded before the launch, and each call would hold its share of that.

    Args:
        calls: One for each layer, each with memory of its own; run once eagerly first, which compiles them.
        repeats: Replays that are timed, after two that are not.
        captured: Called between the capture and the first replay, e.g. to poison outputs.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    if captured is not None:
        captured()
    for _ in range(WARM):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(calls))
    return Timing(median(times), min(times), max(times), len(calls))


def read_ceiling(repeats: int) -> tuple[float, list[float]]:
    """Return the best rate of a read-only kernel over 4 GiB and that of each of its block shapes, GB/s."""
    from kvcq.kernels.stream import BLOCKS, read_all, sums_for

    data = torch.randint(-(1 << 30), 1 << 30, (CEILING_BYTES // 4,), dtype=torch.int32, device="cuda")
    rates = []
    for block in BLOCKS:
        sums = sums_for(data, block)
        timing = time_calls([lambda block=block, sums=sums: read_all(data, sums, block)], repeats)  # type: ignore[misc]
        rates.append(CEILING_BYTES / timing.us / 1000)
    return max(rates), rates


def free() -> None:
    """Give back what earlier cases held: graphs keep memory of their own."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
