"""The codecs of an artifact in the dtype that serving holds them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec, layer_roles
from kvcq.codecs.side import Rotation
from kvcq.spec.geometry import ModelGeometry, RopeSpec
from kvcq.spec.plan import LayerPlan
from kvcq.stats.rotary import rotate

SERVED_CAST = torch.bfloat16


def served_codecs(
    plan: Sequence[LayerPlan], geometry: ModelGeometry, tensors: Mapping[str, Any], device: torch.device | str
) -> dict[int, HeadCodec]:
    """Build the codecs of the quantized layers, by layer id.

    Args:
        plan: The artifact's plan.
        geometry: Its geometry.
        tensors: Its tensors by full name, arrays or tensors.
        device: Where to compute.

    Raises:
        CorruptArtifactError: a tensor is missing or has another shape.
    """
    layers = {layer.layer: layer for layer in geometry.layers}
    return {
        entry.layer: HeadCodec.build(
            entry,
            layers[entry.layer],
            layer_roles(tensors, entry.layer),
            cast=SERVED_CAST,
            device=device,
            rotation=rotation_of(geometry.rope_of(layers[entry.layer])),
        )
        for entry in plan
        if entry.quantized
    }


def rotation_of(rope: RopeSpec | None) -> Rotation | None:
    """Return what turns the keys of a layer by their positions, or back; None for a layer without positions.

    The frequencies are those of the artifact. A model in another RoPE regime turns by others: codecs of un-rotated
    keys then see rows that are not quite un-rotated, as they would in an engine that holds the artifact's table.
    """
    if rope is None:
        return None

    def turn(rows: Tensor, positions: Tensor, inverse: bool) -> Tensor:
        return rotate(rows, positions, rope, inverse)

    return turn
