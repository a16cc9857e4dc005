"""Streaming moments of one layer: float64 within a sequence, exact limbs across sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from kvcq.errors import InputError
from kvcq.spec.geometry import LayerGeometry, RopeSpec
from kvcq.stats.exact import ExactSum
from kvcq.stats.rotary import Turn, apply_turn, turn_table

BLOCK = 512
_EXTREMA = {"min": torch.inf, "max": -torch.inf}


class Workspace:
    """Reusable float64 buffers. One workspace serves all layers, because layers add one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return an uninitialised contiguous buffer; the next take of the same name overwrites it."""
        size = int(np.prod(shape))
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.float64, device=device)
            self._buffers[name, device] = buffer
        return buffer[:size].view(shape)


def moment_shapes(geometry: LayerGeometry, rope: RopeSpec | None) -> dict[str, tuple[int, ...]]:
    """Return the sums that a layer keeps, by tensor name, with their shapes.

    Position-0 sums exist where un-rotation is proven; without a rotation they equal the plain ones and are left out.
    """
    heads, d_k, d_v = geometry.kv_heads, geometry.d_k, geometry.d_v
    rows = {"k": d_k, "q": d_k, "v": d_v}
    if geometry.unrotates and rope is not None:
        rows |= {"k0": d_k, "q0": d_k}
    shapes: dict[str, tuple[int, ...]] = {"o_moment": (heads, d_v, d_v)}
    for name, d in rows.items():
        shapes |= {f"{name}_sum": (heads, d), f"{name}_moment": (heads, d, d)}
    return dict(sorted(shapes.items()))


class LayerSums:
    """Sums of one layer over whole sequences. `begin`, any number of `add`, `finish`: one sequence.

    q sums run over the query heads of a KV head and over tokens; `queries` counts their terms per KV head. The
    running sums of a sequence live on the device of its tensors (on the CPU where a device lacks float64); limbs
    live on the CPU.
    """

    def __init__(self, geometry: LayerGeometry, rope: RopeSpec | None, workspace: Workspace | None = None) -> None:
        self.geometry = geometry
        self.rope = rope if geometry.unrotates else None
        self.tokens = 0
        self.queries = 0
        self.sums = {name: ExactSum.zeros(*shape) for name, shape in moment_shapes(geometry, rope).items()}
        self.extrema = self._no_extrema()
        self._workspace = workspace or Workspace()
        self._running: dict[str, Tensor] = {}
        self._running_extrema = self._no_extrema()
        self._count = 0
        self._query_count = 0

    def begin(self) -> None:
        """Start a sequence, dropping one that was not finished."""
        for total in self._running.values():
            total.zero_()
        self._running_extrema = self._no_extrema()
        self._count = 0
        self._query_count = 0

    def add(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, positions: Tensor, turn: Turn | None = None) -> None:
        """Add a chunk of the current sequence.

        Args:
            q: Queries ``[Hq, t, d_k]``, post-RoPE as they meet the cache.
            k: Keys ``[H, t, d_k]`` as cached.
            v: Values ``[H, t, d_v]``.
            o: Attention outputs ``[Hq, t, d_v]``, before the output projection.
            positions: RoPE positions ``[t]``.
            turn: Rotation table of the positions, if the caller shares one between layers.
        """
        device = self._prepare(k)
        turn = self._turn(positions, turn, device)
        # Blocks stay in the processor's cache: a float64 copy of the whole chunk would not.
        for part, here in _blocks(k.shape[1], turn):
            self._add_rows("k", k[:, part], device, here)
            self._add_rows("v", v[:, part], device, None)
        self._count += k.shape[1]
        self.add_queries(q, o, positions, turn)

    def add_queries(self, q: Tensor, o: Tensor, positions: Tensor, turn: Turn | None = None) -> None:
        """Add queries ``[Hq, t, d_k]`` and outputs ``[Hq, t, d_v]`` of another layer that reads this layer's cache."""
        device = self._prepare(q)
        turn = self._turn(positions, turn, device)
        for part, here in _blocks(q.shape[1], turn):
            self._add_rows("q", q[:, part], device, here)
            self._add_moment("o", self._wide("rows", o[:, part], device))
        self._query_count += q.shape[0] // self.geometry.kv_heads * q.shape[1]

    def finish(self) -> None:
        """Fold the sequence into the limbs.

        Raises:
            InputError: a sum is not finite or too large; layer, tensor and head are named, nothing was added.
        """
        if self._count == 0:
            return
        for name in ("k", "q", "v", "o"):
            self._refuse_non_finite(name)
        for name, total in self._running.items():
            try:
                self.sums[name].add(total)
            except ValueError as error:
                raise InputError(str(error), where=f"layer {self.geometry.layer}, {name}") from None
        for name, seen in self._running_extrema.items():
            keep = torch.minimum if name.endswith("min") else torch.maximum
            self.extrema[name] = keep(self.extrema[name], seen.to("cpu"))
        self.tokens += self._count
        self.queries += self._query_count
        self.begin()

    def merge(self, other: LayerSums) -> None:
        """Add the sums of other sequences of the same layer; order does not matter, bit for bit.

        Raises:
            InputError: the layers differ, or a sum would overflow.
        """
        if other.geometry != self.geometry or other.sums.keys() != self.sums.keys():
            raise InputError("statistics of different layers do not merge", where=f"layer {self.geometry.layer}")
        for name, total in self.sums.items():
            try:
                total.merge(other.sums[name])
            except ValueError as error:
                raise InputError(str(error), where=f"layer {self.geometry.layer}, {name}") from None
        for name in self.extrema:
            keep = torch.minimum if name.endswith("min") else torch.maximum
            self.extrema[name] = keep(self.extrema[name], other.extrema[name])
        self.tokens += other.tokens
        self.queries += other.queries

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the state: ``NAME.hi``, ``NAME.lo`` int64, extrema float32, ``tokens`` and ``queries`` int64 [1]."""
        arrays = {name: value.numpy() for name, value in self.extrema.items()}
        for name, total in self.sums.items():
            arrays |= {f"{name}.hi": total.hi.numpy(), f"{name}.lo": total.lo.numpy()}
        counts = {"tokens": self.tokens, "queries": self.queries}
        return arrays | {name: np.array([count], dtype=np.int64) for name, count in counts.items()}

    @classmethod
    def from_arrays(
        cls, geometry: LayerGeometry, rope: RopeSpec | None, arrays: Mapping[str, np.ndarray | Tensor]
    ) -> LayerSums:
        """Rebuild a layer from `to_arrays`.

        Raises:
            InputError: an array is missing, unknown, or of the wrong shape or type.
        """
        layer = cls(geometry, rope)
        expected = layer.to_arrays()
        given = {name: torch.as_tensor(array) for name, array in arrays.items()}
        where = f"layer {geometry.layer}"
        if given.keys() != expected.keys():
            raise InputError(f"moments missing or unknown: {sorted(given.keys() ^ expected.keys())}", where=where)
        for name, array in expected.items():
            template = torch.as_tensor(array)
            if given[name].shape != template.shape or given[name].dtype != template.dtype:
                raise InputError(f"moment {name} has the wrong shape or type", where=where)
        for name in layer.sums:
            try:
                layer.sums[name] = ExactSum(given[f"{name}.hi"], given[f"{name}.lo"])
            except ValueError as error:
                raise InputError(str(error), where=f"{where}, {name}") from None
        layer.extrema = {name: given[name] for name in layer.extrema}
        layer.tokens, layer.queries = int(given["tokens"][0]), int(given["queries"][0])
        return layer

    def _prepare(self, rows: Tensor) -> torch.device:
        device = rows.device if rows.device.type in ("cpu", "cuda") else torch.device("cpu")
        if not self._running:
            self._running = {
                name: torch.zeros(total.hi.shape, dtype=torch.float64, device=device)
                for name, total in self.sums.items()
            }
        return next(iter(self._running.values())).device

    def _turn(self, positions: Tensor, turn: Turn | None, device: torch.device) -> Turn | None:
        if self.rope is None:
            return None
        if turn is None:
            turn = turn_table(self.rope, positions)
        return Turn(turn.cos.to(device), turn.sin.to(device))

    def _no_extrema(self) -> dict[str, Tensor]:
        heads, dims = self.geometry.kv_heads, {"k": self.geometry.d_k, "v": self.geometry.d_v}
        return {
            f"{rows}_{end}": torch.full((heads, d), start)
            for rows, d in dims.items()
            for end, start in _EXTREMA.items()
        }

    def _wide(self, name: str, rows: Tensor, device: torch.device) -> Tensor:
        """Copy ``[heads, t, d]`` into float64 ``[H, group * t, d]``."""
        heads, d = self.geometry.kv_heads, rows.shape[-1]
        buffer = self._workspace.take(name, tuple(rows.shape), device)
        return buffer.copy_(rows).view(heads, -1, d)

    def _add_rows(self, name: str, rows: Tensor, device: torch.device, turn: Turn | None) -> None:
        wide = self._wide("rows", rows, device)
        self._add_moment(name, wide)
        self._add_sum(name, wide)
        if name != "q":
            for end, pick in (("min", torch.amin), ("max", torch.amax)):
                keep = torch.minimum if end == "min" else torch.maximum
                key = f"{name}_{end}"
                seen = pick(rows, dim=1).to(device, torch.float32)
                self._running_extrema[key] = keep(self._running_extrema[key].to(device), seen)
        if turn is not None and self.rope is not None:
            back = self._workspace.take("back", tuple(rows.shape), device)
            apply_turn(wide.view(rows.shape), self.rope, turn, inverse=True, out=back)
            back = back.view(wide.shape)
            self._add_moment(f"{name}0", back)
            self._add_sum(f"{name}0", back)

    def _add_moment(self, name: str, wide: Tensor) -> None:
        self._running[f"{name}_moment"].baddbmm_(wide.transpose(1, 2), wide)

    def _add_sum(self, name: str, wide: Tensor) -> None:
        # A product with ones: unlike sum(), its order of additions does not depend on the number of threads.
        ones = torch.ones(1, 1, 1, dtype=wide.dtype, device=wide.device).expand(wide.shape[0], 1, wide.shape[1])
        self._running[f"{name}_sum"].unsqueeze(1).baddbmm_(ones, wide)

    def _refuse_non_finite(self, name: str) -> None:
        energy = torch.diagonal(self._running[f"{name}_moment"], dim1=-2, dim2=-1)
        bad = ~torch.isfinite(energy).all(dim=-1)
        if bad.any():
            head = int(bad.nonzero()[0])
            raise InputError(
                f"{name} is not finite",
                where=f"layer {self.geometry.layer}, KV head {head}",
                fix="check the weights, or collect in a wider dtype (--dtype float32)",
            )


def _blocks(tokens: int, turn: Turn | None) -> Iterator[tuple[slice, Turn | None]]:
    for start in range(0, tokens, BLOCK):
        part = slice(start, min(start + BLOCK, tokens))
        yield part, None if turn is None else Turn(turn.cos[part], turn.sin[part])
