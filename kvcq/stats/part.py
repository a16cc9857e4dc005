"""Packed statistics: the arrays of a stats artifact, how parts merge, and how a layer is read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvcq.errors import InputError
from kvcq.spec.geometry import LayerGeometry, ModelGeometry
from kvcq.spec.header import StatsHeader
from kvcq.stats.accumulator import LayerSums
from kvcq.stats.rows import RowStore
from kvcq.stats.sampling import canonical_order
from kvcq.stats.view import LayerStats, ProbeRows

Array = np.ndarray | Tensor


@dataclass(frozen=True)
class StatsPart:
    """Statistics of some sequences, ready to be written or merged.

    Attributes:
        sequences: Sorted digests of the sequences behind moments and rows; ``rows.sequence`` indexes them.
        probe: Sorted digests of the probe; ``probe.{i}`` is the i-th.
        moments: ``layers.{layer}.{moment}`` arrays: int64 limbs, float32 extrema, counts.
        samples: ``rows.*``, ``layers.{layer}.rows.{k,v,q}``, ``probe.{i}.*`` in the model's dtype.
    """

    sequences: tuple[str, ...]
    probe: tuple[str, ...]
    moments: dict[str, np.ndarray]
    samples: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        """Tokens behind the moments (the same for every layer)."""
        counts = [int(array[0]) for name, array in self.moments.items() if name.endswith(".tokens")]
        return counts[0] if counts else 0


def pack_stats(layers: Sequence[LayerSums], rows: RowStore) -> StatsPart:
    """Pack the sums of all layers and the rows of the finished sequences."""
    sequences, probe, samples = rows.pack([layer.geometry for layer in layers])
    return StatsPart(sequences, probe, _pack_moments(layers), samples)


def merge_parts(geometry: ModelGeometry, parts: Iterable[StatsPart], rows: int, query_rows: int) -> StatsPart:
    """Merge parts of one collection: bit-equal to one run over all their sequences, in any order.

    Moments are added part by part and dropped, so that a lazy `parts` needs the memory of one.

    Args:
        geometry: The model of all parts.
        parts: Parts that share the seed of their row selection.
        rows: Row budget of the collection.
        query_rows: Its query budget.

    Raises:
        InputError: two parts share a sequence, arrays do not fit, or probes of one sequence differ.
    """
    layers = geometry.quantizable()
    merged = [LayerSums(layer, geometry.rope_of(layer)) for layer in layers]
    seen: set[str] = set()
    kept: list[StatsPart] = []
    for part in parts:
        if shared := seen.intersection(part.sequences):
            raise InputError(
                "the same sequence is in two statistics", where=min(shared)[:12], fix="merge each shard once"
            )
        seen.update(part.sequences)
        for sums in merged:
            sums.merge(layer_sums(geometry, sums.geometry, part.moments))
        kept.append(replace(part, moments={}))
    sequences = sorted(seen)
    samples = _merge_rows(layers, kept, sequences, rows, query_rows)
    probe = _merge_probes(kept, samples)
    return StatsPart(tuple(sequences), probe, _pack_moments(merged), samples)


def layer_stats(
    header: StatsHeader, moments: Mapping[str, Array], samples: Mapping[str, Array], layer: int
) -> LayerStats:
    """Read one layer back as float64 means and float32 rows.

    Args:
        header: The artifact's header.
        moments: Arrays of the moments file.
        samples: Arrays of the samples file.
        layer: Real layer id.

    Raises:
        InputError: the layer has no statistics, or arrays are missing or misshapen.
    """
    geometry = next((one for one in header.geometry.quantizable() if one.layer == layer), None)
    if geometry is None:
        raise InputError("no statistics of this layer", where=f"layer {layer}")
    sums = layer_sums(header.geometry, geometry, moments)
    if sums.tokens == 0:
        raise InputError("statistics of no token", where=f"layer {layer}")
    means: dict[str, Tensor] = {}
    for name, total in sums.sums.items():
        kind, _, form = name.partition("_")
        count = sums.queries if kind in ("q", "q0", "o") else sums.tokens
        means[f"{kind}_{'mean' if form == 'sum' else 'second'}"] = total.value() / count
    rows = {name: _take(samples, f"layers.{layer}.rows.{name}").float() for name in "kvq"}
    positions = _take(samples, "rows.positions").long()
    return LayerStats(
        geometry=geometry,
        rope=header.geometry.rope_of(geometry),
        tokens=sums.tokens,
        moments=means,
        k_rows=rows["k"],
        v_rows=rows["v"],
        q_rows=rows["q"],
        row_positions=positions,
        q_row_positions=positions[: rows["q"].shape[1]],
        probes=tuple(_probe_rows(samples, i, layer) for i in range(len(header.probe))),
        extrema=sums.extrema,
    )


def _pack_moments(layers: Iterable[LayerSums]) -> dict[str, np.ndarray]:
    return {
        f"layers.{sums.geometry.layer}.{name}": array for sums in layers for name, array in sums.to_arrays().items()
    }


def layer_sums(geometry: ModelGeometry, layer: LayerGeometry, moments: Mapping[str, Array]) -> LayerSums:
    """Rebuild the sums of one layer from the arrays of a part.

    Raises:
        InputError: an array is missing, unknown or misshapen.
    """
    prefix = f"layers.{layer.layer}."
    own = {name.removeprefix(prefix): array for name, array in moments.items() if name.startswith(prefix)}
    return LayerSums.from_arrays(layer, geometry.rope_of(layer), own)


def _take(samples: Mapping[str, Array], name: str) -> Tensor:
    if name not in samples:
        raise InputError("samples are incomplete", where=name)
    return torch.as_tensor(samples[name])


def _probe_rows(samples: Mapping[str, Array], i: int, layer: int) -> ProbeRows:
    k, v, q = (_take(samples, f"probe.{i}.layers.{layer}.{name}").float() for name in "kvq")
    return ProbeRows(
        k, v, q, _take(samples, f"probe.{i}.q_index").long(), _take(samples, f"probe.{i}.positions").long()
    )


def _merge_rows(
    layers: Sequence[LayerGeometry], parts: Sequence[StatsPart], sequences: list[str], rows: int, query_rows: int
) -> dict[str, Tensor]:
    numbers = {digest: i for i, digest in enumerate(sequences)}
    shared = {
        name: torch.cat([part.samples[f"rows.{name}"] for part in parts]) for name in ("positions", "hashes", "index")
    }
    owner = [numbers[part.sequences[i]] for part in parts for i in part.samples["rows.sequence"].tolist()]
    shared["sequence"] = torch.tensor(owner, dtype=torch.int32)
    hashes = shared["hashes"].numpy().view(np.uint64)
    order = canonical_order(hashes, sequences, np.array(owner, np.int64), shared["index"].numpy().astype(np.int64))
    keep = torch.from_numpy(order[:rows])
    # A part stores queries for the rows below the budget; those of the merged selection are among them.
    starts = np.cumsum([0] + [len(part.samples["rows.hashes"]) for part in parts])
    samples = {f"rows.{name}": array[keep] for name, array in shared.items()}
    for layer in layers:
        for name in "kv":
            key = f"layers.{layer.layer}.rows.{name}"
            samples[key] = _join([part.samples[key] for part in parts])[:, keep].contiguous()
        key = f"layers.{layer.layer}.rows.q"
        samples[key] = _merge_queries([part.samples[key] for part in parts], starts, keep[: min(query_rows, rows)])
    return samples


def _merge_queries(queries: list[Tensor], starts: np.ndarray, keep: Tensor) -> Tensor:
    part = np.searchsorted(starts[1:], keep.numpy(), side="right")
    offsets = np.cumsum([0] + [array.shape[1] for array in queries])
    local = keep.numpy() - starts[part]
    if any(local[part == i].max(initial=-1) >= array.shape[1] for i, array in enumerate(queries)):
        raise InputError("statistics were collected with different query budgets", where="rows.q")
    return _join(queries)[:, torch.from_numpy(local + offsets[part])].contiguous()


def _join(arrays: list[Tensor]) -> Tensor:
    # A part without rows does not know the model's dtype and must not widen the others.
    return torch.cat([array for array in arrays if array.shape[1]] or arrays[:1], dim=1)


def _merge_probes(parts: Sequence[StatsPart], samples: dict[str, Tensor]) -> tuple[str, ...]:
    found: dict[str, dict[str, Tensor]] = {}
    for part in parts:
        for i, digest in enumerate(part.probe):
            prefix = f"probe.{i}."
            rows = {n.removeprefix(prefix): t for n, t in part.samples.items() if n.startswith(prefix)}
            known = found.setdefault(digest, rows)
            if known.keys() != rows.keys() or any(not torch.equal(known[name], rows[name]) for name in rows):
                raise InputError("probe rows of one sequence differ between statistics", where=digest[:12])
    probe = tuple(sorted(found))
    for i, digest in enumerate(probe):
        samples |= {f"probe.{i}.{name}": rows for name, rows in found[digest].items()}
    return probe
