"""What launches through `cuda.core` share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvcq.kernels.cuda.compile import core

WARP = 32


@lru_cache(maxsize=256)
def config(grid: int | tuple[int, int, int], threads: int, shared: int) -> Any:
    """Return a launch of `grid` blocks of so many threads and bytes of shared memory."""
    return core().LaunchConfig(grid=grid, block=threads, shmem_size=shared)


@lru_cache(maxsize=64)
def stream(handle: int, device: int) -> Any:
    """Return the stream of a handle: the default stream has the same one on every device."""
    return core().Stream.from_handle(handle)
