"""Check the kernels over ragged batches, beyond what is timed: near float64, one by one as in bulk, in graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

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


def check_cases(cases: Iterable[Case], place: Place) -> Iterator[Check]:
    """Check each case with each kernel that serves it; a kernel that fails in any way is not right.

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
