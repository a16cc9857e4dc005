"""Write tokens: map keys and values into the frame, code them, store codes and exact rows where they belong.

For a row x of head h (keys; values alike)::

    r = bf16(x A_h - mu A_h)                                 the row of sinks, rings and `rows`, and what is coded
    r' = clamp(r, -t, t),   t = sorted(|r|)[rank]             exact: a search over the bits of the magnitude
    s = fp16((max - min) / (2^bits - 1)),  b = fp16(min)      of every group, or placed for Gaussian rows
    code = clamp(floor((r' - b) / s + 1/2))                   0 where s is 0
    or, in vector codes: rho = fp16(sqrt(mean r^2)), the nearest word to r / rho of every 4 channels

Bits are those of `codecs.packing`. A program codes 64 tokens of one head and side; the same arithmetic serves one
token and thousands, so codes never depend on how many come together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from kvcq.codecs.uniform import LLOYD_STEPS, LLOYD_THRESHOLD
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import MAX_HEAD_DIM, LayerCache, Requests, SideTables, Tables
from kvcq.kernels.checks import check_platform, check_tensor, padded
from kvcq.kernels.cuda.compile import HEAD_DIMS, missing
from kvcq.kernels.cuda.write import Tokens, device_unserved, keys_unserved, uniform_unserved, write_rows
from kvcq.kernels.limits import device_limits
from kvcq.kernels.select import SHARED_BYTES, Limits
from kvcq.kernels.write_kernel import write_kernel
from kvcq.spec.codec import Spacing

TOKENS = 64
# Programs below which the vector codes of a tile are shared out, so that a decode step fills the chip.
FEW_PROGRAMS = 256
# At most what the loads of a search take besides when they are two stages deep.
PIPELINE_BYTES = 76 * 1024


@dataclass(frozen=True)
class Launch:
    """How a layer is compiled.

    Attributes:
        warps: Warps of a program.
        stages: Depth of the loop over groups of a codebook.
        words: Words that one matrix product scores.
        inner: Channels of one step of a frame product, uniform codes.
        registers: Most registers of a thread: fewer let more programs run at once. None leaves it to the compiler.
    """

    warps: int
    stages: int
    words: int
    inner: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What the compiler takes besides constants."""
        chosen = {"num_warps": self.warps, "num_stages": self.stages}
        return chosen if self.registers is None else chosen | {"maxnreg": self.registers}

    def shared_bytes(self, d_k: int, d_v: int, vq: bool) -> int:
        """Return an upper bound of the shared memory of a program: rows and part of a map, of one side at a time."""
        columns, inner = padded(max(d_k, d_v)), min(padded(max(d_k, d_v)), self.inner)
        uniform = inner * (TOKENS + columns)
        whole = padded(d_k)
        vector = whole * (TOKENS + slab(d_k)) if vq else 0
        return 2 * max(uniform, vector) + (PIPELINE_BYTES if vq and self.stages > 1 else 0)


def choose_launch(d_k: int, d_v: int, vq: bool, shared: int = SHARED_BYTES) -> Launch:
    """Return the first launch of a geometry, in the order of what an H200 measured, that fits a device.

    Args:
        d_k: Key head dim.
        d_v: Value head dim.
        vq: Keys are in vector codes, and written here.
        shared: Bytes of shared memory that a program may have.

    Raises:
        UnsupportedError: no launch fits.
    """
    # Vector codes in one stage want eight warps: with four that form failed on an H200.
    narrow = (Launch(4, 2, 128, 64), Launch(8, 1, 128, 64)) if vq else (Launch(4, 1, 128, 64),)
    for launch in narrow if max(d_k, d_v) <= 128 else (Launch(8, 1, 128, 64),):
        need = launch.shared_bytes(d_k, d_v, vq)
        if need <= shared:
            return launch
    raise UnsupportedError(f"head dims {d_k} and {d_v} take {need} bytes of shared memory, the device has {shared}")


def write(
    tables: Tables,
    cache: LayerCache,
    k: Tensor,
    v: Tensor,
    *,
    slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    batch: Requests,
    rows: tuple[Tensor, Tensor] | None,
    windows: bool,
    clamped: Tensor,
    backend: Literal["triton", "cuda"] | None = None,
) -> None:
    """Code tokens into their pages, and keep their exact rows on demand.

    One launch; in CUDA two for keys in vector codes whose head dim is not that of the values. What one side has no CUDA
    kernel for is written by Triton beside it.

    Args:
        tables: Constants of the layer.
        cache: Written to.
        k: Keys ``[T, H, d_k]``, post-RoPE, served dtype; rows may lie anywhere, their elements are adjacent.
        v: Values ``[T, H, d_v]``, likewise.
        slots: int64 ``[T]``, page times 64 plus place, all different; negative: nothing of the token is stored.
        positions: int32 ``[T]``.
        requests: int32 ``[T]``, row of each token in `batch`.
        batch: The requests, these tokens included in their lengths.
        rows: Outputs ``[T, H, d_k]`` and ``[T, H, d_v]`` for the frame rows r and v' of every token, or None.
        windows: Whether rows are stored in sinks (positions below S) and rings (the last R positions of a request).
        clamped: int64 ``[1]``; the number of values that float16 could not hold is added.
        backend: Whose codes: on a border the other may code a row otherwise, so a cache takes one for all tokens.
            None: `chosen_sides`, which depends on layer, dtype and device alone.

    Raises:
        UnsupportedError: a geometry, codec or platform without a kernel.
        UnavailableError: `cuda.core` is not installed and was asked for, or does not load.
        ValueError: shapes, dtypes or devices that do not fit together, or, in CUDA, storage that is not aligned to 16
            bytes.
    """
    _check(tables, cache, k, v, slots, positions, requests, batch, rows, clamped)
    tokens, heads = k.shape[0], tables.heads
    if tokens == 0:
        return
    limits, keys, values = _limits(k.device), False, False
    if backend is None:
        keys, values = chosen_sides(tables, k.dtype, k.device)
    elif backend == "cuda":
        keys, values = cuda_sides(tables, k.dtype, limits)
        if not (keys or values):
            raise UnsupportedError("no CUDA kernel writes this layer", fix="use the Triton kernel")
    if keys or values:
        given = Tokens(slots, positions, requests, batch, rows, windows, clamped)
        write_rows(tables, cache, k, v, given, limits, values=values)
        if values:
            return
    here = not keys
    launch = choose_launch(tables.k.d, tables.v.d, tables.vq and here, limits.shared_bytes)
    tiles = triton.cdiv(tokens, TOKENS)
    parts = max(1, min(FEW_PROGRAMS // (tiles * heads), tables.k.d // 16)) if tables.vq else 1
    absent = slots
    search = tables.search if here else None
    write_kernel[(tiles, heads, parts + 1 if here else 1)](
        k, v, tables.k.map, tables.v.map, tables.k.shift, tables.v.shift,
        absent if tables.codebook is None else tables.codebook,
        absent if search is None else search,
        absent if tables.codebook_scale is None else tables.codebook_scale,
        cache.pages, cache.pages.view(torch.int32), slots, positions, requests, batch.slots, batch.lengths,
        cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v,
        k if rows is None else rows[0], v if rows is None else rows[1], clamped,
        tokens, heads, k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.windows.sink, cache.ring, parts,
        ROWS=rows is not None, WINDOWS=windows, ASM=k.is_cuda,
        **_constants(tables.k, tables.v, tables.words, tables.vq, here, launch), **launch.options,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _limits(device: torch.device) -> Limits:
    """Return what a device offers; the interpreter takes what an H200 does."""
    return device_limits(device) if device.type == "cuda" else Limits(None)


@lru_cache(maxsize=1)
def _without_cuda() -> str | None:
    """Say why nothing can be compiled in CUDA; looked up once: every write of a decode step asks."""
    return missing()


def chosen_sides(tables: Tables, dtype: torch.dtype, device: torch.device) -> tuple[bool, bool]:
    """Return whether CUDA writes the keys and the values of a layer where nobody says who: where it can; else Triton.

    It is exact as Triton is, and was faster wherever both were measured: 8 heads of 128 channels on compute capability
    9.0, one decode step and long chunks.

    Args:
        tables: Constants of the layer.
        dtype: Of its rows.
        device: Where they are.
    """
    return (False, False) if _without_cuda() is not None else cuda_sides(tables, dtype, _limits(device))


def writers(tables: Tables, dtype: torch.dtype, device: torch.device) -> str:
    """Name what writes a layer: ``cuda``, ``triton``, or which side is whose."""
    keys, values = chosen_sides(tables, dtype, device)
    if keys == values:
        return "cuda" if keys else "triton"
    return "cuda (keys) and triton (values)"


def cuda_sides(tables: Tables, dtype: torch.dtype, limits: Limits) -> tuple[bool, bool]:
    """Return whether CUDA kernels write the keys and the values of a layer: of any tokens, so that codes agree."""
    if device_unserved(dtype, limits) is not None:
        return False, False
    values = uniform_unserved(tables.v) is None
    if tables.vq:
        keys = keys_unserved(tables) is None
        return keys, keys and values
    both = values and uniform_unserved(tables.k) is None and tables.k.d == tables.v.d
    return both, both


def slab(d: int) -> int:
    """Return the channels that a frame product makes at once before a search."""
    return min(padded(d), 32 if d > 128 else 64)


def _constants(k: SideTables, v: SideTables, words: int, vq: bool, keys: bool, launch: Launch) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    pad_k, pad_v = padded(k.d), padded(v.d)
    # A search keeps whole rows at hand; otherwise d steps of `inner` channels bound the shared memory.
    whole = padded(k.d)
    return {
        "DK": k.d, "DV": v.d, "PK": pad_k, "PV": pad_v,
        "KBK": whole if vq else min(whole, launch.inner), "KBV": min(pad_v, launch.inner),
        "KG": k.groups, "VG": v.groups, "K_BITS": k.bits, "V_BITS": v.bits, "K_RANK": k.rank, "V_RANK": v.rank,
        "K_STEP": _step(k.spacing), "V_STEP": _step(v.spacing), "K_OUTER": _outer(k.spacing),
        "V_OUTER": _outer(v.spacing), "WORDS": words, "VQ": vq, "KEYS": keys,
        "PRECISION": "ieee" if k.map.dtype == torch.float32 else "tf32",
        "M": TOKENS, "N": launch.words, "NB": slab(k.d),
    }  # fmt: skip


def _step(spacing: Spacing) -> float:
    return 0.0 if spacing == "minmax" else LLOYD_STEPS[spacing]


def _outer(spacing: Spacing) -> float:
    return 0.0 if spacing == "minmax" else LLOYD_THRESHOLD / LLOYD_STEPS[spacing]


def _check(
    tables: Tables,
    cache: LayerCache,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    batch: Requests,
    rows: tuple[Tensor, Tensor] | None,
    clamped: Tensor,
) -> None:
    """Check every assumption of the kernel."""
    check_platform(k.device)
    tokens, heads, served = k.shape[0], tables.heads, tables.k.map.dtype
    for name, side in (("k", tables.k), ("v", tables.v)):
        if side.d % 16 or not 16 <= side.d <= MAX_HEAD_DIM or side.groups not in (1, 4) or side.bits not in (2, 4):
            raise UnsupportedError(f"head dim {side.d}, {side.groups} groups, {side.bits} bits: no kernel", where=name)
    if served not in ((torch.bfloat16, torch.float16, torch.float32) if k.is_cuda else (torch.float16, torch.float32)):
        raise UnsupportedError(f"rows are {served} on {k.device.type}", where="k")
    sink, ring, buffers = cache.windows.sink, cache.ring, cache.ring_k.shape[0]
    d_k, d_v = tables.k.d, tables.v.d
    check_tensor("k", k, (tokens, heads, d_k), served, k.device, contiguous=False)
    check_tensor("v", v, (tokens, heads, d_v), served, k.device, contiguous=False)
    expected: list[tuple[str, Tensor | None, torch.dtype, tuple[int | None, ...]]] = [
        ("pages", cache.pages, torch.uint8, (None, heads, tables.block_bytes)),
        ("sink_k", cache.sink_k, served, (buffers, heads, sink, d_k)),
        ("sink_v", cache.sink_v, served, (buffers, heads, sink, d_v)),
        ("ring_k", cache.ring_k, served, (buffers, heads, ring, d_k)),
        ("ring_v", cache.ring_v, served, (buffers, heads, ring, d_v)),
        ("slots", slots, torch.int64, (tokens,)),
        ("positions", positions, torch.int32, (tokens,)),
        ("requests", requests, torch.int32, (tokens,)),
        ("batch.slots", batch.slots, torch.int32, (batch.batch,)),
        ("batch.lengths", batch.lengths, torch.int32, (batch.batch,)),
        ("clamped", clamped, torch.int64, (1,)),
        ("rows[0]", None if rows is None else rows[0], served, (tokens, heads, d_k)),
        ("rows[1]", None if rows is None else rows[1], served, (tokens, heads, d_v)),
        ("k.map", tables.k.map, served, (heads, d_k, d_k)),
        ("v.map", tables.v.map, served, (heads, d_v, d_v)),
        ("k.shift", tables.k.shift, torch.float32, (heads, d_k)),
        ("v.shift", tables.v.shift, torch.float32, (heads, d_v)),
        ("codebook", tables.codebook, torch.int32, (heads, d_k // 4, 256)),
        ("codebook_scale", tables.codebook_scale, torch.float32, (heads, d_k // 4)),
    ]
    for name, tensor, dtype, shape in expected:
        if tensor is not None:
            check_tensor(name, tensor, shape, dtype, k.device)


def _variant_side(d: int, groups: int, bits: int, spacing: Spacing) -> SideTables:
    square = torch.empty(1, d, d, dtype=torch.bfloat16, device="meta")
    row = torch.empty(1, d, device="meta")
    return SideTables(d, square, row, square, row, groups, bits, min(int(0.92 * d), d - 1), spacing)


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Return what to compile for a check without a GPU: name, kernel, signature, constants, options."""
    served, single = "*bf16", "*fp32"
    signature = dict.fromkeys(("k", "v", "map_k", "map_v"), served)
    signature |= {"shift_k": single, "shift_v": single, "codebook": "*i32", "search": served, "scales": single}
    signature |= {"pages": "*u8", "words": "*i32", "slots": "*i64"}
    signature |= dict.fromkeys(("positions", "requests", "buffers", "lengths"), "*i32")
    signature |= dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v", "out_k", "out_v"), served)
    signature |= {"clamped": "*i64"}
    signature |= dict.fromkeys(("tokens", "heads", "k_token", "k_head", "v_token", "v_head", "S", "R", "parts"), "i32")
    found = []
    for d_k, d_v in ((16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
        for kind in ("int2", "groups", "int4", "lloyd", "vq", "vq_groups", "values"):
            vq, groups = kind.startswith("v"), 4 if kind.endswith("groups") else 1
            if kind == "values" and d_k not in HEAD_DIMS:
                continue
            k, v = (
                _variant_side(d, side_groups, 4 if kind == "int4" else 2, "lloyd-nova" if kind == "lloyd" else "minmax")
                for d, side_groups in ((d_k, 1 if vq else groups), (d_v, groups))
            )
            keys = kind != "values"
            launch = choose_launch(d_k, d_v, vq and keys)
            # What is stored besides does not change with the geometry.
            for rows in (False, True) if d_k == d_v == 128 else (False,):
                constants = _constants(k, v, groups, vq, keys, launch) | {"ROWS": rows, "WINDOWS": True, "ASM": True}
                found.append(
                    (
                        f"write-{kind}-{d_k}-{d_v}{'-rows' if rows else ''}",
                        write_kernel,
                        signature | dict.fromkeys(constants, "constexpr"),
                        constants,
                        launch.options,
                    )
                )
    return found
