"""What every kernel must compute, in torch: float64 over the dequantized cache, loops over requests, no Triton.

Bits are read and written through `codecs.packing`, rows are coded by the very functions of the codecs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcq.codecs.codebook import lookup, nearest
from kvcq.codecs.packing import PAGE_TOKENS, pack2, pack4, page_views, unpack2, unpack4
from kvcq.codecs.side import RHO_FLOOR
from kvcq.codecs.uniform import FP16_MAX, encode_uniform
from kvcq.kernels.arrays import LayerCache, Requests, SideTables, Tables
from kvcq.spec.codec import VQ_GROUP

QUERY_BLOCK = 64


def cache_views(tables: Tables, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of the pages: K bytes and V bytes uint8 ``[pages, H, 64, bytes]``, words ``[..., G, 4]``."""
    return page_views(pages, tables.k.d, tables.v.d, tables.words, (tables.k.bits, tables.v.bits))


def reference_rows(tables: Tables, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the frame rows ``r = k A - mu A`` and ``v' = v R_V - nu R_V``, rounded to the served dtype.

    Args:
        tables: Constants of the layer.
        k: Keys ``[T, H, d_k]``.
        v: Values ``[T, H, d_v]``.

    Returns:
        ``[T, H, d_k]`` and ``[T, H, d_v]`` in the dtype of the maps.
    """
    pair = ((tables.k, k), (tables.v, v))
    r, rows = (
        (torch.einsum("thd,hde->the", x.double(), side.map.double()) - side.shift.double()).to(side.map.dtype)
        for side, x in pair
    )
    return r, rows


def reference_query(tables: Tables, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mapped queries ``q~ = q S`` and ``q . mu``, both float64, of queries ``[T, Hq, d_k]``.

    The second one, ``[T, Hq]``, is None for keys that are not centred.
    """
    grouped = q.double().unflatten(1, (tables.heads, -1))
    mapped = torch.einsum("thgd,hde->thge", grouped, tables.k.dual.double()).flatten(1, 2)
    if tables.k.offset is None:
        return mapped, None
    return mapped, torch.einsum("thgd,hd->thg", grouped, tables.k.offset.double()).flatten(1, 2)


def reference_write(
    tables: Tables,
    cache: LayerCache,
    k: Tensor,
    v: Tensor,
    *,
    slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    batch: Requests,
    windows: bool,
) -> tuple[Tensor, Tensor, int]:
    """Code tokens into their pages and, on demand, keep their exact rows in sinks and rings; in place.

    Args:
        tables: Constants of the layer.
        cache: Written to.
        k: Keys ``[T, H, d_k]``, post-RoPE.
        v: Values ``[T, H, d_v]``.
        slots: int64 ``[T]``, page times 64 plus place; negative: the token is not stored at all.
        positions: int32 ``[T]``.
        requests: int32 ``[T]``, row of each token in `batch`.
        batch: The requests, these tokens included in their lengths.
        windows: Whether exact rows are kept too.

    Returns:
        The frame rows r and v' as `reference_rows` gives them, and how many values float16 could not hold.
    """
    r, rows = reference_rows(tables, k, v)
    stored = slots >= 0
    k_view, v_view, words = cache_views(tables, cache.pages)
    page, place = slots[stored] // PAGE_TOKENS, slots[stored] % PAGE_TOKENS
    k_codes, s_k, b_k, k_clamped = encode_rows(tables.k, r[stored], _words(tables))
    v_codes, s_v, b_v, v_clamped = encode_rows(tables.v, rows[stored], None)
    k_view[page, :, place] = k_codes
    v_view[page, :, place] = v_codes
    # A side with one group repeats its pair in every word.
    shape = (*k_codes.shape[:2], tables.words)
    words[page, :, place] = torch.stack([part.expand(shape) for part in (s_k, b_k, s_v, b_v)], -1)
    if windows:
        reference_windows(cache, (r[stored], rows[stored]), positions[stored], requests[stored], batch)
    return r, rows, k_clamped + v_clamped


def reference_windows(
    cache: LayerCache, rows: tuple[Tensor, Tensor], positions: Tensor, requests: Tensor, batch: Requests
) -> None:
    """Copy frame rows ``[T, H, d]`` into sinks (p < S) and rings (the last R positions of a request); in place."""
    slots, at = batch.slots.long()[requests.long()], positions.long()
    sink = at < cache.windows.sink
    ring = at >= batch.lengths.long()[requests.long()] - cache.ring
    for row, sinks, rings in zip(rows, (cache.sink_k, cache.sink_v), (cache.ring_k, cache.ring_v), strict=True):
        sinks[slots[sink], :, at[sink]] = row[sink]
        rings[slots[ring], :, at[ring] % cache.ring] = row[ring]


def encode_rows(side: SideTables, rows: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Code frame rows as `codecs.side` does.

    Args:
        side: Constants of the side.
        rows: ``[T, H, d]``.
        words: Codebook words float32 ``[H, d/4, 256, 4]``, or None for uniform codes.

    Returns:
        Bytes uint8 ``[T, H, d bits / 8]``, scale and bias float16 ``[T, H, groups]``, clamped values.
    """
    x = rows.float()
    if words is None:
        if side.rank < side.d - 1:
            bound = x.abs().kthvalue(side.rank + 1, dim=-1, keepdim=True).values
            x = x.clamp(-bound, bound)
        codes, scale, bias, clamped = encode_uniform(x, side.groups, side.bits, "fp16-bias", side.spacing)
        return (pack2(codes) if side.bits == 2 else pack4(codes)), scale, bias, int(clamped)
    rho = x.square().mean(-1, keepdim=True).sqrt().clamp(min=RHO_FLOOR)
    count = int((rho > FP16_MAX).sum())
    rho = rho.clamp(max=FP16_MAX).half()
    divisor = rho.float()
    x = torch.where(divisor > 0, x / torch.where(divisor > 0, divisor, 1.0), 0.0)
    grouped = x.unflatten(-1, (-1, VQ_GROUP)).permute(1, 2, 0, 3).flatten(0, 1).contiguous()
    index = nearest(grouped, words.flatten(0, 1)).unflatten(0, words.shape[:2])
    return index.permute(2, 0, 1).contiguous(), rho, torch.zeros_like(rho), count


def decode_rows(tables: Tables, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows r_hat and v'_hat of whole pages, float64 ``[H, 64 pages, d]``.

    Args:
        tables: Constants of the layer.
        pages: Page blocks uint8 ``[pages, H, block bytes]`` in the order of their tokens.
    """
    k_view, v_view, words = (part.transpose(0, 1).flatten(1, 2) for part in cache_views(tables, pages))
    affine = words.double()
    book = _words(tables)
    if book is None:
        k = _affine(_codes(k_view, tables.k.bits), affine[..., 0], affine[..., 1], tables.k.groups)
    else:
        k = lookup(k_view, book).double() * affine[..., :1, 0]
    return k, _affine(_codes(v_view, tables.v.bits), affine[..., 2], affine[..., 3], tables.v.groups)


def reference_decode(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    offset: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    rotate: bool = True,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Attend with the newest token of every request.

    Keys ``S <= j < max(n - W, exact_from, S)`` are read from pages, all others from sinks and rings. The output is
    ``o' R_V^T + nu m`` with m the softmax mass of the rows; a request that sees nothing gets zeros.

    Args:
        tables: Constants of the layer.
        cache: What is stored.
        requests: The batch.
        q: Mapped queries ``[B, Hq, d_k]``.
        scaling: Factor on products.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        offset: ``q . mu`` float32 ``[B, Hq]``, or None for zeros.
        sinks: Learned sink logits float32 ``[Hq]``.
        window: A query at i sees only ``j > i - window``.
        rotate: False leaves o' as it is.
        rows: Requests to do, in this order; None: all.

    Returns:
        float64 ``[len(rows), Hq, d_v]``.
    """
    chosen = range(requests.batch) if rows is None else rows
    outputs = []
    for b in chosen:
        n, start = int(requests.lengths[b]), int(requests.exact_from[b])
        oldest = torch.tensor([max(n - cache.windows.recent, start)], device=q.device)
        exact = _stored_rows(cache, requests, b, n)
        shift = None if offset is None else offset[b, :, None]
        outputs.append(
            _attend(tables, cache, requests, b, q[b, :, None], n, exact, oldest, scaling, softcap, shift, sinks, window)
        )
    o, mass = (torch.cat(part, 1).transpose(0, 1) for part in zip(*outputs, strict=True))
    return _output(tables, o, mass) if rotate else o


def reference_extend(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    q: Tensor,
    rows: tuple[Tensor, Tensor],
    *,
    starts: Tensor,
    oldest: Tensor,
    scaling: float,
    softcap: float | None = None,
    offset: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    rotate: bool = True,
) -> Tensor:
    """Attend causally with a chunk of new tokens of every request.

    Query i reads key j from pages iff ``S <= j < oldest_i``, else exactly: positions before the chunk from sinks
    and rings, which the chunk has not reached yet, later ones from `rows`.

    Args:
        tables: Constants of the layer.
        cache: What is stored; the codes of the chunk are in the pages already.
        requests: The batch; lengths include the chunks.
        q: Mapped queries ``[T, Hq, d_k]``, the chunks one after another.
        rows: Frame rows of the same tokens, ``[T, H, d_k]`` and ``[T, H, d_v]``.
        starts: int32 ``[B + 1]``, where the chunk of each request begins in `q`.
        oldest: int32 ``[T]``, oldest position behind the sinks that a query reads exactly.
        scaling: Factor on products.
        softcap: As in `reference_decode`.
        offset: ``q . mu`` float32 ``[T, Hq]``.
        sinks: Learned sink logits float32 ``[Hq]``.
        window: A query at i sees only ``j > i - window``.
        rotate: False leaves o' as it is.

    Returns:
        float64 ``[T, Hq, d_v]``.

    Raises:
        ValueError: a query reads exact rows that neither the ring nor the chunk has.
    """
    outputs, masses = [], []
    for b in range(requests.batch):
        chunk = slice(int(starts[b]), int(starts[b + 1]))
        first = int(requests.lengths[b]) - (chunk.stop - chunk.start)
        at, k, v = _stored_rows(cache, requests, b, first)
        # The chunk's own rows, those below S included: the sinks do not hold them yet.
        own = torch.arange(first, first + chunk.stop - chunk.start, device=q.device)
        new_k, new_v = (part[chunk].transpose(0, 1).double() for part in rows)
        exact = torch.cat([at, own]), torch.cat([k, new_k], 1), torch.cat([v, new_v], 1)
        for begin in range(chunk.start, chunk.stop, QUERY_BLOCK):
            part = slice(begin, min(begin + QUERY_BLOCK, chunk.stop))
            o, mass = _attend(
                tables,
                cache,
                requests,
                b,
                q[part].transpose(0, 1),
                first + part.stop - chunk.start,
                exact,
                oldest[part].long(),
                scaling,
                softcap,
                None if offset is None else offset[part].T,
                sinks,
                window,
            )
            outputs.append(o)
            masses.append(mass)
    if not outputs:
        return q.new_zeros(0, q.shape[1], tables.v.d, dtype=torch.float64)
    o, mass = torch.cat(outputs, 1).transpose(0, 1), torch.cat(masses, 1).transpose(0, 1)
    return _output(tables, o, mass) if rotate else o


def _stored_rows(cache: LayerCache, requests: Requests, b: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what sinks and ring hold of request b once its length is n: positions, r and v' float64 ``[H, e, d]``."""
    slot, sink = int(requests.slots[b]), min(cache.windows.sink, n)
    first = max(n - cache.ring, int(requests.exact_from[b]), sink)
    low, high = torch.arange(sink), torch.arange(first, max(n, first))
    device = cache.pages.device
    places = (low.to(device), (high % cache.ring).to(device))
    pair = ((cache.sink_k, cache.ring_k), (cache.sink_v, cache.ring_v))
    k, v = (torch.cat([part[slot][:, at] for part, at in zip(tier, places, strict=True)], 1) for tier in pair)
    return torch.cat([low, high]).to(device), k.double(), v.double()


def _attend(
    tables: Tables,
    cache: LayerCache,
    requests: Requests,
    b: int,
    q: Tensor,
    stop: int,
    exact: tuple[Tensor, Tensor, Tensor],
    oldest: Tensor,
    scaling: float,
    softcap: float | None,
    offset: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attend with consecutive queries ``[Hq, n, d_k]`` of request b, the last one at position stop - 1.

    Returns:
        o' ``[Hq, n, d_v]`` and the softmax mass of its rows ``[Hq, n, 1]``, float64.
    """
    at, k_exact, v_exact = exact
    sink = cache.windows.sink
    own = torch.arange(stop - q.shape[1], stop, device=q.device)
    last = max(min(int(oldest.max()), stop), 0) if len(oldest) else 0
    pages = requests.page_table[b, : -(-last // PAGE_TOKENS)].long()
    k_hat, v_hat = (part[:, :last] for part in decode_rows(tables, cache.pages[pages]))
    coded = torch.arange(last, device=q.device)

    def seen(positions: Tensor) -> Tensor:
        causal = positions <= own[:, None]
        return causal if window is None else causal & (positions > own[:, None] - window)

    read = seen(coded) & (coded >= sink) & (coded < oldest[:, None])
    kept = seen(at) & ((at < sink) | (at >= oldest[:, None]))
    wanted = seen(every := torch.arange(stop, device=q.device)) & ((every < sink) | (every >= oldest[:, None]))
    if bool((wanted.sum(-1) != kept.sum(-1)).any()):
        raise ValueError(f"request {b}: a query reads exact rows that are not stored")
    logits = torch.cat([_products(q, k_hat), _products(q, k_exact)], -1) * scaling
    shift = q.new_zeros(q.shape[:2], dtype=torch.float64) if offset is None else offset.double() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh((logits + shift[..., None]) / softcap)
    logits = logits.masked_fill(~torch.cat([read, kept], -1), -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None] - (0.0 if softcap is not None else shift)
        logits = torch.cat([logits, extra.expand(logits.shape[:2])[..., None]], -1)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)[..., : last + len(at)]
    values = torch.cat([v_hat, v_exact], 1)
    grouped = weights.unflatten(0, (values.shape[0], -1))
    return torch.einsum("hgnt,htd->hgnd", grouped, values).flatten(0, 1), weights.sum(-1, keepdim=True)


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """Return ``[Hq, n, T]`` products of queries ``[Hq, n, d]``; query head i reads KV head i // group."""
    return torch.einsum("hgnd,htd->hgnt", q.double().unflatten(0, (keys.shape[0], -1)), keys).flatten(0, 1)


def _output(tables: Tables, o: Tensor, mass: Tensor) -> Tensor:
    """Return ``o' R_V^T + nu m`` of ``[T, Hq, d_v]``."""
    grouped = o.unflatten(1, (tables.heads, -1))
    back = torch.einsum("thge,hde->thgd", grouped, tables.v.dual.double())
    if tables.v.offset is not None:
        back = back + tables.v.offset.double()[:, None] * mass.unflatten(1, (tables.heads, -1))
    return back.flatten(1, 2)


def _words(tables: Tables) -> Tensor | None:
    """Return the codebook words float32 ``[H, d_k/4, 256, 4]``, or None."""
    if tables.codebook is None or tables.codebook_scale is None:
        return None
    coordinates = tables.codebook[..., None].view(torch.int8)
    return coordinates.float() * tables.codebook_scale[..., None, None]


def _codes(packed: Tensor, bits: int) -> Tensor:
    return unpack2(packed) if bits == 2 else unpack4(packed)


def _affine(codes: Tensor, scale: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Return ``scale code + bias`` of codes ``[H, T, d]``, the first `groups` pairs ``[H, T, G]`` counting."""
    grouped = codes.double().unflatten(-1, (groups, -1))
    return (grouped * scale[..., :groups, None] + bias[..., :groups, None]).flatten(-2)
