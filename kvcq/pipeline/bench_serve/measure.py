"""All cells of one arm, against its running server."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import numpy as np

from kvcq.errors import EvaluationError
from kvcq.pipeline.bench_serve import statistics
from kvcq.pipeline.bench_serve.arms import Running
from kvcq.pipeline.bench_serve.cells import Cell, fitting
from kvcq.pipeline.bench_serve.client import Timeline, send
from kvcq.pipeline.bench_serve.prompts import body, draw, interval_for, reusable
from kvcq.pipeline.bench_serve.rows import Row
from kvcq.pipeline.bench_serve.trace import Split, read_trace, split
from kvcq.pipeline.progress import Reporter
from kvcq.spec.plan import Windows

HIT_SHARES = (0.0, 0.5, 1.0)
PREFILL_OUTPUT, WARM_TOKENS, WARM_OUTPUT = 8, 9000, 8
SPLIT_STEPS, TRACE_SECONDS, POLL_SECONDS = 24, 40.0, 0.5
FLUSH_SECONDS, ANSWER_SECONDS = 30.0, 60.0


@dataclass(frozen=True)
class Plan:
    """What is measured of every arm.

    Attributes:
        cells, prompts, hits, jobs, splits: See `kvcq.pipeline.bench_serve.request.ServeBenchRequest`.
        filled, output, job_output, seed: Likewise.
        recent: The largest recent window of all bundles, in tokens: no arm finds that much of a prompt's end in its
            cache.
    """

    cells: tuple[Cell, ...] = ()
    prompts: tuple[Cell, ...] = ()
    hits: tuple[Cell, ...] = ()
    jobs: tuple[Cell, ...] = ()
    splits: tuple[Cell, ...] = ()
    filled: bool = False
    output: int = 256
    job_output: int = 1024
    seed: int = 0
    recent: int = Windows().recent

    @property
    def count(self) -> int:
        """Rows of an arm."""
        return len(self.cells + self.prompts + self.jobs + self.splits) + len(HIT_SHARES) * len(self.hits)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(cell.input for cell in self.cells + self.prompts + self.hits + self.jobs + self.splits)


# Bytes that a decode step of so many requests behind so many tokens reads, over the bandwidth, in ms; or None.
Bound = Callable[[Running, int, int], float | None]


def measure_arm(running: Running, plan: Plan, bound: Bound, reporter: Reporter) -> Iterator[Row]:
    """Yield the rows of one arm, each as soon as it is there.

    A cell whose requests fail is a row with the reason: the server may well answer the next.
    """
    meter = _Meter(running, plan, bound)
    reporter.stage(f"{running.arm.name}: warming up")
    meter.warm()
    # What matters most comes first: a run may be cut short.
    kinds = (
        ("decode", plan.cells, meter.decode),
        ("split", plan.splits, meter.split),
        ("prefill", plan.prompts, meter.prefill),
        ("hits", plan.hits, meter.hits),
        ("job", plan.jobs, meter.job),
    )
    for kind, cells, act in kinds:
        for cell in cells:
            reporter.stage(f"{running.arm.name}: {kind} {cell.label}")
            problem = None
            try:
                yield from act(cell)
            except EvaluationError as error:
                problem = str(error)
            if problem is not None:
                yield Row(kind, running.arm.name, cell.label, cell.batch or 0, cell.input, 0, problem=problem)


class _Meter:
    def __init__(self, running: Running, plan: Plan, bound: Bound) -> None:
        self._running, self._plan, self._bound = running, plan, bound

    def warm(self) -> None:
        """Have everything compiled that a prefill, a chunk of one, a prefix hit and decoding launch."""
        length = min(self._plan.longest, WARM_TOKENS, max(1024, *(cell.input for cell in self._plan.prompts), 0))
        prompts = self._prompts("warm", 2, length)
        for _ in range(2):
            self._send([body(prompt, WARM_OUTPUT) for prompt in prompts])
        if self._plan.filled and (filled := reusable(length, self._plan.recent)):
            # The pool is filled before the first of them: no cell is to wait for that.
            self._send([body(prompt, WARM_OUTPUT, filled=filled) for prompt in self._prompts("filled", 2, length)])

    def prefill(self, cell: Cell) -> Iterator[Row]:
        count, output = self._count(cell, PREFILL_OUTPUT), PREFILL_OUTPUT
        self._flush()
        lines = self._send(
            [body(prompt, output) for prompt in self._prompts(f"prefill {cell.label}", count, cell.input)]
        )
        yield self._timed(self._row("prefill", cell, count, output), lines)

    def hits(self, cell: Cell) -> Iterator[Row]:
        count, output = self._count(cell, self._plan.output), self._plan.output
        for share in HIT_SHARES:
            self._flush()
            label = f"{cell.label} {100 * share:.0f}%"
            prompts = self._prompts(f"hits {label}", count, cell.input)
            known = min(round(share * cell.input), reusable(cell.input, self._plan.recent))
            if known:
                # Every request finds a prefix of its own: one that all share would be read once for all.
                self._send([body(prompt[:known], 1) for prompt in prompts])
            lines = self._send([body(prompt, output, interval=interval_for(count)) for prompt in prompts])
            row = self._row("hits", cell, count, output)
            yield replace(self._whole(self._timed(row, lines), lines), cell=label)

    def decode(self, cell: Cell) -> Iterator[Row]:
        count, output = self._count(cell, self._plan.output), self._plan.output
        self._flush()
        yield self._windowed("decode", cell, count, output, self._send(self._bodies("decode", cell, count, output)))

    def job(self, cell: Cell) -> Iterator[Row]:
        count, output = self._count(cell, self._plan.job_output), self._plan.job_output
        self._flush()
        lines = self._send(self._bodies("job", cell, count, output))
        yield self._whole(self._windowed("job", cell, count, output, lines), lines)

    def split(self, cell: Cell) -> Iterator[Row]:
        output, running = self._plan.output, self._running
        asked = self._count(cell, output)
        # A step is compared with steps of as many requests: none may wait while it is traced.
        count = max(1, min(asked, fitting(running.capacity, cell.input, output), running.most))
        self._flush()
        with tempfile.TemporaryDirectory(prefix="kvcq-trace-") as folder:
            found: list[tuple[float, Split]] = []

            async def profile(http: httpx2.AsyncClient) -> None:
                found.append(await _profile(http, Path(folder)))

            bodies = self._bodies("split", cell, count, output)
            try:
                lines = send(running.url, bodies, running.key, profile)
            except EvaluationError:
                # A profiler that goes on would slow every cell after this one.
                self._post("/stop_profile", TRACE_SECONDS)
                raise
        began, got = found[0]
        row = self._windowed("split", cell, count, output, lines)
        there = statistics.running(lines, began, began + SPLIT_STEPS * got.step / 1e6)
        told = f"{count} of {asked} requests fit" if count < asked else None
        steady = there == count
        if not steady:
            told = f"only {there} of {count} requests ran all the time while it was traced"
        # The profiler's own cost is outside of the steps that it has traced, but inside the window.
        yield replace(
            row,
            running=count if steady else None,
            bound_ms=self._bound(running, count, cell.input + output // 2) if steady else None,
            tokens_per_s=None,
            window_s=None,
            itl_ms=None,
            itl_p99_ms=None,
            step_ms=got.step / 1000,
            classes_us=got.classes,
            gap_us=got.gap,
            steps=got.steps,
            top=got.top,
            problem=row.problem or told,
        )

    def _count(self, cell: Cell, output: int) -> int:
        running = self._running
        count = cell.requests(running.capacity, output, running.most)
        if not count:
            raise EvaluationError(f"a pool of {running.capacity} tokens holds no such request", where=cell.label)
        return count

    def _prompts(self, use: str, count: int, length: int) -> np.ndarray:
        # Alike in every arm, whatever other cells it measures, and never the same for two uses.
        return draw(count, length, self._plan.seed, *use.encode())

    def _bodies(self, kind: str, cell: Cell, count: int, output: int) -> list[bytes]:
        filled = reusable(cell.input, self._plan.recent) if self._plan.filled else 0
        interval = interval_for(count)
        prompts = self._prompts(f"{kind} {cell.label}", count, cell.input)
        return [body(prompt, output, filled=filled, interval=interval) for prompt in prompts]

    def _send(self, bodies: list[bytes]) -> list[Timeline]:
        return send(self._running.url, bodies, self._running.key)

    def _flush(self) -> None:
        """Empty the radix tree; SGLang refuses as long as anything of the last cell goes on."""
        end = time.monotonic() + FLUSH_SECONDS
        while (found := self._post("/flush_cache", ANSWER_SECONDS)) != 200:
            if isinstance(found, str):
                raise EvaluationError(f"no answer: {found}", where="/flush_cache")
            if time.monotonic() > end:
                raise EvaluationError(f"the cache is not flushed: HTTP {found}", where="/flush_cache")
            time.sleep(POLL_SECONDS)

    def _post(self, place: str, seconds: float) -> int | str:
        """Return the status of an answer, or the kind of error where there is none."""
        key = self._running.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = httpx2.post(f"{self._running.url}{place}", headers=headers, timeout=seconds, trust_env=False)
        except httpx2.HTTPError as error:
            return type(error).__name__
        return answer.status_code

    def _row(self, kind: str, cell: Cell, count: int, output: int) -> Row:
        return Row(kind, self._running.arm.name, cell.label, count, cell.input, output)

    def _windowed(self, kind: str, cell: Cell, count: int, output: int, lines: list[Timeline]) -> Row:
        row = self._timed(self._row(kind, cell, count, output), lines)
        if self._plan.filled and (wanted := reusable(cell.input, self._plan.recent)):
            fewest = min(line.cached for line in lines)
            missing = None if fewest >= wanted else f"only {fewest} of {wanted} tokens were filled in, others prefilled"
            row = replace(row, filled=missing is None, problem=missing, ttft_ms=None, ttft_p99_ms=None)
            row = replace(row, prefill_per_s=None)
        window = statistics.decode_window(lines)
        if window is None:
            return replace(row, problem=row.problem or "no two tokens while all requests run: raise --output")
        length = cell.input + output // 2
        told = None
        if cell.batch is None and fitting(self._running.capacity, cell.input, output) > count:
            told = "as many as --max-running allows, the pool holds more"
        if kind == "decode" and window.requests < count:
            told = f"{window.requests} of {count} requests ran at once"
        return replace(
            row,
            running=window.requests,
            tokens_per_s=window.tokens_per_s,
            step_ms=1000 * window.step,
            window_s=window.seconds,
            bound_ms=self._bound(self._running, window.requests, length),
            problem=row.problem or told,
        )

    def _timed(self, row: Row, lines: list[Timeline]) -> Row:
        first, between = statistics.first_token(lines), statistics.between_tokens(lines)
        return replace(
            row,
            ttft_ms=1000 * first.median,
            ttft_p99_ms=1000 * first.p99,
            itl_ms=None if between is None else 1000 * between.median,
            # Where a stream tells several tokens at once, the mean between them hides the slow ones.
            itl_p99_ms=None if between is None or interval_for(row.requests) > 1 else 1000 * between.p99,
            prefill_per_s=statistics.prefill_rate(lines),
            hit_share=statistics.hit_share(lines),
        )

    def _whole(self, row: Row, lines: list[Timeline]) -> Row:
        seconds = statistics.wall(lines)
        return replace(row, wall_s=seconds, tokens_per_s=sum(line.tokens for line in lines) / seconds)


async def _profile(http: httpx2.AsyncClient, folder: Path) -> tuple[float, Split]:
    """Trace some steps of what runs now, and return when they began and what they consist of."""
    asked = {
        "output_dir": str(folder),
        "num_steps": SPLIT_STEPS,
        # Without the CPU's own events, which would slow every launch.
        "activities": ["GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    try:
        answer = await http.post("/start_profile", json=asked, timeout=TRACE_SECONDS)
    except httpx2.HTTPError as error:
        raise EvaluationError(f"no answer: {type(error).__name__}", where="/start_profile") from None
    if answer.status_code != 200:
        # SGLang answers 500 where its profiler does not start; its own lines say why.
        raise EvaluationError(f"HTTP {answer.status_code}", where="/start_profile")
    began = time.perf_counter()
    while time.perf_counter() < began + TRACE_SECONDS:
        for path in sorted(folder.glob("*.trace.json*")):
            try:
                events = read_trace(path)
            except EvaluationError:
                # It is still being written.
                continue
            return began, split(events, SPLIT_STEPS)
        await asyncio.sleep(POLL_SECONDS)
    # Its last step may have been beyond the end of the requests.
    raise EvaluationError(f"no trace within {TRACE_SECONDS:g} s", where="/start_profile", fix="raise --output")
