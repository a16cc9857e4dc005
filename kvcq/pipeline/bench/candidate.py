"""A kernel on trial: checked against float64 first, and timed only if it is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.pipeline.bench.result import Row
from kvcq.pipeline.bench.shapes import Shape
from kvcq.pipeline.bench.timing import Call, free, time_calls

# Compilers put whole programs into theirs.
MESSAGE = 300


@dataclass(frozen=True)
class Candidate:
    """One kernel over the layers of a step.

    Attributes:
        calls: One launch for each layer.
        outs: What they write, poisoned before they run.
        error: Relative error of the first layer's output; None: nothing here is compared.
        limit: What it may be at most.
    """

    calls: Sequence[Call]
    outs: list[Tensor]
    error: Callable[[], float] | None
    limit: float


def trial(
    op: str,
    shape: Shape,
    codec: str,
    kernel: str,
    prepare: Callable[[], Candidate],
    repeats: int,
    *,
    bytes_read: int | None = None,
    bf16_us: float | None = None,
) -> Row:
    """Check a kernel and time it.

    A kernel that refuses the shape gives a row without a time; one that is off, differs between eager launches and
    replays of a graph, or raises anything else, a row that is wrong.
    """
    error: float | None = None
    timing, problem, wrong = None, None, False
    try:
        candidate = prepare()
        poison(candidate.outs)
        for call in candidate.calls:
            call()
        error = None if candidate.error is None else candidate.error()
        if error is not None and not error <= candidate.limit:
            problem, wrong = f"relative error {error:.2e}, at most {candidate.limit:g} is right", True
        else:
            eager = [out.clone() for out in candidate.outs]
            timing = time_calls(candidate.calls, repeats, captured=lambda: poison(candidate.outs))
            if not all(torch.equal(one, two) for one, two in zip(eager, candidate.outs, strict=True)):
                timing, problem, wrong = None, "replays of a graph differ from eager launches", True
    except UnsupportedError as refusal:
        problem = str(refusal)
    # One kernel that fails must not take the figures of the others with it.
    except Exception as failure:
        problem, wrong = f"{type(failure).__name__}: {failure}"[:MESSAGE], True
    candidate = eager = None  # type: ignore[assignment]
    free()
    return Row(op, shape, codec, kernel, timing, bytes_read, bf16_us, error, problem, wrong)


def poison(outs: list[Tensor]) -> None:
    """Fill outputs with NaN: what a kernel leaves out shows."""
    for out in outs:
        out.view(torch.uint8).fill_(0xFF)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return ``|found - wanted| / |wanted|``; infinite when something is not finite."""
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf
