"""Join the partial outputs of a request and lead them out of the frame of values.

For query head i of KV head h and the items j of its request, each with a normalised output o_j, its largest logit m_j
in log2 units and its sum l_j; with a learned sink logit a (in log2 units, ``a - scaling q . mu`` without a softcap)::

    M  = max(m_j, a)           w_j = l_j 2^(m_j - M)           z = sum w_j + 2^(a - M)
    o' = sum w_j o_j / z       m   = sum w_j / z               o = o' R_V^T + nu m

Without a learned sink its term is absent and m is 1; a request that sees nothing gets zeros.

Two launches: joining wants many small programs, each with all of its loads in flight; the product with R_V wants
tiles of rows that share their read of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcq.kernels.arrays import Tables
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.kernels.plan import Partials, Plan

LOG2E = math.log2(math.e)
MAX_GROUP = 16

# Numbers that one warp holds at once, and rows (query heads of requests) from which a warp takes all their channels.
HELD = 4096
MANY_ROWS = 1024


@dataclass(frozen=True)
class MixShape:
    """How a program of one warp is cut: items read at once, channels."""

    items: int
    columns: int


@dataclass(frozen=True)
class RotateShape:
    """How a program is cut: rows of one KV head, output channels, warps."""

    rows: int
    columns: int
    warps: int


def mix_shape(batch: int, q_heads: int, d_v: int) -> MixShape:
    """Return the cut of the first launch: few channels a warp for latency, whole rows where there are many."""
    wide = power_of_two(d_v)
    if batch * q_heads < MANY_ROWS:
        return MixShape(HELD // 16, 16)
    return MixShape(HELD // 2 // wide, wide)


def rotate_shape(batch: int, q_heads: int, d_v: int) -> RotateShape:
    """Return the cut of the second launch."""
    wide = power_of_two(d_v)
    if batch * q_heads < MANY_ROWS:
        return RotateShape(16, min(wide, 32), 4)
    return RotateShape(32, min(wide, 64, 8192 // wide), 4)


def merge(
    tables: Tables,
    plan: Plan,
    partial: Partials,
    out: Tensor,
    *,
    sinks: Tensor | None,
    offset: Tensor | None,
    scaling: float,
    softcap: float | None,
    rotate: bool,
) -> None:
    """Write the attention outputs of a step; every element of `out` is written.

    Args:
        tables: Constants of the layer.
        plan: Updated for this step.
        partial: What the items of the plan gave.
        out: Written, ``[B, Hq, d_v]`` in the served dtype.
        sinks: Learned sink logits float32 ``[Hq]``, or None.
        offset: ``q . mu`` float32 ``[B, Hq]``, or None for keys that are not centred; only learned sinks read it.
        scaling: Factor on products.
        softcap: The cap that the logits of the items went through, or None.
        rotate: False writes o' and leaves the rotation and nu to the caller.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, with the numbers.
        UnsupportedError: no kernel on this platform.
    """
    device = out.device
    check_platform(device)
    if out.ndim != 3:
        raise ValueError(f"out has shape {list(out.shape)}, not [B, Hq, d_v]")
    batch, q_heads, d_v = out.shape
    group = q_heads // tables.heads
    if group * tables.heads != q_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{q_heads} query heads on {tables.heads} KV heads: groups have 1 to {MAX_GROUP}")
    if not 1 <= batch <= plan.max_batch:
        raise ValueError(f"{batch} requests: this plan has room for 1 to {plan.max_batch}")
    dual, nu = tables.v.dual, tables.v.offset
    check_tensor("out", out, (batch, q_heads, tables.v.d), dual.dtype, device)
    check_tensor("partial.o", partial.o, (plan.size, q_heads, d_v), torch.float32, device)
    check_tensor("partial.ml", partial.ml, (plan.size, q_heads, 2), torch.float32, device)
    check_tensor("partial.mixed", partial.mixed, (plan.max_batch, q_heads, d_v), torch.float32, device)
    check_tensor("partial.mass", partial.mass, (plan.max_batch, q_heads), torch.float32, device)
    check_tensor("plan.first", plan.first, (plan.max_batch + 1,), torch.int32, device)
    check_tensor("v.dual", dual, (tables.heads, d_v, d_v), dual.dtype, device)
    if nu is not None:
        check_tensor("v.offset", nu, (tables.heads, d_v), torch.float32, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (q_heads,), torch.float32, device)
    if offset is not None:
        check_tensor("offset", offset, (batch, q_heads), torch.float32, device)
    shifted = sinks is not None and offset is not None and softcap is None
    mix = mix_shape(batch, q_heads, d_v)
    _mix[(batch * q_heads, triton.cdiv(d_v, mix.columns))](
        partial.o,
        partial.ml,
        plan.first,
        partial.mass if sinks is None else sinks,
        offset if shifted else partial.mass,
        partial.mixed if rotate else out,
        partial.mass,
        q_heads,
        scaling * LOG2E,
        D=d_v,
        COLUMNS=mix.columns,
        ITEMS=mix.items,
        SINKS=sinks is not None,
        SHIFTED=shifted,
        num_warps=1,
    )
    if not rotate:
        return
    cut = rotate_shape(batch, q_heads, d_v)
    grid = (triton.cdiv(batch * group, cut.rows), tables.heads, triton.cdiv(d_v, cut.columns))
    _rotate[grid](
        partial.mixed,
        partial.mass,
        dual,
        partial.mass if nu is None else nu,
        out,
        batch * group,
        GROUP=group,
        D=d_v,
        WIDE=power_of_two(d_v),
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        CENTRED=nu is not None,
        num_warps=cut.warps,
    )


@triton.jit(do_not_specialize=["q_heads"])
def _mix(
    o,
    ml,
    first,
    sinks,
    offset,
    mixed,
    mass,
    q_heads,
    scaling,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEMS: tl.constexpr,
    SINKS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Join the items of one query head of one request; one warp, so that no barrier lies between two steps."""
    row = tl.program_id(0)
    head = row % q_heads
    request = row // q_heads
    begin = tl.load(first + request)
    count = tl.load(first + request + 1) - begin
    place = tl.arange(0, ITEMS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = -1e30
    total = 0.0
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, count, ITEMS):
        held = start + place < count
        at = (begin + start + place).to(tl.int64) * q_heads + head
        m = tl.load(ml + 2 * at, mask=held, other=-1e30)
        share = tl.load(ml + 2 * at + 1, mask=held, other=0.0)
        part = tl.load(o + at[:, None] * D + c[None, :], mask=held[:, None] & (c < D)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(m, 0))
        kept = tl.exp2(top - new_top)
        weight = share * tl.exp2(m - new_top)
        total = total * kept + tl.sum(weight, 0)
        sums = sums * kept + tl.sum(part * weight[:, None], 0)
        top = new_top
    whole = total
    if SINKS:
        extra = tl.load(sinks + head) * 1.4426950408889634
        if SHIFTED:
            extra -= scaling * tl.load(offset + row)
        new_top = tl.maximum(top, extra)
        kept = tl.exp2(top - new_top)
        total = total * kept
        sums = sums * kept
        whole = total + tl.exp2(extra - new_top)
    # Nothing seen: mass and outputs are zero, and so is what is written.
    inverse = 1.0 / tl.where(whole > 0, whole, 1.0)
    tl.store(mixed + row.to(tl.int64) * D + c, (sums * inverse).to(mixed.dtype.element_ty), mask=c < D)
    if tl.program_id(1) == 0:
        tl.store(mass + row, total * inverse)


@triton.jit(do_not_specialize=["total"])
def _rotate(
    mixed,
    mass,
    dual,
    nu,
    out,
    total,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Lead ROWS rows of one KV head back; row t is query head ``t mod GROUP`` of request ``t div GROUP``."""
    kv_head = tl.program_id(1)
    q_heads = tl.num_programs(1) * GROUP
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < total
    row = (t // GROUP) * q_heads + kv_head * GROUP + t % GROUP
    e = tl.arange(0, WIDE)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    transposed = dual + kv_head * (D * D) + c[None, :] * D + e[:, None]
    matrix = tl.load(transposed, mask=(c < D)[None, :] & (e < D)[:, None], other=0.0)
    x = tl.load(mixed + row.to(tl.int64)[:, None] * D + e[None, :], mask=inside[:, None] & (e < D)[None, :], other=0.0)
    high = x.to(matrix.dtype)
    back = tl.dot(high, matrix, input_precision="ieee")
    if matrix.dtype != tl.float32:
        # Two parts of the served dtype carry more bits than the output keeps.
        low = (x - high.to(tl.float32)).to(matrix.dtype)
        back = tl.dot(low, matrix, back)
    if CENTRED:
        share = tl.load(mass + row, mask=inside, other=0.0)
        back += share[:, None] * tl.load(nu + kv_head * D + c, mask=c < D, other=0.0)[None, :]
    to = out + row.to(tl.int64)[:, None] * D + c[None, :]
    tl.store(to, back.to(out.dtype.element_ty), mask=inside[:, None] & (c < D)[None, :])


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    mix_types = dict.fromkeys(("o", "ml"), "*fp32") | {"first": "*i32"}
    mix_types |= dict.fromkeys(("sinks", "offset", "mixed", "mass"), "*fp32") | {"q_heads": "i32", "scaling": "fp32"}
    rotate_types = {"mixed": "*fp32", "mass": "*fp32", "dual": "*bf16", "nu": "*fp32", "out": "*bf16", "total": "i32"}
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]] = []
    for d in (64, 80, 96, 128, 256):
        for batch, group, plain in ((1, 8, True), (128, 5, False)):
            mix = mix_shape(batch, 8 * group, d)
            constants = {"D": d, "COLUMNS": mix.columns, "ITEMS": mix.items, "SINKS": not plain, "SHIFTED": not plain}
            name = f"merge-mix-{d}-items{mix.items}"
            found.append((name, _mix, mix_types, constants, {"num_warps": 1}))
            folded = mix_types | {"mixed": "*bf16"}
            found.append((f"{name}-folded", _mix, folded, constants, {"num_warps": 1}))
            cut = rotate_shape(batch, 8 * group, d)
            constants = {"GROUP": group, "D": d, "WIDE": power_of_two(d), "ROWS": cut.rows, "COLUMNS": cut.columns}
            constants["CENTRED"] = not plain
            name = f"merge-rotate-{d}-rows{cut.rows}-group{group}"
            found.append((name, _rotate, rotate_types, constants, {"num_warps": cut.warps}))
    return found
