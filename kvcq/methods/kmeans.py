"""Seeded k-means for many small codebooks at once (NOVA-KV's codebook training).

A model has thousands of codebooks and each step compares 8192 rows with 256 words, so the arg-min decides the
time. Here one matrix product gives half the squared distances, the word index is written over the low 8 mantissa
bits, and a single integer minimum returns distance and index together: torch's own arg-min is twenty times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kvcq.transforms.threads import single_threaded

INDEX_BITS = 8
TILE = 4096


def kmeans(
    rows: Tensor,
    seeds: Sequence[int],
    *,
    words: int = 256,
    iterations: int = 25,
    weights: Tensor | None = None,
) -> Tensor:
    """Fit one codebook of `words` centroids to each batch of rows with exactly `iterations` Lloyd steps.

    The first `words` rows of a seeded permutation start; a step assigns, averages in float64, then gives each empty
    word (in index order) the row farthest from its centroid (distances of that assignment, distinct rows, ties to
    the lowest row). With no more rows than words, the rows themselves are the words, repeated in turn.

    Assignment is Euclidean in float32 with the low 8 mantissa bits of the squared distance dropped: words whose
    distances agree to 2^-15, or to the rounding of |x|^2, count as tied and the lowest index wins. Codebooks are
    spread over torch's thread count, each one computed single threaded, so results do not depend on that count.

    Args:
        rows: ``[B, N, G]`` finite, read as float32.
        seeds: One seed a codebook, length B.
        words: Centroids a codebook, at most 256.
        iterations: Lloyd steps.
        weights: ``[B, N]`` non-negative importance of each row, or None; rows of weight 0 take no part at all.

    Returns:
        ``[B, words, G]`` float32 centroids.

    Raises:
        ValueError: shapes that disagree, more than 256 words, or a codebook without a row of positive weight.
    """
    if rows.ndim != 3 or len(seeds) != rows.shape[0] or not 0 < words <= 2**INDEX_BITS:
        raise ValueError(f"k-means takes rows [B, N, G], B seeds and up to 256 words, not {tuple(rows.shape)}, {words}")
    if weights is not None and weights.shape != rows.shape[:2]:
        raise ValueError(f"weights {tuple(weights.shape)} do not match rows {tuple(rows.shape)}")

    def one(index: int) -> Tensor:
        weight = None if weights is None else weights[index].double()
        return _codebook(rows[index].float(), weight, seeds[index], words, iterations)

    workers = torch.get_num_threads()
    with single_threaded(), ThreadPoolExecutor(workers) as pool:
        return torch.stack(list(pool.map(one, range(rows.shape[0]))))


def _codebook(rows: Tensor, weight: Tensor | None, seed: int, words: int, iterations: int) -> Tensor:
    if weight is not None:
        rows, weight = rows[weight > 0], weight[weight > 0]
    count = rows.shape[0]
    if count == 0:
        raise ValueError("a codebook needs at least one row of positive weight")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if count <= words:
        return rows[order[torch.arange(words) % count]]

    mass = torch.ones(count, dtype=torch.float64) if weight is None else weight
    return lloyd(rows, rows[order[:words]], mass, iterations)


def lloyd(rows: Tensor, centroids: Tensor, mass: Tensor, iterations: int) -> Tensor:
    """Take Lloyd steps from given centroids; the last step's averages are returned without another assignment.

    Args:
        rows: ``[N, G]`` float32.
        centroids: ``[K, G]`` float32, K at most 256 and at most N.
        mass: ``[N]`` float64, positive weights.
        iterations: Steps.

    Returns:
        ``[K, G]`` float32.
    """
    (count, dims), words = rows.shape, centroids.shape[0]
    lifted = torch.cat([rows, rows.new_ones(count, 1), rows.square().sum(1, keepdim=True) / 2], dim=1)
    summands = torch.cat([rows.double().T * mass, mass[None]])
    offsets = words * torch.arange(dims + 1)[:, None]
    scores = torch.empty(min(TILE, count), words)
    for _ in range(iterations):
        index = nearest(lifted, centroids, scores)
        sums = torch.zeros((dims + 1) * words, dtype=torch.float64)
        sums.scatter_add_(0, (index + offsets).flatten(), summands.flatten())
        sums = sums.view(dims + 1, words)
        empty = sums[dims] == 0
        updated = (sums[:dims] / sums[dims].masked_fill(empty, 1.0)).T.float()
        if empty.any():
            distance = (rows - centroids[index]).square().sum(1)
            farthest = torch.sort(distance, descending=True, stable=True).indices
            updated[empty] = rows[farthest[: int(empty.sum())]]
        centroids = updated
    return centroids


def nearest(lifted: Tensor, centroids: Tensor, scores: Tensor) -> Tensor:
    """Return the index of the nearest centroid of every row.

    Args:
        lifted: ``[N, G + 2]`` float32 rows as (x, 1, |x|^2 / 2).
        centroids: ``[K, G]`` float32.
        scores: ``[tile, K]`` float32 work space, small enough to stay in the cache.

    Returns:
        ``[N]`` int64.
    """
    words = centroids.shape[0]
    half_norms = centroids.square().sum(1, keepdim=True) / 2
    matrix = torch.cat([-centroids, half_norms, centroids.new_ones(words, 1)], dim=1).T.contiguous()
    names = torch.arange(words, dtype=torch.int32)
    best = torch.empty(lifted.shape[0], dtype=torch.int32)
    for start in range(0, lifted.shape[0], scores.shape[0]):
        part = lifted[start : start + scores.shape[0]]
        # Non-negative floats order like their bits. Rounding makes some zero distances negative, which as integers
        # sort below all others: still the nearest, and still the lowest index first.
        half_distances = torch.mm(part, matrix, out=scores[: part.shape[0]])
        packed = half_distances.view(torch.int32).bitwise_and_(-(2**INDEX_BITS)).bitwise_or_(names)
        torch.amin(packed, 1, out=best[start : start + part.shape[0]])
    return best.bitwise_and_(2**INDEX_BITS - 1).long()
