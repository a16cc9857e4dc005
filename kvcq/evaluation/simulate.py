"""The attention that a served 2-bit cache computes, and the masks that say which keys it reads exactly.

Two semantics (both causal): `by-query` decides exactness by the window rule for every query, so codes do not
depend on chunking; `served` follows a list of chunk boundaries, as an engine prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.evaluation.rows import cap_logits, mixed_rows, sink_logits
from kvcq.spec.plan import Windows

SCORE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Boundary:
    """Start of a prefill chunk after the first.

    ``carried``: the same request goes on and its ring holds the last `recent` rows before the boundary.
    ``cached``: a prefix hit; no exact row before the boundary is left except the sinks.
    """

    position: int
    kind: Literal["carried", "cached"]


def exact_by_query(n: int, windows: Windows, *, first: int = 0) -> Tensor:
    """Return which of `n` keys the queries at positions first..n-1 read exactly, bool ``[n - first, n]``.

    Key j is exact for query i iff ``j < sink`` or ``j > i - recent``. Causality is not part of the mask.
    """
    keys = torch.arange(n)
    queries = torch.arange(first, n)[:, None]
    return (keys < windows.sink) | (keys > queries - windows.recent)


def exact_served(n: int, boundaries: Sequence[Boundary], windows: Windows, *, first: int = 0) -> Tensor:
    """Return the exact mask ``[n - first, n]`` of a prefill in chunks that start at 0 and at `boundaries`.

    A query reads exactly the sinks, the rows of its own chunk, and behind a carried boundary the last `recent`
    rows before it, as far as they were computed after the last cached boundary.

    Raises:
        ValueError: boundaries that do not increase inside (0, n).
    """
    starts = [boundary.position for boundary in boundaries]
    if any(b <= a for a, b in pairwise([0, *starts, n])):
        raise ValueError(f"chunk boundaries {starts} do not increase inside (0, {n})")
    oldest = torch.zeros(n, dtype=torch.long)
    cached = 0
    for boundary in boundaries:
        if boundary.kind == "cached":
            cached = boundary.position
        oldest[boundary.position :] = max(boundary.position - windows.recent, cached)
    keys = torch.arange(n)
    return (keys < windows.sink) | (keys >= oldest[first:, None])


def served_boundaries(n: int, chunk: int, cached_at: int | None = None) -> tuple[Boundary, ...]:
    """Return the boundaries of `n` tokens prefilled `chunk` at a time, after a prefix hit at `cached_at` if given.

    Raises:
        ValueError: `chunk` below 1 or `cached_at` outside (0, n).
    """
    if chunk < 1 or (cached_at is not None and not 0 < cached_at < n):
        raise ValueError(f"cannot cut {n} tokens into chunks of {chunk} with a cached prefix of {cached_at}")
    first = 0 if cached_at is None else cached_at
    before = [Boundary(position, "carried") for position in range(chunk, first, chunk)]
    hit = [] if cached_at is None else [Boundary(cached_at, "cached")]
    return (*before, *hit, *(Boundary(position, "carried") for position in range(first + chunk, n, chunk)))


@torch.no_grad()
def simulated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codec: HeadCodec,
    exact: Tensor,
    visible: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over exact and decoded rows as a served cache does, in the codec's shifted frame.

    Args:
        q: Post-RoPE queries, ``[Hq, Tq, d]``.
        k: Post-RoPE keys, ``[H, Tk, d]``.
        v: Values, ``[H, Tk, dv]``.
        codec: The layer's `HeadCodec`.
        exact: Bool ``[Tq, Tk]``: keys read as exact rows; the others are read decoded.
        visible: Bool ``[Tq, Tk]``: keys that the query may see; every query sees one at least.
        scaling: Factor on ``q . k``.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        sinks: Learned sink logits ``[Hq]``, a share of the softmax without a value.

    Returns:
        Attention outputs ``[Hq, Tq, dv]`` in the original frame and in the dtype of `q`; computed in float32.
    """
    exact, visible = exact.to(q.device), visible.to(q.device)
    coded = (visible & ~exact).any(0).nonzero()
    start, stop = (int(coded[0]), int(coded[-1]) + 1) if len(coded) else (0, 0)
    # Outside the coded range a key has no decoded twin; whoever does not see it may call it exact.
    exact = exact | ~visible
    rows = mixed_rows(codec, k, v, start, stop)
    step = max(1, SCORE_ELEMENTS // (q.shape[0] * k.shape[1]))
    outputs = []
    for begin in range(0, q.shape[1], step):
        part = slice(begin, begin + step)
        queries = q[:, part].float()
        offset = codec.query_offset(queries)
        products = rows.products(codec.query(queries).float(), exact[part])
        logits = cap_logits(products, offset, scaling, softcap).masked_fill_(~visible[part], -torch.inf)
        mass = None
        if sinks is None:
            weights = torch.softmax(logits, -1)
        else:
            sink = sink_logits(sinks, offset, scaling, softcap)
            weights = torch.softmax(torch.cat([logits, sink[..., None]], -1), -1)[..., :-1]
            mass = weights.sum(-1)
        outputs.append(codec.output(rows.mix(weights, exact[part]), mass))
    return torch.cat(outputs, 1).to(q.dtype)
