"""Which decode kernel a layer gets on a device, how it is launched, and why: a pure function of what is written here.

Where both were measured, on compute capability 9.0 at the shapes of `MEASURED`, the CUDA kernels are faster than those
of Triton. They are taken wherever they can run; a reason claims no more than was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvcq.kernels.cuda.compile import Shape, Variant, missing, unserved
from kvcq.spec.plan import Windows

if TYPE_CHECKING:
    from kvcq.kernels.arrays import Tables

Backend = Literal["cuda", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = ("cuda", "triton")

# bfloat16 matrix instructions exist from here on; Triton asks for the same.
LOWEST_CAPABILITY = (8, 0)

# Query heads of a KV head that any kernel has.
MAX_GROUP = 16

# Where CUDA and Triton were timed beside each other: capability, head dims and query heads of a KV head.
MEASURED_CAPABILITY = (9, 0)
MEASURED = {(128, 4), (64, 8)}

# Of an H200; other devices say their own.
MULTIPROCESSORS = 132
SHARED_BYTES = 232_448

# The driver keeps this much of a multiprocessor's shared memory for each block.
RESERVED_SHARED = 1024

PAGE = 64

# Four blocks of four warps fill the registers of a multiprocessor at 128 a thread; wide heads of large groups need
# 168, and with a softcap more than that.
FULL, WIDE, WIDE_CAPPED = Shape(4, 4), Shape(4, 3), Shape(4, 2)
WIDE_GROUP, WIDE_HEAD = 5, 128

# Rows of an exact item, by the smallest batch that they are for. From five requests on, the default windows of one are
# a single block a KV head; coded items of few requests are short, and such a block would end long after them.
CUDA_EXACT_ROWS = ((5, 320), (3, 160), (1, 80))

# Coded items of a request are about this often the root of its pages, so that neither the start of many items nor the
# end of long ones costs much; they are rounded up to whole rounds of blocks. Longer contexts than this may be reserved
# for without ever coming: they count as this.
ITEMS_OF_ROOT, COUNTED_CONTEXT = 0.3, 32_768

# Programs of one warp a multiprocessor and exact rows of an item, by the smallest batch and the fewest pages of all
# requests that they are for. Sixteen warps run at once: more work is cut into more rounds, which even out at the end.
TRITON_CUTS = ((128, 0, 64, 160), (32, 6144, 48, 160), (32, 0, 24, 160), (5, 0, 32, 160), (1, 0, 16, 32))

# Vector codes in Triton wait for look-ups: more rounds at once.
TRITON_WORDS_BATCH, TRITON_WORDS_CUT = 32, (64, 160)


@dataclass(frozen=True)
class Limits:
    """What a device offers.

    Attributes:
        capability: Compute capability, None without an NVIDIA GPU.
        multiprocessors: Their number.
        shared_bytes: Shared memory that a block may have.
        hip: Version of HIP where torch was built for it.
    """

    capability: tuple[int, int] | None
    multiprocessors: int = MULTIPROCESSORS
    shared_bytes: int = SHARED_BYTES
    hip: str | None = None


@dataclass(frozen=True)
class Layer:
    """What of a layer decides.

    Attributes:
        d_k: Key head dim.
        d_v: Value head dim.
        heads: KV heads.
        group: Query heads of a KV head.
        vq: Keys are in vector codes.
        words: Scales of a row.
    """

    d_k: int
    d_v: int
    heads: int
    group: int
    vq: bool
    words: int = 1


@dataclass(frozen=True)
class Choice:
    """How a layer is decoded.

    Attributes:
        backend: ``cuda``, ``triton``, or ``torch``: no kernel.
        reason: Why, in words.
        parts: Coded items of a plan.
        exact_rows: Rows of an exact item.
    """

    backend: Backend
    reason: str
    parts: int = 1
    exact_rows: int = CUDA_EXACT_ROWS[0][1]


def choose(
    capability: tuple[int, int] | None,
    tables: Tables,
    group: int,
    *,
    batch: int = 1,
    context: int = COUNTED_CONTEXT,
    windows: Windows | None = None,
    dtype: str = "bfloat16",
    without: str | None = "",
    limits: Limits | None = None,
) -> Choice:
    """Choose the kernel of a layer from its constants, see `choose_layer`.

    Args:
        capability: Compute capability, None without an NVIDIA GPU.
        tables: The layer.
        group: Query heads of a KV head.
        batch: Requests of a step, about.
        context: Tokens of the longest request, about.
        windows: S and W, None: the defaults.
        dtype: Served dtype.
        without: Why `cuda.core` cannot be used, None where it can; "": look.
        limits: Of the device, `capability` included; None: those of an H200 with that capability.
    """
    layer = Layer(tables.k.d, tables.v.d, tables.heads, group, tables.vq, tables.words)
    reason = missing() if without == "" else without
    work: dict[str, Any] = {"batch": batch, "context": context, "windows": windows, "dtype": dtype}
    return choose_layer(limits or Limits(capability), layer, reason, **work)


def choose_layer(
    limits: Limits,
    layer: Layer,
    without: str | None,
    *,
    batch: int = 1,
    context: int = COUNTED_CONTEXT,
    windows: Windows | None = None,
    dtype: str = "bfloat16",
) -> Choice:
    """Choose the kernel of a layer, the cut of its work and the reason.

    Args:
        limits: Of the device.
        layer: What is decoded.
        without: Why `cuda.core` cannot be used, None where it can.
        batch: Requests of a step, about.
        context: Tokens of the longest request, about.
        windows: S and W, None: the defaults.
        dtype: Served dtype.
    """
    if limits.hip is not None:
        return Choice("torch", f"kernels are not tested on HIP {limits.hip}")
    if limits.capability is None:
        return Choice("torch", "CPU: torch reference")
    if limits.capability < LOWEST_CAPABILITY:
        found = ".".join(map(str, limits.capability))
        return Choice("torch", f"compute capability {found}: kernels need {LOWEST_CAPABILITY[0]}.0")
    if layer.group > MAX_GROUP:
        return Choice("torch", f"{layer.group} query heads a KV head: kernels have 1 to {MAX_GROUP}")
    shape = launch_shape(layer.d_k, layer.group, softcap=False)
    refused = (
        without
        or unserved(layer.d_k, layer.d_v, layer.group, layer.words)
        or (None if dtype == "bfloat16" else f"rows in {dtype}: the CUDA kernel has bfloat16")
    )
    need = RESERVED_SHARED
    if refused is None:
        need += Variant(layer.d_k, layer.group, layer.vq, False, shape).shared_bytes
        if need > limits.shared_bytes:
            refused = f"{need} bytes of shared memory a block: this device has {limits.shared_bytes}"
    windows = windows or Windows()
    pages = coded_pages(context, windows)
    if refused is not None:
        warps, rows = triton_cut(layer.vq, batch, batch * pages)
        parts = max(limits.multiprocessors * warps // layer.heads, 1)
        return Choice("triton", refused, parts=parts, exact_rows=rows)
    blocks = min(shape.blocks, (limits.shared_bytes + RESERVED_SHARED) // need)
    rows = next(rows for least, rows in CUDA_EXACT_ROWS if batch >= least)
    exact = -(-(windows.sink + windows.recent) // rows)
    parts = cuda_parts(limits.multiprocessors * blocks // layer.heads, batch, pages, exact)
    measured = limits.capability == MEASURED_CAPABILITY and (layer.d_k, layer.group) in MEASURED
    codes = "vector codes" if layer.vq else "2-bit codes"
    return Choice("cuda", f"{codes}: {_standing(measured)}", parts=parts, exact_rows=rows)


def _standing(measured: bool) -> str:
    return (
        "measured faster than Triton"
        if measured
        else "has a kernel; not measured against Triton at this shape or device"
    )


def launch_shape(head_dim: int, group: int, softcap: bool) -> Shape:
    """Return warps and blocks of a CUDA kernel: as many as its registers let run. Warps do not depend on softcap."""
    if group < WIDE_GROUP or head_dim < WIDE_HEAD:
        return FULL
    return WIDE_CAPPED if softcap else WIDE


def coded_pages(context: int, windows: Windows) -> int:
    """Return the coded pages of a request of so many tokens, of `COUNTED_CONTEXT` at most."""
    return max(-(-(min(context, COUNTED_CONTEXT) - windows.sink - windows.recent) // PAGE), 1)


def triton_cut(vq: bool, batch: int, pages: int) -> tuple[int, int]:
    """Return programs a multiprocessor and exact rows of an item.

    Args:
        vq: Keys are in vector codes.
        batch: Requests.
        pages: Coded pages of all of them.
    """
    if vq and batch >= TRITON_WORDS_BATCH:
        return TRITON_WORDS_CUT
    return next((warps, rows) for least, fewest, warps, rows in TRITON_CUTS if batch >= least and pages >= fewest)


def cuda_parts(slots: int, batch: int, pages: int, exact: int) -> int:
    """Return the coded items of a plan: with the exact ones they fill whole rounds of the blocks that run at once.

    Args:
        slots: Blocks of one KV head that run at once.
        batch: Requests.
        pages: Coded pages of a request.
        exact: Exact items of a request.
    """
    wanted = batch * (max(round(ITEMS_OF_ROOT * pages**0.5), 1) + exact)
    rounds = -(-wanted // max(slots, 1))
    return max(rounds * slots - batch * exact, 1)


def describe(limits: Limits, without: str | None) -> Sequence[tuple[str, str]]:
    """Return two rows a codec for ``kvcq env``: what decodes and writes it on this device, and why.

    The layer has 128 channels and one scale a row; CUDA writes that where it compiles, see `write.chosen_sides`.
    """
    rows = []
    for name, vq in (("INT2", False), ("VQ", True)):
        choice = choose_layer(limits, Layer(128, 128, 8, 4, vq), without)
        standing = _standing(limits.capability == MEASURED_CAPABILITY)
        write = f"triton ({without})" if without else f"cuda (128 channels, one scale: {standing})"
        served = choice.backend != "torch"
        rows.append((f"{name} decode", f"{choice.backend} ({choice.reason})" if served else choice.reason))
        rows.append((f"{name} write", write if served else choice.reason))
    return rows
