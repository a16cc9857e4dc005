"""Rotary embeddings, measured: the frequencies come from the model's buffers, how they act from its keys.

Which frequencies a layer uses, on which channels, in which pairing and sense - or none at all - differs by
model type and is written nowhere. A key at position p + s is the rotation of the same key at position p, so two
short forwards decide it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcq.models.library import decoder_config
from kvcq.models.observe import SHIFT, Observation, observe
from kvcq.spec.geometry import RopeSpec


def rope_specs(
    model: PreTrainedModel, *, longest: int | None = None, observation: Observation | None = None
) -> tuple[tuple[RopeSpec, ...], dict[int, int | None]]:
    """Return the distinct RoPE specs of a model and, for each layer that calls attention, the index of its own.

    None stands for a layer without rotation (NoPE), and for learned absolute positions, which no spec describes.
    `longest` selects the branch of RoPE types that depend on the sequence length. An `observation` made for the
    same `longest` saves the two forwards.
    """
    seen = observation or observe(model, longest)
    found = list(_frequencies(model))
    specs: list[RopeSpec] = []
    layers: dict[int, int | None] = {}
    for layer, later in sorted(seen.shifted.items()):
        spec = _fitting(seen.keys(layer).double().cpu(), later.double().cpu(), found)
        if spec is not None and spec not in specs:
            specs.append(spec)
        layers[layer] = None if spec is None else specs.index(spec)
    return tuple(specs), layers | {layer: None for layer in seen.calls if layer not in layers}


def in_regime(model: PreTrainedModel, specs: Iterable[RopeSpec]) -> bool:
    """Tell whether the last forward used the frequencies of every spec whose frequencies depend on the length."""
    now = {inv_freq for inv_freq, _, _ in _frequencies(model)}
    return all(spec.inv_freq in now for spec in specs if spec.by_length)


def turn(x: Tensor, spec: RopeSpec, shift: float) -> Tensor:
    """Rotate rows x [..., d] by the angle of `shift` positions (unit rotation, float64 angles)."""
    angles = spec.sense * shift * torch.tensor(spec.inv_freq, dtype=torch.float64)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    part = x[..., spec.offset : spec.offset + spec.rotary_dims]
    half = spec.pairing == "half"
    a, b = part.chunk(2, dim=-1) if half else (part[..., 0::2], part[..., 1::2])
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(pairs, dim=-1) if half else torch.stack(pairs, dim=-1).flatten(-2)
    tail = x[..., spec.offset + spec.rotary_dims :]
    return torch.cat([x[..., : spec.offset], turned, tail], dim=-1)


def _fitting(keys: Tensor, later: Tensor, found: list[tuple[tuple[float, ...], float, str]]) -> RopeSpec | None:
    """Return the spec whose rotation by SHIFT brings `keys` closest to `later`; None if no rotation does better."""
    best, error = None, (keys - later).norm()
    for spec in _variants(keys.shape[-1], found):
        residual = (turn(keys, spec, SHIFT) - later).norm()
        if residual < error:
            best, error = spec, residual
    return best


def _variants(dims: int, found: list[tuple[tuple[float, ...], float, str]]) -> Iterator[RopeSpec]:
    for inv_freq, scaling, regime in found:
        rotary = 2 * len(inv_freq)
        offsets = sorted({0, dims - rotary}) if rotary <= dims else ()
        for offset, pairing, sense in itertools.product(offsets, ("half", "interleaved"), (1, -1)):
            yield RopeSpec(
                rotary_dims=rotary,
                offset=offset,
                pairing=pairing,
                sense=sense,
                inv_freq=inv_freq,
                attention_scaling=scaling,
                regime=regime,
            )


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[tuple[float, ...], float, str]]:
    """Yield (inv_freq, attention scaling, regime) of every rotary module, as its last forward left them."""
    seen = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            prefix = name.removesuffix("inv_freq")
            if prefix == name or prefix.endswith(("original_", "long_")):
                continue
            values = tuple(buffer.float().tolist())
            entry = (values, float(getattr(module, f"{prefix}attention_scaling", 1.0)), _regime(module, prefix))
            if entry not in seen:
                seen.add(entry)
                yield entry
    dims = getattr(decoder_config(model), "rotary_dim", None)
    if not seen and isinstance(dims, int):
        # GPT-J and CodeGen keep tables of sines instead of frequencies; their base is fixed.
        yield tuple((10000.0 ** (-torch.arange(0, dims, 2) / dims)).tolist()), 1.0, "default"


def _regime(module: nn.Module, prefix: str) -> str:
    """Name the RoPE type and, where the sequence length selects the frequencies, the branch in force."""
    kind: Any = getattr(module, "rope_type", "default")
    kind = kind.get(prefix.rstrip("_"), "default") if isinstance(kind, dict) else kind
    original = getattr(module, f"{prefix}original_inv_freq", None)
    current = getattr(module, f"{prefix}inv_freq")
    extended = original is not None and not torch.equal(original.to(current), current)
    if kind == "longrope" or "dynamic" in kind:
        return f"{kind}:{'long' if extended else 'short'}"
    return str(kind)
