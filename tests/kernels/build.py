"""Random layers for tests of kernels: constants through a real codec, filled caches, ragged requests, queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcq.codecs.codebook import snap_int8
from kvcq.codecs.encoded import Encoded, affine_words
from kvcq.codecs.packing import PAGE_TOKENS, pack4, write_tokens
from kvcq.codecs.pair import HeadCodec
from kvcq.kernels.arrays import LayerCache, Requests, Tables
from kvcq.kernels.reference import cache_views, reference_query
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan, Windows

K_PLAIN, V_PLAIN = CodecSpec(transform="orthogonal", clip=0.96), CodecSpec(transform="orthogonal", clip=0.92)
VQ = CodecSpec(transform="metric", centred=True, quantizer="group_vq", codebook="int8")


def _with(**changes: Any) -> tuple[CodecSpec, CodecSpec]:
    return K_PLAIN.model_copy(update=changes), V_PLAIN.model_copy(update=changes)


KINDS: dict[str, tuple[CodecSpec, CodecSpec]] = {
    "int2": (K_PLAIN, V_PLAIN),
    "naive": (CodecSpec(), CodecSpec()),
    "centred": _with(centred=True),
    "groups": _with(groups=4, centred=True),
    "v_groups": (K_PLAIN, V_PLAIN.model_copy(update={"groups": 4})),
    "lloyd": _with(spacing="lloyd-nova"),
    "lloyd_main": _with(spacing="lloyd-main", groups=4),
    "vq": (VQ, V_PLAIN.model_copy(update={"centred": True})),
    "vq_groups": (VQ, V_PLAIN.model_copy(update={"groups": 4})),
    "vq_orthogonal": (VQ.model_copy(update={"transform": "orthogonal", "centred": False}), V_PLAIN),
    "int4": _with(bits=4),
    "int4_groups": _with(bits=4, groups=4, centred=True),
}

SMALL = Windows(sink=5, recent=24)


def random_codec(
    kind: str, heads: int, d_k: int, d_v: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> HeadCodec:
    """A codec of `KINDS` with random transforms, offsets and words, served in `dtype`."""
    draw = torch.Generator().manual_seed(seed)
    k, v = KINDS[kind]
    tensors: dict[str, Any] = {}
    for side, spec, d in (("k", k, d_k), ("v", v, d_v)):
        rotation = torch.linalg.qr(torch.randn(heads, d, d, generator=draw, dtype=torch.float64))[0]
        stretch = torch.empty(heads, 1, d, dtype=torch.float64).uniform_(-0.5, 0.5, generator=draw).exp()
        if spec.transform == "orthogonal":
            tensors[f"{side}.transform"] = rotation.float()
        elif spec.transform == "metric":
            tensors[f"{side}.transform"] = (rotation * stretch).float()
            tensors[f"{side}.query"] = (rotation / stretch).float()
        if spec.centred:
            tensors[f"{side}.offset"] = key_mean(heads, d) if side == "k" else 2 * key_mean(heads, d)
        if spec.quantizer == "group_vq":
            words = torch.randn(heads, d // 4, 256, 4, generator=draw)
            tensors[f"{side}.codebook"], tensors[f"{side}.codebook_scale"] = snap_int8(words)
    geometry = LayerGeometry(layer=0, kind="full", q_heads=heads, kv_heads=heads, d_k=d_k, d_v=d_v)
    cast = None if dtype == torch.float32 else dtype
    return HeadCodec.build(LayerPlan(layer=0, k=k, v=v), geometry, tensors, cast=cast, device=device)


def key_mean(heads: int, d: int) -> Tensor:
    """The mean that random keys have, ``[H, d]``."""
    return torch.randn(heads, d, generator=torch.Generator().manual_seed(heads * 1000 + d))


@dataclass(frozen=True)
class Case:
    """One layer with a filled cache and the newest queries of its requests.

    Attributes:
        codec, tables: The layer.
        cache, requests: What is stored.
        k, v: What was stored, original frame, served dtype: ``[n_b, H, d]`` of each request.
        query: Newest queries ``[B, Hq, d_k]``, original frame, served dtype.
        q: The same mapped, served dtype.
        offset: ``q . mu`` float32 ``[B, Hq]``; zeros when not centred.
    """

    codec: HeadCodec
    tables: Tables
    cache: LayerCache
    requests: Requests
    k: list[Tensor]
    v: list[Tensor]
    query: Tensor
    q: Tensor
    offset: Tensor


def random_keys(heads: int, d_k: int, d_v: int, tokens: int, dtype: torch.dtype, draw: torch.Generator) -> Any:
    """Keys and values ``[T, H, d]`` with a mean and a few large channels."""
    k, v = (torch.randn(tokens, heads, d, generator=draw) for d in (d_k, d_v))
    k[..., :: max(d_k // 4, 1)] *= 3
    return (k + key_mean(heads, d_k)).to(dtype), (v + 2 * key_mean(heads, d_v)).to(dtype)


def build_case(
    kind: str,
    lengths: Sequence[int],
    *,
    heads: int = 2,
    group: int = 2,
    d_k: int = 64,
    d_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    windows: Windows = SMALL,
    ring: int | None = None,
    exact_from: Sequence[int] | None = None,
    seed: int = 0,
    fill: bool = True,
) -> Case:
    """Build a layer whose cache holds requests of these lengths.

    Pages lie in random order; nobody's pages, slots and ring rows are NaN, the tails of last pages hold numbers of
    the largest size: what a kernel must not read shows. With `fill` False everything is as nobody's, for writes.

    Args:
        kind: Of `KINDS`.
        lengths: Tokens of each request; 0 is a padding row.
        heads: KV heads.
        group: Query heads of a KV head.
        d_k: Key head dim.
        d_v: Value head dim, None: d_k.
        dtype: Served dtype.
        device: Where everything lies.
        windows: S and W.
        ring: Rows of a ring, None: ``W + 8``.
        exact_from: For each request, the position before which no exact row exists; None: 0.
        seed: Of all random numbers.
        fill: Whether the tokens are stored.
    """
    d_v = d_k if d_v is None else d_v
    draw = torch.Generator().manual_seed(seed)
    codec = random_codec(kind, heads, d_k, d_v, dtype, device, seed)
    tables = Tables.of(codec, heads, d_k, d_v, dtype, torch.device(device))
    requests = random_requests(lengths, device, exact_from, draw)
    cache = empty_cache(tables, requests, windows, windows.recent + 8 if ring is None else ring, dtype)
    pairs = [random_keys(heads, d_k, d_v, n, dtype, draw) for n in lengths]
    k, v = ([pair[i].to(device) for pair in pairs] for i in (0, 1))
    if fill:
        for b in range(len(lengths)):
            store_request(codec, tables, cache, requests, b, k[b], v[b])
    query = (torch.randn(len(lengths), heads * group, d_k, generator=draw) * 1.5).to(dtype).to(device)
    mapped, offset = reference_query(tables, query)
    shift = torch.zeros(query.shape[:2], device=device) if offset is None else offset.float()
    return Case(codec, tables, cache, requests, k, v, query, mapped.to(dtype), shift)


def random_requests(
    lengths: Sequence[int], device: torch.device | str, exact_from: Sequence[int] | None, draw: torch.Generator
) -> Requests:
    """Requests with random pages and slots; columns behind a request name the last page, which is nobody's."""
    needed = [-(-n // PAGE_TOKENS) for n in lengths]
    total = sum(needed) + 3
    order = torch.randperm(total - 1, generator=draw).tolist()
    table = torch.full((len(lengths), max(needed) + 2), total - 1)
    for b, count in enumerate(needed):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.long)
    slots = torch.randperm(len(lengths) + 2, generator=draw)[: len(lengths)]
    exact = torch.zeros(len(lengths)) if exact_from is None else torch.tensor(exact_from)
    parts = (table, slots, torch.tensor(lengths), exact)
    return Requests(*(part.to(torch.int32).to(device) for part in parts))


def empty_cache(tables: Tables, requests: Requests, windows: Windows, ring: int, dtype: torch.dtype) -> LayerCache:
    """A cache that holds nothing: every page, sink and ring row is NaN."""
    device, heads = requests.lengths.device, tables.heads
    block = tables.block_bytes
    pages = torch.full((int(requests.page_table.max()) + 1, heads, block), 0xFF, dtype=torch.uint8, device=device)

    def rows(count: int, d: int) -> Tensor:
        return torch.full((requests.batch + 2, heads, count, d), torch.nan, dtype=dtype, device=device)

    tiers = (rows(count, d) for count in (windows.sink, ring) for d in (tables.k.d, tables.v.d))
    return LayerCache(pages, *tiers, windows=windows)


def store_request(
    codec: HeadCodec, tables: Tables, cache: LayerCache, requests: Requests, b: int, k: Tensor, v: Tensor
) -> None:
    """Store the tokens of one request, ``[n, H, d]``, by way of the codecs."""
    n = k.shape[0]
    if n == 0:
        return
    r, rows = codec.key_frame(k.transpose(0, 1)), codec.value_frame(v.transpose(0, 1))
    coded_k, coded_v = codec.encode_keys(r), codec.encode_values(rows)
    pages = requests.page_table[b, : -(-n // PAGE_TOKENS)].long()
    own = cache.pages[pages]
    views = cache_views(tables, own)
    views[2][:] = 6e4
    parts = (_bytes(coded_k, tables.k.bits), _bytes(coded_v, tables.v.bits), affine_words(coded_k, coded_v))
    write_tokens(views, 0, parts)
    cache.pages[pages] = own
    store_windows(cache, requests, b, n, r, rows)


def store_windows(cache: LayerCache, requests: Requests, b: int, n: int, r: Tensor, rows: Tensor) -> None:
    """Keep the sink and ring rows of a request of length n, out of its rows ``[H, >= n, d]``."""
    slot, sink = int(requests.slots[b]), min(cache.windows.sink, n)
    recent = torch.arange(max(n - cache.ring, int(requests.exact_from[b]), 0), max(n, 0), device=r.device)
    for row, sinks, rings in ((r, cache.sink_k, cache.ring_k), (rows, cache.sink_v, cache.ring_v)):
        sinks[slot, :, :sink] = row[:, :sink].to(sinks.dtype)
        rings[slot, :, recent % cache.ring] = row[:, recent].to(rings.dtype)


def before_chunk(case: Case, firsts: Sequence[int]) -> Case:
    """The same case with sinks and rings as they were at other lengths; pages and lengths stay.

    The tokens from there on are a chunk whose codes are in the pages and whose exact rows lie in no buffer.
    """
    old = case.cache
    tiers = {name: torch.full_like(getattr(old, name), torch.nan) for name in ("sink_k", "sink_v", "ring_k", "ring_v")}
    cache = replace(old, **tiers)
    for b, first in enumerate(firsts):
        r, rows = (frame(x[b].transpose(0, 1)) for frame, x in zip(_frames(case), (case.k, case.v), strict=True))
        store_windows(cache, case.requests, b, first, r, rows)
    return replace(case, cache=cache)


def with_lengths(case: Case, lengths: Sequence[int]) -> Case:
    """The same cache with other lengths in its requests."""
    held = torch.tensor(lengths, dtype=torch.int32, device=case.q.device)
    return replace(case, requests=replace(case.requests, lengths=held))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """``|found - wanted| / |wanted|`` over all elements, in float64."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def _frames(case: Case) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return case.codec.key_frame, case.codec.value_frame


def _bytes(coded: Encoded, bits: int) -> Tensor:
    return coded.codes if bits == 2 else pack4(coded.codes)
