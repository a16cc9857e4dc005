"""Read memory and do nothing else: the ceiling that attention over a cache is compared with.

Formula: ``sums_i = sum(data[i block : (i + 1) block])`` in int32 that wraps around.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# (elements of a program, warps): which one is best differs by chip.
BLOCKS = ((4096, 4), (8192, 4), (16384, 8))


@triton.jit
def _read_kernel(data, sums, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(data + at), 0))


def sums_for(data: Tensor, block: tuple[int, int]) -> Tensor:
    """Return an output of `read_all`, int32, one element a program."""
    return torch.empty(data.numel() // block[0], dtype=torch.int32, device=data.device)


def read_all(data: Tensor, sums: Tensor, block: tuple[int, int]) -> None:
    """Read every element once.

    Args:
        data: int32, contiguous, a multiple of ``block[0]`` elements.
        sums: From `sums_for`.
        block: One of `BLOCKS`.

    Raises:
        ValueError: other data or sums.
    """
    size, warps = block
    if data.dtype != torch.int32 or sums.dtype != torch.int32 or not data.is_contiguous():
        raise ValueError(f"data {data.dtype} and sums {sums.dtype} must be contiguous int32")
    if data.numel() != sums.numel() * size:
        raise ValueError(f"{data.numel()} elements are not {sums.numel()} programs of {size}")
    _read_kernel[(sums.numel(),)](data, sums, BLOCK=size, num_warps=warps)


def reference_read_all(data: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the sums in torch."""
    return data.view(-1, block[0]).sum(1, dtype=torch.int32)


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled: name, kernel, signature, constants and options of every launch."""
    signature = {"data": "*i32", "sums": "*i32", "BLOCK": "constexpr"}
    return [(f"read {size}", _read_kernel, signature, {"BLOCK": size}, {"num_warps": warps}) for size, warps in BLOCKS]
