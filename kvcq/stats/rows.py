"""The sampled rows and the probe while they are collected: preallocated, in the model's dtype, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcq.errors import InputError
from kvcq.spec.geometry import LayerGeometry
from kvcq.stats.probe import ProbePlan, probe_queries
from kvcq.stats.sampling import RowSelection


class RowStore:
    """Rows of all layers for one selection and one probe plan.

    Sequences are marked `done` when they are complete: only their rows are packed, so that an interrupted
    collection packs to a part that merges with the rest.
    """

    def __init__(self, selection: RowSelection, plan: ProbePlan) -> None:
        self.selection = selection
        self.plan = plan
        self.done: set[str] = set()
        self._positions = torch.zeros(len(selection), dtype=torch.int32)
        self._probe_positions = {
            digest: torch.zeros(stop - start, dtype=torch.int32) for digest, (start, stop) in plan.spans.items()
        }
        self._rows: dict[str, Tensor] = {}

    def put(self, geometry: LayerGeometry, digest: str, first: int, positions: Tensor, rows: dict[str, Tensor]) -> None:
        """Keep what is wanted of a chunk.

        Args:
            geometry: The layer.
            digest: The sequence.
            first: Token index of the chunk's first row within the sequence.
            positions: RoPE positions ``[t]``.
            rows: ``k [H, t, d_k]``, ``v [H, t, d_v]``, ``q [Hq, t, d_k]``.
        """
        positions = positions.to("cpu", torch.int32)
        count = len(positions)
        if digest in self.plan.counted and self.plan.counted[digest] > first:
            index, place = self.selection.rows_of(digest)
            here = (index >= first) & (index < first + count)
            self._keep_rows(geometry, index[here] - first, place[here], positions, rows)
        if digest in self.plan.spans:
            self._keep_probe(geometry, digest, first, positions, rows)

    def pack(self, layers: list[LayerGeometry]) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Tensor]]:
        """Return (sequences, probe, tensors) of the sequences that are done.

        sequences and probe are sorted digests. Rows stand in ascending order of (hash, digest, token index); queries
        belong to the first rows.
        """
        sequences = tuple(sorted(d for d in self.done if self.plan.counted.get(d, 0) > 0))
        probe = tuple(digest for digest in self.plan.digests if digest in self.done)
        owner, index, keep, keep_queries = self._places(sequences)
        tensors = {
            "rows.positions": self._positions[keep],
            "rows.hashes": torch.from_numpy(self.selection.hashes.view(np.int64).copy())[keep],
            "rows.sequence": torch.from_numpy(owner)[keep],
            "rows.index": torch.from_numpy(index)[keep],
        }
        for layer in layers:
            for name in "kvq":
                kept = keep_queries if name == "q" else keep
                stored = self._rows.get(f"layers.{layer.layer}.rows.{name}", _nothing(layer, name))
                whole = len(kept) == stored.shape[1]
                tensors[f"layers.{layer.layer}.rows.{name}"] = stored if whole else stored[:, kept].contiguous()
        for i, digest in enumerate(probe):
            start, stop = self.plan.spans[digest]
            tensors[f"probe.{i}.positions"] = self._probe_positions[digest]
            tensors[f"probe.{i}.q_index"] = torch.from_numpy((probe_queries(start, stop) - start).astype(np.int32))
            for layer in layers:
                for name in "kvq":
                    tensors[f"probe.{i}.layers.{layer.layer}.{name}"] = self._rows[_probe(digest, layer, name)]
        return sequences, probe, tensors

    def restore(
        self,
        sequences: Sequence[str],
        probe: Sequence[str],
        layers: Sequence[LayerGeometry],
        tensors: dict[str, Tensor],
    ) -> None:
        """Take back what `pack` returned, into an empty store of the same selection and plan.

        Raises:
            InputError: the rows are not those that this selection keeps of these sequences.
        """
        _, _, keep, keep_queries = self._places(sequences)
        if not torch.equal(tensors["rows.hashes"], torch.from_numpy(self.selection.hashes.view(np.int64).copy())[keep]):
            raise InputError("the stored rows are of another selection", where="rows.hashes")
        self._positions[keep] = tensors["rows.positions"]
        for layer in layers:
            for name in "kvq":
                key = f"layers.{layer.layer}.rows.{name}"
                stored, kept = tensors[key], keep_queries if name == "q" else keep
                if len(kept):
                    size = self.selection.query_rows if name == "q" else len(self.selection)
                    self._buffer(key, stored, size)[:, kept] = stored
        for i, digest in enumerate(probe):
            self._probe_positions[digest] = tensors[f"probe.{i}.positions"]
            for layer in layers:
                for name in "kvq":
                    self._rows[_probe(digest, layer, name)] = tensors[f"probe.{i}.layers.{layer.layer}.{name}"]
        self.done.update(sequences, probe)

    def _places(self, sequences: Sequence[str]) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
        """Return owner and token index of each place of the selection, and the places kept for k, v and for q."""
        owner = np.full(len(self.selection), -1, dtype=np.int32)
        index = np.zeros(len(self.selection), dtype=np.int32)
        for number, digest in enumerate(sequences):
            tokens, place = self.selection.rows_of(digest)
            owner[place], index[place] = number, tokens
        keep = torch.from_numpy(np.flatnonzero(owner >= 0))
        return owner, index, keep, keep[keep < self.selection.query_rows]

    def _keep_rows(
        self, geometry: LayerGeometry, index: np.ndarray, place: np.ndarray, positions: Tensor, rows: dict[str, Tensor]
    ) -> None:
        if not len(index):
            return
        source, target = torch.from_numpy(index), torch.from_numpy(place)
        self._positions[target] = positions[source]
        queries = int((target < self.selection.query_rows).sum())
        first = torch.argsort(target, stable=True)
        source, target = source[first], target[first]
        limits = {"k": len(self.selection), "v": len(self.selection), "q": self.selection.query_rows}
        for name, size in limits.items():
            used = queries if name == "q" else len(target)
            buffer = self._buffer(f"layers.{geometry.layer}.rows.{name}", rows[name], size)
            buffer[:, target[:used]] = rows[name][:, source[:used].to(rows[name].device)].to("cpu")

    def _keep_probe(
        self, geometry: LayerGeometry, digest: str, first: int, positions: Tensor, rows: dict[str, Tensor]
    ) -> None:
        start, stop = self.plan.spans[digest]
        low, high = max(start, first), min(stop, first + len(positions))
        if low >= high:
            return
        part = slice(low - first, high - first)
        self._probe_positions[digest][low - start : high - start] = positions[part]
        for name in "kv":
            buffer = self._buffer(_probe(digest, geometry, name), rows[name], stop - start)
            buffer[:, low - start : high - start] = rows[name][:, part].to("cpu")
        wanted = probe_queries(start, stop)
        here = np.flatnonzero((wanted >= low) & (wanted < high))
        queries = self._buffer(_probe(digest, geometry, "q"), rows["q"], len(wanted))
        taken = torch.from_numpy(wanted[here] - first).to(rows["q"].device)
        queries[:, torch.from_numpy(here)] = rows["q"][:, taken].to("cpu")

    def _buffer(self, name: str, like: Tensor, size: int) -> Tensor:
        if name not in self._rows:
            self._rows[name] = torch.zeros(like.shape[0], size, like.shape[2], dtype=like.dtype)
        return self._rows[name]


def _probe(digest: str, geometry: LayerGeometry, name: str) -> str:
    return f"{digest}.{geometry.layer}.{name}"


def _nothing(geometry: LayerGeometry, name: str) -> Tensor:
    heads = geometry.q_heads if name == "q" else geometry.kv_heads
    return torch.zeros(heads, 0, geometry.d_v if name == "v" else geometry.d_k)
