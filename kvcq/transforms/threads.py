"""Decompositions with one result: a context in which torch computes on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch on one intra-op thread, then restore the former number.

    LAPACK results differ bitwise between thread counts, and artifacts must not.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
