"""Layers filled with random numbers, on the device: constants through a real codec, pages in random order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.packing import PAGE_TOKENS, page_views
from kvcq.codecs.pair import HeadCodec
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.pipeline.bench.shapes import WINDOWS, Shape
from kvcq.spec.codec import VQ_GROUP, VQ_WORDS, CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan

SERVED = torch.bfloat16
RING_SLACK = 64
SCALE, SPREAD = 0.9, 0.25
INT8_MAX = 127

_K, _V = CodecSpec(transform="orthogonal", clip=0.96), CodecSpec(transform="orthogonal", clip=0.92)
_VQ = CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8")
CODECS: dict[str, tuple[CodecSpec, CodecSpec]] = {
    "int2": (_K, _V),
    "vq": (_VQ, CodecSpec(transform="orthogonal", centred=True)),
    "int2x4": (_K.model_copy(update={"groups": 4}), _V.model_copy(update={"groups": 4})),
    "vqx4": (_VQ, CodecSpec(transform="orthogonal", centred=True, groups=4)),
}
# With what is written, but not decoded by a kernel.
STORED = CODECS | {"int4": (_K.model_copy(update={"bits": 4}), _V.model_copy(update={"bits": 4}))}


@dataclass(frozen=True)
class Step:
    """The layers of one step; all have the same requests.

    Attributes:
        shape: Of each layer.
        tables, caches: Constants and storage of each layer.
        requests: The batch.
        scaling: Factor on products.
    """

    shape: Shape
    tables: list[Tables]
    caches: list[LayerCache]
    requests: Requests
    scaling: float

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.requests.lengths.device

    def random(self, *size: int) -> Tensor:
        """Return normal numbers in the served dtype."""
        return torch.randn(size, dtype=self.tables[0].k.map.dtype, device=self.device)


def words_of(codec: str) -> int:
    """Return the affine words of a token and head."""
    return max(side.groups for side in STORED[codec])


def build_step(
    codec: str,
    shape: Shape,
    layers: int,
    *,
    fill: bool = True,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = SERVED,
) -> Step:
    """Build layers whose pages hold random codes, with scales near one, and whose exact rows are normal.

    Args:
        codec: Of `CODECS`.
        shape: Of each layer.
        layers: How many.
        fill: False leaves all storage as it was allocated, for writes.
        device: Where everything lies.
        dtype: Served dtype.
    """
    tables = [random_tables(codec, shape, torch.device(device), dtype) for _ in range(layers)]
    requests = random_requests(shape, torch.device(device))
    caches = [random_cache(codec, shape, one, fill=fill) for one in tables]
    return Step(shape, tables, caches, requests, shape.d**-0.5)


def random_tables(codec: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Tables:
    """Return the constants of one layer."""
    heads, d = shape.heads, shape.d
    tensors: dict[str, Any] = {}
    for side, spec in zip("kv", STORED[codec], strict=True):
        left, right = reflection(heads, d, device), reflection(heads, d, device)
        stretch = torch.empty(heads, 1, d, dtype=torch.float64, device=device).uniform_(-SPREAD, SPREAD).exp()
        if spec.transform == "orthogonal":
            tensors[f"{side}.transform"] = left @ right
        if spec.transform == "metric":
            tensors[f"{side}.transform"], tensors[f"{side}.query"] = (left * stretch) @ right, (left / stretch) @ right
        if spec.centred:
            tensors[f"{side}.offset"] = torch.randn(heads, d, device=device)
        if spec.quantizer == "group_vq":
            shape_of_words = (heads, d // VQ_GROUP, VQ_WORDS, VQ_GROUP)
            words = torch.randint(-INT8_MAX, INT8_MAX + 1, shape_of_words, device=device, dtype=torch.int8)
            # The scale of a group is that of its largest coordinate.
            words[:, :, 0, 0] = INT8_MAX
            tensors[f"{side}.codebook"] = words
            scale = torch.empty(heads, d // VQ_GROUP, device=device).uniform_(1 - SPREAD, 1 + SPREAD)
            tensors[f"{side}.codebook_scale"] = scale / (INT8_MAX / 3**0.5)
    geometry = LayerGeometry(layer=0, kind="full", q_heads=shape.q_heads, kv_heads=heads, d_k=d, d_v=d)
    plan = LayerPlan(layer=0, k=STORED[codec][0], v=STORED[codec][1])
    built = HeadCodec.build(plan, geometry, tensors, cast=dtype, device=device)
    return Tables.of(built, heads, d, d, dtype, device)


def reflection(heads: int, d: int, device: torch.device) -> Tensor:
    """Return a random Householder matrix of each head, float64 ``[H, d, d]``; the product of two is a rotation."""
    axis = torch.nn.functional.normalize(torch.randn(heads, d, dtype=torch.float64, device=device), dim=-1)
    return torch.eye(d, dtype=torch.float64, device=device) - 2 * axis[:, :, None] * axis[:, None]


def random_requests(shape: Shape, device: torch.device) -> Requests:
    """Return requests of equal length whose pages lie anywhere."""
    options: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return Requests(
        page_table=torch.randperm(shape.pages, **options).view(shape.batch, -1),
        slots=torch.randperm(shape.batch, **options),
        lengths=torch.full((shape.batch,), shape.context, **options),
        exact_from=torch.zeros(shape.batch, **options),
    )


def random_cache(codec: str, shape: Shape, tables: Tables, *, fill: bool) -> LayerCache:
    """Return the storage of one layer."""
    device = tables.k.map.device
    if fill:
        pages = random_pages(shape.pages, shape, tables)
    else:
        pages = torch.empty((shape.pages, shape.heads, tables.block_bytes), dtype=torch.uint8, device=device)
    make: Callable[..., Tensor] = partial(torch.randn if fill else torch.empty, dtype=tables.k.map.dtype, device=device)
    sink, ring = WINDOWS.sink, WINDOWS.recent + RING_SLACK
    sink_k, sink_v, ring_k, ring_v = (make(shape.batch, shape.heads, n, shape.d) for n in (sink, sink, ring, ring))
    return LayerCache(pages, sink_k, sink_v, ring_k, ring_v, WINDOWS)


def random_pages(count: int, shape: Shape, tables: Tables) -> Tensor:
    """Return page blocks of random codes, uint8 ``[count, H, block bytes]``, with scales near one."""
    device = tables.k.map.device
    pages = torch.randint(0, 256, (count, shape.heads, tables.block_bytes), dtype=torch.uint8, device=device)
    _, _, words = page_views(pages, shape.d, shape.d, tables.words)
    for at, vector in ((0, tables.vq), (2, False)):
        scale = torch.empty(words.shape[:-1], device=device).uniform_(SCALE * (1 - SPREAD), SCALE * (1 + SPREAD))
        words[..., at] = scale
        # Codes 0..3 lie around zero then.
        words[..., at + 1] = 0.0 if vector else -1.5 * scale
    return pages


def random_queries(step: Step) -> list[Tensor]:
    """Return mapped queries ``[tokens, Hq, d]`` of each layer."""
    shape = step.shape
    return [step.random(shape.batch * shape.chunk, shape.q_heads, shape.d) for _ in step.caches]


def token_slots(requests: Requests, first: int, stop: int) -> Tensor:
    """Return the slots, int64 ``[B (stop - first)]``, of the tokens at these positions, request by request."""
    at = torch.arange(first, stop, device=requests.page_table.device)
    pages = requests.page_table.long()[:, at // PAGE_TOKENS]
    return (pages * PAGE_TOKENS + at % PAGE_TOKENS).flatten()
