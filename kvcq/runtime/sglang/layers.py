"""Constants of the layers for one rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcq.errors import UnsupportedError
from kvcq.kernels.arrays import SideTables, Tables
from kvcq.runtime.codecs import served_codecs
from kvcq.runtime.hf.kernels import choose_kernels
from kvcq.runtime.sglang.ranks import head_range
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan


def shard(tables: Tables, heads: range) -> Tables:
    """Return the constants of some adjacent heads, copied so that the others' can be freed."""
    cut = slice(heads.start, heads.stop)

    def part(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor[cut].clone()

    def side(of: SideTables) -> SideTables:
        return replace(of, map=part(of.map), shift=part(of.shift), dual=part(of.dual), offset=part(of.offset))

    return replace(
        tables,
        k=side(tables.k),
        v=side(tables.v),
        heads=len(heads),
        codebook=part(tables.codebook),
        codebook_scale=part(tables.codebook_scale),
    )


def layer_tables(
    plan: Sequence[LayerPlan],
    geometry: ModelGeometry,
    tensors: Mapping[str, Any],
    *,
    tp: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    only: Collection[int] | None = None,
) -> dict[int, Tables]:
    """Build the constants that a rank needs, by layer id.

    Args:
        plan: The bundle's plan.
        geometry: Its geometry.
        tensors: Its tensors by full name.
        tp: Ranks that share attention.
        rank: This one.
        dtype: Of the model.
        device: Where the kernels run.
        only: Layers that are wanted, those of a pipeline's stage; None: all.

    Raises:
        MismatchError: heads cannot be shared by so many ranks.
        UnsupportedError: a layer stays BF16, is no full attention, or has no kernel; names the layer.
    """
    kinds = {layer.layer: layer for layer in geometry.layers}
    for entry in plan:
        if not entry.quantized:
            raise UnsupportedError(
                f"the bundle keeps this layer in BF16 ({entry.reason}), pools of SGLang have one layout for all",
                where=f"layer {entry.layer}",
                fix="serve this bundle with --engine hf",
            )
    if missing := sorted(set(kinds) - {entry.layer for entry in plan}):
        raise UnsupportedError(
            f"the bundle has no codec for this {kinds[missing[0]].kind} layer",
            where=f"layer {missing[0]}",
            fix="serve this bundle with --engine hf",
        )
    shares = {number: head_range(layer.kv_heads, tp, rank) for number, layer in kinds.items()}
    wanted = [entry for entry in plan if only is None or entry.layer in only]
    codecs = served_codecs(wanted, geometry, tensors, device)
    try:
        chosen = choose_kernels(codecs, kinds, device, dtype, wanted=True)
    except UnsupportedError as error:
        # Nobody chose kernels here: a server has nothing else.
        raise UnsupportedError(error.what, where=error.where, fix="serve this bundle with --engine hf") from None
    return {number: shard(layer.tables, shares[number]) for number, layer in chosen.items() if layer.tables is not None}
