"""A thin client over ``/generate``: many streams at once, the time of every event, and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kvcq.errors import EvaluationError, shown
from kvcq.pipeline.event_loop import run_async

DATA, DONE = b"data:", b"[DONE]"
# A stream is silent while others are prefilled, or run before it.
SILENT_SECONDS = 3600.0
HEADERS = {"Content-Type": "application/json"}

WhenRunning = Callable[[httpx2.AsyncClient], Awaitable[None]]


@dataclass
class Timeline:
    """What became of one request; times in seconds of one clock.

    Attributes:
        sent: When it was sent.
        events: Time and tokens generated so far, in order.
        prompt: Tokens of the prompt, by the server's count.
        cached: Of these, found in the cache.
        problem: Why it has no end; None where all went well.
    """

    sent: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    problem: str | None = None

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.events[0][0]

    @property
    def last(self) -> float:
        """When the last token came."""
        return self.events[-1][0]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return self.events[-1][1]


def send(
    url: str, bodies: Sequence[bytes], key: str | None = None, when_running: WhenRunning | None = None
) -> list[Timeline]:
    """Send requests at once and wait for all of them.

    Args:
        url: Of the server.
        bodies: As `kvcq.pipeline.bench_serve.prompts.body` makes them.
        key: Bearer token.
        when_running: Awaited once every request has its first token, while they go on; not where one has failed.

    Raises:
        EvaluationError: a request failed.
    """
    return run_async(_send(url, bodies, key, when_running))


async def _send(url: str, bodies: Sequence[bytes], key: str | None, when_running: WhenRunning | None) -> list[Timeline]:
    headers = HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
    timeout = httpx2.Timeout(SILENT_SECONDS, pool=None)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    lines = [Timeline() for _ in bodies]
    async with httpx2.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False
    ) as http:
        started = _Started(len(bodies))
        jobs = [_all(http, bodies, lines, started)]
        if when_running is not None:
            jobs.append(_then(http, started, when_running))
        # The first failure ends the other too: nothing waits for a trace of requests that are gone.
        await asyncio.gather(*jobs)
    return lines


class _Started:
    """Is set once so many requests have begun; `failed` where one cannot any more."""

    def __init__(self, count: int) -> None:
        self._left, self.event, self.failed = count, asyncio.Event(), False

    def one(self, *, failed: bool = False) -> None:
        self._left -= 1
        self.failed |= failed
        if not self._left:
            self.event.set()


async def _then(http: httpx2.AsyncClient, started: _Started, act: WhenRunning) -> None:
    await started.event.wait()
    if not started.failed:
        await act(http)


async def _all(http: httpx2.AsyncClient, bodies: Sequence[bytes], lines: Sequence[Timeline], started: _Started) -> None:
    await asyncio.gather(*(_one(http, body, line, started) for body, line in zip(bodies, lines, strict=True)))
    problems = [line.problem for line in lines if line.problem is not None]
    if problems:
        raise EvaluationError(f"{len(problems)} of {len(lines)} requests failed: {problems[0]}", where="/generate")


async def _one(http: httpx2.AsyncClient, body: bytes, line: Timeline, started: _Started) -> None:
    line.sent = time.perf_counter()
    begun = False
    try:
        async with http.stream("POST", "/generate", content=body) as answer:
            if answer.status_code != 200:
                line.problem = f"HTTP {answer.status_code}: {shown((await answer.aread()).decode(errors='replace'))}"
                return
            async for text in _lines(answer):
                now = time.perf_counter()
                if text.startswith(DATA) and (found := text[len(DATA) :].strip()) != DONE:
                    _note(line, now, json.loads(found))
                    if line.events and not begun:
                        begun = True
                        started.one()
            if not line.events and line.problem is None:
                line.problem = "an empty stream"
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        line.problem = f"{type(error).__name__}: {shown(str(error))}"
    finally:
        if not begun:
            started.one(failed=True)


async def _lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; nothing but a newline ends one: text may hold what Unicode calls line ends too."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _note(line: Timeline, now: float, event: dict[str, Any]) -> None:
    if "error" in event:
        line.problem = shown(str(event["error"]))
        return
    meta = event["meta_info"]
    tokens = int(meta["completion_tokens"])
    # The last event may repeat the count of the one before.
    if not line.events or tokens > line.tokens:
        line.events.append((now, tokens))
    line.prompt, line.cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
