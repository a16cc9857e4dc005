"""What launches through `cuda.core` share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvcq.kernels.cuda.compile import core

WARP = 32
OVERLAP_FIELD = "programmatic_stream_serialization"


@lru_cache(maxsize=256)
def config(grid: int | tuple[int, int, int], threads: int, shared: int, overlap: bool = False) -> Any:
    """Return a launch of `grid` blocks of so many threads and bytes of shared memory.

    Args:
        grid: Blocks.
        threads: Threads of a block.
        shared: Bytes of shared memory of a block.
        overlap: It may begin before the launch in front of it has ended, see `kernels.overlap`; without effect where
            `cuda.core` does not have that.
    """
    kind = core().LaunchConfig
    more = {OVERLAP_FIELD: True} if overlap and hasattr(kind, OVERLAP_FIELD) else {}
    return kind(grid=grid, block=threads, shmem_size=shared, **more)


@lru_cache(maxsize=64)
def stream(handle: int, device: int) -> Any:
    """Return the stream of a handle: the default stream has the same one on every device."""
    return core().Stream.from_handle(handle)
