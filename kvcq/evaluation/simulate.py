"""The attention that a served 2-bit cache computes, and the masks that say which keys it reads exactly.

Two semantics (both causal): `by-query` decides exactness by the window rule for every query, so codes do not
depend on chunking; `served` follows a list of chunk boundaries, as an engine prefills.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcq.codecs.attend import cap_logits, sink_logits
from kvcq.codecs.pair import HeadCodec
from kvcq.codecs.windows import oldest_by_query, oldest_served
from kvcq.evaluation.rows import mixed_rows, wide
from kvcq.spec.boundary import Boundary
from kvcq.spec.plan import Windows

SCORE_ELEMENTS = 1 << 24


def exact_by_query(n: int, windows: Windows, *, first: int = 0) -> Tensor:
    """Return which of `n` keys the queries at positions first..n-1 read exactly, bool ``[n - first, n]``.

    Key j is exact for query i iff ``j < sink`` or ``j > i - recent``. Causality is not part of the mask.
    """
    return _exact(n, oldest_by_query(first, n - first, windows), windows)


def exact_served(n: int, boundaries: Sequence[Boundary], windows: Windows, *, first: int = 0) -> Tensor:
    """Return the exact mask ``[n - first, n]`` of a prefill in chunks that start at 0 and at `boundaries`.

    A query reads exactly the sinks and what `oldest_served` says.

    Raises:
        ValueError: boundaries that do not increase inside (0, n).
    """
    return _exact(n, oldest_served(n, boundaries, windows)[first:], windows)


def _exact(n: int, oldest: Tensor, windows: Windows) -> Tensor:
    keys = torch.arange(n)
    return (keys < windows.sink) | (keys >= oldest[:, None])


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
        Attention outputs ``[Hq, Tq, dv]`` in the original frame and in the dtype of `q`; computed in float32, or in
        float64 for float64 queries.
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
        queries = q[:, part].to(wide(q))
        offset = codec.query_offset(queries)
        products = rows.products(codec.query(queries), exact[part])
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
