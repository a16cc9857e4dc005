"""Statistics that agree with their header: every tensor has a known name and the shape that the geometry calls for.

Checked before anything is computed, so that what a header claims (a head dimension of a million) never decides how
much memory is taken: the tensors it describes must be in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from kvcq.artifacts.tensor_file import TensorFile
from kvcq.errors import CorruptArtifactError
from kvcq.spec.geometry import LayerGeometry
from kvcq.spec.header import StatsHeader

MOMENT = re.compile(r"layers\.(\d{1,9})\.(?:([kqvo])0?_(sum|moment|min|max)(\.hi|\.lo)?|tokens|queries)")
ROWS = re.compile(r"layers\.(\d{1,9})\.rows\.([kqv])")
PROBE = re.compile(r"probe\.(\d{1,9})\.(?:layers\.(\d{1,9})\.([kqv])|positions|q_index)")
SHARED = ("rows.hashes", "rows.index", "rows.positions", "rows.sequence")


def check_stats(header: StatsHeader, moments: TensorFile, samples: TensorFile, where: str) -> None:
    """Check names, shapes and indices of all tensors against the header.

    Raises:
        CorruptArtifactError: a tensor of no layer or of another shape, a layer without moments, rows of different
            numbers, or an index beyond what it points into.
    """
    layers = {layer.layer: layer for layer in header.geometry.quantizable()}
    for name, shape in _shapes(moments):
        match = MOMENT.fullmatch(name)
        layer = _layer(layers, match and match[1], name, where)
        kind, form = (match[2], match[3]) if match else (None, None)
        dim = layer.d_v if kind in ("v", "o") else layer.d_k
        wanted = (1,) if kind is None else (layer.kv_heads, *((dim, dim) if form == "moment" else (dim,)))
        _expect(shape == wanted, name, shape, where)
    for number in layers:
        if f"layers.{number}.k_moment.hi" not in moments.entries:
            raise CorruptArtifactError(f"layer {number} has no moments", where=where)
    _check_rows(header, samples, layers, where)


def _check_rows(header: StatsHeader, samples: TensorFile, layers: dict[int, LayerGeometry], where: str) -> None:
    counts = {name: samples.entries[name].shape for name in SHARED if name in samples.entries}
    if len(set(counts.values())) > 1 or any(len(shape) != 1 for shape in counts.values()):
        raise CorruptArtifactError("the sampled rows have different numbers of entries", where=where)
    rows = next(iter(counts.values()), (0,))[0]
    for name, shape in _shapes(samples):
        if name in SHARED:
            continue
        own, probe = ROWS.fullmatch(name), PROBE.fullmatch(name)
        if own is not None:
            layer = _layer(layers, own[1], name, where)
            heads, dim = _side(layer, own[2])
            fits = len(shape) == 3 and shape[::2] == (heads, dim)
            _expect(fits and (shape[1] <= rows if own[2] == "q" else shape[1] == rows), name, shape, where)
        elif probe is not None and int(probe[1]) < len(header.probe):
            positions = samples.entries.get(f"probe.{probe[1]}.{'q_index' if probe[3] == 'q' else 'positions'}")
            count = positions.shape if positions is not None else ()
            if probe[2] is None:
                _expect(len(shape) == 1, name, shape, where)
            else:
                heads, dim = _side(_layer(layers, probe[2], name, where), probe[3])
                _expect(shape == (heads, *count, dim), name, shape, where)
        else:
            raise CorruptArtifactError(f"tensor {name} belongs to no layer", where=where)
    _check_indices(header, samples, where)


def _check_indices(header: StatsHeader, samples: TensorFile, where: str) -> None:
    limits: dict[str, int] = {"rows.sequence": len(header.sequences)}
    for i in range(len(header.probe)):
        if f"probe.{i}.positions" in samples.entries:
            limits[f"probe.{i}.q_index"] = samples.entries[f"probe.{i}.positions"].shape[0]
    for name in samples.entries:
        if name in SHARED or name.endswith((".positions", ".q_index")):
            array = samples.as_numpy(name)
            if array.dtype.kind not in "iu":
                raise CorruptArtifactError(f"tensor {name} is {array.dtype}, not whole numbers", where=where)
            limit = limits.get(name, np.iinfo(np.int32).max)
            if name != "rows.hashes" and array.size and not 0 <= int(array.min()) <= int(array.max()) < limit:
                raise CorruptArtifactError(f"tensor {name} points beyond {limit} entries", where=where)


def _shapes(file: TensorFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, entry.shape) for name, entry in file.entries.items())


def _side(layer: LayerGeometry, side: str) -> tuple[int, int]:
    return layer.q_heads if side == "q" else layer.kv_heads, layer.d_v if side == "v" else layer.d_k


def _layer(layers: Mapping[int, LayerGeometry], number: str | None, name: str, where: str) -> LayerGeometry:
    if number is None or str(int(number)) != number or int(number) not in layers:
        raise CorruptArtifactError(f"tensor {name} belongs to no layer of the model", where=where)
    return layers[int(number)]


def _expect(fits: bool, name: str, shape: tuple[int, ...], where: str) -> None:
    if not fits:
        raise CorruptArtifactError(f"tensor {name} has shape {list(shape)}, unlike the model's heads", where=where)
