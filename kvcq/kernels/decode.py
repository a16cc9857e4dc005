"""Decode attention: partial results of one query token over the pages and windows of each request.

For the items of a plan (`plan.Plan`), query head i and its KV head h = i // group::

    logit_j = scaling q~_i . r_j                          j in the item, decoded from a page or exact
            = c tanh(scaling (q~_i . r_j + q_i . mu) / c) with a softcap c
    m = max_j logit_j log2(e),   l = sum_j 2^(logit_j log2(e) - m),   o = sum_j 2^(logit_j log2(e) - m) v'_j / l
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS
from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import MAX_HEAD_DIM, LayerCache, Requests, Tables
from kvcq.kernels.checks import check_platform, check_positive, check_tensor, power_of_two
from kvcq.kernels.decode_kernel import decode_kernel
from kvcq.kernels.overlap import overlap_of
from kvcq.kernels.plan import Partials, Plan
from kvcq.kernels.select import MAX_GROUP

LOG2E = 1.4426950408889634
NARROW_HEAD = 64
WIDE_HEAD = 128


@dataclass(frozen=True)
class Launch:
    """How one program is shaped.

    Attributes:
        heads: Query heads it serves, a power of two.
        tokens: Coded tokens at a time.
        rows: Exact rows at a time.
        stages: Depth of the compiler's load pipeline.
        registers: Most registers of a thread, None: as many as the compiler takes.
    """

    heads: int
    tokens: int
    rows: int
    stages: int
    registers: int | None

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": 1, "num_stages": self.stages, "maxnreg": self.registers}


def launch_table(d_k: int, d_v: int, group: int, vq: bool) -> Launch:
    """Return the launch of a geometry: what one warp can hold in its registers."""
    wide = max(d_k, d_v) > WIDE_HEAD
    heads = min(power_of_two(group), 4 if wide else 8)
    tokens = PAGE_TOKENS // 2 if wide and (vq or heads > 2) else PAGE_TOKENS
    # Loads of narrow rows are too short to pipeline beside the arithmetic of eight heads.
    narrow = max(d_k, d_v) <= NARROW_HEAD and heads > 4
    # With 128 registers sixteen warps run on an SM.
    return Launch(heads=heads, tokens=tokens, rows=16, stages=1 if vq or narrow else 2, registers=None if wide else 128)


def decode_partials(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    plan: Plan,
    partials: Partials,
    *,
    scaling: float,
    softcap: float | None = None,
    offset: Tensor | None = None,
) -> None:
    """Attend with the newest token of every request, one partial result an item; `merge.merge` joins them.

    One launch whose grid depends on shapes alone, without allocation or host sync: it can be captured in a CUDA graph.

    Args:
        tables: Constants of the layer, 2-bit.
        cache: What is stored.
        requests: The batch, as `plan` was last updated with.
        q: Mapped queries ``[B, Hq, d_k]``, served dtype.
        plan: The work list.
        partials: Written: every element of used items, nothing of unused ones.
        scaling: Factor on products.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        offset: ``q . mu`` float32 ``[B, Hq]``, read with a softcap only; None is zeros.

    Raises:
        UnsupportedError: a codec, geometry or platform without a kernel.
        ValueError: tensors that do not fit, with the numbers.
    """
    group = check_decode(tables, cache, requests, q, plan, partials, softcap, offset)
    shape = launch_table(tables.k.d, tables.v.d, group, tables.vq)
    unit, cap = log2_units(scaling, softcap)
    book = cache.pages if tables.codebook is None else tables.codebook
    scale = partials.ml if tables.codebook_scale is None else tables.codebook_scale
    decode_kernel[(plan.size * tables.heads * -(-group // shape.heads),)](
        q, cache.pages, cache.pages.view(torch.int32), requests.page_table, plan.spans, plan.items,
        cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, book, scale, partials.ml if offset is None else offset,
        partials.o, partials.ml,
        requests.page_table.stride(0), tables.heads, cache.sink_k.shape[2], cache.ring, unit, cap,
        **_constants(
            (tables.k.d, tables.v.d), (tables.k.groups, tables.v.groups), group, shape, vq=tables.vq,
            cap=softcap is not None, offset=offset is not None, split=q.dtype != torch.float32, asm=q.is_cuda,
        ),
        **shape.options,
        **overlap_of(q.device),
    )  # fmt: skip


def log2_units(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor on products and the cap of the kernel.

    Without a softcap the factor turns products into logits in log2 units. With one, ``c tanh(x / c)`` in log2 units is
    ``C - 2 C / (2^y + 1)`` with ``C = c log2(e)`` and ``y = 2 x log2(e) / c``: the factor gives y, the cap is C.

    Raises:
        ValueError: a scaling that is not positive: kernels take the largest product before they scale it.
    """
    check_positive("scaling", scaling)
    if softcap is None:
        return scaling * LOG2E, 0.0
    return 2.0 * scaling * LOG2E / softcap, softcap * LOG2E


def check_decode(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    plan: Plan,
    partials: Partials,
    softcap: float | None,
    offset: Tensor | None,
) -> int:
    """Check every assumption of a decode launch and return the query heads of a KV head.

    Raises:
        UnsupportedError: a codec, geometry or platform without a kernel.
        ValueError: tensors that do not fit, with the numbers.
    """
    device, heads, batch = q.device, tables.heads, requests.batch
    check_platform(device)
    for name, side in (("k", tables.k), ("v", tables.v)):
        if side.bits != 2 or side.d % 16 or not 16 <= side.d <= MAX_HEAD_DIM or side.groups not in (1, 4):
            raise UnsupportedError(
                f"{side.bits} bits, head dim {side.d}, {side.groups} groups: decode has 2 bits, multiples of 16 up to "
                f"{MAX_HEAD_DIM}, 1 or 4 groups",
                where=name,
            )
    check_tensor("q", q, (batch, None, tables.k.d), cache.sink_k.dtype, device)
    group = q.shape[1] // heads
    if group * heads != q.shape[1] or not 1 <= group <= MAX_GROUP:
        raise UnsupportedError(f"{q.shape[1]} query heads on {heads} KV heads: groups are 1 to {MAX_GROUP} whole heads")
    check_positive("softcap", softcap)
    check_tensor("pages", cache.pages, (None, heads, tables.block_bytes), torch.uint8, device)
    if cache.pages.data_ptr() % 16:
        raise ValueError(f"pages at address {cache.pages.data_ptr():#x} are not aligned to 16 bytes")
    slots = cache.ring_k.shape[0]
    for name, d in (("k", tables.k.d), ("v", tables.v.d)):
        check_tensor(f"sink_{name}", getattr(cache, f"sink_{name}"), (slots, heads, None, d), q.dtype, device)
        check_tensor(f"ring_{name}", getattr(cache, f"ring_{name}"), (slots, heads, cache.ring, d), q.dtype, device)
    sinks = cache.sink_k.shape[2], cache.sink_v.shape[2]
    if min(sinks) < cache.windows.sink or sinks[0] != sinks[1] or cache.ring <= cache.windows.recent:
        raise ValueError(f"{sinks} sink rows and a ring of {cache.ring} do not hold windows {cache.windows}")
    check_tensor("page_table", requests.page_table, (batch, None), torch.int32, device, contiguous=False)
    check_tensor("spans", plan.spans, (None, 8), torch.int32, device)
    check_tensor("items", plan.items, (None, 4), torch.int32, device)
    if batch > plan.max_batch:
        raise ValueError(f"{batch} requests: the plan has room for {plan.max_batch}")
    check_tensor("partials.o", partials.o, (plan.size, q.shape[1], tables.v.d), torch.float32, device)
    check_tensor("partials.ml", partials.ml, (plan.size, q.shape[1], 2), torch.float32, device)
    if offset is not None:
        check_tensor("offset", offset, (batch, q.shape[1]), torch.float32, device)
    if tables.codebook is not None:
        check_tensor("codebook", tables.codebook, (heads, tables.k.d // 4, 256), torch.int32, device)
    if tables.codebook_scale is not None:
        check_tensor("codebook_scale", tables.codebook_scale, (heads, tables.k.d // 4), torch.float32, device)
    return group


def _constants(
    dims: tuple[int, int],
    groups: tuple[int, int],
    group: int,
    shape: Launch,
    *,
    vq: bool,
    cap: bool,
    offset: bool,
    split: bool,
    asm: bool,
) -> dict[str, Any]:
    """Return the kernel's constants; `dims` and `groups` are of keys and values."""
    d_k, d_v = dims
    return {
        "GROUP": group,
        "GP": shape.heads,
        "DK": d_k,
        "DV": d_v,
        "KG": 1 if vq else groups[0],
        "VG": groups[1],
        "WORDS": max(groups),
        "VQ": vq,
        "CAP": cap,
        "OFF": offset,
        "N": shape.tokens,
        "NE": shape.rows,
        # The integer matrix instruction takes 32 bytes of a key and 16 byte columns of values at a time.
        "KB": max(32, power_of_two(d_k // 4)),
        "VB": max(16, power_of_two(d_v // 4)),
        "KP": power_of_two(d_k),
        "VP": power_of_two(d_v),
        "SPLIT": split,
        "ASM": asm,
    }


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    signature = (
        dict.fromkeys(("q", "sink_k", "sink_v", "ring_k", "ring_v"), "*bf16")
        | {"pages": "*u8"}
        | dict.fromkeys(("words", "table", "spans", "items", "book"), "*i32")
        | dict.fromkeys(("book_scale", "offset", "o", "ml"), "*fp32")
        | dict.fromkeys(("columns", "kv_heads", "sink_rows", "ring_rows"), "i32")
        | dict.fromkeys(("unit", "cap"), "fp32")
    )
    codecs = ((1, 1, False), (4, 4, False), (1, 1, True), (1, 4, True))
    plain = [
        (d, d, group, k_groups, v_groups, vq, False)
        for d in (64, 80, 96, 128, 256)
        for group in (1, 4, 5, 8)
        for k_groups, v_groups, vq in codecs
    ]
    other = [
        (16, 16, 2, 1, 1, False, False),
        (80, 80, 3, 1, 1, False, True),
        (96, 96, 5, 1, 1, False, False),
        (192, 128, 16, 1, 1, False, False),
        (64, 64, 4, 4, 4, False, False),
        (128, 128, 4, 4, 4, False, True),
        (256, 256, 8, 4, 4, False, False),
        (128, 128, 4, 1, 4, False, False),
        (64, 64, 8, 1, 1, True, False),
        (128, 128, 4, 1, 1, True, True),
        (128, 128, 4, 1, 4, True, False),
        (256, 256, 2, 1, 1, True, False),
        *((128, 128, group, 1, 1, vq, False) for group in (2, 3, 7, 16) for vq in (False, True)),
    ]
    found = []
    for d_k, d_v, group, k_groups, v_groups, vq, cap in dict.fromkeys(plain + other):
        shape = launch_table(d_k, d_v, group, vq)
        constants = _constants(
            (d_k, d_v), (k_groups, v_groups), group, shape, vq=vq, cap=cap, offset=cap, split=True, asm=True
        )
        constants["OVERLAP"] = True
        kind = "vq" if vq else "int2"
        name = f"decode-{kind}-d{d_k}.{d_v}-group{group}-words{k_groups}.{v_groups}{'-cap' if cap else ''}"
        found.append((name, decode_kernel, signature, constants, shape.options))
    return found
