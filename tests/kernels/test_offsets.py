"""Pages behind the first 4 GiB: offsets of 32 bits would read and write somewhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvcq.kernels.select import Backend
from kvcq.kernels.write import write
from tests.kernels.build import build_case, relative_error
from tests.kernels.test_attention import error_of, reserved
from tests.kernels.test_extend import build_chunks
from tests.kernels.test_write import counter, tokens

FAR = 1 << 32
KINDS = pytest.mark.parametrize("kind", ["int2", "vq"])
# The CUDA kernels have larger heads.
KERNELS = pytest.mark.parametrize(
    ("backend", "d"),
    [
        ("triton", 16),
        pytest.param("triton", 64, marks=pytest.mark.gpu),
        pytest.param("cuda", 64, marks=pytest.mark.gpu),
    ],
)


def moved(pages: Tensor) -> tuple[Tensor, int]:
    """The same pages at the end of more than 4 GiB, and how many lie before them; what nobody touches costs nothing."""
    before = FAR // pages[0].numel() + 1
    room = torch.empty(before + pages.shape[0], *pages.shape[1:], dtype=torch.uint8, device=pages.device)
    room[before:] = pages
    return room, before


@KINDS
@KERNELS
def test_decode_reads_far_pages(kind: str, backend: Backend, d: int, device: torch.device, dtype: torch.dtype) -> None:
    case = build_case(kind, (70, 200), d_k=d, device=device, dtype=dtype)
    pages, before = moved(case.cache.pages)
    requests = replace(case.requests, page_table=case.requests.page_table + before)
    case = replace(case, cache=replace(case.cache, pages=pages), requests=requests)
    assert error_of(case, reserved(case, backend=backend)) < 2e-3


@KINDS
def test_extend_reads_far_pages(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    chunks = build_chunks(kind, [(100, 9)], dtype, device, d_k=16)
    pages, before = moved(chunks.cache.pages)
    requests = replace(chunks.requests, page_table=chunks.requests.page_table + before)
    found, wanted = replace(chunks, cache=replace(chunks.cache, pages=pages), requests=requests).outputs()
    assert relative_error(found, wanted) < 2e-3


@KINDS
@KERNELS
def test_write_reaches_far_pages(
    kind: str, backend: Literal["cuda", "triton"], d: int, device: torch.device, dtype: torch.dtype
) -> None:
    case = build_case(kind, [70], d_k=d, device=device, dtype=dtype, fill=False)
    at = tokens(case)
    pages, before = moved(case.cache.pages)
    for cache, first in ((case.cache, 0), (replace(case.cache, pages=pages), before)):
        place = at | {"slots": at["slots"] + 64 * first}
        more = {"rows": None, "windows": False, "clamped": counter(case), "backend": backend}
        write(case.tables, cache, case.k[0], case.v[0], **place, **more)
    assert not torch.equal(case.cache.pages, torch.full_like(case.cache.pages, 0xFF))
    assert torch.equal(pages[before:], case.cache.pages)
