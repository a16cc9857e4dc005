"""The least time of a decode step: every byte that it must read, once, at the rate of the memory."""

from __future__ import annotations

from kvcq.pipeline.bench_serve.arms import Running
from kvcq.pipeline.bench_serve.measure import Bound
from kvcq.pipeline.bench_serve.model import Subject
from kvcq.spec.plan import Windows


def cache_bytes(length: int, bf16_cell: int, cell: int | None = None, windows: Windows | None = None) -> int:
    """Return the bytes of the cache that one request reads in a step.

    Args:
        length: Tokens behind it.
        bf16_cell: Bytes of a BF16 token in all layers.
        cell: Bytes of a coded one; None: the cache is BF16.
        windows: What is read exactly besides the codes of the rest.
    """
    if cell is None or windows is None:
        return length * bf16_cell
    exact = min(length, windows.sink + windows.recent)
    return exact * bf16_cell + (length - exact) * cell


def make_bound(subject: Subject, bandwidth: float, ranks: int = 1) -> Bound:
    """Return the bound of a step: ms for so many requests of so many tokens; None where bytes are not known.

    Args:
        subject: What is served.
        bandwidth: GB/s of one GPU.
        ranks: GPUs that share the weights and the cache.
    """

    def bound(running: Running, requests: int, length: int) -> float | None:
        weights, bf16_cell = subject.weights, subject.bf16_cell
        if weights is None or bf16_cell is None:
            return None
        cell = windows = None
        if running.arm.bundle is not None:
            cell, windows = running.cell, subject.bundles[running.arm.bundle][1].manifest.recipe.windows
        return (weights + requests * cache_bytes(length, bf16_cell, cell, windows)) / ranks / bandwidth / 1e6

    return bound
