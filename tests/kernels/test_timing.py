"""What a timing holds: the replays of a graph, and not its launch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kvcq.pipeline.bench.timing import WARM, time_calls


def test_a_graph_is_launched_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("record")

        def synchronize(self) -> None:
            seen.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 0.06

    class Graph:
        def replay(self) -> None:
            seen.append("replay")

    for name, instead in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda graph: nullcontext(),
        "synchronize": lambda: seen.append("wait"),
        "_sleep": lambda cycles: seen.append("sleep"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    timing = time_calls([lambda: seen.append("call")] * 3, 2, captured=lambda: seen.append("captured"))
    timed = ["sleep", "record", "replay", "record", "wait"]
    assert seen == ["call"] * 3 + ["wait"] + ["call"] * 3 + ["captured"] + ["replay"] * WARM + timed * 2
    assert timing.us == timing.low == timing.high == pytest.approx(20.0) and timing.calls == 3


@pytest.mark.gpu
def test_a_short_call_takes_no_longer_alone_than_among_many() -> None:
    data = torch.zeros(1, device="cuda")
    alone, among = (time_calls([lambda: data.add_(1)] * count, 20).us for count in (1, 64))
    # The launch of a graph takes about 8 us.
    assert alone < among + 5
