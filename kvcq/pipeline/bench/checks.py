"""Check the kernels over ragged batches, beyond what is timed: near float64, one by one as in bulk, in graphs.

Nearly all of the time is that of compilers, so cases are shared out to processes; what these have compiled lies in the
cache of Triton when the same kernels are timed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

import torch

from kvcq.pipeline.bench.candidate import MESSAGE
from kvcq.pipeline.bench.check_cases import Case, DecodeCase, WriteCase
from kvcq.pipeline.bench.check_decode import Attempt, decode_attempts, extend_attempts
from kvcq.pipeline.bench.check_write import write_attempts
from kvcq.pipeline.bench.decode import LIMIT as DECODE_LIMIT
from kvcq.pipeline.bench.extend import LIMIT as EXTEND_LIMIT
from kvcq.pipeline.bench.ragged import Place
from kvcq.pipeline.bench.result import Check
from kvcq.pipeline.bench.timing import free
from kvcq.pipeline.bench.verdict import Verdict
from kvcq.pipeline.bench.write import LIMIT as WRITE_LIMIT

# So that a figure can be looked into.
SEED = 20
# Processes at most, and memory that each has to find: float64 rows of the longest contexts.
WORKERS = 8
WORKER_BYTES = 14 << 30


def share_out(cases: Sequence[Case], place: Place, workers: int, warn: Callable[[str], None]) -> Iterator[Check]:
    """Check cases in processes of their own, see `check_cases`; yield in order.

    Where processes cannot begin, or one dies, this one does what is left.

    Args:
        cases: In order; those that take longest first end soonest.
        place: Heads, windows, device.
        workers: Processes; with one, cases are checked in this one.
        warn: Told when a process cannot begin or dies.
    """
    done = 0
    if workers > 1:
        device = torch.cuda.current_device() if torch.device(place.device).type == "cuda" else None
        try:
            with ProcessPoolExecutor(min(workers, len(cases)), get_context("spawn"), _begin, (device,)) as pool:
                for found in pool.map(partial(_checked, place=place), cases):
                    yield from found
                    done += 1
        except BrokenProcessPool as failure:
            left = len(cases) - done
            warn(f"a process of the checks died ({_said(failure)}); the {left} cases left run in this one")
    yield from check_cases(cases[done:], place)


def workers_here() -> int:
    """Return how many processes the processors and the memory of the current CUDA device let work side by side."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return max(1, min(WORKERS, (os.cpu_count() or 1) - 1, free_bytes // WORKER_BYTES))


def _begin(device: int | None) -> None:
    torch.set_num_threads(1)
    if device is not None:
        torch.cuda.set_device(device)
        # A device that takes one process only is found out before anything is checked.
        torch.zeros(1, device="cuda")


def _checked(case: Case, place: Place) -> list[Check]:
    return list(check_cases([case], place))


def check_cases(cases: Iterable[Case], place: Place) -> Iterator[Check]:
    """Check each case with each kernel that it is for; a kernel that fails in any way is not right.

    Random numbers of the caller are left as they were.

    Args:
        cases: In order.
        place: Heads, windows, device.
    """
    cuda = torch.device(place.device).type == "cuda"
    for case in cases:
        with torch.random.fork_rng([torch.cuda.current_device()] if cuda else []):
            torch.manual_seed(SEED)
            yield from _checks(case, place)
        if cuda:
            free()


def _checks(case: Case, place: Place) -> Iterator[Check]:
    attempts, limit = _attempts(case, place)
    begin = time.monotonic()
    try:
        for kernel, attempt in attempts:
            if isinstance(attempt, str):
                yield Check(case.label, kernel, None, limit, missing=attempt)
            else:
                yield _check(case.label, kernel, limit, attempt, begin)
            begin = time.monotonic()
    # What cannot be prepared is not known to be right.
    except Exception as failure:
        yield Check(case.label, "all", None, limit, _said(failure), time.monotonic() - begin)


def _attempts(case: Case, place: Place) -> tuple[Iterator[Attempt], float]:
    if isinstance(case, DecodeCase):
        return decode_attempts(case, place), DECODE_LIMIT
    if isinstance(case, WriteCase):
        return write_attempts(case, place), WRITE_LIMIT
    return extend_attempts(case, place), EXTEND_LIMIT


def _check(label: str, kernel: str, limit: float, attempt: Callable[[], Verdict], begin: float) -> Check:
    error: float | None = None
    try:
        error, problem = attempt()
        if problem is None and not error <= limit:
            problem = f"relative error {error:.2e}, at most {limit:g} is right"
    # One kernel that fails must not hide what the others do.
    except Exception as failure:
        problem = _said(failure)
    if error is not None and not math.isfinite(error):
        error = None
    return Check(label, kernel, error, limit, problem, time.monotonic() - begin)


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"[:MESSAGE]
