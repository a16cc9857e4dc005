"""Small codecs, blocks and an independent attention by loops, all float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcq.codecs.pair import HeadCodec
from kvcq.evaluation.attention import AttentionBlock
from kvcq.spec.codec import CodecSpec
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import LayerPlan


def geometry(layer: int = 0, q_heads: int = 4, kv_heads: int = 2, d_k: int = 16, d_v: int = 16) -> LayerGeometry:
    return LayerGeometry(layer=layer, kind="full", q_heads=q_heads, kv_heads=kv_heads, d_k=d_k, d_v=d_v)


def random_codec(
    geometry: LayerGeometry,
    *,
    quantizer: str = "none",
    transform: str = "metric",
    offset: float = 1.0,
    seed: int = 0,
    cast: torch.dtype | None = None,
) -> HeadCodec:
    """A codec with random transforms and offsets of norm ~ offset * sqrt(d) on keys and values."""
    generator = torch.Generator().manual_seed(seed)
    heads, d, dv = geometry.kv_heads, geometry.d_k, geometry.d_v

    def orthogonal(n: int) -> Tensor:
        return torch.linalg.qr(torch.randn(heads, n, n, generator=generator, dtype=torch.float64))[0]

    a = orthogonal(d)
    if transform == "metric":
        a = a * torch.linspace(0.5, 2.0, d, dtype=torch.float64) @ orthogonal(d)
    tensors = {
        "k.transform": a,
        "k.query": torch.linalg.inv(a).mT,
        "k.offset": offset * torch.randn(heads, d, generator=generator),
        "v.transform": orthogonal(dv),
        "v.offset": offset * torch.randn(heads, dv, generator=generator),
    }
    k = CodecSpec(transform=transform, centred=True, quantizer=quantizer)
    v = CodecSpec(transform="orthogonal", centred=True, quantizer=quantizer)
    return HeadCodec.build(LayerPlan(layer=geometry.layer, k=k, v=v), geometry, tensors, cast=cast)


def random_rows(geometry: LayerGeometry, tokens: int, queries: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [Hq, queries, d], k [H, tokens, d], v [H, tokens, dv], float32."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(geometry.q_heads, queries, geometry.d_k, generator=generator),
        torch.randn(geometry.kv_heads, tokens, geometry.d_k, generator=generator),
        torch.randn(geometry.kv_heads, tokens, geometry.d_v, generator=generator),
    )


def random_block(positions: Tensor, tokens: int, *, layer: int = 0, seed: int = 0, **options) -> AttentionBlock:
    shape = geometry(layer)
    q, k, v = random_rows(shape, tokens, len(positions), seed=seed)
    return AttentionBlock(shape, q, positions, k, v, scaling=shape.d_k**-0.5, **options)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Attention by loops over heads and queries; k and v may differ by query: [H, Tk, d] or [H, Tq, Tk, d].

    Returns the outputs [Hq, Tq, dv] and the softmax of each head and query over (visible keys, sink).
    """
    group = q.shape[0] // k.shape[0]
    outputs, softmaxes = [], []
    for head in range(q.shape[0]):
        rows, dists = [], []
        for i in range(q.shape[1]):
            keys, values = (x[head // group] if x.ndim == 3 else x[head // group, i] for x in (k, v))
            logits = scaling * (keys[visible[i]].double() @ q[head, i].double())
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].double().reshape(1)])
            p = torch.softmax(logits, -1)
            dists.append(p)
            rows.append(p[: int(visible[i].sum())] @ values[visible[i]].double())
        outputs.append(torch.stack(rows))
        softmaxes.append(dists)
    return torch.stack(outputs), softmaxes


def kl(p: Tensor, q: Tensor) -> float:
    return math.fsum((p * (p / q).log()).tolist())
