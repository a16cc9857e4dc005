"""From the events of streams to figures: the window in which all requests decode, latencies, prefill."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median

from kvcq.pipeline.bench_serve.client import Timeline


@dataclass(frozen=True)
class Window:
    """Decoding while as many requests as ever run at once.

    Attributes:
        requests: How many that was.
        seconds: How long, from the last of their first tokens to the first end.
        tokens_per_s: Of all of them together.
    """

    requests: int
    seconds: float
    tokens_per_s: float

    @property
    def step(self) -> float:
        """Seconds from one token of a request to its next."""
        return self.requests / self.tokens_per_s


@dataclass(frozen=True)
class Latency:
    """Seconds: median, 99th percentile and most."""

    median: float
    p99: float
    most: float


def decode_window(lines: Sequence[Timeline]) -> Window | None:
    """Return the longest time in which the most requests decode; None where no two tokens of them lie in it.

    A request runs from its first token to its last. Events may stand for several tokens: at the edges of the window
    tokens are read off the line between two events. A request that stands still there adds nothing.
    """
    edges = sorted({line.first for line in lines} | {line.last for line in lines})
    best: tuple[int, float, float, float] | None = None
    for start, stop in pairwise(edges):
        key = (running(lines, start, stop), stop - start, start, stop)
        best = key if best is None or key[:2] > best[:2] else best
    if best is None:
        return None
    requests, seconds, start, stop = best
    there = [line.events for line in lines if line.first <= start and line.last >= stop]
    if not seconds or all(sum(start <= time <= stop for time, _ in events) < 2 for events in there):
        return None
    made = sum(_tokens(events, stop) - _tokens(events, start) for events in there)
    return Window(requests, seconds, made / seconds) if made else None


def _tokens(events: Sequence[tuple[float, int]], when: float) -> float:
    """Return how many tokens a request has at a time between its first and its last event."""
    at = bisect_left(events, when, key=lambda event: event[0])
    (after, tokens), (before, fewer) = events[at], events[max(at - 1, 0)]
    return tokens if after == before else fewer + (tokens - fewer) * (when - before) / (after - before)


def running(lines: Sequence[Timeline], start: float, stop: float) -> int:
    """Return how many requests decode all the time from `start` to `stop`."""
    return sum(line.first <= start and line.last >= stop for line in lines)


def first_token(lines: Sequence[Timeline]) -> Latency:
    """Return the times from sending to the first token."""
    return _latency([line.first - line.sent for line in lines])


def between_tokens(lines: Sequence[Timeline]) -> Latency | None:
    """Return the times from one event to the next, by token; None where nobody has two events."""
    gaps = [(b[0] - a[0]) / (b[1] - a[1]) for line in lines for a, b in pairwise(line.events)]
    return _latency(gaps) if gaps else None


def prefill_rate(lines: Sequence[Timeline]) -> float:
    """Return the prompt tokens computed in a second, from the first request sent to the last first token."""
    tokens = sum(line.prompt - line.cached for line in lines)
    return tokens / (max(line.first for line in lines) - min(line.sent for line in lines))


def wall(lines: Sequence[Timeline]) -> float:
    """Return the seconds from the first request sent to the last token."""
    return max(line.last for line in lines) - min(line.sent for line in lines)


def hit_share(lines: Sequence[Timeline]) -> float:
    """Return the share of prompt tokens that were found in the cache."""
    return sum(line.cached for line in lines) / max(1, sum(line.prompt for line in lines))


def _latency(values: Sequence[float]) -> Latency:
    ordered = sorted(values)
    return Latency(median(ordered), ordered[ceil(0.99 * len(ordered)) - 1], ordered[-1])
