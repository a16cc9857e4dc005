"""Which layers can be quantized at all, before any method has a say."""

from __future__ import annotations

from kvcq.spec.geometry import LayerGeometry

CHANNELS = 16


def bf16_reason(layer: LayerGeometry) -> str | None:
    """Return why a layer stays BF16 with every method, or None for one that can be quantized."""
    if layer.kind == "shared":
        return f"shared attention, reads the cache of layer {layer.source}"
    if layer.kind != "full":
        return f"{layer.kind} attention"
    if layer.d_k % CHANNELS or layer.d_v % CHANNELS:
        return f"head dimension {layer.d_k}/{layer.d_v} is no multiple of {CHANNELS}, which pages need"
    return None
