"""Key sides of vector quantizers: NOVA-KV's metric and partition into groups of four, and one codebook a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from kvcq.codecs.codebook import snap_float8, snap_int8
from kvcq.codecs.side import RHO_FLOOR
from kvcq.errors import InputError
from kvcq.methods.kmeans import kmeans
from kvcq.methods.rotation import served
from kvcq.spec.codec import VQ_GROUP, CodebookDtype
from kvcq.stats.view import LayerStats
from kvcq.transforms.metric import nova_transform, unit_metric
from kvcq.transforms.permutation import Partition, partition
from kvcq.transforms.spectral import compose_oscar
from kvcq.transforms.threads import single_threaded

if TYPE_CHECKING:
    from kvcq.methods.nova import Nova
    from kvcq.methods.vector import VectorMethod


class KeyMap(NamedTuple):
    """A, S = A^{-T} ``[H, d, d]`` and the variances of r ``[H, d]`` in group order, float64."""

    transform: Tensor
    query: Tensor
    variances: Tensor


def key_map(moment: Tensor, covariance: Tensor, floor: float, order: Tensor) -> KeyMap:
    """Return NOVA's basis with the partition folded in, for a query moment scaled to unit mean eigenvalue.

    Args:
        moment: Query moment ``[H, d, d]``; its scale does not matter.
        covariance: Centred key covariance ``[H, d, d]``.
        floor: Relative floor of the moment's eigenvalues.
        order: ``[d]`` rank, by falling variance, of each channel of r.
    """
    with single_threaded():
        transform, query, variances = nova_transform(unit_metric(moment), covariance, floor)
    return KeyMap(transform[..., order], query[..., order], variances[..., order])


def scalar_map(stats: LayerStats, floor: float, *, hadamard: bool) -> KeyMap:
    """Return NOVA's basis for scalar codes: axes by falling variance, or mixed by H P when `hadamard` is set."""
    axes = torch.arange(stats.geometry.d_k)
    mapped = key_map(stats.moments["q_second"], stats.k_cov, floor, axes.flip(0) if hadamard else axes)
    if not hadamard:
        return mapped
    with single_threaded():
        # P wants ascending axes. Both maps take the same rotation, so they stay inverse to each other.
        transform, query = (compose_oscar(factor) for factor in (mapped.transform, mapped.query))
        spread = transform.mT @ stats.k_cov @ transform
    return KeyMap(transform, query, torch.diagonal(spread, dim1=-2, dim2=-1))


def normalised_groups(rows: Tensor) -> Tensor:
    """Return r / rho cut into groups, ``[H * d/4, n, 4]`` float32, rho the RMS of a row of ``[H, n, d]``."""
    heads, count, d = rows.shape
    unit = rows / rows.square().mean(-1, keepdim=True).sqrt().clamp(min=RHO_FLOOR)
    return unit.float().reshape(heads, count, d // VQ_GROUP, VQ_GROUP).transpose(1, 2).flatten(0, 1)


def nova_tensors(stats: LayerStats, method: Nova, seed: int) -> dict[str, np.ndarray]:
    """Return the metric map of a layer's keys by role, ``k.transform``, ``k.query [H, d, d]``, ``k.offset [H, d]``."""
    order = partition(cast(Partition, method.partition), stats.geometry.d_k, VQ_GROUP, seed)
    mapped = key_map(stats.moments["q_second"], stats.k_cov, method.floor, order)
    return {
        "k.transform": served(mapped.transform),
        "k.query": served(mapped.query),
        "k.offset": served(stats.moments["k_mean"]),
    }


def codebooks(
    tensors: Mapping[str, np.ndarray], stats: LayerStats, method: VectorMethod, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, tuple[float, ...]]]:
    """Train the codebooks of a layer's keys in the frame of `tensors`: the served arrays are what encoders use.

    Args:
        tensors: ``k.transform [H, d, d]`` and, when keys are centred, ``k.offset [H, d]``, both float32.
        stats: The layer.
        method: Its codebook parameters.
        seed: Of the fit.

    Returns:
        Arrays by role: ``k.codebook [H, d/4, 256, 4]`` int8 with ``k.codebook_scale [H, d/4]`` f32 (float16 words
        without a scale for e4m3 and e5m2), ``k.codebook_fp16`` (the centroids before snapping); and a note of the
        rows behind them.

    Raises:
        InputError: no sampled rows.
    """
    layer = stats.geometry.layer
    keys = stats.k_rows[:, : method.rows]
    heads, count, d = keys.shape
    if count == 0:
        raise InputError(f"layer {layer} has no sampled keys", where="stats", fix="collect with --rows of at least 256")
    with single_threaded():
        rows = keys.double()
        if "k.offset" in tensors:
            rows = rows - torch.from_numpy(tensors["k.offset"]).double().unsqueeze(1)
        groups = normalised_groups(rows @ torch.from_numpy(tensors["k.transform"]).double())
    # As in the release, the groups of a head start from the same rows.
    seeds = [seed + layer * heads + head for head in range(heads) for _ in range(d // VQ_GROUP)]
    centroids = kmeans(groups, seeds, iterations=method.iterations).unflatten(0, (heads, d // VQ_GROUP))
    found = {"k.codebook_fp16": centroids.half().numpy()}
    if method.codebook == "int8":
        words, scale = snap_int8(centroids)
        found |= {"k.codebook": words.numpy(), "k.codebook_scale": scale.numpy()}
    else:
        found["k.codebook"] = snap_float8(centroids, cast(CodebookDtype, method.codebook)).numpy()
    return found, {"codebook_rows": (float(count),)}
