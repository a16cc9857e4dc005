"""Join the partial outputs of a request and lead them out of the frame of values.

For query head i of KV head h and the items j of its request, each with a normalised output o_j, its largest logit m_j
in log2 units and its sum l_j; with a learned sink logit a (in log2 units, ``a - scaling q . mu`` without a softcap)::

    M  = max(m_j, a)           w_j = l_j 2^(m_j - M)           z = sum w_j + 2^(a - M)
    o' = sum w_j o_j / z       m   = sum w_j / z               o = o' R_V^T + nu m

Without a learned sink its term is absent and m is 1; a request that sees nothing gets zeros.

Many items a request take two launches: joining wants many small programs, each with all of its loads in flight, the
product with R_V tiles of rows that share their read of it. Few items are joined by such tiles right away: one launch.
Launches overlap, see `overlap`: R_V is on its way while the items are still worked off.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kvcq.kernels.arrays import Tables
from kvcq.kernels.checks import check_platform, check_tensor, power_of_two
from kvcq.kernels.merge_kernel import join_kernel, mix_kernel, rotate_kernel
from kvcq.kernels.overlap import overlap_of
from kvcq.kernels.plan import Partials, Plan
from kvcq.kernels.select import MAX_GROUP

LOG2E = math.log2(math.e)

# Coded items of a request, about, up to which one launch is faster: a program reads them one after the other.
JOINED_ITEMS = 12

# One launch: rows of a program, items whose loads are in flight at once, warps.
JOIN_ROWS, JOIN_ITEMS, JOIN_WARPS = 16, 4, 8

# Two launches: tile of the product, warps; bytes of R_V that a program of few rows holds.
ROTATE_ROWS, ROTATE_COLUMNS, ROTATE_WARPS = 16, 32, 4
ROTATED_BYTES = 32768


def mix_shape(rows: int, d_v: int, items: int) -> tuple[int, int]:
    """Return items and channels that a warp reads at once: few channels for latency, whole rows where there are many.

    Args:
        rows: Query heads of all requests.
        d_v: Value head dim.
        items: Of a request, about.
    """
    wide = power_of_two(d_v)
    if rows < 1024:
        return (128, min(wide, 32)) if rows < 128 else (64, min(wide, 64))
    columns = wide if items <= 2048 // wide else min(wide, 64)
    return 2048 // columns, columns


def rotate_columns(rows: int, d_v: int, size: int) -> int:
    """Return the channels of a tile of the product: as many as fit where rows alone cannot fill the device anyway.

    Args:
        rows: Query heads of all requests.
        d_v: Value head dim.
        size: Bytes of an element of R_V.
    """
    wide = power_of_two(d_v)
    return min(wide, ROTATED_BYTES // (wide * size) if rows < 128 else ROTATE_COLUMNS)


def join_columns(d_v: int) -> int:
    """Return the output channels that one launch maps at once: all of them, or 64 where R_V is too large to hold."""
    wide = power_of_two(d_v)
    return wide if wide <= 128 else 64


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

    Precondition: the launch in front on the stream is the decode of this plan and these partials, or one that the next
    launch waits for in whole; and what wrote R_V ran in front of that decode. R_V is read before this launch waits,
    see `overlap`: a merge behind another merge, or behind a launch that lets the next one come before it has waited
    itself, could read R_V while it is still written.

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
    # Tensors in the place of what is absent are never read.
    sink_logits = partial.mass if sinks is None else sinks
    shifts = offset if offset is not None and shifted else partial.mass
    means = partial.mass if nu is None else nu
    rows, wide = batch * group, power_of_two(d_v)
    overlap = overlap_of(device)
    if rotate and plan.parts <= JOINED_ITEMS * batch:
        join_kernel[(triton.cdiv(rows, JOIN_ROWS), tables.heads)](
            partial.o,
            partial.ml,
            plan.first,
            sink_logits,
            shifts,
            dual,
            means,
            out,
            rows,
            scaling * LOG2E,
            GROUP=group,
            D=d_v,
            WIDE=wide,
            ROWS=JOIN_ROWS,
            ITEMS=JOIN_ITEMS,
            COLUMNS=join_columns(d_v),
            SINKS=sinks is not None,
            SHIFTED=shifted,
            CENTRED=nu is not None,
            num_warps=JOIN_WARPS,
            **overlap,
        )
        return
    items, columns = mix_shape(batch * q_heads, d_v, plan.parts // batch)
    mix_kernel[(batch * q_heads, triton.cdiv(d_v, columns))](
        partial.o,
        partial.ml,
        plan.first,
        sink_logits,
        shifts,
        partial.mixed if rotate else out,
        partial.mass,
        q_heads,
        scaling * LOG2E,
        D=d_v,
        COLUMNS=columns,
        ITEMS=items,
        SINKS=sinks is not None,
        SHIFTED=shifted,
        num_warps=1,
        **overlap,
    )
    if not rotate:
        return
    columns = rotate_columns(batch * q_heads, d_v, dual.element_size())
    rotate_kernel[(triton.cdiv(rows, ROTATE_ROWS), tables.heads, triton.cdiv(d_v, columns))](
        partial.mixed,
        partial.mass,
        dual,
        means,
        out,
        rows,
        GROUP=group,
        D=d_v,
        WIDE=wide,
        ROWS=ROTATE_ROWS,
        COLUMNS=columns,
        CENTRED=nu is not None,
        num_warps=ROTATE_WARPS,
        **overlap,
    )


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Return what is compiled for a device: name, function, signature, constants, options."""
    mix_types = dict.fromkeys(("o", "ml"), "*fp32") | {"first": "*i32"}
    mix_types |= dict.fromkeys(("sinks", "offset", "mixed", "mass"), "*fp32") | {"q_heads": "i32", "scaling": "fp32"}
    rotate_types = {"mixed": "*fp32", "mass": "*fp32", "dual": "*bf16", "nu": "*fp32", "out": "*bf16", "total": "i32"}
    join_types = mix_types | rotate_types
    join_types = {name: join_types[name] for name in join_kernel.arg_names if name in join_types}
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]] = []
    for d in (64, 80, 96, 128, 256):
        wide = power_of_two(d)
        for rows, group, plain in ((32, 8, True), (32, 1, True), (512, 5, False), (1024, 4, False), (1024, 1, False)):
            items, columns = mix_shape(rows, d, 12)
            constants = {"D": d, "COLUMNS": columns, "ITEMS": items, "SINKS": not plain, "SHIFTED": not plain}
            constants["OVERLAP"] = True
            found.append((f"merge-mix-{d}-items{items}", mix_kernel, mix_types, constants, {"num_warps": 1}))
            folded = mix_types | {"mixed": "*bf16"}
            found.append((f"merge-mix-{d}-items{items}-folded", mix_kernel, folded, constants, {"num_warps": 1}))
            tile = {"GROUP": group, "D": d, "WIDE": wide, "CENTRED": not plain, "OVERLAP": True}
            cut = {"ROWS": ROTATE_ROWS, "COLUMNS": rotate_columns(rows, d, 2)}
            found.append(
                (f"merge-rotate-{d}-group{group}", rotate_kernel, rotate_types, tile | cut, {"num_warps": ROTATE_WARPS})
            )
            cut = {"ROWS": JOIN_ROWS, "ITEMS": JOIN_ITEMS, "COLUMNS": join_columns(d)}
            cut |= {"SINKS": not plain, "SHIFTED": not plain}
            found.append(
                (f"merge-join-{d}-group{group}", join_kernel, join_types, tile | cut, {"num_warps": JOIN_WARPS})
            )
    # Not all constants depend on rows and group.
    return list({(one[0], str(one[3])): one for one in found}.values())
