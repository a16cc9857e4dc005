"""Attention of one request over the tiers of its cache: sink rows, coded rows, recent rows.

Every tier lives in one frame, ``r = (k - mu) A`` and ``v' = (v - nu) R_V``, so that one mapped query ``q~ = q S``
serves all of them: ``q~ . r = q . (k - mu)``. The lost ``q . mu`` cancels in a softmax over shifted keys only;
`cap_logits` and `sink_logits` put it back where it does not cancel (softcap, learned sinks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec

SCORE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Tier:
    """Consecutive tokens of one request in the shifted frame.

    Attributes:
        kind: ``sink``: exact for everyone; ``coded``: decoded rows, read by queries whose oldest exact position lies
            behind them; ``recent``: exact rows, read by queries whose oldest exact position does not.
        start: Position of the first token.
        keys: Rows r or r_hat, ``[H, T, d_k]``.
        values: Rows v' or v'_hat, ``[H, T, d_v]``.
    """

    kind: Literal["sink", "coded", "recent"]
    start: int
    keys: Tensor
    values: Tensor

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.keys.shape[1]

    def cut(self, start: int, stop: int) -> Tier:
        """Return the part at positions [start, stop), empty where they do not meet."""
        first = min(max(start, self.start), self.stop)
        rows = slice(first - self.start, max(min(stop, self.stop), first) - self.start)
        return Tier(self.kind, first, self.keys[:, rows], self.values[:, rows])


@torch.no_grad()
def attend(
    codec: HeadCodec,
    q: Tensor,
    tiers: Sequence[Tier],
    oldest: Tensor,
    *,
    first: int,
    visible: Tensor | None = None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally over the tiers of one request.

    Args:
        codec: The layer's codec; maps queries into the frame and outputs out of it.
        q: Post-RoPE queries ``[Hq, n, d_k]`` at positions first .. first + n - 1.
        tiers: The cache, the rows of the queries' own tokens included; a position that is both in a coded and in a
            recent tier is read from the one that its query's `oldest` selects.
        oldest: The oldest position behind the sinks that a query reads exactly, int64 ``[n]``.
        first: Position of the first query.
        visible: Bool ``[n, N]`` over all positions, False where a query must not look; None: causal.
        scaling: Factor on ``q . k``.
        softcap: Logits become ``softcap tanh(logits / softcap)``.
        sinks: Learned sink logits ``[Hq]``, a share of the softmax without a value.

    Returns:
        Attention outputs ``[Hq, n, d_v]`` in the original frame, float32 (float64 for float64 queries). A query that
        sees nothing gets zeros.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    longest = max((tier.stop for tier in tiers), default=0)
    step = max(1, SCORE_ELEMENTS // (q.shape[0] * max(longest, 1)))
    shifted = softcap is not None or sinks is not None
    outputs = []
    for begin in range(0, q.shape[1], step):
        part = slice(begin, min(begin + step, q.shape[1]))
        bounds = oldest[part]
        needed = _needed(tiers, int(bounds.min()), int(bounds.max()), first + part.stop)
        queries = q[:, part].to(dtype)
        mapped, offset = codec.query(queries), codec.query_offset(queries) if shifted else None
        # A single query reads all of what it needs.
        single = queries.shape[1] == 1
        own = None if single else torch.arange(first + part.start, first + part.stop, device=q.device)
        bounds = bounds if single else bounds.to(q.device)
        logits, values = [], []
        for tier in needed:
            scores = cap_logits(grouped_products(mapped, tier.keys.to(dtype)), offset, scaling, softcap)
            seen = None if own is None else _seen(tier, own, bounds)
            if visible is not None:
                shown = visible[part, tier.start : tier.stop]
                seen = shown if seen is None else seen & shown
            logits.append(scores if seen is None else scores.masked_fill_(~seen, -torch.inf))
            values.append(tier.values)
        extra = [] if sinks is None or offset is None else [sink_logits(sinks, offset, scaling, softcap)[..., None]]
        # nan_to_num: a padding query sees no key at all.
        weights = torch.softmax(torch.cat([*logits, *extra], -1), -1).nan_to_num_(0.0)
        mixed = q.new_zeros(*queries.shape[:2], values[0].shape[-1], dtype=dtype)
        start = 0
        for rows in values:
            mixed += grouped_mix(weights[..., start : start + rows.shape[1]], rows.to(dtype))
            start += rows.shape[1]
        mass = None if sinks is None else weights[..., :start].sum(-1)
        outputs.append(codec.output(mixed, mass))
    return torch.cat(outputs, 1)


def _needed(tiers: Sequence[Tier], low: int, high: int, stop: int) -> list[Tier]:
    """Cut the tiers to what some query of a block reads: bounds of `oldest` are low .. high, the last one at stop-1."""
    ranges = {"sink": (0, stop), "coded": (0, min(high, stop)), "recent": (low, stop)}
    cuts = [tier.cut(*ranges[tier.kind]) for tier in tiers]
    return [cut for cut in cuts if cut.keys.shape[1]] or cuts[:1]


def _seen(tier: Tier, own: Tensor, oldest: Tensor) -> Tensor:
    """Return bool ``[n, T]``: which tokens of a tier each query reads from it."""
    positions = torch.arange(tier.start, tier.stop, device=own.device)
    causal = positions <= own[:, None]
    if tier.kind == "sink":
        return causal
    exact = positions >= oldest[:, None]
    return causal & (exact if tier.kind == "recent" else ~exact)


def grouped_products(query: Tensor, keys: Tensor) -> Tensor:
    """Return ``[Hq, n, T]`` products; query head i reads KV head ``i // group``."""
    heads, tokens, width = keys.shape
    return (query.reshape(heads, -1, width) @ keys.mT).reshape(*query.shape[:2], tokens)


def grouped_mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``[Hq, n, dv]`` weighted sums of the values of each query head's KV head."""
    heads, tokens, width = values.shape
    return (weights.reshape(heads, -1, tokens) @ values).reshape(*weights.shape[:2], width)


def cap_logits(products: Tensor, offset: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    """Scale products ``[Hq, n, T]`` and apply the softcap, which needs ``q . mu`` (`offset`, ``[Hq, n]``) back."""
    logits = products * scaling
    if softcap is None:
        return logits
    if offset is not None:
        logits = logits + (offset * scaling)[..., None]
    return softcap * torch.tanh(logits / softcap)


def sink_logits(sinks: Tensor, offset: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return sink logits ``[Hq, n]`` in the shifted frame, ``sink - scaling q . mu``, unless a softcap unshifts it.

    Args:
        sinks: One logit a query head, ``[Hq]``.
        offset: ``q . mu``, ``[Hq, n]``.
        scaling: Factor on products.
        softcap: The cap whose logits carry ``q . mu`` already, or None.
    """
    plain = sinks.to(offset)[:, None].expand_as(offset)
    return plain if softcap is not None else plain - scaling * offset
