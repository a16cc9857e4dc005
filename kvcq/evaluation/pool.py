"""Raw measurements of one layer on one passage, and how they pool into report entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcq.spec.report import AttentionMetrics, ContextReport, LayerReport

KL_FLOOR = 1e-12
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Ratio(NamedTuple):
    """A squared error and the energy (or count) it is relative to, as sums that add over passages and layers."""

    error: float
    energy: float


@dataclass(frozen=True)
class LayerSample:
    """One layer, one passage, one context, one artifact: arrays and sums that pool without loss.

    Attributes:
        layer: Layer id.
        context: Tokens in the cache.
        kl: KL(S || S_hat) in nats, ``[Hq, n]``.
        kl_history: The same over quantized keys, ``[Hq, m]``, for the m queries that have some.
        top1, top1_history: Arg-max key unchanged, shapes as above.
        k, k_centred, k_query, v: Errors of the coded rows.
        qk: Squared error of scaled logits and the number of (query, key) pairs.
        sv, output, output_centred: Errors of attention outputs.
        quantized_reads, reads: (query, key) pairs read from codes, and all of them.
        key_sum, key_energy, keys: Sum ``[H, d]`` and energy ``[H]`` of the coded tokens' keys, and their number.
    """

    layer: int
    context: int
    kl: Floats
    kl_history: Floats
    top1: Flags
    top1_history: Flags
    k: Ratio
    k_centred: Ratio
    k_query: Ratio
    v: Ratio
    qk: Ratio
    sv: Ratio
    output: Ratio
    output_centred: Ratio
    quantized_reads: int
    reads: int
    key_sum: Floats
    key_energy: Floats
    keys: int


def pool_metrics(samples: Sequence[LayerSample]) -> AttentionMetrics:
    """Pool samples of any layers and passages.

    Means run over all (layer, head, query); `kl_geometric` over the mean KL of each (layer, head), floored at
    1e-12 nats so that an exact head does not send it to zero; relative errors are ratios of summed energies.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no attention samples to pool")
    kl = _flat([sample.kl for sample in samples])
    heads = np.concatenate([_head_means(group) for group in _by_layer(samples).values()])
    return AttentionMetrics(
        k_error=_ratio([sample.k for sample in samples]),
        v_error=_ratio([sample.v for sample in samples]),
        k_centred_error=_ratio([sample.k_centred for sample in samples]),
        k_query_error=_ratio([sample.k_query for sample in samples]),
        qk_error=_ratio([sample.qk for sample in samples]),
        sv_error=_ratio([sample.sv for sample in samples]),
        kl=float(kl.mean()),
        kl_geometric=float(np.exp(np.log(np.maximum(heads, KL_FLOOR)).mean())),
        kl_p95=float(np.quantile(kl, 0.95)),
        kl_history=float(_flat([sample.kl_history for sample in samples]).mean()),
        top1=float(_flat([sample.top1 for sample in samples]).mean()),
        top1_history=float(_flat([sample.top1_history for sample in samples]).mean()),
        output_error=_ratio([sample.output for sample in samples]),
        output_centred_error=_ratio([sample.output_centred for sample in samples]),
    )


def pool_context(samples: Sequence[LayerSample]) -> ContextReport:
    """Pool every layer and passage of one context; `queries` counts query positions of all passages.

    `quantized_share` is the share of key reads that hit 2-bit rows, BF16 layers among the samples included.

    Raises:
        ValueError: no samples, more than one context, or layers with different passages.
    """
    metrics = pool_metrics(samples)
    layers = list(_by_layer(samples).values())
    passages = len(layers[0])
    if len({sample.context for sample in samples}) > 1 or any(len(group) != passages for group in layers):
        raise ValueError("one context report needs one context and the same passages for every layer")
    return ContextReport(
        context=samples[0].context,
        passages=passages,
        queries=sum(sample.kl.shape[1] for sample in layers[0]),
        quantized_share=sum(sample.quantized_reads for sample in samples) / sum(sample.reads for sample in samples),
        metrics=metrics,
    )


def pool_layer(samples: Sequence[LayerSample]) -> LayerReport:
    """Pool the passages of one layer.

    Raises:
        ValueError: no samples, or samples of several layers.
    """
    metrics = pool_metrics(samples)
    if len(_by_layer(samples)) > 1:
        raise ValueError("one layer report needs the samples of one layer")
    return LayerReport(
        layer=samples[0].layer,
        mean_ratio=mean_ratio(samples),
        metrics=metrics,
        kl_heads=tuple(float(value) for value in _head_means(samples)),
    )


def mean_ratio(samples: Sequence[LayerSample]) -> float:
    """Return |mean k|^2 / variance of the keys of one layer, the largest over its KV heads."""
    keys = sum(sample.keys for sample in samples)
    mean = np.sum([sample.key_sum for sample in samples], axis=0) / keys
    energy = np.sum([sample.key_energy for sample in samples], axis=0) / keys
    offset = (mean**2).sum(-1)
    # Rounding can leave a constant key a variance of zero; the energy keeps the quotient finite.
    variance = np.maximum(energy - offset, 1e-12 * np.maximum(energy, 1e-30))
    return float((offset / variance).max())


def _by_layer(samples: Sequence[LayerSample]) -> dict[int, list[LayerSample]]:
    groups: dict[int, list[LayerSample]] = {}
    for sample in samples:
        groups.setdefault(sample.layer, []).append(sample)
    return groups


def _head_means(samples: Sequence[LayerSample]) -> Floats:
    means: Floats = np.concatenate([sample.kl for sample in samples], axis=1).mean(1)
    return means


def _flat(arrays: Sequence[NDArray]) -> Floats:
    return np.concatenate([array.ravel() for array in arrays]).astype(np.float64)


def _ratio(ratios: Sequence[Ratio]) -> float:
    error = math.fsum(ratio.error for ratio in ratios)
    energy = math.fsum(ratio.energy for ratio in ratios)
    return 0.0 if error == 0.0 else error / max(energy, 1e-30)
