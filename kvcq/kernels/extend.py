"""Extend: a chunk of new tokens attends to the coded history in pages, to sinks, ring and to itself, causally.

For the query at position i of a request whose chunk starts at position `first`, with S sinks::

    r_j, v'_j = decoded from the page   where S <= j < oldest_i
              = exact                   where j < S or j >= oldest_i: of the chunk for j >= first, else sink or ring
    logit_j = scaling q~_i . r_j                              j <= i, and j > i - window
            = c tanh(scaling (q~_i . r_j + q_i . mu) / c)     with a softcap c
    o' = sum_j softmax(logit)_j v'_j,   o = o' R_V^T + nu m,   m the softmax mass of the rows

A program has one block of queries of one KV head: the tokens times the heads of the group fill the rows of the matrix
instructions, so a tile of the history is unpacked once for all of them. Decoded elements are float16: one rounding of
``scale code + bias``, eight times finer than the exact rows. Queries that meet them are divided by a power of two
(with vector keys: multiplied by the scales of the codebook first), so that float16 holds them too. The history is
never written to memory decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import MAX_HEAD_DIM, LayerCache, Requests, Tables
from kvcq.kernels.checks import check_offset, check_platform, check_positive, padded
from kvcq.kernels.extend_kernel import extend_kernel, halve_kernel
from kvcq.kernels.select import MAX_GROUP, SHARED_BYTES

HALVE_ROWS = 32
WIDE_HEAD = 128
FILLING = 128

_INT8, _INT32, _FLOAT, _SERVED = "*u8", "*i32", "*fp32", "*bf16"
SIGNATURE: dict[str, str] = (
    {"q": _SERVED, "halves": "*fp16", "units": _FLOAT, "pages": _INT8}
    | dict.fromkeys(("table", "lengths", "exact_from", "slots", "starts", "oldest"), _INT32)
    | dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v", "rows_k", "rows_v"), _SERVED)
    | {"book": _INT32, "offset": _FLOAT, "sinks": _FLOAT, "dual": _SERVED, "nu": _FLOAT}
    | {"out": _SERVED}
    | dict.fromkeys(("batch", "columns", "kv_heads", "sink", "ring", "window"), "i32")
    | {"scaling": "fp32", "softcap": "fp32"}
)
HALVE_SIGNATURE: dict[str, str] = {
    "q": _SERVED, "book_scale": _FLOAT, "halves": "*fp16", "units": _FLOAT, "rows": "i32", "q_heads": "i32"
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How a program is shaped: rows of queries, keys of a tile, warps, depth of the pipeline of loads of exact rows."""

    rows: int
    keys: int
    warps: int
    stages: int = 2

    def shared_bytes(self, d_k: int, d_v: int) -> int:
        """Return an upper bound of the shared memory of a program."""
        pad_k, pad_v = padded(d_k), padded(d_v)
        attend = self.rows * pad_k + self.keys * (self.stages * pad_k + 2 * pad_v)
        turn = (64 if pad_v <= WIDE_HEAD else 32) * (self.stages * pad_v + self.rows)
        return 2 * max(attend, turn)


LAUNCHES = (
    Launch(rows=256, keys=64, warps=8),
    Launch(rows=128, keys=64, warps=8),
    Launch(rows=64, keys=64, warps=4),
    Launch(rows=64, keys=32, warps=4),
    Launch(rows=32, keys=16, warps=4),
)


def choose_launch(d_k: int, d_v: int, rows: int, requests: int, heads: int, shared: int = SHARED_BYTES) -> Launch:
    """Return the largest launch of the table that fills the GPU and fits into its shared memory.

    One H200, 32 query and 8 KV heads, d = 128, in ms, by rows of a program, INT2 and vector codes (upper bounds but for
    7.10: the GPU was shared)::

        chunk on history            256            128             64     BF16 flash attention
        4096 on 28672       5.57   7.10    7.92   8.83    6.60   14.3     6.01
         512 on 28672       1.31   1.67    0.76   1.04    0.80   1.06     0.84
          64 on 28672       1.42   1.74    0.75   1.06    0.59   0.79

    Args:
        d_k: Key head dim.
        d_v: Value head dim.
        rows: Query rows of a KV head, tokens times group, of all requests.
        requests: How many requests share them.
        heads: KV heads.
        shared: Bytes of shared memory that a program may have.

    Raises:
        UnsupportedError: no launch fits.
    """
    average = rows // max(requests, 1)
    for launch in LAUNCHES:
        wide = max(padded(d_k), padded(d_v)) > WIDE_HEAD
        if launch.rows > 64 and (average < launch.rows or rows * heads < FILLING * launch.rows):
            continue
        if launch.shared_bytes(d_k, d_v) <= shared and not (wide and launch.rows > 128):
            return launch
    need = LAUNCHES[-1].shared_bytes(d_k, d_v)
    raise UnsupportedError(f"head dims {d_k} and {d_v} take {need} bytes of shared memory, the device has {shared}")


def extend(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    rows: tuple[Tensor, Tensor],
    *,
    starts: Tensor,
    oldest: Tensor,
    scaling: float,
    softcap: float | None = None,
    offset: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    out: Tensor,
    rotate: bool = True,
    launch: Launch | None = None,
) -> None:
    """Attend causally with a chunk of new tokens of every request; see the module for the formula.

    Nothing is read back to the host. Besides `out` it takes ``T Hq (2 d_k + 4)`` bytes for the length of the call:
    the queries as float16 and their units.

    Args:
        tables: Constants of the layer, 2-bit codes.
        cache: What is stored: the codes of the chunk are in the pages already, its exact rows are not in the rings.
        requests: The batch; lengths include the chunks.
        q: Mapped queries ``[T, Hq, d_k]``, the chunks one after another, served dtype.
        rows: Frame rows r ``[T, H, d_k]`` and v' ``[T, H, d_v]`` of the same tokens, served dtype.
        starts: int32 ``[B + 1]``, where the chunk of each request begins in `q`; `T` may be larger than the last
            one: the tokens behind it are padding.
        oldest: int32 ``[T]``, the oldest position behind the sinks that a query reads exactly. It counts as
            ``first - R`` (R rows of a ring) or `exact_from` where it lies before them: no exact row is left there.
        scaling: Factor on products.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        offset: ``q . mu`` float32 ``[T, Hq]``, read with a softcap or learned sinks only; None for keys that are not
            centred, or without these.
        sinks: Learned sink logits float32 ``[Hq]``.
        window: A query at i sees only ``j > i - window``.
        out: ``[T, Hq, d_v]``, served dtype; rows of padding tokens are left alone.
        rotate: False leaves o' as it is.
        launch: Shape of a program, None: by `choose_launch` and the device.

    Raises:
        UnsupportedError: head dims, groups, codes or devices that the kernel does not have.
        ValueError: tensors that do not fit together, or an `offset` that is missing.
    """
    group = _check(tables, cache, requests, q, rows, starts, oldest, offset, sinks, window, out)
    check_positive("scaling", scaling)
    check_positive("softcap", softcap)
    check_offset(tables.k.offset, offset, softcap, sinks)
    if q.shape[0] == 0 or requests.batch == 0:
        return
    k, v = tables.k, tables.v
    if launch is None:
        shared = SHARED_BYTES
        if q.is_cuda:
            shared = _shared_limit(torch.cuda.current_device() if q.device.index is None else q.device.index)
        launch = choose_launch(k.d, v.d, q.shape[0] * group, requests.batch, tables.heads, shared)
    if launch.rows < group:
        raise ValueError(f"{launch.rows} rows of a program do not hold a group of {group} heads")
    if launch.keys > PAGE_TOKENS:
        raise ValueError(f"a tile of {launch.keys} keys is more than a page of {PAGE_TOKENS} tokens")
    tokens = launch.rows // group
    blocks = triton.cdiv(q.shape[0], tokens) + requests.batch
    absent = requests.lengths
    half = torch.float32 if q.dtype == torch.float32 else torch.float16
    halves, units = torch.empty_like(q, dtype=half), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    count = q.shape[0] * q.shape[1]
    halve_kernel[(triton.cdiv(count, HALVE_ROWS),)](
        q, absent if tables.codebook_scale is None else tables.codebook_scale, halves, units, count, q.shape[1],
        GROUP=group, D=k.d, PAD=triton.next_power_of_2(k.d), VQ=tables.vq, M=HALVE_ROWS,
    )  # fmt: skip
    extend_kernel[(blocks, tables.heads)](
        q, halves, units, cache.pages, requests.page_table, requests.lengths, requests.exact_from, requests.slots,
        starts, oldest, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, rows[0], rows[1],
        absent if tables.codebook is None else tables.codebook,
        absent if offset is None else offset, absent if sinks is None else sinks,
        v.dual, absent if v.offset is None else v.offset, out,
        requests.batch, requests.page_table.stride(0), tables.heads, cache.windows.sink, cache.ring, window or 0,
        scaling, softcap or 1.0,
        GROUP=group, SHIFTED=offset is not None, CAP=softcap is not None, SINKS=sinks is not None,
        WINDOW=window is not None, ROTATE=rotate, ASM=q.is_cuda,
        **_geometry(k.d, v.d, k.groups, v.groups, tables.words, tables.vq, v.offset is not None, q.dtype),
        M=launch.rows, N=launch.keys, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


@cache
def _shared_limit(device: int) -> int:
    """Return the bytes of shared memory that a program may have."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def _geometry(
    d_k: int, d_v: int, k_groups: int, v_groups: int, words: int, vq: bool, centred: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the constants of a layer that the kernel is compiled for."""
    half = tl.float32 if dtype == torch.float32 else tl.float16
    return {
        "DK": d_k, "DV": d_v, "KP": padded(d_k), "VP": padded(d_v), "KG": k_groups, "VG": v_groups, "WORDS": words,
        "VQ": vq, "CENTRED": centred, "HALF": half,
    }  # fmt: skip


def _check(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    rows: tuple[Tensor, Tensor],
    starts: Tensor,
    oldest: Tensor,
    offset: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    out: Tensor,
) -> int:
    """Check every assumption of the kernel and return the query heads of a KV head."""
    check_platform(q.device)
    k, v, heads = tables.k, tables.v, tables.heads
    tokens, q_heads = q.shape[0], q.shape[1]
    if q_heads % heads or not 1 <= q_heads // heads <= MAX_GROUP:
        raise UnsupportedError(f"{q_heads} query heads on {heads} KV heads: groups are 1 to {MAX_GROUP}", where="q")
    if k.bits != 2 or v.bits != 2:
        raise UnsupportedError(f"extend reads codes of 2 bits, not {k.bits} and {v.bits}", where="tables")
    for side in (k, v):
        if side.groups not in (1, 4) or side.d % 16 or not 16 <= side.d <= MAX_HEAD_DIM:
            raise UnsupportedError(f"head dim {side.d} in {side.groups} groups has no kernel", where="tables")
    if q.dtype not in ((torch.bfloat16, torch.float16) if q.is_cuda else (torch.float16, torch.float32)):
        raise UnsupportedError(f"queries are {q.dtype} on {q.device.type}", where="q")
    if window is not None and window < 1:
        raise ValueError(f"a sliding window of {window} tokens shows nothing")
    slots, ring = cache.ring_k.shape[0], cache.ring
    batch, sink = requests.batch, cache.windows.sink
    pages, columns = cache.pages.shape[0], requests.page_table.shape[1]
    served, exact = q.dtype, torch.int32
    wanted: dict[str, tuple[Tensor | None, torch.dtype, tuple[int, ...]]] = {
        "q": (q, served, (tokens, q_heads, k.d)),
        "rows[0]": (rows[0], served, (tokens, heads, k.d)),
        "rows[1]": (rows[1], served, (tokens, heads, v.d)),
        "out": (out, served, (tokens, q_heads, v.d)),
        "pages": (cache.pages, torch.uint8, (pages, heads, tables.block_bytes)),
        "sink_k": (cache.sink_k, served, (slots, heads, sink, k.d)),
        "sink_v": (cache.sink_v, served, (slots, heads, sink, v.d)),
        "ring_k": (cache.ring_k, served, (slots, heads, ring, k.d)),
        "ring_v": (cache.ring_v, served, (slots, heads, ring, v.d)),
        "page_table": (requests.page_table, exact, (batch, columns)),
        "slots": (requests.slots, exact, (batch,)),
        "lengths": (requests.lengths, exact, (batch,)),
        "exact_from": (requests.exact_from, exact, (batch,)),
        "starts": (starts, exact, (batch + 1,)),
        "oldest": (oldest, exact, (tokens,)),
        "offset": (offset, torch.float32, (tokens, q_heads)),
        "sinks": (sinks, torch.float32, (q_heads,)),
        "v.dual": (v.dual, served, (heads, v.d, v.d)),
        "v.offset": (v.offset, torch.float32, (heads, v.d)),
        "codebook": (tables.codebook, torch.int32, (heads, k.d // 4, 256)),
        "codebook_scale": (tables.codebook_scale, torch.float32, (heads, k.d // 4)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
                f"wanted {dtype} {list(shape)} on {q.device}"
            )
        # Rows of the page table may be wider than what is used.
        if not (tensor.is_contiguous() or (name == "page_table" and tensor.stride(1) == 1)):
            raise ValueError(f"{name} is not contiguous: strides {list(tensor.stride())}")
    if cache.pages.data_ptr() % 4:
        raise ValueError(f"pages at address {cache.pages.data_ptr():#x} are not aligned to words of 4 bytes")
    return q_heads // heads


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Return what to compile for a check without a GPU: name, kernel, signature, constants, options."""
    long = {d: choose_launch(d, d, 1 << 16, 1, 8) for d in range(16, MAX_HEAD_DIM + 1, 16)}
    codecs: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
        ("", (1, 1), {}),
        ("-words4", (4, 4), {"CENTRED": True}),
        ("-vq", (1, 1), {"VQ": True}),
        ("-vq-words4", (1, 4), {"VQ": True, "CENTRED": True}),
    )
    cases: list[tuple[str, int, int, int, tuple[int, int], Launch, dict[str, Any]]] = [
        (f"d{d}-g{group}{name}", d, d, group, groups, long[d], more)
        for d in (64, 80, 96, 128, 256)
        for group in (1, 4, 8)
        for name, groups, more in codecs
    ]
    cases += [
        (f"d128-g{group}{name}", 128, 128, group, groups, long[128], more)
        for group in (2, 3, 7, 16)
        for name, groups, more in (codecs[0], codecs[2])
    ]
    cases += [(f"d128-rows{launch.rows}-{launch.keys}", 128, 128, 4, (1, 1), launch, {}) for launch in LAUNCHES[1:]]
    cases += [
        ("d192-d128", 192, 128, 16, (1, 1), long[192], {"CAP": True}),
        ("d16", 16, 16, 1, (1, 1), long[16], {"ROTATE": False}),
        ("d128-v-words4", 128, 128, 7, (1, 4), long[128], {"WINDOW": True}),
        ("d64-vq-sinks", 64, 64, 8, (1, 1), long[64], {"VQ": True, "SINKS": True, "SHIFTED": True, "CENTRED": True}),
        ("d80-vq-cap", 80, 80, 1, (1, 1), long[80], {"VQ": True, "CAP": True}),
    ]
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for name, d_k, d_v, group, (k_groups, v_groups), launch, more in cases:
        constants: dict[str, Any] = dict.fromkeys(("CAP", "SINKS", "WINDOW", "SHIFTED"), False)
        constants |= _geometry(d_k, d_v, k_groups, v_groups, max(k_groups, v_groups), False, False, torch.bfloat16)
        constants |= {"GROUP": group, "ROTATE": True, "ASM": True, "M": launch.rows, "N": launch.keys} | more
        signature = SIGNATURE | dict.fromkeys(constants, "constexpr")
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        found.append((f"extend-{name}", extend_kernel, signature, constants, options))
    for name, d, vq in (("int2", 80, False), ("vq", 256, True)):
        constants = {"GROUP": 4, "D": d, "PAD": triton.next_power_of_2(d), "VQ": vq, "M": HALVE_ROWS}
        signature = HALVE_SIGNATURE | dict.fromkeys(constants, "constexpr")
        found.append((f"extend-halve-{name}", halve_kernel, signature, constants, {"num_warps": 4, "num_stages": 2}))
    return found
