"""Which tensors a plan calls for: name, role, shape and dtype of every one, from plan and geometry alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcq.errors import CorruptArtifactError
from kvcq.spec.codec import VQ_GROUP, VQ_WORDS, CodecSpec
from kvcq.spec.files import TensorEntry
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows

CODES_PER_BYTE = 4


@dataclass(frozen=True)
class Expected:
    """A tensor that the plan calls for; an optional one may be absent, but has this form when present."""

    entry: TensorEntry
    optional: bool = False


def check_plan(plan: Sequence[LayerPlan], geometry: ModelGeometry, where: str) -> None:
    """Check that the plan has one entry a layer, in order, and quantizes only what a codec can hold.

    Raises:
        CorruptArtifactError: a missing, repeated or foreign layer, a layer without a growing cache, or a codec
            that does not fit the head dim.
    """
    ids = [layer.layer for layer in geometry.layers]
    if ids != sorted(set(ids)):
        raise CorruptArtifactError("geometry layers are repeated or out of order", where=where)
    if [entry.layer for entry in plan] != ids:
        raise CorruptArtifactError("the plan does not have one entry for each layer, in order", where=where)
    for entry, layer in zip(plan, geometry.layers, strict=True):
        if entry.k is None or entry.v is None:
            continue
        if layer.kind != "full" or not layer.kv_heads or layer.q_heads % layer.kv_heads:
            raise CorruptArtifactError(f"layer {layer.layer} ({layer.kind}) cannot be quantized", where=where)
        for side, spec, dim in (("k", entry.k, layer.d_k), ("v", entry.v, layer.d_v)):
            if dim == 0 or dim % CODES_PER_BYTE or dim % spec.groups:
                problem = f"layer {layer.layer} {side}: head dim {dim} does not split into {spec.groups} groups"
                raise CorruptArtifactError(problem, where=where)
        if entry.v.transform == "metric":
            raise CorruptArtifactError(f"layer {layer.layer} v: values take no metric transform", where=where)
        if entry.v.pre_rope or (entry.k.pre_rope and layer.rope is not None and not layer.unrotates):
            raise CorruptArtifactError(f"layer {layer.layer}: rows that RoPE cannot be taken off", where=where)


def check_windows(plan: Sequence[LayerPlan], windows: Windows, where: str) -> None:
    """Check that groups of tokens start where the sink ends and are complete before they leave the recent window.

    Raises:
        CorruptArtifactError: names the layer and the side.
    """
    for entry in plan:
        for side, spec in (("k", entry.k), ("v", entry.v)):
            if spec is None or spec.quantizer != "token_group":
                continue
            if spec.group_start != windows.sink or spec.group_tokens > windows.recent:
                problem = f"groups of {spec.group_tokens} tokens from {spec.group_start} on do not fit the windows"
                raise CorruptArtifactError(f"layer {entry.layer} {side}: {problem}", where=where)


def expected_tensors(plan: Sequence[LayerPlan], geometry: ModelGeometry) -> dict[str, Expected]:
    """Return what the plan calls for, by name ``layers.<id>.<side>.<role>``."""
    found = {}
    for entry, layer in zip(plan, geometry.layers, strict=True):
        for expected in _layer(entry, layer):
            found[expected.entry.name] = expected
    return found


def _layer(plan: LayerPlan, layer: LayerGeometry) -> Iterator[Expected]:
    if plan.k is None or plan.v is None:
        return
    for side, spec, dim in (("k", plan.k, layer.d_k), ("v", plan.v, layer.d_v)):
        for role, shape, dtype, optional in _side(spec, layer.kv_heads, dim):
            name = f"{side}.{role}"
            entry = TensorEntry(name=f"layers.{plan.layer}.{name}", role=name, shape=shape, dtype=dtype)
            yield Expected(entry, optional)


def _side(spec: CodecSpec, heads: int, dim: int) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """Yield role, shape, dtype and whether it is optional, for one side of a layer."""
    if spec.transform != "identity":
        yield "transform", (heads, dim, dim), "F32", False
    if spec.transform == "metric":
        yield "query", (heads, dim, dim), "F32", False
    if spec.centred:
        yield "offset", (heads, dim), "F32", False
    if spec.quantizer == "group_vq":
        words = (heads, dim // VQ_GROUP, VQ_WORDS, VQ_GROUP)
        served = spec.codebook == "int8"
        yield "codebook", words, "I8" if served else "F16", False
        if served:
            yield "codebook_scale", words[:2], "F32", False
        # Float8 words are stored as the float16 they snap to: the raw centroids beside them are a courtesy.
        yield "codebook_fp16", words, "F16", not served
    if spec.quantizer == "levels":
        yield "levels", (heads, 2**spec.bits), "F32", False
    if spec.unit == "channel":
        yield "bounds", (heads, dim, 2), "F32", False
    if spec.reordered:
        yield "order", (heads, dim), "I32", False
