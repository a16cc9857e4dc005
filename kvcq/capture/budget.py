"""What a collection needs, said before the first forward: tokens, memory, disk."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from kvcq.errors import InputError
from kvcq.stats.accumulator import moment_shapes
from kvcq.stats.probe import ProbePlan, probe_queries

if TYPE_CHECKING:
    from kvcq.models.load import LoadedModel
    from kvcq.spec.geometry import LayerGeometry, ModelGeometry

MIN_TOKENS_PER_DIM = 4
GOOD_TOKENS_PER_DIM = 16
LIMBS = 2


@dataclass(frozen=True)
class Estimate:
    """Planned bytes of a collection beside the model itself.

    Attributes:
        memory_bytes: Accumulators, sampled rows, and the cache of one chunked sequence.
        disk_bytes: Size of the stats artifact.
        rows_bytes: The part of it that samples take (``--rows`` sets it).
    """

    memory_bytes: int
    disk_bytes: int
    rows_bytes: int


def check_tokens(geometry: ModelGeometry, tokens: int) -> list[str]:
    """Refuse too little text for the model's head dimension, and return warnings for little text.

    Args:
        geometry: The model.
        tokens: Counted tokens, the probe excluded: each layer and KV head sees this many.

    Raises:
        InputError: fewer than 4 tokens per channel of a head.
    """
    d = max((max(layer.d_k, layer.d_v) for layer in geometry.quantizable()), default=0)
    if tokens < MIN_TOKENS_PER_DIM * d:
        raise InputError(
            f"{tokens} tokens are too few for heads of {d} channels",
            where="--data",
            fix=f"give at least {MIN_TOKENS_PER_DIM * d}, better {GOOD_TOKENS_PER_DIM * d}, beside the held-out probe",
        )
    if tokens < GOOD_TOKENS_PER_DIM * d:
        return [f"only {tokens} tokens for heads of {d} channels: statistics are rough below {GOOD_TOKENS_PER_DIM * d}"]
    return []


def estimate(
    loaded: LoadedModel, geometry: ModelGeometry, plan: ProbePlan, rows: int, query_rows: int, longest: int
) -> Estimate:
    """Add up what `Capture` will hold and write.

    Args:
        loaded: The model (for the width of its dtype).
        geometry: As observed.
        plan: The probe.
        rows: Sampled rows of k and v in all (no more than there are counted tokens).
        query_rows: Sampled rows of q.
        longest: Tokens of the longest sequence.
    """
    width = loaded.model.dtype.itemsize
    kept = min(rows, sum(plan.counted.values()))
    probe = sum(stop - start for start, stop in plan.spans.values())
    queries = min(query_rows, kept) + sum(len(probe_queries(*span)) for span in plan.spans.values())
    sums = samples = cache = 0
    for layer in geometry.quantizable():
        sums += 8 * sum(prod(shape) for shape in moment_shapes(layer, geometry.rope_of(layer)).values())
        samples += width * _row_elements(layer, kept + probe, queries)
        cache += width * longest * layer.kv_heads * (layer.d_k + layer.d_v)
    return Estimate(
        memory_bytes=(1 + LIMBS) * sums + samples + cache, disk_bytes=LIMBS * sums + samples, rows_bytes=samples
    )


def _row_elements(layer: LayerGeometry, rows: int, queries: int) -> int:
    return layer.kv_heads * (layer.d_k + layer.d_v) * rows + layer.q_heads * layer.d_k * queries
