"""What validate measures: a fit or a bundle, reduced to what both say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcq.artifacts.bundle import Bundle
from kvcq.artifacts.fit_file import FitArtifact
from kvcq.artifacts.verify import read_any
from kvcq.codecs.pair import HeadCodec
from kvcq.errors import InputError
from kvcq.runtime.codecs import served_codecs
from kvcq.spec.files import TensorEntry
from kvcq.spec.geometry import ModelGeometry
from kvcq.spec.header import FitHeader
from kvcq.spec.identity import Identity, Provenance
from kvcq.spec.manifest import Manifest
from kvcq.spec.plan import LayerPlan, Windows

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Subject:
    """One artifact under measurement; `tensors` by full name."""

    name: str
    method: str
    windows: Windows
    target_context: int
    identity: Identity
    provenance: Provenance
    geometry: ModelGeometry
    plan: tuple[LayerPlan, ...]
    index: tuple[TensorEntry, ...]
    tensors_digest: str
    tensors: dict[str, np.ndarray]

    @property
    def quantized(self) -> tuple[int, ...]:
        """Ids of the layers that are stored in codes."""
        return tuple(entry.layer for entry in self.plan if entry.quantized)

    def codecs(self, device: torch.device | str) -> dict[int, HeadCodec]:
        """Build the codecs of the quantized layers in the dtype that serving holds them in."""
        return served_codecs(self.plan, self.geometry, self.tensors, device)


def open_subjects(paths: Sequence[Path]) -> list[Subject]:
    """Read fits and bundles, verified, and name them by their folders.

    Raises:
        InputError: none given, or a path that is neither a fit nor a bundle.
        CorruptArtifactError: a damaged artifact.
    """
    if not paths:
        raise InputError("no artifact to validate", fix="name at least one fit folder or bundle")
    subjects: list[Subject] = []
    for path in paths:
        name = path.resolve().name.removesuffix(".kvcq")
        taken = {subject.name for subject in subjects}
        numbered = (f"{name}-{number}" for number in count(2))
        subjects.append(_open(path, name if name not in taken else next(n for n in numbered if n not in taken)))
    return subjects


def subject_of(name: str, header: FitHeader | Manifest, tensors: dict[str, np.ndarray]) -> Subject:
    """Return what is measured of an artifact, by its header and its tensors by full name."""
    return Subject(
        name=name,
        method=header.recipe.method,
        windows=header.recipe.windows,
        target_context=header.target_context,
        identity=header.identity,
        provenance=header.provenance,
        geometry=header.geometry,
        plan=header.plan,
        index=header.tensors,
        tensors_digest=header.tensors_digest,
        tensors=tensors,
    )


def _open(path: Path, name: str) -> Subject:
    artifact = read_any(path)
    header: FitHeader | Manifest
    if isinstance(artifact, FitArtifact):
        header = artifact.header
    elif isinstance(artifact, Bundle):
        header = artifact.manifest
    else:
        raise InputError("neither a fit nor a bundle", where=path, fix="name a folder written by kvcq fit or pack")
    return subject_of(name, header, artifact.tensors)
