"""What differs between two artifacts: header fields by dotted path, then tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.fit_file import FitArtifact
from kvcq.artifacts.report_file import ReportArtifact
from kvcq.artifacts.scores_file import ScoresArtifact
from kvcq.artifacts.stats_file import StatsArtifact
from kvcq.artifacts.verify import Artifact, read_any
from kvcq.spec.compare import flatten

# They follow from everything else, and would repeat every difference as an unreadable hash.
DERIVED = frozenset({"digest", "files", "tensors", "tensors_digest", "format"})


@dataclass(frozen=True)
class Difference:
    """One field; None stands for absent. `error` is max |left - right| of a tensor present in both, same shape."""

    field: str
    left: Any
    right: Any
    error: float | None = None


def diff(a: Path, b: Path) -> list[Difference]:
    """Compare two artifacts; of different kinds, only the fields that both have.

    Returns:
        Differences of the headers in order of their dotted path, then those of tensors; empty when equal.

    Raises:
        InputError, CorruptArtifactError, MismatchError: see `read_any`.
    """
    left, right = read_any(a), read_any(b)
    fields = _fields(left), _fields(right)
    if type(left) is not type(right):
        common = set(fields[0]) & set(fields[1])
        fields = tuple({key: side[key] for key in common} for side in fields)  # type: ignore[assignment]
    flat = flatten(fields[0]), flatten(fields[1])
    found = [
        Difference(path, flat[0].get(path), flat[1].get(path))
        for path in sorted(set(flat[0]) | set(flat[1]))
        if flat[0].get(path) != flat[1].get(path)
    ]
    return found + _tensor_differences(_tensors(left), _tensors(right))


def _fields(artifact: Artifact) -> dict[str, Any]:
    if isinstance(artifact, Bundle):
        header = artifact.manifest.plain()
    elif isinstance(artifact, ReportArtifact | ScoresArtifact):
        header = artifact.report.plain()
    else:
        header = artifact.header.plain()
    return {key: value for key, value in header.items() if key not in DERIVED}


def _tensors(artifact: Artifact) -> Mapping[str, np.ndarray]:
    if isinstance(artifact, StatsArtifact):
        return {**artifact.moments, **artifact.sample_file.arrays()}
    if isinstance(artifact, FitArtifact | Bundle):
        return artifact.tensors
    if isinstance(artifact, ScoresArtifact):
        return {}
    return {f"{file}.{name}": array for file, arrays in artifact.canaries.items() for name, array in arrays.items()}


def _tensor_differences(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> list[Difference]:
    found = []
    for name in sorted(set(left) | set(right)):
        a, b = left.get(name), right.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            found.append(Difference(name, _describe(a), _describe(b)))
        elif not np.array_equal(a, b):
            error = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
            found.append(Difference(name, _describe(a), _describe(b), error))
    return found


def _describe(array: np.ndarray | None) -> str | None:
    return None if array is None else f"{array.dtype} {list(array.shape)}"
