"""Statistics of made-up layers, computed the plain way from rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcq.spec.geometry import LayerGeometry
from kvcq.stats.view import LayerStats


def stats_of(q: Tensor, k: Tensor, v: Tensor, *, layer: int = 0, rows: int | None = None) -> LayerStats:
    """Return the statistics of q [Hq, T, d], k and v [H, T, d] with the first `rows` tokens as sample."""
    heads, tokens, d = k.shape
    rows = tokens if rows is None else rows
    q64, k64, v64 = q.double(), k.double(), v.double()
    pooled = q64.reshape(heads, -1, d)
    # Uniform attention over eight neighbours stands in for the attention output.
    output = torch.stack([v64.roll(shift, 1) for shift in range(8)]).mean(0)
    moments = {"o_second": output.mT @ output / tokens}
    for name, x in (("k", k64), ("v", v64), ("q", pooled)):
        moments[f"{name}_mean"] = x.mean(1)
        moments[f"{name}_second"] = x.mT @ x / x.shape[1]
    positions = torch.arange(tokens)
    return LayerStats(
        geometry=LayerGeometry(layer=layer, kind="full", q_heads=q.shape[0], kv_heads=heads, d_k=d, d_v=v.shape[-1]),
        rope=None,
        tokens=tokens,
        moments=moments,
        k_rows=k[:, :rows].float(),
        v_rows=v[:, :rows].float(),
        q_rows=q[:, :rows].float(),
        row_positions=positions[:rows],
        q_row_positions=positions[:rows],
    )


def basis(d: int, generator: torch.Generator) -> Tensor:
    """Return a random orthogonal [d, d] float64."""
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q


def anisotropic(
    *, heads: int = 2, group: int = 2, d: int = 32, tokens: int = 3000, mean: float = 2.0, seed: int = 0
) -> LayerStats:
    """Return a layer as real ones are: power-law spectra, unrelated axes of q, k and v, a key and a value mean."""
    generator = torch.Generator().manual_seed(seed)
    decay = torch.arange(1, d + 1, dtype=torch.float64) ** -0.75

    def rows(count: int, axes: Tensor) -> Tensor:
        return torch.randn(count, d, generator=generator, dtype=torch.float64) * decay @ axes

    keys, values, queries = [], [], []
    for _ in range(heads):
        offset = mean * torch.randn(d, generator=generator, dtype=torch.float64) * decay.sqrt()
        keys.append(rows(tokens, basis(d, generator)) + offset)
        values.append(rows(tokens, basis(d, generator)) + 0.1 * offset)
        axes = basis(d, generator)
        queries += [rows(tokens, axes) for _ in range(group)]
    return stats_of(torch.stack(queries).float(), torch.stack(keys).float(), torch.stack(values).float())


def golden_layer() -> LayerStats:
    """Return the layer of the worked example: d = 8, 16 tokens, two query heads on one KV head, integer formulas."""
    t = torch.arange(16)[:, None]
    i = torch.arange(8)[None]
    q = torch.stack([((5 * t + 3 * i + 2 * h * i + t * i * (h + 1) + t * t) % 13 - 6) / 4 for h in range(2)])
    k = ((7 * t + 3 * i + t * i * i + t * t) % 11 - 5) / 4 + 0.5 * (i == 1)
    v = ((3 * t + 5 * i + t * i * i + 2 * t * t) % 13 - 6) / 4
    return stats_of(q, k[None], v[None])
