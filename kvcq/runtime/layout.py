"""Bytes of the served cache, by arithmetic alone (no torch): what is stored, per token and per page.

Every token of a quantized layer has a coded row, the exact ones included; the exact rows lie beside it::

    page block, one per (layer, page of 64 tokens, KV head)
    +-----------------------+-----------------------+----------------------------+
    | K codes  64 x d_k/4 B | V codes  64 x d_v/4 B | affine  64 x 8 B x groups  |
    +-----------------------+-----------------------+----------------------------+
    BF16 rows, one buffer per (layer, request, KV head): S sink rows, a ring of W + 64 recent rows

An affine word holds {s_k, b_k, s_v, b_v} of one token and group; keys and values share the words, so the side with
more groups decides how many there are, and vector quantization leaves b_k unused.

A codec that no page holds is counted side by side, by what it needs: its codes, the numbers that decode them, and the
values and indices of entries kept exact. Its tokens are still counted in runs of 64, beside the same BF16 rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import ceil, prod

from kvcq.spec.codec import CodecSpec
from kvcq.spec.files import TensorEntry
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.plan import LayerPlan, Windows
from kvcq.spec.report import BitsEntry

PAGE = 64
RING_SLACK = 64
BF16_BYTES = 2

_WORD_NUMBERS = 4
_PAGED = ("none", "uniform", "group_vq")
_OUTLIER_BYTES = 2
_NUMBER_BYTES = {"fp16-bias": 2, "fp32-zero": 4}
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
}


def token_bytes(k: CodecSpec, v: CodecSpec, d_k: int, d_v: int) -> tuple[float, float]:
    """Return (code bytes, metadata bytes) of one token and KV head; fractions where tokens share what is stored.

    At d_k = d_v = 128 and one group: (64, 8), 2.25 bits an element.
    """
    sides = ((k, d_k), (v, d_v))
    codes = sum(_row_bytes(side, d) for side, d in sides)
    if any(side.quantizer not in _PAGED for side, _ in sides):
        return codes, sum(_own_metadata(side, d) for side, d in sides)
    coded = [side for side, _ in sides if side.quantizer != "none"]
    words = max((side.groups for side in coded), default=0)
    number = max((_NUMBER_BYTES[side.metadata] for side in coded), default=0)
    return codes, words * _WORD_NUMBERS * number


def page_bytes(k: CodecSpec, v: CodecSpec, d_k: int, d_v: int) -> int:
    """Return the bytes of one page block: 64 tokens of one layer and KV head.

    Raises:
        ValueError: codecs that no page holds.
    """
    if any(side.quantizer not in _PAGED for side in (k, v)):
        raise ValueError(f"no page holds it: {k.unserved or v.unserved}")
    return int(PAGE * sum(token_bytes(k, v, d_k, d_v)))


def bits_per_element(plan: Sequence[LayerPlan], geometry: ModelGeometry, windows: Windows, context: int) -> BitsEntry:
    """Return what one request of `context` tokens stores in the quantized layers, in bits per cached element.

    Pages are whole and the BF16 buffers have their full size at any context: this is what is allocated, not what is
    filled. A plan without quantized layers counts as BF16, 16 bits.

    Raises:
        ValueError: `context` is not positive, or the plan names a layer that the geometry lacks.
    """
    if context < 1:
        raise ValueError(f"context must be positive, not {context}")
    tokens = ceil(context / PAGE) * PAGE
    rows = windows.sink + windows.recent + RING_SLACK
    elements = exact = 0
    codes = metadata = 0.0
    for layer, k, v in _quantized(plan, geometry):
        code, meta = token_bytes(k, v, layer.d_k, layer.d_v)
        elements += layer.kv_heads * (layer.d_k + layer.d_v)
        codes += layer.kv_heads * code
        metadata += layer.kv_heads * meta
        exact += layer.kv_heads * (layer.d_k + layer.d_v) * BF16_BYTES
    if not elements:
        return BitsEntry(context=context, codes=16.0, metadata=0.0, windows=0.0, total=16.0)
    cached = context * elements
    parts = [8 * total / cached for total in (codes * tokens, metadata * tokens, exact * rows)]
    return BitsEntry(context=context, codes=parts[0], metadata=parts[1], windows=parts[2], total=sum(parts))


def kv_bytes_per_token(plan: Sequence[LayerPlan], geometry: ModelGeometry) -> float:
    """Return the bytes that one more token adds to the cache, over all layers and heads.

    Full-attention layers kept in BF16 count; windows do not grow, nor do sliding, linear and shared layers.
    """
    coded = {layer.layer: _coded_row(layer, k, v) for layer, k, v in _quantized(plan, geometry)}
    return sum(coded.get(layer.layer, _bf16_row(layer)) for layer in geometry.quantizable())


def coded_bytes_per_token(plan: Sequence[LayerPlan], geometry: ModelGeometry) -> float:
    """Return the bytes of one token's coded rows, over all quantized layers and heads."""
    return sum(_coded_row(layer, k, v) for layer, k, v in _quantized(plan, geometry))


def covered_share(layers: Collection[int], geometry: ModelGeometry, context: int) -> float:
    """Return the share of a BF16 cache's bytes that some layers hold at a context: what quantizing them can touch.

    Sliding and chunked layers hold their window at most, shared layers nothing of their own; the constant states of
    linear layers are not counted.
    """
    held = {
        layer.layer: _bf16_row(layer) * min(context, layer.window or context)
        for layer in geometry.layers
        if layer.kind != "shared"
    }
    return sum(held[layer] for layer in layers) / max(sum(held.values()), 1)


def window_bytes(plan: Sequence[LayerPlan], geometry: ModelGeometry, windows: Windows) -> int:
    """Return the bytes of one request's BF16 sink and recent rows, over all quantized layers and heads."""
    rows = windows.sink + windows.recent + RING_SLACK
    return sum(_bf16_row(layer) * rows for layer, _, _ in _quantized(plan, geometry))


def constants_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Return the bytes of transforms, offsets and codebooks: stored once, whatever the context.

    Raises:
        ValueError: a dtype that no bundle holds.
    """
    total = 0
    for tensor in tensors:
        if tensor.dtype not in _DTYPE_BYTES:
            raise ValueError(f"{tensor.name}: no size is known for dtype {tensor.dtype}")
        total += prod(tensor.shape) * _DTYPE_BYTES[tensor.dtype]
    return total


def _row_bytes(side: CodecSpec, d: int) -> int:
    """Return the bytes of a row's codes; promoted channels of token groups have twice the bits."""
    if side.quantizer == "none":
        return d * BF16_BYTES
    return ceil((d + side.promoted_channels(d)) * side.bits / 8)


def _own_metadata(side: CodecSpec, d: int) -> float:
    """Return what decodes one row of a codec outside of pages, codes apart, in bytes.

    An outlier is a float16 value and the index of its channel; where their number varies by row, a byte holds it.
    """
    number = _NUMBER_BYTES[side.metadata]
    index = 1 if d <= 256 else 2
    if side.quantizer == "uniform":
        return side.groups * 2 * number
    if side.quantizer == "token_group":
        return (d * 2 * number + side.promoted_channels(d) * index) / side.group_tokens
    if side.unit == "channel":
        return side.outliers * d * (_OUTLIER_BYTES + index) + (1 if side.outliers else 0)
    if side.unit == "range":
        return 2 * number + side.row_outliers(d) * (_OUTLIER_BYTES + index)
    return number if side.quantizer in ("levels", "group_vq") else 0


def _coded_row(layer: LayerGeometry, k: CodecSpec, v: CodecSpec) -> float:
    return layer.kv_heads * sum(token_bytes(k, v, layer.d_k, layer.d_v))


def _bf16_row(layer: LayerGeometry) -> int:
    return layer.kv_heads * (layer.d_k + layer.d_v) * BF16_BYTES


def _quantized(
    plan: Sequence[LayerPlan], geometry: ModelGeometry
) -> Iterator[tuple[LayerGeometry, CodecSpec, CodecSpec]]:
    layers = {layer.layer: layer for layer in geometry.layers}
    for entry in plan:
        if entry.k is None or entry.v is None:
            continue
        if entry.layer not in layers:
            raise ValueError(f"the plan names layer {entry.layer}, which the model does not have")
        yield layers[entry.layer], entry.k, entry.v
