"""Attention fidelity of one layer: what the served cache changes in logits, softmax and output.

Logits of quantized keys are computed as served, ``q~ . r_hat`` in float32; softmaxes, divergences and sums are
float64. The KL runs over the full causal softmax with learned sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcq.codecs.attend import cap_logits, grouped_mix, grouped_products, sink_logits
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import EvaluationError, InputError
from kvcq.evaluation.pool import Floats, LayerSample, Ratio
from kvcq.evaluation.rows import MixedRows, bf16_rows, mixed_rows
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.plan import Windows

MARGIN = 64
SCORE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class AttentionBlock:
    """Exact rows of one layer for one passage, as the model attends to them.

    Attributes:
        geometry: The layer.
        q: Post-RoPE queries at `q_positions`, ``[Hq, n, d]``.
        q_positions: Index into the keys of each query's own token, int64 ``[n]``, increasing.
        k: Post-RoPE keys of the whole context, ``[H, T, d]``.
        v: Values, ``[H, T, dv]``.
        scaling: Factor on ``q . k``.
        softcap: Logit softcap, or None.
        sinks: Learned sink logits ``[Hq]``, or None.
    """

    geometry: LayerGeometry
    q: Tensor
    q_positions: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def context(self) -> int:
        """Tokens in the cache."""
        return self.k.shape[1]


@dataclass(frozen=True)
class _Comparison:
    kl: Tensor
    kl_history: Tensor
    top1: Tensor
    top1_history: Tensor
    qk: Tensor
    exact: Tensor
    mixed: Tensor
    mass: Tensor
    mixed_exact_weights: Tensor
    exact_mass: Tensor


def evenly_spaced(first: int, last: int, count: int) -> Tensor:
    """Return `count` positions spread over first..last, both included; all of them when there are fewer."""
    count = min(count, last - first + 1)
    return torch.linspace(first, last, count, dtype=torch.float64).round().long()


def query_positions(context: int, count: int = 64) -> Tensor:
    """Return `count` evenly spaced positions in the last quarter of a context, int64, the last token included."""
    return evenly_spaced(context - max(1, context // 4), context - 1, count)


def check_context(context: int, windows: Windows, flag: str = "--contexts") -> None:
    """Refuse a context in which next to nothing is quantized; `flag` gave it.

    Raises:
        InputError: `context` is not longer than sink + recent + 64 tokens.
    """
    least = windows.sink + windows.recent + MARGIN
    if context <= least:
        raise InputError(
            f"nothing was quantized in this run: a context of {context} tokens does not exceed "
            f"sink {windows.sink} + recent {windows.recent} + {MARGIN}",
            where=flag,
            fix=f"validate on more than {least} tokens, or fit with smaller windows",
        )


@torch.no_grad()
def measure_layer(
    block: AttentionBlock,
    codec: HeadCodec | None,
    windows: Windows,
    query_second: Tensor | None = None,
    oldest: Tensor | None = None,
) -> LayerSample:
    """Compare the served attention of one layer with the exact one.

    Args:
        block: Exact rows.
        codec: The layer's `HeadCodec`; None measures a BF16 cache (all rows rounded to bfloat16).
        windows: Exact tokens at both ends.
        query_second: Second moment of the queries ``[H, d, d]`` float64; None takes it from the block's queries.
        oldest: Oldest position behind the sinks that each query reads exactly, int64 ``[n]``; None: the window rule.

    Raises:
        InputError: the context is too short for the windows.
        EvaluationError: a result is not finite; names the layer.
    """
    check_context(block.context, windows)
    coder = bf16_rows() if codec is None else codec
    if oldest is None:
        oldest = block.q_positions - windows.recent + 1
    # A query reads its own token at most, whatever the rule says of later ones.
    oldest = torch.minimum(oldest, block.q_positions + 1)
    start, stop = windows.sink, int(oldest.max())
    rows = mixed_rows(coder, block.k, block.v, start, stop)
    step = max(1, SCORE_ELEMENTS // (block.q.shape[0] * block.context))
    keys, values = block.k.double(), block.v.double()
    parts = [
        _compare(block, coder, rows, oldest, slice(i, i + step), keys, values)
        for i in range(0, len(block.q_positions), step)
    ]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], 1)

    exact = joined("exact")
    sinks = block.sinks is not None
    served = coder.output(joined("mixed"), joined("mass") if sinks else None).double()
    only_v = coder.output(joined("mixed_exact_weights"), joined("exact_mass") if sinks else None).double()
    centred = exact - exact.mean(1, keepdim=True)
    centred_error = served - served.mean(1, keepdim=True) - centred

    k, v = keys[:, start:stop], values[:, start:stop]
    k_error = k - coder.keys_back(rows.keys_hat).double()
    v_error = v - coder.values_back(rows.values_hat).double()
    moment = _query_second(block) if query_second is None else query_second.to(k)
    reads = block.q_positions + 1
    history = (oldest - windows.sink).clamp_min(0)
    qk = joined("qk")
    sample = LayerSample(
        layer=block.geometry.layer,
        context=block.context,
        kl=joined("kl").cpu().numpy(),
        kl_history=joined("kl_history").cpu().numpy(),
        top1=joined("top1").cpu().numpy(),
        top1_history=joined("top1_history").cpu().numpy(),
        k=Ratio(_energy(k_error), _energy(k)),
        k_centred=Ratio(_energy(k_error), _energy(k - k.mean(1, keepdim=True))),
        k_query=Ratio(_energy(k_error, moment), _energy(k, moment)),
        v=Ratio(_energy(v_error), _energy(v)),
        qk=Ratio(float(qk.cpu().numpy().sum()), float(history.sum()) * block.q.shape[0]),
        sv=Ratio(_energy(only_v - exact), _energy(exact)),
        output=Ratio(_energy(served - exact), _energy(exact)),
        output_centred=Ratio(_energy(centred_error), _energy(centred)),
        quantized_reads=0 if codec is None else int(history.sum()) * block.q.shape[0],
        reads=int(reads.sum()) * block.q.shape[0],
        key_sum=k.sum(1).cpu().numpy(),
        key_energy=_row_energy(k).sum(1),
        keys=k.shape[1],
    )
    _check_finite(sample)
    return sample


def _compare(
    block: AttentionBlock,
    codec: HeadCodec,
    rows: MixedRows,
    oldest: Tensor,
    part: slice,
    keys: Tensor,
    values: Tensor,
) -> _Comparison:
    """Compare the queries of `part`; `keys` and `values` are the exact rows in float64, `oldest` covers all queries."""
    device = block.k.device
    position = torch.arange(block.context, device=device)
    own = block.q_positions[part].to(device)[:, None]
    visible = position <= own
    coded = rows.coded
    history = position[coded] < oldest[part].to(device)[:, None]
    exact = torch.ones_like(visible)
    exact[:, coded] = ~history

    q = block.q[:, part].float()
    offset = codec.query_offset(q).double()
    products = grouped_products(q.double(), keys)
    products_hat = rows.products(codec.query(q).float(), exact).double()
    qk = _logit_error(products_hat[..., coded] - products[..., coded], history, block.scaling)
    logits = cap_logits(products, None, block.scaling, block.softcap).masked_fill_(~visible, -torch.inf)
    logits_hat = cap_logits(products_hat, offset, block.scaling, block.softcap).masked_fill_(~visible, -torch.inf)

    sink = sink_hat = None
    if block.sinks is not None:
        sink = sink_logits(block.sinks, torch.zeros_like(offset), block.scaling, block.softcap)
        sink_hat = sink_logits(block.sinks, offset, block.scaling, block.softcap)
    log_p, log_p_hat = _log_softmax(logits, sink), _log_softmax(logits_hat, sink_hat)
    p, p_hat = log_p.exp(), log_p_hat.exp()
    tokens = block.context
    seen = history.any(1)
    past, past_hat = (x[:, seen][..., coded].masked_fill(~history[seen], -torch.inf) for x in (logits, logits_hat))
    log_past, log_past_hat = _log_softmax(past, None), _log_softmax(past_hat, None)
    weights, weights_hat = p[..., :tokens], p_hat[..., :tokens]
    return _Comparison(
        kl=_kl(p, log_p, log_p_hat),
        kl_history=_kl(log_past.exp(), log_past, log_past_hat),
        top1=logits.argmax(-1) == logits_hat.argmax(-1),
        top1_history=past.argmax(-1) == past_hat.argmax(-1),
        qk=qk,
        exact=grouped_mix(weights, values),
        mixed=rows.mix(weights_hat.float(), exact),
        mass=weights_hat.sum(-1).float(),
        mixed_exact_weights=rows.mix(weights.float(), exact),
        exact_mass=weights.sum(-1).float(),
    )


def _log_softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    return torch.log_softmax(logits if sink is None else torch.cat([logits, sink[..., None]], -1), -1)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum p (log p - log q) over the last axis; masked entries are -inf in both and count nothing."""
    return (p * (log_p - log_q).masked_fill_(log_p == -torch.inf, 0.0)).sum(-1).clamp_min_(0.0)


def _logit_error(difference: Tensor, history: Tensor, scaling: float) -> Tensor:
    """Return each query's summed squared logit error over its quantized keys, mean shift removed, ``[Hq, n]``."""
    count = history.sum(-1).clamp_min(1)
    difference = difference.masked_fill(~history, 0.0)
    # sum (x - mean)^2 = sum x^2 - count mean^2 would cancel when q . mu is large, so subtract first.
    centred = (difference - (difference.sum(-1) / count)[..., None]).masked_fill_(~history, 0.0)
    return centred.square().sum(-1) * scaling**2


def _energy(x: Tensor, moment: Tensor | None = None) -> float:
    return float(_row_energy(x, moment).sum())


def _row_energy(x: Tensor, moment: Tensor | None = None) -> Floats:
    """Return ``x M x^T`` of every row. Sums of rows stay in numpy: torch's full reductions depend on threads."""
    energy: Floats = ((x if moment is None else x @ moment) * x).sum(-1).cpu().numpy()
    return energy


def _query_second(block: AttentionBlock) -> Tensor:
    q = block.q.double().reshape(block.k.shape[0], -1, block.q.shape[-1])
    return q.mT @ q / q.shape[1]


def _check_finite(sample: LayerSample) -> None:
    numbers = [sample.kl.sum(), sample.kl_history.sum(), *sample.k, *sample.k_query, *sample.v, *sample.qk]
    if not np.isfinite([*numbers, *sample.sv, *sample.output]).all():
        raise EvaluationError(
            "attention or its quantized form is not finite",
            where=f"layer {sample.layer}, context {sample.context}",
            fix="check the model with --dtype float32, or keep the layer in BF16 with skip_layers",
        )
