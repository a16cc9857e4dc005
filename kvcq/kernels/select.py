"""Which decode kernel a layer gets on a device, how it is launched, and why: a pure function of what is written here.

Measured on an H200 (132 multiprocessors, 32 query and 8 KV heads of 128 channels, windows 64 + 256, merge included,
microseconds a layer)::

    batch, context      CUDA INT2   Triton INT2   CUDA VQ   Triton VQ
    1, 100000                  25            32        32          54
    32, 8192                   61            74         -         140
    32, 32768                 175           198       231         448
    128, 8192                 197           221         -         476

The CUDA kernels are the faster ones wherever they exist, so what decides is whether they can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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

# Of an H200; other devices say their own.
MULTIPROCESSORS = 132
SHARED_BYTES = 232_448

# The driver keeps this much of a multiprocessor's shared memory for each block.
RESERVED_SHARED = 1024

# Four blocks of four warps fill the registers of a multiprocessor at 128 a thread; wide heads of large groups need
# 168, and with a softcap more than that.
FULL, WIDE, WIDE_CAPPED = Shape(4, 4), Shape(4, 3), Shape(4, 2)
WIDE_GROUP, WIDE_HEAD = 5, 128

# Rows of an exact item: all of the default windows, so that a request's windows are one block a KV head.
CUDA_EXACT_ROWS = 320

# Requests from which a step is cut into several rounds of blocks, and the rounds: below, one round whose blocks all
# start at once costs least; above, whole requests a block would leave multiprocessors idle at the end.
ROUNDS_BATCH, ROUNDS = 12, 4

# Programs of one warp a multiprocessor and exact rows of an item, by the smallest batch that they are for. Sixteen
# warps run at once: larger batches are cut into several rounds, which even out at the end.
TRITON_CUTS = ((32, 64, 160), (5, 32, 160), (1, 16, 32))


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
        shape: Warps and blocks of the CUDA kernel without a softcap, None for the other backends.
    """

    backend: Backend
    reason: str
    parts: int = 1
    exact_rows: int = CUDA_EXACT_ROWS
    shape: Shape | None = None


def choose(
    capability: tuple[int, int] | None,
    tables: Tables,
    group: int,
    *,
    batch: int = 1,
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
        windows: S and W, None: the defaults.
        dtype: Served dtype.
        without: Why `cuda.core` cannot be used, None where it can; "": look.
        limits: Of the device, `capability` included; None: those of an H200 with that capability.
    """
    layer = Layer(tables.k.d, tables.v.d, tables.heads, group, tables.vq, tables.words)
    reason = missing() if without == "" else without
    return choose_layer(limits or Limits(capability), layer, reason, batch=batch, windows=windows, dtype=dtype)


def choose_layer(
    limits: Limits,
    layer: Layer,
    without: str | None,
    *,
    batch: int = 1,
    windows: Windows | None = None,
    dtype: str = "bfloat16",
) -> Choice:
    """Choose the kernel of a layer, the cut of its work and the reason.

    Args:
        limits: Of the device.
        layer: What is decoded.
        without: Why `cuda.core` cannot be used, None where it can.
        batch: Requests of a step, about.
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
    if refused is not None:
        _, warps, rows = next(cut for cut in TRITON_CUTS if batch >= cut[0])
        parts = max(limits.multiprocessors * warps // layer.heads, 1)
        return Choice("triton", refused, parts=parts, exact_rows=rows)
    blocks = min(shape.blocks, (limits.shared_bytes + RESERVED_SHARED) // need)
    parts = cuda_parts(limits.multiprocessors * blocks // layer.heads, batch, windows or Windows())
    why = "vector codes: the codebook lies in shared memory" if layer.vq else "2-bit codes: measured faster than Triton"
    return Choice("cuda", why, parts=parts, exact_rows=CUDA_EXACT_ROWS, shape=shape)


def launch_shape(head_dim: int, group: int, softcap: bool) -> Shape:
    """Return warps and blocks of a CUDA kernel: as many as its registers let run. Warps do not depend on softcap."""
    if group < WIDE_GROUP or head_dim < WIDE_HEAD:
        return FULL
    return WIDE_CAPPED if softcap else WIDE


def cuda_parts(slots: int, batch: int, windows: Windows) -> int:
    """Return the coded items of a plan: what fills the blocks that run at once, beside the windows of each request.

    Args:
        slots: Blocks of one KV head that run at once.
        batch: Requests.
        windows: S and W.
    """
    if batch > ROUNDS_BATCH:
        return max(ROUNDS * slots, 1)
    exact = batch * -(-(windows.sink + windows.recent) // CUDA_EXACT_ROWS)
    return max(slots - exact, 2 * batch, 1)


def describe(limits: Limits, without: str | None) -> Sequence[tuple[str, str]]:
    """Return two rows a codec for ``kvcq env``: what decodes and writes it on this device, and why.

    The layer has 128 channels and one scale a row; CUDA writes that where it compiles, see `write.chosen_sides`.
    """
    rows = []
    for name, vq in (("INT2", False), ("VQ", True)):
        choice = choose_layer(limits, Layer(128, 128, 8, 4, vq), without)
        write = f"triton ({without})" if without else "cuda (128 channels, one scale: measured faster than Triton)"
        served = choice.backend != "torch"
        rows.append((f"{name} decode", f"{choice.backend} ({choice.reason})" if served else choice.reason))
        rows.append((f"{name} write", write if served else choice.reason))
    return rows
