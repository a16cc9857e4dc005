"""The codecs of an artifact in the dtype that serving holds them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcq.codecs.pair import HeadCodec, layer_roles
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.plan import LayerPlan

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
            entry, layers[entry.layer], layer_roles(tensors, entry.layer), cast=SERVED_CAST, device=device
        )
        for entry in plan
        if entry.quantized
    }
