"""All rows of a run, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from kvcq.pipeline.bench.baselines import Baseline, baselines, best
from kvcq.pipeline.bench.check_cases import CASES
from kvcq.pipeline.bench.checks import share_out, workers_here
from kvcq.pipeline.bench.decode import choice_of, decode_rows
from kvcq.pipeline.bench.extend import extend_rows
from kvcq.pipeline.bench.peers import Peer, load_peers
from kvcq.pipeline.bench.ragged import Place
from kvcq.pipeline.bench.result import BenchResult, Row
from kvcq.pipeline.bench.shapes import Shape, layers_for
from kvcq.pipeline.bench.timing import free, read_ceiling, time_calls
from kvcq.pipeline.bench.write import write_rows
from kvcq.pipeline.progress import Reporter
from kvcq.pipeline.requests import BenchRequest
from kvcq.pipeline.versions import installed

CEILING_REPEATS = 20


def measure(request: BenchRequest, plan: Sequence[tuple[str, Shape]], reporter: Reporter) -> BenchResult:
    """Check ragged batches on demand, and measure every case of a plan, on the current CUDA device.

    Raises:
        InputError: a peer that does not exist.
    """
    peers = load_peers(request.peers)
    begin = time.monotonic()
    result = BenchResult(device=describe_device())
    if "check" in request.ops:
        workers = workers_here()
        reporter.stage(f"checks of ragged batches ({len(CASES)} cases in {workers} processes)")
        for check in share_out(CASES, Place(), workers, reporter.warn):
            result.checks.append(check)
            (reporter.note if check.ok else reporter.warn)(check.line())
        reporter.note(f"checks: {result.checks_run}")
    if plan:
        reporter.stage("read ceiling")
        result.ceiling, result.rates = read_ceiling(CEILING_REPEATS)
        free()
    known: dict[tuple[str, Shape], list[Baseline]] = {}
    for done, (op, shape) in enumerate(plan):
        reporter.stage(f"{op} {shape.label} ({done + 1} of {len(plan)})")
        problem = None
        try:
            for row in _rows(op, shape, request, known, peers):
                _add(result, row, reporter)
        # A shape that is too large is no reason to lose the figures of the others.
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
        if problem is not None:
            free()
            _add(result, Row(op, shape, "-", "all that follow", problem=problem), reporter)
        if op == "decode":
            for codec in request.codecs:
                result.choices[f"{codec} {shape.label}"] = choice_of(codec, shape)
    result.seconds = time.monotonic() - begin
    return result


def _add(result: BenchResult, row: Row, reporter: Reporter) -> None:
    result.rows.append(row)
    if row.wrong:
        reporter.warn(row.line())
    else:
        reporter.note(row.line())


def describe_device() -> dict[str, str]:
    """Return name, capability and versions."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {
        "device": f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    for name in ("triton", "cuda-core", "flashinfer-python"):
        version = installed(name)
        if version is not None:
            found[name] = version
    return found


def _rows(
    op: str, shape: Shape, request: BenchRequest, known: dict[tuple[str, Shape], list[Baseline]], peers: Sequence[Peer]
) -> Iterator[Row]:
    """Yield the rows of one case, those of BF16 first."""
    # A decode step that is written is compared with reading the same one.
    key = ("decode" if op == "append" else op, shape)
    if key not in known:
        known[key] = baselines(shape, request.repeats)
    found = known[key]
    fastest = best(found)
    bf16_us = None if fastest is None or fastest.timing is None else fastest.timing.us
    for one in found:
        count = shape.bf16_bytes if shape.chunk == 1 and op == "decode" else None
        yield Row(op, shape, "bf16", one.name, one.timing, count, bf16_us, problem=one.problem)
    if op == "decode":
        yield from decode_rows(shape, request.codecs, request.repeats, bf16_us)
        for peer in peers:
            yield _peer_row(peer, shape, request.repeats, bf16_us)
    elif op == "extend":
        yield from extend_rows(shape, request.codecs, request.repeats, bf16_us)
    else:
        yield from write_rows(op, shape, request.codecs, request.repeats, bf16_us)


def _peer_row(peer: Peer, shape: Shape, repeats: int, bf16_us: float | None) -> Row:
    """Time a foreign kernel; one that fails is no fault of ours."""
    timing, problem = None, None
    try:
        calls = [peer.prepare(shape) for _ in range(layers_for(shape.read_bytes(1)))]
        timing = time_calls(calls, repeats)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    calls = []
    free()
    return Row("peer", shape, "-", peer.name, timing, None, bf16_us, problem=problem)
